"""Books against the allocator on real ranks: shardbook's stages, DDP and FSDP2, and what is known about each."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import shardbook as sb
from shardbook.document import RunDocument
from shardbook.forecasting.closed_form import closed_form, padding
from shardbook.models.config import DecoderConfig
from shardbook.models.decoder import Decoder
from tests import ranks
from tests.sampled import every

NUM_RANKS = 2
VOCAB = 512
LLAMA = DecoderConfig(layers=3, width=96, heads=6, kv_heads=2, ffn=256, vocab=VOCAB)


class GPT(nn.Module):
    """Learned positions, attention and a feed-forward of four widths; ``odd`` makes one block's much larger than the others'."""

    def __init__(self, width=96, num_blocks=3, odd=0):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, width), nn.Embedding(64, width)
        inner = [4 * width] * num_blocks
        if odd:
            inner[1] = odd
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, size, 0.0, "gelu", batch_first=True, norm_first=True) for size in inner
        )
        self.head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, tokens, targets):
        hidden = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            hidden = block(hidden)
        return functional.cross_entropy(self.head(hidden).float().flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


def build(kind, odd=0):
    torch.manual_seed(0)
    model = GPT(odd=odd) if kind == "gpt" else Decoder(LLAMA)
    return model, lambda: torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def batch(step):
    drawn = torch.randint(0, VOCAB, (4, 65), generator=torch.Generator().manual_seed(step * NUM_RANKS + dist.get_rank()))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


# ---- jobs ------------------------------------------------------------------------------------------------------------------


def of_shardbook(stage, precision, kind, accumulate=1, odd=0):
    """Document, losses, and by formula: bytes that persist, and their padding."""
    model, optimizer = build(kind, odd)
    config = sb.ZeroConfig(stage=stage, precision=precision, accumulate=accumulate, clip_grad_norm=1.0)
    engine = sb.Engine(model, optimizer(), config)
    losses = []
    with sb.measure(model, engine.optimizer) as run:
        online = dict(run.ledger.balances())
        for step in range(3):
            for micro in range(accumulate):
                loss, weight = engine(*batch(step * accumulate + micro))
                engine.backward(loss, weight=weight)
                del loss
            losses.append(engine.step().loss)
    persistent = {account: nbytes for account, nbytes in closed_form(engine.structure(), config).items() if nbytes}
    ledger = sb.Ledger(engine)
    held = dict(ledger.balances())
    ledger.close()
    engine.close()
    for account in ("PARAM", "MASTER"):
        assert online.get((account, "device"), 0) == held.get((account, "device"), 0)  # each byte once, whoever told of it first
    return run.document(), losses, persistent, held, padding(engine.structure(), config)


def of_shardbook_unmeasured(stage, precision, kind):
    model, optimizer = build(kind)
    engine = sb.Engine(model, optimizer(), sb.ZeroConfig(stage=stage, precision=precision, clip_grad_norm=1.0))
    losses = []
    for step in range(3):
        loss, weight = engine(*batch(step))
        engine.backward(loss, weight=weight)
        losses.append(engine.step().loss)
    engine.close()
    return losses


def of_peer(peer, dtype, kind):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model, make = build(kind)
    called = model
    if peer.startswith("ddp"):
        called = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=peer == "ddp")
    else:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if dtype == "bf16" else MixedPrecisionPolicy()
        mesh = init_device_mesh("cpu", (NUM_RANKS,))
        for block in model.get_submodule("blocks").children():
            fully_shard(block, mesh=mesh, reshard_after_forward=peer == "fsdp2", mp_policy=policy)
        fully_shard(model, mesh=mesh, reshard_after_forward=peer == "fsdp2", mp_policy=policy)
    optimizer = make()
    with sb.measure(called, optimizer) as run:
        for step in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bf16" and peer.startswith("ddp")):
                loss, weight = called(*batch(step))
            (loss / weight).backward()
            del loss
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return run.document(), sum(parameter.numel() for parameter in model.parameters())


def of_hidden(stage):
    """16 MiB that no operator makes, kept by one block's forward."""
    model, optimizer = build("gpt")
    engine = sb.Engine(model, optimizer(), sb.ZeroConfig(stage=stage))
    kept = []
    model.blocks[1].register_forward_pre_hook(lambda *_: kept.append(torch.UntypedStorage(2**24)) if not kept else None)
    with sb.measure(model, engine.optimizer) as run:
        for step in range(2):
            loss, weight = engine(*batch(step))
            engine.backward(loss, weight=weight)
            engine.step()
    engine.close()
    return run.document()


def of_light():
    model, optimizer = build("gpt")
    engine = sb.Engine(model, optimizer(), sb.ZeroConfig(stage=3))
    with sb.measure(model, engine.optimizer, mode="light") as run:
        for step in range(3):
            loss, weight = engine(*batch(step))
            engine.backward(loss, weight=weight)
            engine.step()
    engine.close()
    return run.document(), dict(closed_form(engine.structure(), engine.config))


