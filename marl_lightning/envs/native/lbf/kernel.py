"""The rules of level-based foraging as compiled functions of one instance, and the drivers that loop over instances.

The rules are in this one file because numba's on-disk cache only notices changes of the file of a driver.

Conventions: ``e`` is the instance, ``i`` and ``j`` are players, ``k`` is a food; ``s`` is the batch :class:`State`,
``c`` the :class:`Constants`. Functions allocate nothing, raise nothing and call only each other. Numbers are integers
but for rewards, which are computed in float64 as in the package and then rounded; literals are typed (``ONE``), never
plain Python floats, so that the same code without the JIT (``NUMBA_DISABLE_JIT=1``) gives equal results.

Foods keep away from the border and from each other, so that a cell neighbours at most one food. The outcome of a step
therefore does not depend on the order of foods or players.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from marl_lightning.envs.native.hashing import integer, mix, stream_key
from marl_lightning.envs.native.lbf.layout import DEPENDENT, NUM_ACTIONS

ZERO, ONE, UNSEEN = np.float32(0), np.float32(1), np.float32(-1)

# Actions.
NONE, NORTH, SOUTH, WEST, EAST, LOAD = range(NUM_ACTIONS)

# Columns of players and foods.
ROW, COLUMN, LEVEL = range(3)

# Layers of grid observations.
_PLAYERS, _FOODS, _ACCESS = range(3)

_FOOD_ATTEMPTS = 1000  # cells that are tried at most; on small fields there may be no room for all foods

# Purposes that keep the random numbers of different rules apart.
_PLAYER_ORDER, _PLAYER_CELL, _PLAYER_LEVEL, _FOOD_ORDER, _FOOD_CELL, _FOOD_LEVEL = range(6)


class State(NamedTuple):
    """Game state of ``N`` instances with ``P`` players and ``F`` foods, and scratch space.

    The fields before ``target`` are the state; the others live within a step.
    """

    seed: np.ndarray
    """``[N]`` int64, seed of the instance."""
    episode: np.ndarray
    """``[N]`` int64, episodes begun since seeding, minus one."""
    time: np.ndarray
    """``[N]`` int64, env steps made in the episode."""
    spawned: np.ndarray
    """``[N]`` int64, sum of the levels of all foods at the start of the episode."""
    players: np.ndarray
    """``[N, P, 3]`` int64: row (growing to the south), column (growing to the east), level."""
    foods: np.ndarray
    """``[N, F, 3]`` int64, the same, sorted by row and column. The level is 0 if the food was eaten or never placed."""
    target: np.ndarray
    """``[N, P, 2]`` int64, row and column where the player wants to be after this step."""
    loading: np.ndarray
    """``[N, P]`` bool, tries to load in this step."""


class Constants(NamedTuple):
    """What does not change between steps: scenario and options."""

    size: int
    num_players: int
    num_foods: int
    sight: int
    limit: int
    force_coop: bool
    grid_observation: bool
    observe_agent_levels: bool
    normalize_reward: bool
    obs_instead_of_state: bool
    penalty: np.float32
    player_levels: np.ndarray
    """``[P, 2]`` int64, least and greatest levels, dealt out to the players in random order."""
    food_levels: np.ndarray
    """``[F, 2]`` int64, the same for foods; the greatest may be ``DEPENDENT``."""


class View(NamedTuple):
    """Arrays that a decision point is written to."""

    observation: np.ndarray
    """``[N, P, O]`` float32, grids flattened."""
    action_mask: np.ndarray
    """``[N, P, 6]`` bool."""
    state: np.ndarray
    """``[N, S]`` float32."""


class Outcome(NamedTuple):
    """Arrays that the outcome of a step is written to, ``[N]`` unless noted."""

    reward: np.ndarray
    """``[N, P]`` float32."""
    terminated: np.ndarray
    truncated: np.ndarray
    food_left: np.ndarray


# Division does not check for zero, so that nothing raises. ``_nrt`` is numba's internal name of the switch for its
# reference-counted memory. Without it nothing can allocate, and taking an array out of a tuple costs no atomic
# operation.
_OPTIONS = {"error_model": "numpy", "_nrt": False}

_rule = njit(**_OPTIONS)
_driver = njit(**_OPTIONS, cache=True, nogil=True)


# -------- start of episode


@_rule
def episode_key(e, purpose, s):
    """Returns the key of the random numbers of this episode for one rule."""
    return stream_key(s.seed[e], s.episode[e], 0, purpose)


@_rule
def shuffle_levels(key, units):
    """Fills the levels of ``units`` (``[n, 3]``) with a uniformly random permutation of ``0 … n - 1``."""
    for k in range(units.shape[0]):
        other = integer(mix(key, k), k + 1)
        units[k, LEVEL] = units[other, LEVEL]
        units[other, LEVEL] = k


@_rule
def is_player_at(e, row, column, count, s):
    """Whether one of the first ``count`` players is in the cell."""
    for i in range(count):  # noqa: SIM110 - generators cannot be compiled
        if s.players[e, i, ROW] == row and s.players[e, i, COLUMN] == column:
            return True
    return False


@_rule
def spawn_players(e, s, c):
    """Gives the players different uniformly random cells, and levels between bounds that are dealt out at random."""
    shuffle_levels(episode_key(e, _PLAYER_ORDER, s), s.players[e])
    cells = episode_key(e, _PLAYER_CELL, s)
    levels = episode_key(e, _PLAYER_LEVEL, s)
    for i in range(c.num_players):
        key = mix(cells, i)
        attempt = 0
        searching = True
        # Ends, since there are always more cells than players.
        while searching:
            cell = integer(mix(key, attempt), c.size * c.size)
            row, column = cell // c.size, cell % c.size
            searching = is_player_at(e, row, column, i, s)
            attempt += 1
        s.players[e, i, ROW] = row
        s.players[e, i, COLUMN] = column
        share = s.players[e, i, LEVEL]
        low, high = c.player_levels[share, 0], c.player_levels[share, 1]
        s.players[e, i, LEVEL] = low + integer(mix(levels, i), high - low + 1)


@_rule
def sum_least_levels(e, s, c):
    """Returns the sum of the three least levels of the players, of two if there are only two."""
    total = 0
    for i in range(c.num_players):
        level = s.players[e, i, LEVEL]
        weaker = 0
        for j in range(c.num_players):
            other = s.players[e, j, LEVEL]
            if other < level or (other == level and j < i):
                weaker += 1
        if weaker < 3:
            total += level
    return total


@_rule
def has_room(e, row, column, count, s, c):
    """Whether a food may be placed beside the first ``count`` foods: no player there and no food too near.

    Too near are the eight cells around and those two steps away in the same row or column.
    """
    for k in range(count):
        rows, columns = s.foods[e, k, ROW] - row, s.foods[e, k, COLUMN] - column
        if rows * rows + columns * columns <= 4:
            return False
    return not is_player_at(e, row, column, c.num_players, s)


@_rule
def spawn_foods(e, s, c):
    """Places the foods in uniformly random cells off the border, as many as find room in a limited number of tries."""
    shuffle_levels(episode_key(e, _FOOD_ORDER, s), s.foods[e])
    cells = episode_key(e, _FOOD_CELL, s)
    levels = episode_key(e, _FOOD_LEVEL, s)
    dependent_level = sum_least_levels(e, s, c)
    inner = c.size - 2
    count, attempt, spawned = 0, 0, 0
    while count < c.num_foods and attempt < _FOOD_ATTEMPTS:
        cell = integer(mix(cells, attempt), inner * inner)
        row, column = cell // inner + 1, cell % inner + 1
        attempt += 1
        if has_room(e, row, column, count, s, c):
            share = s.foods[e, count, LEVEL]
            high = c.food_levels[share, 1]
            if high == DEPENDENT:
                high = dependent_level
            low = high if c.force_coop else c.food_levels[share, 0]
            level = low + integer(mix(levels, count), high - low + 1)
            s.foods[e, count, ROW] = row
            s.foods[e, count, COLUMN] = column
            s.foods[e, count, LEVEL] = level
            spawned += level
            count += 1
    s.spawned[e] = spawned
    for k in range(count, c.num_foods):
        s.foods[e, k, LEVEL] = 0
    sort_foods(e, count, s)


@_rule
def sort_foods(e, count, s):
    """Sorts the first ``count`` foods by row and column, the order in which they are observed."""
    foods = s.foods[e]
    for last in range(1, count):
        k = last
        while k > 0 and (
            foods[k, ROW] < foods[k - 1, ROW]
            or (foods[k, ROW] == foods[k - 1, ROW] and foods[k, COLUMN] < foods[k - 1, COLUMN])
        ):
            for column in range(3):
                value = foods[k, column]
                foods[k, column] = foods[k - 1, column]
                foods[k - 1, column] = value
            k -= 1


@_rule
def start_episode(e, s, c):
    """Begins the next episode of instance ``e``."""
    s.episode[e] += 1
    s.time[e] = 0
    spawn_players(e, s, c)
    spawn_foods(e, s, c)


# -------- decision point


@_rule
def legal_actions(e, i, s, c):
    """Returns the legal actions of player ``i`` as bits.

    It may move to cells of the field without food, other players do not matter; and load if a food is beside it.
    """
    row, column = s.players[e, i, ROW], s.players[e, i, COLUMN]
    legal = 1 << NONE
    if row > 0:
        legal |= 1 << NORTH
    if row < c.size - 1:
        legal |= 1 << SOUTH
    if column > 0:
        legal |= 1 << WEST
    if column < c.size - 1:
        legal |= 1 << EAST
    for k in range(c.num_foods):
        if is_beside(e, i, k, s):
            rows, columns = s.foods[e, k, ROW] - row, s.foods[e, k, COLUMN] - column
            blocked = NORTH if rows < 0 else SOUTH if rows > 0 else WEST if columns < 0 else EAST
            legal = (legal & ~(1 << blocked)) | (1 << LOAD)
    return legal


@_rule
def is_beside(e, i, k, s):
    """Whether player ``i`` is in one of the four cells beside food ``k``, and the food is still there."""
    rows = s.foods[e, k, ROW] - s.players[e, i, ROW]
    columns = s.foods[e, k, COLUMN] - s.players[e, i, COLUMN]
    return s.foods[e, k, LEVEL] > 0 and rows * rows + columns * columns == 1


@_rule
def write_masks(e, s, c, view):
    """Writes which actions are legal."""
    for i in range(c.num_players):
        legal = legal_actions(e, i, s, c)
        for action in range(NUM_ACTIONS):
            view.action_mask[e, i, action] = (legal >> action) & 1 == 1


@_rule
def write_unit(row, start, unit, top, left):
    """Writes position relative to ``(top, left)`` and level of ``unit`` (``[3]``) to ``row[start:]``."""
    row[start] = np.float32(unit[ROW] - top)
    row[start + 1] = np.float32(unit[COLUMN] - left)
    row[start + 2] = np.float32(unit[LEVEL])


@_rule
def write_nothing(row, start):
    """Writes the placeholder of what is not seen or not there to ``row[start:]``."""
    row[start] = UNSEEN
    row[start + 1] = UNSEEN
    row[start + 2] = ZERO


@_rule
def write_foods(row, e, top, left, bottom, right, s, c):
    """Writes the foods of the window, last row and column included, in the order of cells, and then placeholders."""
    start = 0
    for k in range(c.num_foods):
        food = s.foods[e, k]
        if food[LEVEL] > 0 and top <= food[ROW] <= bottom and left <= food[COLUMN] <= right:
            write_unit(row, start, food, top, left)
            start += 3
    while start < 3 * c.num_foods:
        write_nothing(row, start)
        start += 3


@_rule
def write_player(row, start, unit, top, left, c):
    """Writes a player's entries to ``row[start:]`` and returns where the next ones begin."""
    row[start] = np.float32(unit[ROW] - top)
    row[start + 1] = np.float32(unit[COLUMN] - left)
    if c.observe_agent_levels:
        row[start + 2] = np.float32(unit[LEVEL])
        return start + 3
    return start + 2


