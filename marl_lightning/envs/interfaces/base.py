"""One instance of a game in plain numpy arrays. Needs no torch, so that worker processes stay light."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Generic, Literal, Self, TypeVar

import numpy as np

from marl_lightning.envs.base import MultiAgentEnv, Observations, VectorEnv
from marl_lightning.envs.interfaces.layout import FlatGame, Layout
from marl_lightning.envs.spec import EnvSpec
from marl_lightning.envs.wrappers import Wrapper, layers

RewardAggregation = Literal["sum", "mean", "none", "first"]

Env = TypeVar("Env", MultiAgentEnv, VectorEnv)


class Host(Generic[Env]):
    """What :class:`Interface` and the vector environments over interfaces have in common.

    Args:
        env: what is played: a :class:`FlatGame` or a vector environment of them, or wrappers around it.
    """

    def __init__(self, env: Env) -> None:
        self._rng = np.random.default_rng()
        self._attach(env)

    def _attach(self, env: Env) -> None:
        """Sets what is played, which has to be reset."""
        self._env = env
        self._layout = Layout(env.spec)

    @property
    def spec(self) -> EnvSpec:
        """Description of one instance of what is played."""
        return self._env.spec

    @property
    def reward_aggr(self) -> RewardAggregation:
        """How the rewards of the agents were made one."""
        return self.spec.metadata["reward_aggr"]

    @property
    def n_agents(self) -> int:
        """Number of agents, of all groups together."""
        return self._layout.num_agents

    @property
    def agents(self) -> tuple[str, ...]:
        """Names of the agents, in the order in which arrays have them."""
        return self._layout.agents

    @property
    def unwrapped(self) -> Env:
        """The environment of this library inside all wrappers."""
        return self._env.unwrapped if isinstance(self._env, Wrapper) else self._env

    def get_obs_size(self) -> int:
        """Returns the length of an observation."""
        return self._layout.observation_size

    def get_state_size(self) -> int:
        """Returns the length of the state."""
        return self._layout.state_size

    def get_action_size(self) -> int:
        """Returns the number of actions of the agent that has most, or of dimensions if they are continuous."""
        return self._layout.action_size

    def wrap(self, wrapper: Callable[[Env], Env]) -> Self:
        """Returns the same interface to a wrapped game, of which it takes ownership; call ``reset`` on it.

        Example::

            from marl_lightning.envs import wrappers

            env = env.wrap(partial(wrappers.TimeLimit, max_episode_steps=150))

        Args:
            wrapper: puts a wrapper of :mod:`marl_lightning.envs.wrappers` around an environment.
        """
        wrapped = copy.copy(self)
        wrapped._attach(wrapper(self._env))
        return wrapped

    def has_wrapper_attr(self, name: str) -> bool:
        """Returns whether the interface, a wrapper or the game has the public attribute ``name``."""
        try:
            self.get_wrapper_attr(name)
        except AttributeError:
            return False
        return True

    def get_wrapper_attr(self, name: str) -> Any:
        """Returns the public attribute ``name`` of the interface, the outermost wrapper that has it, or the game.

        Raises:
            AttributeError: if there is none.
        """
        _check_public(name)
        return getattr(self if hasattr(self, name) else self._env, name)

    def set_wrapper_attr(self, name: str, value: Any) -> None:
        """Sets the public attribute ``name`` of the outermost wrapper that has it, or of the game.

        Raises:
            AttributeError: if there is none.
        """
        _check_public(name)
        for layer in (*layers(self._env), self.unwrapped):
            if name in vars(layer) or hasattr(type(layer), name):
                setattr(layer, name, value)
                return
        raise AttributeError(f"neither a wrapper nor {type(self.unwrapped).__name__} has the attribute {name!r}")


class Interface(Host[MultiAgentEnv]):
    """One instance of any game, numpy in and out, with the agents of all groups along one axis of length ``A``.

    ===================  ==============================================================================================
    observations         ``[A, O]``, flattened, shorter ones followed by zeros; in the dtype of the game
    state                ``[S]`` float32
    available actions    ``[A, K]`` bool, False for actions that an agent does not have; if actions are continuous, the
                         dimensions that an agent has
    agent mask           ``[A]`` bool, who is alive
    actions              ``[A]`` integers; ``[A, P]`` if they have several parts, which available actions hold one after
                         another; ``[A, K]`` floats if they are continuous, of which each agent's own dimensions count
    reward               a float, or ``[A]`` float32 with ``reward_aggr="none"``
    terminated           the game is over; nothing may be bootstrapped
    truncated            the episode was cut, by a time limit say; values may be bootstrapped unless it terminated too
    info                 numbers that the game reports
    ===================  ==============================================================================================

    Agents that are dead observe zeros, have exactly one legal action (if actions are continuous, all are alike), and
    earn 0. All arrays are copies.

    Args:
        env: an instance of a game; taken over.
        reward_aggr: ``"sum"`` or ``"mean"`` of the rewards of all agents, that of the ``"first"`` agent, or ``"none"``
            for one each. Where all agents get the reward of their team, ``"first"`` is that reward and ``"sum"`` is
            ``A`` times as much.

    Raises:
        TypeError: if ``env`` is not a :class:`MultiAgentEnv`.
        ValueError: if ``reward_aggr`` is unknown, or some agents have discrete actions and others continuous ones.

    Everything but sizes and ``reset`` raises ``RuntimeError`` before the first ``reset``, and after ``close``.
    """

    def __init__(self, env: MultiAgentEnv, *, reward_aggr: RewardAggregation = "sum") -> None:
        if not isinstance(env, MultiAgentEnv):
            raise TypeError(f"Interface needs a MultiAgentEnv, got {type(env).__name__}; make_env returns one")
        super().__init__(FlatGame(env, reward_aggr=reward_aggr))

    def _attach(self, env: MultiAgentEnv) -> None:
        super()._attach(env)
        self._observations: Observations[np.ndarray] | None = None
        self._has_begun = False

    def reset(self, *, seed: int | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Starts an episode and returns its observations and an empty ``info``.

        Args:
            seed: determines this and all later episodes, and what :meth:`sample` draws. The very first one is drawn at
                random by default; later, ``None`` goes on to the next episode.
        """
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        elif not self._has_begun:
            seed = random_seed()
        self._observations = self._env.reset(seed=seed)
        self._has_begun = True
        return self._layout.observations(self._observations), {}

    def step(self, actions: Any) -> tuple[np.ndarray, float | np.ndarray, bool, bool, dict[str, float]]:
        """Makes one step and returns observations, reward, terminated, truncated and info.

        Raises:
            ValueError: if actions have a wrong shape or kind, or are not legal.
            RuntimeError: if the episode is over.
        """
        alive = self.get_agent_mask()
        step = self._env.step(self._layout.actions(actions, ()))
        self._observations = step.observations
        reward = self._layout.reward(step.reward, alive)
        return (
            self._layout.observations(step.observations),
            float(reward) if self._layout.is_shared else reward,
            bool(step.terminated),
            bool(step.truncated),
            dict(step.info),
        )

    def get_state(self) -> np.ndarray:
        """Returns the global state; that of a game without one holds the observations of all agents."""
        return self._now().state.copy()

    def get_avail_actions(self) -> np.ndarray:
        """Returns the available actions."""
        return self._layout.available_actions(self._now())

    def get_agent_mask(self) -> np.ndarray:
        """Returns who is alive."""
        return self._layout.agent_mask(self._now())

    def sample(self) -> np.ndarray:
        """Returns random legal actions."""
        return self._layout.sample(self.get_avail_actions(), self._rng)

    def render(self) -> np.ndarray:
        """Returns the current picture, see :meth:`MultiAgentEnv.render`."""
        return self._env.render()

    def close(self) -> None:
        """Frees what the game holds. May be called repeatedly."""
        self._observations = None
        self._env.close()

    def _now(self) -> Observations[np.ndarray]:
        if self._observations is None:
            raise RuntimeError("the environment has not been reset, or is closed: call reset first")
        return self._observations


def random_seed() -> int:
    """Returns a seed drawn at random, which leaves room for those of many instances."""
    return int(np.random.default_rng().integers(2**30))


def take_game(make_interface: Callable[[], Interface]) -> MultiAgentEnv:
    """Returns the game, wrappers included, of the interface that ``make_interface`` returns.

    Raises:
        TypeError: if it returns something else.
    """
    interface = make_interface()
    if not isinstance(interface, Interface):
        raise TypeError(
            f"the functions in env_fns must return an Interface, got {type(interface).__name__}; "
            "Interface(env) makes one of a MultiAgentEnv"
        )
    return interface._env


def _check_public(name: str) -> None:
    if name.startswith("_"):
        raise AttributeError(f"{name!r} is private to a wrapper or an environment")
