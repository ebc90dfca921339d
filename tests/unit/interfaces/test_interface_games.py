"""Interfaces by name, and those of the packages against the packages."""

import subprocess
import sys

import fake_smac
import gymnasium
import numpy as np
import pytest

from marl_lightning.envs import check_env, interfaces
from marl_lightning.envs.interfaces import (
    LBFInterface,
    MAgent2Interface,
    MAmujocoInterface,
    PettingZooInterface,
    RWAREInterface,
    SMACInterface,
    SMACliteInterface,
    SMACv2Interface,
    make_interface,
)

LBF = "Foraging-2s-10x10-3p-3f-coop-v3"

# Agents, sizes of observations, state and actions.
SIZES = {
    "lbf": (lambda **kwargs: LBFInterface(LBF, **kwargs), (3, 18, 18, 6)),
    "lbf, embedded": (lambda **kwargs: LBFInterface(LBF, backend="embedded", **kwargs), (3, 18, 18, 6)),
    "rware": (lambda **kwargs: RWAREInterface("rware-tiny-2ag-v2", **kwargs), (2, 71, None, 5)),
    "rware, embedded": (
        lambda **kwargs: RWAREInterface("rware-tiny-2ag-v2", backend="embedded", **kwargs),
        (2, 71, None, 5),
    ),
    "smaclite": (lambda **kwargs: SMACliteInterface("MMM2", **kwargs), (10, 176, 322, 18)),
    "smac": (lambda **kwargs: SMACInterface("3m", **kwargs), (3, 30, 48, 9)),
    "smacv2": (lambda **kwargs: SMACv2Interface("terran_5_vs_5", **kwargs), (5, None, None, 11)),
    "sisl": (lambda **kwargs: PettingZooInterface("pursuit_v5", "sisl", **kwargs), (8, 147, 768, 5)),
    "butterfly": (
        lambda **kwargs: PettingZooInterface("knights_archers_zombies_v11", "butterfly", **kwargs),
        (4, 135, 104, 6),
    ),
    "classic": (lambda **kwargs: PettingZooInterface("connect_four_v3", "classic", **kwargs), (2, 84, 168, 8)),
    "mpe": (lambda **kwargs: PettingZooInterface("simple_tag_v3", "mpe", **kwargs), (4, 16, 62, 5)),
    "mamujoco, Ant": (lambda **kwargs: MAmujocoInterface("Ant-p2x4", **kwargs), (2, 63, 105, 4)),
    "mamujoco, HalfCheetah": (lambda **kwargs: MAmujocoInterface("HalfCheetah-p2x3", **kwargs), (2, 12, 17, 3)),
    "mamujoco, Pusher": (lambda **kwargs: MAmujocoInterface("Pusher-p3p", **kwargs), (3, 16, 23, 3)),
    "pursuit": (lambda **kwargs: MAgent2Interface("adversarial_pursuit_v4", **kwargs), (75, 500, 10125, 13)),
    "battle": (lambda **kwargs: MAgent2Interface("battle_v4", **kwargs), (162, 845, 10125, 21)),
    "battlefield": (lambda **kwargs: MAgent2Interface("battlefield_v5", **kwargs), (24, 845, 32000, 21)),
    "combined arms": (lambda **kwargs: MAgent2Interface("combined_arms_v6", **kwargs), (162, 1521, 18225, 25)),
    "gather": (lambda **kwargs: MAgent2Interface("gather_v5", **kwargs), (495, 1125, 200000, 33)),
    "tiger deer": (lambda **kwargs: MAgent2Interface("tiger_deer_v4", **kwargs), (121, 405, None, 9)),
    "from the registry": (lambda **kwargs: make_interface("smac/3m", **kwargs), (3, 30, 48, 9)),
}


@pytest.fixture
def stand_ins(monkeypatch):
    """Lets smac, smacv2 and smaclite be played."""
    fake_smac.install_smac(monkeypatch)
    fake_smac.install_smaclite(monkeypatch)


