"""Plain against speculative on the real default model: the job of `make run`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider import LLM, SettingError
from outrider.bench.identity import NEAR_TIE, compare
from outrider.bench.prompts import QUICK, read_prompts
from outrider.engine.answer import SpecStats


@pytest.mark.model
def test_greedy_output_of_the_default_model_is_the_same_with_speculation(smollm2_path: Path) -> None:
    llm = LLM(str(smollm2_path), device="cpu", dtype="float32", enable_prefix_caching=False, kv_cache_mib=64)
    comparisons = list(compare(llm, QUICK, max_tokens=24))
    assert [c.prompt.kind for c in comparisons] == [
        "chat",
        "code",
        "rewriting",
        "summarising",
        "translation",
        "extraction",
    ]
    for comparison in comparisons:
        assert comparison.identical or comparison.divergence.margin <= NEAR_TIE[torch.float32]  # type: ignore[union-attr]
    copying = [c.speculative.stats for c in comparisons if c.prompt.kind in ("code", "extraction")]
    assert SpecStats.total(copying).tokens_per_step > 1.3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no prompts"),
        ('{"turns": ["a"]}\nnot json\n', "line 2 is not a JSON object"),
        ('{"turns": []}\n', "line 1 is not"),
        ('["turns"]\n', "line 1 is not"),
    ],
)
def test_a_bad_prompt_file_is_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    with pytest.raises(SettingError, match=said):
        read_prompts(file)


def test_a_limit_spreads_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(f'{{"category": "c", "turns": ["{i}"]}}\n' for i in range(10)))
    assert [p.text for p in read_prompts(file, 5)] == ["0", "2", "4", "6", "8"]
    assert len(read_prompts(file, 99)) == 10
