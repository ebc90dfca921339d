"""MaMuJoCoAdapter against the package's own parallel_env, step by step."""

import io
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from marl_lightning.envs import check_env
from marl_lightning.envs.vector.shared_memory import SharedMemoryVectorEnv
from marl_lightning.envs.vector.sync import SyncVectorEnv

pytest.importorskip("gymnasium_robotics")
pytest.importorskip("mujoco")

from gymnasium_robotics import mamujoco_v1
from gymnasium_robotics.envs.multiagent_mujoco.obsk import get_parts_and_edges

from marl_lightning.envs.adapters.mamujoco import MaMuJoCoAdapter, make, scenarios, without_window

# Groups with the numbers of agents, observation sizes and action sizes; state size, time limit and bound of actions.
GAMES = {
    "Ant-2x4": ({"agent": (2, 63, 4)}, 105, 1000, 1.0),
    "Ant-2x4d": ({"agent": (2, 63, 4)}, 105, 1000, 1.0),
    "Ant-4x2": ({"agent": (4, 42, 2)}, 105, 1000, 1.0),
    "HalfCheetah-2x3": ({"agent": (2, 12, 3)}, 17, 1000, 1.0),
    "HalfCheetah-6x1": ({"agent_0": (4, 9, 1), "agent_2": (2, 8, 1)}, 17, 1000, 1.0),
    "Hopper-3x1": ({"agent_0": (2, 8, 1), "agent_1": (1, 9, 1)}, 11, 1000, 1.0),
    "Humanoid-9|8": ({"agent_0": (1, 242, 9), "agent_1": (1, 170, 8)}, 348, 1000, 0.4),
    "HumanoidStandup-9|8": ({"agent_0": (1, 242, 9), "agent_1": (1, 170, 8)}, 348, 1000, 0.4),
    "Pusher-3p": ({"agent_0": (2, 16, 3), "agent_1": (1, 13, 1)}, 23, 100, 2.0),
    "Reacher-2x1": ({"agent_0": (1, 7, 1), "agent_1": (1, 10, 1)}, 10, 50, 1.0),
    "Swimmer-2x1": ({"agent": (2, 6, 1)}, 8, 1000, 1.0),
    "Walker2d-2x3": ({"agent": (2, 12, 3)}, 17, 1000, 1.0),
    "ManySegmentAnt-2x3": ({"agent_0": (1, 165, 12), "agent_1": (1, 167, 12)}, 311, 1000, 1.0),
    "ManySegmentSwimmer-2x3": ({"agent": (2, 7, 3)}, 16, 1000, 1.0),
}


def draw(env, rng, *, scale: float = 1.0) -> dict[str, np.ndarray]:
    actions = {}
    for name, group in env.spec.groups.items():
        space = group.action_space
        drawn = scale * rng.uniform(space.low, space.high, (group.num_agents, group.action_size))
        actions[name] = drawn.astype(np.float32)
    return actions


def raw_package(scenario: str, **kwargs):
    robot, partition = scenario.split("-")
    if robot == "Pusher":
        parts, edges, whole = get_parts_and_edges(robot, partition)
        parts[0][0].label, parts[0][1].label = "r_wrist_roll_joint 0", "r_wrist_roll_joint 1"  # else both are the same
        kwargs["agent_factorization"] = {"partition": parts, "edges": edges, "globals": whole}
    return mamujoco_v1.parallel_env(scenario=robot, agent_conf=partition, **kwargs)


def play(env, observations, rng, *, steps: int) -> list[np.ndarray]:
    """Returns all numbers that the next steps bring, resets included."""
    numbers = []
    for _ in range(steps):
        step = env.step(draw(env, rng))
        numbers += [*step.observations.observation.values(), step.observations.state, *step.reward.values()]
        numbers.append(np.array([step.terminated, step.truncated]))
        if step.terminated or step.truncated:
            observations = env.reset()
            numbers += [*observations.observation.values(), observations.state]
    return numbers


def assert_equal_runs(first: list[np.ndarray], second: list[np.ndarray]) -> None:
    for one, two in zip(first, second, strict=True):
        assert np.array_equal(one, two)