@pytest.mark.parametrize(
    ("game", "reward_aggr"),
    [
        *((game, None) for game in SIZES),
        *((game, how) for game in ("lbf", "rware", "sisl", "smac") for how in ("sum", "mean", "none", "first")),
    ],
)
def test_every_game_is_played_by_its_interface(game, reward_aggr, stand_ins):
    make, (num_agents, obs_size, state_size, action_size) = SIZES[game]
    env = make() if reward_aggr is None else make(reward_aggr=reward_aggr)
    assert (env.n_agents, env.get_action_size()) == (num_agents, action_size)
    assert env.get_obs_size() == obs_size or obs_size is None
    assert env.get_state_size() == state_size or state_size is None
    obs, _ = env.reset(seed=1)
    for _ in range(10):
        state, legal, alive = env.get_state(), env.get_avail_actions(), env.get_agent_mask()
        assert obs.shape == (num_agents, env.get_obs_size())
        assert state.shape == (env.get_state_size(),)
        assert legal.shape == (num_agents, action_size)
        assert alive.shape == (num_agents,)
        assert legal.dtype == alive.dtype == np.bool_
        assert legal.any(axis=1).all()
        obs, reward, terminated, truncated, info = env.step(env.sample())
        assert np.shape(reward) == (() if env.reward_aggr != "none" else (num_agents,))
        assert not set(info) - set(env.spec.info_keys)
        if terminated or truncated:
            obs, _ = env.reset()
    env.close()
    env.close()


@pytest.mark.parametrize("seed", range(4))
def test_lbf_equals_the_package_by_hand(seed):
    env = LBFInterface(LBF, reward_aggr="none")
    from lbforaging.foraging.environment import Action

    package = gymnasium.make(LBF, disable_env_checker=True)
    expected, _ = package.reset(seed=seed)
    obs, _ = env.reset(seed=seed)
    foods, length = 3, 0
    over = False
    while not over:
        np.testing.assert_array_equal(obs, np.stack(expected))
        game = package.unwrapped
        legal = [[action in game._valid_actions[player] for action in Action] for player in game.players]
        assert env.get_avail_actions().tolist() == legal
        actions = env.sample()
        obs, reward, terminated, truncated, info = env.step(actions)
        expected, expected_reward, over, _, _ = package.step(tuple(actions))
        np.testing.assert_array_equal(reward, np.array(expected_reward, np.float32))
        foods, length = np.count_nonzero(game.field), length + 1
        assert info["food_left"] == foods
        assert (terminated, truncated) == (over and foods == 0, over and foods > 0)
    assert length == 50 or foods == 0


@pytest.mark.parametrize("seed", range(3))
def test_simple_tag_equals_the_package_by_hand(seed):
    from mpe2 import simple_tag_v3

    env, package = PettingZooInterface("simple_tag_v3", "mpe"), simple_tag_v3.parallel_env()
    expected, _ = package.reset(seed=seed)
    obs, _ = env.reset(seed=seed)
    assert env.agents == tuple(package.possible_agents)
    truncated = False
    while not truncated:
        for row, agent in zip(obs, env.agents, strict=True):
            size = len(expected[agent])
            np.testing.assert_array_equal(row[:size], expected[agent])
            assert not row[size:].any()
        np.testing.assert_array_equal(env.get_state(), package.state())
        actions = env.sample()
        obs, reward, terminated, truncated, _ = env.step(actions)
        expected, rewards, _, truncations, _ = package.step(dict(zip(env.agents, actions, strict=True)))
        np.testing.assert_array_equal(reward, np.array([rewards[agent] for agent in env.agents], np.float32))
        assert (terminated, truncated) == (False, all(truncations.values()))


def test_agents_of_different_width_keep_the_order_of_the_package():
    from gymnasium_robotics import mamujoco_v1

    env = MAmujocoInterface("Pusher-p3p")
    package = mamujoco_v1.parallel_env(scenario="Pusher", agent_conf="3p")
    assert env.agents == tuple(package.possible_agents)
    env.reset(seed=0)
    dimensions = env.get_avail_actions()
    assert dimensions.sum(axis=1).tolist() == [package.action_space(agent).shape[0] for agent in env.agents]
    assert dimensions.sum(axis=1).tolist() == [3, 1, 3]
    for _ in range(5):
        actions = env.sample()
        assert not actions[~dimensions].any()
        assert np.abs(actions).max() > 1  # bounds are 2
        env.step(actions)
    outside = np.where(dimensions, 0, 1e6)  # what is no agent's own does nothing
    results = []
    for actions in (np.zeros((3, 3)), outside):
        env.reset(seed=3)
        results.append(env.step(actions)[0])
    np.testing.assert_array_equal(*results)


