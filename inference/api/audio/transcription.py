"""`Transcription`: the windows of a file, from the engine's tokens to their text.

What OpenAI's Whisper does with a window that came out badly is done here too: it is asked again at
a higher temperature, and what is unlikely to be speech is left out.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.contract.errors import EngineOverloaded, EngineUnavailable, InvalidRequest
from engine.contract.messages import MediaItem, TokenLogprobs
from engine.contract.sampling_params import SamplingParams
from engine.multimodal.inputs import PreparedSound, PreparedWindow
from engine.text import Tokenizer
from engine.text.tokenizer_files import read_generation_config
from inference.api.audio.form import AudioForm
from inference.api.audio.segments import Segment, WindowText, split_segments
from inference.generation.generation import Generation
from inference.generation.output import OutputDelta
from inference.request.context import RequestContext
from inference.request.job import Job, ResolvedModel
from metering.access import RateLimited

#: Temperatures at which a window is asked again, while its text isn't plausible.
FALLBACK_TEMPERATURES = (0.2, 0.4, 0.6, 0.8, 1.0)
#: Whisper's limits of plausible text.
MAX_COMPRESSION_RATIO, MIN_AVG_LOGPROB, MAX_NO_SPEECH_PROB = 2.4, -1.0, 0.6
#: Alternatives by which the probability of no speech is read, where the model gives so many.
_NUM_LOGPROBS = 5
#: Models with fewer tokens know English alone.
_MULTILINGUAL_VOCAB = 51_865


@dataclass(frozen=True, slots=True)
class WhisperTokens:
    """Ids of the tokens that tell a model what to do.

    Attributes:
        languages: by code; {}: the model knows English alone.
        suppressed: tokens that are never said.
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
        """Of a model's tokenizer. Blocks on the disk. Raises `EngineUnavailable`."""
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


