"""The commands as a person or a script would call them, on a small model folder."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from outrider.cli.main import main
from outrider.core.dist import Dist
from outrider.core.draft import Draft
from outrider.core.types import Draws, Verdict
from outrider.models.load import LoadedModel, load_model
from outrider.spec.registry import DRAFTERS
from tests.tiny import write_tiny_model

SMALL = ["--kv-cache-mib", "16", "--max-tokens", "16"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny"), context=1024))


def test_generate_json_has_every_field(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", folder, "Numbers: ", "--json", *SMALL]) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result) == {"text", "token_ids", "finish_reason", "usage", "speculation", "seconds"}
    assert set(result["speculation"]) == {
        "drafter",
        "steps",
        "drafted",
        "accepted",
        "tokens_per_step",
        "accepted_per_position",
    }
    assert set(result["seconds"]) == {"prefill", "decode"}
    assert result["usage"]["completion_tokens"] == len(result["token_ids"]) == 16
    assert result["finish_reason"] == "length"
    assert result["speculation"]["drafter"] == "ngram"


def test_generate_streams_the_text_and_prints_stats_apart(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", folder, "Numbers: ", "--json", *SMALL]) == 0
    text = json.loads(capsys.readouterr().out)["text"]
    assert main(["generate", folder, "Numbers: ", "--stats", *SMALL]) == 0
    out, err = capsys.readouterr()
    assert out == text + "\n"
    for word in ("tokens per step", "by position", "draft cost", "tokens/s"):
        assert word in err


def test_generate_reads_standard_input(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Numbers: "))
    assert main(["generate", folder, "--json", *SMALL]) == 0
    from_stdin = json.loads(capsys.readouterr().out)["token_ids"]
    assert main(["generate", folder, "Numbers: ", "--json", *SMALL]) == 0
    assert json.loads(capsys.readouterr().out)["token_ids"] == from_stdin


def test_generate_follows_a_prediction(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Given as a text or in a file it is what is drafted; a drafter that makes no use of it is an error."""

    def said(*flags: str) -> dict[str, Any]:
        assert main(["generate", folder, "Numbers: ", "--json", *SMALL, *flags]) == 0
        result: dict[str, Any] = json.loads(capsys.readouterr().out)
        return result

    plain = said("--drafter", "none")
    file = tmp_path / "answer.txt"
    file.write_text(plain["text"] + " and so on", encoding="utf-8")
    for flags in (
        ["--prediction", plain["text"]],
        ["--prediction", f"@{file}"],
        ["--prediction", f"@{file}", "--drafter", "combine", "--combine-parts", "prediction"],
    ):
        result = said(*flags)
        assert result["token_ids"] == plain["token_ids"]
        assert result["speculation"]["accepted"] > 0
    assert said("--prediction", "")["speculation"]["drafter"] == "ngram"
    for flags, why in (
        (["--prediction", "x", "--drafter", "ngram"], "prediction is given; drafter ngram makes no use of it"),
        (["--prediction", "x", "--speculative-config", '{"method": "ngram"}'], "makes no use of it"),
        (["--prediction", f"@{tmp_path / 'none'}"], "the file cannot be read: "),
        (["--prediction", f"@{tmp_path}"], "the file cannot be read: "),
    ):
        assert main(["generate", folder, "Numbers: ", *SMALL, *flags]) == 2
        err = capsys.readouterr().err
        assert why in err
        assert err.count("\n") == 1


