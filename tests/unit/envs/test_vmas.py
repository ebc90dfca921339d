"""VmasVectorEnv against vmas itself: equal steps, ends, partial resets, generators, saving."""

import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from gymnasium import spaces

from marl_lightning.envs import check_env, make_vector_env
from marl_lightning.envs.adapters.vmas import VmasVectorEnv, scenarios

vmas = pytest.importorskip("vmas")

# These seed each instance from numbers that are drawn for all instances: their starts depend on how many there are.
NOT_SEEDED_SINGLY = {"asym_joint", "road_traffic", "simple_crypto"}
DISCRETE = {"continuous_actions": False}


def draw(env, generator: torch.Generator) -> dict[str, torch.Tensor]:
    actions = {}
    for name, group in env.spec.groups.items():
        shape = (env.num_envs, group.num_agents)
        if group.is_discrete:
            parts = [torch.randint(n, shape, generator=generator) for n in group.action_parts]
            actions[name] = torch.stack(parts, dim=-1) if group.action_shape else parts[0]
        else:
            space = group.action_space
            low, high = torch.from_numpy(space.low), torch.from_numpy(space.high)
            actions[name] = low + (high - low) * torch.rand(*shape, group.action_size, generator=generator)
    return actions


def by_agent(env, tensors: dict[str, torch.Tensor], package) -> list[torch.Tensor]:
    """Returns the rows of all agents in the order of the package."""
    rows = {
        agent: tensors[name][:, index]
        for name, group in env.spec.groups.items()
        for index, agent in enumerate(group.agents)
    }
    return [rows[agent.name].clone() for agent in package.agents]


def make_package(scenario: str, **arguments):
    """Makes the package's own environment, with the generators that ours is made with."""
    states = vmas.simulator.environment.Environment.vmas_random_state
    kept = list(states)
    states[0] = torch.Generator().manual_seed(0).get_state()
    try:
        return vmas.make_env(scenario, **arguments)
    finally:
        states[:] = kept


def start_alike(package, *, seed: int) -> list[torch.Tensor]:
    """Starts the instances one by one, as ours is documented to do, and returns the observations."""
    for index in range(package.num_envs):
        package.seed(seed + index)
        package.reset_at(index)
    package.seed(seed)
    return package.get_from_scenario(get_observations=True, get_rewards=False, get_infos=False, get_dones=False)[0]


def copied(observations) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in observations.observation.items()}


def rows_equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor], rows: torch.Tensor) -> bool:
    return all(torch.equal(one[name][rows], two[name][rows]) for name in one)


@pytest.mark.parametrize(
    ("scenario", "arguments", "multidiscrete"),
    [
        ("balance", {"n_agents": 2}, False),
        ("balance", DISCRETE, False),
        ("navigation", {}, False),
        ("simple_tag", {}, False),
        ("simple_speaker_listener", {}, False),
        ("simple_speaker_listener", DISCRETE, True),
        ("wheel", {}, False),  # rewards of shape [E, 1]
    ],
)
def test_equals_the_package(scenario, arguments, multidiscrete):
    env = VmasVectorEnv(scenario=scenario, num_envs=4, seed=3, max_steps=12, **arguments)
    package = make_package(
        scenario,
        num_envs=4,
        terminated_truncated=True,
        max_steps=12,
        multidiscrete_actions=multidiscrete,
        **{"continuous_actions": True, **arguments},
    )
    expected = start_alike(package, seed=3)
    generator = torch.Generator().manual_seed(0)
    now = env.reset()
    fresh = torch.ones(4, dtype=torch.bool)  # not ended before in ours, which the package does not reset by itself
    for _ in range(12):
        for ours, theirs in zip(by_agent(env, now.observation, package), expected, strict=True):
            assert torch.equal(ours[fresh], theirs[fresh])
        assert torch.equal(now.state, torch.cat([x.flatten(1) for x in now.observation.values()], dim=1))
        actions = draw(env, generator)
        step = env.step(actions)
        expected, rewards, terminated, truncated, infos = package.step(by_agent(env, actions, package))
        assert torch.equal(step.terminated[fresh], terminated[fresh])
        assert torch.equal(step.truncated[fresh], truncated[fresh])
        for ours, theirs in zip(by_agent(env, step.reward, package), rewards, strict=True):
            assert torch.equal(ours[fresh], theirs.view(4)[fresh])
        for key, value in step.info.items():
            mean = torch.stack([info[key].float().view(4) for info in infos]).mean(0)
            assert torch.equal(value[fresh], mean[fresh])
        ended = fresh & (terminated | truncated)
        for ours, theirs in zip(by_agent(env, step.final.observation, package), expected, strict=True):
            assert torch.equal(ours[ended], theirs[ended])
        fresh &= ~ended
    assert not fresh.any()  # all were truncated after 12 steps, if not terminated before


