"""Recomputation and offload: what four witnesses say of the same step, for every stage, place, precision and policy.

    python -m benchmarks.tiers_grid               72 configurations on two ranks, and how far the witnesses agree
    python -m benchmarks.tiers_grid --all         the whole product, 240 of them
    python -m benchmarks.tiers_grid --only full   points whose description contains this

Books and allocator are of one real run on gloo (`forecast_grid`), the simulation is of the engine itself on fake tensors, the closed form
imports neither. What is compared: the device's peak with its accounts, what each tier holds between steps and at its highest, and the
bytes that move over each link in a step.
"""

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

import shardbook as sb
from benchmarks.forecast_grid import RECOMPUTES, FromTheStart, Measured, Point, forecast
from benchmarks.simulation_grid import measure, pairs_of, simulated_all

PRECISIONS = ("fp32", "bf16", "2+2+4+8", "pure-bf16")
AT_ONCE = 24
"""Points that share their ranks' processes."""

SLACK_NBYTES = 64
"""What a closed form leaves out of WORKSPACE: numbers that a kernel keeps, 4 or 8 bytes each."""


BATCHES = {"small decoder": (8, 64), "decoder 12 layers": (2, 256)}
"""Micro-batch and sequence: the first peaks in its loss, the second in the backward of a block."""


def places() -> list[tuple[int, str, str]]:
    """(stage, optimizer, parameters): where states may lie."""
    return [
        (stage, optimizer, params)
        for stage in (1, 2, 3)
        for optimizer in ("none", "host", "disk")
        for params in ("none", "host")
        if params == "none" or stage == 3
    ]


def points(*, folder: str, shape: str = "small decoder", whole: bool = False) -> list[Point]:
    """Every place with six pairs of precision and policy, which take turns; ``whole``: with all twenty."""
    pairs = list(product(PRECISIONS, RECOMPUTES))
    found: list[Point] = []
    for number, (stage, optimizer, params) in enumerate(places()):
        turns = pairs if whole else [pairs[7 * (6 * number + turn) % len(pairs)] for turn in range(6)]
        found += [
            Point(
                shape=shape, stage=stage, precision=precision, micro_batch=BATCHES[shape][0], sequence=BATCHES[shape][1], ranks=2,
                recompute=recompute,
                optimizer_on=optimizer, params_on=params, folder=folder if optimizer == "disk" else "",  # pyright: ignore[reportArgumentType]
            )
            for precision, recompute in turns
        ]  # fmt: skip
    return found


def disagreements(point: Point, saw: Measured, simulated: sb.Forecast, formula: sb.Forecast) -> list[str]:
    """In words, where the witnesses differ on rank 0 of two; empty: they agree to the bounds that they promise."""
    return list(_disagreements(point, saw, simulated, formula))


def _disagreements(point: Point, saw: Measured, simulated: sb.Forecast, formula: sb.Forecast) -> Iterator[str]:
    if saw.books.get("UNACCOUNTED") or saw.overstated:
        yield f"books and allocator: {saw.books.get('UNACCOUNTED')} unaccounted, {saw.overstated} overstated"
    for name, told, slack in (("simulation", simulated, 0), ("closed form", formula, SLACK_NBYTES)):
        yield from _apart(f"{name}: peak", saw.books, told.accounts, slack if point.kernel == "fused" else SLACK_NBYTES)
        yield from _apart(f"{name}: highest on the host", saw.host, told.host, slack)
        yield from _apart(f"{name}: moved", saw.moved, told.moved, 0)
        for tier in ("device", "host", "disk"):
            yield from _apart(f"{name}: {tier} between steps", saw.between.get(tier, {}), told.between.get(tier, {}), 0)


def _apart(what: str, seen: Mapping[str, int], told: Mapping[str, int], slack: int) -> Iterator[str]:
    for account in sorted({*seen, *told}):
        difference = told.get(account, 0) - seen.get(account, 0)
        if abs(difference) > (slack if account == "WORKSPACE" else 0):
            yield f"{what}: {account} {difference:+,} of {seen.get(account, 0):,}"


def check(chosen: Sequence[Point]) -> tuple[int, dict[Point, list[str]]]:
    """How many pairs of a rank's steps are equal to the byte in peak, accounts and every phase; and what differs, by point."""
    measured: dict[Point, list[FromTheStart]] = {}
    for first in range(0, len(chosen), AT_ONCE):
        measured |= measure(chosen[first : first + AT_ONCE])
    simulated = dict(zip(chosen, simulated_all([(point, 0) for point in chosen]), strict=True))
    found = {point: disagreements(point, measured[point][0].later, simulated[point], forecast(point)) for point in chosen}
    equal = sum(_are_equal(point, measured[point][0], simulated[point]) for point in chosen)
    return equal, found


def _are_equal(point: Point, saw: FromTheStart, told: sb.Forecast) -> bool:
    return all(pair.is_equal and pair.is_same_place and not any(pair.phases.values()) for pair in pairs_of(point, saw, told))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="points whose description contains this")
    parser.add_argument("--shape", default="small decoder", choices=list(BATCHES))
    parser.add_argument("--all", action="store_true", help="the whole product")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        chosen = [point for point in points(folder=folder, shape=options.shape, whole=options.all) if options.only in str(point)]
        equal, found = check(chosen)
    for point, differences in found.items():
        for line in differences:
            print(f"{point}: {line}")
    kinds = Counter(line.split(":")[0] for differences in found.values() for line in differences)
    agree = sum(not differences for differences in found.values())
    print(
        f"{len(chosen)} configurations: all witnesses agree on {agree}; simulation equal in both steps, phase by phase, on {equal}"
        + (f"; differences by witness: {dict(kinds)}" if kinds else "")
    )
    return 0 if agree == equal == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
