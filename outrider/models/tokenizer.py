"""Text to token ids and back, and the exact bytes of every token."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from outrider.core.errors import ModelFileError, SettingError
from outrider.models.values import one_line, read_json, shown, token_ids

SPACE_MARK = "▁"  # how SentencePiece writes a space
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SHORT = 4096  # characters; a batch of one has a price of its own
_MAX_SPREAD, _FREE_SPREAD = 4, 1024  # ids may go up to 4 * tokens + 1024: every user of ids makes tables of that size


class Tokenizer:
    """A model's tokenizer. Token ids are plain ints from 0 to ``vocab_size`` - 1; some may be unused.

    Decoding is defined by bytes: the text is the tokens' bytes put together and read as UTF-8, where each invalid part
    becomes U+FFFD. So streamed text (see ``Detokenizer``) and whole text are always the same.
    """

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        *,
        bos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        adds_bos: bool | None = None,
        where: str = "tokenizer",
    ) -> None:
        """Takes ``inner`` over (it must not be used elsewhere). ``adds_bos`` None: as its post-processor does.

        Raises ModelFileError when the tokens are of a kind whose bytes are not known; ``where`` names the file.
        """
        inner.no_truncation()  # a stored training-time limit would silently cut prompts
        inner.no_padding()
        self._inner = inner
        self._added: Mapping[int, Any] = inner.get_added_tokens_decoder()
        self._bytes: dict[int, bytes] = {}
        self._special = frozenset(i for i, token in self._added.items() if token.special)
        steps = _decoder_steps(inner.decoder)
        kinds = {step["type"] for step in steps}
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        if not (self._byte_level or self._byte_fallback or "Metaspace" in kinds):
            shown = ", ".join(sorted(kinds)) or "none"
            raise ModelFileError(f"{where} has the decoder {shown}; known are byte-level and SentencePiece tokenizers")
        self.strips_leading_space = not self._byte_level and any(map(_strips, steps))
        """Whether encoding puts a space before the text that decoding takes away again (SentencePiece)."""
        vocab = inner.get_vocab(with_added_tokens=True)
        self._tokens: Mapping[int, str] = {i: token for token, i in vocab.items()}
        n, n_ids = len(vocab), len(self._tokens)
        if n_ids < n:
            raise ModelFileError(f"{where} has {n} tokens but only {n_ids} ids; each needs its own")
        last, allowed = max(self._tokens, default=-1), _MAX_SPREAD * n + _FREE_SPREAD
        if last >= allowed:
            raise ModelFileError(f"{where} has the token id {last} among {n} tokens; allowed are ids below {allowed}")
        self.vocab_size: int = last + 1
        self.bos_id = bos_id
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        if adds_bos is None:
            adds_bos = inner.encode("").ids[:1] == [bos_id]
        self.adds_bos = adds_bos and bos_id is not None

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """The same tokenizer, blind to control tokens in the text."""
        plain = tokenizers.Tokenizer.from_str(self._inner.to_str())
        plain.encode_special_tokens = True
        return plain

    @cached_property
    def unused_ids(self) -> tuple[int, ...]:
        """The ids below ``vocab_size`` that stand for no token, ascending: ``token_bytes`` refuses them."""
        return tuple(i for i in range(self.vocab_size) if i not in self._tokens)

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the longest token: a text of n bytes has n / ``longest_token`` tokens or more."""
        return max(len(self.token_bytes(i)) for i in self._tokens)

    def encode(self, text: str, *, specials: bool = True, add_bos: bool | None = None) -> list[int]:
        """Token ids of ``text``. ``specials`` False reads control tokens in the text as plain text.

        ``add_bos`` None puts a BOS token in front if the model's own tokenizer does. Raises SettingError for text that
        is no valid Unicode, and for ``add_bos`` True without a BOS token.
        """
        if not isinstance(text, str):
            raise SettingError(f"text is of type {type(text).__name__}; allowed is a text")
        try:
            text.encode()
        except UnicodeEncodeError as e:
            found = f"a lone surrogate U+{ord(text[e.start]):04X} at {e.start}"
            raise SettingError(f"text has {found}; allowed is valid Unicode") from None
        inner = self._inner if specials else self._plain
        if len(text) <= _SHORT:
            ids: list[int] = inner.encode(text, add_special_tokens=False).ids
        else:
            (encoding,) = inner.encode_batch([text], add_special_tokens=False)  # which lets other threads run meanwhile
            ids = encoding.ids
        if not (self.adds_bos if add_bos is None else add_bos):
            return ids
        if self.bos_id is None:
            raise SettingError("add_bos is True, but this tokenizer has no BOS token; allowed is False")
        return [self.bos_id, *ids]

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ``ids``."""
        kept = (i for i in ids if not (self.is_special(i) and skip_special_tokens))
        text = b"".join(map(self.token_bytes, kept)).decode(errors="replace")
        return text.removeprefix(" ") if self.strips_leading_space else text

    def token(self, token_id: int) -> str:
        """The token as the vocabulary writes it (``Ġthe``, ``▁the``). Raises SettingError for an unknown id."""
        known = self._tokens.get(operator.index(token_id))
        if known is None:
            raise SettingError(f"token id is {token_id}; allowed is a known token, from 0 to {self.vocab_size - 1}")
        return known

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes that a token adds to the text, special tokens included. Raises SettingError as ``token``."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._to_bytes(token_id, self.token(token_id))
        return known

    def _to_bytes(self, token_id: int, token: str) -> bytes:
        if token_id in self._added:
            return token.encode()
        if self._byte_level:
            codes = [_BYTE_OF.get(char) for char in token]
            return token.encode() if None in codes else bytes(code for code in codes if code is not None)
        if self._byte_fallback and (byte := byte_token(token)) is not None:
            return bytes([byte])
        return token.replace(SPACE_MARK, " ").encode()

    def is_special(self, token_id: int) -> bool:
        """Whether a token is a control token (BOS, EOS, a chat mark), which ``decode`` leaves out."""
        return token_id in self._special

    def first_difference(self, other: Tokenizer) -> tuple[int, str | None, str | None] | None:
        """The first id that stands for different text here and in ``other``: (id, token here, token there).

        None when the two agree. A token is None where the id does not exist. Control tokens and other tokens added to
        the vocabulary are only compared with ordinary ones: that one side lacks or renames some does no harm.
        """
        for i in sorted(self._tokens.keys() | other._tokens.keys()):
            mine, theirs = self._tokens.get(i), other._tokens.get(i)
            ordinary = mine is not None and i not in self._added
            ordinary_there = theirs is not None and i not in other._added
            if mine != theirs and (ordinary or ordinary_there):
                return i, mine, theirs
        return None


def byte_token(token: str) -> int | None:
    """The byte that a SentencePiece byte token such as ``<0x0A>`` stands for; None for another token."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None
    return None


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for every byte: itself where it is printable, else the next from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _decoder_steps(decoder: Any) -> list[dict[str, Any]]:
    """The decoder's settings, one entry a step."""
    if decoder is None:
        return []
    state = json.loads(decoder.__getstate__())
    steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    return steps


