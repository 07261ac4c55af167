"""Bytes that a step moves between tiers, by link: a formula for each way that the engine copies.

Σ over flat buffers; s elements of a shard, p, g, m bytes of an element of parameters, reduced gradients and master; k micro-batches.

    optimizer away     gradients down        s·g, once at stage 1, k times at 2 and 3; and up again k - 1 times there, to be added to
                       new values up         s·p, where parameters rest on the device
    gathers            up                    2k·s·p, where what they read lies on the host
    parameters alone   new values down       s·p; and s·p up before, where there is no master
    disk               in and out            s·(m + moments) each
"""

from collections import Counter
from collections.abc import Mapping

from shardbook.accounts import Tier
from shardbook.config import ZeroConfig
from shardbook.events import LinkName
from shardbook.forecasting.buffers import FlatForm, flat_form
from shardbook.forecasting.homes import homes, is_lifted, keeps_shard, rests_on_host
from shardbook.structure import Structure


def moved(structure: Structure, config: ZeroConfig, per_element: int, quantised_nbytes: int = 0) -> Mapping[str, int]:
    """Link to bytes in a step of this rank, for an optimizer with so many moments of each element, and bytes of it whatever its type.

    >>> from shardbook.config import Offload
    >>> from shardbook.structure import FlatFacts, GroupFacts
    >>> model = Structure.of_equal_units(FlatFacts(numels=(1000,)), GroupFacts(num_ranks=4))
    >>> moved(model, ZeroConfig(stage=2, offload=Offload(optimizer="host")), per_element=2)
    {'device to host': 1024, 'host to device': 1024}
    """
    found: Counter[LinkName] = Counter()
    for unit in structure.units:
        for flat in unit.flats:
            _add(found, flat_form(flat, config, structure.group), config, per_element, quantised_nbytes)
    return {str(link): nbytes for link, nbytes in found.items() if nbytes}


def _add(found: Counter[LinkName], form: FlatForm, config: ZeroConfig, per_element: int, quantised: int) -> None:
    s, p, g, where = form.shard_numel, form.param_nbytes, form.grad_nbytes, homes(config)
    if rests_on_host(form, config):
        found["host to device"] += 2 * config.accumulate * s * p
    if not form.trainable:
        return
    if where.grad is Tier.HOST:
        times = 1 if config.stage < 2 else config.accumulate
        found["device to host"] += times * s * g
        found["host to device"] += (times - 1) * s * g + (s * p if _is_new_value_lifted(form, config) else 0)
    elif where.param is Tier.HOST:
        found["device to host"] += s * p
        found["host to device"] += s * p if is_lifted(form, config) else 0
    if where.master is Tier.DISK:
        nbytes = s * (form.stepped_nbytes * (1 + per_element) + quantised)
        found["disk to host"] += nbytes
        found["host to disk"] += nbytes


def _is_new_value_lifted(form: FlatForm, config: ZeroConfig) -> bool:
    """Whether what the host has stepped on is needed on the device between steps."""
    return config.stage < 3 or (keeps_shard(form, config) and homes(config).param is Tier.DEVICE)
