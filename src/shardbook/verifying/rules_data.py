"""What the optimizer was given: micro-batches that are missing or come twice, and how the loss weighs tokens."""

from collections import Counter
from collections.abc import Iterator

from shardbook.recording.read import MicroBatch, Step
from shardbook.verifying.case import Case, num_micro_batches
from shardbook.verifying.findings import CERTAIN, LIKELY, PLAUSIBLE, POSSIBLE, Finding
from shardbook.verifying.forwards import Counted, Matched, each_forward, varies
from shardbook.verifying.pairing import counts_tokens, objective, total_weight

_EXACT = 2e-3


def micro_batch_dropped(case: Case) -> Iterator[Finding]:
    """A micro-batch that only the baseline has, or that was never propagated back."""
    mine, theirs = (_keys(step) for step in case.here.sides)
    lost, added = theirs - mine, mine - theirs
    if mine and lost and not added:
        lacking, total = lost.total(), theirs.total()
        told = [step.data for step in case.here.sides if any(step.batches)]
        elsewhere = len(told) == 2 and told[0] == told[1] and case.num_ranks[0] == 1  # in a copy of the model, perhaps
        yield Finding(
            "data.micro_batch_dropped", PLAUSIBLE if elsewhere else CERTAIN,
            f"step {case.here.number}: {lacking} of the baseline's {total} micro-batches went into none of the candidate's",
        )  # fmt: skip
    silent = [one for one in case.forwards if _is_heard(one.baseline) and not _is_heard(one.candidate)]
    if silent and len(silent) < len(case.forwards):
        yield Finding(
            "data.micro_batch_dropped", CERTAIN,
            f"step {case.here.number}: nothing came back to the outputs of {len(silent)} of {len(case.forwards)} micro-batches",
        )  # fmt: skip
    began = [_began_empty(step) for step in case.here.sides]
    found = case.here.gradients
    far = found is not None and found.rest > 0.15 and all(one.distance > case.here.near for one in case.here.gradient.values() if one.other)
    if began[0] and not began[1] and far and case.records[0].engine in ("plain", "ddp") and case.at("backward", "reduce"):
        yield Finding(
            "data.micro_batch_dropped", LIKELY,
            f"step {case.here.number}: {began[0]} micro-batches after a rank's first began without a gradient: what those before had added "
            f"was cleared",
        )  # fmt: skip
    if (
        not silent
        and mine == theirs
        and case.at("backward")
        and found
        and found.rest > 0.05
        and found.ratio < 1
        and max(case.num_ranks) == 1
        and sum(case.num_micro_batches) > 2
        and case.same_outputs
        and _gradients_alike(case.forwards)
    ):
        yield Finding(
            "data.micro_batch_dropped", PLAUSIBLE,
            f"step {case.here.number}: every micro-batch's loss is weighed as in the baseline, and yet {found.ratio:.2f} of the gradient "
            f"arrives: what some micro-batches added was cleared",
        )  # fmt: skip


def ranks_share(case: Case) -> Iterator[Finding]:
    """Two ranks with the same micro-batches."""
    step = case.here.pair.candidate
    mine, theirs = (_keys(one) for one in case.here.sides)
    by_rank = [tuple(_keys_of(step, rank)) for rank in range(len(step.losses))]
    pairs = [(a, b) for b, keys in enumerate(by_rank) for a in range(b) if keys and keys == by_rank[a]]
    if pairs and mine != theirs and len(theirs) > 1:
        a, b = pairs[0]
        yield Finding("data.ranks_share", CERTAIN, f"step {step.number}: ranks {a} and {b} were given the same micro-batches")
    twice = [key for key, count in mine.items() if count > theirs.get(key, 0) > 0]
    if twice and mine.total() == theirs.total():
        yield Finding(
            "data.ranks_share", LIKELY,
            f"step {step.number}: {len(twice)} of {mine.total()} micro-batches came more than once, and others of the baseline's never",
        )  # fmt: skip


