"""The faults. Each one returns when the instance can begin to recover."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from chaos.connections import end_connections
from chaos.ending import to_its_end
from chaos.failover import fail_over_and_back
from chaos.instance import Instance, command_line, holds
from chaos.kinds import ADAPTER, OTHER_ADAPTER
from config.connections import socket_path, socket_url
from engine.system.redis_client import sync_client

RANK_KILLED, RANK_FROZEN, RANK_CUT_OFF = "rank killed", "rank frozen", "rank cut off"
Harm = Callable[[Instance, random.Random], Awaitable[None]]
#: Seconds for which a network is cut, Redis paused or read-only, a disk full, a database stopped.
CUT_S, STILL_S, FULL_S, AWAY_S = 5.0, 3.0, 6.0, 5.0
#: How far the clock is set back, and the seconds without another fault after that.
BACK_S, USED_TO_S = 3600, 5.0
#: Seconds within which a supervisor must detect and end a failed process.
DETECTION_TIMEOUT_S = 15.0
#: Longer, since a drained process finishes its streams first.
DRAINED_WITHIN_S = 60.0
#: Speculative decoding from the tenant's previous texts, which repeat in this load.
DRAFTS = {"method": "suffix"}
#: What the admin's form does when it is submitted.
_NEW_SETTINGS = """
from catalog import actions
from catalog.models import ServedModel
from tenants.actors import CLI_ACTOR
model = ServedModel.objects.get(name={model!r})
settings = {{**model.settings, **{settings!r}}}
settings = {{name: value for name, value in settings.items() if value is not None}}
actions.update_model(actor=CLI_ACTOR, model=model, settings=settings)
"""


#: Number of switches of an adapter's alias, and their interval: gateways refresh it every 2 s.
NUM_SWITCHES, SWITCH_INTERVAL_S = 10, 0.8
#: What the console's buttons do. The second version is validated once, in a separate process.
_SWITCH_SCRIPT = """
import time
from django.core.management import call_command
from adapters import actions
from adapters.models import Adapter, AdapterAlias
from adapters.store import content_path
from tenants.actors import CLI_ACTOR
rows = Adapter.objects.filter(tenant=None, served_model__name={model!r})
turned, other = rows.get(name={name!r}), rows.get(name={other!r}).versions.get(number=1)
if not turned.versions.filter(digest=other.digest).exists():
    options = {{"model": {model!r}, "name": turned.name, "no_promote": True}}
    call_command("load_adapter", str(content_path(other.digest)), **options)
for turn in range({turns}):
    if turn % 2:
        alias = AdapterAlias.objects.get(adapter=turned, name=turned.name)
        actions.rollback(actor=CLI_ACTOR, alias=alias)
    else:
        version = turned.versions.get(digest=other.digest)
        actions.promote(actor=CLI_ACTOR, version=version)
    time.sleep({every})
"""


class FaultNotDetected(Exception):
    """No supervisor ended what was frozen or drained; the message says what."""


def _signal(what: str, number: signal.Signals, within_s: float = DETECTION_TIMEOUT_S) -> Harm:
    """Return a fault that sends a signal to one process, and waits until it has ended."""

    async def harm(instance: Instance, rng: random.Random) -> None:
        pid = rng.choice(instance.pids(what))
        os.kill(pid, number)
        try:
            await _gone(pid, within_s)
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            raise FaultNotDetected(
                f"a {what} with {number.name} was there {within_s:.0f} s later"
            ) from None

    return harm


def _harm_rank(what: str, harm_process: Callable[[int], object]) -> Harm:
    """Return a fault of one rank of a replica, and wait until that has ended."""

    async def harm(instance: Instance, rng: random.Random) -> None:
        replicas = {pid: instance.ranks(pid) for pid in instance.pids("replica")}
        replica, ranks = rng.choice([entry for entry in replicas.items() if entry[1]])
        harm_process(rng.choice(ranks))
        try:
            await _gone(replica, DETECTION_TIMEOUT_S)
        except TimeoutError:
            os.kill(replica, signal.SIGKILL)
            raise FaultNotDetected(
                f"a replica was there {DETECTION_TIMEOUT_S:.0f} s after its rank was {what}"
            ) from None

    return harm


async def _gone(pid: int, within_s: float) -> None:
    await holds(lambda: not command_line(pid), within_s, every_s=0.05)


async def kill_all_replicas(instance: Instance, rng: random.Random) -> None:
    """Kill all replicas of every model at once."""
    pids = instance.pids("replica")
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        await _gone(pid, DETECTION_TIMEOUT_S)


async def cut_off(instance: Instance, rng: random.Random) -> None:
    """Cut a replica's network for some seconds."""
    pid = rng.choice(instance.pids("replica"))
    instance.relay.cut(pid)
    await asyncio.sleep(CUT_S)
    instance.relay.mend(pid)


