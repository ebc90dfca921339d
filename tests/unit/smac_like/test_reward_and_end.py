"""Rewards and ends of episodes."""

import numpy as np
import pytest
import torch
from smac_helpers import Battle, focus_policy, make_random_policy, play

from marl_lightning.envs.native.smac import SmacVectorEnv
from marl_lightning.envs.native.smac.env import GROUP
from marl_lightning.envs.native.smac.kernel import FIRST_ATTACK, REWARD_MODES, STOP


@pytest.mark.parametrize(("map_name", "max_reward"), [("3m", 365), ("8m", 640)])
def test_return_of_a_win_without_regeneration_is_exactly_twenty(map_name, max_reward):
    episodes = play(SmacVectorEnv(map_name=map_name, num_envs=16, spawn_noise=1.0), focus_policy, episodes=64)
    won = episodes["won"] == 1
    assert 0.2 < won.mean() < 0.95
    np.testing.assert_allclose(episodes["return"][won], 20, atol=1e-4)
    assert episodes["return"][~won].max() <= 20 * (max_reward - 200) / max_reward


def test_reward_modes_follow_their_formulas():
    envs = {mode: SmacVectorEnv(map_name="2s3z", num_envs=8, reward_mode=mode) for mode in REWARD_MODES}
    policy, layout = make_random_policy(), envs["smac"].layout
    for env in envs.values():
        observations = env.reset()
    maximum = np.array([unit.health for unit in layout.allies + layout.enemies], np.float32)
    shields = np.array([unit.shield for unit in layout.allies + layout.enemies], np.float32)

    def points(state):
        allies, enemies = state[:, :35].reshape(-1, 5, 7), state[:, 35:65].reshape(-1, 5, 6)
        health = np.concatenate([allies[..., 0], enemies[..., 0]], axis=1) * maximum
        shield = np.concatenate([allies[..., 4], enemies[..., 3]], axis=1) * shields
        return health, (health + shield)

    seen_regeneration = False
    for _ in range(150):
        health_before, before = points(observations.state.numpy().copy())
        actions = policy(observations.observation[GROUP].numpy(), observations.action_mask[GROUP].numpy(), layout)
        steps = {mode: env.step({GROUP: torch.from_numpy(actions)}) for mode, env in envs.items()}
        step = steps["smac"]
        over = (step.terminated | step.truncated).numpy()
        health_after, after = points(np.where(over[:, None], step.final.state.numpy(), step.observations.state.numpy()))
        lost, died = before - after, (health_before > 0) & (health_after == 0)
        enemy = lost[:, 5:].sum(1) + 10 * died[:, 5:].sum(1)
        ally = lost[:, :5].sum(1) + 10 * died[:, :5].sum(1)
        seen_regeneration |= bool((enemy < 0).any())
        won = step.info["battle_won"].numpy()
        defeat = step.terminated.numpy() & (won == 0)
        expected = {
            "smac": np.abs(enemy) + 200 * won,
            "clip": np.maximum(enemy, 0) + 200 * won,
            "damage": step.info["damage_dealt"].numpy() + 10 * died[:, 5:].sum(1) + 200 * won,
            "signed": enemy - 0.5 * ally + 200 * won,
            "sparse": won - defeat,
        }
        for mode, env in envs.items():
            np.testing.assert_allclose(env.team_reward, expected[mode] * 20 / 1020, atol=2e-4, err_msg=mode)
        observations = step.observations
    assert seen_regeneration, "the absolute value should have mattered"


@pytest.mark.parametrize(("mode", "expected"), [("smac", 1), ("clip", 0), ("damage", 0), ("signed", -1), ("sparse", 0)])
def test_regeneration_of_enemies_is_rewarded_only_by_the_absolute_value(mode, expected):
    battle = Battle("2s3z", reward_mode=mode).pacify().put(5, shield=10)
    battle.step()
    # eight ticks of 0.125 points
    assert battle.env.team_reward[0] == pytest.approx(expected * 20 / 1020)


