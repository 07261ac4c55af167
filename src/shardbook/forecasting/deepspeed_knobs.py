"""What a DeepSpeed JSON says about memory, read as DeepSpeed 0.19.8 reads it, with its own defaults where it says nothing.

Nothing is refused because shardbook's engine could not do it: this is for forecasts of DeepSpeed itself. ``"auto"`` is filled in as
transformers' integration does where that is known (``hidden``), else DeepSpeed's default counts and the key is named.

>>> knobs = read({"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}, "bf16": {"enabled": True}}, hidden=4096)
>>> knobs.stage, knobs.reduce_bucket_size, knobs.prefetch_bucket_size, knobs.overlap_comm
(3, 16777216, 50000000, True)
"""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from shardbook.accounts import Account
from shardbook.checks import DTYPE_NBYTES
from shardbook.deepspeed import TOP_KEYS, TYPE_KEYS, ZERO_KEYS, load_json
from shardbook.errors import ConfigError
from shardbook.forecasting.conventions import PRESETS, Convention

Dtype = Literal["fp32", "bf16", "fp16"]
Place = Literal["none", "cpu", "nvme"]
_DTYPES = {
    "fp32": "fp32",
    "float32": "fp32",
    "float": "fp32",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp16": "fp16",
    "float16": "fp16",
    "half": "fp16",
}
_PLACES = ("none", "cpu", "nvme")
_FLAGS = {
    **dict.fromkeys(("true", "t", "yes", "y", "on", "1", "1.0"), True),
    **dict.fromkeys(("false", "f", "no", "n", "off", "0", "0.0"), False),
}
"""What pydantic, which reads DeepSpeed's sections, takes for true and false; it does not read the top level."""
_MORE_TOP_KEYS = (
    "log_level", "disable_python_gc", "managed_gradient_accumulation", "gradient_allreduce_op", "timers", "expert_parallel",
    "weight_quantization", "sequence_parallel_size", "datastates_ckpt",
)  # fmt: skip
_OFFLOAD_KEYS = frozenset((
    "device", "nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pin_memory", "pipeline_read", "pipeline_write", "fast_init",
    "ratio", "super_offload", "cpuadam_cores_perc",
))  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """DeepSpeed's settings that bytes depend on; the defaults are those of DeepSpeed 0.19.8. ``*_size`` and distances are in elements.

    Args:
        stage: ``zero_optimization.stage``.
        dtype: type of the model: ``bf16.enabled``, ``fp16.enabled``, else fp32.
        grad_accum_dtype: ``data_types.grad_accum_dtype``; the model's type unless set.
        communication_dtype: in which gradients are reduced; the model's type unless set.
        reduce_bucket_size, allgather_bucket_size: elements of one bucket.
        overlap_comm: two buckets instead of one; on at stage 3 unless set.
        contiguous_gradients: gradients are copied into the bucket.
        reduce_scatter: a rank keeps its own part; else buckets are all-reduced.
        multi_rank_buckets: ``use_multi_rank_bucket_allreduce``: one all-reduce for the parts of all ranks.
        round_robin_gradients: partitions are dealt out in turns.
        prefetch_bucket_size, param_persistence_threshold, model_persistence_threshold, max_live_parameters, max_reuse_distance: of
            stage 3: fetched ahead; parameters below it are never partitioned, up to so many in all; live at most; not released when
            used again within.
        sub_group_size: elements that stage 3's optimizer steps on at once.
        offload_optimizer, offload_param: where they live.
        pin_optimizer, pin_param: whether in pinned memory.
        offload_ratio: share of the optimizer that is offloaded (stage 3).
        param_buffer_count, param_buffer_size, max_in_cpu: buffers of parameters on NVMe, and elements of them in host memory.
        immediate_grad_update: of ``bf16``: gradients are added in fp32 as they come (stage 1 with fp32 accumulation).
        narrow_master, narrow_moments: ``bf16_master_weights_and_grads`` (fp16 alike) and ``bf16_optimizer_states``.
        gradient_clipping: largest norm; 0: off. DeepSpeed's own default is 1.
        accumulate: ``gradient_accumulation_steps``.
        micro_batch: ``train_micro_batch_size_per_gpu``; None where the file does not say.
        hpz_partition_size: ranks of ZeRO++'s second partition of the parameters.
        optimizer: ``optimizer.type`` in small letters; "": built in Python.
        cpu_checkpointing, partition_activations: of ``activation_checkpointing``.
        unknown: keys that nothing here knows, in full.
        automatic: keys that were ``"auto"`` and could not be filled in.
        notes: what a person should know, in sentences.
    """

    stage: int = 0
    dtype: Dtype = "fp32"
    grad_accum_dtype: Dtype = "fp32"
    communication_dtype: Dtype = "fp32"
    reduce_bucket_size: int = 500_000_000
    allgather_bucket_size: int = 500_000_000
    overlap_comm: bool = False
    contiguous_gradients: bool = True
    reduce_scatter: bool = True
    multi_rank_buckets: bool = True
    round_robin_gradients: bool = False
    prefetch_bucket_size: int = 50_000_000
    param_persistence_threshold: int = 100_000
    model_persistence_threshold: int = sys.maxsize
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    sub_group_size: int = 1_000_000_000
    offload_optimizer: Place = "none"
    offload_param: Place = "none"
    pin_optimizer: bool = True
    pin_param: bool = True
    offload_ratio: float = 1.0
    param_buffer_count: int = 5
    param_buffer_size: int = 100_000_000
    max_in_cpu: int = 1_000_000_000
    immediate_grad_update: bool = False
    narrow_master: bool = False
    narrow_moments: bool = False
    gradient_clipping: float = 1.0
    accumulate: int = 1
    micro_batch: int | None = None
    hpz_partition_size: int = 1
    optimizer: str = ""
    cpu_checkpointing: bool = False
    partition_activations: bool = False
    unknown: tuple[str, ...] = ()
    automatic: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def uses_bf16_optimizer(self) -> bool:
        """Whether DeepSpeed takes its BF16_Optimizer: the gradients are then a whole fp32 buffer that lives always."""
        return (self.dtype, self.grad_accum_dtype, self.stage, self.offload_optimizer) == ("bf16", "fp32", 1, "none")

    def convention(self) -> Convention:
        """Bytes per parameter under these settings, on the device or wherever they are offloaded to.

        >>> read({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}).convention().name
        'deepspeed-bf16-fp32-grads'
        """
        wide = self.dtype == "bf16" and self.grad_accum_dtype == "fp32"
        found = PRESETS["deepspeed-bf16-fp32-grads" if wide else f"deepspeed-{self.dtype}"]
        if self.narrow_master:
            found = found.edited("master=2")
        if self.narrow_moments:
            found = found.edited("moment=4")
        width = DTYPE_NBYTES[self.grad_accum_dtype]
        return found if found.term(Account.GRAD).nbytes == width else found.edited(f"grad={width}")


