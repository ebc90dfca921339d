"""Games by name, as rware registers them."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

SIZES: Mapping[str, tuple[int, int]] = MappingProxyType(
    {"tiny": (1, 3), "small": (2, 3), "medium": (2, 5), "large": (3, 5)}
)
"""Rows and columns of blocks of shelves."""
REQUESTS_PER_AGENT: Mapping[str, float] = MappingProxyType({"easy": 2.0, "": 1.0, "hard": 0.5})
"""How many shelves are requested at a time, by difficulty."""
NUM_AGENTS = range(1, 20)
"""Numbers of agents."""
COLUMN_HEIGHT = 8
"""Shelves above each other in a block, which is two shelves wide."""

_NAME = re.compile(r"rware-([a-z]+)-([1-9]\d*)ag(?:-([a-z]+))?-v2")


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What the name of a game says.

    Args:
        size: one of :data:`SIZES`.
        num_agents: number of agents.
        difficulty: ``"easy"``, ``""`` or ``"hard"``, see :data:`REQUESTS_PER_AGENT`.

    Raises:
        ValueError: if a value is not among those that are registered.
    """

    size: str
    num_agents: int
    difficulty: str = ""

    def __post_init__(self) -> None:
        if self.size not in SIZES:
            raise ValueError(f"size must be one of {', '.join(SIZES)}, got {self.size!r}")
        if self.difficulty not in REQUESTS_PER_AGENT:
            raise ValueError(f"difficulty must be easy, hard or left out, got {self.difficulty!r}")
        if self.num_agents not in NUM_AGENTS:
            raise ValueError(f"num_agents must be between {NUM_AGENTS[0]} and {NUM_AGENTS[-1]}, got {self.num_agents}")

    @property
    def name(self) -> str:
        """The registered name, such as ``"rware-tiny-4ag-hard-v2"``."""
        difficulty = f"-{self.difficulty}" if self.difficulty else ""
        return f"rware-{self.size}-{self.num_agents}ag{difficulty}-v2"

    @property
    def num_requests(self) -> int:
        """How many shelves are requested at a time, unless the options say otherwise; one agent has none if it is hard.

        The package crashes where these are not fewer than the shelves, see :data:`SCENARIOS`.
        """
        return int(self.num_agents * REQUESTS_PER_AGENT[self.difficulty])

    @property
    def map(self) -> str:
        """The warehouse: a line for every row, ``x`` for shelves, ``.`` for ways and ``g`` for goals."""
        rows, columns = SIZES[self.size]
        height, width = (COLUMN_HEIGHT + 1) * rows + 2, 3 * columns + 1
        middle = (width // 2 - 1, width // 2)

        def cell(x: int, y: int) -> str:
            if y == height - 1:
                return "g" if x in middle else "."
            is_queue = x in middle and y > height - (COLUMN_HEIGHT + 3)
            return "." if x % 3 == 0 or y % (COLUMN_HEIGHT + 1) == 0 or is_queue else "x"

        return "\n".join("".join(cell(x, y) for x in range(width)) for y in range(height))


def parse(name: str) -> Scenario:
    """Returns the scenario of a name.

    Raises:
        ValueError: if rware registers no game of this name; names the nearest ones.
    """
    match = _NAME.fullmatch(name)
    problem = "a scenario is named rware-{size}-{agents}ag[-easy|-hard]-v2"
    if match is not None:
        size, num_agents, difficulty = match.groups()
        try:
            return Scenario(size=size, num_agents=int(num_agents), difficulty=difficulty or "")
        except ValueError as error:
            problem = str(error)
    nearest = difflib.get_close_matches(name, SCENARIOS, n=3)
    hint = f"; did you mean {' or '.join(nearest)}?" if nearest else ""
    raise ValueError(f"unknown scenario {name!r}: {problem}{hint}")


def _is_playable(scenario: Scenario) -> bool:
    return scenario.num_requests < scenario.map.count("x")


SCENARIOS = tuple(
    scenario.name
    for size, difficulty, num_agents in itertools.product(SIZES, REQUESTS_PER_AGENT, NUM_AGENTS)
    if _is_playable(scenario := Scenario(size=size, num_agents=num_agents, difficulty=difficulty))
)
"""Names of all games that can be played.

``rware-tiny-{16…19}ag-easy-v2`` are registered too, but request all of the 32 shelves or more: the package crashes at
the first reset or the first delivery. They need the option ``request_queue_size``.
"""