def mean_of_means(case: Case) -> Iterator[Finding]:
    """Micro-batches with few tokens count as much as those with many."""
    ones = [one for one in case.forwards if one.gradient is not None and one.counted is not None and one.gradient.ratio > 0]
    ratios = [one.gradient.ratio for one in ones if one.gradient is not None]
    tokens = [one.counted.valid for one in ones if one.counted is not None]
    pure = all((one.gradient.rest or 0.0) < 0.02 for one in ones if one.gradient is not None)
    if len(ones) > 1 and pure and case.same_outputs is not False and varies(ratios) > max(_EXACT, 20 * case.here.roundoff):
        explained = min(varies([a * b for a, b in zip(ratios, counts, strict=True)]) for counts in (tokens, _tokens_together(ones, ratios)))
        evidence = (
            f"step {case.here.number}: the loss weighs micro-batches of {min(tokens)} to {max(tokens)} tokens by {min(ratios):.4g} to "
            f"{max(ratios):.4g} of the baseline's weight"
        )
        if explained < 0.1 * varies(ratios):
            yield Finding("weight.mean_of_means", CERTAIN, f"{evidence}: in inverse proportion to their tokens, each as much as any other")
        else:
            yield Finding("weight.mean_of_means", PLAUSIBLE if len(set(tokens)) > 1 else POSSIBLE, evidence)
    yield from _mean_by_weights(case)


def _mean_by_weights(case: Case) -> Iterator[Finding]:
    """Without what reached the outputs: the weights that were given, or that the engine divides by."""
    mine, theirs = (total_weight(step) for step in case.here.sides)
    count, found = max(case.num_micro_batches), case.here.gradients
    if found is None or found.is_multiple or not case.at("forward", "backward") or not counts_tokens(case.here.pair.baseline):
        return
    tokens = [one.counted.valid for one in case.forwards if one.counted is not None]
    if len(tokens) > 1 and len(set(tokens)) == 1:
        return  # of as many tokens each, the mean of means is the mean
    engine = [one for one in case.here.pair.candidate.divisors if one]
    divisor = sum(engine) if engine else mine
    means = divisor is not None and count > 1 and divisor != theirs and (divisor == count or divisor == max(case.num_ranks))
    if means and case.same_outputs is not False:
        yield Finding(
            "weight.mean_of_means", LIKELY,
            f"step {case.here.number}: the objective is divided by {divisor:g}, one for each mean, and not by {theirs:g} tokens",
        )  # fmt: skip


def padding_counted(case: Case) -> Iterator[Finding]:
    """Ignored targets in the denominator, or in the sum as well."""
    here, ones = case.here, [one for one in case.forwards if one.counted is not None and one.counted.valid < one.counted.numel]
    tokens = sum(one.counted.valid for one in case.forwards if one.counted is not None)
    places = sum(one.counted.numel for one in case.forwards if one.counted is not None)
    found = here.gradients
    mine, theirs = (total_weight(step) for step in here.sides)
    if found is not None and ones and found.is_multiple and found.is_near(tokens / places, 1e-4):
        yield Finding(
            "weight.padding_counted", CERTAIN,
            f"step {here.number}: every gradient is {found.ratio:.5f} times the baseline's, as the {tokens} tokens are to all {places}",
        )  # fmt: skip
    elif found is not None and found.is_multiple and _more_counted(case) and mine and theirs and found.is_near(theirs / mine, 1e-4):
        yield Finding(
            "weight.padding_counted", CERTAIN,
            f"step {here.number}: every gradient is {found.ratio:.5f} times the baseline's: {mine:g} tokens count instead of {theirs:g}",
        )  # fmt: skip
    yield from _padding_in_each(case, ones)
    yield from _padding_in_sum(case, ones)


def _louder(ones: list[Matched]) -> bool | None:
    """Whether gradients came back to more places than in the baseline; None where it isn't known."""
    both = [(one.candidate.silent, one.baseline.silent) for one in ones]
    known = [(mine, theirs) for mine, theirs in both if mine is not None and theirs is not None]
    return None if not known else sum(mine for mine, _ in known) < sum(theirs for _, theirs in known)


