"""Value-based methods: act by the values of actions, learn them from a replay by temporal differences."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor, nn

from marl_lightning.algorithms.actor_critic import flatten_observation, initial_states
from marl_lightning.algorithms.base import MARLModule, check_finite
from marl_lightning.algorithms.freezing import FrozenAgents, Opponents
from marl_lightning.clock import EnvStepInterval, Schedule
from marl_lightning.data import schema
from marl_lightning.data.episodes import episode_metrics
from marl_lightning.data.replay import ReplayBatch, ReplayDataModule, ReplayStream
from marl_lightning.data.schema import RecurrentState, Rollout
from marl_lightning.envs.base import Observations
from marl_lightning.envs.spec import EnvSpec, GroupSpec
from marl_lightning.losses.td import greedy_action, n_step_target, take, td_lambda_target, td_loss
from marl_lightning.nn.body import Body, with_agent_id
from marl_lightning.nn.heads import choose
from marl_lightning.nn.linear import AgentLinear
from marl_lightning.nn.mixers import one_hot
from marl_lightning.nn.statistics import weighted_mean, weighted_moments
from marl_lightning.validation import Fraction, PositiveFloat, PositiveInt, checked, own_arguments


class QNetwork(nn.Module):
    """Values of the actions of one group's agents.

    With shared parameters and more than one agent, the agent's index is appended to its observation. Values start at
    about 0.

    Args:
        group: the group; its actions are discrete.
        share_parameters: one network for all agents, or one each.
        **body: ``hidden_sizes``, ``recurrent``, ``activation`` and ``layer_norm`` of the body, see
            :class:`~marl_lightning.nn.body.Body`.
    """

    def __init__(self, *, group: GroupSpec, share_parameters: bool, **body: Any):
        super().__init__()
        self.num_agents = group.num_agents
        self.append_id = share_parameters and group.num_agents > 1
        self.observation_dims = len(group.observation_shape)
        stack = None if share_parameters else group.num_agents
        in_features = group.observation_size + (group.num_agents if self.append_id else 0)
        self.body = Body(in_features=in_features, num_agents=stack, **body)
        self.head = AgentLinear(
            in_features=self.body.out_features, out_features=group.action_size, num_agents=stack, gain=0.01
        )

    def inputs(self, observation: Tensor) -> Tensor:
        """Returns what the network reads, ``[..., A, F]``, from observations ``[..., A, *obs]``."""
        x = flatten_observation(observation, self.observation_dims)
        return with_agent_id(x, self.num_agents) if self.append_id else x

    def initial_state(self, num_sequences: int) -> Tensor:
        """Returns zeros ``[N, A, H]``."""
        return self.head.weight.new_zeros(num_sequences, self.num_agents, self.body.state_size)

    def forward(self, inputs: Tensor, state: Tensor, is_first: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns values ``[T, N, A, n]``, features, and recurrent states ``[T, N, A, H]``; see ``Body.forward``."""
        features, states = self.body(inputs, state, is_first)
        return self.head(features).float(), features, states


