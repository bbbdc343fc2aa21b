"""Offline prompts in the formats that `LLM.generate` accepts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NotRequired, TypedDict

import numpy as np
from torch import Tensor

from engine.contract.errors import InvalidRequest
from engine.contract.lora import AdapterRef, LoRARequest
from engine.multimodal.audio_prompts import AudioProcessor
from engine.multimodal.encoder_text import EncoderText, EncoderTextProcessor
from engine.multimodal.placeholders import expand_placeholders, locate_media
from engine.multimodal.processor import MediaProcessor, PreparedMedia, to_rgb
from engine.multimodal.registry import RegisteredProcessor
from engine.multimodal.sound_processor import SoundProcessor
from engine.multimodal.video_files import DEFAULT_FPS, MAX_FPS, MAX_FRAMES, Video
from engine.text.tokenizer import Tokenizer


class MultiModalDataDict(TypedDict, total=False):
    """Media of a prompt, in the order of their placeholders. Each is one item or a list.

    Attributes:
        image: a PIL image or an array, uint8 [height, width, 3].
        video: frames, uint8 [n, height, width, 3] or a list of PIL images; or these with their
            rate, (frames, {"fps": frames per second}).
        audio: (samples, rate), or samples at 16 kHz.
    """

    image: Any
    video: Any
    audio: Any


class TextPrompt(TypedDict):
    """A prompt as text.

    Attributes:
        mm_processor_kwargs: options of the model's image processor.
        multi_modal_uuids: by kind, names of its items: hints, for content tells them apart.
        cache_salt: only prompts with the same salt share cached prefixes.
    """

    prompt: str
    multi_modal_data: NotRequired[MultiModalDataDict]
    multi_modal_uuids: NotRequired[dict[str, Any]]
    mm_processor_kwargs: NotRequired[dict[str, Any]]
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids. `prompt` is returned with the result."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    multi_modal_data: NotRequired[MultiModalDataDict]
    multi_modal_uuids: NotRequired[dict[str, Any]]
    mm_processor_kwargs: NotRequired[dict[str, Any]]
    cache_salt: NotRequired[str]


class EmbedsPrompt(TypedDict):
    """A prompt as embeddings, float [num_tokens, hidden]."""

    prompt_embeds: Tensor
    cache_salt: NotRequired[str]


class ExplicitEncoderDecoderPrompt(TypedDict):
    """The encoder's prompt, and the decoder's, None for the model's start tokens."""

    encoder_prompt: str | list[int] | dict[str, Any]
    decoder_prompt: str | list[int] | dict[str, Any] | None


AnyProcessor = MediaProcessor | SoundProcessor | AudioProcessor | RegisteredProcessor
#: A function that creates the model's processor on the first call, or the processor of texts.
ProcessorFactory = Callable[[], AnyProcessor] | EncoderTextProcessor
Prompt = str | list[int] | TextPrompt | TokensPrompt | EmbedsPrompt | dict[str, Any]
Prompt |= ExplicitEncoderDecoderPrompt
#: vLLM's current names, and those of its manual.
PromptType = Prompt
PromptInputs = Prompt
PromptStrictInputs = Prompt
_KEYS = frozenset(
    {
        "prompt",
        "prompt_token_ids",
        "prompt_embeds",
        "multi_modal_data",
        "multi_modal_uuids",
        "mm_processor_kwargs",
        "cache_salt",
    }
)
#: Other inputs of vLLM -> why they aren't supported.
_REFUSED = {
    "encoder_prompt": "the model has no encoder; leave encoder_prompt out",
    "decoder_prompt": "the model has no encoder; leave decoder_prompt out",
    "negative_prompt": "there is no negative_prompt",
    "token_type_ids": "token types come from the model; leave token_type_ids out",
}


