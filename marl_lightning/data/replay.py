"""Off-policy data for Lightning: env steps are stored when they are made and drawn many times."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning import LightningDataModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from tensordict import TensorDict
from torch import Tensor

from marl_lightning.data import schema
from marl_lightning.data.collector import RolloutCollector
from marl_lightning.data.counterfactual import CounterfactualReplay
from marl_lightning.data.memory import free_memory
from marl_lightning.data.rollout import share_statistics
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
    """Returns the steps ``[T, E]`` of a rollout with their true successors under ``"next"``; shares its memory.

    The rollout must have been collected with the successors of all episodes that ended.
    """
    steps, following = rollout.steps, rollout.steps[schema.NEXT]
    time_index, env = rollout.final["time"], rollout.final["env"]

    def successors(now: TensorDict, last: TensorDict, final: TensorDict, keys: Iterable[str]) -> dict[str, Tensor]:
        found = {}
        for key in keys:
            found[key] = torch.cat((now[key][1:], last[key].unsqueeze(0)))
            found[key][time_index, env] = final[key]
        return found

    own: dict[str, Any] = {key: steps[key] for key in (schema.STATE, schema.IS_FIRST)}
    after: dict[str, Any] = {key: following[key] for key in (schema.TERMINATED, schema.TRUNCATED)}
    after |= successors(steps, rollout.last, rollout.final, (schema.STATE,))
    for name, group in groups_of(steps).items():
        present = [key for key in (schema.OBSERVATION, schema.ACTION_MASK, schema.ALIVE) if key in group.keys()]  # noqa: SIM118
        own[name] = {key: group[key] for key in (*present, schema.ACTION)}
        after[name] = successors(group, rollout.last[name], rollout.final[name], present)
        after[name][schema.REWARD] = following[name, schema.REWARD]
    return TensorDict({**own, schema.NEXT: after}, batch_size=steps.batch_size)


def groups_of(steps: TensorDict) -> dict[str, TensorDict]:
    """Returns what steps hold of each group."""
    return {name: value for name, value in steps.items() if isinstance(value, TensorDict) and name != schema.NEXT}


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
    """A ring of env steps on the CPU, in memory or memory-mapped, from which sequences are drawn.

    The leaves of the records are written and read one by one: going through a TensorDict, or TorchRL's storages of
    them, takes three times as long.

    Args:
        capacity: number of env steps, exactly.
        windows: what is drawn.
        seed: of the draws.
        priorities: draw by priority.
        storage: keep the records in ``"memory"``, or in files on a disk (``"memmap"``).
        directory: where to make the temporary folder of these files, which is gone with the buffer; by default where
            the system has its temporary files.
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
        # By key and over the whole capacity; made with the first records, which say what they consist of.
        self._leaves: dict[tuple[str, ...], Tensor] = {}
        self._folder: tempfile.TemporaryDirectory | None = None
        if storage == "memmap":
            self._folder = tempfile.TemporaryDirectory(prefix="replay-", dir=directory)

    def __len__(self) -> int:
        """Number of records."""
        return self.index.size

    def extend(self, records: TensorDict, streams: np.ndarray) -> None:
        """Adds records ``[T, N]``, one row after another, to ``N`` open streams of ``index``."""
        done = records[schema.NEXT, schema.TERMINATED] | records[schema.NEXT, schema.TRUNCATED]
        slots = self.index.insert(streams, records[schema.IS_FIRST].numpy(), done.numpy())
        self.sampler.insert(slots)
        if not self._leaves:
            self._allocate(records[:1, :1].flatten())
        slots = torch.from_numpy(slots).flatten()
        overwritten = max(0, len(slots) - self.index.capacity)
        for key, leaf in self._leaves.items():
            leaf.index_copy_(0, slots[overwritten:], records[key].flatten(0, 1)[overwritten:])

    def _allocate(self, record: TensorDict) -> None:
        for key, leaf in record.items(include_nested=True, leaves_only=True):
            key, shape = (key,) if isinstance(key, str) else key, (self.index.capacity, *leaf.shape[1:])
            if self._folder is None or not math.prod(shape):  # zeros take memory only once they are written
                self._leaves[key] = torch.zeros(shape, dtype=leaf.dtype)
            else:
                file = Path(self._folder.name, ".".join(key))
                size = math.prod(shape)
                self._leaves[key] = torch.from_file(str(file), shared=True, size=size, dtype=leaf.dtype).view(shape)

    def sample(self, count: int, device: torch.device | str = "cpu") -> ReplayBatch | None:
        """Returns ``count`` sequences on ``device``, or ``None`` if none can be drawn yet."""
        draw = self.sampler.sample(count)
        if draw is None:
            return None
        slots = torch.from_numpy(draw.slots).flatten()
        padding = (slots == NONE).nonzero().squeeze(-1)
        slots = slots.clamp_(min=0)
        steps: dict[str, Any] = {}
        for key, leaf in self._leaves.items():
            rows = leaf.index_select(0, slots)
            if len(padding):
                rows.index_fill_(0, padding, key[-1] in (schema.ACTION_MASK, schema.IS_FIRST))
            _set_nested(steps, key, rows.view(*draw.slots.shape, *rows.shape[1:]))
        return ReplayBatch(
            steps=TensorDict(steps, batch_size=draw.slots.shape).to(device),
            mask=torch.from_numpy(draw.mask).to(device),
            burn_in=self._burn_in,
            weight=torch.from_numpy(draw.weight).to(device),
            starts=draw.starts,
            priorities=self.sampler.priorities,
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that :meth:`load_state_dict` needs, the records themselves included.

        A ring that is more than half full is not copied, so that saving takes at most half of its memory again.
        """
        priorities, filled = self.sampler.priorities, len(self)
        few = filled <= self.index.capacity // 2
        return {
            "index": _tensors(self.index.state_dict()),
            "generator": self.sampler.generator.get_state(),
            "priorities": None if priorities is None else _tensors(priorities.state_dict()),
            "records": {"/".join(key): leaf[:filled].clone() if few else leaf for key, leaf in self._leaves.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores :meth:`state_dict`. Raises ``ValueError`` if the capacity, or what records consist of, differs."""
        self.index.load_state_dict(_arrays(state["index"]))
        self.sampler.generator.set_state(state["generator"])
        if (state["priorities"] is None) != (self.sampler.priorities is None):
            raise ValueError("one of the saved replay and this one is prioritised and the other is not")
        if self.sampler.priorities is not None:
            self.sampler.priorities.load_state_dict(_arrays(state["priorities"]))
        records = {tuple(key.split("/")): leaf for key, leaf in state["records"].items()}
        if not records:
            return
        if not self._leaves:
            first: dict[str, Any] = {}
            for key, leaf in records.items():
                _set_nested(first, key, leaf[:1])
            self._allocate(TensorDict(first, batch_size=[1]))
        if {key: leaf.shape[1:] for key, leaf in records.items()} != {k: v.shape[1:] for k, v in self._leaves.items()}:
            raise ValueError("the saved replay holds records of another environment")
        for key, leaf in records.items():
            self._leaves[key][: len(leaf)] = leaf


def _set_nested(tree: dict[str, Any], key: tuple[str, ...], value: Tensor) -> None:
    for name in key[:-1]:
        tree = tree.setdefault(name, {})
    tree[key[-1]] = value


def _tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for name, v in state.items()}


