"""The rules of the SMAC-like simulator as compiled functions of one instance, and the drivers that loop over instances.

The rules are in this one file because numba's on-disk cache only notices changes of the file of a driver.

Conventions: ``e`` is the instance; ``i`` and ``j`` are units, agents first, then enemies; ``s`` is the batch
:class:`State`, ``c`` the :class:`Constants`. Functions allocate nothing, raise nothing and call only each other. All
numbers are float32 and no product is fused into a sum, so that the same code without the JIT (``NUMBA_DISABLE_JIT=1``)
gives equal results: literals are typed (``ONE``), never plain Python floats, which would promote to float64.

A tick has two phases: all units decide and move, then all that were in range shoot and the damage is applied at once.
The outcome does not depend on the order of units, and the last two opponents may kill each other.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import numpy as np
from numba import njit

from marl_lightning.envs.native.hashing import mix, stream_key

logger = logging.getLogger(__name__)

ZERO, HALF, ONE = np.float32(0), np.float32(0.5), np.float32(1)

# Actions. Attacking enemy k is FIRST_ATTACK + k.
NO_OP, STOP, NORTH, SOUTH, EAST, WEST, FIRST_ATTACK = range(7)

# Orders that a unit carries out on its own between two actions.
IDLE, MOVE, ATTACK, ATTACK_MOVE = range(4)

REWARD_MODES = ("smac", "clip", "damage", "signed", "sparse")
_SMAC, _CLIP, _DAMAGE, _SIGNED, _SPARSE = range(5)

COLLISIONS = ("none", "separate", "slide")
_NO_COLLISION, _SEPARATE, _SLIDE = range(3)

# Purposes that keep the random numbers of different rules apart.
_WEAPON_DELAY, _SPAWN_NOISE = range(2)

_INVERSE_2_24 = np.float32(2.0**-24)


class State(NamedTuple):
    """Game state of ``N`` instances with ``U`` units (``A`` agents, then ``E`` enemies), and scratch space.

    The fields before ``in_range`` are the state; the others live within a step.
    """

    seed: np.ndarray
    """``[N]`` int64, seed of the instance."""
    episode: np.ndarray
    """``[N]`` int64, episodes begun since seeding, minus one."""
    time: np.ndarray
    """``[N]`` int64, env steps made in the episode."""
    last_action: np.ndarray
    """``[N, A]`` int64, -1 before the first step."""
    x: np.ndarray
    """``[N, U]`` float32, position in map units."""
    y: np.ndarray
    """``[N, U]`` float32, position in map units, growing to the north."""
    health: np.ndarray
    """``[N, U]`` float32, 0 if dead."""
    shield: np.ndarray
    """``[N, U]`` float32."""
    cooldown: np.ndarray
    """``[N, U]`` float32, ticks until the next shot is possible."""
    shield_wait: np.ndarray
    """``[N, U]`` float32, ticks until the shield regenerates."""
    order: np.ndarray
    """``[N, U]`` int64, ``IDLE``, ``MOVE``, ``ATTACK`` or ``ATTACK_MOVE``."""
    goal_x: np.ndarray
    """``[N, U]`` float32, destination of ``MOVE`` and ``ATTACK_MOVE``."""
    goal_y: np.ndarray
    """``[N, U]`` float32."""
    target: np.ndarray
    """``[N, U]`` int64, unit under attack, -1 if none."""
    shot: np.ndarray
    """``[N, U]`` int64, unit last shot at in the last step, -1 if none; for pictures."""
    side: np.ndarray
    """``[N, U]`` int64, side on which it passes the units in its way: 1 left, -1 right, 0 if the way is free."""
    in_range: np.ndarray
    """``[N, U]`` bool, may shoot at its target in this tick."""
    standing: np.ndarray
    """``[N, U]`` bool, does not want to move in this tick."""
    next_x: np.ndarray
    """``[N, U]`` float32, position after moving, before separation."""
    next_y: np.ndarray
    """``[N, U]`` float32."""
    push_x: np.ndarray
    """``[N, U]`` float32, displacement by separation."""
    push_y: np.ndarray
    """``[N, U]`` float32."""
    damage: np.ndarray
    """``[N, U]`` float32, damage received in this tick if the shield takes it."""
    wounds: np.ndarray
    """``[N, U]`` float32, the same if health takes it, that is after armor."""


class Constants(NamedTuple):
    """What does not change between steps: scenario, physics, layout and reward. Times are in ticks."""

    num_agents: int
    num_enemies: int
    num_actions: int
    limit: int
    ticks: int
    map_size: int
    type_bits: int
    collision: int
    reward_mode: int
    limit_is_terminal: bool
    obs_all_health: bool
    obs_own_health: bool
    obs_last_action: bool
    obs_pathing_grid: bool
    obs_terrain_height: bool
    obs_timestep_number: bool
    obs_instead_of_state: bool
    state_last_action: bool
    state_timestep_number: bool
    move_amount: np.float32
    sight_range: np.float32
    shoot_range: np.float32
    weapon_delay_low: np.float32
    weapon_delay_high: np.float32
    shield_delay: np.float32
    shield_rate: np.float32
    spawn_noise: np.float32
    reward_death_value: np.float32
    reward_win: np.float32
    reward_defeat: np.float32
    reward_negative_scale: np.float32
    reward_factor: np.float32
    attack_x: np.float32
    attack_y: np.float32
    pathable: np.ndarray
    """``[map_size, map_size]`` bool, indexed ``[x, y]``."""
    terrain_height: np.ndarray
    """``[map_size, map_size]`` float32 in [0, 1], indexed ``[x, y]``."""
    spawn_x: np.ndarray
    """``[U]`` float32."""
    spawn_y: np.ndarray
    """``[U]`` float32."""
    max_health: np.ndarray
    """``[U]`` float32."""
    max_shield: np.ndarray
    """``[U]`` float32."""
    cooldown: np.ndarray
    """``[U]`` float32, ticks between shots without the random delay."""
    cooldown_scale: np.ndarray
    """``[U]`` float32, divisor of the cooldown in the global state."""
    weapon_range: np.ndarray
    """``[U]`` float32, greatest gap between circles for a shot."""
    scan_range: np.ndarray
    """``[U]`` float32, greatest distance between own centre and other circle for noticing it."""
    speed: np.ndarray
    """``[U]`` float32, map units per tick."""
    radius: np.ndarray
    """``[U]`` float32."""
    shield_bit: np.ndarray
    """``[U]`` bool, whether the features of the unit have a shield entry."""
    type_bit: np.ndarray
    """``[U]`` int64, the unit's entry among the type bits."""
    shot_damage: np.ndarray
    """``[U, U]`` float32, damage of a shot of unit i at unit j if the shield takes it."""
    shot_wounds: np.ndarray
    """``[U, U]`` float32, the same if health takes it, that is after armor."""


