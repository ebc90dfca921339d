"""Counterfactual experience against the monitors themselves, and what it is good for."""

from functools import partial

import lightning
import numpy as np
import pytest
import torch
from scripted import CounterGame
from tensordict import TensorDict
from walking import wander, watched_walk

from marl_lightning.algorithms import IQL
from marl_lightning.callbacks import EpsilonSchedule, StopAtEnvSteps
from marl_lightning.data import ReplayDataModule
from marl_lightning.data.collector import RolloutCollector
from marl_lightning.data.counterfactual import CounterfactualReplay
from marl_lightning.data.replay import ReplayBuffer, replay_records
from marl_lightning.data.samplers import NONE, SequenceWindows, StreamIndex
from marl_lightning.envs import SyncVectorEnv, check_env
from marl_lightning.envs.monitors import MonitorParallelEnv, PotentialShaping, RewardMachine, sequence

SETTINGS = [
    {"end_on": "any"},
    {"end_on": "all", "reward": "add"},
    {"end_on": "never", "shaping": PotentialShaping(0.9)},
    {"end_on": "any", "trap": 4, "reward": "add", "shaping": PotentialShaping(0.5)},
]


def episodes_of(make, *, steps=400, seed=0):
    """Yields the episodes of one instance, with their info."""
    for records, info in wander(make, steps=steps, seed=seed):
        done = (records["next", "terminated"] | records["next", "truncated"])[:, 0]
        begin = 0
        for end in (done.nonzero().squeeze(-1) + 1).tolist():
            yield records[begin:end, 0], {key: value[begin:end, 0] for key, value in info.items()}
            begin = end


def monitor_index(env, agent, steps):
    """Returns the state of an agent's monitor in the global states of steps."""
    sizes = {name: len(monitor.states) for name, monitor in env.monitors.items()}
    own = steps["state"][..., env.env.spec.state_size :].split(list(sizes.values()), -1)[list(sizes).index(agent)]
    assert (own.sum(-1) == 1).all()
    return own.argmax(-1).tolist()


def different(first, second):
    """Returns the keys of what differs between two TensorDicts."""
    keys = first.keys(include_nested=True, leaves_only=True)
    return {key for key in keys if not torch.equal(first[key], second[key])}


# ---------------------------------------------------------------------------------------------------- what is reported


def test_labels_are_reported():
    env = watched_walk(agents=1, scatter=False, trap=1)
    check_env(env, steps=40)
    env.reset(seed=0)
    step = env.step({"walkers": np.array([1])})  # against the wall: stays in cell 0, which is marked a
    assert (step.info["label/walker_0"], step.info["game_over"]) == (1.0, 0.0)
    assert env.label("walker_0", 1) == {"a"}
    assert env.label("walker_0", 0b110) == {"b", "c"}
    step = env.step({"walkers": np.array([0])})
    assert (step.info["label/walker_0"], step.info["game_over"]) == (0.0, 1.0)


def test_labels_that_cannot_be_reported():
    class Plain:
        states, initial, undecided_is = (0,), 0, False

    with pytest.raises(ValueError, match="attribute propositions"):
        watched_walk(agents=1, monitors={"walker_0": Plain()})
    wide = RewardMachine.from_edges(
        [(i, " & ".join(f"p{i}_{j}" for j in range(13)), i + 1, 0.0) for i in range(2)],
        on_missing="stay",
        accepting=[2],
    )
    with pytest.raises(ValueError, match="24 bits, but 'walker_0' has 26"):
        watched_walk(agents=1, monitors={"walker_0": wide})


# ------------------------------------------------------------------------------------------------------- what is told


@pytest.mark.parametrize("settings", SETTINGS)
def test_told_from_the_real_state_it_is_what_happened(settings):
    env = watched_walk(**settings)
    relabel = CounterfactualReplay(env=env)
    others_alive = 0
    for episode, info in episodes_of(partial(watched_walk, **settings)):
        for agent, monitor in env.monitors.items():
            told = relabel.told_from(episode, info, agent, monitor.initial)
            assert different(told, episode) <= {("walkers", "alive")}
            row = env.spec.agents.index(agent)
            assert told["walkers", "alive"][:, row].all()
            others_alive += int(told["walkers", "alive"].sum()) - len(told)
    assert others_alive == 0


