"""The acting loop on a scripted game whose every number is known."""

import pytest
import torch
from lightning import Trainer
from scripted import CounterGame

from marl_lightning.algorithms import MAPPO
from marl_lightning.callbacks import EvaluationCallback, StopAtEnvSteps
from marl_lightning.data import RolloutDataModule
from marl_lightning.data.collector import RolloutCollector
from marl_lightning.envs import SyncVectorEnv, make_vector_env

LENGTH = 3  # of an episode; terminated and truncated in turn


class CountingPolicy:
    """Takes action 0 everywhere and counts steps in its recurrent state."""

    def __init__(self):
        self.seen = []

    def initial_state(self, num_envs):
        return {"memory": torch.zeros(num_envs, 1)}

    def act(self, observations, state, is_first, *, deterministic=False, generator=None):
        self.seen.append(is_first.clone())
        memory = torch.where(is_first[:, None], 0.0, state["memory"]) + 1
        num_envs = len(is_first)
        actions = {
            "red": torch.zeros(num_envs, 2, dtype=torch.int64),
            "blue": torch.rand(num_envs, 1, 2, generator=generator),
        }
        log_probs = {"red": torch.full((num_envs, 2), -1.0), "blue": torch.full((num_envs, 1), -2.0)}
        return actions, log_probs, {"memory": memory}

    def env_actions(self, actions):
        return actions


def make(rollout_length=8, num_envs=2, seed=0, chunk_length=4, **options):
    env = SyncVectorEnv(factory=lambda: CounterGame(length=LENGTH), num_envs=num_envs, seed=seed)
    return RolloutCollector(env=env, rollout_length=rollout_length, chunk_length=chunk_length, seed=seed, **options)


def test_steps_hold_what_happened():
    rollout = make().collect(CountingPolicy())
    steps = rollout.steps
    assert steps.batch_size == (8, 2)
    assert rollout.env_steps == 16
    time = steps["red", "observation"][:, 0, 0, 1]
    assert time.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert steps["is_first"][:, 0].tolist() == [True, False, False, True, False, False, True, False]
    assert steps["next", "terminated"][:, 0].tolist() == [False, False, True, False, False, False, False, False]
    assert steps["next", "truncated"][:, 0].tolist() == [False, False, False, False, False, True, False, False]
    assert steps["next", "blue", "reward"][:, 0, 0].tolist() == [1, 2, 3, 1, 2, 3, 1, 2]
    # red_1 dies on step 2: alive before it, dead before step 3, and has one legal action then
    assert steps["red", "alive"][:3, 0, 1].tolist() == [True, True, False]
    assert steps["next", "red", "reward"][:3, 0, 1].tolist() == [1, -1, 0]
    assert steps["red", "action_mask"][2, 0].sum(-1).tolist() == [3, 1]
    assert steps["state"].shape == (8, 2, 3)
    assert steps["blue", "log_prob"].eq(-2).all()
    assert ("blue", "action_mask") not in steps.keys(True)


def test_true_successors_of_truncated_episodes_are_kept_and_of_terminated_ones_are_not():
    rollout = make().collect(CountingPolicy())
    final = rollout.final
    assert final["time"].tolist() == [5, 5]
    assert final["env"].tolist() == [0, 1]
    assert final["red", "observation"][:, 0, :2].tolist() == [[1, 3], [1, 3]]  # episode 1, time 3
    assert final["red", "alive"][:, 1].tolist() == [False, False]
    assert rollout.last["red", "observation"][0, 0, :2].tolist() == [2, 2]
    nothing = make(rollout_length=4).collect(CountingPolicy()).final
    assert len(nothing) == 0
    assert nothing["red", "observation"].shape == (0, 2, 4)


def test_recurrent_state_is_carried_and_kept_at_chunk_starts():
    collector, policy = make(), CountingPolicy()
    first = collector.collect(policy)
    assert first.initial_state["memory"][0].item() == 0
    assert first.chunk_state["memory"][:, 0, 0].tolist() == [0, 1]  # before steps 0 and 4
    second = collector.collect(policy)
    assert second.initial_state["memory"][0].item() == 2  # two steps into episode 2
    assert second.steps["is_first"][:2, 0].tolist() == [False, True]


def test_entries_of_the_recurrent_state_are_kept_as_of_after_every_step_if_asked_for():
    collector, policy = make(rollout_length=4, keep_states=("memory",)), CountingPolicy()
    assert [collector.collect(policy).states["memory"][:, 0, 0].tolist() for _ in range(2)] == [
        [1, 2, 3, 1],
        [2, 3, 1, 2],
    ]
    assert make().collect(policy).states == {}
    moved = collector.collect(policy).to("cpu")
    assert moved.states["memory"].shape == (4, 2, 1)


def test_episodes_that_span_rollouts_are_counted_once():
    collector, policy = make(rollout_length=2, chunk_length=2), CountingPolicy()
    lengths = [collector.collect(policy).episodes["length"].tolist() for _ in range(4)]
    assert lengths == [[], [3, 3], [3, 3], []]


def test_score_of_the_last_step_is_reported():
    episodes = make().collect(CountingPolicy()).episodes
    assert episodes["score"].tolist() == [30.0] * 4
    assert episodes["return/blue"].tolist() == [6.0] * 4
    assert episodes["return/red"].tolist() == [3.0] * 4  # mean of 1 + 2 + 3 and 1 - 1


def test_saving_and_restoring_continues_exactly(tmp_path):
    straight, policy = make(rollout_length=5, chunk_length=5), CountingPolicy()
    straight.collect(policy)
    torch.save(straight.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    expected = straight.collect(policy).steps.clone()
    resumed = make(rollout_length=5, chunk_length=5, seed=99)
    resumed.load_state_dict(state)
    found = resumed.collect(policy).steps
    assert (expected == found).all()


@pytest.mark.parametrize("seed", [0, 7])
def test_instances_are_seeded_apart_and_reproducibly(seed):
    a, b = (make(seed=seed).collect(CountingPolicy()).steps for _ in range(2))
    assert (a == b).all()
    noise = a["red", "observation"][0, :, 0, 2]
    assert noise[0] != noise[1]


DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recurrent", [False, True])
def test_rollouts_and_updates_live_on_the_device(device, recurrent, tmp_path):
    """Everything but the game is on the device, and the actions taken there are those that the game got."""
    data = RolloutDataModule(env=make_vector_env("smac/3m", num_envs=4, seed=0), rollout_length=8)
    seen = []

    class Spy(MAPPO):
        def training_step(self, rollout, batch_idx):
            leaves = [
                *rollout.steps.values(True, True),
                *rollout.last.values(True, True),
                *rollout.chunk_state.values(),
            ]
            seen.extend(leaf.device.type for leaf in leaves)
            super().training_step(rollout, batch_idx)

    module = Spy(hidden_sizes=(8,), recurrent=recurrent, chunk_length=4, num_epochs=1)
    accelerator = "gpu" if device == "cuda" else device
    trainer = Trainer(
        accelerator=accelerator,
        devices=1,
        max_epochs=-1,
        callbacks=[StopAtEnvSteps(64), EvaluationCallback(every_env_steps=32, episodes=2)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, datamodule=data)
    assert set(seen) == {device}
    assert module.env_steps == 64
    assert "eval/win_rate" in trainer.callback_metrics


def test_instances_that_stand_still_are_refused():
    env = SyncVectorEnv(factory=CounterGame, num_envs=2, seed=0, autoreset=False)
    with pytest.raises(ValueError, match="make it with autoreset=True"):
        RolloutCollector(env=env, rollout_length=8)
