"""The layout check finds what it is there to find."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.check_layout import problems


def test_this_repository_is_clean() -> None:
    assert problems() == []


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("outrider/core/long.py", "x = 1\n" * 401, "401 lines; the ceiling is 400"),
        ("outrider/cli/a.py", 'if method == "ngram":\n    pass\n', "a branch on the drafter's name 'ngram'"),
        ("outrider/spec/a.py", 'if method in ("none", "x"):\n    pass\n', "a branch on the drafter's name 'none'"),
        ("outrider/cli/a.py", 'match m:\n    case "draft_model":\n        pass\n', "the drafter's name 'draft_model'"),
        ("outrider/engine/a.py", "# unlike the ngram drafter\n", "the drafter's name 'ngram'"),
    ],
)
def test_a_violation_is_named(tmp_path: Path, file: str, text: str, said: str) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(text)
    found = problems(tmp_path)
    assert len(found) == 1
    assert said in found[0]
    assert found[0].startswith(file)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("outrider/spec/drafts/a.py", 'if method == "ngram":\n    pass\n'),
        ("outrider/models/a.py", 'if kind == "none":\n    pass\n'),
        ("outrider/engine/a.py", 'model = "model"\n'),
        ("outrider/cli/a.py", 'default = "ngram"\n'),
    ],
)
def test_what_is_allowed_passes(tmp_path: Path, file: str, text: str) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(text)
    assert problems(tmp_path) == []
