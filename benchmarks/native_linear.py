"""Time of the native operations on a model's shapes with random weights: products alone, and whole layers.

    python benchmarks/native_linear.py [--formats q4_1,int8] [--rows 1,2,4,8] [--threads 2] [--isa avx2] [--context 256]

The shapes are the default model's. Medians, milliseconds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch

from outrider.core.types import Batch
from outrider.ops.contract import LayerKV, LayerShape, LayerWeights
from outrider.ops.native import NativeOps, NativeWeight, pack

LAYERS, HIDDEN, FFN, HEADS, KV_HEADS, DIM, VOCAB = 30, 576, 1536, 9, 3, 64, 49152
SHAPES = {"q": (576, HIDDEN), "k": (192, HIDDEN), "v": (192, HIDDEN), "o": (HIDDEN, 576)}
SHAPES |= {"gate": (FFN, HIDDEN), "up": (FFN, HIDDEN), "down": (HIDDEN, FFN)}
SHAPE = LayerShape(HEADS, KV_HEADS, DIM, 1e-5, None)
BLOCK = 16
KV_TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.int8}


def batch(rows: int, context: int) -> Batch:
    """``rows`` new rows of one sequence that ends at ``context`` slots (or at its rows, if these are more)."""
    length = max(rows, context)
    blocks = -(-length // BLOCK)
    positions = np.arange(length - rows, length)
    table = np.arange(blocks)[None]
    return Batch(positions, positions, positions, (0, rows), (length,), table, (length,), None, ((),), positions, BLOCK)


def timed(fn: Callable[[], object], seconds: float) -> float:
    """Median milliseconds of one call."""
    fn()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or (time.perf_counter() < end and len(times) < 200):
        start = time.perf_counter()
        fn()
        times.append((time.perf_counter() - start) * 1e3)
    return median(times)


@dataclass(frozen=True)
class Bench:
    """Layers, head and KV of one format."""

    ops: NativeOps
    layers: list[LayerWeights]
    head: NativeWeight
    pools: list[LayerKV]

    @classmethod
    def of(cls, ops: NativeOps, fmt: str, kv_type: torch.dtype, context: int) -> Bench:
        def layer() -> LayerWeights:
            linears: Any = {name: pack(torch.randn(s) * 0.02, fmt) for name, s in SHAPES.items()}
            return LayerWeights(input_norm=torch.ones(HIDDEN), post_norm=torch.ones(HIDDEN), **linears)

        slots = max(512, context) + 2 * BLOCK
        head = pack(torch.randn(VOCAB, HIDDEN) * 0.02, "q8_0" if fmt == "q4_1" else fmt)  # as the model file has it
        pools = [LayerKV.empty(slots, KV_HEADS, DIM, kv_type, "cpu") for _ in range(LAYERS)]
        for part in (part for pool in pools for part in pool.parts):
            part.zero_()
        return cls(ops, [layer() for _ in range(LAYERS)], head, pools)

    def measure(self, rows: int, context: int, seconds: float) -> tuple[float, float, float]:
        """Milliseconds of all products, of all layers, and of the head (one row when there are many)."""
        inputs = {width: torch.randn(rows, width) for width in (HIDDEN, FFN)}
        b = batch(rows, context)
        rope = self.ops.rope_table(torch.ones(DIM // 2), 1.0, torch.from_numpy(b.positions))
        last = inputs[HIDDEN] if rows <= 16 else inputs[HIDDEN][-1:].contiguous()

        def products() -> None:
            for w in self.layers:
                for name, (_, width) in SHAPES.items():
                    self.ops.linear(inputs[width], getattr(w, name))
            self.ops.linear(last, self.head)

        def stack() -> None:
            x = inputs[HIDDEN]
            for w, kv in zip(self.layers, self.pools, strict=True):
                x = self.ops.decoder_layer(x, w, SHAPE, rope, kv, b)

        head = timed(lambda: self.ops.linear(last, self.head), seconds)
        return timed(products, seconds), timed(stack, seconds), head


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="q4_1,int8")
    parser.add_argument("--rows", default="1,2,4,6,8,12,16,64,512")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--kv", choices=("auto", *KV_TYPES), default="auto")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each figure")
    options = parser.parse_args()
    ops = NativeOps(options.threads, options.isa)
    kv_dtype = KV_TYPES.get(options.kv) or ops.kv_dtype(torch.float32)
    print(f"{ops.isa}, {ops.threads} threads, KV {kv_dtype}, context {options.context}")
    for fmt in options.formats.split(","):
        bench = Bench.of(ops, fmt, kv_dtype, options.context)
        print(f"{fmt:>6}  rows     products    layers      head     total   rows/s")
        for rows in map(int, options.rows.split(",")):
            products, layers, head = bench.measure(rows, options.context, options.seconds)
            total = layers + head
            print(f"{rows:12d} {products:12.2f} {layers:9.2f} {head:9.2f} {total:9.2f} {rows / total * 1e3:8.0f}")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
