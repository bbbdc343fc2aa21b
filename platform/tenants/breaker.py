"""A circuit breaker for servers of other people: who doesn't answer isn't asked for a while."""

from __future__ import annotations

from django.core.cache import cache

#: So many failures in a row
FAILURES = 5
#: open the breaker for so long.
PAUSE_S = 600


class Breaker:
    """A circuit breaker of one server. Its counts are in the cache, shared by all workers."""

    def __init__(self, name: str) -> None:
        self._key = f"breaker:{name}"

    @property
    def is_open(self) -> bool:
        """Whether the server isn't to be asked now."""
        return bool(cache.get(self._key, 0) >= FAILURES)

    def attempt(self) -> None:
        """Count a failure in advance: a worker that is killed while it waits can't do so later."""
        cache.set(self._key, cache.get(self._key, 0) + 1, PAUSE_S)

    def succeed(self) -> None:
        """The server has answered: count from nothing again."""
        cache.delete(self._key)
