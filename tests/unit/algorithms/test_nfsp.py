"""NFSP: who plays what and when, what goes into the reservoirs, and what the average policies learn of it."""

import subprocess
import sys
import textwrap
from functools import partial
from types import SimpleNamespace

import lightning
import numpy as np
import pytest
import torch
from gymnasium import spaces
from payoff_games import PayoffGame
from scipy import stats

from marl_lightning.algorithms import IQL, NFSP
from marl_lightning.algorithms.nfsp import average_policy_loss, mode_key
from marl_lightning.algorithms.snapshots import snapshot
from marl_lightning.callbacks import EnvStepCheckpoint, EpsilonSchedule, EvaluationCallback, StopAtEnvSteps
from marl_lightning.clock import Schedule
from marl_lightning.data import ReplayDataModule
from marl_lightning.data.collector import RolloutCollector
from marl_lightning.data.replay import replay_records
from marl_lightning.data.reservoir import Reservoir
from marl_lightning.envs import EnvSpec, GroupSpec, Observations, SyncVectorEnv, make_vector_env
from marl_lightning.evaluation import evaluate, load_checkpoint
from marl_lightning.games import nash_conv

LIMIT = 5  # steps of an episode
GREEDY = Schedule(start=0.0, end=0.0, anneal_env_steps=0)


def payoff_env(*, num_envs=4, agents=2, actions=3, seed=0, **options):
    """Nobody is ever paid; all see 1."""
    array = np.zeros((agents, *(actions,) * agents))
    return SyncVectorEnv(factory=partial(PayoffGame, array, limit=LIMIT, **options), num_envs=num_envs, seed=seed)


def two_groups(*, num_envs=4, **options):
    factory = partial(PayoffGame, np.zeros((3, 2, 2, 3)), limit=LIMIT, **options)
    return SyncVectorEnv(factory=factory, num_envs=num_envs, seed=0)


@torch.no_grad()
def decided(env, *, best=0, average=1, **options):
    """A module of which the best response always takes one action, and the average policy another one."""
    module = NFSP(spec=env.spec, hidden_sizes=(4,), **options)
    for network in module.networks.values():
        network.head.weight.zero_()
        network.head.bias[..., best] = 1.0
    for actor in module.average_policy.values():
        actor.head.logits.weight.zero_()
        actor.head.logits.bias[..., average] = 100.0
    module.networks.schedule = GREEDY
    module.networks.explore_at(0)
    return module


def collect(module, env, *, steps, rollouts=1, seed=0):
    collector = RolloutCollector(
        env=env, rollout_length=steps, seed=seed, keep_final="ended", keep_states=module.keep_states
    )
    for _ in range(rollouts):
        yield collector.collect(module.policy)


# Acting -------------------------------------------------------------------------------------------------------------


def test_agents_draw_for_themselves_what_they_play_and_keep_to_it_for_an_episode():
    env = payoff_env(num_envs=40)
    module = decided(env, anticipatory=0.3)
    modes, previous = [], None
    for rollout in collect(module, env, steps=3, rollouts=100):  # so that episodes go over the ends of rollouts
        mode = rollout.states["nfsp/with_3"]
        assert torch.equal(rollout.steps["with_3", "action"], torch.where(mode, 0, 1))
        for t, is_first in enumerate(rollout.steps["is_first"]):
            if previous is not None:
                assert torch.equal(mode[t][~is_first], previous[~is_first])
            previous = mode[t]
        modes.append(mode[rollout.steps["is_first"]].clone())
    modes = torch.cat(modes)
    assert modes.shape == (40 * 60, 2)
    assert stats.binomtest(int(modes.sum()), modes.numel(), 0.3).pvalue > 0.001
    both = int(modes.all(-1).sum())  # independently of each other
    assert stats.binomtest(both, len(modes), 0.09).pvalue > 0.001


