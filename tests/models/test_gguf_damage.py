"""GGUF files that are wrong, foreign, cut short or hostile: always one clear sentence."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from outrider.core.errors import ModelFileError
from outrider.models.gguf_source import GGUFSource
from tests.models.gguf_files import HEAD_DIM, HIDDEN, VOCAB, Quant, normal, tensors, write


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tiny.gguf"


def drop(key: str) -> Callable[[gguf.GGUFWriter], None]:
    def edit(writer: gguf.GGUFWriter) -> None:
        del writer.kv_data[0][key]

    return edit


def put(key: str, value: float) -> Callable[[gguf.GGUFWriter], None]:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop(key, None)
        if isinstance(value, float):
            writer.add_float64(key, value)
        else:
            writer.add_uint64(key, value) if value >= 2**32 else writer.add_uint32(key, value)

    return edit


def yarn(changes: dict[str, float]) -> Callable[[gguf.GGUFWriter], None]:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_string("llama.rope.scaling.type", "yarn")
        for key, value in {"rope.scaling.factor": 4.0, **changes}.items():
            put(f"llama.{key}", value)(writer)

    return edit


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (drop("llama.embedding_length"), r"llama\.embedding_length is missing; expected is a number"),
        (drop("llama.attention.layer_norm_rms_epsilon"), "layer_norm_rms_epsilon is missing"),
        (
            put("llama.embedding_length", HIDDEN + 1),
            r"token_embd\.weight is \[40, 32\]; expected is \[vocabulary, 33\]",
        ),
        (put("llama.block_count", 2), r"block_count is 2; expected is the number of layers that have tensors, 1"),
        (put("llama.block_count", 2**32 - 1), "block_count is 4294967295"),
        (put("llama.attention.head_count_kv", 3), "must be a multiple of the KV heads"),
        (put("llama.attention.value_length", 8), "value_length is 8; expected is the head dimension, 16"),
        (put("llama.rope.dimension_count", 8), "dimension_count is 8; expected is the head dimension, 16"),
        (put("tokenizer.ggml.eos_token_id", VOCAB), "eos_token_id is 40; allowed is a whole number from 0 to 39"),
        (
            put("llama.embedding_length", 10**12),
            "embedding_length is 1000000000000; allowed",
        ),
        (put("llama.attention.head_count", 0), "head_count is 0; allowed is a whole number from 1 to"),
        (put("llama.attention.key_length", 0), "key_length is 0; allowed is a whole number from 1 to"),
        (put("llama.context_length", 2**60), "context_length is 1152921504606846976; allowed"),
        (put("llama.attention.layer_norm_rms_epsilon", math.inf), "rms_epsilon is inf; allowed is a number from"),
        (put("llama.rope.freq_base", math.nan), "freq_base is nan; allowed is a number from"),
        (put("llama.rope.freq_base", 1e300), r"freq_base is 1e\+300; allowed is a number from"),
        (put("llama.rope.scaling.factor", 1e-9), "factor is 1e-09; allowed is a number from 0.001 to"),
        (yarn({"rope.freq_base": 1.0}), "freq_base is 1.0; expected is a number above 1 with yarn"),
        (yarn({"rope.scaling.yarn_beta_fast": math.inf}), "yarn_beta_fast is inf; allowed is a number from"),
        (yarn({"rope.scaling.original_context_length": 0}), "original_context_length is 0; allowed"),
        (put("split.count", 3), r"split\.count is 3; expected is one file"),
        (put("general.alignment", 24), r"general\.alignment is 24; allowed is a power of two"),
        (put("general.alignment", 0), r"general\.alignment is 0"),
    ],
)
def test_wrong_metadata_says_what_is_wrong(path: Path, edit: Callable[[gguf.GGUFWriter], None], words: str) -> None:
    write(path, tensors(), edit=edit)
    with pytest.raises(ModelFileError, match=words):
        GGUFSource(path)


def test_no_bos_is_none(path: Path) -> None:
    assert GGUFSource(write(path, tensors(), edit=put("tokenizer.ggml.bos_token_id", 2**32 - 1))).config.bos_id is None


def test_unknown_architecture_lists_the_known(path: Path) -> None:
    write(path, tensors(), "mamba")
    with pytest.raises(ModelFileError, match=r"architecture 'mamba', which is unknown; known are llama, qwen2, qwen3$"):
        GGUFSource(path)


@pytest.mark.parametrize("name", ["blk.0.ffn_gate_inp.weight", "blk.0.attn_norm.bias", "blk.00.attn_v.weight", "x"])
def test_a_tensor_that_would_be_ignored_is_an_error(path: Path, name: str) -> None:
    write(path, {**tensors(), name: normal(HIDDEN)})
    with pytest.raises(ModelFileError, match=f"tensor '{name}', which a llama decoder without experts"):
        GGUFSource(path)


def test_wrong_head_rows_are_an_error_on_reading(path: Path) -> None:
    source = GGUFSource(write(path, {**tensors(), "blk.0.attn_q.weight": normal(48, HIDDEN)}))
    with pytest.raises(ModelFileError, match="48 rows of type F32, 4 heads of 16"):
        source.get("model.layers.0.self_attn.q_proj.weight")


def test_files_of_other_kinds(path: Path) -> None:
    for content, words in {
        b"": "is not a usable GGUF file",
        b"PK\x03\x04" + bytes(60): "starts with b'PK",
        b"GGUF" + struct.pack("<IQQ", 1, 0, 0): "version is 1; allowed are 2 and 3",
    }.items():
        path.write_bytes(content)
        with pytest.raises(ModelFileError, match=words):
            GGUFSource(path)
    write(path, tensors(), endianess=gguf.GGUFEndian.BIG)
    with pytest.raises(ModelFileError, match="little endian"):
        GGUFSource(path)
    for missing in (path.parent, path.parent / "none.gguf"):
        with pytest.raises(ModelFileError, match="cannot be opened"):
            GGUFSource(missing)


def test_version_2_reads_the_same(path: Path) -> None:
    content = bytearray(write(path, tensors()).read_bytes())
    wanted = GGUFSource(path).get("model.embed_tokens.weight")
    content[4] = 2
    path.write_bytes(content)
    assert torch.equal(GGUFSource(path).get("model.embed_tokens.weight"), wanted)


def test_alignment_is_honoured(path: Path) -> None:
    named = tensors()
    write(path, named, edit=lambda w: w.add_custom_alignment(1024))
    source = GGUFSource(path)
    np.testing.assert_array_equal(source.get("model.norm.weight").numpy(), named["output_norm.weight"])
    np.testing.assert_array_equal(source.get("model.layers.0.mlp.up_proj.weight").numpy(), named["blk.0.ffn_up.weight"])


def small_file(path: Path) -> tuple[bytes, int]:
    """A valid file with Q8_0 and F32 tensors, and where its data begin."""
    named = tensors()
    types = {}
    for stored in ("blk.0.ffn_down.weight", "blk.0.attn_q.weight"):
        named[stored] = gguf.quants.quantize(named[stored], Quant.Q8_0)
        types[stored] = Quant.Q8_0
    named["rope_freqs.weight"] = np.ones(HEAD_DIM // 2, np.float32)
    write(path, named, types=types)
    start = min(info.offset for info in GGUFSource(path)._file.tensors.values())
    return path.read_bytes(), start


def test_every_truncation_is_an_error(path: Path) -> None:
    content, start = small_file(path)
    cut = path.with_name("cut.gguf")
    for n in (*range(start), *range(start, len(content), 997), len(content) - 1):
        cut.write_bytes(content[:n])
        with pytest.raises(ModelFileError, match="truncated" if n >= 4 else "truncated|not a usable"):
            GGUFSource(cut)
    cut.write_bytes(content)
    GGUFSource(cut)


def loads(path: Path) -> bool:
    """Whether the file can be read whole; any error but ModelFileError comes through."""
    try:
        source = GGUFSource(path)
        for name in source.names():
            assert tuple(source.get(name).shape) == source.shape(name)
    except ModelFileError as error:
        one_sentence = str(path) in str(error) and "\n" not in str(error) and len(str(error)) < 600
        if not one_sentence:
            raise AssertionError(str(error)) from error
        return False
    return True


def test_hostile_lengths_anywhere_in_the_header(path: Path) -> None:
    content, start = small_file(path)
    bad = path.with_name("bad.gguf")
    refused = 0
    for at in range(start):
        for value in (2**64 - 1, 2**32):
            bad.write_bytes(content[:at] + struct.pack("<Q", value) + content[at + 8 :])
            refused += not loads(bad)
    assert refused > start


def test_random_damage_to_the_header(path: Path) -> None:
    content, start = small_file(path)
    bad = path.with_name("bad.gguf")
    rng = random.Random(11)
    outcomes = set()
    for _ in range(2500):
        damaged = bytearray(content)
        for _ in range(rng.choice((1, 1, 2, 8))):
            damaged[rng.randrange(start)] = rng.choice((0, 1, 255, rng.randrange(256)))
        bad.write_bytes(damaged)
        outcomes.add(loads(bad))
    assert outcomes == {True, False}