class TokenPrompt(NamedTuple):
    """A tokenized prompt.

    Attributes:
        text: its text; None if it was given as ids or embeddings.
        token_ids: its ids, with the tokens of `media`.
        embeds: float [num_tokens, hidden], replaces the embeddings of the ids, which have no
            meaning then.
        cache_salt: only prompts with the same salt share cached prefixes.
        adapter: the adapter to use, or None.
        lora_request: the caller's request for the adapter.
        media: prepared media, or the encoder's text.
        encoder_text, encoder_token_ids: the text, if it was given, and ids of an encoder's prompt.
    """

    text: str | None
    token_ids: list[int]
    embeds: Tensor | None = None
    cache_salt: str = ""
    adapter: AdapterRef | None = None
    lora_request: LoRARequest | None = None
    media: tuple[PreparedMedia | EncoderText, ...] = ()
    encoder_text: str | None = None
    encoder_token_ids: list[int] | None = None

    def last(self, count: int | None) -> TokenPrompt:
        """Return the prompt with its last `count` tokens; None for all.

        Raises `InvalidRequest` if this cuts a prompt with media.
        """
        if count is None:
            return self
        if self.media and count < len(self.token_ids):
            raise InvalidRequest(
                "truncate_prompt_tokens can't cut a prompt with images.",
                param="truncate_prompt_tokens",
            )
        embeds = None if self.embeds is None else self.embeds[-count:]
        return self._replace(token_ids=self.token_ids[-count:], embeds=embeds)


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one or several prompts as a list. A list of ints is one prompt."""
    if isinstance(prompts, str | dict):
        return [prompts]
    entries: list[Any] = list(prompts)
    if entries and all(type(entry) is int for entry in entries):
        return [entries]
    return entries


def resolve_prompt(prompt: Prompt | None, inputs: Prompt | None) -> Prompt:
    """Return `prompt` or `inputs`, its old name. Raises `TypeError` for both or neither."""
    if prompt is not None and inputs is not None:
        raise TypeError("prompt and inputs are the same: give one of them.")
    resolved = inputs if prompt is None else prompt
    if resolved is None:
        raise TypeError("missing 1 required argument: 'prompt'")
    return resolved


def tokenize_prompt(
    prompt: Prompt,
    tokenizer: Tokenizer | None,
    processor: ProcessorFactory | None = None,
) -> TokenPrompt:
    """Tokenize a prompt: text, token ids, {"prompt": text}, {"prompt_token_ids": ids} or
    {"prompt_embeds": tensor}. A dict may also have "cache_salt", so that only prompts with the same
    salt share cached prefixes, and "multi_modal_data".

    For a model with a text encoder, this is the encoder's prompt, or both are in
    {"encoder_prompt": prompt, "decoder_prompt": prompt or None}.

    `processor` creates the model's processor; None for a model without media.

    Raises `InvalidRequest` for other formats and unknown keys, for invalid media, and for text
    without a tokenizer.
    """
    if isinstance(processor, EncoderTextProcessor):
        return _with_encoder_text(prompt, tokenizer, processor)
    if isinstance(prompt, dict):
        return _of_dict(dict(prompt), tokenizer, processor)
    if isinstance(prompt, list):
        return TokenPrompt(None, _checked(prompt))
    if not isinstance(prompt, str):
        raise InvalidRequest(
            f"A prompt is a text, token ids or a dict, not {type(prompt).__name__}.", param="prompt"
        )
    if tokenizer is None:
        raise InvalidRequest("With skip_tokenizer_init prompts must be token ids.", param="prompt")
    return TokenPrompt(prompt, tokenizer.encode(prompt))


def _of_dict(
    prompt: dict[str, Any],
    tokenizer: Tokenizer | None,
    processor: ProcessorFactory | None,
) -> TokenPrompt:
    has_media = "encoder_prompt" in prompt or prompt.get("multi_modal_data")
    media_processor = processor() if callable(processor) and has_media else None
    if isinstance(media_processor, SoundProcessor):
        prompt = _merge_encoder_prompt(prompt)
    for key, value in prompt.items():
        if key not in _KEYS and value not in (None, {}):
            why = _REFUSED.get(key, f"there is no {key!r}; there are {', '.join(sorted(_KEYS))}")
            raise InvalidRequest(f"A prompt's key can't be used: {why}.", param=key)
    if (uuids := prompt.get("multi_modal_uuids")) is not None:
        _check_uuids(uuids, prompt.get("multi_modal_data"))
    salt = prompt.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise InvalidRequest("cache_salt must be a text that isn't empty.", param="cache_salt")
    if prompt.get("mm_processor_kwargs") and not prompt.get("multi_modal_data"):
        raise InvalidRequest(
            "mm_processor_kwargs belong to multi_modal_data, which is missing.",
            param="mm_processor_kwargs",
        )
    if prompt.get("multi_modal_data"):
        tokens = _with_media(prompt, tokenizer, media_processor)
    elif "prompt_embeds" in prompt:
        tokens = _of_embeds(prompt["prompt_embeds"])
    elif "prompt_token_ids" in prompt:
        tokens = TokenPrompt(prompt.get("prompt"), _checked(prompt["prompt_token_ids"]))
    elif isinstance(prompt.get("prompt"), str | list):
        tokens = tokenize_prompt(prompt["prompt"], tokenizer)
    else:
        raise InvalidRequest(
            "A prompt dict needs 'prompt', 'prompt_token_ids' or 'prompt_embeds'.",
            param="prompt",
        )
    return tokens._replace(cache_salt=salt or "")


def _with_encoder_text(
    prompt: Prompt, tokenizer: Tokenizer | None, processor: EncoderTextProcessor
) -> TokenPrompt:
    """Return the decoder's prompt, with the encoder's text as its media."""
    parts: dict[str, Any] = {}
    if isinstance(prompt, dict) and "encoder_prompt" in prompt:
        parts = dict(prompt)
        encoder = tokenize_prompt(parts.pop("encoder_prompt"), tokenizer)
    else:
        encoder = tokenize_prompt(prompt, tokenizer)
    decoder = TokenPrompt(None, [])
    begin = parts.pop("decoder_prompt", None)
    if isinstance(begin, dict) and isinstance(begin.get("prompt"), str) and len(begin) == 1:
        begin = begin["prompt"]
    if isinstance(begin, str) and tokenizer is not None:
        # A special token at the prompt's end would end the output.
        decoder = TokenPrompt(begin, tokenizer.encode(begin, add_special_tokens=False))
    elif begin is not None:
        decoder = tokenize_prompt(begin, tokenizer)
    if parts:
        raise InvalidRequest(
            f"A prompt in two parts has no {sorted(parts)[0]!r} beside them.",
            param=sorted(parts)[0],
        )
    if encoder.embeds is not None or decoder.embeds is not None:
        raise InvalidRequest("An encoder's model takes no prompt_embeds.", param="prompt_embeds")
    return TokenPrompt(
        decoder.text,
        processor.begin(decoder.token_ids),
        cache_salt=encoder.cache_salt or decoder.cache_salt,
        media=(processor.prepare(encoder.token_ids),),
        encoder_text=encoder.text,
        encoder_token_ids=encoder.token_ids,
    )


def _check_uuids(uuids: Any, data: Any) -> None:
    """Raise `InvalidRequest` unless they name items of multi_modal_data, by kind."""
    kinds = data if isinstance(data, dict) else {}
    valid = isinstance(uuids, dict) and uuids.keys() <= kinds.keys()
    for kind, names in uuids.items() if valid else ():
        names = names if isinstance(names, list) else [names]
        valid &= len(names) == _num_items(kind, kinds[kind])
        valid &= all(isinstance(name, str | None) for name in names)
    if not valid:
        raise InvalidRequest(
            "multi_modal_uuids must be a dict with a text or None for each item of "
            "multi_modal_data, by kind.",
            param="multi_modal_uuids",
        )


def _num_items(kind: str, values: Any) -> int:
    """Number of items of a kind of multi_modal_data."""
    if kind == "video":
        return len(values) if _are_videos(values) else 1
    # A tuple may be a sound and its rate.
    lists = (list, tuple) if kind == "image" else list
    return len(values) if isinstance(values, lists) else 1


def _with_media(
    prompt: dict[str, Any],
    tokenizer: Tokenizer | None,
    processor: AnyProcessor | None,
) -> TokenPrompt:
    """Return a prompt with prepared media, whose placeholders are expanded."""
    if processor is None:
        raise InvalidRequest(
            "The model takes no images and no audio: leave multi_modal_data out.",
            param="multi_modal_data",
        )
    if isinstance(processor, SoundProcessor):
        return _with_sound(prompt, tokenizer, processor)
    if tokenizer is None:
        raise InvalidRequest("Images and audio need a tokenizer.", param="multi_modal_data")
    if isinstance(processor, AudioProcessor):
        return _with_audios(prompt, tokenizer, processor)
    if isinstance(processor, RegisteredProcessor):
        return _with_registered(prompt, tokenizer, processor)
    options = prompt.get("mm_processor_kwargs") or {}
    data = prompt["multi_modal_data"]
    if not isinstance(data, dict) or set(data) - {"image", "video"}:
        raise InvalidRequest(
            "multi_modal_data must be a dict with the keys 'image' and 'video'.",
            param="multi_modal_data",
        )
    media = (
        *_prepared_images(data.get("image"), processor, options),
        *(processor.prepare_video(video, options) for video in _videos(data.get("video"))),
    )
    text = prompt.get("prompt")
    if processor.image_or_text:
        if text or prompt.get("prompt_token_ids") or len(media) != 1:
            raise InvalidRequest(
                "A prompt of this model is a text or one image, with an empty prompt.",
                param="prompt",
            )
        token_ids = [processor.image_token_id]
    elif "prompt_token_ids" in prompt:
        token_ids = _checked(prompt["prompt_token_ids"])
        placeholders = Counter(item.placeholder_id for item in media)
        if all(token_ids.count(token_id) == n for token_id, n in placeholders.items()):
            token_ids, order = expand_placeholders(token_ids, media, tokenizer)
            media = tuple(media[index] for index in order)
    elif isinstance(text, str):
        expanded, media = processor.expand(text, media)
        token_ids = tokenizer.encode(expanded)
    else:
        raise InvalidRequest("Images need a prompt or prompt_token_ids.", param="prompt")
    locate_media(token_ids, media)
    return TokenPrompt(text, token_ids, media=media)


def _text_and_tokens(prompt: dict[str, Any], tokenizer: Tokenizer) -> tuple[Any, list[int]]:
    """Return the text, if any, and the tokens of a prompt with media."""
    text = prompt.get("prompt")
    if "prompt_token_ids" in prompt:
        return text, _checked(prompt["prompt_token_ids"])
    if isinstance(text, str):
        return text, tokenizer.encode(text)
    raise InvalidRequest("Media need a prompt or prompt_token_ids.", param="prompt")


def _with_registered(
    prompt: dict[str, Any], tokenizer: Tokenizer, processor: RegisteredProcessor
) -> TokenPrompt:
    """Return the prompt of a model class that registered its image processing."""
    data = prompt["multi_modal_data"]
    if not isinstance(data, dict) or set(data) != {"image"} or prompt.get("mm_processor_kwargs"):
        raise InvalidRequest(
            "multi_modal_data must be a dict with the key 'image', without mm_processor_kwargs.",
            param="multi_modal_data",
        )
    text, token_ids = _text_and_tokens(prompt, tokenizer)
    if not (images := _images(data["image"])):
        return TokenPrompt(text, token_ids)
    token_ids, media = processor.process(text, token_ids, images)
    locate_media(token_ids, media)
    return TokenPrompt(text, token_ids, media=media)


def _with_audios(
    prompt: dict[str, Any], tokenizer: Tokenizer, processor: AudioProcessor
) -> TokenPrompt:
    """Return a prompt with prepared audio, whose placeholders are expanded."""
    data = _audios(prompt)
    # A list of numbers is a single item.
    numbers = int | float | np.number
    is_list = isinstance(data, list) and not all(isinstance(entry, numbers) for entry in data)
    audios = data if is_list else [data]
    media = tuple(
        processor.prepare_embeds(audio.detach().float().cpu().numpy())
        if isinstance(audio, Tensor) and audio.dim() == 2
        else processor.prepare_file(audio)
        if isinstance(audio, bytes)
        else processor.prepare(audio)
        for audio in audios
    )
    text, token_ids = _text_and_tokens(prompt, tokenizer)
    expanded, order = expand_placeholders(token_ids, media, tokenizer)
    media = tuple(media[index] for index in order)
    locate_media(expanded, media)
    return TokenPrompt(text, expanded, media=media)


def _audios(prompt: dict[str, Any]) -> Any:
    """Return a prompt's audio items. Raises `InvalidRequest` for other media and for options."""
    data = prompt["multi_modal_data"]
    if not isinstance(data, dict) or set(data) != {"audio"}:
        raise InvalidRequest(
            "multi_modal_data must be a dict with the key 'audio'.", param="multi_modal_data"
        )
    if prompt.get("mm_processor_kwargs"):
        raise InvalidRequest(
            "mm_processor_kwargs change nothing of audio: leave them out.",
            param="mm_processor_kwargs",
        )
    return data["audio"]


