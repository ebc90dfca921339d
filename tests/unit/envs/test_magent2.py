"""MAgent2Adapter against the package's own parallel_env, step by step."""

import importlib
import sys

import numpy as np
import pytest
import torch

from marl_lightning.envs import check_env
from marl_lightning.envs.vector.shared_memory import SharedMemoryVectorEnv
from marl_lightning.envs.vector.sync import SyncVectorEnv

pytest.importorskip("magent2")

from marl_lightning.envs.adapters.magent2 import MAgent2Adapter, engine_seed, make, scenarios

# Teams with the shapes of their observations and their numbers of actions, and the shape of the map.
GAMES = {
    "adversarial_pursuit_v4": ({"predator": (25, (10, 10, 5), 13), "prey": (50, (9, 9, 5), 9)}, (45, 45, 5)),
    "battle_v4": ({"red": (81, (13, 13, 5), 21), "blue": (81, (13, 13, 5), 21)}, (45, 45, 5)),
    "battlefield_v5": ({"red": (12, (13, 13, 5), 21), "blue": (12, (13, 13, 5), 21)}, (80, 80, 5)),
    "combined_arms_v6": (
        {
            "redmelee": (45, (13, 13, 9), 9),
            "redranged": (36, (13, 13, 9), 25),
            "bluemelee": (45, (13, 13, 9), 9),
            "blueranged": (36, (13, 13, 9), 25),
        },
        (45, 45, 9),
    ),
    "gather_v5": ({"omnivore": (495, (15, 15, 5), 33)}, (200, 200, 5)),
    "tiger_deer_v4": ({"deer": (101, (3, 3, 5), 5), "tiger": (20, (9, 9, 5), 9)}, (45, 45, 5)),
}


def draw(env, rng) -> dict[str, np.ndarray]:
    return {name: rng.integers(group.action_size, size=group.num_agents) for name, group in env.spec.groups.items()}


def package_map(package) -> np.ndarray | None:
    """The package's state, with the walls of the running episode, as it should be; None where it raises."""
    if not all(package.env.get_num(handle) for handle in package.env.get_handles()):
        return None
    state = package.state()
    state[..., 0] = 0
    x, y = package.env._get_walls_info().T
    state[x, y, 0] = 1
    return state.ravel()


def compare(scenario: str, *, steps: int, seed: int = 3, **kwargs) -> dict[str, int]:
    """Plays both with equal random actions and returns how many agents died and how episodes ended."""
    env = make(scenario, **kwargs)
    package = importlib.import_module(f"magent2.environments.{scenario}").parallel_env(**kwargs)
    rng = np.random.default_rng(seed)
    counts = {"died": 0, "terminated": 0, "truncated": 0, "maps": 0}
    before, over = None, True
    for _ in range(steps):
        if over:
            # Only the first reset seeds; the others continue the generators.
            chosen = seed if before is None else None
            before = env.reset(seed=chosen)
            expected, _ = package.reset(seed=None if chosen is None else engine_seed(chosen))
            # The package counts its teams before it places them, and thus lets all teams take the actions of the first
            # one in the first step of every episode.
            package.team_sizes = [package.env.get_num(handle) for handle in package.handles]
            for name, group in env.spec.groups.items():
                assert np.array_equal(before.observation[name], np.stack([expected[a] for a in group.agents]))
                assert before.alive[name].all()
        actions = draw(env, rng)
        step = env.step(actions)
        flat = {a: int(n) for name, g in env.spec.groups.items() for a, n in zip(g.agents, actions[name], strict=True)}
        living = list(package.agents)
        expected, rewards, terminations, truncations, _ = package.step({agent: flat[agent] for agent in living})
        all_terminated = all(terminations.values())
        for name, group in env.spec.groups.items():
            assert before.alive[name].tolist() == [agent in living for agent in group.agents]
            assert step.reward[name].tolist() == [rewards.get(agent, 0.0) for agent in group.agents]
            for row, agent in enumerate(group.agents):
                alive = step.observations.alive[name][row]
                # At the end of a game the package calls the survivors terminated, too.
                if not all_terminated:
                    assert alive == (agent in living and not terminations[agent])
                observation = step.observations.observation[name][row]
                assert np.array_equal(observation, expected[agent] if alive else np.zeros_like(observation))
            counts["died"] += int(before.alive[name].sum() - step.observations.alive[name].sum())
        assert step.terminated == all_terminated
        assert step.truncated == (all(truncations.values()) and not all_terminated)
        if (state := package_map(package)) is not None:
            assert np.array_equal(step.observations.state, state)
            counts["maps"] += 1
        before, over = step.observations, step.terminated or step.truncated
        counts["terminated"] += step.terminated
        counts["truncated"] += step.truncated
    return counts


