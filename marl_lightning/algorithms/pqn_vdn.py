"""Parallelised Q-networks for teams: value-based learning from rollouts, without a replay and a target network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from marl_lightning.algorithms.base import MARLModule, check_finite
from marl_lightning.algorithms.on_policy import into_sequences, minibatches
from marl_lightning.algorithms.q_learning import (
    QNetwork,
    QPolicy,
    action_masks,
    actions,
    best_actions,
    check_discrete,
    joint_reward,
    values_of,
)
from marl_lightning.data import schema
from marl_lightning.data.episodes import episode_metrics
from marl_lightning.data.rollout import RolloutDataModule
from marl_lightning.data.schema import RecurrentState, Rollout
from marl_lightning.envs.spec import EnvSpec
from marl_lightning.losses.td import td_lambda_target, td_loss
from marl_lightning.validation import Fraction, PositiveFloat, PositiveInt, checked


class PQNVDN(MARLModule):
    """Parallelised Q-networks (Gallici et al. 2025, algorithm 1) whose values add up to that of the team, as in VDN.

    ::

        Q_t = sum_i Q_i(o_t, a_i)
        V_t = sum_i max_a Q_i(o_t, a),    over the legal actions
        G_t = r_t + gamma (1 - terminated_t) [(1 - lambda) V_{t+1} + lambda G_{t+1}]

    Many instances explore at the same time, layer normalisation keeps the values bounded, and the targets ``G`` are
    made once a rollout, by the networks that collected it: so neither a replay nor a target network is needed. Targets
    end with the episode or the rollout, where ``G_{t+1}`` is the value of the true successor. The error ``Q - G`` is
    squared. Agents that are not alive have one legal action, and what it is worth is a part of the sum.

    Exploration follows :class:`~marl_lightning.callbacks.EpsilonSchedule`.

    Args:
        spec: the environment's spec; found in the data module if not given.
        hidden_sizes: widths of the hidden layers.
        activation: of the hidden layers.
        layer_norm: normalise the inputs and the output of every hidden layer.
        recurrent: put a GRU of width ``hidden_sizes[-1]`` behind the hidden layers.
        chunk_length: env steps of back-propagation through time with ``recurrent``; it divides the rollout length.
            Each chunk starts from the recurrent state of collection time.
        share_parameters: one network for the agents of a group, told apart by their index, or one each.
        team_reward: how the rewards of all agents become one that the team learns from; in a sum, a reward that the
            agents of a group share counts once.
        learning_rate: of RAdam.
        gamma: discount per env step.
        td_lambda: mix targets of all lengths, see :func:`~marl_lightning.losses.td.td_lambda_target`.
        max_grad_norm: limit of the norm of the gradient; ``None`` does not clip.
        num_epochs: passes over a rollout.
        num_minibatches: updates a pass.

    Raises:
        ValueError: if a group's actions are not ``Discrete``, or a rollout has fewer sequences than minibatches.
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
        team_reward: Literal["sum", "mean", "first"] = "sum",
        learning_rate: PositiveFloat = 5e-4,
        gamma: Fraction = 0.99,
        td_lambda: Fraction = 0.65,
        max_grad_norm: PositiveFloat | None = 10.0,
        num_epochs: PositiveInt = 4,
        num_minibatches: PositiveInt = 16,
    ):
        super().__init__()
        self.save_hyperparameters(ignore=["spec"])
        if spec is not None:
            self.use_spec(spec)

    # Networks -------------------------------------------------------------------------------------------------------

    def build(self, spec: EnvSpec) -> None:
        names = ("hidden_sizes", "recurrent", "activation", "layer_norm", "share_parameters")
        check_discrete(type(self).__name__, spec)
        self.networks = QPolicy()
        for name, group in spec.groups.items():
            self.networks[name] = QNetwork(group=group, **{key: self.hparams[key] for key in names})

    @property
    def policy(self) -> QPolicy:
        return self.networks

    @property
    def chunk_length(self) -> int | None:
        """Steps of a training sequence; ``None`` without memory, where every step stands alone."""
        return self.hparams.chunk_length if self.hparams.recurrent else None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.RAdam(self.networks.parameters(), lr=self.hparams.learning_rate)

    # Values of a rollout, as of collection time ----------------------------------------------------------------------

    @torch.no_grad()
    def prepare_rollout(self, rollout: Rollout, state: RecurrentState) -> RecurrentState:
        """Adds ``("next", "value")``, ``[T, E, 1]``: what the true successors are worth to the team.

        It is only valid where the episode was not terminated. Returns ``state``: nothing else is carried.
        """
        steps = rollout.steps
        value, states = self.best_value(steps, rollout.initial_state, steps[schema.IS_FIRST])
        after = {key: states_of_group[-1] for key, states_of_group in states.items()}
        next_value = torch.cat((value[1:], self._successor_value(rollout.last, after)))
        if len(rollout.final):
            where = rollout.final["time"], rollout.final["env"]
            after = {key: states_of_group[where] for key, states_of_group in states.items()}
            next_value[where] = self._successor_value(rollout.final, after)[0]
        steps[schema.NEXT, "value"] = next_value
        return state

    def best_value(self, rows: TensorDict, state: RecurrentState, is_first: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the values of the best legal actions to the team, and the recurrent states after each step.

        Args:
            rows: decision points ``[T, N]``.
            state: recurrent state before the first of them, ``[N, A, H]`` a group; empty without memory.
            is_first: ``[T, N]`` bool, the state is zeroed before this step.

        Returns:
            ``[T, N, 1]``, and by name as in ``state`` ``[T, N, A, H]``.
        """
        values, states = {}, {}
        for name, network in self.networks.items():
            key, inputs = f"q/{name}", network.inputs(rows[name, schema.OBSERVATION])
            values[name], _, after = network(inputs, state.get(key), is_first)
            if key in state:
                states[key] = after
        best = values_of(values, best_actions(values, action_masks(rows)))
        return best.sum(-1, keepdim=True), states

    def _successor_value(self, rows: TensorDict, state: RecurrentState) -> Tensor:
        """Returns values ``[1, N, 1]`` of decision points ``[N]`` that follow on ``state``."""
        goes_on = torch.zeros(1, len(rows), dtype=torch.bool, device=rows[schema.STATE].device)
        return self.best_value(rows.unsqueeze(0), state, goes_on)[0]

    # Learning -------------------------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        self.networks.explore_at(self.env_steps)

    def training_step(self, rollout: Rollout, batch_idx: int) -> None:
        self.update(rollout)
        self.advance(rollout.env_steps)
        metrics = self.flush_metrics({"exploration": self.networks.rate} | episode_metrics(rollout.episodes))
        check_finite(metrics, env_steps=self.env_steps, steps=rollout.steps)
        self.networks.explore_at(self.env_steps)  # in the rollout that comes next

    def update(self, rollout: Rollout) -> None:
        """Makes ``num_epochs`` passes of ``num_minibatches`` updates over a prepared rollout."""
        hp, batch = self.hparams, self.training_batch(rollout)
        optimizer, parameters = self.optimizers(), list(self.networks.parameters())
        for rows in minibatches(batch.num_sequences, hp.num_epochs, hp.num_minibatches, self.device):
            minibatch = batch.select(rows)
            value = self.value(minibatch)
            error = value - minibatch.target
            loss = td_loss(error, torch.ones_like(error))
            norm = self.optimise(loss, optimizer, parameters, max_grad_norm=hp.max_grad_norm)
            metrics = {"loss": loss, "q_value": value.mean(), "td_error": error.abs().mean()}
            self.record(metrics | {"gradient_norm": norm})

    def value(self, batch: TeamBatch) -> Tensor:
        """Returns what was done was worth to the team by the present networks, ``[L, N, 1]``."""
        values = {
            name: network(batch.inputs[name], batch.state.get(f"q/{name}"), batch.is_first)[0]
            for name, network in self.networks.items()
        }
        return values_of(values, batch.action).sum(-1, keepdim=True)

    def training_batch(self, rollout: Rollout) -> TeamBatch:
        """Returns the training sequences of a prepared rollout, with inputs and targets made once for all epochs."""

        def sequences(x: Tensor) -> Tensor:
            return into_sequences(x, self.chunk_length)

        steps = rollout.steps
        return TeamBatch(
            inputs={
                name: sequences(net.inputs(steps[name, schema.OBSERVATION])) for name, net in self.networks.items()
            },
            action={name: sequences(action) for name, action in actions(steps, self.networks).items()},
            state={key: state.flatten(0, 1) for key, state in rollout.chunk_state.items()},
            is_first=sequences(steps[schema.IS_FIRST]),
            target=sequences(self.target(steps)),
        )

    def target(self, steps: TensorDict) -> Tensor:
        """Returns what the values are drawn to, ``[T, E, 1]``, over the steps of a prepared rollout."""
        following = steps[schema.NEXT]
        terminated = following[schema.TERMINATED].unsqueeze(-1)
        return td_lambda_target(
            reward=self.reward(steps),
            next_value=following["value"],
            terminated=terminated,
            done=terminated | following[schema.TRUNCATED].unsqueeze(-1),
            gamma=self.hparams.gamma,
            td_lambda=self.hparams.td_lambda,
        )

    def reward(self, steps: TensorDict) -> Tensor:
        """Returns the reward of the team, ``[..., 1]``."""
        rewards = {name: steps[schema.NEXT, name, schema.REWARD] for name in self.networks}
        return joint_reward(rewards, self.hparams.team_reward, shared=self.spec.shared_reward)


@dataclass(slots=True, kw_only=True)
class TeamBatch:
    """Training sequences of a team: ``N`` sequences of ``L`` steps, the chunk length with memory and 1 without.

    Attributes:
        inputs: by group ``[L, N, A, F]``, what the networks read.
        action: by group ``[L, N, A]``.
        state: recurrent state before the first step, ``[N, A, H]`` a group; empty without memory.
        is_first: ``[L, N]``.
        target: ``[L, N, 1]``.
    """

    inputs: dict[str, Tensor]
    action: dict[str, Tensor]
    state: RecurrentState
    is_first: Tensor
    target: Tensor

    @property
    def num_sequences(self) -> int:
        return self.is_first.shape[1]

    def select(self, rows: Tensor) -> TeamBatch:
        """Returns the sequences with the given indices."""
        return TeamBatch(
            inputs={name: x.index_select(1, rows) for name, x in self.inputs.items()},
            action={name: x.index_select(1, rows) for name, x in self.action.items()},
            state={key: x.index_select(0, rows) for key, x in self.state.items()},
            is_first=self.is_first.index_select(1, rows),
            target=self.target.index_select(1, rows),
        )
