"""The compiled rules equal the same code run by Python."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from smac_helpers import record

# Options that together reach every branch of the kernel: grids, last actions, both clocks, all collision rules.
CASES = {
    "2s3z": {"num_envs": 3, "steps": 200},
    "3m": {
        "num_envs": 3,
        "steps": 100,
        "physics": "smaclite",
        "collision": "separate",
        "spawn_noise": 1.5,
        "reward_mode": "signed",
    },
    "2m_vs_1z": {
        "num_envs": 1,
        "steps": 60,
        "collision": "none",
        "spawn_noise": 0.5,
        "obs_pathing_grid": True,
        "obs_terrain_height": True,
        "obs_last_action": True,
        "obs_timestep_number": True,
        "obs_instead_of_state": True,
    },
    "5m_vs_6m": {
        "num_envs": 2,
        "steps": 70,
        "obs_all_health": False,
        "obs_own_health": False,
        "state_timestep_number": True,
    },
}

SCRIPT = """
import sys
import numba
import numpy as np
from smac_helpers import record
from test_jit import CASES
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


@pytest.mark.parametrize("map_name", CASES)
def test_compiled_rules_equal_interpreted_rules(map_name, interpreted):
    expected = np.load(interpreted / f"{map_name}.npz")
    actual = record(map_name, **CASES[map_name])
    for name in expected.files:
        # All arithmetic is float32 in the same order, so that not even rounding differs.
        np.testing.assert_array_equal(actual[name], expected[name], err_msg=name)
    assert expected["terminated"].any(), "the comparison should include ends of episodes"
