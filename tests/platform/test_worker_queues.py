"""Real workers: what hangs in one queue holds up no other, and what takes too long ends."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import openai
import pytest
from celery import Celery
from django.core.management import call_command
from django.core.management.base import CommandError
from kombu.exceptions import OperationalError
from prometheus_client.parser import text_string_to_metric_families

from config import queues
from config.celery import app
from tests.inference import live
from tests.inference.batches.conftest import as_lines, request_line
from tests.platform.instance import internal
from tests.waiting import wait_until

WORKER = [sys.executable, "manage.py", "worker"]
TASK_WORKER = [*WORKER, "--queues", "delivery,identity,maintenance"]
EVENTS = 600

#: In the installation: a tenant whose webhook never answers, with many events, people whom the
#: identity provider is to be asked for, and what shall go on.
_SET_UP = """
import django, sys
django.setup()
from types import SimpleNamespace
from allauth.socialaccount.models import SocialAccount, SocialToken
from django.core.mail import send_mail
from django.utils import timezone
from accounts import group_sync as groups
from metering import actions
from tenants import actions as tenant_actions
from tenants.actors import SYSTEM_ACTOR
from tenants.models import Tenant, User
from common.task_queue import send_task
from tests.platform.budgets import budget, spend

what, address = sys.argv[1:]
if what == "tarpits":
    slow = tenant_actions.create_tenant(actor=SYSTEM_ACTOR, name="Slow")
    actions.set_webhook(actor=SYSTEM_ACTOR, tenant=slow, url=address)
    for number in range(EVENTS):
        actions.send_test_event(actor=SYSTEM_ACTOR, tenant=slow)
    sealed = groups._box().encrypt(b"a token").decode()
    for number in range(50):
        user = User.objects.create(username=f"u{number}")
        account = SocialAccount.objects.create(user=user, provider="sso", uid=str(number))
        SocialToken.objects.create(
            account=account, token="", token_secret=sealed, expires_at=timezone.now()
        )
    send_task("console.sign_on")
else:
    live = Tenant.objects.get(name="Live")
    actions.set_webhook(actor=SYSTEM_ACTOR, tenant=live, url=address)
    world = SimpleNamespace(acme=live, key=live.api_keys.first())
    spend(world, budget(world, tokens=1_000_000), 900_000)
    send_task("metering.alerts")
    send_mail("Join", "Hello", None, ["ada@example.org"])
    gone = tenant_actions.create_tenant(actor=SYSTEM_ACTOR, name="Gone")
    tenant_actions.erase_tenant(actor=SYSTEM_ACTOR, tenant=gone, confirm=gone.slug)
