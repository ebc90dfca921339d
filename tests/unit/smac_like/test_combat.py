"""Weapons, shields, decisions and motion, against numbers computed by hand."""

import math

import numpy as np
import pytest
from smac_helpers import Battle

from marl_lightning.envs.native.smac.kernel import ATTACK_MOVE, EAST, FIRST_ATTACK, IDLE, NO_OP, NORTH, SOUTH, STOP


def duel(map_name, ally, enemy, *, distance, **options):
    """Returns a battle of one agent and one enemy who does not fight."""
    battle = Battle(map_name, **options).only(ally, enemy).pacify()
    return battle.put(ally, x=12, y=16).put(enemy, x=12 + distance, y=16)


# -------- damage


def test_marine_kills_marine_with_eight_shots():
    battle = duel("3m", 0, 3, distance=3.0)
    health = []
    for _ in range(9):
        step = battle.step(FIRST_ATTACK)
        health.append(battle.layout.enemies[0].health - 6 * math.ceil(8 * (len(health) + 1) / 10))
        if not step.terminated[0]:
            # 0.61 s are 9.76 ticks: a shot every ten ticks, at ticks 0, 10, 20 …
            assert battle.get("health", 3) == health[-1]
    assert step.terminated[0]
    assert step.info["battle_won"][0] == 1


def test_shot_tables():
    battle = Battle("2s3z")
    stalker, zealot, enemy_stalker, enemy_zealot = 0, 2, 5, 7
    damage, wounds = battle.constants.shot_damage, battle.constants.shot_wounds
    assert damage[stalker, enemy_stalker] == 18  # 13 and 5 against armored
    assert wounds[stalker, enemy_stalker] == 17
    assert damage[stalker, enemy_zealot] == 13
    assert wounds[stalker, enemy_zealot] == 12
    assert damage[zealot, enemy_stalker] == 16  # two hits of 8
    assert wounds[zealot, enemy_stalker] == 14  # armor counts twice
    marines = Battle("2m_vs_1z")
    assert marines.constants.shot_damage[0, 2] == 6
    assert marines.constants.shot_wounds[0, 2] == 5
    assert marines.constants.shot_wounds[2, 0] == 16


def test_shield_takes_damage_without_armor_first():
    battle = duel("2s3z", 0, 7, distance=4.0)
    battle.step(FIRST_ATTACK + 2)
    assert battle.get("shield", 7) == 50 - 13
    assert battle.get("health", 7) == 100


def test_breaking_shield_lets_the_rest_of_the_shot_through():
    battle = duel("2s3z", 0, 7, distance=4.0).put(7, shield=5, shield_wait=100)
    step = battle.step(FIRST_ATTACK + 2)
    assert battle.get("shield", 7) == 0
    # 8 of 13 points pass, each worth 12 / 13 after armor.
    assert battle.get("health", 7) == pytest.approx(100 - 12 * 8 / 13)
    assert step.info["damage_dealt"][0] == pytest.approx(5 + 12 * 8 / 13)


def test_shield_regenerates_after_ten_normal_seconds():
    battle = duel("2s3z", 0, 7, distance=4.0)
    battle.step(FIRST_ATTACK + 2)  # hit at tick 0
    for _ in range(19):
        battle.step(STOP)
    assert battle.get("shield", 7) == 37
    battle.step(STOP)  # ticks 160 to 167 after the hit
    assert battle.get("shield", 7) == 38
    battle.put(7, shield=49.9).step(STOP)
    assert battle.get("shield", 7) == 50


def test_damage_of_a_tick_is_simultaneous():
    battle = Battle("3m").only(0, 3).put(0, x=12, y=16, health=6).put(3, x=15, y=16, health=6)
    step = battle.step(FIRST_ATTACK)
    assert step.terminated[0]
    assert step.info["battle_won"][0] == 0
    assert step.info["dead_allies"][0] == step.info["dead_enemies"][0] == 3


def test_several_shots_in_a_tick_add_up():
    battle = Battle("3m", ticks=1).only(0, 1, 2, 3).pacify().put(3, x=15, y=16)
    for agent in range(3):
        battle.put(agent, x=12, y=15 + agent)
    battle.step(*[FIRST_ATTACK] * 3)
    assert battle.get("health", 3) == 45 - 18


def test_overkill_is_not_dealt():
    step = duel("3m", 0, 3, distance=3.0).put(4, health=45, x=31, y=23).put(3, health=2).step(FIRST_ATTACK)
    assert step.info["damage_dealt"][0] == 2


