"""Settings as frozen dataclasses: one definition serves Python arguments, JSON keys and command-line flags."""

from __future__ import annotations

import argparse
import dataclasses
import math
import types
import typing
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from outrider.core.errors import SettingError, nearest

T = TypeVar("T")


@dataclass(frozen=True)
class Bounds:
    """What a setting may be: a range, or a list of choices; and the sentence that explains it."""

    help: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] | None = None
    positional: bool = False

    @property
    def allowed(self) -> str:
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.high is not None:
            return f"a value from {self.low} to {self.high}"
        return f"a value >= {self.low}"


def setting(default: Any = dataclasses.MISSING, help: str = "", *, factory: Any = None, **bounds: Any) -> Any:
    """A dataclass field with its explanation and limits; ``factory`` makes a default that must not be shared."""
    metadata = {"bounds": Bounds(help, **bounds)}
    if factory is not None:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


def bounds_of(f: dataclasses.Field[Any]) -> Bounds:
    return typing.cast(Bounds, f.metadata.get("bounds", Bounds("")))


def _kinds(cls: type) -> dict[str, tuple[type, bool]]:
    """Per field its plain type, and whether None is allowed."""
    kinds: dict[str, tuple[type, bool]] = {}
    for name, hint in typing.get_type_hints(cls).items():
        args = typing.get_args(hint)
        optional = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
        plain = next(a for a in args if a is not type(None)) if optional else hint
        kinds[name] = (typing.get_origin(plain) or plain, optional)
    return kinds


def check_settings(obj: Any) -> None:
    """Checks types and limits of every field of a settings dataclass; call it from ``__post_init__``.

    Raises SettingError naming the setting, what was given and what is allowed.
    """
    kinds = _kinds(type(obj))
    for f in dataclasses.fields(obj):
        value, bounds = getattr(obj, f.name), bounds_of(f)
        kind, optional = kinds[f.name]
        if value is None and optional:
            continue
        if kind is tuple and isinstance(value, list):  # as repeated flags and JSON have it
            value = tuple(value)
            object.__setattr__(obj, f.name, value)
        accepted = (int, float) if kind is float else kind
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            raise SettingError(f"{f.name} is {value!r}; allowed is {_KIND_NAMES.get(kind, kind.__name__)}")
        if bounds.choices is not None and value not in bounds.choices:
            hint = nearest(str(value), bounds.choices)
            raise SettingError(f"{f.name} is {value!r}; allowed is {bounds.allowed}{hint}")
        low, high = bounds.low, bounds.high
        number = typing.cast(float, value)
        if (low is not None and not number >= low) or (high is not None and not number <= high):
            raise SettingError(f"{f.name} is {value!r}; allowed is {bounds.allowed}")
        if kind is float and not -math.inf < number < math.inf:
            raise SettingError(f"{f.name} is {value!r}; allowed is a finite number")


_KIND_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def from_mapping(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """Builds settings from a mapping such as parsed JSON; an unknown key is an error that names the nearest one."""
    known = [f.name for f in dataclasses.fields(typing.cast(Any, cls))]
    for key in values:
        if key not in known:
            raise SettingError(f"{where} has no setting '{key}'{nearest(key, known)}; known are {', '.join(known)}")
    missing = [
        f.name
        for f in dataclasses.fields(typing.cast(Any, cls))
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING and f.name not in values
    ]
    if missing:
        raise SettingError(f"{where} needs the setting '{missing[0]}'")
    return cls(**values)


def add_flags(
    parser: argparse._ActionsContainer,
    cls: type,
    skip: Collection[str] = (),
    rename: Mapping[str, str] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """Adds one flag a field, ``--like-this``; a flag that is not given stays out of the parsed namespace.

    A field of several values is a flag that may be repeated. ``rename`` gives fields another name as a flag;
    ``defaults`` are shown in place of the fields' own.
    """
    kinds = _kinds(cls)
    for f in dataclasses.fields(cls):
        if f.name in skip:
            continue
        bounds, (kind, _) = bounds_of(f), kinds[f.name]
        name = (rename or {}).get(f.name, f.name)
        default = (defaults or {}).get(f.name, f.default)
        shown = "" if default in (None, dataclasses.MISSING, (), "") else f" (default {default})"
        options: dict[str, Any] = {"help": (bounds.help + shown).replace("%", "%%")}
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif issubclass(kind, Iterable) and kind is not str:
            options |= {"action": "append", "type": _element(cls, f.name), "metavar": "VALUE"}
        else:
            options |= {"type": kind, "choices": bounds.choices}
            if bounds.choices is None:
                options["metavar"] = {int: "N", float: "X"}.get(kind, "TEXT")
        if bounds.positional:
            parser.add_argument(f.name, type=kind, help=options["help"])
        else:
            parser.add_argument("--" + name.replace("_", "-"), dest=name, default=argparse.SUPPRESS, **options)


def _element(cls: type, name: str) -> type:
    """The type of the entries of a field of several values."""
    hint = typing.get_type_hints(cls)[name]
    for part in (hint, *typing.get_args(hint)):
        if typing.get_origin(part) is not types.UnionType and typing.get_args(part):
            return typing.cast(type, typing.get_args(part)[0])
    return str


def given_flags(cls: type, parsed: argparse.Namespace, rename: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The flags of ``cls`` that were given on the command line, by field name."""
    names = {f.name: (rename or {}).get(f.name, f.name) for f in dataclasses.fields(cls)}
    return {field: getattr(parsed, flag) for field, flag in names.items() if hasattr(parsed, flag)}
