"""The games of the package pettingzoo: names, differential tests against the package, and what is mended in it."""

import importlib
import sys
import warnings

import numpy as np
import pytest
import torch
from gymnasium import spaces

from marl_lightning.envs import PettingZooAdapter, check_env
from marl_lightning.envs.adapters.pettingzoo_games import make, scenarios
from marl_lightning.envs.adapters.turn_based import AECAdapter
from marl_lightning.envs.vector.shared_memory import SharedMemoryVectorEnv
from marl_lightning.envs.vector.sync import SyncVectorEnv

pytest.importorskip("pygame")
pytest.importorskip("rlcard")
pytest.importorskip("pymunk")
pytest.importorskip("Box2D")
pytest.importorskip("pyspiel")

# Arguments, groups with the number of agents, the shape and dtype of observations and the size of actions, size of the
# state, time limit.
PARALLEL = {
    "sisl/multiwalker_v9": ({}, {"walker": (3, (31,), np.float32, 4)}, 75, 500),
    "sisl/pursuit_v5": ({}, {"pursuer": (8, (7, 7, 3), np.float32, 5)}, 768, 500),
    "butterfly/cooperative_pong_v6": ({}, {"paddle": (2, (280, 480, 3), np.uint8, 3)}, 403200, 900),
    "butterfly/knights_archers_zombies_v11": (
        {},
        {"archer": (2, (27, 5), np.float64, 6), "knight": (2, (27, 5), np.float64, 6)},
        104,
        900,
    ),
    "butterfly/pistonball_v6": (
        {"n_pistons": 3},
        {"piston": (3, (457, 120, 3), np.uint8, 1)},
        560 * 200 * 3,
        125,
    ),
    "classic/rps_v2": ({}, {"player": (2, (4,), np.int64, 3)}, 8, 15),
}
TURN_BASED = {
    "classic/chess_v6": ({}, {"player": (2, (8, 8, 111), np.bool_, 4673)}, 14208),
    "classic/connect_four_v3": ({}, {"player": (2, (6, 7, 2), np.int8, 8)}, 168),
    "classic/go_v5": (
        {"board_size": 5},
        {"black": (1, (5, 5, 17), np.bool_, 27), "white": (1, (5, 5, 17), np.bool_, 27)},
        850,
    ),
    "classic/hanabi_v5": ({}, {"player": (2, (658,), np.float64, 21)}, 1316),
    "classic/leduc_holdem_v4": ({}, {"player": (2, (36,), np.float32, 5)}, 72),
    "classic/texas_holdem_no_limit_v6": ({"num_players": 3}, {"player": (3, (54,), np.float32, 6)}, 162),
    "classic/texas_holdem_v4": ({"num_players": 4}, {"player": (4, (72,), np.float32, 5)}, 288),
    "classic/tictactoe_v3": ({}, {"player": (2, (3, 3, 2), np.int8, 10)}, 36),
}
PICTURES = ("butterfly/cooperative_pong_v6", "butterfly/pistonball_v6")
SLOW = (*PICTURES, "butterfly/knights_archers_zombies_v11", "sisl/pursuit_v5")


def draw(observations, spec, rng) -> dict[str, np.ndarray]:
    """Draws uniformly among the legal actions."""
    actions = {}
    for name, group in spec.groups.items():
        if group.is_discrete:
            mask = observations.action_mask[name]
            actions[name] = np.where(mask, rng.random(mask.shape), -1).argmax(-1)
        else:
            shape = (group.num_agents, group.action_size)
            actions[name] = rng.uniform(group.action_space.low, group.action_space.high, shape).astype(np.float32)
    return actions


