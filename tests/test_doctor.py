"""``shardbook doctor``: a real round trip between two processes, and words for what is missing."""

import json
from importlib.metadata import PackageNotFoundError

import pytest

from shardbook.cli import doctor


@pytest.mark.ranks
def test_two_ranks_really_talk(capsys):
    assert doctor.doctor(json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"]
    assert {"python", "torch", "shardbook"} <= set(found["versions"])
    assert "gloo" in found["backends"]
    assert "cpu" in found["devices"]
    assert found["machine"]["cores"] >= 1
    assert found["checks"][-1]["found"].startswith("values right over gloo; gather ")


def test_without_torch_it_says_how_to_get_it(monkeypatch, capsys):
    def version(package):
        raise PackageNotFoundError(package)

    monkeypatch.setattr(doctor, "find_spec", lambda package: None)
    monkeypatch.setattr(doctor, "version", version)
    assert doctor.doctor() == 1
    said = capsys.readouterr().out
    assert "no torch not here" in said
    assert "pip install 'shardbook[train]'" in said
    assert "missing transformers" in said


@pytest.mark.ranks
def test_ranks_that_cannot_meet_are_a_failed_check(monkeypatch, capsys):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuchinterface0")
    assert doctor.doctor(json=True) == 1
    check = json.loads(capsys.readouterr().out)["checks"][-1]
    assert not check["ok"]
    assert "rank " in check["found"]
    assert "GLOO_SOCKET_IFNAME" in check["remedy"]
