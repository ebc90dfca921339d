"""The adapter of SMAClite, over a stand-in of its interface."""

import sys

import fake_smac
import numpy as np
import pytest
import torch
from fake_smac import install_smac, install_smaclite

from marl_lightning.envs import SyncVectorEnv, check_env, make_env
from marl_lightning.envs.adapters import starcraft2
from marl_lightning.envs.adapters.smaclite import GROUP, LIMITS, make, scenarios

STOP = 1


@pytest.fixture(autouse=True)
def _package(monkeypatch):
    install_smaclite(monkeypatch)


def draw(mask, rng):
    return np.where(mask, rng.random(mask.shape), -1.0).argmax(axis=-1)


def stand(observations):
    """Everyone stops, except for the dead, who can only do nothing."""
    return {GROUP: np.where(observations.alive[GROUP], STOP, 0)}


def attack_first(env, *, allies, enemies):
    """Makes a step in which everybody attacks the first enemy, with the health of both sides set before."""
    env.reset(seed=0)
    battle = env._env.battle
    for units, health in ((battle.allies, allies), (battle.enemies, enemies)):
        for unit, value in zip(units, health, strict=True):
            unit.health, unit.shield, unit.pos = value, 0, np.array([16, 16], np.float32)
    env._observe(env._env._obs())
    return env.step({GROUP: np.where(env._alive, 6, 0)})


@pytest.mark.parametrize(
    ("name", "sizes", "limit"),
    [("2s3z", (5, 80, 11, 120), 120), ("MMM2", (10, 176, 18, 322), 180), ("2s_vs_1sc", (2, 17, 7, 27), 300)],
)
def test_sizes(name, sizes, limit):
    env = make(name)
    (group,) = env.spec.groups.values()
    assert (group.num_agents, group.observation_size, group.action_size, env.spec.state_size) == sizes
    assert (env.spec.name, env.spec.episode_limit) == (f"smaclite/{name}", limit)
    assert env.spec.shared_reward
    assert env.spec.metadata == {"backend": "smaclite"}


@pytest.mark.parametrize(("name", "steps"), [("2s3z", 200), ("2s_vs_1sc", 100), ("MMM2", 30)])
def test_contract(name, steps):
    check_env(make(name), steps=steps)


def test_the_time_limit_truncates_unless_the_battle_ends():
    env = make("2s_vs_1sc", episode_limit=3)
    for _ in range(2):
        observations = env.reset(seed=0)
        for time in range(1, 4):
            step = env.step(stand(observations))
            assert (step.terminated, step.truncated) == (False, time == 3)
        assert step.observations.alive[GROUP].any()
    with pytest.raises(RuntimeError, match="over"):
        env.step(stand(step.observations))
    step = attack_first(make("2s_vs_1sc", episode_limit=1), allies=(80, 80), enemies=(1,))
    assert (step.terminated, step.truncated) == (True, False)


@pytest.mark.parametrize(
    ("allies", "enemies", "terminated", "won"),
    [
        ((80, 80), (1,), True, 1.0),
        ((1, 0), (200,), True, 0.0),
        ((1, 0), (1,), True, 0.0),  # both sides lose their last unit
        ((80, 1), (200,), False, 0.0),
    ],
)
def test_ends(allies, enemies, terminated, won):
    step = attack_first(make("2s_vs_1sc"), allies=allies, enemies=enemies)
    assert (step.terminated, step.truncated, step.info) == (terminated, False, {"battle_won": won})
    assert step.reward[GROUP].dtype == np.float32
    assert step.reward[GROUP][0] == step.reward[GROUP][1] > 0


def test_dead_agents():
    env = make("2s3z")
    step = attack_first(env, allies=(1, 80, 100, 100, 100), enemies=(80, 80, 100, 100, 100))
    alive = step.observations.alive[GROUP]
    assert alive.tolist() == [False, True, True, True, True]
    assert not step.observations.observation[GROUP][0].any()
    assert step.observations.action_mask[GROUP][0].tolist() == [True] + [False] * 10
    assert not step.observations.action_mask[GROUP][alive, 0].any()
    # Whatever is asked of the dead is ignored, and they share the reward.
    with pytest.raises(ValueError, match="illegal action 0 of agent 'agent_1'"):
        env.step({GROUP: np.zeros(5, np.int64)})
    step = env.step({GROUP: np.array([8, 7, 7, 7, 7])})
    assert (step.reward[GROUP] > 0).all()
    assert (step.reward[GROUP] == step.reward[GROUP][0]).all()


