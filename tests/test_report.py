"""``shardbook report``: what the terminal says, the figures behind it, and what is refused."""

import json
import subprocess
import sys
from dataclasses import fields, replace
from itertools import pairwise

import pytest
from rich.console import Console

from shardbook.cli import main, report
from shardbook.document import Counters, Curve, Exposed, RunDocument, StepTime
from shardbook.report.console import show, show_comparison
from shardbook.report.curve import instants, layers, phases, units
from shardbook.report.figures import compare, figures, waits
from shardbook.report.words import COUNTERS
from shardbook.tables.reconciliation import account_rows, reconciliation_table, totals
from tests.report_documents import ALLOCATED, BOOKS, MIB, UNITS, bare, curve, full, light, reconciliation


def said(document):
    console = Console(width=120, record=True, quiet=True, highlight=False)
    with console.capture() as caught:
        console.quiet = False
        show(document, "run.json", console)
    return caught.get()


def line_of(text, start):
    return next(line for line in text.splitlines() if start in line)


def test_books_stand_beside_formula_and_allocator():
    text = said(full())
    assert "books and allocator at the peak: rank 0, step 2, backward of layers.5, in aten::mm" in text
    cells = [cell.strip() for cell in line_of(text, "GATHERED").strip("│").split("│")]
    assert cells == ["GATHERED", "64.0 MiB", "48.0 MiB", "+16.0 MiB", "14.8%"]
    assert "417.0 MiB" in line_of(text, "total by books")
    assert "433.0 MiB" in line_of(text, "allocator  ")
    assert "16,777,216 bytes" in text
    assert "3.7%" in line_of(text, "16,777,216 bytes")
    assert "base: bytes that are older than the measurement" in text


def test_ranks_and_steps_are_named():
    text = said(full())
    assert "largest peak: rank 0, 0.454 GB = 0.423 GiB, backward of layers.5, in aten::mm" in text
    assert "smallest peak: rank 1, 0.437 GB = 0.407 GiB, forward of head, in aten::_log_softmax" in text
    assert "first step of rank 0 (step 1): 333.0 MiB" in text
    assert "+100.0 MiB against the first" in text


def test_ranks_that_peak_alike_are_one():
    text = said(full(reconciliations=(reconciliation(0), reconciliation(1))))
    assert "all 2 ranks peak at as many bytes" in text
    assert "smallest peak" not in text


def test_what_does_not_add_up_is_said_and_overstated_is_shown():
    assert dict(totals(reconciliation(0))) == {"total by books": 417 * MIB, "allocator": ALLOCATED, "  of it base": 40 * MIB}
    assert dict(totals(reconciliation(0, overstated=3 * MIB)))["overstated"] == 3 * MIB
    assert dict(totals(reconciliation(0, allocated=ALLOCATED + MIB)))["does not add up"] == MIB
    assert "does not add up" in said(full(reconciliations=(reconciliation(0, allocated=ALLOCATED - 5),)))


def test_accounts_come_in_one_order_with_whatever_either_witness_names():
    rows = account_rows(reconciliation(0, books={"COMM": 1, "NEW": 2, "UNACCOUNTED": 5}, closed_form={"PARAM": 3}))
    assert [(row.account, row.books, row.closed_form) for row in rows] == [("PARAM", None, 3), ("COMM", 1, None), ("NEW", 2, None)]


def test_counters_have_their_documents_names_and_say_where_there_is_none():
    assert list(COUNTERS) == [field.name for field in fields(Counters)]
    text = said(full())
    assert line_of(text, "reserved ").count("none on a CPU") == 2
    assert line_of(text, "resident ").count("MiB") == 2
    missing = said(full(counters=(Counters(),)))
    assert "not measured" in line_of(missing, "│ allocated ")


def test_items_name_shape_type_account_phase_and_site():
    text = said(full())
    assert "64.0 MiB │ ACTIVATION  │ aten::_log_softmax" in text
    assert "4 x 256 x 4096 float32" in text
    assert "model.py:88 in loss" in text
    assert "forward of head" in text


def test_time_and_waiting_largest_first():
    text = said(full())
    assert "74.00 ms (41.1%)" in line_of(text, "│ exposed ")
    assert "not measured" in line_of(said(full(times=(replace(full().times[0], floor=None),))), "│ floor")
    rows = [line for line in text.splitlines() if "│ gather │" in line or "│ reduce │" in line]
    assert "straggler rank 1" in rows[0]
    seconds = [wait.seconds for wait in waits(full())]
    assert seconds == sorted(seconds, reverse=True)
    first = waits(full())[0]
    assert (first.unit, first.rank, first.seconds, first.mean) == ("layers.3", 0, 0.02, 0.01)