class View(NamedTuple):
    """Arrays that a decision point is written to; see :class:`marl_lightning.envs.base.Observations`."""

    observation: np.ndarray
    action_mask: np.ndarray
    alive: np.ndarray
    state: np.ndarray


class Outcome(NamedTuple):
    """Arrays that the outcome of a step is written to, ``[N]`` unless noted."""

    reward: np.ndarray
    """``[N, A]`` float32, the team reward, for the dead as well."""
    terminated: np.ndarray
    truncated: np.ndarray
    battle_won: np.ndarray
    timeout: np.ndarray
    dead_allies: np.ndarray
    dead_enemies: np.ndarray
    invalid_actions: np.ndarray
    damage_dealt: np.ndarray
    damage_taken: np.ndarray
    ally_alive_frac: np.ndarray


# Division does not check for zero, so that nothing raises. ``_nrt`` is numba's internal name of the switch for its
# reference-counted memory. Without it nothing can allocate, and taking an array out of a tuple costs no atomic
# operation; with it the same code is 30 times slower.
_OPTIONS = {"error_model": "numpy", "_nrt": False}

_rule = njit(**_OPTIONS)


def _driver(function):
    try:
        return njit(**_OPTIONS, nogil=True, cache=True)(function)
    except RuntimeError:  # numba finds no folder that it may write to
        logger.warning("kernels are compiled anew in every process: set NUMBA_CACHE_DIR to a writable folder")
        return njit(**_OPTIONS, nogil=True)(function)


