"""What verbs print, and where."""

from __future__ import annotations

import sys

import pytest

from jacobi_forcing.cli.console import print_report


def test_a_terminal_gets_the_json_line_only_where_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    print_report({"a": 1}, json=False)
    assert capsys.readouterr().out == '{"a": 1}\n'
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_report({"a": 1}, json=False)
    assert capsys.readouterr().out == ""
    print_report({"a": 1}, json=True)
    assert capsys.readouterr().out == '{"a": 1}\n'
