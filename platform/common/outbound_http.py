"""The one way out: requests of this installation to addresses that people have typed in.

A webhook's address is its owner's to choose, so it may point anywhere, to the machine itself and
the network behind it too. Here a name is resolved once, every address that it has must be a public
one (or in a network that the operator allows), and the connection goes to that very address, so a
name that changes meanwhile changes nothing. Redirects aren't followed; answers are bounded.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urljoin, urlsplit

from django.conf import settings
from django.core.cache import cache

from engine.contract.errors import InvalidRequest, QuireError

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def networks_of(addresses: Sequence[str]) -> tuple[Network, ...]:
    """Parse networks in CIDR notation."""
    return tuple(ipaddress.ip_network(text) for text in addresses)


def is_within(address: str, networks: Sequence[Network]) -> bool:
    """Whether an address lies in one of the networks; what is no address lies in none."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
        parsed = parsed.ipv4_mapped
    return any(parsed in network for network in networks)


TIMEOUT_S = 10.0
#: Of an answer: nobody needs more than its status.
MAX_ANSWER_BYTES = 64 * 1024
MAX_URL_CHARS = 2000
MAX_REDIRECTS = 3

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
#: NAT64's, and the "IPv4-compatible" ones, which nobody uses any more.
_IN_LAST_BITS = [ipaddress.ip_network(network) for network in ("64:ff9b::/96", "::/96")]


class OutboundRequestBlocked(QuireError):
    """The address may not be asked, or it can't be reached."""

    status = 502
    code = "egress_refused"
    error_type = "server_error"


@dataclass(frozen=True)
class Target:
    """An address that was taken apart and checked for its form."""

    scheme: str
    host: str
    port: int
    path: str


def check_url(url: str, *, param: str = "url") -> Target:
    """The form alone: http(s), a host, no user name, no fragment. Raises `InvalidRequest`."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise InvalidRequest(f"{url[:100]!r} isn't a valid address.", param=param) from None
    printable = url.isascii() and url.isprintable() and " " not in url
    if len(url) > MAX_URL_CHARS or not printable:
        raise InvalidRequest("An address is printable ASCII without spaces.", param=param)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidRequest("The address must begin with https:// (or http://).", param=param)
    if parts.username or parts.password or parts.fragment:
        raise InvalidRequest("The address must hold no user name and no fragment.", param=param)
    if port == 0:
        raise InvalidRequest("An address's port is in [1, 65535].", param=param)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    default = 443 if parts.scheme == "https" else 80
    return Target(parts.scheme, parts.hostname, port or default, path)


def check_public(url: str, *, param: str = "url") -> Target:
    """Check an address that is stored: a numeric one must be allowed.

    Names are looked up when they are asked, each time: what they mean today says nothing.
    """
    target = check_url(url, param=param)
    address = _literal_address(target.host)
    if address is not None and not is_allowed_address(address):
        raise InvalidRequest(f"{target.host} is in a private network.", param=param)
    return target


def _literal_address(host: str) -> Address | None:
    """The address that a host is without being looked up, in any form that `connect` takes."""
    name = host.rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return ipaddress.IPv4Address("127.0.0.1")
    for read in (_written_out, socket.inet_aton):
        try:
            return ipaddress.ip_address(read(name))
        except (OSError, ValueError):
            continue
    return None


def _written_out(name: str) -> str:
    return name.partition("%")[0]


def post_webhook(url: str, body: bytes, headers: dict[str, str]) -> int:
    """Send a POST and return the answer's status, which may be any. May block for `TIMEOUT_S`.

    Raises: `InvalidRequest` for what is no address; `OutboundRequestBlocked` for a private one, a
    name
    that isn't known, or a server that doesn't answer.
    """
    target = check_url(url)
    address = resolve(target.host, target.port)
    connection = PinnedConnection(target, address)
    # A socket's own timeout begins anew with each byte: an answer drop by drop would take days.
    watch = threading.Timer(TIMEOUT_S, connection.cut)
    watch.daemon = True
    watch.start()
    try:
        connection.request("POST", target.path, body, {"User-Agent": "quire", **headers})
        answer = connection.getresponse()
        connection.check()
        with contextlib.suppress(OSError, http.client.HTTPException):
            answer.read(MAX_ANSWER_BYTES)
        return answer.status
    except (OSError, http.client.HTTPException) as error:
        raise OutboundRequestBlocked(f"{target.host} doesn't answer: {error}.") from error
    finally:
        watch.cancel()
        with contextlib.suppress(OSError):
            connection.close()


def fetch(
    url: str, *, max_bytes: int, timeout_s: float, param: str, hosts: Sequence[str] = ()
) -> bytes:
    """The body of a GET. Redirects are followed; each address is checked again. Blocks.

    Args:
        hosts: the only names that may be asked; () for all.

    Raises:
        InvalidRequest: what is no address, an answer other than 200, or one that is too large.
        OutboundRequestBlocked: a private address, an unknown name, or no answer in time.
    """
    deadline = time.monotonic() + timeout_s
    for _ in range(MAX_REDIRECTS + 1):
        target = check_url(url, param=param)
        if hosts and target.host not in hosts:
            raise InvalidRequest(f"{target.host} is none of the allowed hosts.", param=param)
        connection = PinnedConnection(target, resolve(target.host, target.port))
        watch = threading.Timer(max(0.0, deadline - time.monotonic()), connection.cut)
        watch.daemon = True
        watch.start()
        try:
            connection.request("GET", target.path, headers={"User-Agent": "quire"})
            answer = connection.getresponse()
            if answer.status in (301, 302, 303, 307, 308) and (to := answer.getheader("Location")):
                url = urljoin(url, to)
                continue
            if answer.status != 200:
                raise InvalidRequest(f"{target.host} answers {answer.status}.", param=param)
            body = answer.read(max_bytes + 1)
            connection.check()
        except InvalidRequest:
            raise
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise OutboundRequestBlocked(f"{target.host} doesn't answer: {error}.") from error
        finally:
            watch.cancel()
            with contextlib.suppress(OSError):
                connection.close()
        if len(body) > max_bytes:
            raise InvalidRequest(f"{target.host} sends over {max_bytes} bytes.", param=param)
        return body
    raise InvalidRequest(f"More than {MAX_REDIRECTS} redirects.", param=param)


def resolve(host: str, port: int) -> Address:
    """One of the host's addresses, all of which are allowed. Raises `OutboundRequestBlocked`."""
    try:
        entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise OutboundRequestBlocked(f"{host} has no address: {error}.") from error
    addresses = [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in entries]
    for address in addresses:
        if not is_allowed_address(address):
            raise OutboundRequestBlocked(f"{host} is in a private network: {address}.")
    return addresses[0]


