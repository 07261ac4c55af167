"""One intra-op thread, as in every rank (results to the bit depend on it); ranks end with the session; collections are short."""

import gc
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


freeze = gc.freeze


@pytest.fixture(scope="session", autouse=True)
def what_is_frozen_stays_so() -> Iterator[None]:
    """A simulation freezes what there is and thaws it: here the modules' freeze, below, stands in for its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "freeze", lambda: None)
        patch.setattr(gc, "unfreeze", lambda: None)
        yield
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def what_earlier_modules_made_is_frozen(what_is_frozen_stays_so: None) -> None:
    """Simulations, measurements and engines collect garbage; walking through all that thousands of tests import took most of their time."""
    gc.collect()
    freeze()
