"""Fixtures of the server's tests. Without the server's packages there is nothing to test here."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from outrider import LLM
from tests.tiny import write_tiny_model

if any(
    importlib.util.find_spec(package) is None
    for package in ("starlette", "uvicorn", "pydantic", "prometheus_client", "httpx")
):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("serve") / "tiny", context=1024))


@pytest.fixture(scope="session")
def shared_llm(folder: str) -> LLM:
    from tests.serve.serving import make_llm

    return make_llm(folder)


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    """The shared engine, which every test must leave as it was."""
    yield shared_llm
    engine = shared_llm.engine
    engine.check_integrity()
    assert not engine.has_work
    assert engine.blocks.n_free == engine.blocks.n_blocks
