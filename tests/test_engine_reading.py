"""Parameters between uses: their shape stays visible, and reading their values works or is refused by name. Nothing crashes.

Each reader below runs on real ranks, in a process whose end would fail its test. At stage 3 the values are not here: a reader
must raise an error with the parameter's name and the word ``gathered``. At stages 0 to 2 it must see the new values right
after a step. What only asks for shape or type works everywhere.
"""

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import ranks
from tests.equality import SEED, built, same_bits
from tests.oracle import PlainRun, Types
from tests.zoo import ZOO

pytestmark = pytest.mark.ranks

NAME = "blocks.1.up.weight"  # 40 x 24, cut between the ranks
Reader = Callable[[nn.Module, nn.Parameter], Any]


def saved(value: Any) -> Any:
    torch.save(value, io.BytesIO())


def assign(parameter: nn.Parameter, value: float) -> None:
    parameter[0, 0] = value


# name -> what is read; where the result is a tensor or a number it is compared with the same on a plain parameter
READERS: dict[str, Reader] = {
    "sum": lambda m, p: p.sum(),
    "torch.sum": lambda m, p: torch.sum(p),
    "abs().max()": lambda m, p: p.abs().max(),
    "p + 1": lambda m, p: p + 1,
    "1 - p": lambda m, p: 1 - p,
    "-p": lambda m, p: -p,
    "p > 0": lambda m, p: p > 0,
    "p == p": lambda m, p: p == p,
    "p @ p.T": lambda m, p: p @ p.T,
    "matmul": lambda m, p: torch.matmul(torch.ones(1, 40), p),
    "einsum": lambda m, p: torch.einsum("ij,ij->", p, p),
    "F.linear": lambda m, p: F.linear(torch.ones(2, 24), p),
    "p[0]": lambda m, p: p[0],
    "p[0, 0].item()": lambda m, p: p[0, 0].item(),
    "p[mask]": lambda m, p: p[torch.ones(40, dtype=torch.bool)],
    "iteration": lambda m, p: torch.stack(list(p)),
    "unpacking": lambda m, p: next(iter(p)),
    "sum().item()": lambda m, p: p.sum().item(),
    "tolist": lambda m, p: p.tolist(),
    "numpy of detach": lambda m, p: p.detach().numpy().sum(),
    "numpy": lambda m, p: p.numpy(force=True).sum(),
    "__array__": lambda m, p: __import__("numpy").asarray(p.detach()).sum(),
    "DLPack": lambda m, p: torch.from_dlpack(p.detach()).sum(),
    "__dlpack__": lambda m, p: torch.from_dlpack(p.data).sum(),
    "data_ptr": lambda m, p: p.data_ptr() != 0,
    "untyped_storage": lambda m, p: p.untyped_storage().nbytes() > 0,
    "storage().data_ptr": lambda m, p: p.untyped_storage().data_ptr() != 0,
    "data": lambda m, p: p.data.sum(),
    "detach": lambda m, p: p.detach().sum(),
    "clone": lambda m, p: p.clone().sum(),
    "view": lambda m, p: p.view(-1).sum(),
    "reshape": lambda m, p: p.reshape(-1)[3],
    "flatten": lambda m, p: p.flatten()[3],
    "t": lambda m, p: p.t()[0, 0],
    "transpose": lambda m, p: p.transpose(0, 1).sum(),
    "expand": lambda m, p: p.unsqueeze(0).expand(2, -1, -1).sum(),
    "chunk": lambda m, p: p.chunk(2)[1].sum(),
    "cat": lambda m, p: torch.cat([p, p]).sum(),
    "stack": lambda m, p: torch.stack([p, p]).sum(),
    "where": lambda m, p: torch.where(p > 0, p, torch.zeros(())).sum(),
    "to double": lambda m, p: p.to(torch.float64).sum(),
    "to same": lambda m, p: p.to("cpu").sum(),
    "double": lambda m, p: p.double().sum(),
    "cpu": lambda m, p: p.cpu().sum(),
    "contiguous": lambda m, p: p.contiguous().sum(),
    "norm": lambda m, p: p.norm(),
    "linalg": lambda m, p: torch.linalg.vector_norm(p),
    "isnan": lambda m, p: torch.isnan(p).any(),
    "torch.equal": lambda m, p: torch.equal(p, torch.zeros(40, 24)),
    "allclose": lambda m, p: torch.allclose(p, torch.zeros(40, 24)),
    "bool of an element": lambda m, p: bool(p.sum() > 1e9),
    "float": lambda m, p: float(p.detach().mean()),
    "format": lambda m, p: f"{p.sum():.5f}",
    "deepcopy": lambda m, p: copy.deepcopy(p).sum(),
    "copy": lambda m, p: copy.copy(p).sum(),
    "deepcopy of the module": lambda m, p: copy.deepcopy(m.get_submodule("blocks.1")).up.weight.sum(),
    "pickle": lambda m, p: pickle.loads(pickle.dumps(p)).sum(),
    "torch.save": lambda m, p: saved(p),
    "torch.save of the module": lambda m, p: saved(m.get_submodule("blocks.1.up")),
    "model.state_dict": lambda m, p: m.state_dict()[NAME].sum(),
    "torch.save of state_dict": lambda m, p: saved(m.state_dict()),
    "parameters_to_vector": lambda m, p: nn.utils.parameters_to_vector([p]).sum(),
    "get_total_norm": lambda m, p: nn.utils.get_total_norm([p]),
    "foreach": lambda m, p: torch._foreach_mul([p], 2.0)[0].sum(),
    "functional_call": lambda m, p: torch.func.functional_call(m.get_submodule("blocks.1.up"), {"weight": p}, torch.ones(2, 24))[0].sum(),
    "the module without the engine's forward": lambda m, p: F.linear(torch.ones(1, 24), m.get_submodule("blocks.1.up").weight),
    "hash of values": lambda m, p: torch.hash_tensor(p),
    "histogram": lambda m, p: torch.histc(p.detach(), 3).sum(),
    "copy from": lambda m, p: torch.empty(40, 24).copy_(p).sum(),
    "addmm": lambda m, p: torch.addmm(torch.zeros(1, 24), torch.ones(1, 40), p).sum(),
    "func.vmap": lambda m, p: torch.func.vmap(torch.sum)(p.detach()).sum(),
    "as_tensor": lambda m, p: torch.as_tensor(p).sum(),
    "new_empty and copy": lambda m, p: p.new_empty(p.shape).copy_(p.detach()).sum(),
    "new parameter": lambda m, p: nn.Parameter(p.data).sum(),
    "buffer": lambda m, p: torch.frombuffer(bytearray(p.detach().numpy().tobytes()), dtype=torch.float32).sum(),
}

