"""A replica that an operator pauses, resumes, profiles, or takes requests from."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.contract.messages import ABORTED_BY_OPERATOR, ControlRequest
from engine.contract.redis_keys import prefill_request_id
from tests.engine.replica import Gateway, replica

Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def served(redis_url: str, model_folder: Folder) -> Iterator[Gateway]:
    """One replica for the tests of this module."""
    prefix = f"pause{time.time_ns()}"
    with replica(redis_url, prefix, model_folder("llama")):
        gateway = Gateway(redis_url, prefix)
        gateway.await_state("ready")
        yield gateway


@pytest.fixture
def gateway(served: Gateway) -> Iterator[Gateway]:
    """It is resumed and its books balance afterwards."""
    yield served
    served.control("resume")
    served.wait(lambda: served.pending() == 0)
    reply = served.control("check_integrity")
    assert reply.ok, reply.detail


def long_request(gateway: Gateway, name: str, prompt: list[int] | None = None) -> None:
    """One that runs, and takes its time."""
    gateway.request(name, prompt or [5, 6], max_tokens=240, logprobs=20, presence_penalty=0.5)


def code(gateway: Gateway, name: str) -> str:
    error = gateway.deltas[name][-1].error
    return error.code if error else ""


def test_abort_ends_what_runs_and_refuses_what_comes(gateway: Gateway) -> None:
    paused_id = gateway.hold("a1", [5, 6])
    assert gateway.control("pause").ok
    gateway.finish(paused_id)
    last = gateway.deltas[paused_id][-1]
    assert (last.finish_reason, last.stop_reason) == ("abort", ABORTED_BY_OPERATOR)
    gateway.request("a2", [5, 6])
    gateway.finish("a2")
    assert code(gateway, "a2") == "engine_paused"
    assert gateway.control("resume").ok
    gateway.request("a3", [5, 6])
    gateway.finish("a3")
    assert len(gateway.tokens("a3")) == 8


def test_wait_answers_when_all_have_ended(gateway: Gateway) -> None:
    long_request(gateway, "w1")
    gateway.wait(lambda: bool(gateway.tokens("w1")))
    reply = gateway.control("pause", mode="wait")
    assert reply.ok
    assert gateway.deltas["w1"][-1].finish_reason == "length"
    gateway.request("w2", [5, 6])
    gateway.finish("w2")
    assert code(gateway, "w2") == "engine_paused"


def test_a_wait_that_is_resumed_is_told_so(gateway: Gateway) -> None:
    long_request(gateway, "r1")
    gateway.wait(lambda: bool(gateway.tokens("r1")))
    gateway.send(ControlRequest(command="pause", control_id="p1", gateway_id="g1", mode="wait"))
    gateway.control("resume")
    gateway.wait(lambda: "p1" in gateway.replies)
    gateway.finish("r1")
    assert gateway.deltas["r1"][-1].finish_reason == "length"


def test_keep_stands_still_and_goes_on_with_the_same_tokens(gateway: Gateway) -> None:
    gateway.request("k1", [5, 6], max_tokens=240)
    gateway.finish("k1")
    paused_id = gateway.hold("k2", [5, 6])
    paused = gateway.heartbeat()
    assert paused is not None
    assert paused.paused
    gateway.request("k3", [7, 8])  # taken, and waits
    steps = gateway.control("check_integrity") and len(gateway.steps)
    for _ in range(5):
        gateway.read()
    assert len(gateway.steps) == steps
    assert not gateway.is_finished(paused_id)
    assert gateway.control("resume").ok
    gateway.finish(paused_id, "k3")
    assert gateway.tokens(paused_id) == gateway.tokens("k1")


def test_what_runs_keeps_its_prefixes_unless_it_shall_give_them_up(gateway: Gateway) -> None:
    gateway.request("p1", [5, 6], max_tokens=240)
    gateway.finish("p1")
    paused_id = gateway.hold("p2", [5, 6])
    reply = gateway.control("reset_prefix_cache")
    assert (reply.ok, reply.detail) == (False, "Blocks are in use.")
    assert gateway.control("reset_prefix_cache", running=True).ok
    assert gateway.control("reset_prefix_cache").ok
    assert not gateway.is_finished(paused_id)
    gateway.control("resume")
    gateway.finish(paused_id)
    assert gateway.tokens(paused_id) == gateway.tokens("p1")


def test_a_mode_that_nobody_knows_changes_nothing(gateway: Gateway) -> None:
    reply = gateway.control("pause", mode="nap")
    assert not reply.ok
    assert "abort, wait, keep" in reply.detail
    gateway.request("n1", [5, 6])
    gateway.finish("n1")
    assert code(gateway, "n1") == ""


def test_requests_are_aborted_by_their_ids(gateway: Gateway) -> None:
    gateway.control("pause", mode="keep")  # none of them ends by itself
    prefill = prefill_request_id("cmpl-1-2")
    for name in ("cmpl-1-0", "cmpl-1-1", prefill, "cmpl-12", "chat-3"):
        long_request(gateway, name)
    reply = gateway.control("abort_requests", request_ids=["cmpl-1", "nobody"])
    gateway.finish("cmpl-1-0", "cmpl-1-1", prefill)
    assert reply.detail == "3 requests were aborted."
    assert not gateway.is_finished("cmpl-12")
    gateway.control("abort_requests")
    gateway.control("resume")
    gateway.finish("cmpl-12", "chat-3")
    reasons = {gateway.deltas[name][-1].finish_reason for name in ("cmpl-1-0", "cmpl-12", "chat-3")}
    assert reasons == {"abort"}


def test_a_profile_is_a_trace_of_what_ran(gateway: Gateway) -> None:
    assert not gateway.control("stop_profile").ok
    assert gateway.control("start_profile").ok
    assert not gateway.control("start_profile").ok
    gateway.request("p", [5, 6])
    gateway.finish("p")
    reply = gateway.control("stop_profile")
    assert reply.ok
    trace = Path(reply.detail)
    assert json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    trace.unlink()
    trace.parent.rmdir()
