"""Ours and the package ``mpe2`` from the same state with the same actions."""

import numpy as np
import pytest

pytest.importorskip("mpe2")

from mpe_helpers import (
    SCENARIOS,
    copy_world,
    crowd,
    make_package,
    random_actions,
    step_package,
    to_tensors,
)

from marl_lightning.envs.adapters.pettingzoo import PettingZooAdapter
from marl_lightning.envs.native.mpe import MPEVectorEnv, kernel

OPTIONS = (
    ("simple_spread_v3", {"N": 5, "local_ratio": 0.2}),
    ("simple_spread_v3", {"N": 1, "num_agent_neighbors": 2}),
    ("simple_spread_v3", {"N": 4, "num_agent_neighbors": 2, "num_landmark_neighbors": 3}),
    ("simple_spread_v3", {"num_agent_neighbors": 4, "num_landmark_neighbors": 5}),
    ("simple_spread_v3", {"curriculum": True}),
    ("simple_tag_v3", {"num_good": 3, "num_adversaries": 2, "num_obstacles": 3}),
    ("simple_tag_v3", {"num_good": 2, "num_agent_neighbors": 2, "num_landmark_neighbors": 1}),
    ("simple_tag_v3", {"num_obstacles": 0, "num_agent_neighbors": 5, "num_landmark_neighbors": 2}),
    ("simple_tag_v3", {"curriculum": True}),
    ("simple_adversary_v3", {"N": 4}),
    ("simple_adversary_v3", {"N": 3, "num_agent_neighbors": 2, "num_landmark_neighbors": 2}),
    ("simple_reference_v3", {"local_ratio": 0.9}),
    (
        "simple_world_comm_v3",
        {"num_good": 1, "num_adversaries": 1, "num_obstacles": 0, "num_food": 1, "num_forests": 0},
    ),
    ("simple_world_comm_v3", {"num_good": 3, "num_adversaries": 2, "num_food": 3, "num_forests": 4}),
)


def assert_same_observations(observations, expected, *, index=0, message=""):
    """``expected`` has an array per agent, in the package's order."""
    ours = [row for group in observations.observation.values() for row in group[index].numpy()]
    for agent, (mine, theirs) in enumerate(zip(ours, expected, strict=True)):
        np.testing.assert_array_equal(mine, theirs, err_msg=f"agent {agent}, {message}")
    np.testing.assert_array_equal(observations.state[index].numpy(), np.concatenate(expected), err_msg=message)


