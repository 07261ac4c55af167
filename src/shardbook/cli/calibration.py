"""``shardbook doctor --calibrate``: measures what this machine does in a second, and what doctor says of it."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from shardbook.cli.forecast_question import parse_count
from shardbook.document import write_atomically
from shardbook.errors import ConfigError
from shardbook.facts.machine import Machine, read_machine, usual_path
from shardbook.facts.topology import ROOT, nodes, slots

_UNMEASURED = "not measured; shardbook doctor --calibrate does"


def calibrate(*, ranks: str | None, output: Path | None, path: Path | None) -> Machine:
    """Measure on this machine and write the document.

    Args:
        ranks: processes at once; None: one for each device, two on a CPU.
        output: the document; None: :func:`shardbook.facts.machine.usual_path`.
        path: the folder whose disk is measured; None: the current one.

    Raises:
        ConfigError: a number of ranks that is none; a folder that can't be measured, or a document that can't be written.
    """
    from shardbook.train.launch import launch

    folder, target = (path or Path.cwd()).absolute(), output or usual_path()
    if not folder.is_dir():
        raise ConfigError(f"--path {folder}: is no folder; give one on the disk that offload would use")
    count = _num_ranks() if ranks is None else parse_count(ranks, "--ranks")
    if count < 1:
        raise ConfigError(f"--ranks {count}: allowed is 1 or more; leave it out for one a device, and two on a CPU")
    if not target.parent.is_dir() and output is not None:
        raise ConfigError(f"--output {output}: its folder is missing; make it first")
    print(f"measuring on {count} ranks, about a minute; nothing else should run meanwhile", file=sys.stderr)
    text = launch({"task": "calibrate", "device": "auto", "path": str(folder)}, ranks=count)
    machine = _with_wholes(Machine.from_json(text))
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        write_atomically(target, machine.to_json())
    except OSError as error:
        raise ConfigError(f"--output {target}: can't be written ({error.strerror}); give another") from error
    print(f"written to {target}", file=sys.stderr)
    return machine


def _with_wholes(machine: Machine) -> Machine:
    """With what a step of the small model took by what its parts add up to."""
    import torch

    from shardbook.forecasting.forecast import forecast
    from shardbook.models.decoder import Decoder
    from shardbook.train.calibration import whole

    with torch.device("meta"):
        model = Decoder(whole.MODEL)
    numbers = dict(machine.numbers)
    for name, config in whole.CONFIGS.items():
        said = forecast(
            model, config, ranks=machine.ranks, micro_batch=whole.MICRO_BATCH, sequence=whole.SEQUENCE, machine=machine
        ).step_seconds  # fmt: skip
        assert said is not None
        numbers[f"whole.{name}"] = max(1.0, numbers[f"step.{name}"] / said)
    return replace(machine, numbers=numbers)


def _num_ranks() -> int:
    import torch

    return (torch.cuda.device_count() if torch.cuda.is_available() else 0) or 2


def known() -> Machine | None:
    """The calibration at its usual place, if there is one that can be read."""
    try:
        return read_machine(usual_path())
    except ConfigError:
        return None


def surroundings(machine: Machine | None, root: Path = ROOT) -> Mapping[str, str]:
    """What a run depends on beside processors and devices, each in words; what can't be seen says so."""
    return dict(_surroundings(machine, root))


def _surroundings(machine: Machine | None, root: Path) -> Iterator[tuple[str, str]]:
    found = nodes(root)
    if not found:
        yield "NUMA nodes", "can't be seen; ranks are not bound"
    elif len(found) == 1:
        yield "NUMA nodes", f"one, of {len(found[0].cores)} cores; nothing to bind ranks to"
    else:
        each = ", ".join(f"{node.number} with {len(node.cores)} cores" for node in found)
        yield "NUMA nodes", f"{each}; each rank is bound to the one near its device, else in turn"
    yield "PCI Express", "\n".join(slot.describe() for slot in slots(root)) or "no accelerator can be seen on it"
    if machine is None:
        for name in ("host copies", "disk", "calibration"):
            yield name, _UNMEASURED
        return
    yield "host copies", _copies(machine)
    yield "disk", _disk(machine)
    yield "calibration", f"of {machine.made}: {machine.ranks} ranks on {machine.processor}, {machine.device}, torch {machine.torch}"


_LARGE = 1 << 25


def _copies(machine: Machine) -> str:
    """Rates of large copies, by kind of memory and direction."""
    found = [
        f"{kind} {_rate(machine, f'copy.{way}', kind, _LARGE):.1f} GB/s {words}"
        for kind in ("pinned", "pageable")
        for way, words in (("down", "device to host"), ("up", "host to device"))
        if machine.knows(f"copy.{way}", kind)
    ]
    if machine.device == "cpu":
        found.append("one memory, so that nothing needs pinning")
    return ", ".join(found) or _UNMEASURED


def _disk(machine: Machine) -> str:
    """Rates of one rank while all of them do the same."""
    if not machine.knows("disk.read"):
        return _UNMEASURED
    rates = {way: _rate(machine, f"disk.{way}", "", _LARGE) for way in ("read", "write", "both")}
    said = [f"reads {rates['read']:.2f} GB/s, writes {rates['write']:.2f} GB/s, {rates['both']:.2f} GB/s each way at once"]
    said += [note for note in machine.notes if "direct I/O" in note]
    return "; ".join([f"each of {machine.ranks} ranks", *said])


def _rate(machine: Machine, what: str, dtype: str, nbytes: int) -> float:
    """10^9 bytes a second."""
    return nbytes / machine.seconds(what, dtype, nbytes) / 1e9
