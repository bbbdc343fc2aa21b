"""What can be turned off to measure what it brings: QUIRE_ABLATIONS=prefetch,last-rows.

For measurements, not for operators: `manage.py bench ablations` sets the variable for an engine of
its own and compares it with one that has everything. With any of these off a model says what it
says with all on.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from kernels.errors import KernelsUnavailable

VARIABLE = "QUIRE_ABLATIONS"

OF_THE_LIBRARY = (
    "prefetch", "huge-pages", "dealing", "spinning", "split-kv", "even-tiles", "shared-pages",
    "kv-ahead", "shared-loading", "own-runs",
)  # fmt: skip
"""Those of the C++ library of `kernels.cpu`, which has them by the same names (runtime.cpp)."""

NAMES = (
    *OF_THE_LIBRARY, "last-rows", "decoder", "step", "experts", "sampling", "map-ahead",
    "prefill-by-load", "prefill-least", "split-batches",
)  # fmt: skip
"""All of them; benchmarks/compare.py says what each is."""


def turned_off(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The names of what is off, in the order of `NAMES`.

    Raises `KernelsUnavailable`, whose `param` is the variable, for a name that there isn't.
    """
    named = [name.strip() for name in environment.get(VARIABLE, "").split(",")]
    given = {name for name in named if name}
    for name in sorted(given.difference(NAMES)):
        known = ", ".join(NAMES)
        raise KernelsUnavailable(f"{VARIABLE} has no {name!r}; there are {known}.", VARIABLE)
    return tuple(name for name in NAMES if name in given)


def is_on(name: str) -> bool:
    """Whether one of `NAMES` is on. Raises as `turned_off` does."""
    return name not in turned_off()
