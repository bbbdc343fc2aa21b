"""`MediaProcessor`: preprocessing of images and videos, and their placeholder tokens.

Resizing, cutting and the number of tokens are those of the processors in `transformers`, with
Pillow and numpy, so that all of its image-text-to-text models are supported.
"""

from __future__ import annotations

import io
import re
import struct
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from engine.contract.errors import InvalidRequest, ModelLoadError
from engine.multimodal.image_prompts import (
    CheckpointImagePrompt,
    ImageOrText,
    ImagePrompt,
    VideoInput,
    VideoPrompt,
    find_image_prompt,
    lay_out_tokens,
)
from engine.multimodal.inputs import EMBEDS, MediaTensors, encode_tensors, media_digest
from engine.multimodal.minicpmv import MiniCPMVPrompt
from engine.multimodal.phi3_vision import Phi3VisionPrompt
from engine.multimodal.placeholders import NUMBER, check_placeholders
from engine.multimodal.pruning import RETAINED, keep_tokens, retained_vectors, retention_mask
from engine.text.tokenizer_files import read_object

if TYPE_CHECKING:
    from PIL.Image import Image

    from engine.multimodal.video_files import Video

#: Larger images are refused before a pixel is decoded. This is Pillow's limit against bombs.
MAX_PIXELS = 89_478_485
#: Maximum ratio of an image's sides, as in Qwen's processors. A processor that resizes the shorter
#: side to its model's size would expand a sliver to gigabytes.
MAX_ASPECT_RATIO = 200
#: Options of image processors for the format and device of their output, which can't be set.
_FIXED_OPTIONS = {
    "return_tensors",
    "device",
    "data_format",
    "input_data_format",
    "disable_grouping",
}
#: Options that determine the shapes for which the encoder was trained. Other shapes would fail in a
#: step of the engine, and with it all of its requests.
_SHAPE_OPTIONS = {
    "crop_size",
    "do_center_crop",
    "image_grid_pinpoints",
    "max_image_size",
    "merge_size",
    "pad_size",
    "patch_size",
    "temporal_patch_size",
}
#: Processors in `transformers` of models whose image text consists only of the vectors' tokens.
_UNWRAPPED_PROCESSORS = ("LlavaProcessor", "LlavaNextProcessor")
#: Replacements of checkpoints' code, by `image_processor_type` of preprocessor_config.json.
_CHECKPOINT_PROMPTS: dict[str, Callable[[str, dict[str, Any]], CheckpointImagePrompt]] = {
    "MiniCPMVImageProcessor": MiniCPMVPrompt,
    "Phi3VImageProcessor": Phi3VisionPrompt,
}
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
#: Exceptions of Pillow for damaged files, in addition to its own errors.
DAMAGED_FILE_ERRORS = (OSError, ValueError, SyntaxError, EOFError, LookupError, struct.error)


@dataclass(frozen=True, slots=True)
class PreparedMedia:
    """A prepared image, video or audio.

    Attributes:
        digest: see `MediaItem`.
        replacement: the text that replaces the placeholder in the prompt.
        num_vectors: the number of vectors, and of tokens in it that stand for one.
        placeholder: its text in the unexpanded prompt, and `placeholder_id` its token.
        token_id, wrapper: see `Placed`.
        grid, time_interval, retained: see `MediaItem`.
        tensors: the encoder's input, and `encoded` the same as bytes.
        seconds: length of audio.
    """

    kind: str
    digest: bytes
    replacement: str
    num_vectors: int
    tensors: MediaTensors
    encoded: bytes
    placeholder: str = ""
    placeholder_id: int = -1
    token_id: int = -1
    grid: tuple[int, ...] = ()
    time_interval: float = 1.0
    wrapper: tuple[int, ...] = ()
    seconds: float = 0.0
    retained: bytes = b""


class _Pruned(NamedTuple):
    """For the attributes see `PreparedMedia`."""

    tensors: MediaTensors
    replacement: str
    retained: bytes = b""


