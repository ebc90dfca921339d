"""Deep coordination graphs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from marl_lightning.algorithms.base import with_defaults
from marl_lightning.algorithms.q_learning import (
    AgentValues,
    QLearningModule,
    QPolicy,
    action_masks,
    actions,
    exploration_probabilities,
)
from marl_lightning.data import schema
from marl_lightning.data.replay import ReplayBatch
from marl_lightning.data.schema import RecurrentState
from marl_lightning.envs.base import Observations
from marl_lightning.envs.spec import EnvSpec
from marl_lightning.nn.coordination_graph import (
    PayoffNetwork,
    Topology,
    best_joint_action,
    graph_edges,
    graph_value,
)
from marl_lightning.nn.joint_values import StateValue
from marl_lightning.nn.mixers import one_hot
from marl_lightning.validation import NonNegativeInt, PositiveInt, extends


class CoordinationGraph(nn.Module):
    """Makes joint values of utilities, which are the agents' own values, and of payoffs of pairs of agents.

    Agents of all groups are in one graph, numbered group after group. If there are several, a network that is shared by
    their edges is also told the groups.

    Args:
        spec: the environment.
        topology: which pairs have a payoff: all (``"full"``), neighbours on a ``"line"`` or a ``"cycle"``, the first
            agent and each other (``"star"``), or ``"none"``.
        rounds: of messages, see :func:`~marl_lightning.nn.coordination_graph.best_joint_action`.
        feature_size: of the agents' features.
        payoff_size: hidden width of the payoff network.
        payoff_rank: see :class:`~marl_lightning.nn.coordination_graph.PayoffNetwork`.
        share_parameters: one payoff network for all edges, or one each.
        offset: added to joint values, by the state; ``None`` without one.
    """

    def __init__(
        self,
        *,
        spec: EnvSpec,
        topology: Topology,
        rounds: int,
        feature_size: int,
        payoff_size: int,
        payoff_rank: int | None,
        share_parameters: bool,
        offset: StateValue | None,
    ):
        super().__init__()
        self.rounds = rounds
        self.group_sizes = {name: group.num_agents for name, group in spec.groups.items()}
        self.num_actions = max(group.action_size for group in spec.groups.values())
        self.offset = offset
        self.register_buffer("edges", graph_edges(topology, spec.num_agents), persistent=False)
        groups = [i for i, group in enumerate(spec.groups.values()) for _ in group.agents]
        told = share_parameters and len(spec.groups) > 1
        identity = one_hot(torch.tensor(groups), len(spec.groups)) if told else torch.zeros(spec.num_agents, 0)
        self.register_buffer("identity", identity, persistent=False)
        self.payoffs = None
        if self.edges.shape[1]:
            self.payoffs = PayoffNetwork(
                edges=self.edges,
                feature_size=feature_size + identity.shape[1],
                num_actions=self.num_actions,
                hidden_size=payoff_size,
                rank=payoff_rank,
                share_parameters=share_parameters,
            )

    def forward(
        self, value: Mapping[str, Tensor], features: Mapping[str, Tensor], action: Mapping[str, Tensor], state: Tensor
    ) -> Tensor:
        """Returns the values ``[..., 1]`` of joint actions.

        Args:
            value: by group ``[..., A, n]``, the utilities.
            features: by group ``[..., A, F]``.
            action: by group ``[..., A]``.
            state: ``[..., S]``.
        """
        utility, payoff = self._functions(value, features)
        total = graph_value(utility, payoff, self.edges, torch.cat([action[name] for name in self.group_sizes], -1))
        return total if self.offset is None else total + self.offset(state)

    @torch.no_grad()
    def best(
        self, value: Mapping[str, Tensor], features: Mapping[str, Tensor], mask: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Returns by group the best legal actions that were found, ``[..., A]``, and beliefs ``[..., A, n]``.

        A belief is what the best joint action with an action of one's own seems to be worth, up to a constant.
        """
        utility, payoff = self._functions(value, features)
        legal = torch.cat([self._padded(mask[name]) for name in self.group_sizes], -2)
        action, belief = best_joint_action(utility, payoff, self.edges, legal, rounds=self.rounds)
        sizes = list(self.group_sizes.values())
        actions = dict(zip(self.group_sizes, action.split(sizes, -1), strict=True))
        beliefs = dict(zip(self.group_sizes, belief.split(sizes, -2), strict=True))
        return actions, {name: x[..., : value[name].shape[-1]] for name, x in beliefs.items()}

    def _functions(self, value: Mapping[str, Tensor], features: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        utility = torch.cat([self._padded(value[name]) for name in self.group_sizes], -2)
        if self.payoffs is None:
            return utility, utility.new_zeros(*utility.shape[:-2], 0, self.num_actions, self.num_actions)
        joined = torch.cat([features[name] for name in self.group_sizes], -2)
        return utility, self.payoffs(torch.cat((joined, self.identity.expand(*joined.shape[:-1], -1)), -1))

    def _padded(self, x: Tensor) -> Tensor:
        return pad(x, (0, self.num_actions - x.shape[-1]))


class CoordinatedPolicy(QPolicy):
    """Acts by the best joint action of a coordination graph, for which agents pass messages while they act.

    When exploring, an agent replaces its part of it at random, or chooses by its belief (Boltzmann).
    """

    def __init__(self, networks: QPolicy, graph: CoordinationGraph):
        super().__init__()
        self.update(networks)
        self._graph = (graph,)  # in a tuple, as it is no network of a group and belongs to the module

    def act(
        self,
        observations: Observations[Tensor],
        state: RecurrentState,
        is_first: Tensor,
        *,
        deterministic: bool = False,
        generator: torch.Generator | None = None,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], RecurrentState]:
        """See :class:`~marl_lightning.algorithms.base.Policy`."""
        actions, beliefs, next_state = self._joint_action(observations, state, is_first)
        if not deterministic:
            masks = observations.action_mask
            actions = {name: self._explore(belief, masks[name], generator) for name, belief in beliefs.items()}
        return actions, {name: torch.zeros_like(belief[..., 0]) for name, belief in beliefs.items()}, next_state

    def action_probabilities(
        self,
        observations: Observations[Tensor],
        state: RecurrentState,
        is_first: Tensor,
        *,
        deterministic: bool = False,
    ) -> tuple[dict[str, Tensor], RecurrentState]:
        """See :class:`~marl_lightning.algorithms.base.StochasticPolicy`.

        They depend on the observations of all agents, between whom messages pass.
        """
        actions, beliefs, next_state = self._joint_action(observations, state, is_first)
        if deterministic:
            return {name: one_hot(actions[name], x.shape[-1]) for name, x in beliefs.items()}, next_state
        masks = observations.action_mask
        return {
            name: exploration_probabilities(belief, masks[name], kind=self.kind, rate=self.rate)
            for name, belief in beliefs.items()
        }, next_state

    def _joint_action(
        self, observations: Observations[Tensor], state: RecurrentState, is_first: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], RecurrentState]:
        """Returns by group the best joint action, values to explore by, and the next recurrent state."""
        value, features, next_state = {}, {}, dict(state)
        for name, network in self.items():
            key, inputs = f"q/{name}", network.inputs(observations.observation[name])
            q, x, states = network(inputs.unsqueeze(0), state.get(key), is_first.unsqueeze(0))
            value[name], features[name] = q[0], x[0]
            if key in state:
                next_state[key] = states[0]
        actions, beliefs = self._graph[0].best(value, features, observations.action_mask)
        if self.kind == "epsilon":  # keep the joint action where nothing is drawn
            beliefs = {name: one_hot(actions[name], x.shape[-1]) for name, x in beliefs.items()}
        return actions, beliefs, next_state


