"""Who waits least for a processor in an instance that runs."""

from __future__ import annotations

from pathlib import Path

from engine.system.host import SHORT_NS
from tests.e2e.product import Product
from tests.short_turns import keeps_slices, turn_ns

PROC = Path("/proc")


@keeps_slices
def test_gateway_redis_and_a_replicas_readers_and_writers_run_soon_its_steps_do_not(
    product: Product,
) -> None:
    (gateway,) = children_named(product, "config.serve")
    (redis,) = children_named(product, "unixsocket:")
    replica = children_named(product, "engine.serving")[0]
    assert turn_ns(gateway) == turn_ns(redis) == SHORT_NS
    threads = [int(folder.name) for folder in (PROC / str(replica) / "task").iterdir()]
    short = {thread for thread in threads if turn_ns(thread) == SHORT_NS}
    assert len(short) == 2  # inbox and outbox
    assert replica not in short


def children_named(product: Product, words: str) -> list[int]:
    """Processes below the instance's own whose command line has these words."""
    listing = PROC / str(product.process.pid) / "task"
    children = [
        int(pid)
        for thread in listing.iterdir()
        for pid in (thread / "children").read_text().split()
    ]
    return [
        pid
        for pid in children
        if words in (PROC / str(pid) / "cmdline").read_bytes().decode().replace("\0", " ")
    ]
