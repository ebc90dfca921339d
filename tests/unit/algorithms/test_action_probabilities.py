"""Probabilities that policies state are those that they draw from."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from marl_lightning.algorithms import DCG, DQN, IPPO, IQL, MFQ, PR2IQL, VDN
from marl_lightning.clock import Schedule
from marl_lightning.envs import EnvSpec, GroupSpec, Observations

ROWS = 20_000


def spec_of(action_space: spaces.Space) -> EnvSpec:
    group = GroupSpec(
        agents=("a", "b"), observation_space=spaces.Box(-1, 1, (3,), np.float32), action_space=action_space
    )
    return EnvSpec(name="test", groups={"team": group}, state_size=6)


SPEC = spec_of(spaces.Discrete(4))
MASK = torch.tensor([[True, True, False, True], [False, True, True, False]])


def decision(rows: int) -> Observations:
    """The same decision point many times."""
    observation = torch.linspace(-1, 1, 6).view(2, 3)
    return Observations(
        observation={"team": observation.expand(rows, 2, 3)},
        action_mask={"team": MASK.expand(rows, 2, 4)},
        alive={"team": torch.ones(rows, 2, dtype=torch.bool)},
        state=observation.flatten().expand(rows, 6),
    )


def softened(module, kind="epsilon", rate=0.3):
    """Makes values and logits differ between actions, and explores."""
    torch.manual_seed(0)
    for parameter in module.policy.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    if hasattr(module.policy, "schedule"):
        module.policy.kind, module.policy.schedule = kind, Schedule(start=rate, end=rate, anneal_env_steps=0)
        module.policy.explore_at(0)
    return module.policy.eval()


FROZEN = {"trainable_agents": ["a"], "share_parameters": False}
POLICIES = {
    "ippo": lambda: softened(IPPO(spec=SPEC)),
    "ippo_gru": lambda: softened(IPPO(spec=SPEC, recurrent=True)),
    "iql_epsilon": lambda: softened(IQL(spec=SPEC)),
    "iql_boltzmann": lambda: softened(IQL(spec=SPEC, recurrent=True), "boltzmann", 0.7),
    "iql_greedy_opponent": lambda: softened(IQL(spec=SPEC, **FROZEN)),
    "iql_softmax_opponent": lambda: softened(
        IQL(spec=SPEC, opponent_mode="softmax", opponent_rate=0.5, **FROZEN), rate=0.9
    ),
    "iql_epsilon_opponent": lambda: softened(
        IQL(spec=SPEC, opponent_mode="epsilon", opponent_rate=0.5, **FROZEN), rate=0.1
    ),
    "vdn": lambda: softened(VDN(spec=SPEC)),
    "pr2": lambda: softened(PR2IQL(spec=SPEC), "boltzmann", 0.5),
    "dcg_epsilon": lambda: softened(DCG(spec=SPEC)),
    "dcg_boltzmann": lambda: softened(DCG(spec=SPEC), "boltzmann", 0.5),
}


@pytest.mark.parametrize("name", POLICIES)
def test_frequencies_are_the_probabilities(name):
    policy = POLICIES[name]()
    state, first = policy.initial_state(ROWS), torch.ones(ROWS, dtype=torch.bool)
    with torch.no_grad():
        probabilities, next_state = policy.action_probabilities(decision(ROWS), state, first)
        actions, _, expected_state = policy.act(
            decision(ROWS), state, first, generator=torch.Generator().manual_seed(0)
        )
    stated = probabilities["team"][0]
    assert (stated[~MASK] == 0).all()
    assert stated.sum(-1).tolist() == pytest.approx([1, 1])
    drawn = torch.nn.functional.one_hot(actions["team"], 4).float().mean(0)
    # four standard deviations of a frequency of 20,000 draws are at most 0.015
    assert drawn.flatten().tolist() == pytest.approx(stated.flatten().tolist(), abs=0.015)
    assert all(torch.equal(next_state[key], value) for key, value in expected_state.items())


@pytest.mark.parametrize("name", POLICIES)
def test_deterministic_is_all_on_the_action_taken(name):
    policy = POLICIES[name]()
    first = torch.ones(1, dtype=torch.bool)
    with torch.no_grad():
        arguments = (decision(1), policy.initial_state(1), first)
        probabilities, _ = policy.action_probabilities(*arguments, deterministic=True)
        actions, _, _ = policy.act(*arguments, deterministic=True)
    assert torch.equal(probabilities["team"].argmax(-1), actions["team"])
    assert probabilities["team"].sum(-1).tolist() == [[1, 1]]
    assert ((probabilities["team"] == 0) | (probabilities["team"] == 1)).all()


def test_memory_is_read_and_cleared():
    policy = POLICIES["ippo_gru"]()
    state = {key: torch.rand_like(value) for key, value in policy.initial_state(1).items()}
    with torch.no_grad():
        goes_on, _ = policy.action_probabilities(decision(1), state, torch.tensor([False]))
        begins, _ = policy.action_probabilities(decision(1), state, torch.tensor([True]))
        fresh, _ = policy.action_probabilities(decision(1), policy.initial_state(1), torch.tensor([False]))
    assert torch.equal(begins["team"], fresh["team"])
    assert not torch.equal(begins["team"], goes_on["team"])


def test_what_has_no_probabilities_says_so():
    first = torch.ones(1, dtype=torch.bool)
    noisy = DQN(spec=SPEC, noisy=True).policy.eval()
    with pytest.raises(TypeError, match="noisy networks"):
        noisy.action_probabilities(decision(1), noisy.initial_state(1), first)
    greedy, _ = noisy.action_probabilities(decision(1), noisy.initial_state(1), first, deterministic=True)
    assert greedy["team"].sum(-1).tolist() == [[1, 1]]
    mean_field = MFQ(spec=SPEC).policy
    with pytest.raises(TypeError, match="mean-field"):
        mean_field.action_probabilities(decision(1), mean_field.initial_state(1), first)
    continuous = IPPO(spec=spec_of(spaces.Box(-1, 1, (2,), np.float32))).policy
    with pytest.raises(TypeError, match=r"'team'.*Discrete"):
        continuous.action_probabilities(decision(1), continuous.initial_state(1), first)
