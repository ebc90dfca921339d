"""Coordination graphs: values of joint actions as sums over agents and pairs, and the search for the best one.

Guestrin et al. 2002, "Coordinated reinforcement learning"; Boehmer et al. 2020, "Deep coordination graphs". Agents of
all groups are numbered one after another, ``V`` in all; ``n`` is the largest number of actions, and the actions that an
agent does not have count as illegal.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from marl_lightning.losses.td import ILLEGAL_VALUE, take
from marl_lightning.nn.linear import AgentLinear

Topology = Literal["full", "line", "cycle", "star", "none"]


def graph_edges(topology: Topology, num_agents: int) -> Tensor:
    """Returns the edges ``[2, E]`` int64, each once, from the lower to the higher number."""
    agents = range(num_agents)
    pairs = {
        "full": [(i, j) for i in agents for j in agents if i < j],
        "line": [(i, i + 1) for i in agents[:-1]],
        "cycle": [(i, i + 1) for i in agents[:-1]] + ([(0, num_agents - 1)] if num_agents > 2 else []),
        "star": [(0, i) for i in agents[1:]],
        "none": [],
    }[topology]
    return torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).T.contiguous()


def graph_value(utility: Tensor, payoff: Tensor, edges: Tensor, action: Tensor) -> Tensor:
    """Returns ``[..., 1]``: the mean utility of the agents plus the mean payoff of the edges (equation 3).

    Args:
        utility: ``[..., V, n]``.
        payoff: ``[..., E, n, n]``, rows for the action of the edge's first agent.
        edges: ``[2, E]``.
        action: ``[..., V]``.
    """
    value = take(utility, action).mean(-1, keepdim=True)
    if edges.shape[1]:
        pair = action[..., edges[0]] * payoff.shape[-1] + action[..., edges[1]]
        value = value + take(payoff.flatten(-2), pair).mean(-1, keepdim=True)
    return value


@torch.no_grad()
def best_joint_action(
    utility: Tensor, payoff: Tensor, edges: Tensor, mask: Tensor, *, rounds: int
) -> tuple[Tensor, Tensor]:
    """Looks for the legal joint action of the largest :func:`graph_value` by passing messages (max-plus).

    ::

        mu_ij(a_j) = max_{a_i} f_i(a_i) / V + f_ij(a_i, a_j) / E + sum_{k != j} mu_ki(a_i)  -  mean over a_j

    All maxima and means are over legal actions. After each round every agent chooses by its utility and the messages
    it got, and the best joint action of all rounds is returned (the *anytime* extension of Kok and Vlassis 2006). On a
    graph without cycles it is the best there is, once there are as many rounds as the longest path has edges.

    Args:
        utility: ``[..., V, n]``.
        payoff: ``[..., E, n, n]``.
        edges: ``[2, E]``.
        mask: ``[..., V, n]`` bool, legal actions, at least one an agent.
        rounds: of messages; without any, agents choose by their utilities alone.

    Returns:
        Actions ``[..., V]``, and the agents' utilities with the messages of the last round ``[..., V, n]``.
    """
    num_agents, num_edges = utility.shape[-2], edges.shape[1]
    own = (utility / num_agents).masked_fill(~mask, ILLEGAL_VALUE)
    belief, action = own, own.argmax(-1)
    if not num_edges:
        return action, belief
    value = graph_value(utility, payoff, edges, action)
    # Messages go along every edge both ways: [..., 2E, from, to].
    sender, receiver = torch.cat((edges[0], edges[1])), torch.cat((edges[1], edges[0]))
    both_ways = torch.cat((payoff, payoff.transpose(-1, -2)), -3) / num_edges
    legal = mask[..., receiver, :]
    num_legal = legal.sum(-1, keepdim=True)
    message = torch.zeros_like(belief[..., receiver, :])
    for _ in range(rounds):
        answer = message.roll(num_edges, -2)  # what the receiver of a message sent back
        known = belief[..., sender, :] - answer
        message = (known.unsqueeze(-1) + both_ways).amax(-2).masked_fill(~legal, 0.0)
        message = (message - message.sum(-1, keepdim=True) / num_legal).masked_fill_(~legal, 0.0)
        belief = own.index_add(-2, receiver, message)
        candidate = belief.argmax(-1)
        candidate_value = graph_value(utility, payoff, edges, candidate)
        better = candidate_value > value
        action, value = torch.where(better, candidate, action), torch.where(better, candidate_value, value)
    return action, belief


class PayoffNetwork(nn.Module):
    """Payoffs of the edges, from the features of both agents (Boehmer et al. 2020, section 3.1).

    The same whichever agent of an edge comes first: ``f_ij(a, b) = (g(h_i, h_j)[a, b] + g(h_j, h_i)[b, a]) / 2``.

    Args:
        edges: ``[2, E]``.
        feature_size: ``F``.
        num_actions: ``n``.
        hidden_size: width of the hidden layer.
        rank: payoff matrices are sums of this many outer products; ``None`` does not restrict them.
        share_parameters: one network for all edges, or one each.
    """

    def __init__(
        self,
        *,
        edges: Tensor,
        feature_size: int,
        num_actions: int,
        hidden_size: int,
        rank: int | None,
        share_parameters: bool,
    ):
        super().__init__()
        self.register_buffer("edges", edges, persistent=False)
        self.num_actions, self.rank = num_actions, rank
        stack = None if share_parameters else edges.shape[1]
        outputs = num_actions**2 if rank is None else 2 * rank * num_actions
        self.hidden = AgentLinear(in_features=2 * feature_size, out_features=hidden_size, num_agents=stack)
        self.head = AgentLinear(in_features=hidden_size, out_features=outputs, num_agents=stack)

    def forward(self, features: Tensor) -> Tensor:
        """Returns ``[..., E, n, n]`` from the features of the agents, ``[..., V, F]``."""
        first, second = features[..., self.edges[0], :], features[..., self.edges[1], :]
        there = self._one_way(torch.cat((first, second), -1))
        back = self._one_way(torch.cat((second, first), -1))
        return (there + back.transpose(-1, -2)) / 2

    def _one_way(self, pair: Tensor) -> Tensor:
        out = self.head(torch.relu(self.hidden(pair))).float()
        if self.rank is None:
            return out.unflatten(-1, (self.num_actions, self.num_actions))
        left, right = out.unflatten(-1, (2, self.rank, self.num_actions)).unbind(-3)
        return left.transpose(-1, -2) @ right
