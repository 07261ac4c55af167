"""A verdict for people: on the terminal and as a page that a browser without a network shows."""

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from shardbook.report.verdict_console import show
from shardbook.report.verdict_words import chosen, detail_rows, grid_rows, headline, where
from shardbook.verifying.explanations import EXPLANATIONS
from shardbook.verifying.verdict import RULES, PhaseResult, Verdict
from tests.verdict_samples import EVIDENCE, different, identical, within

EVIL = "<script>alert(1)</script>[bold]\"'&"


def printed(verdict, width=120):
    console = Console(file=io.StringIO(), width=width, highlight=False)
    show(verdict, console)
    return console.file.getvalue()


def flat(text):
    return re.sub(r"[\s│┃]+", " ", text)


def test_every_rule_is_explained_in_its_order():
    assert tuple(EXPLANATIONS) == RULES
    for about in EXPLANATIONS.values():
        for words in (about.explanation, about.cause, about.mend, about.shows):
            assert words.endswith(".")
            assert words[0].isupper() or words[0] == "`"
    assert len({about.title for about in EXPLANATIONS.values()}) == len(RULES)


@pytest.mark.parametrize(
    ("verdict", "line", "place"),
    [
        (identical(), "identical: 3 steps, every bit", ""),
        (within(), "within rounding: 3 steps, no deviation beyond its bound",
         "farthest at step 3, update, head.weight: deviation 3e-08, bound 2.1e-07 (14% of the bound)"),
        (different(), "different: a mean of means (weight.mean_of_means)",
         "first at step 2, backward, head.weight, rank 1: deviation 0.183, bound 2.1e-07 (871,429 times the bound)"),
        (different(rule="unknown", step=0, phase="state", rank=None, bound=0.0), "different: no rule explains it",
         "first at the start, state, head.weight: deviation 0.183, bound 0"),
        (different(deviation=float("nan")), "different: a mean of means (weight.mean_of_means)",
         "first at step 2, backward, head.weight, rank 1: deviation not finite, bound 2.1e-07"),
    ],
)  # fmt: skip
def test_the_verdict_in_a_line_and_where_they_part(verdict, line, place):
    assert (headline(verdict), where(verdict)) == (line, place)


def test_the_terminal_says_rule_evidence_and_mend():
    text = flat(printed(different()))
    assert EVIDENCE in text
    assert f"mend: {EXPLANATIONS['weight.mean_of_means'].mend}" in text
    assert "97%" in text
    assert "decay.twice" not in text  # three are enough
    assert "note: the candidate's kernels are not deterministic" in text
    assert "candidate: plain, 1 rank, a.rec" in text
    assert "bounds: the baseline, run again in 3 orders of summation" in text


def test_losses_stand_side_by_side_where_they_begin_part_and_end():
    text = printed(different(num_steps=40, at=9)).split("losses")[1].split("deviation by")[0]
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    assert [row[0] for row in rows] == ["1", "2", "3", "4", "8", "9", "10", "40"]
    assert rows[-1] == ["40", "0.15", "0.05", "+0.1"]
    assert rows[0] == ["1", "2", "2", "="]


def test_a_grid_marks_same_bits_and_what_is_beyond_its_bound():
    phases, rows = grid_rows(different(num_steps=3))
    assert phases == ["data", "forward", "backward", "reduce", "clip", "update", "state"]
    text = printed(different(num_steps=3))
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.count("│") == 9]
    assert cells == [["1", *"======="], ["2", "=", "=", *["0.183 !"] * 5], ["3", "=", *["0.183 !"] * 6]]
    assert [name for name, _ in rows] == ["1", "2", "3"]
    assert printed(within()).count("!") == 1  # in the key
    same = [line for line in printed(identical()).splitlines() if line.count("│") == 9]
    assert [line.count(" = ") for line in same] == [7, 7, 7]


def test_the_worst_of_a_phase_is_the_one_shown():
    ones = (
        PhaseResult(step=1, phase="update", parameter="large", deviation=1e-3, bound=1e-2, same_bits=False),
        PhaseResult(step=1, phase="update", parameter="beyond", deviation=1e-5, bound=1e-6, same_bits=False),
        PhaseResult(step=1, phase="update", parameter="same"),
    )
    for order in (ones, ones[::-1]):
        _, rows = detail_rows(Verdict(kind="different", phases=order))
        assert [row[:5] for row in rows] == [("update", "1e-05 !", "1e-06", "10 times", "beyond")]


def test_details_are_of_the_step_in_question():
    assert detail_rows(different(at=7))[0] == "step 7"
    assert detail_rows(within())[0] == "step 3"
    assert detail_rows(identical()) == ("", [])
    assert detail_rows(Verdict(kind="identical")) == ("", [])
    assert [row[1] for row in detail_rows(different(at=7))[1]] == ["same bits", "same bits", *["0.183 !"] * 5]


