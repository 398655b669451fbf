"""Prompts for a quick comparison: six kinds of work, written for this project; or a user's own file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from outrider.core.errors import SettingError

_PASSAGE = (
    "The lighthouse at Gull Point was built in 1871 after three ships were lost on the reef in a single winter. Its "
    "first keeper, Maria Lund, lived there with her two sons and kept a diary of every ship that passed. In 1904 the "
    "oil lamp was replaced by an electric light that could be seen from thirty kilometres away. The lighthouse was "
    "switched off in 1988, and since 1995 the building has been a small museum. Visitors can climb the 132 steps to "
    "the lamp room and read copies of Maria Lund's diary."
)
_LETTER = (
    "dear mr hansen, i am writing too ask about the red bicycle that you advertised in the newspaper on monday. is the "
    "bicycle still availabel? i would like to come and look at the bicycle on saturday morning if that suits you. "
    "yours sincerly, anna berg"
)
_CODE = """def total_price(items, tax_rate):
    total = 0
    for item in items:
        total = total + item.price * item.quantity
    total = total + total * tax_rate
    return total"""


@dataclass(frozen=True)
class BenchPrompt:
    """One user message, and the kind of work it asks for."""

    kind: str
    text: str


QUICK: tuple[BenchPrompt, ...] = (
    BenchPrompt("chat", "What should I think about before I adopt a dog? Answer in a few sentences."),
    BenchPrompt("code", f"Add type hints and a docstring to this Python function, and change nothing else:\n\n{_CODE}"),
    BenchPrompt("rewriting", f"Correct the spelling and the capital letters of this letter:\n\n{_LETTER}"),
    BenchPrompt("summarising", f"Summarise this passage in two sentences:\n\n{_PASSAGE}"),
    BenchPrompt(
        "translation", "Translate to French: The museum opens at nine in the morning and closes at six in the evening."
    ),
    BenchPrompt("extraction", f"List every year in this passage with what happened in it:\n\n{_PASSAGE}"),
)


def read_prompts(file: Path, limit: int | None = None) -> list[BenchPrompt]:
    """Prompts from a JSON Lines file of ``{"category": ..., "turns": [...]}`` rows; ``limit`` spreads over the file."""
    try:
        lines = file.read_text(encoding="utf-8").split("\n")  # JSON texts may hold other line breaks
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"the prompt file {file} cannot be read: {error}") from None
    prompts = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            prompts.append(_prompt(line, f"{file} line {number}"))
    if not prompts:
        raise SettingError(f"the prompt file {file} holds no prompts")
    if limit is None or limit >= len(prompts):
        return prompts
    return [prompts[i * len(prompts) // limit] for i in range(limit)]


def _prompt(line: str, where: str) -> BenchPrompt:
    """One row: its first turn, and its category ('-' without one)."""
    try:
        row = json.loads(line)
        turns, kind = row["turns"], row.get("category", "-")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        turns, kind = None, "-"
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str) or not turns[0].strip():
        raise SettingError(f"{where} is not a JSON object with a list of texts in 'turns'")
    if not isinstance(kind, str) or not kind.strip():
        raise SettingError(f"{where} has the category {kind!r}; allowed is a text that is not empty")
    return BenchPrompt(kind.strip(), turns[0])