@pytest.mark.parametrize("settings", SETTINGS)
def test_variants_follow_their_monitors(settings):
    """Every record agrees with the monitor, and only what belongs to the monitor differs from what happened."""
    env = watched_walk(**settings)
    relabel = CounterfactualReplay(env=env)
    told = ended = 0
    for episode, info in episodes_of(partial(watched_walk, **settings)):
        for row, (agent, monitor) in enumerate(env.monitors.items()):
            seen = {(t, u) for t, u in enumerate(monitor_index(env, agent, episode))}
            assert len(seen) == len(episode)
            others = [name for name in env.monitors if name != agent]
            for variant in relabel.variants(episode, info, agent):
                now, following = (monitor_index(env, agent, steps) for steps in (variant, variant["next"]))
                real = monitor_index(env, agent, episode)
                assert now[1:] == following[:-1]
                assert variant["is_first"].tolist() == [True] + [False] * (len(variant) - 1)
                for t in range(len(variant)):
                    told += 1
                    assert (t, now[t]) not in seen  # neither what happened nor what another variant says
                    seen.add((t, now[t]))
                    label = env.label(agent, int(info[f"label/{agent}"][t]))
                    u = monitor.states[now[t]]
                    outcome, fact = monitor.step(u, label), monitor.step(monitor.states[real[t]], label)
                    assert not monitor.is_terminal(u)
                    assert monitor.states[following[t]] == outcome.state
                    paid = env.monitor_reward(agent, u, outcome, over=variant["next", "terminated"][t].item())
                    if env.reward == "add":
                        paid += 0.25
                    assert variant["next", "walkers", "reward"][t, row].item() == pytest.approx(paid, abs=1e-6)
                    assert fact.state == monitor.states[monitor_index(env, agent, episode["next"])[t]]
                    terminal = [outcome.terminal]
                    for name in others:
                        u = monitor_index(env, name, episode["next"])[t]
                        terminal.append(env.monitors[name].is_terminal(env.monitors[name].states[u]))
                    over = env.is_over(terminal) or bool(info["game_over"][t])
                    assert variant["next", "terminated"][t].item() == over
                    assert not (over and variant["next", "truncated"][t])
                    if over or outcome.terminal:
                        ended += 1
                        assert t == len(variant) - 1
                # The rest is as it was.
                part, cells = episode[: len(variant)], env.env.spec.groups["walkers"].observation_size
                for steps, same in ((variant, part), (variant["next"], part["next"])):
                    mine, before = steps["walkers", "observation"], same["walkers", "observation"]
                    assert torch.equal(mine[:, 1 - row], before[:, 1 - row])
                    assert torch.equal(mine[:, row, :cells], before[:, row, :cells])
                    assert mine[:, row, cells:].argmax(-1).tolist() == monitor_index(env, agent, steps)
                    assert (mine[:, row, cells:].sum(-1) == 1).all()
                    assert torch.equal(steps["state"][:, :2], same["state"][:, :2])
                rest = {("walkers", "alive"), ("next", "walkers", "reward"), ("next", "terminated"), "is_first"}
                rest |= {("walkers", "observation"), ("next", "walkers", "observation"), "state", ("next", "state")}
                assert different(variant, part) <= rest | {("next", "truncated")}
                paid, before = variant["next", "walkers", "reward"], part["next", "walkers", "reward"]
                assert torch.equal(paid[:, 1 - row], before[:, 1 - row])
    assert told > 100
    assert ended > 3


def test_by_hand():
    """Real path: a, nothing, b, c. From state 1 on, 'a' changes nothing, and the states meet after the first step."""
    env = watched_walk(size=3, agents=1, scatter=False)
    relabel = CounterfactualReplay(env=env)
    vector = SyncVectorEnv(factory=partial(watched_walk, size=3, agents=1, scatter=False), num_envs=1, seed=0)
    vector.reset()

    class Script:
        def __init__(self, moves):
            self.moves = iter(moves)

        def initial_state(self, num_envs):
            return {}

        def act(self, observations, state, is_first, **_):
            return {"walkers": torch.tensor([[next(self.moves)]])}, {"walkers": torch.zeros(1, 1)}, state

        def env_actions(self, actions):
            return actions

    # stay on a; right; right to b; left; left (to a); down; down to c.
    collector = RolloutCollector(env=vector, rollout_length=7, keep_final="ended")
    rollout = collector.collect(Script([1, 0, 0, 1, 1, 2, 2]))
    episode, info = replay_records(rollout)[:, 0], {key: value[:, 0] for key, value in rollout.info.items()}
    assert info["label/walker_0"].tolist() == [1, 0, 2, 0, 1, 0, 4]
    assert monitor_index(env, "walker_0", episode) == [0, 1, 1, 2, 2, 2, 2]
    assert episode["next", "terminated"].tolist() == [False] * 6 + [True]
    variants = relabel.variants(episode, info, "walker_0")
    assert [monitor_index(env, "walker_0", v) for v in variants] == [[1], [2, 2, 2]]
    assert [monitor_index(env, "walker_0", v["next"]) for v in variants] == [[1], [2, 2, 2]]
    # From the middle on, as pieces: state 2 is left with c; from 0 it is a at step 4, from 1 it waits for b.
    variants = relabel.variants(episode[3:], {key: value[3:] for key, value in info.items()}, "walker_0")
    assert [monitor_index(env, "walker_0", v) for v in variants] == [[0, 0, 1, 1], [1, 1]]
    assert not any(v["next", "terminated"].any() for v in variants)
    assert all(v["next", "walkers", "reward"].sum() == 0 for v in variants)


