"""What all native games get from their base, shown on a tiny game whose kernel is plain numpy."""

import copy
import threading
import time
from typing import NamedTuple

import numpy as np
import pytest
import torch
from gymnasium import spaces

from marl_lightning.envs import check_env
from marl_lightning.envs.native.vector import NativeVectorEnv
from marl_lightning.envs.single import SingleEnv
from marl_lightning.envs.spec import EnvSpec, GroupSpec

LIMIT = 6
GOAL = 12.0


class State(NamedTuple):
    seed: np.ndarray
    episode: np.ndarray
    time: np.ndarray
    place: np.ndarray
    way: np.ndarray  # scratch


class Walk(NativeVectorEnv):
    """Agents of three kinds push a thing from a start that depends on seed and episode until it is at the goal."""

    _instances_per_thread = 10
    _saved_fields = State._fields[: State._fields.index("way")]

    def __init__(self, *, num_envs, seed=0, num_threads=None, speed=1.0, pictures=False):
        groups = {
            "pushers": GroupSpec(agents=("a", "b"), observation_space=_box(3), action_space=spaces.Discrete(3)),
            "callers": GroupSpec(agents=("c",), observation_space=_box(3), action_space=spaces.MultiDiscrete([2, 3])),
            "pullers": GroupSpec(agents=("d",), observation_space=_box(3), action_space=spaces.Box(0, 1, (2,))),
        }
        super().__init__(
            spec=EnvSpec(
                name="test/walk",
                groups=groups,
                state_size=3,
                episode_limit=LIMIT,
                info_keys=("way",),
                shared_reward=True,
                can_checkpoint=True,
            ),
            num_envs=num_envs,
            seed=seed,
            num_threads=num_threads,
            arguments={"speed": speed, "pictures": pictures},
        )
        self.speed = speed
        self.pictures = pictures
        self.wind = 0.0
        self.threads = []
        self.before_range = lambda first: None
        counters = (np.zeros(num_envs, np.int64) for _ in range(3))
        self._state = State(*counters, place=np.zeros(num_envs), way=np.zeros(num_envs))

    def _begin(self, rows):
        state = self._state
        state.episode[rows] += 1
        state.time[rows] = 0
        state.place[rows] = (7 * state.seed[rows] + 3 * state.episode[rows]) % 5

    def _write(self, target, rows):
        now = np.stack([self._state.place, self._state.time, np.full(self.num_envs, self.wind)], axis=1)[rows]
        target.state[rows] = now
        for name in self.spec.groups:
            target.observation[name][rows] = now[:, None]
            target.alive[name][rows] = True
        for mask in target.action_mask.values():
            mask[rows] = True

    def _check_actions(self):
        if (self._action_arrays["pushers"] > 2).any():
            raise ValueError("pushers push 2 at most")

    def _step_instances(self, first, last):
        self.threads.append((first, last, threading.get_ident()))
        self.before_range(first)
        rows, state, arrays = slice(first, last), self._state, self._arrays
        state.way[rows] = self.speed * sum(
            a[rows].reshape(last - first, -1).sum(1) for a in self._action_arrays.values()
        )
        state.place[rows] += state.way[rows]
        state.time[rows] += 1
        for reward in arrays.reward.values():
            reward[rows] = state.way[rows, None]
        arrays.info["way"][rows] = state.way[rows]
        arrays.terminated[rows] = state.place[rows] >= GOAL
        arrays.truncated[rows] = (state.time[rows] >= LIMIT) & ~arrays.terminated[rows]
        ended = first + np.flatnonzero(arrays.terminated[rows] | arrays.truncated[rows])
        self._write(arrays.final, ended)
        self._begin(ended)
        self._write(arrays.observations, np.arange(first, last))

    def _reset_instances(self, mask):
        self._begin(mask)
        self._write(self._arrays.observations, mask)

    def _observe_instances(self):
        self._write(self._arrays.observations, np.arange(self.num_envs))

    def _render_instance(self, index):
        if not self.pictures:
            return super()._render_instance(index)
        return np.full((2, 2, 3), int(self._state.place[index]), np.uint8)

    def _save_extra(self):
        return {"wind": self.wind}

    def _load_extra(self, state):
        self.wind = state["wind"]


