"""Every rule in words: what it means, where it usually comes from, how it is usually mended, and how it shows in a record.

The terminal, the page and ``docs/rules.md`` say these sentences and no others. ``python -m shardbook.verifying.explanations`` prints the
document. Nothing here imports torch.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """One rule.

    Args:
        title: in a few words.
        explanation: what goes wrong, and what it does to the training.
        cause: where it usually comes from.
        mend: what usually helps, in one line.
        shows: what of a record gives it away.
    """

    title: str
    explanation: str
    cause: str
    mend: str
    shows: str


EXPLANATIONS: Mapping[str, Explanation] = {
    "weight.mean_of_means": Explanation(
        title="a mean of means",
        explanation=(
            "Each micro-batch's loss is a mean over its own tokens, and these means are averaged as equals. Where micro-batches hold "
            "different numbers of tokens, a token of a short one counts more than a token of a long one: another objective is "
            "optimised."
        ),
        cause=(
            '`cross_entropy` with its default `reduction="mean"` in every micro-batch, then a division by the number of '
            "micro-batches; or DDP, which averages what were means over each rank's own tokens."
        ),
        mend="Add the loss up over tokens and divide once, by the tokens of the whole step over all micro-batches and ranks.",
        shows=(
            "The factor with which each micro-batch's loss enters goes with one over its own number of tokens. In a step whose "
            "micro-batches hold equally many, nothing deviates."
        ),
    ),
    "weight.padding_counted": Explanation(
        title="padding is counted",
        explanation=(
            "Padded positions are counted as tokens. The loss is divided by too much, and by another too much in every step, so that "
            "the step's size depends on how well the batch was packed."
        ),
        cause="`labels.numel()` or batch times sequence as the weight; or labels of padding that aren't the loss's `ignore_index`.",
        mend="Weigh with `(labels != ignore_index).sum()`, and give padding the label that the loss ignores.",
        shows=(
            "Gradients are the baseline's times one factor, which is the share of positions that are no padding, and changes with the "
            "batch."
        ),
    ),
    "weight.labels_shifted": Explanation(
        title="labels are shifted",
        explanation=(
            "The output at a position is held against the wrong token: labels are shifted twice, or not at all. The model learns to "
            "predict the token after next, or to copy its input."
        ),
        cause="The data are shifted when they are loaded, and the model shifts again: those of transformers do it by themselves.",
        mend="Shift in one place: give such a model `labels=input_ids`, or compute the loss yourself from shifted labels.",
        shows=(
            "Inputs are the same, and with the same weights the loss already differs in the first step; the labels have another hash, "
            "or the gradient of the output lies in other rows."
        ),
    ),
    "scale.micro_batches_missing": Explanation(
        title="not divided by the micro-batches",
        explanation=(
            "Gradients of k micro-batches are added and never divided: the step optimises k times the objective. SGD learns k times "
            "as fast; under Adam it shows in clipping, in eps, and in the norm."
        ),
        cause="Accumulation added to a loop without `loss / k`.",
        mend="Divide each micro-batch's loss by the number of micro-batches, or all by the weight of the step.",
        shows="Every gradient is exactly k times the baseline's, from the first step on.",
    ),
    "scale.micro_batches_twice": Explanation(
        title="divided twice by the micro-batches",
        explanation=(
            "The loss is divided by the number of micro-batches by the loop and again by the engine: gradients are too small by that "
            "factor."
        ),
        cause="An engine that divides by itself (DeepSpeed's `backward`, Accelerate's `accumulate`) in a loop that does so, too.",
        mend="Leave the division to one of them: give the engine the loss as it is.",
        shows="Every gradient is exactly 1/k of the baseline's.",
    ),
    "scale.ranks_missing": Explanation(
        title="not divided by the ranks",
        explanation="Gradients of N ranks are added, and nobody divides by N although each rank's loss is a mean.",
        cause=(
            "An `all_reduce` of one's own without a division; FSDP2's divide factor set to 1; an engine that sums where another one "
            "averages."
        ),
        mend="Divide by the number of ranks once, or give losses that are sums and divide by the tokens of all ranks.",
        shows="Every gradient is exactly N times the baseline's, whatever the number of micro-batches.",
    ),
    "scale.ranks_twice": Explanation(
        title="divided twice by the ranks",
        explanation="The engine averages over ranks, and the loop divides by their number again: gradients are too small by N.",
        cause="`loss / world_size` in front of DDP or FSDP, both of which average.",
        mend="Take the division out of the loop.",
        shows="Every gradient is exactly 1/N of the baseline's.",
    ),
    "schedule.per_micro_batch": Explanation(
        title="the schedule runs per micro-batch",
        explanation=(
            "The scheduler is stepped after each micro-batch instead of after each optimizer step: warmup and decay are k times as short."
        ),
        cause=(
            "`scheduler.step()` inside of the loop over micro-batches; a schedule whose length counts micro-batches, in a trainer "
            "that counts steps."
        ),
        mend="Step the scheduler once for each optimizer step.",
        shows="The learning rate is the baseline's of step k times as far on. Gradients of the first step are the same.",
    ),
    "schedule.offset": Explanation(
        title="the schedule is a step off",
        explanation=(
            "The learning rate is the one of a step before or after: in the first step of a warmup it may be zero where it should not be."
        ),
        cause=(
            "`scheduler.step()` before `optimizer.step()`; a schedule that is resumed with another last step; a warmup that starts at "
            "0 and not at 1."
        ),
        mend="Step the scheduler right after the optimizer, and resume it with its own state.",
        shows="The learning rates are the baseline's, moved by a constant number of steps.",
    ),
    "data.micro_batch_dropped": Explanation(
        title="a micro-batch is lost",
        explanation="A micro-batch's gradient never reaches the step, although its forward and backward ran.",
        cause="`zero_grad` inside of the loop over micro-batches; a short last micro-batch that is left out on one side of the loop.",
        mend="Clear gradients once a step, after the optimizer has stepped.",
        shows="The gradient is the baseline's without one micro-batch's part; or fewer rows were seen than the baseline saw.",
    ),
    "data.ranks_share": Explanation(
        title="ranks share their data",
        explanation="Ranks are given the same rows: N ranks do the work of one, and the rest of the data is never seen.",
        cause="No `DistributedSampler`; a shuffle with the same seed and no offset by rank; `set_epoch` forgotten is the milder form.",
        mend="Give each rank its own part of the data: `DistributedSampler(dataset)`, or an offset by rank.",
        shows="Two ranks have the same hash of their batches in the same step.",
    ),
    "clip.per_rank": Explanation(
        title="clipped by rank",
        explanation=(
            "Each rank clips by a norm of its own (of its own gradient before reduction, or of its shard), not by the norm of the "
            "whole gradient."
        ),
        cause="`clip_grad_norm_` before the reduction, or over the shards of an engine without adding up the ranks' norms.",
        mend=(
            "Clip after reduction by the norm of all ranks' parts: the engine's own clipping, or FSDP2's `clip_grad_norm_` over DTensors."
        ),
        shows=(
            "Gradients before clipping are the same and the factors differ from rank to rank; or they differ before the step although "
            "every rank's own part of the loss is the same."
        ),
    ),
    "clip.before_unscale": Explanation(
        title="clipped before unscaling",
        explanation=(
            "The norm is taken of gradients that still carry the loss scale or the sum's weight, so nearly every step is clipped, to "
            "a tiny norm."
        ),
        cause="`clip_grad_norm_` without `scaler.unscale_(optimizer)` before it; a limit meant for a mean held against a sum.",
        mend="Call `scaler.unscale_(optimizer)` first, then clip.",
        shows=(
            "The factor of clipping is about the limit divided by the norm times the loss scale, in steps that the baseline leaves alone."
        ),
    ),
    "clip.unexpected": Explanation(
        title="clipping that nobody asked for",
        explanation="Gradients are clipped where the baseline's are not, at another norm, or not where the baseline's are.",
        cause=(
            "A default of the engine or trainer: DeepSpeed's bf16 optimizer clips at 1.0, transformers' Trainer has `max_grad_norm=1.0`."
        ),
        mend="Say the limit on both sides: `gradient_clipping` of DeepSpeed, `max_grad_norm` of a Trainer; 0 switches most of them off.",
        shows=(
            "Gradients before clipping are the same; those that the optimizer finds are smaller by one factor, and have one norm in "
            "every clipped step."
        ),
    ),
    "decay.wrong_group": Explanation(
        title="decay in the wrong group",
        explanation=(
            "Weight decay acts on parameters that the baseline leaves without (norms, biases, embeddings), or leaves out some that have it."
        ),
        cause="Groups by name patterns that a wrapper's prefix no longer matches; groups by `ndim` after parameters were flattened.",
        mend="Build the groups from the bare model's names and shapes, before it is wrapped.",
        shows="Settings in force differ for some parameters only, and their updates differ by learning rate times decay times weight.",
    ),
    "decay.missing": Explanation(
        title="no decay",
        explanation="Weight decay is not applied at all.",
        cause="Another optimizer's default (Adam has 0, AdamW 0.01); a setting that the engine does not hand on.",
        mend="Say `weight_decay` where the optimizer is built, and look at `optimizer.param_groups` after it is wrapped.",
        shows="Gradients are the same, and every update lacks learning rate times decay times weight.",
    ),
    "decay.twice": Explanation(
        title="decay twice",
        explanation="Weights decay twice in a step: by the optimizer and by hand, or in the loss as well.",
        cause=(
            "An L2 term in the loss beside AdamW; a decay hook kept from an older loop; `Adam(weight_decay=...)`, which adds it to "
            "the gradient."
        ),
        mend="Keep one of them; for AdamW the optimizer's own.",
        shows="Updates shrink weights by twice the baseline's share; or gradients carry a part along the weight itself.",
    ),
    "optimizer.betas": Explanation(
        title="other betas",
        explanation="The optimizer averages over another number of steps.",
        cause="Another implementation's defaults: (0.9, 0.999) against (0.9, 0.95) is the usual pair; momentum left out.",
        mend="Say `betas` where the optimizer is built.",
        shows="Gradients of the first step are the same and so are settings but for betas; moments are not.",
    ),
    "optimizer.eps": Explanation(
        title="another eps",
        explanation="The term that keeps Adam's division finite is another one, or gradients are small enough for it to matter.",
        cause=(
            "Another implementation's default (1e-8 against 1e-6), or gradients that still carry a scale when the optimizer divides "
            "by them."
        ),
        mend="Say `eps` where the optimizer is built, and give it gradients without any scale.",
        shows="Moments are the same, updates are not, most of all where gradients are small.",
    ),
    "reduce.missing": Explanation(
        title="gradients are not reduced",
        explanation="Gradients of some parameters stay what one rank computed: the ranks' replicas step apart.",
        cause=(
            "`no_sync` around the last micro-batch as well; a call of the inner module past DDP's wrapper; parameters that are added "
            "after wrapping."
        ),
        mend="Leave the last micro-batch of a step outside of `no_sync`, and call the wrapped model.",
        shows="Ranks hold other gradients for the same elements, and then other weights.",
    ),
    "replica.stale": Explanation(
        title="a stale replica",
        explanation="A rank goes on with old or other weights: its gradients belong to another model.",
        cause=(
            "Initial weights made with another seed on each rank and never sent; a rank that skips a step alone, after an overflow, say."
        ),
        mend="Send rank 0's weights at the start, and let all ranks decide together whether a step is skipped.",
        shows="Ranks hold other weights for the same elements before any gradient differs.",
    ),
    "tied.untied": Explanation(
        title="tied parameters are apart",
        explanation="Two names that should be one parameter have become two, each with half of the gradient.",
        cause="Weights tied before `to_empty`, a deepcopy or a wrapper that replaces parameters; a checkpoint loaded into both names.",
        mend="Tie again after the model is built, loaded and on its device, before the optimizer is built.",
        shows=(
            "The baseline has one parameter of two names where the candidate has two parameters; their gradients add up to the baseline's."
        ),
    ),
    "frozen.updated": Explanation(
        title="frozen parameters move",
        explanation="A parameter that should stay as it is changes.",
        cause=(
            "`requires_grad=False` set after the optimizer was built or the model wrapped, so that decay and momentum go on; an "
            "engine that steps on flat buffers."
        ),
        mend="Freeze before the optimizer is built, and give it trainable parameters only.",
        shows="Weights of a parameter differ from step to step where the baseline's keep their bits.",
    ),
    "recompute.rng": Explanation(
        title="recomputation draws other numbers",
        explanation=(
            "Backward recomputes a block with another dropout mask than forward used: the gradient belongs to no forward that was run."
        ),
        cause="`checkpoint(..., preserve_rng_state=False)`, or a generator of one's own that checkpointing does not know.",
        mend="Leave `preserve_rng_state=True`; draw masks from torch's default generators.",
        shows="The loss has the baseline's bits and gradients have not; the generators' states differ after backward.",
    ),
    "precision.moment": Explanation(
        title="moments are too narrow",
        explanation=(
            "The optimizer's state is kept in 16 bits: Adam's second moment, which changes by a thousandth of itself in a step, "
            "stands still."
        ),
        cause="An optimizer built over a model that was cast first: state takes the type of the parameter.",
        mend="Keep state in fp32: a master copy in fp32, or an optimizer that says so.",
        shows="Type of the state, or values that all are numbers of 16 bits; moments deviate by that rounding from the first step on.",
    ),
    "precision.master": Explanation(
        title="no master copy",
        explanation="The optimizer updates 16-bit weights: an update below their half unit in the last place is lost.",
        cause="`model.bfloat16()` and an optimizer over it.",
        mend=(
            'Keep fp32 weights for the optimizer: autocast, FSDP2\'s `MixedPrecisionPolicy`, or `Precision(param="bf16", master="fp32")`.'
        ),
        shows="Weights after the step are numbers of 16 bits; small updates are missing.",
    ),
    "precision.master_rounded": Explanation(
        title="the master copy was rounded",
        explanation="The fp32 master was copied from weights that had been rounded to 16 bits: the training starts from another point.",
        cause="The model is cast before the engine copies it: DeepSpeed's bf16 mode clones the master from the 16-bit model.",
        mend="Hand over the fp32 model and let the engine cast a copy of it.",
        shows="Before the first step every weight of the fp32 master is exactly a number of 16 bits, the baseline's rounded.",
    ),
    "precision.accumulation": Explanation(
        title="gradients are added in 16 bits",
        explanation="Several micro-batches' or ranks' gradients are added up in 16 bits: the more there are, the less a small one counts.",
        cause="`p.grad` of a 16-bit model over several micro-batches; a reduction in bf16.",
        mend='Accumulate and reduce in fp32: `Precision(reduce="fp32")`, FSDP2\'s `reduce_dtype=torch.float32`.',
        shows=(
            "Gradients deviate by a rounding of 16 bits where forward and the gradient of the output have the baseline's bits, more "
            "with each micro-batch."
        ),
    ),
    "evaluation.changed_state": Explanation(
        title="evaluating changed the training",
        explanation="An evaluation between steps leaves something behind: evaluation mode, buffers, the generators' state, or gradients.",
        cause=(
            "No `model.train()` after it; batch statistics updated by it; a shuffle or a sampling from the default generator; no "
            "`torch.no_grad()`."
        ),
        mend="Evaluate under `torch.no_grad()` in `eval()` mode, go back to `train()`, and draw from a generator of its own.",
        shows=(
            "Steps agree up to an evaluation; after it modules are in evaluation mode, or buffers or the generators' states differ "
            "though weights do not."
        ),
    ),
    "unknown": Explanation(
        title="none of the rules",
        explanation="The two differ by more than rounding explains, and no rule that was tried explains how.",
        cause="A change of the model, of the loss or of the data; a fault that is not in this list.",
        mend=(
            "Look at the first place where they differ: its step, phase and parameter; record both with `full=True` to compare whole "
            "tensors."
        ),
        shows="The first divergence, and whatever was ruled out.",
    ),
}

_TOP = """# Rules

