"""Episode statistics against a plain loop over steps and environments."""

import numpy as np
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from marl_lightning.data.episodes import EpisodeStatistics, episode_metrics
from marl_lightning.envs.spec import EnvSpec, GroupSpec

BOX, TWO = spaces.Box(-1, 1, (1,), np.float32), spaces.Discrete(2)
SPEC = EnvSpec(
    name="test/test",
    groups={
        "a": GroupSpec(agents=("a0", "a1"), observation_space=BOX, action_space=TWO),
        "b": GroupSpec(agents=("b0",), observation_space=BOX, action_space=TWO),
    },
    state_size=1,
)


def brute_force(rewards, done, info):
    """One dict an episode, in order of time, of all rollouts put together."""
    steps, num_envs = done.shape
    episodes, start = [], [0] * num_envs
    for t in range(steps):
        for e in range(num_envs):
            if done[t, e]:
                span = slice(start[e], t + 1)
                a, b = rewards["a"][span, e].sum(0), rewards["b"][span, e].sum(0)
                every = np.concatenate((a, b))
                episodes.append(
                    {
                        "return": every.mean(),
                        "team_return": every.sum(),
                        "length": t + 1 - start[e],
                        "return/a": a.mean(),
                        "return/b": b.mean(),
                        "won": info["won"][t, e],
                    }
                )
                start[e] = t + 1
    return episodes


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10_000), rate=st.sampled_from([0.0, 0.1, 0.5, 1.0]), rollouts=st.integers(1, 4))
def test_equals_brute_force_over_rollouts(seed, rate, rollouts):
    rng = np.random.default_rng(seed)
    length, num_envs = 6, 3
    shape = (rollouts * length, num_envs)
    rewards = {"a": rng.normal(size=(*shape, 2)), "b": rng.normal(size=(*shape, 1))}
    done, info = rng.random(shape) < rate, {"won": rng.random(shape)}
    statistics = EpisodeStatistics(spec=SPEC, num_envs=num_envs)
    found = []
    for i in range(rollouts):
        span = slice(i * length, (i + 1) * length)
        if i == rollouts - 1:  # saving and restoring in between changes nothing
            restored = EpisodeStatistics(spec=SPEC, num_envs=num_envs)
            restored.load_state_dict(statistics.state_dict())
            statistics = restored
        part = statistics.update({k: v[span] for k, v in rewards.items()}, done[span], {"won": info["won"][span]})
        found += [{k: v[j] for k, v in part.items()} for j in range(len(part["length"]))]
    expected = brute_force(rewards, done, info)
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours:
            np.testing.assert_allclose(ours[name], theirs[name], atol=1e-9)


def test_metrics_are_means_with_the_names_of_the_field():
    episodes = {"return": np.array([1.0, 3.0]), "length": np.array([4, 8]), "battle_won": np.array([0.0, 1.0])}
    assert episode_metrics(episodes) == {
        "train/return": 2.0,
        "train/episode_length": 6.0,
        "train/win_rate": 0.5,
        "train/episodes": 2.0,
    }
    assert episode_metrics({"length": np.zeros(0)}) == {}
