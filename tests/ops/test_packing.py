"""How weights get into their packed form, and that form in and out of plain bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.ops import native
from outrider.ops.contract import StoredMatrix
from outrider.ops.native import NativeOps, NativeWeight, pack, pack_gguf, unpack
from tests.ops.test_native import FORMATS, gguf_blocks, some_weight

pytestmark = pytest.mark.skipif(not native.available(), reason="the extension is not built")

SHAPES = [(1, 32), (16, 64), (37, 96)]


def copied(weight: NativeWeight, change: int | None = None) -> NativeWeight:
    """The weight once more from its bytes, with one bit of byte ``change`` turned over."""
    data = bytearray(weight.data)
    if change is not None:
        data[change] ^= 1 << change % 8

    def fill(memory: memoryview) -> None:
        memory[:] = data

    return unpack(weight.format, weight.shape, weight.nbytes, fill)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_packed_bytes_make_the_same_weight(fmt: str, shape: tuple[int, int]) -> None:
    weight = some_weight(fmt, *shape)
    again = copied(weight)
    assert (again.format, again.shape, again.nbytes) == (fmt, shape, weight.nbytes)
    assert len(weight.data) == weight.nbytes
    assert again.data == weight.data
    assert again.checksum() == weight.checksum()
    x = torch.randn(3, shape[1])
    assert torch.equal(NativeOps(1).linear(x, again), NativeOps(1).linear(x, weight))


@pytest.mark.parametrize("fmt", FORMATS)
def test_the_checksum_sees_every_turned_bit(fmt: str) -> None:
    weight = some_weight(fmt, 3, 32)
    sums = {copied(weight, byte).checksum() for byte in range(weight.nbytes)}
    assert weight.checksum() not in sums
    assert len(sums) == weight.nbytes


def test_packed_bytes_are_read_only_and_outlive_the_weight() -> None:
    data = pack(torch.ones(16, 32), "int8").data
    assert set(bytes(data[:512])) == {255}  # 127 + 128
    with pytest.raises(TypeError):
        data[0] = 1


def test_bytes_of_another_size_are_refused() -> None:
    weight = some_weight("int8", 16, 64)
    for fmt, shape, n_bytes in (
        ("int8", (16, 64), weight.nbytes - 1),
        ("int8", (32, 64), weight.nbytes),
        ("q4_1", (16, 64), weight.nbytes),
        ("int8", (16, 65), weight.nbytes),
        ("int8", (0, 64), 0),
        ("int8", (-16, 64), weight.nbytes),
        ("int7", (16, 64), weight.nbytes),
    ):
        with pytest.raises(ValueError, match=r"\w+ .*"):
            unpack(fmt, shape, n_bytes, lambda memory: pytest.fail("there is nothing to fill"))


@pytest.mark.parametrize("fmt", native.FLOAT_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_floating_type_packs_as_its_values_in_fp32(fmt: str, dtype: torch.dtype) -> None:
    w = (torch.randn(20, 64, generator=torch.Generator().manual_seed(2)) * torch.logspace(-7, 2, 20)[:, None]).to(dtype)
    if dtype == torch.float16:
        assert (w.abs() < 2**-14).any()  # subnormal ones too
    assert pack(w, fmt).data == pack(w.float(), fmt).data


@pytest.mark.parametrize("fmt", native.FLOAT_FORMATS)
@pytest.mark.parametrize("kind", native.GGUF_FORMATS)
def test_rounding_gguf_blocks_is_rounding_what_they_stand_for(kind: str, fmt: str) -> None:
    import gguf

    raw, _ = gguf_blocks(kind, 21, 96)
    exact = gguf.quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType[kind]).astype(np.float32)
    packed = pack_gguf(kind, raw, 21, 96, fmt)
    assert packed.format == fmt
    if native.GGUF_FORMATS[kind] == fmt:
        assert packed.data == pack_gguf(kind, raw, 21, 96).data
    else:
        assert packed.data == pack(torch.from_numpy(exact), fmt).data


def test_blocks_become_q4_0_only_as_they_are() -> None:
    with pytest.raises(ValueError, match="only Q4_0 blocks"):
        pack_gguf("Q8_0", gguf_blocks("Q8_0", 4, 32)[0], 4, 32, "q4_0")


@pytest.mark.parametrize(
    ("kind", "quantization", "fmt"),
    [
        ("Q4_1", None, "q4_1"),
        ("Q4_1", "int4", "q4_1"),
        ("Q4_0", "int4", "q4_0"),
        ("Q8_0", "int4", "q4_1"),
        ("Q8_0", None, "q8_0"),
        ("Q8_0", "int8", "q8_0"),
        ("Q4_1", "int8", "int8"),
    ],
)
def test_what_is_asked_for_and_what_a_file_holds(kind: str, quantization: str | None, fmt: str) -> None:
    """Four bits that are there already are kept as they are: rounding once more could only lose."""
    raw, value = gguf_blocks(kind, 16, 64)
    stored = StoredMatrix(lambda: value, (kind, raw.numpy()))
    weight = NativeOps(1).matrix(stored, torch.float32, torch.device("cpu"), quantization)
    assert weight.format == fmt
