"""`Transcription`: the windows of a file, from the engine's tokens to their text.

This is OpenAI's loop: a window with an implausible text is decoded again at a higher temperature,
text that is unlikely to be speech is left out, and the next window begins where the last complete
segment ends. Stretches of a file that are separated by silence run concurrently. A window is not
prompted with the text before it, or else a repetitive text would make later ones repeat it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from django.conf import settings

from common.db import run_in_file_thread
from engine.contract.errors import EngineOverloaded, EngineUnavailable, InvalidRequest
from engine.contract.messages import MediaItem, TokenLogprobs
from engine.contract.sampling_params import SamplingParams
from engine.multimodal.audio import (
    HOP,
    SAMPLE_RATE,
    num_encoded,
    pads_windows,
    window_tensors,
)
from engine.multimodal.inputs import (
    PreparedSound,
    SoundStretch,
    encode_tensors,
    media_digest,
)
from engine.text.tokenizer import Tokenizer
from engine.text.tokenizer_files import read_generation_config
from inference.api.audio.form import AudioForm
from inference.api.audio.segments import Segment, WindowText, split_segments
from inference.api.audio.words import (
    UNSPACED_LANGUAGES,
    AlignmentJob,
    alignment_params,
    split_words,
    token_boundaries,
    words_of_segment,
)
from inference.api.pooling.job import PoolingRun
from inference.errors import Overloaded
from inference.generation.generation import Generation
from inference.generation.model_resolution import check_queue, resolve_model
from inference.generation.output import OutputDelta
from inference.loop.offload import get_render_pool
from inference.rendering.media_pool import get_media_pool
from inference.rendering.media_sources import MediaSource
from inference.request.context import RequestContext
from inference.request.job import Job, ResolvedModel
from metering.access import BudgetSpent, RateLimited

T = TypeVar("T")

#: Errors after which the request for a window is repeated.
REFUSALS = (RateLimited, EngineOverloaded, Overloaded)
#: Temperatures at which a window is decoded again while its text isn't plausible.
FALLBACK_TEMPERATURES = (0.2, 0.4, 0.6, 0.8, 1.0)
#: Whisper's limits of plausible text.
MAX_COMPRESSION_RATIO, MIN_AVG_LOGPROB, MAX_NO_SPEECH_PROB = 2.4, -1.0, 0.6
#: Number of alternatives that are read for the probability of no speech, if the model supports it.
_NUM_LOGPROBS = 5
#: Frames per second of the encoder's input; a shorter rest than the minimum contains no word.
FRAMES_PER_SECOND, MIN_WINDOW_FRAMES = SAMPLE_RATE // HOP, 20
#: Models with a smaller vocabulary are English-only.
_MULTILINGUAL_VOCAB = 51_865


@dataclass(frozen=True, slots=True)
class WhisperTokens:
    """Ids of the tokens that control a model.

    Attributes:
        languages: by code; {}: the model is English-only.
        suppressed: tokens that are never generated.
    """

    start: int
    end: int
    transcribe: int
    translate: int
    previous: int
    no_timestamps: int
    no_speech: int
    languages: dict[str, int]
    suppressed: tuple[int, ...]

    @property
    def first_time(self) -> int:
        """The timestamp of 0 s; those of later times follow."""
        return self.no_timestamps + 1

    @classmethod
    def of_model(cls, served: ResolvedModel) -> WhisperTokens:
        """Read them from a model's tokenizer. Blocks on the disk. Raises `EngineUnavailable`."""
        tokenizer, info = served.tokenizer, served.info

        def find(*texts: str) -> int:
            for text in texts:
                if (number := tokenizer.piece_to_id(text)) is not None:
                    return number
            raise EngineUnavailable(f"The tokenizer of {served.name} has no token {texts[0]}.")

        start, translate = find("<|startoftranscript|>"), find("<|translate|>")
        languages = {}
        if info.vocab_size >= _MULTILINGUAL_VOCAB:
            ids = range(start + 1, translate)
            languages = {tokenizer.id_to_piece(number)[2:-2]: number for number in ids}
        suppressed = read_generation_config(Path(info.path)).get("suppress_tokens") or []
        return cls(
            start=start,
            end=find("<|endoftext|>"),
            transcribe=find("<|transcribe|>"),
            translate=translate,
            previous=find("<|startofprev|>"),
            no_timestamps=find("<|notimestamps|>"),
            no_speech=find("<|nospeech|>", "<|nocaptions|>"),
            languages=languages,
            suppressed=tuple(
                number
                for number in suppressed
                if isinstance(number, int) and 0 <= number < info.vocab_size
            ),
        )


