"""OpenSpielAdapter against pyspiel itself: rules, returns, chance, tensors, and exact resumption."""

import subprocess
import sys
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch

from marl_lightning.envs import check_env
from marl_lightning.envs.vector.shared_memory import SharedMemoryVectorEnv
from marl_lightning.envs.vector.sync import SyncVectorEnv

pytest.importorskip("pyspiel")

import pyspiel

from marl_lightning.envs.adapters.openspiel import OpenSpielAdapter, make, scenarios

# Their steps take long: deals are solved, or drawn until they fit.
SLOW = ("bridge", "bridge_uncontested_bidding", "colored_trails")
PASS, BET, WAIT = 0, 1, 2  # in Kuhn poker


def draw(observations, rng) -> dict[str, np.ndarray]:
    """Draws uniformly among the legal actions."""
    mask = observations.action_mask["player"]
    return {"player": np.where(mask, rng.random(mask.shape), -1).argmax(-1)}


def play(env, rng, *, seed=None) -> np.ndarray:
    """Plays a whole episode at random and returns the summed rewards."""
    observations, returns = env.reset(seed=seed), np.zeros(env.spec.num_agents)
    while True:
        step = env.step(draw(observations, rng))
        observations = step.observations
        returns += step.reward["player"]
        assert not step.truncated
        if step.terminated:
            return returns


# ------------------------------------------------------------------------------------------------------ Kuhn poker


def start_kuhn(cards: str, **kwargs) -> OpenSpielAdapter:
    """Kuhn poker with the given deal, such as ``"21"``: the first player has the king, the second the queen."""
    env = make("kuhn_poker", **kwargs)
    for seed in range(200):
        env.reset(seed=seed)
        if "".join(map(str, env.state.history())) == cards:
            return env
    raise AssertionError("never dealt")


@pytest.mark.parametrize(
    ("actions", "rewards"),
    [
        ([PASS, PASS], [1, -1]),
        ([PASS, BET, PASS], [-1, 1]),
        ([PASS, BET, BET], [2, -2]),
        ([BET, PASS], [1, -1]),
        ([BET, BET], [2, -2]),
    ],
)
def test_kuhn_poker_by_hand(actions, rewards):
    env = start_kuhn("21")
    for time, action in enumerate(actions):
        assert env.state.current_player() == time % 2
        moves = np.full(2, WAIT)
        moves[time % 2] = action
        step = env.step({"player": moves})
        over = time == len(actions) - 1
        assert (step.terminated, step.truncated) == (over, False)
        assert step.reward["player"].tolist() == (rewards if over else [0, 0])
        assert step.reward["player"].dtype == np.float32
        masks = [[False, False, True]] * 2
        if not over:
            masks[1 - time % 2] = [True, True, False]
        assert step.observations.action_mask["player"].tolist() == masks
        assert step.observations.alive["player"].tolist() == [not over] * 2
        assert step.observations.observation["player"].any() == (not over)
    with pytest.raises(RuntimeError, match="over"):
        env.step({"player": np.full(2, WAIT)})


def test_handles_for_equilibrium_computations():
    env = start_kuhn("21")
    assert env.game.get_type().short_name == "kuhn_poker"
    assert [env.information_state_string(player) for player in range(2)] == ["2", "1"]
    env.step({"player": np.array([BET, WAIT])})
    assert env.information_state_string(1) == "1b"
    assert env.information_state_string(1) == env.state.information_state_string(1)
    assert env.state.get_game().num_players() == 2
    with pytest.raises(RuntimeError, match="call reset first"):
        make("kuhn_poker").information_state_string(0)


def test_illegal_actions_do_not_reach_the_game():
    env = start_kuhn("21")
    before = env.state.history()
    for actions, message in (
        ([PASS, PASS], "illegal action 0 of agent 'player_1'"),  # not its turn
        ([WAIT, WAIT], "illegal action 2 of agent 'player_0'"),  # its turn
        ([3, WAIT], "illegal action 3 of agent 'player_0'"),
    ):
        with pytest.raises(ValueError, match=message):
            env.step({"player": np.array(actions)})
    assert env.state.history() == before


