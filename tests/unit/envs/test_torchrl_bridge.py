"""TorchRLEnv and TorchRLVectorEnv: ours for TorchRL, TorchRL's for us, and both ways in a row."""

import logging

import numpy as np
import pytest
import torch
from gymnasium import spaces
from scripted import CounterGame
from torchrl.collectors import Collector
from torchrl.data import Binary, Bounded, Categorical, Composite, MultiOneHot, Unbounded
from torchrl.envs import EnvBase, GymEnv, PendulumEnv
from torchrl.envs.libs.pettingzoo import PettingZooWrapper
from torchrl.envs.libs.vmas import VmasEnv
from torchrl.envs.utils import check_env_specs

from marl_lightning.envs import check_env, make_vector_env
from marl_lightning.envs.adapters.torchrl import TorchRLEnv, TorchRLVectorEnv
from marl_lightning.envs.vector.sync import SyncVectorEnv

# Different groups and shapes, masks and deaths, several parts of an action, one agent; each with a short episode.
GAMES = {
    "smac/3m": {},
    "matrix/climbing": {},
    "mpe/simple_tag_v3": {"max_cycles": 6},
    "mpe/simple_reference_v3": {"max_cycles": 6, "continuous_actions": True},
    "gymnasium/CartPole-v1": {},
}


@pytest.fixture(autouse=True)
def quiet():
    logger = logging.getLogger("torchrl")
    level = logger.level
    logger.setLevel(logging.WARNING)
    yield
    logger.setLevel(level)


def make_torchrl(name: str, num_envs: int, seed: int = 0) -> TorchRLEnv:
    return TorchRLEnv(env=make_vector_env(name, num_envs, seed=seed, **GAMES[name]))


def draw(env, rng: np.random.Generator) -> dict[str, torch.Tensor]:
    """Draws legal actions."""
    now, actions = env._step.observations if hasattr(env, "_step") else env._tensors.observations, {}
    for name, group in env.spec.groups.items():
        shape = (env.num_envs, group.num_agents)
        if group.is_discrete:
            mask = now.action_mask[name].numpy()
            scores = np.where(mask, rng.random(mask.shape), -1.0)
            parts = [part.argmax(axis=-1) for part in np.split(scores, group.action_offsets[1:], axis=-1)]
            actions[name] = torch.from_numpy(np.stack(parts, axis=-1).reshape(*shape, *group.action_shape))
        else:
            space = group.action_space
            values = rng.uniform(space.low, space.high, (*shape, group.action_size))
            actions[name] = torch.from_numpy(values.astype(np.float32))
    return actions


# ---------------------------------------------------------------------------------------------------------------------
# Ours for TorchRL
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GAMES)
def test_specs(name):
    env = make_torchrl(name, 3)
    check_env_specs(env)
    check_env_specs(env, break_when_any_done=False)


def test_entries():
    env = make_torchrl("mpe/simple_tag_v3", 3)
    assert env.group_map == {"adversary": ["adversary_0", "adversary_1", "adversary_2"], "agent": ["agent_0"]}
    entries = env.rollout(2)
    assert {key: tuple(value.shape) for key, value in entries["next"].items(True, True)} == {
        ("adversary", "observation"): (3, 2, 3, 16),
        ("adversary", "action_mask"): (3, 2, 3, 5),
        ("adversary", "mask"): (3, 2, 3),
        ("adversary", "reward"): (3, 2, 3, 1),
        ("agent", "observation"): (3, 2, 1, 14),
        ("agent", "action_mask"): (3, 2, 1, 5),
        ("agent", "mask"): (3, 2, 1),
        ("agent", "reward"): (3, 2, 1, 1),
        "state": (3, 2, 62),
        "done": (3, 2, 1),
        "terminated": (3, 2, 1),
        "truncated": (3, 2, 1),
    }
    assert entries["adversary", "action"].shape == (3, 2, 3)
    assert ("info", "battle_won") in make_torchrl("smac/3m", 1).reset().keys(True)


def counters(length: int) -> TorchRLEnv:
    return TorchRLEnv(env=SyncVectorEnv(factory=lambda: CounterGame(length=length), num_envs=2, seed=0))


