"""A policy plays some agents: by hand, against the game with all agents, and by the contract of environments."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from scripted import CounterGame
from wrapper_helpers import RandomGame, assert_same, outcome, parts

from marl_lightning.algorithms import IPPO, MFQ
from marl_lightning.envs import SyncVectorEnv, check_env, make_vector_env
from marl_lightning.envs.wrappers import NormalizeReward, Opponents, RecordEpisodeStatistics, recorded_returns


class Scripted:
    """Does what ``choose(observations, age)`` says, by group, and remembers the age of the episodes in steps."""

    def __init__(self, choose):
        self.choose = choose
        self.seen = []

    def initial_state(self, num_envs):
        return {"age": torch.full((num_envs,), 100)}

    def act(self, observations, state, is_first, *, deterministic=False, generator=None):
        assert not torch.is_grad_enabled()
        age = torch.where(is_first, 0, state["age"])
        self.seen.append((age.tolist(), deterministic))
        return self.choose(observations, age), {}, {"age": age + 1}

    def env_actions(self, actions):
        return actions


class Sampling(Scripted):
    """Draws legal discrete actions and continuous ones in [0, 1), for any game."""

    def __init__(self, spec):
        super().__init__(None)
        self.spec = spec

    def act(self, observations, state, is_first, *, deterministic=False, generator=None):
        actions = {}
        for name, group in self.spec.groups.items():
            alive = observations.alive[name]
            if group.is_discrete:
                draw = torch.rand(observations.action_mask[name].shape, generator=generator)
                actions[name] = torch.where(observations.action_mask[name], draw, -1).argmax(-1)
            else:
                actions[name] = torch.rand(*alive.shape, *group.action_shape, generator=generator)
        return actions, {}, {"age": torch.where(is_first, 0, state["age"]) + 1}


def pennies(**kwargs):
    return make_vector_env("matrix/matching_pennies", **({"num_envs": 2, "episode_length": 3} | kwargs))


def counter(num_envs=2):
    return SyncVectorEnv(factory=CounterGame, num_envs=num_envs, seed=0)


def still(observations, age):
    """Nobody does anything in the counter game."""
    num_envs = len(age)
    return {"red": torch.zeros(num_envs, 2, dtype=torch.int64), "blue": torch.zeros(num_envs, 1, 2)}


def test_the_policy_decides_what_the_opponent_does():
    """The first player of matching pennies wins if both show the same. The second one shows 0, 1, 0 in an episode."""
    policy = Scripted(lambda observations, age: {"agents": (age % 2)[:, None].expand(-1, 2)})
    env = Opponents(pennies(), policy, agents="agent_0")
    assert env.agents == env.spec.agents == ("agent_0",)
    observations = env.reset(seed=0)
    assert observations.observation["agents"].tolist() == [[[1]], [[1]]]
    rewards = []
    for _ in range(4):
        step = env.step({"agents": torch.tensor([[0], [1]])})
        rewards.append(step.reward["agents"].flatten().tolist())
    assert rewards == [[1, -1], [-1, 1], [1, -1], [1, -1]]  # the fourth step is the first of the next episode
    assert policy.seen == [([0, 0], False), ([1, 1], False), ([2, 2], False), ([0, 0], False)]


def test_the_other_player_is_named():
    policy = Scripted(lambda observations, age: {"agents": torch.zeros(len(age), 2, dtype=torch.int64)})
    env = Opponents(pennies(), policy, agents=["agent_1"], deterministic=True)
    env.reset()
    assert env.step({"agents": torch.tensor([[0], [1]])}).reward["agents"].tolist() == [[-1], [1]]
    assert policy.seen == [([0, 0], True)]


def test_the_middle_of_a_group_and_groups_that_vanish():
    everybody = SyncVectorEnv(factory=RandomGame, num_envs=3, seed=0)
    env = Opponents(SyncVectorEnv(factory=RandomGame, num_envs=3, seed=0), Sampling(everybody.spec), agents="r1")
    assert list(env.spec.groups) == ["runners"]
    assert env.spec.groups["runners"].agents == ("r1",)
    assert env.spec.state_size == 4
    whole, mine = everybody.reset(), env.reset()
    idle = {"runners": torch.zeros(3, 3, dtype=torch.int64), "birds": torch.zeros(3, 2, 1)}
    for _ in range(20):  # nothing in this game depends on the actions
        for name in ("observation", "alive", "action_mask"):
            expected = getattr(whole, name)["runners"][:, 1:2]
            assert torch.equal(getattr(mine, name)["runners"], expected)
        assert torch.equal(mine.state, mine.observation["runners"][:, 0])
        theirs, step = everybody.step(idle), env.step({"runners": torch.zeros(3, 1, dtype=torch.int64)})
        assert torch.equal(step.reward["runners"], theirs.reward["runners"][:, 1:2])
        assert torch.equal(step.terminated, theirs.terminated)
        assert torch.equal(step.truncated, theirs.truncated)
        assert torch.equal(step.info["luck"], theirs.info["luck"])
        ended = theirs.terminated | theirs.truncated
        expected = theirs.final.observation["runners"][ended, 1:2]
        assert torch.equal(step.final.observation["runners"][ended], expected)
        assert torch.equal(step.final.state[ended], expected[:, 0])
        whole, mine = theirs.observations, step.observations


def test_the_state_is_what_the_remaining_agents_see():
    env = Opponents(counter(), Scripted(still), agents=("blue_0", "red_1"))
    assert env.spec.agents == ("red_1", "blue_0")
    assert env.spec.state_size == 8
    observations = env.reset()
    seen = torch.cat([observations.observation["red"].flatten(1), observations.observation["blue"].flatten(1)], 1)
    assert torch.equal(observations.state, seen)


def test_the_dead_stay_dead():
    """Agent ``red_1`` dies on its second step, for which it gets -1, and has one legal action then."""
    env = Opponents(counter(1), Scripted(still), agents="red_1")
    env.reset()
    rewards, alive, legal = [], [], []
    for _ in range(3):
        step = env.step({"red": torch.tensor([[0]])})
        rewards.append(step.reward["red"].item())
        alive.append(step.observations.alive["red"].item())
        legal.append(step.observations.action_mask["red"].sum().item())
    assert (rewards, alive, legal) == ([1, -1, 0], [True, False, True], [3, 1, 3])


def test_the_dead_may_ask_for_anything():
    env = Opponents(counter(1), Scripted(still), agents="red_1")
    env.reset()
    for action in (0, 0, 2):  # in the third step it is dead, and only 0 is legal
        env.step({"red": torch.tensor([[action]])})
    with pytest.raises(ValueError, match="illegal action"):
        env.step({"red": torch.tensor([[7]])})


def test_a_partial_reset_starts_the_memory_of_these_anew():
    policy = Scripted(lambda observations, age: {"agents": torch.zeros(len(age), 2, dtype=torch.int64)})
    env = Opponents(pennies(episode_length=10), policy, agents="agent_0")
    env.reset()
    actions = {"agents": torch.zeros(2, 1, dtype=torch.int64)}
    env.step(actions)
    env.step(actions)
    env.reset(mask=np.array([False, True]))
    env.step(actions)
    assert policy.seen[-1][0] == [2, 0]
    env.reset(mask=np.array([True, False]))
    env.reset(mask=np.array([False, True]))
    env.step(actions)
    assert policy.seen[-1][0] == [0, 0]


@pytest.mark.parametrize("agents", ["r1", ("r0", "r2"), ("b1", "r2"), "b0"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_contract_of_environments(agents, deterministic):
    inside = SyncVectorEnv(factory=RandomGame, num_envs=3, seed=0)
    check_env(Opponents(inside, Sampling(inside.spec), agents=agents, deterministic=deterministic))


@pytest.mark.parametrize("name", ["mpe/simple_tag_v3", "lbf/Foraging-5x5-2p-1f-v3"])
@pytest.mark.parametrize("recurrent", [False, True])
def test_native_games_and_networks(name, recurrent):
    inside = make_vector_env(name, num_envs=3, seed=0)
    policy = IPPO(spec=inside.spec, hidden_sizes=(8,), recurrent=recurrent).policy
    check_env(Opponents(inside, policy, agents=inside.spec.agents[1]))


def test_randomness_is_its_own_and_follows_from_the_seed():
    env = Opponents(pennies(episode_length=20), Sampling(pennies().spec), agents="agent_0")

    def play(seed):
        env.reset(seed=seed)
        return [env.step({"agents": torch.zeros(2, 1, dtype=torch.int64)}).reward["agents"].tolist() for _ in range(20)]

    before = torch.get_rng_state()
    one = play(1)
    assert torch.equal(before, torch.get_rng_state())
    torch.rand(3)
    assert play(2) != one
    assert play(1) == one


class AgeAndChance(Scripted):
    """Shows heads or tails by chance, and the opposite in every second step."""

    def __init__(self):
        super().__init__(None)

    def act(self, observations, state, is_first, *, deterministic=False, generator=None):
        age = torch.where(is_first, 0, state["age"])
        drawn = torch.randint(2, (len(age), 2), generator=generator)
        return {"agents": (drawn + age[:, None]) % 2}, {}, {"age": age + 1}


def test_what_is_saved_continues_exactly():
    def make():
        return Opponents(pennies(num_envs=3, episode_length=7), AgeAndChance(), agents="agent_1")

    def play(env):
        return [outcome(env.step({"agents": torch.zeros(3, 1, dtype=torch.int64)})) for _ in range(15)]

    env = make()
    env.reset(seed=1)
    for _ in range(10):  # the fourth step of the second episode is next
        env.step({"agents": torch.zeros(3, 1, dtype=torch.int64)})
    state = env.state_dict()
    assert state["memory"]["age"].tolist() == [3, 3, 3]
    expected = play(env)
    assert state["memory"]["age"].tolist() == [3, 3, 3]
    other = make()
    restored = other.load_state_dict(state)
    assert restored is other.reset(mask=np.zeros(3, np.bool_))
    for one, two in zip(expected, play(other), strict=True):
        assert_same(one, two)
    wrong = r"of an environment of \['agent_1'\], but in this one \['agent_0'\] remain"
    with pytest.raises(ValueError, match=wrong):
        Opponents(other.env, AgeAndChance(), agents="agent_0").load_state_dict(state)


def test_what_is_saved_at_the_end_of_an_episode():
    env = Opponents(pennies(num_envs=1, episode_length=3), AgeAndChance(), agents="agent_1")
    env.reset(seed=0)
    for _ in range(3):
        env.step({"agents": torch.zeros(1, 1, dtype=torch.int64)})
    state = env.state_dict()
    assert state["is_first"].tolist() == [True]
    expected = env.step({"agents": torch.zeros(1, 1, dtype=torch.int64)}).reward["agents"].item()
    env.step({"agents": torch.zeros(1, 1, dtype=torch.int64)})
    env.load_state_dict(state)
    assert env.step({"agents": torch.zeros(1, 1, dtype=torch.int64)}).reward["agents"].item() == expected
    assert env.state_dict()["memory"]["age"].tolist() == [1]


def test_mode_and_gradients_are_given_back():
    inside = pennies()
    policy = IPPO(spec=inside.spec, hidden_sizes=(4,)).policy.train()
    asked = []
    policy["agents"].register_forward_hook(lambda module, *_: asked.append((module.training, torch.is_grad_enabled())))
    env = Opponents(inside, policy, agents="agent_1")
    env.reset()
    env.step({"agents": torch.zeros(2, 1, dtype=torch.int64)})
    assert asked == [(False, False)]
    assert policy.training
    assert policy["agents"].training
    assert torch.is_grad_enabled()


def test_a_memory_of_actions_is_told_what_was_done():
    """A mean-field policy remembers the actions of all agents; that of the first one is not what it chose."""
    inside = make_vector_env("matrix/climbing", num_envs=2, episode_length=5)
    env = Opponents(inside, MFQ(spec=inside.spec, hidden_sizes=(4,)).policy, agents="agent_0")
    env.reset(seed=0)
    for action in (0, 1, 2):
        env.step({"agents": torch.tensor([[action], [2 - action]])})
        memory = env.state_dict()["memory"]["previous/agents"]
        assert memory[:, 0].argmax(-1).tolist() == [action, 2 - action]
        assert torch.equal(memory.sum(-1), torch.ones(2, 2))


def test_returns_of_all_agents_are_not_those_of_some():
    """The recorded return is a mean over both players, which is 0 in a zero-sum game, and not the player's own."""
    inside = RecordEpisodeStatistics(pennies(), per_agent=True)
    policy = Scripted(lambda observations, age: {"agents": torch.zeros(len(age), 2, dtype=torch.int64)})
    env = Opponents(inside, policy, agents="agent_0")
    assert env.spec.info_keys == ("episode_length", "agent_return/agent_0", "agent_return/agent_1")
    assert recorded_returns(env.spec, {}) is None
    env.reset()
    for _ in range(3):
        step = env.step({"agents": torch.zeros(2, 1, dtype=torch.int64)})
    assert step.info["agent_return/agent_0"].tolist() == [3, 3]


