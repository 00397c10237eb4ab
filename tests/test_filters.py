"""Filters for answers: what each keeps out, that it is counted, and that nothing is never kept in silence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from collecting import PROMPTS, run
from jacobi_forcing.config import CollectConfig, PromptsConfig
from jacobi_forcing.errors import ConfigError, DataError
from jacobi_forcing.recipe.filters import make_filters
from jacobi_forcing.trajectories.filters import Answer, count_filtered, first_refusal, is_finished, kept_of
from jacobi_forcing.trajectories.prompts import Prompt
from jacobi_forcing.trajectories.store import TrajectoryReader, read_manifest
from tiny_folder import EOS, byte_tokenizer
from tiny_models import shared_model

TOKENIZER = byte_tokenizer()
ADD = "```python\ndef add(a, b):\n    return a + b\n```"


def answer(text: str, reference: str | None = None, finished: bool = True) -> Answer:
    return Answer(Prompt(0, "?", [5], reference), [*TOKENIZER(text)["input_ids"], *([EOS] * finished)], finished)


def filters(*names: str, source: str = "prompts.jsonl", task: str = "none", reference: str | None = "1") -> Any:
    settings = CollectConfig(filters=names, filter_task=task)  # type: ignore[arg-type]  # checked there
    return make_filters(settings, PromptsConfig(source), [Prompt(0, "?", [5], reference)], TOKENIZER, [EOS])


@pytest.mark.parametrize(
    ("name", "kept", "refused"),
    [
        ("finished", answer("yes"), answer("yes", finished=False)),
        ("no_repetition", answer("a text without a loop in it"), answer("so " + "again " * 9)),
        ("final_answer", answer("It is 3 + 4.\n#### 7", "so 7"), answer("#### 8, not 7", "#### 7")),
        ("unit_tests", answer(ADD, '["assert add(1, 2) == 3"]'), answer(ADD, '["assert add(1, 2) == 4"]')),
    ],
)
def test_each_filter_keeps_the_right_answer_and_refuses_the_wrong_one(name: str, kept: Answer, refused: Answer) -> None:
    chosen = filters(name)
    assert first_refusal(chosen, kept) is None
    assert first_refusal(chosen, refused) == name


def test_the_first_filter_that_refuses_is_the_one_that_counts() -> None:
    wrong = answer("again " * 9, finished=False)
    assert first_refusal(filters("no_repetition", "finished"), wrong) == "no_repetition"
    assert first_refusal(filters("finished", "no_repetition"), wrong) == "finished"


def test_a_builtin_source_is_graded_by_its_own_task() -> None:
    chosen = filters("final_answer", source="builtin:word-problems")
    assert chosen["final_answer"].task == "word_problems"
    assert filters("final_answer", task="math")["final_answer"].task == "math"


def test_a_filter_that_needs_references_says_so() -> None:
    with pytest.raises(ConfigError, match="answer_field"):
        filters("final_answer", reference=None)
    assert list(filters("finished", reference=None)) == ["finished"]


def even(answer: Answer) -> bool:
    return answer.prompt.index % 2 == 0


def test_filtered_samples_are_counted_in_manifest_and_report_and_not_swept(tmp_path: Path) -> None:
    whole = run(shared_model("llama"), tmp_path / "whole", shard_size=2)
    report = run(shared_model("llama"), tmp_path / "some", shard_size=2, filters={"even": even})
    assert [trajectory.sample for trajectory in TrajectoryReader(tmp_path / "some")] == [0, 2, 4]
    manifest = read_manifest(tmp_path / "some")
    assert [entry["filtered"] for entry in manifest["shards"]] == [{"1": "even"}, {"3": "even"}, {}]
    assert (report.filtered, report.responses, report.dropped) == (2, 3, 0)
    assert report.sweeps < whole.sweeps
    assert kept_of(manifest, ["even"]) == "kept 3 of 5: 2 even"
    kept = {t.sample: t for t in TrajectoryReader(tmp_path / "whole")}
    assert all(kept[t.sample] == t for t in TrajectoryReader(tmp_path / "some"))
    # Done before: the counts are those of the folder.
    again = run(shared_model("llama"), tmp_path / "some", shard_size=2, filters={"even": even})
    assert (again.resumed, again.filtered) == (5, 0)
    assert count_filtered(read_manifest(tmp_path / "some")) == {"even": 2}


def test_a_shard_may_come_out_empty_but_not_the_whole_collection(tmp_path: Path) -> None:
    run(shared_model("llama"), tmp_path / "some", shard_size=1, filters={"even": even})
    assert len(TrajectoryReader(tmp_path / "some")) == 3
    with pytest.raises(DataError, match=r"kept 0 of 5: 5 finished"):
        run(shared_model("llama"), tmp_path / "none", filters={"finished": is_finished})


def test_other_filters_are_another_collection(tmp_path: Path) -> None:
    run(shared_model("llama"), tmp_path, filters={"even": even})
    with pytest.raises(Exception, match="'filters' differs"):
        run(shared_model("llama"), tmp_path)
    assert json.loads((tmp_path / "manifest.json").read_text())["complete"]
    assert len(PROMPTS) == 5
