"""The list of drafters, and how their settings are read. A new drafter is one file in ``drafts`` and one line here."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.core.config import MAX_AUTO_DRAFT, MAX_DRAFT, EngineConfig, SpecConfig
from outrider.core.errors import SettingError, nearest
from outrider.core.settings import from_mapping
from outrider.spec.drafts import (
    combine,
    eagle,
    lookahead,
    medusa,
    model,
    ngram,
    none,
    prediction,
    self_,
    suffix,
)
from outrider.spec.proposer import DraftContext, Proposer

logger = logging.getLogger("outrider")


@dataclass(frozen=True)
class DrafterKind:
    """One way to draft: its own settings (a frozen dataclass) and how to build it from them.

    Settings with a property ``draft_length`` that is not None (a tree of a fixed size) set the default draft length;
    ``usual_length`` is the default for a drafter that decides itself how much of it to use. Settings with a property
    ``parts`` name further drafters, by their settings, that this one is built from.
    """

    settings: type
    build: Callable[[DraftContext, Any], Proposer]
    aliases: tuple[str, ...] = ()
    usual_length: int | None = None


DRAFTERS: Mapping[str, DrafterKind] = {
    "none": DrafterKind(none.NoneSettings, none.build),
    "ngram": DrafterKind(ngram.NgramSettings, ngram.build, usual_length=8),
    "suffix": DrafterKind(suffix.SuffixSettings, suffix.build, usual_length=8),
    "prediction": DrafterKind(prediction.PredictionSettings, prediction.build, usual_length=8),
    "combine": DrafterKind(combine.CombineSettings, combine.build, usual_length=10),
    "model": DrafterKind(model.ModelSettings, model.build, aliases=("draft_model",)),
    "lookahead": DrafterKind(lookahead.LookaheadSettings, lookahead.build),
    "self": DrafterKind(self_.SelfSettings, self_.build),
    "medusa": DrafterKind(medusa.MedusaSettings, medusa.build),
    "eagle": DrafterKind(eagle.EagleSettings, eagle.build, aliases=("eagle3",)),
}

PLAIN = "none"
"""The drafter that never drafts: what the others are measured against."""
UNTRAINED = "suffix"
"""The drafter that pays most of those that need nothing but the text (measured: docs/drafters.md)."""
PREDICTING = "prediction"
"""The drafter for a request that comes with a prediction of its answer, where none was chosen."""

_HINTED = ("prediction",)
"""Drafters that do something for requests that hint at their answers, and cost nothing beside another one."""

_SHARED = tuple(f.name for f in dataclasses.fields(SpecConfig) if f.name != "options")


# What people bring from other engines, and what to say to them.
_LOSSY = "it would change the output, and this engine keeps the target's distribution exactly"
_FOREIGN = {
    "num_draft_tokens": "SGLang's num-draft-tokens counts the root: num_speculative_tokens is one less",
    "speculative_num_draft_tokens": "SGLang's num-draft-tokens counts the root: num_speculative_tokens is one less",
    "draft_max": "llama.cpp's --draft-max is num_speculative_tokens",
    "num_assistant_tokens": "transformers' num_assistant_tokens is num_speculative_tokens",
    "prompt_lookup_num_tokens": "transformers' prompt_lookup_num_tokens is num_speculative_tokens",
    "posterior_threshold": _LOSSY,
    "posterior_alpha": _LOSSY,
    "typical_acceptance_sampler_posterior_threshold": _LOSSY,
    "typical_acceptance_sampler_posterior_alpha": _LOSSY,
    "acceptance_threshold": _LOSSY,
    "speculative_accept_threshold_single": _LOSSY,
    "speculative_accept_threshold_acc": _LOSSY,
    "lenience": _LOSSY,
    "synthetic_acceptance_length": _LOSSY,
    "synthetic_acceptance_rates": _LOSSY,
    "num_speculative_tokens_per_batch_size": "a schedule of draft lengths is not offered yet",
}


def kind_of(method: str) -> tuple[str, DrafterKind]:
    """The drafter called ``method`` and its own name. Raises SettingError for an unknown one."""
    for name, kind in DRAFTERS.items():
        if method == name or method in kind.aliases:
            return name, kind
    known = [*DRAFTERS, *(alias for kind in DRAFTERS.values() for alias in kind.aliases)]
    hint = nearest(method, known)
    raise SettingError(f"method is {method!r}; allowed is one of {', '.join(DRAFTERS)}{hint}")


def spec_from_mapping(values: Mapping[str, Any]) -> SpecConfig:
    """Speculation settings from flat keys, as in ``--speculative-config``; every key and value is checked."""
    name, kind = kind_of(str(values.get("method", SpecConfig.method)))
    own = _names(kind.settings)
    for key in values:
        if key not in _SHARED and key not in own:
            hint = _hint(key, (*_SHARED, *own))
            raise SettingError(f"the speculative config of drafter {name} has no setting '{key}'{hint}")
    if values.get("rejection_sample_method") == "synthetic":
        raise SettingError(f"rejection_sample_method 'synthetic' is not offered: {_LOSSY}")
    shared = {key: value for key, value in values.items() if key in _SHARED}
    options = {key: value for key, value in values.items() if key in own}
    config = SpecConfig(**{**shared, "method": name}, options=options)
    settings = settings_of(config)
    for part in getattr(settings, "parts", ()):
        spec_from_mapping(part)
    natural = getattr(settings, "draft_length", None)
    length = values.get("num_speculative_tokens")
    if config.speculation.startswith("fixed:"):
        if length not in (None, config.num_speculative_tokens):
            said = f"speculation is {config.speculation!r}, but num_speculative_tokens is {length}; give one"
            raise SettingError(said)
        length = config.num_speculative_tokens
    if length is None:
        usual = max(natural or 0, MAX_AUTO_DRAFT) if config.speculation == "auto" else kind.usual_length or natural
        return config if usual is None else replace(config, num_speculative_tokens=min(usual, MAX_DRAFT))
    if natural is not None and config.num_speculative_tokens < natural:
        logger.warning("num_speculative_tokens %d cuts the tree of %d nodes", config.num_speculative_tokens, natural)
    return config


def hinted(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The drafters that follow hints, to stand beside the one that ``values`` describe: none beside no speculation."""
    config = spec_from_mapping(values)
    if config.method == PLAIN:
        return []
    shared = {key: getattr(config, key) for key in _SHARED if key != "method"}
    return [{**shared, "method": name} for name in _HINTED if name != config.method]


