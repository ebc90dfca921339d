"""``check_env``: finds breaches of the environment contracts and says how to repair them.

The environment is played with random legal actions. Each transition is copied to numpy and then judged by small
functions, one for each kind of mistake, which serve both contracts: arrays of one instance have no leading axis, those
of a vector environment have ``(E,)``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from marl_lightning.envs.base import MultiAgentEnv, Observations, Step, VectorEnv, VectorStep
from marl_lightning.envs.spec import EnvSpec, GroupSpec

_COMPARED_STEPS = 50  # length of the two runs that must be equal: all their transitions are kept in memory


def check_env(env: MultiAgentEnv | VectorEnv, *, steps: int = 200, seed: int = 0) -> None:
    """Plays with random legal actions and raises at the first breach of the contract of ``env``.

    The environment is reset and stepped, and left in an unspecified state; it is not closed. Running statistics of
    wrappers are frozen: with them, equal seeds would not give equal observations. A vector environment is
    replicated as well. Actions come from a generator of its own, and global generators are not touched.

    Args:
        env: the environment, of either contract; a vector environment has to reset its instances itself.
        steps: env steps (one instance) or vector steps to play.
        seed: seed of the environment and of the actions.

    Raises:
        ValueError: naming the mistake and its repair. Errors of the environment itself pass through.
    """
    from marl_lightning.envs.wrappers import freeze_statistics  # wrappers check nothing, but are made of environments
    from marl_lightning.envs.wrappers.base import require_autoreset

    vector = isinstance(env, VectorEnv)
    if vector:
        require_autoreset(env, "check_env")
    freeze_statistics(env)
    leading = (env.num_envs,) if vector else ()
    _check_play(env, leading, steps=steps, seed=seed)
    _check_determinism(env, steps=min(steps, _COMPARED_STEPS), seed=seed)
    if vector:
        _check_same_objects(env, seed=seed)
        _check_reset_arguments(env, seed=seed)
        _check_partial_reset(env, seed=seed)
        _check_replicate(env, seed=seed)
        _check_instance_seeds(env, seed=seed)
    else:
        _check_ownership(env, seed=seed)
        _check_illegal_actions(env, seed=seed)
        _check_step_after_end(env, steps=steps, seed=seed)
    if env.spec.can_checkpoint:
        _check_state_dict(env, steps=min(steps, _COMPARED_STEPS), seed=seed)


# ---------------------------------------------------------------------------------------------------------------------
# Playing
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class _Transition:
    """One step, copied to numpy."""

    before: Observations[np.ndarray]
    actions: dict[str, np.ndarray]
    step: Step[np.ndarray] | VectorStep[np.ndarray]

    @property
    def ended(self) -> np.ndarray:
        return np.logical_or(self.step.terminated, self.step.truncated)


def _play(
    env: MultiAgentEnv | VectorEnv, observations: Observations, *, steps: int, rng: np.random.Generator
) -> Iterator[_Transition]:
    """Continues from ``observations`` for ``steps`` steps, resetting one instance whenever its episode ended."""
    before = _copied_observations(observations)
    for _ in range(steps):
        actions = _random_actions(env.spec, before, rng)
        outcome = _step(env, actions)
        expected = Step if isinstance(env, MultiAgentEnv) else VectorStep
        _require(isinstance(outcome, expected), f"step must return a {expected.__name__}, got {type(outcome).__name__}")
        step = _copied_step(outcome)
        transition = _Transition(before=before, actions=actions, step=step)
        yield transition
        before = step.observations
        if isinstance(env, MultiAgentEnv) and transition.ended:
            before = _copied_observations(env.reset())


def _step(env: MultiAgentEnv | VectorEnv, actions: Mapping[str, np.ndarray]) -> Step | VectorStep:
    if isinstance(env, MultiAgentEnv):
        return env.step({name: action.copy() for name, action in actions.items()})
    import torch

    return env.step({name: torch.tensor(action) for name, action in actions.items()})


def _random_actions(
    spec: EnvSpec, observations: Observations[np.ndarray], rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Draws uniformly among the legal actions."""
    actions = {}
    for name, group in spec.groups.items():
        alive = observations.alive[name]
        if group.is_discrete:
            mask = observations.action_mask[name]
            scores = np.where(mask, rng.random(mask.shape), -1.0)
            parts = [part.argmax(axis=-1) for part in np.split(scores, group.action_offsets[1:], axis=-1)]
            actions[name] = np.stack(parts, axis=-1).reshape(*alive.shape, *group.action_shape)
        else:
            space = group.action_space
            actions[name] = rng.uniform(space.low, space.high, (*alive.shape, group.action_size)).astype(np.float32)
    return actions