# -------- random numbers


@_rule
def uniform(key, low, high):
    """Returns a float32 between ``low`` and ``high`` from the upper 24 bits of ``key``."""
    return low + (high - low) * (np.float32(key >> 8) * _INVERSE_2_24)


# -------- terrain


@_rule
def is_inside(cell_x, cell_y, c):
    """Whether the cell is on the map."""
    return 0 <= cell_x < c.map_size and 0 <= cell_y < c.map_size


@_rule
def is_open_cell(cell_x, cell_y, c):
    """Whether the cell is on the map and pathable."""
    return is_inside(cell_x, cell_y, c) and c.pathable[cell_x, cell_y]


@_rule
def is_open_point(x, y, c):
    """Whether a unit may stand at the point. Signs are checked since truncation maps (-1, 0) to cell 0."""
    return x >= ZERO and y >= ZERO and is_open_cell(int(x), int(y), c)


@_rule
def move_unit(e, i, x, y, s, c):
    """Puts unit ``i`` at the point, or slides along the blocked cells that are in the way."""
    if is_open_point(x, y, c):
        s.x[e, i] = x
        s.y[e, i] = y
    elif is_open_point(x, s.y[e, i], c):
        s.x[e, i] = x
    elif is_open_point(s.x[e, i], y, c):
        s.y[e, i] = y


# -------- start of episode


@_rule
def start_episode(e, s, c):
    """Begins the next episode of instance ``e``."""
    s.episode[e] += 1
    s.time[e] = 0
    for i in range(c.num_agents):
        s.last_action[e, i] = -1
    noise = stream_key(s.seed[e], s.episode[e], 0, _SPAWN_NOISE)
    for i in range(c.num_agents + c.num_enemies):
        s.x[e, i] = c.spawn_x[i]
        s.y[e, i] = c.spawn_y[i]
        if c.spawn_noise > ZERO:
            x = c.spawn_x[i] + uniform(mix(noise, 2 * i), -c.spawn_noise, c.spawn_noise)
            y = c.spawn_y[i] + uniform(mix(noise, 2 * i + 1), -c.spawn_noise, c.spawn_noise)
            move_unit(e, i, x, y, s, c)
        s.health[e, i] = c.max_health[i]
        s.shield[e, i] = c.max_shield[i]
        s.cooldown[e, i] = ZERO
        s.shield_wait[e, i] = ZERO
        s.order[e, i] = IDLE if i < c.num_agents else ATTACK_MOVE
        s.goal_x[e, i] = c.attack_x
        s.goal_y[e, i] = c.attack_y
        s.target[e, i] = -1
        s.shot[e, i] = -1
        s.side[e, i] = 0
        s.damage[e, i] = ZERO
        s.wounds[e, i] = ZERO


# -------- actions and orders


@_rule
def is_legal(e, i, action, s, c):
    """Whether agent ``i`` may choose ``action``, any integer."""
    if s.health[e, i] <= ZERO:
        return action == NO_OP
    if action == STOP:
        return True
    x, y = s.x[e, i], s.y[e, i]
    # Half the move is looked ahead, and coordinates are truncated to cells.
    ahead = c.move_amount * HALF
    if action == NORTH:
        return is_open_cell(int(x), int(y + ahead), c)
    if action == SOUTH:
        return is_open_cell(int(x), int(y - ahead), c)
    if action == EAST:
        return is_open_cell(int(x + ahead), int(y), c)
    if action == WEST:
        return is_open_cell(int(x - ahead), int(y), c)
    if FIRST_ATTACK <= action < c.num_actions:
        j = c.num_agents + action - FIRST_ATTACK
        return s.health[e, j] > ZERO and distance(e, i, j, s) <= c.shoot_range
    return False


@_rule
def give_order(e, i, action, s, c):
    """Turns the legal ``action`` of agent ``i`` into an order."""
    s.target[e, i] = -1
    s.order[e, i] = IDLE
    if action >= FIRST_ATTACK:
        s.order[e, i] = ATTACK
        s.target[e, i] = c.num_agents + action - FIRST_ATTACK
    elif action >= NORTH:
        s.order[e, i] = MOVE
        s.goal_x[e, i] = s.x[e, i]
        s.goal_y[e, i] = s.y[e, i]
        if action == NORTH:
            s.goal_y[e, i] += c.move_amount
        elif action == SOUTH:
            s.goal_y[e, i] -= c.move_amount
        elif action == EAST:
            s.goal_x[e, i] += c.move_amount
        else:
            s.goal_x[e, i] -= c.move_amount


