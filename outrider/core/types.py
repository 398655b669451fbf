"""The small typed values that the parts of the engine hand to each other.

Those that every step makes anew are named tuples: a frozen dataclass takes several times as long to make.

Sizes in shapes: N rows, B sequences, M logit rows, T draft nodes, V vocabulary, F feature width, P blocks a sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.core.dist import Dist
from outrider.core.draft import Draft
from outrider.core.params import SamplingParams, SpecParams

_NONE: Mapping[str, Any] = MappingProxyType({})


class Status(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(str, Enum):
    """Why a sequence ended."""

    STOP = "stop"  # EOS, a stop token or a stop string
    LENGTH = "length"  # max_tokens, the context or the KV pool is used up
    ABORT = "abort"  # the caller asked for it
    ERROR = "error"  # a rule of the request could not be applied


@dataclass(eq=False)
class Sequence:
    """One answer in the making. It holds no field of any drafting method.

    The newest token is always pending: known, but not yet in the KV cache, so that ``n_computed < len(tokens)``.
    """

    id: int
    tokens: list[int]  # prompt and output
    n_prompt: int
    params: SamplingParams
    spec: SpecParams
    seed: int
    n_computed: int = 0  # tokens whose KV is in the cache
    n_cached: int = 0  # of these, how many were found in the prefix cache on admission
    blocks: list[int] = field(default_factory=list)  # physical block ids, in order
    digests: list[bytes] = field(default_factory=list)  # of the full blocks of tokens, as far as they were looked up
    status: Status = Status.WAITING
    fork_of: Sequence | None = None  # n > 1: the choice whose prompt this one shares
    max_len: int = 0  # prompt and output together may not exceed this
    max_draft: int = 0  # draft rows a step at most; 0 = plain decoding

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def n_output(self) -> int:
        """Output tokens so far."""
        return len(self.tokens) - self.n_prompt

    @property
    def prompt_ids(self) -> list[int]:
        return self.tokens[: self.n_prompt]

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[self.n_prompt :]


@dataclass
class Span:
    """The rows of one sequence in one forward pass: ``n_new`` committed tokens from ``start``, then the draft's nodes.

    ``start`` is the first token not yet in this runner's KV. ``budget`` is how many draft rows have room (KV slots are
    reserved for them). A span that stops short of its sequence's end is a middle chunk of a prompt: no logits.
    ``done`` draft rows already have their KV from an earlier pass of the same step (a draft model growing its draft).
    """

    seq: Sequence
    start: int
    n_new: int
    budget: int = 0
    draft: Draft = field(default_factory=Draft.nothing)
    done: int = 0

    @property
    def end(self) -> int:
        """One past the last committed row: the slot of the first draft row."""
        return self.start + self.n_new

    @property
    def n_rows(self) -> int:
        """Rows in the pass."""
        return self.n_new + len(self.draft.tokens) - self.done

    @property
    def n_logit_rows(self) -> int:
        """Rows that get logits: the newest token's and the draft's, unless this is a middle chunk of a prompt."""
        if self.start + self.n_new != len(self.seq.tokens):
            return 0
        return (self.n_new > 0) + len(self.draft.tokens) - self.done

    @property
    def reaches_end(self) -> bool:
        """Whether the newest token is among the rows, so that a next token comes out."""
        return self.start + self.n_new == len(self.seq.tokens)


@dataclass(frozen=True, eq=False)
class Batch:
    """The flat rows of one forward pass, as numbers in main memory.

    A sequence's rows sit in its last logical slots, ``kv_len - rows .. kv_len - 1``, in order. A row sees slot s of its
    sequence when ``s <= own slot and (s < tail_start or its ancestor bit is set)``. Ancestor bit i stands for slot
    tail_start + i, whose position is ``tail_positions[b][i]``; before the tail, position and slot are the same.
    """

    ids: NDArray[np.int64]  # [N] token ids
    positions: NDArray[np.int64]  # [N] rotary positions (depth in the tree for draft rows)
    slots: NDArray[np.int64]  # [N] physical KV slots: block id * block size + offset
    cu_rows: tuple[int, ...]  # [B+1] first row of each sequence
    kv_len: tuple[int, ...]  # [B] slots in use after this pass, this pass's rows included
    block_tables: NDArray[np.int64]  # [B,P] physical block ids, padded with 0
    tail_start: tuple[int, ...]  # [B] first draft slot
    ancestors: NDArray[np.int64] | None  # [N,W] bit masks; None when every draft is a chain (plain causal)
    tail_positions: tuple[tuple[int, ...], ...]  # [B] positions of the slots tail_start .. kv_len - 1
    logit_rows: NDArray[np.int64]  # [M] rows whose logits are wanted, ascending
    block_size: int

    @property
    def n_rows(self) -> int:
        return self.cu_rows[-1]

    @property
    def n_seqs(self) -> int:
        return len(self.kv_len)


@dataclass(frozen=True, eq=False)
class ForwardOut:
    """What a forward pass gives: ``logits`` [M,V] in main memory, in fp32 (fp64 of a model in fp64).

    ``features`` [N,F] are on the model's device, when layers were asked for. ``best`` [M] is the token of each row's
    greatest logit, the first of equals, where the operations noted it while they had the row at hand; -1: not known, or
    one is not finite.
    """

    logits: NDArray[np.floating]
    features: torch.Tensor | None = None
    best: NDArray[np.int64] | None = None


class Verdict(NamedTuple):
    """What verification decided: the draft nodes that stay, root first, and the token that follows them."""

    path: tuple[int, ...]
    next_token: int


class Draws(Protocol):
    """The random decisions of one sequence in one step; `depth` counts from 1 at the last committed token's child."""

    def accept(self, prob: float, depth: int, index: int) -> bool:
        """True with probability ``prob`` (>= 1 is always true, <= 0 never); ``index`` tells siblings apart."""

    def pick(self, dist: Dist, depth: int) -> int:
        """A token drawn from ``dist``."""


