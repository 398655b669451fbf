"""Packed weights on disk: what ``quantization`` made of a model's weights once is read the next time.

A file is known by what it was made from: path, size and times of each weight and configuration file of the model (among
them that of the last change of its status, which no program can set), the quantization, the layout of packed weights
and the version of this package. The layout is the same on every instruction set, so that the set is no part of it. A
file that cannot be used is made anew, and one that cannot be kept is done without.

Inside: a mark, the weights' packed bytes one after the other, the index (JSON), and a trailer with the index's length
and checksum. A weight's bytes are read right into the memory that it is used from.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

from outrider.core.errors import SettingError
from outrider.core.version import __version__
from outrider.models.pull import cache_dir
from outrider.models.source import Keep
from outrider.ops.contract import Weight
from outrider.ops.native import NativeWeight, layout, unpack

logger = logging.getLogger("outrider")
T = TypeVar("T")

LIMIT_VARIABLE = "OUTRIDER_PACKED_GIB"
_DEFAULT_GIB = 16.0
_MARK = b"OUTRIDER PACKED\n"
_TRAILER = struct.Struct("<QI")  # length and CRC-32 of the index
_SUFFIX, _UNFINISHED = ".packed", ".unfinished"
_STALE_AFTER = 24 * 3600.0  # seconds; what a killed process left behind is removed then
_CLOCK_STEP = 100_000_000  # ns; two changes of a file so close together may carry the same time


class _UnusableError(Exception):
    """A file of packed weights is damaged; the message completes a sentence that begins with its path."""


@dataclass(frozen=True)
class PackedCache:
    """A ``folder`` of packed weights, of at most ``limit`` bytes: the least recently used go first. 0 keeps none."""

    folder: Path
    limit: int

    def of(self, model: Path, quantization: str) -> PackedFile:
        """The packed weights of a model; to be asked for before the model is opened, so that no change goes unseen."""
        return PackedFile(self, model, quantization, _key(model, quantization))

    def sizes(self) -> dict[Path, int]:
        """What is kept, with its bytes, the least recently used first."""
        found: list[tuple[float, Path, int]] = []
        for path in self.folder.glob(f"*{_SUFFIX}"):
            with suppress(OSError):  # another process has just removed it
                stat = path.stat()
                found.append((stat.st_mtime, path, stat.st_size))
        return {path: size for _, path, size in sorted(found)}

    def trim(self, newest: Path) -> None:
        """Removes the least recently used files until ``limit`` holds, and what killed processes left behind."""
        sizes = self.sizes()
        total = sum(sizes.values())
        doomed = list(_stale(self.folder))
        for path, size in sizes.items():
            if total > self.limit and path != newest:
                total -= size
                doomed.append(path)
        for path in doomed:
            with suppress(OSError):  # another process tidies up as well
                path.unlink()


@dataclass(frozen=True)
class PackedFile:
    """The packed weights of one model, whether or not they are kept already. ``key`` says what they are made from."""

    cache: PackedCache
    model: Path
    quantization: str
    key: dict[str, Any]

    @property
    def path(self) -> Path:
        digest = hashlib.sha256(json.dumps(self.key).encode()).hexdigest()[:16]
        return self.cache.folder / f"{self.model.stem[:40]}-{self.quantization}-{digest}{_SUFFIX}"

    def load(self, build: Callable[[Keep, bool], T]) -> T:
        """What ``build`` makes of the weights that its first argument gives it: kept ones, or what it packs.

        The second argument says which. ``build`` is called again from the start where kept ones prove damaged.
        """
        if not self.cache.limit:
            return build(lambda name, shape, pack: pack(), False)
        try:
            with FileIO(self.path) as file:
                loaded = build(_Reader(file, self.key).weight, True)
            if self._unchanged():
                with suppress(OSError):  # a read-only folder
                    os.utime(self.path)  # used just now
                return loaded
        except FileNotFoundError:
            pass
        except (_UnusableError, OSError) as error:
            logger.warning("%s %s; it is ignored and made anew", self.path, error)
        with self._writer() as writer:
            loaded = build(writer.weight, False)
            newest = max((changed for *_, changed in self.key["files"]), default=0)
            if self._unchanged() and time.time_ns() - newest > _CLOCK_STEP:
                writer.finish(self.key, self.path)
        return loaded

    def _unchanged(self) -> bool:
        """Whether the model is what it was before it was opened."""
        try:
            return _key(self.model, self.quantization) == self.key
        except OSError:  # it is gone
            return False

    @contextmanager
    def _writer(self) -> Iterator[_Writer]:
        """A writer to an unfinished file, which is gone afterwards whatever happens."""
        folder, limit = self.cache.folder, self.cache.limit
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(_UNFINISHED, self.path.stem + ".", folder)
            writer = _Writer(FileIO(handle, "wb"), limit, Path(name))
        except OSError as error:
            _cannot_keep(folder, error)
            writer = _Writer(None, limit)
        try:
            yield writer
        finally:
            writer.discard()
        if writer.kept:
            self.cache.trim(self.path)


def _stale(folder: Path) -> Iterator[Path]:
    for path in folder.glob(f"*{_UNFINISHED}"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE_AFTER:
                yield path


def packed_cache() -> PackedCache:
    """The user's: ``packed`` beside the fetched models; $OUTRIDER_PACKED_GIB bounds its size, and 0 switches it off."""
    given = os.environ.get(LIMIT_VARIABLE) or str(_DEFAULT_GIB)
    try:
        limit = int(float(given) * (1 << 30))
    except (ValueError, OverflowError):
        limit = -1
    if limit < 0:
        raise SettingError(f"{LIMIT_VARIABLE} is {given!r}; allowed is a number >= 0, and 0 keeps no packed weights")
    return PackedCache(cache_dir() / "packed", limit)


