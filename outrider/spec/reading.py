"""How a draft model with KV of its own reads the target's text: as it is, or in the ids of another vocabulary."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.cache.blocks import BlockManager, Copy
from outrider.core.errors import SettingError
from outrider.core.types import Sequence as Seq
from outrider.models.load import LoadedModel
from outrider.spec.vocabulary import SharedVocabulary

LONGEST_STRETCH = 64
"""Bytes without a common token that are split together; what comes later never changes how they were split."""


class Reading(Protocol):
    """What the draft model reads, and where its KV of it stands."""

    same_blocks: bool
    """Whether the KV stands under the target's own block ids."""

    def start(self, blocks: BlockManager) -> BlockManager:
        """The blocks under which the KV stands; ``blocks`` are the target's."""

    def read(self, seq: Seq) -> tuple[Seq, int]:
        """The sequence that the draft model reads for ``seq``, and how many of its first tokens are as last time.

        It is the same object until ``release``; all of its tokens count as unchanged when it is new.
        """

    def make_room(self, text: Seq, valid: int, budget: int) -> Sequence[Copy] | None:
        """Slots for what comes after the ``valid`` tokens whose KV is right; copies to do first, None without room."""

    def ids(self, tokens: Iterable[int]) -> list[int]:
        """Draft tokens in the draft model's ids."""

    def columns(self, logits: NDArray[np.floating]) -> NDArray[np.floating]:
        """Logits [N,V of the target] from the draft model's own [N,V]; what it lacks can never be drawn."""

    def release(self, seq_id: int) -> None:
        """The sequence ended or lost its KV."""


class SameTokens:
    """Both models have the same tokens: one text, and the target's block ids for both."""

    same_blocks = True

    def __init__(self, drafter: LoadedModel, target: LoadedModel) -> None:
        check_same_tokens(drafter, target)
        self._n_rows = target.config.vocab_size

    def start(self, blocks: BlockManager) -> BlockManager:
        return blocks

    def read(self, seq: Seq) -> tuple[Seq, int]:
        return seq, len(seq)

    def make_room(self, text: Seq, valid: int, budget: int) -> Sequence[Copy] | None:
        return ()  # the engine reserved them

    def ids(self, tokens: Iterable[int]) -> list[int]:
        return list(tokens)

    def columns(self, logits: NDArray[np.floating]) -> NDArray[np.floating]:
        missing = self._n_rows - logits.shape[1]
        if missing > 0:
            logits = np.pad(logits, ((0, 0), (0, missing)), constant_values=-np.inf)
        return logits[:, : self._n_rows]

    def release(self, seq_id: int) -> None:
        """Nothing is kept."""


@dataclass
class _Translation:
    """One sequence's text in the draft model's ids, grown as the target's text grows."""

    text: Seq
    taken: int = 0  # tokens of the target's that are in it
    settled: int = 0  # draft ids before the open stretch
    stretch: bytearray = field(default_factory=bytearray)  # the bytes at the end that no common token stands for

    def follow(self, tokens: Sequence[int], shared: SharedVocabulary) -> int:
        """Takes in what is new of ``tokens``; returns how many of the first ids are as they were."""
        ids = self.text.tokens
        first, before = self.settled, ids[self.settled :]
        del ids[self.settled :]
        for token in tokens[self.taken :]:
            own = shared.draft_id(token)
            if own is None:
                self.stretch += shared.text_of(token)
            if own is not None or len(self.stretch) >= LONGEST_STRETCH:
                ids += shared.encode(bytes(self.stretch))
                self.stretch.clear()
                ids += () if own is None else (own,)
                self.settled = len(ids)
        self.taken = len(tokens)
        ids += shared.encode(bytes(self.stretch))
        pairs = enumerate(zip(before, ids[first:], strict=False))
        same = next((i for i, (old, new) in pairs if old != new), min(len(before), len(ids) - first))
        return first + same


class OtherTokens:
    """The models have different tokens: the text is translated, and its KV stands in blocks of the draft model's own.

    A common token is read as the draft model's own one; the text of a stretch of other tokens is split by the draft
    model's tokenizer. So a drafted token, which is always a common one, is read as it was drafted, and its KV stays.
    """

    same_blocks = False

    def __init__(self, drafter: LoadedModel, target: LoadedModel) -> None:
        self.shared = SharedVocabulary(drafter, target)
        self._n_rows = target.config.vocab_size
        self._target_ids, self._draft_ids = self.shared.target_ids, self.shared.draft_ids
        self._texts: dict[int, _Translation] = {}

    def start(self, blocks: BlockManager) -> BlockManager:
        self._blocks = BlockManager(blocks.n_blocks, blocks.block_size, blocks.prefix_caching)
        return self._blocks

    def read(self, seq: Seq) -> tuple[Seq, int]:
        known = self._texts.get(seq.id)
        if known is not None:
            return known.text, known.follow(seq.tokens, self.shared)
        ids = list(self.shared.prefix)
        if ids and self.shared.draft_id(seq.tokens[0]) == ids[0]:
            ids = []
        text = Seq(seq.id, ids, 0, seq.params, seq.spec, seq.seed)
        known = self._texts[seq.id] = _Translation(text, settled=len(ids))
        known.follow(seq.tokens, self.shared)
        if text.tokens:
            self._blocks.adopt_prefix(text)
        return text, len(text)

    def make_room(self, text: Seq, valid: int, budget: int) -> Sequence[Copy] | None:
        text.n_computed = valid
        self._blocks.commit(text)
        return self._blocks.reserve(text, valid, len(text) + budget)

    def ids(self, tokens: Iterable[int]) -> list[int]:
        return [own for token in tokens if (own := self.shared.draft_id(token)) is not None]

    def columns(self, logits: NDArray[np.floating]) -> NDArray[np.floating]:
        wide = np.full((len(logits), self._n_rows), -np.inf, logits.dtype)
        wide[:, self._target_ids] = logits[:, self._draft_ids]
        return wide

    def release(self, seq_id: int) -> None:
        known = self._texts.pop(seq_id, None)
        if known is not None:
            self._blocks.free(known.text)


def check_same_tokens(drafter: LoadedModel, target: LoadedModel) -> None:
    """Raises SettingError unless every ordinary token id means the same to both models."""
    difference = _difference(drafter, target)
    if difference is not None:
        token, mine, theirs = difference
        assert target.tokenizer is not None
        assert drafter.tokenizer is not None
        raise SettingError(
            f"the draft model {drafter.name} has another tokenizer than {target.name}: token {token} is {mine!r} for "
            f"the target and {theirs!r} for the draft (sizes {target.tokenizer.vocab_size} and "
            f"{drafter.tokenizer.vocab_size}); allowed is a draft model with the target's tokens, or any one with "
            "use_heterogeneous_vocab"
        )


def _difference(drafter: LoadedModel, target: LoadedModel) -> tuple[int, str | None, str | None] | None:
    if drafter.tokenizer is None or target.tokenizer is None:
        return None
    return target.tokenizer.first_difference(drafter.tokenizer)


def reading_for(drafter: LoadedModel, target: LoadedModel, heterogeneous: bool) -> Reading:
    """How ``drafter`` reads ``target``'s text. Tokenizers that turn out the same need no translation.

    Raises SettingError when they differ and ``heterogeneous`` is not set, or when they have too little in common.
    """
    if not heterogeneous:
        return SameTokens(drafter, target)
    known = drafter.tokenizer is not None and target.tokenizer is not None
    if known and _difference(drafter, target) is None:
        return SameTokens(drafter, target)
    return OtherTokens(drafter, target)
