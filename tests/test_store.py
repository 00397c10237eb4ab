from __future__ import annotations

import builtins
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from jacobi_forcing.errors import ArtefactError, DataError, MissingExtraError

pytest.importorskip("pyarrow")

from jacobi_forcing.trajectories.store import (
    Trajectory,
    TrajectoryReader,
    TrajectoryWriter,
    read_manifest,
)
from result_schemas import assert_valid

SETTINGS = {"seed": 0, "eos_ids": [2], "model_fingerprint": "abc"}


def trajectory(sample: int, **changes: Any) -> Trajectory:
    """A response of 5 tokens in blocks of 3."""
    values: dict[str, Any] = {
        "sample": sample,
        "prompt_ids": [1, 2 + sample],
        "response_ids": [10, 11, 12, 13, 14],
        "finished": True,
        "block_size": 3,
        "states": [[[10, 1, 1], [10, 11, 7], [10, 11, 12]], [[13, 1], [13, 14]]],
    }
    return Trajectory(**{**values, **changes})


def writer(folder: Path, samples: Sequence[int] = range(5), **changes: Any) -> TrajectoryWriter:
    values: dict[str, Any] = {"samples": samples, "shard_size": 2, "block_size": 3, "settings": SETTINGS}
    return TrajectoryWriter(folder, **{**values, **changes})


def fill(store: TrajectoryWriter, shards: int = 99) -> None:
    for shard, samples in store.pending()[:shards]:
        store.write_shard(shard, [trajectory(sample) for sample in samples])


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}


def test_what_is_written_is_read_in_order_of_sample(tmp_path: Path) -> None:
    store = writer(tmp_path)
    fill(store)
    store.finish()
    reader = TrajectoryReader(tmp_path)
    assert list(reader) == [trajectory(sample) for sample in range(5)]
    assert len(reader) == 5
    assert reader.block_size == 3
    reader.verify()


def test_states_that_are_read_share_no_memory(tmp_path: Path) -> None:
    store = writer(tmp_path, range(1))
    fill(store)
    store.finish()
    (read,) = TrajectoryReader(tmp_path)
    read.states[0][0][1] = 99
    assert read.states[0][1:] == [[10, 11, 7], [10, 11, 12]]
    assert read.response_ids == [10, 11, 12, 13, 14]


def test_shards_have_fixed_boundaries_and_the_manifest_lists_them(tmp_path: Path) -> None:
    store = writer(tmp_path, [3, 4, 8, 9, 20], provenance={"argv": ["x"]})
    assert store.pending() == [(0, [3, 4]), (1, [8, 9]), (2, [20])]
    fill(store)
    store.finish()
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert [(e["first_sample"], e["last_sample"], e["rows"]) for e in manifest["shards"]] == [
        (3, 4, 2),
        (8, 9, 2),
        (20, 20, 1),
    ]
    assert_valid(manifest, "trajectories")
    assert manifest["complete"] is True
    assert manifest["block_size"] == 3
    assert manifest["settings"] == SETTINGS
    assert manifest["provenance"] == [{"argv": ["x"]}]


def test_the_same_content_makes_the_same_bytes_whatever_the_provenance(tmp_path: Path) -> None:
    for name in ("a", "b"):
        fill(writer(tmp_path / name, provenance={"created": name}))
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_a_run_that_was_cut_short_goes_on(tmp_path: Path) -> None:
    fill(writer(tmp_path / "whole"))
    fill(writer(tmp_path / "cut"), shards=1)
    again = writer(tmp_path / "cut")
    assert again.done == {0, 1}
    assert [shard for shard, _ in again.pending()] == [1, 2]
    fill(again)
    again.finish()
    assert files(tmp_path / "cut") == files(tmp_path / "whole")


def test_shards_may_be_written_in_any_order(tmp_path: Path) -> None:
    store = writer(tmp_path)
    for shard, samples in reversed(store.pending()):
        store.write_shard(shard, [trajectory(sample) for sample in samples])
    store.finish()
    assert [t.sample for t in TrajectoryReader(tmp_path)] == [0, 1, 2, 3, 4]


