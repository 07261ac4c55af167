"""How the sum inside each operator of ATen is taken in another order: its inputs are permuted along what is summed over.

A rewrite changes an operator's arguments, by name, and returns how results are put back, or None where they are as they should be.
Permutations are applied to both sides of every product, so that each term of a sum meets the partner that it had.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

Undo = Callable[[Any], Any]
Reorder = Callable[[dict[str, Any], "Shuffle"], Undo | None]


class Shuffle:
    """One permutation for each length, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._drawn: dict[tuple[int, torch.device], Tensor] = {}

    def __call__(self, length: int, device: torch.device) -> Tensor:
        """Never the order in which things are, where there is another."""
        if (length, device) not in self._drawn:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + length)
            drawn = torch.randperm(length, generator=generator)
            self._drawn[length, device] = (drawn.roll(1) if torch.equal(drawn, torch.arange(length)) else drawn).to(device)
        return self._drawn[length, device]


def _permute(arguments: dict[str, Any], shuffle: Shuffle, **dims: int) -> Undo | None:
    """Permute each named tensor along its dim, all alike: the dims are equally long."""
    index: Tensor | None = None
    for name, dim in dims.items():
        tensor: Tensor | None = arguments.get(name)
        if tensor is not None:
            index = shuffle(tensor.shape[dim], tensor.device) if index is None else index
            arguments[name] = tensor.index_select(dim, index)
    return None if index is None else _undo(index)


def _undo(index: Tensor) -> Undo:
    """Puts a tensor back: called with (tensor, dim)."""
    back = torch.argsort(index)
    return lambda value: value[0].index_select(value[1], back)


def _put_back(undo: Undo | None, places: dict[int, int]) -> Undo | None:
    """Results at ``places``, each put back along its dim."""
    if undo is None:
        return None

    def all_back(found: Any) -> Any:
        if isinstance(found, Tensor):
            return undo((found, places[0]))
        return tuple(one if place not in places or one is None else undo((one, places[place])) for place, one in enumerate(found))

    return all_back


