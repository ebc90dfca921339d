"""Exact NashConv in games of OpenSpiel: known values, analytic equilibria, and walks history by history as oracle."""

import itertools

import numpy as np
import pytest
import torch
from game_policies import KuhnPoker, Uniform, kuhn_equilibrium, mixed, read_kuhn

from marl_lightning.algorithms import IPPO, IQL
from marl_lightning.envs import Observations, SyncVectorEnv, make_env, make_vector_env
from marl_lightning.envs.wrappers import AddAgentID, AggregateReward, RecordEpisodeStatistics, TimeLimit

pytest.importorskip("pyspiel")

import pyspiel
from openspiel_oracle import nash_conv as openspiel_nash_conv
from openspiel_oracle import tabular_policy_from_callable

from marl_lightning.envs.adapters.openspiel import OpenSpielAdapter
from marl_lightning.games import OpenSpielEvaluator, nash_conv
from marl_lightning.games import openspiel as tested

GOOFSPIEL = "goofspiel(num_cards={},imp_info=True,points_order={},returns_type=win_loss)"


def vector_env(name: str, **kwargs):
    return make_vector_env(f"openspiel/{name}", num_envs=1, **kwargs)


def untrained(algorithm, env, **kwargs):
    """A policy that is far from uniform."""
    module = algorithm(spec=env.spec, hidden_sizes=(16,), **kwargs)
    torch.manual_seed(1)
    for parameter in module.policy.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return module.policy


# -------------------------------------------------------------------------------------------------------- known values


@pytest.mark.parametrize(
    ("name", "expected", "information_states"),
    [
        ("kuhn_poker", 11 / 12, 12),
        ("kuhn_poker(players=3)", 2.0625, 48),
        ("leduc_poker", 4.747222, 936),
        ("matrix_rps", 0, 2),
        ("matrix_mp", 0, 2),
        ("matrix_sh", 0, 2),
        ("matrix_cd", 0, 2),
        ("matrix_coordination", 0, 2),
        ("matrix_shapleys_game", 0, 2),
        ("matching_pennies_3p", 0, 3),
        ("matrix_pd", 3, 2),
        ("matrix_bos", 0.5, 2),
        ("matrix_brps", 16.666667, 2),
        ("tiny_hanabi", 3.888889, 8),
        (GOOFSPIEL.format(3, "descending"), 4 / 3, 16),
        (GOOFSPIEL.format(4, "descending"), 17 / 12, 162),
        (GOOFSPIEL.format(4, "random"), 17 / 12, 3608),
        ("liars_dice(dice_sides=3)", 10 / 9, 192),
        ("liars_dice(dice_sides=4)", 1.310119, 1024),
        pytest.param("liars_dice(dice_sides=6)", 1.561489, 24576, marks=pytest.mark.slow),
    ],
)
def test_uniform_play(name, expected, information_states):
    evaluator = OpenSpielEvaluator()
    result = nash_conv(Uniform(), vector_env(name), evaluator)
    assert result.value == pytest.approx(expected, abs=1e-6)
    assert (result.bound, result.episodes, result.env_steps) == ("exact", 0, 0)
    assert result.interval == (result.value, result.value)
    # The limit is what the game has, neither more nor less.
    OpenSpielEvaluator(max_information_states=information_states).evaluate(Uniform(), vector_env(name))
    with pytest.raises(ValueError, match=f"stopped at {information_states:,} information states"):
        OpenSpielEvaluator(max_information_states=information_states - 1).evaluate(Uniform(), vector_env(name))


def test_uniform_play_of_kuhn_and_leduc_poker_by_player():
    kuhn = nash_conv(Uniform(), vector_env("kuhn_poker"))
    assert kuhn.gains == pytest.approx({"player_0": 0.375, "player_1": 0.541667}, abs=1e-6)
    assert kuhn.on_policy == pytest.approx({"player_0": 0.125, "player_1": -0.125})
    assert kuhn.best_response_values == pytest.approx({"player_0": 0.5, "player_1": 0.416667}, abs=1e-6)
    assert kuhn.payoff_range == 4
    leduc = nash_conv(Uniform(), vector_env("leduc_poker"))
    assert leduc.on_policy["player_0"] == pytest.approx(-0.078125)


