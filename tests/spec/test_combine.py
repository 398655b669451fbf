"""Several drafters in one: what becomes of their drafts, who proposed what, and that the output keeps its law."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.dist import Dist
from outrider.core.draft import Draft
from outrider.core.errors import SettingError
from outrider.core.params import SamplingParams, SpecParams
from outrider.core.types import Sequence as Seq
from outrider.core.types import Span
from outrider.spec.auto import AutoLength
from outrider.spec.costs import Costs
from outrider.spec.drafts.combine import Combine, CombineSettings, Part, _in_order, _in_turns, _likeliest_first, unite
from outrider.spec.proposer import Needs, Proposer
from outrider.spec.registry import build_proposer, spec_from_mapping
from tests.engine.drafters import Oracle, Script, Silent, Wrong, context_for, registered
from tests.engine.harness import assert_same, greedy, make_engine, plain, prompt_of, run_all, toy_target
from tests.engine.heads import fitted_eagle3, fitted_medusa
from tests.spec.simulator import cpu_pass, table_of
from tests.spec.verify_exact import Explorer, History, Propose, Toy, gap, toy
from tests.toy import toy_config

FAST = settings(max_examples=100, deadline=None, derandomize=True, database=None)
PROMPT = [5, 6, 7]
HALF = Dist.of(np.array([1, 2]), np.array([0.5, 0.5]))


class Fixed(Proposer):
    """Always the same draft; carries on with the tokens that follow the path's last one."""

    def __init__(self, draft: Draft, **needs: Any) -> None:
        self.draft, self.needs = draft, Needs(**needs)
        self.budgets: list[int] = []

    def propose(self, spans: Sequence[Span]) -> list[Draft]:
        self.budgets += [span.budget for span in spans]
        return [self.draft for _ in spans]

    def continue_from(self, span: Span, tokens: Sequence[int], budget: int) -> Draft:
        return Draft.chain(range(tokens[-1] + 1, tokens[-1] + 1 + budget))


def combine(mode: str, *parts: Proposer) -> Combine:
    return Combine([Part("abcd"[i], part) for i, part in enumerate(parts)], mode)


def propose(drafter: Proposer, budget: int = 6) -> Draft:
    seq = Seq(0, PROMPT, 3, SamplingParams(), SpecParams(), seed=0)
    (draft,) = drafter.propose([Span(seq, 2, 1, budget=budget)])
    assert len(draft) <= budget
    return draft


def test_first_takes_the_first_draft_there_is_whole() -> None:
    one, two = Fixed(Draft.chain([1, 2])), Fixed(Draft.chain([3]))
    assert propose(combine("first", one, two)) == replace(Draft.chain([1, 2]), sources=("a", "a"))
    assert not two.budgets, "a part was asked although another one had a draft"
    assert propose(combine("first", Silent(), two)).sources == ("b",)
    assert propose(combine("first", Silent(), Silent())).reason == "nothing to say"


def test_extend_carries_a_draft_on_from_the_end_of_its_first_path() -> None:
    chain = propose(combine("extend", Fixed(Draft.chain([1, 2])), Fixed(Draft())), 5)
    assert (chain.tokens, chain.is_chain, chain.sources) == ((1, 2, 3, 4, 5), True, ("a", "a", "b", "b", "b"))
    tree = propose(combine("extend", Silent(), Fixed(Draft.tree([1, 9, 2], [-1, -1, 0])), Fixed(Draft())), 4)
    assert (tree.tokens, tree.parents, tree.sources) == ((1, 9, 2, 3), (-1, -1, 0, 2), ("b", "b", "b", "c"))
    assert len(propose(combine("extend", Fixed(Draft.chain([1, 2])), Fixed(Draft())), 2)) == 2
    assert propose(combine("extend", Fixed(Draft.chain([1])))).tokens == (1,), "a part does not carry on its own draft"
    assert propose(combine("extend", Fixed(Draft.chain([1])), Script(4))).tokens == (1,), "not every part can carry on"


