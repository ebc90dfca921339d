"""The replay: true successors, the ring, what is saved, when updates are made, and what must not change a training."""

import gc
import subprocess
import sys
import textwrap
from pathlib import Path

import lightning
import numpy as np
import pytest
import torch
from scripted import CounterGame

from marl_lightning.algorithms import IQL, MAPPO, NFSP, QMIX, VDN
from marl_lightning.callbacks import EnvStepCheckpoint, EpsilonSchedule, EvaluationCallback, StopAtEnvSteps
from marl_lightning.data import memory
from marl_lightning.data.collector import RolloutCollector
from marl_lightning.data.replay import ReplayBuffer, ReplayDataModule, bytes_per_record, replay_records
from marl_lightning.data.samplers import EpisodeWindows, Priorities, SequenceWindows
from marl_lightning.envs import SyncVectorEnv, make_vector_env


class Idle:
    """Plays action 0 and moves nothing."""

    def initial_state(self, num_envs):
        return {}

    def act(self, observations, state, is_first, *, deterministic=False, generator=None):
        envs = len(is_first)
        actions = {"red": torch.zeros(envs, 2, dtype=torch.int64), "blue": torch.zeros(envs, 1, 2)}
        return actions, {"red": torch.zeros(envs, 2), "blue": torch.zeros(envs, 1)}, state

    def env_actions(self, actions):
        return actions


class Recording:
    """A replay that is filled from counter games of three steps."""

    def __init__(self, *, capacity=40, envs=2, length=4, **options):
        env = SyncVectorEnv(factory=lambda: CounterGame(length=3), num_envs=envs, seed=0)
        self.collector = RolloutCollector(env=env, rollout_length=length, keep_final="ended")
        options = {"windows": SequenceWindows(length=2, burn_in=2)} | options
        self.buffer = ReplayBuffer(capacity=capacity, seed=1, **options)
        self.streams = self.buffer.index.open(envs)

    def collect(self, rollouts=1):
        for _ in range(rollouts):
            self.buffer.extend(replay_records(self.collector.collect(Idle())), self.streams)
        return self.buffer


def test_records_have_their_true_successors():
    """Whatever is drawn: the successor is one step later in the same episode, at its end too."""
    buffer = Recording(capacity=100, length=4, windows=SequenceWindows()).collect(12)
    steps = buffer.sample(500).steps
    for group in ("red", "blue"):
        now, following = steps[group, "observation"], steps["next", group, "observation"]
        alive = steps["next", group, "alive"].unsqueeze(-1)
        torch.testing.assert_close(following, (now + torch.tensor([0.0, 1, 0, 0])) * alive, rtol=0, atol=0)
    torch.testing.assert_close(steps["next", "state"], steps["state"] + torch.tensor([0.0, 1, 0]), rtol=0, atol=0)
    episode, time, _ = steps["state"].unbind(-1)
    assert torch.equal(steps["is_first"], time == 0)
    ends = time == 2
    assert torch.equal(steps["next", "terminated"], ends & (episode % 2 == 0))
    assert torch.equal(steps["next", "truncated"], ends & (episode % 2 == 1))
    assert all(steps["next", name].any() for name in ("terminated", "truncated"))
    # red_1 dies on step 2.
    assert torch.equal(steps["red", "alive"][..., 1], time < 2)
    assert torch.equal(steps["next", "red", "alive"][..., 1], time < 1)
    assert torch.equal(steps["next", "red", "reward"][..., 0], time + 1)
    assert torch.equal(steps["next", "red", "reward"][..., 1], torch.tensor([1.0, -1, 0])[time.long()])
    assert torch.equal(steps["next", "red", "action_mask"][..., 1, 1], time < 1)


