"""What one request asks for: how to sample, when to stop, and whether to speculate."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.core.errors import SettingError
from outrider.core.grammar import Grammar
from outrider.core.settings import setting

LogitsProcessor = Callable[[Sequence[int], Sequence[int], NDArray[np.floating]], NDArray[np.floating]]
"""``processor(prompt_ids, output_ids, logits[V]) -> logits[V]``: called at every draft node with that node's own
history; it must be a pure function of its arguments and may change ``logits`` in place."""

MAX_STOP = 1024
"""Characters of a stop string at most."""


def _require(ok: bool, setting: str, given: object, allowed: str) -> None:
    if not ok:
        raise SettingError(f"{setting} is {given!r}; allowed is {allowed}", setting)


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _plain(value: object) -> object:
    """numpy's and other libraries' numbers as Python's own."""
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value


@dataclass(frozen=True)
class SamplingParams:
    """Settings of one request. Every rule is applied at every draft node with that node's own history.

    ``temperature`` 0 is greedy. ``top_k`` 0 and ``top_p`` 1 are off; of tokens that tie at the edge of top-k the lower
    id stays. ``repetition_penalty`` counts prompt and output, ``presence_penalty`` and ``frequency_penalty`` the output
    only. ``stop`` strings and ``stop_token_ids`` end the answer: the text ends before the stop, the token ids, logprobs
    and usage with the token that completes it. Before ``min_tokens`` outputs exist, EOS and stop
    tokens cannot be drawn and a stop string that is already complete does not count. ``logprobs`` asks for the chosen
    token and this many best ones, of the model itself (before any rule). ``seed`` None draws a fresh one. ``grammar``
    lets only those tokens be drawn that can lead to a text it describes, and EOS only where that text is complete.
    """

    temperature: float = setting(1.0, "0 is greedy; higher is more random")
    top_p: float = setting(1.0, "draw from the likeliest tokens that together have this probability")
    top_k: int = setting(0, "draw from this many likeliest tokens; 0 is off")
    min_p: float = setting(0.0, "draw from tokens at least this likely, relative to the likeliest")
    repetition_penalty: float = setting(1.0, "above 1: make tokens of prompt and output less likely")
    presence_penalty: float = setting(0.0, "make tokens that are in the output less likely")
    frequency_penalty: float = setting(0.0, "the same, for each time they are in the output")
    logit_bias: Mapping[int, float] = setting(help="added to the logits of tokens by id", factory=dict)
    allowed_token_ids: tuple[int, ...] | None = setting(None, "draw from these token ids only")
    banned_token_ids: tuple[int, ...] = setting((), "never draw these token ids")
    processors: tuple[LogitsProcessor, ...] = setting((), "functions that change the logits")
    grammar: Grammar | None = setting(None, "what the answer's text must look like")  # noqa: RUF009 (frozen)
    seed: int | None = setting(None, "makes random draws repeatable")
    n: int = setting(1, "answers to one prompt")
    max_tokens: int = setting(256, "longest answer, tokens")
    min_tokens: int = setting(0, "shortest answer, tokens")
    stop: Sequence[str] = setting((), "a text that ends the answer; it is not part of it")
    stop_token_ids: tuple[int, ...] = setting((), "token ids that end the answer")
    ignore_eos: bool = setting(False, "go on after the model's end token")
    logprobs: int | None = setting(None, "log-probabilities of the chosen and this many best tokens")
    skip_special_tokens: bool = setting(True, "leave control tokens out of the text")

    def __post_init__(self) -> None:
        for f in fields(self):
            object.__setattr__(self, f.name, _plain(getattr(self, f.name)))
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids", "banned_token_ids", "processors", "allowed_token_ids"):
            value = getattr(self, name)
            if value is not None or name != "allowed_token_ids":
                _require(isinstance(value, Iterable), name, value, "a list")
                object.__setattr__(self, name, tuple(_plain(item) for item in value))
        _require(isinstance(self.logit_bias, Mapping), "logit_bias", self.logit_bias, "a mapping from ids to numbers")
        bias = {_plain(token): _plain(value) for token, value in self.logit_bias.items()}
        object.__setattr__(self, "logit_bias", bias)
        self._check()

    def _check(self) -> None:
        t, p, m = self.temperature, self.top_p, self.min_p
        _require(_number(t) and t >= 0, "temperature", t, "a number >= 0 (0 is greedy)")
        _require(_number(p) and 0 < p <= 1, "top_p", p, "a number above 0 and at most 1 (1 is off)")
        _require(_whole(self.top_k) and self.top_k >= 0, "top_k", self.top_k, "a whole number >= 0 (0 is off)")
        _require(_number(m) and 0 <= m <= 1, "min_p", m, "a number from 0 (off) to 1")
        r = self.repetition_penalty
        _require(_number(r) and r > 0, "repetition_penalty", r, "a number above 0 (1 is off)")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(_number(value) and -2 <= value <= 2, name, value, "a number from -2 to 2")
        for token, bias in self.logit_bias.items():
            _require(_whole(token) and token >= 0, "logit_bias", token, "token ids (whole numbers >= 0) as keys")
            ok = isinstance(bias, (int, float)) and not math.isnan(bias) and bias != math.inf
            _require(ok, f"logit_bias[{token}]", bias, "a finite number, or -inf to ban the token")
        for name in ("allowed_token_ids", "banned_token_ids", "stop_token_ids"):
            ids = getattr(self, name) or ()
            _require(all(_whole(i) and i >= 0 for i in ids), name, ids, "token ids (whole numbers >= 0)")
        _require(self.allowed_token_ids != (), "allowed_token_ids", (), "at least one token id, or None")
        _require(all(callable(f) for f in self.processors), "processors", self.processors, "callables")
        g = self.grammar
        _require(g is None or isinstance(g, Grammar), "grammar", g, "a Grammar, or None")
        if g is not None and self.ignore_eos:
            said = f"ignore_eos is true with {g.where}; allowed is false, as the grammar says where to end"
            raise SettingError(said, "ignore_eos")
        s = self.seed
        _require(
            s is None or (_whole(s) and 0 <= s < 2**63),
            "seed",
            s,
            "a whole number from 0 to 2**63 - 1, or None",
        )
        _require(_whole(self.n) and 1 <= self.n <= 128, "n", self.n, "a whole number from 1 to 128")
        _require(
            _whole(self.max_tokens) and self.max_tokens >= 1,
            "max_tokens",
            self.max_tokens,
            "a whole number >= 1",
        )
        ok = _whole(self.min_tokens) and 0 <= self.min_tokens <= self.max_tokens
        _require(ok, "min_tokens", self.min_tokens, f"a whole number from 0 to max_tokens ({self.max_tokens})")
        ok = all(isinstance(x, str) and 0 < len(x) <= MAX_STOP for x in self.stop)
        _require(ok, "stop", self.stop, f"texts of 1 to {MAX_STOP} characters")
        for name in ("ignore_eos", "skip_special_tokens"):
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "true or false")
        lp = self.logprobs
        _require(
            lp is None or (_whole(lp) and 0 <= lp <= 100),
            "logprobs",
            lp,
            "a whole number from 0 to 100, or None",
        )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0

    @property
    def shapes_logits(self) -> bool:
        """Whether any rule changes the logits before temperature, so that argmax alone is not enough."""
        return bool(
            self.logit_bias
            or self.allowed_token_ids is not None
            or self.banned_token_ids
            or self.processors
            or self.grammar is not None
            or self.min_tokens
            or self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
        )

    def token_ids(self) -> dict[str, tuple[int, ...]]:
        """Every token id this request names, by setting, for checking against a vocabulary."""
        return {
            "logit_bias": tuple(self.logit_bias),
            "allowed_token_ids": self.allowed_token_ids or (),
            "banned_token_ids": self.banned_token_ids,
            "stop_token_ids": self.stop_token_ids,
        }


