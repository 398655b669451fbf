"""Outrider: lossless speculative decoding for open-weight language models.

>>> from outrider import LLM, SamplingParams
>>> llm = LLM("smollm2", drafter="ngram")
>>> llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8))[0].text  # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.core.config import EngineConfig, SpecConfig
from outrider.core.errors import ModelFileError, OutriderError, SettingError
from outrider.core.grammar import Grammar
from outrider.core.params import SamplingParams, SpecParams
from outrider.core.version import __version__

if TYPE_CHECKING:
    from outrider.engine.llm import LLM

__all__ = [
    "LLM",
    "EngineConfig",
    "Grammar",
    "ModelFileError",
    "OutriderError",
    "SamplingParams",
    "SettingError",
    "SpecConfig",
    "SpecParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """``LLM`` is imported when it is first asked for: it brings every model and drafter along."""
    if name == "LLM":
        from outrider.engine.llm import LLM

        return LLM
    raise AttributeError(f"module 'outrider' has no attribute '{name}'")
