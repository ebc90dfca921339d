"""Sizes, blocks and legality of what agents see and may do."""

import numpy as np
import pytest
from smac_helpers import Battle

from marl_lightning.envs.native.smac import SmacVectorEnv
from marl_lightning.envs.native.smac.env import GROUP
from marl_lightning.envs.native.smac.kernel import EAST, FIRST_ATTACK, NO_OP, NORTH, SOUTH, STOP, WEST
from marl_lightning.envs.native.smac.layout import Layout
from marl_lightning.envs.native.smac.options import SmacOptions
from marl_lightning.envs.native.smac.scenarios import SCENARIOS

# map: agents, enemies, limit, actions, observation, state, max_reward
SIZES = {
    "3m": (3, 3, 60, 9, 30, 48, 365),
    "8m": (8, 8, 120, 14, 80, 168, 640),
    "25m": (25, 25, 150, 31, 250, 950, 1575),
    "5m_vs_6m": (5, 6, 70, 12, 55, 98, 530),
    "8m_vs_9m": (8, 9, 120, 15, 85, 179, 695),
    "10m_vs_11m": (10, 11, 150, 17, 105, 243, 805),
    "27m_vs_30m": (27, 30, 180, 36, 285, 1170, 1850),
    "2s3z": (5, 5, 120, 11, 80, 120, 1020),
    "3s5z": (8, 8, 150, 14, 128, 216, 1510),
    "3s5z_vs_3s6z": (8, 9, 170, 15, 136, 230, 1670),
    "3s_vs_3z": (3, 3, 150, 9, 36, 54, 680),
    "3s_vs_4z": (3, 4, 200, 10, 42, 61, 840),
    "3s_vs_5z": (3, 5, 250, 11, 48, 68, 1000),
    "2m_vs_1z": (2, 1, 150, 7, 16, 26, 360),
}


@pytest.mark.parametrize("map_name", SIZES)
def test_sizes_are_those_of_smac(map_name):
    layout = Layout(SCENARIOS[map_name], SmacOptions())
    sizes = (
        layout.num_agents,
        layout.num_enemies,
        layout.scenario.limit,
        layout.num_actions,
        layout.observation_size,
        layout.state_size,
        layout.max_reward,
    )
    assert sizes == SIZES[map_name]


def test_every_map_has_known_sizes():
    assert set(SIZES) == set(SCENARIOS)


@pytest.mark.parametrize(
    ("option", "value", "observation", "state"),
    [
        ("obs_all_health", False, 80 - 9 * 2, 120),
        ("obs_own_health", False, 80 - 2, 120),
        ("obs_last_action", True, 80 + 4 * 11, 120),
        ("obs_pathing_grid", True, 80 + 8, 120),
        ("obs_terrain_height", True, 80 + 9, 120),
        ("obs_timestep_number", True, 81, 120),
        ("obs_instead_of_state", True, 80, 400),
        ("state_last_action", False, 80, 120 - 55),
        ("state_timestep_number", True, 80, 121),
    ],
)
def test_every_switch_changes_the_sizes_on_2s3z(option, value, observation, state):
    env = SmacVectorEnv(map_name="2s3z", num_envs=1, **{option: value})
    first = env.reset()
    assert first.observation[GROUP].shape == (1, 5, observation)
    assert first.state.shape == (1, state)


@pytest.mark.parametrize("map_name", SCENARIOS)
def test_units_start_on_pathable_cells_without_overlap(map_name):
    battle = Battle(map_name)
    x, y, radius = battle.state.x[0], battle.state.y[0], battle.constants.radius
    assert battle.constants.pathable[x.astype(int), y.astype(int)].all()
    gaps = np.hypot(x[:, None] - x, y[:, None] - y) - radius[:, None] - radius
    assert gaps[~np.eye(len(x), dtype=bool)].min() > 0.04


def test_agents_are_sorted_by_type_then_position_and_enemies_mirror_them():
    units, points = SCENARIOS["2s3z"].ally_spawns()
    assert [unit.name for unit in units] == ["stalker"] * 2 + ["zealot"] * 3
    for side in (points[:2], points[2:]):
        assert sorted(side.tolist()) == side.tolist()
    _, enemies = SCENARIOS["3m"].enemy_spawns()
    _, allies = SCENARIOS["3m"].ally_spawns()
    reflected = np.array([9.0, 16.0]) + np.array([23.0, 16.0]) - allies
    np.testing.assert_allclose(sorted(enemies.tolist()), sorted(reflected.tolist()))


