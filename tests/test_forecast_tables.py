"""What a forecast looks like on the terminal, from forecasts written by hand."""

import re
from dataclasses import replace

import pytest
from rich.console import Console

from shardbook.forecasting.conventions import Convention
from shardbook.forecasting.result import NOT_A_PEAK, Holding
from shardbook.report.forecast_bar import PATTERNS, bar, labels
from shardbook.report.forecast_beside import cases_table, stages_table
from shardbook.report.forecast_console import explained, show
from shardbook.report.forecast_figures import ABOVE, Case, forecast_json, held, margin, partitions, saved, scale_for, stacked, verdict
from tests.forecast_samples import GB, GIB, HOLDINGS, PEAK, on_device, peaked, persistent

STAGES = [Case(label=f"{stage}", forecast=peaked(stage=stage, sent=stage * GB)) for stage in range(4)]


def printed(draw, width=100):
    console = Console(width=width, highlight=False)
    with console.capture() as caught:
        draw(console)
    return caught.get()


def said(forecast, width=100, stages=(), *, compare=False):
    return printed(lambda console: show(forecast, console, stages, compare=compare), width)


def cells(text, account):
    line = next(line for line in text.splitlines() if f"│ {account} " in line)
    return [cell.strip() for cell in line.strip("│").split("│")]


def flat(text):
    return " ".join(text.split())


def test_each_account_has_bytes_share_and_ranks():
    text = said(peaked())
    assert cells(text, "PARAM")[1:] == ["PARAM", "4.00", "3.73", "16.7%", "replicated"]
    assert cells(text, "MOMENT")[1:] == ["MOMENT", "4.00", "3.73", "16.7%", "over 8"]
    assert cells(text, "ACTIVATION")[1:] == ["ACTIVATION", "12.00", "11.18", "50.0%", ""]
    assert cells(text, "peak")[1:] == ["peak", "24.00", "22.35", "100.0%", ""]
    assert cells(text, "above it")[1:] == ["above it", "0.30", "0.28", "", "at least"]


def test_each_row_has_the_pattern_of_its_part_of_the_bar():
    text = said(peaked())
    shown = [cells(text, account)[0] for account in PEAK]
    assert shown == [PATTERNS[number % 4] * 2 for number in range(len(PEAK))]
    drawn = bar(stacked(peaked()), 100).plain
    assert drawn in text
    assert re.sub(r"(.)\1*", r"\1", drawn) == "".join(pattern[0] for pattern in shown) + PATTERNS[len(PEAK) % 4]


def test_what_holds_nothing_at_the_peak_is_still_a_row():
    text = said(peaked(accounts={account: nbytes for account, nbytes in PEAK.items() if account != "GRAD"}, peak_allocated=23 * GB))
    assert cells(text, "GRAD") == ["", "GRAD", "0.00", "0.00", "", "over 8"]


def test_the_question_and_the_convention_are_always_said():
    text = flat(said(peaked(), 60))
    assert "toy-4b 4,000,000,000 parameters (catalog: written by hand); shardbook, stage 2, 8 ranks" in text
    assert "tensor-parallel 2, micro-batch 2 of 4,096 tokens" in text
    assert "convention in force: 2+2+4+8: 16 bytes per parameter" in text
    assert "convention in force: 2+2+4+8: 16 bytes per parameter" in flat(said(persistent(), 60))


def test_weights_stand_beside_the_training_state():
    text = said(replace(persistent(), weights=14 * GB, state=112 * GB))
    assert "weights alone 14.0 GB; training state 112.0 GB (104.3 GiB)" in text
    assert "largest unit and tensor: not known of a parameter count" in text
    assert "largest unit: layers.0, 200,000,000 elements; largest tensor: embedding.weight, 400,000,000 elements" in said(peaked(), 140)


def test_the_peak_is_named_and_so_is_what_is_none():
    text = said(peaked())
    assert "peak: 24.0 GB (22.4 GiB) in backward of layers.31; between steps 11.0 GB (10.2 GiB)" in text
    assert NOT_A_PEAK not in text
    assert f"persistent: 11.0 GB (10.2 GiB); {NOT_A_PEAK}" in flat(said(persistent()))


