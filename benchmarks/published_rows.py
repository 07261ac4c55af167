"""From a row of published measurements to the question that a forecast answers, by rules on the columns; no row has a rule of its own.

A column that is empty, or says something that no rule knows, ends in :class:`NotModelledError` with the reason. What the columns leave out
(vocabulary, feed-forward, biases of a test of Megatron-LM) comes from that project's defaults and test configurations, named here.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardbook.config import Precision, Recompute, ZeroConfig
from shardbook.facts import catalog
from shardbook.facts.architecture import Architecture, Experts
from shardbook.facts.model import ModelFacts
from shardbook.facts.parameters import model_facts
from shardbook.forecasting.choices import Choices

Row = Mapping[str, str]

GPT2_VOCAB = 50_257
"""Tokens of the GPT-2 tokenizer, which Megatron-LM's tests train with."""

FUSED_ATTENTION = ("resume", "memory_speed", "weekly", "release", "nondeterministic")
"""In names of Megatron-LM's tests: these leave attention's kernel to Transformer Engine. The others compare one run with what it gave
before, and ask for ``--attention-backend: unfused``: of the ``model_config.yaml`` in tests/functional_tests/test_cases that were read,
7 of 8 of one run have it, none of 11 others."""

NO_DROPOUT = ("_cp2_nondeterministic",)
"""Tests whose ``model_config.yaml`` turns dropout off; the others train with Megatron-LM's default of 0.1."""


class NotModelledError(Exception):
    """Why no forecast is made for a row."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a forecast is asked for a row; ``call`` gives the arguments of ``sb.forecast``."""

    model: str | ModelFacts
    engine: str
    config: ZeroConfig
    choices: Choices
    ranks: int
    device: str | None
    micro_batch: int | None
    sequence: int | None
    degrees: Mapping[str, int] = field(default_factory=dict[str, int])

    def call(self) -> dict[str, Any]:
        """Arguments of ``sb.forecast``."""
        return {
            "model": self.model, "config": self.config, "ranks": self.ranks, "micro_batch": self.micro_batch, "sequence": self.sequence,
            "engine": self.engine, "device": self.device, "choices": self.choices, **self.degrees,
        }  # fmt: skip


Question = Callable[[Row], Asked]
"""What turns a row into a question."""


def unrolled(rows: Sequence[Row]) -> list[Row]:
    """Rows that say "(cumulative)" also carry what the rows before them, of the same source, have added: ``+compile`` above all."""
    found: list[Row] = []
    added: dict[str, list[str]] = {}
    for row in rows:
        if "(cumulative)" in row["notes"] and row["notes"].startswith("+"):
            before = added.setdefault(row["source_ref"], [])
            before.append(row["notes"].removesuffix("(cumulative)").strip())
            row = {**row, "notes": " ".join(before)}
        found.append(row)
    return found


def asked(row: Row) -> Asked:
    """The question behind one row of ``measured.csv``.

    Raises:
        NotModelledError: with the reason.
    """
    _refuse(row)
    engine, stage = _engine(row)
    choices = _choices(row, engine)
    return Asked(
        model=_model(row),
        engine=engine,
        config=ZeroConfig(stage=stage, precision=_precision(row), recompute=_recompute(row), accumulate=int(row["grad_accum"] or 1)),  # pyright: ignore[reportArgumentType]
        choices=choices,
        ranks=_ranks(row),
        device=device_name(row["gpu"]),
        micro_batch=_number(row, "micro_batch"),
        sequence=_number(row, "seq_len"),
        degrees={name: int(row[key] or 1) for name, key in (("tensor", "tp"), ("context", "cp"), ("expert", "ep"))},
    )


def counter(row: Row) -> str:
    """Which of the allocator's counters a metric is.

    Raises:
        NotModelledError: another one, or none that the source names.
    """
    metric = row["metric"]
    if "init" in metric or "after wrap" in metric:
        raise NotModelledError(f"not a peak of training: {metric}")
    for name in ("reserved", "active", "allocated"):
        if name in metric:
            return name
    raise NotModelledError(f"counter: {metric}")


# What is refused -------------------------------------------------------------------------------------------------------

