"""Rows from records made by hand, the table and the file."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path

import pytest

from outrider import SettingError
from outrider.bench.harness import Record, Setting
from outrider.bench.report import Row, check_same_run, read, rows_of, table, write

PLAIN, DRAFTED = Setting("none", 0, 1), Setting("ngram", 2, 1)
SETTINGS = [PLAIN, DRAFTED]
FIELDS = [
    "drafter",
    "gamma",
    "batch",
    "category",
    "prompts",
    "tokens",
    "seconds",
    "prefill_seconds",
    "tokens_per_second",
    "decode_tokens_per_second",
    "tokens_per_step",
    "acceptance_rate",
    "speedup",
    "identical",
]


def record(setting: Setting, load: int, category: str, seconds: float, decode_s: float, steps: int) -> Record:
    """20 tokens, one of them from the prefill; 10 drafted."""
    drafted = 0 if setting is PLAIN else 10
    return Record(
        setting, load, category, (load,), 20, 19, seconds, decode_s, steps, drafted, 20 - steps, 0, (f"text {load}",)
    )


RECORDS = [
    record(PLAIN, 0, "a", seconds=3.0, decode_s=1.0, steps=20),
    record(DRAFTED, 0, "a", seconds=2.5, decode_s=0.5, steps=16),
    record(PLAIN, 1, "b", seconds=5.0, decode_s=4.0, steps=20),
    record(DRAFTED, 1, "b", seconds=9.0, decode_s=8.0, steps=18),
]


def test_the_fields_are_exactly_these() -> None:
    assert [f.name for f in dataclasses.fields(Row)] == FIELDS


def test_sums_come_before_ratios() -> None:
    rows, (plain, drafted) = rows_of(RECORDS, SETTINGS)
    assert [(row.drafter, row.category) for row in rows] == [
        ("none", "a"),
        ("none", "b"),
        ("ngram", "a"),
        ("ngram", "b"),
    ]
    assert [row.speedup for row in rows] == [1.0, 1.0, 2.0, 0.5]
    assert (plain.category, plain.gamma, plain.prompts, plain.tokens) == ("all", 0, 2, 40)
    assert (plain.tokens_per_step, plain.acceptance_rate, plain.speedup) == (1.0, 0.0, 1.0)
    assert drafted.seconds == 11.5
    assert drafted.prefill_seconds == 3.0
    assert drafted.tokens_per_second == 40 / 11.5
    assert drafted.decode_tokens_per_second == 38 / 8.5
    assert drafted.tokens_per_step == 40 / 34
    assert drafted.acceptance_rate == 6 / 20
    assert drafted.speedup == (38 / 8.5) / (38 / 5.0)  # not the mean of 2.0 and 0.5
    assert drafted.identical


def test_one_other_text_is_not_identical() -> None:
    other = replace(RECORDS[3], outputs=("another",))
    rows, overall = rows_of([*RECORDS[:3], other], SETTINGS)
    assert [row.identical for row in rows] == [True, True, True, False]
    assert [row.identical for row in overall] == [True, False]


def test_a_load_counts_once_every_setting_has_answered_it() -> None:
    rows, overall = rows_of(RECORDS[:3], SETTINGS)
    assert {row.category for row in rows} == {"a"}
    assert [row.prompts for row in overall] == [1, 1]
    assert rows_of(RECORDS[:1], SETTINGS) == ([], [])


def test_each_batch_size_has_its_own_baseline() -> None:
    big = [replace(r, setting=replace(r.setting, batch=8), decode_seconds=r.decode_seconds / 4) for r in RECORDS[:1]]
    big.append(replace(RECORDS[1], setting=replace(DRAFTED, batch=8), outputs=("another",)))
    _, overall = rows_of(RECORDS + big, [*SETTINGS, *(replace(s, batch=8) for s in SETTINGS)])
    assert [(row.batch, row.identical) for row in overall] == [(1, True), (1, True), (8, True), (8, False)]
    assert overall[3].speedup == 0.5


def test_answers_of_one_token_have_no_decode_rate() -> None:
    short = [replace(r, tokens=1, decode_tokens=0, decode_seconds=0.0, steps=1) for r in RECORDS]
    rows, overall = rows_of(short, SETTINGS)
    assert all(row.decode_tokens_per_second is None and row.speedup is None for row in [*rows, *overall])
    assert overall[0].tokens_per_second == 2 / 8
    assert " - " in table(rows, overall)[1]


def test_the_table_has_a_line_a_row() -> None:
    rows, overall = rows_of(RECORDS, SETTINGS)
    lines = table(rows, overall)
    assert len(lines) == 1 + len(rows) + 2 * (1 + 1) + 1 + len(overall)
    assert len({len(line.rsplit("  ", 1)[0]) for line in lines if line}) == 1  # the columns stand
    assert "0.59x  identical" in lines[-1]
    assert table([], []) == ["No load was answered under every setting yet."]


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    write(file, {"date": "today", "threads": 2}, RECORDS, SETTINGS)
    assert read(file) == ({"date": "today", "threads": 2}, RECORDS)
    document = json.loads(file.read_text())
    assert [list(row) for row in document["rows"]] == [FIELDS] * 4
    assert [row["category"] for row in document["overall"]] == ["all", "all"]
    assert list(tmp_path.iterdir()) == [file]


def test_a_write_that_fails_keeps_the_file(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    write(file, {}, RECORDS[:2], SETTINGS)
    (tmp_path / "out.json.part").mkdir()
    with pytest.raises(SettingError, match=r"the result file .* cannot be written"):
        write(file, {}, RECORDS, SETTINGS)
    assert read(file)[1] == RECORDS[:2]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 99}', '{"format": 1, "header": {}, "records": [{}]}'])
def test_another_file_cannot_be_resumed(tmp_path: Path, text: str) -> None:
    file = tmp_path / "out.json"
    file.write_text(text)
    with pytest.raises(SettingError, match="is not a result of outrider bench to resume"):
        read(file)


def test_only_the_same_run_can_be_resumed(tmp_path: Path) -> None:
    header = {"date": "today", "threads": 2, "settings": {"gamma": [1, 2], "batch": [1]}}
    check_same_run(header, {**header, "date": "tomorrow", "settings": {"gamma": (1, 2), "batch": (1,)}}, tmp_path)
    with pytest.raises(SettingError, match=r"its threads is 2, this run's is 1"):
        check_same_run(header, {**header, "threads": 1}, tmp_path)
    with pytest.raises(SettingError, match=r"its settings\.gamma is \[1, 2\], this run's is \[1\]"):
        check_same_run(header, {**header, "settings": {"gamma": [1], "batch": [1]}}, tmp_path)
