"""Loading a model by name: weights, tokenizer and chat template, from whichever format they come in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from outrider.core.config import DTYPES, OPERATIONS, QUANTIZATIONS
from outrider.core.errors import ModelFileError, OutriderError, SettingError, nearest
from outrider.models.config import ModelConfig
from outrider.models.decoder import Decoder, weight_bytes
from outrider.models.hf import HFSource, resolve
from outrider.models.packed import packed_cache
from outrider.models.source import Keep, TensorSource
from outrider.models.values import one_line
from outrider.ops.contract import Ops
from outrider.ops.native import NATIVE_DTYPES, NativeOps, available, default_threads
from outrider.ops.reference import ReferenceOps

if TYPE_CHECKING:
    from outrider.models.chat_template import ChatTemplate
    from outrider.models.grammars import Grammars
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

    @property
    def n_tokens(self) -> int:
        """Token ids that may be drawn: the rows of the vocabulary without their padding."""
        rows = self.config.vocab_size
        return rows if self.tokenizer is None else min(rows, self.tokenizer.vocab_size)

    @cached_property
    def unused_ids(self) -> tuple[int, ...]:
        """Ids below ``n_tokens`` that stand for no token."""
        return () if self.tokenizer is None else tuple(i for i in self.tokenizer.unused_ids if i < self.n_tokens)

    @cached_property
    def grammars(self) -> Grammars:
        """Compiles grammars for this model's tokens."""
        from outrider.models.grammars import Grammars

        return Grammars(self.tokenizer, self.n_tokens, self.config.eos_ids)


@dataclass(frozen=True)
class LoadStep:
    """How far loading is: ``layer`` of the ``layers`` (or what else ``unit`` says) are done; ``what`` is for people."""

    what: str
    layer: int
    layers: int
    unit: str = "layer"


Progress = Callable[[LoadStep], None]


@dataclass(frozen=True, eq=False)
class OpenModel:
    """What one reading of a model's files gives; its weights are still in them."""

    source: TensorSource
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None


def load_model(
    name: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    quantization: str | None = None,
    ops: str | Ops = "auto",
    threads: int | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Loads 'smollm2' (fetched if need be), a ``.gguf`` file, a Hugging Face folder or a hub id.

    ``quantization`` packs the linear weights in 8 or 4 bits; what the native operations packed is kept on disk for the
    next time (see ``packed``). ``ops`` is a setting, or the operations of another model to share (a thread pool, for
    one); ``threads`` are those of the native operations; ``progress`` is told how far loading is. Raises SettingError
    for a setting that is not allowed, ModelFileError for a file that cannot be used.
    """
    place = pick_device(device)
    precision = pick_dtype(dtype, place)
    operations = pick_ops(ops, place, precision, threads) if isinstance(ops, str) else ops
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise SettingError(f"quantization is {quantization!r}; allowed is {', '.join(QUANTIZATIONS)} or None")
    path = find(name)
    with _one_sentence(path):
        native = isinstance(operations, NativeOps)
        packed = packed_cache().of(path, quantization) if quantization and native else None
        opened = open_model(path)
    config, tokenizer = opened.source.config, opened.tokenizer
    need = f"{weight_bytes(config, precision, quantization) / (1 << 20):.0f} MiB"
    shown = name if name == DEFAULT_MODEL or not Path(name).expanduser().exists() else path.resolve().name

    def build(keep: Keep, kept: bool) -> Decoder:
        what = f"loading {shown}" if kept or quantization is None else f"packing {shown} as {quantization}"

        def tell(layer: int, layers: int) -> None:
            if progress is not None:
                progress(LoadStep(what, layer, layers))

        return Decoder.from_source(opened.source, operations, precision, place, quantization, keep, tell)

    with _one_sentence(path, f"; its weights need {need} on {place}"):
        decoder = packed.load(build) if packed else build(lambda name, shape, pack: pack(), False)
    ends = dict.fromkeys((*config.eos_ids, *(i for i in tokenizer.eos_ids if i < config.vocab_size)))
    config = replace(config, eos_ids=tuple(ends))
    return LoadedModel(shown, config, decoder, tokenizer, opened.chat_template, decoder.weight_bytes)


@contextmanager
def _one_sentence(path: Path, need: str = "") -> Iterator[None]:
    """The last resort: too little memory, and what nobody foresaw in a file, become a ModelFileError."""
    try:
        yield
    except (OutriderError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic inside a Rust library is no Exception
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in str(error):
            raise ModelFileError(f"{path} does not fit in memory{need}") from error
        raise ModelFileError(f"{path} cannot be read: {type(error).__name__}: {one_line(error)}") from error


def find(name: str) -> Path:
    """The file or folder of a model; what is not here yet is fetched."""
    if name == DEFAULT_MODEL:
        from outrider.models.pull import ensure

        return ensure(name)
    return resolve(name)


def open_model(path: Path) -> OpenModel:
    """Opens a ``.gguf`` file or a Hugging Face folder, whatever its name. Raises ModelFileError."""
    from outrider.models.chat_template import chat_template_from_folder, chat_template_from_metadata
    from outrider.models.tokenizer import tokenizer_from_folder

    if path.is_dir():
        return OpenModel(HFSource(path), tokenizer_from_folder(path), chat_template_from_folder(path))
    if path.suffix != ".gguf":
        raise ModelFileError(f"{path} is a file; allowed are .gguf files and Hugging Face folders")
    from outrider.models.gguf_source import GGUFSource
    from outrider.models.gguf_tokenizer import tokenizer_from_metadata

    source = GGUFSource(path)
    template = chat_template_from_metadata(source.metadata)
    return OpenModel(source, tokenizer_from_metadata(source.metadata), template)


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


def pick_ops(ops: str, device: torch.device, dtype: torch.dtype, threads: int | None) -> Ops:
    """The operations a setting means; 'auto' takes the native ones where they were built and serve the purpose."""
    if ops not in OPERATIONS:
        raise SettingError(f"ops is {ops!r}; allowed is one of {', '.join(OPERATIONS)}{nearest(ops, OPERATIONS)}")
    fits = device.type == "cpu" and dtype in NATIVE_DTYPES
    if ops == "native" and not fits:
        raise SettingError(
            f"ops is 'native' with device {device} and dtype {dtype}; allowed is cpu, float32 or bfloat16"
        )
    if ops == "native" or (ops == "auto" and fits and available()):
        return NativeOps(threads or default_threads())
    return ReferenceOps()


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The precision a setting means; 'auto' is float32 on the CPU, bfloat16 on a GPU."""
    if dtype not in DTYPES:
        raise SettingError(f"dtype is {dtype!r}; allowed is one of {', '.join(DTYPES)}{nearest(dtype, DTYPES)}")
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    precision: torch.dtype = getattr(torch, dtype)
    return precision
