"""Wrappers in a training: chosen by configuration, saved with it, and the same in evaluation."""

import pytest

from marl_lightning.configuration import ConfigurationError, build_env, validate
from marl_lightning.envs.wrappers import running_statistics
from marl_lightning.evaluation import evaluate, evaluate_checkpoint, load_checkpoint
from marl_lightning.training import train

WRAPPERS = (
    "env.wrappers=[{name: TimeLimit, max_episode_steps: 20}, NormalizeObservation, AddAgentID, "
    "{name: NormalizeReward, gamma: 0.99}]"
)


@pytest.fixture
def shorter(tmp_path):
    return [
        f"paths.output_dir={tmp_path / 'run'}",
        "env.num_envs=8",
        "data.rollout_length=8",
        "total_env_steps=256",
        "trainer.accelerator=cpu",
        "trainer.enable_progress_bar=false",
        "callbacks.evaluation.every_env_steps=128",
        "callbacks.evaluation.episodes=4",
        "callbacks.checkpoint.every_env_steps=128",
    ]


def test_statistics_go_with_the_checkpoint(compose, shorter, tmp_path):
    result = train(compose("+experiment=mappo_mpe", f"+{WRAPPERS}", *shorter))
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    env = build_env(compose("+experiment=mappo_mpe", f"+{WRAPPERS}", *shorter).env, seed=3)
    module, recipe = load_checkpoint(last, env=env)
    assert len(recipe["kwargs"]["wrappers"]) >= 4
    trained, loaded = running_statistics(result.datamodule.env), running_statistics(env)
    assert trained.keys() == loaded.keys()
    for name, statistics in trained.items():
        for moment, array in statistics.arrays().items():
            assert (loaded[name].arrays()[moment] == array).all()
            assert array.any()
    before = {name: statistics.arrays()["mean"].copy() for name, statistics in loaded.items()}
    by_hand = evaluate(module.policy, env, episodes=4, seed=5)
    assert all((statistics.arrays()["mean"] == before[name]).all() for name, statistics in loaded.items())
    assert (by_hand.lengths == 20).all()
    assert (evaluate_checkpoint(last, episodes=4, num_envs=4, seed=5).lengths == 20).all()
    # Rewards of the game itself: an untrained team is far from a reward of unit size a step.
    assert by_hand.returns.mean() < -5


def test_returns_are_those_of_the_game(compose, shorter):
    plain = train(compose("+experiment=ippo_matrix", *shorter)).metrics
    wrapped = "+env.wrappers=[{name: ClipReward, low: -0.1, high: 0.1}]"
    clipped = train(compose("+experiment=ippo_matrix", wrapped, *shorter)).metrics
    for metrics in (plain, clipped):  # far from what 25 rewards of at most 0.1 could add up to
        assert abs(metrics["train/return"]) > 2.5
        assert abs(metrics["eval/return_mean"]) > 2.5
    assert "train/episode_return" not in clipped


def test_wrong_wrappers_are_all_told(compose):
    with pytest.raises(ConfigurationError) as caught:
        validate(compose("+env.wrappers=[{name: TimeLimit, max_steps: 3}, NormaliseObservation]"))
    assert any("max_episode_steps" in problem for problem in caught.value.problems)
    assert any("NormalizeObservation" in problem for problem in caught.value.problems)