_REFUSED: tuple[tuple[str, str, str], ...] = (  # column, what it matches, reason
    ("kind", r"paper-formula|category", "not a measurement of a whole run"),
    ("precision", r"nf4|4-bit|fp8", "quantised weights"),
    ("notes", r"fp8|fp4", "8-bit or 4-bit computation"),
    ("notes", r"unpacked", "sequences of many lengths"),
    ("model", r"fp8", "8-bit computation"),
    ("finetune", r"QLoRA", "quantised weights"),
    ("finetune", r"adapter", "adapters other than LoRA"),
    ("offload", r"\S", "offload: staging buffers"),
    ("optimizer", r"8.?bit|fused in bwd|recipe default|AnyPrecision", "optimizer"),
    ("model", r"muon", "optimizer: Muon"),
    ("act_ckpt", r"unstated|offload", "recomputation is not stated"),
    ("zero_or_fsdp", r"Megatron-FSDP|\+\+", "engine"),
    (
        "model",
        r"^(bert|t5|retro|nemotron|hybrid|mamba|multimodal|vlm|mimo)|mla|mtp|dsa|cudagraph",
        "architecture or capture as a CUDA graph",
    ),
    ("model", r"etp[2-9]", "experts cut over tensor-parallel devices"),
    ("model", r"multi_dist_optimizer_instances", "several instances of the distributed optimizer"),
)


def _refuse(row: Row) -> None:
    if int(row["pp"] or 1) > 1:
        raise NotModelledError("pipeline stages")
    for column, pattern, reason in _REFUSED:
        if re.search(pattern, row[column]):
            raise NotModelledError(f"{reason}: {row[column]}" if column in ("optimizer", "zero_or_fsdp", "offload") else reason)


def _ranks(row: Row) -> int:
    """All devices: stated, or the product of the degrees."""
    if row["n_gpus"]:
        return _number(row, "n_gpus")
    return _number(row, "dp") * int(row["tp"] or 1) * int(row["cp"] or 1)


def _number(row: Row, column: str) -> int:
    try:
        return int(row[column])
    except ValueError:
        raise NotModelledError(f"{column} is unknown") from None


# Engine, types, choices ------------------------------------------------------------------------------------------------

_ENGINES: tuple[tuple[str, str, int], ...] = (  # what zero_or_fsdp matches, engine, stage
    (r"^FSDP2", "fsdp2", 3),
    (r"^FSDP1|^FSDP$|^FSDP FULL_SHARD", "fsdp2", 3),
    (r"^dist-optimizer", "megatron", 1),
    (r"^none \(z0\)", "megatron", 0),
    (r"^(DDP|none|single device)$", "ddp", 0),
    (r"^ZeRO-0$", "deepspeed", 0),
    (r"^ZeRO-1$", "deepspeed", 1),
    (r"^ZeRO-2$", "deepspeed", 2),
    (r"^ZeRO-3$", "deepspeed", 3),
)


def _engine(row: Row) -> tuple[str, int]:
    if re.match(r"FSDP1|FSDP\b", row["zero_or_fsdp"]) and "LoRA" in row["finetune"]:
        raise NotModelledError("FSDP1 with frozen parameters: gradients of whole flat parameters")
    for pattern, engine, stage in _ENGINES:
        if re.search(pattern, row["zero_or_fsdp"]):
            return engine, stage
    raise NotModelledError(f"engine: {row['zero_or_fsdp'] or 'unknown'}")


_PRECISIONS: tuple[tuple[str, Precision], ...] = (
    (r"fp32 sharded params", Precision(param="bf16")),
    (r"^(bf16-true|pure_bf16)$", Precision.preset("pure-bf16")),
    (r"^fp32$", Precision()),
    (r"^bf16 \(HF\+DeepSpeed", Precision(param="bf16")),
    (r"^bf16 \+ fp32 master", Precision(param="bf16")),
    (r"^bf16[- ]true|^pure[- _]bf16", Precision.preset("pure-bf16")),
)


def _precision(row: Row) -> Precision:
    if row["optimizer"].startswith("Adam fp32 (Megatron"):
        return Precision(param=row["precision"])
    if "torchtune" in row["source"] and row["precision"] == "bf16":  # its dtype is that of parameters, gradients and moments
        return Precision.preset("pure-bf16")
    if row["zero_or_fsdp"].startswith("ZeRO-") and row["precision"] in ("bf16", "fp16"):  # DeepSpeed's masters are fp32
        return Precision.preset(row["precision"])
    for pattern, precision in _PRECISIONS:
        if re.search(pattern, row["precision"]):
            return precision
    raise NotModelledError(f"precision: {row['precision'] or 'unknown'}")


