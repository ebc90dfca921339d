"""The SMAC-like simulator as a vector environment."""

from __future__ import annotations

import importlib.util
import itertools
import logging
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from marl_lightning.envs.base import Observations, VectorEnv, VectorStep
from marl_lightning.envs.native.smac import kernel
from marl_lightning.envs.native.smac.kernel import Outcome, State, View
from marl_lightning.envs.native.smac.layout import Layout
from marl_lightning.envs.native.smac.options import SmacOptions
from marl_lightning.envs.native.smac.render import draw_battle
from marl_lightning.envs.native.smac.scenarios import SCENARIOS, find
from marl_lightning.envs.spec import EnvSpec, GroupSpec
from marl_lightning.envs.validation import check_reset
from marl_lightning.envs.vector.buffers import allocate_step, as_tensors

logger = logging.getLogger(__name__)

GROUP = "agents"
"""Name of the only group."""

INFO_KEYS = (
    "battle_won",
    "timeout",
    "dead_allies",
    "dead_enemies",
    "invalid_actions",
    "damage_dealt",
    "damage_taken",
    "ally_alive_frac",
)
"""Numbers that every step reports: 0/1 flags, counts, and damage of the step in points of health and shield."""

NOTE = "SMAC-like simulator, not StarCraft II"

# A thread costs about 50 microseconds a step, one instance of the smallest map about 3.
_INSTANCES_PER_THREAD = 64

# Simulators that are known by name but run in other packages: what has to be installed for them.
_OTHER_BACKENDS = {
    "starcraft2": ("smac", "the package 'smac' and an installation of StarCraft II"),
    "smaclite": ("smaclite", "the package 'smaclite'"),
}

_STATE_FIELDS = State._fields[: State._fields.index("in_range")]