def raw_game(scenario, form, **kwargs):
    """The package's own game."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return getattr(importlib.import_module(f"pettingzoo.{scenario.replace('/', '.')}"), form)(**kwargs)


# ------------------------------------------------------------------------------------------------------------ names


def test_scenarios():
    assert set(scenarios()) == {*PARALLEL, *TURN_BASED}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sisl/pursuit_v4", "another version, use 'pettingzoo/sisl/pursuit_v5'"),
        ("butterfly/knights_archers_zombies_v10", "use 'pettingzoo/butterfly/knights_archers_zombies_v11'"),
        ("pursuit_v3", "use 'pettingzoo/sisl/pursuit_v5'"),
        ("sisl/waterworld_v4", "no longer has it.*sisl/multiwalker_v9, sisl/pursuit_v5"),
        ("mpe/simple_spread_v3", "use 'mpe/simple_spread_v3'"),
        ("magent/battle_v4", "use 'magent2/battle_v4'"),
        ("classic/ludo_v1", "choose one of.*classic/tictactoe_v3"),
    ],
)
def test_former_names_tell_what_to_use(name, message):
    with pytest.raises(ValueError, match=f"unknown game 'pettingzoo/{name}'.*{message}"):
        make(name)


@pytest.mark.parametrize("scenario", PARALLEL)
def test_parallel_games(scenario):
    kwargs, groups, state_size, limit = PARALLEL[scenario]
    env = make(scenario, **kwargs)
    assert isinstance(env, PettingZooAdapter)
    check_spec(env.spec, scenario, groups, state_size)
    assert env.spec.episode_limit == limit


@pytest.mark.parametrize("scenario", TURN_BASED)
def test_turn_based_games(scenario):
    kwargs, groups, state_size = TURN_BASED[scenario]
    env = make(scenario, **kwargs)
    assert isinstance(env, AECAdapter)
    check_spec(env.spec, scenario, groups, state_size)


def check_spec(spec, scenario, groups, state_size):
    assert groups == {
        name: (group.num_agents, group.observation_shape, group.observation_space.dtype, group.action_size)
        for name, group in spec.groups.items()
    }
    assert (spec.name, spec.state_size) == (f"pettingzoo/{scenario}", state_size)
    assert spec.metadata == {"backend": "pettingzoo"}


def test_without_state():
    for scenario in ("classic/tictactoe_v3", "butterfly/pistonball_v6"):
        env = make(scenario, with_state=False, **({"n_pistons": 3} if "piston" in scenario else {}))
        assert env.spec.state_size == 0
        observations = env.reset(seed=0)
        step = env.step(draw(observations, env.spec, np.random.default_rng(0)))
        assert step.observations.state.shape == (0,)


def test_unknown_arguments_reach_the_game():
    with pytest.raises(TypeError, match="no_such_argument"):
        make("classic/tictactoe_v3", no_such_argument=1)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "rlcard", None)
    monkeypatch.delitem(sys.modules, "pettingzoo.classic.leduc_holdem_v4", raising=False)
    for module in ("rlcard_base", "leduc_holdem"):
        monkeypatch.delitem(sys.modules, f"pettingzoo.classic.rlcard_envs.{module}", raising=False)
    with pytest.raises(ImportError, match=r'pip install "marl-lightning\[classic\]"'):
        make("classic/leduc_holdem_v4")
    monkeypatch.setitem(sys.modules, "shimmy.openspiel_compatibility", None)  # imported when a game is made
    with pytest.raises(ImportError, match=r'hanabi_v5 needs.*pip install "marl-lightning\[classic\]"'):
        make("classic/hanabi_v5")


def test_no_warnings_about_deprecation():
    sys.modules.pop("pettingzoo.classic.connect_four_v3", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        make("classic/connect_four_v3")


# --------------------------------------------------------------------------------------------------------- contract


@pytest.mark.parametrize("scenario", [*PARALLEL, *TURN_BASED])
def test_keeps_the_contract(scenario):
    kwargs, *_ = {**PARALLEL, **TURN_BASED}[scenario]
    steps = {"butterfly": 10, "sisl": 25, "classic": 60}[scenario.partition("/")[0]]
    if scenario in PICTURES:
        kwargs, steps = {**kwargs, "max_cycles": 4}, 6
    check_env(make(scenario, **kwargs), steps=steps)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", [*PARALLEL, *TURN_BASED])
def test_keeps_the_contract_for_long(scenario):
    kwargs, *_ = {**PARALLEL, **TURN_BASED}[scenario]
    if scenario in PARALLEL:
        kwargs = {**kwargs, "max_cycles": 12 if scenario in PICTURES else 40}
    check_env(make(scenario, **kwargs), steps={"b": 30, "s": 60, "c": 200}[scenario[0]])


@pytest.mark.parametrize("scenario", [*PARALLEL, *TURN_BASED])
def test_steps_vectorised(scenario):
    kwargs, *_ = {**PARALLEL, **TURN_BASED}[scenario]
    vector = SyncVectorEnv(factory=lambda: make(scenario, **kwargs), num_envs=2, seed=0)
    rng = np.random.default_rng(0)
    observations, ends = vector.reset(), 0
    for _ in range(5 if scenario in SLOW else 200):
        actions = {}
        for name, group in vector.spec.groups.items():
            if group.is_discrete:
                mask = observations.action_mask[name].numpy()
                actions[name] = torch.from_numpy(np.where(mask, rng.random(mask.shape), -1).argmax(-1))
            else:
                actions[name] = torch.from_numpy(
                    rng.uniform(-1, 1, (2, group.num_agents, group.action_size)).astype(np.float32)
                )
        step = vector.step(actions)
        ends += int((step.terminated | step.truncated).sum())
        if scenario in TURN_BASED:
            choices = sum(mask[..., :-1].any(-1).sum(-1) for mask in observations.action_mask.values())
            assert choices.tolist() == [1, 1]  # one agent has something to decide, in each instance
    assert ends > 0 or scenario in (*SLOW, "classic/chess_v6")


@pytest.mark.parametrize("scenario", TURN_BASED)
def test_returns_and_observations_equal_the_package(scenario):
    """Whoever plays the package's own loop with the same moves gets and sees the same."""
    kwargs, *_ = TURN_BASED[scenario]
    kwargs = {**kwargs, "board_size": 3} if "board_size" in kwargs else kwargs
    env, raw = make(scenario, **kwargs), raw_game(scenario, "env", **kwargs)
    rng = np.random.default_rng(1)
    for seed in range(2 if "chess" in scenario else 8):
        now = env.reset(seed=seed)
        raw.reset(seed=seed)
        returns, expected = dict.fromkeys(env.spec.agents, 0.0), dict.fromkeys(env.spec.agents, 0.0)
        step = None
        for agent in raw.agent_iter():
            observation, reward, terminated, truncated, _ = raw.last()
            expected[agent] += reward
            if terminated or truncated:
                raw.step(None)
                continue
            name, row = next((n, g.agents.index(agent)) for n, g in env.spec.groups.items() if agent in g.agents)
            assert now.action_mask[name][row].tolist() == [*map(bool, observation["action_mask"]), False]
            assert np.array_equal(now.observation[name][row], observation["observation"])
            actions = draw(now, env.spec, rng)
            raw.step(int(actions[name][row]))
            step = env.step(actions)
            now = step.observations
            for name, group in env.spec.groups.items():
                returns |= {a: returns[a] + r for a, r in zip(group.agents, step.reward[name].tolist(), strict=True)}
        assert step.terminated
        assert returns == pytest.approx(expected)
        if any(expected.values()):
            return
    assert scenario == "classic/hanabi_v5" or any(expected.values()), "nothing was won or lost: the test says nothing"


