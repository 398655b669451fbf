"""Lookahead: the plain method beside the drafter, the pool, small budgets, and what the engine hands back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from outrider.core.config import SpecConfig
from outrider.core.errors import SettingError
from outrider.core.params import SamplingParams, SpecParams
from outrider.core.types import Commit, Span
from outrider.core.types import Sequence as Seq
from outrider.models.decoder import Decoder
from outrider.spec.drafts import lookahead
from outrider.spec.drafts.lookahead import Lookahead, LookaheadSettings, NgramPool
from tests.engine.drafters import Scripted
from tests.engine.harness import assert_same, greedy, make_engine, plain, prompt_of, run_all, toy_target
from tests.toy import full_logits

TARGET = toy_target(seed=1)


def drafter(window: int = 4, ngram: int = 3, guesses: int = 2, text: bool = False) -> Lookahead:
    return Lookahead(
        LookaheadSettings(
            lookahead_window=window, lookahead_ngram=ngram, lookahead_guesses=guesses, lookahead_from_text=text
        )
    )


def sequence(tokens: Sequence[int]) -> Seq:
    return Seq(0, list(tokens), len(tokens), SamplingParams(), SpecParams(), 5)


def plain_lookahead(decoder: Decoder, seq: Seq, window: int, n: int, guesses: int, steps: int) -> list[list[int]]:
    """The method in its own words, without cache or tree: per step the tokens it yields."""

    def after(tokens: Sequence[int]) -> int:
        return int(full_logits(decoder, tokens)[-1].argmax())

    text, rows, pool, out = list(seq.tokens), [[]], {}, []
    filler = Lookahead(LookaheadSettings(lookahead_window=window))
    for _ in range(steps):
        filler._fill(rows, Seq(0, text, seq.n_prompt, seq.params, seq.spec, seq.seed))
        columns = [[row[c] for row in rows] for c in range(window)]
        fresh = [after(text + rows[0][1:c] + columns[c] if c else text + columns[0][1:]) for c in range(window)]
        new: list[int] = []
        for guess in pool.get(text[-1], []):
            right: list[int] = []
            while len(right) < n - 1 and guess[len(right)] == after(text + right):
                right.append(guess[len(right)])
            new = max(new, right, key=len)
        new = [*new, after(text + new)]
        if len(rows) == n - 1:
            for column, token in zip(columns, fresh, strict=True):
                known = [g for g in pool.get(column[0], []) if g != [*column[1:], token]]
                pool[column[0]] = [[*column[1:], token], *known][:guesses]
        rows = [*rows, fresh]
        dropped = len(rows) == n
        rows = [row[len(new) - dropped :] for row in rows[dropped:]]
        text += new
        out.append(new)
    return out


@pytest.mark.parametrize(("window", "ngram", "guesses"), [(4, 3, 2), (3, 2, 3), (2, 4, 1), (1, 3, 2)])
def test_each_step_is_that_of_the_plain_method(window: int, ngram: int, guesses: int) -> None:
    accepted = 0
    for seed in range(2):
        prompt = prompt_of(6, seed)
        mine = drafter(window, ngram, guesses)
        seen: list[list[int]] = []

        class Watched(Scripted):
            def propose(self, spans, mine=mine):  # type: ignore[no-untyped-def]
                return mine.propose(spans)

            def observe(self, commits, mine=mine, seen=seen):  # type: ignore[no-untyped-def]
                mine.observe(commits)
                seen.extend(list(commit.new_tokens) for commit in commits)

        params = greedy(24, seed=5)
        run_all(make_engine(TARGET, Watched(), gamma=200), [(prompt, params)])
        seq = Seq(0, list(prompt), len(prompt), params, SpecParams(), 5)
        whole = len(seen) - 10  # the last drafts are cut: the answer is about to end
        assert seen[:whole] == plain_lookahead(TARGET.decoder, seq, window, ngram, guesses, whole)
        accepted += sum(len(tokens) - 1 for tokens in seen[:whole])
    assert accepted > 0 or window < 3


def test_probes_are_answered_with_the_targets_own_tokens() -> None:
    """Greedy and sampled: the probe tokens of a commit are the raw argmax after each probe's own path."""
    commits: list[tuple[list[int], Commit]] = []

    class Watched(Lookahead):
        def propose(self, spans: Sequence[Span]) -> list:  # type: ignore[type-arg]
            self.before = [list(span.seq.tokens) for span in spans]
            return super().propose(spans)

        def observe(self, done: Sequence[Commit]) -> None:
            commits.extend(zip(self.before, done, strict=True))
            super().observe(done)

    for params in (greedy(16), SamplingParams(temperature=1.2, max_tokens=16, seed=3)):
        run_all(make_engine(TARGET, Watched(LookaheadSettings()), gamma=15), [(prompt_of(5), params)])
    probed = 0
    for text, commit in commits:
        draft = commit.span.draft
        probes = range(draft.n_verify, len(draft))
        assert len(commit.probe_tokens) == len(probes)
        for node, token in zip(probes, commit.probe_tokens, strict=True):
            path = [draft.tokens[i] for i in draft.path(node)]
            assert token == int(full_logits(TARGET.decoder, text + path)[-1].argmax())
            probed += 1
    assert probed > 100


