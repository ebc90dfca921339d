"""The adapters of SMAC and SMACv2, over stand-ins of their interfaces."""

import copy
import logging
import random
import sys
from dataclasses import replace

import fake_smac
import numpy as np
import pytest
import torch
from fake_smac import CannotResetException, install_smac

from marl_lightning.envs import SyncVectorEnv, check_env, make_env
from marl_lightning.envs.adapters import smacv2_scenarios
from marl_lightning.envs.adapters.starcraft2 import GROUP, MAPS, make, make_v2, scenarios, scenarios_v2

STOP = 1
SIZES = {  # agents, actions; observation and state of terran and zerg; of protoss
    "5_vs_5": (5, 11, (82, 120), (92, 130)),
    "10_vs_10": (10, 16, (162, 290), (182, 310)),
    "10_vs_11": (10, 17, (170, 306), (191, 327)),
    "20_vs_20": (20, 26, (322, 780), (362, 820)),
    "20_vs_23": (20, 29, (346, 858), (389, 901)),
}


@pytest.fixture(autouse=True)
def package(monkeypatch):
    """The stand-in of both packages, whose ``games`` lists the games that were made."""
    return install_smac(monkeypatch)


def draw(mask, rng):
    return np.where(mask, rng.random(mask.shape), -1.0).argmax(axis=-1)


def stand(observations):
    """Everyone stops, except for the dead, who can only do nothing."""
    return {GROUP: np.where(observations.alive[GROUP], STOP, 0)}


def play_on(env, observations, *, seed=0):
    """Plays at random until the episode ends."""
    rng = np.random.default_rng(seed)
    while True:
        step = env.step({GROUP: draw(observations.action_mask[GROUP], rng)})
        observations = step.observations
        if step.terminated or step.truncated:
            return step


def attack_first(env, *, allies, enemies):
    """Makes the first step, in which everybody attacks the first enemy, with the health of both sides set before."""
    env.reset(seed=0)
    battle = env._game.battle
    for units, health in ((battle.allies, allies), (battle.enemies, enemies)):
        for unit, value in zip(units, health, strict=True):
            unit.health, unit.shield, unit.pos = value, 0, np.array([16, 16], np.float32)
    env._observe()
    return env.step({GROUP: np.where(env._alive, 6, 0)})


def equal(one, other):
    return (
        np.array_equal(one.observation[GROUP], other.observation[GROUP])
        and np.array_equal(one.action_mask[GROUP], other.action_mask[GROUP])
        and np.array_equal(one.alive[GROUP], other.alive[GROUP])
        and np.array_equal(one.state, other.state)
    )


# ---------------------------------------------------------------------------------------------------------------------
# Names, sizes, contract
# ---------------------------------------------------------------------------------------------------------------------


def test_names():
    assert scenarios() == MAPS
    assert len(set(MAPS)) == 23
    assert set(fake_smac.MAPS) <= set(MAPS)
    races = ("protoss", "terran", "zerg")
    assert set(scenarios_v2()) == {f"{race}_{sizes}" for race in races for sizes in SIZES}
    assert make_env("starcraft2/3m").spec.name == "starcraft2/3m"
    assert make_env("smacv2/zerg_5_vs_5").spec.name == "smacv2/zerg_5_vs_5"


@pytest.mark.parametrize(
    ("name", "sizes", "limit"),
    [("3m", (3, 30, 9, 48), 60), ("2s3z", (5, 80, 11, 120), 120), ("MMM2", (10, 176, 18, 322), 180)],
)
def test_sizes(name, sizes, limit):
    spec = make(name).spec
    (group,) = spec.groups.values()
    assert (group.num_agents, group.observation_size, group.action_size, spec.state_size) == sizes
    assert spec.episode_limit == limit
    assert spec.shared_reward
    assert spec.metadata == {"backend": "smac"}


