"""The members of the Q-learning family: their losses by hand, what they learn, and that all of them train."""

import itertools
from dataclasses import replace

import lightning
import numpy as np
import pytest
import torch
from gymnasium import spaces
from scripted import CounterGame
from tensordict import TensorDict
from torch import nn

from marl_lightning.algorithms import (
    CWQMIX,
    DCG,
    DCGS,
    DQN,
    IQL,
    MFQ,
    OWQMIX,
    QATTEN,
    QMIX,
    QPLEX,
    QTRAN,
    SHAQ,
    VDN,
)
from marl_lightning.algorithms.mfq import boltzmann_value, mean_actions
from marl_lightning.data import schema
from marl_lightning.data.replay import ReplayBatch, ReplayDataModule
from marl_lightning.envs import EnvSpec, GroupSpec
from marl_lightning.envs.base import Observations
from marl_lightning.envs.native.matrix import MatrixVectorEnv
from marl_lightning.envs.vector.sync import SyncVectorEnv
from marl_lightning.losses.distributional import categorical_loss, quantile_huber_loss

BOX = spaces.Box(-np.inf, np.inf, (4,), np.float32)
SPEC = EnvSpec(
    name="test/groups",
    groups={
        "red": GroupSpec(agents=("red_0", "red_1"), observation_space=BOX, action_space=spaces.Discrete(3)),
        "blue": GroupSpec(agents=("blue_0",), observation_space=BOX, action_space=spaces.Discrete(2)),
    },
    state_size=3,
)
SINGLE = EnvSpec(
    name="test/single",
    groups={"agent": GroupSpec(agents=("agent_0",), observation_space=BOX, action_space=spaces.Discrete(3))},
    state_size=4,
)

MEMBERS = {
    "IQL": (IQL, {}),
    "VDN": (VDN, {}),
    "QMIX": (QMIX, {}),
    "OWQMIX": (OWQMIX, {"central_hidden_size": 16}),
    "CWQMIX": (CWQMIX, {"central_hidden_size": 16}),
    "QTRAN-base": (QTRAN, {"embedding_size": 8}),
    "QTRAN-alt": (QTRAN, {"variant": "alt", "embedding_size": 8}),
    "QPLEX": (QPLEX, {}),
    "QATTEN": (QATTEN, {}),
    "SHAQ": (SHAQ, {}),
    "DCG": (DCG, {"payoff_size": 8}),
    "DCG-none": (DCG, {"topology": "none"}),
    "DCG-rank": (DCG, {"topology": "line", "payoff_rank": 2}),
    "DCG-S": (DCGS, {}),
    "MFQ": (MFQ, {"team_reward": None}),
    "MFQ-max": (MFQ, {"temperature": None}),
    "DQN": (DQN, {}),
    "DQN-dueling-noisy": (DQN, {"dueling": True, "noisy": True}),
    "DQN-c51": (DQN, {"distributional": "c51", "n_steps": 2}),
    "DQN-quantile": (DQN, {"distributional": "quantile", "num_atoms": 5, "team_reward": None}),
    "DQN-rainbow": (DQN, {"dueling": True, "noisy": True, "distributional": "c51", "num_atoms": 11}),
}
NOT_JOINT = ("IQL", "MFQ", "DQN")


def make_batch(spec, *, length=5, rows=6, burn_in=0, seed=0, deaths=True):
    """Random sequences with masks, deaths, ends of episodes and padding at the end of the last row."""
    rng = torch.Generator().manual_seed(seed)
    size = (burn_in + length, rows)

    def rand(*shape):
        return torch.rand(*size, *shape, generator=rng)

    terminated, truncated = rand() < 0.15, rand() < 0.1
    is_first = torch.zeros(size, dtype=torch.bool)
    is_first[1:] = (terminated | truncated)[:-1]
    steps, following = {schema.STATE: rand(spec.state_size), schema.IS_FIRST: is_first}, {}
    for name, group in spec.groups.items():
        agents, n = group.num_agents, group.action_size

        def decision(agents=agents, n=n, group=group):
            alive = rand(agents) < 0.8 if deaths else torch.ones(*size, agents, dtype=torch.bool)
            mask = rand(agents, n) < 0.7
            mask[..., 0] |= ~mask.any(-1) | ~alive
            mask &= alive.unsqueeze(-1) | (torch.arange(n) == 0)
            observation = (rand(agents, *group.observation_shape) - 0.5) * alive.unsqueeze(-1)
            return {schema.OBSERVATION: observation, schema.ACTION_MASK: mask, schema.ALIVE: alive}

        steps[name], following[name] = decision(), decision()
        steps[name][schema.ACTION] = (rand(agents, n) * steps[name][schema.ACTION_MASK]).argmax(-1)
        following[name][schema.REWARD] = rand(agents) * 4 - 2
    following |= {schema.STATE: rand(spec.state_size), schema.TERMINATED: terminated, schema.TRUNCATED: truncated}
    mask = torch.ones(size, dtype=torch.bool)
    mask[:burn_in], mask[-1, -1] = False, False
    return ReplayBatch(
        steps=TensorDict({**steps, schema.NEXT: following}, batch_size=size),
        mask=mask,
        burn_in=burn_in,
        weight=0.5 + torch.rand(rows, generator=rng),
        starts=np.arange(rows),
    )


