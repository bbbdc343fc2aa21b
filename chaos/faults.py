"""What is done to the instance. Each fault returns when it's over and healing can begin."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from chaos.ending import to_its_end
from chaos.failover import fail_over_and_back
from chaos.instance import Instance, command_line, holds
from chaos.kinds import ADAPTER, OTHER_ADAPTER
from config.connections import socket_path, socket_url
from engine.system.redis_client import sync_client

RANK_KILLED, RANK_FROZEN = "rank killed", "rank frozen"
Harm = Callable[[Instance, random.Random], Awaitable[None]]
#: How long a wire is cut, Redis stands still or is read-only, a disk is full, a database away.
CUT_S, STILL_S, FULL_S, AWAY_S = 5.0, 3.0, 6.0, 5.0
#: How far the clock is set back, and how long nothing else is done then.
BACK_S, USED_TO_S = 3600, 5.0
#: What must be found and ended by whoever looks after it, within so long.
DETECTION_TIMEOUT_S = 15.0
#: A drained process ends its streams first.
DRAINED_WITHIN_S = 60.0
#: Speculation: from a tenant's own texts, which repeat here.
DRAFTS = {"method": "suffix"}
#: What the admin's form does.
_NEW_SETTINGS = """
from catalog import actions
from catalog.models import ServedModel
from tenants.actors import CLI_ACTOR
model = ServedModel.objects.get(name={model!r})
settings = {{**model.settings, **{settings!r}}}
settings = {{name: value for name, value in settings.items() if value is not None}}
actions.update_model(actor=CLI_ACTOR, model=model, settings=settings)
"""


#: Turns of an adapter's name in a row, and seconds between them: gateways look it up every two.
NUM_SWITCHES, SWITCH_INTERVAL_S = 10, 0.8
#: What the console's buttons do. The second version is checked once, in a process of its own.
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
    """Nobody looked after what was frozen or drained: the message says what."""


def _signal(what: str, number: signal.Signals, within_s: float = DETECTION_TIMEOUT_S) -> Harm:
    """One process gets a signal; over when the process has ended."""

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


def _signal_rank(number: signal.Signals) -> Harm:
    """A process that shares a replica's model gets a signal; over when the replica has ended."""

    async def harm(instance: Instance, rng: random.Random) -> None:
        replicas = {pid: instance.ranks(pid) for pid in instance.pids("replica")}
        replica, ranks = rng.choice([entry for entry in replicas.items() if entry[1]])
        os.kill(rng.choice(ranks), number)
        try:
            await _gone(replica, DETECTION_TIMEOUT_S)
        except TimeoutError:
            os.kill(replica, signal.SIGKILL)
            raise FaultNotDetected(
                f"a replica was there {DETECTION_TIMEOUT_S:.0f} s after {number.name} to its rank"
            ) from None

    return harm


async def _gone(pid: int, within_s: float) -> None:
    await holds(lambda: not command_line(pid), within_s, every_s=0.05)


async def kill_all_replicas(instance: Instance, rng: random.Random) -> None:
    """Of every model, at once."""
    pids = instance.pids("replica")
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        await _gone(pid, DETECTION_TIMEOUT_S)


async def cut_off(instance: Instance, rng: random.Random) -> None:
    """A replica whose network is away for some seconds."""
    pid = rng.choice(instance.pids("replica"))
    instance.relay.cut(pid)
    await asyncio.sleep(CUT_S)
    instance.relay.mend(pid)


async def roll(instance: Instance, rng: random.Random) -> None:
    """Changed settings: every replica of the model is replaced, perhaps by one with drafts."""
    drafts = rng.choice([None, DRAFTS])
    settings = {"max_num_seqs": rng.randint(40, 4000), "speculative_config": drafts}
    await change_settings(instance, settings)


async def change_settings(instance: Instance, settings: dict[str, Any]) -> None:
    """Until no replica of the model has the old ones; None: the default. Raises
    `FaultNotDetected`."""
    previous_pids = set(instance.pids("replica"))
    program = _NEW_SETTINGS.format(model=instance.model, settings=settings)
    await asyncio.to_thread(instance.manage, "shell", "-c", program)

    def replaced() -> bool:
        return len(previous_pids & set(instance.pids("replica"))) == 1  # the pooling model's stays

    try:
        await holds(replaced, 2 * DRAINED_WITHIN_S)
    except TimeoutError:
        raise FaultNotDetected(
            "replicas weren't replaced after their settings had changed"
        ) from None


