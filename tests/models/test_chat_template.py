"""Chat templates: the right text, clear refusals, and no template that can hang or fill this process."""

from __future__ import annotations

import gc
import json
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from outrider.core.errors import ModelFileError, SettingError
from outrider.models import chat_template, chat_worker
from outrider.models.chat_template import ChatTemplate, chat_template_from_folder, chat_template_from_metadata
from outrider.models.load import open_model

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
RICH = """{{- bos_token }}
{%- macro show(tool) %}{{ tool | tojson(indent=2) }}{% endmacro %}
{% if tools is not none and tools %}
    <tools>
    {%- for tool in tools %}

    {{ show(tool) }}{% if not loop.last %},{% endif %}
    {% endfor %}
    </tools>
{% endif %}
{%- set ns = namespace(turns=0) %}
{% for message in messages %}
  {% if message.role == 'skip' %}{% continue %}{% endif %}
  {% set ns.turns = ns.turns + 1 %}
{{ loop.index0 }}:{{ message.role | upper }}={{ message.content.strip().split('\\n')[0] | trim | tojson }}
  {% if message.role == 'assistant' %}{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}
  {% endif %}
  {%- if ns.turns > 3 %}{% break %}{% endif %}
{% endfor %}
{{ 'GO' if add_generation_prompt else '' }}{{ documents is none }}{{ undefined_name }}
"""
CHAT = [
    {"role": "system", "content": "Be <brief> & 'kind' \"é\"."},
    {"role": "user", "content": "  hi {{ x }}\nsecond 😀\n"},
    {"role": "skip", "content": ""},
    {"role": "assistant", "content": "héllo"},
    {"role": "user", "content": "{% if %}"},
    {"role": "user", "content": "never shown"},
]
HI = [{"role": "user", "content": "hi"}]
TOOLS = [{"name": "f", "parameters": {"z": 1, "a": ["<é>"]}}, {"name": "g"}]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def transformers_text(source: str, messages: list[Any], add_generation_prompt: bool, tools: Any) -> str:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    text = utils.render_jinja_template(
        [messages], tools=tools, chat_template=source, add_generation_prompt=add_generation_prompt, **TOKENS
    )[0][0]
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("source", [CHATML, RICH])
def test_text_is_transformers_text(source: str, tools: Any, prompt: bool) -> None:
    ours = ChatTemplate(source, TOKENS).render(CHAT, add_generation_prompt=prompt, tools=tools)
    assert ours == transformers_text(source, CHAT, prompt, tools)
    assert "héllo" in ours


def test_text() -> None:
    assert ChatTemplate(CHATML, {}).render(HI) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert ChatTemplate("{{ [bos_token, '<é>'] | tojson }}", TOKENS).render(HI) == '["<s>", "<é>"]'
    assert ChatTemplate("{{ strftime_now('%Y') | int > 2000 }}", {}).render(HI) == "True"
    assert ChatTemplate("{{ messages[0].content }}", {}).render([{"role": "user", "content": "a\ud800\0b"}]) == (
        "a\ud800\0b"
    )


@pytest.mark.model
def test_default_models_template(smollm2_path: Path) -> None:
    template = open_model(smollm2_path).chat_template
    assert template is not None
    assert template.tokens["eos_token"] == "<|im_end|>"
    for chat in (HI, CHAT):
        assert template.render(chat) == transformers_text(template.source, chat, True, None)
    assert template.render(HI) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ("hi", "messages is of type str; allowed is a list"),
        (HI[0], "messages is of type dict"),
        (None, "messages is of type NoneType"),
        ([], "messages is an empty list"),
        ([HI[0], "x"], r"messages\[1\] is of type str; allowed is an object"),
        ([HI[0], {"role": "user"}], r"messages\[1\] has no 'content'"),
        ([{"content": "x"}], r"messages\[0\] has no 'role'"),
        ([HI[0], HI[0], {"role": "user", "content": None}], r"messages\[2\]\.content is of type NoneType; allowed"),
        ([{"role": 1, "content": "x"}], r"messages\[0\]\.role is of type int"),
        ([{"role": "user", "content": "x", "when": object()}], "must be JSON values"),
        ([{"role": "user", "content": "x" * (1 << 23)}], "have 8388612 characters; allowed are 4194304"),
    ],
)
def test_malformed_messages_are_refused(messages: Any, error: str) -> None:
    with pytest.raises(SettingError, match=error):
        ChatTemplate(CHATML, {}).render(messages)


