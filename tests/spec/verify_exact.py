"""Exact laws: every outcome of every random decision of drafter and verifier, with its exact weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from outrider.core.dist import Dist
from outrider.core.draft import Draft
from outrider.core.params import SamplingParams
from outrider.sampling.sampler import Sampler
from outrider.spec.verify import verify

T = TypeVar("T")
History = tuple[int, ...]
Law = dict[History, float]


@dataclass
class Explorer:
    """The ``Draws`` of one run: replays ``script`` and, beyond it, takes the first outcome that has mass."""

    script: list[tuple[int, list[tuple[int, float]]]]
    weight: float = 1.0
    _next: int = 0

    def choose(self, weights: Sequence[float]) -> int:
        if self._next == len(self.script):
            self.script.append((0, [(i, float(w)) for i, w in enumerate(weights) if w > 0.0]))
        at, options = self.script[self._next]
        self._next += 1
        self.weight *= options[at][1]
        return options[at][0]

    def accept(self, prob: float, depth: int, index: int) -> bool:
        prob = min(max(prob, 0.0), 1.0)
        return self.choose([prob, 1.0 - prob]) == 0

    def pick(self, dist: Dist, depth: int) -> int:
        return int(dist.ids[self.choose(dist.probs.tolist())])


def outcomes(run: Callable[[Explorer], T]) -> Iterator[tuple[float, T]]:
    """Every outcome of ``run`` with its weight, depth first."""
    script: list[tuple[int, list[tuple[int, float]]]] = []
    while True:
        explorer = Explorer(script)
        value = run(explorer)
        yield explorer.weight, value
        while script and script[-1][0] + 1 == len(script[-1][1]):
            script.pop()
        if not script:
            return
        script[-1] = (script[-1][0] + 1, script[-1][1])


@dataclass
class Toy:
    """A language model over V tokens whose logits depend on the whole history."""

    sampler: Sampler
    seed: int
    prompt: History = (1, 0)
    scale: float = 1.2
    _known: dict[History, Dist] = field(default_factory=dict)

    def logits(self, output: History) -> np.ndarray:
        rng = np.random.default_rng([self.seed, *self.prompt, 99, *output])
        return rng.normal(size=self.sampler.vocab_size) * self.scale

    def __call__(self, output: History) -> Dist:
        if output not in self._known:
            self._known[output] = self.sampler.dist(self.logits(output), self.prompt, output)
        return self._known[output]


def toy(params: SamplingParams, seed: int, vocab_size: int = 4, scale: float = 1.2) -> Toy:
    return Toy(Sampler(params, vocab_size, (0,)), seed, scale=scale)


Propose = Callable[[Explorer, Toy, History], Draft]
"""(draws, drafter's model, output so far) -> draft."""


@dataclass(frozen=True)
class Rows(Sequence[Dist]):
    """The target's distributions at the nodes of ``draft``, looked up when asked for."""

    target: Toy
    draft: Draft
    output: History

    def __len__(self) -> int:
        return 1 + len(self.draft)

    def __getitem__(self, row: int) -> Dist:  # type: ignore[override]
        return self.target(self.output + tuple(self.draft.tokens[i] for i in self.draft.path(row - 1)))


def step_law(target: Toy, drafter: Toy, propose: Propose, method: str, output: History) -> Law:
    """The law of the tokens that one step emits after ``output``."""

    def run(explorer: Explorer) -> History:
        draft = propose(explorer, drafter, output)
        verdict = verify(draft, Rows(target, draft, output), explorer, method)
        assert all(node < draft.n_verify for node in verdict.path)
        return (*(draft.tokens[node] for node in verdict.path), verdict.next_token)

    law: Law = {}
    for weight, emitted in outcomes(run):
        law[emitted] = law.get(emitted, 0.0) + weight
    return law


def speculative_law(target: Toy, drafter: Toy, propose: Propose, method: str, n: int = 3) -> Law:
    """The law of the first ``n`` tokens over as many steps as they take."""
    law: Law = {}
    open_laws: Law = {(): 1.0}
    while open_laws:
        output = min(open_laws, key=len)  # shortest first, so that what leads to one output is summed before its step
        reached = open_laws.pop(output)
        for emitted, weight in step_law(target, drafter, propose, method, output).items():
            now = (output + emitted)[:n]
            table = law if len(now) == n else open_laws
            table[now] = table.get(now, 0.0) + reached * weight
    return law


def target_law(target: Toy, n: int = 3) -> Law:
    """The law of ``n`` tokens of plain decoding."""
    law: Law = {(): 1.0}
    for _ in range(n):
        law = {
            (*output, int(token)): weight * float(prob)
            for output, weight in law.items()
            for token, prob in zip(target(output).ids, target(output).probs, strict=True)
        }
    return law


def gap(target: Toy, drafter: Toy, propose: Propose, method: str, n: int = 3) -> float:
    """The greatest difference between the probabilities of ``n`` tokens with speculation and without."""
    ours, theirs = speculative_law(target, drafter, propose, method, n), target_law(target, n)
    return max(abs(ours.get(key, 0.0) - theirs.get(key, 0.0)) for key in ours.keys() | theirs.keys())
