"""NashConv by learned best responses: games whose value is known, no bias of selection, and no trace."""

import numpy as np
import pytest
import torch
from learned_helpers import HEADS, SMALL, Interrupting, Mixed, pennies, watched_pennies
from scripted import CounterGame

from marl_lightning.algorithms import IPPO, IQL, VDN
from marl_lightning.algorithms.snapshots import snapshot
from marl_lightning.envs import SyncVectorEnv, make_env, make_vector_env
from marl_lightning.envs.wrappers import Opponents, RecordEpisodeStatistics
from marl_lightning.evaluation import evaluate
from marl_lightning.games import (
    LearnedEvaluator,
    approximate_nashconv_bernoulli_iql,
    choose_evaluator,
    learned,
    nash_conv,
)
from marl_lightning.games.intervals import newcombe_interval, sum_interval, wilson_interval
from marl_lightning.games.learned import PayoffReward, select_response
from marl_lightning.trainers import make_train

# Selection ------------------------------------------------------------------------------------------------------------


def test_the_best_is_chosen_and_not_to_deviate_is_an_option():
    baseline = np.array([1.0, 2, 3])
    assert select_response(np.array([[1.0, 2, 2], [2, 2, 3], [0, 4, 2.5]]), baseline) == 1
    assert select_response(np.array([[1.0, 2, 2]]), baseline) is None
    assert select_response(np.array([baseline]), baseline) is None


def test_two_stages_have_no_bias():
    """Nobody gains anything. Of five candidates with 100 episodes of deviation 1.4, the best seems to gain 0.14 times
    the mean of the largest of 0 and five standard normal numbers, which is 1.163 + 0.007."""
    rng = np.random.default_rng(0)
    seeming, reported = [], []
    for _ in range(2000):
        payoffs = rng.normal(scale=1.4, size=(5, 100))
        chosen = select_response(payoffs, np.zeros(100))
        seeming.append(0.0 if chosen is None else payoffs[chosen].mean())
        reported.append(0.0 if chosen is None else rng.normal(scale=1.4, size=100).mean())
    assert np.mean(seeming) == pytest.approx(0.14 * 1.170, abs=0.01)
    assert np.mean(reported) == pytest.approx(0, abs=4 * 0.14 / np.sqrt(2000))


# Games with known values ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("learner", "steps"), [("iql", 800), ("ippo", 2048)])
def test_matching_pennies(learner, steps):
    evaluator = LearnedEvaluator(**SMALL | {"learner": learner, "env_steps": steps, "seed": 1})
    result = nash_conv(Mixed(HEADS), pennies(), evaluator)
    low, high = result.interval
    assert low <= 1.6 <= high
    assert high - low < 0.3
    assert result.value == pytest.approx(sum(result.gains.values()))
    for agent, expected in (("agent_0", 0.8), ("agent_1", 0.8)):
        assert result.best_response_values[agent] == pytest.approx(expected, abs=0.15)
        low, high = result.best_response_intervals[agent]
        assert low < result.best_response_values[agent] < high
        difference = result.best_response_values[agent] - result.on_policy[agent]
        assert result.gains[agent] == pytest.approx(difference)
    assert (result.bound, result.episodes, result.payoff_range) == ("lower", 1_500, None)
    # Two trainings, and episodes of one step, which 64 instances play until the last one has played its share.
    assert result.env_steps == 2 * steps + 3 * 128 + 3 * 512
    assert result.wall_seconds > 0


def test_no_gain_at_an_equilibrium():
    result = nash_conv(Mixed([[0.5, 0.5], [0.5, 0.5]]), pennies(), LearnedEvaluator(**SMALL))
    assert result.interval[0] <= 0 <= result.interval[1]
    for agent, (low, high) in result.gain_intervals.items():
        assert low <= 0 <= high, agent


