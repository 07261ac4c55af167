"""Seconds of a step before it runs: what operators do, what the engine adds, and what is advised."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardbook.cli import main
from shardbook.config import Offload, Precision, Recompute, ZeroConfig
from shardbook.errors import ConfigError
from shardbook.facts.curves import Curve
from shardbook.facts.machine import Machine, read_machine
from shardbook.forecasting.advice import PLAIN
from shardbook.forecasting.disk import plan
from shardbook.forecasting.forecast import forecast
from shardbook.forecasting.question import ask
from shardbook.forecasting.state import state_of
from shardbook.forecasting.time import _walked, can_tell, seconds_of
from shardbook.models.config import DecoderConfig
from shardbook.models.decoder import Decoder

SAMPLE = Path(__file__).with_name("calibration_sample.json")
SIZES = DecoderConfig(vocab=512, layers=3, width=64, heads=4, kv_heads=4, ffn=192)
ROWS = 2 * 32
BLOCK = [(64, 64)] * 4 + [(64, 192)] * 2 + [(192, 64)]  # query, key, value, out, gate, up, down
FULL, SELECTIVE = Recompute(policy="full"), Recompute(policy="selective")
HOST, DISK = Offload(optimizer="host"), Offload(optimizer="disk", path=Path("there"))


@pytest.fixture(scope="module")
def model():
    with torch.device("meta"):
        return Decoder(SIZES)


@pytest.fixture(scope="module")
def sample():
    return read_machine(SAMPLE)


def asked(model, config, **more):
    numbers = {"ranks": 2, "micro_batch": 2, "sequence": 32, **more}
    return ask(model, config, engine="shardbook", convention=None, device=None, choices=None, **numbers)


def products(question, phase, *kinds):
    """(in, out) of each product in a phase, in no order."""
    deeds, _ = _walked(question, state_of(question))
    wanted = kinds or ("forward", "input", "weight")
    of_phase = {deed: times for deed, times in deeds.items() if deed.phase == phase and deed.what in {f"product.{kind}" for kind in wanted}}
    assert all(deed.sizes[0] == ROWS for deed in of_phase)
    return sorted(deed.sizes[1:] for deed, times in of_phase.items() for _ in range(times))


def test_forward_has_each_product_once_and_backward_two_of_each(model):
    question = asked(model, ZeroConfig())
    every = sorted([*BLOCK * 3, (64, 512)])
    assert products(question, "forward") == every
    assert products(question, "backward", "input") == products(question, "backward", "weight") == every
    assert products(question, "recompute") == []


def test_full_recomputation_stops_at_what_backward_needs_last(model):
    """The last product of a block saves its input alone: it is not computed again."""
    question = asked(model, ZeroConfig(recompute=FULL))
    assert products(question, "recompute") == sorted(BLOCK[:-1] * 3)
    assert products(question, "forward") == sorted([*BLOCK * 3, (64, 512)])
    assert products(asked(model, ZeroConfig(recompute=replace(FULL, every=2))), "recompute") == sorted(BLOCK[:-1] * 2)


def test_selective_recomputation_computes_every_second_product_again_and_no_attention(model):
    question = asked(model, ZeroConfig(recompute=SELECTIVE))
    assert products(question, "recompute") == sorted([BLOCK[1], BLOCK[3], BLOCK[5]] * 3)
    deeds, _ = _walked(question, state_of(question))
    assert [deed for deed in deeds if deed.phase == "recompute" and deed.what.startswith("attention")] == []


def test_attention_is_counted_by_heads_and_sequences(model):
    deeds, _ = _walked(asked(model, ZeroConfig(recompute=FULL)), state_of(asked(model, ZeroConfig())))
    found = {(deed.phase, deed.what): (deed.sizes, times) for deed, times in deeds.items() if deed.what.startswith("attention")}
    each = ((32, 16), 2 * 4 * 3)
    assert found == {
        ("forward", "attention.forward"): each,
        ("recompute", "attention.forward"): each,
        ("backward", "attention.backward"): each,
    }


def rates(**seconds):
    """A machine that takes no time for anything but what is given: seconds of one unit of size."""
    known = read_machine(SAMPLE)
    curves = tuple(
        Curve(
            what=one.what,
            dtype=one.dtype,
            axes=tuple((1,) for _ in one.axes),
            seconds=(seconds.get(one.what, 1e-30),),
            powers=one.powers,
        )
        for one in known.curves
    )
    return replace(
        known, curves=curves, numbers=dict.fromkeys(known.numbers, 0.0) | {"link.beside": 1.0, "whole.fp32": 1.0, "whole.bf16": 1.0}
    )


def test_products_at_one_rate_take_their_operations(model):
    machine = rates(**{f"product.{kind}": 1e-9 for kind in ("forward", "input", "weight")})
    found = seconds_of(asked(model, ZeroConfig(accumulate=3)), machine)
    operations = ROWS * (3 * sum(inner * outer for inner, outer in BLOCK) + 64 * 512)
    assert found.forward == pytest.approx(3 * operations * 1e-9)
    assert found.backward == pytest.approx(6 * operations * 1e-9)
    assert found.total == pytest.approx(9 * operations * 1e-9)


@pytest.mark.parametrize(("stage", "times"), [(1, 2), (2, 2), (3, 3)])
def test_a_link_takes_what_is_sent(model, stage, times):
    """Gathers twice, reductions and refreshes once each, of the other rank's shard."""
    config = ZeroConfig(stage=stage)
    sent = forecast(model, config, ranks=2, micro_batch=2, sequence=32).sent
    machine = rates(link=1e-9)
    latencies = times * 5 * machine.seconds("link", "", 4096)  # of root, three blocks and a head, counted elsewhere
    assert seconds_of(asked(model, config), machine).link == pytest.approx(sent * 1e-9, abs=2 * latencies)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_offload_to_the_host_copies_what_is_moved(model, stage, accumulate):
    config = ZeroConfig(stage=stage, accumulate=accumulate, offload=HOST)
    machine = rates(**{"copy.down": 1e-9, "copy.up": 1e-9})
    moved = forecast(model, config, ranks=2, micro_batch=2, sequence=32).moved
    # the own shard's way into a gather is a copy without offload too
    gathered = 0 if stage < 3 else 2 * accumulate * state_numel(model) * 4
    assert seconds_of(asked(model, config), machine).host == pytest.approx((sum(moved.values()) - gathered) * 1e-9)


