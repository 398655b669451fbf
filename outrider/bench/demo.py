"""The first thing to see: plain and speculative decoding side by side on six kinds of prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider.bench.identity import Comparison, compare
from outrider.bench.prompts import BenchPrompt
from outrider.engine.answer import SpecStats
from outrider.engine.llm import LLM
from outrider.engine.request import RequestOutput


def run_demo(llm: LLM, prompts: Sequence[BenchPrompt], max_tokens: int, say: Callable[[str], None]) -> bool:
    """Prints a row a prompt as it is done, and the totals; returns whether every pair of outputs was identical."""
    say(
        f"{'prompt':<12} {'tokens':>6}  {'plain tok/s':>11}  {'spec. tok/s':>11}  {'speed-up':>8}  {'tok/step':>8}  "
        f"{'accepted':>8}  output"
    )
    llm.generate(llm.encode("Warm up."), None)  # the first passes of a process are slow
    done: list[Comparison] = []
    for comparison in compare(llm, prompts, max_tokens):
        done.append(comparison)
        say(_row(comparison.prompt.kind, [comparison]))
        if comparison.divergence is not None:
            d = comparison.divergence
            say(
                f"{'':<12} differs from token {d.position} on, where the best two tokens are {d.margin:.2g} apart "
                "in log-probability"
            )
    say(_row("all", done))
    return all(comparison.identical for comparison in done)


def _row(name: str, comparisons: Sequence[Comparison]) -> str:
    plain, speculative = [c.plain for c in comparisons], [c.speculative for c in comparisons]
    before, after = decode_rate(plain), decode_rate(speculative)
    stats = SpecStats.total(output.stats for output in speculative)
    verdict = "identical" if all(c.identical for c in comparisons) else "DIFFERS"
    return (
        f"{name:<12} {stats.emitted:>6}  {before:>11.1f}  {after:>11.1f}  {after / before:>7.2f}x  "
        f"{stats.tokens_per_step:>8.2f}  {stats.acceptance_rate:>8.0%}  {verdict}"
    )


def decode_rate(outputs: Sequence[RequestOutput]) -> float:
    """Tokens a second after the first token, over all outputs."""
    tokens = sum(len(output.token_ids) - 1 for output in outputs)
    seconds = sum(output.decode_s for output in outputs)
    return tokens / seconds if seconds > 0 else 0.0
