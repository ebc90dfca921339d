"""A small game, module and data module that use every source of randomness there is, and learn nothing useful."""

from __future__ import annotations

import random
import time

import lightning
import numpy as np
import torch
from gymnasium import spaces
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from marl_lightning.algorithms.base import MARLModule
from marl_lightning.callbacks import StopAtEnvSteps
from marl_lightning.envs.base import VectorEnv
from marl_lightning.envs.spec import EnvSpec, GroupSpec
from marl_lightning.envs.vector.buffers import allocate_step, as_tensors


class WalkEnv(VectorEnv):
    """Two agents push a point; an episode ends at random. Pictures show instance and time."""

    def __init__(self, *, num_envs: int, seed: int = 0, renders: bool = True, can_checkpoint: bool = True):
        group = GroupSpec(agents=("a", "b"), observation_space=spaces.Box(-9, 9, (1,)), action_space=spaces.Discrete(2))
        self.spec = EnvSpec(
            name="test/walk",
            groups={"agents": group},
            state_size=1,
            info_keys=("battle_won",),
            can_checkpoint=can_checkpoint,
        )
        self.num_envs, self.seed, self.renders, self.closed = num_envs, seed, renders, False
        self.rng = np.random.default_rng(seed)
        self.arrays = allocate_step(self.spec, num_envs)
        self.tensors = as_tensors(self.arrays)
        for observations in (self.arrays.observations, self.arrays.final):
            observations.action_mask["agents"][:] = True
            observations.alive["agents"][:] = True
        self.time = np.zeros(num_envs, np.int64)

    def _show(self, position):
        self.arrays.observations.observation["agents"][:] = position[:, None, None]
        self.arrays.observations.state[:] = position[:, None]

    def reset(self, *, seed=None, mask=None):
        if seed is not None:
            self.rng, self.seed = np.random.default_rng(seed), seed
        self.time[:] = 0
        self._show(self.rng.normal(size=self.num_envs))
        return self.tensors.observations

    def step(self, actions):
        np.random.rand()  # a careless game that uses the global random state  # noqa: NPY002
        self.time += 1
        push = 2.0 * actions["agents"].numpy().sum(1) - 2
        position = self.arrays.observations.state[:, 0] * 0.9 + push + 0.1 * self.rng.normal(size=self.num_envs)
        self.arrays.reward["agents"][:] = -np.abs(position)[:, None]
        self.arrays.terminated[:] = self.rng.random(self.num_envs) < 0.2
        self.arrays.info["battle_won"][:] = np.abs(position) < 1
        position[self.arrays.terminated] = 0
        self.time[self.arrays.terminated] = 0
        self._show(position)
        return self.tensors

    def replicate(self, *, num_envs, seed):
        return WalkEnv(num_envs=num_envs, seed=seed, renders=self.renders)

    def render(self, index):
        if not self.renders:
            return super().render(index)
        return np.full((16, 16, 3), 10 * index + self.time[index], np.uint8)

    def state_dict(self):
        return {
            "rng": self.rng.bit_generator.state,
            "state": torch.from_numpy(self.arrays.observations.state.copy()),
            "time": torch.from_numpy(self.time.copy()),
        }

    def load_state_dict(self, state):
        self.rng.bit_generator.state = state["rng"]
        self.time = state["time"].numpy().copy()
        self._show(state["state"][:, 0].numpy())
        return self.tensors.observations

    def close(self):
        self.closed = True


class WalkPolicy(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1, 2)
        self.dropout = nn.Dropout(0.5)  # draws from the global random state in training mode
        self.frozen = nn.Dropout(0.5).eval()

    def initial_state(self, num_envs):
        return {}

    def act(self, observations, state, is_first, *, deterministic=False, generator=None):
        logits = self.dropout(self.linear(observations.observation["agents"]))
        noise = torch.rand(logits.shape, generator=generator)
        choice = logits if deterministic else logits - noise.log().neg().log()
        return {"agents": choice.argmax(-1)}, {"agents": torch.zeros(logits.shape[:-1])}, state

    def env_actions(self, actions):
        return actions


