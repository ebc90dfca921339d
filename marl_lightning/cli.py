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
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from marl_lightning.runtime import bound_spinning, versions

bound_spinning()  # counts when torch is loaded, so it comes before all that imports it

import hydra
import torch
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from pydantic import Field

from marl_lightning.algorithms import MARLModule
from marl_lightning.callbacks.nash_conv import PolicyName, choose_policy
from marl_lightning.configuration import ConfigurationError, config_dir, folder_problems, validate
from marl_lightning.envs import make_vector_env
from marl_lightning.evaluation import evaluate_checkpoint, load_checkpoint
from marl_lightning.games.cross_play import cross_play, load_players
from marl_lightning.games.evaluate import Evaluator, EvaluatorName, nash_conv
from marl_lightning.games.learned import LearnedEvaluator
from marl_lightning.games.profiles import Mode
from marl_lightning.plotting import plot_gains, plot_heat_map
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


def cross_play_command() -> None:
    """Runs ``scripts/cross_play.py``."""
    _run("cross_play", _cross_play)


def nash_conv_command() -> None:
    """Runs ``scripts/nash_conv.py``."""
    _run("nash_conv", _nash_conv)


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
    """Returns the settings that have a value, lists as lists; ``checkpoint`` has none by default."""
    return {key: value for key, value in OmegaConf.to_container(cfg).items() if not OmegaConf.is_missing(cfg, key)}


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
    return _run_folder(settings.checkpoint) if settings.output is None else Path(settings.output)


def _run_folder(checkpoint: str) -> Path:
    """Returns the folder of the run that wrote a checkpoint."""
    folder = Path(checkpoint).parent
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
        elif config_name == "cross_play":
            check_cross_play(cfg)
        elif config_name == "nash_conv":
            check_nash_conv(cfg)
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


# Cross-play -----------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class CrossPlaySettings:
    """The root of ``configs/cross_play.yaml``.

    Args:
        checkpoints: ``.ckpt`` files of trainings in the same environment, at least two.
        episodes: see :func:`~marl_lightning.games.cross_play.cross_play`, as the following.
        num_envs: instances that are stepped together.
        deterministic: take the mode of the policies' distributions instead of samples.
        symmetric: mean over both sides of a game of two.
        seed: of the environment and of the policies' samples.
        device: where the policies act.
        output_dir: folder for the results.
    """

    checkpoints: Sequence[str]
    episodes: Annotated[int, Field(ge=2)] = 200
    num_envs: PositiveInt = 32
    deterministic: bool = False
    symmetric: bool = False
    seed: NonNegativeInt = 0
    device: str = "cpu"
    output_dir: str = "cross_play"


def check_cross_play(cfg: DictConfig) -> None:
    """Checks the settings of cross-play, before anything is written.

    Raises:
        ConfigurationError: listing all problems.
    """
    given = _given(cfg)
    problems = find_problems(CrossPlaySettings, given)
    if not problems:
        settings = CrossPlaySettings(**given)
        problems = folder_problems(settings.output_dir) + _device_problems(settings.device)
        try:
            load_players(settings.checkpoints)
        except (OSError, ValueError, ImportError) as error:
            problems.append(f"checkpoints: {error}")
    if problems:
        raise ConfigurationError(problems)


