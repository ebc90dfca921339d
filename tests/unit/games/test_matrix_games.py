"""NashConv in normal form: numbers by hand, OpenSpiel as oracle, batches, gradients, and native games."""

import itertools

import numpy as np
import pytest
import torch
from game_policies import Fixed, Uniform

from marl_lightning.envs import make_vector_env
from marl_lightning.envs.wrappers import AddAgentID, AggregateReward
from marl_lightning.games import MatrixEvaluator, matrix, nash_conv

ROCK_PAPER_SCISSORS = torch.tensor([[0.0, -1, 1], [1, 0, -1], [-1, 1, 0]], dtype=torch.float64)
RPS = torch.stack([ROCK_PAPER_SCISSORS, -ROCK_PAPER_SCISSORS])
PENNIES = torch.tensor([[[1.0, -1], [-1, 1]], [[-1.0, 1], [1, -1]]], dtype=torch.float64)


def pair(p: float, q: float) -> list[torch.Tensor]:
    """Strategies of two players with two actions."""
    return [torch.tensor([x, 1 - x], dtype=torch.float64) for x in (p, q)]


@pytest.mark.parametrize(
    ("p", "q", "expected"), [(0.5, 0.5, 0), (0.6, 0.5, 0.2), (0.9, 0.9, 1.6), (1, 0, 2), (1, 1, 2)]
)
def test_matching_pennies(p, q, expected):
    assert matrix.nash_conv(PENNIES, pair(p, q)).item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("actions", list(itertools.product(range(3), repeat=2)))
def test_any_pure_profile_of_rock_paper_scissors(actions):
    profile = [torch.eye(3, dtype=torch.float64)[action] for action in actions]
    assert matrix.nash_conv(RPS, profile).item() == 2


def test_what_it_is_made_of():
    """Matching pennies at p = 0.6, q = 0.5: only the second player can gain, 0.2 by playing tails."""
    profile = pair(0.6, 0.5)
    first, second = matrix.deviation_payoffs(PENNIES, profile)
    assert first.tolist() == pytest.approx([0, 0])
    assert second.tolist() == pytest.approx([-0.2, 0.2])
    assert matrix.expected_payoffs(PENNIES, profile).tolist() == pytest.approx([0, 0])
    assert matrix.deviation_gains(PENNIES, profile).tolist() == pytest.approx([0, 0.2])


@pytest.mark.parametrize("sizes", [(4,), (2, 3), (3, 2, 4), (2, 2, 3, 2)])
def test_against_loops_over_joint_actions(sizes):
    rng = np.random.default_rng(len(sizes))
    payoffs = rng.normal(size=(len(sizes), *sizes))
    profile = [rng.dirichlet(np.ones(n)) for n in sizes]

    def payoff(player, strategies):
        return sum(
            payoffs[(player, *joint)] * np.prod([s[a] for s, a in zip(strategies, joint, strict=True)])
            for joint in itertools.product(*map(range, sizes))
        )

    expected = []
    for player, n in enumerate(sizes):
        deviations = [[*profile[:player], np.eye(n)[action], *profile[player + 1 :]] for action in range(n)]
        expected.append(max(payoff(player, d) for d in deviations) - payoff(player, profile))
    found = matrix.deviation_gains(torch.tensor(payoffs), [torch.tensor(strategy) for strategy in profile])
    assert found.tolist() == pytest.approx(expected)
    means = matrix.expected_payoffs(torch.tensor(payoffs), [torch.tensor(strategy) for strategy in profile])
    assert means.tolist() == pytest.approx([payoff(player, profile) for player in range(len(sizes))])


