"""The real default model against transformers, which reads the same file with code of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.models.load import load_model
from outrider.ops.native import available
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
    ours = load_model(str(smollm2_path), dtype="float32", device="cpu", ops="reference")
    assert ours.tokenizer is not None
    for text in TEXTS:
        tokens = ours.tokenizer.encode(text)
        (logits,) = Paged(ours.decoder, block_size=16).run(Rows(0, tokens))
        with torch.inference_mode():
            expected = theirs(torch.tensor([tokens])).logits[0]
        # fp32 over 30 layers; the logits themselves are about 20 wide
        assert (logits - expected).abs().max() < 1e-3
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.model
@pytest.mark.skipif(not available(), reason="the native operations were not built")
def test_native_operations_stay_close_to_the_reference(smollm2_path: Path) -> None:
    """Their activations are rounded to 8 bits in groups of 32: logits move a little, the best token hardly ever."""
    models = [load_model(str(smollm2_path), device="cpu", ops=ops) for ops in ("reference", "native")]
    agreed = total = 0
    for text in TEXTS:
        tokens = models[0].tokenizer.encode(text)  # type: ignore[union-attr]
        (exact,), (close,) = (Paged(model.decoder, block_size=16).run(Rows(0, tokens)) for model in models)
        assert (exact - close).abs().mean() < 0.5
        agreed += int((exact.argmax(-1) == close.argmax(-1)).sum())
        total += len(tokens)
    assert agreed >= 0.9 * total
