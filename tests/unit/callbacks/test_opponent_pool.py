"""The pool of past selves: who is in it, who is played, what is counted, saved and refused."""

import copy
import subprocess
import sys
from pathlib import Path

import lightning
import pytest
import torch
from pool_helpers import Duel, duel

from marl_lightning.algorithms import IPPO, IQL, MAPPO, MFQ, PQNVDN, PR2IQL, VDN
from marl_lightning.callbacks import (
    EnvStepCheckpoint,
    EvaluationCallback,
    NashConvCallback,
    OpponentPoolCallback,
    StopAtEnvSteps,
)
from marl_lightning.callbacks.opponent_pool import PoolMember, prioritised_weights
from marl_lightning.data import ReplayDataModule, RolloutDataModule
from marl_lightning.envs import SyncVectorEnv, make_vector_env
from marl_lightning.envs.wrappers import OpponentPoolEnv
from marl_lightning.evaluation import evaluate
from marl_lightning.games import nash_conv

ENVS, LENGTH = 4, 8
ROLLOUT = ENVS * LENGTH
SMALL = {"hidden_sizes": (8,), "chunk_length": 4, "num_epochs": 1, "value_active_masks": True}


def fit(module, callbacks, *, env_steps, folder, env=None, data=None, ckpt_path=None):
    lightning.seed_everything(3, verbose=False)
    trainer = lightning.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        max_epochs=-1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(callback, EnvStepCheckpoint) for callback in callbacks),
        callbacks=[StopAtEnvSteps(env_steps), *callbacks],
    )
    if data is None:
        env = env or duel(ENVS, 5)
        if isinstance(module, IQL):
            data = ReplayDataModule(
                env=env,
                rollout_length=LENGTH,
                start_training=ROLLOUT,
                training_frequency=8,
                updates_per_batch=4,
                batch_size=4,
                capacity=500,
            )
        else:
            data = RolloutDataModule(env=env, rollout_length=LENGTH)
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return trainer


def ippo(seed=0, **options):
    torch.manual_seed(seed)
    return IPPO(spec=duel(1).spec, **SMALL | options)


def iql(seed=0, **options):
    torch.manual_seed(seed)
    return IQL(spec=duel(1).spec, hidden_sizes=(8,), team_reward=None, log_every_env_steps=ROLLOUT, **options)


def pool(**options):
    return OpponentPoolCallback(**{"every_env_steps": 2 * ROLLOUT} | options)


class Keep(lightning.Callback):
    """Keeps the policy after every rollout."""

    def __init__(self):
        self.weights = {}

    def on_train_epoch_end(self, trainer, pl_module):
        self.weights[pl_module.env_steps] = copy.deepcopy(pl_module.policy.state_dict())


def equal(first, second):
    return first.keys() == second.keys() and all(first[name].equal(second[name]) for name in first)


# Members --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [ippo, iql])
def test_members_are_the_policies_of_their_time_for_good(make, tmp_path):
    callback, keep = pool(), Keep()
    module = make(recurrent=True)
    trainer = fit(module, [keep, callback], env_steps=9 * ROLLOUT, folder=tmp_path)
    assert [member.env_steps for member in callback.members] == [2 * n * ROLLOUT for n in (1, 2, 3, 4)]
    assert [member.number for member in callback.members] == [0, 1, 2, 3]
    for member in callback.members:
        assert equal(member.weights, keep.weights[member.env_steps])
        assert not equal(member.weights, module.policy.state_dict())
    assert isinstance(trainer.datamodule.env, OpponentPoolEnv)
    own = {tensor.data_ptr() for member in callback.members for tensor in member.weights.values()}
    assert not own & {tensor.data_ptr() for tensor in module.policy.state_dict().values()}


