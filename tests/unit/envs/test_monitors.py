"""Guards, reward machines and the environment around them, against hand-made episodes."""

import json
import pickle
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import CounterGame, counter_actions

from marl_lightning.envs import check_env, make_env, make_vector_env
from marl_lightning.envs.monitors import (
    Monitor,
    MonitorParallelEnv,
    PotentialShaping,
    RewardMachine,
    always,
    eventually,
    sequence,
    until,
)
from marl_lightning.envs.monitors.guards import parse_guard
from marl_lightning.envs.wrappers import AggregateReward, TimeLimit

# ------------------------------------------------------------------------------------------------------------- guards


@pytest.mark.parametrize(
    ("text", "python"),
    [
        ("a", "a"),
        ("!a & b", "(not a) and b"),
        ("!(a & b) | c", "not (a and b) or c"),
        ("a | b & c", "a or (b and c)"),
        ("not a and b or c", "(not a and b) or c"),
        ("(a|b)&(!c|a)", "(a or b) and (not c or a)"),
        ("!!a", "a"),
        ("true & !false & b", "b"),
    ],
)
def test_guards_mean_what_they_say(text, python):
    guard = parse_guard(text)
    for a, b, c in product((False, True), repeat=3):
        label = {name for name, true in zip("abc", (a, b, c), strict=True) if true}
        assert guard.holds(label) == bool(eval(python, {"a": a, "b": b, "c": c})), label


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "condition is missing at position 0"),
        ("a &", "condition is missing at position 3"),
        ("a b", "unexpected 'b' at position 1"),
        ("(a", "closing bracket is missing"),
        ("a)", r"unexpected '\)'"),
        ("& a", "missing before '&'"),
        ("a == b", "unexpected '='"),
        ("__import__('os')", r"unexpected '\('"),
        ("f(a)", r"unexpected '\('"),
    ],
)
def test_what_is_no_guard(text, message):
    with pytest.raises(ValueError, match=message):
        parse_guard(text)


FORMULAS = st.recursive(
    st.sampled_from(["a", "b", "c", "true", "false"]),
    lambda inner: st.one_of(
        inner.map("!({})".format),
        st.tuples(inner, inner).map(lambda pair: "({}) & ({})".format(*pair)),
        st.tuples(inner, inner).map(lambda pair: "({}) | ({})".format(*pair)),
    ),
    max_leaves=8,
)


@given(FORMULAS, st.sets(st.sampled_from("abc")))
def test_any_formula_means_what_python_says(text, label):
    python = text.replace("!", " not ").replace("&", " and ").replace("|", " or ")
    values = {name: name in label for name in "abc"} | {"true": True, "false": False}
    assert parse_guard(text).holds(label) == bool(eval(python, values))


# ----------------------------------------------------------------------------------------------------------- machines


def play(machine, *labels):
    """Returns states, rewards and the last verdict of a word, labels being strings of one-letter propositions."""
    state, states, rewards, verdict = machine.initial, [], [], None
    for label in labels:
        state, reward, _, verdict = machine.step(state, frozenset(label))
        states.append(state)
        rewards.append(reward)
    return states, rewards, verdict


def test_builders():
    assert play(eventually("a", reward=3.0), "", "b", "a", "") == (
        ["waiting", "waiting", "done", "done"],
        [0, 0, 3, 0],
        True,
    )
    assert play(always("a", penalty=2.0), "a", "a", "b", "a")[1:] == ([0, 0, -2, 0], False)
    assert play(always("a"), "a", "a")[2] is None
    assert always("a").undecided_is
    assert not eventually("a").undecided_is
    assert play(until("a", "b"), "a", "a", "b")[1:] == ([0, 0, 1], True)
    assert play(until("a", "b"), "a", "", "b")[1:] == ([0, 0, 0], False)
    assert play(until("a", "b"), "b")[2] is True
    assert play(sequence("a", "b", "a"), "ab", "b", "", "a") == ([1, 2, 2, 3], [0, 0, 0, 1], True)
    with pytest.raises(ValueError, match="at least one guard"):
        sequence()


