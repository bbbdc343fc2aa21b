"""Adapters that operators pin in memory: limits on pinning, and synchronizing replicas.

A pin is a column of the adapter's row. Replicas lose their pins when they restart, and a promotion
changes the version behind a name, so a periodic task compares the rows with the heartbeats and
sends replicas the difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import redis
from django.conf import settings
from django.db.models import Q, QuerySet

from adapters.models import Adapter, AdapterVersion
from adapters.store import content_path
from catalog.heartbeats import read_heartbeats, registered_replicas, send_control
from catalog.models import ServedModel
from common.errors import Conflict, ServiceUnavailable
from common.object_storage import has_object_storage
from engine.contract.lora import AdapterRef
from engine.contract.messages import Heartbeat
from engine.system.redis_client import sync_client

#: Share of a replica's memory for adapters that pinned ones may use.
UNPINNED_TTL = 2
#: The task that calls `sync_pins`.
TASK = "adapters.pins"
#: Error code of a pin refused because of existing pins.
FULL = "pinned_memory_full"


@dataclass(frozen=True)
class PinCapacity:
    """Capacity for pinned adapters on a replica: bytes, and slots (None: no limit)."""

    num_bytes: int
    num_slots: int | None

    @classmethod
    def of(cls, beat: Heartbeat) -> PinCapacity:
        num_slots = beat.stats.adapter_slots // UNPINNED_TTL if beat.stats.adapter_slots else None
        return cls(beat.stats.adapter_capacity_bytes // UNPINNED_TTL, num_slots)

    def holds(self, versions: Iterable[AdapterVersion]) -> bool:
        """Whether all of them fit together."""
        sizes = {version.digest: version.num_bytes for version in versions}
        few = self.num_slots is None or len(sizes) <= self.num_slots
        return few and sum(sizes.values()) <= self.num_bytes


def check_capacity(adapter: Adapter) -> None:
    """Raise `Conflict` if a replica of its model can't hold it in addition to the existing pins.

    Call it in a transaction: the model's row is locked, so that two can't both take the last of the
    capacity. Until a replica reports its capacity, anything may be pinned. Without Redis:
    `ServiceUnavailable`.
    """
    model = ServedModel.objects.select_for_update().get(pk=adapter.served_model_id)
    pinned = _live_versions(adapter__served_model=model, adapter__pinned=True)
    other_versions = list(pinned.exclude(adapter=adapter))
    adapter_versions = list(_live_versions(adapter=adapter))
    for beat in _beats():
        capacity = PinCapacity.of(beat)
        elsewhere = beat.model.name != model.name or beat.state != "ready"
        if elsewhere or capacity.holds([*other_versions, *adapter_versions]):
            continue
        slots = "" if capacity.num_slots is None else f" and {capacity.num_slots} slots"
        raise Conflict(
            f"{adapter} has {_bytes(adapter_versions)} bytes, and {len(other_versions)} versions "
            f"of {_bytes(other_versions)} bytes are pinned already. At most half of a replica's "
            f"memory for adapters may be pinned: {capacity.num_bytes} bytes{slots} of "
            f"{beat.replica_id}.",
            code=FULL,
        )


def sync_pins() -> int:
    """Send replicas the adapters to pin and unpin; return the number of messages.

    Raises `ServiceUnavailable` without Redis.
    """
    num_sent = 0
    for beat in _beats():
        if beat.state != "ready":
            continue
        pinned = {state.digest: state for state in beat.adapters if state.pinned}
        requested = {ref.digest: ref for ref in _select_fitting(beat)}
        changes = [(ref, True) for digest, ref in requested.items() if digest not in pinned]
        for digest in pinned.keys() - requested.keys():
            changes.append((_ref(digest, pinned[digest].name, "", 0), False))
        for ref, pin in changes:
            send_control(beat.replica_id, "load_adapter", adapter=ref, pin=pin)
        num_sent += len(changes)
    return num_sent


def _select_fitting(beat: Heartbeat) -> Iterator[AdapterRef]:
    """Adapters to pin on this replica: the oldest pins first, up to its capacity."""
    capacity, selected = PinCapacity.of(beat), []
    pinned = _live_versions(adapter__served_model__name=beat.model.name, adapter__pinned=True)
    for version in pinned.select_related("adapter__tenant"):
        selected.append(version)
        if not capacity.holds(selected):
            return
        num_bytes = version.num_bytes if has_object_storage() else 0
        yield _ref(version.digest, version.adapter.name, version.adapter.owner, num_bytes)


def _live_versions(**adapters: Any) -> QuerySet[AdapterVersion]:
    """Versions served under a name of these adapters."""
    leads = Q(live_as__isnull=False) | Q(canary_as__isnull=False)
    return AdapterVersion.objects.filter(leads, **adapters).distinct().order_by("adapter_id", "pk")


def _ref(digest: str, name: str, owner: str, num_bytes: int) -> AdapterRef:
    path = str(content_path(digest))
    return AdapterRef(digest=digest, name=name, path=path, owner=owner, num_bytes=num_bytes)


def _bytes(versions: Iterable[AdapterVersion]) -> int:
    return sum(version.num_bytes for version in versions)


def _beats() -> list[Heartbeat]:
    client, prefix = sync_client(settings.REDIS_URL), settings.QUIRE.key_prefix
    try:
        ids = sorted(registered_replicas(client, prefix))
        return list(read_heartbeats(client, prefix, ids).values())
    except (redis.RedisError, OSError) as error:
        raise ServiceUnavailable("Replicas are unreachable: no connection to Redis.") from error
    finally:
        client.close()
