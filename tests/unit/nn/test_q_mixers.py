"""Mixers, joint values, coordination graphs and heads: identities, monotonicity and searches by brute force."""

import itertools

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from marl_lightning.envs.spec import EnvSpec, GroupSpec
from marl_lightning.nn.coordination_graph import PayoffNetwork, best_joint_action, graph_edges, graph_value
from marl_lightning.nn.joint_values import CounterfactualJointValue, JointValue
from marl_lightning.nn.mixers import (
    AttentionMixer,
    DuplexDuelingMixer,
    MonotonicMixer,
    ShapleyMixer,
    UnrestrictedMixer,
    one_hot,
)
from marl_lightning.nn.noisy import NoisyLinear, noise
from marl_lightning.nn.value_heads import DuelingHead, ExpectedCategorical, ExpectedValue, PlainHead

STATE, AGENTS, ACTIONS = 5, 3, 4
SEEDS = st.integers(0, 10_000)


def shaken(module):
    """Gives all parameters, those that start at 0 too, random values."""
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return module


def spec_of(*actions, agents=2):
    box = spaces.Box(-1.0, 1.0, (3,), np.float32)
    groups = {
        f"g{i}": GroupSpec(
            agents=tuple(f"g{i}_{a}" for a in range(agents)), observation_space=box, action_space=spaces.Discrete(n)
        )
        for i, n in enumerate(actions)
    }
    return EnvSpec(name="test/groups", groups=groups, state_size=STATE)


# Mixers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mixer", [MonotonicMixer, AttentionMixer])
@settings(max_examples=20, deadline=None)
@given(seed=SEEDS)
def test_monotonic_mixers_never_fall(mixer, seed):
    torch.manual_seed(seed)
    module = shaken(mixer(num_agents=AGENTS, state_size=STATE))
    value = torch.randn(10, AGENTS, requires_grad=True)
    module(value, torch.randn(10, STATE)).sum().backward()
    assert (value.grad >= 0).all()


def test_attention_by_hand():
    mixer = shaken(AttentionMixer(num_agents=2, state_size=1, num_heads=1, embedding_size=1, hypernet_size=None))
    with torch.no_grad():
        mixer.query.weight.fill_(1.0), mixer.query.bias.fill_(0.0)
        mixer.key.weight.copy_(torch.tensor([[0.0], [np.log(3.0)]]))
        mixer.head_weight.weight.fill_(-2.0), mixer.head_weight.bias.fill_(0.0)
        for parameter in mixer.offset.parameters():
            parameter.zero_()
    # Attention 1/4 and 3/4, head weight |-2|.
    assert mixer(torch.tensor([4.0, 8.0]), torch.ones(1)).item() == pytest.approx(2 * (1 + 6))


def test_the_unrestricted_mixer_may_fall():
    torch.manual_seed(0)
    mixer = shaken(UnrestrictedMixer(num_agents=AGENTS, state_size=STATE, hidden_size=16))
    value = torch.randn(50, AGENTS, requires_grad=True)
    mixer(value, torch.randn(50, STATE)).sum().backward()
    assert (value.grad < 0).any()
    assert (value.grad > 0).any()


def duplex(seed):
    torch.manual_seed(seed)
    mixer = DuplexDuelingMixer(num_agents=AGENTS, num_actions=AGENTS * ACTIONS, state_size=STATE, num_heads=2)
    return shaken(mixer).double()


def joint_values(mixer, value, state):
    """Returns the joint values of all joint actions of one state, as an array with one axis an agent."""
    actions = torch.tensor(list(itertools.product(range(ACTIONS), repeat=AGENTS)))
    chosen = value.expand(len(actions), -1, -1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)
    best = value.amax(-1).expand(len(actions), -1)
    joint = one_hot(actions, ACTIONS).flatten(-2).double()
    return mixer(chosen, best, joint, state.expand(len(actions), -1)).reshape((ACTIONS,) * AGENTS)


@settings(max_examples=20, deadline=None)
@given(seed=SEEDS)
def test_duplex_dueling_identities(seed):
    mixer = duplex(seed)
    value, best, state = (
        torch.randn(6, AGENTS).double(),
        torch.randn(6, AGENTS).double().abs() + 5,
        torch.randn(6, STATE),
    )
    state = state.double()
    action = one_hot(torch.randint(ACTIONS, (6, AGENTS)), ACTIONS).flatten(-2).double()
    importance = mixer.importance(action, state)
    assert (importance > 0).all()
    weight, bias = mixer.weight(state).abs() + 1e-10, mixer.bias(state)
    state_value, advantage = weight * best + bias, weight * (value - best)
    expected = (state_value + importance * advantage).sum(-1, keepdim=True)
    torch.testing.assert_close(mixer(value, best, action, state), expected)
    # At the best actions, there is nothing but the state values.
    torch.testing.assert_close(mixer(best, best, action, state), state_value.sum(-1, keepdim=True))


