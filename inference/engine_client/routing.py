"""Choosing a replica: where the prompt's prefix probably is cached, unless that one is busy.

Rendezvous hashing gives every gateway the same answer without talking: the prefix's hash ranks the
replicas, and the first of them takes the request while it is at most `slack` requests ahead of the
idlest one. When a replica joins or leaves, only the prefixes that were its own move.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from inference.engine_client.fleet import Replica
from inference.engine_client.flight import Flight

#: Prompt tokens that are hashed: a few KV blocks, about a system prompt's beginning.
PREFIX_TOKENS = 64


def prefix_key(token_ids: Sequence[int], namespace: str) -> bytes:
    """[16] bytes; equal for prompts that may share their first KV blocks."""
    digest = hashlib.blake2b(namespace.encode(), digest_size=16)
    digest.update(array("q", token_ids[:PREFIX_TOKENS]).tobytes())
    return digest.digest()


def choose(
    replicas: Sequence[Replica], key: bytes, slack: int, adapter: str = ""
) -> Replica | None:
    """The replica for a request with this prefix, or None when none is ready.

    `adapter`: digest of what it goes through; replicas that have its weights at hand come first
    while they aren't busier than the others by more than `slack`.
    """
    ready = [replica for replica in replicas if replica.ready]
    ready = [replica for replica in ready if not replica.silent] or ready
    ready = [replica for replica in ready if not replica.heartbeat.paused] or ready
    ready = [replica for replica in ready if not replica.heartbeat.spare] or ready
    if len(ready) <= 1:
        return ready[0] if ready else None
    limit = min(replica.load for replica in ready) + slack
    affordable = [replica for replica in ready if replica.load <= limit]
    if adapter:
        affordable = [each for each in affordable if _holds(each, adapter)] or affordable
    return max(affordable, key=lambda replica: _rank(key, replica.heartbeat.replica_id))


def _holds(replica: Replica, adapter: str) -> bool:
    """Whether the adapter's weights are in its device's or its host's memory."""
    states = replica.heartbeat.adapters
    return any(state.digest == adapter and state.tier != "disk" for state in states)


def successors(flight: Flight, replicas: Sequence[Replica]) -> list[Replica]:
    """Those that may go on with what a flight has.

    Never one with other weights: the text would go on as another model's. Where a ready one makes
    the very tokens that the last one would have made, only those.
    """
    mine = flight.numerics
    if not flight.began or mine is None:
        return list(replicas)
    fit = [
        replica
        for replica in replicas
        if (theirs := replica.heartbeat.numerics) is None or theirs.weights == mine.weights
    ]
    same = [replica for replica in fit if replica.ready and replica.heartbeat.numerics == mine]
    return same or fit


def _rank(key: bytes, replica_id: str) -> bytes:
    return hashlib.blake2b(replica_id.encode(), key=key, digest_size=8).digest()
