"""Forecasts written by hand: what tables, pictures and the command are shown."""

from dataclasses import replace

from shardbook.forecasting.conventions import Convention
from shardbook.forecasting.result import Above, Forecast, Holding, PhasePeak, StepForward, Term

GB, GIB = 10**9, 2**30

PEAK = {
    "PARAM": 4 * GB,
    "MASTER": 2 * GB,
    "MOMENT": 4 * GB,
    "GRAD": 1 * GB,
    "GATHERED": 800_000_000,
    "ACTIVATION": 12 * GB,
    "WORKSPACE": 200_000_000,
}
HOLDINGS = (
    Holding(account="PARAM", total=4 * GB, here=4 * GB, partitions=1),
    Holding(account="GRAD", total=8 * GB, here=1 * GB, partitions=8),
    Holding(account="MASTER", total=16 * GB, here=2 * GB, partitions=8),
    Holding(account="MOMENT", total=32 * GB, here=4 * GB, partitions=8),
)


def peaked(**changes):
    """A forecast with everything in it; 24 GB at the peak."""
    found = Forecast(
        model="toy-4b",
        num_parameters=4 * GB,
        source="catalog: written by hand",
        engine="shardbook",
        ranks=8,
        stage=2,
        convention=Convention.parse("2+2+4+8"),
        accounts=PEAK,
        persistent=11 * GB,
        peak_allocated=24 * GB,
        peak_reserved=(24 * GB, 26 * GB),
        peak_phase="backward",
        peak_where="layers.31",
        dominant="ACTIVATION",
        next_dominant="PARAM",
        not_modelled=("torch.compile: what a compiled model saves is not known; measure it",),
        sent=14 * GB,
        holdings=HOLDINGS,
        phases=(
            PhasePeak(phase="forward", where="head", accounts={"PARAM": 4 * GB, "ACTIVATION": 12 * GB}),
            PhasePeak(phase="backward", where="layers.31", accounts=PEAK),
            PhasePeak(phase="step", where="", accounts={"PARAM": 4 * GB, "MASTER": 2 * GB}, first=True),
        ),
        above=(
            Above(name="reserved", low=0, high=2 * GB, source="blocks of 2 and 20 MiB"),
            Above(name="context", low=300_000_000, high=800_000_000, source="driver 550"),
        ),
        step_forward=StepForward(
            lever="recompute each unit in backward", account="ACTIVATION", freed=11 * GB, accounts_after={**PEAK, "ACTIVATION": GB}
        ),
        terms=(Term(account="PARAM", nbytes=4 * GB, formula="2 bytes x 2e9", source="docs/accounts.md"),),
        largest_unit=("layers.0", 200_000_000),
        largest_tensor=("embedding.weight", 400_000_000),
        weights=8 * GB,
        state=64 * GB,
        inputs={"micro_batch": 2, "sequence": 4096, "tensor": 2, "context": 1, "recompute": "none"},
    )
    return replace(found, **changes)


def on_device(memory=24 * GIB, **changes):
    found = peaked(**changes)
    return replace(found, inputs={**found.inputs, "device": "test-card", "device_memory": memory})


def persistent(**changes):
    """A forecast of which only what persists is known."""
    held = {"PARAM": 4 * GB, "MASTER": 2 * GB, "MOMENT": 4 * GB, "GRAD": 1 * GB}
    nothing = {"peak_phase": "", "peak_where": "", "peak_reserved": None, "phases": (), "above": (), "step_forward": None, "terms": ()}
    found = peaked(accounts=held, peak_allocated=11 * GB, dominant="MOMENT", next_dominant="MOMENT", **nothing)
    missing = ("activations not modelled: give --activations or an architecture",)
    return replace(found, largest_unit=None, largest_tensor=None, not_modelled=missing, inputs={}, **changes)