def _more_counted(case: Case) -> bool:
    """The candidate's weights count more tokens than the baseline's."""
    mine, theirs = (total_weight(step) for step in case.here.sides)
    return all(counts_tokens(step) for step in case.here.sides) and mine is not None and theirs is not None and mine > theirs


def _padding_in_each(case: Case, ones: list[Matched]) -> Iterator[Finding]:
    """Each micro-batch's mean is over all its places."""
    known = [
        (one, one.gradient)
        for one in case.forwards
        if one.counted is not None and one.gradient is not None and one.gradient.ratio > 0 and (one.gradient.rest or 0.0) < 0.02
    ]
    shares = [
        gradient.ratio * one.counted.numel / one.counted.valid for one, gradient in known if one.counted is not None and one.counted.valid
    ]
    ratios = [gradient.ratio for _, gradient in known]
    alone = len(shares) == 1 and abs(shares[0] - 1.0) < 1e-3
    apart = len(shares) > 1 and varies(ratios) > 1e-3  # a factor that all have is a divisor
    if ones and len(known) == len(case.forwards) and max(ratios) < 1 and varies(shares) < 1e-3 and (alone or apart):
        yield Finding(
            "weight.padding_counted", CERTAIN,
            f"step {case.here.number}: micro-batches count {min(ratios):.4f} to {max(ratios):.4f} of what they should, as their tokens "
            f"are to all their places",
        )  # fmt: skip


def _padding_in_sum(case: Case, ones: list[Matched]) -> Iterator[Finding]:
    """Losses of ignored places are in it."""
    mine, theirs = (total_weight(step) for step in case.here.sides)
    back, turned = case.sent_back, case.turned
    louder = _louder(case.forwards)
    padded = bool(ones) or louder is True
    if padded and back is not None and turned is not None and case.same_outputs is not False and max(0.02, case.here.near) < turned < 0.9:
        if louder is not False:
            sure = CERTAIN if louder else LIKELY + 0.05 if _more_counted(case) else PLAUSIBLE
            yield Finding(
                "weight.padding_counted", sure,
                f"step {case.here.number}: places whose target is to be ignored reach the gradient: what reached the outputs has "
                f"{back.ratio:.3f} of the baseline's, and {turned:.2f} of it is new",
            )  # fmt: skip
        if not louder and turned < 0.5 and back.ratio > 0:
            yield Finding(
                "weight.mean_of_means", LIKELY if louder is False else PLAUSIBLE,
                f"step {case.here.number}: the same places reach the gradient as in the baseline, weighed otherwise within a micro-batch: "
                f"{turned:.2f} of what reached the outputs is in another direction, as means of rows of different lengths are",
            )  # fmt: skip
    if mine and theirs and mine > theirs and mine == sum(one.counted.numel for one in case.forwards if one.counted is not None):
        yield Finding(
            "weight.padding_counted",
            LIKELY + 0.05,
            f"step {case.here.number}: all {mine:g} places are counted, {theirs:g} of them have a target",
        )
    losses = [one for one in ones if one.is_loss and one.output is not None]
    if losses and case.here.entered_alike() and all(one.output is not None and not one.output.same for one in losses):
        whole = [one for one in case.forwards if one not in ones and one.output is not None]
        if whole and all(one.output is not None and one.output.same for one in whole):
            yield Finding(
                "weight.padding_counted", LIKELY, f"step {case.here.number}: losses differ for micro-batches with ignored targets only"
            )


