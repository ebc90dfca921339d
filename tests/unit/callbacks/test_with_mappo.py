"""The callbacks around a real algorithm, its data module and native games."""

import imageio.v3 as imageio
import lightning
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from marl_lightning.algorithms.mappo import MAPPO
from marl_lightning.callbacks import (
    EnvStepCheckpoint,
    EnvStepProgressBar,
    EvaluationCallback,
    StopAtEnvSteps,
    ThroughputMonitor,
    VideoCallback,
)
from marl_lightning.data.rollout import RolloutDataModule
from marl_lightning.envs import make_vector_env
from marl_lightning.evaluation import evaluate_checkpoint


def train(folder, name, *, env_steps, callbacks=(), ckpt_path=None):
    lightning.seed_everything(3, verbose=False)
    trainer = lightning.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        max_epochs=-1,
        callbacks=[
            StopAtEnvSteps(env_steps),
            EnvStepCheckpoint(directory=folder / "c", every_env_steps=30, keep_last=9, monitor="eval/return_mean"),
            EnvStepProgressBar(total_env_steps=env_steps),
            *callbacks,
        ],
        logger=CSVLogger(folder),
        enable_model_summary=False,
    )
    data = RolloutDataModule(env=make_vector_env(name, num_envs=4, seed=5), rollout_length=8)
    trainer.fit(MAPPO(hidden_sizes=(8,), recurrent=True, chunk_length=4, num_epochs=2), data, ckpt_path=ckpt_path)
    return trainer


def learned(trainer):
    module, data = trainer.lightning_module, trainer.datamodule
    state = [*module.state_dict().values(), torch.get_rng_state(), data.local_state_dict()["generator"]]
    return [value.tolist() for value in state], module.env_steps, module.updates


@pytest.mark.parametrize("name", ["matrix/climbing", "smac/3m"])
def test_evaluation_and_resume_change_nothing(tmp_path, name):
    expected = learned(train(tmp_path / "plain", name, env_steps=160))
    callbacks = [EvaluationCallback(every_env_steps=50, episodes=3), ThroughputMonitor()]
    train(tmp_path / "half", name, env_steps=96, callbacks=callbacks)
    resumed = train(tmp_path / "rest", name, env_steps=160, ckpt_path=tmp_path / "half" / "c" / "step_64.ckpt")
    assert learned(resumed) == expected


def test_smac_is_filmed_and_its_checkpoint_evaluated(tmp_path):
    callbacks = [EvaluationCallback(every_env_steps=50, episodes=2), VideoCallback(every_env_steps=30, episodes=1)]
    trainer = train(tmp_path, "smac/3m", env_steps=32, callbacks=callbacks)
    video = next(tmp_path.rglob("env_steps_32.mp4"))
    result = evaluate_checkpoint(tmp_path / "c" / "best.ckpt", episodes=2, video=tmp_path / "again.mp4", seed=12345)
    assert result.returns.mean() == pytest.approx(float(trainer.callback_metrics["eval/return_mean"]))
    assert result.win_rate is not None
    assert len(imageio.imread(tmp_path / "again.mp4", plugin="pyav")) in result.lengths
    assert len(imageio.imread(video, plugin="pyav")) > 1
