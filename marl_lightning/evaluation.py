"""Evaluation of policies: exactly n episodes, no bias, no trace left in what is being trained."""

from __future__ import annotations

import importlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import imageio.v3 as imageio
import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn

from marl_lightning.algorithms.base import MARLModule, Policy
from marl_lightning.data.episodes import true_returns
from marl_lightning.envs.base import VectorEnv, VectorStep
from marl_lightning.envs.registry import make_vector_env
from marl_lightning.envs.spec import EnvSpec
from marl_lightning.envs.vector.buffers import map_observations
from marl_lightning.envs.wrappers import freeze_statistics, load_statistics
from marl_lightning.envs.wrappers.base import require_autoreset
from marl_lightning.nn.mode import evaluation_mode

log = logging.getLogger(__name__)

MAX_RENDERED_ENVS = 4
"""Instances that are rendered when an evaluation is recorded; rendering costs far more than stepping."""

_RESAMPLES = 2_000
_WON = "battle_won"


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """``n`` evaluated episodes, in an order that does not depend on how long they took.

    Attributes:
        returns: ``[n]``, mean over agents of their own undiscounted returns: the score of an episode.
        team_returns: ``[n]``, sum over agents.
        agent_returns: per agent ``[n]``, its own undiscounted returns.
        lengths: ``[n]`` int64, in env steps.
        info: per name in ``EnvSpec.info_keys`` ``[n]``, as of the last step of the episode.
        frames: uint8 ``[T, H, W, 3]``, one picture for each decision point of the best-scoring episode that was
            rendered; ``None`` if nothing was recorded.
    """

    returns: np.ndarray
    team_returns: np.ndarray
    agent_returns: dict[str, np.ndarray]
    lengths: np.ndarray
    info: dict[str, np.ndarray]
    frames: np.ndarray | None = None

    @property
    def win_rate(self) -> float | None:
        """Share of the episodes that were won, ``None`` if the game does not report ``"battle_won"``."""
        return float(self.info[_WON].mean()) if _WON in self.info else None

    def metrics(self, prefix: str = "eval/") -> dict[str, float]:
        """Returns the numbers to log.

        ``return_...`` are of the mean over agents: mean, standard deviation over episodes, 95 % interval of the mean.
        ``team_return_mean`` is of the sum over agents, which is what many papers report.
        """
        low, high = bootstrap_interval(self.returns)
        metrics = {
            "return_mean": float(self.returns.mean()),
            "return_std": float(self.returns.std()),
            "return_ci_low": low,
            "return_ci_high": high,
            "team_return_mean": float(self.team_returns.mean()),
            "length_mean": float(self.lengths.mean()),
        }
        if self.win_rate is not None:
            metrics["win_rate"] = self.win_rate
        return {prefix + name: value for name, value in metrics.items()}


def bootstrap_interval(values: np.ndarray) -> tuple[float, float]:
    """Returns the 95 % percentile bootstrap interval of the mean of ``values``; equal values, equal interval."""
    rng = np.random.default_rng(0)
    means = [rng.choice(values, len(values)).mean() for _ in range(_RESAMPLES)]
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def evaluate(
    policy: Policy,
    env: VectorEnv,
    *,
    episodes: int,
    deterministic: bool = True,
    seed: int = 0,
    record: bool = False,
) -> EvaluationResult:
    """Plays exactly ``episodes`` episodes.

    How many of them each instance contributes is fixed in advance, and episodes beyond that are ignored: taking the
    first ``n`` that finish would prefer short ones. The policy is used in evaluation mode and without gradients, its
    randomness comes from an own generator, and the global random states are put back, so that nothing of a training
    that goes on around it is changed.

    Args:
        policy: see :class:`~marl_lightning.algorithms.base.Policy`; an ``nn.Module`` acts on the device it is on.
        env: it is reset with the seed, and stays open.
        episodes: number of episodes.
        deterministic: take the mode of the policy's distribution instead of samples.
        seed: of the environment and of the policy's samples.
        record: render the first :data:`MAX_RENDERED_ENVS` instances and keep the pictures of their best episode.

    Raises:
        ValueError: if ``episodes`` is less than 1, or the environment does not reset its instances itself.
        NotImplementedError: if ``record`` and the environment has no pictures.
    """
    if episodes < 1:
        raise ValueError(f"episodes must be at least 1, got {episodes}")
    require_autoreset(env, "evaluation")
    device = _device_of(policy)
    with evaluation_mode(policy), isolate_rng(include_cuda=device.type == "cuda"), torch.no_grad():
        generator = torch.Generator(device).manual_seed(seed)
        scores = _Scores(spec=env.spec, num_envs=env.num_envs, episodes=episodes)
        recorder = _Recorder(env) if record else None
        observations = env.reset(seed=seed)
        env_device = observations.state.device
        state = policy.initial_state(env.num_envs)
        is_first = torch.ones(env.num_envs, dtype=torch.bool, device=device)
        while scores.wanted.any():
            if recorder:
                recorder.capture(scores.wanted)
            actions, _, state = policy.act(
                map_observations(lambda tensor: tensor.to(device), observations),
                state,
                is_first,
                deterministic=deterministic,
                generator=generator,
            )
            step = env.step({name: action.to(env_device) for name, action in policy.env_actions(actions).items()})
            ended = scores.add(step)
            if recorder:
                recorder.finish(ended)
            observations = step.observations
            is_first = (step.terminated | step.truncated).to(device)
    return scores.result(frames=recorder.best if recorder else None)


