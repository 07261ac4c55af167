"""Settings beside each other that the lesson's sections show."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardbook.errors import ConfigError
from shardbook.explore.settings import BUDGETS, RANKS, RECOMPUTE, Settings, answer, facts, one_line, settled
from shardbook.report.forecast_figures import Case


def recomputations(settings: Settings) -> list[Case]:
    """Every policy of recomputation, all else as it is."""
    return [_case(policy, replace(settings, recompute=policy)) for policy in RECOMPUTE]


def bare(settings: Settings) -> Settings:
    """The same without the step: what is held, saved and sent is known at once."""
    return replace(settings, micro_batch=None, sequence=None, device="", recompute="none", **dict.fromkeys(BUDGETS))


def persistent_stages(settings: Settings) -> list[Case]:
    """The stages that the engine has, without the step."""
    found = [_case(f"stage {stage}", replace(bare(settings), stage=stage)) for stage in range(4)]
    return [case for case in found if case.forecast is not None]


def state_by_ranks(settings: Settings) -> Mapping[str, Sequence[tuple[int, int]]]:
    """(ranks, bytes of state on each) for every stage that the engine has, by the convention's formula.

    Padding of shards, which the engine's own closed form has and this has not, is too small to be seen.
    """
    known = facts(settings.model)
    found: dict[str, Sequence[tuple[int, int]]] = {}
    for case in persistent_stages(replace(settings, ranks=8)):
        if (one := case.forecast) is not None:
            held = {ranks: one.convention.holdings(known.num_parameters, known.num_trainable, one.stage, ranks) for ranks in RANKS}
            found[case.label] = [(ranks, sum(each.here for each in holdings)) for ranks, holdings in held.items()]
    return found


def one_and_eight(settings: Settings) -> list[Case]:
    """One rank and eight under the engine's highest stage."""
    highest = settled(replace(settings, stage=3))[0]
    return [_case(f"{ranks} rank{'s' if ranks > 1 else ''}", replace(highest, ranks=ranks)) for ranks in (1, 8)]


def _case(label: str, settings: Settings) -> Case:
    try:
        return Case(label=label, forecast=answer(settings))
    except ConfigError as error:
        return Case(label=label, forecast=None, why=one_line(error))
