"""Rotary embedding: how fast each pair of channels turns with position, for each way of stretching the context."""

from __future__ import annotations

import math

import torch

from outrider.models.config import RopeConfig

ROPE_KINDS = ("default", "linear", "llama3", "yarn")
MIN_FACTOR, MAX_FACTOR = 1e-3, 1e6  # within these all the formulas below give positive, finite numbers


def rope_frequencies(rope: RopeConfig, head_dim: int, max_position: int) -> tuple[torch.Tensor, float]:
    """Inverse frequencies f32[head_dim / 2] (radians a token), and the factor for cosines and sines.

    The same numbers as transformers computes, in the same precision. Raises ValueError on an unknown kind.
    """
    turns = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.kind == "default":
        return 1.0 / turns, 1.0
    if rope.kind == "linear":
        return 1.0 / turns / rope.factor, 1.0
    trained = rope.original_max_position or max_position
    if rope.kind == "llama3":
        return _llama3(1.0 / turns, rope, trained), 1.0
    if rope.kind == "yarn":
        return _yarn(turns, rope, head_dim, trained), _yarn_scale(rope)
    raise ValueError(f"rope kind is {rope.kind!r}; allowed is one of {', '.join(ROPE_KINDS)}")


def _llama3(inv_freq: torch.Tensor, rope: RopeConfig, trained: int) -> torch.Tensor:
    """Llama 3.1: long wavelengths are slowed down by ``factor``, short ones kept, those between blended."""
    wavelength = 2 * math.pi / inv_freq
    slowed = inv_freq / rope.factor
    keep = (trained / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - keep) * slowed + keep * inv_freq
    short = wavelength < trained / rope.high_freq_factor
    long = wavelength > trained / rope.low_freq_factor
    return torch.where(short, inv_freq, torch.where(long, slowed, blended))


def _yarn(turns: torch.Tensor, rope: RopeConfig, dim: int, trained: int) -> torch.Tensor:
    """YaRN (Peng et al. 2023, arXiv:2309.00071), section 3.2: blends by how often a channel turns in ``trained``."""

    def channel(rotations: float) -> float:
        return dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = channel(rope.beta_fast), channel(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return 1.0 / (rope.factor * turns) * (1 - keep) + 1.0 / turns * keep


def _yarn_scale(rope: RopeConfig) -> float:
    """The factor that keeps attention as sharp as in training."""
    if rope.attention_factor is not None:
        return rope.attention_factor

    def sharpness(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return sharpness(rope.mscale) / sharpness(rope.mscale_all_dim)
    return sharpness(1.0)
