"""One answer as the caller sees it: text, tokens, logprobs and where it ends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.core.errors import SettingError
from outrider.core.types import FinishReason, Sequence
from outrider.models.detokenizer import Detokenizer
from outrider.sampling.grammar import Account
from outrider.sampling.history import History
from outrider.sampling.logprobs import TokenLogprob
from outrider.sampling.sampler import Sampler


@dataclass
class SpecStats:
    """Raw speculation counters of one answer (or of many, added up); every rate is derived.

    A *step* is a forward pass that gave this answer at least one token. ``accepted`` counts draft tokens that are in
    the answer, never one that was cut at EOS or a stop; every other drafted token counts as rejected.
    """

    steps: int = 0
    drafts: int = 0  # steps with at least one draft token
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)  # [d]: how often draft token d + 1 was accepted
    no_draft: dict[str, int] = field(default_factory=dict)  # steps without a draft, by the drafter's reason
    by_source: dict[str, tuple[int, int]] = field(default_factory=dict)  # (drafted, accepted), where drafters share

    def add_step(
        self,
        drafted: int,
        accepted: int,
        emitted: int,
        reason: str = "",
        sources: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        self.steps += 1
        self.drafts += drafted > 0
        self.drafted += drafted
        self.accepted += accepted
        self.emitted += emitted
        if accepted:
            counts = self.accepted_per_position
            counts += [0] * (accepted - len(counts))
            for depth in range(accepted):
                counts[depth] += 1
        if reason:
            self.no_draft[reason] = self.no_draft.get(reason, 0) + 1
        if sources:
            self._add_sources(sources)

    def _add_sources(self, sources: Mapping[str, tuple[int, int]]) -> None:
        for source, (drafted, accepted) in sources.items():
            before = self.by_source.get(source, (0, 0))
            self.by_source[source] = (before[0] + drafted, before[1] + accepted)

    @staticmethod
    def total(parts: Iterable[SpecStats]) -> SpecStats:
        """The sum of several answers' counters."""
        out = SpecStats()
        for part in parts:
            for name in ("steps", "drafts", "drafted", "accepted", "emitted"):
                setattr(out, name, getattr(out, name) + getattr(part, name))
            for depth, count in enumerate(part.accepted_per_position):
                if depth == len(out.accepted_per_position):
                    out.accepted_per_position.append(0)
                out.accepted_per_position[depth] += count
            for reason, count in part.no_draft.items():
                out.no_draft[reason] = out.no_draft.get(reason, 0) + count
            out._add_sources(part.by_source)
        return out

    @property
    def tokens_per_step(self) -> float:
        """Tokens a forward pass yields, the target's own included; 1 is plain decoding."""
        return self.emitted / self.steps if self.steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted tokens per draft: the bonus token counts."""
        return 1 + self.accepted / self.drafts if self.drafts else 1.0


class Segment(NamedTuple):
    """A piece of text, and whether it came from an accepted draft token."""

    text: str
    drafted: bool


class Answer:
    """Follows one sequence's output: turns tokens into text, finds its end, holds back text that may be cut."""

    def __init__(
        self,
        seq: Sequence,
        sampler: Sampler,
        detokenizer: Detokenizer | None,
        eos_ids: tuple[int, ...],
        account: Account | None = None,
    ) -> None:
        self.seq = seq
        self.sampler = sampler
        self.history = History(seq.tokens, seq.n_prompt, account)
        self.stats = SpecStats()
        self.logprobs: list[TokenLogprob] = []
        self.finish: FinishReason | None = None
        self.error = ""
        self.fault: str | None = None  # the setting that the error is about
        self.began: float | None = None  # perf_counter seconds: of its first rows, its first token, its newest token
        self.first_token: float | None = None
        self.last_token = 0.0
        self.text = ""
        self.drafted: list[bool] = []  # per output token: was it an accepted draft token?
        self._detokenizer = detokenizer
        self._ends: list[int] = []  # per output token: length of the text after it
        self._taken = 0  # tokens already handed out
        self._released = 0  # characters already handed out
        self._next = 0  # the first token whose text is not handed out in full
        stop_ids = set(seq.params.stop_token_ids)
        self._stop_ids = stop_ids if seq.params.ignore_eos else stop_ids | set(eos_ids)
        self._longest_stop = max((len(s) for s in seq.params.stop), default=0)

    def push(self, token: int, drafted: bool) -> FinishReason | None:
        """Adds the next token, already appended to the sequence; returns why the answer ends with it, if it does."""
        before = len(self.text)
        if self._detokenizer is not None and token not in self._stop_ids:
            self.text += self._detokenizer.push(token)
        self.drafted.append(drafted)
        self._ends.append(len(self.text))
        self.finish = self._reason_to_stop(token, before)
        if self.finish is not None:
            self._close()
        return self.finish

    def end(self, reason: FinishReason, error: str = "") -> None:
        """Ends the answer from outside: abort, or a rule that could not be applied."""
        self.finish, self.error = reason, error
        self._close()

    def fail(self, error: Exception) -> None:
        """Ends the answer for a rule that could not be applied."""
        self.fault = error.setting if isinstance(error, SettingError) else None
        self.end(FinishReason.ERROR, str(error) or type(error).__name__)

    def take(self) -> tuple[tuple[int, ...], tuple[TokenLogprob, ...] | None]:
        """The tokens since the last call, and their logprobs if they were asked for."""
        tokens = tuple(self.seq.tokens[self.seq.n_prompt + self._taken :])
        logprobs = None if self.seq.params.logprobs is None else tuple(self.logprobs[self._taken :])
        self._taken += len(tokens)
        return tokens, logprobs

    def release(self) -> list[Segment]:
        """The text since the last call that no stop string can take back any more."""
        text, ends, begin, token = self.text, self._ends, self._released, self._next
        until = len(text) if self.finish is not None else len(text) - self._held_back()
        segments: list[Segment] = []
        while begin < until:
            while token < len(ends) and ends[token] <= begin:
                token += 1
            last = token == len(ends)  # what the detokenizer gave when it was flushed
            end = until if last else min(ends[token], until)
            segments.append(Segment(text[begin:end], not last and self.drafted[token]))
            begin = end
        self._released, self._next = begin, token
        return segments

    def _reason_to_stop(self, token: int, before: int) -> FinishReason | None:
        seq = self.seq
        if token in self._stop_ids:
            return FinishReason.STOP
        if self._longest_stop and seq.n_output >= seq.params.min_tokens:
            cut = self._stop_string_at(before)
            if cut is not None:
                self.text = self.text[:cut]
                self._ends = [min(end, cut) for end in self._ends]
                self._detokenizer = None  # what it still holds back lies behind the cut
                return FinishReason.STOP
        return FinishReason.LENGTH if len(seq.tokens) >= seq.max_len else None

    def _stop_string_at(self, before: int) -> int | None:
        """Where the first stop string begins that the newest token, whose text starts at ``before``, completed."""
        stops = self.seq.params.stop
        found = [at for s in stops if (at := self.text.find(s, max(0, before - len(s) + 1))) >= 0]
        return min(found) if found else None

    def _held_back(self) -> int:
        """Characters at the end of the text that may become part of a stop string."""
        for length in range(min(self._longest_stop - 1, len(self.text)), 0, -1):
            tail = self.text[-length:]
            if any(s.startswith(tail) for s in self.seq.params.stop):
                return length
        return 0

    def _close(self) -> None:
        if self._detokenizer is not None:
            self.text += self._detokenizer.flush()
            self._detokenizer = None
