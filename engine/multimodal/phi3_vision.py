"""Image processor of Phi-3-vision with Pillow and numpy, in place of the checkpoints'
`Phi3VImageProcessor`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.contract.errors import InvalidRequest
from engine.multimodal.image_prompts import (
    CheckpointImagePrompt,
    VectorLayout,
    lay_out_tokens,
)
from engine.multimodal.inputs import MAX_MEDIA_BYTES
from engine.text.tokenizer_files import read_object

if TYPE_CHECKING:
    from PIL.Image import Image

#: CLIP's large tower for images of 336 pixels, of which config.json has only the name.
_CLIP: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
    "hidden_act": "quick_gelu",
}
#: The coefficient of torch's bicubic interpolation; Pillow's is another.
_CUBIC = -0.75


def vision_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tower's sizes, CLIP's unless config.json's `img_processor` has others."""
    named = config.get("img_processor") or {}
    return _CLIP | {name: named[name] for name in _CLIP if name in named}


class _Options:
    """The image processor's options."""

    __required_keys__ = frozenset[str]()
    __optional_keys__ = frozenset({"num_crops"})


class Phi3VisionImages:
    """Prepares the whole image, and its tiles at the largest scale with at most `num_crops`."""

    model_input_names = ("pixel_values", "image_sizes")
    valid_kwargs = _Options
    size = None

    def __init__(self, settings: Mapping[str, Any], side: int) -> None:
        """`settings` is preprocessor_config.json, `side` that of a tile in pixels."""
        self.num_crops = int(settings["num_crops"])
        self.side = side
        self._mean, self._std = (
            np.array(settings[name], dtype=np.float32) for name in ("image_mean", "image_std")
        )

    def __call__(self, images: list[Image], **options: Any) -> dict[str, Any]:
        """Return `pixel_values`, float32 [1, 1 + tiles, 3, side, side], with the whole image first,
        and `image_sizes`, int64 [1, 2], height and width of all tiles together.

        Raises `InvalidRequest` for an invalid `num_crops`.
        """
        (image,) = images
        num_crops = options.get("num_crops", self.num_crops)
        max_crops = MAX_MEDIA_BYTES // (3 * self.side**2 * 4) - 1
        if type(num_crops) is not int or not 1 <= num_crops <= max_crops:
            raise InvalidRequest(
                f"num_crops must be an integer from 1 to {max_crops}; got {num_crops!r}.",
                param="mm_processor_kwargs",
            )
        pixels = np.asarray(self._fitted(image, num_crops), dtype=np.float32) / 255
        pixels = ((pixels - self._mean) / self._std).transpose(2, 0, 1)
        _, height, width = pixels.shape
        rows, columns = height // self.side, width // self.side
        tiles = pixels.reshape(3, rows, self.side, columns, self.side).transpose(1, 3, 0, 2, 4)
        overview = _resized(pixels, self.side)
        tiles = tiles.reshape(-1, 3, self.side, self.side)
        return {
            "pixel_values": np.concatenate((overview[None], tiles))[None],
            "image_sizes": np.array([[height, width]]),
        }

    def _fitted(self, image: Image, num_crops: int) -> Image:
        """Resize the longer side to that of the tiles, and pad the shorter one with white on both
        sides.
        """
        from PIL import Image

        is_tall = image.width < image.height
        if is_tall:
            image = image.transpose(Image.Transpose.TRANSPOSE)
        ratio = image.width / image.height
        scale = 1
        while (scale + 1) * np.ceil((scale + 1) / ratio) <= num_crops:
            scale += 1
        width = scale * self.side
        height = int(width / ratio)
        resized = image.resize((width, height), Image.Resampling.BILINEAR)
        padded = Image.new("RGB", (width, -(-height // self.side) * self.side), (255, 255, 255))
        padded.paste(resized, (0, (padded.height - height) // 2))
        return padded.transpose(Image.Transpose.TRANSPOSE) if is_tall else padded


def _resized(pixels: np.ndarray, side: int) -> np.ndarray:
    """Resize [3, height, width] to float32 [3, side, side] like torch's bicubic interpolation."""
    rows, columns = (_cubic_weights(length, side) for length in pixels.shape[1:])
    return (rows @ pixels @ columns.T).astype(np.float32)


def _cubic_weights(length: int, count: int) -> np.ndarray:
    """Return the weights of `length` pixels for `count` pixels, float64 [count, length], with
    repeated edges.
    """
    positions = (np.arange(count) + 0.5) * (length / count) - 0.5
    first = np.floor(positions).astype(np.int64)
    weights = np.zeros((count, length))
    for step in range(-1, 3):
        distance = np.abs(positions - (first + step))
        near = ((_CUBIC + 2) * distance - (_CUBIC + 3)) * distance**2 + 1
        far = ((_CUBIC * distance - 5 * _CUBIC) * distance + 8 * _CUBIC) * distance - 4 * _CUBIC
        used = np.clip(first + step, 0, length - 1)
        np.add.at(weights, (np.arange(count), used), np.where(distance <= 1, near, far))
    return weights


class Phi3VisionPrompt(CheckpointImagePrompt):
    """A token for each vector, including those after each row and the one between the tiles and the
    whole image.
    """

    def __init__(self, folder: str | Path, settings: Mapping[str, Any]) -> None:
        sizes = vision_config(read_object(Path(folder) / "config.json"))
        super().__init__(folder, Phi3VisionImages(settings, int(sizes["image_size"])))
        self._tokens_per_side = int(sizes["image_size"]) // int(sizes["patch_size"]) // 2

    def with_tokens(self, text: str) -> str:
        numbers = [int(number) for number in re.findall(r"<\|image_(\d+)\|>", text)]
        if numbers != list(range(1, len(numbers) + 1)):
            raise InvalidRequest(
                "Images must stand in the prompt as <|image_1|>, <|image_2|> and so on, in the "
                "order of multi_modal_data.",
                param="prompt",
            )
        return re.sub(r"<\|image_\d+\|>", self.image_token, text)

    def replacement(self, outputs: Mapping[str, Any]) -> str:
        side = self._tokens_per_side
        rows, columns = (outputs["image_sizes"][0] // self.images.side).tolist()
        count = rows * side * (columns * side + 1) + 1 + side * (side + 1)
        return self.image_token * count

    def lay_out_vectors(self, count: int, grid: tuple[int, ...]) -> VectorLayout:
        return lay_out_tokens(self.image_token * count, grid)
