"""A toy model in a wheel, and stand-ins for pip."""

from __future__ import annotations

import hashlib
import os
import sys
import zipfile
from pathlib import Path

import pytest

from outrider.models.wheel import NamedModel

CONTENT = os.urandom(3 << 20)  # three chunks
TOY = NamedModel(
    name="toy",
    package="llm-toy",
    version="1.0",
    member="llm_toy/toy.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    size=len(CONTENT),
    license="Apache-2.0",
)


def silent(_: str) -> None: ...


def build_wheel(folder: Path, content: bytes = CONTENT, member: str = TOY.member) -> Path:
    """An installable wheel with the given content as the model."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "llm_toy-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        info = "llm_toy-1.0.dist-info/"
        archive.writestr(info + "METADATA", "Metadata-Version: 2.1\nName: llm-toy\nVersion: 1.0\n")
        archive.writestr(info + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(info + "RECORD", "")
    return path


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """A Python whose pip runs ``body`` with the arguments in ``args`` and the folder in ``dest``."""
    script = tmp_path / "python"
    script.write_text(
        f"#!{sys.executable}\nimport sys, pathlib, shutil\nargs = sys.argv[3:]\n"
        "dest = args[args.index('--dest') + 1] if '--dest' in args else None\n" + body
    )
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
