from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from jacobi_forcing import DecodeConfig
from jacobi_forcing.errors import ConfigError
from jacobi_forcing.recipe import find_recipe, load_recipe, round_prompts
from tiny_recipe import EVALUATION, RECIPE, write

SHIPPED = tuple(path.stem for path in (Path(__file__).parents[1] / "recipes").glob("*.yaml"))


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working folder with two recipes."""
    folder = tmp_path_factory.mktemp("place")
    write(folder / "recipe.yaml", RECIPE)
    write(folder / "measured.yaml", {**RECIPE, "evaluation": EVALUATION, "output": "measured"})
    with contextlib.chdir(folder):
        yield folder


def test_overrides_reach_mappings_lists_and_what_was_not_there() -> None:
    recipe = load_recipe(
        "measured.yaml",
        [
            "rounds.1.learning_rate=1e-6",
            "rounds[0].steps=9",
            "model.dtype=bfloat16",
            "evaluation.decode=[{block_size: 2}]",
        ],
        "elsewhere",
    )
    assert recipe.rounds[1].learning_rate == 1e-6
    assert recipe.rounds[0].steps == 9
    assert recipe.model.dtype == "bfloat16"
    assert recipe.evaluation is not None and recipe.evaluation.decode == (DecodeConfig(block_size=2),)
    assert recipe.output == "elsewhere"
    assert load_recipe("measured.yaml", ["evaluation=null"]).evaluation is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rounds.0.learning_rte=1", r"Unknown key 'rounds\[0\].learning_rte'.*did you mean 'learning_rate'"),
        ("rounds.5.steps=1", "leads to no entry.*from 0 to 1"),
        ("rounds.x.steps=1", "leads to no entry"),
        ("seed.deeper=1", "'seed' has a wrong value"),
        ("steps", "cannot be read.*key.path=value"),
        ("rounds.0.block_size=0", "too small"),
        ("rounds=[]", "'rounds' is empty"),
        ("rounds.0.warmup_ratio=1.5", "warmup_ratio"),
        ("rounds.1.prompts_offset=8", "Round 2 has no prompts"),
        ("evaluation.prompts.answer_field=null", "needs reference answers"),
        ("model.name=[", "not YAML"),
    ],
)
def test_wrong_overrides_are_refused_before_anything_runs(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe("measured.yaml", [override])


def test_what_the_evaluation_does_not_say_about_prompts_comes_from_the_recipes_own() -> None:
    recipe = load_recipe("measured.yaml", ["prompts.source=other.jsonl"])
    assert recipe.evaluation is not None
    prompts = recipe.evaluation.prompts
    assert (prompts.source, prompts.field, prompts.offset, prompts.limit) == ("other.jsonl", "question", 8, 3)


def test_measuring_on_what_was_trained_on_is_said(caplog: pytest.LogCaptureFixture) -> None:
    load_recipe("measured.yaml")
    assert not caplog.records
    load_recipe("measured.yaml", ["evaluation.prompts.offset=7"])
    assert "trained on too" in caplog.text


def test_a_round_takes_a_slice_of_the_recipes_slice() -> None:
    recipe = load_recipe(
        "recipe.yaml",
        ["prompts.offset=100", "prompts.limit=50", "rounds.1.prompts_limit=20", "rounds.0.prompts_limit=60"],
    )
    first, second = (round_prompts(recipe, index) for index in (0, 1))
    assert (first.offset, first.limit) == (100, 50)
    assert (second.offset, second.limit) == (105, 20)


@pytest.mark.parametrize("name", SHIPPED)
def test_the_shipped_recipes_are_found_from_anywhere_and_are_right(name: str, tmp_path: Path) -> None:
    with contextlib.chdir(tmp_path):
        assert load_recipe(name) == load_recipe(f"recipes/{name}.yaml") == load_recipe(find_recipe(name))


@pytest.mark.parametrize("name", ["qwen2.5-coder-7b", "qwen2.5-math-7b"])
def test_the_papers_recipes_have_the_papers_figures(name: str) -> None:
    # Section 4.1 and 3.1 of the paper.
    rounds = load_recipe(name).rounds
    assert [(r.block_size, r.window_size, r.steps) for r in rounds] == [(16, 16, 10_000), (32, 8, 10_000)]
    for settings in rounds:
        assert (settings.learning_rate, settings.batch_size, settings.max_length) == (1e-6, 4, 2048)


def test_a_missing_recipe_names_those_that_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no recipe 'quikstart'.*quickstart"):
        load_recipe("quikstart")


@pytest.mark.parametrize(
    ("text", "message"), [("a: [", "not valid YAML"), ("- 1", "holds no recipe"), ("", "holds no recipe")]
)
def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_recipe(tmp_path / "r.yaml")