def open_image(data: bytes, param: str = "messages") -> Image:
    """Decode an image file, upright, in RGB on white.

    Raises `InvalidRequest` for other formats, a damaged file, too many pixels, or a ratio of sides
    above `MAX_ASPECT_RATIO`.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise InvalidRequest(
                    f"The image has {width} x {height} pixels; at most {MAX_PIXELS} are taken.",
                    param=param,
                )
            if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
                raise InvalidRequest(
                    f"The image has {width} x {height} pixels; the longer side may be at most "
                    f"{MAX_ASPECT_RATIO} times the shorter one.",
                    param=param,
                )
            upright = ImageOps.exif_transpose(image)
            return to_rgb(upright)
    except UnidentifiedImageError as error:
        raise InvalidRequest(
            f"The image can't be read: it is none of {', '.join(_FORMATS)}.", param=param
        ) from error
    except (*DAMAGED_FILE_ERRORS, Image.DecompressionBombError) as error:
        raise InvalidRequest(f"The image can't be read: {error}.", param=param) from error


def to_rgb(image: Image) -> Image:
    """Convert an image to RGB. Transparent areas become white."""
    from PIL import Image

    if image.mode.startswith("I;16") or image.mode == "I":
        # Pillow's own conversion doesn't scale 16-bit values.
        values = np.asarray(image, dtype=np.float64)
        image = Image.fromarray((values / 257).clip(0, 255).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")


class MediaProcessor:
    """The image and video processor of a model.

    Attributes:
        image_token: text of the placeholder token.
        image_token_id: id of the placeholder token.
        token_of_image, token_id_of_image: the token that stands for each vector of an image.
        image_or_text: whether a prompt is either a text or one image.
    """

    def __init__(
        self,
        folder: str | Path,
        pruning_rates: Mapping[str, float] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Load the processor of a model's folder, or of that with its tokenizer's files.

        Args:
            pruning_rates: rates by kind, see `retained_vectors`.
            options: defaults of mm_processor_kwargs.

        Raises `ModelLoadError` for a model without an image processor.
        """
        from transformers import ProcessorMixin

        self._pruning_rates, self._options = pruning_rates or {}, options or {}
        try:
            self._processor = _make_processor(str(folder))
        except (OSError, ValueError, ImportError, KeyError, TypeError, AttributeError) as error:
            raise ModelLoadError(f"{folder} has no image processor: {error}") from error
        self.image_or_text = getattr(self._processor, "image_or_text", False)
        self.image_token: str = self._processor.image_token
        self.image_token_id: int = int(self._processor.image_token_id)
        self.token_of_image, self.token_id_of_image = self.image_token, self.image_token_id
        if isinstance(self._processor, _ImagesProcessor):
            prompt = self._processor.prompt
            self.token_of_image = prompt.vector_token
            self.token_id_of_image = prompt.vector_token_id
        if isinstance(self._processor, ProcessorMixin):
            # With Gemma the placeholder isn't the token that stands for a vector.
            token_ids = self._processor.image_token_ids
            self.token_id_of_image = int(token_ids[0] or self.image_token_id)
            tokenizer = self._processor.tokenizer
            self.token_of_image = str(tokenizer.convert_ids_to_tokens(self.token_id_of_image))

    def prepare_video(self, video: Video, options: dict[str, Any] | None = None) -> PreparedMedia:
        """Prepare a video's frames for the encoder. `options` are mm_processor_kwargs.

        Raises `InvalidRequest` for a model without video input, and for invalid options or frames.
        """
        options = {**self._options, **(options or {})}
        self._check_options(options)
        prompt = getattr(self._processor, "video_prompt", None)
        if prompt is None:
            raise InvalidRequest("The model takes no videos.", param="messages")
        try:
            prepared: VideoInput = prompt.prepare_video(video.frames, video.times, options)
        except _option_errors() as error:
            raise InvalidRequest(f"The video can't be prepared: {error}", param="video") from error
        tensors = {name: as_tensor(np.asarray(v)) for name, v in prepared.tensors.items()}
        pruned = self._prune(
            "video", tensors, prepared.replacement, prompt.token_of_video, prepared.grid
        )
        encoded = encode_tensors(pruned.tensors)
        return PreparedMedia(
            kind="video",
            # The same frames have other positions at another rate.
            digest=media_digest(f"video {prepared.time_interval}", encoded),
            replacement=pruned.replacement,
            num_vectors=pruned.replacement.count(prompt.token_of_video),
            placeholder=prompt.video_token,
            placeholder_id=prompt.video_token_id,
            token_id=prompt.token_id_of_video,
            tensors=pruned.tensors,
            encoded=encoded,
            grid=prepared.grid,
            time_interval=prepared.time_interval,
            wrapper=prepared.wrapper,
            retained=pruned.retained,
        )

    def _prune(
        self,
        kind: str,
        tensors: MediaTensors,
        replacement: str,
        token: str,
        grid: tuple[int, ...],
    ) -> _Pruned:
        """Prune an item at the rate of its kind."""
        rate = self._pruning_rates.get(kind, 0.0)
        num_vectors = replacement.count(token)
        retained = retained_vectors(kind, tensors, num_vectors, grid, rate)
        if retained is None:
            return _Pruned(tensors, replacement)
        return _Pruned(
            {**tensors, RETAINED: retained},
            keep_tokens(replacement, token, retained),
            retention_mask(retained, num_vectors),
        )

    def prepare(self, image: Image, options: dict[str, Any] | None = None) -> PreparedMedia:
        """Prepare an image for the encoder. `options` are mm_processor_kwargs.

        Raises `InvalidRequest` for invalid options or an image that is too small, and
        `ModelLoadError` for a processor that doesn't report the image's tokens.
        """
        options = {**self._options, **(options or {})}
        self._check_options(options)
        try:
            outputs = self._processor(
                images=[to_rgb(image)],
                text=[self.image_token],
                images_kwargs={**options, "return_tensors": "np"},
                return_text_replacement_offsets=True,
            )
        except InvalidRequest:
            raise
        except _option_errors() as error:
            raise InvalidRequest(f"The image can't be prepared: {error}", param="image") from error
        if "text_replacement_offsets" not in outputs:
            raise ModelLoadError(
                f"transformers' {type(self._processor).__name__} doesn't say which tokens stand "
                "for a picture."
            )
        tensors = {
            name: as_tensor(np.asarray(outputs[name]))
            for name in self._processor.image_processor.model_input_names
            if name in outputs
        }
        replacement: str = outputs["text_replacement_offsets"][0][0]["replacement"]
        if self.token_of_image not in replacement:
            raise InvalidRequest("The image is too small: nothing is left of it.", param="image")
        grid: tuple[int, ...] = ()
        if "image_grid_thw" in tensors:
            frames, rows, columns = tensors["image_grid_thw"][0].tolist()
            merge = self._processor.image_processor.merge_size
            grid = frames, rows // merge, columns // merge
        pruned = self._prune("image", tensors, replacement, self.token_of_image, grid)
        encoded = encode_tensors(pruned.tensors)
        return PreparedMedia(
            kind="image",
            digest=media_digest("image", encoded),
            replacement=pruned.replacement,
            num_vectors=pruned.replacement.count(self.token_of_image),
            placeholder=self.image_token,
            placeholder_id=self.image_token_id,
            token_id=self.token_id_of_image,
            tensors=pruned.tensors,
            encoded=encoded,
            grid=grid,
            retained=pruned.retained,
        )

    def prepare_embeds(self, vectors: np.ndarray, grid: tuple[int, ...] = ()) -> PreparedMedia:
        """Prepare an image that is given as its encoder's vectors, float32 [n, hidden].

        `grid` is its number of frames, and of rows and columns of patches, for a model whose
        positions need it. Raises `InvalidRequest` for a model without support, or a wrong grid.
        """
        if isinstance(self._processor, _ImagesProcessor):
            layout = self._processor.prompt.lay_out_vectors(len(vectors), grid)
        elif type(self._processor).__name__ in _UNWRAPPED_PROCESSORS:
            layout = lay_out_tokens(self.token_of_image * len(vectors), grid)
        else:
            raise InvalidRequest("The model's images can't come as vectors.", param="image_embeds")
        tensors = {EMBEDS: vectors}
        encoded = encode_tensors(tensors)
        return PreparedMedia(
            kind="image",
            # The same vectors in other rows and columns have other positions.
            digest=media_digest(f"image {layout.grid}", encoded),
            replacement=layout.replacement,
            num_vectors=len(vectors),
            placeholder=self.image_token,
            placeholder_id=self.image_token_id,
            token_id=self.token_id_of_image,
            tensors=tensors,
            encoded=encoded,
            grid=layout.grid,
        )

    def _check_options(self, options: dict[str, Any] | None) -> None:
        """Raise `InvalidRequest` for options that the image processor doesn't have, and for values
        that change the shapes for which the encoder was trained.
        """
        if not options:
            return
        images = self._processor.image_processor
        kind = type(images).valid_kwargs
        names = kind.__optional_keys__ | kind.__required_keys__
        for name in sorted(options.keys() - (names - _FIXED_OPTIONS)):
            raise InvalidRequest(
                f"The model's image processor has no option {name[:50]!r}.",
                param="mm_processor_kwargs",
            )
        makes_one_size = dict(images.size or {}).get("height")
        shape_options = _SHAPE_OPTIONS | ({"do_resize", "size"} if makes_one_size else set())
        for name in sorted(options.keys() & shape_options):
            if options[name] != (value := getattr(images, name, None)):
                raise InvalidRequest(
                    f"{name} must be as the model was trained: {value}.",
                    param="mm_processor_kwargs",
                )

    def expand(
        self, text: str, media: Sequence[PreparedMedia]
    ) -> tuple[str, tuple[PreparedMedia, ...]]:
        """Return the prompt with placeholders replaced by the texts of their items, and the items
        in the prompt's order.

        Raises `InvalidRequest` unless there is one placeholder for each item.
        """
        if isinstance(self._processor, _ImagesProcessor):
            text = self._processor.prompt.with_tokens(text)
        remaining: defaultdict[str, deque[PreparedMedia]] = defaultdict(deque)
        for item in media:
            remaining[item.placeholder].append(item)
        for placeholder, items in remaining.items():
            check_placeholders(text.count(placeholder), len(items), items[0].kind)
            if items[0].wrapper:
                start, end = self._processor.video_prompt.wrapper_texts
                text = text.replace(f"{start}{placeholder}{end}", placeholder)
        ordered: list[PreparedMedia] = []

        def replace(match: re.Match[str]) -> str:
            ordered.append(remaining[match[0]].popleft())
            return ordered[-1].replacement.replace(NUMBER, str(len(ordered) - 1))

        expanded = re.sub("|".join(map(re.escape, remaining)) or "(?!)", replace, text)
        return expanded, tuple(ordered)


