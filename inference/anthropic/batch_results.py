"""A message batch's results: what ran from its files, the rest from how the batch ended."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from storage.access import Batch, BatchStatus, blob_path

Line = dict[str, Any]
#: What became of a request that never ran, by the batch's end.
_NEVER_RAN = {BatchStatus.CANCELLED: "canceled", BatchStatus.EXPIRED: "expired"}


def result_lines(row: Batch) -> Iterator[bytes]:
    """The lines, as JSON, in the order in which requests ended. Blocks on the disk."""
    done: set[str] = set()
    for file in (row.output_file, row.error_file):
        if file is None:
            continue
        for line in _lines(blob_path(row.tenant_id, file.public_id)):
            done.add(line["custom_id"])
            yield _encoded(line["custom_id"], _result(line))
    if row.status == BatchStatus.COMPLETED:
        return
    for line in _lines(blob_path(row.tenant_id, row.input_file_id)):
        if line["custom_id"] not in done:
            yield _encoded(line["custom_id"], _unrun(row))


def _lines(path: Path) -> Iterator[Line]:
    try:
        with path.open("rb") as file:
            for raw in file:
                yield json.loads(raw)
    except FileNotFoundError:  # it was deleted: what is left is told
        return


def _encoded(custom_id: str, result: Line) -> bytes:
    return json.dumps({"custom_id": custom_id, "result": result}).encode() + b"\n"


def _result(line: Line) -> Line:
    response = line["response"]
    if response is None:
        return {"type": "expired"}
    if response["status_code"] == 200:
        return {"type": "succeeded", "message": response["body"]}
    return {"type": "errored", "error": response["body"]}


def _unrun(row: Batch) -> Line:
    """Of a request that didn't run: the batch was ended, or its key's rights were."""
    kind = _NEVER_RAN.get(BatchStatus(row.status))
    if kind is not None:
        return {"type": kind}
    told = row.errors[0]["message"] if row.errors else "The batch failed."
    error = {"type": "permission_error", "message": told}
    return {"type": "errored", "error": {"type": "error", "error": error, "request_id": None}}
