"""Fixtures of the tests of packed weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.models import packed
from outrider.models.packed import PackedCache, packed_cache
from tests.tiny import write_tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackedCache:
    """An empty cache of this test's own, in which models count as old enough."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.delenv("OUTRIDER_PACKED_GIB", raising=False)
    monkeypatch.setattr(packed, "_CLOCK_STEP", 0)
    return packed_cache()