# readers of more than the one parameter may name the first that they come to
NAMES_OF_OTHERS = {
    "deepcopy of the module": "blocks.1.",
    "model.state_dict": "embedding.weight",
    "torch.save of state_dict": "embedding.weight",
}

WRITERS: dict[str, Reader] = {
    "p[0, 0] =": lambda m, p: assign(p.data, 3.0),
    "fill_": lambda m, p: p.data.fill_(1.0),
    "mul_ under no_grad": lambda m, p: without_grad(lambda: p.mul_(2.0)),
    "add_ under no_grad": lambda m, p: without_grad(lambda: p.add_(1.0)),
    "copy_": lambda m, p: without_grad(lambda: p.copy_(torch.ones(40, 24))),
    "init": lambda m, p: nn.init.normal_(p),
    "zero_": lambda m, p: without_grad(lambda: p.zero_()),
    "load_state_dict": lambda m, p: m.get_submodule("blocks.1.up").load_state_dict({"weight": torch.ones(40, 24), "bias": torch.ones(40)}),
    "vector_to_parameters": lambda m, p: nn.utils.vector_to_parameters(torch.ones(960), [p]),
    "out=": lambda m, p: without_grad(lambda: torch.add(torch.ones(40, 24), 1, out=p.detach())),
}

METADATA: dict[str, Callable[[nn.Module, nn.Parameter], Any]] = {
    "shape": lambda m, p: tuple(p.shape),
    "size": lambda m, p: (p.size(0), p.size()),
    "dtype": lambda m, p: p.dtype,
    "device": lambda m, p: p.device,
    "numel": lambda m, p: (p.numel(), p.nelement(), torch.numel(p)),
    "dim": lambda m, p: (p.dim(), p.ndim),
    "len": lambda m, p: len(p),
    "stride": lambda m, p: (p.stride(), p.is_contiguous()),
    "element_size": lambda m, p: (p.element_size(), p.itemsize, p.nbytes),
    "requires_grad": lambda m, p: p.requires_grad,
    "grad": lambda m, p: p.grad,
    "is_leaf": lambda m, p: (p.is_leaf, p.grad_fn),
    "is_floating_point": lambda m, p: (p.is_floating_point(), torch.is_floating_point(p), p.is_complex()),
    "isinstance": lambda m, p: (isinstance(p, nn.Parameter), isinstance(p, Tensor)),
    "names": lambda m, p: [name for name, _ in m.named_parameters()],
    "identity": lambda m, p: p is dict(m.named_parameters())[NAME],
    "hash": lambda m, p: p in {p},
    "empty_like": lambda m, p: torch.empty_like(p).shape,
    "zeros_like": lambda m, p: torch.zeros_like(p).sum().item(),
    "new_zeros": lambda m, p: p.new_zeros(3).tolist(),
    "print of the module": lambda m, p: str(m),
    "count": lambda m, p: sum(q.numel() for q in m.parameters() if q.requires_grad),
    "type": lambda m, p: torch.result_type(p, p) if hasattr(torch, "result_type") else None,
    "is_tensor": lambda m, p: torch.is_tensor(p),
    "zero_grad": lambda m, p: m.zero_grad(set_to_none=True),
    "requires_grad_": lambda m, p: p.requires_grad_(True).requires_grad,
    "train and eval": lambda m, p: m.eval().train().training,
    "named_modules": lambda m, p: len(list(m.named_modules())),
    "apply": lambda m, p: m.apply(lambda module: None) is m,
}


