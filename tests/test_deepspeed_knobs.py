"""A DeepSpeed JSON read as DeepSpeed 0.19.8 reads it: defaults, ``"auto"``, unknown keys, and values that are none."""

import json
from dataclasses import fields

import pytest

from shardbook.deepspeed import load_json
from shardbook.errors import ConfigError
from shardbook.forecasting.deepspeed_knobs import Knobs, read

BF16 = {"bf16": {"enabled": True}}


def test_an_empty_file_has_deepspeeds_defaults(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text("{}")
    assert read(path) == Knobs() == read({})
    knobs = Knobs()
    assert (knobs.reduce_bucket_size, knobs.allgather_bucket_size, knobs.prefetch_bucket_size) == (5 * 10**8, 5 * 10**8, 5 * 10**7)
    assert (knobs.param_persistence_threshold, knobs.max_live_parameters, knobs.max_reuse_distance) == (10**5, 10**9, 10**9)
    assert (knobs.contiguous_gradients, knobs.sub_group_size, knobs.gradient_clipping) == (True, 10**9, 1.0)


@pytest.mark.parametrize(("stage", "overlap"), [(0, False), (1, False), (2, False), (3, True)])
def test_communication_overlaps_at_stage_3_unless_it_is_said(stage, overlap):
    assert read({"zero_optimization": {"stage": stage}}).overlap_comm is overlap
    assert read({"zero_optimization": {"stage": stage, "overlap_comm": not overlap}}).overlap_comm is not overlap
    assert read({"zero_optimization": {"stage": stage, "overlap_comm": None}}).overlap_comm is overlap


def test_every_setting_is_read():
    document = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 8,
        "gradient_clipping": 0,
        "communication_data_type": "fp16",
        "data_types": {"grad_accum_dtype": "torch.bfloat16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "activation_checkpointing": {"cpu_checkpointing": True, "partition_activations": True},
        "bf16": {"enabled": True, "immediate_grad_update": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": 5e7,
            "allgather_bucket_size": 2e8,
            "contiguous_gradients": False,
            "reduce_scatter": False,
            "use_multi_rank_bucket_allreduce": False,
            "round_robin_gradients": True,
            "overlap_comm": False,
            "sub_group_size": 1e8,
            "zero_hpz_partition_size": 8,
            "stage3_prefetch_bucket_size": 1,
            "stage3_param_persistence_threshold": 2,
            "model_persistence_threshold": 3,
            "max_live_parameters": 4,
            "stage3_max_reuse_distance": 5,
            "offload_optimizer": {"device": "nvme", "pin_memory": False, "ratio": 0.5},
            "offload_param": {"device": "cpu", "pin_memory": False, "buffer_count": 6, "buffer_size": 7, "max_in_cpu": 8},
        },
    }
    knobs = read(document)
    assert knobs == Knobs(
        stage=3, dtype="bf16", grad_accum_dtype="bf16", communication_dtype="fp16", reduce_bucket_size=50_000_000,
        allgather_bucket_size=200_000_000, overlap_comm=False, contiguous_gradients=False, reduce_scatter=False,
        multi_rank_buckets=False, round_robin_gradients=True, prefetch_bucket_size=1, param_persistence_threshold=2,
        model_persistence_threshold=3, max_live_parameters=4, max_reuse_distance=5, sub_group_size=100_000_000,
        offload_optimizer="nvme", offload_param="cpu", pin_optimizer=False, pin_param=False, offload_ratio=0.5,
        param_buffer_count=6, param_buffer_size=7, max_in_cpu=8, immediate_grad_update=True, narrow_master=True,
        narrow_moments=True, gradient_clipping=0.0, accumulate=8, micro_batch=4, hpz_partition_size=8, optimizer="adamw",
        cpu_checkpointing=True, partition_activations=True,
    )  # fmt: skip
    same = {field.name for field in fields(Knobs) if getattr(knobs, field.name) == getattr(Knobs(), field.name)}
    assert same <= {"unknown", "automatic", "notes", "overlap_comm"}  # so that no setting is forgotten above


def test_sections_are_read_as_pydantic_reads_them_and_the_top_level_as_json():
    knobs = read({"zero_optimization": {"stage": "2", "overlap_comm": "yes", "reduce_scatter": 0, "sub_group_size": " 7 "}})
    assert (knobs.stage, knobs.overlap_comm, knobs.reduce_scatter, knobs.sub_group_size) == (2, True, False, 7)
    assert read({"communication_data_type": "FP16"}).communication_dtype == "fp16"
    for document in ({"gradient_accumulation_steps": "4"}, {"data_types": {"grad_accum_dtype": "FP16"}}):
        with pytest.raises(ConfigError, match="allowed is"):
            read(document)


def test_comments_and_trailing_commas_are_read_over_as_in_hjson(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{ // one\n "zero_optimization": {"stage": 3, /* two\n*/ "offload_param": {"nvme_path": "a//b#c,}"},}, # three\n}')
    assert read(path).stage == 3
    assert load_json(path)["zero_optimization"]["offload_param"]["nvme_path"] == "a//b#c,}"


def test_auto_sizes_come_from_the_models_width_as_in_transformers():
    sizes = {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}
    knobs = read({"zero_optimization": sizes}, hidden=4096)
    assert (knobs.reduce_bucket_size, knobs.prefetch_bucket_size, knobs.param_persistence_threshold) == (4096**2, int(0.9 * 4096**2), 40960)
    assert knobs.automatic == ()


def test_auto_that_cannot_be_filled_in_is_named_and_deepspeeds_default_stands():
    document = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
    }
    knobs = read(document)
    assert sorted(knobs.automatic) == [
        "bf16.enabled",
        "gradient_clipping",
        "train_micro_batch_size_per_gpu",
        "zero_optimization.reduce_bucket_size",
    ]
    assert (knobs.micro_batch, knobs.gradient_clipping, knobs.dtype, knobs.reduce_bucket_size) == (None, 1.0, "fp32", 500_000_000)
    assert read(document, dtype="bf16").dtype == "bf16"
    assert "bf16.enabled" not in read(document, dtype="bf16").automatic
    assert read({}, dtype="bf16").dtype == "fp32"  # only "auto" is filled in


def test_types_follow_the_model_unless_they_are_set():
    assert [read(BF16).grad_accum_dtype, read(BF16).communication_dtype] == ["bf16", "bf16"]
    assert read({"fp16": {"enabled": True}}).dtype == "fp16"
    assert read({"bfloat16": {"enabled": True}}).dtype == "bf16"
    assert read({"bf16": {"enabled": False}}).dtype == "fp32"


def test_old_forms_are_read():
    assert read({"zero_optimization": True}).stage == 1
    knobs = read({"zero_optimization": {"stage": 3, "cpu_offload": True, "cpu_offload_param": True}})
    assert (knobs.offload_optimizer, knobs.offload_param) == ("cpu", "cpu")


@pytest.mark.parametrize(
    ("given", "ranks", "micro", "accumulate"),
    [
        ({"train_batch_size": 64, "gradient_accumulation_steps": 4}, 8, 2, 4),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2}, 8, 2, 4),
        ({"train_batch_size": 64}, 8, 8, 1),
        ({"train_micro_batch_size_per_gpu": 3}, None, 3, 1),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}, 8, 2, 4),
        ({"train_batch_size": 64}, None, None, 1),
    ],
)
def test_batch_numbers_are_derived(given, ranks, micro, accumulate):
    knobs = read(given, ranks=ranks)
    assert (knobs.micro_batch, knobs.accumulate) == (micro, accumulate)