def test_the_templates_own_refusal() -> None:
    source = "{% if messages[0].role == 'system' %}{{ raise_exception('no\n  system role') }}{% endif %}ok"
    template = ChatTemplate(source, {})
    with pytest.raises(SettingError, match=r"^the model's chat template refuses the messages: no system role$"):
        template.render([{"role": "system", "content": ""}])
    assert template.render(HI) == "ok"  # and goes on


MEMORY = "needs more than 512 MiB of memory"
BROKEN = {
    "{% for %}": "line 1: Expected an expression",
    "ok\n{% if x %}": "line 2: Unexpected end of template",
    "{{ nobody.there }}": "'nobody' is undefined",
    "{{ 1 / 0 }}": "division by zero",
    "{% include 'x' %}": "no loader",
    "{{ ''.__class__.__mro__ }}": "'__class__' of 'str' object is unsafe",
    "{{ messages.append(1) }}": "unsafe|not safely callable",
    "{{ cycler.__init__.__globals__ }}": "unsafe",
    "{{ " + "(" * 5000 + ")" * 5000 + " }}": "nested too deeply",
    "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}": "nested too deeply",
    "{{ range(10 ** 9) | length }}": "Range too big",
    "{% for i in range(99999) %}{{ 'a' * 99 }}{% endfor %}": "writes more than 4194304 characters",
    "{{ 'a' * 5000000 }}": "writes more than 4194304 characters",
    "{% set x = 'a' * 10 ** 10 %}": MEMORY,
    "{{ 'a' * 10 ** 10 if false else 1 / 0 }}": "division by zero",
    "{{ '%1000000000d' % 1 }}": MEMORY,
    "{{ '%1000000000d' | format(1) }}": MEMORY,
    "{{ '{:1000000000}'.format(1) }}": MEMORY,
    "{{ 'a' | center(10 ** 9) }}": MEMORY,
    "{{ 'a'.ljust(10 ** 9) }}": MEMORY,
    "{{ range(99999) | join('a' * 99999) }}": MEMORY,
    "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}": MEMORY,
}


def test_broken_and_greedy_templates_are_refused() -> None:
    for source, error in BROKEN.items():
        if error == MEMORY and sys.platform != "linux":
            continue  # other systems do not limit a process' memory; the time limit is what remains
        with pytest.raises(ModelFileError, match=error) as caught:
            ChatTemplate(source, {}).render(HI)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 400


ENDLESS = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% set n = namespace(x=3) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",  # inside C code
    "{% set x = 3 ** (3 ** 18) %}{{ x | string }}",
    "{% set n = namespace(a=[1], b=[1]) %}{% for i in range(60) %}{% set n.a = [n.a, n.a] %}{% set n.b = [n.b, n.b] %}"
    "{% endfor %}{{ n.a == n.b }}",
    "{{ [1] | slice(10 ** 11) | list }}",
)


def _refused_for_time(source: str) -> float:
    template = ChatTemplate(source, {})
    start = time.perf_counter()
    with pytest.raises(ModelFileError, match=r"^the chat template took longer than [0-9.]+ s; it cannot be used$"):
        template.render(HI)
    return time.perf_counter() - start


def test_the_time_limit_is_two_seconds() -> None:
    assert _refused_for_time(ENDLESS[0]) >= 2.0


