"""``shardbook forecast --simulate``: both witnesses beside each other, and one line for whatever cannot be simulated."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import shardbook as sb
from shardbook.errors import ConfigError
from shardbook.facts.catalog import names
from shardbook.facts.find import resolve
from shardbook.forecasting.result import Replayed
from shardbook.models.config import DecoderConfig
from shardbook.report.forecast_simulated import difference, replayed_line
from shardbook.simulation.build import decoder_config, not_own, parts_of
from tests.forecast_command import assert_refused, forecast, forecast_without_torch

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
BATCH = ("--micro-batch", "2", "--sequence", "32")
STEP = ("--ranks", "4", *BATCH, "--simulate")
MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.head = nn.Linear(32, 64)

    def forward(self, inputs, targets):
        x = self.embedding(inputs)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())

def build():
    return Model()
"""


@pytest.fixture
def llama(tmp_path):
    path = tmp_path / "tiny" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(LLAMA))
    return path


def written(tmp_path, text):
    path = tmp_path / "model.py"
    path.write_text(text)
    return f"{path}:build"


def answered(capsys, *arguments):
    code, out, err = forecast(capsys, *arguments, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


# ---- what is said ----------------------------------------------------------------------------------------------------------


def test_the_tables_show_both_witnesses_the_first_step_and_what_is_assumed(capsys, llama, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    code, out, err = forecast(capsys, llama, *STEP, "--implementation", "shardbook")
    assert (code, err) == (0, "")
    for said in (
        "two witnesses, MB", "closed form", "simulation", "difference", "first step: peak ", "; later steps: ", "as rank 0 of 4",
        "the model: shardbook's own decoder", "at the peak ran ", "assumed: gradients are finite", "largest storages at the peak",
    ):  # fmt: skip
        assert said in out, said
    assert "saved by partitioning" not in out


def test_both_witnesses_are_in_the_json_and_agree_on_state(capsys, llama):
    found = answered(capsys, llama, *STEP, "--implementation", "shardbook", "--stage", "2", "--precision", "bf16")
    closed = found["closed_form"]
    assert (found["witness"], closed["witness"]) == ("simulation", "closed form")
    assert (found["simulated"]["rank"], closed["simulated"]) == (0, None)
    assert found["simulated"]["later_peak"] == found["peak_allocated"]
    for account in ("PARAM", "MASTER", "MOMENT", "GRAD"):
        assert found["accounts"].get(account, 0) == closed["accounts"].get(account, 0)
    assert abs(found["peak_allocated"] / closed["peak_allocated"] - 1) < 0.03
    same = ("model", "num_parameters", "engine", "ranks", "stage", "largest_unit", "state", "weights")
    assert {name: found[name] for name in same} == {name: closed[name] for name in same}
    assert (found["inputs"]["micro_batch"], found["inputs"]["sequence"]) == (2, 32)


def test_the_command_asks_what_the_library_asks(capsys, llama):
    from torch.optim import SGD

    found = answered(
        capsys, llama, *STEP, "--implementation", "shardbook", "--optimizer", "sgd-momentum", "--kernel", "foreach", "--rank", "3",
        "--stage", "1", "--accumulate", "2",
    )  # fmt: skip
    parts = parts_of(resolve(str(llama)), micro_batch=2, sequence=32, implementation="shardbook")
    told = sb.simulate(
        parts.build_model, parts.build_batch, sb.ZeroConfig(stage=1, accumulate=2), ranks=4, rank=3,
        optimizer=lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, foreach=True),
    )  # fmt: skip
    assert found["simulated"]["rank"] == 3
    assert found["accounts"] == dict(told.accounts)
    assert found["peak_allocated"] == told.peak_allocated


@pytest.mark.full
def test_what_to_turn_next_is_the_closed_forms_where_both_see_the_same_bottleneck(capsys):
    found = answered(capsys, "smollm2-135m", "--ranks", "8", "--micro-batch", "1", "--sequence", "256", "--simulate")
    closed = found["closed_form"]
    assert found["dominant"] == closed["dominant"] == "ACTIVATION"
    assert found["step_forward"] == closed["step_forward"] is not None
    assert found["next_dominant"] == closed["next_dominant"]


def assert_others_own_code_ran(found, engine, code):
    assert code in found["source"]
    assert found["engine"] == found["closed_form"]["engine"] == engine
    assert found["stage"] == found["closed_form"]["stage"]
    assert found["peak_allocated"] > found["persistent"] > 0


def test_fsdp2_runs_its_own_code_and_holds_more_where_it_keeps_its_units_gathered(capsys, llama):
    freed = answered(capsys, llama, *STEP, "--implementation", "shardbook", "--engine", "fsdp2")
    kept = answered(capsys, llama, *STEP, "--implementation", "shardbook", "--engine", "fsdp2", "--no-reshard")
    for found in (freed, kept):
        assert_others_own_code_ran(found, "fsdp2", "FSDP2's own code")
    assert kept["peak_allocated"] > freed["peak_allocated"]


@pytest.mark.full
def test_ddp_runs_its_own_code(capsys, llama):
    found = answered(capsys, llama, *STEP, "--implementation", "shardbook", "--engine", "ddp")
    assert_others_own_code_ran(found, "ddp", "DistributedDataParallel's own code")


def test_a_device_has_an_allocator_of_its_own_and_a_verdict(capsys, llama):
    device = ("--device", "h100-80gb")
    code, out, err = forecast(capsys, llama, *STEP, "--implementation", "shardbook", *device)
    assert (code, err) == (0, "")
    assert "caching allocator, replayed: reserves " in out
    assert "fits: needs " in out
    found = answered(capsys, llama, *STEP, "--implementation", "shardbook", *device, "--allocator", "expandable_segments:True")
    replayed = found["simulated"]["replayed"]
    assert replayed["settings"] == "expandable_segments:True"
    assert replayed["reserved"] >= replayed["allocated"] > 0


def test_what_does_not_fit_has_exit_code_1(capsys, llama):
    code, _, err = forecast(capsys, llama, *STEP, "--implementation", "shardbook", "--device", "4MiB")
    assert (code, err) == (1, "")


def test_explain_and_a_page_go_with_it(capsys, llama, tmp_path):
    page = tmp_path / "both.html"
    pytest.importorskip("altair")
    code, out, err = forecast(capsys, llama, *STEP, "--implementation", "shardbook", "--explain", "--save", page)
    assert (code, err) == (0, f"written to {page}\n")
    assert "every term" in out
    text = page.read_text()
    for said in ("Side by side: witness", "two witnesses, MB", "largest storages at the peak", "assumed: "):
        assert said in text


# ---- whose model -----------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_config_json_is_built_by_transformers_where_it_is_there(capsys, llama):
    found = answered(capsys, llama, *STEP)
    assert found["source"].endswith("; the model: transformers")
    assert found["num_parameters"] == found["closed_form"]["num_parameters"]
    assert abs(found["peak_allocated"] / found["closed_form"]["peak_allocated"] - 1) < 0.03
    assert any("transformers" in line for line in found["simulated"]["assumptions"])


def test_a_family_that_only_transformers_has(capsys, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, "model_type": "qwen2"}))
    found = answered(capsys, path, *STEP, "--stage", "1")
    assert found["num_parameters"] == found["closed_form"]["num_parameters"]