def _copied(values: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: _copied_array(value) for name, value in values.items()}


def _copied_array(value: Any) -> np.ndarray:
    return np.asarray(value).copy()  # np.array(tensor) would copy too, but warns


def _copied_observations(observations: Observations) -> Observations[np.ndarray]:
    return Observations(
        observation=_copied(observations.observation),
        action_mask=_copied(observations.action_mask),
        alive=_copied(observations.alive),
        state=_copied_array(observations.state),
    )


def _copied_step(step: Step | VectorStep) -> Step[np.ndarray] | VectorStep[np.ndarray]:
    if isinstance(step, Step):
        return Step(
            observations=_copied_observations(step.observations),
            reward=_copied(step.reward),
            terminated=step.terminated,
            truncated=step.truncated,
            info=dict(step.info),
        )
    return VectorStep(
        observations=_copied_observations(step.observations),
        reward=_copied(step.reward),
        terminated=_copied_array(step.terminated),
        truncated=_copied_array(step.truncated),
        final=_copied_observations(step.final),
        info=_copied(step.info),
    )


def _observation_arrays(observations: Observations) -> Iterator[tuple[str, Any]]:
    """Yields a name for messages with each array."""
    for kind in ("observation", "action_mask", "alive"):
        for name, array in getattr(observations, kind).items():
            yield f"{kind} of {name!r}", array
    yield "state", observations.state


def _transition_arrays(transition: _Transition) -> Iterator[tuple[str, np.ndarray]]:
    """Yields all that a step determines; ``final`` only where it is specified."""
    yield from _observation_arrays(transition.before)
    step = transition.step
    for name, reward in step.reward.items():
        yield f"reward of {name!r}", reward
    yield "terminated", np.asarray(step.terminated)
    yield "truncated", np.asarray(step.truncated)
    for key, value in step.info.items():
        yield f"info {key!r}", np.asarray(value)
    yield from _observation_arrays(step.observations)
    if isinstance(step, VectorStep):
        for name, array in _observation_arrays(step.final):
            yield f"final {name}", array[transition.ended]


# ---------------------------------------------------------------------------------------------------------------------
# Single transitions
# ---------------------------------------------------------------------------------------------------------------------