class QPolicy(nn.ModuleDict):
    """The value networks of all groups, acting: implements :class:`~marl_lightning.algorithms.base.StochasticPolicy`.

    Explores by chance, independently for every instance and agent, and only by legal actions.

    Attributes:
        rate: with ``kind="epsilon"``, the probability of an action drawn uniformly from the legal ones; with
            ``kind="boltzmann"``, the temperature of ``softmax(Q / rate)``.
        kind: how to explore.
        schedule: the rate by env steps.
        opponents: agents that do not learn and act in another way, ``None`` if there are none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kind: Literal["epsilon", "boltzmann"] = "epsilon"
        self.schedule: Callable[[int], float] = Schedule()
        self.rate = 1.0
        self.opponents: Opponents | None = None

    def explore_at(self, env_steps: int) -> None:
        """Sets the rate to that of the schedule."""
        self.rate = self.schedule(env_steps)

    def initial_state(self, num_envs: int) -> RecurrentState:
        """Returns zeros; see :class:`~marl_lightning.algorithms.base.Policy`."""
        return initial_states("q", self, {name: network.num_agents for name, network in self.items()}, num_envs)

    def act(
        self,
        observations: Observations[Tensor],
        state: RecurrentState,
        is_first: Tensor,
        *,
        deterministic: bool = False,
        generator: torch.Generator | None = None,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], RecurrentState]:
        """See :class:`~marl_lightning.algorithms.base.Policy`. Log-probabilities are not computed: they are zero."""
        values, next_state = self.action_values(observations, state, is_first)
        masks = observations.action_mask
        actions = {
            name: greedy_action(value, masks.get(name))
            if deterministic
            else self._explore(value, masks.get(name), generator)
            for name, value in values.items()
        }
        if self.opponents is not None and not deterministic:
            for name, value in values.items():
                theirs = explore(value, masks.get(name), generator=generator, **self.opponents.exploration)
                actions[name] = torch.where(self.opponents.frozen.of(name), theirs, actions[name])
        return actions, {name: torch.zeros_like(value[..., 0]) for name, value in values.items()}, next_state

    def action_probabilities(
        self,
        observations: Observations[Tensor],
        state: RecurrentState,
        is_first: Tensor,
        *,
        deterministic: bool = False,
    ) -> tuple[dict[str, Tensor], RecurrentState]:
        """See :class:`~marl_lightning.algorithms.base.StochasticPolicy`; explores at the present rate."""
        values, next_state = self.action_values(observations, state, is_first)
        masks, result = observations.action_mask, {}
        for name, value in values.items():
            rate = {"kind": "epsilon", "rate": 0.0} if deterministic else {"kind": self.kind, "rate": self.rate}
            result[name] = exploration_probabilities(value, masks.get(name), **rate)
            if self.opponents is not None and not deterministic:
                theirs = exploration_probabilities(value, masks.get(name), **self.opponents.exploration)
                result[name] = torch.where(self.opponents.frozen.of(name).unsqueeze(-1), theirs, result[name])
        return result, next_state

    def action_values(
        self, observations: Observations[Tensor], state: RecurrentState, is_first: Tensor
    ) -> tuple[dict[str, Tensor], RecurrentState]:
        """Returns per group the values ``[E, A, n]``, and the next recurrent state."""
        values, next_state = {}, dict(state)
        for name, network in self.items():
            key, inputs = f"q/{name}", network.inputs(observations.observation[name])
            value, _, states = network(inputs.unsqueeze(0), state.get(key), is_first.unsqueeze(0))
            values[name] = value[0]
            if key in state:
                next_state[key] = states[0]
        return values, next_state

    def env_actions(self, actions: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Actions are indices already."""
        return dict(actions)

    def _explore(self, value: Tensor, mask: Tensor | None, generator: torch.Generator | None) -> Tensor:
        return explore(value, mask, kind=self.kind, rate=self.rate, generator=generator)


def explore(
    value: Tensor,
    mask: Tensor | None,
    *,
    kind: Literal["epsilon", "boltzmann"],
    rate: float,
    generator: torch.Generator | None,
) -> Tensor:
    """Returns legal actions ``[...]`` for values ``[..., n]``, drawn as :class:`QPolicy` says."""
    if kind == "boltzmann":
        logits = value / max(rate, 1e-8)
        logits = logits if mask is None else logits.masked_fill(~mask, -torch.inf)
        return choose(logits, deterministic=False, generator=generator)
    *agents, actions = value.shape
    draw = torch.rand(*agents, actions + 1, device=value.device, generator=generator)
    # The legal action with the largest of equally distributed numbers is any of them, equally likely.
    by_chance = greedy_action(draw[..., :actions], mask)
    return torch.where(draw[..., actions] < rate, by_chance, greedy_action(value, mask))