def _merge_encoder_prompt(prompt: dict[str, Any]) -> dict[str, Any]:
    """Combine a prompt in two parts to the decoder's with the encoder's media.

    Raises `InvalidRequest` for parts with other content.
    """
    if "encoder_prompt" not in prompt:
        return prompt
    encoder, decoder = prompt["encoder_prompt"], prompt.get("decoder_prompt")
    if not isinstance(encoder, dict) or encoder.get("prompt") or encoder.get("prompt_token_ids"):
        raise InvalidRequest(
            "encoder_prompt must be a dict with multi_modal_data and no text.",
            param="encoder_prompt",
        )
    if isinstance(decoder, list):
        decoder = {"prompt_token_ids": decoder}
    elif isinstance(decoder, str):
        decoder = {"prompt": decoder}
    if not isinstance(decoder, dict):
        raise InvalidRequest(
            "decoder_prompt must be a text, token ids or a dict of these.", param="decoder_prompt"
        )
    rest = {key: prompt[key] for key in prompt if key not in ("encoder_prompt", "decoder_prompt")}
    return rest | decoder | {"multi_modal_data": encoder.get("multi_modal_data")}


def _with_sound(
    prompt: dict[str, Any], tokenizer: Tokenizer | None, processor: SoundProcessor
) -> TokenPrompt:
    """Return the decoder's prompt of a model like Whisper, with prepared audio."""
    audio = _audios(prompt)
    if isinstance(audio, list) and len(audio) == 1:
        [audio] = audio
    media = (processor.prepare(audio),)
    text = prompt.get("prompt")
    if "prompt_token_ids" in prompt:
        return TokenPrompt(text, _checked(prompt["prompt_token_ids"]), media=media)
    if not isinstance(text, str):
        raise InvalidRequest("Audio needs a prompt or prompt_token_ids.", param="prompt")
    if tokenizer is None:
        raise InvalidRequest("With skip_tokenizer_init prompts must be token ids.", param="prompt")
    # The text includes the special tokens, beginning with "<|startoftranscript|>".
    return TokenPrompt(text, tokenizer.encode(text, add_special_tokens=False), media=media)


