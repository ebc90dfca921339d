"""The flat configurations of :func:`marl_lightning.make_train`: what can be set, and what is wrong with a given one."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from marl_lightning.configuration import ConfigurationError
from marl_lightning.validation import nearest

_REQUIRED = object()


class Number:
    """A real number, or a whole one.

    Args:
        low: the smallest that is allowed, or a limit that is not if ``above``.
        high: the largest; ``None`` for any.
        example: proposed where nothing is near what was given.
        whole: ``3.0`` is not allowed.
        above: ``low`` is not allowed itself.
    """

    def __init__(
        self, *, low: float, high: float | None = None, example: float, whole: bool = False, above: bool = False
    ):
        self.low, self.high, self.example, self.whole, self.above = low, high, example, whole, above

    def read(self, value: Any) -> Any:
        """Returns the value as an int or float; ``ValueError`` says what it must be instead."""
        kind = numbers.Integral if self.whole else numbers.Real
        if isinstance(value, kind) and not isinstance(value, bool) and self._is_within(value):
            return int(value) if self.whole else float(value)
        raise ValueError(f"must be {self}, such as {self._near(value)}")

    def _is_within(self, value: float) -> bool:
        within = value > self.low if self.above else value >= self.low
        return within and math.isfinite(value) and (self.high is None or value <= self.high)

    def _near(self, value: Any) -> float:
        try:
            number = float(value)
        except (TypeError, ValueError):
            return self.example
        if not math.isfinite(number) or (self.above and number <= self.low):
            return self.example
        number = min(max(number, self.low), math.inf if self.high is None else self.high)
        return round(number) if self.whole else number

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        if self.high is None:
            return f"{kind} above {self.low}" if self.above else f"{kind} of at least {self.low}"
        return f"{kind} {f'above {self.low} and up' if self.above else f'from {self.low}'} to {self.high}"


def _count(example: int, *, low: int = 1) -> Number:
    return Number(low=low, example=example, whole=True)


def _fraction(example: float) -> Number:
    return Number(low=0, high=1, example=example)


def _positive(example: float) -> Number:
    return Number(low=0, above=True, example=example)


class Choice:
    """One of several values."""

    def __init__(self, *choices: Any):
        self.choices, self.example = choices, choices[0]

    def read(self, value: Any) -> Any:
        """Returns the value; ``ValueError`` says what it must be instead."""
        if any(type(value) is type(choice) and value == choice for choice in self.choices):
            return value
        hint = nearest(value, [c for c in self.choices if isinstance(c, str)]) if isinstance(value, str) else ""
        raise ValueError(f"must be {' or '.join(map(repr, self.choices))}, such as {self.example!r}{hint}")


@dataclass(frozen=True)
class Setting:
    """A name of the configuration.

    Attributes:
        values: what is allowed.
        default: ``None`` is then allowed too, if it is ``None``; a setting without one has to be given.
        optional: whether ``None`` is allowed although the default is something else.
    """

    values: Number | Choice
    default: Any = _REQUIRED
    optional: bool = False

    def read(self, value: Any) -> Any:
        """Returns the value to use; ``ValueError`` says what it must be instead."""
        if value is None and (self.optional or self.default is None):
            return None
        return self.values.read(value)


_COMMON = {
    "NUM_ENVS": Setting(_count(8)),
    "NUM_STEPS": Setting(_count(32)),
    "TOTAL_TIMESTEPS": Setting(_count(100_000)),
    "LR": Setting(_positive(5e-4)),
    "GAMMA": Setting(_fraction(0.99)),
    "NETWORK_KIND": Setting(Choice("rnn", "mlp"), "rnn"),
    "HIDDEN_SIZE": Setting(_count(64), 64),
}

IQL_SETTINGS: Mapping[str, Setting] = _COMMON | {
    "ALGORITHM": Setting(Choice("iql", "pr2_iql"), "iql"),
    "BUFFER_SIZE": Setting(_count(50_000)),
    "BUFFER_BATCH_SIZE": Setting(_count(32)),
    "LEARNING_STARTS": Setting(_count(1000, low=0)),
    "NUM_EPOCHS": Setting(_count(4)),
    "EPS_START": Setting(_fraction(1.0)),
    "EPS_FINISH": Setting(_fraction(0.05)),
    "EPS_DECAY": Setting(_fraction(0.5)),
    "TARGET_UPDATE_INTERVAL": Setting(_count(10), 10),
    "TAU": Setting(Number(low=0, high=1, above=True, example=1.0), 1.0),
    "REPLAY_SEQUENCE_LENGTH": Setting(_count(32), None),
    "BURN_IN_STEPS": Setting(_count(16, low=0), None),
    "MAX_GRAD_NORM": Setting(_positive(10.0), 10.0, optional=True),
    "HUBER_DELTA": Setting(_positive(1.0), 1.0, optional=True),
    "OPPONENT_MODE": Setting(Choice("greedy", "softmax", "epsilon"), "greedy"),
    "OPPONENT_RATE": Setting(Number(low=0, example=0.1), None),
    "TEST_DURING_TRAINING": Setting(Choice(False), False),
}

PR2_IQL_SETTINGS: Mapping[str, Setting] = IQL_SETTINGS | {
    "RESPONSE_MODEL": Setting(Choice("soft", "learned", "marginal"), "soft"),
    "OPPONENTS": Setting(Choice("joint", "pairwise", "sampled"), "joint"),
    "AGGREGATE": Setting(Choice("lme", "lse", "expectation"), "lme"),
    "TEMPERATURE": Setting(_positive(1.0), 1.0),
    "MAX_JOINT": Setting(_count(1024), 1024),
    "NUM_SAMPLES": Setting(_count(16), 16),
    "MASK_UNSEEN": Setting(Choice(False, True), False),
}

IPPO_SETTINGS: Mapping[str, Setting] = _COMMON | {
    "ALGORITHM": Setting(Choice("ippo")),
    "UPDATE_EPOCHS": Setting(_count(4)),
    "NUM_MINIBATCHES": Setting(_count(4)),
    "GAE_LAMBDA": Setting(_fraction(0.95), 0.95),
    "CLIP_EPS": Setting(_positive(0.2), 0.2),
    "ENT_COEF": Setting(Number(low=0, example=0.01), 0.01),
    "VF_COEF": Setting(Number(low=0, example=0.5), 0.5),
    "MAX_GRAD_NORM": Setting(_positive(0.5), 0.5, optional=True),
    "ANNEAL_LR": Setting(Choice(True, False), False),
}

_SETTINGS = {"iql": IQL_SETTINGS, "pr2_iql": PR2_IQL_SETTINGS, "ippo": IPPO_SETTINGS}


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """What all algorithms are told; names are those of the configuration in lower case."""

    algorithm: str
    num_envs: int
    num_steps: int
    total_timesteps: int
    lr: float
    gamma: float
    network_kind: Literal["rnn", "mlp"]
    hidden_size: int
    max_grad_norm: float | None

    @property
    def env_steps_per_update(self) -> int:
        """Env steps of one env update, ``NUM_ENVS * NUM_STEPS``."""
        return self.num_envs * self.num_steps

    @property
    def num_updates(self) -> int:
        """Env updates of the training."""
        return self.total_timesteps // self.env_steps_per_update

    @property
    def hidden_sizes(self) -> tuple[int, ...]:
        """Widths of the layers: one in front of a GRU, or two."""
        return (self.hidden_size,) * (1 if self.network_kind == "rnn" else 2)


@dataclass(frozen=True, kw_only=True)
class IQLConfig(TrainerConfig):
    """What :func:`validate_iql_config` returns.

    Attributes:
        episode_limit: most env steps of an episode, where the environment tells it; shortens the default of
            ``learning_length``.
    """

    buffer_size: int
    buffer_batch_size: int
    learning_starts: int
    num_epochs: int
    eps_start: float
    eps_finish: float
    eps_decay: float
    target_update_interval: int
    tau: float
    replay_sequence_length: int | None
    burn_in_steps: int | None
    huber_delta: float | None
    opponent_mode: Literal["greedy", "softmax", "epsilon"]
    opponent_rate: float | None
    test_during_training: bool
    episode_limit: int | None = None

    @property
    def learning_length(self) -> int:
        """Steps of a sequence whose loss counts; by default those of a rollout, but no more than an episode has."""
        if self.replay_sequence_length is not None:
            return self.replay_sequence_length
        return self.num_steps if self.episode_limit is None else min(self.num_steps, self.episode_limit)

    @property
    def burn_in(self) -> int:
        """Steps before them that rebuild the recurrent state; by default at most 16, and none without memory."""
        if self.burn_in_steps is not None:
            return self.burn_in_steps
        return 0 if self.network_kind == "mlp" else min(16, self.learning_length)

    @property
    def window(self) -> int:
        """Steps of a whole sequence."""
        return self.learning_length + self.burn_in

    @property
    def eps_decay_env_steps(self) -> int:
        """Env steps over which epsilon falls."""
        return round(self.eps_decay * self.total_timesteps)


@dataclass(frozen=True, kw_only=True)
class PR2IQLConfig(IQLConfig):
    """What :func:`validate_iql_config` returns with ``ALGORITHM="pr2_iql"``."""

    response_model: Literal["soft", "learned", "marginal"]
    opponents: Literal["joint", "pairwise", "sampled"]
    aggregate: Literal["lme", "lse", "expectation"]
    temperature: float
    max_joint: int
    num_samples: int
    mask_unseen: bool


@dataclass(frozen=True, kw_only=True)
class IPPOConfig(TrainerConfig):
    """What :func:`validate_ippo_config` returns."""

    update_epochs: int
    num_minibatches: int
    gae_lambda: float
    clip_eps: float
    ent_coef: float
    vf_coef: float
    anneal_lr: bool


def validate_config(config: Mapping[str, Any]) -> IQLConfig | IPPOConfig:
    """Checks a configuration of the algorithm that it names, ``"iql"`` if none.

    Raises:
        ConfigurationError: one line for everything that is wrong, with a value that would do.
    """
    config = dict(config)
    algorithm = config.get("ALGORITHM", "iql")
    if algorithm not in _SETTINGS:
        hint = nearest(algorithm, _SETTINGS) if isinstance(algorithm, str) else ""
        known = " or ".join(map(repr, _SETTINGS))
        raise ConfigurationError([f"config.ALGORITHM={algorithm!r}: must be {known}, such as 'iql'{hint}"])
    return (validate_ippo_config if algorithm == "ippo" else validate_iql_config)(config)


def validate_iql_config(config: Mapping[str, Any]) -> IQLConfig:
    """Checks a configuration of IQL or PR2-IQL.

    ==========================  ========================================================================================
    name                        meaning
    ==========================  ========================================================================================
    ``NUM_ENVS``                instances of the environment
    ``NUM_STEPS``               steps that each makes before the networks are updated
    ``TOTAL_TIMESTEPS``         env steps of the training, a multiple of ``NUM_ENVS * NUM_STEPS``
    ``BUFFER_SIZE``             env steps that are kept, exactly
    ``BUFFER_BATCH_SIZE``       sequences that an update draws
    ``LEARNING_STARTS``         env steps before the first update
    ``NUM_EPOCHS``              updates after each rollout
    ``LR``, ``GAMMA``           learning rate of Adam; discount
    ``EPS_START``               probability of a random action at the beginning
    ``EPS_FINISH``              the same at the end, not above ``EPS_START``
    ``EPS_DECAY``               part of the training over which it falls
    ``TAU``                     1 copies the online to the target networks; less moves them so far in every update
    ``TARGET_UPDATE_INTERVAL``  rollouts between copies, by default 10
    ``NETWORK_KIND``            ``"rnn"``, the default, has a GRU; or ``"mlp"``
    ``HIDDEN_SIZE``             width of the layers, by default 64
    ``REPLAY_SEQUENCE_LENGTH``  steps of a sequence whose loss counts, by default ``NUM_STEPS``, or less where episodes
                                are known to be shorter
    ``BURN_IN_STEPS``           steps before them that rebuild the recurrent state, by default at most 16; 0 without GRU
    ``MAX_GRAD_NORM``           limit of the norm of an agent's gradient, by default 10; ``None`` does not clip
    ``HUBER_DELTA``             error above which the loss is linear, by default 1; ``None`` squares all errors
    ``OPPONENT_MODE``           how agents that do not learn act: ``"greedy"``, ``"softmax"`` or ``"epsilon"``
    ``OPPONENT_RATE``           temperature of the softmax, or probability of a random action
    ``TEST_DURING_TRAINING``    ``False``, as there are no evaluations
    ``ALGORITHM``               ``"iql"``, the default, or ``"pr2_iql"``
    ==========================  ========================================================================================

    PR2-IQL has more of them, which mean and default to the same as the arguments of
    :class:`~marl_lightning.algorithms.pr2_iql.PR2IQL`.

    ==================  ================================================================================================
    name                meaning
    ==================  ================================================================================================
    ``RESPONSE_MODEL``  how the others are thought to respond: ``"soft"``, ``"learned"`` or ``"marginal"``
    ``OPPONENTS``       how the actions of several others are put together: ``"joint"``, ``"pairwise"`` or ``"sampled"``
    ``AGGREGATE``       of soft responses: ``"lme"``, ``"lse"`` or ``"expectation"``
    ``TEMPERATURE``     of soft responses, in units of the values, by default 1
    ``MAX_JOINT``       most joint actions of the others with ``OPPONENTS="joint"``, by default 1024
    ``NUM_SAMPLES``     joint actions that ``OPPONENTS="sampled"`` draws, by default 16
    ``MASK_UNSEEN``     leave out what the others have not done yet, by default ``False``
    ==================  ================================================================================================

    Args:
        config: a dictionary, or what Hydra makes of a file.

    Returns:
        The normalised configuration, a :class:`PR2IQLConfig` for PR2-IQL.

    Raises:
        ConfigurationError: one line for everything that is wrong, with a value that would do.
    """
    is_pr2 = dict(config).get("ALGORITHM") == "pr2_iql"
    values, problems = _read(config, PR2_IQL_SETTINGS if is_pr2 else IQL_SETTINGS)
    problems += _total_problems(values)
    if _known(values, "NETWORK_KIND", "BURN_IN_STEPS") and values["NETWORK_KIND"] == "mlp" and values["BURN_IN_STEPS"]:
        problems.append(
            f"config.BURN_IN_STEPS={values['BURN_IN_STEPS']}: NETWORK_KIND='mlp' has no memory to rebuild, must be 0"
        )
    problems += _buffer_problems(values)
    if _known(values, "EPS_START", "EPS_FINISH") and values["EPS_FINISH"] > values["EPS_START"]:
        problems.append(
            f"config.EPS_FINISH={values['EPS_FINISH']}: must not be above EPS_START={values['EPS_START']}, such as "
            f"{min(0.05, values['EPS_START'])}"
        )
    if "TARGET_UPDATE_INTERVAL" in dict(config) and _known(values, "TAU", "TARGET_UPDATE_INTERVAL"):
        tau, interval = values["TAU"], values["TARGET_UPDATE_INTERVAL"]
        if tau < 1 and interval != 1:
            problems.append(
                f"config.TARGET_UPDATE_INTERVAL={interval}: TAU={tau} moves the targets in every update, must be 1 or "
                "left out"
            )
    problems += _opponent_problems(values) + _response_problems(values)
    return _made(PR2IQLConfig if is_pr2 else IQLConfig, values, problems)


def validate_ippo_config(config: Mapping[str, Any]) -> IPPOConfig:
    """Checks a configuration of IPPO.

    Besides those of :func:`validate_iql_config` for the rollouts, the network, ``LR``, ``GAMMA`` and ``MAX_GRAD_NORM``
    (here of all agents together, by default 0.5):

    ===================  ===============================================================================================
    name                 meaning
    ===================  ===============================================================================================
    ``UPDATE_EPOCHS``    passes over a rollout
    ``NUM_MINIBATCHES``  updates a pass: at most the steps of a rollout, with a GRU at most ``NUM_ENVS``
    ``GAE_LAMBDA``       trace decay of generalised advantage estimation, by default 0.95
    ``CLIP_EPS``         clipping of probability ratios and of changes of values, by default 0.2
    ``ENT_COEF``         weight of the entropy bonus, by default 0.01
    ``VF_COEF``          weight of the value loss, by default 0.5
    ``ANNEAL_LR``        whether the learning rate falls to 0
    ``ALGORITHM``        ``"ippo"``
    ===================  ===============================================================================================

    Raises:
        ConfigurationError: one line for everything that is wrong, with a value that would do.
    """
    values, problems = _read(config, IPPO_SETTINGS)
    problems += _total_problems(values)
    if _known(values, "NUM_ENVS", "NUM_STEPS", "NUM_MINIBATCHES", "NETWORK_KIND"):
        most = values["NUM_ENVS"] * (1 if values["NETWORK_KIND"] == "rnn" else values["NUM_STEPS"])
        if values["NUM_MINIBATCHES"] > most:
            problems.append(
                f"config.NUM_MINIBATCHES={values['NUM_MINIBATCHES']}: a rollout has {most} sequences, must be at most "
                f"that, such as {most}"
            )
    return _made(IPPOConfig, values, problems)


def _read(config: Mapping[str, Any], settings: Mapping[str, Setting]) -> tuple[dict[str, Any], list[str]]:
    """Returns the values of all names that are right, defaults included, and the problems of the others."""
    config, values, problems = dict(config), {}, []
    for name, setting in settings.items():
        if name not in config:
            if setting.default is _REQUIRED:
                problems.append(f"config.{name}: is required, such as {setting.values.example!r}")
            else:
                values[name] = setting.default
            continue
        try:
            values[name] = setting.read(config[name])
        except ValueError as error:
            problems.append(f"config.{name}={config[name]!r}: {error}")
    unknown: Iterable[Any] = (name for name in config if name not in settings)
    problems += [f"config.{name}: there is no such setting{_hint(name, settings)}" for name in unknown]
    return values, problems


def _hint(name: Any, settings: Mapping[str, Setting]) -> str:
    if algorithms := [algorithm for algorithm, own in _SETTINGS.items() if name in own]:
        return f", only with {' or '.join(f'ALGORITHM={algorithm!r}' for algorithm in algorithms)}"
    return nearest(str(name), settings)


def _known(values: Mapping[str, Any], *names: str) -> bool:
    return all(name in values for name in names)


def _total_problems(values: Mapping[str, Any]) -> list[str]:
    if not _known(values, "NUM_ENVS", "NUM_STEPS", "TOTAL_TIMESTEPS"):
        return []
    step, total = values["NUM_ENVS"] * values["NUM_STEPS"], values["TOTAL_TIMESTEPS"]
    if total % step == 0:
        return []
    return [
        f"config.TOTAL_TIMESTEPS={total}: must be a multiple of NUM_ENVS * NUM_STEPS = {step}, such as "
        f"{max(1, round(total / step)) * step}"
    ]


def _buffer_problems(values: Mapping[str, Any]) -> list[str]:
    names = ("NUM_ENVS", "NUM_STEPS", "BUFFER_SIZE", "REPLAY_SEQUENCE_LENGTH", "BURN_IN_STEPS", "NETWORK_KIND")
    if not _known(values, *names):
        return []
    length = values["REPLAY_SEQUENCE_LENGTH"] or values["NUM_STEPS"]
    burn_in = values["BURN_IN_STEPS"]
    if values["NETWORK_KIND"] == "mlp":
        burn_in = 0
    elif burn_in is None:
        burn_in = min(16, length)
    needed = values["NUM_ENVS"] * (length + burn_in)
    if values["BUFFER_SIZE"] >= needed:
        return []
    return [
        f"config.BUFFER_SIZE={values['BUFFER_SIZE']}: must hold a window of {length} + {burn_in} steps of each of the "
        f"{values['NUM_ENVS']} instances, such as {needed}"
    ]


def _opponent_problems(values: Mapping[str, Any]) -> list[str]:
    if not _known(values, "OPPONENT_MODE", "OPPONENT_RATE"):
        return []
    mode, rate = values["OPPONENT_MODE"], values["OPPONENT_RATE"]
    if mode == "greedy" and rate is not None:
        return [f"config.OPPONENT_RATE={rate}: OPPONENT_MODE='greedy' has none, must be None or left out"]
    if mode == "softmax" and not rate:
        return [f"config.OPPONENT_RATE={rate}: the temperature of OPPONENT_MODE='softmax' must be above 0, such as 0.1"]
    if mode == "epsilon" and (rate is None or rate > 1):
        return [
            f"config.OPPONENT_RATE={rate}: the probability of OPPONENT_MODE='epsilon' must be at most 1, such as 0.1"
        ]
    return []


def _response_problems(values: Mapping[str, Any]) -> list[str]:
    if not _known(values, "RESPONSE_MODEL", "AGGREGATE"):
        return []
    model, aggregate = values["RESPONSE_MODEL"], values["AGGREGATE"]
    if model == "soft" or aggregate != "lse":
        return []
    return [
        f"config.AGGREGATE={aggregate!r}: RESPONSE_MODEL={model!r} takes expectations of values, must be left out or "
        "'expectation'"
    ]


def _made(kind: type, values: Mapping[str, Any], problems: list[str]) -> Any:
    if problems:
        raise ConfigurationError(problems)
    return kind(**{name.lower(): value for name, value in values.items()})