def test_random_weapon_delay_of_sc2_is_between_minus_one_and_two_ticks():
    battle = duel("3m", 0, 3, distance=3.0, physics="sc2", ticks=1)
    delays = []
    for _ in range(300):
        battle.put(0, cooldown=0).put(3, health=45)
        battle.state.time[0] = len(delays) % 50
        battle.state.episode[0] = len(delays)
        battle.step(FIRST_ATTACK)
        delays.append(battle.get("cooldown", 0) - 0.61 * 22.4)
    assert -1 <= min(delays) < -0.9
    assert 1.9 < max(delays) <= 2
    assert np.mean(delays) == pytest.approx(0.5, abs=0.15)


def test_stopped_agents_do_not_shoot():
    battle = duel("3m", 0, 3, distance=3.0)
    for _ in range(5):
        battle.step(STOP)
    assert battle.get("health", 3) == 45


def test_agent_whose_target_died_becomes_idle():
    battle = duel("3m", 0, 3, distance=3.0).put(4, health=45, x=31, y=23).put(3, health=6)
    battle.step(FIRST_ATTACK)
    assert battle.get("order", 0) == IDLE
    assert battle.get("target", 0) == -1


# -------- enemies


def test_enemy_without_target_goes_to_the_attack_point():
    battle = Battle("3m").only(0, 3).put(0, x=2, y=16).put(3, x=23, y=16)
    battle.step(STOP)
    assert battle.get("target", 3) == -1
    # 3.15 per second, 16 ticks a second, 8 ticks
    assert battle.get("x", 3) == pytest.approx(23 - 3.15 / 2, abs=1e-4)
    assert battle.get("y", 3) == 16


def test_enemy_acquires_the_nearest_agent_in_scan_range():
    battle = Battle("3m", ticks=1).only(0, 1, 3).put(3, x=20, y=16)
    battle.put(0, x=16, y=16).put(1, x=20, y=19)
    battle.step()
    assert battle.get("target", 3) == 1


@pytest.mark.parametrize(
    ("physics", "distance", "noticed"),
    [
        ("smaclite", 5.37, True),  # 5 from its centre to the agent's circle
        ("smaclite", 5.38, False),
        ("sc2", 5.74, True),  # 5 from circle to circle
        ("sc2", 5.76, False),
    ],
)
def test_scan_range(physics, distance, noticed):
    battle = Battle("3m", ticks=1, physics=physics).only(0, 3).put(3, x=20, y=16).put(0, x=20 - distance, y=16)
    battle.step()
    assert (battle.get("target", 3) == 0) == noticed


def test_enemy_retaliates_against_an_attacker_that_it_does_not_notice():
    battle = Battle("3m", ticks=1).only(0, 3).put(3, x=20, y=16).put(0, x=14.05, y=16)
    battle.step(FIRST_ATTACK)
    assert battle.get("target", 3) == 0


def test_enemy_prefers_noticed_agents_to_attackers_that_it_does_not_notice():
    battle = Battle("3m", ticks=1).only(0, 1, 3).put(3, x=20, y=16).put(0, x=14.05, y=16).put(1, x=20, y=11)
    battle.step(FIRST_ATTACK, STOP)
    assert battle.get("target", 3) == 1


def test_enemy_keeps_a_target_in_weapon_range():
    battle = Battle("3m", ticks=1).only(0, 1, 3).put(3, x=20, y=16, target=0).put(0, x=16, y=16).put(1, x=20, y=18)
    battle.step()
    assert battle.get("target", 3) == 0


def test_enemy_leaves_a_target_out_of_range_for_a_nearer_one_unless_it_is_attacked():
    def battle_of_two():
        battle = Battle("3m", ticks=1).only(0, 1, 3).put(3, x=20, y=16, target=0)
        return battle.put(0, x=14.1, y=16).put(1, x=20, y=18)

    battle = battle_of_two()
    battle.step(STOP, STOP)
    assert battle.get("target", 3) == 1
    battle = battle_of_two()
    battle.step(FIRST_ATTACK, STOP)
    assert battle.get("target", 3) == 0


def test_enemy_of_2m_vs_1z_hunts_at_any_distance():
    battle = Battle("2m_vs_1z")
    battle.step()
    assert battle.get("target", 2) in (0, 1)
    assert battle.get("y", 2) < 19


# -------- motion


