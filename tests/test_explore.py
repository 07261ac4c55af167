"""What the notebook computes, without the notebook: forecasts of settings, their command lines, pictures, and small real runs."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from html import unescape

import pytest

pytest.importorskip("altair", reason="the notebook's pictures need the extra: pip install 'shardbook[explore]'")
pytest.importorskip("vl_convert", reason="the notebook's pictures need the extra: pip install 'shardbook[explore]'")

from shardbook.cli.main import run
from shardbook.errors import ConfigError
from shardbook.explore import cases, knobs, measured, pictures, runs, settings, stacks, words
from shardbook.explore.cases import state_by_ranks
from shardbook.explore.settings import Settings, answer, settled, stages
from shardbook.explore.small import Small, small, small_ranks, small_recomputed, small_stages
from shardbook.forecasting.result import NOT_A_PEAK
from tests.forecast_samples import peaked

GIB = 2**30
PAPER = Settings(model="7.5e9", ranks=64, convention="2+2+4+8", micro_batch=None, sequence=None, device="")
SETTINGS = {
    "as it opens": Settings(),
    "a count": PAPER,
    "gpt2 in fp32": Settings(model="gpt2", precision="fp32", stage=1, ranks=4, micro_batch=4, sequence=512, device="24GiB"),
    "recomputed": Settings(model="gpt2", recompute="full", micro_batch=8, sequence=1024),
    "selective": Settings(model="gpt2", recompute="selective", micro_batch=8, sequence=1024),
    "fsdp2": Settings(model="gpt2-medium", engine="fsdp2", sequence=1024),
    "megatron": Settings(model="gpt2-medium", engine="megatron", stage=1, sequence=1024),
    "deepspeed": Settings(model="gpt2-medium", engine="deepspeed", stage=2, sequence=1024),
    "ddp": Settings(model="gpt2", engine="ddp", stage=0, sequence=1024, device=""),
    "budgets": Settings(model="7e9", micro_batch=None, sequence=None, state=60, activations=20.5, temporary=0.1),
    "an edited convention": Settings(model="7e9", convention="2+2+4+8", grad=4, moment=0.5, micro_batch=None, sequence=None),
    "an edit of the engine's own": Settings(model="gpt2", stage=2, param=4, micro_batch=1, sequence=256),
}


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_the_command_line_says_what_the_controls_say(setting, capsys):
    typed = setting.command_line.split()
    assert typed[0] == "shardbook"
    code = run([*typed[1:], "--json"])
    told = json.loads(capsys.readouterr().out)
    here = answer(setting)
    assert code in (0, 1)
    for name in ("accounts", "persistent", "peak_allocated", "peak_phase", "sent", "state", "weights", "engine", "ranks", "stage"):
        assert told[name] == getattr(here, name), name
    assert told["convention"]["name"] == here.convention.name
    assert told["inputs"] == dict(here.inputs)


def test_every_control_has_a_part_in_the_command_line():
    changes = {
        "model": "gpt2", "ranks": 16, "stage": 1, "engine": "deepspeed", "precision": "fp32", "convention": "adam-8bit", "param": 3.0,
        "grad": 3.0, "master": 3.0, "moment": 3.0, "micro_batch": 2, "sequence": 1024, "recompute": "full", "device": "a40", "state": 1.0,
        "activations": 1.0, "temporary": 1.0,
    }  # fmt: skip
    assert set(changes) == set(Settings.__dataclass_fields__)
    lines = {replace(Settings(), **{name: value}).command_line for name, value in changes.items()}
    assert len(lines | {Settings().command_line}) == len(changes) + 1


def test_state_against_the_number_of_ranks():
    found = state_by_ranks(PAPER)
    assert [ranks for ranks, _ in found["stage 0"]] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
    on_64 = [round(dict(points)[64] / 1e9, 1) for points in found.values()]
    assert on_64 == [120.0, 31.4, 16.6, 1.9]
    assert {dict(points)[1] for points in found.values()} == {120 * 10**9}


def test_an_engine_without_a_stage_is_asked_about_the_nearest():
    setting, notes = settled(Settings(engine="megatron", stage=3))
    assert (setting.stage, notes) == (1, ("megatron has no stage 3: this is stage 1",))
    found = stages(Settings(model="gpt2", engine="ddp", stage=0, sequence=512))
    assert [case.forecast is None for case in found] == [False, True, True, True]
    assert "allowed is 0 with engine='ddp'" in found[1].why
    assert text(stacks.of_cases(found)).endswith(f"stage 3: {found[3].why}")
    assert stacks.of_cases(found).count('class="sb-row"') == 1


def test_a_sequence_that_the_model_has_not_is_cut_and_half_a_batch_left_out():
    setting, notes = settled(Settings(model="gpt2", sequence=4096))
    assert (setting.sequence, notes) == (1024, ("gpt2 has no sequence above 1,024: this is 1,024",))
    setting, notes = settled(Settings(micro_batch=None))
    assert (setting.micro_batch, setting.sequence) == (None, None)
    assert len(notes) == 1
    assert settled(PAPER) == (PAPER, ())
    with pytest.raises(ConfigError, match="llama-2-7b"):
        settled(Settings(model="llama-2-8b"))


def test_budgets_and_terms_replace_what_they_name():
    told = answer(replace(PAPER, state=60, activations=20.5))
    assert told.accounts["ACTIVATION"] == int(20.5 * GIB)
    assert sum(told.accounts.values()) == 60 * GIB + int(20.5 * GIB)
    assert replace(PAPER, state=0.0).arguments.get("state") is None
    edited = replace(PAPER, grad=4.0, moment=2.0)
    assert edited.edited_convention == "2+2+4+8,grad=4,moment=2"
    assert answer(edited).state == 12 * 7_500_000_000
    assert replace(Settings(), grad=2.0).edited_convention == "shardbook-bf16,grad=2"


def test_the_catalog_is_listed_from_small_to_large():
    names = settings.models()
    sizes = [settings.facts(name).num_parameters for name in names]
    assert sizes == sorted(sizes)
    assert {"gpt2", "llama-2-7b", "llama-3.1-405b"} <= set(names)


def test_what_is_read_first():
    found = text(pictures.cards(answer(Settings(model="gpt2", sequence=1024))))
    assert "peak of a rank" in found
    assert "on h100-80gb fits" in found
    assert "weights alone 0.249 GB" in found
    bare = text(pictures.cards(answer(PAPER)))
    assert NOT_A_PEAK in bare
    assert "h100" not in bare


def test_partitioned_or_replicated():
    at_stage_1 = text(pictures.residence(answer(replace(PAPER, stage=1))))
    assert "PARAM 15.0 15.0 replicated" in at_stage_1
    assert "MASTER 30.0 0.5 partitioned over 64" in at_stage_1
    assert "state 120.0 31.4 26.2% here" in at_stage_1
    assert "PARAM 0.0 0.0 cast from the master" in text(pictures.residence(answer(Settings(micro_batch=None, sequence=None))))
    assert "MASTER 0.00 0.00 not kept" in text(pictures.residence(answer(replace(PAPER, convention="sgd"))))


def test_the_bottleneck_moves_in_words():
    found = text(pictures.moving_bottleneck(peaked()))
    assert "largest now: ACTIVATION" in found
    assert "largest then:" in found
    assert "not modelled: " in text(pictures.moving_bottleneck(answer(PAPER)))


def test_the_lines_are_drawn_and_told():
    drawn = pictures.by_ranks(state_by_ranks(PAPER), 80 * GIB)
    assert drawn.count("<svg") == 2  # one for each width
    assert all(drawn.count(f">stage {stage}<") == 2 for stage in range(4))
    assert "stage 3 on 1,024 ranks: 0.117 GB (0.109 GiB)" in drawn
    assert "The line across is the device's 85.9 GB (80.0 GiB)." in text(drawn)
    assert "the device's" not in text(pictures.by_ranks(state_by_ranks(PAPER)))


def test_saved_and_sent_stand_beside_each_other():
    found = text(pictures.saved_and_sent(stages(replace(PAPER, convention="2+2+4+8"))))
    held = re.findall(r"stage (\d) ([\d.]+) ([\d.]+) ([\d.]+)", found)
    assert [(stage, float(here), float(saved)) for stage, here, saved, _ in held] == [
        ("0", 120.0, 0.0), ("1", 31.4, 88.6), ("2", 16.6, 103.4), ("3", 1.9, 118.1),
    ]  # fmt: skip
    assert "bytes, not seconds" in found


def test_weights_alone_are_drawn_beside_the_training_state():
    found = words.weights_and_state(answer(replace(PAPER, model="7e9")))
    assert "weights alone 14.0 GB (13.0 GiB)" in text(found)
    assert "training state 112.0 GB (104.3 GiB)" in text(found)
    assert "14.0 GB of weights, 112.0 GB of state, 8.0 times as much" in text(found)
    cast = answer(Settings())  # stage 3 keeps no 16-bit parameters, and the whole state has them all the same
    assert f"{cast.state / 1e9:.1f} GB of state" in text(words.weights_and_state(cast))


def test_the_divide_by_eight_question_is_answered_from_the_figures():
    found = cases.one_and_eight(Settings(model="gpt2", precision="fp32", micro_batch=4, sequence=1024, stage=0))
    one, eight = (case.forecast for case in found)
    assert (one.stage, eight.stage, one.ranks, eight.ranks) == (3, 3, 1, 8)
    said = words.divided(found)
    assert said.startswith(f"Here: no. The peak is {eight.peak_allocated / one.peak_allocated:.3f} of one rank's")
    assert "ACTIVATION" in said
    assert "MOMENT" not in said
    assert words.divided(cases.one_and_eight(PAPER)).startswith("Only state is known")
    assert words.divided(found[:1]) == ""


def test_recomputation_moves_activations_only():
    kept, selective, full = (case.forecast for case in cases.recomputations(Settings(model="gpt2", micro_batch=8, sequence=1024)))
    assert kept.accounts["ACTIVATION"] > selective.accounts["ACTIVATION"] > full.accounts["ACTIVATION"]
    assert {one.persistent for one in (kept, selective, full)} == {kept.persistent}


@pytest.mark.parametrize(
    ("read", "said"),
    [
        (lambda: knobs.terms({"grad": "-1"}), "grad = '-1': allowed is 0 to 64"),
        (lambda: knobs.terms({"grad": "nan"}), "grad = 'nan'"),
        (lambda: knobs.terms({"grad": "four"}), "grad = 'four'"),
        (lambda: knobs.budgets({"state": "60 G"}), "state = '60 G': allowed is a number of GiB"),
        (lambda: knobs.budgets({"state": "-1"}), "state = '-1'"),
        (lambda: knobs.budgets({"state": "inf"}), "state = 'inf'"),
    ],
)
def test_a_field_that_is_no_number_is_named(read, said):
    with pytest.raises(ConfigError, match="empty keeps the") as raised:
        read()
    assert said in str(raised.value)


def test_differences_have_their_sign():
    found = text(pictures.differences({"PARAM": 2 * 10**9, "GRAD": 10**9}, {"PARAM": 10**9, "COMM": 10**9}))
    assert "PARAM 2.000 1.000 +1.000 +100.0%" in found
    assert "COMM 0.000 1.000 -1.000 -100.0%" in found
    assert "GRAD 1.000 0.000 +1.000" in found
    assert "peak 3.000 2.000 +1.000 +50.0%" in found


def text(markup):
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", markup)).split())


def test_the_small_decoder_is_forecast_under_every_knob():
    by_stage = [case.forecast.peak_allocated for case in small_stages(Small())]
    assert by_stage == sorted(by_stage, reverse=True)
    kept, recomputed = (case.forecast for case in small_recomputed(Small(ranks=1, stage=0)))
    assert recomputed.accounts["ACTIVATION"] < kept.accounts["ACTIVATION"] / 3
    assert [kept.accounts[name] for name in ("PARAM", "MOMENT")] == [recomputed.accounts[name] for name in ("PARAM", "MOMENT")]
    one, eight = (case.forecast for case in small_ranks(Small(), (1, 8)))
    assert eight.persistent / one.persistent < 0.13
    assert eight.peak_allocated / one.peak_allocated > 0.3


def command(program, **more):
    return runs.Command(typed="typed", arguments=[sys.executable, "-c", program], **more)


def test_a_run_comes_back_as_it_ended(monkeypatch, tmp_path):
    pytest.importorskip("torch")
    ended = runs.perform(command("print('said')"))
    assert (ended.text, ended.ended_well, ended.document, ended.typed) == ("said", True, None, "typed")
    failed = runs.perform(command("print('so far'); import sys; sys.exit('what was wrong')"))
    assert not failed.ended_well
    assert set(failed.text.splitlines()) == {"so far", "what was wrong"}
    monkeypatch.setattr(runs, "LONGEST_SECONDS", 1)
    late = runs.perform(command("print('begun', flush=True); import time; time.sleep(30)"))
    assert (late.text, late.ended_well) == ("begun\n\nstopped after 1 seconds", False)
    absent = runs.perform(runs.Command(typed="", arguments=[str(tmp_path / "nothing")]))
    assert absent.text.startswith("could not be started")
    lacking = runs.perform(command("print('said')", needs=tmp_path / "example.py"))
    assert str(tmp_path / "example.py") in lacking.text


def test_without_torch_a_run_says_so(monkeypatch):
    monkeypatch.setattr(runs, "find_spec", lambda name: None)
    assert runs.perform(command("print('said')")).text == runs.NO_TORCH


@pytest.mark.slow
@pytest.mark.parametrize("policy", [pytest.param("none", marks=pytest.mark.full), "full"])
def test_recomputation_is_measured_as_it_is_forecast(policy):
    pytest.importorskip("torch")
    begun = runs.recomputing(policy)
    ended = runs.perform(begun)
    assert ended.ended_well, ended.text
    assert f"recompute {policy}: peak " in ended.text
    assert not begun.out.exists()
    over = measured.overlay(ended.document, peaked())
    own = small(Small(ranks=1, stage=0, recompute=policy))
    assert over.forecast.accounts == own.accounts
    assert sum(over.measured.values()) == pytest.approx(own.peak_allocated, rel=0.001)
    assert "own settings" in over.notes[0]


@pytest.mark.slow
def test_a_training_run_lies_over_its_forecast(tmp_path):
    pytest.importorskip("torch")
    ended = runs.perform(runs.train(Small(ranks=1, stage=0, precision="2+2+4+8")))
    assert ended.ended_well, ended.text
    path = tmp_path / "run.json"
    path.write_text(ended.document.to_json(), encoding="utf-8")
    assert measured.read(path) == measured.read(tmp_path) == ended.document
    over = measured.overlay(ended.document, peaked())
    assert over.forecast.peak_allocated == pytest.approx(ended.document.peak_allocated, rel=0.001)


def test_a_run_that_says_too_little_is_held_against_the_controls():
    from tests.report_documents import full

    document = full()
    assert words.laid_over(None, peaked()) == ""
    assert "Live bytes at the peak" in words.laid_over(document, peaked())
    over = measured.overlay(replace(document, settings={}), peaked())
    assert over.forecast == peaked()
    assert "forecast of the controls" in over.notes[0]
    unknown = {"model.layers": {"value": 2}, "zero.stage": {"value": 3}, "zero.nothing": {"value": 1}}
    assert measured.forecast_of(replace(document, settings=unknown)) is None
    nothing = replace(document, reconciliations=(), peak={})
    with pytest.raises(ConfigError, match="kept no books"):
        measured.overlay(nothing, peaked())
    assert words.laid_over(nothing, peaked()) == ""
    with pytest.raises(ConfigError, match="does not say what was trained"):
        words.compared(replace(document, settings={}), None)


def test_a_file_that_is_no_run_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing\.json: can't be read"):
        measured.read(tmp_path / "nothing.json")
    (tmp_path / "other.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"other\.json: "):
        measured.read(tmp_path / "other.json")
    (tmp_path / "picture.png").write_bytes(b"\x89\xff")
    with pytest.raises(ConfigError, match="it is not text"):
        measured.read(tmp_path / "picture.png")


def test_nothing_but_the_app_needs_marimo_or_torch():
    names = "measured, pictures, runs, settings, small"
    program = f"import sys; from shardbook.explore import {names}; assert not {{'marimo', 'torch'}} & set(sys.modules)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 0, ended.stderr
