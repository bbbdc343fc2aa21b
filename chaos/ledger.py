"""Compares the usage ledger with what clients received."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from chaos.answer import Answer
from chaos.database import Database

#: Endpoint whose responses have other ids for clients; only its total is compared.
SUMMED = "responses"
#: Tokens of a prompt, and of its answer.
Tokens = tuple[int, int]


@dataclass(frozen=True)
class Row:
    """One row. `request_id`: without the suffix of a part that was settled later."""

    request_id: str
    endpoint: str
    prompt: int
    completion: int
    status: int


@dataclass
class Difference:
    """Tokens that the ledger has in excess or lacks, and the requests that they belong to."""

    rows: int = 0
    billed: int = 0
    received: int = 0
    tokens: int = 0
    differences: list[str] = field(default_factory=list)

    def add(self, what: str, billed: Tokens, received: Tokens) -> None:
        """Add one comparison. Differences never cancel out: not even of prompt and answer."""
        self.received += sum(received)
        self.tokens += sum(abs(b - r) for b, r in zip(billed, received, strict=True))
        if billed != received:
            self.differences.append(f"{what}: billed {sum(billed)}, received {sum(received)}")


def read(database: Database) -> dict[str, Row]:
    """Return all rows by their full ids."""
    rows = database.rows(
        "SELECT request_id, endpoint, prompt_tokens, completion_tokens, status "
        "FROM metering_usageentry"
    )
    return {name: Row(name.partition(".")[0], *rest) for name, *rest in rows}


def compare(rows: Iterable[Row], answers: Iterable[Answer]) -> Difference:
    """Compare rows with answers. Lost answers are left out, as they are counted elsewhere."""
    rows, difference = list(rows), Difference()
    billed = defaultdict[str, Tokens](lambda: (0, 0))
    for row in rows:
        name = SUMMED if row.endpoint == SUMMED else row.request_id
        billed[name] = _sum(billed[name], (row.prompt, row.completion))
    summed: Tokens = (0, 0)
    for answer in answers:
        received = answer.prompt_tokens, answer.completion_tokens
        if any(name.startswith("resp_") for name in answer.ids):
            summed = _sum(summed, received)
            continue
        mine: Tokens = (0, 0)
        for name in answer.ids:
            mine = _sum(mine, billed.pop(name, (0, 0)))
        if not answer.lost:
            difference.add(" ".join(sorted(answer.ids)), mine, received)
    difference.add(SUMMED, billed.pop(SUMMED, (0, 0)), summed)
    status = {row.request_id: row.status for row in rows}
    for name, tokens in billed.items():
        difference.add(f"{name} (nobody's, status {status[name]})", tokens, (0, 0))
    difference.rows, difference.billed = len(rows), sum(row.prompt + row.completion for row in rows)
    return difference


def _sum(one: Tokens, other: Tokens) -> Tokens:
    return one[0] + other[0], one[1] + other[1]
