"""Which records were begun while something ran: so that a callable which names its own path can be found out."""

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

_BEGUN: ContextVar[list[Path] | None] = ContextVar("records begun", default=None)


@contextmanager
def records_begun() -> Generator[list[Path]]:
    """The folders of all records that are begun inside, in this thread and in this process, in their order.

    >>> with records_begun() as folders:
    ...     note_begun(Path("runs/a.rec"))
    >>> folders
    [PosixPath('runs/a.rec')]
    """
    folders: list[Path] = []
    token = _BEGUN.set(folders)
    try:
        yield folders
    finally:
        _BEGUN.reset(token)


def note_begun(folder: Path) -> None:
    """A recorder has begun to write there."""
    begun = _BEGUN.get()
    if begun is not None:
        begun.append(folder)
