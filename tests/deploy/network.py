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

from tests.deploy.proxies import free_port


@dataclass(frozen=True)
class Place:
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


LOOPBACK = Place()


class Network:
    """Gives out places on loopback."""

    def join(self) -> Place:
        return LOOPBACK

    def leave(self, place: Place) -> None:
        """Nothing runs there any more."""


class Bridge(Network):
    """Gives out network namespaces; their bridge has this process's address, `.1`.

    Raises subprocess.CalledProcessError where the machine refuses them.
    """

    def __init__(self) -> None:
        number = os.getpid() % 2**16
        self._name, self._subnet = f"quire{number}", f"10.{number >> 8}.{number & 255}"
        self._numbers = itertools.count(2)
        _ip("link", "add", self._name, "type", "bridge")
        try:
            _ip("address", "add", f"{self._subnet}.1/24", "dev", self._name)
            _ip("link", "set", self._name, "up")
            self.leave(self.join())
        except subprocess.CalledProcessError:
            self.close()
            raise

    def join(self) -> Place:
        number = next(self._numbers)  # of a rolling upgrade's pods none gets another one's address
        namespace, cable = f"{self._name}-{number}", f"{self._name}p{number}"
        address = f"{self._subnet}.{number}"
        _ip("netns", "add", namespace)
        _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        _ip("link", "set", cable, "master", self._name, "up")
        _ip("-n", namespace, "address", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", namespace, "link", "set", device, "up")
        return Place(address, ("nsenter", f"--net=/run/netns/{namespace}"))

    def leave(self, place: Place) -> None:
        """Remove a namespace, and its cable with it."""
        _ip("netns", "delete", f"{self._name}-{place.address.rpartition('.')[2]}")

    def close(self) -> None:
        _ip("link", "delete", self._name)


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