@_rule
def distance(e, i, j, s):
    """Distance between the centres of two units."""
    dx = s.x[e, j] - s.x[e, i]
    dy = s.y[e, j] - s.y[e, i]
    return np.sqrt(dx * dx + dy * dy)


# -------- decisions of a tick


@_rule
def choose_target(e, i, s, c):
    """Drops a dead target; an attack-moving unit keeps, changes or acquires its target.

    It keeps a target that is in the range of its weapon or aims at it. Else it takes the nearest opponent that it
    notices, and if it notices none, the nearest of those that aim at it; ties go to the lowest index.
    """
    j = s.target[e, i]
    if j >= 0 and s.health[e, j] <= ZERO:
        j = -1
        if s.order[e, i] == ATTACK:
            s.order[e, i] = IDLE
    if s.order[e, i] == ATTACK_MOVE:
        keep = j >= 0 and (s.target[e, j] == i or distance(e, i, j, s) <= c.weapon_range[i] + c.radius[i] + c.radius[j])
        if not keep:
            j = nearest_opponent(e, i, s, c)
    s.target[e, i] = j


@_rule
def nearest_opponent(e, i, s, c):
    """Returns the opponent that unit ``i`` acquires, -1 if it notices none and none aims at it."""
    is_agent = i < c.num_agents
    first = c.num_agents if is_agent else 0
    last = c.num_agents + c.num_enemies if is_agent else c.num_agents
    noticed, aggressor = -1, -1
    noticed_square, aggressor_square = ZERO, ZERO
    x, y = s.x[e, i], s.y[e, i]
    for j in range(first, last):
        if s.health[e, j] <= ZERO:
            continue
        dx, dy = s.x[e, j] - x, s.y[e, j] - y
        square = dx * dx + dy * dy
        reach = c.scan_range[i] + c.radius[j]
        if square < reach * reach:
            if noticed < 0 or square < noticed_square:
                noticed, noticed_square = j, square
        elif s.target[e, j] == i and (aggressor < 0 or square < aggressor_square):
            aggressor, aggressor_square = j, square
    return noticed if noticed >= 0 else aggressor


@_rule
def plan_move(e, i, s, c):
    """Decides where unit ``i`` wants to be after this tick, and whether it can shoot from where it is."""
    x, y = s.x[e, i], s.y[e, i]
    s.in_range[e, i] = False
    s.standing[e, i] = True
    s.next_x[e, i] = x
    s.next_y[e, i] = y
    s.push_x[e, i] = ZERO
    s.push_y[e, i] = ZERO
    j = s.target[e, i]
    if j >= 0:
        dx, dy = s.x[e, j] - x, s.y[e, j] - y
        centres = np.sqrt(dx * dx + dy * dy)
        gap = centres - c.radius[i] - c.radius[j]
        if gap <= c.weapon_range[i]:
            s.in_range[e, i] = True
            return
        length = min(c.speed[i], gap)  # a chase ends at contact
    elif s.order[e, i] == MOVE or s.order[e, i] == ATTACK_MOVE:
        dx, dy = s.goal_x[e, i] - x, s.goal_y[e, i] - y
        centres = np.sqrt(dx * dx + dy * dy)
        length = min(c.speed[i], centres)
    else:
        return
    if length > ZERO:
        s.standing[e, i] = False
        s.next_x[e, i] = x + dx * (length / centres)
        s.next_y[e, i] = y + dy * (length / centres)


# -------- motion


