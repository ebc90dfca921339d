"""Cross-play of strategies that are known, so that every entry can be said beforehand."""

import csv
import json
import math

import numpy as np
import pytest
import torch
from gymnasium import spaces

from marl_lightning.algorithms import IPPO
from marl_lightning.envs import EnvSpec, GroupSpec, MultiAgentEnv, Observations, Step, SyncVectorEnv, make_vector_env
from marl_lightning.evaluation import evaluate
from marl_lightning.games.cross_play import cross_play, short_names
from marl_lightning.games.elo import elo_ratings
from marl_lightning.games.intervals import normal_interval


class Always:
    """All agents take one action."""

    def __init__(self, action):
        self.action = action

    def initial_state(self, num_envs):
        return {}

    def act(self, observations, state, is_first, *, deterministic=False, generator=None):
        actions = {name: torch.full(alive.shape, self.action) for name, alive in observations.alive.items()}
        return actions, {name: torch.zeros(action.shape) for name, action in actions.items()}, state

    def env_actions(self, actions):
        return actions


class Sums(MultiAgentEnv):
    """One step: agents get their own action minus the sum of those of all others, plus a little luck."""

    def __init__(self, groups):
        self.spec = EnvSpec(
            name="test/sums",
            groups={
                name: GroupSpec(
                    agents=agents, observation_space=spaces.Box(0, 1, (1,)), action_space=spaces.Discrete(9)
                )
                for name, agents in groups.items()
            },
            state_size=1,
        )
        self.rng = np.random.default_rng()

    def reset(self, *, seed=None):
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        return self._observe()

    def step(self, actions):
        total, luck = sum(action.sum() for action in actions.values()), self.rng.normal()
        reward = {name: (2 * action - total + luck).astype(np.float32) for name, action in actions.items()}
        return Step(observations=self._observe(), reward=reward, terminated=True, truncated=False, info={})

    def _observe(self):
        sizes = {name: group.num_agents for name, group in self.spec.groups.items()}
        return Observations(
            observation={name: np.zeros((n, 1), np.float32) for name, n in sizes.items()},
            action_mask={name: np.ones((n, 9), np.bool_) for name, n in sizes.items()},
            alive={name: np.ones(n, np.bool_) for name, n in sizes.items()},
            state=np.zeros(1, np.float32),
        )


def sums(**groups):
    return SyncVectorEnv(factory=lambda: Sums(groups), num_envs=5, seed=0)


def test_rows_play_the_first_agent_of_two():
    """25 rounds of the prisoner's dilemma, in which 0 cooperates."""
    with make_vector_env("matrix/prisoners_dilemma", num_envs=2) as env:
        env.reset(seed=0)
        payoff = {}
        for own in (0, 1):
            for other in (0, 1):
                step = env.step({name: torch.tensor([[own, other]] * 2) for name in env.spec.groups})
                (reward,) = step.reward.values()
                payoff[own, other] = reward[0].tolist()
        assert payoff[0, 1][0] < payoff[1, 1][0] < payoff[0, 0][0] < payoff[1, 0][0]
        result = cross_play({"dove": Always(0), "hawk": Always(1)}, env, episodes=4)
        both = cross_play({"dove": Always(0), "hawk": Always(1)}, env, episodes=4, symmetric=True)
    expected = np.array([[25 * payoff[i, j][0] for j in (0, 1)] for i in (0, 1)])
    assert result.returns == pytest.approx(expected)
    assert both.returns == pytest.approx(expected)  # the game is the same from both sides
    assert result.standard_errors == pytest.approx(np.zeros((2, 2)))
    assert result.win_rates.tolist() == [[0.5, 0.0], [1.0, 0.5]]
    assert (result.names, result.episodes) == (("dove", "hawk"), 4)
    first, second = env.spec.agents
    assert (result.seats, both.seats) == ((first,), (first, second))


