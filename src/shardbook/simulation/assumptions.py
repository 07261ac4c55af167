"""Reads of values that are answered by an assumption, each declared in the forecast.

What shardbook's engine reads at a step it assumes by itself (finite gradients). Here are those of libraries that models are made of.
"""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

UNPACKED = "transformers: no two sequences are packed into one row, so attention needs no mask"


@contextmanager
def unpacked() -> Generator[tuple[str, ...]]:
    """While it is open, transformers takes positions for those of one sequence a row.

    It looks for packed sequences by their values, and where a tensor is fake it doesn't look and makes masks that a real run does not.
    Gives the assumptions that are made.
    """
    library: Any = sys.modules.get("transformers.masking_utils")
    look = getattr(library, "find_packed_sequence_indices", None)
    if look is None:
        yield ()
        return

    def find_packed_sequence_indices(*args: Any, **kwargs: Any) -> None:
        look(*args, **kwargs)  # what looking takes, a real run takes as well

    library.find_packed_sequence_indices = find_packed_sequence_indices
    try:
        yield (UNPACKED,)
    finally:
        library.find_packed_sequence_indices = look
