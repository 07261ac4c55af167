"""Books and measurement around loops: accounts against figures worked out by hand, books against the allocator, to the byte."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import shardbook as sb
from benchmarks.measure import AllocationRecords
from shardbook.accounts import Account
from shardbook.document import RunDocument
from shardbook.ledger.measurement import Measurement

FP32 = 4
MIB = 2**20
HIDDEN = 16 * MIB


class Blocks(nn.Module):
    """Embedding, blocks and a head: enough of a language model to have units."""

    def __init__(self, width=64, vocab=512, num_blocks=3, *, recompute=False):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(num_blocks)
        )
        self.head = nn.Linear(width, vocab, bias=False)
        self.register_buffer("scale", torch.ones(1024))
        self.recompute = recompute

    def forward(self, tokens, targets):
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + (checkpoint(block, hidden, use_reentrant=False) if self.recompute else block(hidden))
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


def build(**options):
    torch.manual_seed(0)
    model = Blocks(**options)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def batch(step, sequences=4, tokens=32, vocab=512):
    drawn = torch.randint(0, vocab, (sequences, tokens + 1), generator=torch.Generator().manual_seed(step))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def step(model, optimizer, number=0, **shape):
    loss = model(*batch(number, **shape))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


def measured(model, optimizer, num_steps=3, **shape) -> RunDocument:
    with sb.measure(model, optimizer) as run:
        for number in range(num_steps):
            step(model, optimizer, number, **shape)
    return run.document()


def numel(model):
    return sum(parameter.numel() for parameter in model.parameters())


# ---- a plain loop --------------------------------------------------------------------------------------------------------


def test_accounts_of_a_plain_loop_are_those_worked_out_by_hand():
    model, optimizer = build()
    document = measured(model, optimizer)
    found = document.reconciliations[0]
    assert found.books["PARAM"] == numel(model) * FP32
    assert found.books["MOMENT"] == 2 * numel(model) * FP32 + FP32 * len(list(model.parameters()))
    assert found.books["BUFFER"] == 1024 * FP32
    assert found.books["INPUT"] == 4 * 32 * 8  # the tokens, which embedding's backward needs; the targets' node is done with them
    assert found.books["UNACCOUNTED"] == 0
    assert found.overstated == 0
    assert sum(found.books.values()) == found.allocated == document.peak_allocated
    assert document.peak == found.books
    assert document.engine == "plain"
    assert document.num_parameters == numel(model)
    # The peak is where the loss's gradient meets the log-probabilities: the logits' length three times.
    assert (found.step, found.phase, found.unit, found.operator) == (2, "backward", "root", "_log_softmax_backward_data.default")
    logits = 4 * 32 * 512 * FP32
    large = [item for item in found.items if item.nbytes == logits and item.account in ("ACTIVATION", "WORKSPACE")]
    assert [item.account for item in large].count("WORKSPACE") == 2
    assert any(item.site.startswith("test_measure.py:") and item.shape == (128, 512) for item in large)


def test_activations_are_what_autograd_saved_each_storage_once():
    width, rows = 64, 128
    model, optimizer = build(num_blocks=1, vocab=8)
    document = measured(model, optimizer, vocab=8)
    with sb.measure(model, optimizer) as run:
        loss = model(*batch(0, vocab=8))
        books = run.ledger.balances()
        loss.backward()
    # embedding's output is the block's input; both linears' inputs, gelu's input; the head's input; log-probabilities and their count
    rows_of_width = 2 * rows * width  # embedded (saved by the first linear), the sum (saved by the head)
    inner = 2 * rows * 4 * width  # before and after gelu
    assert books["ACTIVATION", "device"] == (rows_of_width + inner + rows * 8) * FP32 + FP32
    assert books["WORKSPACE", "device"] <= rows * width * FP32 + FP32  # the block's own output lives on in nobody's name, and the loss
    assert document.reconciliations[0].overstated == 0


def test_the_peak_is_that_of_independent_records():
    with AllocationRecords() as records:
        model, optimizer = build()
        step(model, optimizer, 0)
        with records.span("step"):
            step(model, optimizer, 1)
    model, optimizer = build()
    found = measured(model, optimizer).reconciliations[0]
    others = found.books["INPUT"]
    assert abs(found.allocated - records.peak("step").nbytes) <= others  # the records' span makes its own batch


def test_a_measured_loop_trains_to_the_same_bits():
    plain, plain_optimizer = build()
    losses = [step(plain, plain_optimizer, number) for number in range(4)]
    model, optimizer = build()
    with sb.measure(model, optimizer):
        assert [step(model, optimizer, number) for number in range(4)] == losses
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True))


def test_nothing_is_kept_alive_and_nothing_stays_hooked():
    model, optimizer = build()
    with sb.measure(model, optimizer) as run:
        output = model.head(torch.ones(2, 64))
        seen = weakref.ref(output)
        del output
        assert seen() is None
        step(model, optimizer)
    assert not model._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks
    gone = weakref.ref(model)
    del model, optimizer
    run.document()
    del run
    gc.collect()
    assert gone() is None


def test_a_tensor_hidden_from_the_books_is_unaccounted():
    model, optimizer = build()
    kept = []

    def hide(*_):
        kept.append(torch.UntypedStorage(HIDDEN))

    model.blocks[1].register_forward_pre_hook(hide)
    found = measured(model, optimizer, num_steps=1).reconciliations[0]
    assert found.books["UNACCOUNTED"] == HIDDEN
    assert found.items[0].account == "UNACCOUNTED"
    assert found.items[0].nbytes == HIDDEN
    assert found.items[0].unit in ("blocks.0", "blocks.1", "root")
    assert sum(found.books.values()) == found.allocated


def test_a_tensor_hidden_by_switching_the_books_off_is_unaccounted():
    model, optimizer = build()
    kept = []

    def hide(*_):
        with torch._C._DisableTorchDispatch():
            kept.append(torch.empty(HIDDEN, dtype=torch.uint8))

    model.blocks[2].register_forward_hook(hide)
    found = measured(model, optimizer, num_steps=1).reconciliations[0]
    assert found.books["UNACCOUNTED"] == HIDDEN


def test_an_older_storage_that_moves_is_not_counted_twice():
    reused = torch.zeros(MIB)
    model, optimizer = build()
    with sb.measure(model, optimizer) as run:
        reused.untyped_storage().resize_(0)
        reused.untyped_storage().resize_(8 * MIB)  # larger, so that it lies elsewhere
        reused.zero_()
        step(model, optimizer)
        held = run.ledger.balances()
    found = run.document().reconciliations[0]
    assert found.books["UNACCOUNTED"] == found.overstated == 0
    assert 8 * MIB <= found.allocated < 8 * MIB + 4 * MIB  # not with the 4 MiB that it had before
    assert sum(held.values()) < 12 * MIB


# ---- facts that come out by themselves -----------------------------------------------------------------------------------


def test_a_foreach_optimizer_has_temporaries_that_a_fused_one_has_not():
    totals = {}
    for kind in ("foreach", "fused"):
        torch.manual_seed(0)
        model = Blocks(width=256, vocab=16)
        optimizer = torch.optim.AdamW(model.parameters(), **{kind: True})
        found = measured(model, optimizer, vocab=16).reconciliations[0]
        assert found.books["UNACCOUNTED"] == 0
        totals[kind] = (found.phase, found.books.get("WORKSPACE", 0))
    assert totals["foreach"][0] == "step"
    assert totals["foreach"][1] >= numel(model) * FP32
    assert totals["fused"][1] < numel(model) * FP32 / 4


def test_logits_dominate_at_a_large_vocabulary():
    model, optimizer = build(vocab=8192, width=16)
    found = measured(model, optimizer, num_steps=2, vocab=8192).reconciliations[0]
    logits = 4 * 32 * 8192 * FP32
    assert [item.nbytes for item in found.items[:3]] == [logits] * 3
    assert found.unit == "root"


def test_recomputation_keeps_inputs_and_what_it_made_again_is_activation():
    kept, again = (measured(*build(recompute=recompute, vocab=8, width=128), vocab=8).reconciliations[0] for recompute in (False, True))
    assert again.books["ACTIVATION"] < kept.books["ACTIVATION"] / 2
    assert kept.books["UNACCOUNTED"] == 0
    assert again.books["UNACCOUNTED"] <= 3 * 5056  # states of the random number generator, which no operator makes
    for account in ("PARAM", "MOMENT", "BUFFER"):
        assert again.books[account] == kept.books[account]


def test_the_first_step_is_held_against_later_ones():
    steps = measured(*build(), num_steps=4).steps
    assert [found.step for found in steps] == [1, 2, 3, 4]
    assert steps[0].peak_allocated < steps[1].peak_allocated == steps[2].peak_allocated == steps[3].peak_allocated


def test_memory_over_a_step_adds_up_and_reaches_the_peak():
    document = measured(*build())
    curve = document.curves[0]
    assert max(curve.allocated) == document.peak_allocated
    assert list(curve.seconds) == sorted(curve.seconds)
    for place, allocated in enumerate(curve.allocated):
        assert sum(series[place] for series in curve.accounts.values()) == allocated
    phases = [phase for phase, _, _, _ in curve.spans]
    assert phases.index("forward") < phases.index("backward") < phases.index("step")
    assert {"embed", "blocks.0", "blocks.2", "head"} <= {unit for _, unit, _, _ in curve.spans}


# ---- loops of all kinds --------------------------------------------------------------------------------------------------


def test_model_and_optimizer_are_found():
    model, optimizer = build()
    with sb.measure() as run:
        for number in range(3):
            step(model, optimizer, number)
    assert run.document().peak == measured(*build()).peak
    assert run.num_steps == 3


def test_steps_that_are_marked_are_the_steps():
    model, optimizer = build()
    with sb.measure(model, optimizer) as run:
        for number in range(2):
            with run.step():
                for _ in range(2):
                    step(model, optimizer, number)
    assert [found.step for found in run.document().steps] == [1, 2]


def test_what_a_graph_needs_is_still_guarded_against_changes():
    with sb.measure() as run:
        x = torch.ones(4, requires_grad=True)
        y = x * 2
        z = (y * y).sum()
        y.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.backward()
    assert run.document().notes


def test_double_backward():
    def second_derivative():
        x = torch.full((3,), 2.0, requires_grad=True)
        (first,) = torch.autograd.grad((x**4).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        return second

    plain = second_derivative()
    with sb.measure():
        assert torch.equal(second_derivative(), plain)


def test_light_mode_sees_what_is_held_and_no_operator():
    model, optimizer = build()
    with sb.measure(model, optimizer, mode="light") as run:
        for number in range(3):
            step(model, optimizer, number)
        assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    document = run.document()
    assert document.mode == "light"
    assert document.peak_allocated is None
    assert document.peak == {
        "PARAM": numel(model) * FP32,
        "MOMENT": 2 * numel(model) * FP32 + FP32 * len(list(model.parameters())),
        "GRAD": numel(model) * FP32,
        "BUFFER": 1024 * FP32,
    }
    assert RunDocument.from_json(document.to_json()) == document


def test_what_belongs_to_somebody_else_is_left_out():
    other = torch.zeros(MIB)
    model, optimizer = build()
    run = Measurement(model, optimizer, mode="full", excluded=[other], first_step=7)
    with run, run.step():
        step(model, optimizer)
    found = run.document().reconciliations[0]
    assert found.step == 7
    assert found.books["UNACCOUNTED"] < MIB
    assert found.allocated < 4 * MIB


def test_the_memory_of_a_long_measurement_is_bounded():
    model, optimizer = build(width=8, vocab=16, num_blocks=1)
    with sb.measure(model, optimizer) as run:
        for number in range(60):
            step(model, optimizer, number, vocab=16)
        assert len(run._items.recent) < 300
        assert len(run._watcher.operators) < 300
    assert run.num_steps == 60


# ---- budgets and failures --------------------------------------------------------------------------------------------------


def test_a_budget_that_is_crossed_is_answered():
    model, optimizer = build(width=256)
    budget = 24 * MIB
    with sb.measure(model, optimizer, budget=budget) as run:
        with pytest.raises(sb.BudgetError, match=r"budget = 25,165,824 bytes: [\d,]+ more were wanted for"):
            for number in range(3):
                step(model, optimizer, number)
        run.document()
    found = run.document().shortage
    assert found.budget == budget
    assert sum(found.live.values()) > budget >= sum(found.live.values()) - found.asked
    assert found.phase in ("forward", "backward", "step")
    assert found.account in set(Account)
    assert 1 <= len(found.levers) <= 3
    assert all(0 < lever.nbytes < sum(found.live.values()) for lever in found.levers)


def test_a_budget_in_the_optimizer_names_its_step_and_the_fused_one():
    torch.manual_seed(0)
    model = Blocks(width=256, vocab=16)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    held = 4 * numel(model) * FP32
    with pytest.raises(sb.BudgetError), sb.measure(model, optimizer, budget=held + MIB // 2) as run:
        step(model, optimizer, vocab=16)
        step(model, optimizer, vocab=16)
    found = run.document().shortage
    assert found.phase == "step"
    assert found.levers[0].name == "optimizer with fused=True"


def test_an_allocator_that_has_no_memory_is_answered_with_what_was_held():
    model, optimizer = build()
    asked = 2**60
    with pytest.raises(RuntimeError, match="can't allocate memory"), sb.measure(model, optimizer) as run:
        step(model, optimizer)
        model(*batch(1))
        torch.empty(asked, dtype=torch.uint8)
    found = run.document().shortage
    assert found.asked == asked
    assert found.budget is None
    assert found.live["PARAM"] == numel(model) * FP32
    assert any("ended by RuntimeError" in note for note in run.document().notes)


def test_ledger_alone_gives_a_document():
    model, optimizer = build()
    engine = sb.Engine(model, optimizer, sb.ZeroConfig(stage=2))
    ledger = sb.Ledger(engine)
    engine.backward(engine(*batch(0)))
    engine.step()
    ledger.close()
    document = ledger.document()
    assert document.peak["PARAM"] == sum(nbytes for (name, _), nbytes in ledger.balances().items() if name == "PARAM")
    assert document.peak_allocated is None
    by_account = dict.fromkeys(ledger.balances(), 0)
    for (account, tier, _), nbytes in ledger.balances_by_unit().items():
        by_account[account, tier] += nbytes
    assert by_account == ledger.balances()
    assert RunDocument.from_json(document.to_json()) == document
    engine.close()