@pytest.mark.parametrize("alpha", [0, 1 / 6, 1 / 3])
def test_equilibria_of_kuhn_poker(alpha):
    result = nash_conv(kuhn_equilibrium(alpha), vector_env("kuhn_poker"))
    assert result.value == pytest.approx(0, abs=1e-6)  # probabilities are in float32
    assert result.on_policy["player_0"] == pytest.approx(-1 / 18, abs=1e-6)


@pytest.mark.parametrize(("bet", "expected"), [(0, 2), (1, 2 / 3)])
def test_always_the_same_in_kuhn_poker(bet, expected):
    policy = KuhnPoker(dict.fromkeys(kuhn_equilibrium(0).bets, bet))
    assert nash_conv(policy, vector_env("kuhn_poker")).value == pytest.approx(expected)


@pytest.mark.parametrize("name", ["matrix_rps", "matrix_mp"])
def test_pure_profiles(name):
    assert nash_conv(Uniform(), vector_env(name), mode="greedy").value == pytest.approx(2)


# ----------------------------------------------------------------------------------------------- history by history


def shown(state) -> Observations[torch.Tensor]:
    """What an environment of one instance shows at a decision, written anew."""
    simultaneous = state.is_simultaneous_node()
    players, actions = range(state.num_players()), state.get_game().num_distinct_actions()
    mask = torch.zeros(1, len(players), actions + (not simultaneous), dtype=torch.bool)
    for player in players:
        for action in state.legal_actions(player) or [0 if simultaneous else actions]:
            mask[0, player, action] = True
    observation = torch.tensor([[state.information_state_tensor(player) for player in players]])
    return Observations(
        observation={"player": observation},
        action_mask={"player": mask},
        alive={"player": torch.ones(1, len(players), dtype=torch.bool)},
        state=observation.flatten(1),
    )


def stated(policy, state) -> torch.Tensor:
    """Probabilities ``[A, n]`` of a policy that was taken alone through all decisions of one history."""
    memory, first = policy.initial_state(1), torch.ones(1, dtype=torch.bool)
    replayed = state.get_game().new_initial_state()
    path = [action.action for action in state.full_history()]
    with torch.no_grad():
        while True:
            if replayed.is_chance_node():
                replayed.apply_action(path.pop(0))
                continue
            probabilities, memory = policy.action_probabilities(shown(replayed), memory, first)
            first = torch.zeros(1, dtype=torch.bool)
            if not path:
                return probabilities["player"][0]
            if replayed.is_simultaneous_node():
                replayed.apply_actions([path.pop(0) for _ in range(replayed.num_players())])
            else:
                replayed.apply_action(path.pop(0))


@pytest.mark.parametrize("name", ["kuhn_poker", "kuhn_poker(players=3)", "dark_hex(board_size=2)", "tiny_hanabi"])
@pytest.mark.parametrize("recurrent", [False, True])
def test_against_openspiel_history_by_history(name, recurrent):
    env = vector_env(name)
    policy = untrained(IPPO, env, recurrent=recurrent)
    game = pyspiel.load_game(name)

    def probabilities(state):
        row = stated(policy, state)[state.current_player()]
        return {action: row[action].item() for action in state.legal_actions()}

    expected = openspiel_nash_conv(game, tabular_policy_from_callable(game, probabilities), return_only_nash_conv=False)
    result = nash_conv(policy, env)
    assert list(result.gains.values()) == pytest.approx(expected.player_improvements.tolist(), abs=1e-5)
    assert result.value == pytest.approx(expected.nash_conv, abs=1e-5)
    assert result.value > 0.01