def test_a_task_that_is_done_at_the_time_limit_is_over():
    make = partial(watched_walk, agents=1, marks={"a": 0}, monitors={"walker_0": sequence("!a", "a | !a")}, limit=1)
    env = make()
    ends = []
    for episode, info in episodes_of(make, steps=40):
        ends.append(tuple(episode["next", name].item() for name in ("terminated", "truncated")))
        (variant,) = CounterfactualReplay(env=env).variants(episode, info, "walker_0")
        assert (variant["next", "terminated"].item(), variant["next", "truncated"].item()) == (True, False)
    assert set(ends) == {(False, True)}


def test_an_episode_that_breaks_off_is_forgotten():
    """Where training was resumed and the environment was not, an episode starts without an end before it."""
    make = partial(watched_walk, agents=1, scatter=False, limit=6)
    relabel = CounterfactualReplay(env=make())
    buffer = ReplayBuffer(capacity=100, windows=SequenceWindows(), seed=0)
    for steps in (4, 6):
        for records, info in wander(make, steps=steps):
            relabel.extend(buffer, records, info)
    assert 0 < len(buffer) <= 12
    assert max(buffer.index.seq) < 6


def test_the_dead_are_not_paid_and_see_nothing():
    def label(context):
        time = context.next_observations.state[1]
        return {"red_1": frozenset({"late"} if time >= 3 else ())}

    def make():
        monitors = {"red_1": sequence("late", "late", reward=5.0)}
        return MonitorParallelEnv(CounterGame(length=5), monitors, label, report_labels=True, end_on="never")

    env, variants = make(), []
    relabel = CounterfactualReplay(env=env)
    for episode, info in episodes_of(make, steps=11):
        variants += relabel.variants(episode, info, "red_1")
    assert variants  # from state 1: 'late' after the third step, when red_1 is dead
    for variant in variants:
        assert monitor_index(env, "red_1", variant) == [1, 1, 1]
        assert monitor_index(env, "red_1", variant["next"]) == [1, 1, 2]
        assert variant["red", "alive"].tolist() == [[False, True], [False, True], [False, False]]
        assert variant["next", "red", "reward"][:, 1].tolist() == [0, 0, 0]
        assert variant["red", "observation"][0, 1, 4:].tolist() == [0, 1, 0]
        assert variant["red", "observation"][2, 1].tolist() == [0] * 7
        assert not variant["blue", "alive"].any()


# ------------------------------------------------------------------------------------------------- where variants start


def starts(env, variants, agent="walker_0"):
    return sorted(monitor_index(env, agent, variant)[0] for variant in variants)


def test_where_variants_start():
    make = partial(watched_walk, agents=1)
    env = make()
    (episode, info), *_ = episodes_of(make)
    assert starts(env, CounterfactualReplay(env=env, policy="all").variants(episode, info, "walker_0")) == [1, 2]
    chosen = CounterfactualReplay(env=env, policy=lambda agent, state, others: [others[-1]])
    assert starts(env, chosen.variants(episode, info, "walker_0")) == [2]
    few = CounterfactualReplay(env=env, max_variants=1)
    assert [starts(env, few.variants(episode, info, "walker_0")) for _ in range(3)] == [[1], [2], [1]]


