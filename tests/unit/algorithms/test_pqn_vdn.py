"""PQN-VDN: targets by hand, values and chunks against a step-by-step oracle, exploration, learning, bad input."""

import lightning
import numpy as np
import pytest
import torch
from gymnasium import spaces
from payoff_games import PayoffGame
from tensordict import TensorDict

from marl_lightning.algorithms import PQNVDN
from marl_lightning.algorithms.pqn_vdn import TeamBatch
from marl_lightning.callbacks import EpsilonSchedule, EvaluationCallback, StopAtEnvSteps
from marl_lightning.data import RolloutDataModule
from marl_lightning.data.collector import RolloutCollector
from marl_lightning.envs import EnvSpec, GroupSpec, Observations, SyncVectorEnv, make_vector_env

SMALL = {"hidden_sizes": (16,), "chunk_length": 4, "num_epochs": 1, "num_minibatches": 1}
TABLES = {"with_3": [1.0, 5.0, 3.0], "with_2": [0.5, 0.25]}


def payoff_env(sizes=(3, 3), **options):
    """Rewards are the sum of the agents' actions, for the first agent, and nothing for the others."""
    payoffs = np.zeros((len(sizes), *sizes), np.float32)
    payoffs[0] = sum(np.ix_(*(np.arange(size) for size in sizes)))
    return SyncVectorEnv(factory=lambda: PayoffGame(payoffs, **options), num_envs=2, seed=0)


def lbf_env():
    """Episodes that are truncated soon."""
    return make_vector_env("lbf/Foraging-8x8-2p-2f-coop-v3", num_envs=3, seed=0, episode_limit=5)


def smac_env():
    """Masks, deaths, and battles that are lost."""
    return make_vector_env("smac/3m", num_envs=4, seed=0)


@torch.no_grad()
def constant(module, tables=TABLES):
    """Makes the values of actions those of a table, whatever is seen."""
    for name, network in module.networks.items():
        network.head.weight.zero_()
        network.head.bias.copy_(torch.tensor(tables[name]))
    return module


def collect(module, env, *, rollouts=1, length=8, rate=1.0):
    """Collects as the data module does."""
    module.networks.rate = rate
    collector = RolloutCollector(env=env, rollout_length=length, chunk_length=module.chunk_length, seed=env.seed)
    for _ in range(rollouts):
        rollout = collector.collect(module.policy)
        collector.state = module.prepare_rollout(rollout, collector.state)
    return rollout


def learn(module, rollout, monkeypatch):
    optimizer = module.configure_optimizers()
    monkeypatch.setattr(module, "optimizers", lambda: optimizer)
    module.update(rollout)
    return {name: torch.stack(values) for name, values in module._metrics.items()}


# Targets --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("td_lambda", "expected"),
    [
        # gamma = 0.5; step 1 is truncated, step 2 terminated, step 4 the last one
        (0.0, [1 + 5, 2 + 10, 3, 4 + 20, 5 + 4]),
        (1.0, [1 + 0.5 * 12, 2 + 10, 3, 4 + 0.5 * 9, 5 + 4]),
        (0.5, [1 + 0.5 * (0.5 * 10 + 0.5 * 12), 2 + 10, 3, 4 + 0.5 * (0.5 * 40 + 0.5 * 9), 5 + 4]),
    ],
)
def test_targets_by_hand(td_lambda, expected):
    module = PQNVDN(spec=payoff_env().spec, gamma=0.5, td_lambda=td_lambda, **SMALL)
    first = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    after = {
        "value": torch.tensor([10.0, 20.0, 30.0, 40.0, 8.0]).view(5, 1, 1),
        "terminated": torch.tensor([0, 0, 1, 0, 0]).bool().view(5, 1),
        "truncated": torch.tensor([0, 1, 0, 0, 0]).bool().view(5, 1),
        "with_3": {"reward": torch.stack((0.75 * first, 0.25 * first), -1).view(5, 1, 2)},
    }
    target = module.target(TensorDict({"next": after}, batch_size=[5, 1]))
    assert target.flatten().tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("how", "shared", "expected"),
    [("sum", False, 10.0), ("mean", False, 2.5), ("first", False, 1.0), ("sum", True, 1.0 + 4.0)],
)
def test_rewards_of_all_groups_become_one(how, shared, expected):
    """In a sum, what the agents of a group share counts once."""
    box = spaces.Box(0, 1, (1,), np.float32)
    groups = {
        name: GroupSpec(agents=(f"{name}_0", f"{name}_1"), observation_space=box, action_space=spaces.Discrete(2))
        for name in ("red", "blue")
    }
    spec = EnvSpec(name="scripted/groups", groups=groups, state_size=1, shared_reward=shared)
    module = PQNVDN(spec=spec, team_reward=how, **SMALL)
    rewards = {"red": [1.0, 1.0], "blue": [4.0, 4.0]}
    after = {name: {"reward": torch.tensor(reward).view(1, 1, 2)} for name, reward in rewards.items()}
    assert module.reward(TensorDict({"next": after}, batch_size=[1, 1])).tolist() == [[[expected]]]


