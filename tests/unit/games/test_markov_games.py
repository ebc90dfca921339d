"""Tabular Markov games: numbers by hand, all pure policies as oracle, finite horizons."""

import itertools

import numpy as np
import pytest
import torch
from game_policies import Uniform

from marl_lightning.algorithms import IPPO
from marl_lightning.envs import make_vector_env
from marl_lightning.games import MarkovGame, nash_conv, tabulate
from marl_lightning.games.markov import best_response, on_policy_values

DILEMMA = np.array([[[5.0, 0], [10, 1]], [[5.0, 10], [0, 1]]])  # matrix_pd of OpenSpiel
PENNIES = np.array([[1.0, -1], [-1, 1]])


def repeated(payoffs: np.ndarray, **kwargs) -> MarkovGame:
    """The game of payoffs ``[N, n_1, ..., n_N]`` over and over, in one state."""
    return MarkovGame(transitions=np.ones((1, *payoffs.shape[1:], 1)), rewards=payoffs[:, None], start=[1.0], **kwargs)


def two_pennies(gamma: float = 0.9, **kwargs) -> MarkovGame:
    """Matching pennies, worth twice as much in state 1, which follows exactly if the players matched."""
    transitions = np.zeros((2, 2, 2, 2))
    matched = np.eye(2)
    transitions[..., 1], transitions[..., 0] = matched, 1 - matched
    row = np.stack([PENNIES, 2 * PENNIES])
    return MarkovGame(transitions=transitions, rewards=np.stack([row, -row]), start=[1.0, 0.0], gamma=gamma, **kwargs)


def random_game(rng, *, num_states=3, sizes=(2, 3), **kwargs) -> MarkovGame:
    return MarkovGame(
        transitions=rng.dirichlet(np.full(num_states, 0.5), size=(num_states, *sizes)),
        rewards=rng.normal(size=(len(sizes), num_states, *sizes)),
        start=rng.dirichlet(np.ones(num_states)),
        **kwargs,
    )


def random_profile(rng, game: MarkovGame, *leading: int) -> list[np.ndarray]:
    return [rng.dirichlet(np.ones(n), size=(*leading, game.num_states)) for n in game.num_actions]


def test_repeated_dilemma():
    result = nash_conv([np.full((1, 2), 0.5)] * 2, repeated(DILEMMA, gamma=0.9))
    assert result.value == pytest.approx(30)
    assert result.gains == pytest.approx({"player_0": 15, "player_1": 15})
    assert result.on_policy == pytest.approx({"player_0": 40, "player_1": 40})
    assert result.payoff_range == pytest.approx(100)


def test_two_states_of_pennies():
    uniform = np.full((2, 2), 0.5)
    assert nash_conv([uniform, uniform], two_pennies()).value == pytest.approx(0, abs=1e-12)
    biased = np.array([[0.6, 0.4], [0.5, 0.5]])
    result = nash_conv([biased, uniform], two_pennies())
    assert result.value == pytest.approx(1.208791, abs=1e-6)
    assert result.gains["player_0"] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("sizes", [(3,), (2, 3), (2, 2, 2)])
def test_against_all_pure_policies(sizes):
    """A best response in a Markov decision process is pure, so that the best of all pure ones is one everywhere."""
    rng = np.random.default_rng(len(sizes))
    game = random_game(rng, sizes=sizes, gamma=0.8)
    profile = random_profile(rng, game)
    for player, n in enumerate(sizes):
        values, actions = best_response(game, profile, player)
        pure = []
        for choice in itertools.product(range(n), repeat=game.num_states):
            pure.append(
                on_policy_values(game, [*profile[:player], np.eye(n)[list(choice)], *profile[player + 1 :]])[player]
            )
        assert values == pytest.approx(np.max(pure, 0))
        played = [*profile[:player], np.eye(n)[actions], *profile[player + 1 :]]
        assert on_policy_values(game, played)[player] == pytest.approx(values)


def test_values_solve_their_equation_and_simulation_agrees():
    rng = np.random.default_rng(0)
    game = random_game(rng, gamma=0.5)
    profile = random_profile(rng, game)
    values = on_policy_values(game, profile)
    for player, state in itertools.product(range(2), range(3)):
        expected = sum(
            profile[0][state, a]
            * profile[1][state, b]
            * (game.rewards[player, state, a, b] + 0.5 * game.transitions[state, a, b] @ values[player])
            for a, b in itertools.product(range(2), range(3))
        )
        assert values[player, state] == pytest.approx(expected)
    # play it: 4,000 episodes of 12 steps, of which the rest is worth less than 0.001
    episodes, total = 4000, 0.0
    states = rng.choice(3, size=episodes, p=game.start)
    for step in range(12):
        moves = [(policy[states].cumsum(-1) > rng.random((episodes, 1))).argmax(-1) for policy in profile]
        total = total + 0.5**step * game.rewards[0, states, moves[0], moves[1]]
        following = game.transitions[states, moves[0], moves[1]]
        states = (following.cumsum(-1) > rng.random((episodes, 1))).argmax(-1)
    error = total.std() / np.sqrt(episodes)
    assert abs(total.mean() - values[0] @ game.start) < 4 * error


