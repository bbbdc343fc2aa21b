"""FAULTS 68: a connection whose replies no longer come is replaced, and nothing is lost with it."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest
import redis

from engine.contract import messages as protocol
from engine.contract import redis_keys
from engine.contract.messages import AbortRequest
from engine.serving.inbox import InboxReader, IncarnationFence
from engine.system.redis_client import REPLICA_TIMEOUT_S, replica_client


class Firewall(threading.Thread):
    """Forwards TCP connections to Redis; `drop` swallows all replies on the connections so far."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._upstream = urlsplit(url).path
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._drops: list[threading.Event] = []
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"

    def drop(self) -> None:
        for drop in self._drops:
            drop.set()

    def close(self) -> None:
        self._listener.close()

    def run(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX)
            server.connect(self._upstream)
            drop = threading.Event()
            self._drops.append(drop)
            for source, target, dropped in (
                (client, server, threading.Event()),
                (server, client, drop),
            ):
                threading.Thread(
                    target=self._forward, args=(source, target, dropped), daemon=True
                ).start()

    @staticmethod
    def _forward(source: socket.socket, target: socket.socket, dropped: threading.Event) -> None:
        try:
            while data := source.recv(1 << 16):
                if not dropped.is_set():
                    target.sendall(data)
            target.close()
        except OSError:
            source.close()


@contextmanager
def reading(client: redis.Redis, prefix: str) -> Iterator[InboxReader]:
    fence = IncarnationFence(client, prefix, "r", "i")
    reader = InboxReader(client, redis_keys.inbox_key("r", prefix), "i", fence)
    reader.start()
    try:
        yield reader
    finally:
        reader.stop()
        reader.join(60)
        assert not reader.is_alive()


@pytest.mark.service
def test_fault_68_entries_of_a_lost_reply_are_read_again_and_once(
    redis_url: str, key_prefix: str
) -> None:
    firewall = Firewall(redis_url)
    firewall.start()
    gateway = redis.Redis.from_url(redis_url)
    inbox = redis_keys.inbox_key("r", key_prefix)

    def send(name: str) -> None:
        entry = protocol.encode(AbortRequest(request_id=name))
        gateway.xadd(inbox, {protocol.STREAM_FIELD: entry})

    def receive(reader: InboxReader) -> str:
        message = reader.messages.get(60.0)[1]
        assert isinstance(message, AbortRequest)
        return message.request_id

    client = replica_client(firewall.url, timeout_s=1.5)
    with reading(client, key_prefix) as reader:
        send("before")
        assert receive(reader) == "before"
        firewall.drop()
        read_at = reader.progress_at
        for name in ("lost", "lost as well"):
            send(name)
        assert [receive(reader), receive(reader)] == ["lost", "lost as well"]
        assert reader.progress_at >= read_at
        send("after")
        assert receive(reader) == "after"
        with pytest.raises(queue.Empty):
            reader.messages.get_nowait()
    assert reader.progress_at == float("inf")
    client.close()
    gateway.close()
    firewall.close()


def test_fault_68_a_replicas_connection_is_given_up_within_five_seconds(redis_url: str) -> None:
    client = replica_client(redis_url)
    arguments = client.connection_pool.connection_kwargs
    assert arguments["socket_timeout"] == arguments["socket_connect_timeout"] == REPLICA_TIMEOUT_S
    assert REPLICA_TIMEOUT_S < 5