class Commit(NamedTuple):
    """What one step settled for one sequence; drafters learn from it, prompt chunks included.

    ``new_tokens`` were appended to the sequence (already cut at EOS, a stop or max_tokens). ``rows`` are the kept rows
    of the span: its committed rows, then the accepted draft rows, as indices into the span. ``probe_tokens`` are the
    target's greedy tokens after each probe row.
    """

    span: Span
    rows: tuple[int, ...]
    new_tokens: tuple[int, ...]
    accepted: int
    features: torch.Tensor | None = None  # [len(rows), F]
    probe_tokens: tuple[int, ...] = ()
    finish: FinishReason | None = None

    @property
    def seq(self) -> Sequence:
        return self.span.seq


class SpanRecord(NamedTuple):
    """One sequence's part in a step, for controller and metrics; ``accepted`` counts only tokens that were kept."""

    seq_id: int
    drafter: str
    rows: int
    drafted: int
    depths: tuple[int, ...]  # of the drafted rows
    accepted: int
    emitted: int
    reason: str = ""  # why there was no draft although there was a budget
    sources: Mapping[str, tuple[int, int]] = _NONE  # (drafted, accepted) by who proposed them
    path: tuple[int, ...] = ()  # the accepted drafted rows


class StepTimes(NamedTuple):
    """Seconds of each phase of a step."""

    schedule: float
    draft: float
    forward: float
    verify: float
    commit: float

    @property
    def total(self) -> float:
        return sum(self)


class StepRecord(NamedTuple):
    """Times and counts of one engine step."""

    times: StepTimes
    prompt_rows: int
    decode_rows: int
    draft_rows: int
    spans: tuple[SpanRecord, ...]
    free_blocks: int
    preempted: int
    running: int
    waiting: int
    draft_seconds: Mapping[str, float] = _NONE  # of the drafters that were asked, by name