def test_a_folded_hand_waits_for_its_loss():
    env = make("classic/texas_holdem_v4", num_players=3)
    now = env.reset(seed=0)
    folded, step = None, None
    fold, total = 2, np.zeros(3)
    while step is None or not step.terminated:
        (player,) = now.action_mask["player"][:, :-1].any(axis=1).nonzero()[0]
        assert player != folded
        legal = now.action_mask["player"][player]
        choice = fold if folded is None and legal[fold] else int(legal.argmax())
        folded = player if choice == fold and folded is None else folded
        actions = np.full(3, 4)
        actions[player] = choice
        step = env.step({"player": actions})
        now = step.observations
        assert now.alive["player"].all() != step.terminated
        total += step.reward["player"]
    assert folded is not None
    assert step.reward["player"][folded] <= 0  # what it had put in, with the last move
    assert total.sum() == 0


# ----------------------------------------------------------------------------------------- what the package gets wrong


def test_multiwalker_is_truncated_by_its_time_limit():
    raw = raw_game("sisl/multiwalker_v9", "parallel_env", max_cycles=2)
    raw.reset(seed=0)
    still = {agent: np.zeros(4, np.float32) for agent in raw.possible_agents}
    raw.step(still)
    _, _, terminations, _, _ = raw.step(still)
    assert all(terminations.values()), "the package says by now what it should: remove the repair"

    env = make("sisl/multiwalker_v9", max_cycles=2)
    env.reset(seed=0)
    actions = {"walker": np.zeros((3, 4), np.float32)}
    assert not env.step(actions).truncated
    step = env.step(actions)
    assert (step.terminated, step.truncated) == (False, True)
    assert step.observations.alive["walker"].all()
    assert step.observations.observation["walker"].any(axis=1).all()


def test_multiwalker_has_a_state_when_walkers_have_fallen():
    env = make("sisl/multiwalker_v9", terminate_on_fall=False)
    now, rng = env.reset(seed=0), np.random.default_rng(0)
    falls = 0
    for _ in range(400):
        step = env.step({"walker": rng.uniform(-1, 1, (3, 4)).astype(np.float32)})
        rows = step.observations.state[:72].reshape(3, 24)
        if step.terminated or step.truncated:
            break
        alive = step.observations.alive["walker"]
        falls += int((now.alive["walker"] & ~alive).sum())
        assert rows.any(axis=1).tolist() == alive.tolist()
        now = step.observations
    assert falls > 0


@pytest.mark.parametrize("scenario", PICTURES)
def test_pictures_move(scenario):
    form = raw_game(scenario, "parallel_env")
    first, _ = form.reset(seed=0)
    second = form.step({agent: form.action_space(agent).sample() for agent in form.agents})[0]
    agent = form.possible_agents[-1]
    assert np.array_equal(first[agent], second[agent]), "the package draws by now: remove the repair"

    env = make(scenario, render_mode=None)
    now = env.reset(seed=0)
    (name,) = env.spec.groups
    assert len(np.unique(now.observation[name])) > 1
    for _ in range(3):
        step = env.step(draw(now, env.spec, np.random.default_rng(0)))
        assert not np.array_equal(step.observations.observation[name], now.observation[name])
        assert not np.array_equal(step.observations.state, now.state)
        now = step.observations
    assert env.render().ndim == 3


