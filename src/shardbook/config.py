"""What a run is told: frozen, keyword-only data classes that check themselves when they are built.

    ZeroConfig
    ├── Precision    which types the engine keeps, hence bytes per parameter
    ├── Prefetch     how far gathers run ahead of use
    ├── Recompute    which activations are computed again in backward
    └── Offload      what lives outside the device

A class first looks at each field by itself, then at what the fields say together, and raises one
:class:`~shardbook.errors.ConfigError` that lists everything it found. No setting is ignored in silence: what has no effect
is refused, and so is what this version can't do. Nothing here imports torch: a torch dtype is recognised by its name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from shardbook.checks import DTYPE_NBYTES, Check, listed, nearest, refuse


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The types the engine keeps, hence how many bytes each parameter costs.

    A type is ``"fp32"``, ``"bf16"``, ``"fp16"``, ``"fp64"`` or the torch dtype, and is stored as that short name.

    Args:
        param: type of gathered or replicated parameters: what forward and backward compute in, and what gathers carry.
        reduce: type in which the gradients of the ranks are added. They travel in the type autograd made them in.
        grad: type in which the reduced gradient waits for the step. ``None``: the ``reduce`` type.
        master: type of the copy the optimizer updates. ``None``: the optimizer updates ``param`` itself.
        keep_param_shard: at stage 3, keep the shard in the ``param`` type as well (2+2+4+8). ``False``: the master is cast
            at each gather. At stages 0 to 2 the parameters stay full, so that it changes nothing there.
        keep: name pattern (as in :mod:`fnmatch`) to type: parameters that stay out of the policy, ``{"*.norm.*": "fp32"}``.
        cast_inputs: cast floating-point inputs of the model to the ``param`` type.

    Raises:
        ConfigError: an unknown type; a master that is narrower than ``param``; ``keep_param_shard`` without a master of another type.

    >>> print(Precision(param="bf16").describe())
    bf16 parameters 2 + fp32 gradients 4 + fp32 master 4 + fp32 moments 4 each; stage 3 casts the master at each gather
    """

    param: str = "fp32"
    reduce: str = "fp32"
    grad: str | None = None
    master: str | None = "fp32"
    keep_param_shard: bool = False
    keep: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)
    cast_inputs: bool = True

    def __post_init__(self) -> None:
        check = Check(self)
        check.dtype("param")
        check.dtype("reduce")
        check.dtype("grad", optional=True)
        check.dtype("master", optional=True)
        check.flag("keep_param_shard")
        check.flag("cast_inputs")
        check.patterns("keep")
        check.done()
        nbytes = DTYPE_NBYTES
        if self.master_dtype != self.param and nbytes[self.master_dtype] <= nbytes[self.param]:
            wider = " or ".join(f'"{name}"' for name in nbytes if nbytes[name] > nbytes[self.param])
            remedy = f"use {wider}, or None to update the parameters themselves" if wider else "use None"
            check.add("master", self.master, f'a type that holds every {self.param} value, as param="{self.param}"', remedy)
        if self.keep_param_shard and not self.has_master:
            allowed = "False here: without a master of another type the shard is the parameter itself"
            check.add("keep_param_shard", True, allowed, "drop it, or give a master")
        check.done()

    @classmethod
    def preset(cls, name: str) -> Self:
        """A convention by name.

        ========== ============================================================== =====================================
        name       bytes per parameter, with two fp32 moments (bf16 in pure-bf16)   partitioned at stage 3
        ========== ============================================================== =====================================
        fp32       4 + 4 + 8                                                      everything
        bf16       2 + 4 + 4 + 8                                                  all but the 2, which exist only while gathered
        fp16       2 + 4 + 4 + 8, with a dynamic loss scale                       as bf16
        pure-bf16  2 + 2 + 4, no master                                           everything
        2+2+4+8    2 + 2 + 4 + 8, the 16-bit shard is kept                        everything
        ========== ============================================================== =====================================

        >>> Precision.preset("2+2+4+8").grad
        'bf16'
        """
        if name not in _PRESETS:
            refuse(f"Precision.preset({name!r})", f"one of {listed(_PRESETS)}", nearest(name, _PRESETS))
        return cls(**_PRESETS[name])

    @property
    def grad_dtype(self) -> str:
        """The type in which the reduced gradient waits for the step."""
        return self.grad or self.reduce

    @property
    def master_dtype(self) -> str:
        """The type of what the optimizer updates."""
        return self.master or self.param

    @property
    def has_master(self) -> bool:
        """Whether the optimizer updates a copy, not the parameters that forward reads."""
        return self.master_dtype != self.param

    def describe(self) -> str:
        """The convention in one line, in bytes per parameter, as a run prints it.

        >>> print(Precision().describe())
        fp32 parameters 4 + fp32 gradients 4 + no separate master + fp32 moments 4 each
        >>> print(Precision.preset("2+2+4+8").describe())
        bf16 parameters 2 + bf16 gradients 2 (added in fp32) + fp32 master 4 + fp32 moments 4 each; stage 3 keeps the bf16 shard too, 2 more
        """
        nbytes = DTYPE_NBYTES
        master = self.master_dtype
        added = "" if self.grad_dtype == self.reduce else f" (added in {self.reduce})"
        terms = [
            f"{self.param} parameters {nbytes[self.param]}",
            f"{self.grad_dtype} gradients {nbytes[self.grad_dtype]}{added}",
            f"{master} master {nbytes[master]}" if self.has_master else "no separate master",
            f"{master} moments {nbytes[master]} each",
        ]
        line = " + ".join(terms)
        if self.keep_param_shard:
            line += f"; stage 3 keeps the {self.param} shard too, {nbytes[self.param]} more"
        elif self.has_master:
            line += "; stage 3 casts the master at each gather"
        if self.keep:
            line += "; kept apart: " + ", ".join(f"{pattern} {dtype}" for pattern, dtype in self.keep.items())
        return line


