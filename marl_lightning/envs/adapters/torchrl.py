"""Environments of TorchRL as ours, and ours as environments of TorchRL."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torch.nn.functional import one_hot
from torchrl.data import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    TensorSpec,
    Unbounded,
)
from torchrl.envs import EnvBase

from marl_lightning.envs.base import Observations, VectorEnv, VectorStep
from marl_lightning.envs.spec import EnvSpec, GroupSpec
from marl_lightning.envs.validation import action_arrays, check_legal, check_num_envs, check_reset
from marl_lightning.envs.vector.layout import build_step

_GROUP, _AGENT = "agents", "agent_0"  # of environments with a single agent
_STATE = "state"
_NO_OBSERVATIONS = {"action_mask", "mask", "info", "done", "terminated", "truncated", "step_count", "is_init"}

# ---------------------------------------------------------------------------------------------------------------------
# Ours for TorchRL
# ---------------------------------------------------------------------------------------------------------------------


class TorchRLEnv(EnvBase):
    """A :class:`VectorEnv` as a TorchRL environment with ``batch_size`` ``[E]``.

    Entries, for every group of ``A`` agents, which are in ``group_map``:

    * ``(group, "observation")`` ``[E, A, *observation_shape]``; ``(group, "mask")`` ``[E, A]`` bool, who is alive; if
      discrete, ``(group, "action_mask")`` ``[E, A, action_size]`` bool, which the action spec follows as well;
    * ``(group, "action")`` ``[E, A]``, ``[E, A, P]`` or ``[E, A, d]``; ``(group, "reward")`` ``[E, A, 1]``;
    * ``"state"`` ``[E, S]``; ``("info", key)`` ``[E, 1]`` for every name in ``spec.info_keys``, 0 after a reset;
    * ``"done"``, ``"terminated"`` and ``"truncated"`` ``[E, 1]``.

    ``"next"`` holds the true successor of every step. Instances that ended have begun their next episode already, as
    those of a :class:`VectorEnv` do; the reset that TorchRL makes then returns its first observations, and does not
    begin another one.

    Args:
        env: the environment, of which ownership is taken.

    Attributes:
        group_map: names of the agents of every group.
    """

    def __init__(self, *, env: VectorEnv) -> None:
        super().__init__(device=getattr(env, "device", torch.device("cpu")), batch_size=(env.num_envs,))
        self._vector_env = env
        self._seed: int | None = None
        self._begun = torch.zeros(env.num_envs, dtype=torch.bool)  # ended, and in the next episode already
        self._current: Observations[Tensor] | None = None
        self.group_map = {name: list(group.agents) for name, group in env.spec.groups.items()}
        self.observation_spec = self._composite(_observation_specs(env.spec, env.num_envs))
        self.action_spec = self._composite(
            {
                name: Composite({"action": _action_spec(group, env.num_envs)}, shape=(env.num_envs, group.num_agents))
                for name, group in env.spec.groups.items()
            }
        )
        self.reward_spec = self._composite(
            {
                name: Composite(
                    {"reward": Unbounded((env.num_envs, group.num_agents, 1))}, shape=(env.num_envs, group.num_agents)
                )
                for name, group in env.spec.groups.items()
            }
        )
        self.done_spec = self._composite(
            {key: _flag_spec((env.num_envs, 1)) for key in ("done", "terminated", "truncated")}
        )

    def _composite(self, specs: Mapping[str, TensorSpec]) -> Composite:
        return Composite(specs, shape=self.batch_size).to(self.device)

    def _set_seed(self, seed: int | None) -> None:
        """The next reset of all instances seeds instance ``i`` with ``seed + i``."""
        self._seed = seed
        self._begun.fill_(False)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        rows = torch.ones_like(self._begun)
        reset = None if tensordict is None else tensordict.get("_reset", None)
        if reset is not None:
            rows = reset.reshape(-1).cpu()
        everything = bool(rows.all())
        to_begin = rows & ~self._begun
        if self._current is None or (everything and self._seed is not None):
            self._current = self._vector_env.reset(seed=self._seed)
            self._seed = None
        elif bool(to_begin.any()):
            self._current = self._vector_env.reset(mask=None if bool(to_begin.all()) else to_begin.numpy())
        self._begun &= ~rows
        return self._read(self._current)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        if tensordict.get("_step", None) is not None:
            raise NotImplementedError(
                "all instances are stepped together: use break_when_all_done=False, and break_when_any_done=False to "
                "go on after the end of an episode"
            )
        if bool(self._begun.any()):
            raise RuntimeError(
                f"the episodes of the instances {self._begun.nonzero().flatten().tolist()} are over: "
                "reset them before the next step, as step_and_maybe_reset does"
            )
        step = self._vector_env.step({name: tensordict.get((name, "action")) for name in self.group_map})
        self._current = step.observations
        ended = step.terminated | step.truncated
        self._begun = ended.cpu().clone()
        result = self._read(_merge(ended, step.final, step.observations))
        for name, reward in step.reward.items():
            result.set((name, "reward"), reward.unsqueeze(-1).clone())
        for key, value in step.info.items():
            result.set(("info", key), value.unsqueeze(-1).clone())
        result.update(
            {
                "done": ended.unsqueeze(-1).clone(),
                "terminated": step.terminated.unsqueeze(-1).clone(),
                "truncated": step.truncated.unsqueeze(-1).clone(),
            }
        )
        return result

    def _read(self, observations: Observations[Tensor]) -> TensorDictBase:
        """Returns the entries of a decision point, with info and flags 0, and tells the action specs what is legal."""
        result = self.observation_spec.zero()
        result.set("state", observations.state.clone())
        for name, observation in observations.observation.items():
            result.set((name, "observation"), observation.clone())
            result.set((name, "mask"), observations.alive[name].clone())
        for name, action_mask in observations.action_mask.items():
            result.set((name, "action_mask"), action_mask.clone())
            self.full_action_spec[name, "action"].update_mask(action_mask.clone())
        return result.update(self.full_done_spec.zero())

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Closes the environment of ours too. May be called repeatedly."""
        self._vector_env.close()
        self.is_closed = True