def test_all_ending_together_start_as_the_package_does():
    env = VmasVectorEnv(scenario="navigation", num_envs=3, seed=5, max_steps=2)
    package = make_package("navigation", num_envs=3)
    start_alike(package, seed=5)
    env.reset()
    actions = draw(env, torch.Generator())
    for truncated in (False, True, False):
        step = env.step(actions)
        assert step.truncated.tolist() == [truncated] * 3
        assert not step.terminated.any()
        if truncated:
            for ours, theirs in zip(step.observations.observation["agent"].unbind(1), package.reset(), strict=True):
                assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("scenario", "arguments"),
    [
        ("balance", {}),
        ("navigation", {}),
        ("dropout", {}),
        ("sampling", {"n_agents": 1}),
        ("simple_reference", {}),
        ("simple_push", {}),
        ("football", {"ai_red_agents": False}),  # whose noise depends on who has the ball in the other instances
    ],
)
def test_partial_reset_leaves_the_others_as_they_are(scenario, arguments):
    one, two = (VmasVectorEnv(scenario=scenario, num_envs=3, seed=1, max_steps=None, **arguments) for _ in range(2))
    generator = torch.Generator().manual_seed(1)
    for env in (one, two):
        env.reset()
    for _ in range(3):
        actions = draw(one, generator)
        one.step(actions)
        two.step(actions)
    before = copied(two._step.observations)
    reset = torch.tensor([False, True, False])
    starts = copied(two.reset(mask=reset.numpy()))
    assert rows_equal(starts, before, ~reset)
    assert not rows_equal(starts, before, reset)
    for _ in range(4):
        actions = draw(one, generator)
        first, second = one.step(actions), two.step(actions)
        assert rows_equal(first.observations.observation, second.observations.observation, ~reset)
        assert rows_equal(first.reward, second.reward, ~reset)


def test_partial_reset_draws_as_a_whole_one():
    one, two = (VmasVectorEnv(scenario="balance", num_envs=4, seed=2) for _ in range(2))
    for env in (one, two):
        env.reset()
    reset = torch.tensor([True, False, False, True])
    part, whole = copied(one.reset(mask=reset.numpy())), copied(two.reset())
    assert rows_equal(part, whole, reset)
    assert not rows_equal(part, whole, ~reset)
    # All that counts the steps and shapes the rewards begins anew as well.
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        actions = draw(one, generator)
        assert rows_equal(one.step(actions).reward, two.step(actions).reward, reset)


def test_partial_reset_keeps_one_tensor_one():
    env = VmasVectorEnv(scenario="dropout", num_envs=2)
    env.reset()
    env.reset(mask=np.array([True, False]))
    assert env._env.scenario._done is env._env.scenario.any_eaten


def test_seeds_determine_what_instances_share():
    env = VmasVectorEnv(scenario="simple_reference", num_envs=2, max_steps=1)
    start, generator = copied(env.reset(seed=7)), torch.Generator()
    others = 0
    for _ in range(5):
        step = env.step(draw(env, generator))  # all begin anew, with new goals
        others += not torch.equal(step.observations.observation["agent"][..., -13:-10], start["agent"][..., -13:-10])
        assert torch.equal(copied(env.reset(seed=7))["agent"], start["agent"])
    assert others


def test_instances_are_seeded_singly():
    many, few = (VmasVectorEnv(scenario="passage", num_envs=n, seed=s) for n, s in ((4, 0), (2, 2)))
    ours, theirs = copied(many.reset()), copied(few.reset())
    assert torch.equal(ours["agent"][2:], theirs["agent"])


def global_states() -> list:
    return [torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()]  # noqa: NPY002