@pytest.mark.parametrize(("name", "steps"), [("2s3z", 40), ("MMM", 25), ("MMM2", 25), ("bane_vs_bane", 4)])
def test_agents_are_in_the_order_of_smac(name, steps, monkeypatch):
    """SMAC and SMAClite count the agents of the same battle differently; the adapters count them equally."""
    install_smaclite(monkeypatch, spread=0)
    games = install_smac(monkeypatch).games
    env, other = make(name), starcraft2.make(name)
    observations, expected = env.reset(seed=0), other.reset(seed=0)
    games[-1].battle.spread = 0
    rng = np.random.default_rng(1)
    healed = 0
    for _ in range(steps):
        assert np.array_equal(observations.action_mask[GROUP], expected.action_mask[GROUP])
        assert np.array_equal(observations.observation[GROUP], expected.observation[GROUP])
        assert np.array_equal(observations.state, expected.state)
        mask = observations.action_mask[GROUP].copy()
        can_aim = mask[:, 6:].any(axis=1)
        mask[can_aim, :6] = False
        actions = draw(mask, rng)
        healed += can_aim[-1]
        step, expected_step = env.step({GROUP: actions}), other.step({GROUP: actions})
        assert step.reward[GROUP][0] == pytest.approx(expected_step.reward[GROUP][0], rel=1e-6)
        observations, expected = step.observations, expected_step.observations
        if step.terminated or expected_step.terminated:
            break
    assert healed > 3 or "MMM" not in name
    assert not observations.alive[GROUP].all() or name == "bane_vs_bane"


def test_medivacs_come_last():
    env = make("MMM2")
    names = [unit.name for unit in env._env.battle.allies]
    assert names == ["medivac", *["marine"] * 7, *["marauder"] * 2]
    own_types = env.reset(seed=0).observation[GROUP][:, -3:]
    assert own_types.argmax(axis=1).tolist() == [0] * 2 + [1] * 7 + [2]


def test_first_states_show_no_last_actions():
    env = make("2s3z", episode_limit=1)
    observations = env.reset(seed=0)
    for _ in range(2):
        assert not observations.state[-55:].any()
        step = env.step(stand(observations))
        assert np.array_equal(step.observations.state[-55:].reshape(5, 11).argmax(axis=1), [STOP] * 5)
        observations = env.reset()


def test_a_seed_determines_all_episodes():
    def totals(seed):
        env = make("2s3z", episode_limit=12)
        result, rng = [], np.random.default_rng(0)
        for episode in range(3):
            observations = env.reset(seed=seed if episode == 0 else None)
            over = False
            while not over:
                step = env.step({GROUP: draw(observations.action_mask[GROUP], rng)})
                observations, over = step.observations, step.terminated or step.truncated
            result.append(observations.state.tolist())
        return result

    assert totals(1) == totals(1) != totals(2)


def test_vectorised():
    env = SyncVectorEnv(factory=lambda: make("2s3z"), num_envs=3, seed=0)
    observations = env.reset()
    generator = torch.Generator().manual_seed(0)
    ended = 0
    for _ in range(200):
        weights = observations.action_mask[GROUP].float().flatten(0, 1)
        step = env.step({GROUP: torch.multinomial(weights, 1, generator=generator).view(3, 5)})
        observations = step.observations
        ended += int((step.terminated | step.truncated).sum())
    assert ended > 3
    env.close()


def test_results_belong_to_the_caller():
    env = make("2s3z")
    observations = env.reset(seed=0)
    actions = stand(observations)
    for array in (observations.action_mask[GROUP], observations.alive[GROUP]):
        array[:] = False
    assert env.step(actions).reward[GROUP].shape == (5,)


def test_closing_twice_is_fine():
    env = make("2s3z")
    env.close()
    env.close()
    assert env._env.closes == 1


def test_by_name():
    assert set(scenarios()) == set(LIMITS)
    assert make_env("smaclite/2s3z", episode_limit=9).spec.episode_limit == 9


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"unknown map '3m'.*2s3z"):
        make("3m")
    with pytest.raises(ValueError, match="episode_limit must be at least 1, got 0"):
        make("2s3z", episode_limit=0)
    with pytest.raises(TypeError, match="sight"):
        make("2s3z", sight=3)


def test_a_missing_package_is_explained(monkeypatch):
    monkeypatch.setitem(sys.modules, "smaclite", None)
    for call in (scenarios, lambda: make("2s3z"), lambda: make_env("smaclite/2s3z")):
        with pytest.raises(ImportError, match=r"\(smaclite\).*https://github.com/uoe-agents/smaclite") as raised:
            call()
        assert "\n" not in str(raised.value)


def test_the_stand_in_is_strict():
    """Otherwise the tests above would show nothing."""
    env = fake_smac.SMACliteEnv("2s3z")
    env.reset(seed=0)
    with pytest.raises(AssertionError):
        env.step(list(np.full(5, STOP)))
    with pytest.raises(ValueError, match="Invalid action"):
        env.step([0] * 5)
