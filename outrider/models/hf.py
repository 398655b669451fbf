"""Models in Hugging Face's layout: a folder with ``config.json`` and safetensors, or a hub id that is fetched first."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from outrider.core.errors import ModelFileError, SettingError, nearest
from outrider.models.config import ModelConfig
from outrider.models.hf_config import config_from_hf
from outrider.models.source import TensorSource
from outrider.models.values import one_line, read_json

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WANTED = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
_MAPPED_AT_MOST = 256 << 20  # bytes
_UNWANTED = ("*/*", "consolidated*")  # other formats of the same weights


class HFSource(TensorSource):
    """A TensorSource over a folder; tensors are read when asked for.

    Raises ModelFileError for a folder that lacks a file, a damaged file, and weights that are not safetensors.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._config = config_from_hf(
            read_json(folder / "config.json"),
            str(folder / "config.json"),
            read_json(folder / "generation_config.json", optional=True),
        )
        self._located = self._locate()  # tensor name -> the open file that holds it
        self._mapped = 0  # bytes of tensors read since then

    @property
    def where(self) -> str:
        return str(self._folder)

    @property
    def config(self) -> ModelConfig:
        return self._config

    def names(self) -> Iterable[str]:
        return self._located.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._located[name].get_slice(name).get_shape())

    def get(self, name: str) -> torch.Tensor:
        if name not in self._located:
            raise ModelFileError(f"{self._folder} lacks tensor {name}")
        try:
            tensor: torch.Tensor = self._located[name].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelFileError(f"{self._folder}: tensor {name} cannot be read: {one_line(error)}") from error
        self._mapped += tensor.nbytes
        return tensor

    def drop(self) -> None:
        """What was read of a file counts as memory until the file is closed: this opens the files anew now and then."""
        if self._mapped > _MAPPED_AT_MOST:
            self._located, self._mapped = self._locate(), 0

    def _locate(self) -> dict[str, Any]:
        if (self._folder / _SINGLE).is_file():
            return _open(self._folder / _SINGLE)
        index = self._folder / _INDEX
        if not index.is_file():
            raise self._no_weights()
        listed = read_json(index).get("weight_map")
        if not isinstance(listed, dict) or not all(isinstance(shard, str) for shard in listed.values()):
            raise ModelFileError(f"{index} has no weight_map from tensor names to file names")
        files: dict[str, dict[str, Any]] = {}
        for shard in sorted(set(listed.values())):
            if not re.fullmatch(r"[\w-][\w.-]*\.safetensors", shard):
                raise ModelFileError(
                    f"{index} points to {shard!r}; allowed are plain names of .safetensors files in the same folder"
                )
            if not (self._folder / shard).is_file():
                raise ModelFileError(f"{self._folder} lacks the file {shard}, which {_INDEX} lists")
            files[shard] = _open(self._folder / shard)
        located = {name: file for held in files.values() for name, file in held.items()}
        for name, shard in listed.items():
            if name not in files[shard]:
                raise ModelFileError(f"{index} lists tensor {name}, which {shard} does not hold")
            located[name] = files[shard][name]
        return located

    def _no_weights(self) -> ModelFileError:
        pickles = sorted(p.name for p in self._folder.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
        if pickles:
            return ModelFileError(
                f"{self._folder} holds only pickle weights ({pickles[0]}), which can run code; convert to safetensors"
            )
        return ModelFileError(f"{self._folder} holds no weights; expected is {_SINGLE} or {_INDEX}")


def _open(path: Path) -> dict[str, Any]:
    """Every tensor name of a safetensors file, with the open file."""
    try:
        file: Any = safe_open(path, framework="pt", device="cpu")
        return dict.fromkeys(file.keys(), file)
    except (SafetensorError, OSError) as error:
        raise ModelFileError(f"{path} is damaged or not a safetensors file ({one_line(error)})") from error


def resolve(name: str, also: tuple[str, ...] = ()) -> Path:
    """The file or folder that ``name`` means: a path that exists, else a hub id 'org/name', fetched on first use.

    ``also`` are patterns of files that are fetched besides those of a model.

    Raises SettingError for a name that is neither, ModelFileError when the hub does not give it.
    """
    path = Path(name).expanduser()
    if name and path.exists():
        return path
    if name.endswith(".gguf") or path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ModelFileError(f"model is {name!r}, but there is no such file or folder")
    if not _HUB_ID.fullmatch(name):
        raise SettingError(
            f"model is {name!r}; allowed is 'smollm2', a folder or .gguf file that exists, or a hub id like "
            f"'org/name'{nearest(name, ['smollm2'])}"
        )
    return _fetch(name, also)


def _fetch(hub_id: str, also: tuple[str, ...] = ()) -> Path:
    """The folder with a snapshot of a hub repository: configuration, tokenizer and safetensors, never code."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=[*_WANTED, *also], ignore_patterns=list(_UNWANTED)))
    except RepositoryNotFoundError as error:
        raise ModelFileError(
            f"model {hub_id!r} is neither a folder here nor a repository that the Hugging Face hub lets you read"
        ) from error
    except Exception as error:  # the hub's client raises whatever its HTTP library does
        raise ModelFileError(
            f"model {hub_id!r} is not a folder here and cannot be fetched from the Hugging Face hub "
            f"({type(error).__name__}); check the connection, or give a local folder"
        ) from error
