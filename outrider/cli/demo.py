"""``outrider demo``: plain and speculative decoding side by side."""

from __future__ import annotations

import argparse
import sys

from outrider.bench.demo import run_demo
from outrider.bench.prompts import QUICK
from outrider.cli import flags
from outrider.cli.stats import model_line

HELP = "plain and speculative decoding side by side, on six kinds of prompt"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_model_flags(parser)
    parser.add_argument("--max-tokens", type=int, default=96, metavar="N", help="longest answer (default 96)")
    flags.add_spec_flags(parser)


def run(args: argparse.Namespace) -> int:
    if not hasattr(args, "enable_prefix_caching"):
        args.enable_prefix_caching = False  # the second run of a prompt must not profit from the first
    print(f"loading {args.model} ...", file=sys.stderr)
    llm = flags.load(args)
    drafter, gamma = next(iter(llm.engine.proposers)), llm.engine.spec.num_speculative_tokens
    print(f"{model_line(llm)}; drafter {drafter} with {gamma} draft tokens, greedy")
    comparisons = run_demo(llm, QUICK, args.max_tokens, lambda line: print(line, flush=True))
    parted = [c.divergence for c in comparisons if c.divergence is not None]
    if not parted:
        print("The speculative output is identical to the plain one on every prompt.")
    elif all(d.near_tie for d in parted):
        print("Outputs part only at near-ties of the best two tokens, which rounding turns over in this precision.")
    else:
        print("Outputs differ where they must not: please report this.")
    return 0 if all(d.near_tie for d in parted) else 1