def test_each_group_has_its_own():
    env = two_groups(num_envs=50)
    module = decided(env, anticipatory=0.5)
    (rollout,) = collect(module, env, steps=2)
    assert rollout.states.keys() == {"nfsp/with_2", "nfsp/with_3"}
    assert not torch.equal(rollout.states["nfsp/with_2"][..., :1], rollout.states["nfsp/with_3"])
    for name in ("with_2", "with_3"):
        assert torch.equal(rollout.steps[name, "action"] == 0, rollout.states[f"nfsp/{name}"])


def test_the_best_response_explores_as_the_schedule_says_and_the_average_policy_does_not():
    env = payoff_env(num_envs=200)
    module = decided(env, anticipatory=0.5)
    module.policy.kind, module.policy.schedule = "epsilon", Schedule(start=0.6, end=0.6)
    module.prepare_collection()
    (rollout,) = collect(module, env, steps=LIMIT)
    action, mode = rollout.steps["with_3", "action"], rollout.states["nfsp/with_3"]
    assert action[~mode].eq(1).all()
    assert stats.binomtest(int((action[mode] != 0).sum()), int(mode.sum()), 0.4).pvalue > 0.001
    assert (module.policy.kind, module.policy.schedule(0)) == ("epsilon", 0.6)


def test_evaluations_are_of_the_average_policy():
    env = payoff_env()
    module = decided(env, best=0, average=2, anticipatory=1.0)
    played = []
    step = env.step
    env.step = lambda actions: played.append(actions["with_3"].clone()) or step(actions)
    evaluate(module.policy, env, episodes=4)
    assert torch.cat(played).eq(2).all()
    played.clear()
    evaluate(module.policy, env, episodes=4, deterministic=False)
    assert torch.cat(played).eq(0).all()


def test_nash_conv_is_that_of_the_average_policy_or_of_the_best_response():
    env = make_vector_env("matrix/rock_paper_scissors", num_envs=1, episode_length=1)
    module = decided(env)
    with torch.no_grad():
        module.average_policy["agents"].head.logits.bias.zero_()
    assert nash_conv(module.average_policy, env).value == pytest.approx(0, abs=1e-6)
    assert nash_conv(module.networks, env, mode="greedy").value == pytest.approx(2)
    assert nash_conv(module.policy, env, mode="greedy").value == pytest.approx(2)
    with pytest.raises(TypeError, match=r"module\.average_policy"):
        nash_conv(module.policy, env)


def test_illegal_actions_are_never_taken():
    illegal = ((0, 0), (1, 1), (1, 2))
    env = payoff_env(num_envs=100, illegal=illegal)
    torch.manual_seed(0)
    module = NFSP(spec=env.spec, hidden_sizes=(4,), anticipatory=0.5)
    (rollout,) = collect(module, env, steps=LIMIT)
    taken = rollout.steps["with_3", "action_mask"].gather(-1, rollout.steps["with_3", "action"].unsqueeze(-1))
    assert taken.all()
    observations = env.reset()
    stated, _ = module.average_policy.action_probabilities(observations, {}, torch.ones(100, dtype=torch.bool))
    for agent, action in illegal:
        assert stated["with_3"][:, agent, action].eq(0).all()


# Storing ------------------------------------------------------------------------------------------------------------


def with_reservoirs(module, *, capacity=1000):
    """Gives a module that is not being trained what it would make then."""
    module._reservoirs = {
        name: Reservoir(capacity=capacity, num_agents=group.num_agents, seed=0)
        for name, group in module.spec.groups.items()
    }
    return module


def held(reservoir, key):
    """Returns by agent what is held, in the order of time as long as the reservoir is not full."""
    items = reservoir.state_dict()["items"][key]
    return [items[agent, :size] for agent, size in enumerate(reservoir.size.tolist())]


