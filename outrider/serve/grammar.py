"""Constrained output: what a request's fields say about the form of its answer."""

from __future__ import annotations

from outrider.serve.errors import ApiError
from outrider.serve.schemas import ANY_TOOLS, NO_TOOLS, ChatRequest, Sampling

FIELDS = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")


def grammar_of(request: Sampling) -> object | None:
    """The grammar that the answer must follow, as ``SamplingParams`` takes it; None for free text. Raises ApiError."""
    for name in FIELDS:
        if getattr(request, name) is not None:
            raise _unsupported(name, f"{name} is not supported yet")
    form = (request.response_format or {"type": "text"}).get("type")
    if form != "text":
        raise _unsupported("response_format", f"response_format of type {form!r} is not supported yet; text is")
    choice = request.tool_choice if isinstance(request, ChatRequest) else None
    if choice not in (None, NO_TOOLS, ANY_TOOLS):
        raise _unsupported("tool_choice", f"tool_choice {choice!r} is not supported yet; allowed is 'none' or 'auto'")
    return None


def _unsupported(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="unsupported_parameter")