""".replace("EVENTS", str(EVENTS))


class Server:
    """Accepts connections; `answer` speaks with each, in a thread of its own, or never does."""

    def __init__(self, answer: Callable[[socket.socket, list[str]], None] | None = None) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self._answer = answer
        self.connections: list[socket.socket] = []
        self.got: list[str] = []
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/in"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            self.connections.append(connection)
            if self._answer is not None:
                threading.Thread(target=self._answer, args=(connection, self.got)).start()

    def close(self) -> None:
        """Stop listening, and hang up."""
        for connection in (self._listener, *self.connections):
            connection.close()


def webhook(connection: socket.socket, got: list[str]) -> None:
    """Takes an event."""
    with connection, connection.makefile("rb") as lines:
        length = 0
        while (line := lines.readline().strip().lower()) != b"":
            if line.startswith(b"content-length:"):
                length = int(line.partition(b":")[2])
        got.append(json.loads(lines.read(length))["type"])
        connection.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")


def smtp(connection: socket.socket, got: list[str]) -> None:
    """Takes a mail."""
    with connection, connection.makefile("rb") as lines:
        connection.sendall(b"220 here\r\n")
        while line := lines.readline().strip().upper():
            if line == b"DATA":
                connection.sendall(b"354 go on\r\n")
                while (text := lines.readline().strip()) != b".":
                    if text.startswith(b"Subject: "):
                        got.append(text.removeprefix(b"Subject: ").decode())
            connection.sendall(b"221 bye\r\n" if line == b"QUIT" else b"250 ok\r\n")


def shell(of: live.Instance, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], env=of.environment, cwd=live.ROOT, check=True, text=True,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    return done.stdout


@contextmanager
def closing(server: Server) -> Iterator[Server]:
    try:
        yield server
    finally:
        server.close()


@pytest.mark.slow
def test_fault_70_who_never_answers_holds_nobody_else_up(short_tmp: Path) -> None:
    folder = short_tmp / "queues"
    folder.mkdir()
    with ExitStack() as stack:
        tarpit, provider = (stack.enter_context(closing(Server())) for _ in range(2))
        hook, mails = (stack.enter_context(closing(Server(port))) for port in (webhook, smtp))
        of = stack.enter_context(live.instance(folder))
        of.environment |= {
            "QUIRE_EGRESS_NETWORKS": "127.0.0.0/8",
            "QUIRE_SMTP_URL": f"smtp://127.0.0.1:{mails.port}",
            "QUIRE_MAIL_FROM": "quire@example.org",
            "QUIRE_OIDC_ISSUER": f"http://127.0.0.1:{provider.port}",
            "QUIRE_OIDC_CLIENT_ID": "quire",
            "QUIRE_OIDC_CLIENT_SECRET": "a secret",
        }
        stack.enter_context(live.replica(of, "tests.fakes.fake_replica"))
        port, _ = stack.enter_context(live.gateway(of, "uvicorn"))
        for command in (WORKER, TASK_WORKER):
            stack.enter_context(live.process(command, of.environment))
        shell(of, "-c", _SET_UP, "tarpits", tarpit.url)
        wait_until(lambda: tarpit.connections and provider.connections)
        shell(of, "-c", _SET_UP, "others", hook.url)
        client = stack.enter_context(
            openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=of.key, max_retries=0)
        )
        lines = as_lines([request_line(n, body={"model": "m", "max_tokens": 5}) for n in range(4)])
        file = client.files.create(file=("in.jsonl", lines), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
        wait_until(lambda: hook.got == ["budget.alert"])
        wait_until(lambda: "Join" in mails.got)
        erased = "from tenants.models import *; print(Tenant.objects.filter(name='Erased').count())"
        wait_until(lambda: shell(of, "manage.py", "shell", "-v", "0", "-c", erased).strip() == "1")
        waiting = (
            "from metering.models import *; "
            "print(WebhookDelivery.objects.filter(tenant__name='Slow', next_try_at__isnull=False)"
            ".count(), WebhookDelivery.objects.filter(attempts__gt=0, delivered_at=None).count())"
        )
        count, tried = map(int, shell(of, "manage.py", "shell", "-v", "0", "-c", waiting).split())
        assert count == EVENTS
        assert tried <= 5  # and the breaker is open by then


@pytest.fixture
def task_worker(short_tmp: Path) -> Iterator[tuple[live.Instance, subprocess.Popen[bytes]]]:
    """One for the maintenance queue, with a task of the test's own and short limits."""
    folder = short_tmp / f"limits{time.monotonic_ns()}"
    folder.mkdir()
    with live.instance(folder) as of:
        of.environment["CELERY_IMPORTS"] = "tests.platform.test_worker_queues"
        yield of, None  # type: ignore[misc]


