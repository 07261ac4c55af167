"""Calibration: curves between measured points, the document, what doctor says of it, and a real measurement of a little."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardbook.cli import calibration, doctor
from shardbook.errors import ConfigError
from shardbook.facts.curves import Curve
from shardbook.facts.machine import Machine, read_machine, usual_path
from shardbook.train.calibration import disk as disk_rates
from shardbook.train.calibration.clock import Clock

SAMPLE = Path(__file__).with_name("calibration_sample.json")


def curve(axes, seconds, powers=None):
    return Curve(what="w", dtype="", axes=axes, seconds=seconds, powers=powers)


def test_measured_points_come_back_as_they_are():
    grid = curve(((2, 8), (1, 10, 100)), (1.0, 2.0, 3.0, 4.0, 5.0, 6.0))
    found = [grid.at(left, right) for left in (2, 8) for right in (1, 10, 100)]
    assert found == pytest.approx([1, 2, 3, 4, 5, 6])


def test_a_constant_rate_stays_one_between_and_above_the_points():
    grid = curve(((4, 64), (4, 64)), tuple(left * right / 1e9 for left in (4, 64) for right in (4, 64)))
    for left, right in ((5, 7), (64, 64), (1000, 10), (1000, 4000), (2, 3)):
        assert grid.at(left, right) == pytest.approx(left * right / 1e9)


def test_powers_say_how_it_grows_above_and_the_last_slope_goes_on_below():
    grid = curve(((10, 100),), (1.0, 2.0), (2.0,))
    assert grid.at(1000) == pytest.approx(200)
    assert grid.at(1) == pytest.approx(0.5)
    assert grid.at(0) == 0


def test_one_point_is_a_rate():
    assert curve(((100,),), (2.0,)).at(25) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("axes", "seconds", "said"),
    [
        (((2, 2),), (1.0, 1.0), "axes"),
        (((2, 4),), (1.0,), "seconds = 1: allowed is 2"),
        (((2, 4),), (1.0, 0.0), "numbers above 0"),
        (((2, 4),), (1.0, math.nan), "numbers above 0"),
        ((), (), "axes"),
    ],
)
def test_a_curve_that_is_none_is_refused(axes, seconds, said):
    with pytest.raises(ConfigError, match=said):
        curve(axes, seconds)


def test_the_document_reads_back_as_it_was():
    machine = read_machine(SAMPLE)
    assert Machine.from_json(machine.to_json()) == machine


def changed(**values):
    found = json.loads(SAMPLE.read_text())
    found.update(values)
    return json.dumps(found)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is no JSON"),
        ("[]", "is no calibration"),
        ("{}", "is no calibration"),
        (changed(version=0), "has version 0; allowed is 1"),
        (changed(other=1), "other is unknown"),
        (json.dumps({key: value for key, value in json.loads(SAMPLE.read_text()).items() if key != "ranks"}), "ranks is missing"),
        (changed(curves=[{"what": "link"}]), "can't be read"),
        (changed(curves=[{"what": "a", "dtype": "", "axes": [[1]], "seconds": ["x"], "powers": None}]), "can't be read"),
    ],
)
def test_a_foreign_document_is_refused_with_the_remedy(text, said):
    with pytest.raises(ConfigError, match=said) as error:
        Machine.from_json(text, "here.json")
    assert str(error.value).startswith("here.json: ")
    assert "doctor --calibrate" in str(error.value)


def test_a_missing_document_names_its_path(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.json: can't be read \(No such file"):
        read_machine(tmp_path / "none.json")


def test_what_was_not_measured_is_said():
    machine = replace(read_machine(SAMPLE), curves=())
    with pytest.raises(ConfigError, match=r"link in bytes was not measured; write it again"):
        machine.seconds("link", "", 1)


def test_the_usual_path_is_in_the_users_cache():
    assert usual_path({"XDG_CACHE_HOME": "/cache"}) == Path("/cache/shardbook/calibration.json")
    assert usual_path({}) == Path.home() / ".cache/shardbook/calibration.json"


def test_a_clock_keeps_the_first_quartile_of_many_and_the_grid_in_order(monkeypatch):
    clock, ticks = Clock(torch.device("cpu")), iter(range(1, 1000))
    monkeypatch.setattr(clock, "alone", lambda work: (work(), next(ticks))[1])
    asked = []
    clock.curve("w", "fp32", ((1, 2), (3, 4)), lambda *sizes: lambda: asked.append(sizes), seconds=0.0)
    assert list(dict.fromkeys(asked)) == [(1, 3), (1, 4), (2, 3), (2, 4)]
    assert clock.curves[0].seconds == (2.5, 9.5, 16.5, 23.5)  # of seven each


def test_a_disk_is_really_read_and_written(tmp_path):
    clock = Clock(torch.device("cpu"))
    said = disk_rates.disk(clock, tmp_path, 2 * disk_rates.EXTENT_NBYTES[-1])
    assert [found.what for found in clock.curves] == ["disk.read", "disk.write", "disk.both"]
    assert all(found.axes == (disk_rates.EXTENT_NBYTES,) and found.seconds[0] < found.seconds[-1] for found in clock.curves)
    assert said == "" or "no direct I/O" in said
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_none_is_refused_before_anything_is_measured(tmp_path):
    with pytest.raises(ConfigError, match=r"--path .*missing: is no folder"):
        calibration.calibrate(ranks=None, output=None, path=tmp_path / "missing")
    with pytest.raises(ConfigError, match=r"--output .*its folder is missing"):
        calibration.calibrate(ranks="2", output=tmp_path / "missing" / "it.json", path=tmp_path)
    with pytest.raises(ConfigError, match="--ranks 0"):
        calibration.calibrate(ranks="0", output=None, path=tmp_path)


def test_details_without_calibrate_are_refused():
    with pytest.raises(ConfigError, match=r"--ranks 2: allowed is it with --calibrate"):
        doctor.doctor(ranks="2")


def test_doctor_tells_the_rates_of_a_calibration(tmp_path):
    told = calibration.surroundings(read_machine(SAMPLE), tmp_path)
    assert told["NUMA nodes"] == "can't be seen; ranks are not bound"
    assert told["PCI Express"] == "no accelerator can be seen on it"
    assert "GB/s device to host" in told["host copies"]
    assert told["disk"].startswith("each of 2 ranks; reads ")
    untold = calibration.surroundings(None, tmp_path)
    assert untold["disk"] == untold["host copies"] == "not measured; shardbook doctor --calibrate does"


@pytest.mark.ranks
@pytest.mark.full
def test_a_whole_calibration_takes_less_than_two_minutes(tmp_path):
    machine = calibration.calibrate(ranks=None, output=tmp_path / "it.json", path=tmp_path)
    assert machine.took < 120
    assert read_machine(tmp_path / "it.json") == machine
    known = {(one.what, one.dtype) for one in read_machine(SAMPLE).curves}
    assert {(one.what, one.dtype) for one in machine.curves} == known
