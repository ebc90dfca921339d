"""Off-policy data for Lightning: env steps are stored when they are made and drawn many times."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning import LightningDataModule
from tensordict import TensorDict
from torch import Tensor
from torchrl.data import LazyMemmapStorage, LazyTensorStorage

from marl_lightning.data import schema
from marl_lightning.data.collector import RolloutCollector
from marl_lightning.data.samplers import (
    NONE,
    EpisodeWindows,
    Priorities,
    Sampler,
    SequenceWindows,
    StreamIndex,
    Windows,
)
from marl_lightning.data.schema import Rollout
from marl_lightning.envs.base import VectorEnv
from marl_lightning.envs.spec import EnvSpec
from marl_lightning.nn.mode import evaluation_mode
from marl_lightning.validation import Fraction, NonNegativeInt, PositiveFloat, PositiveInt, checked

_SUCCESSOR = (schema.OBSERVATION, schema.ACTION_MASK, schema.ALIVE)


@dataclass(kw_only=True)
class ReplayBatch:
    """Sequences to learn from.

    Attributes:
        steps: TensorDict ``[B + L, N]``, time-major, with the keys of :mod:`~marl_lightning.data.schema` but no
            log-probabilities, and the true successor of every step under ``"next"``. Padding is zero, starts an episode
            and may do everything.
        mask: ``[B + L, N]`` bool, the steps whose loss counts: neither padding nor burn-in.
        burn_in: ``B``, steps that only rebuild the recurrent state.
        weight: ``[N]`` float32 importance weights, 1 if drawn uniformly.
        starts: ``[N]`` slots of the first step that counts, for the priorities.
        priorities: to be updated with the errors, ``None`` if drawn uniformly.
    """

    steps: TensorDict
    mask: Tensor
    burn_in: int
    weight: Tensor
    starts: np.ndarray
    priorities: Priorities | None = None

    def update_priorities(self, error: Tensor) -> None:
        """Sets the priorities from the errors ``[L, N]`` of the steps after the burn-in; nothing if drawn uniformly."""
        if self.priorities is not None:
            mask = self.mask[self.burn_in :].numpy(force=True)
            self.priorities.update(self.starts, error.detach().float().numpy(force=True), mask)


def replay_records(rollout: Rollout) -> TensorDict:
    """Returns the steps ``[T, E]`` of a rollout with their true successors under ``"next"``.

    The rollout must have been collected with the successors of all episodes that ended.
    """
    steps = rollout.steps
    groups = [name for name in steps.keys() if isinstance(steps.get(name), TensorDict) and name != schema.NEXT]  # noqa: SIM118
    time_index, env = rollout.final["time"], rollout.final["env"]

    def successor(key: str | tuple[str, str]) -> Tensor:
        following = torch.cat((steps[key][1:], rollout.last[key].unsqueeze(0)))
        following[time_index, env] = rollout.final[key]
        return following

    own: dict[str, Any] = {key: steps[key].clone() for key in (schema.STATE, schema.IS_FIRST)}
    following: dict[str, Any] = {
        schema.STATE: successor(schema.STATE),
        **{key: steps[schema.NEXT, key].clone() for key in (schema.TERMINATED, schema.TRUNCATED)},
    }
    for name in groups:
        present = [key for key in _SUCCESSOR if key in steps[name].keys()]  # noqa: SIM118
        own[name] = {key: steps[name, key].clone() for key in (*present, schema.ACTION)}
        following[name] = {key: successor((name, key)) for key in present}
        following[name][schema.REWARD] = steps[schema.NEXT, name, schema.REWARD].clone()
    return TensorDict({**own, schema.NEXT: following}, batch_size=steps.batch_size)


def bytes_per_record(spec: EnvSpec) -> int:
    """Returns the memory that one env step takes, its successor included."""
    size = 4 * spec.state_size
    reward = action = 0
    for group in spec.groups.values():
        observation = group.observation_size * group.observation_space.dtype.itemsize
        size += group.num_agents * (observation + 1 + group.action_size * group.is_discrete)
        reward += 4 * group.num_agents
        numbers = int(np.prod(group.action_shape)) if group.action_shape else 1
        action += group.num_agents * numbers * (8 if group.is_discrete else 4)
    return 2 * size + reward + action + 3


class ReplayBuffer:
    """A ring of env steps on the CPU, in TorchRL's storage, from which sequences are drawn.

    Args:
        capacity: number of env steps, exactly.
        windows: what is drawn.
        seed: of the draws.
        priorities: draw by priority.
        storage: keep the records in ``"memory"``, or in files on a disk (``"memmap"``).
        directory: of the files; by default a temporary folder that is gone with the buffer.
    """

    def __init__(
        self,
        *,
        capacity: int,
        windows: Windows,
        seed: int,
        priorities: Priorities | None = None,
        storage: Literal["memory", "memmap"] = "memory",
        directory: str | Path | None = None,
    ) -> None:
        self.index = StreamIndex(capacity)
        self.sampler = Sampler(
            index=self.index,
            windows=windows,
            generator=torch.Generator().manual_seed(seed),
            priorities=priorities,
        )
        self._burn_in = getattr(windows, "burn_in", 0)
        self._folder: tempfile.TemporaryDirectory | None = None
        if storage == "memmap":
            if directory is None:
                self._folder = tempfile.TemporaryDirectory(prefix="replay-")
                directory = self._folder.name
            self._storage = LazyMemmapStorage(capacity, scratch_dir=directory)
        else:
            self._storage = LazyTensorStorage(capacity)

    def __len__(self) -> int:
        """Number of records."""
        return self.index.size

    def extend(self, records: TensorDict, streams: np.ndarray) -> None:
        """Adds records ``[T, N]``, one row after another, to ``N`` open streams of ``index``."""
        done = records[schema.NEXT, schema.TERMINATED] | records[schema.NEXT, schema.TRUNCATED]
        slots = self.index.insert(streams, records[schema.IS_FIRST].numpy(), done.numpy())
        self.sampler.insert(slots)
        kept = torch.from_numpy(slots != NONE)
        self._storage.set(torch.from_numpy(slots)[kept], records[kept])

    def sample(self, count: int, device: torch.device | str = "cpu") -> ReplayBatch | None:
        """Returns ``count`` sequences on ``device``, or ``None`` if none can be drawn yet."""
        draw = self.sampler.sample(count)
        if draw is None:
            return None
        slots = torch.from_numpy(draw.slots)
        padding = slots == NONE
        steps = self._storage.get(slots.clamp(min=0).flatten()).view(slots.shape)
        if padding.any():
            _pad(steps, padding)
        return ReplayBatch(
            steps=steps.to(device),
            mask=torch.from_numpy(draw.mask).to(device),
            burn_in=self._burn_in,
            weight=torch.from_numpy(draw.weight).to(device),
            starts=draw.starts,
            priorities=self.sampler.priorities,
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that :meth:`load_state_dict` needs, the records themselves included."""
        priorities = self.sampler.priorities
        filled = torch.arange(len(self))
        return {
            "index": _tensors(self.index.state_dict()),
            "generator": self.sampler.generator.get_state(),
            "priorities": None if priorities is None else _tensors(priorities.state_dict()),
            "records": self._storage.get(filled).to_dict() if len(self) else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores :meth:`state_dict`. Raises ``ValueError`` if the capacity differs."""
        self.index.load_state_dict(_arrays(state["index"]))
        self.sampler.generator.set_state(state["generator"])
        if self.sampler.priorities is not None:
            self.sampler.priorities.load_state_dict(_arrays(state["priorities"]))
        if state["records"] is not None:
            records = TensorDict(state["records"], batch_size=[len(self)])
            self._storage.set(torch.arange(len(self)), records)


def _pad(steps: TensorDict, padding: Tensor) -> None:
    for key, leaf in steps.items(include_nested=True, leaves_only=True):
        last = key if isinstance(key, str) else key[-1]
        leaf[padding] = True if last in (schema.ACTION_MASK, schema.IS_FIRST) else 0


def _tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for name, v in state.items()}


def _arrays(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: v.numpy() if isinstance(v, Tensor) else v for name, v in state.items()}


class ReplayStream:
    """Up to ``K`` updates' worth of batches, each made when it is asked for: env steps are made in between as due.

    Iterating yields :class:`ReplayBatch`. The module must make one update with each before it asks for the next. Fewer
    than ``K`` come while env steps are still being made that no update is due for.
    """

    def __init__(self, datamodule: ReplayDataModule):
        self._datamodule = datamodule

    def __iter__(self) -> Iterator[ReplayBatch]:
        data = self._datamodule
        for made in range(data.updates_per_batch):
            while not data.update_is_due():
                data.collect()
                if not made and not data.update_is_due():
                    return
            batch = data.sample()
            if batch is not None:
                yield batch


class ReplayLoader:
    """Yields one :class:`ReplayStream` a pass; it has a length for the reason that ``RolloutLoader`` has one."""

    def __init__(self, datamodule: ReplayDataModule):
        self._datamodule = datamodule

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[ReplayStream]:
        yield ReplayStream(self._datamodule)


class ReplayDataModule(LightningDataModule):
    """Collects env steps with the policy of the module that is being trained, stores them, and draws sequences.

    After ``n`` env steps, ``num_updates * (max(0, n - start_training) // training_frequency)`` updates are due,
    whatever the number of instances; ``n`` counts the steps of all processes. Under several processes each has its own
    instances, seeded apart, and its own replay.

    Args:
        env: the vector environment; it is closed at the end of training.
        capacity: env steps that are kept, exactly, by each process.
        batch_size: sequences, episodes or transitions an update, drawn by each process.
        rollout_length: vector steps that are made at a time.
        sample: ``"sequences"`` of ``sequence_length`` steps, which are transitions if that is 1, or whole
            ``"episodes"``.
        sequence_length: steps whose loss counts.
        burn_in: steps before them that rebuild the recurrent state, see
            :class:`~marl_lightning.data.samplers.SequenceWindows`; ``None`` takes at most 16 for a recurrent module.
        start_training: env steps before the first update.
        training_frequency: env steps from update to update.
        num_updates: updates made each time.
        updates_per_batch: updates that Lightning sees as one batch, ``K``. It saves Lightning's own cost and changes
            nothing else.
        prioritised: draw by priority (Schaul et al. 2016).
        priority_exponent: ``alpha``.
        importance_exponent: ``beta`` at the start.
        importance_anneal_env_steps: env steps over which ``beta`` grows linearly to 1; ``None`` keeps it.
        storage: see :class:`ReplayBuffer`.
        memory_limit_gib: most that the records of this process may take; by default 80 % of what is free.

    Attributes:
        collect_seconds: wall time spent collecting so far.
        env_steps: env steps made by this process.
        updates: updates for which batches were drawn.

    Raises:
        ValueError: if the capacity holds no sequence of every instance, a setting does not go with ``sample``, or the
            records do not fit the memory.
    """

    @checked
    def __init__(
        self,
        *,
        env: VectorEnv,
        capacity: PositiveInt = 100_000,
        batch_size: PositiveInt = 32,
        rollout_length: PositiveInt = 1,
        sample: Literal["sequences", "episodes"] = "sequences",
        sequence_length: PositiveInt = 1,
        burn_in: NonNegativeInt | None = None,
        start_training: NonNegativeInt = 1000,
        training_frequency: PositiveInt = 1,
        num_updates: PositiveInt = 1,
        updates_per_batch: PositiveInt = 16,
        prioritised: bool = False,
        priority_exponent: Fraction = 0.6,
        importance_exponent: Fraction = 0.4,
        importance_anneal_env_steps: PositiveInt | None = None,
        storage: Literal["memory", "memmap"] = "memory",
        memory_limit_gib: PositiveFloat | None = None,
    ):
        super().__init__()
        _check_window(env, capacity=capacity, sample=sample, sequence_length=sequence_length, burn_in=burn_in)
        if storage == "memory":
            _check_memory(env.spec, capacity=capacity, limit_gib=memory_limit_gib)
        self.env = env
        self.capacity = capacity
        self.batch_size = batch_size
        self.rollout_length = rollout_length
        self.sample_kind = sample
        self.sequence_length = sequence_length
        self.burn_in = burn_in
        self.start_training = start_training
        self.training_frequency = training_frequency
        self.num_updates = num_updates
        self.updates_per_batch = updates_per_batch
        self.prioritised = prioritised
        self.priority_exponent = priority_exponent
        self.importance_exponent = importance_exponent
        self.importance_anneal_env_steps = importance_anneal_env_steps
        self.storage = storage
        self.collect_seconds = 0.0
        self.env_steps = 0
        self.updates = 0
        self._collector: RolloutCollector | None = None
        self._buffer: ReplayBuffer | None = None
        self._streams = np.zeros(0, np.int64)

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

    def train_dataloader(self) -> ReplayLoader:
        return ReplayLoader(self)

    # What a stream asks for -----------------------------------------------------------------------------------------

    def update_is_due(self) -> bool:
        """Whether the env steps made so far are worth another update."""
        env_steps = self.env_steps * self.trainer.world_size
        due = max(0, env_steps - self.start_training) // self.training_frequency * self.num_updates
        return self.updates < due

    def collect(self) -> None:
        """Makes ``rollout_length`` vector steps with the trainer's module, in evaluation mode, and stores them."""
        start = time.perf_counter()
        module = self.trainer.lightning_module
        module.prepare_collection()
        with evaluation_mode(module), self.trainer.precision_plugin.forward_context():
            rollout = self.collector.collect(module.policy)
        self.buffer.extend(replay_records(rollout).cpu(), self._streams)
        self.env_steps += rollout.env_steps
        self.collect_seconds += time.perf_counter() - start
        module.on_collected(rollout)

    def sample(self) -> ReplayBatch | None:
        """Draws the batch of the next update, ``None`` if some process has nothing to draw from yet."""
        self.updates += 1
        buffer, trainer = self.buffer, self.trainer
        if buffer.sampler.priorities is not None:
            buffer.sampler.priorities.beta = self.importance_exponent_at(self.env_steps * trainer.world_size)
        batch = buffer.sample(self.batch_size, trainer.lightning_module.device)
        if trainer.world_size > 1 and not trainer.strategy.reduce_boolean_decision(batch is not None, all=True):
            return None
        return batch

    def importance_exponent_at(self, env_steps: int) -> float:
        """Returns ``beta`` after a number of env steps."""
        if self.importance_anneal_env_steps is None:
            return self.importance_exponent
        progress = min(1.0, env_steps / self.importance_anneal_env_steps)
        return self.importance_exponent + progress * (1.0 - self.importance_exponent)

    @property
    def collector(self) -> RolloutCollector:
        """The acting loop of this process, made when first used."""
        if self._collector is None:
            module = self.trainer.lightning_module
            self._collector = RolloutCollector(
                env=self.env,
                rollout_length=self.rollout_length,
                seed=self._seed(),
                device=module.device,
                keep_final="ended",
            )
        return self._collector

    @property
    def buffer(self) -> ReplayBuffer:
        """The replay of this process, made when first used."""
        if self._buffer is None:
            windows = EpisodeWindows()
            if self.sample_kind == "sequences":
                recurrent = self.trainer.lightning_module.is_recurrent
                burn_in = self.burn_in
                if burn_in is None:
                    burn_in = min(16, self.sequence_length) if recurrent else 0
                windows = SequenceWindows(length=self.sequence_length, burn_in=burn_in)
            priorities = None
            if self.prioritised:
                priorities = Priorities(
                    capacity=self.capacity, alpha=self.priority_exponent, beta=self.importance_exponent
                )
            self._buffer = ReplayBuffer(
                capacity=self.capacity,
                windows=windows,
                seed=self._seed() + 1,
                priorities=priorities,
                storage=self.storage,
            )
            self._streams = self._buffer.index.open(self.env.num_envs)
        return self._buffer

    def _seed(self) -> int:
        return self.env.seed + self.trainer.global_rank * self.env.num_envs

    # Lightning ------------------------------------------------------------------------------------------------------

    def local_state_dict(self) -> dict[str, Any]:
        """Returns the exact state of this process: collector, replay, counters."""
        return {
            "collector": self.collector.state_dict(),
            "replay": self.buffer.state_dict(),
            "env_steps": self.env_steps,
            "updates": self.updates,
        }

    def load_local_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores :meth:`local_state_dict`."""
        self.collector.load_state_dict(state["collector"])
        self.buffer.load_state_dict(state["replay"])
        self.env_steps, self.updates = state["env_steps"], state["updates"]

    def teardown(self, stage: str) -> None:
        self.env.close()

    def on_exception(self, exception: BaseException) -> None:
        self.env.close()


def _check_window(env: VectorEnv, *, capacity: int, sample: str, sequence_length: int, burn_in: int | None) -> None:
    limit = env.spec.episode_limit
    if sample == "episodes":
        if sequence_length != 1 or burn_in:
            raise ValueError("sample='episodes' draws whole episodes: leave out sequence_length and burn_in")
        needed, what = (limit or 1) * env.num_envs, f"an episode of {limit} steps"
    else:
        if limit is not None and sequence_length > limit:
            raise ValueError(
                f"sequence_length={sequence_length} is longer than the episodes of {env.spec.name}, which end after "
                f"{limit} steps: set it to at most {limit}"
            )
        window = sequence_length + (burn_in or 0)
        needed, what = window * env.num_envs, f"a window of {window} steps"
    if capacity < needed:
        raise ValueError(
            f"capacity={capacity} does not hold {what} of each of the {env.num_envs} instances: set it to at least "
            f"{needed}"
        )


def _check_memory(spec: EnvSpec, *, capacity: int, limit_gib: float | None) -> None:
    needed = capacity * bytes_per_record(spec) / 2**30
    limit = 0.8 * _free_memory() / 2**30 if limit_gib is None else limit_gib
    if needed > limit:
        raise ValueError(
            f"a replay of capacity={capacity} takes {needed:.3g} GiB, more than the {limit:.3g} GiB that it may: make "
            "it smaller, keep it on a disk with storage='memmap', or raise memory_limit_gib"
        )


def _free_memory() -> float:
    """Returns the bytes of main memory that are free, or endless where the system does not tell."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024.0 * int(line.split()[1])
    except OSError:
        pass
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):
        return float("inf")
