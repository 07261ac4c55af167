"""The examples of docs/forecast.md: what is shown is what the command says, and every other command line is understood."""

import re
import shlex
from pathlib import Path

import pytest

from shardbook.cli.main import run

TEXT = (Path(__file__).parents[1] / "docs" / "forecast.md").read_text(encoding="utf-8")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_WIDTH = "200"  # nothing is broken into two lines


def examples():
    """(command line, what is shown of its output: "" where nothing is), in the order of the page."""
    fences = _FENCE.findall(TEXT)
    for (kind, body), (following, shown) in zip(fences, [*fences[1:], ("sh", "")], strict=True):
        if kind == "sh":
            lines = [line for line in body.splitlines() if line.startswith("shardbook ")]
            yield from ((line, "") for line in lines[:-1])
            yield lines[-1], "" if following else shown


def matches(shown, line):
    """``...`` stands for any text, and cells of a table may be wider than on the page."""
    pattern = r"\s+".join(".*".join(re.escape(part) for part in word.split("...")) for word in shown.split())
    return re.fullmatch(pattern, " ".join(line.split())) is not None


def missing(shown, said):
    """The first line of what is shown that does not follow in what was said; None: all do."""
    rest = iter(said.replace("┃", "│").splitlines())
    wanted = [line for line in shown.splitlines() if line != "..."]
    return next((line for line in wanted if not any(matches(line, other) for other in rest)), None)


@pytest.mark.parametrize(("command", "shown"), list(examples()))
def test_an_example_says_what_the_page_shows(command, shown, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", _WIDTH)
    code = run(shlex.split(command)[1:])
    said = capsys.readouterr()
    assert code in (0, 1)
    assert said.err == ""
    assert missing(shown, said.out) is None


def test_the_page_has_examples_with_and_without_output():
    found = list(examples())
    assert sum(bool(shown) for _, shown in found) >= 5
    assert sum(not shown for _, shown in found) >= 4


@pytest.mark.parametrize(
    ("shown", "said", "first"),
    [
        ("a 1\n...\nb ...", "x\na   1\ny\nb 2 3\n", None),
        ("b 2\na 1", "a 1\nb 2\n", "a 1"),
        ("a 1", "a 12\n", "a 1"),
        ("│ a │", "┃ a ┃", None),
    ],
)
def test_the_comparison_itself(shown, said, first):
    assert missing(shown, said) == first