def test_flags_and_json_mean_the_same(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.dumps({"method": "draft_model", "model": folder, "num_speculative_tokens": 3})
    seen = []
    for flags in (
        ["--speculative-config", config],
        ["--drafter", "model", "--draft-model", folder, "--num-speculative-tokens", "3"],
    ):
        assert main(["generate", folder, "Numbers: ", "--json", *SMALL, *flags]) == 0
        result = json.loads(capsys.readouterr().out)
        del result["seconds"]
        seen.append(result)
    assert seen[0] == seen[1]
    assert seen[0]["speculation"]["accepted"] == seen[0]["speculation"]["drafted"] > 0


def test_sampling_flags_arrive(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--temperature", "0.9", "--seed", "5", "--n", "2", "--logprobs", "1", "--logit-bias", '{"40": -100}']
    assert main(["generate", folder, "Numbers: ", "--json", *SMALL, *flags, "--stop", "zz", "--stop", "yy"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert len(result["choices"]) == 2
    assert len(result["logprobs"]) == len(result["token_ids"])
    assert 40 not in result["token_ids"]


def test_chat_colours_accepted_draft_tokens(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n/reset\nhello\n/exit\n"))
    flags = ["--drafter", "model", "--draft-model", folder]
    assert main(["chat", folder, "--color", "--stats", *SMALL, *flags]) == 0
    out, err = capsys.readouterr()
    assert "\033[32m" in out
    assert err.count("tokens per step") == 2
    half = len(out) // 2
    assert out[:half] == out[half:]  # after /reset the same question gets the same answer


def test_chat_goes_on_after_a_line_that_is_too_long(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("word " * 2000 + "\nhello\n"))
    assert main(["chat", folder, *SMALL]) == 0
    out, err = capsys.readouterr()
    assert "the prompt has" in err
    assert "/reset starts a new conversation" in err
    assert len(out) > 1


def test_check_says_when_it_proves_nothing(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", folder, "--drafter", "none", "--max-tokens", "2", "--limit", "1"]) == 0
    assert "nothing was drafted" in capsys.readouterr().err
    assert main(["check", folder, "--limit", "0"]) == 2
    assert "--limit is 0" in capsys.readouterr().err


def test_demo_takes_answers_of_one_token(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", folder, "--kv-cache-mib", "16", "--max-tokens", "1"]) == 0
    assert " - " in capsys.readouterr().out


def test_check_finds_the_outputs_identical(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", folder, "--drafter", "ngram", "--json", "--max-tokens", "8", "--kv-cache-mib", "16"]) == 0
    result = json.loads(capsys.readouterr().out)
    counts = {"tokens": result["tokens"], "drafted": result["drafted"]}
    assert result == {"identical": True, "prompts": 6, **counts, "divergences": []}
    assert result["drafted"] > 0
    assert 6 <= result["tokens"] <= 48


def test_check_reads_a_prompt_file(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"category": "c", "turns": [f"text {i}"]}) + "\n" for i in range(10)))
    flags = ["--prompts", str(file), "--limit", "3", "--json", "--max-tokens", "4"]
    assert main(["check", folder, *flags]) == 0
    assert json.loads(capsys.readouterr().out)["prompts"] == 3


def test_demo_prints_a_row_a_prompt(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", folder, "--kv-cache-mib", "16", "--max-tokens", "6"]) == 0
    out = capsys.readouterr().out
    for kind in ("chat", "code", "rewriting", "summarising", "translation", "extraction", "all"):
        assert f"\n{kind} " in out
    assert out.count("identical") >= 7


def test_target_and_drafter_are_quantized_each_for_itself(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []

    def noted(name: str, **settings: Any) -> LoadedModel:
        seen.append(settings["quantization"])
        assert settings["progress"] is not None
        return load_model(name, **settings)

    monkeypatch.setattr("outrider.engine.llm.load_model", noted)
    monkeypatch.setattr("outrider.spec.drafts.model.load_model", noted)
    monkeypatch.setenv("OUTRIDER_PACKED_GIB", "0")
    flags = ["--drafter", "model", "--draft-model", folder, *SMALL]
    assert main(["generate", folder, "x", "--quantize", "int8", *flags]) == 0
    assert main(["generate", folder, "x", "--draft-quantize", "int8", *flags]) == 0
    assert seen == ["int8", None, None, "int8"]


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    assert f"drafters       {', '.join(DRAFTERS)}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--drafter", "ngrm"], "method is 'ngrm'"),
        (["--temperature", "-1"], "temperature is -1.0; allowed is a number >= 0"),
        (["--max-tokens", "0"], "max_tokens is 0; allowed is a whole number >= 1"),
        (["--speculative-config", "{"], "the speculative config is not valid JSON"),
        (["--speculative-config", '{"method": "ngram", "posterior_alpha": 0.3}'], "keeps the target's distribution"),
        (["--prompt-lookup-max", "3", "--drafter", "none"], "--prompt-lookup-max is a setting of drafter ngram"),
        (["--logit-bias", "[1]"], "--logit-bias is '[1]'"),
        (["--drafter", "model"], "drafter model needs --draft-model"),
        (["--drafter", "model", "--draft-model", "nowhere/to/be/found"], "the draft model: "),
        (["--logprobs", "2"], "--logprobs needs --json"),
        (["--logit-bias", '{"3": NaN}'], "logit_bias[3] is nan"),
        (["--prompt-lookup-min", "9"], "prompt_lookup_min is 9; allowed is at most prompt_lookup_max (4)"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    folder: str, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", folder, "x", *flags]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_an_unknown_flag_or_choice_is_one_line(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (["--dtype", "float8"], ["--kv-cache-dtype", "fp8"], ["--no-such-flag"]):
        with pytest.raises(SystemExit) as exit_:
            main(["generate", folder, "x", *flags])
        assert exit_.value.code == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert "--help" in err


def test_a_prompt_is_asked_for_at_a_terminal(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdin", Terminal())
    assert main(["generate", folder]) == 2


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(tmp_path / "nothing.gguf"), "x"]) == 2
    err = capsys.readouterr().err
    assert "nothing.gguf" in err
    assert err.count("\n") == 1


def test_check_reports_where_a_lossy_engine_differs(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control of `outrider check`: a verifier that keeps every draft token must be found out."""

    def keep_all(draft: Draft, rows: Sequence[Dist], draws: Draws, method: str) -> Verdict:
        path = tuple(range(len(draft)))
        return Verdict(path, draws.pick(rows[len(draft)], len(draft) + 1))

    monkeypatch.setattr("outrider.engine.engine.verify", keep_all)
    assert main(["check", folder, "--json", "--max-tokens", "16", "--kv-cache-mib", "16"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert not result["identical"]
    first = result["divergences"][0]
    assert set(first) == {"prompt", "kind", "position", "plain_token", "speculative_token", "margin", "near_tie"}
    assert first["plain_token"] != first["speculative_token"]
    assert first["margin"] > 0
    assert not all(d["near_tie"] for d in result["divergences"])


def test_generate_under_a_grammar(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("llguidance")
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "array", "uniqueItems": true}')
    assert main(["generate", folder, "Numbers: ", "--json-schema", str(schema)]) == 2
    assert "--json-schema cannot be used as a JSON schema: Unimplemented keys" in capsys.readouterr().err
    schema.write_text('{"properties": {"n": {"enum": [12, 34]}}, "required": ["n"], "additionalProperties": false}')
    assert main(["generate", folder, "Numbers: ", "--json-schema", str(schema), "--max-tokens", "99"]) == 0
    assert json.loads(capsys.readouterr().out)["n"] in (12, 34)
    assert main(["generate", folder, "Numbers: ", "--regex", "[ab]{3}", *SMALL]) == 0
    assert capsys.readouterr().out.strip("ab") == "\n"
    for flags, words in (
        (["--regex", "(a"], "--regex cannot be used as a regular expression: unclosed group"),
        (["--json-schema", str(tmp_path / "none.json")], "which cannot be read"),
        (["--json-schema", str(schema), "--regex", "a"], "not allowed with argument"),
    ):
        try:
            code = main(["generate", folder, "Numbers: ", *flags, *SMALL])
        except SystemExit as exit:
            code = int(exit.code or 0)
        assert code == 2
        err = capsys.readouterr().err
        assert words in err
        assert "Traceback" not in err
