"""Agents that act but do not learn, and copies of what each agent has learned."""

import copy

import lightning
import numpy as np
import pytest
import torch
from gymnasium import spaces

from marl_lightning.algorithms import DQN, IPPO, IQL, MAPPO, PR2IQL, QMIX, VDN
from marl_lightning.algorithms.freezing import FrozenAgents
from marl_lightning.algorithms.snapshots import load_optimizer, load_snapshot, snapshot
from marl_lightning.callbacks import EpsilonSchedule, StopAtEnvSteps
from marl_lightning.data import ReplayDataModule
from marl_lightning.data.collector import RolloutCollector
from marl_lightning.data.replay import ReplayBuffer, replay_records
from marl_lightning.data.samplers import SequenceWindows
from marl_lightning.envs import EnvSpec, GroupSpec, MultiAgentEnv, Observations, Step, SyncVectorEnv

BOX = spaces.Box(-1, 1, (3,), np.float32)


class Noise(MultiAgentEnv):
    """Shows and pays noise, never allows action 2 to the second agent, and ends after 7 steps."""

    def __init__(self):
        self.spec = EnvSpec(
            name="scripted/noise",
            groups={
                name: GroupSpec(
                    agents=tuple(f"{name}_{i}" for i in range(size)),
                    observation_space=BOX,
                    action_space=spaces.Discrete(3),
                )
                for name, size in (("a", 3), ("b", 1))
            },
            state_size=1,
        )
        self.rng = np.random.default_rng(0)

    def reset(self, *, seed=None):
        self.rng = np.random.default_rng(seed) if seed is not None else self.rng
        self.time = 0
        return self.observe()

    def step(self, actions):
        assert actions["a"][1] != 2
        self.time += 1
        reward = {n: self.rng.normal(size=g.num_agents).astype(np.float32) for n, g in self.spec.groups.items()}
        return Step(
            observations=self.observe(), reward=reward, terminated=self.time == 7, truncated=False, info={}
        )  # fmt: skip

    def observe(self):
        groups = self.spec.groups.items()
        masks = {name: np.ones((group.num_agents, 3), np.bool_) for name, group in groups}
        masks["a"][1, 2] = False
        return Observations(
            observation={n: self.rng.uniform(-1, 1, (g.num_agents, 3)).astype(np.float32) for n, g in groups},
            action_mask=masks,
            alive={name: np.ones(group.num_agents, np.bool_) for name, group in groups},
            state=np.zeros(1, np.float32),
        )


SPEC = Noise().spec


def make(algorithm=IQL, *, spec=SPEC, seed=0, **options):
    torch.manual_seed(seed)
    defaults = {"hidden_sizes": (8,), "share_parameters": False, "team_reward": None, "learning_rate": 0.05}
    return algorithm(spec=spec, **(defaults | options))


def fit(module, *, env_steps=280, callbacks=(), env=Noise, **data):
    vector = SyncVectorEnv(factory=env, num_envs=2, seed=0)
    data = {"capacity": 500, "batch_size": 4, "rollout_length": 10, "sequence_length": 5} | data
    data = ReplayDataModule(env=vector, start_training=20, training_frequency=10, **data)
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=-1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[StopAtEnvSteps(env_steps), EpsilonSchedule(start=0.5, end=0.5), *callbacks],
    )  # fmt: skip
    trainer.fit(module, datamodule=data)
    assert module.updates >= 20
    return trainer


def batches(number, *, seed=0, length=5):
    """Batches of what agents who know nothing did."""
    env = SyncVectorEnv(factory=Noise, num_envs=2, seed=seed)
    rollout = RolloutCollector(env=env, rollout_length=40, seed=seed, keep_final="ended").collect(make().policy)
    buffer = ReplayBuffer(capacity=80, windows=SequenceWindows(length=length), seed=seed)
    buffer.extend(replay_records(rollout), buffer.index.open(2))
    return [buffer.sample(4) for _ in range(number)]


def learn(module, made, optimizer=None):
    optimizer = optimizer or module.configure_optimizers()
    module.optimizers = lambda **_: optimizer
    module.on_train_start()
    for batch in made:
        module.update(batch)
    return optimizer


