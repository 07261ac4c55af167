"""Which rows of a product are in the default suite; the full one runs them all."""

from itertools import product
from typing import Any

import pytest


def every(step: int, *lists: Any) -> list[Any]:
    """The product of the lists; every ``step``-th row, the first included, is in the default suite."""
    return [pytest.param(*row, marks=() if number % step == 0 else pytest.mark.full) for number, row in enumerate(product(*lists))]