async def roll(instance: Instance, rng: random.Random) -> None:
    """Change settings, so that every replica of the model is replaced; perhaps enable drafts."""
    drafts = rng.choice([None, DRAFTS])
    settings = {"max_num_seqs": rng.randint(40, 4000), "speculative_config": drafts}
    await change_settings(instance, settings)


async def change_settings(instance: Instance, settings: dict[str, Any]) -> None:
    """Change settings, and wait until no replica has the old ones. None: the default. Raises
    `FaultNotDetected`.
    """
    previous_pids = set(instance.pids("replica"))
    program = _NEW_SETTINGS.format(model=instance.model, settings=settings)
    await asyncio.to_thread(instance.manage, "shell", "-c", program)

    def replaced() -> bool:
        return len(previous_pids & set(instance.pids("replica"))) == 1  # of the pooling model

    try:
        await holds(replaced, 2 * DRAINED_WITHIN_S)
    except TimeoutError:
        raise FaultNotDetected(
            "replicas weren't replaced after their settings had changed"
        ) from None


async def switch_adapter(instance: Instance, rng: random.Random) -> None:
    """Switch an adapter's alias to other weights and back repeatedly: promotions and rollbacks."""
    program = _SWITCH_SCRIPT.format(
        model=instance.model,
        name=ADAPTER,
        other=OTHER_ADAPTER,
        turns=NUM_SWITCHES,
        every=SWITCH_INTERVAL_S,
    )
    await asyncio.to_thread(instance.manage, "shell", "-c", program)


async def stop_redis_for_a_while(instance: Instance, rng: random.Random) -> None:
    """Pause Redis, then let it continue."""
    (pid,) = instance.pids("redis")
    os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(STILL_S)
    os.kill(pid, signal.SIGCONT)


async def refuse_writes(instance: Instance, rng: random.Random) -> None:
    """Make Redis reject writes with READONLY, like a primary that was just demoted."""
    with sync_client(socket_url(instance.data_dir)) as client:
        client.execute_command("REPLICAOF", "127.0.0.1", "1")
        try:
            await asyncio.sleep(STILL_S)
        finally:
            client.execute_command("REPLICAOF", "NO", "ONE")


async def fail_over(instance: Instance, rng: random.Random) -> None:
    """Fail over to another server at the same address, and back."""
    await fail_over_and_back(socket_path(instance.data_dir))


async def cut_connections(instance: Instance, rng: random.Random) -> None:
    """Close all connections to Redis at once."""
    with sync_client(socket_url(instance.data_dir)) as client:
        client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


async def fill_disk(instance: Instance, rng: random.Random) -> None:
    """Fill the disk of the database, Redis and files."""
    await to_its_end(instance.disk.fill)
    await asyncio.sleep(FULL_S)
    await asyncio.to_thread(instance.disk.empty)


async def corrupt_tier(instance: Instance, rng: random.Random) -> None:
    """Flip a bit in each kilobyte of the KV blocks on disk while replicas use them."""

    def corrupt() -> None:
        for segment in instance.tier.glob("*.kv"):
            with contextlib.suppress(FileNotFoundError), segment.open("r+b") as file:
                for start in range(0, segment.stat().st_size, 1024):
                    offset = start + rng.randrange(1024)
                    byte = os.pread(file.fileno(), 1, offset)
                    if byte:
                        os.pwrite(file.fileno(), bytes([byte[0] ^ 1 << rng.randrange(8)]), offset)

    await asyncio.to_thread(corrupt)