@_rule
def find_blocker(e, i, step_x, step_y, s, c):
    """Returns the nearest standing unit into which the step takes unit ``i``, -1 if the way is free.

    The target is none: the chase ends at contact with it anyway, and rounding must not turn it aside.
    """
    x, y = s.x[e, i], s.y[e, i]
    blocker, nearest = -1, ZERO
    for j in range(c.num_agents + c.num_enemies):
        if not s.standing[e, j] or s.health[e, j] <= ZERO or j == s.target[e, i]:
            continue
        dx, dy = s.x[e, j] - x, s.y[e, j] - y
        after_x, after_y = dx - step_x, dy - step_y
        square = after_x * after_x + after_y * after_y
        contact = c.radius[i] + c.radius[j]
        if square < contact * contact and dx * step_x + dy * step_y > ZERO and (blocker < 0 or square < nearest):
            blocker, nearest = j, square
    return blocker


@_rule
def slide(e, i, s, c):
    """Turns the planned step of unit ``i`` along the tangent of a standing unit in its way.

    If a second unit blocks that way too, the step follows the tangent of this one, and if a third one blocks that, the
    unit stays. A unit that heads exactly for the centre of its blocker passes on a side given by its index. The side is
    kept until the way is free: chosen anew in every tick, it would send a unit to and fro in front of two others.
    """
    step_x = s.next_x[e, i] - s.x[e, i]
    step_y = s.next_y[e, i] - s.y[e, i]
    for attempt in range(3):
        j = find_blocker(e, i, step_x, step_y, s, c)
        if j < 0:
            if attempt == 0:
                s.side[e, i] = 0
            break
        if attempt == 2:
            step_x, step_y = ZERO, ZERO
            break
        dx, dy = s.x[e, j] - s.x[e, i], s.y[e, j] - s.y[e, i]
        turn = dx * step_y - dy * step_x
        length = np.sqrt(step_x * step_x + step_y * step_y) / np.sqrt(dx * dx + dy * dy)
        if s.side[e, i] == 0:
            s.side[e, i] = -1 if turn < ZERO or (turn == ZERO and i % 2 == 1) else 1
        if s.side[e, i] < 0:
            length = -length
        step_x, step_y = -dy * length, dx * length
    s.next_x[e, i] = s.x[e, i] + step_x
    s.next_y[e, i] = s.y[e, i] + step_y


@_rule
def separate(e, s, c):
    """Pushes overlapping units apart: two movers by half the overlap each, a mover off a standing unit by all of it."""
    num_units = c.num_agents + c.num_enemies
    for i in range(num_units):
        if s.health[e, i] <= ZERO:
            continue
        x, y, radius, standing = s.next_x[e, i], s.next_y[e, i], c.radius[i], s.standing[e, i]
        for j in range(i + 1, num_units):
            dx, dy = s.next_x[e, j] - x, s.next_y[e, j] - y
            contact = radius + c.radius[j]
            square = dx * dx + dy * dy
            if square >= contact * contact or s.health[e, j] <= ZERO or (standing and s.standing[e, j]):
                continue
            centres = np.sqrt(square)
            if centres > ZERO:
                push = (contact - centres) / centres
            else:  # same point: apart along x
                dx, push = ONE, contact
            if not (standing or s.standing[e, j]):
                push *= HALF
            if not standing:
                s.push_x[e, i] -= dx * push
                s.push_y[e, i] -= dy * push
            if not s.standing[e, j]:
                s.push_x[e, j] += dx * push
                s.push_y[e, j] += dy * push


@_rule
def move_units(e, s, c):
    """Carries out the planned moves under the rules of collision and terrain."""
    num_units = c.num_agents + c.num_enemies
    if c.collision == _SLIDE:
        for i in range(num_units):
            if s.health[e, i] > ZERO and not s.standing[e, i]:
                slide(e, i, s, c)
    if c.collision != _NO_COLLISION:
        separate(e, s, c)
    for i in range(num_units):
        if s.health[e, i] > ZERO and not s.standing[e, i]:
            move_unit(e, i, s.next_x[e, i] + s.push_x[e, i], s.next_y[e, i] + s.push_y[e, i], s, c)


# -------- combat


@_rule
def run_timers(e, i, s, c):
    """Advances the cooldown and the shield of unit ``i`` by one tick."""
    s.cooldown[e, i] = max(s.cooldown[e, i] - ONE, ZERO)
    if c.max_shield[i] > ZERO:
        s.shield_wait[e, i] = max(s.shield_wait[e, i] - ONE, ZERO)
        if s.shield_wait[e, i] == ZERO:
            s.shield[e, i] = min(s.shield[e, i] + c.shield_rate, c.max_shield[i])