def test_on_missing():
    edges = [("u", "a", "v", 1.0)]
    assert play(RewardMachine.from_edges(edges, accepting=["v"], on_missing="reject"), "b")[2] is False
    assert play(RewardMachine.from_edges(edges, accepting=["v"], on_missing="stay"), "b")[2] is None
    complete = RewardMachine.from_edges([*edges, ("u", "!a", "u", -1.0)], accepting=["v"])
    assert play(complete, "b", "a")[1] == [-1, 1]


@pytest.mark.parametrize(
    ("edges", "settings", "message"),
    [
        ([], {}, "at least one edge"),
        ([("u", "a", "v", 0), ("u", "b", "w", 0)], {"on_missing": "stay"}, r"not deterministic: \['a', 'b'\]"),
        ([("u", "a", "v", 0)], {"accepting": ["v"]}, r"does not say what follows on \[\]"),
        (
            [("u", "a", "v", 0), ("w", "a", "v", 0)],
            {"accepting": ["v"], "on_missing": "stay"},
            r"states \['w'\] cannot be",
        ),
        ([("u", "a", "v", 0), ("v", "a", "u", 0)], {"accepting": ["v"], "on_missing": "stay"}, "terminal and cannot"),
        ([("u", "a", "v", 0)], {"accepting": ["v"], "rejecting": ["v"]}, "accepting and rejecting"),
        ([("u", "a", "v", 0)], {"rejecting": ["v", "w"], "on_missing": "reject"}, "one rejecting state"),
        ([("u", " & ".join(f"p{i}" for i in range(17)), "v", 0)], {"on_missing": "stay"}, "17 propositions"),
    ],
)
def test_machines_that_are_refused(edges, settings, message):
    with pytest.raises(ValueError, match=message):
        RewardMachine.from_edges(edges, **settings)


def test_machines_are_monitors_and_can_be_pickled():
    machine = sequence("a", "b")
    assert isinstance(machine, Monitor)
    assert pickle.loads(pickle.dumps(machine)) == machine
    assert machine.propositions == {"a", "b"}
    with pytest.raises(ValueError, match="no state 9"):
        machine.step(9, frozenset())


def test_potentials_are_optimal_values():
    potentials = PotentialShaping(0.5).potentials(sequence("a", "b", "c", reward=8.0))
    assert potentials == {0: 2.0, 1: 4.0, 2: 8.0, 3: 0.0}
    with pytest.raises(ValueError, match="gamma"):
        PotentialShaping(1.0)


# ------------------------------------------------------------------------------------------------------ environment


def labeller(context):
    """``late`` after step 2; ``end`` after step 3; seen in the game's own state, which holds episode, time, noise."""
    time = context.next_observations.state[1]
    label = {"late"} if time >= 2 else set()
    label |= {"end"} if time == 3 else set()
    return {agent: frozenset(label) for agent in ("red_0", "red_1", "blue_0")}


def monitored(**settings):
    monitors = {"red_0": sequence("late", "end"), "red_1": eventually("late")}
    return MonitorParallelEnv(CounterGame(length=5), monitors, labeller, **{"end_on": "all"} | settings)


def test_observations_states_and_rewards():
    env = monitored()
    observations = env.reset(seed=1)
    assert env.spec.groups["red"].observation_size == 4 + 3
    assert env.spec.groups["blue"].observation_size == 4  # nobody there is watched
    assert env.spec.state_size == 3 + 3 + 2
    assert observations.observation["red"][:, 4:].tolist() == [[1, 0, 0], [1, 0, 0]]
    assert observations.state[3:].tolist() == [1, 0, 0, 1, 0]
    steps = [env.step(counter_actions()) for _ in range(3)]
    assert [step.reward["red"].tolist() for step in steps] == [[0, 0], [0, 1], [1, 0]]
    assert [step.reward["blue"].tolist() for step in steps] == [[1], [2], [3]]  # the game's own
    assert steps[1].observations.observation["red"][0, 4:].tolist() == [0, 1, 0]
    assert steps[1].observations.observation["red"][1].tolist() == [0] * 7  # died
    assert steps[1].observations.state[3:].tolist() == [0, 1, 0, 0, 1]
    assert [step.terminated for step in steps] == [False, False, True]
    assert {key: value for key, value in steps[2].info.items() if key != "score"} == {
        "monitor_state/red_0": 2.0,
        "verdict/red_0": 1.0,
        "satisfied/red_0": 1.0,
        "monitor_state/red_1": 1.0,
        "verdict/red_1": 1.0,
        "satisfied/red_1": 1.0,
    }
    assert env.reset().observation["red"][:, 4:].tolist() == [[1, 0, 0], [1, 0, 0]]


