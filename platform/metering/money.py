"""Amounts as whole numbers: sums in binary fractions would drift.

Prices are decimals with six places. Those for a million tokens make a token cost a whole number of
picos (1e-12 of the currency); those of an image and of a minute of audio are whole nanos (1e-9). A
request's tokens and its media are each rounded up to a whole nano, once.
"""

from __future__ import annotations

from datetime import UTC, datetime, time, timedelta, tzinfo
from decimal import Decimal
from typing import NamedTuple

PERIODS = ("day", "week", "month")


def period_of(period: str, moment: datetime, zone: tzinfo) -> tuple[datetime, datetime]:
    """Return the start and the end (exclusive) of the period around a moment, in UTC.

    Periods begin at midnight by the zone's clocks, weeks on Mondays, so a day may have 23 or 25
    hours. A midnight that comes twice counts the first time, one that is left out when the clocks
    have passed it.
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
#: Six decimal places, and what a Lua number holds exactly.
PRICE_DECIMALS = 6
MAX_PRICE = Decimal(10**6)
#: Of a budget, in the currency: a Lua number holds its nanos exactly.
MAX_AMOUNT = Decimal(9 * 10**6)
MAX_NANOS = 9 * 10**15


class Rates(NamedTuple):
    """Prices of one token, in picos, of an image and of a minute of audio, in nanos."""

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
        """Convert prices of a million tokens, of an image and of a minute of audio."""
        tokens = (int(price.scaleb(PRICE_DECIMALS)) for price in (input, cached, output))
        return cls(*tokens, *(nanos_of(price) for price in (image, audio_minute)))

    @property
    def prompt(self) -> int:
        """The most that a prompt token can cost, as nobody knows yet which are cached."""
        return max(self.input, self.cached)

    def media_nanos(self, images: int, audio_ms: int) -> int:
        """The cost of images and of milliseconds of audio, besides that of their tokens."""
        return images * self.image - (-audio_ms * self.audio_minute // MS_A_MINUTE)

    def cost_nanos(self, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> int:
        """The cost of a request's tokens; its prompt's include the cached ones."""
        picos = (
            (prompt_tokens - cached_tokens) * self.input
            + cached_tokens * self.cached
            + completion_tokens * self.output
        )
        return -(-picos // PICOS_A_NANO)


FREE = Rates()


def nanos_of(amount: Decimal) -> int:
    """An amount of the currency in nanos; what is finer is cut off."""
    return int(amount * NANOS)


def amount_text(nanos: int) -> str:
    """Nanos as a decimal with all its digits: "0.000150000"."""
    return f"{Decimal(nanos) / NANOS:.9f}"
