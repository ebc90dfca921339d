"""Which stored env steps a learner sees: bookkeeping of a ring of records in streams, and ways to draw from it.

A *record* is one env step of one instance, kept in a slot of a ring that overwrites its oldest records. A *stream* is a
sequence of records that followed each other: the steps of one instance, over all its episodes, or an imagined
continuation of them. Neighbours are found by stream and never by slot, so that a window can span several collections
and never joins what did not follow on each other.

Nothing here looks at the data itself. All work is done on whole arrays.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

NONE = -1
"""No slot, no stream."""

_BLOCK = 1024  # priorities that are summed up together


class StreamIndex:
    """A ring of ``capacity`` records, each in a stream.

    Records of a stream are numbered 0, 1, 2, ... in the order of their insertion. Since the ring drops the oldest
    record first, those that are left of a stream are always consecutive. Any number of streams may be opened: those
    that are closed and of which nothing is stored any more take no memory.

    Args:
        capacity: number of records, exactly.

    Attributes:
        size: number of records that are stored.
        stream: ``[capacity]`` the stream of each slot, ``NONE`` if it is empty.
        seq: ``[capacity]`` its number in the stream.
        start: ``[capacity]`` number, in the stream, of the last record at or before it that started an episode;
            ``NONE`` if there is none.
        stop: ``[capacity]`` of records that start an episode, the number of its last record; ``NONE`` while it goes on.
        following: ``[capacity]`` the slot of the next record of the stream, ``NONE`` if there is none yet.
        preceding: ``[capacity]`` the slot of the record before; meaningful only if that is still stored.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self.capacity = capacity
        self.size = 0
        self.stream = np.full(capacity, NONE, np.int64)
        self.seq = np.full(capacity, NONE, np.int64)
        self.start = np.full(capacity, NONE, np.int64)
        self.stop = np.full(capacity, NONE, np.int64)
        self.following = np.full(capacity, NONE, np.int64)
        self.preceding = np.full(capacity, NONE, np.int64)
        self._position = 0
        # Every stream that is open or stored has a row of a table: its number, the number of its first stored record,
        # how many there were, the last slot, and the start of its episode. Rows are used again.
        self._row = np.full(capacity, NONE, np.int64)  # of the stream of each slot
        self._row_of: dict[int, int] = {}  # of the open streams
        self._free: list[int] = []
        self._opened = 0
        self._name = np.zeros(0, np.int64)
        self._first = np.zeros(0, np.int64)
        self._count = np.zeros(0, np.int64)
        self._last_slot = np.zeros(0, np.int64)
        self._episode = np.zeros(0, np.int64)
        self._episode_slot = np.zeros(0, np.int64)
        self._closed = np.zeros(0, np.bool_)

    def open(self, count: int) -> np.ndarray:
        """Returns the numbers of ``count`` new streams."""
        if len(self._free) < count:
            self._add_rows(max(count, len(self._count) // 2))
        first = len(self._free) - count
        rows, self._free[first:] = self._free[first:], []
        streams = np.arange(self._opened, self._opened + count)
        self._name[rows], self._first[rows], self._count[rows], self._closed[rows] = streams, 0, 0, False
        self._last_slot[rows] = self._episode[rows] = self._episode_slot[rows] = NONE
        self._row_of.update(zip(streams.tolist(), rows, strict=True))
        self._opened += count
        return streams

    def close(self, streams: np.ndarray) -> None:
        """Says that nothing will be added to these streams."""
        rows = np.array([self._row_of.pop(stream) for stream in streams.tolist()], np.int64)
        self._closed[rows] = True
        self._release(rows)

    def _add_rows(self, count: int) -> None:
        self._free += range(len(self._count), len(self._count) + count)
        for name in ("_name", "_first", "_count", "_last_slot", "_episode", "_episode_slot", "_closed"):
            column = getattr(self, name)
            setattr(self, name, np.append(column, np.zeros(count, column.dtype)))

    def _release(self, rows: np.ndarray) -> None:
        """Gives rows of closed streams away of which nothing is stored."""
        gone = rows[self._closed[rows] & (self._first[rows] == self._count[rows])]
        self._free += np.unique(gone).tolist()

    def insert(self, streams: np.ndarray, is_first: np.ndarray, done: np.ndarray) -> np.ndarray:
        """Adds one record after another to each of several streams.

        Args:
            streams: ``[N]`` different open streams.
            is_first: ``[T, N]`` bool, the record starts an episode.
            done: ``[T, N]`` bool, the record ends one.

        Returns:
            ``[T, N]`` the slots to store the records in. Of more records than fit, the oldest get ``NONE``.

        Raises:
            ValueError: if a stream is unknown, closed or given twice.
        """
        streams = np.asarray(streams)
        if len(np.unique(streams)) != len(streams):
            raise ValueError(f"streams must differ, got {streams.tolist()}")
        if not all(stream in self._row_of for stream in streams.tolist()):
            raise ValueError(f"streams must be open, got {streams.tolist()}")
        table = np.array([self._row_of[stream] for stream in streams.tolist()], np.int64)
        slots = np.empty(is_first.shape, np.int64)
        # Blocks that fit into the ring, so that none overwrites itself: of whole rows, or else parts of one.
        rows, width = max(1, self.capacity // max(1, len(streams))), min(len(streams), self.capacity)
        for row in range(0, len(is_first), rows):
            for column in range(0, len(streams), max(1, width)):
                part = slice(row, row + rows), slice(column, column + width)
                slots[part] = self._insert_block(table[part[1]], is_first[part], done[part])
        if slots.size > self.capacity:
            slots.ravel()[: slots.size - self.capacity] = NONE
        return slots

    def _insert_block(self, rows: np.ndarray, is_first: np.ndarray, done: np.ndarray) -> np.ndarray:
        slots = (self._position + np.arange(is_first.size)).reshape(is_first.shape) % self.capacity
        self._drop(slots.ravel())
        count, before = self._count[rows], self._last_slot[rows]
        seq = count + np.arange(len(slots))[:, None]
        self.stream[slots], self._row[slots], self.seq[slots], self.stop[slots] = self._name[rows], rows, seq, NONE
        self.preceding[slots[0]], self.preceding[slots[1:]] = before, slots[:-1]
        self.following[slots[:-1]], self.following[slots[-1]] = slots[1:], NONE
        # The slot of the record before may be empty, or have been given away by now.
        linked = (before != NONE) & (self._row[before] == rows) & (self.seq[before] == count - 1)
        self.following[before[linked]] = slots[0, linked]
        start = np.maximum(np.maximum.accumulate(np.where(is_first, seq, NONE)), self._episode[rows])
        self.start[slots] = start
        self._stop_episodes(slots, rows, start, seq, done)
        started = np.flatnonzero(start[-1] >= count)
        self._episode_slot[rows[started]] = slots[(start[-1] - count)[started], started]
        self._episode[rows] = start[-1]
        self._last_slot[rows] = slots[-1]
        self._count[rows] = count + len(slots)
        self._position = (self._position + slots.size) % self.capacity
        self.size = min(self.size + slots.size, self.capacity)
        return slots

    def _drop(self, slots: np.ndarray) -> None:
        old = slots[self.stream[slots] != NONE]
        # A stream may lose several records at once: the highest number counts.
        rows = self._row[old]
        np.maximum.at(self._first, rows, self.seq[old] + 1)
        self.stream[old] = self._row[old] = NONE
        self._release(rows)

    def _stop_episodes(
        self, slots: np.ndarray, rows: np.ndarray, start: np.ndarray, seq: np.ndarray, done: np.ndarray
    ) -> None:
        """Writes where episodes stopped to the records that started them, in this block or before, if still stored."""
        row, column = np.nonzero(done)
        first = start[row, column]
        row_of_start = first - seq[0, column]
        here = slots[np.maximum(row_of_start, 0), column]
        first_slot = np.where(row_of_start >= 0, here, self._episode_slot[rows[column]])
        stored = (first != NONE) & (self._row[first_slot] == rows[column]) & (self.seq[first_slot] == first)
        self.stop[first_slot[stored]] = seq[row, column][stored]

    # Distances of all slots; those of empty ones mean nothing --------------------------------------------------------

    def left(self, slots: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Returns how many stored records of the stream come before."""
        return self.seq[slots] - self._first[self._row[slots]]

    def right(self, slots: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Returns how many records of the stream come after."""
        return self._count[self._row[slots]] - 1 - self.seq[slots]

    def knows_start(self, slots: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Returns whether the record at or before it that started its episode is stored."""
        start = self.start[slots]
        return (start != NONE) & (start >= self._first[self._row[slots]])

    def is_closed(self, slots: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Returns whether nothing will be added to the stream."""
        return self._closed[self._row[slots]]

    def window(self, starts: np.ndarray, *, before: int, after: int) -> np.ndarray:
        """Returns the slots from ``before`` records before each of ``starts`` ``[N]`` to ``after - 1`` after them.

        Returns:
            ``[before + after, N]``, ``NONE`` beyond the ends of what is stored of the stream.
        """
        slots = np.empty((before + after, len(starts)), np.int64)
        slots[before] = starts
        for i in range(before - 1, -1, -1):
            slots[i] = self.preceding[slots[i + 1]]
        for i in range(before + 1, before + after):
            slots[i] = self.following[slots[i - 1]]
        # Beyond the ends these are any slots.
        offset = np.arange(-before, after)[:, None]
        slots[(offset < -self.left(starts)) | (offset > self.right(starts))] = NONE
        return slots

    def state_dict(self) -> dict[str, Any]:
        """Returns everything as arrays and numbers."""
        return {name: copy.copy(value) for name, value in vars(self).items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores :meth:`state_dict`. Raises ``ValueError`` if the capacity differs."""
        if state["capacity"] != self.capacity:
            raise ValueError(f"the saved replay holds {state['capacity']} records, this one {self.capacity}")
        for name, value in state.items():
            setattr(self, name, copy.copy(value))


@dataclass(frozen=True, kw_only=True)
class Draw:
    """Sequences to learn from.

    Attributes:
        slots: ``[B + L, N]``, time-major; ``NONE`` is padding.
        mask: ``[B + L, N]`` bool, the steps whose loss counts.
        starts: ``[N]`` the slots that were drawn: of the first step that counts.
        weight: ``[N]`` float32 importance weights, 1 if drawn uniformly.
    """

    slots: np.ndarray
    mask: np.ndarray
    starts: np.ndarray
    weight: np.ndarray


class Windows(Protocol):
    """What is drawn: where a window may start, and which records it consists of."""

    def eligible(self, index: StreamIndex, slots: np.ndarray) -> np.ndarray:
        """Returns ``[N]`` bool, whether a window may start at each of the slots, which hold records."""

    def __call__(self, index: StreamIndex, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns ``slots`` and ``mask`` of a :class:`Draw`."""


@dataclass(frozen=True, kw_only=True)
class SequenceWindows:
    """Sequences of ``length`` steps that followed each other, behind up to ``burn_in`` steps that rebuild memory.

    A window may start where ``length`` steps are stored from there on, and either ``burn_in`` steps before it are, or
    the start of its episode is; then what is missing on the left is padding. So no step in the middle of an episode is
    ever taken for its start. Episodes may end inside a window. Single transitions are sequences of length 1.

    Args:
        length: steps whose loss counts, ``L``.
        burn_in: steps before them, ``B``.
        allow_short: closed streams of fewer than ``length`` steps are drawn too, whole, with padding on the right.
    """

    length: int = 1
    burn_in: int = 0
    allow_short: bool = False

    def __post_init__(self) -> None:
        if self.length < 1 or self.burn_in < 0:
            raise ValueError(f"need length >= 1 and burn_in >= 0, got {self.length} and {self.burn_in}")

    def eligible(self, index: StreamIndex, slots: np.ndarray) -> np.ndarray:
        """See :class:`Windows`."""
        left, right = index.left(slots), index.right(slots)
        long_enough = right >= self.length - 1
        if self.allow_short:
            long_enough |= index.is_closed(slots) & (index.seq[slots] == 0)
        return long_enough & ((left >= self.burn_in) | index.knows_start(slots))

    def __call__(self, index: StreamIndex, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See :class:`Windows`."""
        slots = index.window(starts, before=self.burn_in, after=self.length)
        mask = slots != NONE
        mask[: self.burn_in] = False
        return slots, mask


@dataclass(frozen=True)
class EpisodeWindows:
    """Whole episodes that are stored from their first to their last step, padded on the right to the longest drawn."""

    def eligible(self, index: StreamIndex, slots: np.ndarray) -> np.ndarray:
        """See :class:`Windows`."""
        return (index.start[slots] == index.seq[slots]) & (index.stop[slots] != NONE)

    def __call__(self, index: StreamIndex, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See :class:`Windows`."""
        lengths = index.stop[starts] - index.seq[starts] + 1
        slots = index.window(starts, before=0, after=int(lengths.max()))
        slots[np.arange(len(slots))[:, None] >= lengths] = NONE  # the next episode of the stream
        return slots, slots != NONE


class Priorities:
    """Priorities of windows, by the slot of their start (Schaul et al. 2016, proportional variant).

    New records get the largest priority so far, so that everything is seen once. Sums of blocks of priorities are kept,
    so that a draw from a million takes well below a millisecond.

    Args:
        capacity: of the ring.
        alpha: exponent of the priorities; 0 draws uniformly.
        beta: exponent of the importance weights; 1 corrects fully. May be set anew at any time.
        eta: of a sequence, the priority is ``eta * max |error| + (1 - eta) * mean |error|`` over the steps that count
            (Kapturowski et al. 2019, section 2.3).
        epsilon: added to the errors, so that nothing is forgotten.
    """

    def __init__(
        self, *, capacity: int, alpha: float = 0.6, beta: float = 0.4, eta: float = 0.9, epsilon: float = 1e-6
    ) -> None:
        self.alpha, self.beta, self.eta, self.epsilon = alpha, beta, eta, epsilon
        self.largest = 1.0
        self._blocks = np.zeros((-(-capacity // _BLOCK), _BLOCK), np.float32)
        self._sums = np.zeros(len(self._blocks))
        self.value = self._blocks.reshape(-1)[:capacity]

    def insert(self, slots: np.ndarray) -> None:
        """Gives new records the largest priority."""
        self._set(slots, self.largest)

    def draw(self, count: int, generator: torch.Generator) -> np.ndarray:
        """Returns ``count`` slots, each with a probability proportional to its priority."""
        total = self._sums.cumsum()
        points = torch.rand(count, dtype=torch.float64, generator=generator).numpy() * total[-1]
        blocks = np.minimum(np.searchsorted(total, points, side="right"), len(total) - 1)
        inside = np.cumsum(self._blocks[blocks], axis=1, dtype=np.float64)
        points = points - (total[blocks] - self._sums[blocks])
        # Rounding may put a point at or beyond the end of its block: it belongs to the last one with a priority.
        points = np.minimum(points, np.nextafter(inside[:, -1], 0.0))
        return blocks * _BLOCK + (inside <= points[:, None]).sum(1)

    def weights(self, slots: np.ndarray) -> np.ndarray:
        """Returns the importance weights of slots that were drawn, at most 1.

        They are ``(N P)^-beta`` up to a factor that cancels, since they are divided by the largest of them.
        """
        weight = self.value[slots].astype(np.float64) ** -self.beta
        return (weight / weight.max()).astype(np.float32)

    def update(self, slots: np.ndarray, error: np.ndarray, mask: np.ndarray) -> None:
        """Sets the priorities of windows from the errors of their steps.

        Args:
            slots: ``[N]`` of the starts.
            error: ``[T, N]``, of any sign.
            mask: ``[T, N]`` bool, the steps that count.
        """
        error = np.where(mask, np.abs(error), 0.0)
        mean = error.sum(0) / np.maximum(mask.sum(0), 1)
        mixed = self.eta * error.max(0) + (1 - self.eta) * mean
        self._set(slots, (mixed + self.epsilon) ** self.alpha)
        self.largest = max(self.largest, float(self.value[slots].max()))

    def state_dict(self) -> dict[str, Any]:
        """Returns what changes while learning."""
        return {"value": self.value.copy(), "largest": self.largest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores :meth:`state_dict`."""
        self._set(np.arange(len(self.value)), state["value"])
        self.largest = state["largest"]

    def _set(self, slots: np.ndarray, value: np.ndarray | float) -> None:
        self.value[slots] = value
        touched = np.unique(slots // _BLOCK)
        self._sums[touched] = self._blocks[touched].sum(1, dtype=np.float64)


class Sampler:
    """Draws windows with replacement, uniformly over all places where one may start or by priority.

    Args:
        index: the ring.
        windows: what is drawn.
        generator: the only source of randomness, on the CPU.
        priorities: draw by these, which are kept up to date by :meth:`insert` and :meth:`Priorities.update`.
    """

    def __init__(
        self,
        *,
        index: StreamIndex,
        windows: Windows,
        generator: torch.Generator,
        priorities: Priorities | None = None,
    ) -> None:
        self.index = index
        self.windows = windows
        self.generator = generator
        self.priorities = priorities

    def insert(self, slots: np.ndarray) -> None:
        """Tells of records that were inserted into the index."""
        if self.priorities is not None:
            self.priorities.insert(slots[slots != NONE])

    def all_eligible(self) -> np.ndarray:
        """Returns the slots of all places where a window may start, in order."""
        slots = np.arange(self.index.size)
        return slots[self.windows.eligible(self.index, slots)]

    def sample(self, count: int) -> Draw | None:
        """Returns ``count`` windows, or ``None`` if there is no place where one may start."""
        starts = self._starts(count)
        if starts is None:
            return None
        slots, mask = self.windows(self.index, starts)
        weight = np.ones(count, np.float32) if self.priorities is None else self.priorities.weights(starts)
        return Draw(slots=slots, mask=mask, starts=starts, weight=weight)

    def _starts(self, count: int) -> np.ndarray | None:
        if not self.index.size:
            return None
        # Throwing away slots where no window may start is far cheaper than finding all where one may, unless these are
        # very rare, and draws from the same distribution.
        found, attempt = np.zeros(0, np.int64), count + count // 4 + 4
        while attempt < max(self.index.size, 1024):
            slots = self._draw(attempt)
            found = np.append(found, slots[self.windows.eligible(self.index, slots)])
            if len(found) >= count:
                return found[:count]
            attempt *= 8
        eligible = self.all_eligible()
        if not len(eligible):
            return None
        return self._draw_from(eligible, count)

    def _draw(self, count: int) -> np.ndarray:
        if self.priorities is not None:
            return self.priorities.draw(count, self.generator)
        return torch.randint(self.index.size, (count,), generator=self.generator).numpy()

    def _draw_from(self, eligible: np.ndarray, count: int) -> np.ndarray:
        if self.priorities is None:
            return eligible[torch.randint(len(eligible), (count,), generator=self.generator).numpy()]
        weights = torch.from_numpy(self.priorities.value[eligible].astype(np.float64))
        total = weights.cumsum(0)
        points = torch.rand(count, dtype=torch.float64, generator=self.generator) * total[-1]
        return eligible[torch.searchsorted(total, points, right=True).clamp(max=len(eligible) - 1).numpy()]
