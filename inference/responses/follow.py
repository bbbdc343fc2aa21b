"""Following a background response: its events from wherever the client is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator

import msgspec

from inference.openai.serving import HEARTBEAT
from inference.responses.kept import ENDS, KeptEvents, encode_event
from inference.settings import gateway_settings
from storage.access import StoredResponse, access_response
from storage.errors import NotFound
from tenants.authentication import Caller
from tenants.db_threads import in_db_thread

#: How often Redis is asked while events come, and while none does.
SOON_S, LATER_S = 0.05, 0.5
#: How long a response may be silent until its row is looked up.
SILENT_S = 2.0
RUNNING = frozenset({"queued", "in_progress"})


async def follow(caller: Caller, public_id: str, after: int) -> AsyncGenerator[bytes, None]:
    """Events behind number `after`, as they come, to the last; nothing more when it's cancelled."""
    kept = KeptEvents(public_id)
    pause, heard, written = SOON_S, 0.0, time.monotonic()
    heartbeat_s = gateway_settings().sse_heartbeat_s
    while True:
        found = await kept.after(after)
        now = time.monotonic()
        if found:
            yield b"".join(encode_event(n, msgspec.json.decode(data)) for n, _, data in found)
            if found[-1][1] in ENDS:
                return
            after, pause, heard, written = found[-1][0], SOON_S, now, now
            continue
        if now - heard >= SILENT_S:
            row = await _row(caller, public_id)
            if row is None or row.status not in RUNNING:
                yield b"" if row is None else await _end(kept, row, after)
                return
            heard = now
        if heartbeat_s and now - written >= heartbeat_s:
            yield HEARTBEAT
            written = now
        await asyncio.sleep(pause)
        pause = min(2 * pause, LATER_S)


async def _row(caller: Caller, public_id: str) -> StoredResponse | None:
    try:
        return await in_db_thread(access_response, caller, public_id)
    except NotFound:  # deleted, or expired
        return None


async def _end(kept: KeptEvents, row: StoredResponse, after: int) -> bytes:
    """The last event, from the row: the others are gone, or their writer is."""
    kind = f"response.{row.status}"
    told = [kind for _, kind, _ in await kept.after(-1, None) if kind in ENDS]
    if kind not in ENDS or told:  # cancelled; or the client has the last one already
        return b""
    return encode_event(after + 1, {"type": kind, "response": row.body})