class _Reader:
    """Weights out of a finished file. Raises _UnusableError where it is not what it should be, OSError."""

    def __init__(self, file: FileIO, key: dict[str, Any]) -> None:
        self._file = file
        self._size = file.seek(0, os.SEEK_END)
        room = self._size - len(_MARK) - _TRAILER.size
        if room < 0 or self._read(0, len(_MARK)) != _MARK:
            raise _UnusableError("is no file of packed weights")
        length, checksum = _TRAILER.unpack(self._read(self._size - _TRAILER.size, _TRAILER.size))
        text = self._read(self._size - _TRAILER.size - length, length) if length <= room else b""
        if not text or zlib.crc32(text) != checksum:
            raise _UnusableError("is truncated or damaged")
        index = json.loads(text)  # what has its checksum is what we wrote
        if index["key"] != key:
            raise _UnusableError("was made from something else")
        self._weights: dict[str, list[Any]] = index["weights"]

    def weight(self, name: str, shape: tuple[int, ...], _: Callable[[], Weight]) -> Weight:
        """The weight ``name``, right into its own memory."""
        if name not in self._weights:
            raise _UnusableError(f"lacks {name}")
        fmt, at, n_bytes, checksum = self._weights[name]
        try:
            weight = unpack(fmt, shape, n_bytes, lambda memory: self._into(at, memory))
        except ValueError as error:
            raise _UnusableError(f"holds another {name}: {error}") from error
        if weight.checksum() != checksum:
            raise _UnusableError(f"is damaged in {name}")
        return weight

    def _read(self, at: int, n: int) -> bytes:
        memory = bytearray(n)
        self._into(at, memoryview(memory))
        return bytes(memory)

    def _into(self, at: int, memory: memoryview) -> None:
        self._file.seek(at)
        while memory:
            n = self._file.readinto(memory)
            if not n:
                raise _UnusableError("is truncated")
            memory = memory[n:]


class _Writer:
    """Packs weights and writes each to ``file`` as it comes, until that fails; without a file it only packs."""

    def __init__(self, file: FileIO | None, limit: int, path: Path = Path()) -> None:
        self._file, self._limit, self._path = file, limit, path
        self._weights: dict[str, list[Any]] = {}
        self._at = 0
        self.kept = False
        self._write(_MARK)

    def weight(self, name: str, shape: tuple[int, ...], pack: Callable[[], Weight]) -> Weight:
        """What ``pack`` makes."""
        weight = pack()
        if isinstance(weight, NativeWeight) and self._file is not None:
            self._weights[name] = [weight.format, self._at, weight.nbytes, weight.checksum()]
            self._write(weight.data)
        return weight

    def finish(self, key: dict[str, Any], target: Path) -> None:
        """Puts the whole file in its place in one step."""
        text = json.dumps({"key": key, "weights": self._weights}).encode()
        self._write(text)
        self._write(_TRAILER.pack(len(text), zlib.crc32(text)))
        if self._file is None:
            return
        try:
            self._file.close()
            self._path.replace(target)
            self.kept = True
        except OSError as error:
            _cannot_keep(target.parent, error)

    def discard(self) -> None:
        """Removes what is not finished."""
        if self._file is not None:
            self._file.close()
            self._path.unlink(missing_ok=True)
            self._file = None

    def _write(self, data: bytes | memoryview) -> None:
        left = memoryview(data)
        try:
            while left and self._file is not None:
                if self._at + len(left) > self._limit:
                    raise OSError(f"they are larger than the {self._limit / (1 << 30):g} GiB allowed")
                n = self._file.write(left) or 0
                self._at, left = self._at + n, left[n:]
        except OSError as error:  # no room, say; the model is loaded all the same
            _cannot_keep(self._path.parent, error)
            self.discard()


def _key(model: Path, quantization: str) -> dict[str, Any]:
    """What a file of packed weights is known by; plain values, as JSON gives them back."""
    files = [model]
    if model.is_dir():
        files = sorted(path for path in model.iterdir() if path.suffix in (".safetensors", ".json"))
    made_from = [
        [str(path.resolve()), s.st_size, s.st_mtime_ns, s.st_ctime_ns] for path in files for s in [path.stat()]
    ]
    return {"outrider": __version__, "layout": layout(), "quantization": quantization, "files": made_from}


def _cannot_keep(folder: Path, error: OSError) -> None:
    logger.warning(
        "packed weights cannot be kept in %s: %s; OUTRIDER_CACHE names another folder, %s=0 keeps none",
        folder,
        error.strerror or error,
        LIMIT_VARIABLE,
    )