def compare(scenario, *, steps, seed, continuous_actions, **options):
    """Plays both and compares everything at every step.

    Every episode starts from the package's own start. In two of three, everything is crowded together now and then.

    Returns:
        All rewards ``[steps, agents]``.
    """
    package = make_package(scenario, continuous_actions=continuous_actions, **options)
    raw = package.unwrapped
    length = 25
    env = MPEVectorEnv(
        scenario=scenario, num_envs=1, max_cycles=length + 1, continuous_actions=continuous_actions, **options
    )
    rng = np.random.default_rng(seed)
    observations = env.reset()
    rewards = []
    for episode in range(steps // length):
        package.reset(seed=seed + episode)
        copy_world(raw, env)
        assert_same_observations(observations, [raw.observe(a) for a in raw.possible_agents], message="start")
        for time in range(length):
            if episode % 3 and time % 6 == 0:
                crowd(raw, rng)
                copy_world(raw, env, time=time)
            where = f"episode {episode}, step {time}"
            actions = random_actions(env, rng)
            expected, expected_rewards = step_package(raw, env, actions)
            step = env.step(to_tensors(actions))
            positions = [entity.state.p_pos for entity in raw.world.entities]
            velocities = [agent.state.p_vel for agent in raw.world.agents]
            np.testing.assert_array_equal(env._state.position[0], positions, err_msg=where)
            np.testing.assert_array_equal(env._state.velocity[0], velocities, err_msg=where)
            assert_same_observations(step.observations, expected, message=where)
            reward = np.concatenate([group[0].numpy() for group in step.reward.values()])
            np.testing.assert_allclose(reward, expected_rewards, rtol=1e-6, atol=1e-6, err_msg=where)
            rewards.append(expected_rewards)
    return np.array(rewards)


@pytest.mark.parametrize("continuous_actions", [False, True])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_default_scenarios(scenario, continuous_actions):
    rewards = compare(scenario, steps=1000, seed=7, continuous_actions=continuous_actions)
    if scenario in ("simple_tag_v3", "simple_world_comm_v3"):
        assert (rewards[:, 0] > 4).sum() > 20, "the adversaries must catch somebody for the test to mean anything"
    if scenario == "simple_spread_v3":
        assert (rewards != rewards[:, :1]).any(axis=1).sum() > 50, "agents must collide"


@pytest.mark.parametrize(("scenario", "options"), OPTIONS, ids=str)
def test_options(scenario, options):
    compare(scenario, steps=300, seed=11, continuous_actions=False, **options)


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("continuous_actions", [False, True])
def test_specs_equal_the_adapters(scenario, continuous_actions):
    adapter = PettingZooAdapter(
        factory=lambda: make_package(scenario, continuous_actions=continuous_actions, max_cycles=30),
        name=f"mpe/{scenario}",
    )
    env = MPEVectorEnv(scenario=scenario, num_envs=2, continuous_actions=continuous_actions, max_cycles=30)
    assert list(env.spec.groups) == list(adapter.spec.groups)
    assert dict(env.spec.groups) == dict(adapter.spec.groups)
    for field in ("name", "state_size", "episode_limit", "info_keys", "shared_reward"):
        assert getattr(env.spec, field) == getattr(adapter.spec, field)
    assert env.spec.metadata["backend"] == "embedded"
    observations, theirs = env.reset(), adapter.reset(seed=0)
    for kind in ("observation", "action_mask", "alive"):
        mine, other = getattr(observations, kind), getattr(theirs, kind)
        assert {name: (a[0].numpy().shape, a.numpy().dtype) for name, a in mine.items()} == {
            name: (a.shape, a.dtype) for name, a in other.items()
        }
    for kind in ("action_mask", "alive"):
        for name, array in getattr(theirs, kind).items():
            np.testing.assert_array_equal(getattr(observations, kind)[name][0].numpy(), array)


@pytest.mark.parametrize("scenario", ["simple_tag_v3", "simple_reference_v3"])
@pytest.mark.parametrize("continuous_actions", [False, True])
def test_whole_episodes_behind_the_adapter(scenario, continuous_actions):
    """The package with all its wrappers, including the end of the episode and actions out of bounds."""
    adapter = PettingZooAdapter(
        factory=lambda: make_package(scenario, continuous_actions=continuous_actions, max_cycles=6)
    )
    env = MPEVectorEnv(scenario=scenario, num_envs=3, continuous_actions=continuous_actions, max_cycles=6)
    rng = np.random.default_rng(0)
    env.reset()
    for episode in range(5):
        adapter.reset(seed=episode)
        copy_world(adapter._env.unwrapped, env, index=1)
        for time in range(6):
            actions = random_actions(env, rng)
            theirs = adapter.step({name: array[1] for name, array in actions.items()})
            step = env.step(to_tensors(actions))
            assert step.terminated[1].item() is theirs.terminated is False
            assert step.truncated[1].item() is theirs.truncated is (time == 5)
            mine = step.final if theirs.truncated else step.observations
            for name in env.spec.groups:
                np.testing.assert_array_equal(mine.observation[name][1].numpy(), theirs.observations.observation[name])
                np.testing.assert_allclose(step.reward[name][1].numpy(), theirs.reward[name], rtol=1e-6, atol=1e-6)
            np.testing.assert_array_equal(mine.state[1].numpy(), theirs.observations.state)


@pytest.mark.parametrize("scenario", ["simple_spread_v3", "simple_tag_v3"])
def test_terminate_on_success(scenario):
    options = {"terminate_on_success": True, "max_cycles": 12}
    if scenario == "simple_spread_v3":
        options["N"] = 2
    package = make_package(scenario, **options)
    raw = package.unwrapped
    env = MPEVectorEnv(scenario=scenario, num_envs=1, **options)
    env.reset()
    rng = np.random.default_rng(0)
    ends = {"terminated": 0, "truncated": 0}
    for episode in range(60):
        package.reset(seed=episode)
        for entity in raw.world.entities:
            entity.state.p_pos = entity.state.p_pos * rng.uniform(0.02, 0.3)
        copy_world(raw, env)
        while package.agents:
            actions = random_actions(env, rng)
            joint = [int(action) for array in actions.values() for action in array[0]]
            _, _, terminated, truncated, _ = package.step(dict(zip(package.agents, joint, strict=True)))
            step = env.step(to_tensors(actions))
            assert step.terminated[0].item() == terminated[raw.possible_agents[0]]
            assert step.truncated[0].item() == truncated[raw.possible_agents[0]]
        ends["terminated"] += step.terminated[0].item()
        ends["truncated"] += step.truncated[0].item()
    assert min(ends.values()) > 5, "both kinds of ends must occur"


def set_package_stage(monkeypatch, raw, stage):
    """The package's own methods do nothing: an attribute of its base class reads as 0 and ignores what is set."""
    monkeypatch.setattr(type(raw.scenario), "curriculum_stage", stage, raising=False)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_stages_of_tag(monkeypatch, stage):
    package = make_package("simple_tag_v3", curriculum=True)
    raw = package.unwrapped
    env = MPEVectorEnv(scenario="simple_tag_v3", num_envs=1, curriculum=True, max_cycles=100)
    env.curriculum_stage = stage
    set_package_stage(monkeypatch, raw, stage)
    package.reset(seed=stage)
    env.reset()
    assert env._state.prey_speed[0] == (0.5, 0.75, 1.0)[stage]
    copy_world(raw, env)
    for _ in range(60):
        actions = {"adversary": np.zeros((1, 3), np.int64), "agent": np.full((1, 1), kernel.RIGHT)}
        expected, _ = step_package(raw, env, actions)
        assert_same_observations(env.step(to_tensors(actions)).observations, expected)
    # A new stage counts from the next episode on.
    env.curriculum_stage = 2 - stage
    assert env._state.prey_speed[0] == (0.5, 0.75, 1.0)[stage]


def test_stages_of_spread(monkeypatch):
    package = make_package("simple_spread_v3", curriculum=True)
    raw = package.unwrapped
    env = MPEVectorEnv(scenario="simple_spread_v3", num_envs=1, curriculum=True)
    rng = np.random.default_rng(0)
    env.reset()
    package.reset(seed=0)
    totals = []
    for stage in (0, 1):
        for entity in raw.world.entities:
            entity.state.p_pos = rng.uniform(-0.1, 0.1, 2)
        for agent in raw.world.agents:
            agent.state.p_vel = np.zeros(2)
        copy_world(raw, env)
        env.curriculum_stage = stage
        set_package_stage(monkeypatch, raw, stage)
        actions = random_actions(env, rng)
        _, rewards = step_package(raw, env, actions)
        np.testing.assert_allclose(env.step(to_tensors(actions)).reward["agent"][0].numpy(), rewards, atol=1e-6)
        totals.append(sum(rewards))
    assert totals[1] < totals[0] - 1, "collisions cost something in stage 1 only"


@pytest.mark.parametrize("scenario", ["simple_spread_v3", "simple_tag_v3", "simple_reference_v3", "simple_crypto_v3"])
def test_starts_have_the_packages_distribution(scenario):
    """Moments, ranges and independence of start coordinates and goals, ours against the package's."""
    package = make_package(scenario)
    raw = package.unwrapped
    env = MPEVectorEnv(scenario=scenario, num_envs=4000, seed=5)
    env.reset()
    ours = env._state.position.copy()
    probe = MPEVectorEnv(scenario=scenario, num_envs=1)
    probe.reset()
    positions, goals = [], []
    for episode in range(1000):
        raw.reset(seed=episode)
        copy_world(raw, probe)
        positions.append(probe._state.position[0].copy())
        goals.append(probe._state.goal[0].copy())
    theirs = np.array(positions)
    limit = np.where(np.arange(ours.shape[1]) < len(raw.world.agents), 1.0, env._constants.landmark_range)[
        None, :, None
    ]
    for sample in (ours, theirs):
        # Of a uniform distribution: standard error of the mean is limit / sqrt(3 n), of the second moment less.
        error = 4.5 / np.sqrt(3 * len(sample))
        assert (np.abs(sample) <= limit).all()
        assert (np.abs(sample.mean(axis=0)) < error).all()
        assert (np.abs((sample**2).mean(axis=0) / limit[0] ** 2 - 1 / 3) < error).all()
        assert (np.abs(sample).max(axis=0) > 0.97 * limit[0]).all()
        flat = sample.reshape(len(sample), -1)
        correlation = np.corrcoef(flat, rowvar=False) - np.eye(flat.shape[1])
        assert (np.abs(correlation) < 5 / np.sqrt(len(sample))).all()
    assert not env._state.velocity.any()
    assert not env._state.message.any()
    num_landmarks = len(raw.world.landmarks)
    for k in range(env.world.num_goals):
        for sample in (env._state.goal[:, k], np.array(goals)[:, k]):
            share = np.bincount(sample, minlength=num_landmarks) / len(sample)
            np.testing.assert_allclose(share, 1 / num_landmarks, atol=4.5 * 0.5 / np.sqrt(len(sample)))
    if env.world.num_goals == 2:
        pairs = env._state.goal[:, 0] * num_landmarks + env._state.goal[:, 1]
        share = np.bincount(pairs, minlength=num_landmarks**2) / len(pairs)
        np.testing.assert_allclose(share, num_landmarks**-2, atol=0.03)
