from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from torch import nn
from shardbook.accounts import Account

@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    account: Account
    name: str
    unit: str
    tensor: Any

def engine_of(model: Any, optimizer: Any) -> str:
    return "plain"

def holdings(model: Any, optimizer: Any) -> Iterator[Holding]:
    if model is not None:
        for n, p in model.named_parameters():
            yield Holding(account=Account.PARAM, name=n, unit="", tensor=p)
        for n, p in model.named_buffers():
            yield Holding(account=Account.BUFFER, name=n, unit="", tensor=p)
    if optimizer is not None:
        for g in optimizer.param_groups:
            for p in g["params"]:
                yield Holding(account=Account.MASTER, name="master", unit="", tensor=p)
        for p, st in optimizer.state.items():
            for k, v in st.items():
                if hasattr(v, "shape"):
                    yield Holding(account=Account.MOMENT, name=k, unit="", tensor=v)
    if model is not None:
        for n, p in model.named_parameters():
            if p.grad is not None:
                yield Holding(account=Account.GRAD, name=n, unit="", tensor=p.grad)
