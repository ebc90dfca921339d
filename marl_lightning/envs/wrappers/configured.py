"""Wrappers by name, as configurations and checkpoints write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from marl_lightning.envs.base import MultiAgentEnv, VectorEnv
from marl_lightning.envs.wrappers.base import Wrapper
from marl_lightning.envs.wrappers.episode import RecordEpisodeStatistics, TimeLimit
from marl_lightning.envs.wrappers.observation import (
    AddAgentID,
    NormalizeObservation,
    SelectFeatures,
    StackObservations,
    TransformObservation,
)
from marl_lightning.envs.wrappers.reward import AggregateReward, ClipReward, NormalizeReward, TransformReward

WRAPPERS: dict[str, type[Wrapper]] = {
    wrapper.__name__: wrapper
    for wrapper in (
        AddAgentID,
        AggregateReward,
        ClipReward,
        NormalizeObservation,
        NormalizeReward,
        RecordEpisodeStatistics,
        SelectFeatures,
        StackObservations,
        TimeLimit,
        TransformObservation,
        TransformReward,
    )
}
"""All wrappers by name."""

Env = TypeVar("Env", MultiAgentEnv, VectorEnv)


def wrap(env: Env, wrappers: Sequence[str | Mapping[str, Any]]) -> Env:
    """Puts wrappers around an environment, the first one innermost.

    Example, in YAML::

        wrappers:
          - {name: TimeLimit, max_episode_steps: 150}
          - NormalizeObservation
          - AddAgentID

    Args:
        env: environment to wrap; it stays open if an error is raised.
        wrappers: each is the name of a wrapper, or a mapping with ``name`` and its arguments.

    Raises:
        ValueError: listing all unknown names and arguments, with the nearest ones; or from a wrapper itself.
    """
    problems, chosen = [], []
    for place, entry in enumerate(wrappers):
        wrapper, arguments, found = _read(f"wrappers[{place}]", entry)
        problems += found
        chosen.append((wrapper, arguments))
    if problems:
        raise ValueError("\n".join(problems))
    for wrapper, arguments in chosen:
        env = wrapper(env, **arguments)
    return env


def _read(prefix: str, entry: str | Mapping[str, Any]) -> tuple[type[Wrapper] | None, dict[str, Any], list[str]]:
    """Returns the wrapper of an entry, its arguments, and what is wrong with them."""
    from marl_lightning.validation import find_problems, nearest  # needs pydantic, which workers do without

    if isinstance(entry, str):
        entry = {"name": entry}
    if not isinstance(entry, Mapping) or "name" not in entry:
        return None, {}, [f"{prefix}={entry!r}: must be the name of a wrapper, or a mapping with name and arguments"]
    arguments = {key: value for key, value in entry.items() if key != "name"}
    name = entry["name"]
    if name not in WRAPPERS:
        known = ", ".join(WRAPPERS)
        return None, {}, [f"{prefix}.name={name}: there is no such wrapper{nearest(str(name), WRAPPERS)} ({known})"]
    wrapper = WRAPPERS[name]
    return wrapper, arguments, find_problems(wrapper, arguments, prefix=prefix, filled_in=("env",))
