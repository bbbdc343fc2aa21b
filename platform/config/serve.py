"""A gateway process on an inherited listening socket: `python -m config.serve OPTIONS FD`.

OPTIONS is a JSON object: `server` ("uvicorn" or "daphne"), `grace` (seconds that open requests have
to finish at shutdown), `ssl_certfile` and `ssl_keyfile` (files, or null); optionally
`ssl_ca_certs`, `ssl_cert_reqs`, `ssl_ciphers`, `middleware` (import paths of classes),
`single_user` (see that module).
"""

import gc
import json
import socket
import ssl
import sys
from pathlib import Path
from typing import Any

from common.draining import drain_on_signal
from config.shutdown import run_and_exit_fast
from engine.system.host import request_short_time_slice

#: Maximum size of a WebSocket frame; consumers have lower limits and report them in a message.
WS_MAX_BYTES = 4 * 1024 * 1024
KEEP_ALIVE_S = 75
BACKLOG = 2048
#: Connections accepted in one iteration of the event loop. libuv accepts one per listening socket,
#: and under load an iteration takes 10 ms: if two hundred of one tenant's clients connected at
#: once, another tenant's would wait for seconds, before anything shows whose they are.
MAX_ACCEPTS_PER_TICK = 32
#: How long a thread (writing the ledger, rendering a prompt) may keep the GIL from the event loop.
#: Python's default, 5 ms, is as long as a token takes.
SWITCH_INTERVAL_S = 0.0005


def serve_uvicorn(listener: socket.socket, options: dict[str, Any]) -> None:
    """Serve with uvicorn, httptools and uvloop."""
    import uvicorn

    from config import asgi
    from config.connection_limits import LimitedHttpProtocol
    from config.uvicorn_server import GatewayServer, GatewayWebSocketProtocol

    config = uvicorn.Config(
        _wrapped(asgi.application, options),
        http=LimitedHttpProtocol,
        ws=GatewayWebSocketProtocol,
        lifespan="on",
        log_config=None,  # Django's logging is configured and covers uvicorn's loggers
        access_log=False,
        server_header=False,
        proxy_headers=_is_behind_proxy(),
        ws_max_size=WS_MAX_BYTES,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        ssl_certfile=options.get("ssl_certfile"),
        ssl_keyfile=options.get("ssl_keyfile"),
        ssl_ca_certs=options.get("ssl_ca_certs"),
        ssl_cert_reqs=options.get("ssl_cert_reqs", ssl.CERT_NONE),
        ssl_ciphers=options.get("ssl_ciphers", "TLSv1"),
    )
    GatewayServer(config, options["grace"]).run(sockets=listeners(listener))


def listeners(listener: socket.socket) -> list[socket.socket]:
    """Return enough duplicates of a listening socket for uvloop to accept `MAX_ACCEPTS_PER_TICK`
    connections in one iteration."""
    # The duplicates share one file description across all processes, and Python would make it
    # blocking: a gateway that starts would leave the others blocked in `accept` for a connection
    # that another process got.
    listener.setblocking(False)
    return [listener, *(listener.dup() for _ in range(MAX_ACCEPTS_PER_TICK - 1))]


def serve_daphne(listener: socket.socket, options: dict[str, Any]) -> None:
    """Serve with daphne. It has no lifespan: the application starts one at the first request."""
    from daphne.server import Server

    from config import asgi

    Server(
        _wrapped(asgi.application, options),
        endpoints=[f"fd:fileno={listener.fileno()}"],
        server_name="",
        signal_handlers=True,
        websocket_timeout=-1,
        proxy_forwarded_address_header="X-Forwarded-For" if _is_behind_proxy() else None,
    ).run()


def _wrapped(application: Any, options: dict[str, Any]) -> Any:
    """Wrap the application in the operator's middleware, the first one outermost."""
    from django.conf import settings
    from django.utils.module_loading import import_string

    if options.get("single_user"):
        from config.single_user import SingleUser

        application = SingleUser(application)
    for path in reversed(options.get("middleware", [])):
        application = import_string(path)(application)
    root = settings.FORCE_SCRIPT_NAME
    return _below(root, application) if root else application


def _below(root: str, application: Any) -> Any:
    """Mount the application below `root`, whether or not the proxy strips that prefix: in both
    cases `path` begins with it, as ASGI requires but not all servers do.
    """
    raw_root = root.encode("ascii")

    async def mounted(scope: Any, receive: Any, send: Any) -> None:
        if (path := scope.get("path")) is not None:
            scope = dict(scope, root_path=root)
            if path != root and not path.startswith(f"{root}/"):
                scope["path"] = root + path
                if raw := scope.get("raw_path"):
                    scope["raw_path"] = raw_root + raw
        await application(scope, receive, send)

    return mounted


def _is_behind_proxy() -> bool:
    """Return whether `X-Forwarded-*` headers come from the operator's proxy, not from a client."""
    from django.conf import settings

    return settings.QUIRE.tls == "proxy"


def _load() -> None:
    """Import the application with garbage collection off, which saves a tenth of the time: the
    modules stay loaded anyway.
    """
    gc.disable()
    try:
        from config import asgi

        asgi.load_views()
    finally:
        gc.enable()


SERVERS = {"uvicorn": serve_uvicorn, "daphne": serve_daphne}


def main(arguments: list[str]) -> None:
    """Serve until SIGTERM or SIGINT."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    request_short_time_slice()
    drain_on_signal()
    _load()
    options, number = json.loads(arguments[0]), int(arguments[1])
    if certificate := options.get("ssl_certfile"):
        from history.certificates import CertificatePublisher

        CertificatePublisher(Path(certificate)).start()
    SERVERS[options["server"]](socket.socket(fileno=number), options)


if __name__ == "__main__":
    run_and_exit_fast(lambda: main(sys.argv[1:]))
