"""Single rules in maps of a few cells."""

import numpy as np
import pytest
from rware_helpers import Floor

from marl_lightning.envs.native.rware.kernel import (
    DELIVERED,
    DIRECTION,
    DOWN,
    FORWARD,
    LEFT,
    NO_SHELF,
    NONE,
    RIGHT,
    SHELF,
    TOGGLE_LOAD,
    TURN_LEFT,
    TURN_RIGHT,
    UP,
)
from marl_lightning.envs.native.rware.layout import GROUP

HALL = """
....
....
....
...g
xxxx
"""
# Shelves 0 … 3 are in row 4.


def hall(*agents, **options):
    return Floor(HALL, agents=list(agents), **options)


# -------- moving and turning


@pytest.mark.parametrize(
    ("direction", "cell"),
    [(UP, (1, 0)), (DOWN, (1, 2)), (LEFT, (0, 1)), (RIGHT, (2, 1))],
    ids=["up", "down", "left", "right"],
)
def test_forward(direction, cell):
    floor = hall((1, 1, direction))
    floor.step(FORWARD)
    assert floor.cells() == [cell]


@pytest.mark.parametrize("agent", [(1, 0, UP), (1, 4, DOWN), (0, 1, LEFT), (3, 1, RIGHT)])
def test_walls_stop(agent):
    floor = hall(agent)
    floor.step(FORWARD)
    assert floor.cells() == [agent[:2]]


@pytest.mark.parametrize(
    ("action", "circle"), [(TURN_RIGHT, [UP, RIGHT, DOWN, LEFT]), (TURN_LEFT, [UP, LEFT, DOWN, RIGHT])]
)
def test_turning(action, circle):
    floor = hall((1, 1, UP))
    for direction in [*circle[1:], UP]:
        floor.step(action)
        assert floor.state.agents[0, 0, DIRECTION] == direction
        assert floor.cells() == [(1, 1)]


@pytest.mark.parametrize("action", [NONE, -1, 5])
def test_nothing_happens_without_a_known_action(action):
    floor = hall((1, 4, UP))
    before = floor.state.agents.copy()
    floor.step(action)
    np.testing.assert_array_equal(floor.state.agents, before)


# -------- meeting each other


def test_a_queue_moves_as_one():
    floor = hall((0, 0, RIGHT), (1, 0, RIGHT), (2, 0, DOWN))
    floor.step(FORWARD, FORWARD, FORWARD)
    assert floor.cells() == [(1, 0), (2, 0), (2, 1)]


def test_a_queue_waits_for_who_stays():
    floor = hall((0, 0, RIGHT), (1, 0, RIGHT), (2, 0, DOWN))
    floor.step(FORWARD, FORWARD, TURN_LEFT)
    assert floor.cells() == [(0, 0), (1, 0), (2, 0)]


def test_nobody_swaps_and_those_behind_wait():
    floor = hall((0, 0, RIGHT), (1, 0, RIGHT), (2, 0, LEFT))
    floor.step(FORWARD, FORWARD, FORWARD)
    assert floor.cells() == [(0, 0), (1, 0), (2, 0)]


def test_a_circle_turns_and_those_outside_of_it_wait():
    floor = hall((2, 0, LEFT), (0, 0, RIGHT), (1, 0, DOWN), (1, 1, LEFT), (0, 1, UP))
    floor.step(*[FORWARD] * 5)
    assert floor.cells() == [(2, 0), (1, 0), (1, 1), (0, 1), (0, 0)]


def test_the_longest_queue_goes_first():
    floor = hall((0, 1, RIGHT), (1, 0, DOWN), (2, 1, LEFT), (3, 1, LEFT))
    floor.step(*[FORWARD] * 4)
    assert floor.cells() == [(0, 1), (1, 0), (1, 1), (2, 1)]


def test_of_equal_queues_that_with_the_lowest_head_goes_first():
    floor = hall((3, 1, LEFT), (1, 0, DOWN), (2, 1, LEFT), (1, 2, UP), (0, 1, RIGHT), (1, 3, UP))
    # Two queues of two, with the heads 2 and 3, and two of one.
    floor.step(*[FORWARD] * 6)
    assert floor.cells() == [(2, 1), (1, 0), (1, 1), (1, 2), (0, 1), (1, 3)]


def test_ties_deep_in_a_queue():
    # Agents 1 and 2 want the cell of agent 0, which moves on.
    floor = hall((1, 1, RIGHT), (1, 0, DOWN), (1, 2, UP))
    floor.step(FORWARD, FORWARD, FORWARD)
    assert floor.cells() == [(2, 1), (1, 1), (1, 2)]


# -------- shelves


