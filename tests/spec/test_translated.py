"""A draft model of another tokenizer: what it drafts, that its q is honest, and how little it reads again."""

from __future__ import annotations

import json
from collections.abc import Sequence as List
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.cache.blocks import BlockManager
from outrider.cli.main import main
from outrider.core.errors import SettingError
from outrider.core.params import SamplingParams, SpecParams
from outrider.core.types import Sequence
from outrider.models.decoder import Decoder
from outrider.models.load import LoadedModel
from outrider.ops.reference import ReferenceOps
from outrider.spec.drafts.model import ModelSettings, TwoModels
from outrider.spec.reading import LONGEST_STRETCH, OtherTokens, SameTokens, _Translation
from tests.engine.harness import assert_same, greedy, make_engine, plain, run_all, toy_target
from tests.spec.draft_bench import GREEDY, SHAPE, Bench
from tests.tiny import write_tiny_model
from tests.tokens import byte_level, two_tongues, words
from tests.toy import MemorySource, full_logits, toy_config

VOCAB = 24
TARGET, OTHER = two_tongues(toy_target(toy_config(vocab=VOCAB, **SHAPE), seed=1))
SHOWN: Any = OTHER
DRAFTER = toy_target(toy_config(vocab=OTHER.vocab_size, **SHAPE), seed=2, tokenizer=SHOWN)
PROMPT = [3, 1, 4, 1, 5, 9, 2]  # 5 and 2 are tokens that the draft model lacks


def bench(**options: Any) -> Bench:
    return Bench(DRAFTER, TARGET, use_heterogeneous_vocab=True, **options)


def propose(b: Bench, tokens: List[int], budget: int, params: SamplingParams = GREEDY) -> list[Any]:
    return b.propose(b.add(tokens, params=params), budget=budget)


def translated(tokens: List[int]) -> list[int]:
    """What the draft model reads, written anew: common tokens one by one, the letters of the others."""
    ids = {OTHER.token_bytes(i): i for i in range(1, OTHER.vocab_size)}
    out: list[int] = []
    for token in tokens:
        text = TARGET.tokenizer.token_bytes(token)  # type: ignore[union-attr]
        out += [ids[text]] if text in ids else [ids[bytes([byte])] for byte in text]
    return out


def law_after(tokens: List[int], temperature: float = 1.0) -> np.ndarray:
    """The draft model's law over the target's ids: of the common tokens only, renormalised."""
    z = full_logits(DRAFTER.decoder, translated(tokens))[-1]
    law = np.zeros(VOCAB)
    for token in range(VOCAB):
        own = translated([token])
        if len(own) == 1:
            law[token] = float(torch.exp(z[own[0]] / temperature))
    return law / law.sum()


def test_the_pair_has_tokens_of_all_kinds() -> None:
    """Guards the tests here: common tokens, others, and an order of its own."""
    reading = bench().drafter.reading
    assert isinstance(reading, OtherTokens)
    shared = dict(zip(reading.shared.target_ids.tolist(), reading.shared.draft_ids.tolist(), strict=True))
    assert 0 < len(shared) < VOCAB
    assert not shared.keys() & {2, 5}
    assert any(t != d for t, d in shared.items())


def test_a_greedy_draft_is_the_likeliest_common_token_at_each_place() -> None:
    (draft,) = propose(bench(), PROMPT, 5)
    text = list(PROMPT)
    for token in draft.tokens:
        assert token == int(law_after(text).argmax())
        text.append(token)
    assert len(draft) == 5


@pytest.mark.parametrize("tree", ["", "2,2,1", "[[0],[0,0],[1],[0,0,0],[0,1]]"])
def test_q_is_the_law_of_the_common_tokens(tree: str) -> None:
    params = SamplingParams(temperature=0.8)
    (draft,) = propose(bench(draft_tree=tree), PROMPT, 5, params)
    assert len(draft) == 5
    for parent in range(-1, 5):
        left = law_after(PROMPT + [draft.tokens[i] for i in draft.path(parent)], 0.8)
        for child in draft.children(parent):
            assert draft.q[child].probs_of(np.arange(VOCAB)) == pytest.approx(left / left.sum(), abs=1e-12)
            left[draft.tokens[child]] = 0.0


