"""Where one answer stands in its grammar, and which tokens may come next, at every node of a draft tree."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.core.errors import SettingError
from outrider.models.grammars import CompiledGrammar
from outrider.models.values import one_line


class Matcher:
    """Follows ``tokens`` (an answer's own list, which only grows) from ``n_prompt`` on, and paths of draft tokens.

    To go from one node to another it takes back what the two paths do not share: work is in the tokens that differ.
    Draft tokens that turn out to be the answer's are shared as well. Nothing has to be told of a commit, a rejection
    or a preemption: the state is a function of the tokens.
    """

    def __init__(self, grammar: CompiledGrammar, tokens: Sequence[int], n_prompt: int) -> None:
        self._grammar = grammar
        self._matcher = grammar.start()
        self._tokens = tokens
        self._base = n_prompt  # tokens before it are taken in for good
        self._ahead: list[int] = []  # taken in behind these
        self._words = np.zeros((grammar.n_tokens + 31) // 32, dtype=np.int32)

    def allowed(self, path: Sequence[int] = ()) -> NDArray[np.bool_]:
        """bool[n_tokens]: what may follow the answer and the draft tokens ``path``.

        The end tokens are allowed when the grammar is complete, and nothing else once it cannot go on. Behind an end
        token only that can come again: such a draft is cut anyway. Raises SettingError if the tokens so far break the
        grammar, or it became too complex.
        """
        if self._go_to(path):
            mask = np.zeros(self._grammar.n_tokens, dtype=np.bool_)
            mask[list(self._grammar.eos_ids)] = True
            return mask
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        if self._matcher.is_error():
            reason = one_line(self._matcher.get_error(), 200)
            raise SettingError(f"{self._grammar.where} cannot be followed any further: {reason}")
        bits = np.unpackbits(self._words.view(np.uint8), count=self._grammar.n_tokens, bitorder="little")
        return bits.view(np.bool_)

    def count_allowed(self, path: Sequence[int]) -> int:
        """How many of the draft tokens ``path`` may follow one another, up to a first end token and with it."""
        if self._go_to(()):
            return 0
        ends = self._grammar.eos_ids
        end = next((i for i, token in enumerate(path) if token in ends), len(path))
        allowed = int(self._matcher.validate_tokens(list(path[:end])))
        if allowed == end < len(path):
            self._go_to(path[:end])
            allowed += bool(self._matcher.is_accepting())
        return allowed

    def _go_to(self, path: Sequence[int]) -> bool:
        """Takes in answer and ``path``, up to an end token; returns whether there is one."""
        wanted = [*self._tokens[self._base :], *path]
        ends = self._grammar.eos_ids
        end = next((i for i, token in enumerate(wanted) if token in ends), len(wanted))
        shared = 0
        while shared < min(end, len(self._ahead)) and wanted[shared] == self._ahead[shared]:
            shared += 1
        if shared < len(self._ahead):
            self._matcher.rollback(len(self._ahead) - shared)
        taken = shared + self._matcher.try_consume_tokens(wanted[shared:end])
        self._ahead = wanted[:taken]
        if taken < end:
            raise SettingError(f"token {wanted[taken]} breaks the answer's grammar ({self._grammar.where})")
        if end == len(wanted):
            self._base, self._ahead = len(self._tokens), list(path)
        return end < len(wanted)
