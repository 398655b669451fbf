"""The exit adapter in the engine: its draft logits are those of a pass without a cache, whatever happens in between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from outrider.cli.main import main
from outrider.core.params import SamplingParams, SpecParams
from outrider.core.types import Span
from outrider.models.heads.exit_adapter import load_exit_adapter
from outrider.models.load import LoadedModel, load_model
from outrider.ops.native import NativeOps, available
from outrider.spec.drafts.none import NoDraft
from outrider.spec.drafts.self_ import AdaptedExit, SelfDraft
from tests.engine.harness import assert_same, greedy, make_engine, plain, prompt_of, run_all, run_all_sorts, toy_target
from tests.engine.heads import Tensors, adapter_tensors, adapter_values, run_through, write_head
from tests.models.adapter_plain import adapter_rows
from tests.tiny import write_tiny_model
from tests.toy import toy_config

CONFIG = toy_config(layers=4)
TARGET = toy_target(CONFIG, seed=1)
EXIT = 2


def adapter(**more: Any) -> tuple[dict[str, Any], Tensors]:
    values = adapter_values(CONFIG, **more)
    return values, adapter_tensors(values, seed=5)


ADAPTERS: Mapping[str, tuple[dict[str, Any], Tensors]] = {
    "as the target": adapter(),
    "more kv heads": adapter(num_key_value_heads=4),
    "fewer, wider heads": adapter(num_attention_heads=2, num_key_value_heads=1),
    "long rope": adapter(rope_theta=500000.0),
}


class Watched(AdaptedExit):
    """Notes the text, the draft so far, the logits, and the slots that are known when a draft begins."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.passes: list[tuple[list[int], int, NDArray[np.floating], NDArray[np.bool_]]] = []

    def _forward(self, spans: Sequence[Span]) -> list[NDArray[np.floating]]:
        rows = super()._forward(spans)
        for span, logits in zip(spans, rows, strict=True):
            assert len(logits) == 1
            text = [*span.seq.tokens, *span.draft.tokens]
            self.passes.append((text, len(span.draft), logits[0], self._seen[span.seq.id].copy()))
        return rows


def watched(folder: Path, target: LoadedModel = TARGET, kind: str = "as the target", least: float = 0.0) -> Watched:
    path = write_head(folder / kind, *ADAPTERS[kind])
    layers = range(EXIT)
    return Watched(load_exit_adapter(str(path), target, EXIT), target, layers, "standard", "probabilistic", least)


