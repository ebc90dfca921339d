"""The command line: Hydra around :func:`marl_lightning.train` and :func:`marl_lightning.evaluate_checkpoint`.

Mistakes of the user end with one message and exit code 2, and leave nothing behind; errors of the program keep their
traceback.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from marl_lightning.runtime import bound_spinning, versions

bound_spinning()  # counts when torch is loaded, so it comes before all that imports it

import hydra
import torch
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from marl_lightning.configuration import ConfigurationError, config_dir, folder_problems, validate
from marl_lightning.evaluation import evaluate_checkpoint, load_checkpoint
from marl_lightning.training import train
from marl_lightning.validation import NonNegativeInt, PositiveInt, find_problems, nearest

USER_MISTAKE = 2
"""Exit code after a message about what to change."""

_OPTIONAL_GROUPS = ("experiment", "debug")
_MULTIRUN = ("-m", "--multirun")
_START = "MARL_LIGHTNING_START"


def train_command() -> None:
    """Runs ``scripts/train.py``."""
    _run("train", _train)


def evaluate_command() -> None:
    """Runs ``scripts/evaluate.py``."""
    _run("evaluate", _evaluate)


def normalise(arguments: Sequence[str]) -> list[str]:
    """Makes command line arguments independent of what Hydra is particular about.

    ``-m`` comes first, because Hydra does not find it between overrides and Lightning appends overrides for the
    processes that it starts. Groups that have no default, such as ``experiment=``, get the ``+`` that Hydra wants.
    """
    flags = [argument for argument in arguments if argument in _MULTIRUN]
    rest = [argument for argument in arguments if argument not in _MULTIRUN]
    return flags[:1] + [f"+{each}" if each.partition("=")[0] in _OPTIONAL_GROUPS else each for each in rest]


class CheckBeforeWriting(Callback):
    """Hydra callback that checks a training configuration before Hydra makes the run folder."""

    def on_run_start(self, config: DictConfig, **_: object) -> None:
        """Ends the process with a message if a single run cannot work."""
        try:
            validate(_without_hydra(config, output_dir=config.hydra.run.dir))
        except ConfigurationError as error:
            # Hydra turns exceptions of callbacks into warnings, SystemExit passes.
            raise SystemExit(_report(error.problems)) from None

    def on_multirun_start(self, config: DictConfig, **_: object) -> None:
        """Ends the process with a message if the folder of a sweep cannot be made. Its jobs are checked one by one."""
        problems = folder_problems(config.hydra.sweep.dir)
        if problems:
            raise SystemExit(_report(problems))


def _run(config_name: str, task: Callable[[DictConfig], None]) -> None:
    """Runs a task under Hydra with the arguments of this process."""
    # The plan of a run says what is simulated; environments would repeat it for each evaluation.
    logging.getLogger("marl_lightning.envs").setLevel(logging.WARNING)
    # Processes that Lightning starts read the command line again, and the environment: both must lead them to the
    # same choices and the same folder, also in sweeps.
    sys.argv = [sys.argv[0], *normalise(sys.argv[1:])]
    if "LOCAL_RANK" not in os.environ:
        os.environ[_START] = datetime.now().strftime("%Y-%m-%d/%H-%M-%S-%f")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # raise errors as they are; they are reported here

    started = False

    def reported(cfg: DictConfig) -> None:
        nonlocal started
        started = True
        try:
            task(cfg)
        except ConfigurationError as error:
            sys.exit(_report(error.problems))
        except FloatingPointError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(1)

    try:
        hydra.main(version_base="1.3", config_path=str(config_dir()), config_name=config_name)(reported)()
    except (HydraException, OmegaConfBaseException) as error:
        if started:  # an error of the program, not of the command line
            raise
        sys.exit(_report(_explain(error, config_name, config_dir())))


def _train(cfg: DictConfig) -> None:
    try:
        train(cfg)
    except ConfigurationError:
        with contextlib.suppress(OSError):  # made by Hydra for this job; stays if it holds anything
            Path(cfg.paths.output_dir).rmdir()
        raise


@dataclass(kw_only=True)
class EvaluationSettings:
    """The root of ``configs/evaluate.yaml``.

    Args:
        checkpoint: a ``.ckpt`` file of a training.
        episodes: see :func:`~marl_lightning.evaluation.evaluate_checkpoint`, as the following.
        num_envs: instances that are stepped together.
        deterministic: take the mode of the policy's distribution instead of samples.
        seed: of the environment and of the policy's samples.
        device: where the policy acts.
        video: whether to write the best episode as ``evaluation.mp4``.
        output: folder for the results, ``None`` is the run folder of the checkpoint.
    """

    checkpoint: str
    episodes: PositiveInt = 100
    num_envs: PositiveInt = 32
    deterministic: bool = True
    seed: NonNegativeInt = 0
    device: str = "cpu"
    video: bool = False
    output: str | None = None


def check_evaluation(cfg: DictConfig) -> None:
    """Checks an evaluation, before anything is written.

    Raises:
        ConfigurationError: listing all problems.
    """
    given = _given(cfg)
    problems = find_problems(EvaluationSettings, given)
    if not problems:
        settings = EvaluationSettings(**given)
        problems = folder_problems(_result_folder(settings)) + _device_problems(settings.device)
        try:
            load_checkpoint(settings.checkpoint)
        except (OSError, ValueError, ImportError) as error:
            problems.append(f"checkpoint: {error}")
    if problems:
        raise ConfigurationError(problems)


def _device_problems(device: str) -> list[str]:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # no such device, or torch was built without it
        return [f"device={device}: cannot be used here ({_one_line(error)})"]
    return []


def _given(cfg: DictConfig) -> dict[str, Any]:
    """Returns the settings that have a value; ``checkpoint`` has none by default."""
    return {key: cfg[key] for key in cfg if not OmegaConf.is_missing(cfg, key)}


def _evaluate(cfg: DictConfig) -> None:
    check_evaluation(cfg)
    settings = EvaluationSettings(**_given(cfg))
    folder = _result_folder(settings)
    _, recipe = load_checkpoint(settings.checkpoint)
    try:
        result = evaluate_checkpoint(
            settings.checkpoint,
            episodes=settings.episodes,
            num_envs=settings.num_envs,
            deterministic=settings.deterministic,
            seed=settings.seed,
            device=settings.device,
            video=folder / "evaluation.mp4" if settings.video else None,
        )
    except NotImplementedError as error:  # not every game has pictures
        raise ConfigurationError([f"video: {error}"]) from error
    folder.mkdir(parents=True, exist_ok=True)
    report = {**asdict(settings), "env": recipe, **result.metrics(), "versions": versions()}
    (folder / "evaluation.json").write_text(json.dumps(report, indent=2) + "\n")
    print(_table({"env": recipe["name"], "episodes": settings.episodes, **result.metrics("")}))
    print(f"results in {folder}", flush=True)


def _result_folder(settings: EvaluationSettings) -> Path:
    if settings.output is not None:
        return Path(settings.output)
    folder = Path(settings.checkpoint).parent
    return folder.parent if folder.name == "checkpoints" else folder


def _table(rows: Mapping[str, Any]) -> str:
    width = max(len(name) for name in rows)
    return "\n".join(f"{name:<{width}}  {f'{v:.4g}' if isinstance(v, float) else v}" for name, v in rows.items())


def _report(problems: Sequence[str]) -> int:
    """Prints what to change and returns the exit code."""
    if len(problems) == 1:
        print(f"error: {problems[0]}", file=sys.stderr)
    else:
        lines = "".join(f"\n  {problem}" for problem in problems)
        print(f"error: {len(problems)} settings have to be changed:{lines}", file=sys.stderr)
    return USER_MISTAKE


def _explain(error: Exception, config_name: str, folder: Path) -> list[str]:
    """Returns what is wrong with overrides that could not be composed."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        known = ", ".join(sorted(error.options))
        return [f"{group}={choice}: there is no such choice{nearest(choice, error.options)} Known: {known}"]
    return _unknown_settings(config_name, folder) or [_one_line(error)]


