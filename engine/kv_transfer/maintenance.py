"""Verifies or drops a KV tier: `python -m engine.kv_transfer.maintenance verify|drop`.

Reads the tier, a folder or URL, from standard input, since it may hold a password. Prints a
`TierReport` as JSON; or the reason why that can't be had, with exit status 1.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

from engine.contract.errors import ConfigError
from engine.contract.replica_state import TierReport
from engine.kv_transfer.disk_tier import SUFFIX, verify_segment
from engine.kv_transfer.remote_tier import StoreError, make_store, verify_record
from engine.kv_transfer.storage_tier import UnusableBlock


def verify(backend: str) -> TierReport:
    """Read all records of a tier. Raises `ConfigError`, `StoreError`, `OSError`."""
    report, reasons = TierReport(), Counter[str]()
    for num_bytes, reason in _verified(backend):
        report.num_records += 1
        report.num_bytes += num_bytes
        if reason:
            reasons[reason] += 1
    report.failures = dict(reasons)
    return report


def _verified(backend: str) -> Iterator[tuple[int, str]]:
    """(bytes, why it can't be used or "") of each record."""
    if "://" not in backend:
        for path in _segments(backend):
            try:
                yield from verify_segment(path)
            except FileNotFoundError:
                continue  # a replica has deleted it
        return
    store = make_store(backend, sys.maxsize, 0)
    try:
        for key, record in store.records():
            try:
                verify_record(key, record)
            except UnusableBlock as error:
                yield len(record), error.reason
            else:
                yield len(record), ""
    finally:
        store.close()


def drop(backend: str) -> TierReport:
    """Delete all records of a tier; its replicas go on with an empty one.

    Of a folder the report has bytes, of a store records. Raises as `verify` does.
    """
    if "://" not in backend:
        report = TierReport()
        for path in _segments(backend):
            try:
                report.num_bytes += path.stat().st_size
                path.unlink()
            except FileNotFoundError:
                continue  # a replica has deleted it
        return report
    store = make_store(backend, sys.maxsize, 0)
    try:
        return TierReport(num_records=store.clear())
    finally:
        store.close()


def _segments(folder: str) -> list[Path]:
    """Raises `OSError` where there is no such folder."""
    return [path for path in sorted(Path(folder).expanduser().iterdir()) if path.suffix == SUFFIX]


def main() -> int:
    """Run one of the two."""
    run = {"verify": verify, "drop": drop}[sys.argv[1]]
    try:
        report = run(sys.stdin.read())
    except (ConfigError, StoreError, OSError) as error:
        print(error.message if isinstance(error, ConfigError) else error)
        return 1
    print(msgspec.json.encode(report).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
