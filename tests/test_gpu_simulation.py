"""The GPU check's part for simulation, tried without a GPU, and the models of CUDA's kernels by hand."""

import json
from dataclasses import replace

import pytest
import torch

from benchmarks import gpu_check, gpu_simulation
from benchmarks import gpu_simulation_runs as runs
from benchmarks.gpu_memory import CudaHistory
from benchmarks.gpu_simulation import Replay, Row, Told
from shardbook.simulation import cuda_workspaces

ATEN = torch.ops.aten
MEASURED = runs.Measured(
    first=900, later=1000, reserved=2048, num_segments=1, base_reserved=0, seen=1000, books={"PARAM": 1000, "UNACCOUNTED": 0},
    phase="step", operator="", trace="", seconds=1.0,
)  # fmt: skip
RIGHT = Row(
    case=runs.cases()[0],
    measured=MEASURED,
    told=Told(forecast=1000, simulated=1000, simulated_first=900),
    replay=Replay(allocated=1000, reserved=2048, num_segments=1, events=4),
)


pytestmark = pytest.mark.full  # it runs real trainings


@pytest.fixture(scope="module")
def tried(tmp_path_factory):
    """Both small cases trained on the CPU, forecast, simulated and replayed; the folder and its rows."""
    folder = tmp_path_factory.mktemp("gpu_simulation")
    gpu_simulation.train(runs.small_cases(), "cpu", folder, seconds=120)
    return folder, gpu_simulation.write(folder)


def test_everything_but_cuda_is_tried_without_a_gpu(tried):
    _, rows = tried
    assert [(row.status, row.wrong) for row in rows] == [("passed", [])] * 2


def test_the_tried_simulation_is_within_a_kernel_of_what_was_allocated(tried):
    _, rows = tried
    for row in rows:
        assert abs(row.told.simulated - row.measured.later) < 64  # a dot product's own few bytes
        assert abs(row.told.simulated_first - row.measured.first) < 64
        assert row.measured.seen == row.measured.later
        assert row.measured.books["UNACCOUNTED"] == 0


def test_a_history_is_replayed_into_whole_segments(tried):
    _, rows = tried
    for row in rows:
        assert row.replay.events > 500
        assert 0 <= row.replay.allocated - max(row.measured.first, row.measured.later) < 0.1 * row.measured.later  # rounded to 512
        assert row.replay.reserved >= row.replay.allocated
        assert row.replay.reserved % 2**21 == 0


def test_the_table_and_its_data_lie_beside_what_was_measured(tried):
    folder, rows = tried
    text, data = (folder / "table.md").read_text(), json.loads((folder / "table.json").read_text())
    assert all(f"| {row.case} |" in text for row in rows)
    assert all(f"* {line}" in text for line in (*(model.name for model in cuda_workspaces.MODELS), *cuda_workspaces.NOT_MODELLED))
    assert text.rstrip().endswith("2 passed, 0 failed, 0 not run")
    assert [row["measured"]["later"] for row in data["rows"]] == [row.measured.later for row in rows]
    assert data["rows"][0]["figures"]["forecast %"] == pytest.approx(
        100 * gpu_simulation.off(rows[0].told.forecast, rows[0].measured.later)
    )


def test_the_table_is_made_again_without_training(tried, capsys, monkeypatch):
    folder, _ = tried
    monkeypatch.setattr("sys.argv", ["gpu_simulation", "--again", str(folder)])
    monkeypatch.setattr(gpu_simulation, "train", None)
    assert gpu_simulation.main() == 0
    assert "2 passed" in capsys.readouterr().out


def test_what_there_is_no_time_for_is_named(tmp_path):
    gpu_simulation.train(runs.small_cases(), "cpu", tmp_path, seconds=0)
    rows = gpu_simulation.write(tmp_path)
    assert [(row.status, row.wrong) for row in rows] == [("not run", ["there was no time left"])] * 2
    assert "0 passed, 0 failed, 2 not run" in (tmp_path / "table.md").read_text()


