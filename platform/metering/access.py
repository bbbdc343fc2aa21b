"""Metering's interface for the data plane and the console."""

from common.errors import BudgetSpent, RateLimited
from metering.admission import (
    UNLIMITED,
    Admission,
    AdmissionRequest,
    admit,
    rate_limit_headers,
    take_over_request,
)
from metering.calls import admit_call
from metering.open_requests import ANSWERED_S, GATEWAY, response_stored_key
from metering.reports import (
    WIDTHS,
    UsageQuery,
    UsageTotals,
    access_report_tenants,
    first_page,
    report,
)
from metering.request_log import (
    MAX_HOPS,
    MAX_OUTPUTS,
    MAX_POINTS,
    Content,
    MediaTrace,
    OutputTrace,
    PlacementEvent,
    RequestTrace,
)
from metering.request_log_writer import log_content, log_rejection, log_request
from metering.settlement import EngineUsage, settle
from metering.usage import (
    UsageSum,
    access_all_usage,
    access_usage,
    access_usage_entries,
    last_used_days,
)
from metering.usage_record import UsageRecord

__all__ = [
    "ANSWERED_S",
    "GATEWAY",
    "MAX_HOPS",
    "MAX_OUTPUTS",
    "MAX_POINTS",
    "UNLIMITED",
    "WIDTHS",
    "Admission",
    "AdmissionRequest",
    "BudgetSpent",
    "Content",
    "EngineUsage",
    "MediaTrace",
    "OutputTrace",
    "PlacementEvent",
    "RateLimited",
    "RequestTrace",
    "UsageQuery",
    "UsageRecord",
    "UsageSum",
    "UsageTotals",
    "access_all_usage",
    "access_report_tenants",
    "access_usage",
    "access_usage_entries",
    "admit",
    "admit_call",
    "first_page",
    "last_used_days",
    "log_content",
    "log_rejection",
    "log_request",
    "rate_limit_headers",
    "report",
    "response_stored_key",
    "settle",
    "take_over_request",
]