class Transcription:
    """A file's transcription, or its translation.

    Attributes:
        language: its code; "" until it is known.
        first_generation: for headers; None where the file is silent.
    """

    def __init__(
        self,
        ctx: RequestContext,
        served: ResolvedModel,
        form: AudioForm,
        sound: PreparedSound,
        tokens: WhisperTokens,
    ) -> None:
        """Raises `InvalidRequest` for what the model doesn't do."""
        self._ctx, self._served, self._form = ctx, served, form
        self._sound, self._tokens = sound, tokens
        self._running: Generation | None = None
        self.first_generation: Generation | None = None
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
        """Abort what runs and settle. Any thread."""
        if self._running is not None:
            self._running.release()

    async def start(self) -> None:
        """Admit and submit all windows, so that what is refused is before the first byte.

        Raises: what `Generation.start` raises.
        """
        windows = self._sound.windows
        if not windows:
            return
        if not self.language:
            self.language = await self._detect_language(windows[0])
        self.first_generation = await self._submit(
            range(len(windows)),
            self._form.temperature or 0,
            is_continuation=self._running is not None,
        )

    async def windows(self) -> AsyncGenerator[WindowText, None]:
        """Texts of the windows in their order, each once it and those before it are done."""
        generation, count = self.first_generation, len(self._sound.windows)
        if generation is None:
            return
        done: dict[int, WindowText] = {}
        retried: list[int] = []
        next_number = 0
        async for number, text in self._texts(generation, range(count)):
            if self._form.temperature is None and not self._is_plausible(text):
                retried.append(number)
            done[number] = text
            while next_number in done and next_number not in retried:
                yield self._spoken(done[next_number])
                next_number += 1
        for temperature in FALLBACK_TEMPERATURES:
            if not retried:
                break
            numbers, retried = sorted(retried), []
            try:
                again = await self._submit(numbers, temperature, is_continuation=True)
                async for number, text in self._texts(again, numbers):
                    done[number] = text
                    if not self._is_plausible(text):
                        retried.append(number)
            except (RateLimited, EngineOverloaded):
                break  # the texts at hand are worth more than none
        for number in range(next_number, count):
            yield self._spoken(done[number])

    async def _texts(
        self, generation: Generation, numbers: Sequence[int]
    ) -> AsyncGenerator[tuple[int, WindowText], None]:
        """(window's number, text) in the order in which they end."""
        deltas: dict[int, list[OutputDelta]] = {index: [] for index in range(len(numbers))}
        while not generation.finished:
            for delta in await generation.next():
                deltas[delta.number].append(delta)
                if delta.finish_reason is not None:
                    number = numbers[delta.number]
                    yield number, self._text(number, generation.job, deltas.pop(delta.number))

    async def _submit(
        self, numbers: Sequence[int], temperature: float, *, is_continuation: bool = False
    ) -> Generation:
        windows = [self._sound.windows[number] for number in numbers]
        form, prompt = self._form, self._prompt()
        limit, num_logprobs = self._served.info.max_model_len, self._num_logprobs
        max_tokens = min(limit // 2, limit - len(prompt), form.max_completion_tokens or limit)
        sampling = SamplingParams(
            temperature=temperature,
            top_p=form.top_p,
            seed=form.seed,
            max_tokens=max_tokens,
            logprobs=num_logprobs,
            prompt_logprobs=num_logprobs if len(prompt) > 1 else None,
            logit_bias=dict.fromkeys(self._tokens.suppressed, -100.0) or None,
            extra_args={"whisper_timestamps": self._timestamp_rules()} if form.is_timed else None,
        )
        generation = await self._generate(
            windows, prompt, sampling, is_continuation=is_continuation
        )
        self._running = generation
        return generation

    @property
    def _num_logprobs(self) -> int:
        return min(_NUM_LOGPROBS, self._served.info.max_logprobs)

    def _timestamp_rules(self) -> dict[str, int]:
        tokens = self._tokens
        return {
            "first": tokens.first_time,
            "end": tokens.end,
            "no_timestamps": tokens.no_timestamps,
        }

    async def _generate(
        self,
        windows: Sequence[PreparedWindow],
        prompt: list[int],
        sampling: SamplingParams,
        *,
        is_continuation: bool = False,
    ) -> Generation:
        job = Job(
            ctx=self._ctx,
            request_id=self._ctx.ids.new("transcript"),
            endpoint="audio.translations" if self._form.translates else "audio.transcriptions",
            model=self._served,
            prompts=[list(prompt) for _ in windows],
            media=[[MediaItem("audio", window.digest, ())] for window in windows],
            media_data={window.digest: window.tensors for window in windows},
            sampling=sampling,
            stream=self._form.stream,
            is_continuation=is_continuation,
        )
        await job.check()
        return await Generation.start(job)

    async def _detect_language(self, window: PreparedWindow) -> str:
        codes = {number: code for code, number in self._tokens.languages.items()}
        sampling = SamplingParams(temperature=0, max_tokens=1, allowed_token_ids=list(codes))
        self._running = await self._generate([window], [self._tokens.start], sampling)
        language = "en"
        while not self._running.finished:
            for delta in await self._running.next():
                for token in delta.token_ids:
                    language = codes.get(token, language)
        return language

    def _prompt(self) -> list[int]:
        tokens, form = self._tokens, self._form
        prompt = [tokens.start]
        if tokens.languages:
            task = tokens.translate if form.translates else tokens.transcribe
            prompt += [tokens.languages[self.language], task]
        if not form.is_timed:
            prompt.append(tokens.no_timestamps)
        if form.prompt:
            previous_tokens = self._tokenizer.encode(
                f" {form.prompt.strip()}", add_special_tokens=False, parse_special=False
            )
            limit = self._served.info.max_model_len // 2 - 1
            prompt = [tokens.previous, *previous_tokens[-limit:], *prompt]
        return prompt

    @property
    def _tokenizer(self) -> Tokenizer:
        return self._served.tokenizer

    def _text(self, number: int, job: Job, deltas: list[OutputDelta]) -> WindowText:
        """A window's text from its output."""
        tokens, window = self._tokens, self._sound.windows[number]
        entries = [entry.logprobs for delta in deltas for entry in delta.entries]
        ids = [token for delta in deltas for token in delta.token_ids]
        output = [token for token in ids if token < tokens.end or token >= tokens.first_time]
        segments = [
            Segment(window.start + start, window.start + end, text, words)
            for start, end, words in split_segments(output, tokens.first_time, window.seconds)
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
            ],
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
        """The text, or none where it is unlikely that anybody speaks."""
        if text.no_speech_prob > MAX_NO_SPEECH_PROB and text.avg_logprob < MIN_AVG_LOGPROB:
            text.segments, text.logprobs = [], []
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


def _probability(entry: TokenLogprobs | None, token: int) -> float:
    """Of a token, where it is among the likeliest; else 0."""
    if entry is None:
        return 0.0
    scores = dict(zip(entry.token_ids, entry.logprobs, strict=True))
    return math.exp(scores[token]) if token in scores else 0.0