def test_taking_carrying_and_putting_down():
    floor = hall((1, 4, RIGHT))
    floor.step(TOGGLE_LOAD)
    assert floor.state.agents[0, 0, SHELF] == 1
    floor.step(TURN_LEFT)
    floor.step(FORWARD)
    assert floor.state.shelves[0, 1].tolist() == [1, 3]
    floor.step(TOGGLE_LOAD)
    assert floor.state.agents[0, 0, SHELF] == 1, "nothing can be put down on a way"
    floor.step(TURN_LEFT)
    floor.step(TURN_LEFT)
    floor.step(FORWARD)
    floor.step(TOGGLE_LOAD)
    assert floor.state.agents[0, 0, SHELF] == NO_SHELF
    assert floor.state.shelves[0, 1].tolist() == [1, 4]


def test_there_is_nothing_to_take_on_an_empty_cell():
    floor = hall((1, 1, RIGHT))
    floor.step(TOGGLE_LOAD)
    assert floor.state.agents[0, 0, SHELF] == NO_SHELF


def test_only_agents_without_a_shelf_pass_below_shelves():
    floor = hall((1, 4, RIGHT))
    floor.step(FORWARD)
    assert floor.cells() == [(2, 4)]
    floor.step(TOGGLE_LOAD)
    floor.step(FORWARD)
    assert floor.cells() == [(2, 4)]
    assert floor.state.agents[0, 0, SHELF] == 2


def test_a_loaded_agent_follows_a_loaded_one_but_not_one_below_a_shelf():
    floor = hall((0, 4, RIGHT), (1, 4, UP))
    floor.give(0, 0)
    floor.step(FORWARD, FORWARD)
    assert floor.cells() == [(0, 4), (1, 3)], "shelf 1 stays"
    floor = hall((0, 4, RIGHT), (1, 4, UP))
    floor.give(0, 0)
    floor.give(1, 1)
    floor.step(FORWARD, FORWARD)
    assert floor.cells() == [(1, 4), (1, 3)]
    assert floor.state.shelves[0, :2].tolist() == [[1, 4], [1, 3]]


# -------- deliveries


@pytest.mark.parametrize(
    ("reward_type", "rewards"), [("individual", [0.0, 1.0]), ("global", [1.0, 1.0]), ("two_stage", [0.0, 0.5])]
)
def test_delivery(reward_type, rewards):
    floor = hall((0, 0, UP), (2, 3, RIGHT), requests=(2,), reward_type=reward_type)
    floor.give(1, 2)
    step = floor.step(NONE, FORWARD)
    assert step.reward[GROUP].tolist() == [rewards]
    assert step.info["deliveries"].tolist() == [1.0]
    assert floor.state.requested[0].sum() == 1
    assert not floor.state.requested[0, 2], "another shelf is requested"
    assert floor.state.agents[0, 1, DELIVERED] == (reward_type == "two_stage")
    assert floor.env.spec.shared_reward == (reward_type == "global")


def test_a_shelf_that_is_not_requested_is_not_delivered():
    floor = hall((2, 3, RIGHT), requests=(0,))
    floor.give(0, 2)
    step = floor.step(FORWARD)
    assert not step.reward[GROUP].any()
    assert floor.state.requested[0].tolist() == [True, False, False, False]


def test_a_shelf_that_is_requested_at_the_goal_is_delivered_again():
    floor = hall((3, 3, RIGHT), requests=(0,))
    floor.give(0, 2)
    assert not floor.step(NONE).reward[GROUP].any()
    floor.state.requested[0] = np.arange(4) == 2
    assert floor.step(NONE).reward[GROUP].tolist() == [[1.0]]


def test_the_second_stage_is_putting_the_shelf_back():
    floor = hall((2, 4, UP), (0, 4, UP), requests=(0,), reward_type="two_stage")
    floor.give(0, 2, delivered=True)
    floor.give(1, 0)
    step = floor.step(TOGGLE_LOAD, TOGGLE_LOAD)
    assert step.reward[GROUP].tolist() == [[0.5, 0.0]], "shelf 0 was not delivered"
    assert floor.state.agents[0, 0, DELIVERED] == 0


def test_every_shelf_that_is_not_requested_is_requested_next_with_equal_chances():
    counts = np.zeros(4, int)
    floor = hall((3, 3, UP), requests=(1, 2))
    for sample in range(2000):
        floor.state.seed[0] = sample
        floor.state.requested[0] = [False, True, True, False]
        floor.give(0, 2)
        floor.step(NONE)
        floor.state.time[0] = 0
        assert floor.state.requested[0].sum() == 2
        assert floor.state.requested[0, 1]
        counts += floor.state.requested[0]
    assert counts[2] == 0
    assert abs(counts[0] - 1000) < 90, "four standard deviations"


# -------- ends


def test_time_limit_truncates():
    floor = hall((0, 0, UP), max_steps=3)
    ends = [(s.terminated.item(), s.truncated.item()) for s in (floor.step(NONE) for _ in range(4))]
    assert ends == [(False, False), (False, False), (False, True), (False, False)]


