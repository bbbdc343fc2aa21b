"""What gateways have counted and nobody has written down yet: a hash in Redis a bucket.

    {prefix}:history:{start}    hash: [tenant id, model, adapter, what] as JSON -> count
    {prefix}:history            sorted set of the starts that are there

`what` is one of `SUMS`, or "t12", "g30": a place of the spread of first tokens or gaps. Gateways
add to the bucket of now; a worker writes those that are over into the database.
"""

from __future__ import annotations

import json
from typing import Any

from engine.contract.protocol import KEY_PREFIX
from history.widths import FINEST, KEPT, start_of

FIRST_TOKEN, GAP = "t", "g"
#: Tenant, model, adapter. Tenant 0: what was too much to be told apart.
Series = tuple[int, str, str]
#: A gateway may still add to a bucket so long after its end.
GRACE_S = 4
#: While no worker writes, Redis keeps as much as the database would of this width.
TTL_S = KEPT[FINEST]


def index_key(prefix: str = KEY_PREFIX) -> str:
    """Key of the set of buckets."""
    return f"{prefix}:history"


def bucket_key(start: int, prefix: str = KEY_PREFIX) -> str:
    """Key of a bucket."""
    return f"{prefix}:history:{start}"


def add_counts(
    pipeline: Any, counts: dict[tuple[Series, str], int], now: float, prefix: str
) -> None:
    """Put the commands that add counts into a pipeline."""
    start = start_of(now, FINEST)
    key = bucket_key(start, prefix)
    for ((tenant, model, adapter), what), count in counts.items():
        pipeline.hincrby(key, json.dumps([tenant, model, adapter, what]), count)
    pipeline.expire(key, TTL_S)
    pipeline.zadd(index_key(prefix), {str(start): start})
    pipeline.expire(index_key(prefix), TTL_S)


def read_counts(fields: dict[bytes, bytes]) -> dict[Series, dict[str, int]]:
    """A bucket's hash, by series."""
    found: dict[Series, dict[str, int]] = {}
    for field, count in fields.items():
        tenant, model, adapter, what = json.loads(field)
        found.setdefault((tenant, model, adapter), {})[what] = int(count)
    return found
