"""What can be turned off in the compiled kernels, to see what it brings or to work around a quirk.

Each is an environment variable QUIRE_CPU_<NAME>, 1 (the default) or 0. With any of them off a model
says what it says with all on.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from kernels.errors import KernelsUnavailable

SWITCHES = {
    "FUSED_GATE": "both halves of a gated MLP made together and gated before they are written",
    "PREFETCH": "weights and KV fetched some way ahead of their use",
    "HUGE_PAGES": "weights, KV cache and scratch memory in huge pages",
    "DEALING": "pieces of work taken one by one by whichever thread is free; off: in fixed shares",
    "SINGLE_PANELS": "the last panels of a product of many rows dealt one by one",
    "SPINNING": "idle threads looking for work for about 50 us before they sleep",
    "SPLIT_KV": "a sequence's KV split over threads when it decodes",
    "HEADS_TOGETHER": "KV read block by block, all heads of a block together, when decoding",
    "EVEN_TILES": "the rows of a product cut into tiles of about the same number",
    "SHARED_PAGES": "matrices of weights side by side, so that small ones lie in huge pages too",
    "KV_AHEAD": "new huge pages of the KV cache mapped by all threads, a little before their use",
    "SHARED_LOADING": "the rows of a product's input loaded by all threads; off: by one",
    "ROW_PIECES": "many rows in pieces that stay in the L2 cache; off: all together",
    "WIDE_ROUNDING": "activations rounded to 8 bits 16 at a time with AVX-512; off: one by one",
    "OWN_RUNS": "few rows: each thread in a run of panels of its own first; off: piece by piece",
    "LAST_ROWS": "after the last attention only tokens whose logits are wanted",
}
"""The C++ library's own first, in the order of `Switch` in switches.h; then those of Python."""
PYTHONS = ("LAST_ROWS",)


def turned_off(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The names of what is off. Raises `KernelsUnavailable` for a value that is neither 0 nor 1."""
    off = []
    for name in SWITCHES:
        value = environment.get(f"QUIRE_CPU_{name}", "1")
        if value not in ("0", "1"):
            raise KernelsUnavailable(f"QUIRE_CPU_{name} must be 0 or 1, got {value!r}")
        if value == "0":
            off.append(name)
    return off


def is_on(name: str) -> bool:
    """Whether one of `SWITCHES` is on."""
    return name not in turned_off()
