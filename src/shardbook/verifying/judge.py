"""Two records -> a verdict."""

from collections.abc import Sequence

from shardbook.recording.read import Record
from shardbook.verifying.verdict import Verdict


def judge(
    candidate: Record, baseline: Record, *, steps: int | None = None, reruns: Sequence[Record] = (), notes: Sequence[str] = ()
) -> Verdict:
    """Compare two records."""
    raise NotImplementedError