def _strips(step: Mapping[str, Any]) -> bool:
    """Whether a decoder step takes a leading space away."""
    if step["type"] == "Metaspace":
        return bool(step.get("prepend_scheme", "always") != "never")
    return bool(step["type"] == "Strip" and step.get("content") == " " and step.get("start", 0) > 0)


def tokenizer_from_folder(folder: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder (``tokenizer.json``). Raises ModelFileError."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        hint = ""
        if (folder / "tokenizer.model").is_file():
            hint = " (tokenizer.model alone is not enough: save the tokenizer again with Hugging Face transformers)"
        raise ModelFileError(f"{folder} has no tokenizer.json, which is needed{hint}")
    try:
        inner = tokenizers.Tokenizer.from_file(str(file))
    except Exception as e:  # the library raises bare Exception
        raise ModelFileError(f"{file} is not a valid tokenizer file: {one_line(e, 200)}") from None
    names = read_tokenizer_config(folder)
    _mark_special(inner, names, folder)
    config, generation = folder / "config.json", folder / "generation_config.json"
    bos_id = _id_of(inner, names.get("bos_token"))
    if bos_id is None:
        bos_id = next(iter(_named_ids(config, "bos_token_id")), None)
    own_eos = _id_of(inner, names.get("eos_token"))
    eos_ids = [*_named_ids(generation, "eos_token_id"), *_named_ids(config, "eos_token_id")]
    adds_bos = names.get("add_bos_token")
    return Tokenizer(
        inner,
        bos_id=bos_id,
        eos_ids=eos_ids if own_eos is None else [*eos_ids, own_eos],
        adds_bos=adds_bos if isinstance(adds_bos, bool) else None,
        where=str(file),
    )


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """``tokenizer_config.json`` over ``special_tokens_map.json``, with each named token as its plain text."""
    files = [folder / "special_tokens_map.json", folder / "tokenizer_config.json"]
    named = {key: value for file in files for key, value in read_json(file, optional=True).items()}
    for name in NAMED_TOKENS:
        named[name] = _content(named.get(name))
    return named


def _content(token: object) -> object:
    """The text of a token, which config files write plainly or as an object."""
    return token.get("content") if isinstance(token, dict) else token


def _id_of(inner: tokenizers.Tokenizer, token: object) -> int | None:
    found: int | None = inner.token_to_id(token) if isinstance(token, str) else None
    return found


def _named_ids(file: Path, key: str) -> tuple[int, ...]:
    return token_ids(read_json(file, optional=True).get(key), f"{file}: {key}")


def _mark_special(inner: tokenizers.Tokenizer, names: Mapping[str, Any], folder: Path) -> None:
    """Makes the tokens that the tokenizer's config names special, as transformers does on loading."""
    listed = [names.get(name) for name in NAMED_TOKENS]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        extra = names.get(key) or []
        if not isinstance(extra, (list, dict)):
            raise ModelFileError(f"{folder / 'tokenizer_config.json'}: {key} is {shown(extra)}; allowed is a list")
        listed += map(_content, extra.values() if isinstance(extra, dict) else extra)
    special = {token.content for token in inner.get_added_tokens_decoder().values() if token.special}
    for token in listed:
        if _id_of(inner, token) is not None and token not in special:
            inner.add_special_tokens([tokenizers.AddedToken(token, normalized=False, special=True)])
