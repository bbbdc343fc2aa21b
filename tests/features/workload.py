"""The requests of a run, and what came of them."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.contract.lora import AdapterRef
from engine.contract.messages import (
    EngineRequest,
    FlightRecord,
    MediaItem,
    TokenDelta,
    TokenLogprobs,
)
from engine.contract.pooling_params import PoolingParams
from engine.contract.sampling_params import ReasoningParams, SamplingParams
from engine.contract.structured_outputs import StructuredOutputsParams
from engine.multimodal.audio import FEATURES
from engine.multimodal.encoder_text import TEXT, TOKEN_IDS
from engine.multimodal.inputs import encode_tensors, media_digest
from engine.multimodal.pruning import RETAINED, retained_vectors, retention_mask
from inference.parsers.json_tools import HermesParser
from inference.parsers.tool_grammar import ToolFunction
from tests.engine.models import VOCAB

Features = frozenset[str]

#: Prompts, of which every second one asks for what a run is about. The others are beside it.
LENGTHS = (40, 33, 26, 60, 47, 18)
TOKENS, FORM, CALL = 16, 70, 130
#: Where windows give blocks back, a pool is short of them only for longer outputs.
TOKENS_OF_WINDOWS = 24
CAP = 11
#: Of the last a second output's seed can be asked for by a request of its own, of others the third.
SEEDS = {2: 2, 3: 3, 4: 7 << 60, 5: 5}
CLOSE, BUDGET = [40, 41], 6
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "blue"]}, "size": {"enum": [1, 22, 333]}},
    "required": ["color", "size"],
    "additionalProperties": False,
}
FUNCTION = ToolFunction("paint", SCHEMA, strict=True)
#: What only a model that generates can be asked for.
OF_TEXT = frozenset({"grammar", "tools", "reasoning", "logprobs", "n > 1", "beams", "token caps"})


#: Where a request's picture stands, and how many tokens stand for it.
PICTURE_START, PICTURE_TOKENS = 3, 16
#: Frames, rows and columns of a video's vectors, of which as many are kept.
VIDEO_GRID = (4, 2, 3)
#: It means nothing to the models without pictures.
IMAGE_TOKEN_ID = 312
#: States that the encoder of the model with ears has, and at most that of texts.
NUM_STATES = 50


@dataclass(slots=True)
class Output:
    """One output of one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    total: float | None = None
    pooled: bytes | None = None
    flight: FlightRecord = field(default_factory=FlightRecord)

    def add(self, delta: TokenDelta) -> None:
        """Its next delta."""
        assert delta.start == len(self.tokens) or not delta.token_ids
        self.tokens += delta.token_ids
        self.logprobs += delta.logprobs or []
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        self.total, self.pooled = delta.cumulative_logprob, delta.pooled
        self.flight = delta.flight or self.flight

    @property
    def words(self) -> tuple[object, ...]:
        """What a client reads."""
        return self.tokens, self.finish_reason, self.stop_reason

    @property
    def bits(self) -> tuple[object, ...]:
        """The same with all numbers."""
        return *self.words, self.logprobs, self.total, self.pooled


#: Outputs by the number of the request and their own.
Outputs = dict[tuple[int, int], Output]


def asks(number: int) -> bool:
    """Whether a request asks for what the run is about."""
    return number % 2 == 0


def prompt_of(number: int, *, with_picture: bool = False) -> list[int]:
    """Every third prompt begins as the first does."""
    prompt = _text_of(number)
    if with_picture:
        prompt[PICTURE_START : PICTURE_START + PICTURE_TOKENS] = [IMAGE_TOKEN_ID] * PICTURE_TOKENS
    return prompt


def pixels_of(number: int) -> dict[str, np.ndarray]:
    """A picture as its processor prepares it."""
    values = np.random.default_rng(number).standard_normal((1, 3, 28, 28))
    return {"pixel_values": values.astype(np.float32)}


def frames_of(number: int) -> dict[str, np.ndarray]:
    """A video as its processor prepares it, without a third of its vectors."""
    frames, rows, columns = VIDEO_GRID
    num_vectors = frames * rows * columns
    values = 3 * np.random.default_rng(number).standard_normal((4 * num_vectors, 3 * 2 * 7 * 7))
    tensors = {
        "pixel_values": values.astype(np.float32),
        "image_grid_thw": np.array([[frames, 2 * rows, 2 * columns]]),
    }
    retained = retained_vectors("video", tensors, num_vectors, VIDEO_GRID, 1 / 3)
    assert retained is not None
    return {**tensors, RETAINED: retained}


def sound_of(number: int) -> dict[str, np.ndarray]:
    """A window of sound as its processor prepares it."""
    values = np.random.default_rng(number).standard_normal((80, 2 * NUM_STATES))
    return {FEATURES: values.astype(np.float32)}


