"""A model whose training state is 6 GiB, trained within 2 GiB of memory: master and moments on a disk, equal to the run without limit.

    python -m benchmarks.tiers_budget FOLDER            five steps under the budget, five without, their weights compared
    python -m benchmarks.tiers_budget FOLDER --dry      a small model and a small budget: whether it runs

One rank at stage 3 in the 2+2+4+8 convention. The budget holds twice: the books raise at the first byte beyond it, and the
system refuses the process more data (``RLIMIT_DATA``) than it had before the model, and the budget.
"""

import argparse
import hashlib
import json
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardbook as sb
from shardbook.tiers.pages import bytes_of

GIB = 2**30
STEPS, ROWS = 5, 16


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Layers of ``width`` x ``width``, and the bytes that may be allocated."""

    layers: int
    width: int
    budget: int

    @property
    def state_nbytes(self) -> int:
        """2+2+4+8."""
        return 16 * self.layers * self.width**2


BIG = Shape(layers=96, width=2048, budget=2 * GIB)
SMALL = Shape(layers=48, width=256, budget=44 << 20)


class Layer(nn.Module):
    """One unit: a product and what keeps its results in range."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one run leaves: losses by their bits, a digest of all weights, the highest of device and host together, seconds of a step."""

    losses: list[str]
    digest: str
    peak_nbytes: int
    seconds: float


def train(shape: Shape, folder: Path | None) -> Run:
    """Five steps; under the budget where there is a folder for the state."""
    torch.set_num_threads(1)
    with torch.device("meta"):
        model = nn.Sequential(*(Layer(shape.width) for _ in range(shape.layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    offload = sb.Offload() if folder is None else sb.Offload(optimizer="disk", path=folder)
    config = sb.ZeroConfig(stage=3, precision=sb.Precision.preset("2+2+4+8"), offload=offload, clip_grad_norm=1.0)
    if folder is not None:
        _limit_data(shape.budget)
    losses: list[str] = []
    with sb.measure(budget=None if folder is None else shape.budget) as run:
        engine = sb.Engine(model, optimizer, config, init=_init, device=torch.device("cpu"))
        began = time.monotonic()
        for step in range(STEPS):
            inputs = torch.randn(ROWS, shape.width, generator=torch.Generator().manual_seed(step))
            engine.backward(engine(inputs).float().square().sum(), weight=ROWS)
            losses.append(float(engine.step().loss or 0.0).hex())
        seconds = (time.monotonic() - began) / STEPS
    document = run.document()
    assert document.peak["UNACCOUNTED"] <= 64, document.peak  # beside bytes of numbers that autograd keeps
    total = hashlib.sha256()
    for name, value in engine.full_parameters():
        total.update(name.encode())
        total.update(bytes_of(value.contiguous()))
    engine.close()
    peak = document.peak_allocated + sum(tier.nbytes for tier in document.tiers if tier.tier == "host")
    return Run(losses=losses, digest=total.hexdigest(), peak_nbytes=peak, seconds=seconds)


def _init(module: nn.Module) -> None:
    for number, parameter in enumerate(module.parameters()):
        nn.init.normal_(parameter, std=0.02, generator=torch.Generator().manual_seed(number))


def _limit_data(budget: int) -> None:
    """Private memory of the process: what it has now, the budget, and room for what is none of it (stacks, code, heaps' ends)."""
    now = next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData")) * 1024
    limit = now + budget + max(budget // 8, 96 << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def refused(shape: Shape) -> str:
    """What a forecast says of the same run without offload on a device of the budget's size."""
    with torch.device("meta"):
        model = nn.Sequential(*(Layer(shape.width) for _ in range(shape.layers)))
    config = sb.ZeroConfig(stage=3, precision=sb.Precision.preset("2+2+4+8"))
    return sb.forecast(model, config, ranks=1).fits(shape.budget)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Both runs, and what the forecast says of the one that can't be."""

    shape: Shape
    limited: Run
    free: Run
    without: str

    @property
    def is_same(self) -> bool:
        return (self.limited.losses, self.limited.digest) == (self.free.losses, self.free.digest)


def compare(folder: Path, *, dry: bool = False) -> Outcome:
    """Each run in a process of its own."""
    shape = SMALL if dry else BIG
    limited, free = (_in_a_process(folder, dry=dry, limited=limited) for limited in (True, False))
    return Outcome(shape=shape, limited=limited, free=free, without=refused(shape))


def _in_a_process(folder: Path, *, dry: bool, limited: bool) -> Run:
    command = [sys.executable, "-m", "benchmarks.tiers_budget", str(folder), "--run", "limited" if limited else "free"]
    done = subprocess.run([*command, *(["--dry"] if dry else [])], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return Run(**found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--run", choices=("limited", "free"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        shape = SMALL if options.dry else BIG
        print(json.dumps(asdict(train(shape, options.folder if options.run == "limited" else None))))
        return
    found = compare(options.folder, dry=options.dry)
    for name, run in (("limited", found.limited), ("free", found.free)):
        print(f"{name}: peak {run.peak_nbytes / GIB:.3f} GiB, {run.seconds:.1f} s a step")
    state, budget = found.shape.state_nbytes / GIB, found.shape.budget / GIB
    print(f"state {state:.2f} GiB, budget {budget:.2f} GiB; same: {found.is_same}; without: {found.without}")
    raise SystemExit(0 if found.is_same and found.without == "does not fit" else 1)


if __name__ == "__main__":
    main()
