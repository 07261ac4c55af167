"""run.json: written whole or not at all, read back strictly."""

import json
import os

import pytest

from shardbook.document import VERSION, Baseline, Moved, RankMemory, Reconciliation, RunDocument, TierMemory, write_atomically
from shardbook.errors import ConfigError


def document(**changes):
    values = {
        "peak": {},
        "peak_phase": "",
        "peak_allocated": 2**30,
        "peak_reserved": None,
        "allocator": "by hand",
        "convention": "4 + 4 + 8",
        "num_parameters": 10,
        "settings": {"run.steps": {"value": 3, "origin": "default"}},
        "versions": {"torch": "2"},
        "data": "nothing",
        "losses": (5.5, None, 0.1),
        "validation_loss": None,
        "skipped_steps": (2,),
        "num_tokens": 30,
        "seconds": 0.1,
        "sent_nbytes": (1, 2),
        "sent_nbytes_per_step": 1,
        "memory": (RankMemory(rank=0, peak_allocated=None, peak_reserved=None, peak_resident=7),),
        "baseline": Baseline(steps=3, identical=False, difference="step 1: loss"),
        "tiers": (TierMemory(rank=0, tier="host", nbytes=7, accounts={"MOMENT": 7}),),
        "moved": (Moved(rank=0, link="device to host", nbytes=9, nbytes_per_step=3),),
    }
    return RunDocument(**(values | changes))


@pytest.mark.parametrize("changes", [{}, {"baseline": None}, {"memory": (), "losses": ()}])
def test_a_document_comes_back_equal(changes):
    assert RunDocument.from_json(document(**changes).to_json()) == document(**changes)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text[: len(text) // 2], "cut off"),
        (lambda text: "", "not JSON"),
        (lambda text: "[]", "not a run document"),
        (lambda text: '{"format": "other"}', 'it lacks "format": "shardbook run"'),
        (lambda text: edited(text, version=VERSION + 1), f"version {VERSION + 1}: this release of shardbook reads versions 2 and 3"),
        (lambda text: edited(text, version=None), "version None"),
        (lambda text: edited(text, extra=1), "extra is unknown"),
        (lambda text: json.dumps({k: v for k, v in json.loads(text).items() if k != "losses"}), "losses is missing"),
        (lambda text: edited(text, memory=[{"rank": 0}]), "peak_allocated is missing"),
        (lambda text: edited(text, baseline=3), "expected a table"),
    ],
)
def test_what_is_no_document_of_this_version_is_refused(change, said):
    with pytest.raises(ConfigError) as caught:
        RunDocument.from_json(change(document().to_json()))
    assert said in str(caught.value)


def test_a_document_of_the_version_before_is_read_as_one_without_other_tiers():
    peak = {"rank": 0, "step": 1, "phase": "step", "unit": "", "operator": "", "allocated": 5, "base": 0, "books": {"PARAM": 5}}
    now = document(reconciliations=(Reconciliation(**peak),), tiers=(), moved=())
    older = json.loads(now.to_json()) | {"version": 2}
    older = {name: value for name, value in older.items() if name not in ("tiers", "moved")}
    older["reconciliations"] = [{name: value for name, value in older["reconciliations"][0].items() if name not in ("host", "beside")}]
    assert RunDocument.from_json(json.dumps(older)) == now
    with pytest.raises(ConfigError, match="losses is missing"):
        RunDocument.from_json(json.dumps({name: value for name, value in older.items() if name != "losses"}))


def edited(text, **changes):
    return json.dumps(json.loads(text) | changes)


def test_a_loss_that_is_no_number_never_gets_into_the_file():
    with pytest.raises(ValueError, match="JSON compliant"):
        document(losses=(float("nan"),)).to_json()


def test_a_file_is_replaced_whole_or_left_alone(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "run.json"
    write_atomically(path, "first")
    write_atomically(path, "second")
    assert path.read_text() == "second"

    def stop(_handle):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", stop)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, "third")
    assert path.read_text() == "second"
    assert [entry.name for entry in path.parent.iterdir()] == ["run.json"]
