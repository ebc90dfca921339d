"""What holds for every wrapper: both kinds of environments, the contract, saving, attributes, names."""

import inspect
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
from scripted import CounterGame
from wrapper_helpers import RandomGame, assert_same, outcome, parts, random_actions

from marl_lightning.envs import (
    MultiAgentEnv,
    SharedMemoryVectorEnv,
    SyncVectorEnv,
    VectorEnv,
    check_env,
    make_vector_env,
)
from marl_lightning.envs.wrappers import (
    AddAgentID,
    AggregateReward,
    ClipReward,
    NormalizeObservation,
    NormalizeReward,
    RecordEpisodeStatistics,
    StackObservations,
    TimeLimit,
    TransformObservation,
    TransformReward,
    layers,
    running_statistics,
    wrap,
)


def centre(x):
    return (x - 1).astype(x.dtype)


STATELESS = {
    "time limit": [{"name": "TimeLimit", "max_episode_steps": 3}],
    "transform": [
        {"name": "TransformObservation", "function": centre, "state_function": centre},
        {"name": "TransformReward", "function": centre},
    ],
    "ids": ["AddAgentID"],
    "stack": [{"name": "StackObservations", "stack_size": 3}],
    "zero stack": [{"name": "StackObservations", "stack_size": 2, "padding": "zero"}],
    "features": [{"name": "SelectFeatures", "features": [1]}],
    "clip": [{"name": "ClipReward", "low": -0.5, "high": None}],
    "team": [{"name": "AggregateReward", "how": "mean", "team": "group"}],
    "record": ["RecordEpisodeStatistics"],
}
"""Instances do not influence one another."""

FROZEN = {"update_running_statistics": False}
POOLED = {
    "observations": ["NormalizeObservation"],
    "rewards": ["NormalizeReward"],
    "everything": [
        {"name": "TimeLimit", "max_episode_steps": 4},
        "NormalizeObservation",
        "AddAgentID",
        {"name": "StackObservations", "stack_size": 2},
        "ClipReward",
        {"name": "NormalizeReward", "gamma": 0.9},
    ],
}
ALL_STACKS = STATELESS | POOLED


def frozen(stack):
    return [
        {"name": entry, **FROZEN} if isinstance(entry, str) and entry.startswith("Normalize") else
        entry | FROZEN if not isinstance(entry, str) and entry["name"].startswith("Normalize") else entry
        for entry in stack
    ]  # fmt: skip


def vector(stack, num_envs, *, seed=0, **options):
    return wrap(SyncVectorEnv(factory=RandomGame, num_envs=num_envs, seed=seed, **options), stack)


@pytest.mark.parametrize("stack", ALL_STACKS.values(), ids=ALL_STACKS)
def test_wrapped_environments_keep_the_contract(stack):
    stack = frozen(stack)
    check_env(wrap(RandomGame(), stack), steps=60)
    check_env(vector(stack, 3), steps=60)


def test_scripted_games_keep_the_contract():
    stack = frozen(ALL_STACKS["everything"])
    check_env(wrap(CounterGame(), stack), steps=60)
    check_env(wrap(SyncVectorEnv(factory=CounterGame, num_envs=3, seed=0), stack), steps=60)


def assert_plays_the_same(env, singles, steps):
    """``env`` resets itself; ``singles`` are reset here."""
    num_envs = len(singles)
    assert env.spec == singles[0].spec
    observations = env.reset(seed=3)
    for i, single in enumerate(singles):
        assert_same({k: v[i] for k, v in parts(observations)}, dict(parts(single.reset(seed=3 + i))))
    ends = 0
    for _ in range(steps):
        step = env.step(random_actions(num_envs))
        for i, single in enumerate(singles):
            expected = single.step(random_actions())
            values, ended = outcome(expected), expected.terminated or expected.truncated
            if ended:
                ends += 1
                assert_same({k: v[i] for k, v in parts(step.final)}, dict(parts(expected.observations)))
                values |= dict(parts(single.reset()))
            assert_same(outcome(step, i), values)
    assert ends > 5