@_rule
def write_list_observation(e, i, s, c, view):
    """Writes what player ``i`` sees as a list: foods, itself, the other players; placeholders after each kind.

    Positions are relative to the upper left corner of the cells in sight, which end at the border of the field. Players
    are seen up to ``2 * sight`` cells south and east of this corner, as in the package: close to the upper or the left
    border this is farther than foods are seen.
    """
    row = view.observation[e, i]
    me = s.players[e, i]
    top, left = max(me[ROW] - c.sight, 0), max(me[COLUMN] - c.sight, 0)
    write_foods(row, e, top, left, me[ROW] + c.sight, me[COLUMN] + c.sight, s, c)
    start = write_player(row, 3 * c.num_foods, me, top, left, c)
    for j in range(c.num_players):
        unit = s.players[e, j]
        rows, columns = unit[ROW] - top, unit[COLUMN] - left
        if j != i and 0 <= rows <= 2 * c.sight and 0 <= columns <= 2 * c.sight:
            start = write_player(row, start, unit, top, left, c)
    while start < row.shape[0]:
        row[start] = UNSEEN
        row[start + 1] = UNSEEN
        start += 2
        if c.observe_agent_levels:
            row[start] = ZERO
            start += 1


@_rule
def write_grid_observation(e, i, s, c, view):
    """Writes what player ``i`` sees as three pictures around it: levels of players, of foods, and free cells."""
    row = view.observation[e, i]
    width = 2 * c.sight + 1
    area = width * width
    top, left = s.players[e, i, ROW] - c.sight, s.players[e, i, COLUMN] - c.sight
    row[: _ACCESS * area] = ZERO
    for y in range(width):
        for x in range(width):
            inside = 0 <= top + y < c.size and 0 <= left + x < c.size
            row[_ACCESS * area + y * width + x] = ONE if inside else ZERO
    for j in range(c.num_players):
        y, x = s.players[e, j, ROW] - top, s.players[e, j, COLUMN] - left
        if 0 <= y < width and 0 <= x < width:
            level = np.float32(s.players[e, j, LEVEL]) if c.observe_agent_levels else ONE
            row[_PLAYERS * area + y * width + x] = level
            row[_ACCESS * area + y * width + x] = ZERO
    for k in range(c.num_foods):
        y, x = s.foods[e, k, ROW] - top, s.foods[e, k, COLUMN] - left
        if s.foods[e, k, LEVEL] > 0 and 0 <= y < width and 0 <= x < width:
            row[_FOODS * area + y * width + x] = np.float32(s.foods[e, k, LEVEL])
            row[_ACCESS * area + y * width + x] = ZERO