@pytest.mark.parametrize(
    ("options", "win", "defeat"),
    [
        ({}, 200 * 20 / 365, 0),
        ({"reward_scale_rate": 1.0}, 200 / 365, 0),
        ({"reward_scale": False}, 200, 0),
        ({"reward_scale": False, "reward_win": 50, "reward_defeat": -30}, 50, -30),
        ({"reward_scale": False, "reward_mode": "sparse"}, 1, -1),
        ({"reward_mode": "sparse"}, 20 / 365, -20 / 365),
    ],
)
def test_reward_of_the_end(options, win, defeat):
    for survivors, expected in (((0,), win), ((3,), defeat)):
        battle = Battle("3m", **options).only(*survivors)
        step = battle.step()
        assert step.terminated[0]
        assert battle.env.team_reward[0] == pytest.approx(expected)


def test_value_of_kills_and_own_losses():
    battle = Battle("3m", reward_mode="signed", reward_scale=False, reward_death_value=7, reward_negative_scale=0.25)
    battle.put(0, x=12, y=16, health=6).put(3, x=15, y=16, health=6).put(4, x=31, y=9)
    battle.step(FIRST_ATTACK)
    assert battle.env.team_reward[0] == pytest.approx(6 + 7 - 0.25 * (6 + 7))


def test_all_agents_get_the_reward_of_the_team_the_dead_too():
    battle = Battle("3m", ticks=1).only(0, 1, 3, 4).put(0, x=12, y=16, health=6).put(3, x=15, y=16, health=6)
    step = battle.step(FIRST_ATTACK)
    assert step.info["dead_allies"][0] == 2
    reward = 16 * 20 / 365
    np.testing.assert_allclose(step.reward[GROUP][0], [reward, reward, reward])


def test_draw_is_termination_without_win():
    battle = Battle("3m", reward_mode="sparse", reward_scale=False).only(0, 3)
    battle.put(0, x=12, y=16, health=6).put(3, x=15, y=16, health=6)
    step = battle.step(FIRST_ATTACK)
    assert step.terminated[0]
    assert step.info["battle_won"][0] == 0
    assert battle.env.team_reward[0] == 0


@pytest.mark.parametrize("limit_is_terminal", [False, True])
def test_time_limit(limit_is_terminal):
    battle = Battle("3m", limit_is_terminal=limit_is_terminal).pacify()
    for time in range(1, 61):
        step = battle.step(STOP)
        ended = (step.terminated | step.truncated).item()
        assert ended == (time == 60)
    assert step.terminated[0] == limit_is_terminal
    assert step.truncated[0] != limit_is_terminal
    assert step.info["timeout"][0] == 1
    assert step.info["battle_won"][0] == 0


def test_win_in_the_last_step_is_a_win_and_not_a_timeout():
    battle = Battle("3m").only(0, 3).put(0, x=12, y=16).put(3, x=15, y=16, health=6)
    battle.state.time[0] = 59
    step = battle.step(FIRST_ATTACK)
    assert step.terminated[0]
    assert not step.truncated[0]
    assert step.info["battle_won"][0] == 1
    assert step.info["timeout"][0] == 0


def test_info_counts():
    battle = Battle("3m", ticks=1).put(2, health=0).put(5, health=0).put(0, x=12, y=16).put(3, x=15, y=16)
    step = battle.step(FIRST_ATTACK, FIRST_ATTACK + 2)
    info = {name: value.item() for name, value in step.info.items()}
    assert info == {
        "battle_won": 0,
        "timeout": 0,
        "dead_allies": 1,
        "dead_enemies": 1,
        "invalid_actions": 1,  # attack on a dead enemy; the action of the dead agent does not count
        "damage_dealt": 6,
        "damage_taken": 6,
        "ally_alive_frac": pytest.approx(2 / 3),
    }
