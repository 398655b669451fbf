"""Two vocabularies: which token of one is which of the other's, and any bytes as tokens of the draft model.

Source: drafting over the tokens that both have is the token-level intersection of Timor et al., "Accelerating LLM
Inference with Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies", 2025.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from outrider.core.errors import SettingError
from outrider.models.tokenizer import byte_token

if TYPE_CHECKING:
    from outrider.models.load import LoadedModel
    from outrider.models.tokenizer import Tokenizer

LEAST_SHARED = 0.05
"""Of the smaller vocabulary, the part that both must have: the 256 bytes alone are no common language."""


class SharedVocabulary:
    """The tokens that ``drafter`` and ``target`` have in common, and what to read in place of the others.

    Ordinary tokens are the same when their bytes are, however they are written (``Ġthe``, ``▁the``, ``<0x0A>``). Where
    several tokens of one model have the same bytes, the first ordinary one pairs with the other's first one, and so on;
    byte tokens come last. Control tokens pair by name, and the first BOS and EOS by what they are for.

    ``target_ids`` i64[M] and ``draft_ids`` i64[M] are the pairs, one to one: what can be drafted. Raises SettingError
    when a tokenizer is missing, or too few tokens are shared.
    """

    def __init__(self, drafter: LoadedModel, target: LoadedModel) -> None:
        for model in (drafter, target):
            if model.tokenizer is None:
                raise SettingError(
                    f"use_heterogeneous_vocab is True, but {model.name} has no tokenizer; allowed are two models that "
                    "have one"
                )
        assert drafter.tokenizer is not None
        assert target.tokenizer is not None
        self._tokenizer: Tokenizer = drafter.tokenizer
        self._target: Tokenizer = target.tokenizer
        self._n_draft = drafter.n_tokens
        mine, theirs = _ordinary(target), _ordinary(drafter)
        self._pieces = {text: ids[0] for text, ids in theirs.items()}
        self._longest = max(map(len, self._pieces), default=0)
        pairs = {t: d for text, ids in mine.items() for t, d in zip(ids, theirs.get(text, ()), strict=False)}
        smaller = min(sum(map(len, mine.values())), sum(map(len, theirs.values())))
        if len(pairs) < max(1, LEAST_SHARED * smaller):
            raise SettingError(
                f"the draft model {drafter.name} and {target.name} share {len(pairs)} tokens of vocabularies of "
                f"{target.n_tokens} and {drafter.n_tokens}; allowed with use_heterogeneous_vocab are models that share "
                f"at least {LEAST_SHARED:.0%} of the smaller vocabulary"
            )
        pairs |= _control_pairs(drafter, target)
        self.target_ids = np.array(sorted(pairs), dtype=np.int64)
        self.draft_ids = np.array([pairs[t] for t in sorted(pairs)], dtype=np.int64)
        # Reading needs no pairs: two tokens of the same bytes are read as one.
        self._draft_of = {t: self._pieces[text] for text, ids in mine.items() if text in self._pieces for t in ids}
        self._draft_of |= pairs
        bos = drafter.tokenizer.bos_id if drafter.tokenizer.adds_bos else None
        self.prefix: tuple[int, ...] = () if bos is None or bos >= drafter.config.vocab_size else (bos,)
        """What the draft model wants in front of every text."""

    def draft_id(self, token: int) -> int | None:
        """The draft model's token for a token of the target's; None where it has none of the same bytes."""
        return self._draft_of.get(token)

    def text_of(self, token: int) -> bytes:
        """What to read in place of a token that the draft model lacks: its bytes; a BOS is left out."""
        return b"" if token == self._target.bos_id else self._target.token_bytes(token)

    def encode(self, text: bytes) -> list[int]:
        """``text``, from the middle of a longer one, as the draft model's tokenizer splits it; no byte is changed.

        Where it would change them (a normaliser), or they are no UTF-8, the longest pieces of the vocabulary, from the
        left. Bytes that it cannot write at all are left out.
        """
        try:
            ids = self._tokenizer.encode(text.decode(), specials=False, add_bos=False) if text else []
        except UnicodeDecodeError:
            return list(self._spelled(text))
        pieces = [self._tokenizer.token_bytes(i) for i in ids]
        if b"".join(pieces) == b" " + text:  # SentencePiece puts a space before a text
            return [*self._spelled(pieces[0][1:]), *ids[1:]]
        exact = b"".join(pieces) == text and max(ids, default=0) < self._n_draft  # a model may lack its last tokens
        return ids if exact else list(self._spelled(text))

    def _spelled(self, text: bytes) -> Iterator[int]:
        at = 0
        while at < len(text):
            ends = range(min(len(text), at + self._longest), at, -1)
            end = next((end for end in ends if text[at:end] in self._pieces), None)
            if end is not None:
                yield self._pieces[text[at:end]]
            at = at + 1 if end is None else end


def _ordinary(model: LoadedModel) -> dict[bytes, list[int]]:
    """By bytes, the ids of the tokens that are no control tokens; of equals, byte tokens last."""
    tokenizer = model.tokenizer
    assert tokenizer is not None
    found: dict[bytes, list[int]] = defaultdict(list)
    bytes_last: list[tuple[bytes, int]] = []
    for i in _known(model):
        text = tokenizer.token_bytes(i)
        if tokenizer.is_special(i) or not text:
            continue
        if len(text) == 1 and byte_token(tokenizer.token(i)) is not None:
            bytes_last.append((text, i))
        else:
            found[text].append(i)
    for text, i in bytes_last:
        found[text].append(i)
    return dict(found)


def _known(model: LoadedModel) -> Sequence[int]:
    unused = frozenset(model.unused_ids)
    return [i for i in range(model.n_tokens) if i not in unused]


def _control_pairs(drafter: LoadedModel, target: LoadedModel) -> dict[int, int]:
    """Pairs of control tokens: those of one name, then BOS and EOS under whatever names."""
    mine, theirs = target.tokenizer, drafter.tokenizer
    assert mine is not None
    assert theirs is not None
    names = {theirs.token(i): i for i in _known(drafter) if theirs.is_special(i)}
    special = [i for i in _known(target) if mine.is_special(i)]
    pairs = {i: names[mine.token(i)] for i in special if mine.token(i) in names}
    for own, other in (((mine.bos_id,), (theirs.bos_id,)), (target.config.eos_ids, drafter.config.eos_ids)):
        first = next((i for i in own if i is not None), None)
        free = (i for i in other if i is not None and i < drafter.n_tokens and i not in pairs.values())
        partner = next(free, None)
        if first in special and not pairs.keys() & set(own) and partner is not None and theirs.is_special(partner):
            pairs[first] = partner
    return pairs
