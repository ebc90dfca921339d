"""Exactness of the on-policy family: ratios, values, bootstraps, chunks, masks, rewards, bad input."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from scripted import CounterGame

from marl_lightning.algorithms import IPPO, MAPPO
from marl_lightning.algorithms.base import check_finite
from marl_lightning.algorithms.on_policy import GroupBatch, compiled, into_sequences, team_reward
from marl_lightning.data.collector import RolloutCollector
from marl_lightning.envs import EnvSpec, GroupSpec, Observations, SyncVectorEnv, make_vector_env

SMALL = {"hidden_sizes": (16,), "chunk_length": 4}


def collect(module, env, rollouts=1, length=8):
    """Collects as the data module does."""
    collector = RolloutCollector(env=env, rollout_length=length, chunk_length=module.chunk_length, seed=env.seed)
    module.eval()
    for _ in range(rollouts):
        rollout = collector.collect(module.policy)
        collector.state = module.prepare_rollout(rollout, collector.state)
    module.train()
    return rollout


def counter_env():
    return SyncVectorEnv(factory=lambda: CounterGame(length=3), num_envs=3, seed=0)


def smac_env():
    return make_vector_env("smac/3m", num_envs=4, seed=0)


CASES = [
    pytest.param(counter_env, {"recurrent": False}, id="mlp"),
    pytest.param(counter_env, {"recurrent": True}, id="gru"),
    pytest.param(counter_env, {"recurrent": True, "share_parameters": False}, id="gru-unshared"),
    pytest.param(counter_env, {"recurrent": False, "squash_actions": True}, id="tanh"),
    pytest.param(smac_env, {"recurrent": True}, id="masked-gru"),
    pytest.param(smac_env, {"recurrent": False, "share_parameters": False}, id="masked-mlp-unshared"),
]


@pytest.mark.parametrize(("make_env", "options"), CASES)
@pytest.mark.parametrize("algorithm", [MAPPO, IPPO])
def test_first_epoch_ratio_is_one_and_values_are_those_of_collection(algorithm, make_env, options):
    """The second rollout starts inside episodes, so that carried states count."""
    torch.manual_seed(0)
    env = make_env()
    module = algorithm(spec=env.spec, output_gain=1.0, **SMALL, **options)
    rollout = collect(module, env, rollouts=2)
    for name, actor in module.actors.items():
        batch = module.training_batch(name, rollout)
        features, _ = actor(batch.actor_inputs, batch.actor_state, batch.is_first)
        log_prob, _ = actor.head.evaluate(features, batch.action, batch.action_mask)
        torch.testing.assert_close((log_prob - batch.log_prob).exp(), torch.ones_like(log_prob), rtol=0, atol=2e-6)
        value, _ = module.critics[name](batch.critic_inputs, batch.critic_state, batch.is_first)
        torch.testing.assert_close(value.expand_as(batch.value), batch.value, rtol=0, atol=2e-6)


@pytest.mark.parametrize("recurrent", [False, True])
def test_bootstraps_are_values_of_true_successors(recurrent):
    """Every next value is recomputed step by step with a fresh loop over the environment's own outputs."""
    torch.manual_seed(0)
    module = IPPO(spec=counter_env().spec, recurrent=recurrent, **SMALL)
    rollout = collect(module, counter_env())
    twin = counter_env()
    observations = twin.reset(seed=0)
    critic = module.critics["red"]
    state, first = torch.zeros(3, 2, critic.body.state_size), torch.ones(1, 3, dtype=torch.bool)
    go_on = torch.zeros(1, 3, dtype=torch.bool)

    def value_of(obs: Observations, state, is_first):
        inputs = critic.inputs(obs.state, obs.observation["red"], obs.alive["red"])
        value, states = critic(inputs[None], state, is_first)
        return value[0], states[0]

    with torch.no_grad():
        for t in range(8):
            _, state = value_of(observations, state, first)
            actions = {name: rollout.steps[name, "action"][t] for name in ("red", "blue")}
            step = twin.step(module.policy.env_actions(actions))
            done = step.terminated | step.truncated
            successor, _ = value_of(step.observations, state, go_on)
            final, _ = value_of(step.final, state, go_on)
            expected = torch.where(done[:, None], final, successor)
            found = rollout.steps["next", "red", "value"][t]
            live = ~step.terminated
            torch.testing.assert_close(found[live], expected[live], rtol=0, atol=2e-6)
            observations, first = step.observations, done[None].clone()


