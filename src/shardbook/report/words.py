"""What the names in a report mean."""

from collections.abc import Mapping

COUNTERS: Mapping[str, str] = {
    "allocated": "bytes in live tensors, at their highest",
    "requested": "what those tensors asked for, before the allocator rounded it up",
    "active": "allocated, and freed blocks that a stream still uses",
    "reserved": "what the caching allocator took from the driver, at its highest; a CPU has no such allocator",
    "fragmentation": "reserved minus allocated, at the end",
    "largest_free_block": "the largest block that could be handed out without asking the driver, at the end",
    "driver": "device memory in use by everybody: contexts, communicators, other processes",
    "resident": "the process's resident set at its highest: interpreter, libraries and everything else included",
}
"""Counter to its definition. They are read side by side and never added to or taken from one another."""

NO_COUNTER = "none on a CPU"
"""For a counter that the device has not."""

MISSING: Mapping[str, str] = {"allocated": "not measured", "requested": "not measured", "resident": "not measured", "floor": "not measured"}
"""What to say instead for what every device has, or may have."""

ACCOUNTS: Mapping[str, str] = {
    "PARAM": "parameters in the type that forward and backward use, as far as they persist",
    "MASTER": "the copy the optimizer updates, where it is not PARAM itself",
    "MOMENT": "optimizer state",
    "GRAD": "reduced gradients, from reduction to step",
    "GATHERED": "full parameters of the units in use",
    "GRAD_FULL": "unreduced gradients",
    "COMM": "cast, staging and receive buffers of a collective",
    "ACTIVATION": "what autograd saved for backward",
    "WORKSPACE": "temporaries that were seen",
    "BUFFER": "module buffers",
    "INPUT": "the batch",
    "UNACCOUNTED": "what the allocator holds and no account explains",
}

CAUSES: Mapping[str, str] = {
    "issued late": "the collective was started too late to end in time",
    "bandwidth": "it was started in time, and the bytes took this long",
    "waiting for the producer": "what was to be sent was not computed yet",
    "waiting for a buffer": "the memory to receive it in was still taken",
    "straggler rank": "another rank came late",
}

TIMES: Mapping[str, str] = {
    "wall": "one step, mean of the steps looked at",
    "compute": "not waiting for any collective",
    "exposed": "standing still for a collective, as a union of intervals",
    "communication": "at least one collective under way, waited for or not",
    "floor": "what the bytes sent would take at the bandwidth measured in the same run",
}