def test_a_greedy_profile_is_pure():
    """Both always show heads: the first wins already, the second could win 2 more."""
    result = nash_conv(Mixed(HEADS), pennies(), LearnedEvaluator(**SMALL), mode="greedy")
    assert result.gains == {"agent_0": 0, "agent_1": 2}
    assert result.interval == (2, 2)
    assert result.on_policy == {"agent_0": 1, "agent_1": -1}
    # Nothing is better than to show heads, so that there is no response of the first.
    assert list(result.snapshots) == ["agent_1"]
    assert result.gain_intervals["agent_0"] == (0, 0)


def test_responders_learn_against_the_greedy_profile():
    """In the climbing game the first row earns 11 from the first column, which is the likeliest of the second player.
    Against its mixture the third row is best, which is played already."""
    game = make_vector_env("matrix/climbing", num_envs=1, episode_length=1)
    profile = Mixed([[0, 0, 1], [0.5, 0.4, 0.1]])
    evaluator = LearnedEvaluator(**SMALL, agents=["agent_0"])
    assert nash_conv(profile, game, evaluator, mode="greedy").value == 11
    assert nash_conv(profile, game, evaluator).value == 0


def test_some_agents():
    everybody = nash_conv(Mixed(HEADS), pennies(), LearnedEvaluator(**SMALL), mode="greedy")
    for agents in ("agent_1", {"agent_1"}):
        result = nash_conv(Mixed(HEADS), pennies(), LearnedEvaluator(**SMALL, agents=agents), mode="greedy")
        assert result.gains == {"agent_1": 2}
        assert result.value == result.clipped == 2
        assert result.on_policy.keys() == result.best_response_values.keys() == {"agent_1"}
        found, again = (x.snapshots["agent_1"]["online"]["head.bias"] for x in (everybody, result))
        assert torch.equal(found, again)
    both = LearnedEvaluator(**SMALL | {"env_steps": 100}, agents=["agent_1", "agent_0"])
    assert list(nash_conv(Mixed(HEADS), pennies(), both).gains) == ["agent_0", "agent_1"]


# Chances --------------------------------------------------------------------------------------------------------------


def test_equal_seeds_give_equal_results():
    def search(seed):
        torch.rand(1)  # whatever global generators are up to
        return nash_conv(Mixed(HEADS), pennies(), LearnedEvaluator(**SMALL | {"env_steps": 300}, seed=seed))

    first, second, other = search(3), search(3), search(4)
    assert first.as_dict() | {"wall_seconds": 0} == second.as_dict() | {"wall_seconds": 0}
    for agent, state in first.snapshots.items():
        for name, tensor in state["online"].items():
            assert torch.equal(tensor, second.snapshots[agent]["online"][name])
    assert first.on_policy != other.on_policy


def test_both_arms_play_the_same_chances():
    """Who responds by what the profile does anyway has equal payoffs in every episode, whatever its opponent draws."""
    profile = Mixed([[0, 1], [0.3, 0.7]])
    env = PayoffReward(pennies(num_envs=7), payoff="return", gamma=1.0)

    class Same:
        def initial_state(self, num_envs):
            return {}

        def act(self, observations, state, is_first, **_):
            return {"agents": torch.ones(len(is_first), 1, dtype=torch.int64)}, {}, state

        def env_actions(self, actions):
            return actions

    alone = evaluate(profile, env, episodes=100, deterministic=False, seed=5)
    deviating = evaluate(Same(), Opponents(env, profile, agents="agent_0"), episodes=100, seed=5)
    assert np.array_equal(alone.agent_returns["agent_0"], deviating.agent_returns["agent_0"])
    assert 0 < alone.agent_returns["agent_0"].mean() < 0.8
    assert env.env_steps == 2 * 7 * 15


