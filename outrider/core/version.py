"""The version of this package, for every part that asks."""

from __future__ import annotations

__version__ = "0.1.0"
