"""Ray Serve, with the packages `ray[serve]` and `quire`:
`serve run deploy.integrations.ray_serve:app`.

Each replica of the deployment runs a server and passes requests on to it. Clients send a key of
QUIRE_API_KEYS.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess

import httpx
from ray import serve
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import StreamingResponse

COMMAND = ["quire", "serve", "Qwen/Qwen3-0.6B", "--host", "127.0.0.1"]
#: Headers of one connection, which aren't passed on.
HOP_BY_HOP = {"connection", "host", "keep-alive", "transfer-encoding", "upgrade"}


@serve.deployment(
    ray_actor_options={"num_gpus": 1}, max_ongoing_requests=256, graceful_shutdown_timeout_s=60
)
class Quire:
    """A server in a process of its own."""

    def __init__(self, command: list[str]) -> None:
        """`command` gets `--port`."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        environment = {**os.environ, "QUIRE_ALLOWED_HOSTS": "*"}
        self._process = subprocess.Popen([*command, "--port", str(port)], env=environment)
        # An answer takes as long as it takes.
        timeout = httpx.Timeout(None, connect=5)
        self._client = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}",
            timeout=timeout,
            limits=httpx.Limits(max_connections=None),  # Ray has one
        )
        self._ready = False

    async def check_health(self) -> None:
        """Ray replaces a replica for which this raises; while the model loads, it waits."""
        if self._process.poll() is not None:
            raise RuntimeError(f"the server has ended with status {self._process.returncode}")

    async def __call__(self, request: Request) -> StreamingResponse:
        """Pass a request on, and its answer back as it comes."""
        await self._wait_until_ready()
        headers = [(k, v) for k, v in request.headers.items() if k not in HOP_BY_HOP]
        forwarded = self._client.build_request(
            request.method,
            httpx.URL(path=request.url.path, query=request.url.query.encode()),
            headers=headers,
            content=request.stream(),
        )
        answer = await self._client.send(forwarded, stream=True)
        return StreamingResponse(
            answer.aiter_raw(),
            answer.status_code,
            {k: v for k, v in answer.headers.items() if k not in HOP_BY_HOP},
            background=BackgroundTask(answer.aclose),
        )

    async def _wait_until_ready(self) -> None:
        """Until the server listens and has loaded its model."""
        while not self._ready:
            await self.check_health()
            with contextlib.suppress(httpx.ConnectError):
                self._ready = (await self._client.get("/health")).is_success
            await asyncio.sleep(0.2)

    def __del__(self) -> None:
        self._process.terminate()
        self._process.wait()


app = Quire.bind(COMMAND)
