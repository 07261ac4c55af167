"""Configuration: every field is checked when it is built, and a fault says field, value, what is allowed and the remedy."""

import pickle
import subprocess
import sys
import warnings
from contextlib import suppress
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardbook.config import Offload, Precision, Prefetch, Recompute, ZeroConfig
from shardbook.errors import ConfigError


def fault(kind, **settings) -> str:
    with pytest.raises(ConfigError) as caught:
        kind(**settings)
    return str(caught.value)


# ---- fields ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Precision, Prefetch, Recompute, Offload, ZeroConfig])
def test_frozen_keyword_only_hashable_picklable(kind):
    built = kind()
    assert pickle.loads(pickle.dumps(built)) == built
    assert hash(built) == hash(kind())
    with pytest.raises(FrozenInstanceError):
        setattr(built, fields(kind)[0].name, None)
    with pytest.raises(TypeError):
        kind(3)


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        (ZeroConfig, {"stage": 4}, ["ZeroConfig.stage = 4", "0, 1, 2 or 3", "nearest is 3"]),
        (ZeroConfig, {"stage": -1}, ["nearest is 0"]),
        (ZeroConfig, {"stage": True}, ["ZeroConfig.stage = True", "give an integer"]),
        (ZeroConfig, {"stage": "3"}, ["'3'", "give an integer"]),
        (ZeroConfig, {"stage": 2.4}, ["2.4", "nearest is 2"]),
        (ZeroConfig, {"stage": float("nan")}, ["nan", "give an integer"]),
        (ZeroConfig, {"stage": 10**400}, ["nearest is 3"]),
        (ZeroConfig, {"clip_grad_norm": 10**400}, ["finite"]),
        (ZeroConfig, {"accumulate": 0}, ["accumulate = 0", "from 1 up"]),
        (ZeroConfig, {"accumulate": True}, ["accumulate = True"]),
        (ZeroConfig, {"accumulate": 2.0}, ["accumulate = 2.0", "integer"]),
        (ZeroConfig, {"accumulate": None}, ["accumulate = None"]),
        (ZeroConfig, {"clip_grad_norm": 0}, ["clip_grad_norm = 0", "above 0", "None turns clipping off"]),
        (ZeroConfig, {"clip_grad_norm": -1.0}, ["clip_grad_norm = -1.0"]),
        (ZeroConfig, {"clip_grad_norm": float("inf")}, ["clip_grad_norm = inf", "finite"]),
        (ZeroConfig, {"clip_grad_norm": True}, ["clip_grad_norm = True"]),
        (ZeroConfig, {"clip_grad_norm": "1"}, ["clip_grad_norm = '1'"]),
        (ZeroConfig, {"reduction": "orderd"}, ["reduction = 'orderd'", 'nearest is "ordered"']),
        (ZeroConfig, {"init_sync": "rank1"}, ["init_sync", 'nearest is "rank0"']),
        (ZeroConfig, {"init_sync": None}, ["init_sync", "NoneType"]),
        (ZeroConfig, {"precision": "bf16"}, ["precision = 'bf16'", "precision=Precision(...)"]),
        (ZeroConfig, {"prefetch": 2}, ["prefetch = 2", "Prefetch"]),
        (ZeroConfig, {"units": "Block"}, ["units = 'Block'", "tuple"]),
        (ZeroConfig, {"units": int}, ["units", "tuple"]),
        (ZeroConfig, {"units": ()}, ["units = ()", "None finds"]),
        (ZeroConfig, {"units": {"Block"}}, ["units", "sequence"]),
        (ZeroConfig, {"units": ["Block", 3]}, ["units = 3", "class"]),
        (ZeroConfig, {"units": [""]}, ["units = ''"]),
        (ZeroConfig, {"loss_scale": 1000, "precision": Precision(param="fp16")}, ["loss_scale = 1000", "power of two", "512"]),
        (ZeroConfig, {"loss_scale": 0, "precision": Precision(param="fp16")}, ["loss_scale = 0", "above 0"]),
        (ZeroConfig, {"loss_scale": "dynamik", "precision": Precision(param="fp16")}, ["dynamik"]),
        (ZeroConfig, {"loss_scale": True, "precision": Precision(param="fp16")}, ["loss_scale = True"]),
        (Prefetch, {"ahead": -1}, ["Prefetch.ahead = -1", "from 0 up", "turns prefetch off"]),
        (Prefetch, {"ahead": 1.5}, ["ahead = 1.5"]),
        (Prefetch, {"limit": 0}, ["limit = 0", "from 1 up, or None"]),
        (Recompute, {"policy": "ful"}, ["Recompute.policy = 'ful'", 'nearest is "full"']),
        (Recompute, {"policy": "full", "every": 0}, ["every = 0"]),
        (Recompute, {"every": 2}, ["every = 2", "no effect"]),
        (Recompute, {"offload": True}, ["offload = True", "no effect"]),
        (Recompute, {"policy": "full", "offload": 1}, ["offload = 1", "True or False"]),
        (Offload, {"optimizer": "cpu"}, ["Offload.optimizer = 'cpu'", '"host"']),
        (Offload, {"params": "disk"}, ["params = 'disk'"]),
        (Offload, {"optimizer": "disk"}, ["path = None", "give path="]),
        (Offload, {"optimizer": "host", "path": "x"}, ["path = 'x'", "no effect"]),
        (Offload, {"optimizer": "disk", "path": 3}, ["path = 3"]),
        (Precision, {"param": "int8"}, ["Precision.param = 'int8'", '"fp32", "bf16", "fp16" or "fp64"']),
        (Precision, {"param": "bfloat16"}, ['write "bf16"']),
        (Precision, {"param": "bf61"}, ['nearest is "bf16"']),
        (Precision, {"param": None}, ["param = None"]),
        (Precision, {"grad": "fp8"}, ["grad = 'fp8'", "or None"]),
        (Precision, {"master": "bf16"}, ["master = 'bf16'", 'param="fp32"', '"fp64"']),
        (Precision, {"param": "bf16", "master": "fp16"}, ["master = 'fp16'", '"fp32"']),
        (Precision, {"param": "fp64"}, ["master = 'fp32'", "use None"]),
        (Precision, {"keep_param_shard": True}, ["keep_param_shard = True", "the shard is the parameter itself"]),
        (Precision, {"param": "bf16", "master": None, "keep_param_shard": True}, ["keep_param_shard"]),
        (Precision, {"keep_param_shard": 1}, ["keep_param_shard = 1", "True or False"]),
        (Precision, {"cast_inputs": "yes"}, ["cast_inputs = 'yes'"]),
        (Precision, {"keep": ["*.norm"]}, ["keep", "mapping"]),
        (Precision, {"keep": {"": "fp32"}}, ["keep = ''", "non-empty"]),
        (Precision, {"keep": {"*.norm": "fp33"}}, ["keep['*.norm'] = 'fp33'", '"fp32"']),
    ],
)
def test_a_wrong_field_is_named(kind, settings, said):
    message = fault(kind, **settings)
    assert isinstance(ConfigError(), ValueError)
    assert all(part in message for part in said), message
    assert len(message.splitlines()) == 1