def test_random_returns_and_deals():
    """Against the value of uniform play, computed over the whole tree, and equally likely deals."""

    def value(state) -> np.ndarray:
        if state.is_terminal():
            return np.array(state.returns())
        if state.is_chance_node():
            return sum(p * value(state.child(outcome)) for outcome, p in state.chance_outcomes())
        return np.mean([value(state.child(action)) for action in state.legal_actions()], axis=0)

    expected = value(pyspiel.load_game("kuhn_poker").new_initial_state())
    env, rng = make("kuhn_poker"), np.random.default_rng(1)
    env.reset(seed=0)
    returns, deals = [], Counter()
    for _ in range(3000):
        returns.append(play(env, rng))
        deals["".join(map(str, env.state.history()[:2]))] += 1
        assert returns[-1].tolist() == env.state.returns()
    error = 4 * np.std(returns, axis=0) / np.sqrt(len(returns))
    assert expected == pytest.approx([0.125, -0.125])
    assert (np.abs(np.mean(returns, axis=0) - expected) < error).all()
    assert set(deals) == {"01", "02", "10", "12", "20", "21"}
    assert max(abs(count - 500) for count in deals.values()) < 4 * np.sqrt(500)


def test_unequal_chances():
    """Leduc poker has two cards of each of three ranks: the rank of the first card comes less often as the second."""
    env = make("leduc_poker", suit_isomorphism=True)  # chance deals ranks
    env.reset(seed=0)
    pairs = 0
    for _ in range(3000):
        env.reset()
        first, second = env.state.history()[:2]
        pairs += first == second
    assert abs(pairs - 600) < 4 * np.sqrt(3000 * 0.2 * 0.8)


# ------------------------------------------------------------------------------------------------------ other games


def test_simultaneous_moves():
    env = make("matrix_pd")
    assert env.spec.groups["player"].action_size == 2  # nobody ever waits
    observations = env.reset(seed=0)
    assert observations.action_mask["player"].all()
    step = env.step({"player": np.array([0, 1])})
    assert step.terminated
    assert step.reward["player"].tolist() == [0, 10]
    assert step.observations.action_mask["player"].tolist() == [[True, False]] * 2
    env = make("goofspiel(num_cards=3)", points_order="descending", returns_type="total_points")
    env.reset()
    assert env.step({"player": np.array([2, 1])}).reward["player"].tolist() == [0, 0]
    step = env.step({"player": np.array([0, 2])})  # the last cards are played without a decision
    assert step.terminated
    assert step.reward["player"].tolist() == env.state.returns() != [0, 0]


def test_games_of_games():
    env = make("repeated_game(stage_game=matrix_pd(),num_repetitions=2)")
    assert env.spec.groups["player"].action_size == 2
    env.reset()
    assert env.step({"player": np.array([0, 0])}).reward["player"].tolist() == [5, 5]
    step = env.step({"player": np.array([1, 1])})
    assert (step.terminated, step.reward["player"].tolist()) == (True, [1, 1])  # per step, not summed
    env = make("turn_based_simultaneous_game(game=matrix_pd())")
    assert env.spec.groups["player"].action_size == 3
    check_env(env, steps=20)


@pytest.mark.parametrize("scenario", ["kuhn_poker", "tic_tac_toe", "goofspiel", "hanabi", "oh_hell"])
def test_tensors_equal_the_package(scenario):
    env, rng = make(scenario), np.random.default_rng(0)
    kind = "information_state" if env.game.get_type().provides_information_state_tensor else "observation"
    shape = getattr(env.game, f"{kind}_tensor_shape")()
    group = env.spec.groups["player"]
    assert group.agents == tuple(f"player_{i}" for i in range(env.game.num_players()))
    assert (group.observation_shape, group.observation_space.dtype) == (tuple(shape), np.float32)
    now = env.reset(seed=0)
    for _ in range(5):
        expected = [np.reshape(getattr(env.state, f"{kind}_tensor")(i), shape) for i in range(group.num_agents)]
        assert np.array_equal(now.observation["player"], np.float32(expected))
        assert np.array_equal(now.state, np.float32(expected).ravel())
        legal = [env.state.legal_actions(i) for i in range(group.num_agents)]
        n = env.game.num_distinct_actions()
        assert [row.nonzero()[0].tolist() for row in now.action_mask["player"]] == [actions or [n] for actions in legal]
        step = env.step(draw(now, rng))
        now = env.reset() if step.terminated else step.observations


