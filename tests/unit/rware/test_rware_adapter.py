"""The package behind our interface."""

import sys

import numpy as np
import pytest

from marl_lightning.envs import check_env
from marl_lightning.envs.adapters import rware as adapter_module
from marl_lightning.envs.adapters.rware import RWAREAdapter
from marl_lightning.envs.native.rware import RWAREVectorEnv
from marl_lightning.envs.native.rware.layout import GROUP
from marl_lightning.envs.native.rware.scenarios import SCENARIOS, parse


def test_missing_package_names_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "rware", None)
    monkeypatch.delitem(sys.modules, "rware.warehouse", raising=False)
    for call in (adapter_module.scenarios, lambda: RWAREAdapter(scenario="rware-tiny-2ag-v2")):
        with pytest.raises(ImportError, match=r'pip install "marl-lightning\[rware\]"') as error:
            call()
        assert "\n" not in str(error.value)


@pytest.fixture
def package():
    return pytest.importorskip("rware")


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("scenario", "options"),
    [
        ("rware-tiny-2ag-v2", {}),
        ("rware-tiny-2ag-hard-v2", {"msg_bits": 2, "max_steps": 50, "reward_type": "global"}),
        ("rware-tiny-2ag-easy-v2", {"observation_type": "image", "max_inactivity_steps": 30}),
    ],
)
def test_contract(scenario, options):
    check_env(adapter_module.make(scenario, **options))


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"msg_bits": 2, "normalised_coordinates": True, "max_inactivity_steps": 9},
        {"observation_type": "image", "max_steps": None, "reward_type": "global"},
    ],
)
def test_spec_is_that_of_the_native_game(options):
    package, native = (
        RWAREAdapter(scenario="rware-tiny-2ag-v2", **options).spec,
        RWAREVectorEnv(scenario="rware-tiny-2ag-v2", num_envs=1, **options).spec,
    )
    for field in ("name", "groups", "state_size", "episode_limit", "info_keys", "shared_reward"):
        assert getattr(package, field) == getattr(native, field)
    assert package.metadata == {"backend": "rware"}


@pytest.mark.usefixtures("package")
def test_layers_that_the_package_transposes_are_refused():
    with pytest.raises(ValueError, match="agent_load with rows and columns exchanged"):
        RWAREAdapter(
            scenario="rware-tiny-2ag-v2", observation_type="image", image_observation_layers=["agents", "agent_load"]
        )


@pytest.mark.usefixtures("package")
def test_names_and_maps_are_those_of_the_package():
    import gymnasium

    registered = {name for name in gymnasium.registry if name.startswith("rware-")}
    unplayable = {f"rware-tiny-{agents}ag-easy-v2" for agents in range(16, 20)}
    assert set(SCENARIOS) == registered - unplayable
    assert adapter_module.scenarios() == SCENARIOS
    assert all(parse(name).name == name for name in registered)
    for name in ("rware-tiny-2ag-v2", "rware-small-3ag-hard-v2", "rware-medium-4ag-v2", "rware-large-19ag-easy-v2"):
        theirs, ours = gymnasium.make(name).unwrapped, RWAREAdapter(scenario=name)._env
        np.testing.assert_array_equal(theirs.highways, ours.highways)
        assert theirs.goals == ours.goals
        for field in ("n_agents", "request_queue_size", "max_steps", "max_inactivity_steps", "reward_type"):
            assert getattr(theirs, field) == getattr(ours, field)
        for field in ("sensor_range", "msg_bits", "normalised_coordinates", "fast_obs"):
            assert getattr(theirs, field) == getattr(ours, field)
        assert theirs.observation_space == ours.observation_space


@pytest.mark.usefixtures("package")
def test_the_names_left_out_cannot_be_played():
    import gymnasium

    with pytest.raises(ValueError, match="larger sample"):
        gymnasium.make("rware-tiny-17ag-easy-v2").reset()
    with pytest.raises(ValueError, match="set request_queue_size below 32"):
        RWAREAdapter(scenario="rware-tiny-16ag-easy-v2")
    assert RWAREAdapter(scenario="rware-tiny-16ag-easy-v2", request_queue_size=31).reset().alive[GROUP].all()


@pytest.mark.usefixtures("package")
def test_wrong_use_is_refused():
    env = RWAREAdapter(scenario="rware-tiny-2ag-v2", max_steps=1)
    with pytest.raises(RuntimeError, match="call reset"):
        env.step({GROUP: np.zeros(2, np.int64)})
    env.reset(seed=0)
    with pytest.raises(ValueError, match="illegal action 5"):
        env.step({GROUP: np.array([0, 5])})
    assert env.step({GROUP: np.zeros(2, np.int64)}).truncated
    with pytest.raises(RuntimeError, match="call reset"):
        env.step({GROUP: np.zeros(2, np.int64)})
