"""The worlds of the particle scenarios as data: who is there, how large, fast and talkative, and what is seen.

Names, arguments and defaults are those of the package ``mpe2``; what a scenario rewards is in :mod:`.kernel`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from math import inf

import numpy as np

from marl_lightning.envs.native.mpe import kernel
from marl_lightning.envs.native.mpe.kernel import MOVES, Constants

Color = tuple[float, float, float]

_GRAY: Color = (0.25, 0.25, 0.25)
_MAX_FORESTS = 62  # forests are the bits of an int64


@dataclass(frozen=True, kw_only=True)
class Landmark:
    """A thing that never moves.

    Args:
        size: radius.
        collide: pushes colliding agents away.
        color: red, green and blue in [0, 1], for pictures and for observations that contain colors.
    """

    size: float = 0.05
    collide: bool = False
    color: Color = _GRAY


@dataclass(frozen=True, kw_only=True)
class Agent:
    """An agent.

    Args:
        name: such as ``"adversary_0"``.
        observation_size: length of its observation.
        size: radius.
        mass: force divided by acceleration.
        accel: force of a full push, the sensitivity of its controls.
        max_speed: greatest speed per unit of time.
        collide: pushes and is pushed by others that collide.
        movable: has the movement actions.
        silent: has no communication actions.
        adversary: is on the adversaries' side.
        color: see :class:`Landmark`.
    """

    name: str
    observation_size: int
    size: float = 0.05
    mass: float = 1.0
    accel: float = 5.0
    max_speed: float = inf
    collide: bool = False
    movable: bool = True
    silent: bool = True
    adversary: bool = False
    color: Color = _GRAY


@dataclass(frozen=True, kw_only=True)
class World:
    """A scenario with its arguments filled in.

    Args:
        rules: number of the scenario's rules in :mod:`.kernel`.
        agents: in the order of the package.
        landmarks: in the order of the package: obstacles, then food, then forests where there are such.
        dim_c: length of a message.
        landmark_range: start coordinates of landmarks are uniform in ``[-landmark_range, landmark_range)``; those of
            agents in ``[-1, 1)``.
        num_goals: random landmarks that are chosen at the start of an episode.
        local_ratio: share of an agent's own reward, the rest is the common reward; 1 without a common reward.
        num_food: landmarks that are food.
        num_forests: landmarks that are forests.
        agent_neighbors: nearest other agents that are observed, ``None`` for all.
        landmark_neighbors: nearest landmarks that are observed, ``None`` for all.
        terminate_on_success: the episode terminates when the scenario's aim is reached.
        stages: value of each stage of the curriculum: weight of collisions (spread) or speed of the prey (tag).
    """

    rules: int
    agents: tuple[Agent, ...]
    landmarks: tuple[Landmark, ...]
    dim_c: int = 2
    landmark_range: float = 1.0
    num_goals: int = 0
    local_ratio: float = 1.0
    num_food: int = 0
    num_forests: int = 0
    agent_neighbors: int | None = None
    landmark_neighbors: int | None = None
    terminate_on_success: bool = False
    stages: tuple[float, ...] = (1.0,)

    def action_size(self, agent: Agent, *, continuous: bool) -> int:
        """Number of discrete actions or of continuous action dimensions of an agent."""
        if continuous:
            return MOVES * agent.movable + self.dim_c * (not agent.silent)
        return (MOVES if agent.movable else 1) * (1 if agent.silent else self.dim_c)

    def constants(self, *, max_cycles: int, continuous: bool, stage: int, group_sizes: list[int]) -> Constants:
        """Returns what the kernels need.

        Args:
            max_cycles: env steps of an episode.
            continuous: whether actions are continuous.
            stage: stage of the curriculum.
            group_sizes: entries of all observations of each group.
        """
        agents, entities = self.agents, (*self.agents, *self.landmarks)
        # Landmarks do not move, so that only pairs with an agent matter.
        pairs = [
            (i, j)
            for i, j in combinations(range(len(entities)), 2)
            if entities[i].collide and entities[j].collide and i < len(agents)
        ]
        return Constants(
            rules=self.rules,
            num_agents=len(agents),
            num_entities=len(entities),
            num_adversaries=sum(agent.adversary for agent in agents),
            num_food=self.num_food,
            num_forests=self.num_forests,
            num_goals=self.num_goals,
            dim_c=self.dim_c,
            state_size=sum(agent.observation_size for agent in agents),
            limit=max_cycles,
            agent_neighbors=-1 if self.agent_neighbors is None else self.agent_neighbors,
            landmark_neighbors=-1 if self.landmark_neighbors is None else self.landmark_neighbors,
            continuous=continuous,
            terminate_on_success=self.terminate_on_success,
            landmark_range=self.landmark_range,
            local_ratio=float(self.local_ratio),
            difficulty=self.stages[stage],
            size=np.array([entity.size for entity in entities]),
            mass=np.array([agent.mass for agent in agents]),
            accel=np.array([agent.accel for agent in agents]),
            max_speed=np.array([agent.max_speed for agent in agents]),
            movable=np.array([agent.movable for agent in agents]),
            silent=np.array([agent.silent for agent in agents]),
            pairs=np.array(pairs, np.int64).reshape(-1, 2),
            num_actions=np.array([self.action_size(agent, continuous=continuous) for agent in agents], np.int64),
            color=np.array([landmark.color for landmark in self.landmarks]).reshape(-1, 3),
            group_sizes=np.array(group_sizes, np.int64),
        )


def simple() -> World:
    """One agent goes to the landmark: reward is the negative squared distance."""
    return World(
        rules=kernel.SIMPLE,
        agents=(Agent(name="agent_0", observation_size=4),),
        landmarks=(Landmark(color=(0.75, 0.25, 0.25)),),
        dim_c=0,
    )


def simple_spread(
    *,
    N: int = 3,  # noqa: N803 - the package's name
    local_ratio: float = 0.5,
    curriculum: bool = False,
    terminate_on_success: bool = False,
    num_agent_neighbors: int | None = None,
    num_landmark_neighbors: int | None = None,
) -> World:
    """``N`` agents cover ``N`` landmarks without bumping into each other.

    Args:
        N: number of agents and of landmarks.
        local_ratio: weight of an agent's own collisions; the distances of the landmarks have the rest.
        curriculum: collisions cost nothing in stage 0 and as usual in stage 1.
        terminate_on_success: the episode terminates when every landmark is within 0.1 of an agent.
        num_agent_neighbors: nearest other agents that are observed, ``None`` for all.
        num_landmark_neighbors: nearest landmarks that are observed, ``None`` for all.
    """
    _check_at_least(1, N=N)
    _check_ratio(local_ratio)
    _check_neighbors(num_agent_neighbors, num_landmark_neighbors)
    others, marks = _slots(N - 1, num_agent_neighbors), _slots(N, num_landmark_neighbors)
    size = 4 + 2 * marks + 4 * others
    return World(
        rules=kernel.SPREAD,
        agents=tuple(
            Agent(name=f"agent_{i}", observation_size=size, size=0.15, collide=True, color=(0.35, 0.35, 0.85))
            for i in range(N)
        ),
        landmarks=(Landmark(),) * N,
        local_ratio=local_ratio,
        agent_neighbors=num_agent_neighbors,
        landmark_neighbors=num_landmark_neighbors,
        terminate_on_success=terminate_on_success,
        stages=(0.0, 1.0) if curriculum else (1.0,),
    )


def simple_tag(
    *,
    num_good: int = 1,
    num_adversaries: int = 3,
    num_obstacles: int = 2,
    curriculum: bool = False,
    terminate_on_success: bool = False,
    num_agent_neighbors: int | None = None,
    num_landmark_neighbors: int | None = None,
) -> World:
    """Slow adversaries hunt fast good agents around obstacles.

    Args:
        num_good: good agents, the prey.
        num_adversaries: adversaries.
        num_obstacles: obstacles.
        curriculum: the prey has half of its speed in stage 0, three quarters in stage 1, all of it in stage 2. A new
            stage counts for episodes that begin in it.
        terminate_on_success: the episode terminates when all good agents are caught at once.
        num_agent_neighbors: nearest other agents that are observed, ``None`` for all.
        num_landmark_neighbors: nearest obstacles that are observed, ``None`` for all.
    """
    _check_at_least(0, num_obstacles=num_obstacles)
    _check_at_least(1, num_good=num_good, num_adversaries=num_adversaries)
    _check_neighbors(num_agent_neighbors, num_landmark_neighbors)
    others = _slots(num_good + num_adversaries - 1, num_agent_neighbors)
    common = 4 + 2 * _slots(num_obstacles, num_landmark_neighbors) + 2 * others

    def observation_size(seen_good: int) -> int:
        return common + 2 * (seen_good if num_agent_neighbors is None else others)

    hunters = _hunters(num_adversaries, observation_size=observation_size(num_good))
    prey = tuple(
        Agent(
            name=f"agent_{i}",
            observation_size=observation_size(num_good - 1),
            size=0.05,
            accel=4.0,
            max_speed=1.3,
            collide=True,
            color=(0.35, 0.85, 0.35),
        )
        for i in range(num_good)
    )
    return World(
        rules=kernel.TAG,
        agents=hunters + prey,
        landmarks=(Landmark(size=0.2, collide=True),) * num_obstacles,
        landmark_range=0.9,
        agent_neighbors=num_agent_neighbors,
        landmark_neighbors=num_landmark_neighbors,
        terminate_on_success=terminate_on_success,
        stages=(0.5, 0.75, 1.0) if curriculum else (1.0,),
    )


def simple_adversary(
    *,
    N: int = 2,  # noqa: N803 - the package's name
    num_agent_neighbors: int | None = None,
    num_landmark_neighbors: int | None = None,
) -> World:
    """``N`` good agents go to the goal among ``N`` landmarks and hide it from an adversary.

    Args:
        N: number of good agents and of landmarks.
        num_agent_neighbors: nearest other agents that are observed, ``None`` for all.
        num_landmark_neighbors: nearest landmarks that are observed, ``None`` for all.
    """
    _check_at_least(1, N=N)
    _check_neighbors(num_agent_neighbors, num_landmark_neighbors)
    size = 2 * _slots(N, num_landmark_neighbors) + 2 * _slots(N, num_agent_neighbors)
    adversary = Agent(name="adversary_0", observation_size=size, size=0.15, adversary=True, color=(0.85, 0.35, 0.35))
    good = tuple(
        Agent(name=f"agent_{i}", observation_size=size + 2, size=0.15, color=(0.35, 0.35, 0.85)) for i in range(N)
    )
    return World(
        rules=kernel.ADVERSARY,
        agents=(adversary, *good),
        landmarks=(Landmark(size=0.08, color=(0.15, 0.15, 0.15)),) * N,
        num_goals=1,
        agent_neighbors=num_agent_neighbors,
        landmark_neighbors=num_landmark_neighbors,
    )


def simple_speaker_listener() -> World:
    """A speaker that cannot move tells a listener to which of three landmarks to go."""
    colors = ((0.65, 0.15, 0.15), (0.15, 0.65, 0.15), (0.15, 0.15, 0.65))
    return World(
        rules=kernel.SPEAKER_LISTENER,
        agents=(
            Agent(name="speaker_0", observation_size=3, size=0.075, movable=False, silent=False),
            Agent(name="listener_0", observation_size=11, size=0.075),
        ),
        landmarks=tuple(Landmark(size=0.04, color=color) for color in colors),
        dim_c=3,
        num_goals=1,
    )


def simple_reference(*, local_ratio: float = 0.5) -> World:
    """Two agents tell each other to which of three landmarks the other one has to go.

    Args:
        local_ratio: weight of the partner's distance; the mean of both distances has the rest.
    """
    _check_ratio(local_ratio)
    colors = ((0.75, 0.25, 0.25), (0.25, 0.75, 0.25), (0.25, 0.25, 0.75))
    return World(
        rules=kernel.REFERENCE,
        agents=tuple(Agent(name=f"agent_{i}", observation_size=21, silent=False) for i in range(2)),
        landmarks=tuple(Landmark(color=color) for color in colors),
        dim_c=10,
        num_goals=2,
        local_ratio=local_ratio,
    )


def simple_push() -> World:
    """An adversary that does not know which of two landmarks is the goal pushes the good agent away from it."""
    return World(
        rules=kernel.PUSH,
        agents=(
            Agent(name="adversary_0", observation_size=8, collide=True, adversary=True, color=(0.75, 0.25, 0.25)),
            Agent(name="agent_0", observation_size=19, collide=True),
        ),
        landmarks=(Landmark(color=(0.1, 0.9, 0.1)), Landmark(color=(0.1, 0.1, 0.9))),
        num_goals=1,
    )


def simple_crypto() -> World:
    """Alice sends Bob one bit that Eve, who hears it too but has not the key, must not understand."""
    return World(
        rules=kernel.CRYPTO,
        agents=(
            Agent(
                name="eve_0",
                observation_size=4,
                movable=False,
                silent=False,
                adversary=True,
                color=(0.75, 0.25, 0.25),
            ),
            Agent(name="bob_0", observation_size=8, movable=False, silent=False),
            Agent(name="alice_0", observation_size=8, movable=False, silent=False),
        ),
        landmarks=(Landmark(color=(1.0, 0.0, 0.0)), Landmark(color=(0.0, 1.0, 0.0))),
        dim_c=4,
        num_goals=2,  # the bit and the key
    )


def simple_world_comm(
    *, num_good: int = 2, num_adversaries: int = 4, num_obstacles: int = 1, num_food: int = 2, num_forests: int = 2
) -> World:
    """Adversaries, led by one that sees all and speaks, hunt good agents that want food and hide in forests.

    Args:
        num_good: good agents.
        num_adversaries: adversaries, the leader included.
        num_obstacles: obstacles.
        num_food: landmarks at which good agents are rewarded.
        num_forests: forests, at most 62. Who is inside is seen only from inside and by the leader.
    """
    _check_at_least(0, num_obstacles=num_obstacles, num_forests=num_forests)
    _check_at_least(1, num_good=num_good, num_adversaries=num_adversaries, num_food=num_food)
    if num_forests > _MAX_FORESTS:
        raise ValueError(f"num_forests must be at most {_MAX_FORESTS}, got {num_forests}")
    dim_c = 4
    common = 4 + 2 * (num_obstacles + num_food + num_forests) + 2 * (num_good + num_adversaries - 1) + num_forests
    hunters = _hunters(num_adversaries, observation_size=common + 2 * num_good + dim_c)
    leader = Agent(
        name="leadadversary_0",
        observation_size=common + 2 * num_good + dim_c,
        size=0.075,
        accel=3.0,
        max_speed=1.0,
        collide=True,
        silent=False,
        adversary=True,
        color=(0.65, 0.15, 0.15),
    )
    prey = tuple(
        Agent(
            name=f"agent_{i}",
            observation_size=common + 2 * (num_good - 1),
            size=0.045,
            accel=4.0,
            max_speed=1.3,
            collide=True,
            color=(0.45, 0.95, 0.45),
        )
        for i in range(num_good)
    )
    return World(
        rules=kernel.WORLD_COMM,
        agents=(leader, *hunters[:-1], *prey),
        landmarks=(Landmark(size=0.2, collide=True),) * num_obstacles
        + (Landmark(size=0.03, color=(0.15, 0.15, 0.65)),) * num_food
        + (Landmark(size=0.3, color=(0.6, 0.9, 0.6)),) * num_forests,
        dim_c=dim_c,
        landmark_range=0.9,
        num_food=num_food,
        num_forests=num_forests,
    )


SCENARIOS: dict[str, Callable[..., World]] = {
    "simple_v3": simple,
    "simple_spread_v3": simple_spread,
    "simple_tag_v3": simple_tag,
    "simple_adversary_v3": simple_adversary,
    "simple_speaker_listener_v4": simple_speaker_listener,
    "simple_reference_v3": simple_reference,
    "simple_push_v3": simple_push,
    "simple_crypto_v3": simple_crypto,
    "simple_world_comm_v3": simple_world_comm,
}
"""Functions that return the world of each scenario, by the package's name of its version."""


