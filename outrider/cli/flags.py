"""Command-line flags, made from the settings dataclasses: what Python and JSON know, the command line knows too."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.cli.progress import LoadLine
from outrider.core.config import EngineConfig, SpecConfig
from outrider.core.errors import SettingError
from outrider.core.grammar import Grammar
from outrider.core.params import SamplingParams
from outrider.core.settings import add_flags, given_flags
from outrider.engine.llm import LLM
from outrider.spec.registry import DRAFTERS, hinted, kind_of, spec_from_json, spec_from_mapping

ENGINE_FLAGS = {f.name: f.name for f in dataclasses.fields(EngineConfig)} | {"quantization": "quantize"}


def add_model_flags(parser: argparse.ArgumentParser, skip: tuple[str, ...] = ()) -> None:
    """The model and everything about how it is run."""
    add_flags(parser.add_argument_group("model and engine"), EngineConfig, skip, ENGINE_FLAGS)


def add_spec_flags(parser: argparse.ArgumentParser) -> None:
    """Speculation: a JSON object as other engines take it, or plain flags; a flag overrides its key in the JSON."""
    group = parser.add_argument_group("speculation")
    group.add_argument("--speculative-config", metavar="JSON", help="settings as a JSON object, with vLLM's keys")
    group.add_argument(
        "--drafter", dest="method", default=argparse.SUPPRESS, metavar="NAME", help=f"one of {', '.join(DRAFTERS)}"
    )
    add_drafter_flags(group)


def add_drafter_flags(group: argparse._ActionsContainer, skip: tuple[str, ...] = ()) -> None:
    """What all drafters share, and each one's own settings."""
    add_flags(group, SpecConfig, skip=("method", "options", *skip))
    shared: set[str] = set()  # settings that several drafters have are one flag
    for kind in DRAFTERS.values():
        add_flags(group, kind.settings, skip=shared, rename=_flag_names(kind.settings))
        shared |= {f.name for f in dataclasses.fields(kind.settings)}


def add_own_flags(group: argparse._ActionsContainer, drafter: str, skip: tuple[str, ...] = ()) -> None:
    """One drafter's own settings; ``own_values`` reads them."""
    settings = DRAFTERS[drafter].settings
    add_flags(group, settings, skip=skip, rename=_flag_names(settings))


def own_values(args: argparse.Namespace, drafter: str, before: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The settings of ``drafter`` that were given, by field name, over those of ``before``.

    Raises SettingError when a needed one is missing.
    """
    settings = DRAFTERS[drafter].settings
    values = {**(before or {}), **given_flags(settings, args, _flag_names(settings))}
    for f in dataclasses.fields(settings):
        if f.default is dataclasses.MISSING and f.name not in values:
            raise SettingError(f"drafter {drafter} needs --{_flag(settings, f.name)}")
    return values


def add_sampling_flags(parser: argparse.ArgumentParser, skip: tuple[str, ...] = ()) -> None:
    """How to sample; at the command line greedy is the default."""
    group = parser.add_argument_group("sampling (greedy unless --temperature is given)")
    add_flags(group, SamplingParams, skip=("processors", "logit_bias", "grammar", *skip), defaults={"temperature": 0})
    group.add_argument("--logit-bias", metavar="JSON", help="for example '{\"42\": -100}'")
    grammar = group.add_mutually_exclusive_group()
    grammar.add_argument("--json-schema", type=Path, metavar="FILE", help="answer with JSON that obeys this schema")
    grammar.add_argument("--regex", metavar="RE", help="answer with a text that matches this expression as a whole")


def engine_values(args: argparse.Namespace) -> dict[str, Any]:
    """The engine's settings that were given as flags, by their field names."""
    return given_flags(EngineConfig, args, ENGINE_FLAGS)


def load(args: argparse.Namespace, hints: bool = False, usual: Mapping[str, Any] | None = None) -> LLM:
    """The LLM that the flags describe; progress goes to standard error.

    With ``hints`` the drafters that follow what a request gives stand beside the chosen one. ``usual`` are speculation
    settings that hold where no flag says otherwise.
    """
    engine = engine_values(args)
    spec = spec_mapping(args, usual)
    with LoadLine(sys.stderr) as progress:
        return LLM(engine.pop("model"), [spec, *(hinted(spec) if hints else ())], progress=progress, **engine)


def spec_mapping(args: argparse.Namespace, usual: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Speculation settings as flat keys; a flag of another drafter than the chosen one is an error."""
    values: dict[str, Any] = dict(usual or {})
    if args.speculative_config is not None:
        spec_from_json(args.speculative_config)  # checks it
        values |= json.loads(args.speculative_config)
    values |= given_flags(SpecConfig, args)
    name, _ = kind_of(values.get("method", SpecConfig.method))
    return _with_own_settings(args, [name], values)[0]


def spec_mappings(args: argparse.Namespace, names: Sequence[str]) -> list[dict[str, Any]]:
    """The same for several drafters by name, from flags alone; a flag of a drafter not among them is an error."""
    return _with_own_settings(args, [kind_of(name)[0] for name in names], given_flags(SpecConfig, args))


def _with_own_settings(args: argparse.Namespace, names: Sequence[str], shared: dict[str, Any]) -> list[dict[str, Any]]:
    """Per drafter its settings: ``shared`` and those of its own flags, checked."""
    mappings = []
    taken = {f.name for name in names for f in dataclasses.fields(DRAFTERS[name].settings)}
    for other, kind in DRAFTERS.items():
        own = [key for key in given_flags(kind.settings, args, _flag_names(kind.settings)) if key not in taken]
        if own:
            chosen = f"drafter is {names[0]}" if len(names) == 1 else f"drafters are {', '.join(names)}"
            raise SettingError(f"--{_flag(kind.settings, own[0])} is a setting of drafter {other}; the chosen {chosen}")
    for name in names:
        values = own_values(args, name, {**shared, "method": name})
        spec_from_mapping(values)
        mappings.append(values)
    return mappings


def sampling(args: argparse.Namespace) -> SamplingParams:
    """Sampling settings from the flags."""
    values: dict[str, Any] = {"temperature": 0.0, **given_flags(SamplingParams, args)}
    if values.pop("logit_bias", None) is not None:
        try:
            values["logit_bias"] = {int(token): float(bias) for token, bias in json.loads(args.logit_bias).items()}
        except (ValueError, AttributeError, TypeError):
            raise SettingError(
                f"--logit-bias is {args.logit_bias!r}; allowed is a JSON object from token ids to numbers"
            ) from None
    return SamplingParams(**values, grammar=_grammar(args))


def _grammar(args: argparse.Namespace) -> Grammar | None:
    if args.regex is not None:
        return Grammar("regex", args.regex, "--regex")
    if args.json_schema is None:
        return None
    try:
        schema = args.json_schema.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise SettingError(f"--json-schema is {args.json_schema}, which cannot be read: {error}") from None
    return Grammar("json_schema", schema, "--json-schema")


def _flag_names(settings: type) -> dict[str, str]:
    """Drafter settings whose names the engine has too are flags with a ``draft-`` in front."""
    names = (f.name for f in dataclasses.fields(settings))
    return {name: f"draft_{ENGINE_FLAGS[name]}" for name in names if name in ENGINE_FLAGS}


def _flag(settings: type, name: str) -> str:
    """A drafter's setting as it is spelt on the command line, without its dashes in front."""
    return _flag_names(settings).get(name, name).replace("_", "-")
