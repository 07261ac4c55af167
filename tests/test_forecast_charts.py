"""Pictures of forecasts: what is drawn, what the files are, and what is said where they can't be written."""

import re
import xml.etree.ElementTree as ElementTree
from importlib.util import find_spec
from itertools import pairwise

import pytest

pytest.importorskip("altair", reason="pictures need the extra: pip install 'shardbook[report]'")
pytest.importorskip("vl_convert", reason="pictures need the extra: pip install 'shardbook[report]'")

from shardbook.errors import ConfigError
from shardbook.forecasting.result import NOT_A_PEAK
from shardbook.report import forecast_files
from shardbook.report.charts import NARROW, WIDE
from shardbook.report.colours import NEUTRAL, account_colour
from shardbook.report.forecast_charts import caption, description, legend, stacks, standalone
from shardbook.report.forecast_figures import ABOVE, Case
from shardbook.report.forecast_files import check, save
from tests.forecast_samples import GB, GIB, PEAK, on_device, peaked, persistent
from tests.test_report_page import Reader

CASES = [
    Case(label="stage 0", forecast=None, why="no such stage"),
    *(Case(label=f"stage {stage}", forecast=on_device(stage=stage)) for stage in (1, 2, 3)),
]
PNG = b"\x89PNG\r\n\x1a\n"


def boxes(svg, colour):
    """Left and right end of every box of a colour, in the picture's own pixels."""
    drawn = re.findall(r'<path[^>]*d="M([\d.]+),[\d.]+h([\d.]+)[^"]*"[^>]*fill="' + re.escape(colour), svg)
    return [(float(begin), float(begin) + float(length)) for begin, length in drawn]


def names(svg):
    return re.findall(r"<text[^>]*>([^<]+)</text>", svg)


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_every_account_is_drawn_once_for_each_case_in_proportion(width):
    svg = stacks(CASES, 24 * GIB)(width)
    drawn = {account: boxes(svg, account_colour(account)) for account in PEAK}
    assert {account: len(found) for account, found in drawn.items()} == dict.fromkeys(PEAK, 3)
    (begin, end), (_, left) = drawn["ACTIVATION"][0], drawn["PARAM"][0]
    assert (end - begin) / (left - drawn["PARAM"][0][0]) == pytest.approx(3, rel=0.02)
    assert len(boxes(svg, NEUTRAL)) == 3
    assert {"stage 1", "stage 2", "stage 3", "GB per rank"} <= set(names(svg))
    assert "stage 0" not in names(svg)


def test_accounts_lie_in_their_order():
    svg = stacks(CASES[:2])(WIDE)
    ends = [boxes(svg, account_colour(account))[0] for account in PEAK]
    assert ends == sorted(ends)
    assert all(end == pytest.approx(begin, abs=0.02) for (_, end), (begin, _) in pairwise(ends))


def test_the_limit_is_in_the_picture_even_where_it_is_far_away():
    few = set(names(stacks(CASES)(WIDE)))
    many = set(names(stacks(CASES, 80 * GB)(WIDE)))
    assert "80" not in few
    assert "80" in many


def test_nothing_to_draw_is_an_empty_picture():
    assert "<svg" in stacks([])(WIDE)


def test_legend_caption_and_description_say_what_is_drawn():
    assert list(legend(CASES)) == [*PEAK, ABOVE]
    assert caption(on_device()) == "Live bytes at the peak of a step, by account. The line across is test-card's 25.8 GB (24.0 GiB)."
    assert NOT_A_PEAK in caption(persistent())
    assert description(CASES[:2]) == "stage 1: 24.3 GB (22.6 GiB)"


def test_an_svg_stands_alone():
    text = standalone(on_device(), CASES, "a < b & c")
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    width, height = float(root.get("width")), float(root.get("height"))
    assert root.get("viewBox") == f"0 0 {width:g} {height:g}"
    assert "currentColor" not in text
    assert "var(" not in text
    assert not re.search(r"href|url\(|<script|<image", text)
    inside = root.find("{http://www.w3.org/2000/svg}svg")
    assert float(inside.get("y")) + float(inside.get("height")) < height
    assert float(inside.get("x")) + float(inside.get("width")) <= width
    words = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a < b & c", *PEAK, ABOVE} <= set(words)


@pytest.mark.parametrize("kind", ["svg", "png", "html"])
def test_files_are_written_whole_and_into_new_folders(tmp_path, kind):
    path = tmp_path / "new" / f"chart.{kind}"
    save(path, on_device(), CASES, "stage")
    content = path.read_bytes()
    start = {"svg": b"<svg", "png": PNG, "html": b"<!DOCTYPE html>"}[kind]
    assert content.startswith(start)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    save(path, peaked(), CASES, "stage")
    assert path.read_bytes() != content


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "chart.svg"
    path.write_text("old")
    monkeypatch.setattr("os.fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(ConfigError, match="can't be written \\(No space left on device\\)"):
        save(path, on_device(), CASES, "stage")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("chart.svg", "old")]


def test_the_page_is_whole_and_escaped_and_asks_for_nothing(tmp_path):
    evil = "<script>alert(1)</script>"
    path = tmp_path / "page.html"
    save(path, on_device(model=evil, source=evil, not_modelled=(evil,), warnings=(evil,)), CASES, "stage")
    text = path.read_text()
    reader = Reader(text)
    assert reader.open == []
    assert not [tag for tag, _ in reader.found if tag in ("script", "img", "iframe", "object")]
    assert not [attributes for _, attributes in reader.found if attributes.get("src") or str(attributes.get("href", "data:,")) != "data:,"]
    for words in (
        "too close to call",
        "next lever: recompute each unit",
        "not validated",
        "2 bytes x 2e9",
        "no such stage",
        "weights alone",
    ):
        assert words in text


@pytest.mark.parametrize(
    ("name", "said"), [("chart.gif", "ends in .svg, .png, .html"), ("chart", "ends in"), ("folder.svg", "is a folder")]
)
def test_other_files_are_refused_before_anything_is_computed(tmp_path, name, said):
    (tmp_path / "folder.svg").mkdir()
    with pytest.raises(ConfigError) as caught:
        check(tmp_path / name)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_the_extra_it_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr(forecast_files, "find_spec", lambda name: None if name == "altair" else find_spec(name))
    with pytest.raises(ConfigError) as caught:
        check(tmp_path / "chart.svg")
    assert str(caught.value) == "--save needs altair, which is not here: pip install 'shardbook[report]'"
