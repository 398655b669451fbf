"""What a benchmark was run with: the model's file, the prompts, the settings, the software and the machine."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import outrider
from outrider.bench.prompts import BenchPrompt
from outrider.engine.llm import LLM
from outrider.models.load import find
from outrider.ops.native import NativeOps

CPU_INFO = Path("/proc/cpuinfo")


def header(llm: LLM, prompts: Sequence[BenchPrompt], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Plain data for the head of a result file. Two runs whose headers agree but for the date may be joined."""
    ops, config = llm.target.decoder.ops, asdict(llm.engine.config)
    texts = json.dumps([[prompt.kind, prompt.text] for prompt in prompts])
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "outrider": outrider.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "device": str(llm.target.decoder.device),
        "ops": ops.describe(),
        "threads": ops.threads if isinstance(ops, NativeOps) else torch.get_num_threads(),
        "model": {"name": llm.target.name, **file_identity(find(config.pop("model")))},
        "prompts": {"count": len(prompts), "sha256": hashlib.sha256(texts.encode()).hexdigest()},
        "settings": dict(settings),
        "engine": config,
    }


def file_identity(path: Path) -> dict[str, Any]:
    """Name, bytes and sha256 of a file; of a folder, over its files' names and contents in the names' order."""
    files = sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]
    total, size = hashlib.sha256(), 0
    for file in files:
        if path.is_dir():
            total.update(file.name.encode() + b"\0")
        with file.open("rb") as stream:
            while chunk := stream.read(1 << 20):
                total.update(chunk)
                size += len(chunk)
    return {"file": path.name, "bytes": size, "sha256": total.hexdigest()}


def cpu_name() -> str:
    """The processor as the system calls it, and how many cores there are."""
    try:
        lines = CPU_INFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(named, '') or platform.processor() or platform.machine()}, {os.cpu_count()} cores"