def test_every_fault_is_listed():
    message = fault(ZeroConfig, stage=7, accumulate=0, reduction="x", clip_grad_norm=-1)
    assert [line.split(" = ")[0] for line in message.splitlines()] == [
        "ZeroConfig.stage",
        "ZeroConfig.accumulate",
        "ZeroConfig.clip_grad_norm",
        "ZeroConfig.reduction",
    ]


def test_every_contradiction_is_listed():
    message = fault(
        ZeroConfig,
        accumulate=2,
        precision=Precision(param="bf16", grad="bf16"),
        loss_scale=1024,
    )
    assert [line.split(" = ")[0] for line in message.splitlines()] == ["ZeroConfig.accumulate", "ZeroConfig.loss_scale"]


def test_lists_and_numbers_are_normalised():
    config = ZeroConfig(units=["Block", dict], clip_grad_norm=1, precision=Precision(param="fp16"), loss_scale=1024)
    assert config.units == ("Block", dict)
    assert isinstance(config.clip_grad_norm, float)
    assert isinstance(config.loss_scale, float)
    assert Offload(optimizer="disk", path="here").path == Path("here")


def test_the_mapping_given_is_copied():
    kept = {"*.norm": "fp32"}
    precision = Precision(param="bf16", keep=kept)
    kept["*.bias"] = "fp32"
    assert precision.keep == {"*.norm": "fp32"}


