"""A thread of every gateway process that sends its heartbeat and settles dead gateways' requests.

Counters of budgets and of running requests must not keep a killed gateway's reservations. Its
requests are billed with the tokens that the engine had written for them: those that the gateway
had read are in `progress`, the others still wait in its outbox.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any, cast

import msgspec
import redis
from django.conf import settings

from common.loops import LoopThread
from engine.contract import messages, redis_keys
from metering.open_requests import GATEWAY, OpenRequest, gateways_key, open_key, response_stored_key
from metering.redis_scripts import load_script, redis_key, sync_client
from metering.request_log import RequestTrace
from metering.request_log_writer import log_request
from metering.settlement import (
    EngineUsage,
    pop_unsettled,
    reconciliation_start_key,
    requeue_unsettled,
    settle_arguments,
    settle_keys,
)
from metering.usage_record import UsageRecord, encode_record

logger = logging.getLogger(__name__)

BEAT_S = 2.0
#: Seconds without a heartbeat after which a gateway is dead. Its outbox lives longer.
DEAD_AFTER_S = 10.0
LOCK_S = 60
#: Error message in the records of a dead gateway's requests.
_LOST: dict[str, Any] = {
    "code": "gateway_lost",
    "message": "The gateway that served it ended.",
}


class GatewayHeartbeat(LoopThread):
    """Sends heartbeats until the process ends."""

    def __init__(self) -> None:
        super().__init__("quire-keeper")

    def loop(self) -> None:
        with sync_client() as client:
            while not self.stopping.is_set():
                try:
                    send_heartbeat(client)
                except (redis.RedisError, OSError) as error:
                    logger.debug("gateway heartbeat failed: %s", error)
                self.stopping.wait(BEAT_S)


def send_heartbeat(
    client: redis.Redis, gateway: str = GATEWAY, dead_after_s: float = DEAD_AFTER_S
) -> None:
    """Send `gateway`'s heartbeat; settle records that Redis missed, and dead gateways' requests."""
    text, _ = load_script("beat")
    dead: list[bytes] = client.eval(text, 1, gateways_key(), gateway, dead_after_s)
    client.set(reconciliation_start_key(), int(time.time()), nx=True)
    late = pop_unsettled()
    while late:
        try:
            record, account = late[-1]
            _settle(client, record, gateway, account)
        except redis.RedisError:
            requeue_unsettled(late)
            raise
        late.pop()
    for name in dead:
        settle_dead_gateway(client, name.decode())


def settle_dead_gateway(client: redis.Redis, gateway: str) -> int:
    """Settle a dead gateway's open requests, unless another does; returns how many."""
    if not client.set(redis_key(f"burying:{gateway}"), GATEWAY, nx=True, ex=LOCK_S):
        return 0
    open_requests = cast("dict[bytes, bytes]", client.hgetall(open_key(gateway)))
    counts: dict[str, dict[str, int]] = {}
    for data in open_requests.values():
        try:
            request = OpenRequest.decode(data)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            logger.error("an open request of %s can't be read: %s", gateway, error)
            continue
        if request.outbox not in counts:
            counts[request.outbox] = outputs_of(client, request.outbox)
        was_delivered = _was_delivered(client, request)
        record = request.record(counts[request.outbox], time.time(), was_delivered=was_delivered)
        prompt, output = request.billed
        account = EngineUsage(
            request.engine_ids(), request.outputs, billed_prompt=prompt, billed_output=output
        )
        _settle(client, record, gateway, account)
        log_request(record, RequestTrace(header_id=request.header_id, **_LOST))
        _mark_billed(client, request, record)
    client.delete(open_key(gateway))
    client.zrem(gateways_key(), gateway)
    if open_requests:
        logger.warning("gateway %s died: settled %d open requests", gateway, len(open_requests))
    return len(open_requests)


def _was_delivered(client: redis.Redis, request: OpenRequest) -> bool:
    """Whether the client may have received, or can still fetch, any output: then it is billed."""
    if not request.stream:
        return bool(client.exists(response_stored_key(request.request_id)))
    if request.stream_id or request.known:  # another gateway served the client before
        return True
    name = redis_keys.stream_key(request.root_request_id, settings.QUIRE.key_prefix)
    is_open, delivered = client.hmget(name, "open", "told")
    return is_open is None or delivered is not None


def _mark_billed(client: redis.Redis, request: OpenRequest, record: UsageRecord) -> None:
    """Store the billed tokens, so that a gateway that resumes the stream bills only the rest."""
    name = redis_keys.stream_key(request.root_request_id, settings.QUIRE.key_prefix)
    if client.exists(name):
        prompt, output = request.billed
        counts: dict[Any, Any] = {
            "prompt": prompt + record.prompt_tokens,
            "billed": output + record.completion_tokens,
        }
        client.hset(name, mapping=counts)


def outputs_of(client: redis.Redis, outbox: str) -> dict[str, int]:
    """Tokens by "engine request/output": those read and those still in the outbox."""
    prefix = settings.QUIRE.key_prefix
    progress = cast("dict[bytes, bytes]", client.hgetall(redis_keys.progress_key(outbox, prefix)))
    outputs = {name.decode(): int(count) for name, count in progress.items()}
    unread = client.xrange(redis_keys.outbox_key(outbox, prefix))
    for _, fields in cast("list[tuple[bytes, dict[bytes, bytes]]]", unread):
        try:
            batch = messages.decode_outbox(fields[messages.STREAM_FIELD])
        except (msgspec.DecodeError, msgspec.ValidationError, KeyError):
            continue
        for delta in batch.deltas:
            name = redis_keys.output_field(
                redis_keys.base_request_id(delta.request_id), delta.index
            )
            outputs[name] = max(outputs.get(name, 0), delta.start + len(delta.token_ids))
    return outputs


def _settle(
    client: redis.Redis, record: UsageRecord, gateway: str, account: EngineUsage | None
) -> None:
    names = settle_keys(record.request_id, gateway)
    text, _ = load_script("settle")
    arguments = settle_arguments(record, encode_record(record), {}, gateway, account)
    client.eval(text, len(names), *names, *arguments)


_keeper: GatewayHeartbeat | None = None
_starting = threading.Lock()


def start_gateway_heartbeat() -> None:
    """Start this process's recovery thread, unless it is running."""
    global _keeper
    if _keeper is not None and _keeper.is_alive():
        return
    with _starting:
        if _keeper is None or not _keeper.is_alive():
            _keeper = GatewayHeartbeat()
            _keeper.start()


def stop_keeper() -> None:
    """Stop this process's recovery thread."""
    global _keeper
    if _keeper is not None:
        _keeper.stop()
        _keeper = None
