"""How finely what is how old is known."""

from __future__ import annotations

from dataclasses import dataclass

#: Seconds of a bucket -> seconds that buckets of that width are kept, the finest first. Each width
#: is a multiple of the one before.
KEPT = {10: 2 * 3600, 60: 26 * 3600, 600: 8 * 86_400, 7200: 93 * 86_400}
FINEST = min(KEPT)


@dataclass(frozen=True)
class Range:
    """A stretch of time up to now, as a page offers it: how long, in points how far apart."""

    name: str
    title: str
    seconds: int
    step: int

    @property
    def width(self) -> int:
        """The coarsest buckets that its points can be made of and that are kept long enough."""
        fit = [w for w, kept in KEPT.items() if self.step % w == 0 and kept >= self.seconds]
        return max(fit)


RANGES = {
    each.name: each
    for each in (
        Range("5m", "5 minutes", 300, 10),
        Range("30m", "30 minutes", 1800, 30),
        Range("2h", "2 hours", 7200 - 60, 60),
        Range("6h", "6 hours", 6 * 3600, 120),
        Range("24h", "24 hours", 86_400, 600),
        Range("7d", "7 days", 7 * 86_400, 3600),
        Range("30d", "30 days", 30 * 86_400, 14_400),
        Range("90d", "90 days", 90 * 86_400, 43_200),
    )
}


def start_of(moment: float, width: int) -> int:
    """The beginning of the bucket that a moment (seconds since 1970) lies in."""
    return int(moment // width) * width
