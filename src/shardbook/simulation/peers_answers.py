"""What DDP's reducer needs of other ranks on fake tensors, whose ranks don't exist and whose numbers nobody knows.

torch's fake process group gives works without a result, and the reducer insists on one. And before the second forward the reducer deals its
parameters out to buckets anew, in the order in which gradients arrived, and sends that order around: it reads those few
integers, so they are real.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class AnsweringGroup(dist.ProcessGroup):
    """Sends by the process group that there is, and answers at once with the same tensors."""

    @classmethod
    def of_this_rank(cls) -> Self:
        make: Any = cls  # torch's stub knows another constructor only
        return make(dist.get_rank(), dist.get_world_size())

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "fake"

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] - one of its overloads
        for tensor in tensors:
            dist.all_reduce(tensor)
        return _done(tensors)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] - one of its overloads
        for tensor in tensors:
            dist.broadcast(tensor, src=0)
        return _done(tensors)


def _done(tensors: Sequence[Tensor]) -> Any:
    native: Any = torch._C
    future: Any = torch.futures.Future()
    future.set_result(tensors)
    return native._distributed_c10d._create_work_from_future(future)


class RealIndices(TorchDispatchMode):
    """While it is open, tensors of int32 that are made have values, and so have operators between them; all others stay fake."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        are_real = kwargs.get("dtype") is torch.int32 if not tensors else not any(isinstance(tensor, FakeTensor) for tensor in tensors)
        with unset_fake_temporarily() if are_real else nullcontext():
            return func(*args, **kwargs)
