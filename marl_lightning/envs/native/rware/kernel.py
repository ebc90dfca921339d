"""The rules of the robotic warehouse as compiled functions of one instance, and the drivers that loop over instances.

The rules are in this one file because numba's on-disk cache only notices changes of the file of a driver.

Conventions: ``e`` is the instance, ``i`` and ``j`` are agents, ``k`` is a shelf; ``s`` is the batch :class:`State`,
``c`` the :class:`Constants`. Functions allocate nothing, raise nothing and call only each other. Numbers are integers
but for rewards and what is shown; literals are typed (``ONE``), never plain Python floats, so that the same code
without the JIT (``NUMBA_DISABLE_JIT=1``) gives equal results.

Two layers of a grid say who and which shelf is in a cell. They have a margin of ``sensor_range`` cells of nothing on
each side, so that the surroundings of every agent can be read without looking for the edge of the map.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from marl_lightning.envs.native.hashing import integer, mix, stream_key
from marl_lightning.envs.native.rware.layout import NUM_ACTIONS, NUM_DIRECTIONS
from marl_lightning.envs.native.rware.options import IMAGE_LAYERS, REWARD_TYPES

ZERO, HALF, ONE = np.float32(0), np.float32(0.5), np.float32(1)

# Actions.
NONE, FORWARD, TURN_LEFT, TURN_RIGHT, TOGGLE_LOAD = range(NUM_ACTIONS)

# Directions, and what follows from them.
UP, DOWN, LEFT, RIGHT = range(NUM_DIRECTIONS)
_COLUMNS_AHEAD, _ROWS_AHEAD = (0, 0, -1, 1), (-1, 1, 0, 0)
_LEFT_OF, _RIGHT_OF = (LEFT, RIGHT, DOWN, UP), (RIGHT, LEFT, UP, DOWN)

# Columns of agents; those of shelves, places and goals are X and Y.
X, Y, DIRECTION, SHELF, DELIVERED = range(5)

NO_SHELF = -1

# Layers of the grid.
AGENTS, SHELVES = range(2)

# Columns of plans, and what is ahead of an agent if it is not another agent. The first two are X and Y of its target.
AHEAD, QUEUE, MOVES = range(2, 5)
STAY, FREE = -1, -2

# What is below the agents and shelves, and beyond the edge of the map.
PLACE, WAY, GOAL, NOTHING = range(4)

INDIVIDUAL, GLOBAL, TWO_STAGE = range(len(REWARD_TYPES))
_SHELF_LAYER, _REQUEST_LAYER, _AGENT_LAYER, _DIRECTION_LAYER, _LOAD_LAYER, _GOAL_LAYER, _ACCESSIBLE_LAYER = range(
    len(IMAGE_LAYERS)
)

# Purposes that keep the random numbers of different rules apart.
_AGENT_CELL, _AGENT_DIRECTIONS, _FIRST_REQUESTS, NEXT_REQUEST = range(4)


class State(NamedTuple):
    """Game state of ``N`` instances with ``A`` agents, ``S`` shelves and ``M`` bits of messages, and scratch space.

    The fields before ``grid`` are the state; the grid follows from it, and plans live within a step.
    """

    seed: np.ndarray
    """``[N]`` int64, seed of the instance."""
    episode: np.ndarray
    """``[N]`` int64, episodes begun since seeding, minus one."""
    time: np.ndarray
    """``[N]`` int64, env steps made in the episode."""
    inactive: np.ndarray
    """``[N]`` int64, env steps since the last delivery or the start of the episode."""
    agents: np.ndarray
    """``[N, A, 5]`` int64: column, row, direction, the shelf that is carried or ``NO_SHELF``, and whether a requested
    shelf was delivered and not put back yet (only if rewards are in two stages)."""
    messages: np.ndarray
    """``[N, A, M]`` int64, bits that the agents tell."""
    shelves: np.ndarray
    """``[N, S, 2]`` int64: column, row."""
    requested: np.ndarray
    """``[N, S]`` bool, the shelf is requested."""
    grid: np.ndarray
    """``[N, 2, H + 2 * sensor_range, W + 2 * sensor_range]`` int32, one plus the agent in the cell, or 0, and the same
    for shelves."""
    plans: np.ndarray
    """``[N, A, 5]`` int64: column and row of the target, which is the cell that the agent wants to be in after this
    step; the agent that is there now, ``FREE``, or ``STAY`` if the agent does not go forward; agents of the longest
    queue that the agent heads, itself included; whether the agent reaches its target."""


class Constants(NamedTuple):
    """What does not change between steps: scenario and options."""

    height: int
    width: int
    num_agents: int
    num_shelves: int
    num_requests: int
    sensor_range: int
    msg_bits: int
    limit: int
    """Env steps of an episode, 0 for any number."""
    max_inactivity: int
    """Env steps without a delivery that end an episode, 0 for any number."""
    reward_type: int
    images: bool
    directional: bool
    normalised: bool
    ground: np.ndarray
    """``[H + 2 * sensor_range, W + 2 * sensor_range]`` int64: ``PLACE``, where alone shelves may be put down, ``WAY``,
    ``GOAL``, and ``NOTHING`` in the margin."""
    goals: np.ndarray
    """``[G, 2]`` int64."""
    places: np.ndarray
    """``[S, 2]`` int64, where the shelves start."""
    layers: np.ndarray
    """``[L]`` int64, layers of images."""


class View(NamedTuple):
    """Arrays that a decision point is written to. All actions are legal and all agents alive, always."""

    observation: np.ndarray
    """``[N, A, O]`` float32, images flattened."""
    state: np.ndarray
    """``[N, S]`` float32."""


class Outcome(NamedTuple):
    """Arrays that the outcome of a step is written to, ``[N]`` unless noted."""

    reward: np.ndarray
    """``[N, A]`` float32."""
    terminated: np.ndarray
    truncated: np.ndarray
    deliveries: np.ndarray


# Division does not check for zero, so that nothing raises. ``_nrt`` is numba's internal name of the switch for its
# reference-counted memory. Without it nothing can allocate, and taking an array out of a tuple costs no atomic
# operation.
_OPTIONS = {"error_model": "numpy", "_nrt": False}

_rule = njit(**_OPTIONS)
_driver = njit(**_OPTIONS, cache=True, nogil=True)


# -------- grid


@_rule
def put(layer, e, unit, entry, s, c):
    """Writes ``entry`` into the cell of ``unit``, an agent or a shelf."""
    s.grid[e, layer, unit[Y] + c.sensor_range, unit[X] + c.sensor_range] = entry


@_rule
def look(layer, e, x, y, s, c):
    """Returns the agent or the shelf in column ``x`` and row ``y``, -1 if there is none."""
    return s.grid[e, layer, y + c.sensor_range, x + c.sensor_range] - 1


@_rule
def ground_below(unit, c):
    """Returns what is below ``unit``."""
    return c.ground[unit[Y] + c.sensor_range, unit[X] + c.sensor_range]


@_rule
def clear_grid(e, s):
    """Empties the grid."""
    for layer in range(2):
        for line in range(s.grid.shape[2]):
            for column in range(s.grid.shape[3]):
                s.grid[e, layer, line, column] = 0


@_rule
def fill_grid(e, s, c):
    """Writes the grid from the state."""
    clear_grid(e, s)
    for k in range(c.num_shelves):
        put(SHELVES, e, s.shelves[e, k], k + 1, s, c)
    for i in range(c.num_agents):
        put(AGENTS, e, s.agents[e, i], i + 1, s, c)


# -------- start of episode


@_rule
def episode_key(e, purpose, s):
    """Returns the key of the random numbers of this episode for one rule."""
    return stream_key(s.seed[e], s.episode[e], 0, purpose)


@_rule
def spawn_agents(e, s, c):
    """Gives the agents different uniformly random cells, whatever is there, and random directions."""
    cells = episode_key(e, _AGENT_CELL, s)
    directions = episode_key(e, _AGENT_DIRECTIONS, s)
    for i in range(c.num_agents):
        key = mix(cells, i)
        attempt = 0
        searching = True
        # Ends, since there are at least as many cells as agents.
        while searching:
            cell = integer(mix(key, attempt), c.height * c.width)
            x, y = cell % c.width, cell // c.width
            searching = look(AGENTS, e, x, y, s, c) >= 0
            attempt += 1
        agent = s.agents[e, i]
        agent[X] = x
        agent[Y] = y
        agent[DIRECTION] = integer(mix(directions, i), NUM_DIRECTIONS)
        agent[SHELF] = NO_SHELF
        agent[DELIVERED] = 0
        put(AGENTS, e, agent, i + 1, s, c)
        for bit in range(c.msg_bits):
            s.messages[e, i, bit] = 0


@_rule
def place_shelves(e, s, c):
    """Puts all shelves into their places and requests as many as the game says, all subsets being equally likely."""
    key = episode_key(e, _FIRST_REQUESTS, s)
    missing = c.num_requests
    for k in range(c.num_shelves):
        s.shelves[e, k, X] = c.places[k, X]
        s.shelves[e, k, Y] = c.places[k, Y]
        put(SHELVES, e, s.shelves[e, k], k + 1, s, c)
        # Each of the remaining shelves is as likely as the others to be among the missing ones.
        s.requested[e, k] = integer(mix(key, k), c.num_shelves - k) < missing
        if s.requested[e, k]:
            missing -= 1


@_rule
def start_episode(e, s, c):
    """Begins the next episode of instance ``e``."""
    s.episode[e] += 1
    s.time[e] = 0
    s.inactive[e] = 0
    clear_grid(e, s)
    place_shelves(e, s, c)
    spawn_agents(e, s, c)


# -------- decision point


@_rule
def flag(condition):
    """Returns 1 if the condition holds, else 0."""
    return ONE if condition else ZERO


@_rule
def coordinate(position, extent, normalised):
    """Returns a column or row as it is shown, for a map of ``extent`` columns or rows."""
    if normalised:
        return np.float32(np.float64(position) / np.float64(extent - 1))
    return np.float32(position)


@_rule
def write_direction(row, start, direction):
    """Writes a direction one-hot to ``row[start:]``."""
    for other in range(NUM_DIRECTIONS):
        row[start + other] = ZERO
    row[start + direction] = ONE


@_rule
def write_list_observation(e, i, s, c, view):
    """Writes what agent ``i`` sees as a list: itself, then the cells around it, row by row.

    Of a cell these are an agent, its direction and its message, then a shelf and whether it is requested. Where there
    is no agent, the direction is that of an agent that looks up, as in the package.
    """
    row = view.observation[e, i]
    agent = s.agents[e, i]
    x, y = agent[X], agent[Y]
    row[0] = coordinate(x, c.width, c.normalised)
    row[1] = coordinate(y, c.height, c.normalised)
    row[2] = flag(agent[SHELF] != NO_SHELF)
    write_direction(row, 3, agent[DIRECTION])
    row[3 + NUM_DIRECTIONS] = flag(ground_below(agent, c) != PLACE)
    start = 4 + NUM_DIRECTIONS
    # With the margin of the grid, the upper left cell in sight is the agent's own position. There is no function for a
    # cell: calls with the whole state for every cell would double the time of a step.
    for line in range(y, y + 2 * c.sensor_range + 1):
        for column in range(x, x + 2 * c.sensor_range + 1):
            j = s.grid[e, AGENTS, line, column] - 1
            row[start] = flag(j >= 0)
            write_direction(row, start + 1, s.agents[e, j, DIRECTION] if j >= 0 else UP)
            start += 1 + NUM_DIRECTIONS
            for bit in range(c.msg_bits):
                row[start + bit] = np.float32(s.messages[e, j, bit]) if j >= 0 else ZERO
            start += c.msg_bits
            k = s.grid[e, SHELVES, line, column] - 1
            row[start] = flag(k >= 0)
            row[start + 1] = flag(k >= 0 and s.requested[e, k])
            start += 2


@_rule
def image_entry(layer, e, column, line, s, c):
    """Returns the entry of one layer of images for a cell of the grid."""
    i = s.grid[e, AGENTS, line, column] - 1
    k = s.grid[e, SHELVES, line, column] - 1
    if layer == _SHELF_LAYER:
        return flag(k >= 0)
    if layer == _REQUEST_LAYER:
        return flag(k >= 0 and s.requested[e, k])
    if layer == _AGENT_LAYER:
        return flag(i >= 0)
    if layer == _DIRECTION_LAYER:
        return np.float32(s.agents[e, i, DIRECTION] + 1) if i >= 0 else ZERO
    if layer == _LOAD_LAYER:
        return flag(i >= 0 and s.agents[e, i, SHELF] != NO_SHELF)
    if layer == _GOAL_LAYER:
        return flag(c.ground[line, column] == GOAL)
    return flag(i < 0 and c.ground[line, column] != NOTHING)


@_rule
def write_image_observation(e, i, s, c, view):
    """Writes what agent ``i`` sees as pictures around it, which are turned such that it looks up if directional."""
    row = view.observation[e, i]
    agent = s.agents[e, i]
    direction = agent[DIRECTION] if c.directional else UP
    last = 2 * c.sensor_range
    start = 0
    for layer in c.layers:
        for v in range(last + 1):
            for u in range(last + 1):
                if direction == UP:
                    line, column = v, u
                elif direction == DOWN:
                    line, column = last - v, last - u
                elif direction == LEFT:
                    line, column = last - u, v
                else:
                    line, column = u, last - v
                row[start] = image_entry(layer, e, agent[X] + column, agent[Y] + line, s, c)
                start += 1


@_rule
def write_state(e, s, c, view):
    """Writes the global state: agents, shelves, and how close the end for lack of deliveries is, if there is one."""
    row = view.state[e]
    start = 0
    for i in range(c.num_agents):
        agent = s.agents[e, i]
        row[start] = coordinate(agent[X], c.width, c.normalised)
        row[start + 1] = coordinate(agent[Y], c.height, c.normalised)
        row[start + 2] = flag(agent[SHELF] != NO_SHELF)
        write_direction(row, start + 3, agent[DIRECTION])
        row[start + 3 + NUM_DIRECTIONS] = np.float32(agent[DELIVERED])
        start += 4 + NUM_DIRECTIONS
        for bit in range(c.msg_bits):
            row[start + bit] = np.float32(s.messages[e, i, bit])
        start += c.msg_bits
    for k in range(c.num_shelves):
        row[start] = coordinate(s.shelves[e, k, X], c.width, c.normalised)
        row[start + 1] = coordinate(s.shelves[e, k, Y], c.height, c.normalised)
        row[start + 2] = flag(s.requested[e, k])
        start += 3
    if c.max_inactivity > 0:
        row[start] = np.float32(np.float64(s.inactive[e]) / np.float64(c.max_inactivity))


@_rule
def observe(e, s, c, view):
    """Writes the decision point of instance ``e``."""
    for i in range(c.num_agents):
        if c.images:
            write_image_observation(e, i, s, c, view)
        else:
            write_list_observation(e, i, s, c, view)
    write_state(e, s, c, view)


# -------- step


@_rule
def read_messages(e, actions, s, c):
    """Notes what the agents tell; a bit of an action that is not 1 counts as 0."""
    for i in range(c.num_agents):
        for bit in range(c.msg_bits):
            s.messages[e, i, bit] = 1 if actions[e, i, 1 + bit] == 1 else 0


@_rule
def choose_targets(e, actions, s, c):
    """Notes which cells the agents want to be in after this step, and who is there now.

    A loaded agent cannot enter a cell with a shelf, unless another agent carries that one and might take it away.
    """
    for i in range(c.num_agents):
        agent = s.agents[e, i]
        s.plans[e, i, AHEAD] = STAY
        if actions[e, i, 0] != FORWARD:
            continue
        x, y = agent[X] + _COLUMNS_AHEAD[agent[DIRECTION]], agent[Y] + _ROWS_AHEAD[agent[DIRECTION]]
        if x < 0 or x >= c.width or y < 0 or y >= c.height:
            continue
        j = look(AGENTS, e, x, y, s, c)
        is_carried = j >= 0 and s.agents[e, j, SHELF] != NO_SHELF
        if agent[SHELF] != NO_SHELF and look(SHELVES, e, x, y, s, c) >= 0 and not is_carried:
            continue
        s.plans[e, i, X] = x
        s.plans[e, i, Y] = y
        s.plans[e, i, AHEAD] = j if j >= 0 else FREE


@_rule
def measure_queues(e, s, c):
    """Counts for every agent the longest queue that it heads. In circles the numbers mean nothing."""
    for i in range(c.num_agents):
        s.plans[e, i, QUEUE] = 1
    for i in range(c.num_agents):
        j, length = i, 1
        while s.plans[e, j, AHEAD] >= 0 and length < c.num_agents:
            j = s.plans[e, j, AHEAD]
            length += 1
            s.plans[e, j, QUEUE] = max(s.plans[e, j, QUEUE], length)


@_rule
def is_first(e, i, s, c):
    """Whether agent ``i`` is let into its target before all others that want it.

    The head of the longest queue is. Of equally long queues, that whose head has the lowest number: the package leaves
    this to the order in which networkx meets the cells.
    """
    for j in range(c.num_agents):
        same = s.plans[e, j, X] == s.plans[e, i, X] and s.plans[e, j, Y] == s.plans[e, i, Y]
        if j == i or s.plans[e, j, AHEAD] == STAY or not same:
            continue
        if s.plans[e, j, QUEUE] > s.plans[e, i, QUEUE] or (s.plans[e, j, QUEUE] == s.plans[e, i, QUEUE] and j < i):
            return False
    return True


@_rule
def can_move(e, i, s, c):
    """Whether agent ``i`` reaches its target.

    It does in a circle of agents that all follow each other, but for two that want to swap; and in a queue behind an
    agent that reaches a free cell, if all on the way to it are first in what they want.
    """
    first = True
    j = i
    for length in range(1, c.num_agents + 1):
        following = s.plans[e, j, AHEAD]
        if following == STAY:
            return False
        if following == i:
            return length > 2
        first = first and is_first(e, j, s, c)
        if following == FREE:
            return first
        j = following
    return False  # waits outside of a circle


@_rule
def move_agents(e, s, c):
    """Moves all agents that can, with their shelves."""
    for i in range(c.num_agents):
        s.plans[e, i, MOVES] = 1 if can_move(e, i, s, c) else 0
        if s.plans[e, i, MOVES] == 1:
            put(AGENTS, e, s.agents[e, i], 0, s, c)
            if s.agents[e, i, SHELF] != NO_SHELF:
                put(SHELVES, e, s.agents[e, i], 0, s, c)
    for i in range(c.num_agents):
        if s.plans[e, i, MOVES] == 1:
            agent = s.agents[e, i]
            agent[X] = s.plans[e, i, X]
            agent[Y] = s.plans[e, i, Y]
            put(AGENTS, e, agent, i + 1, s, c)
            k = agent[SHELF]
            if k != NO_SHELF:
                s.shelves[e, k, X] = agent[X]
                s.shelves[e, k, Y] = agent[Y]
                put(SHELVES, e, agent, k + 1, s, c)


@_rule
def turn_and_load(e, actions, s, c, out):
    """Turns agents, lets them take shelves and put them down off the ways, which can earn a reward."""
    for i in range(c.num_agents):
        action = actions[e, i, 0]
        agent = s.agents[e, i]
        if action == TURN_LEFT:
            agent[DIRECTION] = _LEFT_OF[agent[DIRECTION]]
        elif action == TURN_RIGHT:
            agent[DIRECTION] = _RIGHT_OF[agent[DIRECTION]]
        elif action == TOGGLE_LOAD and agent[SHELF] == NO_SHELF:
            agent[SHELF] = look(SHELVES, e, agent[X], agent[Y], s, c)
        elif action == TOGGLE_LOAD and ground_below(agent, c) == PLACE:
            agent[SHELF] = NO_SHELF
            if agent[DELIVERED] == 1:
                out.reward[e, i] += HALF
            agent[DELIVERED] = 0


@_rule
def request_other(e, k, count, s, c):
    """Requests one of the shelves that are not requested in place of shelf ``k``, the one delivered after ``count``.

    All of them are equally likely.
    """
    key = mix(stream_key(s.seed[e], s.episode[e], s.time[e], NEXT_REQUEST), count)
    remaining = integer(key, c.num_shelves - c.num_requests)
    for other in range(c.num_shelves):
        if not s.requested[e, other]:
            if remaining == 0:
                s.requested[e, other] = True
                break
            remaining -= 1
    s.requested[e, k] = False


@_rule
def deliver(e, s, c, out):
    """Takes note of requested shelves at the goals, requests others, gives rewards, and returns how many there were."""
    count = 0
    for goal in range(c.goals.shape[0]):
        x, y = c.goals[goal, X], c.goals[goal, Y]
        k = look(SHELVES, e, x, y, s, c)
        if k < 0 or not s.requested[e, k]:
            continue
        request_other(e, k, count, s, c)
        count += 1
        # Goals are ways, so that an agent carries every shelf there.
        i = look(AGENTS, e, x, y, s, c)
        if c.reward_type == GLOBAL:
            for j in range(c.num_agents):
                out.reward[e, j] += ONE
        elif c.reward_type == INDIVIDUAL:
            out.reward[e, i] += ONE
        else:
            out.reward[e, i] += HALF
            s.agents[e, i, DELIVERED] = 1
    return count


@_rule
def step_instance(e, actions, s, c, now, final, out):
    """Makes one env step of instance ``e``; at the end of the episode keeps the successor and begins the next one."""
    for i in range(c.num_agents):
        out.reward[e, i] = ZERO
    read_messages(e, actions, s, c)
    choose_targets(e, actions, s, c)
    measure_queues(e, s, c)
    move_agents(e, s, c)
    turn_and_load(e, actions, s, c, out)
    deliveries = deliver(e, s, c, out)
    s.inactive[e] = 0 if deliveries > 0 else s.inactive[e] + 1
    s.time[e] += 1

    terminated = c.max_inactivity > 0 and s.inactive[e] >= c.max_inactivity
    truncated = c.limit > 0 and s.time[e] >= c.limit and not terminated
    out.terminated[e] = terminated
    out.truncated[e] = truncated
    out.deliveries[e] = np.float32(deliveries)

    if terminated or truncated:
        observe(e, s, c, final)
        start_episode(e, s, c)
    observe(e, s, c, now)


# -------- drivers


@_driver
def step_instances(first, last, actions, s, c, now, final, out):
    """Makes one env step of the instances ``first <= e < last``. Threads may step disjoint ranges at the same time.

    Args:
        first: first instance.
        last: instance after the last one.
        actions: ``[N, A, 1 + M]`` int64, what to do and the bits to tell; an unknown number does nothing.
        s: state, changed in place.
        c: constants.
        now: receives the next decision points.
        final: receives the true successors of the instances whose episode ended.
        out: receives rewards, ends and information.
    """
    for e in range(first, last):
        step_instance(e, actions, s, c, now, final, out)


@_driver
def reset_instances(mask, s, c, now):
    """Begins an episode of the instances of ``mask`` (``[N]`` bool) and writes their decision points."""
    for e in range(mask.shape[0]):
        if mask[e]:
            start_episode(e, s, c)
            observe(e, s, c, now)


@_driver
def observe_instances(s, c, now):
    """Writes the grid and the decision points of all instances."""
    for e in range(s.time.shape[0]):
        fill_grid(e, s, c)
        observe(e, s, c, now)
