"""EAGLE in the engine: its draft logits are those of a plain loop without a cache, whatever happens in between."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.core.draft import Draft
from outrider.core.params import SpecParams
from outrider.models.heads.eagle_files import load_eagle
from outrider.models.load import LoadedModel
from outrider.ops.native import NativeOps, available
from outrider.spec.controller import DraftController
from outrider.spec.drafts.eagle import Eagle, EagleSettings, _Tree
from outrider.spec.drafts.none import NoDraft
from tests.engine.harness import (
    assert_same,
    finish,
    greedy,
    make_engine,
    plain,
    prompt_of,
    run_all,
    run_all_sorts,
    toy_target,
)
from tests.engine.heads import (
    Tensors,
    eagle3_tensors,
    eagle3_values,
    embedding_of,
    final_norm,
    layer_tensors,
    llama_values,
    noise,
    run_through,
    write_head,
)
from tests.models.eagle_plain import norm, plain_chain
from tests.toy import toy_config

CONFIG = toy_config(layers=4)
TARGET = toy_target(CONFIG, seed=1)
NATIVE = pytest.mark.skipif(not available(), reason="the native operations were not built")


def eagle1(layers: int = 1, own: bool = False, **more: Any) -> tuple[dict[str, Any], Tensors]:
    """A random head of the first kind; ``own`` gives it an embedding and an output matrix."""
    values = llama_values(CONFIG, layers, **more)
    tensors = {"fc.weight": noise(7, 32, 64, std=0.2), **layer_tensors(values, 8)}
    if more.get("bias"):
        tensors["fc.bias"] = noise(9, 32)
    if own:
        tensors |= {"embed_tokens.weight": noise(10, 32, 32), "lm_head.weight": noise(11, 32, 32)}
    return values, tensors


def eagle3(layers: int = 1, rows: int = 20, **more: Any) -> tuple[dict[str, Any], Tensors]:
    """A random head of the third kind, its vocabulary trimmed unless ``rows`` is 32."""
    values = eagle3_values(CONFIG, rows, layers, **more)
    tensors = eagle3_tensors(values, CONFIG, seed=12)
    if more.get("norm_before_fc"):
        tensors["input_norm.weight"] = 1 + noise(13, 96, std=0.2)
    if more.get("own"):
        tensors["embed_tokens.weight"] = noise(14, 32, 32)
    return values, tensors


HEADS: Mapping[str, tuple[dict[str, Any], Tensors]] = {
    "one layer": eagle1(),
    "two layers": eagle1(2),
    "three layers": eagle1(3),
    "bias": eagle1(bias=True),
    "own": eagle1(own=True),
    "long rope": eagle1(rope_theta=500000.0),
    "third": eagle3(),
    "third, two layers": eagle3(2),
    "third, three layers": eagle3(3),
    "third, whole vocabulary": eagle3(rows=32),
    "third, own embedding": eagle3(own=True),
    "third, norm before residual": eagle3(norm_before_residual=True),
    "third, norm before fc": eagle3(norm_before_fc=True),
    "third, norm fed back": eagle3(norm_output=True),
}


def features_of(target: LoadedModel, values: Mapping[str, Any], tensors: Tensors, text: list[int]) -> torch.Tensor:
    """What the head is given of ``text``, computed from the target in one pass."""
    kv = "float32" if target.decoder.dtype == torch.float32 else "auto"
    if "draft_vocab_size" not in values:
        return final_norm(target.decoder, run_through(target.decoder, text, (CONFIG.n_layers - 1,), kv)[0])
    layers = tuple(i - 1 for i in values["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
    states = run_through(target.decoder, text, layers, kv)[0]
    if "input_norm.weight" in tensors:
        states = norm(states, tensors["input_norm.weight"], values["rms_norm_eps"])
    return states @ tensors["fc.weight"].T


def plain_logits(
    target: LoadedModel, values: Mapping[str, Any], tensors: Tensors, text: list[int], drafted: list[int]
) -> torch.Tensor:
    """Logits [1 + drafted, V] that the head gives after ``text`` and after each of ``drafted``; no cache, no engine."""
    table = tensors.get("embed_tokens.weight", embedding_of(target.decoder))
    states = plain_chain(values, tensors, features_of(target, values, tensors, text[:-1]), text, drafted, table)
    head = target.decoder.head
    shared = (
        head.double() if isinstance(head, torch.Tensor) else target.decoder.ops.linear(torch.eye(32), head).T.double()
    )
    own = torch.stack(states) @ tensors.get("lm_head.weight", shared).T
    if own.shape[1] == 32:
        return own
    full = torch.full((len(own), 32), -torch.inf, dtype=own.dtype)
    full[:, torch.arange(own.shape[1]) + tensors["d2t"]] = own
    return full


class Watched(Eagle):
    """Notes the text, the draft so far and the logits of each token of a chain."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: list[tuple[list[int], list[int], torch.Tensor]] = []

    def _next_of_chain(self, tree: _Tree, logits: torch.Tensor) -> int:
        self.seen.append((list(tree.span.seq.tokens), tree.path(tree.expanded[0]), logits[0].double()))
        return super()._next_of_chain(tree, logits)


