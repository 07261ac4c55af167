"""Reads a DeepSpeed configuration and honours it, or says by name what it can't honour and why.

Four kinds of key: honoured ones; switches that are harmless while they are off, with the reason to refuse them when on;
knobs of DeepSpeed's own buffers, and logging, that change no result and are named in one warning; and unknown ones, refused.
"""

import json
import math
import re
import warnings
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from shardbook.config import Offload, Precision, ZeroConfig
from shardbook.errors import ConfigError

ConfigT = TypeVar("ConfigT", bound=ZeroConfig)

_ELSEWHERE = "build it in Python and pass it to shardbook.Engine"
_OWN_DATA = "shardbook doesn't choose the data"
_OLD_OFFLOAD = 'write "offload_optimizer": {"device": "cpu"} or "offload_param": {"device": "cpu"} for it'
_OWN_RECOMPUTE = "it is told to the model there; give ZeroConfig(recompute=Recompute(...)) here"
_ONE_GROUP = "all states are partitioned over one group of ranks"
_LOSSY = "it rounds what is sent, and results here don't depend on the transport"

# Keys that must be off (absent, null, false, empty, {"enabled": false} or {"device": "none"}), with the reason.
_TOP_OFF: Mapping[str, str] = {
    "optimizer": _ELSEWHERE,
    "scheduler": _ELSEWHERE,
    "amp": "use Precision",
    "torch_autocast": "use Precision; a torch.autocast block around forward works as well",
    "prescale_gradients": "gradients are summed, and scaled once at the step",
    "sparse_gradients": "gradients are dense",
    "disable_allgather": "stages 1 and 2 always send the new parameters around",
    "fp32_allreduce": 'use "communication_data_type": "fp32"',
    "graph_harvesting": "this version records no CUDA graphs",
    "activation_checkpointing": _OWN_RECOMPUTE,
    "sparse_attention": "attention belongs to the model",
    "progressive_layer_drop": "it changes the model",
    "compression_training": "it changes the model",
    "eigenvalue": "it serves quantisation, which shardbook doesn't do",
    "curriculum_learning": _OWN_DATA,
    "data_efficiency": _OWN_DATA,
    "dataloader_drop_last": _OWN_DATA,
    "elasticity": "the number of ranks is fixed while a run lasts",
    "autotuning": "give the values it found",
    "hybrid_engine": "shardbook trains and doesn't generate",
    "tensor_parallel": _ONE_GROUP,
    "use_data_before_expert_parallelism": _ONE_GROUP,
    "pipeline": "there are no pipeline stages",
    "compile": "compile the blocks with torch.compile before the engine is built",
    "checkpoint": "engine.save and engine.load write the same at any stage and number of ranks",
    "nebula": "engine.save writes to a path",
}
_ZERO_OFF: Mapping[str, str] = {
    "cpu_offload": _OLD_OFFLOAD,
    "cpu_offload_params": _OLD_OFFLOAD,
    "cpu_offload_param": _OLD_OFFLOAD,
    "cpu_offload_use_pin_memory": _OLD_OFFLOAD,
    "zenflow": "the optimizer steps on all gradients of a step, never on some of them later",
    "zero_quantized_weights": _LOSSY,
    "zero_quantized_nontrainable_weights": _LOSSY,
    "zero_quantized_gradients": _LOSSY,
    "zeropp_loco_param": _LOSSY,
    "mics_hierarchical_params_gather": _ONE_GROUP,
    "leaf_module": "give ZeroConfig(units=...) the classes that are gathered together",
    "elastic_checkpoint": "engine.save and engine.load work between any two numbers of ranks",
    "legacy_stage1": "there is one code path for all stages",
    "save_muon_momentum_buffer_in_memory": "Muon is not element-wise",
}
# Numbers that must have the value at which DeepSpeed does nothing.
_TOP_NEUTRAL: Mapping[str, tuple[float, str]] = {
    "gradient_predivide_factor": (1, "gradients are summed, and scaled once at the step"),
}
_ZERO_NEUTRAL: Mapping[str, tuple[float, str]] = {
    "zero_hpz_partition_size": (1, _ONE_GROUP),
    "mics_shard_size": (-1, _ONE_GROUP),
}
# Sub-tables of offload: device to the place it means here, the key that holds a folder, and what only tunes DeepSpeed's own buffers.
_OFFLOADS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "offload_optimizer": ("optimizer", {"none": "none", "cpu": "host", "nvme": "disk"}),
    "offload_param": ("params", {"none": "none", "cpu": "host"}),
}
_OFFLOAD_NOTED = ("pin_memory", "buffer_count", "buffer_size", "max_in_cpu", "pipeline_read", "pipeline_write", "fast_init")
# Loss scaling that DeepSpeed can tune and shardbook fixes: harmless unless the scale is dynamic.
_SCALER_KEYS = ("initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis", "min_loss_scale")
_FP16_KEYS = ("enabled", "loss_scale", "auto_cast", "fp16_master_weights_and_grads", "fused_mode", *_SCALER_KEYS)
_BF16_KEYS = ("enabled", "immediate_grad_update", "bf16_master_weights_and_grads", "bf16_optimizer_states", "check_grad_overflow")