@_rule
def shoot(e, i, key, s, c):
    """Lets unit ``i`` shoot if it is in range and its weapon is ready; ``key`` drives the random delay."""
    if not s.in_range[e, i] or s.cooldown[e, i] > ZERO:
        return
    j = s.target[e, i]
    s.damage[e, j] += c.shot_damage[i, j]
    s.wounds[e, j] += c.shot_wounds[i, j]
    s.shot[e, i] = j
    s.cooldown[e, i] = c.cooldown[i]
    if c.weapon_delay_high > c.weapon_delay_low:
        s.cooldown[e, i] += uniform(mix(key, i), c.weapon_delay_low, c.weapon_delay_high)


@_rule
def suffer(e, i, s, c):
    """Applies the damage that unit ``i`` received in this tick and returns the points that it lost.

    If the shield breaks, every hit passes it with the same share, so that the order of the hits does not matter.
    """
    damage = s.damage[e, i]
    if damage == ZERO:
        return ZERO
    absorbed = min(damage, s.shield[e, i])
    wounds = min(s.wounds[e, i] * ((damage - absorbed) / damage), s.health[e, i])
    s.shield[e, i] -= absorbed
    s.health[e, i] -= wounds
    s.shield_wait[e, i] = c.shield_delay
    s.damage[e, i] = ZERO
    s.wounds[e, i] = ZERO
    return absorbed + wounds


@_rule
def run_tick(e, key, s, c, out):
    """Advances instance ``e`` by one game loop; ``key`` is the random key of this tick."""
    num_units = c.num_agents + c.num_enemies
    for i in range(num_units):
        if s.health[e, i] > ZERO:
            choose_target(e, i, s, c)
    for i in range(num_units):
        if s.health[e, i] > ZERO:
            plan_move(e, i, s, c)
    move_units(e, s, c)
    for i in range(num_units):
        if s.health[e, i] > ZERO:
            run_timers(e, i, s, c)
            shoot(e, i, key, s, c)
    for i in range(c.num_agents):
        out.damage_taken[e] += suffer(e, i, s, c)
    for i in range(c.num_agents, num_units):
        out.damage_dealt[e] += suffer(e, i, s, c)


# -------- decision points


@_rule
def write_masks(e, s, c, view):
    """Writes which agents are alive and which actions are legal."""
    for i in range(c.num_agents):
        view.alive[e, i] = s.health[e, i] > ZERO
        for action in range(c.num_actions):
            view.action_mask[e, i, action] = is_legal(e, i, action, s, c)


@_rule
def write_health(row, column, e, i, s, c):
    """Writes health and shield of unit ``i`` into ``row`` and returns the column after them."""
    row[column] = s.health[e, i] / c.max_health[i]
    column += 1
    if c.shield_bit[i]:
        row[column] = s.shield[e, i] / c.max_shield[i]
        column += 1
    return column


@_rule
def write_type(row, column, i, c):
    """Writes the type of unit ``i`` into ``row`` and returns the column after it."""
    if c.type_bits > 0:
        row[column + c.type_bit[i]] = ONE
    return column + c.type_bits


@_rule
def write_terrain(row, column, e, i, s, c):
    """Writes the grids around agent ``i`` that are switched on and returns the column after them.

    The points are two moves away to the north, south, east and west, one move away on the diagonals, and for the
    height the own cell. Points outside the map count as 1.
    """
    x, y, m = int(s.x[e, i]), int(s.y[e, i]), int(c.move_amount)
    points = (
        (x, y + 2 * m),
        (x, y - 2 * m),
        (x + 2 * m, y),
        (x - 2 * m, y),
        (x + m, y + m),
        (x - m, y - m),
        (x + m, y - m),
        (x - m, y + m),
        (x, y),
    )
    if c.obs_pathing_grid:
        for k in range(8):
            px, py = points[k]
            row[column] = ONE if not is_inside(px, py, c) or c.pathable[px, py] else ZERO
            column += 1
    if c.obs_terrain_height:
        for k in range(9):
            px, py = points[k]
            row[column] = c.terrain_height[px, py] if is_inside(px, py, c) else ONE
            column += 1
    return column