# ---- types ----------------------------------------------------------------------------------------------------------


def test_torch_dtypes_become_short_names():
    torch = pytest.importorskip("torch")
    precision = Precision(param=torch.bfloat16, reduce=torch.float32, grad=torch.float16, master=torch.float64, keep={"*": torch.float32})
    assert (precision.param, precision.reduce, precision.grad, precision.master) == ("bf16", "fp32", "fp16", "fp64")
    assert precision.keep == {"*": "fp32"}
    assert 'allowed is "fp32"' in fault(Precision, param=torch.int32)


def test_importing_the_configuration_needs_the_standard_library_only():
    code = "import sys, shardbook.config, shardbook.config_files, shardbook.deepspeed; "
    code += "assert not {'torch', 'numpy', 'rich', 'tyro'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("name", "param", "grad", "master", "line"),
    [
        ("fp32", "fp32", "fp32", "fp32", "fp32 parameters 4 + fp32 gradients 4 + no separate master + fp32 moments 4 each"),
        ("bf16", "bf16", "fp32", "fp32", "bf16 parameters 2 + fp32 gradients 4 + fp32 master 4 + fp32 moments 4 each"),
        ("fp16", "fp16", "fp32", "fp32", "fp16 parameters 2 + fp32 gradients 4 + fp32 master 4 + fp32 moments 4 each"),
        ("pure-bf16", "bf16", "bf16", "bf16", "bf16 parameters 2 + bf16 gradients 2 + no separate master + bf16 moments 2 each"),
        ("2+2+4+8", "bf16", "bf16", "fp32", "bf16 parameters 2 + bf16 gradients 2 (added in fp32) + fp32 master 4 + fp32 moments 4 each"),
    ],
)
def test_presets_and_their_convention(name, param, grad, master, line):
    precision = Precision.preset(name)
    assert (precision.param, precision.grad_dtype, precision.master_dtype) == (param, grad, master)
    assert precision.has_master == (param != master)
    assert precision.describe().startswith(line)
    assert "\n" not in precision.describe()


def test_describe_says_what_is_kept():
    assert Precision.preset("2+2+4+8").describe().endswith("stage 3 keeps the bf16 shard too, 2 more")
    assert Precision(param="bf16", keep={"*.norm": "fp32"}).describe().endswith("kept apart: *.norm fp32")


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(ConfigError, match='nearest is "pure-bf16"'):
        Precision.preset("pure_bf16")


@pytest.mark.parametrize("precision", [Precision.preset("2+2+4+8"), Precision.preset("pure-bf16"), Precision(param="fp16", reduce="fp16")])
def test_gradients_that_wait_in_16_bits_are_not_accumulated(precision):
    assert ZeroConfig(precision=precision).accumulate == 1
    message = fault(ZeroConfig, precision=precision, accumulate=2)
    assert "16 bits loses bits" in message
    assert 'grad="fp32"' in message


def test_grad_in_fp32_may_accumulate_what_is_reduced_in_16_bits():
    assert ZeroConfig(precision=Precision(param="bf16", reduce="bf16", grad="fp32"), accumulate=8).accumulate == 8


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_preset_serves_every_stage(stage):
    assert ZeroConfig(stage=stage, precision=Precision.preset("2+2+4+8")).precision.keep_param_shard


