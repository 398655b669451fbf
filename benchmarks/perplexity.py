"""What rounding costs: perplexity of one model file through each way of running it, on the same text.

    python benchmarks/perplexity.py --text FILE [--model smollm2] [--tokens 8192] [--window 1024]
        [--kinds fp32,native,int8,int4]

``FILE`` is plain text, or JSON Lines whose ``turns`` are joined. The text is cut in windows that start afresh; every
token after a window's first is scored. ``fp32`` is the reference path with the file's weights in fp32; ``native`` the
C++ path with the weights as they are in the file; ``int8`` and ``int4`` the same after ``--quantize``. A kind may name
how its KV is stored: ``native/bfloat16``.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from outrider.core.types import Batch
from outrider.models.load import LoadedModel, load_model
from outrider.runtime.pool import KVPool, pick_kv_dtype

BLOCK, CHUNK = 16, 256
KINDS = {"fp32": ("reference", None), "native": ("native", None)}
KINDS |= {"int8": ("native", "int8"), "int4": ("native", "int4")}


def text_of(path: Path) -> str:
    """A file's text, or all turns of its rows."""
    raw = path.read_text(encoding="utf-8")
    if path.suffix != ".jsonl":
        return raw
    return "\n\n".join(turn for line in raw.splitlines() for turn in json.loads(line)["turns"])


def chunk_batch(ids: Sequence[int], start: int, end: int) -> Batch:
    """Rows ``start`` .. ``end`` of one sequence that has slots 0, 1, 2, ...; logits for all of them."""
    rows = np.arange(start, end)
    table = np.arange(-(-end // BLOCK))[None]
    n = end - start
    return Batch(np.array(ids[start:end]), rows, rows, (0, n), (end,), table, (end,), None, ((),), np.arange(n), BLOCK)


def losses(model: LoadedModel, ids: Sequence[int], window: int, kv_cache_dtype: str = "auto") -> torch.Tensor:
    """-log p of every scored token, f64."""
    decoder = model.decoder
    kv_dtype = pick_kv_dtype(kv_cache_dtype, decoder.kv_dtype)
    pool = KVPool(model.config, -(-window // BLOCK), BLOCK, kv_dtype, decoder.device)
    found: list[torch.Tensor] = []
    for first in range(0, len(ids) - 1, window):
        piece = ids[first : first + window]
        for start in range(0, len(piece), CHUNK):
            end = min(start + CHUNK, len(piece))
            logits = torch.from_numpy(decoder.forward(chunk_batch(piece, start, end), pool.layers).logits).double()
            targets = torch.tensor(piece[start + 1 : end + 1])
            scores = torch.log_softmax(logits[: len(targets)], -1)
            found.append(-scores.gather(1, targets[:, None])[:, 0])
    return torch.cat(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--kinds", default="fp32,native,int8,int4")
    options = parser.parse_args()
    ids: list[int] | None = None
    base: torch.Tensor | None = None
    for kind in options.kinds.split(","):
        name, _, kv_cache_dtype = kind.partition("/")
        ops, quantization = KINDS[name]
        model = load_model(options.model, ops=ops, quantization=quantization)
        if ids is None:
            assert model.tokenizer is not None
            ids = model.tokenizer.encode(text_of(options.text))[: options.tokens]
        found = losses(model, ids, options.window, kv_cache_dtype or "auto")
        base = found if base is None else base
        difference = found - base
        mean, error = difference.mean().item(), difference.std().item() / math.sqrt(len(found))
        print(
            f"{kind:>7}  {len(found)} tokens  perplexity {math.exp(found.mean().item()):.4f}  "
            f"{100 * math.expm1(mean):+.3f}% (standard error {100 * error:.3f}%)",
            flush=True,
        )


if __name__ == "__main__":
    main()