def weights_of(module, agent):
    state = snapshot(module)[agent]
    return {(part, name): tensor for part, tensors in state.items() for name, tensor in tensors.items()}


def same(first, second):
    assert first.keys() == second.keys()
    return all(torch.equal(first[key], second[key]) for key in first)


# Nothing moves ------------------------------------------------------------------------------------------------------

MEMBERS = {
    "mlp": (IQL, {}),
    "rnn": (IQL, {"recurrent": True}),
    "polyak": (IQL, {"target_update_rate": 0.1}),
    "hard targets": (IQL, {"target_update_interval": 3}),
    "scaled": (IQL, {"scale_reward": True, "n_steps": 3}),
    "team": (IQL, {"team_reward": "sum"}),
    "dueling c51": (DQN, {"dueling": True, "distributional": "c51", "target_update_rate": 0.1}),
    "pr2": (PR2IQL, {"response_model": "learned", "mask_unseen": True, "target_update_interval": 3}),
    "pr2 sampled": (PR2IQL, {"response_model": "learned", "opponents": "sampled", "target_update_interval": 3}),
}


@pytest.mark.parametrize("trainable", [["a_1"], ["a_0", "b_0"], ["b_0"]], ids=str)
@pytest.mark.parametrize("member", MEMBERS)
def test_frozen_agents_stay_bit_for_bit_and_the_others_learn(member, trainable):
    """R11 and R14. The targets differ from the networks from the beginning, so that they could move."""
    algorithm, options = MEMBERS[member]
    module = make(algorithm, trainable_agents=trainable, **options)
    load_snapshot(module, snapshot_with_other_targets(algorithm, options))
    before = {agent: weights_of(module, agent) for agent in SPEC.agents}
    trainer = fit(module)
    for agent in SPEC.agents:
        after = weights_of(module, agent)
        changed = {part for part, name in after if not torch.equal(after[part, name], before[agent][part, name])}
        if agent not in trainable:
            assert not changed
        else:
            assert "online" in changed
            assert "target" in changed or module.hparams.target_update_interval > 20
    states = snapshot(module, trainer.optimizers[0])
    assert {agent for agent, state in states.items() if "optimizer" in state} == set(trainable)


def snapshot_with_other_targets(algorithm, options):
    states, others = (snapshot(make(algorithm, seed=seed, **options)) for seed in (1, 2))
    return {agent: {"online": states[agent]["online"], "target": others[agent]["target"]} for agent in states}


def test_moments_of_those_who_learned_before_are_forgotten():
    """A run is resumed with other agents learning: Adam would go on moving those who stopped."""
    made = batches(8)
    module = make()
    optimizer = learn(module, made[:4])
    later = make(trainable_agents=["a_1"], seed=1)
    load_snapshot(later, snapshot(module))
    resumed = later.configure_optimizers()
    for former, parameter in zip(module.networks["a"].parameters(), later.networks["a"].parameters(), strict=True):
        resumed.state[parameter] = copy.deepcopy(optimizer.state[former])
    assert any(state["exp_avg"][0].any() for state in resumed.state.values())
    before = {agent: weights_of(later, agent) for agent in SPEC.agents}
    learn(later, made[4:], resumed)
    moved = [agent for agent in SPEC.agents if not same(weights_of(later, agent), before[agent])]
    assert moved == ["a_1"]


def test_what_is_not_finite_in_frozen_networks_does_not_spread():
    module = make(trainable_agents=["a_0"])
    with torch.no_grad():
        for parameter in module.networks["a"].parameters():
            parameter[1] = torch.nan
    before = weights_of(module, "a_2")
    made = batches(3)
    for batch in made:
        loss, _, _ = module.loss(batch)
        loss.backward()
        module.clip_gradient(module.learned_parameters(), 10.0)
        gradients = [parameter.grad for parameter in module.networks["a"].parameters()]
        assert all(not gradient[1:].any() and gradient[0].isfinite().all() for gradient in gradients)
    assert same(before, weights_of(module, "a_2"))


