"""The interface of SMAC programs."""

import numpy as np
import pytest
from smac_helpers import Battle

from marl_lightning.envs.native.smac import SmacEnv
from marl_lightning.envs.native.smac.kernel import FIRST_ATTACK, STOP


def play_random(env, seed=0):
    """Plays one episode as SMAC's example program does and returns its rewards and last information."""
    generator, rewards, terminated = np.random.default_rng(seed), [], False
    env.reset()
    while not terminated:
        actions = [
            generator.choice(np.flatnonzero(env.get_avail_agent_actions(i))) for i in range(env._layout.num_agents)
        ]
        reward, terminated, info = env.step(actions)
        rewards.append(reward)
    return rewards, info


def test_env_info():
    assert SmacEnv(map_name="2s3z").get_env_info() == {
        "state_shape": 120,
        "obs_shape": 80,
        "n_actions": 11,
        "n_agents": 5,
        "episode_limit": 120,
        "agent_features": ["health", "energy/cooldown", "rel_x", "rel_y", "shield", "type_0", "type_1"],
        "enemy_features": ["health", "rel_x", "rel_y", "shield", "type_0", "type_1"],
    }


def test_shapes_and_copies():
    env = SmacEnv(map_name="3m")
    observations, state = env.reset()
    assert [row.shape for row in observations] == [(30,)] * 3
    assert state.shape == (48,)
    np.testing.assert_array_equal(env.get_obs_agent(1), observations[1])
    assert np.shape(env.get_avail_actions()) == (3, env.get_total_actions())
    kept = observations[0].copy()
    env.step([STOP] * 3)
    np.testing.assert_array_equal(observations[0], kept)


def test_episodes_and_statistics():
    env = SmacEnv(map_name="3m")
    for episode in range(3):
        rewards, info = play_random(env, episode)
        assert set(info) == {"battle_won", "dead_allies", "dead_enemies"}
        assert info["battle_won"] is False
        assert sum(rewards) > 0
    stats = env.get_stats()
    assert stats["battles_game"] == 3
    assert stats["battles_won"] == 0
    assert stats["win_rate"] == 0
    assert stats["restarts"] == 0
    env.close()


def test_terminal_observations_are_kept_until_reset_and_no_episode_is_skipped():
    env = SmacEnv(map_name="3m", spawn_noise=1.0)
    play_random(env)
    terminal = env.get_state()
    with pytest.raises(RuntimeError, match="reset"):
        env.step([STOP] * 3)
    np.testing.assert_array_equal(env.get_state(), terminal)
    assert sum(row[0] for row in env.get_avail_actions()) >= 1, "somebody is dead"
    env.reset()
    assert env._env._state.episode[0] == 1
    assert not np.array_equal(env.get_state(), terminal)
    env.reset()
    assert env._env._state.episode[0] == 2


@pytest.mark.parametrize("continuing", [False, True])
def test_time_limit_is_termination(continuing):
    env = SmacEnv(map_name="3m", continuing_episode=continuing)
    env.reset()
    env._env._state.time[0] = 59
    _, terminated, info = env.step([STOP] * 3)
    assert terminated is True
    assert info.get("episode_limit", False) == continuing
    assert env.get_stats()["timeouts"] == env.get_stats()["battles_draw"] == 1


def test_win_is_reported():
    env = SmacEnv(map_name="3m")
    env.reset()
    battle = Battle.__new__(Battle)
    battle.state = env._env._state
    battle.only(0, 1, 2)
    reward, terminated, info = env.step([STOP] * 3)
    assert (terminated, info["battle_won"], info["dead_enemies"]) == (True, True, 3)
    assert reward == pytest.approx(200 * 20 / 365)
    assert env.get_stats()["win_rate"] == 1


def test_illegal_actions_raise_by_default():
    env = SmacEnv(map_name="3m")
    env.reset()
    with pytest.raises(ValueError, match="not legal"):
        env.step([FIRST_ATTACK, STOP, STOP])
    SmacEnv(map_name="3m", invalid_action="mask").reset()


def test_nothing_can_be_read_before_reset():
    env = SmacEnv(map_name="3m")
    for read in (env.get_obs, env.get_state, env.get_avail_actions):
        with pytest.raises(RuntimeError, match="reset"):
            read()
    with pytest.raises(RuntimeError, match="reset"):
        env.step([STOP] * 3)


def test_picture():
    env = SmacEnv(map_name="3m")
    env.reset()
    assert env.render().dtype == np.uint8