def test_wrappers_around_it():
    env = NormalizeReward(Opponents(counter(), Scripted(still), agents="red_0"), gamma=0.9)
    env.reset()
    step = env.step({"red": torch.zeros(2, 1, dtype=torch.int64)})
    assert {name for name, _ in parts(step.observations)} == {
        "observation.red",
        "action_mask.red",
        "alive.red",
        "state",
    }


def test_closing_closes_the_game():
    games = []

    def make():
        games.append(CounterGame())
        return games[-1]

    with Opponents(SyncVectorEnv(factory=make, num_envs=2, seed=0), Scripted(still), agents="red_0"):
        pass
    assert [game.closed for game in games] == [1, 1]


def test_pictures_are_those_of_the_game():
    env = Opponents(counter(1), Scripted(still), agents="red_0")
    env.reset()
    env.step({"red": torch.zeros(1, 1, dtype=torch.int64)})
    assert (env.render(0) == 1).all()


def test_what_cannot_be():
    with pytest.raises(ValueError, match=r"agents has \['agent_9'\], but the agents of matrix/matching_pennies are"):
        Opponents(pennies(), Scripted(None), agents=["agent_0", "agent_9"])
    with pytest.raises(ValueError, match="agents is empty"):
        Opponents(pennies(), Scripted(None), agents=[])
    with pytest.raises(TypeError, match=r"a IPPO cannot act \(act, initial_state, env_actions\): give its attribute"):
        Opponents(pennies(), IPPO(spec=pennies().spec), agents="agent_0")
    with pytest.raises(TypeError, match="a int cannot act"):
        Opponents(pennies(), 3, agents="agent_0")
    still_standing = SyncVectorEnv(factory=CounterGame, num_envs=1, seed=0, autoreset=False)
    with pytest.raises(ValueError, match="Opponents needs an environment that resets its instances"):
        Opponents(still_standing, Scripted(still), agents="red_0")
    env = Opponents(pennies(), IPPO(spec=counter().spec, hidden_sizes=(4,)).policy, agents="agent_0")
    env.reset()
    with pytest.raises(ValueError, match="the policy cannot act in matrix/matching_pennies, whose agents are agent_0"):
        env.step({"agents": torch.zeros(2, 1, dtype=torch.int64)})
    with pytest.raises(ValueError, match=r"actions of 'agents' must be integers of shape \(2, 1\)"):
        env.step({"agents": torch.zeros(2, 2, dtype=torch.int64)})
    with pytest.raises(RuntimeError, match="call reset before step"):
        Opponents(pennies(), Scripted(None), agents="agent_0").step({})


def test_wrappers_do_not_need_torch():
    code = "import sys, marl_lightning.envs.wrappers; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"