def test_loss_scale_in_force():
    fp16 = Precision(param="fp16")
    assert ZeroConfig().effective_loss_scale == 1.0
    assert ZeroConfig(precision=fp16).effective_loss_scale == "dynamic"
    assert ZeroConfig(precision=fp16, loss_scale="dynamic").effective_loss_scale == "dynamic"
    assert ZeroConfig(precision=fp16, loss_scale=0.5).effective_loss_scale == 0.5
    for scale in (1.0, "dynamic"):
        assert "no effect" in fault(ZeroConfig, loss_scale=scale, precision=Precision(param="bf16"))


@settings(deadline=None)  # a busy machine is no fault of the code
@given(st.integers(-30, 60))
def test_every_power_of_two_is_a_loss_scale(exponent):
    assert ZeroConfig(precision=Precision(param="fp16"), loss_scale=2.0**exponent).effective_loss_scale == 2.0**exponent


@settings(deadline=None)  # a busy machine is no fault of the code
@given(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.integers()), st.dictionaries(st.text(), st.text())
    )
)
def test_no_value_gets_through_as_anything_but_a_config_error(value):
    for kind in (Precision, Prefetch, Recompute, Offload, ZeroConfig):
        for field in fields(kind):
            with suppress(ConfigError):
                kind(**{field.name: value})


# ---- mappings and TOML ----------------------------------------------------------------------------------------------


def toml(tmp_path, text) -> ZeroConfig:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    return ZeroConfig.from_toml(path)


def toml_fault(tmp_path, text) -> str:
    with pytest.raises(ConfigError) as caught:
        toml(tmp_path, text)
    return str(caught.value)


FULL = """
stage = 2
accumulate = 4
clip_grad_norm = 1
reduction = "native"
units = ["Block"]
loss_scale = 1024
init_sync = "check"
[precision]
param = "fp16"
grad = "fp32"
keep = {"*.norm" = "fp32"}
[prefetch]
ahead = 2
limit = 1000
[recompute]
policy = "none"
[offload]
optimizer = "none"
"""


def test_toml_tables_and_top_level_say_the_same(tmp_path):
    expected = ZeroConfig(
        stage=2,
        accumulate=4,
        clip_grad_norm=1.0,
        reduction="native",
        units=("Block",),
        loss_scale=1024,
        init_sync="check",
        precision=Precision(param="fp16", grad="fp32", keep={"*.norm": "fp32"}),
        prefetch=Prefetch(ahead=2, limit=1000),
    )
    assert toml(tmp_path, FULL) == expected
    nested = "[zero]\n" + FULL.replace("[p", "[zero.p").replace("[r", "[zero.r").replace("[o", "[zero.o")
    assert toml(tmp_path, nested) == expected
    assert toml(tmp_path, "") == ZeroConfig()


def test_a_table_has_a_flag_of_another_tables_name(tmp_path):
    config = toml(tmp_path, '[recompute]\npolicy = "full"\noffload = true\n[offload]\noptimizer = "host"\n')
    assert config.recompute == Recompute(policy="full", offload=True)
    assert config.offload == Offload(optimizer="host")


def test_toml_says_none_in_words(tmp_path):
    config = toml(tmp_path, '[zero]\nclip_grad_norm = "none"\n[zero.precision]\nparam = "bf16"\nreduce = "bf16"\nmaster = "none"\n')
    assert config.precision == Precision.preset("pure-bf16")
    assert config.clip_grad_norm is None