def optimise(module, optimizer, batch):
    loss, error, _ = module.loss(batch)
    module.optimise(loss, optimizer, module.learned_parameters(), max_grad_norm=10.0)
    module.update_targets()
    return loss.item(), error


def observations_of(steps, t=0):
    return Observations(
        observation={name: steps[name, schema.OBSERVATION][t] for name in SPEC.groups},
        action_mask={name: steps[name, schema.ACTION_MASK][t] for name in SPEC.groups},
        alive={name: steps[name, schema.ALIVE][t] for name in SPEC.groups},
        state=steps[schema.STATE][t],
    )


# All of them ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recurrent", [False, True], ids=["mlp", "gru"])
@pytest.mark.parametrize("share", [True, False], ids=["shared", "unshared"])
@pytest.mark.parametrize("name", MEMBERS)
def test_gradients_reach_all_that_learns_and_priorities_are_errors(name, share, recurrent):
    torch.manual_seed(0)
    kind, options = MEMBERS[name]
    module = kind(spec=SPEC, hidden_sizes=(8,), share_parameters=share, recurrent=recurrent, **options)
    optimizer = torch.optim.Adam(module.learned_parameters(), lr=1e-2)
    for seed in range(3):
        loss, error = optimise(module, optimizer, make_batch(SPEC, burn_in=2, seed=seed))
    assert np.isfinite(loss)
    assert error.shape == (5, 6)
    assert not error.requires_grad
    assert error[-1, -1] == 0  # padding
    assert (error[:-1] >= 0).all()
    assert error.isfinite().all()
    learned = {name: p for name, p in module.named_parameters() if p.requires_grad}
    assert not any(name.startswith("target") for name in learned)
    for path, parameter in learned.items():
        rows = parameter.grad if share or parameter.dim() < 2 else parameter.grad.flatten(1)
        assert parameter.grad.isfinite().all(), path
        assert rows.abs().sum() > 0, path


@pytest.mark.parametrize("name", MEMBERS)
def test_illegal_actions_of_the_successor_padding_and_burn_in_do_not_matter(name):
    kind, options = MEMBERS[name]

    def loss_of(batch):
        torch.manual_seed(0)
        module = kind(spec=SPEC, hidden_sizes=(8,), double_q=False, **options)
        torch.manual_seed(1)
        return module.loss(batch)[0]

    batch = make_batch(SPEC, seed=3)
    changed = make_batch(SPEC, seed=3)
    padded = ~changed.mask
    for leaf in changed.steps.values(include_nested=True, leaves_only=True):
        if leaf.dtype == torch.float32:
            leaf[padded] = 7.0
    assert torch.equal(loss_of(batch), loss_of(changed))
    # Where the game was over, successors do not matter.
    over = changed.steps[schema.NEXT, schema.TERMINATED]
    for group in SPEC.groups:
        changed.steps[schema.NEXT, group, schema.OBSERVATION][over] = 9.0
    changed.steps[schema.NEXT, schema.STATE][over] = 9.0
    assert over.any()
    assert torch.allclose(loss_of(batch), loss_of(changed))


@pytest.mark.parametrize("name", MEMBERS)
def test_importance_weights_scale_losses(name):
    kind, options = MEMBERS[name]
    torch.manual_seed(0)
    module = kind(spec=SPEC, hidden_sizes=(8,), **options)
    batch = make_batch(SPEC)
    batch.priorities = object()  # so that weights count

    def loss_of(weight):
        torch.manual_seed(1)
        return module.loss(replace(batch, weight=weight))[0].item()

    rows = torch.eye(6)
    assert loss_of(torch.ones(6)) == pytest.approx(sum(loss_of(row) for row in rows), rel=1e-4)
    assert loss_of(3 * rows[2]) == pytest.approx(3 * loss_of(rows[2]), rel=1e-4)


