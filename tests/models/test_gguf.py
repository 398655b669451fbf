"""GGUF files: every tensor type against its public block layout, names and row order, config and RoPE scaling."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from outrider.core.errors import ModelFileError
from outrider.models.config import RopeConfig
from outrider.models.gguf_source import GGUFSource
from tests.models.gguf_files import FFN, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, RNG, VOCAB, Quant, normal, tensors, write


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tiny.gguf"


# Dequantization, element by element from the published block layouts.


def f16(block: bytes, at: int) -> float:
    return float(struct.unpack_from("<e", block, at)[0])


def q4_0(b: bytes) -> list[float]:
    return [f16(b, 0) * ((b[2 + i % 16] >> (4 * (i // 16)) & 15) - 8) for i in range(32)]


def q4_1(b: bytes) -> list[float]:
    return [f16(b, 0) * (b[4 + i % 16] >> (4 * (i // 16)) & 15) + f16(b, 2) for i in range(32)]


def q8_0(b: bytes) -> list[float]:
    return [f16(b, 0) * q for q in struct.unpack_from("<32b", b, 2)]


def q4_k(b: bytes) -> list[float]:
    packed, quants, out = b[4:16], b[16:], []
    for i in range(256):
        j = i // 32
        if j < 4:
            scale, low = packed[j] & 63, packed[j + 4] & 63
        else:
            scale = (packed[j + 4] & 15) | (packed[j - 4] >> 6 << 4)
            low = (packed[j + 4] >> 4) | (packed[j] >> 6 << 4)
        q = quants[i // 64 * 32 + i % 32] >> (4 * (j % 2)) & 15
        out.append(f16(b, 0) * scale * q - f16(b, 2) * low)
    return out


def q6_k(b: bytes) -> list[float]:
    low, high, scales, d = b[:128], b[128:192], struct.unpack_from("<16b", b, 192), f16(b, 208)
    out = []
    for i in range(256):
        half, r = divmod(i, 128)
        q = low[64 * half + r % 64] >> (4 * (r // 64)) & 15
        q |= (high[32 * half + r % 32] >> (2 * (r // 32)) & 3) << 4
        out.append(d * scales[i // 16] * (q - 32))
    return out


BLOCKS: dict[str, tuple[int, Callable[[bytes], list[float]]]] = {
    "Q4_0": (18, q4_0),
    "Q4_1": (20, q4_1),
    "Q8_0": (34, q8_0),
    "Q4_K": (144, q4_k),
    "Q6_K": (210, q6_k),
}


def quantized(kind: str, rows: int, columns: int) -> np.ndarray:
    """Random data as blocks u8[rows, bytes]; of the types the package cannot write, random bits with sane scales."""
    if kind not in ("Q4_K", "Q6_K"):
        return gguf.quants.quantize(normal(rows, columns), Quant[kind])
    data = RNG.integers(0, 256, (rows, columns // 256, BLOCKS[kind][0])).astype(np.uint8)
    scales = np.array(RNG.uniform(0.001, 0.1, (rows, columns // 256, 2)), "<f2").view(np.uint8)
    if kind == "Q4_K":
        data[..., :4] = scales
    else:
        data[..., 208:] = scales[..., :2]
    return data.reshape(rows, -1)


@pytest.mark.parametrize("kind", BLOCKS)
def test_quantized_types_match_their_block_layout(path: Path, kind: str) -> None:
    stored = "blk.0.ffn_down.weight"
    blocks = quantized(kind, HIDDEN, FFN)
    source = GGUFSource(write(path, {**tensors(), stored: blocks}, types={stored: Quant[kind]}))
    size, decode = BLOCKS[kind]
    data = blocks.tobytes()
    expected = [x for at in range(0, len(data), size) for x in decode(data[at : at + size])]
    name = "model.layers.0.mlp.down_proj.weight"
    found = source.get(name)
    assert found.dtype == torch.float32
    assert source.shape(name) == tuple(found.shape) == (HIDDEN, FFN)
    np.testing.assert_allclose(found.numpy().ravel(), expected, rtol=1e-6, atol=1e-6)
    assert np.abs(expected).max() > 0.1  # not all zeros
    assert source.raw(name)[0] == kind
    np.testing.assert_array_equal(source.raw(name)[1], blocks)


@pytest.mark.parametrize(("kind", "dtype"), [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)])
def test_floating_types_keep_their_type(path: Path, kind: str, dtype: torch.dtype) -> None:
    named = tensors()
    stored = "blk.0.attn_v.weight"
    wanted = torch.from_numpy(named[stored]).to(dtype)
    named[stored] = gguf.quants.quantize(named[stored], Quant[kind])
    found = GGUFSource(write(path, named, types={stored: Quant[kind]})).get("model.layers.0.self_attn.v_proj.weight")
    assert found.dtype == dtype
    assert torch.equal(found, wanted)
    found.add_(1)  # ours to change: neither read-only nor the file's own memory


def test_an_unsupported_type_names_tensor_type_and_what_is_supported(path: Path) -> None:
    stored = "blk.0.ffn_down.weight"
    blocks = gguf.quants.quantize(normal(HIDDEN, FFN), Quant.Q5_0)
    write(path, {**tensors(), stored: blocks}, types={stored: Quant.Q5_0})
    with pytest.raises(ModelFileError, match=r"blk\.0\.ffn_down\.weight.*Q5_0.*F32, F16, Q4_0, Q4_1, Q8_0, Q4_K, Q6_K"):
        GGUFSource(path)


# Names, and the order of Q's and K's rows.


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Hugging Face's rows in the order a llama file has: of each head first rows 0 and D/2, then 1 and D/2 + 1, ..."""
    size = len(weight) // heads
    order = [h * size + j * size // 2 + i for h in range(heads) for i in range(size // 2) for j in (0, 1)]
    return weight[order]


def test_llama_q_and_k_rows_come_back_in_hugging_face_order(path: Path) -> None:
    named = tensors()
    q, k = named["blk.0.attn_q.weight"], named["blk.0.attn_k.weight"]
    q_bias, k_bias = normal(len(q)), normal(len(k))
    named |= {"blk.0.attn_q.weight": interleaved(q, HEADS), "blk.0.attn_k.weight": interleaved(k, KV_HEADS)}
    named |= {"blk.0.attn_q.bias": interleaved(q_bias, HEADS), "blk.0.attn_k.bias": interleaved(k_bias, KV_HEADS)}
    source = GGUFSource(write(path, named))
    for name, wanted in {"q_proj.weight": q, "k_proj.weight": k, "q_proj.bias": q_bias, "k_proj.bias": k_bias}.items():
        np.testing.assert_array_equal(source.get(f"model.layers.0.self_attn.{name}").numpy(), wanted)
    np.testing.assert_array_equal(
        source.get("model.layers.0.self_attn.v_proj.weight").numpy(), named["blk.0.attn_v.weight"]
    )
    assert not np.array_equal(interleaved(q, HEADS), q)


def test_quantized_rows_change_places_as_whole_blocks(path: Path) -> None:
    named = tensors()
    stored, q = "blk.0.attn_q.weight", named["blk.0.attn_q.weight"]
    named[stored] = gguf.quants.quantize(interleaved(q, HEADS), Quant.Q8_0)
    source = GGUFSource(write(path, named, types={stored: Quant.Q8_0}))
    wanted = gguf.quants.quantize(q, Quant.Q8_0)
    np.testing.assert_array_equal(source.raw("model.layers.0.self_attn.q_proj.weight")[1], wanted)


@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_qwen_rows_stay_and_its_extras_are_found(path: Path, arch: str) -> None:
    named = tensors()
    extra = {"blk.0.attn_q.bias": normal(HEADS * HEAD_DIM)} if arch == "qwen2" else {}
    if arch == "qwen3":
        extra = {"blk.0.attn_q_norm.weight": normal(HEAD_DIM), "blk.0.attn_k_norm.weight": normal(HEAD_DIM)}
    named |= {**extra, "output.weight": normal(VOCAB, HIDDEN)}
    source = GGUFSource(write(path, named, arch))
    assert (source.config.qkv_bias, source.config.qk_norm) == (arch == "qwen2", arch == "qwen3")
    assert (source.config.architecture, source.config.tie_embeddings) == (arch, False)
    for name, stored in {
        "model.layers.0.self_attn.q_proj.weight": "blk.0.attn_q.weight",
        "model.layers.0.self_attn.q_proj.bias": "blk.0.attn_q.bias",
        "model.layers.0.self_attn.q_norm.weight": "blk.0.attn_q_norm.weight",
        "model.layers.0.self_attn.k_norm.weight": "blk.0.attn_k_norm.weight",
        "lm_head.weight": "output.weight",
    }.items():
        assert (name in source.names()) == (stored in named)
        if stored in named:
            np.testing.assert_array_equal(source.get(name).numpy(), named[stored])


def test_config_names_and_metadata(path: Path) -> None:
    source = GGUFSource(write(path, tensors(layers=2), layers=2, edit=lambda w: w.add_sliding_window(128)))
    config = source.config
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (VOCAB, HIDDEN, FFN)
    assert (config.n_layers, config.n_heads, config.n_kv_heads, config.head_dim) == (2, HEADS, KV_HEADS, HEAD_DIM)
    assert (config.max_position, config.norm_eps, config.rope) == (512, 1e-5, RopeConfig(theta=10000.0))
    assert (config.bos_id, config.eos_ids, config.tie_embeddings) == (1, (2, 3), True)
    assert (config.sliding_window, config.qkv_bias, config.qk_norm) == ((128, 128), False, False)
    layer = {f"self_attn.{p}_proj" for p in "qkvo"} | {f"mlp.{p}_proj" for p in ("gate", "up", "down")}
    layer |= {"input_layernorm", "post_attention_layernorm"}
    wanted = {f"model.layers.{n}.{part}.weight" for n in (0, 1) for part in layer}
    assert set(source.names()) == wanted | {"model.embed_tokens.weight", "model.norm.weight"}
    assert source.metadata["tokenizer.ggml.tokens"] == ["a", "b", "ü", "<end>"]
    assert source.where == str(path)
    with pytest.raises(ModelFileError, match=r"no tensor 'lm_head.weigth'"):
        source.get("lm_head.weigth")


def test_metadata_is_plain_python(path: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_bool("x.flag", True)
        writer.add_float32("x.f32", 0.5)
        writer.add_float64("x.f64", 0.1)
        writer.add_int8("x.i8", -3)
        writer.add_uint64("x.u64", 2**63)
        writer.add_array("x.ints", [1, 2, 3])
        writer.add_array("x.flags", [True, False])

    found = GGUFSource(write(path, tensors(), edit=edit)).metadata
    values = [found[f"x.{key}"] for key in ("flag", "f32", "f64", "i8", "u64", "ints", "flags")]
    assert values == [True, 0.5, 0.1, -3, 2**63, [1, 2, 3], [True, False]]
    assert [type(value) for value in values] == [bool, float, float, int, int, list, list]


# Rotary embeddings.

KEY = "llama.rope.scaling."


def test_rope_scaling_variants(path: Path) -> None:
    def rope(**values: Any) -> RopeConfig:
        def edit(writer: gguf.GGUFWriter) -> None:
            writer.add_rope_freq_base(5e5)
            for key, value in values.items():
                add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
                add(KEY + key, value)

        return GGUFSource(write(path, tensors(), edit=edit)).config.rope

    assert rope() == rope(type="none", factor=4.0) == rope(type="linear", factor=1.0) == RopeConfig(theta=5e5)
    assert rope(type="linear", factor=4.0) == rope(factor=4.0) == RopeConfig(theta=5e5, kind="linear", factor=4.0)
    yarn = RopeConfig(theta=5e5, kind="yarn", factor=4.0, original_max_position=128)
    assert rope(type="yarn", factor=4.0, original_context_length=128) == yarn
    assert rope(type="yarn", factor=4.0).original_max_position == 512
    tuned = rope(type="yarn", factor=4.0, yarn_attn_factor=0.5, yarn_beta_fast=16.0, yarn_beta_slow=2.0)
    assert (tuned.beta_fast, tuned.beta_slow) == (16.0, 2.0)
    assert tuned.attention_factor == pytest.approx(0.5 * (0.1 * math.log(4.0) + 1.0))
    with pytest.raises(ModelFileError, match=r"rope\.scaling\.type is 'longrope'; expected is none, linear or yarn"):
        rope(type="longrope")
    with pytest.raises(ModelFileError, match=r"rope\.scaling\.factor is nan"):
        rope(factor=float("nan"))


def llama3_divisors(theta: float, head_dim: int, factor: float, context: int) -> np.ndarray:
    divisors = []
    for i in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * i / head_dim)
        if wavelength < context / 4.0:
            divisors.append(1.0)
        elif wavelength > context / 1.0:
            divisors.append(factor)
        else:
            smooth = (context / wavelength - 1.0) / (4.0 - 1.0)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


@pytest.mark.parametrize(("factor", "context"), [(8.0, None), (32.0, None), (4.0, 1024)])
def test_llama3_scaling_is_recovered_from_its_tensor(path: Path, factor: float, context: int | None) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_freq_base(5e5)
        if context:
            writer.add_rope_scaling_orig_ctx_len(context)

    divisors = llama3_divisors(5e5, 64, factor, context or 8192)
    assert len(set(divisors.tolist())) > 2  # the blend is exercised
    source = GGUFSource(write(path, {**tensors(), "rope_freqs.weight": divisors}, edit=edit, head_dim=64))
    wanted = RopeConfig(theta=5e5, kind="llama3", factor=factor, original_max_position=context or 8192)
    assert source.config.rope == wanted
    assert "rope_freqs.weight" not in source.names()
    blend = int(np.argmax((divisors > 1.0) & (divisors < factor)))
    for at, value in ((blend, divisors[blend] * 1.001), (0, np.nan), (0, 1.01), (3, np.inf), (-1, -1.0)):
        wrong = divisors.copy()
        wrong[at] = value
        write(path, {**tensors(), "rope_freqs.weight": wrong}, edit=edit, head_dim=64)
        with pytest.raises(ModelFileError, match="does not follow the Llama 3 formula"):
            GGUFSource(path)


def test_divisors_of_one_are_no_scaling_and_their_shape_is_checked(path: Path) -> None:
    ones = np.ones(HEAD_DIM // 2, np.float32)
    assert GGUFSource(write(path, {**tensors(), "rope_freqs.weight": ones})).config.rope == RopeConfig()
    write(path, {**tensors(), "rope_freqs.weight": np.ones(HEAD_DIM, np.float32)})
    with pytest.raises(ModelFileError, match=r"rope_freqs\.weight is F32 \[16\]; expected is F32 \[8\]"):
        GGUFSource(path)


# The real default model.


@pytest.mark.model
def test_the_default_model(smollm2_path: Path) -> None:
    source = GGUFSource(smollm2_path)
    config = source.config
    assert (config.architecture, config.n_layers, config.hidden_size, config.intermediate_size) == (
        "llama",
        30,
        576,
        1536,
    )
    assert (config.n_heads, config.n_kv_heads, config.head_dim, config.vocab_size) == (9, 3, 64, 49152)
    assert (config.max_position, config.rope, config.norm_eps) == (8192, RopeConfig(theta=1e5), 1e-5)
    assert (config.tie_embeddings, config.bos_id, config.eos_ids) == (True, 1, (2,))
    assert len(list(source.names())) == 272
    assert len(source.metadata["tokenizer.ggml.tokens"]) == 49152
    assert source.metadata["tokenizer.ggml.pre"] == "smollm"
    kinds = [source.raw(name)[0] for name in source.names()]
    assert (kinds.count("Q4_1"), kinds.count("Q8_0"), kinds.count("F32")) == (210, 1, 61)
    kind, blocks = source.raw("model.layers.29.mlp.down_proj.weight")
    first = blocks[0, :20].tobytes()
    found = source.get("model.layers.29.mlp.down_proj.weight")
    assert (kind, blocks.shape, tuple(found.shape)) == ("Q4_1", (576, 1536 // 32 * 20), (576, 1536))
    np.testing.assert_allclose(found[0, :32].numpy(), q4_1(first), rtol=1e-6, atol=1e-6)