def test_the_history_holds_every_token_once_and_the_stream_is_the_answer() -> None:
    """B9: every n-gram of prompt and answer is in the pool; streamed ids = returned ids = plain ids."""
    prompt, params = [7, 3, 9, 7, 3, 9, 7], greedy(64)
    mine = drafter(5, 4, 64, text=True)
    engine = make_engine(TARGET, mine, gamma=32)
    request = engine.add_request(prompt, params)
    streamed: list[int] = []
    taken: list[list[int]] = []
    pool_add = NgramPool.add
    with pytest.MonkeyPatch.context() as patch:

        def add(self: NgramPool, ngram: Sequence[int]) -> None:
            taken.append(list(ngram))
            pool_add(self, ngram)

        patch.setattr(NgramPool, "add", add)
        while engine.has_work:
            streamed += [token for delta in engine.step() for token in delta.token_ids]
            for seq in engine.sequences:
                assert seq.n_computed == len(seq) - 1
                assert mine._states[seq.id].read == len(seq)
    want = plain(TARGET, prompt, params)
    assert tuple(streamed) == want.token_ids
    assert request.answers[0].seq.tokens == [*prompt, *streamed]
    text = request.answers[0].seq.tokens
    grams = [text[i : i + 4] for i in range(len(text) - 4)]
    assert all(gram in taken for gram in grams[:-8])
    assert not mine._states


@pytest.mark.parametrize("budget", range(1, 16))
def test_a_small_budget_costs_guesses_before_probes(budget: int) -> None:
    mine = drafter(4, 3, 4, text=True)
    seq = sequence([1, 2, 3, 1, 4, 5, 1, 6, 7, 1])  # three continuations of the newest token
    span = Span(seq, 9, 1, budget=budget)
    mine._state(seq).window = [[1, 8, 8, 8], [9, 9, 9, 9]]
    draft = mine.propose([span])[0]
    guesses, probes = draft.n_verify, len(draft) - draft.n_verify
    assert len(draft) <= budget
    assert guesses >= min(2, budget)  # one n-gram comes first of all
    if probes < 7:  # then the window, column by column
        assert guesses <= 3
        assert probes == max(0, (budget - 2 + 1) // 2 * 2 - 1)
    else:
        assert guesses == min(6, budget - 7)


def test_the_pool_keeps_the_newest_and_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookahead, "MAX_HEADS", 3)
    pool = NgramPool(2)
    for tail in (5, 6, 5, 7):
        pool.add([1, tail])
    assert pool.tails(1) == [(7,), (5,)]
    for head in (2, 3, 1, 4):
        pool.add([head, 5])
    assert pool.tails(2) == []
    assert pool.tails(1) == [(5,), (7,)]
    assert len(pool) == 4


def test_a_long_text_that_is_there_at_once_is_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    text = [5, 6, 7, *range(100, 140), 5]
    at_once, in_parts = drafter(text=True), drafter(text=True)
    whole = at_once.propose([Span(sequence(text), len(text) - 1, 1, budget=8)])[0]
    assert whole.tokens[:2] == (6, 7)
    monkeypatch.setattr(lookahead, "READ_AT_ONCE", 10)
    seq, reads = sequence(text), []
    for _ in range(6):
        draft = in_parts.propose([Span(seq, len(text) - 1, 1, budget=8)])[0]
        reads.append(in_parts._states[0].read)
    assert reads == [10, 20, 30, 40, len(text), len(text)]
    assert draft.tokens[:2] == (6, 7)
    assert in_parts._states[0].pool._tails == at_once._states[0].pool._tails


def test_state_goes_with_the_request() -> None:
    mine = drafter(text=True)
    engine = make_engine(TARGET, mine, gamma=15, num_kv_blocks=16)
    jobs = [(prompt_of(9, seed), greedy(20)) for seed in range(6)]
    for got, job in zip(run_all(engine, jobs), jobs, strict=True):
        assert_same(got, plain(TARGET, *job))
    assert engine.metrics.preemptions > 0
    assert mine._states == {}


def test_settings() -> None:
    assert LookaheadSettings().draft_length == 15
    with pytest.raises(SettingError, match="tree of 959 rows; allowed are 256"):
        LookaheadSettings(lookahead_window=32, lookahead_ngram=16, lookahead_guesses=32)
    assert SpecConfig("lookahead").method == "lookahead"
