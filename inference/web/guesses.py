"""A bound on guessing keys: wrong ones by address, counted before the database is asked."""

from __future__ import annotations

import ipaddress
import logging
import time

from redis.exceptions import RedisError

from metering.access import RateLimited
from metering.redis_clients import key, redis_link

logger = logging.getLogger(__name__)

#: Unknown keys that an address may try in a window.
MOST, WINDOW_S = 50, 60
#: Counted here while Redis is away; the oldest go beyond it.
MOST_ADDRESSES = 10_000
_local: dict[str, tuple[float, int]] = {}


class Guesses:
    """The wrong keys that came from one address. All gateways count together, in Redis."""

    def __init__(self, address: str) -> None:
        self._origin = origin_of(address)

    async def check(self) -> None:
        """Raise `RateLimited` (429) when the address has tried too many."""
        name = self._name()
        try:
            found = await redis_link().execute("GET", name)
            count = int(found or 0)
        except (RedisError, OSError) as error:
            logger.debug("guesses are counted in this process alone: %s", error)
            count = self._local_count()
        if count >= MOST:
            raise RateLimited(
                "Too many wrong API keys came from your address. Try again in a minute.",
                retry_after=WINDOW_S - time.time() % WINDOW_S,
            )

    async def count(self) -> None:
        """One more."""
        name = self._name()
        self._count_locally()
        try:
            await redis_link().execute("INCR", name)
            await redis_link().execute("EXPIRE", name, WINDOW_S * 2)
        except (RedisError, OSError) as error:
            logger.debug("a guess was counted in this process alone: %s", error)

    def _name(self) -> str:
        return key(f"guesses:{int(time.time() // WINDOW_S)}:{self._origin}")

    def _local_count(self) -> int:
        window, count = _local.get(self._origin, (0.0, 0))
        return count if window == time.time() // WINDOW_S else 0

    def _count_locally(self) -> None:
        count = self._local_count() + 1
        _local.pop(self._origin, None)
        _local[self._origin] = (time.time() // WINDOW_S, count)
        while len(_local) > MOST_ADDRESSES:
            del _local[next(iter(_local))]


def origin_of(address: str) -> str:
    """An IPv4 address, or the network of 64 bits that an IPv6 one can change within."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:  # a Unix socket has none
        return "unknown"
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return str(parsed)
