"""The stateless random numbers."""

import numpy as np

from marl_lightning.envs.native.smac.kernel import mix, stream_key, uniform

ZERO, ONE = np.float32(0), np.float32(1)


def python_mix(key, value):
    """The hash in Python's unbounded integers."""
    word = 2**32 - 1
    key = ((key ^ (value % 2**32)) + 0x9E3779B9) & word
    key ^= key >> 16
    key = key * 0x21F0AAAD & word
    key ^= key >> 15
    key = key * 0x735A2D97 & word
    return key ^ (key >> 15)


def test_known_values():
    assert mix(0, 0) == 0x64625032
    assert stream_key(1, 2, 3, 4) == 0xDFAF7727


def test_words_do_not_overflow():
    generator = np.random.default_rng(0)
    for key, value in generator.integers(0, 2**32, (200, 2)).tolist():
        assert mix(key, value) == python_mix(key, value)
    assert mix(7, -1) == python_mix(7, -1)


def test_all_bits_of_the_seed_count():
    keys = {stream_key(seed, 0, 0, 0) for seed in (0, 1, 2**31, 2**32, 2**32 + 1, 2**62)}
    assert len(keys) == 6


def test_uniform_numbers_are_uniform_and_uncorrelated():
    key = stream_key(3, 1, 4, 1)
    numbers = np.array([uniform(mix(key, unit), ZERO, ONE) for unit in range(20_000)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    # chi-square with 19 degrees of freedom: 43.8 is exceeded once in a thousand seeds
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8
    assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 0.03


def test_neighbouring_seeds_episodes_and_times_are_unrelated():
    base = np.array([uniform(mix(stream_key(s, 0, 0, 0), 0), ZERO, ONE) for s in range(4000)])
    for arguments in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
        other = np.array([uniform(mix(stream_key(s, *arguments), 0), ZERO, ONE) for s in range(4000)])
        assert abs(np.corrcoef(base, other)[0, 1]) < 0.06
