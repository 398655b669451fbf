"""Log-probabilities to report: of the model itself, before any sampling rule."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.core.errors import SettingError
from outrider.sampling.select import best


@dataclass(frozen=True)
class TokenLogprob:
    """Natural log-probability of the chosen ``token``, and the most likely ``(id, logprob)``, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def token_logprobs(logits: NDArray[np.floating], token: int, top: int, n_tokens: int | None = None) -> TokenLogprob:
    """Log-softmax in float64 of the raw ``logits`` [V], for ``token`` and the ``top`` most likely tokens.

    Ids from ``n_tokens`` on are padding: they have no mass. Raises SettingError when a logit is NaN or infinite.
    """
    z = logits[:n_tokens].astype(np.float64)
    peak = z.max()
    if not np.isfinite(peak):
        raise SettingError(f"the logits of token {token} hold {peak}; allowed are finite numbers and -inf")
    shift = peak + np.log(np.exp(z - peak).sum())
    ids = best(z, min(top, len(z))) if top else np.empty(0, dtype=np.int64)
    ids = ids[np.argsort(-z[ids], kind="stable")]
    return TokenLogprob(token, float(z[token] - shift), tuple((int(i), float(z[i] - shift)) for i in ids))