_PRESETS: Mapping[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"param": "bf16"},
    "fp16": {"param": "fp16"},
    "pure-bf16": {"param": "bf16", "reduce": "bf16", "master": None},
    "2+2+4+8": {"param": "bf16", "grad": "bf16", "keep_param_shard": True},
}


@dataclass(frozen=True, kw_only=True)
class Prefetch:
    """How far gathers run ahead of use.

    Args:
        ahead: units gathered ahead of the one in use; 0 turns it off.
        limit: bytes of gathered parameters that looking ahead never exceeds. ``None``: ``ahead`` alone bounds it.

    Raises:
        ConfigError: ``ahead`` below 0, ``limit`` below 1, or either not an integer.

    >>> Prefetch(ahead=2, limit=64 * 2**20).limit
    67108864
    """

    ahead: int = 1
    limit: int | None = None

    def __post_init__(self) -> None:
        check = Check(self)
        check.integer("ahead", least=0, remedy="0 turns prefetch off")
        check.integer("limit", least=1, remedy="None leaves the bound to ahead", optional=True)
        check.done()


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """Which activations are dropped after forward and computed again in backward.

    Args:
        policy: ``"full"`` keeps a unit's inputs only, ``"selective"`` keeps what is dear to compute, ``"none"`` keeps all.
        every: apply it to every k-th unit.
        offload: keep the saved inputs on the host.

    Raises:
        ConfigError: an unknown policy, ``every`` below 1, or a detail of a policy that is off.

    >>> Recompute(policy="full", every=2).every
    2
    """

    policy: Literal["none", "full", "selective"] = "none"
    every: int = 1
    offload: bool = False

    def __post_init__(self) -> None:
        check = Check(self)
        check.choice("policy", ("none", "full", "selective"))
        check.integer("every", least=1, remedy="1 applies it to every unit")
        check.flag("offload")
        check.done()
        if self.policy == "none":
            remedy = 'choose policy="full" or "selective", or leave it out'
            if self.every != 1:
                check.add("every", self.every, 'no effect with policy="none"', remedy)
            if self.offload:
                check.add("offload", True, 'no effect with policy="none"', remedy)
        check.done()