def test_learners_learn_the_same_whoever_else_is_frozen():
    made = batches(6)
    everyone, alone = make(), make(trainable_agents=["a_1"])
    learn(everyone, made)
    learn(alone, made)
    assert same(weights_of(everyone, "a_1"), weights_of(alone, "a_1"))
    assert not same(weights_of(everyone, "a_0"), weights_of(alone, "a_0"))


def test_groups_of_which_nobody_learns_are_not_optimised():
    module = make(trainable_agents=["a_0"])
    optimised = {id(parameter) for parameter in module.learned_parameters()}
    assert optimised == {id(parameter) for parameter in module.networks["a"].parameters()}


def test_metrics_and_loss_are_those_of_the_learners():
    (batch,) = batches(1)
    alone = make(trainable_agents=["b_0"]).loss(batch)
    batch.steps["next", "a", "reward"].fill_(1e6)
    assert torch.equal(make(trainable_agents=["b_0"]).loss(batch)[0], alone[0])
    assert torch.equal(make(trainable_agents=["b_0"]).loss(batch)[1], alone[1])


def test_naming_all_agents_is_the_same_as_naming_none():
    made = batches(4)
    modules = make(), make(trainable_agents=list(SPEC.agents))
    for module in modules:
        learn(module, made)
    first, second = map(snapshot, modules)
    assert all(same(first[agent]["online"], second[agent]["online"]) for agent in SPEC.agents)


# How they act -------------------------------------------------------------------------------------------------------


