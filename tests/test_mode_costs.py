"""What a step costs in either mode is measured on the real stages, each in a process of its own."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from jacobi_forcing.config import RecipeConfig
from jacobi_forcing.recipe.mode_costs import ModeCost, affordable_steps, mode_cost
from tiny_folder import save_tiny


def recipe(folder: Path, mode: str) -> RecipeConfig:
    questions = folder / "questions.jsonl"
    questions.write_text("".join(json.dumps({"prompt": f"What is {n} + 1?"}) + "\n" for n in range(4)))
    values: dict[str, Any] = {
        "model": {"name": str(save_tiny(folder / "tiny"))},
        "prompts": {"source": str(questions), "limit": 4},
        "collect": {"max_new_tokens": 16, "batch_size": 4},
        "rounds": [{"block_size": 4, "steps": 1, "batch_size": 2, "learning_rate": 1e-3, "max_length": 96}],
        "output": str(folder / "run"),
    }
    if mode == "adapter":
        values |= {"mode": mode, "adapter": {"rank": 2, "lines_per_response": 3, "max_sweeps": 1}}
    return RecipeConfig.from_dict(values)


@pytest.mark.parametrize("mode", ["full", "adapter"])
def test_a_round_is_measured_and_nothing_is_left(mode: str, tmp_path: Path) -> None:
    cost = mode_cost(recipe(tmp_path, mode), tmp_path / "work", steps=2)
    assert cost.mode == mode
    assert cost.collect >= 0 and cost.step > 0
    # No process with torch in it is smaller.
    assert 1e8 < cost.memory < 1e10
    assert cost.train == cost.step / cost.responses
    if mode == "adapter":
        assert (cost.responses, cost.slots) == (2, 3 * 4 * 2)
    else:
        assert cost.responses >= 2 and 0 < cost.slots <= 16
    assert not (tmp_path / "work").exists()
    assert set(cost.to_dict()) == {field.name for field in dataclasses.fields(ModeCost)} | {"train"}


def test_a_budget_pays_for_collecting_first() -> None:
    cost = ModeCost("full", collect=0.5, step=0.25, responses=1, memory=0, slots=0)
    assert affordable_steps(cost, 10, 10.0) == 20
    assert affordable_steps(cost, 100, 10.0) == 0