# Values of a rollout --------------------------------------------------------------------------------------------------


def test_successors_are_worth_the_best_legal_actions_of_all_agents():
    """5 of an agent of the first group and 3 of the other, who may not do what is worth 5; 0.5 of the second group."""
    env = payoff_env((3, 3, 2), illegal=((1, 1),), limit=3)
    module = constant(PQNVDN(spec=env.spec, **SMALL))
    rollout = collect(module, env)
    assert len(rollout.final) == 2 * 2  # truncated episodes
    assert torch.equal(rollout.steps["next", "value"], torch.full((8, 2, 1), 5 + 3 + 0.5))


def step_by_step(module, rollout):
    """What the team thought as it acted: values ``[T, E, 1]`` of what was done, and of the true successors."""
    policy, steps = module.policy, rollout.steps
    final = {(row["time"].item(), row["env"].item()): row for row in rollout.final}
    state, chosen = rollout.initial_state, []
    values = torch.zeros(len(steps) + 1, steps.shape[1], 1)
    successors, goes_on = torch.full_like(values[1:], torch.nan), torch.zeros(1, dtype=torch.bool)

    def observations(row):
        groups = module.networks
        return Observations(
            observation={name: row[name, "observation"] for name in groups},
            action_mask={name: row[name, "action_mask"] for name in groups},
            alive={name: row[name, "alive"] for name in groups},
            state=row["state"],
        )

    def worth(value, row, env):
        """The largest legal values, looked for one by one."""
        total = 0.0
        for name in module.networks:
            for agent, mask in enumerate(row[name, "action_mask"][env]):
                total += max(v for v, legal in zip(value[name][env, agent].tolist(), mask, strict=True) if legal)
        return total

    for t in range(len(steps)):
        value, state = policy.action_values(observations(steps[t]), state, steps["is_first"][t])
        taken = [value[name].gather(-1, steps[t][name, "action"].unsqueeze(-1)) for name in module.networks]
        chosen.append(torch.cat(taken, -2).sum(-2))
        for env in range(steps.shape[1]):
            if (t, env) in final:
                row = final[t, env].unsqueeze(0)
                own = {key: part[env : env + 1] for key, part in state.items()}
                successors[t, env] = worth(policy.action_values(observations(row), own, goes_on)[0], row, 0)
        values[t, :, 0] = torch.tensor([worth(value, steps[t], env) for env in range(steps.shape[1])])
    goes_on = torch.zeros(steps.shape[1], dtype=torch.bool)
    value, _ = policy.action_values(observations(rollout.last), state, goes_on)
    values[-1, :, 0] = torch.tensor([worth(value, rollout.last, env) for env in range(steps.shape[1])])
    successors = torch.where(successors.isnan(), values[1:], successors)
    return torch.stack(chosen), successors


