"""The matcher of one answer, and the rows of a draft under a grammar: each node by its own path."""

from __future__ import annotations

import dataclasses
import random
import threading
from pathlib import Path

import numpy as np
import pytest

from outrider.core.dist import Dist
from outrider.core.draft import Draft
from outrider.core.errors import SettingError
from outrider.core.grammar import Grammar
from outrider.core.params import SamplingParams
from outrider.core.types import Verdict
from outrider.models.grammars import CompiledGrammar, Grammars
from outrider.models.load import open_model
from outrider.models.tokenizer import Tokenizer, tokenizer_from_folder
from outrider.sampling.grammar import CREDIT, EARNED, Account, Masks, Matcher
from outrider.sampling.history import History
from outrider.sampling.rows import NodeRows, pruned
from outrider.sampling.sampler import Sampler
from tests.sampling.dense_reference import dense_law
from tests.tiny import write_tiny_model

pytest.importorskip("llguidance")
EOS, VOCAB, N = 2, 320, 300
PROMPT = [40, 41, 42]
ANY_JSON = Grammar.schema({"type": "object", "additionalProperties": {"type": ["integer", "null", "string", "array"]}})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_from_folder(write_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, N, (EOS,))


def fresh(compiled: CompiledGrammar, output: list[int]) -> list[int]:
    """The allowed tokens by a matcher that never saw anything else."""
    return np.flatnonzero(Matcher(compiled, [*PROMPT, *output], len(PROMPT)).allowed()).tolist()


@pytest.mark.parametrize("grammar", [ANY_JSON, Grammar("regex", r"(ab|a|\d{2,3}é?)*the"), Grammar("regex", ".{0,40}")])
def test_wherever_it_goes_it_is_as_if_it_had_gone_there_straight(grammars: Grammars, grammar: Grammar) -> None:
    """Random walks over trees of draft tokens, with commits of a path, a part of one, or something else."""
    compiled = grammars.compile(grammar)
    rng = random.Random(7)
    for _ in range(6):
        tokens = list(PROMPT)
        matcher = Matcher(compiled, tokens, len(PROMPT))
        while len(tokens) < 30 and tokens[-1] != EOS:
            paths: list[list[int]] = [[]]
            for _ in range(8):
                path = rng.choice(paths)
                output = [*tokens[len(PROMPT) :], *path]
                nexts = np.flatnonzero(matcher.allowed(path)).tolist()
                assert nexts == fresh(compiled, output)
                paths.append([*path, rng.choice(nexts)])
                if EOS not in paths[-1]:
                    drafted = [*path, rng.randrange(N)]
                    assert matcher.count_allowed(path) == len(path)
                    assert len(path) <= matcher.count_allowed(drafted) <= len(drafted)
                    ended = matcher.count_allowed([*path, EOS, 70])
                    assert ended == len(path) + (EOS in fresh(compiled, output))
            kept = rng.choice(paths)
            kept = kept[: rng.randrange(len(kept) + 1)]
            tokens += kept
            if tokens[-1] != EOS:
                tokens.append(rng.choice(fresh(compiled, tokens[len(PROMPT) :])))


