"""Neural fictitious self-play: learn a best response, and the average of all best responses so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from marl_lightning.algorithms.actor_critic import Actor, ActorPolicy
from marl_lightning.algorithms.q_learning import QLearningModule, QPolicy, clip_each_agent, join
from marl_lightning.data import schema
from marl_lightning.data.replay import ReplayBatch
from marl_lightning.data.reservoir import Reservoir
from marl_lightning.data.schema import RecurrentState, Rollout
from marl_lightning.envs.base import Observations
from marl_lightning.envs.spec import EnvSpec
from marl_lightning.nn.statistics import weighted_mean
from marl_lightning.validation import PositiveFloat, PositiveInt, extends

_STORED = (schema.OBSERVATION, schema.ACTION_MASK, schema.ACTION)


class NFSPPolicy(nn.Module):
    """Plays by the best response or by the average policy: implements :class:`~marl_lightning.algorithms.base.Policy`.

    At the start of an episode each agent of each instance draws which one it plays until the end, for itself. The
    recurrent state holds it, ``[E, A]`` bool, True for the best response, under :func:`mode_key`. If it is to be
    deterministic, it is the average policy, always taking its likeliest action.

    Args:
        best_response: explores as it says; it may be used elsewhere too, and so may the other one.
        average: the average policy.
        anticipatory: probability of the best response.
    """

    def __init__(self, *, best_response: QPolicy, average: ActorPolicy, anticipatory: float) -> None:
        super().__init__()
        self.best_response = best_response
        self.average = average
        self.anticipatory = anticipatory

    # Schedules of exploration are given to policies.

    @property
    def kind(self) -> Literal["epsilon", "boltzmann"]:
        """How the best response explores."""
        return self.best_response.kind

    @kind.setter
    def kind(self, kind: Literal["epsilon", "boltzmann"]) -> None:
        self.best_response.kind = kind

    @property
    def schedule(self) -> Callable[[int], float]:
        """How much the best response explores, by env steps."""
        return self.best_response.schedule

    @schedule.setter
    def schedule(self, schedule: Callable[[int], float]) -> None:
        self.best_response.schedule = schedule

    def initial_state(self, num_envs: int) -> RecurrentState:
        """See :class:`~marl_lightning.algorithms.base.Policy`; what is played is drawn by the first :meth:`act`."""
        device = next(self.parameters()).device
        return {
            mode_key(name): torch.zeros(num_envs, actor.num_agents, dtype=torch.bool, device=device)
            for name, actor in self.average.items()
        }

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
        average, zeros, _ = self.average.act(
            observations, state, is_first, deterministic=deterministic, generator=generator
        )
        zeros = {name: torch.zeros_like(log_prob) for name, log_prob in zeros.items()}
        if deterministic:
            return average, zeros, state
        best, _, _ = self.best_response.act(observations, state, is_first, generator=generator)
        actions, next_state = {}, {}
        for name, action in average.items():
            draw = torch.rand(action.shape, device=action.device, generator=generator) < self.anticipatory
            mode = torch.where(is_first.unsqueeze(-1), draw, state[mode_key(name)])
            actions[name], next_state[mode_key(name)] = torch.where(mode, best[name], action), mode
        return actions, zeros, next_state

    def action_probabilities(
        self,
        observations: Observations[Tensor],
        state: RecurrentState,
        is_first: Tensor,
        *,
        deterministic: bool = False,
    ) -> tuple[dict[str, Tensor], RecurrentState]:
        """Returns what ``act`` does if it is deterministic; there is nothing else to state, step by step.

        Raises:
            TypeError: if it is not deterministic.
        """
        if not deterministic:
            raise TypeError(
                "NFSP mixes two policies by the episode, so that single steps have no probabilities: give "
                "module.average_policy, which is what it learns, or module.networks, its best response"
            )
        stated, _ = self.average.action_probabilities(observations, state, is_first, deterministic=True)
        return stated, state

    def env_actions(self, actions: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Actions are indices already."""
        return dict(actions)