def test_accepted_tokens_and_settled_text_are_not_read_again() -> None:
    b = bench()
    seq = b.add(PROMPT)
    n = len(translated(PROMPT))
    assert n > len(PROMPT)
    (draft,) = b.propose(seq, budget=4)
    assert b.read == [(0, n)]
    b.commit(seq, *draft.tokens[:2], 0)
    (draft,) = b.propose(seq, budget=4)
    assert b.read == [(n + 2, n + 3)]
    b.commit(seq, 5)  # a token that the draft model reads as several
    b.propose(seq, budget=4)
    assert b.read == [(n + 3, n + 3 + len(translated([5])))]


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_after_any_history_a_draft_is_as_if_the_text_were_read_anew(data: st.DataObject) -> None:
    """Accepting, rejecting, steps without this drafter, preemption, shared prefixes."""
    b = bench(draft_tree=data.draw(st.sampled_from(["", "2,1,1", "1,1,2,1"])), n_blocks=80)
    live: dict[int, Sequence] = {0: b.add(PROMPT[: data.draw(st.integers(1, 7))])}
    for step in range(data.draw(st.integers(1, 8))):
        action = data.draw(st.sampled_from(["go", "go", "go", "skip", "preempt", "join"]))
        seq = data.draw(st.sampled_from([live[i] for i in sorted(live)]))
        if action == "join":
            live[step + 1] = b.add([*seq.tokens[: data.draw(st.integers(1, len(seq)))], 2], id=step + 1)
        elif action == "preempt":
            b.end(seq)
            b.blocks.adopt_prefix(seq)
        elif action == "skip":
            b.skip(seq, data.draw(st.integers(0, VOCAB - 1)))
        else:
            (draft,) = b.propose(seq, budget=data.draw(st.integers(1, 6)))
            for node in range(len(draft)):
                law = law_after(seq.tokens + [draft.tokens[i] for i in draft.path(node)[:-1]])
                nth = draft.children(draft.parents[node]).index(node)
                assert draft.tokens[node] == int(np.argsort(-law, kind="stable")[nth])
            path = draft.path(data.draw(st.integers(-1, len(draft) - 1)))
            b.commit(seq, *(draft.tokens[i] for i in path), data.draw(st.integers(0, VOCAB - 1)))
        reading = b.drafter.reading
        assert isinstance(reading, OtherTokens)
        reading._blocks.check_integrity(known.text for known in reading._texts.values())
    for seq in live.values():
        b.end(seq)
    assert reading._blocks.n_free == reading._blocks.n_blocks
    assert not reading._texts


def test_a_prefix_that_another_sequence_read_is_known() -> None:
    b = bench()
    first = b.add([*range(9), 1])
    b.propose(first)
    b.commit(first, 4)
    b.propose(first)
    same = len(translated([*range(9)])) // 4 * 4
    b.propose(b.add([*range(9), 7, 7], id=1))
    assert b.read == [(same, len(translated([*range(9), 7, 7])))]


def test_a_stretch_is_split_anew_as_it_grows_and_the_first_change_is_told() -> None:
    shared = OtherTokens(
        model(byte_level(["aa", "b", "x"])), model(byte_level(["a", "b", "aaa", "xb"]))
    ).shared  # the draft model writes pairs of a; it lacks a single one
    text = Sequence(0, [], 0, GREEDY, SpecParams(), 0)
    known = _Translation(text)
    tokens = [1, 2]
    assert known.follow(tokens, shared) == 0
    assert text.tokens == [1, 0]  # b, aa and an a that it cannot write
    tokens.append(0)
    assert known.follow(tokens, shared) == 2, "nothing is lost: the stretch only got longer"
    assert text.tokens == [1, 0, 0]
    tokens += [3, 1]
    assert known.follow(tokens, shared) == 3
    assert text.tokens == [1, 0, 0, 2, 1, 1]
    assert known.follow(tokens, shared) == 6
    tokens += [2] * LONGEST_STRETCH
    known.follow(tokens, shared)
    assert len(known.stretch) < LONGEST_STRETCH
    assert known.settled > 6


def model(tokenizer: Any) -> LoadedModel:
    return toy_target(toy_config(vocab=tokenizer.vocab_size, **SHAPE), tokenizer=tokenizer)


def permuted(seed: int) -> tuple[LoadedModel, LoadedModel]:
    """A target, and a draft model with the same weights whose vocabulary is in another order."""
    config = toy_config(vocab=VOCAB, **SHAPE)
    source = MemorySource(config, seed)
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(9)).tolist()
    spoken = words(VOCAB)
    first: Any = byte_level(spoken)
    second: Any = byte_level([spoken[i] for i in order])
    target = toy_target(config, seed, tokenizer=first)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        source.tensors[name] = source.tensors[name][order]
    decoder = Decoder.from_source(source, ReferenceOps(), torch.float64, "cpu")
    return target, replace(target, name="permuted", decoder=decoder, tokenizer=second)


