"""``outrider tune``: ``skip-layers``, which layers to skip while a model drafts for itself; ``tree``, see there."""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path
from typing import Any

from outrider.bench import skip_layers
from outrider.bench.identity import encode
from outrider.bench.prompts import QUICK, read_prompts
from outrider.cli import flags, tune_tree
from outrider.cli.progress import LoadLine
from outrider.core.config import MAX_DRAFT, EngineConfig, SpecConfig
from outrider.core.errors import SettingError
from outrider.core.settings import given_flags
from outrider.engine.llm import LLM
from outrider.spec.registry import PLAIN

HELP = "search settings of a drafter for a model: tune skip-layers, tune tree"
DRAFTER = "self"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="WHAT")
    sub = _command(commands, "skip-layers", "search the layers to skip while the model drafts for itself", (4, 32))
    sub.set_defaults(tune=_skip_layers)
    sub.add_argument(
        "--num-speculative-tokens", type=int, default=4, metavar="N", help="longest draft to consider (default 4)"
    )
    sub.add_argument("--trials", type=int, metavar="N", help="sets to measure (default: twice the model's layers)")
    sub.add_argument("--seed", type=int, default=0, metavar="N", help="of the random exchanges (default 0)")
    sub = _command(commands, "tree", tune_tree.HELP, (6, 128))
    sub.set_defaults(tune=tune_tree.run)
    tune_tree.add_arguments(sub)


def _command(commands: Any, name: str, what: str, usual: tuple[int, int]) -> argparse.ArgumentParser:
    """A search and the flags of all of them; ``usual`` are the default numbers of prompts and of tokens."""
    sub: argparse.ArgumentParser = commands.add_parser(name, help=what, description=what, allow_abbrev=False)
    flags.add_model_flags(sub)
    limit, tokens = usual
    sub.add_argument("--prompts", type=Path, metavar="FILE", help="JSON Lines with 'turns'; default: six of our own")
    sub.add_argument(
        "--limit", type=int, default=limit, metavar="N", help=f"this many prompts, spread over it (default {limit})"
    )
    sub.add_argument("--max-tokens", type=int, default=tokens, metavar="N", help=f"longest answer (default {tokens})")
    sub.add_argument("--json", type=Path, required=True, metavar="FILE", help="result file, written after every step")
    sub.add_argument("--resume", action="store_true", help="go on with what the result file holds")
    return sub


def run(args: argparse.Namespace) -> int:
    for flag, value in (("--limit", args.limit), ("--max-tokens", args.max_tokens)):
        if value < 1:
            raise SettingError(f"{flag} is {value}; allowed is a whole number >= 1")
    if args.json.suffix != ".json" or args.json.is_dir() or not args.json.parent.is_dir():
        raise SettingError(f"--json is {args.json}; allowed is a .json file in a folder that exists")
    code: int = args.tune(args)
    return code


def _skip_layers(args: argparse.Namespace) -> int:
    for flag, value, high in (
        ("--trials", 1 if args.trials is None else args.trials, None),
        ("--num-speculative-tokens", args.num_speculative_tokens, MAX_DRAFT),
    ):
        if value < 1 or (high is not None and value > high):
            raise SettingError(f"{flag} is {value}; allowed is a whole number >= 1" + (f", <= {high}" if high else ""))
    prompts = read_prompts(args.prompts, args.limit) if args.prompts else list(QUICK)[: args.limit]
    engine = given_flags(EngineConfig, args, flags.ENGINE_FLAGS)
    with LoadLine(sys.stderr) as progress:
        llm = LLM(engine.pop("model"), PLAIN, progress=progress, **engine)
    config = llm.engine.config
    layers = llm.target.config.n_layers
    if layers < 3:
        raise SettingError(f"the model {llm.target.name} has {layers} layers; allowed are 3 and more")
    texts = "\n".join(prompt.text for prompt in prompts)
    asked = {
        "model": llm.target.name,
        "quantization": config.quantization,
        "prompts": hashlib.sha256(texts.encode()).hexdigest(),
        "max_tokens": args.max_tokens,
        "longest_draft": args.num_speculative_tokens,
        "seed": args.seed,
    }
    before = skip_layers.read(args.json, asked) if args.resume and args.json.exists() else []
    spec = SpecConfig(DRAFTER, args.num_speculative_tokens)
    measure = skip_layers.measure_on(
        llm.target, config, spec, [encode(llm, prompt) for prompt in prompts], args.max_tokens
    )
    trials = args.trials or 2 * layers
    done: list[skip_layers.Trial] = []
    for trial in skip_layers.search(layers, trials, args.seed, skip_layers.remembered(measure, before)):
        done.append(trial)
        if len(done) > len(before):
            skip_layers.write(args.json, asked, done)
        print(
            f"{len(done)}/{trials} without {trial.skip_layers}: {trial.tokens_per_step:.2f} tokens a step with "
            f"{trial.num_speculative_tokens} drafted, expected speed-up {trial.speedup:.3f}",
            file=sys.stderr,
        )
    best = max(done, key=lambda trial: trial.speedup)
    print(
        f"best: skip_layers {best.skip_layers}, num_speculative_tokens {best.num_speculative_tokens}: "
        f"{best.tokens_per_step:.2f} tokens a step, expected speed-up {best.speedup:.3f} ({args.json})"
    )
    return 0
