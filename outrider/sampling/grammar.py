"""Where one answer stands in its grammar, and which tokens may come next, at every node of a draft tree."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import numpy as np
from numpy.typing import NDArray

from outrider.core.errors import SettingError
from outrider.models.grammars import CompiledGrammar
from outrider.models.values import one_line

EARNED = 0.01
"""Seconds of computing that a request's grammar may take for each token of its answers,"""
CREDIT = 0.2
"""and so many beyond that: all others wait meanwhile, some of it perhaps in a single step."""
DEAR = 3e-4
"""Seconds of a mask from which the next one is worth another thread."""


class Account:
    """What the grammar of one request has taken, in seconds, less what its tokens earned. Its answers share it."""

    def __init__(self) -> None:
        self.spent = 0.0
        self._lock = threading.Lock()

    def earn(self, tokens: int) -> None:
        with self._lock:
            self.spent = max(0.0, self.spent - EARNED * tokens)

    def spend(self, seconds: float) -> None:
        with self._lock:
            self.spent += seconds

    def check(self, where: str) -> None:
        """Raises SettingError, which names the grammar's setting ``where``, when the account is overdrawn."""
        if self.spent > CREDIT:
            said = f"{self.spent:.2f} s of computing beyond {EARNED * 1e3:.0f} ms a token; allowed are {CREDIT:g} s"
            raise SettingError(f"{where} takes too long to follow, {said}", where)


class Matcher:
    """Follows ``tokens`` (an answer's own list, which only grows) from ``n_prompt`` on, and paths of draft tokens.

    To go from one node to another it takes back what the two paths do not share: work is in the tokens that differ.
    Draft tokens that turn out to be the answer's are shared as well. Nothing has to be told of a commit, a rejection
    or a preemption: the state is a function of the tokens. A llguidance matcher that met a limit stays broken; then
    another takes its place, so that what a draft breaks costs the answer nothing.
    """

    def __init__(
        self, grammar: CompiledGrammar, tokens: Sequence[int], n_prompt: int, account: Account | None = None
    ) -> None:
        """``account`` is that of the request; None opens one of the answer's own."""
        self._grammar = grammar
        self._tokens = tokens
        self._n_prompt = n_prompt
        self._matcher = grammar.start()
        self._base = n_prompt  # tokens before it are taken in for good
        self._ahead: list[int] = []  # taken in behind these
        self._next: tuple[int, NDArray[np.bool_]] = (-1, np.zeros(0, dtype=np.bool_))  # what may follow so many tokens
        self._account = account or Account()
        self._seen = len(tokens)  # that have paid in
        self._words = np.zeros((grammar.n_tokens + 31) // 32, dtype=np.int32)
        self._cost = 0.0  # seconds of the newest mask

    @property
    def dear(self) -> bool:
        """Whether the next mask is likely to take long."""
        return self._cost > DEAR

    def prepare(self) -> None:
        """Has what may follow the answer ready for ``allowed``, which also says what is wrong with it."""
        with suppress(Exception):
            self.allowed()

    def allowed(self, path: Sequence[int] = ()) -> NDArray[np.bool_]:
        """bool[n_tokens]: what may follow the answer and the draft tokens ``path``.

        The end tokens are allowed when the grammar is complete, and nothing else once it cannot go on. Behind an end
        token only that can come again: such a draft is cut anyway. Raises SettingError if the tokens so far break the
        grammar, or it became too complex, or too slow. The array is not to be written to.
        """
        with self._timed():
            self._account.check(self._grammar.where)
            if path:
                return self._mask(path)
            if self._next[0] != len(self._tokens):
                self._next = len(self._tokens), self._mask(())
            return self._next[1]

    def count_allowed(self, path: Sequence[int]) -> int:
        """How many of the draft tokens ``path`` may follow one another, up to a first end token and with it.

        0 if that breaks a limit; an answer that is at fault itself hears of it from ``allowed``.
        """
        try:
            first = self.allowed()[path[0]] if path and path[0] < self._grammar.n_tokens else False
            with self._timed():  # where the grammar forces a text, only the mask says that it demands the usual tokens
                return self._count(path) if first else 0
        except SettingError:
            return 0

    def _count(self, path: Sequence[int]) -> int:
        if self._go_to(()):
            return 0
        ends = self._grammar.eos_ids
        end = next((i for i, token in enumerate(path) if token in ends), len(path))
        allowed = int(self._matcher.validate_tokens(list(path[:end])))
        if self._matcher.is_error():
            raise self._failure("")
        if allowed == end < len(path):
            self._go_to(path[:end])
            allowed += bool(self._matcher.is_accepting())
        return allowed

    def _mask(self, path: Sequence[int]) -> NDArray[np.bool_]:
        if self._go_to(path):
            mask = np.zeros(self._grammar.n_tokens, dtype=np.bool_)
            mask[list(self._grammar.eos_ids)] = True
            return mask
        begin = time.perf_counter()
        if self.dear:  # let go of the interpreter meanwhile: other threads have work, too
            words = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        else:
            self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
            words = self._words.view(np.uint8)
        self._cost = time.perf_counter() - begin
        if self._matcher.is_error():
            raise self._failure("")
        return np.unpackbits(words, count=self._grammar.n_tokens, bitorder="little").view(np.bool_)

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
            raise self._failure(f"token {wanted[taken]} breaks the answer's grammar ({self._grammar.where})")
        if end == len(wanted):
            self._base, self._ahead = len(self._tokens), list(path)
        return end < len(wanted)

    def _failure(self, said: str) -> SettingError:
        """What to raise: ``said``, unless llguidance met a limit."""
        if self._matcher.is_error():
            reason = one_line(self._matcher.get_error().partition("<state>")[0], 200)
            said = f"{self._grammar.where} cannot be followed any further: {reason}"
            self._matcher, self._base, self._ahead = self._grammar.start(), self._n_prompt, []
        return SettingError(said, self._grammar.where)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Puts the time on the account, and pays in for the tokens that came; a pause costs nothing."""
        self._account.earn(len(self._tokens) - self._seen)
        self._seen = len(self._tokens)
        begin = time.thread_time()
        try:
            yield
        finally:
            self._account.spend(time.thread_time() - begin)


class Masks:
    """Has the masks of several answers ready at once, on ``threads`` threads, where they take long enough for that."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None

    def prepare(self, matchers: Sequence[Matcher]) -> None:
        dear = [matcher for matcher in matchers if matcher.dear]
        if len(dear) < 2 or self._threads < 2:
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, "outrider-mask")
        for _ in self._pool.map(Matcher.prepare, dear):
            pass
