from __future__ import annotations

import itertools
import random
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from jacobi_forcing.backbone import Backbone
from jacobi_forcing.config import CollectConfig
from jacobi_forcing.errors import ArtefactError, ConfigError, DataError, ModelError
from tiny_models import ARCHITECTURES, VOCAB, shared_model, tiny_model

pytest.importorskip("pyarrow")

from jacobi_forcing.trajectories import collect as collect_module
from jacobi_forcing.trajectories import states as states_module
from jacobi_forcing.trajectories.collect import collect
from jacobi_forcing.trajectories.prompts import Prompt
from jacobi_forcing.trajectories.report import CollectReport
from jacobi_forcing.trajectories.responses import greedy_responses
from jacobi_forcing.trajectories.states import draw_state
from jacobi_forcing.trajectories.store import Trajectory, TrajectoryReader, TrajectoryWriter, read_manifest

N = 4


def some_prompts(lengths: Sequence[int], seed: int = 0) -> list[Prompt]:
    generator = random.Random(seed)
    return [Prompt(i, "", [generator.randrange(VOCAB) for _ in range(length)]) for i, length in enumerate(lengths)]


PROMPTS = some_prompts([7, 3, 40, 11, 5])


def run(model: PreTrainedModel, folder: Path, prompts: Sequence[Prompt] = PROMPTS, **changes: Any) -> CollectReport:
    names = ("block_size", "eos_ids", "vocabulary", "provenance", "on_progress")
    keywords: dict[str, Any] = {"block_size": N, **{name: changes.pop(name) for name in names if name in changes}}
    settings: dict[str, Any] = {"max_new_tokens": 14, "batch_size": 3, "shard_size": 4, **changes}
    return collect(Backbone(model), prompts, folder=folder, config=CollectConfig(**settings), **keywords)


def collected(model: PreTrainedModel, folder: Path, *args: Any, **changes: Any) -> list[Trajectory]:
    run(model, folder, *args, **changes)
    return list(TrajectoryReader(folder))


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}


@torch.no_grad()
def next_tokens(model: PreTrainedModel, ids: Sequence[int]) -> list[int]:
    """The greedy next token after every prefix: one plain forward, no cache, no mask, no batch."""
    return model(torch.tensor([list(ids)]), use_cache=False).logits[0].argmax(dim=-1).tolist()


def plain_response(model: PreTrainedModel, prompt: Sequence[int], limit: int, eos_ids: Sequence[int] = ()) -> list[int]:
    text = list(prompt)
    for _ in range(limit):
        text.append(next_tokens(model, text)[-1])
        if text[-1] in eos_ids:
            break
    return text[len(prompt) :]


def plain_states(model: PreTrainedModel, context: Sequence[int], first: Sequence[int]) -> list[list[int]]:
    """One block alone: sweep the whole of it until it no longer changes."""
    states = [list(first)]
    while True:
        predicted = next_tokens(model, [*context, *states[-1]])[len(context) : -1]
        state = [states[-1][0], *predicted]
        if state == states[-1]:
            return states
        states.append(state)


def assert_plain(model: PreTrainedModel, trajectory: Trajectory) -> None:
    for block, states in enumerate(trajectory.states):
        context = [*trajectory.prompt_ids, *trajectory.response_ids[: block * N]]
        assert states == plain_states(model, context, states[0])


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_state_equals_that_of_a_block_swept_alone_without_a_cache(arch: str, tmp_path: Path) -> None:
    model = shared_model(arch)
    for trajectory, prompt in zip(collected(model, tmp_path), PROMPTS, strict=True):
        assert trajectory.prompt_ids == prompt.ids
        assert trajectory.response_ids == plain_response(model, prompt.ids, 14)
        assert [len(states[0]) for states in trajectory.states] == [4, 4, 4, 2]
        assert_plain(model, trajectory)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_responses_equal_the_librarys_greedy_generation(arch: str) -> None:
    model = tiny_model(arch)
    ids = [prompt.ids for prompt in PROMPTS]
    # The library would let these change what is generated; a fixed point is the plain argmax.
    model.generation_config.repetition_penalty = 1.7
    found = greedy_responses(Backbone(model), ids, [20] * len(ids), [])
    model.generation_config.repetition_penalty = 1.0
    for prompt, response in zip(ids, found, strict=True):
        expected = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=20)[0, len(prompt) :]
        assert response == expected.tolist()


