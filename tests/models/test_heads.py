"""Checkpoints of drafting heads: every published form is read, every tensor is used, and nothing is made up."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.core.errors import ModelFileError
from outrider.models.heads.eagle_files import load_eagle
from outrider.models.heads.medusa import load_medusa
from tests.engine.harness import toy_target
from tests.engine.heads import (
    Tensors,
    eagle3_tensors,
    eagle3_values,
    layer_tensors,
    llama_values,
    medusa_config,
    noise,
    write_head,
)
from tests.toy import toy_config

CONFIG = toy_config(layers=4)
TARGET = toy_target(CONFIG, seed=1)
X = noise(77, 5, 32)

MEDUSA: Tensors = {
    f"{h}.{name}": noise(40 * h + i, *shape)
    for h in range(2)
    for i, (name, shape) in enumerate(
        {
            "0.linear.weight": (32, 32),
            "0.linear.bias": (32,),
            "1.linear.weight": (32, 32),
            "1.linear.bias": (32,),
            "2.weight": (32, 32),
        }.items()
    )
}
IDS = torch.tensor([3, 1, 30, 7, 8])


def plain_medusa(head: int, output: torch.Tensor | None = None) -> torch.Tensor:
    x = X
    for layer in range(2):
        y = x @ MEDUSA[f"{head}.{layer}.linear.weight"].T + MEDUSA[f"{head}.{layer}.linear.bias"]
        x = x + y * torch.sigmoid(y)
    return x @ (MEDUSA[f"{head}.2.weight"] if output is None else output).T


def vllm_names() -> Tensors:
    named = {}
    for name, tensor in MEDUSA.items():
        head, layer, rest = name.split(".", 2)
        named[f"lm_heads.{head}.weight" if layer == "2" else f"blocks.{head}.layers.{layer}.{rest[7:]}"] = tensor
    return named


@pytest.mark.parametrize("pickled", ["", "medusa_lm_head.pt", "pytorch_model.bin"])
@pytest.mark.parametrize("form", ["medusa", "vllm"])
@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
def test_every_form_of_medusa(pickled: str, form: str, prefix: str, tmp_path: Path) -> None:
    config = medusa_config(2, 2) if form == "medusa" else {"num_heads": 2, "num_hidden_layers": 2, "vocab_size": 32}
    tensors = {prefix + k: v for k, v in (MEDUSA if form == "medusa" else vllm_names()).items()}
    heads = load_medusa(str(write_head(tmp_path, config, tensors, pickled)), TARGET)
    assert heads.n_heads == 2
    assert heads.weight_bytes == sum(t.nbytes for t in MEDUSA.values())
    for head in range(2):
        torch.testing.assert_close(heads.logits(X, head), plain_medusa(head))


def test_medusa_shares_the_targets_head_where_it_has_none(tmp_path: Path) -> None:
    """All heads' outputs left out, or the second one's only."""
    some = {k: v for k, v in MEDUSA.items() if k != "1.2.weight"}
    heads = load_medusa(str(write_head(tmp_path, medusa_config(2, 2), some)), TARGET)
    torch.testing.assert_close(heads.logits(X, 0), plain_medusa(0))
    target_head = TARGET.decoder.head
    assert heads.outputs[1] is target_head
    assert isinstance(target_head, torch.Tensor)
    torch.testing.assert_close(heads.logits(X, 1), plain_medusa(1, target_head))


def test_medusa_with_a_trimmed_vocabulary(tmp_path: Path) -> None:
    outputs = [noise(90 + h, 5, 32) for h in range(2)]
    tensors = {k: v for k, v in vllm_names().items() if not k.startswith("lm_heads")}
    tensors |= {"token_map": IDS, "lm_heads.0.weight": outputs[0], "lm_heads.1.weight": outputs[1]}
    config = {"num_heads": 2, "num_hidden_layers": 2, "truncated_vocab_size": 5}
    heads = load_medusa(str(write_head(tmp_path, config, tensors)), TARGET)
    for head in range(2):
        logits = heads.logits(X, head)
        torch.testing.assert_close(logits[:, IDS], plain_medusa(head, outputs[head]))
        assert logits.isfinite().sum() == 25
        assert all(set(row) == set(IDS.tolist()) for row in heads.best(X, head, 8, 32))


def refused(load: Callable[..., Any], config: dict[str, Any], tensors: Tensors, folder: Path) -> str:
    with pytest.raises(ModelFileError) as error:
        load(str(write_head(folder, config, tensors)), TARGET)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("config", "change", "said"),
    [
        (medusa_config(3, 2), {}, "lacks tensor 2.0.linear.weight of shape [32, 32]"),
        (medusa_config(1, 2), {}, "unexpected tensor 1.0.linear.bias of shape [32] and 4 more"),
        (medusa_config(2, 1), {}, "unexpected tensor 0.1.linear.bias"),
        (medusa_config(2, 2), {"0.2.weight": noise(1, 31, 32)}, "0.2.weight has shape [31, 32]; the config asks for"),
        (medusa_config(2, 2), {"0.2.weight": torch.ones(32, 32).int()}, "0.2.weight is torch.int32; allowed are float"),
        (medusa_config(2, 2, hidden_size=64), {}, "hidden_size is 64; the target toy-1 has 32"),
        (medusa_config(2, 2, truncated_vocab_size=5), {}, "lacks tensor token_map of shape [5]"),
        ({"medusa_num_layers": 2}, {}, "neither medusa_num_heads nor num_heads"),
        (medusa_config(0, 2), {}, "medusa_num_heads is 0; allowed is a whole number from 1"),
        ({"num_heads": 2, "num_hidden_layers": 2}, {"token_map": torch.zeros(32).long()}, "names a token twice"),
    ],
)
def test_medusa_is_read_strictly(config: dict[str, Any], change: Tensors, said: str, tmp_path: Path) -> None:
    assert said in refused(load_medusa, config, {**MEDUSA, **change}, tmp_path)


class Evil:
    """What a pickle can do to who loads it freely."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("echo evil > evil-was-here",)


