"""What pages of evidence have in common: the promises above the sections, tests whose outcome is one, and the command line of parts."""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path

import torch

from benchmarks.evidence_engine import Section, prose, write
from tests import ranks

ROOT = Path(__file__).parents[1]


def tested(path: Path) -> tuple[int, list[str]]:
    """(passed, names of those that failed) of a file of tests, those of the full suite too."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "full or not full", f"--junitxml={report}", str(path)]
        subprocess.run(command, check=False, cwd=ROOT, stdout=subprocess.DEVNULL)
        cases = list(ET.parse(report).iter("testcase"))
    failed = [case.get("name", "") for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return len(cases) - len(failed) - skipped, failed


def page(name: str, blocks: Mapping[str, str]) -> str:
    """Markdown: what ``make evidence-NAME`` found, a block for each section, by its title."""
    head = prose(
        f"Written by `make evidence-{name}` on {os.cpu_count()} cores with torch {torch.__version__}; a rank has one intra-op thread, and",
        f"ranks are processes on gloo. `python -m benchmarks.evidence_{name} --write --parts PART` takes one of its sections again.",
    )
    return "\n".join([f"# Evidence: {name}", "", *head, *blocks.values()]).rstrip() + "\n"


def block(section: Section, seconds: float) -> str:
    """One section: when and how long it was taken, its promises, its figures."""
    taken = f"Taken on {date.today().isoformat()} in {seconds / 60:.1f} minutes."
    promises = [f"* {'holds' if holds else '**FAILS**'}: {statement}" for statement, holds in section.promises]
    return "\n".join([f"## {section.title}", "", taken, "", *promises, "", *section.text]).rstrip() + "\n"


def blocks_of(text: str) -> dict[str, str]:
    """The sections of a page.

    >>> blocks_of("# Evidence: x\\n\\n## One\\n\\n1\\n\\n## Two\\n\\n2\\n")
    {'One': '## One\\n\\n1\\n', 'Two': '## Two\\n\\n2\\n'}
    """
    found = [f"## {part.strip()}\n" for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]]
    return {one.splitlines()[0].removeprefix("## "): one for one in found}


def run(name: str, about: str | None, parts: Mapping[str, Callable[[], Section]]) -> int:
    """The command: all parts, written to docs/evidence, or some of them, printed; 1 where a promise doesn't hold."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(parts), help="only these, printed and not written")
    parser.add_argument("--write", action="store_true", help="put them in the place of those of the page")
    options = parser.parse_args()
    target = ROOT / "docs" / "evidence" / f"{name}.md"
    torch.set_num_threads(1)
    took: list[tuple[Section, float]] = []
    try:
        for part in options.parts or parts:
            began = time.monotonic()
            took.append((parts[part](), time.monotonic() - began))
            said = [f"  {'holds' if holds else 'FAILS'}: {statement}" for statement, holds in took[-1][0].promises]
            print("\n".join([f"{part}: {took[-1][1]:.0f} s", *said]), file=sys.stderr, flush=True)
    finally:
        ranks.stop_all()
    blocks = {section.title: block(section, seconds) for section, seconds in took}
    if not options.parts:
        write(page(name, blocks), target)
    elif options.write:
        write(page(name, blocks_of(target.read_text()) | blocks), target)
    print(page(name, blocks))
    return 0 if all(holds for section, _ in took for _, holds in section.promises) else 1
