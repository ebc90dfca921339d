"""Start states are distributed as those of new environments of lbforaging."""

from collections import Counter

import numpy as np
import pytest
from lbf_helpers import read_package

from marl_lightning.envs.adapters.lbf import LBFAdapter
from marl_lightning.envs.native.lbf import LBFVectorEnv

pytest.importorskip("lbforaging")

# Scenario, options, number of samples.
CASES = {
    # The package takes its time to find that there is no room.
    "no room": ("Foraging-5x5-3p-3f-v3", {}, 800),
    "coop": ("Foraging-6x6-2p-2f-coop-v3", {}, 4000),
    "five players": ("Foraging-6x6-5p-2f-v3", {"max_player_level": 3}, 4000),
    "levels": (
        "Foraging-6x6-3p-2f-v3",
        {
            "min_player_level": (1, 2, 1),
            "max_player_level": (1, 3, 4),
            "min_food_level": (1, 4),
            "max_food_level": (2, 5),
        },
        4000,
    ),
}


def package_starts(scenario, options, samples):
    adapter = LBFAdapter(scenario=scenario, **options)
    for sample in range(samples):
        adapter.reset(seed=7 if sample == 0 else None)
        yield read_package(adapter._env)


def native_starts(scenario, options, samples):
    # Instances and episodes are both samples.
    env = LBFVectorEnv(scenario=scenario, num_envs=samples // 4, seed=5, **options)
    for _ in range(4):
        env.reset()
        for players, foods in zip(env._state.players.copy(), env._state.foods.copy(), strict=True):
            assert env._state.spawned.min() > 0
            yield players, foods[foods[:, 2] > 0]


# What is counted. Together these cover cells, levels and how they depend on each other.
STATISTICS = {
    "cell of player 0": lambda players, foods: tuple(players[0, :2]),
    "cell of the last player": lambda players, foods: tuple(players[-1, :2]),
    "offset of players": lambda players, foods: tuple(players[1, :2] - players[0, :2]),
    "levels of players": lambda players, foods: tuple(players[:, 2]),
    "number of foods": lambda players, foods: len(foods),
    "cell of the first food": lambda players, foods: tuple(foods[0, :2]),
    "cell of the last food": lambda players, foods: tuple(foods[-1, :2]),
    "offset of foods": lambda players, foods: tuple(foods[-1, :2] - foods[0, :2]),
    "offset of player and food": lambda players, foods: tuple(foods[0, :2] - players[0, :2]),
    "levels of foods": lambda players, foods: tuple(foods[:, 2]),
    "levels of players and food": lambda players, foods: (*sorted(players[:, 2])[:3], foods[0, 2]),
}


def difference(first, second):
    """Returns how many standard deviations the chi-square statistic of two equally large samples is above its mean."""
    kinds = sorted(set(first) | set(second))
    table = np.array([[sample[kind] for kind in kinds] for sample in (first, second)], float)
    rare = table.sum(0) < 20
    table = np.concatenate([table[:, ~rare], table[:, rare].sum(1, keepdims=True)], axis=1)
    table = table[:, table.sum(0) > 0]
    freedom = table.shape[1] - 1
    if freedom == 0:
        return 0.0
    statistic = ((table[0] - table[1]) ** 2 / table.sum(0)).sum()
    # Wilson and Hilferty: the cube root is close to normal.
    scale = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - scale)) / np.sqrt(scale)


@pytest.mark.parametrize("case", CASES)
def test_distribution_equals_that_of_the_package(case):
    package, native = (list(starts(*CASES[case])) for starts in (package_starts, native_starts))
    for name, statistic in STATISTICS.items():
        counts = [Counter(statistic(players, foods) for players, foods in starts) for starts in (package, native)]
        # 4 is exceeded by three of a hundred thousand equal distributions.
        assert difference(*counts) < 4, f"{name}: {counts}"


def test_the_comparison_notices_small_differences():
    rng = np.random.default_rng(0)
    fair, other, biased = (rng.choice(10, 4000, p=p) for p in (None, None, [0.15] + [0.85 / 9] * 9))
    assert difference(Counter(fair), Counter(other)) < 4
    assert difference(Counter(fair), Counter(biased)) > 4


def test_levels_and_cells_keep_to_the_rules():
    env = LBFVectorEnv(scenario="Foraging-10x10-9p-4f-v3", num_envs=500)
    env.reset()
    players, foods = env._state.players, env._state.foods
    for e in range(env.num_envs):
        cells = [tuple(cell) for cell in np.concatenate([players[e, :, :2], foods[e, :, :2]]).tolist()]
        assert len(set(cells)) == len(cells)
        assert foods[e, :, :2].tolist() == sorted(foods[e, :, :2].tolist())
    assert foods[..., :2].min() == 1
    assert foods[..., :2].max() == 8
    assert players[..., :2].min() == 0
    assert players[..., :2].max() == 9
    assert set(players[..., 2].ravel()) == {1, 2}
    assert (foods[..., 2] <= np.sort(players[..., 2])[:, :3].sum(1)[:, None]).all()


def test_foods_of_cooperative_games_have_the_greatest_level():
    env = LBFVectorEnv(scenario="Foraging-10x10-3p-3f-coop-v3", num_envs=500)
    env.reset()
    assert (env._state.foods[..., 2] == env._state.players[..., 2].sum(1)[:, None]).all()
