"""How long the training stands still for a save that is waited for and for one in the background, and how fast steps go beside the latter.

    python -m benchmarks.checkpoint_async [folder]

In pairs, each kind first in turn, on one rank: ``stalls`` gives the seconds of each, for whoever puts them beside other figures.
"""

import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import shardbook as sb

WIDTH, NUM_UNITS, ROWS = 1024, 12, 128


@dataclass(frozen=True, kw_only=True)
class Stall:
    """One pair, in seconds. ``step`` alone and ``step_beside``: medians; ``lost``: what the steps beside took longer, all together."""

    nbytes: int
    waited: float
    call: float
    step: float
    step_beside: float
    lost: float
    num_beside: int


def build() -> sb.Engine:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()) for _ in range(2 * NUM_UNITS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return sb.Engine(model, optimizer, sb.ZeroConfig(stage=3, precision=sb.Precision(param="bf16")))


def stalls(folder: Path, num_pairs: int = 5) -> list[Stall]:
    """Saves into ``folder``, which is there; what they leave is taken away."""
    engine = build()
    inputs = torch.randn(ROWS, WIDTH)

    def step() -> float:
        begun = time.perf_counter()
        engine.backward(engine(inputs).float().square().mean())
        engine.step()
        return time.perf_counter() - begun

    for _ in range(3):
        step()
    found = [_pair(engine, step, folder, first_waits=bool(number % 2)) for number in range(num_pairs)]
    engine.close()
    return found


def _pair(engine: sb.Engine, step: Callable[[], float], folder: Path, *, first_waits: bool) -> Stall:
    before = [step() for _ in range(3)]
    waited = _waited(engine, folder) if first_waits else 0.0
    begun = time.perf_counter()
    engine.save(folder / "async", wait=False)
    call = time.perf_counter() - begun
    beside = [step()]
    while not (folder / "async").exists():
        beside.append(step())
    engine.wait_saved()
    waited = waited or _waited(engine, folder)
    alone = statistics.median([*before, *(step() for _ in range(3))])
    nbytes = sum(path.stat().st_size for path in (folder / "async").glob("*.safetensors"))
    shutil.rmtree(folder / "async")
    return Stall(
        nbytes=nbytes, waited=waited, call=call, step=alone, step_beside=statistics.median(beside),
        lost=sum(beside) - len(beside) * alone, num_beside=len(beside),
    )  # fmt: skip


def _waited(engine: sb.Engine, folder: Path) -> float:
    begun = time.perf_counter()
    engine.save(folder / "waited")
    spent = time.perf_counter() - begun
    shutil.rmtree(folder / "waited")
    return spent


def words(found: list[Stall]) -> str:
    """Medians over the pairs, and the range of what is compared within each."""
    middle = {
        name: statistics.median(getattr(one, name) for one in found)
        for name in ("waited", "call", "step", "step_beside", "lost", "num_beside")
    }
    shares = sorted(one.call / one.waited for one in found)
    slower = sorted(one.step_beside / one.step for one in found)
    return (
        f"{found[0].nbytes / 2**20:.0f} MiB, one rank, {len(found)} pairs, medians\n"
        f"waited for: {middle['waited']:.3f} s; in the background: {middle['call']:.3f} s for the call, "
        f"{statistics.median(shares):.2f} of it ({shares[0]:.2f} to {shares[-1]:.2f})\n"
        f"a step: {middle['step']:.3f} s alone, {middle['step_beside']:.3f} s beside the save, "
        f"{statistics.median(slower):.2f} times ({slower[0]:.2f} to {slower[-1]:.2f}); {middle['num_beside']:.0f} steps beside it lost "
        f"{middle['lost']:.3f} s together"
    )


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(dir=sys.argv[1] if len(sys.argv) > 1 else Path.cwd(), prefix=".async-"))
    try:
        print(words(stalls(folder)))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
