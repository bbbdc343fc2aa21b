"""How often the management API may be asked."""

from __future__ import annotations

import logging

from redis.exceptions import RedisError
from rest_framework.request import Request
from rest_framework.throttling import ScopedRateThrottle
from rest_framework.views import APIView

from engine.contract.redis_link import is_temporary

logger = logging.getLogger(__name__)


class ManagementThrottle(ScopedRateThrottle):
    """So many times a minute, by one person or key.

    Without Redis nobody is counted: whoever must revoke a key can't wait for it.
    """

    def allow_request(self, request: Request, view: APIView) -> bool:
        """Whether it's not too often."""
        try:
            return bool(super().allow_request(request, view))
        except RedisError as error:
            if not is_temporary(error):
                raise
            logger.warning("management API throttling unavailable: %s", error)
            return True
