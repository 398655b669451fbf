"""``outrider bench``: drafters, draft lengths and batch sizes against plain decoding."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.bench import report
from outrider.bench.harness import AUTO, Record, Setting, check_prompts, loads_for, run_bench, settings_for
from outrider.bench.header import header
from outrider.bench.prompts import QUICK, read_prompts
from outrider.cli import flags
from outrider.cli.progress import LoadLine
from outrider.cli.stats import model_line
from outrider.core.config import MAX_DRAFT, EngineConfig, SpecConfig
from outrider.core.errors import SettingError
from outrider.core.params import SamplingParams
from outrider.core.settings import bounds_of
from outrider.engine.llm import LLM, spec_of
from outrider.spec.registry import PLAIN, kind_of

HELP = "measure drafters, draft lengths and batch sizes against plain decoding"
MAX_BATCH = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = bounds_of(EngineConfig.__dataclass_fields__["model"])
    parser.add_argument("--model", required=True, metavar="MODEL", help=model.help)
    parser.add_argument(
        "--drafters",
        default=SpecConfig.method,
        metavar="A,B",
        help=f"drafters to measure (default {SpecConfig.method}); plain decoding is always run",
    )
    parser.add_argument(
        "--gamma", metavar="N,N", help="draft tokens a step, auto among them (default: each drafter's own)"
    )
    parser.add_argument("--batch", default="1", metavar="N,N", help="requests in flight (default 1)")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="JSON Lines with 'category' and 'turns'")
    parser.add_argument("--limit", type=int, metavar="N", help="this many prompts, spread over the file")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="longest answer (default 128)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, as they come")
    parser.add_argument("--resume", action="store_true", help="go on with what the result file holds")
    flags.add_model_flags(parser, skip=("model", "enable_prefix_caching"))
    flags.add_drafter_flags(parser.add_argument_group("speculation"), skip=("num_speculative_tokens", "speculation"))


def run(args: argparse.Namespace) -> int:
    """Exit code 0, whether or not the outputs are identical: the rows say so."""
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
    names = list(dict.fromkeys([PLAIN, *_names(args.drafters)]))
    gammas = None if args.gamma is None else _lengths(args.gamma)
    batches = _whole_numbers("--batch", args.batch, MAX_BATCH)
    if args.limit is not None and args.limit < 1:
        raise SettingError(f"--limit is {args.limit}; allowed is a whole number >= 1")
    if args.resume and args.json is None:
        raise SettingError("--resume needs --json FILE, the result file to go on with")
    if args.json is not None and (args.json.is_dir() or not args.json.parent.is_dir()):
        raise SettingError(f"--json is {args.json}; allowed is a file in a folder that exists")
    prompts = read_prompts(args.prompts, args.limit) if args.prompts else list(QUICK)[: args.limit]
    specs = flags.spec_mappings(args, names)
    if gammas is not None:
        specs = [{**spec, "num_speculative_tokens": max(*gammas, 1)} for spec in specs]
    lengths = {name: gammas or (spec_of(spec).num_speculative_tokens,) for name, spec in zip(names, specs, strict=True)}
    engine = _engine_settings(args, max(batches))

    print(f"loading {args.model} ...", file=sys.stderr)
    with LoadLine(sys.stderr) as progress:
        llm = LLM(drafter=specs, enable_prefix_caching=False, progress=progress, **engine)
    _check_lengths(llm, lengths)
    check_prompts(llm, prompts, params)
    settings = settings_for(lengths, batches)
    asked = {"drafters": specs, "gamma": gammas and list(gammas), "batch": list(batches), "max_tokens": args.max_tokens}
    head = header(llm, prompts, asked)
    records: list[Record] = []
    if args.resume and args.json.exists():
        before, records = report.read(args.json)
        report.check_same_run(before, head, args.json)
        print(f"resuming: {len(records)} loads are in {args.json}", file=sys.stderr)
        head = before

    total = sum(len(loads_for(prompts, setting.batch)) for setting in settings)

    def done(record: Record) -> None:
        if args.json is not None:
            report.write(args.json, head, records, settings)
        print(_progress(record, len(records), total), file=sys.stderr)

    if args.json is not None:
        report.write(args.json, head, records, settings)
    print(f"{model_line(llm)}; greedy, at most {args.max_tokens} tokens, {len(prompts)} prompts", flush=True)
    try:
        run_bench(llm, prompts, settings, params, records, done)
    finally:
        print("\n".join(report.table(*report.rows_of(records, settings))))
    return 0


def _names(text: str) -> list[str]:
    """The drafters' own names."""
    names = [kind_of(name.strip())[0] for name in text.split(",")]
    if len(set(names)) < len(names):
        raise SettingError(f"--drafters is {text!r}; allowed is each drafter once")
    return names


def _lengths(text: str) -> tuple[int, ...]:
    """Draft lengths of ``--gamma``; "auto" stands for ``AUTO``."""
    parts = [part.strip() for part in text.split(",")]
    fixed = [part for part in parts if part != "auto"]
    if len(parts) - len(fixed) > 1:
        raise SettingError(f"--gamma is {text!r}; allowed is auto once")
    values = iter(_whole_numbers("--gamma", ",".join(fixed), MAX_DRAFT) if fixed else ())
    return tuple(AUTO if part == "auto" else next(values) for part in parts)


def _whole_numbers(flag: str, text: str, high: int) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    values = tuple(int(part) if part.isdecimal() and len(part) < 9 else 0 for part in parts)
    if not all(1 <= value <= high for value in values) or len(set(values)) < len(values):
        raise SettingError(f"{flag} is {text!r}; allowed are different whole numbers from 1 to {high}, with commas")
    return values


def _engine_settings(args: argparse.Namespace, batch: int) -> dict[str, Any]:
    """The engine's flags; there is a seat for every request in flight."""
    engine = flags.engine_values(args)
    seats = engine.setdefault("max_num_seqs", max(batch, EngineConfig.max_num_seqs))
    if seats < batch:
        raise SettingError(f"--max-num-seqs is {seats}; allowed is the largest --batch, {batch}, or more")
    return engine


def _check_lengths(llm: LLM, lengths: Mapping[str, Sequence[int]]) -> None:
    """Raises SettingError where a drafter cannot draft as many tokens as it would be measured with."""
    for name, gammas in lengths.items():
        most = llm.engine.proposers[name].needs.max_nodes
        if most and max(gammas) > most:
            raise SettingError(f"--gamma asks for {max(gammas)}; drafter {name} drafts at most {most} tokens a step")


def _progress(record: Record, number: int, total: int) -> str:
    setting: Setting = record.setting
    words = [f"{number}/{total} {record.category}: {setting.drafter}"]
    if setting.gamma:
        words.append(f"gamma {'auto' if setting.gamma == AUTO else setting.gamma}")
    if setting.batch > 1:
        words.append(f"batch {setting.batch}")
    words.append(f"{record.tokens} tokens in {record.seconds:.2f} s, {record.tokens / record.steps:.2f} per step")
    if record.preemptions:
        words.append(f"{record.preemptions} preemptions (the KV cache is full: raise --kv-cache-mib)")
    return ", ".join(words)
