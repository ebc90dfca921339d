"""Games by name, as lbforaging registers them."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

SIZES = range(5, 20)
"""Sizes of the fields."""
NUM_PLAYERS = range(2, 10)
"""Numbers of players."""
NUM_FOODS = range(1, 5)
"""Numbers of foods."""

_PARTIAL_SIGHT = 2
_NAME = re.compile(r"Foraging(-2s)?-([1-9]\d*)x([1-9]\d*)-([1-9]\d*)p-([1-9]\d*)f(-coop)?-v3")


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What the name of a game says.

    Args:
        size: rows and columns of the field.
        num_players: number of players.
        num_foods: number of foods that are placed, if there is room for them.
        partial: whether players see only two cells far, unless the options say otherwise.
        coop: whether every food needs several players.

    Raises:
        ValueError: if a number is not one of :data:`SIZES`, :data:`NUM_PLAYERS` or :data:`NUM_FOODS`.
    """

    size: int
    num_players: int
    num_foods: int
    partial: bool = False
    coop: bool = False

    def __post_init__(self) -> None:
        for what, known in (("size", SIZES), ("num_players", NUM_PLAYERS), ("num_foods", NUM_FOODS)):
            if getattr(self, what) not in known:
                raise ValueError(f"{what} must be between {known[0]} and {known[-1]}, got {getattr(self, what)}")

    @property
    def name(self) -> str:
        """The registered name, such as ``"Foraging-2s-8x8-2p-2f-coop-v3"``."""
        start, end = "-2s" * self.partial, "-coop" * self.coop
        return f"Foraging{start}-{self.size}x{self.size}-{self.num_players}p-{self.num_foods}f{end}-v3"

    @property
    def sight(self) -> int:
        """How many cells far a player sees in each direction."""
        return _PARTIAL_SIGHT if self.partial else self.size


def parse(name: str) -> Scenario:
    """Returns the scenario of a name.

    Raises:
        ValueError: if lbforaging registers no game of this name.
    """
    match = _NAME.fullmatch(name)
    if match is None or match[2] != match[3]:
        raise ValueError(f"a scenario is named Foraging[-2s]-{{s}}x{{s}}-{{p}}p-{{f}}f[-coop]-v3, got {name!r}")
    partial, size, _, num_players, num_foods, coop = match.groups()
    return Scenario(
        size=int(size),
        num_players=int(num_players),
        num_foods=int(num_foods),
        partial=partial is not None,
        coop=coop is not None,
    )


SCENARIOS = tuple(
    Scenario(size=size, num_players=num_players, num_foods=num_foods, partial=partial, coop=coop).name
    for size, num_players, num_foods, partial, coop in itertools.product(
        SIZES, NUM_PLAYERS, NUM_FOODS, (False, True), (False, True)
    )
)
"""Names of all games."""