@pytest.mark.parametrize("name", MEMBERS)
def test_acting_is_legal_with_and_without_exploration(name):
    torch.manual_seed(0)
    kind, options = MEMBERS[name]
    module = kind(spec=SPEC, hidden_sizes=(8,), recurrent=True, **options)
    steps = make_batch(SPEC, rows=50).steps
    policy = module.policy
    state, is_first = policy.initial_state(50), torch.ones(50, dtype=torch.bool)
    for way, rate, deterministic in (("epsilon", 1.0, False), ("boltzmann", 0.5, False), ("epsilon", 1.0, True)):
        policy.kind, policy.rate = way, rate
        for t in range(3):
            observations = observations_of(steps, t)
            (actions, log_probs, following), (again, _, _) = (
                policy.act(
                    observations,
                    state,
                    is_first,
                    deterministic=deterministic,
                    generator=torch.Generator().manual_seed(t),
                )
                for _ in range(2)
            )
            assert following.keys() == state.keys()
            for group in SPEC.groups:
                assert torch.equal(actions[group], again[group])
                assert observations.action_mask[group].gather(-1, actions[group].unsqueeze(-1)).all()
                assert log_probs[group].shape == actions[group].shape
            state, is_first = following, torch.zeros(50, dtype=torch.bool)


class DiscreteCounter(CounterGame):
    """The counter game with a choice of two for blue, of which one is illegal on the second step."""

    def __init__(self):
        super().__init__()
        groups = dict(self.spec.groups)
        groups["blue"] = replace(groups["blue"], action_space=spaces.Discrete(2))
        self.spec = replace(self.spec, groups=groups)

    def observe(self):
        observations = super().observe()
        return replace(
            observations,
            action_mask={**observations.action_mask, "blue": np.array([[self.time != 1, True]])},
        )


@pytest.mark.parametrize("name", MEMBERS)
def test_every_member_trains_on_a_game_with_groups_masks_and_deaths(name, tmp_path):
    lightning.seed_everything(0, verbose=False)
    kind, options = MEMBERS[name]
    module = kind(hidden_sizes=(8,), recurrent=True, log_every_env_steps=16, **options)
    data = ReplayDataModule(
        env=SyncVectorEnv(factory=DiscreteCounter, num_envs=2, seed=0),
        capacity=200,
        batch_size=4,
        sequence_length=2,
        start_training=16,
        training_frequency=4,
        updates_per_batch=4,
        prioritised=True,
    )
    train(module, data, tmp_path, epochs=3)
    assert module.updates == 8
    assert all(parameter.isfinite().all() for parameter in module.parameters())


@pytest.mark.parametrize("name", ["OWQMIX", "QTRAN-alt", "QPLEX", "DCG", "MFQ", "DQN-c51"])
def test_members_train_on_climbing_with_whole_episodes(name, tmp_path):
    lightning.seed_everything(0, verbose=False)
    kind, options = MEMBERS[name]
    module = kind(hidden_sizes=(8,), **options)
    env = MatrixVectorEnv(game="climbing", num_envs=2, episode_length=4)
    data = ReplayDataModule(
        env=env, capacity=100, batch_size=4, sample="episodes", start_training=16, updates_per_batch=8
    )
    train(module, data, tmp_path, epochs=1)
    assert module.updates == 8
    assert all(parameter.isfinite().all() for parameter in module.parameters())


def train(module, data, folder, *, epochs):
    lightning.Trainer(
        max_epochs=epochs + 1,
        max_steps=-1,
        limit_train_batches=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    ).fit(module, data)


# Deep Q-networks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recurrent", [False, True])
def test_dqn_is_iql_with_one_agent_bit_for_bit(recurrent):
    modules = []
    for kind in (IQL, DQN):
        torch.manual_seed(0)
        module = kind(spec=SINGLE, hidden_sizes=(8,), recurrent=recurrent, target_update_interval=2)
        optimizer = module.configure_optimizers()
        losses = [optimise(module, optimizer, make_batch(SINGLE, seed=seed)) for seed in range(5)]
        modules.append((module, losses))
    (iql, iql_losses), (dqn, dqn_losses) = modules
    assert [loss for loss, _ in iql_losses] == [loss for loss, _ in dqn_losses]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(iql_losses, dqn_losses, strict=True))
    for name, tensor in iql.state_dict().items():
        assert torch.equal(tensor, dqn.state_dict()[name]), name


