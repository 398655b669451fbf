"""Log-probabilities in the forms of OpenAI's two endpoints."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from outrider.models.detokenizer import Detokenizer
from outrider.models.tokenizer import Tokenizer
from outrider.sampling.logprobs import TokenLogprob


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """A token on its own; bytes that are no text by themselves are written as OpenAI does."""
    raw = _bytes_of(tokenizer, token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _bytes_of(tokenizer: Tokenizer, token: int) -> bytes:
    return b"" if token in tokenizer.unused_ids else tokenizer.token_bytes(token)


def chat_entries(entries: Iterable[TokenLogprob], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """``choices[].logprobs.content``."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        raw = _bytes_of(tokenizer, token)
        return {"token": raw.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(raw)}

    return [
        one(e.token, e.logprob) | {"top_logprobs": [one(token, logprob) for token, logprob in e.top]} for e in entries
    ]


class CompletionLogprobs:
    """``choices[].logprobs`` of the older endpoint, piece by piece; offsets are characters of the choice's text."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens, strip_leading_space=False)
        self._offset = 0

    def entries(self, given: Iterable[TokenLogprob], top: int) -> dict[str, Any]:
        """The next tokens. ``top_logprobs`` is null unless some were asked for."""
        lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "text_offset": [], "top_logprobs": []}
        for entry in given:
            lists["tokens"].append(token_text(self._tokenizer, entry.token))
            lists["token_logprobs"].append(_finite(entry.logprob))
            lists["text_offset"].append(self._offset)
            lists["top_logprobs"].append({token_text(self._tokenizer, t): _finite(lp) for t, lp in entry.top})
            self._offset += len(self._detokenizer.push(entry.token))
        return {**lists, "top_logprobs": lists["top_logprobs"] if top else None}


def _finite(logprob: float) -> float:
    """JSON has no minus infinity; this is what OpenAI writes for it."""
    return max(logprob, -9999.0)
