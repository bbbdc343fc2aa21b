"""Django's cache in Redis, with JSON values instead of pickles."""

import json
from typing import Any

from django.core.cache.backends.redis import RedisCache
from django_prometheus.cache import metrics

BACKEND = "redis"
for counter in (
    metrics.django_cache_get_total,
    metrics.django_cache_hits_total,
    metrics.django_cache_misses_total,
    metrics.django_cache_get_fail_total,
):
    counter.labels(BACKEND)  # create the series now, so that rates have no gaps


class CountedRedisCache(RedisCache):
    """Django's Redis cache with the counters of django-prometheus, whose own class for Redis needs
    django-redis."""

    def get(self, key: Any, default: Any = None, version: int | None = None) -> Any:
        metrics.django_cache_get_total.labels(BACKEND).inc()
        missing = object()
        try:
            value = super().get(key, missing, version)
        except Exception:
            metrics.django_cache_get_fail_total.labels(BACKEND).inc()
            raise
        if value is missing:
            metrics.django_cache_misses_total.labels(BACKEND).inc()
            return default
        metrics.django_cache_hits_total.labels(BACKEND).inc()
        return value


class JsonSerializer:
    """Serializes integers as plain numbers, so that Redis can increment them, and the rest as
    JSON."""

    def dumps(self, value: Any) -> bytes | int:
        """Encode a value for Redis. Raises TypeError for a value that JSON can't represent."""
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        return json.dumps(value).encode()

    def loads(self, data: bytes) -> Any:
        """Decode a value from Redis."""
        return json.loads(data)
