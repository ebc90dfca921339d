"""Without autoreset, instances that ended stand still until they are reset, in both vector environments alike."""

from functools import partial

import numpy as np
import pytest
import torch
from vector_games import DiceGame

from marl_lightning.envs import SharedMemoryVectorEnv, SyncVectorEnv

ACTIONS = {"team": torch.zeros(6, 2, dtype=torch.int64), "lone": torch.zeros(6, 1, 2)}
KINDS = {"sync": SyncVectorEnv, "shared memory": partial(SharedMemoryVectorEnv, num_workers=2, context="fork")}


@pytest.fixture(params=KINDS)
def env(request):
    with KINDS[request.param](factory=DiceGame, num_envs=6, seed=3, autoreset=False) as env:
        yield env


def rows(step, i):
    """Returns copies of everything of instance ``i`` but its reward."""
    observations = step.observations
    arrays = [*observations.observation.values(), *observations.action_mask.values(), *observations.alive.values()]
    arrays += [observations.state, step.terminated, step.truncated, *step.info.values()]
    return [array[i].clone() for array in arrays]


def same(one, two):
    return all(a.equal(b) for a, b in zip(one, two, strict=True))


def test_instances_play_their_episode_and_stand_still(env):
    env.reset()
    games = []
    for i in range(6):
        game = DiceGame()
        game.reset(seed=3 + i)
        games.append(game)
    frozen = {}
    while env.running.any():
        running = env.running.tolist()
        step = env.step(ACTIONS)
        for i, game in enumerate(games):
            if not running[i]:
                assert same(rows(step, i), frozen[i])
                assert all(not reward[i].any() for reward in step.reward.values())
                continue
            expected = game.step({name: action[i].numpy() for name, action in ACTIONS.items()})
            assert step.observations.state[i].tolist() == expected.observations.state.tolist()
            assert step.reward["team"][i].tolist() == expected.reward["team"].tolist()
            if expected.terminated or expected.truncated:
                frozen[i] = rows(step, i)
                assert step.final.state[i].tolist() == expected.observations.state.tolist()
    assert len(frozen) == 6
    with pytest.raises(RuntimeError, match="all instances have ended"):
        env.step(ACTIONS)


def test_a_partial_reset_wakes_an_instance(env):
    env.reset()
    while env.running.any():
        step = env.step(ACTIONS)
    before = rows(step, 1)
    env.reset(mask=np.arange(6) == 4)
    assert env.running.tolist() == [False, False, False, False, True, False]
    step = env.step(ACTIONS)
    assert step.observations.state[4, 0] == 1
    assert same(rows(step, 1), before)


def test_a_saved_environment_knows_who_stands_still(env):
    env.reset()
    while env.running.all():
        env.step(ACTIONS)
    with SyncVectorEnv(factory=DiceGame, num_envs=6, seed=0, autoreset=False) as other:
        other.load_state_dict(env.state_dict())
        assert other.running.tolist() == env.running.tolist()
        while env.running.any():
            one, two = env.step(ACTIONS), other.step(ACTIONS)
            for i in range(6):
                assert same(rows(one, i), rows(two, i))


def test_with_autoreset_all_run():
    env = SyncVectorEnv(factory=DiceGame, num_envs=6, seed=3)
    env.reset()
    for _ in range(20):
        env.step(ACTIONS)
        assert env.running.all()
    assert env.replicate(num_envs=2, seed=0).running.all()
