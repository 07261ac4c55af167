"""Run documents as they come from a run: one with every field filled, and those of light mode and of a run that was not measured."""

from dataclasses import replace

from shardbook.document import (
    Counters,
    Curve,
    Exposed,
    Item,
    Lever,
    RankMemory,
    Reconciliation,
    RunDocument,
    Shortage,
    StepMemory,
    StepTime,
)

MIB = 2**20
UNITS = ("embed", *(f"layers.{i}" for i in range(6)), "head")
PERSISTENT = {"MASTER": 48 * MIB, "MOMENT": 96 * MIB, "BUFFER": 2 * MIB}
BOOKS = PERSISTENT | {
    "GRAD": 30 * MIB, "GATHERED": 64 * MIB, "GRAD_FULL": 32 * MIB, "COMM": 16 * MIB, "ACTIVATION": 120 * MIB,
    "WORKSPACE": 8 * MIB, "INPUT": MIB, "UNACCOUNTED": 16 * MIB,
}  # fmt: skip
ALLOCATED = sum(BOOKS.values())

LIVE = {"MASTER": 48 * MIB, "MOMENT": 96 * MIB, "ACTIVATION": 150 * MIB}


def items():
    return (
        Item(account="MASTER", name="embed.weight", unit="embed", shape=(4096, 2048), dtype="float32", nbytes=32 * MIB,
             phase="", site=""),
        Item(account="ACTIVATION", name="aten::_log_softmax", unit="head", shape=(4, 256, 4096), dtype="float32", nbytes=64 * MIB,
             phase="forward", site="model.py:88 in loss"),
        Item(account="GATHERED", name="layers.5 full", unit="layers.5", shape=(4194304,), dtype="float32", nbytes=16 * MIB,
             phase="gather", site=""),
        Item(account="UNACCOUNTED", name="aten::empty", unit="", shape=(), dtype="uint8", nbytes=16 * MIB, phase="backward",
             site="a/very/long/path/to/some/where/that/goes/on/and/on/extension.py:1234 in a_function_with_a_long_name"),
    )  # fmt: skip


def reconciliation(rank, **changes):
    values = {
        "rank": rank, "step": 2, "phase": "backward", "unit": "layers.5", "operator": "aten::mm", "allocated": ALLOCATED,
        "base": 40 * MIB, "books": BOOKS, "closed_form": PERSISTENT | {"GRAD": 30 * MIB, "GATHERED": 48 * MIB}, "items": items(),
    }  # fmt: skip
    return Reconciliation(**(values | changes))