@pytest.mark.parametrize("scenario", smacv2_scenarios.SCENARIOS)
def test_sizes_of_smacv2(scenario):
    race, _, sizes = scenario.partition("_")
    agents, actions, *others = SIZES[sizes]
    env = make_v2(scenario)
    (group,) = env.spec.groups.values()
    assert (group.num_agents, group.action_size) == (agents, actions)
    assert (group.observation_size, env.spec.state_size) == others[race == "protoss"]
    assert (env.spec.episode_limit, env.spec.metadata) == (200, {"backend": "smacv2"})
    observations = env.reset(seed=0)
    assert observations.observation[GROUP].shape == (agents, group.observation_size)
    assert observations.state.shape == (env.spec.state_size,)
    teams = env._game._wrapper.env.config["team_gen"]
    assert set(teams["enemy_team"]) <= set(fake_smac.RACES[race])
    enemies = int(sizes.rpartition("_")[2])
    assert (len(teams["ally_team"]), len(teams["enemy_team"])) == (agents, enemies)


def test_options_of_smacv2():
    options = smacv2_scenarios.options("zerg_10_vs_11")
    assert options["map_name"] == "10gen_zerg"
    config = options["capability_config"]
    assert (config["n_units"], config["n_enemies"]) == (10, 11)
    team = config["team_gen"]
    assert dict(zip(team["unit_types"], team["weights"], strict=True)) == {
        "zergling": 0.45,
        "hydralisk": 0.45,
        "baneling": 0.1,
    }
    assert team["exception_unit_types"] == ["baneling"]
    assert config["start_positions"] == {"dist_type": "surrounded_and_reflect", "p": 0.5, "map_x": 32, "map_y": 32}
    assert (options["prob_obs_enemy"], options["conic_fov"], options["obs_own_pos"]) == (1.0, False, True)
    for race in smacv2_scenarios.RACES.values():
        assert sum(race.weights.values()) == pytest.approx(1)
    config["n_units"] = 0
    assert smacv2_scenarios.options("zerg_10_vs_11")["capability_config"]["n_units"] == 10


@pytest.mark.parametrize(
    ("factory", "name", "steps"),
    [(make, "3m", 150), (make, "2s3z", 100), (make, "MMM2", 25), (make_v2, "terran_5_vs_5", 80)],
)
def test_contract(factory, name, steps):
    check_env(factory(name), steps=steps)


@pytest.mark.parametrize(("factory", "name"), [(make, "3m"), (make_v2, "zerg_5_vs_5")])
def test_observations_as_state(factory, name):
    env = factory(name, obs_instead_of_state=True)
    check_env(env, steps=30)
    observations = env.reset(seed=0)
    assert np.array_equal(observations.state, observations.observation[GROUP].ravel())


def test_vectorised():
    for factory in (lambda: make("3m"), lambda: make_v2("terran_5_vs_5")):
        env = SyncVectorEnv(factory=factory, num_envs=2, seed=0)
        observations = env.reset()
        generator = torch.Generator().manual_seed(0)
        ended = 0
        for _ in range(200):
            mask = observations.action_mask[GROUP]
            actions = torch.multinomial(mask.float().flatten(0, 1), 1, generator=generator).view(mask.shape[:2])
            step = env.step({GROUP: actions})
            observations = step.observations
            ended += int((step.terminated | step.truncated).sum())
        assert ended > 2
        env.close()


# ---------------------------------------------------------------------------------------------------------------------
# Steps
# ---------------------------------------------------------------------------------------------------------------------


def test_the_time_limit_truncates_unless_the_battle_ends(monkeypatch):
    monkeypatch.setitem(fake_smac.MAPS, "3m", replace(fake_smac.MAPS["3m"], limit=3))
    env = make("3m")
    for _ in range(2):
        observations = env.reset(seed=0)
        for time in range(1, 4):
            step = env.step(stand(observations))
            assert (step.terminated, step.truncated) == (False, time == 3)
            assert set(step.info) == {"battle_won", "dead_allies", "dead_enemies"}
        assert step.observations.alive[GROUP].any()
    with pytest.raises(RuntimeError, match="over"):
        env.step(stand(step.observations))
    monkeypatch.setitem(fake_smac.MAPS, "3m", replace(fake_smac.MAPS["3m"], limit=1))
    step = attack_first(make("3m"), allies=(45, 45, 45), enemies=(1, 0, 0))
    assert (step.terminated, step.truncated) == (True, False)


