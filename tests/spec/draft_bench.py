"""Drives a draft model over its own blocks as the engine does, for tests of the drafter alone."""

from __future__ import annotations

from collections.abc import Sequence as List
from typing import Any

import numpy as np
import torch

from outrider.cache.blocks import BlockManager
from outrider.core.draft import Draft
from outrider.core.params import SamplingParams, SpecParams
from outrider.core.types import ForwardOut, Sequence, Span
from outrider.models.load import LoadedModel
from outrider.spec.drafts.model import ModelSettings, TwoModels
from tests.engine.harness import toy_target
from tests.toy import full_logits, toy_config

VOCAB = 12
SHAPE: dict[str, Any] = {"layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1, "ffn": 16}
TARGET = toy_target(toy_config(vocab=VOCAB, **SHAPE), seed=1)
DRAFTER = toy_target(toy_config(vocab=VOCAB, **SHAPE), seed=2)
PROMPT = [3, 1, 4, 1, 5, 9, 2]
GREEDY = SamplingParams(temperature=0)


class Bench:
    """A drafter over its own blocks, driven as the engine does, with a log of the rows it computes."""

    def __init__(
        self,
        drafter: LoadedModel = DRAFTER,
        target: LoadedModel = TARGET,
        method: str = "standard",
        n_blocks: int = 40,
        max_rows: int = 512,
        **options: Any,
    ) -> None:
        self.drafter = TwoModels(drafter, target, method, ModelSettings(model="toy", **options))
        self.blocks = BlockManager(n_blocks, 4)
        self.drafter.start(self.blocks, max_rows)
        self.read: list[tuple[int, int]] = []  # (first, end) of committed rows, pass by pass
        forward = self.drafter.runner.forward

        def logged(spans: List[Span], feature_layers: tuple[int, ...] = ()) -> ForwardOut:
            self.read += [(span.start, span.end) for span in spans if span.n_new]
            return forward(spans, feature_layers)

        self.drafter.runner.forward = logged  # type: ignore[method-assign]

    def add(self, tokens: List[int] = PROMPT, params: SamplingParams = GREEDY, id: int = 0, seed: int = 0) -> Sequence:
        seq = Sequence(id, list(tokens), len(tokens), params, SpecParams(), seed)
        self.blocks.adopt_prefix(seq)
        return seq

    def fork(self, parent: Sequence, id: int) -> Sequence | None:
        """A further choice of the parent's prompt, if that is computed."""
        if not 1 < parent.n_prompt <= parent.n_computed:
            return None
        child = Sequence(id, parent.prompt_ids, parent.n_prompt, parent.params, parent.spec, parent.seed)
        self.blocks.fork(parent, child)
        return child

    def propose(self, *seqs: Sequence, budget: int = 4) -> list[Draft]:
        self.read.clear()
        spans = []
        for seq in seqs:
            self.drafter.copy_blocks(self.blocks.reserve(seq, seq.n_computed, len(seq) + budget) or [])
            spans.append(Span(seq, seq.n_computed, len(seq) - seq.n_computed, budget=budget))
        drafts = self.drafter.propose(spans)
        assert all(len(draft) <= budget for draft in drafts)
        return drafts

    def skip(self, seq: Sequence, token: int) -> None:
        """The target goes on alone for one step."""
        copies = self.blocks.reserve(seq, seq.n_computed, len(seq))
        assert copies is not None
        self.drafter.copy_blocks(copies)
        self.commit(seq, token)

    def commit(self, seq: Sequence, *new: int) -> None:
        """The target accepted all of ``new`` but the last one, which it drew itself."""
        seq.tokens += new
        seq.n_computed = len(seq) - 1
        self.blocks.commit(seq)

    def end(self, seq: Sequence) -> None:
        self.blocks.free(seq)
        self.drafter.release(seq.id)


def logits_after(tokens: List[int], model: LoadedModel = DRAFTER) -> torch.Tensor:
    return full_logits(model.decoder, tokens)[-1]


def law(tokens: List[int], temperature: float = 1.0) -> np.ndarray:
    """What the draft model's own distribution is after ``tokens``."""
    return torch.softmax(logits_after(tokens) / temperature, -1).numpy()


def greedy_chain(tokens: List[int], n: int) -> tuple[int, ...]:
    text = list(tokens)
    for _ in range(n):
        text.append(int(logits_after(text).argmax()))
    return tuple(text[len(tokens) :])