@settings(max_examples=20, deadline=None)
@given(seed=SEEDS)
def test_the_agents_best_actions_are_the_best_joint_action_of_duplex_dueling(seed):
    mixer = duplex(seed)
    value, state = torch.randn(AGENTS, ACTIONS).double(), torch.randn(STATE).double()
    with torch.no_grad():
        joint = joint_values(mixer, value, state)
    best = np.unravel_index(int(joint.argmax()), joint.shape)
    assert list(best) == value.argmax(-1).tolist()


def test_duplex_dueling_by_hand():
    mixer = DuplexDuelingMixer(num_agents=2, num_actions=4, state_size=1, num_heads=1, hypernet_size=None)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.zero_()
        mixer.weight.bias.copy_(torch.tensor([2.0, -3.0]))
        mixer.bias.bias.copy_(torch.tensor([0.5, 0.25]))
        mixer.key.bias.fill_(-4.0)  # lambda = 4 * 1/2 * 1/2 = 1 for all, but more for the first agent's action 1:
        mixer.action.weight[0, 1 + 1] = float(np.log(3.0))  # sigmoid 3/4, lambda 3/2
    value, best = torch.tensor([1.0, 2.0]), torch.tensor([5.0, 2.0])
    action = torch.tensor([0.0, 1.0, 1.0, 0.0])
    # V' = 10.5 and 6.25, A' = -8 and 0.
    assert mixer(value, best, action, torch.ones(1)).item() == pytest.approx(10.5 + 6.25 - 1.5 * 8)


def test_duplex_dueling_passes_no_gradient_by_advantages():
    mixer = duplex(0)
    value = torch.randn(1, AGENTS).double().requires_grad_()
    state = torch.randn(1, STATE).double()
    mixer(value, value.detach() + 1, torch.zeros(1, AGENTS * ACTIONS).double(), state).sum().backward()
    torch.testing.assert_close(value.grad, mixer.weight(state).abs().detach() + 1e-10)


def test_shapley_weights():
    torch.manual_seed(0)
    mixer = shaken(ShapleyMixer(state_size=STATE, num_samples=4))
    value, state = torch.randn(7, AGENTS), torch.randn(7, STATE)
    everyone = torch.ones(7, AGENTS, dtype=torch.bool)
    torch.testing.assert_close(mixer(value, everyone, state), value.sum(-1, keepdim=True))
    assert (mixer.alpha(value, state) >= 1).all()


def test_shapley_coalitions_by_hand():
    mixer = ShapleyMixer(state_size=1, num_samples=4000)
    mixer.coalition_value.forward = lambda pair, state: pair[..., :1]  # F is the mean of those before
    torch.manual_seed(0)
    alpha = mixer.alpha(torch.tensor([1.0, 2.0, 6.0]), torch.ones(1))
    # Before agent 0 are, with equal chances: nobody (1/3), 1 or 2 alone (1/6 each), or both (1/3).
    expected = 1 + np.array([(2 + 6) / 6 + 4 / 3, (1 + 6) / 6 + 3.5 / 3, (1 + 2) / 6 + 1.5 / 3])
    assert alpha.tolist() == pytest.approx(expected.tolist(), abs=0.15)


@pytest.mark.parametrize(
    "make",
    [
        lambda: MonotonicMixer(num_agents=2, state_size=0),
        lambda: AttentionMixer(num_agents=2, state_size=0),
        lambda: UnrestrictedMixer(num_agents=2, state_size=0),
        lambda: DuplexDuelingMixer(num_agents=2, num_actions=4, state_size=0),
        lambda: ShapleyMixer(state_size=0),
    ],
)
def test_mixers_need_a_state(make):
    with pytest.raises(ValueError, match="needs a global state"):
        make()


# Joint values --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("kind", [JointValue, CounterfactualJointValue])
def test_joint_values_of_several_groups(kind, share):
    torch.manual_seed(0)
    spec = spec_of(3, 2)
    module = kind(spec=spec, feature_size=6, embedding_size=8, share_parameters=share)
    features = {name: torch.randn(4, 5, 2, 6) for name in spec.groups}
    action = {name: torch.randint(group.action_size, (4, 5, 2)) for name, group in spec.groups.items()}
    value = module(features, action, torch.randn(4, 5, STATE))
    assert value.shape == (4, 5, 1 if kind is JointValue else 4)


