"""Errors say what was seen, what was expected and how to mend it, in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from jacobi_forcing import errors
from jacobi_forcing.errors import JForceError, MissingExtraError, guarded


def test_all_parts_stand_in_one_line() -> None:
    error = JForceError("The block is empty.", seen=0, expected="at least 1 token", remedy="use a larger one.")
    assert str(error) == "The block is empty; seen: 0; expected: at least 1 token; use a larger one."
    assert (error.seen, error.expected, error.remedy) == (0, "at least 1 token", "use a larger one.")


def test_parts_that_are_not_given_are_left_out() -> None:
    assert str(JForceError("Nothing works")) == "Nothing works."
    assert str(JForceError("Nothing works", remedy="wait")) == "Nothing works; wait."


def test_falsy_values_that_were_seen_are_shown() -> None:
    assert "seen: 0;" in str(JForceError("Too small", seen=0, expected=1))
    assert "seen: ;" in str(JForceError("Empty", seen="", expected="a name"))


def test_every_expected_end_of_a_program_is_an_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    def ends(end: BaseException) -> Callable[[], int]:
        def work() -> int:
            raise end

        return work

    assert [guarded(lambda: None), guarded(lambda: 1)] == [0, 1]
    assert guarded(ends(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == ""
    assert guarded(ends(JForceError("Nothing works", remedy="wait"))) == 2
    assert capsys.readouterr().err == "Error: Nothing works; wait.\n"
    with pytest.raises(JForceError):
        guarded(ends(JForceError("Nothing works")), debug=True)
    for fault in (ZeroDivisionError, SystemExit):
        with pytest.raises(fault):
            guarded(ends(fault()))


@pytest.mark.parametrize(
    "name",
    [
        *("check_adapter_exact", "compare_modes", "fetch_smollm2", "gpu_check", "gpu_smollm2", "measure_collecting"),
        *("measure_memory", "mode_costs", "publish_adapter", "smollm2_curve", "smollm2_table"),
    ],
)
def test_the_scripts_end_as_the_command_does(name: str) -> None:
    text = (Path(__file__).resolve().parents[1] / "scripts" / f"{name}.py").read_text(encoding="utf-8")
    assert text.endswith('if __name__ == "__main__":\n    sys.exit(guarded(main))\n')


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("ConfigError", ValueError),
        ("DataError", ValueError),
        ("ModelError", ValueError),
        ("CacheError", errors.ModelError),
        ("ArtefactError", JForceError),
        ("MissingExtraError", ImportError),
    ],
)
def test_callers_may_catch_them_by_the_usual_class(name: str, base: type[Exception]) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, JForceError)
    assert issubclass(kind, base)


def test_a_missing_extra_names_the_command_that_installs_it() -> None:
    error = MissingExtraError("pyarrow", "train")
    assert str(error) == (
        "The package 'pyarrow' is not installed; install it with: pip install 'jacobi-forcing[train]'."
    )
