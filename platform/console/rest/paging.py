"""Pages of the management API."""

from rest_framework.pagination import LimitOffsetPagination


class Page(LimitOffsetPagination):
    """`?limit=` (50, at most 500) and `?offset=`."""

    default_limit = 50
    max_limit = 500
