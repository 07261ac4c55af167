"""A stage is a rule of residency: outside that table, nothing in the engine may ask which stage is on.

What counts as asking: a name or attribute ``stage`` in a comparison, a condition, a ``match``, a subscript, arithmetic, or as
the key of ``.get``. Handing the stage on, or printing it, is not asking.
"""

import ast
from pathlib import Path

import pytest

ENGINE = Path(__file__).parents[1] / "src" / "shardbook" / "engine"
TABLE = "residency.py"


def _names_stage(node: ast.AST) -> bool:
    """Whether the value is a stage: a name, an attribute or ``getattr(x, "stage")``, perhaps inside a tuple or a call of ``int``."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name == "stage" or name.endswith("_stage")
        case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value="stage"), *_]):
            return True
        case ast.Call(func=ast.Name(id="int" | "bool" | "str"), args=[inner]):
            return _names_stage(inner)
        case ast.Tuple(elts=entries):
            return any(map(_names_stage, entries))
        case _:
            return False


def _asked(node: ast.AST) -> list[ast.expr]:
    """The values that a node decides by."""
    match node:
        case ast.Compare(left=left, comparators=others):
            return [left, *others]
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) | ast.Assert(test=test):
            return [test]
        case ast.BoolOp(values=values):
            return values
        case ast.UnaryOp(operand=operand):
            return [operand]
        case ast.BinOp(left=left, right=right, op=op) if not isinstance(op, ast.Mod):
            return [left, right]
        case ast.BinOp(left=left):  # "%" also formats text, whose left side is no stage
            return [left]
        case ast.Match(subject=subject):
            return [subject]
        case ast.Subscript(slice=key):
            return [key]
        case ast.Call(func=ast.Attribute(attr="get"), args=[key, *_]):
            return [key]
        case ast.comprehension(ifs=tests):
            return tests
        case _:
            return []


def branches(source: str) -> list[int]:
    """Lines that ask which stage is on."""
    return sorted({node.lineno for root in ast.walk(ast.parse(source)) for node in _asked(root) if _names_stage(node)})


def test_no_branch_on_the_stage_outside_the_residency_table():
    files = [path for path in sorted(ENGINE.rglob("*.py")) if path.name != TABLE]
    assert files
    assert (ENGINE / TABLE).exists()
    found = [f"{path.name}:{line}" for path in files for line in branches(path.read_text(encoding="utf-8"))]
    assert not found, f"ask a Residency instead: {found}"


@pytest.mark.parametrize(
    "source",
    [
        "if config.stage == 3: pass",
        "if 3 <= self.config.stage: pass",
        "x = 1 if stage in (1, 2) else 0",
        "while stage: pass",
        "ok = not config.stage",
        "match config.stage:\n    case 3: pass",
        "match (stage, n):\n    case (3, _): pass",
        "run = RUN[config.stage]",
        "run = RUN.get(config.stage)",
        "assert zero_stage != 3",
        "shards = config.stage > 1 and n",
        "share = config.stage and n",
        "half = stage // 2",
        "odd = stage % 2",
        "x = [u for u in units if stage]",
        'if getattr(config, "stage") > 1: pass',
        "if int(stage) > 1: pass",
    ],
)
def test_every_way_of_asking_is_seen(source):
    assert branches(source) == [1]


@pytest.mark.parametrize(
    "source",
    [
        "residency = residency_of(config.stage)",
        'text = f"stage {config.stage}"',
        "stage = config.stage",
        "if residency.full_parameters: pass",
    ],
)
def test_handing_on_is_not_asking(source):
    assert branches(source) == []