def _observation_specs(spec: EnvSpec, num_envs: int) -> dict[str, TensorSpec]:
    specs: dict[str, TensorSpec] = {_STATE: Unbounded((num_envs, spec.state_size))}
    for name, group in spec.groups.items():
        agents = (num_envs, group.num_agents)
        parts = {
            "observation": _box_spec(group.observation_space, agents),
            "mask": _flag_spec(agents),
        }
        if group.is_discrete:
            parts["action_mask"] = _flag_spec((*agents, group.action_size))
        specs[name] = Composite(parts, shape=agents)
    if spec.info_keys:
        specs["info"] = Composite({key: Unbounded((num_envs, 1)) for key in spec.info_keys}, shape=(num_envs,))
    return specs


def _action_spec(group: GroupSpec, num_envs: int) -> TensorSpec:
    shape = (num_envs, group.num_agents, *group.action_shape)
    if not group.is_discrete:
        return _box_spec(group.action_space, shape[:2])
    if group.action_shape:
        return MultiCategorical(group.action_parts, shape=shape, dtype=torch.int64)
    return Categorical(group.action_size, shape=shape, dtype=torch.int64)


def _box_spec(space: spaces.Box, agents: tuple[int, int]) -> TensorSpec:
    shape = (*agents, *space.shape)
    low, high = torch.from_numpy(space.low.copy()), torch.from_numpy(space.high.copy())
    if space.is_bounded():
        return Bounded(low.expand(shape), high.expand(shape), shape=shape, dtype=low.dtype)
    return Unbounded(shape, dtype=low.dtype)


