"""Monitors around an environment: what is done of an agent's task becomes a part of what it sees and is paid for."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from gymnasium import spaces

from marl_lightning.envs.base import MultiAgentEnv, Observations, Step
from marl_lightning.envs.monitors.machines import Monitor, MonitorStep, PotentialShaping
from marl_lightning.envs.spec import EnvSpec, GroupSpec

_MAX_BITS = 24  # whole numbers that float32 holds exactly


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
    counts as satisfied, else 0. With ``report_labels`` it also has ``label/<agent>``, the label as a number whose bit
    ``i`` says whether the ``i``-th proposition of its monitor is true, in the order of their names, and ``game_over``,
    which is 1 if the game itself was over.

    Args:
        env: the game; its observations have one axis.
        monitors: by agent; agents may be left out.
        labeller: returns the label of each monitored agent.
        observe: which monitors an agent sees: its ``"own"``, those of ``"all"`` agents, or ``"none"``.
        reward: what monitored agents are paid: that of the monitor (``"replace"``), both together (``"add"``), or only
            that of the game (``"env"``). Agents that were not alive before a step get nothing from their monitor; nor
            from the game, if it shares rewards but monitors add to them.
        end_on: the episode is terminated when ``"any"`` or ``"all"`` monitors are in a terminal state, or ``"never"``.
        shaping: of the monitors' rewards.
        keep_history: whether :meth:`history` keeps the episodes.
        report_labels: put labels into ``info``, for
            :class:`~marl_lightning.data.counterfactual.CounterfactualReplay`. The monitors then need an attribute
            ``propositions``, as reward machines have it.

    Attributes:
        monitors: by agent, in the order of ``spec.agents``.
        states: of the monitors now.
        observe, reward, end_on, report_labels: as given.

    Raises:
        ValueError: if there is no monitor, an agent is unknown, observations have more than one axis, a choice is
            not one of those above, or labels cannot be reported.
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
        report_labels: bool = False,
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
        self.observe, self.reward, self.end_on, self.report_labels = observe, reward, end_on, report_labels
        self._propositions = (
            {agent: _propositions(agent, m) for agent, m in self.monitors.items()} if report_labels else {}
        )
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
            steps = {"labels": [], "actions": [], "rewards": [], "env_rewards": []}
            self._history.append({"states": [start], **steps, "terminated": False})
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
        terminated = step.terminated or self.is_over(terminal)
        reward = self._rewards(step, outcomes, over=terminated)
        self._remember(labels, actions, step, reward, outcomes, over=terminated)
        self.states = {agent: outcome.state for agent, outcome in outcomes.items()}
        self._current = step.observations
        truncated = step.truncated and not terminated
        self._over = terminated or truncated
        return Step(
            observations=self._observe(step.observations),
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            info=step.info
            | self._info(outcomes, over=terminated or truncated)
            | self._label_info(labels, game_over=step.terminated),
        )

    def history(self) -> list[dict[str, Any]]:
        """Returns the episodes so far, enough to compute every reward of a monitor again; can be written as JSON.

        An episode has ``states`` (index of each agent's state, one entry more than the others), ``labels`` (sorted),
        ``actions`` (per group), ``rewards`` and ``env_rewards`` (by monitored agent, as paid and of the game), and
        ``terminated``, whether it has been.

        Raises:
            RuntimeError: without ``keep_history``.
        """
        if self._history is None:
            raise RuntimeError("episodes were not kept: make the environment with keep_history=True")
        return self._history

    # What follows from labels, without changing anything ------------------------------------------------------------

    def label(self, agent: str, number: int) -> frozenset[str]:
        """Returns the label that ``info`` reports as a number, without what the agent's monitor does not mention."""
        return frozenset(name for i, name in enumerate(self._propositions[agent]) if number >> i & 1)

    def monitor_reward(self, agent: str, state: Hashable, outcome: MonitorStep, *, over: bool) -> float:
        """Returns what an agent is paid by its monitor for going from ``state`` to ``outcome``, shaping included.

        Args:
            agent: its name.
            state: of its monitor before the step.
            outcome: what its monitor said.
            over: whether the episode was terminated. Nothing follows then, so that the potential is 0 whatever the
                state: otherwise it would pay to end a game in a good one (Grzes 2017, "Reward Shaping in Episodic
                Reinforcement Learning").
        """
        if not self._potentials:
            return outcome.reward
        potentials = self._potentials[agent]
        following = 0.0 if over else self._gamma * potentials[outcome.state]
        return outcome.reward + following - potentials[state]

    def is_over(self, terminal: Iterable[bool]) -> bool:
        """Returns whether the monitors end the episode, from whether each is in a terminal state."""
        return {"any": any, "all": all, "never": lambda _: False}[self.end_on](terminal)

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
        kinds = ("monitor_state", "verdict", "satisfied", *(("label",) if self.report_labels else ()))
        return EnvSpec(
            name=spec.name,
            groups=groups,
            state_size=spec.state_size + self._total,
            episode_limit=spec.episode_limit,
            info_keys=(
                *spec.info_keys,
                *(f"{kind}/{agent}" for agent in self.monitors for kind in kinds),
                *(("game_over",) if self.report_labels else ()),
            ),
            shared_reward=spec.shared_reward and self.reward == "env",
            can_checkpoint=spec.can_checkpoint,
            metadata=spec.metadata,
        )

    def _extra_size(self, group: GroupSpec) -> int:
        if self.observe == "none":
            return 0
        if self.observe == "all":
            return self._total
        return max((len(self.monitors[agent].states) for agent in group.agents if agent in self.monitors), default=0)

    def _labels(self, context: LabelContext) -> dict[str, frozenset[str]]:
        labels = self._labeller(context)
        if missing := [agent for agent in self.monitors if agent not in labels]:
            raise ValueError(f"the labeller gave no label for {missing}: it has to for every monitored agent")
        return {agent: frozenset(labels[agent]) for agent in self.monitors}

    def _rewards(
        self, step: Step[np.ndarray], outcomes: Mapping[str, MonitorStep], *, over: bool
    ) -> dict[str, np.ndarray]:
        if self.reward == "env":
            return step.reward
        rewards = {}
        for name, group in self.spec.groups.items():
            # Of a team's reward the dead get their part only where all rewards are shared.
            rewards[name] = np.where(self._current.alive[name], step.reward[name], 0).astype(np.float32)
            for i, agent in enumerate(group.agents):
                if agent not in outcomes:
                    continue
                paid = (
                    self.monitor_reward(agent, self.states[agent], outcomes[agent], over=over)
                    if self._current.alive[name][i]
                    else 0.0
                )
                rewards[name][i] = paid + (rewards[name][i] if self.reward == "add" else 0.0)
        return rewards

    def _label_info(self, labels: Mapping[str, frozenset[str]], *, game_over: bool) -> dict[str, float]:
        if not self.report_labels:
            return {}
        numbers = {
            f"label/{agent}": float(sum(2**i for i, name in enumerate(names) if name in labels[agent]))
            for agent, names in self._propositions.items()
        }
        return numbers | {"game_over": float(game_over)}

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
                seen = everything if self.observe == "all" else own.get(agent, everything[:0])[:size]
                extra[i, : len(seen)] = seen
            extra[~observations.alive[name]] = 0
            extended[name] = np.concatenate([observation, extra], axis=-1)
        # The result belongs to the caller, who may write into it; the game's own is needed again.
        return Observations(
            observation=extended,
            action_mask={name: mask.copy() for name, mask in observations.action_mask.items()},
            alive={name: alive.copy() for name, alive in observations.alive.items()},
            state=np.concatenate([observations.state, everything]),
        )

    def _remember(
        self,
        labels: Mapping[str, frozenset[str]],
        actions: Mapping[str, np.ndarray],
        step: Step[np.ndarray],
        reward: Mapping[str, np.ndarray],
        outcomes: Mapping[str, MonitorStep],
        *,
        over: bool,
    ) -> None:
        if self._history is None:
            return
        episode = self._history[-1]
        episode["states"].append({agent: self._index[agent][outcome.state] for agent, outcome in outcomes.items()})
        episode["labels"].append({agent: sorted(label) for agent, label in labels.items()})
        episode["actions"].append({name: np.asarray(action).tolist() for name, action in actions.items()})
        episode["rewards"].append(self._by_agent(reward))
        episode["env_rewards"].append(self._by_agent(step.reward))
        episode["terminated"] = over

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


def _propositions(agent: str, monitor: Monitor) -> tuple[str, ...]:
    """Returns the names that stand for the bits of a reported label."""
    names = getattr(monitor, "propositions", None)
    if names is None:
        raise ValueError(
            f"report_labels needs to know the propositions of the monitor of {agent!r}: give it an attribute "
            "propositions, or leave report_labels out"
        )
    if len(names) > _MAX_BITS:
        raise ValueError(f"a label is reported in {_MAX_BITS} bits, but {agent!r} has {len(names)} propositions")
    return tuple(sorted(names))
