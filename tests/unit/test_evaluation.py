"""Evaluation: counts, bias, traces, videos and checkpoints, in a game whose episodes are scripted."""

from __future__ import annotations

import builtins
import random
from pathlib import Path

import imageio.v3 as imageio
import lightning
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from marl_lightning.algorithms.mappo import MAPPO
from marl_lightning.data.rollout import RolloutDataModule
from marl_lightning.envs import SyncVectorEnv, make_env, make_vector_env
from marl_lightning.envs.base import VectorEnv
from marl_lightning.envs.spec import EnvSpec, GroupSpec
from marl_lightning.envs.vector.buffers import allocate_step, as_tensors
from marl_lightning.envs.wrappers import AddAgentID
from marl_lightning.evaluation import (
    EvaluationResult,
    bootstrap_interval,
    evaluate,
    evaluate_checkpoint,
    evaluation_mode,
    load_checkpoint,
    write_video,
)


class ScriptedEnv(VectorEnv):
    """Episode ``k`` of instance ``i`` has ``lengths[i][k]`` steps, and the last length repeats.

    Every step pays 1 and 3 to the agents of group "a" and 10 to that of "b". The observation is the time in the
    episode. Odd episodes are truncated and even ones terminated. Colours of pictures are (instance, episode, time).
    """

    def __init__(self, lengths):
        groups = {
            name: GroupSpec(agents=agents, observation_space=spaces.Box(0, 99, (1,)), action_space=spaces.Discrete(3))
            for name, agents in {"a": ("a0", "a1"), "b": ("b0",)}.items()
        }
        self.spec = EnvSpec(name="test/scripted", groups=groups, state_size=1, info_keys=("battle_won", "time"))
        self.lengths, self.num_envs, self.seed = lengths, len(lengths), 0
        self.arrays = allocate_step(self.spec, self.num_envs)
        self.tensors = as_tensors(self.arrays)
        self.reward = {"a": np.array([1.0, 3.0]), "b": np.array([10.0])}
        self.actions = []

    def reset(self, *, seed=None, mask=None):
        self.seed = seed
        self.episode = np.zeros(self.num_envs, np.int64)
        self.time = np.zeros(self.num_envs, np.int64)
        self._show()
        return self.tensors.observations

    def _show(self):
        for name in self.spec.groups:
            self.arrays.observations.observation[name][:] = self.time[:, None, None]

    def step(self, actions):
        random.random(), np.random.rand(), torch.rand(1)  # careless games use global random states  # noqa: NPY002
        self.actions.append(actions["a"].clone())
        self.time += 1
        scripts = zip(self.lengths, self.episode, strict=True)
        lengths = np.array([script[min(k, len(script) - 1)] for script, k in scripts])
        done = self.time == lengths
        for name, reward in self.reward.items():
            self.arrays.reward[name][:] = reward
        self.arrays.terminated[:] = done & (self.episode % 2 == 0)
        self.arrays.truncated[:] = done & (self.episode % 2 == 1)
        self.arrays.info["battle_won"][:] = lengths > 2
        self.arrays.info["time"][:] = self.time
        self.episode += done
        self.time[done] = 0
        self._show()
        return self.tensors

    def replicate(self, *, num_envs, seed):
        raise NotImplementedError

    def render(self, index):
        picture = np.zeros((16, 16, 3), np.uint8)
        picture[:] = (index, self.episode[index], self.time[index])
        return picture