def test_who_plays_what(monkeypatch):
    """All candidates are judged by the same episodes, and the one that is chosen by others."""
    played = []

    def spy(policy, env, **kwargs):
        played.append((isinstance(env, Opponents), kwargs["episodes"], kwargs["seed"]))
        return evaluate(policy, env, **kwargs)

    monkeypatch.setattr(learned, "evaluate", spy)
    settings = SMALL | {"checkpoints": 3, "restarts": 2, "select_episodes": 100, "report_episodes": 200}
    result = nash_conv(Mixed(HEADS), pennies(), LearnedEvaluator(**settings), mode="greedy")
    assert list(result.snapshots) == ["agent_1"]
    (select_seed,), (report_seed,) = ({seed for _, episodes, seed in played if episodes == n} for n in (100, 200))
    assert select_seed != report_seed
    candidates = [(True, 100, select_seed)] * 6
    report = [(False, 200, report_seed), (True, 200, report_seed)]
    assert played == [(False, 100, select_seed), *candidates, report[0], *candidates, report[1]]
    assert result.episodes == 400


# Payoffs --------------------------------------------------------------------------------------------------------------


def test_discounted_payoffs():
    """The agents of the counter game get 1, 2 and 3: 1 + 2/2 + 3/4 if the discount is a half."""
    env = PayoffReward(SyncVectorEnv(factory=CounterGame, num_envs=2, seed=0), payoff="discounted", gamma=0.5)
    actions = {"red": torch.zeros(2, 2, dtype=torch.int64), "blue": torch.zeros(2, 1, 2)}
    env.reset()
    rewards = [env.step(actions).reward["red"][0].tolist() for _ in range(4)]
    assert rewards == [[1, 1], [1, -0.5], [0.75, 0], [1, 1]]
    env.reset(mask=np.array([False, True]))
    assert env.step(actions).reward["blue"].tolist() == [[1], [1]]


def test_recorded_returns_are_no_payoffs():
    """They are means over both players, 0 here, in the place of what each of them gets."""
    game = RecordEpisodeStatistics(pennies())
    result = nash_conv(Mixed(HEADS), game, LearnedEvaluator(**SMALL), mode="greedy")
    assert result.gains == {"agent_0": 0, "agent_1": 2}


def test_discounted_nash_conv():
    """Two rounds in which the second player could win instead of losing: 2 + 2 gamma."""
    evaluator = LearnedEvaluator(**SMALL, payoff="discounted", gamma=0.5)
    result = nash_conv(Mixed(HEADS), pennies(episode_length=2), evaluator, mode="greedy")
    assert result.gains == {"agent_0": 0, "agent_1": 3}


def test_verdicts_as_payoffs():
    """They are paid at the end of an episode, in the place of rewards, which are the opposite here."""
    env = PayoffReward(watched_pennies(num_envs=2), payoff="satisfaction", gamma=0.5)
    env.reset()
    assert env.step({"agents": torch.tensor([[0, 0], [0, 1]])}).reward["agents"].tolist() == [[0, 1], [1, 0]]


def test_satisfaction():
    """The first player meets its task with the probability 0.18, and could with 0.9; the second with 0.82."""
    evaluator = LearnedEvaluator(**SMALL | {"report_episodes": 300}, payoff="satisfaction")
    result = nash_conv(Mixed(HEADS), watched_pennies(), evaluator)
    assert result.interval[0] <= 0.8 <= result.interval[1]
    assert result.on_policy == pytest.approx({"agent_0": 0.18, "agent_1": 0.82}, abs=0.08)
    assert result.payoff_range == 1
    n = 300
    for agent in result.gains:
        before, after = (round(n * values[agent]) for values in (result.on_policy, result.best_response_values))
        assert result.on_policy_intervals[agent] == wilson_interval(before, n)
        assert result.best_response_intervals[agent] == wilson_interval(after, n)
        if agent in result.snapshots:
            assert result.gain_intervals[agent] == newcombe_interval(after, n, before, n)
    assert "agent_0" in result.snapshots
    assert result.interval == sum_interval(list(result.gains.values()), list(result.gain_intervals.values()))
    # Agents have episodes of their own: one of them fails where the other succeeds, if it is the same episode.
    assert result.on_policy["agent_0"] + result.on_policy["agent_1"] != 1


