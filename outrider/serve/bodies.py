"""A request's body: read within a limit, parsed, checked; every complaint names its field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from outrider.core.errors import nearest
from outrider.serve.errors import ApiError, bad_field
from outrider.serve.schemas import UNSUPPORTED

M = TypeVar("M", bound=BaseModel)
_MAX_SHOWN = 80


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body. Raises ApiError (413) once it is known to have more than ``limit`` bytes."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise _too_large(limit)
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
    return b"".join(parts)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the request body has more than {limit} bytes, which is what is allowed", code="too_large")


def parse(kind: type[M], body: bytes) -> M:
    """The body as ``kind``. Raises ApiError (400): not JSON, or a field that is wrong, unknown or not supported."""
    try:
        data = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, digits without end, far too deep
        raise ApiError(400, f"the request body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(data, dict):
        raise ApiError(400, f"the request body is {_shown(data)}; allowed is a JSON object", code="invalid_json")
    # null is how clients say "as usual".
    given = {name: value for name, value in data.items() if value is not None}
    for name in given:
        if name not in kind.model_fields:
            raise _unknown_field(kind, name)
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise _complaint(error, given) from None
    except RecursionError:
        raise ApiError(400, "the request body is nested too deeply", code="invalid_json") from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _unknown_field(kind: type[BaseModel], name: str) -> ApiError:
    if name in UNSUPPORTED:
        return ApiError(400, f"{name}: {UNSUPPORTED[name]}", param=name, code="unsupported_parameter")
    hint = nearest(name, kind.model_fields)
    return ApiError(400, f"there is no field {_shown(name)} here{hint}", param=name[:200], code="unknown_parameter")


def _complaint(error: ValidationError, data: Mapping[str, Any]) -> ApiError:
    """The first field at fault; where several types are allowed, the one that got furthest into the value."""
    found = error.errors(include_url=False, include_context=False)
    first = max(found, key=lambda e: len(e["loc"]))
    param, value = _place(first["loc"], data)
    said = dict.fromkeys(e["msg"].lower() for e in found if _place(e["loc"], data)[0] == param)
    if first["type"] == "missing":
        return ApiError(400, f"{param} is missing", param=param, code="missing_required_parameter")
    return bad_field(param, f"{param} is {_shown(value)}; {' or '.join(list(said)[:4])}")


def _place(loc: tuple[int | str, ...], data: Any) -> tuple[str, Any]:
    """The field's path in the request, without pydantic's names for the branches of a union; and its value."""
    path, here = "", data
    for step in loc:
        entry = isinstance(here, list) and isinstance(step, int)
        if entry or (isinstance(here, dict) and step in here):
            here = here[step]
        elif not isinstance(here, dict) or step != loc[-1]:  # a branch of a union, not a field that is missing
            continue
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else str(step)
    return path, here


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."
