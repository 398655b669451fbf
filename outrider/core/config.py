"""Settings of the engine. The drafters' own settings stand with each drafter (``spec/drafts``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.core.errors import SettingError
from outrider.core.settings import check_settings, setting

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
KV_CACHE_DTYPES = ("auto", "float32", "float16", "bfloat16", "int8")
QUANTIZATIONS = ("int8", "int4")
OPERATIONS = ("auto", "native", "reference")
SPECULATION = ("auto", "off", "fixed")
MAX_AUTO_DRAFT = 32
"""Draft rows of one sequence in one step where the controller decides and no other limit is set."""
MAX_DRAFT = 256
"""Draft rows of one sequence in one step, whatever is asked for."""


@dataclass(frozen=True)
class EngineConfig:
    """How to load and run the target."""

    model: str = setting(help="'smollm2', a Hugging Face folder or hub id, or a .gguf file", positional=True)
    dtype: str = setting("auto", "precision of the model; auto is float32 on cpu, bfloat16 on cuda", choices=DTYPES)
    device: str = setting("auto", "where to run: auto, cpu, cuda or cuda:N")
    quantization: str | None = setting(
        None, "pack the linear weights while loading: int8, or int4 with an int8 output head", choices=QUANTIZATIONS
    )
    ops: str = setting("auto", "operations; auto is native (C++) on cpu where it was built", choices=OPERATIONS)
    max_model_len: int | None = setting(None, "longest prompt plus output; default: the model's context", low=2)
    block_size: int = setting(16, "tokens in a KV block", low=1, high=1024)
    num_kv_blocks: int | None = setting(None, "KV blocks; default: as kv_cache_mib allows", low=1)
    kv_cache_mib: int = setting(512, "memory for the KV cache (target and draft model together), MiB", low=1)
    kv_cache_dtype: str = setting(
        "auto",
        "how keys and values are stored; auto: 16 bits on native operations, else as the model computes",
        choices=KV_CACHE_DTYPES,
    )
    max_num_seqs: int = setting(16, "sequences that run at once", low=1)
    max_num_batched_tokens: int = setting(512, "rows in one forward pass: longer prompts are cut in chunks", low=1)
    enable_prefix_caching: bool = setting(True, "share the KV of common prompt prefixes")
    threads: int | None = setting(None, "CPU threads; default: one a core", low=1, high=256)

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True)
class SpecConfig:
    """How to speculate: what all drafters share, and ``options``, the chosen drafter's own settings by name."""

    method: str = setting("ngram", "the drafter")
    num_speculative_tokens: int = setting(
        3, "draft tokens a step (tree nodes for a tree); with speculation auto: at most", low=0, high=MAX_DRAFT
    )
    speculation: str = setting(
        "fixed", "draft lengths: auto (as much as pays), off, fixed, or fixed:K for num_speculative_tokens K"
    )
    rejection_sample_method: str = setting(
        "standard", "verification rule; all are lossless", choices=("standard", "block", "coupled")
    )
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", dict(self.options))
        check_settings(self)
        kind, colon, length = self.speculation.partition(":")
        if colon and kind == "fixed" and length.isdecimal() and len(length) < 9 and 0 <= int(length) <= MAX_DRAFT:
            object.__setattr__(self, "num_speculative_tokens", int(length))
        elif self.speculation not in SPECULATION:
            allowed = f"auto, off, fixed, or fixed:K with K from 0 to {MAX_DRAFT}"
            raise SettingError(f"speculation is {self.speculation!r}; allowed is {allowed}")
