"""Which operators of other engines say what their arguments are for, as data: seen under a ``TorchDispatchMode`` in torch 2.13.

Of the storages at these places, those that no holding claims (`peers`) belong to the account. The order of a gather in FSDP2:
``all_gather_copy_in``, ``_allgather_base_``, ``split_with_sizes_copy``; of a reduction: ``chunk_cat``, ``_reduce_scatter_base_``. DDP and
DeepSpeed 1 and 2 call ``allreduce_`` on their buckets and DeepSpeed gathers by ``_allgather_base_``: into the flat parameters (1 and 2,
claimed) or into a fresh flat tensor that parameters become views of (3).

What no mode ever sees (all figures for torch 2.13 on a CPU):

* ``UntypedStorage.resize_``, by which FSDP2 gives its all-gather outputs memory and takes it away. The storage lives on, empty.
* Buckets of DDP, made by C++ in the constructor and again in the first forward after a backward, and only ever seen as an argument.
* What an operator allocates inside: oneDNN's scratch in bf16 products, casts inside attention, and gloo's staging (:data:`STAGED`).
"""

from dataclasses import dataclass

from shardbook.accounts import Account


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """One argument of an operator: its position, its keyword, or ``"result"``. ``engine``: only under this one, as `engine_of` begins."""

    argument: int | str
    account: Account
    engine: str = ""


OPERATORS: dict[str, tuple[Place, ...]] = {
    "fsdp.all_gather_copy_in": (
        Place(argument=0, account=Account.COMM),  # shards (claimed), or their copy in the type that travels
        Place(argument=1, account=Account.COMM),
        Place(argument="result", account=Account.COMM),
    ),
    "fsdp.split_with_sizes_copy": (
        Place(argument=0, account=Account.COMM),
        Place(argument="out", account=Account.GATHERED),
    ),
    "fsdp.chunk_cat": (
        Place(argument=0, account=Account.GRAD_FULL),
        Place(argument="out", account=Account.COMM),
    ),
    "c10d._allgather_base_": (
        Place(argument=0, account=Account.COMM),
        Place(argument=1, account=Account.COMM),
    ),
    "c10d.allgather_": (
        Place(argument=0, account=Account.COMM),
        Place(argument=1, account=Account.COMM),
    ),
    "c10d._reduce_scatter_base_": (
        Place(argument=0, account=Account.GRAD, engine="fsdp2"),  # sharded gradients become views of it
        Place(argument=0, account=Account.COMM),
        Place(argument=1, account=Account.COMM),
    ),
    "c10d.reduce_scatter_": (
        Place(argument=0, account=Account.COMM),
        Place(argument=1, account=Account.COMM),
    ),
    "c10d.allreduce_": (Place(argument=0, account=Account.COMM),),
    "c10d.reduce_": (Place(argument=0, account=Account.COMM),),
    "c10d.broadcast_": (Place(argument=0, account=Account.COMM),),
    "c10d.alltoall_base_": (
        Place(argument=0, account=Account.COMM),
        Place(argument=1, account=Account.COMM),
    ),
}
"""Operator without its overload, to the places that tell something; the first that fits an argument counts."""

STAGED: dict[str, int] = {"c10d._allgather_base_": 0}
"""Operators for which gloo holds a copy of the argument at this position, as large and unseen, from the call until the work is done.

A first one is freed when the operator returns, the second lives in gloo's work thread: never both at once.
"""


def places_of(name: str, engine: str) -> tuple[Place, ...]:
    """The places of an operator (``c10d.allreduce_.default`` or without overload) under an engine, the first of each argument.

    >>> [place.account.value for place in places_of("c10d._reduce_scatter_base_.default", "fsdp2")]
    ['GRAD', 'COMM']
    """
    known = OPERATORS.get(".".join(name.split(".")[:2]), ())
    fitting: dict[int | str, Place] = {}
    for place in known:
        if engine.startswith(place.engine):
            fitting.setdefault(place.argument, place)
    return tuple(fitting.values())
