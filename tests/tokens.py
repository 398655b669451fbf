"""Small real tokenizers of both kinds for toy models, over whatever pieces a test wants."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from outrider.models.load import LoadedModel
from outrider.models.tokenizer import Tokenizer, _byte_alphabet

_CHAR_OF = {byte: char for char, byte in _byte_alphabet().items()}


def byte_level(
    pieces: Sequence[str | bytes],
    special: Sequence[str] = (),
    added: Sequence[str] = (),
    bos: str | None = None,
    adds_bos: bool = False,
) -> Tokenizer:
    """Token i is ``pieces[i]``; then the special ones, then those added as ordinary text. Texts split by likelihood."""
    written = ["".join(_CHAR_OF[b] for b in (p.encode() if isinstance(p, str) else p)) for p in pieces]
    inner = tokenizers.Tokenizer(_unigram(written))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return _finished(inner, special, added, bos, adds_bos)


def sentencepiece(
    pieces: Sequence[str],
    special: Sequence[str] = (),
    added: Sequence[str] = (),
    bos: str | None = None,
    adds_bos: bool = False,
) -> Tokenizer:
    """The same as SentencePiece has it: a space before each text, ``<0x0A>`` for a byte. Piece 0 is the unknown one."""
    inner = tokenizers.Tokenizer(_unigram([piece.replace(" ", "▁") for piece in pieces]))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(steps)
    return _finished(inner, [pieces[0], *special], added, bos, adds_bos)


def _unigram(written: Sequence[str]) -> models.Unigram:
    return models.Unigram([(piece, -2.0 - 0.01 * i) for i, piece in enumerate(written)], unk_id=0)


def _finished(
    inner: tokenizers.Tokenizer, special: Sequence[str], added: Sequence[str], bos: str | None, adds_bos: bool
) -> Tokenizer:
    inner.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    inner.add_tokens([AddedToken(token, normalized=False, special=False) for token in added])
    bos_id = None if bos is None else inner.token_to_id(bos)
    return Tokenizer(inner, bos_id=bos_id, adds_bos=adds_bos)


def words(n: int) -> list[str]:
    """``n`` different short texts, most of them two letters, every third with a space in front."""
    pairs = ("".join(pair) for pair in itertools.product("abcdefgh", "ijklmnop"))
    return [f" {word}" if i % 3 == 1 else word for i, word in enumerate(itertools.islice(pairs, n))]


def two_tongues(target: LoadedModel, lacking: int = 3) -> tuple[LoadedModel, Tokenizer]:
    """``target`` with a byte-level tokenizer, and a SentencePiece one that has its tokens in another order.

    The latter lacks each ``lacking``-th of them, and has single letters instead.
    """
    spoken = words(target.config.vocab_size)
    common = [word for i, word in enumerate(spoken) if i % lacking != lacking - 1]
    letters = [*"abcdefghijklmnop", " "]
    other = sentencepiece(["<unk>", *reversed(common), *letters])
    return replace(target, tokenizer=byte_level(spoken)), other
