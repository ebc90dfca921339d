"""Agents of actor-critic methods that act but do not learn, beside agents that do."""

import copy

import lightning
import pytest
import torch
from scripted import CounterGame
from tensordict import TensorDict

from marl_lightning.algorithms import IPPO, MAPPO
from marl_lightning.algorithms.snapshots import load_snapshot, snapshot
from marl_lightning.callbacks import EnvStepCheckpoint, StopAtEnvSteps
from marl_lightning.data import RolloutDataModule
from marl_lightning.data.collector import RolloutCollector
from marl_lightning.data.schema import Rollout
from marl_lightning.envs import EnvSpec, GroupSpec, Observations, SyncVectorEnv, make_vector_env

APART = {"share_parameters": False, "layer_norm": False, "normalise_value": False}
SMALL = {"hidden_sizes": (8,), "chunk_length": 4, "num_epochs": 2, "num_minibatches": 2, "learning_rate": 0.02}


def counter_env():
    return SyncVectorEnv(factory=CounterGame, num_envs=3, seed=0)


def kuhn_env():
    return make_vector_env("openspiel/kuhn_poker", num_envs=3, seed=0, vectorization="sync")


def climbing_env():
    return make_vector_env("matrix/climbing", num_envs=3, seed=0)


SPEC = CounterGame().spec


def make(algorithm=IPPO, *, spec=SPEC, seed=0, **options):
    torch.manual_seed(seed)
    return algorithm(spec=spec, **(SMALL | APART | options))


def fit(module, env, *, env_steps=96, callbacks=(), ckpt_path=None, folder=None):
    trainer = lightning.Trainer(
        default_root_dir=folder, accelerator="cpu", max_epochs=-1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=bool(callbacks),
        callbacks=[StopAtEnvSteps(env_steps), *callbacks],
    )  # fmt: skip
    trainer.fit(module, datamodule=RolloutDataModule(env=env, rollout_length=8), ckpt_path=ckpt_path)
    return trainer


def collect(module, rollouts=1):
    """Collects as the data module does; the rollouts can be kept."""
    collector = RolloutCollector(env=counter_env(), rollout_length=8, chunk_length=module.chunk_length, seed=0)
    for _ in range(rollouts):
        rollout = collector.collect(module.policy)
        collector.state = module.prepare_rollout(rollout, collector.state)
        yield copy.deepcopy(rollout)


def learn(module, rollouts, optimizer=None, seed=7):
    optimizer = optimizer or module.configure_optimizers()
    module.optimizers = lambda **_: optimizer
    torch.manual_seed(seed)  # of the order of the minibatches
    for rollout in rollouts:
        module.update(rollout)
    return optimizer


def weights_of(module, agent):
    state = snapshot(module)[agent]
    return {(part, name): tensor for part, tensors in state.items() for name, tensor in tensors.items()}


def same(first, second):
    assert first.keys() == second.keys()
    return all(torch.equal(first[key], second[key]) for key in first)


# Nothing moves ------------------------------------------------------------------------------------------------------

FITS = {
    "kuhn": (IPPO, kuhn_env, ["player_1"], {}),
    "kuhn rnn": (IPPO, kuhn_env, ["player_0"], {"recurrent": True}),
    "climbing": (MAPPO, climbing_env, ["agent_1"], {"critic": "agent_state"}),
    "one of three": (IPPO, counter_env, ["red_1"], {"recurrent": True, "squash_actions": True}),
    "two groups": (MAPPO, counter_env, ["red_0", "blue_0"], {"critic": "observation", "opponent_mode": "greedy"}),
    "magnet": (IPPO, counter_env, ["red_1"], {"magnet": "ema", "magnet_rate": 0.1, "magnet_coefficient": 1.0}),
}