async def switch_adapter(instance: Instance, rng: random.Random) -> None:
    """A name leads to other weights and back, time and again: promotions and rollbacks."""
    program = _SWITCH_SCRIPT.format(
        model=instance.model,
        name=ADAPTER,
        other=OTHER_ADAPTER,
        turns=NUM_SWITCHES,
        every=SWITCH_INTERVAL_S,
    )
    await asyncio.to_thread(instance.manage, "shell", "-c", program)


async def stop_redis_for_a_while(instance: Instance, rng: random.Random) -> None:
    """Redis doesn't answer, and goes on where it was."""
    (pid,) = instance.pids("redis")
    os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(STILL_S)
    os.kill(pid, signal.SIGCONT)


async def refuse_writes(instance: Instance, rng: random.Random) -> None:
    """Redis answers writes with READONLY, as a primary does that was just made a replica."""
    with sync_client(socket_url(instance.data_dir)) as client:
        client.execute_command("REPLICAOF", "127.0.0.1", "1")
        try:
            await asyncio.sleep(STILL_S)
        finally:
            client.execute_command("REPLICAOF", "NO", "ONE")


async def fail_over(instance: Instance, rng: random.Random) -> None:
    """Another server becomes the primary and takes the address, and then the first again."""
    await fail_over_and_back(socket_path(instance.data_dir))


async def cut_connections(instance: Instance, rng: random.Random) -> None:
    """All connections to Redis break at once."""
    with sync_client(socket_url(instance.data_dir)) as client:
        client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


async def fill_disk(instance: Instance, rng: random.Random) -> None:
    """No byte is left for the database, Redis, files."""
    await to_its_end(instance.disk.fill)
    await asyncio.sleep(FULL_S)
    await asyncio.to_thread(instance.disk.empty)


async def corrupt_tier(instance: Instance, rng: random.Random) -> None:
    """A bit of each kilobyte of the KV blocks on disk is flipped, while replicas use them."""

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
    """PostgreSQL is gone, and comes back with what it had committed."""
    await to_its_end(instance.database.stop)
    await asyncio.sleep(AWAY_S)
    await to_its_end(instance.database.start)


async def set_clock_back(instance: Instance, rng: random.Random) -> None:
    """It's an hour earlier for all processes at once, and stays so."""
    instance.clock.shift(-BACK_S)
    await asyncio.sleep(USED_TO_S)


FAULTS: dict[str, Harm] = {
    "replica killed": _signal("replica", signal.SIGKILL),
    "replica frozen": _signal("replica", signal.SIGSTOP),
    "replica drained": _signal("replica", signal.SIGTERM, DRAINED_WITHIN_S),
    "replica cut off": cut_off,
    RANK_KILLED: _signal_rank(signal.SIGKILL),
    RANK_FROZEN: _signal_rank(signal.SIGSTOP),
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
#: Of a disaggregated instance alone.
TIER_FAULTS = ("prefill killed", "decode killed", "tier corrupted", TIER_DISK)
DISK, CLOCK, DATABASE = "disk full", "clock an hour back", "database away"


@dataclass(frozen=True)
class Planned:
    """One fault of the plan. `rng` chooses the victim, `after_s` is how long it's calm before."""

    name: str
    after_s: float
    rng: random.Random


def plan(seed: int, names: list[str]) -> Iterator[Planned]:
    """Faults without end, the same for a seed: all of them in each round, in another order."""
    rng = random.Random(seed)
    while True:
        for name in rng.sample(names, len(names)):
            victim = random.Random(rng.getrandbits(32))
            yield Planned(name, rng.uniform(0.5, 2.5), victim)


def impossible(instance: Instance) -> dict[str, str]:
    """The faults that can't be done here, and why."""
    reasons = {DISK: instance.disk.why_not, CLOCK: instance.clock.why_not}
    reasons[DATABASE] = instance.database.why_not
    reasons[TIER_DISK] = instance.disk.why_not
    if not instance.disaggregated:
        reasons |= dict.fromkeys(TIER_FAULTS, "the instance isn't --disaggregated")
    if instance.num_ranks == 1:
        reasons |= dict.fromkeys((RANK_KILLED, RANK_FROZEN), "replicas have one rank: --ranks 2")
    return {name: why for name, why in reasons.items() if why}
