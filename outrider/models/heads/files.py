"""The files of a drafting head: a config and named tensors, of which every one must be asked for."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from outrider.core.errors import ModelFileError, SettingError
from outrider.models.decoder import Decoder
from outrider.models.hf import resolve
from outrider.models.values import one_line, read_json, shown
from outrider.ops.contract import StoredMatrix, Weight

_PICKLES = (".pt", ".pth", ".bin")
_IGNORED = "rotary_emb.inv_freq"  # computed anew from the config


class HeadFiles:
    """Config and tensors of one head. ``take`` hands out a tensor once; ``finish`` says which nobody took."""

    def __init__(self, where: str, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        self.where, self.config = where, config
        self._left = dict(tensors)

    @classmethod
    def open(cls, name: str) -> HeadFiles:
        """Reads a folder, a weights file with a ``config.json`` beside it, or a hub id.

        Weights are safetensors, or pickles of plain tensors (``weights_only``: never code). Raises ModelFileError.
        """
        path = resolve(name, also=tuple(f"*{suffix}" for suffix in _PICKLES))
        folder = path if path.is_dir() else path.parent
        files = _weight_files(path) if path.is_dir() else [path]
        tensors: dict[str, torch.Tensor] = {}
        for file in files:
            for key, tensor in _read(file).items():
                if key in tensors:
                    raise ModelFileError(f"{folder} holds tensor {key} in more than one file")
                tensors[key] = tensor
        return cls(str(path), read_json(folder / "config.json"), tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def names(self) -> list[str]:
        """The tensors that nobody took yet."""
        return list(self._left)

    def renamed(self, old: str, new: str) -> None:
        """Names that begin with ``old`` begin with ``new`` from now on."""
        self._left = {new + k[len(old) :] if k.startswith(old) else k: v for k, v in self._left.items()}

    def take(self, name: str, *shape: int, floating: bool = True) -> torch.Tensor:
        """The tensor ``name``, which must be there and have ``shape``."""
        if name not in self._left:
            raise ModelFileError(f"{self.where} lacks tensor {name} of shape {list(shape)}")
        tensor = self._left.pop(name)
        if tuple(tensor.shape) != shape:
            raise ModelFileError(
                f"{self.where}: tensor {name} has shape {list(tensor.shape)}; the config asks for {list(shape)}"
            )
        if tensor.is_floating_point() != floating:
            kinds = "floating types" if floating else "whole numbers"
            raise ModelFileError(f"{self.where}: tensor {name} is {tensor.dtype}; allowed are {kinds}")
        return tensor

    def finish(self) -> None:
        """Raises ModelFileError if a tensor was left over: a head of another kind, or a config of another head."""
        left = sorted(name for name in self._left if not name.endswith(_IGNORED))
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise ModelFileError(
                f"{self.where} holds an unexpected tensor {left[0]} of shape {list(self._left[left[0]].shape)}{more}; "
                "a head with this config has no such tensor"
            )

    def flag(self, key: str, default: bool = False, holder: Mapping[str, Any] | None = None) -> bool:
        """True or false from the config; null counts as missing."""
        value = (self.config if holder is None else holder).get(key)
        if value not in (None, True, False):
            raise ModelFileError(f"{self.where}: {key} is {shown(value)}; allowed is true or false")
        return default if value is None else bool(value)


class HeadWeights:
    """Takes tensors of a head in the target's precision, on its device, for its operations; counts their bytes."""

    def __init__(self, files: HeadFiles, decoder: Decoder, quantization: str | None) -> None:
        self.files, self.decoder, self.quantization = files, decoder, quantization
        self.nbytes = 0

    def vector(self, name: str, size: int) -> torch.Tensor:
        """A norm or bias [size]."""
        tensor = self.files.take(name, size).to(self.decoder.device, self.decoder.dtype).contiguous()
        self.nbytes += tensor.nbytes
        return tensor

    def matrix(self, name: str, out: int, width: int, packed: bool = True) -> Weight:
        """A linear weight, or with ``packed`` False an embedding table, [out, width]."""
        tensor, decoder = self.files.take(name, out, width), self.decoder
        quantization = self.quantization if packed else None
        try:
            stored = StoredMatrix(lambda: tensor)
            weight = decoder.ops.matrix(stored, decoder.dtype, decoder.device, quantization)
        except SettingError:
            raise
        except ValueError as error:
            raise ModelFileError(f"{self.files.where}: tensor {name} cannot be packed: {error}") from error
        self.nbytes += weight.nbytes
        return weight

    def bias(self, name: str, size: int, wanted: bool = False) -> torch.Tensor | None:
        """A bias [size] where the file has it; one that the config asks for must be there."""
        return self.vector(name, size) if wanted or name in self.files else None


def _weight_files(folder: Path) -> list[Path]:
    """The weight files of a folder: safetensors before pickles, and a file named after the head before others."""
    for suffixes in ((".safetensors",), _PICKLES):
        found = sorted(p for p in folder.iterdir() if p.suffix in suffixes and p.is_file())
        named = [p for p in found if p.stem == "medusa_lm_head"]
        if found:
            return named or found
    raise ModelFileError(f"{folder} holds no weights; expected is a .safetensors, .pt or .bin file")


def _read(file: Path) -> dict[str, torch.Tensor]:
    if file.suffix == ".safetensors":
        try:
            held: dict[str, torch.Tensor] = load_file(file)
            return held
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelFileError(f"{file} is damaged or not a safetensors file ({one_line(error)})") from error
    if file.suffix not in _PICKLES:
        raise ModelFileError(f"{file} is no file of weights; allowed are .safetensors, {', '.join(_PICKLES)}")
    try:
        given = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ModelFileError(
            f"{file} holds more than plain tensors, which could run code; save its state_dict() as safetensors"
        ) from error
    except Exception as error:  # torch raises whatever a damaged archive makes it raise
        raise ModelFileError(f"{file} cannot be read ({type(error).__name__}: {one_line(error)})") from error
    if not isinstance(given, dict) or not all(isinstance(v, torch.Tensor) for v in given.values()):
        raise ModelFileError(f"{file} holds a {type(given).__name__}; expected are tensors by name (a state_dict)")
    return {str(key): tensor for key, tensor in given.items()}
