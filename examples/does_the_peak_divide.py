"""If eight-rank ZeRO-3 divides the persistent state by eight, must the peak divide by eight?

    python examples/does_the_peak_divide.py           a table, and the answer in one sentence
    python examples/does_the_peak_divide.py --json    the same figures

A decoder is trained for a few steps under stage 3: on 1, 2 and 4 ranks for real, each a process of its own, and on 8 with torch's
fake process group, in which one process is rank 0 and nothing is sent. Tensors are real in both, so every byte is allocated and
measured; only the losses of the fake group mean nothing. The fake group runs 4 ranks as well, and must show the bytes of the real 4.
"""

import argparse
import gc
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

import shardbook as sb
from shardbook.accounts import Account
from shardbook.forecasting.closed_form import padding
from shardbook.models.config import DecoderConfig
from shardbook.models.decoder import Decoder
from shardbook.tables.sizes import size

NUM_STEPS = 3
PERSISTENT = (Account.PARAM, Account.MASTER, Account.MOMENT)
"""What lies there between steps because the model is trained at all."""

SLACK = 1.1
"""An account divides if it is at most this many times 1/N of what it is on one rank: a shard may be padded."""

WHY = {
    Account.PARAM: "shards are cut at multiples of 64 elements: a small unit leaves some ranks padding",
    Account.MASTER: "shards are cut at multiples of 64 elements: a small unit leaves some ranks padding",
    Account.MOMENT: "each piece keeps a step counter of its own, however small the piece",
    Account.GRAD: "a shard of the gradients, padded as parameters are; and of a step in which it is not all there at the peak",
    Account.GATHERED: "the unit in use, the root and what is fetched ahead are whole on every rank, however many ranks there are",
    Account.GRAD_FULL: "a unit's gradients are whole on every rank until they are reduced",
    Account.COMM: "the parts of the other ranks arrive here: (N-1)/N of a unit, more with each rank",
    Account.ACTIVATION: "they belong to the rank's own micro-batch, and every rank has one",
    Account.WORKSPACE: "temporaries of operators on the rank's own micro-batch",
    Account.BUFFER: "buffers of modules belong to each rank: ZeRO shards parameters, gradients and optimizer state, and no other object",
    Account.INPUT: "the rank's own micro-batch",
    Account.UNACCOUNTED: "older than the measurement, or seen by the allocator alone",
}


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is trained: the decoder's sizes, and one micro-batch of a rank in sequences and tokens."""

    vocab: int = 2000
    layers: int = 6
    width: int = 372  # no multiple of 64, so that there is padding
    micro_batch: int = 2
    sequence: int = 128

    def build(self) -> torch.nn.Module:
        ffn = 64 * round(self.width * 8 / 3 / 64)
        model = Decoder(DecoderConfig(vocab=self.vocab, layers=self.layers, width=self.width, heads=6, kv_heads=6, ffn=ffn))
        model.register_buffer("num_seen", torch.zeros(self.vocab, dtype=torch.long))  # how often each token came: an unsharded object
        return model


@dataclass(frozen=True, kw_only=True)
class Found:
    """One number of ranks, in bytes of rank 0. (The other ranks differ by which end of a unit's buffer is theirs, and is padding.)

    ``persistent`` is what the books hold between steps, ``padding`` how much of it carries no element of a parameter, ``accounts`` the
    peak by account. ``unaccounted`` is part of the peak.
    """

    num_ranks: int
    group: str
    peak: int
    phase: str
    persistent: int
    padding: int
    accounts: Mapping[str, int]
    losses: tuple[float, ...]


def train(load: Load, group: str) -> Found:
    """A few steps on this rank of the default process group."""
    torch.manual_seed(dist.get_rank())
    model = load.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    config = sb.ZeroConfig(stage=3)
    engine = sb.Engine(model, optimizer, config)
    ledger = sb.Ledger(engine)
    losses: list[float] = []
    with sb.measure(model, optimizer) as run:
        for _ in range(NUM_STEPS):
            tokens = torch.randint(load.vocab, (load.micro_batch, load.sequence + 1))
            model.num_seen += torch.bincount(tokens.flatten(), minlength=load.vocab)
            loss_sum, num_tokens = engine(tokens[:, :-1], tokens[:, 1:])
            engine.backward(loss_sum, weight=num_tokens)
            losses.append(engine.step().loss or 0.0)
            del loss_sum, num_tokens
    books = run.document().reconciliations[0]
    carried = padding(engine.structure(), config)
    return Found(
        num_ranks=dist.get_world_size(),
        group=group,
        peak=books.allocated,
        phase=books.phase,
        persistent=sum(nbytes for (account, _), nbytes in ledger.balances().items() if account in PERSISTENT),
        padding=sum(carried.get(account, 0) for account in PERSISTENT),
        accounts={account: nbytes for account, nbytes in books.books.items() if nbytes},
        losses=tuple(losses),
    )


def _real(rank: int, num_ranks: int, folder: str, load: Load) -> None:
    """One rank's life: a process of its own, which meets the others through a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=num_ranks)
    found = train(load, "gloo")
    if rank == 0:
        Path(folder, "found").write_text(json.dumps(asdict(found)), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _fake(_: int, groups: Sequence[int], folder: str, load: Load) -> None:
    """Rank 0 of each of the fake groups, one group after the other."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    found: list[dict[str, Any]] = []
    for num_ranks in groups:
        dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
        found.append(asdict(train(load, "fake")))
        dist.destroy_process_group()
        gc.collect()  # the next group's measurement begins without this one's engine
    Path(folder, "found").write_text(json.dumps(found), encoding="utf-8")


