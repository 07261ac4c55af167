"""FSDP2's own memory tracker on a Llama of plain torch modules: fake tensors, a fake process group, no device.

    python -m benchmarks.fsdp2_tracker            a Llama of 7B on 64 ranks: kept, recomputed, and not resharded
    python -m benchmarks.fsdp2_tracker --forecast  the same beside shardbook's forecast

What the tracker counts is what torch allocates on a CPU, where ``torch.nn.RMSNorm`` is composed of operators; on CUDA it is one kernel
that keeps less. The peak is that of the second step. The first one is of no use: under a fake mode the tracker also counts the full-sized
tensors by which DTensor propagates shapes through the optimizer's step, which happens once.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.evidence_engine import Section, prose, table
from shardbook.simulation.group import fake_group

GIB = 2**30
Recomputed = Literal["none", "full", "selective"]
_PUBLISHED = {"kept": 15.76, "recomputed": 4.63, "not resharded": 27.04}
"""GiB, for the 7B with bf16 parameters and fp32 reduction."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One run. Sizes are those of Llama 2 7B."""

    ranks: int = 64
    micro_batch: int = 1
    sequence: int = 2048
    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 32
    ffn: int = 11_008
    vocab: int = 32_000
    recompute: Recomputed = "none"
    reshard: bool = True


SEVEN_BILLION = {"kept": Setting(), "recomputed": Setting(recompute="full"), "not resharded": Setting(reshard=False)}


@dataclass(frozen=True, kw_only=True)
class Tracked:
    """Bytes at the peak of the second step, by the tracker's categories. ``first_nbytes``: at that of the first, which is of no use."""

    setting: Setting
    nbytes: int
    first_nbytes: int
    categories: dict[str, int] = field(default_factory=dict[str, int])


