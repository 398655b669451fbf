"""Lookahead decoding: the target's own guesses at the next tokens, refined step by step, fill a pool of n-grams.

Source: Fu et al., "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding", 2024. No draft model: in
each pass some rows (the probes) work on a window of guessed tokens, as Jacobi iteration would, and each column of the
window yields an n-gram; n-grams that begin with the newest token are verified in the same pass. It pays where rows are
cheap and the text is predictable: code, lists, formulas.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from outrider.core.config import MAX_DRAFT
from outrider.core.draft import Draft
from outrider.core.errors import SettingError
from outrider.core.rng import Stream, uniform
from outrider.core.settings import check_settings, setting
from outrider.core.types import Commit, Span
from outrider.core.types import Sequence as Seq
from outrider.spec.proposer import DraftContext, Needs, Proposer

READ_AT_ONCE = 1024
"""Tokens of the text that are taken in in one call, so that a long prompt which is there at once does not stall it."""
MAX_HEADS = 8192
"""First tokens whose n-grams a request keeps; beyond that those that were not met for longest go."""


@dataclass(frozen=True)
class LookaheadSettings:
    """Window W, n-gram size N and guess set G of the paper; the whole tree has (W + G) (N - 1) - 1 rows."""

    lookahead_window: int = setting(4, "positions ahead that are guessed at once (W)", low=1, high=64)
    lookahead_ngram: int = setting(3, "length of the n-grams that are collected (N)", low=2, high=16)
    lookahead_guesses: int = setting(4, "n-grams that are verified at once (G)", low=1, high=64)
    lookahead_from_text: bool = setting(True, "collect the n-grams of prompt and answer as well")

    def __post_init__(self) -> None:
        check_settings(self)
        if self.draft_length > MAX_DRAFT:
            raise SettingError(
                f"lookahead_window, lookahead_ngram and lookahead_guesses make a tree of {self.draft_length} rows; "
                f"allowed are {MAX_DRAFT}"
            )

    @property
    def draft_length(self) -> int:
        """Rows of the whole tree: G paths of N - 1 guesses, and W columns of N - 1 of which the first is shared."""
        return (self.lookahead_window + self.lookahead_guesses) * (self.lookahead_ngram - 1) - 1


class NgramPool:
    """Of each first token the ``size`` newest n-grams, at most ``MAX_HEADS`` first tokens."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._tails: OrderedDict[int, OrderedDict[tuple[int, ...], None]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._tails.values()))

    def add(self, ngram: Sequence[int]) -> None:
        """Takes in an n-gram; one that is known becomes the newest."""
        head, tail = ngram[0], tuple(ngram[1:])
        tails = self._tails.setdefault(head, OrderedDict())
        self._tails.move_to_end(head)
        tails[tail] = None
        tails.move_to_end(tail)
        if len(tails) > self.size:
            tails.popitem(last=False)
        if len(self._tails) > MAX_HEADS:
            self._tails.popitem(last=False)

    def tails(self, head: int) -> list[tuple[int, ...]]:
        """What followed ``head``, newest first."""
        return list(reversed(self._tails.get(head, ())))


@dataclass
class _State:
    """What is kept of one sequence.

    ``window[r][c]`` is the guess of an earlier step at the token c + r behind the newest one (so [0][0] is the newest
    token itself); the rows are the successive steps, the oldest first. A column is N - 1 tokens in a row.
    """

    pool: NgramPool
    window: list[list[int]] = field(default_factory=lambda: [[]])
    read: int = 0  # tokens of the text whose n-grams are in the pool
    tails: list[int] | None = None  # of the step under way: per column which probe comes last, -1 = the newest token

    def read_text(self, tokens: Sequence[int], stop: int, n: int) -> None:
        """Takes in the n-grams that end in the tokens up to ``stop`` that were not read yet, so many at once."""
        stop = min(stop, self.read + READ_AT_ONCE)
        for end in range(max(self.read + 1, n), stop + 1):
            self.pool.add(tokens[end - n : end])
        self.read = max(self.read, stop)

    def advance(self, outcomes: Sequence[int] | None, steps: int, n: int) -> None:
        """Moves the window ``steps`` tokens on; ``outcomes`` are the new guesses by column, None if none were made."""
        dropped = 0
        if outcomes is not None:
            if len(self.window) == n - 1:
                for column, outcome in enumerate(outcomes):
                    self.pool.add([*(row[column] for row in self.window), outcome])
            self.window.append(list(outcomes))
            if len(self.window) > n - 1:
                dropped = 1
                del self.window[0]
        # Without its oldest row the window stands one token further on.
        self.window = [row[steps - dropped :] for row in self.window]