def test_batches_are_rows():
    torch.manual_seed(0)
    payoffs = torch.randn(3, 2, 3, 2, dtype=torch.float64)
    profile = [torch.rand(5, 4, n, dtype=torch.float64).softmax(-1) for n in (2, 3, 2)]
    found = matrix.nash_conv(payoffs, profile)
    assert found.shape == (5, 4)
    for row, column in itertools.product(range(5), range(4)):
        alone = matrix.nash_conv(payoffs, [strategy[row, column] for strategy in profile])
        assert found[row, column].item() == pytest.approx(alone.item())
    broadcast = matrix.nash_conv(payoffs, [profile[0], profile[1][0, 0], profile[2][:1, :1]])
    assert broadcast.shape == (5, 4)


def test_gradients():
    """With q = 1/2, NashConv of matching pennies is what the second player gains, ``|2 p - 1|``."""
    p = torch.tensor(0.6, dtype=torch.float64, requires_grad=True)
    profile = [torch.stack([p, 1 - p]), torch.tensor([0.5, 0.5], dtype=torch.float64)]
    matrix.nash_conv(PENNIES, profile).backward()
    assert p.grad.item() == pytest.approx(2)
    logits = [torch.randn(n, dtype=torch.float64, requires_grad=True) for n in (3, 3)]
    assert torch.autograd.gradcheck(lambda x, y: matrix.nash_conv(RPS, [x.softmax(-1), y.softmax(-1)]), logits)


