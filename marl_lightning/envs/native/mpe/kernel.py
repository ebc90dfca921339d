"""Physics and rules of the particle scenarios as compiled functions of one instance, and the drivers that loop.

The compiled rules are in this one file because numba's on-disk cache only notices changes of the file of a driver.

Conventions: ``e`` is the instance; ``i`` and ``j`` are entities, agents first, then landmarks; ``s`` is the batch
:class:`State`, ``c`` the :class:`Constants`, ``b`` the :class:`Buffers`; ``out`` is a row that is written from index
``k`` on. Functions allocate nothing, raise nothing and call only each other.

Numbers are float64 and sums keep the order of the package ``mpe2``, so that positions and velocities are equal to the
last bit, with or without the JIT. A step moves everything with the velocities of before, and then changes the
velocities by the forces of before: this is what the package does, the original particle environments changed velocities
first.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import njit

from marl_lightning.envs.native.hashing import integer, mix, stream_key, uniform64

# Scenarios.
SIMPLE, SPREAD, TAG, ADVERSARY, SPEAKER_LISTENER, REFERENCE, PUSH, CRYPTO, WORLD_COMM = range(9)

# Movement actions. Of the continuous ones, each is the strength of a push in [0, 1].
STAY, LEFT, RIGHT, DOWN, UP = range(5)
MOVES = 5

# Purposes that keep the random numbers of different rules apart.
_PLACES, _GOALS = range(2)

_DT = 0.1
_DAMPING = 0.25
_CONTACT_FORCE = 100.0
_CONTACT_MARGIN = 1e-3
_ZERO32, _ONE32 = np.float32(0), np.float32(1)

_UNDERFLOW = 746.0  # exp(-746) is 0
_NEGLIGIBLE = 2.0**-54  # log1p(x) is x below

_CAPTURE_RADIUS = 0.1


class State(NamedTuple):
    """Game state of ``N`` instances with ``A`` agents and ``U`` entities, and scratch space.

    The fields before ``force`` are the state; the others live within a step.
    """

    seed: np.ndarray
    """``[N]`` int64, seed of the instance."""
    episode: np.ndarray
    """``[N]`` int64, episodes begun since seeding, minus one."""
    time: np.ndarray
    """``[N]`` int64, env steps made in the episode."""
    goal: np.ndarray
    """``[N, 2]`` int64, landmarks chosen for the episode, counted from the first landmark: the common goal or that of
    agent 1, and the goal of agent 0 (reference) or the key (crypto)."""
    prey_speed: np.ndarray
    """``[N]`` float64, factor of speed and acceleration of good agents in this episode."""
    position: np.ndarray
    """``[N, U, 2]`` float64."""
    velocity: np.ndarray
    """``[N, A, 2]`` float64, per unit of time."""
    message: np.ndarray
    """``[N, A, dim_c]`` float64, what each agent said in the last step, zeros if it is silent."""
    force: np.ndarray
    """``[N, A, 2]`` float64, force on each agent in this step."""
    forests: np.ndarray
    """``[N, A]`` int64, bit per forest that the agent is in."""


class Constants(NamedTuple):
    """What does not change between steps; see :class:`marl_lightning.envs.native.mpe.scenarios.World`."""

    rules: int
    num_agents: int
    num_entities: int
    num_adversaries: int
    """Adversaries come first."""
    num_food: int
    num_forests: int
    num_goals: int
    dim_c: int
    state_size: int
    limit: int
    agent_neighbors: int
    """-1 for all."""
    landmark_neighbors: int
    """-1 for all."""
    continuous: bool
    terminate_on_success: bool
    landmark_range: float
    local_ratio: float
    difficulty: float
    """Value of the stage of the curriculum."""
    size: np.ndarray
    """``[U]`` float64, radius."""
    mass: np.ndarray
    """``[A]`` float64."""
    accel: np.ndarray
    """``[A]`` float64, force of a full push."""
    max_speed: np.ndarray
    """``[A]`` float64."""
    movable: np.ndarray
    """``[A]`` bool."""
    silent: np.ndarray
    """``[A]`` bool."""
    pairs: np.ndarray
    """``[P, 2]`` int64, entities that collide; the first is an agent."""
    num_actions: np.ndarray
    """``[A]`` int64, number of discrete actions or of continuous action dimensions."""
    color: np.ndarray
    """``[L, 3]`` float64, colors of the landmarks."""
    group_sizes: np.ndarray
    """``[G]`` int64, entries of all observations of each group."""


class Buffers(NamedTuple):
    """Arrays that actions are read from and results are written to.

    They are one tuple because every tuple costs half a microsecond a call. ``state`` holds the observations of all
    agents in their order, ``observation`` the same numbers in one block a group, each
    ``[N, agents of the group, observation_size]``, flat so that the kernels are compiled only once.
    """

    choices: np.ndarray
    """``[N, A]`` int64, discrete actions; not read if actions are continuous."""
    controls: np.ndarray
    """``[N, A, d]`` float32, continuous actions, clipped to [0, 1] when used; not read if actions are discrete."""
    observation: np.ndarray
    """``[N * state_size]`` float32, of the next decision points."""
    state: np.ndarray
    """``[N, state_size]`` float32, of the next decision points."""
    final_observation: np.ndarray
    """``[N * state_size]`` float32, of the true successors of the instances whose episode ended."""
    final_state: np.ndarray
    """``[N, state_size]`` float32, of the true successors of the instances whose episode ended."""
    reward: np.ndarray
    """``[N, A]`` float32."""
    terminated: np.ndarray
    """``[N]`` bool."""
    truncated: np.ndarray
    """``[N]`` bool."""


# Division does not check for zero, so that nothing raises: as in the package, agents in exactly the same place get NaN.
# ``_nrt`` is numba's internal name of the switch for its reference-counted memory. Without it nothing can allocate, and
# taking an array out of a tuple costs no atomic operation.
_OPTIONS = {"error_model": "numpy", "_nrt": False}

# A call passes all fields of all tuples, some 200 numbers: rules that are short or used in one place are inlined.
_rule = njit(**_OPTIONS)
_inlined_rule = njit(**_OPTIONS, forceinline=True)
_driver = njit(**_OPTIONS, cache=True, nogil=True)


# -------- geometry


@_inlined_rule
def squared_distance(e, i, j, s):
    """Returns the squared distance of two entities."""
    dx = s.position[e, i, 0] - s.position[e, j, 0]
    dy = s.position[e, i, 1] - s.position[e, j, 1]
    return dx * dx + dy * dy


@_inlined_rule
def distance(e, i, j, s):
    """Returns the distance of two entities."""
    return np.sqrt(squared_distance(e, i, j, s))


@_inlined_rule
def touches(e, i, j, s, c):
    """Whether the circles of two entities overlap."""
    return distance(e, i, j, s) < c.size[i] + c.size[j]


@_rule
def nearest_distance(e, j, first, last, s):
    """Returns the distance of entity ``j`` and the nearest one of ``first <= i < last``."""
    nearest = math.inf
    for i in range(first, last):
        nearest = min(nearest, squared_distance(e, i, j, s))
    return np.sqrt(nearest)


# -------- start of an episode


@_rule
def start_episode(e, s, c):
    """Begins the next episode of instance ``e``."""
    s.episode[e] += 1
    s.time[e] = 0
    s.prey_speed[e] = c.difficulty if c.rules == TAG else 1.0
    key = stream_key(s.seed[e], s.episode[e], 0, _PLACES)
    for i in range(c.num_entities):
        reach = 1.0 if i < c.num_agents else c.landmark_range
        s.position[e, i, 0] = uniform64(mix(key, 2 * i), -reach, reach)
        s.position[e, i, 1] = uniform64(mix(key, 2 * i + 1), -reach, reach)
    for i in range(c.num_agents):
        s.velocity[e, i, 0] = 0.0
        s.velocity[e, i, 1] = 0.0
        for k in range(c.dim_c):
            s.message[e, i, k] = 0.0
    key = stream_key(s.seed[e], s.episode[e], 0, _GOALS)
    for k in range(c.num_goals):
        s.goal[e, k] = integer(mix(key, k), c.num_entities - c.num_agents)


# -------- actions and physics


@_inlined_rule
def clip(strength):
    """Returns the float32 clipped to [0, 1]."""
    return min(max(strength, _ZERO32), _ONE32)


@_inlined_rule
def act(e, choices, controls, s, c):
    """Turns the actions into forces and messages."""
    for i in range(c.num_agents):
        x, y = 0.0, 0.0
        word, column = 0, 0
        if c.continuous:
            if c.movable[i]:
                # The package subtracts in float32.
                x = np.float64(clip(controls[e, i, RIGHT]) - clip(controls[e, i, LEFT]))
                y = np.float64(clip(controls[e, i, UP]) - clip(controls[e, i, DOWN]))
                column = MOVES
        else:
            word = choices[e, i]
            if c.movable[i]:
                move, word = word % MOVES, word // MOVES
                if move == LEFT:
                    x = -1.0
                elif move == RIGHT:
                    x = 1.0
                elif move == DOWN:
                    y = -1.0
                elif move == UP:
                    y = 1.0
        accel = c.accel[i] * (s.prey_speed[e] if i >= c.num_adversaries else 1.0)
        s.force[e, i, 0] = x * accel
        s.force[e, i, 1] = y * accel
        if not c.silent[i]:
            for k in range(c.dim_c):
                if c.continuous:
                    s.message[e, i, k] = clip(controls[e, i, column + k])
                else:
                    s.message[e, i, k] = 1.0 if k == word else 0.0


@_inlined_rule
def push_apart(e, i, j, s, c):
    """Adds the contact forces between two entities: proportional to a soft maximum of 0 and the depth of contact."""
    dx = s.position[e, i, 0] - s.position[e, j, 0]
    dy = s.position[e, i, 1] - s.position[e, j, 1]
    centres = np.sqrt(dx * dx + dy * dy)
    gap = (centres - (c.size[i] + c.size[j])) / _CONTACT_MARGIN
    if gap > _UNDERFLOW:
        return
    depth = 0.0 if gap > 0.0 else -gap
    tail = math.exp(-abs(gap))
    depth += tail if tail < _NEGLIGIBLE else math.log1p(tail)
    depth *= _CONTACT_MARGIN
    x = _CONTACT_FORCE * dx / centres * depth
    y = _CONTACT_FORCE * dy / centres * depth
    if c.movable[i]:
        s.force[e, i, 0] += x
        s.force[e, i, 1] += y
    if j < c.num_agents and c.movable[j]:
        s.force[e, j, 0] -= x
        s.force[e, j, 1] -= y


@_inlined_rule
def move(e, i, s, c):
    """Moves agent ``i`` by its velocity and changes the velocity by the force on it."""
    s.position[e, i, 0] += s.velocity[e, i, 0] * _DT
    s.position[e, i, 1] += s.velocity[e, i, 1] * _DT
    x = s.velocity[e, i, 0] * (1.0 - _DAMPING) + s.force[e, i, 0] / c.mass[i] * _DT
    y = s.velocity[e, i, 1] * (1.0 - _DAMPING) + s.force[e, i, 1] / c.mass[i] * _DT
    if c.max_speed[i] < math.inf:
        limit = c.max_speed[i] * (s.prey_speed[e] if i >= c.num_adversaries else 1.0)
        speed = np.sqrt(x * x + y * y)
        if speed > limit:
            x = x / speed * limit
            y = y / speed * limit
    s.velocity[e, i, 0] = x
    s.velocity[e, i, 1] = y


@_inlined_rule
def run_physics(e, s, c):
    """Advances the world by one time step under the forces of the agents' actions."""
    for p in range(c.pairs.shape[0]):
        push_apart(e, c.pairs[p, 0], c.pairs[p, 1], s, c)
    for i in range(c.num_agents):
        if c.movable[i]:
            move(e, i, s, c)


