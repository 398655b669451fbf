"""The draft model's KV: how little of a text it reads again, and that what it trusts is right."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.params import SamplingParams
from outrider.core.types import Sequence, Span
from tests.engine.harness import toy_target
from tests.spec.draft_bench import PROMPT, SHAPE, VOCAB, Bench, greedy_chain, logits_after
from tests.toy import toy_config


def test_accepted_draft_tokens_are_not_read_again() -> None:
    bench = Bench()
    seq = bench.add()
    n = len(PROMPT)
    (draft,) = bench.propose(seq, budget=4)
    assert bench.read == [(0, n)]
    bench.commit(seq, *draft.tokens[:2], (draft.tokens[2] + 1) % VOCAB)
    (draft,) = bench.propose(seq, budget=4)
    assert bench.read == [(n + 2, n + 3)], "two were accepted: only the target's own token is new"
    bench.commit(seq, (draft.tokens[0] + 1) % VOCAB)
    (draft,) = bench.propose(seq, budget=4)
    assert bench.read == [(n + 3, n + 4)]
    bench.commit(seq, *draft.tokens, 5)
    bench.propose(seq, budget=4)
    assert bench.read == [(n + 7, n + 9)], "the last draft token was never fed to the draft model"


def test_asked_twice_for_the_same_text_it_gives_the_same_draft() -> None:
    bench = Bench(draft_tree="2,1")
    seq = bench.add(params=SamplingParams())
    first, second = bench.propose(seq), bench.propose(seq)
    assert (first[0].tokens, first[0].parents) == (second[0].tokens, second[0].parents)
    assert bench.read == [(len(PROMPT) - 1, len(PROMPT))]


def test_of_a_branching_tree_only_the_accepted_leading_chain_is_kept() -> None:
    bench = Bench(draft_tree="1,2,1")
    seq = bench.add()
    n = len(PROMPT)
    (draft,) = bench.propose(seq, budget=5)
    second = draft.tokens[2]
    bench.commit(seq, draft.tokens[0], second, (draft.tokens[4] + 1) % VOCAB)
    (after,) = bench.propose(seq, budget=1)
    assert bench.read == [(n + 1, n + 3)], "the second branch's slot is not where its token belongs"
    assert after.tokens == greedy_chain(seq.tokens, 1)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_after_any_history_a_draft_is_as_if_the_text_were_read_anew(data: st.DataObject) -> None:
    """Accepting, rejecting, steps without this drafter, preemption, shared prefixes and further choices."""
    bench = Bench(draft_tree=data.draw(st.sampled_from(["", "2,1,1", "1,1,2,1"])), n_blocks=60)
    live: dict[int, Sequence] = {0: bench.add(PROMPT[: data.draw(st.integers(1, 7))])}
    for step in range(data.draw(st.integers(1, 8))):
        action = data.draw(st.sampled_from(["go", "go", "go", "skip", "preempt", "join", "fork"]))
        seq = data.draw(st.sampled_from([live[i] for i in sorted(live)]))
        if action == "join":
            live[step + 1] = bench.add([*seq.tokens[: data.draw(st.integers(1, len(seq)))], 2], id=step + 1)
        elif action == "preempt":
            bench.end(seq)
            bench.blocks.adopt_prefix(seq)
        elif action == "fork":
            child = bench.fork(seq, id=step + 1)
            live |= {} if child is None else {child.id: child}
        elif action == "skip":
            bench.skip(seq, data.draw(st.integers(0, VOCAB - 1)))
        else:
            (draft,) = bench.propose(seq, budget=data.draw(st.integers(1, 6)))
            for node in range(len(draft)):
                text = seq.tokens + [draft.tokens[i] for i in draft.path(node)[:-1]]
                nth = draft.children(draft.parents[node]).index(node)
                assert draft.tokens[node] == int(logits_after(text).argsort(descending=True)[nth])
            path = draft.path(data.draw(st.integers(-1, len(draft) - 1)))
            bench.commit(seq, *(draft.tokens[i] for i in path), data.draw(st.integers(0, VOCAB - 1)))
        bench.blocks.check_integrity(live.values())


def test_a_copied_block_takes_the_draft_models_kv_along() -> None:
    bench = Bench()
    first = bench.add()
    (draft,) = bench.propose(first)
    bench.commit(first, 5)
    child = bench.fork(first, id=1)
    assert child is not None
    before = list(first.blocks)
    (draft,) = bench.propose(first)
    assert first.blocks[1] != before[1], "its last block is shared with the other choice: it went to a copy"
    assert bench.read == [(len(first) - 1, len(first))]
    assert draft.tokens == greedy_chain(first.tokens, 4)
    fresh = Bench()
    again = fresh.add(first.tokens)
    fresh.propose(again)
    for slot in range(len(first)):
        kept, read = (b.drafter.runner.slot_kv(Span(s, 0, 1), slot) for b, s in ((bench, first), (fresh, again)))
        assert all(torch.allclose(x, y) for x, y in zip(kept, read, strict=True))
    (draft,) = bench.propose(child)
    assert draft.tokens == greedy_chain(PROMPT, 4)


def test_a_prefix_that_another_sequence_read_is_known_by_its_blocks() -> None:
    bench = Bench()
    first = bench.add([*range(9), 1])
    bench.propose(first)
    bench.commit(first, 4)
    second = bench.add([*range(9), 7, 7], id=1)
    (draft,) = bench.propose(second)
    assert second.n_cached == 8
    assert bench.read == [(8, 11)]
    assert draft.tokens == greedy_chain(second.tokens, 4)
    bench.end(first)
    bench.end(second)
    third = bench.add([*range(8), 5], id=2)
    (draft,) = bench.propose(third)
    assert bench.read == [(8, 9)], "also when nobody holds the blocks any more"
    assert draft.tokens == greedy_chain(third.tokens, 4)


def test_an_answer_that_was_drafted_is_known_to_the_next_turn() -> None:
    bench = Bench()
    first = bench.add()
    for _ in range(4):
        (draft,) = bench.propose(first)
        bench.commit(first, *draft.tokens, 5)
    text = list(first.tokens)
    bench.end(first)
    second = bench.add([*text, 8, 8], id=1)
    (draft,) = bench.propose(second)
    assert second.n_cached == 24
    assert bench.read == [(20, len(second))], "the block of the last draft was never completed"
    assert draft.tokens == greedy_chain(second.tokens, 4)


def test_a_cached_block_that_this_model_never_read_is_not_taken_for_known() -> None:
    bench = Bench()
    first = bench.add(range(10))
    assert bench.blocks.reserve(first, 0, 10) == []  # served by the target alone
    bench.commit(first, 4)
    second = bench.add([*range(9), 7], id=1)
    (draft,) = bench.propose(second)
    assert second.n_cached == 8
    assert bench.read == [(0, 10)]
    assert draft.tokens == greedy_chain(second.tokens, 4)


def test_a_block_that_was_handed_out_anew_is_not_taken_for_known() -> None:
    bench = Bench(n_blocks=4)
    first = bench.add([i % VOCAB for i in range(16)])
    bench.propose(first, budget=0)  # reads it into all four blocks
    held = list(first.blocks)
    bench.end(first)
    other = bench.add([5] * 15, id=1)  # takes all four blocks, and this model reads none of them
    assert bench.blocks.reserve(other, 0, 15) == []
    other.tokens.append(5)
    other.n_computed = 15
    bench.blocks.commit(other)
    assert set(other.blocks) == set(held)
    bench.end(other)
    third = bench.add([*[5] * 12, 0], id=2)
    assert third.n_cached == 12
    (draft,) = bench.propose(third, budget=2)
    assert bench.read == [(0, 13)]
    assert draft.tokens == greedy_chain(third.tokens, 2)


def test_a_long_prompt_is_read_in_chunks_over_several_steps_while_shorter_ones_draft() -> None:
    bench = Bench(max_rows=3)
    seqs = [bench.add(), bench.add(PROMPT[:2], id=1)]
    long, short = bench.propose(*seqs)
    assert bench.read == [(0, 2), (0, 1)]
    assert (len(long), long.reason) == (0, "the draft model is still reading the prompt")
    assert short.tokens == greedy_chain(PROMPT[:2], 4)
    for chunk in ((1, 4), (4, 7)):
        (long,) = bench.propose(seqs[0])
        assert bench.read == [chunk]
    assert (long.tokens, long.reason) == (greedy_chain(PROMPT, 4), "")


def test_at_the_end_of_the_draft_models_context_drafts_get_shorter_then_there_is_a_reason() -> None:
    bench = Bench(max_model_len=10)
    seq = bench.add()
    lengths = []
    for _ in range(5):
        (draft,) = bench.propose(seq, budget=6)
        assert draft.tokens == greedy_chain(seq.tokens, len(draft))
        lengths.append(len(draft))
        bench.commit(seq, 3)
    assert lengths == [4, 3, 2, 1, 0], "the token after the tenth is the last one that can be drafted"
    assert draft.reason == "the draft model's context of 10 tokens is full"
    tiny = toy_target(toy_config(vocab=VOCAB, max_position=8, **SHAPE), seed=2)
    assert Bench(tiny, max_model_len=100).drafter.max_len == 8


def test_nothing_is_kept_of_a_released_sequence() -> None:
    bench = Bench()
    seqs = [bench.add(id=i) for i in range(3)]
    bench.propose(*seqs)
    for seq in seqs:
        bench.end(seq)
    bench.drafter.release(99)
    assert not bench.drafter._followers
