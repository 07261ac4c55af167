"""``shardbook forecast`` with the library behind it: what is refused, what is answered, and how soon."""

import json

import pytest

from tests.forecast_command import assert_refused, forecast
from tests.forecast_samples import GB, GIB


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("llama-3.1-8", "nearest: llama-3.1-8b"),
        ("nowhere/config.json", "nowhere/config.json"),
        ("0", "allowed is a whole number of parameters from 1"),
        ("-7e9", "allowed is a whole number of parameters from 1"),
        ("1e30", "allowed is a whole number of parameters from 1"),
        ("7e9 --ranks 0", "ranks = 0: allowed is an integer from 1 up"),
        ("7e9 --ranks -8", "ranks = -8: allowed is an integer from 1 up"),
        ("7e9 --ranks 1e12", "ranks = 1000000000000: allowed is at most"),
        ("7e9 --ranks 6 --tensor 4", "ranks = 6: allowed is a multiple of tensor * context = 4"),
        ("7e9 --ranks 12 --tensor 2 --context 4", "ranks = 12: allowed is a multiple of tensor * context = 8"),
        ("7e9 --tensor 0", "tensor = 0: allowed is an integer from 1 up"),
        ("llama-3.1-8b --micro-batch 1", "give sequence too"),
        ("llama-3.1-8b --sequence 128", "give micro_batch too"),
        ("llama-3.1-8b --micro-batch 0 --sequence 128", "micro_batch = 0: allowed is an integer from 1 up"),
        ("llama-3.1-8b --micro-batch 1 --sequence 999999999", "sequence = 999999999: allowed is 1 to 131072, the model's longest"),
        ("llama-3.1-8b --micro-batch 1000000000 --sequence 128", "micro_batch = 1000000000: allowed is at most"),
        ("7e9 --engine deepsped", 'the nearest is "deepspeed"'),
        ("7e9 --engine ddp --stage 3", "stage = 3: allowed is 0 with engine='ddp'"),
        ("7e9 --device h101-80gb", "nearest: h100-80gb"),
        ("7e9 --device 24G", "allowed is the name of a device or a size"),
        ("7e9 --convention 2+2+4+x", "a number of bytes per parameter"),
        ("7e9 --convention deepspeed-bf61", 'the nearest is "deepspeed-bf16"'),
    ],
)
def test_what_the_library_refuses_is_one_line(capsys, arguments, said):
    assert_refused(forecast(capsys, *arguments.split()), said)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "config.json"),
        ("[1, 2]", "config.json"),
        ('{"model_type": "llama"}', "hidden_size"),
        ('{"a": 1}', "config.json"),
        ("\xff", "config.json"),
    ],
)
def test_a_file_that_is_no_model_is_one_line(capsys, tmp_path, content, said):
    path = tmp_path / "config.json"
    path.write_bytes(content.encode("latin-1"))
    assert_refused(forecast(capsys, path), said)


# ---- what it answers ------------------------------------------------------------------------------------------------------------


def answered(capsys, *arguments):
    code, out, err = forecast(capsys, *arguments, "--json")
    assert err == ""
    return code, json.loads(out)


def test_seven_billion_parameters_are_112_gb(capsys):
    code, out, _ = forecast(capsys, "7e9", "--convention", "2+2+4+8")
    assert code == 0
    assert "weights alone 14.0 GB; training state 112.0 GB (104.3 GiB)" in out
    assert "not a peak: activations, gathers, buffers and allocator come on top" in out
    _, found = answered(capsys, "7e9", "--convention", "2+2+4+8")
    assert (found["persistent"], found["state"], found["weights"]) == (112 * GB, 112 * GB, 14 * GB)


def test_the_stages_of_the_zero_paper(capsys):
    _, found = answered(capsys, "7.5e9", "--ranks", 64, "--convention", "2+2+4+8", "--compare-stages")
    held = [one["forecast"]["persistent"] for one in found["stages"]]
    assert held == [16 * 7_500_000_000, 4 * 7_500_000_000 + 12 * 117_187_500, 2 * 7_500_000_000 + 14 * 117_187_500, 16 * 117_187_500]
    assert [one["forecast"]["saved"] + one["forecast"]["held"] for one in found["stages"]] == [120 * GB] * 4


def test_the_bottleneck_moves_when_state_shrinks(capsys):
    options = ("7e9", "--activations", "20GiB", "--convention", "2+2+4+8")
    assert answered(capsys, *options, "--state", "60GiB")[1]["dominant"] != "ACTIVATION"
    assert answered(capsys, *options, "--state", "10GiB")[1]["dominant"] == "ACTIVATION"


def test_devices_that_are_too_small_and_large_enough(capsys):
    options = ("llama-3.1-8b", "--ranks", 64, "--precision", "bf16", "--micro-batch", 1, "--sequence", 2048, "--device")
    code, found = answered(capsys, *options, "8GiB")
    assert (code, found["verdict"], found["device_memory"]) == (1, "does not fit", 8 * GIB)
    code, found = answered(capsys, *options, "900GiB")
    assert (code, found["verdict"]) == (0, "fits")
    low, high = found["needed"]
    assert found["margin"] == [900 * GIB - high, 900 * GIB - low]


@pytest.mark.parametrize("engine", ["shardbook", "deepspeed", "fsdp2", "ddp", "megatron"])
def test_every_engine_has_tables_and_a_sum_that_adds_up(capsys, engine):
    options = ("llama-3.1-8b", "--ranks", 8, "--engine", engine, "--micro-batch", 1, "--sequence", 512, "--precision", "bf16")
    code, out, err = forecast(capsys, *options, "--compare-stages", "--explain", "--device", "h100-80gb")
    assert (code in (0, 1), err) == (True, "")
    assert max(map(len, out.splitlines())) <= 80
    _, found = code, json.loads(forecast(capsys, *options, "--json")[1])
    assert sum(found["accounts"].values()) == found["peak_allocated"] > found["persistent"]
    assert found["accounts"][found["dominant"]] == max(found["accounts"].values())
