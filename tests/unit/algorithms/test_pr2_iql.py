"""PR2-IQL: what it reduces to, what its networks compute, and what the three responses find."""

import itertools
from functools import partial

import lightning
import numpy as np
import pytest
import torch
from payoff_games import PayoffGame

from marl_lightning.algorithms import IQL
from marl_lightning.algorithms.pr2_iql import PR2IQL
from marl_lightning.callbacks import BoltzmannSchedule, EpsilonSchedule, StopAtEnvSteps
from marl_lightning.data import ReplayDataModule
from marl_lightning.envs import SyncVectorEnv, make_vector_env
from marl_lightning.envs.native.matrix import payoffs
from marl_lightning.losses.response import soft_value

TABULAR = {"hidden_sizes": (8,), "share_parameters": False, "gamma": 0.0, "learning_rate": 2e-2}
RANDOM = np.random.default_rng(0)
THREE = RANDOM.normal(size=(3, 2, 2, 3))  # two groups: two agents with 2 actions, one with 3


def payoff_env(array, **options):
    return SyncVectorEnv(factory=partial(PayoffGame, array, **options), num_envs=4, seed=0)


def train(module, env, *, env_steps, seed=0, explore=None, **data):
    if seed is not None:
        lightning.seed_everything(seed, verbose=False)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=-1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[StopAtEnvSteps(env_steps), explore or EpsilonSchedule(anneal_env_steps=env_steps * 3 // 4)],
    )
    settings = {"capacity": 1000, "rollout_length": 4, "start_training": 64, "training_frequency": 16} | data
    trainer.fit(module, datamodule=ReplayDataModule(env=env, **settings))
    return module


def make(algorithm, env, *, seed=0, **options):
    lightning.seed_everything(seed, verbose=False)
    return algorithm(spec=env.spec, **TABULAR | {"team_reward": None, "target_update_interval": 10} | options)


def batch_of(env, *, sequence_length=1, seed=0, steps=200, module=None, **data):
    """Returns a batch of random play."""
    caught = []

    class Catch(IQL):
        def update(self, batch):
            caught.append(batch)
            super().update(batch)

    play = module or make(Catch, env, seed=seed, recurrent=sequence_length > 1)
    play.update = lambda batch: (caught.append(batch), type(play).update(play, batch))
    train(play, env, env_steps=steps, seed=seed, sequence_length=sequence_length, **data)
    return caught[-1]


def greedy(module, env):
    observations, state = env.reset(), module.policy.initial_state(env.num_envs)
    first = torch.ones(env.num_envs, dtype=torch.bool)
    with torch.no_grad():
        actions, _, _ = module.policy.act(observations, state, first, deterministic=True)
    return [int(a) for group in actions.values() for a in group[0]]


def values_of(module, env):
    """Returns per group the values of own actions, ``[A, n]``, in the only decision there is."""
    observations, state = env.reset(), module.policy.initial_state(env.num_envs)
    first = torch.ones(env.num_envs, dtype=torch.bool)
    with torch.no_grad():
        values, _ = module.policy.action_values(observations, state, first)
    return {name: value[0] for name, value in values.items()}


# --------------------------------------------------------------------------------------------------- what it reduces to

KINDS = [
    {"response_model": "soft"},
    {"response_model": "soft", "aggregate": "lse", "opponents": "pairwise"},
    {"response_model": "learned", "aggregate": "expectation"},
    {"response_model": "marginal", "opponents": "sampled"},
    {"mask_unseen": True},
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"recurrent": True, "share_parameters": True, "gamma": 0.9}])
def test_alone_it_is_iql(kind, options):
    """Whole trainings from one seed, bit for bit."""
    data = {"sequence_length": 4, "prioritised": True} if options else {}
    trained = []
    for algorithm, own in ((IQL, {}), (PR2IQL, kind)):
        env = payoff_env(np.array([[1.0, 3.0, 2.0]]))
        module = train(make(algorithm, env, **options | own), env, env_steps=240, seed=None, **data)
        assert module.updates > 5
        trained.append({name: value for name, value in module.state_dict().items() if not name.endswith("seen")})
    assert trained[0].keys() == trained[1].keys()
    for name, value in trained[0].items():
        assert torch.equal(value, trained[1][name]), name


