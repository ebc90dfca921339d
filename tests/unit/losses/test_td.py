"""Targets of temporal-difference learning, with numbers worked out by hand and a recursion as an oracle."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from marl_lightning.losses.td import greedy_action, n_step_target, one_step_target, take, td_lambda_target, td_loss

T, F = True, False


def column(*values):
    return torch.tensor(values).unsqueeze(-1)


def test_greedy_actions_are_legal_and_the_first_of_equals():
    value = torch.tensor([[1.0, 5.0, 2.0], [-4.0, -3.0, -9.0], [7.0, 7.0, 0.0]])
    mask = torch.tensor([[T, F, T], [F, F, T], [T, T, T]])
    assert greedy_action(value, mask).tolist() == [2, 2, 0]
    assert greedy_action(value, None).tolist() == [1, 1, 0]
    assert take(value, torch.tensor([0, 2, 1])).tolist() == [1, -9, 7]


def test_one_step():
    reward, next_value = column(1.0, 2.0, 3.0), column(10.0, 20.0, float("nan"))
    target = one_step_target(reward=reward, next_value=next_value, terminated=column(F, F, T), gamma=0.5)
    assert target.squeeze(-1).tolist() == [6, 12, 3]


# Five steps; the game is over after step 1, the episode is cut after step 3.
REWARD = column(1.0, 2.0, 4.0, 8.0, 16.0)
NEXT_VALUE = column(100.0, 999.0, 300.0, 400.0, 500.0)
TERMINATED = column(F, T, F, F, F)
DONE = column(F, T, F, T, F)
PATH = {"reward": REWARD, "next_value": NEXT_VALUE, "terminated": TERMINATED, "done": DONE, "gamma": 0.5}


def test_n_step():
    assert n_step_target(steps=1, **PATH).squeeze(-1).tolist() == [51, 2, 154, 208, 266]
    # 1 + 0.5 * 2, then 4 + 0.5 * 8 + 0.25 * 400; steps 1 and 3 end episodes, step 4 the sequence.
    assert n_step_target(steps=2, **PATH).squeeze(-1).tolist() == [2, 2, 108, 208, 266]
    assert torch.equal(n_step_target(steps=9, **PATH), n_step_target(steps=2, **PATH))


def test_td_lambda():
    # Step 2: 4 + 0.5 * (0.75 * 300 + 0.25 * 208); step 0: 1 + 0.5 * (0.75 * 100 + 0.25 * 2).
    assert td_lambda_target(td_lambda=0.25, **PATH).squeeze(-1).tolist() == [38.75, 2, 142.5, 208, 266]


def test_lambda_zero_is_one_step_and_one_is_the_longest():
    assert torch.equal(td_lambda_target(td_lambda=0.0, **PATH), n_step_target(steps=1, **PATH))
    assert torch.equal(td_lambda_target(td_lambda=1.0, **PATH), n_step_target(steps=5, **PATH))


def brute_force_n_step(path, t, steps):
    reward, next_value, terminated, done, gamma = (
        path[k] for k in ("reward", "next_value", "terminated", "done", "gamma")
    )
    total, factor = 0.0, 1.0
    for k in range(t, min(t + steps, len(reward))):
        total += factor * reward[k]
        factor *= gamma
        if done[k] or k == min(t + steps, len(reward)) - 1:
            return total + (0.0 if terminated[k] else factor * next_value[k])
    raise AssertionError


@given(st.data())
def test_any_path(data):
    length = data.draw(st.integers(1, 8))
    number = st.floats(-10, 10)
    reward, value = (data.draw(st.lists(number, min_size=length, max_size=length)) for _ in range(2))
    ends = data.draw(st.lists(st.sampled_from("   tc"), min_size=length, max_size=length))
    path = {
        "reward": reward,
        "next_value": value,
        "terminated": [e == "t" for e in ends],
        "done": [e != " " for e in ends],
    }
    tensors = {
        k: torch.tensor(v, dtype=torch.bool if k in ("terminated", "done") else torch.float64) for k, v in path.items()
    }
    gamma, td_lambda = data.draw(st.floats(0, 1)), data.draw(st.floats(0, 1))
    all_steps = [n_step_target(steps=n, gamma=gamma, **tensors) for n in range(1, length + 2)]
    for n, target in enumerate(all_steps, start=1):
        expected = [brute_force_n_step(path | {"gamma": gamma}, t, n) for t in range(length)]
        assert target.tolist() == pytest.approx(expected, abs=1e-9)
    # Targets of all lengths, weighted by (1 - lambda) lambda^(n-1), the longest by what is left.
    mixed = sum((1 - td_lambda) * td_lambda**n * target for n, target in enumerate(all_steps[:-1]))
    mixed = mixed + td_lambda**length * all_steps[-1]
    result = td_lambda_target(td_lambda=td_lambda, gamma=gamma, **tensors)
    assert result.tolist() == pytest.approx(mixed.tolist(), abs=1e-6)


def test_loss_counts_what_has_weight():
    error = torch.tensor([[1.0, -2.0], [3.0, 100.0]])
    weight = torch.tensor([[1.0, 1.0], [0.5, 0.0]])
    assert td_loss(error, weight).item() == pytest.approx((1 + 4 + 0.5 * 9) / 2.5)
    # Huber: 0.5, 1 * (2 - 0.5), 1 * (3 - 0.5).
    assert td_loss(error, weight, huber_delta=1.0).item() == pytest.approx((0.5 + 1.5 + 0.5 * 2.5) / 2.5)
    assert td_loss(error, torch.zeros(2, 1)).item() == 0