@pytest.mark.parametrize("scenario", GAMES)
def test_groups_and_sizes(scenario):
    env = make(scenario)
    groups, state_size, limit, bound = GAMES[scenario]
    assert groups == {n: (g.num_agents, g.observation_size, g.action_size) for n, g in env.spec.groups.items()}
    assert (env.spec.name, env.spec.state_size, env.spec.episode_limit) == (f"mamujoco/{scenario}", state_size, limit)
    assert env.spec.metadata == {"backend": "gymnasium_robotics"}
    assert env.spec.shared_reward
    for name, group in env.spec.groups.items():
        assert group.observation_space.dtype == np.float32
        assert (group.action_space.high == np.float32(bound)).all()
        assert (group.action_space.low == np.float32(-bound)).all()
        assert env.action_dimensions[name].all()
    assert env.spec.groups == make(scenario).spec.groups


@pytest.mark.parametrize("grouping", ["spaces", "padded"])
@pytest.mark.parametrize("scenario", GAMES)
def test_equals_the_package(scenario, grouping):
    env = make(scenario, grouping=grouping)
    package = raw_package(scenario)
    rng = np.random.default_rng(0)
    over = True
    for time in range(60):
        if over:
            seed = 7 if time == 0 else None  # the first reset seeds, the others continue the generator
            observations = env.reset(seed=seed)
            expected, _ = package.reset(seed=seed)
        actions = draw(env, rng, scale=1.5)  # beyond the bounds: the adapter clips
        step = env.step(actions)
        local = {}
        for name, group in env.spec.groups.items():
            for agent, action in zip(group.agents, actions[name], strict=True):
                space = package.action_space(agent)
                local[agent] = np.clip(action[: space.shape[0]], space.low, space.high)
        for name, group in env.spec.groups.items():
            for agent, row in zip(group.agents, observations.observation[name], strict=True):
                size = len(expected[agent])
                assert np.array_equal(row[:size], expected[agent].astype(np.float32))
                assert not row[size:].any()
        expected, rewards, terminations, truncations, _ = package.step(local)
        for name, group in env.spec.groups.items():
            assert step.reward[name].tolist() == [np.float32(rewards[agent]) for agent in group.agents]
        assert np.array_equal(step.observations.state, package.state().astype(np.float32))
        assert step.terminated == all(terminations.values())
        assert step.truncated == all(truncations.values())  # of the package's own time limit
        observations, over = step.observations, step.terminated or step.truncated


def test_all_instances_observe_the_same_in_the_same_place():
    # In the package, the place of two joints of Pusher depends on addresses in memory.
    envs = [make("Pusher-3p") for _ in range(30)]
    first, *others = [env.reset(seed=0).observation for env in envs]
    for other in others:
        assert all(np.array_equal(first[name], other[name]) for name in first)


def test_falling_terminates():
    env = make("Hopper-3x1")
    env.reset(seed=0)
    rng = np.random.default_rng(0)
    steps = [env.step(draw(env, rng))]
    while not steps[-1].terminated:
        steps.append(env.step(draw(env, rng)))
    assert len(steps) < 500
    assert not steps[-1].truncated
    with pytest.raises(RuntimeError, match="over"):
        env.step(draw(env, rng))


@pytest.mark.parametrize(("limit", "steps"), [(5, 5), (None, 50)], ids=["chosen", "of the task"])
def test_the_time_limit_truncates(limit, steps):
    env = make("Reacher-2x1", episode_limit=limit)
    assert env.spec.episode_limit == steps
    rng = np.random.default_rng(0)
    for _ in range(2):
        env.reset(seed=0)
        ends = [env.step(draw(env, rng)) for _ in range(steps)]
        assert [step.truncated for step in ends] == [False] * (steps - 1) + [True]
        assert not any(step.terminated for step in ends)


