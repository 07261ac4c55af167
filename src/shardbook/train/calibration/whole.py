"""A step as a whole, of a small model that is nobody's: what its parts add up to is less, and by how much is told of other steps too.

Parts are measured one at a time and undisturbed. In a step they meet: each finds the caches as another left them, ranks share memory
and wait for the slower one, and threads that send and receive take turns with those that compute.
"""

import statistics
import time
from collections.abc import Mapping

import torch

from shardbook.config import Precision, ZeroConfig
from shardbook.engine.engine import Engine
from shardbook.models.config import DecoderConfig
from shardbook.models.decoder import Decoder
from shardbook.train.calibration.clock import Clock

MODEL = DecoderConfig(layers=2, width=640, heads=10, kv_heads=10, ffn=1728, vocab=2048)
CONFIGS = {name: ZeroConfig(stage=2, precision=Precision.preset(name)) for name in ("fp32", "bf16")}
MICRO_BATCH, SEQUENCE = 2, 256
_WARM_STEPS = 4
_STEPS = {"fp32": 15, "bf16": 35}


def whole(clock: Clock) -> Mapping[str, float]:
    """Seconds of a step by name of ``CONFIGS``, as ``step.NAME``."""
    found = {f"step.{name}": _step(clock, config, _STEPS[name]) for name, config in CONFIGS.items()}
    return dict(zip(found, clock.mean(list(found.values())), strict=True))


def _step(clock: Clock, config: ZeroConfig, steps: int) -> float:
    model = Decoder(MODEL).to(clock.device)
    engine = Engine(model, torch.optim.AdamW(model.parameters(), fused=True), config)
    tokens = torch.randint(MODEL.vocab, (MICRO_BATCH, SEQUENCE), device=clock.device)
    times: list[float] = []
    for _ in range(_WARM_STEPS + steps):
        clock.meet()
        began = time.perf_counter()
        loss, weight = engine(tokens, tokens)
        engine.backward(loss, weight=weight)
        engine.step()
        clock.settle()
        times.append(time.perf_counter() - began)
    engine.close()
    return statistics.median(times[_WARM_STEPS:])
