"""Heartbeats for tests."""

from __future__ import annotations

import time
from typing import Any

from engine.contract.messages import EngineStats, Heartbeat, ModelInfo


def heartbeat(
    replica_id: str, model: str = "quill", state: str = "ready", **fields: Any
) -> Heartbeat:
    """A healthy replica's, unless `fields` say otherwise. `stats`: a dict for `EngineStats`."""
    now = fields.pop("at", time.time())
    stats = EngineStats(**fields.pop("stats", {}))
    info = ModelInfo(
        name=model,
        path="",
        max_model_len=4096,
        vocab_size=256,
        dtype="bfloat16",
        tasks=fields.pop("tasks", ["generate"]),
    )
    return Heartbeat(
        replica_id=replica_id,
        incarnation=fields.pop("incarnation", f"{replica_id}-1"),
        state=state,
        model=info,
        at=now,
        progress_at=fields.pop("progress_at", now),
        stats=stats,
        **fields,
    )
