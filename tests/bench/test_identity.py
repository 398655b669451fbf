"""Plain against speculative on the real default model: the job of `make run`."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider import LLM, SettingError
from outrider.bench.identity import compare, first_divergence
from outrider.bench.prompts import QUICK, read_prompts
from outrider.core.types import FinishReason
from outrider.engine.answer import SpecStats
from outrider.engine.request import Completion, RequestOutput
from outrider.sampling.logprobs import TokenLogprob


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
        assert comparison.divergence is None or comparison.divergence.near_tie
    copying = [c.speculative.stats for c in comparisons if c.prompt.kind in ("code", "extraction")]
    assert SpecStats.total(copying).tokens_per_step > 1.3


def output(tokens: list[int], tops: list[tuple[tuple[int, float], ...]] | None = None) -> RequestOutput:
    entries = None if tops is None else tuple(TokenLogprob(t, 0.0, top) for t, top in zip(tokens, tops, strict=True))
    done = Completion(0, "", tuple(tokens), FinishReason.LENGTH, entries, (), SpecStats())
    return RequestOutput(0, (1,), (done,), "d", 0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("speculative", "at", "near_tie"),
    [
        ([5, 6, 7], None, None),
        ([5, 9, 7], 1, True),  # 6 and 9 are the best two there, 0.0005 apart
        ([5, 8, 7], 1, False),  # a near-tie of others excuses nothing
        ([5, 6, 9], 2, False),  # far apart
    ],
)
def test_a_near_tie_excuses_only_its_own_two_tokens(
    speculative: list[int], at: int | None, near_tie: bool | None
) -> None:
    tops = [((5, -0.1), (6, -3.0)), ((6, -0.7), (9, -0.7005)), ((7, -0.1), (9, -2.0))]
    found = first_divergence(0, "chat", output([5, 6, 7], tops), output(speculative), near=1e-3)
    assert (None if found is None else found.position) == at
    assert (None if found is None else found.near_tie) == near_tie


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
