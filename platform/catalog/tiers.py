"""KV tiers of models, verified and emptied in a separate process that imports the engine."""

from __future__ import annotations

import subprocess
import sys

import msgspec
from django.conf import settings
from django.db import transaction

from catalog.models import ServedModel
from common.errors import ServiceUnavailable
from engine.contract.errors import InvalidRequest
from engine.contract.kv_transfer_config import NATIVE, PEER_SCHEME
from engine.contract.replica_state import TierReport
from tenants.actors import Actor, require_operator
from tenants.audit import log_action
from tenants.models import User


def verify_tier(model: ServedModel) -> TierReport:
    """Read every record of a model's tier. Raises `InvalidRequest`, `ServiceUnavailable`."""
    return _run("verify", model)


def drop_tier(*, actor: Actor | User, model: ServedModel) -> TierReport:
    """Delete all records of a model's tier; its replicas continue with an empty one.

    Raises: `PermissionDenied`, `InvalidRequest`, `ServiceUnavailable`.
    """
    actor = require_operator(actor)
    report = _run("drop", model)
    with transaction.atomic():
        log_action(actor, "model.drop_tier", model)
    return report


def _run(command: str, model: ServedModel) -> TierReport:
    backend = model.settings.get("kv_offloading_backend", NATIVE)
    if backend == NATIVE or backend.startswith(f"{PEER_SCHEME}://"):
        raise InvalidRequest(
            f"{model.name} has no kv_offloading_backend that is a folder or store: its blocks "
            "outside the KV cache are in the memory of its replicas and end with them.",
            param="kv_offloading_backend",
        )
    process = subprocess.run(
        [sys.executable, "-m", "engine.kv_transfer.maintenance", command],
        input=backend,
        cwd=settings.BASE_DIR,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if process.returncode:
        raise ServiceUnavailable(f"The tier can't be read: {process.stdout.strip()}")
    return msgspec.json.decode(process.stdout, type=TierReport)
