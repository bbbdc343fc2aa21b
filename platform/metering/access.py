"""What the data plane and the console use of metering."""

from common.errors import BudgetSpent, RateLimited
from metering.admission import (
    UNLIMITED,
    Admission,
    Asking,
    admit,
    rate_limit_headers,
    take_over,
)
from metering.calls import admit_call
from metering.open_requests import ANSWERED_S, GATEWAY, answered_key
from metering.reports import WIDTHS, Question, Sums, access_report_tenants, first_page, report
from metering.request_log import (
    MOST_HOPS,
    MOST_OUTPUTS,
    MOST_POINTS,
    Content,
    Hop,
    OutputNote,
    RequestNote,
)
from metering.request_log_writer import keep_content, keep_refusal, keep_request
from metering.settlement import Account, settle
from metering.usage import UsageSum, access_all_usage, access_usage, access_usage_entries
from metering.usage_record import UsageRecord

__all__ = [
    "ANSWERED_S",
    "GATEWAY",
    "MOST_HOPS",
    "MOST_OUTPUTS",
    "MOST_POINTS",
    "UNLIMITED",
    "WIDTHS",
    "Account",
    "Admission",
    "Asking",
    "BudgetSpent",
    "Content",
    "Hop",
    "OutputNote",
    "Question",
    "RateLimited",
    "RequestNote",
    "Sums",
    "UsageRecord",
    "UsageSum",
    "access_all_usage",
    "access_report_tenants",
    "access_usage",
    "access_usage_entries",
    "admit",
    "admit_call",
    "answered_key",
    "first_page",
    "keep_content",
    "keep_refusal",
    "keep_request",
    "rate_limit_headers",
    "report",
    "settle",
    "take_over",
]
