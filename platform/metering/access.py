"""What the data plane and the console use of metering."""

from metering.accounts import Account
from metering.admission import (
    UNLIMITED,
    Admission,
    Asking,
    admit,
    rate_limit_headers,
    take_over,
)
from metering.errors import BudgetSpent, RateLimited
from metering.gateways import GATEWAY
from metering.records import UsageRecord
from metering.reports import WIDTHS, Question, Sums, access_report_tenants, report
from metering.settlement import settle
from metering.usage import UsageSum, access_all_usage, access_usage, access_usage_entries

__all__ = [
    "GATEWAY",
    "UNLIMITED",
    "WIDTHS",
    "Account",
    "Admission",
    "Asking",
    "BudgetSpent",
    "Question",
    "RateLimited",
    "Sums",
    "UsageRecord",
    "UsageSum",
    "access_all_usage",
    "access_report_tenants",
    "access_usage",
    "access_usage_entries",
    "admit",
    "rate_limit_headers",
    "report",
    "settle",
    "take_over",
]