def batch_nbytes(found):
    return max(phase["accounts"].get("INPUT", 0) for phase in found["phases"])


def test_somebodys_function_and_its_own_batch(capsys, tmp_path):
    usual = answered(capsys, written(tmp_path, MODEL), *STEP)
    assert usual["source"].endswith("model.py:build")
    assert not usual["closed_form"]["is_peak"]
    doubled = MODEL + (
        "\ndef batch(micro_batch, sequence):\n"
        "    return {name: torch.zeros(2 * micro_batch, sequence, dtype=torch.long) for name in ('inputs', 'targets')}\n"
    )
    mine = answered(capsys, written(tmp_path, doubled), *STEP)
    assert batch_nbytes(mine) == 2 * batch_nbytes(usual) == 2 * 2 * 2 * 32 * 8
    code, out, _ = forecast(capsys, written(tmp_path, MODEL), *STEP)
    assert code == 0
    assert "the closed form knows the persistent bytes of this model alone; not a peak" in " ".join(out.split())


def test_own_decoder_has_the_catalogs_parameters():
    own = [name for name in names() if not not_own(resolve(name).architecture)]
    assert {"llama-2-7b", "llama-3.1-405b", "mistral-7b", "smollm2-360m", "llama-3.2-1b"} <= set(own)
    for name in own:
        assert decoder_config(resolve(name)).num_parameters == resolve(name).num_parameters