def mode_key(group: str) -> str:
    """Returns the name of the entry of the recurrent state that says who plays its best response."""
    return f"nfsp/{group}"


class NFSP(QLearningModule):
    """Neural fictitious self-play (Heinrich and Silver 2016, algorithm 1).

    Every agent learns two things: by Q-learning a best response to what the others do, and by supervised learning the
    average of its own best responses so far, which is what approaches a Nash equilibrium in two-player zero-sum games.
    Its best response itself does not, and neither does plain Q-learning in self-play.

    Each agent plays an episode by its best response with the probability ``anticipatory``, and by its average policy
    otherwise. The replay takes all steps. What it chose by its best response also goes into its reservoir, where
    decisions of all times stay with the same probability, unless it had no choice: one legal action, as with agents
    that wait for their turn. With every update of the values there is one of the average policy
    (:func:`average_policy_loss`), for agents whose reservoirs hold a batch.

    Evaluations with ``deterministic=True``, as those of callbacks are by default, are of the average policy, which then
    always takes its likeliest action. The equilibrium is that of :attr:`average_policy` as it mixes.

    Agents must see what they know, as in the information states of OpenSpiel: networks have no memory.

    Args:
        anticipatory: probability that an agent plays an episode by its best response, ``eta``.
        average_learning_rate: of the Adam of the average policies.
        average_batch_size: decisions of each agent an update of the average policies.
        reservoir_capacity: decisions of each agent that are held, by each process.
        **inherited: see :class:`~marl_lightning.algorithms.q_learning.QLearningModule`; agents learn from their own
            rewards unless ``team_reward`` is given. Average policies have networks of the same sizes.

    Attributes:
        average_policy: the average policies of all groups, a
            :class:`~marl_lightning.algorithms.base.StochasticPolicy`.

    Raises:
        ValueError: if ``recurrent``, or a batch is larger than the reservoir.
    """

    @extends(QLearningModule.__init__, team_reward=None)
    def __init__(
        self,
        *,
        anticipatory: Annotated[float, Field(gt=0, le=1)] = 0.1,
        average_learning_rate: PositiveFloat = 1e-3,
        average_batch_size: PositiveInt = 128,
        reservoir_capacity: PositiveInt = 200_000,
        recurrent: bool = False,
    ) -> None:
        if recurrent:
            raise ValueError(
                "NFSP learns its average policy from single decisions, which networks with memory cannot: leave out "
                "recurrent, and let agents observe what they know"
            )
        if average_batch_size > reservoir_capacity:
            raise ValueError(
                f"average_batch_size={average_batch_size} is more than reservoir_capacity={reservoir_capacity} ever "
                "holds: make one of them larger or smaller"
            )

    # Networks -------------------------------------------------------------------------------------------------------

    def build(self, spec: EnvSpec) -> None:
        super().build(spec)
        self.average_policy = ActorPolicy()
        for name, group in spec.groups.items():
            self.average_policy[name] = Actor(
                group=group, output_gain=0.01, squash_actions=False, **self.network_arguments
            )
        self.keep_states = tuple(mode_key(name) for name in spec.groups)
        self._reservoirs: dict[str, Reservoir] = {}

    @property
    def policy(self) -> NFSPPolicy:
        """Acts in training. It is made of the two that are learned, whenever it is asked for."""
        return NFSPPolicy(
            best_response=self.networks, average=self.average_policy, anticipatory=self.hparams.anticipatory
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        hp = self.hparams
        groups = [
            {"params": list(self.networks.parameters())},
            {"params": list(self.average_policy.parameters()), "lr": hp.average_learning_rate},
        ]
        return torch.optim.Adam(groups, lr=hp.learning_rate, eps=hp.adam_eps, fused=True)

    # Collecting -----------------------------------------------------------------------------------------------------

    @property
    def reservoirs(self) -> dict[str, Reservoir]:
        """By group, what the agents of this process have chosen by their best responses; made when first used."""
        if not self._reservoirs:
            first = self.trainer.datamodule.seed + 2  # one and the next are those of the environment and the replay
            self._reservoirs = {
                name: Reservoir(
                    capacity=self.hparams.reservoir_capacity, num_agents=group.num_agents, seed=first + index
                )
                for index, (name, group) in enumerate(self.spec.groups.items())
            }
        return self._reservoirs

    def on_collected(self, rollout: Rollout) -> None:
        super().on_collected(rollout)
        for name, reservoir in self.reservoirs.items():
            steps = rollout.steps[name]
            has_choice = steps[schema.ALIVE] & (steps[schema.ACTION_MASK].sum(-1) > 1)
            chosen = rollout.states[mode_key(name)] & has_choice
            items = {key: steps[key].flatten(0, 1).cpu() for key in _STORED}
            reservoir.add(items, chosen.flatten(0, 1).cpu())

    # Learning -------------------------------------------------------------------------------------------------------

    def loss(self, batch: ReplayBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """See :class:`~marl_lightning.algorithms.q_learning.QLearningModule`; adds that of the average policies.

        The two have no parameters in common, so that their sum is learned as each would be alone.
        """
        loss, error, diagnostics = super().loss(batch)
        average_loss = self.average_loss()
        if average_loss is None:
            return loss, error, diagnostics
        return loss + average_loss, error, diagnostics | {"average_loss": average_loss}

    def average_loss(self) -> Tensor | None:
        """Returns the loss of the average policies on a new batch, ``None`` while no agent has one."""
        size = self.hparams.average_batch_size
        ready = {name: reservoir.size >= size for name, reservoir in self.reservoirs.items()}
        if not join(ready).any():
            return None
        log_prob = {}
        for name, actor in self.average_policy.items():
            items = {key: item.to(self.device) for key, item in self.reservoirs[name].sample(size).items()}
            inputs = actor.inputs(items[schema.OBSERVATION])
            features, _ = actor(inputs.unsqueeze(0), None, None)
            log_prob[name], _ = actor.head.evaluate(features[0], items[schema.ACTION], items[schema.ACTION_MASK])
        weight = join(ready).float().to(self.device)
        return average_policy_loss(join(log_prob), weight, separate=self._is_separate)

    def clip_gradient(self, parameters: list[nn.Parameter], limit: float) -> Tensor:
        """See the base class. Values and average policies are clipped separately, and so are agents without sharing."""
        norm = super().clip_gradient(list(self.networks.parameters()), limit)
        own = list(self.average_policy.parameters())
        if own[0].grad is None:  # no batch yet
            return norm
        if self._is_separate:
            norms = torch.cat([clip_each_agent(actor, limit) for actor in self.average_policy.values()])
        else:
            norms = nn.utils.clip_grad_norm_(own, limit)
        return (norm.square() + norms.square().sum()).sqrt()

    # Checkpoints ----------------------------------------------------------------------------------------------------

    def local_state_dict(self) -> dict[str, Any]:
        """See :class:`~marl_lightning.algorithms.base.MARLModule`: the reservoirs of this process."""
        return {name: reservoir.state_dict() for name, reservoir in self.reservoirs.items()}

    def load_local_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores :meth:`local_state_dict`. Raises ``ValueError`` if a reservoir does not fit."""
        for name, reservoir in self.reservoirs.items():
            reservoir.load_state_dict(state[name])


def average_policy_loss(log_prob: Tensor, weight: Tensor, *, separate: bool) -> Tensor:
    """Negative log-likelihood of what best responses chose (Heinrich and Silver 2016, algorithm 1).

    ::

        L(theta) = mean over (s, a) of the reservoir of  -log pi(a | s; theta)

    Args:
        log_prob: ``[B, A]``, of the decisions of each agent under its average policy.
        weight: ``[A]``, 0 for agents that do not count, else 1.
        separate: add the losses of the agents up, so that learners that share nothing do not scale each other's
            gradients; else take their mean.
    """
    loss = -log_prob.mean(0)
    return (weight * loss).sum() if separate else weighted_mean(loss, weight)