class SmacVectorEnv(VectorEnv):
    """Many battles of one map, stepped together by compiled kernels that write into preallocated memory.

    Agents ``agent_0`` … of the group ``"agents"`` see and do what they see and do in SMAC: the same observations,
    states, actions, legality, rewards and ends, in a simulator of our own. Results must not be reported as SMAC.

    Args:
        map_name: one of :data:`~marl_lightning.envs.native.smac.scenarios.SCENARIOS`.
        num_envs: number of instances.
        seed: instance ``i`` is seeded with ``seed + i``, and behaves as the first instance of an environment with that
            seed would.
        backend: ``"embedded"``. Other names explain what they need.
        num_threads: threads that step the instances, at most one an instance, which pays off for many instances and
            free cores. ``None`` takes one for every 64 instances, at most as many as torch uses. Results are the same.
        **options: fields of :class:`~marl_lightning.envs.native.smac.options.SmacOptions`.

    Attributes:
        options: the switches.
        layout: sizes and names of what agents see and do.
        team_reward: ``[E]`` float32 numpy, the reward that all agents got in the last step.

    Raises:
        ValueError: if a name is unknown or a number is out of range.
        ImportError: if the package of another backend is missing.
    """

    def __init__(
        self,
        *,
        map_name: str,
        num_envs: int,
        seed: int = 0,
        backend: str = "embedded",
        num_threads: int | None = None,
        **options: Any,
    ) -> None:
        _check_backend(backend)
        if num_envs < 1:
            raise ValueError(f"num_envs must be positive, got {num_envs}")
        if num_threads is None:
            num_threads = max(1, min(num_envs // _INSTANCES_PER_THREAD, torch.get_num_threads()))
        if num_threads < 1:
            raise ValueError(f"num_threads must be positive, got {num_threads}")
        num_threads = min(num_threads, num_envs)
        self.num_envs = num_envs
        self.num_threads = num_threads
        self.options = SmacOptions(**options)
        self.layout = Layout(find(SCENARIOS, map_name, "map"), self.options)
        self.spec = _make_spec(self.layout)
        self._arguments = dict(map_name=map_name, **options)
        self._constants = self.layout.constants()
        self._state = _allocate_state(num_envs, self.layout)
        self._actions = np.zeros((num_envs, self.layout.num_agents), np.int64)
        self._action_tensor = torch.from_numpy(self._actions)
        self._mask = np.ones(num_envs, np.bool_)
        # Contiguous ranges of instances, one a thread.
        self._ranges = list(itertools.pairwise(np.linspace(0, num_envs, num_threads + 1).astype(int).tolist()))
        step = allocate_step(self.spec, num_envs)
        self._now, self._final = _make_view(step.observations), _make_view(step.final)
        self._outcome = Outcome(
            reward=step.reward[GROUP],
            terminated=step.terminated,
            truncated=step.truncated,
            **step.info,
        )
        self.team_reward = self._outcome.reward[:, 0]
        self._step = as_tensors(step)
        self._started = False
        self._pool: ThreadPoolExecutor | None = None
        self._pool_process = 0
        self._seed_instances(seed)
        logger.info(self.description)

    @property
    def description(self) -> str:
        """One line that says what is simulated, to be shown wherever results are shown."""
        return f"{self.spec.name}: backend=embedded, physics={self.options.physics} ({NOTE})"

    def reset(self, *, seed: int | None = None, mask: np.ndarray | None = None) -> Observations[Tensor]:
        check_reset(self.num_envs, seed=seed, mask=mask)
        if mask is None:
            mask = True
        elif not self._started and not mask.all():
            raise RuntimeError("the first reset must cover all instances")
        if seed is not None:
            self._seed_instances(seed)
        self._mask[:] = mask  # a type of array that the kernel was not compiled for would be compiled anew
        kernel.reset_instances(self._mask, self._state, self._constants, self._now)
        self._started = True
        return self._step.observations

    def step(self, actions: Mapping[str, Tensor]) -> VectorStep[Tensor]:
        if not self._started:
            raise RuntimeError("call reset before the first step")
        self._read_actions(actions[GROUP])
        arguments = (self._actions, self._state, self._constants, self._now, self._final, self._outcome)
        # The kernel releases the GIL. This thread steps the first range, the pool the others.
        (first, last), *others = self._ranges
        pending = [self._threads().submit(kernel.step_instances, *bounds, *arguments) for bounds in others]
        kernel.step_instances(first, last, *arguments)
        for future in pending:
            future.result()
        return self._step

    def replicate(self, *, num_envs: int, seed: int) -> SmacVectorEnv:
        other = SmacVectorEnv(num_envs=num_envs, seed=seed, **self._arguments)
        other.recipe = self.recipe
        return other

    def render(self, index: int) -> np.ndarray:
        """Returns the picture of instance ``index`` as uint8 ``[512, 512, 3]``, north up.

        Agents are blue, enemies red, darker the more health they lost; a ring is the shield, a bar above a unit its
        cooldown, a line a shot of the last step. After an episode ended, it shows the first picture of the next one.
        """
        if not self._started:
            raise RuntimeError("call reset before the first render")
        return draw_battle(index, self._state, self._constants)

    def state_dict(self) -> dict[str, Any]:
        fields = {name: torch.from_numpy(getattr(self._state, name).copy()) for name in _STATE_FIELDS}
        return {"game": self._game, "seed": self.seed, "started": self._started, "fields": fields}

    def load_state_dict(self, state: Mapping[str, Any]) -> Observations[Tensor]:
        """Restores what ``state_dict`` returned and returns the restored decision point.

        Raises:
            ValueError: if it was saved from another map, other options or another number of instances.
        """
        game = {key: (saved, self._game[key]) for key, saved in state["game"].items() if saved != self._game[key]}
        if game:
            raise ValueError(f"the state does not fit this environment; saved and expected differ in {game}")
        fields = state["fields"]
        arrays = {name: getattr(self._state, name) for name in _STATE_FIELDS}
        if {name: tuple(field.shape) for name, field in fields.items()} != {k: v.shape for k, v in arrays.items()}:
            raise ValueError("the state was saved by another version of this environment")
        for name, array in arrays.items():
            array[...] = fields[name].numpy(force=True)
        self.seed = state["seed"]
        self._started = state["started"]
        if self._started:
            kernel.observe_instances(self._state, self._constants, self._now)
        return self._step.observations

    def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None and self._pool_process == os.getpid():
            pool.shutdown()

    def _threads(self) -> ThreadPoolExecutor:
        """Returns the pool. A forked process inherits it without its threads and gets its own."""
        if self._pool is None or self._pool_process != os.getpid():
            self._pool = ThreadPoolExecutor(self.num_threads - 1, thread_name_prefix="smac")
            self._pool_process = os.getpid()
        return self._pool

    @property
    def _game(self) -> dict[str, Any]:
        """What must be equal for a saved state to continue exactly."""
        return {"name": self.spec.name, "num_envs": self.num_envs, **asdict(self.options)}

    def _seed_instances(self, seed: int) -> None:
        if not 0 <= seed < 2**63 - self.num_envs:
            raise ValueError(f"seed must be in [0, 2^63 - num_envs), got {seed}")
        self.seed = seed
        self._state.seed[:] = seed + np.arange(self.num_envs)
        self._state.episode[:] = -1

    def _read_actions(self, actions: Tensor) -> None:
        """Copies the actions into the array of the kernel, whatever their memory layout, and checks them if asked."""
        if actions.shape != self._actions.shape or actions.is_floating_point():
            raise ValueError(
                f"actions must be integers of shape {self._actions.shape}, got {actions.dtype} {tuple(actions.shape)}"
            )
        self._action_tensor.copy_(actions)
        if self.options.invalid_action == "error":
            self._check_actions()

    def _check_actions(self) -> None:
        known = (self._actions >= 0) & (self._actions < self.layout.num_actions)
        chosen = np.where(known, self._actions, 0)[..., None]
        legal = known & np.take_along_axis(self._now.action_mask, chosen, axis=2)[..., 0]
        illegal = np.argwhere(~legal & self._now.alive)
        if len(illegal):
            env, agent = illegal[0]
            raise ValueError(
                f"action {self._actions[env, agent]} of agent_{agent} in instance {env} is not legal; "
                f"legal are {np.flatnonzero(self._now.action_mask[env, agent]).tolist()}"
            )


def _check_backend(backend: str) -> None:
    find({name: name for name in ("embedded", *_OTHER_BACKENDS)}, backend, "backend")
    if backend == "embedded":
        return
    package, needs = _OTHER_BACKENDS[backend]
    alternative = "backend='embedded' needs nothing but is a SMAC-like simulator of its own"
    if importlib.util.find_spec(package) is None:
        raise ImportError(f"backend {backend!r} needs {needs}; {alternative}", name=package)
    raise ValueError(f"backend {backend!r} cannot be batched by SmacVectorEnv; {alternative}")


def _make_spec(layout: Layout) -> EnvSpec:
    group = GroupSpec(
        agents=tuple(f"agent_{i}" for i in range(layout.num_agents)),
        observation_space=spaces.Box(-np.inf, np.inf, (layout.observation_size,), np.float32),
        action_space=spaces.Discrete(layout.num_actions),
    )
    return EnvSpec(
        name=f"smac/{layout.scenario.name}",
        groups={GROUP: group},
        state_size=layout.state_size,
        episode_limit=layout.scenario.limit,
        info_keys=INFO_KEYS,
        shared_reward=True,
        can_checkpoint=True,
        metadata={"backend": "embedded", "physics": layout.options.physics, "note": NOTE},
    )


def _make_view(observations: Observations[np.ndarray]) -> View:
    return View(
        observation=observations.observation[GROUP],
        action_mask=observations.action_mask[GROUP],
        alive=observations.alive[GROUP],
        state=observations.state,
    )


def _allocate_state(num_envs: int, layout: Layout) -> State:
    counters = dict.fromkeys(("seed", "episode", "time"), ((num_envs,), np.int64))
    counters["last_action"] = ((num_envs, layout.num_agents), np.int64)
    dtypes = dict.fromkeys(("order", "target", "shot", "side"), np.int64) | {"in_range": np.bool_, "standing": np.bool_}
    units = (num_envs, layout.num_agents + layout.num_enemies)
    shapes = {name: counters.get(name, (units, dtypes.get(name, np.float32))) for name in State._fields}
    return State(**{name: np.zeros(shape, dtype) for name, (shape, dtype) in shapes.items()})