def test_toml_precision_by_preset(tmp_path):
    assert toml(tmp_path, '[zero]\nprecision = "bf16"\n').precision == Precision(param="bf16")
    assert "recipe.toml [zero]: Precision.preset('bf8')" in toml_fault(tmp_path, '[zero]\nprecision = "bf8"\n')


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("stag = 3", ["recipe.toml: unknown key", '"stag"', 'nearest is "stage"', "known are stage"]),
        ("[zeroo]\nstage = 1", ['"zeroo"', 'nearest is "zero"']),
        ("[zero]\nprecison = 3", ["[zero]:", 'nearest is "precision"']),
        ("[zero.precision]\nparams = 'bf16'", ["[zero] [precision]:", 'nearest is "param"']),
        ("[zero.precision]\nparam = 3", ["[zero] [precision]: Precision.param = 3"]),
        ("[zero]\nprefetch = 3", ["[prefetch]: expected a table", "3"]),
        ("zero = 3", ["[zero]: expected a table", "3"]),
        ("[zero]\nstage = '3'", ["ZeroConfig.stage = '3'"]),
        ("stage = 2\n[zero]\nstage = 3", ['"stage" beside [zero] would be ignored']),
        ("[zero]\nstage = 3\n[precison]\nparam = 'bf16'", ['"precison" beside [zero]']),
        ("stage = 1\nstage 2", ["is not TOML", "line 2"]),
    ],
)
def test_toml_faults_say_where(tmp_path, text, said):
    message = toml_fault(tmp_path, text)
    assert all(part in message for part in said), message


def test_toml_lists_faults_of_every_table_and_blames_no_other(tmp_path):
    message = toml_fault(
        tmp_path, "[zero]\nstage = 9\nloss_scale = 8\nfoo = 1\n[zero.precision]\nparam = 'x'\n[zero.prefetch]\nahead = -1\n"
    )
    assert len(message.splitlines()) == 4
    for part in ("ZeroConfig.stage", '"foo"', "Precision.param", "Prefetch.ahead"):
        assert part in message


def test_toml_leaves_the_rest_of_a_recipe_alone(tmp_path):
    assert toml(tmp_path, "steps = 10\n[data]\npath = 'x'\n[zero]\nstage = 1\n").stage == 1