def exploration_probabilities(
    value: Tensor, mask: Tensor | None, *, kind: Literal["epsilon", "boltzmann"], rate: float
) -> Tensor:
    """Returns the probabilities ``[..., n]`` of what :func:`explore` draws; exactly 0 where illegal."""
    legal = torch.ones_like(value, dtype=torch.bool) if mask is None else mask
    if kind == "boltzmann":
        return (value / max(rate, 1e-8)).masked_fill(~legal, -torch.inf).softmax(-1)
    greedy = one_hot(greedy_action(value, mask), value.shape[-1])
    return rate * legal / legal.sum(-1, keepdim=True) + (1 - rate) * greedy


@dataclass(slots=True, kw_only=True)
class AgentValues:
    """What the networks of all groups say of the ``L`` steps of a batch that are learned from, by group.

    Attributes:
        value: ``[L, N, A, n]`` of the actions at each step.
        features: ``[L, N, A, F]`` behind these values.
        next_value: ``[L, N, A, n]`` of the actions in the true successor, without gradient.
        next_features: ``[L, N, A, F]`` behind those.
    """

    value: dict[str, Tensor]
    features: dict[str, Tensor]
    next_value: dict[str, Tensor]
    next_features: dict[str, Tensor]


class RewardScale(nn.Module):
    """Divides rewards by their running standard deviation; never centres, which would change the task."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("moments", torch.zeros(3, dtype=torch.float64))  # weight, mean, sum of squared deviations

    def update(self, reward: Tensor, weight: Tensor, reduce_sum: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        """Takes in rewards of any shape, each with a weight of 0 or 1, of all processes."""
        new_weight, new_mean, new_variance = weighted_moments(reward.double(), weight.double(), reduce_sum)
        old_weight, old_mean, old_squares = self.moments
        total, step = old_weight + new_weight, new_mean - old_mean
        share = new_weight / total.clamp(min=1)
        squares = old_squares + new_weight * new_variance + step.square() * old_weight * share
        self.moments = torch.stack((total, old_mean + step * share, squares))

    def forward(self, reward: Tensor) -> Tensor:
        """Returns the rewards, scaled once their deviation is known."""
        deviation = (self.moments[2] / self.moments[0].clamp(min=1)).sqrt()
        return torch.where(deviation > 1e-6, reward / deviation.clamp(min=1e-6), reward.double()).float()


class QLearningModule(MARLModule):
    """Deep Q-learning for teams (Mnih et al. 2015; Tan 1993), the base of its family.

    Every agent has values of its own actions and acts greedily by them; a member of the family says how they make up
    the value of the team. Successors are bootstrapped unless the game was over, the best action in them is the best
    *legal* one, chosen by the learning network and valued by the target network (van Hasselt et al. 2016).

    Without a joint value, agents that are not alive do not count, and being dead is worth 0, unless rewards are shared:
    then the dead are paid like the others, and what that is worth has to be learned. If such agents do not share
    parameters either, they learn as if each were alone: losses are averaged and gradients clipped for each of them.

    Args:
        spec: the environment's spec; found in the data module if not given.
        hidden_sizes: widths of the hidden layers.
        activation: of the hidden layers.
        layer_norm: normalise the inputs and the output of every hidden layer.
        recurrent: put a GRU of width ``hidden_sizes[-1]`` behind the hidden layers.
        share_parameters: one network for the agents of a group, told apart by their index, or one each.
        double_q: choose the next action by the learning network.
        team_reward: how the rewards of all agents become one that all learn from; in a sum, a reward that the agents of
            a group share counts once. ``None`` keeps their own, which only methods without a joint value can use.
        learning_rate: of Adam.
        adam_eps: epsilon of Adam.
        gamma: discount per env step.
        n_steps: rewards that are summed before bootstrapping, as far as they are in the same sequence.
        td_lambda: mix targets of all lengths instead, see :func:`~marl_lightning.losses.td.td_lambda_target`.
        huber_delta: error above which the loss is linear; ``None`` is the squared error.
        max_grad_norm: limit of the norm of the gradient; ``None`` does not clip.
        target_update_interval: updates after which the target network becomes a copy of the learning one.
        target_update_rate: instead, in every update, the target network moves this far towards it.
        scale_reward: divide rewards by their running standard deviation.
        time_limit_as_terminal: learn as if the game were over at the time limit, as some libraries do. For
            comparisons only.
        log_every_env_steps: interval of metrics.

    Raises:
        ValueError: if two settings exclude each other, or a group's actions are not ``Discrete``.
    """

    learns_from = ReplayDataModule

    @checked
    def __init__(
        self,
        *,
        spec: EnvSpec | None = None,
        hidden_sizes: Annotated[Sequence[PositiveInt], Field(min_length=1)] = (64,),
        activation: Literal["relu", "tanh"] = "relu",
        layer_norm: bool = False,
        recurrent: bool = False,
        share_parameters: bool = True,
        double_q: bool = True,
        team_reward: Literal["sum", "mean", "first"] | None = "sum",
        learning_rate: PositiveFloat = 5e-4,
        adam_eps: PositiveFloat = 1e-5,
        gamma: Fraction = 0.99,
        n_steps: PositiveInt = 1,
        td_lambda: Fraction | None = None,
        huber_delta: PositiveFloat | None = None,
        max_grad_norm: PositiveFloat | None = 10.0,
        target_update_interval: PositiveInt = 200,
        target_update_rate: Annotated[float, Field(gt=0, le=1)] | None = None,
        scale_reward: bool = False,
        time_limit_as_terminal: bool = False,
        log_every_env_steps: PositiveInt = 1000,
    ):
        if td_lambda is not None and n_steps > 1:
            raise ValueError(f"give n_steps={n_steps} or td_lambda={td_lambda}, not both")
        if self.is_joint and team_reward is None:
            raise ValueError(
                f"{type(self).__name__} learns one value for the team: set team_reward to 'sum', 'mean' or 'first'"
            )
        super().__init__()
        self.save_hyperparameters(ignore=["spec"])
        self.hparams.update(own_arguments(self))
        self._log_interval = EnvStepInterval(log_every_env_steps)
        self._episodes: list[dict[str, np.ndarray]] = []
        self.frozen: FrozenAgents | None = None
        if spec is not None:
            self.use_spec(spec)

    # What members override -------------------------------------------------------------------------------------------

    is_joint = False
    """Whether there is one value for the team; otherwise every agent learns its own."""

    keep_states: tuple[str, ...] = ()
    """Names of entries of the policy's recurrent state that :meth:`on_collected` needs as of after every step."""

    def build_mixer(self, spec: EnvSpec) -> nn.Module | None:
        """Returns what makes a joint value of the agents' values ``[..., A]`` and the state; ``None`` without one."""
        return None

    def mix(
        self,
        mixer: nn.Module | None,
        *,
        value: Mapping[str, Tensor],
        action: Mapping[str, Tensor],
        action_mask: Mapping[str, Tensor],
        state: Tensor,
    ) -> Tensor:
        """Returns the values ``[L, N, 1]`` of a joint action, or ``[L, N, A]`` of each agent's own without a mixer.

        Args:
            mixer: the learning or the target one.
            value: by group ``[L, N, A, n]``.
            action: by group ``[L, N, A]``.
            action_mask: by group ``[L, N, A, n]``.
            state: ``[L, N, S]``.
        """
        chosen = values_of(value, action)
        return chosen if mixer is None else mixer(chosen, state)

    def value(self, batch: ReplayBatch, online: AgentValues) -> Tensor:
        """Returns the values that are learned, of what was done: ``[L, N, 1]`` of the team or ``[L, N, A]``."""
        steps = batch.steps[batch.burn_in :]
        return self.mix(
            self.mixer,
            value=online.value,
            action=actions(steps, self.networks),
            action_mask=action_masks(steps),
            state=steps[schema.STATE],
        )

    def next_value(self, batch: ReplayBatch, online: AgentValues) -> Tensor:
        """Returns what the true successors are worth, in the shape of :meth:`value`; called without gradient."""
        following = batch.steps[batch.burn_in :][schema.NEXT]
        target = self.agent_values(self.target_networks, batch)
        mask = action_masks(following)
        return self.mix(
            self.target_mixer,
            value=target.next_value,
            action=best_actions((online if self.hparams.double_q else target).next_value, mask),
            action_mask=mask,
            state=following[schema.STATE],
        )

    # Networks -------------------------------------------------------------------------------------------------------

    def freeze(self, frozen: FrozenAgents, opponents: Opponents) -> None:
        """Stops the learning of some agents, for good, and sets how they act; called once the networks are there."""
        self.frozen, self.networks.opponents = frozen, opponents
        frozen.stop_learning(self.networks)

    def build_networks(self, spec: EnvSpec) -> QPolicy:
        """Returns the networks of all groups."""
        networks = QPolicy()
        for name, group in spec.groups.items():
            networks[name] = QNetwork(group=group, **self.network_arguments)
        return networks

    @property
    def network_arguments(self) -> dict[str, Any]:
        """The settings of every network."""
        names = ("hidden_sizes", "recurrent", "activation", "layer_norm", "share_parameters")
        return {name: self.hparams[name] for name in names}

    def build(self, spec: EnvSpec) -> None:
        hp = self.hparams
        check_discrete(type(self).__name__, spec)
        self.networks = self.build_networks(spec)
        self.mixer = self.build_mixer(spec)
        self.target_networks = frozen_copy(self.networks)
        self.target_mixer = None if self.mixer is None else frozen_copy(self.mixer)
        self.reward_scale = RewardScale() if hp.scale_reward else None
        self._count_the_dead = self.is_joint or spec.shared_reward or hp.team_reward is not None
        self._is_separate = not (self.is_joint or hp.share_parameters)
        if self._is_separate and hp.layer_norm and max(group.num_agents for group in spec.groups.values()) > 1:
            raise ValueError(
                "layer_norm=True has a scale and a shift that all agents share, which share_parameters=False excludes: "
                "set one of them differently"
            )

    @property
    def policy(self) -> QPolicy:
        return self.networks

    @property
    def is_recurrent(self) -> bool:
        """Whether the networks have memory."""
        return self.hparams.recurrent

    def learned_parameters(self) -> list[nn.Parameter]:
        """Returns what the optimiser steps."""
        return [p for p in self.parameters() if p.requires_grad]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        hp = self.hparams
        return torch.optim.Adam(self.learned_parameters(), lr=hp.learning_rate, eps=hp.adam_eps, fused=True)

    def check_sequences(self, length: int) -> None:
        """Called before training with the number of steps of every sequence that is drawn.

        Raises:
            ValueError: if targets reach over more steps than there are.
        """
        hp = self.hparams
        if hp.n_steps > length:
            raise ValueError(f"n_steps={hp.n_steps} needs a sequence_length of at least {hp.n_steps}, got {length}")
        if hp.td_lambda and length == 1:
            raise ValueError(f"td_lambda={hp.td_lambda} needs a sequence_length above 1, got {length}")

    # Collecting -----------------------------------------------------------------------------------------------------

    def prepare_collection(self) -> None:
        """Called before env steps are made: explores as much as is due."""
        self.networks.explore_at(self.env_steps)

    def on_collected(self, rollout: Rollout) -> None:
        """Called with new env steps, after they have been stored."""
        self.advance(rollout.env_steps)
        self._episodes.append(rollout.episodes)
        if self.reward_scale is not None:
            reward = self.reward(rollout.steps)
            weight = torch.ones_like(reward) if self._count_the_dead else self._alive(rollout.steps)
            self.reward_scale.update(reward, weight, self.reduce_sum)

    # Learning -------------------------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        if self.frozen is not None:  # those who are frozen now may have learned in the run that this one resumes
            self.frozen.clear_moments(self.networks, self.optimizers(use_pl_optimizer=False))

    def training_step(self, stream: ReplayStream, batch_idx: int) -> None:
        for batch in stream:
            self.update(batch)
        if self._log_interval.crossed(self.env_steps):
            episodes = {key: np.concatenate([e[key] for e in self._episodes]) for key in self._episodes[0]}
            self._episodes.clear()
            metrics = self.flush_metrics({"exploration": self.networks.rate} | episode_metrics(episodes))
            check_finite(metrics, env_steps=self.env_steps)

    def update(self, batch: ReplayBatch) -> None:
        """Makes one update with a batch."""
        hp = self.hparams
        loss, error, metrics = self.loss(batch)
        norm = self.optimise(loss, self.optimizers(), self.learned_parameters(), max_grad_norm=hp.max_grad_norm)
        batch.update_priorities(error)
        self.update_targets()
        self.record(metrics | {"loss": loss, "gradient_norm": norm})

    def clip_gradient(self, parameters: list[nn.Parameter], limit: float) -> Tensor:
        """See :class:`~marl_lightning.algorithms.base.MARLModule`; agents that share nothing are clipped separately."""
        if not self._is_separate:
            return super().clip_gradient(parameters, limit)
        if self.frozen is not None:
            self.frozen.clear_gradients(self.networks)
        learning = [network for network in self.networks.values() if next(network.parameters()).requires_grad]
        norms = [clip_each_agent(network, limit) for network in learning]
        own = {id(parameter) for parameter in self.networks.parameters()}
        if others := [parameter for parameter in parameters if id(parameter) not in own]:
            norms.append(super().clip_gradient(others, limit).unsqueeze(0))
        return torch.cat(norms).square().sum().sqrt()

    def loss(self, batch: ReplayBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Returns the loss, the errors ``[L, N]`` by which sequences are prioritised, and diagnostics."""
        online = self.agent_values(self.networks, batch)
        with torch.no_grad():
            goal = self.target(batch, self.next_value(batch, online))
        return self.temporal_difference(batch, self.value(batch, online), goal)

    def temporal_difference(
        self, batch: ReplayBatch, value: Tensor, goal: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Returns what :meth:`loss` returns, of values and what they are drawn to, both ``[L, N, 1 or A]``."""
        weight, error = self.weight(batch).expand_as(value), (value - goal).detach().abs()
        loss = self.td_loss(batch, value - goal)
        diagnostics = {"q_value": weighted_mean(value, weight), "td_error": weighted_mean(error, weight)}
        return loss, mean_over_agents(error, weight), diagnostics

    def td_loss(self, batch: ReplayBatch, error: Tensor, importance: Tensor | float = 1.0) -> Tensor:
        """Returns the mean loss of errors ``[L, N, 1 or A]`` where they count, by the importance of sequences.

        ``importance`` is that of single values, broadcastable.
        """
        return td_loss(
            error,
            self.weight(batch),
            importance=importance * batch.weight.unsqueeze(-1),
            huber_delta=self.hparams.huber_delta,
            separate=self._is_separate,
        )

    def target(self, batch: ReplayBatch, next_value: Tensor) -> Tensor:
        """Returns what the values are drawn to, ``[L, N, 1 or A]``, from those of the true successors."""
        hp, steps = self.hparams, batch.steps[batch.burn_in :]
        reward = self.reward(steps)
        if self.reward_scale is not None:
            reward = self.reward_scale(reward)
        terminated = steps[schema.NEXT, schema.TERMINATED]
        if hp.time_limit_as_terminal:
            terminated = terminated | steps[schema.NEXT, schema.TRUNCATED]
        if not self._count_the_dead:
            next_value = next_value * self._alive(steps[schema.NEXT])
        arguments = {
            "reward": reward,
            "next_value": next_value,
            "terminated": terminated.unsqueeze(-1),
            "done": last_steps(batch).unsqueeze(-1),
            "gamma": hp.gamma,
        }
        if hp.td_lambda is not None:
            return td_lambda_target(td_lambda=hp.td_lambda, **arguments)
        return n_step_target(steps=hp.n_steps, **arguments)

    def reward(self, steps: TensorDict) -> Tensor:
        """Returns the rewards that are learned from, ``[..., 1]`` of the team or ``[..., A]`` of each agent."""
        rewards = {name: steps[schema.NEXT, name, schema.REWARD] for name in self.networks}
        return joint_reward(rewards, self.hparams.team_reward, shared=self.spec.shared_reward)

    def weight(self, batch: ReplayBatch) -> Tensor:
        """Returns which values count, ``[L, N, 1]`` of the team or ``[L, N, A]`` of each agent, as 0 and 1."""
        steps, mask = batch.steps[batch.burn_in :], batch.mask[batch.burn_in :].unsqueeze(-1)
        if self.is_joint:
            return mask.float()
        if self._count_the_dead:
            weight = mask.float().expand(*mask.shape[:-1], self.spec.num_agents)
        else:
            weight = (mask & self._alive(steps)).float()
        return weight if self.frozen is None else weight * self.frozen.learns

    def _alive(self, steps: TensorDict) -> Tensor:
        return join({name: steps[name, schema.ALIVE] for name in self.networks})

    def agent_values(self, networks: QPolicy, batch: ReplayBatch) -> AgentValues:
        """Runs the networks over the sequences of a batch.

        The state at the start is rebuilt from the burn-in, with the present parameters and without gradient. The true
        successor of a step is valued from the state after that step, which is exact at the end of episodes too. Target
        networks without memory run over the successors only, as nothing else is asked of them.
        """
        present = self.is_recurrent or networks is not self.target_networks
        result = AgentValues(value={}, features={}, next_value={}, next_features={})
        burn_in, is_first = batch.burn_in, batch.steps[schema.IS_FIRST]
        for name, network in networks.items():
            after = network.inputs(batch.steps[schema.NEXT, name, schema.OBSERVATION][burn_in:])
            state = network.initial_state(after.shape[1])
            states = state.expand(len(after), *state.shape)
            if present:
                inputs = network.inputs(batch.steps[name, schema.OBSERVATION])
                if burn_in:
                    with torch.no_grad():
                        state = network(inputs[:burn_in], state, is_first[:burn_in])[2][-1]
                value, features, states = network(inputs[burn_in:], state, is_first[burn_in:])
                result.value[name], result.features[name] = value, features
            with torch.no_grad():
                goes_on = torch.zeros_like(is_first[burn_in:]).flatten().unsqueeze(0)
                value, features, _ = network(after.flatten(0, 1).unsqueeze(0), states.detach().flatten(0, 1), goes_on)
            size = batch.mask[burn_in:].shape
            result.next_value[name] = value[0].unflatten(0, size)
            result.next_features[name] = features[0].unflatten(0, size)
        return result

    def update_targets(self) -> None:
        """Moves the target networks, by the number of updates that were made."""
        hp = self.hparams
        if hp.target_update_rate is None and self.updates % hp.target_update_interval:
            return
        pairs = [(self.target_networks, self.networks)]
        if self.mixer is not None:
            pairs.append((self.target_mixer, self.mixer))
        with nullcontext() if self.frozen is None else self.frozen.kept(self.target_networks):
            for old, new in pairs:
                move_towards(old, new, rate=hp.target_update_rate or 1.0)


def join(per_group: Mapping[str, Tensor]) -> Tensor:
    """Returns one tensor with the agents of all groups along the last axis, group after group."""
    tensors = list(per_group.values())
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, -1)


