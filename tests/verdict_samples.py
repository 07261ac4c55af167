"""Verdicts made by hand, one of each kind."""

from shardbook.verifying.verdict import PhaseResult, Verdict

BOUND = 2.1e-7
ORIGIN = "the baseline, run again in 3 orders of summation"
PHASES = ("data", "forward", "backward", "reduce", "clip", "update", "state")
EVIDENCE = "each micro-batch's loss enters with one over its own tokens: 0.0128, 0.0312, 0.0833 where the baseline has 0.0217 three times"


def identical(num_steps=3):
    phases = tuple(PhaseResult(step=step, phase=phase, num_compared=4) for step in range(1, num_steps + 1) for phase in PHASES)
    losses = tuple((step, 2.0 / step, 2.0 / step) for step in range(1, num_steps + 1))
    return Verdict(
        kind="identical", num_steps=num_steps, candidate="shardbook, 2 ranks, a.rec", baseline="plain, 1 rank, b.rec", losses=losses,
        phases=phases,
    )  # fmt: skip


def within(num_steps=3):
    phases = tuple(
        PhaseResult(
            step=step, phase=phase, parameter="head.weight", deviation=step * 1e-8, bound=BOUND, same_bits=phase == "data", num_compared=4
        )
        for step in range(1, num_steps + 1)
        for phase in PHASES
    )  # fmt: skip
    return Verdict(
        kind="within_rounding", num_steps=num_steps, step=num_steps, phase="update", parameter="head.weight", deviation=3e-8, bound=BOUND,
        candidate="ddp, 2 ranks, a.rec", baseline="plain, 1 rank, b.rec", bound_origin=ORIGIN, phases=phases,
        losses=tuple((step, 2.0 / step, 2.0 / step + 1e-7) for step in range(1, num_steps + 1)),
    )  # fmt: skip


def different(num_steps=40, at=2, **fields):
    """From step ``at`` on gradients are others; data and, in that step, the loss are not."""
    return Verdict(**{
        "kind": "different", "rule": "weight.mean_of_means", "num_steps": num_steps, "step": at, "phase": "backward",
        "parameter": "head.weight", "rank": 1, "deviation": 0.183, "bound": BOUND, "bound_origin": ORIGIN,
        "ranking": (("weight.mean_of_means", 0.97, EVIDENCE), ("scale.micro_batches_missing", 0.02, "no one factor fits"),
                    ("unknown", 0.01, "something else"), ("decay.twice", 0.0, "settings are the same")),
        "candidate": "plain, 1 rank, a.rec", "baseline": "plain, 1 rank, b.rec",
        "notes": ("the candidate's kernels are not deterministic",),
        "losses": tuple((step, 2 / step + (0.1 if step > at else 0), 2 / step) for step in range(1, num_steps + 1)),
        "phases": tuple(_one(step, phase, at) for step in range(1, num_steps + 1) for phase in PHASES),
        **fields,
    })  # fmt: skip


def _one(step, phase, at):
    apart = phase != "data" and (step > at or (step == at and phase not in ("data", "forward")))
    return PhaseResult(
        step=step, phase=phase, parameter="head.weight" if apart else None, rank=1 if apart and phase == "backward" else None,
        deviation=0.183 if apart else 0.0, bound=BOUND, same_bits=not apart, num_compared=4,
    )  # fmt: skip
