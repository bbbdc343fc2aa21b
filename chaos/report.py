"""The table of a run's results by fault and kind of request."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from chaos.faults import FAULTS
from chaos.kinds import KINDS
from chaos.run import Outcome, Request, Window


@dataclass
class Cell:
    """Results of one kind's requests that ran during a fault."""

    count: int = 0
    lost: int = 0
    doubled: int = 0
    changed: int = 0
    pause: float = 0.0

    def text(self) -> str:
        """Return `12: 1.3 s` if all requests succeeded, and otherwise the counts of failures."""
        if not self.count:
            return ""
        hurt = [
            f"{count} {what}"
            for what in ("lost", "doubled", "changed")
            if (count := getattr(self, what))
        ]
        return f"{self.count}: {', '.join([*hurt, f'{self.pause:.1f} s'])}"


@dataclass
class Totals:
    """Totals of the run, with and without faults."""

    requests: int
    lost: int
    doubled: int
    changed: int
    faults: int

    @property
    def hurt(self) -> int:
        """Number of requests that were not served as without faults."""
        return self.lost + self.doubled + self.changed


def totals(outcome: Outcome) -> Totals:
    """Return totals that count each request once."""
    cell = _cell(outcome, outcome.requests)
    return Totals(cell.count, cell.lost, cell.doubled, cell.changed, len(outcome.windows))


def passed(outcome: Outcome) -> bool:
    """Return whether no request was affected, no token misbilled and no problem reported."""
    return not (totals(outcome).hurt or outcome.difference.tokens or outcome.problems)


def cells(outcome: Outcome) -> dict[tuple[str, str], Cell]:
    """Return the results by (fault, kind) of requests that overlap with the fault's window."""
    return {
        (fault, kind): _cell(
            outcome,
            [
                request
                for request in outcome.requests
                if request.asked.kind == kind
                and any(_overlaps(request, w) for w in outcome.windows if w.fault == fault)
            ],
        )
        for fault in FAULTS
        for kind in KINDS
    }


def table(outcome: Outcome) -> str:
    """Return the report as Markdown."""
    by_cell = cells(outcome)
    kinds = [kind for kind in KINDS if any(by_cell[fault, kind].count for fault in FAULTS)]
    lines = ["| fault | times | " + " | ".join(kinds) + " |", "|---|---|" + "---|" * len(kinds)]
    for fault in FAULTS:
        times = sum(window.fault == fault for window in outcome.windows)
        if fault in outcome.skipped:
            lines.append(f"| {fault} | skipped | " + " | ".join("" for _ in kinds) + " |")
        elif times:
            row = " | ".join(by_cell[fault, kind].text() for kind in kinds)
            lines.append(f"| {fault} | {times} | {row} |")
    return "\n".join(lines)


def summary(outcome: Outcome) -> str:
    """Return a line for each count that must be zero."""
    sums, ledger = totals(outcome), outcome.difference
    lines = [
        f"{sums.requests} requests beside {sums.faults} faults: "
        f"{sums.lost} lost, {sums.doubled} doubled, {sums.changed} changed.",
        f"Ledger: {ledger.billed} tokens in {ledger.rows} rows; clients received "
        f"{ledger.received}. Difference: {ledger.tokens}.",
    ]
    lines += [f"Skipped: {fault} ({why})." for fault, why in outcome.skipped.items()]
    return "\n".join([*lines, *outcome.problems])


def _overlaps(request: Request, window: Window) -> bool:
    return request.began <= window.finished_at and request.finished_at >= window.began


def _cell(outcome: Outcome, requests: Iterable[Request]) -> Cell:
    cell = Cell()
    for request in requests:
        cell.count += 1
        cell.lost += bool(request.answer.lost)
        cell.doubled += bool(request.answer.doubled)
        cell.changed += bool(outcome.changed(request))
        cell.pause = max(cell.pause, outcome.pause(request))
    return cell
