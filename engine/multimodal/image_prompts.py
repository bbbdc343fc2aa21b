"""Placeholder texts of images and videos, for families whose processors can't be used.

Those in `transformers` require a video processor, which needs torchvision. Their image processors
only need Pillow and numpy.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.contract.errors import InvalidRequest
from engine.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from PIL.Image import Image

#: Maximum tokens of a temporal patch, as in `qwen_vl_utils`, and of a video, whose tensors then
#: have less than `MAX_MEDIA_BYTES`.
_MAX_FRAME_TOKENS, _MAX_VIDEO_TOKENS = 768, 8192


class ImagePrompt(ABC):
    """The placeholder texts of a model's images.

    Attributes:
        image_token: text of the placeholder token.
        image_token_id: id of the placeholder token.
        vector_token, vector_token_id: the token that stands for each vector of an image.
        images: the image processor.
    """

    vector_token: str
    vector_token_id: int

    def __init__(self, folder: str | Path, images: Any) -> None:
        """`folder` is the model's, `images` the image processor of `transformers`.

        Raises OSError, ValueError or AttributeError for files without the family's settings.
        """
        from transformers import AutoConfig, AutoTokenizer

        options = {"trust_remote_code": False, "local_files_only": True}
        config = AutoConfig.from_pretrained(str(folder), **options)
        self._config = getattr(config, "vlm_config", config)
        self._tokenizer = AutoTokenizer.from_pretrained(str(folder), **options)
        self.images = images
        self.image_token_id = int(self._config.image_token_id)
        self.image_token = str(self._tokenizer.convert_ids_to_tokens(self.image_token_id))
        self.vector_token, self.vector_token_id = self.image_token, self.image_token_id

    def options(self, requested: dict[str, Any]) -> dict[str, Any]:
        """Return the image processor's options, given those of a request."""
        return requested

    def with_tokens(self, text: str) -> str:
        """Replace the family's own notation of images in a prompt by `image_token`.

        Raises `InvalidRequest` for images in another order.
        """
        return text

    @abstractmethod
    def replacement(self, outputs: Mapping[str, Any]) -> str:
        """Return the text of an image, given the image processor's outputs."""

    def lay_out_vectors(self, count: int, grid: tuple[int, ...]) -> VectorLayout:
        """Return the text of an image that is given as `count` vectors.

        `grid` is its number of frames, and of rows and columns of patches, or ().

        Raises `InvalidRequest` for a model without support, or if count and grid are inconsistent.
        """
        raise InvalidRequest(
            "The model's images can't come as vectors: how they were cut is part of its prompts.",
            param="image_embeds",
        )


@dataclass(frozen=True, slots=True)
class VectorLayout:
    """For the attributes see `PreparedMedia`."""

    replacement: str
    grid: tuple[int, ...] = ()


def lay_out_tokens(tokens: str, grid: tuple[int, ...]) -> VectorLayout:
    """Return the layout of a model whose positions don't depend on rows and columns.

    Raises `InvalidRequest` if there is a grid.
    """
    if grid:
        raise InvalidRequest("The model takes no image_grid_thw.", param="image_embeds")
    return VectorLayout(tokens)


class CheckpointImagePrompt(ImagePrompt):
    """The placeholder texts of a family that `transformers` doesn't have."""

    def __init__(self, folder: str | Path, images: Any) -> None:
        tokenizer = load_tokenizer(folder)
        self.images = images
        self.image_token = tokenizer.settings.named_tokens["image_token"]
        (self.image_token_id,) = tokenizer.encode(self.image_token, add_special_tokens=False)
        self.vector_token, self.vector_token_id = self.image_token, self.image_token_id


@dataclass(frozen=True, slots=True)
class VideoInput:
    """A model's input for a video.

    Attributes:
        tensors: the encoder's input.
        replacement: see `PreparedMedia`.
        grid, time_interval: see `MediaItem`.
        wrapper: see `Placed`.
    """

    tensors: Mapping[str, np.ndarray]
    replacement: str
    grid: tuple[int, ...] = ()
    time_interval: float = 1.0
    wrapper: tuple[int, ...] = ()


