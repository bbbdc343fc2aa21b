"""`kv_transfer_params` and `ec_transfer_params` of responses, with vLLM's names."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from engine.contract.replica_state import KVHandover
from inference.engine_client.client import get_engine_client
from inference.generation.generation import Generation


def kv_transfer_params(generation: Generation) -> dict[str, Any] | None:
    """Parameters for the request that decodes this prompt elsewhere: the KV connector's, or else
    ours; None if this request didn't ask for a remote decode, or its replica has no shared KV tier.
    """
    for flight in generation.flights:
        if flight.kv_transfer_params is not None:
            return flight.kv_transfer_params
    params = generation.job.kv_transfer
    if params is None or not params.do_remote_decode:
        return None
    if (handover := _handover(generation)) is None:
        return None
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        **_remote(handover),
    }


def ec_transfer_params(generation: Generation) -> dict[str, Any] | None:
    """By digest, where a request finds what the encoder has made of these media; None if there are
    none, or the replica doesn't save it.
    """
    media = [item for of_prompt in generation.job.media for item in of_prompt]
    if not media or (handover := _handover(generation)) is None or not handover.saves_encodings:
        return None
    remote = _remote(handover)
    return {item.digest.hex(): {"num_encoder_tokens": item.num_vectors, **remote} for item in media}


def _handover(generation: Generation) -> KVHandover | None:
    """Of the replica that answers; None if it has no tier that others share."""
    replica = get_engine_client().fleet.get(generation.replica_id)
    return None if replica is None else replica.heartbeat.kv_handover


def _remote(handover: KVHandover) -> dict[str, Any]:
    address = urlsplit(handover.address)
    return {"remote_host": address.hostname, "remote_port": address.port}
