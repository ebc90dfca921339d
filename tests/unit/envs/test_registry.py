"""Names, recipes and error messages of make_env and make_vector_env."""

import importlib.util
import subprocess
import sys

import numpy as np
import pytest
from scripted import CounterGame, LeavingGame

from marl_lightning.envs import (
    PettingZooAdapter,
    SharedMemoryVectorEnv,
    SyncVectorEnv,
    check_env,
    make_env,
    make_vector_env,
    register_family,
    registered_environments,
    registry,
)
from marl_lightning.envs.native.matrix import MatrixVectorEnv


@pytest.fixture
def counter_family():
    register_family("scripted", scenarios=lambda: ["counter"], make=lambda scenario, **kwargs: CounterGame(**kwargs))
    yield
    del registry._FAMILIES["scripted"]


def test_names():
    names = registered_environments()
    assert {"matrix/climbing", "mpe/simple_spread_v3", "mpe/simple_tag_v3"} <= set(names)
    assert list(names) == sorted(names)


def test_native_family_and_its_recipe():
    env = make_vector_env("matrix/penalty", num_envs=3, seed=4, k=-2.0)
    assert isinstance(env, MatrixVectorEnv)
    assert (env.num_envs, env.seed) == (3, 4)
    assert env.recipe == {"name": "matrix/penalty", "kwargs": {"k": -2.0}}
    again = make_vector_env(env.recipe["name"], num_envs=1, **env.recipe["kwargs"])
    assert again.spec == env.spec
    assert again.seed == 0
    assert env.replicate(num_envs=2, seed=0).recipe == env.recipe


def test_package_family_and_its_recipe():
    env = make_vector_env("mpe/simple_spread_v3", num_envs=2, seed=1, N=2, backend="package")
    assert isinstance(env, SyncVectorEnv)
    assert env.spec.groups["agent"].num_agents == 2
    assert env.recipe == {"name": "mpe/simple_spread_v3", "kwargs": {"N": 2, "backend": "package"}}


def test_our_version_of_a_game_is_taken_if_there_is_one():
    for backend, expected in ((None, "embedded"), ("embedded", "embedded"), ("package", "mpe2")):
        with make_vector_env("mpe/simple_tag_v3", num_envs=2, backend=backend) as env:
            assert env.spec.metadata["backend"] == expected
    with make_vector_env("mpe/simple_line_v1", num_envs=2) as env:
        assert env.spec.metadata["backend"] == "mpe2"
    with pytest.raises(ValueError, match="use backend='package'"):
        make_vector_env("mpe/simple_line_v1", num_envs=2, backend="embedded")
    with pytest.raises(ValueError, match="backend must be"):
        make_vector_env("mpe/simple_tag_v3", num_envs=2, backend="pakage")


def test_functions_have_no_recipe():
    def parallel():
        return LeavingGame({"a_0": (1, "terminated")})

    assert isinstance(make_env(parallel), PettingZooAdapter)
    assert isinstance(make_env(CounterGame), CounterGame)
    for function in (parallel, CounterGame):
        env = make_vector_env(function, num_envs=2)
        assert env.recipe is None
        assert env.num_envs == 2
    with pytest.raises(ValueError, match=r"arguments \['length'\] go with a name only"):
        make_env(CounterGame, length=2)


def test_functions_may_return_games_with_turns():
    tictactoe = pytest.importorskip("pettingzoo.classic.tictactoe_v3")
    with make_vector_env(tictactoe.env, num_envs=2) as env:
        assert env.spec.groups["player"].action_size == 10
        check_env(env, steps=30)


def test_arguments_that_no_checkpoint_can_hold_leave_no_recipe(counter_family):
    # A checkpoint with such a recipe could be written, but not be read again.
    with make_vector_env("scripted/counter", num_envs=1, length=np.int64(9)) as env:
        assert env.recipe is None
    with make_vector_env("scripted/counter", num_envs=1, length=9) as env:
        assert env.recipe is not None


def test_instances_of_a_function_are_distinct():
    games = []

    def factory():
        games.append(CounterGame())
        return games[-1]

    make_vector_env(factory, num_envs=3)
    assert len({id(game) for game in games}) == 3


def test_registered_family(counter_family):
    assert "scripted/counter" in registered_environments()
    assert make_env("scripted/counter", length=9).length == 9
    assert make_vector_env("scripted/counter", num_envs=2, length=9).spec.episode_limit == 9
    with pytest.raises(ValueError, match="new name"):
        register_family("scripted", scenarios=list, make=CounterGame)


