from __future__ import annotations

import os
from pathlib import Path

import pytest

from jacobi_forcing.errors import ArtefactError
from jacobi_forcing.files import (
    append_text,
    file_sha256,
    link_folder,
    new_folder,
    read_json,
    remove,
    whole_lines,
    write_file,
    write_json,
    write_text,
)


def test_a_file_is_replaced_as_a_whole_and_nothing_else_is_left(tmp_path: Path) -> None:
    write_text(tmp_path / "deep" / "a.txt", "old")
    write_text(tmp_path / "deep" / "a.txt", "new")
    assert (tmp_path / "deep" / "a.txt").read_text() == "new"
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["a.txt"]


def test_a_writer_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    target = write_text(tmp_path / "a.bin", "old")

    def half(path: Path) -> None:
        path.write_bytes(b"ha")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_file(target, half)
    assert target.read_text() == "old"
    write_file(target, lambda path: path.write_bytes(b"\x00new"))
    assert target.read_bytes() == b"\x00new"


def test_the_hash_of_a_file_is_that_of_its_bytes(tmp_path: Path) -> None:
    # What sha256sum prints for these three letters.
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert file_sha256(write_text(tmp_path / "a.txt", "abc")) == expected


def test_json_comes_back_as_it_was(tmp_path: Path) -> None:
    value = {"text": "ü ×", "list": [1, None, 2.5]}
    assert read_json(write_json(tmp_path / "a.json", value)) == value


@pytest.mark.parametrize("text", ["{", "[1]", ""])
def test_json_that_is_damaged_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ArtefactError, match=r"a\.json"):
        read_json(tmp_path / "a.json")


def test_a_path_that_cannot_be_written_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ArtefactError, match="Cannot write"):
        write_text(tmp_path / "file" / "below", "text")


def test_a_folder_takes_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with new_folder(target) as folder:
        (folder / "weights").write_text("first")
        assert not target.exists()
    with pytest.raises(RuntimeError), new_folder(target) as folder:
        (folder / "weights").write_text("half")
        raise RuntimeError
    assert (target / "weights").read_text() == "first"
    with new_folder(target) as folder:
        (folder / "weights").write_text("second")
    assert (target / "weights").read_text() == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_folder_that_was_not_filled_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "deep" / "model") as folder:
        (folder / "weights").write_text("half")
        raise KeyboardInterrupt
    assert list((tmp_path / "deep").iterdir()) == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("file", "seen: a file;"),
        ("file/below/it", r"file' is a file, or"),
        ("link", "seen: a link to nothing"),
        (".", "seen: the current folder"),
        ("..", "seen: the current folder"),
        ("closed/new", "closed' may not be written"),
        ("closed", "seen: a folder that may not be written"),
        ("other", r"other\.old' stands in the way"),
    ],
)
def test_a_name_that_no_folder_can_take_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("x")
    Path("other.old").write_text("somebody's")
    Path("link").symlink_to("nothing")
    Path("closed").mkdir()
    allowed = os.access  # root may do everything, so the refusal is played
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "closed" and allowed(path, mode))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ArtefactError, match=said), new_folder(name):
        pytest.fail("the block ran")
    assert sorted(tmp_path.iterdir()) == before


def test_a_file_that_took_the_name_meanwhile_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(ArtefactError, match="seen: a file"), new_folder(tmp_path / "model"):
        (tmp_path / "model").write_text("somebody's")
    assert (tmp_path / "model").read_text() == "somebody's"
    assert not (tmp_path / "model.old").exists()


def test_a_link_to_a_folder_gives_way_and_what_it_points_to_stays(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "file").write_text("x")
    (tmp_path / "model").symlink_to("far")
    with new_folder(tmp_path / "model") as folder:
        (folder / "weights").write_text("new")
    assert (tmp_path / "far" / "file").exists() and (tmp_path / "model" / "weights").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["far", "model"]


def test_an_older_folder_is_put_back_where_the_new_one_cannot_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, replace = tmp_path / "model", os.replace
    (target / "first").mkdir(parents=True)

    def stopped(source: Path, place: Path) -> None:
        if source.name.endswith(".tmp"):
            raise KeyboardInterrupt
        replace(source, place)

    monkeypatch.setattr(os, "replace", stopped)
    with pytest.raises(KeyboardInterrupt), new_folder(target):
        pass
    assert (target / "first").is_dir()


def test_a_linked_folder_holds_the_same_files_and_outlives_the_first(tmp_path: Path) -> None:
    (tmp_path / "a" / "deep").mkdir(parents=True)
    (tmp_path / "a" / "deep" / "file").write_text("x")
    link_folder(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a" / "deep" / "file").samefile(tmp_path / "b" / "deep" / "file")
    remove(tmp_path / "a")
    remove(tmp_path / "never-was")
    assert (tmp_path / "b" / "deep" / "file").read_text() == "x"


def test_lines_are_appended_and_one_that_a_kill_cut_short_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    append_text(path, "one\n")
    append_text(path, "zwö\n")
    assert whole_lines(path) == [b"one", "zwö".encode()]
    with path.open("a") as file:
        file.write("thr")
    assert whole_lines(path) == [b"one", "zwö".encode()]
    append_text(path, "three\n")
    assert path.read_text(encoding="utf-8") == "one\nzwö\nthree\n"


def test_a_file_of_lines_that_cannot_be_read_or_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtefactError, match="Cannot read"):
        whole_lines(tmp_path / "none")
    with pytest.raises(ArtefactError, match="Cannot write"):
        append_text(tmp_path, "a folder\n")
