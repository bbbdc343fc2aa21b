"""Filters by another row's number, which look at nothing but that number.

Those that django-filter makes of a foreign key look the row up first, whosever it is: 400 for one
that isn't there and an empty list for a stranger's would tell which numbers are taken.
"""

from __future__ import annotations

from django_filters import rest_framework as filters

from metering.models import Budget
from tenants.models import ApiKey

#: The last number that a row can have.
LAST = 2**63 - 1


def row_number(column: str) -> filters.NumberFilter:
    """Rows whose column has this number."""
    return filters.NumberFilter(
        field_name=column, min_value=1, max_value=LAST, decimal_places=0, max_digits=19
    )


class KeyFilter(filters.FilterSet):
    """By name, and by the service account that holds the key."""

    service_account = row_number("service_account_id")

    class Meta:
        model = ApiKey
        fields = ("name",)


class BudgetFilter(filters.FilterSet):
    """By key, model and period."""

    api_key = row_number("api_key_id")

    class Meta:
        model = Budget
        fields = ("model", "period")
