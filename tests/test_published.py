"""The rules that turn published rows into questions, and the scores: on rows written here, as the tables lie outside of the project."""

from pathlib import Path
from typing import Any

import pytest

import shardbook as sb
from benchmarks import published, published_rows
from benchmarks.published_rows import NotModelledError, Row

COLUMNS = [
    "id",
    "source",
    "source_ref",
    "kind",
    "score",
    "model",
    "params",
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "ffn",
    "vocab",
    "seq_len",
    "micro_batch",
    "grad_accum",
    "n_gpus",
    "dp",
    "zero_or_fsdp",
    "tp",
    "pp",
    "cp",
    "ep",
    "experts",
    "precision",
    "optimizer",
    "offload",
    "act_ckpt",
    "finetune",
    "gpu",
    "metric",
    "value_gib",
    "notes",
]

TITAN = {
    "source": "torchtitan", "kind": "measured", "score": "reserved", "model": "Llama-3.1-8B", "seq_len": "8192", "micro_batch": "2",
    "n_gpus": "8", "zero_or_fsdp": "FSDP2 (z3)", "act_ckpt": "selective-op", "gpu": "H100-96GB", "metric": "max_reserved",
    "precision": "bf16 params/compute, fp32 sharded params+grads reduce (FSDP2 mp policy)", "optimizer": "AdamW", "value_gib": "82.4",
}  # fmt: skip
TUNE = {
    "source": "torchtune", "kind": "measured", "score": "active", "model": "Llama-3.2-3B", "seq_len": "4096", "micro_batch": "2",
    "n_gpus": "1", "zero_or_fsdp": "none", "act_ckpt": "none", "gpu": "A100-80", "metric": "peak_active", "precision": "bf16-true",
    "optimizer": "AdamW", "finetune": "full", "value_gib": "60.0",
}  # fmt: skip
MEGATRON = {
    "source": "Megatron-LM golden values", "kind": "measured", "score": "allocated", "model": "gpt:one_run", "layers": "12",
    "hidden": "512", "heads": "8", "seq_len": "1024", "micro_batch": "4", "grad_accum": "8", "n_gpus": "4", "dp": "4",
    "zero_or_fsdp": "dist-optimizer (z1)", "tp": "1", "pp": "1", "cp": "1", "ep": "1", "precision": "bf16",
    "optimizer": "Adam fp32 (Megatron main params/grads)", "act_ckpt": "none", "gpu": "dgx_gb200", "value_gib": "4.4716",
    "metric": "max_allocated (allocated_bytes.all.peak, since start)", "notes": "small CI model",
}  # fmt: skip


def row(base: dict[str, str], **cells: Any) -> Row:
    return {**dict.fromkeys(COLUMNS, ""), **base, **{name: str(value) for name, value in cells.items()}}


def reason(base: dict[str, str], **cells: Any) -> str:
    with pytest.raises(NotModelledError) as caught:
        published_rows.asked(row(base, **cells))
    return str(caught.value)


def test_fsdp2_with_torchtitans_code() -> None:
    asked = published_rows.asked(row(TITAN))
    assert (asked.engine, asked.ranks, asked.device, asked.config.stage) == ("fsdp2", 8, "h100-96gb", 3)
    assert (asked.choices.implementation, asked.config.recompute.policy) == ("torchtitan", "selective")
    assert (asked.config.precision.param, asked.config.precision.master_dtype) == ("bf16", "fp32")


def test_cumulative_rows_inherit_what_came_before() -> None:
    """A row that adds chunked cross-entropy to a compiled run is compiled itself; a row before it is not."""
    rows = [row(TUNE, notes=f"{added} (cumulative)") for added in ("+packed", "+compile", "+chunked CE")]
    found = [published_rows.asked(each).choices for each in published_rows.unrolled(rows)]
    assert [(each.compiled, each.loss) for each in found] == [(False, "full"), (True, "full"), (True, "chunked")]


def test_megatrons_defaults() -> None:
    """Nothing is stated but sizes: GELU of 4h, LayerNorm, biases, GPT-2's vocabulary padded to 128 times the tensor-parallel degree."""
    asked = published_rows.asked(row(MEGATRON, tp=2))
    facts = asked.model
    assert not isinstance(facts, str)
    assert facts.architecture is not None
    a = facts.architecture
    assert (a.ffn, a.norm, a.gated, a.qkv_bias, a.vocab, a.learned_positions, a.dropout, a.tied) == (
        2048, "layer", False, True, 50432, 1024, 0.1, True,
    )  # fmt: skip
    assert (asked.engine, asked.config.stage, asked.choices.fused_gradients, asked.choices.sequence_parallel) == (
        "megatron",
        1,
        False,
        False,
    )


