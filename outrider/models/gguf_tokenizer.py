"""Rebuilds a tokenizer from the metadata of a GGUF file.

The splitting rules and the SentencePiece conversion are facts taken from the families' published ``tokenizer.json``
files; the metadata's keys are those of the GGUF specification.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from outrider.core.errors import ModelFileError
from outrider.models.gguf_file import end_ids, named_id
from outrider.models.tokenizer import SPACE_MARK, Tokenizer
from outrider.models.values import shown


class TokenType(IntEnum):
    """``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def _words(digits: str) -> Any:
    """Llama 3's and Qwen2's way to split; they differ in how many ``digits`` stay together."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _llama3() -> Any:
    return _words(r"\p{N}{1,3}")


def _qwen2() -> Any:
    return _words(r"\p{N}")


PRE_TOKENIZERS: Mapping[str, Callable[[], Any]] = {
    "smollm": _smollm,
    "llama-bpe": _llama3,
    "llama3": _llama3,
    "llama-v3": _llama3,
    "qwen2": _qwen2,
    "gpt-2": _gpt2,
    "default": _gpt2,
}
"""Per ``tokenizer.ggml.pre`` the rule that splits text before the merges."""


def tokenizer_from_metadata(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that ``metadata`` (GGUF keys and values) describes. Raises ModelFileError."""
    kind = metadata.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if not isinstance(kind, str) or kind not in builders:
        raise ModelFileError(f"tokenizer.ggml.model is {shown(kind)}; known are {', '.join(builders)}")
    tokens = _column(metadata, "tokens", str, None)
    types = _column(metadata, "token_type", int, len(tokens))
    ids: dict[str, int] = {}
    for i, (token, token_type) in enumerate(zip(tokens, types, strict=True)):
        if token_type == TokenType.UNUSED:
            continue  # rows that only pad the embedding
        if token in ids:
            twice = f"{shown(token)} twice, as {ids[token]} and {i}"
            raise ModelFileError(f"tokenizer.ggml.tokens has {twice}; once is allowed")
        ids[token] = i
    inner, adds_bos = builders[kind](metadata, ids, types)
    # Already in the vocabulary, so they keep their ids.
    marks = {token: types[i] for token, i in ids.items()}
    inner.add_special_tokens(
        [_added(t, special=True) for t, kind in marks.items() if kind in (TokenType.CONTROL, TokenType.UNKNOWN)]
    )
    inner.add_tokens([_added(t, special=False) for t, kind in marks.items() if kind == TokenType.USER_DEFINED])
    return Tokenizer(
        inner,
        bos_id=named_id(metadata, "bos", len(tokens)),
        eos_ids=end_ids(metadata, len(tokens)),
        adds_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos)),
    )


def _byte_level(
    metadata: Mapping[str, Any], ids: Mapping[str, int], types: Sequence[int]
) -> tuple[tokenizers.Tokenizer, bool]:
    """Byte-level BPE, and whether its family puts BOS in front."""
    pre = metadata.get("tokenizer.ggml.pre")
    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        raise ModelFileError(f"tokenizer.ggml.pre is {shown(pre)}; known are {', '.join(PRE_TOKENIZERS)}")
    splitter = PRE_TOKENIZERS[pre]
    merges = []
    for merge in _column(metadata, "merges", str, None):
        left, space, right = merge.partition(" ")
        if not (space and left in ids and right in ids and left + right in ids):
            known = "two known tokens that make a third"
            raise ModelFileError(f"tokenizer.ggml.merges has {shown(merge)}; allowed are {known}")
        merges.append((left, right))
    inner = tokenizers.Tokenizer(models.BPE(dict(ids), merges, ignore_merges=splitter is _llama3))
    if splitter is _qwen2:
        inner.normalizer = normalizers.NFC()
    inner.pre_tokenizer = splitter()
    inner.decoder = decoders.ByteLevel()
    return inner, splitter is _llama3


def _sentencepiece(
    metadata: Mapping[str, Any], ids: Mapping[str, int], types: Sequence[int]
) -> tuple[tokenizers.Tokenizer, bool]:
    """SentencePiece BPE, and that it puts BOS in front.

    SentencePiece joins the neighbours whose union has the best score. As a list of merges: every way to cut a piece
    into two pieces, best score first; of one piece's cuts the one with the longest left part, which is what joining
    from the left amounts to.
    """
    scores = _column(metadata, "scores", float, len(types))
    normal = {token: i for token, i in ids.items() if types[i] == TokenType.NORMAL}
    merges: list[tuple[str, str]] = []
    for piece in sorted(normal, key=lambda token: -scores[normal[token]]):
        cuts = ((piece[:at], piece[at:]) for at in range(len(piece) - 1, 0, -1))
        merges += [(left, right) for left, right in cuts if left in normal and right in normal]
    unknown = named_id(metadata, "unknown", len(types))
    byte_fallback = TokenType.BYTE in types
    model = models.BPE(
        dict(ids),
        merges,
        unk_token=next((token for token, i in ids.items() if i == unknown), None),
        fuse_unk=True,
        byte_fallback=byte_fallback,
    )
    inner = tokenizers.Tokenizer(model)
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    marks = normalizers.Replace(" ", SPACE_MARK)
    inner.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), marks]) if prefix else marks
    steps = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return inner, True


def _added(token: str, *, special: bool) -> Any:
    return AddedToken(token, normalized=False, special=special)


def _column(metadata: Mapping[str, Any], name: str, kind: type, length: int | None) -> list[Any]:
    """A list of the metadata whose values are of ``kind``, ``length`` of them (None = any number)."""
    key = f"tokenizer.ggml.{name}"
    value = metadata.get(key)
    if value is None:
        raise ModelFileError(f"the GGUF file has no {key}, which its tokenizer needs")
    if isinstance(value, (str, bytes)) or not hasattr(value, "__len__"):
        raise ModelFileError(f"{key} is {shown(value)}; expected is a list")
    if length is not None and len(value) != length:
        raise ModelFileError(f"{key} has {len(value)} values; expected are {length}, one a token")
    try:
        if kind is not str:
            return [kind(v) for v in value]
        if all(isinstance(v, str) for v in value):
            return list(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise ModelFileError(f"{key} holds a value that is not a {kind.__name__}; every value must be one")
