"""The recipes for SmolLM2: what the table of their results takes for granted about them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from jacobi_forcing.config import RecipeConfig
from jacobi_forcing.recipe import load_recipe
from jacobi_forcing.recipe.planning import estimate_recipe
from tiny_folder import save_prompts, save_tiny

DOMAINS = ("orders", "gsm8k")
NEW_TOKENS = {"orders": 96, "gsm8k": 160}
SHAPE: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "tie_word_embeddings": True,
}


def recipes(domain: str) -> dict[str, RecipeConfig]:
    return {kind: load_recipe(f"smollm2-{domain}{kind}") for kind in ("", "-cllm", "-adapter")}


@pytest.mark.parametrize("domain", DOMAINS)
def test_the_baseline_differs_from_the_papers_mode_in_its_three_traits_and_in_nothing_else(domain: str) -> None:
    found = recipes(domain)
    full, cllm = found[""].to_dict(), found["-cllm"].to_dict()
    traits = {"mask": "clean_context", "schedule": "random", "loss_positions": "from_mismatch"}
    assert cllm["rounds"] == [{**settings, **traits, "schedule_phase": "fixed"} for settings in full["rounds"]]
    assert {name for name in full if full[name] != cllm[name]} == {"rounds", "output"}


@pytest.mark.parametrize("domain", DOMAINS)
def test_the_papers_mode_has_the_papers_two_rounds_and_new_prompts_in_each(domain: str) -> None:
    first, second = recipes(domain)[""].rounds
    assert [(r.block_size, r.window_size) for r in (first, second)] == [(16, 16), (32, 8)]
    assert second.prompts_offset == first.prompts_limit
    assert first.train_tokens and second.train_tokens and first.steps is None


@pytest.mark.parametrize("domain", DOMAINS)
def test_all_of_a_domain_are_measured_alike_on_prompts_that_none_of_them_has_seen(domain: str) -> None:
    found = list(recipes(domain).values())
    for recipe in found:
        assert recipe.evaluation is not None
        assert recipe.evaluation.max_new_tokens == recipe.collect.max_new_tokens == NEW_TOKENS[domain]
        assert recipe.evaluation.prompts == found[0].evaluation.prompts  # type: ignore[union-attr]  # seen above
        assert recipe.evaluation.prompts.split != recipe.prompts.split
        assert recipe.prompts.template == "chat"
        assert recipe.prompts.answer_field is None  # trained on what the model says
    assert (found[2].mode, found[2].adapter.rank) == ("adapter", 32)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2")
    AutoConfig.for_model("llama", **SHAPE).save_pretrained(folder / "config")
    save_tiny(folder / "tiny")
    save_prompts(folder / "train.jsonl", 12)
    save_prompts(folder / "test.jsonl", 6)
    return folder


@pytest.mark.parametrize("kind", ["", "-cllm", "-adapter"])
@pytest.mark.parametrize("domain", DOMAINS)
def test_what_each_will_cost_can_be_reckoned_from_the_config_alone(domain: str, kind: str, place: Path) -> None:
    files = [f"prompts.source={place / 'train.jsonl'}", f"evaluation.prompts.source={place / 'test.jsonl'}"]
    own = files if domain == "gsm8k" else []
    recipe = load_recipe(f"smollm2-{domain}{kind}", [f"model.name={place / 'config'}", *own])
    found = estimate_recipe(recipe, measure=False)
    names = [stage["stage"] for stage in found["stages"]]
    wanted = ["evaluate-base", "collect-1", "train-1", *([] if kind == "-adapter" else ["collect-2", "train-2"])]
    assert names[: len(wanted)] == wanted
    assert all(stage["seconds"] > 0 for stage in found["stages"])
    assert found["total"]["memory_bytes"] < 8e9


def test_local_files_of_prompts_take_the_place_of_the_hub(place: Path) -> None:
    from jacobi_forcing.recipe.run import run_recipe

    small = ["limit=4", "source=" + str(place / "train.jsonl"), "template=raw"]
    overrides = [
        f"model.name={place / 'tiny'}",
        *(f"prompts.{one}" for one in small),
        f"evaluation.prompts.source={place / 'test.jsonl'}",
        "evaluation.prompts.limit=2",
        "evaluation.max_new_tokens=8",
        "evaluation.probe_steps=null",
        "evaluation.speed_prompts=1",
        "collect.max_new_tokens=16",
        "adapter.rank=2",
        "rounds.0.steps=2",
    ]
    report = run_recipe(load_recipe("smollm2-gsm8k-adapter", overrides, place / "run"))
    assert [model["quality"]["answers"] for model in report["models"]] == [2, 2]
    assert all(d["exact"] == d["of"] for model in report["models"] for d in model["decoders"])
