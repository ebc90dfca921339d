"""Whole trainings that must agree bit for bit: determinism, resuming, collecting before learning, several processes."""

import subprocess
import sys
import textwrap

import lightning
import pytest
import torch

from marl_lightning.algorithms import IPPO, MAPPO, PQNVDN
from marl_lightning.callbacks import EnvStepCheckpoint, EvaluationCallback, StopAtEnvSteps
from marl_lightning.data import RolloutDataModule
from marl_lightning.data.collector import RolloutCollector
from marl_lightning.envs import make_vector_env

ENVS, LENGTH = 4, 8
ROLLOUT = ENVS * LENGTH
SMALL = {"hidden_sizes": (8,), "chunk_length": 4, "num_epochs": 2, "num_minibatches": 2}


def fit(module, *, env_steps, folder, game="smac/3m", callbacks=(), ckpt_path=None, precision="32-true"):
    lightning.seed_everything(3, verbose=False)
    trainer = lightning.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        max_epochs=-1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(callback, EnvStepCheckpoint) for callback in callbacks),
        callbacks=[StopAtEnvSteps(env_steps), *callbacks],
        precision=precision,
    )
    data = RolloutDataModule(env=make_vector_env(game, num_envs=ENVS, seed=5), rollout_length=LENGTH)
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return trainer


def everything(trainer):
    """Weights, statistics, optimiser, randomness, environment and counters, as comparable bytes."""
    module, data = trainer.lightning_module, trainer.datamodule
    optimizer = trainer.optimizers[0].state_dict()["state"]
    local = data.local_state_dict()
    tensors = [*module.state_dict().values(), *(value for entry in optimizer.values() for value in entry.values())]
    tensors += [torch.get_rng_state(), local["generator"], *local["env"]["fields"].values()]
    tensors += list((local["recurrent"] or {}).values())
    return [tensor.numpy().tobytes() for tensor in tensors], module.env_steps, module.updates


CASES = [
    pytest.param(MAPPO, {"recurrent": False}, id="mappo-mlp"),
    pytest.param(MAPPO, {"recurrent": True}, id="mappo-gru"),
    pytest.param(IPPO, {"recurrent": True, "share_parameters": False}, id="ippo-gru-unshared"),
    pytest.param(MAPPO, {"learning_rate_decay_env_steps": 8 * ROLLOUT, "critic": "agent_state"}, id="mappo-decay"),
    pytest.param(PQNVDN, {"recurrent": True}, id="pqn-gru"),
]


@pytest.mark.parametrize(("algorithm", "options"), CASES)
def test_resuming_equals_not_stopping_and_evaluating_leaves_no_trace(algorithm, options, tmp_path):
    def make(seed):
        torch.manual_seed(seed)
        return lambda: algorithm(spec=make_vector_env("smac/3m", num_envs=1).spec, **SMALL, **options)

    lightning.seed_everything(0, verbose=False)
    module = make(0)()
    initial = {name: value.clone() for name, value in module.state_dict().items()}
    expected = everything(fit(module, env_steps=6 * ROLLOUT, folder=tmp_path / "straight"))

    half = make(0)()
    half.load_state_dict(initial)
    checkpoint = EnvStepCheckpoint(directory=tmp_path / "c", every_env_steps=ROLLOUT)
    evaluation = EvaluationCallback(every_env_steps=2 * ROLLOUT, episodes=2)
    fit(half, env_steps=3 * ROLLOUT, folder=tmp_path / "half", callbacks=[checkpoint, evaluation])

    resumed = fit(
        make(1)(),
        env_steps=6 * ROLLOUT,
        folder=tmp_path / "rest",
        callbacks=[EnvStepCheckpoint(directory=tmp_path / "d", every_env_steps=10**9), evaluation],
        ckpt_path=tmp_path / "c" / "last.ckpt",
    )
    assert everything(resumed) == expected


def test_equal_seeds_give_equal_trainings_and_other_seeds_do_not(tmp_path):
    def train(seed):
        torch.manual_seed(seed)
        module = MAPPO(spec=make_vector_env("smac/3m", num_envs=1).spec, **SMALL)
        return everything(fit(module, env_steps=2 * ROLLOUT, folder=tmp_path))

    assert train(0) == train(0)
    assert train(0) != train(1)


def test_rollouts_are_collected_with_the_newest_parameters(tmp_path):
    """Lightning must not ask for the next rollout before the update: the loader has a length."""
    order = []

    class Spy(MAPPO):
        def prepare_rollout(self, rollout, state):
            order.append(("collect", self.updates))
            return super().prepare_rollout(rollout, state)

        def training_step(self, rollout, batch_idx):
            super().training_step(rollout, batch_idx)
            order.append(("update", self.updates))

    fit(Spy(**SMALL), env_steps=3 * ROLLOUT, folder=tmp_path)
    assert order == [
        ("collect", 0),
        ("update", 4),
        ("collect", 4),
        ("update", 8),
        ("collect", 8),
        ("update", 12),
    ]


