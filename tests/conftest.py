"""Fixtures that every package's tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _threads() -> None:
    """Toy models are too small for more than one thread to help."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's file, as `outrider pull smollm2` (which `make` runs) leaves it."""
    given = os.environ.get("OUTRIDER_TEST_MODEL")
    if given:
        return Path(given)
    from outrider.models.pull import cached

    path = cached("smollm2")
    if path is None:
        pytest.skip("the default model is not here: run `outrider pull smollm2`")
    return path
