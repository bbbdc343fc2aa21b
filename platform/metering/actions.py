"""The only functions that set prices and budgets; see `tenants.actions` for their conventions."""

from __future__ import annotations

import secrets
from datetime import datetime, timedelta
from decimal import Decimal, InvalidOperation
from functools import partial
from typing import Any, cast

from django.db import transaction
from django.db.models import QuerySet
from django.utils import timezone

from catalog.access import access_catalog, access_served_models
from catalog.models import ServedModel
from common.db import changed, save_valid
from common.errors import Conflict, NotFound
from common.outbound_http import check_public
from common.task_queue import send_task_best_effort
from engine.contract.errors import InvalidRequest
from metering.budgets import is_price_billed, require_webhook_manager
from metering.models import PRICE_FIELDS, Budget, Price, Webhook, WebhookDelivery
from metering.money import MAX_AMOUNT, MAX_PRICE
from metering.signals import rules_changed
from metering.webhooks import DELIVER, check_waiting, create_event
from tenants.actors import Actor, require_operator, require_role, to_actor
from tenants.audit import log_action
from tenants.models import ApiKey, Role, Tenant, User

#: How far in the past a price may begin: allows for the time that the request takes to arrive.
CLOCK_SKEW = timedelta(minutes=1)


def decimal_of(
    value: Decimal | int | str, name: str, *, max_decimals: int, max_value: Decimal
) -> Decimal:
    """A decimal in [0, `max_value`]. Raises `InvalidRequest` with `name` as its parameter."""
    try:
        number = Decimal(value)
    except (InvalidOperation, TypeError, ValueError):
        raise InvalidRequest(
            f"{name} must be a decimal number, got {str(value)[:50]!r}.", param=name
        ) from None
    if not number.is_finite() or not 0 <= number <= max_value:
        raise InvalidRequest(f"{name} must be in [0, {max_value}], got {number}.", param=name)
    if number != round(number, max_decimals):
        raise InvalidRequest(
            f"{name} takes {max_decimals} decimal places, got {number}.", param=name
        )
    return number


@transaction.atomic
def set_price(
    *,
    actor: Actor | User,
    model: str,
    input_per_million: Decimal | str,
    output_per_million: Decimal | str,
    cached_per_million: Decimal | str | None = None,
    per_image: Decimal | str | None = None,
    per_audio_minute: Decimal | str | None = None,
    valid_from: datetime | None = None,
) -> Price:
    """Set a model's prices per million tokens, image and minute of audio, from a time on.

    `valid_from` defaults to now. A price that has begun never changes, a new one follows it.
    `cached_per_million` None: same as the input; `per_image`, `per_audio_minute` None: as in the
    price in effect until then, or 0 without one.

    Raises: `PermissionDenied`; `InvalidRequest` with `param`; `Conflict` for two that begin at the
        same moment.
    """
    actor = to_actor(actor)
    _check_name(model, access_catalog(actor))
    now = timezone.now()
    if valid_from is not None and valid_from < now - CLOCK_SKEW:
        raise InvalidRequest("valid_from must not be in the past.", param="valid_from")
    start = valid_from or now
    previous = Price.objects.filter(model=model, valid_from__lte=start).first() or Price()
    prices = (
        input_per_million,
        input_per_million if cached_per_million is None else cached_per_million,
        output_per_million,
        previous.per_image if per_image is None else per_image,
        previous.per_audio_minute if per_audio_minute is None else per_audio_minute,
    )
    values = {
        name: decimal_of(value, name, max_decimals=6, max_value=MAX_PRICE)
        for name, value in zip(PRICE_FIELDS, prices, strict=True)
    }
    price = Price(model=model, valid_from=start, **values)
    save_valid(price)
    log_action(
        actor,
        "price.set",
        price,
        valid_from=price.valid_from,
        **cast("dict[str, Any]", {name: str(value) for name, value in values.items()}),
    )
    _announce()
    return price


@transaction.atomic
def delete_price(*, actor: Actor | User, price: Price) -> None:
    """Delete a price that nothing was billed at. Raises `PermissionDenied`, `Conflict`."""
    actor = require_operator(actor)
    if is_price_billed(price):
        raise Conflict("Requests were billed at this price: set a new one instead.")
    log_action(actor, "price.delete", price)
    price.delete()
    _announce()


