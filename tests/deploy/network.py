"""Where pods run: each in a network namespace of its own, joined by a bridge, where root may.

Elsewhere they share the loopback network, and each port is one that is free there.
"""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.waiting import free_port


@dataclass(frozen=True)
class NetworkNamespace:
    """The network of one pod.

    Attributes:
        address: the pod's, as others reach it.
        command: what a program's command begins with, to run there.
    """

    address: str = "127.0.0.1"
    command: tuple[str, ...] = ()

    @property
    def has_own_ports(self) -> bool:
        """Whether nobody else can have one of its ports."""
        return bool(self.command)

    @property
    def listen_address(self) -> str:
        """Where a program of it listens."""
        return "0.0.0.0" if self.has_own_ports else self.address

    def port(self, number: int) -> int:
        """The port that stands for `number`."""
        return number if self.has_own_ports else free_port()


LOOPBACK = NetworkNamespace()
#: Networks of 254 addresses: a test of a hundred starts from zero gives out so many.
NUM_SUBNETS = 512


class Network:
    """Gives out places on loopback."""

    def join(self) -> NetworkNamespace:
        return LOOPBACK

    def leave(self, namespace: NetworkNamespace) -> None:
        """Nothing runs there any more."""


class Bridge(Network):
    """Gives out network namespaces; on their network this process has the address `.1`.

    The bridge is in a namespace of its own: a host that drops what it forwards, as Docker has it,
    would drop what goes over a bridge too. Addresses are of 198.18.0.0/15, which RFC 2544 reserves
    for tests.

    Raises subprocess.CalledProcessError where the machine refuses them.
    """

    def __init__(self) -> None:
        numbers = ((os.getpid() + shift) % NUM_SUBNETS for shift in range(NUM_SUBNETS))
        number = next(n for n in numbers if not Path(f"/run/netns/quire{n}").exists())
        self._name = f"quire{number}"
        self._subnet = f"198.{18 + (number >> 8)}.{number & 255}"
        self._numbers = itertools.count(2)
        _ip("netns", "add", self._name)
        try:
            _ip("-n", self._name, "link", "add", "br0", "type", "bridge")
            _ip("-n", self._name, "link", "set", "br0", "up")
            self._plug(self._name, "host")
            _ip("address", "add", f"{self._subnet}.1/24", "dev", self._name)
            _ip("link", "set", self._name, "up")
            self.leave(self.join())
        except subprocess.CalledProcessError:
            _ip("netns", "delete", self._name)
            raise

    def join(self) -> NetworkNamespace:
        number = next(self._numbers)  # of a rolling upgrade's pods none gets another one's address
        namespace, address = f"{self._name}-{number}", f"{self._subnet}.{number}"
        _ip("netns", "add", namespace)
        self._plug("eth0", f"pod{number}", "netns", namespace)
        _ip("-n", namespace, "address", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", namespace, "link", "set", device, "up")
        return NetworkNamespace(address, ("nsenter", f"--net=/run/netns/{namespace}"))

    def _plug(self, device: str, socket: str, *namespace: str) -> None:
        """Make a device and the cable from it to the bridge."""
        cable = ("type", "veth", "peer", "name", socket, "netns", self._name)
        _ip("link", "add", device, *namespace, *cable)
        _ip("-n", self._name, "link", "set", socket, "master", "br0", "up")

    def leave(self, namespace: NetworkNamespace) -> None:
        """Remove a namespace, and its cable with it."""
        _ip("netns", "delete", f"{self._name}-{namespace.address.rpartition('.')[2]}")

    def close(self) -> None:
        _ip("link", "delete", self._name)  # with its namespace it would go a little later
        _ip("netns", "delete", self._name)


@contextmanager
def pod_network() -> Iterator[Network]:
    """A bridge, or loopback where there can't be one."""
    try:
        bridge = Bridge()
    except (FileNotFoundError, subprocess.CalledProcessError):
        yield Network()
        return
    try:
        yield bridge
    finally:
        bridge.close()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