@_rule
def write_state(e, s, c, view):
    """Writes the global state: foods in the order of their cells, placeholders, then players in their own order."""
    row = view.state[e]
    write_foods(row, e, 0, 0, c.size, c.size, s, c)
    for i in range(c.num_players):
        write_unit(row, 3 * (c.num_foods + i), s.players[e, i], 0, 0)


@_rule
def observe(e, s, c, view):
    """Writes the decision point of instance ``e``."""
    write_masks(e, s, c, view)
    for i in range(c.num_players):
        if c.grid_observation:
            write_grid_observation(e, i, s, c, view)
        else:
            write_list_observation(e, i, s, c, view)
    if not c.obs_instead_of_state:
        write_state(e, s, c, view)
        return
    width = view.observation.shape[2]
    for i in range(c.num_players):
        for k in range(width):
            view.state[e, i * width + k] = view.observation[e, i, k]


# -------- step


@_rule
def choose_targets(e, actions, s, c):
    """Notes where the players want to go and who loads. Actions that are not legal become ``NONE``."""
    for i in range(c.num_players):
        action = actions[e, i]
        if action < 0 or action >= NUM_ACTIONS or (legal_actions(e, i, s, c) >> action) & 1 == 0:
            action = NONE
        row, column = s.players[e, i, ROW], s.players[e, i, COLUMN]
        if action == NORTH:
            row -= 1
        elif action == SOUTH:
            row += 1
        elif action == WEST:
            column -= 1
        elif action == EAST:
            column += 1
        s.target[e, i, ROW] = row
        s.target[e, i, COLUMN] = column
        s.loading[e, i] = action == LOAD


