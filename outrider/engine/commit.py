"""The commit: the only place that changes tokens, computed counts and blocks."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.cache.blocks import BlockManager
from outrider.core.types import Commit, FinishReason, Span, Verdict
from outrider.engine.answer import Answer
from outrider.runtime.runner import Runner
from outrider.sampling.logprobs import token_logprobs


class Outcome(NamedTuple):
    """What became of one span: the tokens appended (none for a middle chunk of a prompt), and whether that ended it."""

    span: Span
    path: tuple[int, ...] = ()  # accepted draft nodes whose tokens were kept
    new_tokens: tuple[int, ...] = ()
    probe_tokens: tuple[int, ...] = ()
    finish: FinishReason | None = None


def append_tokens(span: Span, verdict: Verdict, answer: Answer, logits: NDArray[np.floating]) -> Outcome:
    """Appends the accepted path and the next token to the sequence, cut at the first reason to stop.

    ``logits`` [1+T,V]: row 0 after the newest token, row 1+i after draft node i. Token ids, text and logprobs are
    cut at the same place; if a token cannot be taken in, what came before it stands.
    """
    seq, draft = span.seq, span.draft
    tokens = [draft.tokens[node] for node in verdict.path] + [verdict.next_token]
    top = seq.params.logprobs
    kept, finish = 0, None
    while finish is None and kept < len(tokens):
        token = tokens[kept]
        seq.tokens.append(token)
        try:
            finish = answer.push(token, drafted=kept < len(verdict.path))
        except Exception:
            seq.tokens.pop()
            raise
        if top is not None:
            row = logits[1 + verdict.path[kept - 1] if kept else 0]
            answer.logprobs.append(token_logprobs(row, token, top, answer.sampler.n_tokens))
        kept += 1
    probes: tuple[int, ...] = ()
    if draft.n_verify < len(draft):
        probes = tuple(int(row[: answer.sampler.n_tokens].argmax()) for row in logits[1 + draft.n_verify :])
    return Outcome(span, verdict.path[:kept], tuple(tokens[:kept]), probes, finish)


def commit_step(
    outcomes: Seq[Outcome], runner: Runner, blocks: BlockManager, features: torch.Tensor | None
) -> list[Commit]:
    """Settles KV and blocks of a step whose tokens were appended; the newest token of each sequence stays pending.

    ``features`` [N,F] are those of all rows of the pass, or None.
    """
    kept = [outcome.path[: max(0, len(outcome.new_tokens) - 1)] for outcome in outcomes]
    runner.keep_path([outcome.span for outcome in outcomes], kept)
    commits = []
    first_row = 0
    for outcome, nodes in zip(outcomes, kept, strict=True):
        span = outcome.span
        seq = span.seq
        seq.n_computed = min(span.end + len(nodes), len(seq.tokens) - 1)
        blocks.commit(seq)
        rows = tuple(range(span.n_new))
        if nodes:
            rows += tuple([span.n_new + node for node in nodes])
        own = None if features is None else features[torch.tensor(rows, device=features.device) + first_row]
        commits.append(
            Commit(span, rows, outcome.new_tokens, len(outcome.path), own, outcome.probe_tokens, outcome.finish)
        )
        first_row += span.n_rows
    return commits
