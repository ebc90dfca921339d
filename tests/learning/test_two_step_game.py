"""What the methods can represent: on the two-step game, QMIX learns the best joint value 8 and VDN settles for 7."""

import lightning
import pytest
import torch
from two_step import PAYOFFS, TwoStepGame

from marl_lightning.algorithms import QMIX, VDN
from marl_lightning.callbacks import EpsilonSchedule, StopAtEnvSteps
from marl_lightning.data.replay import ReplayDataModule
from marl_lightning.envs import SyncVectorEnv, check_env
from marl_lightning.evaluation import evaluate

pytestmark = pytest.mark.learning


def test_the_game_is_sound():
    check_env(TwoStepGame())


def train(algorithm, **options):
    lightning.seed_everything(0, verbose=False)
    env = SyncVectorEnv(factory=TwoStepGame, num_envs=8, seed=0)
    module = algorithm(
        spec=env.spec, hidden_sizes=(32,), learning_rate=3e-3, target_update_interval=50, gamma=0.99, **options
    )
    data = ReplayDataModule(
        env=env, capacity=2000, batch_size=64, start_training=1000, training_frequency=8, rollout_length=2
    )
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=-1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[StopAtEnvSteps(13_000), EpsilonSchedule(start=1.0, end=1.0)],
    )  # fmt: skip
    trainer.fit(module, datamodule=data)
    return module


def joint_values(module, place):
    """Returns the learned values of the joint actions ``[2, 2]`` in a place."""
    at = torch.eye(3)[place]
    with torch.no_grad():
        inputs = module.networks["agents"].inputs(at.expand(1, 1, 2, 3))
        value, _, _ = module.networks["agents"](inputs, torch.zeros(1, 2, 0), torch.ones(1, 1, dtype=torch.bool))
        pairs = torch.stack([torch.stack([value[0, 0, 0, a], value[0, 0, 1, b]]) for a in (0, 1) for b in (0, 1)])
        return module.mixer(pairs, at.expand(4, 3)).view(2, 2)


def greedy_return(module):
    env = SyncVectorEnv(factory=TwoStepGame, num_envs=1, seed=0)
    return evaluate(module.policy, env, episodes=1).metrics()["eval/return_mean"]


def test_qmix_finds_8():
    module = train(QMIX, embedding_size=8)
    assert greedy_return(module) == 8
    torch.testing.assert_close(joint_values(module, 2), torch.tensor(PAYOFFS[1]), rtol=0, atol=0.3)
    torch.testing.assert_close(joint_values(module, 1), torch.tensor(PAYOFFS[0]), rtol=0, atol=0.3)
    first = joint_values(module, 0)
    torch.testing.assert_close(first, torch.tensor([[6.93, 6.93], [7.92, 7.92]]), rtol=0, atol=0.3)


def test_vdn_settles_for_7():
    """A sum cannot say that (1, 1) pays 8 while one 1 alone pays 1: it fits 6.5, and prefers the game that pays 7."""
    module = train(VDN)
    assert greedy_return(module) == 7
    best = torch.tensor([[-1.5, 2.5], [2.5, 6.5]])  # the least-squares sum
    torch.testing.assert_close(joint_values(module, 2), best, rtol=0, atol=0.5)
    assert joint_values(module, 0)[0].min() > joint_values(module, 0)[1].max()
    assert joint_values(module, 0)[0].mean().item() == pytest.approx(6.93, abs=0.4)
