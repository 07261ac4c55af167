"""The ranks tell each other how far they have come: whoever fails lets nobody wait, and all of them say the same."""

import errno
from collections.abc import Generator
from contextlib import contextmanager

import torch

from shardbook.checkpoint.errors import CheckpointError
from shardbook.engine.comm import Transport
from shardbook.errors import RankError

_WORDS = 340
_BYTES = 6  # of a float64's mantissa, in which every integer up to 48 bits is exact


class Ranks:
    """All ranks of an engine, seen from one."""

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self._transport, self._device = transport, device
        self.rank, self.num_ranks = transport.rank, transport.num_ranks

    def told(self, text: str) -> list[str]:
        """Every rank's text (its first 2,000 bytes), by rank. All ranks call it."""
        data = text.encode(errors="replace")[: (_WORDS - 1) * _BYTES]
        words = [float(len(data))] + [float(int.from_bytes(data[at : at + _BYTES], "little")) for at in range(0, len(data), _BYTES)]
        vector = torch.tensor(words + [0.0] * (_WORDS - len(words)), dtype=torch.float64, device=self._device)
        rows = self._transport.exchange(vector, "checkpoint").tolist()
        texts = [b"".join(int(word).to_bytes(_BYTES, "little") for word in row[1:])[: int(row[0])] for row in rows]
        return [text.decode(errors="ignore") for text in texts]

    def compared(self, numbers: list[int]) -> list[list[int]]:
        """Every rank's numbers (below 2^53), by rank. All ranks give equally many."""
        rows = self._transport.exchange(torch.tensor(numbers, dtype=torch.float64, device=self._device), "checkpoint").tolist()
        return [[int(number) for number in row] for row in rows]

    @contextmanager
    def together(self, doing: str) -> Generator[None]:
        """All ranks leave the block, or all of them raise what the first of them raised in it.

        Raises:
            CheckpointError: a rank could not do its part; the message is the same on all ranks.
        """
        failure, cause = "", None
        try:
            yield
        except (CheckpointError, OSError) as error:
            failure, cause = words(error, doing), error
        except RankError:
            raise  # nothing can be told any more
        except Exception as error:  # noqa: BLE001  the others would wait for this rank for ever
            failure, cause = f"{doing}: {type(error).__name__}: {error}", error
        found = [(rank, text) for rank, text in enumerate(self.told(failure)) if text]
        if found:
            rank, text = found[0]
            raise CheckpointError(text if self.num_ranks == 1 else f"rank {rank}: {text}") from cause


_REMEDIES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "raise the quota",
    errno.EROFS: "choose a file system that can be written",
    errno.EACCES: "choose a folder that you may write to",
}


def words(error: CheckpointError | OSError, doing: str) -> str:
    """What is wrong, while doing what, and the remedy."""
    if isinstance(error, CheckpointError):
        return str(error)
    where, remedy = error.filename or doing, _REMEDIES.get(error.errno or 0, "see what the file system lacks")
    return f"{where}: {error.strerror} (errno {error.errno}, while {doing}): {remedy}, and do it again"
