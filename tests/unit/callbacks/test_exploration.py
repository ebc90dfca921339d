"""Exploration: drawn for every instance and agent, among legal actions, by env steps."""

import lightning
import numpy as np
import pytest
import torch
from gymnasium import spaces

from marl_lightning.algorithms import IQL, MAPPO
from marl_lightning.callbacks import BoltzmannSchedule, EpsilonSchedule, StopAtEnvSteps
from marl_lightning.clock import Schedule
from marl_lightning.data.replay import ReplayDataModule
from marl_lightning.data.rollout import RolloutDataModule
from marl_lightning.envs import EnvSpec, GroupSpec, Observations, make_vector_env

AGENTS, ACTIONS = 3, 4
FIRST = torch.ones(1, dtype=torch.bool)


def module_with(value):
    """A module whose actions have the given values everywhere."""
    group = GroupSpec(
        agents=tuple("abc"), observation_space=spaces.Box(0, 1, (1,), np.float32), action_space=spaces.Discrete(ACTIONS)
    )
    module = IQL(spec=EnvSpec(name="flat", groups={"agents": group}, state_size=0), hidden_sizes=(2,))
    torch.nn.init.zeros_(module.networks["agents"].head.weight)
    module.networks["agents"].head.bias.data = torch.tensor(value)
    return module


def act(module, envs, *, illegal=(), **options):
    mask = torch.ones(envs, AGENTS, ACTIONS, dtype=torch.bool)
    mask[..., list(illegal)] = False
    observations = Observations(
        observation={"agents": torch.zeros(envs, AGENTS, 1)},
        action_mask={"agents": mask},
        alive={"agents": torch.ones(envs, AGENTS, dtype=torch.bool)},
        state=torch.zeros(envs, 0),
    )
    generator = torch.Generator().manual_seed(0)
    return module.policy.act(observations, {}, FIRST.expand(envs), generator=generator, **options)[0]["agents"]


def explore(module, kind, rate):
    module.policy.kind, module.policy.rate = kind, rate
    return module


def frequencies(actions):
    return torch.bincount(actions.flatten(), minlength=ACTIONS) / actions.numel()


def test_epsilon_mixes_uniform_and_greedy():
    module = explore(module_with([0.0, 3.0, 1.0, 2.0]), "epsilon", 0.4)
    found = frequencies(act(module, 20_000))
    torch.testing.assert_close(found, torch.tensor([0.1, 0.7, 0.1, 0.1]), rtol=0, atol=0.01)
    found = frequencies(act(module, 20_000, illegal=[1]))  # the best legal one is 3
    torch.testing.assert_close(found, torch.tensor([0.4 / 3, 0, 0.4 / 3, 0.6 + 0.4 / 3]), rtol=0, atol=0.01)


def test_every_instance_and_agent_draws_for_itself():
    """With a common draw, rows or columns would be all random or all greedy."""
    actions = act(explore(module_with([9.0, 0.0, 0.0, 0.0]), "epsilon", 0.5), 10_000)
    random = actions != 0
    assert random.float().mean().item() == pytest.approx(0.5 * 0.75, abs=0.01)
    for a, b in ((random[:, 0], random[:, 1]), (random[:, 1], random[:, 2]), (random[:-1, 0], random[1:, 0])):
        correlation = np.corrcoef(a.numpy(), b.numpy())[0, 1]
        assert abs(correlation) < 0.04


@pytest.mark.parametrize("kind", ["epsilon", "boltzmann"])
def test_only_legal_actions_at_any_rate(kind):
    for rate in (0.0, 0.5, 1.0):
        module = explore(module_with([5.0, 1e4, -3.0, 0.0]), kind, rate)
        assert not torch.isin(act(module, 500, illegal=[1, 2]), torch.tensor([1, 2])).any()
        assert (act(module, 500, illegal=[0, 1, 2]) == 3).all()


def test_boltzmann_frequencies():
    value = torch.tensor([0.0, 1.0, 2.0, 0.5])
    module = explore(module_with(value.tolist()), "boltzmann", 0.7)
    torch.testing.assert_close(frequencies(act(module, 20_000)), torch.softmax(value / 0.7, 0), rtol=0, atol=0.01)
    module.policy.rate = 1e-12
    assert (act(module, 100) == 2).all()


