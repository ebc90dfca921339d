"""NashConv of any game that can be played, estimated from below by learning best responses. Needs Lightning."""

from __future__ import annotations

import copy
import logging
import math
import signal
import sys
import threading
import time
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
import torch
from lightning import LightningDataModule
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.environments import LightningEnvironment
from pydantic import Field
from tqdm import tqdm

from marl_lightning.algorithms.base import MARLModule, Policy
from marl_lightning.algorithms.ippo import IPPO
from marl_lightning.algorithms.iql import IQL
from marl_lightning.algorithms.snapshots import AgentState, load_snapshot, snapshot
from marl_lightning.callbacks.exploration import EpsilonSchedule
from marl_lightning.callbacks.sidecar import rng_state, set_rng_state
from marl_lightning.callbacks.stop import StopAtEnvSteps
from marl_lightning.clock import EnvStepInterval
from marl_lightning.data.replay import ReplayDataModule
from marl_lightning.data.rollout import RolloutDataModule
from marl_lightning.envs.base import MultiAgentEnv, Observations, VectorEnv
from marl_lightning.envs.spec import EnvSpec
from marl_lightning.envs.wrappers.base import Batch, Rows, Wrapper
from marl_lightning.envs.wrappers.episode import RETURN
from marl_lightning.envs.wrappers.opponents import Opponents, check_acting, joint_actions
from marl_lightning.evaluation import evaluate
from marl_lightning.games.intervals import Interval, mean_interval, newcombe_interval, sum_interval, wilson_interval
from marl_lightning.games.profiles import Mode, check_mode, device_of
from marl_lightning.games.result import NashConvResult
from marl_lightning.runtime import quiet_lightning
from marl_lightning.trainer_config import validate_iql_config
from marl_lightning.validation import Fraction, NonNegativeInt, PositiveFloat, PositiveInt, checked, nearest

Preset = Literal["seed", "quick", "standard", "thorough"]
Learner = Literal["iql", "ippo"]
Start = Literal["fresh", "warm", "both"]
Payoff = Literal["return", "discounted", "satisfaction"]