def test_the_oldest_member_leaves_first(tmp_path):
    callback = pool(every_env_steps=ROLLOUT, capacity=3)
    fit(ippo(), [callback], env_steps=7 * ROLLOUT, folder=tmp_path)
    assert [member.number for member in callback.members] == [4, 5, 6]
    head, *rows = callback.table().splitlines()
    assert head.split() == ["member", "env", "steps", "episodes", "win", "rate"]
    assert [row.split()[:2] for row in rows] == [["4", "160"], ["5", "192"], ["6", "224"]]


def test_value_based_members_act_greedily_and_others_do_not(tmp_path):
    for make, greedy in ((iql, True), (ippo, False)):
        trainer = fit(make(), [pool()], env_steps=ROLLOUT, folder=tmp_path)
        assert trainer.datamodule.env._deterministic is greedy


def test_every_episode_is_self_play_until_there_is_a_member(tmp_path):
    seen = []

    class Look(lightning.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            seen.append(bool((trainer.datamodule.env._opponent >= 0).any()))

    fit(
        ippo(),
        [Look(), pool(every_env_steps=3 * ROLLOUT, pool_probability=1.0)],
        env_steps=7 * ROLLOUT,
        folder=tmp_path,
    )
    assert seen == [False] * 3 + [True] * 4


# Who is played --------------------------------------------------------------------------------------------------------


def with_members(rates, **options):
    callback = pool(**options)
    callback.members = [
        PoolMember(number=i, weights={}, env_steps=i, episodes=n, wins=wins) for i, (wins, n) in enumerate(rates)
    ]
    return callback


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"sampling": "latest"}, [0, 0, 0, 1]),
        ({"sampling": "uniform"}, [1, 1, 1, 1]),
        # Win rates are 1, 3/4, 1/2 before the first episode, and 0.
        ({"sampling": "prioritised"}, [0, 1 / 16, 1 / 4, 1]),
        ({"sampling": "prioritised", "power": 1.0}, [0, 1 / 4, 1 / 2, 1]),
        ({"sampling": "prioritised", "power": 0.0}, [1, 1, 1, 1]),
    ],
)
def test_weights_of_members(options, expected):
    callback = with_members([(8.0, 8), (1.5, 2), (0.0, 0), (0.0, 5)], **options)
    assert callback.weights().tolist() == expected


def test_opponents_who_are_always_beaten_are_all_played():
    assert prioritised_weights(torch.ones(3), power=2.0).tolist() == [1, 1, 1]


def test_the_newest_is_drawn_after_it_was_added(tmp_path):
    callback = pool(every_env_steps=ROLLOUT, sampling="latest", pool_probability=1.0, active_opponents=1)
    trainer = fit(ippo(), [callback], env_steps=12 * ROLLOUT, folder=tmp_path)
    assert set(trainer.datamodule.env._numbers) <= {9, 10, 11}
    assert sum(member.episodes for member in callback.members[2:]) > 20


def test_learners_find_what_beats_the_pool(tmp_path):
    """Against somebody who always does rock; nothing is learned from the rock itself, and no episode is self-play."""
    env = make_vector_env("matrix/rock_paper_scissors", num_envs=8, seed=0, episode_length=5)
    torch.manual_seed(0)
    module = IPPO(spec=env.spec, **SMALL | {"num_epochs": 4}, learning_rate=0.01)
    rock = copy.deepcopy(module.policy)
    with torch.no_grad():
        for name, parameter in rock.named_parameters():
            if ".head." in name:
                parameter.copy_(torch.tensor([50.0, 0.0, 0.0]) if parameter.dim() == 1 else torch.zeros(()))
    callback = pool(every_env_steps=10**9, pool_probability=1.0)
    callback.members = [PoolMember(number=0, weights=rock.state_dict(), env_steps=0)]
    data = RolloutDataModule(env=env, rollout_length=20)
    fit(module, [callback], env_steps=4000, folder=tmp_path, data=data)
    observations, is_first = data.env.env.reset(), torch.ones(8, dtype=torch.bool)
    probabilities, _ = module.policy.action_probabilities(observations, {}, is_first)
    assert probabilities["agents"][..., 1].min() > 0.8  # paper, in both seats
    (member,) = callback.members
    assert member.episodes > 500
    assert member.win_rate > 0.7


