"""Who gets how many rows in the next forward pass.

There are no phases. Each sequence gets ``min(tokens not yet computed, rows left)`` rows: that one rule is prefill,
chunked prefill and decode. Draft rows use what is then left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from outrider.cache.blocks import BlockManager, Copy
from outrider.core.draft import Draft
from outrider.core.types import Sequence, Span, Status
from outrider.spec.controller import DraftController


@dataclass
class Plan:
    """One step: spans to compute, block copies to do first, and the sequences that lost their blocks."""

    spans: list[Span] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)


class Scheduler:
    """Continuous batching over one block manager; ``max_rows`` is the row budget of a pass.

    ``on_admit`` is told of each sequence that leaves the queue.
    """

    def __init__(
        self,
        blocks: BlockManager,
        controller: DraftController,
        max_seqs: int,
        max_rows: int,
        on_admit: Callable[[Sequence], None] = lambda _: None,
    ) -> None:
        self.blocks = blocks
        self.controller = controller
        self.max_seqs = max_seqs
        self.max_rows = max_rows
        self._on_admit = on_admit
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first
        self._step = 0
        self._last_step: dict[int, int] = {}  # when a running sequence last had rows

    @property
    def prompts_wait(self) -> bool:
        """Whether any sequence may be let in, or has more than its newest token to compute."""
        if self.waiting and len(self.running) < self.max_seqs:
            return True
        return any(len(seq) - seq.n_computed > 1 for seq in self.running)

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def remove(self, seq: Sequence) -> None:
        """Takes out a sequence that ended, wherever it is, and frees its blocks. Doing it twice is harmless."""
        if seq.status is Status.WAITING:
            self.waiting.remove(seq)
        elif seq.status is Status.RUNNING:
            self.running.remove(seq)
            del self._last_step[seq.id]
        seq.status = Status.FINISHED
        self.blocks.free(seq)

    def preempt_all(self) -> list[Sequence]:
        """Takes the blocks of all running sequences and queues them again, the oldest first; returns them."""
        plan = Plan()
        for seq in reversed(list(self.running)):
            self._preempt(plan, seq)
        return plan.preempted

    def schedule(self) -> Plan:
        """Plans the next step and reserves its KV slots; drafts are filled in later.

        First come those that need one row, then their drafts (at most half of the rows that are left while prompts wait
        for them), then prompts, then the drafts of those that got to their end.
        """
        plan = Plan()
        self._step += 1
        rows = self._continue(plan, self.max_rows, prompts=False)
        prompts_wait = bool(self.waiting) or len(plan.spans) < len(self.running)
        rows -= self._give_draft_budgets(plan, rows // 2 if prompts_wait else rows)
        if prompts_wait:
            rows = self._continue(plan, rows, prompts=True)
            if not plan.preempted:
                rows = self._admit_waiting(plan, rows)
            self._give_draft_budgets(plan, rows)
        self._reserve_drafts(plan)
        return plan

    def _continue(self, plan: Plan, rows: int, prompts: bool) -> int:
        """Rows for the running, those that waited longest first; returns how many are left.

        Those with more than one row to compute take their turn when ``prompts`` is set, or at once if they had nothing
        in the last step: so a small row budget starves nobody.
        """
        for seq in sorted(self.running, key=lambda s: self._last_step[s.id]):
            if rows == 0:
                break
            last = self._last_step.get(seq.id, self._step)  # none left: it lost its blocks in this very loop
            missing = len(seq.tokens) - seq.n_computed
            if last == self._step or (missing > 1 and last == self._step - 1 and not prompts):
                continue
            n_new = min(missing, rows)
            while not self._reserve(plan, seq, n_new):
                victim = self._youngest_idle()
                self._preempt(plan, victim)
                if victim is seq:
                    break
            else:
                rows -= n_new
        return rows

    def _admit_waiting(self, plan: Plan, rows: int) -> int:
        """Lets waiting sequences in, first come first served, while rows, seats and blocks last."""
        held: list[Sequence] = []
        while self.waiting and rows > 0 and len(self.running) < self.max_seqs:
            seq = self.waiting.popleft()
            if self._awaits_fork(seq):
                held.append(seq)
                continue
            self._adopt(seq)
            n_new = min(len(seq) - seq.n_computed, rows)
            needed = self.blocks.blocks_for(len(seq)) + 1 - len(seq.blocks)  # the whole prompt, and a block to copy to
            room = needed <= self.blocks.n_free or not self.running
            if not room or not self._reserve(plan, seq, n_new):
                self.blocks.free(seq)
                self.waiting.appendleft(seq)
                break
            seq.status = Status.RUNNING
            seq.fork_of = None
            self.running.append(seq)
            self._on_admit(seq)
            rows -= n_new
        self.waiting.extendleft(reversed(held))
        return rows

    def _awaits_fork(self, seq: Sequence) -> bool:
        """Whether a further choice (n > 1) should wait until the first one has computed their prompt."""
        parent = seq.fork_of
        if parent is None or len(seq) > seq.n_prompt:
            return False
        return parent.status is not Status.FINISHED and parent.n_computed < parent.n_prompt

    def _adopt(self, seq: Sequence) -> None:
        parent = seq.fork_of
        if parent is not None and parent.status is Status.RUNNING and len(seq) == seq.n_prompt > 1:
            self.blocks.fork(parent, seq)
        else:
            self.blocks.adopt_prefix(seq)

    def _give_draft_budgets(self, plan: Plan, rows: int) -> int:
        """Draft rows, as the controller says, for the spans that reach their end and were not asked about yet.

        Returns how many of ``rows`` they take. Where it comes to nothing, the (empty) draft says why.
        """
        spans = [s for s in plan.spans if s.seq.max_draft and s.reaches_end and not s.budget and not s.draft.reason]
        if not spans:
            return 0
        for span in spans:
            # A step that accepts everything yields one token more than it drafts.
            span.budget = max(0, min(span.seq.max_draft, span.seq.max_len - len(span.seq) - 1))
        given = 0
        for span, wanted in zip(spans, self.controller.budgets(spans, rows), strict=True):
            if span.budget == 0:
                span.draft = Draft.nothing("the answer is about to end")
            span.budget = max(0, min(wanted, span.budget, rows - given))
            if span.budget == 0 and not span.draft.reason:
                span.draft = Draft.nothing("no rows left in the step" if given >= rows else "none asked for")
            given += span.budget
        return given

    def _reserve_drafts(self, plan: Plan) -> None:
        """KV slots for the drafts, last of all: drafting never preempts anybody."""
        for span in plan.spans:
            if span.budget:
                copies = self.blocks.reserve(span.seq, span.end, span.end + span.budget)
                if copies is None:
                    span.budget, span.draft = 0, Draft.nothing("no free KV blocks")
                plan.copies += copies or []

    def _reserve(self, plan: Plan, seq: Sequence, n_new: int) -> bool:
        copies = self.blocks.reserve(seq, seq.n_computed, seq.n_computed + n_new)
        if copies is None:
            return False
        plan.copies += copies
        plan.spans.append(Span(seq, seq.n_computed, n_new))
        self._last_step[seq.id] = self._step
        return True

    def _youngest_idle(self) -> Sequence:
        """The youngest running sequence that has no rows in this step yet."""
        return next(s for s in reversed(self.running) if self._last_step[s.id] < self._step)

    def _preempt(self, plan: Plan, seq: Sequence) -> None:
        """Takes a sequence's blocks and puts it first in the queue; its tokens stay."""
        self.running.remove(seq)
        del self._last_step[seq.id]
        seq.status = Status.WAITING
        self.blocks.free(seq)
        self.waiting.appendleft(seq)
        plan.preempted.append(seq)