def value(policy, state) -> np.ndarray:
    """Payoffs from a state on, through every joint action."""
    if state.is_terminal():
        return np.array(state.returns())
    if state.is_chance_node():
        return sum(p * value(policy, state.child(outcome)) for outcome, p in state.chance_outcomes())
    rows, total = stated(policy, state), 0
    for joint in itertools.product(*(state.legal_actions(player) for player in range(state.num_players()))):
        child = state.clone()
        child.apply_actions(list(joint))
        probability = np.prod([rows[player, action].item() for player, action in enumerate(joint)])
        total = total + probability * value(policy, child)
    return total


def responses(policy, game, player):
    """Payoffs of a player for each of its pure strategies in goofspiel with 3 cards, against a policy: it has 3 first
    cards, and 2 second ones for each of what it may see then."""
    second = {}

    def play(state, plan):
        if state.is_terminal():
            return state.returns()[player]
        rows, other, total = stated(policy, state), 1 - player, 0
        name = state.information_state_string(player)
        legal = state.legal_actions(player)
        if len(legal) == 2:
            second.setdefault(name, legal)
        mine = plan.get(name, legal[0])
        for theirs in state.legal_actions(other):
            child = state.clone()
            child.apply_actions([mine, theirs] if player == 0 else [theirs, mine])
            total += rows[other, theirs].item() * play(child, plan)
        return total

    start = game.new_initial_state().information_state_string(player)
    for card in range(3):
        second.clear()
        play(game.new_initial_state(), {start: card})  # collects what it may see
        seen = dict(second)
        for choice in itertools.product(*seen.values()):
            yield play(game.new_initial_state(), {start: card} | dict(zip(seen, choice, strict=True)))


@pytest.mark.parametrize("cards", [3, 4])
@pytest.mark.parametrize("recurrent", [False, True])
def test_simultaneous_moves_history_by_history(recurrent, cards):
    name = GOOFSPIEL.format(cards, "descending")
    env = vector_env(name)
    policy, game = untrained(IPPO, env, recurrent=recurrent), pyspiel.load_game(name)
    result = nash_conv(policy, env)
    expected = value(policy, game.new_initial_state())
    assert list(result.on_policy.values()) == pytest.approx(expected.tolist(), abs=1e-5)
    if cards == 3:  # with 4 there are too many pure strategies
        best = [max(responses(policy, game, player)) for player in range(2)]
        assert list(result.best_response_values.values()) == pytest.approx(best, abs=1e-5)


def test_chunks_change_nothing(monkeypatch):
    env = vector_env("kuhn_poker(players=3)")
    policy = untrained(IPPO, env, recurrent=True)
    whole = nash_conv(policy, env)
    monkeypatch.setattr(tested, "_CHUNK", 5)
    parts = nash_conv(policy, env)
    assert parts.gains == pytest.approx(whole.gains, abs=1e-6)


def test_greedy_values_are_those_of_pure_play():
    env = vector_env("kuhn_poker")
    policy = untrained(IQL, env)
    game = pyspiel.load_game("kuhn_poker")

    def best(state):
        observations = shown(state)
        with torch.no_grad():
            actions, _, _ = policy.act(
                observations, policy.initial_state(1), torch.ones(1, dtype=torch.bool), deterministic=True
            )
        return {actions["player"][0, state.current_player()].item(): 1.0}

    expected = openspiel_nash_conv(game, tabular_policy_from_callable(game, best))
    assert nash_conv(policy, env, mode="greedy").value == pytest.approx(expected)


def test_observations_instead_of_information_states():
    """The policy is asked with what its environment shows, here without the history of the game."""

    class SeesOnlyNow(Uniform):
        def action_probabilities(self, observations, state, is_first, *, deterministic=False):
            assert observations.observation["player"].shape[1:] == (2, 7)  # an information state has 11 entries
            return super().action_probabilities(observations, state, is_first)

    env = vector_env("kuhn_poker", observation="observation")
    assert nash_conv(SeesOnlyNow(), env).value == pytest.approx(11 / 12)


