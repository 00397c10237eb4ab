"""Settings: right ones survive every round trip, wrong ones are refused with a line that helps."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from jacobi_forcing.config import (
    CollectConfig,
    DecodeConfig,
    EvaluationConfig,
    ModelConfig,
    PromptsConfig,
    RecipeConfig,
    RoundConfig,
)
from jacobi_forcing.errors import ConfigError
from jacobi_forcing.schema import Config

ALL = (DecodeConfig, ModelConfig, PromptsConfig, CollectConfig, RoundConfig, EvaluationConfig, RecipeConfig)
ROUND: dict[str, Any] = {"block_size": 16, "window_size": 8, "steps": 10}
RECIPE: dict[str, Any] = {
    "model": {"name": "some/model"},
    "prompts": {"source": "prompts.jsonl", "limit": 64},
    "rounds": [ROUND, ROUND | {"block_size": 32, "learning_rate": 1e-5}],
    "evaluation": {
        "prompts": {"source": "other.jsonl"},
        "decode": [{"decoder": "jacobi"}, {"decoder": "window", "block_size": 64}],
    },
}


def refusal(kind: type[Config], values: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        kind.from_dict(values)
    message = str(caught.value)
    assert "\n" not in message
    return message


# Right settings --------------------------------------------------------------------------------------------------


def test_nested_settings_are_built_from_plain_values() -> None:
    recipe = RecipeConfig.from_dict(RECIPE)
    assert recipe.model == ModelConfig("some/model")
    assert recipe.rounds[1] == RoundConfig(block_size=32, window_size=8, steps=10, learning_rate=1e-5)
    assert recipe.evaluation is not None
    assert recipe.evaluation.decode == (DecodeConfig("jacobi"), DecodeConfig("window", 64))
    assert recipe.collect == CollectConfig()


def test_a_round_trip_through_a_dict_changes_nothing() -> None:
    recipe = RecipeConfig.from_dict(RECIPE)
    assert RecipeConfig.from_dict(recipe.to_dict()) == recipe
    plain = recipe.to_dict()
    assert type(plain["rounds"]) is list
    assert type(plain["rounds"][0]) is dict


def test_a_round_trip_through_yaml_changes_nothing(tmp_path: Path) -> None:
    recipe = RecipeConfig.from_dict(RECIPE)
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe.to_yaml(), encoding="utf-8")
    assert RecipeConfig.load_yaml(path) == recipe


def test_built_settings_may_stand_among_plain_ones() -> None:
    recipe = RecipeConfig.from_dict(RECIPE | {"rounds": (RoundConfig(**ROUND),), "model": ModelConfig("x")})
    assert recipe.rounds == (RoundConfig(**ROUND),)
    assert recipe.model.name == "x"


def test_null_stands_for_no_value() -> None:
    assert PromptsConfig.from_dict({"source": "x.jsonl", "limit": None}).limit is None
    assert RecipeConfig.from_dict(RECIPE | {"evaluation": None}).evaluation is None


@pytest.mark.parametrize("written", ["1e-6", "1E-6", "0.000001"])
def test_yamls_text_for_small_numbers_is_read_as_a_number(tmp_path: Path, written: str) -> None:
    path = tmp_path / "round.yaml"
    path.write_text(f"block_size: 16\nwindow_size: 16\nsteps: 10\nlearning_rate: {written}\n", encoding="utf-8")
    assert RoundConfig.load_yaml(path).learning_rate == 1e-6


def test_whole_numbers_serve_as_numbers() -> None:
    assert RoundConfig.from_dict(ROUND | {"ar_weight": 10}).ar_weight == 10


def test_settings_cannot_be_changed_and_may_be_replaced() -> None:
    config = DecodeConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.block_size = 3  # type: ignore[misc]  # wrong on purpose
    assert dataclasses.replace(config, block_size=3).block_size == 3
    with pytest.raises(ConfigError, match="block_size"):
        dataclasses.replace(config, block_size=0)


def test_equal_settings_are_equal_keys() -> None:
    assert len({DecodeConfig(), DecodeConfig(), DecodeConfig("ar")}) == 2


@pytest.mark.parametrize("kind", ALL)
def test_every_setting_says_what_it_is(kind: type[Config]) -> None:
    for field in dataclasses.fields(kind):
        assert field.metadata["help"], field.name


# Wrong settings --------------------------------------------------------------------------------------------------


def test_an_unknown_key_names_the_nearest_known_one() -> None:
    message = refusal(DecodeConfig, {"blocksize": 16})
    assert "Unknown key 'blocksize'" in message
    assert "did you mean 'block_size'?" in message


def test_an_unknown_key_like_no_other_lists_the_known_ones() -> None:
    message = refusal(DecodeConfig, {"qqq": 16})
    assert "Unknown key 'qqq'" in message
    for field in dataclasses.fields(DecodeConfig):
        assert field.name in message


def test_a_wrong_key_deep_inside_is_named_with_its_place() -> None:
    rounds = [ROUND, ROUND | {"step": 10}]
    assert "'rounds[1].step'" in refusal(RecipeConfig, RECIPE | {"rounds": rounds})
    assert "'model.nam'" in refusal(RecipeConfig, RECIPE | {"model": {"nam": "x"}})


def test_a_wrong_value_deep_inside_is_named_with_its_place() -> None:
    message = refusal(RecipeConfig, RECIPE | {"rounds": [ROUND, ROUND | {"steps": 0}]})
    assert "rounds[1]" in message
    assert "'steps' is too small; seen: 0; expected: at least 1" in message


def test_a_missing_key_says_what_it_holds() -> None:
    message = refusal(RoundConfig, {"steps": 16, "window_size": 8})
    assert "'block_size' is missing" in message
    assert "tokens per block" in message
    assert "'model.name' is missing" in refusal(RecipeConfig, RECIPE | {"model": {}})


@pytest.mark.parametrize("block_size", [0, -1])
def test_a_block_of_nothing_is_refused_with_the_range(block_size: int) -> None:
    with pytest.raises(ConfigError, match=f"'block_size' is too small; seen: {block_size}; expected: at least 1"):
        DecodeConfig(block_size=block_size)


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        (DecodeConfig, {"block_size": 2.5}, "a whole number"),
        (DecodeConfig, {"block_size": "16"}, "a whole number"),
        (DecodeConfig, {"block_size": True}, "a whole number"),
        (DecodeConfig, {"block_size": None}, "a whole number"),
        (DecodeConfig, {"decoder": "windows"}, "one of ar, jacobi, window"),
        (DecodeConfig, {"decoder": ["ar"]}, "one of ar, jacobi, window"),
        (RoundConfig, ROUND | {"learning_rate": "fast"}, "a number"),
        (RoundConfig, ROUND | {"learning_rate": 0}, "more than 0"),
        (RoundConfig, ROUND | {"ar_weight": -1}, "at least 0"),
        (ModelConfig, {"name": 3}, "text"),
        (ModelConfig, {"name": "x", "trust_remote_code": "yes"}, "true or false"),
        (PromptsConfig, {"source": "x", "limit": 0}, "at least 1"),
        (PromptsConfig, {"source": "x", "limit": "all"}, "a whole number or null"),
        (RecipeConfig, RECIPE | {"rounds": 3}, "a list of"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused(kind: type[Config], values: dict[str, Any], expected: str) -> None:
    assert f"expected: {expected}" in refusal(kind, values)


@pytest.mark.parametrize("values", [3, "text", [1, 2], [["block_size", 16]]])
def test_settings_that_are_no_mapping_are_refused(values: Any) -> None:
    assert "is not a mapping" in refusal(DecodeConfig, values)
    assert "rounds[0]" in refusal(RecipeConfig, RECIPE | {"rounds": [values]})


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Cannot read '.*nowhere\.yaml'; seen: No such file"):
        DecodeConfig.load_yaml(tmp_path / "nowhere.yaml")


def test_a_file_that_is_not_yaml_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text("block_size: [16\nother: }", encoding="utf-8")
    with pytest.raises(ConfigError, match="is not valid YAML") as caught:
        DecodeConfig.load_yaml(path)
    assert "line 2" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_empty_file_means_no_settings(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("# nothing\n", encoding="utf-8")
    assert DecodeConfig.load_yaml(path) == DecodeConfig()
    with pytest.raises(ConfigError, match="'model' is missing"):
        RecipeConfig.load_yaml(path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rounds": []}, "'rounds' is empty"),
        ({"rounds": [{"block_size": 4, "window_size": 2, "steps": 1, "learning_rate": float("nan")}]}, "finite"),
        ({"rounds": ["x"]}, r"'rounds\[0\]' is not a mapping"),
    ],
)
def test_empty_lists_numbers_that_are_none_and_non_mappings_are_refused(changes, said):
    recipe = {"model": {"name": "x"}, "prompts": {"source": "a.jsonl"}, "rounds": [], **changes}
    with pytest.raises(ConfigError, match=said):
        RecipeConfig.from_dict(recipe)