def test_a_family_has_a_maker():
    with pytest.raises(ValueError, match="give make, make_vector or both"):
        register_family("other", scenarios=list)


@pytest.mark.parametrize("vectorization", ["auto", "sync", "shared_memory"])
def test_vectorization(counter_family, monkeypatch, vectorization):
    monkeypatch.setattr("marl_lightning.envs.vector.shared_memory.usable_cores", lambda: 2)
    kinds = {"auto": SharedMemoryVectorEnv, "sync": SyncVectorEnv, "shared_memory": SharedMemoryVectorEnv}
    with make_vector_env("scripted/counter", num_envs=4, vectorization=vectorization, length=9) as env:
        assert isinstance(env, kinds[vectorization])
        chosen = {} if vectorization == "auto" else {"vectorization": vectorization}
        assert env.recipe == {"name": "scripted/counter", "kwargs": {"length": 9, **chosen}}
        with make_vector_env(env.recipe["name"], num_envs=4, **env.recipe["kwargs"]) as again:
            assert type(again) is type(env)


@pytest.mark.parametrize(
    ("cores", "num_envs", "name"),
    [(1, 4, "scripted/counter"), (2, 3, "scripted/counter"), (2, 4, "gymnasium/CartPole-v1"), (2, 4, CounterGame)],
)
def test_no_processes_where_they_do_not_pay(counter_family, monkeypatch, cores, num_envs, name):
    monkeypatch.setattr("marl_lightning.envs.vector.shared_memory.usable_cores", lambda: cores)
    with make_vector_env(name, num_envs=num_envs) as env:
        assert isinstance(env, SyncVectorEnv)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("matrix/climbing", {"vectorization": "sync"}, "all instances at once"),
        ("matrix/climbing", {"num_workers": 2}, "all instances at once"),
        ("scripted/counter", {"vectorization": "parallel"}, "must be one of"),
        ("scripted/counter", {"vectorization": "sync", "num_workers": 2}, "num_workers=2 needs"),
    ],
)
def test_wrong_vectorization(counter_family, name, settings, message):
    with pytest.raises(ValueError, match=message):
        make_vector_env(name, num_envs=2, **settings)


def test_names_that_are_not_listed():
    with make_vector_env("openspiel/kuhn_poker(players=3)", num_envs=1) as env:
        assert env.spec.num_agents == 3
    for name, message in (
        ("openspiel/kuhn_pokr", "kuhn_poker"),
        ("pettingzoo/sisl/waterworld_v4", "gone|no longer|removed"),
        ("mamujoco/Ant-p2x4", "Ant-2x4"),
    ):
        with pytest.raises(ValueError, match=message):
            make_env(name)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("matrix/climbin", "matrix/climbing"),
        ("matrices/climbing", "matrix/climbing"),
        ("mpe/simple_tag", "mpe/simple_tag_v3"),
        ("climbing", None),
        ("", None),
    ],
)
@pytest.mark.parametrize("make", [make_env, lambda name: make_vector_env(name, num_envs=1)], ids=["one", "vector"])
def test_unknown_names(make, name, nearest):
    with pytest.raises(ValueError, match=rf"unknown environment {name!r} \(families: .*matrix, mpe, .*\)") as caught:
        make(name)
    assert nearest is None or nearest in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpe2.simple_spread_v3", None)
    with pytest.raises(ImportError, match=r'pip install "marl-lightning\[mpe\]"'):
        make_env("mpe/simple_spread_v3", backend="package")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "mpe2" else find_spec(name))
    assert "mpe/simple_spread_v3" in registered_environments()  # ours
    assert "mpe/simple_line_v1" not in registered_environments()


def test_num_envs_is_checked():
    with pytest.raises(ValueError, match="num_envs must be at least 1, got 0"):
        make_vector_env("matrix/climbing", num_envs=0)


@pytest.mark.parametrize(
    "code",
    [
        "import marl_lightning.envs.spec, marl_lightning.envs.base",
        "from marl_lightning.envs import make_env, check_env; check_env(make_env('gymnasium/CartPole-v1'), steps=30)",
    ],
    ids=["contracts", "one instance of a package game"],
)
def test_workers_stay_free_of_torch(code):
    check = "; import sys; assert not {'torch', 'lightning'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code + check], check=True, timeout=60)


def test_unknown_attribute_of_the_package():
    import marl_lightning.envs

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = marl_lightning.envs.nothing
