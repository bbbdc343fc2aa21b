"""The usage ledger against what clients received."""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from config.chaos.answer import Answer

#: Rows of answers that the client knows under other ids: they are compared as a sum.
SUMMED = "responses"


@dataclass(frozen=True)
class Row:
    """One row. `request_id`: without the number of a part that was settled later."""

    request_id: str
    endpoint: str
    tokens: int
    status: int


@dataclass
class Difference:
    """What the ledger has too much or too little, in tokens, and whose it is."""

    rows: int = 0
    billed: int = 0
    received: int = 0
    tokens: int = 0
    found: list[str] = field(default_factory=list)

    def add(self, what: str, billed: int, received: int) -> None:
        """Note one sum against another."""
        self.tokens += abs(billed - received)
        if billed != received:
            self.found.append(f"{what}: billed {billed}, received {received}")


def read(data_dir: Path) -> dict[str, Row]:
    """All rows, by their whole ids."""
    address = f"file:{data_dir / 'quire.sqlite3'}?mode=ro"
    with closing(sqlite3.connect(address, uri=True, timeout=30)) as database:
        rows = database.execute(
            "SELECT request_id, endpoint, prompt_tokens + completion_tokens, status "
            "FROM metering_usageentry"
        )
        return {name: Row(name.partition(".")[0], *rest) for name, *rest in rows}


def compare(rows: Iterable[Row], answers: Iterable[Answer]) -> Difference:
    """Answers that were lost count as such, and not here."""
    found, billed, summed = Difference(), defaultdict[str, int](int), 0
    rows = list(rows)
    for row in rows:
        if row.endpoint == SUMMED:
            summed += row.tokens
        else:
            billed[row.request_id] += row.tokens
    received_summed = 0
    for answer in answers:
        received = answer.prompt_tokens + answer.completion_tokens
        if any(name.startswith("resp_") for name in answer.ids):
            received_summed += received
            continue
        mine = sum(billed.pop(name, 0) for name in answer.ids)
        if not answer.lost:
            found.received += received
            found.add(" ".join(sorted(answer.ids)), mine, received)
    found.add("responses", summed, received_summed)
    for name, tokens in billed.items():
        found.add(f"{name} (nobody's)", tokens, 0)
    found.rows, found.billed = len(rows), sum(row.tokens for row in rows)
    found.received += received_summed
    return found
