"""Drafters for tests: scripted ones of known quality, and every registered one built for a toy target."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.core.config import SpecConfig
from outrider.core.dist import Dist
from outrider.core.draft import Draft
from outrider.core.errors import SettingError
from outrider.core.rng import bits, uniform
from outrider.core.types import Commit, Span
from outrider.core.types import Sequence as Seq
from outrider.models.decoder import Decoder
from outrider.models.load import LoadedModel
from outrider.spec.drafts.combine import Combine, Part
from outrider.spec.drafts.model import ModelSettings, TwoModels
from outrider.spec.draws import draft_pick_for
from outrider.spec.proposer import DraftContext, Proposer
from outrider.spec.registry import DRAFTERS, build_proposer, settings_of
from tests.engine.harness import toy_target
from tests.engine.heads import fitted_eagle, fitted_eagle3, fitted_medusa, random_adapter
from tests.tokens import two_tongues
from tests.toy import full_logits

Answers = Mapping[tuple[int, ...], Sequence[int]]
"""By prompt, the target's greedy output."""


class Scripted(Proposer):
    """Proposes a chain of certain tokens that ``continuation`` names; keeps a log of what it was asked and told."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, int]] = []  # (sequence, its length, budget)
        self.commits: list[Commit] = []
        self.released: list[int] = []

    def continuation(self, seq: Seq, n: int) -> Sequence[int]:
        raise NotImplementedError

    def propose(self, spans: Sequence[Span]) -> list[Draft]:
        self.asked += [(span.seq.id, len(span.seq), span.budget) for span in spans]
        return [Draft.chain(self.continuation(span.seq, span.budget)[: span.budget]) for span in spans]

    def observe(self, commits: Sequence[Commit]) -> None:
        self.commits += commits

    def release(self, seq_id: int) -> None:
        self.released.append(seq_id)


class Oracle(Scripted):
    """Replays given outputs: everything is accepted. Past their end it goes on with token 0."""

    def __init__(self, answers: Answers) -> None:
        super().__init__()
        self.answers = answers

    def continuation(self, seq: Seq, n: int) -> Sequence[int]:
        known = list(self.answers[tuple(seq.prompt_ids)])[seq.n_output :]
        return [*known, *[0] * n][:n]


class Wrong(Oracle):
    """Always proposes another token than the right one: everything is rejected."""

    def __init__(self, answers: Answers, vocab: int) -> None:
        super().__init__(answers)
        self.vocab = vocab

    def continuation(self, seq: Seq, n: int) -> Sequence[int]:
        return [(token + 1) % self.vocab for token in super().continuation(seq, n)]


class Script(Scripted):
    """Proposes the same tokens at every step, again and again as far as the budget goes."""

    def __init__(self, *tokens: int) -> None:
        super().__init__()
        self.tokens = tokens

    def continuation(self, seq: Seq, n: int) -> Sequence[int]:
        return (self.tokens * (n // len(self.tokens) + 1))[:n]


class Silent(Scripted):
    """Never finds anything to propose, and says why."""

    def propose(self, spans: Sequence[Span]) -> list[Draft]:
        return [Draft.nothing("nothing to say") for _ in spans]


def self_drafter(target: LoadedModel, method: str = "standard", **settings: Any) -> TwoModels:
    """A draft model with the target's own weights: as good as a drafter can be."""
    return TwoModels(target, target, method, ModelSettings(model="self", **settings))


@dataclass(frozen=True)
class Shape:
    """What a random drafter's drafts look like; tokens are drawn from q to the power ``deceit``."""

    tree: bool = False
    sampled: bool = False
    quality: float = 0.6  # certain ones: how often the right continuation is followed
    method: str = "standard"
    deceit: float = 1.0  # 1 is honest, 3 sharper than reported, 100 the likeliest token under the name of a draw
    without: bool = True  # siblings are drawn without replacement


