"""The KV pool and the runner's moves: which slot holds what afterwards."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.cache.blocks import Copy
from outrider.core.draft import Draft
from outrider.core.params import SamplingParams, SpecParams
from outrider.core.types import Sequence, Span
from outrider.runtime.pool import KVPool
from outrider.runtime.runner import Runner
from tests.toy import full_logits, toy_config, toy_decoder

CONFIG = toy_config(layers=2, hidden=16, heads=4, kv_heads=2, ffn=16)


def pool(n_blocks: int = 4, size: int = 2, dtype: torch.dtype = torch.float32) -> KVPool:
    """Slot s of layer l holds 10 l + s as its key (and its scale) and minus that as its value."""
    made = KVPool(CONFIG, n_blocks, size, dtype, torch.device("cpu"))
    for layer, kv in enumerate(made.layers):
        for i, part in enumerate(kv.parts):
            part[:] = ((10 * layer + torch.arange(n_blocks * size)) * (-1) ** i)[:, None]
    return made


def contents(pool: KVPool) -> list[int]:
    """The slot that each slot's KV came from; every layer, head, key and value must agree."""
    for layer, kv in enumerate(pool.layers):
        for i, part in enumerate(kv.parts):
            assert torch.equal(part.float() * (-1) ** i, kv.k[:1, :, :1].float().expand_as(part))
        assert torch.equal(kv.k - 10 * layer, pool.layers[0].k)
    return [int(x) for x in pool.layers[0].k[0, :, 0]]


def test_shape_and_bytes_of_a_token() -> None:
    made = pool(n_blocks=5, size=3)
    assert {tuple(t.shape) for kv in made.layers for t in kv.parts} == {(2, 15, 4)}
    stored = sum(t.numel() * t.element_size() for kv in made.layers for t in (kv.k, kv.v))
    assert KVPool.bytes_per_token(CONFIG, torch.float32) * 15 == stored
    assert KVPool.bytes_per_token(CONFIG, torch.bfloat16) * 30 == stored


@pytest.mark.parametrize(("dim", "groups"), [(4, 1), (32, 1), (34, 2), (64, 2), (80, 3)])
def test_eight_bits_come_with_one_scale_for_each_32_dims(dim: int, groups: int) -> None:
    config = toy_config(layers=3, kv_heads=2, head_dim=dim)
    made = KVPool(config, 5, 3, torch.int8, torch.device("cpu"))
    shapes = [(tuple(part.shape), part.dtype) for part in made.layers[0].parts]
    assert shapes == [((2, 15, dim), torch.int8)] * 2 + [((2, 15, groups), torch.float32)] * 2
    assert KVPool.bytes_per_token(config, torch.int8) == 3 * 2 * 2 * (dim + 4 * groups)
    assert KVPool.bytes_per_token(config, torch.int8) * 15 == sum(p.nbytes for kv in made.layers for p in kv.parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8])
def test_blocks_are_copied_in_order(dtype: torch.dtype) -> None:
    made = pool(dtype=dtype)
    made.copy_blocks([Copy(0, 3), Copy(1, 0), Copy(3, 2)])
    assert contents(made) == [2, 3, 2, 3, 0, 1, 0, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8])
def test_a_move_reads_all_slots_before_it_writes_any(dtype: torch.dtype) -> None:
    made = pool(dtype=dtype)
    made.move([1, 2, 5], [0, 1, 2])
    assert contents(made) == [1, 2, 5, 3, 4, 5, 6, 7]
    made.move([], [])
    assert contents(made) == [1, 2, 5, 3, 4, 5, 6, 7]


def test_an_accepted_path_of_a_tree_is_moved_behind_the_committed_rows_across_blocks() -> None:
    runner = Runner(toy_decoder(CONFIG), n_blocks=8, block_size=2)
    runner.pool = pool(n_blocks=8)
    draft = Draft.tree(range(5), [-1, -1, 1, 1, 3])
    tree = Span(sequence([1, 2, 3], [4, 2, 7, 5]), start=2, n_new=1, draft=draft)
    chain = Span(sequence([1], [0, 6]), start=0, n_new=1, draft=Draft.chain([8, 9]))
    runner.keep_path([tree, chain], [[1, 3, 4], [0, 1]])
    got = contents(runner.pool)
    slot = {i: [8, 9, 4, 5, 14, 15, 10, 11][i] for i in range(8)}  # of the tree's sequence
    assert [got[slot[i]] for i in range(3)] == [slot[i] for i in range(3)], "committed rows stay"
    assert [got[slot[3 + i]] for i in range(3)] == [slot[3 + node] for node in (1, 3, 4)]
    untouched = set(range(16)) - {slot[3], slot[4], slot[5]}
    assert all(got[i] == i for i in untouched), "a chain's nodes stand where they belong already"


@pytest.mark.parametrize("path", [[], [0], [1, 3], [1, 2, 4]])
def test_after_a_kept_path_the_next_token_is_scored_as_after_the_same_text(path: list[int]) -> None:
    """The runner's whole job: prefill in two chunks, a tree, the move, then one more row against a dense pass."""
    decoder = toy_decoder(CONFIG)
    runner = Runner(decoder, n_blocks=12, block_size=3)
    seq = sequence([5, 9, 2, 7, 7, 1, 3], [11, 0, 4, 8, 2])
    assert runner.forward([Span(seq, 0, 4)]).logits.shape[0] == 0
    draft = Draft.tree([4, 6, 8, 4, 9], [-1, -1, 1, 1, 2])
    span = Span(seq, 4, 3, budget=5, draft=draft)
    logits = runner.forward([span]).logits
    for node in range(5):
        text = seq.tokens + [draft.tokens[i] for i in draft.path(node)]
        assert np.allclose(logits[1 + node], full_logits(decoder, text)[-1], atol=1e-9)
    runner.keep_path([span], [path])
    seq.tokens += [draft.tokens[node] for node in path] + [10]
    after = runner.forward([Span(seq, len(seq) - 1, 1)]).logits
    assert np.allclose(after[0], full_logits(decoder, seq.tokens)[-1], atol=1e-9)


def test_slot_kv_shows_one_logical_slot_of_every_layer() -> None:
    runner = Runner(toy_decoder(CONFIG), n_blocks=4, block_size=2)
    runner.pool = pool()
    kv = runner.slot_kv(Span(sequence([1, 2, 3], [3, 1]), 0, 3), 2)
    assert [int(t[0, 0]) for t in kv] == [2, -2, 12, -12]


def sequence(tokens: list[int], blocks: list[int]) -> Sequence:
    return Sequence(0, tokens, len(tokens), SamplingParams(), SpecParams(), seed=0, blocks=blocks)


MEASURED = """
import os, sys, torch
from pathlib import Path
from outrider.runtime.pool import KVPool
from tests.toy import toy_config

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

config, blocks, dtype = toy_config(layers=2), 1 << 16, getattr(torch, sys.argv[1])
torch.zeros(8).sum()
before = resident()
pool = KVPool(config, blocks, 16, dtype, torch.device("cpu"))
size = KVPool.bytes_per_token(config, dtype) * blocks * 16
assert size >= 128 << 20
assert resident() - before < size / 4
pool.layers[0].k.fill_(1)
assert resident() - before > size / 8
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_pool_takes_memory_only_where_it_is_written(dtype: str) -> None:
    """In a process of its own: here, the allocator may have memory to reuse."""
    subprocess.run([sys.executable, "-c", MEASURED, dtype], check=True, cwd=Path(__file__).parents[2])