class Attention(nn.Module):
    """Causal attention with rotary positions in fp32; tables are shared by all blocks."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.width = setting.hidden // setting.heads
        shared = setting.kv_heads * self.width
        self.query, self.out = (nn.Linear(setting.hidden, setting.hidden, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(setting.hidden, shared, bias=False) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, sequence, _ = x.shape
        query, key, value = (layer(x).view(batch, sequence, -1, self.width) for layer in (self.query, self.key, self.value))
        query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=key.shape[1] != query.shape[1])
        return self.out(mixed.transpose(1, 2).reshape(batch, sequence, -1))


class Block(nn.Module):
    """Norm, attention, norm, SwiGLU."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.attention_norm, self.feed_forward_norm = (nn.RMSNorm(setting.hidden, eps=1e-5) for _ in range(2))
        self.attention = Attention(setting)
        self.gate, self.up = (nn.Linear(setting.hidden, setting.ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(setting.ffn, setting.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        row = self.feed_forward_norm(x)
        return x + self.down(F.silu(self.gate(row)) * self.up(row))


class Llama(nn.Module):
    """Embedding, blocks, norm, head; gives logits."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.embedding = nn.Embedding(setting.vocab, setting.hidden)
        self.blocks = nn.ModuleList(Block(setting) for _ in range(setting.layers))
        self.norm = nn.RMSNorm(setting.hidden, eps=1e-5)
        self.head = nn.Linear(setting.hidden, setting.vocab, bias=False)

    def forward(self, tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.float().chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1).to(x.dtype)


def track(setting: Setting) -> Tracked:
    """Build, shard, and step twice under the tracker, as rank 0 of a fake group."""
    with _fake_group(setting.ranks) as mesh, _fake_mode():
        model, optimizer = sharded(setting, mesh)
        tokens, tables = batch(setting)
        first, categories = _peaks(model, optimizer, tokens, partial(take_step, model, optimizer, tokens, tables))
    return Tracked(setting=setting, nbytes=categories.pop("Total"), first_nbytes=first["Total"], categories=categories)


def batch(setting: Setting) -> tuple[Tensor, list[Tensor]]:
    """Tokens, and the two tables of rotary positions."""
    tokens = torch.zeros(setting.micro_batch, setting.sequence, dtype=torch.long)
    half = setting.hidden // setting.heads // 2
    return tokens, [torch.ones(setting.sequence, 1, half) for _ in range(2)]


def sharded(setting: Setting, mesh: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model under FSDP2, and its optimizer, on tensors of any kind."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = Llama(setting)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = _recomputed(block, setting.recompute)
    how = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
    how |= {} if setting.reshard else {"reshard_after_forward": False}
    for block in model.blocks:
        fully_shard(block, **how)
    fully_shard(model, **how)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def _recomputed(block: nn.Module, how: Recomputed) -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    if how == "none":
        return block
    if how == "full":
        return checkpoint_wrapper(block)
    return checkpoint_wrapper(block, context_fn=_save_every_second_product)


def _save_every_second_product() -> Any:
    """Attention and every second matrix product are kept, as torchtitan's ``selective`` with ``op`` does."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    seen = {False: 0, True: 0}
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

    def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if operator is torch.ops.aten.mm.default:
            seen[context.is_recompute] += 1
            kept = seen[context.is_recompute] % 2 == 1
        else:
            kept = operator is attention
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, tables: list[Tensor]) -> None:
    """As a plain loop would."""
    logits = model(tokens, *tables)  # whoever writes such a loop holds them until the step is over
    F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


def _peaks(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, step: Callable[[], None]
) -> tuple[dict[str, int], dict[str, int]]:
    """Of the first step, and of the second."""
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    tracker = FSDPMemTracker(model, optimizer)
    tracker.track_inputs((tokens,))
    found: list[dict[str, int]] = []
    for _ in range(2):
        with tracker:
            step()
            peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
        found.append({getattr(name, "value", name): nbytes for name, nbytes in peak.items() if nbytes})
        tracker.reset_mod_stats()
    return found[0], found[1]


@contextmanager
def _fake_group(ranks: int) -> Iterator[Any]:
    from torch.distributed.device_mesh import init_device_mesh

    with fake_group(ranks, 0, alone_needs_one=True):
        yield init_device_mesh("cpu", (ranks,))


def _fake_mode() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def in_its_own_process(setting: Setting) -> Tracked:
    """The same in a fresh interpreter: the tracker changes hooks and methods of FSDP2 for its whole process."""
    command = [sys.executable, "-m", "benchmarks.fsdp2_tracker", "--json", json.dumps(dataclasses.asdict(setting))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"FSDP2's tracker failed on {setting}:\n{done.stderr}")
    found = json.loads(done.stdout.splitlines()[-1])
    return Tracked(
        setting=Setting(**found["setting"]),
        nbytes=found["nbytes"],
        first_nbytes=found["first_nbytes"],
        categories=found["categories"],
    )


def forecast_of(setting: Setting) -> int:
    """shardbook's forecast of the same, in bytes."""
    import shardbook as sb
    from shardbook.facts.architecture import Architecture
    from shardbook.facts.parameters import model_facts
    from shardbook.forecasting.choices import Choices

    architecture = Architecture(
        family="llama", layers=setting.layers, hidden=setting.hidden, heads=setting.heads, kv_heads=setting.kv_heads,
        head_dim=setting.hidden // setting.heads, ffn=setting.ffn, vocab=setting.vocab,
    )  # fmt: skip
    config = sb.ZeroConfig(precision=sb.Precision(param="bf16"), recompute=sb.Recompute(policy=setting.recompute))
    told = sb.forecast(
        model_facts(architecture, name="Llama", source="sizes"), config, ranks=setting.ranks, micro_batch=setting.micro_batch,
        sequence=setting.sequence, engine="fsdp2", choices=Choices(implementation="plain", reshard=setting.reshard),
    )  # fmt: skip
    return told.peak_allocated


WITHIN = 0.03
QUICK_LAYERS = 4


def section(*, quick: bool = False) -> Section:
    """The three ways of the 7B beside the forecast, a minute each; ``quick`` takes fewer blocks."""
    found = Section(title="Beside FSDP2's own tracker")
    found.text += prose(*_INTRODUCTION)
    rows: list[list[str]] = []
    for name, setting in SEVEN_BILLION.items():
        setting = dataclasses.replace(setting, layers=QUICK_LAYERS) if quick else setting
        tracked, told = in_its_own_process(setting).nbytes, forecast_of(setting)
        error = told / tracked - 1
        known = "" if quick else f"{_PUBLISHED[name]:.2f}"
        rows.append([name, known, f"{tracked / GIB:.3f}", f"{told / GIB:.3f}", f"{error:+.2%}"])
        said = f"{name}: {told / GIB:.2f} GiB forecast, {tracked / GIB:.2f} tracked, {error:+.2%}; within {WITHIN:.0%}"
        found.promise(said, holds=abs(error) <= WITHIN)
        if not quick:
            off = told / GIB / _PUBLISHED[name] - 1
            found.promise(f"{name}: {off:+.2%} off the known {_PUBLISHED[name]} GiB; within {WITHIN:.0%}", holds=abs(off) <= WITHIN)
    found.text += table(["blocks", "known, GiB", "tracker, GiB", "forecast, GiB", "error"], rows)
    return found


_INTRODUCTION = (
    "A Llama of 32 blocks, width 4,096, feed-forward 11,008, vocabulary 32,000, untied; 64 ranks, micro-batch 1, sequences of 2,048, bf16",
    "parameters, fp32 reduction, fused AdamW. `FSDPMemTracker` of this torch runs it on fake tensors (`benchmarks/fsdp2_tracker.py`); the",
    "peak is that of the second step.",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="SETTING", help="one setting, and its result as one line of JSON")
    parser.add_argument("--forecast", action="store_true", help="beside shardbook's forecast")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.json:
        print(json.dumps(dataclasses.asdict(track(Setting(**json.loads(options.json))))))
        return
    for name, setting in SEVEN_BILLION.items():
        found = in_its_own_process(setting)
        line = f"{name}: {found.nbytes / GIB:.3f} GiB (known: {_PUBLISHED[name]})"
        if options.forecast:
            told = forecast_of(setting)
            line += f"; forecast {told / GIB:.3f} GiB, {told / found.nbytes - 1:+.2%}"
        print(line)
        print("   " + ", ".join(f"{category} {nbytes / GIB:.3f}" for category, nbytes in found.categories.items()))


if __name__ == "__main__":
    main()