def test_the_newest_records_are_kept_exactly():
    recording = Recording(capacity=10, envs=1, length=23, windows=SequenceWindows())
    buffer = recording.collect()  # in one block that is longer than the ring
    for time in range(23, 35):
        steps = buffer.sample(400).steps
        found = {tuple(row) for row in steps["state"][0, :, :2].int().tolist()}
        assert len(buffer) == 10
        assert found == {divmod(t, 3) for t in range(time - 10, time)}
        recording.collector.rollout_length = 1
        recording.collector._allocate()
        recording.collect()


def test_sequences_are_padded_with_zeros_that_start_episodes():
    buffer = Recording(capacity=40, windows=SequenceWindows(length=2, burn_in=4)).collect(3)
    batch = buffer.sample(64)
    assert batch.steps.batch_size == (6, 64)
    assert batch.burn_in == 4
    assert not batch.mask[:4].any()
    assert batch.mask[4:].all()
    drawn = torch.from_numpy(buffer.index.window(batch.starts, before=4, after=2))
    padding = drawn == -1
    assert padding.any()
    assert not padding[4:].any()
    pad = batch.steps[padding]
    assert pad["is_first"].all()
    assert pad["red", "action_mask"].all()
    assert pad["next", "red", "action_mask"].all()
    for key in ("state", ("red", "observation"), ("next", "red", "reward"), ("blue", "action"), ("red", "alive")):
        assert not pad[key].any()


def test_episodes_are_whole():
    batch = Recording(windows=EpisodeWindows()).collect(5).sample(32)
    assert batch.steps.batch_size == (3, 32)
    assert batch.mask.all()
    assert torch.equal(batch.steps["state"][..., 1], torch.arange(3.0).unsqueeze(1).expand(3, 32))


@pytest.mark.parametrize("game", ["smac/3m", "matrix/climbing", "counter"])
def test_the_stated_size_is_that_of_the_records(game):
    if game == "counter":
        recording = Recording()
    else:
        recording = Recording()
        env = make_vector_env(game, num_envs=2, seed=0)
        recording.collector = RolloutCollector(env=env, rollout_length=4, keep_final="ended")
    module = IQL(spec=recording.collector.env.spec) if game != "counter" else None
    policy = Idle() if module is None else module.policy
    recording.buffer.extend(replay_records(recording.collector.collect(policy)), recording.streams)
    size = sum(leaf.numel() * leaf.element_size() for leaf in recording.buffer._leaves.values())
    assert size == 40 * bytes_per_record(recording.collector.env.spec)


def same(first, second):
    assert torch.equal(first.mask, second.mask)
    assert np.array_equal(first.starts, second.starts)
    assert torch.equal(first.weight, second.weight)
    return bool((first.steps == second.steps).all())


def test_memory_mapped_records_are_the_same_and_gone_at_the_end(tmp_path):
    memory = Recording().collect(7)
    mapped_recording = Recording(storage="memmap", directory=tmp_path)
    mapped = mapped_recording.collect(7)
    assert same(memory.sample(50), mapped.sample(50))
    files = list(tmp_path.rglob("*observation"))
    assert len(files) == 4
    assert all(file.stat().st_size for file in files)
    del mapped_recording, mapped
    gc.collect()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("rollouts", [2, 9])
@pytest.mark.parametrize("storage", ["memory", "memmap"])
@pytest.mark.parametrize("prioritised", [False, True])
def test_what_was_saved_goes_on_in_the_same_way(rollouts, storage, prioritised, tmp_path):
    def make():
        priorities = Priorities(capacity=40) if prioritised else None
        return Recording(storage=storage, priorities=priorities)

    recording, other = make(), make()
    buffer = recording.collect(rollouts)
    buffer.sample(5).update_priorities(torch.rand(2, 5, generator=torch.Generator().manual_seed(0)))
    torch.save(buffer.state_dict(), tmp_path / "replay.pt")
    other.buffer.load_state_dict(torch.load(tmp_path / "replay.pt", weights_only=True))
    assert same(buffer.sample(50), other.buffer.sample(50))
    other.collector.load_state_dict(recording.collector.state_dict())
    assert same(recording.collect(3).sample(50), other.collect(3).sample(50))


