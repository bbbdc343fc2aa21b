"""The journal survives its writer."""

from pathlib import Path

import pytest

from inference.api.batches.files import JournalInUse, ResultJournal
from inference.api.batches.runner import BatchCounts


def line(custom_id: str, status: int = 200) -> dict[str, object]:
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    body = {"usage": usage} if status == 200 else {"error": {}}
    return {"custom_id": custom_id, "response": {"status_code": status, "body": body}}


def test_a_torn_line_is_cut_off_and_what_is_whole_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "j"
    journal = ResultJournal(path, BatchCounts().add_result)
    journal.append(line("a"))
    journal.append(line("b", 400))
    journal.close()
    with path.open("ab") as file:
        file.write(b'{"custom_id": "c", "respo')
    tally = BatchCounts()
    again = ResultJournal(path, tally.add_result)
    assert again.custom_ids == {"a", "b"}
    assert tally.counts() == {
        "completed": 1,
        "failed": 1,
        "expired": 0,
        "usage": {"input": 3, "output": 2, "cached": 0, "reasoning": 0},
    }
    again.append(line("c"))
    again.sync()
    again.close()
    assert path.read_bytes().count(b"\n") == 3


def test_what_a_power_cut_left_is_no_result(tmp_path: Path) -> None:
    path = tmp_path / "j"
    journal = ResultJournal(path, BatchCounts().add_result)
    journal.append(line("a"))
    journal.close()
    with path.open("ab") as file:
        file.write(b"\0" * 40 + b"\n")
    again = ResultJournal(path, BatchCounts().add_result)
    assert again.custom_ids == {"a"}
    again.append(line("b"))
    again.close()
    assert path.read_bytes().count(b"\n") == 2


def test_two_writers_at_a_time_are_one_too_many(tmp_path: Path) -> None:
    first = ResultJournal(tmp_path / "j", BatchCounts().add_result)
    with pytest.raises(JournalInUse):
        ResultJournal(tmp_path / "j", BatchCounts().add_result)
    first.close()
    ResultJournal(tmp_path / "j", BatchCounts().add_result).close()
