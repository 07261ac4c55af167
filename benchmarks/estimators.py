"""Today's estimators beside shardbook's forecast, on runs that people measured: the real packages, asked for the same rows.

    .venv-peers/bin/python -m benchmarks.estimators [measured.csv] [--tracker]      (``make peers`` makes that environment)

* DeepSpeed: ``estimate_zero2_model_states_mem_needs`` below stage 3, ``estimate_zero3_model_states_mem_needs`` from there, without offload;
  once with the right number of parameters ("cold"), once from the module on the meta device ("live"), where every parameter has the same
  address, so that DeepSpeed counts one of them.
* accelerate: what ``accelerate estimate-memory`` prints as the peak of training with Adam; it divides by no ranks.
* FSDP2's tracker (``--tracker``, a minute a row): the runs with FSDP2, on the Llama of ``fsdp2_tracker.py``.

None of them but the tracker is told the batch: they have no place for it. None knows tensor-parallel degrees: they are given the
parameters that one such rank has. Errors are against the measured bytes, as in ``published.py``.
"""

import argparse
import contextlib
import io
import json
import math
import subprocess
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from torch import nn

from benchmarks import fsdp2_tracker, published, published_rows
from benchmarks.books_case import PEERS, ROOT
from benchmarks.evidence_engine import Section, prose
from benchmarks.published import GIB, Compared
from benchmarks.published_rows import Asked
from shardbook.facts.find import resolve
from shardbook.facts.model import ModelFacts

GPUS_OF_A_NODE = 8
NAMES = ("shardbook", "DeepSpeed, cold", "DeepSpeed, meta device", "accelerate", "FSDP2's tracker")


@dataclass(frozen=True, kw_only=True)
class Estimated:
    """One row: what each estimator says, in GiB; an estimator that has nothing to say of a row is left out."""

    compared: Compared
    gib: Mapping[str, float]

    def error(self, name: str) -> float:
        """Signed, as a share of what was measured."""
        return self.gib[name] / self.compared.measured_gib - 1


def estimate(compared: Compared, *, tracker: bool = False) -> Estimated:
    """Ask all of them."""
    asked = published_rows.asked(compared.row)
    facts = resolve(asked.model)
    module = on_meta(facts)
    found = {
        "shardbook": compared.forecast_gib,
        "DeepSpeed, cold": deepspeed(asked, _per_tensor_rank(facts.num_parameters, asked), _largest_layer(module)) / GIB,
        "DeepSpeed, meta device": deepspeed(asked, *deepspeed_counts(module)) / GIB,
        "accelerate": _per_tensor_rank(accelerate(module, asked.config.precision.param), asked) / GIB,
    }
    if tracker and asked.engine == "fsdp2" and facts.architecture is not None:
        found["FSDP2's tracker"] = fsdp2_tracker.in_its_own_process(_tracked(asked, facts)).nbytes / GIB
    return Estimated(compared=compared, gib=found)


def on_meta(facts: ModelFacts) -> nn.Module:
    """A module with the model's parameters by their names, on the meta device."""
    import torch

    root = nn.Module()
    for parameter in facts.parameters():
        *path, name = parameter.name.split(".")
        where = root
        for step in path:
            if not hasattr(where, step):
                where.add_module(step, nn.Module())
            where = where.get_submodule(step)
        where.register_parameter(name, nn.Parameter(torch.empty(parameter.shape, device="meta")))
    return root


