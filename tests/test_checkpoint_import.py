"""Weights that others wrote: a step from them equals the plain loop's, whatever the stage; what does not fit is refused by name."""

import json
import os
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import shardbook as sb
from tests import ranks
from tests.checkpoints import Setup, build, held, train
from tests.equality import OPTIMIZERS, PRECISIONS, HeldPiece, Trace, differences, held_pieces, in_memory_order, reported, state_of
from tests.oracle import PlainRun
from tests.test_checkpoint_resume import same

CLIP = 0.7
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Body(nn.Module):
    """Several types of memory: channels last (its kernel is cut between ranks), a scalar, one without elements, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 40, (2, 3)).to(memory_format=torch.channels_last)
        self.wide = nn.Linear(40, 48)
        self.back = nn.Linear(48, 40)
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.nothing = nn.Parameter(torch.zeros(0, 40))
        self.register_buffer("offset", torch.randn(40))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.conv(inputs).flatten(2).mean(-1) + self.offset.to(inputs.dtype)
        return hidden + self.gain * self.back(torch.tanh(self.wide(hidden)))


class Net(nn.Module):
    """A tied head, and a parameter that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 48)
        self.body = Body()
        self.head = nn.Linear(48, 11, bias=False)
        self.head.weight = self.embed.weight
        self.join = nn.Linear(40, 48)
        self.fixed = nn.Parameter(torch.randn(11, 5), requires_grad=False)

    def forward(self, images: Tensor, tokens: Tensor) -> tuple[Tensor, int]:
        hidden = 0.1 * self.embed(tokens) + self.join(self.body(images))
        logits = (self.head(hidden) + self.fixed.sum(1)).float()
        return nn.functional.cross_entropy(logits, tokens.roll(1), reduction="sum"), tokens.numel()


def net(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


def write_foreign(folder: Path, dtype: str = "fp32", *, seed: int = 5) -> dict[str, Tensor]:
    """Two files with an index, as others write them: every name once, elements in the order of dimensions."""
    folder.mkdir()
    values = {name: value.contiguous() for name, value in net(seed).state_dict().items() if name != "head.weight"}
    values = {name: value.to(DTYPES[dtype]) for name, value in values.items()}
    table: dict[str, str] = {}
    for number, part in enumerate((list(values)[::2], list(values)[1::2]), 1):
        name = f"model-{number:05d}-of-00002.safetensors"
        save_file({key: values[key] for key in part}, folder / name)
        table |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": table}))
    return values


# ---- a step from them ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    stage: int
    precision: str
    file: str = "fp32"


CASES = [Case(stage, precision) for stage in range(4) for precision in ("fp32", "bf16", "pure-bf16")]
CASES += [
    Case(1, "2+2+4+8"),
    Case(3, "2+2+4+8"),
    Case(3, "bf16", "bf16"),
    Case(2, "fp32", "fp64"),
    Case(3, "fp32", "fp16"),
    Case(1, "pure-bf16", "fp64"),
]


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 3, 4, 5, generator=generator), torch.randint(11, (4,), generator=generator)


def forward(model: Callable[..., Any], given: Any) -> Any:
    return model(*given)


