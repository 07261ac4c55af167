"""The catalog: every row's parameters follow from the architecture, to the element."""

import csv
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardbook.errors import ConfigError
from shardbook.facts import catalog
from shardbook.facts.architecture import Architecture, Experts
from shardbook.facts.parameters import active_parameters, block_shapes, model_facts, units_of

ROWS = list(catalog.rows().values())
SMALL = Architecture(family="llama", layers=3, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=96, vocab=40)


def test_there_are_65_models():
    assert len(catalog.names()) == len(set(catalog.names())) == len(ROWS) == 65


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_every_row_follows_from_its_architecture(row):
    facts = catalog.facts(row["name"])
    architecture = facts.architecture
    blocks = [unit for unit in units_of(architecture, large=0) if unit.name.startswith("blocks.")]
    assert facts.num_parameters == sum(unit.numel for unit in facts.units) == int(row["total_params"])
    assert active_parameters(architecture) == int(row["active_params"])
    assert max(unit.numel for unit in blocks) == int(row["largest_block_params"])
    assert facts.largest_tensor.numel == int(row["largest_tensor"])
    (embedding,) = [each for each in facts.parameters() if each.name == "embedding.weight"]
    assert embedding.numel == int(row["embedding_params"])
    assert len(blocks) == architecture.layers == int(row["layers"])
    assert architecture.max_seq == int(row["max_seq"])
    assert ("head.weight" in [each.name for each in facts.parameters()]) == (row["tied"] == "False")


def test_rows_say_what_the_shared_data_say():
    """Only where the shared copy is there: the shipped file differs from it in words, never in a number."""
    shared = Path(__file__).parents[2] / "shared" / "data" / "models.csv"
    if not shared.exists():
        pytest.skip("the shared copy is not here")
    with shared.open(encoding="utf-8") as file:
        theirs = list(csv.DictReader(file))
    numbers = [name for name in ROWS[0] if name not in ("source", "notes")]
    assert [{name: row[name] for name in numbers} for row in theirs] == [{name: row[name] for name in numbers} for row in ROWS]


def test_upper_and_lower_case_are_the_same():
    assert catalog.facts("LLAMA-3.1-8B ") == catalog.facts("llama-3.1-8b")


@pytest.mark.parametrize(
    ("name", "said"), [("llama-3.1-9b", "llama-3.1-8b"), ("gpt2-extra", "gpt2"), ("qwen3_8b", "qwen3-8b"), ("zzz", "known are gpt2")]
)
def test_an_unknown_name_is_told_the_nearest(name, said):
    with pytest.raises(ConfigError, match="the catalog has no such model") as caught:
        catalog.facts(name)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_largest_model_takes_a_moment():
    catalog.facts("gpt2")
    seconds = min(timed("llama-3.1-405b") for _ in range(5))
    assert seconds < 0.01, f"{seconds * 1e3:.1f} ms"


def timed(name):
    start = time.perf_counter()
    catalog.facts(name)
    return time.perf_counter() - start


def test_facts_need_no_torch():
    source = """
import sys
class Shut:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "numpy"):
            raise ImportError(name)
sys.meta_path.insert(0, Shut())
from shardbook.facts import adapters, catalog, find, hardware, huggingface, module, parameters
print(find.resolve("llama-3.1-405b").num_parameters)
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "405853388800"


# ---- units ---------------------------------------------------------------------------------------------------------------


def test_a_large_embedding_and_head_are_units():
    names = [unit.name for unit in units_of(SMALL)]
    assert names == ["root", "embedding", "blocks.0", "blocks.1", "blocks.2", "head"]


def test_a_small_embedding_and_head_are_the_roots():
    """Llama 2 70B: 262 million of 69 billion elements are less than 1/64."""
    facts = catalog.facts("llama-2-70b")
    assert [each.name for each in facts.units[0].parameters] == ["embedding.weight", "norm.weight", "head.weight"]
    assert len(facts.units) == 81
    assert [unit.name for unit in units_of(facts.architecture, large=0)][:2] == ["root", "embedding"]
    assert [each.name for each in units_of(facts.architecture, large=0)[0].parameters] == ["norm.weight"]


def test_the_border_is_inclusive():
    """An embedding of exactly 1/64 of all elements is a unit, one element less is not."""
    embedding = SMALL.vocab * SMALL.hidden
    rest = sum(unit.numel for unit in units_of(SMALL)) - 2 * embedding
    share = embedding / (rest + 2 * embedding)
    assert "embedding" in [unit.name for unit in units_of(SMALL, large=share)]
    assert "embedding" not in [unit.name for unit in units_of(SMALL, large=share * 1.0001)]


def test_blocks_share_their_shapes():
    units = catalog.facts("llama-3.1-405b").units
    blocks = [unit for unit in units if unit.name.startswith("blocks.")]
    assert len({tuple(id(each.shape) for each in unit.parameters) for unit in blocks}) == 1


def test_names_follow_the_order_of_registration():
    names = [name for name, _ in block_shapes(SMALL, 0)]
    assert names == [
        "attention_norm.weight",
        "attention.query.weight",
        "attention.key.weight",
        "attention.value.weight",
        "attention.out.weight",
        "feed_forward_norm.weight",
        "feed_forward.gate.weight",
        "feed_forward.up.weight",
        "feed_forward.down.weight",
    ]


def test_experts_come_after_the_dense_blocks():
    experts = Experts(count=4, top_k=2, ffn=8, shared_ffn=16, dense_layers=1)
    mixed = Architecture(family="mixed", layers=3, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=96, vocab=40, experts=experts)
    shapes = [dict(block_shapes(mixed, index)) for index in range(3)]
    assert "feed_forward.gate.weight" in shapes[0]
    assert shapes[1] == shapes[2]
    assert shapes[1]["feed_forward.experts.gate_up"] == (4, 16, 64)
    facts = model_facts(mixed, name="mixed", source="here")
    routed = 4 * 3 * 64 * 8
    assert active_parameters(mixed) == facts.num_parameters - 2 * routed // 2


@pytest.mark.parametrize(
    ("field", "value"), [("layers", 0), ("layers", 10**6), ("hidden", -1), ("vocab", 2.5), ("kv_heads", 3), ("norms_per_block", 3)]
)
def test_a_wrong_size_is_named(field, value):
    sizes = {"family": "llama", "layers": 3, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 96, "vocab": 40}
    with pytest.raises(ConfigError, match=f"Architecture.{field} = {value}"):
        Architecture(**{**sizes, field: value})
