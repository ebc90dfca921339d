"""check_env accepts what is right and names each mistake."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scripted import CounterGame, LeavingGame

from marl_lightning.envs import PettingZooAdapter, SyncVectorEnv, check_env, make_env, make_vector_env
from marl_lightning.envs.registry import registered_environments

# Other families have thousands of names, or slow packages, and call check_env in tests of their own.
OURS = [name for name in registered_environments() if name.startswith(("smac/", "matrix/", "mpe/"))]


@pytest.mark.parametrize("name", OURS)
def test_registered_environments_pass(name):
    # MPE episodes have 25 steps, so that these are enough to see an end.
    with make_vector_env(name, num_envs=3) as env:
        check_env(env, steps=30)
    check_env(make_env(name), steps=30, seed=1)


def test_smac_passes_over_several_episodes():
    with make_vector_env("smac/3m", num_envs=8) as env:
        check_env(env, steps=200)


@pytest.mark.parametrize("seed", [0, 11])
def test_scripted_environments_pass(seed):
    check_env(CounterGame(), seed=seed)
    check_env(SyncVectorEnv(factory=CounterGame, num_envs=1, seed=3), seed=seed)
    check_env(SyncVectorEnv(factory=CounterGame, num_envs=4, seed=3), seed=seed)
    check_env(PettingZooAdapter(factory=lambda: LeavingGame({"a_0": (2, "truncated"), "b_0": (4, "terminated")})))


def test_global_generators_are_left_alone():
    numpy_state, torch_state = np.random.get_state()[1].copy(), torch.get_rng_state()  # noqa: NPY002
    check_env(CounterGame())
    check_env(SyncVectorEnv(factory=CounterGame, num_envs=2, seed=0))
    assert np.array_equal(np.random.get_state()[1], numpy_state)  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), torch_state)


# ---------------------------------------------------------------------------------------- mistakes of one instance


def on_step(change):
    """A game in which ``change(game, step)`` spoils the result of every step."""

    class Broken(CounterGame):
        def step(self, actions):
            step = super().step(actions)
            return change(self, step) or step

    return Broken


def on_observe(change):
    """A game in which ``change(game, observations)`` spoils every decision point."""

    class Broken(CounterGame):
        def observe(self):
            observations = super().observe()
            change(self, observations)
            return observations

    return Broken


def put(kind, group, function):
    def change(game, observations):
        values = getattr(observations, kind)
        values[group] = function(values[group])

    return change


def nan_observation(game, observations):
    observations.observation["red"][0, 2] = np.nan


def no_legal_action(game, observations):
    observations.action_mask["red"][0] = False


def dead_agents_free(game, observations):
    observations.action_mask["red"][:] = True


def dead_agents_paid(game, step):
    step.reward["red"][1] = 1.0


def missing_group(game, observations):
    del observations.alive["blue"]


def mask_for_continuous(game, observations):
    observations.action_mask["blue"] = np.ones((1, 2), np.bool_)


def short_state(game, observations):
    observations.state = observations.state[:2]


def infinite_state(game, observations):
    observations.state[2] = np.inf


def set_reward(group, value):
    def change(game, step):
        step.reward[group] = value

    return change


class OutOfBounds(CounterGame):
    """Observations leave the bounds of their space."""

    def __init__(self):
        super().__init__()
        groups = {
            name: replace(group, observation_space=type(group.observation_space)(-1, 1, (4,), np.float32))
            for name, group in self.spec.groups.items()
        }
        self.spec = replace(self.spec, groups=groups)


class WrongLimit(CounterGame):
    def __init__(self):
        super().__init__(length=5)
        self.spec = replace(self.spec, episode_limit=4)


class Unseeded(CounterGame):
    def reset(self, *, seed=None):
        return super().reset(seed=None)


class SeededOnce(CounterGame):
    """Draws anew in an episode without a seed, as games do that make a generator of every seed they get."""

    def __init__(self):
        super().__init__(length=300)

    def reset(self, *, seed=None):
        if seed is None:
            self.rng = np.random.default_rng()
        return super().reset(seed=seed)


class SameArrays(CounterGame):
    """Fills the arrays that it has returned before."""

    kept = None

    def observe(self):
        observations = super().observe()
        if self.kept is None:
            self.kept = observations
        self.kept.state[:] = observations.state
        for kind in ("observation", "action_mask", "alive"):
            for name, array in getattr(observations, kind).items():
                getattr(self.kept, kind)[name][:] = array
        return self.kept


class Tolerant(CounterGame):
    def step(self, actions):
        return super().step({**actions, "red": actions["red"] % 3})


class Unmasked(CounterGame):
    """Forbids an action, but takes it."""

    def observe(self):
        observations = super().observe()
        observations.action_mask["red"][:, 2] = False
        return observations


class Endless(CounterGame):
    """Begins an episode by itself when it is stepped after the end."""

    def step(self, actions):
        if self.over:
            self.reset()
        return super().step(actions)


class Forgetful(CounterGame):
    def state_dict(self):
        return {**super().state_dict(), "numbers": [0, 0, 0.0]}


class AliasedState(CounterGame):
    """state_dict hands out its own list, which changes later."""

    def state_dict(self):
        self.numbers = getattr(self, "numbers", [0, 0, 0.0])
        self.numbers[:] = [self.episode, self.time, self.noise]
        return {**super().state_dict(), "numbers": self.numbers}

    def step(self, actions):
        step = super().step(actions)
        if hasattr(self, "numbers"):
            self.numbers[1] += 1
        return step


class PlainTuple(CounterGame):
    def step(self, actions):
        step = super().step(actions)
        return step.observations, step.reward, step.terminated, step.truncated, step.info


MISTAKES = {
    "observation shape": (on_observe(put("observation", "red", lambda x: x[:, :3])), r"observation of 'red'.*\(2, 4\)"),
    "observation dtype": (on_observe(put("observation", "blue", np.float64)), "must be float32 of shape"),
    "observation NaN": (on_observe(nan_observation), r"NaN or outside of its observation_space .* \(agent 'red_0'\)"),
    "observation bounds": (OutOfBounds, "widen the bounds"),
    "mask dtype": (on_observe(put("action_mask", "red", np.int8)), "action_mask of 'red' must be bool"),
    "mask without legal action": (on_observe(no_legal_action), r"without a legal action \(agent 'red_0'\)"),
    "mask of a dead agent": (on_observe(dead_agents_free), "exactly one legal action"),
    "mask of a continuous group": (on_observe(mask_for_continuous), "action_mask must have the groups"),
    "alive dtype": (on_observe(put("alive", "red", np.int64)), "alive of 'red' must be bool"),
    "missing group": (on_observe(missing_group), "alive must have the groups"),
    "state size": (on_observe(short_state), "spec.state_size=3"),
    "state not finite": (on_observe(infinite_state), "state has NaN or infinite"),
    "reward dtype": (on_step(set_reward("blue", np.ones(1))), "reward of 'blue'.*must be float32"),
    "reward shape": (on_step(set_reward("red", np.float32(1))), "reward of 'red', one an agent"),
    "reward NaN": (
        on_step(set_reward("blue", np.full(1, np.nan, np.float32))),
        r"NaN or infinite entries \(agent 'blue_0'\)",
    ),
    "reward group": (on_step(lambda game, step: step.reward.pop("blue") and None), "reward must have the groups"),
    "reward of a dead agent": (on_step(dead_agents_paid), "not alive before the step must get reward 0"),
    "flag type": (
        on_step(lambda game, step: replace(step, terminated=np.bool_(step.terminated))),
        "terminated must be a Python bool",
    ),
    "info keys": (on_step(lambda game, step: replace(step, info={})), r"keys of spec.info_keys, \['score'\], got \[\]"),
    "info value": (on_step(lambda game, step: replace(step, info={"score": "many"})), "info 'score' must be a number"),
    "result type": (PlainTuple, "step must return a Step, got tuple"),
    "episode limit": (WrongLimit, "goes on at its step 4"),
    "determinism": (Unseeded, "must determine this and all later episodes"),
    "determinism of later episodes": (SeededOnce, "of the next episode differs"),
    "ownership": (SameArrays, "that reset had returned"),
    "illegal actions": (Tolerant, "an action of 'red' that is not legal must raise ValueError"),
    "masked actions": (Unmasked, "an action of 'red' that is not legal by its action_mask must raise ValueError"),
    "step after the end": (Endless, "step after the end of an episode must raise RuntimeError"),
    "state_dict incomplete": (Forgetful, "state_dict must return copies"),
    "state_dict aliased": (AliasedState, "state_dict must return copies"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_of_one_instance(mistake):
    game, message = MISTAKES[mistake]
    with pytest.raises(ValueError, match=message):
        check_env(game())


# ------------------------------------------------------------------------------------ mistakes of a vector environment


class FinalIsReset(SyncVectorEnv):
    """Writes the first observations of the next episode where the true successor belongs."""

    def step(self, actions):
        step = super().step(actions)
        ended = step.terminated | step.truncated
        for kind in ("observation", "action_mask", "alive"):
            for name, tensor in getattr(step.final, kind).items():
                tensor[ended] = getattr(step.observations, kind)[name][ended]
        step.final.state[ended] = step.observations.state[ended]
        return step


class FinalIsShared(SyncVectorEnv):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self._tensors.final.alive["blue"] = self._tensors.observations.alive["blue"]


class NoFinal(SyncVectorEnv):
    def step(self, actions):
        step = super().step(actions)
        step.final.action_mask["red"].zero_()
        return step


class PartialResetsAll(SyncVectorEnv):
    def reset(self, *, seed=None, mask=None):
        observations = super().reset(seed=seed, mask=mask)
        return observations if mask is None else super().reset()


class AnyMask(SyncVectorEnv):
    def reset(self, *, seed=None, mask=None):
        if mask is not None and mask.dtype != np.bool_:
            mask = mask.astype(np.bool_)
        return super().reset(seed=seed, mask=mask)


class SeedWithMask(SyncVectorEnv):
    def reset(self, *, seed=None, mask=None):
        return super().reset(seed=seed, mask=None if seed is not None and mask is not None else mask)


class SeedNotKept(SyncVectorEnv):
    def reset(self, *, seed=None, mask=None):
        kept, observations = self.seed, super().reset(seed=seed, mask=mask)
        self.seed = kept
        return observations


class SameSeeds(SyncVectorEnv):
    """All instances get the same seed."""

    def reset(self, *, seed=None, mask=None):
        observations = super().reset(seed=seed, mask=mask)
        if mask is None and (seed is not None or not hasattr(self, "reseeded")):
            self.reseeded = True
            for index, env in enumerate(self._envs):
                observations.state[index] = torch.from_numpy(env.reset(seed=self.seed).state)
        return observations


class NewObjects(SyncVectorEnv):
    def step(self, actions):
        return replace(super().step(actions))


class StepsAtOnce(SyncVectorEnv):
    def step(self, actions):
        if not self._started:
            self.reset()
        return super().step(actions)


class ReturnsItself(SyncVectorEnv):
    def replicate(self, *, num_envs, seed):
        return self


class UnsafeState(SyncVectorEnv):
    def state_dict(self):
        return {**super().state_dict(), "when": np.arange(2)}


class ForgetsSomething(SyncVectorEnv):
    def load_state_dict(self, state):
        games = zip(state["envs"], self._envs, strict=True)
        return super().load_state_dict(
            {**state, "envs": [{**old, "rng": env.state_dict()["rng"]} for old, env in games]}
        )


class OneNaN(SyncVectorEnv):
    def step(self, actions):
        step = super().step(actions)
        step.observations.observation["red"][1, 0, 3] = np.nan
        return step


class OneNaNInFinal(SyncVectorEnv):
    def step(self, actions):
        step = super().step(actions)
        step.final.state[1] = np.nan
        return step


class FloatFlags(SyncVectorEnv):
    def step(self, actions):
        step = super().step(actions)
        return replace(step, terminated=step.terminated.float())


VECTOR_MISTAKES = {
    "final is the reset": (FinalIsReset, "write the true successor into final"),
    "final shares memory": (FinalIsShared, "alive of 'blue' of final and of observations share memory"),
    "final is not written": (NoFinal, "final of step: .* without a legal action"),
    "partial reset touches others": (PartialResetsAll, "instance outside of the mask"),
    "mask of any dtype": (AnyMask, "reset with a mask of a wrong dtype must raise ValueError"),
    "seed with a mask": (SeedWithMask, "reset with a mask together with a seed must raise ValueError"),
    "seed is not kept": (SeedNotKept, "must set env.seed"),
    "seeds of instances": (SameSeeds, r"seeded with seed \+ i"),
    "new objects": (NewObjects, "same objects every time"),
    "step before reset": (StepsAtOnce, "step before the first reset must raise RuntimeError"),
    "replicate": (ReturnsItself, "replicate must return a new environment"),
    "unsafe state_dict": (UnsafeState, r"state_dict\['when'\] is a ndarray"),
    "state_dict incomplete": (ForgetsSomething, "state_dict must return copies"),
    "flag dtype": (FloatFlags, "terminated must be bool"),
    "NaN": (OneNaN, r"step: observation of 'red' has .* \(environment 1, agent 'red_0'\)"),
    "NaN in final": (OneNaNInFinal, r"final of step: state has NaN .* \(environment 1\)"),
}


@pytest.mark.parametrize("mistake", VECTOR_MISTAKES)
def test_mistakes_of_a_vector_environment(mistake, monkeypatch):
    kind, message = VECTOR_MISTAKES[mistake]
    if kind is not ReturnsItself:
        # Copies must have the same mistake.
        monkeypatch.setattr(
            kind, "replicate", lambda self, *, num_envs, seed: kind(factory=self._factory, num_envs=num_envs, seed=seed)
        )
    with pytest.raises(ValueError, match=message):
        check_env(kind(factory=CounterGame, num_envs=3, seed=3))


def test_without_autoreset():
    with pytest.raises(ValueError, match="check_env needs an environment that resets"):
        check_env(SyncVectorEnv(factory=CounterGame, num_envs=3, seed=3, autoreset=False))
