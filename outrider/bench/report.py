"""What a benchmark found: rows from raw records, the table, the JSON file. ``docs/bench.md`` defines every field."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.bench.harness import AUTO, Record, Setting
from outrider.core.errors import SettingError

FORMAT = 1
"""Version of the file's layout."""

ALL = "all"
"""Stands in place of a category where a row is about all of them."""


@dataclass(frozen=True)
class Row:
    """One setting on one category. A rate that nothing was measured for is None."""

    drafter: str
    gamma: int
    batch: int
    category: str
    prompts: int
    tokens: int
    seconds: float
    prefill_seconds: float
    tokens_per_second: float | None
    decode_tokens_per_second: float | None
    tokens_per_step: float | None
    acceptance_rate: float
    speedup: float | None
    identical: bool


def rows_of(records: Iterable[Record], settings: Sequence[Setting]) -> tuple[list[Row], list[Row]]:
    """Rows by setting and category, and by setting over all categories.

    A load counts once every setting of its batch size has answered it, so that all are compared on the same work.
    """
    by_load: dict[tuple[int, int], dict[Setting, Record]] = {}
    for record in records:
        by_load.setdefault((record.setting.batch, record.load), {})[record.setting] = record
    wanted = {batch: {s for s in settings if s.batch == batch} for batch in {s.batch for s in settings}}
    complete = [by_load[key] for key in sorted(by_load) if by_load[key].keys() >= wanted[key[0]]]
    rows, overall = [], []
    for setting in settings:
        loads = [load for load in complete if setting in load]
        for category in dict.fromkeys(load[setting].category for load in loads):
            rows.append(_row(setting, category, [load for load in loads if load[setting].category == category]))
        if loads:
            overall.append(_row(setting, ALL, loads))
    return rows, overall


def _row(setting: Setting, category: str, loads: Sequence[Mapping[Setting, Record]]) -> Row:
    """One setting over loads that all of its batch size's settings have answered."""
    records = [load[setting] for load in loads]
    plain = [next(record for other, record in load.items() if other.plain) for load in loads]
    seconds, decode_seconds = sum(r.seconds for r in records), sum(r.decode_seconds for r in records)
    tokens, drafted = sum(r.tokens for r in records), sum(r.drafted for r in records)
    rate, plain_rate = _decode_rate(records), _decode_rate(plain)
    return Row(
        drafter=setting.drafter,
        gamma=setting.gamma,
        batch=setting.batch,
        category=category,
        prompts=sum(len(r.prompts) for r in records),
        tokens=tokens,
        seconds=seconds,
        prefill_seconds=seconds - decode_seconds,
        tokens_per_second=_ratio(tokens, seconds),
        decode_tokens_per_second=rate,
        tokens_per_step=_ratio(tokens, sum(r.steps for r in records)),
        acceptance_rate=sum(r.accepted for r in records) / drafted if drafted else 0.0,
        speedup=None if rate is None or plain_rate is None else rate / plain_rate,
        identical=all(r.outputs == p.outputs for r, p in zip(records, plain, strict=True)),
    )


def _decode_rate(records: Sequence[Record]) -> float | None:
    return _ratio(sum(r.decode_tokens for r in records), sum(r.decode_seconds for r in records))


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if part > 0 and whole > 0 else None


def table(rows: Sequence[Row], overall: Sequence[Row]) -> list[str]:
    """Lines of text: by setting its categories, then all; the last lines compare the settings over all."""
    if not overall:
        return ["No load was answered under every setting yet."]
    width = max(len("category"), *(len(row.category) for row in rows))
    drafter = max(len("drafter"), *(len(row.drafter) for row in rows))
    head = (
        f"{'drafter':<{drafter}} {'gamma':>5} {'batch':>5}  {'category':<{width}} {'prompts':>7} {'tokens':>7} "
        f"{'seconds':>8} {'prefill s':>9} {'tok/s':>7} {'decode tok/s':>12} {'tok/step':>8} {'accepted':>8} "
        f"{'speed-up':>8}  output"
    )

    def line(row: Row) -> str:
        return (
            f"{row.drafter:<{drafter}} {_length(row.gamma):>5} {row.batch:>5}  {row.category:<{width}} "
            f"{row.prompts:>7} {row.tokens:>7} {row.seconds:>8.2f} {row.prefill_seconds:>9.2f} "
            f"{_shown(row.tokens_per_second, 7, 1)} {_shown(row.decode_tokens_per_second, 12, 1)} {_shown(row.tokens_per_step, 8, 2)} "
            f"{f'{row.acceptance_rate:.0%}' if row.gamma else '-':>8} {_shown(row.speedup, 7, 2)}"
            f"{' ' if row.speedup is None else 'x'}  {'identical' if row.identical else 'DIFFERS'}"
        )

    lines = [head]
    for whole in overall:
        own = [r for r in rows if (r.drafter, r.gamma, r.batch) == (whole.drafter, whole.gamma, whole.batch)]
        lines += [*(line(row) for row in own), line(whole), ""]
    return [*lines, head, *(line(row) for row in overall)]


def _length(gamma: int) -> str:
    return "auto" if gamma == AUTO else str(gamma or "-")


def _shown(value: float | None, width: int, digits: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.{digits}f}"


def write(file: Path, header: Mapping[str, Any], records: Sequence[Record], settings: Sequence[Setting]) -> None:
    """Writes the whole file anew and puts it in place in one step: a reader never sees half of it."""
    rows, overall = rows_of(records, settings)
    document = {
        "format": FORMAT,
        "header": header,
        "rows": [dataclasses.asdict(row) for row in rows],
        "overall": [dataclasses.asdict(row) for row in overall],
        "records": [dataclasses.asdict(record) for record in records],
    }
    scratch = file.with_name(file.name + ".part")
    try:
        scratch.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        os.replace(scratch, file)
    except OSError as error:
        raise SettingError(f"the result file {file} cannot be written: {error}") from None


def read(file: Path) -> tuple[dict[str, Any], list[Record]]:
    """Header and records of a file that ``write`` wrote."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        if document["format"] != FORMAT:
            raise ValueError(f"its format is {document['format']!r}, not {FORMAT}")
        header, records = document["header"], [_record(values) for values in document["records"]]
    except OSError as error:
        raise SettingError(f"the result file {file} cannot be read: {error}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SettingError(f"{file} is not a result of outrider bench to resume: {error}") from None
    return header, records


def _record(values: Mapping[str, Any]) -> Record:
    lists = {name: tuple(values[name]) for name in ("prompts", "outputs")}
    return Record(**{**values, **lists, "setting": Setting(**values["setting"])})


def check_same_run(before: Mapping[str, Any], now: Mapping[str, Any], file: Path) -> None:
    """Raises SettingError if a run cannot be continued as this one: model, prompts, settings or machine differ."""
    now = json.loads(json.dumps(now))  # as it would be read from a file
    for name in dict.fromkeys((*before, *now)):
        if name != "date" and before.get(name) != now.get(name):
            old, new = before.get(name), now.get(name)
            if isinstance(old, Mapping) and isinstance(new, Mapping):
                inner = next(key for key in (*old, *new) if old.get(key) != new.get(key))
                name, old, new = f"{name}.{inner}", old.get(inner), new.get(inner)
            raise SettingError(f"{file} cannot be resumed: its {name} is {old!r}, this run's is {new!r}")
