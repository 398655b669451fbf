"""What a request may ask for, and how it is refused."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from typing import Any

import pytest

from outrider.core.errors import OutriderError, SettingError
from outrider.core.params import SamplingParams, SpecParams

REFUSED: list[tuple[str, Any]] = [
    *[("temperature", x) for x in (-0.1, math.nan, math.inf, "1", True, None)],
    *[("top_p", x) for x in (0, -0.5, 1.01, math.nan, "x")],
    *[("top_k", x) for x in (-1, 1.5, True, "3")],
    *[("min_p", x) for x in (-0.1, 1.1, math.nan)],
    *[("repetition_penalty", x) for x in (0, -1, math.inf)],
    *[("presence_penalty", x) for x in (-2.1, 2.1, math.nan)],
    *[("frequency_penalty", x) for x in (-2.1, 2.1, "1")],
    *[("logit_bias", x) for x in ({-1: 1.0}, {"1": 1.0}, {1.0: 1.0}, {True: 1.0})],
    *[("logit_bias[1]", {1: x}) for x in (math.nan, math.inf, "x")],
    *[("allowed_token_ids", x) for x in ((), (-1,), (1.5,), ("a",))],
    *[("banned_token_ids", x) for x in ((-1,), (True,))],
    ("stop_token_ids", (-3,)),
    ("processors", ("no function",)),
    *[("seed", x) for x in (-1, 2**63, 1.0, True)],
    *[("n", x) for x in (0, 129, 1.5)],
    *[("max_tokens", x) for x in (0, -1, 2.5)],
    *[("min_tokens", x) for x in (-1, 257)],
    *[("stop", x) for x in (("",), "", (3,))],
    *[("logprobs", x) for x in (-1, 101, 1.5, True)],
]


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_refused_by_name_in_one_sentence(name: str, value: Any) -> None:
    with pytest.raises(SettingError) as caught:
        SamplingParams(**{name.split("[")[0]: value})
    message = str(caught.value)
    assert message.startswith(f"{name} is ")
    assert "; allowed is " in message
    assert "\n" not in message
    assert isinstance(caught.value, OutriderError)


ACCEPTED: list[tuple[str, Any]] = [
    *[("temperature", x) for x in (0, 1e-6, 100)],
    *[("top_p", x) for x in (1e-9, 1)],
    *[("top_k", x) for x in (0, 10**6)],
    *[("min_p", x) for x in (0, 1)],
    *[("presence_penalty", x) for x in (-2, 2)],
    ("logit_bias", {0: -math.inf, 5: -100}),
    *[("seed", x) for x in (None, 0, 2**63 - 1)],
    *[("n", x) for x in (1, 128)],
    ("min_tokens", 256),
    *[("logprobs", x) for x in (None, 0, 100)],
]


@pytest.mark.parametrize(("name", "value"), ACCEPTED)
def test_the_edges_of_what_is_allowed(name: str, value: Any) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


def test_lists_become_tuples_and_a_request_cannot_be_changed_from_outside() -> None:
    bias = {1: 2.0}
    params = SamplingParams(stop="x", stop_token_ids=[1], allowed_token_ids=[1, 2], logit_bias=bias)  # type: ignore[arg-type]
    bias[1] = 9.0
    assert (params.stop, params.stop_token_ids, params.allowed_token_ids) == (("x",), (1,), (1, 2))
    assert params.logit_bias == {1: 2.0}


def test_params_can_be_copied_pickled_and_listed() -> None:
    params = SamplingParams(logit_bias={1: 2.0}, stop=("x",), seed=3)
    assert copy.deepcopy(params) == pickle.loads(pickle.dumps(params)) == params
    assert dataclasses.asdict(params)["logit_bias"] == {1: 2.0}
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("field", "value"),
    [("stop_token_ids", 5), ("logit_bias", None), ("stop", 7), ("ignore_eos", 1), ("skip_special_tokens", "yes")],
)
def test_a_value_of_the_wrong_kind_is_refused(field: str, value: object) -> None:
    with pytest.raises(SettingError, match=f"{field} is {value!r}"):
        SamplingParams(**{field: value})


def test_only_rules_before_temperature_shape_logits() -> None:
    for plain in (
        SamplingParams(),
        SamplingParams(temperature=0.5, top_k=3, top_p=0.5, min_p=0.1, stop="x", logprobs=3),
    ):
        assert not plain.shapes_logits
    for name, value in (
        ("logit_bias", {1: 1.0}),
        ("allowed_token_ids", (1,)),
        ("banned_token_ids", (1,)),
        ("processors", (lambda p, o, z: z,)),
        ("min_tokens", 1),
        ("presence_penalty", 0.1),
        ("frequency_penalty", -0.1),
        ("repetition_penalty", 1.1),
    ):
        assert SamplingParams(**{name: value}).shapes_logits
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams(temperature=1e-6).greedy


def test_every_named_token_id_is_listed_by_setting() -> None:
    params = SamplingParams(logit_bias={1: 1.0}, allowed_token_ids=(2,), banned_token_ids=(3,), stop_token_ids=(4,))
    assert params.token_ids() == {
        "logit_bias": (1,),
        "allowed_token_ids": (2,),
        "banned_token_ids": (3,),
        "stop_token_ids": (4,),
    }


@pytest.mark.parametrize("bad", [{"enabled": 1}, {"max_draft": -1}, {"max_draft": 1.5}, {"max_draft": True}])
def test_speculation_settings_are_refused_by_name(bad: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match=f"^{next(iter(bad))} is .*; allowed is "):
        SpecParams(**bad)
    assert SpecParams(max_draft=0).max_draft == 0