def test_kinds_of_observations():
    sizes = {
        kind: make("kuhn_poker", observation=kind).spec.state_size for kind in ("information_state", "observation")
    }
    assert sizes == {"information_state": 22, "observation": 14}
    assert make("kuhn_poker").spec.state_size == 22
    assert make("tic_tac_toe").spec.state_size == 54  # it has observations only
    check_env(make("kuhn_poker", observation="observation"), steps=20)
    with pytest.raises(ValueError, match=r"tic_tac_toe has no information_state tensor.*one of: observation"):
        make("tic_tac_toe", observation="information_state")
    with pytest.raises(ValueError, match="has no nonsense tensor"):
        make("tic_tac_toe", observation="nonsense")
    with pytest.raises(ValueError, match="has no information_state or observation tensor"):
        make("coin_game")


def test_parameters():
    for env in (make("kuhn_poker(players=3)"), make("kuhn_poker", players=3)):
        assert env.spec.num_agents == 3
        assert env.spec.metadata == {"backend": "open_spiel", "game": "kuhn_poker(players=3)"}
    assert make("kuhn_poker(players=3)").spec.name == "openspiel/kuhn_poker(players=3)"
    assert make("kuhn_poker").spec.name == "openspiel/kuhn_poker"
    assert make("go(board_size=5)", komi=6).spec.metadata["game"] == "go(board_size=5,komi=6.0)"
    for arguments, message in (
        ({"scenario": "kuhn_pokre"}, "no game 'kuhn_pokre'; did you mean kuhn_poker"),
        ({"scenario": "kuhn_poker(players=3"}, "cannot read the parameters in 'kuhn_poker.players=3'"),
        ({"scenario": "kuhn_poker(cards=3)"}, "no parameter cards; it has: players"),
        ({"scenario": "tic_tac_toe", "players": 3}, "no parameter players; it has: none"),
        ({"scenario": "kuhn_poker(players=3)", "players": 3}, "given twice.*players"),
        ({"scenario": "kuhn_poker", "players": 99}, "refuses the parameters of kuhn_poker"),
        ({"scenario": "kuhn_poker", "players": "two"}, "refuses the parameters of kuhn_poker.*players"),
        ({"scenario": "mfg_crowd_modelling"}, "mean-field"),
        ({"scenario": "negotiation", "rng_seed": 1}, "rng_seed.*leave it out"),
    ):
        with pytest.raises(ValueError, match=message):
            make(**arguments)


def test_scenarios():
    names = scenarios()
    assert len(names) >= 80
    assert {"kuhn_poker", "leduc_poker", "tic_tac_toe", "goofspiel", "matrix_pd", "hanabi", "2048"} <= set(names)
    # Mean field, no tensor, no default parameters, and one that only says that it has a tensor.
    assert not {"mfg_crowd_modelling", "coin_game", "repeated_game", "crossword"} & set(names)


def test_the_list_does_not_depend_on_what_was_imported():
    # In a process of its own, since what is registered stays so.
    program = (
        "from marl_lightning.envs.adapters.openspiel import scenarios, make; before = scenarios()\n"
        "import open_spiel.python.games; assert scenarios() == before; make('python_kuhn_poker').reset(seed=0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("scenario", [name for name in scenarios() if name not in SLOW])
def test_every_game_keeps_the_contract(scenario):
    check_env(make(scenario), steps=8)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["colored_trails", "bridge(use_double_dummy_result=False)"])