# --------------------------------------------------------------------------------------- what is no strategy of a game


class Peeks(Uniform):
    """Bets in Kuhn poker if the other one has a jack."""

    def action_probabilities(self, observations, state, is_first, *, deterministic=False):
        seen, mask = observations.observation["player"], observations.action_mask["player"]
        probabilities = mixed(mask)
        other_has_jack = seen.flip(1)[..., 2].bool()
        plays = ~mask[..., -1]
        probabilities[other_has_jack & plays] = torch.tensor([0.0, 1, 0])
        return {"player": probabilities}, state


class Leaks(Uniform):
    """Remembers what all players have seen, and bets the more the more there was."""

    def initial_state(self, num_envs):
        return {"sum": torch.zeros(num_envs)}

    def action_probabilities(self, observations, state, is_first, *, deterministic=False):
        mask = observations.action_mask["player"]
        seen = observations.observation["player"].flatten(2)
        total = torch.where(is_first, 0, state["sum"]) + (seen * torch.arange(seen.shape[-1])).sum((1, 2))
        bet = (total / 1000)[:, None].expand(mask.shape[:2])
        play = torch.stack((1 - bet, bet, torch.zeros_like(bet)), -1)
        return {"player": torch.where(mask[..., -1:], mixed(mask), play)}, {"sum": total}


@pytest.mark.parametrize("policy", [Peeks(), Leaks()])
def test_opponents_seen_through_shared_state(policy):
    with pytest.raises(ValueError, match=r"the probability of an action differs by .* must see the opponents"):
        nash_conv(policy, vector_env("kuhn_poker"))


def test_one_information_state_shown_in_different_ways():
    """With open cards, information states of goofspiel leave out who played what when; memory does not."""
    env = vector_env("goofspiel(num_cards=4,imp_info=False,points_order=descending,returns_type=win_loss)")
    assert nash_conv(untrained(IPPO, env), env).value > 0
    with pytest.raises(ValueError, match="environment showed them to the player in different ways"):
        nash_conv(untrained(IPPO, env, recurrent=True), env)


class Wrong(Uniform):
    def __init__(self, change):
        self.change = change

    def action_probabilities(self, observations, state, is_first, *, deterministic=False):
        stated, state = super().action_probabilities(observations, state, is_first)
        return self.change(stated), state


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda stated: {"player": stated["player"] * 0.9}, "no probabilities"),
        (lambda stated: {"player": stated["player"] * float("nan")}, "no probabilities"),
        (lambda stated: {"player": torch.full_like(stated["player"], 1 / 3)}, "gives illegal actions"),
        (lambda stated: {"player": stated["player"][..., :2]}, r"shapes .*\(6, 2, 2\).* needs .*\(6, 2, 3\)"),
        (lambda stated: {"team": stated["player"]}, r"states probabilities of shapes {'team'"),
    ],
)
def test_what_is_stated_is_checked(change, message):
    with pytest.raises(ValueError, match=message):
        nash_conv(Wrong(change), vector_env("kuhn_poker"))


def test_policies_of_other_games_are_refused():
    kuhn, leduc = vector_env("kuhn_poker"), vector_env("leduc_poker")
    with pytest.raises(ValueError, match=r"cannot act in openspiel/leduc_poker.*another game"):
        nash_conv(IPPO(spec=kuhn.spec).policy, leduc)
    matrix = make_vector_env("matrix/climbing", num_envs=1)
    with pytest.raises(ValueError, match=r"cannot act in openspiel/kuhn_poker, whose agents are player_0, player_1"):
        nash_conv(IPPO(spec=matrix.spec).policy, kuhn)


# ---------------------------------------------------------------------------------------------- games and environments


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tic_tac_toe", r"tic_tac_toe\(\) is too large .* at 1,001 information states .*max_information_states=1,000"),
        ("gin_rummy", "does not say what players know"),
        ("negotiation", "draws inside"),
        ("phantom_ttt", "calls an information state of two players"),
    ],
)
def test_games_without_exact_evaluation(name, message):
    with pytest.raises(ValueError, match=message):
        OpenSpielEvaluator(max_information_states=1000).evaluate(Uniform(), vector_env(name))


