"""A measured run laid over the forecast of the same run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import shardbook as sb
from shardbook.document import RunDocument
from shardbook.errors import ConfigError
from shardbook.explore.small import decoder_facts
from shardbook.forecasting.result import Forecast
from shardbook.tables.reconciliation import largest
from shardbook.tables.sizes import place
from shardbook.train.recipe import Sourced, build_recipe


@dataclass(frozen=True, kw_only=True)
class Overlay:
    """Account to bytes at the peak, measured and forecast. ``notes``: what the forecast is of, and what is missing, in sentences."""

    measured: Mapping[str, int]
    when: str
    forecast: Forecast
    notes: Sequence[str] = ()

    @property
    def rows(self) -> Sequence[tuple[str, Mapping[str, int]]]:
        """Both, in the order in which they are drawn."""
        return (("forecast", self.forecast.accounts), ("measured", self.measured))


def read(path: Path) -> RunDocument:
    """The document in a file, or the ``run.json`` in a folder.

    Raises:
        ConfigError: it can't be read, or is no run document.
    """
    file = path / "run.json" if path.is_dir() else path
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"{file}: can't be read ({reason}); give the run.json that a run wrote") from error
    return parse(text, f"{file}")


def parse(text: str, name: str) -> RunDocument:
    """The document in a text; ``name`` stands in front of what is wrong with it.

    Raises:
        ConfigError: it is no run document of this version.
    """
    try:
        return RunDocument.from_json(text)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error


def overlay(document: RunDocument, instead: Forecast) -> Overlay:
    """A run beside its own forecast, or beside ``instead`` where the document does not say what was trained.

    Raises:
        ConfigError: the run kept no books of its peak.
    """
    found = largest(document)
    measured, when = (found.books, f"rank {found.rank}, {place(found.phase, found.unit)}") if found else (document.peak, "")
    measured = {account: nbytes for account, nbytes in measured.items() if nbytes}
    if not measured:
        raise ConfigError("this run kept no books of its peak; measure it with mode='full', or train with shardbook")
    own = forecast_of(document)
    note = "the forecast is of the run's own settings, and the controls do not change it"
    if own is None:
        note = "the document does not say all that a forecast needs, so this is the forecast of the controls: set them as the run was"
    return Overlay(measured=measured, when=when or document.peak_phase, forecast=own or instead, notes=(note, *document.notes))


def forecast_of(document: RunDocument) -> Forecast | None:
    """The forecast of a run of ``shardbook train`` or of the lesson; None where its settings are not known."""
    values: dict[str, Any] = {name: entry.get("value") for name, entry in document.settings.items()}
    if "model.layers" not in values or "zero.stage" not in values or values.get("model.config"):
        return None
    given = {name: Sourced(value=value, origin="run.json") for name, value in values.items() if value is not None and value != {}}
    try:
        recipe = build_recipe({}, given)
    except ConfigError:
        return None  # written by a release that knew other settings
    facts, batch = decoder_facts(recipe.model), recipe.batch
    return sb.forecast(facts, recipe.zero, ranks=recipe.run.ranks, micro_batch=batch.micro_batch, sequence=batch.sequence)