@pytest.mark.parametrize("case", FITS)
def test_frozen_agents_stay_bit_for_bit_and_the_others_learn(case):
    algorithm, make_env, trainable, options = FITS[case]
    env = make_env()
    module = make(algorithm, spec=env.spec, trainable_agents=trainable, **options)
    load_snapshot(module, snapshot(make(algorithm, spec=env.spec, seed=1, **options | {"opponent_mode": "stochastic"})))
    before = {agent: weights_of(module, agent) for agent in env.spec.agents}
    trainer = fit(module, env)
    assert module.updates == 4 * 4
    for agent in env.spec.agents:
        after = weights_of(module, agent)
        moved = {part for part, name in after if not torch.equal(after[part, name], before[agent][part, name])}
        assert moved == ({"actor", "critic"} if agent in trainable else set())
    states = snapshot(module, trainer.optimizers[0])
    assert {agent for agent, state in states.items() if "optimizer" in state} == set(trainable)


def test_whole_groups_may_have_everything_in_common():
    """The defaults of MAPPO share weights, statistics and values; nobody of the group learns."""
    env = counter_env()
    module = MAPPO(spec=env.spec, trainable_agents=["blue_0"], **SMALL)
    before = copy.deepcopy(module.state_dict())
    metrics = fit(module, env).callback_metrics
    moved = {name for name, tensor in module.state_dict().items() if not torch.equal(tensor, before[name])}
    assert {name for name in moved if "red" in name} == set()
    for part in ("actors.blue", "critics.blue", "value_norms.blue"):
        assert any(name.startswith(part) for name in moved)
    assert "policy_loss/blue" in metrics
    assert "policy_loss/red" not in metrics


@pytest.mark.parametrize("trainable", [["red_1"], ["blue_0"]], ids=str)
def test_those_who_learned_before_do_not_go_on(trainable, tmp_path):
    """A run is resumed with others learning: the moments of Adam would move those who stopped."""
    checkpoint = EnvStepCheckpoint(directory=tmp_path, every_env_steps=24)
    fit(make(), counter_env(), env_steps=48, callbacks=[checkpoint])
    resumed = make(seed=1, trainable_agents=trainable)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)
    assert any(state["exp_avg"].any() for state in saved["optimizer_states"][0]["state"].values())
    former = make()
    former.load_state_dict(saved["state_dict"])
    fit(resumed, counter_env(), ckpt_path=tmp_path / "last.ckpt")
    assert resumed.env_steps == 96
    moved = [agent for agent in SPEC.agents if not same(weights_of(resumed, agent), weights_of(former, agent))]
    assert moved == trainable


# What the others learn ----------------------------------------------------------------------------------------------


def alone(rollout: Rollout, index: int) -> Rollout:
    """What one agent of red saw, did and got, as if there were nobody else."""
    own = slice(index, index + 1)

    def of_red(steps: TensorDict) -> TensorDict:
        keys = [key for key in steps.keys(include_nested=True, leaves_only=True) if "blue" not in key]
        return TensorDict(
            {
                key: steps[key][..., own] if key[-1] in ONE_A_ROW else steps[key][:, :, own]
                for key in keys
                if "red" in key
            }
            | {key: steps[key] for key in keys if "red" not in key},
            batch_size=steps.shape,
        )

    return Rollout(
        steps=of_red(rollout.steps), last=None, final=None, initial_state=None, episodes={}, info={},
        chunk_state={key: state[:, :, own] for key, state in rollout.chunk_state.items() if key.endswith("red")},
    )  # fmt: skip


ONE_A_ROW = ("alive", "action", "log_prob", "value", "reward")


def spec_of_one(index: int) -> EnvSpec:
    red = SPEC.groups["red"]
    group = GroupSpec(
        agents=red.agents[index : index + 1], observation_space=red.observation_space, action_space=red.action_space
    )
    return EnvSpec(name="scripted/alone", groups={"red": group}, state_size=3)


