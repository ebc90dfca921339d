"""The environment of a pool: what is seen outside, what is played inside, and that nothing else changes."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from pool_helpers import Digits, Duel, duel, entry

from marl_lightning.algorithms import IPPO, IQL
from marl_lightning.data.collector import RolloutCollector
from marl_lightning.data.replay import replay_records
from marl_lightning.envs import SyncVectorEnv, check_env, make_vector_env
from marl_lightning.envs.base import Observations, VectorStep
from marl_lightning.envs.vector.buffers import map_observations
from marl_lightning.envs.wrappers import (
    NormalizeObservation,
    OpponentPoolEnv,
    TimeLimit,
    TransformReward,
    statistics_state_dict,
)
from marl_lightning.envs.wrappers.opponent_pool import PoolEntry

AGENTS = ("c0", "c1", "d0")
GROUPS = ("cats", "dogs")


def pooled(env=None, *, numbers=(1,), **options):
    """Returns an environment that plays against members that do their numbers."""
    env = OpponentPoolEnv(env or duel(), **options)
    env.use(Digits(), deterministic=False)
    if numbers:
        env.renew([entry(number) for number in numbers], torch.ones(len(numbers)))
    return env


def choose(observations, generator):
    """Returns legal actions."""
    return {
        name: torch.multinomial(mask.flatten(0, 1).double(), 1, generator=generator).view(mask.shape[:2])
        for name, mask in observations.action_mask.items()
    }


def join(per_group):
    """Returns the values of all agents, ``[E, 3]``."""
    return torch.cat([per_group[name] for name in GROUPS], -1)


def tensors(observations):
    return [
        *(
            x
            for kind in (observations.observation, observations.action_mask, observations.alive)
            for x in kind.values()
        ),
        observations.state,
    ]


@dataclass
class Record:
    """A step, kept.

    Attributes:
        seen: the decision points.
        chosen: what was chosen outside.
        arrived: what was played inside.
        step: the outcome.
        learner: ``[E]``, the place of the learner, -1 without opponents.
        number: ``[E]``, of the member that plays the others, -1 without.
    """

    seen: Observations
    chosen: torch.Tensor
    arrived: torch.Tensor
    step: VectorStep
    learner: np.ndarray
    number: np.ndarray

    @property
    def done(self):
        return self.step.terminated | self.step.truncated


def play(env, steps, *, seed=0, start=None, generator=None):
    """Plays legal actions."""
    generator = generator or torch.Generator().manual_seed(seed)
    observations = env.reset(seed=seed) if start is None else start
    records = []
    for _ in range(steps):
        seen = map_observations(torch.clone, observations)
        learner, number = env._learner.copy(), np.where(env._opponent < 0, -1, env._numbers[env._opponent])
        actions = choose(observations, generator)
        step = env.step(actions)
        kept = VectorStep(
            observations=map_observations(torch.clone, step.observations),
            reward={name: reward.clone() for name, reward in step.reward.items()},
            terminated=step.terminated.clone(),
            truncated=step.truncated.clone(),
            final=map_observations(torch.clone, step.final),
            info={name: value.clone() for name, value in step.info.items()},
        )
        records.append(Record(seen, join(actions), join(env.unwrapped.arrived[-1]), kept, learner, number))
        observations = step.observations
    return records


def hidden(record):
    """``[E, 3]``, who is played by the pool."""
    learner = torch.from_numpy(record.learner)[:, None]
    return (learner >= 0) & (torch.arange(3) != learner)


# What is seen outside -------------------------------------------------------------------------------------------------


def test_only_who_is_alive_differs_from_the_game_itself():
    """A second game gets the actions that arrived inside."""
    env, twin = pooled(numbers=(1, 2), pool_probability=0.6), duel()
    plain = twin.reset(seed=0)
    for record in play(env, 200):
        away = hidden(record)
        for seen, true in zip(tensors(record.seen)[:2], tensors(plain)[:2], strict=True):
            assert seen.equal(true)
        assert record.seen.state.equal(plain.state)
        assert join(record.seen.alive).equal(join(plain.alive) & ~away)
        for name, those in (("cats", away[:, :2]), ("dogs", away[:, 2:])):
            mask, true = record.seen.action_mask[name], plain.action_mask[name]
            assert mask[~those].equal(true[~those])
            assert (mask[those] == torch.eye(mask.shape[-1], dtype=torch.bool)[0]).all()
        assert record.arrived[~away].equal(record.chosen[~away])
        other = twin.step({"cats": record.arrived[:, :2], "dogs": record.arrived[:, 2:]})
        assert record.step.terminated.equal(other.terminated)
        assert record.step.truncated.equal(other.truncated)
        assert record.step.info["steps"].equal(other.info["steps"])
        assert join(record.step.reward).equal(join(other.reward))
        done, final = record.done, record.step.final
        # The true last decision points belong to the episode that has ended, not to the next one.
        assert join(final.alive)[done].equal((join(other.final.alive) & ~away)[done])
        for seen, true in zip(tensors(final)[:2], tensors(other.final)[:2], strict=True):
            assert seen[done].equal(true[done])
        plain = other.observations


def test_who_plays_whom_stays_for_an_episode():
    records = play(pooled(numbers=(1, 2, 3), pool_probability=0.6), 150)
    for before, after in pairwise(records):
        goes_on = ~before.done.numpy()
        assert (before.learner == after.learner)[goes_on].all()
        assert (before.number == after.number)[goes_on].all()
        assert ((after.learner >= 0) == (after.number >= 0)).all()
    assert {int(number) for record in records for number in record.number} >= {-1, 1}


def test_without_members_nothing_is_different():
    env, twin = pooled(numbers=(), pool_probability=1.0), duel()
    other = twin.reset(seed=0)
    for record in play(env, 60):
        assert all(a.equal(b) for a, b in zip(tensors(record.seen), tensors(other), strict=True))
        assert record.arrived.equal(record.chosen)
        step = twin.step({"cats": record.chosen[:, :2], "dogs": record.chosen[:, 2:]})
        done = record.done
        assert all(a[done].equal(b[done]) for a, b in zip(tensors(record.step.final), tensors(step.final), strict=True))
        other = step.observations
    assert env.take_results() == {}


def starts(record):
    return record.seen.state[:, 0].numpy() == 0


def test_every_agent_is_the_learner_equally_often():
    learners = np.concatenate([r.learner[starts(r)] for r in play(pooled(pool_probability=1.0), 400)])
    share = np.bincount(learners, minlength=3) / len(learners)
    assert len(learners) > 500
    assert share == pytest.approx(np.full(3, 1 / 3), abs=4 * np.sqrt(2 / 9 / len(learners)))


@pytest.mark.parametrize("learner", AGENTS)
def test_a_fixed_learner_is_the_only_one(learner):
    for record in play(pooled(pool_probability=1.0, learner=learner), 20):
        alive = join(record.seen.alive)
        assert not alive[:, [agent != learner for agent in AGENTS]].any()
        assert alive[starts(record), AGENTS.index(learner)].all()


@pytest.mark.parametrize("probability", [0.0, 0.25, 1.0])
def test_share_of_episodes_against_the_pool(probability):
    records = play(pooled(duel(20), pool_probability=probability), 150)
    against = np.concatenate([(r.number >= 0)[starts(r)] for r in records])
    assert len(against) > 500
    error = np.sqrt(probability * (1 - probability) / len(against))
    assert against.mean() == pytest.approx(probability, abs=4 * error)


class Replicated(OpponentPoolEnv):
    """Others like it have the same members, and not none."""

    def replicate(self, *, num_envs, seed):
        other = OpponentPoolEnv(self.env.replicate(num_envs=num_envs, seed=seed), pool_probability=0.7)
        other.use(self._policies[0], deterministic=False)
        return other


@pytest.mark.parametrize("game", ["duel", "mpe/simple_tag_v3", "openspiel/kuhn_poker"])
def test_the_contract_of_environments_is_kept(game):
    """All of it but one rule: agents that the pool plays keep their rewards, which are all 0 here."""
    inside = duel() if game == "duel" else make_vector_env(game, num_envs=6)
    with Replicated(TransformReward(inside, function=np.zeros_like), pool_probability=0.7) as env:
        torch.manual_seed(0)
        policy = Digits() if game == "duel" else IPPO(spec=env.spec).policy
        env.use(policy, deterministic=False)
        env.renew([PoolEntry(number=0, weights=policy.state_dict())], torch.ones(1))
        check_env(env, steps=60)


# What is played inside ------------------------------------------------------------------------------------------------


def test_members_play_all_others_and_remember_their_episode():
    """A digit tells which member plays, and how many steps it remembers."""
    records = play(pooled(numbers=(0, 1, 2, 3), pool_probability=0.8, active_opponents=3), 120)
    for record in records:
        time = record.seen.state[:, 0].long().numpy()
        expected = torch.from_numpy((record.number + time) % 4)[:, None] + torch.tensor([0, 0, 1])
        away = hidden(record)
        assert record.arrived[away].equal(expected[away])
    assert len({int(number) for record in records for number in record.number}) > 2


def test_actions_that_were_chosen_outside_are_not_written_to():
    env = pooled(pool_probability=1.0)
    observations = env.reset(seed=0)
    actions = choose(observations, torch.Generator().manual_seed(0))
    before = join(actions).clone()
    env.step(actions)
    assert join(actions).equal(before)
    assert not join(env.unwrapped.arrived[-1]).equal(before)


def test_running_episodes_keep_their_opponent_and_new_ones_get_the_next():
    env = pooled(numbers=(1,), pool_probability=1.0, active_opponents=1)
    generator, observations = torch.Generator().manual_seed(0), env.reset(seed=0)
    env.renew([entry(2)], torch.ones(1))
    expected, kinds = np.full(6, 1), []
    for _ in range(8):
        (record,) = play(env, 1, start=observations, generator=generator)
        assert record.number.tolist() == expected.tolist()
        kinds.append(set(expected.tolist()))
        expected[record.done.numpy()] = 2
        observations = record.step.observations
        if 1 in expected:  # not before the last episode against the first member has ended
            env.renew([entry(3)], torch.ones(1))
    assert kinds[0] == {1}
    assert {1, 2} in kinds
    assert kinds[-1] == {2}
    env.renew([entry(3)], torch.ones(1))
    assert set(play(env, 1)[0].number) == {3}


def test_members_are_drawn_by_weight():
    env = pooled(duel(30), numbers=(), pool_probability=1.0, active_opponents=4)
    entries, weights, counts = [entry(i) for i in range(3)], torch.tensor([1.0, 0.0, 3.0]), np.zeros(3)
    for _ in range(400):
        env.renew(entries, weights)
        env.reset()
        counts += np.bincount(env._numbers[env._opponent], minlength=3)
    assert counts[1] == 0
    # 4 members are drawn 400 times, and of these the ones of 30 episodes.
    assert counts[0] / counts.sum() == pytest.approx(0.25, abs=4 * np.sqrt(3 / 16 * (1 / 1600 + 1 / 12000)))


def test_at_most_twice_as_many_members_act_as_are_active():
    env = pooled(duel(40), numbers=(), pool_probability=1.0, active_opponents=2)
    entries, generator, observations = (
        [entry(i) for i in range(50)],
        torch.Generator().manual_seed(0),
        env.reset(seed=0),
    )
    acting = []
    for _ in range(60):
        env.renew(entries, torch.ones(50))
        (record,) = play(env, 1, start=observations, generator=generator)
        observations = record.step.observations
        acting.append({int(number) for number in record.number if number >= 0})
    assert max(map(len, acting)) in (3, 4)
    assert len(set().union(*acting)) > 10


def test_a_member_is_what_it_was_when_it_was_drawn():
    policy, member = Digits(1), entry(0, digit=1)
    env = OpponentPoolEnv(duel(), pool_probability=1.0)
    env.use(policy, deterministic=False)
    env.renew([member], torch.ones(1))
    with torch.no_grad():
        policy.number.fill_(3.0)
        member.weights["number"].fill_(3.0)
    (record,) = play(env, 1)
    assert set((record.arrived - torch.tensor([0, 0, 1]))[hidden(record)].tolist()) == {1}


@pytest.mark.parametrize("deterministic", [False, True])
def test_opponents_draw_or_take_their_modes(deterministic):
    with make_vector_env("matrix/rock_paper_scissors", num_envs=200) as inside:
        env = OpponentPoolEnv(inside, pool_probability=1.0, learner="agent_0")
        torch.manual_seed(0)
        policy = IPPO(spec=env.spec).policy
        env.use(policy, deterministic=deterministic)
        env.renew([PoolEntry(number=0, weights=policy.state_dict())], torch.ones(1))
        env.reset(seed=0)
        env.step({"agents": torch.zeros(200, 2, dtype=torch.long)})
        reward = env.step({"agents": torch.zeros(200, 2, dtype=torch.long)}).reward["agents"][:, 0]
    assert len(reward.unique()) == (1 if deterministic else 3)


def test_draws_are_not_those_of_the_learners():
    """With the same random numbers, a policy that plays itself would always do the same as itself."""
    with make_vector_env("matrix/rock_paper_scissors", num_envs=16) as inside:
        env = OpponentPoolEnv(inside, pool_probability=1.0, learner="agent_0")
        torch.manual_seed(0)
        policy = IPPO(spec=env.spec).policy  # close to uniform
        env.use(policy, deterministic=False)
        env.renew([PoolEntry(number=0, weights=policy.state_dict())], torch.ones(1))
        collector = RolloutCollector(env=env, rollout_length=100, seed=7)
        reward = collector.collect(policy).steps["next", "agents", "reward"][..., 0]
    assert (reward == 0).float().mean().item() == pytest.approx(1 / 3, abs=0.06)


# Results --------------------------------------------------------------------------------------------------------------


def test_episodes_and_wins_are_counted_for_each_member():
    """From the rewards that were seen outside; those of an episode that goes on are not among them."""
    env = pooled(numbers=(0, 3), pool_probability=0.8, active_opponents=2)
    returns, expected = np.zeros((6, 3)), {}
    for record in play(env, 150):
        returns += join(record.step.reward).numpy()
        for row in record.done.nonzero().flatten().tolist():
            learner, number = record.learner[row], int(record.number[row])
            if number >= 0:
                own, others = returns[row, learner], np.delete(returns[row], learner).mean()
                episodes, wins = expected.get(number, (0, 0.0))
                expected[number] = (episodes + 1, wins + (own > others) + 0.5 * (own == others))
            returns[row] = 0
    assert env.take_results() == expected
    assert expected.keys() == {0, 3}
    assert any(wins % 1 for _, wins in expected.values())  # there was a draw
    assert env.take_results() == {}


def test_episodes_that_are_broken_off_have_no_result():
    env = pooled(pool_probability=1.0)
    records = play(env, 1)
    assert not records[0].done.any()
    mask = np.array([True, False] * 3)
    kept = env._learner[~mask].copy()
    env.reset(mask=mask)
    assert (env._learner[~mask] == kept).all()
    assert env.take_results() == {}
    assert not env._returns[:, mask].any()
    assert env._returns[:, ~mask].any()


# Saving ---------------------------------------------------------------------------------------------------------------


def test_a_saved_environment_goes_on_exactly(tmp_path):
    """Two generations play, of which the first is in no pool any more."""
    env = pooled(numbers=(0, 1), pool_probability=0.8)
    generator = torch.Generator().manual_seed(4)
    start = play(env, 7)[-1].step.observations
    env.renew([entry(2), entry(3)], torch.ones(2))
    start = play(env, 1, start=start, generator=generator)[-1].step.observations
    playing = {int(number) for number in env._numbers[env._opponent[env._opponent >= 0]]}
    assert playing & {0, 1}
    assert playing & {2, 3}
    torch.save(env.state_dict(), tmp_path / "state.pt")
    draws, returns = generator.get_state(), env._returns.tolist()
    expected = play(env, 40, start=start, generator=generator)

    other = OpponentPoolEnv(duel(seed=9), pool_probability=0.8)
    other.use(Digits(), deterministic=False)
    generator.set_state(draws)
    restored = other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert all(a.equal(b) for a, b in zip(tensors(restored), tensors(start), strict=True))
    assert other._returns.tolist() == returns
    again = play(other, 40, start=restored, generator=generator)
    for a, b in zip(expected, again, strict=True):
        assert a.arrived.equal(b.arrived)
        assert a.number.tolist() == b.number.tolist()
        assert all(x.equal(y) for x, y in zip(tensors(a.step.observations), tensors(b.step.observations), strict=True))
    assert env.take_results() == other.take_results() != {}
    other.renew([entry(7), entry(8)], torch.ones(2))
    env.renew([entry(7), entry(8)], torch.ones(2))
    assert env._numbers.tolist() == other._numbers.tolist()


def test_a_state_for_another_number_of_opponents_is_refused():
    state = pooled(active_opponents=3).state_dict()
    with pytest.raises(ValueError, match=r"numbers of OpponentPoolEnv has shape \(4,\), but the saved one has \(6,\)"):
        pooled().load_state_dict(state)


def test_seeds_make_runs_equal_and_different():
    first, again, other = (
        [(r.learner.tolist(), r.number.tolist()) for r in play(pooled(numbers=(1, 2), active_opponents=1), 20, seed=s)]
        for s in (3, 3, 4)
    )
    assert first == again != other


# Around other environments --------------------------------------------------------------------------------------------


def test_evaluations_are_in_the_game_itself():
    with make_vector_env("matrix/prisoners_dilemma", num_envs=4, seed=3, episode_length=5) as inside:
        env = OpponentPoolEnv(inside)
        assert env.recipe == inside.recipe != {}
        assert env.spec == inside.spec
        assert (env.num_envs, env.seed, env.unwrapped) == (4, 3, inside)
        with env.replicate(num_envs=2, seed=8) as replica:
            assert type(replica) is type(inside)
            assert (replica.num_envs, replica.seed, replica.spec) == (2, 8, inside.spec)


def test_statistics_of_wrappers_inside_are_found():
    env = pooled(NormalizeObservation(TimeLimit(duel(), max_episode_steps=4)))
    play(env, 5)
    found = statistics_state_dict(env)
    assert "1.NormalizeObservation.cats.count" in found
    assert str(found) == str(statistics_state_dict(env.env))


def test_steps_can_be_waited_for():
    env = pooled(numbers=(2,), pool_probability=1.0, learner="c0")
    env.reset(seed=0)
    env.step_async({"cats": torch.ones(6, 2, dtype=torch.long), "dogs": torch.ones(6, 1, dtype=torch.long)})
    reward = env.step_wait().reward
    # c0 does 1, the others 2 and 3.
    assert reward["cats"].tolist() == [[1.5 - 3.0, 3.0 - 3.0]] * 6
    assert reward["dogs"].tolist() == [[4.5 - 3.0]] * 6


def test_unsuitable_environments_are_refused():
    with pytest.raises(TypeError, match="wraps a vector environment"):
        OpponentPoolEnv(Duel())
    with pytest.raises(ValueError, match=r"learner='x' is no agent of test/duel: it has c0, c1, d0"):
        OpponentPoolEnv(duel(), learner="x")
    with pytest.raises(ValueError, match="autoreset=True"):
        OpponentPoolEnv(SyncVectorEnv(factory=Duel, num_envs=1, seed=0, autoreset=False))
    with make_vector_env("gymnasium/CartPole-v1", num_envs=1) as env, pytest.raises(ValueError, match="has one agent"):
        OpponentPoolEnv(env)


# What is learned ------------------------------------------------------------------------------------------------------


class Repeat:
    """Asks a policy, so that all draws are made, and then plays what was played before."""

    def __init__(self, policy, arrived):
        self.policy, self.arrived = policy, iter(arrived)

    def initial_state(self, num_envs):
        return self.policy.initial_state(num_envs)

    def act(self, observations, state, is_first, **options):
        actions, log_probs, state = self.policy.act(observations, state, is_first, **options)
        return actions, log_probs, state

    def env_actions(self, actions):
        return next(self.arrived)


def collect_twice(module, *, rollouts=3, **options):
    """Returns rollouts against the pool, and rollouts of the game alone in which the same was played."""
    env, twin = pooled(numbers=(1, 2), pool_probability=0.7), duel()
    with_pool = RolloutCollector(env=env, rollout_length=8, seed=2, **options)
    alone = RolloutCollector(env=twin, rollout_length=8, seed=2, **options)
    for _ in range(rollouts):
        env.unwrapped.arrived.clear()
        first = with_pool.collect(module.policy)
        second = alone.collect(Repeat(module.policy, env.unwrapped.arrived))
        yield first, second, with_pool, alone


@pytest.mark.parametrize("recurrent", [False, True])
def test_learners_of_an_actor_critic_learn_what_they_would_without_the_pool(recurrent):
    """Advantages and targets are equal, whoever the agent is in the next episode; and nothing else has a weight."""
    torch.manual_seed(0)
    module = IPPO(
        spec=duel().spec,
        hidden_sizes=(8,),
        recurrent=recurrent,
        chunk_length=4,
        value_active_masks=True,
        normalise_value=False,
        normalise_advantage=False,
    )
    compared = 0
    for first, second, with_pool, alone in collect_twice(module, chunk_length=4 if recurrent else None):
        with_pool.state = module.prepare_rollout(first, with_pool.state)
        alone.state = module.prepare_rollout(second, alone.state)
        for name in GROUPS:
            one, other = module.training_batch(name, first), module.training_batch(name, second)
            learns = one.weight.bool()
            assert not (learns & ~other.weight.bool()).any()
            assert one.value_weight.equal(one.weight)
            for key in ("actor_inputs", "critic_inputs", "action", "action_mask", "log_prob", "value", "target"):
                assert getattr(one, key)[learns].equal(getattr(other, key)[learns]), key
            assert one.advantage[learns].equal(other.advantage[learns])
            assert one.is_first.equal(other.is_first)
            compared += int((learns.sum(-1) < other.weight.sum(-1)).any())
            # The loss is that of the learners among all agents, step for step.
            other.weight, other.value_weight = one.weight, one.weight
            losses = [module.group_loss(module.actors[name], module.critics[name], batch)[0] for batch in (one, other)]
            torch.testing.assert_close(*losses)
    assert compared


def test_learners_of_a_replay_learn_what_they_would_without_the_pool():
    torch.manual_seed(0)
    module = IQL(spec=duel().spec, hidden_sizes=(8,), team_reward=None)
    module.policy.rate = 0.3
    ends = 0
    for first, second, _, _ in collect_twice(module, keep_final="ended"):
        records, plain = replay_records(first), replay_records(second)
        for key in ("terminated", "truncated", "state"):
            assert records["next", key].equal(plain["next", key])
        for name in GROUPS:
            learns = records[name, "alive"]
            assert not (learns & ~plain[name, "alive"]).any()
            for key in ((name, "observation"), (name, "action_mask"), (name, "action")):
                assert records[key][learns].equal(plain[key][learns])
            for key in ("observation", "alive", "reward"):
                assert records["next", name, key][learns].equal(plain["next", name, key][learns])
            # What is legal then, which the best next action is chosen from.
            goes_on = learns & records["next", name, "alive"]
            masks = records["next", name, "action_mask"], plain["next", name, "action_mask"]
            assert masks[0][goes_on].equal(masks[1][goes_on])
        ends += int((records["next", "truncated"]).sum())
    assert ends > 3
