"""What cannot be simulated is refused by name, with the line and the remedy; and nothing of the attempt remains."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import shardbook as sb
from shardbook.errors import ConfigError, UsageError
from shardbook.simulation import given

WIDTH = 32


class Model(nn.Module):
    """Two layers with ``inside`` between them."""

    def __init__(self, inside=lambda x: x):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inside = inside

    def forward(self, x):
        return self.second(self.inside(self.first(x))).sum()


def batch():
    return (torch.randn(4, WIDTH),)


def adamw(parameters):
    return torch.optim.AdamW(parameters, fused=True)


def simulate(build_model=Model, build_batch=batch, **options):
    how = {"ranks": 4, "optimizer": adamw, **options}
    return sb.simulate(build_model, build_batch, sb.ZeroConfig(), **how)


@pytest.fixture(autouse=True)
def nothing_remains():
    resize, swap, default = torch.UntypedStorage.resize_, torch.utils.swap_tensors, torch.get_default_device()
    yield
    assert not dist.is_initialized()
    assert _get_current_dispatch_mode_stack() == []
    assert torch.UntypedStorage.resize_ is resize
    assert torch.utils.swap_tensors is swap
    assert torch.get_default_device() == default
    assert torch.ones(2).tolist() == [1.0, 1.0]


def refused(*parts, error=ConfigError, **options):
    with pytest.raises(error) as caught:
        simulate(**options)
    said = str(caught.value)
    assert [part for part in parts if part not in said] == [], said
    assert "\n" not in said


# ---- a forward that needs values -------------------------------------------------------------------------------------------


def branch(x):
    if x.sum() > 0:
        return x
    return -x


def item(x):
    return x * x.max().item()


def mask(x):
    return x[x > 0]


def positions(x):
    return x + x.nonzero().numel()


def chosen(x):
    return x.masked_select(x > 0)


def to_numpy(x):
    return x + x.detach().numpy().sum()


def printed(x):
    return x + len(f"{x.sum():.3f}")


@pytest.mark.parametrize(
    ("inside", "operator", "line"),
    [
        (branch, "aten._local_scalar_dense.default", "in branch: `if x.sum() > 0:`"),
        (item, ".item()", "in item: `return x * x.max().item()`"),
        (mask, "aten.nonzero.default", "in mask: `return x[x > 0]`"),
        (positions, "aten.nonzero.default", "in positions: "),
        (chosen, "masked_select", "in chosen: "),
        (to_numpy, "numpy()", "in to_numpy: "),
        (printed, "a format", "in printed: "),
    ],
)
def test_a_forward_that_needs_values_is_named_with_its_line_and_two_ways_out(inside, operator, line):
    place = f"test_simulation_bad_input.py:{inside.__code__.co_firstlineno + 1} {line}"
    refused(operator, place, "sb.measure", "or write that line without it", build_model=lambda: Model(inside))


def test_a_backward_that_needs_values_is_named_as_well():
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * grad.norm().item()

    line = "in backward: `return grad * grad.norm().item()`"
    refused(".item()", line, "sb.measure", build_model=lambda: Model(Reads.apply))


def test_a_loss_that_needs_values_is_named_as_well():
    refused(".item()", "in <lambda>", loss=lambda out: (out, out.item()))


# ---- operators without a rule ----------------------------------------------------------------------------------------------


@torch.library.custom_op("shardbook_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


_LIBRARY = torch.library.Library("shardbook_tests_raw", "DEF")
_LIBRARY.define("thrice(Tensor x) -> Tensor")
_LIBRARY.impl("thrice", lambda x: x * 3, "CPU")


def thrice(x):
    return torch.ops.shardbook_tests_raw.thrice(x.detach())


@pytest.mark.parametrize(
    ("inside", "name", "remedy"),
    [
        (twice, "shardbook_tests::twice", 'torch.library.register_fake("shardbook_tests::twice")'),
        (thrice, "shardbook_tests_raw.thrice", 'torch.library.register_fake("shardbook_tests_raw::thrice")'),
    ],
)
def test_an_operator_without_a_rule_is_named_with_what_gives_it_one(inside, name, remedy):
    refused(name, remedy, "test_simulation_bad_input.py:", build_model=lambda: Model(inside))


def test_pinned_memory_has_no_rule():
    refused("build_batch()", "_pin_memory", "do without it", build_batch=lambda: (torch.randn(4, WIDTH).pin_memory(),))


# ---- real tensors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrap", "where"),
    [
        (lambda x: (x,), "item 0"),
        (lambda x: x, "item 0"),
        (lambda x: {"x": x}, "item 'x'"),
        (lambda x: [{"a": [torch.zeros(1), {"b": x}]}], "item 0['a'][1]['b']"),
    ],
)
def test_a_real_tensor_in_a_batch_is_named_by_its_place(wrap, where):
    real = torch.randn(4, WIDTH)
    refused("build_batch()", "a real tensor of shape [4, 32]", where, "make it inside", build_batch=lambda: wrap(real))


def test_a_batch_of_another_fake_mode_is_refused():
    with FakeTensorMode():
        other = torch.randn(4, WIDTH)
    refused("a fake tensor", "of another simulation", build_batch=lambda: (other,))


def test_a_batch_on_a_device_is_refused():
    refused("a tensor on cuda:0", "leave the device out", build_batch=lambda: (torch.zeros(4, WIDTH, device="cuda"),))


def test_no_batch_and_one_that_holds_itself_are_refused():
    refused("build_batch() returned None", build_batch=lambda: None)
    endless = []
    endless.append(endless)
    refused("more than 16 deep", "flat tuple", build_batch=lambda: endless)


def test_a_real_tensor_in_the_forward_is_refused_with_its_line():
    table = torch.randn(WIDTH)
    refused("uses a real tensor", "in <lambda>", "register_buffer", build_model=lambda: Model(lambda x: x + table))


def test_more_real_memory_than_there_is_says_how_much_and_what_to_do():
    def too_much():
        np.ones(10**14)
        return Model()

    refused("build_model() asks for real memory", "in too_much: `np.ones(10**14)`", "bytes in all", "torch.empty", build_model=too_much)


# ---- what the functions return ---------------------------------------------------------------------------------------------


def test_something_else_than_a_module_is_refused():
    refused("build_model() returned an int; it must return an nn.Module", build_model=lambda: 3)
    refused("build_model() returned None", build_model=lambda: None)


def test_a_model_on_a_device_is_refused_by_name():
    def on_cuda():
        model = Model()
        model.first.weight = nn.Parameter(torch.empty(WIDTH, WIDTH, device="cuda"))
        return model

    refused("build_model(): first.weight is on cuda:0", "without a device", build_model=on_cuda)
    refused("build_model() moves something to a device", "in <lambda>", "leave devices out", build_model=lambda: Model().cuda())
    refused("the model's", "mixes devices", "x.device", build_model=lambda: Model(lambda x: x + torch.ones(WIDTH, device="cuda")))


def test_something_else_than_an_optimizer_is_refused():
    refused("optimizer(...) returned a list", optimizer=list)
    other = nn.Parameter(torch.zeros(3))
    refused("parameter 0 of group 0, of shape [3], is not one of the model", optimizer=lambda _: torch.optim.SGD([other], lr=0.1))


@pytest.mark.parametrize(("ranks", "rank", "said"), [(4, 4, "0 to 3"), (4, -1, "from 0"), (0, 0, "from 1"), (2.5, 0, "from 1")])
def test_ranks_that_are_not_there_are_refused(ranks, rank, said):
    refused(said, ranks=ranks, rank=rank)


def test_a_group_that_is_there_already_is_left_alone():
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        refused("in a process group already", "destroy_process_group", error=UsageError)
        assert (dist.get_rank(), dist.get_world_size()) == (1, 2)
    finally:
        dist.destroy_process_group()


def test_an_error_of_somebodys_own_comes_through_as_it_is():
    def broken(x):
        raise LookupError("my own")

    with pytest.raises(LookupError, match="my own"):
        simulate(lambda: Model(broken))


# ---- models that were built before -----------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.ones(WIDTH))
        self.table = torch.ones(WIDTH)

    def forward(self, x):
        return (self.second(self.first(x)) * self.scale + self.table).sum()


@pytest.mark.parametrize("make", [Model, Tied])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_that_was_built_before_is_simulated_as_if_built_inside_and_stays_as_it_was(make, device):
    with torch.device(device):
        real = make()
    before = {name: (id(parameter), parameter.device.type) for name, parameter in real.named_parameters()}
    told, inside = simulate(lambda: real), simulate(make)
    assert told.accounts == inside.accounts
    assert (told.num_parameters, told.peak_allocated) == (inside.num_parameters, inside.peak_allocated)
    assert {name: (id(parameter), parameter.device.type) for name, parameter in real.named_parameters()} == before


def test_two_parameters_on_one_storage_that_were_built_before_are_refused():
    real = Model()
    real.second.weight = nn.Parameter(real.first.weight.data)
    refused("second.weight and first.weight", "on one storage", "one parameter", build_model=lambda: real)


def test_a_model_that_cannot_be_copied_is_refused():
    class Single(Model):
        def __deepcopy__(self, memo):
            raise TypeError("there is but one of me")

    real = Single()
    refused("first.weight is a real tensor", "there is but one of me", "build it inside", build_model=lambda: real)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_model_that_is_converted_while_it_is_built_is_simulated(dtype):
    with FakeTensorMode(), given.building():
        model = Model().to(dtype)
        weight = model.first.weight
        assert (weight.dtype, weight.shape, weight.requires_grad) == (dtype, (WIDTH, WIDTH), True)
    assert simulate(lambda: Model().double().to(dtype).float()).accounts == simulate().accounts
