"""Scenarios of VMAS, which simulates all instances of a game together in torch, on a CPU or a GPU."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from marl_lightning.envs.adapters.packages import require
from marl_lightning.envs.adapters.pettingzoo import group_agents
from marl_lightning.envs.adapters.vmas_state import GameCopy, RandomStreams, load_game, save_game
from marl_lightning.envs.base import Observations, VectorEnv, VectorStep
from marl_lightning.envs.spec import EnvSpec
from marl_lightning.envs.validation import action_arrays, check_legal, check_num_envs, check_reset
from marl_lightning.envs.vector.layout import build_step

if TYPE_CHECKING:
    from vmas.simulator.environment import Environment

_EXTRA = "vmas"


def scenarios() -> tuple[str, ...]:
    """Returns the names of all scenarios that come with the package, without importing it."""
    package = importlib.util.find_spec("vmas")
    if package is None:
        require("vmas", extra=_EXTRA)
    (folder,) = package.submodule_search_locations
    return tuple(sorted(path.stem for path in Path(folder, "scenarios").rglob("[!_]*.py")))


def make_vector(scenario: str, *, num_envs: int, seed: int, **kwargs: Any) -> VectorEnv:
    """Returns a vector environment; arguments as for :class:`VmasVectorEnv`."""
    return VmasVectorEnv(scenario=scenario, num_envs=num_envs, seed=seed, **kwargs)


class VmasVectorEnv(VectorEnv):
    """All instances of a VMAS scenario, stepped and reset together, with tensors in and out on the device of the game.

    Agents whose names are equal up to a trailing number and whose spaces are equal form a group. The state is the
    concatenation of all observations, group after group. Every agent is always alive and may do everything. ``info``
    holds what the scenario reports as one number an agent and instance, averaged over the agents that report it.

    **Ends.** ``terminated`` is the scenario's own ``done``. With ``max_steps``, episodes are truncated after so many
    env steps.

    **Seeds.** VMAS draws from one generator for all instances. Still, ``reset(seed=)`` starts instance ``i`` from
    ``seed + i``, by resetting one after another, which takes one or two milliseconds each. The start is the same in any
    number of instances, unless the scenario draws for all of them even then: ``asym_joint``, ``road_traffic`` and
    ``simple_crypto`` do. All that comes later is drawn from one stream: it is determined by the seed, the number of
    instances and all actions. What a scenario draws once for all instances (the goals of ``simple_reference`` are an
    example) does not depend on the seed at first, and is drawn anew whenever all instances end at the same time. The
    generators are the environment's own: neither those of the process nor other VMAS environments are touched.

    **Partial resets.** If some instances end, all are reset together and the others are put back (see
    :mod:`.vmas_state`), so that it takes a few times as long as a reset, however many they are.

    Args:
        scenario: name of a scenario, such as ``"balance"``.
        num_envs: number of instances.
        seed: see above.
        device: where the game is simulated and its tensors are, such as ``"cuda"``.
        max_steps: env steps of an episode; ``None`` for no limit.
        continuous_actions: whether actions are forces, and messages in [0, 1], which are clipped to their bounds.
            Otherwise they are choices.
        multidiscrete_actions: whether the parts of a discrete action (forces along each axis and the message) are
            chosen one by one, rather than one of all their combinations. ``None`` does so if agents send messages.
        **options: arguments of the scenario, such as ``n_agents``.

    Attributes:
        device: where all tensors are.

    Raises:
        ImportError: if vmas is not installed.
        ValueError: if the scenario is unknown or a number is out of range.
        TypeError: if the scenario does not have an option.
    """

    def __init__(
        self,
        *,
        scenario: str,
        num_envs: int,
        seed: int = 0,
        device: str = "cpu",
        max_steps: int | None = 100,
        continuous_actions: bool = True,
        multidiscrete_actions: bool | None = None,
        **options: Any,
    ) -> None:
        check_num_envs(num_envs)
        _check_seed(seed, num_envs)
        if max_steps is not None and max_steps < 1:
            raise ValueError(f"max_steps must be at least 1, got {max_steps}; use null for no limit")
        if multidiscrete_actions and continuous_actions:
            raise ValueError("multidiscrete_actions=True needs continuous_actions=False")
        self.num_envs = num_envs
        self.seed = seed
        self._arguments = {
            "scenario": scenario,
            "device": device,
            "max_steps": max_steps,
            "continuous_actions": continuous_actions,
            "multidiscrete_actions": multidiscrete_actions,
            **options,
        }
        package = _import_vmas()
        self.device = torch.device(device)
        self._streams = RandomStreams(self.device)
        with self._playing():
            self._env = _make_game(
                package,
                scenario,
                num_envs=num_envs,
                device=device,
                max_steps=max_steps,
                continuous_actions=continuous_actions,
                clamp_actions=True,
                terminated_truncated=True,
                **options,
            )
            if not continuous_actions:
                speaks = self._env.world.dim_c > 0 and not all(agent.silent for agent in self._env.agents)
                self._env.multidiscrete_actions = speaks if multidiscrete_actions is None else multidiscrete_actions
            # Scenarios can tell their infos only after a step.
            observations, *_, infos = self._env.step(self._env.get_random_actions())
        self._fresh = save_game(self._env)
        self._reporters = _find_reporters(infos, num_envs)
        groups = group_agents(_as_parallel(self._env, observations))
        self.spec = EnvSpec(
            name=f"vmas/{scenario}",
            groups=groups,
            state_size=sum(group.num_agents * group.observation_size for group in groups.values()),
            episode_limit=max_steps,
            info_keys=tuple(self._reporters),
            can_checkpoint=True,
            metadata={"backend": "vmas"},
        )
        names = _agent_names(self._env)
        self._members = {name: [names.index(agent) for agent in group.agents] for name, group in groups.items()}
        self._limits = {name: torch.tensor(group.action_parts, device=device) for name, group in groups.items()}
        self._step: VectorStep[Tensor] = build_step(self.spec, num_envs, self._make_tensor)
        for point in (self._step.observations, self._step.final):
            for flags in (*point.alive.values(), *point.action_mask.values()):
                flags.fill_(True)
        self._started = False

    def reset(self, *, seed: int | None = None, mask: np.ndarray | None = None) -> Observations[Tensor]:
        """See :meth:`VectorEnv.reset`. Raises ``RuntimeError`` if the very first reset is a partial one."""
        check_reset(self.num_envs, seed=seed, mask=mask)
        if not self._started:
            if mask is not None:
                raise RuntimeError("the first reset must be without a mask: it starts all instances")
            seed = self.seed if seed is None else seed
        if seed is not None:
            _check_seed(seed, self.num_envs)
            self.seed = seed
            self._begin_seeded(seed)
        elif mask is None or mask.any():
            with self._playing():
                self._begin(None if mask is None or mask.all() else torch.from_numpy(mask).to(self.device))
        self._started = True
        return self._step.observations

    def step(self, actions: Mapping[str, Tensor]) -> VectorStep[Tensor]:
        """See :meth:`VectorEnv.step`; actions of a wrong shape or kind and illegal ones raise ``ValueError``."""
        if not self._started:
            raise RuntimeError("call reset before step")
        self._check_actions(actions)
        by_agent: list[Tensor | None] = [None] * len(self._env.agents)
        for name, members in self._members.items():
            for index, action in zip(members, actions[name].unbind(1), strict=True):
                by_agent[index] = action
        result = self._step
        with self._playing():
            observations, rewards, terminated, truncated, infos = self._call("step", by_agent)
            for name, members in self._members.items():
                torch.stack([rewards[index].view(-1) for index in members], dim=1, out=result.reward[name])
            for key, indices in self._reporters.items():
                reports = [infos[index][key].view(-1).float() for index in indices]
                torch.mean(torch.stack(reports), dim=0, out=result.info[key])
            result.terminated.copy_(terminated)
            result.truncated.copy_(truncated)
            ended = terminated | truncated
            some_ended, all_ended = bool(ended.any()), bool(ended.all())
            if not all_ended:
                self._write(result.observations, observations)
            if some_ended:
                self._write(result.final, observations)
                self._begin(None if all_ended else ended)
        return result

    def replicate(self, *, num_envs: int, seed: int) -> VmasVectorEnv:
        """See :meth:`VectorEnv.replicate`."""
        other = VmasVectorEnv(num_envs=num_envs, seed=seed, **self._arguments)
        other.recipe = self.recipe
        return other

    def render(self, index: int) -> np.ndarray:
        """See :meth:`VectorEnv.render`. VMAS draws with OpenGL: it needs a display, or a GPU with EGL.

        Raises:
            RuntimeError: before the first ``reset``.
            IndexError: if there is no such instance.
            NotImplementedError: if there is nothing to draw with.
        """
        if not self._started:
            raise RuntimeError("call reset before render")
        if not 0 <= index < self.num_envs:
            raise IndexError(f"index must be in [0, {self.num_envs}), got {index}")
        try:
            with self._playing():
                picture = self._env.render(mode="rgb_array", env_index=index)
        except Exception as error:  # pyglet has many of them
            reason = str(error) or type(error).__name__
            raise NotImplementedError(f"{self.spec.name} needs a display, as xvfb-run gives one: {reason}") from error
        return np.ascontiguousarray(picture)

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`VectorEnv.state_dict`."""
        return {
            "game": self._game,
            "seed": self.seed,
            "started": self._started,
            "random": self._streams.state_dict(),
            "places": save_game(self._env),
            "observation": {name: value.clone() for name, value in self._step.observations.observation.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> Observations[Tensor]:
        """See :meth:`VectorEnv.load_state_dict`.

        Raises:
            ValueError: if it was saved from another game, with other arguments or another number of instances.
        """
        if state.get("game") != self._game:
            raise ValueError(
                f"the state does not fit this environment; it was saved from {state.get('game')}, this is {self._game}"
            )
        load_game(self._env, state["places"])
        self._streams.load_state_dict(state["random"])
        self.seed, self._started = state["seed"], state["started"]
        for name, value in state["observation"].items():
            self._step.observations.observation[name].copy_(value)
        self._write_state(self._step.observations)
        return self._step.observations

    def close(self) -> None:
        """See :meth:`VectorEnv.close`. Only closes the window of :meth:`render`."""
        viewer, self._env.viewer = self._env.viewer, None
        if viewer is not None:
            viewer.close()

    @property
    def _game(self) -> dict[str, Any]:
        """What must be equal for a saved state to continue exactly; the device need not."""
        return {**self._arguments, "num_envs": self.num_envs, "device": None}

    @contextmanager
    def _playing(self) -> Iterator[None]:
        """To be around all use of the game: it draws from its own generators and records no gradients."""
        with torch.inference_mode(mode=False), torch.no_grad(), self._streams.installed():
            yield

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the game without the exchange of generators that VMAS wraps it in."""
        return inspect.unwrap(getattr(type(self._env), method))(self._env, *args, **kwargs)

    def _begin_seeded(self, seed: int) -> None:
        """Begins an episode in every instance, each one from its own seed."""
        load_game(self._env, self._fresh)  # scenarios do not set back all that they have
        for index in range(self.num_envs):
            self._streams.seed(seed + index)
            with self._playing():
                self._call("reset_at", index, return_observations=False)
        self._streams.seed(seed)
        with self._playing():
            (observations,) = self._call(
                "get_from_scenario", get_observations=True, get_rewards=False, get_infos=False, get_dones=False
            )
            self._write(self._step.observations, observations)

    def _begin(self, rows: Tensor | None) -> None:
        """Begins an episode in all instances, or in those of ``rows`` (``[E]`` bool), and writes their observations."""
        before = None if rows is None else GameCopy(self._env)
        observations = self._call("reset")
        if before is not None:
            before.put_back(~rows)
        self._write(self._step.observations, observations, rows)

    def _write(self, target: Observations[Tensor], observations: Sequence[Tensor], rows: Tensor | None = None) -> None:
        for name, members in self._members.items():
            parts = [observations[index] for index in members]
            if rows is None:
                torch.stack(parts, dim=1, out=target.observation[name])
            else:
                target.observation[name][rows] = torch.stack(parts, dim=1)[rows]
        self._write_state(target)

    def _write_state(self, target: Observations[Tensor]) -> None:
        torch.cat([observation.flatten(1) for observation in target.observation.values()], dim=1, out=target.state)

    def _check_actions(self, actions: Mapping[str, Tensor]) -> None:
        """Raises ``ValueError`` for a wrong shape or kind or an illegal action; copies nothing if all is well."""
        if not self._are_legal(actions):
            arrays = action_arrays(self.spec, {k: action.cpu() for k, action in actions.items()}, (self.num_envs,))
            now = self._step.observations
            check_legal(
                self.spec,
                arrays,
                action_mask={name: mask.cpu().numpy() for name, mask in now.action_mask.items()},
                alive={name: alive.cpu().numpy() for name, alive in now.alive.items()},
            )

    def _are_legal(self, actions: Mapping[str, Tensor]) -> bool:
        if actions.keys() != self.spec.groups.keys():
            return False
        for name, group in self.spec.groups.items():
            action = actions[name]
            if action.shape != (self.num_envs, group.num_agents, *group.action_shape):
                return False
            if action.is_floating_point() is group.is_discrete or action.dtype is torch.bool:
                return False
            if not group.is_discrete:
                legal = action.isfinite()
            else:
                limits = self._limits[name] if group.action_shape else group.action_parts[0]
                legal = (action >= 0) & (action < limits)
            if not legal.all():
                return False
        return True

    def _make_tensor(self, shape: tuple[int, ...], dtype: Any) -> Tensor:
        return torch.from_numpy(np.zeros(shape, dtype)).to(self.device)


def _import_vmas() -> ModuleType:
    """Returns the package. It imports gym, whose notice that it is no longer maintained is of no use to anyone here."""
    if "gym" not in sys.modules:
        notices = require("gym_notices.notices", extra=_EXTRA)
        kept, notices.notices = notices.notices, {}
        try:
            require("gym", extra=_EXTRA)
        finally:
            notices.notices = kept
    return require("vmas", extra=_EXTRA)


def _make_game(package: ModuleType, scenario: str, **arguments: Any) -> Environment:
    """Returns the package's environment; arguments that the scenario does not have are an error, not a warning."""
    known = scenarios()
    if scenario not in known:
        nearest = difflib.get_close_matches(scenario, known, n=3)
        hint = f"; did you mean {' or '.join(nearest)}?" if nearest else ""
        raise ValueError(f"unknown scenario {scenario!r}, choose one of {', '.join(known)}{hint}")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Scenario kwargs", category=UserWarning)
        try:
            return package.make_env(scenario, **arguments)
        except UserWarning as warning:
            raise TypeError(f"vmas/{scenario}: {warning}") from None


def _find_reporters(infos: Sequence[Mapping[str, Tensor]], num_envs: int) -> dict[str, list[int]]:
    """Returns for every key of the infos with one number an instance the agents that report it."""
    reporters: dict[str, list[int]] = {}
    for index, info in enumerate(infos):
        for key, value in info.items():
            if isinstance(value, Tensor) and value.shape in ((num_envs,), (num_envs, 1)):
                reporters.setdefault(key, []).append(index)
    return reporters


def _agent_names(env: Environment) -> list[str]:
    return [agent.name.replace(" ", "_") for agent in env.agents]  # some are called "agent 0"


def _as_parallel(env: Environment, observations: Sequence[Tensor]) -> Any:
    """Returns what agents are grouped by: their names and spaces, as a PettingZoo environment tells them."""
    names = _agent_names(env)
    shapes = {name: observation.shape[1:] for name, observation in zip(names, observations, strict=True)}
    actions = {name: env.get_agent_action_space(agent) for name, agent in zip(names, env.agents, strict=True)}
    return SimpleNamespace(
        possible_agents=names,
        observation_space=lambda agent: spaces.Box(-np.inf, np.inf, shapes[agent], np.float32),
        action_space=lambda agent: _gymnasium_space(actions[agent]),
    )


def _gymnasium_space(space: Any) -> spaces.Space:
    """Returns the space of gymnasium that equals one of gym."""
    if hasattr(space, "nvec"):
        return spaces.MultiDiscrete(space.nvec)
    return spaces.Discrete(space.n) if hasattr(space, "n") else spaces.Box(space.low, space.high, dtype=np.float32)


def _check_seed(seed: int, num_envs: int) -> None:
    if not 0 <= seed < 2**63 - num_envs:
        raise ValueError(f"seed must be in [0, 2^63 - num_envs), got {seed}")
