"""Draft quality: acceptance by position is that of a short plain loop for each method, with the same weights.

A drafter that proposes what stands one position late is the control: it must be told apart.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outrider.core.config import EngineConfig
from outrider.core.draft import Draft
from outrider.core.params import SamplingParams, SpecParams
from outrider.core.rng import choice_seed
from outrider.core.types import Sequence as Seq
from outrider.core.types import Span
from outrider.engine.answer import SpecStats
from outrider.engine.engine import Engine
from outrider.engine.llm import build_engine
from outrider.engine.request import RequestOutput
from outrider.models.decoder import Decoder
from outrider.models.load import LoadedModel, load_model
from outrider.ops.reference import ReferenceOps
from outrider.runtime.batch import build_batch
from outrider.runtime.runner import Runner
from outrider.spec.drafts.model import ModelSettings, TwoModels
from outrider.spec.proposer import DraftContext, Proposer
from outrider.spec.registry import build_proposer, spec_from_mapping
from tests.engine.harness import make_engine, prompt_of
from tests.engine.heads import fitted_eagle, fitted_eagle3, fitted_medusa, random_adapter
from tests.spec import plain_loops as plain
from tests.spec.plain_loops import Loop
from tests.toy import MemorySource, toy_config

PROMPTS = 20
TOKENS = 10
"""Of each answer; the engine is then told to stop, so that no draft is cut short by a near end."""
CLOSE = 0.02
EQUAL = 0.005
"""Where both sides compute in 64 bits; it leaves room for one near tie."""


def soft_model(noise: float = 0.0) -> LoadedModel:
    """A toy whose layers but the first add little, so that it can be guessed; with ``noise`` a model much like it."""
    config = toy_config(layers=3)
    source = MemorySource(config, seed=1)
    generator = torch.Generator().manual_seed(9)
    for name, tensor in source.tensors.items():
        if ("o_proj" in name or "down_proj" in name) and "layers.0." not in name:
            tensor *= 0.35
        tensor += noise * tensor.std() * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
    decoder = Decoder.from_source(source, ReferenceOps(), torch.float64, "cpu")
    return LoadedModel("soft", config, decoder, None, None, decoder.weight_bytes)


TARGET = soft_model()
D = TARGET.decoder
DRAFTER = soft_model(noise=0.1)


@functools.cache
def prompts() -> list[list[int]]:
    return [prompt_of(6, seed) for seed in range(PROMPTS)]


def params(number: int, tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, seed=number, ignore_eos=True)


@functools.cache
def answers() -> list[list[int]]:
    """What the target says, with what it would say next: more than any draft needs."""
    engine = make_engine(TARGET, num_kv_blocks=400)
    requests = [engine.add_request(prompt, params(0, TOKENS + 16)) for prompt in prompts()]
    while engine.has_work:
        engine.step()
    return [list(RequestOutput.of(request).token_ids) for request in requests]


def predictions() -> list[list[int]]:
    """The answers with every fifth token wrong, and here and there one missing."""
    wrong = [[(t + 1) % 32 if i % 5 == 3 else t for i, t in enumerate(answer)] for answer in answers()]
    return [[t for i, t in enumerate(answer) if i % 11 != 6] for answer in wrong]


def measured(
    engine: Engine, prompts: Sequence[list[int]], gamma: int, tokens: int, specs: Sequence[SpecParams] | None = None
) -> list[float]:
    """By depth, how often the engine's drafts are right over the first ``tokens`` of each answer."""
    each = specs or [SpecParams()] * len(prompts)
    requests = [
        engine.add_request(prompt, params(i, tokens + gamma + 2), spec)
        for i, (prompt, spec) in enumerate(zip(prompts, each, strict=True))
    ]
    while engine.has_work:
        engine.step()
        for request in requests:
            if request.answers[0].seq.n_output >= tokens:
                engine.abort(request.id)
    stats = SpecStats.total(RequestOutput.of(request).stats for request in requests)
    counts = stats.accepted_per_position + [0] * gamma
    return [count / stats.drafts for count in counts[:gamma]]


class Late(Proposer):
    """Another drafter's drafts without their first token: what should stand one position later."""

    def __init__(self, inner: Proposer) -> None:
        self.inner, self.needs = inner, inner.needs
        for name in ("start", "share_kv", "copy_blocks", "observe", "release"):
            setattr(self, name, getattr(inner, name))

    def propose(self, spans: Sequence[Span]) -> list[Draft]:
        return [self._late(draft) for draft in self.inner.propose(spans)]

    def _late(self, draft: Draft) -> Draft:
        paths = [[draft.tokens[i] for i in draft.path(node)][1:] for node in range(draft.n_verify)]
        return Draft.branches(paths, len(draft))


