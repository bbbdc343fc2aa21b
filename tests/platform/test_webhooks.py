"""Soft limits by mail and webhook: signed, tried again, never into the private network."""

from __future__ import annotations

import contextlib
import hmac
import io
import json
import secrets
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
from celery.exceptions import SoftTimeLimitExceeded
from django.core.cache import cache
from django.core.management import call_command
from django.db import IntegrityError, connection, transaction
from django.utils import timezone

from common import outbound_http
from common.errors import Conflict, NotFound, PermissionDenied, RateLimited
from engine.contract.errors import InvalidRequest
from metering import actions, alerts, webhooks
from metering.models import Budget, Webhook, WebhookDelivery
from tenants.actors import SYSTEM_ACTOR
from tenants.models import AuditEntry
from tests.platform.budgets import budget, spend
from tests.platform.conftest import World

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("with_redis")]


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A webhook that keeps what it gets and answers with what it's told to, then with 204."""

    class Receiver:
        def __init__(self) -> None:
            self.got: list[tuple[str, bytes, dict[str, str]]] = []
            self.answers: list[int] = []

        def __call__(self, url: str, body: bytes, headers: dict[str, str]) -> int:
            self.got.append((url, body, headers))
            return self.answers.pop(0) if self.answers else 204

    receiver = Receiver()
    monkeypatch.setattr(webhooks, "post_webhook", receiver)
    monkeypatch.setattr(webhooks, "send_task_best_effort", lambda *_: None)  # no worker runs
    return receiver


