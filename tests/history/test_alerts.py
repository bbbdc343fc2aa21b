"""Alerts: when they open and end, who is told, and silence."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from smtplib import SMTPRecipientsRefused
from typing import Any
from unittest.mock import Mock

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from django.core import mail
from django.utils import timezone

from catalog.models import Replica, ServedModel
from history import alerts
from history.certificates import Certificate, CertificatePublisher, served_certificates
from history.models import Alert, PoolSample
from metering.actions import set_webhook
from metering.models import RequestEntry, Webhook, WebhookDelivery
from metering.redis_scripts import redis_key, sync_client
from tenants import actions
from tenants.actors import SYSTEM_ACTOR
from tenants.models import ApiKey, AuditEntry, Tenant, User
from tests.waiting import wait_until

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("live_redis")]


@pytest.fixture
def acme() -> Tenant:
    return actions.create_tenant(actor=SYSTEM_ACTOR, name="Acme")


@pytest.fixture
def operator(settings: Any) -> User:
    settings.QUIRE = settings.QUIRE.model_copy(update={"smtp_url": "smtp://mail"})
    return User.objects.create_superuser("root", "root@example.org")


def requests(tenant: Tenant, count: int, **fields: Any) -> None:
    values = {"endpoint": "chat", "model": "quill", "status": 200, "duration_ms": 5.0}
    values["started_at"] = timezone.now() - timedelta(minutes=1)
    number = RequestEntry.objects.count()
    RequestEntry.objects.bulk_create(
        RequestEntry(request_id=f"r{number + n}", tenant=tenant, **{**values, **fields})
        for n in range(count)
    )


def open_rules() -> set[tuple[str, str]]:
    alerts.check_rules()
    return set(alerts.open_alerts().values_list("rule", "subject"))


def test_a_failed_replica_opens_an_alert_that_ends_with_it(operator: User) -> None:
    model = ServedModel.objects.create(name="quill", source="/m", desired_state="loaded")
    replica = Replica.objects.create(
        served_model=model, replica_id="r1", state="failed", detail="out of memory"
    )
    assert open_rules() == {("replica failed", "r1")}
    assert open_rules() == {("replica failed", "r1")}
    (message,) = mail.outbox  # once, not each minute
    assert message.to == ["root@example.org"]
    assert "quill has a failed replica: out of memory" in message.body
    replica.state = "ready"
    replica.save()
    assert open_rules() == set()
    assert Alert.objects.get().finished_at is not None


def test_many_failed_requests_open_an_alert_and_few_do_not(acme: Tenant) -> None:
    requests(acme, 19, status=500)
    assert open_rules() == set()
    requests(acme, 1)
    assert open_rules() == {("errors", "quill")}
    requests(acme, 400)
    assert open_rules() == set()


def test_slow_first_tokens_are_measured_by_the_day_before(acme: Tenant) -> None:
    earlier = timezone.now() - timedelta(hours=3)
    requests(acme, 30, ttft_ms=500.0, started_at=earlier)
    requests(acme, 30, ttft_ms=1900.0)
    assert open_rules() == set()
    requests(acme, 30, ttft_ms=4000.0)
    assert open_rules() == {("slow", "quill")}
    RequestEntry.objects.filter(started_at=earlier).update(ttft_ms=3000.0)
    assert open_rules() == set()


def test_a_queue_that_is_longer_than_what_runs_opens_an_alert() -> None:
    start = int(timezone.now().timestamp()) // 60 * 60
    sample = PoolSample.objects.create(width=60, start=start, model="quill", running=8, waiting=15)
    assert open_rules() == set()
    sample.waiting = 16
    sample.save()
    assert open_rules() == {("queue", "quill")}


def test_a_key_in_use_that_expires_soon_opens_an_alert(acme: Tenant) -> None:
    key = actions.create_key(actor=SYSTEM_ACTOR, tenant=acme, name="website").key
    soon, now = timezone.now() + timedelta(days=3), timezone.now()
    long_ago = now - timedelta(days=90)
    ApiKey.objects.filter(pk=key.pk).update(created_at=long_ago, expires_at=soon)
    assert open_rules() == set()  # nobody uses it
    ApiKey.objects.filter(pk=key.pk).update(last_used_at=now)
    assert open_rules() == {("key expires", key.public_id)}


def test_keys_that_are_made_for_a_few_days_alert_nobody(acme: Tenant) -> None:
    soon, now = timezone.now() + timedelta(hours=1), timezone.now()
    actions.create_key(actor=SYSTEM_ACTOR, tenant=acme, name="build", expires_at=soon)
    ApiKey.objects.update(last_used_at=now)
    assert open_rules() == set()


def test_a_full_disk_opens_an_alert(monkeypatch: pytest.MonkeyPatch, settings: Any) -> None:
    usage = type("Usage", (), {"total": 1000, "free": 49, "used": 951})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    assert open_rules() == {("disk", str(settings.DATA_DIR))}


def test_a_silenced_alert_is_not_mailed_when_it_comes_again(operator: User) -> None:
    model = ServedModel.objects.create(name="quill", source="/m", desired_state="loaded")
    replica = Replica.objects.create(served_model=model, replica_id="r1", state="failed")
    alerts.check_rules()
    alerts.silence_alert(actor=operator, alert=Alert.objects.get(), hours=1)
    assert AuditEntry.objects.filter(action="alert.silence").exists()
    for state in ("ready", "failed"):
        Replica.objects.filter(pk=replica.pk).update(state=state)
        alerts.check_rules()
    assert Alert.objects.count() == 2
    assert len(mail.outbox) == 1


@pytest.fixture
def webhook(monkeypatch: pytest.MonkeyPatch) -> Webhook:
    """The operators' webhook, for which no worker runs."""
    monkeypatch.setattr("metering.webhooks.send_task_best_effort", lambda *_: None)
    return set_webhook(actor=SYSTEM_ACTOR, tenant=None, url="https://x.example/alerts")