def test_sides_of_a_game_that_is_not_symmetric():
    """In Kuhn poker, the first player has the worse side; the uniform policy loses by 1/8 there."""
    with make_vector_env("openspiel/kuhn_poker", num_envs=50) as env:
        torch.manual_seed(0)
        first, second = IPPO(spec=env.spec).policy, IPPO(spec=env.spec, output_gain=5.0).policy
        one = cross_play({"a": first, "b": second}, env, episodes=300)
        both = cross_play({"a": first, "b": second}, env, episodes=300, symmetric=True)
    assert both.returns[0, 0] == pytest.approx(0.0)  # against itself, from both sides, of a zero-sum game
    assert both.returns[0, 1] == pytest.approx(-both.returns[1, 0])
    assert both.returns[0, 1] == pytest.approx((one.returns[0, 1] - one.returns[1, 0]) / 2)
    assert both.win_rates[0, 1] == pytest.approx(1 - both.win_rates[1, 0])
    assert one.returns[0, 1] != pytest.approx(-one.returns[1, 0])


def test_entries_are_those_of_an_evaluation_with_the_same_seed():
    with make_vector_env("openspiel/kuhn_poker", num_envs=4) as env:
        torch.manual_seed(0)
        policies = {name: IPPO(spec=env.spec, output_gain=2.0).policy for name in "ab"}
        result = cross_play(policies, env, episodes=60, seed=3)
        own = evaluate(policies["b"], env, episodes=60, seed=3, deterministic=False).agent_returns["player_0"]
    assert result.returns[1, 1] == pytest.approx(own.mean())
    assert result.standard_errors[1, 1] == pytest.approx(own.std(ddof=1) / math.sqrt(60))
    assert result.intervals[1, 1].tolist() == pytest.approx(normal_interval(own))


def test_two_groups_are_two_sides():
    """Two against one: the actions are 1 and 4, and luck is the same in all entries."""
    with sums(red=("r0", "r1"), blue=("b0",)) as env:
        result = cross_play({"one": Always(1), "four": Always(4)}, env, episodes=10)
        both = cross_play({"one": Always(1), "four": Always(4)}, env, episodes=10, symmetric=True)
    luck = result.returns[0, 0] + 1
    # Of a red agent: 2 own - (2 red + blue) = -blue.
    assert result.returns - luck == pytest.approx(np.array([[-1, -4], [-1, -4]]))
    # Of the blue one: 2 blue - (2 red + blue) = blue - 2 red.
    blue = np.array([[1 - 2, 1 - 8], [4 - 2, 4 - 8]])
    assert both.returns - luck == pytest.approx((np.array([[-1, -4], [-1, -4]]) + blue) / 2)
    assert (result.seats, both.seats) == (("r0,r1",), ("r0,r1", "b0"))
    # Red gets -blue and blue gets blue - 2 red: red is ahead where red > blue.
    assert result.win_rates.tolist() == [[0.5, 0.0], [1.0, 0.5]]


def test_of_more_agents_the_row_plays_one_after_the_other():
    with sums(all=("a", "b", "c")) as env:
        result = cross_play({"one": Always(1), "four": Always(4)}, env, episodes=10)
    luck = result.returns[0, 0] + 1
    # 2 own - (own + 2 others) = own - 2 others.
    assert result.returns - luck == pytest.approx(np.array([[-1, -7], [2, -4]]))
    assert result.seats == ("a", "b", "c")
    assert result.win_rates.tolist() == [[0.5, 0.0], [1.0, 0.5]]


def test_standard_errors_take_seats_of_an_episode_for_one_sample():
    """The three seats of an episode share its luck: they are not three times as many samples."""
    with sums(all=("a", "b", "c")) as env:
        result = cross_play({"one": Always(1), "four": Always(4)}, env, episodes=40, seed=2)
        lone = evaluate(Always(1), env, episodes=40, seed=2).agent_returns["a"]
    assert result.standard_errors == pytest.approx(np.full((2, 2), lone.std(ddof=1) / math.sqrt(40)))


def test_greedy_policies_take_their_modes():
    with make_vector_env("openspiel/kuhn_poker", num_envs=20) as env:
        policies = {}
        for name in "ab":
            torch.manual_seed(ord(name))
            policies[name] = IPPO(spec=env.spec).policy  # close to uniform
        greedy = cross_play(policies, env, episodes=100, deterministic=True)
        sampled = cross_play(policies, env, episodes=100)
        expected = evaluate(policies["a"], env, episodes=100, deterministic=True).agent_returns["player_0"].mean()
    assert greedy.returns[0, 0] == expected != sampled.returns[0, 0]


