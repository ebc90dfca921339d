"""Finding, checking and reading of configurations. Nothing here writes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import Field

from marl_lightning.envs import VectorEnv, make_vector_env
from marl_lightning.envs.registry import Vectorization
from marl_lightning.evaluation import load_checkpoint
from marl_lightning.validation import PositiveInt, find_problems

FILLED_IN = {"data": ("env",), "algorithm": ("spec",), "trainer": ("logger", "callbacks")}
"""Arguments of a group that are made from other groups."""


class ConfigurationError(ValueError):
    """Something in the configuration has to be changed; every problem is one line of the message."""

    def __init__(self, problems: list[str]):
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass(kw_only=True)
class Settings:
    """The root of the configuration.

    Args:
        seed: of everything random.
        total_env_steps: training stops when this many env steps have been made, by all processes and earlier runs.
        ckpt_path: checkpoint to resume from.
        num_threads: threads of torch on the CPU, ``None`` leaves its default.
        env: environment, see :func:`build_env`.
        data: data module.
        algorithm: LightningModule.
        trainer: arguments of ``lightning.Trainer``.
        callbacks: named callbacks; ``None`` removes one.
        logger: named loggers; ``None`` removes one.
        paths: ``output_dir`` is the run folder.
    """

    seed: Annotated[int, Field(ge=0, lt=2**32)]
    total_env_steps: PositiveInt
    ckpt_path: str | None = None
    num_threads: PositiveInt | None = None
    env: dict[str, Any]
    data: dict[str, Any]
    algorithm: dict[str, Any]
    trainer: dict[str, Any]
    callbacks: dict[str, Any] | None = None
    logger: dict[str, Any] | None = None
    paths: dict[str, Any]


def config_dir() -> Path:
    """Returns the folder of the YAML files: inside an installed package, or beside it in a checkout."""
    package = Path(__file__).parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def build(node: Mapping[str, Any], **filled_in: Any) -> Any:
    """Calls what ``_target_`` names with the other entries; nested entries with a ``_target_`` are built first."""
    target, arguments = _split(node)
    return target(
        **{name: instantiate(value) if _has_target(value) else value for name, value in arguments.items()} | filled_in
    )


def build_env(node: Mapping[str, Any], seed: int) -> VectorEnv:
    """Makes the vector environment of an ``env`` group.

    Args:
        node: ``family`` and either ``map_name`` or ``scenario`` name the game, ``num_envs`` counts the instances,
            ``vectorization``, ``num_workers`` and ``wrappers`` are those of
            :func:`~marl_lightning.envs.make_vector_env`, and all the rest are arguments of the game. An argument of
            ``None`` keeps the default of the game.
        seed: instance ``i`` is seeded with ``seed + i``.
    """
    node = _plain(node)
    arguments = {key: value for key, value in node.items() if key not in _ENV_KEYS and value is not None}
    return make_vector_env(_env_name(node), num_envs=node["num_envs"], seed=seed, **arguments)


def validate(cfg: DictConfig) -> None:
    """Checks a training configuration as a whole, before anything is written.

    Raises:
        ConfigurationError: listing all problems.
    """
    try:
        plain = _plain(cfg)
    except OmegaConfBaseException as error:  # an interpolation that leads nowhere
        raise ConfigurationError([" ".join(str(error).split())]) from error
    problems = roots = find_problems(Settings, plain)
    if all(isinstance(plain.get(group), dict) for group in _GROUPS):
        checks = (
            _check_env,
            _check_groups,
            _check_pairing,
            _check_batches,
            _check_trainer,
            _check_folder,
            _check_checkpoint,
        )
        for check in checks:
            # Leaves out settings of the root that a group repeats by interpolation.
            problems = [*problems, *(p for p in check(plain) if not any(p.endswith(f".{root}") for root in roots))]
    if not problems:
        problems = [*_check_resume(plain), *_check_callbacks(plain)]
    if problems:
        raise ConfigurationError(problems)


_GROUPS = ("env", "data", "algorithm", "trainer", "paths")
_ENV_KEYS = ("family", "map_name", "scenario", "num_envs")
_VECTOR_KEYS = ("vectorization", "num_workers", "wrappers")


def _plain(node: Any) -> Any:
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node


def _has_target(value: Any) -> bool:
    return isinstance(value, Mapping) and "_target_" in value


def _split(node: Mapping[str, Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    arguments = dict(_plain(node))
    return get_object(arguments.pop("_target_")), arguments


def _env_name(node: Mapping[str, Any]) -> str:
    return f"{node.get('family')}/{node.get('map_name') or node.get('scenario')}"


def _check_env(cfg: Mapping[str, Any]) -> list[str]:
    node = cfg["env"]
    general = (*_ENV_KEYS, *_VECTOR_KEYS)
    problems = find_problems(_env_settings, {key: node[key] for key in general if key in node}, prefix="env")
    arguments = {key: value for key, value in node.items() if key not in general and value is not None}
    for function, forwards_to in _env_constructors(node):
        filled_in = (*_ENV_KEYS, "game", "seed", "backend")
        problems += find_problems(function, arguments, prefix="env", filled_in=filled_in, forwards_to=forwards_to)
    if not problems:
        try:  # the game itself knows the rest; one instance costs little
            build_env({**node, "num_envs": 1}, seed=0).close()
        except Exception as error:  # of any kind, from a package that gets a wrong argument
            kind = "" if isinstance(error, ValueError | TypeError | ImportError) else f"{type(error).__name__}: "
            lines = str(error).splitlines() or [type(error).__name__]
            problems = [f"env: {kind}{' '.join(line.split())}" for line in lines if line.strip()]
    return problems


def _env_settings(
    *,
    family: str,
    num_envs: PositiveInt,
    map_name: str | None = None,
    scenario: str | None = None,
    vectorization: Vectorization = "auto",
    num_workers: PositiveInt | None = None,
    wrappers: list[Any] | None = None,
) -> None:
    """The settings that all families have."""


def _env_constructors(node: Mapping[str, Any]) -> Iterator[tuple[Callable[..., Any], Callable[..., Any] | None]]:
    """Yields what takes the arguments of the game, and what takes its ``**kwargs``, where signatures tell."""
    match node.get("family"):
        case "smac":
            from marl_lightning.envs.native.smac.env import SmacVectorEnv
            from marl_lightning.envs.native.smac.options import SmacOptions

            yield SmacVectorEnv, SmacOptions
        case "matrix":
            from marl_lightning.envs.native.matrix import MatrixVectorEnv

            yield MatrixVectorEnv, None
        case "lbf":
            from marl_lightning.envs.native.lbf.env import LBFVectorEnv
            from marl_lightning.envs.native.lbf.options import LBFOptions

            yield LBFVectorEnv, LBFOptions
        case "rware":
            from marl_lightning.envs.native.rware.env import RWAREVectorEnv
            from marl_lightning.envs.native.rware.options import RWAREOptions

            yield RWAREVectorEnv, RWAREOptions
        case "mpe":
            from marl_lightning.envs.native.mpe import SCENARIOS, MPEVectorEnv

            if node.get("backend") != "package" and node.get("scenario") in SCENARIOS:
                yield MPEVectorEnv, SCENARIOS[node["scenario"]]


def _check_groups(cfg: Mapping[str, Any]) -> Iterator[str]:
    """Arguments of everything that has a ``_target_``."""
    nodes = {name: cfg[name] for name in ("data", "algorithm", "trainer")}
    for group in ("callbacks", "logger"):
        nodes |= {f"{group}.{name}": node for name, node in (cfg.get(group) or {}).items() if node is not None}
    for name, node in nodes.items():
        if not _has_target(node):
            yield f"{name}: needs a _target_, the class to build"
            continue
        try:
            target, arguments = _split(node)
        except Exception as error:  # importing anything can fail in any way
            yield f"{name}._target_={node['_target_']}: cannot be imported ({error})"
            continue
        nested = [key for key, value in arguments.items() if _has_target(value)]
        problems = find_problems(target, arguments, prefix=name, filled_in=(*FILLED_IN.get(name, ()), *nested))
        if name == "algorithm" and not problems:
            problems = _construction_problems(node)
        yield from problems


def _construction_problems(node: Mapping[str, Any]) -> list[str]:
    """What only the constructor knows: arguments that do not go together. Without a spec it builds no networks."""
    try:
        build(node)
    except ValueError as error:
        return [f"algorithm: {error}"]
    return []


def _check_pairing(cfg: Mapping[str, Any]) -> Iterator[str]:
    """Whether the algorithm learns from this kind of data."""
    try:
        algorithm, data = _split(cfg["algorithm"])[0], _split(cfg["data"])[0]
    except Exception:  # reported as such
        return
    wanted = getattr(algorithm, "learns_from", None)
    if wanted is not None and not (isinstance(data, type) and issubclass(data, wanted)):
        names = {"RolloutDataModule": "rollout", "ReplayDataModule": "replay"}
        yield (
            f"data._target_={cfg['data']['_target_']}: {algorithm.__name__} learns from a {wanted.__name__}, choose "
            f"data={names.get(wanted.__name__, wanted.__name__)}"
        )


def _check_batches(cfg: Mapping[str, Any]) -> Iterator[str]:
    """Whether a rollout can be cut into the chunks and minibatches that were asked for."""
    algorithm = cfg["algorithm"]
    length, num_envs = cfg["data"].get("rollout_length"), cfg["env"].get("num_envs")
    chunk = algorithm.get("chunk_length") if algorithm.get("recurrent") is True else 1
    minibatches = algorithm.get("num_minibatches")
    if any(type(number) is not int or number < 1 for number in (length, num_envs, chunk, minibatches)):
        return  # reported as such
    if length % chunk:
        yield f"algorithm.chunk_length={chunk}: must divide data.rollout_length={length}"
    sequences = num_envs * length // chunk
    if minibatches > sequences:
        what = "env steps" if chunk == 1 else f"sequences of {chunk} env steps"
        yield (
            f"algorithm.num_minibatches={minibatches}: a rollout has only {sequences} {what} "
            f"(env.num_envs={num_envs} x data.rollout_length={length})"
        )


def _check_trainer(cfg: Mapping[str, Any]) -> Iterator[str]:
    trainer = cfg["trainer"]
    if trainer.get("gradient_clip_val") is not None or trainer.get("gradient_clip_algorithm") is not None:
        yield "trainer.gradient_clip_val: does not apply here, set algorithm.max_grad_norm instead"
    if trainer.get("accumulate_grad_batches", 1) != 1:
        yield "trainer.accumulate_grad_batches: does not apply here, set algorithm.num_minibatches instead"
    accelerator = trainer.get("accelerator", "auto")
    available = available_devices(accelerator)
    if available is None:
        return
    if available == 0:
        yield f"trainer.accelerator={accelerator}: this machine has no such device, use trainer.accelerator=cpu"
        return
    devices = trainer.get("devices", "auto")
    wanted = num_devices(devices, available)
    if wanted is not None and wanted < 1:
        yield f"trainer.devices={devices}: must be at least 1"
    elif wanted is not None and max(wanted, *_indices(devices), 0) > available:
        what = "CPU cores" if accelerator == "cpu" else f"devices for trainer.accelerator={accelerator}"
        yield f"trainer.devices={devices}: this machine has only {available} {what}"
    if trainer.get("num_nodes", 1) < 1:
        yield f"trainer.num_nodes={trainer['num_nodes']}: must be at least 1"


def _indices(devices: Any) -> list[int]:
    """Returns how many devices there must be for each of a list of indices to exist."""
    return [index + 1 for index in devices] if isinstance(devices, list) else []


def available_devices(accelerator: str) -> int | None:
    """Returns how many devices a Trainer can use here; ``None`` if that is not known."""
    gpus = torch.cuda.device_count()
    match accelerator:
        case "cpu":
            return os.cpu_count()
        case "auto":
            return gpus or os.cpu_count()
        case "gpu" | "cuda":
            return gpus
    return None


def num_devices(devices: Any, available: int) -> int | None:
    """Returns how many devices ``trainer.devices`` asks for; ``None`` if only Lightning understands it."""
    if isinstance(devices, list):
        return len(devices)
    if isinstance(devices, str) and devices.isdigit():
        return int(devices)
    if devices in (-1, "-1"):
        return available
    if devices == "auto":
        return torch.cuda.device_count() or 1
    return devices if isinstance(devices, int) else None


def _check_folder(cfg: Mapping[str, Any]) -> list[str]:
    return folder_problems(cfg["paths"]["output_dir"])


def folder_problems(folder: str | Path) -> list[str]:
    """Returns why a run folder cannot be made or written to, looking only at what exists."""
    folder = Path(folder).absolute()
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    if not existing.is_dir():
        return [f"run folder {folder}: {existing} is a file, set hydra.run.dir"]
    if not os.access(existing, os.W_OK | os.X_OK):
        return [f"run folder {folder}: {existing} is not writable, set hydra.run.dir"]
    return []


def _check_checkpoint(cfg: Mapping[str, Any]) -> list[str]:
    """Whether there is a checkpoint to resume from."""
    if cfg.get("ckpt_path") is None:
        return []
    try:
        load_checkpoint(cfg["ckpt_path"])
    except (OSError, ValueError, ImportError) as error:
        return [f"ckpt_path: {error}"]
    return []


def _check_resume(cfg: Mapping[str, Any]) -> list[str]:
    """Whether the checkpoint belongs to this algorithm, environment and network. Needs all else to be right."""
    if cfg["ckpt_path"] is None:
        return []
    saved, recipe = load_checkpoint(cfg["ckpt_path"])
    with build_env({**cfg["env"], "num_envs": 1}, seed=0) as env:
        module = build(cfg["algorithm"], spec=env.spec)
    problem = f"ckpt_path={cfg['ckpt_path']}: was written by a training"
    if type(saved) is not type(module):
        return [f"{problem} with {type(saved).__name__}, but algorithm is {type(module).__name__}"]
    if recipe is not None and recipe["name"] != env.spec.name:
        return [f"{problem} in {recipe['name']}, but env is {env.spec.name}"]
    if _shapes(saved) != _shapes(module):
        return [f"{problem} with networks of other shapes, see the config.yaml beside it for its settings"]
    return []


def _check_callbacks(cfg: Mapping[str, Any]) -> Iterator[str]:
    """Whether callbacks that can tell fit the environment and the algorithm. Needs all else to be right."""
    for name, node in (cfg.get("callbacks") or {}).items():
        if node is None or not hasattr(_split(node)[0], "check"):
            continue
        with build_env({**cfg["env"], "num_envs": 1}, seed=0) as env:
            try:
                build(node).check(build(cfg["algorithm"], spec=env.spec), env)
            except (ValueError, TypeError) as error:
                yield f"callbacks.{name}: {error}"


def _shapes(module: torch.nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in module.state_dict().items()}