def test_what_best_responses_chose_is_stored_and_nothing_else():
    env = two_groups(num_envs=10, illegal=((1, 0),))  # agent 1 has no choice
    module = with_reservoirs(decided(env, anticipatory=0.4))
    module.networks.schedule = Schedule(start=0.5, end=0.5)
    module.prepare_collection()
    expected = {"with_2": [[], []], "with_3": [[]]}
    for rollout in collect(module, env, steps=3, rollouts=4):
        module.on_collected(rollout)
        for name, lists in expected.items():
            action, mode = rollout.steps[name, "action"], rollout.states[mode_key(name)]
            for t, e, agent in mode.nonzero().tolist():  # in order of time
                if (name, agent) != ("with_2", 1):
                    lists[agent].append(action[t, e, agent].item())
    assert module.env_steps == 120
    found = {name: [chosen.tolist() for chosen in held(module.reservoirs[name], "action")] for name in expected}
    assert found == expected
    assert {0, 1} <= set(found["with_2"][0])  # also what was done by chance


def test_the_dead_choose_nothing_and_each_decision_keeps_what_was_seen():
    env = payoff_env(num_envs=3)
    module = with_reservoirs(decided(env, anticipatory=1.0))
    (rollout,) = collect(module, env, steps=2)
    steps = rollout.steps
    steps["with_3", "observation"].copy_(torch.arange(12.0).view(2, 3, 2, 1))
    steps["with_3", "action"].copy_(torch.arange(12).view(2, 3, 2) % 3)
    steps["with_3", "action_mask"][0, 1, 0, 2] = False
    steps["with_3", "alive"][1, 0, 0] = False
    module.on_collected(rollout)
    seen, action, mask = (held(module.reservoirs["with_3"], key) for key in ("observation", "action", "action_mask"))
    assert [values.flatten().tolist() for values in seen] == [[0, 2, 4, 8, 10], [1, 3, 5, 7, 9, 11]]
    assert [values.tolist() for values in action] == [[0, 2, 1, 2, 1], [1, 0, 2, 1, 0, 2]]
    assert mask[0].sum(-1).tolist() == [3, 2, 3, 3, 3]


def test_reservoirs_of_processes_and_groups_are_seeded_apart():
    states = []
    for seed in (5, 9):  # of processes with four instances each
        module = NFSP(spec=two_groups().spec)
        module._trainer = SimpleNamespace(datamodule=SimpleNamespace(seed=seed))
        states += [bytes(saved["generator"].tolist()) for saved in module.local_state_dict().values()]
    assert len(set(states)) == 4


# Learning -----------------------------------------------------------------------------------------------------------


def test_the_loss_by_hand():
    log_prob = torch.tensor([[0.5, 0.25], [0.25, 0.125]]).log2()  # 1, 2, 2 and 3 bits
    both, first = torch.ones(2), torch.tensor([1.0, 0.0])
    assert average_policy_loss(log_prob, both, separate=False).item() == 2.0
    assert average_policy_loss(log_prob, both, separate=True).item() == 4.0
    assert average_policy_loss(log_prob, first, separate=False).item() == 1.5
    assert average_policy_loss(log_prob, first, separate=True).item() == 1.5


def store(module, *, name="with_3", seen, action, mask, chosen=None):
    """Puts decisions ``[M, A]`` into the reservoir of a group."""
    action = torch.tensor(action)
    items = {
        "observation": torch.tensor(seen).unsqueeze(-1),
        "action_mask": torch.tensor(mask).expand(*action.shape, -1),
        "action": action,
    }
    module.reservoirs[name].add(items, torch.ones_like(action, dtype=torch.bool) if chosen is None else chosen)


