"""Answers under a grammar: always what the grammar describes, with every drafter, and the plain output or law."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from outrider.core.errors import SettingError
from outrider.core.grammar import Grammar
from outrider.core.params import SamplingParams, SpecParams
from outrider.core.types import FinishReason
from outrider.engine.request import Completion, RequestOutput
from outrider.sampling.grammar import Masks, Matcher
from outrider.spec.proposer import Proposer
from tests.engine.drafters import (
    Build,
    Oracle,
    RandomTree,
    Script,
    Shape,
    context_for,
    registered,
    scripted,
    self_drafter,
)
from tests.engine.harness import (
    ToyTokenizer,
    assert_same,
    finish,
    greedy,
    make_engine,
    plain,
    run_all,
    toy_target,
    with_eos,
)
from tests.engine.laws import joint_law, p_value, raw_logits
from tests.toy import toy_config

pytest.importorskip("llguidance")


class Spelling(ToyTokenizer):
    """A toy tokenizer that also encodes: always the longest piece."""

    def encode(self, text: str, *, specials: bool = True, add_bos: bool | None = None) -> list[int]:
        data, ids = text.encode(), []
        while data:
            known = [i for i, piece in enumerate(self.pieces) if i != self.special and data.startswith(piece)]
            ids.append(max(known, key=lambda i: len(self.pieces[i])))
            data = data[len(self.pieces[ids[-1]]) :]
        return ids


EOS = 0
PIECES = ["<end>", *'{}[]",: 0123456789abcden', '{"', '":', '",', "ab", "1,", "en", "12"]
TOKENS = Spelling(PIECES, special=EOS)
TARGET = toy_target(seed=1, tokenizer=TOKENS, eos=(EOS,))  # 32 ids, as many as there are pieces
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 999},
        "b": {"enum": ["a", "ab", 12]},
        "c": {"type": "array", "items": {"type": "string", "pattern": "^[a-e]{0,3}$"}, "maxItems": 2},
    },
    "required": ["a", "b", "c"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": " {0,1}"},
}
PATTERN = r"(ab|[cd]\d{1,2},){2,5}e(nd)?"
OPTIONS = ["ab", "abc", "ba:1", "end", "12"]
GRAMMARS = (Grammar.schema(SCHEMA), Grammar("regex", PATTERN), Grammar.choice(OPTIONS), None)
PROMPTS = [[7, 3, 9, 7, 3, 9, 7], [11, 4], [5, 5, 5, 5], [12, 13, 14, 15, 16], [9, 9, 8], [30, 2]]
JOBS = list(zip(PROMPTS, [*GRAMMARS, *GRAMMARS[:2]], strict=True))
NAMES = list(dict([*registered(), *scripted({}, len(PIECES))]))


def assert_obeys(answer: Completion, grammar: Grammar | None) -> None:
    if grammar is None:
        return
    assert (answer.finish_reason, answer.error) == (FinishReason.STOP, ""), answer
    assert answer.token_ids[-1] == EOS
    assert EOS not in answer.token_ids[:-1]
    if grammar.kind == "regex":
        assert re.fullmatch(PATTERN, answer.text), answer.text
    elif grammar.kind == "choice":
        assert answer.text in OPTIONS
    else:
        value = json.loads(answer.text)
        assert set(value) == {"a", "b", "c"}
        assert 0 <= value["a"] <= 999
        assert value["b"] in ["a", "ab", 12]
        assert len(value["c"]) <= 2
        assert all(re.fullmatch("[a-e]{0,3}", text) for text in value["c"])


def jobs(**rules: Any) -> list[tuple[list[int], SamplingParams]]:
    return [(prompt, SamplingParams(max_tokens=60, grammar=grammar, **rules)) for prompt, grammar in JOBS]


@functools.cache
def reference() -> tuple[RequestOutput, ...]:
    return tuple(plain(TARGET, *job) for job in jobs(temperature=0))


@functools.cache
def drafters() -> dict[str, Build]:
    """They know nothing of grammars, or apply the request's own rules."""
    known = {tuple(prompt): want.token_ids for (prompt, _), want in zip(JOBS, reference(), strict=True)}
    return {**dict(registered()), **dict(scripted(known, len(PIECES)))}