def test_a_shortage_comes_with_levers_and_forecast():
    text = said(full())
    assert "out of memory on rank 1: step 3, forward of head" in text
    assert "asked for 67,108,864 bytes (64.0 MiB) more for ACTIVATION against a budget of 0.367 GB = 0.342 GiB" in text
    assert "+30.0 MiB" in text
    assert "zero.recompute = 'full'" in text
    assert "note: rank 1 was looked at for 2 of 3 steps" in text


def test_many_ranks_become_least_and_most():
    many = tuple(Counters(allocated=(rank + 1) * MIB) for rank in range(64))
    text = said(full(counters=many))
    assert "1.0 MiB, rank 0" in line_of(text, "│ allocated ")
    assert "64.0 MiB, rank 63" in line_of(text, "│ allocated ")
    assert line_of(text, "│ reserved ").count("none on a CPU") == 2


@pytest.mark.parametrize(("make", "words"), [(light, "454,033,408 bytes (433.0 MiB)"), (bare, "not measured")])
def test_a_document_without_books_says_so(make, words):
    text = said(make())
    assert "no books were kept" in text
    assert words in text
    assert "UNACCOUNTED" not in text


def test_books_without_a_reconciliation_are_shown_as_books():
    console = Console(width=120)
    with console.capture() as caught:
        console.print(reconciliation_table(full(reconciliations=())))
    assert "120.0 MiB" in line_of(caught.get(), "ACTIVATION")
    assert "the allocator was not held against the books" in caught.get()


def test_markup_in_a_name_stays_text():
    item = replace(reconciliation(0).items[0], name="[red]x[/red]", site="[bold]")
    text = said(full(reconciliations=(reconciliation(0, items=(item,), unit="[i]u"),)))
    assert "[red]x[/red]" in text
    assert "[i]u" in text


def shrunk():
    documents = full()
    smaller = tuple(
        replace(one, allocated=one.allocated - 60 * MIB, books={**one.books, "ACTIVATION": 60 * MIB}) for one in documents.reconciliations
    )
    settings = {"zero.stage": {"value": 2, "origin": "default"}, "zero.clip_grad_norm": {"value": None, "origin": "default"}}
    return replace(documents, reconciliations=smaller, exposed=documents.exposed[:-1], settings=settings)


def test_two_runs_differ_by_account_by_unit_and_in_what_was_set():
    found = compare(full(), shrunk())
    assert {one.name: one.difference for one in found.accounts if one.difference} == {"ACTIVATION": -60 * MIB}
    assert [(one.name, round(one.difference, 6)) for one in found.exposed if one.difference] == [("layers.3", -0.02)]
    assert found.settings == (("zero.stage", 3, 2),)
    assert found.totals[0].difference == -60 * MIB
    console = Console(width=100)
    with console.capture() as caught:
        show_comparison(full(), shrunk(), ("a.json", "b.json"), console)
    assert "-60.0 MiB" in line_of(caught.get(), "ACTIVATION")
    assert "-20.00 ms" in line_of(caught.get(), "layers.3")


def test_a_run_without_books_is_compared_by_what_it_has():
    found = compare(full(), bare())
    assert all(one.other is None and one.difference is None for one in found.accounts)
    console = Console(width=100)
    with console.capture() as caught:
        show_comparison(full(), bare(), ("a.json", "b.json"), console)
    assert "not measured" in line_of(caught.get(), "ACTIVATION")


def test_a_curve_made_small_keeps_its_peak_and_adds_up():
    found = curve(0)
    kept = instants(found, 200)
    assert len(kept) <= 204
    assert kept[0] == 0
    assert kept[-1] == len(found.seconds) - 1
    assert max(found.allocated[at] for at in kept) == max(found.allocated)
    stack = layers(found, kept)
    assert [account for account, _ in stack][:3] == ["MASTER", "MOMENT", "GRAD"]
    assert [top for _, _, top in stack[-1][1]] == [sum(values[at] for values in found.accounts.values()) for at in kept]
    assert all(below[2] == above[1] for (_, one), (_, two) in pairwise(stack) for below, above in zip(one, two, strict=True))