@pytest.mark.parametrize("policy", ["reachable", "all"])
def test_reachable_states_are_those_that_labels_lead_to(policy):
    """After 'a', no state of the sequence leads to state 0."""
    make = partial(watched_walk, agents=1, size=2, marks={"a": 1, "b": 2, "c": 3}, limit=9)
    env = make()
    relabel = CounterfactualReplay(env=env, anchor="segment", policy=policy)
    buffer = ReplayBuffer(capacity=5000, windows=SequenceWindows(), seed=0)
    reachable, unreachable, found = {0, 1, 2, 3}, 0, 0
    for records, info in wander(make, steps=1, rollouts=300):
        if records["is_first"]:
            reachable = {0, 1, 2, 3}
        before = len(buffer)
        relabel.extend(buffer, records, info)
        told = set(monitor_index(env, "walker_0", stored(buffer)[before:])) if len(buffer) > before else set()
        real = monitor_index(env, "walker_0", records[0])[0]
        expected = reachable if policy == "reachable" else {0, 1, 2, 3}
        assert told == expected - {real, 3}
        unreachable += len(expected) < 4
        found += len(told)
        label = env.label("walker_0", int(info["label/walker_0"]))
        reachable = {env.monitors["walker_0"].step(u, label).state for u in reachable}
    assert found > 100
    assert (unreachable > 100) == (policy == "reachable")


def stored(buffer):
    """Returns all records, ``[n]``, in the order of their slots."""
    leaves = {key: leaf[: len(buffer)] for key, leaf in buffer._leaves.items()}
    return TensorDict({}, batch_size=[len(buffer)]).update(leaves)


@pytest.mark.parametrize("anchor", ["episode", "segment"])
def test_variants_are_streams_of_their_own(anchor):
    """Stream numbers are new, each variant starts an episode, and no window joins two streams."""
    make = partial(watched_walk, end_on="all")
    relabel = CounterfactualReplay(env=make(), anchor=anchor)
    buffer = ReplayBuffer(capacity=600, windows=SequenceWindows(length=4, burn_in=3, allow_short=True), seed=0)
    factual = buffer.index.open(2)
    highest = 1
    for records, info in wander(make, steps=5, envs=2, rollouts=60):
        buffer.extend(records, factual)
        relabel.extend(buffer, records, info)
        index = buffer.index
        new = set(index.stream.tolist()) - {NONE, 0, 1}
        highest = max(highest, *new, 1)
        draw = buffer.sampler.sample(64)
        streams = np.where(draw.slots == NONE, NONE, index.stream[draw.slots])
        for column in streams.T:
            assert len(set(column.tolist()) - {NONE}) == 1
    assert highest > 50
    living = index.stream[index.stream > 1]
    assert index.is_closed(np.flatnonzero(index.stream > 1)).all()
    firsts = np.flatnonzero((index.stream > 1) & (index.seq == 0))
    assert (index.start[firsts] == 0).all()
    assert (index.start[np.flatnonzero(index.stream > 1)] == 0).all()
    assert len(np.unique(living)) < highest - 1  # others have been overwritten
    first = stored(buffer)["is_first"].numpy()
    assert np.array_equal(first[index.stream > 1], (index.seq == 0)[index.stream > 1])


def test_streams_that_are_gone_take_no_memory():
    index = StreamIndex(8)
    last = NONE
    for _ in range(200):
        stream = index.open(1)
        assert stream[0] == last + 1  # never used again
        last = stream[0]
        index.insert(stream, np.array([[True], [False]]), np.array([[False], [True]]))
        index.close(stream)
        assert sorted(set(index.stream.tolist()) - {NONE}) == list(range(max(0, last - 3), last + 1))
        assert (index.right(np.arange(index.size)) == 1 - index.seq[: index.size]).all()
        assert (index.left(np.arange(index.size)) == index.seq[: index.size]).all()
    assert len(index._count) <= 8
    assert index.open(0).tolist() == []


def test_continued_exactly():
    """Variants of later episodes do not depend on a stop in between."""
    make = partial(watched_walk, end_on="all")
    for anchor in ("episode", "segment"):
        one, other = (CounterfactualReplay(env=make(), anchor=anchor, max_variants=1) for _ in range(2))
        buffers = [ReplayBuffer(capacity=2000, windows=SequenceWindows(), seed=0) for _ in range(2)]
        for i, (records, info) in enumerate(wander(make, steps=7, envs=2, rollouts=20)):
            if i == 11:
                other = CounterfactualReplay(env=make(), anchor=anchor, max_variants=1)
                other.load_state_dict(one.state_dict())
            one.extend(buffers[0], records, info)
            other.extend(buffers[1], records, info)
        assert len(buffers[0]) == len(buffers[1]) > 100
        assert not different(*map(stored, buffers))


