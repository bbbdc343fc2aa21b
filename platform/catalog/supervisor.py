"""The supervisor: keeps this node's replicas running as the catalogue specifies.

It reconciles: each `tick` compares the rows with its processes and does the next step. Killing it
loses nothing; the desired state is in the rows.
"""

from __future__ import annotations

import logging
import re
import socket
import time
from collections.abc import Iterable, Sequence
from datetime import datetime

import redis
from django.conf import settings
from django.db import DatabaseError, InterfaceError, close_old_connections
from django.db.models import Q

from catalog import heartbeats
from catalog.devices import device_environment, visible_devices
from catalog.engine_settings import replica_command
from catalog.heartbeats import read_heartbeats, registered_replicas
from catalog.idle import IdleMonitor, unload_idle_model
from catalog.memory_plan import plan_memory
from catalog.models import DesiredState, Replica, ReplicaState, ServedModel
from catalog.replica_log import ReplicaLog
from catalog.replica_rows import ReplicaSnapshot, sync_replica_rows
from catalog.slot import ReplicaSlot
from common.commands import as_sentence
from common.loops import record_failure
from engine.contract import messages, redis_keys
from engine.contract.errors import QuireError
from engine.contract.messages import Heartbeat, ModelInfo
from engine.system.host import PREDECESSOR_VARIABLE
from engine.system.redis_client import sync_client

# A new process imports its engine before its first heartbeat: seconds, or half a minute on a busy
# machine. Until then the supervisor reports "loading" on its behalf, so that gateways keep the
# streams that wait for it.

#: Writes a heartbeat unless the process of this incarnation has written its own.
#: KEYS: it, the replica ids. ARGV: the incarnation, the heartbeat, its TTL, the replica id.
PUBLISH_SCRIPT = """
local known = redis.call('GET', KEYS[1])
if known and not string.find(known, ARGV[1], 1, true) then return 0 end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
redis.call('SADD', KEYS[2], ARGV[4])
return 1
"""


def is_starting_silently(slot: ReplicaSlot, beat: Heartbeat | None) -> bool:
    """Whether a slot's process runs and hasn't sent a heartbeat yet."""
    if slot.process is None or slot.stopping:
        return False
    return beat is None or beat.incarnation == slot.pending_incarnation


def publish_starting_heartbeat(client: redis.Redis, prefix: str, slot: ReplicaSlot) -> None:
    """Report "loading" for the lifetime of a heartbeat. Raises redis.RedisError."""
    now = time.time()
    beat = Heartbeat(
        replica_id=slot.replica_id,
        incarnation=slot.pending_incarnation,
        state="loading",
        model=ModelInfo(name=slot.model_name, path="", max_model_len=0, vocab_size=0, dtype=""),
        at=now,
        progress_at=now,
        pid=slot.last_pid,
        host=socket.gethostname(),
    )
    client.eval(
        PUBLISH_SCRIPT,
        2,
        redis_keys.replica_key(slot.replica_id, prefix),
        redis_keys.replicas_key(prefix),
        slot.pending_incarnation,
        messages.encode(beat),
        int(messages.HEARTBEAT_TTL_S * 1000),
        slot.replica_id,
    )


def rendezvous_environment() -> dict[str, str]:
    """Environment by which the processes of a group find each other: a free port, anew each time,
    where those of an earlier group don't come.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}


logger = logging.getLogger(__name__)

TICK_S = 0.1
SYNC_S = 0.5
#: Interval of reading the rows when no replica changed: other processes may have changed them.
MIRROR_S = 2.5


def replica_id_of(model: ServedModel, index: int, node: str) -> str:
    """A replica's id, which is stable over restarts, so that it keeps its inbox."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", model.name)[:60]
    return f"{name}-{model.pk}-{index}@{node}"


def _side_of(
    sides: Sequence[list[ReplicaSlot]], slots: Iterable[ReplicaSlot]
) -> list[ReplicaSlot] | None:
    """The first side with an id of these slots; None: there is none."""
    ids = {slot.replica_id for slot in slots}
    return next((side for side in sides if ids & {slot.replica_id for slot in side}), None)


