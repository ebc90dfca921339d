"""The package behind our interface."""

import sys

import numpy as np
import pytest
import torch
from lbf_helpers import Pair, make_seeker, read_package

from marl_lightning.envs import check_env
from marl_lightning.envs.adapters.lbf import LBFAdapter
from marl_lightning.envs.native.lbf.layout import GROUP


def test_missing_package_names_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "lbforaging.foraging", None)
    with pytest.raises(ImportError, match=r'pip install "marl-lightning\[lbf\]"') as error:
        LBFAdapter(scenario="Foraging-8x8-2p-2f-v3")
    assert "\n" not in str(error.value)


@pytest.fixture
def package():
    return pytest.importorskip("lbforaging")


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("scenario", "options"),
    [
        ("Foraging-8x8-2p-2f-coop-v3", {}),
        ("Foraging-2s-5x5-3p-1f-v3", {"penalty": 0.1, "obs_instead_of_state": True}),
        ("Foraging-5x5-3p-2f-v3", {"grid_observation": True, "sight": 2}),
    ],
)
def test_contract(scenario, options):
    check_env(LBFAdapter(scenario=scenario, **options))


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("options", [{"penalty": 0.1}, {"grid_observation": True, "obs_instead_of_state": True}])
def test_steps_look_like_those_of_the_native_game(options):
    pair = Pair("Foraging-5x5-3p-1f-v3", episode_limit=15, **options)
    assert pair.adapter.spec.groups == pair.native.spec.groups
    for field in ("name", "state_size", "episode_limit", "info_keys", "shared_reward"):
        assert getattr(pair.adapter.spec, field) == getattr(pair.native.spec, field)
    rng, ends = np.random.default_rng(0), set()
    for episode in range(12):
        pair.reset(seed=episode)
        act = make_seeker(rng, noise=(0.1, 1.0)[episode % 2])
        over = False
        while not over:
            actions = np.array(act(*read_package(pair.package)))
            legal = pair.native._now.action_mask[0][np.arange(3), actions]
            actions[~legal] = 0
            step, native = pair.adapter.step({GROUP: actions}), pair.native.step({GROUP: torch.tensor(actions[None])})
            over = step.terminated or step.truncated
            expected = native.final if over else native.observations
            for ours, theirs in (
                (step.observations.observation[GROUP], expected.observation[GROUP]),
                (step.observations.action_mask[GROUP], expected.action_mask[GROUP]),
                (step.observations.alive[GROUP], expected.alive[GROUP]),
                (step.observations.state, expected.state),
                (step.reward[GROUP], native.reward[GROUP]),
            ):
                np.testing.assert_array_equal(ours, theirs[0].numpy())
                assert ours.dtype == theirs.numpy().dtype
            assert (step.terminated, step.truncated) == (native.terminated.item(), native.truncated.item())
            assert step.info == {key: value.item() for key, value in native.info.items()}
            if not over:
                np.testing.assert_array_equal(pair.adapter.render(), pair.native.render(0))
            ends.add((step.terminated, step.truncated))
    assert {(True, False), (False, True)} <= ends


@pytest.mark.usefixtures("package")
def test_episodes_do_not_depend_on_earlier_ones():
    env, other = (LBFAdapter(scenario="Foraging-5x5-5p-1f-v3") for _ in range(2))
    for seed in range(30):
        env.reset(seed=1000 + seed)
        np.testing.assert_array_equal(env.reset(seed=seed).state, other.reset(seed=seed).state)