def test_counterfactual_values_do_not_see_the_own_action_but_the_others():
    torch.manual_seed(0)
    spec = spec_of(3, 2)
    module = shaken(CounterfactualJointValue(spec=spec, feature_size=6, embedding_size=8, share_parameters=True))
    features = {name: torch.randn(2, 6) for name in spec.groups}
    state = torch.randn(STATE)
    before = module.of_own_actions(features, {"g0": torch.tensor([0, 1]), "g1": torch.tensor([0, 0])}, state)
    after = module.of_own_actions(features, {"g0": torch.tensor([2, 1]), "g1": torch.tensor([0, 0])}, state)
    torch.testing.assert_close(before["g0"][0], after["g0"][0])
    assert (before["g0"][1] - after["g0"][1]).abs().min() > 1e-4
    assert (before["g1"] - after["g1"]).abs().min() > 1e-4


# Coordination graphs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("topology", "expected"),
    [
        ("full", [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]]),
        ("line", [[0, 1], [1, 2], [2, 3]]),
        ("cycle", [[0, 1], [1, 2], [2, 3], [0, 3]]),
        ("star", [[0, 1], [0, 2], [0, 3]]),
        ("none", []),
    ],
)
def test_edges(topology, expected):
    assert graph_edges(topology, 4).T.tolist() == expected


def test_two_agents_have_one_edge_and_one_has_none():
    assert all(graph_edges(kind, 2).T.tolist() == [[0, 1]] for kind in ("full", "line", "cycle", "star"))
    assert all(graph_edges(kind, 1).shape == (2, 0) for kind in ("full", "line", "cycle", "star", "none"))


def test_graph_value_by_hand():
    utility = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    payoff = torch.tensor([[[10.0, 20.0], [30.0, 40.0]], [[50.0, 60.0], [70.0, 80.0]]])
    value = graph_value(utility, payoff, graph_edges("line", 3), torch.tensor([0, 1, 0]))
    assert value.item() == pytest.approx((1 + 4 + 5) / 3 + (20 + 70) / 2)


def random_graph(seed, topology, agents, rows=20):
    generator = torch.Generator().manual_seed(seed)
    edges = graph_edges(topology, agents)
    utility = torch.randn(rows, agents, ACTIONS, generator=generator)
    payoff = 3 * torch.randn(rows, edges.shape[1], ACTIONS, ACTIONS, generator=generator)
    mask = torch.rand(rows, agents, ACTIONS, generator=generator) < 0.6
    mask.scatter_(-1, torch.randint(ACTIONS, (rows, agents, 1), generator=generator), True)
    return utility, payoff, edges, mask


def brute_force(utility, payoff, edges, mask):
    """Returns the largest values of legal joint actions, and these actions."""
    actions = torch.tensor(list(itertools.product(range(ACTIONS), repeat=utility.shape[1])))
    values, best = [], []
    for row in range(len(utility)):
        legal = mask[row].gather(-1, actions.T).all(0)
        value = graph_value(
            utility[row].expand(len(actions), -1, -1), payoff[row].expand(len(actions), -1, -1, -1), edges, actions
        ).squeeze(-1)
        value = value.masked_fill(~legal, -torch.inf)
        values.append(value.max())
        best.append(actions[value.argmax()])
    return torch.stack(values), torch.stack(best)


@pytest.mark.parametrize(
    ("topology", "agents", "rounds"), [("line", 5, 4), ("star", 5, 2), ("none", 3, 0), ("full", 2, 1)]
)
def test_message_passing_is_exact_without_cycles(topology, agents, rounds):
    graph = random_graph(0, topology, agents)
    action, _ = best_joint_action(*graph, rounds=rounds)
    _, expected = brute_force(*graph)
    assert torch.equal(action, expected)


@pytest.mark.parametrize("topology", ["full", "cycle"])
def test_message_passing_with_cycles_is_legal_good_and_never_gets_worse(topology):
    utility, payoff, edges, mask = random_graph(1, topology, 4, rows=60)
    best, _ = brute_force(utility, payoff, edges, mask)
    values = []
    for rounds in (0, 1, 2, 4, 8):
        action, _ = best_joint_action(utility, payoff, edges, mask, rounds=rounds)
        assert mask.gather(-1, action.unsqueeze(-1)).all()
        values.append(graph_value(utility, payoff, edges, action).squeeze(-1))
    assert all((later >= earlier).all() for earlier, later in itertools.pairwise(values))
    assert torch.isclose(values[-1], best).float().mean() > 0.8
    assert torch.isclose(values[0], best).float().mean() < 0.5


