"""Environments by name: ``"family/scenario"``, such as ``"smac/3m"`` or ``"mpe/simple_spread_v3"``.

A family is a set of games that are built in the same way. Its package is imported only when one of them is made.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import pkgutil
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from marl_lightning.envs.base import MultiAgentEnv, VectorEnv
from marl_lightning.envs.validation import check_num_envs

if TYPE_CHECKING:
    from pettingzoo import ParallelEnv

Factory = Callable[[], "MultiAgentEnv | ParallelEnv"]


@dataclass(frozen=True)
class _Family:
    """Arguments of :func:`register_family`; exactly one of ``make`` and ``make_vector`` is set."""

    scenarios: Callable[[], Iterable[str]]
    make: Callable[..., MultiAgentEnv] | None
    make_vector: Callable[..., VectorEnv] | None


_FAMILIES: dict[str, _Family] = {}


def register_family(
    name: str,
    *,
    scenarios: Callable[[], Iterable[str]],
    make: Callable[..., MultiAgentEnv] | None = None,
    make_vector: Callable[..., VectorEnv] | None = None,
) -> None:
    """Adds a family of games to the names that :func:`make_env` and :func:`make_vector_env` know.

    Example::

        register_family("mygames", scenarios=lambda: ["easy", "hard"], make=lambda scenario, **kwargs: MyGame(scenario))
        env = make_vector_env("mygames/easy", num_envs=8)

    Args:
        name: the part of the names before the slash.
        scenarios: returns the parts after the slash; raises ``ImportError`` if the package of the games is missing.
        make: called as ``make(scenario, **kwargs)``, for games of which an instance is made at a time.
        make_vector: called as ``make_vector(scenario, num_envs=, seed=, **kwargs)``, for games that are batched.

    Raises:
        ValueError: if the name has a slash or is taken, or not exactly one of the two functions is given.
    """
    if "/" in name or name in _FAMILIES:
        raise ValueError(f"a family needs a new name without a slash, got {name!r}")
    if (make is None) == (make_vector is None):
        raise ValueError("give exactly one of make and make_vector")
    _FAMILIES[name] = _Family(scenarios=scenarios, make=make, make_vector=make_vector)


def registered_environments() -> tuple[str, ...]:
    """Returns the names of all environments whose packages are installed, sorted."""
    names = []
    for family_name, family in _FAMILIES.items():
        try:
            names += [f"{family_name}/{scenario}" for scenario in family.scenarios()]
        except ImportError:
            continue
    return tuple(sorted(names))


def make_env(name: str | Factory, **kwargs: Any) -> MultiAgentEnv:
    """Makes one instance.

    Args:
        name: a registered name, or a function without arguments that returns a :class:`MultiAgentEnv` or a PettingZoo
            ``ParallelEnv``.
        **kwargs: arguments of the game; none for a function.

    Raises:
        ValueError: if there is no environment of this name.
        ImportError: if its package is not installed; the message names the command that installs it.
    """
    if not isinstance(name, str):
        return _call_factory(name, **kwargs)
    family, scenario = _find(name)
    if family.make is not None:
        return family.make(scenario, **kwargs)
    from marl_lightning.envs.single import SingleEnv

    return SingleEnv(env=family.make_vector(scenario, num_envs=1, seed=0, **kwargs))


def make_vector_env(name: str | Factory, num_envs: int, seed: int = 0, **kwargs: Any) -> VectorEnv:
    """Makes a vector environment; arguments and errors as for :func:`make_env`.

    Its ``recipe`` is ``{"name": name, "kwargs": kwargs}``, and ``None`` if ``name`` is a function.

    Args:
        name: see :func:`make_env`. A function is called once for every instance.
        num_envs: number of instances.
        seed: instance ``i`` is seeded with ``seed + i``.
        **kwargs: see :func:`make_env`.

    Raises:
        ValueError: also if ``num_envs`` is less than 1.
    """
    check_num_envs(num_envs)
    from marl_lightning.envs.vector.sync import SyncVectorEnv

    if not isinstance(name, str):
        return SyncVectorEnv(factory=partial(_call_factory, name, **kwargs), num_envs=num_envs, seed=seed)
    family, scenario = _find(name)
    if family.make_vector is not None:
        env = family.make_vector(scenario, num_envs=num_envs, seed=seed, **kwargs)
    else:
        env = SyncVectorEnv(factory=partial(family.make, scenario, **kwargs), num_envs=num_envs, seed=seed)
    env.recipe = {"name": name, "kwargs": dict(kwargs)}
    return env


def _find(name: str) -> tuple[_Family, str]:
    """Returns the family and the scenario of a name."""
    family_name, _, scenario = name.partition("/")
    family = _FAMILIES.get(family_name)
    if family is not None and scenario in family.scenarios():
        return family, scenario
    known = registered_environments() if family is None else [f"{family_name}/{each}" for each in family.scenarios()]
    nearest = difflib.get_close_matches(name, known, n=3)
    hint = f"; did you mean {' or '.join(nearest)}?" if nearest else ""
    raise ValueError(f"unknown environment {name!r} (families: {', '.join(sorted(_FAMILIES))}){hint}")


def _call_factory(factory: Factory, **kwargs: Any) -> MultiAgentEnv:
    if kwargs:
        raise ValueError(f"arguments {list(kwargs)} go with a name only; a function is called without any")
    env = factory()
    if isinstance(env, MultiAgentEnv):
        return env
    from marl_lightning.envs.adapters.pettingzoo import PettingZooAdapter

    return PettingZooAdapter(factory=lambda: env)


def _smac_scenarios() -> Iterable[str]:
    from marl_lightning.envs.native.smac.scenarios import SCENARIOS

    return tuple(SCENARIOS)


def _make_smac(scenario: str, **kwargs: Any) -> VectorEnv:
    from marl_lightning.envs.native.smac.env import SmacVectorEnv

    return SmacVectorEnv(map_name=scenario, **kwargs)


def _matrix_scenarios() -> Iterable[str]:
    from marl_lightning.envs.native.matrix import GAMES

    return GAMES


def _make_matrix(scenario: str, **kwargs: Any) -> VectorEnv:
    from marl_lightning.envs.native.matrix import MatrixVectorEnv

    return MatrixVectorEnv(game=scenario, **kwargs)


def _mpe_scenarios() -> Iterable[str]:
    from marl_lightning.envs.native.mpe.scenarios import SCENARIOS

    package = importlib.util.find_spec("mpe2")
    modules = pkgutil.iter_modules(package.submodule_search_locations) if package else ()
    return sorted({*SCENARIOS, *(module.name for module in modules if re.search(r"_v\d+$", module.name))})


def _make_mpe(scenario: str, *, num_envs: int, seed: int, backend: str | None = None, **kwargs: Any) -> VectorEnv:
    from marl_lightning.envs.native.mpe import SCENARIOS, MPEVectorEnv

    if _is_native(backend, scenario in SCENARIOS):
        return MPEVectorEnv(scenario=scenario, num_envs=num_envs, seed=seed, **kwargs)
    if importlib.util.find_spec("mpe2") is None:
        raise ImportError('backend="package" needs the package mpe2: pip install "marl-lightning[mpe]"')
    from marl_lightning.envs.adapters.pettingzoo import PettingZooAdapter
    from marl_lightning.envs.vector.sync import SyncVectorEnv

    game = partial(importlib.import_module(f"mpe2.{scenario}").parallel_env, **kwargs)
    factory = partial(PettingZooAdapter, factory=game, name=f"mpe/{scenario}")
    return SyncVectorEnv(factory=factory, num_envs=num_envs, seed=seed)


def _lbf_scenarios() -> Iterable[str]:
    from marl_lightning.envs.native.lbf.scenarios import SCENARIOS

    return SCENARIOS


def _make_lbf(scenario: str, *, num_envs: int, seed: int, backend: str | None = None, **kwargs: Any) -> VectorEnv:
    if _is_native(backend, True):
        from marl_lightning.envs.native.lbf.env import LBFVectorEnv

        return LBFVectorEnv(scenario=scenario, num_envs=num_envs, seed=seed, **kwargs)
    from marl_lightning.envs.adapters.lbf import LBFAdapter
    from marl_lightning.envs.vector.sync import SyncVectorEnv

    return SyncVectorEnv(factory=partial(LBFAdapter, scenario=scenario, **kwargs), num_envs=num_envs, seed=seed)


def _is_native(backend: str | None, exists: bool) -> bool:
    """Whether to take our version of a game; ``None`` takes it if there is one."""
    if backend not in (None, "embedded", "package"):
        raise ValueError(f"backend must be 'embedded' or 'package', got {backend!r}")
    if backend == "embedded" and not exists:
        raise ValueError("there is no embedded version of this game: use backend='package'")
    return exists and backend != "package"


def _gymnasium_scenarios() -> Iterable[str]:
    import gymnasium

    return tuple(gymnasium.registry)


def _make_gymnasium(scenario: str, **kwargs: Any) -> MultiAgentEnv:
    from marl_lightning.envs.adapters.gymnasium import GymnasiumAdapter

    return GymnasiumAdapter(env_id=scenario, **kwargs)


register_family("smac", scenarios=_smac_scenarios, make_vector=_make_smac)
register_family("matrix", scenarios=_matrix_scenarios, make_vector=_make_matrix)
register_family("mpe", scenarios=_mpe_scenarios, make_vector=_make_mpe)
register_family("lbf", scenarios=_lbf_scenarios, make_vector=_make_lbf)
register_family("gymnasium", scenarios=_gymnasium_scenarios, make=_make_gymnasium)
