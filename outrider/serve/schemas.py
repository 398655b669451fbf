"""What clients may send: OpenAI's fields, and those that vLLM added. Types are strict: a number as a text is an error.

Which values a number may take is checked where it is used (``SamplingParams``), in one place for Python and HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field

T = TypeVar("T")


class _AtOnce(FailFast):
    __hash__ = object.__hash__  # an alias of a union must be hashable


Many = Annotated[list[T], _AtOnce()]
"""A list that is given up at its first wrong entry: a complaint about each of a million would take gigabytes."""
MAX_STOPS = 64
NO_TOOLS, ANY_TOOLS, MUST_CALL = "none", "auto", "required"
"""Values of ``tool_choice``: call nothing, what and whether the model likes, or one of the tools."""

UNSUPPORTED: Mapping[str, str] = {
    "suffix": "filling in the middle is not supported",
    "functions": "functions is not supported; use tools",
    "function_call": "function_call is not supported; use tool_choice",
    "modalities": "only text is supported",
    "audio": "only text is supported",
    "web_search_options": "there is no web search",
    "reasoning_effort": "reasoning_effort is not supported",
    "verbosity": "verbosity is not supported",
    "use_beam_search": "beam search is not supported",
    "length_penalty": "beam search is not supported",
    "prompt_logprobs": "log-probabilities of the prompt are not computed",
    "chat_template": "the model's own chat template is used",
    "chat_template_kwargs": "arguments of the chat template are not supported",
    "continue_final_message": "continuing a message is not supported",
    "documents": "documents are not supported",
    "bad_words": "bad_words is not supported; use logit_bias or banned_token_ids",
    "include_stop_str_in_output": "the stop text is never part of the output",
    "truncate_prompt_tokens": "prompts are never cut",
    "logits_processors": "functions cannot be sent",
}
"""Fields that would change the output and that this server does not know, with what to say about them."""


class Strict(BaseModel):
    """No field that is not listed, and no silent conversion."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False  # padding against traffic analysis is not added


class Speculative(Strict):
    """Speculation for this request: on or off, by which of the loaded drafters, at most how many draft tokens a step.

    ``metrics`` asks for what it did, in the response; ``segments``, in a stream, for each piece of text whether it came
    from an accepted draft token.
    """

    enabled: bool = True
    method: str | None = None
    max_draft: int | None = None
    metrics: bool = False
    segments: bool = False


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Prediction(Strict):
    type: Literal["content"] = "content"
    content: str | Many[TextPart]


class Harmless(Strict):
    """What clients send along that cannot change the output."""

    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    request_id: Any = None
    priority: Any = None


class Sampling(Harmless):
    """What both kinds of completion share; ``*_token_ids`` and so on as in ``SamplingParams``."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] = Field(default_factory=dict)
    allowed_token_ids: Many[int] | None = None
    banned_token_ids: Many[int] = Field(default_factory=list)
    seed: int | None = None
    stop: str | Many[str] = Field(default_factory=list, max_length=1 << 16)
    stop_token_ids: Many[int] = Field(default_factory=list)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    speculative: Speculative = Field(default_factory=Speculative)
    prediction: Prediction | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: Many[str] | None = None
    guided_grammar: str | None = None

    @property
    def usage_in_stream(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(Sampling):
    prompt: str | Many[str] | Many[int] | Many[Many[int]]
    echo: bool = False
    logprobs: int | None = None
    best_of: int | None = None
    add_special_tokens: bool = True


class FunctionCall(Strict):
    name: str
    arguments: str


class ToolCall(Strict):
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None
    function: FunctionCall


class Message(BaseModel):
    """One turn. Further fields are handed to the chat template as they are."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Many[TextPart] | None = None
    tool_calls: Many[ToolCall] | None = None
    tool_call_id: str | None = None


class Function(Strict):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class ChatRequest(Sampling):
    messages: Many[Message]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: Many[Tool] = Field(default_factory=list)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    add_generation_prompt: bool = True


class TokenizeRequest(Strict):
    """Either a ``prompt`` or ``messages``."""

    model: str | None = None
    prompt: str | None = None
    messages: Many[Message] | None = None
    tools: Many[Tool] = Field(default_factory=list)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: Many[int]