def _unknown_settings(config_name: str, folder: Path) -> list[str]:
    """Forces unknown settings into the configuration, so that its check finds them among all other problems."""
    overrides = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    if len(overrides) < len(sys.argv) - 1:  # flags, which change what is composed
        return []
    try:
        with hydra.initialize_config_dir(str(folder), version_base="1.3"):
            cfg = _compose_forced(config_name, overrides)
        if config_name == "train":
            validate(_without_hydra(cfg, output_dir="."))
        else:
            check_evaluation(cfg)
    except ConfigurationError as error:
        return error.problems
    except (HydraException, OmegaConfBaseException):  # there is more to it
        return []
    return []


def _compose_forced(config_name: str, overrides: list[str]) -> DictConfig:
    try:
        return hydra.compose(config_name, overrides=overrides)
    except ConfigCompositionException as error:
        unknown = re.search(r"Could not override '([\w.]+)'", str(error))
        forced = [f"++{o}" if unknown and o.partition("=")[0] == unknown[1] else o for o in overrides]
        if forced == overrides:
            raise
    return _compose_forced(config_name, forced)


def _without_hydra(config: DictConfig, *, output_dir: str) -> DictConfig:
    """Returns the part of a composed configuration that is ours, with the run folder filled in."""
    cfg = config.copy()
    with open_dict(cfg):
        cfg.pop("hydra", None)
        cfg.paths.output_dir = output_dir
    return cfg


def _one_line(error: BaseException) -> str:
    """Returns the message of an error and of its cause, without line breaks."""
    parts = [error.override] if isinstance(error, OverrideParseException) else []
    parts += [error] if error.__cause__ is None else [error, error.__cause__]
    return ": ".join(" ".join(str(part).split()) for part in parts)
