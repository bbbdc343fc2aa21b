"""Random numbers that depend only on a sequence's seed and a token's position."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_ROUNDS = 10
Words = NDArray[np.uint64]


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> list[Words]:
    """Philox4x32-10 (Salmon et al. 2011), elementwise on arrays of 32-bit words in uint64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for index in range(_ROUNDS):
        if index:
            k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> _HALF) ^ c1 ^ k0, p1 & _LOW, (p0 >> _HALF) ^ c3 ^ k1, p0 & _LOW
    return [c0, c1, c2, c3]


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return numbers in [0, 1) with 53 random bits, each a pure function of seed and position.

    So a token depends neither on the rest of the batch, nor on preemptions, nor on which process
    continues its sequence.

    Args:
        seeds: any shape; 64-bit seeds.
        positions: broadcasts with `seeds`; number of earlier output tokens.
    """
    counter = positions.astype(np.uint64)
    zero = np.zeros_like(counter)
    low, high, _, _ = philox4x32(
        (counter & _LOW, counter >> _HALF, zero, zero), (seeds & _LOW, seeds >> _HALF)
    )
    bits = ((low >> np.uint64(5)) << np.uint64(26)) | (high >> np.uint64(6))
    return bits.astype(np.float64) * 2.0**-53
