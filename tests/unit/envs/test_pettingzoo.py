"""PettingZooAdapter against the raw MPE package step by step, and against agents that leave by script."""

import importlib
from functools import partial

import numpy as np
import pytest
from gymnasium import spaces
from pettingzoo import ParallelEnv
from scripted import LeavingGame

from marl_lightning.envs import PettingZooAdapter

MPE = {
    "simple_spread_v3": {"agent": (3, 18)},
    "simple_tag_v3": {"adversary": (3, 16), "agent": (1, 14)},
    "simple_speaker_listener_v4": {"speaker": (1, 3), "listener": (1, 11)},
}


def scripted(leaves, **kwargs) -> tuple[PettingZooAdapter, LeavingGame]:
    game = LeavingGame(leaves, **kwargs)
    return PettingZooAdapter(factory=lambda: game), game


# ------------------------------------------------------------------------------------------------------------- MPE


def package(scenario, **kwargs) -> PettingZooAdapter:
    game = partial(importlib.import_module(f"mpe2.{scenario}").parallel_env, **kwargs)
    return PettingZooAdapter(factory=game, name=f"mpe/{scenario}")


@pytest.mark.parametrize("scenario", MPE)
def test_groups_and_sizes(scenario):
    env = package(scenario, max_cycles=7)
    sizes = {name: (group.num_agents, *group.observation_shape) for name, group in env.spec.groups.items()}
    assert sizes == MPE[scenario]
    assert env.spec.state_size == sum(agents * size for agents, size in MPE[scenario].values())
    assert (env.spec.name, env.spec.episode_limit, env.spec.info_keys) == (f"mpe/{scenario}", 7, ())
    assert env.spec.metadata == {"backend": "mpe2"}
    assert not env.spec.can_checkpoint


@pytest.mark.parametrize("continuous", [False, True], ids=["discrete", "continuous"])
@pytest.mark.parametrize("scenario", MPE)
def test_equals_the_raw_package(scenario, continuous):
    kwargs = {"max_cycles": 10, "continuous_actions": continuous}
    env = package(scenario, **kwargs)
    raw = importlib.import_module(f"mpe2.{scenario}").parallel_env(**kwargs)
    rng = np.random.default_rng(0)
    for episode in range(3):
        # The first reset seeds, the others continue the generator of the package.
        seed = 3 if episode == 0 else None
        observations = env.reset(seed=seed)
        raw_observations, _ = raw.reset(seed=seed)
        for time in range(1, 11):
            actions, raw_actions = {}, {}
            for name, group in env.spec.groups.items():
                if continuous:
                    # Beyond the bounds [0, 1]: the adapter clips.
                    actions[name] = rng.uniform(-0.5, 1.5, (group.num_agents, group.action_size)).astype(np.float32)
                    raw_actions |= dict(zip(group.agents, np.clip(actions[name], 0, 1), strict=True))
                else:
                    actions[name] = rng.integers(group.action_size, size=group.num_agents)
                    raw_actions |= dict(zip(group.agents, actions[name].tolist(), strict=True))
            step = env.step(actions)
            raw_observations, rewards, _, truncations, _ = raw.step(raw_actions)
            for name, group in env.spec.groups.items():
                expected = np.stack([raw_observations[agent] for agent in group.agents])
                assert np.array_equal(step.observations.observation[name], expected)
                assert step.observations.observation[name].dtype == np.float32
                assert np.array_equal(step.reward[name], np.float32([rewards[agent] for agent in group.agents]))
                assert step.observations.alive[name].all()
            assert np.array_equal(step.observations.state, raw.state())
            assert not step.terminated
            assert step.truncated == (time == 10) == all(truncations.values())
        assert set(observations.action_mask) == (set() if continuous else set(env.spec.groups))
        with pytest.raises(RuntimeError, match="over"):
            env.step(actions)


def test_render():
    env = package("simple_v3", render_mode="rgb_array")
    env.reset(seed=0)
    assert env.render().shape == (700, 700, 3)
    with pytest.raises(NotImplementedError, match=r'needs render_mode="rgb_array" to be rendered, got None'):
        package("simple_v3").render()


# -------------------------------------------------------------------------------------------------- leaving agents


def test_agents_leave_one_by_one():
    env, game = scripted({"a_0": (1, "terminated"), "a_1": (3, "terminated"), "b_0": (2, "terminated")})
    env.reset(seed=4)
    step = env.step({"a": np.array([1, 2]), "b": np.array([0])})
    # The reward of the step on which it leaves counts, its observation is gone.
    assert step.reward["a"].tolist() == [100, 101]
    assert step.observations.alive["a"].tolist() == [False, True]
    assert step.observations.observation["a"].tolist() == [[0], [11]]
    assert step.observations.observation["a"].dtype == np.uint8
    assert step.observations.action_mask["a"].tolist() == [[True, False, False], [True, True, True]]
    assert (step.terminated, step.truncated) == (False, False)
    # a_0 is gone: its action is ignored, even though it would not be legal, and it gets nothing.
    step = env.step({"a": np.array([2, 2]), "b": np.array([1])})
    assert game.received[-1] == {"a_1": 2, "b_0": 1}
    assert step.reward["a"].tolist() == [0, 201]
    assert step.reward["b"].tolist() == [202]
    assert step.observations.alive["b"].tolist() == [False]
    step = env.step({"a": np.array([0, 0]), "b": np.array([0])})
    assert game.received[-1] == {"a_1": 0}
    assert (step.terminated, step.truncated) == (True, False)
    assert not step.observations.alive["a"].any()
    assert not step.observations.observation["a"].any()
    env.reset()
    assert game.seeds == [None, 4, None]  # the first one is the probe of the constructor


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ((1, "terminated"), (1, "terminated"), "terminated"),
        ((1, "truncated"), (1, "truncated"), "truncated"),
        ((1, "terminated"), (1, "truncated"), "truncated"),
        ((1, "both"), (1, "both"), "terminated"),
        ((1, "both"), (1, "truncated"), "truncated"),
    ],
)
def test_mixed_ends_on_one_step(first, second, expected):
    env, _ = scripted({"a_0": first, "a_1": second})
    env.reset()
    step = env.step({"a": np.array([0, 0])})
    assert (step.terminated, step.truncated) == (expected == "terminated", expected == "truncated")
    # Only agents that were cut can be bootstrapped from the successor.
    cut = [kind == "truncated" for _, kind in (first, second)]
    assert step.observations.alive["a"].tolist() == cut
    assert step.observations.observation["a"].tolist() == [[10 * cut[0]], [11 * cut[1]]]