def test_dead_agents_and_ends_do_not_leak_into_the_loss():
    """Garbage in the data of dead agents changes nothing."""
    torch.manual_seed(0)
    env = counter_env()
    module = MAPPO(spec=env.spec, normalise_value=False, **SMALL)
    rollout = collect(module, env)
    dead = ~rollout.steps["red", "alive"]
    assert dead.any()

    def red_loss():
        batch = module.training_batch("red", rollout)
        return module.group_loss(module.actors["red"], module.critics["red"], batch)[0].item()

    before = red_loss()
    rollout.steps["red", "log_prob"][dead] = 7.0
    rollout.steps["red", "action"][dead] = 0
    rollout.steps["red", "observation"][dead] = 123.0
    assert red_loss() == pytest.approx(before, abs=1e-6)
    rollout.steps["red", "log_prob"][~dead] = -7.0  # and the test can fail
    assert red_loss() != pytest.approx(before, abs=1e-3)


@pytest.mark.parametrize("length", [2, 8])  # the death is the last step of a rollout, or within it
def test_nothing_is_to_come_for_an_agent_that_dies(length):
    """``red_1`` gets 1, then dies with -1: by hand with V(s) = 0.1, V(s') = 0.3, gamma = lambda = 0.5."""
    env = counter_env()
    arguments = SMALL | {"gamma": 0.5, "gae_lambda": 0.5, "normalise_value": False}
    own, team = IPPO(spec=env.spec, **arguments), IPPO(spec=env.spec, team_reward="mean", **arguments)
    rollout = collect(own, env, length=length)
    rollout.steps["red", "value"].fill_(0.1)
    rollout.steps["next", "red", "value"].fill_(0.3)

    def red_1(module):
        return module.training_batch("red", rollout).target.view(length, 3, 2)[:2, 0, 1].tolist()

    assert red_1(own) == pytest.approx([1 + 0.15 + 0.25 * (-1 - 0.1), -1])
    # Of a mean of rewards (1, then 0.5, then 1.5) the dead get their share.
    last = 0.5 + 0.15 + (0.25 * (1.5 - 0.1) if length > 2 else 0)
    assert red_1(team) == pytest.approx([1 + 0.15 + 0.25 * (last - 0.1), last])


def test_an_agent_that_is_dead_when_the_episode_is_cut_has_nothing_to_come():
    env = counter_env()
    module = IPPO(spec=env.spec, gamma=0.5, normalise_value=False, **SMALL)
    rollout = collect(module, env)
    cut = rollout.steps["next", "truncated"].nonzero()
    assert len(cut)
    for time, instance in cut.tolist():
        assert rollout.steps["next", "red", "alive"][time, instance].tolist() == [True, False]


def test_the_critic_is_not_called_to_act():
    env = counter_env()
    module = MAPPO(spec=env.spec, recurrent=True, **SMALL)
    module.critics.forward = lambda *a: pytest.fail("called")
    for critic in module.critics.values():
        critic.forward = lambda *a: pytest.fail("called")
    observations = env.reset(seed=0)
    policy = module.policy
    policy.act(observations, policy.initial_state(3), torch.ones(3, dtype=torch.bool), deterministic=True)


def test_deterministic_actions_repeat_and_need_no_randomness():
    env = counter_env()
    module = MAPPO(spec=env.spec, **SMALL)
    observations, first = env.reset(seed=0), torch.ones(3, dtype=torch.bool)
    before = torch.get_rng_state()
    a, b = (module.policy.act(observations, {}, first, deterministic=True)[0] for _ in range(2))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert torch.equal(before, torch.get_rng_state())


def test_central_critic_is_computed_once_an_environment():
    module = MAPPO(spec=smac_env().spec, **SMALL)
    assert module.critics["agents"].num_values == 1
    assert MAPPO(spec=smac_env().spec, critic="agent_state", **SMALL).critics["agents"].num_values == 3


