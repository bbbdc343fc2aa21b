"""Where adapters' weights lie right now, by the replicas' heartbeats."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from engine.contract.adapters import TIERS
from engine.contract.protocol import Heartbeat

ORDER = {tier: place for place, tier in enumerate(TIERS)}


def residency(
    beats: Iterable[Heartbeat], digests: Iterable[str], *, operator: bool
) -> dict[str, list[dict[str, Any]]]:
    """{digest: [what each replica has of it]}, nearest to the kernels first.

    Only of the digests that are asked for: others are other tenants'. Who isn't the operator sees
    replicas by their model's name and a number.
    """
    wanted, found = set(digests), defaultdict(list)
    for number, beat in enumerate(sorted(beats, key=lambda beat: beat.replica_id), 1):
        for state in beat.adapters:
            if state.digest in wanted:
                found[state.digest].append(
                    {
                        "replica": beat.replica_id if operator else f"replica {number}",
                        "tier": state.tier,
                        "bytes": state.num_bytes,
                        "pinned": state.pinned,
                        "running": state.num_running,
                        "waiting": state.num_waiting,
                        "load_seconds": round(state.load_seconds, 4),
                    }
                )
    for rows in found.values():
        rows.sort(key=lambda row: (ORDER.get(row["tier"], len(ORDER)), row["replica"]))
    return dict(found)
