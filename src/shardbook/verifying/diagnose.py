"""Every rule is asked whether it explains the first divergence; the answers, the likeliest first."""

from collections.abc import Callable, Iterator

from shardbook.verifying import rules_clip, rules_cut, rules_data, rules_precision, rules_ranks, rules_scale, rules_settings, rules_state
from shardbook.verifying.case import Case
from shardbook.verifying.findings import Finding

_RULES: tuple[Callable[[Case], Iterator[Finding]], ...] = (
    rules_data.micro_batch_dropped, rules_data.ranks_share, rules_data.mean_of_means, rules_data.padding_counted, rules_data.labels_shifted,
    rules_cut.mean_of_means_cut, rules_scale.scale,
    rules_clip.per_rank, rules_clip.before_unscale, rules_clip.scaled, rules_clip.unexpected,
    rules_settings.per_micro_batch, rules_settings.offset, rules_settings.decay, rules_settings.betas, rules_settings.eps,
    rules_settings.explained_by_settings,
    rules_ranks.reduce_missing, rules_ranks.replica_stale,
    rules_state.cleared, rules_state.untied, rules_state.frozen, rules_state.recompute_rng, rules_state.evaluation,
    rules_precision.master, rules_precision.moment, rules_precision.accumulation,
)  # fmt: skip


def diagnose(case: Case) -> list[Finding]:
    """At least one finding: ``unknown`` where no rule explains it."""
    best: dict[str, Finding] = {}
    for rule in _RULES:
        for finding in rule(case):
            known = best.get(finding.rule)
            if known is None or finding.confidence > known.confidence:
                best[finding.rule] = finding
    found = sorted(best.values(), key=lambda one: -one.confidence)
    if not found or found[0].confidence < 0.3:
        found.insert(0, Finding("unknown", 0.3, "no rule of the list explains where the two runs part"))
    return found
