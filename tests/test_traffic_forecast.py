"""Bytes sent per step, forecast: DESIGN section 8 in elements, and shardbook's own to the byte against what its engine counted."""

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from shardbook.config import Precision, ZeroConfig
from shardbook.errors import ConfigError
from shardbook.events import Traffic
from shardbook.forecasting.conventions import PRESETS
from shardbook.forecasting.deepspeed_knobs import read
from shardbook.forecasting.traffic import Flow, by_stage, flow_of_config, flow_of_knobs, kept_by_deepspeed, lines, of_structure, sent_nbytes
from tests import ranks
from tests.test_engine_traffic import NUMEL, closed_form

SHARE = 1000  # elements of a shard, so that Ψ = SHARE * N is divided evenly


def elements(engine: str, stage: int, micro: int, num_ranks: int, **fields: Any) -> float:
    """Multiples of Ψ × (N-1)/N that are sent."""
    flow = Flow(
        engine=engine, stage=stage, ranks=num_ranks, numel=SHARE * num_ranks, micro_batches=micro, param_nbytes=1, grad_nbytes=1, **fields
    )
    return sent_nbytes(flow) / (SHARE * (num_ranks - 1))


@given(num_ranks=st.integers(2, 5000), micro=st.integers(1, 64))
def test_elements_sent_by_each_engine(num_ranks, micro):
    def sent(engine: str, stage: int, **fields: Any) -> float:
        return elements(engine, stage, micro, num_ranks, **fields)

    for engine in ("convention", "shardbook"):
        assert [sent(engine, stage) for stage in range(4)] == [2, 2, micro + 1, 3 * micro]
    assert [sent("deepspeed", stage) for stage in range(4)] == [2, 3, 2 * micro + 1, 3 * micro]
    assert [sent("deepspeed", stage, multi_rank_buckets=False) for stage in (1, 2)] == [2, micro + 1]
    assert sent("fsdp2", 3) == 3 * micro
    assert sent("fsdp2", 3, kept_numel=SHARE * num_ranks) == 2 * micro
    assert sent("ddp", 0) == 2
    assert sent("ddp", 0, each_micro_batch=True) == 2 * micro
    assert [sent("megatron", stage) for stage in (0, 1)] == [2, 2]


@given(
    engine=st.sampled_from(["shardbook", "deepspeed", "fsdp2", "ddp", "megatron"]), stage=st.integers(0, 3), numel=st.integers(0, 10**12)
)
def test_one_rank_sends_nothing(engine, stage, numel):
    assert lines(Flow(engine=engine, stage=stage, ranks=1, numel=numel)) == ()


def test_each_kind_travels_in_its_own_type():
    flow = Flow(engine="megatron", stage=1, ranks=2, numel=1000, param_nbytes=2, grad_nbytes=4)
    assert {line.kind: line.nbytes for line in lines(flow)} == {"reduce": 500 * 4, "refresh": 500 * 2}


def test_frozen_parameters_are_gathered_and_never_reduced():
    flow = Flow(engine="fsdp2", stage=3, ranks=2, numel=1000, numel_trainable=10)
    assert {line.kind: line.nbytes for line in lines(flow)} == {"gather": 2 * 500 * 4, "reduce": 5 * 4}


def test_deepspeed_keeps_what_backward_soon_needs():
    assert kept_by_deepspeed(30_000_000, 10**9, 10**9) == 30_000_000
    assert kept_by_deepspeed(7 * 10**9, 0, 10**9, prefetch_bucket_size=0) == 0


# Bytes that the all-gathers of a fifth step received from the other of two ranks, and the settings: DeepSpeed 0.19.8 on gloo, fp32, a GPT
# of 3,700,224 parameters (4 layers, width 256, vocabulary 1024), no parameter persistent.
REGATHERED = [
    (14_800_896, {"max_reuse_distance": 0, "max_live_parameters": 8_388_608, "prefetch_bucket_size": 0}),
    (12_664_320, {"max_reuse_distance": 2_000_000, "max_live_parameters": 8_388_608, "prefetch_bucket_size": 0}),
    (13_091_840, {"max_reuse_distance": 0, "max_live_parameters": 1_000_000, "prefetch_bucket_size": 300_000}),
    (11_116_544, {"max_reuse_distance": 0, "max_live_parameters": 2_000_000, "prefetch_bucket_size": 300_000}),
    (11_117_568, {"max_reuse_distance": 0, "max_live_parameters": 2_000_000, "prefetch_bucket_size": 50_000}),
    (11_612_160, {"max_reuse_distance": 3_000_000, "max_live_parameters": 1_000_000, "prefetch_bucket_size": 300_000}),
    (7_433_216, {"max_reuse_distance": 0, "max_live_parameters": 8_388_608, "prefetch_bucket_size": 4_194_304}),
]


