"""Ends the ranks that tests have started."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def ranks_end_with_the_session() -> Iterator[None]:
    yield
    from tests import ranks

    ranks.stop_all()
