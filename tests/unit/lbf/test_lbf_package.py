"""Our rules equal those of lbforaging, step by step from equal states with equal actions."""

import numpy as np
import pytest
from lbf_helpers import Pair, make_seeker, read_package

pytest.importorskip("lbforaging")

# Scenario, options, and what must have happened for the comparison to mean something.
CASES = {
    "coop": ("Foraging-8x8-2p-2f-coop-v3", {}, {"rewarded", "swap", "cleared"}),
    "partial coop": ("Foraging-2s-7x7-3p-3f-coop-v3", {"penalty": 0.1}, {"rewarded", "penalised"}),
    "partial penalty": ("Foraging-2s-8x8-4p-4f-v3", {"penalty": 0.1}, {"rewarded", "penalised", "cleared"}),
    "crowded": ("Foraging-5x5-6p-1f-v3", {"normalize_reward": False, "episode_limit": 7}, {"rewarded", "cleared"}),
    "large": ("Foraging-19x19-9p-4f-v3", {}, {"rewarded"}),
    "grid": ("Foraging-7x7-3p-2f-v3", {"grid_observation": True, "sight": 3}, {"rewarded", "cleared"}),
    "grid of presence": (
        "Foraging-5x5-4p-2f-v3",
        {"grid_observation": True, "sight": 1, "observe_agent_levels": False, "obs_instead_of_state": True},
        {"rewarded", "cleared"},
    ),
    "levels": (
        "Foraging-2s-6x6-3p-2f-v3",
        {
            "sight": 1,
            "penalty": 0.25,
            "min_player_level": [1, 2, 1],
            "max_player_level": [1, 3, 4],
            "min_food_level": [1, 4],
            "max_food_level": [2, 5],
            "observe_agent_levels": False,
            "obs_instead_of_state": True,
        },
        {"rewarded", "penalised", "cleared"},
    ),
}


def play(case, steps):
    scenario, options, needed = CASES[case]
    pair = Pair(scenario, **options)
    rng = np.random.default_rng(0)
    done, episodes = True, 0
    for _ in range(steps):
        if done:
            pair.reset(seed=episodes)
            # From purposeful play, which scores, to random play, which runs into everything.
            act = make_seeker(rng, noise=(0.1, 0.3, 1.0)[episodes % 3])
            episodes += 1
        done = pair.step(act(*read_package(pair.package)))
    if len(pair.package.players) > 2:  # two players cannot meet in a cell
        needed = needed | {"shared_cell"}
    for event in needed | {"timeout"}:
        assert pair.counts[event] >= 3, f"the comparison should cover {event}: {pair.counts}"


@pytest.mark.parametrize("case", CASES)
def test_every_step_equals_the_package(case):
    play(case, 1500)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_ten_thousand_steps_equal_the_package(case):
    play(case, 10_000)
