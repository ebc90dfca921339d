"""Level-based foraging as a vector environment."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from marl_lightning.envs.base import Observations, VectorEnv, VectorStep
from marl_lightning.envs.native.lbf import kernel
from marl_lightning.envs.native.lbf.kernel import Constants, Outcome, State, View
from marl_lightning.envs.native.lbf.layout import GROUP, Layout
from marl_lightning.envs.native.lbf.options import LBFOptions
from marl_lightning.envs.native.lbf.render import draw_field
from marl_lightning.envs.native.lbf.scenarios import parse
from marl_lightning.envs.validation import check_num_envs, check_reset
from marl_lightning.envs.vector.buffers import allocate_step, as_tensors

# A thread costs about 50 microseconds a step, one instance less than 1.
_INSTANCES_PER_THREAD = 256

_STATE_FIELDS = State._fields[: State._fields.index("target")]


class LBFVectorEnv(VectorEnv):
    """Many instances of one game, stepped together by compiled kernels that write into preallocated memory.

    Agents ``agent_0`` … of the group ``"agents"`` are the players. Their actions are none, north, south, west, east and
    load. Given equal states and actions, everything is equal to lbforaging, except that an episode whose time is up is
    *truncated*; it is *terminated* only when no food is left. An action that is not legal counts as none.

    Start states have the distribution of a new environment of the package. (In the package a player cannot start where
    it or a player placed after it stood at the end of the last episode; here, episodes do not depend on earlier ones.)

    An observation is float32 ``[3 * F + 3 * P]``: row, column and level of the foods in sight, in the order of their
    cells, then of the player itself, then of the other players in sight. Positions are relative to the upper left cell
    in sight, and what is not seen is ``(-1, -1, 0)``. Without ``observe_agent_levels`` players have two entries. Grid
    observations are float32 ``[3, 2 * sight + 1, 2 * sight + 1]`` around the player: levels of players (1 without
    ``observe_agent_levels``), levels of foods, and 1 where a cell of the field is free.

    The state is float32 ``[3 * F + 3 * P]``: row, column and level of the foods in the field, in the order of their
    cells, ``(-1, -1, 0)`` for those that were eaten or never placed, then of all players in their own order.

    Args:
        scenario: a name such as ``"Foraging-2s-8x8-2p-2f-coop-v3"``, see
            :mod:`~marl_lightning.envs.native.lbf.scenarios`.
        num_envs: number of instances.
        seed: instance ``i`` is seeded with ``seed + i``, and behaves as the first instance of an environment with that
            seed would.
        num_threads: threads that step the instances, at most one an instance, which pays off for many instances and
            free cores. ``None`` takes one for every 256 instances, at most as many as torch uses. Results do not
            depend on it.
        **options: fields of :class:`~marl_lightning.envs.native.lbf.options.LBFOptions`.

    Attributes:
        options: the switches.
        layout: sizes and level bounds.

    Raises:
        ValueError: if the name is unknown or a number is out of range.
    """

    def __init__(
        self,
        *,
        scenario: str,
        num_envs: int,
        seed: int = 0,
        num_threads: int | None = None,
        **options: Any,
    ) -> None:
        check_num_envs(num_envs)
        if num_threads is None:
            num_threads = max(1, min(num_envs // _INSTANCES_PER_THREAD, torch.get_num_threads()))
        if num_threads < 1:
            raise ValueError(f"num_threads must be positive, got {num_threads}")
        num_threads = min(num_threads, num_envs)
        self.num_envs = num_envs
        self.num_threads = num_threads
        self.options = LBFOptions(**options)
        self.layout = Layout(parse(scenario), self.options)
        self.spec = self.layout.spec(can_checkpoint=True, metadata={"backend": "embedded"})
        self._arguments = dict(scenario=scenario, **options)
        self._constants = _make_constants(self.layout)
        self._state = _allocate_state(num_envs, self.layout)
        self._actions = np.zeros((num_envs, self.layout.scenario.num_players), np.int64)
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
        self._step = as_tensors(step)
        self._started = False
        self._pool: ThreadPoolExecutor | None = None
        self._pool_process = 0
        self._seed_instances(seed)

    def reset(self, *, seed: int | None = None, mask: np.ndarray | None = None) -> Observations[Tensor]:
        """See :meth:`VectorEnv.reset`; the first reset must cover all instances, else ``RuntimeError``."""
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
        """See :meth:`VectorEnv.step`; actions of a wrong shape or kind raise ``ValueError``."""
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

    def replicate(self, *, num_envs: int, seed: int) -> LBFVectorEnv:
        """See :meth:`VectorEnv.replicate`."""
        other = LBFVectorEnv(num_envs=num_envs, seed=seed, **self._arguments)
        other.recipe = self.recipe
        return other

    def render(self, index: int) -> np.ndarray:
        """Returns the picture of instance ``index`` as uint8 ``[32 * size, 32 * size, 3]``, north up.

        Players are blue squares and foods red discs, each with its level. After an episode ended, it shows the first
        picture of the next one.
        """
        if not self._started:
            raise RuntimeError("call reset before the first render")
        return draw_field(self._constants.size, self._state.players[index], self._state.foods[index])

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`VectorEnv.state_dict`."""
        fields = {name: torch.from_numpy(getattr(self._state, name).copy()) for name in _STATE_FIELDS}
        return {"game": self._game, "seed": self.seed, "started": self._started, "fields": fields}

    def load_state_dict(self, state: Mapping[str, Any]) -> Observations[Tensor]:
        """Restores what ``state_dict`` returned and returns the restored decision point.

        Raises:
            ValueError: if it was saved from another scenario, other options or another number of instances.
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
        """See :meth:`VectorEnv.close`."""
        pool, self._pool = self._pool, None
        if pool is not None and self._pool_process == os.getpid():
            pool.shutdown()

    def _threads(self) -> ThreadPoolExecutor:
        """Returns the pool. A forked process inherits it without its threads and gets its own."""
        if self._pool is None or self._pool_process != os.getpid():
            self._pool = ThreadPoolExecutor(self.num_threads - 1, thread_name_prefix="lbf")
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
        """Copies the actions into the array of the kernel, whatever their memory layout."""
        if actions.shape != self._actions.shape or actions.is_floating_point():
            raise ValueError(
                f"actions must be integers of shape {self._actions.shape}, got {actions.dtype} {tuple(actions.shape)}"
            )
        self._action_tensor.copy_(actions)


def _make_constants(layout: Layout) -> Constants:
    scenario, options = layout.scenario, layout.options
    return Constants(
        size=scenario.size,
        num_players=scenario.num_players,
        num_foods=scenario.num_foods,
        sight=layout.sight,
        limit=options.episode_limit,
        force_coop=scenario.coop,
        grid_observation=options.grid_observation,
        observe_agent_levels=options.observe_agent_levels,
        normalize_reward=options.normalize_reward,
        obs_instead_of_state=options.obs_instead_of_state,
        penalty=np.float32(options.penalty),
        player_levels=layout.player_levels,
        food_levels=layout.food_levels,
    )


def _make_view(observations: Observations[np.ndarray]) -> View:
    observations.alive[GROUP][...] = True  # nobody leaves this game
    observation = observations.observation[GROUP]
    return View(
        observation=observation.reshape(*observation.shape[:2], -1),
        action_mask=observations.action_mask[GROUP],
        state=observations.state,
    )


def _allocate_state(num_envs: int, layout: Layout) -> State:
    num_players, num_foods = layout.scenario.num_players, layout.scenario.num_foods
    return State(
        seed=np.zeros(num_envs, np.int64),
        episode=np.zeros(num_envs, np.int64),
        time=np.zeros(num_envs, np.int64),
        spawned=np.zeros(num_envs, np.int64),
        players=np.zeros((num_envs, num_players, 3), np.int64),
        foods=np.zeros((num_envs, num_foods, 3), np.int64),
        target=np.zeros((num_envs, num_players, 2), np.int64),
        loading=np.zeros((num_envs, num_players), np.bool_),
    )
