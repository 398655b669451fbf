"""``outrider bench`` as a person would call it, on a small model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.bench import harness
from outrider.cli.main import main
from tests.bench.test_report import FIELDS
from tests.tiny import write_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny"), context=1024))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"id": i, "category": "ab"[i // 6], "turns": [f"Numbers: {i} {i}\u2028.", "and?"]} for i in range(12)]
    file.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n", encoding="utf-8")
    return str(file)


def bench(folder: str, *flags: str) -> int:
    return main(["bench", "--model", folder, "--kv-cache-mib", "16", "--max-tokens", "8", *flags])


def test_the_controller_takes_turns_with_fixed_lengths(
    folder: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr("outrider.spec.warmup._steady", lambda times: True)
    out = tmp_path / "out.json"
    assert bench(folder, "--gamma", "2,auto", "--prompts", prompts, "--limit", "2", "--json", str(out)) == 0
    rows = json.loads(out.read_text())["overall"]
    assert [(row["drafter"], row["gamma"]) for row in rows] == [("none", 0), ("ngram", 2), ("ngram", harness.AUTO)]
    assert all(row["identical"] for row in rows)
    assert capsys.readouterr().out.count("\nngram    auto ") == 3 + 1
    assert list((tmp_path / "costs").iterdir())


def test_rows_header_and_table(folder: str, prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    flags = ["--drafters", "ngram,model", "--draft-model", folder, "--gamma", "1,2", "--batch", "1,2", "--threads", "1"]
    assert bench(folder, *flags, "--prompts", prompts, "--limit", "4", "--json", str(out)) == 0
    result = json.loads(out.read_text())
    rows = result["rows"]
    assert all(list(row) == FIELDS for row in rows + result["overall"])
    settings = [("none", 0), ("ngram", 1), ("ngram", 2), ("model", 1), ("model", 2)]
    assert [(r["drafter"], r["gamma"], r["batch"], r["category"]) for r in rows] == [
        (drafter, gamma, batch, category) for batch in (1, 2) for drafter, gamma in settings for category in "ab"
    ]
    assert all(row["identical"] and row["prompts"] == 2 for row in rows)
    tokens = {(row["batch"], row["category"]): row["tokens"] for row in rows if row["drafter"] == "none"}
    assert all(row["tokens"] == tokens[row["batch"], row["category"]] for row in rows)
    header = result["header"]
    assert header["model"]["bytes"] == sum(p.stat().st_size for p in Path(folder).iterdir())
    assert len(header["model"]["sha256"]) == 64
    assert header["engine"]["threads"] == header["threads"] == 1
    assert header["engine"]["enable_prefix_caching"] is False
    assert header["settings"]["gamma"] == [1, 2]
    assert header["cpu"]
    printed = capsys.readouterr()
    assert printed.out.count("\nnone ") == 2 * (2 + 1) + 2
    assert "1/30 a: none, " in printed.err
    assert "30/30 b: " in printed.err


def test_our_own_prompts_and_each_drafters_own_length(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--drafters", "none,model", "--draft-model", folder, "--draft-tree", "2,1", "--limit", "2"]
    assert bench(folder, *flags) == 0
    out = capsys.readouterr().out
    assert "\nmodel       4     1  chat" in out
    assert "\nngram" not in out


def test_an_interrupted_run_is_resumed(
    folder: str, prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.json"
    flags = ["--prompts", prompts, "--json", str(out), "--limit", "6"]
    run_load, left = harness.run_load, iter(range(2 + 5))  # two of them warm up

    def interrupted(*args: Any) -> Any:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return run_load(*args)

    with monkeypatch.context() as patch:
        patch.setattr(harness, "run_load", interrupted)
        assert bench(folder, *flags) == 130
    assert "all " in capsys.readouterr().out  # the table of what there is
    before = json.loads(out.read_text())
    assert len(before["records"]) == 5
    assert [row["prompts"] for row in before["overall"]] == [2, 2]  # the third has been answered by one setting only
    assert bench(folder, *flags, "--resume", "--max-num-batched-tokens", "64") == 2
    assert "its engine.max_num_batched_tokens is 512, this run's is 64" in capsys.readouterr().err
    assert bench(folder, *flags, "--resume") == 0
    after = json.loads(out.read_text())
    assert after["records"][:5] == before["records"]
    assert len(after["records"]) == 12
    assert [row["prompts"] for row in after["overall"]] == [6, 6]
    assert bench(folder, *flags, "--resume") == 0
    assert json.loads(out.read_text()) == after


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--drafters", "ngrm"], "method is 'ngrm'"),
        (["--drafters", "none,ngram,ngram"], "--drafters is 'none,ngram,ngram'; allowed is each drafter once"),
        (["--drafters", ""], "method is ''"),
        (["--drafters", "model"], "drafter model needs --draft-model"),
        (["--drafters", "none", "--prompt-lookup-max", "3"], "--prompt-lookup-max is a setting of drafter ngram"),
        (["--prompt-lookup-min", "9"], "prompt_lookup_min is 9"),
        (["--gamma", "0"], "--gamma is '0'; allowed are different whole numbers from 1 to 256"),
        (["--gamma", "1,257"], "--gamma is '1,257'"),
        (["--gamma", "2,2"], "--gamma is '2,2'"),
        (["--gamma", "two"], "--gamma is 'two'"),
        (["--gamma", "auto,2,auto"], "--gamma is 'auto,2,auto'; allowed is auto once"),
        (["--gamma", "9" * 5000], "--gamma is '999"),
        (["--batch", "1,,8"], "--batch is '1,,8'"),
        (["--batch", "8", "--max-num-seqs", "4"], "--max-num-seqs is 4; allowed is the largest --batch, 8, or more"),
        (["--limit", "0"], "--limit is 0; allowed is a whole number >= 1"),
        (["--max-tokens", "0"], "max_tokens is 0; allowed is a whole number >= 1"),
        (["--prompts", "nowhere.jsonl"], "the prompt file nowhere.jsonl cannot be read"),
        (["--resume"], "--resume needs --json FILE"),
        (["--json", "nowhere/out.json"], "--json is nowhere/out.json; allowed is a file in a folder that exists"),
        (["--json", "."], "--json is .; allowed is a file"),
    ],
)
def test_bad_input_is_one_line(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--model", "never-loaded", *flags]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ('{"category": "a"}', "line 2 is not a JSON object with a list of texts in 'turns'"),
        ('{"category": "a", "turns": []}', "line 2 is not"),
        ('{"category": "a", "turns": "text"}', "line 2 is not"),
        ('{"category": "a", "turns": [7]}', "line 2 is not"),
        ('{"category": "a", "turns": [" "]}', "line 2 is not"),
        ('["turns"]', "line 2 is not"),
        ("{", "line 2 is not"),
        ('{"category": "", "turns": ["x"]}', "line 2 has the category ''; allowed is a text that is not empty"),
        ('{"category": 7, "turns": ["x"]}', "line 2 has the category 7"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n" + row + "\n")
    assert main(["bench", "--model", "never-loaded", "--prompts", str(file)]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_an_empty_prompt_file_and_the_prefix_cache_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n\n")
    assert main(["bench", "--model", "never-loaded", "--prompts", str(file)]) == 2
    assert "holds no prompts" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["bench", "--model", "never-loaded", "--enable-prefix-caching"])
    assert "--enable-prefix-caching" in capsys.readouterr().err


def test_the_weights_are_quantized_as_asked(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    kinds = []
    for flags in ([], ["--quantize", "int8"]):
        out = tmp_path / "out.json"
        assert bench(folder, "--limit", "1", "--drafters", "none", "--json", str(out), *flags) == 0
        kinds.append(json.loads(out.read_text())["header"]["engine"]["quantization"])
    assert kinds == [None, "int8"]