def test_death_masking_hides_the_features_of_the_dead_but_not_their_index():
    module = IPPO(spec=smac_env().spec, **SMALL)
    critic = module.critics["agents"]
    alive = torch.tensor([[True, False, True]])
    inputs = critic.inputs(torch.ones(1, 48), torch.ones(1, 3, 30), alive)
    assert inputs[0, 1].tolist() == [0.0] * 30 + [0.0, 1.0, 0.0]
    assert inputs[0, 0].tolist() == [1.0] * 30 + [1.0, 0.0, 0.0]


def test_shared_actors_know_their_index_and_unshared_ones_have_weights_each():
    spec = smac_env().spec
    shared, unshared = (
        MAPPO(spec=spec, **SMALL).actors["agents"],
        MAPPO(spec=spec, share_parameters=False, **SMALL).actors["agents"],
    )
    assert shared.inputs(torch.zeros(2, 3, 30)).shape == (2, 3, 33)
    assert unshared.inputs(torch.zeros(2, 3, 30)).shape == (2, 3, 30)
    assert unshared.head.logits.weight.shape == (3, 9, 16)


def test_team_reward():
    reward = torch.tensor([[1.0, 2.0, 6.0]])
    assert team_reward(reward, None) is reward
    assert team_reward(reward, "mean").tolist() == [[3.0, 3.0, 3.0]]
    assert team_reward(reward, "sum").tolist() == [[9.0, 9.0, 9.0]]
    assert team_reward(reward, "first").tolist() == [[1.0, 1.0, 1.0]]


def test_sequences_are_chunks_of_one_environment():
    x = torch.arange(6)[:, None] * 10 + torch.arange(2)  # [T=6, E=2]
    assert into_sequences(x, 3).T.tolist() == [[0, 10, 20], [1, 11, 21], [30, 40, 50], [31, 41, 51]]
    assert into_sequences(x, None).tolist() == [[0, 1, 10, 11, 20, 21, 30, 31, 40, 41, 50, 51]]


def test_every_sequence_is_used_once_an_epoch(monkeypatch):
    torch.manual_seed(0)
    env = counter_env()
    module = IPPO(spec=env.spec, num_epochs=3, num_minibatches=5, **SMALL)
    rollout = collect(module, env)
    optimizer = module.configure_optimizers()
    monkeypatch.setattr(module, "optimizers", lambda: optimizer)
    seen = []
    select = GroupBatch.select
    monkeypatch.setattr(GroupBatch, "select", lambda self, rows: seen.append(rows) or select(self, rows))
    module.update(rollout)
    counts = torch.bincount(torch.cat(seen), minlength=24)
    assert counts.tolist() == [3 * 2] * 24  # three epochs, two groups
    assert module.updates == 15


def test_update_improves_the_objective_it_states(monkeypatch):
    torch.manual_seed(0)
    env = counter_env()
    module = MAPPO(spec=env.spec, num_epochs=20, learning_rate=1e-3, entropy_coefficient=0.0, **SMALL)
    rollout = collect(module, env, length=32)
    optimizer = module.configure_optimizers()
    monkeypatch.setattr(module, "optimizers", lambda: optimizer)
    module.update(rollout)
    losses = torch.stack(module._metrics["policy_loss/red"])
    assert losses[-1] < losses[0] - 0.01


def test_learning_rate_falls_linearly_with_env_steps(monkeypatch):
    env = counter_env()
    module = IPPO(spec=env.spec, learning_rate=0.1, learning_rate_decay_env_steps=100, num_epochs=1, **SMALL)
    optimizer = module.configure_optimizers()
    monkeypatch.setattr(module, "optimizers", lambda: optimizer)
    for env_steps, expected in ((0, 0.1), (25, 0.075), (100, 0.0), (150, 0.0)):
        module.env_steps = env_steps
        module.update(collect(module, counter_env()))
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected)


def test_evaluation_only_use_without_an_environment():
    spec = smac_env().spec
    torch.manual_seed(0)
    trained = MAPPO(spec=spec, **SMALL)
    torch.manual_seed(1)
    loaded = MAPPO(spec=spec, **SMALL)
    loaded.load_state_dict(trained.state_dict())
    observations, first = smac_env().reset(seed=3), torch.ones(4, dtype=torch.bool)
    a, b = (m.policy.act(observations, {}, first, deterministic=True) for m in (trained, loaded))
    assert torch.equal(a[0]["agents"], b[0]["agents"])