@transaction.atomic
def set_budget(
    *,
    actor: Actor | User,
    tenant: Tenant,
    period: str,
    key: ApiKey | None = None,
    model: str = "",
    tokens: int | None = None,
    amount: Decimal | str | None = None,
    alert_percent: int | None = None,
) -> Budget:
    """Create a budget, or change the existing one without resetting what was spent.

    A tenant's admins set the budgets of its keys; operators set those of the tenant. A key's budget
    also applies to the keys that replace it by rotation.

    Raises: `NotFound`, `PermissionDenied`, `InvalidRequest` with `param`.
    """
    actor = to_actor(actor)
    _check_right(actor, tenant, key)
    if key is not None:
        if key.tenant_id != tenant.pk:
            raise NotFound("Key not found.", param="key")
        key = key.first or key
    _check_name(model, access_served_models(tenant))
    if tokens is None and amount is None:
        raise InvalidRequest("A budget needs tokens, an amount, or both.", param="tokens")
    if amount is not None:
        amount = decimal_of(amount, "amount", max_decimals=9, max_value=MAX_AMOUNT)
    Tenant.objects.select_for_update().get(pk=tenant.pk)
    budget = Budget.objects.filter(tenant=tenant, api_key=key, model=model, period=period).first()
    is_new = budget is None
    if budget is None:
        budget = Budget(tenant=tenant, api_key=key, model=model, period=period)
    limits = {"tokens": tokens, "amount": amount}
    if alert_percent is not None:
        limits["alert_percent"] = alert_percent
    difference = changed(budget, limits)
    if is_new or difference:
        save_valid(budget)
        changes = {
            name: [_to_json_value(a), _to_json_value(b)] for name, (a, b) in difference.items()
        }
        verb = "budget.create" if is_new else "budget.update"
        log_action(actor, verb, budget, tenant=tenant, changes=changes)
        _announce()
    return budget


def _check_name(model: str, served: QuerySet[ServedModel]) -> None:
    """Refuse a model's alias: usage is counted under the model's own name."""
    for name, aliases in served.values_list("name", "aliases"):
        if model in aliases:
            raise InvalidRequest(f"{model} is another name of {name}: use that one.", param="model")


@transaction.atomic
def delete_budget(*, actor: Actor | User, budget: Budget) -> None:
    """Remove a budget. Raises the same errors as `set_budget`."""
    actor = to_actor(actor)
    _check_right(actor, budget.tenant, budget.api_key)
    log_action(actor, "budget.delete", budget, tenant=budget.tenant)
    budget.delete()
    _announce()


@transaction.atomic
def set_webhook(*, actor: Actor | User, tenant: Tenant | None, url: str) -> Webhook:
    """Set a tenant's webhook, as its admin, or the operators' (None). Generates a new secret.

    The address is resolved at each delivery, which is refused if it is private.

    Raises: `NotFound`, `PermissionDenied`, `InvalidRequest` with `param`.
    """
    actor = to_actor(actor)
    require_webhook_manager(actor, tenant)
    check_public(url)
    if tenant is not None:
        Tenant.objects.select_for_update().get(pk=tenant.pk)  # serialize: one webhook per tenant
    Webhook.objects.filter(tenant=tenant).delete()
    hook = Webhook(tenant=tenant, url=url, secret=secrets.token_hex(32))
    save_valid(hook, unchecked=("tenant",))
    log_action(actor, "webhook.set", hook, tenant=tenant, url=url)
    return hook


@transaction.atomic
def send_test_event(*, actor: Actor | User, tenant: Tenant | None) -> WebhookDelivery:
    """Send a `webhook.test` event to the webhook; its delivery shows the result.

    Raises: `NotFound`, also without a webhook; `PermissionDenied`; `RateLimited` if too many events
        are pending.
    """
    actor = to_actor(actor)
    require_webhook_manager(actor, tenant)
    queued = create_event(tenant, "webhook.test", {"sent_by": actor.label})
    if queued is None:
        raise NotFound("No webhook is set.")
    log_action(actor, "webhook.test", queued, tenant=tenant)
    return queued


@transaction.atomic
def redeliver(*, actor: Actor | User, delivery: WebhookDelivery) -> WebhookDelivery:
    """Retry a failed event under the same id.

    Raises: `NotFound`, `PermissionDenied`; `Conflict` for one that was delivered or is still
        pending; `RateLimited` if too many events are pending.
    """
    actor = to_actor(actor)
    require_webhook_manager(actor, delivery.tenant)
    row = WebhookDelivery.objects.select_for_update().get(pk=delivery.pk)
    if row.state != "failed":
        raise Conflict(f"This event is {row.state}.")
    check_waiting(delivery.tenant)
    row.next_try_at, row.attempts = timezone.now(), 0
    row.save(update_fields=["next_try_at", "attempts"])
    log_action(actor, "webhook.send_again", row, tenant=delivery.tenant)
    transaction.on_commit(partial(send_task_best_effort, DELIVER, row.pk))
    return row


@transaction.atomic
def delete_webhook(*, actor: Actor | User, tenant: Tenant | None) -> None:
    """Delete the webhook. Raises `NotFound` without one, `PermissionDenied`."""
    actor = to_actor(actor)
    require_webhook_manager(actor, tenant)
    hook = Webhook.objects.filter(tenant=tenant).first()
    if hook is None:
        raise NotFound("No webhook is set.")
    log_action(actor, "webhook.delete", hook, tenant=tenant)
    hook.delete()


def _check_right(actor: Actor, tenant: Tenant, key: ApiKey | None) -> None:
    require_role(actor, tenant, Role.ADMIN)
    if key is None:
        require_operator(actor)


def _to_json_value(value: object) -> object:
    return str(value) if isinstance(value, Decimal) else value


def _announce() -> None:
    transaction.on_commit(partial(rules_changed.send, sender=Budget))