@pytest.mark.parametrize("offset", range(2 * N + 2))
def test_a_response_ends_with_the_first_end_token_wherever_it_stands(offset: int, tmp_path: Path) -> None:
    model = shared_model("llama")
    free = plain_response(model, PROMPTS[0].ids, 14)
    # A second end token that comes first in other rows: rows end at different steps and leave the batch.
    eos_ids = [free[offset], plain_response(model, PROMPTS[2].ids, 14)[3]]
    for trajectory, prompt in zip(collected(model, tmp_path, eos_ids=eos_ids), PROMPTS, strict=True):
        expected = plain_response(model, prompt.ids, 14, eos_ids)
        assert trajectory.response_ids == expected
        assert trajectory.finished == (expected[-1] in eos_ids)
        assert sum(len(states[-1]) for states in trajectory.states) == len(expected)


def test_the_models_own_end_tokens_are_used(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.generation_config.eos_token_id = plain_response(model, PROMPTS[0].ids, 14)[2:4]
    first = collected(model, tmp_path)[0]
    assert first.finished
    assert len(first.response_ids) == 3


@pytest.mark.parametrize("block_size", [1, 2, 13, 14, 15, 64])
def test_any_block_size_covers_the_response(block_size: int, tmp_path: Path) -> None:
    for trajectory in collected(shared_model("qwen2"), tmp_path, PROMPTS[:2], block_size=block_size):
        assert list(itertools.chain(*(states[-1] for states in trajectory.states))) == trajectory.response_ids
        assert all(len(states) <= max(len(states[0]), 1) for states in trajectory.states)


@pytest.mark.parametrize("arch", ["llama", "gemma3", "gpt2"])
def test_neither_the_batch_nor_its_order_changes_a_byte(arch: str, tmp_path: Path) -> None:
    model = shared_model(arch)
    for size in (1, 2, 5):
        run(model, tmp_path / str(size), batch_size=size)
    assert shards(tmp_path / "1") == shards(tmp_path / "2") == shards(tmp_path / "5")


def test_shards_do_not_change_the_trajectories(tmp_path: Path) -> None:
    model = shared_model("llama")
    assert collected(model, tmp_path / "a", shard_size=1) == collected(model, tmp_path / "b", shard_size=99)


def test_a_small_budget_of_logits_takes_more_forwards_to_the_same_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shared_model("llama")
    whole = run(model, tmp_path / "a")
    for budget in (0, 6 * 3 * VOCAB):
        monkeypatch.setattr(states_module, "LOGITS_PER_FORWARD", budget)
        cut = run(model, tmp_path / str(budget))
        assert cut.forwards > whole.forwards
        assert cut.sweeps == whole.sweeps
        assert shards(tmp_path / str(budget)) == shards(tmp_path / "a")


def test_the_first_state_is_the_draft_as_drawn(tmp_path: Path) -> None:
    trajectories = collected(shared_model("llama"), tmp_path, seed=3)
    changed = 0
    for trajectory in trajectories:
        for block, states in enumerate(trajectory.states):
            context = [*trajectory.prompt_ids, *trajectory.response_ids[: block * N]]
            assert states[0] == draw_state(states[-1], context, seed=3, sample=trajectory.sample, block=block)
            assert set(states[0][1:]) <= set(context)
            changed += states[0] != states[-1]
    assert changed > 12  # a random draft of four tokens is hardly ever the answer


def test_states_share_no_memory_while_they_are_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Trajectory] = []
    real = TrajectoryWriter.write_shard

    def write_shard(self: TrajectoryWriter, shard: int, trajectories: Sequence[Trajectory], *rest: Any) -> Path:
        written.extend(trajectories)
        return real(self, shard, trajectories, *rest)

    monkeypatch.setattr(TrajectoryWriter, "write_shard", write_shard)
    run(shared_model("llama"), tmp_path)
    lists = [state for trajectory in written for states in trajectory.states for state in states]
    lists += [t.response_ids for t in written] + [t.prompt_ids for t in written]
    assert len({id(item) for item in lists}) == len(lists)


def test_drafts_differ_between_seeds_samples_and_blocks_and_never_move_the_response(tmp_path: Path) -> None:
    model, twins = shared_model("llama"), [Prompt(i, "", PROMPTS[0].ids) for i in range(2)]
    a = collected(model, tmp_path / "a", twins, seed=0)
    b = collected(model, tmp_path / "b", twins, seed=1)
    assert a[0].response_ids == a[1].response_ids == b[0].response_ids
    assert len({str([states[0][1:] for states in t.states]) for t in (*a, *b)}) == 4


def test_each_of_seed_sample_and_block_changes_the_draw() -> None:
    base = {"seed": 0, "sample": 0, "block": 0}
    draws = [
        draw_state([7] * 9, range(60), **{**base, **change})
        for change in ({}, {"seed": 1}, {"sample": 1}, {"block": 1})
    ]
    assert len({tuple(draw) for draw in draws}) == 4
    assert draws[0] == draw_state([7] * 9, range(60), **base)