def without_grad(action: Callable[[], Any]) -> Any:
    with torch.no_grad():
        return action()


def trained(stage: int, num_steps: int = 1, precision: str = "fp32") -> tuple[Any, nn.Module, nn.Parameter]:
    """An engine that has made a step or not, its model, and the parameter that is read."""
    import torch.distributed as dist

    import shardbook as sb

    rank = dist.get_rank() if dist.is_initialized() else 0
    model = built(ZOO["plain"], SEED)
    config = sb.ZeroConfig(stage=stage, precision=sb.Precision(param=precision))
    engine = sb.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), config)
    for step in range(num_steps):
        loss, weight = ZOO["plain"].forward(engine, ZOO["plain"].batches(rank, step, 0))
        engine.backward(loss, weight=weight)
        engine.step()
    return engine, model, dict(model.named_parameters())[NAME]


def plain_value(value: Any) -> Any:
    """What can be compared: numbers and strings as they are, tensors as nested lists."""
    if isinstance(value, Tensor):
        return value.detach().tolist()
    return value.item() if type(value).__module__ == "numpy" else value


def attempt(table: str, reader: str, stage: int, num_steps: int = 1) -> tuple[str, Any]:
    """Runs one reader: ("error", its message) or ("value", what it returned)."""
    engine, model, parameter = trained(stage, num_steps)
    try:
        value = plain_value(TABLES[table][reader](model, parameter))
    except Exception as error:
        return "error", f"{type(error).__name__}: {error}"
    del engine
    return "value", value