def _recompute(row: Row) -> Recompute:
    stated = row["act_ckpt"].lower()
    if "fsdp policy" in stated:  # litgpt's tables: none on one device, with FSDP its policy
        stated = stated if row["n_gpus"] == "1" else ""
    if found := re.fullmatch(r"selective[- (]*(\d+).*", stated):  # torchtitan's other kind: every k-th block whole
        return Recompute(policy="full", every=int(found[1]))
    if stated.startswith("selective"):
        # Megatron-LM's is attention's core alone: what a kernel without scores keeps anyway
        return Recompute() if _is_megatron(row) else Recompute(policy="selective")
    if stated.startswith("full") or stated in ("on", "yes", "true"):
        return Recompute(policy="full")
    if stated.startswith("none") or stated in ("off", "no", "false"):
        return Recompute()
    raise NotModelledError(f"recomputation: {stated or 'unknown'}")


def _is_megatron(row: Row) -> bool:
    return "Megatron" in row["source"]


_CODES: tuple[tuple[str, str], ...] = (  # what source matches, whose code the blocks are
    (r"torchtitan|^pytorch PR$", "torchtitan"),
    (r"torchtune", "torchtune"),
    (r"litgpt", "litgpt"),
    (r"Megatron", "megatron"),
    (r"HF |gist|LLaMA-Factory|llama-cookbook", "transformers"),
)


def _choices(row: Row, engine: str) -> Choices:
    code = next((code for pattern, code in _CODES if re.search(pattern, row["source"])), "")
    notes = row["notes"]
    fused = row["act_ckpt"].startswith("selective") or any(word in row["model"] for word in FUSED_ATTENTION)
    unfused = engine == "megatron" and not fused
    choices = Choices(
        implementation=code,
        loss="chunked" if "chunked CE" in notes else "full",
        compiled="compile" in notes,
        attention="eager" if unfused else "auto",
        sequence_parallel=engine != "megatron" or "SP" in notes.split("; "),
        fused_gradients=engine != "megatron",  # every test of Megatron-LM says --no-gradient-accumulation-fusion
    )
    return _with_adapters(choices, row)


def _with_adapters(choices: Choices, row: Row) -> Choices:
    """LoRA: ``r8 QV``, or the number of trained elements of queries and values, as litgpt's tables state it."""
    stated = row["finetune"]
    if "LoRA" not in stated:
        return choices
    named = re.search(r"r(\d+) (QV|all)", stated)
    if named:
        return replace(choices, lora_rank=int(named[1]), lora_targets="attention" if named[2] == "QV" else "all")
    trained = re.search(r"trainable=([\d,]+)", stated)
    if trained is None:
        raise NotModelledError("rank of LoRA is unknown")
    a = _rope_decoder(row)
    each = a.layers * (2 * a.hidden + (a.heads + a.kv_heads) * a.head_dim)
    rank, rest = divmod(int(trained[1].replace(",", "")), each)
    if rest or not rank:
        raise NotModelledError(f"LoRA on other layers than queries and values: {stated}")
    return replace(choices, lora_rank=rank, lora_targets="attention")


_DEVICES: tuple[tuple[str, str], ...] = (  # what gpu matches, the catalog's name; the first that matches
    (r"gb200|b200/", "gb200"), (r"b200", "b200"), (r"gh200", "gh200-96gb"), (r"h200", "h200"), (r"h100.*96", "h100-96gb"),
    (r"h100.*(94|nvl)", "h100-nvl"), (r"h100", "h100-80gb"), (r"h800", "h800-80gb"), (r"h20\b", "h20"), (r"a800", "a800-80gb"),
    (r"a100.*40", "a100-40gb"), (r"dgx_a100|a100.*80", "a100-80gb"), (r"titan", "titan-rtx"), (r"3090", "rtx-3090"), (r"4090", "rtx-4090"),
    (r"5090", "rtx-5090"), (r"a6000", "a6000"), (r"a40\b", "a40"), (r"a30\b", "a30"), (r"a10", "a10-24gb"), (r"l40s", "l40s"),
    (r"l4\b", "l4"),
    (r"v100.*32", "v100-32gb"), (r"v100", "v100-16gb"), (r"t4\b", "t4"), (r"mi250", "mi250x"), (r"mi300", "mi300x"), (r"mi325", "mi325x"),
)  # fmt: skip


def device_name(gpu: str) -> str | None:
    """As the catalog of devices spells it: ``A100-80`` is ``a100-80gb``, ``dgx_gb200`` a ``gb200``; None: unknown, or of which size.

    >>> device_name("A100-40"), device_name("TITAN RTX 24GB (23.65 GiB)"), device_name("dgx_h100"), device_name("unstated")
    ('a100-40gb', 'titan-rtx', 'h100-80gb', None)
    """
    low = gpu.lower()
    return next((name for pattern, name in _DEVICES if re.search(pattern, low) and not re.fullmatch(r"a100|a100-class.*", low)), None)


