"""A replica's `/live`, `/ready` and `/metrics` over HTTP, for deployments without our supervisor,
such as Kubernetes. Nothing else is served here: requests come through Redis.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

from prometheus_client import CONTENT_TYPE_LATEST

from engine.contract.errors import ConfigError
from engine.contract.messages import DEAD_AFTER_S, STALL_TIMEOUT_S


class ReplicaProgress(NamedTuple):
    """The replica's state and when its loop last made progress (seconds since the epoch)."""

    state: str
    progress_at: float


class ProbeServer:
    """Answers probes in a separate thread, so that a step that hangs is noticed."""

    def __init__(
        self,
        port: int,
        read_progress: Callable[[], ReplicaProgress],
        read_metrics: Callable[[], bytes],
    ) -> None:
        """Listen on all addresses: a kubelet connects to the pod's address.

        Raises: `ConfigError` if the port can't be bound.
        """

        class Handler(_ProbeHandler):
            progress, metrics = staticmethod(read_progress), staticmethod(read_metrics)

        try:
            self._server = _DualStackServer(("", port), Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"health_port={port} can't be listened on: {error}", param="health_port"
            ) from error
        self.port: int = self._server.server_address[1]

    def start(self) -> None:
        """Answer until the process ends."""
        threading.Thread(target=self._server.serve_forever, name="probes", daemon=True).start()

    def stop(self) -> None:
        """Stop answering and close the port."""
        self._server.shutdown()
        self._server.server_close()


class _DualStackServer(ThreadingHTTPServer):
    daemon_threads = True
    address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


class _ProbeHandler(BaseHTTPRequestHandler):
    progress: Callable[[], ReplicaProgress]
    metrics: Callable[[], bytes]
    #: Timeout of an idle connection.
    timeout = 5

    def do_GET(self) -> None:
        if self.path.partition("?")[0] == "/metrics":
            self._reply(200, CONTENT_TYPE_LATEST, type(self).metrics())
            return
        state, progress_at = type(self).progress()
        seconds = time.time() - progress_at
        serves = state in ("ready", "sleeping", "draining")
        if self.path == "/live":
            # Loading has no time limit: reading a large model over a network takes minutes.
            ok = not serves or seconds <= DEAD_AFTER_S
        elif self.path == "/ready":
            ok = state in ("ready", "sleeping") and seconds <= STALL_TIMEOUT_S
        else:
            self.send_error(404)
            return
        body = json.dumps({"state": state, "seconds_since_progress": round(max(seconds, 0.0), 1)})
        self._reply(200 if ok else 503, "application/json", body.encode())

    def _reply(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: a probe comes every few seconds."""
