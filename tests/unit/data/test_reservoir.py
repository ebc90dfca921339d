"""Reservoirs against a brute-force reading of algorithm R, and against what uniform samples are."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from marl_lightning.data.reservoir import Reservoir


def numbered(first, count, agents):
    """Items ``first, first + 1, ...`` of each agent, who are told apart by a second number."""
    number = torch.arange(first, first + count)
    return {
        "number": number.unsqueeze(-1).expand(count, agents),
        "pair": torch.stack(torch.meshgrid(number, torch.arange(agents), indexing="ij"), -1).float(),
    }


def held(reservoir, agent):
    size = int(reservoir.size[agent])
    return reservoir.state_dict()["items"]["number"][agent, :size].tolist() if size else []


def fill(*, capacity, items, seed, chunk=50, agents=1):
    reservoir = Reservoir(capacity=capacity, num_agents=agents, seed=seed)
    for first in range(0, items, chunk):
        count = min(chunk, items - first)
        reservoir.add(numbered(first, count, agents), torch.ones(count, agents, dtype=torch.bool))
    return reservoir


class BruteForce:
    """Algorithm R as it is written down, item after item, with the draws of the reservoir."""

    def __init__(self, capacity, agents, seed):
        self.capacity, self.lists, self.seen = capacity, [[] for _ in range(agents)], [0] * agents
        self.generator = torch.Generator().manual_seed(seed)

    def add(self, items, chosen):
        draws = torch.rand(chosen.shape, dtype=torch.float64, generator=self.generator).tolist()
        for row, flags in enumerate(chosen.tolist()):
            for agent, is_chosen in enumerate(flags):
                if not is_chosen:
                    continue
                self.seen[agent] += 1
                item, mine = items["number"][row, agent].item(), self.lists[agent]
                place = int(draws[row][agent] * self.seen[agent])
                if len(mine) < self.capacity:
                    mine.append(item)
                elif place < self.capacity:
                    mine[place] = item


@settings(max_examples=60, deadline=None)
@given(
    capacity=st.integers(1, 6),
    agents=st.integers(1, 3),
    calls=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 2**31)), min_size=1, max_size=6),
)
def test_it_is_algorithm_r(capacity, agents, calls):
    """Several items of one call may go to the same place, and not all agents are offered something."""
    reservoir, oracle = Reservoir(capacity=capacity, num_agents=agents, seed=3), BruteForce(capacity, agents, 3)
    first = 0
    for count, seed in calls:
        chosen = torch.rand(count, agents, generator=torch.Generator().manual_seed(seed)) < 0.7
        for each in (reservoir, oracle):
            each.add(numbered(first, count, agents), chosen)
        first += count
    assert reservoir.seen.tolist() == oracle.seen
    for agent in range(agents):
        assert held(reservoir, agent) == oracle.lists[agent]


@pytest.mark.parametrize(("items", "size"), [(0, 0), (3, 3), (7, 7), (8, 7), (500, 7)])
def test_the_capacity_is_exact(items, size):
    reservoir = fill(capacity=7, items=items, seed=0)
    assert reservoir.size.tolist() == [size]
    assert len(set(held(reservoir, 0))) == size
    assert held(reservoir, 0) == list(range(items)) or items > 7


def test_items_of_all_times_are_held_equally_often():
    """200 items, of which 20 are held, 600 times: also those of the last call, and the first ones."""
    counts = np.zeros(200)
    for seed in range(600):
        np.add.at(counts, held(fill(capacity=20, items=200, seed=seed), 0), 1)
    assert counts.sum() == 20 * 600
    # Counts of a sample without replacement are less scattered than independent ones, by the part that is not held.
    statistic = ((counts - 60) ** 2 / 60).sum() / 0.9
    assert stats.chi2.cdf(statistic, 199) < 0.999
    assert stats.chi2.cdf(statistic, 199) > 0.001


def test_draws_are_uniform_and_stay_with_their_agent():
    reservoir = Reservoir(capacity=5, num_agents=2, seed=1)
    reservoir.add(numbered(10, 3, 2), torch.tensor([[True, False], [True, True], [True, False]]))
    drawn = reservoir.sample(6000)
    assert drawn["pair"].shape == (6000, 2, 2)
    assert torch.equal(drawn["pair"][..., 0].long(), drawn["number"])
    assert torch.equal(drawn["pair"][..., 1], torch.tensor([0.0, 1.0]).expand(6000, 2))
    assert drawn["number"][:, 1].unique().tolist() == [11]
    counts = drawn["number"][:, 0].bincount(minlength=13)[10:]
    assert stats.chisquare(counts.numpy()).pvalue > 0.001


def test_an_agent_without_items_gets_zeros():
    reservoir = Reservoir(capacity=5, num_agents=2, seed=1)
    reservoir.add(numbered(10, 3, 2), torch.tensor([[True, False]] * 3))
    assert reservoir.size.tolist() == [3, 0]
    assert not reservoir.sample(9)["pair"][:, 1].any()


def test_types_are_kept():
    reservoir = Reservoir(capacity=2, num_agents=1, seed=0)
    items = {"image": torch.full((1, 1, 4, 4), 255, dtype=torch.uint8), "mask": torch.ones(1, 1, 3, dtype=torch.bool)}
    reservoir.add(items, torch.ones(1, 1, dtype=torch.bool))
    drawn = reservoir.sample(2)
    assert {name: (item.dtype, item.shape) for name, item in drawn.items()} == {
        "image": (torch.uint8, (2, 1, 4, 4)),
        "mask": (torch.bool, (2, 1, 3)),
    }
    assert drawn["image"].eq(255).all()


@pytest.mark.parametrize("items", [0, 4, 30])
def test_a_restored_one_goes_on_like_the_first(items):
    first = fill(capacity=8, items=items, seed=5, agents=2)
    saved = first.state_dict()
    second = Reservoir(capacity=8, num_agents=2, seed=6)
    second.load_state_dict(saved)
    for reservoir in (first, second):  # what was saved does not change with the first
        reservoir.add(numbered(100, 40, 2), torch.ones(40, 2, dtype=torch.bool))
    assert second.seen.tolist() == first.seen.tolist() == [items + 40] * 2
    assert saved["seen"].tolist() == [items] * 2
    for mine, theirs in zip(second.sample(50).values(), first.sample(50).values(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_saved_state_is_no_view_and_as_large_as_what_is_held():
    reservoir = fill(capacity=1000, items=4, seed=0)
    saved = reservoir.state_dict()
    assert saved["items"]["number"].shape == (1, 4)
    assert saved["items"]["number"].untyped_storage().nbytes() == 4 * 8
    reservoir.add(numbered(50, 2000, 1), torch.ones(2000, 1, dtype=torch.bool))
    assert saved["seen"].tolist() == [4]


@pytest.mark.parametrize(("capacity", "agents", "message"), [(6, 1, "capacity"), (9, 1, "capacity"), (8, 2, "agents")])
def test_a_state_that_does_not_fit_is_refused(capacity, agents, message):
    saved = fill(capacity=8, items=20, seed=0).state_dict()
    with pytest.raises(ValueError, match=message):
        Reservoir(capacity=capacity, num_agents=agents, seed=0).load_state_dict(saved)
