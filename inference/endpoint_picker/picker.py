"""`EndpointPicker`: chooses a request's pod by the replicas' heartbeats in Redis."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections.abc import Collection, Iterable

from django.conf import settings
from redis.exceptions import RedisError

from engine.contract.messages import HEARTBEAT_INTERVAL_S, ReplicaEvent
from engine.system.redis_client import async_client
from inference.endpoint_picker.request import RequestFacts
from inference.engine_client.fleet import Fleet, Replica, ReplicaEventReader, choose_replica

logger = logging.getLogger(__name__)

#: Maximum number of returned endpoints: the proxy tries the next if one is unreachable.
MAX_ENDPOINTS = 3


class EndpointPicker:
    """Tracks the replicas. Pickers share only Redis, so any number of them may be active.

    Attributes:
        ready: whether the heartbeats have been read once.
    """

    def __init__(self, gateways: str) -> None:
        """`gateways`: "host:port" of a name that resolves to gateways; "" for none."""
        self.ready = False
        self._redis = async_client(settings.REDIS_URL)
        self._slack = settings.QUIRE.affinity_slack
        prefix = settings.QUIRE.key_prefix
        self._fleet = Fleet(self._redis, prefix)
        self._events = ReplicaEventReader(self._redis, prefix, self._on_replica_event)
        self._name = gateways
        self._gateways: list[str] = []

    async def run(self) -> None:
        """Track replicas and gateways until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._events.run())
                await self._resolve_gateways()
                tasks.create_task(self._follow_gateways())
                while True:
                    await self._refresh()
                    await asyncio.sleep(HEARTBEAT_INTERVAL_S)
        finally:
            await self._redis.aclose()

    async def _follow_gateways(self) -> None:
        # Separate from heartbeats: a name server that hangs must not make replicas look dead.
        while True:
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)
            await self._resolve_gateways()

    async def _refresh(self) -> None:
        try:
            await self._fleet.refresh()
        except RedisError as error:
            # Without Redis nothing is known about the replicas: keep the last state.
            self._fleet.reset_timers()
            logger.warning("Redis can't be read: %s", error)
        else:
            self.ready = True

    async def _resolve_gateways(self) -> None:
        host, _, port = self._name.rpartition(":")
        if not host:
            return
        try:
            addresses = await asyncio.get_running_loop().getaddrinfo(
                host.strip("[]"), int(port), type=socket.SOCK_STREAM
            )
        except OSError as error:
            logger.warning("The gateways' name %s can't be resolved: %s", host, error)
            return
        self._gateways = sorted({_address(str(entry[4][0]), port) for entry in addresses})

    async def _on_replica_event(self, event: ReplicaEvent) -> None:
        if event.alive:
            await self._refresh()
        else:
            self._fleet.mark_dead(event.replica_id, event.incarnation)

    def pick(self, request: RequestFacts) -> list[str]:
        """Endpoints ("host:port"), best first: the pod of the replica that a gateway would choose
        by queues and prefixes, then gateways. Only gateways if no replica of the model is ready or
        the model is unknown: they queue the request, or respond with the API's error. [] for none.
        """
        replica = self._choose(request)
        endpoints = []
        if replica is not None:
            replica.submitted += 1
            endpoints.append(replica.heartbeat.endpoint)
        gateways = _within(self._gateways, request.subset)
        random.shuffle(gateways)
        return [*endpoints, *gateways][:MAX_ENDPOINTS]

    def _choose(self, request: RequestFacts) -> Replica | None:
        replicas = self._fleet.of_model(request.model)
        digest = ""
        if not replicas:
            digest = self._adapter_digest(request.model)
            replicas = [
                replica
                for replica in self._fleet
                if digest and any(state.digest == digest for state in replica.heartbeat.adapters)
            ]
        endpoints = set(
            _within((replica.heartbeat.endpoint for replica in replicas), request.subset)
        )
        reachable = [replica for replica in replicas if replica.heartbeat.endpoint in endpoints]
        return choose_replica(reachable, request.prefix_key, self._slack, digest)

    def _adapter_digest(self, name: str) -> str:
        """Digest of an adapter that a replica has used under this name; "" for none."""
        states = (state for replica in self._fleet for state in replica.heartbeat.adapters)
        return next((state.digest for state in states if name and state.name == name), "")


def _within(endpoints: Iterable[str], subset: Collection[str] | None) -> list[str]:
    return [
        endpoint for endpoint in endpoints if endpoint and (subset is None or endpoint in subset)
    ]


def _address(host: str, port: str) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