class RandomTree(Proposer):
    """Random chains or trees, certain or sampled with an honest q; a function of seed and history only."""

    def __init__(self, vocab: int, shape: Shape, answers: Answers | None = None) -> None:
        self.vocab, self.shape, self.answers = vocab, shape, answers or {}

    def propose(self, spans: Sequence[Span]) -> list[Draft]:
        return [self._draft(span.seq, span.budget) for span in spans]

    def _draft(self, seq: Seq, budget: int) -> Draft:
        rng = random.Random(bits(seq.seed, len(seq), 77))
        pick = draft_pick_for(self.shape.method)
        right = list(self.answers.get(tuple(seq.prompt_ids), ()))[seq.n_output :]
        tokens: list[int] = []
        parents: list[int] = []
        q: list[Dist | None] = []
        paths: list[tuple[int, ...]] = []  # tokens from the root down to each node
        left: dict[int, Dist | None] = {}  # what a node's next child may be, drawn without replacement
        for node in range(budget):
            # Shapes are drawn before and apart from tokens: nothing is kept or dropped by its value.
            parent = rng.randrange(-1, node) if self.shape.tree else node - 1
            path = paths[parent] if parent >= 0 else ()
            if self.shape.sampled:
                law = left.get(parent, self._first(seq, path)) if self.shape.without else self._first(seq, path)
                if law is None:  # every token is a child already
                    break
                drawn = law if self.shape.deceit == 1 else Dist.of(law.ids, law.probs**self.shape.deceit)
                token = pick(drawn, seq.seed, len(seq), len(path) + 1, node)
                left[parent] = law.without(token)
                q.append(law)
            else:
                good = len(path) < len(right) and rng.random() < self.shape.quality
                token = right[len(path)] if good else self._guess(seq, path, parents.count(parent))
                q.append(None)
            tokens.append(token)
            parents.append(parent)
            paths.append((*path, token))
        return Draft.tree(tokens, parents, q)

    def _guess(self, seq: Seq, path: tuple[int, ...], siblings: int) -> int:
        """A certain token, by history alone: over uniformly random ones a wrong rule would average out unseen."""
        order = np.argsort(-self._first(seq, path).probs, kind="stable")
        return int(order[siblings % self.vocab])

    def _first(self, seq: Seq, path: tuple[int, ...]) -> Dist:
        """What the first child after ``path`` is drawn from: arbitrary, but fixed by the history alone."""
        return _some_law(self.vocab, (len(seq), *seq.tokens[-2:], *path))


@functools.cache
def _some_law(vocab: int, history: tuple[int, ...]) -> Dist:
    key = bits(*history)
    return Dist.dense(np.array([0.05 + uniform(key, token) ** 2 for token in range(vocab)]))


Build = Callable[[DraftContext], Proposer]


def _toy_model(seed: int, layers: int = 1, **settings: Any) -> Build:
    """A draft model of the target's vocabulary: with ``seed`` -1 it has the target's own weights."""

    def build(context: DraftContext) -> Proposer:
        shape = replace(context.target.config, n_layers=layers, eos_ids=())
        tokenizer: Any = context.target.tokenizer
        drafter = context.target if seed < 0 else toy_target(shape, seed, tokenizer=tokenizer)
        method = context.spec.rejection_sample_method
        return TwoModels(drafter, context.target, method, ModelSettings("toy", **settings))

    return build


def _toy_translated(seed: int, **settings: Any) -> Build:
    """A draft model whose tokenizer is another one than the target's, of another kind and in another order."""

    def build(context: DraftContext) -> Proposer:
        target, tokenizer = two_tongues(context.target)
        shown: Any = tokenizer
        shape = replace(target.config, n_layers=1, vocab_size=tokenizer.vocab_size + 3, eos_ids=())
        drafter = toy_target(shape, seed, tokenizer=shown)
        settled = ModelSettings("toy", use_heterogeneous_vocab=True, **settings)
        return TwoModels(drafter, target, context.spec.rejection_sample_method, settled)

    return build


def _with(name: str, **options: Any) -> Build:
    """The registered drafter ``name`` with own settings."""
    return lambda context: build_proposer(replace(context.spec, method=name, options=options), context)


class Predicted(Proposer):
    """The drafter of predictions, where every request predicts the target's own greedy answer with a few mistakes."""

    def __init__(self, inner: Proposer, target: LoadedModel) -> None:
        self.inner, self.target, self.needs = inner, target, inner.needs
        self.predictions: dict[tuple[int, ...], tuple[int, ...]] = {}

    def propose(self, spans: Sequence[Span]) -> list[Draft]:
        for span in spans:
            prompt = tuple(span.seq.prompt_ids)
            if prompt not in self.predictions:
                self.predictions[prompt] = self._predict(list(prompt))
            span.seq.spec = replace(span.seq.spec, prediction=self.predictions[prompt])
        return self.inner.propose(spans)

    def release(self, seq_id: int) -> None:
        self.inner.release(seq_id)

    def _predict(self, text: list[int]) -> tuple[int, ...]:
        n_prompt = len(text)
        for at in range(20):
            likeliest = int(full_logits(self.target.decoder, text)[-1].argmax())
            text.append(likeliest if at % 7 != 3 else (likeliest + 1) % self.target.n_tokens)
        return tuple(text[n_prompt:])


def _predicted(context: DraftContext) -> Proposer:
    return Predicted(build_proposer(replace(context.spec, method="prediction", options={}), context), context.target)


def _combined(mode: str, *builds: Build) -> Build:
    """Parts that a registered name and options cannot describe, in one."""

    def build(context: DraftContext) -> Proposer:
        return Combine([Part(f"part {i}", part(context)) for i, part in enumerate(builds)], mode)

    return build


def _medusa(**options: Any) -> Build:
    """Medusa with heads that were fitted to the target's greedy texts."""
    return lambda c: _with("medusa", model=str(fitted_medusa(c.target.decoder)), **options)(c)


def _eagle(write: Callable[[Decoder], Path], **options: Any) -> Build:
    """EAGLE with a head that was fitted to the target's greedy texts."""
    return lambda c: _with("eagle", model=str(write(c.target.decoder)), **options)(c)