# -------- rewards


@_rule
def count_collisions(e, i, first, last, s, c):
    """Number of entities of ``first <= j < last`` other than ``i`` that entity ``i`` touches."""
    count = 0
    for j in range(first, last):
        if j != i and touches(e, i, j, s, c):
            count += 1
    return count


@_rule
def count_catches(e, s, c):
    """Number of pairs of an adversary and a good agent that touch."""
    count = 0
    for i in range(c.num_adversaries, c.num_agents):
        count += count_collisions(e, i, 0, c.num_adversaries, s, c)
    return count


@_rule
def bound(coordinate):
    """Returns the cost of a coordinate near the border or beyond it."""
    x = abs(coordinate)
    if x < 0.9:
        return 0.0
    if x < 1.0:
        return (x - 0.9) * 10.0
    return min(math.exp(2.0 * x - 2.0), 10.0)


@_inlined_rule
def reward_spread(e, s, c, reward):
    """Distance of each landmark and its nearest agent, in common, and every agent's own collisions."""
    common = 0.0
    for j in range(c.num_agents, c.num_entities):
        common -= nearest_distance(e, j, 0, c.num_agents, s)
    for i in range(c.num_agents):
        own = -c.difficulty * count_collisions(e, i, 0, c.num_agents, s, c)
        reward[e, i] = common * (1.0 - c.local_ratio) + own * c.local_ratio