CASES = [
    pytest.param(lbf_env, {}, id="mlp"),
    pytest.param(lbf_env, {"recurrent": True}, id="gru"),
    pytest.param(lbf_env, {"recurrent": True, "share_parameters": False}, id="gru-unshared"),
    pytest.param(smac_env, {}, id="masked-mlp"),
    pytest.param(smac_env, {"recurrent": True, "activation": "tanh"}, id="masked-gru"),
]


@pytest.mark.parametrize(("make_env", "options"), CASES)
def test_values_of_chunks_and_successors_are_those_of_acting(make_env, options):
    """The second rollout starts inside episodes, so that carried states count."""
    torch.manual_seed(0)
    module = PQNVDN(spec=make_env().spec, **SMALL, **options)
    for network in module.networks.values():
        torch.nn.init.normal_(network.head.weight)
    rollout = collect(module, make_env(), rollouts=2, length=40)
    with torch.no_grad():
        chosen, successors = step_by_step(module, rollout)
        batch = module.training_batch(rollout)
        found = module.value(batch)
    length = module.chunk_length or 1
    found = found.unflatten(1, (40 // length, -1)).transpose(0, 1).flatten(0, 1)
    torch.testing.assert_close(found, chosen, rtol=0, atol=1e-5)
    ended = rollout.steps["next", "terminated"].unsqueeze(-1)
    torch.testing.assert_close(rollout.steps["next", "value"][~ended], successors[~ended], rtol=0, atol=1e-5)
    if make_env is smac_env:
        assert not rollout.steps["agents", "alive"].all()
        assert ended.any()
    else:
        assert len(rollout.final)
    rows = torch.tensor([5, 0])
    with torch.no_grad():
        picked, everything = module.value(batch.select(rows)), module.value(batch)
    torch.testing.assert_close(picked, everything[:, rows], rtol=0, atol=1e-5)
    assert torch.equal(batch.select(rows).target, batch.target[:, rows])
    if options.get("recurrent"):  # a chunk that starts from zeros instead would not do
        forgetful = TeamBatch(
            inputs=batch.inputs,
            action=batch.action,
            state={key: torch.zeros_like(state) for key, state in batch.state.items()},
            is_first=batch.is_first,
            target=batch.target,
        )
        with torch.no_grad():
            assert (module.value(forgetful) - everything).abs().max() > 1e-3


def test_explores_by_legal_actions_only():
    env = smac_env()
    steps = collect(PQNVDN(spec=env.spec, **SMALL), env, length=40).steps
    assert steps["agents", "action_mask"].gather(-1, steps["agents", "action"].unsqueeze(-1)).all()
    assert steps["agents", "action"].unique().numel() > 3


# Learning -------------------------------------------------------------------------------------------------------------


def test_loss_is_the_squared_error_of_the_team(monkeypatch):
    """Both agents do what is worth 5 and is action 1: the reward is 2, and the error 10 - (2 + 0.5 * 10) = 3."""
    env = payoff_env()
    module = constant(PQNVDN(spec=env.spec, gamma=0.5, td_lambda=0.0, **SMALL))
    metrics = learn(module, collect(module, env, rate=0.0), monkeypatch)
    assert metrics["loss"].tolist() == pytest.approx([9.0])
    assert metrics["q_value"].tolist() == pytest.approx([10.0])
    assert metrics["td_error"].tolist() == pytest.approx([3.0])


def test_targets_stay_while_values_move_to_them(monkeypatch):
    torch.manual_seed(0)
    env = lbf_env()
    options = SMALL | {"hidden_sizes": (64,), "num_epochs": 150, "learning_rate": 3e-3}
    module = PQNVDN(spec=env.spec, **options)
    rollout = collect(module, env, length=16)
    rollout.steps["next", "agents", "reward"].uniform_()
    target = module.training_batch(rollout).target.clone()
    metrics = learn(module, rollout, monkeypatch)
    assert metrics["loss"][-1] < 0.3 * metrics["loss"][0]
    assert torch.equal(module.training_batch(rollout).target, target)
    assert isinstance(module.optimizers(), torch.optim.RAdam)
    assert module.updates == 150


def test_every_sequence_is_used_once_an_epoch(monkeypatch):
    env = lbf_env()
    module = PQNVDN(spec=env.spec, recurrent=True, **SMALL | {"num_epochs": 3, "num_minibatches": 5})
    seen, select = [], TeamBatch.select
    monkeypatch.setattr(TeamBatch, "select", lambda self, rows: seen.append(rows) or select(self, rows))
    learn(module, collect(module, env), monkeypatch)
    assert torch.bincount(torch.cat(seen)).tolist() == [3] * (2 * 3)  # two chunks of each instance
    assert module.updates == 15


def test_no_learned_parameter_is_left_alone(monkeypatch):
    """Layer norms, memory, and what follows them."""
    torch.manual_seed(0)
    env = lbf_env()
    module = PQNVDN(spec=env.spec, recurrent=True, **SMALL | {"num_epochs": 3})
    before = {name: value.clone() for name, value in module.named_parameters()}
    learn(module, collect(module, env), monkeypatch)
    assert [name for name, value in module.named_parameters() if torch.equal(value, before[name])] == []
    assert any("gru_norm" in name for name in before)


def fit(module, env, *, env_steps, callbacks, folder):
    trainer = lightning.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        max_epochs=-1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[StopAtEnvSteps(env_steps), *callbacks],
    )
    trainer.fit(module, datamodule=RolloutDataModule(env=env, rollout_length=8))
    return trainer


def test_exploration_follows_the_env_steps(tmp_path):
    """A rollout of 16 env steps explores as much as is due at its start."""
    rates = []

    class Spy(PQNVDN):
        def prepare_rollout(self, rollout, state):
            rates.append(self.networks.rate)
            return super().prepare_rollout(rollout, state)

    schedule = EpsilonSchedule(start=1.0, end=0.2, anneal_env_steps=64)
    fit(Spy(**SMALL), payoff_env(), env_steps=96, callbacks=[schedule], folder=tmp_path)
    assert rates == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.2])


