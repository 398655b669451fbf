"""How speculation settings are read: names from other engines, refusals, and the sentences that go with them."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from outrider.core.config import MAX_AUTO_DRAFT, SpecConfig
from outrider.core.errors import SettingError
from outrider.spec.drafts.ngram import Ngram, NgramSettings
from outrider.spec.drafts.none import NoDraft
from outrider.spec.proposer import DraftContext
from outrider.spec.registry import DRAFTERS, build_proposer, kind_of, settings_of, spec_from_json, spec_from_mapping
from tests.engine.harness import toy_target

# Every key that users of vLLM know, with a valid value and the drafter it makes sense for.
VLLM_KEYS: dict[str, tuple[Any, str]] = {
    "model": ("draft", "model"),
    "num_speculative_tokens": (5, "ngram"),
    "quantization": ("int8", "model"),
    "max_model_len": (100, "model"),
    "prompt_lookup_max": (5, "ngram"),
    "prompt_lookup_min": (1, "ngram"),
    "use_heterogeneous_vocab": (True, "model"),
    "num_speculative_tokens_per_batch_size": ([[1, 4, 5]], "ngram"),
    "suffix_decoding_max_tree_depth": (24, "suffix"),
    "suffix_decoding_max_cached_requests": (10000, "suffix"),
    "suffix_decoding_max_spec_factor": (1.0, "suffix"),
    "suffix_decoding_min_token_prob": (0.1, "suffix"),
    "rejection_sample_method": ("block", "ngram"),
    "draft_sample_method": ("greedy", "model"),
    "synthetic_acceptance_length": (3.0, "ngram"),
    "synthetic_acceptance_rates": ([0.5], "ngram"),
}
METHODS = ("ngram", "suffix", "draft_model", "medusa", "eagle", "eagle3", "self", "lookahead", "combine", "none")
LOSSY = "keeps the target's distribution exactly"


def refusal(values: Any) -> str:
    """The one sentence with which settings are refused."""
    with pytest.raises(SettingError) as error:
        spec_from_json(values) if isinstance(values, str) else spec_from_mapping(values)
    sentence = str(error.value)
    assert sentence
    assert "\n" not in sentence
    assert "Traceback" not in sentence
    return sentence


NEEDED: dict[str, dict[str, Any]] = {"model": {"model": "draft"}, "self": {"exit_layer": 1}}
NEEDED |= {"medusa": {"model": "heads"}, "eagle": {"model": "head"}}
"""Settings that a drafter cannot do without."""


def given(drafter: str, **values: Any) -> dict[str, Any]:
    return {"method": drafter, **NEEDED.get(drafter, {}), **values}


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("key", VLLM_KEYS)
def test_every_vllm_key_is_taken_or_refused_by_name(drafter: str, key: str) -> None:
    value, _ = VLLM_KEYS[key]
    values = given(drafter, **{key: value})
    own = {f.name for f in dataclasses.fields(DRAFTERS[drafter].settings)}
    if key in own or key in ("num_speculative_tokens", "rejection_sample_method"):
        config = spec_from_mapping(values)
        assert config.options.get(key, getattr(config, key, None)) == value
        assert set(config.options) <= own
    else:
        assert f"the speculative config of drafter {drafter} has no setting '{key}'" in refusal(values)


@pytest.mark.parametrize("key", [k for k, (_, owner) in VLLM_KEYS.items() if owner == "model"])
def test_a_setting_of_another_drafter_is_refused_with_its_owners_name(key: str) -> None:
    if key in {f.name for f in dataclasses.fields(DRAFTERS["model"].settings)}:
        sentence, _, owners = refusal(given("ngram", **{key: VLLM_KEYS[key][0]})).rpartition("it belongs to drafter ")
        assert sentence
        assert "model" in owners.split(" and ")


@pytest.mark.parametrize(
    "key",
    [
        "synthetic_acceptance_length",
        "posterior_threshold",
        "posterior_alpha",
        "acceptance_threshold",
        "lenience",
        "speculative_accept_threshold_single",
        "typical_acceptance_sampler_posterior_alpha",
    ],
)
def test_lossy_settings_are_refused_with_the_reason(key: str) -> None:
    assert LOSSY in refusal({key: 0.5})


def test_synthetic_acceptance_is_refused_with_the_reason() -> None:
    assert LOSSY in refusal({"rejection_sample_method": "synthetic"})


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("num_draft_tokens", "one less"),
        ("speculative_num_draft_tokens", "one less"),
        ("draft_max", "num_speculative_tokens"),
        ("num_assistant_tokens", "num_speculative_tokens"),
        ("prompt_lookup_num_tokens", "num_speculative_tokens"),
        ("num_spec_tokens", "did you mean 'num_speculative_tokens'?"),
        ("prompt_lookup_mx", "did you mean 'prompt_lookup_max'?"),
        ("rejection_method", "did you mean 'rejection_sample_method'?"),
    ],
)
def test_an_unknown_key_names_what_was_probably_meant(key: str, meant: str) -> None:
    sentence = refusal({key: 3})
    assert f"'{key}'" in sentence
    assert meant in sentence


def test_an_unknown_key_that_is_near_to_nothing_gets_the_list() -> None:
    sentence = refusal({"zzz": 3})
    assert all(name in sentence for name in ("zzz", "num_speculative_tokens", "prompt_lookup_min"))


@pytest.mark.parametrize("method", METHODS)
def test_every_known_method_name_is_a_drafter_or_refused_with_the_list(method: str) -> None:
    known = {*DRAFTERS, *(alias for kind in DRAFTERS.values() for alias in kind.aliases)}
    if method in known:
        assert kind_of(method)[0] in DRAFTERS
    else:
        sentence = refusal({"method": method})
        assert repr(method) in sentence
        assert all(name in sentence for name in DRAFTERS)


def test_a_misspelt_method_names_the_nearest() -> None:
    assert "did you mean 'ngram'?" in refusal({"method": "ngarm"})
    assert "did you mean 'draft_model'?" in refusal({"method": "draft-model"})


def test_an_alias_is_read_as_the_drafters_own_name() -> None:
    config = spec_from_mapping({"method": "draft_model", "model": "x"})
    assert config == spec_from_mapping({"method": "model", "model": "x"})
    assert config.method == "model"


def test_names_and_aliases_are_distinct_and_every_setting_has_an_explanation() -> None:
    names = [*DRAFTERS, *(alias for kind in DRAFTERS.values() for alias in kind.aliases)]
    assert len(set(names)) == len(names)
    for kind in DRAFTERS.values():
        for f in dataclasses.fields(kind.settings):
            assert f.metadata["bounds"].help


def test_no_settings_at_all_are_the_defaults() -> None:
    usual = SpecConfig(num_speculative_tokens=8)  # of the default drafter
    assert spec_from_mapping({}) == usual == spec_from_json("{}")
    assert settings_of(SpecConfig()) == NgramSettings()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"num_speculative_tokens": True}, "num_speculative_tokens is True; allowed is a whole number"),
        ({"num_speculative_tokens": "3"}, "num_speculative_tokens is '3'; allowed is a whole number"),
        ({"num_speculative_tokens": 2.5}, "num_speculative_tokens is 2.5; allowed is a whole number"),
        ({"num_speculative_tokens": None}, "num_speculative_tokens is None; allowed is a whole number"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens is -1; allowed is a value from 0 to 256"),
        ({"num_speculative_tokens": 257}, "num_speculative_tokens is 257; allowed is a value from 0 to 256"),
        ({"rejection_sample_method": "blok"}, "did you mean 'block'?"),
        ({"prompt_lookup_max": 0}, "prompt_lookup_max is 0; allowed is a value from 1 to 32"),
        ({"prompt_lookup_min": 3, "prompt_lookup_max": 2}, "prompt_lookup_min is 3; allowed is at most"),
        ({"prompt_lookup_selection": "newest"}, "allowed is one of recent, frequent"),
        ({"method": "model"}, "drafter model needs the setting 'model'"),
        ({"method": "model", "model": 3}, "model is 3; allowed is a text"),
        ({"method": "model", "model": "x", "draft_tree": "3,,1"}, "draft_tree is '3,,1'"),
        ({"method": "model", "model": "x", "draft_tree": "3,0"}, "draft_tree is '3,0'"),
        ({"method": "model", "model": "x", "draft_tree": "\u00b2"}, "draft_tree is '\u00b2'"),
        ({"method": "model", "model": "x", "draft_sample_method": "random"}, "one of probabilistic, greedy"),
        ({"method": ["ngram"]}, "method is"),
        ({"options": {"prompt_lookup_max": 3}}, "no setting 'options'"),
    ],
)
def test_bad_values_are_refused_with_what_is_allowed(values: dict[str, Any], said: str) -> None:
    assert said in refusal(values)
    assert said in refusal(json.dumps(values))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"method": "ngram",}',
        "{'method': 'ngram'}",
        "[" * 100_000,
        '{"num_speculative_tokens": ' + "9" * 5000 + "}",
    ],
)
def test_broken_json_is_said_to_be_so(text: str) -> None:
    assert "the speculative config is not valid JSON" in refusal(text)


@pytest.mark.parametrize("text", ["[]", "3", "null", '"ngram"', "true"])
def test_json_that_is_no_object_is_refused_with_an_example(text: str) -> None:
    assert 'allowed is a JSON object such as {"method": "ngram"}' in refusal(text)


def test_settings_of_a_hand_made_config_are_checked_too() -> None:
    with pytest.raises(SettingError, match="did you mean 'prompt_lookup_max'"):
        settings_of(SpecConfig(options={"prompt_lookup_mxa": 3}))
    with pytest.raises(SettingError, match="drafter model needs the setting 'model'"):
        settings_of(SpecConfig(method="model"))


def test_a_proposer_is_built_from_its_settings() -> None:
    target = toy_target()
    config = spec_from_mapping({"method": "ngram", "prompt_lookup_max": 7})
    built = build_proposer(config, DraftContext(target, config))
    assert isinstance(built, Ngram)
    assert built.settings.prompt_lookup_max == 7
    assert isinstance(build_proposer(SpecConfig(method="none"), DraftContext(target, config)), NoDraft)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_a_fixed_length_is_not_the_usual_one(method: str) -> None:
    assert spec_from_mapping({"method": method, "speculation": "fixed:5"}).num_speculative_tokens == 5
    assert spec_from_mapping({"method": method, "speculation": "fixed"}).num_speculative_tokens == 8
    assert spec_from_mapping({"method": method, "num_speculative_tokens": 4}).num_speculative_tokens == 4
    assert spec_from_mapping({"method": method, "speculation": "auto"}).num_speculative_tokens == MAX_AUTO_DRAFT
