"""Small models, each with one odd thing that real models have, and batches for them.

An ``Entry`` builds its model, makes the batch of (rank, step, micro) and says what is to be expected of it. Every model
works in any floating type; sizes are small, and chosen so that many shard cuts fall inside a parameter, at odd multiples of
64 elements. Batches of one entry all have the same shapes. ``entry.forward(model, batch)`` is the one way to run any of
them: it seeds the generator of this rank and micro-batch, calls the model and returns (loss summed, weight).
"""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, HIDDEN, VOCABULARY, ROWS, LENGTH = 24, 40, 41, 2, 6


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank. ``weight`` is how many targets count."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    targets: Tensor
    weight: Any
    seed: int


@dataclass(frozen=True)
class Entry:
    """One model of the zoo, and what is to be expected of it."""

    name: str
    shows: str
    build: Callable[[], nn.Module]
    batches: Callable[[int, int, int], Batch]
    loss: Callable[[Any, Batch], Tensor]
    call: Callable[[Callable[..., Any], Batch], Any]
    keep: Mapping[str, str] = field(default_factory=dict)
    never: frozenset[str] = frozenset()  # trainable parameters that no micro-batch ever gives a gradient
    sometimes: frozenset[str] = frozenset()  # those that get one on some ranks, or in some steps, only
    frozen: frozenset[str] = frozenset()  # those that ask for none
    varies: bool = False  # the order of the blocks changes from step to step
    units: tuple[str, ...] | None = None  # what a person has to say about units, where the engine cannot find it out

    def forward(self, model: Callable[..., Any], batch: Batch) -> tuple[Tensor, Any]:
        torch.manual_seed(batch.seed)
        return self.loss(self.call(model, batch), batch), batch.weight


ZOO: dict[str, Entry] = {}


def entry(
    shows: str,
    *,
    batches: Callable[[int, int, int], Batch] | None = None,
    loss: Callable[[Any, Batch], Tensor] | None = None,
    call: Callable[[Callable[..., Any], Batch], Any] | None = None,
    **expected: Any,
) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    """Adds the model that the function below builds to the zoo, under the function's name."""

    def register(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        ZOO[build.__name__] = Entry(build.__name__, shows, build, batches or tokens, loss or cross_entropy, call or call_model, **expected)
        return build

    return register


# ---- batches and losses --------------------------------------------------------------------------------------------------


def generator(rank: int, step: int, micro: int, salt: str = "") -> tuple[torch.Generator, int]:
    seed = zlib.crc32(f"{salt}/{rank}/{step}/{micro}".encode())
    return torch.Generator().manual_seed(seed), seed


def tokens(rank: int, step: int, micro: int) -> Batch:
    """Token numbers and the next ones; a different number of targets counts each time."""
    made, seed = generator(rank, step, micro)
    inputs = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=made)
    targets = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=made)
    targets[0, : seed % (LENGTH - 1)] = -100
    count = int((targets != -100).sum())
    return Batch((inputs,), {}, targets, count if seed % 2 else torch.tensor(count), seed)


def vectors(rank: int, step: int, micro: int) -> Batch:
    """Rows of floating inputs, a class for each; weights that are no whole numbers."""
    made, seed = generator(rank, step, micro)
    inputs = torch.randn(8, WIDTH, generator=made)
    targets = torch.randint(VOCABULARY, (8,), generator=made)
    return Batch((inputs,), {}, targets, 0.3 + (seed % 7) / 10, seed)


def images(rank: int, step: int, micro: int) -> Batch:
    made, seed = generator(rank, step, micro)
    inputs = torch.randn(3, 3, 8, 8, generator=made)
    targets = torch.randint(VOCABULARY, (3,), generator=made)
    return Batch((inputs,), {}, targets, 3, seed)


def with_step(make: Callable[[int, int, int], Batch]) -> Callable[[int, int, int], Batch]:
    """The same batches, with the step handed to the model, so that all ranks take the same branch."""

    def batches(rank: int, step: int, micro: int) -> Batch:
        batch = make(rank, step, micro)
        return Batch(batch.args, {"step": step}, batch.targets, batch.weight, batch.seed)

    return batches