@_inlined_rule
def reward_tag(e, s, c, reward):
    """All catches count for every adversary, its own ones and leaving the field against a good agent."""
    catches = count_catches(e, s, c)
    for i in range(c.num_adversaries):
        reward[e, i] = 10.0 * catches
    for i in range(c.num_adversaries, c.num_agents):
        own = -10.0 * count_collisions(e, i, 0, c.num_adversaries, s, c)
        own -= bound(s.position[e, i, 0])
        own -= bound(s.position[e, i, 1])
        reward[e, i] = own


@_inlined_rule
def reward_adversary(e, s, c, reward):
    """Good agents: distance of the adversary and the goal minus that of the nearest good agent."""
    goal = c.num_agents + s.goal[e, 0]
    adversary = distance(e, 0, goal, s)
    good = -nearest_distance(e, goal, c.num_adversaries, c.num_agents, s) + adversary
    reward[e, 0] = -adversary
    for i in range(c.num_adversaries, c.num_agents):
        reward[e, i] = good


@_inlined_rule
def reward_reference(e, s, c, reward):
    """An agent's own reward is the distance of the *other* agent, which it guides, and that agent's goal."""
    own_0 = -distance(e, 1, c.num_agents + s.goal[e, 0], s)
    own_1 = -distance(e, 0, c.num_agents + s.goal[e, 1], s)
    common = (own_0 + own_1) / 2.0
    reward[e, 0] = common * (1.0 - c.local_ratio) + own_0 * c.local_ratio
    reward[e, 1] = common * (1.0 - c.local_ratio) + own_1 * c.local_ratio


