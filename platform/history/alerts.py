"""Alerts for operators: rules checked every minute, and notifications about new problems.

Budgets have separate alerts for their tenants: `metering.alerts`.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from datetime import timedelta
from smtplib import SMTPException
from statistics import quantiles

from django.conf import settings
from django.core.mail import send_mail
from django.db import transaction
from django.db.models import F, Q, QuerySet
from django.utils import timezone

from catalog.models import DesiredState, Replica, ReplicaState
from common.errors import RateLimited
from history.certificates import served_certificates
from history.models import Alert, PoolSample
from metering.models import RequestEntry, Webhook
from metering.retention import remove_rows
from metering.webhooks import create_event
from tenants.actors import Actor, require_operator, to_actor
from tenants.audit import log_action
from tenants.models import ApiKey, User

logger = logging.getLogger(__name__)

#: Maximum age of the requests and samples that rules examine.
RECENT = timedelta(minutes=10)
MAX_REQUESTS = 1000
#: Minimum number of requests for a share or percentile to be meaningful.
MIN_REQUESTS = 20
#: Minimum share of failed requests.
ERROR_SHARE = 0.05
#: Minimum 95th percentile of the time to first token, and its minimum ratio to yesterday's.
SLOW_TTFT_MS, SLOW_FACTOR = 2000.0, 3.0
#: Minimum mean number of waiting requests, and its minimum ratio to the running ones.
MIN_WAITING, WAITING_FACTOR = 10.0, 2.0
#: Minimum free share of the data dir's disk.
MIN_FREE_SHARE = 0.05
#: Recently used keys that expire within this time are reported.
KEY_EXPIRES_WITHIN = timedelta(days=7)
#: Certificates that expire within this time are reported; short-lived ones within the last third
#: of their lifetime.
CERTIFICATE_EXPIRES_WITHIN = timedelta(days=14)
#: Minimum number of unexpected exits of a replica within an hour.
MIN_EXITS = 3
RETENTION = timedelta(days=90)
#: Time after which another check may send the mail of a check that died.
MAIL_CLAIM_LIFETIME = timedelta(minutes=10)
#: Minimum time between two mails, or two events, about the same rule and subject.
NOTIFY_INTERVAL = timedelta(hours=1)

#: Subject and description of a problem.
Finding = tuple[str, str]


def failed_replicas() -> Iterator[Finding]:
    """Failed replicas of loaded models."""
    failed = _replicas_of_loaded_models().filter(
        exits_last_hour__lt=MIN_EXITS, state=ReplicaState.FAILED
    )
    for row in failed:
        reason = " ".join((row.detail or row.last_exit).split())[:300]
        yield row.replica_id, f"{row.served_model.name} has a failed replica: {reason}"


def crash_loops() -> Iterator[Finding]:
    """Replicas of loaded models that exited unexpectedly several times within an hour."""
    for row in _replicas_of_loaded_models().filter(exits_last_hour__gte=MIN_EXITS):
        reason = " ".join(row.last_exit.split())[:300]
        text = f"{row.served_model.name}: {row.replica_id} ended {row.exits_last_hour} times"
        yield row.replica_id, f"{text} within an hour, last because {reason}"


def _replicas_of_loaded_models() -> QuerySet[Replica]:
    """Replicas of models whose desired state is loaded, except stopped ones."""
    replicas = Replica.objects.filter(served_model__desired_state=DesiredState.LOADED)
    return replicas.exclude(state=ReplicaState.STOPPED).select_related("served_model")


def error_rate() -> Iterator[Finding]:
    """Models with a high share of failed requests."""
    for model, entries in _recent_requests().items():
        failed = sum(entry.status >= 500 for entry in entries)
        if len(entries) >= MIN_REQUESTS and failed >= ERROR_SHARE * len(entries):
            share = 100 * failed / len(entries)
            yield model, f"{share:.0f} % of the last {len(entries)} requests to {model} failed."


def slow_first_tokens() -> Iterator[Finding]:
    """Models whose time to first token is much longer than the day before."""
    now = timezone.now()
    previous_day_requests = RequestEntry.objects.filter(
        started_at__gte=now - timedelta(days=1), started_at__lt=now - RECENT
    )
    for model, entries in _recent_requests().items():
        current = _p95_ttft([entry.ttft_ms for entry in entries])
        if current is None or current < SLOW_TTFT_MS:
            continue
        earlier = previous_day_requests.filter(model=model).order_by("-started_at")
        usual = _p95_ttft(list(earlier.values_list("ttft_ms", flat=True)[:MAX_REQUESTS]))
        if usual is not None and current >= SLOW_FACTOR * usual:
            yield (
                model,
                f"{model}: 95 % of first tokens come within {current / 1000:.1f} s, "
                f"{usual / 1000:.1f} s the day before.",
            )


def long_queues() -> Iterator[Finding]:
    """Models with many more waiting than running requests."""
    since = (timezone.now() - RECENT).timestamp()
    rows = PoolSample.objects.filter(width=60, start__gte=since)
    pools: dict[str, list[PoolSample]] = {}
    for row in rows:
        pools.setdefault(row.model, []).append(row)
    for model, samples in pools.items():
        waiting = sum(sample.waiting for sample in samples) / len(samples)
        running = sum(sample.running for sample in samples) / len(samples)
        if waiting >= MIN_WAITING and waiting >= WAITING_FACTOR * running:
            text = f"{waiting:.0f} requests wait at {model} while {running:.0f} run."
            yield model, f"{text} More replicas would shorten the queue."


def full_disk() -> Iterator[Finding]:
    """The data dir's disk, if little of it is free."""
    usage = shutil.disk_usage(settings.DATA_DIR)
    if usage.free < MIN_FREE_SHARE * usage.total:
        free = f"{usage.free >> 20} MB ({100 * usage.free / usage.total:.1f} %)"
        yield str(settings.DATA_DIR), f"The disk of {settings.DATA_DIR} has {free} free."


