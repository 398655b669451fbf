"""The errors a user can meet. Each message is one sentence: the setting or file, what was given, what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class OutriderError(Exception):
    """Base of every error that is the caller's to mend; the CLI prints it without a traceback."""


class SettingError(OutriderError, ValueError):
    """A setting or a request value is not allowed; ``setting`` is its name, where one alone is at fault."""

    def __init__(self, message: str, setting: str | None = None) -> None:
        super().__init__(message)
        self.setting = setting


class ModelFileError(OutriderError):
    """A model file or folder cannot be used as it is."""


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint naming the known word closest to ``word``: ``" (did you mean 'x'?)"``, or an empty string."""
    match = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean '{match[0]}'?)" if match else ""