def test_without_a_grammar_the_toy_says_something_else() -> None:
    """Negative control: what the tests below see is the grammar's doing."""
    for prompt, grammar in JOBS[:3]:
        answer = plain(TARGET, prompt, greedy(60)).completions[0]
        with pytest.raises((AssertionError, ValueError)):
            assert_obeys(answer, grammar)


@pytest.mark.parametrize("name", NAMES)
def test_every_drafter_gives_the_plain_output(name: str) -> None:
    """Greedy, in a batch with and without grammars, chunked prompts, a pool that is too small for all."""
    for want, (_, grammar) in zip(reference(), JOBS, strict=True):
        assert_obeys(want.completions[0], grammar)
    for gamma, method in ((3, "standard"), (5, "block"), (8, "coupled")):
        proposer = drafters()[name](context_for(TARGET, gamma, method))
        engine = make_engine(TARGET, proposer, gamma=gamma, method=method, num_kv_blocks=12, max_num_batched_tokens=24)
        for got, want in zip(run_all(engine, jobs(temperature=0)), reference(), strict=True):
            assert_same(got, want, (name, gamma, method))
        assert engine.metrics.preemptions > 0


@pytest.mark.parametrize("name", NAMES)
def test_sampled_answers_obey_with_every_drafter(name: str) -> None:
    for seed, method in enumerate(("standard", "block", "coupled")):
        engine = make_engine(TARGET, drafters()[name](context_for(TARGET, 4, method)), method=method)
        requests = jobs(temperature=1.3, seed=seed, n=2, top_p=0.95)
        for got, (_, params) in zip(run_all(engine, requests), requests, strict=True):
            for answer in got.completions:
                assert_obeys(answer, params.grammar)


def test_choices_of_one_request_go_their_own_ways() -> None:
    params = SamplingParams(grammar=GRAMMARS[1], n=12, seed=4, max_tokens=60, temperature=1.5)
    got = run_all(make_engine(TARGET, self_drafter(TARGET)), [(PROMPTS[0], params)])[0]
    for answer in got.completions:
        assert_obeys(answer, params.grammar)
    assert len({answer.text for answer in got.completions}) > 6
    assert got.stats.accepted > 0


