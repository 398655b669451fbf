from __future__ import annotations

import io

from outrider.cli.progress import LoadLine
from outrider.models.load import LoadStep


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(stream: io.StringIO, seconds_a_layer: float, models: int = 1) -> str:
    clock = Clock()
    with LoadLine(stream, clock) as line:
        clock.now += 10  # before the first layer, when a model is fetched
        for model in range(models):
            for layer in range(5):
                line(LoadStep(f"loading m{model}", layer, 4))
                clock.now += seconds_a_layer
    return stream.getvalue()


def test_what_is_quick_is_silent() -> None:
    assert run(Terminal(), 0.1) == run(io.StringIO(), 0.1) == ""


def test_a_line_that_changes_at_a_terminal_and_goes_away() -> None:
    out = run(Terminal(), 0.5)
    assert out == "".join(f"\r\033[Kloading m0: layer {i} of 4" for i in (2, 3, 4)) + "\r\033[K"


def test_one_plain_line_a_model_elsewhere() -> None:
    assert run(io.StringIO(), 0.5, models=2) == "loading m0: layer 2 of 4 ...\nloading m1: layer 2 of 4 ...\n"