def is_allowed_address(address: Address) -> bool:
    """Whether an address is public, or in a network that the operator allows."""
    unwrapped = unwrap_ipv6(address)
    allowed = networks_of(settings.QUIRE.egress_networks)
    if any(unwrapped in network or address in network for network in allowed):
        return True
    return unwrapped.is_global and not unwrapped.is_multicast


def unwrap_ipv6(address: Address) -> Address:
    """The IPv4 address inside an IPv6 one (mapped, 6to4, Teredo, NAT64 ...), else the same."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if inner is None and address.teredo is not None:
            inner = address.teredo[1]
        if inner is None and any(address in network for network in _IN_LAST_BITS):
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        return inner or address
    return address


class PinnedConnection(http.client.HTTPConnection):
    """A connection to an address that was checked; the name is for the certificate alone."""

    def __init__(self, target: Target, address: Address) -> None:
        super().__init__(target.host, target.port, timeout=TIMEOUT_S)
        self._target, self._address, self._is_late = target, address, False

    def connect(self) -> None:
        """Connect to the checked address, not to the name's current one."""
        self.sock = socket.create_connection((str(self._address), self._target.port), TIMEOUT_S)
        if self._target.scheme == "https":
            context, name = ssl.create_default_context(), self._target.host
            # First here, then shaking hands: `cut` must find it.
            tls_socket = context.wrap_socket(
                self.sock, server_hostname=name, do_handshake_on_connect=False
            )
            self.sock = tls_socket
            tls_socket.do_handshake()
        self.check()

    def cut(self) -> None:
        """End it, whatever it waits for. From another thread."""
        self._is_late = True
        with contextlib.suppress(OSError):
            if self.sock is not None:
                self.sock.shutdown(socket.SHUT_RDWR)

    def check(self) -> None:
        """Raise `TimeoutError` once it was cut."""
        if self._is_late:
            raise TimeoutError("it took too long")


#: Failures in a row that open a breaker, and for how many seconds.
MAX_FAILURES, PAUSE_S = 5, 600


class CircuitBreaker:
    """Keeps requests from a server that didn't answer the last ones.

    It counts in Django's cache, so all workers see the same.
    """

    def __init__(self, name: str) -> None:
        self._key = f"breaker:{name}"

    @property
    def is_open(self) -> bool:
        """Whether the server isn't to be asked now."""
        return bool(cache.get(self._key, 0) >= MAX_FAILURES)

    def attempt(self) -> None:
        """Count a failure in advance: a worker that is killed while it waits can't do so later."""
        cache.set(self._key, cache.get(self._key, 0) + 1, PAUSE_S)

    def succeed(self) -> None:
        """The server has answered: count from nothing again."""
        cache.delete(self._key)
