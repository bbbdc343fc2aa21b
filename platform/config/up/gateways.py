"""The gateway processes: an ASGI server each, on one socket that `manage.py up` holds."""

from __future__ import annotations

import json
import os
import socket
import ssl
from typing import Any

from django.core.management.base import CommandError

from config.environment import note_flags
from config.up.kept import KeptProcesses


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises OSError with the address in its text."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = socket.socket(family, socket.SOCK_STREAM)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((host, port))
        server.listen(2048)
    except OSError as error:
        server.close()
        raise OSError(error.errno, f"{host} port {port}: {os.strerror(error.errno or 0)}") from None
    return server


#: Options that name files.
FILES = ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")


def url_of(host: str, port: int, *, tls: bool) -> str:
    """What to type into a browser on this machine."""
    everywhere = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # noqa: S104 - nothing is bound here
    shown = everywhere.get(host, f"[{host}]" if ":" in host else host)
    return f"{'https' if tls else 'http'}://{shown}:{port}"


def use_tls(certfile: str | None, keyfile: str | None) -> None:
    """Have the gateways that are started from here speak TLS themselves, if there's a certificate.

    Raises: `CommandError` unless both files are given and fit each other.
    """
    if bool(certfile) != bool(keyfile):
        raise CommandError("--ssl-certfile and --ssl-keyfile go together.")
    if not certfile:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile)
    except (OSError, ssl.SSLError) as error:
        raise CommandError(f"The certificate can't be used: {error}") from error
    os.environ["QUIRE_TLS"] = "direct"  # for the gateways: secure cookies, HSTS
    note_flags(["QUIRE_TLS"])


class Gateways(KeptProcesses):
    """Keeps `count` gateway processes running.

    They share the listening socket, so a connection waits for the next one when a process dies, and
    none is refused while they start. `options` are `config.serve`'s; files are relative to here,
    for the processes have a folder of their own.
    """

    def __init__(self, listener: socket.socket, count: int, options: dict[str, Any]) -> None:
        self._listener = listener
        number = listener.fileno()
        files = {name: os.path.abspath(options[name]) for name in FILES if options.get(name)}
        options = options | files
        command = ["-m", "config.serve", json.dumps(options), str(number)]
        super().__init__("gateway", command, count, [number])

    def stop(self, grace: float) -> None:
        """Let open requests finish for `grace` seconds, then end."""
        self._listener.close()
        super().stop(grace)