def test_results_can_be_read_and_written(tmp_path):
    with make_vector_env("matrix/prisoners_dilemma", num_envs=1) as env:
        result = cross_play({"dove": Always(0), "a hawk": Always(1)}, env, episodes=2)
    head, dove, hawk = result.table().splitlines()
    assert head.split() == ["[0]", "[1]", "Elo"]
    assert dove.startswith("[0] dove    ")
    assert f"{result.returns[1, 0]:.3f} ± 0.000" in hawk
    assert json.loads(json.dumps(result.as_dict()))["win_rates"] == [[0.5, 0.0], [1.0, 0.5]]
    with result.write_csv(tmp_path / "x.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["row"], row["column"]) for row in rows] == [
        ("dove", "dove"), ("dove", "a hawk"), ("a hawk", "dove"), ("a hawk", "a hawk")
    ]  # fmt: skip
    assert float(rows[2]["return_mean"]) == result.returns[1, 0]
    assert rows[2]["win_rate"] == "1.0"
    assert float(rows[2]["ci_low"]) <= float(rows[2]["return_mean"]) <= float(rows[2]["ci_high"])


@pytest.mark.parametrize(
    ("policies", "episodes", "message"),
    [
        ({"a": Always(0)}, 4, "at least 2 policies, got 1"),
        ({"a": Always(0), "b": Always(1)}, 1, "episodes must be at least 2"),
    ],
)
def test_too_few_policies_or_episodes(policies, episodes, message):
    with make_vector_env("matrix/prisoners_dilemma", num_envs=1) as env, pytest.raises(ValueError, match=message):
        cross_play(policies, env, episodes=episodes)


def test_a_single_agent_has_nobody_to_play_with():
    with sums(all=("a",)) as env, pytest.raises(ValueError, match="test/sums has one"):
        cross_play({"a": Always(0), "b": Always(1)}, env, episodes=2)


# Ratings --------------------------------------------------------------------------------------------------------------


def test_ratings_of_two_follow_from_their_wins():
    """With the drawn game, 29.5 of 40 wins less half each: (29.5 + 0.5) / (9.5 + 0.5) = 3."""
    ratings = elo_ratings(np.array([[7.0, 29.5], [9.5, 3.0]]))
    assert ratings[0] - ratings[1] == pytest.approx(400 * math.log10(3))
    assert ratings.sum() == pytest.approx(0)


def test_ratings_are_found_again():
    true = np.array([120.0, 30.0, -40.0, -110.0])
    expected = 1 / (1 + 10 ** ((true - true[:, None]) / 400))
    assert elo_ratings(1e7 * expected) == pytest.approx(true, abs=0.01)


def test_who_never_lost_has_a_finite_rating_above_all_others():
    ratings = elo_ratings(np.array([[0, 10, 10], [0, 0, 5], [0, 5, 0]]))
    assert np.isfinite(ratings).all()
    assert ratings[0] > ratings[1] == pytest.approx(ratings[2])
    assert elo_ratings(np.full((3, 3), 4.0)) == pytest.approx(np.zeros(3))


def test_ratings_of_cross_play_count_both_seats():
    """Hawk wins all 4 games in the first seat and all 4 in the second: 8 wins and the half of a draw against 0.5."""
    with make_vector_env("matrix/prisoners_dilemma", num_envs=1) as env:
        result = cross_play({"dove": Always(0), "hawk": Always(1)}, env, episodes=4)
    assert result.elo[1] - result.elo[0] == pytest.approx(400 * math.log10(8.5 / 0.5))


# Names of checkpoints -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["/r/a.ckpt", "/r/b.ckpt"], ["a", "b"]),
        (["/r/one/checkpoints/last.ckpt", "/r/two/checkpoints/last.ckpt"], ["one/last", "two/last"]),
        (["/r/one/last.ckpt", "/r/one/best.ckpt", "/r/two/last.ckpt"], ["one/last", "one/best", "two/last"]),
        (["/x.ckpt", "/checkpoints/x.ckpt"], ["/x.ckpt", "/checkpoints/x.ckpt"]),
    ],
)
def test_names_are_as_short_as_they_can_be(paths, names):
    assert short_names(paths) == names


def test_a_file_that_is_given_twice():
    with pytest.raises(ValueError, match="given twice"):
        short_names(["/r/a.ckpt", "/r/b/../a.ckpt"])
