"""One intra-op thread, as in every rank (results to the bit depend on it); ranks end with the session."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def ranks_end_with_the_session() -> Iterator[None]:
    yield
    if "tests.ranks" in sys.modules:
        sys.modules["tests.ranks"].stop_all()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
