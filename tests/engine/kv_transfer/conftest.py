"""What all tests of tiers need."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine isn't a storage that hangs."""
    for name in (
        "core.kv_admission.READ_TIMEOUT_S",
        "kv_transfer.ec_connector.READ_TIMEOUT_S",
        "kv_transfer.read_ahead.READ_TIMEOUT_S",
        "kv_transfer.read_ahead._MIN_READ_S",
        "kv_transfer.redis_store.TIMEOUT_S",
        "kv_transfer.s3_store.TIMEOUT_S",
        "scheduler.kv_transfers.READ_TIMEOUT_S",
        "kv_transfer.storage_queue.READ_TIMEOUT_S",
    ):
        monkeypatch.setattr(f"engine.{name}", 60.0)