def _box(size):
    return spaces.Box(-np.inf, np.inf, (size,), np.float32)


def draw(rng, num_envs):
    """Draws actions of all instances."""
    return {
        "pushers": torch.from_numpy(rng.integers(0, 3, (num_envs, 2))),
        "callers": torch.from_numpy(rng.integers(0, [2, 3], (num_envs, 1, 2))),
        "pullers": torch.from_numpy(rng.random((num_envs, 1, 2), dtype=np.float32)),
    }


def stand(num_envs):
    """Returns actions that do nothing."""
    return {name: torch.zeros_like(action) for name, action in draw(np.random.default_rng(0), num_envs).items()}


def play(env, *, steps, seed=0, rows=None):
    """Returns what ``steps`` random steps show, of the instances ``rows`` of actions drawn for eight."""
    rng, frames = np.random.default_rng(seed), []
    for _ in range(steps):
        actions = draw(rng, 8)
        step = env.step(actions if rows is None else {name: action[rows] for name, action in actions.items()})
        ended = step.terminated | step.truncated
        frames.append(
            [step.observations.state.clone(), step.reward["callers"].clone(), ended, step.info["way"].clone()]
        )
        frames[-1].append(torch.where(ended[:, None], step.final.state, 0.0))
    assert any(frame[2].any() for frame in frames), "the comparison should include ends of episodes"
    return frames


def assert_equal(first, second):
    for one, other in zip(first, second, strict=True):
        for a, b in zip(one, other, strict=True):
            assert torch.equal(a, b)


def test_the_game_keeps_the_contract():
    check_env(Walk(num_envs=3))
    check_env(SingleEnv(env=Walk(num_envs=1)))


# -------- resets and seeds


def test_partial_reset_touches_only_the_masked_rows():
    env = Walk(num_envs=4)
    observations = env.reset()
    env.step(stand(4))
    before = observations.state.clone()
    mask = np.array([False, True, False, True])
    assert env.reset(mask=mask) is observations
    assert torch.equal(observations.state[~mask], before[~mask])
    assert env._state.time.tolist() == [1, 0, 1, 0]
    assert env._state.episode.tolist() == [0, 1, 0, 1]
    assert observations.state[:, 0].tolist() == [0, 10 % 5, 14 % 5, 24 % 5]
    assert mask.tolist() == [False, True, False, True]
    # Resets that follow are not narrowed by the last mask.
    env.reset()
    assert env._state.episode.tolist() == [1, 2, 1, 2]


@pytest.mark.parametrize("mask", [np.ones(3, bool), np.ones(4), [True] * 4])
def test_wrong_masks_are_refused(mask):
    env = Walk(num_envs=4)
    env.reset()
    with pytest.raises(ValueError, match="mask"):
        env.reset(mask=mask)


def test_instance_equals_an_environment_of_its_own():
    env, alone = Walk(num_envs=8, seed=4), Walk(num_envs=1, seed=6)
    assert torch.equal(env.reset().state[2:3], alone.reset().state)
    frames = [[array[2:3] for array in frame] for frame in play(env, steps=15)]
    assert_equal(frames, play(alone, steps=15, rows=slice(2, 3)))


def test_seed_restarts_the_stream_of_episodes_and_nothing_else_does():
    env = Walk(num_envs=8)
    starts = [env.reset(seed=seed).state.clone() for seed in (None, None, 0, 3)]
    assert not torch.equal(starts[0], starts[1])
    assert torch.equal(starts[0], starts[2])
    assert not torch.equal(starts[0], starts[3])
    assert env.seed == 3
    other = Walk(num_envs=8, seed=3)
    other.reset()
    assert_equal(play(env, steps=15), play(other, steps=15))


def test_seed_that_does_not_fit_is_refused_and_changes_nothing():
    env = Walk(num_envs=2)
    env.reset()
    for seed in (-1, 2**63 - 2):
        with pytest.raises(ValueError, match="seed must be in"):
            env.reset(seed=seed)
        with pytest.raises(ValueError, match="seed must be in"):
            Walk(num_envs=2, seed=seed)
    assert env.seed == 0
    assert env._state.episode.tolist() == [0, 0]
    env.reset(seed=2**63 - 3)
    assert env._state.seed.tolist() == [2**63 - 3, 2**63 - 2]