def test_move_distance_of_both_clocks():
    for physics, ticks_per_second in (("sc2", 22.4), ("smaclite", 16)):
        battle = duel("3m", 0, 3, distance=15, physics=physics)
        battle.step(NORTH)
        assert battle.get("y", 0) == pytest.approx(16 + 8 * 3.15 / ticks_per_second, abs=1e-4)
        assert battle.get("x", 0) == 12


def test_units_stay_on_pathable_cells():
    battle = duel("3m", 0, 3, distance=15).put(0, y=22.9)
    battle.step(NORTH)
    assert 23 < battle.get("y", 0) < 24
    battle.step(NORTH)  # illegal now
    assert battle.get("y", 0) < 24


def test_mover_slides_around_a_standing_unit():
    battle = Battle("3m").only(0, 1, 3).pacify().put(0, x=10, y=16).put(1, x=11, y=16).put(3, x=30, y=9)
    gap = np.inf
    for _ in range(3):
        battle.step(EAST, STOP)
        gap = min(gap, math.hypot(battle.get("x", 0) - 11, battle.get("y", 0) - 16))
    assert battle.get("x", 0) > 12
    assert gap > 0.75 - 0.01
    assert (battle.get("x", 1), battle.get("y", 1)) == (11, 16), "standing units are never displaced"


@pytest.mark.parametrize(("collision", "least", "most"), [("slide", 4.5, 5.0), ("separate", 2.0, 4.0)])
def test_melee_units_wrap_around_their_target(collision, least, most):
    """Five zealots (more would fit) from random places on one side of a stalker that neither shoots nor dies."""
    rng = np.random.default_rng(0)
    reached = []
    for _ in range(12):
        battle = Battle("3s5z", collision=collision).only(3, 4, 5, 6, 7, 8).pacify().put(8, x=16, y=16)
        for agent in range(3, 8):
            battle.put(agent, x=rng.uniform(10, 13), y=rng.uniform(14, 18))
        for _ in range(40):
            battle.put(8, health=80, shield=80)
            battle.step(NO_OP, NO_OP, NO_OP, *[FIRST_ATTACK] * 5)
        gaps = [math.hypot(battle.get("x", i) - 16, battle.get("y", i) - 16) - 0.5 - 0.625 - 0.1 for i in range(3, 8)]
        reached.append(sum(gap <= 1e-4 for gap in gaps))
    assert least <= np.mean(reached) <= most


def test_mover_is_stuck_behind_a_standing_unit_without_sliding_and_passes_without_collision():
    for collision, low, high in (("separate", 10.2, 10.3), ("none", 14.0, 15.0)):
        battle = Battle("3m", collision=collision).only(0, 1, 3).pacify()
        battle.put(0, x=10, y=16).put(1, x=11, y=16).put(3, x=30, y=9)
        for _ in range(3):
            battle.step(EAST, STOP)
        assert low <= battle.get("x", 0) <= high


def test_overlapping_movers_share_the_separation():
    battle = Battle("3m", ticks=1).only(0, 1, 3).pacify().put(0, x=10, y=16).put(1, x=10.35, y=16).put(3, x=30, y=9)
    battle.step(NORTH, NORTH)
    assert battle.get("x", 1) - battle.get("x", 0) == pytest.approx(0.75, abs=1e-5)
    assert battle.get("x", 0) == pytest.approx(9.8, abs=1e-5)


def test_units_at_the_same_point_come_apart():
    battle = Battle("3m", ticks=1).only(0, 1, 3).pacify().put(0, x=10, y=16).put(1, x=10, y=16).put(3, x=30, y=9)
    battle.step(SOUTH, SOUTH)
    assert battle.get("x", 1) - battle.get("x", 0) == pytest.approx(0.75, abs=1e-5)


@pytest.mark.parametrize("collision", ["slide", "separate", "none"])
def test_melee_unit_comes_into_contact_with_its_target_but_not_closer(collision):
    battle = duel("2s3z", 2, 5, distance=3.0, collision=collision)
    for _ in range(3):
        battle.step(STOP, STOP, FIRST_ATTACK)
    gap = battle.get("x", 5) - battle.get("x", 2) - 0.5 - 0.625
    assert -1e-5 <= gap <= 0.1 + 1e-5
    assert battle.get("shield", 5) < 80


def test_enemies_fight_under_attack_move_from_the_start():
    battle = Battle("3m")
    assert (battle.state.order[0, 3:] == ATTACK_MOVE).all()
    assert (battle.state.order[0, :3] == IDLE).all()
