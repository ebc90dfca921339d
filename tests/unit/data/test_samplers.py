"""The ring of streams and its samplers against brute force over lists of records."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from marl_lightning.data.samplers import (
    NONE,
    EpisodeWindows,
    Priorities,
    Sampler,
    SequenceWindows,
    StreamIndex,
)


@dataclass
class Record:
    stream: int
    seq: int
    is_first: bool
    done: bool


class BruteForce:
    """A list of the last ``capacity`` records, searched anew for every question."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.records: list[Record] = []
        self.closed: set[int] = set()

    def insert(self, record):
        self.records = [*self.records, record][-self.capacity :]

    def find(self, stream, seq):
        return next((r for r in self.records if (r.stream, r.seq) == (stream, seq)), None)

    def run(self, record, step):
        """Returns the neighbours that follow without a gap in one direction, nearest first."""
        found, seq = [], record.seq + step
        while (neighbour := self.find(record.stream, seq)) is not None:
            found.append(neighbour)
            seq += step
        return found

    def window(self, record, length, burn_in, allow_short):
        """Returns the records of a window, ``None`` for padding, or ``None`` if none may start here."""
        before, after = self.run(record, -1), self.run(record, 1)
        has_start = record.is_first or any(r.is_first for r in before)
        if len(before) < burn_in and not has_start:
            return None
        short = allow_short and record.stream in self.closed and record.seq == 0
        if len(after) < length - 1 and not short:
            return None
        left = before[:burn_in][::-1]
        right = [record, *after][:length]
        return [None] * (burn_in - len(left)) + left + right + [None] * (length - len(right))

    def episode(self, record):
        if not record.is_first:
            return None
        steps = [record]
        while not steps[-1].done:
            following = self.find(record.stream, steps[-1].seq + 1)
            if following is None:
                return None
            steps.append(following)
        return steps


@st.composite
def histories(draw):
    """A ring and what was inserted into it: factual streams in blocks, now and then a short one that is closed."""
    capacity = draw(st.integers(1, 40))
    index, brute = StreamIndex(capacity), BruteForce(capacity)
    factual = index.open(draw(st.integers(1, 4)))
    seq, fresh = Counter(), {int(stream): draw(st.booleans()) for stream in factual}
    slots_of = {}
    for _ in range(draw(st.integers(1, 5))):
        if draw(st.integers(0, 3)) == 0:
            streams, length = index.open(1), draw(st.integers(1, 6))
            fresh[int(streams[0])] = True
        else:
            streams, length = factual, draw(st.integers(1, 8))
        is_first, done = np.zeros((length, len(streams)), bool), np.zeros((length, len(streams)), bool)
        for t in range(length):
            for i, stream in enumerate(streams.tolist()):
                is_first[t, i] = fresh[stream]
                fresh[stream] = done[t, i] = draw(st.integers(0, 3)) == 0
        slots = index.insert(streams, is_first, done)
        assert slots.shape == is_first.shape
        for t in range(length):
            for i, stream in enumerate(streams.tolist()):
                brute.insert(Record(stream, seq[stream], bool(is_first[t, i]), bool(done[t, i])))
                slots_of[stream, seq[stream]] = slots[t, i]
                seq[stream] += 1
        if streams is not factual:
            index.close(streams)
            brute.closed.add(int(streams[0]))
    return index, brute, slots_of


@settings(max_examples=200, deadline=None)
@given(histories())
def test_the_newest_records_are_kept(history):
    index, brute, slots_of = history
    assert index.size == len(brute.records)
    slots = [slots_of[record.stream, record.seq] for record in brute.records]
    assert sorted(slots) == list(range(index.size))
    for record, slot in zip(brute.records, slots, strict=True):
        assert (index.stream[slot], index.seq[slot]) == (record.stream, record.seq)
        assert index.left()[slot] == len(brute.run(record, -1))
        assert index.right()[slot] == len(brute.run(record, 1))