def test_padding_is_ignored_and_told():
    env = make("Humanoid-9|8", grouping="padded")
    (group,) = env.spec.groups.values()
    assert group.agents == ("agent_0", "agent_1")
    assert (group.observation_size, group.action_size) == (242, 9)
    assert env.action_dimensions["agent"].sum(axis=1).tolist() == [9, 8]
    assert not env.action_dimensions["agent"][1, 8]
    assert env.spec.metadata["observation_sizes"] == "242,170"
    assert env.spec.metadata["action_sizes"] == "9,8"
    actions = draw(env, np.random.default_rng(0))
    rewards = []
    for change in (0.0, 0.4):
        env.reset(seed=0)
        changed = {"agent": actions["agent"].copy()}
        changed["agent"][1, 8] = change
        rewards.append(env.step(changed).reward["agent"].tolist())
    assert rewards[0] == rewards[1]


@pytest.mark.parametrize("scenario", ["Ant-4x2", "Hopper-3x1", "Humanoid-9|8", "Reacher-2x1", "ManySegmentSwimmer-2x3"])
def test_keeps_the_contract(scenario):
    check_env(make(scenario), steps=60)
    check_env(make(scenario, grouping="padded", episode_limit=11), steps=30)


@pytest.mark.parametrize("steps", [0, 1, 17])
@pytest.mark.parametrize("scenario", GAMES)
def test_resumes_exactly_in_a_new_environment(scenario, steps):
    env = make(scenario, episode_limit=40)
    observations, rng = env.reset(seed=1), np.random.default_rng(0)
    play(env, observations, rng, steps=steps)
    file = io.BytesIO()
    torch.save(env.state_dict(), file)
    file.seek(0)
    other = make(scenario, episode_limit=40)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert_equal_runs(
        play(env, None, np.random.default_rng(1), steps=40), play(other, None, np.random.default_rng(1), steps=40)
    )


def test_a_state_can_be_loaded_twice_and_outlives_steps():
    env = make("Ant-2x4")
    play(env, env.reset(seed=0), np.random.default_rng(0), steps=9)
    state = env.state_dict()
    first = play(env, None, np.random.default_rng(1), steps=9)
    for _ in range(2):
        env.load_state_dict(state)
        assert_equal_runs(first, play(env, None, np.random.default_rng(1), steps=9))


def test_arguments_reach_the_package():
    blind, far = make("Ant-4x2", agent_obsk=0), make("Ant-4x2", agent_obsk=2)
    sizes = [env.spec.groups["agent"].observation_size for env in (blind, make("Ant-4x2"), far)]
    assert sizes == sorted(set(sizes))
    central = make("Ant-4x2", agent_obsk=None)
    assert central.spec.groups["agent"].agents == ("agent_0",)
    assert np.array_equal(central.reset(seed=0).observation["agent"][0], make("Ant-4x2").reset(seed=0).state)
    narrow = make("HalfCheetah-2x3", local_categories=[["qpos"], []], global_categories=["qvel"])
    assert narrow.spec.groups["agent"].observation_size == 3 + 3
    factorization = dict(zip(("partition", "edges", "globals"), get_parts_and_edges("HalfCheetah", "6x1"), strict=True))
    swapped = make("HalfCheetah-2x3", agent_factorization=factorization)
    assert swapped.spec.num_agents == 6
    rewards = []
    for weight in (0.0, 1.0):
        env = make("HalfCheetah-2x3", ctrl_cost_weight=weight)
        env.reset(seed=0)
        rewards.append(env.step({"agent": np.ones((2, 3), np.float32)}).reward["agent"][0])
    assert rewards[0] - rewards[1] == pytest.approx(6.0, abs=1e-5)


def test_workers_play_the_same_episodes_without_torch():
    # Of all robots, those of many segments: the package lets processes that start together delete each other's model.
    def factory():
        env = make("ManySegmentSwimmer-4x2", episode_limit=6)
        if "torch" in sys.modules:
            raise RuntimeError("a worker has imported torch")
        return env

    sync = SyncVectorEnv(factory=lambda: make("ManySegmentSwimmer-4x2", episode_limit=6), num_envs=4, seed=4)
    rng = np.random.default_rng(0)
    with SharedMemoryVectorEnv(factory=factory, num_envs=4, seed=4, num_workers=2, context="spawn") as shared:
        assert shared.spec == sync.spec
        one, two = sync.reset(), shared.reset()
        for _ in range(15):
            for name in sync.spec.groups:
                assert torch.equal(one.observation[name], two.observation[name])
            assert torch.equal(one.state, two.state)
            actions = {
                name: torch.from_numpy(rng.uniform(-1, 1, (4, group.num_agents, group.action_size)).astype(np.float32))
                for name, group in sync.spec.groups.items()
            }
            first, second = sync.step(actions), shared.step(actions)
            assert torch.equal(first.truncated, second.truncated)
            one, two = first.observations, second.observations


