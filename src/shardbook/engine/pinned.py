"""Pins memory of the host as it is, so that a device copies from and to it by itself.

``torch.empty(pin_memory=True)`` rounds each request up to a power of two; registering memory that is there costs not a byte more.
"""

import weakref
from typing import Any

import torch
from torch import Tensor

from shardbook.errors import ConfigError


def pin(tensor: Tensor) -> None:
    """Pin the tensor's memory until its storage dies. Needs CUDA.

    Raises:
        ConfigError: the driver refuses (a limit on locked memory, mostly).
    """
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return
    runtime: Any = torch.cuda.cudart()
    address, code = storage.data_ptr(), int(runtime.cudaHostRegister(storage.data_ptr(), storage.nbytes(), 0))
    if code:
        raise ConfigError(
            f"Offload: the driver pins no {storage.nbytes():,} bytes of host memory (cudaHostRegister returned {code}); "
            f"raise the limit on locked memory (ulimit -l), or offload less"
        )
    weakref.finalize(storage, runtime.cudaHostUnregister, address)