def watched(folder: Path, target: LoadedModel, kind: str, **settings: Any) -> Watched:
    path = write_head(folder / kind, *HEADS[kind])
    head = load_eagle(str(path), target)
    return Watched(head, target, "standard", EagleSettings(model=str(path), **settings))


def assert_plain(drafter: Watched, target: LoadedModel, kind: str, tolerance: float = 1e-8) -> None:
    for text, path, logits in drafter.seen:
        want = plain_logits(target, *HEADS[kind], text, path)[-1]
        assert torch.equal(want.isfinite(), logits.isfinite())
        greatest = want[want.isfinite()].abs().max().item()  # random heads give logits of some hundreds
        torch.testing.assert_close(logits, want, atol=tolerance * max(1.0, greatest), rtol=0)


@pytest.mark.parametrize("kind", HEADS)
def test_draft_logits_are_those_of_a_plain_loop(kind: str, tmp_path: Path) -> None:
    drafter = watched(tmp_path, TARGET, kind)
    run_all_sorts(TARGET, drafter)
    assert {len(path) for _, path, _ in drafter.seen} == {0, 1, 2}
    assert_plain(drafter, TARGET, kind)


def test_an_answer_is_known_to_the_end_when_it_is_the_next_prompts_beginning(tmp_path: Path) -> None:
    """As in a chat: features of an answer's last step are kept, since the next request finds its blocks."""
    drafter = watched(tmp_path, TARGET, "one layer")
    engine = make_engine(TARGET, drafter, gamma=3)
    said = run_all(engine, [(prompt_of(6, 1), greedy(11))])[0]
    drafter.seen.clear()
    run_all(engine, [([*prompt_of(6, 1), *said.token_ids, 3], greedy(8))])
    assert engine.metrics.cached_prompt_tokens == 16
    assert drafter.seen
    assert_plain(drafter, TARGET, "one layer")


@NATIVE
@pytest.mark.parametrize("kind", ["one layer", "two layers", "third", "third, norm before residual"])
def test_the_same_on_native_operations(kind: str, tmp_path: Path) -> None:
    target = toy_target(CONFIG, 1, dtype=torch.float32, ops=NativeOps(1))
    drafter = watched(tmp_path, target, kind)
    engine = make_engine(target, drafter, gamma=3, max_num_batched_tokens=9, kv_cache_dtype="float32")
    run_all(engine, [(prompt_of(14, 1), greedy(8))])
    assert {len(path) for _, path, _ in drafter.seen} == {0, 1, 2}
    assert_plain(drafter, target, kind, 1e-5)


def test_a_longer_prefix_hit_drafts_at_once_and_from_all_of_it(tmp_path: Path) -> None:
    """What a shared block holds of the head stays good, its last row too, although the next token differs."""
    drafter = watched(tmp_path, TARGET, "one layer")
    engine = make_engine(TARGET, drafter, gamma=2)
    shared = prompt_of(8, 4)
    run_all(engine, [([*shared, 1, 2, 3], greedy(4))])
    drafter.seen.clear()
    got = run_all(engine, [([*shared, 9], greedy(6))])[0]  # all but the newest token are found
    assert engine.metrics.cached_prompt_tokens == 8
    assert len(drafter.seen[0][0]) == 9
    assert_plain(drafter, TARGET, "one layer")
    assert got.stats.no_draft.get("the target has not read the text before the newest token yet", 0) == 0


def test_what_another_drafter_wrote_is_left_out(tmp_path: Path) -> None:
    """A prefix computed for a request without this head has no rows of it; drafts come all the same."""
    drafter = watched(tmp_path, TARGET, "one layer")
    engine = make_engine(TARGET, {"none": NoDraft(), "eagle": drafter}, gamma=3)
    prompt = prompt_of(13, 5)
    run_all(engine, [(prompt, greedy(4), SpecParams(drafter="none"))])
    got = run_all(engine, [(prompt, greedy(16), SpecParams(drafter="eagle"))])[0]
    assert_same(got, plain(TARGET, prompt, greedy(16)))
    assert got.stats.drafted > 10