@pytest.mark.parametrize(("received", "knobs"), REGATHERED)
def test_what_deepspeed_3_gathers_twice_was_measured_within_its_largest_parameter(received, knobs):
    numel, largest = 3_700_224, 1024 * 256
    flow = Flow(engine="deepspeed", stage=3, ranks=2, numel=numel, kept_numel=kept_by_deepspeed(numel, **knobs))
    gathered = next(line.nbytes for line in lines(flow) if line.kind == "gather")
    assert abs(gathered - received) <= largest * 4 / 2


def test_deepspeeds_settings_say_what_travels():
    flow = Flow(engine="convention", ranks=2, numel=7 * 10**9)
    knobs = read({"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "communication_data_type": "fp32"})
    assert {line.kind: line.nbytes for line in lines(flow_of_knobs(knobs, flow))} == {
        "reduce": 7 * 10**9 // 2 * 4,
        "gather": (7 + 6) * 10**9 // 2 * 2,
    }
    second = read({"zero_optimization": {"stage": 2, "use_multi_rank_bucket_allreduce": False}, "gradient_accumulation_steps": 3})
    assert {line.kind: line.nbytes for line in lines(flow_of_knobs(second, flow))} == {
        "reduce": 3 * 7 * 10**9 // 2 * 4,
        "refresh": 7 * 10**9 // 2 * 4,
    }
    whole = read({"zero_optimization": {"stage": 2, "use_multi_rank_bucket_allreduce": False, "reduce_scatter": False}})
    assert flow_of_knobs(whole, flow).multi_rank_buckets  # without reduce_scatter each bucket is all-reduced


def test_bytes_saved_stand_beside_bytes_sent():
    rows = by_stage(Flow(engine="shardbook", ranks=64, numel=7_500_000_000, param_nbytes=2, grad_nbytes=2), PRESETS["2+2+4+8"])
    assert [row.held for row in rows] == [120_000_000_000, 31_406_250_000, 16_640_625_000, 1_875_000_000]
    assert [row.saved + row.held for row in rows] == [120_000_000_000] * 4
    assert [row.sent for row in rows] == [7_500_000_000 // 64 * 63 * 2 * times for times in (2, 2, 2, 3)]


@pytest.mark.parametrize(("fields", "said"), [({"engine": "horovod"}, "engine"), ({"stage": 4}, "stage"), ({"ranks": 0}, "ranks")])
def test_what_cannot_be_is_refused(fields, said):
    with pytest.raises(ConfigError, match=said):
        Flow(**{"engine": "ddp", "ranks": 2, "numel": 1, **fields})


# ---- against the engine ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_without_padding_the_engines_own_test_has_the_same_figures(num_ranks, stage, micro, precision):
    config = ZeroConfig(stage=stage, accumulate=micro, precision=Precision(param=precision))
    flow = flow_of_config(config, Flow(engine="shardbook", ranks=num_ranks, numel=NUMEL))
    assert {line.kind: line.nbytes for line in lines(flow)} == closed_form(stage, micro, precision, num_ranks)


class Uneven(nn.Module):
    """Sizes that need padding on any number of ranks, and a frozen block."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(37, 37)
        self.blocks = nn.ModuleList(nn.Linear(37, 37) for _ in range(3))
        self.blocks[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.relu(block(x))
        return x


SETTINGS = [(stage, micro, param) for stage in range(4) for micro, param in ((1, "fp32"), (2, "bf16"))]


def counted_and_forecast() -> list[tuple[dict[str, int], dict[str, int]]]:
    """For each setting: bytes by kind in the third step, and by :func:`of_structure`."""
    import shardbook as sb

    found = []
    for stage, micro, param in SETTINGS:
        torch.manual_seed(1)
        config = sb.ZeroConfig(stage=stage, accumulate=micro, precision=sb.Precision(param=param))
        model = Uneven()
        engine = sb.Engine(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1), config)
        events: list[Any] = []
        for step in range(3):
            with engine.observe(events.append if step == 2 else lambda event: None):
                for _ in range(micro):
                    engine.backward(engine(torch.randn(2, 37)).float().square().mean())
                engine.step()
                if stage < 3:
                    with engine.gathered(model):
                        pass
        counts: Counter[str] = Counter()
        for event in events:
            if isinstance(event, Traffic) and event.kind != "step":
                counts[event.kind] += event.sent_nbytes
        found.append((dict(counts), {line.kind: line.nbytes for line in of_structure(engine.structure(), config)}))
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_with_padding_and_frozen_parameters_the_engine_sends_what_is_forecast(num_ranks):
    for found in ranks.call(num_ranks, counted_and_forecast):
        for setting, (counted, forecast) in zip(SETTINGS, found, strict=True):
            assert counted == forecast, setting
