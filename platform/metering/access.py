"""What the data plane and the console use of metering."""

from metering.admission import Admission, admit
from metering.errors import RateLimited
from metering.records import UsageRecord
from metering.settlement import settle
from metering.usage import UsageSum, access_all_usage, access_usage, access_usage_entries

__all__ = [
    "Admission",
    "RateLimited",
    "UsageRecord",
    "UsageSum",
    "access_all_usage",
    "access_usage",
    "access_usage_entries",
    "admit",
    "settle",
]
