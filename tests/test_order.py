"""What begins first, and what runs beside what."""

from __future__ import annotations

from tests.order import FIRST, mixed

COMPUTE = [f"tests/kernels/test_{number}.py" for number in range(8)]
WAIT = [f"tests/inference/test_{number}.py" for number in range(4)]


def in_turn(paths: list[str]) -> list[str]:
    places = mixed(paths)
    return sorted(paths, key=lambda path: places[path])


def test_what_computes_and_what_waits_are_spread_over_the_run() -> None:
    turn = in_turn([*COMPUTE, *WAIT])
    for begin in range(0, 12, 3):  # two that compute beside one that waits, all the time
        assert sum(path in COMPUTE for path in turn[begin : begin + 3]) == 2
    assert [path for path in turn if path in COMPUTE] == COMPUTE


def test_long_groups_begin_before_all_others() -> None:
    long = [*(f"{FIRST[0]}test_{number}.py" for number in range(3)), FIRST[5]]
    assert in_turn([*COMPUTE, long[3], *WAIT, *long[:3]])[:4] == long
