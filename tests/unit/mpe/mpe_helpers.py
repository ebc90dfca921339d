"""The package's particle worlds beside ours: copying states, and playing both."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch

from marl_lightning.envs.native.mpe import MPEVectorEnv, kernel

SCENARIOS = (
    "simple_v3",
    "simple_spread_v3",
    "simple_tag_v3",
    "simple_adversary_v3",
    "simple_speaker_listener_v4",
    "simple_reference_v3",
    "simple_push_v3",
    "simple_crypto_v3",
    "simple_world_comm_v3",
)


def make_package(scenario: str, **options: Any):
    """Returns the package's parallel environment."""
    return importlib.import_module(f"mpe2.{scenario}").parallel_env(**options)


def copy_world(raw, env: MPEVectorEnv, *, index: int = 0, time: int = 0) -> None:
    """Copies the state of the package's environment ``raw`` (unwrapped) into instance ``index`` of ours."""
    world, state = raw.world, env._state
    agents, landmarks = world.agents, world.landmarks

    def number(goal) -> int:
        return next(i for i, landmark in enumerate(landmarks) if landmark is goal)

    scenario = type(raw).__module__.rpartition(".")[2]
    if scenario in ("simple_adversary", "simple_push"):
        state.goal[index, 0] = number(agents[0].goal_a)
    elif scenario == "simple_speaker_listener":
        state.goal[index, 0] = number(agents[0].goal_b)
    elif scenario == "simple_reference":
        state.goal[index] = [number(agent.goal_b) for agent in agents]
    elif scenario == "simple_crypto":
        state.goal[index] = number(agents[0].goal_a), int(np.argmax(agents[2].key))
    state.time[index] = time
    state.position[index] = [entity.state.p_pos for entity in world.entities]
    state.velocity[index] = [agent.state.p_vel for agent in agents]
    state.message[index] = [agent.state.c for agent in agents]
    if scenario == "simple_tag":
        state.prey_speed[index] = raw.world.agents[-1].accel / 4.0  # exact
    kernel.write_instances(env._all, False, env._state, env._constants, env._buffers)


def crowd(raw, rng: np.random.Generator) -> None:
    """Moves everything into a small area and gives the agents random velocities."""
    shift, scale = rng.uniform(-1, 1, 2), rng.uniform(0.05, 0.6)
    for entity in raw.world.entities:
        entity.state.p_pos = entity.state.p_pos * scale + shift
    for agent in raw.world.agents:
        if agent.movable:
            agent.state.p_vel = rng.uniform(-1.5, 1.5, 2)


def random_actions(env: MPEVectorEnv, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Returns random actions ``[E, A, ...]`` by group; continuous ones go beyond their bounds or are exactly 0."""
    actions = {}
    for name, group in env.spec.groups.items():
        shape = (env.num_envs, group.num_agents)
        if group.is_discrete:
            actions[name] = rng.integers(group.action_size, size=shape)
        else:
            strength = rng.uniform(-0.3, 1.3, (*shape, group.action_size))
            silent = rng.random((*shape, 1)) < 0.2
            actions[name] = np.where(silent, 0.0, strength).astype(np.float32)
    return actions


def step_package(raw, env: MPEVectorEnv, actions: dict[str, np.ndarray]) -> tuple[list[np.ndarray], list[float]]:
    """Steps the package's world once, without its slow wrappers.

    Returns:
        The observation and the reward of every agent, in the package's order.
    """
    joint = []
    for name, group in env.spec.groups.items():
        for agent in range(group.num_agents):
            action = actions[name][0, agent]
            joint.append(int(action) if group.is_discrete else np.clip(action, 0, 1, dtype=np.float32))
    raw.current_actions = joint
    raw._execute_world_step()
    return [raw.observe(agent) for agent in raw.possible_agents], [raw.rewards[a] for a in raw.possible_agents]


def to_tensors(actions: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in actions.items()}
