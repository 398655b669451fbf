"""The real default model against transformers, which reads the same file with code of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.models.load import load_model
from tests.ops.paged import Paged, Rows

TEXTS = (
    "The capital of France is Paris, and the capital of Germany is",
    "<|im_start|>user\nList three prime numbers above 100.<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
)


@pytest.mark.model
def test_logits_agree_with_transformers(smollm2_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(
        str(smollm2_path.parent), gguf_file=smollm2_path.name, dtype=torch.float32
    ).eval()
    ours = load_model(str(smollm2_path), dtype="float32", device="cpu")
    assert ours.tokenizer is not None
    for text in TEXTS:
        tokens = ours.tokenizer.encode(text)
        (logits,) = Paged(ours.decoder, block_size=16).run(Rows(0, tokens))
        with torch.inference_mode():
            expected = theirs(torch.tensor([tokens])).logits[0]
        # fp32 over 30 layers; the logits themselves are about 20 wide
        assert (logits - expected).abs().max() < 1e-3
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))
