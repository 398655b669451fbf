"""Who gets rows, who waits and who is preempted: the scheduler over a real block manager, without a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.cache.blocks import BlockManager
from outrider.core.params import SamplingParams, SpecParams
from outrider.core.types import Sequence, Status
from outrider.engine.scheduler import Plan, Scheduler
from outrider.spec.controller import FixedLength


class Loop:
    """Schedules and commits as the engine does; accepted tokens and new ones are all ``token``."""

    def __init__(
        self, n_blocks: int = 100, size: int = 4, seqs: int = 8, rows: int = 64, gamma: int = 0, caching: bool = True
    ) -> None:
        self.blocks = BlockManager(n_blocks, size, caching)
        self.scheduler = Scheduler(self.blocks, FixedLength(gamma), seqs, rows)
        self.all: list[Sequence] = []

    def add(
        self, n_prompt: int, n_output: int = 50, draft: int = 0, fork_of: Sequence | None = None, first: int = 0
    ) -> Sequence:
        tokens = fork_of.prompt_ids if fork_of else [first] * n_prompt
        seq = Sequence(len(self.all), list(tokens), n_prompt, SamplingParams(), SpecParams(), seed=0, fork_of=fork_of)
        seq.max_len, seq.max_draft = min(n_prompt + n_output, self.blocks.n_blocks * self.blocks.block_size), draft
        self.all.append(seq)
        self.scheduler.add(seq)
        return seq

    def step(self, accept: Callable[[int], int] = lambda budget: budget, token: int = 9) -> Plan:
        plan = self.scheduler.schedule()
        rows = [span.n_new + span.budget for span in plan.spans]
        assert sum(rows) <= self.scheduler.max_rows
        assert len(self.scheduler.running) <= self.scheduler.max_seqs
        assert len({span.seq.id for span in plan.spans}) == len(plan.spans)
        for span in plan.spans:
            seq = span.seq
            assert seq.status is Status.RUNNING
            assert span.n_new > 0
            assert span.start == seq.n_computed
            assert len(seq.blocks) * self.blocks.block_size >= span.end + span.budget
            seq.n_computed = span.end
            if span.reaches_end:
                kept = accept(span.budget)
                seq.tokens += [token] * (kept + 1)
                seq.n_computed += kept
            self.blocks.commit(seq)
            assert len(seq) <= seq.max_len
        for seq in [span.seq for span in plan.spans if len(span.seq) == span.seq.max_len]:
            self.scheduler.remove(seq)
        self.blocks.check_integrity(self.all)
        return plan

    def steps(self, n: int) -> list[Plan]:
        return [self.step() for _ in range(n)]


def shares(plan: Plan) -> dict[int, int]:
    """Rows by sequence id, in the order in which they were given."""
    return {span.seq.id: span.n_new for span in plan.spans}


def ids(seqs: Iterable[Sequence]) -> list[int]:
    return [seq.id for seq in seqs]


def test_prompts_are_cut_to_the_row_budget_and_the_rest_comes_next() -> None:
    loop = Loop(rows=10)
    for n in (7, 8, 2):
        loop.add(n)
    assert [shares(plan) for plan in loop.steps(3)] == [{0: 7, 1: 3}, {0: 1, 1: 5, 2: 2}, {0: 1, 1: 1, 2: 1}]


def test_running_ones_come_before_new_ones_and_decoding_before_long_prompts() -> None:
    loop = Loop(rows=6)
    loop.add(3)
    loop.step()
    loop.add(20)
    loop.add(1)
    assert [shares(plan) for plan in loop.steps(3)] == [{0: 1, 1: 5}, {0: 1, 1: 5}, {0: 1, 1: 5}]
    assert ids(loop.scheduler.waiting) == [2], "the one that came later waits until there are rows"


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_small_row_budget_starves_nobody(rows: int) -> None:
    """Five run, one of them in the middle of its prompt; then the budget is smaller than their number."""
    loop = Loop(rows=8)
    for n in (1, 2, 1, 2, 40):
        loop.add(n)
    loop.step()
    loop.scheduler.max_rows = rows
    last = [0] * 5
    for step in range(1, 41):
        for seq_id in shares(loop.step()):
            last[seq_id] = step
        assert all(step - then < 5 for then in last)
    assert loop.all[4].n_computed >= 2 + 8 * rows, "every fifth turn is the prompt's, with all the rows"


def test_no_more_than_the_seats_run_and_the_queue_keeps_its_order() -> None:
    loop = Loop(seqs=2)
    for n_output in (2, 4, 3, 1, 1):
        loop.add(3, n_output)
    order = []
    while loop.scheduler.running or loop.scheduler.waiting:
        order.append(list(shares(loop.step())))
    assert order == [[0, 1], [0, 1], [1, 2], [1, 2], [2, 3], [4]]


def test_nobody_overtakes_a_long_prompt_that_waits_for_blocks() -> None:
    loop = Loop(n_blocks=6, size=4, caching=False)
    loop.add(10)
    loop.step()
    loop.add(14)
    loop.add(2)
    loop.step()
    assert ids(loop.scheduler.waiting) == [1, 2]
    loop.scheduler.remove(loop.all[0])
    loop.step()
    assert ids(loop.scheduler.running) == [1, 2]


def test_a_prompt_waits_until_all_of_it_fits_though_its_first_chunk_would() -> None:
    loop = Loop(n_blocks=6, size=4, rows=12, caching=False)
    loop.add(10)
    loop.step()
    loop.add(14)
    assert loop.blocks.n_free == 3
    assert list(shares(loop.step())) == [0]
    loop.scheduler.remove(loop.all[0])
    assert shares(loop.step()) == {1: 12}


def test_the_youngest_is_preempted_keeps_its_tokens_and_comes_back_first() -> None:
    loop = Loop(n_blocks=6, size=2, caching=False)
    old, young = loop.add(3), loop.add(3)
    loop.steps(4)
    late = loop.add(1)
    assert loop.blocks.n_free == 0
    plan = loop.step()
    assert plan.preempted == [young]
    assert young.status is Status.WAITING
    assert (young.blocks, young.n_computed) == ([], 0)
    assert young.output_ids == [9] * 4
    assert ids(loop.scheduler.waiting) == [young.id, late.id]
    assert late.id not in shares(plan), "nobody is let in while others lose their blocks"
    loop.scheduler.remove(old)
    assert shares(loop.step())[young.id] == len(young) - 1, "its KV is computed anew, all of it"


def test_a_preempted_sequence_finds_its_own_blocks_again_if_they_are_still_there() -> None:
    loop = Loop(n_blocks=6, size=2)
    old, young = loop.add(3, first=1), loop.add(3, first=2)
    while young.status is not Status.WAITING or not young.n_output:
        loop.step()
    known = (len(young) - 1) // 2 * 2
    loop.scheduler.remove(old)
    plan = loop.step()
    (span,) = [span for span in plan.spans if span.seq is young]
    assert 0 < span.start <= known
    assert young.n_cached == 0, "what it had computed itself is no hit of the prefix cache"


def test_alone_a_sequence_fills_the_whole_pool_and_is_never_preempted() -> None:
    loop = Loop(n_blocks=5, size=3, rows=4, gamma=3)
    seq = loop.add(7, 100, draft=8)
    while seq.status is not Status.FINISHED:
        assert not loop.step(accept=lambda budget: budget // 2).preempted
    assert len(seq) == 15


def test_further_choices_wait_for_the_first_ones_prompt_and_then_share_it() -> None:
    loop = Loop(rows=6)
    first = loop.add(10)
    second, third = loop.add(10, fork_of=first), loop.add(10, fork_of=first)
    other = loop.add(2)
    loop.add(9, first=3)
    assert shares(loop.step()) == {0: 6}
    assert shares(loop.step()) == {0: 4, 3: 2}, "others may pass while the choices wait"
    assert ids(loop.scheduler.waiting) == [1, 2, 4], "but the choices keep their places"
    plan = loop.step()
    assert shares(plan) == {0: 1, 3: 1, 1: 1, 2: 1, 4: 2}
    assert second.blocks[:2] == third.blocks[:2] == first.blocks[:2]
    assert len({first.blocks[2], second.blocks[2], third.blocks[2]}) == 3
    assert other.fork_of is second.fork_of is None


def test_choices_of_a_prompt_whose_first_answer_is_gone_compute_it_themselves() -> None:
    loop = Loop(rows=4)
    first = loop.add(10)
    second = loop.add(10, fork_of=first)
    loop.step()
    loop.scheduler.remove(first)
    assert shares(loop.step()) == {1: 4}
    assert second.n_cached == 4, "what the first one computed is still found"


def test_choices_of_a_prompt_of_one_token_and_choices_that_were_preempted_do_not_wait() -> None:
    loop = Loop()
    first = loop.add(1)
    loop.add(1, fork_of=first)
    loop.step()
    assert shares(loop.step()) == {0: 1, 1: 1}
    again = loop.all[1]
    loop.scheduler._preempt(Plan(), again)
    assert again.id in shares(loop.step())


def budgets(loop: Loop) -> list[int]:
    return [span.budget for span in loop.step(accept=lambda budget: 0).spans]


def test_draft_rows_use_what_is_left_and_only_at_the_end_of_a_sequence() -> None:
    loop = Loop(rows=12, gamma=4)
    loop.add(5, draft=8)
    loop.add(9, draft=8)
    assert budgets(loop) == [0, 0], "the rows went to the prompts"
    assert budgets(loop) == [4, 4]
    loop.add(4, draft=8)
    assert budgets(loop) == [4, 1, 1], "half of the ten rows while the prompt waits, then what that leaves"
    assert budgets(loop) == [4, 4, 1], "nine rows are left when nobody waits"


def test_draft_rows_respect_the_requests_cap_and_the_end_of_the_answer() -> None:
    loop = Loop(gamma=5)
    loop.add(3, 4, draft=9)
    loop.add(3, draft=2)
    loop.add(3, draft=0)
    assert budgets(loop) == [3, 2, 0], "a step that accepts everything gives one token more than it drafts"
    assert budgets(loop) == [2, 2, 0]
    assert budgets(loop) == [1, 2, 0]
    assert budgets(loop) == [0, 2, 0]
    assert budgets(loop) == [2, 0], "the first answer is complete"


def test_drafts_leave_half_of_the_rows_to_prompts_that_wait() -> None:
    loop = Loop(rows=20, gamma=9)
    loop.add(2, draft=9)
    loop.add(2, draft=9)
    loop.step()
    loop.add(40)
    loop.step()
    for _ in range(2):
        plan = loop.step(accept=lambda budget: 0)
        assert [(s.seq.id, s.n_new, s.budget) for s in plan.spans] == [(0, 1, 9), (1, 1, 0), (2, 9, 0)]


def test_a_draft_that_gets_no_room_says_why() -> None:
    def reasons(loop: Loop) -> list[str]:
        return [span.draft.reason for span in loop.step(accept=lambda budget: 0).spans]

    loop = Loop(rows=4, gamma=3)
    for draft in (4, 4, 0):
        loop.add(1, 4, draft=draft)
    loop.step(accept=lambda budget: 0)
    assert reasons(loop) == ["", "no rows left in the step", ""], "one that wants no draft needs no reason"
    reasons(loop)
    assert reasons(loop) == ["the answer is about to end"] * 2 + [""]
    idle = Loop(gamma=0)
    idle.add(1, draft=4)
    assert reasons(idle) == ["none asked for"]


def test_drafting_preempts_nobody_and_gives_its_blocks_back() -> None:
    loop = Loop(n_blocks=5, size=4, gamma=8, caching=False)
    loop.add(7, 9, draft=8)
    loop.add(7, 9, draft=8)
    for _ in range(2):
        plan = loop.step(accept=lambda budget: 0)
        assert not plan.preempted
        assert [span.budget for span in plan.spans] in ([8, 0], [0, 8], [0, 0])
        assert {span.draft.reason for span in plan.spans if not span.budget} == {"no free KV blocks"}
    for seq in loop.all:
        assert len(seq.blocks) == loop.blocks.blocks_for(seq.n_computed)


def test_an_ended_sequence_leaves_nothing_wherever_it_was() -> None:
    loop = Loop(seqs=1)
    running, waiting = loop.add(3), loop.add(3)
    loop.step()
    for seq in (waiting, running, running):
        loop.scheduler.remove(seq)
        assert seq.status is Status.FINISHED
    assert not [*loop.scheduler.running, *loop.scheduler.waiting, *loop.scheduler._last_step]
    assert loop.blocks.n_free == loop.blocks.n_blocks
    assert loop.step() == Plan()


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_whatever_comes_every_sequence_ends(data: st.DataObject) -> None:
    """Random pools, budgets, prompts that share beginnings, choices, acceptance and aborts."""
    draw, whole = data.draw, st.integers
    size = draw(whole(1, 5))
    loop = Loop(draw(whole(2, 12)), size, draw(whole(1, 5)), draw(whole(1, 12)), draw(whole(0, 5)), draw(st.booleans()))
    pool = loop.blocks.n_blocks * size
    left = draw(whole(1, 7))
    idle = 0
    while left or loop.scheduler.running or loop.scheduler.waiting:
        if left and (draw(whole(0, 2)) == 0 or not (loop.scheduler.running or loop.scheduler.waiting)):
            n_prompt, n_output, left = draw(whole(1, pool - 1)), draw(whole(1, 12)), left - 1
            parent = loop.add(n_prompt, n_output, draw(whole(0, 6)), first=draw(whole(0, 1)))
            for _ in range(draw(whole(0, 2))):
                loop.add(n_prompt, n_output, draw(whole(0, 6)), fork_of=parent)
        if draw(whole(0, 15)) == 0:
            loop.scheduler.remove(draw(st.sampled_from(loop.all)))
            idle = 0  # its rows were for nothing
        before = sum(seq.n_output for seq in loop.all)
        salt = draw(whole(0, 9))
        plan = loop.step(accept=lambda budget, salt=salt: (budget * salt) // 9, token=draw(whole(0, 1)))
        assert plan.spans or not (loop.scheduler.running or loop.scheduler.waiting) or plan.preempted
        idle = 0 if sum(seq.n_output for seq in loop.all) > before else idle + 1
        assert idle <= pool + 2, "many steps without a single new token"
    assert loop.blocks.n_free == loop.blocks.n_blocks
    assert not loop.scheduler._last_step
