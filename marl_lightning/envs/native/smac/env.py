"""The SMAC-like simulator as a vector environment."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import asdict
from typing import Any

import numpy as np
from gymnasium import spaces

from marl_lightning.envs.base import Observations
from marl_lightning.envs.native.smac import kernel
from marl_lightning.envs.native.smac.kernel import Outcome, State, View
from marl_lightning.envs.native.smac.layout import Layout
from marl_lightning.envs.native.smac.options import SmacOptions
from marl_lightning.envs.native.smac.render import draw_battle
from marl_lightning.envs.native.smac.scenarios import SCENARIOS, find
from marl_lightning.envs.native.vector import NativeVectorEnv
from marl_lightning.envs.spec import EnvSpec, GroupSpec

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

# Simulators that are known by name but run in other packages: what has to be installed for them.
_OTHER_BACKENDS = {
    "starcraft2": ("smac", "the package 'smac' and an installation of StarCraft II"),
    "smaclite": ("smaclite", "the package 'smaclite'"),
}


class SmacVectorEnv(NativeVectorEnv):
    """Many battles of one map, stepped together by compiled kernels that write into preallocated memory.

    Agents ``agent_0`` … of the group ``"agents"`` see and do what they see and do in SMAC: the same observations,
    states, actions, legality, rewards and ends, in a simulator of our own. Results must not be reported as SMAC.

    Pictures are uint8 ``[512, 512, 3]``, north up. Agents are blue, enemies red, darker the more health they lost; a
    ring is the shield, a bar above a unit its cooldown, a line a shot of the last step.

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

    _instances_per_thread = 64
    _saved_fields = State._fields[: State._fields.index("in_range")]

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
        self.options = SmacOptions(**options)
        self.layout = Layout(find(SCENARIOS, map_name, "map"), self.options)
        super().__init__(
            spec=_make_spec(self.layout),
            num_envs=num_envs,
            seed=seed,
            num_threads=num_threads,
            arguments={"map_name": map_name, **asdict(self.options)},
        )
        self._constants = self.layout.constants()
        self._state = _allocate_state(num_envs, self.layout)
        self._actions = self._action_arrays[GROUP]
        arrays = self._arrays
        self._now, self._final = _make_view(arrays.observations), _make_view(arrays.final)
        self._outcome = Outcome(
            reward=arrays.reward[GROUP], terminated=arrays.terminated, truncated=arrays.truncated, **arrays.info
        )
        self.team_reward = self._outcome.reward[:, 0]
        logger.info(self.description)

    @property
    def description(self) -> str:
        """One line that says what is simulated, to be shown wherever results are shown."""
        return f"{self.spec.name}: backend=embedded, physics={self.options.physics} ({NOTE})"

    def _step_instances(self, first: int, last: int) -> None:
        kernel.step_instances(
            first, last, self._actions, self._state, self._constants, self._now, self._final, self._outcome
        )

    def _reset_instances(self, mask: np.ndarray) -> None:
        kernel.reset_instances(mask, self._state, self._constants, self._now)

    def _observe_instances(self) -> None:
        kernel.observe_instances(self._state, self._constants, self._now)

    def _render_instance(self, index: int) -> np.ndarray:
        return draw_battle(index, self._state, self._constants)

    def _check_actions(self) -> None:
        if self.options.invalid_action != "error":
            return
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
