"""The sizes of a decoder, without torch: what options, recipes and formulas read."""

from dataclasses import dataclass

from shardbook.checks import Check


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes of :class:`~shardbook.models.decoder.Decoder`.

    Args:
        vocab: number of token values; 256 for bytes.
        layers: number of blocks.
        width: elements of the residual stream.
        heads: query heads; the head width is ``width / heads`` and even, as rotary pairs its elements.
        kv_heads: key and value heads, each shared by ``heads / kv_heads`` query heads.
        ffn: inner elements of the gated feed-forward.
        tied: whether the head shares the embedding's matrix.
        rope_base: base of the rotary frequencies.
        norm_eps: what RMSNorm adds to the mean square.

    Raises:
        ConfigError: a size below 1; heads that don't divide the width or the query heads; an odd head width.

    >>> DecoderConfig(layers=2, width=64, heads=4, kv_heads=2, ffn=128).num_parameters
    106816
    """

    vocab: int = 256
    layers: int = 4
    width: int = 192
    heads: int = 6
    kv_heads: int = 2
    ffn: int = 512
    tied: bool = False
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        check = Check(self)
        for name in ("vocab", "layers", "width", "heads", "kv_heads", "ffn"):
            check.integer(name, least=1, remedy="give a positive size")
        check.flag("tied")
        check.positive("rope_base", remedy="10000 is usual")
        check.positive("norm_eps", remedy="1e-5 is usual")
        check.done()
        if self.width % self.heads or (self.width // self.heads) % 2:
            even = [n for n in range(1, self.width + 1) if self.width % (2 * n) == 0]
            allowed = f"a number of heads that cuts width = {self.width} into equal, even parts"
            near = min(even, key=lambda n: abs(n - self.heads), default=None)
            check.add("heads", self.heads, allowed, "choose an even width" if near is None else f"the nearest is {near}")
        elif self.heads % self.kv_heads:
            divisors = [n for n in range(1, self.heads + 1) if self.heads % n == 0]
            near = min(divisors, key=lambda n: abs(n - self.kv_heads))
            check.add("kv_heads", self.kv_heads, f"a divisor of heads = {self.heads}", f"the nearest is {near}")
        check.done()

    @property
    def head_width(self) -> int:
        """Elements of one head."""
        return self.width // self.heads

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters: ``layers * (2*width + 2*width*(heads + kv_heads)*head_width + 3*width*ffn) + width``
        and ``vocab * width`` for the embedding and, unless tied, once more for the head.
        """
        attention = 2 * self.width * (self.heads + self.kv_heads) * self.head_width
        block = 2 * self.width + attention + 3 * self.width * self.ffn
        return self.layers * block + self.width + self.vocab * self.width * (1 if self.tied else 2)
