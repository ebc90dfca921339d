"""Videos of the policy during training."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng

from marl_lightning.algorithms.base import MARLModule
from marl_lightning.clock import EnvStepInterval
from marl_lightning.envs.base import VectorEnv
from marl_lightning.evaluation import MAX_RENDERED_ENVS, encode_gif, evaluate, write_video
from marl_lightning.nn.mode import evaluation_mode
from marl_lightning.validation import PositiveInt, checked

log = logging.getLogger(__name__)

_SEED = 54321
_TAG = "eval/video"


class VideoCallback(Callback):
    """Plays a few episodes now and then and keeps the best one as ``env_steps_<n>.mp4``, or ``.gif`` without ``av``.

    TensorBoard and W&B loggers get it as ``eval/video``. Only the first process does anything, and like
    :class:`~marl_lightning.callbacks.EvaluationCallback` it leaves no trace in the training. An environment that has
    no pictures gives one warning.

    Args:
        every_env_steps: interval in env steps.
        directory: where to write; by default ``videos`` in the folder of the logger.
        episodes: episodes to choose the best from.
        fps: frames, that is env steps, per second.

    Attributes:
        seconds: wall time spent so far.
    """

    @checked
    def __init__(
        self,
        *,
        every_env_steps: PositiveInt,
        directory: str | Path | None = None,
        episodes: PositiveInt = 8,
        fps: PositiveInt = 10,
    ):
        self.directory = directory
        self.episodes = episodes
        self.fps = fps
        self.seconds = 0.0
        self._interval = EnvStepInterval(every_env_steps)
        self._folder = Path()
        self._env: VectorEnv | None = None
        self._has_pictures = True

    def setup(self, trainer: Trainer, pl_module: MARLModule, stage: str) -> None:
        log_dir = trainer.log_dir  # a collective: all processes have to ask
        self._folder = Path(self.directory or Path(log_dir or trainer.default_root_dir) / "videos")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: MARLModule) -> None:
        if self._interval.crossed(pl_module.env_steps) and trainer.is_global_zero and self._has_pictures:
            start = time.perf_counter()
            self._record(trainer, pl_module)
            self.seconds += time.perf_counter() - start

    def teardown(self, trainer: Trainer, pl_module: MARLModule, stage: str) -> None:
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: MARLModule, exception: BaseException) -> None:
        self._close()

    def state_dict(self) -> dict[str, Any]:
        return self._interval.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._interval.load_state_dict(state)

    def _record(self, trainer: Trainer, pl_module: MARLModule) -> None:
        if self._env is None and not self._open(trainer.datamodule.env):
            return
        with evaluation_mode(pl_module), trainer.precision_plugin.forward_context():
            result = evaluate(pl_module.policy, self._env, episodes=self.episodes, seed=_SEED, record=True)
        path = write_video(result.frames, self._folder / f"env_steps_{pl_module.env_steps}.mp4", fps=self.fps)
        for logger in trainer.loggers:
            _hand_over(logger, path, result.frames, fps=self.fps, env_steps=pl_module.env_steps)

    def _open(self, training_env: VectorEnv) -> bool:
        with isolate_rng():  # a game may draw global random numbers while it is made
            self._env = training_env.replicate(num_envs=min(MAX_RENDERED_ENVS, self.episodes), seed=_SEED)
            self._env.reset()
        try:
            self._env.render(0)
        except NotImplementedError as error:
            rank_zero_warn(f"no videos will be made: {error}")
            self._has_pictures = False
            self._close()
        return self._has_pictures

    def _close(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None


def _hand_over(logger: Logger, path: Path, frames: np.ndarray, *, fps: int, env_steps: int) -> None:
    if isinstance(logger, WandbLogger):
        logger.log_video(_TAG, [str(path)], step=env_steps)
    elif isinstance(logger, TensorBoardLogger):
        # SummaryWriter.add_video wants moviepy only to make a GIF, which TensorBoard then shows as an image.
        from tensorboard.compat.proto.summary_pb2 import Summary

        _, height, width, _ = frames.shape
        image = Summary.Image(
            height=height, width=width, colorspace=3, encoded_image_string=encode_gif(frames, fps=fps)
        )
        summary = Summary(value=[Summary.Value(tag=_TAG, image=image)])
        logger.experiment.file_writer.add_summary(summary, env_steps)
    else:
        log.debug("%s takes no videos, see %s", type(logger).__name__, path)
