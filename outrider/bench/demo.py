"""The first thing to see: plain and speculative decoding side by side on six kinds of prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider.bench.identity import Comparison, compare
from outrider.bench.prompts import BenchPrompt
from outrider.core.params import SamplingParams, SpecParams
from outrider.engine.answer import SpecStats
from outrider.engine.llm import LLM
from outrider.engine.request import RequestOutput

WARM_UP = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def run_demo(llm: LLM, prompts: Sequence[BenchPrompt], max_tokens: int, say: Callable[[str], None]) -> list[Comparison]:
    """Prints a row a prompt as it is done, and the totals; returns the comparisons."""
    say(
        f"{'prompt':<12} {'tokens':>6}  {'plain tok/s':>11}  {'spec. tok/s':>11}  {'speed-up':>8}  {'tok/step':>8}  "
        f"{'accepted':>8}  output"
    )
    for enabled in (False, True):  # the first passes of a process are slow
        llm.generate("Warm up, warm up.", WARM_UP, SpecParams(enabled=enabled))
    done: list[Comparison] = []
    for comparison in compare(llm, prompts, max_tokens):
        done.append(comparison)
        say(_row(comparison.prompt.kind, [comparison]))
        if comparison.divergence is not None:
            d = comparison.divergence
            say(
                f"{'':<12} differs from token {d.position} on, where the best two tokens are {d.margin:.2g} apart "
                f"in log-probability: {'a near-tie' if d.near_tie else 'NOT a near-tie'}"
            )
    say(_row("all", done))
    return done


def _row(name: str, comparisons: Sequence[Comparison]) -> str:
    plain, speculative = [c.plain for c in comparisons], [c.speculative for c in comparisons]
    before, after = decode_rate(plain), decode_rate(speculative)
    speed_up = f"{after / before:.2f}x" if before and after else "-"
    stats = SpecStats.total(output.stats for output in speculative)
    verdict = "identical" if all(c.identical for c in comparisons) else "DIFFERS"
    return (
        f"{name:<12} {stats.emitted:>6}  {before:>11.1f}  {after:>11.1f}  {speed_up:>8}  "
        f"{stats.tokens_per_step:>8.2f}  {stats.acceptance_rate:>8.0%}  {verdict}"
    )


def decode_rate(outputs: Sequence[RequestOutput]) -> float:
    """Tokens a second after the first token, over all outputs."""
    tokens = sum(len(output.token_ids) - 1 for output in outputs)
    seconds = sum(output.decode_s for output in outputs)
    return tokens / seconds if seconds > 0 else 0.0