# ---- tests -----------------------------------------------------------------------------------------------------------------


def check(document: RunDocument, most: float) -> None:
    assert [found.rank for found in document.reconciliations] == list(range(NUM_RANKS))
    assert [note for note in document.notes if "had no part in it" not in note] == []  # other tests leave tensors in these processes
    for found in document.reconciliations:
        assert found.books["UNACCOUNTED"] <= most * found.allocated, [item for item in found.items if item.account == "UNACCOUNTED"]
        assert found.overstated == 0
        assert sum(found.books.values()) == found.allocated
    assert document.peak_allocated == max(found.allocated for found in document.reconciliations)
    assert RunDocument.from_json(document.to_json()) == document


@pytest.mark.ranks
@pytest.mark.parametrize("stage, precision, kind", every(3, [0, 1, 2, 3], ["fp32", "bf16"], ["gpt", "llama"]))
def test_every_byte_of_a_stage_is_in_an_account(stage, precision, kind):
    accumulate = 2 if kind == "llama" else 1
    answers = ranks.call(NUM_RANKS, of_shardbook, stage, sb.Precision(param=precision), kind, accumulate)
    for rank, (document, _, formula, held, _) in enumerate(answers):
        check(document, 0.001 if precision == "fp32" else 0.01)
        assert document.engine == f"shardbook stage {stage}"
        found = document.reconciliations[rank]
        for account in ("PARAM", "MASTER", "MOMENT"):
            assert found.books.get(account, 0) == formula.get(account, 0) == held.get((account, "device"), 0)
        for account in ("GATHERED", "GRAD_FULL", "COMM", "GRAD"):
            assert found.books.get(account, 0) <= formula.get(account, 0)
        assert len(document.times) == NUM_RANKS
        assert all(time.exposed + time.compute == pytest.approx(time.seconds, rel=1e-6) for time in document.times)


@pytest.mark.ranks
@pytest.mark.parametrize("precision", [sb.Precision(), sb.Precision(param="bf16", grad="bf16", keep_param_shard=True)])
def test_a_measured_training_has_the_same_bits(precision):
    plain = ranks.call(NUM_RANKS, of_shardbook_unmeasured, 3, precision, "gpt")
    assert [losses for _, losses, *_ in ranks.call(NUM_RANKS, of_shardbook, 3, precision, "gpt")] == plain


@pytest.mark.ranks
@pytest.mark.parametrize("peer, dtype", every(3, ["ddp", "ddp-copies", "fsdp2", "fsdp2-keep"], ["fp32", "bf16"]))
def test_every_byte_of_a_peer_is_in_an_account(peer, dtype):
    for document, numel in ranks.call(NUM_RANKS, of_peer, peer, dtype, "gpt"):
        check(document, 0.01)
        assert document.engine == ("ddp" if peer.startswith("ddp") else "fsdp2")
        for found in document.reconciliations:
            shares = 1 if peer.startswith("ddp") else NUM_RANKS
            assert found.books["PARAM"] == pytest.approx(4 * numel / shares, rel=0.01)
            assert found.books["MOMENT"] == pytest.approx(8 * numel / shares, rel=0.01)
            if peer == "fsdp2-keep":
                assert found.books["GATHERED"] >= (2 if dtype == "bf16" else 4) * numel * 0.99
            if peer == "fsdp2":
                assert found.books["GATHERED"] < (2 if dtype == "bf16" else 4) * numel * 0.99
            if peer == "ddp-copies":
                assert found.books["COMM"] == 4 * numel


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [0, 3])
def test_what_is_hidden_in_a_unit_is_unaccounted_there(stage):
    document = ranks.call(NUM_RANKS, of_hidden, stage)[0]
    for found in document.reconciliations:
        assert found.books["UNACCOUNTED"] == 2**24
        largest = next(item for item in found.items if item.account == "UNACCOUNTED")
        assert largest.nbytes == 2**24


@pytest.mark.ranks
def test_the_oversized_layer_is_the_largest_gather():
    document, *_ = ranks.call(NUM_RANKS, of_shardbook, 3, sb.Precision(), "gpt", 1, 12 * 96)[0]
    gathered = [item for item in document.reconciliations[0].items if item.account == "GATHERED"]
    assert gathered[0].unit == "blocks.1"


@pytest.mark.ranks
def test_light_mode_has_what_persists_and_the_waiting():
    answers = ranks.call(NUM_RANKS, of_light)
    for document, _ in answers:
        for account in ("PARAM", "MOMENT"):
            assert document.peak[account] in {formula[account] for _, formula in answers}
        assert document.peak_allocated is None
        assert document.reconciliations == ()
        assert len(document.times) == NUM_RANKS