@pytest.mark.parametrize("stack", ALL_STACKS.values(), ids=ALL_STACKS)
def test_one_instance_and_a_vector_of_one_agree_bit_for_bit(stack):
    env, single = vector(stack, 1), wrap(RandomGame(), stack)
    assert isinstance(env, VectorEnv)
    assert isinstance(single, MultiAgentEnv)
    assert_plays_the_same(env, [single], 60)
    for key, statistics in running_statistics(env).items():
        for name, array in running_statistics(single)[key].arrays().items():
            np.testing.assert_array_equal(array, statistics.arrays()[name])


@pytest.mark.parametrize("stack", STATELESS.values(), ids=STATELESS)
def test_instances_agree_with_a_vector_of_many(stack):
    assert_plays_the_same(vector(stack, 3), [wrap(RandomGame(), stack) for _ in range(3)], 40)


@pytest.mark.parametrize("stack", ALL_STACKS.values(), ids=ALL_STACKS)
def test_without_autoreset_an_instance_plays_the_same_and_then_stands_still(stack):
    if any(isinstance(entry, dict) and entry["name"] == "TimeLimit" for entry in stack):
        stack = [entry for entry in stack if not (isinstance(entry, dict) and entry["name"] == "TimeLimit")]
    # One runs on its own, as the other instance ends at once and stands still: it must leave no trace.
    env = wrap(SyncVectorEnv(factory=RandomGame, num_envs=2, seed=0, autoreset=False), stack)
    env.reset()
    frozen_rows = {}
    for _ in range(30):
        running = env.running.tolist()
        counts = {key: statistics.count for key, statistics in running_statistics(env).items()}
        step = env.step(random_actions(2))
        for i in range(2):
            values = {k: v for k, v in outcome(step, i).items() if not k.startswith("reward")}
            if running[i] and (step.terminated[i] or step.truncated[i]):
                frozen_rows[i] = values
                assert_same({k: v[i] for k, v in parts(step.final)}, {k: v[i] for k, v in parts(step.observations)})
            elif not running[i]:
                assert_same(values, frozen_rows[i])
                assert all(not reward[i].any() for reward in step.reward.values())
        for key, statistics in running_statistics(env).items():
            if key.endswith("state"):
                going = [running[i] and i not in frozen_rows for i in range(2)]
                assert statistics.count == pytest.approx(counts[key] + sum(going))
        ended = ~env.running.numpy()
        if ended.all():
            env.reset(mask=np.array([True, False]))
            del frozen_rows[0]
    assert frozen_rows


def test_asynchronous_steps_are_wrapped_too():
    stack = ALL_STACKS["everything"]
    env = vector(stack, 4)
    factory = partial(SharedMemoryVectorEnv, factory=RandomGame, num_workers=2, context="fork")
    with wrap(factory(num_envs=4, seed=0), stack) as other:
        env.reset()
        other.reset()
        for _ in range(10):
            other.step_async(random_actions(4))
            assert_same(outcome(env.step(random_actions(4))), outcome(other.step_wait()))


@pytest.mark.parametrize("stack", ALL_STACKS.values(), ids=ALL_STACKS)
def test_tensors_that_a_wrapper_does_not_change_are_those_inside(stack):
    env = vector(stack, 2)
    inside, observations = env.unwrapped.reset(), env.reset()
    for name, alive in observations.alive.items():
        assert alive is inside.alive[name]
    if stack == ["AddAgentID"]:
        assert observations.state is inside.state
        step = env.step(random_actions(2))
        assert step.reward["birds"].data_ptr() == env.unwrapped.step(random_actions(2)).reward["birds"].data_ptr()


# Saving ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stack", ALL_STACKS.values(), ids=ALL_STACKS)
@pytest.mark.parametrize("kind", ["one", "vector"])
def test_a_saved_environment_goes_on_exactly(stack, kind):
    """Statistics follow the data before and after."""

    def make():
        return vector(stack, 3) if kind == "vector" else wrap(RandomGame(), stack)

    def play(env, steps):
        outcomes = []
        for _ in range(steps):
            step = env.step(random_actions(3 if kind == "vector" else None))
            outcomes.append(outcome(step))
            if kind == "one" and (step.terminated or step.truncated):
                outcomes.append(dict(parts(env.reset())))
        return outcomes

    env, other = make(), make()
    env.reset(seed=1)
    play(env, 9)
    state = env.state_dict()
    observations = other.load_state_dict(state)
    if kind == "vector":
        assert_same(dict(parts(observations)), dict(parts(env.reset(mask=np.zeros(3, np.bool_)))))
    for one, two in zip(play(env, 15), play(other, 15), strict=True):
        assert_same(one, two)