def attempt_gathered(reader: str, stage: int, precision: str = "fp32") -> tuple[Any, Any]:
    """The same inside ``gathered``, and on a plain parameter with the same values."""
    engine, model, parameter = trained(stage, precision=precision)
    full = {name: value.clone() for name, value in engine.full_parameters()}
    with engine.gathered(model):
        inside = plain_value(READERS[reader](model, parameter))
        copies = {name: p.detach().clone() for name, p in model.named_parameters()}
    plain = built(ZOO["plain"], 0)
    plain.load_state_dict(copies)
    outside = plain_value(READERS[reader](plain, dict(plain.named_parameters())[NAME]))
    same = not full or all(same_bits(full[name], copies[name]) for name in full)
    assert same, "gathered and full_parameters disagree"
    return inside, outside


TABLES: dict[str, dict[str, Reader]] = {"read": READERS, "write": WRITERS, "metadata": METADATA}


@pytest.mark.parametrize("reader", READERS)
def test_reading_a_sharded_value_is_refused_by_name(reader: str) -> None:
    for how, text in ranks.call(2, attempt, "read", reader, 3):
        assert how == "error", f"{reader} returned {text!r}"
        assert NAME in text or (NAMES_OF_OTHERS.get(reader, NAME) in text), text
        assert "gathered" in text


@pytest.mark.parametrize("reader", ["sum", "state_dict", "deepcopy of the module", "torch.save"])
def test_also_before_the_first_step(reader: str) -> None:
    reader = {"state_dict": "model.state_dict"}.get(reader, reader)
    for how, text in ranks.call(2, attempt, "read", reader, 3, num_steps=0):
        assert how == "error"
        assert "gathered" in text


@pytest.mark.parametrize("writer", WRITERS)
def test_writing_a_sharded_value_is_refused_by_name(writer: str) -> None:
    for how, text in ranks.call(2, attempt, "write", writer, 3):
        assert how == "error", f"{writer} was taken in silence"
        assert "gathered" in text


@pytest.mark.parametrize("reader", METADATA)
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.full), 3])
def test_metadata_stays_visible(reader: str, stage: int) -> None:
    plain = built(ZOO["plain"], SEED)
    expected = plain_value(METADATA[reader](plain, dict(plain.named_parameters())[NAME]))
    for how, value in ranks.call(2, attempt, "metadata", reader, stage):
        assert (how, value) == ("value", expected)


def shown() -> list[str]:
    _, model, parameter = trained(3)
    return [repr(parameter), str(parameter), f"{parameter}", repr(list(model.get_submodule("blocks.1.up").parameters())), str(model)]


def test_a_sharded_parameter_prints() -> None:
    for texts in ranks.call(2, shown):
        for text in texts[:4]:
            assert NAME in text
            assert "40, 24" in text
            assert "float32" in text


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.full), 3])
def test_inside_gathered_everything_works(reader: str, stage: int) -> None:
    for inside, outside in ranks.call(2, attempt_gathered, reader, stage):
        assert inside == outside


def read_at_once(reader: str, stage: int) -> tuple[Any, Any]:
    """A read right after a step, and the same once everything is settled."""
    engine, model, parameter = trained(stage, num_steps=2)
    first = plain_value(READERS[reader](model, parameter))
    settled = {name: value.clone() for name, value in engine.full_parameters()}
    import torch.distributed as dist

    dist.barrier()
    second = plain_value(READERS[reader](model, parameter))
    assert not settled or same_bits(settled[NAME], parameter.detach())
    return first, second


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize(
    "reader",
    ["sum", "tolist", "deepcopy of the module", "model.state_dict", "data", "detach", "numpy of detach", "F.linear", "pickle", "view"],
)
def test_between_steps_a_read_gives_the_new_value(reader: str, stage: int) -> None:
    for first, second in ranks.call(2, read_at_once, reader, stage):
        assert first == second