def test_slow_games_keep_the_contract(scenario):
    check_env(make(scenario), steps=3)


def test_every_game_gives_its_returns():
    for scenario in scenarios():
        env = make(scenario)
        if scenario not in SLOW and env.game.max_game_length() < 130:
            returns = play(env, np.random.default_rng(0), seed=1)
            assert returns == pytest.approx(env.state.returns(), abs=1e-5), scenario


# -------------------------------------------------------------------------------------------------- seeds and saving


def test_games_that_draw_inside_the_package():
    env = make("negotiation")
    assert not env.spec.can_checkpoint
    starts = [env.reset(seed=seed).state for seed in (0, 0, 1)] + [env.reset().state]
    assert np.array_equal(starts[0], starts[1])
    assert not any(np.array_equal(a, b) for a, b in pairwise(starts[1:]))
    with pytest.raises(NotImplementedError, match="cannot be saved"):
        env.state_dict()
    with pytest.raises(NotImplementedError, match="cannot be restored"):
        env.load_state_dict({})


@pytest.mark.parametrize("scenario", ["leduc_poker", "goofspiel", "tic_tac_toe", "hanabi"])
def test_resumes_exactly(scenario):
    env, other = make(scenario), make(scenario)
    now, rng = env.reset(seed=3), np.random.default_rng(0)
    for _ in range(2):
        now = env.step(draw(now, rng)).observations
    other.load_state_dict(env.state_dict())
    assert str(other.state) == str(env.state)
    episodes = 0
    while episodes < 3:
        actions = draw(now, rng)
        first, second = env.step(actions), other.step(actions)
        assert np.array_equal(first.observations.state, second.observations.state)
        assert np.array_equal(first.reward["player"], second.reward["player"])
        assert first.terminated == second.terminated
        now = first.observations
        if first.terminated:
            episodes += 1
            now = env.reset()
            assert np.array_equal(now.state, other.reset().state)


def test_saving_before_the_first_episode():
    env, other = make("kuhn_poker"), make("kuhn_poker")
    other.reset()
    other.load_state_dict(env.state_dict())
    with pytest.raises(RuntimeError, match="has not begun"):
        other.step({"player": np.array([0, 2])})
    assert np.array_equal(env.reset().state, other.reset().state)


def test_vectorised():
    def factory():
        env = make_in_worker("leduc_poker")
        if "torch" in sys.modules:
            raise RuntimeError("a worker has imported torch")
        return env

    def make_in_worker(scenario):
        from marl_lightning.envs.adapters.openspiel import make

        return make(scenario)

    sync = SyncVectorEnv(factory=lambda: make("leduc_poker"), num_envs=2, seed=0)
    check_env(sync, steps=20)
    rng, ends = np.random.default_rng(0), 0
    with SharedMemoryVectorEnv(factory=factory, num_envs=2, seed=0, num_workers=1, context="spawn") as shared:
        one, two = sync.reset(seed=0), shared.reset()
        for _ in range(200):
            assert torch.equal(one.observation["player"], two.observation["player"])
            mask = one.action_mask["player"].numpy()
            assert (mask[..., :-1].any(-1).sum(-1) == 1).all()  # one player at a time
            actions = {"player": torch.from_numpy(np.where(mask, rng.random(mask.shape), -1).argmax(-1))}
            first, second = sync.step(actions), shared.step(actions)
            assert torch.equal(first.reward["player"], second.reward["player"])
            assert torch.equal(first.terminated, second.terminated)
            ends += int(first.terminated.sum())
            one, two = first.observations, second.observations
    assert ends > 50


def test_results_belong_to_the_caller():
    env = start_kuhn("21")
    env.reset(seed=0).action_mask["player"][:] = True
    with pytest.raises(ValueError, match="illegal action"):
        env.step({"player": np.array([PASS, PASS])})


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyspiel", None)
    for call in (scenarios, lambda: make("kuhn_poker")):
        with pytest.raises(ImportError, match=r'pip install "marl-lightning\[openspiel\]"'):
            call()
