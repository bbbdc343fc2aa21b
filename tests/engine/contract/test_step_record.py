"""What a process was at when it died, however it died."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from engine.system.step_record import (
    MAX_IDS_BYTES,
    LastStep,
    SharedStepRecord,
    SharedStepWriter,
    _slot_offset,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs memfd_create")

KILLED = """
import os, signal, sys
from engine.system.step_record import SharedStepWriter
recorder = SharedStepWriter.inherited("this one")
recorder.write(["a", "b"])
recorder.write(["b", "c~2"])
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def record() -> SharedStepRecord:
    record = SharedStepRecord.create()
    assert record is not None
    return record


@pytest.mark.system
def test_what_was_written_last_is_read_after_the_process_was_killed(
    record: SharedStepRecord,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED],
        env=os.environ | record.environment,
        pass_fds=(record.fd,),
        check=False,
    )
    assert done.returncode == -9
    assert record.read() == LastStep("this one", ["b", "c~2"])


def test_a_process_that_never_wrote_has_left_nothing(record: SharedStepRecord) -> None:
    assert record.read() is None


def test_one_that_wrote_of_no_request_was_at_none(record: SharedStepRecord) -> None:
    SharedStepWriter("i", os.dup(record.fd)).write([])
    assert record.read() == LastStep("i", [])


def test_a_list_that_the_process_died_over_does_not_count(record: SharedStepRecord) -> None:
    recorder = SharedStepWriter("i", os.dup(record.fd))
    recorder.write(["whole"])
    memory = recorder._memory
    assert memory is not None
    other = _slot_offset(3 - memory[0])
    memory[other : other + 8] = b"\xff" * 8
    assert record.read() == LastStep("i", ["whole"])


def test_more_ids_than_there_is_room_for_are_not_known(record: SharedStepRecord) -> None:
    recorder = SharedStepWriter("i", os.dup(record.fd))
    recorder.write(["x" * 100] * (MAX_IDS_BYTES // 100))
    assert record.read() == LastStep("i", None)
    recorder.write(["small"])
    assert record.read() == LastStep("i", ["small"])


def test_without_a_supervisor_nothing_is_written() -> None:
    recorder = SharedStepWriter.inherited("i", {})
    recorder.write(["a"])
    assert recorder.request_ids == ["a"]


def test_a_replica_says_why_it_ends() -> None:
    record = SharedStepRecord.create()
    assert record is not None
    writer = SharedStepWriter("incarnation", record.fd)
    assert record.read_fault() == ""
    writer.write_fault("Rank 1 was ended by signal 9. " + "…" * 2000)
    writer.write(["a"])
    assert record.read_fault().startswith("Rank 1 was ended by signal 9. ……")
    assert record.read().request_ids == ["a"]
