"""The search for the best draft tree: what is measured, its result file, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.bench.tree_search import acceptance, pass_seconds, watch
from outrider.cli.main import main
from outrider.spec.drafts.model import ModelSettings, TwoModels
from tests.engine.drafters import self_drafter
from tests.engine.harness import greedy, make_engine, plain, prompt_of, toy_target
from tests.tiny import write_tiny_model
from tests.toy import full_logits, toy_config

TARGET = toy_target(seed=1)


def test_the_table_counts_every_token_as_a_start() -> None:
    """Ranks 0 1 - 0: four starts; depth 2 is tried after the two hits that are followed by anything."""
    assert acceptance([[0, 1, -1, 0]], 3, 2) == [[2 / 4, 1 / 4], [0.0, 1 / 2], [0.0, 0.0]]
    assert acceptance([[0, None, 0, 0]], 2, 1) == [[1.0], [1.0]], "where there was no guess nothing is known"
    assert acceptance([[-1], [-1, -1]], 4, 2) == [[0.0, 0.0]], "depths that were never reached are left out"


def test_the_ranks_are_those_of_the_targets_own_tokens_in_the_draft_models_order() -> None:
    drafter = toy_target(toy_config(layers=1), seed=5)
    engine = make_engine(
        TARGET, TwoModels(drafter, TARGET, "standard", ModelSettings("toy", draft_tree="12")), gamma=12
    )
    for prompt in (prompt_of(7, 1), prompt_of(12, 2)):
        text, want = list(prompt), []
        for token in plain(TARGET, prompt, greedy(20)).token_ids:
            order = full_logits(drafter.decoder, text)[-1].argsort(descending=True).tolist()[:12]
            want.append(order.index(token) if token in order else -1)
            text.append(token)
        assert watch(engine, "drafter", prompt, 12, 20) == want
        assert len(set(want)) > 3
        assert -1 in want
    engine = make_engine(TARGET, self_drafter(TARGET, draft_tree="3"), gamma=3)
    assert watch(engine, "drafter", prompt_of(5), 3, 10) == [0] * 10


def test_what_a_small_draft_context_leaves_unread_is_unknown() -> None:
    engine = make_engine(TARGET, self_drafter(TARGET, draft_tree="2", max_model_len=12), gamma=2)
    assert watch(engine, "drafter", prompt_of(8), 2, 10) == [0] * 5 + [None] * 5


def test_passes_of_all_sizes_are_timed() -> None:
    seconds = dict(pass_seconds(TARGET.decoder, 10, context=20))
    assert list(seconds) == [1, 2, 3, 4, 6, 8, 10]
    assert all(0 < value < 60 for value in seconds.values())


def test_tune_tree_measures_resumes_and_its_file_is_a_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(write_tiny_model(tmp_path / "tiny", context=1024))
    out = tmp_path / "tree.json"
    command = ["tune", "tree", folder, "--draft-model", folder, "--max-tokens", "6", "--json", str(out)]
    command += ["--num-speculative-tokens", "5", "--widest", "2", "--deepest", "3"]
    assert main([*command, "--limit", "2"]) == 0
    said = capsys.readouterr()
    first = json.loads(out.read_text())
    assert first["draft_tree"] in ([[0]], [[0], [0, 0]], [[0], [0, 0], [0, 0, 0]]), "the model itself is always right"
    assert f"best: draft_tree {first['draft_tree']}".replace(" ", "") in said.out.replace(" ", "")
    assert first["ranks"] == [[0] * 6] * 2
    assert first["num_speculative_tokens"] == len(first["draft_tree"]) == first["tokens_per_step"] - 1
    assert list(first["target_seconds"]) == ["1", "2", "3", "4", "6"]
    assert "prompt 2/2: 6 tokens, the first guess right at 100%" in said.err

    half = {**first, "ranks": first["ranks"][:1], "target_seconds": {}}
    for key in ("draft_tree", "num_speculative_tokens", "tokens_per_step", "speedup"):
        del half[key]
    out.write_text(json.dumps(half))  # as an interrupted run leaves it
    assert main(["generate", folder, "x", "--drafter", "model", "--draft-model", folder, "--draft-tree", str(out)]) == 2
    assert "allowed is a JSON list" in capsys.readouterr().err
    assert main([*command, "--limit", "2", "--resume"]) == 0
    said = capsys.readouterr()
    assert "prompt 2/2" in said.err
    assert "prompt 1/2" not in said.err
    assert "pass of the draft model" not in said.err
    assert json.loads(out.read_text())["draft_seconds"] == first["draft_seconds"]

    flags = ["--drafter", "model", "--draft-model", folder, "--draft-tree", str(out), "--max-tokens", "8"]
    assert main(["check", folder, *flags, "--limit", "1"]) == 0
    capsys.readouterr()
    assert main([*command, "--limit", "1", "--resume"]) == 2
    assert "was made with prompts" in capsys.readouterr().err
    for wrong in (["--widest", "0"], ["--deepest", "999"], ["--limit", "0"], ["--json", "x.txt"]):
        assert main([*command, *wrong]) == 2
        assert "allowed is" in capsys.readouterr().err


def test_a_draft_model_that_is_never_right_is_said_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(write_tiny_model(tmp_path / "tiny", context=1024))
    other = str(write_tiny_model(tmp_path / "other", seed=7, context=1024))
    command = ["tune", "tree", folder, "--draft-model", other, "--max-tokens", "3", "--json", str(tmp_path / "t.json")]
    assert main([*command, "--widest", "1", "--limit", "1", "--num-speculative-tokens", "2"]) == 2
    assert "no draft token was ever accepted on these prompts" in capsys.readouterr().err
    assert main(["tune", "tree", folder, "--json", str(tmp_path / "t.json")]) == 2
    assert "drafter model needs --draft-model" in capsys.readouterr().err