def _floats(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


# ---- products -------------------------------------------------------------------------------------------------------------


def _product(**dims: int) -> Reorder:
    def rewrite(arguments: dict[str, Any], shuffle: Shuffle) -> None:
        if _floats(arguments[next(iter(dims))]):
            _permute(arguments, shuffle, **dims)

    return rewrite


def _convolution(arguments: dict[str, Any], shuffle: Shuffle) -> None:
    """Over input channels. Transposed weights have them first."""
    if arguments["groups"] == 1:
        _permute(arguments, shuffle, input=1, weight=0 if arguments["transposed"] else 1)


def _convolution_backward(arguments: dict[str, Any], shuffle: Shuffle) -> Undo | None:
    """Rows for the gradient of the weight; output channels for the gradient of the input."""
    rows = _put_back(_permute(arguments, shuffle, grad_output=0, input=0), {0: 0})
    if arguments["groups"] != 1:
        return rows
    dim = 1 if arguments["transposed"] else 0
    channels = _put_back(_permute(arguments, shuffle, grad_output=1, weight=dim), {1: dim, 2: 0})
    return lambda found: rows(channels(found)) if rows and channels else found


# ---- reductions -----------------------------------------------------------------------------------------------------------


def _reduction(arguments: dict[str, Any], shuffle: Shuffle) -> None:
    """Over the dims that ``dim`` names, all where it names none."""
    tensor: Tensor = arguments["self"]
    if not _floats(tensor):
        return
    named: Any = arguments.get("dim")
    dims: Iterable[int] = [named] if isinstance(named, int) else named or range(tensor.dim())
    for dim in dims:
        if tensor.dim() and tensor.shape[dim] > 1:
            _permute(arguments, shuffle, self=dim)


def _each_norm(arguments: dict[str, Any], shuffle: Shuffle) -> None:
    flat: list[Tensor] = [tensor.reshape(-1) for tensor in arguments["self"]]
    arguments["self"] = [tensor.index_select(0, shuffle(len(tensor), tensor.device)) for tensor in flat]


def _rows_of(*names: str) -> Reorder:
    """A loss that is reduced over its rows."""

    def rewrite(arguments: dict[str, Any], shuffle: Shuffle) -> None:
        first: Tensor = arguments[names[0]]
        if arguments.get("reduction", 1) != 0 and first.dim() and all(arguments[name].shape[:1] == first.shape[:1] for name in names):
            _permute(arguments, shuffle, **dict.fromkeys(names, 0))

    return rewrite


def _along(*names: str) -> Reorder:
    """A softmax or its backward, along ``dim``."""

    def rewrite(arguments: dict[str, Any], shuffle: Shuffle) -> Undo | None:
        dim: int = arguments["dim"]
        if not arguments[names[0]].dim():
            return None
        return _put_back(_permute(arguments, shuffle, **dict.fromkeys(names, dim)), {0: dim})

    return rewrite


# ---- normalisation --------------------------------------------------------------------------------------------------------


def _last_norm(arguments: dict[str, Any], shuffle: Shuffle) -> Undo | None:
    """Layer or RMS norm over the last dim."""
    if len(arguments["normalized_shape"]) > 1:
        return None
    return _put_back(_permute(arguments, shuffle, input=-1, weight=-1, bias=-1), {0: -1})


def _last_norm_backward(arguments: dict[str, Any], shuffle: Shuffle) -> Undo | None:
    """Features for the gradient of the input; rows for those of weight and bias."""
    if len(arguments["normalized_shape"]) > 1:
        return None
    shape = arguments["input"].shape
    for name in ("grad_out", "input", "mean", "rstd"):
        tensor: Tensor | None = arguments.get(name)
        if tensor is not None:
            arguments[name] = tensor.reshape(-1, tensor.shape[-1])
    rows = _put_back(_permute(arguments, shuffle, grad_out=0, input=0, mean=0, rstd=0), {0: 0})
    features = _permute(arguments, shuffle, grad_out=-1, input=-1, weight=-1, bias=-1)
    back = _put_back(features, {0: -1, 1: -1, 2: -1})

    def undo(found: Any) -> Any:
        assert rows is not None
        assert back is not None
        first, *rest = rows(back(found))
        return (None if first is None else first.reshape(shape), *rest)

    return undo


def _group_norm(**dims: int) -> Reorder:
    def rewrite(arguments: dict[str, Any], shuffle: Shuffle) -> Undo | None:
        return _put_back(_permute(arguments, shuffle, **dims), {0: -1}) if arguments["input"].dim() > 2 else None

    return rewrite


def _batch_norm(*names: str) -> Reorder:
    def rewrite(arguments: dict[str, Any], shuffle: Shuffle) -> Undo | None:
        return _put_back(_permute(arguments, shuffle, **dict.fromkeys(names, 0)), {0: 0})

    return rewrite


# ---- attention ------------------------------------------------------------------------------------------------------------


def _attention(arguments: dict[str, Any], shuffle: Shuffle) -> None:
    """Keys in another order, the causal mask spelled out; and the head's features."""
    if _spell_out(arguments):
        _columns(arguments, shuffle)
    _permute(arguments, shuffle, query=-1, key=-1)


def _attention_backward(arguments: dict[str, Any], shuffle: Shuffle) -> Undo | None:
    """Keys for the gradient of the queries, queries for those of keys and values."""
    keys = queries = None
    if _spell_out(arguments):
        keys = _put_back(_columns(arguments, shuffle), {1: -2, 2: -2})
        queries = _put_back(_rows(arguments, shuffle), {0: -2})
    features = _put_back(_permute(arguments, shuffle, query=-1, key=-1), {0: -1, 1: -1})

    def undo(found: Any) -> Any:
        for back in (features, queries, keys):
            found = found if back is None else back(found)
        return found

    return undo


def _spell_out(arguments: dict[str, Any]) -> bool:
    """Puts a mask in the place of ``is_causal``; False where the operator takes none, or draws dropout by position."""
    if arguments.get("dropout_p") or "philox_seed" in arguments:
        return False
    if arguments.get("is_causal"):
        query, key = arguments["query"], arguments["key"]
        seen = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        arguments["attn_mask"] = torch.zeros_like(seen, dtype=query.dtype).masked_fill(~seen, float("-inf"))
        arguments["is_causal"] = False
    return True


def _columns(arguments: dict[str, Any], shuffle: Shuffle) -> Undo | None:
    mask: Tensor | None = arguments.get("attn_mask")
    masked = {"attn_mask": -1} if mask is not None and mask.shape[-1] > 1 else {}
    return _permute(arguments, shuffle, key=-2, value=-2, **masked)


def _rows(arguments: dict[str, Any], shuffle: Shuffle) -> Undo | None:
    mask: Tensor | None = arguments.get("attn_mask")
    masked = {"attn_mask": -2} if mask is not None and mask.shape[-2] > 1 else {}
    arguments["logsumexp"] = arguments["logsumexp"].unsqueeze(-1)
    undo = _permute(arguments, shuffle, query=-2, out=-2, grad_out=-2, logsumexp=-2, **masked)
    arguments["logsumexp"] = arguments["logsumexp"].squeeze(-1)
    return undo


def _heads_features(arguments: dict[str, Any], shuffle: Shuffle) -> None:
    _permute(arguments, shuffle, query=-1, key=-1)


def _heads_features_backward(arguments: dict[str, Any], shuffle: Shuffle) -> Undo | None:
    return _put_back(_permute(arguments, shuffle, query=-1, key=-1), {0: -1, 1: -1})


# ---- scatters -------------------------------------------------------------------------------------------------------------


def _embedding_backward(arguments: dict[str, Any], shuffle: Shuffle) -> None:
    grad: Tensor = arguments["grad_output"]
    arguments["grad_output"], arguments["indices"] = grad.reshape(-1, grad.shape[-1]), arguments["indices"].reshape(-1)
    _permute(arguments, shuffle, grad_output=0, indices=0)


def _index_add(arguments: dict[str, Any], shuffle: Shuffle) -> None:
    if _floats(arguments["self"]) and arguments["index"].dim() == 1 and arguments["source"].dim():
        _permute(arguments, shuffle, index=0, source=arguments["dim"])


def _scatter_add(arguments: dict[str, Any], shuffle: Shuffle) -> None:
    if _floats(arguments["self"]) and arguments["index"].shape == arguments["src"].shape and arguments["src"].dim():
        _permute(arguments, shuffle, index=arguments["dim"], src=arguments["dim"])


def _index_put(arguments: dict[str, Any], shuffle: Shuffle) -> None:
    """Where it accumulates over one index of whole numbers."""
    indices: Sequence[Tensor | None] = arguments["indices"]
    values: Tensor = arguments["values"]
    first = indices[0] if len(indices) == 1 else None
    if not arguments.get("accumulate") or first is None or first.dtype is torch.bool or values.shape[: first.dim()] != first.shape:
        return
    index = shuffle(first.numel(), first.device)
    arguments["values"] = values.reshape(first.numel(), *values.shape[first.dim() :]).index_select(0, index)
    arguments["indices"] = [first.reshape(-1).index_select(0, index)]


REORDERED: dict[str, Reorder] = {
    "mm": _product(self=1, mat2=0),
    "addmm": _product(mat1=1, mat2=0),
    "addmm_": _product(mat1=1, mat2=0),
    "_addmm_activation": _product(mat1=1, mat2=0),
    "bmm": _product(self=2, mat2=1),
    "baddbmm": _product(batch1=2, batch2=1),
    "baddbmm_": _product(batch1=2, batch2=1),
    "addbmm": _product(batch1=2, batch2=1),
    "mv": _product(self=1, vec=0),
    "addmv": _product(mat=1, vec=0),
    "dot": _product(self=0, tensor=0),
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    **dict.fromkeys(("sum", "mean", "var", "std", "var_mean", "linalg_vector_norm", "norm", "logsumexp", "nansum"), _reduction),
    "_foreach_norm": _each_norm,
    "nll_loss_forward": _rows_of("self", "target"),
    "mse_loss": _rows_of("self", "target"),
    "_softmax": _along("self"),
    "_log_softmax": _along("self"),
    "_softmax_backward_data": _along("grad_output", "output"),
    "_log_softmax_backward_data": _along("grad_output", "output"),
    "native_layer_norm": _last_norm,
    "native_layer_norm_backward": _last_norm_backward,
    "_fused_rms_norm": _last_norm,
    "_fused_rms_norm_backward": _last_norm_backward,
    "native_group_norm": _group_norm(input=-1),
    "native_group_norm_backward": _group_norm(grad_out=-1, input=-1),
    **dict.fromkeys(("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm"), _batch_norm("input")),
    "native_batch_norm_backward": _batch_norm("grad_out", "input"),
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    **dict.fromkeys(
        (f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn")),
        _heads_features,
    ),
    **dict.fromkeys(
        (f"_scaled_dot_product_{kind}_attention_backward" for kind in ("flash", "efficient", "cudnn")),
        _heads_features_backward,
    ),
    "embedding_dense_backward": _embedding_backward,
    **dict.fromkeys(("index_add", "index_add_"), _index_add),
    **dict.fromkeys(("scatter_add", "scatter_add_"), _scatter_add),
    **dict.fromkeys(("index_put", "index_put_", "_index_put_impl_"), _index_put),
}
"""By name, in-place forms of their own."""
