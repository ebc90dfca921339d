"""The compiled rules equal the same code run by Python."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from mpe_helpers import SCENARIOS, random_actions, to_tensors

from marl_lightning.envs.native.mpe import MPEVectorEnv

# Together they reach every branch of the kernel.
OPTIONS = {
    "simple_spread_v3": {"N": 2, "num_agent_neighbors": 2, "num_landmark_neighbors": 1, "terminate_on_success": True},
    "simple_tag_v3": {"num_good": 2, "num_agent_neighbors": 2, "terminate_on_success": True},
    "simple_speaker_listener_v4": {"continuous_actions": True},
    "simple_push_v3": {"continuous_actions": True},
    "simple_crypto_v3": {"continuous_actions": True},
    "simple_world_comm_v3": {"continuous_actions": True},
}

SCRIPT = """
import sys
import numba
import numpy as np
from mpe_helpers import SCENARIOS
from test_mpe_jit import record
assert numba.config.DISABLE_JIT
for scenario in SCENARIOS:
    np.savez(f"{sys.argv[1]}/{scenario}.npz", **record(scenario))
"""


def record(scenario):
    """Returns everything that some random steps show, stacked over time."""
    env = MPEVectorEnv(scenario=scenario, num_envs=2, seed=3, max_cycles=8, **OPTIONS.get(scenario, {}))
    rng, frames = np.random.default_rng(0), []
    env.reset()
    env._state.position[0] *= 0.2  # collisions
    for _ in range(24):
        step = env.step(to_tensors(random_actions(env, rng)))
        frame = {
            "state": step.observations.state,
            "final": step.final.state,
            "terminated": step.terminated,
            "truncated": step.truncated,
            **{f"reward of {name}": reward for name, reward in step.reward.items()},
            **{f"observation of {name}": array for name, array in step.observations.observation.items()},
        }
        frames.append({name: tensor.numpy().copy() for name, tensor in frame.items()})
    return {name: np.stack([frame[name] for frame in frames]) for name in frames[0]}


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("interpreted")
    environment = os.environ | {"NUMBA_DISABLE_JIT": "1", "PYTHONPATH": str(Path(__file__).parent)}
    subprocess.run([sys.executable, "-W", "error::RuntimeWarning", "-c", SCRIPT, folder], env=environment, check=True)
    return folder


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_compiled_equals_interpreted(interpreted, scenario):
    expected = np.load(interpreted / f"{scenario}.npz")
    for name, array in record(scenario).items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)