def test_bf16_mixed_precision_trains_with_equal_policies_in_acting_and_learning(tmp_path):
    ratios = []

    class Spy(MAPPO):
        def loss(self, batches):
            total, metrics = super().loss(batches)
            ratios.append(metrics["approx_kl"].item())
            return total, metrics

    options = SMALL | {"num_epochs": 1, "num_minibatches": 1}
    trainer = fit(Spy(recurrent=True, **options), env_steps=ROLLOUT, folder=tmp_path, precision="bf16-mixed")
    assert abs(ratios[0]) < 1e-4
    assert all(value.isfinite().all() for value in trainer.lightning_module.state_dict().values())


def test_clipping_by_the_trainer_is_refused_with_our_setting(tmp_path):
    trainer = lightning.Trainer(
        gradient_clip_val=1.0, logger=False, enable_checkpointing=False, accelerator="cpu", default_root_dir=tmp_path
    )
    data = RolloutDataModule(env=make_vector_env("matrix/climbing", num_envs=2), rollout_length=4)
    with pytest.raises(ValueError, match=r"algorithm\.max_grad_norm"):
        trainer.fit(MAPPO(), datamodule=data)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"recurrent": True, "chunk_length": 5}, "chunk_length=5"), ({"num_minibatches": 99}, "num_minibatches=99")],
)
def test_rollouts_that_do_not_fit_the_algorithm_are_refused(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        fit(MAPPO(**SMALL | options), env_steps=ROLLOUT, folder=tmp_path)


# Two processes ------------------------------------------------------------------------------------------------------

TWO_PROCESSES = """
import sys, warnings
import lightning, torch
from lightning.pytorch.strategies import DDPStrategy
from marl_lightning.algorithms import MAPPO
from marl_lightning.callbacks import EvaluationCallback, StopAtEnvSteps
from marl_lightning.data import RolloutDataModule
from marl_lightning.envs import make_vector_env

class Spy(MAPPO):
    def training_step(self, rollout, batch_idx):
        if self.env_steps == 0:
            self.first = rollout.steps["state"].clone()
        super().training_step(rollout, batch_idx)

torch.set_num_threads(1)
lightning.seed_everything(0, verbose=False)
env = make_vector_env("smac/3m", num_envs=4, seed=5)
module = Spy(spec=env.spec, {options})
trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy=DDPStrategy(forward_sync_buffers=False), max_epochs=-1, logger=False,
    enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    callbacks=[StopAtEnvSteps({env_steps}), {callbacks}],
)
trainer.fit(module, datamodule=RolloutDataModule(env=env, rollout_length=8))
torch.save(
    {{"weights": module.state_dict(), "env_steps": module.env_steps, "first": module.first,
      "metrics": {{k: v for k, v in trainer.callback_metrics.items() if k.startswith("eval/")}}}},
    sys.argv[1] + f"/rank{{trainer.global_rank}}.pt",
)
"""


def run_two_processes(folder, *, options, env_steps, callbacks=""):
    script = folder / "two.py"
    script.write_text(textwrap.dedent(TWO_PROCESSES.format(options=options, env_steps=env_steps, callbacks=callbacks)))
    subprocess.run([sys.executable, str(script), str(folder)], check=True, timeout=240, capture_output=True)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]


def test_processes_keep_equal_parameters_and_statistics(tmp_path):
    """Recurrent, several epochs, evaluation in between."""
    first, second = run_two_processes(
        tmp_path,
        options="recurrent=True, hidden_sizes=(8,), chunk_length=4, num_epochs=2, num_minibatches=2",
        env_steps=4 * 2 * ROLLOUT,
        callbacks="EvaluationCallback(every_env_steps=100, episodes=4)",
    )
    assert first["env_steps"] == second["env_steps"] == 4 * 2 * ROLLOUT
    assert all(torch.equal(first["weights"][name], second["weights"][name]) for name in first["weights"])
    assert any("value_norm" in name for name in first["weights"])
    assert not torch.equal(first["first"], second["first"])  # they saw different games
    assert first["metrics"].keys() == second["metrics"].keys() != set()


def test_the_step_of_two_processes_is_that_of_the_mean_gradient(tmp_path):
    """One update of two processes, against one update of one process on the rollouts of both."""
    options = {"hidden_sizes": (8,), "num_epochs": 1, "normalise_value": False, "normalise_advantage": False}
    text = ", ".join(f"{name}={value!r}" for name, value in options.items())
    parallel, _ = run_two_processes(tmp_path, options=text, env_steps=1)

    lightning.seed_everything(0, verbose=False)
    env = make_vector_env("smac/3m", num_envs=4, seed=5)
    module = MAPPO(spec=env.spec, **options)
    optimizer = module.configure_optimizers()
    losses = []
    for seed in (5, 9):  # 5 + rank * 4 instances
        collector = RolloutCollector(env=env, rollout_length=LENGTH, seed=seed)
        rollout = collector.collect(module.policy)
        module.prepare_rollout(rollout, {})
        batch = module.training_batch("agents", rollout)
        losses.append(module.loss({"agents": batch.select(torch.arange(batch.num_sequences))})[0])
    module.optimise(sum(losses) / 2, optimizer, module.parameters(), max_grad_norm=10.0)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, parallel["weights"][name], rtol=1e-4, atol=1e-6)