def expiring_keys() -> Iterator[Finding]:
    """API keys in use that expire soon, except keys created for less than a week."""
    now = timezone.now()
    keys = ApiKey.objects.filter(
        revoked_at=None,
        expires_at__gt=now,
        expires_at__lt=now + KEY_EXPIRES_WITHIN,
        expires_at__gte=F("created_at") + KEY_EXPIRES_WITHIN,
        last_used_at__gt=now - KEY_EXPIRES_WITHIN,
    )
    for key in keys.select_related("tenant"):
        text = f"The API key {key} of {key.tenant.name} expires at {key.expires_at:%Y-%m-%d %H:%M}"
        yield key.public_id, f"{text} UTC and is in use."


def expiring_certificates() -> Iterator[Finding]:
    """Certificates of gateways and of the proxy that expire soon or have expired."""
    now = timezone.now()
    for certificate in served_certificates():
        notice = min(CERTIFICATE_EXPIRES_WITHIN, certificate.lifetime / 3)
        if certificate.expires_at < now + notice:
            verb = "expires" if certificate.expires_at > now else "expired"
            text = f"{verb} at {certificate.expires_at:%Y-%m-%d %H:%M} UTC"
            yield certificate.name, f"The certificate of {certificate.name} {text}."


#: Name -> rule. The alerts page shows the rule's docstring.
RULES: dict[str, Callable[[], Iterator[Finding]]] = {
    "replica failed": failed_replicas,
    "crash loop": crash_loops,
    "errors": error_rate,
    "slow": slow_first_tokens,
    "queue": long_queues,
    "disk": full_disk,
    "key expires": expiring_keys,
    "certificate expires": expiring_certificates,
}


def check_rules() -> int:
    """Open alerts for new problems, end those of solved problems, and notify operators.

    Returns: number of problems.
    """
    problems = {
        (rule, subject[:255]): text for rule, find in RULES.items() for subject, text in find()
    }
    with transaction.atomic():
        alerts = {(alert.rule, alert.subject): alert for alert in open_alerts()}
        for key, alert in alerts.items():
            if key not in problems:
                alert.finished_at = timezone.now()
                alert.save(update_fields=["finished_at"])
        # A concurrent check may open the same alerts.
        Alert.objects.bulk_create(
            [
                Alert(rule=rule, subject=subject, text=text)
                for (rule, subject), text in problems.items()
                if (rule, subject) not in alerts
            ],
            ignore_conflicts=True,
        )
    _mail_operators()
    _call_webhook()
    return len(problems)


def open_alerts() -> QuerySet[Alert]:
    """Alerts whose problem persists."""
    return Alert.objects.filter(finished_at=None)


def access_alerts(user: Actor | User) -> QuerySet[Alert]:
    """All alerts, newest first. Raises `PermissionDenied` unless the user is an operator."""
    require_operator(user)
    return Alert.objects.all()


@transaction.atomic
def silence_alert(*, actor: Actor | User, alert: Alert, hours: int) -> None:
    """Suppress mails and opening events for the alert's rule and subject for some hours; the event
    of its end is still sent.

    Raises `PermissionDenied`.
    """
    require_operator(actor)
    alert.silenced_until = timezone.now() + timedelta(hours=hours)
    alert.save(update_fields=["silenced_until"])
    log_action(to_actor(actor), "alert.silence", alert, hours=hours)


