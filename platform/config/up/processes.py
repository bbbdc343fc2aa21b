"""Processes that are restarted whenever they exit."""

from __future__ import annotations

import datetime
import http.client
import json
import logging
import os
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from django.conf import settings
from django.core.management.base import CommandError

from catalog.processes import ManagedProcess, kill_when_stopped, spawn
from catalog.slot import backoff, describe_exit
from common.draining import DRAIN_SIGNAL, SETTLE_S
from common.installation import APPS_DIR
from common.settings_environment import record_flags

logger = logging.getLogger(__name__)

TRY_EVERY_S = 0.2
TIMEOUT_S = 60.0


#: Path -> smallest request of each task. A model answers requests of other tasks with 400 at once.
_REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hello", "max_tokens": 1},
    "/pooling": {"input": "Hello"},
    "/score": {"text_1": "Hello", "text_2": "Hello"},
}


class ReadinessProbe(threading.Thread):
    """Sends requests until the model answers one.

    Attributes:
        tls: TLS settings of the client.
        ready: set once the model has answered a request.
        last_error: error of the latest attempt.
    """

    def __init__(self, url: str, api_key: str, model: str) -> None:
        super().__init__(name="first-token", daemon=True)
        self.url, self.api_key, self.model = url, api_key, model
        # The gateway runs on this machine, so any name in its certificate is accepted.
        self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self.tls.check_hostname = False
        self.tls.verify_mode = ssl.CERT_NONE
        self.ready = threading.Event()
        self.last_error = ""
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Stop sending requests."""
        self._stopping.set()

    def run(self) -> None:
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}),  # don't use a proxy
            urllib.request.HTTPSHandler(context=self.tls),
        )
        while not self._stopping.is_set():
            if self._ask(opener):
                self.ready.set()
                return
            self._stopping.wait(TRY_EVERY_S)

    def _ask(self, opener: urllib.request.OpenerDirector) -> bool:
        """Return whether the model answered: with 200 for one task, or with 400 for all of them."""
        for path, body in _REQUESTS.items():
            status = self._post(opener, path, body)
            if status != HTTPStatus.BAD_REQUEST:
                return status == HTTPStatus.OK
        return True

    def _post(self, opener: urllib.request.OpenerDirector, path: str, body: dict[str, Any]) -> int:
        """Return the response's status, 0 without a response."""
        request = urllib.request.Request(  # noqa: S310 - our own URL
            f"{self.url}{path}",
            json.dumps({"model": self.model, **body}).encode(),
            {"Authorization": f"Bearer {self.api_key}", "Content-Type": "application/json"},
        )
        try:
            with opener.open(request, timeout=TIMEOUT_S) as response:
                return int(response.status)
        except HTTPError as error:
            with error:
                self.last_error = f"{error.code}: {error.read(300).decode(errors='replace')}"
            status = error.code
        except (OSError, http.client.HTTPException) as error:
            self.last_error = str(error) or type(error).__name__
            status = 0
        logger.debug("no answer yet: %s", self.last_error)
        return status


