"""``outrider info``: what this installation has to work with."""

from __future__ import annotations

import argparse
import os
import platform

import torch

import outrider
from outrider.models.load import DEFAULT_MODEL
from outrider.models.packed import LIMIT_VARIABLE, packed_cache
from outrider.models.pull import cached
from outrider.ops.native import NativeOps, available, default_threads
from outrider.spec.registry import DRAFTERS

HELP = "show versions, devices, operations, drafters and the default model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It takes none."""


def _operations() -> str:
    if not available():
        return "reference (torch); the native ones were not built, for want of a C++ compiler"
    info = NativeOps(default_threads()).info()
    sets, formats = ", ".join(info["available"]), ", ".join(info["formats"])
    return f"native, {info['threads']} threads, {info['isa']} of {sets}; weights as {formats}"


def _packed() -> str:
    cache = packed_cache()
    if not cache.limit:
        return f"not kept ({LIMIT_VARIABLE} is 0)"
    sizes = cache.sizes()
    models = "1 model" if len(sizes) == 1 else f"{len(sizes)} models"
    return (
        f"{cache.folder}: {models}, {sum(sizes.values()) / (1 << 20):.0f} MiB of at most "
        f"{cache.limit / (1 << 30):g} GiB ({LIMIT_VARIABLE})"
    )


def run(args: argparse.Namespace) -> int:
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    model = cached(DEFAULT_MODEL)
    for name, value in {
        "outrider": outrider.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "operations": _operations(),
        "cpu": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "cuda": ", ".join(gpus) or "none",
        "packed weights": _packed(),
        "drafters": ", ".join(DRAFTERS),
        "default model": f"{DEFAULT_MODEL}: {model or 'not fetched yet (outrider pull ' + DEFAULT_MODEL + ')'}",
    }.items():
        print(f"{name:<14} {value}")
    return 0
