"""Windows of a file: what is asked of the engine, and what becomes of its answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from common.errors import BudgetSpent, RateLimited
from engine.contract.errors import EngineOverloaded, QuireError
from engine.contract.messages import TokenLogprobs
from engine.multimodal.inputs import PreparedSound, SoundStretch, decode_tensors
from inference.api.audio import segments
from inference.api.audio.segments import WindowText, transcript
from inference.api.audio.transcription import Transcription
from inference.api.pooling.job import PoolingRun
from inference.errors import Overloaded
from inference.generation.generation import Generation
from inference.generation.output import OutputDelta, TokenEntry
from inference.request.job import Job
from tests.inference.test_audio_prompts import FORM, TOKENS, Words

#: (number of the stretch, frame of it that the window begins with, temperature) -> tokens, and the
#: log probability of each.
Answer = Callable[[int, int, float], tuple[list[int], float]]
#: Frames of a window, one second, and values of each.
NUM_FRAMES, NUM_MELS = 100, 4
TIME = TOKENS.first_time


class _Generated:
    """A generation whose outputs come at once."""

    def __init__(self, job: Job, answer: Answer) -> None:
        self.job, self.finished = job, False
        self._answer = answer

    async def next(self) -> list[OutputDelta]:
        self.finished = True
        deltas = []
        for number, [item] in enumerate(self.job.media):
            features = decode_tensors(self.job.media_data[item.digest])["features"]
            stretch, seek = divmod(round(float(features[0, 0] * 4 - 4) * 10_000), 10_000)
            ids, logprob = self._answer(stretch, seek, self.job.sampling.temperature)
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
    seconds: Sequence[float] = (1, 1),
    refusals: dict[int, QuireError] | None = None,
    max_logprobs: int = 20,
    **changes: Any,
) -> tuple[list[WindowText], list[Job]]:
    """The windows of a file, and the jobs that it took. `refusals`: by number of the job."""
    jobs: list[Job] = []

    async def start(job: Job) -> Any:
        jobs.append(job)
        if error := (refusals or {}).get(len(jobs) - 1):
            raise error
        return _Generated(job, answer)

    class Alignment:
        """Each token takes 0.1 s."""

        def __init__(self, job: Any) -> None:
            self._job = job

        async def result(self) -> list[bytes]:
            (params,), (prompt,) = self._job.pooling, self._job.prompts
            times = np.arange(len(prompt) - params.align_from) / 10
            return [times.astype("<f4").tobytes()]

    async def start_alignment(job: Any) -> Any:
        jobs.append(job)
        if error := (refusals or {}).get(len(jobs) - 1):
            raise error
        return Alignment(job)

    monkeypatch.setattr(Generation, "start", start)
    monkeypatch.setattr(PoolingRun, "start", start_alignment)
    info = SimpleNamespace(
        name="whisper",
        max_model_len=40,
        max_logprobs=max_logprobs,
        kv_capacity_tokens=0,
        num_mels=NUM_MELS,
        mm_processor_kwargs={},
        encoder_length=NUM_FRAMES // 2,
    )
    served: Any = SimpleNamespace(
        name="whisper", tokenizer=_Tokenizer(), info=info, vocab_size=2000, adapter_eos_id=None
    )
    caller = SimpleNamespace(max_context_tokens=None, max_priority=0, tenant="ada")
    ctx: Any = SimpleNamespace(caller=caller, ids=SimpleNamespace(new=lambda prefix: prefix))
    stretches = []
    for number, length in enumerate(seconds):
        powers = np.full((round(length * 100), NUM_MELS), number, np.float32)
        powers[:, 0] += np.arange(len(powers)) / 10_000
        stretches.append(SoundStretch(powers.tobytes(), 100.0 * number, length))
    sound = PreparedSound(1000.0, stretches)

    async def run() -> list[WindowText]:
        transcription = Transcription(ctx, served, replace(FORM, **changes), sound, TOKENS)
        await transcription.start()
        texts = [window async for window in transcription.windows()]
        assert not transcription._running
        return texts

    return asyncio.run(run()), jobs


class _Tokenizer(Words):
    """Token 1 is " w1", and so on."""

    def decode(self, ids: list[int]) -> str:
        return "".join(f" w{token}" for token in ids)

    def token_bytes(self, token: int) -> bytes:
        return f" w{token}".encode()


def _second_is_unlikely(stretch: int, seek: int, temperature: float) -> tuple[list[int], float]:
    return [stretch + 1], -2.0 if stretch == 1 and temperature < 0.4 else -0.1


def test_windows_that_are_unlikely_are_asked_again_and_count_as_no_other_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    windows, jobs = transcribe(monkeypatch, _second_is_unlikely)
    assert transcript(windows) == "w1 w2"
    assert [job.sampling.temperature for job in jobs] == [0, 0.2, 0.4]
    assert [len(job.prompts) for job in jobs] == [2, 1, 1]
    assert [job.is_continuation for job in jobs] == [False, True, True]


@pytest.mark.parametrize(
    "error",
    [
        RateLimited("Too many.", retry_after=1),
        EngineOverloaded("Too many wait."),
        Overloaded("The queue is full."),
    ],
)
def test_a_try_that_is_refused_loses_no_text(
    monkeypatch: pytest.MonkeyPatch, error: QuireError
) -> None:
    windows, jobs = transcribe(monkeypatch, _second_is_unlikely, refusals={1: error})
    assert transcript(windows) == "w1 w2"
    assert len(jobs) == 2
    with pytest.raises(type(error)):  # without any text, there's nothing to save
        transcribe(monkeypatch, _second_is_unlikely, refusals={0: error})


def test_the_next_window_of_a_stretch_begins_where_a_segment_was_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(segments, "MIN_ADVANCE_S", 0.8)

    def answer(stretch: int, seek: int, temperature: float) -> tuple[list[int], float]:
        end = TIME + 40  # 0.8 s
        words = [TIME, 10 * stretch + seek // 80, end]
        return words if seek >= 160 else [*words, end, 50], -0.1

    windows, jobs = transcribe(monkeypatch, answer, seconds=(2.6, 0.8), response_format="srt")
    assert [(s.start, round(s.end, 9), s.text) for window in windows for s in window.segments] == [
        (0.0, 0.8, " w0"), (0.8, 1.6, " w1"), (1.6, 2.4, " w2"), (100.0, 100.8, " w10"),
    ]  # fmt: skip
    assert [window.seconds for window in windows] == pytest.approx([1.0, 1.0, 1.0, 0.8])
    assert [len(job.prompts) for job in jobs] == [2, 1, 1]


def test_a_long_stretch_has_timestamps_inside_though_its_client_wants_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for seconds, timed in ((1.0, False), (1.5, True)):
        _, jobs = transcribe(
            monkeypatch, lambda *_: ([TIME, 1, TIME + 50], -0.1), seconds=[seconds]
        )
        assert [job.sampling.extra_args is not None for job in jobs] == [timed] * len(jobs)
        assert [job.prompts[0][-1] == TOKENS.no_timestamps for job in jobs] == [
            not timed for _ in jobs
        ]
        assert len(jobs) == (2 if timed else 1)


def test_a_further_window_waits_for_limits_by_the_minute_and_in_full_queues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refusals: dict[int, QuireError] = {1: RateLimited("Too many.", retry_after=0.01)}
    for number, kind in enumerate((EngineOverloaded, Overloaded), 2):
        refusals[number] = kind("Too many wait.")
        refusals[number].retry_after = 0.01  # type: ignore[attr-defined]
    windows, jobs = transcribe(
        monkeypatch, lambda *_: ([1], -0.1), seconds=[1.5], refusals=refusals
    )
    assert transcript(windows) == "w1 w1"
    assert len(jobs) == 5
    refusals[1] = BudgetSpent("It is spent.", retry_after=0.01)
    with pytest.raises(BudgetSpent):
        transcribe(monkeypatch, lambda *_: ([1], -0.1), seconds=[1.5], refusals=refusals)


def test_a_streamed_transcript_is_settled_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in (False, True):
        _, [job] = transcribe(monkeypatch, lambda *_: ([1], -0.1), stream=stream)
        assert job.stream is stream


@pytest.mark.parametrize("max_logprobs", [0, 3])
def test_a_model_that_gives_few_log_probabilities_transcribes(
    monkeypatch: pytest.MonkeyPatch, max_logprobs: int
) -> None:
    windows, [job] = transcribe(monkeypatch, lambda *_: ([1], -0.1), max_logprobs=max_logprobs)
    assert transcript(windows) == "w1 w1"
    assert job.sampling.logprobs == max_logprobs


def test_words_have_the_times_of_their_tokens_within_their_segment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = {"response_format": "verbose_json", "granularities": frozenset({"word"})}
    refusals: dict[int, QuireError] = {1: RateLimited("Too many.", retry_after=0.01)}
    windows, jobs = transcribe(
        monkeypatch,
        lambda stretch, *_: ([TIME + 5, 1, 2, TIME + 12], -0.1),
        seconds=[0.5, 1],
        refusals=refusals,
        **options,
    )
    words = [(word.text, round(word.start, 2), round(word.end, 2)) for word in windows[1].words]
    assert words == [("w1", 100.1, 100.1), ("w2", 100.1, 100.2)]
    assert [len(window.words) for window in windows] == [2, 2]
    alignment = next(job for job in jobs if hasattr(job, "pooling"))
    assert alignment.prompts == [[100, 102, 111, 114, 1, 2]]
    assert alignment.pooling[0].align_from == 3
    assert alignment.is_continuation
    assert {job.pooling[0].num_states for job in jobs if hasattr(job, "pooling")} == {25, 50}


def test_words_cost_nothing_where_nobody_asks_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    answer: Answer = lambda *_: ([TIME, 1, TIME + 20], -0.1)  # noqa: E731
    _, jobs = transcribe(monkeypatch, answer, response_format="verbose_json")
    assert not any(hasattr(job, "pooling") for job in jobs)