@settings(max_examples=300, deadline=None)
@given(histories(), st.integers(1, 6), st.integers(0, 5), st.booleans())
def test_sequences_are_those_of_brute_force(history, length, burn_in, allow_short):
    index, brute, slots_of = history
    windows = SequenceWindows(length=length, burn_in=burn_in, allow_short=allow_short)
    expected = {}
    for record in brute.records:
        window = brute.window(record, length, burn_in, allow_short)
        if window is not None:
            slots = [NONE if r is None else slots_of[r.stream, r.seq] for r in window]
            expected[slots_of[record.stream, record.seq]] = slots
    sampler = Sampler(index=index, windows=windows, generator=torch.Generator().manual_seed(0))
    eligible = sampler.all_eligible()
    assert eligible.tolist() == sorted(expected)
    if not expected:
        assert sampler.sample(3) is None
        return
    slots, mask = windows(index, eligible)
    assert slots.T.tolist() == [expected[start] for start in eligible]
    assert not mask[:burn_in].any()
    assert np.array_equal(mask[burn_in:], slots[burn_in:] != NONE)
    draw = sampler.sample(5)
    assert set(draw.starts.tolist()) <= set(expected)
    assert np.array_equal(draw.slots[burn_in], draw.starts)


@settings(max_examples=200, deadline=None)
@given(histories())
def test_episodes_are_those_of_brute_force(history):
    index, brute, slots_of = history
    expected = {}
    for record in brute.records:
        episode = brute.episode(record)
        if episode is not None:
            expected[slots_of[record.stream, record.seq]] = [slots_of[r.stream, r.seq] for r in episode]
    sampler = Sampler(index=index, windows=EpisodeWindows(), generator=torch.Generator().manual_seed(0))
    assert sampler.all_eligible().tolist() == sorted(expected)
    if expected:
        draw = sampler.sample(4)
        for i, start in enumerate(draw.starts):
            assert draw.slots[draw.mask[:, i], i].tolist() == expected[start]
            assert (draw.slots[~draw.mask[:, i], i] == NONE).all()
        assert draw.mask.any(1).all()  # no longer than the longest


def filled(capacity=100, length=100):
    index = StreamIndex(capacity)
    is_first = np.zeros((length, 1), bool)
    is_first[::10] = True
    index.insert(index.open(1), is_first, np.roll(is_first, -1, axis=0))
    return index


def test_draws_are_uniform_over_places_where_a_window_may_start():
    index = filled()
    windows = SequenceWindows(length=60)  # 41 of 100 places: both ways of drawing are used
    sampler = Sampler(index=index, windows=windows, generator=torch.Generator().manual_seed(1))
    starts = np.concatenate([sampler.sample(100).starts for _ in range(410)])
    counts = np.bincount(starts, minlength=100)
    assert (counts[41:] == 0).all()
    chi_square = ((counts[:41] - 1000) ** 2 / 1000).sum()
    assert chi_square < 73.4  # 99.9 % quantile with 40 degrees of freedom


def test_rare_places_are_found_and_uniform():
    sampler = Sampler(index=filled(), windows=SequenceWindows(length=98), generator=torch.Generator().manual_seed(1))
    counts = np.bincount(np.concatenate([sampler.sample(30).starts for _ in range(100)]))
    assert len(counts) == 3
    assert (abs(counts - 1000) < 130).all()


def test_draws_are_determined_by_the_generator():
    draws = [
        Sampler(index=filled(), windows=SequenceWindows(length=3), generator=torch.Generator().manual_seed(7)).sample(9)
        for _ in range(2)
    ]
    assert np.array_equal(draws[0].slots, draws[1].slots)