#: A worker of one queue with one process, whose tasks hang: they heed the first limit, or nothing.
_HANGS = """
import os, sys, time
from config import queues
from config.management.commands import worker
worker.ENDS_WITHIN_S = 2.0
queues.PROCESS_QUEUES["maintenance"] = 1
queues.ANNOTATIONS["metering.retention"] = {"soft_time_limit": 1, "time_limit": 2}
queues.ANNOTATIONS["metering.check_sums"] = {}
import django
django.setup()
from celery.exceptions import SoftTimeLimitExceeded
from django.core.management import call_command
from metering import tasks

def hang():
    with open(sys.argv[1], "a") as file:
        file.write(f"{os.getpid()}\\n")
    while True:
        try:
            time.sleep(600)
        except SoftTimeLimitExceeded:
            if sys.argv[2] == "heeds":
                raise

tasks.delete_expired_usage = tasks.verify_rollups = hang
call_command("worker", queues="maintenance,identity")
"""
_SEND = """
import django, sys
django.setup()
from common.task_queue import send_task
for name in sys.argv[1:]:
    send_task(name)
"""


def test_fault_70_a_task_that_heeds_its_limit_ends_and_the_next_one_runs(short_tmp: Path) -> None:
    folder, began = short_tmp / "heeds", short_tmp / "heeds-began"
    folder.mkdir()
    with live.instance(folder) as of:
        shell(of, "-c", _SEND, *["metering.retention"] * 2)
        command = [sys.executable, "-c", _HANGS, str(began), "heeds"]
        with live.process(command, of.environment):
            wait_until(lambda: began.exists() and len(began.read_text().split()) == 2)
            assert len(set(began.read_text().split())) == 1  # in the same process


def test_fault_70_a_worker_that_is_told_to_end_takes_what_hangs_along(short_tmp: Path) -> None:
    folder, began = short_tmp / "ends", short_tmp / "ends-began"
    folder.mkdir()
    with live.instance(folder) as of:
        shell(of, "-c", _SEND, "metering.check_sums")
        command = [sys.executable, "-c", _HANGS, str(began), "ignores"]
        with live.process(command, of.environment) as worker:
            wait_until(lambda: began.exists() and began.read_text().split())
            pid = int(began.read_text())
            worker.send_signal(signal.SIGTERM)
            worker.wait(60)
            wait_until(lambda: not Path(f"/proc/{pid}").exists())


def scraped(port: int, token: str) -> dict[tuple[str, ...], float]:
    """Samples of `/metrics` about tasks, by name and values of the sorted labels, and sums over
    processes of Django's.
    """
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/metrics", headers={"Authorization": f"Bearer {token}"}
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        families = list(text_string_to_metric_families(reply.read().decode()))
    samples: dict[tuple[str, ...], float] = {}
    for family in families:
        for sample in family.samples:
            if sample.name.startswith(("quire_task", "django_")):
                labels = [value for name, value in sample.labels.items() if name != "process"]
                key = (sample.name, *labels)
                samples[key] = samples.get(key, 0.0) + sample.value
    return samples


def test_fault_70_what_ignores_its_limit_is_killed_and_metrics_tell_what_waits_and_how_tasks_end(
    short_tmp: Path,
) -> None:
    folder, token = short_tmp / "metrics", "a-token-for-metrics"
    began = folder / "began"
    folder.mkdir()
    waiting = ("quire_task_queue_length", "maintenance")
    with live.instance(folder) as of:
        of.environment["QUIRE_METRICS_TOKEN"] = token
        with (
            live.replica(of, "tests.fakes.fake_replica"),
            live.gateway(of, "uvicorn") as (port, _),
        ):
            assert scraped(port, token)[waiting] == 0
            wait_until(
                lambda: ("django_db_execute_total", "default", "sqlite") in scraped(port, token)
            )
            wait_until(
                lambda: ("django_migrations_applied_total", "default") in scraped(port, token)
            )
            shell(of, "-c", _SEND, "history.forget", *["metering.retention"] * 2)
            samples = scraped(port, token)
            assert samples[waiting] == 3
            assert samples["quire_task_queue_age_seconds", "maintenance"] > 0
            assert samples["quire_task_queue_age_seconds", "delivery"] == 0
            command = [sys.executable, "-c", _HANGS, str(began), "ignores"]
            with live.process(command, of.environment):
                killed = ("quire_tasks_total", "FAILURE", "metering.retention")
                wait_until(lambda: scraped(port, token).get(killed) == 2)
            samples = scraped(port, token)
    assert len(set(began.read_text().split())) == 2  # the second in a process of its own
    assert samples["django_migrations_unapplied_total", "default"] == 0
    assert samples["django_migrations_applied_total", "default"] > 0
    assert samples["django_db_query_duration_seconds_count", "default", "sqlite"] > 0
    assert samples["django_db_new_connections_total", "default", "sqlite"] > 0
    assert ("django_cache_get_total", "redis") in samples
    assert ("django_cache_get_hits_total", "redis") in samples
    for model in ("tenant", "apikey", "servedmodel", "adapterversion"):
        assert ("django_model_inserts_total", model) in samples
    assert samples[waiting] == 0
    assert samples["quire_tasks_total", "SUCCESS", "history.forget"] == 1
    assert samples[killed] == 2
    assert samples["quire_task_seconds_count", "history.forget"] == 1
    assert ("quire_task_seconds_count", "metering.retention") not in samples