@dataclass(frozen=True)
class SpecParams:
    """Speculation settings of one request: on or off, which of the engine's drafters, and a cap on draft tokens a step.

    ``drafter`` None is the engine's default one; ``max_draft`` None leaves the length to the controller. ``prediction``
    is what the caller expects the answer to be, as a text or token ids, for a drafter that makes use of it. Requests of
    different ``tenant`` never see what drafters remember of each other's answers. ``repeatable`` makes a seed repeat
    the answer whatever is drafted and whoever else is served: it is verified by the rule ``coupled``.
    """

    enabled: bool = True
    drafter: str | None = None
    max_draft: int | None = None
    prediction: str | tuple[int, ...] = ()
    tenant: str = ""
    repeatable: bool = False

    def __post_init__(self) -> None:
        m, d, t, p = self.max_draft, self.drafter, self.tenant, self.prediction
        if not isinstance(p, str):
            _require(isinstance(p, Iterable), "prediction", p, "a text or token ids")
            ids: Any = tuple(_plain(token) for token in p)
            _require(all(_whole(token) and token >= 0 for token in ids), "prediction", p, "a text or token ids")
            object.__setattr__(self, "prediction", ids)
        _require(isinstance(t, str), "tenant", t, "a text")
        _require(d is None or isinstance(d, str), "drafter", d, "a drafter's name, or None")
        _require(isinstance(self.enabled, bool), "enabled", self.enabled, "true or false")
        _require(isinstance(self.repeatable, bool), "repeatable", self.repeatable, "true or false")
        _require(m is None or (_whole(m) and m >= 0), "max_draft", m, "a whole number >= 0, or None")

    def verification(self, method: str) -> str:
        """The rule that verifies this request in an engine whose own rule is ``method``."""
        return "coupled" if self.repeatable else method