def test_a_pickle_that_runs_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_head(tmp_path, medusa_config(2, 2), {"0.0.linear.weight": Evil()}, "medusa_lm_head.pt")  # type: ignore[dict-item]
    with pytest.raises(ModelFileError, match="holds more than plain tensors, which could run code"):
        load_medusa(str(tmp_path), TARGET)
    assert not (tmp_path / "evil-was-here").exists()
    for content in (b"", b"no file of torch's", b"PK\x03\x04 cut off"):
        (tmp_path / "medusa_lm_head.pt").write_bytes(content)
        with pytest.raises(ModelFileError):
            load_medusa(str(tmp_path), TARGET)
    torch.save([1, 2], tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ModelFileError, match=r"holds a list; expected are tensors by name"):
        load_medusa(str(tmp_path), TARGET)


def test_a_folder_without_weights_or_config(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="holds no weights"):
        load_medusa(str(tmp_path), TARGET)
    folder = write_head(tmp_path, medusa_config(2, 2), MEDUSA)
    (folder / "config.json").unlink()
    with pytest.raises(ModelFileError, match=r"lacks the file config\.json"):
        load_medusa(str(folder), TARGET)
    (folder / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ModelFileError, match="damaged or not a safetensors file"):
        load_medusa(str(folder), TARGET)


FIRST = llama_values(CONFIG)
FIRST_TENSORS: Tensors = {"fc.weight": noise(7, 32, 64), **layer_tensors(FIRST, 8)}
THIRD = eagle3_values(CONFIG, rows=20)
THIRD_TENSORS = eagle3_tensors(THIRD, CONFIG, seed=12)


def test_own_embedding_and_head_stay_own_and_missing_ones_are_the_targets(tmp_path: Path) -> None:
    """Nothing that the file holds is replaced, nothing that it lacks is random."""
    own = {"embed_tokens.weight": noise(5, 32, 32), "lm_head.weight": noise(6, 32, 32)}
    head = load_eagle(str(write_head(tmp_path / "own", FIRST, {**FIRST_TENSORS, **own})), TARGET)
    assert torch.equal(head.embedding, own["embed_tokens.weight"])  # type: ignore[arg-type]
    assert torch.equal(head.output, own["lm_head.weight"])  # type: ignore[arg-type]
    head = load_eagle(str(write_head(tmp_path / "shared", FIRST, FIRST_TENSORS)), TARGET)
    assert head.embedding is TARGET.decoder.embedding
    assert head.output is TARGET.decoder.head
    assert head.weight_bytes == sum(t.nbytes for t in FIRST_TENSORS.values())
    assert head.feature_layers == (3,)


def speculators(**more: Any) -> dict[str, Any]:
    values = {k: v for k, v in THIRD.items() if k not in ("architectures", "draft_vocab_size", "eagle_config")}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.1.0",
        "transformer_layer_config": values,
        "draft_vocab_size": 20,
        "eagle_aux_hidden_state_layer_ids": [2, 3, 4],
        "norm_before_residual": True,
        "speculators_config": {"algorithm": "eagle3", "default_proposal_method": "greedy"},
        **more,
    }


def test_speculators_form_is_the_same_head(tmp_path: Path) -> None:
    renamed = {k.replace("midlayer.", "layers.0."): v for k, v in THIRD_TENSORS.items()}
    theirs = load_eagle(str(write_head(tmp_path / "a", speculators(), renamed)), TARGET)
    ours = load_eagle(str(write_head(tmp_path / "b", {**THIRD, "norm_before_residual": True}, THIRD_TENSORS)), TARGET)
    tokens, positions = torch.arange(5), torch.arange(5)
    outputs = [
        head.logits(head.forward(X, tokens, positions, lambda layer, q, k, v: q.flatten(1))[1])
        for head in (theirs, ours)
    ]
    assert torch.equal(*outputs)
    assert theirs.feature_layers == ours.feature_layers == (1, 2, 3)


