"""`MediaProcessor`: from pictures to what a model's encoder reads, and which tokens stand for them.

How a family resizes, cuts and counts is `transformers`' own processor's business, on Pillow and
numpy. So every family of its image-text-to-text models has one.
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

#: Larger pictures are refused before a pixel is decoded: Pillow's own limit, of a bomb.
MAX_PIXELS = 89_478_485
#: Of a picture's longer side to its shorter one, as Qwen's processors have it: a processor that
#: brings the shorter side to its model's size makes gigabytes of a sliver.
MAX_ASPECT_RATIO = 200
#: Options of image processors that decide what comes out in which form, and where.
_FIXED_OPTIONS = {
    "return_tensors",
    "device",
    "data_format",
    "input_data_format",
    "disable_grouping",
}
#: Options on which the shapes depend that the encoder was trained for. Others would fail in a step
#: of the engine, which costs all that run in it.
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
#: Of `transformers`: those of models in whose prompts a picture is its tokens alone.
_UNWRAPPED_PROCESSORS = ("LlavaProcessor", "LlavaNextProcessor")
#: By `image_processor_type` of preprocessor_config.json.
_CHECKPOINT_PROMPTS: dict[str, Callable[[str, dict[str, Any]], CheckpointImagePrompt]] = {
    "MiniCPMVImageProcessor": MiniCPMVPrompt,
    "Phi3VImageProcessor": Phi3VisionPrompt,
}
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
#: Exceptions of Pillow for damaged files, in addition to its own errors.
DAMAGED_FILE_ERRORS = (OSError, ValueError, SyntaxError, EOFError, LookupError, struct.error)


@dataclass(frozen=True, slots=True)
class PreparedMedia:
    """One picture or video.

    Attributes:
        digest: see `MediaItem`.
        replacement: text that takes the placeholder's place in the prompt.
        num_vectors: tokens in it that stand for a vector each.
        placeholder: text in the prompt that isn't expanded, and `placeholder_id` its token.
        token_id, wrapper: see `Placed`.
        grid, time_interval, retained: see `MediaItem`.
        tensors: what the encoder reads, and `encoded` the same as bytes.
        seconds: length of sound.
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
    """See `PreparedMedia`."""

    tensors: MediaTensors
    replacement: str
    retained: bytes = b""


def open_image(data: bytes, param: str = "messages") -> Image:
    """A picture from a file's bytes, upright, in RGB on white.

    Raises `InvalidRequest` for what is no picture, is damaged, has too many pixels, or is a sliver.
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
    """The picture in RGB; transparent areas become white."""
    from PIL import Image

    if image.mode.startswith("I;16") or image.mode == "I":
        # Pillow would cut off the upper eight of sixteen bits.
        values = np.asarray(image, dtype=np.float64)
        image = Image.fromarray((values / 257).clip(0, 255).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")


class MediaProcessor:
    """Of one model.

    Attributes:
        image_token: the placeholder in prompts, as text.
        image_token_id: the same as a token.
        token_of_image, token_id_of_image: the token that stands for each vector of a picture.
        image_or_text: whether a prompt is a text or one picture.
    """

    def __init__(
        self,
        folder: str | Path,
        pruning_rates: Mapping[str, float] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """`folder`: of the model, or of its tokenizer's files. `pruning_rates`: by kind, see
        `retained_vectors`. `options`: mm_processor_kwargs of those that have none.

        Raises `ModelLoadError` where there is no processor.
        """
        from transformers import ProcessorMixin

        self._pruning_rates, self._options = pruning_rates or {}, options or {}
        try:
            self._processor = _make_processor(str(folder))
        except (OSError, ValueError, ImportError, KeyError, TypeError, AttributeError) as error:
            raise ModelLoadError(
                f"{folder} has no image processor: {error}", param="model"
            ) from error
        self.image_or_text = getattr(self._processor, "image_or_text", False)
        self.image_token: str = self._processor.image_token
        self.image_token_id: int = int(self._processor.image_token_id)
        self.token_of_image, self.token_id_of_image = self.image_token, self.image_token_id
        if isinstance(self._processor, _ImagesProcessor):
            prompt = self._processor.prompt
            self.token_of_image = prompt.vector_token
            self.token_id_of_image = prompt.vector_token_id
        if isinstance(self._processor, ProcessorMixin):
            # Gemma's placeholder is the token before a picture's.
            token_ids = self._processor.image_token_ids
            self.token_id_of_image = int(token_ids[0] or self.image_token_id)
            tokenizer = self._processor.tokenizer
            self.token_of_image = str(tokenizer.convert_ids_to_tokens(self.token_id_of_image))

    def prepare_video(self, video: Video, options: dict[str, Any] | None = None) -> PreparedMedia:
        """What the encoder reads of a video's frames. `options`: mm_processor_kwargs.

        Raises `InvalidRequest` for a model that takes none, and where its processor refuses them.
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
            # Frames that are alike have other positions at another rate.
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
        """What is left of an item at the rate of its kind."""
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
        """What the encoder reads of a picture. `options`: mm_processor_kwargs.

        Raises `InvalidRequest` where the processor refuses them.
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
                "for a picture.",
                param="model",
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
        """A picture that comes as its encoder's vectors, float32 [n, hidden].

        `grid`: its frames, and its rows and columns of patches, of a model whose positions need
        them. Raises `InvalidRequest`.
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
            # Equal vectors in other rows and columns have other positions.
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
        that only another encoder takes.
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
        """The prompt with each placeholder replaced by what stands for its picture or video, and
        these in the prompt's order.

        Raises `InvalidRequest` unless there is one for each.
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
    """`transformers`' processor of a model folder, or one that does the same for pictures."""
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
    """Of an `ImagePrompt` and its image processor what `transformers`' processor is of both."""

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
    """In one of the dtypes that encoders take: pixels, which may be bytes, are float32."""
    is_pixels = values.dtype.kind == "f" or values.dtype == np.uint8
    return values.astype(np.float32 if is_pixels else np.int64, copy=False)


def _option_errors() -> tuple[type[Exception], ...]:
    """Exceptions of image processors for unsupported values."""
    from huggingface_hub.errors import StrictDataclassError  # slow to import

    errors = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError)
    return (*errors, StrictDataclassError)