def test_zombies_do_not_depend_on_the_episode_before():
    env = make("butterfly/knights_archers_zombies_v11", spawn_delay=5)
    wait = {"archer": np.full(2, 5), "knight": np.full(2, 5)}
    env.reset(seed=0)
    first = [env.step(wait).observations.state for _ in range(12)]
    env.reset()
    for _ in range(3):  # not a multiple of the delay
        env.step(wait)
    env.reset(seed=0)
    for state in first:
        assert np.array_equal(env.step(wait).observations.state, state)


def test_rock_paper_scissors():
    env = make("classic/rps_v2", max_cycles=2)
    assert env.reset().observation["player"].tolist() == [[0, 0, 0, 1]] * 2  # nothing has been played
    step = env.step({"player": np.array([0, 1])})
    assert step.reward["player"].tolist() == [-1, 1]
    assert step.observations.observation["player"].tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]
    assert step.observations.state.tolist() == [0, 1, 0, 0, 1, 0, 0, 0]
    step = env.step({"player": np.array([2, 2])})
    assert step.reward["player"].tolist() == [0, 0]
    assert (step.terminated, step.truncated) == (False, True)


def test_hanabi_begins_with_the_drawn_player():
    env = make("classic/hanabi_v5", random_start_player=True)
    first = [int(env.reset(seed=seed).action_mask["player"][:, :-1].any(axis=1).argmax()) for seed in range(12)]
    assert set(first) == {0, 1}


def test_later_episodes_of_hanabi_follow_from_the_seed():
    env = make("classic/hanabi_v5")
    runs = []
    for _ in range(2):
        env.reset(seed=3)
        runs.append([env.reset().state for _ in range(3)])
    assert np.array_equal(*runs)
    assert not np.array_equal(runs[0][0], runs[0][1])


def test_boards_of_different_sizes_at_once():
    small, large = make("classic/go_v5", board_size=3), make("classic/go_v5", board_size=5)
    small.reset()
    large.reset()

    def move(env, black, white):
        step = env.step({"black": np.array([black]), "white": np.array([white])})
        stones = step.observations.observation["white"][0, ..., :2].any(-1)
        return [] if step.terminated else np.argwhere(stones).tolist(), step

    pass_, wait = 25, 26  # on the large board
    stones, _ = move(small, 4, 10)
    assert stones == [[1, 1]]
    stones, _ = move(large, 4, wait)
    assert stones == [[0, 4]]
    stones, step = move(small, 10, 9)  # white passes
    assert stones == [[1, 1]]
    assert step.observations.action_mask["black"].sum() == 9  # 8 free places and passing
    move(large, wait, pass_)
    _, step = move(large, pass_, wait)
    assert step.terminated


# ------------------------------------------------------------------------------------------------------------- rest


def test_workers_play_the_same_games_without_torch():
    def factory():
        env = make_in_worker("classic/tictactoe_v3")
        if "torch" in sys.modules:
            raise RuntimeError("a worker has imported torch")
        return env

    def make_in_worker(scenario):
        from marl_lightning.envs.adapters.pettingzoo_games import make

        return make(scenario)

    sync = SyncVectorEnv(factory=lambda: make("classic/tictactoe_v3"), num_envs=2, seed=0)
    rng = np.random.default_rng(0)
    with SharedMemoryVectorEnv(factory=factory, num_envs=2, seed=0, num_workers=1, context="spawn") as shared:
        assert shared.spec == sync.spec
        assert isinstance(shared.spec.groups["player"].action_space, spaces.Discrete)
        one, two = sync.reset(), shared.reset()
        for _ in range(20):
            assert torch.equal(one.observation["player"], two.observation["player"])
            assert torch.equal(one.action_mask["player"], two.action_mask["player"])
            mask = one.action_mask["player"].numpy()
            actions = {"player": torch.from_numpy(np.where(mask, rng.random(mask.shape), -1).argmax(-1))}
            first, second = sync.step(actions), shared.step(actions)
            assert torch.equal(first.reward["player"], second.reward["player"])
            assert torch.equal(first.terminated, second.terminated)
            one, two = first.observations, second.observations


def test_pictures_of_board_games():
    env = make("classic/connect_four_v3", render_mode="rgb_array")
    env.reset(seed=0)
    assert env.render().dtype == np.uint8
    with pytest.raises(NotImplementedError, match="rgb_array"):
        make("classic/connect_four_v3").render()
