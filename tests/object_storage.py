"""An S3 server in this process, and Django's storage on it."""

from __future__ import annotations

import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import boto3


@contextmanager
def s3_server() -> Iterator[str]:
    """Run a server; gives its address."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()


def new_bucket(address: str) -> dict[str, Any]:
    """The entry of STORAGES for a new bucket."""
    name = f"quire-{uuid4().hex}"
    bucket(address, name).create()
    options = {"bucket_name": name, "endpoint_url": address, "region_name": "us-east-1"}
    keys = {"access_key": "key", "secret_key": "secret"}
    return {"BACKEND": "storages.backends.s3.S3Storage", "OPTIONS": options | keys}


def bucket(address: str, name: str) -> Any:
    """A bucket as its owner sees it."""
    keys = {"aws_access_key_id": "key", "aws_secret_access_key": "secret"}
    session = boto3.resource("s3", endpoint_url=address, region_name="us-east-1", **keys)
    return session.Bucket(name)


def object_names(entry: dict[str, Any]) -> list[str]:
    """Names of all objects of a bucket."""
    options = entry["OPTIONS"]
    objects = bucket(options["endpoint_url"], options["bucket_name"]).objects.all()
    return sorted(item.key for item in objects)


class KillingProxy:
    """Passes connections on, and kills a process once so many bytes have gone by."""

    def __init__(self, address: str, num_bytes: int) -> None:
        self._target = urlsplit(address)
        self._remaining = num_bytes
        self.process: subprocess.Popen[bytes] | None = None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                port = self._target.port or 80
                server = socket.create_connection((self._target.hostname or "", port))
                for pair in ((client, server), (server, client)):
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self._remaining -= len(data)
                if self._remaining < 0 and self.process is not None:
                    self.process.send_signal(signal.SIGKILL)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