def forget_old_alerts() -> int:
    """Remove alerts that ended long ago; return their number."""
    return remove_rows(Alert.objects.filter(finished_at__lt=timezone.now() - RETENTION))


def _mail_operators() -> None:
    """Mail new alerts to operators in one message; retry later if no operator could be reached."""
    pending = _pending_alerts("mailed_at")
    operators = User.objects.filter(is_superuser=True, is_active=True).exclude(email="")
    addresses = list(operators.values_list("email", flat=True))
    if not pending or not addresses or not settings.QUIRE.smtp_url:
        return
    # A concurrent check may have claimed some of them.
    pending = [alert for alert in pending if _claim_mail(alert)]
    if not pending:
        return
    subject = pending[0].text.splitlines()[0][:120]
    if len(pending) > 1:
        subject = f"{len(pending)} alerts, the first: {subject}"
    text = "\n".join(f"{alert.started_at:%H:%M} UTC  {alert.text}" for alert in pending)
    num_sent = 0
    for address in addresses:  # one mail per recipient, to hide the other addresses
        try:
            num_sent += send_mail(f"Quire: {subject}", f"{text}\n", None, [address])
        except (SMTPException, OSError) as error:
            logger.warning("alerts were not mailed to an operator: %s", error)
    claimed = Alert.objects.filter(pk__in=[alert.pk for alert in pending])
    if num_sent:
        claimed.update(mailed_at=timezone.now())
    else:
        claimed.update(mail_claimed_at=None)


def _call_webhook() -> None:
    """Send the operators' webhook an event when an alert opens and when it ends."""
    webhook = Webhook.objects.filter(tenant=None).first()
    if webhook is None:
        return
    finished = Alert.objects.filter(webhook_finished_at=None, finished_at__gte=webhook.created_at)
    try:
        for alert in finished.exclude(webhook_at=None).order_by("finished_at"):
            _send_event("alert.finished", alert, "webhook_finished_at")
        for alert in _pending_alerts("webhook_at"):
            _send_event("alert.opened", alert, "webhook_at")
    except RateLimited as error:
        logger.warning("events of alerts wait: %s", error.message)


@transaction.atomic
def _send_event(kind: str, alert: Alert, field: str) -> None:
    """Create the event; store its time in `field`. Raises `RateLimited`, then changes nothing."""
    if not _mark(alert, field):
        return
    values = {
        "alert": alert.pk,
        "rule": alert.rule,
        "subject": alert.subject,
        "text": alert.text,
        "started_at": alert.started_at.isoformat(),
        "finished_at": alert.finished_at and alert.finished_at.isoformat(),
    }
    create_event(None, kind, values)


def _claim_mail(alert: Alert) -> bool:
    """Claim an alert for mailing; return False if a concurrent check has claimed it."""
    now = timezone.now()
    is_free = Q(mail_claimed_at=None) | Q(mail_claimed_at__lt=now - MAIL_CLAIM_LIFETIME)
    unsent = Alert.objects.filter(is_free, pk=alert.pk, mailed_at=None)
    return bool(unsent.update(mail_claimed_at=now))


def _mark(alert: Alert, field: str) -> bool:
    """Store the time of the notification; return False if a concurrent check has done so."""
    unsent = Alert.objects.filter(pk=alert.pk, **{field: None})
    return bool(unsent.update(**{field: timezone.now()}))


def _pending_alerts(field: str) -> list[Alert]:
    """Open alerts without a notification; `field` holds the time of the notification."""
    now = timezone.now()
    # A problem that keeps starting and ending would otherwise be reported every minute.
    is_silent = Q(silenced_until__gt=now) | Q(**{f"{field}__gt": now - NOTIFY_INTERVAL})
    silenced = set(Alert.objects.filter(is_silent).values_list("rule", "subject").distinct())
    return [
        alert
        for alert in open_alerts().filter(**{field: None})
        if (alert.rule, alert.subject) not in silenced
    ]


def _recent_requests() -> dict[str, list[RequestEntry]]:
    """The newest requests by model."""
    rows = RequestEntry.objects.filter(started_at__gte=timezone.now() - RECENT).exclude(model="")
    newest = rows.order_by("-started_at").defer("detail")[:MAX_REQUESTS]
    by_model: dict[str, list[RequestEntry]] = {}
    for entry in newest:
        by_model.setdefault(entry.model, []).append(entry)
    return by_model


def _p95_ttft(values: list[float | None]) -> float | None:
    """95th percentile in milliseconds; None if there are too few values."""
    measured = [value for value in values if value is not None]
    if len(measured) < MIN_REQUESTS:
        return None
    return quantiles(measured, n=20, method="inclusive")[-1]
