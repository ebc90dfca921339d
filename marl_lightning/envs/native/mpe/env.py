"""The particle scenarios as a vector environment."""

from __future__ import annotations

import difflib
import itertools
import math
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from marl_lightning.envs.base import Observations, VectorEnv, VectorStep
from marl_lightning.envs.native.mpe import kernel
from marl_lightning.envs.native.mpe.kernel import Buffers, State
from marl_lightning.envs.native.mpe.render import draw_world
from marl_lightning.envs.native.mpe.scenarios import SCENARIOS, World
from marl_lightning.envs.spec import EnvSpec, GroupSpec
from marl_lightning.envs.validation import action_arrays, check_legal, check_num_envs, check_reset
from marl_lightning.envs.vector.buffers import as_tensors, zeros

# A thread costs about 50 microseconds a step, an instance of simple_spread less than one.
_INSTANCES_PER_THREAD = 512

_STATE_FIELDS = State._fields[: State._fields.index("force")]


class MPEVectorEnv(VectorEnv):
    """Many instances of a particle scenario, stepped together by compiled kernels that write into preallocated memory.

    Agents, groups, spaces, observations, states, rewards and ends are those of ``mpe2`` behind
    :class:`~marl_lightning.envs.adapters.pettingzoo.PettingZooAdapter`, exactly. The state is the package's: the
    observations of all agents in their order. Episodes are truncated after ``max_cycles`` env steps and never
    terminate, unless ``terminate_on_success`` is set. Continuous actions are clipped to [0, 1].

    Args:
        scenario: one of :data:`~marl_lightning.envs.native.mpe.scenarios.SCENARIOS`, such as ``"simple_spread_v3"``.
        num_envs: number of instances.
        seed: instance ``i`` is seeded with ``seed + i``, and behaves as the first instance of an environment with that
            seed would.
        num_threads: threads that step the instances, which pays off for many instances and free cores. ``None`` takes
            one for every 512 instances, at most as many as torch uses. Results do not depend on it.
        max_cycles: env steps of an episode.
        continuous_actions: whether actions are pushes and messages of any strength in [0, 1].
        **options: arguments of the scenario, such as ``N`` and ``local_ratio`` of ``simple_spread_v3``; see the
            functions in :mod:`~marl_lightning.envs.native.mpe.scenarios`.

    Attributes:
        world: the scenario with its arguments filled in.

    Raises:
        ValueError: if the scenario is unknown or a number is out of range.
        TypeError: if the scenario does not have an option.
    """

    def __init__(
        self,
        *,
        scenario: str,
        num_envs: int,
        seed: int = 0,
        num_threads: int | None = None,
        max_cycles: int = 25,
        continuous_actions: bool = False,
        **options: Any,
    ) -> None:
        check_num_envs(num_envs)
        if num_threads is None:
            num_threads = max(1, min(num_envs // _INSTANCES_PER_THREAD, torch.get_num_threads()))
        if num_threads < 1:
            raise ValueError(f"num_threads must be positive, got {num_threads}")
        num_threads = min(num_threads, num_envs)
        if max_cycles < 1:
            raise ValueError(f"max_cycles must be at least 1, got {max_cycles}")
        self.num_envs = num_envs
        self.num_threads = num_threads
        self.world = _make_world(scenario, options)
        self._arguments = dict(
            scenario=scenario, max_cycles=max_cycles, continuous_actions=continuous_actions, **options
        )
        groups = _make_groups(self.world, continuous=continuous_actions)
        self.spec = EnvSpec(
            name=f"mpe/{scenario}",
            groups=groups,
            state_size=sum(agent.observation_size for agent in self.world.agents),
            episode_limit=max_cycles,
            can_checkpoint=True,
            metadata={"backend": "embedded"},
        )
        self._stage = 0
        self._constants = self.world.constants(
            max_cycles=max_cycles,
            continuous=bool(continuous_actions),
            stage=self._stage,
            group_sizes=[group.num_agents * group.observation_size for group in groups.values()],
        )
        self._state = _allocate_state(num_envs, self.world)
        num_agents = len(self.world.agents)
        # Columns of each group in arrays of all agents.
        ends = itertools.accumulate((group.num_agents for group in groups.values()), initial=0)
        self._columns = dict(zip(groups, itertools.starmap(slice, itertools.pairwise(ends)), strict=True))
        self._all = np.ones(num_envs, np.bool_)
        # Contiguous ranges of instances, one a thread.
        self._ranges = list(itertools.pairwise(np.linspace(0, num_envs, num_threads + 1).astype(int).tolist()))
        width = int(self._constants.num_actions.max()) if continuous_actions else 0
        size = self.spec.state_size
        buffers = Buffers(
            choices=np.zeros((num_envs, num_agents), np.int64),
            controls=np.zeros((num_envs, num_agents, width), np.float32),
            observation=zeros((num_envs * size,), np.float32),
            state=zeros((num_envs, size), np.float32),
            final_observation=zeros((num_envs * size,), np.float32),
            final_state=zeros((num_envs, size), np.float32),
            reward=zeros((num_envs, num_agents), np.float32),
            terminated=zeros((num_envs,), np.bool_),
            truncated=zeros((num_envs,), np.bool_),
        )
        self._buffers = buffers
        arrays = VectorStep(
            observations=_make_observations(self.spec, buffers.observation, buffers.state),
            reward={name: buffers.reward[:, columns] for name, columns in self._columns.items()},
            terminated=buffers.terminated,
            truncated=buffers.truncated,
            final=_make_observations(self.spec, buffers.final_observation, buffers.final_state),
            info={},
        )
        self._now = arrays.observations
        self._tensors = as_tensors(arrays)
        self._pool: ThreadPoolExecutor | None = None
        self._pool_process = 0
        self._started = False
        self._seed_instances(seed)

    @property
    def curriculum_stage(self) -> int:
        """Stage of the curriculum, from 0; what it changes is said at the scenario.

        Can be set to any stage of the scenario; other values raise ``ValueError``. Scenarios without a curriculum, or
        with ``curriculum=False``, have stage 0 only.
        """
        return self._stage

    @curriculum_stage.setter
    def curriculum_stage(self, stage: int) -> None:
        stages = self.world.stages
        if not 0 <= stage < len(stages):
            raise ValueError(f"curriculum_stage must be in [0, {len(stages)}), got {stage}")
        self._stage = stage
        self._constants = self._constants._replace(difficulty=stages[stage])

    def reset(self, *, seed: int | None = None, mask: np.ndarray | None = None) -> Observations[Tensor]:
        """See :meth:`VectorEnv.reset`. Raises ``RuntimeError`` if the very first reset is a partial one."""
        check_reset(self.num_envs, seed=seed, mask=mask)
        if mask is None:
            mask = self._all
        elif not self._started:
            raise RuntimeError("the first reset must be without a mask")
        if seed is not None:
            self._seed_instances(seed)
        kernel.write_instances(np.ascontiguousarray(mask), True, self._state, self._constants, self._buffers)
        self._started = True
        return self._tensors.observations

    def step(self, actions: Mapping[str, Tensor]) -> VectorStep[Tensor]:
        """See :meth:`VectorEnv.step`. Raises ``ValueError`` if an action has a wrong shape or is not legal."""
        if not self._started:
            raise RuntimeError("call reset before step")
        arrays = self._read_actions(actions)
        arguments = (self._state, self._constants, self._buffers)
        # The kernel releases the GIL. This thread steps the first range, the pool the others.
        (first, last), *others = self._ranges
        pending = [self._threads().submit(kernel.step_instances, *bounds, *arguments) for bounds in others]
        legal = kernel.step_instances(first, last, *arguments)
        for future in pending:
            future.result()
        if not legal:
            check_legal(self.spec, arrays, action_mask=self._now.action_mask, alive=self._now.alive)
        return self._tensors

    def replicate(self, *, num_envs: int, seed: int) -> MPEVectorEnv:
        """See :meth:`VectorEnv.replicate`. The new environment is in the same stage of the curriculum."""
        other = MPEVectorEnv(num_envs=num_envs, seed=seed, **self._arguments)
        other.curriculum_stage = self.curriculum_stage
        other.recipe = self.recipe
        return other

    def render(self, index: int) -> np.ndarray:
        """Returns the picture of instance ``index`` as uint8 ``[350, 350, 3]``; see :func:`.render.draw_world`.

        After an episode ended, it shows the first picture of the next one.

        Raises:
            RuntimeError: before the first ``reset``.
            IndexError: if there is no such instance.
        """
        if not self._started:
            raise RuntimeError("call reset before render")
        if not 0 <= index < self.num_envs:
            raise IndexError(f"index must be in [0, {self.num_envs}), got {index}")
        return draw_world(index, self._state, self.world)

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`VectorEnv.state_dict`."""
        return {
            "game": self._game,
            "seed": self.seed,
            "started": self._started,
            "curriculum_stage": self.curriculum_stage,
            "fields": {name: torch.from_numpy(getattr(self._state, name).copy()) for name in _STATE_FIELDS},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> Observations[Tensor]:
        """See :meth:`VectorEnv.load_state_dict`.

        Raises:
            ValueError: if the state was saved from another scenario, other arguments or another number of instances.
        """
        if state["game"] != self._game:
            raise ValueError(f"the state of {state['game']} does not fit this environment, {self._game}")
        for name in _STATE_FIELDS:
            getattr(self._state, name)[...] = state["fields"][name].numpy()
        self.curriculum_stage = state["curriculum_stage"]
        self.seed = state["seed"]
        self._started = state["started"]
        if self._started:
            kernel.write_instances(self._all, False, self._state, self._constants, self._buffers)
        return self._tensors.observations

    def close(self) -> None:
        """See :meth:`VectorEnv.close`."""
        pool, self._pool = self._pool, None
        if pool is not None and self._pool_process == os.getpid():
            pool.shutdown()

    def _threads(self) -> ThreadPoolExecutor:
        """Returns the pool. A forked process inherits it without its threads and gets its own."""
        if self._pool is None or self._pool_process != os.getpid():
            self._pool = ThreadPoolExecutor(self.num_threads - 1, thread_name_prefix="mpe")
            self._pool_process = os.getpid()
        return self._pool

    @property
    def _game(self) -> dict[str, Any]:
        """What must be equal for a saved state to continue exactly."""
        return {"num_envs": self.num_envs, **self._arguments}

    def _seed_instances(self, seed: int) -> None:
        if not 0 <= seed < 2**63 - self.num_envs:
            raise ValueError(f"seed must be in [0, 2^63 - num_envs), got {seed}")
        self.seed = seed
        self._state.seed[:] = seed + np.arange(self.num_envs)
        self._state.episode[:] = -1

    def _read_actions(self, actions: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
        """Copies the actions into the arrays of the kernel and returns them as numpy arrays."""
        arrays = action_arrays(self.spec, actions, (self.num_envs,))
        for name, columns in self._columns.items():
            if self._constants.continuous:
                self._buffers.controls[:, columns, : arrays[name].shape[-1]] = arrays[name]
            else:
                self._buffers.choices[:, columns] = arrays[name]
        return arrays


def _make_world(scenario: str, options: Mapping[str, Any]) -> World:
    if scenario not in SCENARIOS:
        nearest = difflib.get_close_matches(scenario, SCENARIOS, n=3)
        hint = f"; did you mean {' or '.join(nearest)}?" if nearest else ""
        raise ValueError(f"unknown scenario {scenario!r}, choose one of {', '.join(SCENARIOS)}{hint}")
    return SCENARIOS[scenario](**options)


def _make_groups(world: World, *, continuous: bool) -> dict[str, GroupSpec]:
    """Agents whose names are equal up to the number form a group; in all scenarios their spaces are equal too."""
    groups = {}
    for name, members in itertools.groupby(world.agents, lambda agent: re.sub(r"_\d+$", "", agent.name)):
        agents = tuple(members)
        size = world.action_size(agents[0], continuous=continuous)
        groups[name] = GroupSpec(
            agents=tuple(agent.name for agent in agents),
            observation_space=spaces.Box(-np.inf, np.inf, (agents[0].observation_size,), np.float32),
            action_space=spaces.Box(0.0, 1.0, (size,), np.float32) if continuous else spaces.Discrete(size),
        )
    return groups


def _allocate_state(num_envs: int, world: World) -> State:
    num_agents, num_entities = len(world.agents), len(world.agents) + len(world.landmarks)
    return State(
        seed=np.zeros(num_envs, np.int64),
        episode=np.zeros(num_envs, np.int64),
        time=np.zeros(num_envs, np.int64),
        goal=np.zeros((num_envs, 2), np.int64),
        prey_speed=np.zeros(num_envs),
        position=np.zeros((num_envs, num_entities, 2)),
        velocity=np.zeros((num_envs, num_agents, 2)),
        message=np.zeros((num_envs, num_agents, world.dim_c)),
        force=np.zeros((num_envs, num_agents, 2)),
        forests=np.zeros((num_envs, num_agents), np.int64),
    )


def _make_observations(spec: EnvSpec, observation: np.ndarray, state: np.ndarray) -> Observations[np.ndarray]:
    """Returns the decision points whose numbers the kernel writes into ``observation`` and ``state``."""
    num_envs = len(state)
    groups = spec.groups.items()
    shapes = {name: (num_envs, group.num_agents, group.observation_size) for name, group in groups}
    ends = itertools.accumulate((math.prod(shape) for shape in shapes.values()), initial=0)
    blocks = itertools.starmap(slice, itertools.pairwise(ends))
    observations = Observations(
        observation={
            name: observation[block].reshape(shape) for (name, shape), block in zip(shapes.items(), blocks, strict=True)
        },
        action_mask={
            name: zeros((num_envs, group.num_agents, group.action_size), np.bool_)
            for name, group in groups
            if group.is_discrete
        },
        alive={name: zeros((num_envs, group.num_agents), np.bool_) for name, group in groups},
        state=state,
    )
    # Agents live and may do everything at all times, so that this is written once.
    for flags in (*observations.action_mask.values(), *observations.alive.values()):
        flags.fill(True)
    return observations