def events() -> list[tuple[str, dict[str, Any]]]:
    """What waits for the webhooks, and of whom."""
    rows = WebhookDelivery.objects.order_by("pk")
    assert {row.tenant for row in rows} <= {None}
    return [(row.kind, json.loads(row.body)) for row in rows]


def test_the_webhook_hears_when_an_alert_begins_and_when_it_is_over(
    acme: Tenant, webhook: Webhook
) -> None:
    set_webhook(actor=SYSTEM_ACTOR, tenant=acme, url="https://x.example/acme")
    model = ServedModel.objects.create(name="quill", source="/m", desired_state="loaded")
    replica = Replica.objects.create(
        served_model=model, replica_id="r1", state="failed", detail="out of memory"
    )
    open_rules()
    open_rules()
    (kind, body), *more = events()  # once, not each minute
    assert (kind, body["type"], more) == ("alert.opened", "alert.opened", [])
    assert (body["tenant"], body["rule"], body["subject"]) == (None, "replica failed", "r1")
    assert body["finished_at"] is None
    assert "out of memory" in body["text"]
    replica.state = "ready"
    replica.save()
    open_rules()
    assert [kind for kind, _ in events()] == ["alert.opened", "alert.finished"]
    assert events()[1][1]["alert"] == body["alert"]
    assert events()[1][1]["finished_at"] is not None


def test_the_webhook_hears_nothing_of_silenced_alerts_and_of_others_once_an_hour(
    operator: User, webhook: Webhook
) -> None:
    model = ServedModel.objects.create(name="quill", source="/m", desired_state="loaded")
    replica = Replica.objects.create(served_model=model, replica_id="r1", state="failed")
    for state in ("failed", "ready", "failed", "ready", "failed"):
        Replica.objects.filter(pk=replica.pk).update(state=state)
        alerts.check_rules()
    assert [kind for kind, _ in events()] == ["alert.opened", "alert.finished"]
    Alert.objects.update(webhook_at=None)
    alerts.silence_alert(actor=operator, alert=alerts.open_alerts().get(), hours=1)
    alerts.check_rules()
    assert len(events()) == 2


