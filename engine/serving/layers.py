"""The load report by layer, where operators find it."""

from __future__ import annotations

import logging

import msgspec
import redis

from engine.contract import protocol
from engine.contract.replica_state import LayerInfo
from engine.core.engine_core import EngineCore

log = logging.getLogger(__name__)

KEPT_S = 30 * 24 * 3600


def publish_layers(client: redis.Redis, replica_id: str, prefix: str, core: EngineCore) -> None:
    """Say what became of each layer's weights. A replica serves without having said so, too."""
    layers = [
        LayerInfo(
            layer=each.layer,
            format=each.format,
            level=each.level,
            nbytes=each.nbytes,
            error=each.error,
        )
        for each in core.facts.load_report
    ]
    key = protocol.layers_key(replica_id, prefix)
    try:
        client.set(key, msgspec.json.encode(layers), ex=KEPT_S)
    except redis.RedisError as error:
        log.warning("The load report can't be written (%s).", error)
