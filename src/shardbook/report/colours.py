"""One colour per account, the same in every picture, legend and theme.

The twelve colours were searched for this purpose: random sRGB colours, moved one at a time so that the smallest distance of any
pair grows, the distance being that in OKLab (Ottosson 2020) for usual vision and under the simulated deuteranopia and
protanopia of Machado, Oliveira and Fernandes (2009), whichever is least. No pair is nearer than 0.14, about seven times what
is just seen. Every segment has an outline as well, and a place in an order that never changes, so that none depends on colour
alone.
"""

from collections.abc import Mapping

from shardbook.accounts import Account

ACCOUNTS: Mapping[str, str] = {
    Account.PARAM: "#092ba6",
    Account.MASTER: "#73c5ff",
    Account.MOMENT: "#276fa2",
    Account.GRAD: "#8e3707",
    Account.GATHERED: "#698cff",
    Account.GRAD_FULL: "#ba690b",
    Account.COMM: "#681d50",
    Account.ACTIVATION: "#5b9ea1",
    Account.WORKSPACE: "#ccac46",
    Account.BUFFER: "#81f2ce",
    Account.INPUT: "#4b28fc",
    Account.UNACCOUNTED: "#f1e102",
}

CAUSES: Mapping[str, str] = {
    "issued late": "#2f2f2f",
    "bandwidth": "#5f5f5f",
    "waiting for the producer": "#8c8c8c",
    "waiting for a buffer": "#b8b8b8",
    "straggler rank": "#e6e6e6",
}
"""Steps of grey, so that no cause is taken for an account."""

NEUTRAL = "#808080"
"""For what is neither an account nor a cause; readable on both papers."""


def account_colour(account: str) -> str:
    """The account's colour; grey for one that this release does not know."""
    return ACCOUNTS.get(account, NEUTRAL)


def cause_colour(cause: str) -> str:
    """The cause's grey; the middle one for a cause that this release does not know."""
    return CAUSES.get(cause, NEUTRAL)
