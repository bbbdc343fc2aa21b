"""Counter-based randomness: one uniform number for each (seed, output position).

A number is a pure function of the two, so a token doesn't depend on the rest of the batch, on how
often a sequence was preempted, or on which process goes on with it.
"""

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
    for turn in range(_ROUNDS):
        if turn:
            k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> _HALF) ^ c1 ^ k0, p1 & _LOW, (p0 >> _HALF) ^ c3 ^ k1, p0 & _LOW
    return [c0, c1, c2, c3]


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Numbers in [0, 1) with 53 random bits.

    Args:
        seeds: any shape; 64-bit seeds.
        positions: broadcasts with `seeds`; how many tokens came before in the output.
    """
    place = positions.astype(np.uint64)
    zero = np.zeros_like(place)
    low, high, _, _ = philox4x32(
        (place & _LOW, place >> _HALF, zero, zero), (seeds & _LOW, seeds >> _HALF)
    )
    bits = ((low >> np.uint64(5)) << np.uint64(26)) | (high >> np.uint64(6))
    return bits.astype(np.float64) * 2.0**-53
