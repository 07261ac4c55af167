"""The page: self-contained, escaped, and looked at by a browser whose network is cut."""

import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser

import pytest

pytest.importorskip("altair", reason="the page's pictures need the extra: pip install 'shardbook[report]'")
pytest.importorskip("vl_convert", reason="the page's pictures need the extra: pip install 'shardbook[report]'")

from shardbook.cli import main
from shardbook.report.html import page
from shardbook.report.words import COUNTERS
from tests.report_documents import MIB, bare, full, light, reconciliation

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# Of each picture, how many of its drawings are on the page with a size, and inside of it.
SHOWN = """
[...document.querySelectorAll('.picture')].map(picture => [...picture.querySelectorAll('svg')].map(svg => svg.getBoundingClientRect())
  .filter(box => box.width > 250 && box.height > 50 && box.right <= innerWidth).length)
"""
# Pixels of the smallest text in a picture, after the browser has scaled it.
SMALLEST_TEXT = """
Math.min(...[...document.querySelectorAll('svg text')].filter(text => text.textContent && text.getClientRects().length).map(text => {
  const svg = text.ownerSVGElement
  return parseFloat(getComputedStyle(text).fontSize) * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width
}))
"""
EVIL = "<script>alert(1)</script>\"'&"


class Reader(HTMLParser):
    """Every element's name and attributes, and whether what is opened is closed."""

    void = ("meta", "link", "br")

    def __init__(self, text):
        super().__init__()
        self.found, self.open = [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def compared():
    other = replace(full(), reconciliations=(reconciliation(0, allocated=373 * MIB),), shortage=None)
    return page(full(), "run.json", other, "other.json")


@pytest.fixture(scope="module")
def whole():
    return page(full(), "run.json")


def titles(text):
    return re.findall(r"<h2>(.*?)</h2>", text)


def test_every_part_is_there_and_well_formed(compared):
    found = Reader(compared)
    assert found.open == []
    assert titles(compared) == [
        "Out of memory", "Two runs compared", "Reconciliation at the peak", "Memory over one step", "First step and later ones",
        "Largest items at the peak", "Exposed time by unit and cause", "Step time and its floor", "Counters", "Settings and versions",
        "Notes",
    ]  # fmt: skip
    assert all(definition in compared for definition in COUNTERS.values() if "'" not in definition)
    pictures = [attributes for tag, attributes in found.found if attributes.get("role") == "img"]
    assert len(pictures) == 8
    assert all(len(attributes["aria-label"]) > 30 for attributes in pictures)
    assert sum(tag == "svg" for tag, _ in found.found) == 16
    assert len(compared) < 1_500_000


def test_nothing_comes_from_elsewhere_and_nothing_runs(compared):
    found = Reader(compared).found
    assert {"script", "img", "iframe", "object", "embed", "base", "form", "use", "image"} & {tag for tag, _ in found} == set()
    assert [value for _, attributes in found for name, value in attributes.items() if name in ("href", "src", "xlink:href")] == ["data:,"]
    assert [name for _, attributes in found for name in attributes if name.startswith("on")] == []
    assert "url(" not in compared
    assert "@import" not in compared
    assert [attributes["id"] for _, attributes in found if "id" in attributes] == []  # two pictures could share one
    policy = next(attributes["content"] for tag, attributes in found if attributes.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")


def test_what_a_document_says_stays_text():
    item = replace(reconciliation(0).items[0], name=EVIL, site=EVIL, unit=EVIL, dtype=EVIL, phase=EVIL)
    waiting = tuple(replace(one, unit=EVIL, kind=EVIL, cause=EVIL) for one in full().exposed[:2])
    curves = tuple(replace(one, spans=((EVIL, EVIL, 0.0, 0.18),)) for one in full().curves[:1])
    document = full(
        reconciliations=(reconciliation(0, items=(item,), unit=EVIL, phase=EVIL, operator=EVIL, books={EVIL: 433 * MIB}),),
        exposed=waiting, curves=curves, notes=(EVIL,), engine=EVIL, data=EVIL, convention=EVIL, allocator=EVIL,
        settings={EVIL: {"value": EVIL, "origin": EVIL}}, versions={EVIL: EVIL}, shortage=replace(full().shortage, unit=EVIL),
    )  # fmt: skip
    text = page(document, EVIL, document, EVIL)
    found = Reader(text)
    assert found.open == []
    assert "script" not in {tag for tag, _ in found.found}
    assert "&lt;script&gt;alert(1)" in text
    assert [name for _, attributes in found.found for name in attributes if not re.fullmatch(r"[\w:-]+", name)] == []


@pytest.mark.parametrize("make", [light, bare])
def test_a_page_of_little_holds_what_there_is(make):
    text = page(make(), "run.json")
    assert Reader(text).open == []
    assert "No books were kept" in text
    assert "Largest items at the peak" not in text
    assert ("Counters" in titles(text)) is (make is light)


def test_the_command_writes_the_page_whole(tmp_path, capsys):
    run, target = tmp_path / "run.json", tmp_path / "new" / "report.html"
    run.write_text(light().to_json())
    assert main.run(["report", str(run), "--html", str(target)]) == 0
    assert target.read_text().endswith("</html>\n")
    assert [path.name for path in target.parent.iterdir()] == ["report.html"]
    assert str(target) in capsys.readouterr().err
    blocked = run / "report.html"
    assert main.run(["report", str(run), "--html", str(blocked)]) == 2
    assert f"--html {blocked}: can't be written" in capsys.readouterr().err


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright comes with the dev extra")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield opened
        opened.close()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_without_a_network_shows_it(browser, compared, tmp_path, width, scheme):
    path = tmp_path / "report.html"
    path.write_text(compared, encoding="utf-8")
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    context.set_offline(True)
    tab = context.new_page()
    requests, complaints = [], []
    tab.on("request", lambda request: requests.append(request.url))
    tab.on("console", lambda message: complaints.append(message.text))
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.goto(path.as_uri())
    assert requests == [path.as_uri()]
    assert complaints == []
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    boxes = tab.evaluate(SHOWN)
    assert boxes == [1] * 8  # of the two drawings of each picture, the one for this width
    paper = {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 28)"}[scheme]
    ink = {"light": "rgb(27, 31, 36)", "dark": "rgb(232, 235, 239)"}[scheme]
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == paper
    texts = tab.evaluate("[...new Set([...document.querySelectorAll('svg text')].map(t => getComputedStyle(t).fill))]")
    assert texts == [ink]
    smallest = tab.evaluate(SMALLEST_TEXT)
    assert smallest >= 10
    context.close()