def test_evaluation_is_greedy_and_draws_nothing():
    module = explore(module_with([0.0, 3.0, 1.0, 2.0]), "epsilon", 1.0)
    before = torch.get_rng_state()
    assert (act(module, 50, deterministic=True) == 1).all()
    assert (act(module, 50, deterministic=True, illegal=[1]) == 3).all()
    assert torch.equal(before, torch.get_rng_state())


def test_equal_values_take_the_first_action():
    assert (act(explore(module_with([1.0] * 4), "epsilon", 0.0), 9, illegal=[0]) == 1).all()


# Schedules ----------------------------------------------------------------------------------------------------------


def test_schedules_by_hand():
    linear = Schedule(start=1.0, end=0.2, anneal_env_steps=100)
    assert [linear(n) for n in (0, 25, 100, 10**6)] == pytest.approx([1.0, 0.8, 0.2, 0.2])
    exponential = Schedule(start=1.0, end=0.01, anneal_env_steps=100, shape="exponential")
    assert [exponential(n) for n in (0, 50, 100)] == pytest.approx([1.0, 0.1, 0.01])
    assert Schedule(start=1.0, end=0.5, anneal_env_steps=0)(0) == 0.5


def fit(module, callback, *, envs=2, env_steps=40, data=None):
    env = make_vector_env("matrix/climbing", num_envs=envs, seed=0)
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=-1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, callbacks=[StopAtEnvSteps(env_steps), callback],
    )  # fmt: skip
    trainer.fit(module, datamodule=data or ReplayDataModule(env=env, start_training=10**6, updates_per_batch=1))


@pytest.mark.parametrize("envs", [1, 4, 16])
def test_the_curve_against_env_steps_does_not_depend_on_the_number_of_instances(envs):
    rates = []

    class Spy(IQL):
        def prepare_collection(self):
            super().prepare_collection()
            rates.append((self.env_steps, self.policy.rate))

    fit(Spy(hidden_sizes=(2,)), EpsilonSchedule(start=0.9, end=0.1, anneal_env_steps=32), envs=envs, env_steps=48)
    assert [steps for steps, _ in rates] == list(range(0, 48, envs))
    assert [rate for _, rate in rates] == pytest.approx([max(0.1, 0.9 - 0.025 * steps) for steps, _ in rates])


def test_boltzmann_is_given_to_the_policy():
    module = IQL(hidden_sizes=(2,))
    fit(module, BoltzmannSchedule(start=2.0, end=0.5, anneal_env_steps=1))
    assert (module.policy.kind, module.policy.rate) == ("boltzmann", 0.5)


@pytest.mark.parametrize("callback", [EpsilonSchedule, BoltzmannSchedule])
def test_a_method_that_explores_otherwise_refuses_the_callback(callback):
    data = RolloutDataModule(env=make_vector_env("matrix/climbing", num_envs=2), rollout_length=4)
    with pytest.raises(TypeError, match=f"{callback.__name__} does not apply to MAPPO: remove the callback"):
        fit(MAPPO(hidden_sizes=(2,)), callback(), data=data)


@pytest.mark.parametrize(
    ("callback", "options", "message"),
    [
        (EpsilonSchedule, {"start": 0.1, "end": 0.5}, r"end=0\.5 is above start=0\.1"),
        (EpsilonSchedule, {"start": 1.5, "anneal_env_steps": -1}, r"start=1\.5.*\n.*anneal_env_steps=-1"),
        (EpsilonSchedule, {"end": 0.0, "shape": "exponential"}, "never gets to 0"),
        (EpsilonSchedule, {"shape": "lin"}, "did you mean 'linear'"),
        (BoltzmannSchedule, {"end": 0.0}, r"end=0\.0"),
    ],
)
def test_schedules_that_make_no_sense_are_refused(callback, options, message):
    with pytest.raises(ValueError, match=message):
        callback(**options)