_TOP_NOTED = (
    "steps_per_print", "wall_clock_breakdown", "dump_state", "memory_breakdown", "vocabulary_size", "flops_profiler", "tensorboard",
    "wandb", "csv_monitor", "comet", "comms_logger", "zero_allow_untested_optimizer", "seq_parallel_communication_data_type",
    "seq_parallel_comm_data_type", "allgather_size", "aio", "zero_force_ds_cpu_optimizer",
)  # fmt: skip
_ZERO_NOTED = (
    "allgather_partitions", "allgather_bucket_size", "overlap_comm", "reduce_scatter", "reduce_bucket_size", "contiguous_gradients",
    "round_robin_gradients", "use_multi_rank_bucket_allreduce", "ignore_unused_parameters", "sub_group_size", "memory_efficient_linear",
    "override_module_apply", "load_from_fp32_weights", "pipeline_loading_checkpoint", "log_trace_cache_warnings", "enable_sanity_checks",
    "max_live_parameters", "max_reuse_distance", "prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold",
    "gather_16bit_weights_on_model_save", "gather_fp16_weights_on_model_save", "module_granularity_threshold",
    "use_all_reduce_for_fetch_params", "allgather_sequential", "partition_stream_chunk_size", "compute_grad_norm", "parameter_alignment",
)  # fmt: skip
_TOTAL, _MICRO, _ACCUMULATE = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_TOP_HONOURED = (
    "zero_optimization",
    "bf16",
    "bfloat16",
    "fp16",
    "gradient_clipping",
    "communication_data_type",
    "data_types",
    _TOTAL,
    _MICRO,
    _ACCUMULATE,
)

TOP_KEYS = frozenset((*_TOP_HONOURED, *_TOP_OFF, *_TOP_NEUTRAL, *_TOP_NOTED))
"""Every key that is known at the top level."""
ZERO_KEYS = frozenset(("stage", *_OFFLOADS, *_ZERO_OFF, *_ZERO_NEUTRAL, *_ZERO_NOTED))
"""Every key that is known in ``zero_optimization``; each may also begin with ``stage3_``."""
TYPE_KEYS = frozenset((*_BF16_KEYS, *_FP16_KEYS))
"""Every key that is known in ``bf16`` or ``fp16``."""


def read_deepspeed(kind: type[ConfigT], source: Path | str | Mapping[str, Any], ranks: int | None) -> ConfigT:
    """``kind`` as ``source`` says; see :meth:`shardbook.ZeroConfig.from_deepspeed`."""
    if isinstance(source, Mapping):
        name, document = "DeepSpeed configuration", source
    else:
        name, document = str(source), load_json(Path(source))
    reader = _Reader(name, document, ranks)
    arguments = reader.arguments()
    faults = reader.faults
    config = None
    try:
        config = kind(**arguments)
    except ConfigError as error:
        faults += str(error).splitlines()
    if config is None or faults:
        raise ConfigError("\n".join(f"{name}: {fault}" for fault in faults))
    if reader.notes:
        text = f"{name}: no effect here, as they tune DeepSpeed's own buffers or its logging: {', '.join(reader.notes)}"
        warnings.warn(text, UserWarning, stacklevel=3)
    return config