@_inlined_rule
def reward_push(e, s, c, reward):
    """The good agent wants to be at the goal; the adversary wants that less for it than for itself."""
    goal = c.num_agents + s.goal[e, 0]
    good = distance(e, 1, goal, s)
    reward[e, 0] = good - distance(e, 0, goal, s)
    reward[e, 1] = -good


@_inlined_rule
def misunderstanding(e, i, s, c):
    """Squared distance of what agent ``i`` said and the bit as a one-hot vector; 0 if it said nothing."""
    silent = True
    total = 0.0
    for k in range(c.dim_c):
        word = s.message[e, i, k]
        if word != 0.0:
            silent = False
        difference = word - (1.0 if k == s.goal[e, 0] else 0.0)
        total += difference * difference
    return 0.0 if silent else total


@_inlined_rule
def reward_crypto(e, s, c, reward):
    """Alice and Bob want Bob (1) to repeat the bit and Eve (0) not to."""
    eve = misunderstanding(e, 0, s, c)
    reward[e, 0] = -eve
    for i in range(1, c.num_agents):
        reward[e, i] = eve - misunderstanding(e, 1, s, c)


@_inlined_rule
def reward_world_comm(e, s, c, reward):
    """Adversaries: all catches and being near a good agent. Good agents: food, minus catches and leaving the field."""
    catches = count_catches(e, s, c)
    food_end = c.num_entities - c.num_forests
    food_start = food_end - c.num_food
    for i in range(c.num_adversaries):
        near = nearest_distance(e, i, c.num_adversaries, c.num_agents, s)
        reward[e, i] = -0.1 * near + 5.0 * catches
    for i in range(c.num_adversaries, c.num_agents):
        own = -5.0 * count_collisions(e, i, 0, c.num_adversaries, s, c)
        own -= 2.0 * bound(s.position[e, i, 0])
        own -= 2.0 * bound(s.position[e, i, 1])
        own += 2.0 * count_collisions(e, i, food_start, food_end, s, c)
        reward[e, i] = own - 0.05 * nearest_distance(e, i, food_start, food_end, s)