@_rule
def write_other(row, column, flag, e, i, j, s, c):
    """Writes what agent ``i`` sees of unit ``j`` into the zeroed ``row``, starting with ``flag``.

    Returns:
        The column after the block of the unit, and whether the unit was seen. It stays zero if it was not.
    """
    end = column + 4 + c.type_bits
    if c.obs_all_health:
        end += 2 if c.shield_bit[j] else 1
    if s.health[e, j] <= ZERO:
        return end, False
    dx = s.x[e, j] - s.x[e, i]
    dy = s.y[e, j] - s.y[e, i]
    centres = np.sqrt(dx * dx + dy * dy)
    if centres >= c.sight_range:
        return end, False
    row[column] = flag
    row[column + 1] = centres / c.sight_range
    row[column + 2] = dx / c.sight_range
    row[column + 3] = dy / c.sight_range
    column += 4
    if c.obs_all_health:
        column = write_health(row, column, e, j, s, c)
    write_type(row, column, j, c)
    return end, True


@_rule
def write_observation(e, i, s, c, view):
    """Writes the observation of agent ``i``: moves, enemies, allies, itself, time. Dead agents observe zeros."""
    row = view.observation[e, i]
    row[:] = ZERO
    if s.health[e, i] <= ZERO:
        return
    mask = view.action_mask[e, i]
    for k in range(4):
        row[k] = ONE if mask[NORTH + k] else ZERO
    column = write_terrain(row, 4, e, i, s, c)
    for k in range(c.num_enemies):
        flag = ONE if mask[FIRST_ATTACK + k] else ZERO
        column, _ = write_other(row, column, flag, e, i, c.num_agents + k, s, c)
    for j in range(c.num_agents):
        if j == i:
            continue
        column, seen = write_other(row, column, ONE, e, i, j, s, c)
        if c.obs_last_action:
            if seen and s.last_action[e, j] >= 0:
                row[column + s.last_action[e, j]] = ONE
            column += c.num_actions
    if c.obs_own_health:
        column = write_health(row, column, e, i, s, c)
    column = write_type(row, column, i, c)
    if c.obs_timestep_number:
        row[column] = np.float32(s.time[e]) / np.float32(c.limit)


@_rule
def write_state(e, s, c, view):
    """Writes the global state: agents, enemies, last actions, time. Rows of dead units are zero."""
    row = view.state[e]
    row[:] = ZERO
    size = np.float32(c.map_size)
    column = 0
    for i in range(c.num_agents + c.num_enemies):
        is_agent = i < c.num_agents
        end = column + (4 if is_agent else 3) + (1 if c.shield_bit[i] else 0) + c.type_bits
        if s.health[e, i] > ZERO:
            row[column] = s.health[e, i] / c.max_health[i]
            column += 1
            if is_agent:
                row[column] = s.cooldown[e, i] / c.cooldown_scale[i]
                column += 1
            row[column] = (s.x[e, i] - size * HALF) / size
            row[column + 1] = (s.y[e, i] - size * HALF) / size
            column += 2
            if c.shield_bit[i]:
                row[column] = s.shield[e, i] / c.max_shield[i]
                column += 1
            write_type(row, column, i, c)
        column = end
    if c.state_last_action:
        for i in range(c.num_agents):
            if s.last_action[e, i] >= 0:
                row[column + s.last_action[e, i]] = ONE
            column += c.num_actions
    if c.state_timestep_number:
        row[column] = np.float32(s.time[e]) / np.float32(c.limit)


@_rule
def observe(e, s, c, view):
    """Writes the decision point of instance ``e``."""
    write_masks(e, s, c, view)
    for i in range(c.num_agents):
        write_observation(e, i, s, c, view)
    if not c.obs_instead_of_state:
        write_state(e, s, c, view)
        return
    width = view.observation.shape[2]
    for i in range(c.num_agents):
        for k in range(width):
            view.state[e, i * width + k] = view.observation[e, i, k]


# -------- step