def linear_dqn(*, weight, **options):
    """A network whose atoms are ``weight`` times the only feature, ``relu(observation)``, for one agent."""
    spec = replace(
        SINGLE,
        groups={
            "agent": GroupSpec(
                agents=("agent_0",),
                observation_space=spaces.Box(-np.inf, np.inf, (1,), np.float32),
                action_space=spaces.Discrete(2),
            )
        },
    )
    module = DQN(spec=spec, hidden_sizes=(1,), gamma=0.5, **options)
    for networks in (module.networks, module.target_networks):
        network = networks["agent"]
        for parameter in network.parameters():
            nn.init.zeros_(parameter)
        network.body.mlp.layers[0].weight.data.fill_(1.0)
        network.head.head.linear.weight.data.copy_(torch.tensor(weight).reshape(-1, 1))
    return module


def line_of_steps(*, observations, actions, rewards, terminated):
    """One row of steps of the single agent, every action legal; observations have one entry more."""
    length = len(actions)
    now, then = (torch.tensor(x).reshape(length, 1, 1, 1) for x in (observations[:-1], observations[1:]))
    legal, alive = torch.ones(length, 1, 1, 2, dtype=torch.bool), torch.ones(length, 1, 1, dtype=torch.bool)
    state = torch.zeros(length, 1, 4)
    steps = {
        "agent": {
            "observation": now,
            "action_mask": legal,
            "alive": alive,
            "action": torch.tensor(actions).reshape(length, 1, 1),
        },
        "state": state,
        "is_first": torch.zeros(length, 1, dtype=torch.bool),
        "next": {
            "agent": {
                "observation": then,
                "action_mask": legal,
                "alive": alive,
                "reward": torch.tensor(rewards).reshape(length, 1, 1),
            },
            "state": state,
            "terminated": torch.tensor(terminated).reshape(length, 1),
            "truncated": torch.zeros(length, 1, dtype=torch.bool),
        },
    }
    return ReplayBatch(
        steps=TensorDict(steps, batch_size=(length, 1)),
        mask=torch.ones(length, 1, dtype=torch.bool),
        burn_in=0,
        weight=torch.ones(1),
        starts=np.zeros(1, np.int64),
    )


def test_quantile_targets_by_hand():
    # Quantiles of actions 0 and 1 are (1, 3) x and (0, 2) x.
    module = linear_dqn(weight=[1.0, 3.0, 0.0, 2.0], distributional="quantile", num_atoms=2)
    batch = line_of_steps(observations=[1.0, 2.0, 4.0], actions=[1, 0], rewards=[1.0, 5.0], terminated=[False, True])
    loss, error, _ = module.loss(batch)
    first = quantile_huber_loss(torch.tensor([0.0, 2.0]), torch.tensor([1 + 0.5 * 2, 1 + 0.5 * 6]))
    second = quantile_huber_loss(torch.tensor([2.0, 6.0]), torch.tensor([5.0, 5.0]))
    assert loss.item() == pytest.approx(((first + second) / 2).item())
    assert error.flatten().tolist() == pytest.approx([first.item(), second.item()])


def test_c51_targets_by_hand():
    # Returns -1, 0, 1. With x = 1, action 0 has logits (0, 0, log 2) and action 1 (0, 0, 0).
    module = linear_dqn(
        weight=[0.0, 0.0, np.log(2.0), 0.0, 0.0, 0.0],
        distributional="c51",
        num_atoms=3,
        min_return=-1.0,
        max_return=1.0,
    )
    batch = line_of_steps(observations=[1.0, 1.0, 1.0], actions=[1, 0], rewards=[0.25, 0.5], terminated=[False, True])
    loss, _, metrics = module.loss(batch)
    # Returns 1/4 + (-1/2, 0, 1/2) with chances (1/4, 1/4, 1/2), then 1/2 for sure.
    first = torch.tensor([0.25 * 0.25, 0.25 * 0.75 + 0.25 * 0.75 + 0.5 * 0.25, 0.25 * 0.25 + 0.5 * 0.75])
    second = torch.tensor([0.0, 0.5, 0.5])
    logits = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, np.log(2.0)]])
    expected = categorical_loss(logits, torch.stack((first, second))).mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert metrics["q_value"].item() == pytest.approx((0 + 0.25) / 2, abs=1e-6)


