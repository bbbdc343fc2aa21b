"""A worker's jobs for a version: download, check, probe and promote it.

Each step claims the row by its state, so only one worker processes a version, and after `LEASE`
another takes over from a dead worker.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

from django.conf import settings
from django.db import transaction
from django.db.models import Q
from django.utils import timezone

from adapters import actions, store
from adapters.models import WORKING, AdapterVersion, VersionState
from adapters.sources import HUB, fetch
from catalog.processes import spawn
from common.errors import Conflict
from engine.contract.errors import QuireError
from tenants.actors import SYSTEM_ACTOR
from tenants.audit import log_action

# A version is checked by a program of the engine in a separate process: it reads header, shapes,
# rank and numbers, prints its results as JSON objects, then runs a few prompts through the adapter
# and through merged weights. Nothing here loads torch.

logger = logging.getLogger(__name__)

TIMEOUT_S = 1800.0
POLL_S = 0.1
_ROOT = Path(__file__).resolve().parent.parent.parent


class ValidationAborted(Exception):
    """The result is no longer needed."""


def run_validation(
    model: str,
    adapter: Path,
    *,
    is_needed: Callable[[], bool] = lambda: True,
    read: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """The check's report: `ok`, `error`, `digest`, `rank`, `target_modules`, and so on; with the
    result of the prompts as `probe`.

    Args:
        model: the base model's folder or hub id. adapter: a folder or a GGUF file.
        wanted: polled; False ends the program.
        read: called once when everything but the prompts has passed.
    Raises: `ValidationAborted`.
    """
    program = settings.QUIRE.adapter_check_command or [sys.executable, "-m", "engine.lora.check"]
    command = [*program, "--model", model, "--adapter", str(adapter), "--probe"]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        child = spawn(command, name="adapter check", cwd=str(_ROOT), stdout=out, stderr=errors)
        started, is_read = time.monotonic(), False
        try:
            while (status := child.wait(POLL_S)) is None:
                if time.monotonic() - started > TIMEOUT_S:
                    return refusal(f"The check took more than {TIMEOUT_S / 60:.0f} minutes.")
                if not is_needed():
                    raise ValidationAborted
                if not is_read and (is_read := _is_ok(out)):
                    read()
        finally:
            child.kill()
        out.seek(0)
        errors.seek(0)
        report = _report(out.read().decode("utf-8", "replace"))
        if report is None or (is_valid(report) and report.get("probe") is None):
            tail = errors.read().decode("utf-8", "replace")[-2000:]
            logger.error("the check of %s ended with status %s: %s", adapter, status, tail)
            return refusal(
                f"The check ended without a result (status {status}). The worker's log says more."
            )
    return report


def _is_ok(out: IO[bytes]) -> bool:
    """Whether the first report is there. Keeps the file position, which the child shares."""
    report = _report(os.pread(out.fileno(), 1 << 20, 0).decode("utf-8", "replace"))
    return report is not None and is_valid(report)


def refusal(message: str) -> dict[str, Any]:
    """A failed report."""
    return {"ok": False, "error": {"message": message, "param": None}}


def is_valid(report: dict[str, Any]) -> bool:
    """Whether it may be served: the check passed, and so did the probe if there was one."""
    probe = report.get("probe")
    return bool(report.get("ok")) and (not isinstance(probe, dict) or bool(probe.get("passed")))


def _report(text: str) -> dict[str, Any] | None:
    """The last line that is a JSON object: libraries may print before it."""
    for line in reversed(text.strip().splitlines()):
        try:
            report = json.loads(line)
        except ValueError:
            continue
        if isinstance(report, dict) and "ok" in report:
            return report
    try:
        report = json.loads(text)
    except ValueError:
        return None
    return report if isinstance(report, dict) and "ok" in report else None


LEASE = timedelta(seconds=60)
#: A download reports nothing until it is done.
FETCH_LEASE = timedelta(minutes=30)
BEAT_S = 5.0
#: A version that no worker has claimed for this long has lost its message.
CLAIM_TTL = timedelta(seconds=20)
#: Set when this process is asked to exit: a check takes longer than the shutdown may.
shutdown_event = threading.Event()
#: Age after which no running request uses a version's content any more.
KEEP_S = 3600.0
#: Maximum number of versions per sweep; the next sweeps take the others.
MAX_WAITING = 100


def process_version(pk: int) -> None:
    """Process a version as far as possible. Ignores one that another worker has claimed."""
    version = _claim(pk, VersionState.UPLOADED, VersionState.FETCHING, digest="")
    if version is not None:
        if not _fetch(version):
            return
        version = _claim(pk, VersionState.FETCHING, VersionState.VALIDATING)
    else:
        version = _claim(pk, VersionState.UPLOADED, VersionState.VALIDATING)
    if version is None:
        return
    try:
        report = _checked(version)
    except ValidationAborted:
        if shutdown_event.is_set():
            _release_claim(version)
        return
    well = is_valid(report) and isinstance(report.get("probe"), dict)
    if not well and report.get("ok"):
        report["error"] = _probe_error(report)
    state = VersionState.READY if well else VersionState.FAILED
    if _end(version, version.state, state, report) and well:
        _promote(version)


def waiting(now: Any = None) -> list[int]:
    """Return versions without a worker: their message was lost, or their worker died."""
    now = now or timezone.now()
    checked = Q(state__in=(VersionState.VALIDATING, VersionState.PROBING))
    lost = checked & Q(worked_at__lt=now - LEASE)
    lost |= Q(state=VersionState.FETCHING, worked_at__lt=now - FETCH_LEASE)
    AdapterVersion.objects.filter(lost).update(state=VersionState.UPLOADED)
    rows = AdapterVersion.objects.filter(state=VersionState.UPLOADED, worked_at__lt=now - CLAIM_TTL)
    return list(rows.order_by("pk").values_list("pk", flat=True)[:MAX_WAITING])


def sweep() -> int:
    """Remove content without a version, and abandoned uploads; returns how many."""
    return actions.expire_uploads() + store.delete_orphans(actions.referenced_digests, KEEP_S)


def _claim(pk: int, from_state: str, to_state: str, **also: Any) -> AdapterVersion | None:
    """Claim the version if it is in this state; no other worker can then."""
    rows = AdapterVersion.objects.filter(pk=pk, state=from_state, **also)
    if not rows.update(state=to_state, worked_at=timezone.now()):
        return None
    version = AdapterVersion.objects.select_related("adapter__tenant", "adapter__served_model")
    return version.filter(pk=pk).first()


def _release_claim(version: AdapterVersion) -> None:
    """Let any worker's next sweep claim it, unless another has claimed it already."""
    rows = AdapterVersion.objects.filter(pk=version.pk, state=version.state)
    rows.update(state=VersionState.UPLOADED, worked_at=timezone.now() - CLAIM_TTL)


