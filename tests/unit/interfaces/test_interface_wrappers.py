"""Wrappers of interfaces: how they are called, and that they are those of the contract, which have their own tests."""

from __future__ import annotations

from functools import partial

import fake_smac
import numpy as np
import pytest
from gymnasium import spaces
from interface_helpers import TeamsGame

from marl_lightning.envs import EnvSpec, GroupSpec, MultiAgentEnv, Observations, Step, wrappers
from marl_lightning.envs.interfaces import (
    AddAgentID,
    ClipReward,
    Interface,
    LBFInterface,
    MAgent2Interface,
    NormalizeObservation,
    NormalizeReward,
    RecordEpisodeStatistics,
    SMACliteInterface,
    StackObservations,
    SyncVectorEnv,
    TimeLimit,
    TransformObservation,
    TransformReward,
)
from marl_lightning.envs.interfaces.layout import FlatGame


class Dummy(MultiAgentEnv):
    """Three agents, of which the second is never alive; nothing ever changes."""

    def __init__(self) -> None:
        box = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        group = GroupSpec(agents=("a0", "a1", "a2"), observation_space=box, action_space=spaces.Discrete(2))
        self.spec = EnvSpec(name="dummy", groups={"agents": group}, state_size=2)

    def reset(self, *, seed: int | None = None) -> Observations[np.ndarray]:
        return Observations(
            observation={"agents": np.array([[1, 2], [0, 0], [3, 4]], np.float32)},
            action_mask={"agents": np.array([[True, True], [True, False], [True, True]])},
            alive={"agents": np.array([True, False, True])},
            state=np.array([5, 7], np.float32),
        )

    def step(self, actions) -> Step[np.ndarray]:
        reward = {"agents": np.array([1, 0, 3], np.float32)}
        return Step(observations=self.reset(), reward=reward, terminated=False, truncated=False, info={})


def test_the_dummy():
    env = NormalizeObservation(Interface(Dummy(), reward_aggr="none"), normalize_state=True)
    env.reset()
    for _ in range(50):
        obs, *_ = env.step(env.sample())
    statistics = env.get_wrapper_attr("statistics")
    np.testing.assert_allclose(statistics["agents"].mean, [2, 3], atol=1e-3)
    np.testing.assert_allclose(statistics["state"].mean, [5, 7], atol=1e-3)
    np.testing.assert_allclose(obs, [[-1, -1], [0, 0], [1, 1]], atol=1e-3)
    assert obs.dtype == np.float32


@pytest.mark.parametrize("stage", ["lbf", "battle", "smaclite"])
def test_the_stack_of_the_documentation(stage, monkeypatch):
    fake_smac.install_smaclite(monkeypatch)
    env = {
        "lbf": partial(LBFInterface, "Foraging-2s-10x10-3p-3f-coop-v3", reward_aggr="none"),
        "battle": partial(MAgent2Interface, "battle_v4"),
        "smaclite": partial(SMACliteInterface, "MMM2", reward_aggr="none"),
    }[stage]()
    num_agents, obs_size = env.n_agents, env.get_obs_size()
    env = NormalizeReward(AddAgentID(NormalizeObservation(env)), gamma=0.99)
    assert env.get_obs_size() == obs_size + num_agents
    obs, _ = env.reset(seed=0)
    for _ in range(3):
        np.testing.assert_array_equal(obs[:, obs_size:], np.diag(env.get_agent_mask()))
        obs, reward, *_ = env.step(env.sample())
        assert reward.shape == (num_agents,)
        assert reward.dtype == obs.dtype == np.float32
    env.close()


def by_contract(env, *stack):
    """The interface to a game that was wrapped before."""
    for wrapper in stack:
        env = env.wrap(wrapper)
    return env


STACKS = {
    "limit": (lambda env: TimeLimit(env, max_episode_steps=2), [partial(wrappers.TimeLimit, max_episode_steps=2)]),
    "normal": (
        lambda env: NormalizeObservation(env, normalize_state=True, epsilon=0.1),
        [partial(wrappers.NormalizeObservation, epsilon=0.1)],
    ),
    "ids": (AddAgentID, [wrappers.AddAgentID]),
    "stack": (
        lambda env: StackObservations(env, 3, padding="zero"),
        [partial(wrappers.StackObservations, stack_size=3, padding="zero")],
    ),
    "clip": (lambda env: ClipReward(env, -1.5, 15.0), [partial(wrappers.ClipReward, low=-1.5, high=15.0)]),
    "reward": (
        lambda env: NormalizeReward(env, gamma=0.5, epsilon=0.1),
        [partial(wrappers.NormalizeReward, gamma=0.5, epsilon=0.1)],
    ),
    "record": (RecordEpisodeStatistics, [wrappers.RecordEpisodeStatistics]),
    "all": (
        lambda env: NormalizeReward(ClipReward(AddAgentID(NormalizeObservation(TimeLimit(env, 4)))), 0.9),
        [
            partial(wrappers.TimeLimit, max_episode_steps=4),
            partial(wrappers.NormalizeObservation, normalize_state=False),
            wrappers.AddAgentID,
            wrappers.ClipReward,
            partial(wrappers.NormalizeReward, gamma=0.9),
        ],
    ),
}