@pytest.mark.parametrize("count", [1, 2, 7, 1000])
def test_a_few_steps_stand_for_many(count):
    for centre in (None, 1, count // 2, count):
        found = chosen(range(1, count + 1), centre)
        assert found == sorted(found)
        assert len(found) == min(count, 8)
        assert {1, count} <= set(found)
        assert centre in (None, 0) or centre in found


@pytest.mark.parametrize("width", [80, 200])
def test_it_fits_the_terminal(width):
    for verdict in (identical(), within(), different()):
        assert max(map(len, printed(verdict, width).splitlines())) <= width


def test_brackets_of_a_name_are_no_markup():
    verdict = different(parameter=EVIL, notes=(EVIL,), candidate=EVIL, ranking=(("unknown", 0.5, EVIL),))
    verdict = replace(verdict, phases=tuple(replace(one, parameter=EVIL) for one in verdict.phases))
    assert printed(verdict, 250).count("[bold]") >= 5


# ---- the page -----------------------------------------------------------------------------------------------------------

pytest.importorskip("altair", reason="the page's pictures need the extra: pip install 'shardbook[report]'")
pytest.importorskip("vl_convert", reason="the page's pictures need the extra: pip install 'shardbook[report]'")

from shardbook.report.verdict_page import page  # noqa: E402
from tests.test_report_page import CHROMIUM, FLAGS, SHOWN, SMALLEST_TEXT, Reader, titles  # noqa: E402


@pytest.fixture(scope="module")
def whole():
    return page(different())


def test_every_part_is_there_and_well_formed(whole):
    found = Reader(whole)
    assert found.open == []
    assert titles(whole) == ["What explains it", "Losses", "Deviation against bound", "Notes"]
    assert "different: a mean of means (weight.mean_of_means)" in whole
    assert EXPLANATIONS["weight.mean_of_means"].mend in whole
    pictures = [attributes for tag, attributes in found.found if attributes.get("role") == "img"]
    assert len(pictures) == 7  # losses, and the six phases that deviate
    assert all(len(attributes["aria-label"]) > 30 for attributes in pictures)
    assert len(whole) < 400_000


def test_nothing_comes_from_elsewhere_and_nothing_runs(whole):
    found = Reader(whole).found
    assert {"script", "img", "iframe", "object", "embed", "base", "form", "use", "image"} & {tag for tag, _ in found} == set()
    assert [value for _, attributes in found for name, value in attributes.items() if name in ("href", "src", "xlink:href")] == ["data:,"]
    assert "url(" not in whole


def test_what_a_verdict_says_stays_text():
    verdict = different(
        num_steps=3, parameter=EVIL, notes=(EVIL,), candidate=EVIL, baseline=EVIL, bound_origin=EVIL, ranking=(("unknown", 0.5, EVIL),)
    )
    text = page(replace(verdict, phases=tuple(replace(one, parameter=EVIL) for one in verdict.phases)))
    found = Reader(text)
    assert found.open == []
    assert "script" not in {tag for tag, _ in found.found}
    assert text.count("&lt;script&gt;alert(1)") >= 6


@pytest.mark.parametrize(
    ("verdict", "expected", "num_pictures"),
    [
        (identical(), ["Losses", "Deviation against bound"], 1),
        (within(), ["Losses", "Deviation against bound"], 8),
        (Verdict(kind="different", losses=((1, None, 2.0), (2, float("nan"), 1.0))), ["Losses"], 1),
        (Verdict(kind="different", losses=((1, None, None),)), [], 0),
        (Verdict(kind="different", phases=(PhaseResult(step=1, phase="update", deviation=float("inf"), same_bits=False),)),
         ["Deviation against bound"], 0),
    ],
)  # fmt: skip
def test_a_page_of_less_holds_what_there_is(verdict, expected, num_pictures):
    text = page(verdict)
    assert Reader(text).open == []
    assert titles(text) == expected
    assert text.count('role="img"') == num_pictures


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright comes with the dev extra")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield opened
        opened.close()


@pytest.mark.parametrize(("width", "scheme"), [pytest.param(1280, "light", marks=pytest.mark.full), (390, "dark")])
def test_a_browser_without_a_network_shows_it(browser, whole, tmp_path, width, scheme):
    path = tmp_path / "verdict.html"
    path.write_text(whole, encoding="utf-8")
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    context.set_offline(True)
    tab = context.new_page()
    requests, complaints = [], []
    tab.on("request", lambda request: requests.append(request.url))
    tab.on("console", lambda message: complaints.append(message.text))
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.goto(path.as_uri())
    assert (requests, complaints) == ([path.as_uri()], [])
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.evaluate(SHOWN) == [1] * 7
    assert tab.evaluate(SMALLEST_TEXT) >= 10
    paper = {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 28)"}[scheme]
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == paper
    context.close()
