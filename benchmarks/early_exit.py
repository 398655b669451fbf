"""Early exit: whether verification should run the layers below the exit again, or only for the row not drafted from.

    python benchmarks/early_exit.py [MODEL] [--context 200] [--rounds 80]

A draft of n tokens that leaves after layer E has computed the first E layers of n rows of the n + 1 that are verified.
Times both ways in turn: one pass of all rows through all layers, which is what ``self`` does, and one row through the
first E layers and then all rows through the others. Output norm and head, the same for both, are left out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

from outrider.core.params import SamplingParams, SpecParams
from outrider.core.types import Sequence, Span
from outrider.models.load import load_model
from outrider.runtime.runner import Runner

BLOCK = 16


def prompt_rows(context: int, rows: int) -> list[Span]:
    """So many rows in the middle of a prompt: no logits are computed."""
    length = context + rows + BLOCK
    blocks = list(range(-(-length // BLOCK)))
    return [Span(Sequence(0, [0] * length, length, SamplingParams(), SpecParams(), 0, blocks=blocks), context, rows)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=80)
    options = parser.parse_args()
    decoder = load_model(options.model).decoder
    blocks, layers = options.context // BLOCK + 4, decoder.config.n_layers
    whole = Runner(decoder, blocks, BLOCK)
    for exit_layer in (layers // 4, layers // 2, 3 * layers // 4):
        low = Runner(decoder.with_layers(range(exit_layer)), blocks, BLOCK)
        high = Runner(decoder.with_layers(range(exit_layer, layers)), blocks, BLOCK)
        for drafted in (2, 4):
            rows = prompt_rows(options.context, drafted + 1)

            def again(rows: list[Span] = rows) -> None:
                whole.forward(rows)

            def missing(rows: list[Span] = rows, low: Runner = low, high: Runner = high) -> None:
                low.forward(prompt_rows(options.context, 1))
                high.forward(rows)

            ways: dict[Callable[[], None], list[float]] = {again: [], missing: []}
            for number in range(options.rounds):
                for way in list(ways) if number % 2 else reversed(list(ways)):
                    begin = time.perf_counter()
                    way()
                    ways[way].append(1e3 * (time.perf_counter() - begin))
            took, least = median(ways[again]), median(ways[missing])
            print(
                f"exit after {exit_layer:2} layers, {drafted} drafted: all again {took:.2f} ms, "
                f"only what is missing {least:.2f} ms, {took / least:.2f}x"
            )


if __name__ == "__main__":
    main()