def test_illegal_actions_do_not_count_however_good_they_are():
    utility, payoff, edges, mask = random_graph(2, "line", 3)
    # A huge payoff of an illegal action must not lure its neighbour.
    payoff = payoff + 1e4 * (~mask[:, edges[0]]).unsqueeze(-1).float() * torch.rand(20, 2, ACTIONS, ACTIONS)
    action, _ = best_joint_action(utility, payoff, edges, mask, rounds=2)
    assert torch.equal(action, brute_force(utility, payoff, edges, mask)[1])


@pytest.mark.parametrize("rank", [None, 2])
@pytest.mark.parametrize("share", [True, False])
def test_payoffs_are_the_same_from_both_ends(share, rank):
    torch.manual_seed(0)
    options = {"feature_size": 6, "num_actions": ACTIONS, "hidden_size": 8, "rank": rank, "share_parameters": share}
    network = shaken(PayoffNetwork(edges=graph_edges("full", 3), **options))
    features = torch.randn(5, 3, 6)
    payoff = network(features)
    assert payoff.shape == (5, 3, ACTIONS, ACTIONS)
    network.edges = network.edges.flip(0)
    torch.testing.assert_close(network(features), payoff.transpose(-1, -2))


def test_rank_of_payoffs():
    torch.manual_seed(0)
    options = {"feature_size": 6, "num_actions": ACTIONS, "hidden_size": 8, "share_parameters": True}
    network = shaken(PayoffNetwork(edges=graph_edges("full", 2), rank=1, **options))
    assert torch.linalg.matrix_rank(network(torch.randn(1, 2, 6)).double(), atol=1e-4).item() == 2  # one a direction


# Heads ---------------------------------------------------------------------------------------------------------------


def test_dueling_by_hand():
    head = DuelingHead(in_features=1, num_actions=3, num_agents=None)
    with torch.no_grad():
        head.value.linear.bias.fill_(5.0)
        head.advantage.linear.bias.copy_(torch.tensor([1.0, 2.0, 6.0]))
    assert head(torch.zeros(1)).squeeze(-1).tolist() == [3, 4, 8]


def test_means_of_distributions():
    head = PlainHead(in_features=1, num_actions=2, num_atoms=3, num_agents=None)
    with torch.no_grad():
        head.linear.bias.copy_(torch.tensor([0.0, 0.0, np.log(2.0), 1.0, 2.0, 6.0]))
    features = torch.zeros(4, 1)
    assert ExpectedValue(head)(features)[0].tolist() == pytest.approx([np.log(2.0) / 3, 3.0])
    assert ExpectedCategorical(head, torch.tensor([-1.0, 0.0, 1.0]))(features)[0, 0].item() == pytest.approx(0.25)


@pytest.mark.parametrize("agents", [None, 3])
def test_noise_has_the_factorised_distribution(agents):
    layer = NoisyLinear(in_features=2, out_features=1, num_agents=agents, initial_noise=1.0)
    x = torch.tensor([3.0, 4.0]).expand(20_000, 3, 2)
    with noise(layer, enabled=True, generator=torch.Generator().manual_seed(0)), torch.no_grad():
        out = layer(x)
    with noise(layer, enabled=False), torch.no_grad():
        mean = layer(x)
    # Var f(e) = E|e| = sqrt(2 / pi), and scales are 1 / sqrt(2).
    second = np.sqrt(2 / np.pi)
    assert torch.equal(mean[0], mean[1])
    assert (out - mean).mean().abs() < 0.05
    assert (out - mean).var().item() == pytest.approx((second**2 * (9 + 16) + second) / 2, rel=0.05)
    assert np.corrcoef((out - mean)[:, 0, 0], (out - mean)[:, 1, 0])[0, 1] == pytest.approx(0, abs=0.05)


def test_noise_comes_from_the_given_generator_and_is_switched_back():
    layer = NoisyLinear(in_features=2, out_features=2)

    def draw(seed):
        with noise(layer, enabled=True, generator=torch.Generator().manual_seed(seed)):
            return layer(torch.ones(2))

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    with noise(layer, enabled=False):
        assert not layer.is_noisy
    assert layer.is_noisy
    assert layer.generator is None
