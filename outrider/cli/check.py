"""``outrider check``: proves on the user's own model and drafter that speculation does not change the output."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from outrider.bench.identity import compare
from outrider.bench.prompts import QUICK, read_prompts
from outrider.cli import flags
from outrider.core.errors import SettingError

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
    if args.limit is not None and args.limit < 1:
        raise SettingError(f"--limit is {args.limit}; allowed is a whole number >= 1")
    prompts = read_prompts(args.prompts, args.limit) if args.prompts else list(QUICK)[: args.limit]
    if not hasattr(args, "enable_prefix_caching"):
        args.enable_prefix_caching = False
    llm = flags.load(args)
    tokens = drafted = 0
    divergences = []
    for comparison in compare(llm, prompts, args.max_tokens):
        stats, length = comparison.speculative.stats, len(comparison.plain.token_ids)
        tokens += length
        drafted += stats.drafted
        if comparison.divergence is not None:
            divergences.append(comparison.divergence)
        print(
            f"{comparison.index + 1}/{len(prompts)} {comparison.prompt.kind}: {length} tokens, "
            f"{stats.tokens_per_step:.2f} per step, {'identical' if comparison.identical else 'DIFFERS'}",
            file=sys.stderr,
        )
    if drafted == 0:
        print("outrider: nothing was drafted, so this run proves nothing", file=sys.stderr)
    if args.json:
        result = {"identical": not divergences, "prompts": len(prompts), "tokens": tokens, "drafted": drafted}
        print(json.dumps({**result, "divergences": [dataclasses.asdict(d) for d in divergences]}))
    else:
        print(
            f"{len(prompts)} prompts, {tokens} tokens, {drafted} drafted: "
            + ("not identical" if divergences else "identical")
        )
        for d in divergences:
            print(
                f"prompt {d.prompt + 1} ({d.kind}) differs from output token {d.position} on: plain {d.plain_token}, "
                f"speculative {d.speculative_token}; the best two are {d.margin:.3g} apart in log-probability, "
                + ("a near-tie" if d.near_tie else "NOT a near-tie")
            )
    return 0 if all(d.near_tie for d in divergences) else 1