def test_a_case_is_not_begun_without_time_for_the_slowest_so_far(tmp_path, monkeypatch):
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(runs.time, "time", lambda: 50.0)
    monkeypatch.setattr(runs.time, "monotonic", lambda: next(clock))  # each case takes 10 seconds
    monkeypatch.setattr(runs, "measure", lambda *_: MEASURED)
    runs.measure_all(list(enumerate(runs.small_cases())), "cpu", str(tmp_path), until=55.0)
    assert [file.name for file in sorted(tmp_path.iterdir())] == ["measured-0.json"]


def test_no_answer_of_an_older_run_is_left(tmp_path):
    (tmp_path / "measured-0.json").write_text("{}")
    gpu_simulation.train(runs.small_cases(), "cpu", tmp_path, seconds=0)
    assert gpu_simulation.rows(tmp_path)[1][0].status == "not run"


def test_a_case_that_fails_is_shown_and_hides_no_other(tmp_path, monkeypatch):
    calls = iter([RuntimeError("no kernel\nfor it"), None])

    def measure(*_):
        if (error := next(calls)) is not None:
            raise error
        return MEASURED

    monkeypatch.setattr(runs, "measure", measure)
    runs.measure_all(list(enumerate(runs.small_cases())), "cpu", str(tmp_path), until=1e12)
    assert json.loads((tmp_path / "measured-0.json").read_text()) == {"error": "RuntimeError: no kernel for it"}
    assert json.loads((tmp_path / "measured-1.json").read_text())["later"] == 1000


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"told": replace(RIGHT.told, forecast=1100)}, "forecast: +10.00% of what was allocated"),
        ({"told": replace(RIGHT.told, simulated=990)}, "simulation: -1.00% of what was allocated"),
        ({"told": replace(RIGHT.told, simulated_first=999)}, "simulation, first step: +11.00% of what was allocated"),
        ({"replay": replace(RIGHT.replay, reserved=4096)}, "replay: 4,096 bytes reserved, 2,048 by the allocator's counter"),
        ({"measured": replace(MEASURED, books={"UNACCOUNTED": 20})}, "20 of 1,000 bytes are in no account"),
        ({"errors": ("replay: ConfigError: event 7",)}, "replay: ConfigError: event 7"),
    ],
)
def test_what_is_off_fails_with_its_signed_error(changed, said):
    assert RIGHT.status == "passed"
    row = replace(RIGHT, **changed)
    assert (row.status, row.wrong) == ("failed", [said])


def _snapshot(second_nbytes):
    """1,000 and 3 MiB are asked for and kept: a small segment, and one of 20 MiB, or whatever the device is said to have given."""
    at, further, third = 1 << 40, (1 << 40) + (1 << 30), 3 << 20
    steps = (("segment_alloc", at, 2 << 20), ("alloc", at, 1000), ("segment_alloc", further, second_nbytes), ("alloc", further, third))
    trace = [{"action": action, "addr": address, "size": nbytes, "stream": 0, "time_us": 1} for action, address, nbytes in steps]

    def segment(address, nbytes, used, asked, kind):
        blocks = [{"size": used, "requested_size": asked, "state": "active_allocated"}, {"size": nbytes - used, "state": "inactive"}]
        return {"device": 0, "address": address, "total_size": nbytes, "stream": 0, "segment_type": kind, "blocks": blocks}

    segments = [segment(at, 2 << 20, 1024, 1000, "small"), segment(further, second_nbytes, third, third, "large")]
    return {"segments": segments, "device_traces": [trace], "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": ""}}


def test_a_history_of_a_gpu_is_laid_beside_its_own_segments():
    found = gpu_simulation.replayed(_snapshot(20 << 20), runs.cases()[0])
    assert (found.reserved, found.seen, found.num_segments, found.difference) == (22 << 20, 22 << 20, 2, "")