class _Reader:
    """One pass over the document; collects what is wrong (``faults``) and what changes nothing (``notes``)."""

    def __init__(self, name: str, document: Mapping[str, Any], ranks: int | None) -> None:
        self._document = document
        self._ranks = ranks
        self.name = name
        self.faults: list[str] = []
        self.notes: list[str] = []

    def arguments(self) -> dict[str, Any]:
        """What to build the configuration from, as far as it could be read."""
        self._table(self._document, "", _TOP_OFF, _TOP_NEUTRAL, _TOP_NOTED, _TOP_HONOURED)
        arguments: dict[str, Any] = {"stage": self._stage(), "accumulate": self._accumulate()}
        arguments.update(self._types())
        if offload := self._offload():
            arguments["offload"] = offload
        clip = self._number(self._document, "gradient_clipping")
        if clip:  # 0 and absent both mean off
            arguments["clip_grad_norm"] = clip
        return arguments

    # ---- one table --------------------------------------------------------------------------------------------------

    def _table(
        self,
        table: Mapping[str, Any],
        prefix: str,
        off: Mapping[str, str],
        neutral: Mapping[str, tuple[float, str]],
        noted: tuple[str, ...],
        honoured: tuple[str, ...],
    ) -> None:
        known = (*honoured, *off, *neutral, *noted)
        for key, value in table.items():
            short = key.removeprefix("stage3_") if prefix else key
            if key in honoured:
                continue
            if key in off:
                if not _is_off(value):
                    self._refuse(prefix + key, value, off[key])
            elif key in neutral:
                if value is not None and value != neutral[key][0]:
                    self._refuse(prefix + key, value, f"{neutral[key][1]}; only {neutral[key][0]:g} can be honoured")
            elif short in noted:
                self.notes.append(prefix + key)
            else:
                close = get_close_matches(key, known, n=1, cutoff=0.6)
                nearest = f'the nearest is "{prefix}{close[0]}"' if close else "it is no key of DeepSpeed that shardbook knows"
                self.faults.append(f'unknown key "{prefix}{key}": {nearest}')

    def _refuse(self, key: str, value: object, reason: str) -> None:
        if value == "auto":
            reason = "transformers' Trainer fills this in; give the number itself"
        self.faults.append(f"{key} = {_short(value)} can't be honoured: {reason}")

    def _sub(self, key: str) -> Mapping[str, Any]:
        value = self._document.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            self.faults.append(f"{key} = {_short(value)}: expected an object")
            return {}
        return cast("Mapping[str, Any]", value)

    def _integer(self, table: Mapping[str, Any], key: str, prefix: str = "") -> int | None:
        value = table.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self._refuse(prefix + key, value, "expected an integer from 1 up")
            return None
        return value

    def _number(self, table: Mapping[str, Any], key: str, prefix: str = "") -> float | None:
        value = table.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
            self._refuse(prefix + key, value, "expected a number from 0 up")
            return None
        return value

    def _switch(self, table: Mapping[str, Any], key: str, prefix: str) -> bool:
        value = table.get(key, False)
        if not isinstance(value, bool):
            self._refuse(prefix + key, value, "expected true or false")
            return False
        return value

    # ---- what is honoured ---------------------------------------------------------------------------------------------

    def _stage(self) -> int:
        zero = self._sub("zero_optimization")
        self._table(zero, "zero_optimization.", _ZERO_OFF, _ZERO_NEUTRAL, _ZERO_NOTED, ("stage", *_OFFLOADS))
        value = zero.get("stage", 0)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 3:
            self._refuse("zero_optimization.stage", value, "expected 0, 1, 2 or 3")
            return 0
        return value

    def _offload(self) -> Offload | None:
        """Where optimizer state and parameters live."""
        fields: dict[str, Any] = {}
        for key, (name, places) in _OFFLOADS.items():
            prefix, table = f"zero_optimization.{key}.", self._offload_table(key)
            is_on = table.get("device", "none") != "none"
            for inner, value in table.items():
                if inner == "ratio":
                    if value != 1:
                        self._refuse(prefix + inner, value, "all of the optimizer's state is offloaded, or none; only 1 can be honoured")
                elif inner in _OFFLOAD_NOTED:
                    self.notes += [prefix + inner] if is_on else []
                elif inner not in ("device", "nvme_path"):
                    self.faults.append(f'unknown key "{prefix}{inner}": it is no key of DeepSpeed that shardbook knows')
            device = table.get("device", "none")
            if device not in places:
                self._refuse(f"{prefix}device", device, f"allowed is {', '.join(places)}")
            elif places[device] != "none":
                fields[name] = places[device]
        if fields.get("optimizer") == "disk":
            fields["path"] = self._offload_table("offload_optimizer").get("nvme_path")
        try:
            return Offload(**fields) if fields else None
        except ConfigError as error:
            self.faults += str(error).splitlines()
            return None

    def _offload_table(self, key: str) -> Mapping[str, Any]:
        zero = self._document.get("zero_optimization")
        value = cast("Mapping[str, Any]", zero).get(key) if isinstance(zero, Mapping) else None
        if value is None or isinstance(value, Mapping):
            return cast("Mapping[str, Any]", value or {})
        self.faults.append(f"zero_optimization.{key} = {_short(value)}: expected an object")
        return {}

    def _types(self) -> dict[str, Any]:
        """Precision and loss scale."""
        faults_before = len(self.faults)
        bf16_key = "bfloat16" if "bfloat16" in self._document and "bf16" not in self._document else "bf16"
        bf16, fp16 = self._sub(bf16_key), self._sub("fp16")
        bf16_on = self._switch(bf16, "enabled", f"{bf16_key}.")
        fp16_on = self._switch(fp16, "enabled", "fp16.")
        if bf16_on and fp16_on:
            self.faults.append(f"{bf16_key}.enabled = true and fp16.enabled = true contradict each other: turn one off")
        self._half(bf16, f"{bf16_key}.", _BF16_KEYS, bf16_on)
        self._half(fp16, "fp16.", _FP16_KEYS, fp16_on)
        types: dict[str, Any] = {"param": "bf16" if bf16_on else "fp16" if fp16_on else "fp32"}
        self._dtype(types, "reduce", "communication_data_type", self._document.get("communication_data_type"))
        for key, value in self._sub("data_types").items():
            if key == "grad_accum_dtype":
                self._dtype(types, "grad", "data_types.grad_accum_dtype", value)
            else:
                self.faults.append(f'unknown key "data_types.{key}": the nearest is "data_types.grad_accum_dtype"')
        scale = self._loss_scale(fp16) if fp16_on else None
        if len(self.faults) > faults_before:
            return {}
        return {"precision": Precision(**types), "loss_scale": scale}

    def _half(self, table: Mapping[str, Any], prefix: str, known: tuple[str, ...], enabled: bool) -> None:
        """The keys of ``bf16`` or ``fp16`` beside ``enabled``: refused where they would change training."""
        for key, value in table.items():
            if key not in known:
                close = get_close_matches(key, known, n=1, cutoff=0.0)
                self.faults.append(f'unknown key "{prefix}{key}": the nearest is "{prefix}{close[0]}"')
            elif not enabled or key in ("enabled", "loss_scale"):
                continue
            elif key in ("fused_mode", "immediate_grad_update", "check_grad_overflow"):
                self.notes.append(prefix + key)
            elif key not in _SCALER_KEYS and not _is_off(value):
                reason = (
                    'use Precision(master=None, grad="bf16")'
                    if "master" in key or "optimizer" in key
                    else "cast the inputs, or leave Precision.cast_inputs"
                )
                self._refuse(prefix + key, value, reason)

    def _loss_scale(self, fp16: Mapping[str, Any]) -> float | Literal["dynamic"]:
        scale = self._number(fp16, "loss_scale", "fp16.")
        if scale:
            return scale
        for key in _SCALER_KEYS:
            if key in fp16:
                self._refuse(f"fp16.{key}", fp16[key], "the dynamic loss scale has no settings; give a fixed fp16.loss_scale, or drop it")
        return "dynamic"

    def _dtype(self, types: dict[str, Any], field: str, key: str, value: object) -> None:
        if value is None or value == "none":
            return
        if value not in ("fp32", "bf16", "fp16"):
            self._refuse(key, value, 'expected "fp32", "bf16" or "fp16"')
        else:
            types[field] = value

    # ---- batch arithmetic -----------------------------------------------------------------------------------------------

    def _accumulate(self) -> int:
        """train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks; the missing one is derived."""
        sizes = {**self._document, "ranks": self._ranks}
        # "auto" in a batch size is filled in from the data loader, and says nothing that is needed here.
        sizes.update({key: None for key in (_TOTAL, _MICRO) if sizes.get(key) == "auto"})
        given = {key: value for key in (_TOTAL, _MICRO, _ACCUMULATE, "ranks") if (value := self._integer(sizes, key)) is not None}
        shown = ", ".join(f"{key} = {value}" for key, value in given.items())
        accumulate = given.get(_ACCUMULATE)
        total = given.pop(_TOTAL, None)
        if total is None:
            return accumulate or 1
        product = math.prod(given.values())
        rest, remainder = divmod(total, product)
        if remainder or rest == 0 or (len(given) == 3 and rest != 1):
            relation = "is not" if len(given) == 3 else "is no multiple of"
            self.faults.append(f"batch numbers contradict each other: {shown}; {total} {relation} {product}")
        elif accumulate is None and _MICRO in given and "ranks" not in given and rest != 1:
            self.faults.append(f"{_ACCUMULATE} is missing: {shown}; it is {rest} / ranks, so give it, or ranks=")
        elif accumulate is None and _MICRO in given:
            return rest
        return accumulate or 1


