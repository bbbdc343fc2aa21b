"""What has come from the inbox and waits for the engine's loop: tenants take turns."""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from engine.contract.protocol import AbortRequest, EngineRequest, InboxMessage

#: The id of an inbox entry, and what stood in it.
Entry = tuple[bytes, InboxMessage]


@dataclass(slots=True)
class _Round:
    """What came between two words of an operator: by tenant, and by priority.

    Attributes:
        end: the operator's word behind it; None: more may come.
    """

    lines: OrderedDict[str, dict[int, deque[Entry]]] = field(default_factory=OrderedDict)
    end: Entry | None = None

    def add(self, tenant: str, priority: int, entry: Entry) -> None:
        self.lines.setdefault(tenant, {}).setdefault(priority, deque()).append(entry)

    def take(self) -> Entry:
        """The next tenant's most urgent one, whose turn comes again behind all others'."""
        tenant, line = next(iter(self.lines.items()))
        priority = min(line)
        entry = line[priority].popleft()
        if not line[priority]:
            del line[priority]
        if line:
            self.lines.move_to_end(tenant)
        else:
            del self.lines[tenant]
        return entry


@dataclass(slots=True)
class _Place:
    """Where a request waits. `count`: how often; it may have been sent twice."""

    round: _Round
    tenant: str
    priority: int
    count: int = 0


class Intake:
    """One thread puts messages, another takes them.

    To take in hundreds of long prompts takes longer than many steps, and of what waits only a few
    are taken in between two steps. So tenants' requests take turns, and of one tenant's the more
    urgent come first. An abort comes behind its request, and at once if that was taken. An
    operator's word comes behind all that was there before, and ahead of all that came later.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._aborts: deque[Entry] = deque()
        self._rounds: deque[_Round] = deque([_Round()])
        self._places: dict[str, _Place] = {}

    def put(self, entry: Entry) -> None:
        """Add a message."""
        message = entry[1]
        with self._changed:
            if isinstance(message, EngineRequest):
                self._put_request(message, entry)
            elif isinstance(message, AbortRequest):
                place = self._places.get(message.request_id)
                if place is None:
                    self._aborts.append(entry)
                else:
                    place.round.add(place.tenant, place.priority, entry)
            else:
                self._rounds[-1].end = entry
                self._rounds.append(_Round())
            self._changed.notify()

    def _put_request(self, message: EngineRequest, entry: Entry) -> None:
        place = self._places.get(message.request_id)
        if place is None:
            place = _Place(self._rounds[-1], message.tenant, message.priority)
            self._places[message.request_id] = place
        place.count += 1
        place.round.add(place.tenant, place.priority, entry)

    def get(self, timeout: float) -> Entry:
        """The next one. Raises `queue.Empty` when none comes within so many seconds."""
        with self._changed:
            if not self._changed.wait_for(self._has_any, timeout):
                raise queue.Empty
            return self._take()

    def get_nowait(self) -> Entry:
        """The next one. Raises `queue.Empty` where there is none."""
        return self.get(0.0)

    def empty(self) -> bool:
        """Whether nothing waits."""
        with self._changed:
            return not self._has_any()

    def _has_any(self) -> bool:
        first = self._rounds[0]
        return bool(self._aborts or first.lines or first.end)

    def _take(self) -> Entry:
        if self._aborts:
            return self._aborts.popleft()
        first = self._rounds[0]
        if not first.lines and first.end is not None:
            self._rounds.popleft()
            return first.end
        entry = first.take()
        if isinstance(entry[1], EngineRequest):
            place = self._places[entry[1].request_id]
            place.count -= 1
            if not place.count:
                del self._places[entry[1].request_id]
        return entry
