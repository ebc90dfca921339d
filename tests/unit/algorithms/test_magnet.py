"""Policies that are held close to a magnet: divergences, units, what is settled on, how the magnet follows."""

import copy
import math

import lightning
import numpy as np
import pytest
import torch
from gymnasium import spaces
from scripted import CounterGame
from torch.distributions import Categorical, Independent, Normal
from torch.distributions import kl_divergence as oracle

from marl_lightning.algorithms import IPPO, MAPPO
from marl_lightning.algorithms.snapshots import load_snapshot, snapshot
from marl_lightning.callbacks import EnvStepCheckpoint, StopAtEnvSteps
from marl_lightning.data import RolloutDataModule
from marl_lightning.data.collector import RolloutCollector
from marl_lightning.envs import SyncVectorEnv, make_vector_env
from marl_lightning.envs.native.matrix import payoffs
from marl_lightning.nn.heads import CategoricalHead, GaussianHead, MultiCategoricalHead, kl_divergence

SMALL = {"hidden_sizes": (8,), "chunk_length": 4, "num_epochs": 2, "num_minibatches": 2, "learning_rate": 0.02}
UNIFORM = {"magnet": "uniform", "magnet_coefficient": 0.5}
PERIODIC = {"magnet": "periodic", "magnet_coefficient": 0.5, "magnet_refresh_env_steps": 50}
EMA = {"magnet": "ema", "magnet_coefficient": 0.5, "magnet_rate": 0.25}


def make(spec, algorithm=IPPO, seed=0, **options):
    torch.manual_seed(seed)
    return algorithm(spec=spec, **(SMALL | options))


def collect(module, env, rollouts=1, length=8):
    """Collects as the data module does; the rollouts can be kept."""
    collector = RolloutCollector(env=env, rollout_length=length, chunk_length=module.chunk_length, seed=0)
    for _ in range(rollouts):
        rollout = collector.collect(module.policy)
        collector.state = module.prepare_rollout(rollout, collector.state)
        yield copy.deepcopy(rollout)


def counter_env():
    return SyncVectorEnv(factory=CounterGame, num_envs=3, seed=0)


def climbing_env():
    return make_vector_env("matrix/climbing", num_envs=4, seed=5)


# Divergences --------------------------------------------------------------------------------------------------------


def test_divergence_by_hand():
    """``0.75 log 1.5 + 0.25 log 0.5`` from the uniform one, and the other way round."""
    p, q = torch.tensor([0.75, 0.25]).log(), torch.tensor([0.5, 0.5]).log()
    assert kl_divergence(p, q).item() == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5))
    assert kl_divergence(q, p).item() == pytest.approx(0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25))
    assert kl_divergence(p, p).item() == 0.0


def heads(make_head):
    torch.manual_seed(0)
    return make_head(), make_head(), 2 * torch.randn(7, 3, 6)


def test_divergence_of_categorical_heads():
    one, other, features = heads(lambda: CategoricalHead(in_features=6, num_actions=5, gain=3.0))
    mask = torch.rand(7, 3, 5) < 0.6
    mask[..., 2] = True
    found = one.kl_divergence(features, mask, other.distribution(features, mask))
    expected = oracle(*(Categorical(logits=head.log_probs(features, mask)) for head in (one, other)))
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    assert one.logits.weight.grad.isfinite().all()
    assert (one.kl_divergence(features, mask, one.distribution(features, mask)) == 0).all()


def test_divergence_from_the_uniform_one_is_the_lack_of_entropy():
    one, _, features = heads(lambda: CategoricalHead(in_features=6, num_actions=5, gain=3.0))
    mask = torch.rand(7, 3, 5) < 0.6
    mask[..., 2] = True
    mask[0, 0] = torch.tensor([False, False, True, False, False])
    found = one.kl_divergence(features, mask, one.uniform(mask))
    _, entropy = one.evaluate(features, torch.full((7, 3), 2), mask)
    torch.testing.assert_close(found, mask.sum(-1).float().log() - entropy)
    assert found[0, 0] == 0  # one legal action


def test_divergence_of_actions_in_several_parts():
    one, other, features = heads(lambda: MultiCategoricalHead(in_features=6, action_parts=(2, 3), gain=3.0))
    mask = torch.tensor([True, True, True, False, True])
    found = one.kl_divergence(features, mask, other.distribution(features, mask))

    def parts(head):
        logits = head.logits(features).masked_fill(~mask, -1e8)
        return Categorical(logits=logits[..., :2]), Categorical(logits=logits[..., 2:])

    expected = sum(oracle(p, q) for p, q in zip(parts(one), parts(other), strict=True))
    torch.testing.assert_close(found, expected)
    _, entropy = one.evaluate(features, torch.zeros(7, 3, 2, dtype=torch.int64), mask)
    from_uniform = one.kl_divergence(features, mask, one.uniform(mask.expand(7, 3, 5)))
    torch.testing.assert_close(from_uniform, 2 * math.log(2) - entropy)