def _is_off(value: object) -> bool:
    """Whether a switch or a section says that it does nothing."""
    if isinstance(value, Mapping):
        section = cast("Mapping[str, Any]", value)
        off = section.get("enabled") is False or ("device" in section and _is_off(section["device"]))
        return off or all(_is_off(entry) for entry in section.values())
    return value is None or value is False or value in ([], "none")


def _short(value: object) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."


# Strings are matched first, so that what looks like a comment inside one stays.
_STRING, _COMMENT = r'"(?:[^"\\\n]|\\.)*"', r"//[^\n]*|#[^\n]*|/\*.*?\*/"


def _plain_json(text: str) -> str:
    """``text`` without comments and without commas before a closing bracket: DeepSpeed reads Hjson, which has both."""

    def without(pattern: str, text: str) -> str:
        return re.sub(f"({_STRING})|(?:{pattern})", lambda found: found[1] or " ", text, flags=re.DOTALL)

    return without(r",(?=\s*[}\]])", without(_COMMENT, text))


def load_json(path: Path) -> Mapping[str, Any]:
    """The object in a file. Comments and trailing commas are read over.

    Raises:
        ConfigError: the file can't be read, is not JSON, has a key twice, or no object at its top.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        if twice := sorted({key for key in keys if keys.count(key) > 1}):
            raise ConfigError(f"{path}: given twice: {', '.join(twice)}; keep one of each")
        return dict(pairs)

    decode: Callable[..., Any] = json.loads
    try:
        document = decode(_plain_json(path.read_text(encoding="utf-8")), object_pairs_hook=unique)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give the path of a DeepSpeed JSON") from error
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: expected an object at the top level")
    return cast("dict[str, Any]", document)
