"""What waits between the inbox and the engine's loop: whose turn it is."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest

from engine.contract.messages import AbortRequest, ControlRequest, EngineRequest, FollowPrefill
from engine.serving.inbox import TenantInbox


def request(name: str, tenant: str, priority: int = 0) -> EngineRequest:
    return EngineRequest(
        request_id=name, gateway_id="g", prompt_token_ids=[1], tenant=tenant, priority=priority
    )


def abort(name: str) -> AbortRequest:
    return AbortRequest(request_id=name)


def control(name: str) -> ControlRequest:
    return ControlRequest(command=name, control_id=name)


def intake_of(*messages: Any) -> TenantInbox:
    intake = TenantInbox()
    for message in messages:
        intake.put((name_of(message).encode(), message))
    return intake


def name_of(message: Any) -> str:
    if isinstance(message, ControlRequest):
        return message.command
    return f"{'-' if isinstance(message, AbortRequest) else ''}{message.request_id}"


def pop_ids(intake: TenantInbox, max_requests: int = 1000) -> list[str]:
    texts: list[str] = []
    while len(texts) < max_requests and not intake.empty():
        texts.append(intake.get_nowait()[0].decode())
    return texts


def test_fault_51_hundreds_of_one_tenants_requests_are_one_turn_to_another() -> None:
    flood = [request(f"a{number}", "a") for number in range(300)]
    intake = intake_of(*flood[:200], request("b0", "b"), request("b1", "b"), *flood[200:])
    assert pop_ids(intake, 5) == ["a0", "b0", "a1", "b1", "a2"]
    intake.put((b"c0", request("c0", "c")))
    assert pop_ids(intake, 3) == ["a3", "c0", "a4"]
    assert pop_ids(intake) == [f"a{number}" for number in range(5, 300)]
    assert intake._queued_by_id == {}


def test_prefills_that_are_followed_take_turns_by_tenant() -> None:
    """Hundreds of long prompts are hashed as long as hundreds of requests are admitted."""
    flood = [(b"f%d" % number, FollowPrefill(request=request("f", "a"))) for number in range(300)]
    intake = TenantInbox()
    for entry in (*flood, (b"a0", request("a0", "a")), (b"b0", request("b0", "b"))):
        intake.put(entry)
    assert pop_ids(intake, 3) == ["f0", "b0", "f1"]
    assert pop_ids(intake)[-1] == "a0"
    assert intake._queued_by_id == {}


def test_the_more_urgent_of_a_tenants_come_first() -> None:
    intake = intake_of(
        request("batch0", "a", 10), request("batch1", "a", 10), request("a0", "a"),
        request("b0", "b"), request("urgent", "a", -1),
    )  # fmt: skip
    assert pop_ids(intake) == ["urgent", "b0", "a0", "batch0", "batch1"]


def test_an_abort_comes_behind_its_request_or_at_once() -> None:
    intake = intake_of(*(request(f"a{number}", "a") for number in range(4)), request("b0", "b"))
    assert pop_ids(intake, 1) == ["a0"]
    for name in ("a2", "b0", "a0", "nobody"):
        intake.put((f"-{name}".encode(), abort(name)))
    assert pop_ids(intake) == ["-a0", "-nobody", "b0", "a1", "-b0", "a2", "a3", "-a2"]


def test_an_abort_comes_behind_the_prefill_that_is_followed() -> None:
    intake = TenantInbox()
    intake.put((b"f", FollowPrefill(request=request("f", "a"))))
    intake.put((b"-f", abort("f")))
    assert pop_ids(intake) == ["f", "-f"]


def test_what_was_sent_twice_is_aborted_behind_the_second() -> None:
    intake = intake_of(request("a", "a"), abort("a"), request("a", "a"))
    assert pop_ids(intake, 1) == ["a"]
    intake.put((b"-again", abort("a")))
    assert pop_ids(intake) == ["-a", "a", "-again"]
    intake.put((b"-late", abort("a")))
    assert pop_ids(intake) == ["-late"]


def test_an_operators_word_keeps_its_place() -> None:
    intake = intake_of(
        request("a0", "a"), request("a1", "a"), control("pause"), request("b0", "b"),
        control("resume"), request("a2", "a"), abort("a1"), abort("b0"),
    )  # fmt: skip
    assert pop_ids(intake) == ["a0", "a1", "-a1", "pause", "b0", "-b0", "resume", "a2"]


def test_who_waits_is_woken_and_nothing_is_an_error() -> None:
    intake = TenantInbox()
    with pytest.raises(queue.Empty):
        intake.get_nowait()
    with pytest.raises(queue.Empty):
        intake.get(0.01)
    later = threading.Timer(0.05, intake.put, [(b"a", request("a", "a"))])
    later.start()
    assert intake.get(30)[0] == b"a"
    later.join()
