"""The controller that decides the draft lengths, in the engine: outputs are plain decoding's while its mind changes."""

from __future__ import annotations

import functools
import itertools

import pytest

from outrider.core.config import EngineConfig, SpecConfig
from outrider.core.errors import SettingError
from outrider.core.params import SpecParams
from outrider.engine.llm import build_engine, spec_of
from outrider.engine.request import RequestOutput
from outrider.spec.auto import AGED, AutoLength
from outrider.spec.controller import FixedLength
from outrider.spec.costs import REDRAWN, Costs, Line
from outrider.spec.registry import spec_from_mapping
from outrider.spec.survival import Survival
from tests.engine.drafters import context_for, registered
from tests.engine.harness import assert_same, finish, greedy, make_engine, plain, prompt_of, run_all, toy_target
from tests.spec.simulator import cpu_pass, table_of

TARGET = toy_target(seed=1)
PROMPTS = [[7, 3, 9, 7, 3, 9, 7, 3], [4] * 9, prompt_of(13), [11], [7, 3, 9, 7, 3, 9, 7, 2, 5, 2]]
PARAMS = greedy(24)


@functools.cache
def reference() -> tuple[RequestOutput, ...]:
    return tuple(plain(TARGET, prompt, PARAMS) for prompt in PROMPTS)


class Restless(AutoLength):
    """Believes in other costs and other luck every few steps, so that lengths vary and drafts are cut and refused."""

    def __init__(self) -> None:
        super().__init__(Costs(table_of(cpu_pass)), on_change=lambda line: None)
        self.lengths: set[int] = set()
        self._turn = itertools.cycle((0.2, 1.0, 5.0))

    def budgets(self, spans, rows):  # type: ignore[no-untyped-def]
        self.costs.corrections[1:] = [next(self._turn)] * (len(self.costs.corrections) - 1)
        self.costs._age, self.costs.speed = REDRAWN, 1.0
        for drafter in self._learner.drafters.values():
            drafter.cost = Line(100)  # it costs nothing: a busy machine must not stop it
        for request in self._learner.requests.values():
            request.survival = Survival(memory=100, pull=4)  # nor what came of its drafts
        self._age = AGED
        self._learner.token_seconds = 1.0
        lengths = super().budgets(spans, rows)
        self.lengths |= set(lengths)
        return lengths

    def trim(self, spans):  # type: ignore[no-untyped-def]
        return [rows - (rows + i) % 3 % (rows + 1) for i, rows in enumerate(super().trim(spans))]


@pytest.mark.parametrize("name", list(dict(registered())))
def test_every_drafter_gives_the_plain_output_while_the_controller_changes_its_mind(name: str) -> None:
    controller = Restless()
    build = dict(registered())[name]
    engine = make_engine(TARGET, build(context_for(TARGET, 8, "standard")), controller=controller, num_kv_blocks=48)
    for _ in range(2):
        for mine, theirs in zip(run_all(engine, [(p, PARAMS) for p in PROMPTS]), reference(), strict=True):
            assert_same(mine, theirs, name)
    assert name == "none" or len(controller.lengths) > 2, "the lengths did not vary"


def test_the_controller_picks_the_drafter_and_knows_each_request_by_it() -> None:
    builds = dict(registered())
    looking_up = [name for name in builds if name.startswith(("ngram", "suffix"))]
    names = ["none", looking_up[0], looking_up[-1]]
    controller = AutoLength(Costs(table_of(cpu_pass)), on_change=lambda line: None)
    engine = make_engine(
        TARGET, {name: builds[name](context_for(TARGET, 8, "standard")) for name in names}, controller=controller
    )
    used = set()
    for prompt, want in [*zip(PROMPTS, reference(), strict=True)] * 4:
        request = engine.add_request(prompt, PARAMS)
        finish(engine)
        assert_same(RequestOutput.of(request), want)
        used.add(request.drafter)
    assert used == set(names), "each is tried"
    assert engine.add_request(PROMPTS[0], PARAMS, SpecParams(drafter=names[2])).drafter == names[2]
    assert engine.add_request(PROMPTS[0], PARAMS, SpecParams(enabled=False)).sequences[0].max_draft == 0
    finish(engine)
    assert controller.status.drafter in names


def test_the_setting_decides_who_decides(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    config = EngineConfig("toy", block_size=4, num_kv_blocks=64)

    def engine_with(**values: object):  # type: ignore[no-untyped-def]
        return build_engine(TARGET, config, spec_from_mapping({"method": "ngram", **values}))

    automatic = engine_with(speculation="auto")
    assert isinstance(automatic.controller, AutoLength)
    assert automatic.controller.longest == 32
    assert engine_with(speculation="auto", num_speculative_tokens=6).controller.longest == 6
    assert_same(run_all(automatic, [(PROMPTS[0], PARAMS)])[0], reference()[0])
    for values, gamma in (({}, 8), ({"speculation": "fixed:7"}, 7), ({"speculation": "off"}, 0)):
        controller = engine_with(**values).controller
        assert isinstance(controller, FixedLength)
        assert controller.gamma == gamma
    off = engine_with(speculation="off")
    assert run_all(off, [(PROMPTS[0], PARAMS)])[0].stats.drafted == 0
    assert not off.controller.status.on
    assert spec_of(SpecConfig(speculation="auto")).num_speculative_tokens == 32
    assert spec_of(SpecConfig(speculation="auto", num_speculative_tokens=5)).num_speculative_tokens == 5


@pytest.mark.parametrize("given", ["sometimes", "fixed:", "fixed:-1", "fixed:9999", "auto:3", "FIXED"])
def test_an_unknown_way_to_speculate_is_an_error(given: str) -> None:
    with pytest.raises(SettingError, match=r"speculation is .*allowed is auto, off, fixed, or fixed:K"):
        spec_from_mapping({"speculation": given})


def test_two_draft_lengths_are_one_too_many() -> None:
    with pytest.raises(SettingError, match=r"speculation is 'fixed:5', but num_speculative_tokens is 3; give one"):
        spec_from_mapping({"speculation": "fixed:5", "num_speculative_tokens": 3})
    assert spec_from_mapping({"speculation": "fixed:5", "num_speculative_tokens": 5}).num_speculative_tokens == 5
