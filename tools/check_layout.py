"""Checks what linters do not know: the file ceiling, and that no drafter's name leaves its place."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from outrider.spec.registry import DRAFTERS

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 400
# Where a branch on a drafter's name may stand.
HOME = ("outrider/spec/drafts/", "outrider/spec/registry.py")
# Packages that know no drafters: a common word in them is just a word.
UNAWARE = ("outrider/core/", "outrider/ops/", "outrider/models/")
# Where not even the word may stand; words that mean something else as well are left to the branch check.
NAMELESS = ("outrider/engine/", "outrider/runtime/", "outrider/cache/", "outrider/spec/verify")
COMMON_WORDS = {"none", "model", "prediction", "self"}


def problems(root: Path = ROOT) -> list[str]:
    """Every violation as ``file:line: what``."""
    names = {name for key, kind in DRAFTERS.items() for name in (key, *kind.aliases)}
    found: list[str] = []
    for file in sorted(p for top in ("outrider", "tests", "tools") for p in (root / top).rglob("*.py")):
        where, text = file.relative_to(root).as_posix(), file.read_text(encoding="utf-8")
        lines = text.count("\n")
        if lines > MAX_LINES:
            found.append(f"{where}:{lines}: {lines} lines; the ceiling is {MAX_LINES}")
        if where.startswith("outrider/") and not where.startswith(HOME):
            own = names - COMMON_WORDS if where.startswith(UNAWARE) else names
            found += [f"{where}:{line}: a branch on the drafter's name '{name}'" for line, name in branches(text, own)]
        if where.startswith(NAMELESS):
            pattern = r"\b(" + "|".join(sorted(names - COMMON_WORDS)) + r")\b"
            for number, line in enumerate(text.splitlines(), 1):
                found += [
                    f"{where}:{number}: the drafter's name '{m}'" for m in re.findall(pattern, line, re.IGNORECASE)
                ]
    return found


def branches(text: str, names: set[str]) -> Iterator[tuple[int, str]]:
    """Comparisons and match cases against a drafter's name."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Compare | ast.MatchValue):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and part.value in names and isinstance(part.value, str):
                    yield node.lineno if isinstance(node, ast.Compare) else node.value.lineno, part.value


def main() -> int:
    found = problems()
    for line in found:
        print(line)
    print(f"layout: {len(found)} problems" if found else "layout: ok")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