def test_with_one_thing_to_do_the_others_do_not_matter():
    """The second agent has one action: the first is an IQL agent, the second learns of the first."""
    array = np.stack([[[1.0], [3.0], [2.0]], [[0.0], [5.0], [9.0]]])
    trained = []
    for algorithm in (IQL, PR2IQL):
        module = train(make(algorithm, payoff_env(array)), payoff_env(array), env_steps=240, seed=4)
        trained.append(module)
    networks = [module.networks for module in trained]
    assert (networks[1]["with_1"].parts, networks[1]["with_3"].parts) == ((3,), (1,))
    for one, two in zip(networks[0]["with_3"].parameters(), networks[1]["with_3"].parameters(), strict=True):
        assert torch.equal(one, two)


# --------------------------------------------------------------------------------------------------------- the networks


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("opponents", ["joint", "pairwise", "sampled"])
def test_what_the_others_do_is_put_together_rightly(opponents, share):
    """Values with what the others did are those of a loop over agents, in the order of all agents."""
    env = payoff_env(THREE)
    batch = batch_of(env, seed=3)
    module = make(PR2IQL, env, opponents=opponents, share_parameters=share)
    with torch.no_grad():
        for network in module.networks.values():
            for parameter in network.parameters():
                parameter.normal_()
        result = module.agent_values(module.networks, batch)
    actions = [batch.steps[name, "action"][0, :, i] for name, g in env.spec.groups.items() for i in range(g.num_agents)]
    joint = torch.stack(actions, -1)
    first = 0
    for name, group in env.spec.groups.items():
        network = module.networks[name]
        assert network.sizes == {"with_2": (2, 3), "with_3": (2, 2)}[name]
        outputs = result.features[name]
        for i in range(group.num_agents):
            others = [j for j in range(3) if j != first + i]
            for n in range(8):
                theirs = joint[n, others]
                value = network.value_given(outputs, theirs.expand(*outputs.shape[:-1], 2))[0, n, i]
                torch.testing.assert_close(result.value[name][0, n, i], value)
                if opponents == "joint":
                    index = theirs[0] * network.sizes[1] + theirs[1]
                    raw = outputs[0, n, i].view(group.action_size, -1)[:, index]
                    torch.testing.assert_close(value, raw)
        first += group.num_agents


@pytest.mark.parametrize("model", ["soft", "learned", "marginal"])
@pytest.mark.parametrize("opponents", ["joint", "pairwise"])
def test_values_of_own_actions_equal_enumeration(opponents, model):
    env = payoff_env(THREE)
    module = make(PR2IQL, env, opponents=opponents, response_model=model, temperature=0.7)
    network = module.networks["with_3"]
    outputs = torch.randn(
        5, 1, sum(network.head.weight.shape[1:2]) + (network.response.weight.shape[1] if model != "soft" else 0)
    )
    joint = torch.tensor(list(itertools.product(range(2), range(2))))
    enumerated = torch.stack([network.value_given(outputs, a.expand(5, 1, 2)) for a in joint], -1)
    if model == "soft":
        expected = soft_value(enumerated, (4,), temperature=0.7)
    else:
        action = torch.arange(3).view(3, 1, 1).expand(3, 5, 1)
        loss = [network.response_loss(outputs.expand(3, *outputs.shape), action, a.expand(3, 5, 1, 2)) for a in joint]
        probability = torch.stack(loss, -1).neg().exp().permute(1, 2, 0, 3)
        torch.testing.assert_close(probability.sum(-1), torch.ones(5, 1, 3))
        expected = (probability * enumerated).sum(-1)
        assert torch.allclose(probability[..., :1, :], probability, atol=1e-6) == (model == "marginal")
    torch.testing.assert_close(network.value(outputs), expected)


@pytest.mark.parametrize("model", ["soft", "learned", "marginal"])
def test_samples_agree_with_enumeration(model):
    env = payoff_env(THREE)
    module = make(PR2IQL, env, opponents="sampled", response_model=model, num_samples=40_000, temperature=0.7)
    network = module.networks["with_2"]
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(std=0.4)
        outputs = torch.randn(6, 2, 8 + network.response.weight.shape[1])
        joint = torch.tensor(list(itertools.product(range(2), range(3))))
        enumerated = torch.stack([network.value_given(outputs, a.expand(6, 2, 2)) for a in joint], -1)
        if model == "soft":
            expected = soft_value(enumerated, (6,), temperature=0.7)
        else:
            action = torch.arange(2).view(2, 1, 1).expand(2, 6, 2)
            expanded = outputs.expand(2, *outputs.shape)
            loss = [network.response_loss(expanded, action, a.expand(2, 6, 2, 2)) for a in joint]
            expected = (torch.stack(loss, -1).neg().exp().permute(1, 2, 0, 3) * enumerated).sum(-1)
        torch.testing.assert_close(network.value(outputs), expected, atol=0.05, rtol=0.02)
        assert torch.equal(network.value(outputs), network.value(outputs))


