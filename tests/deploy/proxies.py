"""The shipped proxy configurations, run by the real programs before a server of the tests' own."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn

from config.serve import KEEP_ALIVE_S
from tests.services import missing
from tests.waiting import free_port

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
GATEWAY = "127.0.0.1:8000"
NAME = "llm.example.org"
START_TIMEOUT_S = 20.0


@dataclass(slots=True)
class Upstream:
    """What stands for a gateway: it goes on only when the test says that it saw the first part."""

    port: int = 0
    go_on: threading.Event = field(default_factory=threading.Event)
    began: threading.Event = field(default_factory=threading.Event)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """ASGI."""
        if scope["type"] == "websocket":
            await self._echo(receive, send)
        elif scope["type"] == "http":
            part = {"/stream": self._stream, "/upload": self._upload}.get(scope["path"], _headers)
            await part(scope, receive, send)

    async def _stream(self, scope: Any, receive: Any, send: Any) -> None:
        await _start(send, b"text/event-stream")
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        await asyncio.to_thread(self.go_on.wait, START_TIMEOUT_S)
        await send({"type": "http.response.body", "body": b"data: 2\n\n"})

    async def _upload(self, scope: Any, receive: Any, send: Any) -> None:
        length, more = 0, True
        while more:
            message = await receive()
            length += len(message.get("body", b""))
            more = message.get("more_body", False)
            self.began.set()
        await _start(send, b"application/json")
        await send({"type": "http.response.body", "body": json.dumps(length).encode()})

    async def _echo(self, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            await send({"type": "websocket.send", "text": message["text"]})


async def _headers(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the request's headers."""
    headers = [(name.decode(), value.decode()) for name, value in scope["headers"]]
    await _start(send, b"application/json")
    await send({"type": "http.response.body", "body": json.dumps(headers).encode()})


async def _start(send: Any, content_type: bytes) -> None:
    headers = [(b"content-type", content_type)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


@contextmanager
def upstream() -> Iterator[Upstream]:
    """A server on a free port, in a thread."""
    app = Upstream()
    listener = socket.create_server(("127.0.0.1", 0))
    app.port = listener.getsockname()[1]
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            lifespan="off",
            log_level="warning",
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield app
    finally:
        app.go_on.set()
        server.should_exit = True
        thread.join(60)
        listener.close()


def certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for localhost that nobody signed, and its key."""
    pem, key = folder / "cert.pem", folder / "cert.key"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(pem)),
        ],
        check=True,
        capture_output=True,
    )
    return pem, key


def nginx(folder: Path, port: int, to: int) -> list[str]:
    """The command that runs deploy/nginx.conf in front of port `to`, listening on `port` only."""
    pem, key = certificate(folder)
    site = (DEPLOY / "nginx.conf").read_text().replace(GATEWAY, f"127.0.0.1:{to}")
    site = site.replace(f"/etc/ssl/{NAME}.pem", str(pem)).replace(f"/etc/ssl/{NAME}.key", str(key))
    site = site.replace("listen 443", f"listen 127.0.0.1:{port}").replace(NAME, "localhost")
    site = site.replace("listen 80;", f"listen 127.0.0.1:{free_port()};")
    config = folder / "nginx.conf"
    config.write_text(
        f"daemon off; pid {folder}/pid; error_log {folder}/error.log;\n"
        f"events {{}}\nhttp {{ access_log off; client_body_temp_path {folder}/body;"
        f" proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fcgi;"
        f" uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;\n{site}\n}}\n"
    )
    return [program("nginx"), "-p", str(folder), "-c", str(config)]


def caddy(folder: Path, port: int, to: int) -> list[str]:
    """The same with deploy/Caddyfile."""
    pem, key = certificate(folder)
    site = (DEPLOY / "Caddyfile").read_text().replace(GATEWAY, f"127.0.0.1:{to}")
    site = site.replace(f"{NAME} {{", f"localhost:{port} {{\n\tbind 127.0.0.1\n\ttls {pem} {key}")
    config = folder / "Caddyfile"
    config.write_text(f"{{\n\tadmin off\n\tauto_https disable_redirects\n}}\n{site}")
    return [program("caddy"), "run", "--adapter", "caddyfile", "--config", str(config)]


def program(name: str) -> str:
    """Where it is: Debian keeps servers where only root looks for programs."""
    program = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if program is None:
        missing(f"{name} is missing")
    return program


@contextmanager
def running(command: list[str], folder: Path, port: int) -> Iterator[str]:
    """The proxy's address while it runs."""
    log = (folder / "log").open("wb")
    env = {**os.environ, "XDG_DATA_HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env)
    try:
        _await_port(process, port, folder / "log")
        yield f"localhost:{port}"
    finally:
        process.terminate()
        process.wait(60)
        log.close()


def _await_port(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < end:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise RuntimeError(f"{process.args}: {log.read_text()}")


def trusting_nobody_signed() -> ssl.SSLContext:
    """For the certificate above."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
