"""Fixtures of the server's tests, which need its packages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

for package in ("starlette", "uvicorn", "pydantic", "httpx"):
    pytest.importorskip(package, reason="the server's packages are not installed: pip install 'outrider[serve,dev]'")

from outrider import LLM  # noqa: E402
from tests.serve.serving import make_llm  # noqa: E402
from tests.tiny import write_tiny_model  # noqa: E402


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("serve") / "tiny", context=1024))


@pytest.fixture(scope="session")
def shared_llm(folder: str) -> LLM:
    return make_llm(folder)


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    """The shared engine, which every test must leave as it was."""
    yield shared_llm
    engine = shared_llm.engine
    engine.check_integrity()
    assert not engine.has_work
    assert engine.blocks.n_free == engine.blocks.n_blocks
