"""Other estimators, asked through their own packages."""

import importlib.util

import pytest

from benchmarks import estimators, published
from benchmarks.estimators import Estimated
from shardbook.facts.find import resolve

needs_peers = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("deepspeed", "accelerate")),
    reason="DeepSpeed or accelerate is not installed: make peers",
)


def test_the_module_on_the_meta_device_has_the_parameters_of_the_facts() -> None:
    facts = resolve("gpt2")
    module = estimators.on_meta(facts)
    found = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    assert found == {each.name: each.shape for each in facts.parameters()}
    assert all(parameter.is_meta for parameter in module.parameters())


def test_a_table_has_each_estimator_and_its_error() -> None:
    row = {"id": "1", "model": "m", "n_gpus": "8"}
    compared = published.Compared(row=row, measured_gib=10, counter="reserved", forecast_gib=11)
    lines = list(estimators.table([Estimated(compared=compared, gib={"shardbook": 11, "accelerate": 5})]))
    assert "| 1 | m | 8 | reserved | 10.00 | 11.00 (+10%) |  |  | 5.00 (-50%) |  |" in lines
    assert lines[-1].startswith("| | within 15% | | | | 1 of 1 |  |  | 0 of 1 |")


@pytest.mark.peers
@needs_peers
@pytest.mark.filterwarnings("default")  # DeepSpeed's own imports warn
def test_deepspeed_counts_one_tensor_of_a_model_on_the_meta_device() -> None:
    facts = resolve("llama-2-7b")
    total, largest = estimators.deepspeed_counts(estimators.on_meta(facts))
    sizes = {parameter.numel for parameter in facts.parameters()}
    assert total in sizes
    assert total < facts.num_parameters / 50
    assert largest == 32_000 * 4096


@pytest.mark.peers
@needs_peers
@pytest.mark.filterwarnings("default")
def test_accelerate_counts_sixteen_bytes_a_parameter_in_fp32() -> None:
    facts = resolve("gpt2")
    assert estimators.accelerate(estimators.on_meta(facts), "fp32") == 16 * facts.num_parameters