def test_only_computing_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that gets no processor, here because it is stopped, is waited for."""
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.4)
    template = ChatTemplate(CHATML, {})
    expected = template.render(HI)
    process = _process(template)
    process.send_signal(signal.SIGSTOP)
    timer = threading.Timer(0.8, process.send_signal, [signal.SIGCONT])
    timer.start()
    assert template.render(HI) == expected
    assert _process(template) is process
    timer.join()


def test_a_process_that_neither_computes_nor_answers_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate(CHATML, {})
    template.render(HI)
    _process(template).send_signal(signal.SIGSTOP)
    monkeypatch.setattr(chat_template, "MAX_WALL_SECONDS", 0.2)
    with pytest.raises(ModelFileError, match=r"took longer than 0\.2 s"):
        template.render(HI)


def test_modules_beside_the_worker_do_not_shadow_the_standard_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Path(chat_worker.__file__)
    (tmp_path / worker.name).write_text(worker.read_text())
    for name in ("json", "datetime", "functools", "runpy", "jinja2"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('shadowed')")
    monkeypatch.setattr(chat_worker, "__file__", str(tmp_path / worker.name))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert ChatTemplate("ok", {}).render(HI) == "ok"


def test_endless_templates_are_stopped_in_any_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.4)
    with ThreadPoolExecutor(2) as threads:
        assert len(list(threads.map(_refused_for_time, ENDLESS))) == len(ENDLESS)


def test_a_stopped_template_can_be_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.4)
    source = "{% if messages[0].content == 'hang' %}" + ENDLESS[0] + "{% endif %}ok"
    template = ChatTemplate(source, {})
    for content in ("a", "hang", "b"):
        if content == "hang":
            with pytest.raises(ModelFileError, match="took longer than"):
                template.render([{"role": "user", "content": content}])
        else:
            assert template.render([{"role": "user", "content": content}]) == "ok"


def _process(template: ChatTemplate) -> subprocess.Popen[str]:
    assert template._worker is not None
    return template._worker._process


def test_the_process_is_kept_replaced_and_ended() -> None:
    template = ChatTemplate(CHATML, {})
    expected = template.render(HI)
    process = _process(template)
    template.render(HI)
    assert _process(template) is process
    process.kill()  # as the system may do when memory runs out
    process.wait()
    assert template.render(HI) == expected
    second = _process(template)
    assert second is not process
    del template
    gc.collect()
    assert second.returncode is not None


def test_threads_take_turns() -> None:
    template = ChatTemplate("{% for i in range(2000) %}{{ messages[0].content }}{% endfor %}", {})
    results: dict[str, str] = {}

    def render(name: str) -> None:
        results[name] = template.render([{"role": "user", "content": name}])

    threads = [threading.Thread(target=render, args=(name,)) for name in "abcdefgh"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {name: name * 2000 for name in "abcdefgh"}


def test_no_process_means_a_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    with pytest.raises(ModelFileError, match="the process that renders chat templates does not start"):
        ChatTemplate(CHATML, {}).render(HI)


def test_size_limit() -> None:
    ChatTemplate("x" * (256 << 10), {})
    with pytest.raises(ModelFileError, match="has 262145 bytes; allowed are 262144"):
        ChatTemplate("x" * ((256 << 10) + 1), {})


# Loading


def test_folders(tmp_path: Path) -> None:
    assert chat_template_from_folder(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    tokens = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None}

    def loaded(template: object) -> ChatTemplate:
        config.write_text(json.dumps({**tokens, "chat_template": template}))
        found = chat_template_from_folder(tmp_path)
        assert found is not None
        return found

    assert loaded("one").source == "one"
    assert loaded("one").tokens == TOKENS
    named = [{"name": "tool_use", "template": "two"}, {"name": "default", "template": "three"}]
    assert loaded(named).source == "three"
    with pytest.raises(ModelFileError, match="has the templates tool_use as chat template; expected"):
        loaded(named[:1])
    with pytest.raises(ModelFileError, match="has a int as chat template"):
        loaded(3)
    (tmp_path / "chat_template.jinja").write_text("four é", encoding="utf-8")
    assert loaded("one").source == "four é"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelFileError, match="not UTF-8"):
        loaded("one")
    config.write_text("{")
    with pytest.raises(ModelFileError, match="is not a readable JSON file"):
        chat_template_from_folder(tmp_path)


def test_metadata() -> None:
    assert chat_template_from_metadata({}) is None
    found = chat_template_from_metadata(
        {
            "tokenizer.chat_template": CHATML,
            "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>"],
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.unknown_token_id": 0,
            "tokenizer.ggml.eos_token_id": 0xFFFFFFFF,
        }
    )
    assert found is not None
    assert found.tokens == {"bos_token": "<s>", "unk_token": "<unk>"}
    with pytest.raises(ModelFileError, match="has a int as chat template"):
        chat_template_from_metadata({"tokenizer.chat_template": 3})