def test_rules_are_checked_while_too_many_events_wait(
    webhook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("metering.webhooks.MAX_WAITING", 0)
    model = ServedModel.objects.create(name="quill", source="/m", desired_state="loaded")
    Replica.objects.create(served_model=model, replica_id="r1", state="failed")
    assert open_rules() == {("replica failed", "r1")}
    monkeypatch.undo()
    monkeypatch.setattr("metering.webhooks.send_task_best_effort", lambda *_: None)
    alerts.check_rules()
    assert [kind for kind, _ in events()] == ["alert.opened"]


def test_a_replica_that_fails_again_and_again_is_mailed_once_an_hour(operator: User) -> None:
    model = ServedModel.objects.create(name="quill", source="/m", desired_state="loaded")
    replica = Replica.objects.create(served_model=model, replica_id="r1", state="failed")
    for state in ("failed", "ready", "failed", "ready", "failed"):
        Replica.objects.filter(pk=replica.pk).update(state=state)
        alerts.check_rules()
    assert (Alert.objects.count(), len(mail.outbox)) == (3, 1)
    Alert.objects.update(mailed_at=timezone.now() - timedelta(hours=2))
    Alert.objects.filter(finished_at=None).update(mailed_at=None)
    alerts.check_rules()
    assert len(mail.outbox) == 2


def test_the_mail_of_a_check_that_died_is_sent_by_another_one(
    operator: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ServedModel.objects.create(name="quill", source="/m", desired_state="loaded")
    Replica.objects.create(served_model=model, replica_id="r1", state="failed")
    with monkeypatch.context() as dying:
        dying.setattr(alerts, "send_mail", Mock(side_effect=SystemExit))
        with pytest.raises(SystemExit):
            alerts.check_rules()
    alerts.check_rules()  # the first one might still send it
    assert len(mail.outbox) == 0
    Alert.objects.update(mail_claimed_at=timezone.now() - alerts.MAIL_CLAIM_LIFETIME)
    for _ in range(2):
        alerts.check_rules()
    assert len(mail.outbox) == 1


def test_checks_that_overlap_open_an_alert_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk() -> Iterator[alerts.Finding]:
        Alert.objects.create(rule="disk", subject="/data", text="Full.")  # the other check
        yield "/data", "Full."

    monkeypatch.setattr(alerts, "RULES", {"disk": full_disk})
    monkeypatch.setattr(alerts, "open_alerts", Alert.objects.none)  # which came after the look
    alerts.check_rules()
    assert Alert.objects.count() == 1


def fail(model: ServedModel, **fields: Any) -> Replica:
    return Replica.objects.create(served_model=model, replica_id="r1", state="failed", **fields)


def test_the_end_of_an_alert_is_sent_once_fewer_events_wait(
    webhook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ServedModel.objects.create(name="quill", source="/m", desired_state="loaded")
    replica = fail(model)
    alerts.check_rules()
    replica.delete()
    with monkeypatch.context() as full:
        full.setattr("metering.webhooks.MAX_WAITING", 1)
        alerts.check_rules()
        assert [kind for kind, _ in events()] == ["alert.opened"]
    for _ in range(2):
        alerts.check_rules()
    assert [kind for kind, _ in events()] == ["alert.opened", "alert.finished"]


def test_a_new_webhook_hears_no_ends_of_before(webhook: Webhook) -> None:
    model = ServedModel.objects.create(name="quill", source="/m", desired_state="loaded")
    replica = fail(model)
    alerts.check_rules()
    Webhook.objects.all().delete()
    replica.delete()
    alerts.check_rules()
    set_webhook(actor=SYSTEM_ACTOR, tenant=None, url="https://y.example/alerts")
    alerts.check_rules()
    assert [kind for kind, _ in events()] == ["alert.opened"]


def test_checks_that_overlap_notify_once(
    operator: User, webhook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ServedModel.objects.create(name="quill", source="/m", desired_state="loaded")
    replica = fail(model)
    pending_alerts = alerts._pending_alerts

    def overlapped(field: str) -> list[Alert]:
        rows = pending_alerts(field)
        with monkeypatch.context() as isolated:  # the other check, from its begin to its end
            isolated.setattr(alerts, "_pending_alerts", pending_alerts)
            alerts.check_rules()
        return rows

    monkeypatch.setattr(alerts, "_pending_alerts", overlapped)
    alerts.check_rules()
    assert [kind for kind, _ in events()] == ["alert.opened"]
    assert len(mail.outbox) == 1
    replica.delete()
    alerts.check_rules()
    assert [kind for kind, _ in events()] == ["alert.opened", "alert.finished"]


def test_mail_that_could_not_be_sent_is_sent_at_the_next_check(
    operator: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(ServedModel.objects.create(name="quill", source="/m", desired_state="loaded"))

    def refuse(*arguments: Any) -> None:
        raise OSError("connection refused")

    with monkeypatch.context() as broken:
        broken.setattr(alerts, "send_mail", refuse)
        alerts.check_rules()
    assert mail.outbox == []
    alerts.check_rules()
    assert len(mail.outbox) == 1


def test_an_address_that_is_refused_keeps_mail_from_nobody(
    operator: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("anna", "zoe"):
        User.objects.create(username=name, email=f"{name}@mail.example", is_superuser=True)
    fail(ServedModel.objects.create(name="quill", source="/m", desired_state="loaded"))
    send = alerts.send_mail

    def send_mail(subject: str, text: str, sender: None, addresses: list[str]) -> int:
        if addresses == ["anna@mail.example"]:
            raise SMTPRecipientsRefused({})
        return send(subject, text, sender, addresses)

    monkeypatch.setattr(alerts, "send_mail", send_mail)
    for _ in range(2):
        alerts.check_rules()
    sent = sorted(message.to[0] for message in mail.outbox)
    assert sent == sorted([operator.email, "zoe@mail.example"])


def test_a_replica_that_ends_again_and_again_is_a_crash_loop_whatever_it_does_now() -> None:
    model = ServedModel.objects.create(name="quill", source="/m", desired_state="loaded")
    replica = Replica.objects.create(
        served_model=model, replica_id="r1", state="loading", exits_last_hour=2
    )
    assert open_rules() == set()
    replica.exits_last_hour, replica.last_exit = 3, "the replica exited with status 1"
    replica.save()
    assert open_rules() == {("crash loop", "r1")}
    assert "ended 3 times within an hour" in Alert.objects.get().text
    model.desired_state = "unloaded"
    model.save()
    assert open_rules() == set()


def test_a_gateways_certificate_that_expires_soon_opens_an_alert(tmp_path: Path) -> None:
    publisher = CertificatePublisher(write_certificate(tmp_path, days=13))
    publisher.start()
    name = f"{socket.gethostname()} (cert.pem)"
    try:
        wait_until(lambda: list(served_certificates()) != [])
    finally:
        publisher.stop()
    assert open_rules() == {("certificate expires", name)}
    with sync_client() as client:
        assert b"PRIVATE" not in client.hget(redis_key("certificates"), name)
    renewed = CertificatePublisher(write_certificate(tmp_path, days=60))
    renewed.start()
    try:
        wait_until(lambda: open_rules() == set())
    finally:
        renewed.stop()


def test_a_gateway_that_is_gone_has_no_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = CertificatePublisher(write_certificate(tmp_path, days=1))
    publisher.start()
    try:
        wait_until(lambda: list(served_certificates()) != [])
    finally:
        publisher.stop()
    monkeypatch.setattr("history.certificates.MAX_SILENCE_S", -1.0)
    assert open_rules() == set()


def test_short_lived_certificates_alert_in_the_last_third(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for days_remaining, rules in ((3, 0), (1, 1), (-1, 1)):
        expires_at = timezone.now() + timedelta(days=days_remaining)
        certificate = Certificate("example.org", expires_at, timedelta(days=6))
        monkeypatch.setattr(alerts, "served_certificates", lambda row=certificate: [row])
        assert len(open_rules()) == rules


def test_the_proxys_certificate_is_read_by_the_public_names(
    tmp_path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    path = write_certificate(tmp_path, days=3)
    context.load_cert_chain(path)
    names = ("localhost", "127.0.0.1", "*", ".example.org", "quire.test", "nowhere.test")
    settings.QUIRE = settings.QUIRE.model_copy(update={"tls": "proxy", "allowed_hosts": names})
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def connect(address: tuple[str, int], timeout: float) -> socket.socket:
            if address != ("quire.test", 443):
                raise OSError(f"{address} is unknown")
            return baseline_connect(("127.0.0.1", port), timeout=timeout)

        def serve() -> None:
            with context.wrap_socket(listener.accept()[0], server_side=True):
                pass

        baseline_connect = socket.create_connection
        monkeypatch.setattr("ssl.create_connection", connect)
        thread = threading.Thread(target=serve)
        thread.start()
        rows = list(served_certificates())
        thread.join()
    (row,) = rows
    assert row.name == "quire.test"
    assert timedelta(days=2) < row.expires_at - timezone.now() < timedelta(days=4)


def write_certificate(folder: Path, days: int) -> Path:
    """A certificate of 90 days that has so many left, and its key, in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "quire.test")])
    end = timezone.now() + timedelta(days=days)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(end - timedelta(days=90))
        .not_valid_after(end)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path = folder / "cert.pem"
    path.write_bytes(secret + signed.public_bytes(pem))
    return path


def test_old_alerts_are_forgotten() -> None:
    long_ago = timezone.now() - timedelta(days=91)
    Alert.objects.create(rule="disk", subject="x", text="Full.", finished_at=long_ago)
    Alert.objects.create(rule="disk", subject="x", text="Full.", started_at=long_ago)
    assert alerts.forget_old_alerts() == 1
    assert Alert.objects.get().finished_at is None