@_rule
def is_contested(e, i, s, c):
    """Whether another player has the same target; staying and loading count as having one's own cell as the target."""
    for j in range(c.num_players):
        if j != i and s.target[e, j, ROW] == s.target[e, i, ROW] and s.target[e, j, COLUMN] == s.target[e, i, COLUMN]:
            return True
    return False


@_rule
def move_players(e, s, c):
    """Moves the players whose targets are not contested.

    Players may swap cells, and may enter the cell of a player that wants to leave it but cannot.
    """
    for i in range(c.num_players):
        if not is_contested(e, i, s, c):
            s.players[e, i, ROW] = s.target[e, i, ROW]
            s.players[e, i, COLUMN] = s.target[e, i, COLUMN]


@_rule
def load_foods(e, s, c, out):
    """Lets the loading players take the foods for which their levels suffice, and writes the rewards."""
    for i in range(c.num_players):
        out.reward[e, i] = ZERO
    for k in range(c.num_foods):
        food = s.foods[e, k, LEVEL]
        strength = 0
        for i in range(c.num_players):
            if s.loading[e, i] and is_beside(e, i, k, s):
                strength += s.players[e, i, LEVEL]
        if strength == 0:
            continue
        for i in range(c.num_players):
            if s.loading[e, i] and is_beside(e, i, k, s):
                out.reward[e, i] = load_reward(s.players[e, i, LEVEL], food, strength, s.spawned[e], c)
        if strength >= food:
            s.foods[e, k, LEVEL] = 0


@_rule
def load_reward(level, food, strength, spawned, c):
    """Returns the reward of a player of ``level`` that tries to load ``food`` with others of ``strength`` in total."""
    if strength < food:
        return ZERO - c.penalty
    reward = np.float64(level * food)
    if c.normalize_reward:
        reward /= np.float64(strength * spawned)
    return np.float32(reward)


@_rule
def count_foods(e, s, c):
    """Number of foods that are still in the field."""
    count = 0
    for k in range(c.num_foods):
        if s.foods[e, k, LEVEL] > 0:
            count += 1
    return count


@_rule
def step_instance(e, actions, s, c, now, final, out):
    """Makes one env step of instance ``e``; at the end of the episode keeps the successor and begins the next one."""
    choose_targets(e, actions, s, c)
    move_players(e, s, c)
    load_foods(e, s, c, out)
    s.time[e] += 1

    left = count_foods(e, s, c)
    terminated = left == 0
    truncated = s.time[e] >= c.limit and not terminated
    out.terminated[e] = terminated
    out.truncated[e] = truncated
    out.food_left[e] = np.float32(left)

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
        actions: ``[N, P]`` int64.
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
    """Writes the decision points of all instances."""
    for e in range(s.time.shape[0]):
        observe(e, s, c, now)
