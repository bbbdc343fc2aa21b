"""The only module for requests to addresses that users enter.

The owner of a webhook chooses its address, which may point anywhere, also to this machine and the
network behind it. So a name is resolved once, all its addresses must be public (or in a network
that the operator allows), and the connection uses the checked address, so it doesn't matter if the
name changes meanwhile. Redirects aren't followed; responses are bounded.
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
    """Whether an address lies in one of the networks; False for an invalid address."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
        parsed = parsed.ipv4_mapped
    return any(parsed in network for network in networks)


TIMEOUT_S = 10.0
#: Maximum size of a POST's response: only its status is used.
MAX_ANSWER_BYTES = 64 * 1024
MAX_URL_CHARS = 2000
MAX_REDIRECTS = 3

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
#: NAT64's, and the obsolete "IPv4-compatible" addresses.
_IN_LAST_BITS = [ipaddress.ip_network(network) for network in ("64:ff9b::/96", "::/96")]


class OutboundRequestBlocked(QuireError):
    """The address is not allowed, or it can't be reached."""

    status = 502
    code = "egress_refused"
    error_type = "server_error"


@dataclass(frozen=True)
class Target:
    """An address that was parsed and syntactically checked."""

    scheme: str
    host: str
    port: int
    path: str


def check_url(url: str, *, param: str = "url") -> Target:
    """Check the syntax: http(s), a host, no user name, no fragment. Raises `InvalidRequest`."""
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


def check_public(url: str) -> None:
    """Check an address before it is stored: a numeric one must be allowed.

    Names are resolved at each request instead, as they may change.
    """
    host = check_url(url).host
    address = _literal_address(host)
    if address is not None and not is_allowed_address(address):
        raise InvalidRequest(f"{host} is in a private network.", param="url")


def _literal_address(host: str) -> Address | None:
    """The address of a numeric host, in any form that `connect` accepts."""
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
    """Send a POST and return the response's status, whatever it is. May block for `TIMEOUT_S`.

    Raises: `InvalidRequest` for an invalid address; `OutboundRequestBlocked` for a private address,
    an unknown name, or a server that doesn't respond.
    """
    target = check_url(url)
    address = resolve(target.host, target.port)
    connection = PinnedConnection(target, address)
    # A socket's own timeout restarts with each byte: a trickling response could take days.
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
    """The body of a GET. Redirects are followed, checking each address. May block.

    Args:
        hosts: the only names that may be requested; () for any.

    Raises:
        InvalidRequest: an invalid address, a status other than 200, or too large a response.
        OutboundRequestBlocked: a private address, an unknown name, or no response in time.
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
    """One of the host's addresses; all must be allowed. Raises `OutboundRequestBlocked`."""
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
    """A connection to a checked address; the name is used for the certificate only."""

    def __init__(self, target: Target, address: Address) -> None:
        super().__init__(target.host, target.port, timeout=TIMEOUT_S)
        self._target, self._address, self._is_late = target, address, False

    def connect(self) -> None:
        """Connect to the checked address, not to the name's current one."""
        self.sock = socket.create_connection((str(self._address), self._target.port), TIMEOUT_S)
        if self._target.scheme == "https":
            context, name = ssl.create_default_context(), self._target.host
            # Set before the TLS handshake, so that `cut` can close it.
            tls_socket = context.wrap_socket(
                self.sock, server_hostname=name, do_handshake_on_connect=False
            )
            self.sock = tls_socket
            tls_socket.do_handshake()
        self.check()

    def cut(self) -> None:
        """Close it, whatever it is waiting for. Called from another thread."""
        self._is_late = True
        with contextlib.suppress(OSError):
            if self.sock is not None:
                self.sock.shutdown(socket.SHUT_RDWR)

    def check(self) -> None:
        """Raise `TimeoutError` if it was cut."""
        if self._is_late:
            raise TimeoutError("it took too long")


#: Consecutive failures that open a breaker, and the seconds that it stays open.
MAX_FAILURES, PAUSE_S = 5, 600


class CircuitBreaker:
    """Circuit breaker: blocks requests to a server whose last responses failed.

    It counts in Django's cache, which all workers share.
    """

    def __init__(self, name: str) -> None:
        self._key = f"breaker:{name}"

    @property
    def is_open(self) -> bool:
        """Whether requests to the server are blocked now."""
        return bool(cache.get(self._key, 0) >= MAX_FAILURES)

    def attempt(self) -> None:
        """Count a failure in advance: a worker that is killed while it waits can't do so later."""
        cache.set(self._key, cache.get(self._key, 0) + 1, PAUSE_S)

    def succeed(self) -> None:
        """Reset the count after a response."""
        cache.delete(self._key)