def test_phases_come_highest_first_and_say_which_are_of_the_first_step():
    text = said(peaked())
    at = [text.index(phase) for phase in ("│ backward of layers.31 ", "│ forward of head ", "│ step, first step ")]
    assert at == sorted(at)
    assert cells(text, "forward of head") == ["forward of head", "16.00", "14.90", "66.7%"]


def test_the_first_step_is_said_only_where_it_differs():
    like = [replace(phase, first=True) for phase in peaked().phases]
    text = said(peaked(phases=(*peaked().phases, *like)))
    assert (text.count("forward of head"), text.count("backward of layers.31 │")) == (1, 1)
    higher = replace(peaked().phases[0], first=True, accounts={"PARAM": GB})
    assert "forward of head, first step" in said(peaked(phases=(*peaked().phases, higher)))


def test_what_is_cast_from_the_master_counts_as_saved():
    bf16 = Convention.parse("shardbook-bf16")
    cast = peaked(stage=3, convention=bf16, holdings=(Holding(account="PARAM", total=0, here=0, partitions=8), *HOLDINGS[1:]))
    assert saved(cast) == (56 - 7 + 8) * GB
    padded = peaked(holdings=(Holding(account="PARAM", total=100, here=128, partitions=1),))
    assert (saved(padded), held(padded)) == (0, 128)


def test_a_peak_of_given_figures_is_said_to_be_one():
    assert "peak: 24.0 GB (22.4 GiB) by the figures that were given;" in said(peaked(peak_phase="given", peak_where=""))


def test_a_count_is_not_said_twice():
    assert said(peaked(model="4e+09 parameters")).startswith("4,000,000,000 parameters (")


def test_lines_above_the_allocator_say_that_nobody_has_held_them():
    text = said(peaked())
    assert cells(text, "context") == ["context", "0.300 - 0.800", "not validated; driver 550"]
    held = peaked(above=tuple(replace(line, validated=True) for line in peaked().above))
    assert "not validated" not in said(held)


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        (30 * GB, "fits: needs 24.3 GB (22.6 GiB) to 26.4 GB (24.6 GiB) of test-card's 30.0 GB (27.9 GiB); at least 3.6 GB (3.4 GiB) left"),
        (24 * GIB, "too close to call: needs 24.3 GB (22.6 GiB) to 26.4 GB (24.6 GiB) of test-card's 25.8 GB (24.0 GiB); between 0.592 GB"),
        (20 * GB, "does not fit: needs 24.3 GB (22.6 GiB) to 26.4 GB (24.6 GiB) of test-card's 20.0 GB (18.6 GiB); at least 4.3 GB"),
    ],
)
def test_the_verdict_has_its_margin(memory, words):
    assert words in flat(said(on_device(memory), 140))


def test_what_is_no_peak_never_fits():
    found = on_device(10**12)
    bare = replace(persistent(), inputs=found.inputs)
    assert verdict(found) == "fits"
    assert verdict(bare) == "too close to call"
    assert f"left; {NOT_A_PEAK}" in flat(said(bare, 140))
    assert verdict(peaked()) == ""
    assert margin(peaked()) is None


def test_the_moving_bottleneck():
    text = said(peaked())
    assert "largest now: ACTIVATION, 12.0 GB (11.2 GiB), 50.0%" in text
    assert "next lever: recompute each unit in backward; frees 11.0 GB (10.2 GiB) of ACTIVATION" in text
    assert "largest then: PARAM, 4.0 GB (3.7 GiB), 30.8%" in text
    assert "nothing is left to turn on MOMENT" in said(persistent())


def test_bytes_sent_stand_beside_bytes_saved_for_this_stage_and_for_each():
    assert "sent per rank and step: 14.0 GB (13.0 GiB); saved by partitioning: 49.0 GB (45.6 GiB) of 60.0 GB" in said(peaked(), 140)
    text = said(peaked(), stages=STAGES)
    assert cells(text, "2 <") == ["2 <", "11.00", "49.00", "2.00"]
    assert NOT_A_PEAK in text
    compared = said(peaked(), stages=STAGES, compare=True)
    assert cells(compared, "3") == ["3", "11.00", "49.00", "3.00", "24.00"]
    assert NOT_A_PEAK not in compared


