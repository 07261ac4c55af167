"""Step time with the optimizer on the host or a disk, beside DeepSpeed's own offload, paired in one run.

    .venv-peers/bin/python -m benchmarks.tiers_peers FILE             after `make peers`; writes what it measured as JSON
    .venv-peers/bin/python -m benchmarks.tiers_peers FILE --dry       a tiny model and few rounds: whether it runs

Both train the same GPT from the same weights on the same batches, each on two ranks of its own (`benchmarks/turns.py`). DeepSpeed has
its own CPU optimizer, which it compiles at its first run: into a new folder here, as on a machine where it never ran; later rows find it
there. Its buckets are those of ``-small`` (`benchmarks/engines.py`), which suit a model of this kind, and beside them its defaults.

On the host at stages 1 to 3; on a disk at stage 3, the only one where DeepSpeed can: with its pipelines on, all that a rank has as one
group and in groups of :data:`GROUP_NUMEL`. For that ``make peers`` fetches libaio; where it could not, these rows are left out.
"""

import argparse
import ctypes
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import engines, models, turns
from benchmarks.engines import Contender, Dtype

STAGES = (1, 2, 3)
GROUP_NUMEL, NUM_BUFFERS = 2**21, 16
AIO = {"block_size": 1 << 20, "queue_depth": 8, "thread_count": 1, "single_submit": False, "overlap_events": True}
LIBAIO = Path(__file__).parents[1] / ".venv-peers" / "libaio"
NUM_ROUNDS = 24
FOREIGN = 0.10
DRY = models.GPTConfig(layers=2, width=64, heads=2, vocab=384, sequence=16)
COMPILES = ("c++", "g++", "gcc", "ninja", "nvcc")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One place and stage in one type: milliseconds, ratios of ours to theirs (median, quartiles), and seconds of each first run."""

    place: str
    stage: int
    dtype: str
    milliseconds: dict[str, float]
    ratios: dict[str, tuple[float, float, float]]
    first_seconds: dict[str, float]
    compilers: dict[str, list[str]]
    num_rounds: int
    num_counted: int
    foreign: float


def ours(stage: int, dtype: Dtype, config: models.GPTConfig) -> Contender:
    """Shardbook with master, moments and gradients on the host."""
    import shardbook as sb

    return engines.make(f"shardbook-{stage}", dtype, config, offload=sb.Offload(optimizer="host"))


def theirs(stage: int, buckets: str, dtype: Dtype, config: models.GPTConfig) -> Contender:
    """DeepSpeed with ``offload_optimizer`` and its own CPU optimizer."""
    deepspeed = engines.import_deepspeed()
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # pyright: ignore[reportMissingImports]

    model = models.build(config)
    name = f"deepspeed-{stage}{buckets}"
    settings = engines.deepspeed_config(name, dtype, {"offload_optimizer": {"device": "cpu"}})
    adam: Any = DeepSpeedCPUAdam(model.parameters(), lr=1e-3, weight_decay=1e-2, adamw_mode=True)
    engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=adam, config=settings)
    return engines.stepped(name, engine, optimizer)


def ours_on_disk(folder: str, dtype: Dtype, config: models.GPTConfig) -> Contender:
    """Shardbook with master and moments on a disk."""
    import shardbook as sb

    return engines.make("shardbook-3", dtype, config, offload=sb.Offload(optimizer="disk", path=Path(folder)))


def theirs_on_disk(folder: str, group_numel: int | None, dtype: Dtype, config: models.GPTConfig) -> Contender:
    """DeepSpeed with ``offload_optimizer`` to "nvme"."""
    os.environ["CPATH"] = str(LIBAIO / "usr/include")
    os.environ["LIBRARY_PATH"] = str(next(LIBAIO.rglob("libaio.so")).parent)
    ctypes.CDLL(str(next(LIBAIO.rglob("libaio.so.1"))), mode=ctypes.RTLD_GLOBAL)  # where what it compiles will look for it
    deepspeed = engines.import_deepspeed()
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # pyright: ignore[reportMissingImports]

    place = {"device": "nvme", "nvme_path": folder, "pipeline_read": True, "pipeline_write": True, "buffer_count": NUM_BUFFERS}
    options: dict[str, Any] = {"offload_optimizer": place} | ({"sub_group_size": group_numel} if group_numel else {})
    name, model = "deepspeed-3-small", models.build(config)
    settings = engines.deepspeed_config(name, dtype, options) | {"aio": AIO}
    adam: Any = DeepSpeedCPUAdam(model.parameters(), lr=1e-3, weight_decay=1e-2, adamw_mode=True)
    engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=adam, config=settings)
    return engines.stepped(name, engine, optimizer)


def on_host(stage: int, dtype: Dtype, *, dry: bool) -> Row:
    """Whoever is first to compile does it, and that counts into its first step."""
    makes: dict[str, turns.Make] = {
        "shardbook": partial(ours, stage),
        "deepspeed, small buckets": partial(theirs, stage, "-small"),
        "deepspeed": partial(theirs, stage, ""),
    }
    if dry:
        del makes["deepspeed"]  # gigabytes of buckets
    return measure("host", stage, makes, dtype, dry=dry)


def on_disk(dtype: Dtype, *, dry: bool) -> Row:
    """Each has a folder of its own."""
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name, f"{number}") for number in range(3)]
        for folder in folders:
            folder.mkdir()
        makes: dict[str, turns.Make] = {
            "shardbook": partial(ours_on_disk, str(folders[0])),
            "deepspeed, small buckets": partial(theirs_on_disk, str(folders[1]), None),
            "deepspeed, small buckets and groups": partial(theirs_on_disk, str(folders[2]), GROUP_NUMEL),
        }
        return measure("disk", 3, makes, dtype, dry=dry)


def measure(place: str, stage: int, makes: Mapping[str, turns.Make], dtype: Dtype, *, dry: bool) -> Row:
    """All of them in turn."""
    found = turns.measure(makes, dtype, DRY if dry else models.GPTConfig(), micro_batch=1, num_rounds=6 if dry else NUM_ROUNDS)
    times, kept = found.times, found.times.quiet(FOREIGN)
    return Row(
        place=place,
        stage=stage,
        dtype=dtype,
        milliseconds={name: times.median(name, FOREIGN) * 1e3 for name in makes},
        ratios={name: times.ratio("shardbook", name, FOREIGN) for name in makes if name != "shardbook"},
        first_seconds={name: done.seconds for name, done in found.first.items()},
        compilers={name: compilers(done.programs) for name, done in found.first.items()},
        num_rounds=len(times.rounds),
        num_counted=len(kept),
        foreign=max(one.foreign for one in kept),
    )


def compilers(programs: tuple[str, ...]) -> list[str]:
    """Those that compile, of the command lines that were started.

    >>> compilers(("['ninja', '-v']", "['uname', '-p']"))
    ['ninja']
    """
    return sorted({name for name in COMPILES for program in programs if name in program})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--stages", type=int, nargs="+", default=list(STAGES), choices=STAGES)
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCH_EXTENSIONS_DIR"] = folder
        for dtype in options.dtypes:
            for stage in options.stages:
                rows.append(on_host(stage, dtype, dry=options.dry))
                print(rows[-1], flush=True)
            if 3 in options.stages and LIBAIO.is_dir():
                rows.append(on_disk(dtype, dry=options.dry))
                print(rows[-1], flush=True)
    options.file.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