def test_many_histories_of_few_information_states_are_refused(monkeypatch):
    monkeypatch.setattr(tested, "_HISTORIES_PER_STATE", 1)  # Kuhn poker has 24 histories
    assert OpenSpielEvaluator(max_information_states=24).evaluate(Uniform(), vector_env("kuhn_poker")).value > 0
    with pytest.raises(ValueError, match="stopped at 12 information states in 24 histories"):
        OpenSpielEvaluator(max_information_states=23).evaluate(Uniform(), vector_env("kuhn_poker"))
    with pytest.raises(ValueError, match="max_information_states must be at least 1"):
        OpenSpielEvaluator(max_information_states=0)


def test_every_kind_of_environment():
    adapter = OpenSpielAdapter(scenario="kuhn_poker")
    adapter.reset(seed=0)
    history = adapter.state.history()
    wrapped = AggregateReward(RecordEpisodeStatistics(vector_env("kuhn_poker", vectorization="sync")))
    for env in (adapter, make_env("openspiel/kuhn_poker"), RecordEpisodeStatistics(adapter), wrapped):
        assert nash_conv(Uniform(), env).value == pytest.approx(11 / 12)
    assert adapter.state.history() == history
    adapter.step({"player": np.array([0, 2])})  # what is legal has been left alone too
    parameters = vector_env("kuhn_poker", players=3)
    assert nash_conv(Uniform(), parameters).value == pytest.approx(2.0625)


def test_environments_that_cannot_be_followed():
    for wrapper in (AddAgentID(vector_env("kuhn_poker")), TimeLimit(vector_env("kuhn_poker"), max_episode_steps=2)):
        with pytest.raises(ValueError, match=rf"{type(wrapper).__name__} may change what the policy sees"):
            nash_conv(Uniform(), wrapper)
    nameless = SyncVectorEnv(factory=lambda: OpenSpielAdapter(scenario="kuhn_poker"), num_envs=1, seed=0)
    with pytest.raises(ValueError, match=r"cannot find a game of OpenSpiel in openspiel/kuhn_poker: give an OpenSpiel"):
        nash_conv(Uniform(), nameless, "openspiel")


def test_one_evaluator_for_several_profiles_and_games():
    evaluator, kuhn = OpenSpielEvaluator(), vector_env("kuhn_poker")
    others = (vector_env("kuhn_poker", players=3), vector_env("kuhn_poker", observation="observation"))
    for env in (kuhn, others[0], kuhn, others[1], kuhn):
        policy = untrained(IPPO, env)
        assert nash_conv(policy, env, evaluator).gains == nash_conv(policy, env).gains
    for policy, expected in ((kuhn_equilibrium(0.1), 0), (Uniform(), 11 / 12), (kuhn_equilibrium(0), 0)):
        assert nash_conv(policy, kuhn, evaluator).value == pytest.approx(expected, abs=1e-6)


def test_the_game_is_walked_through_once(monkeypatch):
    evaluator, env, walks = OpenSpielEvaluator(), vector_env("kuhn_poker"), []
    walk = tested._walk
    monkeypatch.setattr(tested, "_walk", lambda *args, **kwargs: walks.append(1) or walk(*args, **kwargs))
    for _ in range(3):
        nash_conv(Uniform(), env, evaluator)
    assert len(walks) == 1


def test_reading_kuhn_poker():
    """The policies of these tests read observations as OpenSpiel writes them."""
    env = OpenSpielAdapter(scenario="kuhn_poker")
    for seed in range(10):
        seen = env.reset(seed=seed)
        for actions in ([0, 2], [2, 1]):
            for player in range(2):
                assert read_kuhn(torch.tensor(seen.observation["player"][player])) == env.information_state_string(
                    player
                )
            seen = env.step({"player": np.array(actions)}).observations