def test_satisfaction_of_the_seed_protocol():
    settings = {"br_train_iters": 15, "br_batch_steps": 32, "episodes": 64}
    result = approximate_nashconv_bernoulli_iql(Mixed(HEADS), watched_pennies(), **settings)
    assert result.gains == {"agent_0": 1, "agent_1": 0}  # the others act greedily
    # Of each agent: two sets without a deviation, one to choose; and what the first one gains.
    assert result.env_steps == 2 * 480 + 7 * 64


def test_train_states_as_profile():
    config = {
        "NUM_ENVS": 1,
        "NUM_STEPS": 8,
        "TOTAL_TIMESTEPS": 16,
        "BUFFER_SIZE": 100,
        "BUFFER_BATCH_SIZE": 4,
        "LEARNING_STARTS": 0,
        "NUM_EPOCHS": 1,
        "LR": 1e-3,
        "GAMMA": 0.9,
        "EPS_START": 1.0,
        "EPS_FINISH": 0.1,
        "EPS_DECAY": 0.5,
        "NETWORK_KIND": "mlp",
        "HIDDEN_SIZE": 8,
    }
    game = watched_pennies()
    states = make_train(config, lambda seed: game._factory())(seed=0)["train_states"]
    settings = {"br_train_iters": 5, "br_batch_steps": 8, "episodes": 20}
    result = approximate_nashconv_bernoulli_iql(states, game, config=config, **settings)
    assert sorted(result.on_policy.values()) == [0, 1]  # they act greedily, so that one of them fails
    assert result.value in (0, 1)
    with pytest.raises(ValueError, match="give the config of make_train too"):
        approximate_nashconv_bernoulli_iql(states, game, **settings)


# Starts ---------------------------------------------------------------------------------------------------------------


def test_warm_responders_start_from_what_the_agent_does():
    """A learning rate of almost nothing leaves the responder where it starts: at tails, which is right."""
    game = pennies()
    module = IQL(spec=game.spec, hidden_sizes=(8,), share_parameters=False, team_reward=None)
    with torch.no_grad():
        module.networks["agents"].head.weight.zero_()
        module.networks["agents"].head.bias.copy_(torch.tensor([[0.0, 0.0], [-1.0, 1.0]]))
    for warm_start in (module, snapshot(module)):
        sizes = {"hidden_sizes": (8,)} if isinstance(warm_start, dict) else {}
        evaluator = LearnedEvaluator(
            **SMALL | sizes | {"learning_rate": 1e-9}, start="warm", warm_start=warm_start, agents=["agent_1"]
        )
        result = nash_conv(Mixed(HEADS), game, evaluator, mode="greedy")
        assert result.gains == {"agent_1": 2}
        assert result.snapshots["agent_1"]["online"]["head.bias"].tolist() == pytest.approx([-1, 1], abs=1e-4)


def test_warm_starts_of_an_agent_that_is_alone_in_its_group():
    """Its weights have an axis for agents in a module that shares nothing, but none in a responder."""
    game = make_vector_env("mpe/simple_tag_v3", num_envs=1)
    module = IQL(spec=game.spec, hidden_sizes=(8,), share_parameters=False, team_reward=None)
    settings = {"env_steps": 50, "select_episodes": 4, "report_episodes": 4, "agents": "agent_0"}
    evaluator = LearnedEvaluator(preset="quick", **settings, start="warm", warm_start=module)
    assert list(nash_conv(module.policy, game, evaluator).gains) == ["agent_0"]