def test_unknown_keys_are_named_in_full_and_are_no_error():
    document = {
        "zero_optimisation": {},
        "zero_optimization": {"stage": 2, "reduce_bucket": 1, "offload_optimizer": {"device": "cpu", "pin": True}},
        "bf16": {"enable": True},
        "wall_clock_breakdown": False,
    }
    knobs = read(document)
    assert knobs.unknown == (
        "zero_optimisation",
        "zero_optimization.reduce_bucket",
        "bf16.enable",
        "zero_optimization.offload_optimizer.pin",
    )


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage = 4: allowed is a whole number from 0 to 3"),
        ({"zero_optimization": {"stage": True}}, "zero_optimization.stage = True"),
        ({"zero_optimization": 2}, "zero_optimization = 2: allowed is an object"),
        ({"zero_optimization": {"reduce_bucket_size": 0}}, "reduce_bucket_size = 0: allowed is a whole number from 1 up"),
        ({"zero_optimization": {"allgather_bucket_size": -1}}, "allgather_bucket_size = -1"),
        ({"zero_optimization": {"sub_group_size": 1.5}}, "sub_group_size = 1.5"),
        ({"zero_optimization": {"sub_group_size": float("inf")}}, "sub_group_size = inf"),
        ({"zero_optimization": {"sub_group_size": "1e9"}}, "sub_group_size = '1e9'"),
        ({"zero_optimization": {"overlap_comm": "maybe"}}, "allowed is true or false"),
        ({"zero_optimization": {"offload_param": {"device": "disk"}}}, "offload_param.device = 'disk': allowed is none, cpu, nvme"),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"ratio": 2}}}, "ratio = 2"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"ratio": 0.5}}}, "ratio = 0.5"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "contradict each other"),
        ({"communication_data_type": "int8"}, "communication_data_type = 'int8'"),
        ({"gradient_clipping": -1}, "gradient_clipping = -1"),
        ({"train_micro_batch_size_per_gpu": 0}, "train_micro_batch_size_per_gpu = 0"),
        ({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 3}, "train_batch_size = 10"),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "bf16_master_weights_and_grads only"),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "stages 1 to 3"),
    ],
)
def test_a_value_that_is_none_is_refused_by_name(document, said):
    with pytest.raises(ConfigError) as raised:
        read(document, ranks=4)
    assert said in str(raised.value)