def run_real(num_ranks: int, load: Load) -> Found:
    """A group of as many processes, and what its rank 0 found."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_real, args=(num_ranks, folder, load), nprocs=num_ranks)
        return Found(**json.loads(Path(folder, "found").read_text(encoding="utf-8")))


def run_fake(groups: Sequence[int], load: Load) -> list[Found]:
    """One process that is rank 0 of each group in turn."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_fake, args=(groups, folder, load), nprocs=1)
        return [Found(**each) for each in json.loads(Path(folder, "found").read_text(encoding="utf-8"))]


def divides(before: int, now: int, num_ranks: int) -> bool:
    """Whether what one rank held is spread over ``num_ranks``."""
    return now * num_ranks <= SLACK * before


def whole_accounts(one: Found, most: Found) -> list[str]:
    """The accounts that don't divide, largest first."""
    held = sorted(most.accounts.items(), key=lambda entry: -entry[1])
    return [account for account, nbytes in held if not divides(one.accounts.get(account, 0), nbytes, most.num_ranks)]


def table(found: Sequence[Found]) -> Table:
    """Bytes on one rank and, beside them, their ratio to one rank alone."""
    one = found[0]
    shown = Table(title="bytes on a rank under ZeRO-3, and their ratio to N = 1; * divides by N", title_justify="left")
    shown.add_column("")
    for each in found:
        shown.add_column(f"N = {each.num_ranks}, {each.group}", justify="right")
    shown.add_row("1/N", *(f"{1 / each.num_ranks:.3f}" for each in found))
    rows: list[tuple[str, Callable[[Found], int]]] = [
        ("persistent state", lambda each: each.persistent),
        ("  of it padding", lambda each: each.padding),
        ("peak", lambda each: each.peak),
    ]
    for name, get in rows:
        shown.add_row(name, *(_cell(get(one), get(each), each.num_ranks) for each in found))
    shown.add_row("peak was in", *(each.phase for each in found), end_section=True)
    for account in Account:
        if any(account in each.accounts for each in found):
            shown.add_row(account, *(_cell(one.accounts.get(account, 0), each.accounts.get(account, 0), each.num_ranks) for each in found))
    return shown


def _cell(before: int, now: int, num_ranks: int) -> str:
    ratio = f"{now / before:.3f}" if before else "-"
    return f"{size(now)}  {ratio}{'*' if num_ranks > 1 and before and divides(before, now, num_ranks) else ' '}"


def answer(found: Sequence[Found]) -> str:
    """One sentence, from the figures."""
    one, most = found[0], found[-1]
    ratio, share = most.peak / one.peak, 1 / most.num_ranks
    whole = whole_accounts(one, most)
    held = sum(most.accounts[account] for account in whole)
    verdict = "Yes" if divides(one.peak, most.peak, most.num_ranks) else "No"
    return (
        f"{verdict}: on {most.num_ranks} ranks the persistent state is {most.persistent / one.persistent:.3f} of what one rank holds "
        f"(1/N is {share:.3f}), and the peak {ratio:.3f} ({size(most.peak)} of {size(one.peak)}), because {size(held)} of it "
        f"({100 * held / most.peak:.0f}%) do not divide: {', '.join(f'{account} {size(most.accounts[account])}' for account in whole)}."
    )


def report(found: Sequence[Found], checked: str, console: Console) -> None:
    one, most = found[0], found[-1]
    console.print(table(found))
    console.print(f"\nAccounts that do not divide by {most.num_ranks}:")
    for account in whole_accounts(one, most):
        console.print(f"  {account}: {WHY[Account(account)]}")
    console.print(f"  padding: {size(most.padding)} of the persistent state, where shards are cut at multiples of 64 elements")
    console.print(f"\n{checked}\n")
    console.print(answer(found), soft_wrap=True)  # one sentence on one line, also where somebody reads the last line alone


def check(real: Found, fake: Found) -> str:
    """What makes the fake group's figures believable: as many ranks for real.

    Raises:
        SystemExit: they differ.
    """
    if (real.peak, real.persistent) == (fake.peak, fake.persistent):
        return f"The fake group of {fake.num_ranks} shows the bytes of the real one: peak {real.peak:,}, persistent {real.persistent:,}."
    raise SystemExit(
        f"the fake group of {fake.num_ranks} holds {fake.persistent:,} bytes and peaks at {fake.peak:,}; "
        f"for real it is {real.persistent:,} and {real.peak:,}: the figures of the larger fake group can't be believed"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in asdict(Load()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--real", type=int, nargs="+", default=[1, 2, 4], help="numbers of ranks that are run for real, from 1 up")
    parser.add_argument("--fake", type=int, default=8, help="number of ranks of the fake group")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options: Any = vars(parser.parse_args())
    load = Load(**{name: options[name] for name in asdict(Load())})
    found = [run_real(num_ranks, load) for num_ranks in options["real"]]
    same, more = run_fake((options["real"][-1], options["fake"]), load)
    checked = check(found[-1], same)
    found.append(more)
    if options["json"]:
        told = {"found": [asdict(each) for each in found], "check": checked, "answer": answer(found)}
        sys.stdout.write(json.dumps(told, indent=2) + "\n")
        return
    report(found, checked, Console(width=None if Console().is_terminal else 140))


if __name__ == "__main__":
    main()
