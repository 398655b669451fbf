"""Memory and load time of serving a model, stage by stage, each setting in a fresh process.

    python benchmarks/memory.py [--model smollm2] [--quantize none,int8,int4] [--drafter ngram] [--tokens 128]

Quantized settings run twice on an empty cache of packed weights: cold (packed and kept) and warm (read). Sizes are MiB
of resident memory (Linux): `anon` is the process's own, `file` are pages of mapped files (libraries for the most part),
which other processes share and the system can take back. `peak` is the most while loading, `waste` what loading left
beyond weights and KV. Seconds are of loading alone, without the imports.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MIB = 1 << 20
STAGES = ("python", "torch", "outrider", "opened", "loaded", "served")


def memory() -> dict[str, float]:
    """Resident MiB of this process now: in all, at most since the last reset, of its own, of mapped files."""
    names = {"VmRSS": "rss", "VmHWM": "peak", "RssAnon": "anon", "RssFile": "file"}
    found = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {names[words[0][:-1]]: int(words[1]) / 1024 for words in found if words and words[0][:-1] in names}


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def measure(model: str, quantization: str | None, drafter: str, tokens: int) -> dict[str, Any]:
    """All figures of one setting; the process must be fresh."""
    stages = {"python": memory()}
    import torch

    stages["torch"] = memory()
    from outrider import SamplingParams
    from outrider.engine.llm import LLM
    from outrider.models.load import LoadStep

    stages["outrider"] = memory()

    def progress(step: LoadStep) -> None:
        if step.layer == 0:
            stages["opened"] = memory()

    reset_peak()
    start = time.perf_counter()
    llm = LLM(model, drafter, quantization=quantization, progress=progress)
    seconds = time.perf_counter() - start
    stages["loaded"] = memory()
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    output = llm.chat([{"role": "user", "content": "Tell me about the sea."}], params)[0]
    assert len(output.token_ids) == tokens, output.completions[0].finish_reason
    stages["served"] = memory()
    plan = llm.engine.memory
    per_token = (plan.target_kv + plan.draft_kv) / plan.tokens
    return {
        "stages": stages,
        "seconds": seconds,
        "weights": (plan.target_weights + plan.draft_weights) / MIB,
        "kv_planned": (plan.target_kv + plan.draft_kv) / MIB,
        "kv_used": per_token * (len(output.prompt_ids) + tokens) / MIB,
        "ops": llm.target.decoder.ops.describe(),
        "torch": torch.__version__,
    }


def fresh(options: argparse.Namespace, model: str, quantization: str, cache: str) -> dict[str, Any]:
    """``measure`` in a process of its own."""
    command = [sys.executable, __file__, "--child", "--model", model, "--quantize", quantization]
    command += ["--drafter", options.drafter, "--tokens", str(options.tokens)]
    env = {**os.environ, "OUTRIDER_CACHE": cache}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [env.get("PYTHONPATH")])])
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def row(name: str, r: dict[str, Any]) -> str:
    stages = r["stages"]
    waste = stages["loaded"]["anon"] - stages["opened"]["anon"] - r["weights"]
    rss = "".join(f"{stages[stage]['rss']:9.0f}" for stage in STAGES)
    loaded = stages["loaded"]
    return (
        f"{name:<12}{rss}{loaded['peak']:7.0f}{loaded['anon']:7.0f}{loaded['file']:6.0f}{r['weights']:9.1f}"
        f"{r['kv_planned']:10.0f}{r['kv_used']:8.1f}{waste:7.1f}{r['seconds']:8.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--quantize", default="none,int8,int4")
    parser.add_argument("--drafter", default="ngram")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        quantization = None if options.quantize == "none" else options.quantize
        print(json.dumps(measure(options.model, quantization, options.drafter, options.tokens)))
        return
    from outrider.models.load import find

    model = str(find(options.model).resolve())
    with tempfile.TemporaryDirectory() as cache:
        print(f"{'':12}{'resident after':<{9 * len(STAGES)}}{'loading':>7}{'loaded':>13}{'':9}{'KV':>18}")
        names = "".join(f"{stage:>9}" for stage in STAGES)
        print(f"{'':12}{names}   peak   anon  file  weights   planned    used  waste seconds")
        fresh(options, model, "none", cache)  # the files come from memory from here on
        for quantization in options.quantize.split(","):
            turns = ("",) if quantization == "none" else (" cold", " warm")
            for turn in turns:
                result = fresh(options, model, quantization, cache)
                print(row(("as shipped" if quantization == "none" else quantization) + turn, result), flush=True)
    print(f"MiB; {result['ops']}, torch {result['torch']}")


if __name__ == "__main__":
    main()