def test_what_has_not_been_seen_does_not_count():
    """The other agent may not play its first action, which would look best."""
    env = payoff_env(payoffs("climbing"), illegal=((1, 0),))
    module = make(PR2IQL, env, mask_unseen=True)
    network = module.networks["with_3"]
    assert not network.seen.any()
    train(module, env, env_steps=200, start_training=1000)
    assert network.seen[0].tolist() == [[False, True, True]] * 3  # of agent 0: what agent 1 did
    assert network.seen[1].tolist() == [[False] * 3, [True] * 3, [True] * 3]  # what agent 0 did with own actions 1, 2
    assert module.updates == 0  # targets know before they are first copied
    assert torch.equal(module.target_networks["with_3"].seen, network.seen)
    outputs = torch.zeros(1, 2, 9)
    outputs[0, 0] = torch.tensor([50.0, 1, 1, 0, 2, 2, 0, 3, 3])
    assert network.value(outputs)[0, 0].tolist() == pytest.approx([1, 2, 3])


# ------------------------------------------------------------------------------------------------------------- the loss


@pytest.mark.parametrize("kind", ["epsilon", "boltzmann"])
@pytest.mark.parametrize("model", ["soft", "learned"])
def test_targets_are_values_under_the_acting_policy(model, kind):
    env = payoff_env(payoffs("climbing"), illegal=((0, 2),))
    batch = batch_of(env)
    module = make(PR2IQL, env, response_model=model, gamma=0.5, temperature=0.5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    module.networks.kind, module.networks.rate = kind, 0.8
    loss, error, metrics = module.loss(batch)
    steps, group = batch.steps[0], "with_3"
    expected, surprise = torch.zeros(2), torch.zeros(2)
    for n in range(len(error[0])):
        for i in range(2):

            def run(networks, observation, i=i):
                network = networks[group]
                rows = torch.zeros(1, 1, 2, 1)
                rows[0, 0, i] = observation
                return network(network.inputs(rows), network.initial_state(1), torch.tensor([[True]]))[0][0, 0, i]

            def split(outputs):
                return outputs[:9].view(3, 3), outputs[9:].view(3, 3) if model == "learned" else None

            def response_value(outputs):
                q, logits = split(outputs)
                if model == "soft":
                    return 0.5 * ((q / 0.5).exp().mean(-1)).log()
                return (logits.softmax(-1) * q).sum(-1)

            now, after = steps[group, "observation"][n, i], steps["next", group, "observation"][n, i]
            own, other = steps[group, "action"][n, i], steps[group, "action"][n, 1 - i]
            preference, value = (
                response_value(run(networks, after)) for networks in (module.networks, module.target_networks)
            )
            legal = torch.tensor([True, True, i == 1])
            if kind == "epsilon":
                future = value[preference.masked_fill(~legal, -1e9).argmax()]
            else:
                future = ((preference / 0.8).masked_fill(~legal, -torch.inf).softmax(-1) * value).sum()
            goal = steps["next", group, "reward"][n, i] + 0.5 * future
            q, logits = split(run(module.networks, now))
            expected[i] += (q[own, other] - goal.detach()).square() / len(error[0])
            if model == "learned":
                surprise[i] -= logits.log_softmax(-1)[own, other] / len(error[0])
    torch.testing.assert_close(loss, (expected + surprise).sum())
    assert ("response_loss" in metrics) == (model == "learned")


def test_illegal_actions_are_never_played():
    env = payoff_env(payoffs("climbing"), illegal=((0, 0), (1, 1)))
    for explore in (None, BoltzmannSchedule(start=1.0, end=1.0)):
        module = train(make(PR2IQL, env), env, env_steps=120, explore=explore)  # the environment refuses illegal ones
        assert greedy(module, env)[0] != 0


@pytest.mark.parametrize("opponents", ["joint", "pairwise", "sampled"])
@pytest.mark.parametrize("model", ["soft", "learned", "marginal"])
def test_all_kinds_train_with_groups_and_memory(model, opponents):
    for share in (True, False):
        env = payoff_env(THREE)
        module = make(
            PR2IQL, env, response_model=model, opponents=opponents, recurrent=True, share_parameters=share, gamma=0.9
        )
        before = [parameter.clone() for parameter in module.learned_parameters()]
        train(module, env, env_steps=120, sequence_length=5, prioritised=share)
        moved = [not torch.equal(a, b) for a, b in zip(before, module.learned_parameters(), strict=True)]
        assert all(moved)


# --------------------------------------------------------------------------------------------------------- bad settings


def test_too_many_joint_actions():
    env = payoff_env(np.zeros((5, 3, 3, 3, 3, 3)))
    with pytest.raises(ValueError, match=r"81 joint actions.*max_joint=80.*'pairwise' or 'sampled'"):
        PR2IQL(spec=env.spec, max_joint=80)
    PR2IQL(spec=env.spec, max_joint=81)
    PR2IQL(spec=env.spec, max_joint=1, opponents="pairwise")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"aggregate": "lse", "response_model": "learned"}, "aggregate='lse' is for response_model='soft'"),
        ({"opponents": "sampled", "mask_unseen": True}, "leave out mask_unseen"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"response_model": "sift"}, "did you mean 'soft'"),
    ],
)
def test_settings_that_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        PR2IQL(**options)