def test_phases_and_units_never_overlap():
    found = curve(0)
    assert [stretch.name for stretch in phases(found)] == ["forward", "backward", "step"]
    names = [stretch.name for stretch in units(found)]
    assert names == [*UNITS, *UNITS[-2::-1]]  # the head's two visits follow each other
    nested = Curve(rank=0, step=1, seconds=(0.0, 9.0), allocated=(1, 1), accounts={},
                   spans=(("forward", "a", 0, 5), ("gather", "b", 1, 2), ("forward", "b", 5, 9), ("forward", "c", 8, 9)))  # fmt: skip
    assert [(one.name, one.begin, one.end) for one in units(nested)] == [("a", 0, 5), ("b", 5, 9)]
    assert [(one.name, one.begin, one.end) for one in phases(nested)] == [("forward", 0, 9)]


def written(tmp_path, document, name="run.json"):
    path = tmp_path / name
    path.write_text(document.to_json())
    return path


def test_json_holds_the_figures(tmp_path, capsys):
    path = str(written(tmp_path, full()))
    assert main.run(["report", path, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(json.dumps(figures(full())))
    assert found["largest_peak"]["unaccounted"] == BOOKS["UNACCOUNTED"]
    assert found["largest_peak"]["unaccounted_share"] == BOOKS["UNACCOUNTED"] / ALLOCATED
    assert (found["largest_peak"]["rank"], found["smallest_peak"]["rank"]) == (0, 1)
    assert (found["steps"]["first"]["step"], found["steps"]["later"]["step"]) == (1, 2)
    other = str(written(tmp_path, shrunk(), "other.json"))
    assert main.run(["report", path, other, "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)["comparison"]
    assert compared["accounts"]["ACTIVATION"] == {"run": 120 * MIB, "other": 60 * MIB, "difference": -60 * MIB}


@pytest.mark.parametrize("make", [full, light, bare])
def test_the_terminal_takes_every_document(tmp_path, capsys, make):
    assert main.run(["report", str(written(tmp_path, make()))]) == 0
    assert "29,545,472 parameters" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "can't be read (No such file or directory)"),
        ("{", "not JSON, or cut off"),
        ("{}", 'it lacks "format"'),
        (full().to_json()[:-40], "cut off"),
        (full().to_json().replace('"version": 3', '"version": 1'), "run document of version 1"),
        (b"\xff\xfe\x00", "it is not text"),
    ],
)
def test_what_is_no_document_ends_with_2_and_the_path(tmp_path, capsys, text, words):
    path = tmp_path / "some.json"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert main.run(["report", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"shardbook: {path}: ")
    assert words in error
    assert error.count("\n") == 1


def test_without_the_extra_html_says_how_to_get_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    page = tmp_path / "page.html"
    assert main.run(["report", str(written(tmp_path, full())), "--html", str(page)]) == 1
    assert "needs altair and vl_convert" in (error := capsys.readouterr().err)
    assert "pip install 'shardbook[report]'" in error
    assert not page.exists()


def test_the_terminal_needs_neither_torch_nor_the_pictures(tmp_path):
    path = written(tmp_path, full())
    script = (
        "import sys\nfrom shardbook.cli.main import run\n"
        f"code = run(['report', {str(path)!r}, '--json'])\n"
        "print(sorted({'torch', 'altair', 'vl_convert', 'numpy'} & set(sys.modules)), file=sys.stderr)\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == "[]\n"
    assert json.loads(done.stdout)["engine"] == "shardbook stage 3"


def test_one_rank_one_step_and_nobody_waiting():
    document = full(
        reconciliations=(reconciliation(0),), steps=full().steps[:1], exposed=(),
        times=(StepTime(rank=0, num_steps=1, seconds=0.1, compute=0.1, exposed=0.0, communication=0.0, floor=None, bandwidth=None,
                        sent_nbytes=0),),
    )  # fmt: skip
    text = said(document)
    assert "smallest peak" not in text
    assert "later steps" not in text
    assert waits(document) == []


def test_waiting_is_added_up_by_unit_kind_cause_and_culprit():
    one = Exposed(rank=0, unit="u", kind="gather", cause="bandwidth", culprit=None, seconds=0.25)
    (found,) = waits(full(exposed=(one, one), times=()))
    assert (found.seconds, found.mean) == (0.5, 0.5)
    assert isinstance(RunDocument.from_json(full(exposed=(one,)).to_json()), RunDocument)