def curve(rank, num_instants=1500):
    """Forward climbs unit by unit, backward comes down again, the step takes a little on top."""
    seconds, allocated, spans = [], [], []
    accounts = {name: [] for name in ("MASTER", "MOMENT", "GRAD", "GATHERED", "GRAD_FULL", "COMM", "ACTIVATION", "WORKSPACE", "BUFFER")}
    for at in range(num_instants):
        part = at / num_instants
        up = min(part / 0.35, 1.0) if part < 0.35 else max(0.0, 1 - (part - 0.35) / 0.5)
        backward, stepping = 0.35 <= part < 0.85, part >= 0.85
        now = dict.fromkeys(accounts, 0) | PERSISTENT
        now["ACTIVATION"] = int(120 * MIB * up)
        now["GATHERED"] = 0 if stepping else (24 + 24 * (at // 12 % 2)) * MIB
        now["GRAD"] = int(30 * MIB * min(1.0, (part - 0.35) / 0.5)) if backward or stepping else 0
        now["GRAD_FULL"] = (16 + 16 * (at // 20 % 2)) * MIB if backward else 0
        now["COMM"] = 8 * MIB * (at // 15 % 2) if backward else 0
        now["WORKSPACE"] = 20 * MIB if stepping and at % 40 < 20 else 4 * MIB * (at // 7 % 2)
        for name, values in accounts.items():
            values.append(now[name])
        seconds.append(0.180 * part)
        allocated.append(sum(now[name] for name in accounts) + 3 * MIB)
    for phase, begin, end, names in (("forward", 0.0, 0.063, UNITS), ("backward", 0.063, 0.153, UNITS[::-1]), ("step", 0.153, 0.18, ())):
        spans.append((phase, "", begin, end))
        width = (end - begin) / max(1, len(names))
        spans += [(phase, name, begin + width * i, begin + width * (i + 1)) for i, name in enumerate(names)]
    return Curve(
        rank=rank, step=3, seconds=tuple(seconds), allocated=tuple(allocated),
        accounts={name: tuple(values) for name, values in accounts.items()}, spans=tuple(spans),
    )  # fmt: skip


def waiting():
    causes = ("issued late", "bandwidth", "waiting for the producer", "waiting for a buffer")
    for rank in (0, 1):
        for i, unit in enumerate(UNITS):
            yield Exposed(rank=rank, unit=unit, kind="gather", cause=causes[i % 4], culprit=None, seconds=0.001 * (i + 1) / (rank + 1))
            yield Exposed(rank=rank, unit=unit, kind="reduce", cause="bandwidth", culprit=None, seconds=0.0005 * (i + 1))
    yield Exposed(rank=0, unit="layers.3", kind="gather", cause="straggler rank", culprit=1, seconds=0.02)


def full(**changes):
    values = {
        "peak": BOOKS, "peak_phase": "backward", "peak_allocated": ALLOCATED, "peak_reserved": None,
        "allocator": "the profiler's allocation records", "convention": "4 + 4 + 4 + 8, stage 3: all of them partitioned",
        "num_parameters": 29_545_472,
        "settings": {"zero.stage": {"value": 3, "origin": "command line"}, "zero.clip_grad_norm": {"value": None, "origin": "default"}},
        "versions": {"torch": "2.13.0", "shardbook": "0.1.0"}, "data": "the standard library's sources",
        "losses": (8.3, None, 7.9), "validation_loss": 7.8, "skipped_steps": (2,), "num_tokens": 6144, "seconds": 0.55,
        "sent_nbytes": (300 * MIB, 300 * MIB), "sent_nbytes_per_step": 100 * MIB,
        "memory": tuple(RankMemory(rank=r, peak_allocated=ALLOCATED - r, peak_reserved=None, peak_resident=700 * MIB) for r in (0, 1)),
        "engine": "shardbook stage 3", "mode": "full", "notes": ("rank 1 was looked at for 2 of 3 steps",),
        "counters": (
            Counters(allocated=ALLOCATED, requested=ALLOCATED, resident=700 * MIB),
            Counters(allocated=ALLOCATED - MIB, requested=ALLOCATED - MIB, resident=690 * MIB),
        ),
        "reconciliations": (reconciliation(0), reconciliation(1, allocated=ALLOCATED - 16 * MIB, books=BOOKS | {"UNACCOUNTED": 0},
                                                              phase="forward", unit="head", operator="aten::_log_softmax")),
        "steps": tuple(
            StepMemory(rank=r, step=s, peak_allocated=ALLOCATED - r * 16 * MIB - (100 * MIB if s == 1 else 0),
                       phase="backward", unit="layers.5")
            for r in (0, 1) for s in (1, 2, 3)
        ),
        "curves": (curve(0), curve(1)),
        "times": tuple(
            StepTime(rank=r, num_steps=3, seconds=0.18 - 0.01 * r, compute=0.106, exposed=0.074 - 0.01 * r, communication=0.12, floor=0.05,
                     bandwidth=2e9, sent_nbytes=100 * MIB)
            for r in (0, 1)
        ),
        "exposed": tuple(waiting()),
        "shortage": Shortage(
            rank=1, step=3, phase="forward", unit="head", account="ACTIVATION", asked=64 * MIB, budget=350 * MIB,
            live=LIVE, forecast={"MASTER": 48 * MIB, "MOMENT": 96 * MIB, "ACTIVATION": 120 * MIB},
            levers=(Lever(name="zero.recompute = 'full'", nbytes=100 * MIB, cost="a second forward: about a third more time"),),
        ),
    }  # fmt: skip
    return RunDocument(**(values | changes))


def light():
    """As light mode writes it: counters, steps and resident sets, but no books."""
    return replace(
        full(), peak={}, peak_phase="", mode="light", reconciliations=(), curves=(), times=(), exposed=(), shortage=None, notes=()
    )


def bare():
    """As a run that was not measured writes it."""
    return replace(light(), peak_allocated=None, mode="", counters=(), steps=(), engine="", settings={}, versions={})