def _adapted(**options: Any) -> Build:
    """Early exit after the first layer through a random adapter."""
    return lambda c: _with("self", exit_layer=1, exit_adapter=str(random_adapter(c.target.decoder)), **options)(c)


TOY_VARIANTS: Mapping[str, Mapping[str, Build]] = {
    "ngram": {
        "chain": _with("ngram"),
        "long": _with("ngram", prompt_lookup_min=2, prompt_lookup_max=5),
        "tree": _with("ngram", prompt_lookup_branches=3, prompt_lookup_selection="frequent"),
    },
    "suffix": {
        "chain": _with("suffix", suffix_decoding_branches=1),
        "tree": _with("suffix", suffix_decoding_max_spec_factor=8.0, suffix_decoding_min_token_prob=0.0),
        "memory": _with(
            "suffix",
            suffix_decoding_max_cached_requests=3,
            suffix_decoding_max_cached_tokens=40,
            suffix_decoding_min_token_prob=0.0,
        ),
    },
    "prediction": {"near": _predicted},
    "combine": {
        "first": _with("combine", combine_parts=["ngram", "suffix"], combine_mode="first"),
        "merge": _with("combine"),
        "extend model": _combined("extend", _toy_model(seed=5, draft_tree="1,1"), _with("suffix")),
        "merge model": _combined("merge", _with("suffix"), _toy_model(seed=5, draft_tree="2,2,1"), _toy_model(seed=6)),
    },
    "model": {
        "other": _toy_model(seed=5),
        "self": _toy_model(seed=-1),
        "other tree": _toy_model(seed=5, draft_tree="2,2,1"),
        "self tree": _toy_model(seed=-1, draft_tree="3,1,2"),
        "greedy draws": _toy_model(seed=5, draft_sample_method="greedy"),
        "translated": _toy_translated(seed=5),
        "translated tree": _toy_translated(seed=5, draft_tree="[[0],[0,0],[1],[0,0,0],[1,0],[2]]"),
    },
    "lookahead": {
        "": _with("lookahead"),
        "bigrams": _with("lookahead", lookahead_ngram=2, lookahead_window=3, lookahead_guesses=2),
        "no text": _with("lookahead", lookahead_window=2, lookahead_from_text=False),
    },
    "self": {
        "exit": _with("self", exit_layer=1),
        "skip": _with("self", skip_layers="0"),
        "exit, greedy draws": _with("self", exit_layer=1, draft_sample_method="greedy"),
        "adapter": _adapted(),
        "adapter, while sure": _adapted(draft_min_token_prob=0.3),
    },
    "medusa": {
        "likely": _medusa(),
        "choices": _medusa(medusa_choices="[[0],[1],[0,0],[0,1],[1,0],[0,0,0],[0,1,0]]"),
    },
    "eagle": {
        "chain": _eagle(fitted_eagle),
        "tree": _eagle(fitted_eagle, eagle_topk=3, eagle_depth=4),
        "third": _eagle(fitted_eagle3),
        "third tree": _eagle(fitted_eagle3, eagle_topk=2, eagle_depth=5),
    },
}
"""Drafters whose toy build needs options, or that deserve several. Any other one is built with its defaults."""


def registered() -> Iterator[tuple[str, Build]]:
    """Every drafter of the registry, by name, ready to be built for a toy target."""
    for name in DRAFTERS:
        for variant, build in TOY_VARIANTS.get(name, {"": _defaults(name)}).items():
            yield f"{name} {variant}".strip(), build


def _defaults(name: str) -> Build:
    def build(context: DraftContext) -> Proposer:
        try:
            settings_of(replace(context.spec, method=name, options={}))
        except SettingError as error:
            pytest.fail(f"{error}: add toy options for it to TOY_VARIANTS in tests/engine/drafters.py")
        return build_proposer(replace(context.spec, method=name, options={}), context)

    return build


def scripted(answers: Answers, vocab: int) -> Iterator[tuple[str, Build]]:
    """The scripted drafters by name, for prompts with known greedy answers."""
    yield "oracle", lambda context: Oracle(answers)
    yield "wrong", lambda context: Wrong(answers, vocab)
    yield "script", lambda context: Script(3, 1, 4)
    yield "silent", lambda context: Silent()
    for tree in (False, True):
        for sampled in (False, True):
            shape = Shape(tree=tree, sampled=sampled)
            yield f"random {shape.tree=} {shape.sampled=}", _random(vocab, shape, answers)


def _random(vocab: int, shape: Shape, answers: Answers) -> Build:
    return lambda context: RandomTree(vocab, replace(shape, method=context.spec.rejection_sample_method), answers)


def context_for(target: LoadedModel, gamma: int = 4, method: str = "standard") -> DraftContext:
    """What drafters are built from."""
    return DraftContext(target, SpecConfig(num_speculative_tokens=gamma, rejection_sample_method=method))
