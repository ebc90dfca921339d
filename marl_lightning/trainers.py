"""Training on any PettingZoo game from a flat configuration, without files: ``make_train(config, env_factory)``.

It puts together the same modules, data modules and callbacks as :mod:`marl_lightning.training`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium import spaces
from lightning import LightningDataModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import Logger

from marl_lightning.algorithms import IPPO, IQL, PR2IQL, MARLModule
from marl_lightning.algorithms.snapshots import AgentState, load_optimizer, load_snapshot, snapshot
from marl_lightning.callbacks import EpsilonSchedule, StopAtEnvSteps
from marl_lightning.data import ReplayDataModule, RolloutDataModule
from marl_lightning.envs import MultiAgentEnv, PettingZooAdapter, SyncVectorEnv, VectorEnv
from marl_lightning.envs.adapters.pettingzoo import array_space
from marl_lightning.envs.wrappers import RecordEpisodeStatistics
from marl_lightning.envs.wrappers.history import EpisodeHistory
from marl_lightning.runtime import quiet_lightning
from marl_lightning.trainer_config import (
    IPPOConfig,
    IQLConfig,
    PR2IQLConfig,
    TrainerConfig,
    validate_config,
    validate_ippo_config,
    validate_iql_config,
)

if TYPE_CHECKING:
    from pettingzoo import ParallelEnv

__all__ = ["make_train", "validate_config", "validate_ippo_config", "validate_iql_config"]

EnvFactory = Callable[[int], "ParallelEnv | MultiAgentEnv"]
OnUpdate = Callable[[int, int, Mapping[str, Any]], None]


def make_train(config: Mapping[str, Any], env_factory: EnvFactory) -> Callable[..., dict[str, Any]]:
    """Returns a function that trains independent learners, one network an agent, and returns what they learned.

    ::

        train = make_train(config, lambda seed: pursuit_v4.parallel_env())
        out = train(seed=0)
        out["metrics"]["episode_return_mean"]  # one entry an env update

    An *env update* is ``NUM_STEPS`` steps of all ``NUM_ENVS`` instances and the training that follows. An episode ends
    for all agents as soon as one of them terminates or is truncated; the others count as truncated, so that the values
    of what they see last are bootstrapped.

    Args:
        config: names in capital letters and their values, see
            :func:`~marl_lightning.trainer_config.validate_iql_config` and, with ``ALGORITHM="ippo"``,
            :func:`~marl_lightning.trainer_config.validate_ippo_config`.
        env_factory: returns a new PettingZoo ``ParallelEnv`` for a seed, with ``Box`` observations and ``Discrete``
            actions. It is called once for each instance, with different seeds. A :class:`MultiAgentEnv` will do too,
            such as a game with monitors; it ends its episodes itself.

    Returns:
        :meth:`TrainFunction.__call__`.

    Raises:
        ConfigurationError: listing everything that is wrong with ``config``.
    """
    return TrainFunction(config=validate_config(config), env_factory=env_factory)


class TrainFunction:
    """What :func:`make_train` returns.

    Args:
        config: the normalised configuration.
        env_factory: see :func:`make_train`.
    """

    def __init__(self, *, config: IQLConfig | IPPOConfig, env_factory: EnvFactory):
        self.config = config
        self._env_factory = env_factory

    def __call__(
        self,
        seed: int = 0,
        initial_train_states: Mapping[str, AgentState] | None = None,
        trainable_agent_ids: Collection[str] | None = None,
        on_update: OnUpdate | None = None,
        capture_env_histories: bool = False,
    ) -> dict[str, Any]:
        """Trains from the beginning. Everything random follows from the seed; global generators are left alone.

        Args:
            seed: of networks, environments and exploration.
            initial_train_states: ``train_states`` of an earlier training, of all agents.
            trainable_agent_ids: agents that learn, by default all. The others act greedily, or as ``OPPONENT_MODE``
                says, and stay as they are, bit for bit. Not for IPPO.
            on_update: called once an env update with its index, the number of env updates, and its metrics.
            capture_env_histories: return what happened in all episodes.

        Returns:
            A dictionary.

            ``train_states``
                By agent, a copy of its weights and of the state of its optimiser; see
                :func:`~marl_lightning.algorithms.snapshots.snapshot`.
            ``metrics``
                Arrays with an entry for each env update: ``episode_return_mean``, ``episode_length_mean``,
                ``completed_episodes``, ``per_agent_episode_return_mean`` (``[updates, agents]``, in the order of
                ``agent_ids``), and those of the algorithm: of IQL and PR2-IQL ``loss``, ``qvals`` and ``epsilon``, of
                IPPO ``policy_loss``, ``value_loss`` and ``entropy``. Means are over the episodes that ended in the env
                update, and over its gradient steps. Where there were none, the number before is repeated, and before
                the first one it is 0: nothing is ever NaN, and ``completed_episodes`` tells what is new.
            ``agent_ids``
                Names of the agents.
            ``env_histories``
                Only if captured: for each instance its episodes, ``env.history()`` of an environment that has this
                method, otherwise the actions and rewards of all steps. It can be written as JSON.

        Raises:
            TypeError: if the factory returns something else, or spaces are of another kind.
            ValueError: if agents are unknown, or initial states do not fit; all are listed.
            RuntimeError: if a history is to be captured that the environment does not keep.
        """
        config = self.config
        _check_arguments(config, trainable_agent_ids)
        instances = _Instances(self._env_factory, seed=seed, count=config.num_envs, keep_history=capture_env_histories)
        env = instances.make()
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                module, datamodule, callbacks = _assemble(config, env, trainable_agent_ids)
                log = _Log(instances.agent_ids, _METRICS[config.algorithm])
                if initial_train_states is not None:
                    load_snapshot(module, initial_train_states)
                    callbacks.append(_OptimizerStates(initial_train_states))
                callbacks.append(_EnvUpdates(log, total=config.num_updates, on_update=on_update))
                trainer = _trainer(logger=log, callbacks=[*callbacks, StopAtEnvSteps(config.total_timesteps)])
                trainer.fit(module, datamodule=datamodule)
            result = {
                "train_states": snapshot(module, trainer.optimizers[0]),
                "metrics": log.arrays(),
                "agent_ids": instances.agent_ids,
            }
        finally:
            env.close()
        if capture_env_histories:
            result["env_histories"] = instances.histories()
        return result


# Environments ---------------------------------------------------------------------------------------------------------


class _Instances:
    """Makes the environment, and keeps the instances in reach whose histories are asked for."""

    def __init__(self, factory: EnvFactory, *, seed: int, count: int, keep_history: bool):
        self._factory = factory
        # Seeds of neighbouring trainings must not overlap.
        self._seed = int(np.random.SeedSequence(seed).generate_state(1)[0]) % 2**31
        self._count = count
        self._keep_history = keep_history
        self._with_history: list[Any] = []
        self.agent_ids: list[str] = []

    def make(self) -> VectorEnv:
        factories = [lambda seed=self._seed + i: self._make_one(seed) for i in range(self._count)]
        env = SyncVectorEnv(factory=factories, num_envs=self._count, seed=self._seed)
        return RecordEpisodeStatistics(env, per_agent=True)

    def histories(self) -> list[Any]:
        """Returns a copy of what the instances kept, as plain lists and dictionaries."""
        return [json.loads(json.dumps(env.history(), default=_plain)) for env in self._with_history]

    def _make_one(self, seed: int) -> MultiAgentEnv:
        game = self._factory(seed)
        env = game if isinstance(game, MultiAgentEnv) else _adapt(game)
        _check_spaces(env)
        self.agent_ids = list(getattr(game, "possible_agents", env.spec.agents))
        if self._keep_history:
            if not hasattr(game, "history"):
                game = env = EpisodeHistory(env)
            game.history()  # if it does not keep one, now is the time to say so
            self._with_history.append(game)
        return env


def _adapt(game: ParallelEnv) -> MultiAgentEnv:
    for agent in getattr(game, "possible_agents", ()):
        _check_agent(agent, array_space(game.observation_space(agent)), game.action_space(agent))
    return PettingZooAdapter(factory=lambda: game, end_together=True)


def _check_spaces(env: MultiAgentEnv) -> None:
    for group in env.spec.groups.values():
        for agent in group.agents:
            _check_agent(agent, group.observation_space, group.action_space)


def _check_agent(agent: str, observation_space: spaces.Space, action_space: spaces.Space) -> None:
    if not isinstance(observation_space, spaces.Box):
        raise TypeError(
            f"observations of {agent!r} must be a Box, got {observation_space}: flatten them, for example with "
            "supersuit.flatten_v0"
        )
    if not isinstance(action_space, spaces.Discrete):
        raise TypeError(f"actions of {agent!r} must be Discrete, got {action_space}")


def _plain(value: Any) -> Any:
    """Returns what JSON knows for what it does not."""
    if isinstance(value, np.ndarray | np.generic | torch.Tensor):
        return value.tolist()
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"env.history() holds {type(value).__name__}, which cannot be written as JSON")


# Algorithms -----------------------------------------------------------------------------------------------------------


def _check_arguments(config: TrainerConfig, trainable_agent_ids: Collection[str] | None) -> None:
    if trainable_agent_ids is not None and config.algorithm == "ippo":
        raise ValueError("trainable_agent_ids is for ALGORITHM='iql' or 'pr2_iql': leave it out, and all agents learn")
    if isinstance(trainable_agent_ids, str):
        raise ValueError(f"trainable_agent_ids must be a collection of names, such as {{{trainable_agent_ids!r}}}")


_PR2_ARGUMENTS = {field.name for field in fields(PR2IQLConfig)} - {field.name for field in fields(IQLConfig)}
"""What PR2-IQL is told besides what IQL is."""


def _assemble(
    config: IQLConfig | IPPOConfig, env: VectorEnv, trainable_agent_ids: Collection[str] | None
) -> tuple[MARLModule, LightningDataModule, list[Callback]]:
    if isinstance(config, IPPOConfig):
        return _ippo(config, env)
    return _iql(config, env, trainable_agent_ids)


def _iql(
    config: IQLConfig, env: VectorEnv, trainable_agent_ids: Collection[str] | None
) -> tuple[IQL, ReplayDataModule, list[Callback]]:
    config = replace(config, episode_limit=env.spec.episode_limit)
    some_frozen = trainable_agent_ids is not None
    algorithm, own = IQL, {}
    if isinstance(config, PR2IQLConfig):
        algorithm, own = PR2IQL, {name: getattr(config, name) for name in _PR2_ARGUMENTS}
    module = algorithm(
        spec=env.spec,
        **own,
        hidden_sizes=config.hidden_sizes,
        recurrent=config.network_kind == "rnn",
        share_parameters=False,
        team_reward=None,
        learning_rate=config.lr,
        gamma=config.gamma,
        huber_delta=config.huber_delta,
        max_grad_norm=config.max_grad_norm,
        target_update_interval=config.target_update_interval * config.num_epochs,
        target_update_rate=config.tau if config.tau < 1 else None,
        log_every_env_steps=config.env_steps_per_update,
        trainable_agents=list(trainable_agent_ids) if some_frozen else None,
        opponent_mode=config.opponent_mode if some_frozen else "greedy",
        opponent_rate=config.opponent_rate if some_frozen else None,
    )
    step = config.env_steps_per_update
    datamodule = ReplayDataModule(
        env=env,
        capacity=config.buffer_size,
        batch_size=config.buffer_batch_size,
        rollout_length=config.num_steps,
        sequence_length=config.learning_length,
        burn_in=config.burn_in,
        start_training=config.learning_starts // step * step,  # the first rollout that ends later is learned from
        training_frequency=step,
        num_updates=config.num_epochs,
        updates_per_batch=1,  # with these settings a batch of Lightning is one rollout and all updates after it
    )
    schedule = EpsilonSchedule(
        start=config.eps_start, end=config.eps_finish, anneal_env_steps=config.eps_decay_env_steps
    )
    return module, datamodule, [schedule]


def _ippo(config: IPPOConfig, env: VectorEnv) -> tuple[IPPO, RolloutDataModule, list[Callback]]:
    module = IPPO(
        spec=env.spec,
        hidden_sizes=config.hidden_sizes,
        activation="tanh",
        layer_norm=False,
        recurrent=config.network_kind == "rnn",
        chunk_length=config.num_steps,
        share_parameters=False,
        learning_rate=config.lr,
        learning_rate_decay_env_steps=config.total_timesteps if config.anneal_lr else None,
        gamma=config.gamma,
        gae_lambda=config.gae_lambda,
        clip_ratio=config.clip_eps,
        value_clip=config.clip_eps,
        huber_delta=None,
        value_coefficient=config.vf_coef,
        entropy_coefficient=config.ent_coef,
        max_grad_norm=config.max_grad_norm,
        num_epochs=config.update_epochs,
        num_minibatches=config.num_minibatches,
        normalise_value=False,  # running statistics would be those of all agents
    )
    return module, RolloutDataModule(env=env, rollout_length=config.num_steps), []


# Training -------------------------------------------------------------------------------------------------------------

_IQL_METRICS = {"loss": "loss", "qvals": "q_value", "epsilon": "exploration"}
_METRICS = {
    "iql": _IQL_METRICS,
    "pr2_iql": _IQL_METRICS,
    "ippo": {"policy_loss": "policy_loss", "value_loss": "value_loss", "entropy": "entropy"},
}
"""By algorithm: names of metrics here, and those that the module gives them, maybe with a group behind them."""


class _Log(Logger):
    """Takes what the module logs, once an env update."""

    def __init__(self, agent_ids: list[str], metrics: Mapping[str, str]):
        super().__init__()
        self._agent_ids = agent_ids
        self._metrics = metrics
        self._new: dict[str, float] = {}
        self._rows: list[dict[str, Any]] = []

    @property
    def name(self) -> str:
        return "make_train"

    @property
    def version(self) -> str:
        return ""

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """There is nowhere to write them."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._new.update(metrics)

    def end_update(self) -> dict[str, Any]:
        """Returns the metrics of the env update that has ended, and remembers them."""
        new, self._new = self._new, {}
        before = self._rows[-1] if self._rows else {}
        row = {
            "episode_return_mean": new.get("train/return", before.get("episode_return_mean", 0.0)),
            "episode_length_mean": new.get("train/episode_length", before.get("episode_length_mean", 0.0)),
            "completed_episodes": int(new.get("train/episodes", 0)),
            "per_agent_episode_return_mean": before.get(
                "per_agent_episode_return_mean", np.zeros(len(self._agent_ids))
            ),
        }
        if row["completed_episodes"]:
            returns = [new[f"train/agent_return/{agent}"] for agent in self._agent_ids]
            row["per_agent_episode_return_mean"] = np.array(returns)
        for name, logged in self._metrics.items():
            values = [value for key, value in new.items() if key == logged or key.startswith(f"{logged}/")]
            row[name] = float(np.mean(values)) if values else before.get(name, 0.0)
        self._rows.append(row)
        return row

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns all metrics, one entry an env update."""
        return {name: np.array([row[name] for row in self._rows]) for name in self._rows[0]}


class _EnvUpdates(Callback):
    """Calls a function at the end of every env update, which is a batch of Lightning."""

    def __init__(self, log: _Log, *, total: int, on_update: OnUpdate | None):
        self._log, self._total, self._on_update = log, total, on_update
        self._index = 0

    def on_train_batch_end(self, *_: Any) -> None:
        metrics = self._log.end_update()
        if self._on_update is not None:
            self._on_update(self._index, self._total, metrics)
        self._index += 1


class _OptimizerStates(Callback):
    """Gives the optimiser the moments of a snapshot, once it is there."""

    def __init__(self, states: Mapping[str, AgentState]):
        self._states = states

    def on_fit_start(self, trainer: Trainer, pl_module: MARLModule) -> None:
        load_optimizer(trainer.optimizers[0], pl_module, self._states)


def _trainer(*, logger: Logger, callbacks: Iterable[Callback]) -> Trainer:
    quiet_lightning()
    return Trainer(
        accelerator="auto",
        devices=1,
        max_epochs=-1,
        logger=logger,
        callbacks=list(callbacks),
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
