"""Loading a model by name: weights, tokenizer and chat template, from whichever format they come in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from outrider.core.config import DTYPES, QUANTIZATIONS
from outrider.core.errors import ModelFileError, SettingError, nearest
from outrider.models.config import ModelConfig
from outrider.models.decoder import Decoder
from outrider.models.hf import HFSource, resolve
from outrider.models.source import TensorSource
from outrider.ops.reference import ReferenceOps

if TYPE_CHECKING:
    from outrider.models.chat_template import ChatTemplate
    from outrider.models.tokenizer import Tokenizer

DEFAULT_MODEL = "smollm2"


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model ready to run. Only this ``config`` has the end tokens of model file and tokenizer together."""

    name: str
    config: ModelConfig
    decoder: Decoder
    tokenizer: Tokenizer | None  # None only for toy models, which speak token ids
    chat_template: ChatTemplate | None
    weight_bytes: int


def load_model(name: str, *, dtype: str = "auto", device: str = "auto", quantization: str | None = None) -> LoadedModel:
    """Loads 'smollm2' (fetched if need be), a ``.gguf`` file, a Hugging Face folder or a hub id.

    Raises SettingError for a setting that is not allowed, ModelFileError for a file that cannot be used.
    """
    from outrider.models.chat_template import load_chat_template
    from outrider.models.tokenizer import load_tokenizer

    place = pick_device(device)
    precision = pick_dtype(dtype, place)
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise SettingError(f"quantization is {quantization!r}; allowed is {', '.join(QUANTIZATIONS)} or None")
    path = find(name)
    source = open_source(path)
    tokenizer = load_tokenizer(path)
    decoder = Decoder.from_source(source, ReferenceOps(), precision, place, quantization)
    ends = tuple(dict.fromkeys((*source.config.eos_ids, *tokenizer.eos_ids)))
    config = replace(source.config, eos_ids=ends)
    shown = name if name == DEFAULT_MODEL or not Path(name).expanduser().exists() else path.resolve().name
    return LoadedModel(shown, config, decoder, tokenizer, load_chat_template(path), decoder.weight_bytes)


def find(name: str) -> Path:
    """The file or folder of a model; what is not here yet is fetched."""
    if name == DEFAULT_MODEL:
        from outrider.models.pull import ensure

        return ensure(name)
    return resolve(name)


def open_source(path: Path) -> TensorSource:
    """The tensors of a ``.gguf`` file or a Hugging Face folder."""
    if path.is_dir():
        return HFSource(path)
    if path.suffix == ".gguf":
        from outrider.models.gguf_source import GGUFSource

        return GGUFSource(path)
    raise ModelFileError(f"{path} is a file; allowed are .gguf files and Hugging Face folders")


def pick_device(device: str) -> torch.device:
    """The device a setting means; 'auto' is the first GPU, or the CPU where there is none."""
    gpus = torch.cuda.device_count()
    if device == "auto":
        return torch.device("cuda" if gpus else "cpu")
    if device == "cpu":
        return torch.device("cpu")
    kind, _, number = device.partition(":")
    if kind != "cuda" or (number and not number.isdecimal()) or device.endswith(":"):
        raise SettingError(f"device is {device!r}; allowed is auto, cpu, cuda or cuda:N")
    if int(number or 0) >= gpus:
        raise SettingError(f"device is {device!r}, but this machine has {gpus or 'no'} CUDA devices")
    return torch.device(device)


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The precision a setting means; 'auto' is float32 on the CPU, bfloat16 on a GPU."""
    if dtype not in DTYPES:
        raise SettingError(f"dtype is {dtype!r}; allowed is one of {', '.join(DTYPES)}{nearest(dtype, DTYPES)}")
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    precision: torch.dtype = getattr(torch, dtype)
    return precision
