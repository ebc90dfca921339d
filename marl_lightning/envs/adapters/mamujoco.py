"""MuJoCo robots whose joints are shared out among agents (MaMuJoCo, as in the package gymnasium-robotics)."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from gymnasium import spaces

from marl_lightning.envs.adapters.packages import require
from marl_lightning.envs.base import MultiAgentEnv, Observations, Step
from marl_lightning.envs.spec import EnvSpec, GroupSpec
from marl_lightning.envs.validation import action_arrays, check_legal

if TYPE_CHECKING:
    import gymnasium
    from gymnasium_robotics.envs.multiagent_mujoco.mujoco_multi import MultiAgentMujocoEnv

GROUP = "agent"

_PARTITIONS = {
    "Ant": ("2x4", "2x4d", "4x2"),
    "HalfCheetah": ("2x3", "6x1"),
    "Hopper": ("3x1",),
    "Humanoid": ("9|8",),
    "HumanoidStandup": ("9|8",),
    "Pusher": ("3p",),
    "Reacher": ("2x1",),
    "Swimmer": ("2x1",),
    "Walker2d": ("2x3",),
}
# Robots of any length: the task they play and the module of the package that draws them.
_CHAINS = {"ManySegmentAnt": ("Ant", "many_segment_ant"), "ManySegmentSwimmer": ("Swimmer", "many_segment_swimmer")}
_LISTED_CHAINS = tuple(f"{agents}x{segments}" for agents in (2, 3, 4, 5, 6, 8, 10) for segments in (1, 2, 3))


def scenarios() -> tuple[str, ...]:
    """Returns the robots with the ways to share out their joints, such as ``"Ant-2x4"``.

    The robots of many segments can be divided in any way ``<agents>x<segments of each>``; the usual ones are listed.

    Raises:
        ImportError: if gymnasium-robotics or mujoco is not installed.
    """
    _require_package()
    robots = _PARTITIONS | dict.fromkeys(_CHAINS, _LISTED_CHAINS)
    return tuple(f"{robot}-{partition}" for robot, partitions in robots.items() for partition in partitions)


def make(scenario: str, **kwargs: Any) -> MultiAgentEnv:
    """Returns one instance; arguments and errors as for :class:`MaMuJoCoAdapter`."""
    return MaMuJoCoAdapter(scenario=scenario, **kwargs)


class MaMuJoCoAdapter(MultiAgentEnv):
    """A robot that several agents move together, each by the joints that it was given.

    **Groups.** ``agent_0, agent_1, ...`` are the group ``"agent"`` if their observations and actions are of equal
    sizes. Otherwise agents of equal sizes form a group, named after its first agent; or, with ``grouping="padded"``,
    all form the group ``"agent"``, with observations padded by zeros and actions by dimensions that are ignored. Which
    are not ignored tells :attr:`action_dimensions`, and ``spec.metadata`` has the sizes in the order of the agents.

    **Data.** Observations are float32, cast from the float64 of the package. Actions are clipped to the bounds of the
    robot's motors (0.4 for Humanoid, 2 for Pusher, else 1). The state is the observation of the single-agent task,
    which need not hold all that the agents see. The reward is that of the task and the same for all agents.

    **Ends.** A robot that falls terminates the episode for all agents, where the task says so; the time limit
    truncates it.

    **Saving.** ``state_dict`` holds the physical state before the last step and the actions of that step, which
    ``load_state_dict`` repeats: tasks read quantities that are computed on the way to a state and are no part of it.

    Pictures are drawn without a window by EGL where there is no display, unless the environment variable ``MUJOCO_GL``
    says otherwise.

    Args:
        scenario: robot and partition of its joints, such as ``"Ant-2x4"``, ``"Humanoid-9|8"`` or
            ``"ManySegmentSwimmer-10x2"``.
        grouping: ``"spaces"`` or ``"padded"``.
        episode_limit: env steps; ``None`` takes that of the single-agent task: 1000, for Reacher 50, for Pusher 100.
        agent_obsk: how many joints away an agent sees; ``None`` gives all joints to one agent, which sees the state.
        agent_factorization: replaces the partition of the scenario: a mapping with ``partition``, ``edges`` and
            ``globals``, see the package.
        local_categories: names of what an agent observes of joints ``0, 1, ...`` joints away; ``None`` takes those of
            the package.
        global_categories: names of what it observes of the robot as a whole; ``None`` takes those of the package.
        render_mode: ``"rgb_array"`` to draw pictures.
        **kwargs: of the single-agent task, such as ``frame_skip`` or ``reset_noise_scale``.

    Raises:
        ImportError: if gymnasium-robotics or mujoco is not installed.
        ValueError: if the name is unknown, or an argument is out of range.
    """

    def __init__(
        self,
        *,
        scenario: str,
        grouping: Literal["spaces", "padded"] = "spaces",
        episode_limit: int | None = None,
        agent_obsk: int | None = 1,
        agent_factorization: Mapping[str, Any] | None = None,
        local_categories: Sequence[Sequence[str]] | None = None,
        global_categories: Sequence[str] | None = None,
        render_mode: str | None = None,
        **kwargs: Any,
    ) -> None:
        robot, partition = _parse(scenario)
        if grouping not in ("spaces", "padded"):
            raise ValueError(f"grouping must be 'spaces' or 'padded', got {grouping!r}")
        if episode_limit is not None and episode_limit < 1:
            raise ValueError(f"episode_limit must be at least 1, got {episode_limit}")
        package = _require_package()
        task = _make_task(robot, partition, render_mode=render_mode, **kwargs)
        self._package: MultiAgentMujocoEnv = package.parallel_env(
            scenario=robot,
            agent_conf=partition,
            agent_obsk=agent_obsk,
            agent_factorization=_factorization(robot, partition)
            if agent_factorization is None
            else agent_factorization,
            local_categories=local_categories,
            global_categories=global_categories,
            gym_env=task,
        )
        self._task = task.unwrapped
        self._physics = _Physics(self._task)
        agents = self._package.possible_agents
        self._sizes = {a: (self._package.observation_space(a).shape[0], _action_size(self._package, a)) for a in agents}
        self.spec = EnvSpec(
            name=f"mamujoco/{scenario}",
            groups=_group_agents(self._package, self._sizes, padded=grouping == "padded"),
            state_size=task.observation_space.shape[0],
            episode_limit=_default_limit(robot) if episode_limit is None else episode_limit,
            shared_reward=True,
            can_checkpoint=True,
            metadata={"backend": "gymnasium_robotics"} | (_padding(self._sizes) if grouping == "padded" else {}),
        )
        self._elapsed = 0
        self._over = True

    @property
    def action_dimensions(self) -> dict[str, np.ndarray]:
        """Per group ``[A, d]`` bool, the dimensions of actions that move something; others are padding."""
        return {
            name: np.arange(group.action_size) < np.array([[self._sizes[agent][1]] for agent in group.agents])
            for name, group in self.spec.groups.items()
        }

    def reset(self, *, seed: int | None = None) -> Observations[np.ndarray]:
        """See :meth:`MultiAgentEnv.reset`."""
        observations, _ = self._package.reset(seed=seed)
        self._physics.began()
        self._elapsed = 0
        self._over = False
        return self._observe(observations)

    def step(self, actions: Mapping[str, np.ndarray]) -> Step[np.ndarray]:
        """See :meth:`MultiAgentEnv.step`."""
        if self._over:
            raise RuntimeError("the episode is over or has not begun: call reset before step")
        arrays = action_arrays(self.spec, actions, ())
        alive = {name: np.ones(group.num_agents, np.bool_) for name, group in self.spec.groups.items()}
        check_legal(self.spec, arrays, action_mask={}, alive=alive)
        local = self._to_package(arrays)
        self._physics.steps_by(self._package.map_local_actions_to_global_action(local))
        observations, rewards, terminations, _, _ = self._package.step(local)
        self._elapsed += 1
        terminated = any(terminations.values())
        truncated = not terminated and self._elapsed >= self.spec.episode_limit
        self._over = terminated or truncated
        reward = next(iter(rewards.values()))
        return Step(
            observations=self._observe(observations),
            reward={name: np.full(group.num_agents, reward, np.float32) for name, group in self.spec.groups.items()},
            terminated=terminated,
            truncated=truncated,
            info={},
        )

    def render(self) -> np.ndarray:
        """See :meth:`MultiAgentEnv.render`. The game must have been made with ``render_mode="rgb_array"``."""
        mode = self._task.render_mode
        if mode != "rgb_array":
            raise NotImplementedError(f'{self.spec.name} needs render_mode="rgb_array" to be rendered, got {mode!r}')
        with without_window():
            return self._package.render()

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`MultiAgentEnv.state_dict`."""
        return {
            "physics": self._physics.state_dict(),
            "generator": self._task.np_random.bit_generator.state,
            "elapsed": self._elapsed,
            "over": self._over,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :meth:`MultiAgentEnv.load_state_dict`."""
        self._package.reset()  # without which a new task refuses to be stepped
        self._physics.load_state_dict(state["physics"])
        self._task.np_random.bit_generator.state = state["generator"]
        self._elapsed = state["elapsed"]
        self._over = state["over"]

    def close(self) -> None:
        """See :meth:`MultiAgentEnv.close`."""
        self._package.close()

    def _to_package(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns the actions of each agent within their bounds and without padding."""
        local = {}
        for name, group in self.spec.groups.items():
            clipped = np.clip(arrays[name], group.action_space.low, group.action_space.high)
            for agent, action in zip(group.agents, clipped, strict=True):
                local[agent] = action[: self._sizes[agent][1]]
        return local

    def _observe(self, observations: Mapping[str, np.ndarray]) -> Observations[np.ndarray]:
        stacked, alive = {}, {}
        for name, group in self.spec.groups.items():
            stacked[name] = np.zeros((group.num_agents, *group.observation_shape), np.float32)
            alive[name] = np.ones(group.num_agents, np.bool_)
            for row, agent in zip(stacked[name], group.agents, strict=True):
                row[: self._sizes[agent][0]] = observations[agent]
        state = self._package.state().astype(np.float32)
        return Observations(observation=stacked, action_mask={}, alive=alive, state=state)


class _Physics:
    """Remembers how the simulation came to where it is, so that it can be brought there again.

    Args:
        task: the single-agent task, unwrapped.
    """

    def __init__(self, task: Any) -> None:
        import mujoco

        self._mujoco = mujoco
        self._task = task
        # All that determines the outcome of a simulation step, the first guess of the solver included.
        self._kind = int(mujoco.mjtState.mjSTATE_INTEGRATION)
        self._before = np.zeros(mujoco.mj_stateSize(task.model, self._kind))
        self._action: np.ndarray | None = None

    def began(self) -> None:
        """To be called at the start of an episode."""
        self._remember(None)

    def steps_by(self, action: np.ndarray) -> None:
        """To be called before every step, with the action of the whole robot."""
        self._remember(action)

    def state_dict(self) -> dict[str, Any]:
        """Returns numbers only, which are exact."""
        return {
            "before": self._before.tolist(),
            "action": None if self._action is None else np.asarray(self._action, np.float64).tolist(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the simulation; what it draws at random is not part of it."""
        before = np.array(state["before"])
        action = None if state["action"] is None else np.array(state["action"])
        self._mujoco.mj_setState(self._task.model, self._task.data, before, self._kind)
        if action is None:
            self._mujoco.mj_forward(self._task.model, self._task.data)
        else:
            self._task.step(action)
        self._before, self._action = before, action

    def _remember(self, action: np.ndarray | None) -> None:
        self._mujoco.mj_getState(self._task.model, self._task.data, self._before, self._kind)
        self._action = action


def _require_package() -> Any:
    require("mujoco", extra="mamujoco")
    return require("gymnasium_robotics.envs.multiagent_mujoco.mamujoco_v1", extra="mamujoco")


def _parse(scenario: str) -> tuple[str, str]:
    """Returns robot and partition of a name."""
    robot, _, partition = scenario.partition("-")
    if robot == "CoupledHalfCheetah":
        raise ValueError("CoupledHalfCheetah cannot be played: gymnasium-robotics fails to build its observations")
    if _exists(robot, partition):
        return robot, partition
    if partition.startswith("p") and _exists(robot, partition[1:]):
        raise ValueError(f"unknown scenario {scenario!r}: write {robot}-{partition[1:]}")
    if robot in _CHAINS:
        raise ValueError(f"unknown scenario {scenario!r}: write {robot}-<agents>x<segments of each>, as in {robot}-2x3")
    known = [f"{robot}-{each}" for each in _PARTITIONS.get(robot, ())]
    raise ValueError(
        f"unknown scenario {scenario!r}: choose {' or '.join(known)}"
        if known
        else f"unknown robot {robot!r}: choose one of {', '.join((*_PARTITIONS, *_CHAINS))}"
    )


def _exists(robot: str, partition: str) -> bool:
    if robot in _CHAINS:
        return re.fullmatch(r"[1-9]\d*x[1-9]\d*", partition) is not None
    return partition in _PARTITIONS.get(robot, ())


def _make_task(robot: str, partition: str, **kwargs: Any) -> gymnasium.Env:
    """Returns the single-agent task without a time limit."""
    import gymnasium

    common = {"max_episode_steps": -1, "disable_env_checker": True}
    if robot not in _CHAINS:
        return gymnasium.make(f"{robot}-v5", **common, **kwargs)
    # The package itself would write the model into its own folder, where processes that start together delete it from
    # under each other.
    base, module = _CHAINS[robot]
    draw = require(f"gymnasium_robotics.envs.multiagent_mujoco.{module}", extra="mamujoco").gen_asset
    agents, segments = map(int, partition.split("x"))
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "robot.xml")
        draw(n_segs=agents * segments, asset_path=path)
        return gymnasium.make(f"{base}-v5", xml_file=path, **common, **kwargs)


def _factorization(robot: str, partition: str) -> dict[str, Any]:
    """Returns the package's own partition, with names that differ.

    The package sorts the joints that an agent observes by name. Two joints of Pusher have the same, so that their order
    would depend on where in memory they are, and differ between instances.
    """
    module = require("gymnasium_robotics.envs.multiagent_mujoco.obsk", extra="mamujoco")
    parts, edges, whole = module.get_parts_and_edges(robot, partition)
    joints = [joint for part in parts for joint in part]
    count = Counter(joint.label for joint in joints)
    for joint in joints:
        if count[joint.label] > 1:
            joint.label += f" {joint.act_ids}"
    return {"partition": parts, "edges": edges, "globals": whole}


def _default_limit(robot: str) -> int:
    import gymnasium

    base, _ = _CHAINS.get(robot, (robot, None))
    return gymnasium.spec(f"{base}-v5").max_episode_steps


def _action_size(package: MultiAgentMujocoEnv, agent: str) -> int:
    return package.action_space(agent).shape[0]


def _group_agents(
    package: MultiAgentMujocoEnv, sizes: Mapping[str, tuple[int, int]], *, padded: bool
) -> dict[str, GroupSpec]:
    """Groups agents as the docstring of :class:`MaMuJoCoAdapter` says."""
    kinds: dict[tuple[int, int], list[str]] = {}
    largest = tuple(map(max, zip(*sizes.values(), strict=True)))
    for agent, size in sizes.items():
        kinds.setdefault(largest if padded else size, []).append(agent)
    space = package.action_space(package.possible_agents[0])  # all motors of a robot have the same bounds
    return {
        GROUP if len(kinds) == 1 else agents[0]: GroupSpec(
            agents=tuple(agents),
            observation_space=spaces.Box(-np.inf, np.inf, (observation_size,), np.float32),
            action_space=spaces.Box(space.low[0], space.high[0], (action_size,), np.float32),
        )
        for (observation_size, action_size), agents in kinds.items()
    }


def _padding(sizes: Mapping[str, tuple[int, int]]) -> dict[str, str]:
    """Returns the sizes before padding, as facts for ``spec.metadata``."""
    observation_sizes, action_sizes = zip(*sizes.values(), strict=True)
    return {
        "observation_sizes": ",".join(map(str, observation_sizes)),
        "action_sizes": ",".join(map(str, action_sizes)),
    }


@contextmanager
def without_window() -> Iterator[None]:
    """Chooses EGL for the time being where nothing else can work and the user has not chosen.

    Without a choice, gymnasium takes GLFW, whose failure for want of a display it does not notice.
    """
    variable = "MUJOCO_GL"
    if sys.platform != "linux" or not {variable, "DISPLAY", "WAYLAND_DISPLAY"}.isdisjoint(os.environ):
        yield
        return
    os.environ[variable] = "egl"
    try:
        yield
    finally:
        del os.environ[variable]