@dataclass(frozen=True, kw_only=True)
class Offload:
    """What lives outside the device between uses.

    Args:
        optimizer: where master and moments live: ``"none"`` is the device.
        params: where parameter shards live, at stage 3.
        path: folder for ``"disk"``.

    Raises:
        ConfigError: an unknown place; ``"disk"`` without ``path``, or ``path`` without ``"disk"``.

    >>> Offload(optimizer="disk", path="state").path.name
    'state'
    """

    optimizer: Literal["none", "host", "disk"] = "none"
    params: Literal["none", "host"] = "none"
    path: Path | None = None

    def __post_init__(self) -> None:
        check = Check(self)
        check.choice("optimizer", ("none", "host", "disk"))
        check.choice("params", ("none", "host"))
        check.path("path", optional=True)
        check.done()
        if self.optimizer == "disk" and self.path is None:
            check.add("path", None, 'a folder with optimizer="disk"', "give path=")
        if self.optimizer != "disk" and self.path is not None:
            check.add("path", str(self.path), 'no effect without optimizer="disk"', 'drop it, or choose optimizer="disk"')
        check.done()


@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """Everything the engine is told.

    Args:
        stage: what is partitioned. 0: nothing; 1: optimizer state; 2: gradients too; 3: parameters too.
        precision: types, hence bytes per parameter.
        prefetch: how far gathers run ahead.
        recompute: activations computed again in backward.
        offload: what lives outside the device.
        accumulate: micro-batches in one step.
        clip_grad_norm: largest norm of the objective's gradient; ``None``: no clipping.
        reduction: ``"ordered"`` adds the ranks' gradients in rank order, ``"native"`` leaves the order to the backend,
            ``"auto"`` is ordered to 64 ranks and native above; what was chosen is printed.
        units: classes or names of the modules that are gathered together; ``None``: repeated blocks are found.
        loss_scale: fp16 only: a power of two, or ``"dynamic"``, which ``None`` means with fp16.
        init_sync: ``"rank0"`` sends the initial weights of rank 0 to all, ``"check"`` names the first that differs,
            ``"none"`` does neither.

    Raises:
        ConfigError: a field outside what is allowed, or fields that contradict each other; all of them are listed.

    >>> ZeroConfig(stage=2, precision=Precision(param="bf16"), accumulate=4).precision.grad_dtype
    'fp32'
    >>> ZeroConfig(stage=4)
    Traceback (most recent call last):
    shardbook.errors.ConfigError: ZeroConfig.stage = 4: allowed is 0, 1, 2 or 3; the nearest is 3
    """

    stage: Literal[0, 1, 2, 3] = 3
    precision: Precision = field(default_factory=Precision)
    prefetch: Prefetch = field(default_factory=Prefetch)
    recompute: Recompute = field(default_factory=Recompute)
    offload: Offload = field(default_factory=Offload)
    accumulate: int = 1
    clip_grad_norm: float | None = None
    reduction: Literal["auto", "ordered", "native"] = "auto"
    units: Sequence[str | type[Any]] | None = None
    loss_scale: float | Literal["dynamic"] | None = None
    init_sync: Literal["rank0", "check", "none"] = "rank0"

    def __post_init__(self) -> None:
        check = Check(self)
        check.stage("stage")
        for name, kind in (("precision", Precision), ("prefetch", Prefetch), ("recompute", Recompute), ("offload", Offload)):
            check.instance(name, kind)
        check.integer("accumulate", least=1, remedy="1 steps after every micro-batch")
        check.positive("clip_grad_norm", remedy="None turns clipping off", optional=True)
        check.choice("reduction", ("auto", "ordered", "native"))
        check.units("units")
        check.loss_scale("loss_scale")
        check.choice("init_sync", ("rank0", "check", "none"))
        check.done()
        self._check_together(check)
        check.done()

    def _check_together(self, check: Check) -> None:
        grad = self.precision.grad_dtype
        if self.accumulate > 1 and DTYPE_NBYTES[grad] == 2:
            allowed = f"1 while gradients wait in {grad}: adding micro-batches in 16 bits loses bits"
            check.add("accumulate", self.accumulate, allowed, 'use Precision(grad="fp32")')
        if self.loss_scale is not None and self.precision.param != "fp16":
            allowed = f'None with param="{self.precision.param}": only fp16 gradients need a scale, so it would have no effect'
            check.add("loss_scale", self.loss_scale, allowed, "drop it")
        if self.stage == 0 and self.offload.optimizer != "none":
            allowed = '"none" at stage 0, where every rank steps on all parameters: each would keep a copy of all on one host'
            check.add("offload.optimizer", self.offload.optimizer, allowed, "use stage 1, 2 or 3")
        if self.stage < 3 and self.offload.params != "none":
            allowed = f'"none" at stage {self.stage}: only stage 3 releases parameters'
            check.add("offload.params", self.offload.params, allowed, "use stage 3, or drop it")

    @property
    def effective_loss_scale(self) -> float | Literal["dynamic"]:
        """The loss scale in force: 1.0 unless parameters are fp16."""
        if self.precision.param != "fp16":
            return 1.0
        return "dynamic" if self.loss_scale is None else self.loss_scale

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], *, where: str = "") -> Self:
        """A configuration from nested plain data, as TOML or JSON give it.

        A sub-configuration is a mapping of its fields; ``precision`` may also be the name of a preset. ``"none"`` stands for
        ``None``, which TOML can't write. ``where`` is put before the place of each fault.

        Raises:
            ConfigError: every unknown key with the nearest valid one, every wrong value, all in one error.

        >>> ZeroConfig.from_mapping({"stage": 1, "precision": {"param": "bf16"}, "clip_grad_norm": 1}).clip_grad_norm
        1.0
        """
        from shardbook.config_files import build_from_mapping  # down here because it needs the classes above

        return build_from_mapping(cls, values, where)

    @classmethod
    def from_toml(cls, path: Path | str) -> Self:
        r"""A configuration from a TOML file: its ``[zero]`` table and sub-tables, or the same keys at the top level.

        Beside ``[zero]``, tables of other names belong to the rest of a recipe and are left alone, unless a name is or
        resembles a key of this class.

        Raises:
            ConfigError: the file is missing or not TOML; unknown keys; wrong values. File and table are named.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     recipe = Path(folder, "recipe.toml")
        ...     _ = recipe.write_text('[zero]\nstage = 2\n[zero.precision]\nparam = "bf16"\n')
        ...     ZeroConfig.from_toml(recipe).stage
        2
        """
        from shardbook.config_files import read_toml

        return read_toml(cls, Path(path))

    @classmethod
    def from_deepspeed(cls, source: Path | str | Mapping[str, Any], *, ranks: int | None = None) -> Self:
        """A configuration that trains as a DeepSpeed JSON (a path, or its content) says.

        Honoured: ``zero_optimization.stage``, ``bf16``, ``fp16`` with ``loss_scale`` (0 is dynamic),
        ``gradient_accumulation_steps``, ``gradient_clipping`` (off where it is absent or 0, as in DeepSpeed's own defaults),
        ``communication_data_type``, ``data_types.grad_accum_dtype``, ``offload_optimizer`` and ``offload_param``. Keys that only
        tune DeepSpeed's own buffers or its logging are named in one ``UserWarning``, as they have no effect here. Everything else is
        refused by name.

        Args:
            source: path of the JSON, or the mapping in it.
            ranks: number of data-parallel ranks; with it the three batch numbers are checked, and the missing one derived.

        Raises:
            ConfigError: every key that can't be honoured, with the reason; batch numbers that contradict each other, all shown.

        >>> ZeroConfig.from_deepspeed({"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}).stage
        2
        """
        from shardbook.deepspeed import read_deepspeed

        return read_deepspeed(cls, source, ranks)
