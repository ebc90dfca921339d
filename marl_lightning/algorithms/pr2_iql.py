"""Independent Q-learning that values own actions by how the others may respond: probabilistic recursive reasoning."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from marl_lightning.algorithms.iql import IQL
from marl_lightning.algorithms.q_learning import (
    AgentValues,
    QNetwork,
    QPolicy,
    action_masks,
    join,
)
from marl_lightning.data import schema
from marl_lightning.data.replay import ReplayBatch
from marl_lightning.data.schema import RecurrentState, Rollout
from marl_lightning.envs.base import Observations
from marl_lightning.envs.spec import EnvSpec, GroupSpec
from marl_lightning.losses.response import (
    Aggregate,
    draw_responses,
    encode,
    expected_value,
    response_log_prob,
    sampled_soft_value,
    soft_value,
    value_of,
)
from marl_lightning.nn.linear import AgentLinear
from marl_lightning.nn.mixers import one_hot
from marl_lightning.nn.statistics import weighted_mean
from marl_lightning.validation import PositiveFloat, PositiveInt, extends

_GAIN = 0.01  # of the heads: values start at about 0


class ResponseNetwork(QNetwork):
    """Values ``Q(a, o)`` of own actions and of what the others do, for the agents of one group.

    The outputs of :meth:`forward` are all that :meth:`value` and :meth:`value_given` need. If there is but one thing
    that the others can do, it is its base class.

    Args:
        group: the group.
        share_parameters: see :class:`~marl_lightning.algorithms.q_learning.QNetwork`.
        sizes: numbers of actions of the others, the same for every agent of the group.
        response_model: see :class:`PR2IQL`.
        opponents: see :class:`PR2IQL`.
        aggregate: see :class:`PR2IQL`.
        temperature: see :class:`PR2IQL`.
        num_samples: see :class:`PR2IQL`.
        mask_unseen: see :class:`PR2IQL`.
        **body: see :class:`~marl_lightning.algorithms.q_learning.QNetwork`.

    Attributes:
        parts: numbers of choices in the parts that what the others do falls into, see
            :mod:`~marl_lightning.losses.response`.
        seen: ``[A, n, sum(parts)]`` bool, for each own action what the others have done with it.
    """

    def __init__(
        self,
        *,
        group: GroupSpec,
        share_parameters: bool,
        sizes: tuple[int, ...],
        response_model: Literal["soft", "learned", "marginal"],
        opponents: Literal["joint", "pairwise", "sampled"],
        aggregate: Aggregate,
        temperature: float,
        num_samples: int,
        mask_unseen: bool,
        **body: Any,
    ):
        super().__init__(group=group, share_parameters=share_parameters, **body)
        self.num_actions, self.sizes = group.action_size, sizes
        self.parts = (math.prod(sizes),) if opponents == "joint" or not sizes else sizes
        self._num_joint = math.prod(float(size) for size in sizes)
        self._model, self._aggregate, self._temperature = response_model, aggregate, temperature
        self.is_sampled = opponents == "sampled" and self._num_joint > 1
        self.learns_response = (response_model != "soft" or self.is_sampled) and self._num_joint > 1
        width, choices = self.body.out_features, sum(self.parts)

        def head(in_features: int, out_features: int, gain: float = _GAIN) -> AgentLinear:
            stack = None if share_parameters else group.num_agents
            return AgentLinear(in_features=in_features, out_features=out_features, num_agents=stack, gain=gain)

        if self.is_sampled:
            self.own, self.others = head(width, width, 1.0), head(choices, width, 1.0)
            # The same points are used whenever responses are drawn, in every training: values are a function of the
            # parameters alone, which are all that agents have of their own.
            grid, fixed = (torch.arange(num_samples) + 0.5) / num_samples, torch.Generator().manual_seed(0)
            orders = [torch.randperm(num_samples, generator=fixed) for _ in self.parts]
            self.register_buffer("points", torch.stack([grid[order] for order in orders], -1), persistent=False)
        elif choices > 1:
            self.head = head(width, self.num_actions * choices)
        if self.learns_response:
            self.response = head(width, (1 if response_model == "marginal" else self.num_actions) * choices)
        seen = torch.zeros(self.num_agents, self.num_actions, choices, dtype=torch.bool) if mask_unseen else None
        self.register_buffer("seen", seen)

    def forward(self, inputs: Tensor, state: Tensor, is_first: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns outputs ``[T, N, A, O]``, features, and recurrent states ``[T, N, A, H]``; see ``Body.forward``."""
        features, states = self.body(inputs, state, is_first)
        outputs = features if self.is_sampled else self.head(features)
        if self.learns_response:
            outputs = torch.cat((outputs, self.response(features)), -1)
        return outputs.float(), features, states

    def value(self, outputs: Tensor) -> Tensor:
        """Returns what each own action is worth, ``[..., A, n]``, from outputs ``[..., A, O]``."""
        if self.is_sampled:
            return self._sampled_value(outputs)
        values = self._values(outputs)
        if self._model == "soft" or not self.learns_response:
            return soft_value(
                values, self.parts, temperature=self._temperature, aggregate=self._aggregate, mask=self.seen
            )
        logits = self.response_logits(outputs)
        if self.seen is not None:
            logits = logits.masked_fill(~(self.seen | ~self._any_seen()), -torch.inf)
        return expected_value(values, logits, self.parts)

    def value_given(self, outputs: Tensor, others: Tensor) -> Tensor:
        """Returns what each own action is worth, ``[..., A, n]``, with others' actions ``[..., A, J]``."""
        if self.is_sampled:
            return self._value_with(outputs[..., : self.body.out_features], others)
        index = self.index(others).unsqueeze(-2).expand(*outputs.shape[:-1], self.num_actions, -1)
        return value_of(self._values(outputs), index, self.parts)

    def index(self, others: Tensor) -> Tensor:
        """Returns what happened in every part, ``[..., P]``, from the others' actions ``[..., J]``."""
        return encode(others, self.sizes).unsqueeze(-1) if len(self.parts) == 1 else others

    def response_logits(self, outputs: Tensor) -> Tensor:
        """Returns logits of what the others do, ``[..., A, n, sum(parts)]``, or 1 instead of ``n`` if marginal."""
        used = self.body.out_features if self.is_sampled else self.num_actions * sum(self.parts)
        return outputs[..., used:].unflatten(-1, (-1, sum(self.parts)))

    def response_loss(self, outputs: Tensor, action: Tensor, others: Tensor) -> Tensor:
        """Returns ``-log p(o | a)`` of what was done, ``[..., A]``.

        Args:
            outputs: ``[..., A, O]``.
            action: ``[..., A]`` own actions.
            others: ``[..., A, J]`` those of the others.
        """
        if not self.learns_response:
            return torch.zeros(action.shape, device=action.device)
        logits = self.response_logits(outputs)
        row = torch.zeros_like(action) if self._model == "marginal" else action
        row = row[..., None, None].expand(*action.shape, 1, logits.shape[-1])
        return -response_log_prob(logits.gather(-2, row).squeeze(-2), self.index(others), self.parts)

    def see(self, counts: Tensor) -> None:
        """Remembers what has been done, from how often it was, ``[A, n, sum(parts)]``."""
        self.seen |= counts > 0

    def count(self, action: Tensor, others: Tensor) -> Tensor:
        """Returns how often what was done, ``[A, n, sum(parts)]``, with ``action`` ``[..., A]``; see :meth:`see`."""
        index = self.index(others).flatten(0, -3)
        mine = one_hot(action.flatten(0, -2), self.num_actions)
        theirs = torch.cat([one_hot(index[..., p], size) for p, size in enumerate(self.parts)], -1)
        return torch.einsum("bai,bao->aio", mine, theirs)

    def _values(self, outputs: Tensor) -> Tensor:
        choices = sum(self.parts)
        return outputs[..., : self.num_actions * choices].unflatten(-1, (self.num_actions, choices))

    def _any_seen(self) -> Tensor:
        parts = [part.any(-1, keepdim=True).expand_as(part) for part in self.seen.split(list(self.parts), -1)]
        return torch.cat(parts, -1)

    def _value_with(self, features: Tensor, others: Tensor) -> Tensor:
        joint = torch.cat([one_hot(others[..., j], size) for j, size in enumerate(self.sizes)], -1)
        return self.head(torch.relu(self.own(features) + self.others(joint))).float()

    def _sampled_value(self, outputs: Tensor) -> Tensor:
        features, logits = outputs[..., : self.body.out_features], self.response_logits(outputs)
        logits = logits.expand(*logits.shape[:-2], self.num_actions, logits.shape[-1])
        others, log_prob = draw_responses(logits, self.points, self.parts)  # [K, ..., A, n, J]
        # For each own action those that were drawn for it, in front of the agents' axis.
        values = self._value_with(features, others.movedim(-2, 1)).diagonal(dim1=1, dim2=-1)
        if self._model != "soft":
            return values.mean(0)
        return sampled_soft_value(
            values, log_prob, self._num_joint, temperature=self._temperature, aggregate=self._aggregate
        )