def test_toml_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="missing.toml: cannot be read"):
        ZeroConfig.from_toml(tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        ZeroConfig.from_toml(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"a = '\xe9'")
    with pytest.raises(ConfigError, match="not UTF-8"):
        ZeroConfig.from_toml(tmp_path / "latin.toml")


def test_from_mapping_accepts_built_parts_and_a_place():
    assert ZeroConfig.from_mapping({"precision": Precision(param="bf16")}).precision.param == "bf16"
    with pytest.raises(ConfigError, match=r"^--zero: unknown key"):
        ZeroConfig.from_mapping({"stages": 1}, where="--zero")


# ---- DeepSpeed ------------------------------------------------------------------------------------------------------


def deepspeed_fault(document, **keywords) -> str:
    with pytest.raises(ConfigError) as caught:
        ZeroConfig.from_deepspeed(document, **keywords)
    return str(caught.value)


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({}, ZeroConfig(stage=0)),
        ({"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}, ZeroConfig(precision=Precision(param="bf16"))),
        ({"bfloat16": {"enabled": True}}, ZeroConfig(stage=0, precision=Precision(param="bf16"))),
        ({"fp16": {"enabled": True}}, ZeroConfig(stage=0, precision=Precision(param="fp16"), loss_scale="dynamic")),
        ({"fp16": {"enabled": True, "loss_scale": 0}}, ZeroConfig(stage=0, precision=Precision(param="fp16"), loss_scale="dynamic")),
        (
            {"fp16": {"enabled": True, "loss_scale": 128, "loss_scale_window": 100}},
            ZeroConfig(stage=0, precision=Precision(param="fp16"), loss_scale=128),
        ),
        ({"fp16": {"enabled": False, "initial_scale_power": 16}}, ZeroConfig(stage=0)),
        ({"gradient_clipping": 1.0, "gradient_accumulation_steps": 4}, ZeroConfig(stage=0, clip_grad_norm=1.0, accumulate=4)),
        ({"gradient_clipping": 0.0}, ZeroConfig(stage=0)),
        (
            {"bf16": {"enabled": True}, "communication_data_type": "bf16", "data_types": {"grad_accum_dtype": "fp32"}},
            ZeroConfig(stage=0, precision=Precision(param="bf16", reduce="bf16", grad="fp32")),
        ),
        ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "none", "pin_memory": True}}}, ZeroConfig(stage=1)),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 1}, "offload_param": {"device": "cpu"}}},
            ZeroConfig(stage=3, offload=Offload(optimizer="host", params="host")),
        ),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": "state"}}},
            ZeroConfig(stage=1, offload=Offload(optimizer="disk", path="state")),
        ),
        (
            {"activation_checkpointing": {"partition_activations": False, "number_checkpoints": None}, "amp": {"enabled": False}},
            ZeroConfig(stage=0),
        ),
        ({"prescale_gradients": False, "gradient_predivide_factor": 1.0}, ZeroConfig(stage=0)),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 1, "mics_shard_size": -1}}, ZeroConfig()),
    ],
)
def test_deepspeed_honoured(document, expected):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ZeroConfig.from_deepspeed(document) == expected


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"zero_optimization": {"stage": 4}}, ["zero_optimization.stage = 4", "0, 1, 2 or 3"]),
        ({"zero_optimization": True}, ["zero_optimization = true", "expected an object"]),
        ({"zero_optimisation": {}}, ['"zero_optimisation"', 'nearest is "zero_optimization"']),
        ({"zero_optimization": {"overlap_com": True}}, ['"zero_optimization.overlap_com"', '"zero_optimization.overlap_comm"']),
        ({"optimizer": {"type": "Adam"}}, ["optimizer = ", "shardbook.Engine"]),
        ({"scheduler": {"type": "WarmupLR"}}, ["scheduler = ", "shardbook.Engine"]),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, ["offload.optimizer", "at stage 0", "use stage 1, 2 or 3"]),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, ["offload_param.device", "allowed is none, cpu"]),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}, ["offload_optimizer.ratio", "only 1"]),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}, ["Offload.path", "a folder"]),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"devise": "cpu"}}}, ["offload_optimizer.devise", "no key of DeepSpeed"]),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": "cpu"}}, ["zero_optimization.offload_optimizer", "expected an object"]),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, ["cpu_offload", "offload_optimizer"]),
        ({"zero_optimization": {"zero_quantized_weights": True}}, ["zero_quantized_weights = true"]),
        ({"zero_optimization": {"zero_hpz_partition_size": 8}}, ["zero_hpz_partition_size = 8", "only 1"]),
        ({"activation_checkpointing": {"partition_activations": True}}, ["activation_checkpointing", "Recompute"]),
        ({"prescale_gradients": True}, ["prescale_gradients = true", "summed"]),
        ({"gradient_predivide_factor": 2.0}, ["gradient_predivide_factor = 2.0", "summed"]),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, ["bf16.enabled = true and fp16.enabled = true"]),
        ({"bf16": {"enabled": "auto"}}, ['bf16.enabled = "auto"', "Trainer"]),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, ["bf16_master_weights_and_grads", "master=None"]),
        ({"bf16": {"enable": True}}, ['"bf16.enable"', '"bf16.enabled"']),
        ({"fp16": {"enabled": True, "hysteresis": 2}}, ["fp16.hysteresis = 2", "fixed fp16.loss_scale"]),
        ({"fp16": {"enabled": True, "auto_cast": True}}, ["fp16.auto_cast", "cast_inputs"]),
        ({"fp16": {"enabled": True, "loss_scale": 1000}}, ["loss_scale = 1000", "power of two"]),
        ({"gradient_clipping": "auto"}, ['gradient_clipping = "auto"', "Trainer"]),
        ({"gradient_clipping": -1}, ["gradient_clipping = -1"]),
        ({"gradient_accumulation_steps": 0}, ["gradient_accumulation_steps = 0"]),
        ({"communication_data_type": "int8"}, ["communication_data_type", '"fp32", "bf16" or "fp16"']),
        ({"data_types": {"grad_dtype": "fp32"}}, ["data_types.grad_dtype", "grad_accum_dtype"]),
        (
            {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}, "gradient_accumulation_steps": 2},
            ["accumulate = 2", "16 bits"],
        ),
    ],
)
def test_deepspeed_refused_by_name(document, said):
    message = deepspeed_fault(document)
    assert all(part in message for part in said), message
    assert len(message.splitlines()) == 1


