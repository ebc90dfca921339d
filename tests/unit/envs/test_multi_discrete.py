"""Actions of several parts: spec, legality, checker, vector environments, adapters."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from locks import DIALS, LocksGame
from scripted import LeavingGame

from marl_lightning.envs import EnvSpec, GroupSpec, PettingZooAdapter, SyncVectorEnv, check_env, make_env
from marl_lightning.envs.adapters.actions import flat_mask, group_action_space, package_action
from marl_lightning.envs.checker import _random_actions
from marl_lightning.envs.single import SingleEnv
from marl_lightning.envs.validation import action_arrays, check_legal
from marl_lightning.envs.vector.shared_memory import SharedMemoryVectorEnv

BOX = spaces.Box(0, 1, (2,), np.float32)

# ------------------------------------------------------------------------------------------------------------- spec


def group_of(action_space, agents=("a", "b")):
    return GroupSpec(agents=agents, observation_space=BOX, action_space=action_space)


@pytest.mark.parametrize(
    ("space", "parts", "offsets", "shape", "size", "discrete"),
    [
        (spaces.Discrete(5), (5,), (0,), (), 5, True),
        (spaces.MultiDiscrete([3, 2, 4]), (3, 2, 4), (0, 3, 5), (3,), 9, True),
        (spaces.MultiDiscrete([7]), (7,), (0,), (1,), 7, True),
        (spaces.Box(-1, 1, (3,)), (), (), (3,), 3, False),
    ],
)
def test_spec_describes_the_parts(space, parts, offsets, shape, size, discrete):
    group = group_of(space)
    assert (group.action_parts, group.action_offsets) == (parts, offsets)
    assert (group.action_shape, group.action_size, group.is_discrete) == (shape, size, discrete)
    assert all(type(n) is int for n in (*group.action_parts, *group.action_offsets, group.action_size))
    assert group_of(space) == group != group_of(spaces.Discrete(6))


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (spaces.MultiDiscrete([[3, 2], [2, 2]]), "MultiDiscrete action_space must have one axis"),
        (spaces.MultiDiscrete([3, 2], start=[0, 1]), "must start at 0 in every part"),
        (spaces.Discrete(3, start=1), "must start at 0"),
        (spaces.Box(-1, 1, ()), "Box action_space must have one axis"),
        (spaces.Box(-1, 1, (0,)), "one axis that is not empty"),
        (spaces.Box(-np.inf, 1, (2,)), "needs finite bounds"),
        (spaces.MultiBinary(3), "must be Discrete, MultiDiscrete or a Box"),
    ],
)
def test_unusable_action_spaces_are_refused(space, message):
    with pytest.raises(ValueError, match=message):
        group_of(space)


# --------------------------------------------------------------------------------------------------------- legality


def spec_of(action_space):
    return EnvSpec(name="test", groups={"g": group_of(action_space)}, state_size=1)


SPEC = spec_of(spaces.MultiDiscrete([3, 2]))
MASK = np.array([[1, 0, 1, 1, 1], [1, 1, 1, 0, 1]], np.bool_)


def check(action, *, mask=MASK, alive=(True, True), spec=SPEC):
    leading = np.shape(mask)[:-2]
    arrays = action_arrays(spec, {"g": np.array(action)}, leading)
    check_legal(spec, arrays, action_mask={"g": mask}, alive={"g": np.broadcast_to(alive, mask.shape[:-1])})


def test_legal_actions_pass():
    check([[2, 1], [1, 1]])
    check([[[2, 1], [1, 1]], [[0, 0], [0, 1]]], mask=np.stack([MASK, MASK]))
    check(np.array([[2, 1], [1, 1]], np.uint8))
    check(np.array([[2, 1], [1, 1]], np.uint64))


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ([[1, 1], [1, 1]], "illegal action 1 in part 0 of agent 'a'"),
        ([[2, 1], [1, 0]], "illegal action 0 in part 1 of agent 'b'"),
        ([[2, 1], [3, 1]], "illegal action 3 in part 0 of agent 'b'"),  # entry 3 of the mask is of the next part
        ([[2, 2], [1, 1]], "illegal action 2 in part 1 of agent 'a'"),
        ([[2, -1], [1, 1]], "illegal action -1 in part 1 of agent 'a'"),
    ],
)
def test_illegal_parts_are_named(action, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        check(action)
    rows = np.stack([MASK, np.ones_like(MASK), MASK])
    with pytest.raises(ValueError, match=f"^{message} in environment 2$"):
        check([[[0, 0], [0, 1]], [[0, 0], [0, 0]], action], mask=rows)


def test_actions_of_the_dead_are_ignored():
    check([[9, -9], [1, 1]], alive=(False, True))


@pytest.mark.parametrize("action", [[2, 1], [[2, 1, 0], [1, 1, 0]], [[2.0, 1.0], [1.0, 1.0]]])
def test_shapes_and_kinds_are_checked(action):
    with pytest.raises(ValueError, match=r"actions of 'g' must be integers of shape \(2, 2\)"):
        check(action)


@settings(max_examples=50, deadline=None)
@given(parts=st.lists(st.integers(1, 5), min_size=1, max_size=4), seed=st.integers(0, 999))
def test_random_actions_of_the_checker_are_legal_and_reach_all_choices(parts, seed):
    rng = np.random.default_rng(seed)
    spec = spec_of(spaces.MultiDiscrete(parts))
    mask = rng.random((2, sum(parts))) < 0.5
    mask[:, spec.groups["g"].action_offsets] = True
    many = np.broadcast_to(mask, (300, *mask.shape))

    class At:
        action_mask = {"g": many}  # noqa: RUF012
        alive = {"g": np.ones((300, 2), np.bool_)}  # noqa: RUF012

    actions = _random_actions(spec, At, rng)
    assert actions["g"].shape == (300, 2, len(parts))
    check_legal(spec, actions, action_mask=At.action_mask, alive=At.alive)
    taken = np.zeros_like(mask)
    for agent in range(2):
        taken[agent, (actions["g"][:, agent] + spec.groups["g"].action_offsets).ravel()] = True
    assert np.array_equal(taken, mask)


# ---------------------------------------------------------------------------------------------------------- checker


@pytest.mark.parametrize("dials", [DIALS, (2, 2), (4,)])
def test_games_with_parts_pass_the_checker(dials):
    check_env(LocksGame(dials=dials), steps=40)
    check_env(SyncVectorEnv(factory=lambda: LocksGame(dials=dials), num_envs=3, seed=0), steps=40)


def test_one_instance_of_a_vector_environment_passes_the_checker():
    check_env(SingleEnv(env=SyncVectorEnv(factory=LocksGame, num_envs=1, seed=0)), steps=40)


def on_mask(change):
    class Broken(LocksGame):
        def observe(self):
            observations = super().observe()
            change(observations.action_mask["thief"], observations.alive["thief"])
            return observations

    return Broken


def block_second_dial(mask, alive):
    mask[0, 3:5] = False


def free_third_dial_of_the_dead(mask, alive):
    mask[~alive, 5:] = True


class NextPartIsLegal(LocksGame):
    """Looks a choice up in the whole mask, where one beyond the end of a part is found in the next part."""

    def step(self, actions):
        wrapped = actions["thief"] % self.dials
        wrapped[:, -1] = actions["thief"][:, -1]
        legal = np.where(np.take_along_axis(self.mask, wrapped + self.starts, -1), wrapped, self.digits)
        return super().step({"thief": np.where(actions["thief"] < self.dials, actions["thief"], legal)})


class OneAction(LocksGame):
    """Expects one number an agent."""

    def observe(self):
        observations = super().observe()
        observations.action_mask["thief"] = observations.action_mask["thief"][:, :3]
        return observations


@pytest.mark.parametrize(
    ("game", "message"),
    [
        (on_mask(block_second_dial), "part 1 of action_mask of 'thief' has an agent without a legal action"),
        (on_mask(free_third_dial_of_the_dead), "part 2 of action_mask of 'thief': agents that are not alive must have"),
        (NextPartIsLegal, "an action of 'thief' that is not legal in part 0 must raise ValueError"),
        (OneAction, r"action_mask of 'thief' must be bool of shape \(2, 9\)"),
    ],
)
def test_mistakes_name_the_part(game, message):
    with pytest.raises(ValueError, match=message):
        check_env(game())


# ---------------------------------------------------------------------------------------------- vector environments


def test_shared_memory_equals_sync():
    with (
        SyncVectorEnv(factory=LocksGame, num_envs=4, seed=3) as one,
        SharedMemoryVectorEnv(factory=LocksGame, num_envs=4, seed=3, num_workers=2, context="fork") as other,
    ):
        first, second = one.reset(), other.reset()
        for _ in range(9):
            assert torch.equal(first.action_mask["thief"], second.action_mask["thief"])
            scores = torch.rand(4, 2, 9).masked_fill(~first.action_mask["thief"], -1)
            actions = {"thief": torch.stack([part.argmax(-1) for part in scores.split(DIALS, -1)], -1)}
            mine, theirs = one.step(actions), other.step(actions)
            assert torch.equal(mine.reward["thief"], theirs.reward["thief"])
            first, second = mine.observations, theirs.observations
        with pytest.raises(ValueError, match="illegal action 2 in part 1 of agent 'thief_0'"):
            other.step({"thief": torch.full((4, 2, 3), 2)})


# --------------------------------------------------------------------------------------------------------- adapters


@pytest.mark.parametrize(
    ("space", "expected", "action", "package"),
    [
        (spaces.Discrete(3, start=-1), spaces.Discrete(3), np.int64(0), -1),
        (spaces.MultiDiscrete([3, 2], start=[5, -1]), spaces.MultiDiscrete([3, 2]), [2, 0], [7, -1]),
        (spaces.MultiDiscrete([[3, 2], [4, 5]]), spaces.MultiDiscrete([3, 2, 4, 5]), [2, 1, 3, 4], [[2, 1], [3, 4]]),
        (spaces.MultiBinary(3), spaces.MultiDiscrete([2, 2, 2]), [1, 0, 1], [1, 0, 1]),
        (spaces.MultiBinary((1, 2)), spaces.MultiDiscrete([2, 2]), [1, 0], [[1, 0]]),
        (spaces.Box(-1, 1, (2,)), spaces.Box(-1, 1, (2,)), [-3.0, 0.5], [-1.0, 0.5]),
    ],
)
def test_package_actions(space, expected, action, package):
    assert group_action_space(space) == expected
    found = package_action(space, np.asarray(action))
    assert np.array_equal(found, package)
    assert space.contains(found)


def test_masks_of_packages_are_flattened():
    expected = [True, False, True, False, True]
    assert flat_mask(np.array([1, 0, 1, 0, 1], np.int8)).tolist() == expected
    assert flat_mask([1, 0, 1, 0, 1]).tolist() == expected
    assert flat_mask((np.array([1, 0, 1], np.int8), np.array([0, 1], np.int8))).tolist() == expected
    assert flat_mask(np.array([[1, 0], [0, 1]])).tolist() == [True, False, False, True]


class Echo(gymnasium.Env):
    """Shows the last action."""

    def __init__(self, action_space):
        self.action_space = action_space
        self.observation_space = spaces.Box(-9, 9, (4,), np.float32)

    def reset(self, *, seed=None, options=None):
        self.time = 0
        return np.zeros(4, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.time += 1
        return np.resize(action, 4).astype(np.float32), 1.0, self.time == 5, False, {}


@pytest.fixture(scope="module", autouse=True)
def _echo():
    gymnasium.register("EchoParts-v0", entry_point=Echo)
    yield
    del gymnasium.registry["EchoParts-v0"]


@pytest.mark.parametrize(
    ("space", "action", "shown"),
    [
        (spaces.MultiDiscrete([3, 2], start=[5, -1]), [2, 0], [7, -1, 7, -1]),
        (spaces.MultiDiscrete([[3, 2], [4, 5]]), [2, 1, 3, 4], [2, 1, 3, 4]),
        (spaces.MultiBinary(4), [1, 0, 0, 1], [1, 0, 0, 1]),
    ],
)
def test_gymnasium_games_with_parts(space, action, shown):
    env = make_env("gymnasium/EchoParts-v0", action_space=space)
    group = env.spec.groups["agents"]
    assert env.reset(seed=0).action_mask["agents"].shape == (1, group.action_size)
    step = env.step({"agents": np.array([action])})
    assert step.observations.observation["agents"][0].tolist() == shown
    with pytest.raises(ValueError, match=r"illegal action \d in part 1 of agent 'agent_0'"):
        env.step({"agents": np.array([[0, group.action_parts[1], *action[2:]]])})
    check_env(env)


class PartsGame(LeavingGame):
    """Masks allow the choices 0 and 2 of the first part and 0 of the second."""

    def __init__(self, leaves, *, mask):
        super().__init__(leaves, masks="info")
        self.mask = mask

    def action_space(self, agent):
        return spaces.MultiDiscrete([3, 2], start=[0, 4])

    def info(self):
        return {"action_mask": self.mask}


LEAVES = {"a_0": (2, "terminated"), "a_1": (1, "terminated"), "b_0": (3, "truncated")}
FLAT = np.array([1, 0, 1, 1, 0], np.int8)


@pytest.mark.parametrize("mask", [FLAT, (FLAT[:3], FLAT[3:]), FLAT.tolist()], ids=["flat", "tuple", "list"])
def test_pettingzoo_games_with_parts(mask):
    game = PartsGame(LEAVES, mask=mask)
    env = PettingZooAdapter(factory=lambda: game)
    row = [True, False, True, True, False]
    assert env.spec.groups["a"].action_parts == (3, 2)
    assert env.reset(seed=0).action_mask["a"].tolist() == [row, row]
    step = env.step({"a": np.array([[2, 0], [0, 0]]), "b": np.array([[0, 0]])})
    assert {agent: action.tolist() for agent, action in game.received[0].items()} == {
        "a_0": [2, 4],
        "a_1": [0, 4],
        "b_0": [0, 4],
    }
    assert step.observations.action_mask["a"].tolist() == [row, [True, False, False, True, False]]
    with pytest.raises(ValueError, match="illegal action 1 in part 1 of agent 'a_0'"):
        env.step({"a": np.array([[2, 1], [0, 0]]), "b": np.array([[0, 0]])})
    check_env(env)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (np.array([1, 0, 1, 0, 0]), "gives 'a_0', who may act, no legal action in part 1"),
        (np.ones(3), r"mask of 'a_0' must have one entry for each of the 5 choices .*, got 3"),
    ],
)
def test_bad_masks_of_pettingzoo_games_are_errors(mask, message):
    env = PettingZooAdapter(factory=lambda: PartsGame(LEAVES, mask=mask))
    with pytest.raises(ValueError, match=message):
        env.reset()


def test_specs_with_different_parts_differ():
    assert LocksGame().spec == LocksGame().spec
    assert LocksGame().spec != LocksGame(dials=(3, 2, 5)).spec
    with pytest.raises(ValueError, match="equal specs"):
        SyncVectorEnv(factory=iter([LocksGame(), LocksGame(dials=(3, 2, 5))]).__next__, num_envs=2, seed=0)