@pytest.mark.parametrize("kind", ["c51", "quantile"])
def test_distributions_over_several_steps_are_those_of_the_last_successor(kind):
    options = {"distributional": kind, "num_atoms": 21, "min_return": -20.0, "max_return": 20.0}
    torch.manual_seed(0)
    module = DQN(spec=SINGLE, hidden_sizes=(8,), gamma=1.0, n_steps=3, **options)
    batch = make_batch(SINGLE, length=6, rows=40, deaths=False)
    for key in ("terminated", "truncated"):
        batch.steps["next", key][:, :2] = False
    batch.mask[4:, 0] = False  # padding
    batch.steps["is_first"][3, 1] = True  # an episode that broke off without an end
    size = (6, 40, 1, 21)
    successors = torch.arange(6.0)[:, None, None, None].expand(size)
    found = module.bootstrapped(batch, successors)
    done = batch.steps["next", "terminated"] | batch.steps["next", "truncated"]
    for t, row in itertools.product(range(6), range(40)):
        last = t
        goes_on = batch.mask[:, row] & ~batch.steps["is_first"][:, row]
        while last < t + 2 and last < 5 and not done[last, row] and goes_on[last + 1]:
            last += 1
        assert (found[t, row] == last).all(), (t, row)
    # As a target of values: with successors worth 0 and no discount, it is the sum of the rewards on the way.
    reward = batch.steps["next", "agent", "reward"].squeeze(-1)
    goal = module.targets(batch, torch.zeros(size))
    assert goal[0, 0, 0, 0].item() == pytest.approx(reward[: int(found[0, 0, 0, 0]) + 1, 0].sum().item())


def test_distributions_refuse_td_lambda_and_empty_ranges():
    with pytest.raises(ValueError, match="td_lambda"):
        DQN(spec=SINGLE, distributional="c51", td_lambda=0.5)
    with pytest.raises(ValueError, match="max_return"):
        DQN(min_return=1.0, max_return=1.0)


def test_noisy_networks_explore_without_a_schedule_and_are_quiet_in_evaluation():
    torch.manual_seed(0)
    policy = DQN(spec=SPEC, noisy=True).policy
    policy.explore_at(0)
    assert policy.rate == 0
    observations = observations_of(make_batch(SPEC, rows=200, deaths=False).steps)
    for mask in observations.action_mask.values():
        mask.fill_(True)
    state, is_first = policy.initial_state(200), torch.zeros(200, dtype=torch.bool)

    def act(seed, deterministic):
        generator = torch.Generator().manual_seed(seed)
        return policy.act(observations, state, is_first, deterministic=deterministic, generator=generator)[0]["red"]

    assert not torch.equal(act(1, False), act(2, False))
    assert torch.equal(act(1, False), act(1, False))
    assert torch.equal(act(1, True), act(2, True))


# Weighted QMIX -------------------------------------------------------------------------------------------------------


def column(*values):
    return torch.tensor(values).unsqueeze(-1)


def test_weights_of_weighted_qmix_by_hand():
    total, goal = column(1.0, 5.0, 5.0, 3.0), column(2.0, 4.0, 4.0, 3.0)
    arguments = {
        "total": total,
        "goal": goal,
        "best_central": column(9.0, 3.0, 9.0, 9.0),
        "is_best": column(False, False, False, True),
        "alpha": 0.25,
    }
    assert OWQMIX().action_weight(**arguments).squeeze(-1).tolist() == [1, 0.25, 0.25, 0.25]
    assert CWQMIX().action_weight(**arguments).squeeze(-1).tolist() == [0.25, 1, 0.25, 1]


class LastCall:
    """Stands in for a function and remembers its arguments."""

    def __init__(self, function):
        self.function = function

    def __call__(self, **arguments):
        self.arguments = arguments
        return self.function(**arguments)


def test_centrally_weighted_qmix_compares_with_the_best_joint_action_of_the_living(monkeypatch):
    torch.manual_seed(0)
    module = CWQMIX(spec=SPEC, hidden_sizes=(8,))
    spy = LastCall(module.action_weight)
    monkeypatch.setattr(module, "action_weight", spy)
    batch = make_batch(SPEC)
    for name in SPEC.groups:  # what the dead did is nobody's choice, even if it was not what they would have done
        dead = ~batch.steps[name, schema.ALIVE]
        batch.steps[name, schema.ACTION][dead] = 1
        batch.steps[name, schema.ACTION_MASK][dead] = torch.tensor(
            [True] + [False] * (SPEC.groups[name].action_size - 1)
        )
    module.loss(batch)
    values = module.agent_values(module.networks, batch)
    agrees = torch.ones(5, 6, dtype=torch.bool)
    for name, value in values.value.items():
        best = value.masked_fill(~batch.steps[name, schema.ACTION_MASK], -torch.inf).argmax(-1)
        agrees &= ((best == batch.steps[name, schema.ACTION]) | ~batch.steps[name, schema.ALIVE]).all(-1)
    assert torch.equal(spy.arguments["is_best"].squeeze(-1), agrees)
    assert agrees.any()
    assert not agrees.all()


