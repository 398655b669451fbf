"""The block manager: sharing, copy on write, eviction order; a simulated KV shows what whoever reads a slot finds."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from outrider.cache.blocks import BlockManager, Copy
from outrider.core.params import SamplingParams, SpecParams
from outrider.core.types import Sequence

Slot = tuple[int, ...] | str | None
"""What a KV slot was computed from: its token with all before it; a text for draft rows, None for never written."""


def sequence(tokens: Seq[int], id: int = 0) -> Sequence:
    return Sequence(id, list(tokens), len(tokens), SamplingParams(), SpecParams(), seed=0)


def compute(blocks: BlockManager, seq: Sequence, n: int | None = None) -> list[Copy]:
    """Prefills ``n`` tokens (all but the newest one by default) in one step."""
    end = len(seq) - 1 if n is None else seq.n_computed + n
    copies = blocks.reserve(seq, seq.n_computed, end)
    assert copies is not None
    seq.n_computed = end
    blocks.commit(seq)
    return copies


class KV:
    """A pool whose slots say what they hold."""

    def __init__(self, n_blocks: int, size: int) -> None:
        self.size = size
        self.slots: list[list[Slot]] = [[None] * size for _ in range(n_blocks)]

    def copy(self, copies: Seq[Copy]) -> None:
        for c in copies:
            self.slots[c.dst] = list(self.slots[c.src])

    def write(self, seq: Sequence, at: int, value: Slot) -> None:
        self.slots[seq.blocks[at // self.size]][at % self.size] = value

    def read(self, seq: Sequence, at: int) -> Slot:
        return self.slots[seq.blocks[at // self.size]][at % self.size]

    def holds(self, seq: Sequence) -> bool:
        return all(self.read(seq, i) == tuple(seq.tokens[: i + 1]) for i in range(seq.n_computed))


class Manager(RuleBasedStateMachine):
    """Steps as the engine makes them: several sequences reserve, some are preempted, then copies, then writes."""

    @initialize(n_blocks=st.integers(1, 12), size=st.integers(1, 4), caching=st.booleans())
    def build(self, n_blocks: int, size: int, caching: bool) -> None:
        self.blocks, self.kv = BlockManager(n_blocks, size, caching), KV(n_blocks, size)
        self.live: list[Sequence] = []
        self.made = 0

    def add(self, tokens: Seq[int], n_prompt: int | None = None) -> Sequence:
        seq = sequence(tokens, self.made)
        seq.n_prompt = len(tokens) if n_prompt is None else n_prompt
        self.made += 1
        self.live.append(seq)
        return seq

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14))
    def arrive(self, tokens: list[int]) -> None:
        """Two token values only, so that prefixes coincide often."""
        seq = self.add(tokens)
        self.blocks.adopt_prefix(seq)
        assert seq.n_computed == seq.n_cached <= len(tokens) - 1
        assert seq.n_computed % self.blocks.block_size == 0
        assert self.blocks.prefix_caching or seq.n_computed == 0
        assert self.kv.holds(seq), "an adopted prefix holds other tokens' KV"

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(self.live))
        if 1 < parent.n_prompt <= parent.n_computed:
            child = self.add(parent.tokens[: parent.n_prompt])
            self.blocks.fork(parent, child)
            assert child.n_computed == child.n_prompt - 1
            assert self.kv.holds(child)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(self.live)))

    def end(self, seq: Sequence) -> None:
        self.blocks.free(seq)
        assert (seq.blocks, seq.n_computed) == ([], 0)
        self.live.remove(seq)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        plan: list[tuple[Sequence, int, int]] = []
        copies: list[Copy] = []
        for seq in data.draw(st.lists(st.sampled_from(self.live), unique_by=lambda s: s.id, max_size=4)):
            if seq not in self.live:
                continue
            n_new = data.draw(st.integers(1, len(seq) - seq.n_computed))
            got = self.reserve(seq, seq.n_computed, seq.n_computed + n_new)
            if got is None:  # preempt somebody who has no rows in this step
                idle = [s for s in self.live if s is not seq and all(s is not p[0] for p in plan)]
                if idle:
                    self.end(data.draw(st.sampled_from(idle)))
                continue
            copies += got
            plan.append((seq, n_new, 0))
        for i, (seq, n_new, _) in enumerate(plan):
            end = seq.n_computed + n_new
            budget = data.draw(st.integers(0, 5)) if end == len(seq) else 0
            got = self.reserve(seq, end, end + budget) if budget else []
            copies += got or []
            plan[i] = (seq, n_new, budget if got is not None else 0)
        self.kv.copy(copies)
        for seq, n_new, budget in plan:
            for at in range(seq.n_computed, seq.n_computed + n_new + budget):
                holders = [s.id for s in self.live if seq.blocks[at // self.kv.size] in s.blocks]
                assert holders == [seq.id], f"slot {at} of {seq.id} is written while {holders} hold its block"
                committed = at < len(seq)
                self.kv.write(seq, at, tuple(seq.tokens[: at + 1]) if committed else f"draft of {seq.id}")
        for seq, n_new, budget in plan:
            seq.n_computed += n_new
            for _ in range(data.draw(st.integers(0, budget)) if budget else 0):  # accepted: token and slot are right
                seq.tokens.append(data.draw(st.integers(0, 1)))
                self.kv.write(seq, seq.n_computed, tuple(seq.tokens))
                seq.n_computed += 1
            if seq.n_computed == len(seq):
                seq.tokens.append(data.draw(st.integers(0, 1)))
            self.blocks.commit(seq)
            assert len(seq.blocks) == self.blocks.blocks_for(seq.n_computed), "blocks past the last token are kept"

    def reserve(self, seq: Sequence, start: int, end: int) -> list[Copy] | None:
        """``reserve``, which must change nothing when it cannot."""
        before: dict[str, Any] = {k: list(v) for k, v in vars(self.blocks).items() if hasattr(v, "__iter__")}
        held, free, size = list(seq.blocks), self.blocks.n_free, self.blocks.block_size
        touched = held[start // size : self.blocks.blocks_for(end)]
        shared = [b for b in touched if sum(b in s.blocks for s in self.live) > 1 or b in self.blocks._digest]
        needed = len(shared) + max(0, self.blocks.blocks_for(end) - len(held))
        copies = self.blocks.reserve(seq, start, end)
        if copies is None:
            assert seq.blocks == held
            assert before == {k: list(v) for k, v in vars(self.blocks).items() if hasattr(v, "__iter__")}
            assert free < needed, "refused, though it would fit"
        else:
            assert len(seq.blocks) == max(len(held), self.blocks.blocks_for(end))
            assert [copy.src for copy in copies] == shared
            assert all(held[seq.blocks.index(copy.dst)] == copy.src for copy in copies)
        return copies

    @invariant()
    def books_and_contents_are_right(self) -> None:
        if hasattr(self, "blocks"):
            self.blocks.check_integrity(self.live)
            assert self.blocks.n_free == self.blocks.n_blocks - len({b for s in self.live for b in s.blocks})
            for seq in self.live:
                assert self.kv.holds(seq), f"sequence {seq.id} lost its KV"

    def teardown(self) -> None:
        if hasattr(self, "blocks"):
            for seq in list(self.live):
                self.end(seq)
            assert self.blocks.n_free == self.blocks.n_blocks


TestManager = Manager.TestCase
TestManager.settings = settings(
    max_examples=120, stateful_step_count=25, deadline=None, derandomize=True, database=None
)


def test_a_later_sequence_adopts_full_blocks_but_leaves_its_newest_token_to_compute() -> None:
    blocks = BlockManager(8, 4)
    first = sequence(range(9))
    blocks.adopt_prefix(first)
    assert first.n_computed == 0
    compute(blocks, first)
    exact, longer, other = sequence(range(8)), sequence([*range(8), 99]), sequence([*range(5), 99, 6, 7, 8])
    for seq in (exact, longer, other):
        blocks.adopt_prefix(seq)
    assert [s.n_cached for s in (exact, longer, other)] == [4, 8, 4]
    assert longer.blocks == first.blocks[:2]


def test_equal_blocks_after_different_prefixes_are_not_shared() -> None:
    blocks = BlockManager(8, 2)
    compute(blocks, sequence([1, 1, 5, 5, 0]))
    seq = sequence([2, 2, 5, 5, 0])
    blocks.adopt_prefix(seq)
    assert seq.blocks == []


def test_without_prefix_caching_nothing_is_found_but_forks_share() -> None:
    blocks = BlockManager(8, 2, prefix_caching=False)
    parent = sequence([1, 2, 3, 4, 5])
    compute(blocks, parent)
    again, child = sequence(parent.tokens), sequence([1, 2, 3, 4], 1)
    blocks.adopt_prefix(again)
    parent.n_prompt = 4
    blocks.fork(parent, child)
    assert again.blocks == []
    assert child.blocks == parent.blocks[:2]
    assert child.n_computed == 3


def test_a_fork_copies_the_block_it_writes_to_and_leaves_its_parents_alone() -> None:
    blocks = BlockManager(8, 4)
    parent, child = sequence(range(6)), sequence(range(6), 1)
    compute(blocks, parent, 6 - 1)
    parent.n_computed, parent.tokens = 6, [*range(6), 7]
    blocks.fork(parent, child)
    held = list(parent.blocks)
    copies = blocks.reserve(child, 5, 6)
    assert copies == [Copy(held[1], child.blocks[1])]
    assert parent.blocks == held
    assert child.blocks[0] == held[0]
    assert blocks.reserve(parent, 6, 7) == [], "the parent's own block is its own again"
    blocks.check_integrity([parent, child])


def test_a_copy_that_has_no_free_block_to_go_to_is_refused() -> None:
    blocks = BlockManager(2, 4)
    parent, child = sequence(range(7)), sequence(range(6), 1)
    compute(blocks, parent)
    parent.n_prompt = 6
    blocks.fork(parent, child)
    held = list(child.blocks)
    assert blocks.reserve(child, 5, 6) is None
    assert child.blocks == held == parent.blocks
    blocks.free(parent)
    assert blocks.reserve(child, 5, 6) == []


def test_a_full_remembered_block_is_copied_even_if_nobody_else_holds_it() -> None:
    blocks = BlockManager(8, 2)
    seq = sequence([1, 2, 3, 4, 5])
    compute(blocks, seq)
    remembered = seq.blocks[1]
    assert blocks.reserve(seq, 3, 4) == [Copy(remembered, seq.blocks[1])]
    later = sequence([1, 2, 3, 4, 9], 1)
    blocks.adopt_prefix(later)
    assert later.blocks[1] == remembered


def test_a_freed_prefix_is_found_until_its_blocks_are_needed_the_oldest_first_and_from_its_end() -> None:
    blocks = BlockManager(6, 2)
    old, new = sequence([1, 1, 2, 2, 0]), sequence([3, 3, 4, 4, 0], 1)
    for seq in (old, new):
        compute(blocks, seq)
    ids = (list(old.blocks), list(new.blocks))
    blocks.free(old)
    blocks.free(new)
    filler = sequence(range(10, 20), 2)
    taken = []
    for n in range(2, 13, 2):
        assert blocks.reserve(filler, 0, n) == []
        taken.append(filler.blocks[-1])
    unused = [b for b in range(6) if b not in (*ids[0], *ids[1])]
    assert taken == [*unused, ids[0][1], ids[0][0], ids[1][1], ids[1][0]]


def test_a_duplicate_of_a_remembered_block_is_reused_before_it() -> None:
    blocks = BlockManager(4, 2)
    first, twin = sequence([1, 2, 0]), sequence([1, 2, 0], 1)
    for seq in (first, twin):  # computed side by side, so that neither could adopt from the other
        assert blocks.reserve(seq, 0, 2) == []
    for seq in (first, twin):
        seq.n_computed = 2
        blocks.commit(seq)
    spare, kept = twin.blocks[0], first.blocks[0]
    blocks.free(first)
    blocks.free(twin)
    taker = sequence([9], 2)
    assert blocks.reserve(taker, 0, 2) == []
    assert taker.blocks == [spare]
    blocks.adopt_prefix(later := sequence([1, 2, 3], 3))
    assert later.blocks == [kept]


def test_a_blocks_version_changes_exactly_when_it_is_handed_out_anew() -> None:
    blocks = BlockManager(2, 2)
    seq = sequence([1, 2, 3])
    compute(blocks, seq)
    block, version = seq.blocks[0], list(blocks.version)
    blocks.free(seq)
    blocks.adopt_prefix(again := sequence([1, 2, 4], 1))
    assert again.blocks == [block]
    assert blocks.version == version
    blocks.free(again)
    blocks.reserve(sequence([5] * 5, 2), 0, 4)
    assert all(now > then for now, then in zip(blocks.version, version, strict=True))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda blocks, seq: seq.blocks.pop(),
        lambda blocks, seq: seq.blocks.append(seq.blocks[0]),
        lambda blocks, seq: blocks._free.popitem(),
        lambda blocks, seq: setattr(seq, "n_computed", 99),
        lambda blocks, seq: seq.tokens.pop(),
        lambda blocks, seq: blocks._digest.popitem(),
    ],
    ids=["lost block", "block twice", "leak", "KV outside", "nothing pending", "forgotten digest"],
)
def test_the_integrity_check_sees_damage(spoil: Any) -> None:
    blocks = BlockManager(4, 2)
    seq = sequence([1, 2, 3])
    compute(blocks, seq)
    blocks.check_integrity([seq])
    spoil(blocks, seq)
    with pytest.raises(AssertionError):
        blocks.check_integrity([seq])


def test_a_sequence_that_waits_for_room_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = BlockManager(8, 4)
    first = sequence(list(range(16)), 16)
    blocks.reserve(first, 0, 16)
    first.n_computed = 15
    blocks.commit(first)
    hashed: list[int] = []
    chain = blocks._chain
    monkeypatch.setattr(blocks, "_chain", lambda d, tokens, i: hashed.append(i) or chain(d, tokens, i))
    waiting = sequence(list(range(16)), 16)
    for _ in range(3):
        blocks.adopt_prefix(waiting)
        assert waiting.blocks == first.blocks[:3]
        blocks.free(waiting)
    assert hashed == [0, 1, 2]
    waiting.tokens += [77] * 4  # it was preempted later, with more tokens: what is new is hashed, and not found
    blocks.adopt_prefix(waiting)
    assert waiting.n_computed == 12
    assert hashed == [0, 1, 2, 3]


def test_tenants_share_no_blocks() -> None:
    blocks = BlockManager(8, 2)
    first, same, other = (sequence([1, 2, 3, 4, 5], i) for i in range(3))
    first.spec, same.spec, other.spec = (SpecParams(tenant=name) for name in ("a", "a", "b"))
    compute(blocks, first)
    for seq, shared in ((same, 2), (other, 0)):
        blocks.adopt_prefix(seq)
        assert len(seq.blocks) == shared