def test_merge_unites_equal_beginnings_and_takes_turns() -> None:
    one, two = Fixed(Draft.chain([1, 2, 3])), Fixed(Draft.chain([1, 4, 5]))
    whole = propose(combine("merge", one, two))
    assert whole == Draft((1, 2, 4, 3, 5), (-1, 0, 0, 1, 2), (None,) * 5, sources=("a+b", "a", "b", "a", "b"))
    assert propose(combine("merge", one, two), 3).tokens == (1, 2, 4)
    assert propose(combine("merge", Silent(), two)).sources == ("b",) * 3
    assert propose(combine("merge", one, one, one)).sources == ("a+b+c",) * 3
    assert propose(combine("merge", Silent(), Silent())).reason == "nothing to say"


def test_a_drawn_token_keeps_its_q_and_is_never_left_out_for_its_value() -> None:
    drawn, certain = Draft.tree([1], [-1], [HALF]), Draft.chain([1, 3])
    first = unite([drawn, certain], _in_turns, 4)
    assert (first.tokens, first.q) == ((1, 3), (HALF, None)), "a certain one joins a drawn one before it"
    behind = unite([certain, drawn], _in_turns, 4)
    assert (behind.tokens, behind.parents) == ((1, 1, 3), (-1, -1, 0))
    assert behind.q == (None, HALF, None)
    assert unite([drawn, drawn], _in_turns, 4).q == (HALF, HALF)


def test_probe_rows_stay_last_and_belong_to_one_part() -> None:
    probing = Draft((1, 7, 8), (-1, 0, 1), (None,) * 3, n_verify=1)
    merged = unite([Draft.chain([2, 3]), probing, replace(probing, tokens=(4, 5, 6))], _in_turns, 6)
    assert (merged.tokens, merged.n_verify) == ((2, 1, 4, 3, 7, 8), 4)
    assert merged.parents[4:] == (1, 4)


def test_merge_takes_the_likeliest_first_where_all_know_their_confidence() -> None:
    one = Draft.chain([1, 2, 3]).sure([0.9, 0.5, 0.2])
    two = Draft.tree([1, 4, 5], [-1, 0, -1]).sure([0.8, 0.6, 0.55])
    whole = propose(combine("merge", Fixed(one), Fixed(two)))
    assert whole.tokens == (1, 4, 5, 2, 3)
    assert whole.parents == (-1, 0, -1, 0, 3)
    assert whole.confidence == (0.9, 0.6, 0.55, 0.5, 0.2), "of united nodes the greater"
    assert propose(combine("merge", Fixed(two), Fixed(one)), 3).tokens == (1, 4, 5)
    assert propose(combine("merge", Fixed(one), Fixed(two)), 4).confidence == whole.confidence[:4]
    silent = propose(combine("merge", Silent(), Fixed(one)))
    assert (silent.tokens, silent.confidence) == (one.tokens, one.confidence)


def test_a_child_that_is_surer_than_its_parent_waits_for_it() -> None:
    odd = Draft.chain([1, 2]).sure([0.3, 0.9])
    merged = propose(combine("merge", Fixed(odd), Fixed(Draft.chain([7]).sure([0.5]))))
    assert (merged.tokens, merged.parents) == ((7, 1, 2), (-1, -1, 1))


def test_without_every_parts_confidence_parts_take_turns_and_none_is_told() -> None:
    sure, unsure = Draft.chain([1, 2]).sure([0.9, 0.8]), Draft.chain([3, 4])
    merged = propose(combine("merge", Fixed(unsure), Fixed(sure)))
    assert (merged.tokens, merged.confidence) == ((3, 1, 4, 2), None)


def test_a_drawn_token_is_not_ordered_by_its_confidence() -> None:
    drawn, certain = Draft.tree([1], [-1], [HALF]).sure([0.1]), Draft.chain([2]).sure([0.9])
    merged = propose(combine("merge", Fixed(drawn), Fixed(certain)))
    assert (merged.tokens, merged.confidence) == ((1, 2), (0.1, 0.9))


