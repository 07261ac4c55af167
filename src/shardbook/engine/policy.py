"""Which type each parameter has in each role: the policy of :class:`Precision` applied to one model."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from shardbook.config import Precision

DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


@dataclass(frozen=True, slots=True)
class Types:
    """Types of one flat buffer. ``master`` is None where the parameters are their own master."""

    source: torch.dtype  # as the model was built: what the master is copied from
    param: torch.dtype
    reduce: torch.dtype
    grad: torch.dtype
    master: torch.dtype | None


class Policy:
    """Applies a :class:`Precision` to a model's parameters.

    ``Precision.param`` governs the model's main floating type, the one that holds most elements. Parameters of another type, and
    those that ``Precision.keep`` names (by parameter or by enclosing module), stay out of the policy: they keep their type, and are
    never added, kept waiting or updated in a narrower one.
    """

    def __init__(self, precision: Precision, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        self._precision = precision
        self._keep: Mapping[str, str] = precision.keep
        numels: Counter[torch.dtype] = Counter()
        for _, parameter in named:
            if parameter.is_floating_point():
                numels[parameter.dtype] += parameter.numel()
        self._main = numels.most_common(1)[0][0] if numels else torch.float32

    def types(self, name: str, parameter: nn.Parameter, *, trainable: bool) -> Types:
        """The types of one parameter in each of its roles."""
        source = parameter.dtype
        kept = self._kept_type(name)
        if kept is not None:
            param = kept
        elif source == self._main and parameter.is_floating_point():
            param = DTYPES[self._precision.param]
        else:
            param = source
        if not trainable:
            return Types(source, param, param, param, None)
        reduce, grad = DTYPES[self._precision.reduce], DTYPES[self._precision.grad_dtype]
        if kept is not None or source != self._main:
            reduce, grad = torch.promote_types(reduce, param), torch.promote_types(grad, param)
        master = None if self._precision.master is None else DTYPES[self._precision.master]
        if master is not None and master.itemsize <= param.itemsize:
            master = None
        return Types(source, param, reduce, grad, master)

    def _kept_type(self, name: str) -> torch.dtype | None:
        parts = name.split(".")
        enclosing = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
        for pattern, dtype in self._keep.items():
            if any(fnmatchcase(path, pattern) for path in enclosing):
                return DTYPES[dtype]
        return None