class Supervisor:
    """Runs the replicas of this node.

    Args:
        redis_url, key_prefix: where replicas connect and their heartbeats are.
        node: this node's name; default: the host's.
        program: replaces `python -m engine.serving`.
        drain_seconds: maximum wait for streams when a replica is drained.
    """

    def __init__(
        self,
        *,
        redis_url: str = "",
        key_prefix: str = "",
        node: str = "",
        program: Sequence[str] = (),
        drain_seconds: float | None = None,
    ) -> None:
        quire = settings.QUIRE
        self.redis_url = redis_url or settings.REDIS_URL
        self.prefix = key_prefix or quire.key_prefix
        self.node = node or socket.gethostname()
        self.program = list(program or quire.engine_command)
        self.drain_seconds = quire.drain_seconds if drain_seconds is None else drain_seconds
        self.slots: dict[str, ReplicaSlot] = {}
        self._slots: dict[str, ReplicaSlot] = {}
        #: Slots that serve a model until their successors do, by the model's key.
        self._predecessors: dict[int, list[ReplicaSlot]] = {}
        self._unmanaged: dict[str, int] = {}
        self._may_idle: list[ServedModel] = []
        #: Incarnations that operators want to be replaced.
        self._outdated: set[str] = set()
        #: When each model whose plan was logged had been changed.
        self._planned: dict[int, datetime | None] = {}
        self._devices = visible_devices()
        self._idle = IdleMonitor()
        self._beats: dict[str, Heartbeat] = {}
        self._redis = sync_client(self.redis_url)
        self._next_sync = self._last_synced_at = 0.0
        self._last_synced: tuple[list[ReplicaSnapshot], dict[int, int]] | None = None
        self._troubled = ""

    def tick(self) -> None:
        """Run one step of reconciliation; call every `TICK_S` seconds from the main thread."""
        died = [slot for slot in self.slots.values() if slot.check()]
        if time.monotonic() < self._next_sync and not died:
            return
        self._next_sync = time.monotonic() + SYNC_S
        try:
            self._load_desired_models()
            self._read_heartbeats()
            self._unload_idle_models()
            self._reconcile()
            self._write_rows()
            self._troubled = ""
        except (DatabaseError, InterfaceError, redis.RedisError) as error:
            # Replicas keep running; the last known desired state is kept.
            for slot in self.slots.values():
                slot.reset_failures()
            self._warn_once(f"model catalogue unavailable, retrying: {as_sentence(error)}")
        except Exception as error:  # replicas must not die with the process that supervises them
            record_failure("supervisor", error)
        finally:
            close_old_connections()

    def stop(self) -> None:
        """Drain every replica, wait, and kill the rest."""
        for slot in self.slots.values():
            slot.drain()
        while any(not slot.is_stopped for slot in self.slots.values()):
            time.sleep(TICK_S / 2)
            for slot in self.slots.values():
                slot.check()
        self._publish_stopped()
        self._redis.close()

    def kill(self) -> None:
        """Kill every replica at once."""
        for slot in self.slots.values():
            slot.kill()

    def _load_desired_models(self) -> None:
        """Models that the catalogue assigns to this node."""
        loaded = ServedModel.objects.filter(desired_state=DesiredState.LOADED, idle_since=None)
        self._unmanaged = dict(loaded.filter(managed=False).values_list("name", "pk"))
        local = loaded.filter(Q(node="") | Q(node=self.node), managed=True)
        self._slots, self._predecessors = {}, {}
        self._may_idle = []
        asked = Replica.objects.filter(host=self.node).exclude(restart_of="")
        self._outdated = set(asked.values_list("restart_of", flat=True))
        for model in local:
            self._may_idle += [model] if model.idle_minutes else []
            self._log_plan(model)
            size = model.num_replicas + model.num_spares
            if size == 1 or model.group_settings:
                slots = self._with_successors(model, size)
            else:
                slots = [self._slot(model, index, index) for index in range(size)]
            for slot in slots:
                self._slots[slot.replica_id] = slot

    def _with_successors(self, model: ServedModel, size: int) -> list[ReplicaSlot]:
        """The only replica of a model, or its group. While its settings change, those that run
        serve until successors under other ids are ready, if the memory suffices for both. They are
        replaced in their place if one of these fails, for example because both need the same port.
        """
        group = str(model.pk) if size > 1 else ""
        sides = [
            [
                self._slot(model, index, 2 * index + side, group=group and f"{group}-{side}")
                for index in range(size)
            ]
            for side in (0, 1)
        ]
        commands = {slot.replica_id: slot.command for side in sides for slot in side}
        local = [slot for slot in self.slots.values() if slot.served_model_id == model.pk]
        running = [slot for slot in local if not slot.stopping]
        old = [
            slot
            for slot in running
            if slot.command != commands.get(slot.replica_id) or self._is_outdated(slot)
        ]
        current = _side_of(sides, [slot for slot in running if slot not in old])
        if not old:
            return current or _side_of(sides, local) or sides[0]
        if current is not None:
            slots = [self.slots.get(slot.replica_id) for slot in current]
            if any(slot.failures for slot in slots if slot is not None):
                # What an operator wanted to restart serves on; other settings replace it.
                Replica.objects.filter(served_model=model, host=self.node).update(restart_of="")
                self._outdated -= {
                    self._beats[slot.replica_id].incarnation
                    for slot in old
                    if self._is_outdated(slot)
                }
                return sides[1 - sides.index(current)]
            if all(map(self._serves, slots)):
                return current
        else:
            waiting = {slot.group or slot.replica_id for slot in old if not self._serves(slot)}
            old = [slot for slot in old if (slot.group or slot.replica_id) not in waiting]
            if not (old and self._has_memory_for(model, old[0])):
                return _side_of(sides, running) or sides[0]
            free = [side for side in sides if not _side_of([side], old)]
            current = (free or sides)[0]  # with none, the others serve until the first side does
            old = [slot for slot in old if not _side_of([current], [slot])]
        self._predecessors[model.pk] = old
        return [*old, *current]

    def _is_outdated(self, slot: ReplicaSlot) -> bool:
        """Whether an operator wants it to be replaced."""
        beat = self._beats.get(slot.replica_id)
        return beat is not None and beat.incarnation in self._outdated

    def _has_memory_for(self, model: ServedModel, old: ReplicaSlot) -> bool:
        """Whether a model's replicas fit beside what runs, as far as it can be told; each has a KV
        cache as large as `old` has.
        """
        try:
            plan = plan_memory(model, self.node, int(self._cache_tokens(old) or 0))
        except QuireError:
            return False
        # Ranks on other machines join one engine at a time.
        return plan is not None and plan.fits_again and model.settings.get("nnodes", 1) == 1

    def _log_plan(self, model: ServedModel) -> None:
        """Log once what a model's replicas will take, before they start or change."""
        if self._planned.get(model.pk, "never") == model.changed_at:
            return
        self._planned[model.pk] = model.changed_at
        try:
            plan = plan_memory(model, self.node)
        except QuireError as error:  # its replicas fail, and show why
            logger.warning("%s: its memory can't be estimated: %s", model.name, error.message)
            return
        if plan is not None:
            level = logging.INFO if plan.fits else logging.WARNING
            more = "" if plan.fits else ", which is too much"
            logger.log(level, "%s: %s%s.", model.name, plan.text, more)

    def _slot(self, model: ServedModel, index: int, number: int, group: str = "") -> ReplicaSlot:
        """The slot of a model's replica `index`; `number`: of its id."""
        replica_id = replica_id_of(model, number, self.node)
        engine_settings = model.replica_settings(index)
        size = engine_settings.get("data_parallel_size") or 1
        num_ranks = engine_settings.get("tensor_parallel_size") or 1
        num_ranks *= engine_settings.get("pipeline_parallel_size") or 1
        command = replica_command(
            engine_settings,
            replica_id=replica_id,
            key_prefix=self.prefix,
            drain_seconds=self.drain_seconds,
            spare=0 <= index - model.num_replicas < model.num_spares,
            program=self.program,
        )
        return ReplicaSlot(
            replica_id,
            model.pk,
            command,
            drain_seconds=self.drain_seconds,
            model_name=model.name,
            cwd=str(settings.BASE_DIR),
            asked=model.changed_at,
            log=ReplicaLog(self._redis, self.prefix, replica_id),
            environment={
                "REDIS_URL": self.redis_url,
                **({"RANK": str(index), "WORLD_SIZE": str(size)} if size > 1 else {}),
                **device_environment(model.pk + number, num_ranks, self._devices),
            },
            group=group,
        )

    def _read_heartbeats(self) -> None:
        ids = set(self.slots) | set(self._slots)
        if self._unmanaged or self._may_idle:  # replicas of these models on other nodes count, too
            ids |= registered_replicas(self._redis, self.prefix)
        self._beats = read_heartbeats(self._redis, self.prefix, sorted(ids))

    def _unload_idle_models(self) -> None:
        """Stop models that were idle for long enough; the next tick drains their replicas."""
        for model in self._may_idle:
            idle = self._idle.idle_seconds(model.name, self._beats.values())
            if idle >= 60 * model.idle_minutes and unload_idle_model(model):
                logger.info("%s has had nothing to do for %.0f s; it ends.", model.name, idle)

    def _reconcile(self) -> None:
        """Drain replicas that are unwanted or whose settings changed; start missing ones."""
        for replica_id, slot in list(self.slots.items()):
            desired = self._slots.get(replica_id)
            if desired is None or (self._is_old(slot, desired) and self._can_replace(slot)):
                slot.drain()
            if slot.is_stopped and desired is not None:
                del self.slots[replica_id]  # replaced by a new slot below
        for replica_id, desired in self._slots.items():
            slot = self.slots.setdefault(replica_id, desired)
            slot.update_config(desired.config)
            self._check_slot(slot, self._beats.get(replica_id))
        groups: dict[str, list[ReplicaSlot]] = {}
        for replica_id, desired in self._slots.items():
            groups.setdefault(desired.group or replica_id, []).append(self.slots[replica_id])
        for group in groups.values():
            self._start_group(group)

    def _is_old(self, slot: ReplicaSlot, desired: ReplicaSlot) -> bool:
        """Whether it is to be replaced, and not to serve until its successor does."""
        is_changed = desired.command != slot.command
        return is_changed or (desired is not slot and self._is_outdated(slot))

    def _can_replace(self, slot: ReplicaSlot) -> bool:
        """Whether other replicas serve the model meanwhile: a model's replicas drain in turn.

        A replica that doesn't serve can be drained at any time, and so can a group as a whole.
        """
        if slot.group or self._slots[slot.replica_id].group:
            return True
        other_slots = [
            self.slots.get(desired.replica_id)
            for desired in self._slots.values()
            if desired.served_model_id == slot.served_model_id
            and desired.replica_id != slot.replica_id
        ]
        return not self._serves(slot) or all(map(self._serves, other_slots))

    def _serves(self, slot: ReplicaSlot | None) -> bool:
        """Whether it's ready, or was put to sleep."""
        if slot is None:  # between its old process and its new one
            return False
        beat = self._beats.get(slot.replica_id)
        state, _ = slot.state(beat)
        return state in (ReplicaState.READY, ReplicaState.SLEEPING)

    def _check_slot(self, slot: ReplicaSlot, beat: Heartbeat | None) -> None:
        """Kill it if it is unhealthy."""
        if beat is not None and beat.pid == slot.last_pid and beat.state == "failed":
            slot.record_failure(beat.detail)
        slot.kill_if_stalled(beat, time.time())
        slot.kill_if_silent(beat)

    def _start_group(self, group: list[ReplicaSlot]) -> None:
        """Start replicas once all of them are due; of a group that has lost one, end the others."""
        if exited := [slot for slot in group if slot.process is None]:
            # Where all have ended by a peer's fault, it is that of one that still runs.
            acquits = not all(slot.exited_by_peer for slot in exited)
            for slot in group:
                if slot.process is not None and not slot.stopping:
                    slot.kill_with_group(acquits=acquits)
        if all(slot.is_due(self._is_occupied(slot)) for slot in group):
            environment = rendezvous_environment() if len(group) > 1 else {}
            environment |= self._capacity_for(group[0])
            for slot in group:
                slot.start(environment)
                if slot.process is not None:
                    heartbeats.watch_process_exit(
                        slot.process, slot.replica_id, self._redis, self.prefix, slot.record
                    )
        for slot in group:
            if is_starting_silently(slot, self._beats.get(slot.replica_id)):
                publish_starting_heartbeat(self._redis, self.prefix, slot)

    def _capacity_for(self, slot: ReplicaSlot) -> dict[str, str]:
        """Environment by which a successor's KV cache is no smaller than its predecessor's."""
        old = self._predecessors.get(slot.served_model_id, [])
        tokens = self._cache_tokens(old[0]) if old and slot not in old else ""
        return {PREDECESSOR_VARIABLE: tokens} if tokens else {}

    def _cache_tokens(self, slot: ReplicaSlot) -> str:
        """The size of its KV cache in tokens; "": not known."""
        beat = self._beats.get(slot.replica_id)
        return "" if beat is None else beat.model.cache_config.get("kv_cache_size_tokens", "")

    def _is_occupied(self, slot: ReplicaSlot) -> bool:
        """Whether another process serves under its id."""
        beat = self._beats.get(slot.replica_id)
        return beat is not None and beat.state != "failed" and beat.pid != slot.last_pid

    def _write_rows(self) -> None:
        sightings = [self._sighting(slot) for slot in self.slots.values()]
        lengths = {
            slot.served_model_id: beat.model.max_model_len
            for slot in self.slots.values()
            if (beat := self._beats.get(slot.replica_id)) and beat.state == "ready"
        }
        for beat in self._beats.values():
            model_id = self._unmanaged.get(beat.model.name)
            if model_id is not None and beat.replica_id not in self.slots:
                sightings.append(ReplicaSnapshot.of_heartbeat(beat, model_id))
                if beat.state == "ready":
                    lengths[model_id] = beat.model.max_model_len
        self._mirror(sightings, lengths)
        stopped = [slot for slot in self.slots.values() if slot.is_stopped]
        for slot in stopped:
            del self.slots[slot.replica_id]
        served = {slot.served_model_id for slot in self._slots.values()}
        replaced = [slot.replica_id for slot in stopped if slot.served_model_id in served]
        if replaced:  # others of the model go on; the row of a model that has ended stays
            Replica.objects.filter(replica_id__in=replaced).delete()

    def _mirror(self, sightings: list[ReplicaSnapshot], lengths: dict[int, int]) -> None:
        """Write rows after changes, and at intervals: most ticks change nothing."""
        state, now = (sightings, lengths), time.monotonic()
        if state != self._last_synced or now - self._last_synced_at >= MIRROR_S:
            sync_replica_rows(sightings, lengths)
            self._last_synced, self._last_synced_at = state, now

    def _sighting(self, slot: ReplicaSlot) -> ReplicaSnapshot:
        beat = self._beats.get(slot.replica_id)
        state, detail = slot.state(beat)
        return ReplicaSnapshot(
            replica_id=slot.replica_id,
            served_model_id=slot.served_model_id,
            state=state,
            detail=detail,
            pid=slot.process.pid if slot.process else None,
            host=self.node,
            incarnation=beat.incarnation if beat and slot.process else "",
            restarts=slot.restarts,
            exits_last_hour=slot.exits_last_hour,
            last_exit=slot.last_exit,
        )

    def _publish_stopped(self) -> None:
        """Write the final states."""
        try:
            sync_replica_rows(
                [
                    ReplicaSnapshot(slot.replica_id, slot.served_model_id, ReplicaState.STOPPED)
                    for slot in self.slots.values()
                ],
                {},
            )
        except (DatabaseError, InterfaceError) as error:
            self._warn_once(f"the replicas' end could not be written down: {error}")

    def _warn_once(self, message: str) -> None:
        """Log a problem once, not at every tick."""
        if message != self._troubled:
            logger.warning("%s", message)
            self._troubled = message
