"""Pages of the management API."""

from __future__ import annotations

from rest_framework.pagination import LimitOffsetPagination
from rest_framework.request import Request

from engine.contract.errors import InvalidRequest


class Page(LimitOffsetPagination):
    """`?limit=` (50, at most 500) and `?offset=`."""

    default_limit = 50
    max_limit = 500

    def get_limit(self, request: Request) -> int:
        """Raises `InvalidRequest`; more than the most is the most."""
        limit = _number(request, "limit", self.default_limit, low=1)
        return min(limit, self.max_limit)

    def get_offset(self, request: Request) -> int:
        """Raises `InvalidRequest`."""
        return _number(request, "offset", 0, low=0)


def _number(request: Request, name: str, default: int, *, low: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 19 and int(text) >= low):
        raise InvalidRequest(
            f"{name} must be a whole number, at least {low}; got {text[:50]!r}.", param=name
        )
    return int(text)
