"""Token ids to text, one token at a time."""

from __future__ import annotations

import codecs

from outrider.models.tokenizer import Tokenizer


class Detokenizer:
    """Text of a growing answer. What ``push`` and ``flush`` gave, put together, is ``tokenizer.decode`` of all ids.

    A character whose bytes are spread over several tokens comes out with its last byte. Work per token is constant.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, strip_leading_space: bool | None = None
    ) -> None:
        """``strip_leading_space`` None does as ``decode``; False is right for text that continues other text."""
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._strip = tokenizer.strips_leading_space if strip_leading_space is None else strip_leading_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that became certain with this token; may be empty. Raises SettingError for an unknown id."""
        if self._skip and self._tokenizer.is_special(token_id):
            return ""
        text = self._utf8.decode(self._tokenizer.token_bytes(token_id))
        return self._stripped(text) if self._strip else text

    def flush(self) -> str:
        """The end of the text: an incomplete character that was held back, as U+FFFD."""
        return self._stripped(self._utf8.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        if text and self._strip:
            self._strip = False
            return text.removeprefix(" ")
        return text
