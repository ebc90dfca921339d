"""AECAdapter: tic-tac-toe played by hand, and games whose moves, rewards and ends are scripted."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from gymnasium import spaces
from pettingzoo import AECEnv
from scripted import LeavingGame

from marl_lightning.envs import check_env
from marl_lightning.envs.adapters.turn_based import AECAdapter

WAIT = 3  # of the scripted games, which have three actions


@dataclass
class Move:
    """What happens in one move, and who moves next. ``dead`` are rewards of the steps that remove agents."""

    next: str = ""
    rewards: dict[str, float] = field(default_factory=dict)
    ends: dict[str, str] = field(default_factory=dict)
    dead: dict[str, float] = field(default_factory=dict)


class ScriptedTurns(AECEnv):
    """An AEC game that goes as its script says; agents that end are removed at once unless ``linger``.

    Observations are ``10 * time + index`` of the agent. What the game receives is kept in ``received``.
    """

    metadata = {"name": "turns_v0"}  # noqa: RUF012 - as in PettingZoo
    state_size = 0
    masks: str | None = None

    def __init__(self, agents, script, *, linger: bool = False) -> None:
        super().__init__()
        self.possible_agents, self.script, self.linger = list(agents), list(script), linger
        self.received, self.seeds, self.closed = [], [], 0

    def observation_space(self, agent):
        box = spaces.Box(0, 255, (1,), np.uint8)
        if self.masks == "observation":
            return spaces.Dict({"observation": box, "action_mask": spaces.MultiBinary(3)})
        return spaces.Dict({"observation": box}) if self.masks == "dict" else box

    def action_space(self, agent):
        return spaces.Discrete(3)

    def observe(self, agent):
        array = np.array([10 * self.time + self.possible_agents.index(agent)], np.uint8)
        if self.masks == "observation":
            return {"observation": array, "action_mask": np.array([0, 1, 1], np.int8)}
        return {"observation": array} if self.masks == "dict" else array

    def state(self):
        if not self.state_size:
            raise NotImplementedError
        return np.full(self.state_size, 100 * self.time + len(self.agents))

    def reset(self, seed=None, options=None):
        self.seeds.append(seed)
        self.time, self.agents = 0, list(self.possible_agents)
        self.rewards = dict.fromkeys(self.agents, 0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0)
        self.terminations, self.truncations = dict.fromkeys(self.agents, False), dict.fromkeys(self.agents, False)
        info = {"action_mask": np.array([1, 0, 1], np.int8)} if self.masks == "info" else {}
        self.infos = {agent: dict(info) for agent in self.agents}
        self.agent_selection = self.agents[0]
        self._skip_agent_selection = None

    def step(self, action):
        self.received.append((self.agent_selection, action))
        if self.terminations[self.agent_selection] or self.truncations[self.agent_selection]:
            self._was_dead_step(action)
            if self.agents and self.agent_selection not in self.agents:
                self.agent_selection = self.agents[0]
            self.rewards.update({a: r for a, r in self.script[self.time - 1].dead.items() if a in self.agents})
            return
        move = self.script[self.time]
        self.time += 1
        self._clear_rewards()
        self.rewards.update(move.rewards)
        for agent, end in move.ends.items():
            self.terminations[agent] = end in ("terminated", "both")
            self.truncations[agent] = end in ("truncated", "both")
        self.agent_selection = move.next or self.agents[0]
        if not self.linger:
            self._deads_step_first()

    def close(self):
        self.closed += 1


def adapter(agents, *script, game=ScriptedTurns, **kwargs) -> tuple[AECAdapter, ScriptedTurns]:
    game = game(agents, script, **kwargs)
    return AECAdapter(factory=lambda: game), game


def play(env, **actions):
    return env.step({name: np.array(values) for name, values in actions.items()})


# ------------------------------------------------------------------------------------------------------ tic-tac-toe


@pytest.fixture
def tictactoe():
    pytest.importorskip("pygame")
    from pettingzoo.classic.tictactoe.tictactoe import env

    return AECAdapter(factory=env, name="pettingzoo/classic/tictactoe_v3")


def put(env, player, square):
    """Lets player 0 or 1 take a square; the other one waits."""
    actions = np.full(2, 9)
    actions[player] = square
    return env.step({"player": actions})


def test_winning_by_hand(tictactoe):
    group = tictactoe.spec.groups["player"]
    assert (group.agents, group.action_size) == (("player_1", "player_2"), 10)
    assert (group.observation_shape, group.observation_space.dtype) == ((3, 3, 2), np.int8)
    assert (tictactoe.spec.state_size, tictactoe.spec.episode_limit) == (36, None)
    assert tictactoe.spec.metadata == {"backend": "pettingzoo"}
    now = tictactoe.reset(seed=0)
    taken = []
    for time, square in enumerate([0, 3, 1, 4, 2]):
        on_turn, waiting = time % 2, 1 - time % 2
        assert now.alive["player"].all()
        assert now.action_mask["player"][on_turn].tolist() == [i not in taken for i in range(9)] + [False]
        assert now.action_mask["player"][waiting].tolist() == [False] * 9 + [True]
        # Both see the board, each with its own marks first.
        assert np.array_equal(now.observation["player"][0], now.observation["player"][1][..., ::-1])
        marks = now.observation["player"][0].reshape(9, 2)
        assert marks[:, 0].nonzero()[0].tolist() == sorted(taken[::2])
        assert marks[:, 1].nonzero()[0].tolist() == sorted(taken[1::2])
        assert now.state.tolist() == now.observation["player"].ravel().tolist()
        step = put(tictactoe, on_turn, square)
        taken.append(square)
        now = step.observations
        assert step.reward["player"].tolist() == ([1, -1] if time == 4 else [0, 0])
        assert (step.terminated, step.truncated) == (time == 4, False)
    assert not now.alive["player"].any()
    assert not now.observation["player"].any()
    assert now.action_mask["player"].tolist() == [[False] * 9 + [True]] * 2
    with pytest.raises(RuntimeError, match="over"):
        put(tictactoe, 1, 5)
    assert tictactoe.reset().action_mask["player"].sum(axis=1).tolist() == [9, 1]


def test_the_second_player_can_win_and_nobody(tictactoe):
    tictactoe.reset()
    for time, square in enumerate([0, 3, 1, 4, 8, 5]):
        step = put(tictactoe, time % 2, square)
    assert step.reward["player"].tolist() == [-1, 1]
    tictactoe.reset()
    for time, square in enumerate([0, 1, 2, 4, 3, 5, 7, 6, 8]):
        step = put(tictactoe, time % 2, square)
        assert step.reward["player"].tolist() == [0, 0]
    assert step.terminated


def test_illegal_actions_do_not_reach_the_game(tictactoe):
    tictactoe.reset()
    before = put(tictactoe, 0, 4).observations
    for actions, message in (
        ([9, 4], "illegal action 4 of agent 'player_2'"),  # taken
        ([9, 9], "illegal action 9 of agent 'player_2'"),  # its turn: it must move
        ([0, 0], "illegal action 0 of agent 'player_1'"),  # not its turn
        ([9, 10], "illegal action 10 of agent 'player_2'"),
    ):
        with pytest.raises(ValueError, match=message):
            play(tictactoe, player=actions)
    step = put(tictactoe, 1, 0)  # nothing has happened: it is still the second player's turn
    assert not step.terminated
    assert step.observations.observation["player"][0].sum() == before.observation["player"][0].sum() + 1


def test_tictactoe_keeps_the_contract(tictactoe):
    check_env(tictactoe, steps=60)


# ---------------------------------------------------------------------------------------------------------- scripts


def test_rewards_of_all_moves_between_two_decisions_add_up():
    env, game = adapter(
        ["a_0", "a_1", "a_2"],
        Move(next="a_2", rewards={"a_0": 1, "a_1": 2, "a_2": 3}),
        Move(next="a_1", rewards={"a_0": 10, "a_1": 20, "a_2": 30}, ends={"a_0": "terminated"}, dead={"a_1": 0.5}),
        Move(next="a_2", rewards={"a_1": 100, "a_2": 200}),
        Move(rewards={"a_1": 1, "a_2": 2}, ends={"a_1": "terminated", "a_2": "terminated"}, dead={"a_2": 0.25}),
    )
    env.reset()
    step = play(env, a=[1, WAIT, WAIT])
    assert step.reward["a"].tolist() == [1, 2, 3]
    assert step.reward["a"].dtype == np.float32
    assert step.observations.action_mask["a"].tolist() == [[0, 0, 0, 1], [0, 0, 0, 1], [1, 1, 1, 0]]
    step = play(env, a=[WAIT, WAIT, 2])
    # The first agent still gets the reward of the move that ended it, the others also that of its removal.
    assert step.reward["a"].tolist() == [10, 20.5, 30]
    assert game.received == [("a_0", 1), ("a_2", 2), ("a_0", None)]
    assert (step.terminated, step.truncated) == (False, False)
    assert step.observations.alive["a"].tolist() == [False, True, True]
    assert step.observations.observation["a"].tolist() == [[0], [21], [22]]
    assert step.observations.observation["a"].dtype == np.uint8
    assert step.observations.action_mask["a"].tolist() == [[0, 0, 0, 1], [1, 1, 1, 0], [0, 0, 0, 1]]
    # Whatever the one who left does is ignored; the others play on.
    step = play(env, a=[0, 0, WAIT])
    assert step.reward["a"].tolist() == [0, 100, 200]
    step = play(env, a=[WAIT, WAIT, 0])
    assert step.reward["a"].tolist() == [0, 1, 2.25]
    assert (step.terminated, step.truncated) == (True, False)
    assert not step.observations.alive["a"].any()
    assert not step.observations.observation["a"].any()
    assert step.observations.state.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("ends", "truncated", "alive"),
    [
        (["terminated", "terminated"], False, [False, False]),
        (["truncated", "truncated"], True, [True, True]),
        (["terminated", "truncated"], True, [False, True]),
        (["both", "both"], False, [False, False]),
        (["both", "truncated"], True, [False, True]),
    ],
)
def test_mixed_ends(ends, truncated, alive):
    env, _ = adapter(["a_0", "a_1"], Move(next="a_1", ends=dict(zip(["a_0", "a_1"], ends, strict=True))))
    env.reset()
    step = play(env, a=[0, WAIT])
    assert (step.terminated, step.truncated) == (not truncated, truncated)
    # Those that were cut keep what they see, so that their value can be bootstrapped.
    assert step.observations.alive["a"].tolist() == alive
    assert step.observations.observation["a"].tolist() == [[10 * alive[0]], [11 * alive[1]]]
    with pytest.raises(RuntimeError, match="over"):
        play(env, a=[WAIT, 0])


def test_the_cut_agent_on_turn_keeps_its_legal_actions():
    class Masked(ScriptedTurns):
        masks = "observation"

    ends = {"a_0": "truncated", "a_1": "truncated"}
    env, _ = adapter(["a_0", "a_1"], Move(next="a_1", ends=ends), game=Masked, linger=True)
    env.reset()
    assert play(env, a=[1, WAIT]).observations.action_mask["a"].tolist() == [[0, 0, 0, 1], [0, 1, 1, 0]]

    class Unmasked(Masked):
        def observe(self, agent):
            return super().observe(agent) | {"action_mask": np.full(3, not any(self.truncations.values()))}

    env, _ = adapter(["a_0", "a_1"], Move(next="a_1", ends=ends), game=Unmasked, linger=True)
    env.reset()
    step = play(env, a=[1, WAIT])
    assert step.observations.action_mask["a"].tolist() == [[0, 0, 0, 1], [0, 0, 0, 1]]
    assert step.observations.alive["a"].all()


@pytest.mark.parametrize("last", ["terminated", "truncated"])
def test_who_left_earlier_does_not_decide_how_the_episode_ends(last):
    other = {"terminated": "truncated", "truncated": "terminated"}[last]
    env, _ = adapter(["a_0", "a_1"], Move(next="a_1", ends={"a_0": other}), Move(ends={"a_1": last}))
    env.reset()
    step = play(env, a=[0, WAIT])
    assert (step.terminated, step.truncated) == (False, False)
    assert step.observations.alive["a"].tolist() == [False, True]
    step = play(env, a=[WAIT, 0])
    assert (step.terminated, step.truncated) == (last == "terminated", last == "truncated")
    assert step.observations.alive["a"].tolist() == [False, last == "truncated"]


def test_an_agent_that_has_ended_is_paid_until_the_game_removes_it():
    env, game = adapter(
        ["a_0", "a_1", "a_2"],
        Move(next="a_1", ends={"a_2": "terminated"}),
        Move(next="a_2", rewards={"a_2": 7}),
        Move(rewards={"a_0": 1}, ends={"a_0": "terminated", "a_1": "terminated"}),
        linger=True,
    )
    env.reset()
    assert play(env, a=[0, WAIT, WAIT]).observations.alive["a"].all()
    # Its turn comes, and it is removed.
    step = play(env, a=[WAIT, 0, WAIT])
    assert step.reward["a"].tolist() == [0, 0, 7]
    assert step.observations.alive["a"].tolist() == [True, True, False]
    assert game.received[-1] == ("a_2", None)
    assert play(env, a=[0, WAIT, WAIT]).terminated


@pytest.mark.parametrize(
    ("masks", "row"),
    [("info", [1, 0, 1, 0]), ("observation", [0, 1, 1, 0]), ("dict", [1, 1, 1, 0]), (None, [1, 1, 1, 0])],
)
def test_masks(masks, row):
    class Masked(ScriptedTurns):
        pass

    Masked.masks = masks
    env, game = adapter(["a_0", "a_1"], Move(next="a_1"), Move(), game=Masked)
    observations = env.reset()
    assert observations.action_mask["a"].tolist() == [row, [0, 0, 0, 1]]
    assert observations.observation["a"].tolist() == [[0], [1]]
    for illegal in {row.index(0), WAIT}:
        with pytest.raises(ValueError, match=f"illegal action {illegal} of agent 'a_0'"):
            play(env, a=[illegal, WAIT])
    assert game.received == []
    assert play(env, a=[2, WAIT]).observations.action_mask["a"].tolist() == [[0, 0, 0, 1], row]


def test_an_agent_on_turn_without_legal_action_is_an_error():
    class Stuck(ScriptedTurns):
        masks = "observation"

        def observe(self, agent):
            return super().observe(agent) | {"action_mask": np.zeros(3, np.int8)}

    env, _ = adapter(["a_0"], Move(), game=Stuck)
    with pytest.raises(ValueError, match="'a_0', who may act, no legal action"):
        env.reset()


def test_actions_that_start_elsewhere():
    class Shifted(ScriptedTurns):
        def action_space(self, agent):
            return spaces.Discrete(3, start=5)

    env, game = adapter(["a_0"], Move(), game=Shifted)
    env.reset()
    play(env, a=[2])
    assert game.received == [("a_0", 7)]


def test_groups():
    env, _ = adapter(["white_0", "black_0", "white_1"], Move(next="black_0"), Move(next="white_1"))
    assert {name: group.agents for name, group in env.spec.groups.items()} == {
        "white": ("white_0", "white_1"),
        "black": ("black_0",),
    }
    assert (env.spec.name, env.spec.info_keys) == ("turns_v0", ())
    assert env.reset().state.tolist() == [0, 2, 1]  # group after group
    step = play(env, white=[0, WAIT], black=[WAIT])
    assert step.observations.action_mask["black"].tolist() == [[1, 1, 1, 0]]
    step = play(env, white=[WAIT, WAIT], black=[0])
    assert step.observations.action_mask["white"].tolist() == [[0, 0, 0, 1], [1, 1, 1, 0]]


def test_the_state_is_that_of_the_game_before_it_removes_anybody():
    class WithState(ScriptedTurns):
        state_size = 2

    ends = {"a_0": "terminated", "a_1": "terminated"}
    env, _ = adapter(["a_0", "a_1", "a_2"], Move(ends={"a_2": "truncated"}), Move(ends=ends), game=WithState)
    assert env.spec.state_size == 2
    assert env.reset().state.tolist() == [3, 3]
    step = play(env, a=[0, WAIT, WAIT])
    assert step.observations.state.tolist() == [102, 102]  # the game goes on without one of them
    step = play(env, a=[0, WAIT, WAIT])
    assert step.observations.state.tolist() == [202, 202]
    assert step.observations.state.dtype == np.float32


def test_a_seed_determines_those_of_all_later_episodes():
    env, game = adapter(["a_0"], Move())
    assert game.seeds == [None]  # the probe of the constructor
    for _ in range(2):
        env.reset(seed=4)
        env.reset()
        env.reset()
    first, second = game.seeds[1:4], game.seeds[4:7]
    assert first == second
    assert first[0] == 4
    assert len(set(first)) == 3
    env.reset(seed=5)
    env.reset()
    assert game.seeds[-1] not in first


def test_results_belong_to_the_caller():
    env, _ = adapter(["a_0", "a_1"], Move(next="a_1"), Move())
    env.reset().action_mask["a"][:] = True
    with pytest.raises(ValueError, match="illegal action 0 of agent 'a_1'"):
        play(env, a=[0, 0])


def test_scripts_keep_the_contract():
    env, _ = adapter(
        ["a_0", "a_1", "b_0"],
        Move(next="b_0", rewards={"a_0": 1, "b_0": -1}),
        Move(next="a_1", ends={"a_0": "terminated"}),
        Move(next="b_0", rewards={"a_1": 2}),
        Move(ends={"a_1": "truncated", "b_0": "truncated"}),
    )
    check_env(env, steps=30)


def test_other_kinds_of_games_are_refused():
    class Continuous(ScriptedTurns):
        def action_space(self, agent):
            return spaces.Box(-1, 1, (2,))

    with pytest.raises(ValueError, match=r"take turns need Discrete actions, got Box.*in group 'a'.*PettingZooAdapter"):
        adapter(["a_0"], game=Continuous)
    with pytest.raises(TypeError, match="must return a pettingzoo AECEnv, got LeavingGame"):
        AECAdapter(factory=lambda: LeavingGame({"a_0": (1, "terminated")}))


def test_step_before_reset_pictures_and_close():
    env, game = adapter(["a_0"], Move())
    with pytest.raises(RuntimeError, match="call reset"):
        play(env, a=[0])
    with pytest.raises(NotImplementedError, match=r'needs render_mode="rgb_array" to be rendered, got None'):
        env.render()
    env.close()
    env.close()
    assert game.closed == 1
