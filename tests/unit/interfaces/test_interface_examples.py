"""Programs written for the interfaces, wrappers and vector environments of marlbench run with other imports."""

import ast
import inspect
import re

import fake_smac
import pytest

from marl_lightning.envs import interfaces

EPISODE = """
from marlbench.interfaces.lbf import LBFInterface


env = LBFInterface(
    env_name="Foraging-2s-10x10-3p-3f-coop-v3",
    max_episode_steps=150,
    reward_aggr="sum",
    disable_env_checker=True,
)

obs, info = env.reset()
done = False

while not done:
    actions = env.sample()
    obs, reward, terminated, truncated, info = env.step(actions)

    state = env.get_state()
    avail_actions = env.get_avail_actions()
    agent_mask = env.get_agent_mask()

    done = terminated or truncated

env.close()
"""

COMMON_API = """
from marlbench.interfaces.lbf import LBFInterface

env = LBFInterface(env_name="Foraging-2s-10x10-3p-3f-coop-v3")
env.reset()
actions = env.sample()

obs, info = env.reset(seed=42)
obs, reward, terminated, truncated, info = env.step(actions * 0)

state = env.get_state()
avail_actions = env.get_avail_actions()
agent_mask = env.get_agent_mask()

obs_size = env.get_obs_size()
state_size = env.get_state_size()
action_size = env.get_action_size()

actions = env.sample()
env.close()
"""

GAMES = """
from marlbench.interfaces.magent import MAgent2Interface
from marlbench.interfaces.mamujoco import MAmujocoInterface
from marlbench.interfaces.pz import PettingZooInterface
from marlbench.interfaces.rware import RWAREInterface
from marlbench.interfaces.smac import SMACInterface
from marlbench.interfaces.smaclite import SMACliteInterface
from marlbench.interfaces.smacv2 import SMACv2Interface


rware_env = RWAREInterface(
    env_name="rware-tiny-2ag-v2",
    reward_aggr="sum",
)

smaclite_env = SMACliteInterface(env_name="MMM2")

pettingzoo_env = PettingZooInterface(env_name="pursuit_v4",family="sisl")

mamujoco_env = MAmujocoInterface(env_name="Ant-p2x4")

magent_env = MAgent2Interface(env_name="adversarial_pursuit_v4")

smac_env = SMACInterface(env_name="3m")

smacv2_env = SMACv2Interface(env_name="terran_5_vs_5")
"""

WRAPPERS = """
import numpy as np

from marlbench.interfaces.lbf import LBFInterface
from marlbench.wrappers.obs_wrappers import AddAgentID, NormalizeObservation
from marlbench.wrappers.reward_wrappers import NormalizeReward, TransformReward
from marlbench.wrappers.common import TimeLimit


env = LBFInterface(
    env_name="Foraging-2s-10x10-3p-3f-coop-v3",
    reward_aggr="none",
)

env = TimeLimit(env, max_episode_steps=150)
env = NormalizeObservation(env, normalize_state=True)
env = AddAgentID(env)
env = TransformReward(env, lambda reward: np.clip(reward, -1.0, 1.0))
env = NormalizeReward(env, gamma=0.99)
"""

SYNC = """
from marlbench.interfaces.lbf import LBFInterface
from marlbench.vec_envs.sync_vec import SyncVectorEnv
N_ENVS = 4
def make_lbf():
    return LBFInterface(
        env_name="Foraging-2s-10x10-3p-3f-coop-v3",
        max_episode_steps=150,
        reward_aggr="sum")
env_fns = [make_lbf for _ in range(N_ENVS)]
env = SyncVectorEnv(env_fns,auto_reset=False)
observations, infos = env.reset(seed=42)
observations, rewards, dones, truncated, infos = env.step(env.sample())
env.close()
"""

SUBPROC = """
from marlbench.interfaces.lbf import LBFInterface
from marlbench.vec_envs.subproc_vec import SubprocVectorEnv
N_ENVS = 4
def make_lbf():
    return LBFInterface(
        env_name="Foraging-2s-10x10-3p-3f-coop-v3",
        max_episode_steps=150,
        reward_aggr="sum")
if __name__ == "__main__":
    env_fns = [make_lbf for _ in range(N_ENVS)]
    env = SubprocVectorEnv(
        env_fns,
        start_method="spawn",
        auto_reset=False)
    observations, infos = env.reset(seed=42)
    observations, rewards, dones, truncated, infos = env.step(env.sample())
    env.close()
"""


def statements(program):
    """Returns the statements of a program, with the imports changed and nothing else."""
    changed = re.sub(
        r"from marlbench\.(interfaces|wrappers|vec_envs)\.\w+ ", "from marl_lightning.envs.interfaces ", program
    )
    assert "marlbench" not in changed
    return [ast.get_source_segment(changed, node) for node in ast.parse(changed).body]


def run(program, refused=None):
    """Runs a program as a script and returns its variables; the statement that contains ``refused`` must fail."""
    variables = {"__name__": "__main__"}
    for statement in statements(program):
        if refused is not None and refused in statement:
            with pytest.raises(ValueError, match="pettingzoo/sisl/pursuit_v5"):  # there is no such version any more
                exec(statement, variables)
        else:
            exec(statement, variables)
    return variables


@pytest.fixture
def stand_ins(monkeypatch):
    fake_smac.install_smac(monkeypatch)
    fake_smac.install_smaclite(monkeypatch)


def test_an_episode():
    variables = run(EPISODE)
    assert variables["done"]
    assert variables["state"].shape == (18,)
    assert variables["avail_actions"].shape == (3, 6)


def test_the_common_api():
    variables = run(COMMON_API)
    assert [variables[name] for name in ("obs_size", "state_size", "action_size")] == [18, 18, 6]


def test_other_games(stand_ins):
    variables = run(GAMES, refused='"pursuit_v4"')
    names = ("rware_env", "smaclite_env", "mamujoco_env", "magent_env", "smac_env", "smacv2_env")
    for name in names:
        env = variables[name]
        env.reset(seed=0)
        env.step(env.sample())
        env.close()


def test_wrappers():
    env = run(WRAPPERS)["env"]
    obs, _ = env.reset(seed=0)
    assert obs.shape == (3, 21)
    for _ in range(20):
        obs, reward, *_ = env.step(env.sample())
    assert obs[:, 18:].tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    assert reward.shape == (3,)


@pytest.mark.parametrize("program", [SYNC, SUBPROC])
def test_vector_environments(program):
    variables = run(program)
    assert variables["observations"].shape == (4, 3, 18)
    for name in ("rewards", "dones", "truncated"):
        assert variables[name].shape == (4,)
    assert len(variables["infos"]) == 4


def test_all_names_exist():
    for name in interfaces.__all__:
        assert inspect.isclass(getattr(interfaces, name)) or inspect.isfunction(getattr(interfaces, name))
