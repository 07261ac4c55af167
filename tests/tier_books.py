"""What an engine says of bytes that rest somewhere and that move, added up for tests of recomputation and offload."""

from collections import Counter

from shardbook.accounts import Account, Tier
from shardbook.events import Booking, Event, Traffic, Transfer


class Books:
    """What is where, the most there was, and what has moved; an observer of an engine."""

    def __init__(self) -> None:
        self.held: Counter[tuple[Account, Tier]] = Counter()
        self.most: Counter[tuple[Account, Tier]] = Counter()
        self.moved: Counter[str] = Counter()
        self.moved_by_unit: Counter[tuple[str, str]] = Counter()
        self.gathers: Counter[str] = Counter()

    def __call__(self, event: Event) -> None:
        if isinstance(event, Booking):
            key = (event.account, event.tier)
            self.held[key] += event.nbytes
            self.most[key] = max(self.most[key], self.held[key])
        elif isinstance(event, Transfer):
            self.moved[event.link] += event.nbytes
            self.moved_by_unit[event.link, event.unit] += event.nbytes
        elif isinstance(event, Traffic) and event.kind == "gather":
            self.gathers[event.unit] += 1