def labels_shifted(case: Case) -> Iterator[Finding]:
    """Other targets for the same inputs; with more of them that count it is padding."""
    here = case.here
    if not here.entered_alike():
        return
    given = [_places(step) for step in here.sides]
    if all(len(one) > 1 for one in given) and given[0][0] == given[1][0] and given[0][1:] != given[1][1:]:
        counts = [sum(one.valid for one in targets) for targets in (_counted(step) for step in here.sides)]
        rule = "weight.padding_counted" if counts[0] > counts[1] else "weight.labels_shifted"
        more = f"{counts[0]} of them count, in the baseline {counts[1]}" if counts[0] != counts[1] else "as many of them count"
        yield Finding(rule, CERTAIN, f"step {here.number}: the same inputs come with other targets; {more}")
    turned = case.turned
    if turned is not None and case.same_outputs is not False and turned > 0.3 and _louder(case.forwards) is not True:
        mine, theirs = (total_weight(step) for step in here.sides)
        other = turned > 0.75 or (mine is not None and theirs is not None and mine < theirs)
        yield Finding(
            "weight.labels_shifted", LIKELY + 0.05 if other else PLAUSIBLE,
            f"step {here.number}: the model gives the same, and {turned:.2f} of what the loss sends back is in another direction than the "
            f"baseline's: the losses are of other targets",
        )  # fmt: skip
    losses = [one.output for one in case.forwards if one.is_loss and one.output is not None]
    found = here.gradients
    differ = losses and all(not one.same for one in losses) and all(one.gradient is None or varies_little(one) for one in case.forwards)
    if differ and found is not None and found.rest > 0.02:
        yield Finding(
            "weight.labels_shifted", PLAUSIBLE,
            f"step {here.number}: from the same weights and inputs every micro-batch's loss is another, and the gradients are none of the "
            f"baseline's ({found.rest:.2f} of them is in another direction)",
        )  # fmt: skip
    elif case.at("forward", "backward") and not case.forwards and found is not None and found.rest > 0.3:
        mine, theirs = (objective(step) for step in here.sides)
        if mine is not None and theirs is not None and mine != theirs:
            yield Finding(
                "weight.labels_shifted",
                POSSIBLE,
                f"step {here.number}: the loss is {mine:.6g} instead of {theirs:.6g}, from the same weights",
            )


def _is_heard(micro: MicroBatch) -> bool:
    return micro.output_gradient is not None and micro.output_gradient.squares > 0.0


def _began_empty(step: Step) -> int:
    """Micro-batches after a rank's first at whose forward no parameter held a gradient."""
    return sum(not micro.holding for micros in step.micro_batches for micro in micros[1:])


def varies_little(one: Matched) -> bool:
    """The factor on a loss is as good as the baseline's."""
    return one.gradient is not None and (one.gradient.rest or 0.0) < 0.02


def _gradients_alike(ones: list[Matched]) -> bool:
    return all(one.gradient is not None and abs(one.gradient.ratio - 1.0) < 1e-3 and (one.gradient.rest or 0.0) < 1e-3 for one in ones)


def _tokens_together(ones: list[Matched], ratios: list[float]) -> list[int]:
    """For each micro-batch the tokens of all that are weighed alike: those of a rank, where means are taken over ranks."""
    tokens = [one.counted.valid if one.counted is not None else 0 for one in ones]
    return [sum(count for other, count in zip(ratios, tokens, strict=True) if abs(other / mine - 1.0) < 1e-4) for mine in ratios]


def _counted(step: Step) -> list[Counted]:
    return [counted for _, _, counted in each_forward(step) if counted is not None]


def _places(step: Step) -> list[int]:
    """Of each place of a micro-batch the hash of all that was given there."""
    all_given = [micro for micros in step.given for micro in micros] or [micro.inputs for micros in step.micro_batches for micro in micros]
    num = min((len(micro) for micro in all_given), default=0)
    return [sum(micro[at].hash for micro in all_given) % 2**64 for at in range(num)]


def _keys(step: Step) -> Counter[int]:
    return Counter(key for rank in range(len(step.losses)) for key in _keys_of(step, rank))


def _keys_of(step: Step, rank: int) -> list[int]:
    """Micro-batches of a rank, by the first of their inputs where forwards were seen, else by all that was given."""
    if num_micro_batches(step) and any(step.micro_batches):
        return [micro.inputs[0].hash for micro in step.micro_batches[rank] if micro.inputs]
    return list(step.batches[rank])