def play(env, episodes=6):
    """Everything that the episodes show."""
    seen = [env.reset(seed=8)[0]]
    for _ in range(episodes):
        over = False
        while not over:
            obs, reward, terminated, truncated, info = env.step(env.sample())
            seen += [obs, reward, terminated, truncated, *info.values(), env.get_state(), env.get_agent_mask()]
            over = terminated or truncated
        seen.append(env.reset()[0])
    return seen


@pytest.mark.parametrize("reward_aggr", ["sum", "none"])
@pytest.mark.parametrize("stack", STACKS)
def test_wrappers_are_those_of_the_contract(stack, reward_aggr):
    wrap, contract = STACKS[stack]
    plain = Interface(TeamsGame(), reward_aggr=reward_aggr)
    env = wrap(Interface(TeamsGame(), reward_aggr=reward_aggr))
    other = by_contract(Interface(TeamsGame(), reward_aggr=reward_aggr), *contract)
    assert type(env) is Interface
    one, two, unwrapped = play(env), play(other), play(plain)
    assert len(one) == len(two)
    for a, b in zip(one, two, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not (len(one) == len(unwrapped) and all(map(np.array_equal, one, unwrapped)))


def test_the_team_reward_is_what_is_normalised():
    env, plain = Interface(TeamsGame(), reward_aggr="sum"), Interface(TeamsGame(), reward_aggr="sum")
    env = NormalizeReward(env, gamma=0.5, epsilon=1e-8)
    env.reset(seed=2)
    plain.reset(seed=2)
    statistics, discounted = wrappers.RunningStatistics(), 0.0
    for _ in range(30):
        actions = env.sample()
        _, reward, terminated, truncated, _ = env.step(actions)
        _, raw, *_ = plain.step(actions)
        discounted = 0.5 * discounted + raw
        statistics.update(np.array([discounted]))
        assert type(reward) is float
        assert reward == pytest.approx(raw / np.sqrt(statistics.variance + 1e-8), rel=1e-5)
        if terminated or truncated:
            discounted = 0.0
            env.reset()
            plain.reset()


def test_ids_have_the_same_place_for_agents_of_all_groups():
    env = AddAgentID(Interface(TeamsGame(), reward_aggr="none"))
    for seed in range(5):
        obs, _ = env.reset(seed=seed)
        np.testing.assert_array_equal(obs[:, 6:], np.diag(env.get_agent_mask()))
        assert not obs[2:, 4:6].any()


# Functions -----------------------------------------------------------------------------------------------------------


def test_functions_of_rewards_get_what_step_returns():
    shared = Interface(TeamsGame(), reward_aggr="sum")
    env = TransformReward(shared, lambda reward: max(reward, 1.0) / 2)  # no function of arrays
    plain = Interface(TeamsGame(), reward_aggr="sum")
    env.reset(seed=0)
    plain.reset(seed=0)
    actions = env.sample()
    assert env.step(actions)[1] == pytest.approx(max(plain.step(actions)[1], 1.0) / 2)

    env = TransformReward(Interface(Dummy(), reward_aggr="none"), lambda reward: reward - reward.mean())
    env.reset()
    np.testing.assert_allclose(env.step(env.sample())[1], [1 - 4 / 3, 0, 3 - 4 / 3], rtol=1e-6)


def test_functions_of_rewards_must_return_as_many():
    env = TransformReward(Interface(Dummy(), reward_aggr="none"), lambda reward: reward[:2])
    env.reset()
    with pytest.raises(ValueError, match=r"function must return rewards of shape \(3,\), got \(2,\)"):
        env.step(env.sample())


def test_functions_of_observations_change_the_state_too():
    env = TransformObservation(Interface(Dummy()), lambda x: np.clip(x, 2, 6))
    obs, _ = env.reset()
    np.testing.assert_array_equal(obs, [[2, 2], [0, 0], [3, 4]])  # the dead still see nothing
    np.testing.assert_array_equal(env.get_state(), [5, 6])

    env = TransformObservation(Interface(Dummy()), lambda x: x[:, :1] * 0.5, state_function=lambda s: np.append(s, 9))
    assert (env.get_obs_size(), env.get_state_size()) == (1, 3)
    obs, _ = env.reset()
    assert obs.dtype == np.float32
    np.testing.assert_array_equal(obs, [[0.5], [0], [1.5]])
    np.testing.assert_array_equal(env.get_state(), [5, 7, 9])


def test_functions_see_flat_and_padded_observations_group_by_group():
    shapes = []
    env = TransformObservation(
        Interface(TeamsGame()), lambda x: shapes.append(x.shape) or x * 2, state_function=lambda state: state
    )
    plain = Interface(TeamsGame())
    np.testing.assert_array_equal(env.reset(seed=0)[0], plain.reset(seed=0)[0] * 2)
    assert set(shapes) == {(2, 6), (3, 6)}


def test_groups_must_stay_equally_long():
    env = Interface(TeamsGame())
    with pytest.raises(ValueError, match="wrappers must leave the observations of all groups equally long"):
        TransformObservation(env, lambda x: x[:, : len(x)], state_function=lambda state: state)


# Around vector environments ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("auto_reset", [False, True])
def test_wrappers_take_vector_environments(auto_reset):
    fns = [partial(Interface, TeamsGame(longest=3), reward_aggr="none") for _ in range(3)]

    def wrap(env):
        env = TransformObservation(env, lambda x: x * 2, state_function=lambda state: state[:, :1])
        env = AddAgentID(env)
        return TransformReward(env, lambda reward: reward / 4)

    plain = SyncVectorEnv(fns, auto_reset=auto_reset)
    env = wrap(SyncVectorEnv([lambda: Interface(TeamsGame(longest=3), reward_aggr="none")] * 3, auto_reset=auto_reset))
    assert type(env) is SyncVectorEnv
    with pytest.raises(RuntimeError, match="call reset first"):
        env.get_state()
    env.reset(seed=1)
    plain.reset(seed=1)
    while plain.get_env_mask().any():
        np.testing.assert_array_equal(env.get_env_mask(), plain.get_env_mask())
        actions = plain.sample()
        obs, reward, *flags, infos = env.step(actions)
        expected, expected_reward, *expected_flags, expected_infos = plain.step(actions)
        np.testing.assert_array_equal(obs[..., :6], expected * 2)
        np.testing.assert_array_equal(obs[..., 6:], env.get_agent_mask()[..., None] * np.eye(5))
        np.testing.assert_array_equal(reward, expected_reward / 4)
        np.testing.assert_array_equal(flags, expected_flags)
        assert env.get_state().shape == (3, 1)
        finals = [(one, two) for one, two in zip(infos, expected_infos, strict=True) if "final_obs" in one]
        for one, two in finals:
            np.testing.assert_array_equal(one["final_obs"][:, :6], two["final_obs"] * 2)
            np.testing.assert_array_equal(one["final_obs"][:, 6:], np.diag(one["final_agent_mask"]))
        if finals:
            break
    assert auto_reset == bool(finals)


def test_a_shared_reward_of_a_vector_environment():
    env = TransformReward(SyncVectorEnv([lambda: Interface(TeamsGame())] * 3), lambda reward: reward + np.arange(3))
    plain = SyncVectorEnv([lambda: Interface(TeamsGame())] * 3)
    env.reset(seed=1)
    plain.reset(seed=1)
    actions = plain.sample()
    np.testing.assert_array_equal(env.step(actions)[1], plain.step(actions)[1] + [0, 1, 2])


# Attributes ----------------------------------------------------------------------------------------------------------


def test_attributes_are_found_through_the_stack():
    env = AddAgentID(NormalizeObservation(TimeLimit(Interface(TeamsGame()), 5)))
    assert env.get_wrapper_attr("max_episode_steps") == 5
    assert env.get_wrapper_attr("n_agents") == 5
    assert env.get_wrapper_attr("speed") == 1
    assert env.has_wrapper_attr("update_running_statistics")
    assert not env.has_wrapper_attr("tempo")
    env.set_wrapper_attr("speed", 3)
    assert env.unwrapped.speed == 3
    env.set_wrapper_attr("update_running_statistics", False)
    env.reset()
    assert env.get_wrapper_attr("statistics")["scouts"].count < 1
    for call in (env.get_wrapper_attr, partial(env.set_wrapper_attr, value=0)):
        with pytest.raises(AttributeError, match="tempo"):
            call("tempo")
        with pytest.raises(AttributeError, match="private"):
            call("_env")
    assert not env.has_wrapper_attr("_rng")


def test_attributes_of_a_vector_environment():
    env = SyncVectorEnv([lambda: Interface(TeamsGame())] * 2)
    assert env.get_wrapper_attr("num_envs") == 2
    assert not env.has_wrapper_attr("speed")  # it is an attribute of each of the games
    env = NormalizeObservation(env)
    env.set_wrapper_attr("update_running_statistics", False)
    assert env.get_wrapper_attr("update_running_statistics") is False


def test_unwrapped_is_the_game_below_all_wrappers():
    game = TeamsGame()
    env = AddAgentID(TimeLimit(Interface(game), 5))
    assert env.unwrapped is game
    assert isinstance(env._env, wrappers.AddAgentID)
    assert any(isinstance(layer, FlatGame) for layer in wrappers.layers(env._env))