def observations(rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    masks = {"a": torch.ones(rows, 3, 3, dtype=torch.bool), "b": torch.ones(rows, 1, 3, dtype=torch.bool)}
    masks["a"][:, 1, 2] = False
    return Observations(
        observation={"a": torch.randn(1, 3, 3).expand(rows, 3, 3), "b": torch.randn(rows, 1, 3, generator=generator)},
        action_mask=masks,
        alive={name: mask[..., 0] for name, mask in masks.items()},
        state=torch.zeros(rows, 1),
    )


def act(module, seen, *, rate, **options):
    module.policy.rate = rate
    first = torch.ones(len(seen.state), dtype=torch.bool)
    state = module.policy.initial_state(len(first))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        actions, _, _ = module.policy.act(seen, state, first, generator=generator, **options)
        values, _ = module.policy.action_values(seen, state, first)
    return actions, {name: v.masked_fill(~seen.action_mask[name], -torch.inf) for name, v in values.items()}


def scaled_head(module, factor):
    with torch.no_grad():
        for network in module.networks.values():
            network.head.weight *= factor
    return module


def test_others_are_greedy_whatever_the_exploration():
    """R14."""
    seen = observations(1000)
    actions, values = act(make(trainable_agents=["a_1"]), seen, rate=1.0)
    assert torch.equal(actions["a"][:, [0, 2]], values["a"].argmax(-1)[:, [0, 2]])
    assert torch.equal(actions["b"], values["b"].argmax(-1))
    assert 400 < (actions["a"][:, 1] == 0).sum() < 600  # two legal actions


def test_others_act_by_softmax():
    """R17."""
    module = scaled_head(make(trainable_agents=["b_0"], opponent_mode="softmax", opponent_rate=0.5), 50)
    actions, values = act(module, observations(20_000), rate=0.0)
    for i in range(3):
        found = torch.bincount(actions["a"][:, i], minlength=3) / 20_000
        expected = torch.softmax(values["a"][0, i] / 0.5, -1)
        assert expected.max() < 0.95
        torch.testing.assert_close(found, expected, atol=0.015, rtol=0)
    assert torch.equal(actions["b"], values["b"].argmax(-1))


def test_others_explore_on_their_own():
    module = make(trainable_agents=["b_0"], opponent_mode="epsilon", opponent_rate=0.3)
    actions, values = act(module, observations(20_000), rate=0.0)
    for i, legal in enumerate((3, 2, 3)):
        greedy = (actions["a"][:, i] == values["a"][:, i].argmax(-1)).float().mean()
        assert greedy == pytest.approx(0.7 + 0.3 / legal, abs=0.015)
    assert (actions["a"][:, 1] != 2).all()


def test_all_are_greedy_in_evaluation():
    module = make(trainable_agents=["b_0"], opponent_mode="epsilon", opponent_rate=1.0)
    actions, values = act(module, observations(100), rate=1.0, deterministic=True)
    assert all(torch.equal(actions[name], values[name].argmax(-1)) for name in actions)


def test_others_keep_their_memory():
    """R15: a frozen agent does in company what it does alone, over the ends of episodes."""
    module = make(recurrent=True, trainable_agents=["b_0"])
    with torch.no_grad():
        for network in module.networks.values():
            network.body.gru.recurrent_weight *= 3
    module.policy.rate = 1.0
    env = SyncVectorEnv(factory=Noise, num_envs=2, seed=0)
    collector = RolloutCollector(env=env, rollout_length=15, seed=0)
    done, seen, first = [], [], []
    for _ in range(2):
        steps = collector.collect(module.policy).steps
        done.append(steps["a", "action"].clone())
        seen.append(steps["a", "observation"].clone())
        first.append(steps["is_first"].clone())
    network = module.networks["a"]
    values, _, _ = network(network.inputs(torch.cat(seen)), network.initial_state(2), torch.cat(first))
    values[:, :, 1, 2] = -torch.inf
    assert torch.cat(first).sum() > 4
    assert torch.equal(torch.cat(done), values.argmax(-1))
    forgetful, _, _ = network(network.inputs(torch.cat(seen)), network.initial_state(2), torch.ones(30, 2).bool())
    forgetful[:, :, 1, 2] = -torch.inf
    assert not torch.equal(torch.cat(done), forgetful.argmax(-1))  # and the test can fail


# Wrong settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trainable_agents": ["a_0", "c_1"]}, r"has \['c_1'\], but the agents .* are \['a_0', 'a_1', 'a_2', 'b_0'\]"),
        ({"trainable_agents": []}, "trainable_agents is empty"),
        ({"trainable_agents": "a_0"}, "trainable_agents='a_0'"),
        ({"trainable_agents": ["a_0"], "share_parameters": True}, "set share_parameters=False"),
        ({"opponent_mode": "softmax", "opponent_rate": 1.0}, "set trainable_agents"),
        ({"trainable_agents": ["a_0"], "opponent_rate": 1.0}, "opponent_rate=1.0 has no meaning"),
        ({"trainable_agents": ["a_0"], "opponent_mode": "softmax"}, "temperature above 0 as opponent_rate, got None"),
        ({"trainable_agents": ["a_0"], "opponent_mode": "softmax", "opponent_rate": 0}, "temperature above 0"),
        ({"trainable_agents": ["a_0"], "opponent_mode": "epsilon", "opponent_rate": 1.5}, "probability from 0 to 1"),
        ({"trainable_agents": ["a_0"], "opponent_mode": "average"}, "opponent_mode='average': must be 'greedy'"),
    ],
)
def test_settings_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_members_that_cannot_freeze_agents():
    for algorithm in (VDN, QMIX):
        with pytest.raises(ValueError, match="trainable_agents: there is no such setting"):
            make(algorithm, trainable_agents=["a_0"], team_reward="sum")
    with pytest.raises(ValueError, match="leave out trainable_agents"):
        make(DQN, noisy=True, trainable_agents=["a_0"])


def test_who_is_frozen():
    frozen = FrozenAgents(spec=SPEC, trainable=["a_2", "b_0"])
    assert frozen.of("a").tolist() == [True, True, False]
    assert frozen.of("b").tolist() == [False]
    assert frozen.learns.tolist() == [0, 0, 1, 1]
    assert not frozen.state_dict()  # checkpoints fit whoever learns


# Snapshots ----------------------------------------------------------------------------------------------------------


def test_a_snapshot_has_everything_of_an_agent_once():
    module = make(recurrent=True)
    states = snapshot(module)
    assert list(states) == list(SPEC.agents)
    numbers = sum(t.numel() for state in states.values() for part in state.values() for t in part.values())
    assert numbers == sum(parameter.numel() for parameter in module.parameters())
    assert torch.equal(states["a_1"]["online"]["head.weight"], module.networks["a"].head.weight[1])
    assert torch.equal(states["b_0"]["target"]["head.bias"], module.target_networks["b"].head.bias)