@pytest.mark.parametrize("kind", [OWQMIX, CWQMIX])
def test_alpha_one_leaves_the_losses_unweighted(kind):
    torch.manual_seed(0)
    module = kind(spec=SPEC, hidden_sizes=(8,), alpha=1.0)
    batch = make_batch(SPEC)
    loss, error, metrics = module.loss(replace(batch, weight=torch.ones(6)))
    expected = error.square().sum() / batch.mask.sum() + metrics["central_loss"]
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert metrics["action_weight"] == 1


# QTRAN ---------------------------------------------------------------------------------------------------------------


class FixedJoint(nn.Module):
    """Joint values that are given: ``table[u_0, u_1]``, also with the own action left open."""

    def __init__(self, table, counterfactual):
        super().__init__()
        self.table = nn.Parameter(torch.tensor(table))
        self.counterfactual = counterfactual

    def forward(self, features, action, state):
        value = self.table[action["agents"][..., 0], action["agents"][..., 1]].unsqueeze(-1)
        return value.expand(*value.shape[:-1], 2) if self.counterfactual else value

    def of_own_actions(self, features, action, state):
        rows, columns = action["agents"].unbind(-1)
        return {"agents": torch.stack((self.table.T[columns], self.table[rows]), -2)}


class FixedOffset(nn.Module):
    def forward(self, state):
        return state[..., :1] * 0 + 0.5


MATRIX = [[8.0, -12.0, -12.0], [-12.0, 0.0, 0.0], [-12.0, 0.0, 0.0]]


def matrix_batch(table=MATRIX):
    """Every joint action of a game that is over after one step, equally often."""
    n = len(table)
    action = torch.tensor(list(itertools.product(range(n), repeat=2)))
    reward = torch.tensor(table)[action[:, 0], action[:, 1]]
    rows = len(action)
    decision = {
        "observation": torch.ones(1, rows, 2, 1),
        "action_mask": torch.ones(1, rows, 2, n, dtype=torch.bool),
        "alive": torch.ones(1, rows, 2, dtype=torch.bool),
    }
    steps = {
        "agents": {**decision, "action": action.unsqueeze(0)},
        "state": torch.ones(1, rows, 2),
        "is_first": torch.ones(1, rows, dtype=torch.bool),
        "next": {
            "agents": {**decision, "reward": reward[None, :, None].expand(1, rows, 2)},
            "state": torch.ones(1, rows, 2),
            "terminated": torch.ones(1, rows, dtype=torch.bool),
            "truncated": torch.zeros(1, rows, dtype=torch.bool),
        },
    }
    return ReplayBatch(
        steps=TensorDict(steps, batch_size=(1, rows)),
        mask=torch.ones(1, rows, dtype=torch.bool),
        burn_in=0,
        weight=torch.ones(rows),
        starts=np.arange(rows),
    )


def matrix_spec(actions=3):
    box = spaces.Box(1.0, 1.0, (1,), np.float32)
    group = GroupSpec(agents=("a", "b"), observation_space=box, action_space=spaces.Discrete(actions))
    return EnvSpec(name="test/matrix", groups={"agents": group}, state_size=2, shared_reward=True)


@pytest.mark.parametrize("variant", ["base", "alt"])
def test_terms_of_qtran_by_hand(variant):
    module = QTRAN(
        spec=matrix_spec(2), variant=variant, share_parameters=False, team_reward="first", nopt_coefficient=0.25
    )
    table = [[1.0, 2.0], [3.0, 7.0]]
    module.mixer.joint = FixedJoint(table, variant == "alt")
    module.target_mixer.joint = module.mixer.joint
    module.mixer.offset = FixedOffset()
    head = module.networks["agents"].head
    nn.init.zeros_(head.weight)
    own = torch.tensor([[2.0, 1.0], [0.0, 4.0]])  # values of both agents; the best joint action is (0, 1)
    head.bias.data.copy_(own)
    reward = [[1.0, 1.0], [1.0, 1.0]]
    loss, error, metrics = module.loss(matrix_batch(reward))
    joint = torch.tensor([1.0, 2.0, 3.0, 7.0])
    assert error.flatten().tolist() == [0, 1, 2, 6]
    assert metrics["td_loss"].item() == pytest.approx((joint - 1).square().mean().item())
    assert metrics["opt_loss"].item() == pytest.approx((2 + 4 - 2 + 0.5) ** 2)
    # sum_i Q_i(u_i) - Q_jt(u) + V for the joint actions (0, 0), (0, 1), (1, 0), (1, 1): 1.5, 4.5, -1.5, -1.5.
    if variant == "base":
        assert metrics["nopt_loss"].item() == pytest.approx(2 * 1.5**2 / 4)
    else:
        difference = torch.tensor([[1.5, 4.5], [-1.5, -1.5]])
        per_agent = [(difference[:, b].min(), difference[a].min()) for a in range(2) for b in range(2)]
        expected = torch.tensor(per_agent).square().mean()
        assert metrics["nopt_loss"].item() == pytest.approx(expected.item())
    expected = metrics["td_loss"] + metrics["opt_loss"] + 0.25 * metrics["nopt_loss"]
    assert loss.item() == pytest.approx(expected.item())