def with_rank(make: Callable[[int, int, int], Batch]) -> Callable[[int, int, int], Batch]:
    def batches(rank: int, step: int, micro: int) -> Batch:
        batch = make(rank, step, micro)
        return Batch(batch.args, {"rank": rank, "step": step}, batch.targets, batch.weight, batch.seed)

    return batches


def call_model(model: Callable[..., Any], batch: Batch) -> Any:
    return model(*batch.args, **batch.kwargs)


def cross_entropy(logits: Any, batch: Batch) -> Tensor:
    flat = logits.float().reshape(-1, logits.shape[-1])
    return F.cross_entropy(flat, batch.targets.reshape(-1), ignore_index=-100, reduction="sum")


def given_loss(output: Any, batch: Batch) -> Tensor:
    return output


# ---- bricks --------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Normalise, widen, narrow, add: 960 + 40 + 960 + 24 + 48 elements."""

    def __init__(self, width: int = WIDTH, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def inner(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Decoder(nn.Module):
    """Embedding, blocks, head; most of the zoo changes one thing of it."""

    def __init__(self, block: Callable[[], nn.Module] = Block, depth: int = 3, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.embedding(inputs)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# ---- plain and shared parameters -----------------------------------------------------------------------------------------


@entry("a decoder with nothing odd")
def plain() -> nn.Module:
    return Decoder()


@entry("embedding and head are one parameter")
def tied() -> nn.Module:
    return Decoder(tied=True)


@entry("one block is called twice in each forward")
def block_twice() -> nn.Module:
    class Twice(Decoder):
        def forward(self, inputs: Tensor) -> Tensor:
            x = self.embedding(inputs)
            for block in [*self.blocks, self.blocks[0]]:
                x = block(x)
            return self.head(x)

    return Twice()


@entry("one block stands twice in the list of blocks")
def block_listed_twice() -> nn.Module:
    model = Decoder()
    model.blocks[2] = model.blocks[0]
    return model


@entry("two blocks share a parameter, a third one does not")
def shared_between_units() -> nn.Module:
    model = Decoder(depth=4)
    model.blocks[3].up.weight = model.blocks[1].up.weight
    return model


@entry("a parameter of a block is the head's bias too, and one tensor has two names in one module")
def shared_with_root() -> nn.Module:
    model = Decoder()
    model.head = nn.Linear(WIDTH, VOCABULARY)
    shared = nn.Parameter(torch.linspace(-0.1, 0.1, VOCABULARY))

    class WithTable(Block):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.again = shared, shared

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.table.mean() * self.again[0]

    model.blocks[1] = WithTable()
    model.head.bias = shared
    return model


@entry("the model is called twice before one backward", call=lambda model, batch: model(*batch.args) + model(batch.args[0].flip(1)))
def called_twice() -> nn.Module:
    return Decoder(depth=2)


# ---- frozen --------------------------------------------------------------------------------------------------------------


@entry(
    "a frozen block, a frozen parameter in a trained block, a frozen embedding",
    frozen=frozenset(
        ["embedding.weight", "blocks.2.up.weight"] + [f"blocks.1.{n}.{w}" for n in ("norm", "up", "down") for w in ("weight", "bias")]
    ),
)
def frozen() -> nn.Module:
    model = Decoder()
    model.embedding.requires_grad_(False)
    model.blocks[1].requires_grad_(False)
    model.blocks[2].up.weight.requires_grad_(False)
    return model


class Adapted(nn.Module):
    """A frozen linear layer with a trained correction of low rank, which starts at (minus) zero."""

    def __init__(self, base: nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.first = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.second = nn.Parameter(-torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.first.t() @ self.second.t()


@entry(
    "adapters of low rank on a base that is frozen",
    frozen=frozenset(
        ["embedding.weight", "head.weight"]
        + [f"blocks.{i}.{n}" for i in range(3) for n in ("norm.weight", "norm.bias")]
        + [f"blocks.{i}.{n}.base.{w}" for i in range(3) for n in ("up", "down") for w in ("weight", "bias")]
    ),
)
def adapters() -> nn.Module:
    model = Decoder().requires_grad_(False)
    for block in model.blocks:
        block.up, block.down = Adapted(block.up), Adapted(block.down)
    return model


class QuantizedLinear(nn.Module):
    """Weights as frozen whole numbers with a scale; a trained bias."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        weight = torch.randn(out_features, in_features)
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((weight / scale).round().to(torch.int8), requires_grad=False)
        self.scale = nn.Parameter(scale * 0.2, requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(out_features))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


@entry("frozen weights of an integer type", frozen=frozenset(f"blocks.{i}.up.{w}" for i in range(3) for w in ("weight", "scale")))
def integer_weights() -> nn.Module:
    model = Decoder()
    for block in model.blocks:
        block.up = QuantizedLinear(WIDTH, HIDDEN)
    return model


# ---- parameters without a gradient ---------------------------------------------------------------------------------------


@entry(
    "a parameter and a whole block that nothing uses",
    never=frozenset(["spare", *(f"idle.{n}.{w}" for n in ("norm", "up", "down") for w in ("weight", "bias"))]),
)
def never_used() -> nn.Module:
    model = Decoder()
    model.idle = Block()
    model.spare = nn.Parameter(torch.ones(67))
    return model


@entry(
    "a block that all ranks leave out in every other step",
    batches=with_step(tokens),
    sometimes=frozenset(f"blocks.1.{n}.{w}" for n in ("norm", "up", "down") for w in ("weight", "bias")),
    varies=True,
)
def used_in_some_steps() -> nn.Module:
    class Skipping(Decoder):
        def forward(self, inputs: Tensor, step: int) -> Tensor:
            x = self.embedding(inputs)
            for index, block in enumerate(self.blocks):
                if index != 1 or step % 2 == 1:
                    x = block(x)
            return self.head(x)

    return Skipping()


class Choosing(nn.Module):
    """Two branches and a gate; which parameters get a gradient depends on the rank and the step."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor, which: int) -> Tensor:
        branch = self.odd if which % 2 else self.even
        return x + (branch(x) * self.gate if which % 3 else branch(x))


@entry(
    "parameters inside a block that every rank enters, used on some ranks only",
    batches=with_rank(tokens),
    sometimes=frozenset(
        [f"blocks.{i}.{n}.{w}" for i in range(2) for n in ("even", "odd") for w in ("weight", "bias")]
        + [f"blocks.{i}.gate" for i in range(2)]
    ),
)
def used_on_some_ranks() -> nn.Module:
    class Ranked(Decoder):
        def forward(self, inputs: Tensor, rank: int, step: int) -> Tensor:
            x = self.embedding(inputs)
            for index, block in enumerate(self.blocks):
                x = block(x, rank + step + index)
            return self.head(x)

    return Ranked(Choosing, depth=2)


class Experts(nn.Module):
    """Each token goes to the expert its router likes best; experts without a token are not called."""

    def __init__(self, num_experts: int = 5) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, num_experts, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH)) for _ in range(num_experts))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        probability, choice = self.router(flat).float().softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            chosen = (choice == index).nonzero().squeeze(1)
            if len(chosen):
                out = out.index_add(0, chosen, expert(flat[chosen]) * probability[chosen, None].to(x.dtype))
        return x + out.view_as(x)


@entry(
    "experts that get no token on some ranks; the block itself is entered on all",
    sometimes=frozenset(
        f"blocks.{i}.experts.{e}.{layer}.{w}" for i in range(2) for e in range(5) for layer in (0, 2) for w in ("weight", "bias")
    ),
)
def experts() -> nn.Module:
    return Decoder(Experts, depth=2)


class Quiet(nn.Module):
    """A weight of minus zero whose gradient is minus zero, on the ranks that use it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()
        self.quiet = nn.Parameter(-torch.zeros(3 * 64 + 1))

    def forward(self, x: Tensor, which: int) -> Tensor:
        x = self.inner(x)
        self.added = (self.quiet * -0.0).float().sum() if which % 2 else None
        return x


@entry(
    "gradients of minus zero on some ranks and none on others: a sum that adds 0.0 for a missing one shows in the bits",
    batches=with_rank(tokens),
    loss=lambda output, batch: cross_entropy(output[0], batch) + (0.0 if output[1] is None else output[1]),
    sometimes=frozenset(["block.quiet"]),
)
def minus_zero() -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.block, self.head = nn.Embedding(VOCABULARY, WIDTH), Quiet(), nn.Linear(WIDTH, VOCABULARY)

        def forward(self, inputs: Tensor, rank: int, step: int) -> Any:
            logits = self.head(self.block(self.embedding(inputs), rank + step))
            return logits, self.block.added

    return Model()


# ---- odd shapes, types and memory ----------------------------------------------------------------------------------------


class OddShapes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.1))
        self.empty = nn.Parameter(torch.zeros(0, 5))
        self.prime = nn.Parameter(torch.randn(127, 1) * 0.1)
        self.tiny = nn.Parameter(torch.randn(3) * 0.1)
        self.large_prime = nn.Linear(WIDTH, 131)
        self.minus_zero = nn.Parameter(-torch.zeros(193))

    def forward(self, x: Tensor) -> Tensor:
        wide = self.large_prime(x)
        mixed = wide[..., :127] @ self.prime + wide.sum(-1, keepdim=True) * self.tiny[1]
        return x * self.scale + mixed + self.empty.sum() + (wide[..., :1] * self.minus_zero.view(1, 1, -1)).mean(-1, keepdim=True)


@entry("0-d, zero-size, prime numbers of elements, weights that are minus zero")
def odd_shapes() -> nn.Module:
    return Decoder(OddShapes, depth=2)


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.25))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


@entry("units with fewer elements than there are ranks", batches=vectors)
def fewer_than_ranks() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, VOCABULARY), *(nn.Sequential(Scalar(), Scalar()) for _ in range(2)))


class Strided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(WIDTH, HIDDEN).t() * 0.2)
        self.down = nn.Parameter(torch.randn(HIDDEN, WIDTH).t() * 0.2)
        self.cube = nn.Parameter((torch.randn(4, 6, 5) * 0.2).permute(2, 0, 1))
        self.column = nn.Parameter(torch.randn(WIDTH, 1).t())

    def forward(self, x: Tensor) -> Tensor:
        inner = F.linear(F.gelu(F.linear(x, self.turned)), self.down)
        return x + inner * self.column + x[..., :5] @ self.cube.reshape(5, WIDTH)


@entry("parameters whose memory is transposed or permuted")
def strided() -> nn.Module:
    return Decoder(Strided, depth=2)


@entry("a parameter that is part of a larger tensor, with gaps between its rows")
def gaps() -> nn.Module:
    class Gapped(Block):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter((torch.randn(4, 3 * WIDTH) * 0.1)[::2, WIDTH : 2 * WIDTH])

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.bias.sum(0)

    return Decoder(Gapped, depth=2)


class MixedTypes(nn.Module):
    """A double, a bfloat16 and a single parameter in one block."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()
        self.scales = nn.Parameter(torch.linspace(0.9, 1.1, 5 * WIDTH, dtype=torch.float64))
        self.shifts = nn.Parameter(torch.linspace(-0.1, 0.1, 7 * WIDTH).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scales.view(5, WIDTH).mean(0)
        shift = self.shifts.view(7, WIDTH).sum(0)
        return self.inner(x) * scale.to(x.dtype) + shift.to(x.dtype)


@entry("parameters of three floating types in one block")
def mixed_types() -> nn.Module:
    return Decoder(MixedTypes, depth=2)


@entry("norms that stay out of the precision", keep={"*.norm": "fp32", "head.weight": "fp32"})
def kept_types() -> nn.Module:
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            normed = self.norm(x.float()).to(x.dtype)
            return x + self.down(F.gelu(self.up(normed)))

    class KeptHead(Decoder):
        def forward(self, inputs: Tensor) -> Tensor:
            x = self.embedding(inputs)
            for block in self.blocks:
                x = block(x)
            return self.head(x.float())

    return KeptHead(Kept)


# ---- buffers -------------------------------------------------------------------------------------------------------------


class Buffered(nn.Module):
    """Buffers of every kind, all used in forward and changed by it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("table", torch.linspace(0.5, 1.5, WIDTH), persistent=False)
        self.register_buffer("flags", torch.arange(WIDTH) % 3 == 0, persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        normed = self.batch_norm(x.float().reshape(-1, WIDTH)).view_as(x).to(x.dtype)
        y = self.inner(normed) * self.table.to(x.dtype) + self.average.to(x.dtype) / self.calls.to(x.dtype)
        self.average = self.average * 0.9 + y.detach().float().mean((0, 1)) * 0.1
        return x + torch.where(self.flags, y, y * 0.5)


@entry("buffers of every kind: persistent or not, of integers, of a batch norm, replaced, None", keep={"*.batch_norm": "fp32"})
def buffers() -> nn.Module:
    return Decoder(Buffered, depth=2)


# ---- what goes in and comes out ------------------------------------------------------------------------------------------


@dataclass
class Output:
    hidden: Tensor
    extra: Tensor
    note: str = "nothing to gather here"


def block_with(wrap: Callable[[Tensor], Any], unwrap: Callable[[Any], Tensor]) -> type[Block]:
    """A block that takes and returns its hidden state in some container."""

    class Wrapped(Block):
        def forward(self, x: Any) -> Any:  # type: ignore[override]
            return wrap(super().forward(unwrap(x) if not isinstance(x, Tensor) else x))

    return Wrapped


class Unwrapping(Decoder):
    def __init__(self, wrap: Callable[[Tensor], Any], unwrap: Callable[[Any], Tensor]) -> None:
        super().__init__(block_with(wrap, unwrap))
        self._wrap, self._unwrap = wrap, unwrap

    def forward(self, inputs: Tensor) -> Any:
        x: Any = self.embedding(inputs)
        for block in self.blocks:
            x = block(x)
        return self._wrap(self.head(self._unwrap(x)))


@entry("blocks and model return tuples, with numbers and None in them", loss=lambda output, batch: cross_entropy(output[1], batch))
def tuples() -> nn.Module:
    return Unwrapping(lambda x: (3, x, None), lambda output: output[1])


@entry("blocks and model return nested dicts", loss=lambda output, batch: cross_entropy(output["states"][0]["x"], batch))
def dicts() -> nn.Module:
    return Unwrapping(lambda x: {"states": [{"x": x}], "count": 1}, lambda output: output["states"][0]["x"])


@entry("blocks and model return dataclasses", loss=lambda output, batch: cross_entropy(output.hidden, batch))
def dataclasses() -> nn.Module:
    return Unwrapping(lambda x: Output(x, x * 2), lambda output: output.hidden)


@entry("a block's second output is never used")
def output_left_out() -> nn.Module:
    class Two(Block):
        def __init__(self) -> None:
            super().__init__()
            self.side = nn.Linear(WIDTH, 5)

        def forward(self, x: Tensor) -> Any:  # type: ignore[override]
            return super().forward(x), self.side(x)

    class First(Decoder):
        def forward(self, inputs: Tensor) -> Tensor:
            x = self.embedding(inputs)
            for index, block in enumerate(self.blocks):
                x, side = block(x)
                if index == 1:
                    x = x + side.mean()
            return self.head(x)

    return First(Two)


ZOO["output_left_out"] = Entry(
    **{**vars(ZOO["output_left_out"]), "never": frozenset(f"blocks.{i}.side.{w}" for i in (0, 2) for w in ("weight", "bias"))}
)


@entry("keyword arguments, lists of tensors, plain numbers and None go into blocks")
def keywords() -> nn.Module:
    class Keyword(Block):
        def forward(self, *, states: list[Tensor], scale: float, mask: Tensor | None = None, names: dict[str, Any]) -> Tensor:  # type: ignore[override]
            x = states[0] + names["shift"]
            y = super().forward(x) * scale
            return y if mask is None else y * mask

    class Passing(Decoder):
        def forward(self, inputs: Tensor) -> Tensor:
            x = self.embedding(inputs)
            mask = (inputs != 0).unsqueeze(-1).to(x.dtype)
            for index, block in enumerate(self.blocks):
                x = block(states=[x, x], scale=0.5 + index, mask=mask if index else None, names={"shift": x.mean(), "text": "a"})
            return self.head(x)

    return Passing(Keyword)


def in_containers(rank: int, step: int, micro: int) -> Batch:
    """Floating inputs in a list in a dict."""
    batch = vectors(rank, step, micro)
    return Batch(({"rows": [batch.args[0], batch.args[0] * 2], "scale": 0.5},), {}, batch.targets, batch.weight, batch.seed)


@entry("floating inputs of the model in a list in a dict", batches=in_containers)
def inputs_in_containers() -> nn.Module:
    class Opening(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(2))
            self.head = nn.Linear(WIDTH, VOCABULARY)

        def forward(self, inputs: dict[str, Any]) -> Tensor:
            x, other = inputs["rows"]
            return self.head(self.blocks[1](self.blocks[0](x) + other * inputs["scale"]))

    return Opening()


@entry("the next operation changes a block's output in place")
def in_place_output() -> nn.Module:
    class InPlace(Decoder):
        def forward(self, inputs: Tensor) -> Tensor:
            x = self.embedding(inputs)
            for index, block in enumerate(self.blocks):
                x = block(x)
                x += float(index)
                x.mul_(0.5)
            return self.head(x)

    return InPlace()


@entry("a block changes its input in place")
def in_place_input() -> nn.Module:
    class InPlace(Block):
        def forward(self, x: Tensor) -> Tensor:
            x.mul_(0.5)
            return x.add_(self.inner(x.clone()))

    class Cloning(Decoder):
        def forward(self, inputs: Tensor) -> Tensor:
            x = self.embedding(inputs).clone()
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    return Cloning(InPlace)


@entry(
    "a block keeps an auxiliary loss on itself, which the model adds",
    loss=lambda output, batch: cross_entropy(output[0], batch) + output[1],
)
def loss_on_self() -> nn.Module:
    class Auxiliary(Block):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.up(self.norm(x))
            self.auxiliary = hidden.float().square().mean() * 0.1
            return x + self.down(F.gelu(hidden))

    class Adding(Decoder):
        def forward(self, inputs: Tensor) -> Any:
            logits = super().forward(inputs)
            total = sum(block.auxiliary for block in self.blocks)
            for block in self.blocks:
                del block.auxiliary
            return logits, total

    return Adding(Auxiliary)


@entry("the model returns its loss", loss=given_loss, call=lambda model, batch: model(batch.args[0], batch.targets))
def loss_inside() -> nn.Module:
    class WithLoss(Decoder):
        def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
            logits = super().forward(inputs).float()
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")

    return WithLoss()


@entry("a loss outside of the model, of all hidden states", loss=lambda states, batch: sum(s.float().square().mean() for s in states))
def loss_outside() -> nn.Module:
    class States(Decoder):
        def forward(self, inputs: Tensor) -> Any:
            states = [self.embedding(inputs)]
            for block in self.blocks:
                states.append(block(states[-1]))
            return [*states, self.head(states[-1])]

    return States()


@entry("a block that returns its very input, and one that returns a view of it")
def passes_through() -> nn.Module:
    class Through(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x

    class View(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(-1, WIDTH)

    class Mixed(Decoder):
        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs).view(ROWS, LENGTH, VOCABULARY)

    model = Mixed()
    model.blocks[0], model.blocks[2] = Through(), View()
    return model


ZOO["passes_through"] = Entry(
    **{
        **vars(ZOO["passes_through"]),
        "never": frozenset(f"blocks.{i}.{n}.{w}" for i in (0, 2) for n in ("norm", "up", "down") for w in ("weight", "bias")),
    }
)


@entry("a block that runs without gradient in training, and once more with it")
def without_grad() -> nn.Module:
    class Target(Decoder):
        def forward(self, inputs: Tensor) -> Tensor:
            x = self.embedding(inputs)
            with torch.no_grad():
                target = self.blocks[1](self.blocks[0](x))
            for block in self.blocks:
                x = block(x)
            return self.head(x + target)

    return Target()


@entry("gradients stop in the middle of the model, so the first blocks get none")
def detached() -> nn.Module:
    class Stopped(Decoder):
        def forward(self, inputs: Tensor) -> Tensor:
            x = self.blocks[0](self.embedding(inputs)).detach()
            return self.head(self.blocks[2](self.blocks[1](x)))

    return Stopped()


ZOO["detached"] = Entry(
    **{
        **vars(ZOO["detached"]),
        "never": frozenset(["embedding.weight", *(f"blocks.0.{n}.{w}" for n in ("norm", "up", "down") for w in ("weight", "bias"))]),
    }
)


# ---- recomputation -------------------------------------------------------------------------------------------------------


def recomputed(reentrant: bool, part: bool) -> type[Block]:
    class Recomputed(Block):
        def forward(self, x: Tensor) -> Tensor:
            if part:
                return x + checkpoint(self.inner, x, use_reentrant=reentrant)
            return super().forward(x)

    return Recomputed


class CheckpointedDecoder(Decoder):
    def __init__(self, block: Callable[[], nn.Module], reentrant: bool) -> None:
        super().__init__(block)
        self._reentrant = reentrant

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.embedding(inputs)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self._reentrant)
        return self.head(x)


@entry("torch's checkpoint around each block, not reentrant")
def checkpoint_block() -> nn.Module:
    return CheckpointedDecoder(Block, reentrant=False)


@entry("torch's checkpoint around each block, reentrant")
def checkpoint_block_reentrant() -> nn.Module:
    return CheckpointedDecoder(Block, reentrant=True)


@entry("torch's checkpoint around a part of each block, not reentrant")
def checkpoint_part() -> nn.Module:
    return Decoder(recomputed(reentrant=False, part=True))


@entry("torch's checkpoint around a part of each block, reentrant")
def checkpoint_part_reentrant() -> nn.Module:
    return Decoder(recomputed(reentrant=True, part=True))


@entry("torch's checkpoint around a part of a block, and around the block as well; dropout inside")
def checkpoint_twice() -> nn.Module:
    class Dropped(Block):
        def inner(self, x: Tensor) -> Tensor:
            return F.dropout(super().inner(x), 0.2, self.training)

        def forward(self, x: Tensor) -> Tensor:
            return x + checkpoint(self.inner, x, use_reentrant=False)

    return CheckpointedDecoder(Dropped, reentrant=False)


@entry("torch's checkpoint around two blocks at a time, not reentrant")
def checkpoint_pair() -> nn.Module:
    class Pairs(Decoder):
        def forward(self, inputs: Tensor) -> Tensor:
            def pair(x: Tensor, first: int) -> Tensor:
                return self.blocks[first + 1](self.blocks[first](x))

            x = self.embedding(inputs)
            for first in (0, 2):
                x = checkpoint(pair, x, first, use_reentrant=False)
            return self.head(x)

    return Pairs(depth=4)


@entry("dropout, seeded by rank")
def dropout() -> nn.Module:
    class Dropped(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + F.dropout(self.inner(x), 0.3, self.training)

    return Decoder(Dropped)


# ---- structure -----------------------------------------------------------------------------------------------------------


@entry("blocks inside blocks")
def nested() -> nn.Module:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = nn.Parameter(torch.full((WIDTH,), 0.9))
            self.layers = nn.ModuleList(Block() for _ in range(2))
            self.after = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = x * self.before
            for layer in self.layers:
                x = layer(x)
            return self.after(x)

    return Decoder(Outer, depth=2)


@entry("no block structure at all", batches=vectors)
def no_blocks() -> nn.Module:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.randn(WIDTH, 50) * 0.2)
            self.second = nn.Parameter(torch.randn(50, VOCABULARY) * 0.2)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x @ self.first) @ self.second

    return Flat()


@entry("one linear layer and nothing else", batches=vectors)
def one_layer() -> nn.Module:
    return nn.Linear(WIDTH, VOCABULARY)


@entry("several lists of blocks of different kinds")
def several_lists() -> nn.Module:
    class Crossed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.mix = Block(hidden=24), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            return self.inner(x) + self.mix(memory)

    class TwoLists(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
            self.encoder = nn.ModuleList(Block() for _ in range(2))
            self.decoder = nn.ModuleList(Crossed() for _ in range(3))
            self.norms = nn.ModuleDict({"memory": nn.LayerNorm(WIDTH), "out": nn.LayerNorm(WIDTH)})
            self.scales = nn.ParameterList([nn.Parameter(torch.tensor(1.0 + i / 8)) for i in range(3)])
            self.head = nn.Linear(WIDTH, VOCABULARY)

        def forward(self, inputs: Tensor) -> Tensor:
            x = memory = self.embedding(inputs)
            for block in self.encoder:
                memory = block(memory)
            memory = self.norms["memory"](memory)
            for block, scale in zip(self.decoder, self.scales, strict=True):
                x = block(x, memory) * scale
            return self.head(self.norms["out"](x))

    return TwoLists()


@entry("one layer that is most of the model")
def huge_layer() -> nn.Module:
    class Huge(Decoder):
        def __init__(self) -> None:
            super().__init__(depth=1)
            self.blocks[0] = Block(hidden=599)

    return Huge()


@entry("blocks run in another order than they stand in")
def reversed_order() -> nn.Module:
    class Reversed(Decoder):
        def forward(self, inputs: Tensor) -> Tensor:
            x = self.embedding(inputs)
            for block in reversed(self.blocks):
                x = block(x)
            return self.head(x)

    return Reversed()


@entry("the order of the blocks changes from step to step", batches=with_step(tokens), varies=True)
def order_varies() -> nn.Module:
    class Varying(Decoder):
        def forward(self, inputs: Tensor, step: int) -> Tensor:
            x = self.embedding(inputs)
            for index in range(len(self.blocks)):
                x = self.blocks[(index + step) % len(self.blocks)](x)
            return self.head(x)

    return Varying(depth=4)


@entry("convolutions, weights with their channels last", batches=images)
def convolutions() -> nn.Module:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(12, 12, 3, padding=1), nn.GroupNorm(3, 12)

        def forward(self, x: Tensor) -> Tensor:
            return x + F.relu(self.norm(self.conv(x)))

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 12, 3, stride=2)
            self.layers = nn.Sequential(*(Residual() for _ in range(3)))
            self.head = nn.Linear(12, VOCABULARY)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layers(self.stem(x)).mean((2, 3)))

    model = Network()
    model.layers[1].to(memory_format=torch.channels_last)
    return model


@entry("torch's own transformer layers, which reach into their children's weights")
def torch_layers() -> nn.Module:
    return Decoder(lambda: nn.TransformerEncoderLayer(WIDTH, 4, HIDDEN, dropout=0.0, batch_first=True), depth=2)


@entry("a recurrent layer, which keeps its own list of its weights")
def recurrent() -> nn.Module:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.cell(x)[0]

    return Decoder(Recurrent, depth=2)


@entry("a weight that is computed from two others each time it is used")
def parametrized() -> nn.Module:
    class Normed(Block):
        def __init__(self) -> None:
            super().__init__()
            nn.utils.parametrizations.weight_norm(self.up)

    return Decoder(Normed, depth=2)


@entry("hooks of the user's own on parameters, which change their gradients")
def gradient_hooks() -> nn.Module:
    model = Decoder()
    model.blocks[0].up.weight.register_hook(lambda gradient: gradient * 0.5)
    model.head.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return model


def call_under_autocast(model: Callable[..., Any], batch: Batch) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(*batch.args)


@entry("a forward under autocast", call=call_under_autocast)
def autocast() -> nn.Module:
    return Decoder()


@entry("a weight of one module that the model uses itself: the head is the embedding's transpose")
def functional_head() -> nn.Module:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Decoder()
            del self.inner.head

        def forward(self, inputs: Tensor) -> Tensor:
            x = self.inner.embedding(inputs)
            for block in self.inner.blocks:
                x = block(x)
            return F.linear(x, self.inner.embedding.weight)

    return Functional()


ZOO["functional_head"] = Entry(**{**vars(ZOO["functional_head"]), "units": ("inner.blocks.*",)})


@entry("hooks of the user's own on blocks: one changes the input, one the output")
def hooked() -> nn.Module:
    model = Decoder()
    model.blocks[0].register_forward_pre_hook(lambda module, args: (args[0] * 0.75,))
    model.blocks[1].register_forward_hook(lambda module, args, output: output * 1.25)
    return model
