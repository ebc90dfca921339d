"""What the methods can represent: on the two-step game, QMIX learns the best joint value 8 and VDN settles for 7."""

import pytest
import torch

from marl_lightning.training import train

pytestmark = pytest.mark.learning


def run(compose, name):
    return train(compose(f"+experiment={name}", "trainer.accelerator=cpu", "trainer.enable_progress_bar=false"))


def joint_values(module, place):
    """Returns the learned values of the joint actions ``[2, 2]`` in a place."""
    at = torch.eye(3)[place]
    with torch.no_grad():
        inputs = module.networks["agents"].inputs(at.expand(1, 1, 2, 3))
        value, _, _ = module.networks["agents"](inputs, torch.zeros(1, 2, 0), torch.ones(1, 1, dtype=torch.bool))
        pairs = torch.stack([torch.stack([value[0, 0, 0, a], value[0, 0, 1, b]]) for a in (0, 1) for b in (0, 1)])
        return module.mixer(pairs, at.repeat(2).expand(4, 6)).view(2, 2)


def test_qmix_finds_8(compose):
    result = run(compose, "qmix_two_step")
    assert result.summary["eval/return_mean"] == 8
    expected = [[[6.93, 6.93], [7.92, 7.92]], [[7.0, 7.0], [7.0, 7.0]], [[0.0, 1.0], [1.0, 8.0]]]
    for place, values in enumerate(expected):
        torch.testing.assert_close(joint_values(result.module, place), torch.tensor(values), rtol=0, atol=0.3)


def test_vdn_settles_for_7(compose):
    """A sum cannot say that (1, 1) pays 8 while one 1 alone pays 1: it fits 6.5, and prefers the game that pays 7."""
    result = run(compose, "vdn_two_step")
    assert result.summary["eval/return_mean"] == 7
    best = torch.tensor([[-1.5, 2.5], [2.5, 6.5]])  # the least-squares sum
    torch.testing.assert_close(joint_values(result.module, 2), best, rtol=0, atol=0.5)
    first = joint_values(result.module, 0)
    assert first[0].min() > first[1].max()
    assert first[0].mean().item() == pytest.approx(6.93, abs=0.4)
