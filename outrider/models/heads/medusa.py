"""Medusa's heads: each guesses one position further ahead from one hidden state of the target.

Source: Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", 2024. A head is
some residual blocks ``x + silu(linear(x))`` and an output matrix; head h guesses the token h + 2 positions after the
one whose hidden state it reads (the target's own head gives the next one).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from outrider.core.errors import ModelFileError
from outrider.models.heads.files import HeadFiles, HeadWeights
from outrider.models.load import LoadedModel
from outrider.models.values import MAX_LAYERS, whole
from outrider.ops.contract import Ops, Weight

Block = tuple[Weight, torch.Tensor | None]
"""Weight [H,H] and bias [H] of a residual block."""


@dataclass(frozen=True, eq=False)
class MedusaHeads:
    """``blocks[h]`` and ``outputs[h]`` of each head; ``token_map`` i64[R] names the tokens of trimmed outputs."""

    ops: Ops
    blocks: Sequence[Sequence[Block]]
    outputs: Sequence[Weight]
    vocab_size: int
    token_map: torch.Tensor | None
    weight_bytes: int

    @property
    def n_heads(self) -> int:
        return len(self.outputs)

    def hidden(self, x: torch.Tensor, head: int) -> torch.Tensor:
        """What goes into the output matrix of ``head``, [N,H], for hidden states ``x`` [N,H] after the final norm."""
        for weight, bias in self.blocks[head]:
            x = x + F.silu(self.ops.linear(x, weight, bias))
        return x

    @torch.inference_mode()
    def best(self, x: torch.Tensor, head: int, k: int, n_tokens: int) -> list[list[int]]:
        """Per row of ``x`` [N,H] the ``k`` likeliest tokens below ``n_tokens``, best first (fewer where there are)."""
        logits = self.logits(x, head)[:, :n_tokens]
        values, ids = logits.topk(min(k, logits.shape[1]), dim=-1)
        rows = zip(values.isfinite().tolist(), ids.tolist(), strict=True)
        return [[token for ok, token in zip(known, row, strict=True) if ok] for known, row in rows]

    def logits(self, x: torch.Tensor, head: int) -> torch.Tensor:
        """Logits [N,V] of ``head``; -inf for tokens that a trimmed vocabulary lacks."""
        own = self.ops.linear(self.hidden(x, head), self.outputs[head])
        if self.token_map is None:
            return own
        full = own.new_full((own.shape[0], self.vocab_size), float("-inf"))
        return full.index_copy_(1, self.token_map, own)


def load_medusa(name: str, target: LoadedModel, quantization: str | None = None) -> MedusaHeads:
    """Reads a checkpoint of Medusa's own form or of vLLM's. An output matrix it leaves out is the target's.

    Raises ModelFileError where a tensor is missing, left over or of another shape than config and target ask for.
    """
    return medusa_from_files(HeadFiles.open(name), target, quantization)


def medusa_from_files(files: HeadFiles, target: LoadedModel, quantization: str | None = None) -> MedusaHeads:
    """``load_medusa`` from files that are open."""
    for prefix in ("medusa_heads.", "medusa_head."):
        files.renamed(prefix, "")
    n_heads = _count(files, ("medusa_num_heads", "num_heads"), low=1)
    n_layers = _count(files, ("medusa_num_layers", "num_hidden_layers"), low=0)
    hidden, vocab = target.config.hidden_size, target.config.vocab_size
    for key, wanted in (("hidden_size", hidden), ("vocab_size", vocab)):
        if files.config.get(key, wanted) != wanted:
            raise ModelFileError(f"{files.where}: {key} is {files.config[key]}; the target {target.name} has {wanted}")
    weights = HeadWeights(files, target.decoder, quantization)
    theirs = any(key.startswith(("blocks.", "lm_head")) for key in files.names())  # vLLM's names
    linear = "blocks.{}.layers.{}" if theirs else "{}.{}.linear"
    token_map = _token_map(files, vocab)
    rows = vocab if token_map is None else len(token_map)
    shared: Weight | None = target.decoder.head  # of every head whose own is not in the file
    if "lm_head.weight" in files:
        shared = weights.matrix("lm_head.weight", rows, hidden)
    elif token_map is not None:
        shared = None
    blocks: list[list[Block]] = []
    outputs: list[Weight] = []
    for head in range(n_heads):
        names = [linear.format(head, layer) for layer in range(n_layers)]
        blocks.append(
            [(weights.matrix(f"{n}.weight", hidden, hidden), weights.bias(f"{n}.bias", hidden)) for n in names]
        )
        output = f"lm_heads.{head}.weight" if theirs else f"{head}.{n_layers}.weight"
        own = shared is None or output in files
        outputs.append(shared if shared is not None and not own else weights.matrix(output, rows, hidden))
    files.finish()
    if token_map is not None:
        token_map = token_map.to(target.decoder.device)
    return MedusaHeads(target.decoder.ops, blocks, outputs, vocab, token_map, weights.nbytes)


def _count(files: HeadFiles, keys: tuple[str, str], low: int) -> int:
    """A number that Medusa's config and vLLM's name differently."""
    for key in keys:
        if key in files.config:
            return whole(files.config[key], f"{files.where}: {key}", low, MAX_LAYERS)
    raise ModelFileError(f"{files.where}: the config has neither {keys[0]} nor {keys[1]}")


def _token_map(files: HeadFiles, vocab: int) -> torch.Tensor | None:
    """The target's token for each row of a trimmed output matrix; None where nothing is trimmed."""
    given = files.config.get("truncated_vocab_size")
    rows = vocab if given is None else whole(given, f"{files.where}: truncated_vocab_size", 1, vocab)
    if "token_map" not in files:
        if rows < vocab:
            raise ModelFileError(f"{files.where} lacks tensor token_map of shape [{rows}], which a trimmed head needs")
        return None
    ids = files.take("token_map", rows, floating=False).long()
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocab or len(set(ids.tolist())) < rows:
        raise ModelFileError(f"{files.where}: token_map names a token twice or outside of 0 to {vocab - 1}")
    return ids
