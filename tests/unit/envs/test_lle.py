"""LLEAdapter against the package's own environment, and at its ends."""

import io
import random
import sys

import numpy as np
import pytest
import torch

from marl_lightning.envs import check_env
from marl_lightning.envs.vector.shared_memory import SharedMemoryVectorEnv
from marl_lightning.envs.vector.sync import SyncVectorEnv

pytest.importorskip("lle")

import lle

from marl_lightning.envs.adapters.lle import make, scenarios

LEVELS = {"level1": (1, 6, 4), "level2": (2, 8, 7), "level3": (2, 8, 7), "level4": (2, 8, 7)}
LEVELS |= {"level5": (4, 12, 17), "level6": (4, 12, 16)}
"""Agents, layers of the map and size of the state."""

STAY = 4


def draw(mask: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return np.where(mask, rng.random(mask.shape), -1.0).argmax(axis=-1)


def play(env, observations, rng, *, steps: int) -> list[np.ndarray]:
    """Returns all numbers that the next steps bring, resets included."""
    numbers = []
    for _ in range(steps):
        step = env.step({"agent": draw(observations.action_mask["agent"], rng)})
        observations = step.observations
        numbers += [step.reward["agent"], np.array([step.terminated, step.truncated, *step.info.values()])]
        if step.terminated or step.truncated:
            observations = env.reset()
        numbers += [observations.observation["agent"], observations.action_mask["agent"], observations.state]
    return numbers


def shortest_path() -> list[int]:
    """Returns actions that lead the agent of the first level to the exit, found by breadth-first search."""
    world = lle.World.level(1)
    world.reset()
    queue, seen = [(world.get_state(), [])], set()
    while True:
        state, path = queue.pop(0)
        world.set_state(state)
        if world.agents[0].has_arrived:
            return path
        for action in world.available_actions()[0]:
            world.set_state(state)
            world.step([action])
            if (following := world.get_state()) not in seen:
                seen.add(following)
                queue.append((following, [*path, action.value]))


@pytest.mark.parametrize("level", LEVELS)
def test_sizes(level):
    env = make(level)
    agents, layers, state_size = LEVELS[level]
    (group,) = env.spec.groups.values()
    assert (group.num_agents, group.observation_shape, group.action_size) == (agents, (layers, 12, 13), 5)
    assert (env.spec.name, env.spec.state_size, env.spec.episode_limit) == (f"lle/{level}", state_size, 78)
    assert env.spec.shared_reward
    assert env.spec.can_checkpoint
    assert env.spec.metadata == {"backend": "lle"}


@pytest.mark.parametrize("options", [{}, {"walkable_lasers": False}], ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_equals_the_package(level, options):
    env = make(level, episode_limit=10**6, **options)
    package = lle.level(int(level[-1])).walkable_lasers(options.get("walkable_lasers", True)).build()
    rng, over, ends = np.random.default_rng(0), True, 0
    for _ in range(600):
        if over:
            observations = env.reset(seed=3)
            expected, state = package.reset(seed=3)
        assert np.array_equal(observations.observation["agent"], expected.data)
        assert np.array_equal(observations.action_mask["agent"], package.available_actions())
        assert np.array_equal(observations.state, state.data)
        actions = draw(observations.action_mask["agent"], rng)
        step, expected_step = env.step({"agent": actions}), package.step(actions)
        assert step.reward["agent"].tolist() == [expected_step.reward.item()] * env.spec.num_agents
        assert (step.terminated, step.truncated) == (expected_step.done, False)
        assert step.info == {key: expected_step.info[key] for key in ("gems_collected", "exit_rate")}
        observations, over = step.observations, step.terminated
        expected, state = expected_step.obs, expected_step.state
        ends += over
    # Agents die where there are lasers into which they may walk.
    assert ends > 0 or level in ("level1", "level2") or options


def test_a_death_terminates_for_all():
    env = make("level6")
    rng = np.random.default_rng(0)
    observations = env.reset(seed=0)
    while True:
        step = env.step({"agent": draw(observations.action_mask["agent"], rng)})
        observations = step.observations
        if step.terminated:
            break
        if step.truncated:
            observations = env.reset()
    alive = observations.alive["agent"]
    assert 0 < alive.sum() < 4
    assert (step.reward["agent"] < 0).all()
    assert not step.truncated
    assert not observations.observation["agent"][~alive].any()
    assert np.array_equal(observations.action_mask["agent"][~alive], np.eye(5, dtype=bool)[[STAY] * (~alive).sum()])
    with pytest.raises(RuntimeError, match="over"):
        env.step({"agent": np.full(4, STAY)})


def test_reaching_the_exit_terminates():
    env = make("level1")
    env.reset(seed=0)
    *_, last = [env.step({"agent": np.array([action])}) for action in shortest_path()]
    assert (last.terminated, last.truncated) == (True, False)
    assert last.reward["agent"].tolist() == [2.0]  # for the agent and for the team
    assert last.info["exit_rate"] == 1.0
    assert last.observations.alive["agent"].all()


def test_the_time_limit_truncates_unless_the_game_ends():
    env = make("level6", episode_limit=3)
    for _ in range(2):
        env.reset(seed=0)
        steps = [env.step({"agent": np.full(4, STAY)}) for _ in range(3)]
        assert [step.truncated for step in steps] == [False, False, True]
        assert not any(step.terminated for step in steps)
    path = shortest_path()
    env = make("level1", episode_limit=len(path))
    env.reset(seed=0)
    *_, last = [env.step({"agent": np.array([action])}) for action in path]
    assert (last.terminated, last.truncated) == (True, False)


@pytest.mark.parametrize("level", LEVELS)
def test_keeps_the_contract(level):
    check_env(make(level, episode_limit=23), steps=80)


@pytest.mark.parametrize("kind", [kind.value for kind in lle.ObservationType])
def test_all_kinds_of_observation(kind):
    images = "rgb-image" in kind
    check_env(make("level3", obs_type=kind, randomize_lasers=True, walkable_lasers=False), steps=8 if images else 80)
    assert (make("level3", obs_type=kind).spec.groups["agent"].observation_space.dtype == np.uint8) == images


def test_the_state_can_be_of_another_kind():
    env = make("level6", state_type="layered")
    observations = env.reset(seed=0)
    assert env.spec.state_size == 12 * 12 * 13
    assert np.array_equal(observations.state, observations.observation["agent"][0].ravel())


def test_colours_of_lasers_come_from_the_seed_alone():
    def colours(env):
        return [env.reset().observation["agent"][0, 4:8].tolist() for _ in range(10)]

    one, other = make("level6", randomize_lasers=True), make("level6", randomize_lasers=True)
    random.seed(0)
    outside = random.getstate()
    one.reset(seed=1)
    first = colours(one)
    assert random.getstate() == outside  # the package draws from it
    one.reset(seed=1)
    other.reset(seed=2)
    assert [one.reset().observation["agent"][0, 4:8].tolist() for _ in range(10) if colours(other)] == first
    assert any(each != first[0] for each in first)


@pytest.mark.parametrize("steps", [0, 1, 17, 60])
@pytest.mark.parametrize("options", [{}, {"randomize_lasers": True, "walkable_lasers": False}], ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_resumes_exactly_in_a_new_environment(level, options, steps):
    env = make(level, episode_limit=40, **options)
    numbers = play(env, env.reset(seed=1), np.random.default_rng(0), steps=steps)
    mask = numbers[-2] if numbers else env.reset(seed=1).action_mask["agent"]
    file = io.BytesIO()
    torch.save(env.state_dict(), file)
    file.seek(0)
    other = make(level, episode_limit=40, **options)
    other.load_state_dict(torch.load(file, weights_only=True))

    class Here:
        action_mask = {"agent": mask}  # noqa: RUF012

    first, second = (play(each, Here, np.random.default_rng(1), steps=100) for each in (env, other))
    for one, two in zip(first, second, strict=True):
        assert np.array_equal(one, two)


def test_workers_play_the_same_episodes_without_torch():
    def factory():
        env = make("level6", randomize_lasers=True, episode_limit=9)
        if "torch" in sys.modules:
            raise RuntimeError("a worker has imported torch")
        return env

    sync = SyncVectorEnv(factory=lambda: make("level6", randomize_lasers=True, episode_limit=9), num_envs=3, seed=4)
    rng = np.random.default_rng(0)
    with SharedMemoryVectorEnv(factory=factory, num_envs=3, seed=4, num_workers=2, context="spawn") as shared:
        assert shared.spec == sync.spec
        one, two = sync.reset(), shared.reset()
        for _ in range(30):
            assert torch.equal(one.observation["agent"], two.observation["agent"])
            assert torch.equal(one.state, two.state)
            actions = {"agent": torch.from_numpy(draw(one.action_mask["agent"].numpy(), rng))}
            first, second = sync.step(actions), shared.step(actions)
            assert torch.equal(first.reward["agent"], second.reward["agent"])
            assert torch.equal(first.terminated, second.terminated)
            one, two = first.observations, second.observations


def test_pictures():
    env = make("level6")
    env.reset(seed=0)
    picture = env.render()
    assert picture.dtype == np.uint8
    assert picture.ndim == 3
    assert len(np.unique(picture)) > 2


def test_scenarios():
    assert scenarios() == tuple(LEVELS)
    with pytest.raises(ValueError, match=r"unknown level 'level7': choose one of level1, level2"):
        make("level7")


@pytest.mark.parametrize(
    ("argument", "value"), [("obs_type", "layers"), ("state_type", "layers"), ("episode_limit", 0)]
)
def test_bad_arguments(argument, value):
    with pytest.raises(ValueError, match=f"{argument} must be"):
        make("level1", **{argument: value})


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "lle", None)
    with pytest.raises(ImportError, match=r'pip install "marl-lightning\[lle\]"'):
        scenarios()