LEARNERS = {
    "mlp": {},
    "rnn": {"recurrent": True},
    "dead values": {"value_active_masks": True, "num_minibatches": 3},
    "plain": {"normalise_advantage": False, "max_grad_norm": None},
    "magnet": {"magnet": "periodic", "magnet_coefficient": 2.0, "magnet_refresh_env_steps": 10**6},
}


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("case", LEARNERS)
def test_learners_learn_as_if_they_were_alone(case, index):
    """Losses, means and moments, gradients and their norm: those of a game in which there is nobody else."""
    options = {"max_grad_norm": 0.1, "entropy_coefficient": 0.1} | LEARNERS[case]
    agent = f"red_{index}"
    together, single = make(trainable_agents=[agent], **options), make(spec=spec_of_one(index), seed=1, **options)
    own = {part: {name: t[None] for name, t in tensors.items()} for part, tensors in snapshot(together)[agent].items()}
    load_snapshot(single, {agent: own})
    rollouts = list(collect(together, rollouts=3))
    learn(together, rollouts)
    learn(single, [alone(rollout, index) for rollout in rollouts])
    after = weights_of(single, agent)
    for key, found in weights_of(together, agent).items():
        assert not torch.equal(found, own[key[0]][key[1]][0])
        torch.testing.assert_close(found, after[key][0] if found.dim() < after[key].dim() else after[key])
    norms = [torch.stack(module._metrics["gradient_norm"]) for module in (together, single)]
    torch.testing.assert_close(*norms)
    found = torch.stack(together._metrics["entropy/red"]), torch.stack(single._metrics["entropy"])
    torch.testing.assert_close(*found)


def test_what_frozen_agents_get_does_not_count():
    module = make(trainable_agents=["red_0"])
    (rollout,) = collect(module)

    def loss():
        batch = module.training_batch("red", rollout)
        return module.group_loss(module.actors["red"], module.critics["red"], batch)[0].item()

    before = loss()
    rollout.steps["next", "red", "reward"][..., 1] = 1e6
    rollout.steps["red", "value"][..., 1] = -1e6
    assert loss() == before
    rollout.steps["next", "red", "reward"][..., 0] = 1e3  # and the test can fail
    assert loss() != before


def test_what_is_not_finite_in_frozen_networks_does_not_spread():
    module = make(trainable_agents=["red_0"])
    (rollout,) = collect(module)
    batch = module.training_batch("red", rollout)
    with torch.no_grad():
        for parameter in (*module.actors["red"].parameters(), *module.critics["red"].parameters()):
            parameter[1] = torch.nan
    module.group_loss(module.actors["red"], module.critics["red"], batch)[0].backward()
    assert module.clip_gradient(module.learned_parameters(), 0.1).isfinite()
    for parameter in module.learned_parameters():
        assert parameter.grad[0].isfinite().all()
        assert not parameter.grad[1].any()


def test_naming_all_agents_is_the_same_as_naming_none():
    everyone, named = make(), make(trainable_agents=list(SPEC.agents))
    rollouts = list(collect(everyone, rollouts=2))
    for module in (everyone, named):
        learn(module, rollouts)
    for name, tensor in everyone.state_dict().items():
        assert torch.equal(tensor, named.state_dict()[name]), name


# How they act -------------------------------------------------------------------------------------------------------

ROWS = 20_000


def observations(rows=ROWS):
    mask = torch.ones(rows, 2, 3, dtype=torch.bool)
    mask[:, 1, 0] = False
    torch.manual_seed(3)
    return Observations(
        observation={"red": torch.randn(2, 4).expand(rows, 2, 4), "blue": torch.randn(1, 4).expand(rows, 1, 4)},
        action_mask={"red": mask},
        alive={"red": mask[..., 1], "blue": mask[:, :1, 1]},
        state=torch.zeros(rows, 3),
    )


