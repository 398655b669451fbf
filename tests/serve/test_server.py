"""A real server on the loopback, with real clients."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from outrider import LLM, SamplingParams
from outrider.cli.main import main
from outrider.core.errors import SettingError
from outrider.serve.settings import ServerSettings
from tests.serve.serving import PATIENCE, real_server

TALK: list[Any] = [{"role": "user", "content": "the pass the pass the"}]
ENDLESS = {"prompt": "x", "max_tokens": 900, "ignore_eos": True, "temperature": 0}


def test_the_openai_client_works_unchanged(llm: LLM) -> None:
    openai = pytest.importorskip("openai")
    want = llm.chat(TALK, SamplingParams(temperature=0, max_tokens=16))[0]
    with real_server(llm.engine, api_key=("one", "two")) as (url, _):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="two", timeout=PATIENCE, max_retries=0)
        assert [model.id for model in client.models.list()] == ["tiny"]
        asked: dict[str, Any] = {"model": "tiny", "messages": TALK, "temperature": 0, "max_tokens": 16}
        whole = client.chat.completions.create(**asked)
        assert whole.choices[0].message.content == want.text
        assert whole.usage.completion_tokens == len(want.token_ids)
        guess = {"type": "content", "content": want.text}
        helped = client.chat.completions.create(**asked, prediction=guess, user="me", store=False)
        assert helped.choices[0].message.content == want.text
        assert helped.usage.completion_tokens_details.accepted_prediction_tokens >= 0
        chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == want.text
        assert chunks[-1].usage.completion_tokens == len(want.token_ids)
        probable = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
        assert len(probable.choices[0].logprobs.content) == len(want.token_ids)
        old = client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=3, n=2)
        assert [choice.index for choice in old.choices] == [0, 1, 2, 3]
        off = client.completions.create(model="tiny", prompt="a", extra_body={"speculative": {"enabled": False}})
        assert off.usage.completion_tokens_details.accepted_prediction_tokens == 0
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="another", prompt="a")
        with pytest.raises(openai.BadRequestError) as bad:
            client.completions.create(model="tiny", prompt="a", temperature=-1)
        assert bad.value.param == "temperature"
        stranger = openai.OpenAI(base_url=f"{url}/v1", api_key="three", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            stranger.models.list()


def test_a_client_that_goes_away_frees_its_blocks(llm: LLM) -> None:
    def idle() -> bool:
        deadline = time.monotonic() + PATIENCE
        while llm.engine.has_work and time.monotonic() < deadline:
            time.sleep(0.005)
        return not llm.engine.has_work and llm.engine.blocks.n_free == llm.engine.blocks.n_blocks

    with real_server(llm.engine) as (url, _), httpx.Client(base_url=url, timeout=PATIENCE) as client:
        aborted = llm.engine.metrics.requests_aborted
        with client.stream("POST", "/v1/completions", json={**ENDLESS, "stream": True}) as reply:
            next(reply.iter_bytes())
        assert idle()
        assert llm.engine.metrics.requests_aborted == aborted + 1
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/completions", json={**ENDLESS, "n": 4}, timeout=0.1)
        assert idle()
        assert llm.engine.metrics.requests_aborted == aborted + 2


def test_what_goes_wrong_before_a_request_is_whole(llm: LLM) -> None:
    with real_server(llm.engine) as (url, _):
        host, port = url.removeprefix("http://").split(":")
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"
        for sent in (b"", b"nonsense\r\n\r\n", head, head + b'{"prompt":'):
            with socket.create_connection((host, int(port))) as raw:
                raw.sendall(sent)
        assert httpx.get(f"{url}/ready").status_code == 200


def test_keys_and_origins(llm: LLM) -> None:
    origin = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    with real_server(llm.engine, api_key=("secret",), cors_origin=("https://page.example",)) as (url, _):
        for headers in (
            {},
            {"Authorization": "secret"},
            {"Authorization": "Bearer secre"},
            {"Authorization": "Bearer"},
        ):
            reply = httpx.get(f"{url}/v1/models", headers=headers)
            assert reply.status_code == 401, headers
            assert reply.json()["error"]["code"] == "invalid_api_key"
        assert httpx.get(f"{url}/v1/models", headers={"Authorization": "bearer secret"}).status_code == 200
        assert httpx.get(f"{url}/health").status_code == 200
        allowed = httpx.options(f"{url}/v1/completions", headers=origin)
        assert allowed.headers["access-control-allow-origin"] == "https://page.example"
        other = httpx.options(f"{url}/v1/completions", headers={**origin, "Origin": "https://other.example"})
        assert "access-control-allow-origin" not in other.headers
    with real_server(llm.engine) as (url, _):
        foreign = httpx.post(f"{url}/v1/completions", headers=origin, content='{"prompt": "x"}')
        assert foreign.status_code == 403
        assert "access-control-allow-origin" not in foreign.headers
        own = httpx.post(f"{url}/v1/completions", headers={"Origin": url}, content='{"prompt": "x"}')
        assert own.status_code == 200


def test_keys_come_from_file_and_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\n\nfirst\n second \n")
    settings = ServerSettings(api_key=("flag",), api_key_file=str(file))
    assert settings.with_keys({"OUTRIDER_API_KEY": "env"}).api_key == ("flag", "env", "first", "second")
    file.write_text("# none\n")
    for bad in (file, tmp_path / "missing"):
        with pytest.raises(SettingError, match="api_key_file"):
            ServerSettings(api_key_file=str(bad)).with_keys({})


def test_the_command_serves_until_a_signal(folder: str) -> None:
    """Requests that run when the signal comes are finished; the exit code says that all is well."""
    command = [
        sys.executable,
        "-m",
        "outrider",
        "serve",
        folder,
        "--port",
        "0",
        "--kv-cache-mib",
        "16",
        "--grace",
        "20",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        try:
            lines: list[str] = []
            while not lines or " is served at " not in lines[-1]:
                lines.append(process.stderr.readline())
                assert lines[-1], lines
            assert any("drafter suffix with as many draft tokens as pay" in line for line in lines)
            url = lines[-1].split(" is served at ")[1].split("/v1")[0]
            shown = httpx.get(f"{url}/v1/speculation").json()
            assert shown["enabled"]
            assert shown["drafter"] == "suffix"
            body = {**ENDLESS, "max_tokens": 60, "stream": True}
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE) as reply:
                parts = reply.iter_text()
                text = next(parts)
                process.send_signal(signal.SIGTERM)
                text += "".join(parts)
            assert text.endswith("data: [DONE]\n\n")
            assert json.loads(text.split("\n\n")[-3][6:])["choices"][0]["finish_reason"] == "length"
            assert process.wait(PATIENCE) == 0
            rest = process.stderr.read()
            assert "Traceback" not in rest
            assert any("request id=" in line and "finish_reason=length" in line for line in rest.splitlines())
        finally:
            process.kill()


def test_a_package_that_is_missing_is_one_line(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.cli.serve.NEEDED", ("no_such_package",))
    assert main(["serve", folder]) == 2
    assert "pip install 'outrider[serve]'" in capsys.readouterr().err


def test_a_port_that_is_taken_is_one_line(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["serve", folder, "--port", str(taken.getsockname()[1])]) == 2
    err = capsys.readouterr().err
    assert "cannot listen" in err
    assert err.count("\n") == 1
    assert main(["serve", folder, "--port", "-1"]) == 2
    assert "port is -1" in capsys.readouterr().err


def test_repeated_flags_are_settings(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ServerSettings] = []

    class EnoughError(Exception):
        pass

    def bind(settings: ServerSettings) -> None:
        seen.append(settings)
        raise EnoughError

    monkeypatch.setattr("outrider.serve.run.bind", bind)
    flags = ["--api-key", "a", "--api-key", "b", "--cors-origin", "https://page.example"]
    with pytest.raises(EnoughError):
        main(["serve", folder, *flags])
    assert seen[0].api_key == ("a", "b")
    assert seen[0].cors_origin == ("https://page.example",)


def test_a_key_that_no_header_can_carry_is_refused() -> None:
    for key in ("schl\u00fcssel", "two words"):
        with pytest.raises(SettingError, match="api_key holds a character"):
            ServerSettings(api_key=(key,))


def test_a_name_that_is_made_to_lead_here_is_not_ours(llm: LLM) -> None:
    """DNS rebinding: a page of another name, which now leads to this machine, is of the same origin to a browser."""
    with real_server(llm.engine) as (url, _):
        port = url.rpartition(":")[2]
        rebound = {"Host": f"evil.example:{port}", "Origin": f"http://evil.example:{port}"}
        assert httpx.get(f"{url}/v1/models", headers=rebound).status_code == 403
        for host in (f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}"):
            assert httpx.get(f"{url}/v1/models", headers={"Host": host}).status_code == 200
    with real_server(llm.engine, api_key=("secret",)) as (url, _):
        known = {**rebound, "Authorization": "Bearer secret"}
        assert httpx.get(f"{url}/v1/models", headers={**known, "Origin": f"http://{known['Host']}"}).status_code == 200


def test_tenants_do_not_find_each_others_prompts(llm: LLM) -> None:
    with real_server(llm.engine, api_key=("one", "two")) as (url, _):

        def cached(key: str) -> int:
            body = {"prompt": "a prompt of one tenant, and of nobody else", "max_tokens": 1}
            reply = httpx.post(f"{url}/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
            found: int = reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            return found

        assert [cached("one") > 0, cached("one") > 0, cached("two") > 0] == [False, True, False]