async def stop_database_for_a_while(instance: Instance, rng: random.Random) -> None:
    """Stop PostgreSQL; it restarts with all that it had committed."""
    await to_its_end(instance.database.stop)
    await asyncio.sleep(AWAY_S)
    await to_its_end(instance.database.start)


async def set_clock_back(instance: Instance, rng: random.Random) -> None:
    """Set the clock of all processes back by an hour at once, permanently."""
    instance.clock.shift(-BACK_S)
    await asyncio.sleep(USED_TO_S)


FAULTS: dict[str, Harm] = {
    "replica killed": _signal("replica", signal.SIGKILL),
    "replica frozen": _signal("replica", signal.SIGSTOP),
    "replica drained": _signal("replica", signal.SIGTERM, DRAINED_WITHIN_S),
    "replica cut off": cut_off,
    RANK_KILLED: _harm_rank("killed", lambda pid: os.kill(pid, signal.SIGKILL)),
    RANK_FROZEN: _harm_rank("frozen", lambda pid: os.kill(pid, signal.SIGSTOP)),
    RANK_CUT_OFF: _harm_rank("cut off", end_connections),
    "all replicas killed": kill_all_replicas,
    "settings changed": roll,
    "adapter turned": switch_adapter,
    "gateway killed": _signal("gateway", signal.SIGKILL),
    "gateway frozen": _signal("gateway", signal.SIGSTOP),
    "gateway drained": _signal("gateway", signal.SIGTERM, DRAINED_WITHIN_S),
    "worker killed": _signal("worker", signal.SIGKILL),
    "worker frozen": _signal("worker", signal.SIGSTOP),
    "worker drained": _signal("worker", signal.SIGTERM, DRAINED_WITHIN_S),
    "Redis killed": _signal("redis", signal.SIGKILL),
    "Redis stands still": stop_redis_for_a_while,
    "Redis read-only": refuse_writes,
    "Redis fails over": fail_over,
    "connections to Redis cut": cut_connections,
    "database away": stop_database_for_a_while,
    "clock an hour back": set_clock_back,
    "disk full": fill_disk,
    "prefill killed": _signal("prefill", signal.SIGKILL),
    "decode killed": _signal("decode", signal.SIGKILL),
    "tier corrupted": corrupt_tier,
    "tier's disk full": fill_disk,
}
TIER_DISK = "tier's disk full"
#: Faults of a disaggregated instance only.
TIER_FAULTS = ("prefill killed", "decode killed", "tier corrupted", TIER_DISK)
DISK, CLOCK, DATABASE = "disk full", "clock an hour back", "database away"


@dataclass(frozen=True)
class Planned:
    """One planned fault. `rng` chooses the victim; `after_s`: seconds without faults before it."""

    name: str
    after_s: float
    rng: random.Random


def plan(seed: int, names: list[str]) -> Iterator[Planned]:
    """Yield faults forever, reproducibly by seed: every round has all of them in random order."""
    rng = random.Random(seed)
    while True:
        for name in rng.sample(names, len(names)):
            victim = random.Random(rng.getrandbits(32))
            yield Planned(name, rng.uniform(0.5, 2.5), victim)


def impossible(instance: Instance) -> dict[str, str]:
    """Return the faults that this instance can't have, and why."""
    reasons = {DISK: instance.disk.why_not, CLOCK: instance.clock.why_not}
    reasons[DATABASE] = instance.database.why_not
    reasons[TIER_DISK] = instance.disk.why_not
    if not instance.disaggregated:
        reasons |= dict.fromkeys(TIER_FAULTS, "the instance isn't --disaggregated")
    if instance.num_ranks == 1:
        of_ranks = (RANK_KILLED, RANK_FROZEN, RANK_CUT_OFF)
        reasons |= dict.fromkeys(of_ranks, "replicas have one rank: --ranks 2")
    return {name: why for name, why in reasons.items() if why}