_MOST_RECORDS = 200_000  # env steps that a replay keeps at most
_EVALUATION_ENVS = 64
_LENGTH = 8  # steps of a sequence that a recurrent value network learns from
_IPPO_ROLLOUT = 64


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a search for best responses may cost; see :class:`LearnedEvaluator` for what is not said here.

    Attributes:
        env_steps: of each training.
        restarts: trainings from each start.
        checkpoints: candidates of each training.
        num_envs: instances that a training steps together.
        rollout_length: vector steps between updates.
        updates: made after each of these.
        batch_size: transitions an update, or sequences with memory.
        warmup: part of the training before the first update.
        select_episodes: played by each candidate to choose one.
        report_episodes: played by the one that was chosen.
    """

    env_steps: int
    restarts: int
    checkpoints: int
    num_envs: int = 16
    rollout_length: int = 1
    updates: int = 1
    batch_size: int = 128
    warmup: float = 0.02
    select_episodes: int
    report_episodes: int


PRESETS: dict[Preset, Budget] = {
    "seed": Budget(
        env_steps=100 * 128,
        restarts=1,
        checkpoints=1,
        num_envs=1,
        rollout_length=128,
        updates=4,
        batch_size=1,
        warmup=0.0,
        select_episodes=500,
        report_episodes=1_000,
    ),
    "quick": Budget(env_steps=16_000, restarts=1, checkpoints=2, select_episodes=1_000, report_episodes=4_000),
    "standard": Budget(env_steps=50_000, restarts=2, checkpoints=3, select_episodes=4_000, report_episodes=20_000),
    "thorough": Budget(env_steps=400_000, restarts=3, checkpoints=5, select_episodes=10_000, report_episodes=50_000),
}
"""Budgets by name. ``"seed"`` is the protocol with one instance and batches of one sequence: cheap and very weak."""


class LearnedEvaluator:
    """Estimates NashConv from below, by training a response for each agent while the others stay as they are.

    For each agent, responders are trained in :class:`~marl_lightning.envs.wrappers.opponents.Opponents`, where the
    profile plays all others. They know what the agent knows, act greedily, and are judged by episodes that they were
    not trained on, in two stages. On one set of episodes the best of all candidates is chosen, and not to deviate is
    one of them. Its payoff is then reported from a *new* set: the largest of several estimates would be too large on
    average, and the result no bound. In both sets the profile plays the same seeds with and without a deviation, so
    that chance cancels in the gains.

    **What the result means.** No response is better than a best response, so that ``value`` is an estimate of a lower
    bound of NashConv, and ``interval`` is where that bound may lie, not NashConv itself: a high value proves that a
    profile is no equilibrium, a low one says that no better responses were found. A true gain is never negative, but an
    estimate may be: ``gains`` are as they were measured, ``NashConvResult.clipped`` sums the positive ones. The value
    is the sum over ``agents``.

    **Intervals.** Of ``"return"`` and ``"discounted"``, what all agents gain in the same episode is summed before the
    interval is taken, which counts how gains vary together; see
    :func:`~marl_lightning.games.intervals.mean_interval` for how. Of ``"satisfaction"``, payoffs have Wilson's
    intervals, gains Newcombe's, which takes both payoffs as independent and so is rather too wide, and the gains of
    different agents come from different episodes and are put together by
    :func:`~marl_lightning.games.intervals.sum_interval`. The gain of an agent for which nothing better was found is 0,
    without an interval.

    **No trace is left.** The profile, its mode, global random states and signal handlers are as before, also after an
    error or Ctrl-C, and the game is not touched: all is played in replicas, which are closed at the end. Trainings are
    runs of a ``lightning.Trainer`` in this process alone, on the device of the profile, and may be made inside of
    another one, or in one of several processes. Equal seeds give equal results. Payoffs are the rewards of the
    environment that is given, with its wrappers.

    See :class:`~marl_lightning.envs.wrappers.opponents.Opponents` for profiles whose agents see each other's memory or
    choose their actions together.

    Args:
        preset: the budget, see :data:`PRESETS`. ``"quick"`` takes under a minute in small games.
        learner: ``"iql"`` learns values of Discrete actions, as DQN since the responder is alone; ``"ippo"`` is PPO and
            learns all kinds of actions.
        start: train responders from the beginning (``"fresh"``), from what the agent does already (``"warm"``), which
            finds small improvements soon but may never find another strategy, or ``"both"``.
        warm_start: what warm responders start from, as a policy alone lacks critics and target networks: a trained
            module of the learner's family whose agents share nothing, or its
            :func:`~marl_lightning.algorithms.snapshots.snapshot`. A module also says how its networks look, a snapshot
            does not.
        env_steps: of each training; this and the next ones default to the preset.
        restarts: trainings from each start, with different seeds.
        checkpoints: candidates of each training, equally far apart in time; the last one is the result.
        num_envs: instances that a training steps together.
        rollout_length: vector steps after which IQL makes updates.
        select_episodes: episodes by which each candidate is judged.
        report_episodes: episodes from which payoffs are estimated.
        hidden_sizes: of the responders' networks.
        recurrent: give responders a GRU; by default if the profile has memory.
        learning_rate: of Adam.
        gamma: discount per env step, of learning, and of the payoff ``"discounted"``.
        payoff: expected undiscounted (``"return"``) or ``"discounted"`` return; or the probability that the agent's
            monitor is satisfied at the end of an episode (``"satisfaction"``), see
            :class:`~marl_lightning.envs.monitors.MonitorParallelEnv`. Responders then learn from that verdict instead
            of rewards.
        payoff_bounds: the smallest and largest payoff that an episode can give, for intervals of few episodes.
        agents: name or names of those whose gains are estimated; by default all.
        level: of the intervals, in (0, 1).
        seed: of everything.
        progress: show agent, env steps and the time that is left on a terminal.

    Raises:
        ValueError: listing all that is wrong with the arguments.
    """

    @checked
    def __init__(
        self,
        *,
        preset: Preset = "standard",
        learner: Learner = "iql",
        start: Start = "fresh",
        warm_start: MARLModule | Mapping[str, Any] | None = None,
        env_steps: PositiveInt | None = None,
        restarts: PositiveInt | None = None,
        checkpoints: PositiveInt | None = None,
        num_envs: PositiveInt | None = None,
        rollout_length: PositiveInt | None = None,
        select_episodes: PositiveInt | None = None,
        report_episodes: PositiveInt | None = None,
        hidden_sizes: Annotated[Sequence[PositiveInt], Field(min_length=1)] = (64, 64),
        recurrent: bool | None = None,
        learning_rate: PositiveFloat = 1e-3,
        gamma: Fraction = 0.99,
        payoff: Payoff = "return",
        payoff_bounds: tuple[float, float] | None = None,
        agents: str | Collection[str] | None = None,
        level: Annotated[float, Field(gt=0, lt=1)] = 0.95,
        seed: NonNegativeInt = 0,
        progress: bool = False,
    ):
        given = {
            "env_steps": env_steps,
            "restarts": restarts,
            "checkpoints": checkpoints,
            "num_envs": num_envs,
            "rollout_length": rollout_length,
            "select_episodes": select_episodes,
            "report_episodes": report_episodes,
        }
        self.budget = replace(PRESETS[preset], **{name: value for name, value in given.items() if value is not None})
        self.learner = learner
        self.start = start
        self.warm_start = warm_start
        self.hidden_sizes = tuple(hidden_sizes)
        self.recurrent = recurrent
        self.learning_rate = learning_rate
        self.gamma = gamma
        self.payoff = payoff
        self.payoff_bounds = payoff_bounds
        self.agents = (agents,) if isinstance(agents, str) else agents
        self.level = level
        self.seed = seed
        self.progress = progress
        self._check_arguments()

    def evaluate(self, profile: Policy, game: VectorEnv, *, mode: Mode = "stochastic") -> NashConvResult:
        """Returns an estimate of NashConv from below.

        Args:
            profile: a policy that plays all agents; it need not state probabilities.
            game: an environment that can be replicated.
            mode: the profile plays as it mixes (``"stochastic"``), or always what it prefers (``"greedy"``).

        Returns:
            ``snapshots`` has, by agent, what its responder learned, in the form of
            :func:`~marl_lightning.algorithms.snapshots.snapshot`: of ``IQL`` or ``IPPO`` with shared parameters where
            only this agent is left, which also fits the agent's place among several that share nothing. Agents for
            which nothing better was found are not in it. ``episodes`` are those of all reports together, ``env_steps``
            those of all that was played and learned.

        Raises:
            TypeError: if the profile cannot act, or the game is none that can be replicated.
            ValueError: before anything is learned, if the profile does not fit the game, an agent is unknown, the
                learner cannot learn its kind of actions, the warm start does not fit, or nobody monitors an agent.
        """
        check_mode(mode)
        names = self.check(profile, game)
        start = time.perf_counter()
        with _no_trace(device_of(profile)), ExitStack() as stack:
            arena = _Arena(self, profile, game, mode)
            stack.callback(arena.close)
            search = _Search(self, profile, game, mode)
            search.check(arena, names)
            total = len(names) * search.trainings * self.budget.env_steps
            bar = stack.enter_context(_progress_bar(total, enabled=self.progress))
            arms = [self._respond(search, arena, agent, bar) for agent in names]
            env_steps = search.env_steps + arena.env_steps
        return self._result(arms, env_steps=env_steps, wall_seconds=time.perf_counter() - start)

    def _respond(self, search: _Search, arena: _Arena, agent: str, bar: tqdm) -> _Arm:
        """Finds a response of one agent, and plays the episodes that are reported."""
        index = arena.env.spec.agents.index(agent)  # what is found does not depend on which others are asked for
        # Verdicts of different agents are to be independent, see the class.
        apart = index if self.payoff == "satisfaction" else 0
        select_seed, report_seed = self.derived_seed(0, apart), self.derived_seed(1, apart)
        budget = self.budget
        baseline = arena.baseline(budget.select_episodes, select_seed)[agent]
        candidates = search.candidates(agent, index, bar)
        bar.set_description(f"judging the responses of {agent}")
        payoffs = [arena.play(agent, c.policy, budget.select_episodes, select_seed) for c in candidates]
        chosen = select_response(np.array(payoffs), baseline)
        on_policy = arena.baseline(budget.report_episodes, report_seed)[agent]
        if chosen is None:
            return _Arm(agent=agent, on_policy=on_policy, deviating=on_policy, snapshot=None)
        response = candidates[chosen]
        deviating = arena.play(agent, response.policy, budget.report_episodes, report_seed)
        return _Arm(agent=agent, on_policy=on_policy, deviating=deviating, snapshot=response.snapshot)

    def derived_seed(self, *path: int) -> int:
        """Returns a seed of environments for some purpose, far from all others."""
        return int(np.random.SeedSequence([self.seed, *path]).generate_state(1)[0]) % 2**31

    def _result(self, arms: Sequence[_Arm], *, env_steps: int, wall_seconds: float) -> NashConvResult:
        verdicts = self.payoff == "satisfaction"
        bounds = (0.0, 1.0) if verdicts else self.payoff_bounds
        gains = {arm.agent: float(arm.gains.mean()) for arm in arms}
        gain_intervals = {arm.agent: self._gain_interval(arm) for arm in arms}
        value = sum(gains.values())
        if verdicts:
            interval = sum_interval(list(gains.values()), list(gain_intervals.values()))
        elif any(arm.deviates for arm in arms):
            interval = mean_interval(
                np.sum([arm.gains for arm in arms], axis=0), bounds=_wider(bounds, len(arms)), level=self.level
            )
        else:
            interval = (value, value)
        reports = (len(arms) if verdicts else 1) + sum(arm.deviates for arm in arms)
        return NashConvResult(
            value=value,
            gains=gains,
            on_policy={arm.agent: float(arm.on_policy.mean()) for arm in arms},
            best_response_values={arm.agent: float(arm.deviating.mean()) for arm in arms},
            bound="lower",
            interval=interval,
            episodes=reports * self.budget.report_episodes,
            snapshots={arm.agent: arm.snapshot for arm in arms if arm.snapshot is not None},
            wall_seconds=wall_seconds,
            env_steps=env_steps,
            payoff_range=None if bounds is None else bounds[1] - bounds[0],
            gain_intervals=gain_intervals,
            on_policy_intervals={arm.agent: self._payoff_interval(arm.on_policy) for arm in arms},
            best_response_intervals={arm.agent: self._payoff_interval(arm.deviating) for arm in arms},
        )

    def _gain_interval(self, arm: _Arm) -> Interval:
        if not arm.deviates:
            return (0.0, 0.0)
        if self.payoff == "satisfaction":
            n = len(arm.gains)
            return newcombe_interval(int(arm.deviating.sum()), n, int(arm.on_policy.sum()), n, level=self.level)
        return mean_interval(arm.gains, bounds=_wider(self.payoff_bounds, 1), level=self.level)

    def _payoff_interval(self, payoffs: np.ndarray) -> Interval:
        if self.payoff == "satisfaction":
            return wilson_interval(int(payoffs.sum()), len(payoffs), level=self.level)
        return mean_interval(payoffs, bounds=self.payoff_bounds, level=self.level)

    def _check_arguments(self) -> None:
        if self.start != "fresh" and self.warm_start is None:
            raise ValueError(
                f"start={self.start!r} needs warm_start: the module that was trained, or its snapshot, since a policy "
                "alone has no critics or target networks"
            )
        if self.start == "fresh" and self.warm_start is not None:
            raise ValueError("warm_start has no meaning with start='fresh': set start to 'warm' or 'both'")
        bounds = self.payoff_bounds
        if bounds is not None and self.payoff == "satisfaction":
            raise ValueError("payoff_bounds of satisfaction are 0 and 1: leave them out")
        if bounds is not None and not (math.isfinite(bounds[0]) and math.isfinite(bounds[1]) and bounds[0] < bounds[1]):
            raise ValueError(f"payoff_bounds must be the smallest and the largest payoff of an episode, got {bounds}")
        try:
            self._payoff_interval(np.zeros(self.budget.report_episodes) + (bounds[0] if bounds else 0.0))
        except ValueError as error:
            raise ValueError(
                f"report_episodes={self.budget.report_episodes} are too few for an interval: {error}"
            ) from error

    def check(self, profile: Any, game: Any) -> tuple[str, ...]:
        """Returns the agents whose responses are looked for; raises, without playing, if there can be none.

        Arguments and errors are those of :meth:`evaluate`.
        """
        check_acting(profile)
        if not isinstance(game, VectorEnv):
            hint = (
                "wrap it: SyncVectorEnv(factory=..., num_envs=1, seed=0)"
                if isinstance(game, MultiAgentEnv)
                else "make one with make_vector_env"
            )
            raise TypeError(f"best responses are learned in a VectorEnv, got a {type(game).__name__}: {hint}")
        spec = game.spec
        wanted = spec.agents if self.agents is None else tuple(self.agents)
        if unknown := [name for name in wanted if name not in spec.agents]:
            raise ValueError(
                f"agents has {unknown}, but the agents of {spec.name} are {list(spec.agents)}"
                f"{nearest(unknown[0], spec.agents)}"
            )
        if not wanted:
            raise ValueError(f"agents is empty: name some of {list(spec.agents)}, or leave it out")
        names = tuple(agent for agent in spec.agents if agent in wanted)
        if self.payoff == "satisfaction":
            missing = [agent for agent in names if f"satisfied/{agent}" not in spec.info_keys]
            if missing:
                raise ValueError(
                    f"payoff='satisfaction' needs a verdict on each agent, but {spec.name} has none on {missing}: wrap "
                    "the game in MonitorParallelEnv, or set payoff='return'"
                )
        if self.learner == "iql":
            for name, group in spec.groups.items():
                if set(names) & set(group.agents) and (not group.is_discrete or group.action_shape):
                    raise ValueError(
                        f"learner='iql' needs Discrete actions, but those of {name!r} in {spec.name} are "
                        f"{group.action_space}: set learner='ippo'"
                    )
        return names


def approximate_nashconv_bernoulli_iql(
    profile: Policy | Mapping[str, AgentState],
    game: VectorEnv,
    *,
    br_train_iters: int = 100,
    br_batch_steps: int = 128,
    episodes: int = 1_000,
    config: Mapping[str, Any] | None = None,
    agents: str | Collection[str] | None = None,
    mode: Mode = "greedy",
    seed: int = 0,
) -> NashConvResult:
    """Estimates from below by how much agents could raise the probabilities that their monitors are satisfied.

    The payoff of an episode is a Bernoulli variable, the verdict on the agent's task. Responders are learned by IQL
    from the beginning, with one instance and batches of one sequence, while the others act greedily:
    :class:`LearnedEvaluator` with ``preset="seed"`` and ``payoff="satisfaction"``, which also has better budgets.

    Args:
        profile: a policy; or ``train_states`` of :func:`~marl_lightning.trainers.make_train`, trained by IQL.
        game: an environment whose agents have monitors.
        br_train_iters: rollouts that a responder learns from.
        br_batch_steps: env steps of a rollout.
        episodes: for each estimate of a probability; 738 are off by more than 0.05 in one of 20 cases at most.
        config: of ``make_train``; needed with ``train_states``.
        agents: whose gains are estimated; by default all.
        mode: how the profile plays.
        seed: of everything.

    Raises:
        ValueError: if ``train_states`` come without a configuration, or as for :class:`LearnedEvaluator`.
    """
    evaluator = LearnedEvaluator(
        preset="seed",
        payoff="satisfaction",
        env_steps=br_train_iters * br_batch_steps,
        rollout_length=br_batch_steps,
        select_episodes=episodes,
        report_episodes=episodes,
        agents=agents,
        seed=seed,
    )
    policy = _policy_of(profile, game.spec, config) if isinstance(profile, Mapping) else profile
    return evaluator.evaluate(policy, game, mode=mode)


def select_response(payoffs: np.ndarray, baseline: np.ndarray) -> int | None:
    """Returns which candidate gains most on average, ``None`` if none gains anything: then it is best not to deviate.

    The mean of the chosen one in these episodes is biased upwards, since it was chosen for it: estimate its payoff from
    other episodes.

    Args:
        payoffs: ``[K, n]`` of ``K`` candidates in ``n`` episodes.
        baseline: ``[n]`` without deviation, in the same episodes.
    """
    gains = (payoffs - baseline).mean(axis=1)
    best = int(gains.argmax())
    return best if gains[best] > 0 else None


# What is played -------------------------------------------------------------------------------------------------------


class PayoffReward(Wrapper):
    """Rewards whose undiscounted sum over an episode is the payoff. Mean returns of all agents are not in ``info``.

    Args:
        env: the game.
        payoff: see :class:`LearnedEvaluator`. Of ``"satisfaction"``, agents without a monitor get 0.
        gamma: discount of ``"discounted"``.

    Attributes:
        env_steps: env steps that were made.
    """

    def __init__(self, env: VectorEnv, *, payoff: Payoff, gamma: float) -> None:
        keys = tuple(key for key in env.spec.info_keys if key.partition("/")[0] != RETURN)
        # A verdict is on the dead as on the living, which is what learning is told by shared_reward.
        shared = env.spec.shared_reward or payoff == "satisfaction"
        super().__init__(env, spec=replace(env.spec, info_keys=keys, shared_reward=shared), changes=("reward",))
        self.payoff = payoff
        self.gamma = gamma
        self.env_steps = 0
        self._discount = np.ones(self._num_instances())

    def _on_reset(self, source: Observations[np.ndarray], result: Observations[np.ndarray], rows: Rows) -> None:
        self._discount[rows] = 1.0

    def _on_step(self, batch: Batch) -> None:
        self.env_steps += self._num_instances()
        ended = batch.ended()
        for name, group in self.spec.groups.items():
            reward = batch.result.reward[name]
            if self.payoff == "satisfaction":
                reward[:] = 0.0
                for i, agent in enumerate(group.agents):
                    if f"satisfied/{agent}" in batch.source.info:
                        reward[:, i] = batch.source.info[f"satisfied/{agent}"] * ended
            else:
                np.multiply(batch.source.reward[name], self._discount[:, None], out=reward, casting="same_kind")
        if self.payoff == "discounted":
            self._discount *= self.gamma
            self._discount[ended] = 1.0

    def _memory(self) -> dict[str, np.ndarray]:
        return {**super()._memory(), "discount": self._discount}


@dataclass(frozen=True, kw_only=True)
class _Arm:
    """Payoffs ``[n]`` of an agent in the episodes that are reported, without and with its deviation."""

    agent: str
    on_policy: np.ndarray
    deviating: np.ndarray
    snapshot: AgentState | None

    @property
    def deviates(self) -> bool:
        return self.snapshot is not None

    @property
    def gains(self) -> np.ndarray:
        return self.deviating - self.on_policy


class _Arena:
    """A replica of the game in which profile and responders are judged. Equal seeds give equal chances."""

    def __init__(self, settings: LearnedEvaluator, profile: Policy, game: VectorEnv, mode: Mode):
        budget = settings.budget
        self._settings, self._profile, self._deterministic = settings, profile, mode == "greedy"
        num_envs = min(_EVALUATION_ENVS, max(budget.select_episodes, budget.report_episodes))
        inside = game.replicate(num_envs=num_envs, seed=settings.seed)
        self.env = PayoffReward(inside, payoff=settings.payoff, gamma=settings.gamma)
        self._baselines: dict[tuple[int, int], dict[str, np.ndarray]] = {}

    @property
    def env_steps(self) -> int:
        return self.env.env_steps

    def only(self, agent: str) -> Opponents:
        """Returns the game of one agent, inside of which is this arena."""
        return Opponents(self.env, self._profile, agents=agent, deterministic=self._deterministic)

    def baseline(self, episodes: int, seed: int) -> dict[str, np.ndarray]:
        """Returns the payoffs ``[n]`` of all agents if nobody deviates."""
        key = (episodes, seed)
        if key not in self._baselines:
            self._baselines[key] = self._play(self.env, self._profile, episodes, seed, self._deterministic)
        return self._baselines[key]

    def play(self, agent: str, response: Policy, episodes: int, seed: int) -> np.ndarray:
        """Returns the payoffs ``[n]`` of an agent that deviates."""
        return self._play(self.only(agent), response, episodes, seed, True)[agent]

    def close(self) -> None:
        self.env.close()

    def _play(
        self, env: VectorEnv, policy: Policy, episodes: int, seed: int, deterministic: bool
    ) -> dict[str, np.ndarray]:
        payoffs = evaluate(policy, env, episodes=episodes, deterministic=deterministic, seed=seed).agent_returns
        if (bounds := self._settings.payoff_bounds) is not None:
            for agent, values in payoffs.items():
                if values.min() < bounds[0] or values.max() > bounds[1]:
                    raise ValueError(
                        f"payoff_bounds={bounds}, but {agent!r} got from {values.min()} to {values.max()} in an "
                        "episode: widen them, or leave them out"
                    )
        return payoffs


# What is learned ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    """A responder as it was at some moment of its training."""

    policy: Policy
    snapshot: AgentState


class _Search:
    """Trains responders.

    Attributes:
        env_steps: env steps that were learned from.
    """

    def __init__(self, settings: LearnedEvaluator, profile: Policy, game: VectorEnv, mode: Mode):
        self._settings, self._profile, self._game = settings, profile, game
        self._deterministic = mode == "greedy"
        self._starts = {"fresh": (False,), "warm": (True,), "both": (False, True)}[settings.start]
        recurrent = settings.recurrent
        if recurrent is None:
            recurrent = bool(profile.initial_state(1))
        self._network: dict[str, Any] = {"hidden_sizes": settings.hidden_sizes, "recurrent": recurrent}
        self._states: Mapping[str, AgentState] = {}
        if isinstance(settings.warm_start, MARLModule):
            with _naming("warm_start"):
                self._states = snapshot(settings.warm_start)
            names = ("hidden_sizes", "recurrent", "activation", "layer_norm")
            self._network = {name: settings.warm_start.hparams[name] for name in names}
        elif settings.warm_start is not None:
            self._states = settings.warm_start
        self.env_steps = 0

    @property
    def trainings(self) -> int:
        """Number of trainings for each agent."""
        return len(self._starts) * self._settings.budget.restarts

    def check(self, arena: _Arena, names: Sequence[str]) -> None:
        """Raises what would only be noticed after some trainings."""
        env = arena.env
        joint_actions(
            self._profile,
            env.reset(seed=0),
            self._profile.initial_state(env.num_envs),
            torch.ones(env.num_envs, dtype=torch.bool),
            spec=env.spec,
            deterministic=self._deterministic,
            generator=torch.Generator(device_of(self._profile)),
        )
        for agent in names if True in self._starts else ():
            self._module(arena.only(agent).spec, agent, warm=True)

    def candidates(self, agent: str, index: int, bar: tqdm) -> list[_Candidate]:
        """Returns what all trainings of an agent's responders came to."""
        found = []
        for warm in self._starts:
            for restart in range(self._settings.budget.restarts):
                bar.set_description(f"responses of {agent}")
                found += self._train(agent, self._settings.derived_seed(2, index, int(warm), restart), bar, warm=warm)
        return found

    def _train(self, agent: str, seed: int, bar: tqdm, *, warm: bool) -> list[_Candidate]:
        settings, budget = self._settings, self._settings.budget
        game = self._game.replicate(num_envs=budget.num_envs, seed=seed)
        if settings.payoff == "satisfaction":
            game = PayoffReward(game, payoff=settings.payoff, gamma=settings.gamma)
        with Opponents(game, self._profile, agents=agent, deterministic=self._deterministic) as env:
            torch.manual_seed(seed)
            module = self._module(env.spec, agent, warm=warm)
            datamodule, callbacks = self._data(env, module)
            keeper = _Keeper(agent=agent, budget=budget, bar=bar)
            callbacks += [keeper, StopAtEnvSteps(budget.env_steps)]
            _fit(module, datamodule, callbacks, device=device_of(self._profile))
        self.env_steps += module.env_steps
        return keeper.candidates

    def _module(self, spec: EnvSpec, agent: str, *, warm: bool) -> MARLModule:
        settings = self._settings
        shared = {
            "spec": spec,
            "share_parameters": True,  # it is alone, so that its weights are those of one row of several agents
            "learning_rate": settings.learning_rate,
            "gamma": settings.gamma,
            **self._network,
        }
        if settings.learner == "iql":
            module = IQL(
                **shared,
                team_reward=None,
                target_update_interval=100,
                log_every_env_steps=max(1, settings.budget.env_steps // 10),
            )
        else:
            module = IPPO(
                **{"activation": "tanh", "layer_norm": False, **shared},
                chunk_length=self._rollout_length,
                team_reward=None,
                learning_rate_decay_env_steps=settings.budget.env_steps,
                num_epochs=4,
                num_minibatches=min(4, settings.budget.num_envs),
                huber_delta=None,
                normalise_value=False,  # its statistics are no part of a snapshot
            )
        if warm:
            with _naming("warm_start"):
                own = {name: state for name, state in self._states.items() if name == agent}
                like = snapshot(module)[agent]
                load_snapshot(module, {name: _as_row(state, like) for name, state in own.items()})
        return module

    @property
    def _rollout_length(self) -> int:
        """Vector steps of a rollout of IPPO."""
        return max(_IPPO_ROLLOUT, self._settings.budget.rollout_length)

    def _data(self, env: VectorEnv, module: MARLModule) -> tuple[LightningDataModule, list[Callback]]:
        budget = self._settings.budget
        if isinstance(module, IPPO):
            return RolloutDataModule(env=env, rollout_length=self._rollout_length), []
        length = min(_LENGTH, env.spec.episode_limit or _LENGTH) if module.is_recurrent else 1
        step = budget.num_envs * budget.rollout_length
        datamodule = ReplayDataModule(
            env=env,
            capacity=max(min(budget.env_steps, _MOST_RECORDS), step, 3 * length * budget.num_envs),
            batch_size=max(1, budget.batch_size // length),
            rollout_length=budget.rollout_length,
            sequence_length=length,
            start_training=round(budget.warmup * budget.env_steps),
            training_frequency=step,
            num_updates=budget.updates,
            updates_per_batch=max(1, min(32, budget.env_steps // (50 * step))) * budget.updates,
        )
        return datamodule, [EpsilonSchedule(start=1.0, end=0.05, anneal_env_steps=budget.env_steps // 2)]


class _Keeper(Callback):
    """Keeps what a training came to, now and then and at its end, and moves the progress bar."""

    def __init__(self, *, agent: str, budget: Budget, bar: tqdm):
        self.candidates: list[_Candidate] = []
        self._agent = agent
        self._interval = EnvStepInterval(math.ceil(budget.env_steps / budget.checkpoints))
        self._total = budget.env_steps
        self._bar = bar
        self._shown = 0
        self._kept_at = 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: MARLModule, *_: object) -> None:
        made = min(pl_module.env_steps, self._total)  # the last rollout may go beyond it
        self._bar.update(made - self._shown)
        self._shown = made
        if self._interval.crossed(pl_module.env_steps):
            self._keep(pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: MARLModule) -> None:
        if self._kept_at != pl_module.env_steps:
            self._keep(pl_module)

    def _keep(self, module: MARLModule) -> None:
        policy = copy.deepcopy(module.policy).requires_grad_(False)
        self.candidates.append(_Candidate(policy=policy, snapshot=snapshot(module)[self._agent]))
        self._kept_at = module.env_steps


class _Interruption(Callback):
    """Remembers what ended a training, since Lightning makes a ``SystemExit`` of Ctrl-C."""

    exception: BaseException | None = None

    def on_exception(self, trainer: Trainer, pl_module: MARLModule, exception: BaseException) -> None:
        self.exception = exception


def _fit(
    module: MARLModule, datamodule: LightningDataModule, callbacks: Sequence[Callback], *, device: torch.device
) -> None:
    """Trains in this process alone, whatever processes there are around it."""
    interruption = _Interruption()
    trainer = Trainer(
        accelerator="cpu" if device.type == "cpu" else "gpu",
        devices=1 if device.index is None else [device.index],
        plugins=[LightningEnvironment()],  # that of SLURM would requeue the job
        max_epochs=-1,
        logger=False,
        callbacks=[*callbacks, interruption],
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(module, datamodule=datamodule)
    except SystemExit:
        if isinstance(interruption.exception, KeyboardInterrupt):
            raise interruption.exception from None
        raise


def _as_row(state: AgentState, like: AgentState) -> AgentState:
    """Returns the weights of an agent as one row of a stack, also if it was the only agent of its group."""
    return {
        part: {
            name: value[0] if name in like[part] and value.shape == (1, *like[part][name].shape) else value
            for name, value in weights.items()
        }
        if part in like
        else weights
        for part, weights in state.items()
    }


def _policy_of(states: Mapping[str, AgentState], spec: EnvSpec, config: Mapping[str, Any] | None) -> Policy:
    if config is None:
        raise ValueError("train_states do not say what networks they are of: give the config of make_train too")
    settings = validate_iql_config(config)
    module = IQL(
        spec=spec,
        hidden_sizes=settings.hidden_sizes,
        recurrent=settings.network_kind == "rnn",
        share_parameters=False,
        team_reward=None,
    )
    load_snapshot(module, states)
    return module.policy


# What is left alone ---------------------------------------------------------------------------------------------------


@contextmanager
def _no_trace(device: torch.device) -> Iterator[None]:
    """Puts back global random states and signal handlers, and hides what Lightning tells of each training."""
    quiet_lightning()
    told = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    level = told.level
    random_states = rng_state(device)
    with _kept_signal_handlers(), torch.inference_mode(False), torch.enable_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        told.setLevel(logging.WARNING)
        try:
            yield
        finally:
            told.setLevel(level)
            set_rng_state(random_states, device)


@contextmanager
def _kept_signal_handlers() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            if handler is not None:
                signal.signal(signum, handler)


@contextmanager
def _naming(argument: str) -> Iterator[None]:
    """Says which argument an error is about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{argument}: {error}") from error


def _progress_bar(total: int, *, enabled: bool) -> tqdm:
    return tqdm(
        total=total,
        unit=" env steps",
        unit_scale=True,
        dynamic_ncols=True,
        leave=False,
        file=sys.stderr,
        disable=None if enabled else True,  # None: where it is no terminal
    )


def _wider(bounds: Interval | None, count: int) -> Interval | None:
    """Returns the bounds of the sum of so many differences of payoffs."""
    if bounds is None:
        return None
    width = count * (bounds[1] - bounds[0])
    return (-width, width)
