"""Progress of loading at the terminal."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

from outrider.models.load import LoadStep

_AFTER = 1.0  # seconds of silence: most models are there by then
_CLEAR = "\r\033[K"


class LoadLine:
    """Says how far loading is where it takes long: a line that changes at a terminal, else one plain line a model.

    A context manager: leaving it takes the changing line away.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._began = clock()
        self._shown = False

    def __call__(self, step: LoadStep) -> None:
        if step.layer == 0:
            self._began, self._shown = self._clock(), False
        if self._clock() - self._began < _AFTER:
            return
        text = f"{step.what}: {step.unit} {step.layer} of {step.layers}"
        if self._stream.isatty():
            self._stream.write(f"{_CLEAR}{text}")
            self._stream.flush()
        elif not self._shown:
            print(f"{text} ...", file=self._stream, flush=True)
        self._shown = True

    def __enter__(self) -> LoadLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown and self._stream.isatty():
            self._stream.write(_CLEAR)
            self._stream.flush()
