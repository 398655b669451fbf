"""``outrider check``: proves on the user's own model and drafter that speculation does not change the output."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from outrider.bench.identity import NEAR_TIE, compare
from outrider.bench.prompts import QUICK, read_prompts
from outrider.cli import flags

HELP = "prove that a drafter leaves the greedy output of a model as it is"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_model_flags(parser)
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="JSON Lines with 'turns'; default: six of our own")
    parser.add_argument("--limit", type=int, metavar="N", help="this many prompts, spread over the file")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="longest answer (default 64)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    flags.add_spec_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Exit code 0: identical, or different only from near-ties of the precision on; 1: different."""
    prompts = read_prompts(args.prompts, args.limit) if args.prompts else list(QUICK)[: args.limit]
    if not hasattr(args, "enable_prefix_caching"):
        args.enable_prefix_caching = False
    llm = flags.load(args)
    tokens = 0
    divergences = []
    for comparison in compare(llm, prompts, args.max_tokens):
        tokens += len(comparison.plain.token_ids)
        if comparison.divergence is not None:
            divergences.append(comparison.divergence)
        verdict = "identical" if comparison.identical else "DIFFERS"
        length = len(comparison.plain.token_ids)
        print(
            f"{comparison.index + 1}/{len(prompts)} {comparison.prompt.kind}: {length} tokens, "
            f"{comparison.speculative.stats.tokens_per_step:.2f} per step, {verdict}",
            file=sys.stderr,
        )
    near = NEAR_TIE[llm.target.decoder.dtype]
    result = {
        "identical": not divergences,
        "prompts": len(prompts),
        "tokens": tokens,
        "divergences": [{**dataclasses.asdict(d), "near_tie": d.margin <= near} for d in divergences],
    }
    if args.json:
        print(json.dumps(result))
    else:
        print(f"{len(prompts)} prompts, {tokens} tokens: " + ("identical" if not divergences else "not identical"))
        for d in divergences:
            tie = f"a near-tie (at most {near:g})" if d.margin <= near else "NOT a near-tie"
            print(
                f"prompt {d.prompt + 1} ({d.kind}) differs from output token {d.position} on: plain {d.plain_token}, "
                f"speculative {d.speculative_token}; the best two are {d.margin:.3g} apart, {tie}"
            )
    return 0 if all(d.margin <= near for d in divergences) else 1
