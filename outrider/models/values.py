"""Values from model files: reading JSON, and checking what strangers wrote before anything is computed from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outrider.core.errors import ModelFileError

MAX_SIZE = 1 << 24
"""The greatest size, count or context length that is believed; real ones stay well below."""
MAX_LAYERS = 1 << 14
_MAX_SHOWN = 80  # characters


def shown(value: object) -> str:
    """A value from a file for an error message: on one line, and not too long."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write out a number of thousands of digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."


def one_line(text: object, limit: int = 300) -> str:
    """A foreign message as part of a one-line message."""
    line = " ".join(str(text).split())
    return line if len(line) <= limit else line[:limit] + "..."


def read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """A JSON object from a file; empty for an ``optional`` file that is not there. Raises ModelFileError."""
    if optional and not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelFileError(f"{path.parent} lacks the file {path.name}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} is not a readable JSON file ({one_line(error)})") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path} holds a JSON {type(value).__name__}; expected is an object")
    return value


def whole(value: object, what: str, low: int = 1, high: int = MAX_SIZE) -> int:
    """``value`` if it is a whole number from ``low`` to ``high``, else ModelFileError naming ``what``."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ModelFileError(f"{what} is {shown(value)}; allowed is a whole number from {low} to {high}")
    return value


def real(value: object, what: str, low: float = 1e-12, high: float = 1e12) -> float:
    """``value`` if it is a number from ``low`` to ``high``, and so finite, else ModelFileError naming ``what``."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
        raise ModelFileError(f"{what} is {shown(value)}; allowed is a number from {low:g} to {high:g}")
    return float(value)


def token_ids(value: object, what: str, high: int = MAX_SIZE) -> tuple[int, ...]:
    """Token ids as files write them: one, a list of them, or null. Raises ModelFileError naming ``what``."""
    values = [] if value is None else value if isinstance(value, list) else [value]
    for each in values:
        if not isinstance(each, int) or isinstance(each, bool) or not 0 <= each <= high:
            raise ModelFileError(f"{what} is {shown(value)}; allowed are token ids from 0 to {high}")
    return tuple(values)
