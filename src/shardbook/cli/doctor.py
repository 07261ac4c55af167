"""``shardbook doctor``: what is here, whether two ranks can really talk, what is missing and how to get it, and rates."""

import json as jsonlib
import os
import platform
import sys
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shardbook import __version__
from shardbook.cli import calibration
from shardbook.errors import ConfigError, ShardbookError

_PACKAGES = {
    "torch": "pip install 'shardbook[train]'",
    "numpy": "pip install 'shardbook[train]'",
    "safetensors": "pip install 'shardbook[train]'",
    "psutil": "pip install 'shardbook[train]'",
    "xxhash": "pip install 'shardbook[train]'",
    "transformers": "pip install 'shardbook[hf]' (only for models from a config.json)",
}
_NEEDED = ("torch",)


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that works or doesn't; ``remedy`` is empty where nothing is to be done."""

    name: str
    ok: bool
    found: str
    remedy: str = ""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What doctor says. ``missing`` is package to remedy; ``checks`` decide the exit code."""

    versions: dict[str, str]
    missing: dict[str, str]
    machine: dict[str, Any]
    backends: list[str] = field(default_factory=list[str])
    devices: list[str] = field(default_factory=list[str])
    checks: list[Check] = field(default_factory=list[Check])
    surroundings: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def ok(self) -> bool:
        """Whether everything that is needed works."""
        return all(check.ok for check in self.checks)


def _option(text: str, metavar: str) -> Any:
    return tyro.conf.arg(help=text, metavar=metavar, help_behavior_hint="")


def doctor(
    *,
    json: Annotated[bool, tyro.conf.arg(help="print the findings as JSON"), tyro.conf.FlagCreatePairsOff] = False,
    calibrate: Annotated[
        bool, tyro.conf.arg(help="measure what this machine does in a second, for forecasts of time"), tyro.conf.FlagCreatePairsOff
    ] = False,
    ranks: Annotated[str | None, _option("with --calibrate: processes at once (default: one a device, two on a CPU)", "N")] = None,
    path: Annotated[Path | None, _option("with --calibrate: a folder on the disk of offload (default: the current one)", "FOLDER")] = None,
    output: Annotated[Path | None, _option("with --calibrate: the document (default: in the user's cache)", "FILE")] = None,
) -> int:
    """Versions, devices, a real gather and reduction between two ranks, what is missing and how to get it; with --calibrate, rates."""
    for name, given in (("--ranks", ranks), ("--path", path), ("--output", output)):
        if given is not None and not calibrate:
            raise ConfigError(f"{name} {given}: allowed is it with --calibrate; add that")
    findings = examine()
    machine = calibration.known()
    if calibrate and findings.ok:
        machine = calibration.calibrate(ranks=ranks, output=output, path=path)
    findings.surroundings.update(calibration.surroundings(machine))
    if json:
        print(jsonlib.dumps({**asdict(findings), "ok": findings.ok}, indent=2))
    else:
        _show(findings)
    return 0 if findings.ok else 1


def examine() -> Findings:
    """Looks at this machine, and lets two ranks on it talk."""
    versions, missing = {"python": platform.python_version(), "shardbook": __version__}, dict[str, str]()
    for package, remedy in _PACKAGES.items():
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            missing[package] = remedy
    findings = Findings(versions=versions, missing=missing, machine=_machine())
    for package in _NEEDED:
        # An installation may be there and broken, or importable without metadata: what counts is whether it is found.
        here = find_spec(package) is not None
        findings.checks.append(
            Check(name=package, ok=here, found=versions.get(package, "not here"), remedy="" if here else _PACKAGES[package])
        )
    if findings.ok:
        _look_with_torch(findings)
    return findings


def _look_with_torch(findings: Findings) -> None:
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        findings.checks.append(Check(name="import torch", ok=False, found=str(error), remedy="install torch again: " + _PACKAGES["torch"]))
        return
    if not dist.is_available():
        remedy = "install a build of torch with torch.distributed"
        findings.checks.append(Check(name="torch.distributed", ok=False, found="not in this build of torch", remedy=remedy))
        return
    findings.backends.extend(name for name, here in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available())) if here)
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        facts = torch.cuda.get_device_properties(index)
        findings.devices.append(f"cuda:{index} {facts.name}, {facts.total_memory:,} bytes ({facts.total_memory / 2**30:.1f} GiB)")
    findings.devices.append("cpu")
    findings.checks.append(_round_trip())


def _round_trip() -> Check:
    """A gather and a reduction between two processes over gloo, values checked."""
    from shardbook.train.launch import launch

    name = "gather and reduction between two ranks"
    try:
        rates = launch({"task": "probe"}, ranks=2)
    except (ShardbookError, OSError) as error:
        remedy = "see whether a firewall guards the loopback, or set GLOO_SOCKET_IFNAME to another interface"
        return Check(name=name, ok=False, found=str(error), remedy=remedy)
    found = f"values right over gloo; gather {rates['gather_gb_s']:.2f} GB/s, reduction {rates['reduce_gb_s']:.2f} GB/s sent by a rank"
    return Check(name=name, ok=True, found=found)


def _machine() -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    total, available = _memory_nbytes()
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": cores,
        "memory_nbytes": total,
        "available_nbytes": available,
    }


def _memory_nbytes() -> tuple[int | None, int | None]:
    """Total and available memory of the machine; ``None`` where the system doesn't tell."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemTotal"].split()[0]) * 1024, int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return (os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if sys.platform != "win32" else None), None


def _show(findings: Findings) -> None:
    console = Console(highlight=False, soft_wrap=True)
    table = Table(show_header=False)
    for name, found in findings.versions.items():
        table.add_row(name, found)
    machine = findings.machine
    table.add_row("system", f"{machine['system']}, {machine['cores']} cores for this process")
    for name in ("memory", "available"):
        if (count := machine[f"{name}_nbytes"]) is not None:
            table.add_row(name, f"{count:,} bytes ({count / 2**30:.1f} GiB)")
    table.add_row("backends", ", ".join(findings.backends) or "none")
    table.add_row("devices", "\n".join(findings.devices) or "unknown without torch")
    for name, found in findings.surroundings.items():
        table.add_row(name, escape(found))
    console.print(table)
    for check in findings.checks:
        console.print(f"{'[green]ok[/]' if check.ok else '[red]no[/]'} [bold]{check.name}[/] {escape(check.found)}")
        if check.remedy:
            console.print(f"   {escape(check.remedy)}")
    for package, remedy in findings.missing.items():
        if package not in _NEEDED:
            console.print(f"[yellow]missing[/] [bold]{package}[/] {escape(remedy)}")