@dataclass(frozen=True)
class Method:
    """One way to draft: its settings in the engine (or how it is built), and the plain loop for prompt and number."""

    loop: Callable[[list[int], int], Loop]
    settings: Mapping[str, Any]
    gamma: int = 3
    build: Callable[[DraftContext], Proposer] | None = None
    first_step: bool = True  # whether it has a draft in the step that reads the prompt
    predicts: bool = False

    def proposer(self) -> Proposer:
        spec = spec_from_mapping({**self.settings, "num_speculative_tokens": self.gamma})
        context = DraftContext(TARGET, spec)
        return build_proposer(spec, context) if self.build is None else self.build(context)

    def plain(self) -> list[float]:
        def make(prompt: list[int], number: int) -> Loop:
            loop = self.loop(prompt, number)
            return loop if self.first_step else lambda text, n: () if len(text) == len(prompt) else loop(text, n)

        return plain.acceptance(make, prompts(), answers(), self.gamma, TOKENS)

    def engine(self, late: bool = False) -> list[float]:
        proposer = Late(self.proposer()) if late else self.proposer()
        engine = make_engine(TARGET, proposer, gamma=self.gamma, num_kv_blocks=400)
        specs = [SpecParams(prediction=tuple(p)) for p in predictions()] if self.predicts else None
        return measured(engine, prompts(), self.gamma, TOKENS, specs)