def test_an_episode_that_a_wrapper_ended_stays_over_when_saved():
    env, other = (TimeLimit(RandomGame(longest=9), max_episode_steps=1) for _ in range(2))
    env.reset(seed=1)
    env.step(random_actions())
    other.load_state_dict(env.state_dict())
    for over in (env, other):
        with pytest.raises(RuntimeError, match="over"):
            over.step(random_actions())


def test_other_wrappers_do_not_load():
    state = vector([], 2).state_dict()
    with pytest.raises(KeyError):
        vector(["AddAgentID"], 2).load_state_dict(state)
    env = vector([{"name": "StackObservations", "stack_size": 2}], 2)
    with pytest.raises(ValueError, match=r"observation.* of StackObservations has shape"):
        env.load_state_dict(vector([{"name": "StackObservations", "stack_size": 3}], 2).state_dict())
    with pytest.raises(ValueError, match=r"NormalizeObservation keeps .*statistics"):
        vector(["NormalizeObservation"], 2).load_state_dict(vector(["AddAgentID"], 2).state_dict())


def test_what_cannot_be_saved_inside_cannot_be_saved():
    env = AddAgentID(SyncVectorEnv(factory=partial(RandomGame, can_checkpoint=False), num_envs=1, seed=0))
    assert not env.spec.can_checkpoint
    with pytest.raises(NotImplementedError, match="cannot be saved"):
        env.state_dict()


# Attributes -----------------------------------------------------------------------------------------------------------


def test_attributes_are_found_through_the_stack():
    env = ClipReward(AddAgentID(NormalizeObservation(RandomGame(longest=5))))
    game = env.unwrapped
    assert type(game) is RandomGame
    assert env.longest == 5  # of the game
    assert env.has_wrapper_attr("epsilon")
    assert env.get_wrapper_attr("epsilon") == 1e-8
    env.set_wrapper_attr("epsilon", 0.5)
    env.set_wrapper_attr("longest", 7)
    assert env.env.env.env.epsilon == 0.5
    assert game.longest == 7
    assert "epsilon" not in vars(env)
    assert not env.has_wrapper_attr("nothing")
    with pytest.raises(AttributeError, match="nothing"):
        env.set_wrapper_attr("nothing", 1)
    with pytest.raises(AttributeError, match="nothing"):
        _ = env.nothing


def test_private_names_do_not_fall_through():
    game = RandomGame()
    game._secret = 1
    env = AddAgentID(game)
    assert not hasattr(env, "_secret")
    assert not env.has_wrapper_attr("_secret")
    for call in (lambda: env.get_wrapper_attr("_secret"), lambda: env.set_wrapper_attr("_secret", 2)):
        with pytest.raises(AttributeError, match="private"):
            call()


def test_a_wrapper_is_an_object_of_its_class():
    env = NormalizeReward(AddAgentID(vector([], 2)))
    assert [type(layer).__name__ for layer in layers(env)] == [
        "NormalizeReward",
        "RecordEpisodeStatistics",
        "AddAgentID",
    ]
    assert isinstance(env, NormalizeReward)
    assert not isinstance(env, AddAgentID)
    assert env.spec.metadata["wrappers"] == "AddAgentID + RecordEpisodeStatistics + NormalizeReward"
    assert list(inspect.signature(TimeLimit).parameters) == ["env", "max_episode_steps"]
    with pytest.raises(TypeError, match="positional"):
        TimeLimit(RandomGame(), 3)
    with pytest.raises(TypeError, match="wraps a MultiAgentEnv or a VectorEnv, got int"):
        AddAgentID(3)


def test_closing_and_rendering_reach_the_game():
    env = AddAgentID(CounterGame())
    env.reset()
    assert env.render().shape == (2, 2, 3)
    env.close()
    assert env.unwrapped.closed == 1
    env = AddAgentID(SyncVectorEnv(factory=CounterGame, num_envs=2, seed=0))
    with env:
        env.reset()
        assert env.render(1).shape == (2, 2, 3)
    assert all(game.closed == 1 for game in env.unwrapped._envs)