def test_finite_horizon_by_hand():
    """Two steps of pennies against a second player that shows heads with 0.75 in the first step and then tails: the
    first player matches both times, 0.5 + gamma (0.75 * 2 + 0.25 * 1)."""
    game = two_pennies(gamma=0.5, horizon=2)
    second = np.array([[[0.75, 0.25], [1, 0]], [[0, 1], [0, 1]]])
    values, actions = best_response(game, [np.full((2, 2), 0.5), second], 0)
    assert values[0] == pytest.approx(0.5 + 0.5 * (0.75 * 2 + 0.25 * 1))
    assert actions.tolist() == [[0, 0], [1, 1]]
    heads_then_tails = np.array([[[1, 0], [1, 0]], [[0, 1], [0, 1]]])
    found = on_policy_values(game, [heads_then_tails, second])
    assert found[:, 0] == pytest.approx([values[0], -values[0]])
    assert on_policy_values(game, [np.full((2, 2), 0.5), second]) == pytest.approx(np.zeros((2, 2)))


def test_finite_horizon_against_all_pure_policies_over_time():
    rng = np.random.default_rng(3)
    game = random_game(rng, num_states=2, sizes=(2, 2), horizon=3)
    profile = random_profile(rng, game, 3)
    for player in range(2):
        values, _ = best_response(game, profile, player)
        pure = []
        for choice in itertools.product(range(2), repeat=3 * 2):
            other = list(profile)
            other[player] = np.eye(2)[np.reshape(choice, (3, 2))]
            pure.append(on_policy_values(game, other)[player])
        assert values == pytest.approx(np.max(pure, 0))


def test_horizons_meet_other_computations():
    rng = np.random.default_rng(4)
    payoffs = rng.normal(size=(2, 2, 3))
    strategies = [rng.dirichlet(np.ones(n)) for n in (2, 3)]
    tables = [strategy[None] for strategy in strategies]
    once = nash_conv(strategies, payoffs).value
    assert nash_conv(tables, repeated(payoffs, horizon=1)).value == pytest.approx(once)
    assert nash_conv(tables, repeated(payoffs, horizon=7)).value == pytest.approx(7 * once)
    game, endless = two_pennies(horizon=400), two_pennies()
    profile = random_profile(rng, game)
    assert nash_conv(profile, game).value == pytest.approx(nash_conv(profile, endless).value)
    stacked = [np.broadcast_to(policy, (400, *policy.shape)) for policy in profile]
    assert nash_conv(stacked, game).value == pytest.approx(nash_conv(profile, game).value)


def test_repeated_evaluation_of_a_native_game():
    """The same numbers by another way: a matrix game of 25 steps is a Markov game with one state."""
    env = make_vector_env("matrix/climbing", num_envs=1)
    torch.manual_seed(0)
    policy = IPPO(spec=env.spec).policy
    tables = tabulate(policy, env.reset(), spec=env.spec)
    assert [table.shape for table in tables] == [(1, 3)] * 2
    common = np.array([[11.0, -30, 0], [-30, 7, 6], [0, 0, 5]])
    game = repeated(np.stack([common, common]), horizon=25)
    assert nash_conv(tables, game).value == pytest.approx(nash_conv(policy, env).value)


def test_greedy_mode():
    nearly = [np.array([[0.6, 0.4]]), np.array([[0.5, 0.5]])]
    assert nash_conv(nearly, repeated(np.stack([PENNIES, -PENNIES]), gamma=0.5), mode="greedy").value == pytest.approx(
        4
    )


def test_memory_is_refused():
    env = make_vector_env("matrix/climbing", num_envs=1)
    game = repeated(DILEMMA, gamma=0.9)
    with pytest.raises(TypeError, match="takes tables of probabilities"):
        nash_conv(Uniform(), game)
    recurrent = IPPO(spec=env.spec, recurrent=True).policy
    with pytest.raises(ValueError, match=r"a policy with memory \(actor/agents\) is not determined by the state"):
        tabulate(recurrent, env.reset(), spec=env.spec)
    with pytest.raises(TypeError, match="give a MarkovGame, not a MatrixVectorEnv"):
        nash_conv(Uniform(), env, "markov")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gamma": 1.0}, r"gamma must be in \[0, 1\) in a game without a horizon"),
        ({"horizon": 0}, "horizon at least 1"),
        ({"start": [1.0]}, "start must have the shape"),
        ({"start": [0.5, 0.6]}, "start must hold probabilities"),
        ({"transitions": np.ones((2, 2, 2, 2))}, "transitions must hold probabilities"),
        ({"transitions": np.ones((2, 2, 2))}, "transitions must have the shape"),
        ({"rewards": np.ones((3, 2, 2, 2))}, "rewards of N players"),
        ({"rewards": np.full((2, 2, 2, 2), np.nan)}, "rewards must be finite"),
    ],
)
def test_bad_games(changes, message):
    good = two_pennies()
    arguments = {"transitions": good.transitions, "rewards": good.rewards, "start": good.start, "gamma": 0.9}
    with pytest.raises(ValueError, match=message):
        MarkovGame(**(arguments | changes))


def test_bad_profiles():
    uniform = np.full((2, 2), 0.5)
    with pytest.raises(ValueError, match="has 2 players, the profile 1"):
        nash_conv([uniform], two_pennies())
    with pytest.raises(ValueError, match=r"policy of player 1 must have the shape \(2, 2\), got \(4, 2, 2\)"):
        nash_conv([uniform, np.full((4, 2, 2), 0.5)], two_pennies())
    with pytest.raises(ValueError, match=r"\(2, 2\) or \(3, 2, 2\), got \(4, 2, 2\)"):
        nash_conv([uniform, np.full((4, 2, 2), 0.5)], two_pennies(horizon=3))
    with pytest.raises(ValueError, match="policy of player 0 must hold probabilities"):
        nash_conv([uniform * 2, uniform], two_pennies())