# What is counted ------------------------------------------------------------------------------------------------------


def test_episodes_are_counted_and_reported(tmp_path):
    logged, totals = [], []

    class Look(lightning.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            logged.append({k: v.item() for k, v in trainer.callback_metrics.items() if k.startswith("pool/")})
            totals.append((sum(m.episodes for m in callback.members), sum(m.wins for m in callback.members)))

    callback = pool(every_env_steps=4 * ROLLOUT, pool_probability=1.0)
    fit(ippo(), [callback, Look()], env_steps=12 * ROLLOUT, folder=tmp_path)
    assert [entry.get("pool/size") for entry in logged] == [None] * 3 + [1.0] * 4 + [2.0] * 4 + [3.0]
    assert "pool/win_rate" not in logged[3]  # nobody was played yet
    first, second, third = callback.members
    assert first.episodes > 20
    assert second.episodes > 0 == third.episodes
    # Each is of the episodes since the one before.
    (early, won_early), (late, won_late) = totals[7], totals[11]
    assert logged[7]["pool/win_rate"] == pytest.approx(won_early / early)
    assert logged[11]["pool/win_rate"] == pytest.approx((won_late - won_early) / (late - early))
    assert logged[11]["pool/win_rate"] != pytest.approx(won_late / late)
    assert 0 < won_early < early


def test_results_of_all_processes_count_and_those_of_who_left_do_not():
    class Processes(IPPO):
        def reduce_sum(self, tensor):  # the other process had the same results
            return 2 * tensor

    callback = with_members([(1.0, 2), (0.0, 0)])
    callback._env = type("Env", (), {"take_results": lambda self: {1: (3, 1.5), 7: (9, 9.0)}})()
    callback._count(Processes(spec=duel(1).spec, **SMALL))
    assert [(member.episodes, member.wins) for member in callback.members] == [(2, 1.0), (6, 3.0)]
    assert (callback._episodes, callback._wins) == (6, 3.0)


# What is saved --------------------------------------------------------------------------------------------------------


def everything(trainer, callback):
    """Weights, pool, game and randomness, as something to compare."""
    module, data = trainer.lightning_module, trainer.datamodule
    local = data.local_state_dict()
    state = {"module": module.state_dict(), "pool": callback.state_dict(), "local": local}
    return str(flat(state))


def flat(value):
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: flat(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [flat(each) for each in value]
    return value


@pytest.mark.parametrize("make", [ippo, iql])
@pytest.mark.parametrize(("stop", "every"), [(3, 1), (4, 2)])
def test_resuming_equals_not_stopping_and_evaluating_leaves_no_trace(make, stop, every, tmp_path):
    """Recurrent; the pool loses members that still play."""
    options = {"every_env_steps": every * ROLLOUT, "capacity": 2, "sampling": "prioritised", "pool_probability": 0.8}
    straight = pool(**options)
    expected = everything(fit(make(recurrent=True), [straight], env_steps=7 * ROLLOUT, folder=tmp_path / "a"), straight)
    assert sum(member.episodes for member in straight.members) > 0

    saving = EnvStepCheckpoint(directory=tmp_path / "c", every_env_steps=10**9)
    evaluation = EvaluationCallback(every_env_steps=ROLLOUT, episodes=2)
    fit(make(recurrent=True), [pool(**options), saving, evaluation], env_steps=stop * ROLLOUT, folder=tmp_path / "b")
    resumed = pool(**options)
    other = EnvStepCheckpoint(directory=tmp_path / "d", every_env_steps=10**9)
    trainer = fit(
        make(seed=1, recurrent=True),
        [resumed, other],
        env_steps=7 * ROLLOUT,
        folder=tmp_path / "d",
        ckpt_path=tmp_path / "c" / "last.ckpt",
    )
    assert everything(trainer, resumed) == expected


def test_a_checkpoint_can_be_read_safely(tmp_path):
    saving = EnvStepCheckpoint(directory=tmp_path / "c", every_env_steps=10**9)
    callback = pool()
    fit(ippo(), [callback, saving], env_steps=5 * ROLLOUT, folder=tmp_path)
    state = torch.load(tmp_path / "c" / "last.ckpt", weights_only=True)["callbacks"]["OpponentPoolCallback"]
    other = pool()
    other.load_state_dict(state)
    assert other.table() == callback.table()
    assert all(equal(a.weights, b.weights) for a, b in zip(other.members, callback.members, strict=True))


# Beside other callbacks -----------------------------------------------------------------------------------------------


def test_evaluations_are_never_against_the_pool(tmp_path):
    """NashConv of Kuhn poker is that of the policy, and evaluations play it against itself."""
    env = make_vector_env("openspiel/kuhn_poker", num_envs=8, seed=0)
    torch.manual_seed(0)
    module = IPPO(spec=env.spec, **SMALL)
    nash, evaluation = NashConvCallback(), EvaluationCallback(every_env_steps=64, episodes=40, deterministic=False)
    fit(module, [pool(pool_probability=1.0), nash, evaluation], env_steps=500, folder=tmp_path, env=env)
    with make_vector_env("openspiel/kuhn_poker", num_envs=8, seed=12345) as alone:
        assert nash.result.value == pytest.approx(nash_conv(module.policy, alone).value)
        expected = evaluate(module.policy, alone, episodes=40, deterministic=False, seed=12345)
    assert module.trainer.callback_metrics["eval/return_std"].item() == pytest.approx(expected.returns.std(), abs=1e-6)


# Mistakes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda spec: VDN(spec=spec), TypeError, "VDN learns a joint value or from what the other agents do"),
        (lambda spec: PQNVDN(spec=spec), TypeError, "PQNVDN learns a joint value"),
        (lambda spec: MFQ(spec=spec), TypeError, "MFQ learns a joint value or from what the other agents do"),
        (lambda spec: PR2IQL(spec=spec), TypeError, "PR2IQL learns a joint value or from what the other agents do"),
        (lambda spec: MAPPO(spec=spec), ValueError, "team_reward='mean' makes one reward of those of opponents"),
        (lambda spec: IQL(spec=spec, team_reward="sum"), ValueError, "set algorithm.team_reward=null"),
        (lambda spec: IPPO(spec=spec), ValueError, "set algorithm.value_active_masks=true"),
    ],
)
def test_methods_that_would_learn_from_opponents_are_refused(make, error, message, tmp_path):
    module = make(make_vector_env("matrix/prisoners_dilemma", num_envs=1).spec)
    env = make_vector_env("matrix/prisoners_dilemma", num_envs=ENVS)
    kind = module.learns_from
    with pytest.raises(error, match=message):
        fit(module, [pool()], env_steps=1, folder=tmp_path, data=kind(env=env))