def _flag_spec(shape: tuple[int, ...]) -> TensorSpec:
    return Categorical(2, shape=shape, dtype=torch.bool)


def _merge(rows: Tensor, first: Observations[Tensor], second: Observations[Tensor]) -> Observations[Tensor]:
    """Returns the given rows (``[E]`` bool) of the first and the other ones of the second."""

    def pick(one: Tensor, two: Tensor) -> Tensor:
        return torch.where(rows.view(-1, *[1] * (one.dim() - 1)), one, two)

    def pick_all(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: pick(tensor, two[name]) for name, tensor in one.items()}

    return Observations(
        observation=pick_all(first.observation, second.observation),
        action_mask=pick_all(first.action_mask, second.action_mask),
        alive=pick_all(first.alive, second.alive),
        state=pick(first.state, second.state),
    )


# ---------------------------------------------------------------------------------------------------------------------
# TorchRL's for us
# ---------------------------------------------------------------------------------------------------------------------


class TorchRLVectorEnv(VectorEnv):
    """TorchRL environments as a :class:`VectorEnv`.

    **Groups** are those of ``group_map``. An environment without one has a single agent, in the group ``"agents"``.

    **Observations.** All observation entries of a group, flattened and concatenated if there are several; 8-bit ones
    stay so, others become float32. The state is the entry ``"state"``, or the concatenated observations. An agent is
    alive until its own ``(group, "done")``, or else as long as ``(group, "mask")`` says so. Agents with both entries
    that are not done, but masked, are waiting for their turn: they may only take action 0, which TorchRL ignores.

    **Actions.** Categorical and one-hot ones, of one or several parts, become ``Discrete`` or ``MultiDiscrete``;
    bounded ones a ``Box``, to which they are clipped.

    **Ends** are those of the entries at the root, or else of all groups. Some environments of TorchRL, ``VmasEnv`` is
    one, report time limits as ``terminated``; that cannot be told apart here.

    Instances are made by as many calls of ``factory`` and stepped in a loop, or are the batch of a single environment,
    which is then seeded as a whole: what instance ``i`` does depends on more than ``seed + i``. Games cannot be saved.

    Args:
        factory: returns a new ``EnvBase`` with an empty batch size; with ``batched``, is called with the number of
            instances and returns one with the batch size ``[num_envs]``.
        num_envs: number of instances.
        seed: instance ``i`` is seeded with ``seed + i``, a batch as a whole with ``seed``.
        batched: see above.
        shared_reward: whether agents that have left still get their reward, which must be the same for the whole group
            then. So it is in any case if there is only one reward, at the root.
        name: ``spec.name``; by default made of the class of the environment.

    Raises:
        ValueError: if a batch size is another one, or a space is of a kind that cannot be used.
    """

    def __init__(
        self,
        *,
        factory: Callable[..., EnvBase],
        num_envs: int,
        seed: int = 0,
        batched: bool = False,
        shared_reward: bool = False,
        name: str | None = None,
    ) -> None:
        check_num_envs(num_envs)
        self.num_envs = num_envs
        self.seed = seed
        self._arguments = {"factory": factory, "batched": batched, "shared_reward": shared_reward, "name": name}
        self._games: list[_Game] = []
        try:
            for first in range(1 if batched else num_envs):
                env = factory(num_envs) if batched else factory()
                expected = (num_envs,) if batched else ()
                if tuple(env.batch_size) != expected:
                    env.close()
                    raise ValueError(
                        f"the factory must return an environment with the batch size {list(expected)}, got "
                        f"{list(env.batch_size)}; batched={batched}"
                    )
                self._games.append(_Game(env, slice(None) if batched else slice(first, first + 1)))
            env = self._games[0].env
            self._readers = _make_readers(env)
            has_state = (_STATE,) in _leaves(env.full_observation_spec) and hasattr(env, "group_map")
            state_size = env.full_observation_spec[_STATE].shape[env.batch_dims :].numel() if has_state else None
        except BaseException:
            self.close()
            raise
        self._has_state = has_state
        groups = {reader.name: reader.spec for reader in self._readers}
        self.spec = EnvSpec(
            name=name or f"torchrl/{type(env).__name__}",
            groups=groups,
            state_size=state_size
            if has_state
            else sum(group.num_agents * group.observation_size for group in groups.values()),
            shared_reward=shared_reward or all(reader.reward is None for reader in self._readers),
            metadata={"backend": "torchrl"},
        )
        self.device = torch.device("cpu") if env.device is None else env.device
        self._step: VectorStep[Tensor] = build_step(
            self.spec, num_envs, lambda shape, dtype: torch.from_numpy(np.zeros(shape, dtype)).to(self.device)
        )
        self._started = False

    def reset(self, *, seed: int | None = None, mask: np.ndarray | None = None) -> Observations[Tensor]:
        """See :meth:`VectorEnv.reset`. Raises ``RuntimeError`` if the very first reset is a partial one."""
        check_reset(self.num_envs, seed=seed, mask=mask)
        if not self._started:
            if mask is not None:
                raise RuntimeError("the first reset must be without a mask")
            seed = self.seed if seed is None else seed
        if seed is not None:
            self.seed = seed
        for index, game in enumerate(self._games):
            rows = None if mask is None else mask[game.rows]
            if rows is None or rows.any():
                game.reset(seed=None if seed is None else seed + index, rows=rows)
                # The rows of other instances are read again as they are.
                self._write(game, self._step.observations, game.now)
        self._started = True
        return self._step.observations

    def step(self, actions: Mapping[str, Tensor]) -> VectorStep[Tensor]:
        """See :meth:`VectorEnv.step`. Raises ``ValueError`` if an action has a wrong shape or is not legal."""
        if not self._started:
            raise RuntimeError("call reset before step")
        result, now = self._step, self._step.observations
        arrays = action_arrays(self.spec, {k: action.cpu() for k, action in actions.items()}, (self.num_envs,))
        check_legal(
            self.spec,
            arrays,
            action_mask={name: mask.cpu().numpy() for name, mask in now.action_mask.items()},
            alive={name: alive.cpu().numpy() for name, alive in now.alive.items()},
        )
        before = {name: alive.clone() for name, alive in now.alive.items()}
        for game in self._games:
            for reader in self._readers:
                reader.write_action(game, actions[reader.name][game.rows].to(self.device), before[reader.name])
            outcome = game.step()
            done, terminated, truncated = _flags(game.env, outcome)
            result.terminated[game.rows] = terminated & done | done & ~truncated
            result.truncated[game.rows] = truncated & done
            for reader in self._readers:
                reward = reader.read_reward(game, outcome)
                if not self.spec.shared_reward:
                    reward = reward * before[reader.name][game.rows]
                result.reward[reader.name][game.rows] = reward
            if done.any():
                self._write(game, result.final, outcome, before=before)
            self._write(game, now, game.now)
        return result

    def replicate(self, *, num_envs: int, seed: int) -> TorchRLVectorEnv:
        """See :meth:`VectorEnv.replicate`."""
        other = TorchRLVectorEnv(num_envs=num_envs, seed=seed, **self._arguments)
        other.recipe = self.recipe
        return other

    def close(self) -> None:
        """See :meth:`VectorEnv.close`."""
        for game in self._games:
            game.close()

    def _write(
        self,
        game: _Game,
        target: Observations[Tensor],
        source: TensorDictBase,
        *,
        before: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Writes the decision point of a game; ``before`` says who was alive before an episode ended with it."""
        for reader in self._readers:
            name, group = reader.name, reader.spec
            alive, acting = reader.read_alive(game, source, before=before)
            observation = reader.read_observation(game, source)
            observation[~alive] = 0
            target.observation[name][game.rows] = observation
            target.alive[name][game.rows] = alive
            if group.is_discrete:
                legal = reader.read_action_mask(game, source)
                idle = torch.zeros(group.action_size, dtype=torch.bool, device=self.device)
                idle[list(group.action_offsets)] = True
                target.action_mask[name][game.rows] = torch.where((alive & acting).unsqueeze(-1), legal, idle)
        if self._has_state:
            target.state[game.rows] = game.batch(source.get(_STATE)).flatten(1).float()
        else:
            parts = [target.observation[reader.name][game.rows].flatten(1).float() for reader in self._readers]
            target.state[game.rows] = torch.cat(parts, dim=1)


class _Game:
    """One environment of TorchRL, and which instances it holds.

    Attributes:
        now: entries of the current decision point.
    """

    now: TensorDictBase

    def __init__(self, env: EnvBase, rows: slice) -> None:
        self.env = env
        self.rows = rows

    def reset(self, *, seed: int | None, rows: np.ndarray | None) -> None:
        if seed is not None:
            self.env.set_seed(seed)
        if rows is None or rows.all():
            self.now = self.env.reset()
            return
        entries = self.now.clone()
        for reset_key, (done_key, *_) in zip(self.env.reset_keys, self.env.done_keys_groups, strict=True):
            done = entries.get(done_key)
            entries.set(
                reset_key, torch.from_numpy(rows).to(done.device).view(-1, *[1] * (done.dim() - 1)).expand_as(done)
            )
        self.now = self.env.reset(entries, select_reset_only=True)

    def step(self) -> TensorDictBase:
        """Returns the entries of the true successor. Instances that ended are reset."""
        outcome, self.now = self.env.step_and_maybe_reset(self.now)
        return outcome.get("next")

    def close(self) -> None:
        if not self.env.is_closed:
            self.env.close()

    def batch(self, value: Tensor) -> Tensor:
        """Returns a value with an axis of instances."""
        return value if self.env.batch_dims else value.unsqueeze(0)


@dataclass(frozen=True, kw_only=True)
class _Reader:
    """Where the entries of a group are, and how they are read and written.

    Attributes:
        name: of the group.
        spec: of the group.
        observations: the keys of its observations, at least one.
        action: the key of its action.
        encode: turns actions ``[rows, A, *action_shape]`` into those of TorchRL, in any shape.
        reward: the key of its rewards; ``None`` if all agents share the one at the root.
        done: the key that tells which agents have left, if there is one.
        mask: the key that tells which agents may act, if there is one.
        action_mask: the key that tells what they may do, if there is one.
        single: whether entries have no axis of agents.
    """

    name: str
    spec: GroupSpec
    observations: tuple[NestedKey, ...]
    action: NestedKey
    encode: Callable[[Tensor], Tensor]
    reward: NestedKey | None
    done: NestedKey | None
    mask: NestedKey | None
    action_mask: NestedKey | None
    single: bool

    def read_observation(self, game: _Game, source: TensorDictBase) -> Tensor:
        parts = [self._read(game, source, key) for key in self.observations]
        if len(parts) > 1:
            parts = [torch.cat([part.reshape(*part.shape[:2], -1).float() for part in parts], dim=-1)]
        shape = (*parts[0].shape[:2], *self.spec.observation_shape)
        return parts[0].reshape(shape).to(torch.uint8 if _is_image(self.spec) else torch.float32, copy=True)

    def read_alive(
        self, game: _Game, source: TensorDictBase, *, before: Mapping[str, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """Returns who is alive and who may act, ``[rows, A]``.

        Those that were alive ``before`` the end of an episode and were only cut still are.
        """
        rows = len(game.batch(source))
        everyone = torch.ones(rows, self.spec.num_agents, dtype=torch.bool, device=source.device)
        mask = everyone if self.mask is None else self._read(game, source, self.mask).reshape(everyone.shape)
        if self.done is None:
            return mask, everyone
        if before is None:
            return ~self._read(game, source, self.done).reshape(everyone.shape), mask
        terminated = self._read(game, source, (self.name, "terminated")).reshape(everyone.shape)
        return before[self.name][game.rows] & ~terminated, mask

    def read_action_mask(self, game: _Game, source: TensorDictBase) -> Tensor:
        """Returns ``[rows, A, action_size]`` bool; agents with nothing to choose may do everything."""
        shape = (len(game.batch(source)), self.spec.num_agents, self.spec.action_size)
        if self.action_mask is None:
            return torch.ones(shape, dtype=torch.bool, device=source.device)
        mask = self._read(game, source, self.action_mask).reshape(shape).bool()
        return mask | ~mask.any(dim=-1, keepdim=True)

    def read_reward(self, game: _Game, source: TensorDictBase) -> Tensor:
        """Returns ``[rows, A]`` float32."""
        if self.reward is None:
            reward = game.batch(source.get("reward")).reshape(-1, 1)
            return reward.expand(-1, self.spec.num_agents).float()
        return self._read(game, source, self.reward).reshape(-1, self.spec.num_agents).float()

    def write_action(self, game: _Game, action: Tensor, alive: Tensor) -> None:
        """Sets the action of the next step; that of agents that are not alive is 0."""
        alive = alive[game.rows].view(*action.shape[:2], *[1] * (action.dim() - 2))
        spec = game.env.full_action_spec[self.action]
        game.now.set(self.action, self.encode(action * alive).reshape(spec.shape).to(spec.dtype))

    def _read(self, game: _Game, source: TensorDictBase, key: NestedKey) -> Tensor:
        """Returns an entry with axes of instances and agents."""
        value = game.batch(source.get(key))
        return value.unsqueeze(1) if self.single else value


def _make_readers(env: EnvBase) -> list[_Reader]:
    """Finds the entries of all groups of an environment."""
    group_map = getattr(env, "group_map", None)
    if group_map is None:
        return [_make_reader(env, name=_GROUP, agents=(_AGENT,), prefix=())]
    return [
        _make_reader(env, name=name, agents=tuple(agents), prefix=(name,))
        for name, agents in group_map.items()
        if agents
    ]


def _make_reader(env: EnvBase, *, name: str, agents: tuple[str, ...], prefix: tuple[str, ...]) -> _Reader:
    single = not prefix
    entries = _leaves(env.full_observation_spec)
    observations = {
        key: spec
        for key, spec in entries.items()
        if key[: len(prefix)] == prefix and not _NO_OBSERVATIONS & set(key[len(prefix) :])
    }
    if not observations:
        raise ValueError(f"{type(env).__name__} has no observations of {name!r}: its entries are {list(entries)}")
    actions = {key: spec for key, spec in _leaves(env.full_action_spec).items() if key[: len(prefix)] == prefix}
    if len(actions) != 1:
        raise ValueError(f"{name!r} needs exactly one action entry, got {list(actions)}")
    ((action, action_spec),) = actions.items()
    for key, spec in (*observations.items(), (action, action_spec)):
        if -1 in spec.shape:
            raise ValueError(
                f"the agents {agents} of {name!r} differ in {key}: give the environment a group_map with a group for "
                "each kind of agents"
            )
    leading = env.batch_dims + (not single)
    action_space, encode = _read_action_spec(action_spec, leading)
    rewards = _leaves(env.full_reward_spec)
    flags = _leaves(env.full_done_spec)

    def find(keys: Mapping[tuple[str, ...], TensorSpec], last: str) -> tuple[str, ...] | None:
        return (*prefix, last) if (*prefix, last) in keys else None

    return _Reader(
        name=name,
        spec=GroupSpec(
            agents=agents,
            observation_space=_read_observation_specs(list(observations.values()), leading),
            action_space=action_space,
        ),
        observations=tuple(observations),
        action=action,
        encode=encode,
        reward=find(rewards, "reward"),
        done=None if single else find(flags, "done"),
        mask=find(entries, "mask"),
        action_mask=find(entries, "action_mask"),
        single=single,
    )


def _leaves(specs: Composite) -> dict[tuple[str, ...], TensorSpec]:
    """Returns the entries that are tensors, by their keys as tuples."""
    return {
        (key,) if isinstance(key, str) else key: spec
        for key, spec in specs.items(include_nested=True, leaves_only=True)
        if spec.dtype is not None
    }


def _read_observation_specs(specs: list[TensorSpec], leading: int) -> spaces.Box:
    """Returns the space of one agent's observation; specs have so many ``leading`` axes of instances and agents."""
    if len(specs) == 1 and specs[0].dtype is torch.uint8:
        return spaces.Box(0, 255, tuple(specs[0].shape[leading:]) or (1,), np.uint8)
    if len(specs) == 1:
        shape = tuple(specs[0].shape[leading:]) or (1,)
    else:
        shape = (sum(spec.shape[leading:].numel() for spec in specs),)
    return spaces.Box(-np.inf, np.inf, shape, np.float32)


def _is_image(group: GroupSpec) -> bool:
    return group.observation_space.dtype == np.uint8


def _read_action_spec(spec: TensorSpec, leading: int) -> tuple[spaces.Space, Callable[[Tensor], Tensor]]:
    """Returns the space of one agent's action, and how actions of ours become those of the spec."""
    if isinstance(spec, MultiOneHot):
        sizes = [int(box.n) for box in spec.space]
        return spaces.MultiDiscrete(sizes), lambda action: torch.cat(
            [one_hot(part, size) for part, size in zip(action.unbind(-1), sizes, strict=True)], dim=-1
        )
    if isinstance(spec, OneHot):
        size = int(spec.space.n)
        return spaces.Discrete(size), lambda action: one_hot(action, size)
    if isinstance(spec, MultiCategorical):
        sizes = spec.nvec.reshape(-1, spec.nvec.shape[-1])[0].tolist()
        return spaces.MultiDiscrete(sizes), lambda action: action
    if isinstance(spec, Binary):
        return spaces.MultiDiscrete([2] * spec.shape[leading:].numel()), lambda action: action
    if isinstance(spec, Categorical):
        return spaces.Discrete(int(spec.space.n)), lambda action: action
    if not isinstance(spec, Bounded):
        raise ValueError(f"actions must be categorical, one-hot or bounded, got {type(spec).__name__}")
    size = spec.shape[leading:].numel()
    low, high = (bound.expand(spec.shape).reshape(-1, size) for bound in (spec.space.low, spec.space.high))
    if not ((low == low[0]).all() and (high == high[0]).all()):
        raise ValueError("the agents of a group need equal bounds of their actions: give them groups of their own")
    low, high = low[0].float(), high[0].float()
    space = spaces.Box(low.cpu().numpy(), high.cpu().numpy(), dtype=np.float32)
    return space, lambda action: action.clamp(low, high)


def _flags(env: EnvBase, outcome: TensorDictBase) -> tuple[Tensor, Tensor, Tensor]:
    """Returns done, terminated and truncated, ``[rows]`` bool each; those of groups count if all of them agree."""
    rows = env.batch_size.numel()

    def read(last: str) -> Tensor | None:
        keys = [key for key in _leaves(env.full_done_spec) if key[-1] == last]
        keys = [key for key in keys if len(key) == 1] or keys
        if not keys:
            return None
        return torch.stack([outcome.get(key).reshape(rows, -1).all(dim=-1) for key in keys]).all(dim=0)

    terminated, truncated = read("terminated"), read("truncated")
    done = read("done")
    if truncated is None:
        truncated = torch.zeros_like(done)
    return done, (done & ~truncated if terminated is None else terminated), truncated
