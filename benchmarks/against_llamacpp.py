"""Ours against llama.cpp on the same model file: plain decoding, eight requests at once, prefill.

    python benchmarks/against_llamacpp.py --llamacpp BUILD/bin --q4_1 smollm2.gguf --q4_0 smollm2-Q4_0.gguf \
        [--threads 2] [--rounds 5]

Both sides take turns, round by round; medians and their ratio are printed. ``llama-bench`` measures 128 generated
tokens and a prompt of 512, ``llama-batched-bench`` eight sequences of 128 + 128 tokens. Ours are whole engine steps
over the ``--q4_1`` file, greedy: 128 tokens after a prompt of one token, 512 prompt tokens up to the first output
token, and eight requests of 128 + 128 tokens (steps without prompt rows).
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from outrider.core.params import SamplingParams
from outrider.engine.engine import Engine
from outrider.engine.llm import LLM

NEW, PROMPT, BATCH = 128, 512, 8


def decoded(engine: Engine, prompts: Sequence[Sequence[int]], new: int) -> tuple[float, float]:
    """Seconds until every prompt has its first token, and tokens a second afterwards, over all of them."""
    params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
    begin = time.perf_counter()
    requests = [engine.add_request(prompt, params) for prompt in prompts]
    while any(request.first_token is None for request in requests):
        engine.step()
    first, before = time.perf_counter(), engine.metrics.generated_tokens
    while engine.has_work:
        engine.step()
    seconds = time.perf_counter() - first
    return first - begin, (engine.metrics.generated_tokens - before) / seconds


def ours(engine: Engine, seed: int) -> dict[str, float]:
    """Tokens a second of the three tasks; prompts are random, so that no prefix is cached."""
    rng = random.Random(seed)

    def prompt(n: int) -> list[int]:
        return [rng.randrange(1000, 40000) for _ in range(n)]

    return {
        "decode": decoded(engine, [prompt(1)], NEW)[1],
        "batch of 8": decoded(engine, [prompt(128) for _ in range(BATCH)], NEW)[1],
        "prefill": PROMPT / decoded(engine, [prompt(PROMPT)], 2)[0],
    }


def theirs(folder: Path, model: Path, threads: int) -> dict[str, float]:
    """The same of llama.cpp."""
    command = [folder / "llama-bench", "-m", model, "-t", str(threads), "-p", str(PROMPT), "-n", str(NEW), "-r", "1"]
    rows = json.loads(_output([*command, "-o", "json"]))
    rates = {"prefill" if row["n_prompt"] else "decode": float(row["avg_ts"]) for row in rows}
    command = [folder / "llama-batched-bench", "-m", model, "-t", str(threads), "-c", "4096"]
    text = _output([*command, "-npp", "128", "-ntg", str(NEW), "-npl", str(BATCH)])
    row = next(line for line in text.splitlines() if re.match(rf"\|\s*128 \|\s*{NEW} \|\s*{BATCH} ", line))
    return {**rates, "batch of 8": float(row.split("|")[8])}


def _output(command: Sequence[str | Path]) -> str:
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llamacpp", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--q4_1", type=Path, required=True, metavar="FILE")
    parser.add_argument("--q4_0", type=Path, required=True, metavar="FILE")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    llm = LLM(str(options.q4_1), drafter="none", threads=options.threads)
    ours(llm.engine, -1)  # the first passes of a process are slow
    found: dict[str, list[dict[str, float]]] = {"ours": [], "llama.cpp Q4_1": [], "llama.cpp Q4_0": []}
    for seed in range(options.rounds):
        found["ours"].append(ours(llm.engine, seed))
        found["llama.cpp Q4_1"].append(theirs(options.llamacpp, options.q4_1, options.threads))
        found["ours"].append(ours(llm.engine, 1000 + seed))
        found["llama.cpp Q4_0"].append(theirs(options.llamacpp, options.q4_0, options.threads))
    print(
        f"{llm.engine.target.decoder.ops.describe()}; tokens/s, medians of {options.rounds} rounds, ours of twice that"
    )
    print(f"{'':<12} {'ours':>8}" + "".join(f" {name:>16} {'ratio':>7}" for name in list(found)[1:]))
    for task in ("decode", "batch of 8", "prefill"):
        middle = {name: median(rates[task] for rates in runs) for name, runs in found.items()}
        row = f"{task:<12} {middle['ours']:8.1f}"
        for name in list(found)[1:]:
            row += f" {middle[name]:16.1f} {middle['ours'] / middle[name]:6.2f}x"
        print(row)


if __name__ == "__main__":
    main()