def encoder_text_of(number: int) -> dict[str, np.ndarray]:
    """A text as its processor prepares it, each of another length."""
    rng = np.random.default_rng(number)
    return {TOKEN_IDS: rng.integers(50, VOCAB, NUM_STATES - 7 * number)}


def _encoder_text(number: int) -> MediaItem:
    digest = media_digest(TEXT, encode_tensors(encoder_text_of(number)))
    return MediaItem(TEXT, digest, ())


def _sound(number: int) -> MediaItem:
    return MediaItem("audio", media_digest("audio", encode_tensors(sound_of(number))), ())


def _picture(number: int) -> MediaItem:
    digest = media_digest("image", encode_tensors(pixels_of(number)))
    return MediaItem("image", digest, ((PICTURE_START, PICTURE_TOKENS),))


def _video(number: int) -> MediaItem:
    tensors = frames_of(number)
    digest = media_digest("video", encode_tensors(tensors))
    retained = retention_mask(tensors[RETAINED], math.prod(VIDEO_GRID))
    ranges = ((PICTURE_START, PICTURE_TOKENS),)
    return MediaItem("video", digest, ranges, grid=VIDEO_GRID, retained=retained)


def _text_of(number: int) -> list[int]:
    rng, stem = random.Random(number), random.Random(100)
    shared = [stem.randrange(50, VOCAB) for _ in range(16)] if number % 3 == 0 else []
    return shared + [rng.randrange(50, VOCAB) for _ in range(LENGTHS[number] - len(shared))]


def params_of(number: int, features: Features) -> SamplingParams:
    """The first two requests are greedy, the others drawn with a seed."""
    chosen: dict[str, Any] = {"temperature": 0} if number < 2 else {"seed": SEEDS[number]}
    tokens = TOKENS_OF_WINDOWS if "windows" in features else TOKENS
    options = {"max_tokens": tokens, "ignore_eos": True, **chosen}
    if asks(number):
        options |= _asked(features)
    return SamplingParams(**options)


def _asked(features: Features) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if form := _form(features):
        longest = CALL if "tools" in features else FORM
        options |= {"structured_outputs": form, "max_tokens": longest, "ignore_eos": False}
    if "reasoning" in features:
        options["thinking"] = ReasoningParams(end=[CLOSE], budget=BUDGET)
    if "logprobs" in features:
        options["logprobs"] = 3
    if "n > 1" in features:
        options["n"] = 3
    if "beams" in features:
        searches = {"use_beam_search": True, "best_of": 4, "temperature": 0, "seed": None}
        options |= searches | {"n": options.get("n", 2)}
    return options


def _form(features: Features) -> StructuredOutputsParams | None:
    """As a gateway asks for it: an answer by schema, calls, or either."""
    if "tools" in features:
        answer = {"answer": SCHEMA} if "grammar" in features else {}
        grammar = HermesParser.layout.grammar([FUNCTION], {}, parallel=False, **answer)
        return StructuredOutputsParams(grammar=grammar)
    if "grammar" in features:
        return StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
    return None


def request(
    number: int, features: Features, adapter: AdapterRef | None, run: str = "r"
) -> EngineRequest:
    """One request of a run."""
    pools = "pooling" in features and not features & OF_TEXT
    sees = bool(features & {"pictures", "videos"}) and asks(number)
    media: list[MediaItem] = []
    tensors: dict[str, np.ndarray] = {}
    if sees and "videos" in features:
        media, tensors = [VIDEOS[number]], frames_of(number)
    elif sees:
        media, tensors = [PICTURES[number]], pixels_of(number)
    if "speech" in features:  # its model takes no prompt without sound
        media, tensors = [SOUNDS[number]], sound_of(number)
    if "encoded texts" in features:
        media, tensors = [ENCODER_TEXTS[number]], encoder_text_of(number)
    return EngineRequest(
        request_id=f"{run}-{number}",
        gateway_id="",
        prompt_token_ids=prompt_of(number, with_picture=sees),
        media=media,
        media_data={item.digest: encode_tensors(tensors) for item in media},
        sampling=SamplingParams() if pools else params_of(number, features),
        pooling=PoolingParams(task="embed") if pools else None,
        adapter=adapter if asks(number) else None,
        token_cap=CAP if "token caps" in features and asks(number) else None,
    )


#: By the number of the request.
PICTURES = {number: _picture(number) for number in range(len(LENGTHS)) if asks(number)}
VIDEOS = {number: _video(number) for number in range(len(LENGTHS)) if asks(number)}
SOUNDS = {number: _sound(number) for number in range(len(LENGTHS))}
ENCODER_TEXTS = {number: _encoder_text(number) for number in range(len(LENGTHS))}