@pytest.mark.database
def test_two_addresses_that_are_set_at_once_leave_one_of_them(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, make_token = threading.Barrier(2), secrets.token_hex
    faults: list[BaseException] = []

    def token_hex(size: int) -> str:
        with contextlib.suppress(threading.BrokenBarrierError):  # one waits for the other
            both.wait(1.0)
        return make_token(size)

    def set_webhook(url: str) -> None:
        try:
            actions.set_webhook(actor=world.admin, tenant=world.acme, url=url)
        except BaseException as fault:
            faults.append(fault)
        finally:
            connection.close()

    monkeypatch.setattr(actions.secrets, "token_hex", token_hex)
    urls = ["https://x.example/in", "https://y.example/in"]
    threads = [threading.Thread(target=set_webhook, args=(url,)) for url in urls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert Webhook.objects.get(tenant=world.acme).url in urls
    assert AuditEntry.objects.filter(action="webhook.set").count() == 2


def deliver_due() -> int:
    """What workers do when they look for what is due; how many events were taken."""
    due = WebhookDelivery.objects.filter(next_try_at__lte=timezone.now()).order_by("pk")
    tried = [webhooks.deliver_event(pk) for pk in list(due.values_list("pk", flat=True))]
    return sum(row is not None and row.state == "delivered" for row in tried)


def due_now() -> None:
    """As if the pauses before the next try were over."""
    cache.clear()
    waiting = WebhookDelivery.objects.exclude(next_try_at=None)
    waiting.update(next_try_at=timezone.now())


def test_a_tenant_is_told_once_a_period_by_mail_and_signed_webhook(
    world: World, settings: Any, mailoutbox: Any, receiver: Any
) -> None:
    settings.QUIRE = settings.QUIRE.replace(
        smtp_url="smtp://mail.example.org", mail_from="quire@mail.example"
    )
    hook = actions.set_webhook(actor=world.admin, tenant=world.acme, url="https://x.example/in")
    of = budget(world, tokens=100)
    spend(world, of, 79)
    assert alerts.send_budget_alerts() == 0
    spend(world, of, 1)
    assert alerts.send_budget_alerts() == 1
    assert sorted(mail.to[0] for mail in mailoutbox) == ["admin@example.org", "owner@example.org"]
    assert "80 % of a budget of acme" in mailoutbox[0].subject
    assert alerts.send_budget_alerts() == 0
    assert deliver_due() == 1
    assert deliver_due() == 0
    ((url, body, headers),) = receiver.got
    payload = json.loads(body)
    assert (url, payload["type"], payload["percent"]) == (
        "https://x.example/in",
        "budget.alert",
        80,
    )
    assert (payload["tenant"], payload["id"]) == ("acme", headers["X-Quire-Event"])
    seconds = int(headers["X-Quire-Signature"].split(",")[0].removeprefix("t="))
    digest = hmac.digest(hook.secret.encode(), f"{seconds}.".encode() + body, "sha256").hex()
    assert headers["X-Quire-Signature"] == f"t={seconds},v1={digest}"
    # The next period is told of anew.
    earlier = of.created_at - timedelta(days=2)
    Budget.objects.update(alerted_for=earlier, webhook_for=earlier)
    assert alerts.send_budget_alerts() == 1
    assert (len(mailoutbox), deliver_due()) == (4, 1)


def test_an_event_is_tried_again_under_one_id_until_it_is_taken(
    world: World, receiver: Any
) -> None:
    actions.set_webhook(actor=world.admin, tenant=world.acme, url="https://x.example/in")
    receiver.answers = [500, 302, 204]
    response = actions.send_test_event(actor=world.admin, tenant=world.acme)
    for attempts, status, state in (
        (1, 500, "waiting"),
        (2, 302, "waiting"),
        (3, 204, "delivered"),
    ):
        deliver_due()
        deliver_due()  # not before its time
        response.refresh_from_db()
        assert (response.attempts, response.status, response.state) == (attempts, status, state)
        due_now()
    assert {headers["X-Quire-Event"] for _, _, headers in receiver.got} == {response.event_id}
    assert len({body for _, body, _ in receiver.got}) == 1


def test_an_event_is_given_up_in_the_end_and_may_be_sent_again(world: World, receiver: Any) -> None:
    actions.set_webhook(actor=world.admin, tenant=world.acme, url="https://x.example/in")
    receiver.answers = [503] * 6
    delivery = actions.send_test_event(actor=world.admin, tenant=world.acme)
    for _ in range(9):
        deliver_due()
        due_now()
    delivery.refresh_from_db()
    assert (delivery.attempts, delivery.state, len(receiver.got)) == (6, "failed", 6)
    with pytest.raises(PermissionDenied):
        actions.redeliver(actor=world.member, delivery=delivery)
    actions.redeliver(actor=world.owner, delivery=delivery)
    assert deliver_due() == 1
    delivery.refresh_from_db()
    with pytest.raises(Conflict):
        actions.redeliver(actor=world.owner, delivery=delivery)


def test_two_workers_send_an_event_once(
    world: World, receiver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    actions.set_webhook(actor=world.admin, tenant=world.acme, url="https://x.example/in")
    delivery = actions.send_test_event(actor=world.admin, tenant=world.acme)
    seen: list[Any] = []

    def slow(*_: Any) -> int:
        seen.append(webhooks.deliver_event(delivery.pk))  # another worker, meanwhile
        return 204

    monkeypatch.setattr(webhooks, "post_webhook", slow)
    assert deliver_due() == 1
    assert seen == [None]


def test_operators_have_one_webhook_whose_events_are_signed(receiver: Any) -> None:
    for url in ("https://x.example/old", "https://x.example/alerts"):
        output = io.StringIO()
        call_command("set_webhook", "--operators", url, stdout=output)
    hook = Webhook.objects.get(tenant=None)
    assert output.getvalue() == f"{hook.secret}\n"
    with pytest.raises(IntegrityError), transaction.atomic():
        Webhook.objects.create(tenant=None, url="https://y.example/", secret="x")
    actions.send_test_event(actor=SYSTEM_ACTOR, tenant=None)
    actions.send_test_event(actor=SYSTEM_ACTOR, tenant=None)
    assert webhooks.deliver_due_events() == 1, "one of this owner at a time"
    assert deliver_due() == 2
    url, body, headers = receiver.got[0]
    assert (url, json.loads(body)["tenant"]) == (hook.url, None)
    seconds = int(headers["X-Quire-Signature"].split(",")[0].removeprefix("t="))
    assert headers["X-Quire-Signature"] == webhooks.signature(hook.secret, body, seconds)
    call_command("set_webhook", "--operators", "--off", stdout=output)
    assert not Webhook.objects.exists()


def test_an_event_for_an_address_that_was_changed_goes_nowhere(world: World, receiver: Any) -> None:
    actions.set_webhook(actor=world.admin, tenant=world.acme, url="https://x.example/in")
    delivery = actions.send_test_event(actor=world.admin, tenant=world.acme)
    actions.set_webhook(actor=world.admin, tenant=world.acme, url="https://y.example/in")
    deliver_due()
    delivery.refresh_from_db()
    assert (delivery.state, receiver.got) == ("failed", [])
    assert "changed" in delivery.error


def test_the_log_forgets_what_is_old_and_settled(world: World, receiver: Any) -> None:
    actions.set_webhook(actor=world.admin, tenant=world.acme, url="https://x.example/in")
    old, new, waiting = (
        actions.send_test_event(actor=world.admin, tenant=world.acme) for _ in range(3)
    )
    webhooks.deliver_event(old.pk)
    webhooks.deliver_event(new.pk)
    long_ago = timezone.now() - webhooks.LOG_RETENTION - timedelta(hours=1)
    WebhookDelivery.objects.exclude(pk=new.pk).update(created_at=long_ago)
    assert webhooks.forget_old() == 1
    assert set(WebhookDelivery.objects.all()) == {new, waiting}


def test_fault_62_a_webhook_into_the_private_network_is_never_called(
    world: World, settings: Any
) -> None:
    import http.server
    import threading

    asked: list[str] = []

    class Inside(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.path)
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    server = http.server.HTTPServer(("127.0.0.1", 0), Inside)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/in"
        private = settings.QUIRE
        with pytest.raises(InvalidRequest, match="private network"):
            actions.set_webhook(actor=world.owner, tenant=world.acme, url=url)
        settings.QUIRE = private.replace(egress_networks=("127.0.0.0/8",))
        actions.set_webhook(actor=world.owner, tenant=world.acme, url=url)
        settings.QUIRE = private
        spend(world, budget(world, tokens=100), 100)
        assert alerts.send_budget_alerts() == 1
        assert deliver_due() == 0
        assert asked == []
        assert "private network" in WebhookDelivery.objects.get().error
        due_now()
        settings.QUIRE = settings.QUIRE.replace(egress_networks=("127.0.0.0/8",))
        assert deliver_due() == 1
        assert asked == ["/in"]
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(("who", "refused"), [("member", PermissionDenied), ("outsider", NotFound)])
def test_admins_set_webhooks(world: World, who: str, refused: Any) -> None:
    url = "https://x.example/in"
    with pytest.raises(refused):
        actions.set_webhook(actor=world.user(who), tenant=world.acme, url=url)
    with pytest.raises(InvalidRequest):
        actions.set_webhook(actor=world.admin, tenant=world.acme, url="file:///etc/passwd")
    actions.set_webhook(actor=world.admin, tenant=world.acme, url=url)
    with pytest.raises(refused):
        actions.delete_webhook(actor=world.user(who), tenant=world.acme)
    actions.delete_webhook(actor=world.admin, tenant=world.acme)
    entries = AuditEntry.objects.filter(action__startswith="webhook.")
    assert entries.count() == 2


def test_fault_70_an_address_that_fails_is_left_in_peace_for_a_while(
    world: World, receiver: Any
) -> None:
    actions.set_webhook(actor=world.admin, tenant=world.acme, url="https://x.example/in")
    for _ in range(20):
        actions.send_test_event(actor=world.admin, tenant=world.acme)
    receiver.answers = [503] * outbound_http.MAX_FAILURES
    assert deliver_due() == 0
    assert len(receiver.got) == outbound_http.MAX_FAILURES
    assert deliver_due() == 0
    assert len(receiver.got) == outbound_http.MAX_FAILURES
    due_now()
    assert deliver_due() == 20
    # One that answers meanwhile begins the count anew.
    for answer in (503, 503, 503, 503, 204, 503, 503, 503, 503, 204):
        receiver.answers.append(answer)
        actions.send_test_event(actor=world.admin, tenant=world.acme)
        deliver_due()
    assert len(receiver.got) == outbound_http.MAX_FAILURES + 20 + 10


def test_fault_70_a_pause_ends_by_itself_and_with_a_new_address(
    world: World, receiver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbound_http, "PAUSE_S", 0.2)
    actions.set_webhook(actor=world.admin, tenant=world.acme, url="https://x.example/in")
    for _ in range(outbound_http.MAX_FAILURES + 1):
        actions.send_test_event(actor=world.admin, tenant=world.acme)
    receiver.answers = [503] * outbound_http.MAX_FAILURES
    assert deliver_due() == 0
    deadline = time.monotonic() + 60
    while deliver_due() == 0:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    monkeypatch.undo()
    monkeypatch.setattr(webhooks, "post_webhook", receiver)
    monkeypatch.setattr(webhooks, "send_task_best_effort", lambda *_: None)
    receiver.answers = [503] * outbound_http.MAX_FAILURES
    for _ in range(outbound_http.MAX_FAILURES):
        actions.send_test_event(actor=world.admin, tenant=world.acme)
    deliver_due()
    actions.set_webhook(actor=world.admin, tenant=world.acme, url="https://y.example/in")
    actions.send_test_event(actor=world.admin, tenant=world.acme)
    assert deliver_due() == 1


def test_fault_70_a_tenant_has_a_bounded_number_of_events_waiting(
    world: World, receiver: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(webhooks, "MAX_WAITING", 3)
    receiver.answers = [503] * 3
    actions.set_webhook(actor=world.admin, tenant=world.acme, url="https://x.example/in")
    actions.set_webhook(actor=world.outsider, tenant=world.rival, url="https://z.example/in")
    deliveries = [actions.send_test_event(actor=world.admin, tenant=world.acme) for _ in range(3)]
    deliver_due()  # in vain: they wait for their next try
    with pytest.raises(RateLimited, match="3 events wait"):
        actions.send_test_event(actor=world.admin, tenant=world.acme)
    # An alert is sent once there is room.
    spend(world, budget(world, tokens=100), 100)
    assert alerts.send_budget_alerts() == 0
    assert "an alert of acme waits: 3 events wait" in caplog.text
    actions.send_test_event(actor=world.outsider, tenant=world.rival)  # another's has room
    WebhookDelivery.objects.filter(pk=deliveries[0].pk).update(next_try_at=None)
    assert alerts.send_budget_alerts() == 1
    with pytest.raises(RateLimited):
        actions.redeliver(actor=world.owner, delivery=deliveries[0])


def test_fault_70_a_tenant_is_sent_one_event_at_a_time_and_all_in_the_end(
    world: World, receiver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that meets another one leaves its event to it."""
    actions.set_webhook(actor=world.admin, tenant=world.acme, url="https://x.example/in")
    deliveries = [actions.send_test_event(actor=world.admin, tenant=world.acme) for _ in range(4)]
    hints: list[int] = []
    monkeypatch.setattr(webhooks, "send_task_best_effort", lambda name, pk: hints.append(pk))
    seen: list[Any] = []

    def slow(*_: Any) -> int:
        seen.extend(webhooks.deliver_event(delivery.pk) for delivery in deliveries)
        return 204

    monkeypatch.setattr(webhooks, "post_webhook", slow)
    webhooks.deliver_event(deliveries[0].pk)
    assert seen == [None] * 4
    assert hints == [deliveries[1].pk]
    while hints:
        webhooks.deliver_event(hints.pop())
    assert {delivery.state for delivery in WebhookDelivery.objects.all()} == {"delivered"}


def test_fault_70_each_tenant_with_something_due_gets_its_turn(
    world: World, receiver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    actions.set_webhook(actor=world.admin, tenant=world.acme, url="https://x.example/in")
    actions.set_webhook(actor=world.outsider, tenant=world.rival, url="https://z.example/in")
    first, *_ = [actions.send_test_event(actor=world.admin, tenant=world.acme) for _ in range(50)]
    other = actions.send_test_event(actor=world.outsider, tenant=world.rival)
    hints: list[int] = []
    monkeypatch.setattr(webhooks, "send_task_best_effort", lambda name, pk: hints.append(pk))
    assert webhooks.deliver_due_events() == 2
    assert hints == [first.pk, other.pk]


def test_fault_70_a_try_that_is_ended_counts_as_a_failure_and_comes_again(
    world: World, receiver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    actions.set_webhook(actor=world.admin, tenant=world.acme, url="https://x.example/in")
    delivery = actions.send_test_event(actor=world.admin, tenant=world.acme)

    def refuse_connection(*_: Any) -> int:
        raise SoftTimeLimitExceeded

    monkeypatch.setattr(webhooks, "post_webhook", refuse_connection)
    webhooks.deliver_event(delivery.pk)
    delivery.refresh_from_db()
    assert (delivery.state, delivery.attempts, delivery.error) == (
        "waiting",
        1,
        "The try took too long.",
    )
    due_now()

    def killed(*_: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(webhooks, "post_webhook", killed)
    for _ in range(5):
        with pytest.raises(KeyboardInterrupt):
            webhooks.deliver_event(delivery.pk)
        due_now()
    delivery.refresh_from_db()
    assert (delivery.state, delivery.attempts) == ("failed", 6)