def test_only_temporal_differences_teach_the_joint_value_of_qtran():
    module = QTRAN(spec=matrix_spec(2), team_reward="first")
    module.mixer.joint = FixedJoint([[1.0, 1.0], [1.0, 1.0]], False)
    loss, _, _ = module.loss(matrix_batch([[1.0, 1.0], [1.0, 1.0]]))
    loss.backward()
    assert module.mixer.joint.table.grad.abs().sum() == 0
    assert module.networks["agents"].head.bias.grad.abs().sum() > 0


# Learning the games of the papers ------------------------------------------------------------------------------------


def greedy(module):
    policy, rows = module.policy, 1
    observations = Observations(
        observation={"agents": torch.ones(rows, 2, 1)},
        action_mask={"agents": torch.ones(rows, 2, 3, dtype=torch.bool)},
        alive={"agents": torch.ones(rows, 2, dtype=torch.bool)},
        state=torch.ones(rows, 2),
    )
    first = torch.ones(rows, dtype=torch.bool)
    actions, _, _ = policy.act(observations, policy.initial_state(rows), first, deterministic=True)
    return tuple(actions["agents"][0].tolist())


@pytest.mark.parametrize(
    ("kind", "options", "updates"),
    [
        (QTRAN, {}, 500),
        (QTRAN, {"variant": "alt"}, 300),
        (CWQMIX, {"central_hidden_size": 32}, 300),
        (OWQMIX, {"central_hidden_size": 32}, 300),
        (QPLEX, {"num_heads": 10}, 1500),
        (DCG, {}, 300),
    ],
    ids=["QTRAN-base", "QTRAN-alt", "CWQMIX", "OWQMIX", "QPLEX", "DCG"],
)
def test_the_matrix_game_of_qtran_is_solved_from_uniform_data(kind, options, updates):
    """QMIX is not among them: it chooses the safe actions, as its authors and those of QTRAN report."""
    torch.manual_seed(0)
    module = kind(spec=matrix_spec(), hidden_sizes=(32,), team_reward="first", target_update_interval=20, **options)
    optimizer, batch = torch.optim.Adam(module.learned_parameters(), lr=3e-3), matrix_batch()
    for _ in range(updates):
        drawn = torch.randint(9, (32,))
        optimise(
            module,
            optimizer,
            replace(batch, steps=batch.steps[:, drawn], mask=batch.mask[:, drawn], weight=batch.weight[drawn]),
        )
    assert greedy(module) == (0, 0)


# Coordination graphs -------------------------------------------------------------------------------------------------


def test_dcg_bootstraps_and_acts_by_the_best_joint_action():
    torch.manual_seed(0)
    module = DCG(spec=SPEC, hidden_sizes=(8,), topology="line", rounds=4)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.8)
    batch = make_batch(SPEC, length=1, rows=40)
    values = module.agent_values(module.networks, batch)
    mask = {name: batch.steps[name, schema.ACTION_MASK] for name in SPEC.groups}
    best, _ = module.mixer.best(values.value, values.features, mask)
    highest = torch.full((1, 40, 1), -torch.inf)
    for a, b, c in itertools.product(range(3), range(3), range(2)):
        action = {"red": torch.tensor([a, b]).expand(1, 40, 2), "blue": torch.tensor([c]).expand(1, 40, 1)}
        legal = torch.stack([mask[n].gather(-1, action[n].unsqueeze(-1)).flatten(2).all(-1) for n in mask]).all(0)
        value = module.mixer(values.value, values.features, action, batch.steps[schema.STATE])
        highest = torch.maximum(highest, value.masked_fill(~legal.unsqueeze(-1), -torch.inf))
    found = module.mixer(values.value, values.features, best, batch.steps[schema.STATE])
    torch.testing.assert_close(found, highest)
    state, is_first = module.policy.initial_state(40), torch.ones(40, dtype=torch.bool)
    actions, _, _ = module.policy.act(observations_of(batch.steps), state, is_first, deterministic=True)
    assert all(torch.equal(actions[name], best[name][0]) for name in actions)
    module.policy.kind, module.policy.rate = "epsilon", 0.0
    actions, _, _ = module.policy.act(observations_of(batch.steps), state, is_first)
    assert all(torch.equal(actions[name], best[name][0]) for name in actions)


