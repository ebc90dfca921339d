"""Actions of several parts through collecting, learning, evaluating and checkpoints."""

import lightning
import pytest
import torch
from locks import BEST_RETURN, DIALS, LocksGame

from marl_lightning.algorithms import IPPO, MAPPO
from marl_lightning.callbacks import StopAtEnvSteps
from marl_lightning.data import RolloutDataModule
from marl_lightning.data.collector import RolloutCollector
from marl_lightning.envs import SyncVectorEnv
from marl_lightning.evaluation import evaluate, load_checkpoint

SMALL = {"hidden_sizes": (32,), "chunk_length": 4}


def locks(dials=DIALS, num_envs=16, seed=0):
    return SyncVectorEnv(factory=lambda: LocksGame(dials=dials), num_envs=num_envs, seed=seed)


def collect(module, env, length=8):
    collector = RolloutCollector(env=env, rollout_length=length, chunk_length=module.chunk_length)
    with torch.no_grad():
        rollout = collector.collect(module.policy)
    module.prepare_rollout(rollout, collector.state)
    return rollout


@pytest.mark.parametrize("dials", [DIALS, (3, 3)])
@pytest.mark.parametrize("options", [{}, {"recurrent": True, "share_parameters": False}], ids=["shared", "gru-own"])
@pytest.mark.parametrize("algorithm", [MAPPO, IPPO])
def test_rollouts_hold_parts_and_first_ratios_are_one(algorithm, options, dials):
    torch.manual_seed(0)
    module = algorithm(spec=LocksGame(dials=dials).spec, output_gain=1.0, **SMALL, **options)
    steps = (rollout := collect(module, locks(dials))).steps["thief"]
    parts, size = len(dials), sum(dials)
    assert (steps["action"].shape, steps["action"].dtype) == ((8, 16, 2, parts), torch.int64)
    assert (steps["action_mask"].shape, steps["action_mask"].dtype) == ((8, 16, 2, size), torch.bool)
    assert steps["log_prob"].shape == (8, 16, 2)
    legal = [
        mask.gather(-1, action.unsqueeze(-1))
        for mask, action in zip(steps["action_mask"].split(dials, -1), steps["action"].unbind(-1), strict=True)
    ]
    assert torch.cat(legal, -1).all()
    assert (steps["log_prob"][~steps["alive"]] == 0).all()  # one legal choice in every part

    actor, batch = module.actors["thief"], module.training_batch("thief", rollout)
    features, _ = actor(batch.actor_inputs, batch.actor_state, batch.is_first)
    log_prob, entropy = actor.head.evaluate(features, batch.action, batch.action_mask)
    torch.testing.assert_close(log_prob, batch.log_prob, rtol=0, atol=2e-6)
    assert entropy.shape == batch.weight.shape
    loss, metrics = module.group_loss(actor, module.critics["thief"], batch)
    assert loss.isfinite()
    expected = (entropy * batch.weight).sum() / batch.weight.sum()
    assert metrics["entropy"].item() == pytest.approx(expected.item(), rel=1e-5)


def fit(tmp_path, env_steps):
    lightning.seed_everything(1, verbose=False)
    module = IPPO(
        hidden_sizes=(32,),
        team_reward=None,
        learning_rate=0.01,
        learning_rate_decay_env_steps=env_steps,
        gamma=0.0,
        gae_lambda=0.0,
        num_epochs=10,
        num_minibatches=4,
        entropy_coefficient=0.0,
    )
    trainer = lightning.Trainer(
        default_root_dir=tmp_path,
        accelerator="cpu",
        max_epochs=-1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[StopAtEnvSteps(env_steps)],
    )
    trainer.fit(module, datamodule=RolloutDataModule(env=locks(), rollout_length=8))
    return trainer, module


def test_ippo_opens_all_locks_and_survives_a_checkpoint(tmp_path):
    trainer, module = fit(tmp_path, env_steps=1920)
    assert module.env_steps == 1920
    result = evaluate(module.policy, locks(seed=100), episodes=50, seed=5)
    assert result.returns.tolist() == [BEST_RETURN] * 50

    trainer.save_checkpoint(tmp_path / "locks.ckpt")
    again, recipe = load_checkpoint(tmp_path / "locks.ckpt", env=locks(num_envs=1))
    assert recipe is None
    for deterministic in (True, False):
        options = {"episodes": 20, "seed": 6, "deterministic": deterministic}
        before, after = (evaluate(each.policy, locks(seed=100), **options) for each in (module, again))
        assert before.returns.tolist() == after.returns.tolist()
    with pytest.raises(ValueError, match="does not fit"):
        load_checkpoint(tmp_path / "locks.ckpt", env=locks((3, 2, 5), num_envs=1))


def test_an_untrained_policy_does_not_open_them():
    """So that the best return means something."""
    torch.manual_seed(0)
    module = IPPO(spec=LocksGame().spec, **SMALL)
    assert evaluate(module.policy, locks(), episodes=50).returns.mean() < 0.8 * BEST_RETURN
