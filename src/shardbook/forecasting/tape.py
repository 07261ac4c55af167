"""A log of what is taken and given back, in the order of a step, and its highest instants.

A forecast walks through a step with sizes instead of values. Whatever would take memory is written here; nothing is allocated. An
entry's account may become known after it was taken (a result is an activation once autograd saves it), so accounts are read when
the walk is over.

>>> tape = Tape()
>>> tape.at("forward", "blocks.0")
>>> kept = tape.take(Account.WORKSPACE, 100)
>>> tape.give(tape.take(Account.WORKSPACE, 50))
>>> kept.account = Account.ACTIVATION
>>> [(peak.where, dict(peak.accounts)) for peak in tape.peaks()]
[('blocks.0', {'ACTIVATION': 100, 'WORKSPACE': 50})]
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress

from shardbook.accounts import Account
from shardbook.forecasting.result import PhasePeak


class Entry:
    """Bytes that are taken together and given back together. ``label``: what they are; ``pool``: whose free bytes they may use.

    ``is_away``: they are the host's.
    """

    __slots__ = ("account", "is_away", "label", "nbytes", "pool")

    def __init__(self, account: Account, nbytes: int, label: str, pool: str, *, is_away: bool = False) -> None:
        self.account, self.nbytes, self.label, self.pool, self.is_away = account, nbytes, label, pool, is_away


class Tape:
    """See the file's header. ``granule``: an allocator gives out multiples of so many bytes; 1 counts what was asked for."""

    def __init__(self, granule: int = 1) -> None:
        self._granule = granule
        self._log: list[tuple[Entry, int]] = []
        self._host: Counter[Account] = Counter()
        self._host_highest: Mapping[str, int] = {}
        self._places: list[tuple[int, str, str]] = [(0, "", "")]

    def at(self, phase: str, where: str) -> None:
        """What follows happens in this phase and unit."""
        self._places.append((len(self._log), phase, where))

    @property
    def here(self) -> tuple[str, str]:
        """Phase and unit of what happens now."""
        return self._places[-1][1:]

    def take(self, account: Account, nbytes: int, label: str = "", *, pool: str = "") -> Entry:
        """Bytes are taken, from a pool of their own where another stream makes them."""
        granule = self._granule
        entry = Entry(account, nbytes if granule == 1 else -(-nbytes // granule) * granule, label, pool)
        self._log.append((entry, entry.nbytes))
        return entry

    def take_on_host(self, account: Account, nbytes: int, label: str = "") -> Entry:
        """Bytes of the host's memory are taken, to the byte; they are in no peak of the device's."""
        entry = Entry(account, nbytes, label, "", is_away=True)
        self._move_on_host(account, nbytes)
        return entry

    def give(self, entry: Entry) -> None:
        """They are given back."""
        if entry.is_away:
            self._move_on_host(entry.account, -entry.nbytes)
        else:
            self._log.append((entry, -entry.nbytes))

    @property
    def host(self) -> Mapping[str, int]:
        """Account to bytes of the host's memory at the instant when it held most."""
        return self._host_highest

    def _move_on_host(self, account: Account, nbytes: int) -> None:
        self._host[account] += nbytes
        if self._host.total() > sum(self._host_highest.values()):
            self._host_highest = {str(name): held for name, held in self._host.items() if held}

    def peaks(self) -> list[PhasePeak]:
        """The highest instant of every stay in a place, in the order of the walk; what was held already when it began counts.

        What was taken before the first place is held, and no place of its own.
        """
        instants: dict[int, list[int]] = {}  # several places share one where nothing more is taken
        for place, index in self._highest():
            if self._places[place][1]:
                instants.setdefault(index, []).append(place)
        live: dict[Account, int] = {}
        found = [self._peak(place, live) for place in instants.get(-1, ())]
        for index, (entry, change) in enumerate(self._log):
            live[entry.account] = live.get(entry.account, 0) + change
            found += [self._peak(place, live) for place in instants.get(index, ())]
        return found

    def pools(self) -> Mapping[str, int]:
        """The highest total of each pool: a caching allocator gives no pool's free bytes to another."""
        live: dict[str, int] = {}
        highest: dict[str, int] = {}
        for entry, change in self._log:
            live[entry.pool] = live.get(entry.pool, 0) + change
            highest[entry.pool] = max(highest.get(entry.pool, 0), live[entry.pool])
        return highest

    def live_at_peak(self) -> Mapping[str, int]:
        """Label to bytes of what is live at the highest instant of all, largest first."""
        highest = self._instant_of_all()
        live: dict[str, int] = {}
        for entry, change in self._log[: highest + 1]:
            name = f"{entry.account}: {entry.label}"
            live[name] = live.get(name, 0) + change
        return dict(sorted(((name, nbytes) for name, nbytes in live.items() if nbytes), key=lambda item: -item[1]))

    def _instant_of_all(self) -> int:
        """Index in the log of the highest instant of all places that have a name."""
        named = next((begin for begin, phase, _ in self._places if phase), 0)
        total, best, instant = 0, -1, 0
        for index, (_, change) in enumerate(self._log):
            total += change
            if total > best and index >= named:
                best, instant = total, index
        return instant

    def _highest(self) -> Iterator[tuple[int, int]]:
        """(number of the place, index in the log) of the highest instant of each place; -1 is before the first entry."""
        ends = [begin for begin, _, _ in self._places[1:]] + [len(self._log)]
        total, index = 0, 0
        for place, end in enumerate(ends):
            best, at = total, index - 1
            while index < end:
                total += self._log[index][1]
                if total > best:
                    best, at = total, index
                index += 1
            yield place, at

    def _peak(self, place: int, live: Mapping[Account, int]) -> PhasePeak:
        _, phase, where = self._places[place]
        return PhasePeak(phase=phase, where=where, accounts={str(account): nbytes for account, nbytes in live.items() if nbytes})


class Memory:
    """Bytes that live as long as something refers to them, as a tensor's storage does."""

    __slots__ = ("_tape", "entry")

    def __init__(self, tape: Tape, account: Account, nbytes: int, label: str) -> None:
        self._tape, self.entry = tape, tape.take(account, nbytes, label)

    def becomes(self, account: Account) -> None:
        """From now on it is for something else. (Setting the entry's account says so of all its life.)"""
        self._tape.give(self.entry)
        self.entry = self._tape.take(account, self.entry.nbytes, self.entry.label)

    def __del__(self) -> None:
        with suppress(AttributeError):  # the walk itself is being torn down
            self._tape.give(self.entry)
