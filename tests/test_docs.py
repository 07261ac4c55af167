"""What the documents name exists: files, make targets, commands, anchors. What they show runs."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
# Where a path in prose may start: at the root, or where the reader is in the source.
BASES = (ROOT, ROOT / "src" / "shardbook", ROOT / "src" / "shardbook" / "engine")
# Names of files that a run or a reader makes, and names that are warned against.
NOT_OURS = {"run.json", "config.json", "recipe.toml", "file.py", "train.py", "utils.py", "model.safetensors.index.json"}

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FILE = re.compile(r"^[\w.-]*(?:/[\w.-]+)*\.(?:py|pyi|md|toml|txt|json|yml|sh)$")


def prose(text: str) -> str:
    return _FENCE.sub("", text)


def fences(text: str, language: str) -> list[str]:
    return [body for kind, body in _FENCE.findall(text) if kind == language]


def commands(text: str) -> Iterator[list[str]]:
    """Command lines, in fences for the shell and in spans."""
    for line in [*(line for body in fences(text, "sh") for line in body.splitlines()), *_SPAN.findall(prose(text))]:
        if words := line.split("#")[0].split():
            yield words


def missing_files(document: Path, text: str) -> list[str]:
    missing = [
        target
        for target in (link.split("#")[0] for link in _LINK.findall(prose(text)) if "://" not in link)
        if target and not (document.parent / target).exists()
    ]
    for span in _SPAN.findall(prose(text)):
        name = span.split(":")[0]
        if (_FILE.match(name) or name.startswith(("src/", "tests/", "docs/", "benchmarks/"))) and name not in NOT_OURS:
            found = any((base / name).exists() for base in BASES) or ("/" not in name and any((ROOT / "tests").rglob(name)))
            if not found:
                missing.append(name)
    return missing


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):(?!=)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def anchors(text: str) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


by_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


@by_document
def test_named_files_exist(document):
    assert missing_files(document, document.read_text(encoding="utf-8")) == []


@by_document
def test_named_targets_and_commands_exist(document):
    text = document.read_text(encoding="utf-8")
    named = list(commands(text))
    targets = {words[1] for words in named if words[0] == "make" and len(words) > 1}
    assert targets <= make_targets()
    subcommands = {words[1] for words in named if words[0] == "shardbook" and len(words) > 1 and words[1].isalpha()}
    assert [name for name in sorted(subcommands) if not (ROOT / "src" / "shardbook" / "cli" / f"{name}.py").exists()] == []


@by_document
def test_anchors_exist(document):
    text = document.read_text(encoding="utf-8")
    assert {link[1:] for link in _LINK.findall(text) if link.startswith("#")} <= anchors(text)


@by_document
def test_python_blocks_are_python(document):
    for block in fences(document.read_text(encoding="utf-8"), "python"):
        ast.parse(block)


def test_the_readme_examples_run_as_they_stand(capsys):
    measured, trained = fences((ROOT / "README.md").read_text(encoding="utf-8"), "python")
    exec(compile(measured, "README.md", "exec"), {"__name__": "readme"})
    assert re.search(r"'UNACCOUNTED': \d\d?}", capsys.readouterr().out)
    exec(compile(trained, "README.md", "exec"), {"__name__": "readme"})
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_the_makefile_is_whole():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    phony = set(re.search(r"^\.PHONY: (.+)$", makefile, re.MULTILINE).group(1).split())
    assert phony == make_targets()
    assert set(re.findall(r"make ([a-z-]+) ", makefile)) <= phony


def test_pinned_versions_fit_any_machine():
    lines = [line for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    assert any(line.startswith("torch==") for line in lines)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("see `src/shardbook/nowhere.py`", ["src/shardbook/nowhere.py"]),
        ("see `engine/nowhere.py`", ["engine/nowhere.py"]),
        ("see [it](docs/nowhere.md)", ["docs/nowhere.md"]),
        ("see `nowhere.py`", ["nowhere.py"]),
        ("see `config.py`, `tests/test_docs.py`, [it](docs/accounts.md) and [there](https://example.org/x.md)", []),
        ("writes `run.json`", []),
    ],
)
def test_a_file_that_is_not_there_is_seen(text, said):
    assert missing_files(ROOT / "README.md", text) == said
