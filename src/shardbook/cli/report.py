"""``shardbook report``: what a run.json says, on the terminal, as a page, or beside another one's."""

import json as jsonlib
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from shardbook.document import RunDocument, write_atomically
from shardbook.errors import ConfigError
from shardbook.report.console import show, show_comparison
from shardbook.report.figures import compare, comparison_figures, figures

NO_PICTURES = "--html needs {missing}, which is not here: pip install 'shardbook[report]'"

_Run = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN.JSON", help="a run's document")]
_Other = Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="OTHER.JSON", help="a second one, to compare with the first")]
_Html = Annotated[Path | None, tyro.conf.arg(metavar="PAGE.HTML", help="write one self-contained page instead")]
_Json = Annotated[bool, tyro.conf.arg(help="print the main figures as JSON"), tyro.conf.FlagCreatePairsOff]


def report(run: _Run, other: _Other = None, /, *, html: _Html = None, json: _Json = False) -> int:
    """What a run's document says: memory account by account, the largest items, where the time went; or two runs compared."""
    document = read_document(run)
    second = None if other is None else read_document(other)
    if html is not None and (missing := [name for name in ("altair", "vl_convert") if find_spec(name) is None]):
        print(f"shardbook: {NO_PICTURES.format(missing=' and '.join(missing))}", file=sys.stderr, flush=True)
        return 1
    names = (str(run), str(other)) if run.name == getattr(other, "name", None) else (run.name, other.name if other else "")
    if html is not None:
        _write_page(html, document, second, names)
    if json:
        print(jsonlib.dumps(_json(document, second), indent=2))
    elif html is None:
        console = Console(highlight=False)
        show(document, str(run), console)
        if second is not None:
            show_comparison(document, second, names, console)
    return 0


def read_document(path: Path) -> RunDocument:
    """The document in a file.

    Raises:
        ConfigError: the file can't be read, or is no run document of this version; the path stands in front.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"{path}: can't be read ({reason}); give the run.json that a run wrote") from error
    try:
        return RunDocument.from_json(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _json(document: RunDocument, other: RunDocument | None) -> dict[str, object]:
    if other is None:
        return figures(document)
    return {"run": figures(document), "other": figures(other), "comparison": comparison_figures(compare(document, other))}


def _write_page(path: Path, document: RunDocument, other: RunDocument | None, names: tuple[str, str]) -> None:
    from shardbook.report.html import page

    text = page(document, names[0], other, names[1])
    try:
        write_atomically(path, text)
    except OSError as error:
        raise ConfigError(f"--html {path}: can't be written ({error.strerror}); give a file in a folder that can be") from error
    print(f"written to {path}", file=sys.stderr)