# Limits --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "limit"),
    [
        (lambda limit: LBFInterface("Foraging-19x19-2p-4f-coop-v3", max_episode_steps=limit), 70),
        (lambda limit: RWAREInterface("rware-tiny-2ag-v2", max_episode_steps=limit), 4),
        (lambda limit: PettingZooInterface("simple_spread_v3", "mpe", max_episode_steps=limit), 40),
        (lambda limit: PettingZooInterface("multiwalker_v9", "sisl", max_episode_steps=limit), 3),
        (lambda limit: PettingZooInterface("chess_v6", "classic", max_episode_steps=limit), 3),
        (lambda limit: MAmujocoInterface("HalfCheetah-p2x3", max_episode_steps=limit), 4),
        (lambda limit: MAgent2Interface("battle_v4", max_episode_steps=limit), 4),
        (lambda limit: SMACInterface("3m", max_episode_steps=limit), 2),
        (lambda limit: SMACv2Interface("terran_5_vs_5", max_episode_steps=limit), 2),
        (lambda limit: SMACliteInterface("2s3z", max_episode_steps=limit), 2),
        (lambda limit: make_interface("matrix/penalty", max_episode_steps=limit), 1),
    ],
)
def test_a_time_limit_truncates(make, limit, stand_ins):
    env = make(limit)
    env.reset(seed=0)
    flags = [env.step(env.sample())[2:4]]
    while not any(flags[-1]):
        flags.append(env.step(env.sample())[2:4])
    assert len(flags) == limit
    assert flags[-1] == (False, True) or limit == 1


def test_two_limits_of_one_kind_are_refused():
    with pytest.raises(ValueError, match="max_episode_steps and episode_limit are the same"):
        LBFInterface(LBF, max_episode_steps=5, episode_limit=7)


# Names ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Ant", "Ant-2x4", "-p2x4", "Ant-p", "Ant-p7x7"])
def test_robots_are_named_with_their_partition(name):
    with pytest.raises(ValueError, match=r"ROBOT-pPARTITION|Ant-7x7"):
        MAmujocoInterface(name)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MAgent2Interface("battle_v9"), "unknown environment 'magent2/battle_v9'.*did you mean magent2/battle"),
        (lambda: PettingZooInterface("pursuit_v4", "sisl"), "pettingzoo/sisl/pursuit_v5"),
        (lambda: LBFInterface("Foraging-8x8-2p-2f-v2"), "did you mean lbf/Foraging-8x8-2p-2f-v3"),
    ],
)
def test_unknown_names_come_with_near_ones(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("interface", "name", "package"),
    [
        (SMACInterface, "3m", "smac"),
        (SMACv2Interface, "terran_5_vs_5", "smacv2"),
        (SMACliteInterface, "2s3z", "smaclite"),
    ],
)
def test_missing_packages_are_named(interface, name, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=f"{package} needs a package that is missing.*github"):
        interface(name)


def test_interfaces_and_wrappers_import_no_torch():
    code = """
import sys
from marl_lightning.envs.interfaces import *
env = LBFInterface("Foraging-5x5-2p-1f-v3")
for wrap in (NormalizeObservation, AddAgentID, NormalizeReward):
    env = wrap(env)
env.reset()
env.step(env.sample())
print([name for name in ("torch", "lightning", "numba", "tensordict") if name in sys.modules])
"""
    names = [name for name in interfaces.__all__ if not name.endswith("VectorEnv")]
    code = code.replace("import *", f"import {', '.join(names)}")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


@pytest.mark.parametrize("game", ["lbf", "mpe", "mamujoco, Pusher"])
@pytest.mark.parametrize("reward_aggr", ["sum", "none"])
def test_games_with_flat_observations_keep_the_contract(game, reward_aggr):
    make, _ = SIZES[game]
    check_env(make(reward_aggr=reward_aggr)._env)