def test_descent_finds_the_equilibrium():
    torch.manual_seed(0)
    logits = [torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    optimizer = torch.optim.Adam(logits, lr=0.02)
    for _ in range(500):
        optimizer.zero_grad()
        loss = matrix.nash_conv(RPS, [x.softmax(-1) for x in logits])
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05


def test_against_openspiel():
    pyspiel = pytest.importorskip("pyspiel")
    from openspiel_oracle import TabularPolicy
    from openspiel_oracle import nash_conv as openspiel_nash_conv

    rng = np.random.default_rng(0)
    for name in ("matrix_pd", "matrix_bos", "matrix_brps", "matrix_sh", "matrix_cd", "matching_pennies_3p"):
        game = pyspiel.load_game(name)
        sizes = [game.num_distinct_actions()] * game.num_players()
        payoffs = np.zeros((game.num_players(), *sizes))
        for joint in itertools.product(*map(range, sizes)):
            state = game.new_initial_state()
            state.apply_actions(list(joint))
            payoffs[(slice(None), *joint)] = state.returns()
        profile = [rng.dirichlet(np.ones(n)) for n in sizes]
        in_turns = pyspiel.convert_to_turn_based(game)
        policy = TabularPolicy(in_turns)
        policy.action_probability_array[:] = profile  # one information state a player, in order
        expected = openspiel_nash_conv(in_turns, policy, return_only_nash_conv=False)
        result = nash_conv(profile, payoffs)
        assert result.value == pytest.approx(expected.nash_conv, abs=1e-12)
        assert list(result.gains.values()) == pytest.approx(expected.player_improvements.tolist(), abs=1e-12)


def test_payoffs_and_strategies_as_input():
    result = nash_conv([[0.6, 0.4], [0.5, 0.5]], PENNIES)
    assert result.value == pytest.approx(0.2)
    assert result.gains == pytest.approx({"player_0": 0, "player_1": 0.2})
    assert result.payoff_range == 2
    assert result.normalised == pytest.approx(0.1)
    assert nash_conv([[0.6, 0.4], [0.7, 0.3]], PENNIES, mode="greedy").value == 2


def test_bad_input():
    with pytest.raises(ValueError, match="with 2 axes of actions for 3 players"):
        matrix.nash_conv(torch.zeros(3, 2, 2), pair(0.5, 0.5))
    with pytest.raises(ValueError, match=r"\[3, 3\] actions, but their strategies are for \[2, 2\]"):
        matrix.nash_conv(RPS, pair(0.5, 0.5))
    with pytest.raises(ValueError, match="strategy of player 1 must be one distribution"):
        nash_conv([[0.5, 0.5], [0.5, 0.6]], PENNIES)
    with pytest.raises(ValueError, match="strategy of player 0 must be one distribution"):
        nash_conv([[float("nan"), 0.5], [0.5, 0.5]], PENNIES)
    with pytest.raises(TypeError, match="give the strategy of each player"):
        nash_conv(Uniform(), PENNIES)


# ------------------------------------------------------------------------------------------------- native matrix games


def test_a_repeated_game_of_rocks():
    """15 rounds of rock against rock: each could win every round."""
    env = make_vector_env("matrix/rock_paper_scissors", num_envs=3, episode_length=15)
    result = nash_conv(Fixed([[1, 0, 0], [1, 0, 0]]), env)
    assert result.value == 30
    assert result.gains == {"agent_0": 15, "agent_1": 15}
    assert result.best_response_values == {"agent_0": 15, "agent_1": 15}
    assert result.payoff_range == 30
    assert result.bound == "exact"


def test_the_dilemma_uniformly():
    """Row values are 1.5 and 3, of which uniform play gets 2.25: each gains 0.75 in each of 25 rounds."""
    env = make_vector_env("matrix/prisoners_dilemma", num_envs=2)
    result = nash_conv(Uniform(), env)
    assert result.value == pytest.approx(37.5)
    assert result.on_policy == pytest.approx({"agent_0": 56.25, "agent_1": 56.25})


def test_arguments_of_the_game_count():
    """At the joint action (0, 2) of penalty both get k, and either could have 10 instead."""
    profile = Fixed([[1, 0, 0], [0, 0, 1]])
    for k in (0.0, -100.0):
        env = make_vector_env("matrix/penalty", num_envs=1, k=k, episode_length=1)
        assert nash_conv(profile, env).value == 2 * (10 - k)


def test_greedy_mode():
    env = make_vector_env("matrix/matching_pennies", num_envs=1, episode_length=1)
    assert nash_conv(Uniform(), env).value == 0
    assert nash_conv(Uniform(), env, mode="greedy").value == 2


class Counting(Uniform):
    """Plays rock in its first steps, then uniformly; counts the steps in its memory."""

    def __init__(self, rocks):
        self.rocks = rocks

    def initial_state(self, num_envs):
        return {"step": torch.full((num_envs, 1), 7)}

    def action_probabilities(self, observations, state, is_first, *, deterministic=False):
        step = torch.where(is_first[:, None], 0, state["step"])
        rock = torch.tensor([1.0, 0, 0]).expand(len(step), 2, 3)
        return {"agents": torch.where(step[..., None] < self.rocks, rock, 1 / 3)}, {"step": step + 1}


def test_memory_changes_strategies_over_time():
    env = make_vector_env("matrix/rock_paper_scissors", num_envs=1, episode_length=5)
    assert nash_conv(Counting(3), env).value == pytest.approx(6)  # 2 in each of 3 steps
    assert nash_conv(Counting(0), env).value == pytest.approx(0)


class SeesItself(Uniform):
    """Needs the index of the agent behind the observation: the first plays rock, the second paper."""

    def action_probabilities(self, observations, state, is_first, *, deterministic=False):
        agent = observations.observation["agents"][..., 1:].argmax(-1)
        return {"agents": torch.nn.functional.one_hot(agent, 3).float()}, state


def test_wrappers_are_seen_and_rewards_are_the_games():
    env = make_vector_env("matrix/rock_paper_scissors", num_envs=4, episode_length=1)
    env = AggregateReward(AddAgentID(env))
    before = env.reset().observation["agents"].clone()
    result = nash_conv(SeesItself(), env)
    assert result.gains == {"agent_0": 2, "agent_1": 0}
    assert env.num_envs == 4
    assert torch.equal(env.reset().observation["agents"], before)


@pytest.mark.parametrize("name", ["mpe/simple_spread_v3", "matrix/two_step"])  # the latter has more than one matrix
def test_other_environments_are_refused(name):
    env = make_vector_env(name, num_envs=1)
    with pytest.raises(ValueError, match=rf"{name} is no native game that repeats one matrix: make one with"):
        MatrixEvaluator().evaluate(Uniform(), env)
