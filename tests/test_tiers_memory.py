"""What the host's memory has left, read from files as a machine and a container show them; and memory that stays with the process."""

import subprocess
import sys
from pathlib import Path

import pytest

from shardbook.tiers.memory import available_nbytes

MIB = 1 << 20


def machine(root: Path, *, available: int = 1000, groups: str = "", files: dict[str, str] | None = None) -> Path:
    written = {"proc/meminfo": f"MemTotal: 9999999 kB\nMemAvailable: {available * 1024} kB\n", "proc/self/cgroup": groups, **(files or {})}
    for name, text in written.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def group(folder: str, limit: object, used: int, cache: int = 0) -> dict[str, str]:
    base = f"sys/fs/cgroup/{folder}"
    return {
        f"{base}memory.max": f"{limit}\n", f"{base}memory.current": f"{used * MIB}\n",
        f"{base}memory.stat": f"active_file 7\ninactive_file {cache * MIB}\n",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("groups", "files", "mib"),
    [
        ("", {}, 1000),
        ("0::/\n", group("", 600 * MIB, 200), 400),
        ("0::/\n", group("", 600 * MIB, 200, cache=50), 450),
        ("0::/\n", group("", "max", 200), 1000),
        ("0::/\n", group("", 5000 * MIB, 200), 1000),
        ("0::/\n", group("", 600 * MIB, 700), 0),
        ("0::/a/b\n", {**group("a/b/", "max", 1), **group("a/", 300 * MIB, 100)}, 200),
        ("0::/not/seen/here\n", group("", 600 * MIB, 200), 400),
        (
            "5:cpu:/\n4:memory:/x\n",
            {
                "sys/fs/cgroup/memory/x/memory.limit_in_bytes": f"{500 * MIB}",
                "sys/fs/cgroup/memory/x/memory.usage_in_bytes": f"{100 * MIB}",
                "sys/fs/cgroup/memory/x/memory.stat": f"total_inactive_file {20 * MIB}",
            },
            420,
        ),
    ],
)
def test_the_least_of_machine_and_groups(tmp_path: Path, groups: str, files: dict[str, str], mib: int) -> None:
    assert available_nbytes(machine(tmp_path, groups=groups, files=files)) == mib * MIB


def test_where_the_system_does_not_say(tmp_path: Path) -> None:
    assert available_nbytes(tmp_path) is None


CODE = """
import ctypes, sys
from shardbook.tiers.memory import keep_freed_memory
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
kept = keep_freed_memory() if sys.argv[1] == "on" else False
before = resident()
block = libc.malloc(24 << 20)
ctypes.memset(block, 1, 24 << 20)
libc.free(block)
print(kept, resident() - before > 20 << 20)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc, and glibc's allocator")
def test_freed_memory_stays() -> None:
    found = {
        how: subprocess.run([sys.executable, "-c", CODE, how], check=True, capture_output=True, text=True).stdout.split()
        for how in ("on", "off")
    }
    assert found == {"on": ["True", "True"], "off": ["False", "False"]}


BUILT = """
import sys, torch
from shardbook.tiers.memory import keep_freed_memory, map_large_blocks
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
if sys.argv[1] == "on":
    map_large_blocks()
else:
    keep_freed_memory()
before, kept = resident(), []
for _ in range(16):
    brief, stays, longer = torch.ones(1 << 20), torch.ones(1 << 20), torch.ones(1 << 21)
    kept.append(stays)
    del brief, longer
print(resident() - before < 1.3 * 16 * (4 << 20))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc, and glibc's allocator")
def test_blocks_of_their_own_leave_no_holes() -> None:
    found = {
        how: subprocess.run([sys.executable, "-c", BUILT, how], check=True, capture_output=True, text=True).stdout.strip()
        for how in ("on", "off")
    }
    assert found == {"on": "True", "off": "False"}