def test_a_vector_environment_has_to_be_reset_first():
    with pytest.raises(RuntimeError, match="reset"):
        vector(["NormalizeReward"], 2).step(random_actions(2))


def test_tensors_on_another_device_are_refused():
    class Elsewhere(SyncVectorEnv):
        def reset(self, **arguments):
            observations = super().reset(**arguments)
            observations.state = observations.state.to("meta")
            return observations

    env = AddAgentID(Elsewhere(factory=RandomGame, num_envs=2, seed=0))
    with pytest.raises(ValueError, match="device='cpu'"):
        env.reset()


def test_wrapping_an_instance_imports_no_torch():
    code = """
import sys
sys.path[:0] = {path!r}
from wrapper_helpers import RandomGame, random_actions
from marl_lightning.envs.wrappers import *
env = NormalizeReward(AddAgentID(NormalizeObservation(TimeLimit(RandomGame(), max_episode_steps=3))))
env.reset(seed=0)
env.step(random_actions())
env.state_dict()
assert not {{"torch", "lightning", "pydantic"}} & sys.modules.keys(), sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code.format(path=sys.path)], check=True, timeout=60)


# Names ----------------------------------------------------------------------------------------------------------------


def test_wrong_names_are_all_listed_with_the_nearest():
    with pytest.raises(ValueError, match="NormaliseObservation") as error:
        wrap(RandomGame(), ["NormaliseObservation", {"name": "TimeLimit", "max_steps": 3}, 3])
    text = str(error.value)
    assert "did you mean 'NormalizeObservation'" in text
    assert "wrappers[1].max_steps: there is no such setting; did you mean 'max_episode_steps'?" in text
    assert "wrappers[1].max_episode_steps: is required" in text
    assert "wrappers[2]=3: must be the name of a wrapper" in text


def test_the_recipe_names_the_wrappers():
    env = make_vector_env("matrix/penalty", num_envs=2, k=-5.0)
    env = TimeLimit(env, max_episode_steps=7)
    env = NormalizeReward(env, gamma=0.9)
    recipe = env.recipe
    assert recipe == {
        "name": "matrix/penalty",
        "kwargs": {
            "k": -5.0,
            "wrappers": [
                {"name": "TimeLimit", "max_episode_steps": 7},
                {"name": "RecordEpisodeStatistics"},
                {"name": "NormalizeReward", "gamma": 0.9},
            ],
        },
    }
    assert env.unwrapped.recipe == {"name": "matrix/penalty", "kwargs": {"k": -5.0}}
    kwargs = dict(recipe["kwargs"])
    wrappers = kwargs.pop("wrappers")
    again = wrap(make_vector_env(recipe["name"], num_envs=2, **kwargs), wrappers)
    assert again.spec == env.spec
    assert again.recipe == recipe
    assert env.replicate(num_envs=1, seed=0).recipe == recipe


def test_wrappers_of_others_work_but_have_no_recipe():
    class Doubled(TransformReward):
        def __init__(self, env):
            super().__init__(env, function=lambda reward: 2 * reward)

    env = Doubled(make_vector_env("matrix/climbing", num_envs=2))
    env.reset()
    assert env.step({"agents": torch.zeros(2, 2, dtype=torch.int64)}).reward["agents"].tolist() == [[22, 22]] * 2
    assert env.recipe is None
    assert env.replicate(num_envs=1, seed=0).num_envs == 1


def test_functions_cannot_be_written_into_a_recipe():
    env = make_vector_env("matrix/climbing", num_envs=2)
    assert TransformReward(env, function=np.abs).recipe is None
    assert AddAgentID(TransformObservation(env, function=np.abs)).recipe is None
    assert AggregateReward(RecordEpisodeStatistics(StackObservations(env, stack_size=2))).recipe is not None


def test_tensors_of_the_result_are_made_once():
    env = vector(ALL_STACKS["everything"], 2)
    observations = env.reset()
    step = env.step(random_actions(2))
    pointers = [tensor.data_ptr() for tensor in (*step.reward.values(), step.observations.state)]
    assert step.observations is observations
    for _ in range(5):
        assert env.step(random_actions(2)) is step
    assert pointers == [tensor.data_ptr() for tensor in (*step.reward.values(), step.observations.state)]
    assert isinstance(step.reward["birds"], torch.Tensor)