@_inlined_rule
def reward_step(e, s, c, reward):
    """Writes the rewards of instance ``e`` after the physics."""
    if c.rules == SPREAD:
        reward_spread(e, s, c, reward)
    elif c.rules == TAG:
        reward_tag(e, s, c, reward)
    elif c.rules == ADVERSARY:
        reward_adversary(e, s, c, reward)
    elif c.rules == REFERENCE:
        reward_reference(e, s, c, reward)
    elif c.rules == PUSH:
        reward_push(e, s, c, reward)
    elif c.rules == CRYPTO:
        reward_crypto(e, s, c, reward)
    elif c.rules == WORLD_COMM:
        reward_world_comm(e, s, c, reward)
    elif c.rules == SPEAKER_LISTENER:
        shared = -squared_distance(e, 1, c.num_agents + s.goal[e, 0], s)
        reward[e, 0] = shared
        reward[e, 1] = shared
    else:
        reward[e, 0] = -squared_distance(e, 0, 1, s)


@_rule
def has_succeeded(e, s, c):
    """Whether all landmarks are covered (spread) or all good agents are caught (tag)."""
    missing = 0
    if c.rules == SPREAD:
        for j in range(c.num_agents, c.num_entities):
            if nearest_distance(e, j, 0, c.num_agents, s) >= _CAPTURE_RADIUS:
                missing += 1
    else:
        for i in range(c.num_adversaries, c.num_agents):
            if count_collisions(e, i, 0, c.num_adversaries, s, c) == 0:
                missing += 1
    return missing == 0


# -------- decision points


@_inlined_rule
def write_two(out, k, x, y):
    """Writes two numbers and returns the index after them."""
    out[k] = x
    out[k + 1] = y
    return k + 2


@_inlined_rule
def write_zeros(out, k, count):
    """Writes zeros and returns the index after them."""
    for _ in range(count):
        out[k] = _ZERO32
        k += 1
    return k


@_inlined_rule
def write_position(out, k, e, i, s):
    """Writes the position of entity ``i`` and returns the index after it."""
    return write_two(out, k, s.position[e, i, 0], s.position[e, i, 1])


@_inlined_rule
def write_velocity(out, k, e, i, s):
    """Writes the velocity of agent ``i`` and returns the index after it."""
    return write_two(out, k, s.velocity[e, i, 0], s.velocity[e, i, 1])


@_inlined_rule
def write_relative(out, k, e, i, j, s):
    """Writes the position of entity ``j`` as seen from agent ``i`` and returns the index after it."""
    x = s.position[e, j, 0] - s.position[e, i, 0]
    y = s.position[e, j, 1] - s.position[e, i, 1]
    return write_two(out, k, x, y)


@_inlined_rule
def write_message(out, k, e, i, s, c):
    """Writes what agent ``i`` said and returns the index after it."""
    for word in range(c.dim_c):
        out[k] = s.message[e, i, word]
        k += 1
    return k


@_inlined_rule
def write_color(out, k, landmark, c):
    """Writes the color of a landmark, counted from the first landmark, and returns the index after it."""
    for channel in range(3):
        out[k] = c.color[landmark, channel]
        k += 1
    return k