@pytest.mark.parametrize("last", ["terminated", "truncated"])
def test_only_the_last_step_decides_how_the_episode_ends(last):
    other = {"terminated": "truncated", "truncated": "terminated"}[last]
    env, _ = scripted({"a_0": (1, other), "a_1": (2, last)})
    env.reset()
    step = env.step({"a": np.array([0, 0])})
    assert (step.terminated, step.truncated) == (False, False)
    assert step.observations.alive["a"].tolist() == [False, True]
    step = env.step({"a": np.array([0, 0])})
    assert (step.terminated, step.truncated) == (last == "terminated", last == "truncated")
    assert step.observations.alive["a"].tolist() == [False, last == "truncated"]


def test_game_that_keeps_ended_agents_in_its_list():
    class Keeping(LeavingGame):
        def step(self, actions):
            result = super().step(actions)
            self.agents = list(self.possible_agents)
            return result

    env = PettingZooAdapter(factory=lambda: Keeping({"a_0": (1, "truncated"), "a_1": (1, "truncated")}))
    env.reset()
    assert env.step({"a": np.array([0, 0])}).truncated
    with pytest.raises(RuntimeError, match="over"):
        env.step({"a": np.array([0, 0])})


@pytest.mark.parametrize(
    ("masks", "row"), [("info", [True, False, True]), ("observation", [False, True, True]), (None, [True] * 3)]
)
def test_action_masks(masks, row):
    env, _ = scripted({"a_0": (2, "terminated"), "a_1": (1, "terminated")}, masks=masks)
    observations = env.reset()
    assert observations.action_mask["a"].tolist() == [row, row]
    assert observations.observation["a"].tolist() == [[0], [1]]
    legal = np.array([2, 2])
    step = env.step({"a": legal})
    assert step.observations.action_mask["a"].tolist() == [row, [True, False, False]]
    if masks:
        with pytest.raises(ValueError, match=f"illegal action {row.index(False)} of agent 'a_0'"):
            env.step({"a": np.array([row.index(False), 0])})


def test_an_acting_agent_without_legal_action_is_an_error():
    class Stuck(LeavingGame):
        def info(self):
            return {"action_mask": np.zeros(3, np.int8)}

    env = PettingZooAdapter(factory=lambda: Stuck({"a_0": (1, "terminated")}))
    with pytest.raises(ValueError, match="no legal action"):
        env.reset()


def test_state_is_the_observations_of_a_game_without_one():
    env, _ = scripted({"a_0": (1, "terminated"), "b_0": (2, "terminated"), "a_1": (2, "terminated")})
    assert env.reset().state.tolist() == [0, 2, 1]  # group after group
    state = env.step({"a": np.array([0, 0]), "b": np.array([0])}).observations.state
    assert state.tolist() == [0, 12, 11]
    assert state.dtype == np.float32


def test_results_belong_to_the_caller():
    env, _ = scripted({"a_0": (5, "terminated")}, masks="info")
    env.reset().action_mask["a"][:] = True
    with pytest.raises(ValueError, match="illegal action 1"):
        env.step({"a": np.array([1])})


# --------------------------------------------------------------------------------------------------- groups, errors


def test_equal_names_with_different_spaces_are_split():
    class Mixed(LeavingGame):
        def action_space(self, agent):
            return spaces.Discrete(4 if agent == "a_1" else 3)

    env = PettingZooAdapter(factory=lambda: Mixed(dict.fromkeys(["a_0", "b_0", "a_1", "a_2", "c"], (1, "terminated"))))
    groups = {name: group.agents for name, group in env.spec.groups.items()}
    assert groups == {"a_0": ("a_0", "a_2"), "b": ("b_0",), "a_1": ("a_1",), "c": ("c",)}
    assert list(groups) == ["a_0", "b", "a_1", "c"]
    assert (env.spec.name, env.spec.episode_limit) == ("leaving_v0", None)


def test_unusable_spaces_are_refused():
    class Text(LeavingGame):
        def observation_space(self, agent):
            return spaces.Discrete(5)

    with pytest.raises(ValueError, match="observation_space must be a gymnasium Box"):
        PettingZooAdapter(factory=lambda: Text({"a_0": (1, "terminated")}))


def test_other_kinds_of_games_are_refused():
    from mpe2 import simple_v3

    assert not isinstance(simple_v3.env(), ParallelEnv)
    with pytest.raises(TypeError, match="must return a pettingzoo ParallelEnv, got OrderEnforcingWrapper"):
        PettingZooAdapter(factory=simple_v3.env)


def test_close_reaches_the_game_once():
    class Closing(LeavingGame):
        closed = 0

        def close(self):
            self.closed += 1

    game = Closing({"a_0": (1, "terminated")})
    env = PettingZooAdapter(factory=lambda: game)
    env.close()
    env.close()
    assert game.closed == 1
