"""Which layers of a model to skip while it drafts for itself: a search by what a step yields and what drafting costs.

After Zhang et al., "Draft & Verify", 2024, with a simpler search: each layer alone, then the most dispensable ones
together, then random exchanges. Drafting runs with the real engine, so that what counts is what is accepted.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from outrider.core.config import EngineConfig, SpecConfig
from outrider.core.errors import SettingError
from outrider.core.params import SamplingParams
from outrider.engine.engine import Engine
from outrider.engine.request import RequestOutput
from outrider.models.decoder import Decoder
from outrider.models.load import LoadedModel
from outrider.spec.proposer import DraftContext
from outrider.spec.registry import build_proposer

Measure = Callable[[frozenset[int]], "Trial"]


@dataclass(frozen=True)
class Trial:
    """What skipping some layers gave: ``speedup`` is the expected one, with the best draft length up to the asked one.

    ``draft_cost`` is a draft pass in passes of the whole model.
    """

    skip_layers: str
    num_speculative_tokens: int
    tokens_per_step: float
    draft_cost: float
    speedup: float


def shown(layers: frozenset[int]) -> str:
    """The layers as the drafter's setting takes them."""
    return ",".join(map(str, sorted(layers)))


def search(n_layers: int, trials: int, seed: int, measure: Measure) -> Iterator[Trial]:
    """Up to ``trials`` different sets, each measured once; first and last layer are always kept.

    The same ``seed`` and measurements give the same sets in the same order, so that a search can be taken up again.
    """
    rng = random.Random(seed)
    known: dict[frozenset[int], Trial] = {}
    best: frozenset[int] = frozenset()

    def fresh(layers: frozenset[int]) -> bool:
        return bool(layers) and layers not in known and len(known) < trials

    def run(layers: frozenset[int]) -> Trial:
        nonlocal best
        known[layers] = trial = measure(layers)
        if not best or trial.speedup > known[best].speedup:
            best = layers
        return trial

    candidates = range(1, n_layers - 1)
    for layer in candidates:
        if fresh(frozenset((layer,))):
            yield run(frozenset((layer,)))
    ranked = sorted((s for s in known if len(s) == 1), key=lambda s: (-known[s].tokens_per_step, sorted(s)))
    together = frozenset[int]()
    for single in ranked[: n_layers // 2]:
        together |= single
        if fresh(together):
            yield run(together)
    for _ in range(100 * trials):  # a small model may have too few sets to fill the trials
        layers = best ^ frozenset(rng.sample(candidates, rng.choice((1, 2))) if len(candidates) > 1 else candidates)
        if fresh(layers):
            yield run(layers)


def draft_cost(decoder: Decoder, skipped: int) -> float:
    """A draft pass in passes of the whole model, by the weights that are read."""
    view = decoder.with_layers(range(len(decoder.layers) - skipped))
    apart = 0 if decoder.head is decoder.embedding else decoder.embedding.nbytes  # a pass reads few rows of it
    return (view.weight_bytes - apart) / (decoder.weight_bytes - apart)


def expected_speedup(gains: Sequence[float], cost: float) -> tuple[float, int]:
    """The best speed-up over draft lengths, and that length; ``gains`` are the accepted tokens a step by depth."""
    return max(((1 + sum(gains[:n])) / (1 + n * cost), n) for n in range(1, len(gains) + 1))


def measure_on(
    target: LoadedModel, config: EngineConfig, spec: SpecConfig, prompts: Sequence[Sequence[int]], max_tokens: int
) -> Measure:
    """Measures by answering ``prompts`` greedily, with the drafter and draft length of ``spec``."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    engine = Engine(target, config, {}, spec)  # one for all sets, so that its prefix cache spares reading the prompts

    def measure(layers: frozenset[int]) -> Trial:
        with_layers = replace(spec, options={**spec.options, "skip_layers": shown(layers)})
        engine.put_drafter(spec.method, build_proposer(with_layers, DraftContext(target, with_layers)))
        requests = [engine.add_request(prompt, params) for prompt in prompts]
        while engine.has_work:
            engine.step()
        stats = [RequestOutput.of(request).stats for request in requests]
        steps = max(1, sum(s.steps for s in stats))
        gains = [
            sum(s.accepted_per_position[depth] for s in stats if depth < len(s.accepted_per_position)) / steps
            for depth in range(spec.num_speculative_tokens)
        ]
        cost = draft_cost(target.decoder, len(layers))
        speedup, length = expected_speedup(gains, cost)
        return Trial(shown(layers), length, round(1 + sum(gains[:length]), 4), round(cost, 4), round(speedup, 4))

    return measure


def remembered(measure: Measure, trials: Sequence[Trial]) -> Measure:
    """The same, without measuring again what ``trials`` hold."""
    known = {trial.skip_layers: trial for trial in trials}
    return lambda layers: known.get(shown(layers)) or measure(layers)


def write(file: Path, asked: Mapping[str, Any], trials: Sequence[Trial]) -> None:
    """The result file: what was asked, the best set (which the drafter's setting reads) and all trials."""
    best = max(trials, key=lambda trial: trial.speedup)
    result = {"asked": asked, **asdict(best), "trials": [asdict(trial) for trial in trials]}
    part = file.with_name(file.name + ".part")
    part.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    os.replace(part, file)


def read(file: Path, asked: Mapping[str, Any]) -> list[Trial]:
    """The trials of a result file of the same search. Raises SettingError for another one, or another file."""
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
        trials = [Trial(**trial) for trial in result["trials"]]
        before = dict(result["asked"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise SettingError(f"{file} is no result file of this search: {error}") from None
    changed = [key for key in asked if before.get(key) != asked[key]]
    if changed:
        key = changed[0]
        raise SettingError(f"{file} was made with {key} {before.get(key)!r}, not {asked[key]!r}: give another file")
    return trials
