"""Measures once what forward passes cost on this machine, and keeps the table on disk for the next time."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from outrider.core.draft import Draft
from outrider.core.params import SamplingParams, SpecParams
from outrider.core.types import Sequence as Seq
from outrider.core.types import Span
from outrider.core.version import __version__
from outrider.models.load import LoadedModel, LoadStep, Progress
from outrider.models.pull import cache_dir
from outrider.runtime.runner import Runner
from outrider.spec.costs import CostTable

logger = logging.getLogger("outrider")

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 15, 16, 17, 20, 24, 32, 48, 64)
"""Numbers of rows that are measured; kernels change their ways around the multiples of 16."""
FEW_ROWS = (1, 4, 16, 64)
"""Those that are measured at a long context too: what a token of context adds is smooth in the rows."""
CONTEXTS = (64, 1024)
ROUNDS = 5
PATIENCE = 1.6
"""Seconds after which no further pass is timed, once each number of rows was (or, for a slow model, a few were)."""
STEADY = 1.15
"""Of the two shortest times of a pass one may be so many times the other where nothing else keeps the machine busy."""
BUMP = 1.1
"""So many times as dear as a pass of more rows may a pass be: at the edges of a kernel's tiles it is."""


def cost_table(target: LoadedModel, runner: Runner, slots: int, progress: Progress | None = None) -> CostTable:
    """The table for this model, these formats and this machine: the kept one, or one measured now and kept.

    ``slots`` are the tokens that the runner's KV pool holds.
    Measuring writes into the KV pool: no sequence may have blocks yet. It takes less than two seconds, or some passes
    of a model that is slower than that.
    """
    key = _key(target, runner)
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    path = cache_dir() / "costs" / f"{digest}.json"
    kept = _read(path, key)
    if kept is not None:
        return kept

    def tell(done: int, of: int) -> None:
        if progress is not None:
            progress(LoadStep(f"timing {target.name}", done, of, "pass"))

    table, steady = measure(runner, slots, tell)
    if steady:
        _write(path, key, table)
    else:
        logger.info("the machine is busy: costs were measured, but not kept")
    return table


def measure(
    runner: Runner, slots: int, tell: Callable[[int, int], None], clock: Callable[[], float] = time.perf_counter
) -> tuple[CostTable, bool]:
    """Times passes of one sequence, number of rows by number of rows, several rounds; and whether they agreed.

    What disturbs a pass only ever makes it longer. So its figure is its shortest time, and no greater than that of a
    pass of more rows.
    """
    short, long = (min(c, runner.decoder.config.max_position - ROWS[-1], slots - ROWS[-1]) for c in CONTEXTS)
    short = max(short, 1)
    pairs = [(rows, short) for rows in ROWS] + [(rows, long) for rows in FEW_ROWS if long > 2 * short]
    pairs = [(rows, context) for rows, context in pairs if context + rows <= slots]
    times: dict[tuple[int, int], list[float]] = {}
    begin = clock()
    runner.forward([_span(runner, *pairs[0])])  # the first pass of all is slow
    for n in range(ROUNDS):
        for i, pair in enumerate(pairs):
            if clock() - begin > PATIENCE and (n or len(times) >= len(FEW_ROWS)):
                break
            before = clock()
            runner.forward([_span(runner, *pair)])
            _finish(runner)
            times.setdefault(pair, []).append(clock() - before)
            tell(n * len(pairs) + i + 1, ROUNDS * len(pairs))
    tell(ROUNDS * len(pairs), ROUNDS * len(pairs))
    return _table({pair: min(own) for pair, own in times.items()}, short, long), _steady(list(times.values()))


def _steady(times: Sequence[Sequence[float]]) -> bool:
    """Whether most passes were timed twice with about the same outcome."""
    agreeing = [own for own in map(sorted, times) if len(own) > 1 and own[1] < STEADY * own[0]]
    return 2 * len(agreeing) > len(times)


def _table(seconds: dict[tuple[int, int], float], short: int, long: int) -> CostTable:
    rows = tuple(n for n in ROWS if (n, short) in seconds)
    both = [n for n in FEW_ROWS if (n, short) in seconds and (n, long) in seconds and long > short]
    slopes = [max(0.0, seconds[n, long] - seconds[n, short]) / (long - short) for n in both]
    per_token = CostTable(tuple(both), tuple(slopes), (0.0,) * len(both), 0) if both else None
    rising = [seconds[n, short] for n in rows]
    for i in range(len(rows) - 2, -1, -1):
        rising[i] = min(rising[i], BUMP * rising[i + 1])
    return CostTable(
        rows=rows,
        seconds=tuple(rising),
        per_token=tuple(per_token.at(n, 0) if per_token else 0.0 for n in rows),
        context=short,
    )


def _span(runner: Runner, rows: int, context: int) -> Span:
    """One sequence of ``context`` tokens whose newest one is computed with ``rows`` - 1 draft rows."""
    blocks = -(-(context + rows) // runner.block_size)
    seq = Seq(
        id=-1,
        tokens=[0] * context,
        n_prompt=context,
        params=SamplingParams(),
        spec=SpecParams(),
        seed=0,
        blocks=list(range(blocks)),
    )
    return Span(seq, context - 1, 1, rows - 1, Draft.chain([0] * (rows - 1)))


def _finish(runner: Runner) -> None:
    if runner.decoder.device.type == "cuda":
        torch.cuda.synchronize(runner.decoder.device)


def _key(target: LoadedModel, runner: Runner) -> dict[str, Any]:
    """What the times depend on. Two models of the same shape and formats cost the same."""
    decoder = runner.decoder
    shape = {k: str(v) for k, v in dataclasses.asdict(target.config).items() if k != "eos_ids"}
    device = str(decoder.device)
    return {
        "outrider": __version__,
        "model": shape,
        "weight_bytes": decoder.weight_bytes,
        "dtype": str(decoder.dtype),
        "kv": runner.kv_cache_dtype,
        "ops": decoder.ops.describe(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(decoder.device) if device != "cpu" else device,
        "machine": [platform.machine(), _processor(), os.cpu_count()],
        "rows": list(ROWS),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


def _read(path: Path, key: dict[str, Any]) -> CostTable | None:
    """The kept table, or None where there is none that can be used."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["key"] != key:
            return None
        rows, seconds, per_token = (tuple(document[name]) for name in ("rows", "seconds", "per_token"))
        sound = len(rows) == len(seconds) == len(per_token) and rows[0] == 1 and min(seconds) > 0
        if not sound or not all(isinstance(x, (int, float)) and 0 <= x < 1e6 for x in (*seconds, *per_token)):
            raise ValueError("its numbers make no sense")
        return CostTable(rows, seconds, per_token, int(document["context"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        logger.warning("%s cannot be read: %s; the costs are measured anew", path, error)
        return None


def _write(path: Path, key: dict[str, Any], table: CostTable) -> None:
    """Keeps a table; where that cannot be, it is measured again the next time."""
    scratch = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(json.dumps({"key": key, **dataclasses.asdict(table)}) + "\n", encoding="utf-8")
        os.replace(scratch, path)
    except OSError as error:
        logger.warning("measured costs cannot be kept in %s: %s", path.parent, error.strerror or error)