def test_inactivity_terminates_and_deliveries_prevent_it():
    floor = hall((2, 3, RIGHT), requests=(2,), max_inactivity_steps=3, max_steps=None)
    floor.give(0, 2)
    actions = (NONE, NONE, FORWARD, NONE, NONE, NONE)
    # The shelf that is requested next is another one.
    steps = [(step.terminated.item(), step.truncated.item()) for step in map(floor.step, actions)]
    assert steps == [(False, False)] * 5 + [(True, False)]
    assert floor.state.time[0] == 0


def test_inactivity_goes_before_the_time_limit():
    floor = hall((0, 0, UP), max_inactivity_steps=2, max_steps=2)
    floor.step(NONE)
    step = floor.step(NONE)
    assert (step.terminated.item(), step.truncated.item()) == (True, False)


# -------- what is shown


def test_observation():
    floor = hall((1, 3, LEFT), (2, 4, DOWN), requests=(2,))
    floor.give(1, 2)
    first, second = floor.observe().observation[GROUP][0].reshape(2, -1).tolist()
    assert len(first) == 71
    assert first[:8] == [1, 3, 0, 0, 0, 1, 0, 1]
    assert second[:8] == [2, 4, 1, 0, 1, 0, 0, 0]
    cells = np.array(first[8:]).reshape(3, 3, 7)
    nothing, shelf = [0, 1, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 1, 0]
    assert cells[:2].reshape(-1, 7).tolist() == [nothing] * 4 + [[1, 0, 0, 1, 0, 0, 0]] + [nothing]
    assert cells[2].tolist() == [shelf, shelf, [1, 0, 1, 0, 0, 1, 1]]
    assert np.array(second[8:]).reshape(3, 3, 7)[2].tolist() == [nothing] * 3, "outside of the map there is nothing"


def test_messages_are_seen_in_the_next_step():
    floor = hall((1, 1, UP), (2, 1, UP), msg_bits=2)
    step = floor.step([NONE, 1, 0], [NONE, 3, 1])
    cells = step.observations.observation[GROUP][0, 0, 8:].reshape(3, 3, 9)
    assert cells[1, 1].tolist() == [1, 1, 0, 0, 0, 1, 0, 0, 0]
    assert cells[1, 2].tolist() == [1, 1, 0, 0, 0, 0, 1, 0, 0], "a bit that is not 1 is 0"
    assert cells[1, 0, 5:7].tolist() == [0, 0]
    assert floor.env.reset().observation[GROUP][0, :, 8:].reshape(2, 9, 9)[..., 5:7].sum() == 0


def test_normalised_coordinates():
    floor = hall((1, 3, LEFT), normalised_coordinates=True)
    shown = floor.observe()
    np.testing.assert_array_equal(shown.observation[GROUP][0, 0, :2], np.array([1 / 3, 3 / 4], np.float32))
    np.testing.assert_array_equal(shown.state[0, :2], np.array([1 / 3, 3 / 4], np.float32))


@pytest.mark.parametrize("direction", [UP, DOWN, LEFT, RIGHT])
def test_image_layers(direction):
    layers = ["shelves", "requests", "agents", "agent_direction", "agent_load", "goals", "accessible"]
    floor = hall(
        (2, 3, direction),
        (3, 4, LEFT),
        requests=(3,),
        observation_type="image",
        image_observation_layers=layers,
        image_observation_directional=False,
    )
    floor.give(1, 3)
    images = floor.observe().observation[GROUP][0, 0].int().tolist()
    assert images == [
        [[0, 0, 0], [0, 0, 0], [1, 1, 1]],
        [[0, 0, 0], [0, 0, 0], [0, 0, 1]],
        [[0, 0, 0], [0, 1, 0], [0, 0, 1]],
        [[0, 0, 0], [0, direction + 1, 0], [0, 0, LEFT + 1]],
        [[0, 0, 0], [0, 0, 0], [0, 0, 1]],
        [[0, 0, 0], [0, 0, 1], [0, 0, 0]],
        [[1, 1, 1], [1, 0, 1], [1, 1, 0]],
    ]
    turned = hall((2, 3, direction), observation_type="image", image_observation_layers=["shelves"])
    shelves = turned.observe().observation[GROUP][0, 0, 0].tolist()
    ahead, behind = shelves[0], shelves[2]
    left, right = [row[0] for row in shelves], [row[2] for row in shelves]
    assert {UP: behind, DOWN: ahead, LEFT: left, RIGHT: right}[direction] == [1, 1, 1]
    assert sum(map(sum, shelves)) == 3


def test_state():
    floor = hall((1, 3, LEFT), (2, 4, DOWN), requests=(2,), reward_type="two_stage", msg_bits=1, max_inactivity_steps=4)
    floor.give(1, 2, delivered=True)
    floor.step([NONE, 1], [FORWARD, 0])
    assert floor.env._step.observations.state[0].tolist() == [
        *[1, 3, 0, 0, 0, 1, 0, 0, 1],
        *[2, 4, 1, 0, 1, 0, 0, 1, 0],
        *[0, 4, 0],
        *[1, 4, 0],
        *[2, 4, 1],
        *[3, 4, 0],
        0.25,
    ]
