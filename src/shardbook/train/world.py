"""Which ranks there are: those that torchrun or SLURM started, or none yet. Reads the environment; imports no torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from shardbook.errors import ConfigError

_SLURM_PORTS = range(15_000, 35_000)


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among the ranks. ``variables`` is what torch's ``env://`` rendezvous reads."""

    rank: int
    num_ranks: int
    local_rank: int
    num_local_ranks: int
    started_by: str
    variables: Mapping[str, str]


ALONE = World(rank=0, num_ranks=1, local_rank=0, num_local_ranks=1, started_by="this process", variables={})


def find_world(environment: Mapping[str, str]) -> World | None:
    """The world that torchrun, or SLURM's srun, started this process in; ``None`` if nobody did.

    An sbatch script or an salloc shell by itself is no rank: only srun sets ``SLURM_STEP_NUM_TASKS``.

    Raises:
        ConfigError: some of the variables are there, but not all, or they are no numbers.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return _from_torchrun(environment)
    if "SLURM_PROCID" in environment and environment.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        return _from_slurm(environment)
    return None


def first_host(nodes: str) -> str:
    """The first host of a SLURM node list.

    >>> first_host("gpu-a[007-009,011],gpu-b2")
    'gpu-a007'
    """
    found = re.match(r"([^\[,]+)(?:\[([^\]]*)\]([^,\[]*))?", nodes)
    if found is None:
        raise ConfigError(f"SLURM_STEP_NODELIST = {nodes!r}: no host name in it; set MASTER_ADDR")
    stem, numbers, rest = found.groups()
    return stem + (re.split("[-,]", numbers)[0] if numbers else "") + (rest or "")


def _from_torchrun(environment: Mapping[str, str]) -> World:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if missing:
        raise ConfigError(f"RANK and WORLD_SIZE are set, but {' and '.join(missing)} not: unset them, or start with torchrun")
    rank, num_ranks = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    local = _number(environment, "LOCAL_RANK", rank)
    num_local = _number(environment, "LOCAL_WORLD_SIZE", num_ranks)
    return World(rank=rank, num_ranks=num_ranks, local_rank=local, num_local_ranks=num_local, started_by="torchrun", variables={})


def _from_slurm(environment: Mapping[str, str]) -> World:
    rank, num_ranks = _number(environment, "SLURM_PROCID"), _number(environment, "SLURM_STEP_NUM_TASKS")
    local = _number(environment, "SLURM_LOCALID", 0)
    tasks = re.match(r"\d+", environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_TASKS_PER_NODE", "1")))
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if not nodes and "MASTER_ADDR" not in environment:
        raise ConfigError("SLURM_PROCID is set, but no node list: set MASTER_ADDR, or start with srun")
    # Every rank has to find the same port without asking: it follows from the job and the step.
    port = _SLURM_PORTS[(_number(environment, "SLURM_JOB_ID", 0) + 7 * _number(environment, "SLURM_STEP_ID", 0)) % len(_SLURM_PORTS)]
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(local),
        "MASTER_ADDR": environment.get("MASTER_ADDR") or first_host(nodes or ""),
        "MASTER_PORT": environment.get("MASTER_PORT") or str(port),
    }
    num_local = int(tasks.group()) if tasks else 1
    return World(rank=rank, num_ranks=num_ranks, local_rank=local, num_local_ranks=num_local, started_by="SLURM", variables=variables)


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal():
        raise ConfigError(f"{name} = {text!r}: allowed is a number from 0 up; it is set by what starts the ranks")
    return int(text)