def test_a_full_ring_is_not_copied_to_be_saved():
    buffer = Recording(capacity=8).collect(4)
    assert any(leaf is saved for leaf in buffer._leaves.values() for saved in buffer.state_dict()["records"].values())


def test_a_replay_of_another_size_kind_or_game_is_refused():
    state = Recording(capacity=40).collect(2).state_dict()
    with pytest.raises(ValueError, match="holds 40 records, this one 41"):
        Recording(capacity=41).buffer.load_state_dict(state)
    with pytest.raises(ValueError, match="is prioritised and the other is not"):
        Recording(priorities=Priorities(capacity=40)).buffer.load_state_dict(state)
    other = Recording(capacity=40)
    other.collect()
    state["records"]["state"] = torch.zeros(40, 99)
    with pytest.raises(ValueError, match="another environment"):
        other.buffer.load_state_dict(state)


def test_errors_become_priorities():
    buffer = Recording(priorities=Priorities(capacity=40, alpha=1.0, eta=0.5, epsilon=0.0)).collect(2)
    batch = buffer.sample(4)
    batch.update_priorities(torch.tensor([[1.0, 2, 3, 4], [-3, 2, 3, 4]]))
    values = dict(zip(batch.starts.tolist(), [0.5 * 3 + 0.5 * 2, 2, 3, 4], strict=True))
    for slot, value in values.items():
        assert buffer.sampler.priorities.value[slot] == value


def test_nothing_to_draw_is_none():
    recording = Recording(envs=1, length=1, windows=EpisodeWindows())
    assert recording.buffer.sample(3) is None
    assert recording.collect(2).sample(3) is None
    assert recording.collect(1).sample(3) is not None


# Free memory --------------------------------------------------------------------------------------------------------


def write(folder: Path, **files: str):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_memory_is_what_the_tightest_limit_leaves(tmp_path):
    write(tmp_path / "job", memory__max="1000\n", memory__current="700\n", memory__stat="anon 1\ninactive_file 200\n")
    write(tmp_path / "job" / "step", memory__max="max\n", memory__current="1\n", memory__stat="inactive_file 0\n")
    (tmp_path / "table").write_text("0::/job/step\n")
    folders = memory._control_groups(tmp_path / "table", tmp_path)
    assert [memory._control_group(folder) for folder in folders] == [float("inf"), 500.0, float("inf")]


def test_memory_of_version_1_groups(tmp_path):
    write(
        tmp_path / "memory" / "job",
        memory__limit_in_bytes="1000",
        memory__usage_in_bytes="300",
        memory__stat="cache 5\ntotal_inactive_file 100\ninactive_file 1",
    )
    (tmp_path / "table").write_text("3:cpu,cpuacct:/x\n2:memory:/job\n")
    folders = memory._control_groups(tmp_path / "table", tmp_path)
    assert [memory._control_group(folder) for folder in folders] == [800.0, float("inf")]


def test_memory_that_nobody_tells_is_endless(tmp_path):
    assert memory._control_groups(tmp_path / "none", tmp_path) == []
    assert 0 < memory.free_memory() < float("inf")


# Bad input ----------------------------------------------------------------------------------------------------------


def data(game="smac/3m", envs=2, **options):
    return ReplayDataModule(env=make_vector_env(game, num_envs=envs, seed=5), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": 9, "sequence_length": 4, "burn_in": 1}, "capacity=9 .* window of 5 .* at least 10"),
        ({"capacity": 119, "sample": "episodes"}, "capacity=119 .* episode of 60 .* at least 120"),
        ({"sequence_length": 61}, "sequence_length=61 is longer than the episodes of smac/3m, .* 60"),
        ({"sample": "episodes", "sequence_length": 8}, "leave out sequence_length and burn_in"),
        ({"memory_limit_gib": 0.001}, r"storage='memmap'.*memory_limit_gib"),
        ({"storage": "memmap", "storage_directory": "/no/such/folder"}, "is not a folder"),
        ({"storage": "memmap", "capacity": 10**13}, "storage_directory to a folder on another disk"),
        ({"capacity": 10**12}, "keep it on a disk with storage='memmap'"),
        ({"capacity": 0, "batch_size": 2.5}, r"capacity=0.*\n.*batch_size=2.5"),
    ],
)
def test_settings_that_cannot_work_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        data(**options)