def test_behind_the_end_only_the_end_can_come(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """Drafts go on behind the closing brace and EOS (FAULTS B22): the matcher neither fails nor loses its place."""
    compiled = grammars.compile(Grammar("json_object"))
    ids = tokenizer.encode("{}")
    tokens = [*PROMPT, ids[0]]
    matcher = Matcher(compiled, tokens, len(PROMPT))
    before = matcher.allowed().tolist()
    for tail in ([EOS], [EOS, 70, 71], [EOS, EOS]):
        assert np.flatnonzero(matcher.allowed([*ids[1:], *tail])).tolist() == [EOS]
        assert matcher.allowed().tolist() == before
    assert np.flatnonzero(matcher.allowed(ids[1:])).tolist() == [EOS]
    assert matcher.count_allowed([*ids[1:], EOS, 70]) == len(ids)
    assert matcher.count_allowed([EOS]) == 0
    tokens += [*ids[1:], EOS]
    assert np.flatnonzero(matcher.allowed()).tolist() == [EOS]
    assert matcher.count_allowed([70]) == 0


def test_a_path_that_breaks_the_grammar_is_said_and_forgotten(grammars: Grammars, tokenizer: Tokenizer) -> None:
    matcher = Matcher(grammars.compile(Grammar("regex", "abc", "guided_regex")), list(PROMPT), len(PROMPT))
    a, x = tokenizer.encode("a")[0], tokenizer.encode("x")[0]
    before = matcher.allowed().tolist()
    for path in ([x], [a, x], [a, x, a]):
        with pytest.raises(SettingError, match=f"token {x} breaks the answer's grammar \\(guided_regex\\)"):
            matcher.allowed(path)
    assert matcher.allowed().tolist() == before


def test_every_node_has_its_own_mask(grammars: Grammars, tokenizer: Tokenizer) -> None:
    a, b, c = (tokenizer.encode(x)[0] for x in "abc")
    params = SamplingParams(grammar=Grammar("regex", "[ab]a|b(b|c)"))
    sampler = Sampler(params, VOCAB, (EOS,), N, grammar=grammars.compile(params.grammar or ANY_JSON))
    draft = Draft.tree([a, b, a, c, b], [-1, -1, 0, 1, 1])
    rows = NodeRows(sampler, np.zeros((6, VOCAB)), History(PROMPT, len(PROMPT)), draft)
    assert [row.ids.tolist() for row in rows] == [[a, b], [a], [a, b, c], [EOS], [EOS], [EOS]]


def test_no_rule_brings_a_forbidden_token_back(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """Neither a bias nor a processor that overwrites the logits; padding ids stay out as well."""
    (a,), (x,) = tokenizer.encode("a"), tokenizer.encode("x")

    def all_alike(prompt: object, output: object, logits: np.ndarray) -> np.ndarray:
        return np.zeros_like(logits)

    grammar = Grammar("regex", "a+")
    for rules in ({"logit_bias": {x: 1e9}}, {"processors": (all_alike,)}):
        params = SamplingParams(grammar=grammar, **rules)  # type: ignore[arg-type]
        sampler = Sampler(params, VOCAB, (EOS,), N, grammar=grammars.compile(grammar))
        assert sampler.dist(np.zeros(VOCAB), PROMPT, []).ids.tolist() == [a]
        assert sampler.dist(np.zeros(VOCAB), PROMPT, [a]).ids.tolist() == [EOS, a]
    for rules in ({"banned_token_ids": (a,)}, {"allowed_token_ids": (x,)}):
        params = SamplingParams(grammar=grammar, **rules)  # type: ignore[arg-type]
        with pytest.raises(SettingError, match=r"no token is left to draw.*grammar together"):
            Sampler(params, VOCAB, (EOS,), N, grammar=grammars.compile(grammar)).dist(np.zeros(VOCAB), PROMPT, [])


def test_pruning_cuts_certain_chains_only(grammars: Grammars, tokenizer: Tokenizer) -> None:
    a, b, x = (tokenizer.encode(t)[0] for t in "abx")
    grammar = Grammar("regex", "a+b")
    sampler = Sampler(SamplingParams(grammar=grammar), VOCAB, (EOS,), N, grammar=grammars.compile(grammar))
    history = History([*PROMPT, a], len(PROMPT))

    def cut(draft: Draft) -> Draft:
        return pruned(draft, sampler, history)

    assert cut(Draft.chain([a, a, x, b])).tokens == (a, a)
    assert cut(Draft.chain([a, b, EOS, a])).tokens == (a, b, EOS)
    assert cut(Draft.chain([x, a])).reason == "the grammar forbids the draft"
    assert cut(Draft.nothing("why")).reason == "why"
    drawn = Draft.chain([x, a], [Dist.point(x), None])
    tree = Draft.tree([x, a], [-1, -1])
    probes = Draft((x, a), (-1, 0), (None, None), n_verify=1)
    for draft in (drawn, tree, probes):
        assert cut(draft) is draft
    free = Sampler(SamplingParams(), VOCAB, (EOS,), N)
    certain = Draft.chain([x, a])
    assert pruned(certain, free, history) is certain


RULES = range(1200)
TOO_WIDE = "\n".join(
    ['start: "a" "b"+ | "a" "x" big', "big: " + " | ".join(f"r{i}" for i in RULES)]
    + [f'r{i}: "7" r{(i * 7 + 1) % len(RULES)} | "8" "{i}"' for i in RULES]
)
"""Behind "ax" it has more rules at once than are followed."""


def test_a_draft_that_meets_a_limit_costs_the_answer_nothing(grammars: Grammars, tokenizer: Tokenizer) -> None:
    compiled = grammars.compile(Grammar("lark", TOO_WIDE, "guided_grammar"))
    a, b, x, seven = (tokenizer.encode(t)[0] for t in "abx7")
    tokens = list(PROMPT)
    matcher = Matcher(compiled, tokens, len(PROMPT))
    for output in ([], [a], [a, b]):
        tokens[len(PROMPT) :] = output
        draft = [a, x, seven][len(output) :]
        assert matcher.count_allowed(draft) <= len(draft)
        if output != [a, b]:
            with pytest.raises(SettingError, match=r"guided_grammar cannot be followed any further: .*items") as error:
                matcher.allowed(draft)
            assert error.value.setting == "guided_grammar"
            assert "<state>" not in str(error.value)
        assert np.flatnonzero(matcher.allowed()).tolist() == fresh(compiled, output)
    matcher = Matcher(compiled, [*PROMPT, a, x], len(PROMPT))
    for _ in range(2):  # the answer's own fault
        assert matcher.count_allowed([seven]) == 0
        with pytest.raises(SettingError, match="cannot be followed any further"):
            matcher.allowed()


def test_the_first_draft_token_is_in_the_mask(tokenizer: Tokenizer, grammars: Grammars) -> None:
    """Where a text is forced, llguidance takes any tokens that spell it, but its mask has the usual ones alone."""
    compiled = grammars.compile(Grammar("regex", "the the"))
    matcher = Matcher(compiled, PROMPT, len(PROMPT))
    for token in range(N):
        assert matcher.count_allowed([token]) == int(matcher.allowed()[token])


def test_a_grammar_that_takes_too_long_is_told(
    grammars: Grammars, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the thread's own clock; drafts count too, and each token pays in."""
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += cost
        return now

    monkeypatch.setattr("outrider.sampling.grammar.time.thread_time", clock)
    (a,) = tokenizer.encode("a")
    compiled = grammars.compile(Grammar("regex", "a+", "guided_regex"))
    for cost, ends in (  # noqa: B007 (the clock reads it)
        (EARNED * 0.3, False),  # thrice a token
        (EARNED * 0.4, True),
    ):
        tokens = list(PROMPT)
        matcher = Matcher(compiled, tokens, len(PROMPT))
        told = None
        for _ in range(2 * round(CREDIT / EARNED / 0.2)):
            try:
                assert matcher.allowed()[a]
            except SettingError as error:
                told = str(error)
                break
            if matcher.count_allowed([a]):  # asks for the mask, which is known, and then for more
                tokens.append(a)
        if ends:
            assert told is not None
            assert "takes too long to follow" in told
            assert matcher.count_allowed([a]) == 0
        else:
            assert told is None


def test_the_answers_of_a_request_share_its_time(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """What one answer has used up is not there for another: else many answers hold up many times as long."""
    (a,) = tokenizer.encode("a")
    compiled, account = grammars.compile(Grammar("regex", "a+", "guided_regex")), Account()
    tokens = [list(PROMPT) for _ in range(2)]
    first, second = (Matcher(compiled, own, len(PROMPT), account) for own in tokens)
    assert first.allowed()[a]
    account.spent = CREDIT + 0.005
    tokens[0].append(a)
    assert second.count_allowed([a]) == 0
    with pytest.raises(SettingError, match=r"guided_regex takes too long to follow, 0\.2\d s .* allowed are 0\.2 s"):
        second.allowed([a])
    assert first.allowed()[a], "its token has paid"
    assert account.spent < CREDIT


def test_masks_made_at_once_are_those_made_alone(
    grammars: Grammars, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On threads of their own, where they are dear; what breaks a limit, or is overdrawn, is said where it is asked."""
    a, x, seven = (tokenizer.encode(t)[0] for t in "ax7")
    wide = grammars.compile(Grammar("lark", TOO_WIDE, "guided_grammar"))
    usual = [
        grammars.compile(grammar) for grammar in (ANY_JSON, Grammar("regex", "[a-z]{1,20}"), Grammar("regex", "a+"))
    ]
    made: list[str] = []  # the thread of each mask
    mask = Matcher._mask

    def seen(matcher: Matcher, path: list[int]) -> np.ndarray:
        made.append(threading.current_thread().name)
        return mask(matcher, path)

    monkeypatch.setattr(Matcher, "_mask", seen)
    for limit, on_threads in ((-1.0, True), (1e9, False)):
        monkeypatch.setattr("outrider.sampling.grammar.DEAR", limit)
        tokens = [list(PROMPT) for _ in usual]
        matchers = [Matcher(compiled, own, len(PROMPT)) for compiled, own in zip(usual, tokens, strict=True)]
        broken, overdrawn = Matcher(wide, [*PROMPT, a, x, seven], len(PROMPT)), Matcher(usual[0], PROMPT, len(PROMPT))
        overdrawn._account.spent = 10.0
        masks = Masks(3)
        for _ in range(6):
            made.clear()
            broken._account.spent = 0.0  # on a slow machine it may have used up its time
            masks.prepare([*matchers, broken, overdrawn])
            assert len(made) == (len(matchers) + 1 if on_threads else 0)
            assert all(name.startswith("outrider-mask") for name in made)
            for compiled, own, matcher in zip(usual, tokens, matchers, strict=True):
                before = len(made)
                nexts = np.flatnonzero(matcher.allowed()).tolist()
                assert len(made) - before == (not on_threads)
                assert nexts == fresh(compiled, own[len(PROMPT) :])
                own.append(min(token for token in nexts if token != EOS))
            for failing, why in ((broken, "cannot be followed"), (overdrawn, "takes too long")):
                with pytest.raises(SettingError, match=why):
                    failing.allowed()


@pytest.mark.parametrize("limit", [-1.0, 1e9])
def test_a_mask_that_fails_in_any_way_is_no_fault_of_the_others(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch, limit: float
) -> None:
    """Made beforehand it harms nobody; who asks for it hears of it."""
    monkeypatch.setattr("outrider.sampling.grammar.DEAR", limit)
    fine, failing = (Matcher(grammars.compile(ANY_JSON), list(PROMPT), len(PROMPT)) for _ in range(2))
    mask = Matcher._mask

    def fails(matcher: Matcher, path: list[int]) -> np.ndarray:
        if matcher is failing:
            raise RuntimeError("the grammar's library gave up")
        return mask(matcher, path)

    monkeypatch.setattr(Matcher, "_mask", fails)
    Masks(2).prepare([failing, fine])
    assert fine.allowed().any()
    with pytest.raises(RuntimeError, match="gave up"):
        failing.allowed()


def test_more_classes_of_tokens_change_no_mask(
    grammars: Grammars, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.models.grammars._SLICES", ())
    without = Grammars(tokenizer, N, (EOS,))
    rng = random.Random(3)
    texts = (r"[a-z]{3,9}", r"[A-Za-z ,.']{20,400}", r"(\w+ ){2,9}\w+", "[^a-f]{0,30}", "[a-zA-Z]{2}[a-z ]*[0-9]")
    for grammar in (ANY_JSON, *(Grammar("regex", text) for text in texts)):
        pair = grammars.compile(grammar), without.compile(grammar)
        for _ in range(4):
            tokens = list(PROMPT)
            one, other = (Matcher(compiled, tokens, len(PROMPT)) for compiled in pair)
            while len(tokens) < 30 and tokens[-1] != EOS:
                assert one.allowed().tolist() == other.allowed().tolist()
                tokens.append(rng.choice(np.flatnonzero(one.allowed()).tolist()))


def test_a_grammar_leaves_the_law_of_what_it_allows(grammars: Grammars) -> None:
    """Few tokens or nearly all, with and without the rules behind it, against the law written out."""
    rng = np.random.default_rng(5)
    for text in ("[ab]+", "(.|\\n)*", "[a-z ]{0,30}"):
        compiled = grammars.compile(Grammar("regex", text))
        allowed = Matcher(compiled, PROMPT, len(PROMPT)).allowed()
        for rules in ({}, {"top_p": 0.8}, {"top_k": 7}, {"min_p": 0.05}, {"temperature": 0.01}):
            params = SamplingParams(**{"temperature": 0.9, **rules}, grammar=Grammar("regex", text))  # type: ignore[arg-type]
            sampler = Sampler(params, VOCAB, (EOS,), N, grammar=compiled)
            logits = rng.normal(size=VOCAB) * 3
            masked = np.where(allowed, logits[:N], -np.inf)
            want, near = dense_law(masked, dataclasses.replace(params, grammar=None), (), PROMPT, [])
            assert near > 1e-9
            dist = sampler.dist(logits, PROMPT, [])
            got = np.zeros(N)
            got[dist.ids] = dist.probs
            np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-300)
            assert allowed[dist.ids].all()


def test_rows_that_fail_are_those_of_their_nodes(grammars: Grammars) -> None:
    """A verdict ends at the first node whose row could not be had; the row of the answer itself must be had."""

    def fails_behind_5(prompt: object, output: list[int], logits: np.ndarray) -> np.ndarray:
        if output[-1:] == [5]:
            raise RuntimeError("why")
        return logits

    sampler = Sampler(SamplingParams(processors=(fails_behind_5,)), VOCAB, (EOS,), N)
    draft = Draft.tree([4, 5, 6, 7], [-1, 0, 1, -1])
    rows = NodeRows(sampler, np.zeros((5, VOCAB)), History(PROMPT, len(PROMPT)), draft)
    assert [len(row.ids) for row in rows] == [N, N, 1, N, N]
    assert rows.settled(Verdict((0, 1, 2), 9)) == Verdict((0,), 5)
    assert rows.settled(Verdict((0, 1), 9)) == Verdict((0,), 5)
    assert rows.settled(Verdict((0,), 9)) == Verdict((0,), 9)
    with pytest.raises(RuntimeError, match="why"):
        NodeRows(sampler, np.zeros((5, VOCAB)), History([*PROMPT, 5], len(PROMPT)), draft)[0]


@pytest.mark.model
@pytest.mark.parametrize("rule", ["start start", "start start start"])
def test_one_mask_has_a_limit(smollm2_path: Path, rule: str) -> None:
    """A token of 64 characters is as many parser steps, in an ambiguous grammar each longer than the one before: with
    the library's own limit there are masks that take seconds."""
    tokenizer = open_model(smollm2_path).tokenizer
    compiled = Grammars(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids).compile(
        Grammar("lark", f'start: {rule} | "=" | "y"', "guided_grammar")
    )
    (long,) = tokenizer.encode("=" * 64)
    assert Matcher(compiled, [], 0).allowed()[long]
    with pytest.raises(SettingError, match=r"guided_grammar cannot be followed any further: .*limit 10000; mask"):
        Matcher(compiled, [long] * 3, 0).allowed()
