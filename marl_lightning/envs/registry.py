"""Environments by name: ``"family/scenario"``, such as ``"smac/3m"`` or ``"pettingzoo/classic/tictactoe_v3"``.

A family is a set of games that are built in the same way. Its package is imported only when one of them is made.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

from marl_lightning.envs.base import MultiAgentEnv, VectorEnv
from marl_lightning.envs.validation import check_num_envs, is_plain

if TYPE_CHECKING:
    from pettingzoo import AECEnv, ParallelEnv

Factory = Callable[[], "MultiAgentEnv | ParallelEnv | AECEnv"]
Vectorization = Literal["auto", "sync", "shared_memory"]

_FEW_INSTANCES = 4  # with fewer, processes gain less than they cost


@dataclass(frozen=True, kw_only=True)
class Family:
    """A set of games that are built in the same way; see :func:`register_family`."""

    name: str
    scenarios: Callable[[], Iterable[str]]
    make: Callable[..., MultiAgentEnv] | None = None
    make_vector: Callable[..., VectorEnv] | None = None
    batched_scenarios: Callable[[], Iterable[str]] | None = None
    extra: str | None = None
    fast: bool = False
    open_ended: bool = False

    def names(self) -> tuple[str, ...]:
        """Returns the names of its environments, sorted. Raises ``ImportError`` if the package is missing."""
        return tuple(sorted(f"{self.name}/{scenario}" for scenario in self.scenarios()))

    def is_batched(self, scenario: str, backend: str | None = None) -> bool:
        """Whether the game is made by ``make_vector``.

        Args:
            scenario: one that it has.
            backend: ``"embedded"`` asks for our version of a game that its package has too, ``"package"`` for the
                other one; ``None`` takes ours if there is one.
        """
        if self.make is None or self.make_vector is None:
            return self.make is None
        if backend not in (None, "embedded", "package"):
            raise ValueError(f"backend must be 'embedded' or 'package', got {backend!r}")
        exists = self.batched_scenarios is None or scenario in self.batched_scenarios()
        if backend == "embedded" and not exists:
            raise ValueError("there is no embedded version of this game: use backend='package'")
        return exists and backend != "package"


_FAMILIES: dict[str, Family] = {}


def register_family(
    name: str,
    *,
    scenarios: Callable[[], Iterable[str]],
    make: Callable[..., MultiAgentEnv] | None = None,
    make_vector: Callable[..., VectorEnv] | None = None,
    batched_scenarios: Callable[[], Iterable[str]] | None = None,
    extra: str | None = None,
    fast: bool = False,
    open_ended: bool = False,
) -> None:
    """Adds a family of games to the names that :func:`make_env` and :func:`make_vector_env` know.

    Example::

        register_family("mygames", scenarios=lambda: ["easy", "hard"], make=lambda scenario, **kwargs: MyGame(scenario))
        env = make_vector_env("mygames/easy", num_envs=8)

    Args:
        name: the part of the names before the first slash.
        scenarios: returns the parts after it; raises ``ImportError`` if the package of the games is missing.
        make: called as ``make(scenario, **kwargs)``, for games of which an instance is made at a time.
        make_vector: called as ``make_vector(scenario, num_envs=, seed=, **kwargs)``, for games that are batched. With
            both, the games take an argument ``backend``: ``"embedded"`` means this one, ``"package"`` the other, and
            ``None`` this one where there is a choice.
        batched_scenarios: those that ``make_vector`` makes; by default all.
        extra: the extra of this project that brings the package, if there is one.
        fast: a step takes so little time that several processes would not pay.
        open_ended: ``make`` takes more names than ``scenarios`` lists, such as ones with parameters, and itself refuses
            those that it does not know.

    Raises:
        ValueError: if the name has a slash or is taken, or neither of the two functions is given.
    """
    if "/" in name or name in _FAMILIES:
        raise ValueError(f"a family needs a new name without a slash, got {name!r}")
    if make is None and make_vector is None:
        raise ValueError("give make, make_vector or both")
    _FAMILIES[name] = Family(
        name=name,
        scenarios=scenarios,
        make=make,
        make_vector=make_vector,
        batched_scenarios=batched_scenarios,
        extra=extra,
        fast=fast,
        open_ended=open_ended,
    )


def registered_families() -> Mapping[str, Family]:
    """Returns all families by name, also those whose packages are not installed."""
    return dict(_FAMILIES)


def registered_environments() -> tuple[str, ...]:
    """Returns the names of all environments whose packages are installed, sorted."""
    return tuple(sorted(_names_of(_FAMILIES)))


def make_env(name: str | Factory, **kwargs: Any) -> MultiAgentEnv:
    """Makes one instance.

    Args:
        name: a registered name, or a function without arguments that returns a :class:`MultiAgentEnv`, or a
            ``ParallelEnv`` or ``AECEnv`` of PettingZoo, or an ``EnvBase`` of TorchRL with one instance.
        **kwargs: arguments of the game; none for a function.

    Raises:
        ValueError: if there is no environment of this name.
        ImportError: if its package is not installed; the message names the command that installs it.
    """
    if not isinstance(name, str):
        return _call_factory(name, **kwargs)
    family, scenario = _find(name)
    batched, kwargs = _choose(family, scenario, kwargs)
    if not batched:
        return family.make(scenario, **kwargs)
    from marl_lightning.envs.single import SingleEnv

    return SingleEnv(env=family.make_vector(scenario, num_envs=1, seed=0, **kwargs))


def make_vector_env(
    name: str | Factory,
    num_envs: int,
    seed: int = 0,
    *,
    vectorization: Vectorization = "auto",
    num_workers: int | None = None,
    wrappers: Sequence[str | Mapping[str, Any]] = (),
    **kwargs: Any,
) -> VectorEnv:
    """Makes a vector environment; errors as for :func:`make_env`.

    Its ``recipe`` holds the name and the arguments that make it again; it is ``None`` if ``name`` is a function, or an
    argument is nothing that a checkpoint can hold.

    Args:
        name: see :func:`make_env`. A function is called once for every instance.
        num_envs: number of instances.
        seed: instance ``i`` is seeded with ``seed + i``.
        vectorization: how instances of a game that is not batched are stepped: ``"sync"`` in a loop,
            ``"shared_memory"`` in several processes, ``"auto"`` in processes if the game is slow, there are at least 4
            instances and more than one core, and it comes by name. Both give the same results.
        num_workers: processes for ``"shared_memory"``; by default one for every core that this process may use.
        wrappers: names of wrappers, or mappings of ``name`` and arguments, the first one innermost; see
            :func:`~marl_lightning.envs.wrappers.wrap`.
        **kwargs: see :func:`make_env`.

    Raises:
        ValueError: also if ``num_envs`` is less than 1, or a vectorization is asked of a batched game.
    """
    check_num_envs(num_envs)
    if vectorization not in get_args(Vectorization):
        raise ValueError(f"vectorization must be one of {get_args(Vectorization)}, got {vectorization!r}")
    if not isinstance(name, str):
        factory, batched, fast = partial(_call_factory, name, **kwargs), False, True
    else:
        family, scenario = _find(name)
        batched, arguments = _choose(family, scenario, kwargs)
        fast = family.fast
        if not batched:
            factory = partial(family.make, scenario, **arguments)
    if batched:
        if vectorization != "auto" or num_workers is not None:
            raise ValueError(f"{name} steps all instances at once: leave out vectorization and num_workers")
        env = family.make_vector(scenario, num_envs=num_envs, seed=seed, **arguments)
    elif _use_processes(vectorization, num_envs=num_envs, fast=fast):
        from marl_lightning.envs.vector.shared_memory import SharedMemoryVectorEnv

        env = SharedMemoryVectorEnv(factory=factory, num_envs=num_envs, seed=seed, num_workers=num_workers)
    else:
        from marl_lightning.envs.vector.sync import SyncVectorEnv

        if num_workers is not None and vectorization == "sync":
            raise ValueError(f'num_workers={num_workers} needs vectorization="shared_memory"')
        env = SyncVectorEnv(factory=factory, num_envs=num_envs, seed=seed)
    if isinstance(name, str) and is_plain(kwargs):
        env.recipe = {"name": name, "kwargs": dict(kwargs)}
        if vectorization != "auto":
            env.recipe["kwargs"]["vectorization"] = vectorization
    if not wrappers:
        return env
    from marl_lightning.envs.wrappers import wrap

    try:
        return wrap(env, wrappers)
    except BaseException:
        env.close()
        raise


def _names_of(families: Iterable[str]) -> list[str]:
    """Returns the names of all environments of these families whose packages are installed."""
    names: list[str] = []
    for family_name in families:
        try:
            names += _FAMILIES[family_name].names()
        except ImportError:
            continue
    return names


def _choose(family: Family, scenario: str, kwargs: Mapping[str, Any]) -> tuple[bool, dict[str, Any]]:
    """Returns whether the batched version of a game is meant, and the arguments for its maker."""
    arguments = dict(kwargs)
    has_both = family.make is not None and family.make_vector is not None
    backend = arguments.pop("backend", None) if has_both else None
    return family.is_batched(scenario, backend), arguments


def _use_processes(vectorization: Vectorization, *, num_envs: int, fast: bool) -> bool:
    if vectorization != "auto":
        return vectorization == "shared_memory"
    from marl_lightning.envs.vector.shared_memory import usable_cores

    return not fast and num_envs >= _FEW_INSTANCES and usable_cores() > 1 and os.name == "posix"


def _find(name: str) -> tuple[Family, str]:
    """Returns the family and the scenario of a name."""
    family_name, _, scenario = name.partition("/")
    family = _FAMILIES.get(family_name)
    if family is not None and (family.open_ended or scenario in family.scenarios()):
        return family, scenario
    # Families that are nothing alike are left out: to list their games, their packages would have to be imported.
    alike = difflib.get_close_matches(family_name, _FAMILIES, n=2) if family is None else [family_name]
    nearest = difflib.get_close_matches(name, _names_of(alike), n=3)
    hint = f"; did you mean {' or '.join(nearest)}?" if nearest else ""
    raise ValueError(f"unknown environment {name!r} (families: {', '.join(sorted(_FAMILIES))}){hint}")


def _call_factory(factory: Factory, **kwargs: Any) -> MultiAgentEnv:
    if kwargs:
        raise ValueError(f"arguments {list(kwargs)} go with a name only; a function is called without any")
    env = factory()
    if isinstance(env, MultiAgentEnv):
        return env
    torchrl = sys.modules.get("torchrl.envs")  # has been imported if this is one of its environments
    if torchrl is not None and isinstance(env, torchrl.EnvBase):
        from marl_lightning.envs.adapters.torchrl import TorchRLVectorEnv
        from marl_lightning.envs.single import SingleEnv

        return SingleEnv(env=TorchRLVectorEnv(factory=lambda: env, num_envs=1))
    from marl_lightning.envs.adapters.packages import require
    from marl_lightning.envs.adapters.pettingzoo import PettingZooAdapter
    from marl_lightning.envs.adapters.turn_based import AECAdapter

    takes_turns = isinstance(env, require("pettingzoo", extra="pettingzoo").AECEnv)
    return (AECAdapter if takes_turns else PettingZooAdapter)(factory=lambda: env)


def _lazy(path: str) -> Callable[..., Any]:
    """Returns a function that imports ``"module:function"`` when it is called. It can be pickled."""
    return partial(_call_lazily, f"marl_lightning.envs.{path}")


def _call_lazily(path: str, *args: Any, **kwargs: Any) -> Any:
    module, _, function = path.partition(":")
    return getattr(importlib.import_module(module), function)(*args, **kwargs)


def _smac_scenarios() -> Iterable[str]:
    from marl_lightning.envs.native.smac.scenarios import SCENARIOS

    return SCENARIOS


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

    return SCENARIOS


def _all_mpe_scenarios() -> Iterable[str]:
    """The package has more games than we do."""
    package = importlib.util.find_spec("mpe2")
    modules = pkgutil.iter_modules(package.submodule_search_locations) if package else ()
    return {*_mpe_scenarios(), *(module.name for module in modules if re.search(r"_v\d+$", module.name))}


def _make_mpe(scenario: str, **kwargs: Any) -> VectorEnv:
    from marl_lightning.envs.native.mpe import MPEVectorEnv

    return MPEVectorEnv(scenario=scenario, **kwargs)


def _make_package_mpe(scenario: str, **kwargs: Any) -> MultiAgentEnv:
    from marl_lightning.envs.adapters.packages import require
    from marl_lightning.envs.adapters.pettingzoo import PettingZooAdapter

    game = partial(require(f"mpe2.{scenario}", extra="mpe").parallel_env, **kwargs)
    return PettingZooAdapter(factory=game, name=f"mpe/{scenario}")


def _lbf_scenarios() -> Iterable[str]:
    from marl_lightning.envs.native.lbf.scenarios import SCENARIOS

    return SCENARIOS


def _make_lbf(scenario: str, **kwargs: Any) -> VectorEnv:
    from marl_lightning.envs.native.lbf.env import LBFVectorEnv

    return LBFVectorEnv(scenario=scenario, **kwargs)


def _make_package_lbf(scenario: str, **kwargs: Any) -> MultiAgentEnv:
    from marl_lightning.envs.adapters.lbf import LBFAdapter

    return LBFAdapter(scenario=scenario, **kwargs)


def _rware_scenarios() -> Iterable[str]:
    from marl_lightning.envs.native.rware.scenarios import SCENARIOS

    return SCENARIOS


def _make_rware(scenario: str, **kwargs: Any) -> VectorEnv:
    from marl_lightning.envs.native.rware.env import RWAREVectorEnv

    return RWAREVectorEnv(scenario=scenario, **kwargs)


def _make_package_rware(scenario: str, **kwargs: Any) -> MultiAgentEnv:
    from marl_lightning.envs.adapters.rware import RWAREAdapter

    return RWAREAdapter(scenario=scenario, **kwargs)


def _gymnasium_scenarios() -> Iterable[str]:
    import gymnasium

    return gymnasium.registry


def _make_gymnasium(scenario: str, **kwargs: Any) -> MultiAgentEnv:
    from marl_lightning.envs.adapters.gymnasium import GymnasiumAdapter

    return GymnasiumAdapter(env_id=scenario, **kwargs)


def _register_adapter(name: str, *, module: str | None = None, suffix: str = "", **facts: Any) -> None:
    """Adds the family of an adapter module that has the functions ``scenarios`` and ``make``."""
    module = f"adapters.{module or name}"
    scenarios, make = _lazy(f"{module}:scenarios{suffix}"), _lazy(f"{module}:make{suffix}")
    register_family(name, scenarios=scenarios, make=make, **facts)


register_family("smac", scenarios=_smac_scenarios, make_vector=_make_smac)
register_family("matrix", scenarios=_matrix_scenarios, make_vector=_make_matrix)
register_family(
    "mpe",
    scenarios=_all_mpe_scenarios,
    make=_make_package_mpe,
    make_vector=_make_mpe,
    batched_scenarios=_mpe_scenarios,
    extra="mpe",
)
register_family("lbf", scenarios=_lbf_scenarios, make=_make_package_lbf, make_vector=_make_lbf, extra="lbf")
register_family("rware", scenarios=_rware_scenarios, make=_make_package_rware, make_vector=_make_rware, extra="rware")
register_family("gymnasium", scenarios=_gymnasium_scenarios, make=_make_gymnasium, fast=True)
_register_adapter("pettingzoo", module="pettingzoo_games", extra="sisl,butterfly,classic", open_ended=True)
_register_adapter("openspiel", extra="openspiel", fast=True, open_ended=True)
_register_adapter("mamujoco", extra="mamujoco", open_ended=True)
_register_adapter("magent2", extra="magent2")
_register_adapter("lle", extra="lle")
_register_adapter("smaclite")
_register_adapter("starcraft2")
_register_adapter("smacv2", module="starcraft2", suffix="_v2")
register_family(
    "vmas", scenarios=_lazy("adapters.vmas:scenarios"), make_vector=_lazy("adapters.vmas:make_vector"), extra="vmas"
)