def _prepared_images(
    values: Any, processor: MediaProcessor, options: dict[str, Any]
) -> list[PreparedMedia]:
    """Prepare an image or a list of images, each of which can be given as vectors: a tensor
    [n, hidden], or {"image_embeds": tensor, "image_grid_thw": tensor [1, 3]}.

    Raises `InvalidRequest` for anything else.
    """
    entries = values if isinstance(values, list | tuple) else [] if values is None else [values]
    prepared = []
    for entry in entries:
        if isinstance(entry, Tensor | dict):
            prepared.append(processor.prepare_embeds(*_vectors_and_grid(entry)))
        else:
            prepared += [processor.prepare(image, options) for image in _images([entry])]
    return prepared


def _vectors_and_grid(value: Tensor | dict[str, Any]) -> tuple[np.ndarray, tuple[int, ...]]:
    parts = {"image_embeds": value} if isinstance(value, Tensor) else value
    vectors, grid = parts.get("image_embeds"), parts.get("image_grid_thw")
    is_grid = grid is None or (
        isinstance(grid, Tensor)
        and tuple(grid.shape) in ((3,), (1, 3))
        and not grid.is_floating_point()
    )
    if (
        not isinstance(vectors, Tensor)
        or vectors.dim() != 2
        or not len(vectors)
        or not vectors.is_floating_point()
        or not is_grid
    ):
        raise InvalidRequest(
            "An image's vectors must be float [n, hidden], and image_grid_thw integers [1, 3].",
            param="multi_modal_data",
        )
    numbers = () if grid is None else tuple(map(int, grid.flatten().tolist()))
    return vectors.detach().float().cpu().numpy(), numbers