def test_the_time_limit_of_smacv2_truncates(package):
    env = make_v2("terran_5_vs_5")
    observations = env.reset(seed=0)
    package.games[-1].episode_limit = 1
    step = env.step(stand(observations))
    assert (step.terminated, step.truncated) == (False, True)


@pytest.mark.parametrize(
    ("allies", "enemies", "terminated", "info"),
    [
        ((45, 45, 45), (1, 0, 0), True, (1.0, 0.0, 3.0)),
        ((1, 0, 0), (45, 0, 0), True, (0.0, 3.0, 2.0)),
        ((1, 0, 0), (1, 0, 0), True, (0.0, 3.0, 3.0)),
        ((1, 45, 45), (200, 45, 0), False, (0.0, 1.0, 1.0)),
    ],
)
def test_ends(allies, enemies, terminated, info):
    env = make("3m")
    step = attack_first(env, allies=allies, enemies=enemies)
    assert (step.terminated, step.truncated) == (terminated, False)
    assert tuple(step.info[key] for key in env.spec.info_keys) == info
    assert step.reward[GROUP].shape == (3,)
    assert (step.reward[GROUP] == step.reward[GROUP][0]).all()
    assert (step.reward[GROUP][0] > 10) == bool(info[0])


def test_dead_agents():
    env = make("3m")
    step = attack_first(env, allies=(1, 45, 45), enemies=(45, 45, 45))
    alive = step.observations.alive[GROUP]
    assert alive.tolist() == [False, True, True]
    assert not step.observations.observation[GROUP][0].any()
    assert step.observations.action_mask[GROUP][0].tolist() == [True] + [False] * 8
    assert not step.observations.action_mask[GROUP][alive, 0].any()
    # Whatever is asked of the dead is ignored, and they share the reward.
    with pytest.raises(ValueError, match="illegal action 0 of agent 'agent_1'"):
        env.step({GROUP: np.zeros(3, np.int64)})
    step = env.step({GROUP: np.array([8, 7, 7])})
    assert step.reward[GROUP][0] == step.reward[GROUP][1] > 0


def test_the_dead_observe_nothing():
    """Here the package goes on to tell them the time."""
    env = make_v2("terran_5_vs_5", obs_timestep_number=True)
    observations = env.reset(seed=0)
    while observations.alive[GROUP].all():
        observations = env.step(stand(observations)).observations
    alive = observations.alive[GROUP]
    assert observations.observation[GROUP][alive, -1].all()
    assert not observations.observation[GROUP][~alive].any()


def test_results_belong_to_the_caller():
    env = make("3m")
    observations = env.reset(seed=0)
    actions = stand(observations)
    for array in (observations.action_mask[GROUP], observations.alive[GROUP]):
        array[:] = False
    assert env.step(actions).reward[GROUP].shape == (3,)


def test_a_lost_connection_truncates(package, caplog):
    env = make("3m")
    before = env.step(stand(env.reset(seed=0))).observations
    package.trouble.append("lost")
    with caplog.at_level(logging.WARNING):
        step = env.step(stand(before))
    assert "starcraft2/3m: an episode is cut" in caplog.text
    assert (step.terminated, step.truncated) == (False, True)
    assert not step.reward[GROUP].any()
    assert set(step.info.values()) == {0.0}
    assert equal(step.observations, before)  # where it was, to bootstrap from
    env.reset()
    play_on(env, env.reset())
    assert [game.running for game in package.games[-2:]] == [0, 1]


# ---------------------------------------------------------------------------------------------------------------------
# Resets
# ---------------------------------------------------------------------------------------------------------------------


