"""The rules of one request, compiled: from a row of logits and a history to the distribution that is drawn from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from outrider.core.dist import Dist, all_ids
from outrider.core.errors import SettingError
from outrider.core.params import SamplingParams
from outrider.models.grammars import CompiledGrammar
from outrider.models.load import LoadedModel
from outrider.sampling.history import History
from outrider.sampling.select import best, nucleus

_LOWEST = -700.0  # log weight, relative to the best token, below which exp() leaves the normal range
_LEAST = math.exp(_LOWEST)
_COLDEST = 1e-300  # temperatures below it act as it does: nothing but what equals the best token has a weight


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Raises SettingError when a request names a token id that the vocabulary does not have."""
    for setting, ids in params.token_ids().items():
        for token in ids:
            if token >= vocab_size:
                raise SettingError(f"{setting} names token {token}; allowed is 0 to {vocab_size - 1}", setting)


class Sampler:
    """A pure function from (logits, history) to a distribution; it holds nothing that changes.

    Order of the rules: allowed and banned tokens, logit bias, ``min_tokens``, penalties, custom processors, grammar,
    temperature, min-p, top-k, top-p. Shaping and probabilities are in float64. Ids from ``n_tokens`` (the tokenizer's
    size) on are padding of the vocabulary and are never drawn, nor are ``unused`` ids in between.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        eos_ids: tuple[int, ...] = (),
        n_tokens: int | None = None,
        unused: Sequence[int] = (),
        grammar: CompiledGrammar | None = None,
    ) -> None:
        """``grammar`` is that of ``params``, compiled for the tokens of the model (see ``Sampler.of``)."""
        assert (grammar is None) == (params.grammar is None)
        check_token_ids(params, vocab_size)
        self.params = params
        self.grammar = grammar
        self.vocab_size = vocab_size
        self.n_tokens = vocab_size if n_tokens is None else min(n_tokens, vocab_size)
        self._forbidden = self._compile_forbidden(unused)
        self.needs_history = params.shapes_logits  # without rules that look back, the history may be left out
        self._shapes = replace(params, min_tokens=0).shapes_logits or self._forbidden is not None
        self._bias_ids = np.array(list(params.logit_bias), dtype=np.int64)
        self._bias = np.array(list(params.logit_bias.values()), dtype=np.float64)
        endings = {*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)}
        self._endings = np.array(sorted(i for i in endings if i < vocab_size), dtype=np.int64)
        self._floor = max(math.log(params.min_p), _LOWEST) if params.min_p > 0 else _LOWEST
        self._greedy = params.greedy
        self._plain = params.greedy and not self._shapes and not params.min_tokens
        self._inverse = 1.0 / max(params.temperature, _COLDEST)

    @staticmethod
    def of(params: SamplingParams, model: LoadedModel) -> Sampler:
        """The rules for the vocabulary of ``model``. Raises SettingError if they do not fit it."""
        grammar = None if params.grammar is None else model.grammars.compile(params.grammar)
        shape = model.config
        return Sampler(params, shape.vocab_size, shape.eos_ids, model.n_tokens, model.unused_ids, grammar)

    def plain_choices(self, best: NDArray[np.int64]) -> list[int] | None:
        """The next token after each row of logits if it is simply ``best`` [R], that of its greatest one; else None."""
        if not self._plain:
            return None
        tokens: list[int] = best.tolist()
        return tokens if min(tokens) >= 0 and max(tokens) < self.n_tokens else None

    def dist(self, logits: NDArray[np.floating], prompt: Sequence[int], output: Sequence[int]) -> Dist:
        """What the next token is drawn from. ``logits`` [V] stay as they are.

        ``output`` holds every token after the prompt, draft tokens on the way to this node included. Raises
        SettingError when no token is left, a logit is NaN or infinite, or a processor returns a wrong shape.
        """
        return self.dist_at(logits, History([*prompt, *output], len(prompt)))

    def dist_at(self, logits: NDArray[np.floating], history: History, path: Sequence[int] = (), top: int = -1) -> Dist:
        """The same after ``history`` and the draft tokens ``path``, which need not be counted anew for every row.

        ``top`` is where the greatest of ``logits`` is, if that is known.
        """
        params = self.params
        shapes = self._shapes or (params.min_tokens > 0 and history.n_output(path) < params.min_tokens)
        z = (self._shaped(logits, history, path) if shapes else logits)[: self.n_tokens]
        if shapes or not 0 <= top < self.n_tokens:
            top = int(z.argmax())  # the first of equals; a NaN counts as the greatest, so the next lines see it
        peak = float(z[top])
        if not math.isfinite(peak):
            place = f" at output position {history.n_output(path)}" if self.needs_history else ""
            raise self._no_choice(peak, place, bool(np.isfinite(logits[: self.n_tokens].max())))
        return Dist.point(top) if self._greedy else self._draw_from(z, peak, own=shapes)

    def _draw_from(self, z: NDArray[np.floating], peak: float, own: bool) -> Dist:
        """Temperature, min-p, top-k, top-p on ``z`` [n_tokens], whose greatest is ``peak``; written over if ``own``.

        Top-k comes before min-p here, so that few tokens need an exponential: the outcome is the same, as both keep
        the best tokens and min-p looks only at the very best one.
        """
        params = self.params
        ids = None
        if 0 < params.top_k < len(z):
            ids = best(z, params.top_k)
        elif params.min_p > 0 or params.allowed_token_ids is not None or self.grammar is not None:
            ids = self._near(z, peak)
        x = (z if ids is None else z[ids]).astype(np.float64, copy=not own)
        with np.errstate(over="ignore"):  # tiny temperatures: -inf is right
            x -= peak
            x *= self._inverse
        if ids is not None:
            ids, x = _narrow(ids, x, np.flatnonzero(x >= self._floor))
        weights = np.exp(x, out=x)
        if params.top_p < 1.0:
            ids, weights = _narrow(ids, weights, nucleus(weights, params.top_p))
        if weights.min() < _LEAST:
            ids, weights = _narrow(ids, weights, np.flatnonzero(weights >= _LEAST))
        weights *= 1.0 / weights.sum()
        return Dist(all_ids(len(z)) if ids is None else ids, weights)

    def _no_choice(self, peak: float, place: str, ruled: bool) -> SettingError:
        """What to say where ``peak`` is not finite. Of sound logits it is ``ruled`` so by a setting: the error names
        the first that may be at fault."""
        params = self.params
        rules: dict[str, object] = {"logit_bias": params.logit_bias, "processors": params.processors}
        if peak == -math.inf:
            rules = {
                "allowed_token_ids": params.allowed_token_ids,
                "banned_token_ids": params.banned_token_ids,
                **rules,
            }
            rules["min_tokens"] = params.min_tokens
            if params.grammar is not None:
                rules[params.grammar.where] = True
            said = (
                f"no token is left to draw{place}: allowed_token_ids, banned_token_ids, logit_bias, "
                "min_tokens, processors and grammar together must leave at least one"
            )
        else:
            rules["repetition_penalty"] = params.repetition_penalty != 1.0
            said = f"the logits{place} hold {peak}; allowed are finite numbers and -inf"
        given = [name for name, rule in rules.items() if rule] if ruled else []
        if given and peak != -math.inf:
            said += f"; the model's own are, before {' and '.join(given)}"
        return SettingError(said, given[0] if given else None)

    def _near(self, z: NDArray[np.floating], peak: float) -> NDArray[np.int64]:
        """Where ``z`` is at the floor, or a trifle below: compared as it comes, so that only few need be widened."""
        depth = self._floor / self._inverse
        with np.errstate(over="ignore"):
            return np.flatnonzero(z >= z.dtype.type(peak + depth - 1e-6 * (abs(peak) - depth)))

    def _compile_forbidden(self, unused: Sequence[int]) -> NDArray[np.bool_] | None:
        """bool[V]: the tokens that may never be drawn; None when that is only the padding (which is cut off)."""
        params = self.params
        if params.allowed_token_ids is None and not params.banned_token_ids and not unused:
            return None
        forbidden = np.full(self.vocab_size, params.allowed_token_ids is not None)
        forbidden[list(params.allowed_token_ids or ())] = False
        forbidden[[*params.banned_token_ids, *unused]] = True
        return forbidden

    def _shaped(self, logits: NDArray[np.floating], history: History, path: Sequence[int]) -> NDArray[np.float64]:
        """A copy f64[V] of ``logits`` with every rule before temperature applied."""
        params = self.params
        z = np.array(logits, dtype=np.float64)
        z[self.n_tokens :] = -np.inf
        if self._forbidden is not None:
            np.copyto(z, -np.inf, where=self._forbidden)
        with np.errstate(over="ignore"):  # whoever draws finds out
            z[self._bias_ids] += self._bias
            if history.n_output(path) < params.min_tokens:
                z[self._endings] = -np.inf
            penalty, often, once = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
            if penalty != 1.0 or often or once:
                ids, times = history.counts(path)
                values = z[ids]
                if penalty != 1.0:
                    values = np.where(values > 0, values / penalty, values * penalty)
                z[ids] = values - np.where(times > 0, often * times + once, 0.0)
        prompt, output = (history.prompt, history.output(path)) if params.processors else ([], [])
        for i, processor in enumerate(params.processors):
            shaped = processor(prompt, output, z)
            if np.shape(shaped) != z.shape:
                raise SettingError(
                    f"processors[{i}] returned shape {np.shape(shaped)}; allowed is the logits' shape {z.shape}"
                )
            z = np.array(shaped, dtype=np.float64)  # a copy: the next one may write into it
        if self.grammar is not None:  # last, so that no other rule can bring back what it forbids
            allowed = history.matcher(self.grammar).allowed(path)
            np.copyto(z[: len(allowed)], -np.inf, where=~allowed)
            z[len(allowed) :] = -np.inf
        return z


def _narrow(
    ids: NDArray[np.int64] | None, values: NDArray[np.float64], at: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The ids and values at the places ``at``; ``ids`` None stands for all tokens, which saves writing them out."""
    return at if ids is None else ids[at], values[at]