def _images(values: Any) -> list[Any]:
    """Return PIL images of an image or a list of images. Raises `InvalidRequest` for others."""
    from PIL import Image

    images = []
    for value in values if isinstance(values, list | tuple) else [] if values is None else [values]:
        if isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim in (2, 3):
            value = Image.fromarray(value)
        if not isinstance(value, Image.Image):
            raise InvalidRequest(
                "multi_modal_data's image must be PIL images or uint8 arrays, not "
                f"{type(value).__name__}.",
                param="multi_modal_data",
            )
        images.append(value)
    return images


def _videos(values: Any) -> list[Video]:
    """Return a video or a list of videos, each in a format of `MultiModalDataDict`.

    Raises `InvalidRequest` for anything else.
    """
    if values is None:
        return []
    return [_video(value) for value in (values if _are_videos(values) else [values])]


def _are_videos(values: Any) -> bool:
    """Whether it is a list of videos: one of frames is a video."""
    return isinstance(values, list) and all(
        isinstance(value, list | tuple | Video) or np.ndim(value) == 4 for value in values
    )


def _video(value: Any) -> Video:
    if isinstance(value, Video):
        return value
    metadata: Any = {}
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict):
        value, metadata = value
    fps = metadata.get("fps", DEFAULT_FPS)
    if not isinstance(fps, int | float) or not 0 < fps <= MAX_FPS:
        raise InvalidRequest(
            f"The fps of a video must be over 0 and at most {MAX_FPS}; got {fps!r}.",
            param="multi_modal_data",
        )
    if not isinstance(value, list | tuple | np.ndarray):
        raise InvalidRequest(
            f"multi_modal_data's video must be frames, not {type(value).__name__}.",
            param="multi_modal_data",
        )
    frames = [to_rgb(image) for image in _images(list(value))]
    if not 0 < len(frames) <= MAX_FRAMES or len({frame.size for frame in frames}) > 1:
        raise InvalidRequest(
            f"A video must have 1 to {MAX_FRAMES} frames of one size; got {len(frames)}.",
            param="multi_modal_data",
        )
    return Video(frames, [index / fps for index in range(len(frames))])


def _of_embeds(embeds: Any) -> TokenPrompt:
    """Return a prompt of embeddings [num_tokens, hidden] or [1, num_tokens, hidden].

    Raises `InvalidRequest` for other shapes and dtypes.
    """
    if not isinstance(embeds, Tensor):
        raise InvalidRequest("prompt_embeds must be a tensor.", param="prompt_embeds")
    if embeds.dim() == 3 and len(embeds) == 1:
        embeds = embeds[0]
    if embeds.dim() != 2 or not embeds.is_floating_point():
        raise InvalidRequest(
            f"prompt_embeds must be floats of [num_tokens, hidden], got {embeds.dtype} "
            f"{list(embeds.shape)}.",
            param="prompt_embeds",
        )
    return TokenPrompt(None, [0] * len(embeds), embeds.detach())


def _checked(ids: Any) -> list[int]:
    if not isinstance(ids, list | tuple) or any(type(token) is not int for token in ids):
        raise InvalidRequest("prompt_token_ids must be a list of integers.", param="prompt")
    return list(ids)
