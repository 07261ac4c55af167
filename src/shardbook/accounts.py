"""What a byte is for, and where it is: the two keys of every forecast, ledger and report."""

from enum import StrEnum


class Account(StrEnum):
    """What a byte is for. The lifetime of each account stands behind it."""

    PARAM = "PARAM"  # always: parameters in the type that forward and backward use
    MASTER = "MASTER"  # always: the copy the optimizer updates, where it is not PARAM itself
    MOMENT = "MOMENT"  # always, from the first step on: optimizer state
    GRAD = "GRAD"  # reduction to step: reduced gradients
    GATHERED = "GATHERED"  # gather to release: full parameters of units in use
    GRAD_FULL = "GRAD_FULL"  # backward to reduction: unreduced gradients
    COMM = "COMM"  # one collective: cast, staging and receive buffers
    ACTIVATION = "ACTIVATION"  # forward to backward: what autograd saved
    WORKSPACE = "WORKSPACE"  # inside an operator or a phase: temporaries that were seen
    BUFFER = "BUFFER"  # module buffers
    INPUT = "INPUT"  # the batch
    UNACCOUNTED = "UNACCOUNTED"  # what the allocator holds and no account explains


class Tier(StrEnum):
    """Where a byte is."""

    DEVICE = "device"
    HOST = "host"
    PINNED = "pinned"
    DISK = "disk"
