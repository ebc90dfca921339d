"""Evaluation during training."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.seed import isolate_rng

from marl_lightning.algorithms.base import MARLModule, log_metrics
from marl_lightning.clock import EnvStepInterval
from marl_lightning.envs.base import VectorEnv
from marl_lightning.evaluation import EvaluationResult, evaluate
from marl_lightning.nn.mode import evaluation_mode
from marl_lightning.validation import NonNegativeInt, PositiveInt, checked


class EvaluationCallback(Callback):
    """Evaluates the policy now and then and logs ``eval/...``, see :meth:`EvaluationResult.metrics`.

    It has an environment of its own and leaves no trace: a run with and without it ends with the same weights, bit for
    bit. All evaluations play the same seeds. Several processes share the episodes and all know the result.

    Args:
        every_env_steps: interval in env steps.
        episodes: episodes an evaluation, over all processes.
        num_envs: instances a process; by default as many as in training, but not more than it has episodes to play.
        deterministic: take the mode of the policy's distribution instead of samples.
        seed: of the evaluation environment, apart from those of training.
        at_start: evaluate before the first rollout of a new run too.
        at_end: evaluate the final policy too.

    Attributes:
        seconds: wall time spent so far.
    """

    @checked
    def __init__(
        self,
        *,
        every_env_steps: PositiveInt,
        episodes: PositiveInt = 32,
        num_envs: PositiveInt | None = None,
        deterministic: bool = True,
        seed: NonNegativeInt = 12345,
        at_start: bool = False,
        at_end: bool = True,
    ):
        self.episodes = episodes
        self.num_envs = num_envs
        self.deterministic = deterministic
        self.seed = seed
        self.at_start = at_start
        self.at_end = at_end
        self.seconds = 0.0
        self._interval = EnvStepInterval(every_env_steps)
        self._evaluated_at: int | None = None
        self._env: VectorEnv | None = None

    def on_train_start(self, trainer: Trainer, pl_module: MARLModule) -> None:
        if self.at_start and pl_module.env_steps == 0:
            self._evaluate(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: MARLModule) -> None:
        if self._interval.crossed(pl_module.env_steps):
            self._evaluate(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: MARLModule) -> None:
        if self.at_end and self._evaluated_at != pl_module.env_steps:
            self._evaluate(trainer, pl_module)

    def teardown(self, trainer: Trainer, pl_module: MARLModule, stage: str) -> None:
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: MARLModule, exception: BaseException) -> None:
        self._close()

    def state_dict(self) -> dict[str, Any]:
        return {"interval": self._interval.state_dict(), "evaluated_at": self._evaluated_at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._interval.load_state_dict(state["interval"])
        self._evaluated_at = state["evaluated_at"]

    def _evaluate(self, trainer: Trainer, pl_module: MARLModule) -> None:
        start = time.perf_counter()
        share = math.ceil(self.episodes / trainer.world_size)
        if self._env is None:
            training_env = trainer.datamodule.env
            num_envs = min(self.num_envs or training_env.num_envs, share)
            with isolate_rng():  # a game may draw global random numbers while it is made
                self._env = training_env.replicate(num_envs=num_envs, seed=self.seed)
        with evaluation_mode(pl_module), trainer.precision_plugin.forward_context():
            result = evaluate(
                pl_module.policy,
                self._env,
                episodes=share,
                deterministic=self.deterministic,
                seed=self.seed + trainer.global_rank * self._env.num_envs,
            )
        result = _gather(trainer, result, episodes=self.episodes)
        log_metrics(trainer, result.metrics(), pl_module.env_steps)
        self._evaluated_at = pl_module.env_steps
        self.seconds += time.perf_counter() - start

    def _close(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None


def _gather(trainer: Trainer, result: EvaluationResult, *, episodes: int) -> EvaluationResult:
    """Returns the episodes of all processes, on each of them.

    All processes play equally many, so that they can send equal shapes; those too many are the last ones by place, not
    by time, which keeps the selection independent of how long they took.
    """
    if trainer.world_size == 1:
        return result
    columns = {"returns": result.returns, "team_returns": result.team_returns, "lengths": result.lengths}
    columns |= {f"agent/{name}": values for name, values in result.agent_returns.items()}
    columns |= {f"info/{name}": values for name, values in result.info.items()}
    own = torch.from_numpy(np.stack(list(columns.values()))).to(trainer.strategy.root_device)
    everyone = trainer.strategy.all_gather(own)  # [process, column, episode]
    values = everyone.transpose(0, 1).flatten(1)[:, :episodes].numpy(force=True)
    gathered = dict(zip(columns, values, strict=True))
    return EvaluationResult(
        returns=gathered["returns"],
        team_returns=gathered["team_returns"],
        agent_returns={name: gathered[f"agent/{name}"] for name in result.agent_returns},
        lengths=gathered["lengths"].astype(np.int64),
        info={name: gathered[f"info/{name}"] for name in result.info},
    )