def test_the_default_limit_is_shared_by_the_processes_of_a_machine(monkeypatch):
    monkeypatch.setattr("marl_lightning.data.replay.free_memory", lambda: 2.0**30)
    spec = data(capacity=100).spec
    capacity = int(0.7 * 2**30 / bytes_per_record(spec))
    data(capacity=capacity)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"takes 0\.7 GiB, more than the 0\.4 GiB"):
        data(capacity=capacity)


SMALL = {"hidden_sizes": (8,)}


def fit(module, *, env_steps, folder=None, game="smac/3m", envs=2, callbacks=(), ckpt_path=None, **options):
    lightning.seed_everything(3, verbose=False)
    trainer = lightning.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        max_epochs=-1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(callback, EnvStepCheckpoint) for callback in callbacks),
        callbacks=[StopAtEnvSteps(env_steps), *callbacks],
    )
    trainer.fit(module, datamodule=data(game, envs, **options), ckpt_path=ckpt_path)
    return trainer


def test_data_that_do_not_fit_the_algorithm_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"burn_in=2 .* recurrent=True"):
        fit(IQL(**SMALL), env_steps=1, sequence_length=4, burn_in=2)
    with pytest.raises(TypeError, match="MAPPO does not learn from a replay: use RolloutDataModule"):
        fit(MAPPO(**SMALL), env_steps=1)
    with pytest.raises(ValueError, match=r"capacity=17 .* window of 18"):  # the burn-in that a recurrent module gets
        fit(IQL(recurrent=True, **SMALL), env_steps=1, envs=1, sequence_length=9, capacity=17)
    with pytest.raises(ValueError, match=r"n_steps=3 .* sequence_length"):
        fit(IQL(n_steps=3, **SMALL), env_steps=1, sequence_length=2)
    with pytest.raises(ValueError, match=r"td_lambda=0.5 .* sequence_length"):
        fit(IQL(td_lambda=0.5, **SMALL), env_steps=1)