def _fetch(version: AdapterVersion) -> bool:
    """Whether its files are here now."""
    adapter, repository = version.adapter, version.source.removeprefix(HUB)
    max_bytes, private = store.max_adapter_bytes(), adapter.tenant is None
    try:
        digest, size = actions.staged_content(
            lambda staged: fetch(repository, staged, max_bytes, private=private)
        )
        with transaction.atomic():
            store.check(adapter.tenant, size)
            same = adapter.versions.filter(digest=digest).first()
            if same is not None:
                raise Conflict(f"Version {same.number} has exactly this content.")
            rows = AdapterVersion.objects.filter(pk=version.pk, state=VersionState.FETCHING)
            return bool(rows.update(digest=digest, num_bytes=size))
    except QuireError as error:
        _end(version, VersionState.FETCHING, VersionState.FAILED, refusal(error.message))
        return False


def _checked(version: AdapterVersion) -> dict[str, Any]:
    """The report; meanwhile the row shows the progress. Raises `ValidationAborted` if another
    worker has claimed the version."""
    if not store.has_content(version.digest):
        return refusal("Its files are gone.")
    path = store.fetch_content(version.digest)
    beat = LeaseHeartbeat(version)
    model = version.adapter.served_model.source
    report = run_validation(model, path, is_needed=beat, read=lambda: _probing(version))
    if report.get("ok") and report.get("digest") not in (None, version.digest):
        return refusal("The files have changed since they were stored.")
    return report


def _probing(version: AdapterVersion) -> None:
    """Record that all but the probe is done. Raises `ValidationAborted` if another worker has
    claimed the version."""
    if _claim(version.pk, version.state, VersionState.PROBING) is None:
        raise ValidationAborted
    version.state = VersionState.PROBING


class LeaseHeartbeat:
    """Renews the claim every few seconds; False once it is lost, or the process should exit."""

    def __init__(self, version: AdapterVersion) -> None:
        self._version, self._beat_at = version, time.monotonic()

    def __call__(self) -> bool:
        if shutdown_event.is_set():
            return False
        now = time.monotonic()
        if now - self._beat_at < BEAT_S:
            return True
        self._beat_at = now
        store.touch_copy(self._version.digest)
        rows = AdapterVersion.objects.filter(pk=self._version.pk, state=self._version.state)
        return bool(rows.update(worked_at=timezone.now()))


def _probe_error(report: dict[str, Any]) -> dict[str, Any]:
    probe = report.get("probe")
    if not isinstance(probe, dict):
        return {"message": "The probe gave no result.", "param": None}
    return {
        "message": "Its answers differ from those of the merged model by up to "
        f"{probe.get('max_difference')}.",
        "param": None,
    }


@transaction.atomic
def _end(version: AdapterVersion, from_state: str, to_state: str, report: dict[str, Any]) -> bool:
    """Store the result, unless another worker has claimed the version."""
    rank = report.get("rank")
    values: dict[str, Any] = {"state": to_state, "report": report, "worked_at": timezone.now()}
    if isinstance(rank, int):
        values["rank"] = rank
    if not AdapterVersion.objects.filter(pk=version.pk, state=from_state).update(**values):
        return False
    done = "adapter.ready" if to_state == VersionState.READY else "adapter.refused"
    error = report.get("error") or {}
    log_action(
        SYSTEM_ACTOR,
        done,
        version,
        tenant=version.adapter.tenant,
        sha256=version.digest,
        reason=str(error.get("message", ""))[:500] if isinstance(error, dict) else "",
    )
    return True


def _promote(version: AdapterVersion) -> None:
    if not version.promote_to:
        return
    try:
        actions.promote(actor=SYSTEM_ACTOR, version=version, alias=version.promote_to)
    except QuireError as error:
        logger.warning("%s was not taken live: %s", version, error.message)


def has_pending() -> bool:
    """Whether any version is pending or being processed."""
    return AdapterVersion.objects.filter(state__in=WORKING).exists()
