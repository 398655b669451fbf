"""The memory plan: block counts, the drafter's share, and what is said when nothing fits."""

from __future__ import annotations

import re

import pytest

from outrider.core.config import EngineConfig
from outrider.core.errors import SettingError
from outrider.runtime.memory import MIB, MemoryPlan, plan_memory


def plan(target_kv: int = 1024, draft_kv: int = 0, max_model_len: int = 10_000, **options: int) -> MemoryPlan:
    config = EngineConfig(model="toy", **options)  # type: ignore[arg-type]
    return plan_memory(config, 7 * MIB, target_kv, 3 * MIB, draft_kv, max_model_len)


def test_the_cache_takes_what_kv_cache_mib_allows_the_drafters_kv_included() -> None:
    alone = plan(kv_cache_mib=2, block_size=16)
    assert (alone.n_blocks, alone.tokens) == (2 * MIB // (1024 * 16), 2048)
    both = plan(kv_cache_mib=2, block_size=16, draft_kv=1024)
    assert both.n_blocks == alone.n_blocks // 2
    assert both.target_kv + both.draft_kv == 2 * MIB
    odd = plan(kv_cache_mib=2, block_size=16, draft_kv=1000)
    assert odd.target_kv + odd.draft_kv <= 2 * MIB < odd.target_kv + odd.draft_kv + 16 * 2024


def test_no_more_is_taken_than_full_contexts_can_use() -> None:
    made = plan(kv_cache_mib=512, block_size=16, max_model_len=100, max_num_seqs=3)
    assert made.n_blocks == 3 * (7 + 1)


def test_a_given_number_of_blocks_is_taken_as_it_is() -> None:
    assert plan(num_kv_blocks=5, kv_cache_mib=1, target_kv=10 * MIB).n_blocks == 5


@pytest.mark.parametrize(("target_kv", "draft_kv"), [(MIB, 0), (MIB // 8, MIB // 8 + 1)])
def test_when_not_one_block_fits_the_message_says_how_much_would_do(target_kv: int, draft_kv: int) -> None:
    with pytest.raises(SettingError, match="kv_cache_mib is 1; allowed is at least") as error:
        plan(target_kv, draft_kv, kv_cache_mib=1, block_size=8)
    enough = int(re.findall(r"at least (\d+)", str(error.value))[0])
    assert plan(target_kv, draft_kv, kv_cache_mib=enough, block_size=8).n_blocks == 1
    with pytest.raises(SettingError):
        plan(target_kv, draft_kv, kv_cache_mib=enough - 1, block_size=8)


def test_more_than_the_device_has_is_refused_before_it_is_taken() -> None:
    config = EngineConfig(model="toy", num_kv_blocks=100, block_size=16)
    assert plan_memory(config, 0, MIB, 0, MIB, 100, memory=3200 * MIB).n_blocks == 100
    with pytest.raises(SettingError, match=r"100 blocks of 16 tokens needs 3200 MiB; this device has 3199 MiB"):
        plan_memory(config, 0, MIB, 0, MIB, 100, memory=3199 * MIB)


def test_the_plan_reads_item_by_item() -> None:
    lines = plan(num_kv_blocks=64, block_size=16, draft_kv=512).lines()
    assert lines == [
        "target weights: 7.0 MiB",
        "draft weights: 3.0 MiB",
        "target KV: 1.0 MiB",
        "draft KV: 0.5 MiB",
        "KV cache: 64 blocks of 16 = 1024 tokens",
    ]