def _names(settings: type) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(settings))


def _hint(key: str, known: Sequence[str]) -> str:
    """What to say about a setting that the drafter does not have."""
    if key in _FOREIGN:
        return f": {_FOREIGN[key]}"
    owners = [name for name, kind in DRAFTERS.items() if key in _names(kind.settings)]
    if owners:
        return f": it belongs to drafter {' and '.join(owners)}"
    return nearest(key, known) or f"; known are {', '.join(known)}"


def spec_keys() -> set[str]:
    """The keys of a speculative config that the engine's own settings do not have."""
    own = {f.name for kind in DRAFTERS.values() for f in dataclasses.fields(kind.settings)}
    return (own | {*_SHARED}) - {f.name for f in dataclasses.fields(EngineConfig)}


def spec_from_json(text: str) -> SpecConfig:
    """Speculation settings from a JSON object in a text."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:  # not JSON, a number of thousands of digits, or far too deep
        raise SettingError(f"the speculative config is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise SettingError(
            f'the speculative config is {text!r}; allowed is a JSON object such as {{"method": "ngram"}}'
        )
    return spec_from_mapping(values)


def settings_of(config: SpecConfig) -> Any:
    """The chosen drafter's own settings, checked."""
    name, kind = kind_of(config.method)
    return from_mapping(kind.settings, config.options, f"drafter {name}")


def build_proposer(config: SpecConfig, context: DraftContext) -> Proposer:
    """The drafter that ``config`` asks for, ready for ``Proposer.start``."""
    _, kind = kind_of(config.method)
    settings = settings_of(config)
    parts = [spec_from_mapping(part) for part in getattr(settings, "parts", ())]
    method = config.rejection_sample_method
    built = [
        (part.method, build_proposer(part, replace(context, spec=replace(part, rejection_sample_method=method))))
        for part in parts
    ]
    return kind.build(replace(context, parts=tuple(built)), settings)