def test_all_faults_are_listed_with_the_file(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"gradient_clipping": "x", "zero_optimization": {"stage": 7}}))
    with pytest.raises(ConfigError) as raised:
        read(path)
    assert [line.split(":")[0] for line in str(raised.value).splitlines()] == [str(path)] * 2


@pytest.mark.parametrize("text", ["{", "[]", '{"a": 1, "a": 2}'])
def test_what_is_no_object_is_refused(tmp_path, text):
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="ds.json"):
        read(path)


def test_what_has_no_effect_is_said():
    knobs = read({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}})
    assert knobs.notes == ("zero_optimization.offload_param has no effect below stage 3",)
    assert len(read({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}).notes) == 1


@pytest.mark.parametrize(
    ("document", "name", "total"),
    [
        ({}, "deepspeed-fp32", 20),
        (BF16, "deepspeed-bf16", 16),
        ({**BF16, "data_types": {"grad_accum_dtype": "fp32"}}, "deepspeed-bf16-fp32-grads", 18),
        ({"fp16": {"enabled": True}}, "deepspeed-fp16", 16),
        ({"fp16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, "deepspeed-fp16,grad=4", 18),
        (
            {
                "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
                "zero_optimization": {"stage": 2},
            },
            "deepspeed-bf16,master=2,moment=4",
            10,
        ),
    ],
)
def test_the_convention_follows_from_the_types(document, name, total):
    convention = read(document).convention()
    assert (convention.name, convention.total) == (name, total)


def test_the_bf16_optimizer_is_taken_at_stage_1_with_fp32_accumulation():
    wide = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}
    assert read({**wide, "zero_optimization": {"stage": 1}}).uses_bf16_optimizer
    assert not read({**wide, "zero_optimization": {"stage": 2}}).uses_bf16_optimizer
    assert not read({**BF16, "zero_optimization": {"stage": 1}}).uses_bf16_optimizer
