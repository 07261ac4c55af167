"""One measured run: an engine, a type, a model, a micro-batch, and the run document that :func:`shardbook.measure` makes of it.

    documents(cases)      by case; each engine in processes of its own, DeepSpeed's also in an environment of its own
    python -m benchmarks.books_case OUT CASES     the same where it runs, as JSON; what the other environment is started with

A run takes a few steps: optimizer state is made in the first one, orders of looking ahead and DDP's buckets are settled after it.
"""

import gc
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import engines, models, ranks
from benchmarks.engines import Dtype
from shardbook.document import Reconciliation, RunDocument
from shardbook.models.config import DecoderConfig

ROOT = Path(__file__).parents[1]
PEERS = ROOT / ".venv-peers" / "bin" / "python"
NUM_STEPS = 3
SEQUENCE = 256
GPT = models.GPTConfig()
LLAMA = DecoderConfig(vocab=8192, layers=8, width=448, heads=8, kv_heads=2, ffn=1216)
WIDE_VOCABULARY = models.GPTConfig(layers=4, width=256, heads=4, vocab=32768)
SMALL = models.GPTConfig(layers=6, width=256, heads=4, vocab=2048, sequence=64)
OVERSIZED, OVERSIZED_FACTOR = 3, 8
"""Of the shape ``oversized``: the block, and how many times as wide its MLP is."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run.

    Args:
        engine: a name of :mod:`benchmarks.engines`, ``plain`` (fused AdamW) or ``plain-foreach`` (both on one rank), or ``ddp-copies``
            (gradients beside the buckets).
        dtype: what is computed in.
        micro_batch: sequences of each rank.
        shape: ``gpt`` or ``wide vocabulary``; ``llama``, for shardbook's engines; ``small``, and what is made of it: ``hiding`` (memory
            that no tensor has) and ``oversized`` (one block is wider).
    """

    engine: str
    dtype: Dtype = "fp32"
    micro_batch: int = 1
    shape: str = "gpt"

    @property
    def num_ranks(self) -> int:
        return 1 if self.engine.startswith("plain") else 2

    @property
    def is_peer(self) -> bool:
        return self.engine.startswith("deepspeed")


@dataclass(frozen=True, kw_only=True)
class NotRun:
    """Why a case was not run, and the command that would change it. ``failed``: it was tried."""

    reason: str
    failed: bool = False


Outcome = RunDocument | NotRun


def not_run(case: Case) -> str | None:
    """Why a case can't be run on this machine, or None."""
    if case.is_peer and not PEERS.exists():
        return "DeepSpeed has an environment of its own, which is not there: `make peers` installs it"
    return None


_measured: dict[Case, Outcome] = {}
"""Sections share runs."""


def documents(cases: Iterable[Case]) -> dict[Case, Outcome]:
    """What was measured, by case; nothing is measured twice. All cases of an engine that are asked for together share
    processes, but DeepSpeed's: an engine of its that was left stays alive, and its stage 3 changes torch.
    """
    wanted = tuple(dict.fromkeys(cases))
    by_engine: dict[str, list[Case]] = {}
    for case in wanted:
        if (why := not_run(case)) is not None:
            _measured[case] = NotRun(reason=why)
        elif case not in _measured:
            by_engine.setdefault(f"{case}" if case.is_peer else case.engine, []).append(case)
    for together in by_engine.values():
        found = _elsewhere(together) if together[0].is_peer else [RunDocument.from_json(text) for text in here(together)]
        _measured.update(zip(together, found, strict=True))
    return {case: _measured[case] for case in wanted}


def _elsewhere(cases: Sequence[Case]) -> list[Outcome]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "documents.json"
        command = [str(PEERS), "-m", "benchmarks.books_case", str(out), json.dumps([asdict(case) for case in cases])]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
        if ended.returncode:
            last = (ended.stderr.strip() or "nothing on stderr").splitlines()[-1]
            return [NotRun(reason=f"it failed: {last}; `make peers` makes its environment anew", failed=True)] * len(cases)
        return [RunDocument.from_json(text) for text in json.loads(out.read_text())]


def here(cases: Sequence[Case]) -> list[str]:
    """Documents as JSON, from new processes of this environment."""
    return ranks.run(cases[0].num_ranks, measure_all, cases)[0]


def measure_all(cases: Sequence[Case]) -> list[str]:
    """Every rank of a group calls it."""
    found: list[str] = []
    for case in cases:
        found.append(measure(case).to_json())
        gc.collect()
    return found


