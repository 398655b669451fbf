"""Drafting from a predicted answer: it is followed, lost and found again."""

from __future__ import annotations

import pytest

from outrider.core.draft import Draft
from outrider.core.errors import SettingError
from outrider.core.params import SamplingParams, SpecParams
from outrider.core.types import Sequence, Span
from outrider.spec.drafts.prediction import Prediction, PredictionSettings
from tests.engine.drafters import Script
from tests.engine.harness import ToyTokenizer, assert_same, greedy, make_engine, plain, run_all, toy_target

PROMPT = [5, 6, 7]


def drafter(match: int = 2) -> Prediction:
    return Prediction(PredictionSettings(match))


def propose(drafter: Prediction, predicted: list[int], output: list[int], budget: int = 4, seq_id: int = 0) -> Draft:
    spec = SpecParams(prediction=tuple(predicted))
    seq = Sequence(seq_id, [1, 1, *output], 2, SamplingParams(), spec, seed=0)
    (draft,) = drafter.propose([Span(seq, len(seq) - 1, 1, budget=budget)])
    return draft


def steps(predicted: list[int], output: list[int], match: int = 2, budget: int = 4) -> list[int]:
    """How many draft tokens are right at each step of an answer that comes out as ``output``."""
    follower, done, kept = drafter(match), 0, []
    while done < len(output):
        draft = propose(follower, predicted, output[:done], budget).tokens
        right = 0
        while right < len(draft) and done + right < len(output) and draft[right] == output[done + right]:
            right += 1
        kept.append(right if draft else -1)
        done += right + 1
    return kept


def test_a_right_prediction_is_drafted_from_the_first_token_to_the_last() -> None:
    text = list(range(10, 30))
    assert steps(text, text) == [4, 4, 4, 4]
    assert propose(drafter(), text, text[:18]) == Draft.chain([28, 29])
    assert propose(drafter(), text, text).reason == "the prediction has come to its end"
    assert propose(drafter(), text, [], budget=2).tokens == (10, 11)


@pytest.mark.parametrize(
    ("answer", "kept"),
    [
        ([10, 11, 99, 13, 14, 15, 16, 17], [2, -1, -1, 3]),  # a token was replaced: two that agree, and on it goes
        ([10, 11, 98, 99, 12, 13, 14, 15, 16], [2, -1, -1, -1, 3]),  # two were inserted
        ([10, 11, 16, 17, 18, 19], [2, -1, 2]),  # five were left out
        ([97, 98, 99, 10, 11, 12, 13], [0, -1, -1, -1, -1, 2]),  # a preface
    ],
)
def test_after_an_edit_the_place_is_found_again(answer: list[int], kept: list[int]) -> None:
    assert steps(list(range(10, 20)), answer) == kept


def test_of_two_places_the_one_that_agrees_more_then_the_next_one_is_taken() -> None:
    predicted = [1, 2, 3, 50, 9, 2, 3, 60, 1, 2, 3, 70]
    assert propose(drafter(), predicted, [8, 9, 2, 3], 1).tokens == (60,)
    assert propose(drafter(), predicted, [8, 2, 3], 1).tokens == (50,)
    follower = drafter()
    propose(follower, predicted, [1, 2, 3, 50])
    assert propose(follower, predicted, [1, 2, 3, 50, 7, 2, 3], 1).tokens == (60,)


def test_a_prediction_that_keeps_misleading_is_believed_less_and_less() -> None:
    """The answer holds bits of the prediction that never go on as predicted: drafts become rare, then stop."""
    predicted = [1, 2, 10, 1, 2, 11, 1, 2, 12]
    answer = [1, 2, 30] * 10
    kept = steps(predicted, answer)
    assert sum(right >= 0 for right in kept) <= 3
    assert steps(predicted, [40 + i for i in range(20)])[1:] == [-1] * 19


def test_a_follower_that_begins_in_the_middle_equals_one_that_was_there_all_the_time() -> None:
    """After preemption all is computed anew, by the tokens alone, as long as the place is not lost."""
    predicted, output = list(range(10, 40)), list(range(10, 25))
    always = drafter()
    for n in range(len(output)):
        propose(always, predicted, output[:n])
    assert propose(always, predicted, output) == propose(drafter(), predicted, output)
    always.release(0)
    always.release(0)
    assert not always._followers
    assert propose(drafter(), [], output).reason == "no prediction was given"


def test_the_answer_is_the_same_whatever_is_predicted() -> None:
    """The true answer as a prediction saves steps; another one, or none, changes nothing."""
    target = toy_target(seed=1)
    want = plain(target, PROMPT, greedy(20))
    for method in ("standard", "block", "coupled"):
        for predicted in (want.token_ids, want.token_ids[3:], (9, 9, 9), ()):
            engine = make_engine(target, drafter(), method=method)
            got = run_all(engine, [(PROMPT, greedy(20), SpecParams(prediction=predicted))])[0]
            assert_same(got, want)
            if predicted == want.token_ids:
                assert got.stats.steps == 4
                assert got.stats.acceptance_rate == 1.0
            elif not predicted:
                assert got.stats.drafted == 0


def test_a_text_is_read_by_the_targets_tokenizer() -> None:
    class Letters(ToyTokenizer):
        def encode(self, text: str, **_: object) -> list[int]:
            return [self.pieces.index(letter.encode()) for letter in text]

    target = toy_target(seed=1, tokenizer=Letters("abcdefghijklmnopqrstuvwxyz012345"))
    want = plain(target, PROMPT, greedy(20))
    got = run_all(make_engine(target, drafter()), [(PROMPT, greedy(20), SpecParams(prediction=want.text))])[0]
    assert_same(got, want)
    assert got.stats.acceptance_rate == 1.0


def test_a_prediction_goes_to_the_drafter_that_uses_it() -> None:
    target = toy_target(seed=1)
    engine = make_engine(target, {"script": Script(1), "follows": drafter()})
    jobs = [(PROMPT, greedy(4), SpecParams(prediction=p)) for p in ((1, 2), ())]
    assert [got.drafter for got in run_all(engine, jobs)] == ["follows", "script"]
    with pytest.raises(SettingError, match="prediction is given; drafter script makes no use of it"):
        engine.add_request(PROMPT, greedy(4), SpecParams(drafter="script", prediction=(1, 2)))
    run_all(engine, [(PROMPT, greedy(4), SpecParams(False, "script", prediction=(1, 2)))])


@pytest.mark.parametrize(
    ("predicted", "said"),
    [((1, 32), "prediction holds token id 32; allowed is 0 to 31"), ("abc", "loaded without a tokenizer")],
)
def test_what_the_model_cannot_say_is_refused(predicted: str | tuple[int, ...], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        make_engine(toy_target(), drafter()).add_request(PROMPT, greedy(4), SpecParams(prediction=predicted))


@pytest.mark.parametrize("predicted", [(-1,), (1.5,), 7, (True,), ["a"]])
def test_what_is_no_text_and_no_token_ids_is_refused(predicted: object) -> None:
    with pytest.raises(SettingError, match=r"prediction is .*; allowed is a text or token ids"):
        SpecParams(prediction=predicted)  # type: ignore[arg-type]