class ResponsePolicy(QPolicy):
    """Acts by what own actions are worth under the responses of the others, whose actions it does not need to know."""

    def action_values(
        self, observations: Observations[Tensor], state: RecurrentState, is_first: Tensor
    ) -> tuple[dict[str, Tensor], RecurrentState]:
        """See :class:`~marl_lightning.algorithms.q_learning.QPolicy`."""
        outputs, next_state = super().action_values(observations, state, is_first)
        return {name: self[name].value(output) for name, output in outputs.items()}, next_state


class PR2IQL(IQL):
    """Independent Q-learning with probabilistic recursive reasoning (Wen et al. 2019).

    Every agent learns ``Q(a, o)`` of its own action and the actions of all others, which it sees in training only. It
    acts by, and bootstraps, the value ``F(a)`` of its own action alone: greedily, or, where exploration is by
    temperature, in expectation over its own policy (their equation 13). With one thing that the others can do, this is
    :class:`~marl_lightning.algorithms.iql.IQL`.

    What the others are thought to do decides what is learned:

    * ``"soft"``: what is best for the agent, by ``softmax(Q / temperature)``: the paper's theorem 1. This is
      *optimistic*. It finds the best equilibrium of games of common interest where independent learners settle for
      less, and finds no mixed equilibria.
    * ``"learned"``: what they did together with each own action, learned by cross-entropy. With exploration by
      temperature it finds the mixed equilibrium of the paper's matrix game. The response is learned from the replay:
      a small one keeps it up with what the others do now.
    * ``"marginal"``: what they did, whatever the own action: ordinary opponent modelling (Claus and Boutilier 1998).

    Agents who move at the same time do not see each other's actions: if they randomise independently, the true response
    is the marginal one, and anything else is a way to learn, not a model of them.

    Args:
        response_model: one of the three.
        opponents: how the actions of several others are put together: ``"joint"`` values all their joint actions,
            ``"pairwise"`` makes ``Q`` a sum over the others (and learned responses products), ``"sampled"`` makes their
            actions inputs and values ``num_samples`` joint actions drawn from a learned response, always the same
            quantiles. ``"sampled"`` estimates a soft value too low, the less the more samples.
        aggregate: for soft responses ``"lme"``, ``"lse"`` or ``"expectation"``, see
            :func:`~marl_lightning.losses.response.soft_value`. Learned ones are always taken in expectation.
        temperature: of soft responses, in units of the values.
        max_joint: most joint actions of the others that ``"joint"`` may enumerate.
        num_samples: joint actions that ``"sampled"`` draws for each own action.
        mask_unseen: leave out what the others have not done yet, in any state, together with an own action. An agent
            does not know which actions of others are legal: optimistic values of those that never are would count.
        **inherited: see :class:`~marl_lightning.algorithms.iql.IQL`; agents learn from their own
            rewards unless ``team_reward`` is given.

    Raises:
        ValueError: if there are more joint actions than ``max_joint``, or settings exclude each other.
    """

    @extends(IQL.__init__, team_reward=None)
    def __init__(
        self,
        *,
        response_model: Literal["soft", "learned", "marginal"] = "soft",
        opponents: Literal["joint", "pairwise", "sampled"] = "joint",
        aggregate: Aggregate = "lme",
        temperature: PositiveFloat = 1.0,
        max_joint: PositiveInt = 1024,
        num_samples: PositiveInt = 16,
        mask_unseen: bool = False,
    ) -> None:
        if response_model != "soft" and aggregate == "lse":
            raise ValueError(
                f"aggregate='lse' is for response_model='soft', but that is {response_model!r}, whose values are "
                "expectations: leave out aggregate"
            )
        if opponents == "sampled" and mask_unseen:
            raise ValueError("opponents='sampled' draws what the others have done: leave out mask_unseen")

    def build_networks(self, spec: EnvSpec) -> QPolicy:
        hp = self.hparams
        sizes = [group.action_size for group in spec.groups.values() for _ in group.agents]
        policy, first = ResponsePolicy(), 0
        self._others: dict[str, Tensor] = {}
        for name, group in spec.groups.items():
            members = range(first, first + group.num_agents)
            others = torch.tensor([[j for j in range(len(sizes)) if j != i] for i in members], dtype=torch.int64)
            first += group.num_agents
            theirs = tuple(sizes[j] for j in others[0].tolist())
            self._check_joint(name, theirs)
            self._others[name] = others
            policy[name] = ResponseNetwork(
                group=group,
                sizes=theirs,
                response_model=hp.response_model,
                opponents=hp.opponents,
                aggregate=hp.aggregate,
                temperature=hp.temperature,
                num_samples=hp.num_samples,
                mask_unseen=hp.mask_unseen,
                **self.network_arguments,
            )
        return policy

    def _check_joint(self, name: str, sizes: tuple[int, ...]) -> None:
        joint = math.prod(sizes)
        if self.hparams.opponents == "joint" and joint > self.hparams.max_joint:
            raise ValueError(
                f"the others of an agent of {name!r} have {joint:,} joint actions, more than "
                f"max_joint={self.hparams.max_joint:,}: set opponents='pairwise' or 'sampled', or raise max_joint"
            )

    def others_actions(self, steps: TensorDict) -> dict[str, Tensor]:
        """Returns per group what all others of each agent did, ``[..., A, J]``, in the order of ``spec.agents``."""
        actions = join({name: steps[name, schema.ACTION] for name in self.networks})
        return {name: actions[..., others.to(actions.device)] for name, others in self._others.items()}

    # Collecting -----------------------------------------------------------------------------------------------------

    def on_collected(self, rollout: Rollout) -> None:
        super().on_collected(rollout)
        if not self.hparams.mask_unseen:
            return
        for name, others in self.others_actions(rollout.steps).items():
            action = rollout.steps[name, schema.ACTION]
            counts = self.reduce_sum(self.networks[name].count(action, others))
            if self.frozen is not None:
                counts = counts.masked_fill(self.frozen.of(name)[:, None, None], 0)
            for networks in (self.networks, self.target_networks):
                networks[name].see(counts)

    # Learning -------------------------------------------------------------------------------------------------------

    def agent_values(self, networks: QPolicy, batch: ReplayBatch) -> AgentValues:
        """Returns values with what the others did, and of the successors whatever they will do.

        ``features`` are the outputs of the networks. See the base class.
        """
        result = super().agent_values(networks, batch)
        others = self.others_actions(batch.steps[batch.burn_in :])
        for name, network in networks.items():
            result.next_value[name] = network.value(result.next_value[name])
            if name in result.value:
                result.features[name] = result.value[name]
                result.value[name] = network.value_given(result.value[name], others[name])
        return result

    def loss(self, batch: ReplayBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """See :class:`~marl_lightning.algorithms.q_learning.QLearningModule`; adds that of the learned responses."""
        online = self.agent_values(self.networks, batch)
        with torch.no_grad():
            goal = self.target(batch, self.next_value(batch, online))
        loss, error, diagnostics = self.temporal_difference(batch, self.value(batch, online), goal)
        surprise = self._surprise(online, batch.steps[batch.burn_in :])
        if surprise is not None:
            weight = self.weight(batch)
            loss = loss + self._mean(surprise * batch.weight.unsqueeze(-1), weight)
            diagnostics["response_loss"] = weighted_mean(surprise, weight)
        return loss, error, diagnostics

    def next_value(self, batch: ReplayBatch, online: AgentValues) -> Tensor:
        """Returns ``[L, N, A]``, what the acting policy makes of the successors by the target networks."""
        if self.networks.kind == "epsilon":
            return super().next_value(batch, online)
        target = self.agent_values(self.target_networks, batch)
        chooser = online if self.hparams.double_q else target
        mask = action_masks(batch.steps[batch.burn_in :][schema.NEXT])
        values = {}
        for name, value in target.next_value.items():
            logits = (chooser.next_value[name] / max(self.networks.rate, 1e-8)).masked_fill(~mask[name], -torch.inf)
            values[name] = (torch.softmax(logits, -1) * value).sum(-1)
        return join(values)

    def _surprise(self, online: AgentValues, steps: TensorDict) -> Tensor | None:
        """Returns ``-log p(o | a)`` ``[L, N, A]`` of what the others did, ``None`` if nothing is learned of it."""
        networks = self.networks
        if not any(network.learns_response for network in networks.values()):
            return None
        others = self.others_actions(steps)
        return join(
            {
                name: network.response_loss(online.features[name], steps[name, schema.ACTION], others[name])
                for name, network in networks.items()
            }
        )

    def _mean(self, loss: Tensor, weight: Tensor) -> Tensor:
        """Returns the mean of losses ``[L, N, A]`` over what counts, of each agent if they share nothing."""
        if not self._is_separate:
            return weighted_mean(loss, weight)
        return ((weight * loss).sum((0, 1)) / weight.sum((0, 1)).clamp(min=1)).sum()
