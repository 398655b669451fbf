"""Packed weights that are kept on disk: a hit gives the very same model, and whatever is odd is a miss."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.core.errors import ModelFileError, SettingError
from outrider.models import load, packed
from outrider.models.load import LoadStep, load_model
from outrider.models.packed import PackedCache, packed_cache
from outrider.ops import native
from outrider.ops.native import NativeOps
from tests.ops.paged import Paged, Rows
from tests.tiny import write_tiny_model

pytestmark = pytest.mark.skipif(not native.available(), reason="the extension is not built")

FORMATS = ("int8", "int4")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackedCache:
    """An empty cache of this test's own, in which models count as old enough."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.delenv("OUTRIDER_PACKED_GIB", raising=False)
    monkeypatch.setattr(packed, "_CLOCK_STEP", 0)
    return packed_cache()


def logits(model: Path, quantization: str = "int8", isa: str | None = None) -> tuple[torch.Tensor, list[str]]:
    """Logits after some tokens, and what loading said that it did."""
    steps: list[LoadStep] = []
    loaded = load_model(
        str(model), device="cpu", quantization=quantization, ops=NativeOps(1, isa), progress=steps.append
    )
    (rows,) = Paged(loaded.decoder).run(Rows(0, range(20)))
    assert rows.isfinite().all()
    return rows, [step.what.split(" ")[0] for step in steps[:1]]


def only(cache: PackedCache) -> Path:
    (path,) = cache.sizes()
    assert [p for p in cache.folder.iterdir() if p != path] == [], "something unfinished was left"
    return path


@pytest.mark.parametrize("quantization", FORMATS)
def test_a_hit_gives_the_same_bits_on_every_instruction_set(quantization: str, tiny: Path, cache: PackedCache) -> None:
    first, did = logits(tiny, quantization)
    assert did == ["packing"]
    before = only(cache).read_bytes()
    for isa in native.available_isas():
        again, did = logits(tiny, quantization, isa)
        assert did == ["loading"]
        assert torch.equal(first, again)
    assert only(cache).read_bytes() == before


