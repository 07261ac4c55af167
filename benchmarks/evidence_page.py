"""What pages of evidence have in common: the promises above the sections, tests whose outcome is one, and the command line of parts."""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping, Sequence
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


def page(name: str, sections: Sequence[Section], seconds: float) -> str:
    """Markdown: what ``make evidence-NAME`` found."""
    promises = [promise for section in sections for promise in section.promises]
    lines = [f"# Evidence: {name}", ""]
    lines += prose(
        f"Written by `make evidence-{name}` in {seconds / 60:.1f} minutes on {os.cpu_count()} cores with torch {torch.__version__}; a rank",
        "has one intra-op thread, and ranks are processes on gloo.",
    )
    lines += [*(f"* {'holds' if holds else '**FAILS**'}: {statement}" for statement, holds in promises), ""]
    for section in sections:
        lines += [f"## {section.title}", "", *section.text]
    return "\n".join(lines).rstrip() + "\n"


def run(name: str, about: str | None, parts: Mapping[str, Callable[[], Section]]) -> int:
    """The command: all parts, written to docs/evidence, or some of them, printed; 1 where a promise doesn't hold."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(parts), help="only these, printed and not written")
    chosen = parser.parse_args().parts
    torch.set_num_threads(1)
    began = time.monotonic()
    sections: list[Section] = []
    try:
        for part in chosen or parts:
            sections.append(parts[part]())
            said = [f"  {'holds' if holds else 'FAILS'}: {statement}" for statement, holds in sections[-1].promises]
            print("\n".join([f"{part}: {time.monotonic() - began:.0f} s so far", *said]), file=sys.stderr, flush=True)
    finally:
        ranks.stop_all()
    text = page(name, sections, time.monotonic() - began)
    if not chosen:
        write(text, ROOT / "docs" / "evidence" / f"{name}.md")
    print(text)
    return 0 if all(holds for section in sections for _, holds in section.promises) else 1
