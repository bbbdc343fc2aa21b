"""The benchmark of the host side runs what the engine runs."""

from __future__ import annotations

import pytest

from benchmarks.host import Host, Parts, admission, decode, main
from tests.engine.speculative.free import make_drafts_free


@pytest.mark.parametrize("waiting", [0, 50])
def test_every_part_is_timed_and_queued_requests_keep_waiting(waiting: int) -> None:
    row = decode(4, waiting, steps=3, prompt_tokens=20)
    total = row.pop("total_us")
    assert set(row) == {
        "schedule_us",
        "prepare_inputs_us",
        "append_tokens_us",
        "handle_output_us",
    }
    assert all(value > 0 for value in row.values())
    assert total == pytest.approx(sum(row.values()))


def test_its_steps_are_real_ones() -> None:
    host = Host(3, 20)
    sequences = [host.add([10 + number] * 20) for number in range(3)]
    for _ in range(5):
        host.step(Parts())
    assert [sequence.num_output_tokens for sequence in sequences] == [5, 5, 5]
    assert host.batch.num_tokens[:3].tolist() == [25, 25, 25]
    host.scheduler.check_integrity()


def test_drafts_that_are_tried_are_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    make_drafts_free(monkeypatch)
    host = Host(3, 20)
    host.be_ready_for_drafts()
    sequences = [host.add([10 + number] * 20) for number in range(3)]
    for _ in range(20):
        host.step(Parts())
    assert sum(sequence.timeline.num_accepted_tokens for sequence in sequences) > 0
    assert [sequence.num_tokens for sequence in sequences] == host.batch.num_tokens[:3].tolist()
    host.scheduler.check_integrity()


def test_prompts_that_miss_the_cache_are_timed() -> None:
    assert admission(2, 40, caching=True) > 0
    assert admission(2, 40, caching=False) > 0


def test_the_command_prints_its_tables(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["host", "--running", "2", "--waiting", "3", "--steps", "2"]
    monkeypatch.setattr("sys.argv", argv)
    main()
    assert capsys.readouterr().out.count("total_us") == 3
