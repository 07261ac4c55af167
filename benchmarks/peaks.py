"""Allocator peak inside a steady step, and live bytes after it, of each engine in its own processes.

    python -m benchmarks.peaks --engines shardbook-3 fsdp2 --dtypes fp32 bf16 --blocks 20

Both are above what was live before the model was built: the records start there. Gradients are freed before the step ends.
"""

import argparse
from dataclasses import dataclass

import torch.distributed as dist

from benchmarks import engines, models, ranks
from benchmarks.measure import MIB, AllocationRecords, Peak

STEADY = 3
"""The step that is measured: by then optimizer state exists and orders of looking ahead are agreed."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Of one rank."""

    peak: Peak
    live_nbytes: int
    unseen_nbytes: int  # freed by another thread, hence in neither figure
    padding: float  # share of the flat buffers' elements that belongs to no parameter; 0 for engines that tell of none
    loss: float


def of_engine(name: str, dtype: engines.Dtype, config: models.GPTConfig, micro_batch: int) -> Memory:
    """Train a few steps under the records. Every rank of a group calls it."""
    loss = float("nan")
    with AllocationRecords() as records:
        contender = engines.make(name, dtype, config)
        for step in range(STEADY + 1):
            inputs, targets = models.batch(config, micro_batch, rank=dist.get_rank(), step=step)
            with records.span(f"step {step}"):
                loss = float(contender.step(inputs, targets))
        contender.settle()  # a message must not outlive the profiler that saw it begin: torch 2.13 dies of that
    last = f"step {STEADY}"
    return Memory(
        peak=records.peak(last),
        live_nbytes=records.live_at_end(last),
        unseen_nbytes=records.unseen_nbytes,
        padding=padding_of(contender),
        loss=loss,
    )


def padding_of(contender: engines.Contender) -> float:
    """Share of padding in all of an engine's flat buffers, from what the engine books for this rank's parameters."""
    if contender.engine is None:
        return 0.0
    from shardbook.accounts import Account
    from shardbook.events import Booking, Event

    seen: list[Event] = []
    with contender.engine.observe(seen.append):
        pass
    kept = [event for event in seen if isinstance(event, Booking) and event.account in (Account.PARAM, Account.MASTER)]
    return sum(booking.padding for booking in kept) / sum(booking.nbytes for booking in kept)


def measure(name: str, dtype: engines.Dtype, *, num_ranks: int = 2, micro_batch: int = 4) -> list[Memory]:
    """By rank."""
    return ranks.run(num_ranks, of_engine, name, dtype, models.GPTConfig(), micro_batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=["shardbook-3", "fsdp2"], choices=engines.NAMES)
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=0, help="also list so many of the blocks that are live at rank 0's peak")
    options = parser.parse_args()
    for dtype in options.dtypes:
        for name in options.engines:
            if (why := engines.not_run(name)) is not None:
                print(f"{name:17} {dtype}: {why}")
                continue
            found = measure(name, dtype, num_ranks=options.ranks, micro_batch=options.micro_batch)
            peaks = ", ".join(f"{memory.peak.nbytes / MIB:.1f}" for memory in found)
            live = ", ".join(f"{memory.live_nbytes / MIB:.1f}" for memory in found)
            padding = max(memory.padding for memory in found)
            print(f"{name:17} {dtype}: peak {peaks} MiB, live {live} MiB by rank, padding {padding:.4%}, loss {found[0].loss:.6f}")
            if options.blocks:
                print(f"  at the peak: in {' > '.join(found[0].peak.inside[-6:])}")
            for block in found[0].peak.blocks[: options.blocks]:
                print(f"  {block.nbytes / MIB:9.3f} MiB  {' > '.join(block.inside[-4:]) or '(outside of operators)'}")


if __name__ == "__main__":
    main()
