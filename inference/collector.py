"""Python's garbage collector beside an event loop: small looks often, the whole when nobody waits.

It looks when so many more objects were made than freed, at all that came since. Under load a
gateway frees about as many as it makes, so far more have come by then, and every stream stands
still meanwhile: with a threshold of 10,000 for 20 to 56 ms of processor time while 250 streams ran.
Requests leave hardly any cycles to be found: of 250 with 40 tokens each 7 objects are left for a
look at the older ones, which takes 75 ms of processor time while as many run.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

#: Looks at the newest objects before what is left of them is looked through again: some two
#: minutes while 250 streams run. Every few seconds one request in a hundred stood still for it.
OLDER_AFTER = 20_000
#: So many, and it's done in the next quiet moment.
OLDER_WHEN_IDLE_AFTER = 10
LOOK_FOR_IDLE_EVERY_S = 5.0
#: Nobody waits for so long before a moment is a quiet one: many clients' answers may end together,
#: and they ask again at once.
QUIET_S = 0.25


def look_often(threshold: int) -> None:
    """Look at new objects when there are `threshold` more, and never at what was loaded so far;
    0 leaves the collector as Python has it.

    Python's own thresholds cost a tenth of the event loop's time.
    """
    if threshold:
        gc.collect()
        gc.freeze()
        gc.set_threshold(threshold, OLDER_AFTER, gc.get_threshold()[2])


async def collect_when_idle(is_idle: Callable[[], bool]) -> None:
    """For ever: look through all that isn't frozen while there's nobody to wait for it."""
    while True:
        await asyncio.sleep(LOOK_FOR_IDLE_EVERY_S)
        if gc.get_count()[1] < OLDER_WHEN_IDLE_AFTER or not is_idle():
            continue
        await asyncio.sleep(QUIET_S)
        if is_idle():
            gc.collect()