def test_observation_blocks_of_a_marine():
    battle = Battle("3m").put(0, x=10, y=16, health=30).put(1, x=13, y=20, health=45).put(2, x=1, y=16)
    battle.put(3, x=10, y=12, health=9).put(4, x=16, y=16).put(5, x=25, y=16)
    row = battle.observe().observation[GROUP][0, 0].numpy()
    expected = [
        *(1, 1, 1, 1),  # all moves
        *(1, 4 / 9, 0, -4 / 9, 9 / 45),  # enemy 0
        *(1, 6 / 9, 6 / 9, 0, 1),  # enemy 1, exactly at shooting range
        *(0, 0, 0, 0, 0),  # enemy 2, out of sight
        *(1, 5 / 9, 3 / 9, 4 / 9, 1),  # ally 1
        *(0, 0, 0, 0, 0),  # ally 2, exactly at sight range
        30 / 45,
    ]
    np.testing.assert_allclose(row, expected, rtol=1e-6)


def test_observation_blocks_with_shields_and_types():
    battle = Battle("2s3z").only(0, 2, 5, 7)
    battle.put(0, x=10, y=16, health=40, shield=20).put(2, x=10, y=18, health=50, shield=25)
    battle.put(5, x=13, y=16, shield=0).put(7, x=18, y=16)
    row = battle.observe().observation[GROUP][0, 0].numpy()
    enemies, allies, own = row[4:44].reshape(5, 8), row[44:76].reshape(4, 8), row[76:]
    np.testing.assert_allclose(enemies[0], [1, 3 / 9, 3 / 9, 0, 1, 0, 1, 0], rtol=1e-6)
    np.testing.assert_allclose(enemies[2], [0, 8 / 9, 8 / 9, 0, 1, 1, 0, 1], rtol=1e-6)
    np.testing.assert_allclose(allies[1], [1, 2 / 9, 0, 2 / 9, 0.5, 0.5, 0, 1], rtol=1e-6)
    np.testing.assert_allclose(own, [0.5, 0.25, 1, 0], rtol=1e-6)
    assert not enemies[[1, 3, 4]].any()
    assert not allies[[0, 2, 3]].any()


def test_enemy_type_bits_are_swapped_only_when_reproducing_smac():
    for aligned, bits in ((True, [1, 0]), (False, [0, 1])):
        battle = Battle("2s3z", align_unit_types=aligned)
        rows = battle.observe().state[0, 35:65].reshape(5, 6)
        assert rows[0, 4:].tolist() == bits  # the first enemy is a stalker
        assert battle.observe().state[0, 5:7].tolist() == [1, 0]  # so is the first agent


def test_state_blocks():
    battle = Battle("2s3z").only(0, 2, 5)
    battle.put(0, x=8, y=24, health=40, shield=20, cooldown=7).put(2, x=16, y=16, cooldown=11)
    battle.put(5, x=20, y=12, health=20, shield=8, cooldown=5)
    state = battle.observe().state[0].numpy()
    allies, enemies, actions = state[:35].reshape(5, 7), state[35:65].reshape(5, 6), state[65:]
    np.testing.assert_allclose(allies[0], [0.5, 7 / 35, -0.25, 0.25, 0.25, 1, 0], rtol=1e-6)
    np.testing.assert_allclose(allies[2], [1, 11 / 22, 0, 0, 1, 0, 1], rtol=1e-6)
    np.testing.assert_allclose(enemies[0], [0.25, 0.125, -0.125, 0.1, 1, 0], rtol=1e-6)
    assert not allies[[1, 3, 4]].any()
    assert not enemies[1:].any()
    assert not actions.any(), "no action has been taken yet"