@pytest.mark.parametrize("method", ["standard", "coupled"])
def test_masks_that_are_made_at_once_give_the_same_answers(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Drafts come and go beside them."""
    monkeypatch.setattr("outrider.sampling.grammar.CREDIT", 60.0)  # a busy machine must not end an answer
    requests = jobs(temperature=1.1, seed=3, n=4)
    at_once: list[int] = []
    prepare = Masks.prepare

    def seen(masks: Masks, matchers: Sequence[Matcher]) -> None:
        at_once.append(sum(matcher.dear for matcher in matchers))
        prepare(masks, matchers)

    monkeypatch.setattr(Masks, "prepare", seen)
    got = []
    for limit, most in ((1e9, 0), (-1.0, 12)):
        monkeypatch.setattr("outrider.sampling.grammar.DEAR", limit)
        at_once.clear()
        engine = make_engine(TARGET, self_drafter(TARGET), method=method, threads=3)
        got.append([[c.token_ids for c in out.completions] for out in run_all(engine, requests)])
        assert max(at_once) >= most
        assert most or not any(at_once)
    assert got[0] == got[1]


@pytest.mark.parametrize("method", ["standard", "block", "coupled"])
def test_the_law(method: str) -> None:
    """1,000 samples a rule, over chains and trees, certain and drawn, against the law written the slow way."""

    def prefixes_only(prompt: Sequence[int], output: Sequence[int], logits: np.ndarray) -> np.ndarray:
        text = "".join(PIECES[token] for token in output)
        for token, piece in enumerate(PIECES):
            fits = text in options if token == EOS else any(option.startswith(text + piece) for option in options)
            logits[token] = logits[token] if fits else -np.inf
        return logits

    options = ["a0", "a1b", "b2", "b0", "c", "ca", "c12", "d0a", "d1a"]
    target = toy_target(seed=3, std=0.25, tokenizer=TOKENS, eos=(EOS,))
    slow = SamplingParams(processors=(prefixes_only,), stop_token_ids=(EOS,))
    law = joint_law(raw_logits(target, PROMPTS[0]), PROMPTS[0], slow)
    proposers: dict[str, Proposer] = {
        f"{tree} {sampled}": RandomTree(32, Shape(tree=tree, sampled=sampled, method=method))
        for tree in (False, True)
        for sampled in (False, True)
    }
    proposers["self"] = self_drafter(target, method, draft_tree="2,2")
    engine = make_engine(
        target, proposers, method=method, num_kv_blocks=1600, max_num_seqs=400, max_num_batched_tokens=3000
    )
    grammar = Grammar.choice(options)
    requests = [
        engine.add_request(
            PROMPTS[0],
            SamplingParams(grammar=grammar, n=100, seed=1000 * i + run, max_tokens=3),
            SpecParams(drafter=name),
        )
        for i, name in enumerate(proposers)
        for run in range(2)
    ]
    while engine.has_work:
        engine.step()
    drawn = [tuple(answer.seq.output_ids) for request in requests for answer in request.answers]
    assert len(drawn) == 1000
    assert len(set(drawn)) > 5
    assert p_value(drawn, law) > 0.001
    assert engine.metrics.spec["self"].accepted > 0
    other = joint_law(raw_logits(target, PROMPTS[0]), PROMPTS[0], dataclasses.replace(slow, temperature=3.0))
    assert p_value(drawn, other) < 1e-9


@pytest.mark.parametrize("method", ["standard", "block", "coupled"])
def test_a_rule_that_fails_on_a_draft_leaves_the_law(method: str) -> None:
    """Block verification looks behind drafts that do not stay: an answer ends only where plain decoding would."""

    def fails(prompt: Sequence[int], output: Sequence[int], logits: np.ndarray) -> np.ndarray:
        if output[:1] == [likely]:
            raise RuntimeError("such an answer is not wanted")
        return logits

    target = toy_target(seed=3, std=0.25, tokenizer=TOKENS)
    free = SamplingParams(temperature=0.5)
    law = joint_law(raw_logits(target, PROMPTS[0]), PROMPTS[0], free, 2)
    firsts = {first: sum(p for tokens, p in law.items() if tokens[0] == first) for (first, *_) in law}
    likely = max(firsts, key=firsts.__getitem__)
    law = {tokens: p for tokens, p in law.items() if tokens[0] != likely} | {(likely,): firsts[likely]}
    drafters = {f"{tree}": RandomTree(32, Shape(tree=tree, sampled=True, method=method)) for tree in (False, True)}
    engine = make_engine(target, drafters, method=method, num_kv_blocks=1600, max_num_seqs=400)
    params = dataclasses.replace(free, processors=(fails,), n=100, max_tokens=2)
    requests = [
        engine.add_request(PROMPTS[0], dataclasses.replace(params, seed=i), SpecParams(drafter=name))
        for i, name in enumerate(drafters)
    ]
    while engine.has_work:
        engine.step()
    answers = [answer for request in requests for answer in request.answers]
    drawn = [tuple(answer.seq.output_ids) for answer in answers]
    assert [answer.finish is FinishReason.ERROR for answer in answers] == [tokens == (likely,) for tokens in drawn]
    assert 10 < drawn.count((likely,)) < 190
    assert p_value(drawn, law) > 0.001


@pytest.mark.parametrize("behind", [(), (EOS, 5, 6, EOS, 7)])
def test_drafts_that_go_on_behind_the_end(behind: tuple[int, ...]) -> None:
    """FAULTS B22: the right answer, EOS, and then more; ten times in one engine."""
    prompt, params = PROMPTS[0], greedy(60, grammar=GRAMMARS[0])
    want = plain(TARGET, prompt, params)
    for drawn in (False, True):
        chain = Oracle({tuple(prompt): (*want.token_ids, *behind)})
        tree = RandomTree(32, Shape(tree=True, quality=1.0), {tuple(prompt): (*want.token_ids, *behind)})
        engine = make_engine(TARGET, tree if drawn else chain, gamma=7)
        for _ in range(10):
            got = run_all(engine, [(prompt, params)])[0]
            assert_same(got, want)
            assert got.stats.accepted > 0


def test_forbidden_drafts_cost_no_rows() -> None:
    """A drafter that only proposes what the grammar forbids: nothing is sent to the target, and the reason is told."""
    got = run_all(make_engine(TARGET, Script(TOKENS.encode("{")[0])), [(PROMPTS[0], greedy(60, grammar=GRAMMARS[1]))])
    assert got[0].stats.drafted == 0
    assert set(got[0].stats.no_draft) >= {"the grammar forbids the draft"}


def test_cut_at_max_tokens() -> None:
    """What there is of the answer is the beginning of the whole one."""
    whole = plain(TARGET, PROMPTS[0], greedy(60, grammar=GRAMMARS[0])).completions[0]
    for length in range(1, len(whole.token_ids)):
        params = greedy(length, grammar=GRAMMARS[0])
        cut = run_all(make_engine(TARGET, Oracle({tuple(PROMPTS[0]): whole.token_ids})), [(PROMPTS[0], params)])[0]
        assert cut.token_ids == whole.token_ids[:length]
        assert cut.completions[0].finish_reason is FinishReason.LENGTH
        assert whole.text.startswith(cut.text)


def test_a_request_that_cannot_be_served_leaves_the_engine_alone() -> None:
    engine = make_engine(TARGET)
    bad = Grammar("regex", "(a", "guided_regex")
    with pytest.raises(SettingError, match="guided_regex cannot be used as a regular expression: unclosed group"):
        engine.add_request(PROMPTS[0], greedy(grammar=bad))
    assert not engine.has_work
    for target, what in ((toy_target(seed=1, eos=(EOS,)), "a tokenizer"), (with_eos(TARGET), "an end token")):
        with pytest.raises(SettingError, match=f"grammar needs {what}"):
            make_engine(target).add_request(PROMPTS[0], greedy(grammar=GRAMMARS[1]))
    finish(engine)


def test_rules_that_contradict_the_grammar_end_their_own_request_only() -> None:
    """A shortest answer that no option has: an error in one sentence; the others go on."""
    engine = make_engine(TARGET, self_drafter(TARGET))
    wrong = engine.add_request(PROMPTS[0], greedy(60, grammar=Grammar.choice(["ab"]), min_tokens=9))
    right = engine.add_request(PROMPTS[1], greedy(60, grammar=GRAMMARS[1]))
    finish(engine)
    answer = RequestOutput.of(wrong).completions[0]
    assert answer.finish_reason is FinishReason.ERROR
    assert "no token is left to draw" in answer.error
    assert_obeys(RequestOutput.of(right).completions[0], GRAMMARS[1])


def test_padding_of_the_vocabulary_and_several_ends() -> None:
    """A vocabulary with more rows than tokens, and a second end token, whose text the grammar would allow."""
    target = toy_target(toy_config(vocab=40), seed=6, tokenizer=TOKENS, eos=(EOS, PIECES.index("d")))
    for seed in range(6):
        params = SamplingParams(grammar=Grammar("regex", "[abcd]{3}"), seed=seed, temperature=2.0, max_tokens=8)
        answer = run_all(make_engine(target, self_drafter(target)), [(PROMPTS[0], params)])[0].completions[0]
        assert answer.finish_reason is FinishReason.STOP
        assert re.fullmatch("[abc]{3}", answer.text)


@pytest.mark.model
def test_the_default_model_answers_in_json(smollm2_path: Any) -> None:
    """With and without drafts the same JSON, which has the schema's fields and types."""
    from outrider.engine.llm import LLM

    llm = LLM(str(smollm2_path), "ngram", kv_cache_mib=64)
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 30},
            "age": {"type": "integer"},
            "hobbies": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 3},
        },
        "required": ["name", "age", "hobbies"],
        "additionalProperties": False,
    }
    ask = [{"role": "user", "content": "A JSON record of Bob Smith, aged 42, who likes tennis and chess."}]
    params = greedy(100, grammar=Grammar.schema(schema))
    without, with_drafts = (llm.chat(ask, params, SpecParams(enabled=on))[0] for on in (False, True))
    assert_same(with_drafts, without)
    assert with_drafts.completions[0].finish_reason is FinishReason.STOP
    value = json.loads(with_drafts.text)
    assert set(value) == {"name", "age", "hobbies"}
    assert isinstance(value["age"], int)
    assert all(isinstance(text, str) for text in (value["name"], *value["hobbies"]))
