"""Self-speculation: the plain method beside the drafter, the target's KV, the settings, and the search for layers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.bench.skip_layers import Trial, draft_cost, expected_speedup, search, shown
from outrider.cli.main import main
from outrider.core.errors import SettingError
from outrider.core.params import SamplingParams
from outrider.spec.drafts.self_ import SelfDraft, SelfSettings
from tests.engine.harness import assert_same, greedy, make_engine, plain, prompt_of, run_all, toy_target
from tests.engine.kv import assert_kv
from tests.tiny import write_tiny_model
from tests.toy import full_logits, toy_config

TARGET = toy_target(toy_config(layers=6), seed=1, std=0.1)
KEPT = {"exit": (0, 1, 2, 3), "skip": (0, 1, 3, 5)}


def draft(layers: Sequence[int], method: str = "standard", sample_method: str = "probabilistic") -> SelfDraft:
    return SelfDraft(TARGET, layers, method, sample_method)


@pytest.mark.parametrize("layers", KEPT.values(), ids=KEPT)
def test_a_view_is_the_model_with_those_layers(layers: tuple[int, ...]) -> None:
    """The same logits as a model that has only these layers, windows and all; no weight is copied."""
    for architecture, options in (("llama", {}), ("mistral", {"sliding_window": (None, 2, None, 4, None, 3)})):
        decoder = toy_target(toy_config(architecture, layers=6, **options), seed=2).decoder
        view = decoder.with_layers(layers)
        assert [view.config.window(i) for i in range(4)] == [decoder.config.window(i) for i in layers]
        assert all(view.layers[i].q is decoder.layers[layer].q for i, layer in enumerate(layers))
        assert view.embedding is decoder.embedding
        assert len(decoder.layers) == decoder.config.n_layers == 6
    short = toy_target(toy_config(layers=4), seed=3).decoder
    for mine, theirs in zip(short.layers, [decoder.layers[i] for i in layers], strict=True):
        for name in ("q", "k", "v", "o", "gate", "up", "down", "input_norm", "post_norm"):
            getattr(mine, name).copy_(getattr(theirs, name))
    short.embedding.copy_(decoder.embedding)  # type: ignore[union-attr]
    short.head.copy_(decoder.head)  # type: ignore[union-attr]
    short.final_norm.copy_(decoder.final_norm)
    wanted = decoder.with_layers(layers)
    if not options:
        torch.testing.assert_close(full_logits(wanted, [1, 2, 3, 4]), full_logits(short, [1, 2, 3, 4]))


def test_early_exit_drafts_are_those_of_the_plain_method() -> None:
    """The first layers see the same text whoever ran them, so a draft is a cache-free greedy run of the short model."""
    mine = draft(KEPT["exit"])
    seen: list[tuple[list[int], tuple[int, ...]]] = []
    propose = mine.propose

    def watched(spans: Any) -> Any:
        drafts = propose(spans)
        seen.extend((list(span.seq.tokens), d.tokens) for span, d in zip(spans, drafts, strict=True))
        return drafts

    mine.propose = watched  # type: ignore[method-assign]
    got = run_all(make_engine(TARGET, mine), [(prompt_of(9, seed), greedy(16)) for seed in range(2)])
    short = TARGET.decoder.with_layers(KEPT["exit"])
    for text, tokens in seen:
        for token in tokens:
            assert token == int(full_logits(short, text)[-1].argmax())
            text = [*text, token]
    assert sum(len(tokens) for _, tokens in seen) > 40
    assert sum(o.stats.accepted for o in got) > 0


@pytest.mark.parametrize("name", KEPT)
def test_the_targets_kv_is_whole_after_every_step(name: str) -> None:
    """Drafting writes into the target's pool; what stands there after a step is what the whole model writes."""
    engine = make_engine(TARGET, draft(KEPT[name]), num_kv_blocks=20, max_num_batched_tokens=9)
    jobs = [(prompt_of(length, 3), greedy(12)) for length in (3, 9, 9, 14)]
    for prompt, params in jobs:
        engine.add_request(prompt, params)
    steps = 0
    while engine.has_work:
        engine.step()
        steps += 1
        if steps % 3 == 0:
            for seq in engine.sequences:
                assert_kv(engine.runner, seq, seq.n_computed)
    assert engine.metrics.spec["drafter"].accepted > 0


