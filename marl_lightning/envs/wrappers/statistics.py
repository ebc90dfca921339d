"""Running means and variances that can be merged exactly. Needs numpy only."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import numpy as np

_TOTAL, _NEW, _MERGED = range(3)  # rows of the moments
_UPDATED = slice(_TOTAL, _MERGED)

_INITIAL_COUNT = 1e-4


class RunningStatistics:
    """Mean and variance, entry by entry, of all samples so far, in float64.

    Starts with mean 0, variance 1 and a count of 1e-4, which the first samples outweigh. Samples are taken in batch by
    batch by the parallel formula of Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing
    sample variances" (1982): the result depends on the batches by rounding only.

    Several processes may each keep such statistics of one thing. What has come in since the last merge is kept apart,
    so that a merge counts each sample of each process once.

    Args:
        shape: shape of a sample; ``()`` for a number.
    """

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        self.shape = shape
        size = prod(shape)
        # Sums of squares are taken around the mean: they are the variance times the count.
        self._count = np.array([[_INITIAL_COUNT], [0.0], [_INITIAL_COUNT]])
        self._mean = np.zeros((3, size))
        self._squares = np.repeat(self._count, size, axis=1)
        self._scratch = np.empty((0, size))

    @property
    def count(self) -> float:
        """Number of samples, the initial 1e-4 included."""
        return float(self._count[_TOTAL, 0])

    @property
    def mean(self) -> np.ndarray:
        """Mean, float64 of the shape of a sample."""
        return self._mean[_TOTAL].reshape(self.shape)

    @property
    def variance(self) -> np.ndarray:
        """Variance (of the population, not its estimate), float64 of the shape of a sample."""
        return (self._squares[_TOTAL] / self._count[_TOTAL]).reshape(self.shape)

    def update(self, samples: np.ndarray, counted: np.ndarray | None = None) -> None:
        """Takes in a batch.

        Args:
            samples: ``[..., *shape]`` of any dtype.
            counted: ``[...]`` bool, the samples that count; ``None`` counts all.
        """
        samples = samples.reshape(-1, self._mean.shape[1])
        if counted is not None and not counted.all():
            samples = samples[counted.reshape(-1)]
        count = len(samples)
        if not count:
            return
        if len(self._scratch) < count:
            self._scratch = np.empty((count, samples.shape[1]))
        values = self._scratch[:count]
        np.copyto(values, samples)
        mean = values.sum(axis=0) / count
        values -= mean
        np.multiply(values, values, out=values)
        self._add(_UPDATED, count, mean, values.sum(axis=0))

    def normalise(self, x: np.ndarray, out: np.ndarray, *, epsilon: float) -> None:
        """Writes ``(x - mean) / sqrt(variance + epsilon)`` to ``out``, float32 ``[..., *shape]``."""
        np.subtract(x, self.mean, out=out, casting="same_kind")  # in float64: the mean may be large
        out /= np.sqrt(self.variance + epsilon).astype(np.float32)

    def merge(self, processes: Iterable[np.ndarray]) -> None:
        """Counts what came in, in all processes, since the last merge. All of them have equal statistics afterwards.

        Args:
            processes: what :meth:`pack` returned in every process, this one included, in an order that all agree on.
        """
        size = self._mean.shape[1]
        for packed in processes:
            self._add(slice(_MERGED, None), packed[0], packed[1 : 1 + size], packed[1 + size :])
        for moments in (self._count, self._mean, self._squares):
            moments[_TOTAL] = moments[_MERGED]
            moments[_NEW] = 0.0

    def pack(self) -> np.ndarray:
        """Returns what came in since the last merge, float64 ``[1 + 2 * prod(shape)]``."""
        return np.concatenate((self._count[_NEW], self._mean[_NEW], self._squares[_NEW]))

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the arrays that hold everything, to be saved or written to."""
        return {"count": self._count, "mean": self._mean, "squares": self._squares}

    def _add(self, rows: slice, count: float, mean: np.ndarray, squares: np.ndarray) -> None:
        before = self._count[rows]
        share = count / (before + count)
        delta = mean - self._mean[rows]
        self._mean[rows] += share * delta
        self._squares[rows] += squares + before * share * delta * delta
        self._count[rows] += count