def _require(condition: bool | np.bool_, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _check_play(env: MultiAgentEnv | VectorEnv, leading: tuple[int, ...], *, steps: int, seed: int) -> None:
    spec = env.spec
    observations = env.reset(seed=seed)
    _require(
        isinstance(observations, Observations),
        f"reset must return Observations, got {type(observations).__name__}",
    )
    _check_observations(spec, _copied_observations(observations), leading, "reset")
    episodes = _EpisodeChecks(spec, leading)
    for transition in _play(env, observations, steps=steps, rng=np.random.default_rng(seed)):
        step = transition.step
        _check_flags(step, leading)
        _check_observations(spec, step.observations, leading, "step")
        _check_reward(spec, transition, leading)
        _check_info(spec, step, leading)
        if isinstance(step, VectorStep) and transition.ended.any():
            ended = transition.ended
            rows = _rows(step.final, ended)
            _check_observations(spec, rows, (int(ended.sum()),), "final of step", instances=np.flatnonzero(ended))
        episodes.update(transition)
    episodes.finish()


def _rows(observations: Observations[np.ndarray], rows: np.ndarray) -> Observations[np.ndarray]:
    return Observations(
        observation={name: array[rows] for name, array in observations.observation.items()},
        action_mask={name: array[rows] for name, array in observations.action_mask.items()},
        alive={name: array[rows] for name, array in observations.alive.items()},
        state=observations.state[rows],
    )


def _place(bad: np.ndarray, leading: tuple[int, ...], agents: tuple[str, ...], instances: np.ndarray | None) -> str:
    """Returns which instance and agent the first bad entry belongs to, such as ``" (environment 1, agent 'red_0')"``.

    Args:
        bad: ``[*leading, A, ...]``, or ``[*leading, ...]`` without agents.
        leading: ``()`` for one instance, ``(n,)`` for several.
        agents: names along the axis ``A``, empty if there is none.
        instances: ``[n]`` their indices, if these are not ``0`` to ``n - 1``.
    """
    if not bad.any():
        return ""
    first = np.argwhere(bad)[0]
    words = [f"environment {first[0] if instances is None else instances[first[0]]}"] if leading else []
    words += [f"agent {agents[first[len(leading)]]!r}"] if agents else []
    return f" ({', '.join(words)})" if words else ""


def _check_observations(
    spec: EnvSpec,
    observations: Observations[np.ndarray],
    leading: tuple[int, ...],
    where: str,
    *,
    instances: np.ndarray | None = None,
) -> None:
    _check_groups(spec, observations, where)
    for name, group in spec.groups.items():
        agents = (*leading, group.num_agents)
        place = partial(_place, leading=leading, agents=group.agents, instances=instances)
        _check_observation(group, observations.observation[name], leading, name, where, place)
        alive = observations.alive[name]
        _check_array(alive, agents, np.bool_, f"{where}: alive of {name!r}")
        if group.is_discrete:
            mask = observations.action_mask[name]
            _check_array(mask, (*agents, group.action_size), np.bool_, f"{where}: action_mask of {name!r}")
            for part, legal in enumerate(np.split(mask, group.action_offsets[1:], axis=-1)):
                what = f"part {part} of action_mask of {name!r}" if group.action_shape else f"action_mask of {name!r}"
                _check_legal_counts(legal.sum(axis=-1), alive, f"{where}: {what}", place)
    _check_array(
        observations.state,
        (*leading, spec.state_size),
        np.float32,
        f"{where}: state (spec.state_size={spec.state_size})",
    )
    bad = ~np.isfinite(observations.state)
    _require(
        not bad.any(),
        f"{where}: state has NaN or infinite entries{_place(bad, leading, (), instances)}; mask or clip them",
    )


def _check_groups(spec: EnvSpec, observations: Observations[np.ndarray], where: str) -> None:
    discrete = {name for name, group in spec.groups.items() if group.is_discrete}
    for kind, expected in (("observation", set(spec.groups)), ("alive", set(spec.groups)), ("action_mask", discrete)):
        found = set(getattr(observations, kind))
        _require(
            found == expected,
            f"{where}: {kind} must have the groups {sorted(expected)}, got {sorted(found)}; "
            "action_mask holds discrete groups only, the others all groups of the spec",
        )


def _check_array(array: np.ndarray, shape: tuple[int, ...], dtype: Any, what: str) -> None:
    _require(
        array.shape == shape and array.dtype == dtype,
        f"{what} must be {np.dtype(dtype)} of shape {shape}, got {array.dtype} of shape {array.shape}",
    )


def _check_observation(
    group: GroupSpec,
    observation: np.ndarray,
    leading: tuple[int, ...],
    name: str,
    where: str,
    place: Callable[[np.ndarray], str],
) -> None:
    space, shape = group.observation_space, (*leading, group.num_agents, *group.observation_shape)
    _check_array(observation, shape, space.dtype, f"{where}: observation of {name!r} (see spec)")
    # Observations of agents that are not alive may be zero, whatever the bounds say. NaN fails both comparisons.
    inside = ((observation >= space.low) & (observation <= space.high)) | (observation == 0)
    _require(
        inside.all(),
        f"{where}: observation of {name!r} has entries that are NaN or outside of its observation_space {space}"
        f"{place(~inside)}; repair them or widen the bounds of the space",
    )


def _check_legal_counts(legal: np.ndarray, alive: np.ndarray, what: str, place: Callable[[np.ndarray], str]) -> None:
    _require(
        (legal >= 1).all(),
        f"{what} has an agent without a legal action{place(legal < 1)}, which makes its policy NaN; "
        "give agents that cannot act exactly one, say a no-op",
    )
    _require(
        (legal[~alive] == 1).all(),
        f"{what}: agents that are not alive must have exactly one legal action, got {legal[~alive]}"
        f"{place(~alive & (legal != 1))}",
    )


def _check_flags(step: Step | VectorStep, leading: tuple[int, ...]) -> None:
    for kind in ("terminated", "truncated"):
        flag = getattr(step, kind)
        if leading:
            _check_array(flag, leading, np.bool_, f"step: {kind}")
        else:
            _require(
                isinstance(flag, bool), f"step: {kind} must be a Python bool, got {type(flag).__name__}; use bool()"
            )


def _check_reward(spec: EnvSpec, transition: _Transition, leading: tuple[int, ...]) -> None:
    rewards = transition.step.reward
    _require(rewards.keys() == spec.groups.keys(), f"step: reward must have the groups {list(spec.groups)}")
    for name, group in spec.groups.items():
        reward = rewards[name]
        _check_array(reward, (*leading, group.num_agents), np.float32, f"step: reward of {name!r}, one an agent,")
        bad = ~np.isfinite(reward)
        _require(
            not bad.any(),
            f"step: reward of {name!r} has NaN or infinite entries{_place(bad, leading, group.agents, None)}",
        )
        if spec.shared_reward:
            _require(
                (reward == reward[..., :1]).all(),
                f"step: spec.shared_reward is set, so all agents of {name!r} must get the same reward, dead or alive",
            )
        else:
            _require(
                (reward[~transition.before.alive[name]] == 0).all(),
                f"step: agents of {name!r} that were not alive before the step must get reward 0 unless "
                "spec.shared_reward is set; the reward of the step on which an agent dies still counts",
            )


def _check_info(spec: EnvSpec, step: Step | VectorStep, leading: tuple[int, ...]) -> None:
    _require(
        set(step.info) == set(spec.info_keys),
        f"step: info must always have the keys of spec.info_keys, {list(spec.info_keys)}, got {list(step.info)}",
    )
    for key, value in step.info.items():
        if leading:
            _check_array(value, leading, np.float32, f"step: info {key!r}")
        else:
            _require(
                isinstance(value, int | float | np.number),
                f"step: info {key!r} must be a number, got {type(value).__name__}",
            )


# ---------------------------------------------------------------------------------------------------------------------
# Whole episodes
# ---------------------------------------------------------------------------------------------------------------------


class _EpisodeChecks:
    """Judges what needs more than one transition: the time limit and the successors at ends of episodes."""

    def __init__(self, spec: EnvSpec, leading: tuple[int, ...]) -> None:
        self._limit = spec.episode_limit
        self._length = np.zeros(leading, np.int64)
        self._observations_vary = False
        self._ends = 0
        self._ends_with_reset = 0

    def update(self, transition: _Transition) -> None:
        step, ended = transition.step, transition.ended
        self._length = np.asarray(self._length + 1)
        if self._limit is not None:
            _require(
                (self._length[~ended] < self._limit).all(),
                f"an episode goes on at its step {self._limit}, but spec.episode_limit is {self._limit}; "
                "truncate there, or set the limit to the game's own or to None",
            )
        self._length = np.where(ended, 0, self._length)
        if isinstance(step, VectorStep):
            self._compare_final(transition, step)

    def _compare_final(self, transition: _Transition, step: VectorStep[np.ndarray]) -> None:
        going = ~transition.ended
        self._observations_vary |= not _equal(_rows(transition.before, going), _rows(step.observations, going))
        for index in np.flatnonzero(transition.ended):
            self._ends += 1
            self._ends_with_reset += _equal(_rows(step.final, index), _rows(step.observations, index))

    def finish(self) -> None:
        """A final observation may equal the next start by chance, but not in every episode of a game that changes."""
        _require(
            not (self._observations_vary and self._ends and self._ends_with_reset == self._ends),
            "final equals the first observations of the next episode wherever an episode ended; "
            "write the true successor into final before the reset",
        )


def _equal(first: Observations[np.ndarray], second: Observations[np.ndarray]) -> bool:
    pairs = zip(_observation_arrays(first), _observation_arrays(second), strict=True)
    return all(np.array_equal(a, b) for (_, a), (_, b) in pairs)


def _require_equal_runs(first: list[_Transition], second: list[_Transition], repair: str) -> None:
    for time, (one, two) in enumerate(zip(first, second, strict=True)):
        for (what, a), (_, b) in zip(_transition_arrays(one), _transition_arrays(two), strict=True):
            _require(np.array_equal(a, b), f"{what} differs at step {time} of two runs that must be equal; {repair}")


def _run(env: MultiAgentEnv | VectorEnv, observations: Observations, *, steps: int, seed: int) -> list[_Transition]:
    return list(_play(env, observations, steps=steps, rng=np.random.default_rng(seed)))


def _check_determinism(env: MultiAgentEnv | VectorEnv, *, steps: int, seed: int) -> None:
    repair = "reset(seed=) must determine this and all later episodes: draw all randomness from one seeded generator"
    runs, later = [], []
    for _ in range(2):
        runs.append(_run(env, env.reset(seed=seed), steps=steps, seed=seed))
        later.append(_copied_observations(env.reset()))
    _require_equal_runs(*runs, repair)
    for (what, a), (_, b) in zip(*map(_observation_arrays, later), strict=True):
        _require(np.array_equal(a, b), f"{what} of the next episode differs after two runs that were equal; {repair}")


def _check_state_dict(env: MultiAgentEnv | VectorEnv, *, steps: int, seed: int) -> None:
    *_, last = _play(env, env.reset(seed=seed), steps=max(steps // 2, 1), rng=np.random.default_rng(seed))
    here = last.step.observations
    if isinstance(env, MultiAgentEnv) and last.ended:
        here = _copied_observations(env.reset())
    state = env.state_dict()
    if isinstance(env, VectorEnv):
        _check_safe_to_load(state, "state_dict")
    first = _run(env, here, steps=steps, seed=seed + 1)
    repair = "state_dict must return copies of all that the next steps depend on, and load_state_dict restore them"
    if isinstance(env, MultiAgentEnv):
        env.load_state_dict(state)
        _require_equal_runs(first, _run(env, here, steps=steps, seed=seed + 1), repair)
        return
    # A run is resumed in a new process, hence in a new environment.
    with env.replicate(num_envs=env.num_envs, seed=seed + 1) as other:
        restored = other.load_state_dict(state)
        _require_equal_runs(first, _run(other, restored, steps=steps, seed=seed + 1), repair)


def _check_safe_to_load(value: Any, where: str) -> None:
    import torch

    if isinstance(value, Mapping):
        for key, item in value.items():
            _check_safe_to_load(item, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_safe_to_load(item, f"{where}[{index}]")
    else:
        _require(
            value is None or isinstance(value, torch.Tensor) or type(value) in (bool, int, float, str),
            f"{where} is a {type(value).__name__}; use only tensors, numbers, strings and containers of them, "
            "so that checkpoints can be loaded safely",
        )


# ---------------------------------------------------------------------------------------------------------------------
# Vector environments only
# ---------------------------------------------------------------------------------------------------------------------


def _check_same_objects(env: VectorEnv, *, seed: int) -> None:
    rng = np.random.default_rng(seed)
    observations = env.reset(seed=seed)
    steps = [_step(env, _random_actions(env.spec, _copied_observations(observations), rng))]
    steps.append(_step(env, _random_actions(env.spec, _copied_observations(steps[0].observations), rng)))
    _require(
        steps[0] is steps[1] and steps[0].observations is observations,
        "reset and step must return the same objects every time: allocate them once and fill them anew",
    )
    final = dict(_observation_arrays(steps[0].final))
    for name, tensor in _observation_arrays(observations):
        _require(
            not np.shares_memory(tensor.numpy(), final[name].numpy()),
            f"{name} of final and of observations share memory; the next start overwrites the true successor",
        )


def _check_reset_arguments(env: VectorEnv, *, seed: int) -> None:
    env.reset(seed=seed)
    _require(env.seed == seed, f"reset(seed={seed}) must set env.seed, which is {env.seed}")
    mask = np.ones(env.num_envs, np.bool_)
    for arguments, what in (
        ({"mask": np.ones(env.num_envs + 1, np.bool_)}, "a mask of a wrong shape"),
        ({"mask": mask.astype(np.int64)}, "a mask of a wrong dtype"),
        ({"mask": mask, "seed": seed}, "a mask together with a seed"),
    ):
        _check_raises(lambda arguments=arguments: env.reset(**arguments), ValueError, f"reset with {what}")


def _check_raises(call: Callable[[], Any], error: type[Exception], what: str) -> None:
    try:
        call()
    except error:
        return
    raise ValueError(f"{what} must raise {error.__name__}")


def _check_partial_reset(env: VectorEnv, *, seed: int) -> None:
    *_, last = _play(env, env.reset(seed=seed), steps=3, rng=np.random.default_rng(seed))
    mask = np.arange(env.num_envs) % 2 == 1
    after = _copied_observations(env.reset(mask=mask))
    _check_observations(env.spec, after, (env.num_envs,), "reset with a mask")
    before = _rows(last.step.observations, ~mask)
    for (name, a), (_, b) in zip(_observation_arrays(before), _observation_arrays(_rows(after, ~mask)), strict=True):
        _require(np.array_equal(a, b), f"reset with a mask changed {name} of an instance outside of the mask")


def _check_replicate(env: VectorEnv, *, seed: int) -> None:
    with env.replicate(num_envs=2, seed=seed) as other:
        _require(
            other is not env and other.num_envs == 2 and other.seed == seed and other.spec == env.spec,
            "replicate must return a new environment with the given num_envs and seed and an equal spec",
        )
        actions = _random_actions(
            env.spec,
            _rows(_copied_observations(env.reset(seed=seed)), np.zeros(2, np.int64)),
            np.random.default_rng(seed),
        )
        _check_raises(lambda: _step(other, actions), RuntimeError, "step before the first reset")


def _check_instance_seeds(env: VectorEnv, *, seed: int) -> None:
    with env.replicate(num_envs=2, seed=seed) as pair, env.replicate(num_envs=1, seed=seed + 1) as single:
        second, alone = _copied_observations(pair.reset()), _copied_observations(single.reset())
    for (name, a), (_, b) in zip(_observation_arrays(second), _observation_arrays(alone), strict=True):
        _require(
            np.array_equal(a[1], b[0]),
            f"{name} of instance 1 with seed {seed} differs from that of instance 0 with seed {seed + 1}; "
            "instance i must be seeded with seed + i, and at the first reset too",
        )


# ---------------------------------------------------------------------------------------------------------------------
# One instance only
# ---------------------------------------------------------------------------------------------------------------------


def _check_ownership(env: MultiAgentEnv, *, seed: int) -> None:
    first = env.reset(seed=seed)
    before = _copied_observations(first)
    rng = np.random.default_rng(seed)
    step = _step(env, _random_actions(env.spec, before, rng))
    for (name, a), (_, b) in zip(_observation_arrays(before), _observation_arrays(first), strict=True):
        _require(
            np.array_equal(a, b),
            f"step changed {name} that reset had returned; return new arrays (or copies) every time",
        )
    for name, array in itertools.chain(_observation_arrays(step.observations), step.reward.items()):
        _require(isinstance(array, np.ndarray), f"step: {name} must be a numpy array, got {type(array).__name__}")


def _check_illegal_actions(env: MultiAgentEnv, *, seed: int) -> None:
    before = _copied_observations(env.reset(seed=seed))
    for name, group in env.spec.groups.items():
        if not before.alive[name].any():
            continue
        for part, size in enumerate(group.action_parts):
            legal = np.split(before.action_mask[name], group.action_offsets[1:], axis=-1)[part]
            out_of_range = np.full(group.num_agents, size)
            masked = np.where(legal.all(axis=-1), size, legal.argmin(axis=-1))
            in_part = f" in part {part}" if group.action_shape else ""
            for chosen, why in ((out_of_range, ""), (masked, " by its action_mask")):
                actions = _random_actions(env.spec, before, np.random.default_rng(seed))
                rows = before.alive[name]
                actions[name].reshape(group.num_agents, -1)[rows, part] = chosen[rows]
                _check_raises(
                    lambda actions=actions: _step(env, actions),
                    ValueError,
                    f"an action of {name!r} that is not legal{why}{in_part}",
                )


def _check_step_after_end(env: MultiAgentEnv, *, steps: int, seed: int) -> None:
    for transition in _play(env, env.reset(seed=seed), steps=steps, rng=np.random.default_rng(seed)):
        if transition.ended:
            _check_raises(
                lambda actions=transition.actions: _step(env, actions), RuntimeError, "step after the end of an episode"
            )
            return