@pytest.mark.parametrize("params", [greedy(24), SamplingParams(seed=3, max_tokens=24)], ids=["greedy", "coupled"])
def test_the_same_model_with_its_tokens_in_another_order_is_always_right(params: SamplingParams) -> None:
    """The mapping end to end: one wrong token, and something would be rejected."""
    target, drafter = permuted(1)
    method = "standard" if params.greedy else "coupled"
    two = TwoModels(drafter, target, method, ModelSettings("toy", use_heterogeneous_vocab=True))
    got = run_all(make_engine(target, two, method=method), [([5, 1, 2], params), ([7], params)])
    for answer, prompt in zip(got, ([5, 1, 2], [7]), strict=True):
        assert_same(answer, plain(target, prompt, params, **({} if params.greedy else {"method": method})))
        assert answer.stats.acceptance_rate == 1.0
        assert answer.stats.drafted > 15


@pytest.mark.parametrize("longer", ["target", "draft"])
@pytest.mark.parametrize("tree", ["", "2,2"])
def test_a_text_of_23_tokens_for_one_and_14_for_the_other(longer: str, tree: str) -> None:
    letters = [*"abcdefgh"]
    fine, coarse = [*letters, "x", "y"], [*reversed(letters), "xy"]
    mine, theirs = (fine, coarse) if longer == "target" else (coarse, fine)
    shown: Any = byte_level(mine)
    target = toy_target(toy_config(vocab=len(mine), **SHAPE), seed=1, tokenizer=shown)
    drafter = replace(model(byte_level(theirs)), name="other")
    pairs = [fine.index("x"), fine.index("y")] * 9 if longer == "target" else [coarse.index("xy")] * 9
    prompt = [*pairs[:10], *(mine.index(x) for x in "abcde"), *pairs[10:]]
    two = TwoModels(drafter, target, "standard", ModelSettings("toy", use_heterogeneous_vocab=True, draft_tree=tree))
    got = run_all(make_engine(target, two), [(prompt, greedy(30))])[0]
    assert_same(got, plain(target, prompt, greedy(30)))
    assert got.stats.drafted > 20
    text = OtherTokens(drafter, target)
    text.start(BlockManager(8, 8))
    read, _ = text.read(Sequence(0, prompt, len(prompt), GREEDY, SpecParams(), 0))
    assert (len(prompt), len(read)) == ((23, 14) if longer == "target" else (14, 23))


def test_too_few_blocks_cost_drafts_and_nothing_else() -> None:
    two = TwoModels(DRAFTER, TARGET, "standard", ModelSettings("toy", use_heterogeneous_vocab=True))
    prompts = [[2, 5, 8, 11, 14, 17, 20, 23, i] for i in range(4)]  # three times as long for the draft model
    engine = make_engine(TARGET, two, num_kv_blocks=14)
    got = run_all(engine, [(prompt, greedy(8)) for prompt in prompts])
    for answer, prompt in zip(got, prompts, strict=True):
        assert_same(answer, plain(TARGET, prompt, greedy(8)))
    assert any("no free KV blocks for the draft model" in answer.stats.no_draft for answer in got)
    assert sum(answer.stats.drafted for answer in got) > 0


def test_model_folders_with_different_tokenizers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the command line: refused as it is, identical output with the setting."""
    target, drafter = (write_tiny_model(tmp_path / name, seed) for seed, name in enumerate(("target", "draft")))
    file = drafter / "tokenizer.json"
    shown = json.loads(file.read_text())
    first, last = len(shown["added_tokens"]), max(shown["model"]["vocab"].values())
    for token, i in shown["model"]["vocab"].items():
        shown["model"]["vocab"][token] = first + last - i if i >= first else i
    file.write_text(json.dumps(shown))
    flags = ["--drafter", "model", "--draft-model", str(drafter), "--max-tokens", "12", "--limit", "1"]
    flags += ["--max-model-len", "256"]
    assert main(["check", str(target), *flags]) == 2
    assert "or any one with use_heterogeneous_vocab" in capsys.readouterr().err
    assert main(["check", str(target), *flags, "--use-heterogeneous-vocab"]) == 0
    assert "identical" in capsys.readouterr().out


def test_tokenizers_that_are_the_same_need_no_translation() -> None:
    target = model(byte_level(words(12)))
    two = TwoModels(target, target, "standard", ModelSettings("toy", use_heterogeneous_vocab=True))
    assert isinstance(two.reading, SameTokens)
    with pytest.raises(SettingError, match="or any one with use_heterogeneous_vocab"):
        TwoModels(DRAFTER, TARGET, "standard", ModelSettings("toy"))