def test_what_is_carried_on_is_as_sure_as_what_it_hangs_under() -> None:
    more = unite([Draft.chain([1, 2]).sure([0.8, 0.5]), Draft.chain([3, 4]).sure([0.6, 0.2])], _in_order, 4, [-1, 1])
    assert (more.tokens, more.confidence) == ((1, 2, 3, 4), (0.8, 0.5, 0.3, 0.1))


def test_auto_keeps_of_a_merged_draft_what_pays() -> None:
    """Its controller weighs the rows by their confidence, which a merged draft has as its parts do."""
    one = Draft.chain([1, 2, 3]).sure([0.95, 0.9, 0.02])
    two = Draft.chain([4, 5, 6]).sure([0.02, 0.02, 0.02])
    auto = AutoLength(Costs(table_of(cpu_pass)))
    spec = SpecParams(drafter="combine")
    span = Span(Seq(0, PROMPT, 3, SamplingParams(temperature=0), spec, seed=0, max_draft=8), 2, 1, budget=8)
    auto.budgets([span], 64)
    (span.draft,) = combine("merge", Fixed(one), Fixed(two)).propose([span])
    (kept,) = auto.trim([span])
    assert 2 <= kept < len(span.draft) == 6
    assert span.draft.tokens[:2] == (1, 2)


def drafts(draw: Any) -> Draft:
    n = draw(st.integers(0, 6))
    parents = [draw(st.integers(-1, node - 1)) for node in range(n)]
    return Draft.tree([draw(st.integers(0, 2)) for _ in range(n)], parents)


@FAST
@given(st.data())
def test_every_prefix_of_the_likeliest_rows_is_a_tree_and_falls_in_confidence(data: st.DataObject) -> None:
    given_ = []
    for draft in [drafts(data.draw) for _ in range(data.draw(st.integers(1, 3)))]:
        own: list[float] = []
        for parent in draft.parents:
            own.append(data.draw(st.sampled_from([0.3, 0.5, 1.0])) * (own[parent] if parent >= 0 else 1.0))
        given_.append(draft.sure(own))
    budget = data.draw(st.integers(0, 12))
    merged = unite(given_, _likeliest_first, budget)
    confidence = list(merged.confidence or ())
    assert len(confidence) == len(merged)
    assert confidence == sorted(confidence, reverse=True)
    kept = {tuple(merged.tokens[i] for i in merged.path(node)) for node in range(len(merged))}
    assert len(kept) == len(merged)
    least = confidence[-1] if confidence else 1.0
    for draft in given_:
        for node in range(len(draft)):
            path = tuple(draft.tokens[i] for i in draft.path(node))
            assert path in kept or draft.confidence[node] <= least or not budget, "a likelier one was left out"


@FAST
@given(st.data())
def test_a_merged_tree_is_the_set_of_all_paths(data: st.DataObject) -> None:
    """With room for all: exactly the parts' paths, each once. With less room: some of them."""

    def paths(draft: Draft) -> list[tuple[int, ...]]:
        return [tuple(draft.tokens[i] for i in draft.path(node)) for node in range(len(draft))]

    given_ = [drafts(data.draw) for _ in range(data.draw(st.integers(1, 3)))]
    budget = data.draw(st.integers(0, 18))
    union = {path for draft in given_ for path in paths(draft)}
    merged = unite([replace(d, sources=(n,) * len(d)) for n, d in zip("abc", given_, strict=False)], _in_turns, budget)
    assert len(paths(merged)) == len(set(paths(merged))) == min(budget, len(union))
    assert set(paths(merged)) <= union
    if budget >= len(union):
        for path, source in zip(paths(merged), merged.sources or (), strict=True):
            owners = [name for name, draft in zip("abc", given_, strict=False) if path in paths(draft)]
            assert sorted(source.split("+")) == owners


