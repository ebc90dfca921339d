"""The compiled rules equal the same code run by Python."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from lbf_helpers import record

# Options that together reach every branch of the kernel.
CASES = {
    "Foraging-5x5-3p-3f-v3": {"num_envs": 2, "steps": 60, "penalty": 0.1, "episode_limit": 20},
    "Foraging-2s-6x6-3p-2f-coop-v3": {"num_envs": 3, "steps": 110, "max_player_level": [1, 2, 3], "penalty": 0.3},
    "Foraging-5x5-2p-1f-v3": {
        "num_envs": 2,
        "steps": 110,
        "sight": 2,
        "grid_observation": True,
        "obs_instead_of_state": True,
        "normalize_reward": False,
    },
    "Foraging-2s-5x5-4p-2f-v3": {
        "num_envs": 2,
        "steps": 60,
        "observe_agent_levels": False,
        "min_food_level": [1, 2],
        "max_food_level": [1, 3],
    },
}

SCRIPT = """
import sys
import numba
import numpy as np
from lbf_helpers import record
from test_lbf_jit import CASES
assert numba.config.DISABLE_JIT
for name, options in CASES.items():
    np.savez(f"{sys.argv[1]}/{name}.npz", **record(name, **options))
"""


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("interpreted")
    environment = os.environ | {"NUMBA_DISABLE_JIT": "1", "PYTHONPATH": str(Path(__file__).parent)}
    subprocess.run([sys.executable, "-W", "error::RuntimeWarning", "-c", SCRIPT, folder], env=environment, check=True)
    return folder


@pytest.mark.parametrize("scenario", CASES)
def test_compiled_rules_equal_interpreted_rules(scenario, interpreted):
    expected = np.load(interpreted / f"{scenario}.npz")
    actual = record(scenario, **CASES[scenario])
    for name in expected.files:
        np.testing.assert_array_equal(actual[name], expected[name], err_msg=name)
    assert expected["terminated"].any() or expected["truncated"].any(), "the comparison should include ends of episodes"
    assert expected["reward"].any(), "the comparison should include rewards"
