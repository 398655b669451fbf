"""Packed weights on disk that are damaged or cannot be kept: the model is loaded all the same."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.core.errors import ModelFileError
from outrider.models import packed
from outrider.models.load import LoadStep, load_model
from outrider.models.packed import PackedCache
from outrider.ops import native
from tests.models.packing import logits, only
from tests.tiny import write_tiny_model

pytestmark = pytest.mark.skipif(not native.available(), reason="the extension is not built")

FORMATS = ("int8", "int4")


def flipped(at: int) -> Callable[[bytes], bytes]:
    """One bit of one byte, counted from the end if negative."""
    return lambda data: data[: at % len(data)] + bytes([data[at] ^ 4]) + data[at % len(data) + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:7],
        lambda data: data[:-1],
        lambda data: data[: len(data) // 2],
        lambda data: data + b"x",
        lambda data: data[::-1],
        lambda data: bytes(len(data)),
        lambda data: b"no packed weights at all",
        lambda data: data[:16] + data[17:],
        flipped(0),
        flipped(16),
        flipped(5000),
        flipped(-1),
        flipped(-9),
        flipped(-40),
    ],
)
def test_a_damaged_file_is_ignored_and_made_anew(
    damage: Callable[[bytes], bytes], tiny: Path, cache: PackedCache, caplog: pytest.LogCaptureFixture
) -> None:
    want, _ = logits(tiny)
    path, good = only(cache), only(cache).read_bytes()
    path.write_bytes(damage(good))
    assert torch.equal(logits(tiny)[0], want)
    (line,) = caplog.messages
    assert line.startswith(str(path))
    assert line.endswith("; it is ignored and made anew")
    assert only(cache).read_bytes() == good
    assert logits(tiny)[1] == ["loading"]


@pytest.mark.parametrize(
    "change", [{"outrider": "0.0.1"}, {"layout": "9-little"}, {"files": []}, {"quantization": "int4"}]
)
def test_a_file_made_from_something_else_is_ignored(
    change: dict[str, Any], tiny: Path, cache: PackedCache, caplog: pytest.LogCaptureFixture
) -> None:
    """Under the right name, but not what it says."""
    want, _ = logits(tiny)
    mine = cache.of(tiny, "int8")
    other = replace(mine, key={**mine.key, **change})
    assert other.path.name != mine.path.name
    mine.path.rename(other.path)
    assert logits(tiny)[1] == ["packing"]
    with FileIO(mine.path) as file, pytest.raises(Exception, match="was made from something else"):
        packed._Reader(file, other.key)
    assert torch.equal(logits(tiny)[0], want)


def test_a_weight_of_another_shape_or_missing_is_ignored(
    tiny: Path, cache: PackedCache, caplog: pytest.LogCaptureFixture
) -> None:
    entry, w = cache.of(tiny, "int8"), native.pack(torch.ones(16, 32), "int8")
    entry.load(lambda keep, kept: keep("a", (16, 32), lambda: w))
    for name, shape, words in (("a", (16, 64), "holds another a"), ("b", (16, 32), "lacks b")):
        seen: list[bool] = []

        def build(keep: Any, kept: bool, name: str = name, shape: Any = shape, seen: list[bool] = seen) -> None:
            seen.append(kept)
            if kept:
                keep(name, shape, lambda: w)
            else:
                keep("a", (16, 32), lambda: w)

        entry.load(build)
        assert seen == [True, False]
        assert words in caplog.messages[-1]


def test_a_place_that_cannot_be_written_is_no_error(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "file"))
    assert logits(tiny)[1] == ["packing"]
    assert any(
        "packed weights cannot be kept in" in line and "OUTRIDER_PACKED_GIB=0" in line for line in caplog.messages
    )


def test_a_read_only_folder_still_serves_what_is_in_it(
    tiny: Path, cache: PackedCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    want, _ = logits(tiny)

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "utime", refused)
    monkeypatch.setattr(packed.tempfile, "mkstemp", refused)
    again, did = logits(tiny)
    assert did == ["loading"]
    assert torch.equal(want, again)
    assert caplog.messages == []
    assert logits(tiny, "int4")[1] == ["packing"]
    assert "Permission denied" in caplog.messages[0]


def test_a_full_disk_is_no_error(
    tiny: Path, cache: PackedCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Full(FileIO):
        left = 3000

        def write(self, data: Any) -> int:
            if self.left < len(data):
                raise OSError(28, "No space left on device")
            self.left -= len(data)
            return super().write(data)

    monkeypatch.setattr(packed, "FileIO", Full)
    logits(tiny)
    assert len(caplog.messages) == 1
    assert "No space left on device" in caplog.messages[0]
    assert list(cache.folder.iterdir()) == []


def test_a_broken_off_load_leaves_nothing(tiny: Path, cache: PackedCache) -> None:
    def stop(step: LoadStep) -> None:
        if step.layer == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_model(str(tiny), device="cpu", quantization="int8", progress=stop)
    assert list(cache.folder.iterdir()) == []


def test_weights_larger_than_the_limit_are_not_kept(
    tiny: Path, cache: PackedCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OUTRIDER_PACKED_GIB", "0.000001")
    logits(tiny)
    assert "larger than the" in caplog.messages[0]
    assert list(cache.folder.iterdir()) == []


def test_what_cannot_be_packed_is_one_sentence_naming_the_tensor(tmp_path: Path, cache: PackedCache) -> None:
    from safetensors.torch import load_file, save_file

    model = write_tiny_model(tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    name = next(name for name in tensors if name.endswith("1.mlp.up_proj.weight"))
    tensors[name][3, 4] = torch.nan
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(ModelFileError, match=f"tensor {name} cannot be packed: a weight is not finite"):
        load_model(str(model), device="cpu", quantization="int8")
    assert list(cache.folder.iterdir()) == []