def test_responses_of_very_unequal_lengths_leave_the_batch_one_by_one(tmp_path: Path) -> None:
    model, prompts = shared_model("llama"), some_prompts([5] * 6)
    texts = [plain_response(model, prompt.ids, 14) for prompt in prompts]
    eos_ids = [text[at] for text, at in zip(texts[::2], (2, 6, 9), strict=True)]
    trajectories = collected(model, tmp_path, prompts, eos_ids=eos_ids, batch_size=6, shard_size=6)
    assert len(trajectories) == 6
    assert len({len(t.response_ids) for t in trajectories}) >= 3
    for trajectory in trajectories:
        assert_plain(model, trajectory)


def test_a_row_that_has_ended_and_waits_is_not_fed_past_the_context(tmp_path: Path) -> None:
    model = tiny_model("gpt2", max_position_embeddings=20)
    prompts = some_prompts([19, 4, 5, 4, 5, 4])
    trajectories = collected(model, tmp_path, prompts, batch_size=6, shard_size=6)
    assert [len(t.response_ids) for t in trajectories] == [1, 14, 14, 14, 14, 14]


def test_drafts_from_the_vocabulary_hold_only_ids_of_the_tokenizer(tmp_path: Path) -> None:
    model, known = shared_model("llama"), [50, 52, 54]
    for trajectory in collected(model, tmp_path, draft_init="vocabulary", vocabulary=known):
        assert {token for states in trajectory.states for token in states[0][1:]} <= set(known)
    with pytest.raises(ConfigError, match="ids that the tokenizer has"):
        run(model, tmp_path / "none", draft_init="vocabulary")


def test_a_context_that_is_nearly_full_cuts_the_response(tmp_path: Path) -> None:
    model = tiny_model("gpt2", max_position_embeddings=20)
    prompts = some_prompts([19, 16, 4])
    trajectories = collected(model, tmp_path, prompts)
    assert [len(t.response_ids) for t in trajectories] == [1, 4, 14]
    assert [t.response_ids for t in trajectories] == [
        plain_response(model, prompt.ids, limit) for prompt, limit in zip(prompts, (1, 4, 14), strict=True)
    ]
    with pytest.raises(DataError, match=r"Prompt 0 cannot be continued.*20 tokens.*context of 20"):
        run(model, tmp_path / "full", some_prompts([20]))


def test_a_model_in_training_mode_is_collected_without_dropout_and_stays_in_it(tmp_path: Path) -> None:
    model = tiny_model("gpt2", attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5)
    run(model, tmp_path / "a")
    run(model.train(), tmp_path / "b")
    assert model.training
    assert shards(tmp_path / "a") == shards(tmp_path / "b")


def test_the_report_and_the_progress_count_what_was_done(tmp_path: Path) -> None:
    model, calls = shared_model("llama"), []
    eos = [plain_response(model, PROMPTS[0].ids, 14)[5]]
    report = run(model, tmp_path, eos_ids=eos, on_progress=lambda *call: calls.append(call))
    stored = list(TrajectoryReader(tmp_path))
    assert report.responses == 5
    assert report.tokens == sum(len(t.response_ids) for t in stored)
    assert report.unfinished == sum(not t.finished for t in stored)
    assert report.blocks == sum(len(t.states) for t in stored)
    assert report.sweeps == sum(len(states) - 1 for t in stored for states in t.states)
    assert report.near_ties == report.dropped == report.resumed == 0
    assert min(report.fixed_point_seconds, report.trajectory_seconds, report.write_seconds) > 0
    assert set(report.to_dict()) >= {"responses", "tokens", "sweeps", "unfinished"}
    assert calls[-1] == ("trajectories", 5, 5)
    assert [c for c in calls if c[0] == "fixed points"][-1] == ("fixed points", 5, 5)