# Models ----------------------------------------------------------------------------------------------------------------


def _model(row: Row) -> str | ModelFacts:
    if _is_megatron(row):
        return _megatron_model(row)
    name = re.sub(r"[\s_]+", "-", row["model"].strip().lower())
    for spelt in _spellings(name):
        if spelt in catalog.rows():
            return _as_stated(row, spelt)
    raise NotModelledError(f"model is not in the catalog: {row['model']}")


_SIZES = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")


def _as_stated(row: Row, name: str) -> str | ModelFacts:
    """The catalog's model, with the sizes of the row where it states others (a cut-down copy, another vocabulary)."""
    known = catalog.architecture(catalog.rows()[name])
    stated = {size: int(row[size]) for size in _SIZES if row[size].isdigit()}
    if all(getattr(known, size) == value for size, value in stated.items()):
        return name
    if {"hidden", "heads"} <= stated.keys() and (known.hidden, known.heads) != (stated["hidden"], stated["heads"]):
        stated["head_dim"] = stated["hidden"] // stated["heads"]
    return model_facts(
        replace(known, **stated), name=row["model"], source=f"{name} of the catalog, with the sizes that {row['source']} states"
    )


_GPT2_SIZES = {"124m": "", "117m": "", "350m": "-medium", "355m": "-medium", "774m": "-large", "1.5b": "-xl", "1558m": "-xl"}


def _spellings(name: str) -> Iterator[str]:
    """``llama-2-7-b`` and ``llama2-7b`` are ``llama-2-7b``, ``meta-llama/llama-2-7b-hf`` as well, and ``gpt-2-124m`` is ``gpt2``."""
    yield name
    bare = re.sub(r"(-(hf|instruct|chat|base|it|text|v0\.\d))+$", "", name.rpartition("/")[2].removeprefix("meta-"))
    joined = re.sub(r"(\d)-([bm])$", r"\1\2", bare)
    yield joined
    yield re.sub(r"^(llama|qwen|gemma|phi)-?(\d)", _hyphened, joined)
    yield re.sub(r"^llama-(\d+b)$", r"llama-1-\1", joined)
    if found := re.fullmatch(r"gpt-?2-([\d.]+[bm])", joined):
        yield "gpt2" + _GPT2_SIZES.get(found[1], "?")


def _hyphened(found: re.Match[str]) -> str:
    return f"{found[1]}{'' if found[1] == 'qwen' else '-'}{found[2]}"


def _rope_decoder(row: Row) -> Architecture:
    """Sizes as the columns have them: enough to count what LoRA adds."""
    layers, hidden, heads = (_number(row, name) for name in ("layers", "hidden", "heads"))
    kv_heads = int(row["kv_heads"] or heads)
    return Architecture(
        family="llama", layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=hidden // heads,
        ffn=int(row["ffn"] or 4 * hidden), vocab=int(row["vocab"] or 1),
    )  # fmt: skip


def _megatron_model(row: Row) -> ModelFacts:
    """A GPT as Megatron-LM builds it by default: LayerNorm, GELU of 4h, biases, learned positions, tied, dropout 0.1."""
    a, notes = _rope_decoder(row), row["notes"].split("; ")
    multiple = 128 * int(row["tp"] or 1)  # --make-vocab-size-divisible-by
    experts = int(row["experts"] or 0)
    bias, gated = not experts, "swiglu" in notes  # its tests of experts say --disable-bias-linear
    if experts and (int(row["tp"] or 1) == 1 or "realistic size" in notes):
        raise NotModelledError("how many experts a token visits is unknown")
    architecture = replace(
        a, family="gpt", vocab=-(-int(row["vocab"] or GPT2_VOCAB) // multiple) * multiple, norm="layer", gated=gated,
        activation="silu" if gated else "gelu", qkv_bias=bias, out_bias=bias, ffn_bias=bias, fused_qkv=True, fused_gate_up=gated,
        positions="learned", learned_positions=_number(row, "seq_len"), tied="untied" not in notes,
        qk_norm="head" if "qk_layernorm" in row["model"] else "none",
        dropout=0.0 if any(name in row["model"] for name in NO_DROPOUT) else 0.1,
        experts=Experts(count=experts, top_k=2 if "top2router" in row["model"] else 1, ffn=a.ffn) if experts else None,
    )  # fmt: skip
    return model_facts(architecture, name=row["model"], source="Megatron-LM's tests and defaults")
