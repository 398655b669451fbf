"""What a grammar costs on a real vocabulary: a matcher, a mask, a step along a draft, several answers.

python -m benchmarks.grammar MODEL
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from outrider.core.grammar import Grammar
from outrider.models.grammars import Grammars
from outrider.models.load import open_model
from outrider.ops.native import default_threads
from outrider.sampling.grammar import Masks, Matcher

SCHEMA = Grammar.schema(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer"},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    }
)
PROSE = "The quick brown fox jumps over the lazy dog and then it goes back home to sleep until the morning comes"
TEXT = '{"name": "Bob Smith", "age": 42, "tags": ["tennis", "chess", "reading old books"]}'


def timed(work: Callable[[], object]) -> float:
    """Milliseconds."""
    start = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - start)


def step(masks: Masks, matchers: list[Matcher]) -> None:
    """The masks of several answers, as the engine has them made."""
    masks.prepare(matchers)
    for matcher in matchers:
        matcher.allowed()


def main() -> None:
    tokenizer = open_model(Path(sys.argv[1]).expanduser()).tokenizer
    grammars = Grammars(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)
    print(f"first grammar of the model: {timed(lambda: grammars.compile(Grammar('json_object'))):.0f} ms")
    print(f"a further grammar: {timed(lambda: grammars.compile(SCHEMA)):.1f} ms")
    compiled = grammars.compile(SCHEMA)
    print(f"a matcher: {timed(compiled.start) * 1e3:.0f} us")
    ids = tokenizer.encode(TEXT)
    for what, n_ahead in (("without drafts", 0), ("with 4 draft tokens, 3 of them rejected", 4)):
        costs: list[float] = []
        for _ in range(20):
            tokens: list[int] = []
            matcher = Matcher(compiled, tokens, 0)
            for i, token in enumerate(ids):
                for ahead in range(1 + n_ahead):
                    path = ids[i : i + ahead]
                    costs.append(timed(lambda matcher=matcher, path=path: matcher.allowed(path)) * 1e3)
                tokens.append(token)
        cost = np.array(costs)
        print(
            f"a mask of {tokenizer.vocab_size} tokens {what}: mean {cost.mean():.0f} us, median {np.median(cost):.0f}, "
            f"99% {np.percentile(cost, 99):.0f}, most {cost.max():.0f}"
        )
    for pattern, n in (("[A-Za-z ,.']{20,400}", 1), ("[A-Za-z ,.']{20,400}", 8), (r"(\w+ ){5,40}\w+", 8)):
        compiled, ids = grammars.compile(Grammar("regex", pattern)), tokenizer.encode(PROSE)
        masks, answers = Masks(default_threads()), [list[int]() for _ in range(n)]
        matchers = [Matcher(compiled, answer, 0) for answer in answers]
        costs = []
        for token in ids:
            costs.append(timed(lambda matchers=matchers, masks=masks: step(masks, matchers)))
            for answer in answers:
                answer.append(token)
        print(f"{n} answers that follow {pattern}: {np.mean(costs):.2f} ms a step, median {np.median(costs):.2f}")
    logits = np.zeros(tokenizer.vocab_size)
    mask = Matcher(compiled, [], 0).allowed()
    apply = min(timed(lambda: np.copyto(logits, -np.inf, where=~mask)) for _ in range(50))
    print(f"applying a mask: {apply * 1e3:.0f} us")


if __name__ == "__main__":
    main()