def test_nothing_is_read_from_the_model_that_is_kept(
    tiny: Path, cache: PackedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    want, _ = logits(tiny)
    read: list[str] = []
    get = load.HFSource.get
    monkeypatch.setattr(load.HFSource, "get", lambda self, name: (read.append(name), get(self, name))[1])
    assert torch.equal(logits(tiny)[0], want)
    assert read
    assert all("norm" in name or name == "model.embed_tokens.weight" for name in read)


def test_each_format_and_each_model_has_a_file_of_its_own(tiny: Path, tmp_path: Path, cache: PackedCache) -> None:
    other = write_tiny_model(tmp_path / "other", seed=1)
    seen = [logits(model, q)[0] for model in (tiny, other) for q in FORMATS]
    assert len(cache.sizes()) == 4
    assert [logits(model, q)[1] for model in (tiny, other) for q in FORMATS] == [["loading"]] * 4
    assert not any(torch.equal(a, b) for i, a in enumerate(seen) for b in seen[:i])


def rewritten(file: Path, change: Callable[[bytes], bytes]) -> None:
    """New content and yet the old times, as far as a program can set them."""
    stat = file.stat()
    file.write_bytes(change(file.read_bytes()))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_a_changed_model_is_packed_again(tmp_path: Path, cache: PackedCache) -> None:
    """Same name, size and modification time: the time of the last status change still tells."""
    model = write_tiny_model(tmp_path / "model")
    weights = model / "model.safetensors"
    first, _ = logits(model)
    time.sleep(0.02)  # a step of the file system's clock
    rewritten(weights, lambda data: data[:-400] + bytes(400))
    second, did = logits(model)
    assert did == ["packing"]
    assert not torch.equal(first, second)
    assert logits(model)[1] == ["loading"]
    config = model / "config.json"
    rewritten(config, lambda data: data + b"\n")
    assert logits(model)[1] == ["packing"]


def test_a_model_that_has_only_just_changed_is_not_kept(
    tmp_path: Path, cache: PackedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second change might carry the same time."""
    model = write_tiny_model(tmp_path / "model")
    monkeypatch.setattr(packed, "_CLOCK_STEP", 3600 * 10**9)
    logits(model)
    assert cache.sizes() == {}


def test_a_model_that_changes_while_it_is_packed_is_not_kept(tmp_path: Path, cache: PackedCache) -> None:
    model = write_tiny_model(tmp_path / "model")

    def build(keep: Any, kept: bool) -> None:
        keep("a", (16, 32), lambda: native.pack(torch.ones(16, 32), "int8"))
        (model / "config.json").touch()

    cache.of(model, "int8").load(build)
    assert cache.sizes() == {}


def test_a_model_that_changes_while_kept_weights_are_read_is_read_itself(tmp_path: Path, cache: PackedCache) -> None:
    model = write_tiny_model(tmp_path / "model")
    logits(model)
    seen: list[bool] = []

    def build(keep: Any, kept: bool) -> None:
        seen.append(kept)
        (model / "config.json").touch()

    cache.of(model, "int8").load(build)
    assert seen == [True, False]


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


def test_several_writers_at_once(tiny: Path, cache: PackedCache) -> None:
    results: list[torch.Tensor] = []
    gate = threading.Barrier(4)

    def work() -> None:
        gate.wait()
        results.extend(logits(tiny)[0] for _ in range(3))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 12
    assert all(torch.equal(rows, results[0]) for rows in results)
    only(cache)
    assert logits(tiny)[1] == ["loading"]


def test_the_least_recently_used_go_first(tiny: Path, cache: PackedCache) -> None:
    w = native.pack(torch.ones(16, 32), "int8")
    models = [write_tiny_model(tiny.parent / f"m{i}", seed=i) for i in range(4)]

    def use(model: Path) -> bool:
        return cache.of(model, "int8").load(lambda keep, kept: (keep("a", (16, 32), lambda: w), kept)[1])

    assert not use(models[0])
    (size,) = cache.sizes().values()
    cache = replace(cache, limit=3 * size + size // 2)
    for age, model in enumerate(models[1:3]):
        use(model)
        for i, path in enumerate(cache.sizes()):
            os.utime(path, (i + 10 * age, i + 10 * age))
    assert use(models[0]), "now the most recently used"
    (cache.folder / "left.unfinished").touch()
    os.utime(cache.folder / "left.unfinished", (0, 0))
    (cache.folder / "busy.unfinished").touch()
    assert not use(models[3])
    assert len(cache.sizes()) == 3
    assert sum(cache.sizes().values()) <= cache.limit
    assert cache.of(models[1], "int8").path not in cache.sizes()
    assert cache.of(models[0], "int8").path in cache.sizes()
    assert sorted(p.name for p in cache.folder.glob("*.unfinished")) == ["busy.unfinished"]


def test_weights_larger_than_the_limit_are_not_kept(
    tiny: Path, cache: PackedCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OUTRIDER_PACKED_GIB", "0.000001")
    logits(tiny)
    assert "larger than the" in caplog.messages[0]
    assert list(cache.folder.iterdir()) == []


def test_it_can_be_switched_off(tiny: Path, cache: PackedCache, monkeypatch: pytest.MonkeyPatch) -> None:
    want, _ = logits(tiny)
    monkeypatch.setenv("OUTRIDER_PACKED_GIB", "0")
    again, did = logits(tiny)
    assert did == ["packing"]
    assert torch.equal(want, again)
    for bad in ("-1", "much", "nan", "inf"):
        monkeypatch.setenv("OUTRIDER_PACKED_GIB", bad)
        with pytest.raises(SettingError, match=f"OUTRIDER_PACKED_GIB is '{bad}'; allowed is a number >= 0"):
            packed_cache()


def test_unquantized_models_and_the_reference_operations_keep_nothing(tiny: Path, cache: PackedCache) -> None:
    load_model(str(tiny), device="cpu")
    load_model(str(tiny), device="cpu", quantization="int8", ops="reference")
    assert not cache.folder.exists()


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


def test_progress_counts_the_layers(tiny: Path, cache: PackedCache) -> None:
    steps: list[LoadStep] = []
    model = load_model(str(tiny), device="cpu", quantization="int8", progress=steps.append)
    n = model.config.n_layers
    assert [(step.layer, step.layers) for step in steps] == [(i, n) for i in range(n + 1)]
    assert {step.what for step in steps} == {f"packing {tiny.name} as int8"}


def test_info_shows_folder_and_size(tiny: Path, cache: PackedCache, capsys: pytest.CaptureFixture[str]) -> None:
    from outrider.cli.main import main

    logits(tiny)
    main(["info"])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("packed weights")]
    assert str(cache.folder) in line
    assert "1 model, 0 MiB of at most 16 GiB" in line


def test_the_index_is_plain_json(tiny: Path, cache: PackedCache) -> None:
    """Every linear weight of every layer and the head, once each, side by side."""
    logits(tiny)
    data = only(cache).read_bytes()
    length = int.from_bytes(data[-12:-4], "little")
    index = json.loads(data[-12 - length : -12])
    at = 16
    for fmt, offset, n_bytes, _ in index["weights"].values():
        assert fmt == "int8"
        assert offset == at
        at += n_bytes
    assert at == len(data) - 12 - length
    assert len(index["weights"]) == 7 * 2 + 1
