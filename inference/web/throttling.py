"""The rate of requests that don't generate, as a throttle of DRF that is awaited."""

from __future__ import annotations

from rest_framework.throttling import BaseThrottle

from metering.access import admit_call
from tenants.authentication import Caller


class KeyRateThrottle(BaseThrottle):
    """Counts a call in the token buckets of its key and its tenant."""

    async def check(self, caller: Caller, cost: int) -> None:
        """Raise `RateLimited` (429) when either has made too many."""
        await admit_call(caller, cost)
