"""What a mutation has changed, read off two records without any judgement: each must change something."""

from shardbook.recording.prints import compare
from shardbook.recording.read import Record


def change(candidate: Record, baseline: Record) -> str:
    """Where the two first differ and by how much, in weights, losses, learning rates or parameters; empty where nothing does."""
    if set(candidate.parameters) != set(baseline.parameters):
        return f"parameters: {sorted(set(candidate.parameters) ^ set(baseline.parameters))}"
    worst = ""
    for mine, theirs in zip(candidate.steps(), baseline.steps(), strict=True):
        if mine.disagreements:
            return f"step {mine.number}: ranks disagree on {mine.disagreements[0].phase} {mine.disagreements[0].parameter}"
        for phase in ("weight", "buffer"):
            for name, one in mine.phases.get(phase, {}).items():
                distance = compare(one, theirs.phases[phase][name]).distance
                if distance > 0:
                    worst = worst or f"step {mine.number}: {phase} {name} by {distance:.2g}"
    last = max((compare(one, theirs.phases["weight"][name]).distance, name) for name, one in mine.phases["weight"].items())
    return f"{worst}; at the end {last[1]} by {last[0]:.2g}" if worst else ""
