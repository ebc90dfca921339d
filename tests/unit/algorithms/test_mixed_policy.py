"""Profiles of several policies: each agent acts as its own policy does alone."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from marl_lightning.algorithms import IPPO
from marl_lightning.algorithms.mixed import MixedPolicy
from marl_lightning.envs import EnvSpec, GroupSpec, Observations, make_vector_env
from marl_lightning.evaluation import evaluate

WALKERS = GroupSpec(
    agents=("w0", "w1", "w2"), observation_space=spaces.Box(-9, 9, (2,)), action_space=spaces.Discrete(3)
)
BIRDS = GroupSpec(
    agents=("b0", "b1"), observation_space=spaces.Box(-9, 9, (1,)), action_space=spaces.Box(-2.0, 2.0, (1,), np.float32)
)
SPEC = EnvSpec(name="test/zoo", groups={"walkers": WALKERS, "birds": BIRDS}, state_size=1)
ONE_GROUP = EnvSpec(name="test/walkers", groups={"walkers": WALKERS}, state_size=1)


def observations(num_envs, spec=SPEC, seed=0):
    generator = torch.Generator().manual_seed(seed)
    groups = spec.groups.items()
    return Observations(
        observation={
            n: torch.randn(num_envs, g.num_agents, *g.observation_shape, generator=generator) for n, g in groups
        },
        action_mask={
            n: torch.ones(num_envs, g.num_agents, g.action_size, dtype=torch.bool) for n, g in groups if g.is_discrete
        },
        alive={n: torch.ones(num_envs, g.num_agents, dtype=torch.bool) for n, g in groups},
        state=torch.zeros(num_envs, 1),
    )


def policy(seed, spec=SPEC, **options):
    torch.manual_seed(seed)
    return IPPO(spec=spec, hidden_sizes=(8,), output_gain=3.0, **options).policy.eval()


class Constant:
    """Everybody takes the same action; counts how often it was asked. No module, and states no probabilities."""

    def __init__(self, action):
        self.action, self.calls = action, 0

    def initial_state(self, num_envs):
        return {"steps": torch.zeros(num_envs)}

    def act(self, observations, state, is_first, *, deterministic=False, generator=None):
        self.calls += 1
        actions = {
            name: torch.full((len(is_first), group.num_agents, *group.action_shape), self.action)
            for name, group in SPEC.groups.items()
        }
        log_probs = {
            name: torch.full((len(is_first), g.num_agents), -float(self.action)) for name, g in SPEC.groups.items()
        }
        return actions, log_probs, {"steps": torch.where(is_first, 0.0, state["steps"]) + self.action}

    def env_actions(self, actions):
        return {name: action * 10 for name, action in actions.items()}


def test_agents_of_all_groups_get_what_their_policy_answers():
    low, high = Constant(1), Constant(2)
    mixed = MixedPolicy(policies={"w0": low, "w1": high, "w2": low, "b0": high, "b1": low}, spec=SPEC)
    state, is_first = mixed.initial_state(2), torch.tensor([True, True])
    for step in (1, 2):
        actions, log_probs, state = mixed.act(observations(2), state, is_first)
        assert actions["walkers"].tolist() == [[1, 2, 1]] * 2
        assert actions["birds"].tolist() == [[[2], [1]]] * 2
        assert log_probs["walkers"].tolist() == [[-1.0, -2.0, -1.0]] * 2
        assert {key: value.tolist() for key, value in state.items()} == {
            "0/steps": [1.0 * step] * 2,
            "1/steps": [2.0 * step] * 2,
        }
        is_first = torch.tensor([False, False])
    assert (low.calls, high.calls) == (2, 2)
    assert mixed.env_actions(actions)["walkers"].tolist() == [[10, 20, 10]] * 2
    assert list(mixed.parameters()) == []


def test_one_policy_for_everybody_is_that_policy():
    alone = policy(0, recurrent=True)
    mixed = MixedPolicy(policies=dict.fromkeys(SPEC.agents, alone), spec=SPEC)
    results = []
    for profile in (alone, mixed):
        state, generator = profile.initial_state(4), torch.Generator().manual_seed(5)
        for step in range(3):
            actions, log_probs, state = profile.act(
                observations(4, seed=step), state, torch.full((4,), step == 0), generator=generator
            )
        results.append(
            (*actions.values(), *log_probs.values(), *state.values(), *profile.env_actions(actions).values())
        )
    assert all(a.equal(b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("recurrent", [False, True])
def test_policies_act_and_remember_as_they_do_alone(recurrent):
    """Of three policies, one of another size; the birds of one squash their actions, those of the others clip."""
    first, second = policy(0, recurrent=recurrent), policy(1, recurrent=recurrent, squash_actions=True)
    torch.manual_seed(2)
    third = IPPO(spec=SPEC, hidden_sizes=(5,), recurrent=recurrent, share_parameters=False, layer_norm=False).policy
    owners = {"w0": second, "w1": third, "w2": first, "b0": first, "b1": second}
    mixed = MixedPolicy(policies=owners, spec=SPEC)
    states = {id(p): p.initial_state(6) for p in owners.values()}
    state = mixed.initial_state(6)
    for step in range(5):
        seen = observations(6, seed=step)
        is_first = torch.rand(6, generator=torch.Generator().manual_seed(step)) < (1.0 if step == 0 else 0.3)
        actions, log_probs, state = mixed.act(seen, state, is_first, deterministic=True)
        played = mixed.env_actions(actions)
        for p in (first, second, third):
            own, own_log_probs, states[id(p)] = p.act(seen, states[id(p)], is_first, deterministic=True)
            own_played = p.env_actions(own)
            for name, group in SPEC.groups.items():
                for i, agent in enumerate(group.agents):
                    if owners[agent] is p:
                        assert actions[name][:, i].equal(own[name][:, i])
                        assert log_probs[name][:, i].equal(own_log_probs[name][:, i])
                        assert played[name][:, i].equal(own_played[name][:, i])
    assert bool(state) == recurrent
    assert not played["birds"][:, 0].equal(played["birds"][:, 1])


def test_probabilities_are_those_of_each_policy():
    first, second = policy(0, ONE_GROUP), policy(1, ONE_GROUP)
    mixed = MixedPolicy(policies={"w0": first, "w1": second, "w2": first}, spec=ONE_GROUP)
    seen, is_first = observations(4, ONE_GROUP), torch.ones(4, dtype=torch.bool)
    for deterministic in (False, True):
        stated, _ = mixed.action_probabilities(seen, {}, is_first, deterministic=deterministic)
        own = [p.action_probabilities(seen, {}, is_first, deterministic=deterministic)[0] for p in (first, second)]
        for i, k in enumerate((0, 1, 0)):
            assert stated["walkers"][:, i].equal(own[k]["walkers"][:, i])
        assert not own[0]["walkers"].equal(own[1]["walkers"])


def test_a_policy_without_probabilities_is_named():
    mixed = MixedPolicy(policies={"w0": policy(0, ONE_GROUP), "w1": Constant(1), "w2": Constant(1)}, spec=ONE_GROUP)
    with pytest.raises(TypeError, match="a Constant cannot state the probabilities"):
        mixed.action_probabilities(observations(1, ONE_GROUP), {}, torch.ones(1, dtype=torch.bool))


def test_modules_are_parts_and_are_evaluated_in_evaluation_mode():
    first, second = (policy(seed, make_vector_env("matrix/prisoners_dilemma", num_envs=1).spec) for seed in (0, 1))
    modes = []
    next(iter(first.values())).register_forward_pre_hook(lambda module, _: modes.append(module.training))
    with make_vector_env("matrix/prisoners_dilemma", num_envs=2) as env:
        agents = env.spec.agents
        mixed = MixedPolicy(policies=dict(zip(agents, (first, second), strict=True)), spec=env.spec).train()
        assert isinstance(mixed, nn.Module)
        assert len(list(mixed.parameters())) == len([*first.parameters(), *second.parameters()])
        evaluate(mixed, env, episodes=2)
    assert set(modes) == {False}
    assert first.training


def test_agents_without_a_policy_and_names_that_are_no_agents_are_listed():
    with pytest.raises(ValueError, match=r"no policy for w1, b0; there is no agent w9: give .* w0, w1, w2, b0, b1"):
        MixedPolicy(policies=dict.fromkeys(("w0", "w2", "b1", "w9"), Constant(0)), spec=SPEC)