@pytest.mark.parametrize("recurrent", [False, True])
def test_learns_the_best_outcome_of_penalty_without_penalty(recurrent, tmp_path):
    """25 times 10; an untrained team that acts greedily gets 250 only by chance, one that draws gets 61."""
    lightning.seed_everything(1, verbose=False)
    module = PQNVDN(
        hidden_sizes=(32,),
        recurrent=recurrent,
        chunk_length=8,
        learning_rate=5e-3,
        gamma=0.9,
        num_epochs=2,
        num_minibatches=4,
    )
    trainer = fit(
        module,
        make_vector_env("matrix/penalty", num_envs=32, seed=1, k=0.0),
        env_steps=15_000,
        callbacks=[
            EpsilonSchedule(anneal_env_steps=8_000),
            EvaluationCallback(every_env_steps=10**9, episodes=4),
        ],
        folder=tmp_path,
    )
    assert trainer.callback_metrics["eval/return_mean"] == 250


# Bad input ------------------------------------------------------------------------------------------------------------


def test_bad_arguments_are_listed_together():
    with pytest.raises(ValueError, match="td_lambda") as error:
        PQNVDN(td_lambda=1.5, learning_rate=0.0, team_reward=None, num_epochs=0)
    assert all(name in str(error.value) for name in ("td_lambda", "learning_rate", "team_reward", "num_epochs"))
    with pytest.raises(ValueError, match="did you mean 'td_lambda'"):
        PQNVDN(gae_lambda=0.9)


def test_continuous_actions_are_refused():
    with pytest.raises(ValueError, match=r"PQNVDN needs Discrete actions, but those of 'agent' in .* are Box"):
        PQNVDN(spec=make_vector_env("mpe/simple_spread_v3", num_envs=1, continuous_actions=True).spec)


def test_more_minibatches_than_sequences_are_refused(monkeypatch):
    env = payoff_env()
    module = PQNVDN(spec=env.spec, **SMALL | {"num_minibatches": 17})
    with pytest.raises(ValueError, match="num_minibatches=17 must be at most the 16 sequences"):
        learn(module, collect(module, env), monkeypatch)