@_inlined_rule
def write_one_hot(out, k, index, size):
    """Writes a one-hot vector and returns the index after it."""
    for column in range(size):
        out[k] = 1.0 if column == index else 0.0
        k += 1
    return k


@_rule
def find_next(e, i, first, last, far, previous, s):
    """Returns the nearest entity of ``first <= j < last`` after ``previous`` in the order of distance from ``i``.

    Entities at equal distances are ordered by their index. The result is -1 if there is none, and never ``i`` itself.

    Args:
        far: distance of ``previous``, -1 to begin.
        previous: entity found before, -1 to begin.

    Returns:
        Its distance and its index.
    """
    nearest, found = math.inf, -1
    for j in range(first, last):
        if j != i:
            d = distance(e, i, j, s)
            if d < nearest and (d > far or (d == far and j > previous)):
                nearest, found = d, j
    return nearest, found


@_inlined_rule
def write_all(out, k, e, i, first, last, s):
    """Writes the relative positions of all entities ``first <= j < last`` but ``i``; returns the index after them."""
    for j in range(first, last):
        if j != i:
            k = write_relative(out, k, e, i, j, s)
    return k


@_rule
def write_nearest(out, k, e, i, first, last, neighbors, s):
    """Writes the relative positions of the nearest entities of ``first <= j < last`` but ``i``.

    Returns the index after them. There may be more room for neighbors than entities; it is filled with zeros.
    """
    far, j = -1.0, -1
    for slot in range(neighbors):
        far, j = find_next(e, i, first, last, far, j, s)
        if j < 0:
            return write_zeros(out, k, 2 * (neighbors - slot))
        k = write_relative(out, k, e, i, j, s)
    return k


@_inlined_rule
def write_agents(out, k, e, i, s, c):
    """Writes the relative positions of the other agents that agent ``i`` observes; returns the index after them."""
    if c.agent_neighbors < 0:
        return write_all(out, k, e, i, 0, c.num_agents, s)
    return write_nearest(out, k, e, i, 0, c.num_agents, c.agent_neighbors, s)


@_inlined_rule
def write_landmarks(out, k, e, i, s, c):
    """Writes the relative positions of the landmarks that agent ``i`` observes; returns the index after them."""
    if c.landmark_neighbors < 0:
        return write_all(out, k, e, i, c.num_agents, c.num_entities, s)
    return write_nearest(out, k, e, i, c.num_agents, c.num_entities, c.landmark_neighbors, s)


@_rule
def write_good_velocities(out, k, e, i, s, c):
    """Writes the velocities of the good agents that agent ``i`` observes and returns the index after them.

    With a limited number of neighbors, each neighbor has its place, which is zero for an adversary.
    """
    if c.agent_neighbors < 0:
        for j in range(c.num_adversaries, c.num_agents):
            if j != i:
                k = write_velocity(out, k, e, j, s)
        return k
    far, j = -1.0, -1
    for slot in range(c.agent_neighbors):
        far, j = find_next(e, i, 0, c.num_agents, far, j, s)
        if j < 0:
            return write_zeros(out, k, 2 * (c.agent_neighbors - slot))
        k = write_velocity(out, k, e, j, s) if j >= c.num_adversaries else write_zeros(out, k, 2)
    return k


@_inlined_rule
def find_forests(e, s, c):
    """Notes which forests each agent is in."""
    first = c.num_entities - c.num_forests
    for i in range(c.num_agents):
        bits = 0
        for f in range(c.num_forests):
            if touches(e, i, first + f, s, c):
                bits |= 1 << f
        s.forests[e, i] = bits


@_inlined_rule
def is_visible(e, i, j, s):
    """Whether agent ``i`` sees agent ``j``: both in the open or in the same forest; the leader (0) sees all."""
    mine, other = s.forests[e, i], s.forests[e, j]
    return i == 0 or (mine & other) != 0 or (mine | other) == 0


@_inlined_rule
def write_forests(out, k, e, i, s, c):
    """Writes 1 for each forest that agent ``i`` is in and -1 for each other one, and returns the index after them."""
    for f in range(c.num_forests):
        out[k] = 1.0 if (s.forests[e, i] >> f) & 1 else -1.0
        k += 1
    return k