def test_metrics_keep_the_sources_apart() -> None:
    """One part is always right, the other always wrong: neither gets the other's credit."""
    target = toy_target(seed=1)
    want = plain(target, PROMPT, greedy(20))
    answers = {tuple(PROMPT): want.token_ids}
    engine = make_engine(target, combine("merge", Oracle(answers), Wrong(answers, 32)))
    got = run_all(engine, [(PROMPT, greedy(20))])[0]
    assert_same(got, want)
    stats = got.stats
    assert stats.by_source["a"] == (stats.accepted, stats.accepted)
    assert stats.by_source["b"] == (stats.drafted - stats.accepted, 0)
    assert engine.metrics.spec["drafter"].by_source == stats.by_source
    alone = run_all(make_engine(target, Oracle(answers)), [(PROMPT, greedy(20))])[0]
    assert alone.stats.by_source == {}


def test_needs_add_up_and_calls_reach_every_part() -> None:
    parts = [
        Fixed(Draft(), max_nodes=3, kv_bytes_per_token=5, weight_bytes=7, feature_layers=(1, 4)),
        Fixed(Draft(), max_nodes=2, kv_bytes_per_token=1, weight_bytes=2, feature_layers=(4,), prediction=True),
    ]
    assert combine("merge", *parts).needs == Needs(5, (1, 4), 6, 9, True)
    assert combine("first", *parts).needs.max_nodes == 3
    scripts = [Script(1), Script(2)]
    target = toy_target(seed=1)
    run_all(make_engine(target, combine("merge", *scripts)), [(PROMPT, greedy(9))])
    for script in scripts:
        assert script.released == [0]
        assert sum(len(commit.new_tokens) for commit in script.commits) == 9
    limited = Combine([Part("a", scripts[0], limit=1), Part("b", scripts[1])], "merge")
    assert propose(limited).tokens == (1, 2, 2, 2, 2, 2)


class Noted(Proposer):
    """Another drafter that notes what it drafted after each text."""

    def __init__(self, inner: Proposer) -> None:
        self.inner, self.needs = inner, inner.needs
        self.drafts: dict[tuple[int, ...], tuple[int, ...]] = {}
        for name in ("start", "share_kv", "copy_blocks", "observe", "release"):
            setattr(self, name, getattr(inner, name))

    def propose(self, spans: Sequence[Span]) -> list[Draft]:
        drafts = self.inner.propose(spans)
        self.drafts |= {tuple(span.seq.tokens): d.tokens for span, d in zip(spans, drafts, strict=True) if d}
        return drafts


def test_a_part_drafts_as_it_would_alone() -> None:
    """Whatever it needs of the target (several layers, the last one, the KV) reaches it, whatever the others need."""
    target = toy_target(toy_config(layers=4), seed=1)
    context = context_for(target)
    parts = {
        "eagle": {"model": str(fitted_eagle3(target.decoder))},
        "medusa": {"model": str(fitted_medusa(target.decoder)), "medusa_choices": "[[0],[0,0],[0,0,0]]"},
        "self": {"exit_layer": 3},
        "suffix": {},
    }

    def run(*names: str) -> list[Noted]:
        specs = [replace(context.spec, method=name, options=parts[name]) for name in names]
        noted = [Noted(build_proposer(spec, context)) for spec in specs]
        drafter = combine("merge", *noted) if len(noted) > 1 else noted[0]
        prompts = [prompt_of(6, seed) for seed in range(8)]
        outputs = run_all(make_engine(target, drafter, gamma=3, num_kv_blocks=200), [(p, greedy(16)) for p in prompts])
        for prompt, output in zip(prompts, outputs, strict=True):
            assert_same(output, plain(target, prompt, greedy(16)))
        return noted

    for name, together in zip(parts, run(*parts), strict=True):
        (alone,) = run(name)
        texts = together.drafts.keys() & alone.drafts.keys()
        assert len(texts) > 20, name
        assert all(together.drafts[text] == alone.drafts[text] for text in texts), name