def state_numel(model):
    structure = state_of(asked(model, ZeroConfig())).placement.structure
    return sum(-(-sum(-(-numel // 64) * 64 for numel in flat.numels) // 128) * 64 for unit in structure.units for flat in unit.flats)


def test_a_disk_goes_on_beside_the_step_and_counts_where_it_is_slower(model):
    quick, slow = rates(**{"disk.both": 1e-12, "optimizer.adamw-fused": 1e-9}), rates(**{"disk.both": 1e-9, "optimizer.adamw-fused": 1e-12})
    config = ZeroConfig(offload=DISK)
    assert seconds_of(asked(model, config), quick).disk == 0
    found = seconds_of(asked(model, config), slow)
    ahead = 12 * (64 + 2 * (1 << 14))  # read before: the final norm's chunk, and two of a block's, of the least length there is
    assert found.step + found.disk == pytest.approx((12 * state_numel(model) - ahead) * 1e-9)


def test_each_piece_that_comes_from_a_disk_costs_its_call(model):
    config, nothing = ZeroConfig(offload=DISK), rates()
    machine = replace(nothing, numbers={**nothing.numbers, "disk.piece": 1.0})
    question = asked(model, config)
    pieces = plan(state_of(question).placement.structure, config, per_element=2).num_pieces
    assert seconds_of(question, machine).disk == pytest.approx(pieces)
    assert seconds_of(asked(model, ZeroConfig()), machine).total < 1e-6


def test_each_unit_that_is_stepped_on_by_itself_on_the_host_costs_its_call(model):
    nothing = rates()
    machine = replace(nothing, numbers={**nothing.numbers, "unit.step.host": 1.0})
    host, plain, disk = (seconds_of(asked(model, ZeroConfig(offload=where)), machine) for where in (HOST, Offload(), DISK))
    assert host.host == pytest.approx(5 + 1)  # embedding, three blocks and head, and the root's norm
    assert plain.total < 1e-6
    assert disk.total < 1e-6


def test_tables_of_positions_are_short_rows_forward_and_backward(model):
    deeds, _ = _walked(question := asked(model, ZeroConfig()), state_of(question))
    short = {deed.phase: count for deed, count in deeds.items() if deed.what == "pass.short"}
    assert short == {"forward": 3 * 2 * 4, "backward": 3 * 2 * 4}  # queries and keys of three blocks, four products each


@pytest.mark.parametrize(("precision", "factor"), [("fp32", 2.0), ("bf16", 3.0)])
def test_all_but_the_disk_takes_as_much_longer_as_a_whole_step_was_measured_to(model, sample, precision, factor):
    config = ZeroConfig(offload=DISK, precision=Precision.preset(precision))
    parts = replace(sample, numbers={**sample.numbers, "whole.fp32": 1.0, "whole.bf16": 1.0})
    whole = replace(sample, numbers={**sample.numbers, "whole.fp32": 2.0, "whole.bf16": 3.0})
    alone, together = (seconds_of(asked(model, config), machine) for machine in (parts, whole))
    assert together.disk == alone.disk > 0
    assert together.total - together.disk == pytest.approx(factor * (alone.total - alone.disk))


def test_what_can_not_be_said_is_not(model, sample):
    for question in (asked(7e9, ZeroConfig(), micro_batch=None, sequence=None), asked("gpt2", ZeroConfig(), tensor=2)):
        assert not can_tell(question)
        assert seconds_of(question, sample) is None
    assert forecast(7e9, ranks=2, machine=sample).advice is None


def test_a_calibration_that_lacks_something_says_so(model, sample):
    machine = replace(sample, curves=tuple(one for one in sample.curves if one.what != "squares"))
    with pytest.raises(ConfigError, match="squares in fp32 was not measured"):
        seconds_of(asked(model, ZeroConfig()), machine)


def test_types_have_their_own_rates(model, sample):
    question = asked(model, ZeroConfig(precision=Precision.preset("bf16")))
    deeds, _ = _walked(question, state_of(question))
    assert seconds_of(question, sample).total > 0
    assert {deed.dtype for deed in deeds if deed.what.startswith("product")} == {"bf16"}


# ---- advice ------------------------------------------------------------------------------------------------------------------


def advice(model, config, machine, budget=None, **more):
    return forecast(model, config, ranks=2, micro_batch=2, sequence=32, machine=machine, budget=budget, **more).advice


def peak(model, config):
    return forecast(model, config, ranks=2, micro_batch=2, sequence=32).peak_allocated


def test_what_fits_is_left_as_it_is_and_offload_is_advised_against_with_its_cost(model, sample):
    enough = peak(model, ZeroConfig(stage=2))
    plain = advice(model, ZeroConfig(stage=2), sample, enough)
    assert plain.recommended == plain.asked == PLAIN
    for offload, name in ((HOST, "optimizer on the host"), (DISK, "optimizer on a disk")):
        found = advice(model, ZeroConfig(stage=2, offload=offload), sample, enough)
        assert (found.asked, found.recommended) == (name, PLAIN)
        assert found.words[0].startswith(f"advised against: {name}, which costs ")
        assert found.way(name).cost == pytest.approx(found.way(name).seconds / found.way(PLAIN).seconds - 1)


def test_what_does_not_fit_otherwise_is_advised_with_its_cost(model, sample):
    host = peak(model, ZeroConfig(stage=2, offload=HOST))
    assert host < min(peak(model, ZeroConfig(stage=2)), peak(model, ZeroConfig(stage=2, recompute=FULL)))
    found = advice(model, ZeroConfig(stage=2), sample, host)
    assert found.recommended == "optimizer on the host"
    assert found.words == (f"advised: optimizer on the host, which costs {said(found)}: without, it does not fit",)
    assert found.way("optimizer on the host").freed == peak(model, ZeroConfig(stage=2)) - host


def said(found):
    way = found.way(found.recommended)
    return f"next to nothing ({way.cost:+.1%} of the step)" if abs(way.cost) <= 0.03 else f"{way.cost:.0%} of the step"


def test_the_fastest_of_those_that_fit_is_advised(model, sample):
    least = min(peak(model, ZeroConfig(recompute=FULL, offload=one)) for one in (HOST, replace(HOST, params="host")))
    found = advice(model, ZeroConfig(), sample, least)
    fitting = [way for way in found.ways if way.fits == "fits"]
    assert found.recommended == min(fitting, key=lambda way: way.seconds).name
    assert advice(model, ZeroConfig(), sample, 1).recommended is None
    assert advice(model, ZeroConfig(), sample, 1).words[0].startswith("none of these fits")


def test_too_little_host_memory_rules_a_way_out(model, sample):
    poor = replace(sample, numbers={**sample.numbers, "host.nbytes": 1000.0})
    found = advice(model, ZeroConfig(stage=2), poor, peak(model, ZeroConfig(stage=2, offload=HOST)))
    assert found.way("optimizer on the host").why_not.startswith("needs ")
    assert found.recommended is None


def test_without_a_budget_nothing_is_advised(model, sample):
    found = advice(model, ZeroConfig(stage=1), sample)
    assert found.recommended == PLAIN
    assert {way.fits for way in found.ways} == {""}
    assert [way.name for way in advice(model, ZeroConfig(stage=0), sample).ways] == [PLAIN, "selective recompute", "full recompute"]


def test_a_plan_of_another_kind_is_a_way_of_its_own(model, sample):
    found = advice(model, ZeroConfig(recompute=replace(FULL, every=2)), sample)
    assert found.asked == "as asked"
    assert found.way(PLAIN).seconds < found.way("as asked").seconds < found.way("full recompute").seconds


def test_the_command_times_a_step(capsys):
    arguments = ["forecast", "gpt2", "--ranks", "2", "--micro-batch", "1", "--sequence", "64", "--machine", str(SAMPLE)]
    assert main.run([*arguments, "--budget", "100GiB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step_seconds"] > 0
    assert found["advice"]["recommended"] == PLAIN
    assert found["advice"]["ways"][0]["fits"] == "fits"
    assert main.run(arguments) == 0
    said = capsys.readouterr().out
    assert "capacity or throughput" in said
    assert "a step takes" in said


def test_a_machine_that_is_none_is_wrong_usage(tmp_path, capsys):
    assert main.run(["forecast", "gpt2", "--machine", str(tmp_path / "none.json")]) == 2
    assert "none.json: can't be read" in capsys.readouterr().err


def test_the_sample_is_a_calibration(sample):
    assert isinstance(sample, Machine)
    assert sample.ranks == 2