def measure(case: Case) -> RunDocument:
    """Every rank of a group calls it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)  # DeepSpeed's and FSDP2's own, about names of collectives
        return _measured(case)


def _measured(case: Case) -> RunDocument:
    import shardbook as sb

    contender, batch = build(case)
    with sb.measure(contender.model, contender.optimizer) as run:
        for step in range(NUM_STEPS):
            contender.step(*batch(step))
    contender.settle()
    document = run.document()
    if (close := getattr(contender.engine, "close", None)) is not None:
        close()
    return document


def build(case: Case) -> tuple[engines.Contender, Callable[[int], tuple[Tensor, Tensor]]]:
    """The engine, and the batch of each step."""
    if case.shape == "llama":
        return _llama(case), lambda step: _tokens(LLAMA.vocab, case.micro_batch, step)
    config = {"gpt": GPT, "wide vocabulary": WIDE_VOCABULARY}.get(case.shape, SMALL)
    with _shaped(case.shape):
        contender = _plain(case, config) if case.engine.startswith("plain") else _engine(case, config)
    return contender, lambda step: models.batch(config, case.micro_batch, rank=dist.get_rank(), step=step)


def _engine(case: Case, config: models.GPTConfig) -> engines.Contender:
    if case.engine == "ddp-copies":
        return engines.make("ddp", case.dtype, config, gradient_as_bucket_view=False)
    return engines.make(case.engine, case.dtype, config)


def _plain(case: Case, config: models.GPTConfig) -> engines.Contender:
    """The loop that everybody writes; bf16 by autocast."""
    model = models.build(config) if case.shape not in _CHANGES else engines.build(config)
    foreach = case.engine == "plain-foreach"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=not foreach, foreach=foreach)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=case.dtype == "bf16"):
            loss = model(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return engines.Contender(name=case.engine, model=model, optimizer=optimizer, step=step)


def _llama(case: Case) -> engines.Contender:
    import shardbook as sb
    from shardbook.models.decoder import Decoder

    stage: Any = int(case.engine.removeprefix("shardbook-"))
    model = Decoder(LLAMA)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    engine = sb.Engine(model, optimizer, sb.ZeroConfig(stage=stage, precision=sb.Precision(param=case.dtype)))

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss_sum, num_tokens = engine(inputs, targets)
        engine.backward(loss_sum, weight=int(num_tokens))
        engine.step()
        return loss_sum.detach() / num_tokens

    return engines.Contender(name=case.engine, model=model, optimizer=optimizer, step=step, engine=engine)


def _tokens(vocab: int, micro_batch: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1_000_003 * step + dist.get_rank())
    tokens = torch.randint(vocab, (micro_batch, SEQUENCE + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


# ---- models with something odd about them -----------------------------------------------------------------------------------

HIDDEN_NBYTES = 2**24
HIDING = "blocks.2"


def _hide(model: models.GPT) -> models.GPT:
    """In one block's forward memory is taken that no tensor has: it stays until the next forward."""
    kept: list[torch.UntypedStorage] = []

    def before(*_: Any) -> None:
        kept.clear()

    def inside(*_: Any) -> None:
        kept.append(torch.UntypedStorage(HIDDEN_NBYTES))

    model.register_forward_pre_hook(before)
    model.get_submodule(f"{HIDING}.up").register_forward_hook(inside)
    return model


def _widen(model: models.GPT) -> models.GPT:
    """One block's MLP becomes several times as wide."""
    block, width = model.blocks[OVERSIZED], model.config.width
    assert isinstance(block, models.Block)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        block.up, block.down = nn.Linear(width, 4 * OVERSIZED_FACTOR * width), nn.Linear(4 * OVERSIZED_FACTOR * width, width)
    return model


_CHANGES: dict[str, Callable[[models.GPT], models.GPT]] = {"hiding": _hide, "oversized": _widen}


class _shaped:  # noqa: N801 - used as a function
    """While it is open, the engines' models have what is odd about a shape."""

    def __init__(self, shape: str) -> None:
        self._change = _CHANGES.get(shape)

    def __enter__(self) -> None:
        if (change := self._change) is not None:

            def build(config: models.GPTConfig | None = None, seed: int = 0) -> models.GPT:
                return change(models.build(config, seed))

            engines.build = build

    def __exit__(self, *_: Any) -> None:
        engines.build = models.build


# ---- what is read from a document -------------------------------------------------------------------------------------------


def worst(document: RunDocument) -> Reconciliation:
    """Of the rank whose allocator held most."""
    return max(document.reconciliations, key=lambda found: found.allocated)


def unaccounted(document: RunDocument) -> float:
    """The largest share of all ranks."""
    return max(found.books["UNACCOUNTED"] / found.allocated for found in document.reconciliations)


def main() -> None:
    out, given = Path(sys.argv[1]), json.loads(sys.argv[2])
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    out.write_text(json.dumps(here([Case(**values) for values in given])), encoding="utf-8")


if __name__ == "__main__":
    main()
