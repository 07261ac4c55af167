"""Step times of engines that can't live in the same processes, paired all the same: each has ranks of its own, and they take turns.

    found = turns.measure({"ours": make_ours, "theirs": make_theirs}, "fp32", config, micro_batch=1, num_rounds=12)

All ranks of all engines are alive at once and wait, asleep, until it is their engine's turn; a round is one step of each, in an order
that rotates, between two barriers, with what the step left under way awaited. Losses of the first steps are compared before any time
counts. Ranks and their caller talk through a store: a turn is a key that is set.
"""

import pickle
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from benchmarks import models, ranks, step_time
from benchmarks.engines import Contender, Dtype

NUM_RANKS = 2
END = -1
Make = Callable[[Dtype, models.GPTConfig], Contender]


@dataclass(frozen=True, kw_only=True)
class Done:
    """A step: the slowest rank's seconds, all ranks' seconds on cores, the mean loss, and programs that were started meanwhile."""

    seconds: float
    on_cores: float
    loss: float
    programs: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Turns:
    """Paired times of all engines, and how each began: from building it to the end of its first step."""

    times: step_time.Times
    first: dict[str, Done]


def measure(
    makes: Mapping[str, Make], dtype: Dtype, config: models.GPTConfig, *, micro_batch: int, num_rounds: int, budget_seconds: float = 60.0
) -> Turns:
    """Rounds end early when they have taken ``budget_seconds``, after five at the least.

    Raises:
        RankFailedError: a rank raised, or did not answer.
        RuntimeError: the losses differ, so that times would compare different training.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=ranks.TIMEOUT)
    with ThreadPoolExecutor(len(makes)) as threads:
        callers: dict[str, _Caller] = {}
        first: dict[str, Done] = {}
        try:
            for name, make in makes.items():  # one after the other, so that how long each takes to begin is its own
                running = threads.submit(ranks.run, NUM_RANKS, _obey, name, make, dtype, config, micro_batch, store.port, seconds=1800.0)
                callers[name] = _Caller(name, store, running)
                first[name] = callers[name].turn(0)
            warm = {name: [caller.turn(step).loss for step in range(1, step_time.WARM_STEPS)] for name, caller in callers.items()}
            step_time.check_losses(warm, dtype)
            rounds = _rounds(callers, num_rounds, budget_seconds)
        finally:
            for caller in callers.values():
                caller.order(END)
    last = {name: losses[-1] for name, losses in warm.items()}
    return Turns(times=step_time.Times(names=tuple(makes), rounds=tuple(rounds), losses=last), first=first)


def _rounds(callers: "Mapping[str, _Caller]", num_rounds: int, budget_seconds: float) -> list[step_time.Round]:
    rounds: list[step_time.Round] = []
    names = list(callers)
    for number in range(num_rounds):
        if len(rounds) > step_time.MIN_ROUNDS and sum(found.lasted for found in rounds) > budget_seconds:
            break
        busy, _, began = step_time.usage()
        done = {name: callers[name].turn(step_time.WARM_STEPS + number) for name in step_time.rotated(names, number)}
        busy_after, _, ended = step_time.usage()
        others = busy_after - busy - sum(one.on_cores for one in done.values())
        seconds = {name: done[name].seconds for name in names}
        rounds.append(step_time.Round(seconds=seconds, foreign=step_time.share(others, ended - began), lasted=ended - began))
    return rounds


class _Caller:
    """Whoever calls one engine's ranks up."""

    def __init__(self, name: str, store: TCPStore, running: "Future[list[Any]]") -> None:
        self._name, self._store, self._running, self._num_orders = name, store, running, 0

    def order(self, step: int) -> None:
        self._store.set(f"{self._name}/{self._num_orders}", str(step))
        self._num_orders += 1

    def turn(self, step: int) -> Done:
        """One step of all ranks."""
        keys = [f"{self._name}/{self._num_orders}/{rank}" for rank in range(NUM_RANKS)]
        self.order(step)
        while not self._store.check(keys):
            if self._running.done():
                self._running.result()
                raise ranks.RankFailedError(f"the ranks of {self._name} ended before their turn")
            time.sleep(0.002)
        done: list[Done] = [pickle.loads(self._store.get(key)) for key in keys]
        return Done(
            seconds=max(one.seconds for one in done),
            on_cores=sum(one.on_cores for one in done),
            loss=sum(one.loss for one in done) / len(done),
            programs=tuple(program for one in done for program in one.programs),
        )


def _obey(name: str, make: Make, dtype: Dtype, config: models.GPTConfig, micro_batch: int, port: int) -> None:
    """A rank's life: a step whenever it is called up. Building the engine counts into the first."""
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=ranks.TIMEOUT)
    rank, programs = dist.get_rank(), list[str]()
    sys.addaudithook(lambda event, arguments: programs.append(str(arguments[1])) if event == "subprocess.Popen" else None)
    contender: Contender | None = None
    number = 0
    while (step := int(store.get(f"{name}/{number}"))) != END:
        inputs, targets = models.batch(config, micro_batch, rank=rank, step=step)
        dist.barrier()
        programs.clear()
        began, on_core = time.perf_counter(), time.process_time()
        contender = contender or make(dtype, config)
        loss = contender.step(inputs, targets)
        contender.settle()
        seconds = time.perf_counter() - began
        done = Done(seconds=seconds, on_cores=time.process_time() - on_core, loss=float(loss), programs=tuple(programs))
        store.set(f"{name}/{number}/{rank}", pickle.dumps(done))
        number += 1