def read(
    source: Path | str | Mapping[str, Any], *, ranks: int | None = None, hidden: int | None = None, dtype: Dtype | None = None
) -> Knobs:
    """The settings in a DeepSpeed JSON, or in the mapping of one.

    Args:
        source: path of the JSON, or its content.
        ranks: with it ``train_batch_size`` gives the number that is missing of the other two.
        hidden: elements of the model's residual stream, from which transformers fills in ``"auto"`` sizes.
        dtype: what ``"auto"`` means for ``bf16.enabled`` and ``fp16.enabled``.

    Raises:
        ConfigError: the file is none; a value out of range or of another kind; batch numbers that contradict each other. All are
            listed. Unknown keys are no error: they are in ``unknown``.
    """
    named = not isinstance(source, Mapping)
    document = load_json(Path(source)) if named else source
    reader = _Reader(document, hidden, dtype)
    knobs = reader.knobs(ranks)
    if reader.faults:
        name = str(source) if named else "DeepSpeed configuration"
        raise ConfigError("\n".join(f"{name}: {fault}" for fault in reader.faults))
    return knobs


class _Reader:
    """One pass over a document; what it finds wrong is in ``faults``."""

    def __init__(self, document: Mapping[str, Any], hidden: int | None, dtype: Dtype | None) -> None:
        self._hidden, self._dtype = hidden, dtype
        self.faults: list[str] = []
        self._unknown = [key for key in document if key not in TOP_KEYS and key not in _MORE_TOP_KEYS]
        self._automatic: list[str] = []
        self._notes: list[str] = []
        self._top = _Section("", document, self.faults, self._automatic)

    def knobs(self, ranks: int | None) -> Knobs:
        zero = self._zero_section()
        self._warn_of_unknown(zero, ZERO_KEYS, strip="stage3_")
        fields = {**self._types(), **self._buckets(zero), **self._stage3(zero), **self._offload(zero), **self._batch(ranks)}
        stage = fields["stage"] = zero.integer("stage", 0, least=0, most=3)
        fields["overlap_comm"] = zero.flag("overlap_comm", stage == 3)
        checkpointing = self._top.section("activation_checkpointing")
        fields["cpu_checkpointing"] = checkpointing.flag("cpu_checkpointing", False)
        fields["partition_activations"] = checkpointing.flag("partition_activations", False)
        fields["gradient_clipping"] = self._top.number("gradient_clipping", 1.0)
        kind = self._top.section("optimizer").values.get("type")
        fields["optimizer"] = kind.lower() if isinstance(kind, str) else ""
        self._contradictions(fields)
        return Knobs(**fields, unknown=tuple(self._unknown), automatic=tuple(self._automatic), notes=tuple(self._notes))

    def _zero_section(self) -> "_Section":
        if isinstance(given := self._top.values.get("zero_optimization"), bool):  # the oldest form: true is stage 1
            return _Section("zero_optimization.", {"stage": int(given)}, self.faults, self._automatic)
        zero = self._top.section("zero_optimization")
        filled = dict(zero.values)
        for key, value in self._by_hidden(zero).items():
            if filled.get(key) == "auto":
                filled[key] = value
        return replace(zero, values=filled)

    def _by_hidden(self, zero: "_Section") -> Mapping[str, int]:
        """What transformers fills in, from the width h of the model: h², 0.9 h² and 10 h; the last two at stage 3 only."""
        if self._hidden is None:
            return {}
        square = self._hidden * self._hidden
        sizes = {"reduce_bucket_size": square}
        if zero.values.get("stage") == 3:
            sizes |= {"stage3_prefetch_bucket_size": int(0.9 * square), "stage3_param_persistence_threshold": 10 * self._hidden}
        return sizes

    def _types(self) -> dict[str, Any]:
        old = "bfloat16" if "bf16" not in self._top.values else "bf16"
        bf16, fp16 = self._top.section(old), self._top.section("fp16")
        for section in (bf16, fp16):
            self._warn_of_unknown(section, TYPE_KEYS)
        on = {name: self._is_on(section, name) for name, section in (("bf16", bf16), ("fp16", fp16))}
        if all(on.values()):
            self.faults.append(f"{old}.enabled = true and fp16.enabled = true contradict each other: turn one off")
        dtype = "bf16" if on["bf16"] else "fp16" if on["fp16"] else "fp32"
        used = {"bf16": bf16, "fp16": fp16}.get(dtype)
        return {
            "dtype": dtype,
            "grad_accum_dtype": self._top.section("data_types").dtype("grad_accum_dtype", dtype),
            "communication_dtype": self._top.dtype("communication_data_type", dtype),
            "immediate_grad_update": bf16.flag("immediate_grad_update", False),
            "narrow_master": used is not None and used.flag(f"{dtype}_master_weights_and_grads", False),
            "narrow_moments": bf16.flag("bf16_optimizer_states", False),
        }

    def _is_on(self, section: "_Section", dtype: str) -> bool:
        if section.values.get("enabled") == "auto" and self._dtype is not None:
            return self._dtype == dtype
        return section.flag("enabled", False)

    def _buckets(self, zero: "_Section") -> dict[str, Any]:
        return {
            "reduce_bucket_size": zero.integer("reduce_bucket_size", 500_000_000, least=1),
            "allgather_bucket_size": zero.integer("allgather_bucket_size", 500_000_000, least=0),
            "contiguous_gradients": zero.flag("contiguous_gradients", True),
            "reduce_scatter": zero.flag("reduce_scatter", True),
            "multi_rank_buckets": zero.flag("use_multi_rank_bucket_allreduce", True),
            "round_robin_gradients": zero.flag("round_robin_gradients", False),
            "sub_group_size": zero.integer("sub_group_size", 1_000_000_000),
            "hpz_partition_size": zero.integer("zero_hpz_partition_size", 1),
        }

    def _stage3(self, zero: "_Section") -> dict[str, Any]:
        """Each may be written with ``stage3_`` before it or without."""
        defaults = {
            "prefetch_bucket_size": 50_000_000,
            "param_persistence_threshold": 100_000,
            "model_persistence_threshold": sys.maxsize,
            "max_live_parameters": 1_000_000_000,
            "max_reuse_distance": 1_000_000_000,
        }
        return {key: zero.integer(key if key in zero.values else f"stage3_{key}", default) for key, default in defaults.items()}

    def _offload(self, zero: "_Section") -> dict[str, Any]:
        param, optimizer = zero.section("offload_param"), zero.section("offload_optimizer")
        for section in (param, optimizer):
            self._warn_of_unknown(section, _OFFLOAD_KEYS)
        old_param, old_optimizer = zero.flag("cpu_offload_param", False), zero.flag("cpu_offload", False)
        return {
            "offload_param": param.choice("device", _PLACES, "cpu" if old_param else "none"),
            "offload_optimizer": optimizer.choice("device", _PLACES, "cpu" if old_optimizer else "none"),
            "pin_param": param.flag("pin_memory", True),
            "pin_optimizer": optimizer.flag("pin_memory", True),
            "offload_ratio": optimizer.number("ratio", 1.0, most=1.0),
            "param_buffer_count": param.integer("buffer_count", 5),
            "param_buffer_size": param.integer("buffer_size", 100_000_000),
            "max_in_cpu": param.integer("max_in_cpu", 1_000_000_000),
        }

    def _batch(self, ranks: int | None) -> dict[str, Any]:
        """train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks; the missing one is derived."""
        top = self._top
        total = top.optional_integer("train_batch_size")
        micro = top.optional_integer("train_micro_batch_size_per_gpu")
        steps = top.optional_integer("gradient_accumulation_steps")
        if total is not None and ranks is not None:
            known = ranks * (micro or 1) * (steps or 1)
            rest, left = divmod(total, known)
            if left or not rest or (micro and steps and rest != 1):
                shown = f"train_batch_size = {total}, micro-batch {micro}, accumulation {steps}, ranks {ranks}"
                self.faults.append(f"batch numbers contradict each other: {shown}; their product must be train_batch_size")
            elif micro is None:
                micro = rest
            elif steps is None:
                steps = rest
        return {"micro_batch": micro, "accumulate": steps or 1}

    def _contradictions(self, fields: Mapping[str, Any]) -> None:
        if fields["stage"] < 3 and fields["offload_param"] != "none":
            self._notes.append("zero_optimization.offload_param has no effect below stage 3")
        if fields["stage"] < 1 and fields["offload_optimizer"] != "none":
            self._notes.append("zero_optimization.offload_optimizer has no effect at stage 0")
        if fields["stage"] < 3 and fields["offload_ratio"] < 1:
            self.faults.append(f"offload_optimizer.ratio = {fields['offload_ratio']:g}: allowed is 1 below stage 3; drop it")
        if fields["stage"] < 1 and fields["narrow_master"]:
            self.faults.append("master_weights_and_grads in 16 bits: allowed at stages 1 to 3; choose one of them, or drop it")
        if fields["narrow_moments"] and not fields["narrow_master"]:
            self.faults.append("bf16.bf16_optimizer_states = true: allowed with bf16_master_weights_and_grads only; turn that on too")

    def _warn_of_unknown(self, section: "_Section", known: frozenset[str], strip: str = "") -> None:
        for key in section.values:
            if key not in known and key.removeprefix(strip) not in known:
                self._unknown.append(section.prefix + key)


