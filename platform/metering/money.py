"""Amounts of money as integers: sums of binary fractions would drift.

Prices are decimals with six places. A price per million tokens makes one token cost a whole number
of picos (1e-12 of the currency); prices per image and per minute of audio are whole nanos (1e-9).
The costs of a request's tokens and of its media are each rounded up to a whole nano, once.
"""

from __future__ import annotations

from datetime import UTC, datetime, time, timedelta, tzinfo
from decimal import Decimal
from typing import NamedTuple

PERIODS = ("day", "week", "month")


def period_of(period: str, moment: datetime, zone: tzinfo) -> tuple[datetime, datetime]:
    """Return the start and the end (exclusive) of the period around a moment, in UTC.

    Periods begin at midnight in the time zone, weeks on Mondays, so a day may have 23 or 25 hours.
    Of a midnight that occurs twice the first counts; one that daylight saving time skips counts
    as the moment after the skipped hour.
    """
    day = moment.astimezone(zone).date()
    if period == "day":
        first, last = day, day + timedelta(days=1)
    elif period == "week":
        first = day - timedelta(days=day.weekday())
        last = first + timedelta(days=7)
    elif period == "month":
        first = day.replace(day=1)
        last = (first + timedelta(days=32)).replace(day=1)
    else:
        raise ValueError(f"period must be one of {', '.join(PERIODS)}, got {period!r}.")
    begin, end = (datetime.combine(day, time.min, zone).astimezone(UTC) for day in (first, last))
    return begin, end


NANOS = 10**9
PICOS_A_NANO = 1000
MS_A_MINUTE = 60_000
#: Six decimal places, within the integers that a Lua number holds exactly.
PRICE_DECIMALS = 6
MAX_PRICE = Decimal(10**6)
#: Maximum of a budget, in the currency: a Lua number holds its nanos exactly.
MAX_AMOUNT = Decimal(9 * 10**6)
MAX_NANOS = 9 * 10**15


class Rates(NamedTuple):
    """Prices of one token in picos, and of an image and a minute of audio in nanos."""

    input: int = 0
    cached: int = 0
    output: int = 0
    image: int = 0
    audio_minute: int = 0

    @classmethod
    def of_prices(
        cls,
        input: Decimal,
        cached: Decimal,
        output: Decimal,
        image: Decimal = Decimal(0),
        audio_minute: Decimal = Decimal(0),
    ) -> Rates:
        """Convert prices per million tokens, per image and per minute of audio."""
        tokens = (int(price.scaleb(PRICE_DECIMALS)) for price in (input, cached, output))
        return cls(*tokens, *(nanos_of(price) for price in (image, audio_minute)))

    @property
    def prompt(self) -> int:
        """The maximum cost of a prompt token: which ones are cached isn't known yet."""
        return max(self.input, self.cached)

    def media_nanos(self, images: int, audio_ms: int) -> int:
        """The cost of images and of milliseconds of audio, in addition to that of their tokens."""
        return images * self.image - (-audio_ms * self.audio_minute // MS_A_MINUTE)

    def cost_nanos(self, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> int:
        """The cost of a request's tokens; `prompt_tokens` includes the cached ones."""
        picos = (
            (prompt_tokens - cached_tokens) * self.input
            + cached_tokens * self.cached
            + completion_tokens * self.output
        )
        return -(-picos // PICOS_A_NANO)


FREE = Rates()


def nanos_of(amount: Decimal) -> int:
    """Convert an amount of the currency to nanos, truncating smaller fractions."""
    return int(amount * NANOS)


def amount_text(nanos: int) -> str:
    """Format nanos as a decimal with all digits: "0.000150000"."""
    return f"{Decimal(nanos) / NANOS:.9f}"
