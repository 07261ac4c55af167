"""docs/verify.md does what it says: the walk-through from the fault to its mend, and the loop that a reader starts from."""

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from shardbook.cli.main import run
from shardbook.report.verdict_words import MEANINGS
from shardbook.verifying.explanations import EXPLANATIONS, document
from tests.test_forecast_docs import missing

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "token_normalisation.py"
TEXT = (ROOT / "docs" / "verify.md").read_text(encoding="utf-8")
FENCES = re.findall(r"^```(\w*)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
MEND = next(body for kind, body in FENCES if kind == "diff")


def mended(source):
    """The loop with the page's one line changed."""
    (before,) = re.findall(r"^-(.*)$", MEND, re.MULTILINE)
    (after,) = re.findall(r"^\+(.*)$", MEND, re.MULTILINE)
    assert source.count(f"{before}\n") == 1
    return source.replace(before, after)


def walk(capsys, monkeypatch, tmp_path):
    """The page top to bottom in an empty folder: (command, exit code, what it said, what the page shows) of each verdict."""
    script = tmp_path / "examples" / EXAMPLE.name
    script.parent.mkdir()
    script.write_text(EXAMPLE.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    for place, (kind, body) in enumerate(FENCES):
        if kind == "diff":
            script.write_text(mended(script.read_text(encoding="utf-8")), encoding="utf-8")
        for line in body.splitlines() if kind == "sh" else ():
            program, *arguments = shlex.split(line)
            if program == "python":
                monkeypatch.setattr(sys, "argv", arguments)
                runpy.run_path(arguments[0], run_name="__main__")
            elif arguments[1].endswith(".rec"):
                code = run(arguments)
                yield line, code, capsys.readouterr(), FENCES[place + 1][1]


def test_the_walk_through_names_the_fault_and_is_mended_by_one_line(capsys, monkeypatch, tmp_path):
    faulty, right = walk(capsys, monkeypatch, tmp_path)
    for command, _, said, shown in (faulty, right):
        assert said.err == "", command
        assert missing(shown, said.out) is None
    assert (faulty[1], right[1]) == (1, 0)
    assert faulty[2].out.startswith("different: a mean of means (weight.mean_of_means)")
    assert right[2].out.startswith("within rounding: 5 steps")


def test_the_loop_of_the_page_is_that_of_the_example():
    block = next(body for kind, body in FENCES if kind == "python")
    lines = [line.split("  #")[0].strip() for line in EXAMPLE.read_text(encoding="utf-8").splitlines()]
    shown = [line.strip() for line in block.splitlines()]
    assert any(lines[at : at + len(shown)] == shown for at in range(len(lines)))


def test_a_reader_s_own_loop_runs_as_it_stands(capsys):
    block = [body for kind, body in FENCES if kind == "python"][1]
    exec(compile(block, "verify.md", "exec"), {"__name__": "page"})
    assert capsys.readouterr().out.startswith("within rounding: 3 steps")


def test_the_page_of_rules_is_what_the_verdict_says():
    page = (ROOT / "docs" / "rules.md").read_text(encoding="utf-8")
    assert page == document(), "python -m shardbook.verifying.explanations > docs/rules.md"
    assert re.findall(r"^## (.+)$", page, re.MULTILINE) == list(EXPLANATIONS)


def test_phases_and_options_are_all_explained(capsys):
    for phase, meaning in MEANINGS.items():
        assert f"| {phase} | {meaning} |" in TEXT
    with pytest.raises(SystemExit):
        run(["verify", "--help"])
    options = set(re.findall(r"--[a-z0-9]+", capsys.readouterr().out)) - {"--help"}
    assert options
    assert [option for option in sorted(options) if f"`{option}" not in TEXT] == []