def test_parts_with_their_own_settings_are_built_from_the_registry() -> None:
    parts = ["suffix", {"method": "ngram", "prompt_lookup_max": 7, "num_speculative_tokens": 2}]
    config = spec_from_mapping({"method": "combine", "combine_parts": parts, "combine_mode": "first"})
    assert config.num_speculative_tokens == 10
    same = spec_from_mapping({"method": "combine", "combine_parts": [parts[0], json.dumps(parts[1])]})
    assert CombineSettings(**same.options).combine_parts == CombineSettings(**config.options).combine_parts
    built = dict(registered())["combine merge"](context_for(toy_target()))
    assert [part.name for part in built.parts] == ["suffix", "ngram"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([], "combine_parts is []; allowed is a list of drafters, one at least"),
        ("ngram", "combine_parts is 'ngram'; allowed is a list"),
        (["ngarm"], "did you mean 'ngram'?"),
        ([3], "method is '3'; allowed is one of"),
        ([["ngram"]], "allowed is a drafter's name, or an object with its 'method'"),
        (["{"], "which is not valid JSON"),
        ([{"prompt_lookup_max": 3}], "an object with its 'method'"),
        ([{"method": "ngram", "prompt_lookup_mx": 3}], "did you mean 'prompt_lookup_max'?"),
        ([{"method": "ngram", "prompt_lookup_max": 0}], "prompt_lookup_max is 0"),
        ([{"method": "ngram", "rejection_sample_method": "block"}], "one for all of them"),
        (["model"], "drafter model needs the setting 'model'"),
    ],
)
def test_parts_that_cannot_be_are_refused(parts: Any, said: str) -> None:
    with pytest.raises(SettingError) as error:
        spec_from_mapping({"method": "combine", "combine_parts": parts})
    assert said in str(error.value)


def drawn(n: int) -> Propose:
    """A chain of ``n`` tokens drawn from the drafter's own law."""

    def propose(draws: Explorer, drafter: Toy, output: History) -> Draft:
        tokens: list[int] = []
        q: list[Dist | None] = []
        for _ in range(n):
            q.append(drafter(output + tuple(tokens)))
            tokens.append(draws.pick(drafter(output + tuple(tokens)), 0))
        return Draft.chain(tokens, q)

    return propose


def certain(draws: Explorer, drafter: Toy, output: History) -> Draft:
    """A certain tree, of tokens that the drawn chains often propose as well."""
    return Draft.tree([0, 1, 2], [-1, 0, -1])


def united(*proposes: Propose, budget: int, choosy: bool = False) -> Propose:
    """The drafts in one tree; a ``choosy`` one leaves out a drawn token that a certain one before it has."""

    def propose(draws: Explorer, drafter: Toy, output: History) -> Draft:
        parts = [propose(draws, drafter, output) for propose in proposes]
        if choosy and parts[1].tokens[0] in (0, 2):
            parts[1] = Draft()
        return unite(parts, _in_turns, budget)

    return propose


@pytest.mark.parametrize("method", ["standard", "block", "coupled"])
@pytest.mark.parametrize("budget", [2, 3, 5])
@pytest.mark.parametrize("parts", [(drawn(2), certain), (certain, drawn(2)), (drawn(1), drawn(1), certain)])
def test_the_law_of_a_merged_draft_is_the_targets(parts: tuple[Propose, ...], budget: int, method: str) -> None:
    """Exactly, over every outcome of what is drawn and decided; see the control below."""
    target, drafter = toy(SamplingParams(), 1, vocab_size=3), toy(SamplingParams(), 2, vocab_size=3)
    assert gap(target, drafter, united(*parts, budget=budget), method, n=2) < 1e-12


def test_leaving_out_a_drawn_token_for_its_value_would_be_seen() -> None:
    target, drafter = toy(SamplingParams(), 1, vocab_size=3), toy(SamplingParams(), 2, vocab_size=3)
    assert gap(target, drafter, united(certain, drawn(1), budget=5, choosy=True), "standard", n=2) > 1e-3


@pytest.mark.parametrize("swapped", [False, True])
def test_united_nodes_are_as_likely_as_the_surest_part_says(swapped: bool) -> None:
    drafts = [Draft.chain([1, 2]).sure([0.5, 0.4]), Draft.chain([1, 3]).sure([0.9, 0.3])]
    whole = unite(drafts[::-1] if swapped else drafts, _in_order, 4)
    assert whole.confidence is not None
    assert dict(zip(whole.tokens, whole.confidence, strict=True)) == {1: 0.9, 2: 0.4, 3: 0.3}