# -------- threads


def test_results_do_not_depend_on_the_number_of_threads():
    frames = []
    for num_threads in (1, 3):
        with Walk(num_envs=8, num_threads=num_threads) as env:
            env.reset()
            frames.append(play(env, steps=20))
    assert_equal(*frames)


def test_every_instance_is_stepped_once_and_the_caller_steps_the_first():
    env = Walk(num_envs=7, num_threads=3)
    env.reset()
    env.step(stand(7))
    assert sorted(bounds[:2] for bounds in env.threads) == [(0, 2), (2, 4), (4, 7)]
    assert [first for first, _, thread in env.threads if thread == threading.get_ident()] == [0]


def test_number_of_threads():
    most = torch.get_num_threads()
    assert [Walk(num_envs=n).num_threads for n in (1, 19, 20, 1000)] == [1, 1, min(2, most), min(100, most)]
    assert Walk(num_envs=2, num_threads=5).num_threads == 2
    with pytest.raises(ValueError, match="num_threads must be positive"):
        Walk(num_envs=2, num_threads=0)


@pytest.mark.parametrize("failing", [0, 2, 4])
def test_error_in_a_thread_is_raised_when_all_others_are_done(failing):
    env = Walk(num_envs=6, num_threads=3)
    env.reset()
    done = []

    def before_range(first):
        if first == failing:
            raise OverflowError(f"range {first}")
        time.sleep(0.1)
        done.append(first)

    env.before_range = before_range
    with pytest.raises(OverflowError, match=f"range {failing}"):
        env.step(stand(6))
    assert sorted(done) == sorted({0, 2, 4} - {failing})


def test_stepping_goes_on_after_close():
    env = Walk(num_envs=8, num_threads=2)
    env.reset()
    env.step(stand(8))
    alive = threading.active_count()
    env.close()
    env.close()
    assert threading.active_count() == alive - 1
    env.step(stand(8))
    assert env._state.time.tolist() == [2] * 8
    env.close()


# -------- actions


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pushers": torch.zeros(3, 3, dtype=torch.int64)}, r"'pushers' must be integers of shape \(3, 2\)"),
        ({"pushers": torch.zeros(3, 2)}, "'pushers' must be integers"),
        ({"callers": torch.zeros(3, 1, dtype=torch.int64)}, r"'callers' must be integers of shape \(3, 1, 2\)"),
        ({"pullers": torch.zeros(3, 1, 2, dtype=torch.int64)}, "'pullers' must be floats"),
        ({"pushers": None}, "actions need the groups"),
        ({"walkers": torch.zeros(3)}, "actions need the groups"),
        ({"pushers": None, "walkers": torch.zeros(3)}, "actions need the groups"),
        ({"pushers": torch.full((3, 2), 3)}, "2 at most"),
    ],
)
def test_wrong_actions_are_refused_and_change_nothing(changes, message):
    env = Walk(num_envs=3)
    env.reset()
    with pytest.raises(ValueError, match=message):
        env.step({name: value for name, value in (stand(3) | changes).items() if value is not None})
    assert not env.threads
    assert env._state.time.tolist() == [0] * 3


def test_actions_may_have_any_type_and_memory_layout_and_are_copied():
    env = Walk(num_envs=3)
    env.reset()
    actions = draw(np.random.default_rng(0), 3)
    expected = {name: action.numpy().copy() for name, action in actions.items()}
    env.step(
        {
            "pushers": actions["pushers"].to(torch.int8).T.contiguous().T,
            "callers": actions["callers"].to(torch.int32),
            "pullers": actions["pullers"].double(),
        }
    )
    for name, array in env._action_arrays.items():
        np.testing.assert_array_equal(array, expected[name])
    env.step(actions)
    actions["pushers"].fill_(99)
    np.testing.assert_array_equal(env._action_arrays["pushers"], expected["pushers"])


def test_results_are_written_into_the_same_memory():
    env = Walk(num_envs=3)
    observations = env.reset()
    step = env.step(stand(3))
    assert step.observations is observations
    assert env.step(stand(3)) is step


