"""Packed weights that are kept on disk: a hit gives the very same model, and a changed model is a miss."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.core.errors import SettingError
from outrider.models import load, packed
from outrider.models.load import LoadStep, load_model
from outrider.models.packed import PackedCache, packed_cache
from outrider.ops import native
from tests.models.packing import logits, only
from tests.tiny import write_tiny_model

pytestmark = pytest.mark.skipif(not native.available(), reason="the extension is not built")

FORMATS = ("int8", "int4")


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
