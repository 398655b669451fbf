"""Grammars for one model's tokens, by llguidance: it parses bytes, so it must know the exact bytes of every token."""

from __future__ import annotations

import importlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from outrider.core.errors import SettingError
from outrider.core.grammar import Grammar
from outrider.models.tokenizer import Tokenizer
from outrider.models.values import one_line

T = TypeVar("T")

MAX_COMPILED = 64
"""Compiled grammars that are kept, those used last."""
_STACK = 1 << 29  # bytes of address space; what is not used takes no memory
_MAX_ITEMS = 1000  # of a parser's row: the time that an ambiguous grammar takes for a token is cubic in them
_MAX_STEP = 10_000  # items for one mask: five times what large schemas need, and 50 ms; llguidance's 50000 are seconds
_SLICES = ("[a-z]{1,10}", "[a-zA-Z]{1,10}", "[a-zA-Z ]{1,10}")
"""Classes of tokens that are allowed together, in one go, where a grammar takes any such text, beside llguidance's own.

They change no mask. Without them it walks through all words of the vocabulary for a regular expression of letters."""
_JSON_OPTIONS = {"whitespace_pattern": r"[ \t\n\r]{1,40}"}  # without a bound a model may write blanks for ever


@dataclass(frozen=True, eq=False)
class CompiledGrammar:
    """A grammar over the ids 0 .. ``n_tokens`` - 1, of which ``eos_ids`` end an answer that is complete."""

    where: str
    n_tokens: int
    eos_ids: tuple[int, ...]
    _origin: Any
    _lock: threading.Lock

    def start(self) -> Any:
        """A llguidance ``LLMatcher`` of its own at the beginning of the grammar."""
        with self._lock:
            return self._origin.deep_copy()


class Grammars:
    """Compiles grammars and keeps the latest. May be used from several threads, so that a server need not wait."""

    def __init__(self, tokenizer: Tokenizer | None, n_tokens: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._n_tokens = n_tokens
        self._eos_ids = tuple(i for i in eos_ids if i < n_tokens)
        self._compiled: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """The grammar, ready for answers: milliseconds, and about a second for a model's first one.

        Raises SettingError, which names the grammar's setting, if it is not sound or the model cannot follow any.
        """
        with self._lock:
            known = self._compiled.get(grammar)
        if known is None:
            known = self._compile(grammar)
        with self._lock:
            self._compiled[grammar] = known
            self._compiled.move_to_end(grammar)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        if known.where == grammar.where:
            return known
        return replace(known, where=grammar.where)  # another request gave the same grammar in another field

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        llguidance = _library(grammar.where)
        if self._tokenizer is None:
            raise SettingError(f"{grammar.where} needs a tokenizer; this model was loaded without one")
        if not self._eos_ids:
            raise SettingError(f"{grammar.where} needs an end token; this model has none")
        with self._lock:
            tokens = self._tokens
        made = _with_deep_stack(lambda: _matcher(llguidance, tokens, grammar))
        problem = made if isinstance(made, str) else str(made.get_error())
        if problem:
            raise SettingError(f"{grammar.where} cannot be used as {_NAMES[grammar.kind]}: {_reason(problem)}")
        return CompiledGrammar(grammar.where, self._n_tokens, self._eos_ids, made, threading.Lock())

    @cached_property
    def _tokens(self) -> Any:
        """llguidance's view of the vocabulary; what the tokenizer sets up for its first call is done here, too."""
        assert self._tokenizer is not None
        llguidance = _library("grammar")
        vocabulary = _Vocabulary(self._tokenizer, self._n_tokens, self._eos_ids)
        slices = [*_SLICES, *llguidance.LLTokenizer.general_slices()]
        tokens = llguidance.LLTokenizer(vocabulary, self._n_tokens, list(self._eos_ids), slices)
        vocabulary.greedy = tokens.greedy_tokenize
        vocabulary("a")
        return tokens


class _Vocabulary:
    """What llguidance asks of a tokenizer: attributes by their names, and a call that encodes a text.

    Control tokens are marked, so that no grammar takes them for their text; end tokens are too, whatever they are to
    the tokenizer.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, n_tokens: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        unused = set(tokenizer.unused_ids)
        self.tokens = [b"" if i in unused else tokenizer.token_bytes(i) for i in range(n_tokens)]
        self.special_token_ids = [i for i in range(n_tokens) if i in eos_ids or tokenizer.is_special(i)]
        self.eos_token_id = eos_ids[0]
        self.greedy: Any = None

    def __call__(self, text: str) -> list[int]:
        """The tokens in which the model is used to read ``text``: it is made to write them where it has no choice.

        They must add up to ``text`` exactly. A tokenizer that changes text (a space in front, say) does not serve:
        then each token is the longest that fits.
        """
        ids = self._tokenizer.encode(text, specials=False, add_bos=False)
        exact = all(i < len(self.tokens) for i in ids) and b"".join(self.tokens[i] for i in ids) == text.encode()
        return ids if exact or self.greedy is None else list(self.greedy(text))


_NAMES = {
    "json_object": "JSON",
    "json_schema": "a JSON schema",
    "regex": "a regular expression",
    "choice": "a choice",
    "lark": "a grammar",
}


def _library(where: str) -> Any:
    try:
        return importlib.import_module("llguidance")
    except ImportError:
        raise SettingError(
            f"{where} needs the package llguidance, which is not installed: pip install 'outrider[grammar]'"
        ) from None


def _with_deep_stack(work: Callable[[], T]) -> T:
    """The result of ``work``, done in a thread with a deep stack.

    llguidance's compiler calls itself as deeply as rules stand behind one another, and does not check: on an ordinary
    stack, a grammar of some thousand rules would end the process.
    """
    results: list[T] = []
    before = threading.stack_size(_STACK)
    try:
        thread = threading.Thread(target=lambda: results.append(work()), name="outrider-grammar")
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    return results[0]


def _matcher(llguidance: Any, tokens: Any, grammar: Grammar) -> Any:
    """A matcher, which may have an error to report; or what is wrong.

    Its first mask is made here, not where an answer waits for it: what llguidance finds out about the tokens meanwhile,
    which may take a tenth of a second, the matcher's copies know as well.
    """
    try:
        limits = llguidance.LLParserLimits(max_items_in_row=_MAX_ITEMS, step_max_items=_MAX_STEP)
        made = llguidance.LLMatcher(tokens, _source(llguidance, grammar), log_level=0, limits=limits)
        if not made.is_error():
            made.compute_bitmask()
        return made
    except Exception as error:
        return str(error) or type(error).__name__


def _source(llguidance: Any, grammar: Grammar) -> str:
    """The grammar in llguidance's own terms. Raises various errors."""
    matcher = llguidance.LLMatcher
    if grammar.kind in ("json_object", "json_schema"):
        schema = grammar.text or '{"type": "object"}'
        options = _JSON_OPTIONS if isinstance(json.loads(schema), dict) else None  # true and false take none
        return str(matcher.grammar_from_json_schema(schema, defaults=options))
    if grammar.kind == "regex":
        return str(matcher.grammar_from_regex(grammar.text))
    if grammar.kind == "choice":
        return str(matcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, grammar.options))))
    gbnf = importlib.import_module("llguidance.gbnf_to_lark")
    return str(matcher.grammar_from_lark(gbnf.any_to_lark(grammar.text)))


def _reason(problem: str) -> str:
    """The one line of a message that says what is wrong: it may point into the text over several lines."""
    lines = problem.strip().splitlines()
    return one_line(next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0]), 200)
