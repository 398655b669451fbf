"""What the tests of packed weights on disk share."""

from __future__ import annotations

from pathlib import Path

import torch

from outrider.models.load import LoadStep, load_model
from outrider.models.packed import PackedCache
from outrider.ops.native import NativeOps
from tests.ops.paged import Paged, Rows


def logits(model: Path, quantization: str = "int8", isa: str | None = None) -> tuple[torch.Tensor, list[str]]:
    """Logits after some tokens, and what loading said that it did."""
    steps: list[LoadStep] = []
    loaded = load_model(
        str(model), device="cpu", quantization=quantization, ops=NativeOps(1, isa), progress=steps.append
    )
    (rows,) = Paged(loaded.decoder).run(Rows(0, range(20)))
    assert rows.isfinite().all()
    return rows, [step.what.split(" ")[0] for step in steps[:1]]


def only(cache: PackedCache) -> Path:
    (path,) = cache.sizes()
    assert [p for p in cache.folder.iterdir() if p != path] == [], "something unfinished was left"
    return path