def test_both_starts_are_two_trainings():
    module = IPPO(
        spec=pennies().spec, hidden_sizes=(8,), share_parameters=False, layer_norm=False, normalise_value=False
    )
    budget = SMALL | {"learner": "ippo", "env_steps": 1_024, "restarts": 2, "agents": ["agent_0"]}
    one = nash_conv(Mixed(HEADS), pennies(), LearnedEvaluator(**budget))
    both = nash_conv(Mixed(HEADS), pennies(), LearnedEvaluator(**budget, start="both", warm_start=module))
    played = (128, 500, 500)  # candidates play to be chosen; what is reported is played with and without deviation
    steps = [64 * -(-n // 64) for n in played]
    assert one.env_steps in (2 * 1_024 + 3 * steps[0] + steps[1], 2 * 1_024 + 3 * steps[0] + 2 * steps[1])
    assert both.env_steps in (4 * 1_024 + 5 * steps[0] + steps[1], 4 * 1_024 + 5 * steps[0] + 2 * steps[1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"start": "warm"}, "start='warm' needs warm_start: the module that was trained, or its snapshot"),
        ({"start": "both"}, "start='both' needs warm_start"),
        ({"warm_start": {}}, "warm_start has no meaning with start='fresh'"),
    ],
)
def test_starts_without_what_they_need(arguments, message):
    with pytest.raises(ValueError, match=message):
        LearnedEvaluator(**arguments)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda spec: IQL(spec=spec), "agents of IQL have weights in common: set share_parameters=False"),
        (lambda spec: VDN(spec=spec), "what each agent of VDN has learned cannot be told apart"),
        (
            lambda spec: IPPO(
                spec=spec, hidden_sizes=(8,), share_parameters=False, layer_norm=False, normalise_value=False
            ),
            "agent_0: online.body",
        ),
        (lambda spec: {}, "missing agents: agent_0"),
    ],
)
def test_warm_starts_that_do_not_fit(make, message):
    profile, game = Mixed(HEADS), pennies()
    evaluator = LearnedEvaluator(**SMALL, start="warm", warm_start=make(game.spec))
    with pytest.raises(ValueError, match=f"warm_start: (.|\n)*{message}"):
        nash_conv(profile, game, evaluator)
    assert profile.calls <= 1  # nothing was played yet


class Remembering(Mixed):
    """Has a memory that it does not use."""

    def initial_state(self, num_envs):
        return {"nothing": torch.zeros(num_envs, 1)}


def test_responders_remember_if_the_profile_does():
    tiny = SMALL | {"env_steps": 400, "select_episodes": 20, "agents": ["agent_1"]}

    def is_recurrent(profile, **settings):
        result = nash_conv(profile(HEADS), pennies(), LearnedEvaluator(**tiny, **settings), mode="greedy")
        return any("gru" in name for name in result.snapshots["agent_1"]["online"])

    assert not is_recurrent(Mixed)
    assert is_recurrent(Remembering)
    assert is_recurrent(Mixed, recurrent=True)
    assert not is_recurrent(Remembering, recurrent=False)


# Names and errors -----------------------------------------------------------------------------------------------------


def test_by_name():
    evaluator = choose_evaluator("learned:quick", pennies())
    assert isinstance(evaluator, LearnedEvaluator)
    assert evaluator.budget.env_steps < choose_evaluator("learned", pennies()).budget.env_steps
    with pytest.raises(ValueError, match=r"LearnedEvaluator.preset='quik'.*did you mean 'quick'"):
        nash_conv(Mixed(HEADS), pennies(), "learned:quik")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"preset": "standart"}, "did you mean 'standard'"),
        ({"learner": "dqn"}, "learner='dqn'"),
        ({"env_steps": 0}, "env_steps=0"),
        (
            {"report_episodes": 3},
            "report_episodes=3 are too few for an interval: a bootstrap interval needs at least 4",
        ),
        ({"report_episodes": 1, "payoff_bounds": (0.0, 1.0)}, "report_episodes=1 are too few for an interval"),
        ({"payoff_bounds": (1.0, 0.0)}, "payoff_bounds must be the smallest and the largest payoff"),
        ({"payoff_bounds": (0.0, 1.0), "payoff": "satisfaction"}, "payoff_bounds of satisfaction are 0 and 1"),
        ({"level": 1.0}, "level"),
    ],
)
def test_bad_settings(arguments, message):
    with pytest.raises(ValueError, match=message):
        LearnedEvaluator(**arguments)


