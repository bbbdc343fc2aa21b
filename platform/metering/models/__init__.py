"""The usage ledger, its roll-ups, prices and budgets."""

from metering.models.budget import Budget, Period
from metering.models.price import Price
from metering.models.request_entry import RequestContent, RequestEntry
from metering.models.roll_up import UsageDay, UsageHour
from metering.models.usage_entry import UsageEntry
from metering.models.webhook import Webhook
from metering.models.webhook_delivery import WebhookDelivery

__all__ = [
    "Budget",
    "Period",
    "Price",
    "RequestContent",
    "RequestEntry",
    "UsageDay",
    "UsageEntry",
    "UsageHour",
    "Webhook",
    "WebhookDelivery",
]
