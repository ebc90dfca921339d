"""Our rules equal those of rware, step by step from equal states with equal actions."""

import numpy as np
import pytest
from rware_helpers import Pair, make_circler, make_deliverer

from marl_lightning.envs.native.rware.layout import GROUP

pytest.importorskip("rware")

# Agents cannot help meeting each other here.
SMALL = """
....
.xx.
.xx.
.gg.
"""
RING = """
...
.x.
.xg
"""

# Scenario, options, and what must have happened for the comparison to mean something.
CASES = {
    "tiny": ("rware-tiny-4ag-v2", {}, {"delivered", "followed", "timeout"}),
    "easy": ("rware-tiny-6ag-easy-v2", {"reward_type": "two_stage"}, {"delivered", "returned", "followed", "tie"}),
    "small": ("rware-small-19ag-v2", {"reward_type": "global", "sensor_range": 3}, {"delivered", "followed", "tie"}),
    "large": ("rware-large-5ag-v2", {"normalised_coordinates": True}, {"delivered"}),
    "messages": ("rware-tiny-3ag-v2", {"msg_bits": 2, "sensor_range": 2}, {"delivered"}),
    "inactivity": (
        "rware-tiny-2ag-v2",
        {"max_inactivity_steps": 12, "max_steps": None, "reward_type": "two_stage"},
        {"inactive"},
    ),
    "crowded": (
        "rware-tiny-12ag-v2",
        {"layout": SMALL, "request_queue_size": 3, "max_steps": 60, "msg_bits": 1},
        {"delivered", "double", "tie", "circle", "swap", "followed", "timeout"},
    ),
    "ring": (
        "rware-tiny-4ag-v2",
        {
            "layout": RING,
            "request_queue_size": 1,
            "max_steps": 40,
            "max_inactivity_steps": 35,
            "reward_type": "two_stage",
            "normalised_coordinates": True,
        },
        {"delivered", "swap", "followed", "timeout", "inactive"},
    ),
    "images": ("rware-tiny-4ag-easy-v2", {"observation_type": "image", "sensor_range": 2}, {"delivered"}),
    "images without direction": (
        "rware-tiny-4ag-easy-v2",
        {
            "observation_type": "image",
            "image_observation_directional": False,
            "image_observation_layers": ["goals", "requests", "accessible"],
            "layout": SMALL,
            "request_queue_size": 2,
            "max_steps": 100,
            "msg_bits": 2,
        },
        {"delivered", "tie", "timeout"},
    ),
}


def play(case, steps):
    scenario, options, needed = CASES[case]
    pair = Pair(scenario, **options)
    rng = np.random.default_rng(0)
    over, episodes = True, 0
    for _ in range(steps):
        if over:
            pair.reset(seed=episodes)
            # From purposeful play, which delivers, to random play, which runs into everything.
            noise = (0.1, 0.3, 1.0, None)[episodes % 4]
            act = make_circler(rng, noise=0.02) if noise is None else make_deliverer(rng, noise=noise)
            episodes += 1
        actions = act(pair.package)
        bits = pair.adapter.spec.groups[GROUP].action_parts[1:]
        if bits:
            actions = np.concatenate([actions[:, None], rng.integers(0, bits, (len(actions), len(bits)))], axis=1)
        step = pair.step(actions)
        over = step.terminated or step.truncated
        if not over and episodes < 3:
            np.testing.assert_array_equal(pair.adapter.render(), pair.native.render(0))
    return pair.counts, needed


@pytest.mark.parametrize("case", CASES)
def test_every_step_equals_the_package(case):
    counts, needed = play(case, 100 if case == "small" else 250)
    for event in needed - {"timeout"}:
        assert counts[event] >= 1, f"the comparison should cover {event}: {counts}"


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_ten_thousand_steps_equal_the_package(case):
    counts, needed = play(case, 10_000)
    for event in needed:
        assert counts[event] >= 3, f"the comparison should cover {event}: {counts}"
