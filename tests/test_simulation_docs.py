"""The examples of docs/simulation.md run, and say what is shown of them."""

import re
import shlex
from pathlib import Path

import pytest

from shardbook.cli.main import run
from tests.test_forecast_docs import missing

TEXT = (Path(__file__).parents[1] / "docs" / "simulation.md").read_text(encoding="utf-8")
FENCES = re.findall(r"^```(\w*)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
COMMANDS = [line for kind, body in FENCES if kind == "sh" for line in body.splitlines()]
SHOWN = FENCES[1][1]


def said_by(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # nothing is broken into two lines
    code = run(shlex.split(command)[1:])
    found = capsys.readouterr()
    assert (code, found.err) == (0, "")
    return found.out


def test_the_first_example_says_what_the_page_shows(capsys, monkeypatch):
    assert missing(SHOWN, said_by(COMMANDS[0], capsys, monkeypatch)) is None


@pytest.mark.parametrize("command", [COMMANDS[1], *(pytest.param(one, marks=pytest.mark.full) for one in COMMANDS[2:])])
def test_every_other_command_is_understood(command, capsys, monkeypatch):
    assert "two witnesses" in said_by(command, capsys, monkeypatch)


def test_the_python_example_prints_a_peak(capsys):
    (block,) = [body for kind, body in FENCES if kind == "python"]
    exec(compile(block, "simulation.md", "exec"), {"__name__": "page"})
    peak, phase, first, *_ = capsys.readouterr().out.split()
    assert int(peak) > 0
    assert phase in ("forward", "backward", "step")
    assert int(first) > 0


def test_the_page_has_the_commands_that_are_run():
    assert len(COMMANDS) == 4
    assert all("--simulate" in command for command in COMMANDS)