@pytest.mark.parametrize("share_parameters", [True, False])
def test_the_loss_of_a_batch_is_the_cross_entropy_over_legal_actions(share_parameters):
    """Logits are 0 for action 0, ln 2 for 1 and ln 5 for 2; all decisions of an agent are alike."""
    env = payoff_env()
    module = NFSP(spec=env.spec, hidden_sizes=(4,), average_batch_size=4, share_parameters=share_parameters)
    with_reservoirs(module)
    with torch.no_grad():
        head = module.average_policy["with_3"].head.logits
        head.weight.zero_()
        head.bias.copy_(torch.tensor([1.0, 2.0, 5.0]).log())
    mask = [[True, True, False], [True, True, True]]
    some = torch.tensor([[True, False]])
    store(module, seen=[[1.0, 1.0]] * 3, action=[[0, 2]] * 3, mask=mask)
    assert module.average_loss() is None
    store(module, seen=[[1.0, 1.0]], action=[[0, 2]], mask=mask, chosen=some)
    assert module.average_loss().item() == pytest.approx(np.log(3))  # of agent 0 alone: 1 of 1 + 2
    store(module, seen=[[1.0, 1.0]], action=[[0, 2]], mask=mask, chosen=~some)
    both = np.log(3) + np.log(8 / 5)
    assert module.average_loss().item() == pytest.approx(both / 2 if share_parameters else both)


def seeing_spec():
    group = GroupSpec(
        agents=("a", "b"), observation_space=spaces.Box(0, 1, (1,), np.float32), action_space=spaces.Discrete(3)
    )
    return EnvSpec(name="test", groups={"with_3": group}, state_size=2)


@pytest.mark.parametrize("share_parameters", [True, False])
def test_the_average_policy_becomes_the_mixture_of_all_past_best_responses(share_parameters):
    """Agent a turned from action 0 to 1 where it sees 0, and from 2 to 1 where it sees 1; b did something else."""
    torch.manual_seed(0)
    module = NFSP(spec=seeing_spec(), hidden_sizes=(32,), share_parameters=share_parameters, average_learning_rate=1e-2)
    with_reservoirs(module)
    everything, without_0 = [[True, True, True]], [[False, True, True]]
    for seen, action, mask, count in [
        (0.0, [0, 1], everything, 300),
        (1.0, [2, 1], without_0, 100),
        (0.0, [1, 2], everything, 100),
        (1.0, [1, 1], without_0, 300),
    ]:
        store(module, seen=[[seen, seen]] * count, action=[action] * count, mask=mask)
    optimizer = module.configure_optimizers()
    values = [parameter.clone() for parameter in module.networks.parameters()]
    for _ in range(400):
        optimizer.zero_grad()
        module.average_loss().backward()
        optimizer.step()
    observations = Observations(
        observation={"with_3": torch.tensor([[[0.0], [0.0]], [[1.0], [1.0]]])},
        action_mask={"with_3": torch.tensor([[[True, True, True]] * 2, [[False, True, True]] * 2])},
        alive={"with_3": torch.ones(2, 2, dtype=torch.bool)},
        state=torch.zeros(2, 2),
    )
    stated, _ = module.average_policy.action_probabilities(observations, {}, torch.ones(2, dtype=torch.bool))
    expected = torch.tensor([[[0.75, 0.25, 0.0], [0.0, 0.75, 0.25]], [[0.0, 0.75, 0.25], [0.0, 1.0, 0.0]]])
    torch.testing.assert_close(stated["with_3"], expected, atol=0.05, rtol=0)
    assert all(torch.equal(before, after) for before, after in zip(values, module.networks.parameters(), strict=True))


def batch_of(env, module, count=64):
    """Returns a batch of the module's own play."""
    data = ReplayDataModule(env=env, batch_size=count)
    data.trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    data.trainer.strategy._lightning_module = module
    (rollout,) = collect(module, env, steps=20)
    data.buffer.extend(replay_records(rollout).clone(), data._streams)
    return data.buffer.sample(count)