def assert_plain(drafter: Watched, kind: str = "as the target", tolerance: float = 1e-8) -> None:
    decoder = drafter.target.decoder
    head = decoder.head
    head = head.double() if isinstance(head, torch.Tensor) else decoder.ops.linear(torch.eye(32), head).T.double()
    assert drafter.passes
    for text, drafted, logits, seen in drafter.passes:
        states = run_through(decoder, text, (EXIT - 1,))[0]
        visible = torch.ones(len(text), dtype=torch.bool)
        assert len(seen) == len(text) - drafted - 1
        visible[: len(seen)] = torch.from_numpy(seen)
        want = (adapter_rows(*ADAPTERS[kind], states, visible) @ head.T)[-1]
        torch.testing.assert_close(torch.from_numpy(logits).double(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kind", ADAPTERS)
def test_draft_logits_are_those_of_a_plain_pass(kind: str, tmp_path: Path) -> None:
    drafter = watched(tmp_path, kind=kind)
    run_all_sorts(TARGET, drafter)
    assert {drafted for _, drafted, _, _ in drafter.passes} == {0, 1, 2}
    assert all(seen.all() for _, _, _, seen in drafter.passes)
    assert_plain(drafter, kind)


@pytest.mark.skipif(not available(), reason="the native operations were not built")
@pytest.mark.parametrize("kind", ADAPTERS)
def test_the_same_on_native_operations(kind: str, tmp_path: Path) -> None:
    """A prompt that another drafter has read is in the cache, so that masked rows are among them."""
    target = toy_target(CONFIG, 1, dtype=torch.float32, ops=NativeOps(1))
    drafter = watched(tmp_path, target, kind)
    engine = make_engine(target, {"none": NoDraft(), "exit": drafter}, gamma=3, max_num_batched_tokens=9)
    run_all(engine, [(prompt_of(6, 2), greedy(4), SpecParams(drafter="none"))])
    run_all(engine, [(prompt_of(n, n // 3), greedy(8), SpecParams(drafter="exit")) for n in (14, 8)])
    assert {drafted for _, drafted, _, _ in drafter.passes} == {0, 1, 2}
    assert {bool(seen.all()) for _, _, _, seen in drafter.passes} == {True, False}
    assert_plain(drafter, kind, 1e-4)


def test_what_another_drafter_wrote_is_left_out(tmp_path: Path) -> None:
    """Of a prefix that was computed for a request without the adapter nothing is seen; drafts come all the same."""
    drafter = watched(tmp_path)
    engine = make_engine(TARGET, {"none": NoDraft(), "exit": drafter}, gamma=3)
    assert not any(part.any() for part in drafter.pool.kv.layers[0].parts), "masked rows may hold anything but NaN"
    prompt = prompt_of(13, 5)
    run_all(engine, [(prompt, greedy(4), SpecParams(drafter="none"))])
    jobs = [(prompt, greedy(16), SpecParams(drafter="exit")), (prompt_of(9, 6), greedy(16), SpecParams(drafter="exit"))]
    got = run_all(engine, jobs)
    for mine, (text, params, _) in zip(got, jobs, strict=True):
        assert_same(mine, plain(TARGET, text, params))
        assert mine.stats.drafted > 10
    hidden = {int((~seen).sum()) for _, _, _, seen in drafter.passes}
    assert hidden == {0, 12}
    assert_plain(drafter)


def test_an_answer_is_known_to_the_end_when_it_is_the_next_prompts_beginning(tmp_path: Path) -> None:
    """As in a chat: the last step of an answer is read too, since the next request finds its blocks."""
    drafter = watched(tmp_path)
    engine = make_engine(TARGET, drafter, gamma=3)
    said = run_all(engine, [(prompt_of(6, 1), greedy(11))])[0]
    drafter.passes.clear()
    run_all(engine, [([*prompt_of(6, 1), *said.token_ids, 3], greedy(8))])
    assert engine.metrics.cached_prompt_tokens == 16
    assert all(seen.all() for _, _, _, seen in drafter.passes)
    assert_plain(drafter)


@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_it_goes_on_only_while_it_is_sure(temperature: float, tmp_path: Path) -> None:
    """As published: the token that was unsure is still proposed, and nothing behind it."""
    drafter = watched(tmp_path, least=0.3)
    params = SamplingParams(temperature=temperature, seed=2, max_tokens=40)
    got = run_all(make_engine(TARGET, drafter, gamma=5), [(prompt_of(7, 1), params)])[0]
    ends = []
    for (text, drafted, logits, _), (_, following, _, _) in pairwise(drafter.passes):
        if len(text) - drafted > 7 + 40 - 7:  # the answer's end is near, and the budget smaller
            break
        sure = bool(torch.from_numpy(logits).softmax(-1).max() >= 0.3)
        assert following == (drafted + 1 if sure and drafted < 4 else 0)
        ends += [drafted + 1] * (following == 0)
    assert {1, 5} < set(ends)
    assert got.stats.drafted >= sum(ends)


def test_the_adapters_context_is_respected(tmp_path: Path) -> None:
    path = write_head(tmp_path, adapter_values(CONFIG, max_position_embeddings=12), ADAPTERS["as the target"][1])
    drafter = Watched(load_exit_adapter(str(path), TARGET, EXIT), TARGET, range(EXIT), "standard", "greedy")
    got = run_all(make_engine(TARGET, drafter, gamma=3), [(prompt_of(6, 1), greedy(14))])[0]
    assert_same(got, plain(TARGET, prompt_of(6, 1), greedy(14)))
    assert max(len(text) for text, _, _, _ in drafter.passes) == 12
    assert got.stats.no_draft["the adapter's context of 12 tokens is full"] > 0


def test_a_failure_in_the_middle_of_a_draft_leaves_the_answer_whole(tmp_path: Path) -> None:
    drafter = watched(tmp_path)
    forward, calls = drafter.adapter.logits, 0

    def failing(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise RuntimeError("broken off")
        return forward(x)

    object.__setattr__(drafter.adapter, "logits", failing)
    params = greedy(32)
    got = run_all(make_engine(TARGET, drafter), [(prompt_of(7), params)])[0]
    assert_same(got, plain(TARGET, prompt_of(7), params))
    assert "the drafter failed" in got.stats.no_draft


def test_what_it_weighs_is_in_the_memory_plan(tmp_path: Path) -> None:
    """The adapter's tensors and the KV of one layer a token; it keeps no features."""
    drafter = watched(tmp_path)
    engine = make_engine(TARGET, drafter)
    assert engine.memory.draft_weights == sum(t.nbytes for t in ADAPTERS["as the target"][1].values())
    kv = drafter.pool.kv.layers[0]
    assert engine.memory.draft_kv == sum(part.nbytes for part in kv.parts) == 64 * 4 * 2 * 2 * 8 * 8
    assert drafter.pool.features.nbytes == 0
    assert make_engine(TARGET, SelfDraft(TARGET, range(EXIT), "standard", "greedy")).memory.draft_kv == 0


def test_the_command_line_takes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_tiny_model(tmp_path / "tiny", layers=3, context=1024)
    config = load_model(str(model), ops="reference").config
    values = adapter_values(config)
    folder = write_head(tmp_path / "adapter", values, adapter_tensors(values, 1))
    flags = ["--drafter", "self", "--exit-layer", "1", "--exit-adapter", str(folder), "--draft-min-token-prob", "0.1"]
    assert main(["check", str(model), *flags, "--max-tokens", "8", "--limit", "1"]) == 0
    write_head(tmp_path / "adapter", {**values, "exit_layer": 2}, adapter_tensors(values, 1))
    assert main(["check", str(model), *flags]) == 2
    assert "exit_layer is 2; the setting exit_layer is 1" in capsys.readouterr().err
