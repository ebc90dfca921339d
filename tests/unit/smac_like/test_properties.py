"""What holds in every battle, whatever is done; and how scripted agents fare."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from smac_helpers import focus_policy, make_random_policy, nearest_policy, play

from marl_lightning.envs.native.smac import SmacVectorEnv
from marl_lightning.envs.native.smac.env import GROUP
from marl_lightning.envs.native.smac.kernel import COLLISIONS, NO_OP, REWARD_MODES
from marl_lightning.envs.native.smac.scenarios import PHYSICS, SCENARIOS


@settings(max_examples=40, deadline=None)
@given(
    map_name=st.sampled_from(sorted(SCENARIOS)),
    physics=st.sampled_from(sorted(PHYSICS)),
    collision=st.sampled_from(COLLISIONS),
    reward_mode=st.sampled_from(REWARD_MODES),
    spawn_noise=st.sampled_from([0.0, 1.0, 4.0]),
    seed=st.integers(0, 2**40),
)
def test_invariants(map_name, physics, collision, reward_mode, spawn_noise, seed):
    env = SmacVectorEnv(
        map_name=map_name,
        num_envs=2,
        seed=seed,
        physics=physics,
        collision=collision,
        reward_mode=reward_mode,
        spawn_noise=spawn_noise,
    )
    env.reset()
    generator = np.random.default_rng(seed)
    constants, state = env._constants, env._state
    for _ in range(30):
        # Illegal actions included.
        actions = torch.from_numpy(generator.integers(-1, env.layout.num_actions + 1, env._actions.shape))
        step = env.step({GROUP: actions})
        mask, alive = step.observations.action_mask[GROUP], step.observations.alive[GROUP]
        assert mask.any(-1).all()
        assert (mask[~alive].sum(-1) == 1).all()
        assert mask[~alive][:, NO_OP].all()
        assert not mask[alive][:, NO_OP].any()
        assert not step.observations.observation[GROUP][~alive].any()
        assert (step.reward[GROUP] == step.reward[GROUP][:, :1]).all()
        assert torch.isfinite(step.observations.observation[GROUP]).all()
        assert step.observations.state.abs().max() < 1.2
        assert ((state.health >= 0) & (state.health <= constants.max_health)).all()
        assert ((state.shield >= 0) & (state.shield <= constants.max_shield)).all()
        assert (state.cooldown >= 0).all()
        assert constants.pathable[state.x.astype(int), state.y.astype(int)].all()
        assert not (step.terminated & step.truncated).any()


@pytest.mark.parametrize(
    ("map_name", "physics", "low", "high"),
    [
        # Random play of SMAClite itself returns 1.47 and 4.09.
        ("3m", "smaclite", 1.3, 1.7),
        ("2s3z", "smaclite", 3.9, 4.8),
        ("3m", "sc2", 1.3, 1.9),
        ("2s3z", "sc2", 4.0, 5.1),
    ],
)
def test_random_play_rarely_hurts_anybody(map_name, physics, low, high):
    env = SmacVectorEnv(map_name=map_name, num_envs=64, physics=physics)
    episodes = play(env, make_random_policy(), episodes=256)
    assert low < episodes["return"].mean() < high
    assert episodes["won"].mean() < 0.02


def test_focused_fire_beats_nearest_fire_beats_random_play_on_3m():
    win_rates = [
        play(SmacVectorEnv(map_name="3m", num_envs=64), policy, episodes=256)["won"].mean()
        for policy in (make_random_policy(), nearest_policy, focus_policy)
    ]
    assert win_rates[0] < 0.02
    assert win_rates[0] + 0.05 < win_rates[1] < win_rates[2] - 0.2
    assert win_rates[2] > 0.7


def test_scripted_play_stays_where_it_was_measured():
    """Regression values of the smaclite physics, close to those of SMAClite (0.25 wins, return 9.95, length 16.3)."""
    env = SmacVectorEnv(map_name="3m", num_envs=64, physics="smaclite", spawn_noise=1.5)
    episodes = play(env, nearest_policy, episodes=512)
    assert episodes["won"].mean() == pytest.approx(0.24, abs=0.05)
    assert episodes["return"].mean() == pytest.approx(9.7, abs=0.6)
    assert episodes["length"].mean() == pytest.approx(15.7, abs=0.6)
