"""On-policy actor-critic methods: collect a rollout, estimate advantages, make epochs of minibatch updates."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Literal

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor, nn

from marl_lightning.algorithms.actor_critic import Actor, ActorPolicy, Critic, CriticInput, initial_states
from marl_lightning.algorithms.base import MARLModule, check_finite
from marl_lightning.algorithms.freezing import FrozenAgents
from marl_lightning.algorithms.magnet import Magnet, MagnetKind, check_magnet
from marl_lightning.clock import Schedule
from marl_lightning.data import schema
from marl_lightning.data.episodes import episode_metrics
from marl_lightning.data.rollout import RolloutDataModule
from marl_lightning.data.schema import RecurrentState, Rollout
from marl_lightning.envs.spec import EnvSpec
from marl_lightning.losses.ppo import (
    clipped_policy_loss,
    clipped_value_loss,
    normalise_advantage,
)
from marl_lightning.losses.returns import generalized_advantage_estimate
from marl_lightning.nn.statistics import weighted_mean
from marl_lightning.nn.value_norm import ValueNorm
from marl_lightning.validation import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt, checked


class OnPolicyActorCriticModule(MARLModule):
    """Proximal policy optimisation for teams (Schulman et al. 2017; Yu et al. 2022), the base of its family.

    Every group has an actor and a critic; all groups share one optimiser step. Advantages, value targets and losses
    follow :mod:`marl_lightning.losses`; each is a mean over the agents that were alive. An agent that dies has nothing
    to come, unless rewards are shared or made one: then the dead are paid like the others.

    Agents may be frozen: they then act, but their networks stay as they are, bit for bit, and nothing that the others
    learn depends on what they would learn. In evaluations all agents act greedily.

    A magnet holds the policy close to another one, see :class:`~marl_lightning.algorithms.magnet.Magnet`. Without it,
    self-play need not come close to an equilibrium.

    Args:
        spec: the environment's spec; found in the data module if not given.
        hidden_sizes: widths of the hidden layers of actor and critic.
        activation: of the hidden layers.
        layer_norm: normalise the inputs and the output of every hidden layer.
        recurrent: put a GRU of width ``hidden_sizes[-1]`` behind the hidden layers.
        chunk_length: env steps of back-propagation through time with ``recurrent``; it divides the rollout length.
            Each chunk starts from the recurrent state of collection time. The paper uses 10.
        share_parameters: one network for the agents of a group, told apart by their index, or one each.
        critic: what the critic sees, see :class:`~marl_lightning.algorithms.actor_critic.Critic`.
        team_reward: how the rewards of a group become one that all its agents learn from; ``None`` keeps their own.
        learning_rate: of Adam, for actor and critic.
        learning_rate_decay_env_steps: the learning rate falls linearly to 0 at this many env steps; ``None`` keeps it.
        adam_eps: epsilon of Adam.
        gamma: discount per env step.
        gae_lambda: trace decay of generalised advantage estimation.
        clip_ratio: clipping of the probability ratio around 1.
        value_clip: clipping of value changes, on the scale of the critic's output; ``None`` does not clip.
        huber_delta: error, on that scale, above which the value loss is linear; ``None`` is the squared error.
        value_coefficient: weight of the value loss.
        entropy_coefficient: weight of the entropy bonus.
        max_grad_norm: limit of the norm of the gradient of all parameters; ``None`` does not clip.
        num_epochs: passes over a rollout. The paper uses 15 for easy, 10 for hard, 5 for very hard games.
        num_minibatches: updates a pass.
        normalise_value: learn values of returns shifted and scaled by running statistics.
        value_norm_decay: see :class:`~marl_lightning.nn.value_norm.ValueNorm`.
        normalise_advantage: shift and scale the advantages of a rollout, over living agents and all processes.
        value_active_masks: dead agents do not count in the value loss. With a critic that sees an agent's own
            features, learning the value of being dead instead keeps the bootstrap at the moment of death right.
        death_masking: see :class:`~marl_lightning.algorithms.actor_critic.Critic`.
        squash_actions: bound continuous actions by tanh instead of clipping.
        output_gain: of the initial weights of the actor's last layer.
        trainable_agents: names of the agents that learn, ``None`` for all. Agents of one group of which only some learn
            must have nothing in common: that excludes ``share_parameters``, ``layer_norm``, ``normalise_value`` and
            ``critic="state"``.
        opponent_mode: how the others act while these learn: ``"stochastic"``, as their policy says, or ``"greedy"``.
        magnet: which policy holds the others close: ``"none"``, ``"uniform"``, ``"periodic"`` or ``"ema"``.
        magnet_coefficient: weight of the divergence from it, in units of reward: if advantages are normalised, it is
            divided by their deviation too. It does not count the entropy bonus, whose weight is not in these units.
        magnet_coefficient_end: what that weight becomes in the course of time; ``None`` keeps it.
        magnet_anneal_env_steps: env steps over which it does so, linearly.
        magnet_refresh_env_steps: interval at which a periodic magnet becomes a copy of the policy.
        magnet_rate: how far an ``"ema"`` magnet moves towards the policy after every rollout.
        compile: compile the loss with ``torch.compile``; without a C++ compiler there is a warning and no change.

    Raises:
        ValueError: if two settings exclude each other or one is lacking, or there is no agent of such a name.
    """

    learns_from = RolloutDataModule

    @checked
    def __init__(
        self,
        *,
        spec: EnvSpec | None = None,
        hidden_sizes: Annotated[Sequence[PositiveInt], Field(min_length=1)] = (64, 64),
        activation: Literal["relu", "tanh"] = "relu",
        layer_norm: bool = True,
        recurrent: bool = False,
        chunk_length: PositiveInt = 16,
        share_parameters: bool = True,
        critic: CriticInput = "state",
        team_reward: Literal["mean", "sum", "first"] | None = "mean",
        learning_rate: PositiveFloat = 5e-4,
        learning_rate_decay_env_steps: PositiveInt | None = None,
        adam_eps: PositiveFloat = 1e-5,
        gamma: Fraction = 0.99,
        gae_lambda: Fraction = 0.95,
        clip_ratio: PositiveFloat = 0.2,
        value_clip: PositiveFloat | None = 0.2,
        huber_delta: PositiveFloat | None = 10.0,
        value_coefficient: NonNegativeFloat = 1.0,
        entropy_coefficient: NonNegativeFloat = 0.01,
        max_grad_norm: PositiveFloat | None = 10.0,
        num_epochs: PositiveInt = 10,
        num_minibatches: PositiveInt = 1,
        normalise_value: bool = True,
        value_norm_decay: Annotated[float, Field(ge=0, lt=1)] = 0.99999,
        normalise_advantage: bool = True,
        value_active_masks: bool = True,
        death_masking: bool = True,
        squash_actions: bool = False,
        output_gain: PositiveFloat = 0.01,
        trainable_agents: Sequence[str] | None = None,
        opponent_mode: Literal["stochastic", "greedy"] = "stochastic",
        magnet: MagnetKind = "none",
        magnet_coefficient: PositiveFloat | None = None,
        magnet_coefficient_end: NonNegativeFloat | None = None,
        magnet_anneal_env_steps: PositiveInt | None = None,
        magnet_refresh_env_steps: PositiveInt | None = None,
        magnet_rate: Annotated[float, Field(gt=0, le=1)] | None = None,
        compile: bool = False,
    ):
        if critic == "state" and team_reward is None:
            raise ValueError(
                "critic='state' gives one value for a whole group and needs a team reward: "
                "set team_reward to 'mean', 'sum' or 'first', or critic to 'agent_state' or 'observation'"
            )
        if trainable_agents is None and opponent_mode != "stochastic":
            raise ValueError(
                f"opponent_mode={opponent_mode!r} is that of agents that do not learn: set trainable_agents, or leave "
                "it out"
            )
        check_magnet(
            magnet=magnet,
            coefficient=magnet_coefficient,
            coefficient_end=magnet_coefficient_end,
            anneal_env_steps=magnet_anneal_env_steps,
            refresh_env_steps=magnet_refresh_env_steps,
            rate=magnet_rate,
        )
        super().__init__()
        self.save_hyperparameters(ignore=["spec"])
        self.frozen: FrozenAgents | None = None
        self.magnet: Magnet | None = None
        if spec is not None:
            self.use_spec(spec)

    # Networks -------------------------------------------------------------------------------------------------------

    def build(self, spec: EnvSpec) -> None:
        hp = self.hparams
        body = {key: hp[key] for key in ("hidden_sizes", "recurrent", "activation", "layer_norm")}
        self.actors = ActorPolicy()
        self.critics = nn.ModuleDict()
        self.value_norms = nn.ModuleDict()
        for name, group in spec.groups.items():
            if hasattr(self.actors, name) or "." in name:
                raise ValueError(f"a group cannot be named {name!r}: torch uses this name for itself, choose another")
            self.actors[name] = Actor(
                group=group,
                share_parameters=hp.share_parameters,
                output_gain=hp.output_gain,
                squash_actions=hp.squash_actions,
                **body,
            )
            self.critics[name] = Critic(
                spec=spec,
                group=group,
                critic=hp.critic,
                share_parameters=hp.share_parameters,
                death_masking=hp.death_masking,
                **body,
            )
            if hp.normalise_value:
                self.value_norms[name] = ValueNorm(decay=hp.value_norm_decay)
        if hp.magnet != "none":
            self.magnet = self._build_magnet()
        if hp.trainable_agents is not None:
            self._freeze_others(spec)
        self._group_loss = compiled(self.group_loss) if hp.compile else self.group_loss

    def _build_magnet(self) -> Magnet:
        hp = self.hparams
        end = hp.magnet_coefficient if hp.magnet_coefficient_end is None else hp.magnet_coefficient_end
        return Magnet(
            actors=self.actors,
            kind=hp.magnet,
            coefficient=Schedule(
                start=hp.magnet_coefficient, end=end, anneal_env_steps=hp.magnet_anneal_env_steps or 0
            ),
            refresh_env_steps=hp.magnet_refresh_env_steps,
            rate=hp.magnet_rate,
        )

    def _freeze_others(self, spec: EnvSpec) -> None:
        hp = self.hparams
        self.frozen = FrozenAgents(spec=spec, trainable=hp.trainable_agents)
        self.frozen.check_separate(
            share_parameters=hp.share_parameters,
            layer_norm=hp.layer_norm,
            normalise_value=hp.normalise_value,
            shared_critic=hp.critic == "state",
        )
        self.frozen.stop_learning(self.actors)
        self.frozen.stop_learning(self.critics)
        if hp.opponent_mode == "greedy":
            self.actors.always_greedy = self.frozen.of

    @property
    def policy(self) -> ActorPolicy:
        return self.actors

    @property
    def chunk_length(self) -> int | None:
        """Steps of a training sequence; ``None`` without memory, where every step stands alone."""
        return self.hparams.chunk_length if self.hparams.recurrent else None

    def learned_parameters(self) -> list[nn.Parameter]:
        """Returns what the optimiser steps."""
        return [p for p in (*self.actors.parameters(), *self.critics.parameters()) if p.requires_grad]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # All parameters, so that a run can be resumed with others learning: Adam skips those without a gradient.
        parameters = [*self.actors.parameters(), *self.critics.parameters()]
        return torch.optim.Adam(parameters, lr=self.hparams.learning_rate, eps=self.hparams.adam_eps, fused=True)

    # Values of a rollout, as of collection time ----------------------------------------------------------------------

    @torch.no_grad()
    def prepare_rollout(self, rollout: Rollout, state: RecurrentState) -> RecurrentState:
        """Adds values ``(group, "value")`` on the scale of the critic's output, and what is true of the successors.

        ``("next", group, "value")`` and ``("next", group, "alive")`` are those of the true successor, and only valid
        where the episode was not terminated. With a magnet, there is ``(group, "magnet")`` too.

        Returns:
            ``state`` with the recurrent states of critics and magnet after the last step.
        """
        rows = {name: critic.num_values for name, critic in self.critics.items()}
        num_envs = rollout.steps.shape[1]
        before = initial_states("critic", self.critics, rows, num_envs) | {
            key: value for key, value in state.items() if key.startswith("critic/")
        }
        state = dict(state)
        for name, critic in self.critics.items():
            key, steps = f"critic/{name}", rollout.steps
            value, states = critic(_critic_inputs(critic, name, steps), before.get(key), steps[schema.IS_FIRST])
            next_value = torch.cat((value[1:], self._successor_value(name, rollout.last, states[-1])))
            next_alive = torch.cat((steps[name, schema.ALIVE][1:], rollout.last[name, schema.ALIVE].unsqueeze(0)))
            if len(rollout.final):
                time, env = rollout.final["time"], rollout.final["env"]
                next_value[time, env] = self._successor_value(name, rollout.final, states[time, env])[0]
                next_alive[time, env] = rollout.final[name, schema.ALIVE]
            steps[schema.NEXT, name, schema.ALIVE] = next_alive
            agents = self.actors[name].num_agents
            steps[name, "value"] = value.expand(-1, -1, agents).contiguous()
            steps[schema.NEXT, name, "value"] = next_value.expand(-1, -1, agents).contiguous()
            if key in before:
                state[key] = states[-1]
                chunk_ends = states[self.chunk_length - 1 : -1 : self.chunk_length]
                rollout.chunk_state[key] = torch.cat((before[key].unsqueeze(0), chunk_ends))
        return state if self.magnet is None else self.magnet.prepare_rollout(rollout, state, self.actors)

    def _successor_value(self, group: str, rows: TensorDict, state: Tensor) -> Tensor:
        """Returns values ``[1, N, num_values]`` of decision points ``[N]`` that follow on ``state``."""
        critic = self.critics[group]
        goes_on = torch.zeros(1, len(rows), dtype=torch.bool, device=state.device)
        return critic(_critic_inputs(critic, group, rows.unsqueeze(0)), state, goes_on)[0]

    # Learning -------------------------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        if self.frozen is not None:  # those who are frozen now may have learned in the run that this one resumes
            for networks in (self.actors, self.critics):
                self.frozen.clear_moments(networks, self.optimizers(use_pl_optimizer=False))

    def training_step(self, rollout: Rollout, batch_idx: int) -> None:
        before = self.env_steps
        self.update(rollout)
        self.advance(rollout.env_steps)
        if self.magnet is not None:
            self.magnet.follow(self.actors, before=before, now=self.env_steps)
        metrics = self.flush_metrics(episode_metrics(rollout.episodes))
        check_finite(metrics, env_steps=self.env_steps, steps=rollout.steps)

    def update(self, rollout: Rollout) -> None:
        """Makes ``num_epochs`` passes of ``num_minibatches`` updates over a prepared rollout."""
        hp = self.hparams
        optimizer, parameters = self.optimizers(), self.learned_parameters()
        self._decay_learning_rate(optimizer)
        learning = [name for name in self.actors if self.frozen is None or self.frozen.learns_in(name)]
        batches = {name: self.training_batch(name, rollout) for name in learning}
        num_sequences = next(iter(batches.values())).num_sequences
        for rows in minibatches(num_sequences, hp.num_epochs, hp.num_minibatches, self.device):
            loss, metrics = self.loss({name: batch.select(rows) for name, batch in batches.items()})
            norm = self.optimise(loss, optimizer, parameters, max_grad_norm=hp.max_grad_norm)
            self.record(metrics | {"gradient_norm": norm})

    def clip_gradient(self, parameters: list[nn.Parameter], limit: float) -> Tensor:
        """See :class:`~marl_lightning.algorithms.base.MARLModule`; frozen agents have no part in it."""
        if self.frozen is not None:
            self.frozen.clear_gradients(self.actors)
            self.frozen.clear_gradients(self.critics)
        return super().clip_gradient(parameters, limit)

    def loss(self, batches: Mapping[str, GroupBatch]) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the sum of the groups' losses and their diagnostics, named after the group if there are several."""
        total, metrics = 0.0, {}
        for name, batch in batches.items():
            loss, group_metrics = self._group_loss(self.actors[name], self.critics[name], batch)
            total = total + loss
            metrics |= self._named(name, group_metrics)
        return total, metrics

    def group_loss(self, actor: Actor, critic: Critic, batch: GroupBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Policy loss, value loss, entropy bonus and penalty of the magnet, of one group on one minibatch."""
        hp = self.hparams
        features, _ = actor(batch.actor_inputs, batch.actor_state, batch.is_first)
        log_prob, entropy = actor.head.evaluate(features, batch.action, batch.action_mask)
        value, _ = critic(batch.critic_inputs, batch.critic_state, batch.is_first)
        policy_loss, diagnostics = clipped_policy_loss(
            log_prob=log_prob,
            old_log_prob=batch.log_prob,
            advantage=batch.advantage,
            weight=batch.weight,
            clip_ratio=hp.clip_ratio,
        )
        value_loss = clipped_value_loss(
            value=value.expand_as(batch.value),
            old_value=batch.value,
            target=batch.target,
            weight=batch.value_weight,
            clip=hp.value_clip,
            huber_delta=hp.huber_delta,
        )
        entropy = weighted_mean(entropy, batch.weight)
        loss = policy_loss + hp.value_coefficient * value_loss - hp.entropy_coefficient * entropy
        diagnostics |= {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
        if batch.magnet is not None:
            divergence = actor.head.kl_divergence(features, batch.action_mask, batch.magnet)
            loss = loss + weighted_mean(batch.magnet_coefficient * divergence, batch.weight)
            diagnostics["magnet_kl"] = weighted_mean(divergence, batch.weight)
        return loss, diagnostics

    def training_batch(self, group: str, rollout: Rollout) -> GroupBatch:
        """Returns one group's training sequences: advantages, value targets, and inputs made once for all epochs."""
        hp, actor, critic = self.hparams, self.actors[group], self.critics[group]
        steps, own = rollout.steps, rollout.steps[group]
        terminated = steps[schema.NEXT, schema.TERMINATED].unsqueeze(-1)
        done = terminated | steps[schema.NEXT, schema.TRUNCATED].unsqueeze(-1)
        if hp.team_reward is None and not self.spec.shared_reward:  # nothing is to come for an agent that dies
            died = ~steps[schema.NEXT, group, schema.ALIVE]
            terminated, done = terminated | died, done | died
        norm = self.value_norms[group] if hp.normalise_value else None
        value, next_value = own["value"], steps[schema.NEXT, group, "value"]
        real_value = norm.denormalise(value) if norm else value
        advantage = generalized_advantage_estimate(
            reward=team_reward(steps[schema.NEXT, group, schema.REWARD], hp.team_reward),
            value=real_value,
            next_value=norm.denormalise(next_value) if norm else next_value,
            terminated=terminated,
            done=done,
            gamma=hp.gamma,
            gae_lambda=hp.gae_lambda,
        )
        target = advantage + real_value
        alive = own[schema.ALIVE].float()
        learns = torch.ones_like(alive) if self.frozen is None else (~self.frozen.of(group)).expand_as(alive).float()
        weight = alive * learns
        value_weight = weight if hp.value_active_masks else learns
        self.record(self._named(group, value_fit(target, real_value, value_weight)))
        if norm:
            norm.update(target, value_weight, self.reduce_sum)
            target = norm.normalise(target)
        scale = 1.0
        if hp.normalise_advantage:
            advantage, scale = normalise_advantage(advantage, weight, self.reduce_sum)
        magnet_coefficient = None
        if self.magnet is not None:
            coefficient = torch.as_tensor(self.magnet.coefficient(self.env_steps), device=self.device)
            self.record({"magnet_coefficient": coefficient})
            magnet_coefficient = (coefficient / scale).expand_as(weight)
        mask = own.get(schema.ACTION_MASK, None)
        if mask is not None and mask.all():  # the game has no illegal actions: save the masking
            mask = None

        def sequences(x: Tensor | None) -> Tensor | None:
            return None if x is None else into_sequences(x, self.chunk_length)

        def chunk_state(name: str) -> Tensor | None:
            state = rollout.chunk_state.get(f"{name}/{group}")
            return None if state is None else state.flatten(0, 1)

        return GroupBatch(
            actor_inputs=sequences(actor.inputs(own[schema.OBSERVATION])),
            critic_inputs=sequences(_critic_inputs(critic, group, steps)),
            action=sequences(own[schema.ACTION]),
            action_mask=sequences(mask),
            log_prob=sequences(own[schema.LOG_PROB]),
            value=sequences(value),
            advantage=sequences(advantage),
            target=sequences(target),
            weight=sequences(weight),
            value_weight=sequences(value_weight),
            magnet=sequences(own.get("magnet", None)),
            magnet_coefficient=sequences(magnet_coefficient),
            is_first=sequences(steps[schema.IS_FIRST]),
            actor_state=chunk_state("actor"),
            critic_state=chunk_state("critic"),
        )

    def _named(self, group: str, metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns metrics named after the group, if there are several."""
        suffix = f"/{group}" if len(self.actors) > 1 else ""
        return {key + suffix: value for key, value in metrics.items()}

    def _decay_learning_rate(self, optimizer: torch.optim.Optimizer) -> None:
        end = self.hparams.learning_rate_decay_env_steps
        if end is not None:
            for group in optimizer.param_groups:
                group["lr"] = self.hparams.learning_rate * max(0.0, 1 - self.env_steps / end)


@dataclass(slots=True, kw_only=True)
class GroupBatch:
    """Training sequences of one group: ``[L, N, ...]``, ``N`` sequences of ``L`` steps, and their first states.

    ``L`` is the chunk length with memory and 1 without. ``action_mask`` is ``None`` where all actions are legal, the
    states are ``None`` without memory, and ``magnet``, its distribution, and ``magnet_coefficient``, on the scale of
    ``advantage``, without a magnet. ``weight`` is 1 where an agent acted that learns, 0 elsewhere.
    """

    actor_inputs: Tensor
    critic_inputs: Tensor
    action: Tensor
    action_mask: Tensor | None
    log_prob: Tensor
    value: Tensor
    advantage: Tensor
    target: Tensor
    weight: Tensor
    value_weight: Tensor
    magnet: Tensor | None
    magnet_coefficient: Tensor | None
    is_first: Tensor
    actor_state: Tensor | None
    critic_state: Tensor | None

    @property
    def num_sequences(self) -> int:
        return self.is_first.shape[1]

    def select(self, rows: Tensor) -> GroupBatch:
        """Returns the sequences with the given indices."""

        def pick(name: str) -> Tensor | None:
            value = getattr(self, name)
            return None if value is None else value.index_select(0 if name.endswith("_state") else 1, rows)

        return GroupBatch(**{field.name: pick(field.name) for field in fields(self)})


def minibatches(
    num_sequences: int, num_epochs: int, num_minibatches: int, device: torch.device | str
) -> Iterator[Tensor]:
    """Yields the indices of the sequences of each minibatch; every pass over all of them has a new order.

    Raises:
        ValueError: if there are fewer sequences than minibatches.
    """
    if num_minibatches > num_sequences:
        raise ValueError(
            f"num_minibatches={num_minibatches} must be at most the {num_sequences} sequences of a rollout: "
            "make fewer minibatches or longer rollouts"
        )
    for _ in range(num_epochs):
        yield from torch.randperm(num_sequences, device=device).tensor_split(num_minibatches)


def into_sequences(x: Tensor, length: int | None) -> Tensor:
    """Cuts ``[T, E, ...]`` into ``[L, T / L * E, ...]``, chunk after chunk; ``None`` is length 1."""
    if length is None:
        return x.flatten(0, 1).unsqueeze(0)
    return x.unflatten(0, (-1, length)).transpose(0, 1).flatten(1, 2)


def value_fit(target: Tensor, value: Tensor, weight: Tensor) -> dict[str, Tensor]:
    """How well values of collection time explain the returns: ``explained_variance`` is 1 at best, 0 for a constant."""
    mean = weighted_mean(target, weight)
    variance = weighted_mean((target - mean).square(), weight)
    error = weighted_mean((target - value).square(), weight)
    return {"explained_variance": 1 - error / variance.clamp(min=1e-8), "value_target": mean}


def team_reward(reward: Tensor, how: str | None) -> Tensor:
    """Makes one reward of the agents' ``[..., A]`` and gives it to all of them; ``None`` leaves them."""
    if how is None:
        return reward
    if how == "first":
        return reward[..., :1].expand_as(reward)
    return getattr(reward, how)(-1, keepdim=True).expand_as(reward)


def _critic_inputs(critic: Critic, group: str, rows: TensorDict) -> Tensor:
    own = rows[group]
    return critic.inputs(rows[schema.STATE], own[schema.OBSERVATION], own[schema.ALIVE])


def compiled(function: Callable) -> Callable:
    """Returns ``function`` compiled, or itself with a warning if this machine has no working compiler."""
    fast = torch.compile(function)

    def call(*args):
        nonlocal fast
        try:
            return fast(*args)
        except torch._dynamo.exc.BackendCompilerFailed as error:
            reason = str(error.inner_exception).splitlines()[0]
            warnings.warn(f"algorithm.compile is ignored, no working compiler was found ({reason})", stacklevel=2)
            fast = function
            return fast(*args)

    return call