def test_nothing_is_started_before_the_first_reset(package):
    env = make("3m")
    assert package.games[0].launches == 0
    with pytest.raises(RuntimeError, match="call reset"):
        env.step({GROUP: np.ones(3, np.int64)})
    env.reset()
    assert len(package.games) == package.games[0].launches == 1


@pytest.mark.parametrize("seeds", [(None, None), (3, None), (3, 3)])
def test_a_second_reset_in_a_row_changes_nothing(package, seeds):
    env = make_v2("terran_5_vs_5")
    first = env.reset(seed=seeds[0])
    expected = copy.deepcopy(first)
    number = len(package.games)
    for observations in (first, env.reset(seed=seeds[1])):
        observations.state[:] = -1  # results belong to the caller
    assert equal(env.reset(seed=seeds[1]), expected)
    assert (len(package.games), package.games[-1].resets) == (number, 1)


def test_episodes_follow_in_the_same_process(package):
    env = make("3m")
    for episode in range(3):
        play_on(env, env.reset(), seed=episode)
    env.step(stand(env.reset()))
    env.reset()  # in the middle of a later episode
    (game,) = package.games
    assert (game.launches, game.running, game.resets) == (1, 1, 5)


def test_a_reset_in_the_first_episode_leaves_nothing_behind(package):
    env = make("3m")
    env.step(stand(env.reset(seed=0)))
    scale = package.games[-1].max_reward
    env.step(stand(env.reset()))
    old, new = package.games[-2:]
    assert (old.running, old.closes, new.running, new.launches) == (0, 1, 1, 1)
    assert new.max_reward == scale == 10 * 3 + 200 + 3 * 45


def test_a_seed_makes_a_new_game(package):
    env = make("3m")
    play_on(env, env.reset(seed=1))
    env.reset(seed=1)
    env.reset(seed=2)
    env.reset(seed=1)
    seeds = [game.used_seed for game in package.games[1:]]
    assert seeds[0] == seeds[1] == seeds[3] != seeds[2]
    assert [game.running for game in package.games] == [0, 0, 0, 0, 1]


@pytest.mark.parametrize("options", [{}, {"prob_obs_enemy": 0.3}], ids=str)
def test_a_seed_determines_teams_and_positions(options):
    def episodes(seed):
        random.seed(None)
        np.random.seed(None)  # noqa: NPY002 - the package draws from it
        env = make_v2("terran_5_vs_5", **options)
        result = []
        for episode in range(3):
            start = env.reset(seed=seed if episode == 0 else None)
            end = play_on(env, start, seed=episode)
            teams = env._game._wrapper.env.config["team_gen"]
            result += [
                start.state.tolist(),
                *start.observation[GROUP].tolist(),
                *end.observations.observation[GROUP].tolist(),
                teams["enemy_team"],
            ]
        env.close()
        return result

    assert episodes(1) == episodes(1) != episodes(2)


def test_global_generators_are_left_alone():
    states = []
    for _ in range(2):
        random.seed(5)
        np.random.seed(5)  # noqa: NPY002 - the package draws from it
        if not states:
            env = make_v2("terran_5_vs_5")
            play_on(env, env.reset(seed=0))
        states.append((random.random(), np.random.rand()))  # noqa: NPY002
    assert states[0] == states[1]


@pytest.mark.parametrize("trouble", [ConnectionError("no answer"), KeyError(3), "units"], ids=repr)
@pytest.mark.parametrize(("factory", "name"), [(make, "3m"), (make_v2, "zerg_5_vs_5")])
def test_a_failed_reset_is_tried_again(package, caplog, factory, name, trouble):
    env = factory(name)
    play_on(env, env.reset(seed=0))
    package.trouble.append(trouble)
    with caplog.at_level(logging.WARNING):
        observations = env.reset()
    assert f"/{name}: StarCraft II is started anew" in caplog.text
    assert observations.alive[GROUP].all()
    assert [game.running for game in package.games[-2:]] == [0, 1]
    play_on(env, observations)


