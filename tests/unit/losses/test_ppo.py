"""PPO losses by hand, and against TorchRL's as an independent oracle."""

import math
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

from marl_lightning.losses.ppo import clipped_policy_loss, clipped_value_loss, normalise_advantage
from marl_lightning.nn.statistics import weighted_mean, weighted_moments

ONES = torch.ones(2)


def policy_loss(ratio, advantage, weight=None, clip_ratio=0.2):
    ratio = torch.tensor(ratio)
    return clipped_policy_loss(
        log_prob=ratio.log(),
        old_log_prob=torch.zeros_like(ratio),
        advantage=torch.tensor(advantage),
        weight=torch.ones_like(ratio) if weight is None else torch.tensor(weight),
        clip_ratio=clip_ratio,
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.5, 1.0, -1.2),  # a gain is clipped
        (0.5, 1.0, -0.5),  # a loss is not
        (1.5, -1.0, 1.5),
        (0.5, -1.0, 0.8),
        (1.0, 3.0, -3.0),
    ],
)
def test_policy_loss_by_hand(ratio, advantage, expected):
    loss, _ = policy_loss([ratio], [advantage])
    assert loss.item() == pytest.approx(expected)


def test_dead_agents_do_not_count():
    loss, diagnostics = policy_loss([1.1, 50.0], [2.0, 1e6], weight=[1.0, 0.0])
    assert loss.item() == pytest.approx(-2.2)
    assert diagnostics["clip_fraction"].item() == 0.0
    assert diagnostics["approx_kl"].item() == pytest.approx(0.1 - math.log(1.1), abs=1e-6)


def test_no_living_agent_gives_zero_loss():
    loss, _ = policy_loss([2.0, 3.0], [1.0, 1.0], weight=[0.0, 0.0])
    assert loss.item() == 0.0


def test_policy_loss_agrees_with_torchrl():
    """ClipPPOLoss of TorchRL on a one-state categorical policy."""
    objectives = pytest.importorskip("torchrl.objectives")
    from tensordict import TensorDict
    from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule
    from torchrl.modules import ProbabilisticActor, ValueOperator

    torch.manual_seed(0)
    net = torch.nn.Linear(4, 5)
    actor = ProbabilisticActor(
        TensorDictModule(net, in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    assert isinstance(actor, ProbabilisticTensorDictSequential)
    critic = ValueOperator(torch.nn.Linear(4, 1), in_keys=["observation"])
    theirs = objectives.ClipPPOLoss(actor, critic, clip_epsilon=0.2, entropy_bonus=False, normalize_advantage=False)
    observation, action = torch.randn(64, 4), torch.randint(5, (64,))
    log_prob = torch.log_softmax(net(observation), -1).gather(-1, action[:, None]).squeeze(-1)
    old, advantage = log_prob.detach() + 0.3 * torch.randn(64), torch.randn(64)
    data = TensorDict(
        {
            "observation": observation,
            "action": action,
            "action_log_prob": old,
            "sample_log_prob": old,
            "advantage": advantage[:, None],
            "value_target": torch.zeros(64, 1),
        },
        [64],
    )
    ours, diagnostics = clipped_policy_loss(
        log_prob=log_prob, old_log_prob=old, advantage=advantage, weight=torch.ones(64), clip_ratio=0.2
    )
    # TorchRL clips the log of the ratio at log(1 +- epsilon): the same interval
    torch.testing.assert_close(ours, theirs(data)["loss_objective"])
    assert diagnostics["clip_fraction"] > 0


def value_loss(value, old_value, target, clip=None, huber_delta=None, weight=None):
    value, old_value, target = (torch.tensor(x) for x in (value, old_value, target))
    weight = torch.ones_like(value) if weight is None else torch.tensor(weight)
    return clipped_value_loss(
        value=value, old_value=old_value, target=target, weight=weight, clip=clip, huber_delta=huber_delta
    ).item()


def test_value_loss_by_hand():
    assert value_loss([3.0], [0.0], [1.0]) == pytest.approx(0.5 * 4)
    assert value_loss([3.0], [0.0], [1.0], huber_delta=1.0) == pytest.approx(1.0 * (2 - 0.5))
    # moving from 0 to 0.5 towards 1 is clipped to 0.2: error 0.8 counts, not 0.5
    assert value_loss([0.5], [0.0], [1.0], clip=0.2) == pytest.approx(0.5 * 0.64)
    # moving away is punished in full
    assert value_loss([-0.5], [0.0], [1.0], clip=0.2) == pytest.approx(0.5 * 2.25)
    assert value_loss([3.0, 9.0], [0.0, 0.0], [1.0, 0.0], weight=[1.0, 0.0]) == pytest.approx(2.0)


def test_clipped_value_loss_has_no_gradient_beyond_the_clip():
    value = torch.tensor([0.5], requires_grad=True)
    clipped_value_loss(
        value=value,
        old_value=torch.zeros(1),
        target=torch.ones(1),
        weight=torch.ones(1),
        clip=0.2,
        huber_delta=None,
    ).backward()
    assert value.grad.item() == 0.0


def test_normalised_advantage_of_living_agents_has_mean_0_and_deviation_1():
    advantage = torch.randn(200, 3) * 7 + 3
    alive = (torch.rand(200, 3) < 0.6).float()
    result, _ = normalise_advantage(advantage, alive)
    living = result[alive.bool()]
    assert living.mean().item() == pytest.approx(0, abs=1e-5)
    assert living.std(correction=0).item() == pytest.approx(1, abs=1e-4)


def test_the_scale_of_advantages_by_hand():
    """Of 1, 3 and 8 the last does not count: mean 2, deviation 1."""
    result, scale = normalise_advantage(torch.tensor([1.0, 3.0, 8.0]), torch.tensor([1.0, 1.0, 0.0]), epsilon=0.5)
    assert result.tolist() == pytest.approx([-1 / 1.5, 1 / 1.5, 6 / 1.5])
    assert scale.item() == pytest.approx(1.5)


def test_small_deviations_around_a_large_mean_are_kept():
    advantage = 1000 + 0.1 * torch.randn(10_000)
    result, _ = normalise_advantage(advantage, torch.ones_like(advantage))
    assert result.std(correction=0).item() == pytest.approx(1, abs=1e-2)


def test_moments_of_two_processes_are_those_of_all_data():
    """Two threads that meet at a barrier to add what they send."""
    x, weight = torch.randn(50) * 3 + 5, (torch.rand(50) < 0.5).float()
    parts, sent, barrier = [slice(0, 20), slice(20, 50)], [None, None], Barrier(2)

    def process(rank):
        def reduce_sum(value):
            sent[rank] = value
            barrier.wait(timeout=10)
            total = sent[0] + sent[1]
            barrier.wait(timeout=10)
            return total

        return weighted_moments(x[parts[rank]], weight[parts[rank]], reduce_sum)

    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(process, (0, 1)):
            for a, b in zip(found, weighted_moments(x, weight), strict=True):
                torch.testing.assert_close(a, b)


def test_weighted_mean_of_nothing_is_zero():
    assert weighted_mean(ONES, torch.zeros(2)).item() == 0.0
