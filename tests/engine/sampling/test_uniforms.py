"""The random numbers: known answers, evenness, and no dependence on anything else."""

from __future__ import annotations

import numpy as np
import pytest

from engine.sampling.uniforms import philox4x32, uniforms

#: From the known-answer file of the Random123 library.
REFERENCE_DRAWS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([2**32 - 1] * 4, [2**32 - 1] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def words(values):
    return tuple(np.array([value], dtype=np.uint64) for value in values)


@pytest.mark.parametrize(("counter", "key", "expected"), REFERENCE_DRAWS)
def test_philox_gives_the_published_answers(counter, key, expected):
    assert [int(word[0]) for word in philox4x32(words(counter), words(key))] == expected


def test_numbers_are_even():
    numbers = uniforms(np.arange(100_000, dtype=np.uint64), np.zeros(100_000, dtype=np.int64))
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    seen = np.histogram(numbers, 100, (0, 1))[0]
    assert ((seen - 1000) ** 2 / 1000).sum() < 99 + 5 * np.sqrt(198)
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.02


def test_a_number_is_a_function_of_seed_and_position_alone():
    seeds = np.array([0, 1, 2**63 - 1, 2**64 - 1], dtype=np.uint64)
    table = uniforms(seeds[:, None], np.arange(100))
    assert len(set(table.flatten().tolist())) == 400
    isolated_uniforms = uniforms(seeds[2:3], np.array([77]))
    assert isolated_uniforms[0] == table[2, 77]
    far = uniforms(seeds[:1], np.array([2**40]))
    assert 0 <= far[0] < 1