# ------------------------------------------------------------------------------------------------------------- learning


def climb(algorithm, seed):
    env = make_vector_env("matrix/climbing", num_envs=8, seed=seed)
    return greedy(train(make(algorithm, env, seed=seed), env, env_steps=3000, seed=seed), env)


def test_soft_responses_climb():
    assert [climb(PR2IQL, seed) for seed in range(3)] == [[0, 0]] * 3


@pytest.mark.slow
def test_soft_responses_climb_and_independent_learners_do_not():
    found = {algorithm: [climb(algorithm, seed) for seed in range(10)] for algorithm in (PR2IQL, IQL)}
    assert found[PR2IQL].count([0, 0]) >= 9
    assert found[IQL].count([0, 0]) <= 3


def hills():
    """Two agents with a common payoff on a grid: a wide hill of height 0 and a narrow one of 10 (Wei et al. 2018)."""
    x = np.linspace(-10, 10, 21)
    low = -0.8 * (((x[:, None] + 5) / 3) ** 2 + ((x + 5) / 3) ** 2)
    high = 10 - (x[:, None] - 5) ** 2 - (x - 5) ** 2
    return np.stack([np.maximum(low, high)] * 2)


@pytest.mark.slow
def test_soft_responses_reach_the_narrow_hill():
    found = {PR2IQL: [], IQL: []}
    for (algorithm, values), seed in itertools.product(found.items(), range(3)):
        env = payoff_env(hills())
        module = make(algorithm, env, seed=seed)
        train(module, env, env_steps=8000, seed=seed, capacity=4000, training_frequency=8)
        values.append(hills()[(0, *greedy(module, env))])
    assert found[PR2IQL] == [10.0] * 3
    assert found[IQL].count(10.0) <= 1


MIXED = np.array([[[0.0, 3.0], [1.0, 2.0]], [[3.0, 2.0], [0.0, 1.0]]])
"""The game of Wen et al. (2019), whose only equilibrium is that both play both actions equally often."""


def nash_conv(module, env, temperature):
    """Returns how much both agents could gain together by leaving their Boltzmann policies alone."""
    first, second = (values_of(module, env)["with_2"] / temperature).softmax(-1).double().numpy()
    rows, columns = MIXED[0] @ second, first @ MIXED[1]
    return float(rows.max() - first @ rows + columns.max() - columns @ second)


@pytest.mark.slow
def test_learned_responses_find_the_mixed_equilibrium_and_soft_ones_do_not():
    found = {"learned": [], "soft": []}
    for (model, values), seed in itertools.product(found.items(), range(3)):
        env = payoff_env(MIXED)
        module = make(PR2IQL, env, seed=seed, response_model=model, learning_rate=3e-3)
        explore = BoltzmannSchedule(start=0.5, end=0.5)
        train(module, env, env_steps=5000, seed=seed, explore=explore, training_frequency=4)
        values.append(nash_conv(module, env, 0.5))
    assert max(found["learned"]) <= 0.15
    assert min(found["soft"]) >= 0.5
