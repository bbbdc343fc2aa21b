"""Mails are handed to a worker, sealed, and tried again while their server is away."""

from __future__ import annotations

import smtplib
from collections.abc import Callable
from typing import Any

import pytest
import stamina
from celery.exceptions import Retry
from cryptography.fernet import InvalidToken
from django.core import mail
from django.core.mail import EmailMultiAlternatives
from kombu.exceptions import OperationalError

from accounts import mail_backend as queued_mail
from accounts import tasks
from accounts.mail import mail_settings
from accounts.mail_backend import QueuedBackend, packed, unpacked


def a_mail(**more: Any) -> EmailMultiAlternatives:
    return EmailMultiAlternatives(
        "Join", "https://quire.example/invitation/secret", "q@x.org", ["ada@x.org"], **more
    )


def test_mail_goes_to_the_queue_where_a_server_is_named() -> None:
    mail = mail_settings("smtp://mail.example", "q@example.org")
    assert mail["EMAIL_BACKEND"] == "accounts.mail_backend.QueuedBackend"


def test_a_mail_in_the_queue_is_sealed_and_comes_out_as_it_went_in() -> None:
    initial = a_mail(cc=["b@x.org"], headers={"X-A": "1"}, reply_to=["r@x.org"])
    initial.attach_alternative("<p>Join</p>", "text/html")
    text = packed(initial)
    assert "secret" not in text
    after = unpacked(text)
    assert after.message().as_string().count("<p>Join</p>") == 1
    for name in ("subject", "body", "to", "cc", "reply_to", "extra_headers"):
        assert getattr(after, name) == getattr(initial, name)
    with pytest.raises(InvalidToken):
        unpacked(text[:-4] + "AAAA")


def test_the_request_only_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    queued: list[tuple[str, str]] = []
    monkeypatch.setattr(queued_mail, "send_task", lambda *task: queued.append(task))
    monkeypatch.setattr(smtplib, "SMTP", None)  # a connection would fail
    assert QueuedBackend().send_messages([a_mail(), a_mail()]) == 2
    assert [name for name, _ in queued] == ["config.send_mail"] * 2


def test_the_worker_sends_and_tries_again(
    monkeypatch: pytest.MonkeyPatch, settings: Any, mailoutbox: list[Any]
) -> None:
    monkeypatch.setattr(queued_mail, "SMTP", settings.EMAIL_BACKEND)
    text = packed(a_mail())
    tasks.send_mail(text)
    assert [mail.subject for mail in mailoutbox] == ["Join"]

    def away(*_: Any) -> None:
        raise ConnectionRefusedError

    monkeypatch.setattr(mail.EmailMessage, "send", away)
    with pytest.raises((Retry, ConnectionRefusedError)):
        tasks.send_mail(text)


def test_without_a_queue_the_page_learns_that_nothing_is_on_its_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(queued_mail, "send_task", fails(9))
    with (
        stamina.set_testing(True, attempts=4, cap=True),
        pytest.raises(OSError, match="queue of mails"),
    ):
        QueuedBackend().send_messages([a_mail()])


def test_a_mail_waits_for_a_broker_that_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queued_mail, "send_task", fails(3))
    with stamina.set_testing(True, attempts=4, cap=True):
        assert QueuedBackend().send_messages([a_mail()]) == 1


def fails(times: int) -> Callable[..., None]:
    """A broker that is away for the first calls."""
    errors = iter([OperationalError("no broker")] * times)

    def send(*_: Any) -> None:
        for error in errors:
            raise error

    return send