# When updates are made ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("envs", [1, 4, 6])
@pytest.mark.parametrize("updates_per_batch", [1, 16])
@pytest.mark.parametrize(("frequency", "updates", "length"), [(1, 1, 1), (5, 2, 1), (7, 1, 3), (100, 3, 2)])
def test_the_number_of_updates_is_that_of_the_formula(envs, updates_per_batch, frequency, updates, length):
    module = IQL(hidden_sizes=(2,))
    trainer = fit(
        module,
        env_steps=60,
        game="matrix/climbing",
        envs=envs,
        batch_size=2,
        capacity=50,
        start_training=20,
        training_frequency=frequency,
        num_updates=updates,
        updates_per_batch=updates_per_batch,
        rollout_length=length,
    )
    assert module.env_steps == trainer.datamodule.env_steps >= 60
    assert module.updates == trainer.datamodule.updates == updates * ((module.env_steps - 20) // frequency)


def test_updates_are_made_as_soon_as_they_are_due():
    made = []

    class Spy(IQL):
        def update(self, batch):
            super().update(batch)
            made.append((self.env_steps, self.updates))

    fit(Spy(**SMALL), env_steps=24, game="matrix/climbing", envs=2, start_training=9, training_frequency=4)
    assert made == [(14, 1), (18, 2), (22, 3), (26, 4), *made[4:]]


def test_callbacks_are_called_before_the_first_update():
    class Clock(lightning.Callback):
        def __init__(self):
            self.seen = []

        def on_train_batch_end(self, trainer, pl_module, *_):
            self.seen.append(pl_module.env_steps)

    clock, options = Clock(), {"start_training": 36, "training_frequency": 2, "updates_per_batch": 4}
    fit(IQL(**SMALL), env_steps=60, game="matrix/climbing", envs=3, callbacks=[clock], **options)
    # Four collections without an update, three times; then collections of three steps for one or two updates each.
    assert clock.seen == [12, 24, 36, 45, 54, 63]


def test_updates_are_skipped_with_a_warning_while_nothing_can_be_drawn():
    module = IQL(**SMALL)
    with pytest.warns(UserWarning, match="data.start_training"):
        trainer = fit(
            module, env_steps=80, game="matrix/climbing", envs=1, sample="episodes", start_training=0, capacity=100
        )
    assert trainer.datamodule.skipped_updates == 24  # the first episode ends with step 25
    assert module.updates == trainer.datamodule.updates - 24


def test_importance_is_annealed_by_env_steps():
    replay = data(importance_exponent=0.4, importance_anneal_env_steps=100, prioritised=True)
    assert [replay.importance_exponent_at(n) for n in (0, 50, 100, 999)] == pytest.approx([0.4, 0.7, 1.0, 1.0])
    assert data().importance_exponent_at(10**9) == 0.4


# What must not change a training ------------------------------------------------------------------------------------

KINDS = [
    pytest.param(IQL, {}, {}, id="transitions"),
    pytest.param(VDN, {"recurrent": True}, {"sequence_length": 4, "burn_in": 3, "prioritised": True}, id="sequences"),
    pytest.param(QMIX, {"recurrent": True}, {"sample": "episodes"}, id="episodes"),
    pytest.param(NFSP, {"average_batch_size": 32, "reservoir_capacity": 40}, {}, id="reservoirs"),
]
REPLAY = {
    "capacity": 300,
    "batch_size": 4,
    "start_training": 150,
    "training_frequency": 4,
    "importance_anneal_env_steps": 500,
}


def schedule():
    return EpsilonSchedule(anneal_env_steps=400)


def make_module(algorithm, options, seed=0):
    torch.manual_seed(seed)
    spec = make_vector_env("smac/3m", num_envs=1).spec
    return algorithm(spec=spec, scale_reward=True, target_update_interval=5, **SMALL, **options)


def fingerprint(trainer):
    """Everything that a training may go on from, as comparable bytes."""
    module = trainer.lightning_module
    optimizer = trainer.optimizers[0].state_dict()["state"]
    local = trainer.datamodule.local_state_dict()
    replay, own = local["replay"], module.local_state_dict().values()
    tensors = [*module.state_dict().values(), *(value for entry in optimizer.values() for value in entry.values())]
    tensors += [torch.get_rng_state(), local["collector"]["generator"], *local["collector"]["env"]["fields"].values()]
    tensors += [*(local["collector"]["recurrent"] or {}).values(), replay["generator"], *replay["records"].values()]
    tensors += [tensor for saved in own for tensor in (saved["seen"], saved["generator"], *saved["items"].values())]
    counters = [local["env_steps"], local["updates"], module.env_steps, module.updates]
    for value in [*replay["index"].values(), *(replay["priorities"] or {}).values()]:
        (tensors if isinstance(value, torch.Tensor) else counters).append(value)
    return [tensor.numpy().tobytes() for tensor in tensors], counters


@pytest.mark.parametrize(("algorithm", "options", "replay"), KINDS)
def test_updates_per_batch_changes_nothing(algorithm, options, replay):
    histories = []
    for updates_per_batch in (1, 4, 16):
        module, history = make_module(algorithm, options), []
        update = module.update

        def spy(batch, module=module, update=update, history=history):
            update(batch)
            history.append((module.env_steps, b"".join(p.detach().numpy().tobytes() for p in module.parameters())))

        module.update = spy
        trainer = fit(
            module, env_steps=300, callbacks=[schedule()], updates_per_batch=updates_per_batch, **REPLAY | replay
        )
        assert trainer.datamodule.skipped_updates == 0
        histories.append(history)
    shortest = min(len(history) for history in histories)
    assert shortest >= 36
    assert histories[0][:shortest] == histories[1][:shortest] == histories[2][:shortest]
    assert histories[0][0][1] != histories[0][1][1]


@pytest.mark.parametrize(("algorithm", "options", "replay"), KINDS)
def test_resuming_equals_not_stopping(algorithm, options, replay, tmp_path):
    options_of_data = {"updates_per_batch": 4} | REPLAY | replay
    expected = fingerprint(
        fit(make_module(algorithm, options), env_steps=500, callbacks=[schedule()], **options_of_data)
    )
    checkpoint = EnvStepCheckpoint(directory=tmp_path / "c", every_env_steps=10**9)
    evaluation = EvaluationCallback(every_env_steps=100, episodes=2)
    half = fit(
        make_module(algorithm, options),
        env_steps=250,
        callbacks=[checkpoint, evaluation, schedule()],
        folder=tmp_path,
        **options_of_data,
    )
    assert half.lightning_module.env_steps < 300
    resumed = fit(
        make_module(algorithm, options, seed=1),
        env_steps=500,
        callbacks=[EnvStepCheckpoint(directory=tmp_path / "d", every_env_steps=10**9), evaluation, schedule()],
        ckpt_path=tmp_path / "c" / "last.ckpt",
        folder=tmp_path,
        **options_of_data,
    )
    assert fingerprint(resumed) == expected


# Two processes ------------------------------------------------------------------------------------------------------

TWO_PROCESSES = """
import sys
import lightning, torch
from lightning.pytorch.strategies import DDPStrategy
from marl_lightning.algorithms import QMIX
from marl_lightning.callbacks import StopAtEnvSteps
from marl_lightning.data.replay import ReplayDataModule
from marl_lightning.envs import make_vector_env

torch.set_num_threads(1)
lightning.seed_everything(0, verbose=False)
env = make_vector_env("smac/3m", num_envs=2, seed=5)
module = QMIX(spec=env.spec, hidden_sizes=(8,), recurrent=True, scale_reward=True, target_update_interval=3)
data = ReplayDataModule(
    env=env, capacity=300, batch_size=4, sample="episodes", start_training=100, training_frequency=8, rollout_length=2
)
trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy=DDPStrategy(forward_sync_buffers=False), max_epochs=-1, logger=False,
    enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    callbacks=[StopAtEnvSteps(400)],
)
trainer.fit(module, datamodule=data)
torch.save(
    {"weights": module.state_dict(), "env_steps": module.env_steps, "own_env_steps": data.env_steps,
     "updates": (module.updates, data.updates), "skipped": data.skipped_updates,
     "states": data.buffer.state_dict()["records"]["state"]},
    sys.argv[1] + f"/rank{trainer.global_rank}.pt",
)
"""


def test_processes_keep_equal_parameters_and_their_own_replays(tmp_path):
    """At first one of them may have no whole episode yet: then none makes an update."""
    script = tmp_path / "two.py"
    script.write_text(textwrap.dedent(TWO_PROCESSES))
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True, timeout=240, capture_output=True)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1))
    assert all(torch.equal(first["weights"][name], second["weights"][name]) for name in first["weights"])
    assert first["env_steps"] == second["env_steps"] == 2 * first["own_env_steps"] >= 400
    assert first["updates"] == second["updates"]
    made, due = first["updates"]
    assert due == (first["env_steps"] - 100) // 8 == made + first["skipped"]
    assert not torch.equal(first["states"][:50], second["states"][:50])
