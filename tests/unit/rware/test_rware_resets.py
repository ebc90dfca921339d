"""Start states are distributed as those of rware."""

from collections import Counter

import numpy as np
import pytest
from rware_helpers import read_package

from marl_lightning.envs.adapters.rware import RWAREAdapter
from marl_lightning.envs.native.rware import RWAREVectorEnv
from marl_lightning.envs.native.rware.kernel import DIRECTION, X, Y

pytest.importorskip("rware")

YARD = """
....
.xx.
.xx.
.gg.
"""

# Scenario, options, number of samples.
CASES = {
    "yard": ("rware-tiny-3ag-v2", {"layout": YARD, "request_queue_size": 2}, 2000),
    "full": ("rware-tiny-16ag-v2", {"layout": YARD, "request_queue_size": 3}, 600),
    "tiny": ("rware-tiny-2ag-easy-v2", {}, 1200),
}


def package_starts(scenario, options, samples):
    adapter = RWAREAdapter(scenario=scenario, **options)
    for sample in range(samples):
        adapter.reset(seed=7 if sample == 0 else None)
        yield read_package(adapter)


def native_starts(scenario, options, samples):
    # Instances and episodes are both samples.
    env = RWAREVectorEnv(scenario=scenario, num_envs=samples // 4, seed=5, **options)
    for _ in range(4):
        env.reset()
        yield from zip(env._state.agents[..., : DIRECTION + 1].copy(), env._state.requested.copy(), strict=True)


# What is counted. Together these cover cells, directions and requests, and how they depend on each other.
STATISTICS = {
    "cell of agent 0": lambda agents, requested: tuple(agents[0, :2]),
    "cell of the last agent": lambda agents, requested: tuple(agents[-1, :2]),
    "offset of agents": lambda agents, requested: tuple(agents[1, :2] - agents[0, :2]),
    "directions": lambda agents, requested: tuple(agents[:2, DIRECTION]),
    "direction and row": lambda agents, requested: (agents[0, DIRECTION], agents[0, Y]),
    "direction and column": lambda agents, requested: (agents[0, DIRECTION], agents[0, X]),
    "pair of requests": lambda agents, requested: tuple(np.flatnonzero(requested)[:2]),
    "last request": lambda agents, requested: np.flatnonzero(requested)[-1],
    "number of requests": lambda agents, requested: requested.sum(),
    "request and agent": lambda agents, requested: (np.flatnonzero(requested)[0], *agents[0, :2]),
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
        counts = [Counter(statistic(*start) for start in starts) for starts in (package, native)]
        # 4 is exceeded by three of a hundred thousand equal distributions.
        assert difference(*counts) < 4, f"{name}: {counts}"


def test_the_comparison_notices_small_differences():
    rng = np.random.default_rng(0)
    fair, other, biased = (rng.choice(10, 4000, p=p) for p in (None, None, [0.15] + [0.85 / 9] * 9))
    assert difference(Counter(fair), Counter(other)) < 4
    assert difference(Counter(fair), Counter(biased)) > 4


def test_nobody_shares_a_cell_and_shelves_are_in_their_places():
    env = RWAREVectorEnv(scenario="rware-small-19ag-easy-v2", num_envs=300)
    env.reset()
    agents = env._state.agents
    assert all(len(set(map(tuple, cells))) == 19 for cells in agents[..., :2].tolist())
    assert agents[..., X].min() == agents[..., Y].min() == agents[..., DIRECTION].min() == 0
    assert agents[..., X].max() == env.layout.width - 1
    assert agents[..., Y].max() == env.layout.height - 1
    assert agents[..., DIRECTION].max() == 3
    assert (env._state.shelves == env.layout.places).all()
    assert (env._state.requested.sum(1) == 38).all()
