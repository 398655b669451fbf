"""``/tokenize`` and ``/detokenize``, in vLLM's form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.core.errors import SettingError
from outrider.serve.chat import chat_prompt
from outrider.serve.errors import bad_field
from outrider.serve.schemas import DetokenizeRequest, TokenizeRequest
from outrider.serve.service import Service


async def tokenize(service: Service, request: TokenizeRequest) -> dict[str, Any]:
    """Token ids of a prompt, or of a conversation in the model's chat template."""
    if (request.prompt is None) == (request.messages is None):
        raise bad_field("prompt", "prompt and messages are both given or both missing; allowed is one of them")
    if request.messages is not None:
        add_bos = bool(request.add_special_tokens)
        tokens = await chat_prompt(service, request.messages, request.tools, request.add_generation_prompt, add_bos)
    else:
        with_bos = None if request.add_special_tokens is not False else False
        service.check_size([request.prompt or ""], "prompt")
        (tokens,) = await service.encode([request.prompt or ""], with_bos)
    shown = await service.apart(lambda: _names(service, tokens)) if request.return_token_strs else None
    return {"count": len(tokens), "max_model_len": service.context, "tokens": tokens, "token_strs": shown}


async def detokenize(service: Service, request: DetokenizeRequest) -> dict[str, Any]:
    """The text of token ids, control tokens included."""
    if len(request.tokens) > service.context:
        said = f"tokens has {len(request.tokens)} entries; allowed are {service.context}, as the context has"
        raise bad_field("tokens", said)
    try:
        text = await service.apart(lambda: service.tokenizer.decode(request.tokens, skip_special_tokens=False))
        return {"prompt": text}
    except SettingError as error:
        raise bad_field("tokens", f"tokens: {error}") from None


def _names(service: Service, tokens: Sequence[int]) -> list[str]:
    return [service.tokenizer.token(token) for token in tokens]