def deepspeed(asked: Asked, total: int, largest: int) -> int:
    """Bytes on the device, from DeepSpeed's own formula for the stage."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    ranks = asked.ranks // asked.degrees.get("tensor", 1)
    where: dict[str, Any] = {
        "num_gpus_per_node": min(ranks, GPUS_OF_A_NODE),
        "num_nodes": math.ceil(ranks / GPUS_OF_A_NODE),
        "cpu_offload": False,
    }
    if asked.config.stage == 3:
        _, nbytes, _ = estimate_zero3_model_states_mem_needs(total, largest, cpu_offload_params=False, **where)
        return int(nbytes)
    _, nbytes = estimate_zero2_model_states_mem_needs(total, **where)
    return int(nbytes)


def deepspeed_counts(module: nn.Module) -> tuple[int, int]:
    """Elements that DeepSpeed finds in a module: all, as it counts them, and in the largest layer."""
    from deepspeed.runtime.zero.stage3 import model_to_params

    with contextlib.redirect_stdout(io.StringIO()):
        total, largest = model_to_params(module)
    return int(total), int(largest)


def accelerate(module: nn.Module, param: str) -> int:
    """The peak of training with Adam, as ``accelerate estimate-memory`` has it."""
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    total, _ = calculate_maximum_sizes(module)
    usage = estimate_training_usage(total, {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}[param])
    return int(max(usage.values()))


def _per_tensor_rank(amount: int, asked: Asked) -> int:
    return amount // asked.degrees.get("tensor", 1)


def _largest_layer(module: nn.Module) -> int:
    return max(sum(parameter.numel() for parameter in each.parameters(recurse=False)) for each in module.modules())


def _tracked(asked: Asked, facts: ModelFacts) -> fsdp2_tracker.Setting:
    a = facts.architecture
    assert a is not None
    return fsdp2_tracker.Setting(
        ranks=asked.ranks, micro_batch=asked.micro_batch or 1, sequence=asked.sequence or 1,
        layers=a.layers, hidden=a.hidden, heads=a.heads, kv_heads=a.kv_heads, ffn=a.ffn, vocab=a.vocab,
        recompute=asked.config.recompute.policy, reshard=asked.choices.reshard,
    )  # fmt: skip


def table(found: list[Estimated]) -> Iterator[str]:
    """Markdown: a line for each row, then medians of the absolute errors and how many are within 15%."""
    yield "| id | model | ranks | counter | measured | " + " | ".join(NAMES) + " |"
    yield "|---|---|---|---|---|" + "---|" * len(NAMES)
    for each in found:
        row = each.compared.row
        cells = (f"{each.gib[name]:.2f} ({each.error(name):+.0%})" if name in each.gib else "" for name in NAMES)
        lead = f"{row['id']} | {row['model']} | {row['n_gpus']} | {each.compared.counter} | {each.compared.measured_gib:.2f}"
        yield f"| {lead} | " + " | ".join(cells) + " |"
    errors = {name: [abs(each.error(name)) for each in found if name in each.gib] for name in NAMES}
    medians = (f"{median(each):.0%}" if each else "" for each in errors.values())
    within = (f"{sum(error <= published.WITHIN for error in each)} of {len(each)}" if each else "" for each in errors.values())
    yield "| | median absolute error | | | | " + " | ".join(medians) + " |"
    yield f"| | within {published.WITHIN:.0%} | | | | " + " | ".join(within) + " |"


def section(*, quick: bool = False, data: Path = published.DATA) -> Section:
    """The table, made in the environment that has the packages. ``quick`` takes the first rows only."""
    found = Section(title="Beside other estimators")
    missing = [] if PEERS.exists() else ["`make peers` makes the environment that has DeepSpeed and accelerate"]
    missing += [] if (data / "measured.csv").exists() else [f"{data} holds no measured.csv"]
    if missing:
        found.text += prose(f"*Not run*: {'; '.join(missing)}.")
        return found
    command = [str(PEERS), "-m", "benchmarks.estimators", str(data / "measured.csv"), *(["--rows", "3"] if quick else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        found.promise(f"the estimators ran: {done.stderr.strip().splitlines()[-1:]}", holds=False)
        return found
    found.text += prose(*_INTRODUCTION)
    found.text += [*(line for line in done.stdout.splitlines() if line.startswith("|")), ""]
    medians = {name: float(told) for name, told in json.loads(done.stdout.splitlines()[-1]).items()}
    others = min(error for name, error in medians.items() if name != NAMES[0])
    said = f"median absolute error {medians[NAMES[0]]:.1%}, that of the nearest other estimator {others:.1%}"
    found.promise(said, holds=medians[NAMES[0]] < others)
    return found


_INTRODUCTION = (
    "The real packages, asked for the scored rows of 4 GiB and more (`benchmarks/estimators.py`); GiB, and the error against what was",
    "measured. DeepSpeed *cold* is told the right number of parameters, *meta device* counts them in a module. None of them has a place",
    "for a batch or for tensor-parallel degrees: they are asked for the parameters that one such device has.",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", nargs="?", type=Path, default=published.DATA / "measured.csv", help="table of measurements")
    parser.add_argument("--tracker", action="store_true", help="FSDP2's tracker as well")
    parser.add_argument("--rows", type=int, help="only so many")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = [each for each in published.compare(published.read(options.measured)) if each.is_scored and not each.reason]
    print("GiB, and the error against what was measured:\n")
    found = [estimate(each, tracker=options.tracker) for each in rows[: options.rows]]
    for line in table(found):
        print(line)
    errors = {name: [abs(each.error(name)) for each in found if name in each.gib] for name in NAMES}
    print(json.dumps({name: median(each) for name, each in errors.items() if each}))


if __name__ == "__main__":
    main()