def test_games_without_opponents_are_refused(tmp_path):
    shared = SyncVectorEnv(factory=lambda: Duel(shared_reward=True), num_envs=ENVS, seed=0)
    with pytest.raises(ValueError, match="test/duel share their reward, so that there are no opponents"):
        fit(ippo(), [pool()], env_steps=1, folder=tmp_path, env=shared)
    alone = make_vector_env("gymnasium/CartPole-v1", num_envs=1)
    with pytest.raises(ValueError, match="has one agent"):
        fit(IPPO(spec=alone.spec, **SMALL), [pool()], env_steps=1, folder=tmp_path, env=alone)


def test_a_learner_that_is_no_agent_is_refused(tmp_path):
    with pytest.raises(ValueError, match="learner='d1' is no agent"):
        fit(ippo(), [pool(learner="d1")], env_steps=1, folder=tmp_path)


def test_data_modules_that_have_played_or_do_not_play_are_refused(tmp_path):
    data = RolloutDataModule(env=duel(ENVS, 5), rollout_length=LENGTH)
    fit(ippo(), [], env_steps=ROLLOUT, folder=tmp_path, data=data)
    with pytest.raises(ValueError, match="has played without the pool already"):
        fit(ippo(), [pool()], env_steps=ROLLOUT, folder=tmp_path, data=data)

    class Nothing(lightning.LightningDataModule):
        pass

    with pytest.raises(TypeError, match="a data module that plays, got Nothing"):
        pool().setup(type("Trainer", (), {"datamodule": Nothing()})(), ippo(), "fit")


