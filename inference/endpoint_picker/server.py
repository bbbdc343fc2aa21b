"""The picker's gRPC server."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from django.conf import settings

from engine.contract.errors import ConfigError
from inference.endpoint_picker.messages import (
    HEALTH_CHECK,
    NOT_SERVING,
    PROCESS,
    SERVICE_UNKNOWN,
    SERVING,
    HealthCheckRequest,
    HealthCheckResponse,
    ProcessingRequest,
    ProcessingResponse,
)
from inference.endpoint_picker.picker import EndpointPicker
from inference.endpoint_picker.processor import RequestProcessor

logger = logging.getLogger(__name__)

LIVENESS = "liveness"
#: Maximum bytes of a message in addition to a body: names, lengths and metadata.
_MESSAGE_OVERHEAD_BYTES = 1 << 20


@dataclass(frozen=True)
class ServerOptions:
    """
    Attributes:
        address: "host:port" to listen on.
        gateways: see `EndpointPicker`.
        certificate, private_key: PEM files; None: no TLS.
        grace_s: seconds that open requests may take after SIGTERM.
    """

    address: str
    gateways: str
    certificate: Path | None
    private_key: Path | None
    grace_s: float


async def serve(options: ServerOptions) -> None:
    """Serve until SIGTERM or SIGINT. Raises `ConfigError` if the server can't start."""
    picker = EndpointPicker(options.gateways)
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    # A buffered body arrives in one message; gRPC's default limit is 4 MiB.
    max_message_bytes = settings.QUIRE.max_body_bytes + _MESSAGE_OVERHEAD_BYTES
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", max_message_bytes)])
    server.add_generic_rpc_handlers(tuple(_handlers(picker, stopping)))
    _listen(server, options)
    await server.start()
    following = asyncio.create_task(picker.run())
    try:
        await asyncio.wait(
            [following, waiting := asyncio.create_task(stopping.wait())],
            return_when=asyncio.FIRST_COMPLETED,
        )
        waiting.cancel()
        if following.done():
            following.result()
        # Health checks fail, and proxies look elsewhere, before the port closes.
        await asyncio.sleep(settings.QUIRE.shutdown_delay_seconds)
    finally:
        following.cancel()
        await server.stop(options.grace_s)


def _listen(server: grpc.aio.Server, options: ServerOptions) -> None:
    try:
        if options.certificate is None or options.private_key is None:
            server.add_insecure_port(options.address)
            return
        pair = (options.private_key.read_bytes(), options.certificate.read_bytes())
        server.add_secure_port(options.address, grpc.ssl_server_credentials([pair]))
    except (RuntimeError, OSError) as error:
        raise ConfigError(f"{options.address} can't be served: {error}", param="port") from error


def _handlers(picker: EndpointPicker, stopping: asyncio.Event) -> list[grpc.GenericRpcHandler]:
    max_body_bytes = settings.QUIRE.max_body_bytes

    async def process(messages: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for response in RequestProcessor(picker, max_body_bytes).run(messages):
            yield response

    async def check(request: Any, context: Any) -> Any:
        if request.service == LIVENESS:
            return HealthCheckResponse(status=SERVING)
        if request.service not in ("", "readiness", PROCESS[0]):
            return HealthCheckResponse(status=SERVICE_UNKNOWN)
        ready = picker.ready and not stopping.is_set()
        return HealthCheckResponse(status=SERVING if ready else NOT_SERVING)

    return [
        grpc.method_handlers_generic_handler(
            PROCESS[0],
            {
                PROCESS[1]: grpc.stream_stream_rpc_method_handler(
                    process,
                    request_deserializer=ProcessingRequest.FromString,
                    response_serializer=ProcessingResponse.SerializeToString,
                )
            },
        ),
        grpc.method_handlers_generic_handler(
            HEALTH_CHECK[0],
            {
                HEALTH_CHECK[1]: grpc.unary_unary_rpc_method_handler(
                    check,
                    request_deserializer=HealthCheckRequest.FromString,
                    response_serializer=HealthCheckResponse.SerializeToString,
                )
            },
        ),
    ]