def test_one_agent_mappo_with_its_observation_as_state_is_ippo():
    """The single-agent case of both is PPO: equal losses and gradients on the same data."""
    box = spaces.Box(-1, 1, (4,), np.float32)
    group = GroupSpec(agents=("agent_0",), observation_space=box, action_space=spaces.Discrete(3))
    spec = EnvSpec(name="test/one", groups={"agents": group}, state_size=4)
    torch.manual_seed(0)
    ippo = IPPO(spec=spec, **SMALL)
    mappo = MAPPO(spec=spec, **SMALL)
    mappo.load_state_dict(ippo.state_dict())
    observation = torch.randn(5, 1, 4)
    alive = torch.ones(5, 1, dtype=torch.bool)
    for module in (ippo, mappo):
        critic = module.critics["agents"]
        inputs = critic.inputs(observation[:, 0], observation, alive)
        value, _ = critic(inputs[None], None, None)
        value.sum().backward()
    for a, b in zip(ippo.parameters(), mappo.parameters(), strict=True):
        assert (a.grad is None and b.grad is None) or torch.equal(a.grad, b.grad)


def test_nan_is_named_with_its_env_step_and_its_origin():
    env = counter_env()
    module = MAPPO(spec=env.spec, **SMALL)
    rollout = collect(module, env)
    check_finite({"loss": 1.0}, env_steps=5, steps=rollout.steps)
    with pytest.raises(FloatingPointError, match=r"value_loss became NaN or infinite at env step 640\. Lower"):
        check_finite({"value_loss": float("nan"), "entropy": 1.0}, env_steps=640, steps=rollout.steps)
    rollout.steps["next", "red", "reward"][0, 0, 0] = float("inf")
    with pytest.raises(FloatingPointError, match="NaN or inf in next/red/reward"):
        check_finite({"value_loss": float("inf")}, env_steps=640, steps=rollout.steps)


def test_bad_arguments_are_listed_together():
    with pytest.raises(ValueError, match="gamma") as error:
        MAPPO(gamma=1.5, learning_rate=-1.0, num_epochs=0, critic="stat")
    message = str(error.value)
    assert all(name in message for name in ("gamma", "learning_rate", "num_epochs", "critic", "'state'"))
    with pytest.raises(ValueError, match="did you mean 'learning_rate'"):
        MAPPO(learning_rat=1e-3)
    with pytest.raises(ValueError, match="team_reward"):
        MAPPO(team_reward=None)


def test_ippo_differs_by_its_defaults_only():
    module = IPPO()
    assert (module.hparams.critic, module.hparams.team_reward, module.hparams.value_active_masks) == (
        "observation",
        None,
        False,
    )
    assert MAPPO().hparams.keys() == module.hparams.keys()


@pytest.mark.parametrize("recurrent", [False, True])
def test_compiled_loss_is_the_loss(recurrent):
    torch.manual_seed(0)
    env = smac_env()
    module = MAPPO(spec=env.spec, recurrent=recurrent, compile=True, **SMALL)
    batch = module.training_batch("agents", collect(module, env))
    arguments = module.actors["agents"], module.critics["agents"], batch
    expected, _ = module.group_loss(*arguments)
    expected.backward()
    gradients = [parameter.grad.clone() for parameter in module.parameters()]
    module.zero_grad()
    found, metrics = module._group_loss(*arguments)
    found.backward()
    torch.testing.assert_close(found, expected)
    for parameter, gradient in zip(module.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-5)
    assert metrics.keys() == {"approx_kl", "clip_fraction", "policy_loss", "value_loss", "entropy"}


def test_without_a_compiler_there_is_a_warning_and_the_plain_loss(monkeypatch):
    from torch._dynamo.exc import BackendCompilerFailed

    calls = []

    def compile_(function):
        def fails(*args):
            calls.append(args)
            raise BackendCompilerFailed(compile_, RuntimeError("no compiler"), None)

        return fails

    monkeypatch.setattr(torch, "compile", compile_)
    double = compiled(lambda x: 2 * x)
    with pytest.warns(UserWarning, match=r"algorithm\.compile is ignored"):
        assert double(3) == 6
    assert double(4) == 8
    assert len(calls) == 1


def test_errors_of_a_compiled_function_are_not_hidden(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function: function)

    def broken(x):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        compiled(broken)(1)