def test_nothing_works_before_the_first_reset():
    env = Walk(num_envs=2, pictures=True)
    with pytest.raises(RuntimeError, match="call reset before step"):
        env.step(stand(2))
    with pytest.raises(RuntimeError, match="call reset before render"):
        env.render(0)
    with pytest.raises(RuntimeError, match="first reset must be without a mask"):
        env.reset(mask=np.ones(2, np.bool_))
    with pytest.raises(ValueError, match="num_envs must be at least 1"):
        Walk(num_envs=0)


def test_pictures():
    env = Walk(num_envs=2, pictures=True)
    env.reset()
    assert (env.render(1) == 7 % 5).all()
    for index in (-1, 2):
        with pytest.raises(IndexError, match=r"\[0, 2\)"):
            env.render(index)
    bare = Walk(num_envs=2)
    bare.reset()
    with pytest.raises(NotImplementedError, match="test/walk cannot be rendered"):
        bare.render(0)


def test_replica_is_the_same_game():
    env = Walk(num_envs=2, speed=0.5, pictures=True)
    env.recipe = {"name": "test/walk"}
    replica = env.replicate(num_envs=8, seed=9)
    assert (replica.num_envs, replica.seed, replica.speed, replica.recipe) == (8, 9, 0.5, env.recipe)
    other = Walk(num_envs=8, seed=9, speed=0.5)
    replica.reset()
    other.reset()
    assert_equal(play(replica, steps=15), play(other, steps=15))


# -------- saving


def test_saved_state_continues_bit_for_bit(tmp_path):
    env = Walk(num_envs=8, seed=2)
    env.reset()
    play(env, steps=9)
    env.wind = 1.5
    torch.save(env.state_dict(), tmp_path / "state.pt")
    expected = play(env, steps=15, seed=1)
    other = Walk(num_envs=8, seed=77, num_threads=2)
    observations = other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert (other.seed, other.wind) == (2, 1.5)
    assert observations.state[:, 2].tolist() == [1.5] * 8
    assert observations is other.step(stand(8)).observations
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert_equal(play(other, steps=15, seed=1), expected)


def test_saved_state_is_a_copy_without_scratch_space():
    env = Walk(num_envs=8)
    env.reset()
    saved = env.state_dict()
    expected = copy.deepcopy(saved)
    play(env, steps=7)
    assert saved["fields"].keys() == {"seed", "episode", "time", "place"}
    assert_equal([saved["fields"].values()], [expected["fields"].values()])


def test_state_saved_before_the_first_reset():
    env = Walk(num_envs=8)
    env.reset()
    env.load_state_dict(Walk(num_envs=8, seed=5).state_dict())
    with pytest.raises(RuntimeError, match="call reset"):
        env.step(stand(8))
    other = Walk(num_envs=8, seed=5)
    assert torch.equal(env.reset().state, other.reset().state)


def test_state_of_another_game_is_refused_and_changes_nothing():
    env = Walk(num_envs=2)
    env.reset()
    before = env.state_dict()
    cases = [
        (Walk(num_envs=3).state_dict(), "it holds 3 instances, this environment 2"),
        (Walk(num_envs=2, speed=2.0).state_dict(), r"does not fit.*'speed': \(2.0, 1.0\)"),
        (before | {"game": before["game"] | {"name": "test/run"}}, "does not fit.*test/run"),
        (before | {"game": before["game"] | {"colour": 1}}, "does not fit.*colour"),
        (before | {"fields": {"time": torch.zeros(2)}}, "another version"),
        (before | {"fields": before["fields"] | {"place": torch.zeros(2, 1)}}, "another version"),
        ({"seed": 0}, "another version"),
    ]
    for state, message in cases:
        with pytest.raises(ValueError, match=message):
            env.load_state_dict(state | {"wind": 3.0})
    assert env.wind == 0.0
    assert_equal([env.state_dict()["fields"].values()], [before["fields"].values()])


def test_state_that_is_older_than_an_argument_can_be_loaded():
    env = Walk(num_envs=2)
    env.reset()
    saved = env.state_dict()
    del saved["game"]["pictures"]
    env.load_state_dict(saved)