@pytest.mark.parametrize(
    ("name", "kernel"), [("gpt:one_run", "eager"), ("gpt:one_resume_torch_dist", "auto"), ("gpt:a_memory_speed", "auto")]
)
def test_tests_of_one_run_have_unfused_attention(name: str, kernel: str) -> None:
    assert published_rows.asked(row(MEGATRON, model=name)).choices.attention == kernel


def test_sizes_that_a_row_states_stand_before_the_catalogs() -> None:
    facts = published_rows.asked(row(TITAN, layers=8)).model
    assert not isinstance(facts, str)
    assert facts.architecture is not None
    assert (facts.architecture.layers, facts.architecture.hidden) == (8, 4096)
    assert published_rows.asked(row(TITAN, layers=32)).model == "llama-3.1-8b"


def test_the_rank_of_adapters_follows_from_what_was_trained() -> None:
    cells = {"source": "litgpt", "model": "Llama 2 7 B", "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 32, "seq_len": 1304}
    choices = published_rows.asked(row(TUNE, **cells, finetune="LoRA trainable=4,194,304")).choices
    assert (choices.lora_rank, choices.lora_targets) == (8, "attention")
    assert "other layers" in reason(TUNE, **cells, finetune="LoRA trainable=4,194,305")


@pytest.mark.parametrize(
    ("base", "cells", "words"),
    [
        (MEGATRON, {"pp": 2}, "pipeline"),
        (MEGATRON, {"model": "gpt:a_muon"}, "Muon"),
        (MEGATRON, {"zero_or_fsdp": "Megatron-FSDP optim_grads_params"}, "Megatron-FSDP"),
        (TITAN, {"notes": "compile+fp8"}, "8-bit"),
        (TITAN, {"act_ckpt": "unstated(default)"}, "not stated"),
        (TITAN, {"model": "a model that nobody knows"}, "catalog"),
        (TUNE, {"finetune": "QLoRA"}, "quantised"),
        (TUNE, {"offload": "CPU"}, "offload"),
        (TUNE, {"micro_batch": ""}, "micro_batch"),
    ],
)
def test_what_is_not_modelled_is_said(base: dict[str, str], cells: dict[str, Any], words: str) -> None:
    assert words in reason(base, **cells)


def test_every_kth_block() -> None:
    assert published_rows.asked(row(TITAN, act_ckpt="selective-2")).config.recompute == sb.Recompute(policy="full", every=2)


def test_what_a_forecast_refuses_is_listed_with_its_words() -> None:
    (found,) = published.compare([row(TITAN, seq_len=10**7)])
    assert found.reason.startswith("refused: sequence = 10000000")
    assert published.Score.of([found]).modelled == 0


def test_the_drivers_counter_is_refused() -> None:
    with pytest.raises(NotModelledError, match="driver"):
        published_rows.counter(row(TITAN, metric="device memory used (driver)"))


def test_published_rows_of_each_counter() -> None:
    """Three published figures, of torchtitan, torchtune and Megatron-LM."""
    found = published.compare([row(TITAN), row(TUNE, notes="+packed (cumulative)"), row(MEGATRON)])
    assert [each.counter for each in found] == ["reserved", "active", "allocated"]
    assert [round(each.error, 3) for each in found] == pytest.approx([0, 0, 0], abs=0.06)
    score = published.Score.of(found)
    assert (score.rows, score.modelled, score.within) == (3, 3, 1.0)


def test_a_run_that_was_feasible_is_not_said_not_to_fit() -> None:
    cells = {
        "model": "MPT-1b", "seq_len": "2048", "n_gpus": "8", "gpu": "a100_80gb", "micro_batch": "12", "grad_accum": "4",
        "precision": "amp_bf16", "mp_mode": "DEFAULT", "sharding": "FULL_SHARD", "act_ckpt": "False", "num_params": "1315950592",
    }  # fmt: skip
    (ran,) = published.verdicts([cells], feasible=True)
    assert ran.verdict == "fits"
    assert ran.needed_gib[0] > 40
    (other,) = published.verdicts([{**cells, "num_params": "1315950593"}], feasible=True)
    assert other.verdict is None
    assert "another model" in other.reason


def test_without_the_tables_the_section_says_so(tmp_path: Path) -> None:
    found = published.section(data=tmp_path)
    assert "Not run" in found.text[0]
    assert found.promises == []