def _cross_play(cfg: DictConfig) -> None:
    check_cross_play(cfg)
    settings = CrossPlaySettings(**_given(cfg))
    players, recipe = load_players(settings.checkpoints, device=settings.device)
    num_envs = min(settings.num_envs, settings.episodes)
    with make_vector_env(recipe["name"], num_envs=num_envs, seed=settings.seed, **recipe["kwargs"]) as env:
        result = cross_play(
            players,
            env,
            episodes=settings.episodes,
            seed=settings.seed,
            deterministic=settings.deterministic,
            symmetric=settings.symmetric,
        )
    folder = Path(settings.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    result.write_csv(folder / "cross_play.csv")
    report = {**asdict(settings), "env": recipe, **result.as_dict(), "versions": versions()}
    (folder / "cross_play.json").write_text(json.dumps(report, indent=2) + "\n")
    print(f"mean return of the row, who plays {' or '.join(result.seats)}, in {recipe['name']}")
    print(result.table())
    try:
        plot_heat_map(result.returns.tolist(), result.names, folder / "cross_play.png", title=recipe["name"])
    except ImportError as error:
        print(f"there is no picture: {error}")
    print(f"results in {folder}", flush=True)


# NashConv -------------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class NashConvSettings:
    """The root of ``configs/nash_conv.yaml``.

    Args:
        checkpoint: a ``.ckpt`` file of a training.
        evaluator: see :func:`~marl_lightning.games.nash_conv`, as the following.
        mode: evaluate the policy as it mixes (``"stochastic"``), or as it acts if it always takes the action that it
            prefers (``"greedy"``), which is no equilibrium of a game that has none in pure strategies.
        policy: see :class:`~marl_lightning.callbacks.NashConvCallback`.
        agents: whose responses are learned; ``None`` are all.
        seed: of the search for responses.
        device: where the policy acts.
        output_dir: folder for the results, ``None`` is the run folder of the checkpoint.
        learned: settings of :class:`~marl_lightning.games.learned.LearnedEvaluator`; those of ``None`` are left out.
    """

    checkpoint: str
    evaluator: EvaluatorName = "auto"
    mode: Mode = "stochastic"
    policy: PolicyName = "current"
    agents: list[str] | None = None
    seed: NonNegativeInt = 0
    device: str = "cpu"
    output_dir: str | None = None
    learned: dict[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Where the results are written."""
        return _run_folder(self.checkpoint) if self.output_dir is None else Path(self.output_dir)

    @property
    def is_learned(self) -> bool:
        """Whether responses are learned."""
        return self.evaluator.partition(":")[0] == "learned"

    @property
    def search(self) -> dict[str, Any]:
        """Settings of the search that were given."""
        given = {name: value for name, value in self.learned.items() if value is not None}
        return given if self.agents is None else given | {"agents": self.agents}


def check_nash_conv(cfg: DictConfig) -> None:
    """Checks the settings of NashConv, before anything is written.

    Raises:
        ConfigurationError: listing all problems.
    """
    given = _given(cfg)
    problems = find_problems(NashConvSettings, given)
    if not problems:
        settings = NashConvSettings(**given)
        problems = _search_problems(settings) + folder_problems(settings.folder) + _device_problems(settings.device)
        try:
            module, _ = load_checkpoint(settings.checkpoint)
            problems += _policy_problems(module, settings)
        except (OSError, ValueError, ImportError) as error:
            problems.append(f"checkpoint: {error}")
    if problems:
        raise ConfigurationError(problems)


def _search_problems(settings: NashConvSettings) -> list[str]:
    if not settings.is_learned:
        names = [name if name == "agents" else f"learned.{name}" for name in settings.search]
        return [f"{name}: has a meaning only with evaluator=learned" for name in names]
    problems = find_problems(LearnedEvaluator, settings.search, prefix="learned", filled_in=_FROM_OTHER_SETTINGS)
    if not problems:
        try:
            _evaluator(settings)
        except ValueError as error:  # arguments that do not go together
            problems = [f"learned: {error}"]
    return problems


_FROM_OTHER_SETTINGS = ("preset", "seed", "progress")


def _policy_problems(module: MARLModule, settings: NashConvSettings) -> list[str]:
    try:
        policy = choose_policy(module, settings.policy)
    except ValueError as error:
        return [f"policy: {error}"]
    if settings.mode == "stochastic" and hasattr(policy, "schedule"):
        other = " or policy=average" if hasattr(module, "average_policy") else ""
        return [
            f"mode: the checkpoint does not say how much {type(module).__name__} explored, set mode=greedy{other}",
        ]
    return []


def _evaluator(settings: NashConvSettings) -> EvaluatorName | Evaluator:
    """Returns what is to evaluate."""
    if not settings.is_learned:
        return settings.evaluator
    preset = settings.evaluator.partition(":")[2]
    arguments = settings.search | ({"preset": preset} if preset else {})
    return LearnedEvaluator(**arguments, seed=settings.seed, progress=True)


def _nash_conv(cfg: DictConfig) -> None:
    check_nash_conv(cfg)
    settings = NashConvSettings(**_given(cfg))
    _, recipe = load_checkpoint(settings.checkpoint)
    with make_vector_env(recipe["name"], num_envs=1, seed=settings.seed, **recipe["kwargs"]) as env:
        module, _ = load_checkpoint(settings.checkpoint, env=env, device=settings.device)
        policy = choose_policy(module, settings.policy)
        try:
            result = nash_conv(policy, env, _evaluator(settings), mode=settings.mode)
        except (ValueError, TypeError) as error:  # the game or the policy allows no such evaluation
            raise ConfigurationError([f"evaluator={settings.evaluator}: {error}"]) from error
    folder = settings.folder
    folder.mkdir(parents=True, exist_ok=True)
    report = {**asdict(settings), "env": recipe, **result.as_dict(), "versions": versions()}
    (folder / "nash_conv.json").write_text(json.dumps(report, indent=2) + "\n")
    print(f"{recipe['name']}, {settings.policy} policy, {settings.mode}")
    print(result.table())
    try:
        plot_gains(result, folder / "nash_conv.png", title=recipe["name"])
    except ImportError as error:
        print(f"there is no picture: {error}")
    print(f"results in {folder}", flush=True)