def test_the_map_of_a_trimmed_vocabulary_is_of_offsets(tmp_path: Path) -> None:
    """Row i stands for token i + d2t[i]; t2d is true exactly there; a map of zeros is none."""
    head = load_eagle(str(write_head(tmp_path / "a", THIRD, THIRD_TENSORS)), TARGET)
    logits = head.logits(X)
    ids = torch.arange(20) + THIRD_TENSORS["d2t"]
    torch.testing.assert_close(logits[:, ids], X @ THIRD_TENSORS["lm_head.weight"].T)
    assert torch.equal(logits[0].isfinite(), THIRD_TENSORS["t2d"])
    whole = {**THIRD, "draft_vocab_size": 32}
    tensors = {**eagle3_tensors(whole, CONFIG, seed=3), "d2t": torch.zeros(32).long(), "t2d": torch.ones(32).bool()}
    assert load_eagle(str(write_head(tmp_path / "b", whole, tensors)), TARGET).tokens is None


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (None, (1, 3, 4)),  # EAGLE's own: what goes into layers 2, N/2 and N - 3
        ([2, 4, 5], (1, 3, 4)),  # the same, written out
        ([1, 3, 4], (1, 3, 4)),  # and as trainers write it, by the layers that put it out
        ([8, 2, 5], (1, 4, 7)),  # those who train and serve them take them layer by layer, however they are listed
        ([7, 4, 1], (1, 4, 7)),
        ([3, 4, 5], (2, 3, 4)),
    ],
)
def test_which_layers_are_read(written: list[int] | None, read: tuple[int, ...], tmp_path: Path) -> None:
    """Both ways in which checkpoints count them, told apart by the lowest number."""
    target = toy_target(toy_config(layers=8), seed=2)
    values = {k: v for k, v in THIRD.items() if k != "eagle_config"}
    if written is not None:
        values["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": written}
    head = load_eagle(str(write_head(tmp_path, values, THIRD_TENSORS)), target)
    assert head.feature_layers == read


BOTH = {1: (FIRST, FIRST_TENSORS), 3: (THIRD, THIRD_TENSORS)}


@pytest.mark.parametrize(
    ("kind", "config", "change", "said"),
    [
        (1, {}, {"fc.weight": None}, "lacks tensor fc.weight of shape [32, 64]"),
        (1, {"bias": True}, {}, "lacks tensor fc.bias of shape [32]"),
        (1, {"bias": False}, {"fc.bias": noise(1, 32)}, "bias is false, but there is a tensor fc.bias"),
        (1, {"num_hidden_layers": 2}, {}, "lacks tensor layers.1.self_attn.q_proj.weight"),
        (1, {}, {"layers.1.self_attn.q_proj.weight": noise(1, 32, 32)}, "unexpected tensor layers.1.self_attn.q_proj"),
        (1, {"hidden_size": 64}, {}, "hidden_size is 64; the target has 32"),
        (1, {"vocab_size": 16}, {}, "vocab_size is 16; the target toy-1 has 32 tokens"),
        (1, {"vocab_size": 40}, {}, "lacks tensor embed_tokens.weight of shape [40, 32]"),
        (3, {}, {"midlayer.hidden_norm.weight": None}, "lacks tensor layers.0.hidden_norm.weight"),
        (3, {}, {"lm_head.weight": None}, "lacks tensor lm_head.weight of shape [20, 32]"),
        (3, {}, {"d2t": None}, "lacks tensor d2t of shape [20]"),
        (3, {}, {"d2t": torch.arange(20)}, "d2t maps two rows to one token, or one outside of 0 to 31"),
        (3, {}, {"t2d": torch.ones(32).bool()}, "t2d is not true for exactly the tokens"),
        (3, {"norm_before_fc": True}, {}, "lacks tensor input_norm.weight of shape [96]"),
        (3, {"fc_norm": True}, {}, "fc_norm is true; supported is false"),
        (3, {"eagle_config": {"use_aux_hidden_state": False}}, {}, "use_aux_hidden_state is false; supported is true"),
        (3, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}, {}, "different numbers from 1 to 4"),
        (3, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}}, {}, "different numbers from 1 to 3"),
        (3, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 2, 4]}}, {}, "different numbers from 1 to 4"),
        (3, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": "2,3"}}, {}, "different numbers from 1 to 4"),
        (3, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}}, {}, "tensor fc.weight has shape [32, 96]"),
        (3, {"norm_before_residual": 3}, {}, "norm_before_residual is 3; allowed is true or false"),
        (3, {"speculators_model_type": "mlp"}, {}, "speculators_model_type is 'mlp'; allowed is eagle3"),
        (3, {"speculators_model_type": "eagle3"}, {}, "transformer_layer_config is None"),
        (3, speculators(norm_before_residual=None), {}, "lacks norm_before_residual, which must be given"),
    ],
)
def test_eagle_is_read_strictly(kind: int, config: dict[str, Any], change: Any, said: str, tmp_path: Path) -> None:
    values, tensors = BOTH[kind]
    changed = {k: v for k, v in {**tensors, **change}.items() if v is not None}
    assert said in refused(load_eagle, {**values, **config}, changed, tmp_path)