@pytest.mark.parametrize(("end_on", "length"), [("any", 2), ("all", 3), ("never", 5)])
def test_ends(end_on, length):
    env = monitored(end_on=end_on)
    env.reset(seed=1)
    for time in range(1, length + 1):
        step = env.step(counter_actions())
        assert step.terminated == (time == length)
    assert step.info["satisfied/red_0"] == float(end_on != "any")


def test_rewards_together_or_of_the_game():
    for reward, expected in (("add", [[1, 1], [2, -1 + 1], [3 + 1, 0]]), ("env", [[1, 1], [2, -1], [3, 0]])):
        env = monitored(reward=reward)
        env.reset(seed=1)
        assert [env.step(counter_actions()).reward["red"].tolist() for _ in range(3)] == expected


def test_the_dead_are_not_paid():
    env = MonitorParallelEnv(CounterGame(length=5), {"red_1": eventually("end")}, labeller)
    env.reset(seed=1)
    steps = [env.step(counter_actions()) for _ in range(3)]
    assert steps[2].info["satisfied/red_1"] == 1.0
    assert steps[2].reward["red"][1] == 0.0


def test_all_is_seen_by_everyone_or_nothing_by_anyone():
    env = monitored(observe="all")
    assert env.reset(seed=1).observation["blue"][0, 4:].tolist() == [1, 0, 0, 1, 0]
    env = monitored(observe="none")
    assert env.reset(seed=1).observation["red"].shape == (2, 4)
    assert env.spec.state_size == 8


def test_an_open_task_counts_as_its_monitor_says():
    monitors = {"red_0": always("!never"), "blue_0": eventually("never")}
    env = MonitorParallelEnv(CounterGame(length=2), monitors, labeller)
    env.reset(seed=1)
    first, last = env.step(counter_actions()), env.step(counter_actions())
    assert [first.info[f"satisfied/{agent}"] for agent in monitors] == [0, 0]
    assert [last.info[f"satisfied/{agent}"] for agent in monitors] == [1, 0]
    assert [last.info[f"verdict/{agent}"] for agent in monitors] == [-1, -1]


def test_shaping_telescopes():
    gamma = 0.9
    shaped, plain = monitored(shaping=PotentialShaping(gamma)), monitored()
    returns = []
    for env in (shaped, plain):
        env.reset(seed=1)
        rewards = [env.step(counter_actions()).reward["red"][0] for _ in range(3)]
        returns.append(sum(gamma**t * reward for t, reward in enumerate(rewards)))
    start = PotentialShaping(gamma).potentials(sequence("late", "end"))[0]
    assert returns[0] == pytest.approx(returns[1] - start, abs=1e-6)


@pytest.mark.parametrize(("end_on", "length"), [("never", 2), ("any", 3)])
def test_nothing_is_hoped_for_once_an_episode_is_over(end_on, length):
    # The game itself ends, or the task of another agent does, while this one is halfway through its own.
    monitors = {"red_0": sequence("late", "never"), "blue_0": eventually("end")}
    env = MonitorParallelEnv(
        CounterGame(length=length), monitors, labeller, end_on=end_on, shaping=PotentialShaping(0.5)
    )
    env.reset(seed=1)
    steps = [env.step(counter_actions()) for _ in range(length)]
    assert [step.terminated for step in steps] == [False] * (length - 1) + [True]
    halfway, start = 1.0, 0.5
    expected = [0.5 * start - start, 0.5 * halfway - start, 0.5 * halfway - halfway]
    expected[length - 1] -= 0.5 * halfway
    assert [step.reward["red"][0] for step in steps] == pytest.approx(expected[:length])


def test_a_cut_episode_keeps_its_hopes():
    env = MonitorParallelEnv(
        TimeLimit(CounterGame(length=5), max_episode_steps=2),
        {"red_0": sequence("late", "never")},
        labeller,
        shaping=PotentialShaping(0.5),
    )
    env.reset(seed=1)
    env.step(counter_actions())
    step = env.step(counter_actions())
    assert step.truncated
    assert step.reward["red"][0] == 0.5 * 1.0 - 0.5


