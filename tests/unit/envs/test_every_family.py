"""Every registered family: its games reset, make random legal steps many at once, and keep the contract."""

import pytest
import torch

from marl_lightning.envs import check_env, make_vector_env
from marl_lightning.envs.registry import registered_families

STEPS = 200
ELSEWHERE = {"smaclite", "starcraft2", "smacv2"}
"""Families whose packages are no wheels; they are tested against stand-ins in files of their own."""

GAMES = (
    ("gymnasium/CartPole-v1", {}, STEPS),
    ("gymnasium/Pendulum-v1", {}, STEPS),
    ("lbf/Foraging-2s-8x8-2p-2f-coop-v3", {}, STEPS),
    ("lbf/Foraging-8x8-2p-2f-v3", {"backend": "package"}, STEPS),
    ("lle/level1", {}, STEPS),
    ("lle/level6", {"obs_type": "flattened"}, STEPS),
    ("magent2/battlefield_v5", {"max_cycles": 30, "with_state": False}, 100),
    ("magent2/tiger_deer_v4", {"max_cycles": 30}, 60),
    ("mamujoco/HalfCheetah-6x1", {"episode_limit": 40}, STEPS),
    ("mamujoco/Swimmer-2x1", {"episode_limit": 40}, STEPS),
    ("matrix/climbing", {}, STEPS),
    ("mpe/simple_speaker_listener_v4", {}, STEPS),
    ("mpe/simple_tag_v3", {"continuous_actions": True}, STEPS),
    ("mpe/simple_line_v1", {}, STEPS),
    ("openspiel/kuhn_poker", {}, STEPS),
    ("openspiel/matrix_pd", {}, STEPS),
    ("openspiel/goofspiel(imp_info=True,num_cards=4,players=3)", {}, STEPS),
    ("pettingzoo/butterfly/pistonball_v6", {"n_pistons": 3, "max_cycles": 8, "with_state": False}, 20),
    ("pettingzoo/classic/leduc_holdem_v4", {}, STEPS),
    ("pettingzoo/classic/tictactoe_v3", {}, STEPS),
    ("pettingzoo/sisl/multiwalker_v9", {"max_cycles": 60}, STEPS),
    ("rware/rware-tiny-2ag-v2", {"max_steps": 60}, STEPS),
    ("rware/rware-tiny-2ag-v2", {"backend": "package", "max_steps": 20}, 60),
    ("smac/2s3z", {}, STEPS),
    ("vmas/balance", {"max_steps": 40}, STEPS),
    ("vmas/navigation", {"continuous_actions": False, "max_steps": 40}, 60),
)
"""Name, arguments, and steps: fewer for games that take long."""


def test_no_family_is_forgotten():
    tested = {name.partition("/")[0] for name, _, _ in GAMES}
    assert tested | ELSEWHERE == registered_families().keys()


@pytest.mark.parametrize(("name", "kwargs", "steps"), GAMES, ids=[name for name, _, _ in GAMES])
def test_random_legal_steps(name, kwargs, steps):
    family_name, _, scenario = name.partition("/")
    family = registered_families()[family_name]
    try:
        family.names()
        batched = family.is_batched(scenario, kwargs.get("backend"))
        env = make_vector_env(name, num_envs=2, seed=3, **kwargs, **({} if batched else {"vectorization": "sync"}))
    except ImportError as error:
        pytest.skip(str(error))
    with env:
        generator = torch.Generator().manual_seed(0)
        observations, episodes = env.reset(), 0
        for _ in range(steps):
            step = env.step(legal_actions(env.spec, observations, generator))
            observations = step.observations
            assert all(reward.isfinite().all() for reward in step.reward.values())
            episodes += int((step.terminated | step.truncated).sum())
        limit = env.spec.episode_limit
        assert limit is None or episodes >= 2 * (steps // limit)
        check_env(env, steps=min(steps, 60))


def legal_actions(spec, observations, generator):
    """Draws uniformly among the legal actions of every part, and within the bounds of continuous ones."""
    actions = {}
    for name, group in spec.groups.items():
        alive = observations.alive[name]
        if group.is_discrete:
            parts = observations.action_mask[name].float().split(group.action_parts, dim=-1)
            drawn = [torch.multinomial(part.flatten(0, 1), 1, generator=generator) for part in parts]
            actions[name] = torch.cat(drawn, -1).reshape(*alive.shape, *group.action_shape)
        else:
            low, high = torch.from_numpy(group.action_space.low), torch.from_numpy(group.action_space.high)
            share = torch.rand(*alive.shape, group.action_size, generator=generator)
            actions[name] = (low + (high - low) * share).float()
    return actions
