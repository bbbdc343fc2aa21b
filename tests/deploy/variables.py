"""The environment variables that Quire reads."""

from __future__ import annotations

import re
from pathlib import Path

from common.settings_environment import variables

ROOT = Path(__file__).resolve().parents[2]
NAME = re.compile(r"\b(QUIRE_[A-Z0-9_]+|DATABASE_URL|REDIS_URL)\b")
#: Of the tests alone.
OF_TESTS = {"QUIRE_TEST_CHROMIUM", "QUIRE_TEST_REQUIRE_SERVICES"}
#: What a process of ours tells those that it starts: none is an operator's to set.
BETWEEN_PROCESSES = {
    *(
        "QUIRE_FROM_FLAGS",
        "QUIRE_INTERNAL",
        "QUIRE_PREDECESSOR_TOKENS",
        "QUIRE_TERMINAL",
        "QUIRE_CHAOS_RELAY",
    ),
    "QUIRE_STEP_RECORD",
}


def named_in(text: str) -> set[str]:
    """The variables of ours that a text names; QUIRE_X_* for several isn't one."""
    return {name for name in NAME.findall(text) if not name.endswith("_")} - OF_TESTS


def _read_by_the_code() -> frozenset[str]:
    quoted = re.compile(rf"[\"']{NAME.pattern}[\"']")
    names = {*variables()}
    for folder in ("platform", "inference", "engine", "kernels"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".cpp", ".h"):
                names.update(quoted.findall(path.read_text(encoding="utf-8")))
    return frozenset(names - BETWEEN_PROCESSES)


#: Every variable whose name stands as a string in the product's code, or is made there.
DECLARED_VARIABLES = _read_by_the_code()
