"""The rules of imports, read from the source: downwards only, and a few doors that stay shut.

Imports inside functions count, and so do those under ``TYPE_CHECKING``: a type that has to be known is a dependency of the
mind. The one exemption is the package's own ``__init__``, which names every home of a public name for type checkers and
imports none of them when it runs.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "shardbook"

# Part of the package (a module or folder right below shardbook) -> level.
LEVELS = {
    **dict.fromkeys(
        ("accounts", "events", "errors", "checks", "config", "config_files", "deepspeed", "document", "levers", "structure"), 0
    ),
    **dict.fromkeys(("facts", "tables", "replay", "tiers"), 1),
    **dict.fromkeys(("forecasting", "engine", "ledger", "models"), 2),
    **dict.fromkeys(("recording", "simulation", "checkpoint", "planner"), 3),
    **dict.fromkeys(("verifying",), 4),
    **dict.fromkeys(("train", "report"), 5),
    **dict.fromkeys(("cli", "explore"), 6),
}
# (importer, imported): shut whatever the levels say.
BANNED = {("engine", "ledger"), ("engine", "forecasting"), ("engine", "planner"), ("ledger", "engine")}
STANDARD_LIBRARY_ONLY = ("facts", "replay", "forecasting", *(part for part, level in LEVELS.items() if level == 0))


@dataclass(frozen=True)
class Import:
    """``importer`` and ``imported`` are dotted; shardbook's own come without the package's name, "" being the package itself."""

    importer: str
    imported: str
    own: bool
    line: int

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported or 'shardbook'}"


def imports_of(source: str, importer: str, *, package: bool = False) -> Iterator[Import]:
    """Every import in the text of one module; ``package`` for an ``__init__``, whose dots count from itself."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = _from_names(node, importer, package=package)
        else:
            continue
        for name in names:
            own = name.split(".")[0] == "shardbook"
            yield Import(importer, name.removeprefix("shardbook").lstrip(".") if own else name, own, node.lineno)


def _from_names(node: ast.ImportFrom, importer: str, *, package: bool) -> list[str]:
    base = node.module or ""
    if node.level:
        home = ["shardbook", *importer.split(".")]
        home = home[: len(home) - node.level + package]
        base = ".".join([*home, base] if base else home)
    # "from shardbook import config" names a module; deeper down the module is already in the base
    return [f"shardbook.{alias.name}" if alias.name in LEVELS else "shardbook" for alias in node.names] if base == "shardbook" else [base]


def fault(found: Import) -> str | None:
    """Which rule an import breaks, or None."""
    importer, imported = found.importer.split(".")[0], found.imported.split(".")[0]
    if not found.own:
        standard = imported in sys.stdlib_module_names
        closed = importer in STANDARD_LIBRARY_ONLY
        return f"{found}: {importer} uses the standard library only" if closed and not standard else None
    if imported == "":
        return None if LEVELS[importer] >= 4 else f"{found}: the public face is above it; import the module itself"
    if imported not in LEVELS:
        return f"{found}: no level is known for {imported}"
    if importer == imported:
        return None
    if (importer, imported) in BANNED:
        return f"{found}: banned"
    if LEVELS[imported] > LEVELS[importer]:
        return f"{found}: upwards, from level {LEVELS[importer]} to {LEVELS[imported]}"
    if LEVELS[imported] == LEVELS[importer] and LEVELS[importer] > 0:
        return f"{found}: sideways, between two parts of level {LEVELS[importer]}"
    return None


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def test_every_module_has_a_level():
    homeless = [name for name, _ in modules() if name and name.split(".")[0] not in LEVELS]
    assert not homeless, f"give these a level in LEVELS: {homeless}"


def test_imports_go_downwards():
    faults = []
    for name, path in modules():
        if name:
            found = imports_of(path.read_text(encoding="utf-8"), name, package=path.name == "__init__.py")
            faults += [text for one in found if (text := fault(one))]
    assert not faults, "\n".join(faults)


def test_the_public_face_imports_nothing_of_its_own_when_it_runs():
    tree = ast.parse((SOURCE / "__init__.py").read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))]
    assert [one for one in imports_of(ast.unparse(tree), "", package=True) if one.own] == []


@pytest.mark.parametrize(
    ("importer", "source", "said"),
    [
        ("engine.unit", "from shardbook.ledger.ledger import Ledger", "banned"),
        ("engine.unit", "def f():\n    import shardbook.forecasting.closed_form", "banned"),
        ("engine.engine", "from shardbook.planner import plan", "banned"),
        ("ledger.ledger", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from shardbook.engine.engine import Engine", "banned"),
        ("forecasting.closed_form", "from shardbook.engine import layout", "sideways"),
        ("forecasting.closed_form", "import torch", "standard library only"),
        ("forecasting.forecast", "import shardbook.engine.engine", "sideways"),
        ("simulation.simulate", "import torch\nfrom shardbook.engine.engine import Engine", None),
        ("engine.engine", "from shardbook.simulation.simulate import simulate", "upwards"),
        ("facts.catalog", "import numpy as np", "standard library only"),
        ("config", "from rich import print", "standard library only"),
        ("config", "from shardbook.facts import model", "upwards"),
        ("config", "from .facts import model", "upwards"),
        ("engine.unit", "from ..train.loop import run", "upwards"),
        ("engine.unit", "from .layout import spans", None),
        ("engine.unit", "from shardbook import config, errors", None),
        ("engine.unit", "import shardbook as sb", "public face"),
        ("engine.unit", "from shardbook import Engine", "public face"),
        ("engine.unit", "from shardbook.models.decoder import Decoder", "sideways"),
        ("engine.unit", "from shardbook.helpers import x", "no level"),
        ("train.loop", "import shardbook as sb, torch", None),
        ("train.loop", "from shardbook.report.console import table", "sideways"),
        ("cli.train", "from shardbook.train.loop import run", None),
    ],
)
def test_the_rules_themselves(importer, source, said):
    faults = [text for one in imports_of(source, importer) if (text := fault(one))]
    assert (said is None and not faults) or (said is not None and said in faults[0]), faults


def test_dots_of_an_init_count_from_itself():
    assert [one.imported for one in imports_of("from .unit import Unit", "engine", package=True)] == ["engine.unit"]
    assert [one.imported for one in imports_of("from .unit import Unit", "engine.engine")] == ["engine.unit"]
