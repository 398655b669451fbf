"""The drafters' pages say what the code does: every drafter, every setting, and an example that runs."""

from __future__ import annotations

import argparse
import dataclasses
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider.cli.main import _parser
from outrider.core.config import EngineConfig, SpecConfig
from outrider.core.params import SamplingParams, SpecParams
from outrider.core.settings import bounds_of
from outrider.spec import registry
from outrider.spec.draws import draft_pick_for
from outrider.spec.proposer import DraftContext, Proposer
from outrider.spec.registry import DRAFTERS, DrafterKind, build_proposer, spec_from_mapping
from tests.engine.harness import assert_same, greedy, make_engine, plain, prompt_of, run_all, toy_target

DOCS = Path(__file__).parent.parent / "docs"
INDEX = DOCS / "drafters.md"
PAGES = {file.stem: file for file in (DOCS / "drafters").glob("*.md")}
PARTS = ("**Idea.**", "**Source.**", "**Settings.**", "**When it pays.**", "**Cost.**")
SETTINGS = [SpecConfig, EngineConfig, SamplingParams, SpecParams, *(kind.settings for kind in DRAFTERS.values())]
# Names with an underscore that are no settings: calls, files, and what checkpoints' configs hold.
OTHER = {name for name in dir(Proposer) if "_" in name} | {draft_pick_for.__name__}
OTHER |= {file.stem for file in (DOCS.parent / "benchmarks").glob("*.py")}
OTHER |= {"self_", "modeling_llama_kv", "eagle_aux_hidden_state_layer_ids"}
OTHER |= {"input_layernorm", "self_attn"}
ALIASES = {alias for kind in DRAFTERS.values() for alias in kind.aliases}


def table(text: str) -> list[list[str]]:
    """The cells of the settings table: name, default, allowed, meaning."""
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in text.splitlines() if line[:1] == "|"]
    start = next((i for i, row in enumerate(rows) if row[:3] == ["setting", "default", "allowed"]), None)
    return [] if start is None else rows[start + 2 :]


def wanted_table(settings: type) -> list[list[str]]:
    """What the table should say of each setting's name, default and limits."""
    return [[f"`{f.name}`", default_of(f), allowed_of(f)] for f in dataclasses.fields(settings) if f.name != "options"]


def default_of(f: dataclasses.Field[Any]) -> str:
    if f.default is dataclasses.MISSING:
        return "required"
    if isinstance(f.default, bool):
        return str(f.default).lower()
    if isinstance(f.default, tuple):
        return ", ".join(f.default)
    return {None: "not set", "": "empty"}.get(f.default, str(f.default))


def allowed_of(f: dataclasses.Field[Any]) -> str:
    bounds, kind = bounds_of(f), str(f.type)
    if bounds.choices:
        return ", ".join(bounds.choices)
    if bounds.low is not None:
        return f"at least {bounds.low}" if bounds.high is None else f"{bounds.low} to {bounds.high}"
    return {"bool": "true, false", "str": "a text"}.get(kind, "a list")


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_has_a_page_with_its_settings(name: str) -> None:
    assert f"(drafters/{name}.md)" in INDEX.read_text()
    text = PAGES[name].read_text()
    assert text.startswith(f"# {name}\n")
    places = [text.find(part) for part in PARTS]
    assert places[0] > 0
    assert places == sorted(places)
    assert [row[:3] for row in table(text)] == wanted_table(DRAFTERS[name].settings)
    for alias in DRAFTERS[name].aliases:
        assert f"`{alias}`" in text


def test_the_shared_settings_are_listed_and_no_page_is_left_over() -> None:
    assert [row[:3] for row in table(INDEX.read_text())] == wanted_table(SpecConfig)
    assert PAGES.keys() == DRAFTERS.keys()


def flags_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                yield from flags_of(sub)


@pytest.mark.parametrize("file", [INDEX, *PAGES.values()], ids=lambda file: file.stem)
def test_every_setting_and_flag_that_is_mentioned_exists(file: Path) -> None:
    text = re.sub(r"```.*?```", "", file.read_text(), flags=re.DOTALL)
    known = {f.name for cls in SETTINGS for f in dataclasses.fields(cls)} | OTHER | ALIASES
    mentioned = {
        word for code in re.findall(r"`([^`]+)`", text) for word in re.findall(r"\b[a-z0-9]+_[a-z0-9_]*", code)
    }
    mentioned |= set(re.findall(r'"([a-z0-9]+_[a-z0-9_]*)"', text))
    assert mentioned - known == set()
    assert set(re.findall(r"(?<![\w`-])`?(--[a-z][a-z-]*[a-z])", text)) - set(flags_of(_parser())) == set()


def test_a_setting_that_is_not_there_is_noticed(tmp_path: Path) -> None:
    """The control of the test above."""
    page = tmp_path / "page.md"
    for wrong in ("`prompt_lookup_most`", "`--prompt-lookup-most`", '{"prompt_lookup_most": 3}', "x --no-such-flag 3"):
        page.write_text(f"Use {wrong}.")
        with pytest.raises(AssertionError):
            test_every_setting_and_flag_that_is_mentioned_exists(page)


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """The drafter of the page, as the file that a reader would make of it."""
    (code,) = (code for code in re.findall(r"```python\n(.*?)```", INDEX.read_text(), re.DOTALL) if "import" in code)
    file = tmp_path / "last_seen.py"
    file.write_text(code)
    return file


def test_the_example_drafts_and_leaves_the_output_alone(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Listed by the line that the page gives, it is a drafter like any other."""
    module = argparse.Namespace(**runpy.run_path(str(example)))
    (line,) = re.findall(r"```python\n    \"last-seen\": (.*?),\n```", INDEX.read_text())
    kind = eval(line, {"DrafterKind": DrafterKind, "last_seen": module})
    monkeypatch.setattr(registry, "DRAFTERS", {**DRAFTERS, "last-seen": kind})
    target = toy_target(seed=1)
    spec = spec_from_mapping({"method": "last-seen", "last_seen_window": 50})
    jobs = [(prompt_of(8, seed), greedy(20)) for seed in range(4)]
    outputs = run_all(make_engine(target, build_proposer(spec, DraftContext(target, spec))), jobs)
    for job, output in zip(jobs, outputs, strict=True):
        assert_same(output, plain(target, *job))
    assert sum(output.stats.accepted for output in outputs) > 0


@pytest.mark.model
def test_the_example_runs_as_it_stands(
    example: Path, smollm2_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code = example.read_text()
    assert code.count('LLM("smollm2")') == 1
    example.write_text(code.replace('LLM("smollm2")', f"LLM({str(smollm2_path)!r}, kv_cache_mib=64)"))
    runpy.run_path(str(example), run_name="__main__")
    assert float(capsys.readouterr().out.split()[-1]) > 1