def test_state_shows_last_actions_and_time():
    battle = Battle("3m", state_timestep_number=True, obs_timestep_number=True, obs_last_action=True)
    step = battle.step(NORTH, STOP, EAST)
    state = step.observations.state[0].numpy()
    np.testing.assert_array_equal(state[21:48].reshape(3, 9).argmax(1), [NORTH, STOP, EAST])
    assert state[48] == pytest.approx(1 / 60)
    row = step.observations.observation[GROUP][0, 0].numpy()
    ally_1, ally_2 = row[19:33], row[33:47]
    assert ally_1[5:].argmax() == STOP
    assert ally_2[5:].argmax() == EAST
    assert row[-1] == pytest.approx(1 / 60)


def test_state_can_be_the_observations():
    observations = Battle("3m", obs_instead_of_state=True).observe()
    np.testing.assert_array_equal(observations.state[0], observations.observation[GROUP][0].flatten())


def test_grids_around_an_agent():
    battle = Battle("3m", obs_pathing_grid=True, obs_terrain_height=True).put(0, x=1.5, y=21.5)
    row = battle.observe().observation[GROUP][0, 0].numpy()
    # north (1, 25) and the northern diagonals (3, 23) and (-1, 23): blocked, open, outside; the west is outside too.
    np.testing.assert_array_equal(row[4:12], [0, 1, 1, 1, 1, 1, 1, 1])
    np.testing.assert_array_equal(row[12:21], [0, 0, 0, 1, 0, 1, 0, 1, 0])


def test_dead_agents_see_nothing_and_only_do_nothing():
    battle = Battle("3m", obs_timestep_number=True, obs_pathing_grid=True).put(1, health=0)
    observations = battle.observe()
    assert not observations.observation[GROUP][0, 1].any()
    assert observations.alive[GROUP][0].tolist() == [True, False, True]
    assert battle.legal(1) == [NO_OP]
    assert NO_OP not in battle.legal(0)
    assert not observations.state[0, 4:8].any()


@pytest.mark.parametrize(("distance", "seen"), [(8.999, True), (9.0, False)])
def test_sight_range_is_strict(distance, seen):
    battle = Battle("3m").only(0, 3).put(0, x=4, y=16).put(3, x=4 + distance, y=16)
    block = battle.observe().observation[GROUP][0, 0, 4:9]
    assert block.any().item() == seen


@pytest.mark.parametrize(("distance", "legal"), [(6.0, True), (6.001, False)])
def test_shoot_range_is_inclusive(distance, legal):
    battle = Battle("3m").only(0, 3).put(0, x=4, y=16).put(3, x=4 + distance, y=16)
    assert (FIRST_ATTACK in battle.legal(0)) == legal


def test_dead_enemies_cannot_be_attacked():
    battle = Battle("3m").only(0, 4).put(0, x=10, y=16).put(3, x=11, y=16).put(4, x=12, y=16)
    assert [action for action in battle.legal(0) if action >= FIRST_ATTACK] == [FIRST_ATTACK + 1]


@pytest.mark.parametrize(
    ("x", "y", "blocked"),
    [
        (16.0, 16.0, set()),
        (16.0, 22.99, set()),  # one ahead is still cell 23
        (16.0, 23.0, {NORTH}),
        (16.0, 9.0, set()),
        (16.0, 8.99, {SOUTH}),
        (30.99, 16.0, set()),
        (31.0, 16.0, {EAST}),
        (0.5, 16.0, set()),  # -0.5 is truncated to cell 0
        (31.5, 23.5, {EAST, NORTH}),
    ],
)
def test_moves_into_blocked_cells_are_illegal(x, y, blocked):
    legal = set(Battle("3m").put(0, x=x, y=y).legal(0))
    assert {NORTH, SOUTH, EAST, WEST} - legal == blocked
    assert STOP in legal


def test_moves_at_the_border_of_a_flat_map():
    assert {NORTH, EAST} & set(Battle("3s_vs_3z").put(0, x=31.2, y=31.2).legal(0)) == set()


def test_feature_names_match_the_state():
    for map_name in SCENARIOS:
        layout = Layout(SCENARIOS[map_name], SmacOptions(state_last_action=False))
        size = layout.num_agents * len(layout.ally_feature_names) + layout.num_enemies * len(layout.enemy_feature_names)
        assert size == layout.state_size
