"""Every stage with every recomputation and offload, beside the plain loop, to the bit: two ranks, a block model of the zoo.

python -m benchmarks.tiers_bits            all, in batches that share one plain run
python -m benchmarks.tiers_bits --few      a selection, to see whether it runs
"""

import argparse
import time
from collections.abc import Iterator
from itertools import product

from tests.equality import OFFLOADS, RECOMPUTES, Case
from tests.test_engine_equality import compared
from tests.test_offload import possible

ENTRIES = ("tied",)
BATCH = 40


def cases() -> Iterator[Case]:
    """The whole product that stages allow; what is off everywhere is not among it."""
    for entry, stage, offload, recompute in product(ENTRIES, range(4), sorted(OFFLOADS), sorted(RECOMPUTES)):
        row = {"entry": entry, "stage": stage, "offload": offload, "recompute": recompute, "num_ranks": 2}
        if (offload, recompute) == ("none", "none") or not possible(row):
            continue
        for precision, clip, accumulate in product(("fp32", "bf16"), (True, False), (1, 3)):
            yield Case(**row, precision=precision, clip=clip, accumulate=accumulate)


def run(chosen: list[Case]) -> dict[Case, list[str]]:
    """What differs from the plain loop, by case: reports, weights, buffers, masters and moments."""
    ordered = sorted(chosen, key=lambda case: str(case.plain))  # those that one plain run answers stand together
    found: dict[Case, list[str]] = {}
    for begin in range(0, len(ordered), BATCH):
        found |= compared(ordered[begin : begin + BATCH], seconds=300)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--few", action="store_true")
    few = parser.parse_args().few
    chosen, began = list(cases()), time.monotonic()
    found = run(chosen[::37] if few else chosen)
    wrong = {case: texts for case, texts in found.items() if texts}
    for case, texts in wrong.items():
        print(case, texts[0])
    print(f"{len(found) - len(wrong)} of {len(found)} equal to the plain loop to the bit, {time.monotonic() - began:.0f} s")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