class WalkModule(MARLModule):
    """Random walk of the weights, driven by the data and by all global random states."""

    def build(self, spec):
        self.actor = WalkPolicy()

    @property
    def policy(self):
        return self.actor

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def training_step(self, batch, batch_idx):
        noise = torch.randn(1) + np.random.rand() + random.random()  # noqa: NPY002
        loss = (self.actor.dropout(self.actor.linear(batch["observation"])) * (batch["reward"] + noise)).mean()
        self.optimise(loss, self.optimizers(), list(self.parameters()))
        self.advance(batch["reward"].numel())
        self.flush_metrics({"train/return": float(batch["reward"].sum()), "train/win_rate": 0.5})


class WalkDataModule(lightning.LightningDataModule):
    """One batch is ``length`` vector steps."""

    def __init__(self, *, env: WalkEnv, length: int = 5, before_collect=None):
        super().__init__()
        self.env, self.length, self.before_collect = env, length, before_collect
        self.spec, self.recipe, self.collect_seconds = env.spec, env.recipe, 0.0
        self.generator = torch.Generator().manual_seed(1)
        self.observations = env.reset(seed=env.seed)

    @property
    def local_state_is_exact(self):
        return self.env.spec.can_checkpoint

    def __len__(self):
        return 1

    def train_dataloader(self):
        return self

    @torch.no_grad()
    def __iter__(self):
        if self.before_collect:
            self.before_collect(self.trainer)
        start = time.perf_counter()
        policy, rewards, seen = self.trainer.lightning_module.policy, [], []
        for _ in range(self.length):
            seen.append(self.observations.observation["agents"].clone())
            actions, _, _ = policy.act(self.observations, {}, None, generator=self.generator)
            step = self.env.step(actions)
            self.observations = step.observations
            rewards.append(step.reward["agents"][:, :1].unsqueeze(1).clone())
        self.collect_seconds += time.perf_counter() - start
        yield {"observation": torch.cat(seen), "reward": torch.cat(rewards)}

    def local_state_dict(self):
        return {"env": self.env.state_dict(), "generator": self.generator.get_state()}

    def load_local_state_dict(self, state):
        self.observations = self.env.load_state_dict(state["env"])
        self.generator.set_state(state["generator"])

    def teardown(self, stage):
        self.env.close()

    def on_exception(self, exception):
        self.env.close()


ROLLOUT = 20
"""Env steps of a rollout in :func:`fit`."""


def fit(folder, callbacks=(), *, env_steps=100, ckpt_path=None, env=None, before_collect=None, loggers=None):
    """Trains from a fixed seed and returns the trainer; the module is ``trainer.lightning_module``."""
    lightning.seed_everything(3, verbose=False)
    trainer = lightning.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        max_epochs=-1,
        callbacks=[StopAtEnvSteps(env_steps), *callbacks],
        logger=[CSVLogger(folder)] if loggers is None else loggers,
        enable_progress_bar=any(isinstance(c, lightning.pytorch.callbacks.ProgressBar) for c in callbacks),
        enable_checkpointing=any(isinstance(c, lightning.pytorch.callbacks.Checkpoint) for c in callbacks),
        enable_model_summary=False,
    )
    data = WalkDataModule(env=env or WalkEnv(num_envs=4, seed=7), before_collect=before_collect)
    trainer.fit(WalkModule(), datamodule=data, ckpt_path=ckpt_path)
    return trainer


def traces(trainer):
    """Returns all that must be equal after equal trainings."""
    module, data = trainer.lightning_module, trainer.datamodule
    return {
        "weights": [p.tolist() for p in module.parameters()],
        "optimizer": str(module.optimizers().state_dict()),
        "training": [m.training for m in module.modules()],
        "env_steps": module.env_steps,
        "env": str(data.env.state_dict()),
        "generator": data.generator.get_state().tolist(),
        "torch": torch.get_rng_state().tolist(),
        "numpy": str(np.random.get_state()),  # noqa: NPY002
        "python": random.getstate(),
    }