@pytest.mark.parametrize(
    ("name", "fact"),
    [
        ("gpt2", "norm = layer, gated = False"), ("mixtral-8x7b", "experts = 8"), ("qwen2.5-7b", "qkv_bias = True"),
        ("qwen3-8b", "qk_norm = head"), ("gemma-2-9b", "norms_per_block = 4"), ("deepseek-v3", "latent = yes"),
        ("phi-4-14b", "fused_qkv = True"), ("olmo2-7b", "norms_behind = True"),
    ],
)  # fmt: skip
def test_a_model_that_nothing_here_builds_says_which_fact_stands_against_it(capsys, name, fact):
    found = forecast(capsys, name, *STEP)
    assert_refused(found, fact)
    assert_refused(
        found, "two ways out: the model's config.json with transformers installed (pip install 'shardbook[hf]'), or file.py:build"
    )


def test_without_transformers_own_decoder_stands_in_where_it_can(llama, monkeypatch):
    monkeypatch.setattr("shardbook.simulation.build.find_spec", lambda name: None if name == "transformers" else find_spec(name))
    facts = resolve(str(llama))
    assert parts_of(facts, micro_batch=1, sequence=8, path=llama).code == "shardbook's own decoder"
    assert decoder_config(facts) == DecoderConfig(vocab=512, layers=3, width=64, heads=4, kv_heads=2, ffn=160)
    llama.write_text(json.dumps({**LLAMA, "model_type": "qwen2"}))
    with pytest.raises(ConfigError, match="qkv_bias = True"):
        parts_of(resolve(str(llama)), micro_batch=1, sequence=8, path=llama)


# ---- what is refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--engine", "deepspeed"), "--engine deepspeed with --simulate: allowed is shardbook or fsdp2 or ddp"),
        (("--engine", "megatron"), "--engine megatron with --simulate"),
        (("--tensor", "3"), "--tensor 3 with --simulate: allowed is 1"),
        (("--context", "2"), "--context 2 with --simulate: allowed is 1"),
        (("--convention", "2+2+4+8"), "--convention with --simulate"),
        (("--state", "1GiB"), "--state with --simulate"),
        (("--activations", "1GiB"), "--activations with --simulate"),
        (("--temporary", "1GiB"), "--temporary with --simulate"),
        (("--attention", "eager"), "--attention eager with --simulate: allowed is auto or flash"),
        (("--loss", "chunked"), "--loss chunked with --simulate: allowed is full"),
        (("--optimizer", "adamw-8bit"), "--optimizer adamw-8bit with --simulate"),
        (("--lora-rank", "8"), "--lora-rank 8 with --simulate"),
        (("--no-reshard",), "--no-reshard with --engine shardbook: allowed is fsdp2"),
        (("--implementation", "torchtitan"), "implementation = 'torchtitan': allowed is shardbook or transformers"),
        (("--implementation", "transformers"), "transformers builds a model from its config.json"),
        (("--engine", "fsdp2", "--recompute", "full"), "recompute.policy"),
        (("--sweep", "ranks=1,2"), "--sweep with --simulate"),
        (("--compare-stages",), "--compare-stages with --simulate"),
        (("--rank", "6"), "rank = 6: allowed is 0 to 5"),
        (("--rank", "x"), "--rank 'x': allowed is a whole number"),
        (("--allocator", "expandable_segments:True"), "a CPU has no caching allocator"),
        (("--device", "h100-80gb", "--allocator", "expandable_segment:True"), "expandable_segment"),
    ],
)
def test_options_that_a_simulation_does_not_have_are_refused_in_one_line(capsys, options, said):
    assert_refused(forecast(capsys, "smollm2-135m", "--ranks", "6", *BATCH, "--simulate", *options), said)