def _make_processor(folder: str) -> Any:
    """Return `transformers`' processor of a model folder, or an equivalent for its media."""
    from transformers import AutoImageProcessor, AutoProcessor

    settings = read_object(Path(folder) / "preprocessor_config.json")
    kind = _CHECKPOINT_PROMPTS.get(str(settings.get("image_processor_type")))
    if kind is not None:
        return _ImagesProcessor(kind(folder, settings))
    images = AutoImageProcessor.from_pretrained(
        folder, trust_remote_code=False, local_files_only=True, backend="pil"
    )
    if (prompt := find_image_prompt(folder, images)) is not None:
        return _ImagesProcessor(prompt)
    return AutoProcessor.from_pretrained(
        folder, trust_remote_code=False, local_files_only=True, backend="pil"
    )


class _ImagesProcessor:
    """An `ImagePrompt` and its image processor with the interface of a `transformers` processor."""

    def __init__(self, prompt: ImagePrompt) -> None:
        self.image_processor, self.prompt = prompt.images, prompt
        self.image_or_text = isinstance(prompt, ImageOrText)
        self.video_prompt = prompt if isinstance(prompt, VideoPrompt) else None
        self.image_token, self.image_token_id = prompt.image_token, prompt.image_token_id

    def __call__(
        self,
        images: list[Image],
        text: list[str],
        images_kwargs: dict[str, Any],
        *,
        return_text_replacement_offsets: bool,
    ) -> dict[str, Any]:
        outputs = dict(self.image_processor(images, **self.prompt.options(images_kwargs)))
        replacement = self.prompt.replacement(outputs)
        return outputs | {"text_replacement_offsets": [[{"replacement": replacement}]]}


def as_tensor(values: np.ndarray) -> np.ndarray:
    """Convert floats and bytes, which are pixels, to float32, and other values to int64."""
    is_pixels = values.dtype.kind == "f" or values.dtype == np.uint8
    return values.astype(np.float32 if is_pixels else np.int64, copy=False)


def _option_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that image processors raise for unsupported values."""
    from huggingface_hub.errors import StrictDataclassError  # slow to import

    errors = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError)
    return (*errors, StrictDataclassError)