def test_two_drafters_get_the_features_they_asked_for(tmp_path: Path) -> None:
    """One reads the last layer, one several: each gets its own columns."""
    first, third = watched(tmp_path, TARGET, "one layer"), watched(tmp_path, TARGET, "third")
    engine = make_engine(TARGET, {"a": first, "b": third, "c": NoDraft()}, gamma=3)
    run_all(engine, [(prompt_of(6, 1), greedy(6), SpecParams(drafter=name)) for name in "abc"])
    assert_plain(first, TARGET, "one layer")
    assert_plain(third, TARGET, "third")
    assert first.seen
    assert third.seen


def plain_tree(kind: str, text: list[int], topk: int, depth: int, budget: int) -> set[tuple[int, ...]]:
    """EAGLE-2's tree as the set of its paths, by the book: every node's logits from scratch."""
    scores: dict[tuple[int, ...], float] = {}
    level: list[tuple[int, ...]] = [()]
    for _ in range(depth):
        made: dict[tuple[int, ...], float] = {}
        for path in level:
            chances = plain_logits(TARGET, *HEADS[kind], text, list(path))[-1].log_softmax(-1)
            for token in chances.topk(topk).indices.tolist():
                made[(*path, token)] = scores.get(path, 0.0) + float(chances[token])
        scores |= made
        level = sorted(made, key=lambda path: -made[path])[:topk]
    return set(sorted(scores, key=lambda path: -scores[path])[:budget])


class Kept(Eagle):
    """Notes each text and draft."""

    def propose(self, spans: Any) -> list[Draft]:
        drafts = super().propose(spans)
        self.made = [*getattr(self, "made", []), *((list(s.seq.tokens), d) for s, d in zip(spans, drafts, strict=True))]
        return drafts


@pytest.mark.parametrize("kind", ["one layer", "two layers", "third"])
@pytest.mark.parametrize(("topk", "depth", "budget"), [(2, 3, 4), (3, 3, 9), (2, 2, 20)])
def test_the_dynamic_tree_is_eagle_2s(kind: str, topk: int, depth: int, budget: int, tmp_path: Path) -> None:
    """The most confident nodes are expanded, the best of all are kept; tokens are certain, parents come first."""
    path = write_head(tmp_path, *HEADS[kind])
    settings = EagleSettings(model=str(path), eagle_topk=topk, eagle_depth=depth)
    drafter = Kept(load_eagle(str(path), TARGET), TARGET, "standard", settings)
    run_all(make_engine(TARGET, drafter, gamma=budget), [(prompt_of(7, 1), greedy(30))])
    checked = [(text, draft) for text, draft in drafter.made if text and draft.tokens][:4]
    assert len(checked) == 4
    for text, draft in checked:
        paths = {tuple(draft.tokens[i] for i in draft.path(node)) for node in range(len(draft))}
        assert len(paths) == len(draft)
        assert paths == plain_tree(kind, text, topk, depth, budget)
        assert set(draft.q) == {None}


def test_the_heads_context_is_respected(tmp_path: Path) -> None:
    drafter = watched(tmp_path, TARGET, "one layer", max_model_len=12)
    got = run_all(make_engine(TARGET, drafter, gamma=3), [(prompt_of(6, 1), greedy(14))])[0]
    assert_same(got, plain(TARGET, prompt_of(6, 1), greedy(14)))
    assert max(len(text) + len(path) for text, path, _ in drafter.seen) == 12
    assert got.stats.no_draft["the head's context of 12 tokens is full"] > 0


def test_pauses_leave_no_gap(tmp_path: Path) -> None:
    """Steps without a draft, and aborts: whatever was not read yet is read when drafting goes on."""
    drafter = watched(tmp_path, TARGET, "two layers")

    class Now(DraftController):
        step = 0

        def budgets(self, spans: Any, rows: int) -> list[int]:
            self.step += 1
            return [min(3, span.budget) * (self.step % 4 == 0) for span in spans]

        def observe(self, record: object) -> None:
            """Learns nothing."""

    engine = make_engine(TARGET, drafter, gamma=3, controller=Now())
    requests = [engine.add_request(prompt_of(9, seed), greedy(20)) for seed in range(3)]
    engine.step()
    engine.abort(requests[1].id)
    finish(engine)
    assert drafter.seen
    assert_plain(drafter, TARGET, "two layers")
