"""A search for best responses changes nothing around it, whatever that is and however it ends."""

import random
import signal
import sys

import pytest
import torch
from learned_helpers import HEADS, SMALL, Interrupting, Mixed, pennies, python_numpy_torch_states
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from scripted import CounterGame

from marl_lightning.algorithms import IPPO
from marl_lightning.callbacks import StopAtEnvSteps
from marl_lightning.data import RolloutDataModule
from marl_lightning.envs import SyncVectorEnv
from marl_lightning.games import LearnedEvaluator, nash_conv

TINY = SMALL | {"env_steps": 200, "select_episodes": 20, "report_episodes": 20}


def test_nothing_is_disturbed():
    game = pennies(num_envs=2)
    module = IPPO(spec=game.spec, hidden_sizes=(8,), recurrent=True)
    module.policy.train()
    before = {name: parameter.clone() for name, parameter in module.named_parameters()}
    game.reset(seed=3)
    random.seed(1)
    states = python_numpy_torch_states()
    handlers = [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)]
    with torch.no_grad():
        nash_conv(module.policy, game, LearnedEvaluator(**TINY))
        assert not torch.is_grad_enabled()
    with torch.inference_mode():
        nash_conv(module.policy, game, LearnedEvaluator(**TINY))
        assert torch.is_inference_mode_enabled()
    assert python_numpy_torch_states() == states
    assert [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert all(torch.equal(before[name], parameter) for name, parameter in module.named_parameters())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in module.parameters())
    assert all(part.training for part in module.modules())
    assert game.seed == 3
    assert game.step({"agents": torch.zeros(2, 2, dtype=torch.int64)}).reward["agents"].shape == (2, 2)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("the disk is full")])
@pytest.mark.parametrize("call", [3, 20])
def test_what_goes_wrong_passes_through_and_closes_everything(error, call):
    """The third action is in an evaluation, the twentieth in a training."""
    games = []

    def make():
        games.append(CounterGame())
        return games[-1]

    game = SyncVectorEnv(factory=make, num_envs=1, seed=0)
    profile = Interrupting(error, call)
    states = python_numpy_torch_states()
    handlers = [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)]
    settings = SMALL | {"select_episodes": 64, "report_episodes": 64, "agents": ["red_0"]}
    with pytest.raises(type(error)) as raised:
        nash_conv(profile, game, LearnedEvaluator(**settings))
    assert raised.value is error
    assert [made.closed > 0 for made in games] == [False] + [True] * (len(games) - 1)
    assert len(games) > 1
    assert python_numpy_torch_states() == states
    assert [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)] == handlers


class Evaluating(Callback):
    """Estimates NashConv in the middle of a training."""

    def __init__(self):
        self.values = []

    def on_train_epoch_end(self, trainer, pl_module):
        game = trainer.datamodule.env
        self.values.append(nash_conv(pl_module.policy, game, LearnedEvaluator(**TINY)).value)


def train(callbacks):
    torch.manual_seed(0)
    module = IPPO(spec=pennies().spec, hidden_sizes=(8,), num_epochs=1)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=-1,
        logger=False,
        callbacks=[*callbacks, StopAtEnvSteps(64)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=RolloutDataModule(env=pennies(num_envs=4), rollout_length=8))
    return module


def test_inside_of_a_training():
    evaluating = Evaluating()
    alone, watched = train([]), train([evaluating])
    assert len(evaluating.values) == 2
    for one, two in zip(alone.parameters(), watched.parameters(), strict=True):
        assert torch.equal(one, two)


def test_one_of_several_processes(monkeypatch):
    """What starts processes tells them so by variables; a search is no business of the others."""
    variables = {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    variables |= {"TORCHELASTIC_RUN_ID": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    def refuse(*_, **__):
        raise AssertionError("talks to other processes")

    for name in ("init_process_group", "barrier", "all_reduce", "broadcast", "all_gather", "broadcast_object_list"):
        monkeypatch.setattr(torch.distributed, name, refuse)
    nash_conv(Mixed(HEADS), pennies(), LearnedEvaluator(**TINY))


def test_a_search_does_not_requeue_jobs(monkeypatch):
    """Of a job of SLURM, Lightning would answer the signal that it is about to end by submitting it again."""
    variables = {"SLURM_NTASKS": "2", "SLURM_JOB_NAME": "train", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    handlers = set()

    class Looking(Mixed):
        def act(self, *args, **kwargs):
            handlers.add(signal.getsignal(signal.SIGUSR1))
            return super().act(*args, **kwargs)

    nash_conv(Looking(HEADS), pennies(), LearnedEvaluator(**TINY))
    assert handlers == {signal.getsignal(signal.SIGUSR1)}


def test_progress(monkeypatch, capsys):
    nash_conv(Mixed(HEADS), pennies(), LearnedEvaluator(**TINY))
    nash_conv(Mixed(HEADS), pennies(), LearnedEvaluator(**TINY, progress=True))  # not a terminal
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    nash_conv(Mixed(HEADS), pennies(), LearnedEvaluator(**TINY, progress=True))
    shown = capsys.readouterr().err
    for text in ("responses of agent_0", "responses of agent_1", "env steps/s", "/400"):
        assert text in shown, text
