"""The particle scenarios as a vector environment."""

from __future__ import annotations

import difflib
import inspect
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from marl_lightning.envs.base import Observations, VectorStep
from marl_lightning.envs.native.mpe import kernel
from marl_lightning.envs.native.mpe.kernel import Buffers, State
from marl_lightning.envs.native.mpe.render import draw_world
from marl_lightning.envs.native.mpe.scenarios import SCENARIOS, World
from marl_lightning.envs.native.vector import NativeVectorEnv
from marl_lightning.envs.spec import EnvSpec, GroupSpec
from marl_lightning.envs.validation import check_legal, check_num_envs
from marl_lightning.envs.vector.buffers import zeros


class MPEVectorEnv(NativeVectorEnv):
    """Many instances of a particle scenario, stepped together by compiled kernels that write into preallocated memory.

    Agents, groups, spaces, observations, states, rewards and ends are those of ``mpe2`` behind
    :class:`~marl_lightning.envs.adapters.pettingzoo.PettingZooAdapter`, exactly. The state is the package's: the
    observations of all agents in their order. Episodes are truncated after ``max_cycles`` env steps and never
    terminate, unless ``terminate_on_success`` is set. Continuous actions are clipped to [0, 1].

    Actions that are not legal raise ``ValueError`` before anything is changed. Pictures are uint8 ``[350, 350, 3]``;
    see :func:`~marl_lightning.envs.native.mpe.render.draw_world`.

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

    _instances_per_thread = 512
    _saved_fields = State._fields[: State._fields.index("force")]

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
        if max_cycles < 1:
            raise ValueError(f"max_cycles must be at least 1, got {max_cycles}")
        make_world = _find_scenario(scenario)
        filled = inspect.signature(make_world).bind(**options)
        filled.apply_defaults()
        self.world = make_world(**options)
        groups = _make_groups(self.world, continuous=continuous_actions)
        spec = EnvSpec(
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
        self._buffers = buffers = _allocate_buffers(spec, num_envs)
        # Columns of each group in arrays of all agents.
        columns = dict(zip(groups, _blocks(group.num_agents for group in groups.values()), strict=True))
        super().__init__(
            spec=spec,
            num_envs=num_envs,
            seed=seed,
            num_threads=num_threads,
            arguments={
                "scenario": scenario,
                "max_cycles": max_cycles,
                "continuous_actions": continuous_actions,
                **filled.arguments,
            },
            arrays=VectorStep(
                observations=_make_observations(spec, buffers.observation, buffers.state),
                reward={name: buffers.reward[:, block] for name, block in columns.items()},
                terminated=buffers.terminated,
                truncated=buffers.truncated,
                final=_make_observations(spec, buffers.final_observation, buffers.final_state),
                info={},
            ),
            actions={
                name: buffers.choices[:, columns[name]]
                if group.is_discrete
                else buffers.controls[:, columns[name], : group.action_size]
                for name, group in groups.items()
            },
        )
        self._all = np.ones(num_envs, np.bool_)

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

    def replicate(self, *, num_envs: int, seed: int) -> MPEVectorEnv:
        """See :meth:`VectorEnv.replicate`. The new environment is in the same stage of the curriculum."""
        other = super().replicate(num_envs=num_envs, seed=seed)
        other.curriculum_stage = self.curriculum_stage
        return other

    def _step_instances(self, first: int, last: int) -> None:
        # The kernel looks at the actions of all instances, so that no thread makes a step if one is illegal.
        if not kernel.step_instances(first, last, self._state, self._constants, self._buffers):
            now = self._arrays.observations
            check_legal(self.spec, self._action_arrays, action_mask=now.action_mask, alive=now.alive)

    def _reset_instances(self, mask: np.ndarray) -> None:
        kernel.write_instances(mask, True, self._state, self._constants, self._buffers)

    def _observe_instances(self) -> None:
        kernel.write_instances(self._all, False, self._state, self._constants, self._buffers)

    def _render_instance(self, index: int) -> np.ndarray:
        return draw_world(index, self._state, self.world)

    def _save_extra(self) -> dict[str, Any]:
        return {"curriculum_stage": self.curriculum_stage}

    def _load_extra(self, state: Mapping[str, Any]) -> None:
        self.curriculum_stage = state["curriculum_stage"]


def _find_scenario(name: str) -> Callable[..., World]:
    if name not in SCENARIOS:
        nearest = difflib.get_close_matches(name, SCENARIOS, n=3)
        hint = f"; did you mean {' or '.join(nearest)}?" if nearest else ""
        raise ValueError(f"unknown scenario {name!r}, choose one of {', '.join(SCENARIOS)}{hint}")
    return SCENARIOS[name]


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


def _allocate_buffers(spec: EnvSpec, num_envs: int) -> Buffers:
    """Returns the arrays of the kernel, in which the agents of all groups are side by side."""
    num_agents, size = spec.num_agents, spec.state_size
    width = max(0 if group.is_discrete else group.action_size for group in spec.groups.values())
    return Buffers(
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


def _make_observations(spec: EnvSpec, observation: np.ndarray, state: np.ndarray) -> Observations[np.ndarray]:
    """Returns the decision points whose numbers the kernel writes into ``observation`` and ``state``."""
    num_envs = len(state)
    groups = spec.groups.items()
    shapes = {name: (num_envs, group.num_agents, group.observation_size) for name, group in groups}
    blocks = _blocks(math.prod(shape) for shape in shapes.values())
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


def _blocks(lengths: Iterable[int]) -> Iterable[slice]:
    """Returns where things of these lengths lie, one behind the other."""
    return itertools.starmap(slice, itertools.pairwise(itertools.accumulate(lengths, initial=0)))
