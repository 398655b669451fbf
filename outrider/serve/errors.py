"""Errors as OpenAI's API shows them: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.core.errors import OutriderError, SettingError


class ApiError(Exception):
    """An answer other than the one that was asked for. ``param`` names the field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def bad_field(param: str, message: str) -> ApiError:
    """Status 400 for one field of a request."""
    return ApiError(400, message, param=param, code="invalid_value")


def unavailable(message: str) -> ApiError:
    """Status 503: not now."""
    return ApiError(503, message, code="unavailable", headers={"Retry-After": "5"})


def as_api_error(error: Exception) -> ApiError:
    """Any error as the client may see it; what is not the client's doing keeps its details to the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, SettingError):
        return ApiError(400, str(error), param=error.setting, code="invalid_value")
    if isinstance(error, OutriderError):
        return ApiError(500, str(error))
    return ApiError(500, "the server failed to answer; its log says more")