def test_a_failure_in_the_middle_of_a_draft_leaves_the_model_whole() -> None:
    """B98: an exception while drafting costs the draft, never the output; nothing of the model was changed."""
    mine = draft(KEPT["exit"])
    forward, calls = mine._forward, 0

    def failing(spans: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            raise RuntimeError("broken off")
        return forward(spans)

    mine._forward = failing  # type: ignore[method-assign]
    params = greedy(32)
    got = run_all(make_engine(TARGET, mine), [(prompt_of(7), params)])[0]
    assert_same(got, plain(TARGET, prompt_of(7), params))
    assert "the drafter failed" in got.stats.no_draft
    assert len(TARGET.decoder.layers) == TARGET.decoder.config.n_layers == 6


def test_sampled_drafts_report_what_they_were_drawn_from() -> None:
    spans: list[Any] = []
    for sample_method in ("probabilistic", "greedy"):
        mine = draft(KEPT["exit"], sample_method=sample_method)
        propose = mine.propose

        def watched(asked: Any, propose: Any = propose) -> Any:
            drafts = propose(asked)
            spans.extend(drafts)
            return drafts

        mine.propose = watched  # type: ignore[method-assign]
        run_all(make_engine(TARGET, mine), [(prompt_of(7), SamplingParams(max_tokens=16, seed=1, top_k=5))])
        certain = [q is None for d in spans for q in d.q]
        assert len(certain) > 10
        assert set(certain) == {sample_method == "greedy"}
        assert all(len(q.ids) <= 5 for d in spans for q in d.q if q is not None)
        spans.clear()


def test_it_weighs_nothing_and_reads_no_prompt() -> None:
    engine = make_engine(TARGET, draft(KEPT["skip"]), max_num_batched_tokens=8)
    assert engine.memory.draft_kv == engine.memory.draft_weights == 0
    got = run_all(engine, [(prompt_of(40), greedy(6))])[0]
    assert got.stats.no_draft.keys() == {"no rows left in the step", "the answer is about to end"}
    short = run_all(make_engine(TARGET, draft(KEPT["skip"])), [(prompt_of(9), greedy(6))])[0]
    assert short.stats.no_draft["the prompt is read in this very step"] == 1


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "either exit_layer or skip_layers; neither is given"),
        ({"exit_layer": 2, "skip_layers": "1"}, "both is given"),
        ({"skip_layers": "1", "exit_adapter": "there"}, "exit_adapter is 'there'; it is allowed with exit_layer"),
        ({"exit_layer": 2, "draft_min_token_prob": 1.5}, "draft_min_token_prob is 1.5; allowed is a value from 0 to 1"),
        ({"exit_layer": 6}, "exit_layer is 6; allowed is 1 to 5"),
        ({"exit_layer": 0}, "exit_layer is 0"),
        ({"skip_layers": "1,x"}, "skip_layers is '1,x'"),
        ({"skip_layers": "3-"}, "skip_layers is '3-'"),
        ({"skip_layers": "6"}, "some of the layers 0 to 5"),
        ({"skip_layers": "0-5"}, "and not all"),
        ({"skip_layers": "5-3"}, "some of the layers 0 to 5"),
        ({"skip_layers": "none.json"}, "no result file"),
    ],
)
def test_bad_settings_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        SelfSettings(**values).layers(6)


def test_which_layers_draft(tmp_path: Path) -> None:
    assert SelfSettings(exit_layer=2).layers(6) == (0, 1)
    assert SelfSettings(skip_layers="1-2, 4").layers(6) == (0, 3, 5)
    file = tmp_path / "best.json"
    file.write_text(json.dumps({"skip_layers": "3,4"}))
    assert SelfSettings(skip_layers=str(file)).layers(6) == (0, 1, 2, 5)


def worth(layers: frozenset[int]) -> float:
    """Layers 3, 5 and 8 can go, the others cost all."""
    return 1 + 0.1 * len(layers & {3, 5, 8}) - 0.3 * len(layers - {3, 5, 8})


def test_the_search_finds_the_best_set_and_can_be_taken_up_again() -> None:
    asked: list[frozenset[int]] = []

    def measure(layers: frozenset[int]) -> Trial:
        asked.append(layers)
        return Trial(shown(layers), 3, worth(layers), 0.5, worth(layers))

    trials = list(search(10, 30, 0, measure))
    assert len(set(asked)) == len(trials) == 30
    assert max(trials, key=lambda t: t.speedup).skip_layers == "3,5,8"
    assert list(search(10, 30, 0, measure))[:20] == trials[:20]
    assert not any(layers & {0, 9} for layers in asked)
    assert len(list(search(4, 99, 0, measure))) == 3  # as many sets as there are


def test_what_drafting_is_expected_to_bring() -> None:
    assert expected_speedup([0.8, 0.6, 0.1], 0.2) == (pytest.approx(2.4 / 1.4), 2)
    tied = toy_target(toy_config(layers=4, tie_embeddings=True))
    head, layer = tied.decoder.head.nbytes, sum(getattr(tied.decoder.layers[0], n).nbytes for n in ("q", "k", "v", "o"))
    assert 0.25 < draft_cost(tied.decoder, 3) < (head + 2 * layer) / (head + 4 * layer)
    assert draft_cost(replace(tied, name="x").decoder, 0) == 1.0


def test_tune_searches_resumes_and_its_file_is_a_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(write_tiny_model(tmp_path / "tiny", layers=4, context=1024))
    out = tmp_path / "skip.json"
    command = ["tune", "skip-layers", folder, "--limit", "2", "--max-tokens", "8", "--json", str(out)]
    assert main([*command, "--trials", "2"]) == 0
    assert "best: skip_layers " in capsys.readouterr().out
    first = json.loads(out.read_text())
    assert [trial["skip_layers"] for trial in first["trials"]] == ["1", "2"]
    assert main([*command, "--trials", "3", "--resume"]) == 0
    second = json.loads(out.read_text())
    assert second["trials"][:2] == first["trials"]
    assert len(second["trials"]) == 3
    assert second["speedup"] == max(trial["speedup"] for trial in second["trials"])
    assert SelfSettings(skip_layers=str(out)).layers(4)
    flags = ["--drafter", "self", "--skip-layers", str(out), "--max-tokens", "8", "--limit", "1"]
    assert main(["check", folder, *flags]) == 0
    assert main([*command, "--seed", "1", "--resume"]) == 2
    assert "was made with seed 0, not 1" in capsys.readouterr().err
    for wrong in (["--trials", "0"], ["--num-speculative-tokens", "999"], ["--json", "x.txt"]):
        assert main([*command, *wrong]) == 2
        assert "allowed is" in capsys.readouterr().err
