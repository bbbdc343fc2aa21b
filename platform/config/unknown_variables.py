"""Environment variables that look like settings and are none: most often a slip of the pen."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Any

from django.core.checks import CheckMessage, Warning

from config.environment import FROM_FLAGS
from config.variables import GROUPS

#: What nobody sets for an installation: for developers, tests, and processes among themselves.
NO_SETTINGS = frozenset(
    {
        *("QUIRE_ABLATIONS", "QUIRE_CACHE_DIR", "QUIRE_CHAOS_RELAY", "QUIRE_KERNELS"),
        *("QUIRE_CPU_BUILD_TIMEOUT", "QUIRE_CPU_ISA", "QUIRE_CPU_SANITIZE", "QUIRE_TERMINAL"),
        "QUIRE_STEP_RECORD",
        FROM_FLAGS,
    }
)
#: QUIRE_TEST_..., QUIRE_SUITE_...: of the tests' own.
OF_TESTS = ("TEST", "SUITE")


def unknown_variables(environment: Mapping[str, str] = os.environ) -> list[str]:
    """A sentence for each variable that begins as a setting does and isn't one."""
    known = {name for group in GROUPS.values() for name in group}
    found = sorted(
        name
        for name in environment
        if name.startswith("QUIRE_")
        and name.split("_")[1] not in OF_TESTS
        and name not in known | NO_SETTINGS
    )
    return [f"{name} is no setting and changes nothing.{_meant(name, known)}" for name in found]


def check_variables(**_: Any) -> list[CheckMessage]:
    """For `manage.py check`."""
    return [Warning(sentence, id="config.W001") for sentence in unknown_variables()]


def _meant(name: str, known: set[str]) -> str:
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.8)
    return f" Did you mean {close[0]}?" if close else ""