@pytest.mark.parametrize(("reward", "watched", "paid"), [("add", 0, 1), ("replace", 0, 0), ("replace", 1, 1)])
def test_the_dead_get_nothing_of_a_team_reward_that_is_no_longer_shared(reward, watched, paid):
    def team():
        return AggregateReward(CounterGame(length=5), how="first")

    env = MonitorParallelEnv(team(), {f"red_{watched}": eventually("never")}, labeller, reward=reward)
    assert not env.spec.shared_reward
    check_env(env, steps=30)
    env.reset(seed=1)
    steps = [env.step(counter_actions()) for _ in range(3)]
    assert not steps[1].observations.alive["red"][1]
    assert steps[2].reward["red"].tolist() == [3 * paid, 0]


@pytest.mark.parametrize("observe", ["own", "none"])
def test_what_is_returned_belongs_to_the_caller(observe):
    seen = []

    def look(context):
        seen.append(context.observations)
        return labeller(context)

    env = MonitorParallelEnv(CounterGame(length=5), {"red_0": eventually("late")}, look, observe=observe)
    observations = env.reset(seed=1)
    for arrays in (observations.observation, observations.action_mask, observations.alive):
        for array in arrays.values():
            array[:] = 0
    observations.state[:] = 0
    env.step(counter_actions())
    assert seen[0].alive["red"].all()
    assert seen[0].action_mask["red"].any()
    assert seen[0].observation["red"].any()
    assert seen[0].state.any()


def test_history_is_enough_to_compute_the_rewards_again():
    env = monitored(keep_history=True, reward="add")
    for _ in range(2):
        env.reset(seed=3)
        for _ in range(3):
            env.step(counter_actions())
    history = json.loads(json.dumps(env.history()))
    assert len(history) == 2
    assert all(episode["terminated"] for episode in history)
    for episode in history:
        for agent, machine in env.monitors.items():
            state = machine.initial
            for t, label in enumerate(episode["labels"]):
                state, reward, _, _ = machine.step(state, frozenset(label[agent]))
                dead = agent == "red_1" and t == 2
                assert episode["rewards"][t][agent] == episode["env_rewards"][t][agent] + (0 if dead else reward)
                assert machine.states[episode["states"][t + 1][agent]] == state
    with pytest.raises(RuntimeError, match="keep_history=True"):
        monitored().history()


def test_contract():
    check_env(monitored(), steps=60)
    game = MonitorParallelEnv(
        make_env("matrix/climbing"),
        {"agent_0": eventually("high")},
        lambda context: {"agent_0": frozenset({"high"} if context.actions["agents"][0] == 0 else ())},
    )
    check_env(game, steps=60)


def test_vectorised_and_resumed():
    env = make_vector_env(monitored, num_envs=2, seed=4)
    env.reset()
    env.step(counter_actions(2))
    state = env.state_dict()
    expected = [env.step(counter_actions(2)).reward["red"].tolist() for _ in range(4)]
    again = make_vector_env(monitored, num_envs=2, seed=0)
    again.load_state_dict(state)
    assert [again.step(counter_actions(2)).reward["red"].tolist() for _ in range(4)] == expected
    assert np.any(expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"monitors": {}}, "at least one agent"),
        ({"monitors": {"green": eventually("a")}}, r"given for \['green'\]"),
        ({"observe": "some"}, "observe must be one of own, all, none"),
        ({"reward": "both"}, "reward must be one of"),
        ({"end_on": "first"}, "end_on must be one of"),
    ],
)
def test_wrong_settings(change, message):
    settings = {"env": CounterGame(), "monitors": {"red_0": eventually("a")}, "labeller": labeller} | change
    with pytest.raises(ValueError, match=message):
        MonitorParallelEnv(**settings)


def test_a_labeller_that_forgets_an_agent():
    env = MonitorParallelEnv(CounterGame(), {"red_0": eventually("a")}, lambda context: {})
    env.reset(seed=1)
    with pytest.raises(ValueError, match=r"no label for \['red_0'\]"):
        env.step(counter_actions())