@pytest.mark.parametrize("scenario", GAMES)
def test_groups_and_sizes(scenario):
    env = make(scenario)
    groups, shape = GAMES[scenario]
    assert groups == {
        name: (group.num_agents, group.observation_shape, group.action_size) for name, group in env.spec.groups.items()
    }
    assert env.spec.name == f"magent2/{scenario}"
    assert env.spec.state_size == np.prod(shape)
    assert env.spec.episode_limit == {"gather_v5": 500, "adversarial_pursuit_v4": 500, "tiger_deer_v4": 300}.get(
        scenario, 1000
    )
    assert env.spec.metadata == {"backend": "magent2"}
    assert not env.spec.shared_reward
    assert not env.spec.can_checkpoint
    assert env.spec.groups == make(scenario).spec.groups


@pytest.mark.parametrize("scenario", GAMES)
def test_equals_the_package(scenario):
    steps, limit = (12, 8) if scenario == "gather_v5" else (130, 110)
    counts = compare(scenario, steps=steps, max_cycles=limit)
    assert counts["maps"] > 0.8 * steps
    if scenario == "tiger_deer_v4":
        assert counts["terminated"] == 1  # all tigers have starved
    else:
        assert counts["truncated"] == 1
    if scenario in ("combined_arms_v6", "gather_v5"):
        assert counts["died"] >= 10


@pytest.mark.slow
@pytest.mark.parametrize("scenario", GAMES)
def test_long_games_equal_the_package(scenario):
    counts = compare(scenario, steps=60 if scenario == "gather_v5" else 400, max_cycles=300)
    assert counts["died"] > 0 or scenario in ("adversarial_pursuit_v4", "battlefield_v5")


@pytest.mark.parametrize("options", [{"minimap_mode": True}, {"extra_features": True}, {"both": True}], ids=str)
def test_features_equal_the_package(options):
    options = {"minimap_mode": True, "extra_features": True} if "both" in options else options
    counts = compare("combined_arms_v6", steps=40, map_size=16, **options)
    assert counts["maps"] == 40


def test_wiping_out_a_team_terminates_and_leaves_the_others_alive():
    env = make("combined_arms_v6", map_size=16)
    observations, rng = env.reset(seed=0), np.random.default_rng(0)
    for _ in range(1000):
        step = env.step(draw(env, rng))
        for name, dead in observations.alive.items():
            assert not step.reward[name][~dead].any()
        observations = step.observations
        for name, alive in observations.alive.items():
            assert not observations.observation[name][~alive].any()
            assert observations.observation[name][alive].any(axis=(1, 2, 3)).all()
            assert observations.action_mask[name][alive].all()
            assert observations.action_mask[name][~alive].sum(axis=1).tolist() == [1] * int((~alive).sum())
        if step.terminated:
            break
    left = {name: int(alive.sum()) for name, alive in observations.alive.items()}
    assert not step.truncated
    assert min(left.values()) == 0 < max(left.values())
    assert np.isfinite(observations.state).all()  # the package's own state raises here
    with pytest.raises(RuntimeError, match="over"):
        env.step(draw(env, rng))


def test_the_state_has_the_walls_of_the_running_episode():
    env = make("adversarial_pursuit_v4")
    walls = [env.reset(seed=seed).state.reshape(45, 45, 5)[..., 0] for seed in (1, 2)]
    assert not np.array_equal(*walls)
    # Predators see walls around them where the state has them: along the border at least.
    assert all(wall[0].all() and wall[:, 0].all() for wall in walls)


def test_features_of_gather_have_their_documented_places():
    env = make("gather_v5", extra_features=True)
    state = env.reset(seed=0).state.reshape(200, 200, 39)
    assert int(state[..., 3].sum()) == 495  # omnivores; the package overwrites this channel
    assert int(state[..., 1].sum()) > 2000  # food


@pytest.mark.parametrize("scenario", GAMES)
def test_keeps_the_contract(scenario):
    check_env(make(scenario, max_cycles=12), steps=20)


