"""Single rules on fields set up by hand."""

import numpy as np
import pytest
from lbf_helpers import Field

from marl_lightning.envs.native.lbf.kernel import EAST, LOAD, NONE, NORTH, SOUTH, WEST
from marl_lightning.envs.native.lbf.layout import GROUP

FAR_FOOD = [6, 6, 1]


# -------- moving


def test_players_move_in_the_named_directions():
    field = Field(players=[[2, 2, 1], [4, 4, 1]], foods=[FAR_FOOD])
    for action, cell in ((NORTH, (1, 2)), (SOUTH, (2, 2)), (WEST, (2, 1)), (EAST, (2, 2)), (NONE, (2, 2))):
        field.step(action, NONE)
        assert field.cells() == [cell, (4, 4)]


def test_players_that_want_the_same_cell_stay():
    field = Field(players=[[2, 2, 1], [2, 4, 1]], foods=[FAR_FOOD])
    field.step(EAST, WEST)
    assert field.cells() == [(2, 2), (2, 4)]


@pytest.mark.parametrize("stay", [NONE, LOAD])
def test_nobody_enters_the_cell_of_a_player_that_stays(stay):
    field = Field(players=[[5, 5, 1], [5, 6, 1]], foods=[[6, 6, 3]])
    field.step(EAST, stay)
    assert field.cells()[0] == (5, 5)


def test_players_may_swap_cells():
    field = Field(players=[[2, 2, 1], [2, 3, 1]], foods=[FAR_FOOD])
    field.step(EAST, WEST)
    assert field.cells() == [(2, 3), (2, 2)]


def test_players_may_follow_each_other():
    field = Field(players=[[2, 2, 1], [2, 3, 1]], foods=[FAR_FOOD])
    field.step(EAST, EAST)
    assert field.cells() == [(2, 3), (2, 4)]


def test_a_player_enters_the_cell_of_one_that_could_not_leave_and_both_can_part_again():
    field = Field(players=[[2, 2, 1], [2, 3, 1], [2, 5, 1]], foods=[FAR_FOOD])
    field.step(EAST, EAST, WEST)
    assert field.cells() == [(2, 3), (2, 3), (2, 5)]
    field.step(NONE, NONE, NONE)
    assert field.cells() == [(2, 3), (2, 3), (2, 5)]
    field.step(NORTH, NONE, NONE)
    assert field.cells() == [(1, 3), (2, 3), (2, 5)]


# -------- legality


def test_borders_and_foods_block_but_players_do_not():
    field = Field(players=[[0, 0, 1], [0, 1, 1]], foods=[[1, 1, 1]])
    assert field.legal(0) == [NONE, SOUTH, EAST]
    assert field.legal(1) == [NONE, WEST, EAST, LOAD]
    field.state.players[0, 0] = [7, 7, 1]
    assert field.legal(0) == [NONE, NORTH, WEST]


@pytest.mark.parametrize(("cell", "blocked"), [((4, 3), NORTH), ((2, 3), SOUTH), ((3, 4), WEST), ((3, 2), EAST)])
def test_beside_a_food_one_may_load_it_but_not_enter_it(cell, blocked):
    field = Field(players=[[*cell, 1], [6, 6, 1]], foods=[[3, 3, 1]])
    assert field.legal(0) == sorted({NONE, NORTH, SOUTH, WEST, EAST, LOAD} - {blocked})


def test_foods_that_were_eaten_neither_block_nor_load():
    field = Field(players=[[3, 2, 1], [6, 6, 1]], foods=[[3, 3, 0], FAR_FOOD])
    assert field.legal(0) == [NONE, NORTH, SOUTH, WEST, EAST]


@pytest.mark.parametrize("action", [NORTH, WEST, LOAD, -1, 6, 64, 2**40, -(2**40)])
def test_actions_that_are_not_legal_count_as_none(action):
    field = Field(players=[[0, 0, 1], [2, 2, 1]], foods=[FAR_FOOD], penalty=1.0)
    step = field.step(action, NONE)
    assert field.cells() == [(0, 0), (2, 2)]
    assert not step.reward[GROUP].any()


# -------- loading


def test_rewards_are_shared_by_level_and_sum_up_to_one():
    field = Field(players=[[3, 2, 1], [3, 4, 2], [6, 5, 1]], foods=[[3, 3, 3], FAR_FOOD])
    step = field.step(LOAD, LOAD, NONE)
    np.testing.assert_allclose(step.reward[GROUP][0], [0.25, 0.5, 0])
    assert step.info["food_left"][0] == 1
    assert not step.terminated[0]
    step = field.step(NONE, NONE, LOAD)
    np.testing.assert_allclose(step.reward[GROUP][0], [0, 0, 0.25])
    assert step.terminated[0]
    assert not step.truncated[0]


def test_rewards_without_normalisation():
    field = Field(players=[[3, 2, 1], [3, 4, 2]], foods=[[3, 3, 3]], normalize_reward=False)
    assert field.step(LOAD, LOAD).reward[GROUP][0].tolist() == [3, 6]


