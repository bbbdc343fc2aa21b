"""How much of a report is answered at once, so that every answer comes soon."""

from __future__ import annotations

from dataclasses import replace

from django.db.models import Count, Sum

from metering.models import UsageDay, UsageHour
from metering.reports import Question

#: Sums that one answer reads: what is behind them is on the next page.
MOST_ROWS = 12_000
#: The same where few groups come of them, which the database adds up.
MOST_ROWS_ADDED_UP = 60_000
#: The same where all buckets are added up.
MOST_ROWS_WHOLE = 100_000
#: Requests that one answer by minute reads: they come from the ledger itself.
MOST_REQUESTS = 10_000
_FEW = {"model", "line_item", "adapter", "endpoint"}


def first_page(question: Question, *, whole: bool = False) -> Question:
    """The question's first buckets: as many as can be read at once, and one at least. May block.

    By minute it's whole hours, or less than one that was asked for. `whole`: as in `report`.
    """
    left = MOST_ROWS_ADDED_UP if _FEW.issuperset(question.group_by) else MOST_ROWS
    if whole:
        left = MOST_ROWS_WHOLE
    table, count = UsageDay if question.width == "1d" else UsageHour, Count("pk")
    if question.width == "1m":
        # Sums by hour say how many of the ledger's rows there are without a look at it.
        left, count = MOST_REQUESTS, Sum("requests")
    first = question.start.replace(minute=0)
    rows = table.objects.filter(start__gte=first, start__lt=question.end)
    if question.tenants is not None:
        rows = rows.filter(tenant_id__in=question.tenants)
    counts = rows.order_by("start").values_list("start").annotate(rows=count)
    for start, found in counts:
        left -= found
        if left < 0 and start > first:
            return replace(question, end=start)
    return question
