"""A decoder of any family, in the lines of the code that runs it, on sizes.

Weights go by the names of ``facts/parameters.py``. What an architecture has on top (norms of queries and keys, norms behind the two
halves of a block, biases, learned positions, routed experts, latent attention) stands where its code has it.
"""

from collections.abc import Callable, Mapping, Sequence

from shardbook.facts.architecture import Architecture
from shardbook.forecasting.blocks.attention import attend, shared_tables
from shardbook.forecasting.blocks.experts import route
from shardbook.forecasting.blocks.feed_forward import feed_forward
from shardbook.forecasting.blocks.losses import loss_of
from shardbook.forecasting.blocks.norms import norm
from shardbook.forecasting.blocks.setting import Setting
from shardbook.forecasting.graph import Value, Weight, given
from shardbook.forecasting.walk import Walk


class Decoder:
    """See the file's header. ``recomputed``: numbers of the blocks that are; ``choose``: which of their operators' results stay."""

    def __init__(
        self,
        setting: Setting,
        weights: Mapping[str, Weight],
        *,
        recomputed: frozenset[int] = frozenset(),
        choose: Callable[[], Callable[[str], bool]] | None = None,
    ) -> None:
        self._setting, self._weights = setting, weights
        self._recomputed, self._choose = recomputed, choose
        self._block_units = {name.split(".")[1]: weight.unit for name, weight in weights.items() if name.startswith("blocks.")}

    @property
    def _facts(self) -> Architecture:
        return self._setting.facts

    def loss(self, walk: Walk) -> Value:
        """The forward of the whole model, down to the loss."""
        setting, weights = self._setting, self._weights
        x = self._embed(walk)
        tables = shared_tables(setting, walk.ops, x.width)
        for index in range(self._facts.layers):
            x = self._block(walk, x, f"blocks.{index}", tables, recomputed=index in self._recomputed)
        del tables
        normed = norm(setting, walk.ops, x, weights, "norm")
        del x
        return loss_of(setting, walk, normed, weights)

    def _embed(self, walk: Walk) -> Value:
        ops, setting, weights = walk.ops, self._setting, self._weights
        table = weights["embedding.weight"]
        x = walk.unit(table.unit, lambda _: ops.embedding(table, setting.stream_rows, self._facts.hidden))
        if "positions.weight" in weights:
            x = self._positioned(walk, x, weights["positions.weight"])
        if "embedding_norm.weight" in weights:
            x = norm(setting, ops, x, weights, "embedding_norm")
        return self._dropped(walk, x)

    def _positioned(self, walk: Walk, x: Value, table: Weight) -> Value:
        """Plus learned positions, the same for every sequence."""
        ops, setting = walk.ops, self._setting
        if setting.style.positions == "slice":
            return ops.add_row(x, table, rows_numel=table.numel)
        columns = self._facts.hidden
        numbers = ops.new(setting.sequence, 8, "numbers of positions")
        row = walk.unit(table.unit, lambda _: ops.embedding(table, setting.sequence, columns, numbers))
        return ops.add(x, row) if setting.micro_batch == 1 else ops.add_row(x, row, rows_numel=row.numel)

    def _block(self, walk: Walk, x: Value, name: str, tables: Sequence[Value], *, recomputed: bool) -> Value:
        unit = self._block_units[name.split(".")[1]]
        if recomputed:
            return walk.unit(
                unit, lambda x: walk.ops.checkpoint(lambda inner: self._run(walk, inner, name, tables), given(x), self._choose, unit), x
            )
        return walk.unit(unit, lambda x: self._run(walk, x, name, tables), x)

    def _run(self, walk: Walk, x: Value | None, name: str, tables: Sequence[Value]) -> Value:
        x = given(x)
        ops, setting, weights = walk.ops, self._setting, self._weights
        normed = self._maybe_norm(walk, x, f"{name}.attention_norm")
        mixed = attend(setting, ops, normed, weights, f"{name}.attention", tables)
        if setting.facts.parallel:
            other = (
                normed if f"{name}.feed_forward_norm.weight" not in weights else norm(setting, ops, x, weights, f"{name}.feed_forward_norm")
            )
            return ops.add(ops.add(x, mixed), self._feed_forward(walk, other, name))
        del normed
        mixed = self._dropped(walk, self._maybe_norm(walk, mixed, f"{name}.attention_post_norm"))
        x = ops.add(x, mixed)
        del mixed
        inner = self._feed_forward(walk, self._maybe_norm(walk, x, f"{name}.feed_forward_norm"), name)
        return ops.add(x, self._dropped(walk, self._maybe_norm(walk, inner, f"{name}.feed_forward_post_norm")))

    def _dropped(self, walk: Walk, x: Value) -> Value:
        return walk.ops.dropout(x, self._facts.dropout, on_cuda=self._setting.on_cuda)

    def _feed_forward(self, walk: Walk, x: Value, name: str) -> Value:
        if f"{name}.feed_forward.experts.gate_up" in self._weights:
            return route(self._setting, walk.ops, x, self._weights, f"{name}.feed_forward")
        return feed_forward(self._setting, walk.ops, x, self._weights, f"{name}.feed_forward", self._facts.ffn)

    def _maybe_norm(self, walk: Walk, x: Value, name: str) -> Value:
        """A block has its norms before its halves, behind them, or both; the first OLMo's have no weights."""
        weightless = not self._facts.norm_weight and "_post_" not in name
        return norm(self._setting, walk.ops, x, self._weights, name) if weightless or f"{name}.weight" in self._weights else x