def test_collecting_again_does_nothing(tmp_path: Path) -> None:
    run(shared_model("llama"), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    report = run(shared_model("llama"), tmp_path)
    assert (report.resumed, report.responses, report.forwards) == (5, 0, 0)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 9}, "seed"),
        ({"max_new_tokens": 13}, "max_new_tokens"),
        ({"block_size": 5}, "block_size"),
        ({"shard_size": 5}, "shard_size"),
        ({"eos_ids": [1]}, "eos_ids"),
        ({"draft_init": "vocabulary", "vocabulary": [1]}, "draft_init"),
        ({"prompts": some_prompts([7, 3, 40, 11, 5], seed=1)}, "prompts_sha256"),
        ({"prompts": PROMPTS[:4]}, "samples"),
        ({"model": "qwen2"}, "model_fingerprint"),
    ],
)
def test_a_folder_of_other_settings_is_refused(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    run(shared_model("llama"), tmp_path)
    before = shards(tmp_path)
    changes = dict(changes)
    model = shared_model(changes.pop("model", "llama"))
    with pytest.raises(ArtefactError, match=rf"another run: '{named}' differs"):
        run(model, tmp_path, changes.pop("prompts", PROMPTS), **changes)
    assert shards(tmp_path) == before


@pytest.mark.parametrize(
    ("prompts", "changes", "error"),
    [
        ([], {}, DataError),
        (PROMPTS[::-1], {}, DataError),
        ([Prompt(0, "", [])], {}, DataError),
        (PROMPTS, {"block_size": 0}, ConfigError),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    prompts: list[Prompt], changes: dict[str, Any], error: type[Exception], tmp_path: Path
) -> None:
    with pytest.raises(error):
        run(shared_model("llama"), tmp_path / "x", prompts, **changes)
    assert not (tmp_path / "x").exists()


def other_response(monkeypatch: pytest.MonkeyPatch, rows: Sequence[int]) -> None:
    """Let the generation report another token than the model's at slot 1 of some samples, as a broken cache would."""
    real = collect_module.greedy_responses

    def responses(backbone: Backbone, prompts: list[list[int]], *rest: Any) -> list[list[int]]:
        found = real(backbone, prompts, *rest)
        for ids, response in zip(prompts, found, strict=True):
            if any(ids == PROMPTS[row].ids for row in rows):
                response[1] = (response[1] + 1) % VOCAB
        return found

    monkeypatch.setattr(collect_module, "greedy_responses", responses)


def test_a_response_that_the_sweep_does_not_confirm_is_dropped_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other_response(monkeypatch, [1])
    report = run(shared_model("llama"), tmp_path)
    assert (report.dropped, report.responses) == (1, 4)
    assert [t.sample for t in TrajectoryReader(tmp_path)] == [0, 2, 3, 4]
    assert list(read_manifest(tmp_path)["shards"][0]["dropped"]) == ["1"]
    assert "Sample 1 is dropped" in caplog.text


def test_a_near_tie_is_kept_as_the_generation_had_it_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other_response(monkeypatch, [1])
    monkeypatch.setattr(collect_module, "NEAR_TIE", {torch.float32: 1e9})
    report = run(shared_model("llama"), tmp_path)
    assert (report.dropped, report.responses) == (0, 5)
    assert report.near_ties >= 1
    trajectory = list(TrajectoryReader(tmp_path))[1]
    assert trajectory.response_ids[1] != plain_response(shared_model("llama"), PROMPTS[1].ids, 2)[1]


def test_a_model_that_no_sweep_confirms_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other_response(monkeypatch, range(5))
    with pytest.raises(ModelError, match="other tokens in a sweep than in generation"):
        run(shared_model("llama"), tmp_path)
    assert shards(tmp_path) == {}


KILLED = """
    import os, signal, sys
    from pathlib import Path
    import torch
    torch.set_num_threads(1)
    sys.path.insert(0, sys.argv[1])
    import test_collect
    from tiny_models import shared_model

    replaced, real = 0, os.replace
    def replace(*paths):
        global replaced
        replaced += 1
        if replaced == int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)
        real(*paths)
    os.replace = replace
    test_collect.run(shared_model("llama"), Path(sys.argv[2]), shard_size=1)
"""


# Files are renamed in this order: manifest, shard 0, manifest, shard 1, manifest, shard 2, ...
@pytest.mark.parametrize("rename", [6, 7], ids=["before a shard is renamed", "before the manifest lists it"])
def test_a_killed_collection_goes_on_to_the_same_bytes(rename: int, tmp_path: Path) -> None:
    script = [
        sys.executable,
        "-c",
        textwrap.dedent(KILLED),
        str(Path(__file__).parent),
        str(tmp_path / "killed"),
        str(rename),
    ]
    source = str(Path(collect_module.__file__).parents[2])
    done = subprocess.run(script, capture_output=True, text=True, check=False, env={"PYTHONPATH": source, "PATH": ""})
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert "shard-00002.parquet" + (".tmp" if rename == 6 else "") in shards(tmp_path / "killed")
    assert len(read_manifest(tmp_path / "killed")["shards"]) == 2

    report = run(shared_model("llama"), tmp_path / "killed", shard_size=1)
    run(shared_model("llama"), tmp_path / "whole", shard_size=1)
    assert (report.resumed, report.responses) == (2, 3)
    assert shards(tmp_path / "killed") == shards(tmp_path / "whole")
    assert [t.sample for t in TrajectoryReader(tmp_path / "killed")] == [0, 1, 2, 3, 4]