def test_next_holds_the_true_successor_and_nothing_is_reset_twice():
    entries = counters(3).rollout(10, break_when_any_done=False)
    # Observations tell the episode and the time.
    time = torch.arange(10)
    for key, expected_time in (("observation", time % 3), (("next", "observation"), time % 3 + 1)):
        key = ("red", key) if isinstance(key, str) else ("next", "red", key[-1])
        assert entries[key][:, :, 0, 0].tolist() == [(time // 3).tolist()] * 2
        assert entries[key][:, :, 0, 1].tolist() == [expected_time.tolist()] * 2
    assert entries["next", "terminated"][0].flatten().nonzero().flatten().tolist() == [2, 8]
    assert entries["next", "truncated"][0].flatten().nonzero().flatten().tolist() == [5]
    assert entries["next", "info", "score"][0].flatten().tolist() == (10.0 * (time % 3 + 1)).tolist()
    assert not entries["info", "score"][:, ::3].any()
    assert entries["red", "mask"][0, :3].tolist() == [[True, True], [True, True], [True, False]]


def test_partial_and_whole_resets():
    env = make_torchrl("mpe/simple_tag_v3", 3, seed=5)
    alike = make_vector_env("mpe/simple_tag_v3", 3, seed=5, **GAMES["mpe/simple_tag_v3"])
    start, expected = env.reset(), alike.reset()
    assert torch.equal(start["state"], expected.state)
    mask = torch.tensor([[False], [True], [False]])
    start = env.reset(start.clone().set("_reset", mask))
    assert torch.equal(start["state"], alike.reset(mask=mask.flatten().numpy()).state)
    assert torch.equal(env.reset()["state"], alike.reset().state)
    env.set_seed(9)
    assert torch.equal(env.reset()["state"], alike.reset(seed=9).state)


def test_a_whole_reset_begins_only_what_has_not_begun():
    env = counters(2)
    env.reset()
    episodes = []
    for steps in (2, 1, 0, 2):
        for _ in range(steps):
            env.rand_step(env._read(env._current))
        episodes.append(int(env.reset()["red", "observation"][0, 0, 0]))
    # The second reset broke an episode off, the third one began another before the first step.
    assert episodes == [1, 2, 3, 4]


def test_steps_that_cannot_be_made():
    env = counters(1)
    entries = env.rand_step(env.reset())
    with pytest.raises(RuntimeError, match=r"episodes of the instances \[0, 1\] are over"):
        env.step(entries)
    with pytest.raises(NotImplementedError, match="break_when_all_done=False"):
        env.step(env.rand_action(env.reset()).set("_step", torch.tensor([[True], [False]])))


def test_collector():
    collector = Collector(make_torchrl("mpe/simple_tag_v3", 4), None, frames_per_batch=80, total_frames=160)
    batches = list(collector)
    collector.shutdown()
    assert [tuple(batch.shape) for batch in batches] == [(4, 20)] * 2
    # Episodes of 6 steps go on from one batch to the next.
    assert [int(batch["next", "truncated"].sum()) for batch in batches] == [12, 12]


def test_random_actions_are_legal():
    entries = make_torchrl("smac/3m", 4).rollout(60, break_when_any_done=False)
    (group,) = make_torchrl("smac/3m", 1).group_map
    legal = entries[group, "action_mask"].gather(-1, entries[group, "action"].unsqueeze(-1))
    assert legal.all()
    assert not entries[group, "action_mask"].all()


# ---------------------------------------------------------------------------------------------------------------------
# There and back
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GAMES)
def test_there_and_back_is_the_same(name):
    ours = make_vector_env(name, 3, seed=2, **GAMES[name])
    back = TorchRLVectorEnv(
        factory=lambda num_envs: make_torchrl(name, num_envs),
        num_envs=3,
        seed=2,
        batched=True,
        shared_reward=ours.spec.shared_reward,
    )
    rng = np.random.default_rng(0)
    ours.reset()
    back.reset()
    ends = 0
    for time in range(70):
        if time == 30:
            mask = np.array([True, False, True])
            ours.reset(mask=mask)
            back.reset(mask=mask)
        actions = draw(back, rng)
        one, two = ours.step(actions), back.step(actions)
        ended = one.terminated | one.truncated
        ends += int(ended.sum())
        assert torch.equal(one.terminated, two.terminated)
        assert torch.equal(one.truncated & ~one.terminated, two.truncated & ~two.terminated)
        for first, second, rows in ((one.observations, two.observations, slice(None)), (one.final, two.final, ended)):
            for kind in ("observation", "action_mask", "alive"):
                for group, value in getattr(first, kind).items():
                    assert torch.equal(value[rows], getattr(second, kind)[group][rows]), (kind, group, time)
            assert torch.equal(first.state[rows], second.state[rows])
        for group, reward in one.reward.items():
            assert torch.equal(reward, two.reward[group])
    assert ends > 0


@pytest.mark.parametrize("name", ["smac/3m", "mpe/simple_tag_v3"])
def test_there_and_back_keeps_the_contract(name):
    env = TorchRLVectorEnv(
        factory=lambda num_envs: make_torchrl(name, num_envs), num_envs=2, batched=True, shared_reward=name == "smac/3m"
    )
    with env:
        check_env(env, steps=30)


# ---------------------------------------------------------------------------------------------------------------------
# TorchRL's for us
# ---------------------------------------------------------------------------------------------------------------------


def test_one_agent():
    with TorchRLVectorEnv(factory=lambda: GymEnv("CartPole-v1"), num_envs=2, seed=3) as env:
        check_env(env, steps=40)
        assert env.spec.name == "torchrl/GymEnv"
        assert env.spec.groups["agents"].action_space == spaces.Discrete(2)  # one-hot in TorchRL
        ours = make_vector_env("gymnasium/CartPole-v1", 2, seed=3)
        ours.reset(seed=3)
        # Seeding a GymEnv begins an episode, which its reset does once more.
        assert torch.equal(env.reset(seed=3).state, ours.reset().state)
        rng = np.random.default_rng(0)
        for _ in range(60):
            actions = draw(env, rng)
            one, two = env.step(actions), ours.step(actions)
            assert torch.equal(one.observations.state, two.observations.state)
            assert torch.equal(one.reward["agents"], two.reward["agents"])
            assert torch.equal(one.terminated, two.terminated)
            ended = one.terminated
            assert torch.equal(one.final.state[ended], two.final.state[ended])


def test_several_observation_entries_are_joined():
    with TorchRLVectorEnv(factory=PendulumEnv, num_envs=2) as env:
        # theta, its speed, and the parameters of the pendulum.
        assert env.spec.groups["agents"].observation_shape == (8,)
        check_env(env, steps=20)


def test_groups_with_a_state():
    pursuit = pytest.importorskip("pettingzoo.sisl.pursuit_v5")
    factory = lambda: PettingZooWrapper(pursuit.parallel_env(max_cycles=6), return_state=True)  # noqa: E731
    with TorchRLVectorEnv(factory=factory, num_envs=1) as env:
        check_env(env, steps=13)
        assert env.spec.groups["pursuer"].observation_shape == (7, 7, 3)
        assert env.spec.state_size == 16 * 16 * 3
        env.reset()
        flags = [env.step(draw(env, np.random.default_rng(0))).truncated.item() for _ in range(7)]
        assert flags == [False] * 5 + [True, False]
        assert not env._step.terminated.any()


def test_turns():
    tictactoe = pytest.importorskip("pettingzoo.classic.tictactoe_v3")
    factory = lambda: PettingZooWrapper(tictactoe.env(), use_mask=True)  # noqa: E731
    with TorchRLVectorEnv(factory=factory, num_envs=2) as env:
        check_env(env, steps=30)
        now = env.reset()
        assert [int(now.action_mask[f"player_{i}"][0, 0].sum()) for i in (1, 2)] == [9, 1]
        assert all(alive.all() for alive in now.alive.values())
        rewards = torch.zeros(2)
        # The first player wins with the first row; the other one's reward counts too.
        for square in (0, 4, 1, 5, 2):
            mover = 1 if square < 3 else 2
            step = env.step({f"player_{i}": torch.full((2, 1), square * (i == mover)) for i in (1, 2)})
            rewards += torch.stack([step.reward[f"player_{i}"][0, 0] for i in (1, 2)])
        assert step.terminated.all()
        assert rewards.tolist() == [1.0, -1.0]


def test_batch():
    pytest.importorskip("vmas")
    factory = lambda num_envs: VmasEnv("simple_tag", num_envs=num_envs, max_steps=4)  # noqa: E731
    with TorchRLVectorEnv(factory=factory, num_envs=3, batched=True, name="mine") as env:
        assert env.spec.name == "mine"
        assert {name: group.num_agents for name, group in env.spec.groups.items()} == {"adversary": 3, "agent": 1}
        env.reset()
        rng = np.random.default_rng(0)
        ends = [bool(env.step(draw(env, rng)).terminated.all()) for _ in range(9)]
        assert ends == [False, False, False, True, False, False, False, True, False]
        before = env._step.observations.state.clone()
        after = env.reset(mask=np.array([False, True, False])).state
        assert (before != after).any(dim=-1).tolist() == [False, True, False]
        assert env.replicate(num_envs=5, seed=1).reset().state.shape[0] == 5


class SpecGame(EnvBase):
    """Two agents that do nothing, with actions of any kind and one reward for both."""

    def __init__(self, action: Composite) -> None:
        super().__init__()
        self.group_map = {"team": ["a", "b"]}
        self.observation_spec = Composite(team=Composite(observation=Unbounded((2, 3)), shape=(2,)))
        self.action_spec = Composite(team=Composite(action=action, shape=(2,)))
        self.reward_spec = Unbounded((1,))
        self.seen = None

    def _set_seed(self, seed):
        pass

    def _reset(self, entries=None, **kwargs):
        return self.observation_spec.zero().update(self.full_done_spec.zero())

    def _step(self, entries):
        self.seen = entries["team", "action"]
        result = self._reset()
        return result.set("reward", torch.tensor([0.5]))


@pytest.mark.parametrize(
    ("spec", "space", "action", "seen"),
    [
        (
            MultiOneHot([2, 3], shape=(2, 5)),
            spaces.MultiDiscrete([2, 3]),
            [[1, 0], [0, 2]],
            [[0, 1, 1, 0, 0], [1, 0, 0, 0, 1]],
        ),
        (Binary(3, shape=(2, 3)), spaces.MultiDiscrete([2, 2, 2]), [[1, 0, 1], [0, 0, 1]], [[1, 0, 1], [0, 0, 1]]),
        (Categorical(4, shape=(2,)), spaces.Discrete(4), [3, 1], [3, 1]),
        (Bounded(-1.0, 2.0, shape=(2, 1)), spaces.Box(-1, 2, (1,)), [[5.0], [0.5]], [[2.0], [0.5]]),
    ],
)
def test_kinds_of_actions(spec, space, action, seen):
    game = SpecGame(spec)
    env = TorchRLVectorEnv(factory=lambda: game, num_envs=1)
    assert env.spec.groups["team"].action_space == space
    assert env.spec.shared_reward
    env.reset()
    step = env.step({"team": torch.tensor([action])})
    assert game.seen.to(torch.float32).tolist() == torch.tensor(seen, dtype=torch.float32).tolist()
    assert step.reward["team"].tolist() == [[0.5, 0.5]]


class LeavingGame(SpecGame):
    """The second agent leaves on the first step, but still has an observation and a reward."""

    def __init__(self) -> None:
        super().__init__(Categorical(4, shape=(2,)))
        entries = {"observation": Unbounded((2, 3)), "mask": Categorical(2, shape=(2,), dtype=torch.bool)}
        self.observation_spec = Composite(team=Composite(entries, shape=(2,)))
        self.reward_spec = Composite(team=Composite(reward=Unbounded((2, 1)), shape=(2,)))

    def _reset(self, entries=None, **kwargs):
        result = super()._reset()
        result["team", "observation"] += 1
        result["team", "mask"] |= True
        return result

    def _step(self, entries):
        result = self._reset().set(("team", "reward"), torch.ones(2, 1))
        result["team", "mask"][1] = False
        return result


def test_agents_that_have_left_get_nothing():
    env = TorchRLVectorEnv(factory=LeavingGame, num_envs=1)
    env.reset()
    actions = {"team": torch.tensor([[3, 3]])}
    steps = [(env.step(actions).reward["team"].tolist(), env._step.observations.observation["team"].tolist())]
    assert env._step.observations.action_mask["team"].tolist() == [[[True] * 4, [True, False, False, False]]]
    steps.append((env.step(actions).reward["team"].tolist(), env._step.observations.observation["team"].tolist()))
    assert steps == [([[1.0, 1.0]], [[[1.0] * 3, [0.0] * 3]]), ([[1.0, 0.0]], [[[1.0] * 3, [0.0] * 3]])]


def test_errors():
    with pytest.raises(ValueError, match="actions must be categorical, one-hot or bounded"):
        TorchRLVectorEnv(factory=lambda: SpecGame(Unbounded((2, 1))), num_envs=1)
    bounds = Bounded(torch.tensor([[0.0], [1.0]]), torch.tensor([[2.0], [2.0]]), shape=(2, 1))
    with pytest.raises(ValueError, match="equal bounds"):
        TorchRLVectorEnv(factory=lambda: SpecGame(bounds), num_envs=1)
    with pytest.raises(ValueError, match=r"batch size \[\], got \[2\]"):
        TorchRLVectorEnv(factory=lambda: make_torchrl("matrix/climbing", 2), num_envs=2)
    env = TorchRLVectorEnv(factory=lambda: SpecGame(Categorical(4, shape=(2,))), num_envs=1)
    with pytest.raises(RuntimeError, match="call reset before step"):
        env.step({"team": torch.zeros(1, 2, dtype=torch.int64)})
    env.reset()
    with pytest.raises(ValueError, match="illegal action 4 of agent 'b' in environment 0"):
        env.step({"team": torch.tensor([[0, 4]])})
    env.close()
    env.close()


def test_a_function_may_return_an_environment_of_torchrl():
    with make_vector_env(lambda: GymEnv("CartPole-v1"), num_envs=2) as env:
        assert env.reset().observation["agents"].shape == (2, 1, 4)