def test_priorities_set_the_frequencies_and_weights():
    priorities = Priorities(capacity=4, alpha=0.5, beta=1.0, eta=1.0, epsilon=0.0)
    index = StreamIndex(4)
    slots = index.insert(index.open(1), np.ones((4, 1), bool), np.ones((4, 1), bool))
    generator = torch.Generator().manual_seed(3)
    sampler = Sampler(index=index, windows=SequenceWindows(), generator=generator, priorities=priorities)
    sampler.insert(slots)
    assert priorities.value.tolist() == [1, 1, 1, 1]
    errors = np.array([[0.0, 1.0, -4.0, 9.0]])
    priorities.update(np.arange(4), errors, np.ones((1, 4), bool))
    assert priorities.value.tolist() == [0, 1, 2, 3]  # |error| ** 0.5
    draw = sampler.sample(60_000)
    frequency = np.bincount(draw.starts, minlength=4) / 60_000
    assert np.allclose(frequency, [0, 1 / 6, 2 / 6, 3 / 6], atol=0.01)
    # (N P)^-1 with N P = 4/6, 8/6, 12/6, divided by the largest, 6/4.
    assert np.allclose(draw.weight, np.array([0, 1, 1 / 2, 1 / 3])[draw.starts])
    assert priorities.largest == 3.0


def test_priorities_of_several_blocks():
    priorities = Priorities(capacity=3000, alpha=1.0, epsilon=0.0)
    chosen = np.array([5, 1023, 1024, 2999])
    priorities.update(chosen, np.array([[1.0, 2.0, 3.0, 4.0]]), np.ones((1, 4), bool))
    slots = priorities.draw(20_000, torch.Generator().manual_seed(0))
    counts = Counter(slots.tolist())
    assert [counts[slot] / 20_000 for slot in chosen.tolist()] == pytest.approx([0.1, 0.2, 0.3, 0.4], abs=0.01)
    again = Priorities(capacity=3000)
    again.load_state_dict(priorities.state_dict())
    assert np.array_equal(
        again.draw(50, torch.Generator().manual_seed(1)), priorities.draw(50, torch.Generator().manual_seed(1))
    )


def test_the_priority_of_a_sequence_mixes_maximum_and_mean_of_the_steps_that_count():
    priorities = Priorities(capacity=2, alpha=1.0, eta=0.9, epsilon=0.0)
    error, mask = np.array([[1.0, 5.0], [-3.0, 7.0]]), np.array([[True, True], [True, False]])
    priorities.update(np.array([0, 1]), error, mask)
    assert np.allclose(priorities.value, [0.9 * 3 + 0.1 * 2, 5.0])


def test_priorities_of_rare_places():
    index = filled()
    priorities = Priorities(capacity=100, alpha=1.0, epsilon=0.0)
    generator = torch.Generator().manual_seed(3)
    windows = SequenceWindows(length=99)
    sampler = Sampler(index=index, windows=windows, generator=generator, priorities=priorities)
    sampler.insert(np.arange(100))
    priorities.update(np.array([0, 1]), np.array([[1.0, 3.0]]), np.ones((1, 2), bool))
    starts = np.concatenate([sampler.sample(40).starts for _ in range(100)])
    assert np.bincount(starts).tolist() == pytest.approx([1000, 3000], abs=130)


def test_saved_and_restored():
    index = filled(capacity=30)
    again = StreamIndex(30)
    again.load_state_dict(index.state_dict())
    more = np.zeros((7, 1), bool)
    assert np.array_equal(index.insert(np.array([0]), more, more), again.insert(np.array([0]), more, more))
    for name, value in vars(index).items():
        assert np.array_equal(value, getattr(again, name)), name
    with pytest.raises(ValueError, match="holds 30 records, this one 31"):
        StreamIndex(31).load_state_dict(index.state_dict())


def test_wrong_use():
    with pytest.raises(ValueError, match="capacity"):
        StreamIndex(0)
    with pytest.raises(ValueError, match="length >= 1"):
        SequenceWindows(length=0)
    index, row = StreamIndex(4), np.zeros((1, 2), bool)
    streams = index.open(2)
    with pytest.raises(ValueError, match="differ"):
        index.insert(streams[[0, 0]], row, row)
    with pytest.raises(ValueError, match="open"):
        index.insert(np.array([0, 2]), row, row)
    index.close(streams[:1])
    with pytest.raises(ValueError, match="open"):
        index.insert(streams, row, row)
    assert Sampler(index=index, windows=SequenceWindows(), generator=torch.Generator()).sample(1) is None