def test_a_reset_that_fails_twice_names_the_map(package):
    env = make("3m")
    package.trouble += [OSError("first"), FileNotFoundError("no StarCraft II")]
    with pytest.raises(
        RuntimeError, match=r"starcraft2/3m could be started: no StarCraft II\. .*SC2PATH.*smac"
    ) as raised:
        env.reset(seed=0)
    assert "\n" not in str(raised.value)
    assert isinstance(raised.value.__cause__, FileNotFoundError)
    with pytest.raises(RuntimeError, match="call reset"):
        env.step({GROUP: np.ones(3, np.int64)})
    assert env.reset().alive[GROUP].all()
    assert sum(game.running for game in package.games) == 1


def test_smacv2_may_repeat_a_reset_itself(package):
    env = make_v2("zerg_5_vs_5")
    package.trouble.append(CannotResetException("no units"))
    observations = env.reset()
    assert (len(package.games), package.games[0].resets) == (1, 2)
    assert observations.alive[GROUP].all()


def test_closing(package):
    env = make("3m")
    play_on(env, env.reset())
    env.reset()
    env.close()
    env.close()
    assert (package.games[-1].closes, package.games[-1].running) == (1, 0)
    with pytest.raises(RuntimeError, match="call reset"):
        env.step({GROUP: np.ones(3, np.int64)})
    play_on(env, env.reset())
    env.close()
    assert not any(game.running for game in package.games)


# ---------------------------------------------------------------------------------------------------------------------
# Options and what is missing
# ---------------------------------------------------------------------------------------------------------------------


def test_options_reach_the_package(package):
    make("3m", difficulty="9")
    config = smacv2_scenarios.options("zerg_5_vs_5")["capability_config"] | {"n_units": 3}
    env = make_v2("zerg_5_vs_5", capability_config=config, prob_obs_enemy=0.0)
    assert env.spec.num_agents == 3
    assert package.games[-1].prob_obs_enemy == 0.0
    assert "env_key" not in config["team_gen"]  # the package writes into a copy
    for factory, name in ((make, "3m"), (make_v2, "zerg_5_vs_5")):
        with pytest.raises(TypeError, match="sight"):
            factory(name, sight=3)


@pytest.mark.parametrize("option", ["seed", "map_name", "continuing_episode"])
def test_options_that_cannot_be_chosen(option):
    for factory, name in ((make, "3m"), (make_v2, "zerg_5_vs_5")):
        with pytest.raises(ValueError, match=f"{option} cannot be chosen: "):
            factory(name, **{option: 1})


def test_bad_names():
    with pytest.raises(ValueError, match=r"obs_timestep_number cannot be chosen: .* one entry longer"):
        make("3m", obs_timestep_number=True)
    with pytest.raises(ValueError, match=r"unknown map '4m'.*2s3z"):
        make("4m")
    with pytest.raises(ValueError, match=r"unknown scenario 'zerg_6_vs_6'.*zerg_5_vs_5"):
        make_v2("zerg_6_vs_6")


@pytest.mark.parametrize("module", ["smac", "smac.env", "smacv2"])
def test_a_missing_package_is_explained(monkeypatch, module):
    """Another package of the name smac, which PyPI has, lacks the module env."""
    for name in list(sys.modules):
        if f"{name}.".startswith(f"{module}."):
            monkeypatch.setitem(sys.modules, name, None)
    if module == "smacv2":
        names, call, source = scenarios_v2, lambda: make_v2("zerg_5_vs_5"), r"https://github\.com/oxwhirl/smacv2\.git"
    else:
        names, call, source = scenarios, lambda: make("3m"), r"https://github\.com/oxwhirl/smac\.git"
    for function in (names, call):
        with pytest.raises(ImportError, match=rf"StarCraft II.*{source}") as raised:
            function()
        assert "\n" not in str(raised.value)


def test_the_stand_in_is_strict(package):
    """Otherwise the tests above would show nothing."""
    game = package(map_name="3m")
    game.reset()
    with pytest.raises(AssertionError):
        game.step([0, 0, 0])
    scale = game.max_reward
    game.reset()
    assert (game.running, game.max_reward) == (2, scale + 3 * 45)