@pytest.mark.parametrize("share_parameters", [True, False])
def test_values_are_learned_as_by_iql_alone(share_parameters):
    """With the same rewards and the same limit of the gradient, whatever the average policy learns beside."""
    env = SyncVectorEnv(
        factory=partial(PayoffGame, np.random.default_rng(0).normal(size=(2, 3, 3))), num_envs=4, seed=0
    )
    options = {"spec": env.spec, "hidden_sizes": (8,), "share_parameters": share_parameters, "max_grad_norm": 0.01}
    torch.manual_seed(0)
    module = with_reservoirs(NFSP(average_batch_size=4, **options))
    torch.manual_seed(0)
    alone = IQL(team_reward=None, **options)
    batch = batch_of(env, module)
    store(module, seen=[[1.0, 1.0]] * 8, action=[[0, 2]] * 8, mask=[[True] * 3])
    for each in (module, alone):
        optimizer = each.configure_optimizers()
        each.optimizers = lambda *_, optimizer=optimizer: optimizer
        for _ in range(5):
            each.update(batch)
    assert module.updates == alone.updates == 5
    assert set(module._metrics) == {*alone._metrics, "average_loss"}
    for mine, theirs in zip(module.networks.parameters(), alone.networks.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("share_parameters", [True, False])
def test_gradients_are_clipped_separately(share_parameters):
    env = payoff_env()
    module = with_reservoirs(
        NFSP(spec=env.spec, hidden_sizes=(8,), share_parameters=share_parameters, average_batch_size=4)
    )
    for parameter in module.learned_parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    before = torch.cat([p.grad.flatten() for p in module.learned_parameters()]).norm()
    assert module.clip_gradient(module.learned_parameters(), 0.5).item() == pytest.approx(before.item())
    for part in (module.networks, module.average_policy):
        gradients = [parameter.grad for parameter in part.parameters()]
        if share_parameters:
            norms = [torch.cat([gradient.flatten() for gradient in gradients]).norm()]
        else:
            norms = [torch.cat([gradient[agent].flatten() for gradient in gradients]).norm() for agent in range(2)]
        assert [norm.item() for norm in norms] == pytest.approx([0.5] * len(norms), rel=1e-4)


def test_both_learning_rates_are_used():
    module = NFSP(spec=seeing_spec(), learning_rate=0.1, average_learning_rate=0.02)
    values, average = module.configure_optimizers().param_groups
    assert (values["lr"], average["lr"]) == (0.1, 0.02)
    assert len(values["params"]) == len(list(module.networks.parameters()))
    assert len(average["params"]) == len(list(module.average_policy.parameters()))


# Settings -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recurrent": True}, "leave out recurrent"),
        ({"average_batch_size": 11, "reservoir_capacity": 10}, "average_batch_size=11 .* reservoir_capacity=10"),
        ({"anticipatory": 0.0, "average_learning_rate": 0.0}, r"anticipatory=0\.0.*\n.*average_learning_rate=0\.0"),
        ({"anticipatory": 1.5}, r"anticipatory=1\.5"),
        ({"reservoir": 3}, "did you mean 'reservoir_capacity'"),
    ],
)
def test_settings_that_cannot_work_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        NFSP(**options)


def test_agents_learn_from_their_own_rewards():
    assert NFSP().hparams.team_reward is None


def test_snapshots_are_refused():
    with pytest.raises(ValueError, match="save a checkpoint"):
        snapshot(NFSP(spec=seeing_spec(), share_parameters=False))


# Whole trainings ----------------------------------------------------------------------------------------------------


def fit(module, *, env_steps, folder=None, callbacks=(), ckpt_path=None, game="matrix/rock_paper_scissors"):
    lightning.seed_everything(3, verbose=False)
    trainer = lightning.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        max_epochs=-1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(callback, EnvStepCheckpoint) for callback in callbacks),
        callbacks=[StopAtEnvSteps(env_steps), EpsilonSchedule(start=0.5, anneal_env_steps=300), *callbacks],
    )
    env = make_vector_env(game, num_envs=4, seed=5)
    data = ReplayDataModule(env=env, capacity=200, batch_size=8, start_training=100, training_frequency=8)
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return trainer


