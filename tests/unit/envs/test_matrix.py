"""Matrix games by hand, as a vector environment and as one instance."""

import numpy as np
import pytest
import torch

from marl_lightning.envs import check_env, make_env, make_vector_env
from marl_lightning.envs.native.matrix import GAMES, REPEATED_GAMES, MatrixVectorEnv, payoffs


def test_climbing_pays_both_the_same():
    expected = [[11, -30, 0], [-30, 7, 6], [0, 0, 5]]
    assert payoffs("climbing").tolist() == [expected, expected]


def test_penalty_has_k_in_two_corners():
    expected = [[10, 0, -50], [0, 2, 0], [-50, 0, 10]]
    assert payoffs("penalty", k=-50.0).tolist() == [expected, expected]
    assert payoffs("penalty")[0, 0, 2] == 0  # the argument above did not stick


def test_prisoners_dilemma_is_a_dilemma():
    row, column = payoffs("prisoners_dilemma")
    assert row.tolist() == [[3, 0], [5, 1]]
    assert column.tolist() == [[3, 5], [0, 1]]
    assert (row[1] > row[0]).all()  # defection dominates
    assert row[0, 0] > row[1, 1]


@pytest.mark.parametrize("game", ["matching_pennies", "rock_paper_scissors"])
def test_zero_sum_games_sum_to_zero_and_are_fair(game):
    both = payoffs(game)
    assert not both.sum(0).any()
    assert not both.mean((1, 2)).any()


def test_paper_beats_rock_and_loses_to_scissors():
    rock, paper, scissors = range(3)
    row = payoffs("rock_paper_scissors")[0]
    assert (row[paper, rock], row[paper, scissors], row[rock, scissors], row[paper, paper]) == (1, -1, 1, 0)


def test_the_equilibrium_of_tricky_is_mixed():
    row, column = payoffs("tricky")
    assert (row @ [0.5, 0.5]).tolist() == [1.5, 1.5]  # against an even mixture, nobody prefers an action
    assert ([0.5, 0.5] @ column).tolist() == [1.5, 1.5]
    best_rows, best_columns = row.argmax(0), column.argmax(1)
    assert not any(best_rows[b] == a and best_columns[a] == b for a in range(2) for b in range(2))


@pytest.mark.parametrize("game", REPEATED_GAMES)
def test_rewards_follow_the_payoffs(game):
    table = payoffs(game)
    n = table.shape[1]
    env = MatrixVectorEnv(game=game, num_envs=n * n)
    env.reset()
    joint = torch.cartesian_prod(torch.arange(n), torch.arange(n))
    reward = env.step({"agents": joint}).reward["agents"]
    for (a, b), pair in zip(joint.tolist(), reward.tolist(), strict=True):
        assert pair == [table[0, a, b], table[1, a, b]]


def test_spec_and_constant_observations():
    env = MatrixVectorEnv(game="climbing", num_envs=4, episode_length=7)
    assert env.is_repeated
    group = env.spec.groups["agents"]
    assert (env.spec.name, group.num_agents, group.action_size, env.spec.episode_limit) == ("matrix/climbing", 2, 3, 7)
    observations = env.reset()
    assert torch.equal(observations.observation["agents"], torch.ones(4, 2, 1))
    assert torch.equal(observations.state, torch.ones(4, 2))
    assert observations.alive["agents"].all()
    assert observations.action_mask["agents"].all()


def test_episodes_end_by_truncation_after_their_length():
    env = MatrixVectorEnv(game="climbing", num_envs=2, episode_length=3)
    env.reset()
    actions = {"agents": torch.zeros(2, 2, dtype=torch.long)}
    ends = []
    for time in range(6):
        if time == 1:
            env.reset(mask=np.array([False, True]))
        step = env.step(actions)
        assert not step.terminated.any()
        ends.append(step.truncated.tolist())
    assert [t + 1 for t, (first, _) in enumerate(ends) if first] == [3, 6]
    assert [t + 1 for t, (_, second) in enumerate(ends) if second] == [4]
    assert torch.equal(step.final.state, torch.ones(2, 2))


def test_saved_state_keeps_the_time():
    env = MatrixVectorEnv(game="penalty", num_envs=2, episode_length=5, k=-3.0)
    env.reset()
    actions = {"agents": torch.tensor([[0, 2], [0, 2]])}
    for _ in range(3):
        env.step(actions)
    state = env.state_dict()
    env.step(actions)
    other = env.replicate(num_envs=2, seed=1)
    other.load_state_dict(state)
    assert not other.step(actions).truncated.any()
    step = other.step(actions)
    assert step.truncated.all()
    assert step.reward["agents"].tolist() == [[-3, -3], [-3, -3]]
    with pytest.raises(ValueError, match="holds 2 instances, this environment 3"):
        env.replicate(num_envs=3, seed=1).load_state_dict(state)