class VideoPrompt(ImagePrompt):
    """The placeholder texts of a model's images and videos.

    Attributes:
        video_token, video_token_id: the placeholder token.
        token_of_video, token_id_of_video: the token that stands for each vector of a video.
        wrapper_texts: the texts of `VideoInput.wrapper`.
    """

    video_token: str
    video_token_id: int
    token_of_video: str
    token_id_of_video: int
    wrapper_texts = ("", "")

    @abstractmethod
    def prepare_video(
        self, frames: list[Image], times: list[float], options: dict[str, Any]
    ) -> VideoInput:
        """Prepare frames of equal size that are shown at `times`, in seconds."""


class _Qwen(VideoPrompt):
    """Qwen2-VL: a token for each `merge_size` x `merge_size` patches."""

    wrapper_texts = ("<|vision_start|>", "<|vision_end|>")

    def __init__(self, folder: str | Path, images: Any) -> None:
        super().__init__(folder, images)
        self.video_token_id = self.token_id_of_video = int(self._config.video_token_id)
        self.video_token = str(self._tokenizer.convert_ids_to_tokens(self.video_token_id))
        self.token_of_video = self.video_token
        self._video_size: dict[str, int] = {}
        path = Path(folder) / "video_preprocessor_config.json"
        if path.is_file():
            self._video_size = json.loads(path.read_text(encoding="utf-8")).get("size") or {}

    def replacement(self, outputs: Mapping[str, Any]) -> str:
        count = int(outputs["image_grid_thw"][0].prod()) // self.images.merge_size**2
        return self.image_token * count

    def lay_out_vectors(self, count: int, grid: tuple[int, ...]) -> VectorLayout:
        merge = self.images.merge_size
        frames, rows, columns = grid or (0, 0, 0)
        is_grid = frames == 1 and rows > 0 and not rows % merge and not columns % merge
        if not is_grid or rows * columns != count * merge**2:
            raise InvalidRequest(
                f"image_grid_thw must be [1, rows, columns] of patches, {merge} x {merge} of which "
                f"become one vector, for {count} vectors; got {list(grid)}.",
                param="image_embeds",
            )
        return VectorLayout(self.image_token * count, (1, rows // merge, columns // merge))

    def prepare_video(
        self, frames: list[Image], times: list[float], options: dict[str, Any]
    ) -> VideoInput:
        depth, merge = self.images.temporal_patch_size, self.images.merge_size
        step_s = (times[-1] - times[0]) / max(1, len(times) - 1) * depth
        frames = frames + frames[-1:] * (-len(frames) % depth)
        times = times + times[-1:] * (-len(times) % depth)
        size = {"size": self._frame_size(len(frames) // depth)}
        outputs = self.images(frames, **(size | options | {"return_tensors": "np"}))
        _, rows, columns = np.asarray(outputs["image_grid_thw"])[0].tolist()
        num_steps = len(frames) // depth
        # The image processor repeats each frame `depth` times, where a video has successive frames.
        values = np.asarray(outputs["pixel_values"]).reshape(
            num_steps, depth, rows * columns, self._channels(), depth, -1
        )
        patches = np.moveaxis(values[:, :, :, :, 0], 1, 3)
        tensors = {
            "pixel_values": patches.reshape(num_steps * rows * columns, -1),
            "image_grid_thw": np.array([[num_steps, rows, columns]]),
        }
        grid = num_steps, rows // merge, columns // merge
        starts = [float(np.mean(times[i : i + depth])) for i in range(0, len(times), depth)]
        return self._video_input(tensors, grid, starts, step_s)

    def _channels(self) -> int:
        return len(self.images.image_mean)

    def _frame_size(self, num_steps: int) -> dict[str, int]:
        """Return the minimum and maximum pixels of a frame as the image processor's size."""
        side = self.images.patch_size * self.images.merge_size
        max_tokens = max(1, min(_MAX_FRAME_TOKENS, _MAX_VIDEO_TOKENS // num_steps))
        size = self._configured_size(num_steps)
        longest = min(size["longest_edge"], max_tokens * side**2)
        return {"longest_edge": longest, "shortest_edge": min(size["shortest_edge"], longest)}

    def _configured_size(self, num_steps: int) -> dict[str, int]:
        size = {name: int(value) for name, value in dict(self.images.size).items() if value}
        return size | self._video_size

    def _video_input(
        self,
        tensors: Mapping[str, np.ndarray],
        grid: tuple[int, int, int],
        times: list[float],
        step_s: float,
    ) -> VideoInput:
        """`times` are those of the temporal patches, `step_s` is the interval, both in seconds."""
        return VideoInput(tensors, self.video_token * int(np.prod(grid)), grid)


class _Qwen25(_Qwen):
    """Qwen2.5-VL: positions in time depend on the interval of frames."""

    def _video_input(
        self,
        tensors: Mapping[str, np.ndarray],
        grid: tuple[int, int, int],
        times: list[float],
        step_s: float,
    ) -> VideoInput:
        text = self.video_token * int(np.prod(grid))
        interval = step_s * self._config.vision_config.tokens_per_second
        return VideoInput(tensors, text, grid, time_interval=interval)


class _Qwen3(_Qwen):
    """Qwen3-VL: each temporal patch is preceded by its time in seconds, as text."""

    def lay_out_vectors(self, count: int, grid: tuple[int, ...]) -> VectorLayout:
        raise InvalidRequest(
            "The model's images can't come as vectors: its decoder takes several for each token.",
            param="image_embeds",
        )

    def _configured_size(self, num_steps: int) -> dict[str, int]:
        frames = num_steps * self.images.temporal_patch_size
        per_frame = {name: value // frames for name, value in self._video_size.items()}
        return super()._configured_size(num_steps) | per_frame

    def _video_input(
        self,
        tensors: Mapping[str, np.ndarray],
        grid: tuple[int, int, int],
        times: list[float],
        step_s: float,
    ) -> VideoInput:
        start, end = self.wrapper_texts
        tokens = f"{start}{self.video_token * (grid[1] * grid[2])}{end}"
        text = "".join(f"<{time:.1f} seconds>{tokens}" for time in times)
        wrapper = tuple(int(self._tokenizer.vocab[token]) for token in (start, end))
        return VideoInput(tensors, text, (1, *grid[1:]), wrapper=wrapper)


class _InternVL(VideoPrompt):
    """InternVL: the same number of tokens for the whole image and each tile; a video's frames have
    no tiles.
    """

    def __init__(self, folder: str | Path, images: Any) -> None:
        super().__init__(folder, images)
        self.video_token = str(getattr(self._tokenizer, "video_token", "<video>"))
        # -1 if the tokenizer has no such token, for a model without videos.
        self.video_token_id = int(self._tokenizer.vocab.get(self.video_token, -1))
        self.token_of_video, self.token_id_of_video = self.image_token, self.image_token_id

    def prepare_video(
        self, frames: list[Image], times: list[float], options: dict[str, Any]
    ) -> VideoInput:
        untiled = {"crop_to_patches": False, "return_tensors": "np"}
        outputs = self.images(frames, **(options | untiled))
        start, end = self._tokenizer.start_image_token, self._tokenizer.end_image_token
        tokens = f"{start}{self.image_token * self._config.image_seq_length}{end}"
        text = "\n".join(f"Frame{number}: {tokens}" for number in range(1, len(frames) + 1))
        return VideoInput({"pixel_values": np.asarray(outputs["pixel_values"])}, text)

    def options(self, requested: dict[str, Any]) -> dict[str, Any]:
        return {"crop_to_patches": True} | requested

    def replacement(self, outputs: Mapping[str, Any]) -> str:
        return self._wrapped(self._config.image_seq_length * int(outputs["num_patches"][0]))

    def lay_out_vectors(self, count: int, grid: tuple[int, ...]) -> VectorLayout:
        return lay_out_tokens(self._wrapped(count), grid)

    def _wrapped(self, count: int) -> str:
        start, end = self._tokenizer.start_image_token, self._tokenizer.end_image_token
        return f"{start}{self.image_token * count}{end}"


class _Pixtral(ImagePrompt):
    """Pixtral: a row of tokens for each row of patches, with [IMG_BREAK] between rows."""

    def options(self, requested: dict[str, Any]) -> dict[str, Any]:
        side = self._patch_size()
        return requested | {"patch_size": {"height": side, "width": side}}

    def _patch_size(self) -> int:
        """Return the side in pixels of the square for one token."""
        merge = getattr(self._config, "spatial_merge_size", 1)
        return int(self._config.vision_config.patch_size * merge)

    def replacement(self, outputs: Mapping[str, Any]) -> str:
        rows, columns = (np.asarray(outputs["image_sizes"][0]) // self._patch_size()).tolist()
        text = (self.image_token * columns + "[IMG_BREAK]") * rows
        return text.removesuffix("[IMG_BREAK]") + "[IMG_END]"


class _SmolVLM(ImagePrompt):
    """SmolVLM: tiles, each after a token of its row and column, then the whole image."""

    def options(self, requested: dict[str, Any]) -> dict[str, Any]:
        return requested | {"return_row_col_info": True}

    def replacement(self, outputs: Mapping[str, Any]) -> str:
        vision, fake = self._config.vision_config, "<fake_token_around_image>"
        side = vision.image_size // vision.patch_size // self._config.scale_factor
        tokens = self.image_token * side**2
        rows, columns = int(outputs["rows"][0][0]), int(outputs["cols"][0][0])
        tiles = [
            "".join(f"{fake}<row_{row}_col_{column}>{tokens}" for column in range(1, columns + 1))
            for row in range(1, rows + 1)
        ]
        text = "".join(f"{tile_row}\n" for tile_row in tiles) + ("\n" if tiles else "")
        return f"{text}{fake}<global-img>{tokens}{fake}"


class _Options:
    """The options of `UnpreparedImages`, which has none."""

    __optional_keys__ = __required_keys__ = frozenset[str]()


class UnpreparedImages:
    """An image processor for models that read the original image."""

    model_input_names = ("pixel_values",)
    valid_kwargs = _Options
    size = None

    def __call__(self, images: list[Image], **_: Any) -> dict[str, Any]:
        """Return the images as `pixel_values`, uint8 [1, height, width, 3] of one image."""
        return {"pixel_values": np.stack([np.asarray(image) for image in images])}


class _Mllama(ImagePrompt):
    """Mllama: a token per image, after which the text attends to the image."""

    def __init__(self, folder: str | Path, images: Any) -> None:
        super().__init__(folder, UnpreparedImages())

    def replacement(self, outputs: Mapping[str, Any]) -> str:
        return self.image_token


class ImageOrText(ImagePrompt):
    """CLIP and SigLIP: an image is a whole prompt, with the EOS token as its placeholder."""

    def __init__(self, folder: str | Path, images: Any) -> None:
        from transformers import AutoTokenizer

        self.images = images
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=False, local_files_only=True
        )
        self.image_token, self.image_token_id = tokenizer.eos_token, int(tokenizer.eos_token_id)
        self.vector_token, self.vector_token_id = self.image_token, self.image_token_id

    def replacement(self, outputs: Mapping[str, Any]) -> str:
        return self.image_token


#: By `model_type`, for image processors that other families use, too.
_KINDS: dict[str, type[ImagePrompt]] = {"clip": ImageOrText, "siglip": ImageOrText}
#: By `model_type`, for image processors of Qwen2-VL in later families.
_QWEN_KINDS: dict[str, type[_Qwen]] = {
    "qwen2_5_vl": _Qwen25,
    "qwen3_vl": _Qwen3,
    "qwen3_vl_moe": _Qwen3,
}
#: By prefix of the image processor's class name in `transformers`.
_IMAGE_PROMPTS: dict[str, type[ImagePrompt]] = {
    "Qwen2VL": _Qwen,
    "GotOcr2": _InternVL,
    "Mllama": _Mllama,
    "Pixtral": _Pixtral,
    "SmolVLM": _SmolVLM,
}


def find_image_prompt(folder: str | Path, images: Any) -> ImagePrompt | None:
    """Return the placeholder texts for an image processor; None for models whose processor in
    `transformers` can be used.

    Raises the errors of `ImagePrompt`.
    """
    from transformers import AutoConfig

    name = type(images).__name__
    kind = next((kind for key, kind in _IMAGE_PROMPTS.items() if name.startswith(key)), None)
    if kind in (None, _Qwen):
        config = AutoConfig.from_pretrained(
            str(folder), trust_remote_code=False, local_files_only=True
        )
        kinds = _KINDS if kind is None else _QWEN_KINDS
        kind = kinds.get(config.model_type, kind)
    return None if kind is None else kind(folder, images)