@pytest.mark.parametrize("agent", ["a_0", "b_0"])
def test_snapshots_do_not_change_with_the_module(agent):
    """R16."""
    module = make()
    optimizer = learn(module, batches(2))
    states = snapshot(module, optimizer)
    kept = copy.deepcopy(states)
    learn(module, batches(4), optimizer)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.fill_(9.0)
    for part in ("online", "target"):
        assert same(states[agent][part], kept[agent][part])
    for moment in ("exp_avg", "exp_avg_sq"):
        assert same(states[agent]["optimizer"][moment]["online"], kept[agent]["optimizer"][moment]["online"])
    before = weights_of(module, agent)
    states[agent]["online"]["head.weight"].fill_(3.0)  # nor the other way round
    assert same(weights_of(module, agent), before)


@pytest.mark.parametrize("options", [{}, {"recurrent": True}], ids=["mlp", "rnn"])
def test_a_warm_start_goes_on_exactly(options):
    """R13: networks, targets and moments; the other module was made with another seed."""
    made = batches(8)
    options |= {"target_update_rate": 0.1}
    whole = make(**options)
    learn(whole, made)
    half = make(**options)
    states = snapshot(half, learn(half, made[:4]))
    other = make(seed=5, **options)
    load_snapshot(other, states)
    seen = observations(50)
    assert torch.equal(act(other, seen, rate=0, deterministic=True)[1]["a"], act(half, seen, rate=0)[1]["a"])
    optimizer = other.configure_optimizers()
    load_optimizer(optimizer, other, states)
    learn(other, made[4:], optimizer)
    assert all(same(weights_of(other, agent), weights_of(whole, agent)) for agent in SPEC.agents)


def test_without_moments_of_all_learners_the_optimiser_of_a_group_starts_anew():
    module = make()
    states = snapshot(module, learn(module, batches(3)))
    del states["a_1"]["optimizer"]
    fresh = module.configure_optimizers()
    load_optimizer(fresh, module, states)
    assert set(fresh.state) == set(module.networks["b"].parameters())
    frozen = make(trainable_agents=["a_0"])  # of those who do not learn it is not asked
    fresh = frozen.configure_optimizers()
    load_optimizer(fresh, frozen, states)
    assert set(fresh.state) == set(frozen.networks["a"].parameters())


def test_all_misfits_are_listed_at_once_and_nothing_is_changed():
    module = make()
    before = snapshot(module)
    states = snapshot(make(seed=3))
    del states["a_2"]
    states["c_0"] = states["a_0"]
    states["a_1"]["online"]["head.weight"] = torch.zeros(2, 8)
    del states["b_0"]["target"]["head.bias"]
    states["b_0"]["online"]["extra"] = torch.zeros(1)
    with pytest.raises(ValueError, match="does not fit") as caught:
        load_snapshot(module, states)
    assert str(caught.value).splitlines()[1:] == [
        "missing agents: a_2",
        "unknown agents: c_0",
        "a_1: online.head.weight has the shape (2, 8) instead of (3, 8)",
        "b_0: target.head.bias is missing",
        "b_0: online.extra is unknown",
    ]
    assert all(same(snapshot(module)[agent]["online"], before[agent]["online"]) for agent in SPEC.agents)


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        (IQL, {"share_parameters": True}),
        (VDN, {"team_reward": "sum"}),
        (IPPO, {"layer_norm": False}),
        (IPPO, {"normalise_value": False}),
        (IPPO, {"normalise_value": False, "layer_norm": False, "share_parameters": True}),
        (MAPPO, {"normalise_value": False, "layer_norm": False, "team_reward": "mean"}),
    ],
)
def test_agents_that_share_something_have_no_snapshots(algorithm, options):
    with pytest.raises(ValueError, match="save a checkpoint instead"):
        snapshot(make(algorithm, **options))


def test_snapshots_of_actor_critics():
    options = {"layer_norm": False, "normalise_value": False}
    module, other = make(IPPO, **options), make(IPPO, seed=1, **options)
    states = snapshot(module)
    assert states["a_0"].keys() == {"actor", "critic"}
    load_snapshot(other, states)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters(), strict=True))


def test_a_module_without_networks_has_no_snapshot():
    with pytest.raises(ValueError, match="has no networks yet"):
        snapshot(IQL())
