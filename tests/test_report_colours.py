"""One colour per account, told apart by people who see red and green as one, too."""

from itertools import combinations, pairwise

import pytest

from shardbook.accounts import Account
from shardbook.report.colours import ACCOUNTS, CAUSES, NEUTRAL, account_colour, cause_colour
from shardbook.report.words import ACCOUNTS as MEANINGS
from shardbook.report.words import CAUSES as CAUSE_MEANINGS

# Linear RGB to what is seen (Machado, Oliveira and Fernandes 2009, severity 1).
SIGHT = {
    "usual": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
}
# Linear RGB to cone responses, and their cube roots to OKLab (Ottosson 2020).
CONES = ((0.4122214708, 0.5363325363, 0.0514459929), (0.2119034982, 0.6806995451, 0.1073969566), (0.0883024619, 0.2817188376, 0.6299787005))
OKLAB = ((0.2104542553, 0.793617785, -0.0040720468), (1.9779984951, -2.428592205, 0.4505937099), (0.0259040371, 0.7827717662, -0.808675766))
PAPERS = {"light": "#ffffff", "dark": "#14171c"}


def times(matrix, vector):
    return [sum(factor * value for factor, value in zip(row, vector, strict=True)) for row in matrix]


def linear(colour):
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]


def seen(colour, sight):
    rgb = [min(1.0, max(0.0, value)) for value in times(SIGHT[sight], linear(colour))]
    return times(OKLAB, [value ** (1 / 3) for value in times(CONES, rgb)])


def distance(first, second, sight):
    return sum((a - b) ** 2 for a, b in zip(seen(first, sight), seen(second, sight), strict=True)) ** 0.5


def contrast(first, second):
    light, dark = sorted((sum(times(((0.2126, 0.7152, 0.0722),), linear(one))) for one in (first, second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_the_formula_knows_black_from_white_and_red_from_green():
    assert distance("#000000", "#ffffff", "usual") == pytest.approx(1.0, abs=1e-3)
    # a red and a green of one lightness: far apart for most, near for somebody without the green cones
    assert distance("#d04a3a", "#7b8b00", "deuteranopia") < 0.4 * distance("#d04a3a", "#7b8b00", "usual")


@pytest.mark.parametrize("sight", SIGHT)
def test_no_two_accounts_look_alike(sight):
    nearest = min((distance(ACCOUNTS[a], ACCOUNTS[b], sight), a, b) for a, b in combinations(ACCOUNTS, 2))
    assert nearest[0] >= 0.14, nearest


@pytest.mark.parametrize("paper", PAPERS.values(), ids=PAPERS)
def test_no_account_vanishes_on_the_paper(paper):
    assert min(contrast(colour, paper) for colour in ACCOUNTS.values()) >= 1.3


def test_causes_differ_in_lightness_alone():
    greys = [seen(colour, "usual")[0] for colour in CAUSES.values()]
    assert min(later - earlier for earlier, later in pairwise(greys)) >= 0.12
    assert all(colour[1:3] == colour[3:5] == colour[5:7] for colour in CAUSES.values())


def test_every_account_and_cause_has_a_colour_and_a_meaning():
    assert set(ACCOUNTS) == set(MEANINGS) == set(Account)
    assert set(CAUSES) == set(CAUSE_MEANINGS)
    assert account_colour("LATER") == cause_colour("unheard of") == NEUTRAL
