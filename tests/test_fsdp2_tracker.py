"""FSDP2's own tracker beside the forecast: they describe the same lifetimes."""

import dataclasses

import pytest

from benchmarks import fsdp2_tracker
from benchmarks.fsdp2_tracker import Setting

SHALLOW = Setting(layers=8)
"""The widths of a Llama of 7B; tensors are fake, so that only blocks cost time."""


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize(
    "setting",
    [
        SHALLOW,
        dataclasses.replace(SHALLOW, recompute="full"),
        dataclasses.replace(SHALLOW, reshard=False),
        dataclasses.replace(SHALLOW, kv_heads=8),
    ],
    ids=["kept", "recomputed", "not resharded", "grouped queries"],
)
def test_the_forecast_is_within_three_percent(setting: Setting) -> None:
    found = fsdp2_tracker.in_its_own_process(setting)
    assert found.nbytes == sum(found.categories.values())
    assert fsdp2_tracker.forecast_of(setting) == pytest.approx(found.nbytes, rel=0.03)


@pytest.mark.full
def test_a_failure_in_the_other_process_is_told() -> None:
    with pytest.raises(RuntimeError, match="FSDP2's tracker failed on Setting"):
        fsdp2_tracker.in_its_own_process(dataclasses.replace(SHALLOW, heads=3))
