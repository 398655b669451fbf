"""The cost model: the table's lines, what it learns, and the file it is kept in."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outrider.core.types import Span
from outrider.models.decoder import Decoder
from outrider.models.load import LoadStep
from outrider.runtime.runner import Runner
from outrider.spec import warmup
from outrider.spec.costs import Costs, CostTable, Line
from tests.spec.simulator import cpu_pass, table_of
from tests.toy import toy_model

TABLE = CostTable((1, 2, 4), (1.0, 2.0, 3.0), 0.01, 0.02)


def test_the_table_goes_in_straight_lines() -> None:
    assert [TABLE.at(n) for n in (0, 1, 1.5, 2, 3, 4, 6)] == [1.0, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0]
    assert CostTable((1,), (2.0,)).at(9) == 2.0


def test_context_is_paid_by_sequence_and_by_row() -> None:
    """Four rows of one sequence of 100 tokens read its KV once, those of four sequences read four."""
    costs = Costs(TABLE)
    assert costs.forward(4, 100, 400) == pytest.approx(3.0 + 1.0 + 8.0)
    assert costs.forward(4, 400, 400) == pytest.approx(3.0 + 4.0 + 8.0)
    assert costs.per_seen == 0.02
    assert list(costs.curve(3)[:4]) == pytest.approx([1.0, 1.0, 2.0, 2.5]), "the curve is without context"


def test_it_learns_a_slow_hour_and_one_number_of_rows() -> None:
    """All passes take three times as long as measured; passes of eight rows half as long again."""
    costs, source = Costs(table_of(cpu_pass)), random.Random(0)
    for _ in range(3000):
        rows = source.choice((1, 3, 8))
        factor = 3.0 * (1.5 if rows == 8 else 1.0) * source.gauss(1, 0.05)
        costs.observe(rows, 64, 64 * rows, cpu_pass(rows) * factor, 1e-4)
    for rows, factor in ((1, 3.0), (3, 3.0), (8, 4.5)):
        assert costs.forward(rows, 64, 64) == pytest.approx(cpu_pass(rows) * factor, rel=0.05)
        assert costs.curve(rows)[rows] == pytest.approx(cpu_pass(rows) * factor + 1e-4, rel=0.06)


@pytest.mark.parametrize("weight", [0.5, 1.0, 2.5])
@pytest.mark.parametrize("n", [1, 8])
def test_it_learns_what_context_costs_and_a_change_of_speed_does_not_confuse_it(weight: float, n: int) -> None:
    table = CostTable(table_of(cpu_pass).rows, table_of(cpu_pass).seconds, 6e-7, 6e-7)
    costs, source, speed = Costs(table), random.Random(0), 1.0
    contexts = [200] * n
    for step in range(4000):
        if source.random() < n / 60:
            contexts[source.randrange(n)] = source.choice((50, 100, 300, 700, 900))
        if step % 500 == 0:
            speed = source.choice((1.0, 1.5, 2.0))
        drafts, read = source.choice((0, 0, 1, 2, 4)), sum(contexts)
        seen = read + drafts * contexts[0]
        seconds = cpu_pass(n + drafts) + weight * 6e-7 * (read + seen)
        costs.observe(n + drafts, read, seen, speed * seconds * source.gauss(1, 0.1), 1e-4)
    assert costs.weight == pytest.approx(weight, rel=0.25)
    assert costs.corrections == pytest.approx([1.0] * len(costs.corrections), abs=0.1)
    expected = speed * (cpu_pass(n + 4) + weight * 6e-7 * (5000 + 9000))
    assert costs.forward(n + 4, 5000, 9000) == pytest.approx(expected, rel=0.15)


def test_steps_that_are_late_now_and_then_move_no_correction() -> None:
    """Most plain steps are a little faster than their mean, a few are twice as slow."""
    costs, source = Costs(table_of(cpu_pass)), random.Random(0)
    for _ in range(5000):
        costs.observe(1, 64, 64, cpu_pass(1) * (2.0 if source.random() < 0.1 else 0.9), 1e-4)
    assert costs.corrections[0] == pytest.approx(1.0, abs=0.1)
    assert costs.forward(3, 64, 192) == pytest.approx(cpu_pass(3) * 1.01, rel=0.15)


def test_a_slow_hour_that_is_only_seen_with_drafts_is_not_blamed_on_them() -> None:
    costs = Costs(table_of(cpu_pass))
    for _ in range(300):
        costs.observe(8, 64, 512, cpu_pass(8) * 2, 0.0)
    assert costs.forward(8, 64, 512) == pytest.approx(cpu_pass(8) * 2, rel=0.02)
    assert costs.forward(1, 64, 64) == pytest.approx(cpu_pass(1) * 2, rel=0.2), "plain steps were slower too"


def test_a_paused_process_does_not_count_for_much() -> None:
    costs = Costs(table_of(cpu_pass))
    for _ in range(50):
        costs.observe(1, 64, 64, cpu_pass(1), 1e-4)
    before = costs.curve(1)[1]
    costs.observe(1, 64, 64, 60.0, 60.0)
    assert costs.forward(1, 64, 64) < 1.2 * before


def test_a_line_tells_what_a_call_costs_from_what_a_row_costs() -> None:
    line, source = Line(100), random.Random(0)
    for _ in range(500):
        x = source.choice((2, 3, 5))
        line.add(x, 2.0 + 0.5 * x)
    assert (line.base, line.slope) == pytest.approx((2.0, 0.5), abs=0.35)
    assert line.at(4) == pytest.approx(4.0, abs=0.1)
    constant = Line(100)
    for _ in range(50):
        constant.add(4, 2.0)
    assert (constant.base, constant.slope) == pytest.approx((0.0, 0.5)), "no spread: in proportion"


def test_a_clock_that_went_backwards_spoils_no_line() -> None:
    line = Line(100)
    for y in (2.0, -1e9, *[2.0] * 500):
        line.add(1, y)
    assert line.at(1) == pytest.approx(2.0, rel=0.05)


def test_two_timings_that_differ_are_not_steady() -> None:
    assert not warmup._steady([[1.0, 10.0]] * 25)
    assert warmup._steady([[1.0, 1.1]] * 25)
    assert not warmup._steady([[1.0]] * 25), "nor is one"


@pytest.fixture
def toy() -> tuple[object, Runner]:
    model = toy_model()
    return model, Runner(model.decoder, 64, 4)


def test_measuring_takes_every_number_of_rows_and_stops_in_time(toy: tuple[object, Runner]) -> None:
    """With a scripted clock: a row, a token of KV and a token that a row sees have a price; one pass is disturbed."""
    _, runner = toy
    now, told = [0.0], []
    real = runner.forward

    def forward(spans, layers=()):  # type: ignore[no-untyped-def]
        rows, read = sum(span.n_rows for span in spans), sum(len(span.seq) for span in spans)
        seen = sum(span.n_rows * len(span.seq) for span in spans)
        now[0] += 1e-4 * rows + 1e-6 * read + 2e-6 * seen + (5.0 if len(told) == 30 else 0.0)
        return real(spans, layers)

    runner.forward = forward  # type: ignore[method-assign]
    table, _ = warmup.measure(runner, 256, lambda done, of: told.append((done, of)), lambda: now[0])
    assert table.rows == warmup.ROWS
    assert table.seconds == pytest.approx([1e-4 * n for n in table.rows])
    assert (table.per_read, table.per_seen) == pytest.approx((1e-6, 2e-6))
    assert told[-1][0] == told[-1][1]
    now[0], runner.forward = 0.0, lambda spans, layers=(): now.__setitem__(0, now[0] + 10.0)  # type: ignore
    slow, steady = warmup.measure(runner, 256, lambda done, of: None, lambda: now[0])
    assert not steady, "once is no proof"
    assert slow.rows == warmup.ROWS[: warmup.FEWEST], "a slow model is measured at few numbers of rows"


def test_passes_are_timed_among_those_of_one_row_as_steps_come(toy: tuple[object, Runner]) -> None:
    """On a processor whose clock goes down with the rows of the passes before."""
    _, runner = toy
    now, heat = [0.0], [0.0]

    def forward(spans: list[Span], layers: tuple[int, ...] = ()) -> None:
        rows = sum(span.n_rows for span in spans)
        now[0] += 1e-4 * (8 + rows) * (1 + 0.02 * heat[0])
        heat[0] = 0.7 * heat[0] + 0.3 * rows

    runner.forward = forward  # type: ignore[method-assign, assignment]
    table, _ = warmup.measure(runner, 256, lambda done, of: None, lambda: now[0])
    costs, context = Costs(table), warmup.CONTEXTS[0]
    for rows in (1, 4, 8):
        told = costs.forward(rows, context, rows * context)
        assert told == pytest.approx(1e-4 * (8 + rows) * (1 + 0.02 * 2), rel=0.03)
    for rows in (10, 12, 16, 24):
        told = costs.forward(rows, context, rows * context)
        assert told == pytest.approx(1e-4 * (8 + rows) * (1 + 0.02 * 2), rel=0.15), "after a wide one 1.4 times as much"


@pytest.mark.parametrize("seconds", [1e-3, 4e-3, 1e-2])
def test_a_model_of_ten_milliseconds_a_pass_is_timed_twice_at_every_number_of_rows(
    toy: tuple[object, Runner], seconds: float
) -> None:
    _, runner = toy
    now, times = [0.0], Counter[tuple[int, int, int]]()

    def forward(spans: list[Span], layers: tuple[int, ...] = ()) -> None:
        rows = sum(span.n_rows for span in spans)
        now[0] += seconds * (1 + 0.06 * rows)
        times[len(spans), rows, len(spans[0].seq)] += 1

    runner.forward = forward  # type: ignore[method-assign, assignment]
    table, steady = warmup.measure(runner, 256, lambda done, of: None, lambda: now[0])
    assert steady, "then it is kept"
    assert table.rows == warmup.ROWS
    assert min(times.values()) >= 2


@pytest.mark.parametrize(("by_sequence", "by_row"), [(3.0, 1.0), (0.0, 2.0), (2.0, 0.0)])
def test_context_costs_are_told_apart_and_never_negative(by_sequence: float, by_row: float) -> None:
    added = {(n, rows): by_sequence * n + by_row * n * rows for n, rows in warmup.LONG}
    assert warmup._context_costs(added) == pytest.approx((by_sequence, by_row), abs=1e-9)
    falling = {(n, rows): (5.0 - rows / 8) * n for n, rows in warmup.LONG}
    assert all(cost >= 0 for cost in warmup._context_costs(falling))
    assert warmup._context_costs({}) == (0.0, 0.0)
    assert warmup._context_costs({(1, 1): 2.0}) == pytest.approx((0.0, 2.0))


def test_the_table_is_kept_and_damaged_files_are_not_believed(
    toy: tuple[object, Runner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, runner = toy
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr(warmup, "_steady", lambda times: True)
    steps: list[LoadStep] = []
    table = warmup.cost_table(model, runner, 256, steps.append)  # type: ignore[arg-type]
    assert steps[-1].layer == steps[-1].layers > 0
    (file,) = (tmp_path / "costs").iterdir()
    monkeypatch.setattr(warmup, "measure", lambda *_: pytest.fail("it was measured twice"))
    assert warmup.cost_table(model, runner, 256) == table  # type: ignore[arg-type]
    monkeypatch.setattr(warmup, "measure", lambda *_: (TABLE, True))
    good = json.loads(file.read_text())
    for damage in (
        "",
        "[]",
        json.dumps({**good, "seconds": [0] * len(good["rows"])}),
        json.dumps({"key": good["key"]}),
    ):
        file.write_text(damage)
        caplog.clear()
        assert warmup.cost_table(model, runner, 256) == TABLE  # type: ignore[arg-type]
        assert "measured anew" in caplog.text
    other = Runner(model.decoder, 64, 4, "int8")  # type: ignore[attr-defined]
    warmup.cost_table(model, other, 256)  # type: ignore[arg-type]
    assert len(list((tmp_path / "costs").iterdir())) == 2, "another way to store KV has other costs"
    alike = Runner(model.decoder, 64, 4)  # type: ignore[attr-defined]
    alike.kv_cache_dtype = "another name of the same"
    warmup.cost_table(model, alike, 256)  # type: ignore[arg-type]
    assert len(list((tmp_path / "costs").iterdir())) == 2
    monkeypatch.setattr(Decoder, "kv_dtype", torch.bfloat16)  # "auto" comes to mean another type
    warmup.cost_table(model, Runner(model.decoder, 64, 4), 256)  # type: ignore[arg-type, attr-defined]
    assert len(list((tmp_path / "costs").iterdir())) == 3, "the type counts, not what it was called"


def test_a_busy_machine_spoils_little_and_is_not_remembered(
    toy: tuple[object, Runner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes of one number of rows are disturbed every time, the others in most rounds, each time otherwise."""
    model, runner = toy
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    now, calls, source = [0.0], itertools.count(), random.Random(0)

    def forward(spans: list[Span], layers: tuple[int, ...] = ()) -> None:
        rows = sum(span.n_rows for span in spans)
        disturbed = rows == 5 or next(calls) % 5
        now[0] += 1e-4 * rows * (source.uniform(1, 5) if disturbed else 1) * (4 if rows == 5 else 1)

    monkeypatch.setattr(runner, "forward", forward)
    table, steady = warmup.measure(runner, 256, lambda done, of: None, lambda: now[0])
    assert not steady
    five, six = (table.seconds[table.rows.index(rows)] for rows in (5, 6))
    assert five < 1.5 * six, "it is no dearer than a wider one"
    monkeypatch.setattr(warmup, "measure", lambda *_: (table, False))
    assert warmup.cost_table(model, runner, 256) == table  # type: ignore[arg-type]
    assert not (tmp_path / "costs").exists()


def test_what_was_just_seen_counts_in_whatever_is_asked() -> None:
    for ask in (
        lambda costs: costs.forward(1, 64, 64),
        lambda costs: costs.per_seen,
        lambda costs: costs.context(64, 64),
        lambda costs: costs.curve(1)[1],
    ):
        table = replace(table_of(cpu_pass), per_read=1e-9, per_seen=1e-9)
        fresh, seen = Costs(table), Costs(table)
        seen.observe(1, 64, 64, 2 * fresh.forward(1, 64, 64), 0.0)
        assert ask(seen) == pytest.approx(2 * ask(fresh), rel=0.01)