def engine_trace(case: Case, folder: Path, *, steps: int = 2) -> Trace:
    """A job: from other weights than the files' into one step after the other, after an evaluation has gathered everything once."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    model = net(70)
    optimizer = OPTIMIZERS["adamw_fused"]([(name, one) for name, one in model.named_parameters() if one.requires_grad])
    precision = sb.Precision(**vars(PRECISIONS[case.precision]), keep_param_shard=case.precision == "2+2+4+8")
    engine = sb.Engine(model, optimizer, sb.ZeroConfig(stage=case.stage, precision=precision, clip_grad_norm=CLIP, units=("body",)))
    with torch.no_grad():
        forward(engine, [one.to(DTYPES[precision.param]) if one.is_floating_point() else one for one in batch(rank, 9)])
    engine.load_weights(folder / case.file)
    found = []
    for step in range(steps):
        loss, weight = forward(engine, batch(rank, step))
        engine.backward(loss, weight=weight)
        found.append(reported(engine.step()))
    full = {name: value.clone() for name, value in engine.full_parameters()}
    trace = Trace(found, full, dict(model.named_buffers()), held_pieces(engine))
    engine.close()
    return trace


def engine_traces(folder: Path) -> list[Trace]:
    return [engine_trace(case, folder) for case in CASES]


def plain_trace(case: Case, folder: Path, num_ranks: int, *, steps: int = 2) -> Trace:
    """The same without any of the package: torch loads what safetensors reads, and the plain loop trains."""
    model = net(70)
    values = {name: value for file in sorted((folder / case.file).glob("*.safetensors")) for name, value in load_file(file).items()}
    model.load_state_dict({**values, "head.weight": values["embed.weight"]})
    run = PlainRun(model, OPTIMIZERS["adamw_fused"], forward, num_ranks=num_ranks, types=PRECISIONS[case.precision], clip=CLIP)
    found = []
    for step in range(steps):
        rates = tuple(float(group["lr"]) for group in run.optimizer.param_groups)
        found.append({**vars(run.step([[batch(rank, step)] for rank in range(num_ranks)])), "learning_rates": rates})
    pieces = [HeldPiece(name, 0, in_memory_order(one), state_of(run.optimizer, one)) for name, one in run.updated().items()]
    return Trace(found, {name: value.clone() for name, value in run.full_parameters().items()}, run.buffers.named(0, run.model), pieces)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("foreign")
    for dtype in DTYPES:
        write_foreign(folder / dtype, dtype)
    return folder


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_steps_from_them_equal_the_plain_loop(num_ranks: int, foreign: Path):
    found = list(zip(*ranks.call(num_ranks, engine_traces, foreign), strict=True))
    plain: dict[Case, Trace] = {}
    for case, of_ranks in zip(CASES, found, strict=True):
        alike = Case(0, case.precision, case.file)  # with one micro-batch all stages have one plain loop
        if alike not in plain:
            plain[alike] = plain_trace(alike, foreign, num_ranks)
        for rank, trace in enumerate(of_ranks):
            assert differences(trace, plain[alike], rank=rank) == [], (case, rank)
    assert len({trace.steps[0]["loss"] for trace in plain.values()}) >= 3  # other types are other trainings


def built_narrow(folder: Path) -> list[tuple[dict[str, Tensor], list[HeldPiece]]]:
    """A job: a model that was built in bf16, with an fp32 master, at each stage."""
    found = []
    for stage in range(4):
        model = net(70).bfloat16()
        optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
        engine = sb.Engine(model, optimizer, sb.ZeroConfig(stage=stage, precision=sb.Precision(param="bf16"), units=("body",)))
        engine.load_weights(folder / "fp32")
        found.append((dict(engine.state_dict()), held_pieces(engine)))
        engine.close()
    return found


@pytest.mark.ranks
def test_a_master_is_not_rounded_and_a_parameter_is_its_master_rounded(foreign: Path):
    values = {name: value for file in (foreign / "fp32").glob("*.safetensors") for name, value in load_file(file).items()}
    found = ranks.call(2, built_narrow, foreign)
    for full, _ in found[0]:
        assert all(torch.equal(full[name], value.bfloat16()) for name, value in values.items())
    for piece in (piece for of_rank in found for _, pieces in of_rank for piece in pieces):
        if piece.name != "body.conv.weight":  # which lies in another order
            assert torch.equal(piece.value, values[piece.name].flatten()[piece.start : piece.start + piece.value.numel()])


# ---- names ---------------------------------------------------------------------------------------------------------------


def engine_of(model: nn.Module, stage: int = 1) -> sb.Engine:
    return sb.Engine(model, torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1), sb.ZeroConfig(stage=stage))


def loaded(path: Path, **options: Any) -> dict[str, Tensor]:
    engine = engine_of(net(70))
    engine.load_weights(path, **options)
    found = dict(engine.state_dict())
    engine.close()
    return found


def test_either_name_of_a_tied_parameter_and_both_where_they_agree(tmp_path: Path):
    values = write_foreign(tmp_path / "made")
    for names in (["head.weight"], ["embed.weight", "head.weight"]):
        file = tmp_path / f"{len(names)}.safetensors"
        rest = {name: value for name, value in values.items() if name != "embed.weight"}
        save_file({**rest, **{name: values["embed.weight"].clone() for name in names}}, file)
        found = loaded(file)
        assert torch.equal(found["head.weight"], values["embed.weight"])
        assert all(torch.equal(found[name], value) for name, value in values.items())


def test_names_are_renamed_and_lists_allow(tmp_path: Path):
    values = write_foreign(tmp_path / "made")
    theirs = {f"x.{name}": value for name, value in values.items() if not name.startswith("join.")} | {"x.other": torch.zeros(3)}
    (tmp_path / "theirs").mkdir()
    save_file(theirs, tmp_path / "theirs" / "model.safetensors")
    found = loaded(tmp_path / "theirs", rename={"x.": ""}, allow_missing=["join.*"], allow_unexpected=["other"])
    kept = net(70).state_dict()
    for name, value in found.items():
        assert torch.equal(value, kept[name] if name.startswith("join.") else values[{"head.weight": "embed.weight"}.get(name, name)]), name


def test_what_the_optimizer_has_stays(tmp_path: Path):
    """As ``load_state_dict`` of a model leaves it: moments, steps and schedule."""
    setup = Setup(3, 1, "bf16")
    other = build(setup, seed=44)
    save_file({name: value.clone() for name, value in other.state_dict().items() if name != "head.weight"}, tmp_path / "w.safetensors")
    engine = build(setup)
    train(engine, 2)
    before = held(engine)
    engine.load_weights(tmp_path / "w.safetensors")
    after = held(engine)
    assert all(torch.equal(value, dict(other.state_dict())[name]) for name, value in after["model"].items())
    assert [(name, start) for name, start, *_ in after["pieces"]] == [(name, start) for name, start, *_ in before["pieces"]]
    assert all(same(mine[3], theirs[3]) for mine, theirs in zip(after["pieces"], before["pieces"], strict=True))
    assert all(same(after[key], before[key]) for key in ("groups", "steps", "scheduler", "scale", "rng"))
    assert not same(after["model"], before["model"])
    other.close()
    engine.close()


def test_a_graph_of_the_old_weights_raises(foreign: Path):
    engine = engine_of(net(70))
    loss, _ = engine(*batch(0, 0))
    engine.load_weights(foreign / "fp32")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    engine.close()


# ---- what is refused -----------------------------------------------------------------------------------------------------


def single(folder: Path, change: Callable[[dict[str, Tensor]], Any], name: str = "model.safetensors") -> Path:
    values = write_foreign(folder.with_name("source"))
    change(values)
    folder.mkdir()
    save_file(values, folder / name)
    return folder


def edited(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    write_foreign(folder)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    change(content["weight_map"])
    index.write_text(json.dumps(content))
    return folder


def cut(folder: Path, nbytes: int) -> Path:
    write_foreign(folder)
    os.truncate(folder / "model-00002-of-00002.safetensors", nbytes)
    return folder


def without(folder: Path, name: str) -> Path:
    write_foreign(folder)
    (folder / name).unlink()
    return folder


def twice(folder: Path) -> Path:
    """A tensor in both files."""
    values = write_foreign(folder)
    second = folder / "model-00002-of-00002.safetensors"
    save_file({**load_file(second), "fixed": values["fixed"]}, second)
    return folder


def pickled(folder: Path, name: str) -> Path:
    folder.mkdir()
    torch.save(net(3).state_dict(), folder / name)
    return folder


def raw(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def header(path: Path, text: str, data: bytes = b"") -> Path:
    return raw(path, struct.pack("<Q", len(text)) + text.encode() + data)


def untied(values: dict[str, Tensor]) -> None:
    values["head.weight"] = values["embed.weight"] + 1e-3


def prefixed(start: str, values: dict[str, Tensor]) -> None:
    for name in list(values):
        values[start + name] = values.pop(name)


def inside(folder: Path, name: str) -> Path:
    return folder / name


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
ONE_BYTE, TWO_BYTES = '{"dtype":"U8","shape":[1],"data_offsets":[0,1]}', '{"dtype":"U8","shape":[2],"data_offsets":'


def changed(name: str, value: Tensor) -> Callable[[Path], Path]:
    """Another value for one of the tensors, or one more."""
    return lambda folder: single(folder, lambda values: values.update({name: value}))


def listed(name: str, file: str) -> Callable[[Path], Path]:
    """An index that says so."""
    return lambda folder: edited(folder, lambda table: table.update({name: file}))


BAD: dict[str, tuple[Callable[[Path], Path], tuple[str, ...]]] = {
    "missing": (lambda p: single(p, lambda v: v.pop("join.bias")), ("'join.bias'", "is missing in it", "allow_missing")),
    "a missing buffer": (lambda p: single(p, lambda v: v.pop("body.offset")), ("buffer 'body.offset'", "is missing")),
    "unexpected": (changed("more", torch.ones(2)), ("'more' is in it and not in the model", "allow_unexpected")),
    "another name": (
        lambda p: single(p, lambda v: v.update({"join.biases": v.pop("join.bias")})),
        ("'join.bias'", "the nearest name in it is 'join.biases'"),
    ),
    "a beginning more": (lambda p: single(p, partial(prefixed, "model.")), ("rename={'model.': ''}", "makes 13 of 13")),
    "mis-shaped": (changed("join.bias", torch.ones(47)), ("'join.bias'", "(47,)", "(48,)")),
    "integers": (changed("join.bias", torch.ones(48, dtype=torch.int64)), ("'join.bias' is I64", "F32 here")),
    "eight bits": (
        changed("join.bias", torch.ones(48).to(torch.float8_e4m3fn)),
        ("'join.bias' is F8_E4M3", "are cast into each other"),
    ),
    "tied and different": (lambda p: single(p, untied), ("'embed.weight' and 'head.weight' are one tied parameter", "differ")),
    "truncated": (lambda p: cut(p, 3000), (SECOND, "truncated")),
    "truncated in the header": (lambda p: cut(p, 100), (SECOND, "truncated")),
    "an empty file": (lambda p: raw(p, b""), ("truncated",)),
    "no JSON": (lambda p: header(p, "{" * 40), ("no JSON",)),
    "a name twice in a header": (lambda p: header(p, f'{{"a":{ONE_BYTE},"a":{ONE_BYTE}}}', b"x"), ("comes twice",)),
    "overlapping": (
        lambda p: header(p, f'{{"a":{TWO_BYTES}[0,2]}},"b":{TWO_BYTES}[1,3]}}}}', b"xyz"),
        ("'b'", "begins at byte 1"),
    ),
    "a type of no name": (lambda p: header(p, '{"a":{"dtype":[],"shape":[1],"data_offsets":[0,1]}}', b"x"), ("'a'", "damaged")),
    "a shard that is not there": (lambda p: without(p, FIRST), (FIRST, "incomplete")),
    "an index out of the folder": (listed("join.bias", "../other.safetensors"), ("'join.bias'", "'../other.safetensors'", "refused")),
    "an index with an absolute path": (listed("join.bias", "/etc/x.safetensors"), ("'/etc/x.safetensors'", "refused")),
    "an index that is wrong": (listed("fixed", SECOND), ("'fixed'", "two exports")),
    "an index with a name too many": (listed("more", SECOND), ("'more'", "is not in model-00002")),
    "an index with a name too few": (lambda p: edited(p, lambda table: table.pop("embed.weight")), ("'embed.weight'", "nowhere")),
    "an index without a map": (lambda p: edited(p, dict.clear), ("weight_map",)),
    "in two files": (twice, ("'fixed'", "as well")),
    "a pickle": (lambda p: inside(pickled(p, "weights.pt"), "weights.pt"), ("a pickle", "refused", "save_file")),
    "a folder of pickles": (lambda p: pickled(p, "pytorch_model.bin"), ("pytorch_model.bin", "a pickle")),
    "a pickle by another name": (lambda p: inside(pickled(p, "model.safetensors"), "model.safetensors"), ("model.safetensors",)),
    "another file in the folder": (
        lambda p: single(p, lambda v: None, "adapter.safetensors"),
        ("adapter.safetensors", "give the file itself"),
    ),
    "a folder without weights": (lambda p: p.mkdir() or p, ("neither model.safetensors nor",)),
    "nothing there": (lambda p: p, ("not there",)),
}  # fmt: skip


@pytest.fixture(scope="module")
def standing() -> Any:
    engine = engine_of(net(70), stage=2)
    loss, weight = engine(*batch(0, 0))
    engine.backward(loss, weight=weight)
    engine.step()
    yield engine
    engine.close()


def taken(engine: sb.Engine) -> dict[str, Any]:
    return {"model": dict(engine.state_dict()), "pieces": [vars(piece) for piece in held_pieces(engine)], "steps": engine.num_steps}


@pytest.mark.parametrize("kind", BAD)
def test_refused_by_name(kind: str, tmp_path: Path, standing: sb.Engine):
    make, said = BAD[kind]
    path = make(tmp_path / "bad")
    before = taken(standing)
    with pytest.raises(sb.CheckpointError) as caught:
        standing.load_weights(path)
    assert not [text for text in said if text not in str(caught.value)], str(caught.value)
    assert same(taken(standing), before)


def test_a_checkpoint_of_our_own_and_wrong_renames(tmp_path: Path, foreign: Path, standing: sb.Engine):
    standing.save(tmp_path / "c")
    with pytest.raises(sb.CheckpointError, match=r"engine\.load takes it"):
        standing.load_weights(tmp_path / "c")
    with pytest.raises(sb.CheckpointError, match="no name in .* begins with 'y.'"):
        standing.load_weights(foreign / "fp32", rename={"y.": ""})
    with pytest.raises(sb.CheckpointError, match="are both 'join"):
        standing.load_weights(foreign / "fp32", rename={"body.wide.": "join.", "body.back.": "join."})
    loss, weight = standing(*batch(0, 1))
    standing.backward(loss, weight=weight)
    with pytest.raises(sb.errors.UsageError, match=r"engine\.load_weights: in the middle of a step"):
        standing.load_weights(foreign / "fp32")
    standing.step()
    with standing.gathered(), pytest.raises(sb.errors.UsageError, match="in use"):
        standing.load_weights(foreign / "fp32")


def test_damaged_files_load_or_are_refused(tmp_path: Path, standing: sb.Engine):
    """Bytes of headers and indices, changed or cut: an error of ours, or weights of the right names and shapes; never anything else."""
    chance = random.Random(4)
    write_foreign(tmp_path / "a")
    originals = {path: path.read_bytes() for path in sorted((tmp_path / "a").iterdir())}
    num_refused = 0
    for _ in range(300):
        path = chance.choice(list(originals))
        data = bytearray(originals[path])
        for _ in range(chance.choice((1, 1, 4))):
            data[chance.randrange(min(len(data), 1400))] = chance.choice(
                (0, 0x22, 0x2C, 0x39, 0x5D, 0x7D, 0xD8, 0xFF, chance.randrange(256))
            )
        path.write_bytes(data if chance.random() < 0.8 else data[: chance.randrange(len(data))])
        try:
            standing.load_weights(tmp_path / "a")
        except sb.CheckpointError:
            num_refused += 1
        path.write_bytes(originals[path])
    assert num_refused > 150
    standing.load_weights(tmp_path / "a")


def refused_everywhere(folder: Path) -> list[Any]:
    """A job: what each rank says where rank 1's files are others, or damaged, and whether its values stayed."""
    rank = torch.distributed.get_rank()
    engine = engine_of(net(70), stage=3)
    before = dict(engine.state_dict())
    said = []
    for kind in ("other", "damaged"):
        with pytest.raises(sb.CheckpointError) as caught:
            engine.load_weights(folder / (kind if rank else "good"))
        said.append(str(caught.value).removeprefix(f"{folder / (kind if rank else 'good')}: "))
    engine.load_weights(folder / "good")  # nobody waits for anybody
    after = dict(engine.state_dict())
    engine.close()
    return [said, rank or not same(after, before)]


@pytest.mark.ranks
def test_ranks_refuse_together(tmp_path: Path):
    write_foreign(tmp_path / "good")
    values = write_foreign(tmp_path / "elsewhere")
    (tmp_path / "other").mkdir()
    save_file(values, tmp_path / "other" / "model.safetensors")
    cut(tmp_path / "damaged", 3000)
    first, second = ranks.call(2, refused_everywhere, tmp_path)
    assert first[0] == second[0]
    assert "rank 1 sees other files" in first[0][0]
    assert first[0][1].startswith("rank 1: ")
    assert "truncated" in first[0][1]
    assert first[1]