def test_a_step_needs_a_batch_and_a_model(capsys):
    assert_refused(forecast(capsys, "smollm2-135m", "--simulate"), "--simulate without --micro-batch")
    assert_refused(forecast(capsys, "7e9", *STEP), "a number of parameters says nothing of the operators")


def test_options_of_a_simulation_need_one(capsys):
    assert_refused(forecast(capsys, "7e9", "--rank", "1"), "--rank 1: allowed is it with --simulate")
    assert_refused(forecast(capsys, "7e9", "--allocator", "x"), "add --simulate")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("x = block(x)", "x = block(x) if x.sum() > 0 else x", "model.py:15 in forward: `x = block(x) if x.sum() > 0 else x`"),
        ("x = block(x)", "x = block(x, 1)", "in forward: `x = block(x, 1)` raised TypeError"),
        ("return nn.functional", "return x, nn.functional", "loss"),
    ],
)
def test_what_is_wrong_in_somebodys_file_is_one_line(capsys, tmp_path, old, new, said):
    assert_refused(forecast(capsys, written(tmp_path, MODEL.replace(old, new)), *STEP), said)


def test_without_torch_it_says_so_and_the_closed_form_still_answers():
    found = forecast_without_torch("smollm2-135m", *STEP)
    assert (found.returncode, found.stdout, found.stderr.count("\n")) == (2, "", 1)
    assert "needs torch, and it is not here: pip install 'shardbook[train]'" in found.stderr


# ---- words -----------------------------------------------------------------------------------------------------------------


def test_differences_are_exact_and_signed():
    assert [difference(nbytes) for nbytes in (0, 1, -2048)] == ["none", "+1 B", "-2,048 B"]


def test_what_the_allocator_reserves_is_said_with_its_settings():
    told = Replayed(settings="expandable_segments:True", reserved=2 * 10**9, allocated=10**9, fragmented=0.25)
    said = replayed_line(told)
    assert said.startswith("caching allocator with expandable_segments:True, replayed: reserves 2.0 GB (1.9 GiB) for 1.0 GB (0.9 GiB)")
    assert said.endswith("; 25.0% of it unused when most is reserved; not validated")


# ---- cost ------------------------------------------------------------------------------------------------------------------

COST = """
import resource, sys, time
from shardbook.cli.main import run
code = run(sys.argv[1:])
print(code, time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
"""


def cost(*arguments):
    """What is said, processor seconds from the start of the interpreter on, and GiB resident: a busy machine adds little to
    either, but may double the first; `make evidence-simulation` has the figures."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1] / "src")}
    command = [sys.executable, "-P", "-c", COST, "forecast", *arguments, "--micro-batch", "1", "--sequence", "4096", "--simulate", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    code, seconds, kib = done.stderr.split()
    assert code == "0", done.stderr
    return json.loads(done.stdout), float(seconds), int(kib) / 2**20


@pytest.mark.parametrize(
    ("arguments", "most"),
    [
        (("llama-2-7b", "--ranks", "64"), 12.0),
        pytest.param(("llama-3.1-405b", "--ranks", "16384"), 30.0, marks=pytest.mark.full),
    ],
)
def test_large_models_on_many_ranks_take_seconds_and_little_memory(arguments, most):
    found, seconds, gib = cost(*arguments)
    assert seconds < most
    assert gib < 2.0
    assert abs(found["peak_allocated"] / found["closed_form"]["peak_allocated"] - 1) < 0.005
