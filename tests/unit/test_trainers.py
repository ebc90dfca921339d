"""``make_train``: what it asks of configurations and environments, and what it returns."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces
from omegaconf import OmegaConf
from pettingzoo import ParallelEnv
from scripted import CounterGame, LeavingGame

import marl_lightning
from marl_lightning.algorithms import IQL, PR2IQL
from marl_lightning.data import ReplayDataModule
from marl_lightning.data.replay import ReplayBuffer
from marl_lightning.envs import MultiAgentEnv, PettingZooAdapter, check_env
from marl_lightning.envs.monitors import MonitorParallelEnv, sequence
from marl_lightning.envs.wrappers import RecordEpisodeStatistics
from marl_lightning.envs.wrappers.history import EpisodeHistory
from marl_lightning.trainer_config import (
    IQLConfig,
    PR2IQLConfig,
    validate_config,
    validate_ippo_config,
    validate_iql_config,
)
from marl_lightning.trainers import make_train

IQL_CONFIG = {
    "NUM_ENVS": 2,
    "NUM_STEPS": 8,
    "TOTAL_TIMESTEPS": 160,
    "BUFFER_SIZE": 200,
    "BUFFER_BATCH_SIZE": 4,
    "LEARNING_STARTS": 32,
    "NUM_EPOCHS": 2,
    "LR": 0.01,
    "GAMMA": 0.9,
    "EPS_START": 1.0,
    "EPS_FINISH": 0.1,
    "EPS_DECAY": 0.5,
    "HIDDEN_SIZE": 8,
}
IPPO_CONFIG = {
    "ALGORITHM": "ippo",
    "NUM_ENVS": 2,
    "NUM_STEPS": 8,
    "TOTAL_TIMESTEPS": 160,
    "LR": 0.01,
    "GAMMA": 0.9,
    "UPDATE_EPOCHS": 2,
    "NUM_MINIBATCHES": 2,
    "HIDDEN_SIZE": 8,
}
PR2_CONFIG = IQL_CONFIG | {"ALGORITHM": "pr2_iql"}
CONFIGS = pytest.mark.parametrize("config", [IQL_CONFIG, PR2_CONFIG, IPPO_CONFIG], ids=["iql", "pr2", "ippo"])


class Matrix(ParallelEnv):
    """A game of two for ``length`` rounds; both are paid 1 if both choose their last action.

    The observation is the time over the length; ``row`` and ``column`` have different spaces.
    """

    metadata = {"name": "matrix_v0"}  # noqa: RUF012 - as in PettingZoo

    def __init__(self, seed, length=4):
        self.seed, self.length = seed, length
        self.possible_agents, self.agents = ["row", "column"], []
        self.closed = False

    def observation_space(self, agent):
        return spaces.Box(0, 100, (1 + (agent == "row"),), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(2 + (agent == "column"))

    def reset(self, seed=None, options=None):
        self.agents, self.time = list(self.possible_agents), 0
        return self.observe(), {agent: {} for agent in self.agents}

    def step(self, actions):
        self.time += 1
        reward = float(actions["row"] == 1 and actions["column"] == 2)
        acted, over = self.agents, self.time == self.length
        self.agents = [] if over else acted
        return (
            self.observe(),
            {"row": reward, "column": 2 * reward},
            dict.fromkeys(acted, over),
            dict.fromkeys(acted, False),
            {agent: {} for agent in acted},
        )

    def observe(self):
        return {a: np.full(self.observation_space(a).shape, self.time / self.length, np.float32) for a in self.agents}

    def close(self):
        self.closed = True


class Climbing(Matrix):
    """The common payoffs of Claus and Boutilier (1998); the best, 11, lies between the worst."""

    PAYOFFS = ((11, -30, 0), (-30, 7, 6), (0, 0, 5))

    def action_space(self, agent):
        return spaces.Discrete(3)

    def step(self, actions):
        reward = float(self.PAYOFFS[actions["row"]][actions["column"]])
        seen, _, *rest = super().step(actions)
        return seen, {"row": reward, "column": reward}, *rest


def train(config=None, env=Matrix, *, changes=None, **arguments):
    return make_train((config or IQL_CONFIG) | (changes or {}), env)(**arguments)


def same(first, second):
    return all(torch.equal(first[key], second[key]) for key in first) and first.keys() == second.keys()


# The configuration --------------------------------------------------------------------------------------------------


def problems(changes, *, without=(), config=IQL_CONFIG):
    config = {key: value for key, value in (config | changes).items() if key not in without}
    with pytest.raises(marl_lightning.ConfigurationError) as caught:
        validate_config(config)
    return caught.value.problems


def test_v1_what_is_required():
    optional = {"HIDDEN_SIZE"}
    found = problems({}, without=IQL_CONFIG)
    assert [line.partition(":")[0] for line in found] == [f"config.{key}" for key in _ordered(IQL_CONFIG, optional)]
    assert found[0] == "config.NUM_ENVS: is required, such as 8"
    assert problems({}, without=["LR"]) == ["config.LR: is required, such as 0.0005"]
    assert problems({}, without=["UPDATE_EPOCHS"], config=IPPO_CONFIG) == [
        "config.UPDATE_EPOCHS: is required, such as 4"
    ]


def _ordered(config, left_out):
    first = ("NUM_ENVS", "NUM_STEPS", "TOTAL_TIMESTEPS", "LR", "GAMMA")
    return [*first, *(key for key in config if key not in {*first, *left_out})]


@pytest.mark.parametrize("name", ["NUM_ENVS", "BUFFER_BATCH_SIZE", "NUM_EPOCHS", "LEARNING_STARTS", "BURN_IN_STEPS"])
@pytest.mark.parametrize(("value", "such_as"), [(3.0, "3"), (True, "1"), ("3", "3"), (2.6, "3")])
def test_v2_counts_are_whole_numbers(name, value, such_as):
    (found,) = problems({name: value})
    assert found.startswith(f"config.{name}={value!r}: must be a whole number of at least ")
    assert found.endswith(f", such as {such_as}")


@pytest.mark.parametrize(
    ("name", "value", "rest"),
    [
        ("GAMMA", 1.5, "must be a number from 0 to 1, such as 1"),
        ("GAMMA", -0.1, "must be a number from 0 to 1, such as 0"),
        ("GAMMA", float("nan"), "must be a number from 0 to 1, such as 0.99"),
        ("GAMMA", "0.9", "must be a number from 0 to 1, such as 0.9"),
        ("GAMMA", True, "must be a number from 0 to 1, such as 1.0"),
        ("LR", 0, "must be a number above 0, such as 0.0005"),
        ("LR", float("inf"), "must be a number above 0, such as 0.0005"),
        ("LR", None, "must be a number above 0, such as 0.0005"),
        ("TAU", 0.0, "must be a number above 0 and up to 1, such as 1.0"),
        ("TAU", 2, "must be a number above 0 and up to 1, such as 1"),
        ("EPS_START", 1.1, "must be a number from 0 to 1, such as 1"),
        ("EPS_DECAY", 1000, "must be a number from 0 to 1, such as 1"),
        ("NUM_ENVS", 0, "must be a whole number of at least 1, such as 1"),
        ("LEARNING_STARTS", -5, "must be a whole number of at least 0, such as 0"),
        ("MAX_GRAD_NORM", 0, "must be a number above 0, such as 10.0"),
        ("NETWORK_KIND", "gru", "must be 'rnn' or 'mlp', such as 'rnn'"),
        ("OPPONENT_MODE", "average", "must be 'greedy' or 'softmax' or 'epsilon', such as 'greedy'"),
        ("TEST_DURING_TRAINING", True, "must be False, such as False"),
    ],
)
def test_v3_ranges(name, value, rest):
    (found,) = problems({name: value})
    assert found.startswith(f"config.{name}={value!r}: {rest}")


def test_v4_an_mlp_has_no_burn_in():
    (found,) = problems({"NETWORK_KIND": "mlp", "BURN_IN_STEPS": 4})
    assert found == "config.BURN_IN_STEPS=4: NETWORK_KIND='mlp' has no memory to rebuild, must be 0"
    assert validate_iql_config(IQL_CONFIG | {"NETWORK_KIND": "mlp", "BURN_IN_STEPS": 0}).burn_in == 0


@pytest.mark.parametrize(
    ("changes", "learning_length", "burn_in"),
    [
        ({}, 8, 8),
        ({"REPLAY_SEQUENCE_LENGTH": 5}, 5, 5),
        ({"REPLAY_SEQUENCE_LENGTH": 20}, 20, 16),
        ({"REPLAY_SEQUENCE_LENGTH": None, "BURN_IN_STEPS": 3}, 8, 3),
        ({"NETWORK_KIND": "mlp"}, 8, 0),
    ],
)
def test_v5_defaults_of_the_window(changes, learning_length, burn_in):
    config = validate_iql_config(IQL_CONFIG | changes)
    assert (config.learning_length, config.burn_in) == (learning_length, burn_in)
    assert config.window == learning_length + burn_in


def test_v6_the_buffer_holds_a_window_of_each_instance():
    needed = 2 * (8 + 8)
    (found,) = problems({"BUFFER_SIZE": needed - 1})
    assert found == "config.BUFFER_SIZE=31: must hold a window of 8 + 8 steps of each of the 2 instances, such as 32"
    validate_iql_config(IQL_CONFIG | {"BUFFER_SIZE": needed})
    validate_iql_config(IQL_CONFIG | {"BUFFER_SIZE": 16, "NETWORK_KIND": "mlp"})


def test_v7_epsilon_falls():
    (found,) = problems({"EPS_START": 0.01})
    assert found == "config.EPS_FINISH=0.1: must not be above EPS_START=0.01, such as 0.01"
    validate_iql_config(IQL_CONFIG | {"EPS_START": 0.1})


@pytest.mark.parametrize(("total", "such_as"), [(150, 144), (153, 160), (1, 16)])
def test_v8_the_total_is_a_multiple_of_an_env_update(total, such_as):
    (found,) = problems({"TOTAL_TIMESTEPS": total})
    assert (
        found == f"config.TOTAL_TIMESTEPS={total}: must be a multiple of NUM_ENVS * NUM_STEPS = 16, such as {such_as}"
    )


def test_v9_what_is_returned():
    config = validate_iql_config(IQL_CONFIG)
    assert (config.num_updates, config.learning_length, config.burn_in, config.window) == (10, 8, 8, 16)
    assert (config.num_envs, config.lr, config.network_kind, config.tau) == (2, 0.01, "rnn", 1.0)
    with pytest.raises(AttributeError):
        config.lr = 1.0
    assert type(validate_iql_config(IQL_CONFIG | {"GAMMA": 1}).gamma) is float
    assert type(validate_iql_config(IQL_CONFIG | {"NUM_ENVS": np.int64(2)}).num_envs) is int


def test_v10_everything_that_is_wrong_at_once():
    found = problems(
        {
            "NUM_ENVS": "2",
            "GAMMA": 2.0,
            "NETWORK_KIND": "mlp",
            "BURN_IN_STEPS": 4,
            "EPS_START": 0.0,
            "NUM_STEP": 8,
            "TAU": 0.1,
            "TARGET_UPDATE_INTERVAL": 7,
            "OPPONENT_RATE": 0.5,
        },
        without=["LR"],
    )
    assert found == [
        "config.NUM_ENVS='2': must be a whole number of at least 1, such as 2",
        "config.LR: is required, such as 0.0005",
        "config.GAMMA=2.0: must be a number from 0 to 1, such as 1",
        "config.NUM_STEP: there is no such setting; did you mean 'NUM_STEPS'?",
        "config.BURN_IN_STEPS=4: NETWORK_KIND='mlp' has no memory to rebuild, must be 0",
        "config.EPS_FINISH=0.1: must not be above EPS_START=0.0, such as 0.0",
        "config.TARGET_UPDATE_INTERVAL=7: TAU=0.1 moves the targets in every update, must be 1 or left out",
        "config.OPPONENT_RATE=0.5: OPPONENT_MODE='greedy' has none, must be None or left out",
    ]
    found = problems({"TOTAL_TIMESTEPS": 100, "BUFFER_SIZE": 3, "EPS_FINISH": 1.0, "EPS_START": 0.5})
    assert [line.partition("=")[0] for line in found] == [
        "config.TOTAL_TIMESTEPS",
        "config.BUFFER_SIZE",
        "config.EPS_FINISH",
    ]


@pytest.mark.parametrize(
    "form", [dict, OmegaConf.create, lambda config: dict(**config)], ids=["dict", "hydra", "words"]
)
def test_v11_the_same_checks_for_every_form(form):
    assert validate_iql_config(form(IQL_CONFIG)) == validate_iql_config(IQL_CONFIG)
    with pytest.raises(marl_lightning.ConfigurationError, match="TOTAL_TIMESTEPS=150"):
        validate_iql_config(form(IQL_CONFIG | {"TOTAL_TIMESTEPS": 150}))
    with pytest.raises(marl_lightning.ConfigurationError, match="TOTAL_TIMESTEPS=150"):
        make_train(form(IQL_CONFIG | {"TOTAL_TIMESTEPS": 150}), Matrix)


@pytest.mark.parametrize(
    ("mode", "rate", "message"),
    [
        ("softmax", None, "must be above 0, such as 0.1"),
        ("softmax", 0, "must be above 0"),
        ("epsilon", 1.5, "at most 1"),
    ],
)
def test_opponents(mode, rate, message):
    (found,) = problems({"OPPONENT_MODE": mode, "OPPONENT_RATE": rate})
    assert message in found


def test_which_algorithm():
    assert validate_config(IPPO_CONFIG) == validate_ippo_config(IPPO_CONFIG)
    assert isinstance(validate_config(IQL_CONFIG), IQLConfig)
    assert problems({"ALGORITHM": "ipo"}) == [
        "config.ALGORITHM='ipo': must be 'iql' or 'pr2_iql' or 'ippo', such as 'iql'; did you mean 'ippo'?"
    ]
    (found,) = problems({"NUM_MINIBATCHES": 3}, config=IPPO_CONFIG)
    assert found == "config.NUM_MINIBATCHES=3: a rollout has 2 sequences, must be at most that, such as 2"
    validate_ippo_config(IPPO_CONFIG | {"NUM_MINIBATCHES": 16, "NETWORK_KIND": "mlp"})


def test_pr2_iql_has_the_settings_of_iql_and_its_own():
    plain, config = validate_iql_config(IQL_CONFIG), validate_config(PR2_CONFIG)
    assert isinstance(config, PR2IQLConfig)
    assert {name: value for name, value in vars(plain).items() if vars(config)[name] != value} == {"algorithm": "iql"}
    own = {name: value for name, value in vars(config).items() if name not in vars(plain)}
    assert own == {
        "response_model": "soft",
        "opponents": "joint",
        "aggregate": "lme",
        "temperature": 1.0,
        "max_joint": 1024,
        "num_samples": 16,
        "mask_unseen": False,
    }
    assert all(value == PR2IQL().hparams[name] for name, value in own.items())
    assert validate_iql_config(OmegaConf.create(PR2_CONFIG)) == config


def test_everything_that_is_wrong_with_pr2_iql_at_once():
    found = problems(
        {
            "GAMMA": 2.0,
            "RESPONSE_MODEL": "learned",
            "OPPONENTS": "simple",
            "AGGREGATE": "lse",
            "TEMPERATURE": 0,
            "MAX_JOINT": 8.0,
            "MASK_UNSEEN": "yes",
            "CLIP_EPS": 0.2,
            "EPS_START": 0.0,
        },
        without=["LR"],
        config=PR2_CONFIG,
    )
    assert found == [
        "config.LR: is required, such as 0.0005",
        "config.GAMMA=2.0: must be a number from 0 to 1, such as 1",
        "config.OPPONENTS='simple': must be 'joint' or 'pairwise' or 'sampled', such as 'joint'; "
        "did you mean 'sampled'?",
        "config.TEMPERATURE=0: must be a number above 0, such as 1.0",
        "config.MAX_JOINT=8.0: must be a whole number of at least 1, such as 8",
        "config.MASK_UNSEEN='yes': must be False or True, such as False",
        "config.CLIP_EPS: there is no such setting, only with ALGORITHM='ippo'",
        "config.EPS_FINISH=0.1: must not be above EPS_START=0.0, such as 0.0",
        "config.AGGREGATE='lse': RESPONSE_MODEL='learned' takes expectations of values, must be left out or "
        "'expectation'",
    ]
    assert problems({"RESPONSE_MODEL": "soft"}) == [
        "config.RESPONSE_MODEL: there is no such setting, only with ALGORITHM='pr2_iql'"
    ]
    assert problems({"RESPONS_MODEL": "soft"}, config=PR2_CONFIG) == [
        "config.RESPONS_MODEL: there is no such setting; did you mean 'RESPONSE_MODEL'?"
    ]


# Environments -------------------------------------------------------------------------------------------------------


@CONFIGS
def test_r1_one_new_environment_for_each_instance(config):
    def run(seed):
        made = []
        train(config, lambda seed: made.append(Matrix(seed)) or made[-1], seed=seed, changes={"TOTAL_TIMESTEPS": 16})
        assert len({id(env) for env in made}) == len(made) == 2
        assert all(env.closed for env in made)
        return [env.seed for env in made]

    seeds = run(0)
    assert len({*seeds, *run(1)}) == 4
    assert run(0) == seeds


@CONFIGS
@pytest.mark.parametrize(
    ("space", "message"),
    [
        (
            {"observation_space": spaces.Dict({"x": spaces.Discrete(2)})},
            r"observations of 'column' must be a Box, got Dict",
        ),
        ({"observation_space": spaces.Discrete(2)}, "observations of 'column' must be a Box"),
        ({"action_space": spaces.Box(-1, 1, (2,))}, "actions of 'column' must be Discrete, got Box"),
        ({"action_space": spaces.MultiDiscrete([2, 2])}, "actions of 'column' must be Discrete"),
    ],
)
def test_r2_spaces_that_do_not_fit(config, space, message):
    class Odd(Matrix):
        pass

    for name, odd in space.items():
        original = getattr(Matrix, name)
        setattr(Odd, name, lambda self, a, o=original, odd=odd: odd if a == "column" else o(self, a))
    with pytest.raises(TypeError, match=message):
        train(config, Odd)


def test_r2_what_is_no_environment():
    with pytest.raises(TypeError, match="must return a pettingzoo ParallelEnv, got list"):
        train(env=lambda seed: [])
    with pytest.raises(TypeError, match=r"must be a Box|must be Discrete"):
        train(env=lambda seed: CounterGame())  # with continuous actions


def recorded(monkeypatch):
    """The records that are stored, instance by instance."""
    rows = []
    extend = ReplayBuffer.extend

    def spy(self, records, streams):
        rows.append(records.clone())
        extend(self, records, streams)

    monkeypatch.setattr(ReplayBuffer, "extend", spy)
    return lambda: torch.cat(rows)


def leaving(**leaves):
    return lambda seed: LeavingGame(leaves)


def test_r3_an_end_of_one_ends_the_episode_of_all(monkeypatch):
    records = recorded(monkeypatch)
    train(env=leaving(a_0=(3, "terminated"), a_1=(5, "truncated"), b_0=(9, "terminated")), changes={"BUFFER_SIZE": 500})
    records = records()[:, 0]
    assert records["is_first"][:7].tolist() == [True, False, False, True, False, False, True]
    assert records["next", "truncated"][:4].tolist() == [False, False, True, False]
    assert not records["next", "terminated"].any()
    # a_0 is worth nothing afterwards; the others are bootstrapped from what they saw last.
    assert records["next", "a", "alive"][2].tolist() == [False, True]
    assert records["next", "a", "observation"][2].tolist() == [[0], [31]]
    assert records["next", "b", "observation"][2].tolist() == [[32]]
    assert records["a", "observation"][3].tolist() == [[0], [1]]


@pytest.mark.parametrize(
    ("leaves", "truncated", "alive"),
    [
        ({"a_0": (2, "truncated"), "a_1": (4, "terminated")}, True, [True, True]),
        ({"a_0": (2, "terminated"), "a_1": (2, "terminated")}, False, [False, False]),
        ({"a_0": (2, "truncated"), "a_1": (2, "terminated")}, True, [True, False]),
        ({"a_0": (2, "both"), "a_1": (4, "terminated")}, True, [False, True]),
    ],
)
def test_r3_how_it_ends(leaves, truncated, alive):
    env = PettingZooAdapter(factory=lambda: LeavingGame(leaves), end_together=True)
    env.reset()
    env.step({"a": np.zeros(2, np.int64)})
    step = env.step({"a": np.zeros(2, np.int64)})
    assert (step.terminated, step.truncated) == (not truncated, truncated)
    assert step.observations.alive["a"].tolist() == alive
    assert step.observations.observation["a"].tolist() == [[20 * alive[0]], [21 * alive[1]]]
    with pytest.raises(RuntimeError, match="over"):
        env.step({"a": np.zeros(2, np.int64)})


def test_such_an_environment_is_sound():
    leaves = {"a_0": (3, "truncated"), "a_1": (5, "terminated")}
    check_env(PettingZooAdapter(factory=lambda: LeavingGame(leaves), end_together=True))


def test_r4_r5_true_successors_and_starts(monkeypatch):
    class Sentinel(Matrix):
        def observe(self):
            seen = super().observe()
            return {agent: np.full_like(x, 99) if self.time == self.length else x for agent, x in seen.items()}

        def step(self, actions):
            _, *rest = super().step(actions)
            self.agents, left = list(self.possible_agents), self.agents
            seen, self.agents = self.observe(), left
            terminated, truncated, info = rest[1:]
            return seen, rest[0], truncated, terminated, info  # truncated: what is seen last counts

    records = recorded(monkeypatch)
    train(env=Sentinel)
    records = records()
    now, then = records["column", "observation"].flatten(), records["next", "column", "observation"].flatten()
    done = records["next", "truncated"].flatten()
    assert torch.equal(then == 99, done)
    assert not (now == 99).any()
    assert torch.equal(records["is_first"].flatten(), now == 0)
    assert records["is_first"].sum() == 40


# Env updates --------------------------------------------------------------------------------------------------------


@CONFIGS
def test_r6_r7_on_update_is_called_once_an_env_update(config, monkeypatch):
    calls, steps = [], []
    step = PettingZooAdapter.step
    monkeypatch.setattr(PettingZooAdapter, "step", lambda self, a: steps.append(0) or step(self, a))
    out = train(config, on_update=lambda *call: calls.append((*call, len(steps))))
    assert [call[:2] for call in calls] == [(i, 10) for i in range(10)]
    assert [call[3] for call in calls] == [16 * (i + 1) for i in range(10)]
    for name, values in out["metrics"].items():
        assert values.shape == ((10, 2) if name == "per_agent_episode_return_mean" else (10,))
        assert np.array_equal(values, np.array([call[2][name] for call in calls]))


@pytest.mark.parametrize(("starts", "first"), [(0, 0), (16, 1), (17, 1), (31, 1), (32, 2), (1000, 99)])
def test_updates_begin_with_the_first_rollout_that_ends_after_learning_starts(starts, first):
    updates = []

    def watch(index, total, metrics):
        updates.append(metrics["loss"])

    train(changes={"LEARNING_STARTS": starts, "TOTAL_TIMESTEPS": 64}, on_update=watch)
    assert [loss > 0 for loss in updates] == [index >= first for index in range(4)]


def test_num_epochs_updates_an_env_update():
    out = train(changes={"NUM_EPOCHS": 3})
    assert {state["optimizer"]["step"] for state in out["train_states"].values()} == {3 * 8}


# Results ------------------------------------------------------------------------------------------------------------

SHARED = {"episode_return_mean", "episode_length_mean", "completed_episodes", "per_agent_episode_return_mean"}


def test_r9_r10_results_have_the_same_shape():
    outs = [train(config) for config in (IQL_CONFIG, PR2_CONFIG, IPPO_CONFIG)]
    iql, pr2, ippo = outs
    assert iql.keys() == pr2.keys() == ippo.keys() == {"train_states", "metrics", "agent_ids"}
    assert iql["metrics"].keys() == pr2["metrics"].keys() == SHARED | {"loss", "qvals", "epsilon"}
    assert ippo["metrics"].keys() == SHARED | {"policy_loss", "value_loss", "entropy"}
    for out in outs:
        assert out["agent_ids"] == list(out["train_states"]) == ["row", "column"]
        assert all(np.isfinite(values).all() for values in out["metrics"].values())
    for out in (iql, pr2):
        assert out["train_states"]["row"].keys() == {"online", "target", "optimizer"}
    assert ippo["train_states"]["row"].keys() == {"actor", "critic", "optimizer"}


@CONFIGS
def test_r10_metrics_are_those_of_the_episodes(config):
    """Against the rewards of the game itself."""
    games = []

    class Spy(Matrix):
        def __init__(self, seed):
            super().__init__(seed, length=5)
            games.append(self)
            self.paid = []

        def step(self, actions):
            result = super().step(actions)
            self.paid.append(result[1]["row"])
            return result

    metrics = train(config, Spy, changes={"TOTAL_TIMESTEPS": 320})["metrics"]
    for update in range(20):
        steps = range(8 * update, 8 * (update + 1))
        returns = [sum(game.paid[t - 4 : t + 1]) for game in games for t in steps if (t + 1) % 5 == 0]
        assert metrics["completed_episodes"][update] == len(returns)
        mean = np.mean(returns)
        assert metrics["per_agent_episode_return_mean"][update] == pytest.approx([mean, 2 * mean])
        assert metrics["episode_return_mean"][update] == pytest.approx(1.5 * mean)
        assert metrics["episode_length_mean"][update] == 5
    assert metrics["episode_return_mean"].max() > 0


@CONFIGS
def test_r10_without_a_finished_episode_nothing_is_nan(config):
    """Numbers before are repeated, and are 0 at first."""
    metrics = train(config, lambda seed: Matrix(seed, length=20), changes={"TOTAL_TIMESTEPS": 96})["metrics"]
    assert metrics["completed_episodes"].tolist() == [0, 0, 2, 0, 2, 0]
    lengths = metrics["episode_length_mean"].tolist()
    assert lengths == [0, 0, 20, 20, 20, 20]
    for name in ("episode_return_mean", "per_agent_episode_return_mean"):
        values = metrics[name]
        assert np.array_equal(values[2], values[3])
        assert not values[:2].any()
    never = train(config, lambda seed: Matrix(seed, length=1000))["metrics"]
    assert all(np.isfinite(values).all() for values in never.values())
    assert not never["completed_episodes"].any()


def test_epsilon_falls_over_a_part_of_the_training():
    metrics = train()["metrics"]
    expected = [max(0.1, 1 - 0.9 * 16 * update / 80) for update in range(10)]
    assert metrics["epsilon"] == pytest.approx(expected)


@CONFIGS
def test_the_seed_decides_everything_and_global_generators_are_left_alone(config):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = train(config, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(4)
    second, third = train(config, seed=1), train(config, seed=2)
    part = "actor" if config is IPPO_CONFIG else "online"
    for agent in first["agent_ids"]:
        assert same(first["train_states"][agent][part], second["train_states"][agent][part])
        assert not same(first["train_states"][agent][part], third["train_states"][agent][part])
    assert all(np.array_equal(first["metrics"][name], second["metrics"][name]) for name in first["metrics"])


@CONFIGS
def test_nothing_is_written(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(config)
    assert not list(tmp_path.iterdir())
    assert Path(os.getcwd()) == tmp_path


def test_errors_close_the_environments():
    made = []
    with pytest.raises(ValueError, match=r"has \['nobody'\]"):
        train(env=lambda seed: made.append(Matrix(seed)) or made[-1], trainable_agent_ids={"nobody"})
    assert len(made) == 2
    assert all(env.closed for env in made)

    class Breaks(Matrix):
        def step(self, actions):
            raise OSError("broken")

    made.clear()
    with pytest.raises(OSError, match="broken"):
        train(env=lambda seed: made.append(Breaks(seed)) or made[-1])
    assert all(env.closed for env in made)


# What is trained ----------------------------------------------------------------------------------------------------


def spy_on(monkeypatch, cls):
    made, init = [], cls.__init__
    monkeypatch.setattr(cls, "__init__", lambda self, **kwargs: made.append(kwargs) or init(self, **kwargs))
    return made


def test_settings_reach_the_modules(monkeypatch):
    modules, data = spy_on(monkeypatch, IQL), spy_on(monkeypatch, ReplayDataModule)
    train(changes={"REPLAY_SEQUENCE_LENGTH": 6, "BURN_IN_STEPS": 3, "MAX_GRAD_NORM": None, "TARGET_UPDATE_INTERVAL": 5})
    (module,), (module_data,) = modules, data
    expected = {"recurrent": True, "hidden_sizes": (8,), "target_update_interval": 10, "target_update_rate": None}
    expected |= {"learning_rate": 0.01, "gamma": 0.9, "max_grad_norm": None, "team_reward": None}
    assert expected.items() <= module.items()
    expected = {"capacity": 200, "batch_size": 4, "rollout_length": 8, "sequence_length": 6, "burn_in": 3}
    assert expected.items() <= module_data.items()
    train(changes={"NETWORK_KIND": "mlp", "TAU": 0.2})
    assert {"recurrent": False, "hidden_sizes": (8, 8), "target_update_rate": 0.2}.items() <= modules[1].items()


def test_settings_of_pr2_iql_reach_its_module(monkeypatch):
    modules, data = spy_on(monkeypatch, PR2IQL), spy_on(monkeypatch, ReplayDataModule)
    own = {
        "RESPONSE_MODEL": "marginal",
        "OPPONENTS": "pairwise",
        "AGGREGATE": "expectation",
        "TEMPERATURE": 0.5,
        "MAX_JOINT": 7,
        "MASK_UNSEEN": True,
    }
    train(PR2_CONFIG, changes=own | {"TAU": 0.2})
    train(changes={"TAU": 0.2})
    (module,), (module_data, iql_data) = modules, data
    assert {name.lower(): value for name, value in own.items()}.items() <= module.items()
    expected = {"recurrent": True, "hidden_sizes": (8,), "target_update_rate": 0.2, "gamma": 0.9, "team_reward": None}
    assert expected.items() <= module.items()
    assert {**module_data, "env": None} == {**iql_data, "env": None}


def test_too_many_joint_actions_of_the_others():
    train(PR2_CONFIG, changes={"MAX_JOINT": 3, "TOTAL_TIMESTEPS": 16})
    with pytest.raises(ValueError, match="3 joint actions, more than max_joint=2"):
        train(PR2_CONFIG, changes={"MAX_JOINT": 2})


def test_sequences_are_no_longer_than_episodes_by_default(monkeypatch):
    class Limited(Matrix):
        max_cycles = 4

    data = spy_on(monkeypatch, ReplayDataModule)
    train(env=Limited)
    assert (data[0]["sequence_length"], data[0]["burn_in"]) == (4, 4)
    with pytest.raises(ValueError, match="set it to at most 4"):
        train(env=Limited, changes={"REPLAY_SEQUENCE_LENGTH": 8})


def test_r11_no_two_agents_share_anything():
    states = train()["train_states"]
    tensors = [t for state in states.values() for part in ("online", "target") for t in state[part].values()]
    assert len({t.data_ptr() for t in tensors}) == len(tensors)


@CONFIGS
@pytest.mark.parametrize("kind", ["rnn", "mlp"])
def test_r12_both_kinds_of_networks(config, kind):
    names = train(config, changes={"NETWORK_KIND": kind})["train_states"]["row"]
    part = "actor" if config is IPPO_CONFIG else "online"
    assert any("gru" in name for name in names[part]) == (kind == "rnn")


@CONFIGS
def test_r13_a_warm_start_begins_with_the_snapshot(config):
    first = train(config, seed=0)
    kept = {a: {k: v.clone() for k, v in s[p].items()} for a, s in first["train_states"].items() for p in list(s)[:1]}
    still = {"LR": 1e-30, "TOTAL_TIMESTEPS": 32}
    second = train(config, seed=1, initial_train_states=first["train_states"], changes=still)
    part = "actor" if config is IPPO_CONFIG else "online"
    for agent in kept:
        assert same(second["train_states"][agent][part], kept[agent])  # R16 too
        added = 2 * 2 * 2 if config is IPPO_CONFIG else 0
        before = first["train_states"][agent]["optimizer"]["step"]
        learnt = second["train_states"][agent].get("optimizer", {"step": before})
        assert learnt["step"] == before + added
    states = dict(first["train_states"], stranger=first["train_states"]["row"])
    del states["column"]
    states["row"] = states["row"] | {part: states["row"][part] | {"extra": torch.zeros(1)}}
    with pytest.raises(ValueError, match=r"missing agents: column\nunknown agents: stranger\nrow: .*extra is unknown"):
        train(config, initial_train_states=states)


@pytest.mark.parametrize(
    "config", [IQL_CONFIG, PR2_CONFIG | {"RESPONSE_MODEL": "learned", "MASK_UNSEEN": True}], ids=["iql", "pr2"]
)
def test_r14_only_some_agents_learn(config):
    config = config | {"TARGET_UPDATE_INTERVAL": 2}
    first = train(config, seed=0)["train_states"]
    out = train(config, seed=1, initial_train_states=first, trainable_agent_ids={"column"})
    for part in ("online", "target"):
        assert same(out["train_states"]["row"][part], first["row"][part])
    assert not same(out["train_states"]["column"]["online"], first["column"]["online"])
    assert "optimizer" not in out["train_states"]["row"]
    third = train(config, seed=2, initial_train_states=out["train_states"], trainable_agent_ids=["row"])
    assert same(third["train_states"]["column"]["online"], out["train_states"]["column"]["online"])


@pytest.mark.parametrize("config", [IQL_CONFIG, PR2_CONFIG], ids=["iql", "pr2"])
@pytest.mark.parametrize("mode", ["greedy", "epsilon", "softmax"])
def test_r14_r17_how_the_others_act(mode, config):
    states = train(config, seed=0)["train_states"]
    changes = {} if mode == "greedy" else {"OPPONENT_MODE": mode, "OPPONENT_RATE": 1.0}
    out = train(
        config, seed=1, initial_train_states=states, trainable_agent_ids={"column"}, capture_env_histories=True,
        changes={"EPS_FINISH": 1.0} | changes,
    )  # fmt: skip
    episodes = [episode for history in out["env_histories"] for episode in history]
    plays = {tuple(step["row"] for step in episode["actions"]) for episode in episodes}
    assert (len(plays) == 1) == (mode == "greedy")
    assert len({tuple(step["column"] for step in episode["actions"]) for episode in episodes}) > 5


def test_agents_cannot_be_frozen_everywhere():
    with pytest.raises(ValueError, match="ALGORITHM='iql' or 'pr2_iql'"):
        train(IPPO_CONFIG, trainable_agent_ids={"row"})
    with pytest.raises(ValueError, match=r"collection of names, such as \{'row'\}"):
        train(trainable_agent_ids="row")


# Histories ----------------------------------------------------------------------------------------------------------


@CONFIGS
def test_r8_histories_of_any_environment(config):
    out = train(config, capture_env_histories=True)
    histories = out["env_histories"]
    assert json.loads(json.dumps(histories)) == histories
    assert [len(history) for history in histories] == [20, 20]
    episode = histories[0][0]
    assert episode.keys() == {"actions", "rewards", "terminated", "truncated"}
    assert len(episode["actions"]) == len(episode["rewards"]) == 4
    assert episode["terminated"]
    for step, paid in zip(episode["actions"], episode["rewards"], strict=True):
        assert paid == {
            "row": float(step == {"row": 1, "column": 2}),
            "column": 2.0 * (step == {"row": 1, "column": 2}),
        }
    total = np.mean([paid["row"] for history in histories for e in history for paid in e["rewards"]])
    assert out["metrics"]["per_agent_episode_return_mean"][:, 0].mean() / 4 == pytest.approx(total)


def test_r8_histories_that_environments_keep():
    class Keeps(Matrix):
        def history(self):
            return {"seed": self.seed, "last": np.float32(self.time), "seen": frozenset("ab"), "all": np.arange(2)}

    out = train(env=Keeps, capture_env_histories=True)
    assert [entry["last"] for entry in out["env_histories"]] == [0, 0]
    assert [entry["seen"] for entry in out["env_histories"]] == [["a", "b"]] * 2
    json.dumps(out["env_histories"])
    with pytest.raises(TypeError, match="holds Odd, which cannot be written as JSON"):
        train(
            env=lambda seed: type("Odd", (Matrix,), {"history": lambda self: [self]})(seed), capture_env_histories=True
        )


def watched(keep_history):
    def make(seed):
        game = PettingZooAdapter(factory=lambda: Matrix(seed), end_together=True)

        def label(context):
            met = context.actions["row"][0] == 1 and context.actions["column"][0] == 2
            return {agent: frozenset("m" if met else "") for agent in ("row", "column")}

        monitors = {agent: sequence("m", "m") for agent in ("row", "column")}
        return MonitorParallelEnv(game, monitors, label, keep_history=keep_history)

    return make


@CONFIGS
def test_r8_histories_of_monitors(config):
    out = train(config, watched(True), capture_env_histories=True)
    assert out["agent_ids"] == ["row", "column"]
    episode = out["env_histories"][0][0]
    assert {"states", "labels", "actions", "rewards"} <= episode.keys()
    assert json.loads(json.dumps(out["env_histories"])) == out["env_histories"]
    assert "env_histories" not in train(config, watched(True), changes={"TOTAL_TIMESTEPS": 16})


def test_r8_a_history_that_is_not_kept_is_told_before_training():
    calls = []
    with pytest.raises(RuntimeError, match="keep_history=True"):
        train(env=watched(False), capture_env_histories=True, on_update=lambda *call: calls.append(call))
    assert not calls


def test_r8_nothing_is_kept_without_need(monkeypatch):
    made = []
    monkeypatch.setattr(EpisodeHistory, "__init__", lambda self, env: made.append(env))
    train(changes={"TOTAL_TIMESTEPS": 16})
    assert not made


def test_an_episode_history_changes_nothing():
    env = EpisodeHistory(PettingZooAdapter(factory=lambda: Matrix(0)))
    assert isinstance(env, MultiAgentEnv)
    check_env(env)


def test_returns_of_single_agents():
    env = RecordEpisodeStatistics(PettingZooAdapter(factory=lambda: Matrix(0)), per_agent=True)
    env.reset()
    for _ in range(3):
        step = env.step({"row": np.array([1]), "column": np.array([2])})
    assert step.info["agent_return/row"] == 3
    assert step.info["agent_return/column"] == 6
    env.reset()
    assert env.step({"row": np.array([0]), "column": np.array([2])}).info["agent_return/column"] == 0
    assert (
        "agent_return/row" not in RecordEpisodeStatistics(PettingZooAdapter(factory=lambda: Matrix(0))).spec.info_keys
    )


# Learning -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        IQL_CONFIG | {"TOTAL_TIMESTEPS": 1600, "NETWORK_KIND": "mlp", "BUFFER_BATCH_SIZE": 16, "HIDDEN_SIZE": 16},
        IQL_CONFIG | {"TOTAL_TIMESTEPS": 1600, "BUFFER_BATCH_SIZE": 16, "HIDDEN_SIZE": 16},
        IPPO_CONFIG | {"TOTAL_TIMESTEPS": 1600, "NETWORK_KIND": "mlp", "HIDDEN_SIZE": 16},
    ],
    ids=["iql mlp", "iql rnn", "ippo"],
)
def test_agents_learn_to_meet(config):
    """The best is 4 for one and 8 for the other; at random they meet in 1 of 6 steps."""
    metrics = train(config, seed=0)["metrics"]
    assert metrics["episode_return_mean"][:5].mean() < 3
    late = metrics["per_agent_episode_return_mean"][-10:].mean(0)
    assert late[0] > 3.2
    assert late[1] == pytest.approx(2 * late[0])


def test_pr2_iql_climbs_and_iql_does_not():
    """At last all choose greedily: 11 where others are thought to help, and 7 where they are what they have been."""
    changes = {"NUM_ENVS": 4, "TOTAL_TIMESTEPS": 1600, "NETWORK_KIND": "mlp", "BUFFER_BATCH_SIZE": 32}
    changes |= {"BUFFER_SIZE": 1000, "GAMMA": 0.0, "LR": 0.02, "TARGET_UPDATE_INTERVAL": 1}
    changes |= {"EPS_FINISH": 0.0, "EPS_DECAY": 0.9}

    def climb(config, seed):
        metrics = train(config, Climbing, changes=changes, seed=seed)["metrics"]
        return metrics["episode_return_mean"][-1]

    assert [climb(PR2_CONFIG, seed) for seed in range(3)] == [4 * 11] * 3
    assert climb(IQL_CONFIG, 0) <= 4 * 7


def test_it_is_exported():
    assert marl_lightning.make_train is make_train
    assert "make_train" in marl_lightning.__all__