def _arrays(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: v.numpy() if isinstance(v, Tensor) else v for name, v in state.items()}


class ReplayStream:
    """The batches of ``K`` updates, each made when it is asked for: env steps are made in between as due.

    Iterating yields :class:`ReplayBatch`. The module must make one update with each before it asks for the next. At the
    end of a stream no update is due, so that one may have more than ``K``. A stream without any ends after ``K``
    collections, so that callbacks are called before training starts too. Where streams end has no influence on what is
    collected, drawn and learned.
    """

    def __init__(self, datamodule: ReplayDataModule):
        self._datamodule = datamodule

    def __iter__(self) -> Iterator[ReplayBatch]:
        data = self._datamodule
        made = collections = 0
        while True:
            if data.update_is_due():
                made += 1
                batch = data.sample()
                if batch is not None:
                    yield batch
            elif (made or collections) < data.updates_per_batch:
                collections += 1
                data.collect()
            else:
                return


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
        updates_per_batch: updates that Lightning sees as one batch, ``K``. It saves Lightning's own cost, about a
            millisecond a batch. What is learned does not depend on it, but callbacks, such as the end of training, come
            only between batches.
        prioritised: draw by priority (Schaul et al. 2016).
        priority_exponent: ``alpha``.
        importance_exponent: ``beta`` at the start.
        importance_anneal_env_steps: env steps over which ``beta`` grows linearly to 1; ``None`` keeps it.
        storage: see :class:`ReplayBuffer`.
        storage_directory: see :class:`ReplayBuffer`.
        memory_limit_gib: most that the records of this process may take in memory; by default 80 % of what is free,
            shared out among the processes of this machine.
        relabel: also stores what would have been with other states of reward machines, see
            :class:`~marl_lightning.data.counterfactual.CounterfactualReplay`. Its sequences that are shorter than
            ``sequence_length`` are drawn whole.

    Attributes:
        collect_seconds: wall time spent collecting so far.
        env_steps: env steps made by this process.
        updates: updates for which batches were drawn.
        skipped_updates: those among them for which there was nothing to draw from.

    Raises:
        ValueError: if the capacity holds no sequence of every instance, a setting does not go with ``sample``, or the
            records do not fit the memory or the disk.
        TypeError: when training starts, if the algorithm does not learn from a replay.
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
        storage_directory: str | Path | None = None,
        memory_limit_gib: PositiveFloat | None = None,
        relabel: CounterfactualReplay | None = None,
    ):
        super().__init__()
        _check_window(env, capacity=capacity, sample=sample, sequence_length=sequence_length, burn_in=burn_in)
        if storage == "memory":
            _check_memory(env.spec, capacity=capacity, limit_gib=memory_limit_gib)
        else:
            _check_disk(env.spec, capacity=capacity, directory=storage_directory)
        if relabel is not None:
            relabel.check(env.spec)
            if sample == "episodes":
                raise ValueError("relabel makes sequences that need not end: set sample='sequences', or leave it out")
        self.env = env
        self.relabel = relabel
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
        self.storage_directory = storage_directory
        self.collect_seconds = 0.0
        self.env_steps = 0
        self.updates = 0
        self.skipped_updates = 0
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
        share_statistics(self.env, self.trainer)
        records = replay_records(rollout).cpu()
        self.buffer.extend(records, self._streams)
        if self.relabel is not None:
            self.relabel.extend(self.buffer, records, rollout.info)
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
            batch = None
        if batch is None:
            if not self.skipped_updates:
                rank_zero_warn(
                    f"no update is made at env step {self.env_steps * trainer.world_size}, since the replay does not "
                    "hold what is to be drawn yet: set data.start_training higher, or data.capacity if that goes on"
                )
            self.skipped_updates += 1
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
                seed=self.seed,
                device=module.device,
                keep_final="ended",
                keep_states=module.keep_states,
            )
        return self._collector

    @property
    def buffer(self) -> ReplayBuffer:
        """The replay of this process, made when first used."""
        if self._buffer is None:
            windows: Windows = EpisodeWindows()
            if self.sample_kind == "sequences":
                windows = SequenceWindows(
                    length=self.sequence_length, burn_in=self._burn_in, allow_short=self.relabel is not None
                )
            priorities = None
            if self.prioritised:
                priorities = Priorities(
                    capacity=self.capacity, alpha=self.priority_exponent, beta=self.importance_exponent
                )
            self._buffer = ReplayBuffer(
                capacity=self.capacity,
                windows=windows,
                seed=self.seed + 1,
                priorities=priorities,
                storage=self.storage,
                directory=self.storage_directory,
            )
            self._streams = self._buffer.index.open(self.env.num_envs)
        return self._buffer

    @property
    def _burn_in(self) -> int:
        if self.burn_in is not None:
            return self.burn_in
        remembers = self.sample_kind == "sequences" and self.trainer.lightning_module.is_recurrent
        return min(16, self.sequence_length) if remembers else 0

    @property
    def seed(self) -> int:
        """The seed of this process: those of different processes are as far apart as they have instances."""
        return self.env.seed + self.trainer.global_rank * self.env.num_envs

    # Lightning ------------------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        if stage != "fit":
            return
        module = self.trainer.lightning_module
        if not hasattr(module, "on_collected"):
            raise TypeError(f"{type(module).__name__} does not learn from a replay: use RolloutDataModule for it")
        if self.burn_in and not module.is_recurrent:
            raise ValueError(
                f"burn_in={self.burn_in} rebuilds the memory of a recurrent network, but {type(module).__name__} has "
                "none: leave it out, or set recurrent=True"
            )
        if self.sample_kind == "sequences":
            module.check_sequences(self.sequence_length)
        _check_window(
            self.env,
            capacity=self.capacity,
            sample=self.sample_kind,
            sequence_length=self.sequence_length,
            burn_in=self._burn_in,
        )

    def local_state_dict(self) -> dict[str, Any]:
        """Returns the exact state of this process: collector, replay, counters."""
        return {
            "collector": self.collector.state_dict(),
            "replay": self.buffer.state_dict(),
            "env_steps": self.env_steps,
            "updates": self.updates,
            "skipped_updates": self.skipped_updates,
            "relabel": None if self.relabel is None else self.relabel.state_dict(),
        }

    def load_local_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores :meth:`local_state_dict`."""
        self.collector.load_state_dict(state["collector"])
        self.buffer.load_state_dict(state["replay"])
        for name in ("env_steps", "updates", "skipped_updates"):
            setattr(self, name, state[name])
        if self.relabel is not None:
            self.relabel.load_state_dict(state["relabel"])

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
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    limit = 0.8 * free_memory() / processes / 2**30 if limit_gib is None else limit_gib
    if needed > limit:
        raise ValueError(
            f"a replay of capacity={capacity} takes {needed:.3g} GiB, more than the {limit:.3g} GiB that it may: make "
            "it smaller, keep it on a disk with storage='memmap', or raise memory_limit_gib"
        )


def _check_disk(spec: EnvSpec, *, capacity: int, directory: str | Path | None) -> None:
    folder = Path(directory or tempfile.gettempdir())
    if not folder.is_dir():
        raise ValueError(f"storage_directory={str(folder)!r} is not a folder: make it first")
    needed, free = capacity * bytes_per_record(spec) / 2**30, shutil.disk_usage(folder).free / 2**30
    if needed > free:
        raise ValueError(
            f"a replay of capacity={capacity} takes {needed:.3g} GiB, more than the {free:.3g} GiB that are free in "
            f"{folder}: make it smaller, or set storage_directory to a folder on another disk"
        )
