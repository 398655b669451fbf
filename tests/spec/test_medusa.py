"""Medusa in the engine: which hidden state the heads read, which tree their guesses make, which settings are taken."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.core.draft import Draft
from outrider.core.errors import SettingError
from outrider.models.heads.medusa import load_medusa
from outrider.spec.drafts.medusa import Medusa, MedusaSettings, likely_paths
from outrider.spec.registry import spec_from_mapping
from tests.engine.harness import greedy, make_engine, prompt_of, run_all, toy_target
from tests.engine.heads import final_norm, medusa_config, noise, run_through, write_head
from tests.toy import toy_config

TARGET = toy_target(toy_config(), seed=1)
HEADS = 3
TENSORS = {
    f"{head}.{name}": noise(10 * head + at, *shape)
    for head in range(HEADS)
    for at, (name, shape) in enumerate(
        {"0.linear.weight": (32, 32), "0.linear.bias": (32,), "1.weight": (32, 32)}.items()
    )
}


class Kept(Medusa):
    """Notes each text and draft."""

    def propose(self, spans: Any) -> list[Draft]:
        drafts = super().propose(spans)
        self.made = [*getattr(self, "made", []), *((list(s.seq.tokens), d) for s, d in zip(spans, drafts, strict=True))]
        return drafts


def kept(folder: Path, *paths: tuple[int, ...]) -> Kept:
    return Kept(load_medusa(str(write_head(folder, medusa_config(HEADS), TENSORS)), TARGET), TARGET, paths)


def ranked(text: list[int]) -> list[list[int]]:
    """Per head the tokens, best first, from the state before the newest token: the last one the target has computed."""
    x = final_norm(TARGET.decoder, run_through(TARGET.decoder, text[:-1], (1,))[0])[-1]
    order = []
    for head in range(HEADS):
        block = torch.nn.functional.silu(x @ TENSORS[f"{head}.0.linear.weight"].T + TENSORS[f"{head}.0.linear.bias"])
        order.append(((x + block) @ TENSORS[f"{head}.1.weight"].T).argsort(descending=True).tolist())
    return order


@pytest.mark.parametrize("paths", [(), ((0,), (2,), (0, 0), (0, 1), (2, 1), (0, 1, 0))])
def test_the_tree_holds_the_heads_best_guesses(paths: tuple[tuple[int, ...], ...], tmp_path: Path) -> None:
    """Head d gives depth d + 1; a batch of prompts in chunks, some from the cache."""
    drafter = kept(tmp_path, *paths)
    engine = make_engine(TARGET, drafter, gamma=6, max_num_batched_tokens=16)
    for _ in range(2):
        run_all(engine, [(prompt_of(n, 1), greedy(16)) for n in (13, 9, 5)])
    wanted = paths or tuple(itertools.islice(likely_paths(HEADS), 6))
    drafts = [(text, draft) for text, draft in drafter.made if draft.tokens]
    assert len(drafts) > 30
    for text, draft in drafts:
        best = ranked(text)
        got = [tuple(draft.tokens[i] for i in draft.path(node)) for node in range(len(draft))]
        assert got == [tuple(best[d][rank] for d, rank in enumerate(path)) for path in wanted[: len(draft)]]
        assert set(draft.q) == {None}


def test_the_first_step_has_no_state_to_read(tmp_path: Path) -> None:
    drafter = kept(tmp_path)
    got = run_all(make_engine(TARGET, drafter), [(prompt_of(9, 1), greedy(8))])[0]
    assert got.stats.no_draft == {"the target has not read the text before the newest token yet": 1} | {
        reason: n for reason, n in got.stats.no_draft.items() if "about to end" in reason
    }
    assert len(drafter._last) == 0


@pytest.mark.parametrize("n_heads", [1, 2, 5])
def test_any_beginning_of_the_likely_paths_is_a_tree(n_heads: int) -> None:
    paths = list(itertools.islice(likely_paths(n_heads), 64))
    assert len(set(paths)) == 64
    for i, path in enumerate(paths):
        assert len(path) <= n_heads
        assert not path[:-1] or path[:-1] in paths[:i]
        assert path[-1] == 0 or (*path[:-1], path[-1] - 1) in paths[:i]


def test_a_users_tree_sets_the_draft_length() -> None:
    for given in ("[[0],[1],[0,0]]", [[0], [1], [0, 0]], ((0, 0), (0,), (1,))):
        config = spec_from_mapping({"method": "medusa", "model": "x", "medusa_choices": given})
        assert config.num_speculative_tokens == 3
        assert MedusaSettings("x", medusa_choices=given).paths == ((0,), (1,), (0, 0))  # type: ignore[arg-type]
    assert spec_from_mapping({"method": "medusa", "model": "x"}).num_speculative_tokens == 3


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("[[0],[0,0", "allowed is a JSON list"),
        ("[]", "allowed is a JSON list"),
        ("{}", "allowed is a JSON list"),
        ("[[0],[0]]", "different paths"),
        ("[[]]", "allowed is a JSON list"),
        ("[[64]]", "ranks from 0 to 63"),
        ("[[-1]]", "ranks from 0 to 63"),
        ("[[true]]", "ranks from 0 to 63"),
        ("[[0],[1,0]]", r"path \[1, 0\] without \[1\], its parent"),
        ("3", "allowed is a JSON list"),
    ],
)
def test_a_tree_that_is_none_is_refused(given: str, said: str) -> None:
    with pytest.raises(SettingError, match=said):
        MedusaSettings("x", medusa_choices=given)


def test_a_tree_deeper_than_the_heads_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="a path of 4 ranks; allowed are at most 3"):
        kept(tmp_path, (0,), (0, 0), (0, 0, 0), (0, 0, 0, 0))
