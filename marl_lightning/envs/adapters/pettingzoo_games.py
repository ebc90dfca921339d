"""The games of the package pettingzoo: cooperative ones with physics, arcade games, and games of boards and cards."""

from __future__ import annotations

import pkgutil
import re
import warnings
from functools import partial
from types import ModuleType
from typing import Any

from marl_lightning.envs.adapters.packages import require
from marl_lightning.envs.adapters.pettingzoo import PettingZooAdapter
from marl_lightning.envs.adapters.turn_based import AECAdapter
from marl_lightning.envs.base import MultiAgentEnv

_FAMILIES = ("sisl", "butterfly", "classic")
_VERSION = re.compile(r"_v\d+$")


def scenarios() -> tuple[str, ...]:
    """Returns the names of all games in the installed package, such as ``"classic/tictactoe_v3"``.

    The names come without the packages that only some games need. Raises ``ImportError`` if pettingzoo is missing.
    """
    require("pettingzoo", extra="pettingzoo")
    return tuple(
        f"{family}/{module.name}"
        for family in _FAMILIES
        for module in pkgutil.iter_modules(require(f"pettingzoo.{family}", extra=family).__path__)
        if _VERSION.search(module.name)
    )


def make(scenario: str, *, with_state: bool = True, **kwargs: Any) -> MultiAgentEnv:
    """Makes one instance, by :class:`PettingZooAdapter` if the game has a parallel form, else by :class:`AECAdapter`.

    Faults of the package are mended: multiwalker's time limit truncates (the package terminates), and it has a state
    when walkers have fallen; cooperative_pong and pistonball are drawn (``render_mode`` is ``"rgb_array"`` unless
    another one is given; in the package their observations stand still without); zombies come as late after every
    start; the observation of rock, paper, scissors is one-hot; hanabi begins with the player that it has drawn; boards
    of go may have different sizes.

    Args:
        scenario: one of :func:`scenarios`.
        with_state: whether the state is that of the game; otherwise it is empty. Pictures are large: pistonball's state
            has 1.5 million entries.
        **kwargs: arguments of the game, see the documentation of PettingZoo.

    Raises:
        ImportError: if a package that the game needs is not installed.
        ValueError: if there is no such game; the message says what to use instead of a former name.
    """
    known = scenarios()
    if scenario not in known:
        raise ValueError(_explain(scenario, known))
    family, _, module = scenario.partition("/")
    package, game = _import_game(family, module), _VERSION.sub("", module)
    from marl_lightning.envs.adapters import pettingzoo_repairs as repairs

    arguments = {"package": package, "game": game, "with_state": with_state, **kwargs}
    name = f"pettingzoo/{scenario}"
    try:
        if hasattr(package, "parallel_env"):
            return PettingZooAdapter(factory=partial(repairs.make_parallel, **arguments), name=name)
        return AECAdapter(factory=partial(repairs.make_turn_based, **arguments), name=name)
    except ImportError as error:
        raise ImportError(f'{name} needs a package that is missing: pip install "marl-lightning[{family}]"') from error


def _import_game(family: str, module: str) -> ModuleType:
    with warnings.catch_warnings():
        # Every one of these modules calls itself deprecated, in favour of a registry that has no module for options.
        warnings.simplefilter("ignore", DeprecationWarning)
        return require(f"pettingzoo.{family}.{module}", extra=family)


def _explain(scenario: str, known: tuple[str, ...]) -> str:
    """Returns what to use instead of a name that is not known."""
    message = f"unknown game 'pettingzoo/{scenario}'"
    family, _, module = scenario.rpartition("/")
    if family == "mpe":
        return f"{message}: the MPE games are a family of their own, use 'mpe/{module}'"
    if family.startswith("magent"):
        return f"{message}: the MAgent2 games are a family of their own, use 'magent2/{module}'"
    title = _VERSION.sub("", module)
    if same := [other for other in known if _VERSION.sub("", other.partition("/")[2]) == title]:
        return f"{message}: the installed pettingzoo has another version, use 'pettingzoo/{same[0]}'"
    if title == "waterworld":
        others = ", ".join(other for other in known if other.startswith("sisl/"))
        return f"{message}: pettingzoo no longer has it; what is left of its family: {others}"
    return f"{message}; choose one of {', '.join(known)}"
