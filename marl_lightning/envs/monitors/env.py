"""Monitors around an environment: what is done of an agent's task becomes a part of what it sees and is paid for."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from gymnasium import spaces

from marl_lightning.envs.base import MultiAgentEnv, Observations, Step
from marl_lightning.envs.monitors.machines import Monitor, MonitorStep, PotentialShaping
from marl_lightning.envs.spec import EnvSpec, GroupSpec


@dataclass(frozen=True, kw_only=True)
class LabelContext:
    """What a labeller knows of a step. All arrays are of the game itself, without what monitors add.

    Attributes:
        observations: before the step.
        actions: per group, as given to the game.
        next_observations: after the step, the true successor.
        info: of the step.
    """

    observations: Observations[np.ndarray]
    actions: Mapping[str, np.ndarray]
    next_observations: Observations[np.ndarray]
    info: Mapping[str, float]


Labeller = Callable[[LabelContext], Mapping[str, frozenset[str]]]
"""Returns for every monitored agent the propositions that are true after the step."""


class MonitorParallelEnv(MultiAgentEnv):
    """A game whose agents are watched by monitors, such as reward machines (Toro Icarte et al. 2022).

    Every monitor starts anew with every episode and reads one label after every step. Its state is appended, one-hot,
    to the agent's observation and, of all monitors, to the global state: so the task is Markov again. Within a group,
    shorter one-hots are filled up with zeros; those of agents without a monitor, or that are not alive, are zero.

    ``info`` has for every monitored agent ``monitor_state/<agent>`` (index of the state), ``verdict/<agent>`` (1 done,
    0 failed, -1 neither yet) and ``satisfied/<agent>``, which is 1 if the task is done or, once the episode is over,
    counts as satisfied, else 0.

    Args:
        env: the game; its observations have one axis.
        monitors: by agent; agents may be left out.
        labeller: returns the label of each monitored agent.
        observe: which monitors an agent sees: its ``"own"``, those of ``"all"`` agents, or ``"none"``.
        reward: what monitored agents are paid: that of the monitor (``"replace"``), both together (``"add"``), or only
            that of the game (``"env"``). Agents that were not alive before a step get nothing from their monitor.
        end_on: the episode is terminated when ``"any"`` or ``"all"`` monitors are in a terminal state, or ``"never"``.
        shaping: of the monitors' rewards.
        keep_history: whether :meth:`history` keeps the episodes.

    Raises:
        ValueError: if there is no monitor, an agent is unknown, observations have more than one axis, or a choice is
            not one of those above.
    """

    def __init__(
        self,
        env: MultiAgentEnv,
        monitors: Mapping[str, Monitor],
        labeller: Labeller,
        *,
        observe: Literal["own", "all", "none"] = "own",
        reward: Literal["replace", "add", "env"] = "replace",
        end_on: Literal["any", "all", "never"] = "any",
        shaping: PotentialShaping | None = None,
        keep_history: bool = False,
    ) -> None:
        _check_choice("observe", observe, ("own", "all", "none"))
        _check_choice("reward", reward, ("replace", "add", "env"))
        _check_choice("end_on", end_on, ("any", "all", "never"))
        if not monitors:
            raise ValueError("give at least one agent a monitor")
        if unknown := [agent for agent in monitors if agent not in env.spec.agents]:
            raise ValueError(f"monitors are given for {unknown}, but the agents are {list(env.spec.agents)}")
        self.env = env
        self.monitors = {agent: monitors[agent] for agent in env.spec.agents if agent in monitors}
        self._labeller = labeller
        self._observe_what, self._reward, self._end_on = observe, reward, end_on
        self._index = {agent: {u: i for i, u in enumerate(m.states)} for agent, m in self.monitors.items()}
        self._potentials = {agent: shaping.potentials(m) for agent, m in self.monitors.items()} if shaping else {}
        self._gamma = shaping.gamma if shaping else 1.0
        self._total = sum(len(monitor.states) for monitor in self.monitors.values())
        self.spec = self._extended_spec(env.spec)
        self.states: dict[str, Hashable] = {}
        self._current: Observations[np.ndarray] | None = None
        self._over = True
        self._history: list[dict[str, Any]] | None = [] if keep_history else None

    def reset(self, *, seed: int | None = None) -> Observations[np.ndarray]:
        """See :meth:`MultiAgentEnv.reset`."""
        self._current = self.env.reset(seed=seed)
        self._over = False
        self.states = {agent: monitor.initial for agent, monitor in self.monitors.items()}
        if self._history is not None:
            start = {agent: self._index[agent][state] for agent, state in self.states.items()}
            self._history.append({"states": [start], "labels": [], "actions": [], "rewards": [], "env_rewards": []})
        return self._observe(self._current)

    def step(self, actions: Mapping[str, np.ndarray]) -> Step[np.ndarray]:
        """See :meth:`MultiAgentEnv.step`. Raises ``ValueError`` if the labeller leaves out a monitored agent."""
        if self._over:
            raise RuntimeError("the episode is over or has not begun: call reset before step")
        step = self.env.step(actions)
        context = LabelContext(
            observations=self._current, actions=actions, next_observations=step.observations, info=step.info
        )
        labels = self._labels(context)
        outcomes = {agent: m.step(self.states[agent], labels[agent]) for agent, m in self.monitors.items()}
        terminal = [outcome.terminal for outcome in outcomes.values()]
        terminated = step.terminated or {"any": any, "all": all, "never": lambda _: False}[self._end_on](terminal)
        reward = self._rewards(step, outcomes)
        self._remember(labels, actions, step, reward, outcomes)
        self.states = {agent: outcome.state for agent, outcome in outcomes.items()}
        self._current = step.observations
        truncated = step.truncated and not terminated
        self._over = terminated or truncated
        return Step(
            observations=self._observe(step.observations),
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            info=step.info | self._info(outcomes, over=terminated or truncated),
        )

    def history(self) -> list[dict[str, Any]]:
        """Returns the episodes so far, enough to compute every reward of a monitor again; can be written as JSON.

        An episode has ``states`` (index of each agent's state, one entry more than the others), ``labels`` (sorted),
        ``actions`` (per group), ``rewards`` and ``env_rewards`` (by monitored agent, as paid and of the game).

        Raises:
            RuntimeError: without ``keep_history``.
        """
        if self._history is None:
            raise RuntimeError("episodes were not kept: make the environment with keep_history=True")
        return self._history

    def render(self) -> np.ndarray:
        """See :meth:`MultiAgentEnv.render`."""
        return self.env.render()

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`MultiAgentEnv.state_dict`. The history is not a part of it."""
        current = None if self._current is None else _as_lists(self._current)
        states = {agent: self._index[agent][state] for agent, state in self.states.items()}
        return {"env": self.env.state_dict(), "states": states, "current": current, "over": self._over}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :meth:`MultiAgentEnv.load_state_dict`."""
        self.env.load_state_dict(state["env"])
        self.states = {agent: self.monitors[agent].states[index] for agent, index in state["states"].items()}
        self._over = state["over"]
        self._current = None if state["current"] is None else _from_lists(state["current"], self.env.spec)

    def close(self) -> None:
        """See :meth:`MultiAgentEnv.close`."""
        self.env.close()

    # ------------------------------------------------------------------------------------------------------ internals

    def _extended_spec(self, spec: EnvSpec) -> EnvSpec:
        groups = {}
        for name, group in spec.groups.items():
            space = group.observation_space
            extra = self._extra_size(group)
            if extra and len(space.shape) != 1:
                raise ValueError(
                    f"observations of {name!r} have the shape {space.shape}, but monitors are appended to vectors: "
                    "flatten them first, or set observe='none'"
                )
            low, high = np.zeros(extra, space.dtype), np.ones(extra, space.dtype)
            if extra:
                space = spaces.Box(
                    np.concatenate([space.low, low]), np.concatenate([space.high, high]), dtype=space.dtype
                )
            groups[name] = GroupSpec(agents=group.agents, observation_space=space, action_space=group.action_space)
        kinds = ("monitor_state", "verdict", "satisfied")
        return EnvSpec(
            name=spec.name,
            groups=groups,
            state_size=spec.state_size + self._total,
            episode_limit=spec.episode_limit,
            info_keys=(*spec.info_keys, *(f"{kind}/{agent}" for agent in self.monitors for kind in kinds)),
            shared_reward=spec.shared_reward and self._reward == "env",
            can_checkpoint=spec.can_checkpoint,
            metadata=spec.metadata,
        )

    def _extra_size(self, group: GroupSpec) -> int:
        if self._observe_what == "none":
            return 0
        if self._observe_what == "all":
            return self._total
        return max((len(self.monitors[agent].states) for agent in group.agents if agent in self.monitors), default=0)

    def _labels(self, context: LabelContext) -> dict[str, frozenset[str]]:
        labels = self._labeller(context)
        if missing := [agent for agent in self.monitors if agent not in labels]:
            raise ValueError(f"the labeller gave no label for {missing}: it has to for every monitored agent")
        return {agent: frozenset(labels[agent]) for agent in self.monitors}

    def _rewards(self, step: Step[np.ndarray], outcomes: Mapping[str, MonitorStep]) -> dict[str, np.ndarray]:
        if self._reward == "env":
            return step.reward
        rewards = {}
        for name, group in self.spec.groups.items():
            rewards[name] = np.array(step.reward[name], np.float32)
            for i, agent in enumerate(group.agents):
                if agent not in outcomes:
                    continue
                paid = self._monitor_reward(agent, outcomes[agent]) if self._current.alive[name][i] else 0.0
                rewards[name][i] = paid + (rewards[name][i] if self._reward == "add" else 0.0)
        return rewards

    def _monitor_reward(self, agent: str, outcome: MonitorStep) -> float:
        if not self._potentials:
            return outcome.reward
        potentials = self._potentials[agent]
        return outcome.reward + self._gamma * potentials[outcome.state] - potentials[self.states[agent]]

    def _info(self, outcomes: Mapping[str, MonitorStep], *, over: bool) -> dict[str, float]:
        info = {}
        for agent, outcome in outcomes.items():
            verdict = outcome.verdict
            satisfied = verdict if verdict is not None else over and self.monitors[agent].undecided_is
            info[f"monitor_state/{agent}"] = float(self._index[agent][outcome.state])
            info[f"verdict/{agent}"] = -1.0 if verdict is None else float(verdict)
            info[f"satisfied/{agent}"] = float(satisfied)
        return info

    def _observe(self, observations: Observations[np.ndarray]) -> Observations[np.ndarray]:
        own = {agent: np.zeros(len(index), np.float32) for agent, index in self._index.items()}
        for agent, state in self.states.items():
            own[agent][self._index[agent][state]] = 1.0
        everything = np.concatenate(list(own.values()))
        extended = {}
        for name, group in self.spec.groups.items():
            observation = observations.observation[name]
            size = self._extra_size(group)
            extra = np.zeros((group.num_agents, size), observation.dtype)
            for i, agent in enumerate(group.agents):
                seen = everything if self._observe_what == "all" else own.get(agent, everything[:0])[:size]
                extra[i, : len(seen)] = seen
            extra[~observations.alive[name]] = 0
            extended[name] = np.concatenate([observation, extra], axis=-1) if size else observation
        return Observations(
            observation=extended,
            action_mask=observations.action_mask,
            alive=observations.alive,
            state=np.concatenate([observations.state, everything]),
        )

    def _remember(
        self,
        labels: Mapping[str, frozenset[str]],
        actions: Mapping[str, np.ndarray],
        step: Step[np.ndarray],
        reward: Mapping[str, np.ndarray],
        outcomes: Mapping[str, MonitorStep],
    ) -> None:
        if self._history is None:
            return
        episode = self._history[-1]
        episode["states"].append({agent: self._index[agent][outcome.state] for agent, outcome in outcomes.items()})
        episode["labels"].append({agent: sorted(label) for agent, label in labels.items()})
        episode["actions"].append({name: np.asarray(action).tolist() for name, action in actions.items()})
        episode["rewards"].append(self._by_agent(reward))
        episode["env_rewards"].append(self._by_agent(step.reward))

    def _by_agent(self, reward: Mapping[str, np.ndarray]) -> dict[str, float]:
        return {
            agent: float(reward[name][i])
            for name, group in self.spec.groups.items()
            for i, agent in enumerate(group.agents)
            if agent in self.monitors
        }


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def _as_lists(observations: Observations[np.ndarray]) -> dict[str, Any]:
    """Returns what any checkpoint can hold."""
    per_group = ("observation", "action_mask", "alive")
    lists = {kind: {name: a.tolist() for name, a in getattr(observations, kind).items()} for kind in per_group}
    return lists | {"state": observations.state.tolist()}


def _from_lists(lists: Mapping[str, Any], spec: EnvSpec) -> Observations[np.ndarray]:
    return Observations(
        observation={
            name: np.array(values, spec.groups[name].observation_space.dtype)
            for name, values in lists["observation"].items()
        },
        action_mask={name: np.array(values, np.bool_) for name, values in lists["action_mask"].items()},
        alive={name: np.array(values, np.bool_) for name, values in lists["alive"].items()},
        state=np.array(lists["state"], np.float32),
    )
