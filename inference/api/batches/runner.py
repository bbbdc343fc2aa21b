"""Running a batch: check its file, run its lines, turn the journals into files.

The database records who runs it (a lease), the journals what is done. If a worker is killed, its
successor reads the journals and continues with the rest, so that in the end each request has
exactly one result line.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import IO, Any

import stamina
from django.conf import settings
from django.db import DatabaseError, InterfaceError
from django.utils import timezone

from common.db import run_in_db_thread
from common.errors import AuthenticationFailed, PermissionDenied, ServiceUnavailable
from common.log_context import bind_request
from common.object_storage import has_object_storage
from engine.contract.errors import QuireError
from inference.api.batches.dispatch import DispatchResult, dispatch_request
from inference.api.batches.files import (
    BatchLine,
    JournalInUse,
    ResultJournal,
    index_lines,
    read_body,
)
from inference.errors import is_about_storage
from inference.request.context import new_id
from inference.tracing import background_span, set_span_result
from inference.work import Lease, lease_seconds, load_trace_parent
from storage.access import Batch, BatchStatus, open_blob
from storage.actions import claim_batch, fail_batch, finish_batch, start_batch, update_progress
from storage.actions.batches import journal_paths
from storage.blobs import remove_saved_journal, save_journal_lines, saved_journal_lines
from tenants.authentication import Caller, reload_caller

logger = logging.getLogger(__name__)


class BatchCounts:
    """Attributes: completed, failed: requests; expired: those that failed because they never ran;
    usage: tokens, summed over all responses.
    """

    def __init__(self) -> None:
        self.completed = self.failed = self.expired = 0
        self.usage: dict[str, int] = {}

    def add_result(self, line: dict[str, Any]) -> None:
        response = line.get("response") or {}
        if response.get("status_code") != 200:
            self.failed += 1
            self.expired += line.get("response") is None
            return
        self.completed += 1
        usage = response.get("body", {}).get("usage") or {}
        # Chat and embeddings have prompt and completion tokens, Responses input and output tokens.
        self._add("input", usage.get("prompt_tokens", usage.get("input_tokens")))
        self._add("output", usage.get("completion_tokens", usage.get("output_tokens")))
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        self._add("cached", details.get("cached_tokens"))
        read = usage.get("cache_read_input_tokens")  # Messages excludes these from the input
        self._add("input", read)
        self._add("cached", read)
        output_details = (
            usage.get("completion_tokens_details") or usage.get("output_tokens_details") or {}
        )
        self._add("reasoning", output_details.get("reasoning_tokens"))

    def _add(self, name: str, count: Any) -> None:
        self.usage[name] = self.usage.get(name, 0) + int(count or 0)

    def counts(self) -> dict[str, Any]:
        """Counts in the form of `storage.actions.update_progress`."""
        return {
            "completed": self.completed,
            "failed": self.failed,
            "expired": self.expired,
            "usage": self.usage,
        }


PROGRESS_EVERY_S = 1.0
#: Lowest priority number of a batch's requests: larger runs later, and interactive ones have 0.
MIN_PRIORITY = 100
#: Seconds between two saves to an object storage: if a worker's machine is lost, requests whose
#: results came later run again.
SAVE_EVERY_S = 10.0
#: Statuses after which a request is sent again, with the delay that the response asks for.
RETRYABLE_STATUSES = frozenset({429, 503})
MAX_PAUSE_S = 30.0
#: Maximum number of retries after server errors. Tenants' limits and full queues don't count:
#: batches yield to all other requests, even for hours.
MAX_SERVER_ERRORS = 10


class BatchStopped(Exception):
    """The batch ends before all of its requests have run: `status` says how."""

    def __init__(self, status: Any, error: QuireError | None = None) -> None:
        super().__init__(status)
        self.status, self.error = status, error


async def run_batch(public_id: str, owner: str) -> None:
    """Run the rest of a batch, unless another worker does."""
    row = await run_in_db_thread(
        claim_batch, public_id=public_id, owner=owner, seconds=lease_seconds()
    )
    if row is None:
        return
    bind_request(tenant=row.tenant.slug)
    async with Lease(row, owner):
        try:
            source = await asyncio.to_thread(open_blob, row.tenant_id, row.input_file_id)
        except FileNotFoundError:
            error = {"code": "file_not_found", "message": "The input file is gone."}
            errors = [{**error, "param": "input_file_id", "line": None}]
            await run_in_db_thread(fail_batch, row=row, errors=errors)
            return
        with source:
            await _run_lines_of(row, source)


async def _run_lines_of(row: Batch, source: IO[bytes]) -> None:
    lines, errors = await asyncio.to_thread(index_lines, source, row.endpoint)
    if errors:
        await run_in_db_thread(fail_batch, row=row, errors=errors)
        return
    started = await run_in_db_thread(start_batch, row=row, total=len(lines))
    origin = await load_trace_parent(row.public_id)
    try:
        await BatchRun(started, source, lines, origin).run()
    except JournalInUse:
        logger.warning("batch %s is still being written by a worker that lost it", row.public_id)


class SavedJournals:
    """A batch's journals in the object storage, from which another machine's worker continues.

    Each save is an object with the lines since the last one. Without an object storage the journals
    are in a folder that all workers share, and this does nothing.
    """

    def __init__(self, row: Batch, output: ResultJournal, errors: ResultJournal) -> None:
        self._row = row
        self._journals = {".output": output, ".errors": errors}
        self._num_bytes = dict.fromkeys(self._journals, 0)

    def restore(self) -> None:
        """Merge what other machines saved into the local journals. Blocks."""
        if has_object_storage():
            for suffix, journal in self._journals.items():
                other_ids = {name for other in self._journals.values() for name in other.custom_ids}
                for lines in saved_journal_lines(self._row.tenant_id, self._row.public_id, suffix):
                    journal.merge(lines.splitlines(), other_ids)

    def save(self) -> None:
        """Save the lines since the last save; the first time all of them. Blocks."""
        for suffix, journal in self._journals.items():
            if lines := journal.read_from(self._num_bytes[suffix]):
                save_journal_lines(
                    self._row.tenant_id,
                    self._row.public_id,
                    suffix,
                    lines,
                    replace=not self._num_bytes[suffix],
                )
                self._num_bytes[suffix] += len(lines)

    def remove(self) -> None:
        """Delete the saved journals once the batch has ended. Blocks."""
        if has_object_storage():
            for suffix in self._journals:
                remove_saved_journal(self._row.tenant_id, self._row.public_id, suffix)


class BatchRun:
    """One worker's run of a batch whose lease it holds.

    `origin`: the `traceparent` of the request that created it, "" if unknown.
    """

    def __init__(
        self, row: Batch, source: IO[bytes], lines: list[BatchLine], origin: str = ""
    ) -> None:
        self._row, self._source, self._lines = row, source, lines
        self._origin = origin
        self._tally = BatchCounts()
        self._output_path, self._errors_path = journal_paths(row)

    async def run(self) -> None:
        """Run the lines that have no result yet, then finish."""
        self._output = ResultJournal(self._output_path, self._tally.add_result)
        try:
            self._errors = ResultJournal(self._errors_path, self._tally.add_result)
            try:
                saved = SavedJournals(self._row, self._output, self._errors)
                await asyncio.to_thread(saved.restore)
                await self._run_and_finish(saved)
                await asyncio.to_thread(saved.remove)
            finally:
                self._errors.close()
        finally:
            self._output.close()
        for path in (self._output_path, self._errors_path):
            path.unlink(missing_ok=True)

    async def _run_and_finish(self, saved: SavedJournals) -> None:
        status: Any = BatchStatus.COMPLETED
        if self._row.status == BatchStatus.CANCELLING:
            status = BatchStatus.CANCELLED
        refusal: QuireError | None = None
        problems: list[dict[str, Any]] = []
        try:
            if status == BatchStatus.COMPLETED:
                await self._run_lines(saved)
        except* BatchStopped as stops:
            stop = _first(stops)
            status, refusal = stop.status, stop.error
        if status == BatchStatus.EXPIRED:
            self._write_expired()
        for journal in (self._output, self._errors):
            await asyncio.to_thread(journal.sync)
        if refusal is not None:
            problems = [
                {"code": refusal.code, "message": refusal.message, "param": None, "line": None}
            ]
        await run_in_db_thread(
            finish_batch,
            row=self._row,
            status=status,
            output=self._output_path,
            errors=self._errors_path,
            counts=self._tally.counts(),
            problems=problems,
        )

    async def _run_lines(self, saved: SavedJournals) -> None:
        """Raises a group with one `BatchStopped` when the batch ends early."""
        todo = iter([line for line in self._lines if not self._done(line)])
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(self._watch_status())
            save = group.create_task(self._save_journals(saved))
            workers = [
                group.create_task(self._work(todo)) for _ in range(settings.QUIRE.batch_concurrency)
            ]
            await asyncio.wait(workers)
            watch.cancel()
            save.cancel()

    def _done(self, line: BatchLine) -> bool:
        name = line.custom_id
        return name in self._output.custom_ids or name in self._errors.custom_ids

    async def _watch_status(self) -> None:
        """Write the progress; end the run when it is cancelled or expires."""
        while True:
            try:
                status = await run_in_db_thread(
                    update_progress, row=self._row, **self._tally.counts()
                )
            except (DatabaseError, InterfaceError) as error:
                logger.warning("the progress of %s is not written: %s", self._row, error)
                status = None
            if status == BatchStatus.CANCELLING:
                raise BatchStopped(BatchStatus.CANCELLED)
            if self._row.expires_at is not None and timezone.now() >= self._row.expires_at:
                raise BatchStopped(BatchStatus.EXPIRED)
            await asyncio.sleep(PROGRESS_EVERY_S)

    async def _save_journals(self, saved: SavedJournals) -> None:
        while has_object_storage():
            await asyncio.sleep(SAVE_EVERY_S)
            try:
                await asyncio.to_thread(saved.save)
            except ServiceUnavailable as error:
                logger.warning("the results of %s are not saved yet: %s", self._row, error)

    async def _work(self, todo: Iterator[BatchLine]) -> None:
        for line in todo:
            body = await asyncio.to_thread(read_body, self._source, line)
            body["priority"] = max(MIN_PRIORITY, _number(body.get("priority")))
            await self._keep(line, await self._send(body))

    async def _send(self, body: dict[str, Any]) -> DispatchResult:
        """The response to one request, retried while the response is temporary."""
        faults = 0
        while True:
            outcome = await self._send_once(body)
            if outcome.status not in RETRYABLE_STATUSES:
                return outcome
            faults += outcome.status != 429 and not outcome.overloaded
            if faults >= MAX_SERVER_ERRORS:
                return outcome
            await asyncio.sleep(min(MAX_PAUSE_S, max(0.05, outcome.retry_after or 1.0)))

    async def _send_once(self, body: dict[str, Any]) -> DispatchResult:
        row, caller = self._row, await self._caller()
        name = f"batch POST {row.endpoint}"
        with background_span(
            name, self._origin, batch_id=row.public_id, tenant=caller.tenant
        ) as span:
            outcome = await dispatch_request(row.endpoint, body, caller)
            set_span_result(span, outcome.status, outcome.request_id, outcome.error)
        return outcome

    @stamina.retry(on=ServiceUnavailable, attempts=None, timeout=None)
    async def _caller(self) -> Caller:
        """The caller who created the batch, with current rights. Raises `BatchStopped` if they have
        none.
        """
        row = self._row
        try:
            return await reload_caller(row.key_id, row.user_id, row.tenant.slug)
        except (AuthenticationFailed, PermissionDenied) as refusal:
            raise BatchStopped(BatchStatus.FAILED, refusal) from None

    @stamina.retry(on=is_about_storage, attempts=None, timeout=None)
    async def _keep(self, line: BatchLine, outcome: DispatchResult) -> None:
        """Record a result; wait while the disk is full, because the request was already run."""
        journal = self._output if outcome.status == 200 else self._errors
        response = {
            "status_code": outcome.status,
            "request_id": outcome.request_id,
            "body": outcome.body,
        }
        result: dict[str, Any] = {"id": outcome.request_id, "custom_id": line.custom_id}
        result |= {"response": response, "error": None}
        journal.append(result)

    def _write_expired(self) -> None:
        """Write a line to the error file for each request that never ran."""
        error = {
            "code": "batch_expired",
            "message": "This request could not be executed before the completion window expired.",
        }
        for line in self._lines:
            if not self._done(line):
                self._errors.append(
                    {
                        "id": new_id("batch_req"),
                        "custom_id": line.custom_id,
                        "response": None,
                        "error": error,
                    }
                )


def _number(value: Any) -> int:
    """A valid priority, or 0: the endpoint rejects an invalid one itself."""
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _first(stops: BaseExceptionGroup[BatchStopped]) -> BatchStopped:
    error = stops.exceptions[0]
    return error if isinstance(error, BatchStopped) else _first(error)