class ProcessGroup:
    """Keeps `count` processes of one Python command running.

    Args:
        name: for the log. command: arguments of the Python interpreter. pass_fds: inherited
            descriptors.
        on_death: called with the process id of each process that has exited.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        count: int = 1,
        pass_fds: Sequence[int] = (),
        on_exit: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._name, self._pass_fds, self._on_exit = name, tuple(pass_fds), on_exit
        self._command = [sys.executable, *command]
        self._processes: list[ManagedProcess | None] = [None] * count
        self._due = [0.0] * count
        self._failures = [0] * count

    def tick(self) -> None:
        """Start the processes that aren't running."""
        for index, process in enumerate(self._processes):
            if process is not None and (status := process.poll()) is not None:
                lived = time.monotonic() - process.started
                self._failures[index] = 0 if lived > 10 else self._failures[index]
                self._record_failure(index)
                self._processes[index] = None
                logger.warning("%s %d %s", self._name, index, describe_exit(status))
                self._on_exit(process.pid)
            if self._processes[index] is None and time.monotonic() >= self._due[index]:
                try:
                    self._processes[index] = self._start(index)
                except (OSError, subprocess.SubprocessError) as error:
                    # For example, no memory for another process: the running ones continue.
                    logger.warning("%s can't be started: %s", self._name, error)
                    self._record_failure(index)

    def _record_failure(self, index: int) -> None:
        self._failures[index] += 1
        self._due[index] = time.monotonic() + backoff(self._failures[index])

    @property
    def is_crash_looping(self) -> bool:
        """Return whether the processes fail at every start."""
        return min(self._failures) >= 3

    def stop(self, grace: float) -> None:
        """Let processes finish for `grace` seconds, then kill them."""
        running = [process for process in self._processes if process is not None]
        for process in running:
            process.terminate()
        deadline = time.monotonic() + grace
        for process in running:
            process.wait(max(0.0, deadline - time.monotonic()))
            process.kill()

    def kill(self) -> None:
        """Kill the processes immediately."""
        for process in self._processes:
            if process is not None:
                process.kill()

    def _start(self, index: int) -> ManagedProcess:
        root = Path(settings.BASE_DIR)
        paths = [str(root), str(APPS_DIR), os.environ.get("PYTHONPATH", "")]
        process = spawn(
            self._command,
            name=f"{self._name} {index}",
            cwd=str(root),
            env={"PYTHONPATH": os.pathsep.join(filter(None, paths))},
            pass_fds=self._pass_fds,
        )
        # A process paused by SIGSTOP would keep its clients, and perhaps the database's lock.
        kill_when_stopped(process)
        return process


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket; port 0 picks a free one. Raises OSError that names the address."""
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


#: Options whose values are file paths.
FILES = ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")


def url_of(host: str, port: int, *, tls: bool) -> str:
    """Return the URL for a browser on this machine."""
    everywhere = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # noqa: S104 - nothing is bound here
    address = everywhere.get(host, f"[{host}]" if ":" in host else host)
    return f"{'https' if tls else 'http'}://{address}:{port}"


def use_tls(certfile: str | None, keyfile: str | None) -> None:
    """Make the gateways started by this process serve TLS, if there is a certificate.

    Raises: `CommandError` unless both files are given and match.
    """
    if bool(certfile) != bool(keyfile):
        raise CommandError("--ssl-certfile and --ssl-keyfile go together.")
    if not certfile:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile)
    except (OSError, ssl.SSLError) as error:
        raise CommandError(f"The certificate can't be used: {error}") from error
    os.environ["QUIRE_TLS"] = "direct"  # makes gateways use secure cookies and HSTS
    record_flags(["QUIRE_TLS"])


class Gateways(ProcessGroup):
    """Keeps `count` gateway processes running.

    They share the listening socket: when a process dies, connections wait for the next one, and
    none is refused while the processes start. `options` are those of `config.serve`; relative paths
    are resolved here, because the processes have another working directory.
    """

    def __init__(self, listener: socket.socket, count: int, options: dict[str, Any]) -> None:
        self._listener = listener
        number = listener.fileno()
        files = {name: os.path.abspath(options[name]) for name in FILES if options.get(name)}
        options = options | files
        command = ["-m", "config.serve", json.dumps(options), str(number)]
        super().__init__("gateway", command, count, [number])

    def begin_draining(self) -> None:
        """Make `/ready` answer 503 and close connections after their response; still accept new
        ones.

        Load balancers then stop sending requests before the sockets close.
        """
        for process in self._processes:
            if process is not None:
                process.send_signal(DRAIN_SIGNAL)

    def stop(self, grace: float) -> None:
        """Let open requests finish for `grace` seconds, then kill the processes."""
        self._listener.close()
        super().stop(grace + SETTLE_S)


#: Long enough for a model to download before the first token.
VALID_DAYS = 30


def create_probe_certificate(tls: ssl.SSLContext, authorities: str, data_dir: Path) -> str:
    """Create a client certificate for the probe and load it into `tls`.

    Returns the path of a CA file for the gateways: the operator's authorities and this certificate,
    which can't sign others. Its private key isn't kept.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    public = _certificate(key).public_bytes(serialization.Encoding.PEM)
    secret = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    with tempfile.NamedTemporaryFile(dir=data_dir) as file:  # ssl loads keys only from files
        file.write(public + secret)
        file.flush()
        tls.load_cert_chain(file.name)
    path = data_dir / "client-authorities.pem"
    # Gateways left by a killed `up` may still be reading the old file.
    path.with_suffix(".new").write_bytes(Path(authorities).read_bytes() + b"\n" + public)
    os.replace(path.with_suffix(".new"), path)
    return str(path)


def _certificate(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "manage.py up")])
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
