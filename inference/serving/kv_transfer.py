"""`kv_transfer_params` of responses, with vLLM's names."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from inference.engine_client.client import get_engine_client
from inference.generation.generation import Generation


def transfer_params(generation: Generation) -> dict[str, Any] | None:
    """Parameters for the request that decodes this prompt elsewhere; None if this request didn't
    ask for a remote decode, or its replica has no shared KV tier.
    """
    params = generation.job.kv_transfer
    if params is None or not params.do_remote_decode:
        return None
    replica = get_engine_client().fleet.get(generation.replica_id)
    if replica is None or replica.heartbeat.kv_handover is None:
        return None
    address = urlsplit(replica.heartbeat.kv_handover.address)
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": address.hostname,
        "remote_port": address.port,
    }