def head(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def medusa_method() -> Method:
    folder = fitted_medusa(D)
    settings = {"method": "medusa", "model": str(folder), "medusa_choices": [[0], [0, 0], [0, 0, 0]]}
    return Method(lambda prompt, i: plain.medusa(D, head(folder)[1]), settings, first_step=False)


def eagle_method(folder: Path) -> Method:
    settings = {"method": "eagle", "model": str(folder)}
    return Method(lambda prompt, i: plain.eagle(D, *head(folder)), settings, first_step=False)


def adapter_method(least: float = 0.0) -> Method:
    folder = random_adapter(D)
    settings = {"method": "self", "exit_layer": 1, "exit_adapter": str(folder), "draft_min_token_prob": least}
    return Method(lambda prompt, i: plain.adapted_exit(D, *head(folder), 1, least), settings, first_step=False)


def model_method() -> Method:
    return Method(
        lambda prompt, i: plain.model(DRAFTER.decoder),
        {"method": "model", "model": "toy"},
        build=lambda context: TwoModels(DRAFTER, TARGET, "standard", ModelSettings("toy")),
    )


METHODS: Mapping[str, Callable[[], Method]] = {
    "ngram": lambda: Method(lambda prompt, i: plain.ngram(), {"method": "ngram"}),
    "suffix": lambda: Method(lambda prompt, i: plain.suffix(), {"method": "suffix"}, gamma=8),
    "suffix chain": lambda: Method(
        lambda prompt, i: plain.suffix(branches=1, least=0.1),
        {"method": "suffix", "suffix_decoding_branches": 1, "suffix_decoding_min_token_prob": 0.1},
        gamma=5,
    ),
    "prediction": lambda: Method(
        lambda prompt, i: plain.prediction(len(prompt), predictions()[i]), {"method": "prediction"}, predicts=True
    ),
    "model": model_method,
    "self exit": lambda: Method(
        lambda prompt, i: plain.self_draft(D, (1, 2)), {"method": "self", "exit_layer": 1}, first_step=False
    ),
    "self skip": lambda: Method(
        lambda prompt, i: plain.self_draft(D, (1,)), {"method": "self", "skip_layers": "1"}, first_step=False
    ),
    "self adapter": adapter_method,
    "self adapter, while sure": lambda: adapter_method(0.6),
    "lookahead": lambda: Method(
        lambda prompt, i: plain.lookahead(D, choice_seed(i, 0)), {"method": "lookahead"}, gamma=15
    ),
    "medusa": medusa_method,
    "eagle": lambda: eagle_method(fitted_eagle(D)),
    "eagle-3": lambda: eagle_method(fitted_eagle3(D)),
}


@functools.cache
def both(name: str) -> tuple[Method, list[float]]:
    method = METHODS[name]()
    return method, method.plain()


@pytest.mark.parametrize("name", METHODS)
def test_acceptance_is_that_of_a_plain_loop(name: str) -> None:
    method, wanted = both(name)
    assert method.engine() == pytest.approx(wanted, abs=EQUAL)
    assert 0.05 < wanted[0] < 0.95
    assert wanted[1] > 0.02


@pytest.mark.parametrize("name", METHODS)
def test_a_drafter_that_is_one_position_late_is_found_out(name: str) -> None:
    method, wanted = both(name)
    assert method.engine(late=True) != pytest.approx(wanted, abs=EQUAL)


SENTENCES = (
    "The early bird catches the worm.",
    "Rain fell on the harbour all night, and the boats stayed in.",
    "My sister keeps bees behind the old mill.",
    "The train to Lyon leaves at ten past six.",
    "Nobody had seen the key since Tuesday.",
)
ASKED = (
    "Write this sentence three times: {}",
    "Correct the spelling: {}",
    "Make a list of the words in this sentence: {}",
    "{} What happened next? Use the same words.",
)


@pytest.fixture(scope="module")
def real(smollm2_path: Path) -> tuple[LoadedModel, list[list[int]], list[list[int]]]:
    """The default model, 20 prompts, and what it says to them."""
    target = load_model(str(smollm2_path), device="cpu")
    assert target.tokenizer is not None
    assert target.chat_template is not None
    chats = [target.chat_template.render([{"role": "user", "content": a.format(s)}]) for a in ASKED for s in SENTENCES]
    asked = [target.tokenizer.encode(chat, add_bos=False) for chat in chats]
    engine = real_engine(target, {"method": "none"})
    requests = [engine.add_request(prompt, params(0, TOKENS + 16)) for prompt in asked]
    while engine.has_work:
        engine.step()
    return target, asked, [list(RequestOutput.of(request).token_ids) for request in requests]


def real_engine(target: LoadedModel, settings: Mapping[str, Any]) -> Engine:
    """One that reads all prompts in its first step, with rows left for a draft to each."""
    config = EngineConfig("smollm2", kv_cache_mib=128, max_num_seqs=PROMPTS, max_num_batched_tokens=2048)
    return build_engine(target, config, spec_from_mapping(settings))


def cached_self_draft(target: LoadedModel, layers: Sequence[int]) -> Loop:
    """``plain.self_draft`` with the KV of one full pass over the text, and a row a draft token behind it."""
    short = target.decoder.with_layers(layers)

    def loop(text: list[int], n: int) -> plain.Paths:
        tokens, size = list(text), len(text) + n
        seq = Seq(0, tokens, size, SamplingParams(), SpecParams(), 0, blocks=[0])
        runner = Runner(target.decoder, 1, size)
        runner.forward([Span(seq, 0, len(text) - 1)])
        stacks = short.stacks([runner.pool.layers[layer] for layer in layers])
        for at in range(len(text) - 1, size - 1):
            rows = short.run(build_batch([Span(seq, at, 1)], size), stacks).logits
            tokens.append(int(rows[-1].argmax()))
        return plain.chain(tokens[len(text) :])

    return loop


REAL: Mapping[str, tuple[Mapping[str, Any], Callable[[LoadedModel], Loop]]] = {
    "ngram": ({"method": "ngram"}, lambda target: plain.ngram()),
    "suffix": ({"method": "suffix"}, lambda target: plain.suffix()),
    "self": (
        {"method": "self", "skip_layers": "12,14"},
        lambda target: cached_self_draft(target, [i for i in range(30) if i not in (12, 14)]),
    ),
}


@pytest.mark.model
@pytest.mark.parametrize("name", REAL)
def test_the_same_on_the_default_model(name: str, real: tuple[LoadedModel, list[list[int]], list[list[int]]]) -> None:
    target, asked, said = real
    settings, loop = REAL[name]
    gamma = spec_from_mapping(settings).num_speculative_tokens

    def make(prompt: list[int], number: int) -> Loop:
        own = loop(target)
        return (lambda text, n: () if len(text) == len(prompt) else own(text, n)) if name == "self" else own

    tokens = 4 if name == "self" else TOKENS  # its plain loop reads the whole text at each step
    wanted = plain.acceptance(make, asked, said, gamma, tokens)
    got = measured(real_engine(target, settings), asked, gamma, tokens)
    assert got == pytest.approx(wanted, abs=CLOSE)
    assert 0.05 < wanted[0] < 0.95