@dataclass(frozen=True, slots=True)
class _Section:
    """One object of the document. A value that is wrong is added to ``faults``, and the default stands for it."""

    prefix: str
    values: Mapping[str, Any]
    faults: list[str]
    automatic: list[str]

    def section(self, key: str) -> "_Section":
        value = self.values.get(key)
        if value is not None and not isinstance(value, Mapping):
            self._fault(key, value, "an object")
            value = None
        inner = cast("Mapping[str, Any]", value) if value is not None else {}
        return _Section(f"{self.prefix}{key}.", inner, self.faults, self.automatic)

    def _get(self, key: str) -> Any:
        """None where the default stands: absent, null, or ``"auto"``, which is noted."""
        value = self.values.get(key)
        if value == "auto":
            if self.prefix + key not in self.automatic:
                self.automatic.append(self.prefix + key)
            return None
        return value

    def integer(self, key: str, default: int, *, least: int = 0, most: int = sys.maxsize) -> int:
        value = self._get(key)
        if value is None:
            return default
        if self.prefix and isinstance(value, str) and re.fullmatch(r"\s*[+-]?\d+\s*", value):  # pydantic takes "1000" for 1000
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value // 1 or not least <= value <= most:
            upper = "up" if most == sys.maxsize else f"to {most}"
            self._fault(key, value, f"a whole number from {least} {upper}")
            return default
        return int(value)

    def optional_integer(self, key: str) -> int | None:
        return self.integer(key, 0, least=1) or None

    def number(self, key: str, default: float, *, most: float = sys.float_info.max) -> float:
        value = self._get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= most:
            self._fault(key, value, "a number from 0 " + ("up" if most == sys.float_info.max else f"to {most:g}"))
            return default
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Also the words and numbers that pydantic takes for one."""
        value = self._get(key)
        if self.prefix and isinstance(value, (str, int, float)):
            value = _FLAGS.get(str(value).lower(), value)
        if value is not None and not isinstance(value, bool):
            self._fault(key, value, "true or false")
            return default
        return default if value is None else value

    def choice(self, key: str, allowed: tuple[str, ...], default: str) -> str:
        value = self._get(key)
        if value is not None and value not in allowed:
            self._fault(key, value, ", ".join(allowed))
            return default
        return default if value is None else value

    def dtype(self, key: str, default: str) -> str:
        value = self._get(key)
        if value is None:
            return default
        name = value.removeprefix("torch.") if isinstance(value, str) else ""
        found = _DTYPES.get(name if self.prefix else name.lower())  # only that of communication is read whatever its case
        if found is None:
            self._fault(key, value, '"fp32", "bf16" or "fp16"')
        return found or default

    def _fault(self, key: str, value: object, allowed: str) -> None:
        self.faults.append(f"{self.prefix}{key} = {value!r}: allowed is {allowed}; correct it, or leave it to DeepSpeed's default")
