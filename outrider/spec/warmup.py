"""Measures once what forward passes cost on this machine, and keeps the table on disk for the next time."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import platform
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median_high, median_low
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
CONTEXTS = (64, 1024)
LONG = ((1, 1), (1, 4), (1, 16), (4, 1), (8, 1), (8, 2))
"""Sequences, and rows of each, that are measured at a long context too: for what it costs by sequence and by row."""
FORMAT = 5
"""Of the kept tables; others are measured anew."""
NARROW = 8
"""Rows that most steps have at most."""
SINGLES = 2
"""Passes of one row before each timed one of a short text, from the second round on: most steps have one."""
ROUNDS = 8
"""Rounds of narrow passes; half as many of wider ones, and three of those with a long context."""
FEWEST = 4
"""Passes that are timed at least, however slow."""
PATIENCE = 1.8
"""Seconds after which no further pass is timed, once the fewest were."""
STEADY = 1.25
"""The median of a pass's times may be so many times the shortest where nothing else keeps the machine busy."""
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
    """Times passes of one sequence by its number of rows, and some of several and long ones, in several rounds; and
    whether they agreed.

    A pass's figure is the median of its times, in rounds of different order: its neighbours' work disturbs a shared
    machine for some passes in a row, and wide passes, which compute more, more than narrow ones. So it is what such a
    pass takes mostly; and no more than a pass of more rows. Passes follow those of one row, as most steps do: after one
    of 16 rows the next, whatever its rows, takes up to a fifth longer, because processors that have computed much turn
    their clock down for a while.
    """
    most = min(runner.decoder.config.max_position, slots) - ROWS[-1]
    short, long = (max(1, min(context, most)) for context in CONTEXTS)
    # Kind by kind: what wide passes and long texts read also takes the weights' place in the cache.
    each = [(1, rows, short) for rows in ROWS if short + rows <= slots]
    narrow, wide = [p for p in each if p[1] <= NARROW], [p for p in each if p[1] > NARROW]
    texts = [(n, rows, long) for n, rows in LONG if long > 2 * short and n * _slots(runner, rows, long) <= slots]
    passes, source = [(which, 0) for which in narrow + wide + texts], random.Random(0)
    # At first two rounds of each: where time runs out, all were timed twice.
    kinds = [narrow, wide, texts]
    for kind in [*kinds, *[narrow] * (ROUNDS - 2), *[wide] * (ROUNDS // 2 - 2), texts]:
        for which in source.sample(kind, len(kind)):
            passes.append((which, 0 if kind is texts else SINGLES))
    times: dict[tuple[int, int, int], list[float]] = {}
    begin = clock()
    runner.forward(_spans(runner, *each[0]))  # the first pass of all is slow
    for i, (which, singles) in enumerate(passes):
        if clock() - begin > PATIENCE and len(times) >= min(FEWEST, len(each)):
            break
        for _ in range(singles):
            runner.forward(_spans(runner, *each[0]))
        _finish(runner)
        before = clock()
        runner.forward(_spans(runner, *which))
        _finish(runner)
        times.setdefault(which, []).append(clock() - before)
        tell(i + 1, len(passes))
    tell(len(passes), len(passes))
    return _table({which: median_low(own) for which, own in times.items()}), _steady(list(times.values()))


def _steady(times: Sequence[Sequence[float]]) -> bool:
    """Whether most passes were timed more than once with about the same outcome."""
    agreeing = [own for own in times if len(own) > 1 and median_high(own) < STEADY * min(own)]
    return 2 * len(agreeing) > len(times)


def _table(seconds: dict[tuple[int, int, int], float]) -> CostTable:
    """From the times by sequences, rows of each, and context."""
    short = next(iter(seconds))[2]
    rows = tuple(rows for n, rows, context in seconds if (n, context) == (1, short))
    rising = [seconds[1, n, short] for n in rows]
    for i in range(len(rows) - 2, -1, -1):
        rising[i] = min(rising[i], BUMP * rising[i + 1])
    bare = CostTable(rows, tuple(rising))
    added = {
        (n, each): (took - bare.at(n * each)) / (context - short)
        for (n, each, context), took in seconds.items()
        if context != short
    }
    per_read, per_seen = _context_costs(added)
    # What is left is without context; it is taken to be the same for as many rows of several sequences.
    left = tuple(
        max(took - short * (per_read + n * per_seen), 0.1 * took) for n, took in zip(rows, rising, strict=True)
    )
    return CostTable(rows, left, per_read, per_seen)


def _context_costs(added: dict[tuple[int, int], float]) -> tuple[float, float]:
    """Of a token of context, the seconds by sequence and by row, neither negative: least squares of the relative errors
    over what was ``added`` by sequences and rows of each."""
    points = [(n / slope, n * each / slope) for (n, each), slope in added.items() if slope > 0]
    nn, nr, rr = (sum(p[i] * p[j] for p in points) for i, j in ((0, 0), (0, 1), (1, 1)))
    n, r = sum(p[0] for p in points), sum(p[1] for p in points)
    if not points:
        return 0.0, 0.0
    by_sequence = (n * rr - r * nr) / (nn * rr - nr * nr) if nn * rr - nr * nr > 1e-9 * nn * rr else -1.0
    by_row = (r - by_sequence * nr) / rr
    if by_sequence < 0:
        return 0.0, r / rr
    return (by_sequence, by_row) if by_row >= 0 else (n / nn, 0.0)


def _slots(runner: Runner, rows: int, context: int) -> int:
    return -(-(context + rows) // runner.block_size) * runner.block_size


def _spans(runner: Runner, n: int, rows: int, context: int) -> list[Span]:
    """``n`` sequences of ``context`` tokens, whose newest ones are computed with ``rows`` - 1 draft rows each."""
    blocks = _slots(runner, rows, context) // runner.block_size
    return [
        Span(
            Seq(
                id=-1 - i,
                tokens=[0] * context,
                n_prompt=context,
                params=SamplingParams(),
                spec=SpecParams(),
                seed=0,
                blocks=list(range(i * blocks, (i + 1) * blocks)),
            ),
            context - 1,
            1,
            rows - 1,
            Draft.chain([0] * (rows - 1)),
        )
        for i in range(n)
    ]


def _finish(runner: Runner) -> None:
    if runner.decoder.device.type == "cuda":
        torch.cuda.synchronize(runner.decoder.device)


def _key(target: LoadedModel, runner: Runner) -> dict[str, Any]:
    """What the times depend on. Two models of the same shape and formats cost the same."""
    decoder = runner.decoder
    shape = {k: str(v) for k, v in dataclasses.asdict(target.config).items() if k != "eos_ids"}
    device = str(decoder.device)
    return {
        "format": FORMAT,
        "outrider": __version__,
        "model": shape,
        "weight_bytes": decoder.weight_bytes,
        "dtype": str(decoder.dtype),
        "kv": str(runner.pool.layers[0].k.dtype),
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
        rows, seconds = tuple(document["rows"]), tuple(document["seconds"])
        per_read, per_seen = document["per_read"], document["per_seen"]
        numbers = (*seconds, per_read, per_seen)
        sound = len(rows) == len(seconds) and rows[0] == 1 and min(seconds) > 0
        if not sound or not all(isinstance(x, (int, float)) and 0 <= x < 1e6 for x in numbers):
            raise ValueError("its numbers make no sense")
        return CostTable(rows, seconds, per_read, per_seen)
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