def test_seeds_differ():
    env = make("Ant-2x4")
    assert not np.array_equal(env.reset(seed=0).state, env.reset(seed=1).state)


def test_imports_without_a_display_and_leaves_the_users_choice_alone():
    code = (
        "import os, sys; from marl_lightning.envs.adapters.mamujoco import make\n"
        "env = make('HalfCheetah-2x3'); env.reset(seed=0)\n"
        "assert 'torch' not in sys.modules; print(os.environ.get('MUJOCO_GL'))"
    )
    for choice in (None, "disabled"):
        environment = {k: v for k, v in os.environ.items() if k not in ("MUJOCO_GL", "DISPLAY", "WAYLAND_DISPLAY")}
        environment |= {} if choice is None else {"MUJOCO_GL": choice}
        outcome = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert outcome.stdout.split()[-1:] == [str(choice)], outcome.stderr


def test_egl_is_chosen_for_the_time_being_if_nothing_else_can_work(monkeypatch):
    variables = ("MUJOCO_GL", "DISPLAY", "WAYLAND_DISPLAY")
    for variable in variables:
        monkeypatch.delenv(variable, raising=False)
    with without_window():
        assert os.environ["MUJOCO_GL"] == "egl"
    assert "MUJOCO_GL" not in os.environ
    for variable in variables:
        monkeypatch.setenv(variable, "osmesa")
        with without_window():
            assert {name: os.environ[name] for name in variables if name in os.environ} == {variable: "osmesa"}
        monkeypatch.delenv(variable)


def test_pictures(monkeypatch):
    with pytest.raises(NotImplementedError, match="rgb_array"):
        make("Ant-2x4").render()
    for variable in ("MUJOCO_GL", "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(variable, raising=False)
    env = make("Ant-2x4", render_mode="rgb_array")
    env.reset(seed=0)
    # Without a library for EGL, there is nothing to see.
    try:
        picture = env.render()
    except Exception as error:
        pytest.skip(f"no EGL here: {error}")
    assert picture.dtype == np.uint8
    assert picture.shape == (480, 480, 3)
    assert len(np.unique(picture)) > 2
    assert "MUJOCO_GL" not in os.environ
    env.close()
    env.close()


def test_scenarios():
    names = scenarios()
    assert set(GAMES) <= set(names)
    assert len(set(names)) == len(names)
    assert not any("Coupled" in name for name in names)
    for robot in ("ManySegmentAnt", "ManySegmentSwimmer"):
        assert f"{robot}-10x2" in names
    assert make("ManySegmentSwimmer-7x1").spec.num_agents == 7  # not listed, but there


@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        ("Ant-p2x4", "write Ant-2x4"),
        ("Pusher-p3p", "write Pusher-3p"),
        ("ManySegmentAnt-p2x3", "write ManySegmentAnt-2x3"),
        ("Ant-3x3", "choose Ant-2x4 or Ant-2x4d or Ant-4x2"),
        ("Ant", "choose Ant-2x4"),
        ("ManySegmentAnt-2", "<agents>x<segments of each>"),
        ("Centipede-2x1", "choose one of Ant, HalfCheetah"),
        ("CoupledHalfCheetah-1p1", "cannot be played"),
    ],
)
def test_unknown_names_say_what_to_write(scenario, message):
    with pytest.raises(ValueError, match=message):
        make(scenario)


@pytest.mark.parametrize(("argument", "value"), [("grouping", "both"), ("episode_limit", 0)])
def test_bad_arguments(argument, value):
    with pytest.raises(ValueError, match=f"{argument} must be"):
        MaMuJoCoAdapter(scenario="Ant-2x4", **{argument: value})


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mujoco", None)
    with pytest.raises(ImportError, match=r'pip install "marl-lightning\[mamujoco\]"'):
        scenarios()
