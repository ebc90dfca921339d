"""Games with PettingZoo's parallel interface."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces

from marl_lightning.envs.base import MultiAgentEnv, Observations, Step
from marl_lightning.envs.spec import EnvSpec, GroupSpec
from marl_lightning.envs.validation import action_arrays, check_legal

if TYPE_CHECKING:
    from pettingzoo import ParallelEnv


class PettingZooAdapter(MultiAgentEnv):
    """A PettingZoo ``ParallelEnv`` as a :class:`MultiAgentEnv`.

    **Groups.** Agents whose names are equal up to a trailing ``_<digits>`` and whose spaces are equal form a group with
    the common name; ``adversary_0, adversary_1, agent_0`` become ``adversary`` and ``agent``. Where equal names have
    different spaces, each set of equal spaces is a group of its own, named after its first agent. Groups and agents
    keep the order of ``possible_agents``.

    **Observations.** ``Box``, or ``Dict`` with the keys ``observation`` (a ``Box``) and ``action_mask``. Masks of
    discrete actions are taken from there or else from ``info["action_mask"]``; without either all actions are legal.
    Continuous actions are clipped to their bounds. The state is ``env.state()``, or the concatenated observations if
    the game has none.

    **Ends.** An agent that has left is not alive: its observation is zero, its only legal action is 0, and its reward
    is 0 from the step after the one on which it left. The episode ends with the step after which no agent is left. It
    is *truncated* if that step cut at least one agent (truncation without termination), otherwise *terminated*.
    Agents cut by that step are still alive in the successor and keep their true observation, from which their value is
    bootstrapped; agents that terminated are not. How agents left on earlier steps does not matter: a single agent that
    is truncated while others go on counts as one that left.

    ``spec.episode_limit`` is the ``max_cycles`` of the game if it has this attribute. Games cannot be saved.

    Args:
        factory: returns a new ``ParallelEnv`` at every call.
        name: ``spec.name``; by default the name in the metadata of the game.

    Raises:
        ImportError: if pettingzoo is not installed.
        TypeError: if ``factory`` returns something else than a ``ParallelEnv``.
        ValueError: if a space is of a kind that cannot be used (see :class:`GroupSpec`).
    """

    def __init__(self, *, factory: Callable[[], ParallelEnv], name: str | None = None) -> None:
        self._env = _require_parallel(factory())
        groups = _group_agents(self._env)
        # A game can tell its state only after a reset. The seed of the first episode comes with the caller's own reset.
        self._env.reset()
        state = _state_or_none(self._env)
        self._has_state = state is not None
        self.spec = EnvSpec(
            name=name or str(self._env),
            groups=groups,
            state_size=(
                state.size if state is not None else sum(g.num_agents * g.observation_size for g in groups.values())
            ),
            episode_limit=getattr(self._env.unwrapped, "max_cycles", None),
            metadata={"backend": type(self._env.unwrapped).__module__.partition(".")[0]},
        )
        self._acting: set[str] = set()  # agents that may act now; empty if there is no episode to step
        self._action_mask: dict[str, np.ndarray] = {}
        self._alive: dict[str, np.ndarray] = {}
        self._closed = False

    def reset(self, *, seed: int | None = None) -> Observations[np.ndarray]:
        """See :meth:`MultiAgentEnv.reset`."""
        observations, infos = self._env.reset(seed=seed)
        self._acting = set(self._env.agents)
        return self._observe(observations, infos, alive=self._acting)

    def step(self, actions: Mapping[str, np.ndarray]) -> Step[np.ndarray]:
        """See :meth:`MultiAgentEnv.step`."""
        if not self._acting:
            raise RuntimeError("the episode is over or has not begun: call reset before step")
        arrays = action_arrays(self.spec, actions, ())
        check_legal(self.spec, arrays, action_mask=self._action_mask, alive=self._alive)
        observations, rewards, terminations, truncations, infos = self._env.step(self._to_package(arrays))

        terminated_agents = {agent for agent in self._acting if terminations.get(agent)}
        cut_agents = {agent for agent in self._acting if truncations.get(agent)} - terminated_agents
        # Some games keep agents that have ended in their list.
        remaining = set(self._env.agents) - terminated_agents - cut_agents
        truncated = not remaining and bool(cut_agents)
        reward = {
            name: np.array([rewards.get(a, 0.0) if a in self._acting else 0.0 for a in group.agents], np.float32)
            for name, group in self.spec.groups.items()
        }
        self._acting = remaining
        return Step(
            observations=self._observe(observations, infos, alive=remaining or cut_agents),
            reward=reward,
            terminated=not remaining and not truncated,
            truncated=truncated,
            info={},
        )

    def render(self) -> np.ndarray:
        """See :meth:`MultiAgentEnv.render`. The game must have been made with ``render_mode="rgb_array"``."""
        mode = getattr(self._env, "render_mode", None)
        if mode != "rgb_array":
            raise NotImplementedError(f'{self.spec.name} needs render_mode="rgb_array" to be rendered, got {mode!r}')
        return self._env.render()

    def close(self) -> None:
        """See :meth:`MultiAgentEnv.close`."""
        if not self._closed:
            self._env.close()
        self._closed = True

    def _to_package(self, arrays: Mapping[str, np.ndarray]) -> dict[str, int | np.ndarray]:
        """Returns the actions of the agents that act, keyed and typed as the package expects them."""
        actions: dict[str, int | np.ndarray] = {}
        for name, group in self.spec.groups.items():
            space = group.action_space
            for agent, action in zip(group.agents, arrays[name], strict=True):
                if agent not in self._acting:
                    continue
                if group.is_discrete:
                    actions[agent] = int(action)  # some games refuse numpy integers
                else:
                    actions[agent] = np.clip(action, space.low, space.high).astype(space.dtype)
        return actions

    def _observe(
        self, observations: Mapping[str, Any], infos: Mapping[str, Mapping[str, Any]], *, alive: Collection[str]
    ) -> Observations[np.ndarray]:
        """Stacks what the package tells about the agents in ``alive``; the others get zeros and action 0."""
        result = Observations(observation={}, action_mask={}, alive={}, state=np.empty(0, np.float32))
        for name, group in self.spec.groups.items():
            stacked = np.zeros((group.num_agents, *group.observation_shape), group.observation_space.dtype)
            masks = np.zeros((group.num_agents, group.action_size), np.bool_)
            for row, agent in enumerate(group.agents):
                if agent in alive:
                    stacked[row], mask = _split(observations[agent], infos.get(agent, {}))
                    masks[row] = True if mask is None else np.asarray(mask, np.bool_)
                else:
                    masks[row, 0] = True
            result.observation[name] = stacked
            result.alive[name] = np.array([agent in alive for agent in group.agents])
            if group.is_discrete:
                if not masks.any(axis=-1).all():
                    raise ValueError(f"the game gives an agent of {name!r} that may act no legal action")
                result.action_mask[name] = masks
        if self._has_state:
            result.state = np.array(self._env.state(), np.float32).ravel()
        else:
            result.state = np.concatenate([array.ravel() for array in result.observation.values()], dtype=np.float32)
        # The result belongs to the caller, who may write into it.
        self._action_mask = {name: mask.copy() for name, mask in result.action_mask.items()}
        self._alive = {name: flags.copy() for name, flags in result.alive.items()}
        return result


def _require_parallel(env: object) -> ParallelEnv:
    try:
        from pettingzoo import ParallelEnv
    except ImportError as error:
        raise ImportError('PettingZoo games need: pip install "marl-lightning[pettingzoo]"') from error
    if not isinstance(env, ParallelEnv):
        raise TypeError(f"the factory must return a pettingzoo ParallelEnv, got {type(env).__name__}")
    return env


def _group_agents(env: ParallelEnv) -> dict[str, GroupSpec]:
    """Groups agents by name prefix and spaces, as the docstring of :class:`PettingZooAdapter` says."""
    kinds: list[tuple[tuple[str, spaces.Space, spaces.Space], list[str]]] = []
    for agent in env.possible_agents:
        prefix = re.sub(r"_\d+$", "", agent)
        kind = (prefix, _array_space(env.observation_space(agent)), env.action_space(agent))
        # Spaces can be compared but not hashed.
        members = next((members for other, members in kinds if other == kind), None)
        if members is None:
            kinds.append((kind, [agent]))
        else:
            members.append(agent)
    prefixes = [prefix for (prefix, _, _), _ in kinds]
    return {
        prefix if prefixes.count(prefix) == 1 else members[0]: GroupSpec(
            agents=tuple(members), observation_space=observation_space, action_space=action_space
        )
        for (prefix, observation_space, action_space), members in kinds
    }


def _array_space(space: spaces.Space) -> spaces.Space:
    """Returns the space of the array in a pair of observation and action mask, and any other space as it is."""
    if isinstance(space, spaces.Dict) and space.spaces.keys() == {"observation", "action_mask"}:
        return space["observation"]
    return space


def _split(observation: Any, info: Mapping[str, Any]) -> tuple[np.ndarray, Any]:
    """Returns the array and the action mask, ``None`` if there is no mask."""
    if isinstance(observation, Mapping):
        return observation["observation"], observation["action_mask"]
    return observation, info.get("action_mask")


def _state_or_none(env: ParallelEnv) -> np.ndarray | None:
    try:
        return np.asarray(env.state())
    except NotImplementedError:
        return None
