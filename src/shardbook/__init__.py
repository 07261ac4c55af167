"""shardbook trains PyTorch models under ZeRO and keeps the books.

Names are loaded when they are first used: ``import shardbook`` brings no torch, so that help and forecasts answer at once.

>>> import shardbook as sb
>>> sb.ZeroConfig(stage=2).stage
2
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardbook.checkpoint.engine import Engine
    from shardbook.checkpoint.errors import CheckpointError
    from shardbook.config import Offload, Precision, Prefetch, Recompute, ZeroConfig
    from shardbook.document import RunDocument
    from shardbook.engine.report import StepReport
    from shardbook.errors import BudgetError
    from shardbook.forecasting.choices import Choices
    from shardbook.forecasting.conventions import Convention
    from shardbook.forecasting.forecast import forecast
    from shardbook.forecasting.result import Forecast
    from shardbook.ledger.ledger import Ledger
    from shardbook.ledger.measurement import Measurement, measure
    from shardbook.recording.read import Record
    from shardbook.recording.record import Recorder, record
    from shardbook.recording.replicas import ReplicaError, check_replicas
    from shardbook.simulation.simulate import simulate
    from shardbook.train.verify import verify
    from shardbook.verifying.verdict import RULES, Verdict

__version__ = "0.1.0"

__all__ = [
    "RULES",
    "BudgetError",
    "CheckpointError",
    "Choices",
    "Convention",
    "Engine",
    "Forecast",
    "Ledger",
    "Measurement",
    "Offload",
    "Precision",
    "Prefetch",
    "Recompute",
    "Record",
    "Recorder",
    "ReplicaError",
    "RunDocument",
    "StepReport",
    "Verdict",
    "ZeroConfig",
    "check_replicas",
    "forecast",
    "measure",
    "record",
    "simulate",
    "verify",
]

_HOMES = {
    "RULES": "shardbook.verifying.verdict",
    "BudgetError": "shardbook.errors",
    "Choices": "shardbook.forecasting.choices",
    "Convention": "shardbook.forecasting.conventions",
    "CheckpointError": "shardbook.checkpoint.errors",
    "Engine": "shardbook.checkpoint.engine",
    "Forecast": "shardbook.forecasting.result",
    "Ledger": "shardbook.ledger.ledger",
    "Measurement": "shardbook.ledger.measurement",
    "Offload": "shardbook.config",
    "Precision": "shardbook.config",
    "Prefetch": "shardbook.config",
    "Recompute": "shardbook.config",
    "Record": "shardbook.recording.read",
    "Recorder": "shardbook.recording.record",
    "ReplicaError": "shardbook.recording.replicas",
    "RunDocument": "shardbook.document",
    "StepReport": "shardbook.engine.report",
    "Verdict": "shardbook.verifying.verdict",
    "ZeroConfig": "shardbook.config",
    "check_replicas": "shardbook.recording.replicas",
    "forecast": "shardbook.forecasting.forecast",
    "measure": "shardbook.ledger.measurement",
    "record": "shardbook.recording.record",
    "simulate": "shardbook.simulation.simulate",
    "verify": "shardbook.train.verify",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'shardbook' has no attribute {name!r}; it has {', '.join(__all__)}")
    try:
        value = getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(f"shardbook.{name} needs torch: pip install 'shardbook[train]'", name="torch") from error
    globals()[name] = value  # found at once from now on
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