def test_dcg_s_adds_a_value_of_the_state():
    torch.manual_seed(0)
    module = DCGS(spec=SPEC, hidden_sizes=(8,))
    assert module.hparams.state_value
    batch = make_batch(SPEC)
    values = module.agent_values(module.networks, batch)
    action = {name: batch.steps[name, schema.ACTION] for name in SPEC.groups}
    with_state = module.mixer(values.value, values.features, action, batch.steps[schema.STATE])
    offset = module.mixer.offset(batch.steps[schema.STATE])
    module.mixer.offset = None
    without = module.mixer(values.value, values.features, action, batch.steps[schema.STATE])
    torch.testing.assert_close(with_state, without + offset)


# Mean fields ---------------------------------------------------------------------------------------------------------


def test_mean_actions_of_the_living_others():
    taken = {
        "red": torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]),  # the third is dead
        "blue": torch.tensor([[0.0, 1.0]]),
    }
    mean = mean_actions(taken)
    assert mean["red"].tolist() == [[0, 0, 1, 0, 1], [1, 0, 0, 0, 1], [0.5, 0, 0.5, 0, 1]]
    assert mean["blue"].tolist() == [[0.5, 0, 0.5, 0, 0]]  # nobody else is blue


def test_boltzmann_value_by_hand():
    value, mask = torch.tensor([0.0, np.log(3.0) / 2, 99.0]), torch.tensor([True, True, False])
    assert boltzmann_value(value, mask, 0.5).item() == pytest.approx(0.75 * np.log(3.0) / 2)


@pytest.mark.parametrize("recurrent", [False, True])
def test_mean_field_values_are_the_same_when_acting_and_when_learning(recurrent):
    torch.manual_seed(0)
    module = MFQ(spec=SPEC, hidden_sizes=(8,), recurrent=recurrent)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    batch = make_batch(SPEC, length=6, rows=10)
    before = batch.steps.clone()
    learned = module.agent_values(module.networks, batch).value
    assert (batch.steps == before).all()
    policy, steps = module.policy, batch.steps
    state = policy.initial_state(10)
    seen = []
    policy.widen, widen = lambda *x: seen.append(widen(*x)) or seen[-1], policy.widen
    for t in range(6):
        _, _, following = policy.act(observations_of(steps, t), state, steps[schema.IS_FIRST][t], deterministic=True)
        goes_on = {name: x for name, x in state.items() if name.startswith("q/")}
        for name, network in policy.items():
            inputs = network.inputs(seen[-1][name])
            value, _, _ = network(inputs.unsqueeze(0), goes_on.get(f"q/{name}"), steps[schema.IS_FIRST][t].unsqueeze(0))
            torch.testing.assert_close(value[0], learned[name][t])
        # Go on with what was done in the batch.
        taken = policy.taken(
            {name: steps[name, schema.ACTION][t] for name in SPEC.groups},
            {name: steps[name, schema.ALIVE][t] for name in SPEC.groups},
        )
        state = following | {f"previous/{name}": x for name, x in taken.items()}


def test_mean_fields_need_the_step_before(tmp_path):
    env = MatrixVectorEnv(game="climbing", num_envs=2, episode_length=4)
    data = ReplayDataModule(env=env, capacity=100, burn_in=0)
    with pytest.raises(ValueError, match=r"data\.burn_in to at least 1"):
        train(MFQ(), data, tmp_path, epochs=1)


def test_shapley_targets_sum_the_best_values():
    torch.manual_seed(0)
    module = SHAQ(spec=SPEC, hidden_sizes=(8,))
    batch = make_batch(SPEC)
    values = module.agent_values(module.networks, batch)
    arguments = {
        "value": values.value,
        "action": {name: torch.zeros_like(batch.steps[name, schema.ACTION]) for name in SPEC.groups},
        "action_mask": {name: batch.steps[name, schema.ACTION_MASK] for name in SPEC.groups},
        "state": batch.steps[schema.STATE],
    }
    expected = torch.cat([value[..., 0] for value in values.value.values()], -1).sum(-1, keepdim=True)
    torch.testing.assert_close(module.mix(module.target_mixer, **arguments), expected)
    assert not torch.allclose(module.mix(module.mixer, **arguments), expected)