#: A worker that writes down who has sent each periodic task, and who runs it.
_WRITES_SENDERS = """
import os, sys
import django
django.setup()
from celery import current_task
from django.core.management import call_command
from adapters import pins

def sync_pins():
    with open(sys.argv[1], "a") as file:
        file.write(f"{current_task.request.origin} {os.getpid()}\\n")
    return 0

pins.sync_pins = sync_pins
call_command("worker")
"""


def test_of_two_workers_one_schedules_and_the_other_takes_over_when_it_is_killed(
    short_tmp: Path,
) -> None:
    folder, senders = short_tmp / "schedulers", short_tmp / "senders"
    folder.mkdir()
    senders.touch()

    def lines() -> list[list[str]]:
        return [line.split() for line in senders.read_text().splitlines()]

    with live.instance(folder) as of:
        of.environment |= internal(sweep_seconds=1)
        command = [sys.executable, "-c", _WRITES_SENDERS, str(senders)]
        with live.process(command, of.environment) as first:
            wait_until(lines)
            with live.process(command, of.environment) as second:
                wait_until(lambda: str(second.pid) in [runner for _, runner in lines()])
                count = len(lines())
                wait_until(lambda: len(lines()) >= count + 3)
                assert {sender.partition("@")[0] for sender, _ in lines()} == {f"gen{first.pid}"}
                first.kill()
                wait_until(lambda: f"gen{second.pid}" in lines()[-1][0])


def test_a_broker_that_is_away_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    away = Celery(broker="redis://127.0.0.1:1", set_as_current=False)
    away.conf.broker_transport_options = app.conf.broker_transport_options
    pauses: list[float] = []
    monkeypatch.setattr("kombu.utils.functional.sleep", pauses.append)
    with pytest.raises(OperationalError):
        away.send_task("metering.alerts", retry=False)
    assert pauses == []


def test_each_task_has_a_queue_and_what_may_hang_has_limits() -> None:
    app.loader.import_default_modules()
    tasks = {name for name in app.tasks if not name.startswith("celery.")}
    assert tasks == set(queues.ROUTES)
    used = {route["queue"] for route in queues.ROUTES.values()}
    assert used == {*queues.THREAD_QUEUES, *queues.PROCESS_QUEUES}
    for name in tasks:
        task = app.tasks[name]
        assert (task.time_limit is not None) == (
            queues.ROUTES[name]["queue"] in queues.PROCESS_QUEUES
        ), name


@pytest.mark.parametrize("text", ["", "jobs,delivery", "mails"])
def test_a_worker_takes_queues_that_there_are_and_one_kind_of_them(text: str) -> None:
    with pytest.raises(CommandError, match=f"got '{text}'"):
        call_command("worker", queues=text)