@pytest.mark.parametrize("num_agents", [None, 3])
def test_divergence_of_gaussians(num_agents):
    box = spaces.Box(-1, 1, (2,), np.float32)
    one, other, features = heads(lambda: GaussianHead(in_features=6, action_space=box, num_agents=num_agents, gain=1.0))
    with torch.no_grad():
        one.log_std.add_(0.3 * torch.randn_like(one.log_std))
    found = one.kl_divergence(features, None, other.distribution(features, None))
    expected = oracle(
        *(Independent(Normal(head.mean(features), head.log_std.exp().expand(7, 3, 2)), 1) for head in (one, other))
    )
    torch.testing.assert_close(found, expected)


# Units --------------------------------------------------------------------------------------------------------------


def actor_gradient(rollout, factor, **options):
    """Of the first update, if all rewards and the coefficient are so many times as large."""
    module = make(CounterGame().spec, num_epochs=1, entropy_coefficient=0.0, normalise_value=False, **options)
    with torch.no_grad():
        for parameter in module.actors.parameters():
            parameter.add_(torch.randn_like(parameter))  # away from the magnet
    rollout = copy.deepcopy(rollout)
    rollout.steps["red", "value"].zero_()
    rollout.steps["next", "red", "value"].zero_()
    rollout.steps["next", "red", "reward"].mul_(factor)
    batch = module.training_batch("red", rollout)
    loss, metrics = module.group_loss(module.actors["red"], module.critics["red"], batch)
    loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in module.actors["red"].parameters()]), metrics


def test_the_coefficient_is_in_units_of_reward():
    """What is worth ten times as much is held ten times as tight, whether advantages are normalised or not."""
    (rollout,) = collect(make(CounterGame().spec, **EMA), counter_env())
    for normalise, expected in ((True, 1), (False, 10)):
        once, many = (
            actor_gradient(rollout, factor, normalise_advantage=normalise, **EMA | {"magnet_coefficient": 0.5 * factor})
            for factor in (1, 10)
        )
        torch.testing.assert_close(many[0], expected * once[0], rtol=1e-4, atol=1e-6)
        assert torch.equal(many[1]["magnet_kl"], once[1]["magnet_kl"])
        other, _ = actor_gradient(rollout, 10, normalise_advantage=normalise, **EMA)
        assert not torch.allclose(other, expected * once[0], rtol=1e-2)  # and the test can fail


def test_a_uniform_magnet_is_an_entropy_bonus():
    env = make_vector_env("openspiel/kuhn_poker", num_envs=3, seed=0, vectorization="sync")
    torch.manual_seed(1)
    options = {"normalise_advantage": False, "output_gain": 1.0}
    held = make(env.spec, entropy_coefficient=0.0, **UNIFORM, **options)
    drawn = make(env.spec, entropy_coefficient=0.5, **options)
    (rollout,) = collect(drawn, env)
    for module in (drawn, held):
        module.prepare_rollout(rollout, {})
        batch = module.training_batch("player", rollout)
        module.group_loss(module.actors["player"], module.critics["player"], batch)[0].backward()
    for one, other in zip(held.parameters(), drawn.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)


