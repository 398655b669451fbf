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

SPACE_MARK = "▁"  # how SentencePiece writes a space
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A model's tokenizer. Token ids are plain ints from 0 to ``vocab_size`` - 1; a few of them may be unused.

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
        ids = list(inner.get_vocab(with_added_tokens=True).values())
        if len(set(ids)) < len(ids):
            raise ModelFileError(f"{where} has {len(ids)} tokens but only {len(set(ids))} ids; each needs its own")
        self.vocab_size: int = 1 + max(ids, default=-1)
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
        ids: list[int] = (self._inner if specials else self._plain).encode(text, add_special_tokens=False).ids
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
        known = self._token(operator.index(token_id))
        if known is None:
            raise SettingError(f"token id is {token_id}; allowed is a known token, from 0 to {self.vocab_size - 1}")
        return known

    def _token(self, token_id: int) -> str | None:
        if not 0 <= token_id < self.vocab_size:
            return None
        token: str | None = self._inner.id_to_token(token_id)
        return token

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
        for i in range(max(self.vocab_size, other.vocab_size)):
            mine, theirs = self._token(i), other._token(i)
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


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder (``tokenizer.json``) or of a GGUF file. Raises ModelFileError."""
    if path.suffix == ".gguf":
        # Here, because both modules below build on Tokenizer.
        from outrider.models.gguf_source import GGUFSource
        from outrider.models.gguf_tokenizer import tokenizer_from_metadata

        return tokenizer_from_metadata(GGUFSource(path).metadata)
    file = path / "tokenizer.json"
    if not file.is_file():
        hint = ""
        if (path / "tokenizer.model").is_file():
            hint = " (tokenizer.model alone is not enough: save the tokenizer again with Hugging Face transformers)"
        raise ModelFileError(f"{path} has no tokenizer.json, which is needed{hint}")
    try:
        inner = tokenizers.Tokenizer.from_file(str(file))
    except Exception as e:  # the library raises bare Exception
        raise ModelFileError(f"{file} is not a valid tokenizer file: {' '.join(str(e).split())[:200]}") from None
    names = read_tokenizer_config(path)
    _mark_special(inner, names)
    config, generation = read_json(path / "config.json"), read_json(path / "generation_config.json")
    bos_id = _id_of(inner, names.get("bos_token"))
    if bos_id is None:
        bos_id = next(iter(_ids(config.get("bos_token_id"), path / "config.json")), None)
    eos_ids = [
        *_ids(generation.get("eos_token_id"), path / "generation_config.json"),
        *_ids(config.get("eos_token_id"), path / "config.json"),
    ]
    own_eos = _id_of(inner, names.get("eos_token"))
    if own_eos is not None:
        eos_ids.append(own_eos)
    adds_bos = names.get("add_bos_token")
    return Tokenizer(
        inner,
        bos_id=bos_id,
        eos_ids=eos_ids,
        adds_bos=adds_bos if isinstance(adds_bos, bool) else None,
        where=str(file),
    )


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file; empty when there is no such file. Raises ModelFileError."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise ModelFileError(f"{file} cannot be read as JSON: {' '.join(str(e).split())[:200]}") from None
    if not isinstance(found, dict):
        raise ModelFileError(f"{file} holds a {type(found).__name__}; expected is a JSON object")
    return found


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """``tokenizer_config.json`` over ``special_tokens_map.json``, with each named token as its plain text."""
    named = read_json(folder / "special_tokens_map.json") | read_json(folder / "tokenizer_config.json")
    for name in NAMED_TOKENS:
        token = named.get(name)
        if isinstance(token, dict):
            named[name] = token.get("content")
    return named


def _id_of(inner: tokenizers.Tokenizer, token: object) -> int | None:
    found: int | None = inner.token_to_id(token) if isinstance(token, str) else None
    return found


def _mark_special(inner: tokenizers.Tokenizer, names: Mapping[str, Any]) -> None:
    """Makes the tokens that the tokenizer's config names special, as transformers does on loading."""
    extra = names.get("additional_special_tokens") or names.get("extra_special_tokens") or []
    listed = [token.get("content") if isinstance(token, dict) else token for token in extra]
    special = {token.content for token in inner.get_added_tokens_decoder().values() if token.special}
    for token in [*map(names.get, NAMED_TOKENS), *listed]:
        if _id_of(inner, token) is not None and token not in special:
            inner.add_special_tokens([tokenizers.AddedToken(token, normalized=False, special=True)])


def _ids(value: object, file: Path) -> list[int]:
    """One id, a list of ids or nothing, as the config files write token ids."""
    ids: list[Any] = value if isinstance(value, list) else [] if value is None else [value]
    for i in ids:
        if not isinstance(i, int) or isinstance(i, bool) or i < 0:
            raise ModelFileError(f"{file} has the token id {i!r}; allowed is a whole number from 0 on")
    return ids