class Lookahead(Proposer):
    """Guesses that can be accepted come first in the tree, certain ones; behind them the probes of the window."""

    def __init__(self, settings: LookaheadSettings) -> None:
        self.settings = settings
        self.needs = Needs(max_nodes=settings.draft_length)
        self._n = settings.lookahead_ngram
        self._states: dict[int, _State] = {}

    def propose(self, spans: Sequence[Span]) -> list[Draft]:
        return [self._draft(span.seq, span.budget) for span in spans]

    def observe(self, commits: Sequence[Commit]) -> None:
        for commit in commits:
            if commit.finish is not None:
                continue
            state = self._state(commit.seq)
            if commit.new_tokens:
                state.advance(self._outcomes(state, commit), len(commit.new_tokens), self._n)
            state.tails = None
            if self.settings.lookahead_from_text:
                state.read_text(commit.seq.tokens, max(commit.span.end, commit.seq.n_computed + 1), self._n)

    def release(self, seq_id: int) -> None:
        self._states.pop(seq_id, None)

    def _state(self, seq: Seq) -> _State:
        return self._states.setdefault(seq.id, _State(NgramPool(self.settings.lookahead_guesses)))

    def _draft(self, seq: Seq, budget: int) -> Draft:
        state, newest = self._state(seq), seq.tokens[-1]
        if self.settings.lookahead_from_text:
            state.read_text(seq.tokens, len(seq), self._n)
        self._fill(state.window, seq)
        paths, height = state.pool.tails(newest), len(state.window)
        # Too small a budget costs guesses first, all but one; then columns of the window.
        one = self._n - 1 if paths else 0
        columns = max(0, min(self.settings.lookahead_window, (budget - one + 1) // height))
        guesses = Draft.branches(paths, budget - max(0, columns * height - 1))
        draft, state.tails = _with_probes(guesses, state.window, columns)
        return draft if guesses else replace(draft, reason="no n-gram begins with the newest token")

    def _fill(self, window: list[list[int]], seq: Seq) -> None:
        """Completes the rows of the window with tokens of the text, picked at random."""
        for r, row in enumerate(window):
            for c in range(len(row), self.settings.lookahead_window):
                row.append(seq.tokens[int(len(seq) * uniform(seq.seed, len(seq), r, c, Stream.DRAFT))])
        window[0][0] = seq.tokens[-1]

    def _outcomes(self, state: _State, commit: Commit) -> list[int] | None:
        """The target's token after each column."""
        probes = commit.probe_tokens
        if not state.tails or max(state.tails) >= len(probes):
            return None
        return [probes[tail] if tail >= 0 else commit.new_tokens[0] for tail in state.tails]


def _with_probes(guesses: Draft, window: Sequence[Sequence[int]], columns: int) -> tuple[Draft, list[int]]:
    """The guesses with the first ``columns`` columns of the window behind them, and which probe ends each column.

    The window's oldest row is a chain from the newest token on; a column hangs under its own token of that chain.
    """
    first = len(guesses)
    tokens, parents = list(guesses.tokens), list(guesses.parents)

    def add(token: int, parent: int) -> int:
        tokens.append(token)
        parents.append(parent)
        return len(tokens) - 1

    tails: list[int] = []
    for column in range(columns):
        node = tails[-1] if column else -1
        tails.append(add(window[0][column], node) if column else -1)
    for column, node in enumerate(tails):
        for row in window[1:]:
            node = add(row[column], node)
        tails[column] = max(-1, node - first)
    return Draft(tuple(tokens), tuple(parents), (None,) * len(tokens), n_verify=first), tails


def build(context: DraftContext, settings: LookaheadSettings) -> Proposer:
    return Lookahead(settings)