def stale_views(stage: int) -> tuple[Any, Any]:
    """A view and a detached alias taken before a step."""
    engine, _model, parameter = trained(stage)
    alias, kept = parameter.data, parameter.detach().clone()
    import torch.distributed as dist

    loss, weight = ZOO["plain"].forward(engine, ZOO["plain"].batches(dist.get_rank(), 5, 0))
    engine.backward(loss, weight=weight)
    engine.step()
    now = parameter.detach().clone()
    return torch.equal(alias, now), torch.equal(kept, now)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_an_alias_follows_the_parameter(stage: int) -> None:
    for alias_is_new, kept_is_new in ranks.call(2, stale_views, stage):
        assert alias_is_new
        assert not kept_is_new


def scale_in_place(model: nn.Module, parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.mul_(0.5)


def load_halved(model: nn.Module, parameter: nn.Parameter) -> None:
    model.load_state_dict({name: value.detach() * 0.5 if name == NAME else value for name, value in model.state_dict().items()})


def replace_data(model: nn.Module, parameter: nn.Parameter) -> None:
    parameter.data = parameter.data * 0.5


def from_vector(model: nn.Module, parameter: nn.Parameter) -> None:
    nn.utils.vector_to_parameters(parameter.detach().reshape(-1) * 0.5, [parameter])


CHANGES: dict[str, Reader] = {
    "in place": scale_in_place,
    "load_state_dict": load_halved,
    ".data =": replace_data,
    "vector_to_parameters": from_vector,
}


def changed_between_steps(how: str, stage: int, precision: str) -> tuple[str, dict[str, Tensor]]:
    """Halves a parameter after the first step, on every rank alike. The refusal, if there is one; else the values after three steps."""
    import torch.distributed as dist

    from shardbook.errors import ShardbookError

    engine, model, parameter = trained(stage, precision=precision)
    try:
        CHANGES[how](model, parameter)
        for step in range(1, 3):
            loss, weight = ZOO["plain"].forward(engine, ZOO["plain"].batches(dist.get_rank(), step, 0))
            engine.backward(loss, weight=weight)
            engine.step()
        return "", {name: value.clone() for name, value in engine.full_parameters()}
    except ShardbookError as error:
        return str(error), {}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("how", CHANGES)
def test_writing_between_steps_takes_effect_or_is_refused(how: str, stage: int, precision: str) -> None:
    """As in plain torch; what cannot be honoured is refused by name. Nothing is undone in silence by the next step."""
    results = ranks.call(2, changed_between_steps, how, stage, precision)
    if all(text for text, _ in results):
        for text, _ in results:
            assert any(
                name in text for name in ([NAME] if how != "load_state_dict" else dict(built(ZOO["plain"], SEED).named_parameters()))
            )
            assert "gathered" in text
        return
    assert [text for text, _ in results] == ["", ""]
    model = built(ZOO["plain"], SEED)
    types = Types(param=precision)
    run = PlainRun(model, lambda named: torch.optim.SGD([p for _, p in named], lr=0.1), ZOO["plain"].forward, num_ranks=2, types=types)
    for step in range(3):
        if step == 1:
            master = run.updated()[NAME]
            with torch.no_grad():
                master.copy_(dict(model.named_parameters())[NAME].float() * 0.5)  # what was written is what counts from now on
                dict(model.named_parameters())[NAME].copy_(master)
        run.step([[ZOO["plain"].batches(rank, step, 0)] for rank in range(2)])
    for name, value in results[0][1].items():
        assert same_bits(value, run.full_parameters()[name]), name


# ---- gathered ------------------------------------------------------------------------------------------------------------


def write_back(stage: int, precision: str, back: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Rank 0 doubles a block's values inside ``gathered``; the values before and after."""
    import torch.distributed as dist

    engine, model, _ = trained(stage, precision=precision)
    before = {name: value.clone() for name, value in engine.full_parameters()}
    block = model.get_submodule("blocks.1")
    with engine.gathered(block, write_back=back), torch.no_grad():
        if dist.get_rank() == 0 or not back:
            for parameter in block.parameters():
                parameter.mul_(2.0)
    after = {name: value.clone() for name, value in engine.full_parameters()}
    loss, weight = ZOO["plain"].forward(engine, ZOO["plain"].batches(dist.get_rank(), 3, 0))
    engine.backward(loss, weight=weight)
    assert engine.step().applied
    return before, after


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_write_back_changes_the_values_of_all_ranks(stage: int, precision: str) -> None:
    before, after = ranks.call(2, write_back, stage, precision, True)[0]
    for name, value in before.items():
        if not name.startswith("blocks.1."):
            assert same_bits(after[name], value)
        elif precision == "fp32":
            assert same_bits(after[name], value * 2)
        else:
            assert same_bits(after[name].bfloat16(), value.bfloat16() * 2)


def test_without_write_back_a_change_is_lost() -> None:
    before, after = ranks.call(2, write_back, 3, "fp32", False)[0]
    assert all(same_bits(after[name], before[name]) for name in before)


def only_below() -> tuple[bool, str]:
    engine, model, parameter = trained(3)
    with engine.gathered(model.get_submodule("blocks.0")):
        inside = bool(torch.isfinite(dict(model.named_parameters())["blocks.0.up.weight"].sum()))
        try:
            parameter.sum()
        except RuntimeError as error:
            return inside, str(error)
    return inside, ""


def test_gathered_covers_what_is_below_the_modules_only() -> None:
    for inside, text in ranks.call(2, only_below):
        assert inside
        assert NAME in text


def nested_and_raising() -> list[str]:
    """Gathering twice, and leaving through an exception: afterwards the values are away again."""
    engine, model, parameter = trained(3)
    seen: list[str] = []
    with engine.gathered(model), engine.gathered(model.get_submodule("blocks.1")):
        pass
    for _ in range(2):
        try:
            with engine.gathered(model):
                parameter.sum()
                raise KeyError("inside")
        except KeyError as error:
            seen.append(str(error))
        try:
            parameter.sum()
        except RuntimeError as error:
            seen.append("gathered" if "gathered" in str(error) else "?")
    return seen


def test_gathered_nests_and_lets_exceptions_through() -> None:
    for seen in ranks.call(2, nested_and_raising):
        assert seen == ["'inside'", "gathered"] * 2


def stepped_directly(stage: int) -> str:
    engine, _, _ = trained(stage)
    try:
        engine.optimizer.step()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("stage", [0, 3])
def test_the_optimizers_own_step_is_refused_with_the_remedy(stage: int) -> None:
    for text in ranks.call(2, stepped_directly, stage):
        assert "engine.step()" in text


# ---- whole values --------------------------------------------------------------------------------------------------------


def whole(stage: int, entry: str, folder: str) -> tuple[list[str], list[str], list[str], bool]:
    import torch.distributed as dist

    import shardbook as sb

    rank = dist.get_rank()
    model = built(ZOO[entry], SEED + rank)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine = sb.Engine(model, torch.optim.SGD(trainable, lr=0.1), sb.ZeroConfig(stage=stage))
    names = [name for name, _ in engine.full_parameters()]
    state = engine.state_dict()
    fits = True
    if rank == 0:
        torch.save(dict(state), Path(folder, "state.pt"))
        plain = built(ZOO[entry], 0)
        plain.load_state_dict(torch.load(Path(folder, "state.pt")))
        expected = dict(built(ZOO[entry], SEED).named_parameters())
        fits = all(same_bits(value.detach(), expected[name].detach()) for name, value in plain.named_parameters())
        fits &= all(value.stride() == expected[name].stride() for name, value in model.named_parameters()) or entry == "gaps"
    return names, list(state), list(built(ZOO[entry], 0).state_dict()), fits


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize(
    "entry", ["plain", "tied", "strided", "mixed_types", "buffers", "integer_weights", "shared_with_root", "odd_shapes", "gaps"]
)
def test_the_whole_state_loads_into_the_plain_model(entry: str, stage: int, tmp_path: Path) -> None:
    names, keys, expected, fits = ranks.call(2, whole, stage, entry, str(tmp_path))[0]
    assert sorted(names) == sorted(name for name, _ in built(ZOO[entry], 0).named_parameters())
    assert sorted(keys) == sorted(expected)
    assert fits