def small(seed=0, **options):
    torch.manual_seed(seed)
    return NFSP(hidden_sizes=(8,), anticipatory=0.3, average_batch_size=32, reservoir_capacity=50, **options)


def fingerprint(trainer):
    """All that a training may go on from besides what that of any replay is compared by, as bytes and numbers."""
    module, tensors = trainer.lightning_module, []
    for saved in module.local_state_dict().values():
        tensors += [saved["seen"], saved["generator"], *saved["items"].values()]
    tensors += [
        *module.state_dict().values(),
        *trainer.datamodule.local_state_dict()["collector"]["recurrent"].values(),
    ]
    tensors += [value for entry in trainer.optimizers[0].state_dict()["state"].values() for value in entry.values()]
    return [tensor.numpy().tobytes() for tensor in tensors], module.env_steps, module.updates


def test_resuming_equals_not_stopping(tmp_path):
    expected = fit(small(), env_steps=600)
    assert expected.lightning_module.reservoirs["agents"].seen.min() > 80  # more than fit
    checkpoint = EnvStepCheckpoint(directory=tmp_path / "c", every_env_steps=10**9)
    evaluation = EvaluationCallback(every_env_steps=100, episodes=2)
    half = fit(small(), env_steps=300, callbacks=[checkpoint, evaluation], folder=tmp_path)
    assert half.lightning_module.networks.rate == pytest.approx(0.05)
    last = tmp_path / "c" / "last.ckpt"
    other = EnvStepCheckpoint(directory=tmp_path / "d", every_env_steps=10**9)
    resumed = fit(small(seed=1), env_steps=600, callbacks=[other, evaluation], folder=tmp_path, ckpt_path=last)
    assert fingerprint(resumed) == fingerprint(expected)
    module, _ = load_checkpoint(last)
    for name, value in half.lightning_module.state_dict().items():
        assert torch.equal(module.state_dict()[name], value)
    assert not any(name.startswith("policy") for name in module.state_dict())


TWO_PROCESSES = """
import sys
import lightning, torch
from lightning.pytorch.strategies import DDPStrategy
from marl_lightning.algorithms import NFSP
from marl_lightning.callbacks import StopAtEnvSteps
from marl_lightning.data import ReplayDataModule
from marl_lightning.envs import make_vector_env

torch.set_num_threads(1)
lightning.seed_everything(0, verbose=False)
env = make_vector_env("matrix/rock_paper_scissors", num_envs=8, seed=5)
module = NFSP(
    spec=env.spec, hidden_sizes=(8,), share_parameters=False, average_batch_size=20, anticipatory=0.3,
    average_learning_rate=0.1,
)
before = {name: value.clone() for name, value in module.state_dict().items()}
trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy=DDPStrategy(forward_sync_buffers=False), max_epochs=-1, logger=False,
    enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    callbacks=[StopAtEnvSteps(600)],
)
data = ReplayDataModule(env=env, batch_size=4, rollout_length=5, start_training=80, training_frequency=40)
trainer.fit(module, datamodule=data)
torch.save(
    {"before": before, "weights": module.state_dict(), "local": module.local_state_dict()},
    sys.argv[1] + f"/rank{trainer.global_rank}.pt",
)
"""


def test_processes_keep_equal_parameters_and_their_own_reservoirs(tmp_path):
    """One of them may have a batch before the other one."""
    script = tmp_path / "two.py"
    script.write_text(textwrap.dedent(TWO_PROCESSES))
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True, timeout=240, capture_output=True)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1))
    assert all(torch.equal(first["weights"][name], second["weights"][name]) for name in first["weights"])
    learned = [name for name in first["weights"] if not name.startswith("target")]
    assert not any(torch.equal(first["weights"][name], first["before"][name]) for name in learned)
    seen = [each["local"]["agents"]["seen"].tolist() for each in (first, second)]
    assert seen[0] != seen[1]
    assert min(map(min, seen)) > 20