# What is settled on -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["uniform", "periodic"])
def test_the_reply_to_a_frozen_agent_is_quantal(kind):
    """The best reply under the penalty is ``rho(a) exp(q(a) / coefficient)``, normalised.

    ``q`` are the expected payoffs of the climbing game, from -30 to 11, against an agent whose actions have the
    probabilities ``p``. A ``rho`` that is not uniform prefers the first action.
    """
    env = make_vector_env("matrix/climbing", num_envs=64, seed=0)
    apart = {"share_parameters": False, "layer_norm": False, "normalise_value": False}
    options = {"learning_rate": 0.01, "num_epochs": 4, "entropy_coefficient": 0.0, "gamma": 0.0, "magnet": kind}
    options |= {"magnet_refresh_env_steps": 10**9} if kind == "periodic" else {}
    module = make(env.spec, trainable_agents=["agent_0"], magnet_coefficient=5.0, **apart, **options)
    p, rho = torch.tensor([0.2, 0.3, 0.5]), torch.full((3,), 1 / 3)
    with torch.no_grad():
        head = module.actors["agents"].head.logits
        head.weight.zero_()
        head.bias[1] = p.log()
        if kind == "periodic":
            rho = torch.tensor([0.7, 0.2, 0.1])
            head.bias[0] = rho.log()
    if kind == "periodic":
        module.magnet.restart(module.actors)
    q = torch.from_numpy(payoffs("climbing")[0]) @ p
    expected = rho * (q / 5).exp()
    optimizer = module.configure_optimizers()
    module.optimizers = lambda: optimizer
    collector = RolloutCollector(env=env, rollout_length=16, seed=0)
    found, updates = [], 50
    for update in range(updates):
        optimizer.param_groups[0]["lr"] = 0.01 * (1 - update / updates)
        rollout = collector.collect(module.policy)
        module.prepare_rollout(rollout, {})
        module.update(rollout)
        with torch.no_grad():
            seen, first = collector._observations, torch.ones(64, dtype=torch.bool)
            found.append(module.policy.action_probabilities(seen, {}, first)[0]["agents"][0])
    last = torch.stack(found[-20:]).mean(0)
    torch.testing.assert_close(last[1], p)
    torch.testing.assert_close(last[0], expected / expected.sum(), atol=0.03, rtol=0)


# How the magnet follows ---------------------------------------------------------------------------------------------


def fit(module, env, *, env_steps, folder=None, callbacks=(), ckpt_path=None):
    lightning.seed_everything(3, verbose=False)
    trainer = lightning.Trainer(
        default_root_dir=folder, accelerator="cpu", max_epochs=-1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=any(isinstance(c, EnvStepCheckpoint) for c in callbacks),
        callbacks=[StopAtEnvSteps(env_steps), *callbacks],
    )  # fmt: skip
    trainer.fit(module, datamodule=RolloutDataModule(env=env, rollout_length=8), ckpt_path=ckpt_path)
    return trainer


class Weights(lightning.Callback):
    """What the networks are after every rollout, and what metrics say."""

    def __init__(self):
        self.policy, self.magnet, self.metrics = [], [], []

    def on_train_batch_end(self, trainer, module, *_):
        for kept, networks in ((self.policy, module.actors), (self.magnet, module.magnet.networks)):
            kept.append(torch.cat([p.detach().flatten() for p in networks.parameters()]))
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def test_a_periodic_magnet_becomes_the_policy_when_its_interval_ends():
    """Rollouts of 32 env steps cross multiples of 50 at 64, 128 (100 is passed) and 160."""
    module, weights = make(climbing_env().spec, **PERIODIC), Weights()
    start = torch.cat([p.detach().flatten() for p in module.actors.parameters()])
    fit(module, climbing_env(), env_steps=160, callbacks=[weights])
    expected = [start, weights.policy[1], weights.policy[1], weights.policy[3], weights.policy[4]]
    for found, now in zip(weights.magnet, expected, strict=True):
        assert torch.equal(found, now)
    assert not torch.equal(weights.policy[0], start)
    kl = [metrics["magnet_kl"] for metrics in weights.metrics]
    assert kl[1] > kl[2]  # close again


def test_an_ema_magnet_moves_after_every_rollout():
    module, weights = make(climbing_env().spec, **EMA), Weights()
    magnet = torch.cat([p.detach().flatten() for p in module.actors.parameters()])
    fit(module, climbing_env(), env_steps=96, callbacks=[weights])
    for found, policy in zip(weights.magnet, weights.policy, strict=True):
        magnet = 0.75 * magnet + 0.25 * policy
        torch.testing.assert_close(found, magnet)


def test_the_coefficient_is_annealed_by_env_steps():
    module, weights = (
        make(
            climbing_env().spec,
            **PERIODIC | {"magnet_coefficient_end": 0.1, "magnet_anneal_env_steps": 128, "magnet_coefficient": 0.5},
        ),
        Weights(),
    )
    fit(module, climbing_env(), env_steps=192, callbacks=[weights])
    found = [metrics["magnet_coefficient"] for metrics in weights.metrics]
    assert found == pytest.approx([0.5, 0.4, 0.3, 0.2, 0.1, 0.1])


def test_the_magnet_is_not_learned_and_nothing_is_drawn_for_it():
    plain = make(climbing_env().spec)
    drawn = torch.get_rng_state()
    held = make(climbing_env().spec, **PERIODIC)
    assert torch.equal(torch.get_rng_state(), drawn)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, held.state_dict()[name])
    assert not any(parameter.requires_grad for parameter in held.magnet.parameters())
    optimised = {id(p) for group in held.configure_optimizers().param_groups for p in group["params"]}
    assert not optimised & {id(parameter) for parameter in held.magnet.parameters()}