def test_a_replay_that_differs_from_the_segments_says_where():
    found = gpu_simulation.replayed(_snapshot(32 << 20), runs.cases()[0])
    assert (found.reserved, found.seen) == (22 << 20, 34 << 20)
    assert "differs from the allocator at 1 of 2 events" in found.difference
    measured = replace(MEASURED, reserved=34 << 20)
    row = replace(RIGHT, measured=measured, replay=found)
    assert row.wrong[:2] == [
        f"replay: {22 << 20:,} bytes reserved, {34 << 20:,} by the allocator's counter",
        found.difference.splitlines()[0],
    ]


def test_a_gpus_counters_count_reserved_bytes_from_the_start(monkeypatch):
    """A peak that was reset counts all the same, and the history comes without stacks."""
    cuda, peaks, device = torch.cuda, iter([(50, 2), (40, 1)]), torch.device("cuda", 0)
    for name, value in (("memory_allocated", 8), ("memory_reserved", 16), ("max_memory_allocated", 108)):
        monkeypatch.setattr(cuda, name, lambda _, value=value: value)
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(cuda, name, lambda _: None)
    monkeypatch.setattr(cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    monkeypatch.setattr(cuda.memory, "_record_memory_history", lambda **_: None)
    names = ("reserved_bytes.all.peak", "segment.all.peak")
    monkeypatch.setattr(cuda, "memory_stats", lambda _: dict(zip(names, next(peaks), strict=True)) | {"segment.small_pool.peak": 9})
    trace = [{"action": "alloc", "addr": 1, "size": 2, "frames": ["deep"]}]
    monkeypatch.setattr(cuda.memory, "_snapshot", lambda _: {"segments": [], "allocator_settings": {}, "device_traces": [trace]})
    history = CudaHistory(device)
    history.begin()
    assert history.peak() == 100
    kept, stats = history.stop()
    assert stats == {"reserved_bytes.all.peak": 50, "segment.all.peak": 2}
    assert kept["device_traces"] == [[{"action": "alloc", "addr": 1, "size": 2}]]


def test_the_cases_cover_what_is_promised():
    cases = runs.cases()
    assert len(set(cases)) == len(cases) >= 12
    for name, values in (
        ("stage", {0, 1, 2, 3}), ("shape", {"gpt", "llama"}), ("precision", {"fp32", "bf16"}), ("expandable", {True, False}),
        ("kernel", {"fused", "foreach", "for-loop"}), ("clip", {True, False}), ("engine", {"shardbook", "fsdp2", "plain"}),
        ("attention", {"pinned", "any"}),
    ):  # fmt: skip
        assert {getattr(case, name) for case in cases} == values
    assert max(case.accumulate for case in cases) > 1
    with torch.device("meta"):
        sizes = {case.shape: sum(parameter.numel() for parameter in runs.build(case).parameters()) for case in cases}
    assert all(50e6 < size < 300e6 for size in sizes.values()), sizes


def test_the_one_command_chooses_its_trainings_by_name():
    assert len(gpu_check.simulation_cases("cuda", "")) == len(runs.cases())
    assert [case.shape for case in gpu_check.simulation_cases("cpu", "simulation: small llama")] == ["small llama"]
    assert gpu_check.simulation_cases("cuda", "transport") == []


# ---- models of CUDA's kernels, by hand -------------------------------------------------------------------------------------------


def _heads(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def _inside(operator, *args, result=None, device="h100-80gb"):
    return cuda_workspaces.workspaces_on(device)(operator, args, result)


def test_flash_attention_backward():
    """200 rows are 256, heads of 80 are 96: 2·4·256·96 sums and 2·4·256 rows in fp32."""
    query = _heads(2, 4, 200, 80)
    operator = ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default
    assert _inside(operator, query, query, query, query) == 4 * (2 * 4 * 256 * 96 + 2 * 4 * 256)


def test_flash_attention_backward_with_shared_keys_expands_their_gradients():
    query, key = _heads(2, 4, 256, 64), _heads(2, 2, 256, 64)
    operator = ATEN._scaled_dot_product_flash_attention_backward.default
    assert _inside(operator, query, query, key, key) == 4 * (2 * 4 * 256 * 64 + 2 * 4 * 256) + 2 * (2 * 4 * 256 * 64 * 2)


def test_flash_attention_forward_splits_keys_where_the_chip_would_be_idle():
    """8 heads of 512 rows are 64 blocks for 264 slots: two parts of 256 keys. 64 heads fill the chip."""
    operator, few, many = ATEN._scaled_dot_product_flash_attention_for_cpu.default, _heads(1, 8, 512, 64), _heads(8, 64, 512, 64)
    assert _inside(operator, few, few, few, 0.0) == 4 * 2 * 8 * 512 * (1 + 64)
    assert _inside(operator, few, few, few, 0.1) == 0
    assert _inside(operator, many, many, many, 0.0) == 0


def test_memory_efficient_attention_backward():
    """fp32: four tiles of 64 × 64 and 16 bytes for each head, and a sum for each row."""
    query = _heads(2, 4, 256, 64, dtype=torch.float32)
    operator = ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default
    assert _inside(operator, query, query, query, query) == 8 * 4 * (16 + 4 * 64 * 64) + 4 * 8 * 256


def test_embedding_backward_above_3072_tokens():
    gradient, indices = _heads(4096, 64), torch.empty(4096, dtype=torch.long, device="meta")
    operator = ATEN.embedding_dense_backward.default
    assert _inside(operator, gradient, indices, 1000, -1, False) == 6 * 4096 * 8 + 16 + 4096 * 64 * 4
    assert _inside(operator, gradient[:3072], indices[:3072], 1000, -1, False) == 0


def test_layer_norm_backward_of_many_rows_and_few_columns():
    """131,072 rows are 4,096 blocks of 32; on 1,024 columns and more there is no second pass."""
    operator, x = ATEN.native_layer_norm_backward.default, torch.empty(131_072, 256, device="meta")
    assert _inside(operator, x, x, [256]) == 2 * 4096 * 256 * 4
    assert _inside(operator, x.view(-1, 4096), x.view(-1, 4096), [4096]) == 0


def test_the_gradient_of_a_bias():
    """2,048 rows onto 1,024 columns: 8 blocks of 128 threads across, 32 share an output, each stores 128 values for it, and 8 counters."""
    x, result = torch.empty(2048, 1024, device="meta"), torch.empty(1, 1024, device="meta")
    assert _inside(ATEN.sum.dim_IntList, x, [0], True, result=result) == 4 * 1024 * 32 * 128 + 4 * 8


def test_sums_that_take_nothing():
    x, result = torch.empty(2048, 1024, device="meta"), torch.empty(2048, 1, device="meta")
    assert _inside(ATEN.mean.dim, x, [-1], True, result=result) == 0
    assert _inside(ATEN.sum.default, torch.empty(0, device="meta"), result=result) == 0
    assert _inside(ATEN.sum.dim_IntList, x.t(), [0], result=result) == 0
    assert _inside(ATEN.add.Tensor, x, x, result=x) == 0


def test_a_smaller_chip_splits_less():
    few = _heads(1, 16, 512, 64)
    operator = ATEN._scaled_dot_product_flash_attention_for_cpu.default
    assert _inside(operator, few, few, few, device="a30") == 0 < _inside(operator, few, few, few, device="h100-80gb")


def test_every_model_names_its_source_and_none_claims_to_be_validated():
    assert all(model.source and not model.validated for model in cuda_workspaces.MODELS)
    assert len({model.name for model in cuda_workspaces.MODELS}) == len(cuda_workspaces.MODELS)
    assert cuda_workspaces.held("a100-80gb") == 2 * 8_519_680