What `shardbook verify` can name ([how to use it](verify.md)). A verdict tries them against what both records hold, and ranks those that
explain the difference, each with its evidence. `unknown` says that something differs and that none of them explains it.

This page is made by `python -m shardbook.verifying.explanations`.
"""


def document() -> str:
    """``docs/rules.md``: a table of contents, then a section for each rule."""
    contents = "\n".join(f"| [`{rule}`](#{_anchor(rule)}) | {about.title} |" for rule, about in EXPLANATIONS.items())
    sections = "\n".join(_section(rule, about) for rule, about in EXPLANATIONS.items())
    return f"{_TOP}\n| rule | in short |\n|---|---|\n{contents}\n\n{sections}"


def _section(rule: str, about: Explanation) -> str:
    return "\n".join([f"## {rule}", "", about.explanation, "", *_points(about), ""])


def _points(about: Explanation) -> Iterator[str]:
    yield f"* **Usual cause.** {about.cause}"
    yield f"* **Usual mend.** {about.mend}"
    yield f"* **In a record.** {about.shows}"


def _anchor(rule: str) -> str:
    """As a Markdown reader makes it of the heading.

    >>> _anchor("weight.mean_of_means")
    'weightmean_of_means'
    """
    return rule.replace(".", "")


if __name__ == "__main__":
    sys.stdout.write(document())
