"""The share of the read bandwidth that plain decoding uses: weights read a step / step time / what a bare loop reads.

    python benchmarks/bandwidth.py [MODEL] [--quantization int8] [--rounds 20] [--threads 2]

The bare loop adds up a buffer as large as the weights, each thread a part of its own; it is compiled here with the C++
compiler (``CXX``, or c++). Both take turns: some steps at batch 1 after a prompt of 32 tokens, then as many passes of
the loop. Shares are of a round's median step and median pass; GB are 10^9 bytes.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import random
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from outrider.core.config import EngineConfig, SpecConfig
from outrider.core.params import SamplingParams
from outrider.engine.engine import Engine
from outrider.engine.llm import build_engine
from outrider.models.load import load_model

STEPS = 48  # in a round; a third of them, with the weights on their way into the cache, does not count
LOOP = r"""
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
extern "C" void* room(size_t bytes) {
  void* p = std::aligned_alloc(size_t{2} << 20, bytes);
#ifdef MADV_HUGEPAGE
  madvise(p, bytes, MADV_HUGEPAGE);
#endif
  return std::memset(p, 1, bytes);
}
extern "C" uint64_t total(const uint64_t* p, size_t n) {
  uint64_t sum[64] = {};
  for (size_t i = 0; i < n; i += 64)
    for (size_t j = 0; j < 64; j++) sum[j] += p[i + j];
  for (size_t j = 1; j < 64; j++) sum[0] += sum[j];
  return sum[0];
}
"""


class BareLoop:
    """Reads ``n_bytes`` (rounded up) with ``threads`` threads."""

    def __init__(self, library: ctypes.CDLL, n_bytes: int, threads: int) -> None:
        chunk = threads << 21
        self.n_bytes, self.threads = -(-n_bytes // chunk) * chunk, threads
        library.room.restype = ctypes.c_void_p
        self.at = library.room(ctypes.c_size_t(self.n_bytes))
        self.total = library.total
        self.total.restype = ctypes.c_uint64

    def seconds(self, passes: int) -> list[float]:
        """Of each pass, until the last thread is done."""
        part, spans = self.n_bytes // self.threads, [[0.0] * self.threads for _ in range(2 * passes)]
        together = threading.Barrier(self.threads)

        def work(thread: int) -> None:
            for i in range(passes):
                together.wait()
                spans[2 * i][thread] = time.perf_counter()
                self.total(ctypes.c_void_p(self.at + thread * part), ctypes.c_size_t(part // 8))
                spans[2 * i + 1][thread] = time.perf_counter()

        workers = [threading.Thread(target=work, args=(i,)) for i in range(1, self.threads)]
        for worker in workers:
            worker.start()
        work(0)
        for worker in workers:
            worker.join()
        return [max(spans[2 * i + 1]) - min(spans[2 * i]) for i in range(passes)]


@contextmanager
def compiled() -> Iterator[ctypes.CDLL]:
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "loop.cpp"), Path(folder, "loop.so")
        source.write_text(LOOP)
        options = ["-O3", "-march=native", "-shared", "-fPIC"]
        options += ["-mprefer-vector-width=512"] if platform.machine() == "x86_64" else []
        subprocess.run([os.environ.get("CXX", "c++"), *options, source, "-o", library], check=True)
        yield ctypes.CDLL(str(library))


def steps(engine: Engine, rng: random.Random) -> list[float]:
    """Seconds of the steps of one answer, without the first third."""
    prompt = [rng.randrange(1000, engine.target.n_tokens) for _ in range(32)]
    engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=STEPS + 1, ignore_eos=True))
    engine.step()
    taken = []
    while engine.has_work:
        start = time.perf_counter()
        engine.step()
        taken.append(time.perf_counter() - start)
    return taken[STEPS // 3 :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--quantization", choices=("int8", "int4"))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    model = load_model(options.model, quantization=options.quantization, ops="native", threads=options.threads)
    config = EngineConfig("bench", num_kv_blocks=64, enable_prefix_caching=False)
    engine, weights = build_engine(model, config, SpecConfig("none")), model.weight_bytes
    rng, decoding, reading = random.Random(0), [], []
    with compiled() as library:
        loop = BareLoop(library, weights, options.threads)
        for _ in range(options.rounds):
            decoding.append(weights / median(steps(engine, rng)) / 1e9)
            reading.append(loop.n_bytes / median(loop.seconds(STEPS)[STEPS // 3 :]) / 1e9)
    share = median(a / b for a, b in zip(decoding, reading, strict=True))
    print(f"{model.decoder.ops.describe()}; {weights / 1e6:.1f} MB of weights a step")
    print(f"decoding {median(decoding):.1f} GB/s, a bare loop {median(reading):.1f} GB/s: {share:.0%}")


if __name__ == "__main__":
    main()