def test_loaders_that_are_too_weak_pay_the_penalty():
    field = Field(players=[[3, 2, 1], [3, 4, 1], [2, 3, 1]], foods=[[3, 3, 3]], penalty=0.5)
    step = field.step(LOAD, LOAD, NONE)
    assert step.reward[GROUP][0].tolist() == [-0.5, -0.5, 0]
    assert step.info["food_left"][0] == 1
    assert field.step(LOAD, LOAD, LOAD).terminated[0]


def test_zero_penalty_is_plain_zero():
    field = Field(players=[[3, 2, 1], [6, 1, 1]], foods=[[3, 3, 3]])
    assert not np.signbit(field.step(LOAD, NONE).reward[GROUP].numpy()).any()


def test_only_players_beside_the_same_food_load_together():
    field = Field(players=[[3, 2, 1], [6, 5, 2]], foods=[[3, 3, 2], [6, 6, 2]], penalty=0.5)
    assert field.step(LOAD, LOAD).reward[GROUP][0].tolist() == [-0.5, 0.5]


def test_a_player_that_arrives_in_this_step_does_not_load():
    field = Field(players=[[3, 2, 1], [3, 5, 1]], foods=[[3, 3, 2]])
    step = field.step(LOAD, WEST)
    assert not step.reward[GROUP].any()
    assert field.step(LOAD, LOAD).terminated[0]


# -------- ends


def test_the_time_limit_truncates():
    field = Field(players=[[3, 2, 1], [6, 1, 1]], foods=[[3, 3, 1]], episode_limit=3)
    for end in (False, False, True):
        step = field.step(NONE, NONE)
        assert not step.terminated[0]
        assert bool(step.truncated[0]) is end


def test_an_end_of_the_game_in_the_last_step_is_only_a_termination():
    field = Field(players=[[3, 2, 1], [6, 1, 1]], foods=[[3, 3, 1]], episode_limit=1)
    step = field.step(LOAD, NONE)
    assert step.terminated[0]
    assert not step.truncated[0]


def test_automatic_reset_keeps_the_true_successor():
    field = Field(players=[[3, 2, 1], [6, 1, 2]], foods=[[3, 3, 1]])
    step = field.step(LOAD, WEST)
    final = step.final
    assert final.state[0].tolist() == [-1, -1, 0, 3, 2, 1, 6, 0, 2]
    assert final.observation[GROUP][0, 0].tolist() == [-1, -1, 0, 3, 2, 1, 6, 0, 2]
    assert np.flatnonzero(final.action_mask[GROUP][0, 1]).tolist() == [NONE, NORTH, SOUTH, EAST]
    assert step.info["food_left"][0] == 0
    # The next decision point: a new field.
    assert step.observations.state[0].tolist() == [*field.state.foods[0, 0], *field.state.players[0].ravel()]
    assert step.observations.state[0, 2] > 0
    assert step.observations.observation[GROUP][0, 0].equal(step.observations.state[0])
    legal = step.observations.action_mask[GROUP].clone()
    assert legal.equal(field.observe().action_mask[GROUP])
    assert field.state.time[0] == 0
    assert field.state.episode[0] == 1


# -------- observations


def test_positions_are_relative_to_the_corner_in_sight_and_own_entries_come_first():
    field = Field(players=[[4, 4, 1], [3, 5, 2]], foods=[[2, 3, 1], [5, 6, 3]], sight=2)
    observation = field.observe().observation[GROUP][0]
    assert observation[0].tolist() == [0, 1, 1, 3, 4, 3, 2, 2, 1, 1, 3, 2]
    assert observation[1].tolist() == [1, 0, 1, 4, 3, 3, 2, 2, 2, 3, 1, 1]


def test_what_is_out_of_sight_is_not_observed():
    field = Field(players=[[4, 4, 1], [4, 7, 2]], foods=[[1, 4, 1], [5, 5, 3]], sight=2)
    assert field.observe().observation[GROUP][0, 0].tolist() == [3, 3, 3, -1, -1, 0, 2, 2, 1, -1, -1, 0]


def test_at_the_upper_border_players_are_seen_farther_than_foods():
    field = Field(players=[[0, 2, 1], [4, 2, 2]], foods=[[4, 3, 1]], sight=2)
    assert field.observe().observation[GROUP][0, 0].tolist() == [-1, -1, 0, 0, 2, 1, 4, 2, 2]


def test_grid_observation():
    field = Field(players=[[0, 1, 1], [1, 2, 2]], foods=[[1, 1, 3]], sight=1, grid_observation=True)
    observation = field.observe().observation[GROUP][0, 0]
    assert observation[0].tolist() == [[0, 0, 0], [0, 1, 0], [0, 0, 2]]
    assert observation[1].tolist() == [[0, 0, 0], [0, 0, 0], [0, 3, 0]]
    assert observation[2].tolist() == [[0, 0, 0], [1, 0, 1], [1, 0, 0]]


def test_state_lists_foods_and_players_of_the_whole_field():
    field = Field(players=[[7, 0, 2], [0, 7, 1]], foods=[[2, 3, 0], [5, 6, 3]], sight=1)
    assert field.observe().state[0].tolist() == [5, 6, 3, -1, -1, 0, 7, 0, 2, 0, 7, 1]
