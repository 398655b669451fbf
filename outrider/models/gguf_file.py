"""The container of a GGUF file: metadata, and where each tensor's bytes lie.

Layout as in the public GGUF specification, versions 2 and 3, little endian. Every length and offset is checked against
the file's size before it is used, so a truncated or hostile file ends in a ``ModelFileError`` and nothing else. (The
``gguf`` package's own reader checks little, and takes seconds for a vocabulary: it makes arrays of each string.)
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from outrider.core.errors import ModelFileError
from outrider.models.values import shown, whole


@dataclass(frozen=True)
class TensorType:
    """How elements are stored: ``block`` elements of a row take ``n_bytes`` bytes."""

    name: str
    block: int
    n_bytes: int


TYPES: Mapping[int, TensorType] = MappingProxyType(
    {
        0: TensorType("F32", 1, 4),
        1: TensorType("F16", 1, 2),
        2: TensorType("Q4_0", 32, 18),
        3: TensorType("Q4_1", 32, 20),
        8: TensorType("Q8_0", 32, 34),
        12: TensorType("Q4_K", 256, 144),
        14: TensorType("Q6_K", 256, 210),
        30: TensorType("BF16", 1, 2),
    }
)
"""The tensor types that can be read, by their number in the file."""

_STRING, _ARRAY = 8, 9
_NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_MAX_ARRAY = 1 << 24  # elements; the largest vocabularies have under a million
_MAX_STRING = 1 << 26  # bytes
_MAX_DIMS = 4
_NO_TOKEN = 0xFFFFFFFF  # how a 32-bit field says "there is none"
_DEFAULT_ALIGNMENT = 32
_HEADER_BYTES = 24
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: its shape, outermost dimension first, and its place in the file in bytes."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    offset: int
    n_bytes: int


class GGUFFile:
    """An open (memory-mapped) GGUF file.

    ``metadata`` holds plain Python values: str, int, float, bool, or a list of one of these. Raises ModelFileError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._size = file.seek(0, 2)
                # An empty file cannot be mapped; the header check below refuses it with the right words.
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self._size else b""
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise ModelFileError(f"{path} cannot be opened: {reason}") from error
        self._at = 0
        n_tensors, n_values = self._header()
        self.metadata: Mapping[str, Any] = MappingProxyType(self._read_metadata(n_values))
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(self._read_tensors(n_tensors))

    def data(self, info: TensorInfo) -> NDArray[np.uint8]:
        """The stored bytes u8[..., bytes of a row] of a tensor: a read-only view of the file."""
        flat: NDArray[np.uint8] = np.frombuffer(self._bytes, np.uint8, info.n_bytes, info.offset)
        return flat.reshape(*info.shape[:-1], -1)

    def drop(self) -> None:
        """Gives back the memory of the pages that were read; they are read from the file again if need be."""
        if isinstance(self._bytes, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            self._bytes.madvise(mmap.MADV_DONTNEED)

    def _bad(self, what: str) -> ModelFileError:
        return ModelFileError(f"{self.path} is not a usable GGUF file: {what}")

    def _take(self, n: int, what: str) -> int:
        """Moves past ``n`` bytes and gives where they start."""
        start = self._at
        if n > self._size - start:
            raise ModelFileError(f"{self.path} is truncated: {what} ends past the file's {self._size} bytes")
        self._at = start + n
        return start

    def _u32(self, what: str) -> int:
        return int(_U32.unpack_from(self._bytes, self._take(4, what))[0])

    def _u64(self, what: str) -> int:
        return int(_U64.unpack_from(self._bytes, self._take(8, what))[0])

    def _string(self, what: str) -> str:
        n = self._u64(what)
        start = self._take(n, what)
        if n > _MAX_STRING:
            raise self._bad(f"{what} is a string of {n} bytes; at most {_MAX_STRING} are allowed")
        try:
            return self._bytes[start : start + n].decode()
        except UnicodeDecodeError:
            raise self._bad(f"{what} is not UTF-8 text") from None

    def _header(self) -> tuple[int, int]:
        """Checks magic and version; gives the numbers of tensors and of metadata values."""
        magic = self._bytes[:4]
        if magic != b"GGUF"[: self._size] or not magic:
            raise self._bad(f"it starts with {magic!r} where b'GGUF' is expected")
        self._take(_HEADER_BYTES, "the header")
        self._at = 4
        version = self._u32("the version")
        if version not in (2, 3):
            raise self._bad(f"its version is {version}; allowed are 2 and 3, little endian")
        return self._u64("the tensor count"), self._u64("the metadata count")

    def _read_metadata(self, count: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for _ in range(count):
            key = self._string("a metadata key")
            if key in values:
                raise self._bad(f"metadata {shown(key)} is there twice")
            what = f"metadata {shown(key)}"
            values[key] = self._value(self._u32(what), what)
        return values

    def _value(self, kind: int, what: str) -> Any:
        if kind == _STRING:
            return self._string(what)
        if kind != _ARRAY:
            return self._numbers(kind, 1, what)[0]
        kind = self._u32(what)
        count = self._u64(what)
        if count > _MAX_ARRAY:
            raise self._bad(f"{what} is a list of {count} values; at most {_MAX_ARRAY} are allowed")
        if kind == _STRING:
            return [self._string(what) for _ in range(count)]
        return self._numbers(kind, count, what)

    def _numbers(self, kind: int, count: int, what: str) -> list[Any]:
        if kind not in _NUMBERS:
            raise self._bad(f"{what} has the unknown type {kind}")
        dtype = np.dtype(_NUMBERS[kind])
        start = self._take(count * dtype.itemsize, what)
        values: list[Any] = np.frombuffer(self._bytes, dtype, count, start).tolist()
        return values

    def _read_tensors(self, count: int) -> dict[str, TensorInfo]:
        found = [self._tensor_info() for _ in range(count)]
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
            raise self._bad(f"general.alignment is {shown(alignment)}; allowed is a power of two")
        base = -(-self._at // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for info in found:
            if info.name in tensors:
                raise self._bad(f"tensor {shown(info.name)} is there twice")
            if info.offset % alignment:
                raise self._bad(f"tensor {shown(info.name)} has offset {info.offset}, no multiple of {alignment}")
            start = base + info.offset
            if start + info.n_bytes > self._size:
                end = start + info.n_bytes
                raise ModelFileError(
                    f"{self.path} is truncated: tensor {shown(info.name)} ends at byte {end}, the file has {self._size}"
                )
            tensors[info.name] = TensorInfo(info.name, info.type, info.shape, start, info.n_bytes)
        return tensors

    def _tensor_info(self) -> TensorInfo:
        """The next tensor's entry; its offset still counts from the start of the data."""
        name = self._string("a tensor's name")
        what = f"tensor {shown(name)}"
        n_dims = self._u32(what)
        if not 1 <= n_dims <= _MAX_DIMS:
            raise self._bad(f"{what} has {n_dims} dimensions; allowed are 1 to {_MAX_DIMS}")
        shape = tuple(self._u64(what) for _ in range(n_dims))[::-1]  # stored innermost first
        number = self._u32(what)
        offset = self._u64(what)
        kind = TYPES.get(number)
        if kind is None:
            supported = ", ".join(t.name for t in TYPES.values())
            raise ModelFileError(
                f"{self.path}: {what} has type {_type_name(number)}, which is not supported; supported are {supported}"
            )
        if 0 in shape or shape[-1] % kind.block:
            raise self._bad(f"{what} has shape {list(shape)}, which {kind.name} blocks of {kind.block} cannot fill")
        return TensorInfo(name, kind, shape, offset, math.prod(shape) // kind.block * kind.n_bytes)


def named_id(metadata: Mapping[str, Any], name: str, n_tokens: int, where: str = "") -> int | None:
    """The id of the token called ``name`` (bos, eos, ...), or None where the file names none. Raises ModelFileError."""
    key = f"tokenizer.ggml.{name}_token_id"
    value = metadata.get(key)
    if value is None or value == _NO_TOKEN:
        return None
    return whole(value, where + key, 0, n_tokens - 1)


def end_ids(metadata: Mapping[str, Any], n_tokens: int, where: str = "") -> tuple[int, ...]:
    """The tokens that end an answer. Raises ModelFileError."""
    ends = (named_id(metadata, name, n_tokens, where) for name in ("eos", "eot", "eom"))
    return tuple(dict.fromkeys(i for i in ends if i is not None))


def _type_name(number: int) -> str:
    try:
        return str(gguf.GGMLQuantizationType(number).name)
    except ValueError:
        return f"number {number}"
