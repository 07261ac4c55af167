"""The engine on fake tensors and a fake process group: a 7B model on 1,024 ranks, and small models beside real runs.

    python -m benchmarks.fake_ranks            the 7B model: seconds and resident memory of one process
    python -m benchmarks.fake_ranks --balances the small model at N = 2 and 4, stages 0 to 3: fake balances against real ones

No tensor has values here, and nothing is sent: what runs is the engine, unchanged.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import ranks
from shardbook.events import Booking, Event
from shardbook.ledger.counters import peak_resident_nbytes
from shardbook.ledger.ledger import Ledger
from shardbook.models.config import DecoderConfig
from shardbook.models.decoder import Decoder, init_weights
from shardbook.simulation.group import fake_group

SEVEN_BILLION = DecoderConfig(vocab=32_000, layers=32, width=4096, heads=32, kv_heads=32, ffn=11_008)
SMALL = DecoderConfig(vocab=320, layers=3, width=96, heads=4, kv_heads=2, ffn=208)
SEQUENCE = 2048
SETTINGS = tuple((stage, precision) for precision in ("fp32", "bf16") for stage in range(4))
Balances = dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of building the model and taking one step."""

    num_parameters: int
    seconds: float  # to build the model, the optimizer and the engine, and to step once; imports not counted
    resident_mib: float  # the process's peak, interpreter and libraries included
    persistent_nbytes: int  # what the engine's books hold between steps, per rank


@dataclass(frozen=True, kw_only=True)
class Books:
    """What the engine booked: after the last step; when all accounts together held most; and most of each account by itself."""

    between: Balances
    peak: Balances
    phase: str
    highest: Balances


def seven_billion(num_ranks: int = 1024) -> Cost:
    """Build the 7B model on the meta device and step once, as one of ``num_ranks``."""
    with fake_group(num_ranks, 0):
        began = time.perf_counter()
        books, num_parameters = _train_fake(SEVEN_BILLION, stage=3, precision="bf16", sequence=SEQUENCE, num_steps=1)
        seconds = time.perf_counter() - began
    resident_mib = peak_resident_nbytes() / 2**20
    return Cost(num_parameters=num_parameters, seconds=seconds, resident_mib=resident_mib, persistent_nbytes=sum(books.between.values()))


def fake_books(num_ranks: int, rank: int) -> list[Books]:
    """The small model on fake tensors, as ``rank``, in each of :data:`SETTINGS`."""
    with fake_group(num_ranks, rank):
        return [_train_fake(SMALL, stage=stage, precision=precision, sequence=16, num_steps=3)[0] for stage, precision in SETTINGS]


def real_books() -> list[Books]:
    """The same on real tensors; every rank of a group calls it."""
    found: list[Books] = []
    for stage, precision in SETTINGS:
        with torch.device("meta"):
            model = Decoder(SMALL)
        found.append(_train(model, stage=stage, precision=precision, sequence=16, num_steps=3)[0])
    return found


def _train_fake(config: DecoderConfig, **settings: Any) -> tuple[Books, int]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with torch.device("meta"):
        model = Decoder(config)
    with FakeTensorMode():
        return _train(model, **settings)


def _train(model: Decoder, *, stage: int, precision: str, sequence: int, num_steps: int) -> tuple[Books, int]:
    import shardbook as sb

    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    zero = sb.ZeroConfig(stage=stage, precision=sb.Precision(param=precision))  # pyright: ignore[reportArgumentType]
    engine = sb.Engine(model, optimizer, zero, init=init_weights, device=torch.device("cpu"))
    tokens = torch.zeros(1, sequence, dtype=torch.long)
    ledger, highest = Ledger(engine), _Highest()
    with engine.observe(highest):
        for _ in range(num_steps):
            loss_sum, num_tokens = engine(tokens, tokens)
            engine.backward(loss_sum, weight=num_tokens)
            engine.step()
        with torch.no_grad():
            engine(tokens, tokens)  # so that what a step leaves under way is over
    books = Books(between=_plain(ledger.balances()), peak=_plain(ledger.peak), phase=ledger.peak_phase, highest=_plain(highest.found))
    return books, num_parameters


class _Highest:
    """Observer: the most that each account held at once."""

    def __init__(self) -> None:
        self._now: Counter[tuple[str, str]] = Counter()
        self.found: dict[tuple[str, str], int] = {}

    def __call__(self, event: Event) -> None:
        if isinstance(event, Booking):
            key = (str(event.account), str(event.tier))
            self._now[key] += event.nbytes
            self.found[key] = max(self.found.get(key, 0), self._now[key])


def _plain(balances: Any) -> Balances:
    return {f"{account} on {tier}": nbytes for (account, tier), nbytes in sorted(balances.items())}


def in_its_own_process() -> Cost:
    """The 7B model in a fresh interpreter, so that its resident memory is nobody else's."""
    done = subprocess.run([sys.executable, "-m", "benchmarks.fake_ranks", "--json"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the 7B model on 1,024 fake ranks failed:\n{done.stderr}")
    return Cost(**json.loads(done.stdout.splitlines()[-1]))


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Fake books against real ones, in one setting, on every rank."""

    num_ranks: int
    stage: int
    precision: str
    fake: list[Books]
    real: list[Books]

    @property
    def differences(self) -> list[str]:
        """Every figure that isn't the same to the byte, on any rank."""
        found: list[str] = []
        for rank, (fake, real) in enumerate(zip(self.fake, self.real, strict=True)):
            for name in ("between", "peak", "highest"):
                ours, theirs = getattr(fake, name), getattr(real, name)
                found += [
                    f"rank {rank}, {name}: {key} {ours.get(key, 0)} fake, {theirs.get(key, 0)} real"
                    for key in sorted({*ours, *theirs})
                    if ours.get(key, 0) != theirs.get(key, 0)
                ]
        return found


def compare(num_ranks: int) -> list[Comparison]:
    """In all settings."""
    real = ranks.run(num_ranks, real_books)
    fake = [fake_books(num_ranks, rank) for rank in range(num_ranks)]
    return [
        Comparison(num_ranks=num_ranks, stage=stage, precision=precision, fake=[of[index] for of in fake], real=[of[index] for of in real])
        for index, (stage, precision) in enumerate(SETTINGS)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--balances", action="store_true", help="compare fake and real balances of a small model instead")
    parser.add_argument("--json", action="store_true", help="print the 7B model's cost as one line of JSON")
    options = parser.parse_args()
    if options.json:
        print(json.dumps(dataclasses.asdict(seven_billion())))
        return
    if not options.balances:
        cost = in_its_own_process()
        print(f"{cost.num_parameters:,} parameters on 1,024 fake ranks: built and stepped once in {cost.seconds:.1f} s")
        print(f"resident peak {cost.resident_mib:.0f} MiB; persistent per rank {cost.persistent_nbytes:,} bytes")
        return
    for num_ranks in (2, 4):
        for one in compare(num_ranks):
            print(f"N = {num_ranks}, stage {one.stage}, {one.precision}: {'different' if one.differences else 'equal'}")
            for difference in one.differences:
                print(f"  {difference}")


if __name__ == "__main__":
    main()