def test_what_does_not_fit_is_told_before_anything_is_learned():
    profile, game = Mixed(HEADS), pennies()
    with pytest.raises(ValueError, match=r"agents has \['agent_2'\], but the agents of .*; did you mean 'agent_"):
        nash_conv(profile, game, LearnedEvaluator(agents=["agent_2"]))
    with pytest.raises(ValueError, match="agents is empty: name some of"):
        nash_conv(profile, game, LearnedEvaluator(agents=[]))
    with pytest.raises(TypeError, match=r"learned in a VectorEnv, got a SingleEnv: wrap it: SyncVectorEnv"):
        nash_conv(profile, make_env("matrix/climbing"), "learned")
    with pytest.raises(TypeError, match=r"learned in a VectorEnv, got a ndarray: make one with make_vector_env"):
        nash_conv(profile, np.zeros((2, 2, 2)), "learned")
    with pytest.raises(TypeError, match=r"a IPPO cannot act .*: give its attribute policy"):
        nash_conv(IPPO(spec=game.spec), game, "learned")
    with pytest.raises(ValueError, match=r"payoff='satisfaction' needs a verdict on each agent.*MonitorParallelEnv"):
        nash_conv(profile, game, LearnedEvaluator(payoff="satisfaction"))
    assert profile.calls == 0
    counter = SyncVectorEnv(factory=CounterGame, num_envs=1, seed=0)
    with pytest.raises(ValueError, match="the policy cannot act in scripted/counter"):
        nash_conv(profile, counter, LearnedEvaluator(learner="ippo"))


def test_continuous_actions_are_for_ippo():
    game = SyncVectorEnv(factory=CounterGame, num_envs=1, seed=0)
    profile = Interrupting(None, -1)
    with pytest.raises(ValueError, match=r"learner='iql' needs Discrete actions, but those of 'blue'.*learner='ippo'"):
        nash_conv(profile, game, LearnedEvaluator(**SMALL))
    settings = SMALL | {"env_steps": 1_024, "select_episodes": 20, "report_episodes": 20, "agents": ["blue_0"]}
    result = nash_conv(profile, game, LearnedEvaluator(**settings, learner="ippo"))
    assert result.on_policy == {"blue_0": 6}  # nothing depends on actions
    assert result.value == 0


def test_payoffs_out_of_bounds():
    settings = SMALL | {"env_steps": 200, "select_episodes": 20, "report_episodes": 20}
    evaluator = LearnedEvaluator(**settings, payoff_bounds=(0.0, 1.0))
    with pytest.raises(ValueError, match=r"payoff_bounds=\(0.0, 1.0\), but 'agent_0' got from -1.0 to 1.0"):
        nash_conv(Mixed([[0.5, 0.5], [0.5, 0.5]]), pennies(), evaluator)


def test_few_episodes_with_known_bounds():
    """An empirical Bernstein interval, of gains from -2 to 2 each: far wider than a bootstrap interval."""
    settings = SMALL | {"report_episodes": 60}
    widths = []
    for bounds in (None, (-1.0, 1.0)):
        result = nash_conv(Mixed(HEADS), pennies(), LearnedEvaluator(**settings, payoff_bounds=bounds))
        widths.append(result.interval[1] - result.interval[0])
        assert result.payoff_range == (None if bounds is None else 2)
    assert widths[1] > widths[0] + 0.5
    assert result.normalised == result.value / 2


def test_the_sum_knows_that_gains_vary_together():
    """What both get without deviation cancels in every episode of a zero-sum game. What they get by deviating is 1 with
    the probability 0.9 and else -1, each for itself: the variance of the sum is 2 * 0.36. Those of the two gains are
    0.37 and 1.53, and would be far too much."""
    result = nash_conv(Mixed(HEADS), pennies(), LearnedEvaluator(**SMALL | {"report_episodes": 4_000}))
    assert set(result.snapshots) == {"agent_0", "agent_1"}
    half = (result.interval[1] - result.interval[0]) / 2
    assert half == pytest.approx(1.96 * (0.72 / 4_000) ** 0.5, rel=0.1)
