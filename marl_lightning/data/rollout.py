"""On-policy data for Lightning: one batch is one rollout, collected when it is asked for."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from lightning import LightningDataModule, Trainer

from marl_lightning.data.collector import RolloutCollector
from marl_lightning.data.schema import Rollout
from marl_lightning.envs.base import VectorEnv
from marl_lightning.envs.spec import EnvSpec
from marl_lightning.envs.wrappers import merge_statistics
from marl_lightning.nn.mode import evaluation_mode
from marl_lightning.validation import PositiveInt, checked


class RolloutLoader:
    """Yields one rollout a pass.

    It has a length because Lightning reads one batch ahead of any iterable without one: every rollout would then be
    collected with parameters that are one update old, silently.
    """

    def __init__(self, datamodule: RolloutDataModule):
        self._datamodule = datamodule

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Rollout]:
        yield self._datamodule.collect()


def share_statistics(env: VectorEnv, trainer: Trainer) -> None:
    """Merges the running statistics of wrappers over all processes. A collective, if there are such wrappers."""
    if trainer.world_size > 1:
        device = trainer.strategy.root_device
        merge_statistics(env, lambda tensor: trainer.strategy.all_gather(tensor.to(device)))


class RolloutDataModule(LightningDataModule):
    """Collects rollouts of ``T`` vector steps with the policy of the module that is being trained.

    Under several processes each holds its own ``E`` instances, seeded apart.

    Args:
        env: the vector environment; it is closed at the end of training.
        rollout_length: vector steps a rollout, ``T``.

    Attributes:
        collect_seconds: wall time spent collecting so far.
    """

    @checked
    def __init__(self, *, env: VectorEnv, rollout_length: PositiveInt = 128):
        super().__init__()
        self.env = env
        self.rollout_length = rollout_length
        self.collect_seconds = 0.0
        self._collector: RolloutCollector | None = None

    @property
    def spec(self) -> EnvSpec:
        return self.env.spec

    @property
    def recipe(self) -> dict[str, Any] | None:
        """What rebuilds the environment; see :class:`~marl_lightning.envs.base.VectorEnv`."""
        return self.env.recipe

    @property
    def local_state_is_exact(self) -> bool:
        """Whether a resumed run repeats the uninterrupted one bit for bit."""
        return self.env.spec.can_checkpoint

    def train_dataloader(self) -> RolloutLoader:
        return RolloutLoader(self)

    def collect(self) -> Rollout:
        """Collects the next rollout with the trainer's module, in evaluation mode and its precision."""
        start = time.perf_counter()
        module = self.trainer.lightning_module
        with evaluation_mode(module), self.trainer.precision_plugin.forward_context():
            rollout = self.collector.collect(module.policy)
            self.collector.state = module.prepare_rollout(rollout, self.collector.state)
        share_statistics(self.env, self.trainer)
        self.collect_seconds += time.perf_counter() - start
        return rollout

    @property
    def collector(self) -> RolloutCollector:
        """The acting loop of this process, made when first used."""
        if self._collector is None:
            module = self.trainer.lightning_module
            self._collector = RolloutCollector(
                env=self.env,
                rollout_length=self.rollout_length,
                chunk_length=module.chunk_length,
                seed=self.env.seed + self.trainer.global_rank * self.env.num_envs,
                device=module.device,
            )
        return self._collector

    def local_state_dict(self) -> dict[str, Any]:
        """Returns the exact state of this process: environment, carries, randomness, running statistics."""
        return self.collector.state_dict()

    def load_local_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores :meth:`local_state_dict`."""
        self.collector.load_state_dict(state)

    def teardown(self, stage: str) -> None:
        self.env.close()

    def on_exception(self, exception: BaseException) -> None:
        self.env.close()