# -------------------------------------------------------------------------------------------------------- bad settings


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({"observe": "all"}, {}, "observe='own' instead of 'all'"),
        ({"observe": "none"}, {}, "observe='own' instead of 'none'"),
        ({"reward": "env"}, {}, "pay nothing with reward='env'"),
        ({"report_labels": False}, {}, "report_labels=True"),
        ({}, {"agents": ("walker_7",)}, r"agents \['walker_7'\] have no monitor"),
        ({}, {"policy": "some"}, "policy"),
        ({}, {"max_variants": 0}, "max_variants"),
    ],
)
def test_settings_that_are_refused(settings, options, message):
    with pytest.raises(ValueError, match=message):
        CounterfactualReplay(env=watched_walk(**settings), **options)


def test_data_that_does_not_fit():
    relabel = CounterfactualReplay(env=watched_walk())

    def data(make, **options):
        env = SyncVectorEnv(factory=make, num_envs=1, seed=0)
        return ReplayDataModule(env=env, relabel=relabel, **options)

    data(watched_walk)
    with pytest.raises(ValueError, match="other observations, states or info"):
        data(partial(watched_walk, size=4))
    with pytest.raises(ValueError, match="other observations, states or info"):
        data(partial(watched_walk, report_labels=False))
    with pytest.raises(ValueError, match="sample='sequences'"):
        data(watched_walk, sample="episodes")
    (records, info), *_ = wander(watched_walk, steps=3)
    records["state"][:] *= 0.5
    with pytest.raises(ValueError, match="not around the monitors"):
        relabel.variants(records[:, 0], {key: value[:, 0] for key, value in info.items()}, "walker_0")


# ------------------------------------------------------------------------------------------------------------ learning


class Solved(lightning.Callback):
    """Stops once the greedy policy does the task in the fewest steps, and remembers when that was."""

    def __init__(self, make, steps):
        self.make, self.steps, self.env_steps = make, steps, None

    def on_train_batch_end(self, trainer, module, *_):
        env = SyncVectorEnv(factory=self.make, num_envs=1, seed=0)
        observations, state = env.reset(), module.policy.initial_state(1)
        for t in range(self.steps):
            is_first = torch.tensor([t == 0])
            with torch.no_grad():
                actions, _, state = module.policy.act(observations, state, is_first, deterministic=True)
            step = env.step(actions)
            if step.terminated[0]:
                self.env_steps = module.env_steps
                trainer.should_stop = True
                return
            observations = step.observations


def train(make, *, relabel, seed, env_steps, callbacks=(), **algorithm):
    lightning.seed_everything(seed, verbose=False)
    env = SyncVectorEnv(factory=make, num_envs=1, seed=seed)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=-1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[StopAtEnvSteps(env_steps), EpsilonSchedule(start=0.3, end=0.3), *callbacks],
    )
    settings = {"hidden_sizes": (64,), "learning_rate": 3e-3, "gamma": 0.95, "team_reward": None}
    module = IQL(**settings | {"target_update_interval": 50} | algorithm)
    data = ReplayDataModule(
        env=env,
        capacity=20_000,
        batch_size=64,
        start_training=200,
        training_frequency=4,
        relabel=relabel,
        rollout_length=4,
        updates_per_batch=50,
    )
    trainer.fit(module, datamodule=data)
    return module, data


def test_with_one_state_nothing_changes():
    machine = RewardMachine.from_edges([("only", "a", "only", 1.0)], on_missing="stay")

    def make():
        return watched_walk(agents=1, monitors={"walker_0": machine}, end_on="never")

    weights = []
    for relabel in (None, CounterfactualReplay(env=make())):
        module, data = train(make, relabel=relabel, seed=1, env_steps=400)
        weights.append([parameter.detach().numpy().tobytes() for parameter in module.parameters()])
        assert len(data.buffer) == data.env_steps
    assert weights[0] == weights[1]
    assert module.updates >= 50


TASK = {"size": 5, "agents": 1, "scatter": False, "limit": 60, "marks": {"a": 4, "b": 20, "c": 24}}


@pytest.mark.slow
def test_a_sequence_is_learned_in_half_the_steps():
    """Three corners in turn, from the fourth: 4 + 8 + 4 steps."""
    make = partial(watched_walk, **TASK)
    needed = {}
    for told in (False, True):
        for seed in range(3):
            solved = Solved(make, steps=16)
            relabel = CounterfactualReplay(env=make(), anchor="segment") if told else None
            train(make, relabel=relabel, seed=seed, env_steps=20_000, callbacks=[solved])
            needed.setdefault(told, []).append(solved.env_steps or 20_000)
    assert np.median(needed[True]) <= 0.5 * np.median(needed[False]), needed