def test_generators_of_the_process_and_of_others_are_left_alone(monkeypatch):
    before, of_vmas = global_states(), vmas.simulator.environment.Environment.vmas_random_state
    kept = [of_vmas[0].clone(), of_vmas[1], of_vmas[2]]
    # Its observations are noisy, so that it draws in every step.
    env, undisturbed = (VmasVectorEnv(scenario="asym_joint", num_envs=3, seed=4) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    actions = draw(env, generator)
    env.reset()
    undisturbed.reset()
    wanted = [copied(undisturbed.step(actions).observations) for _ in range(3)]
    for expected in wanted:
        other = env.replicate(num_envs=2, seed=0)
        other.reset()
        other.step({name: action[:2] for name, action in actions.items()})
        torch.rand(1, generator=torch.default_generator)
        assert rows_equal(copied(env.step(actions).observations), expected, torch.ones(3, dtype=torch.bool))
    torch.set_rng_state(torch.tensor(before[0], dtype=torch.uint8))

    def fail(agent):
        torch.rand(1)
        raise ArithmeticError

    monkeypatch.setattr(env._env.scenario, "reward", fail)
    with pytest.raises(ArithmeticError):
        env.step(actions)
    assert global_states() == before
    assert torch.equal(of_vmas[0], kept[0])
    assert of_vmas[1] is kept[1]
    assert of_vmas[2] is kept[2]


@pytest.mark.parametrize(
    ("scenario", "arguments"),
    [
        ("balance", {}),
        ("simple_spread", DISCRETE),
        ("navigation", {"n_agents": 2}),
        ("simple_speaker_listener", {}),
        ("simple_reference", DISCRETE),
    ],
)
def test_contract(scenario, arguments):
    with make_vector_env(f"vmas/{scenario}", num_envs=2, max_steps=9, **arguments) as env:
        check_env(env, steps=20)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", scenarios())
def test_contract_of_every_scenario(scenario):
    with make_vector_env(f"vmas/{scenario}", num_envs=2, max_steps=9) as env:
        try:
            check_env(env, steps=20)
        except ValueError as error:
            if scenario not in NOT_SEEDED_SINGLY or "must be seeded with seed + i" not in str(error):
                raise


def test_groups_and_actions():
    def actions(scenario, **arguments):
        env = VmasVectorEnv(scenario=scenario, num_envs=1, **arguments)
        return {name: (group.agents, group.action_space) for name, group in env.spec.groups.items()}

    speaker, listener = ("speaker_0",), ("listener_0",)
    assert actions("simple_speaker_listener", **DISCRETE) == {
        "speaker": (speaker, spaces.MultiDiscrete([3, 3, 3])),
        "listener": (listener, spaces.MultiDiscrete([3, 3])),
    }
    assert actions("simple_speaker_listener", multidiscrete_actions=False, **DISCRETE) == {
        "speaker": (speaker, spaces.Discrete(27)),
        "listener": (listener, spaces.Discrete(9)),
    }
    push_and_say = spaces.Box(np.float32([-1, -1, 0, 0, 0]), np.float32([1, 1, 1, 1, 1]))
    assert actions("simple_speaker_listener")["speaker"] == (speaker, push_and_say)
    assert actions("asym_joint")["agent"][0] == ("agent_0", "agent_1")  # called "agent 0" by the package
    assert actions("balance", **DISCRETE)["agent"][1] == spaces.Discrete(9)
    assert [len(agents) for agents, _ in actions("simple_tag").values()] == [3, 1]


def test_spec():
    env = VmasVectorEnv(scenario="navigation", num_envs=1, max_steps=7, n_agents=2)
    assert env.spec.name == "vmas/navigation"
    assert env.spec.groups["agent"].num_agents == 2
    assert env.spec.episode_limit == 7
    assert env.spec.info_keys == ("pos_rew", "final_rew", "agent_collisions")
    assert env.spec.metadata == {"backend": "vmas"}
    # The position of the ball has two numbers an instance.
    assert "ball_pos" not in VmasVectorEnv(scenario="football", num_envs=1).spec.info_keys
    assert VmasVectorEnv(scenario="simple", num_envs=1, max_steps=None).spec.episode_limit is None


def test_continuous_actions_are_clipped():
    one, two = (VmasVectorEnv(scenario="balance", num_envs=2, seed=0) for _ in range(2))
    one.reset()
    two.reset()
    far = torch.full((2, 3, 2), 5.0)
    first, second = one.step({"agent": far}), two.step({"agent": far.clamp(-1, 1)})
    assert torch.equal(first.observations.state, second.observations.state)


def test_bad_actions():
    env = VmasVectorEnv(scenario="simple_speaker_listener", num_envs=2, **DISCRETE)
    good = {"speaker": torch.zeros(2, 1, 3, dtype=torch.int64), "listener": torch.zeros(2, 1, 2, dtype=torch.int64)}
    with pytest.raises(RuntimeError, match="call reset before step"):
        env.step(good)
    env.reset()
    bad = good["speaker"].clone()
    bad[1, 0, 2] = 3
    with pytest.raises(ValueError, match="illegal action 3 in part 2 of agent 'speaker_0' in environment 1"):
        env.step({**good, "speaker": bad})
    with pytest.raises(ValueError, match=r"must be integers of shape \(2, 1, 3\)"):
        env.step({**good, "speaker": bad[..., 0]})
    with pytest.raises(ValueError, match="must be integers"):
        env.step({**good, "speaker": bad.float()})
    with pytest.raises(ValueError, match="need the groups"):
        env.step({"speaker": bad})
    env = VmasVectorEnv(scenario="simple", num_envs=1)
    env.reset()
    with pytest.raises(ValueError, match=r"illegal action .*nan.* of agent 'agent_0' in environment 0"):
        env.step({"agent": torch.full((1, 1, 2), torch.nan)})


def test_bad_arguments():
    with pytest.raises(ValueError, match="did you mean balance"):
        VmasVectorEnv(scenario="balanc", num_envs=1)
    with pytest.raises(TypeError, match=r"vmas/balance: .*n_agent'"):
        VmasVectorEnv(scenario="balance", num_envs=1, n_agent=2)
    with pytest.raises(ValueError, match="max_steps must be at least 1"):
        VmasVectorEnv(scenario="balance", num_envs=1, max_steps=0)
    with pytest.raises(ValueError, match="needs continuous_actions=False"):
        VmasVectorEnv(scenario="balance", num_envs=1, multidiscrete_actions=True)
    with pytest.raises(ValueError, match="seed must be in"):
        VmasVectorEnv(scenario="balance", num_envs=1, seed=-1)
    env = VmasVectorEnv(scenario="simple", num_envs=2)
    with pytest.raises(RuntimeError, match="first reset must be without a mask"):
        env.reset(mask=np.ones(2, np.bool_))


def test_saved_states_fit_only_equal_environments():
    env = VmasVectorEnv(scenario="simple_reference", num_envs=2)
    env.reset()
    with pytest.raises(ValueError, match="does not fit"):
        env.replicate(num_envs=3, seed=0).load_state_dict(env.state_dict())
    with pytest.raises(ValueError, match="does not fit"):
        VmasVectorEnv(scenario="simple_reference", num_envs=2, max_steps=3).load_state_dict(env.state_dict())


def test_saved_states_keep_links_and_shared_tensors():
    # Goals are links to landmarks, drawn once for all instances; one tensor of dropout has two names.
    env = VmasVectorEnv(scenario="simple_reference", num_envs=2, max_steps=1)
    other = env.replicate(num_envs=2, seed=0)
    other.reset()
    env.reset()
    goals = set()
    for _ in range(12):
        env.step(draw(env, torch.Generator()))  # all begin anew, with new goals
        other.load_state_dict(env.state_dict())
        mine, theirs = ([agent.goal_b.name for agent in e._env.agents] for e in (env, other))
        assert mine == theirs
        assert other._env.agents[0].goal_b is other._env.world.landmarks[int(theirs[0][-1])]
        goals.add(tuple(mine))
    assert len(goals) > 1
    env = VmasVectorEnv(scenario="dropout", num_envs=2)
    env.reset()
    other = env.replicate(num_envs=2, seed=0)
    other.load_state_dict(env.state_dict())
    assert other._env.scenario._done is other._env.scenario.any_eaten


def test_render():
    env = VmasVectorEnv(scenario="balance", num_envs=2)
    with pytest.raises(RuntimeError, match="call reset before render"):
        env.render(0)
    env.reset()
    with pytest.raises(IndexError, match=r"must be in \[0, 2\)"):
        env.render(2)
    try:
        pictures = [env.render(index) for index in range(2)]
    except NotImplementedError as error:
        pytest.skip(str(error))
    assert pictures[0].shape == (700, 700, 3)
    assert pictures[0].dtype == np.uint8
    assert (pictures[0] != pictures[1]).any()
    window = env._env.viewer
    env.reset(seed=1)
    env.load_state_dict(env.state_dict())
    assert env._env.viewer is window
    env.close()
    env.close()


def test_names_are_listed_without_the_package_and_its_notice_is_silenced():
    code = (
        "import sys; from marl_lightning.envs.adapters import vmas\n"
        "assert {'balance', 'simple_tag', 'waterfall'} <= set(vmas.scenarios())\n"
        "assert 'vmas' not in sys.modules and 'gym' not in sys.modules\n"
        "import gym_notices.notices as n, importlib.metadata as m\n"
        "n.notices[m.version('gym')] = 'is no longer maintained'\n"
        "vmas._import_vmas(); assert n.notices\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