def test_leftovers_of_a_killed_run_are_removed_and_other_files_are_not(tmp_path: Path) -> None:
    fill(writer(tmp_path), shards=1)
    (tmp_path / "shard-00001.parquet.tmp").write_bytes(b"half")
    (tmp_path / "manifest.json.tmp").write_bytes(b"{")
    (tmp_path / "shard-00002.parquet").write_bytes(b"whole, but never listed")
    (tmp_path / "notes.txt").write_text("mine")
    writer(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.json", "notes.txt", "shard-00000.parquet"]


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(path.read_bytes()[:-9]), lambda path: path.unlink()])
def test_a_damaged_shard_is_collected_again(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    store = writer(tmp_path)
    fill(store)
    store.finish()
    whole = files(tmp_path)
    damage(tmp_path / "shard-00001.parquet")
    again = writer(tmp_path)
    assert not again.complete
    assert again.pending() == [(1, [2, 3])]
    fill(again)
    again.finish()
    assert files(tmp_path) == whole


def test_an_opening_after_the_end_changes_nothing(tmp_path: Path) -> None:
    store = writer(tmp_path)
    fill(store)
    store.finish()
    before = (tmp_path / "manifest.json").read_bytes()
    again = writer(tmp_path, provenance={"argv": ["later"]})
    assert again.complete
    assert again.pending() == []
    again.finish()
    assert (tmp_path / "manifest.json").read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"block_size": 4}, "block_size"),
        ({"shard_size": 3}, "shard_size"),
        ({"samples": range(6)}, "samples"),
        ({"samples": range(1, 6)}, "samples_sha256"),
        ({"settings": {**SETTINGS, "seed": 1}}, "seed"),
        ({"settings": {**SETTINGS, "model_fingerprint": "abd"}}, "model_fingerprint"),
        ({"settings": {**SETTINGS, "new": 1}}, "new"),
    ],
)
def test_a_folder_of_another_run_is_refused_and_the_difference_is_named(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    fill(writer(tmp_path), shards=1)
    before = files(tmp_path)
    with pytest.raises(ArtefactError, match=rf"'{named}' differs.*name another folder"):
        writer(tmp_path, **changes)
    assert files(tmp_path) == before


def test_shards_without_a_manifest_are_refused_and_kept(tmp_path: Path) -> None:
    fill(writer(tmp_path), shards=1)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(ArtefactError, match=r"no manifest\.json"):
        writer(tmp_path)
    assert list(files(tmp_path)) == ["shard-00000.parquet"]


def test_a_shard_takes_exactly_its_planned_samples(tmp_path: Path) -> None:
    store = writer(tmp_path)
    with pytest.raises(DataError, match="wrong samples"):
        store.write_shard(0, [trajectory(0)])
    with pytest.raises(DataError, match="wrong samples"):
        store.write_shard(0, [trajectory(1), trajectory(0)])
    with pytest.raises(DataError, match="block size"):
        store.write_shard(0, [trajectory(0), trajectory(1, block_size=5, states=[[[10, 11, 12, 13, 14]]])])
    assert files(tmp_path) == {}


def test_dropped_samples_are_named_in_the_manifest_and_count_as_done(tmp_path: Path) -> None:
    store = writer(tmp_path, range(2))
    store.write_shard(0, [trajectory(1)], {0: "no good"})
    store.finish()
    assert read_manifest(tmp_path)["shards"][0]["dropped"] == {"0": "no good"}
    assert writer(tmp_path, range(2)).done == {0, 1}
    assert [t.sample for t in TrajectoryReader(tmp_path)] == [1]


def test_an_unfinished_collection_is_read_only_on_request(tmp_path: Path) -> None:
    store = writer(tmp_path)
    fill(store, shards=1)
    with pytest.raises(ArtefactError, match="missing shards"):
        store.finish()
    with pytest.raises(ArtefactError, match=r"2 of 5 samples.*start the same collection again"):
        TrajectoryReader(tmp_path)
    assert [t.sample for t in TrajectoryReader(tmp_path, allow_incomplete=True)] == [0, 1]


def test_a_damaged_shard_is_an_error_in_reading(tmp_path: Path) -> None:
    store = writer(tmp_path)
    fill(store)
    store.finish()
    shard = tmp_path / "shard-00001.parquet"
    shard.write_bytes(b"PAR1" + shard.read_bytes()[40:])
    with pytest.raises(ArtefactError, match=r"shard-00001.parquet' is damaged"):
        list(TrajectoryReader(tmp_path))
    with pytest.raises(ArtefactError, match="SHA-256"):
        TrajectoryReader(tmp_path).verify()
    shard.unlink()
    with pytest.raises(ArtefactError, match="is damaged"):
        list(TrajectoryReader(tmp_path))


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 99}'])
def test_a_damaged_manifest_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ArtefactError, match=r"manifest\.json"):
        TrajectoryReader(tmp_path)
    with pytest.raises(ArtefactError, match=r"manifest\.json"):
        writer(tmp_path)


def test_a_folder_without_trajectories_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ArtefactError, match="collect them first"):
        TrajectoryReader(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 0}, "block size"),
        ({"prompt_ids": []}, "lacks a prompt"),
        ({"response_ids": [], "states": []}, "lacks a prompt or a response"),
        ({"states": [[[10, 11, 12]]]}, "number of blocks"),
        ({"states": [[[10, 11, 12]], []]}, "no states"),
        ({"states": [[[10, 11, 7]], [[13, 14]]]}, "does not end at the response in block 0"),
        ({"states": [[[10, 11], [10, 11, 12]], [[13, 14]]]}, "unequal length"),
        ({"states": [[[9, 11, 12], [10, 11, 12]], [[13, 14]]]}, "slot 0"),
    ],
)
def test_a_trajectory_whose_parts_do_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f"sample 7.*{message}"):
        trajectory(7, **changes)


@pytest.mark.parametrize("samples", [[], [1, 1], [2, 1]])
def test_samples_must_be_distinct_and_in_order(tmp_path: Path, samples: list[int]) -> None:
    with pytest.raises(DataError, match="ascending"):
        writer(tmp_path, samples)


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def blocked(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", blocked)
    with pytest.raises(MissingExtraError, match=r"pyarrow.*jacobi-forcing\[train\]"):
        writer(tmp_path)
    with pytest.raises(MissingExtraError):
        TrajectoryReader(tmp_path)