@_inlined_rule
def observe_simple(out, e, s, c):
    """Velocity and landmark."""
    k = write_velocity(out, 0, e, 0, s)
    write_landmarks(out, k, e, 0, s, c)


@_inlined_rule
def observe_spread(out, e, s, c):
    """Velocity, position, landmarks, other agents, and their messages of two numbers: zeros, since all are silent."""
    k = 0
    for i in range(c.num_agents):
        k = write_velocity(out, k, e, i, s)
        k = write_position(out, k, e, i, s)
        k = write_landmarks(out, k, e, i, s, c)
        start = k
        k = write_agents(out, k, e, i, s, c)
        k = write_zeros(out, k, k - start)


@_inlined_rule
def observe_tag(out, e, s, c):
    """Velocity, position, obstacles, other agents, velocities of good agents."""
    k = 0
    for i in range(c.num_agents):
        k = write_velocity(out, k, e, i, s)
        k = write_position(out, k, e, i, s)
        k = write_landmarks(out, k, e, i, s, c)
        k = write_agents(out, k, e, i, s, c)
        k = write_good_velocities(out, k, e, i, s, c)


@_inlined_rule
def observe_adversary(out, e, s, c):
    """Goal, which the adversary does not know, landmarks and other agents."""
    k = 0
    for i in range(c.num_agents):
        if i >= c.num_adversaries:
            k = write_relative(out, k, e, i, c.num_agents + s.goal[e, 0], s)
        k = write_landmarks(out, k, e, i, s, c)
        k = write_agents(out, k, e, i, s, c)


@_inlined_rule
def observe_speaker_listener(out, e, s, c):
    """The speaker sees the color of the goal; the listener its velocity, the landmarks and the message."""
    k = write_color(out, 0, s.goal[e, 0], c)
    k = write_velocity(out, k, e, 1, s)
    k = write_landmarks(out, k, e, 1, s, c)
    write_message(out, k, e, 0, s, c)


@_inlined_rule
def observe_reference(out, e, s, c):
    """Velocity, landmarks, color of the other agent's goal, message of the other agent."""
    k = 0
    for i in range(c.num_agents):
        k = write_velocity(out, k, e, i, s)
        k = write_landmarks(out, k, e, i, s, c)
        k = write_color(out, k, s.goal[e, i], c)
        k = write_message(out, k, e, 1 - i, s, c)


@_inlined_rule
def observe_push(out, e, s, c):
    """Velocity, landmarks, other agent; the good agent (1) also sees the goal, its own color and those of landmarks."""
    goal = s.goal[e, 0]
    k = write_velocity(out, 0, e, 0, s)
    k = write_landmarks(out, k, e, 0, s, c)
    k = write_agents(out, k, e, 0, s, c)
    k = write_velocity(out, k, e, 1, s)
    k = write_relative(out, k, e, 1, c.num_agents + goal, s)
    for channel in range(3):
        out[k] = 0.75 if channel == goal + 1 else 0.25  # its own color tells the goal
        k += 1
    k = write_landmarks(out, k, e, 1, s, c)
    for landmark in range(c.num_entities - c.num_agents):
        k = write_color(out, k, landmark, c)
    write_agents(out, k, e, 1, s, c)


@_inlined_rule
def observe_crypto(out, e, s, c):
    """Eve hears the message, Bob has the key and hears the message, Alice has the bit and the key."""
    bit, key = s.goal[e, 0], s.goal[e, 1]
    k = write_message(out, 0, e, 2, s, c)
    k = write_one_hot(out, k, key, c.dim_c)
    k = write_message(out, k, e, 2, s, c)
    k = write_one_hot(out, k, bit, c.dim_c)
    write_one_hot(out, k, key, c.dim_c)