def test_deepspeed_lists_everything_it_refuses():
    message = deepspeed_fault({"optimizer": {"type": "Adam"}, "scheduler": {"type": "x"}, "foo": 1, "gradient_accumulation_steps": "auto"})
    assert len(message.splitlines()) == 4


def test_deepspeed_knobs_without_effect_are_named_once():
    document = {
        "steps_per_print": 10,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": 5},
    }
    with pytest.warns(UserWarning, match="reduce_bucket_size, zero_optimization.stage3_prefetch_bucket_size") as caught:
        assert ZeroConfig.from_deepspeed(document).stage == 2
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert "steps_per_print" in str(caught[0].message)


TOTAL, MICRO, ACCUMULATE = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@pytest.mark.parametrize(
    ("document", "ranks", "accumulate"),
    [
        ({TOTAL: 32, MICRO: 4, ACCUMULATE: 2}, None, 2),
        ({TOTAL: 32, MICRO: 4, ACCUMULATE: 2}, 4, 2),
        ({TOTAL: 32, MICRO: 4}, 4, 2),
        ({TOTAL: 4, MICRO: 4}, None, 1),
        ({TOTAL: 32}, 4, 1),
        ({TOTAL: 32}, None, 1),
        ({MICRO: 4}, None, 1),
        ({TOTAL: 32, ACCUMULATE: 2}, 4, 2),
    ],
)
def test_deepspeed_batch_numbers_derived(document, ranks, accumulate):
    assert ZeroConfig.from_deepspeed(document, ranks=ranks).accumulate == accumulate


@pytest.mark.parametrize(
    ("document", "ranks", "said"),
    [
        ({TOTAL: 30, MICRO: 4, ACCUMULATE: 2}, None, "30 is no multiple of 8"),
        ({TOTAL: 32, MICRO: 4, ACCUMULATE: 2}, 3, "32 is not 24"),
        ({TOTAL: 32, MICRO: 4, ACCUMULATE: 2}, 2, "32 is not 16"),
        ({TOTAL: 30, ACCUMULATE: 4}, None, "30 is no multiple of 4"),
        ({TOTAL: 30, MICRO: 4}, 2, "30 is no multiple of 8"),
        ({TOTAL: 4, MICRO: 8}, None, "4 is no multiple of 8"),
        ({TOTAL: 32, MICRO: 4}, None, "it is 8 / ranks"),
        ({}, 0, "ranks = 0"),
    ],
)
def test_deepspeed_batch_numbers_that_contradict_are_all_shown(document, ranks, said):
    message = deepspeed_fault(document, ranks=ranks)
    assert said in message
    for key, value in document.items():
        assert f"{key} = {value}" in message


def test_deepspeed_files(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 1}}')
    assert ZeroConfig.from_deepspeed(path).stage == 1
    assert ZeroConfig.from_deepspeed(str(path)).stage == 1
    for text, said in (("{", "is not JSON"), ("[]", "expected an object"), ('{"a": 1, "a": 2}', "given twice: a")):
        path.write_text(text)
        message = deepspeed_fault(path)
        assert said in message
        assert "ds.json" in message
    assert "cannot be read" in deepspeed_fault(tmp_path / "none.json")
