"""Every exception shardbook raises on purpose.

    ShardbookError
    ├── ConfigError(ValueError)         a setting, an argument or a file is wrong; found when it is built
    ├── UsageError(RuntimeError)        a call that the state of the engine does not allow
    │   └── ShardedReadError            the values of a sharded parameter were read outside ``engine.gathered``
    ├── BudgetError(RuntimeError)       more memory was wanted than a measurement's budget allows
    ├── DiskError(RuntimeError)         a disk that holds training state returned an error
    └── RankError(RuntimeError)         another rank makes it impossible to go on
        ├── DivergenceError             ranks committed to operations that cannot meet
        └── RankLostError               a rank raised, ended or was killed

Messages name the field or parameter, its value, what is allowed and the remedy.
"""


class ShardbookError(Exception):
    """Base of everything shardbook raises on purpose."""


class ConfigError(ShardbookError, ValueError):
    """A setting, an argument or a file is wrong. Raised when something is built, never half-way through a step."""


class UsageError(ShardbookError, RuntimeError):
    """A call that the engine cannot honour in its present state."""


class ShardedReadError(UsageError):
    """The values of a sharded parameter were read where they are not gathered."""


class BudgetError(ShardbookError, RuntimeError):
    """More memory was wanted than a measurement's budget allows."""


class DiskError(ShardbookError, RuntimeError):
    """A disk that holds training state returned an error, or ended a read or a write early.

    ``path``, ``offset`` and ``nbytes`` (bytes in that file) say where, ``errno`` what the system returned (None: it made no progress).
    """

    def __init__(self, message: str, *, path: str, offset: int, nbytes: int, errno: int | None) -> None:
        super().__init__(message)
        self.path, self.offset, self.nbytes, self.errno = path, offset, nbytes, errno


class RankError(ShardbookError, RuntimeError):
    """This rank cannot go on because of another one."""


class DivergenceError(RankError):
    """Ranks have committed to operations that can never meet."""


class RankLostError(RankError):
    """A rank raised an exception, ended, or was killed."""