def _device_of(policy: object) -> torch.device:
    parameter = next(policy.parameters(), None) if isinstance(policy, nn.Module) else None
    return torch.device("cpu") if parameter is None else parameter.device


class _Scores:
    """Sums of the running episodes, and results of the finished ones in slots ``[E, k]`` that were fixed in advance.

    Args:
        spec: of the environment.
        num_envs: number of instances, ``E``.
        episodes: number of episodes wanted in all.
    """

    def __init__(self, *, spec: EnvSpec, num_envs: int, episodes: int):
        self._spec = spec
        self._quota = np.full(num_envs, episodes // num_envs)
        self._quota[: episodes % num_envs] += 1
        self._finished = np.zeros(num_envs, np.int64)
        self._running = {name: np.zeros((num_envs, group.num_agents)) for name, group in spec.groups.items()}
        self._running_length = np.zeros(num_envs, np.int64)
        slots = (num_envs, self._quota.max())
        self._returns = {name: np.zeros((*slots, group.num_agents)) for name, group in spec.groups.items()}
        self._lengths = np.zeros(slots, np.int64)
        self._info = {key: np.zeros(slots) for key in spec.info_keys}

    @property
    def wanted(self) -> np.ndarray:
        """``[E]`` bool, instances whose running episode counts."""
        return self._finished < self._quota

    def add(self, step: VectorStep[torch.Tensor]) -> dict[int, float]:
        """Takes in a step and returns the score of each counting episode that ended in it, by instance."""
        self._running_length += 1
        for name, total in self._running.items():
            total += step.reward[name].numpy(force=True)
        done = (step.terminated | step.truncated).numpy(force=True)
        ended = {}
        for env in np.flatnonzero(done & self.wanted):
            slot = (env, self._finished[env])
            for name, total in self._running.items():
                self._returns[name][slot] = total[env]
            for key, values in self._info.items():
                values[slot] = step.info[key][env]
            self._lengths[slot] = self._running_length[env]
            ended[int(env)] = float(np.concatenate([total[env] for total in self._running.values()]).mean())
        self._finished += done
        self._running_length[done] = 0
        for total in self._running.values():
            total[done] = 0
        return ended

    def result(self, *, frames: np.ndarray | None) -> EvaluationResult:
        filled = np.arange(self._lengths.shape[1]) < self._quota[:, None]
        returns = {name: values[filled] for name, values in self._returns.items()}
        info = {key: values[filled] for key, values in self._info.items()}
        returns = true_returns(self._spec, returns, info)
        every_agent = np.concatenate(list(returns.values()), axis=1)
        return EvaluationResult(
            returns=every_agent.mean(1),
            team_returns=every_agent.sum(1),
            agent_returns=dict(zip(self._spec.agents, every_agent.T, strict=True)),
            lengths=self._lengths[filled],
            info=info,
            frames=frames,
        )


class _Recorder:
    """Pictures of the running episodes of a few instances and of the best finished one, and of nothing else."""

    def __init__(self, env: VectorEnv):
        self._env = env
        self._running: list[list[np.ndarray]] = [[] for _ in range(min(env.num_envs, MAX_RENDERED_ENVS))]
        self._best_score = -np.inf
        self.best: np.ndarray | None = None

    def capture(self, wanted: np.ndarray) -> None:
        """Renders the decision points of instances ``wanted`` ``[E]`` bool.

        Ended instances have been reset already, so that the picture after the last step of an episode does not exist.
        """
        for index, frames in enumerate(self._running):
            if wanted[index]:
                frames.append(self._env.render(index).copy())

    def finish(self, ended: dict[int, float]) -> None:
        """Takes the scores of episodes that ended, by instance."""
        for index, score in ended.items():
            if index < len(self._running):
                if self.best is None or score > self._best_score:
                    self.best, self._best_score = np.stack(self._running[index]), score
                self._running[index].clear()


def write_video(frames: np.ndarray, path: str | os.PathLike[str], *, fps: int = 10) -> Path:
    """Writes pictures as an H.264 MP4, or as a GIF where the package ``av`` is missing.

    Args:
        frames: uint8 ``[T, H, W, 3]``. A last odd row or column is doubled in an MP4, whose sizes have to be even.
        path: the file, ending in ``.mp4`` or ``.gif``; its folder is created.
        fps: frames per second.

    Returns:
        The file that was written: ``path``, or the GIF of the same name.

    Raises:
        ValueError: if the name ends in neither.
    """
    path = Path(path)
    if path.suffix not in (".mp4", ".gif"):
        raise ValueError(f"a video needs a name that ends in .mp4 or .gif, got {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".mp4":
        try:
            importlib.import_module("av")
        except ImportError as error:
            path = path.with_suffix(".gif")
            log.warning('writing %s, since MP4 needs av (%s): pip install "marl-lightning[video]"', path, error)
        else:
            _, height, width, _ = frames.shape
            even = np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
            imageio.imwrite(path, even, plugin="pyav", codec="libx264", fps=fps, out_pixel_format="yuv420p")
            return path
    path.write_bytes(encode_gif(frames, fps=fps))
    return path


def encode_gif(frames: np.ndarray, *, fps: int = 10) -> bytes:
    """Returns pictures ``[T, H, W, 3]`` as an endless GIF."""
    return imageio.imwrite("<bytes>", frames, plugin="pillow", extension=".gif", duration=1000 / fps, loop=0)


def load_checkpoint(
    path: str | os.PathLike[str], *, env: VectorEnv | None = None, device: torch.device | str = "cpu"
) -> tuple[MARLModule, dict[str, Any] | None]:
    """Rebuilds the trained module of a Lightning checkpoint, without the script that trained it.

    Args:
        path: a ``.ckpt`` file.
        env: gives the spec; by default the environment of the training is built for a moment. If it has wrappers with
            running statistics, they become those of the checkpoint, and stay as they are.
        device: where to put the module.

    Returns:
        The module, in evaluation mode, and the recipe of its environment: arguments of ``make_vector_env``, or ``None``
        if it was trained in an environment that cannot be named.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file is broken, was not written by this library, or does not fit to ``env``.
    """
    checkpoint = _read_checkpoint(path)
    recipe = checkpoint["marl_lightning"]["env"]
    if env is None:
        with _build_env(path, recipe, num_envs=1, seed=0) as built:
            spec = built.spec
    else:
        spec = env.spec
        load_statistics(env, checkpoint["marl_lightning"].get("statistics", {}))
        freeze_statistics(env)
    return _build_module(path, checkpoint, spec).to(device), recipe


def evaluate_checkpoint(
    path: str | os.PathLike[str],
    *,
    episodes: int = 100,
    num_envs: int = 32,
    deterministic: bool = True,
    seed: int = 0,
    device: torch.device | str = "cpu",
    video: str | os.PathLike[str] | None = None,
) -> EvaluationResult:
    """Evaluates the policy of a checkpoint in the environment that it was trained in.

    Args:
        path: see :func:`load_checkpoint`, also for errors.
        episodes: see :func:`evaluate`, also for errors.
        num_envs: instances that are stepped together, at most one an episode.
        deterministic: see :func:`evaluate`.
        seed: see :func:`evaluate`.
        device: where the policy acts.
        video: file for the best episode that was rendered, see :func:`write_video`.
    """
    checkpoint = _read_checkpoint(path)
    recipe = checkpoint["marl_lightning"]["env"]
    with _build_env(path, recipe, num_envs=max(1, min(num_envs, episodes)), seed=seed) as env:
        load_statistics(env, checkpoint["marl_lightning"].get("statistics", {}))
        freeze_statistics(env)
        module = _build_module(path, checkpoint, env.spec).to(device)
        result = evaluate(
            module.policy,
            env,
            episodes=episodes,
            deterministic=deterministic,
            seed=seed,
            record=video is not None,
        )
    if video is not None:
        write_video(result.frames, video)
    return result


def _read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    if not Path(path).exists():
        raise FileNotFoundError(f"there is no checkpoint {path}; give the path of a .ckpt file")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # zip, pickle and torch all raise their own
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path} cannot be read as a checkpoint, use an earlier one ({reason})") from error
    own = checkpoint.get("marl_lightning") if isinstance(checkpoint, dict) else None
    if not isinstance(own, dict) or not {"algorithm", "env"} <= own.keys() or "state_dict" not in checkpoint:
        raise ValueError(f"{path} was not written by a MARLModule; give a .ckpt file of a marl_lightning training")
    return checkpoint


def _build_env(path: str | os.PathLike[str], recipe: dict[str, Any] | None, *, num_envs: int, seed: int) -> VectorEnv:
    if recipe is None:
        raise ValueError(
            f"{path} was trained in an environment without a registered name; "
            "build that environment and call load_checkpoint(path, env=env), then evaluate(module.policy, env, ...)"
        )
    return make_vector_env(recipe["name"], num_envs=num_envs, seed=seed, **recipe["kwargs"])


def _build_module(path: str | os.PathLike[str], checkpoint: dict[str, Any], spec: EnvSpec) -> MARLModule:
    name = checkpoint["marl_lightning"]["algorithm"]
    module_name, _, class_name = name.rpartition(".")
    try:
        algorithm = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} needs the class {name}, which cannot be imported ({error})") from error
    if not (isinstance(algorithm, type) and issubclass(algorithm, MARLModule)):
        raise ValueError(f"{path} names {name} as its algorithm, which is not a MARLModule; use another checkpoint")
    try:
        module = algorithm(**checkpoint.get("hyper_parameters", {}))
        module.use_spec(spec)
        module.load_state_dict(checkpoint["state_dict"])
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{path} does not fit to {name} in environment {spec.name}; was one of them changed since? ({error})"
        ) from error
    module.on_load_checkpoint(checkpoint)
    return module.eval()
