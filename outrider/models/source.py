"""Where a decoder's tensors come from: the seam between file formats and the decoder."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.models.config import ModelConfig
from outrider.ops.contract import Weight

Keep = Callable[[str, tuple[int, ...], Callable[[], Weight]], Weight]
"""Gives the packed weight of a name and shape: what the function packs, or one that was kept from an earlier time."""


class TensorSource(Protocol):
    """Named tensors of one model, in Hugging Face's names (``model.layers.0.self_attn.q_proj.weight``, [out, in])."""

    @property
    def where(self) -> str:
        """The file or folder, for error messages."""

    @property
    def config(self) -> ModelConfig: ...

    def names(self) -> Iterable[str]:
        """Every tensor that is there."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor without reading it."""

    def get(self, name: str) -> torch.Tensor:
        """The tensor, dense, in the file's own floating type (fp32 for quantized files). Raises ModelFileError."""

    def blocks(self, name: str) -> tuple[str, NDArray[np.uint8]] | None:
        """Name of the quantization and the blocks u8[out, bytes of a row] as stored; None for a floating tensor."""
        return None

    def drop(self) -> None:
        """Gives back the memory that reading took; a tensor that was read stays good."""
        return
