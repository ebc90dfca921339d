"""Games with PettingZoo's turn-based interface (AEC, agent environment cycle)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from gymnasium import spaces

from marl_lightning.envs.adapters.actions import package_action
from marl_lightning.envs.adapters.packages import require
from marl_lightning.envs.adapters.pettingzoo import checked_mask, group_agents, split_observation, state_or_none
from marl_lightning.envs.base import MultiAgentEnv, Observations, Step
from marl_lightning.envs.spec import EnvSpec, GroupSpec
from marl_lightning.envs.validation import action_arrays, check_legal

if TYPE_CHECKING:
    from pettingzoo import AECEnv


class AECAdapter(MultiAgentEnv):
    """A PettingZoo ``AECEnv`` as a :class:`MultiAgentEnv`: a parallel game in which one agent at a time has a choice.

    **Turns.** An env step is one move of one agent. Every agent has one action more than in the game, the last one,
    which does nothing. It is legal exactly when it is not the agent's turn, and then nothing else is. Agents that wait
    are alive: they observe what ``env.observe`` shows them, and get rewards. The agent on turn has the legal actions of
    ``observation["action_mask"]``, or else of ``info["action_mask"]``; without either it has all of the game.

    **Groups and observations** are those of :class:`~marl_lightning.envs.adapters.pettingzoo.PettingZooAdapter`.

    **Rewards.** An agent's reward is the sum of what ``env.rewards`` gives it from one move to the next, including the
    steps in which the game only removes agents that have ended.

    **Ends.** An agent is alive until the game removes it, whoever goes on playing. The episode ends with the move after
    which no agent is left. It is *truncated* if the game cut at least one of the agents that it removed then
    (truncation without termination), otherwise *terminated*. Agents cut there are still alive in the successor, with
    their true observation, from which their value is bootstrapped; if one of them would have had the next turn, it
    keeps its legal actions.

    **Seeds.** A seed is the one of the first episode; later ones get theirs from a generator of the adapter, since some
    games play on at random when they get none. Games cannot be saved. ``spec.episode_limit`` is ``None``, since the
    games do not say after how many moves they end.

    Args:
        factory: returns a new ``AECEnv`` at every call.
        name: ``spec.name``; by default the name in the metadata of the game.

    Raises:
        ImportError: if pettingzoo is not installed.
        TypeError: if ``factory`` returns something else than an ``AECEnv``.
        ValueError: if a space is of a kind that cannot be used; actions must be ``Discrete``.
    """

    def __init__(self, *, factory: Callable[[], AECEnv], name: str | None = None) -> None:
        self._env = _require_turn_based(factory())
        self._game_groups = group_agents(self._env)
        groups = {title: _with_waiting(title, group) for title, group in self._game_groups.items()}
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
            metadata={"backend": type(self._env.unwrapped).__module__.partition(".")[0]},
        )
        self._group_of = {agent: title for title, group in groups.items() for agent in group.agents}
        self._rng = np.random.default_rng()
        self._turn: str | None = None  # agent that moves next; None if there is no episode to step
        self._action_mask: dict[str, np.ndarray] = {}
        self._alive: dict[str, np.ndarray] = {}
        self._closed = False

    def reset(self, *, seed: int | None = None) -> Observations[np.ndarray]:
        """See :meth:`MultiAgentEnv.reset`."""
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        self._env.reset(seed=int(self._rng.integers(2**31)) if seed is None else seed)
        return self._observe_players()

    def step(self, actions: Mapping[str, np.ndarray]) -> Step[np.ndarray]:
        """See :meth:`MultiAgentEnv.step`."""
        if self._turn is None:
            raise RuntimeError("the episode is over or has not begun: call reset before step")
        arrays = action_arrays(self.spec, actions, ())
        check_legal(self.spec, arrays, action_mask=self._action_mask, alive=self._alive)
        env, turn, title = self._env, self._turn, self._group_of[self._turn]
        action = package_action(env.action_space(turn), arrays[title][self.spec.groups[title].agents.index(turn)])

        rewards = dict.fromkeys(env.agents, 0.0)
        self._make_game_step(action, rewards)
        next_turn, state = env.agent_selection, None
        cut: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        while env.agents and self._has_ended(env.agent_selection):
            if state is None and self._has_state:
                state = self._state()
            ended = env.agent_selection
            if not env.terminations[ended]:
                cut[ended] = self._look(ended, on_turn=ended == next_turn, must_act=False)
            self._make_game_step(None, rewards)
        if env.agents:
            observations = self._observe_players()
        else:
            self._turn = None
            observations = self._stack(cut, state)
        return Step(
            observations=observations,
            reward={
                name: np.array([rewards.get(agent, 0.0) for agent in group.agents], np.float32)
                for name, group in self.spec.groups.items()
            },
            terminated=not env.agents and not cut,
            truncated=not env.agents and bool(cut),
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

    def _has_ended(self, agent: str) -> bool:
        return bool(self._env.terminations[agent] or self._env.truncations[agent])

    def _make_game_step(self, action: int | None, rewards: dict[str, float]) -> None:
        """Steps the game and adds what it gives to the agents in ``rewards``."""
        self._env.step(action)
        for agent in rewards:
            rewards[agent] += float(self._env.rewards.get(agent, 0.0))

    def _observe_players(self) -> Observations[np.ndarray]:
        """Returns the decision point of the running episode."""
        self._turn = self._env.agent_selection
        seen = {agent: self._look(agent, on_turn=agent == self._turn, must_act=True) for agent in self._env.agents}
        return self._stack(seen, self._state() if self._has_state else None)

    def _look(self, agent: str, *, on_turn: bool, must_act: bool) -> tuple[np.ndarray, np.ndarray]:
        """Returns the observation and the action mask of an agent that the game still has."""
        group = self._game_groups[self._group_of[agent]]
        observation, legal = split_observation(self._env.observe(agent), self._env.infos.get(agent, {}))
        mask = np.zeros(group.action_size + 1, np.bool_)
        if on_turn and (must_act or legal is None or np.any(legal)):
            mask[:-1] = True if legal is None else checked_mask(legal, group, agent)
        else:
            mask[-1] = True
        return np.array(observation), mask

    def _state(self) -> np.ndarray:
        return np.array(self._env.state(), np.float32).ravel()

    def _stack(
        self, seen: Mapping[str, tuple[np.ndarray, np.ndarray]], state: np.ndarray | None
    ) -> Observations[np.ndarray]:
        """Stacks the observations and masks of the agents in ``seen``, who are alive; the others get zeros and wait.

        Args:
            seen: by agent, see :meth:`_look`.
            state: the flat state, ``None`` for the concatenated observations.
        """
        result = Observations(observation={}, action_mask={}, alive={}, state=np.empty(0, np.float32))
        for name, group in self.spec.groups.items():
            stacked = np.zeros((group.num_agents, *group.observation_shape), group.observation_space.dtype)
            masks = np.zeros((group.num_agents, group.action_size), np.bool_)
            masks[:, -1] = True
            for row, agent in enumerate(group.agents):
                if agent in seen:
                    stacked[row], masks[row] = seen[agent]
            result.observation[name], result.action_mask[name] = stacked, masks
            result.alive[name] = np.array([agent in seen for agent in group.agents])
        if state is None:
            state = np.concatenate([array.ravel() for array in result.observation.values()], dtype=np.float32)
        result.state = state
        # The result belongs to the caller, who may write into it.
        self._action_mask = {name: mask.copy() for name, mask in result.action_mask.items()}
        self._alive = {name: flags.copy() for name, flags in result.alive.items()}
        return result


def _require_turn_based(env: object) -> AECEnv:
    if not isinstance(env, require("pettingzoo", extra="pettingzoo").AECEnv):
        raise TypeError(f"the factory must return a pettingzoo AECEnv, got {type(env).__name__}")
    return env


def _with_waiting(name: str, group: GroupSpec) -> GroupSpec:
    """Returns the group with one action more, which does nothing."""
    if not isinstance(group.action_space, spaces.Discrete):
        raise ValueError(
            f"agents that take turns need Discrete actions, got {group.action_space} in group {name!r}; "
            "if the game has a parallel form, use that with PettingZooAdapter"
        )
    return replace(group, action_space=spaces.Discrete(group.action_size + 1))