class CountingPolicy(nn.Module):
    """Carries the number of steps since the start of the episode, as a recurrent network would."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.9))
        self.frozen = nn.BatchNorm1d(1).eval()
        self.count_is_time = True
        self.modes = []

    def initial_state(self, num_envs):
        return {"count": torch.full((num_envs,), 77)}

    def act(self, observations, state, is_first, *, deterministic=False, generator=None):
        self.modes.append((self.training, self.net[1].training, torch.is_grad_enabled()))
        count = torch.where(is_first, 0, state["count"])
        self.count_is_time &= bool((count == observations.observation["a"][:, 0, 0]).all())
        draw = 0 if deterministic else 2
        actions = {
            name: torch.randint(0, 1 + draw, alive.shape, generator=generator)
            for name, alive in observations.alive.items()
        }
        return actions, {}, {"count": count + 1}

    def env_actions(self, actions):
        return actions


LENGTHS = [[2], [7, 3, 7], [1]]


def test_every_instance_contributes_its_share_whatever_the_lengths():
    result = evaluate(CountingPolicy(), ScriptedEnv(LENGTHS), episodes=5)
    assert result.lengths.tolist() == [2, 2, 7, 3, 1]  # instance after instance; taking the first five: [1, 2, 1, 1, 2]
    np.testing.assert_allclose(result.returns, result.lengths * 14 / 3)
    np.testing.assert_allclose(result.team_returns, result.lengths * 14)
    for agent, reward in {"a0": 1, "a1": 3, "b0": 10}.items():
        np.testing.assert_allclose(result.agent_returns[agent], result.lengths * reward)
    np.testing.assert_array_equal(result.info["time"], result.lengths)
    assert result.win_rate == pytest.approx(2 / 5)
    assert result.frames is None


@pytest.mark.parametrize("episodes", [1, 2, 3, 4, 8])
def test_count_is_exact(episodes):
    result = evaluate(CountingPolicy(), ScriptedEnv(LENGTHS), episodes=episodes)
    assert len(result.returns) == len(result.lengths) == len(result.info["battle_won"]) == episodes


def test_no_episode_is_no_evaluation():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        evaluate(CountingPolicy(), ScriptedEnv(LENGTHS), episodes=0)


def test_instances_that_stand_still_are_refused():
    # Every step after the end would count as an episode of length 1.
    env = SyncVectorEnv(factory=lambda: make_env("matrix/climbing"), num_envs=2, seed=0, autoreset=False)
    with pytest.raises(ValueError, match="make it with autoreset=True"):
        evaluate(CountingPolicy(), env, episodes=4)
    with pytest.raises(ValueError, match="make it with autoreset=True"):
        evaluate(CountingPolicy(), AddAgentID(env), episodes=4)


def test_memory_starts_anew_with_every_episode():
    policy = CountingPolicy()
    evaluate(policy, ScriptedEnv(LENGTHS), episodes=6)
    assert policy.count_is_time


def test_policy_acts_in_evaluation_mode_without_gradients_and_gets_its_modes_back():
    policy = CountingPolicy()
    evaluate(policy, ScriptedEnv(LENGTHS), episodes=1)
    assert set(policy.modes) == {(False, False, False)}
    assert policy.training
    assert policy.net[1].training
    assert not policy.frozen.training


def test_modes_come_back_after_an_error():
    policy = CountingPolicy()
    with pytest.raises(RuntimeError), evaluation_mode(policy):
        raise RuntimeError
    assert policy.training
    assert not policy.frozen.training


def test_global_random_states_are_left_alone():
    def draw():
        return random.random(), np.random.rand(), torch.rand(1).item()  # noqa: NPY002

    policy = CountingPolicy()
    lightning.seed_everything(1, verbose=False)
    expected = draw()
    lightning.seed_everything(1, verbose=False)
    evaluate(policy, ScriptedEnv(LENGTHS), episodes=2, deterministic=False)
    assert draw() == expected


def test_seed_decides_on_samples_and_on_the_environment():
    def actions(seed, deterministic=False):
        env = ScriptedEnv(LENGTHS)
        evaluate(CountingPolicy(), env, episodes=4, deterministic=deterministic, seed=seed)
        assert env.seed == seed
        return torch.stack(env.actions).tolist()

    assert actions(1) == actions(1) != actions(2)
    assert actions(1, deterministic=True) == actions(2, deterministic=True)


def test_best_episode_has_exactly_its_own_frames():
    result = evaluate(CountingPolicy(), ScriptedEnv(LENGTHS), episodes=12, record=True)
    assert result.frames[:, 0, 0].tolist() == [[1, 0, time] for time in range(7)]


def test_best_episode_in_the_middle():
    result = evaluate(CountingPolicy(), ScriptedEnv([[2, 5, 3, 9]]), episodes=3, record=True)
    assert result.frames[:, 0, 0].tolist() == [[0, 1, time] for time in range(5)]


def test_only_a_few_instances_are_rendered():
    result = evaluate(CountingPolicy(), ScriptedEnv([[1]] * 4 + [[9]]), episodes=5, record=True)
    assert len(result.frames) == 1


def test_metrics():
    returns = np.array([0.0, 10.0] * 8)
    result = EvaluationResult(
        returns=returns, team_returns=2 * returns, agent_returns={}, lengths=np.full(16, 4), info={}
    )
    metrics = result.metrics()
    assert result.win_rate is None
    assert metrics["eval/return_mean"] == 5
    assert metrics["eval/return_std"] == 5
    assert metrics["eval/length_mean"] == 4
    assert metrics["eval/return_ci_low"] == pytest.approx(5 - 1.96 * 5 / 4, abs=0.5)
    assert metrics["eval/return_ci_high"] == pytest.approx(5 + 1.96 * 5 / 4, abs=0.5)
    assert "eval/win_rate" not in metrics
    assert result.metrics(prefix="")["return_mean"] == 5


def test_bootstrap_interval_covers_the_mean_as_often_as_it_says():
    rng = np.random.default_rng(5)
    intervals = [bootstrap_interval(rng.normal(3, 2, 30)) for _ in range(40)]
    assert 34 <= sum(low < 3 < high for low, high in intervals) <= 40
    assert bootstrap_interval(np.array([4.0])) == (4.0, 4.0)


def frames(height=17, width=21):
    pictures = np.zeros((6, height, width, 3), np.uint8)
    pictures[:] = np.arange(0, 240, 40)[:, None, None, None]
    return pictures


def test_mp4_has_all_frames_in_order(tmp_path):
    path = write_video(frames(), tmp_path / "new" / "a.mp4", fps=5)
    assert path == tmp_path / "new" / "a.mp4"
    read = imageio.imread(path, plugin="pyav")
    assert read.shape == (6, 18, 22, 3)
    np.testing.assert_allclose(read.mean((1, 2, 3)), np.arange(0, 240, 40), atol=6)
    assert imageio.immeta(path, plugin="pyav")["fps"] == 5


def test_gif_stands_in_where_av_is_missing(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    path = write_video(frames(), tmp_path / "a.mp4")
    assert path == tmp_path / "a.gif"
    assert imageio.imread(path).shape == (6, 17, 21, 3)
    assert "MP4 needs av" in caplog.text


def test_other_video_names_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"\.mp4 or \.gif"):
        write_video(frames(), tmp_path / "a.avi")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Checkpoint of a MAPPO that has made two rollouts in the climbing game."""
    folder = tmp_path_factory.mktemp("trained")
    trainer = lightning.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    env = make_vector_env("matrix/climbing", num_envs=4, episode_length=5)
    model = MAPPO(hidden_sizes=(8,), num_epochs=1)
    trainer.fit(model, datamodule=RolloutDataModule(env=env, rollout_length=10))
    trainer.save_checkpoint(folder / "a.ckpt")
    return folder / "a.ckpt"


