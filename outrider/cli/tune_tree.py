"""``outrider tune tree``: which static tree a draft model should draft."""

from __future__ import annotations

import argparse
import hashlib
import sys

from outrider.bench import tree_search
from outrider.bench.identity import encode
from outrider.bench.prompts import QUICK, read_prompts
from outrider.cli import flags
from outrider.cli.progress import LoadLine
from outrider.core.config import MAX_DRAFT
from outrider.core.errors import SettingError
from outrider.engine.llm import LLM
from outrider.spec.tree_shape import WIDEST

HELP = "search the static tree that a draft model should draft"
DRAFTER = "model"
TREE = "draft_tree"
CONTEXT = 256
"""Tokens before the rows whose passes are timed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_own_flags(parser.add_argument_group("draft model"), DRAFTER, skip=(TREE,))
    parser.add_argument(
        "--num-speculative-tokens", type=int, default=32, metavar="N", help="most nodes to consider (default 32)"
    )
    parser.add_argument("--widest", type=int, default=8, metavar="N", help="guesses at a token (default 8)")
    parser.add_argument("--deepest", type=int, default=8, metavar="N", help="deepest tree to consider (default 8)")


def run(args: argparse.Namespace) -> int:
    for flag, value, high in (
        ("--num-speculative-tokens", args.num_speculative_tokens, MAX_DRAFT),
        ("--widest", args.widest, WIDEST),
        ("--deepest", args.deepest, MAX_DRAFT),
    ):
        if not 1 <= value <= high:
            raise SettingError(f"{flag} is {value}; allowed is a whole number >= 1, <= {high}")
    prompts = read_prompts(args.prompts, args.limit) if args.prompts else list(QUICK)[: args.limit]
    engine, own = flags.engine_values(args), flags.own_values(args, DRAFTER)
    spec = {**own, "method": DRAFTER, TREE: str(args.widest), "num_speculative_tokens": args.widest}
    with LoadLine(sys.stderr) as progress:
        llm = LLM(engine.pop("model"), spec, progress=progress, **engine)
    drafter = llm.engine.proposers[DRAFTER]
    assert isinstance(drafter, tree_search.ModelDrafter)
    config = llm.engine.config
    texts = "\n".join(prompt.text for prompt in prompts)
    asked = {
        "model": llm.target.name,
        "quantization": config.quantization,
        "drafter": own,
        "prompts": hashlib.sha256(texts.encode()).hexdigest(),
        "max_tokens": args.max_tokens,
        "most_nodes": args.num_speculative_tokens,
        "widest": args.widest,
        "deepest": args.deepest,
    }
    measured = tree_search.read(args.json, asked) if args.resume and args.json.exists() else tree_search.Measured()
    for number in range(len(measured.ranks), len(prompts)):
        ids = encode(llm, prompts[number])
        ranks = tree_search.watch(llm.engine, DRAFTER, ids, args.widest, args.max_tokens)
        measured.ranks.append(ranks)
        tree_search.write(args.json, asked, measured)
        share = sum(rank == 0 for rank in ranks) / max(1, sum(rank is not None for rank in ranks))
        _say(f"prompt {number + 1}/{len(prompts)}: {len(ranks)} tokens, the first guess right at {share:.0%}")
    for what, decoder, most, table in (
        ("target", llm.target.decoder, args.num_speculative_tokens + 1, measured.target_seconds),
        ("draft model", drafter.drafter.decoder, max(2, args.num_speculative_tokens), measured.draft_seconds),
    ):
        if most not in table:
            room = decoder.config.max_position - most
            if room < 1:
                raise SettingError(f"--num-speculative-tokens is {most}; allowed is less than the {what}'s context")
            for rows, seconds in tree_search.pass_seconds(decoder, most, min(CONTEXT, room), config.kv_cache_dtype):
                table[rows] = seconds
                _say(f"a pass of the {what} with {rows} rows: {1000 * seconds:.2f} ms")
            tree_search.write(args.json, asked, measured)
    best = measured.best(args.deepest, args.widest, args.num_speculative_tokens)
    tree_search.write(args.json, asked, measured, best)
    tree = str([list(path) for path in best.paths]).replace(" ", "")
    print(
        f"best: {TREE} {tree}: {len(best.paths)} nodes, {best.tokens_per_step:.2f} tokens a step, "
        f"expected speed-up {best.speedup:.3f} ({args.json})"
    )
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
