"""What an answer's text must look like: a grammar as a request states it, and the spellings that servers know."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.core.errors import SettingError, nearest

KINDS = ("json_object", "json_schema", "regex", "choice", "lark")
MAX_GRAMMAR = 1 << 17
"""Characters of a grammar at most."""
GUIDED = {"guided_json": "json_schema", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "lark"}
"""The request fields beside ``response_format``, and the kind of grammar each holds."""
_FORMATS = ("text", "json_object", "json_schema")


@dataclass(frozen=True)
class Grammar:
    """A grammar that the whole text of an answer obeys, unless ``max_tokens`` or a stop cuts it short.

    ``kind`` and ``text``: ``json_object`` (no text), ``json_schema`` (a schema, as JSON), ``regex``, ``choice`` (a JSON
    list of texts, one of which is the answer), ``lark`` (a Lark grammar, or a GBNF one). ``where`` is the setting's
    name for error messages. Whether schema, expression or grammar are sound is found out when they meet a model's
    tokens. Raises SettingError.
    """

    kind: str
    text: str = ""
    where: str = field(default="grammar", compare=False)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            hint = nearest(str(self.kind), KINDS)
            allowed = f"one of {', '.join(KINDS)}{hint}"
            raise SettingError(f"{self.where} has the kind {self.kind!r}; allowed is {allowed}", self.where)
        if not isinstance(self.text, str):
            raise self._refused("a text")
        if len(self.text) > MAX_GRAMMAR:
            said = f"{self.where} has {len(self.text)} characters; allowed are {MAX_GRAMMAR}"
            raise SettingError(said, self.where)
        if self.kind == "json_object" and self.text:
            raise self._refused("no text, as any JSON object will do")
        if self.kind == "json_schema" and not isinstance(self._json(), (dict, bool)):
            raise self._refused("a JSON schema (an object)")
        if self.kind == "choice" and not _texts(self._json()):
            raise self._refused("a list of texts, at least one, none of them empty")
        if self.kind in ("regex", "lark") and not self.text.strip():
            raise self._refused("a text that is not blank")

    @staticmethod
    def schema(schema: Mapping[str, Any] | bool | str, where: str = "grammar") -> Grammar:
        """JSON that obeys ``schema``, given as Python values or as JSON."""
        return Grammar("json_schema", schema if isinstance(schema, str) else _dumped(schema, where), where)

    @staticmethod
    def choice(options: Sequence[str], where: str = "grammar") -> Grammar:
        """One of the texts ``options``."""
        return Grammar("choice", _dumped(options, where), where)

    @property
    def options(self) -> list[str]:
        """The texts to choose from, of a ``choice``."""
        return list(json.loads(self.text))

    def _json(self) -> object:
        try:
            return json.loads(self.text)
        except (ValueError, RecursionError):
            raise self._refused("valid JSON") from None

    def _refused(self, allowed: str) -> SettingError:
        return _wrong(self.where, self.text, allowed)


def grammar_of(response_format: object = None, guided: Mapping[str, Any] | None = None) -> Grammar | None:
    """The grammar of a request: OpenAI's ``response_format``, or one of the ``GUIDED`` fields in ``guided``.

    Fields that are None are left out. Raises SettingError, which names the field, for a wrong value, an unknown field
    and for more than one grammar.
    """
    found: list[Grammar | None] = []
    for name, value in (guided or {}).items():
        if name not in GUIDED:
            allowed = f"one of {', '.join(GUIDED)}{nearest(name, GUIDED)}"
            raise SettingError(f"{name} is unknown; allowed is {allowed}", name)
        found.append(stated(GUIDED[name], value, name))
    return the_only([*found, _response_format(response_format)])


def stated(kind: str, value: object, where: str) -> Grammar | None:
    """The grammar that ``value`` states in the field ``where``, None being none: a schema as an object or as JSON, the
    texts of a choice as a list, anything else as a text. Raises SettingError, which names the field."""
    if value is None:
        return None
    if kind == "choice" or (kind == "json_schema" and not isinstance(value, str)):
        return Grammar(kind, _dumped(value, where), where)
    if not isinstance(value, str):
        raise _wrong(where, value, "a text")
    return Grammar(kind, value, where)


def the_only(grammars: Iterable[Grammar | None]) -> Grammar | None:
    """The one that is not None. Raises SettingError, which names the last field, if there are several."""
    found = [grammar for grammar in grammars if grammar is not None]
    if len(found) > 1:
        names = " and ".join(grammar.where for grammar in found)
        raise SettingError(f"the request has {names}; allowed is one of them", found[-1].where)
    return found[0] if found else None


def _response_format(value: object) -> Grammar | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise _wrong("response_format", value, "an object with a type")
    kind = value.get("type")
    if kind not in _FORMATS:
        raise _wrong("response_format.type", kind, f"one of {', '.join(_FORMATS)}")
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar("json_object", where="response_format")
    named = value.get("json_schema")
    if not isinstance(named, Mapping):
        raise _wrong("response_format.json_schema", named, "an object with a schema")
    schema, where = named.get("schema"), "response_format.json_schema.schema"
    if not isinstance(schema, (Mapping, bool)):
        raise _wrong(where, schema, "a JSON schema (an object)")
    return Grammar.schema(schema, where)


def _texts(value: object) -> bool:
    """Whether this is a list of texts that are not empty, one at least."""
    return isinstance(value, list) and bool(value) and all(isinstance(text, str) and text for text in value)


def _dumped(value: object, where: str) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        raise _wrong(where, value, "what JSON can express") from None


def _wrong(where: str, value: object, allowed: str) -> SettingError:
    return SettingError(f"{where} is {_shown(value)}; allowed is {allowed}", where)


def _shown(value: object) -> str:
    """A value for an error message, not too long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:80] + "..."