def test_a_refused_stage_is_a_line_with_its_reason():
    text = printed(
        lambda console: console.print(stages_table([Case(label="0", forecast=None, why="DDP alone has it"), *STAGES[1:]], 3, peaks=True))
    )
    assert "stage 0: DDP alone has it" in text
    assert "│ 3 < " in text


def test_a_sweep_has_a_row_and_a_verdict_for_each_value():
    cases = [
        Case(label="1", forecast=on_device(20 * GB)),
        Case(label="8", forecast=on_device(40 * GB)),
        Case(label="9", forecast=None, why="odd"),
    ]
    text = printed(lambda console: console.print(cases_table("micro_batch", cases)))
    assert "micro_batch from 1 to 9, GB per rank" in text
    assert [cells(text, label)[-1] for label in ("1", "8")] == ["does not fit", "fits"]
    assert "micro_batch 9: odd" in text


def test_every_term_has_its_formula_and_source():
    text = printed(lambda console: console.print(explained(peaked())))
    assert "PARAM  4.0 GB (3.7 GiB)" in text
    assert "2 bytes x 2e9" in text
    assert "source: docs/accounts.md" in text


def test_remarks_are_all_said():
    text = said(peaked(host={"MOMENT": 2 * GB}, warnings=("another version",)))
    assert "in host memory: MOMENT 2.0 GB (1.9 GiB)" in text
    assert "not modelled: torch.compile" in text
    assert "warning: another version" in text


@pytest.mark.parametrize("width", [60, 80, 140])
@pytest.mark.parametrize(
    "forecast", [on_device(), persistent(), peaked(stage=3, ranks=16384, accounts=PEAK)], ids=["device", "bare", "many"]
)
def test_nothing_is_wider_than_the_terminal_and_no_figure_is_cut(forecast, width):
    text = said(forecast, width, STAGES, compare=True) + printed(lambda console: console.print(explained(forecast)), width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert "│ PARAM " in text


def test_markup_in_names_is_text():
    evil = "[bold]x[/nope]"
    text = said(
        peaked(model=evil, source=evil, peak_where=evil, largest_unit=(evil, 1), accounts={**PEAK, evil: GB}, not_modelled=(evil,)), 140
    )
    assert text.count(evil) == 6


def test_the_bar_is_as_wide_as_asked_and_the_limit_stands_where_it_is():
    parts = {"PARAM": 30, "MOMENT": 10}
    assert bar(parts, 40).plain == "█" * 30 + "▒" * 10
    assert bar(parts, 40, limit=20).plain == "█" * 20 + "┃" + "█" * 9 + "▒" * 10
    assert bar(parts, 40, limit=80).plain == "█" * 15 + "▒" * 5 + "·" * 19 + "┃"
    assert bar({}, 5).plain == "·····"
    assert labels(parts, 40) == "PARAM" + " " * 25 + "MOMENT"


def test_many_small_parts_do_not_add_up_to_more_than_the_width():
    assert len(bar({f"{number}": 1 for number in range(300)}, 50).plain) == 50


def test_small_models_are_shown_in_megabytes():
    scale = scale_for(5_000_000)
    assert (scale.decimal_unit, scale.in_decimal(1_500_000), scale.binary_unit, scale.in_binary(2**20)) == ("MB", "1.500", "MiB", "1.000")
    assert scale_for(120 * GB).in_decimal(31_406_250_000) == "31.4"
    assert scale_for(120 * GB).in_decimal(1) == "<0.1"


def test_figures_follow_from_the_forecast():
    assert saved(peaked()) == 49 * GB
    assert list(stacked(peaked())) == [*PEAK, ABOVE]
    assert stacked(peaked())[ABOVE] == 300_000_000
    assert ABOVE not in stacked(persistent())
    assert [partitions(peaked(), name) for name in ("PARAM", "GRAD", "COMM")] == ["replicated", "over 8", ""]


def test_json_has_every_field_and_the_verdict():
    found = forecast_json(on_device())
    assert found["accounts"] == PEAK
    assert (found["verdict"], found["needed"], found["margin"]) == (
        "too close to call",
        [24_300_000_000, 26_361_552_812],
        [24 * GIB - 26_361_552_812, 24 * GIB - 24_300_000_000],
    )
    assert found["peak_phase"] == "backward"
    assert forecast_json(persistent())["verdict"] is None
