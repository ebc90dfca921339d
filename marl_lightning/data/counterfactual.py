"""Counterfactual experience: what the same steps would have been worth had a monitor been in another state.

Transitions of a monitor are known, and the game does not depend on them. So every step that was made tells, for every
state of an agent's monitor, what reward and which next state it would have brought (counterfactual experiences for
reward machines, Toro Icarte et al. 2022, section 3.3). Here whole sequences are told anew, so that they can be drawn
from a replay of sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from marl_lightning.data import schema
from marl_lightning.envs.monitors import MonitorParallelEnv
from marl_lightning.envs.spec import EnvSpec
from marl_lightning.validation import PositiveInt, checked

if TYPE_CHECKING:
    from marl_lightning.data.replay import ReplayBuffer

Starts = Callable[[str, Hashable, Sequence[Hashable]], Iterable[Hashable]]
"""Chooses, for an agent and the state that its monitor was in, among the states that it might have been in."""


class CounterfactualReplay:
    """Makes variants of what was collected, in which the monitor of one agent started in another state.

    A variant has the same actions, game and labels. The monitor's state in the agent's observations and in the global
    state, the agent's reward, and whether the episode was over are what they would have been. It stops with the first
    step that ends the episode or the monitor's task, and where its state meets that of what really happened, or that of
    a variant before it: from there on it would say the same. The other agents of a variant are marked as not alive, so
    that nothing is learned for them from steps that, for them, did not happen.

    This is unbiased only if the other agents do not see the state of the monitor, and neither the labels nor the game
    depend on it. The former is checked, the latter is up to the labeller.

    Each variant is a closed stream of the replay, and takes room in it like any other steps. They count neither as env
    steps nor as episodes.

    Args:
        env: an environment like those that are collected from: its monitors and settings are read, and it is never
            stepped. It needs ``observe="own"`` and ``report_labels=True``.
        policy: where variants start: in the ``"reachable"`` states, which are those that some state at the beginning of
            the episode leads to with the labels since; in ``"all"``; or a function that is given the agent, the state
            that its monitor was in, and all others that are not terminal.
        max_variants: most variants an agent and segment; if there are more, all get their turns.
        anchor: ``"episode"`` tells whole episodes anew, once they have ended, so that memory at the start of a variant
            is what it really was. ``"segment"`` tells each piece of an episode that is collected at once anew, which
            gives more and earlier, but forgets what happened before: for networks without memory.
        agents: whose monitors; by default all that have one.

    Raises:
        ValueError: if the environment does not observe or report what is needed, or an agent has no monitor.
    """

    @checked
    def __init__(
        self,
        *,
        env: MonitorParallelEnv,
        policy: Literal["reachable", "all"] | Callable = "reachable",
        max_variants: PositiveInt = 8,
        anchor: Literal["episode", "segment"] = "episode",
        agents: Sequence[str] | None = None,
    ):
        _check_env(env, agents)
        self.env = env
        self.policy = policy
        self.max_variants = max_variants
        self.anchor = anchor
        self._watched = {watched.agent: watched for watched in _find_watched(env)}
        self._agents = tuple(self._watched) if agents is None else tuple(agents)
        self._tables: dict[tuple[str, int], tuple[np.ndarray, np.ndarray]] = {}
        self._turns = 0
        # By instance: the steps so far of the episode that goes on, or the states that monitors may be in by now.
        self._episodes: dict[int, list[tuple[TensorDict, dict[str, np.ndarray]]]] = {}
        self._reached: dict[int, dict[str, np.ndarray]] = {}

    def check(self, spec: EnvSpec) -> None:
        """Raises ``ValueError`` if steps of another environment are not like those of the given one."""
        own = self.env.spec
        if (spec.groups, spec.state_size) != (own.groups, own.state_size) or set(own.info_keys) - set(spec.info_keys):
            raise ValueError(
                f"relabel was made for other observations, states or info than those of {spec.name}: give it an "
                "environment like those that are trained in, with wrappers around the game and not around the monitors"
            )

    def extend(self, buffer: ReplayBuffer, records: TensorDict, info: Mapping[str, Tensor]) -> None:
        """Adds the variants of what was collected to a replay.

        Args:
            buffer: the replay; it has the records themselves already.
            records: ``[T, E]``, the next ``T`` steps of ``E`` instances.
            info: of these steps, by name ``[T, E]``.
        """
        arrays = {key: info[key].numpy(force=True) for key in self._info_keys()}
        tell = self._tell_all if self.anchor == "segment" else self._tell_ended
        for variants in tell(records, arrays):
            streams = buffer.index.open(variants.shape[1])
            buffer.extend(variants, streams)
            buffer.index.close(streams)

    def variants(self, episode: TensorDict, info: Mapping[str, Tensor], agent: str) -> list[TensorDict]:
        """Returns the variants, each ``[L]``, of a piece ``[T]`` of one episode, for one agent.

        Args:
            episode: records.
            info: of these steps, by name ``[T]``.
            agent: whose monitor starts in another state.
        """
        records = episode.unsqueeze(1)
        facts = self._facts(records, {key: info[key].numpy(force=True)[:, None] for key in self._info_keys()}, agent)
        plans = self._plans(facts, env=0, begin=0, end=len(episode), reachable=None)
        return [self._build(records, facts, [plan])[:, 0] for plan in plans]

    def told_from(self, episode: TensorDict, info: Mapping[str, Tensor], agent: str, state: Hashable) -> TensorDict:
        """Returns a piece ``[T]`` of an episode, in full length, had the monitor started in another state."""
        records = episode.unsqueeze(1)
        facts = self._facts(records, {key: info[key].numpy(force=True)[:, None] for key in self._info_keys()}, agent)
        start = facts.watched.states.index(state)
        return self._build(records, facts, [self._plan(facts, env=0, begin=0, end=len(episode), start=start)])[:, 0]

    # Segments -------------------------------------------------------------------------------------------------------

    def _info_keys(self) -> list[str]:
        return ["game_over", *(f"label/{agent}" for agent in self._agents)]

    def _tell_all(self, records: TensorDict, info: Mapping[str, np.ndarray]) -> Iterable[TensorDict]:
        """Yields the variants of all pieces of episodes, ``[L, n]``."""
        pieces = _pieces(records)
        for agent in self._agents:
            facts = self._facts(records, info, agent)
            plans = []
            for env, begin, end, is_first in pieces:
                reached = self._reached.setdefault(env, {})
                if is_first or agent not in reached:
                    reached[agent] = np.ones(len(facts.watched.states), np.bool_)
                plans += self._plans(facts, env=env, begin=begin, end=end, reachable=reached[agent])
                reached[agent] = self._follow(facts, env, begin, end, reached[agent])
            yield from self._build_all(records, facts, plans)

    def _tell_ended(self, records: TensorDict, info: Mapping[str, np.ndarray]) -> Iterable[TensorDict]:
        """Yields the variants of all episodes that ended, ``[L, n]``, and remembers the steps of the others."""
        done = (records[schema.NEXT, schema.TERMINATED] | records[schema.NEXT, schema.TRUNCATED]).numpy()
        for env, begin, end, is_first in _pieces(records):
            part = slice(begin, end), slice(env, env + 1)
            so_far = [] if is_first else self._episodes.get(env, [])
            so_far.append((records[part].clone(), {key: values[part].copy() for key, values in info.items()}))
            self._episodes[env] = so_far
            if not done[end - 1, env]:
                continue
            episode = torch.cat([steps for steps, _ in so_far])
            everything = {key: np.concatenate([part[key] for _, part in so_far]) for key in info}
            del self._episodes[env]
            for agent in self._agents:
                facts = self._facts(episode, everything, agent)
                plans = self._plans(facts, env=0, begin=0, end=len(episode), reachable=None)
                yield from self._build_all(episode, facts, plans)

    # What would have been -------------------------------------------------------------------------------------------

    def _facts(self, records: TensorDict, info: Mapping[str, np.ndarray], agent: str) -> _Facts:
        watched = self._watched[agent]
        after = records[schema.NEXT, schema.STATE]
        terminal = {
            name: other.terminal[_one_hot_index(after[..., other.state])] for name, other in self._watched.items()
        }
        return _Facts(
            watched=watched,
            monitor=_one_hot_index(records[schema.STATE][..., watched.state]),
            label=info[f"label/{agent}"].astype(np.int64),
            game_over=info["game_over"] > 0,
            over=records[schema.NEXT, schema.TERMINATED].numpy(),
            terminal=terminal,
        )

    def _plans(self, facts: _Facts, *, env: int, begin: int, end: int, reachable: np.ndarray | None) -> list[_Plan]:
        """Returns what to tell of steps ``begin`` to ``end`` of an instance."""
        watched, factual = facts.watched, facts.monitor[begin:end, env]
        starts = [i for i in range(len(watched.states)) if i != factual[0] and not watched.terminal[i]]
        if callable(self.policy):
            candidates = [watched.states[i] for i in starts]
            wanted = self.policy(watched.agent, watched.states[factual[0]], candidates)
            starts = [starts[candidates.index(state)] for state in wanted]
        elif self.policy == "reachable" and reachable is not None:
            starts = [i for i in starts if reachable[i]]
        if len(starts) > self.max_variants:
            first = self._turns * self.max_variants % len(starts)
            starts = (starts + starts)[first : first + self.max_variants]
        self._turns += 1
        told, plans = [factual], []
        for start in starts:
            plan = self._plan(facts, env=env, begin=begin, end=end, start=start)
            length = _length(plan, watched.terminal, told)
            told.append(plan.monitor[:-1])
            if length:
                plans.append(plan.cut(length))
        return plans

    def _plan(self, facts: _Facts, *, env: int, begin: int, end: int, start: int) -> _Plan:
        watched, length = facts.watched, end - begin
        monitor, reward, change = np.empty(length + 1, np.int64), np.empty(length), np.empty(length)
        terminated = facts.game_over[begin:end, env].copy()
        monitor[0] = start
        for t in range(length):
            following, paid = self._table(watched.agent, int(facts.label[begin + t, env]))
            monitor[t + 1] = following[monitor[t]]
            terminal = {agent: flags[begin + t, env] for agent, flags in facts.terminal.items()}
            terminal[watched.agent] = watched.terminal[monitor[t + 1]]
            terminated[t] |= self.env.is_over(terminal.values())
            reward[t] = paid[int(terminated[t]), monitor[t]]
            change[t] = reward[t] - paid[int(facts.over[begin + t, env]), facts.monitor[begin + t, env]]
        return _Plan(
            env=env,
            begin=begin,
            monitor=monitor,
            reward=reward if self.env.reward == "replace" else change,
            adds=self.env.reward == "add",
            terminated=terminated,
        )

    def _follow(self, facts: _Facts, env: int, begin: int, end: int, reached: np.ndarray) -> np.ndarray:
        """Returns ``[U]`` bool, where the states ``reached`` lead to with the labels of some steps."""
        for t in range(begin, end):
            following, _ = self._table(facts.watched.agent, int(facts.label[t, env]))
            new = np.zeros_like(reached)
            new[following[reached]] = True
            reached = new
        return reached

    def _table(self, agent: str, label: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns for every state of a monitor which one follows with a label, and what that pays.

        The latter is ``[2, U]``: first if the episode goes on, then if it is terminated.
        """
        if (agent, label) not in self._tables:
            monitor, true = self.env.monitors[agent], self.env.label(agent, label)
            outcomes = [monitor.step(state, true) for state in monitor.states]
            index = {state: i for i, state in enumerate(monitor.states)}
            paid = [
                [self.env.monitor_reward(agent, u, o, over=over) for u, o in zip(monitor.states, outcomes, strict=True)]
                for over in (False, True)
            ]
            self._tables[agent, label] = np.array([index[o.state] for o in outcomes]), np.array(paid)
        return self._tables[agent, label]

    def _build_all(self, records: TensorDict, facts: _Facts, plans: Sequence[_Plan]) -> Iterable[TensorDict]:
        """Yields records ``[L, n]`` for all plans, those of equal length together."""
        by_length: dict[int, list[_Plan]] = {}
        for plan in plans:
            by_length.setdefault(len(plan.reward), []).append(plan)
        for same in by_length.values():
            yield self._build(records, facts, same)

    def _build(self, records: TensorDict, facts: _Facts, plans: Sequence[_Plan]) -> TensorDict:
        """Returns records ``[L, n]`` for plans of one length."""
        watched, length = facts.watched, len(plans[0].reward)
        envs = torch.tensor([plan.env for plan in plans])
        times = torch.tensor([plan.begin for plan in plans]) + torch.arange(length).unsqueeze(-1)
        told, row = records[times, envs.expand_as(times)], watched.row
        after, group = told[schema.NEXT], told[watched.group]
        monitor = np.stack([plan.monitor for plan in plans], 1)
        one_hot = torch.from_numpy(np.eye(len(watched.states), dtype=np.float32)[monitor])
        for steps, states in ((told, one_hot[:-1]), (after, one_hot[1:])):
            steps[schema.STATE][..., watched.state] = states
            own = steps[watched.group]
            alive = own[schema.ALIVE][..., row, None]
            seen = own[schema.OBSERVATION]
            seen[..., row, watched.observed] = (states * alive).to(seen.dtype)
        paid = after[watched.group, schema.REWARD]
        reward = torch.from_numpy(np.stack([plan.reward for plan in plans], 1)).to(paid.dtype)
        reward = paid[..., row] + reward if plans[0].adds else reward
        paid[..., row] = torch.where(group[schema.ALIVE][..., row], reward, paid[..., row])
        terminated = torch.from_numpy(np.stack([plan.terminated for plan in plans], 1))
        after[schema.TERMINATED][:] = terminated
        after[schema.TRUNCATED][terminated] = False
        told[schema.IS_FIRST][:] = False
        told[schema.IS_FIRST][0] = True
        mine = group[schema.ALIVE][..., row].clone()
        for name in self.env.spec.groups:
            told[name, schema.ALIVE][:] = False
        group[schema.ALIVE][..., row] = mine
        return told

    # Resuming -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns all that :meth:`load_state_dict` needs to continue exactly."""

        def tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
            return {name: torch.from_numpy(array) for name, array in arrays.items()}

        return {
            "turns": self._turns,
            "episodes": {
                env: [(steps.to_dict(), tensors(info)) for steps, info in pieces]
                for env, pieces in self._episodes.items()
            },
            "reached": {env: tensors(reached) for env, reached in self._reached.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores :meth:`state_dict`."""

        def arrays(tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
            return {name: tensor.numpy() for name, tensor in tensors.items()}

        self._turns = state["turns"]
        self._episodes = {
            env: [(TensorDict(steps, batch_size=steps[schema.IS_FIRST].shape), arrays(info)) for steps, info in pieces]
            for env, pieces in state["episodes"].items()
        }
        self._reached = {env: arrays(reached) for env, reached in state["reached"].items()}


@dataclass(frozen=True, kw_only=True)
class _Watched:
    """Where an agent and its monitor are in a record.

    Attributes:
        agent: its name.
        group: its group.
        row: its index in the group.
        observed: columns of its observation that hold the state of the monitor.
        state: columns of the global state that do.
        states: the states of the monitor, ``U`` of them.
        terminal: ``[U]`` bool, which of them are terminal.
    """

    agent: str
    group: str
    row: int
    observed: slice
    state: slice
    states: tuple[Hashable, ...]
    terminal: np.ndarray


@dataclass(frozen=True, kw_only=True)
class _Facts:
    """What really happened to one agent's monitor, all ``[T, E]``.

    Attributes:
        watched: the agent.
        monitor: index of the monitor's state before each step.
        label: reported label of each step.
        game_over: whether the game itself was over.
        over: whether the episode was terminated.
        terminal: by agent, whether its monitor was in a terminal state after each step.
    """

    watched: _Watched
    monitor: np.ndarray
    label: np.ndarray
    game_over: np.ndarray
    over: np.ndarray
    terminal: dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What steps ``begin`` to ``begin + L`` of an instance would have been.

    Attributes:
        env: the instance.
        begin: the first step.
        monitor: ``[L + 1]`` indices of the states of the monitor.
        reward: ``[L]`` what the agent would have been paid, or how much more, if it was alive.
        adds: the latter.
        terminated: ``[L]`` bool.
    """

    env: int
    begin: int
    monitor: np.ndarray
    reward: np.ndarray
    adds: bool
    terminated: np.ndarray

    def cut(self, length: int) -> _Plan:
        """Returns the first steps of it."""
        return replace(
            self,
            monitor=self.monitor[: length + 1],
            reward=self.reward[:length],
            terminated=self.terminated[:length],
        )


def _length(plan: _Plan, terminal: np.ndarray, told: Sequence[np.ndarray]) -> int:
    """Returns how many steps of a plan say anything new: up to the first that ends it, before it says what was told."""
    over = plan.terminated | terminal[plan.monitor[1:]]
    length = int(over.argmax()) + 1 if over.any() else len(over)
    for other in told:
        same = plan.monitor[:-1] == other
        if same.any():
            length = min(length, int(same.argmax()))
    return length


def _pieces(records: TensorDict) -> list[tuple[int, int, int, bool]]:
    """Returns instance, first and last step, and whether an episode starts there, of all pieces of episodes."""
    done = (records[schema.NEXT, schema.TERMINATED] | records[schema.NEXT, schema.TRUNCATED]).numpy()
    is_first = records[schema.IS_FIRST].numpy()
    pieces = []
    for env in range(done.shape[1]):
        begins = [0, *(np.flatnonzero(done[:-1, env] | is_first[1:, env]) + 1).tolist()]
        ends = [*begins[1:], len(done)]
        pieces += [(env, begin, end, bool(is_first[begin, env])) for begin, end in zip(begins, ends, strict=True)]
    return pieces


def _one_hot_index(one_hot: Tensor) -> np.ndarray:
    """Returns the indices ``[...]`` of one-hot vectors ``[..., U]``. Raises ``ValueError`` if they are none."""
    array = one_hot.numpy()
    if not (((array == 0) | (array == 1)).all() and (array.sum(-1) == 1).all()):
        raise ValueError(
            "states do not end in the states of the monitors: put wrappers around the game and not around the monitors"
        )
    return array.argmax(-1)


def _check_env(env: MonitorParallelEnv, agents: Sequence[str] | None) -> None:
    if env.observe != "own":
        reason = "others see the state of an agent's monitor" if env.observe == "all" else "nobody sees the monitors"
        raise ValueError(
            f"an agent's monitor cannot be thought of in another state if {reason}: set observe='own' instead of "
            f"{env.observe!r}, or leave out relabel"
        )
    if env.reward == "env":
        raise ValueError("monitors pay nothing with reward='env': set it to 'replace' or 'add', or leave out relabel")
    if not env.report_labels:
        raise ValueError("the labels of steps are needed: make the environments with report_labels=True")
    if unknown := [agent for agent in agents or () if agent not in env.monitors]:
        raise ValueError(f"agents {unknown} have no monitor, only {list(env.monitors)} have")


def _find_watched(env: MonitorParallelEnv) -> Iterable[_Watched]:
    spec = env.spec
    place = {agent: (name, row) for name, group in spec.groups.items() for row, agent in enumerate(group.agents)}
    begin = spec.state_size - sum(len(monitor.states) for monitor in env.monitors.values())
    for agent, monitor in env.monitors.items():
        name, row = place[agent]
        size, width = len(monitor.states), env.env.spec.groups[name].observation_size
        steps = [monitor.step(state, frozenset()) for state in monitor.states]
        yield _Watched(
            agent=agent,
            group=name,
            row=row,
            observed=slice(width, width + size),
            state=slice(begin, begin + size),
            states=tuple(monitor.states),
            terminal=np.array([s.terminal and s.state == u for s, u in zip(steps, monitor.states, strict=True)]),
        )
        begin += size