def joint_reward(rewards: Mapping[str, Tensor], how: str | None, *, shared: bool) -> Tensor:
    """Returns the rewards that are learned from, ``[..., 1]`` of the team or ``[..., A]`` of each agent.

    Args:
        rewards: by group ``[..., A]``.
        how: ``"sum"``, ``"mean"`` or ``"first"`` makes one of them, ``None`` keeps them.
        shared: the agents of a group share their reward: it counts once in a sum.
    """
    if how is None:
        return join(rewards)
    if how == "sum" and shared:
        rewards = {name: reward[..., :1] for name, reward in rewards.items()}
    reward = join(rewards)
    return reward[..., :1] if how == "first" else getattr(reward, how)(-1, keepdim=True)


def values_of(value: Mapping[str, Tensor], action: Mapping[str, Tensor]) -> Tensor:
    """Returns the values ``[..., A]`` of the actions of all agents, from values ``[..., A, n]`` by group."""
    return join({name: take(value[name], action[name]) for name in value})


def best_actions(value: Mapping[str, Tensor], action_mask: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns by group the legal actions ``[..., A]`` of the largest values."""
    return {name: greedy_action(value[name], action_mask[name]) for name in value}


def actions(steps: TensorDict, groups: Iterable[str]) -> dict[str, Tensor]:
    """Returns by group what was done, ``[..., A]``."""
    return {name: steps[name, schema.ACTION] for name in groups}


def action_masks(steps: TensorDict) -> dict[str, Tensor]:
    """Returns the action masks of all groups at the steps."""
    return {
        name: group[schema.ACTION_MASK]
        for name, group in steps.items()
        if isinstance(group, TensorDict) and schema.ACTION_MASK in group
    }


def check_discrete(algorithm: str, spec: EnvSpec) -> None:
    """Raises ``ValueError`` if the actions of a group are not ``Discrete``."""
    for name, group in spec.groups.items():
        if not group.is_discrete or group.action_shape:
            raise ValueError(
                f"{algorithm} needs Discrete actions, but those of {name!r} in {spec.name} are {group.action_space}: "
                "use a policy method such as MAPPO or IPPO"
            )


def frozen_copy(module: nn.Module) -> nn.Module:
    """Returns a copy that is not learned."""
    return copy.deepcopy(module).requires_grad_(False)


@torch.no_grad()
def move_towards(old: nn.Module, new: nn.Module, *, rate: float) -> None:
    """Moves all parameters and buffers of ``old`` a part of the way to those of ``new``; all of it copies them."""
    targets, sources = list(old.parameters()), list(new.parameters())
    if rate == 1.0 and targets:  # a sum has no parameters
        torch._foreach_copy_(targets, sources)
    elif targets:
        torch._foreach_lerp_(targets, sources, rate)
    for target, source in zip(old.buffers(), new.buffers(), strict=True):
        target.copy_(source)


@torch.no_grad()
def clip_each_agent(network: QNetwork, limit: float) -> Tensor:
    """Scales the gradients of stacked networks down, each to a norm of at most ``limit``; returns the norms ``[A]``."""
    gradients = [p.grad for p in network.parameters() if p.grad is not None]
    if network.num_agents == 1:  # its layer norms are not stacked
        gradients = [gradient.unsqueeze(0) for gradient in gradients]
    norm = torch.stack([gradient.flatten(1).square().sum(1) for gradient in gradients]).sum(0).sqrt()
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale.view(-1, *(1,) * (gradient.dim() - 1)))
    return norm


def last_steps(batch: ReplayBatch) -> Tensor:
    """Returns ``[L, N]``, whether the next step of the sequence does not count or is of another episode.

    An episode may also break off without an end, where training was resumed and the environment was not.
    """
    steps, mask = batch.steps[batch.burn_in :], batch.mask[batch.burn_in :]
    last = steps[schema.NEXT, schema.TERMINATED] | steps[schema.NEXT, schema.TRUNCATED]
    last[:-1] |= steps[schema.IS_FIRST][1:] | ~mask[1:]
    last[-1] = True
    return last


def mean_over_agents(error: Tensor, weight: Tensor) -> Tensor:
    """Returns the means ``[...]`` of ``[..., A]`` over the agents that count."""
    return (error * weight).sum(-1) / weight.sum(-1).clamp(min=1)
