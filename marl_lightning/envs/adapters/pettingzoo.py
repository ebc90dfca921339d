"""Games with PettingZoo's parallel interface."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces

from marl_lightning.envs.adapters.actions import flat_mask, group_action_space, package_action
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

    **Observations.** ``Box``, or ``Dict`` with the keys ``observation`` (a ``Box``) and ``action_mask``. The state is
    ``env.state()``, or the concatenated observations if the game has none.

    **Actions.** ``Discrete``, ``MultiDiscrete`` or ``MultiBinary``, starting anywhere (see :mod:`.actions`), or a
    ``Box``, to whose bounds actions are clipped. Masks of discrete actions are taken from the observation or else from
    ``info["action_mask"]``; without either all actions are legal. The mask of an action of several parts is flat, the
    parts one after another, or a tuple of one mask a part.

    **Ends.** An agent that has left is not alive: its observation is zero, its only legal action is 0 (in every part),
    and its reward is 0 from the step after the one on which it left. The episode ends with the step after which no
    agent is left. It is *truncated* if that step cut at least one agent (truncation without termination), otherwise
    *terminated*. Agents cut by that step are still alive in the successor and keep their true observation, from which
    their value is bootstrapped; agents that terminated are not. How agents left on earlier steps does not matter: a
    single agent that is truncated while others go on counts as one that left.

    ``spec.episode_limit`` is the ``max_cycles`` of the game if it has this attribute. Games cannot be saved.

    Args:
        factory: returns a new ``ParallelEnv`` at every call.
        name: ``spec.name``; by default the name in the metadata of the game.
        end_together: end the episode for all as soon as one agent leaves. Those who could have gone on are then cut:
            unless all terminated, the episode is truncated.

    Raises:
        ImportError: if pettingzoo is not installed.
        TypeError: if ``factory`` returns something else than a ``ParallelEnv``.
        ValueError: if a space is of a kind that cannot be used (see :class:`GroupSpec`).
    """

    def __init__(
        self, *, factory: Callable[[], ParallelEnv], name: str | None = None, end_together: bool = False
    ) -> None:
        self._env = _require_parallel(factory())
        self._end_together = end_together
        self._action_spaces = {agent: self._env.action_space(agent) for agent in self._env.possible_agents}
        groups = group_agents(self._env)
        # A game can tell its state only after a reset. The seed of the first episode comes with the caller's own reset.
        self._env.reset()
        state = state_or_none(self._env)
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
        if self._end_together and remaining != self._acting:
            cut_agents, remaining = cut_agents | remaining, set()
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
        return {
            agent: package_action(self._action_spaces[agent], action)
            for name, group in self.spec.groups.items()
            for agent, action in zip(group.agents, arrays[name], strict=True)
            if agent in self._acting
        }

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
                    stacked[row], mask = split_observation(observations[agent], infos.get(agent, {}))
                    masks[row] = checked_mask(mask, group, agent) if mask is not None and group.is_discrete else True
                else:
                    masks[row, list(group.action_offsets)] = True
            result.observation[name] = stacked
            result.alive[name] = np.array([agent in alive for agent in group.agents])
            if group.is_discrete:
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


def group_agents(env: ParallelEnv) -> dict[str, GroupSpec]:
    """Groups agents by name prefix and spaces, as the docstring of :class:`PettingZooAdapter` says."""
    kinds: list[tuple[tuple[str, spaces.Space, spaces.Space], list[str]]] = []
    for agent in env.possible_agents:
        prefix = re.sub(r"_\d+$", "", agent)
        kind = (prefix, array_space(env.observation_space(agent)), env.action_space(agent))
        # Spaces can be compared but not hashed.
        members = next((members for other, members in kinds if other == kind), None)
        if members is None:
            kinds.append((kind, [agent]))
        else:
            members.append(agent)
    prefixes = [prefix for (prefix, _, _), _ in kinds]
    return {
        prefix if prefixes.count(prefix) == 1 else members[0]: GroupSpec(
            agents=tuple(members),
            observation_space=observation_space,
            action_space=group_action_space(action_space),
        )
        for (prefix, observation_space, action_space), members in kinds
    }


def array_space(space: spaces.Space) -> spaces.Space:
    """Returns the space of the array in a pair of observation and action mask, and any other space as it is."""
    if isinstance(space, spaces.Dict) and {"observation"} <= space.spaces.keys() <= {"observation", "action_mask"}:
        return space["observation"]
    return space


def split_observation(observation: Any, info: Mapping[str, Any]) -> tuple[np.ndarray, Any]:
    """Returns the array and the action mask, ``None`` if there is no mask."""
    if isinstance(observation, Mapping):
        return observation["observation"], observation.get("action_mask", info.get("action_mask"))
    return observation, info.get("action_mask")


def checked_mask(mask: Any, group: GroupSpec, agent: str) -> np.ndarray:
    """Returns the flat mask of an agent that acts; ``ValueError`` for a wrong size or nothing to choose."""
    flat = flat_mask(mask)
    if flat.size != group.action_size:
        raise ValueError(
            f"the action mask of {agent!r} must have one entry for each of the {group.action_size} choices of "
            f"{group.action_space}, got {flat.size}"
        )
    legal = np.logical_or.reduceat(flat, group.action_offsets)
    if not legal.all():
        part = f" in part {legal.argmin()}" if group.action_shape else ""
        raise ValueError(f"the game gives {agent!r}, who may act, no legal action{part}")
    return flat


def state_or_none(env: ParallelEnv) -> np.ndarray | None:
    """Returns the state of a game that has begun, ``None`` if it does not tell one."""
    try:
        return np.asarray(env.state())
    except NotImplementedError:
        return None
