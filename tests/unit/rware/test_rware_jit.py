"""The compiled rules equal the same code run by Python."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rware_helpers import record

YARD = """
....
.xx.
.xx.
.gg.
"""

# Scenarios and options that together reach every branch of the kernel.
CASES = {
    "list": ("rware-tiny-4ag-v2", {"num_envs": 2, "steps": 60, "max_steps": 25}),
    "messages": (
        "rware-tiny-5ag-v2",
        {
            "num_envs": 2,
            "steps": 100,
            "layout": YARD,
            "request_queue_size": 3,
            "max_steps": None,
            "max_inactivity_steps": 30,
            "reward_type": "two_stage",
            "msg_bits": 2,
            "sensor_range": 2,
            "normalised_coordinates": True,
        },
    ),
    "images": (
        "rware-tiny-5ag-v2",
        {
            "num_envs": 2,
            "steps": 100,
            "layout": YARD,
            "request_queue_size": 3,
            "max_steps": 40,
            "reward_type": "global",
            "observation_type": "image",
            "image_observation_layers": (
                *("shelves", "requests", "agents"),
                *("agent_direction", "agent_load", "goals", "accessible"),
            ),
        },
    ),
    "individual": (
        "rware-tiny-7ag-v2",
        {"num_envs": 2, "steps": 100, "layout": YARD, "request_queue_size": 3, "max_steps": 40},
    ),
}

SCRIPT = """
import sys
import numba
import numpy as np
from rware_helpers import record
from test_rware_jit import CASES
assert numba.config.DISABLE_JIT
for name, (scenario, options) in CASES.items():
    np.savez(f"{sys.argv[1]}/{name}.npz", **record(scenario, **options))
"""


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("interpreted")
    environment = os.environ | {"NUMBA_DISABLE_JIT": "1", "PYTHONPATH": str(Path(__file__).parent)}
    subprocess.run([sys.executable, "-W", "error::RuntimeWarning", "-c", SCRIPT, folder], env=environment, check=True)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_compiled_rules_equal_interpreted_rules(case, interpreted):
    scenario, options = CASES[case]
    expected = np.load(interpreted / f"{case}.npz")
    actual = record(scenario, **options)
    for name in expected.files:
        np.testing.assert_array_equal(actual[name], expected[name], err_msg=name)
    assert expected["terminated"].any() or expected["truncated"].any(), "the comparison should include ends of episodes"
    assert case == "list" or expected["reward"].any(), "the comparison should include rewards"