def test_training_goes_on_with_the_same_pool(tmp_path):
    data, callback = RolloutDataModule(env=duel(ENVS, 5), rollout_length=LENGTH), pool()
    module = ippo()
    fit(module, [callback], env_steps=2 * ROLLOUT, folder=tmp_path, data=data)
    env = data.env
    fit(module, [callback], env_steps=6 * ROLLOUT, folder=tmp_path, data=data)
    assert data.env is env
    assert [member.number for member in callback.members] == [0, 1, 2]
    assert sum(member.episodes for member in callback.members) > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every_env_steps": 0}, "every_env_steps=0"),
        ({"sampling": "prioritized"}, "did you mean 'prioritised'"),
        ({"pool_probability": 1.5}, "pool_probability=1.5"),
        ({"capacity": 0}, "capacity=0"),
        ({"active_opponents": 0}, "active_opponents=0"),
    ],
)
def test_settings_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        pool(**options)


# Two processes --------------------------------------------------------------------------------------------------------

TWO_PROCESSES = """
import sys
sys.path.insert(0, {helpers!r})
import lightning, torch
from lightning.pytorch.strategies import DDPStrategy
from pool_helpers import duel
from marl_lightning.algorithms import IPPO
from marl_lightning.callbacks import OpponentPoolCallback, StopAtEnvSteps
from marl_lightning.data import RolloutDataModule

class Spy(OpponentPoolCallback):
    own = {{}}
    def setup(self, trainer, pl_module, stage):
        super().setup(trainer, pl_module, stage)
        take = self._env.take_results
        def spy():
            results = take()
            for number, (episodes, _) in results.items():
                self.own[number] = self.own.get(number, 0) + episodes
            return results
        self._env.take_results = spy

torch.set_num_threads(1)
lightning.seed_everything(0, verbose=False)
env = duel(4, 5)
pool = Spy(every_env_steps=64, pool_probability=0.8, sampling="prioritised")
module = IPPO(spec=env.spec, hidden_sizes=(8,), num_epochs=1, value_active_masks=True)
trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy=DDPStrategy(forward_sync_buffers=False), max_epochs=-1, logger=False,
    enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    callbacks=[StopAtEnvSteps(512), pool],
)
trainer.fit(module, datamodule=RolloutDataModule(env=env, rollout_length=8))
torch.save({{"pool": pool.state_dict(), "own": pool.own, "learner": torch.from_numpy(pool._env._learner)}},
           sys.argv[1] + f"/rank{{trainer.global_rank}}.pt")
"""


@pytest.mark.slow
def test_processes_have_the_same_pool_and_play_apart(tmp_path):
    script = tmp_path / "two.py"
    script.write_text(TWO_PROCESSES.format(helpers=str(Path(__file__).parent)))
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True, capture_output=True)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1))
    assert flat(first["pool"]) == flat(second["pool"])
    assert len(first["pool"]["members"]) == 8
    for member in first["pool"]["members"]:
        number = member["number"]
        assert member["episodes"] == first["own"].get(number, 0) + second["own"].get(number, 0)
    assert first["own"] != second["own"]
