"""What became of requests is written beside them; where it can't be, the log says how it ends."""

from __future__ import annotations

from collections import deque

import pytest
from django.db import OperationalError

from metering import request_log_writer as writer


@pytest.mark.django_db  # it looks after the thread's connection, where there is one
@pytest.mark.parametrize("heals", [True, False])
def test_records_that_wait_are_told_of_once_and_so_is_their_end(
    heals: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries: list[bool] = []
    thread = writer.RequestLogWriter()

    def write(*, at_once: bool) -> int:
        tries.append(at_once)
        if len(tries) == 4:
            thread.stopping.set()
        if len(tries) in (2, 3) or (len(tries) > 3 and not heals):
            raise OperationalError("database is locked")
        return 9

    monkeypatch.setattr(writer, "write_waiting", write)
    monkeypatch.setattr(writer, "EVERY_S", 0.001)
    monkeypatch.setattr(writer, "_waiting", deque())  # other tests may have left some
    thread.run()
    assert tries == [False, False, False, False, True]
    wait = "records of 0 requests wait and are tried again every second: database is locked"
    end = "records of 9 requests that waited are written"
    lost = "records of 0 requests are lost: database is locked"
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [wait, end if heals else lost]