def test_without_state():
    env = make("battle_v4", map_size=16, with_state=False)
    assert env.spec.state_size == 0
    check_env(env, steps=20)
    vector = SyncVectorEnv(factory=lambda: make("battle_v4", map_size=16, with_state=False), num_envs=2, seed=0)
    assert vector.reset().state.shape == (2, 0)


def test_none_takes_the_default_of_the_package():
    assert make("battle_v4", map_size=None, max_cycles=None).spec == make("battle_v4").spec
    assert make("battle_v4", step_reward=-1.0).reset(seed=0).alive["red"].all()


def test_rewards_of_the_package_can_be_set():
    env = make("battle_v4", step_reward=-1.5, map_size=16)
    env.reset(seed=0)
    step = env.step({name: np.full(group.num_agents, 6) for name, group in env.spec.groups.items()})  # all stay
    assert (step.reward["red"] == -1.5).all()


def test_instances_in_one_process_do_not_share_randomness():
    alone = make("battle_v4", map_size=16)
    expected = [alone.reset(seed=5), alone.step(draw(alone, np.random.default_rng(0))).observations]
    one, other = make("battle_v4", map_size=16), make("battle_v4", map_size=16)
    first = one.reset(seed=5)
    other.reset(seed=6)
    other.step(draw(other, np.random.default_rng(1)))
    found = [first, one.step(draw(one, np.random.default_rng(0))).observations]
    for a, b in zip(expected, found, strict=True):
        assert np.array_equal(a.state, b.state)


def test_what_it_returns_may_be_written_into():
    env, untouched = make("battle_v4", map_size=16), make("battle_v4", map_size=16)
    observations = env.reset(seed=0)
    for arrays in (observations.observation, observations.action_mask, observations.alive):
        for array in arrays.values():
            array[:] = 0
    untouched.reset(seed=0)
    actions = draw(env, np.random.default_rng(0))
    assert np.array_equal(env.step(actions).observations.state, untouched.step(actions).observations.state)


def test_seeds_differ():
    env = make("tiger_deer_v4")
    assert not np.array_equal(env.reset(seed=0).state, env.reset(seed=1).state)


def light_battle() -> MAgent2Adapter:
    return make("battle_v4", map_size=16, max_cycles=7)


def test_workers_play_the_same_episodes_without_torch():
    def factory():
        env = light_battle_in_worker()
        if "torch" in sys.modules:
            raise RuntimeError("a worker has imported torch")
        return env

    def light_battle_in_worker():
        return make("battle_v4", map_size=16, max_cycles=7)

    sync = SyncVectorEnv(factory=light_battle, num_envs=3, seed=4)
    rng = np.random.default_rng(0)
    with SharedMemoryVectorEnv(factory=factory, num_envs=3, seed=4, num_workers=2, context="spawn") as shared:
        assert shared.spec == sync.spec
        one, two = sync.reset(), shared.reset()
        for _ in range(20):
            actions = {
                name: torch.from_numpy(rng.integers(group.action_size, size=(3, group.num_agents)))
                for name, group in sync.spec.groups.items()
            }
            for name in sync.spec.groups:
                assert torch.equal(one.observation[name], two.observation[name])
            assert torch.equal(one.state, two.state)
            first, second = sync.step(actions), shared.step(actions)
            assert torch.equal(first.truncated, second.truncated)
            for name in sync.spec.groups:
                assert torch.equal(first.reward[name], second.reward[name])
            one, two = first.observations, second.observations


def test_pictures():
    env = make("battle_v4", map_size=16, render_mode="rgb_array")
    env.reset(seed=0)
    picture = env.render()
    assert picture.dtype == np.uint8
    assert picture.shape == (16 * 8 + 16, 16 * 8, 3)
    assert len(np.unique(picture)) > 2
    env.close()
    env.close()
    with pytest.raises(NotImplementedError, match="rgb_array"):
        make("battle_v4").render()


def test_scenarios():
    assert scenarios() == tuple(GAMES)
    with pytest.raises(ValueError, match=r"battle_v3.*choose one of adversarial_pursuit_v4"):
        make("battle_v3")
    with pytest.raises(ValueError, match="max_cycles must be at least 1"):
        make("battle_v4", max_cycles=0)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "magent2.environments", None)
    with pytest.raises(ImportError, match=r'pip install "marl-lightning\[magent2\]"'):
        scenarios()
