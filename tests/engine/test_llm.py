"""The offline API on a small model folder with a real tokenizer."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from outrider import LLM, OutriderError, SamplingParams, SettingError, SpecParams
from outrider.engine import engine as engine_module
from tests.tiny import write_tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), kv_cache_mib=16)


def test_generate_takes_texts_and_token_ids_and_keeps_their_order(llm: LLM) -> None:
    ids = llm.encode("a draft that is right")
    outputs = llm.generate(["a draft that is right", ids, "Numbers: 1 2 3"], GREEDY)
    assert [list(o.prompt_ids) for o in outputs] == [ids, ids, llm.encode("Numbers: 1 2 3")]
    assert outputs[0].token_ids == outputs[1].token_ids != outputs[2].token_ids
    assert outputs[0].token_ids == llm.generate(ids, GREEDY)[0].token_ids
    assert outputs[0].usage == {"prompt_tokens": len(ids), "completion_tokens": 24, "total_tokens": len(ids) + 24}


def test_params_may_differ_by_prompt(llm: LLM) -> None:
    short = dataclasses.replace(GREEDY, max_tokens=3)
    assert [len(o.token_ids) for o in llm.generate(["one", "two"], [short, GREEDY])] == [3, 24]
    with pytest.raises(SettingError, match="sampling_params has 1 entries"):
        llm.generate(["one", "two"], [short])


def test_the_text_is_what_the_tokenizer_says(llm: LLM) -> None:
    output = llm.generate("Numbers: ", GREEDY)[0]
    tokenizer = llm.target.tokenizer
    assert tokenizer is not None
    kept = [token for token in output.token_ids if token not in llm.target.config.eos_ids]
    assert output.text == tokenizer.decode(kept)


def test_the_stream_is_the_answer(llm: LLM) -> None:
    whole = llm.generate("the target verifies", GREEDY)[0]
    deltas = list(llm.stream("the target verifies", GREEDY))
    assert "".join(d.text for d in deltas) == whole.text
    assert tuple(t for d in deltas for t in d.token_ids) == whole.token_ids
    assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason is whole.completions[0].finish_reason


def test_closing_a_stream_frees_its_blocks(llm: LLM) -> None:
    free = llm.engine.blocks.n_free
    stream = llm.stream("the target verifies", GREEDY)
    next(stream)
    assert llm.engine.blocks.n_free < free
    stream.close()
    assert llm.engine.blocks.n_free == free
    assert not llm.engine.has_work


def test_two_streams_at_once_lose_nothing(llm: LLM) -> None:
    """Each stream steps the engine for both: what a step gave the other one must not be lost."""
    prompts = ("the target verifies", "Numbers: ")
    alone = [llm.generate(prompt, GREEDY)[0].token_ids for prompt in prompts]
    streams = [llm.stream(prompt, GREEDY) for prompt in prompts]
    seen: list[list[int]] = [[], []]
    for _ in range(24):
        for tokens, stream in zip(seen, streams, strict=True):
            tokens.extend(token for delta in [next(stream, None)] if delta for token in delta.token_ids)
    assert [tuple(tokens) for tokens in seen] == alone


@pytest.mark.parametrize("place", ["copy_blocks", "forward", "commit_step", "_record"])
def test_an_interrupt_in_the_middle_of_a_step_loses_nothing(llm: LLM, place: str) -> None:
    """Whatever was under way goes on as if nothing had been; what the interrupted caller asked for is cleaned up."""
    prompt, params = "the target verifies", SamplingParams(temperature=1, seed=3, n=3, max_tokens=24)
    expected = [c.token_ids for c in llm.generate(prompt, params)[0].completions]
    free = llm.engine.blocks.n_free
    stream = llm.stream(prompt, params)
    deltas = [next(stream)]

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for _ in range(3):
        with pytest.MonkeyPatch.context() as patch:
            owner = {"commit_step": engine_module, "_record": llm.engine}.get(place, llm.engine.runner)
            patch.setattr(owner, place, interrupt)
            if place == "copy_blocks":  # only happens when there is something to copy
                patch.setattr(llm.engine.runner, "forward", interrupt)
            with pytest.raises(KeyboardInterrupt):
                llm.generate("Numbers: ", dataclasses.replace(GREEDY, max_tokens=1))
        llm.engine.check_integrity()
    deltas += stream
    for index in range(3):
        assert tuple(t for d in deltas if d.index == index for t in d.token_ids) == expected[index]
    assert not llm.engine.has_work
    assert llm.engine.blocks.n_free == free


def test_chat_uses_the_template_and_takes_one_conversation_or_many(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Numbers"}]
    one = llm.chat(messages, GREEDY)
    many = llm.chat([messages, [{"role": "user", "content": "other"}]], GREEDY)
    assert one[0].token_ids == many[0].token_ids
    assert list(one[0].prompt_ids) == llm.encode("<|im_start|>user\nNumbers<|im_end|>\n<|im_start|>assistant\n")
    assert "".join(d.text for d in llm.stream_chat(messages, GREEDY)) == one[0].text


def test_speculation_can_be_switched_off_for_one_request(llm: LLM) -> None:
    on, off = (
        llm.generate("a draft that is a draft that is", GREEDY, SpecParams(enabled=enabled))[0]
        for enabled in (True, False)
    )
    assert off.stats.drafted == 0 < on.stats.drafted
    assert on.token_ids == off.token_ids


def test_prompts_that_share_a_prefix_share_its_blocks(folder: Path) -> None:
    llm = LLM(str(folder), kv_cache_mib=16, block_size=4)
    llm.generate("a draft that is right costs one pass", GREEDY)
    assert llm.generate("a draft that is right costs nothing", GREEDY)[0].cached_tokens > 0


@pytest.mark.parametrize("n", [1, 3])
def test_several_answers(llm: LLM, n: int) -> None:
    output = llm.generate("Numbers: ", SamplingParams(n=n, seed=7, max_tokens=12))[0]
    assert [c.index for c in output.completions] == list(range(n))
    assert output.usage["completion_tokens"] == sum(len(c.token_ids) for c in output.completions)
    assert len({c.token_ids for c in output.completions}) == n


def test_two_models(folder: Path, llm: LLM) -> None:
    same = LLM(str(folder), {"method": "draft_model", "model": str(folder)}, kv_cache_mib=16)
    output = same.generate("Numbers: ", GREEDY)[0]
    assert output.token_ids == llm.generate("Numbers: ", GREEDY)[0].token_ids
    assert output.stats.acceptance_rate == 1.0


@pytest.mark.parametrize(
    ("prompt", "params", "said"),
    [
        ([[]], GREEDY, "the prompt is empty"),
        ({"prompt": "x"}, GREEDY, "allowed is a text, token ids, or a list of either"),
        (None, GREEDY, "the prompt is None"),
        ([[1.5, 2]], GREEDY, "allowed is a text or token ids"),
        ([[True, 2]], GREEDY, "allowed is a text or token ids"),
        ("x", dataclasses.replace(GREEDY, max_tokens=999, min_tokens=300), "min_tokens is 300"),
        ("", GREEDY, "the prompt is empty"),
        ([5] * 256, GREEDY, "the prompt has 256 tokens; allowed is at most 255"),
        ([5, 100_000], GREEDY, "token id 100000; allowed is 0 to "),
        ([5, 310], GREEDY, "token id 310; allowed is 0 to "),  # padding of the vocabulary
        ([-1], GREEDY, "token id -1"),
        ("x", dataclasses.replace(GREEDY, logit_bias={99_999: 1.0}), "logit_bias names token 99999"),
        ("x", dataclasses.replace(GREEDY, stop_token_ids=(99_999,)), "stop_token_ids names token 99999"),
    ],
)
def test_a_bad_request_is_refused_in_one_sentence(
    llm: LLM, prompt: str | list[int], params: SamplingParams, said: str
) -> None:
    with pytest.raises(SettingError, match=said):
        llm.generate(prompt, params)
    assert not llm.engine.has_work


def test_a_bad_request_among_good_ones_leaves_nothing_behind(llm: LLM) -> None:
    free = llm.engine.blocks.n_free
    with pytest.raises(SettingError):
        llm.generate(["good", ""], GREEDY)
    assert not llm.engine.has_work
    assert llm.engine.blocks.n_free == free


def test_an_unknown_drafter_of_a_request_is_refused(llm: LLM) -> None:
    with pytest.raises(SettingError, match="drafter is 'nrgam'; loaded in this engine are ngram"):
        llm.generate("x", GREEDY, SpecParams(drafter="nrgam"))


@pytest.mark.parametrize(
    ("drafter", "settings", "said"),
    [
        ("ngramm", {}, "method is 'ngramm'.*did you mean 'ngram'"),
        ({"method": "ngram", "promt_lookup_max": 3}, {}, "no setting 'promt_lookup_max'.*prompt_lookup_max"),
        ({"method": "model"}, {}, "drafter model needs the setting 'model'"),
        ("ngram", {"blok_size": 8}, "LLM has no setting 'blok_size'.*block_size"),
        ("ngram", {"drafer": "none"}, "no setting 'drafer'.*did you mean 'drafter'"),
        ("ngram", {"dtype": "float31"}, "dtype is 'float31'"),
        ("ngram", {"block_size": 0}, "block_size is 0"),
        ("ngram", {"device": "tpu"}, "device is 'tpu'"),
    ],
)
def test_a_bad_setting_is_refused_in_one_sentence(folder: Path, drafter: object, settings: dict, said: str) -> None:
    with pytest.raises(SettingError, match=said):
        LLM(str(folder), drafter, **settings)


def test_a_draft_model_with_another_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    other = write_tiny_model(tmp_path / "other")
    text = (other / "tokenizer.json").read_text()
    swapped = text.replace('"0":', '"\u0000":').replace('"1":', '"0":').replace('"\u0000":', '"1":')
    (other / "tokenizer.json").write_text(swapped)
    with pytest.raises(SettingError, match=r"another tokenizer than .*: token \d+ is '0' for the target and '1'"):
        LLM(str(folder), {"method": "model", "model": str(other)}, kv_cache_mib=16)


def test_a_processor_that_fails_ends_its_request_with_its_words(llm: LLM) -> None:
    def broken(prompt: object, output: object, logits: object) -> object:
        raise RuntimeError("no such colour")

    with pytest.raises(OutriderError, match="no such colour"):
        llm.generate("x", dataclasses.replace(GREEDY, processors=(broken,)))
    assert len(llm.generate("x", GREEDY)[0].token_ids) == 24