def _hunters(count: int, *, observation_size: int) -> tuple[Agent, ...]:
    return tuple(
        Agent(
            name=f"adversary_{i}",
            observation_size=observation_size,
            size=0.075,
            accel=3.0,
            max_speed=1.0,
            collide=True,
            adversary=True,
            color=(0.85, 0.35, 0.35),
        )
        for i in range(count)
    )


def _slots(count: int, neighbors: int | None) -> int:
    """Entities that an observation has room for. There may be more room than entities."""
    return count if neighbors is None else neighbors


def _check_at_least(minimum: int, **counts: int) -> None:
    for name, count in counts.items():
        if not isinstance(count, int) or count < minimum:
            raise ValueError(f"{name} must be an integer of at least {minimum}, got {count!r}")


def _check_ratio(local_ratio: float) -> None:
    if not 0.0 <= local_ratio <= 1.0:
        raise ValueError(f"local_ratio must be between 0 and 1, got {local_ratio}")


def _check_neighbors(num_agent_neighbors: int | None, num_landmark_neighbors: int | None) -> None:
    neighbors = {"num_agent_neighbors": num_agent_neighbors, "num_landmark_neighbors": num_landmark_neighbors}
    _check_at_least(1, **{name: count for name, count in neighbors.items() if count is not None})
