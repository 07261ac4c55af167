"""Every rule broken for real, and what a verdict says of it: ``python -m benchmarks.verify_mutations [--only TEXT] [--list] [--right]``.

Prints a line for each mutation, the score, and what was missed; exit code 1 where fewer than 90% are named right, or any is called
the same. ``--right`` judges the same runs without their faults, which must be the same. ``--changes`` only says what each changes.
"""

import argparse
import importlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardbook.recording.read import Record
from tests import ranks
from tests.mutations import Folder, Mutation, controls, every, records
from tests.mutations_changes import change

NEEDED = 0.9


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="mutations whose name contains this")
    parser.add_argument("--list", action="store_true", help="names only")
    parser.add_argument("--right", action="store_true", help="the right runs beside the mutations")
    parser.add_argument("--changes", action="store_true", help="what each changes, without a verdict")
    parser.add_argument("--module", help="mutations of another module, its MUTATIONS")
    parser.add_argument("--keep", type=Path, help="a folder for the records; those that are there already are used again")
    given = parser.parse_args(arguments)
    Folder.keep = given.keep
    chosen = [one for one in suite(given.module, right=given.right) if given.only in one.name]
    if given.list:
        print("\n".join(one.name for one in chosen))
        return 0
    try:
        return changed(chosen) if given.changes else judged(chosen, given.only)
    finally:
        ranks.stop_all()


def suite(module: str | None, *, right: bool) -> list[Mutation]:
    """The mutations, or the right runs, of this suite or of another module."""
    other: Any = importlib.import_module(module) if module else None
    mutations: list[Mutation] = other.MUTATIONS if module else every()
    return [*controls(mutations), *getattr(other, "RIGHT", [])] if right else mutations


def changed(mutations: Sequence[Mutation]) -> int:
    without = 0
    for one in mutations:
        try:
            found = change(*(Record.open(path) for path in records(one)))
        except Exception as error:  # noqa: BLE001
            found = f"FAILED: {type(error).__name__}: {str(error)[-600:]}"
        without += not found or found.startswith("FAILED")
        print(f"{one.name:90} {found or 'NOTHING'}", flush=True)
    print(f"{len(mutations)} mutations, {without} of them change nothing or fail")
    return 1 if without else 0


def judged(mutations: Sequence[Mutation], only: str) -> int:
    """A line for each, and the score."""
    right = same = failed = 0
    began = time.perf_counter()
    for one in mutations:
        try:
            verdict = verdict_of(one)
        except Exception as error:  # noqa: BLE001
            failed += 1
            print(f"FAILED  {one.name}: {type(error).__name__}: {str(error)[-400:]}", flush=True)
            continue
        is_right = verdict.rule == one.rule and (verdict.kind == "different") == (one.rule is not None)
        right += is_right
        same += verdict.kind != "different" and one.rule is not None
        print(line(one, verdict, right=is_right), flush=True)
        if only:
            print("          candidate {}\n          baseline  {}".format(*records(one)))
        if only or not is_right:
            print("\n".join(f"          {rule:28} {confidence:.2f}  {evidence}" for rule, confidence, evidence in verdict.ranking[:4]))
    share = right / max(1, len(mutations))
    print(f"{right} of {len(mutations)} as expected ({share:.1%}), {same} called the same, {failed} failed; "
          f"{time.perf_counter() - began:.0f} s")  # fmt: skip
    return 0 if share >= NEEDED and not same and not failed else 1


def verdict_of(mutation: Mutation) -> Any:
    from shardbook.verifying.judge import judge

    candidate, baseline = (Record.open(path) for path in records(mutation))
    return judge(candidate, baseline, steps=mutation.setting.steps)


def line(mutation: Mutation, verdict: Any, *, right: bool) -> str:
    place = "" if verdict.step is None else f" step {verdict.step} {verdict.phase} {verdict.parameter or ''}"
    size = f"{verdict.deviation:.2g}/{verdict.bound:.2g}"
    return f"{'ok     ' if right else 'WRONG  '} {mutation.name:88} {verdict.kind:15} {verdict.rule or '-':28}{place} {size}"


if __name__ == "__main__":
    sys.exit(main())
