"""Random numbers of compiled games: stateless hashes of (seed, episode, time, purpose, …).

A number depends on nothing but its key, so that seeding, partial resets and resuming are exact, and threads and devices
need no generator state. The functions work compiled and, with ``NUMBA_DISABLE_JIT=1``, as plain Python.

numba's on-disk cache notices changes of the file of a compiled driver only: delete the ``__pycache__`` folders of the
games after a change of this file.
"""

from __future__ import annotations

from numba import njit

_WORD = 0xFFFFFFFF
_INVERSE_2_53 = 2.0**-53

# ``_nrt`` is numba's internal name of the switch for its reference-counted memory; callers must set it as well.
_rule = njit(error_model="numpy", _nrt=False)


@_rule
def mix(key, value):
    """Absorbs the integer ``value`` into the 32-bit ``key`` and scrambles it.

    The scrambler is the two-round xorshift-multiply hash of the "hash-prospector" search. Its multipliers are below
    2^31, so that products of 32-bit words fit in int64 and no language overflows.
    """
    key = ((key ^ (value & _WORD)) + 0x9E3779B9) & _WORD
    key ^= key >> 16
    key = (key * 0x21F0AAAD) & _WORD
    key ^= key >> 15
    key = (key * 0x735A2D97) & _WORD
    return key ^ (key >> 15)


@_rule
def stream_key(seed, episode, time, purpose):
    """Returns the key of the random numbers of one step of one episode for one rule."""
    return mix(mix(mix(mix(mix(0, seed), seed >> 32), episode), time), purpose)


@_rule
def uniform64(key, low, high):
    """Returns a float64 between ``low`` and ``high`` with 53 random bits from two successors of ``key``."""
    return low + (high - low) * (((mix(key, 0) >> 5) * 67108864 + (mix(key, 1) >> 6)) * _INVERSE_2_53)


@_rule
def integer(key, count):
    """Returns an int64 in ``[0, count)`` from ``key``, for ``count`` far below 2^31."""
    return (key * count) >> 32
