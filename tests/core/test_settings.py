"""One definition of a setting serves Python, JSON and the command line."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import Any

import pytest

from outrider.core.config import EngineConfig, SpecConfig
from outrider.core.errors import SettingError, nearest
from outrider.core.settings import add_flags, check_settings, from_mapping, given_flags, setting


@dataclass(frozen=True)
class Toy:
    """A settings class with one field of each kind."""

    name: str = setting(help="which one", positional=True)
    block_size: int = setting(16, "tokens in a block", low=1, high=64)
    ratio: float = setting(0.5, "a share, 50% by default", low=0)
    kind: str = setting("fast", "how", choices=("fast", "exact"))
    limit: int | None = setting(None, "at most", low=1)
    caching: bool = setting(True, "whether to keep")

    def __post_init__(self) -> None:
        check_settings(self)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"block_size": 0}, "block_size is 0; allowed is a value from 1 to 64"),
        ({"block_size": 65}, "block_size is 65; allowed is a value from 1 to 64"),
        ({"block_size": 1.5}, "block_size is 1.5; allowed is a whole number"),
        ({"block_size": True}, "block_size is True; allowed is a whole number"),
        ({"block_size": None}, "block_size is None; allowed is a whole number"),
        ({"ratio": -0.1}, "ratio is -0.1; allowed is a value >= 0"),
        ({"ratio": float("nan")}, "ratio is nan; allowed is a value >= 0"),
        ({"ratio": float("inf")}, "ratio is inf; allowed is a finite number"),
        ({"ratio": "x"}, "ratio is 'x'; allowed is a number"),
        ({"kind": "fats"}, "kind is 'fats'; allowed is one of fast, exact (did you mean 'fast'?)"),
        ({"limit": 0}, "limit is 0; allowed is a value >= 1"),
        ({"caching": 1}, "caching is 1; allowed is true or false"),
        ({"name": 3}, "name is 3; allowed is a text"),
    ],
)
def test_values_outside_the_limits_are_refused(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError) as caught:
        Toy(**{"name": "a", **bad})
    assert str(caught.value) == message


def test_the_edges_and_whole_numbers_for_numbers_are_fine() -> None:
    toy = Toy("a", block_size=64, ratio=1, limit=None)
    assert (toy.block_size, toy.ratio, toy.limit) == (64, 1, None)


def test_json_becomes_settings_and_an_unknown_key_names_the_nearest() -> None:
    assert from_mapping(Toy, json.loads('{"name": "a", "block_size": 8}'), "--toy") == Toy("a", block_size=8)
    with pytest.raises(
        SettingError, match=r"^--toy has no setting 'blok_size' \(did you mean 'block_size'\?\); known are "
    ):
        from_mapping(Toy, {"name": "a", "blok_size": 8}, "--toy")
    with pytest.raises(SettingError, match=r"^--toy has no setting 'zzz'; known are name, block_size"):
        from_mapping(Toy, {"name": "a", "zzz": 8}, "--toy")


def parse(*words: str, cls: type = Toy) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_flags(parser, cls, skip=("options",))
    return parser.parse_args(list(words))


def test_flags_become_settings_and_flags_not_given_stay_out() -> None:
    assert given_flags(Toy, parse("a")) == {"name": "a"}
    words = ["a", "--block-size", "8", "--ratio", "0.25", "--kind", "exact", "--limit", "3", "--no-caching"]
    given = given_flags(Toy, parse(*words))
    assert given == {"name": "a", "block_size": 8, "ratio": 0.25, "kind": "exact", "limit": 3, "caching": False}
    assert Toy(**given) == Toy("a", 8, 0.25, "exact", 3, False)


@pytest.mark.parametrize("words", [("a", "--block-size", "x"), ("a", "--kind", "slow"), ("a", "--blok", "3"), ()])
def test_bad_flags_are_refused(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(*words)
    assert "error:" in capsys.readouterr().err


def test_help_explains_every_flag_with_its_default() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, Toy)
    text = " ".join(parser.format_help().split())
    for part in (
        "which one",
        "tokens in a block (default 16)",
        "50% by default (default 0.5)",
        "--no-caching",
        "{fast,exact}",
    ):
        assert part in text
    assert "default None" not in text


def test_the_engines_settings_are_flags_and_are_checked() -> None:
    given = given_flags(
        EngineConfig, parse("m.gguf", "--max-num-seqs", "2", "--quantization", "int8", cls=EngineConfig)
    )
    config = EngineConfig(**given)
    assert (config.model, config.max_num_seqs, config.quantization) == ("m.gguf", 2, "int8")
    with pytest.raises(SettingError, match=r"^dtype is 'float8'; allowed is one of auto, "):
        EngineConfig("m", dtype="float8")
    with pytest.raises(SettingError, match=r"^num_speculative_tokens is -1; allowed is a value from 0 to 256"):
        SpecConfig(num_speculative_tokens=-1)
    with pytest.raises(SettingError, match=r"^rejection_sample_method is 'typical'; allowed is one of standard, block"):
        SpecConfig(rejection_sample_method="typical")


def test_nearest_hints_only_at_what_is_near() -> None:
    assert nearest("standart", ("standard", "block")) == " (did you mean 'standard'?)"
    assert nearest("zzz", ("standard", "block")) == ""