class DCG(QLearningModule):
    """Deep coordination graphs (Boehmer et al. 2020): joint values have a term for each agent and each pair of them.

    ::

        Q(s, u) = 1/V sum_i f_i(u_i) + 1/E sum_ij f_ij(u_i, u_j)  [+ V(s)]

    The best joint action is looked for by passing messages, for targets and for acting: agents have to communicate
    when they act. Illegal actions are left out of every maximum.

    Args:
        topology: which pairs of agents have a payoff: ``"full"``, ``"line"``, ``"cycle"``, ``"star"`` or ``"none"``.
        rounds: of messages; enough are as many as the longest path of the graph has edges.
        payoff_size: hidden width of the payoff network.
        payoff_rank: payoff matrices are sums of this many outer products; ``None`` does not restrict them.
        state_value: add a value of the state (DCG-S).
        **inherited: see :class:`~marl_lightning.algorithms.q_learning.QLearningModule`.
    """

    is_joint = True

    @extends(QLearningModule.__init__)
    def __init__(
        self,
        *,
        topology: Topology = "full",
        rounds: NonNegativeInt = 8,
        payoff_size: PositiveInt = 64,
        payoff_rank: PositiveInt | None = None,
        state_value: bool = False,
    ) -> None: ...

    def build(self, spec: EnvSpec) -> None:
        super().build(spec)
        self.networks = CoordinatedPolicy(self.networks, self.mixer)

    def build_mixer(self, spec: EnvSpec) -> CoordinationGraph:
        hp = self.hparams
        return CoordinationGraph(
            spec=spec,
            topology=hp.topology,
            rounds=hp.rounds,
            feature_size=hp.hidden_sizes[-1],
            payoff_size=hp.payoff_size,
            payoff_rank=hp.payoff_rank,
            share_parameters=hp.share_parameters,
            offset=StateValue(state_size=spec.state_size, hidden_sizes=(hp.payoff_size,)) if hp.state_value else None,
        )

    def value(self, batch: ReplayBatch, online: AgentValues) -> Tensor:
        steps = batch.steps[batch.burn_in :]
        return self.mixer(online.value, online.features, actions(steps, self.networks), steps[schema.STATE])

    def next_value(self, batch: ReplayBatch, online: AgentValues) -> Tensor:
        following = batch.steps[batch.burn_in :][schema.NEXT]
        target = self.agent_values(self.target_networks, batch)
        graph, chooser = (self.mixer, online) if self.hparams.double_q else (self.target_mixer, target)
        action, _ = graph.best(chooser.next_value, chooser.next_features, action_masks(following))
        return self.target_mixer(target.next_value, target.next_features, action, following[schema.STATE])


class DCGS(DCG):
    """DCG-S (Boehmer et al. 2020): :class:`DCG` with a value of the state. Arguments as there."""

    __init__ = with_defaults(DCG.__init__, state_value=True)
