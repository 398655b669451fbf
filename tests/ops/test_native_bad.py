"""Nothing that does not fit together may reach the kernels: each of these must raise and not read out of bounds."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from outrider.core.errors import SettingError
from outrider.ops import native
from outrider.ops.contract import LayerKV
from outrider.ops.native import NativeOps, pack, pack_gguf
from tests.ops.paged import Paged, Rows
from tests.ops.test_native import CONFIGS, native_decoder, some_weight

pytestmark = pytest.mark.skipif(not native.available(), reason="the extension is not built")


def good_call() -> dict[str, Any]:
    """Arguments of a layer call that works."""
    decoder = native_decoder(CONFIGS["llama"], "q8_0")
    paged = Paged(decoder)
    batch = paged.batch([Rows(0, [1, 2, 3])])
    ops = decoder.ops
    rope = ops.rope_table(decoder.inv_freq, 1.0, torch.from_numpy(batch.positions))
    return {
        "x": torch.randn(3, 64),
        "weights": decoder.layers[0],
        "shape": decoder.shapes[0],
        "rope": rope,
        "kv": paged.kv[0],
        "batch": batch,
    }


def test_bad_arguments_of_a_layer_raise() -> None:
    ops, good = NativeOps(2), good_call()
    batch, kv, weights, shape = good["batch"], good["kv"], good["weights"], good["shape"]
    ops.decoder_layer(**good)

    def wrong(**changes: Any) -> None:
        with pytest.raises(ValueError, match=r"\w+ .*"):
            ops.decoder_layer(**{**good, **changes})

    for x in (
        torch.randn(2, 64),
        torch.randn(3, 63),
        torch.randn(3, 64).double(),
        torch.randn(64, 3).T,
        torch.randn(3),
    ):
        wrong(x=x)
    cos, sin = good["rope"]
    wrong(rope=(cos[:2], sin[:2]))
    wrong(rope=(cos.double(), sin))
    wrong(kv=LayerKV(kv.k[:, :2].contiguous(), kv.v[:, :2].contiguous()))
    wrong(kv=LayerKV(kv.k[:1], kv.v[:1]))
    wrong(kv=LayerKV(kv.k[:, :-1], kv.v[:, :-1]))
    wrong(kv=LayerKV(kv.k, kv.v[:-1]))
    wrong(kv=LayerKV(kv.k.half(), kv.v))
    wrong(kv=LayerKV(kv.k, kv.v.bfloat16()))
    codes, scale = torch.zeros(kv.k.shape, dtype=torch.int8), torch.zeros(*kv.k.shape[:2], 1)
    ops.decoder_layer(**{**good, "kv": LayerKV(codes, codes.clone(), scale, scale.clone())})
    wrong(kv=LayerKV(codes, codes))
    wrong(kv=LayerKV(codes, codes, scale))
    wrong(kv=LayerKV(codes, kv.v, scale, scale))
    wrong(kv=LayerKV(kv.k, kv.v, scale, scale))
    wrong(kv=LayerKV(codes, codes, scale[1:], scale))
    wrong(kv=LayerKV(codes, codes, scale, scale.expand(-1, -1, 2).contiguous()))
    wrong(kv=LayerKV(codes, codes, scale, scale.bfloat16()))
    wrong(kv=LayerKV(codes, codes, scale[..., 0], scale))
    for changes in (
        {"slots": batch.slots + 10**6},
        {"slots": batch.slots - 10**3},
        {"slots": batch.slots[:2]},
        {"slots": batch.slots.astype(np.int32)},
        {"positions": batch.positions[:2]},
        {"block_tables": batch.block_tables + 10**6},
        {"block_tables": batch.block_tables - 10**3},
        {"block_tables": batch.block_tables[:, :0].copy()},
        {"block_tables": batch.block_tables[:0]},
        {"kv_len": (2,)},
        {"kv_len": (10**9,)},
        {"kv_len": (3, 3)},
        {"cu_rows": (0, 4)},
        {"cu_rows": (1, 3)},
        {"cu_rows": (0, 5, 3), "kv_len": (5, 3), "tail_start": (5, 3), "tail_positions": ((), ())},
        {"block_size": 0},
        {"block_size": -4},
        {"ancestors": np.zeros((2, 1), np.int64)},
        {"ancestors": np.zeros((3, 1), np.int64), "tail_start": (9,)},
        {"ancestors": np.zeros((3, 1), np.int64), "tail_start": (-1,)},
        {"ancestors": np.zeros((3, 1), np.int64), "tail_start": (0,), "tail_positions": ((0, 1, 2),)},
    ):
        wrong(batch=dataclasses.replace(batch, **changes))
    for name, bad in (("q", (32, 64)), ("down", (64, 64)), ("up", (64, 64)), ("gate", (96, 32)), ("o", (32, 64))):
        wrong(weights=dataclasses.replace(weights, **{name: some_weight("q8_0", *bad)}))
    wrong(weights=dataclasses.replace(weights, q_norm=torch.ones(3)))
    wrong(weights=dataclasses.replace(weights, post_norm=torch.ones(3)))
    wrong(weights=dataclasses.replace(weights, q_bias=torch.ones(3)))
    for changes in ({"n_heads": 3}, {"n_kv_heads": 0}, {"head_dim": 15}, {"head_dim": -16}, {"window": -1}):
        wrong(shape=dataclasses.replace(shape, **changes))
    assert ops.decoder_layer(**good).isfinite().all()


def test_bad_arguments_of_the_other_operations_raise() -> None:
    ops, weight = NativeOps(1), some_weight("q8_0", 20, 64)
    for call in (
        lambda: ops.linear(torch.randn(2, 63), weight),
        lambda: ops.linear(torch.randn(2, 64).double(), weight),
        lambda: ops.linear(torch.randn(2, 64), weight, torch.randn(19)),
        lambda: ops.linear(torch.randn(64), weight),
        lambda: ops.embed(weight, torch.tensor([20])),
        lambda: ops.embed(weight, torch.tensor([-1])),
        lambda: ops.embed(weight, torch.tensor([1], dtype=torch.int32)),
        lambda: ops.rms_norm(torch.randn(2, 8), torch.ones(7), 1e-5),
        lambda: ops.rms_norm(torch.randn(2, 8).half(), torch.ones(8), 1e-5),
        lambda: pack(torch.randn(4, 33), "q8_0"),
        lambda: pack(torch.randn(4, 32), "q4_0"),
        lambda: pack(torch.randn(4, 32), "int4"),
        lambda: pack(torch.randn(4), "f32"),
        lambda: pack(torch.full((4, 32), torch.nan), "int8"),
        lambda: pack(torch.full((4, 32), 1e20), "q4_1"),
        lambda: pack(torch.full((4, 32), torch.inf), "q8_0"),
        lambda: pack_gguf("Q4_K", torch.zeros(4, 144, dtype=torch.uint8), 4, 256),
        lambda: pack_gguf("Q4_1", torch.zeros(4, 21, dtype=torch.uint8), 4, 32),
        lambda: pack_gguf("Q4_1", torch.zeros(3, 20, dtype=torch.uint8), 4, 32),
        lambda: pack_gguf("Q4_1", torch.zeros(4, 20, dtype=torch.int8), 4, 32),
        lambda: pack_gguf("Q4_1", torch.zeros(4, 30, dtype=torch.uint8), 4, 48),
    ):
        with pytest.raises(ValueError, match=r"\w+ .*"):
            call()
    for threads, isa in ((0, None), (-1, None), (257, None), (1, "sse9")):
        with pytest.raises(SettingError):
            NativeOps(threads, isa)


def test_one_plan_a_pass_and_shape_changes_are_seen() -> None:
    ops, good = NativeOps(1), good_call()
    first = ops.decoder_layer(**good)
    assert len(ops._plans) == 1
    narrow = ops.decoder_layer(**{**good, "shape": dataclasses.replace(good["shape"], window=1)})
    assert not torch.equal(first, narrow)
    assert torch.equal(ops.decoder_layer(**good), first)
    assert len(ops._plans) == 1
    good.clear()
    assert len(ops._plans) == 0
