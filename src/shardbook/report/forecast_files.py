"""A forecast's picture in a file: SVG, PNG, or a page. The drawing library is an extra, and loaded when a file is asked for."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from shardbook.document import write_atomically
from shardbook.errors import ConfigError
from shardbook.forecasting.result import Forecast
from shardbook.report.forecast_figures import Case

KINDS = (".svg", ".png", ".html")
NO_PICTURES = "--save needs {missing}, which is not here: pip install 'shardbook[report]'"
_PNG_SCALE = 2.0


def check(path: Path) -> None:
    """Looks at what can be known before anything is computed.

    Raises:
        ConfigError: no kind of file that can be written; the extra is missing; a folder.
    """
    if path.suffix.lower() not in KINDS:
        raise ConfigError(f"--save {path}: allowed is a file that ends in {', '.join(KINDS)}; for example chart.svg")
    if missing := [name for name in ("altair", "vl_convert") if find_spec(name) is None]:
        raise ConfigError(NO_PICTURES.format(missing=" and ".join(missing)))
    if path.is_dir():
        raise ConfigError(f"--save {path}: is a folder; give a file")


def save(path: Path, forecast: Forecast, cases: Sequence[Case], name: str) -> None:
    """Writes the stacks of ``cases``, or a page with them, whole or not at all; ``name`` is what is varied.

    Raises:
        ConfigError: as :func:`check`; the file can't be written.
    """
    check(path)
    content = _content(path.suffix.lower(), forecast, cases, name)
    try:
        write_atomically(path, content)
    except OSError as error:
        raise ConfigError(f"--save {path}: can't be written ({error.strerror}); give a file in a folder that can be") from error


def _content(kind: str, forecast: Forecast, cases: Sequence[Case], name: str) -> str | bytes:
    if kind == ".html":
        from shardbook.report.forecast_page import page

        return page(forecast, cases, name)
    from shardbook.report.forecast_charts import standalone

    picture = standalone(forecast, cases, f"{forecast.model}, {forecast.ranks:,} ranks, by {name}")
    if kind == ".svg":
        return picture
    import vl_convert

    return vl_convert.svg_to_png(picture, scale=_PNG_SCALE)