@_rule
def act(e, actions, s, c, out):
    """Gives the agents their orders. Illegal actions become ``STOP`` and are counted; the dead do nothing."""
    out.invalid_actions[e] = ZERO
    for i in range(c.num_agents):
        action = actions[e, i]
        if s.health[e, i] <= ZERO:
            action = NO_OP
        elif not is_legal(e, i, action, s, c):
            action = STOP
            out.invalid_actions[e] += ONE
        s.last_action[e, i] = action
        give_order(e, i, action, s, c)
    for i in range(c.num_agents + c.num_enemies):
        s.shot[e, i] = -1


@_rule
def count_alive(e, first, last, s):
    """Number of units of ``first <= i < last`` that are alive."""
    alive = 0
    for i in range(first, last):
        if s.health[e, i] > ZERO:
            alive += 1
    return alive


@_rule
def sum_points(e, first, last, s):
    """Health and shield of the units of ``first <= i < last``."""
    points = ZERO
    for i in range(first, last):
        points += s.health[e, i] + s.shield[e, i]
    return points


@_rule
def team_reward(enemy_loss, enemy_deaths, ally_loss, ally_deaths, dealt, won, lost, c):
    """Returns the scaled team reward of a step.

    Args:
        enemy_loss: net loss of health and shield of the enemies; negative if their shields regenerated more.
        enemy_deaths: enemies that died.
        ally_loss: net loss of health and shield of the agents.
        ally_deaths: agents that died.
        dealt: damage dealt to enemies, regardless of regeneration.
        won: whether the battle was won in this step.
        lost: whether it was lost.
        c: constants.
    """
    if c.reward_mode == _SPARSE:
        return (ONE if won else -ONE if lost else ZERO) * c.reward_factor
    kills = c.reward_death_value * np.float32(enemy_deaths)
    if c.reward_mode == _DAMAGE:
        reward = dealt + kills
    elif c.reward_mode == _SIGNED:
        losses = ally_loss + c.reward_death_value * np.float32(ally_deaths)
        reward = enemy_loss + kills - c.reward_negative_scale * losses
    elif c.reward_mode == _CLIP:
        reward = max(enemy_loss + kills, ZERO)
    else:
        reward = abs(enemy_loss + kills)
    if won:
        reward += c.reward_win
    elif lost:
        reward += c.reward_defeat
    return reward * c.reward_factor


@_rule
def step_instance(e, actions, s, c, now, final, out):
    """Makes one env step of instance ``e``; at the end of the episode keeps the successor and begins the next one."""
    num_agents, num_units = c.num_agents, c.num_agents + c.num_enemies
    allies_before = count_alive(e, 0, num_agents, s)
    enemies_before = count_alive(e, num_agents, num_units, s)
    ally_points = sum_points(e, 0, num_agents, s)
    enemy_points = sum_points(e, num_agents, num_units, s)
    out.damage_dealt[e] = ZERO
    out.damage_taken[e] = ZERO

    act(e, actions, s, c, out)
    key = stream_key(s.seed[e], s.episode[e], s.time[e], _WEAPON_DELAY)
    for tick in range(c.ticks):
        run_tick(e, mix(key, tick), s, c, out)
    s.time[e] += 1

    allies = count_alive(e, 0, num_agents, s)
    enemies = count_alive(e, num_agents, num_units, s)
    won = allies > 0 and enemies == 0
    lost = allies == 0 and enemies > 0
    over = allies == 0 or enemies == 0
    timeout = s.time[e] >= c.limit and not over
    reward = team_reward(
        enemy_points - sum_points(e, num_agents, num_units, s),
        enemies_before - enemies,
        ally_points - sum_points(e, 0, num_agents, s),
        allies_before - allies,
        out.damage_dealt[e],
        won,
        lost,
        c,
    )
    for i in range(num_agents):
        out.reward[e, i] = reward
    out.terminated[e] = over or (timeout and c.limit_is_terminal)
    out.truncated[e] = timeout and not c.limit_is_terminal
    out.battle_won[e] = ONE if won else ZERO
    out.timeout[e] = ONE if timeout else ZERO
    out.dead_allies[e] = np.float32(num_agents - allies)
    out.dead_enemies[e] = np.float32(c.num_enemies - enemies)
    out.ally_alive_frac[e] = np.float32(allies) / np.float32(num_agents)

    if over or timeout:
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
        actions: ``[N, A]`` int64.
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