@_inlined_rule
def observe_world_comm(out, e, s, c):
    """Velocity, position, landmarks, visible agents and velocities of good ones, own forests, the leader's message.

    Good agents have the forests before the velocities, and do not hear the message.
    """
    find_forests(e, s, c)
    k = 0
    for i in range(c.num_agents):
        is_adversary = i < c.num_adversaries
        k = write_velocity(out, k, e, i, s)
        k = write_position(out, k, e, i, s)
        k = write_landmarks(out, k, e, i, s, c)
        for j in range(c.num_agents):
            if j != i:
                k = write_relative(out, k, e, i, j, s) if is_visible(e, i, j, s) else write_zeros(out, k, 2)
        if not is_adversary:
            k = write_forests(out, k, e, i, s, c)
        for j in range(c.num_adversaries, c.num_agents):
            if j != i:
                k = write_velocity(out, k, e, j, s) if is_visible(e, i, j, s) else write_zeros(out, k, 2)
        if is_adversary:
            k = write_forests(out, k, e, i, s, c)
            k = write_message(out, k, e, 0, s, c)


@_rule
def observe(e, s, c, observation, state):
    """Writes the decision point of instance ``e``."""
    row = state[e]
    if c.rules == SPREAD:
        observe_spread(row, e, s, c)
    elif c.rules == TAG:
        observe_tag(row, e, s, c)
    elif c.rules == ADVERSARY:
        observe_adversary(row, e, s, c)
    elif c.rules == SPEAKER_LISTENER:
        observe_speaker_listener(row, e, s, c)
    elif c.rules == REFERENCE:
        observe_reference(row, e, s, c)
    elif c.rules == PUSH:
        observe_push(row, e, s, c)
    elif c.rules == CRYPTO:
        observe_crypto(row, e, s, c)
    elif c.rules == WORLD_COMM:
        observe_world_comm(row, e, s, c)
    else:
        observe_simple(row, e, s, c)
    start, block = 0, 0
    for g in range(c.group_sizes.shape[0]):
        size = c.group_sizes[g]
        first = block + e * size
        # Indices that start at 0 let the compiler copy many numbers at a time.
        source, target = row[start : start + size], observation[first : first + size]
        for k in range(size):
            target[k] = source[k]
        start += size
        block += s.time.shape[0] * size


# -------- step


@_inlined_rule
def are_legal(s, c, b):
    """Whether all actions of all instances are legal."""
    for e in range(s.time.shape[0]):
        for i in range(c.num_agents):
            if not c.continuous:
                if not 0 <= b.choices[e, i] < c.num_actions[i]:
                    return False
                continue
            for k in range(c.num_actions[i]):
                if not math.isfinite(b.controls[e, i, k]):
                    return False
    return True


@_inlined_rule
def step_instance(e, s, c, b):
    """Makes one env step of instance ``e``; at the end of the episode keeps the successor and begins the next one."""
    act(e, b.choices, b.controls, s, c)
    run_physics(e, s, c)
    reward_step(e, s, c, b.reward)
    s.time[e] += 1
    truncated = s.time[e] >= c.limit
    # As in the package, a success in the last step is a truncation.
    terminated = c.terminate_on_success and not truncated and has_succeeded(e, s, c)
    b.truncated[e] = truncated
    b.terminated[e] = terminated
    if truncated or terminated:
        observe(e, s, c, b.final_observation, b.final_state)
        start_episode(e, s, c)
    observe(e, s, c, b.observation, b.state)


# -------- drivers


@_driver
def step_instances(first, last, s, c, b):
    """Makes one env step of the instances ``first <= e < last``. Threads may step disjoint ranges at the same time.

    Args:
        first: first instance.
        last: instance after the last one.
        s: state, changed in place.
        c: constants.
        b: actions and results.

    Returns:
        Whether the actions of *all* instances are legal. If not, nothing is changed, in any range.
    """
    if not are_legal(s, c, b):
        return False
    for e in range(first, last):
        step_instance(e, s, c, b)
    return True


@_driver
def write_instances(mask, begin, s, c, b):
    """Writes the decision points of the instances of ``mask`` (``[N]`` bool), which ``begin`` an episode before."""
    for e in range(mask.shape[0]):
        if mask[e]:
            if begin:
                start_episode(e, s, c)
            observe(e, s, c, b.observation, b.state)