@pytest.mark.parametrize("recurrent", [False, True])
def test_the_magnet_remembers_its_own_past(recurrent):
    """Of a policy that has changed since: the magnet over two rollouts, and over the ends of episodes."""
    module = make(CounterGame().spec, recurrent=recurrent, output_gain=3.0, **EMA)
    with torch.no_grad():
        for parameter in module.actors.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    rollouts = list(collect(module, counter_env(), rollouts=2))
    for name, actor in module.magnet.networks.items():
        observation, first = (
            torch.cat([r.steps[key] for r in rollouts]) for key in ((name, "observation"), "is_first")
        )
        state = observation.new_zeros(3, actor.num_agents, actor.body.state_size)
        with torch.no_grad():
            features, _ = actor(actor.inputs(observation), state, first)
            mask = torch.cat([r.steps[name, "action_mask"] for r in rollouts]) if name == "red" else None
            expected = actor.head.distribution(features, mask)
            wrong, _ = module.actors[name](actor.inputs(observation), state, first)
        found = torch.cat([r.steps[name, "magnet"] for r in rollouts])
        torch.testing.assert_close(found, expected)
        assert not torch.allclose(found, module.actors[name].head.distribution(wrong, mask))


CASES = {
    "periodic": (IPPO, PERIODIC | {"magnet_refresh_env_steps": 80}),
    "ema rnn": (MAPPO, EMA | {"recurrent": True}),
    "uniform": (IPPO, UNIFORM | {"magnet_coefficient_end": 0.1, "magnet_anneal_env_steps": 160}),
}


@pytest.mark.parametrize("case", CASES)
def test_resuming_equals_not_stopping(case, tmp_path):
    algorithm, options = CASES[case]

    def train(env_steps, *, seed=0, folder="whole", ckpt_path=None):
        callbacks = [EnvStepCheckpoint(directory=tmp_path / folder, every_env_steps=96)]
        module = make(climbing_env().spec, algorithm, seed=seed, **options)
        fit(module, climbing_env(), env_steps=env_steps, folder=tmp_path, callbacks=callbacks, ckpt_path=ckpt_path)
        return module.state_dict()

    expected = train(192)
    train(96, folder="half")
    resumed = train(192, seed=1, folder="rest", ckpt_path=tmp_path / "half" / "last.ckpt")
    assert any(name.startswith("magnet") for name in expected) == (case != "uniform")
    for name, tensor in expected.items():
        assert torch.equal(tensor, resumed[name]), name


def test_a_warm_start_is_where_the_magnet_is_too():
    spec = make_vector_env("openspiel/kuhn_poker", num_envs=1, seed=0, vectorization="sync").spec
    apart = {"share_parameters": False, "layer_norm": False, "normalise_value": False}
    former, module = make(spec, seed=1, **apart), make(spec, **apart, **PERIODIC)
    load_snapshot(module, snapshot(former))
    for found, expected in zip(module.magnet.networks.parameters(), former.actors.parameters(), strict=True):
        assert torch.equal(found, expected)


# Wrong settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"magnet": "uniform"}, "magnet='uniform' needs magnet_coefficient: set it"),
        ({"magnet_coefficient": 0.1}, "magnet_coefficient=0.1 has no meaning with magnet='none'"),
        (UNIFORM | {"magnet_coefficient": 0.0}, "magnet_coefficient=0.0"),
        (UNIFORM | {"magnet_rate": 0.1}, "magnet_rate=0.1 has no meaning with magnet='uniform'"),
        (UNIFORM | {"magnet": "periodic"}, "magnet='periodic' needs magnet_refresh_env_steps"),
        (UNIFORM | {"magnet": "ema"}, "magnet='ema' needs magnet_rate"),
        (EMA | {"magnet_rate": 1.5}, "magnet_rate=1.5"),
        (EMA | {"magnet_refresh_env_steps": 5}, "magnet_refresh_env_steps=5 has no meaning with magnet='ema'"),
        (UNIFORM | {"magnet_coefficient_end": 0.1}, "magnet_anneal_env_steps=None say together"),
        (UNIFORM | {"magnet_anneal_env_steps": 10}, "magnet_coefficient_end=None"),
        ({"magnet_coefficient_end": 0.1, "magnet_anneal_env_steps": 10}, "and magnet, or leave these two out"),
        (UNIFORM, "magnet='uniform' needs discrete actions, but those of 'blue' are continuous: set magnet to"),
        ({"magnet": "unifrom", "magnet_coefficient": 0.1}, "did you mean 'uniform'"),
    ],
)
def test_settings_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        make(CounterGame().spec, **options)