@pytest.mark.parametrize("action", [3, -1])
def test_illegal_actions_are_refused(action):
    env = MatrixVectorEnv(game="climbing", num_envs=2)
    env.reset()
    with pytest.raises(ValueError, match=f"illegal action {action} of agent 'agent_1' in environment 1"):
        env.step({"agents": torch.tensor([[0, 0], [0, action]])})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"game": "chess"}, "unknown matrix game 'chess'"),
        ({"game": "climbing", "k": -1.0}, "only the game 'penalty' has k"),
        ({"game": "two_step", "k": -1.0}, "only the game 'penalty' has k"),
        ({"game": "two_step", "episode_length": 25}, "'two_step' has 2 steps, got episode_length=25: leave it out"),
        ({"game": "climbing", "episode_length": 0}, "episode_length must be at least 1"),
        ({"game": "climbing", "num_envs": 0}, "num_envs must be at least 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        MatrixVectorEnv(**{"num_envs": 1, **arguments})


def test_a_game_in_steps_is_no_repeated_one():
    assert set(GAMES) - set(REPEATED_GAMES) == {"two_step"}
    with pytest.raises(ValueError, match="unknown repeated game 'two_step', choose one of climbing"):
        payoffs("two_step")


def place(number):
    """What both agents observe where a matrix of the two-step game is played, and the state."""
    one_hot = torch.eye(3)[number]
    return one_hot.expand(2, 3), torch.cat([one_hot, one_hot])


def check_places(observations, numbers):
    for i, number in enumerate(numbers):
        observed, state = place(number)
        assert torch.equal(observations.observation["agents"][i], observed)
        assert torch.equal(observations.state[i], state)


def test_two_step_is_the_game_of_the_paper():
    """All 16 plays: the first agent's first action chooses between 7 always, and [[0, 1], [1, 8]]."""
    plays = torch.cartesian_prod(*[torch.arange(2)] * 4)
    env = make_vector_env("matrix/two_step", num_envs=16)
    assert (env.spec.episode_limit, env.spec.state_size, env.spec.shared_reward) == (2, 6, True)
    assert not env.is_repeated
    check_places(env.reset(), [0] * 16)
    chosen = [1 + first for first, *_ in plays.tolist()]
    step = env.step({"agents": plays[:, :2]})
    assert not step.reward["agents"].any()
    assert not (step.terminated | step.truncated).any()
    check_places(step.observations, chosen)
    check_places(step.final, chosen)
    step = env.step({"agents": plays[:, 2:]})
    paid = [7 if first == 0 else {0: 0, 1: 1, 2: 8}[third + fourth] for first, _, third, fourth in plays.tolist()]
    assert step.reward["agents"].tolist() == [[reward, reward] for reward in paid]
    assert step.terminated.all()
    assert not step.truncated.any()
    check_places(step.observations, [0] * 16)
    check_places(step.final, chosen)
    step = env.step({"agents": plays[:, 2:]})  # of the next episode
    assert not step.reward["agents"].any()
    assert not step.terminated.any()


def test_two_step_is_sound_and_resumes_in_any_place():
    check_env(make_env("matrix/two_step"))
    env = MatrixVectorEnv(game="two_step", num_envs=3)
    env.reset()
    env.step({"agents": torch.tensor([[0, 0], [1, 0], [1, 1]])})
    other = env.replicate(num_envs=3, seed=0)
    check_places(other.load_state_dict(env.state_dict()), [1, 2, 2])
    check_places(env.reset(mask=np.array([False, True, False])), [1, 0, 2])
    both = torch.ones(3, 2, dtype=torch.long)
    assert env.step({"agents": both}).reward["agents"][:, 0].tolist() == [7, 0, 8]
    step = other.step({"agents": both})
    assert step.reward["agents"][:, 0].tolist() == [7, 8, 8]
    assert step.terminated.all()


def test_step_and_partial_reset_need_a_reset():
    env = MatrixVectorEnv(game="climbing", num_envs=1)
    with pytest.raises(RuntimeError, match="reset before step"):
        env.step({"agents": torch.zeros(1, 2, dtype=torch.long)})
    with pytest.raises(RuntimeError, match="without a mask"):
        env.reset(mask=np.ones(1, np.bool_))


def test_one_instance():
    env = make_env("matrix/climbing", episode_length=2)
    with pytest.raises(RuntimeError, match="call reset"):
        env.step({"agents": np.array([0, 0])})
    env.reset()
    assert env.step({"agents": np.array([1, 2])}).reward["agents"].tolist() == [6, 6]
    with pytest.raises(ValueError, match="illegal action 3"):
        env.step({"agents": np.array([0, 3])})
    step = env.step({"agents": np.array([0, 0])})
    assert (step.terminated, step.truncated) == (False, True)
    with pytest.raises(RuntimeError, match="over"):
        env.step({"agents": np.array([0, 0])})
    with pytest.raises(NotImplementedError, match="cannot be rendered"):
        env.render()
