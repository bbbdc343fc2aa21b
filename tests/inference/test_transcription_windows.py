"""Windows of a file: what is asked of the engine, and what becomes of its answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import RateLimited
from engine.contract.errors import EngineOverloaded, QuireError
from engine.contract.messages import TokenLogprobs
from engine.multimodal.inputs import PreparedSound, PreparedWindow
from inference.api.audio.segments import transcript
from inference.api.audio.transcription import Transcription
from inference.generation.generation import Generation
from inference.generation.output import OutputDelta, TokenEntry
from inference.request.job import Job
from tests.inference.test_audio_prompts import FORM, TOKENS, Words

#: (number of the window's digest, temperature) -> its tokens, and the log probability of each.
Answer = Callable[[int, float], tuple[list[int], float]]


class _Generated:
    """A generation whose outputs come at once."""

    def __init__(self, job: Job, answer: Answer) -> None:
        self.job, self.finished = job, False
        self._answer = answer

    async def next(self) -> list[OutputDelta]:
        self.finished = True
        deltas = []
        for number, [item] in enumerate(self.job.media):
            ids, logprob = self._answer(item.digest[0], self.job.sampling.temperature)
            entries = [
                TokenEntry(token, TokenLogprobs([token], [logprob], [1]), 0) for token in ids
            ]
            deltas.append(OutputDelta(number, 0, "", ids, entries, "stop"))
        return deltas

    def release(self) -> None:
        self.finished = True


def transcribe(
    monkeypatch: pytest.MonkeyPatch,
    answer: Answer,
    *,
    num_windows: int = 2,
    refusals: dict[int, QuireError] | None = None,
    max_logprobs: int = 20,
    **changes: Any,
) -> tuple[str, list[Job]]:
    """The text of a file, and the jobs that it took. `refusals`: by number of the job."""
    jobs: list[Job] = []

    async def start(job: Job) -> Any:
        jobs.append(job)
        if error := (refusals or {}).get(len(jobs) - 1):
            raise error
        return _Generated(job, answer)

    monkeypatch.setattr(Generation, "start", start)
    info = SimpleNamespace(
        name="whisper", max_model_len=40, max_logprobs=max_logprobs, kv_capacity_tokens=0
    )
    served: Any = SimpleNamespace(
        name="whisper", tokenizer=_Tokenizer(), info=info, vocab_size=2000, adapter_eos_id=None
    )
    caller = SimpleNamespace(max_context_tokens=None, max_priority=0, tenant="ada")
    ctx: Any = SimpleNamespace(caller=caller, ids=SimpleNamespace(new=lambda prefix: prefix))
    windows = [
        PreparedWindow(bytes([number]) * 32, b"", 30.0 * number, 30.0)
        for number in range(num_windows)
    ]
    sound = PreparedSound(30.0 * num_windows, windows)

    async def run() -> str:
        transcription = Transcription(ctx, served, replace(FORM, **changes), sound, TOKENS)
        await transcription.start()
        return transcript([window async for window in transcription.windows()])

    return asyncio.run(run()), jobs


class _Tokenizer(Words):
    """Token 1 is " w1", and so on."""

    def decode(self, ids: list[int]) -> str:
        return "".join(f" w{token}" for token in ids)


def _second_is_unlikely(window: int, temperature: float) -> tuple[list[int], float]:
    return [window + 1], -2.0 if window == 1 and temperature < 0.4 else -0.1


def test_windows_that_are_unlikely_are_asked_again_and_count_as_no_other_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text, jobs = transcribe(monkeypatch, _second_is_unlikely)
    assert text == "w1 w2"
    assert [job.sampling.temperature for job in jobs] == [0, 0.2, 0.4]
    assert [len(job.prompts) for job in jobs] == [2, 1, 1]
    assert [job.is_continuation for job in jobs] == [False, True, True]


@pytest.mark.parametrize(
    "error", [RateLimited("Too many.", retry_after=1), EngineOverloaded("Too many wait.")]
)
def test_a_try_that_is_refused_loses_no_text(
    monkeypatch: pytest.MonkeyPatch, error: QuireError
) -> None:
    text, jobs = transcribe(monkeypatch, _second_is_unlikely, refusals={1: error})
    assert text == "w1 w2"
    assert len(jobs) == 2
    with pytest.raises(type(error)):  # without any text, there's nothing to save
        transcribe(monkeypatch, _second_is_unlikely, refusals={0: error})


def test_a_streamed_transcript_is_settled_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in (False, True):
        _, [job] = transcribe(monkeypatch, lambda window, _: ([1], -0.1), stream=stream)
        assert job.stream is stream


@pytest.mark.parametrize("max_logprobs", [0, 3])
def test_a_model_that_gives_few_log_probabilities_transcribes(
    monkeypatch: pytest.MonkeyPatch, max_logprobs: int
) -> None:
    text, [job] = transcribe(monkeypatch, lambda *_: ([1], -0.1), max_logprobs=max_logprobs)
    assert text == "w1 w1"
    assert job.sampling.logprobs == max_logprobs