def test_checkpoint_is_rebuilt_without_the_script(trained):
    module, recipe = load_checkpoint(trained)
    assert isinstance(module, MAPPO)
    assert module.hparams.hidden_sizes == (8,)
    assert (module.env_steps, module.updates, module.training) == (80, 2, False)
    assert recipe == {"name": "matrix/climbing", "kwargs": {"episode_length": 5}}
    saved = torch.load(trained, weights_only=True)["state_dict"]
    assert all(torch.equal(value, saved[name]) for name, value in module.state_dict().items())


def test_checkpoint_is_evaluated_in_its_own_environment(trained):
    result = evaluate_checkpoint(trained, episodes=6, num_envs=4, deterministic=False)
    assert result.lengths.tolist() == [5] * 6
    assert result.returns.std() > 0


def test_video_of_a_game_without_pictures_is_an_error(trained, tmp_path):
    with pytest.raises(NotImplementedError, match="matrix/climbing cannot be rendered"):
        evaluate_checkpoint(trained, episodes=1, video=tmp_path / "a.mp4")


def test_missing_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing\.ckpt; give"):
        load_checkpoint(tmp_path / "nothing.ckpt")


def test_truncated_checkpoint(trained, tmp_path):
    (tmp_path / "a.ckpt").write_bytes(trained.read_bytes()[:-500])
    with pytest.raises(ValueError, match=r"a\.ckpt cannot be read as a checkpoint, use an earlier one") as error:
        load_checkpoint(tmp_path / "a.ckpt")
    assert "\n" not in str(error.value)


def edited(trained, tmp_path, edit):
    checkpoint = torch.load(trained, weights_only=True)
    edit(checkpoint)
    torch.save(checkpoint, tmp_path / "a.ckpt")
    return tmp_path / "a.ckpt"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda c: c.pop("marl_lightning"), "not written by a MARLModule"),
        (lambda c: c["marl_lightning"].pop("algorithm"), "not written by a MARLModule"),
        (lambda c: c["marl_lightning"].update(env=None), "without a registered name"),
        (lambda c: c["marl_lightning"].update(algorithm="builtins.dict"), "is not a MARLModule"),
        (lambda c: c["marl_lightning"].update(algorithm="no.such.Thing"), r"needs the class no\.such\.Thing"),
        (lambda c: c["marl_lightning"].update(algorithm="Thing"), "needs the class Thing"),
        (lambda c: c["hyper_parameters"].update(hidden_sizes=[9]), "does not fit"),
        (lambda c: c["hyper_parameters"].update(colour=1), "does not fit"),
    ],
)
def test_foreign_checkpoints_are_named(trained, tmp_path, edit, message):
    with pytest.raises(ValueError, match=rf"a\.ckpt .*{message}"):
        load_checkpoint(edited(trained, tmp_path, edit))


def test_environment_can_be_given(trained, tmp_path):
    path = edited(trained, tmp_path, lambda c: c["marl_lightning"].update(env=None))
    module, recipe = load_checkpoint(path, env=make_vector_env("matrix/penalty", num_envs=1))
    assert recipe is None
    assert module.spec.name == "matrix/penalty"
    with pytest.raises(ValueError, match="does not fit"):
        load_checkpoint(path, env=make_vector_env("matrix/matching_pennies", num_envs=1))


def test_checkpoint_cannot_run_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return builtins.print, ("ran",)

    torch.save({"marl_lightning": Evil(), "state_dict": {}}, tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match="cannot be read"):
        load_checkpoint(tmp_path / "a.ckpt")