@dataclass(frozen=True, slots=True)
class Window:
    """The audio that a model processes at once.

    Attributes:
        digest: see `MediaItem`. tensors: as `encode_tensors` wrote them.
        start, seconds: its position in the file, in seconds, and its length.
        seek: its first frame within its stretch.
        first_sound: second of the file before which its stretch is silent.
    """

    digest: bytes
    tensors: bytes
    start: float
    seconds: float
    seek: int
    first_sound: float

    def file_time(self, seconds: float) -> float:
        return max(self.start + seconds, self.first_sound)


class Transcription:
    """A file's transcription, or its translation.

    Attributes:
        language: its code; "" until it is known.
        first_generation: for headers; None if the file is silent.
    """

    def __init__(
        self,
        ctx: RequestContext,
        served: ResolvedModel,
        form: AudioForm,
        sound: PreparedSound,
        tokens: WhisperTokens,
    ) -> None:
        """Raises `InvalidRequest` for what the model doesn't support."""
        self._ctx, self._served, self._form = ctx, served, form
        self._sound, self._tokens = sound, tokens
        self._running: set[Generation] = set()
        self.first_generation: Generation | None = None
        self._first_windows: list[Window] = []
        self._first_texts: Generation | None = None
        self.language = form.language
        if not tokens.languages:
            if form.translates:
                raise InvalidRequest(
                    f"The model {served.name} knows English alone and translates nothing.",
                    param="model",
                )
            if form.language not in ("", "en"):
                raise InvalidRequest(
                    f"The model {served.name} knows English alone, got {form.language[:20]!r}.",
                    param="language",
                )
            self.language = "en"
        elif form.language and form.language not in tokens.languages:
            raise InvalidRequest(
                f"language must be a code that the model knows, such as 'en'; got "
                f"{form.language[:20]!r}.",
                param="language",
            )

    @property
    def seconds(self) -> float:
        """Length of the file."""
        return self._sound.seconds

    def release(self) -> None:
        """Abort running requests and settle. Any thread."""
        for generation in tuple(self._running):
            generation.release()

    async def start(self) -> None:
        """Admit and submit the first window of each stretch, so that rejections come before the
        first byte of the response.

        Raises: what `Generation.start` raises.
        """
        stretches = self._sound.stretches
        if not stretches:
            return
        windows = await self._in_thread(lambda: [self._window(stretch, 0) for stretch in stretches])
        if not self.language:
            self.language = await self._detect_language(windows[0])
        self._first_windows = windows
        # Each stretch is billed with its first window: later windows and repeated decodings process
        # the same audio.
        audio_ms = [math.ceil(1000 * stretch.seconds) for stretch in stretches]
        temperature = self._form.temperature or 0
        self._first_texts = await self._submit(windows, temperature, audio_ms)

    async def windows(self) -> AsyncGenerator[WindowText, None]:
        """Texts of the windows in order, each as soon as it and all earlier ones are done."""
        if self._first_texts is None:
            return
        loop = asyncio.get_running_loop()
        first_texts = [loop.create_future() for _ in self._first_windows]
        queues = [asyncio.Queue[WindowText | None]() for _ in first_texts]
        tasks = [
            asyncio.create_task(self._transcribe_stretch(stretch, window, first, queue))
            for stretch, window, first, queue in zip(
                self._sound.stretches, self._first_windows, first_texts, queues, strict=True
            )
        ]
        reader = asyncio.create_task(self._read_first_texts(self._first_texts, first_texts))
        try:
            for task, queue in zip(tasks, queues, strict=True):
                while (text := await queue.get()) is not None:
                    yield text
                await task
            await reader
        finally:
            for task in (reader, *tasks):
                task.cancel()
            await asyncio.gather(reader, *tasks, return_exceptions=True)
            self.release()

    async def _read_first_texts(
        self, generation: Generation, first_texts: Sequence[asyncio.Future[WindowText]]
    ) -> None:
        """Pass the text of each stretch's first window to its stretch."""
        try:
            async for number, text in self._texts(generation, self._first_windows):
                first_texts[number].set_result(text)
        except Exception as error:
            for first_text in first_texts:
                if not first_text.done():
                    first_text.set_exception(error)

    async def _transcribe_stretch(
        self,
        stretch: SoundStretch,
        window: Window,
        first_text: Awaitable[WindowText],
        texts: asyncio.Queue[WindowText | None],
    ) -> None:
        """Put the texts of a stretch's windows into a queue, followed by None."""
        try:
            text = await self._with_fallback(window, await first_text)
            while True:
                texts.put_nowait(await self._with_words(window, self._spoken(text)))
                seek = window.seek + round(text.advance_s * FRAMES_PER_SECOND)
                if seek + MIN_WINDOW_FRAMES > stretch.seconds * FRAMES_PER_SECOND:
                    return
                window = await self._in_thread(partial(self._window, stretch, seek))
                text = await self._with_fallback(window, await self._ask_in_time(window))
        finally:
            texts.put_nowait(None)

    async def _with_fallback(self, window: Window, text: WindowText) -> WindowText:
        """A window's text, or that of the first higher temperature at which it is plausible."""
        if self._form.temperature is not None:
            return text
        for temperature in FALLBACK_TEMPERATURES:
            if self._is_plausible(text):
                break
            try:
                text = await self._ask(window, temperature)
            except REFUSALS:
                break  # an implausible text is better than none
        return text

    async def _with_words(self, window: Window, text: WindowText) -> WindowText:
        """A window's text with the times of its words, if they are requested."""
        tokens = [token for segment in text.segments for token in segment.tokens]
        if "word" not in self._form.granularities or not tokens:
            return text
        result = await self._in_time(partial(self._align, window, tokens))
        times = [window.file_time(time) for time in token_boundaries(result, len(tokens))]
        first, spaced = 0, self.language not in UNSPACED_LANGUAGES
        for segment in text.segments:
            end = first + len(segment.tokens)
            words = split_words(segment.tokens, self._tokenizer.token_bytes, spaced=spaced)
            text.words += words_of_segment(segment, words, times[first : end + 1])
            first = end
        return text

    async def _align(self, window: Window, tokens: list[int]) -> bytes:
        """Align the tokens of a window's text with the audio. Raises: what `PoolingRun` raises."""
        prompt = [*self._task_tokens(), self._tokens.no_timestamps]
        job = AlignmentJob(
            **self._job_fields([window], [prompt + tokens]),
            sampling=SamplingParams(),
            pooling=[alignment_params(prompt, window.seconds)],
        )
        await job.check()
        run = await PoolingRun.start(job)
        self._running.add(run)
        [result] = await run.result()
        self._running.discard(run)
        return result

    async def _ask_in_time(self, window: Window) -> WindowText:
        """The text of a later window. Raises as `_in_time`."""
        return await self._in_time(partial(self._ask, window, self._form.temperature or 0))

    @staticmethod
    async def _in_time(ask: Callable[[], Awaitable[T]]) -> T:
        """Run a request that follows an admitted one: it waits while rate limits are reached or
        queues are full.

        Raises `BudgetSpent`, and errors of the engine.
        """
        while True:
            try:
                return await ask()
            except BudgetSpent:
                raise
            except REFUSALS as refused:
                await asyncio.sleep(refused.retry_after or 1.0)

    async def _ask(self, window: Window, temperature: float) -> WindowText:
        """A window's text. Raises: what `Generation.start` and `next` raise."""
        generation = await self._submit([window], temperature)
        [(_, text)] = [answer async for answer in self._texts(generation, [window])]
        return text

    async def _texts(
        self, generation: Generation, windows: Sequence[Window]
    ) -> AsyncGenerator[tuple[int, WindowText], None]:
        """(window's index, text) in the order in which they finish."""
        deltas: dict[int, list[OutputDelta]] = {index: [] for index in range(len(windows))}
        while not generation.finished:
            for delta in await generation.next():
                deltas[delta.number].append(delta)
                if delta.finish_reason is not None:
                    number = delta.number
                    yield number, self._text(windows[number], generation.job, deltas.pop(number))
        self._running.discard(generation)

    async def _in_thread(self, function: Callable[[], T]) -> T:
        """Call a function that processes much audio in a thread."""
        limit_s, tenant = settings.QUIRE.render_timeout_s, self._ctx.caller.tenant
        return await get_render_pool().run_in_thread(tenant, limit_s, function)

    def _window(self, stretch: SoundStretch, seek: int) -> Window:
        """The window that begins `seek` frames after the start of its stretch."""
        info = self._served.info
        powers = np.frombuffer(stretch.powers, dtype=np.float32).reshape(-1, info.num_mels)
        num_frames = 2 * info.encoder_length
        heard = powers[seek : seek + num_frames]
        pads = pads_windows(info.mm_processor_kwargs)
        encoded = encode_tensors(
            window_tensors(heard, num_encoded(len(heard), num_frames, pads=pads))
        )
        offset = seek / FRAMES_PER_SECOND
        return Window(
            digest=media_digest("audio", encoded),
            tensors=encoded,
            start=stretch.start + offset,
            seconds=min(stretch.seconds - offset, num_frames / FRAMES_PER_SECOND),
            seek=seek,
            first_sound=stretch.start + stretch.lead,
        )

    async def _submit(
        self, windows: Sequence[Window], temperature: float, audio_ms: Sequence[int] = ()
    ) -> Generation:
        form, prompt = self._form, self._prompt()
        limit, num_logprobs = self._served.info.max_model_len, self._num_logprobs
        max_tokens = min(limit // 2, limit - len(prompt), form.max_completion_tokens or limit)
        sampling = SamplingParams(
            temperature=temperature,
            **form.sampling,
            seed=form.seed,
            max_tokens=max_tokens,
            logprobs=num_logprobs,
            prompt_logprobs=num_logprobs if len(prompt) > 1 else None,
            logit_bias=dict.fromkeys(self._tokens.suppressed, -100.0) or None,
            extra_args={"whisper_timestamps": self._timestamp_rules()} if self._is_timed else None,
        )
        return await self._generate(windows, prompt, sampling, audio_ms)

    @property
    def _num_logprobs(self) -> int:
        return min(_NUM_LOGPROBS, self._served.info.max_logprobs)

    @property
    def _is_timed(self) -> bool:
        """Whether the model generates timestamps: for the client, or to locate the next window."""
        window_seconds = 2 * self._served.info.encoder_length / FRAMES_PER_SECOND
        stretches = self._sound.stretches
        return self._form.is_timed or any(s.seconds > window_seconds for s in stretches)

    def _timestamp_rules(self) -> dict[str, int]:
        tokens = self._tokens
        return {
            "first": tokens.first_time,
            "end": tokens.end,
            "no_timestamps": tokens.no_timestamps,
        }

    async def _generate(
        self,
        windows: Sequence[Window],
        prompt: list[int],
        sampling: SamplingParams,
        audio_ms: Sequence[int] = (),
    ) -> Generation:
        job = Job(
            **self._job_fields(windows, [list(prompt) for _ in windows]),
            sampling=sampling,
            stream=self._form.stream,
            audio_ms=list(audio_ms),
        )
        await job.check()
        generation = await Generation.start(job)
        self._running.add(generation)
        if self.first_generation is None:
            self.first_generation = generation
        return generation

    def _job_fields(self, windows: Sequence[Window], prompts: list[list[int]]) -> dict[str, Any]:
        return {
            "ctx": self._ctx,
            "request_id": self._ctx.ids.new("transcript"),
            "endpoint": self._form.endpoint
            or ("audio.translations" if self._form.translates else "audio.transcriptions"),
            "model": self._served,
            "prompts": prompts,
            "media": [[MediaItem("audio", window.digest, ())] for window in windows],
            "media_data": {window.digest: window.tensors for window in windows},
            "is_continuation": self.first_generation is not None,
            "priority": self._form.priority,
        }

    async def _detect_language(self, window: Window) -> str:
        codes = {number: code for code, number in self._tokens.languages.items()}
        sampling = SamplingParams(temperature=0, max_tokens=1, allowed_token_ids=list(codes))
        generation = await self._generate([window], [self._tokens.start], sampling)
        language = "en"
        while not generation.finished:
            for delta in await generation.next():
                for token in delta.token_ids:
                    language = codes.get(token, language)
        self._running.discard(generation)
        return language

    def _prompt(self) -> list[int]:
        tokens, form = self._tokens, self._form
        prompt = self._task_tokens()
        if not self._is_timed:
            prompt.append(tokens.no_timestamps)
        if form.prompt:
            previous_tokens = self._tokenizer.encode(
                f" {form.prompt.strip()}", add_special_tokens=False, parse_special=False
            )
            limit = self._served.info.max_model_len // 2 - 1
            prompt = [tokens.previous, *previous_tokens[-limit:], *prompt]
        return prompt

    def _task_tokens(self) -> list[int]:
        """Tokens of the language and the task, which follow the start token."""
        tokens = self._tokens
        if not tokens.languages:
            return [tokens.start]
        task = tokens.translate if self._form.translates else tokens.transcribe
        return [tokens.start, tokens.languages[self.language], task]

    @property
    def _tokenizer(self) -> Tokenizer:
        return self._served.tokenizer

    def _text(self, window: Window, job: Job, deltas: list[OutputDelta]) -> WindowText:
        tokens = self._tokens
        entries = [entry.logprobs for delta in deltas for entry in delta.entries]
        ids = [token for delta in deltas for token in delta.token_ids]
        output = [token for token in ids if token < tokens.end or token >= tokens.first_time]
        parts, advance_s = split_segments(output, tokens.first_time, window.seconds)
        segments = [
            Segment(window.file_time(start), window.file_time(end), text, words)
            for start, end, words in parts
            if (text := self._tokenizer.decode(words)).strip()
        ]
        sum_logprobs = sum(entry.logprobs[0] for entry in entries)
        scores = next((d.prompt_logprobs for d in deltas if d.prompt_logprobs is not None), None)
        prompt = job.prompts[0]
        after_start = prompt.index(tokens.start) + 1
        first: TokenLogprobs | None = entries[0] if entries else None
        if after_start < len(prompt):
            first = scores[after_start] if scores is not None else None
        return WindowText(
            start=window.start,
            seconds=window.seconds,
            segments=segments,
            temperature=job.sampling.temperature,
            avg_logprob=sum_logprobs / max(1, len(entries)),
            no_speech_prob=_probability(first, tokens.no_speech),
            logprobs=[
                (entry.token_ids[0], entry.logprobs[0])
                for entry in entries
                if entry.token_ids[0] < tokens.end
            ][: sum(len(words) for _, _, words in parts)],
            advance_s=advance_s,
        )

    @staticmethod
    def _is_plausible(text: WindowText) -> bool:
        if text.no_speech_prob > MAX_NO_SPEECH_PROB and text.avg_logprob < MIN_AVG_LOGPROB:
            return True  # it is left out
        return (
            text.compression_ratio <= MAX_COMPRESSION_RATIO and text.avg_logprob >= MIN_AVG_LOGPROB
        )

    @staticmethod
    def _spoken(text: WindowText) -> WindowText:
        """The text, or an empty one if it is unlikely to be speech."""
        if text.no_speech_prob > MAX_NO_SPEECH_PROB and text.avg_logprob < MIN_AVG_LOGPROB:
            text.segments, text.logprobs, text.advance_s = [], [], text.seconds
        return text

    def logprob_objects(self, windows: Sequence[WindowText]) -> list[dict[str, Any]]:
        """OpenAI's `logprobs`."""
        return [
            {
                "token": self._tokenizer.token_text(token),
                "logprob": logprob,
                "bytes": list(self._tokenizer.token_bytes(token)),
            }
            for window in windows
            for token, logprob in window.logprobs
        ]


async def load_model(ctx: RequestContext, form: AudioForm) -> tuple[ResolvedModel, WhisperTokens]:
    """The model of a form. Raises what `resolve_model` raises, `InvalidRequest` for a model without
    audio input, and what `check_queue` raises.
    """
    served = await resolve_model(ctx, form.model)
    if not served.info.num_mels:
        raise InvalidRequest(f"The model {served.name} takes no audio.", param="model")
    check_queue(ctx, served, 0, stream=form.stream)
    return served, await run_in_file_thread(WhisperTokens.of_model, served)


async def open_transcription(ctx: RequestContext, form: AudioForm) -> Transcription:
    """A file's transcription, not started. Raises as `load_model`, and for an invalid file."""
    served, tokens = await load_model(ctx, form)
    source: bytes | MediaSource = form.data
    if form.file_url or form.file_id:
        param = "file_url" if form.file_url else "file_id"
        source = MediaSource(form.file_url, param, form.file_id, kind="audio")
    sound = await get_media_pool().prepare_sound(
        source,
        served.info.num_mels,
        2 * served.info.encoder_length,
        ctx.caller,
        form.detection,
    )
    return Transcription(ctx, served, form, sound, tokens)


def _probability(entry: TokenLogprobs | None, token: int) -> float:
    """Probability of a token if it is among the likeliest; else 0."""
    if entry is None:
        return 0.0
    scores = dict(zip(entry.token_ids, entry.logprobs, strict=True))
    return math.exp(scores[token]) if token in scores else 0.0