def act(module, seen, **options):
    first = torch.ones(len(seen.state), dtype=torch.bool)
    state = module.policy.initial_state(len(first))
    with torch.no_grad():
        return module.policy.act(seen, state, first, generator=torch.Generator().manual_seed(0), **options)


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("mode", ["stochastic", "greedy"])
def test_others_act_as_asked_and_log_probs_are_those_of_their_actions(mode, recurrent):
    module = make(trainable_agents=["red_0"], opponent_mode=mode, output_gain=1.0, recurrent=recurrent)
    seen = observations()
    actions, log_probs, _ = act(module, seen)
    head = module.actors["red"].head
    with torch.no_grad():
        features, _ = module.policy._features(seen, module.policy.initial_state(ROWS), torch.ones(ROWS).bool())
        expected = head.log_probs(features["red"], seen.action_mask["red"])
        mean = module.actors["blue"].head.mean(features["blue"])
    found = torch.nn.functional.one_hot(actions["red"], 3).float().mean(0)
    torch.testing.assert_close(found[0], expected[0, 0].exp(), atol=0.012, rtol=0)
    assert 0.05 < found[0].max() < 0.95
    if mode == "greedy":
        assert torch.equal(actions["red"][:, 1], expected[:, 1].argmax(-1))
        assert torch.equal(actions["blue"], mean)
    else:
        torch.testing.assert_close(found[1], expected[0, 1].exp(), atol=0.012, rtol=0)
        assert (actions["blue"] != mean).all()
    of_actions = head.evaluate(features["red"], actions["red"], seen.action_mask["red"])[0]
    assert torch.equal(log_probs["red"], of_actions.detach())


@pytest.mark.parametrize("mode", ["stochastic", "greedy"])
def test_the_policy_states_how_the_others_act(mode):
    env = kuhn_env()
    module = make(spec=env.spec, trainable_agents=["player_1"], opponent_mode=mode, output_gain=1.0)
    seen, first = env.reset(), torch.ones(3, dtype=torch.bool)
    plain = make(spec=env.spec, output_gain=1.0)
    with torch.no_grad():
        stated, drawn, greedy = (
            policy.action_probabilities(seen, {}, first, deterministic=deterministic)[0]["player"]
            for policy, deterministic in ((module.policy, False), (plain.policy, False), (plain.policy, True))
        )
        everyone = module.policy.action_probabilities(seen, {}, first, deterministic=True)[0]["player"]
    assert torch.equal(stated[:, 0], (greedy if mode == "greedy" else drawn)[:, 0])  # has two legal actions
    assert torch.equal(stated[:, 1], drawn[:, 1])
    assert not torch.equal(greedy[:, 0], drawn[:, 0])
    assert torch.equal(everyone, greedy)


def test_all_are_greedy_in_evaluation():
    seen = observations(50)
    plain, greedy = (make(trainable_agents=["red_0"], opponent_mode=mode) for mode in ("stochastic", "greedy"))
    for a, b in zip(
        act(plain, seen, deterministic=True)[0].values(), act(greedy, seen, deterministic=True)[0].values(), strict=True
    ):
        assert torch.equal(a, b)


# Wrong settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trainable_agents": ["red_0", "green"]}, r"has \['green'\], but the agents .* are \['red_0'"),
        ({"trainable_agents": []}, "trainable_agents is empty"),
        ({"opponent_mode": "greedy"}, "set trainable_agents"),
        ({"trainable_agents": ["red_0"], "opponent_mode": "softmax"}, "opponent_mode='softmax': must be 'stochastic'"),
        (
            {"trainable_agents": ["red_0"], "share_parameters": True},
            "singles out agents of 'red'.*: set share_parameters=False$",
        ),
        ({"trainable_agents": ["red_0"], "layer_norm": True}, ": set layer_norm=False$"),
        ({"trainable_agents": ["red_0"], "normalise_value": True}, ": set normalise_value=False$"),
        ({"trainable_agents": ["red_0"], "critic": "state", "team_reward": "sum"}, ": set critic='observation' or"),
        (
            {"trainable_agents": ["red_0"], "share_parameters": True, "layer_norm": True, "normalise_value": True},
            ": set share_parameters=False, layer_norm=False, normalise_value=False$",
        ),
    ],
)
def test_settings_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)
