"""Image processor of MiniCPM-V with Pillow and numpy, in place of the checkpoints'
`MiniCPMVImageProcessor`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.contract.errors import InvalidRequest
from engine.multimodal.image_prompts import CheckpointImagePrompt
from engine.multimodal.placeholders import NUMBER
from engine.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from PIL.Image import Image

#: The maximum of `max_slice_nums`: slices of 448 x 448 pixels then have less than
#: `MAX_MEDIA_BYTES`.
_MAX_SLICES = 64


class _Options:
    """The image processor's options."""

    __required_keys__ = frozenset[str]()
    __optional_keys__ = frozenset({"max_slice_nums"})


class MiniCPMVImages:
    """Prepares the whole image and, if it is large, slices of equal size."""

    model_input_names = ("pixel_values", "tgt_sizes")
    valid_kwargs = _Options
    size = None

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """`settings` is preprocessor_config.json."""
        self.max_slice_nums = int(settings["max_slice_nums"]) if settings["slice_mode"] else 1
        self._resolution = int(settings["scale_resolution"])
        self._patch = int(settings["patch_size"])
        self._mean, self._std = (
            np.array(settings[name], dtype=np.float32) for name in ("norm_mean", "norm_std")
        )

    def __call__(self, images: list[Image], **options: Any) -> dict[str, Any]:
        """Return `pixel_values`, float32 [3, patch, patches * patch] of the whole image and then
        all slices; `tgt_sizes`, int64 [1 + slices, 2], their rows and columns of patches; and
        `grid`, the columns and rows of slices, or ().

        Raises `InvalidRequest` for an invalid `max_slice_nums`.
        """
        (image,) = images
        limit = options.get("max_slice_nums", self.max_slice_nums)
        if type(limit) is not int or not 1 <= limit <= _MAX_SLICES:
            raise InvalidRequest(
                f"max_slice_nums must be an integer from 1 to {_MAX_SLICES}; got {limit!r}.",
                param="mm_processor_kwargs",
            )
        grid = self._grid(image.width, image.height, limit)
        parts = [self._resized(image, self._best_size(image.width, image.height, not grid))]
        if grid:
            columns, rows = grid
            width, height = self._best_size(
                _nearest(image.width, columns) / columns, _nearest(image.height, rows) / rows, True
            )
            refined = self._resized(image, (width * columns, height * rows))
            parts += [
                refined.crop((x, y, x + width, y + height))
                for y in range(0, refined.height, height)
                for x in range(0, refined.width, width)
            ]
        sizes = [(part.height // self._patch, part.width // self._patch) for part in parts]
        return {
            "pixel_values": np.concatenate([self._patches(part) for part in parts], axis=-1),
            "tgt_sizes": np.array(sizes),
            "grid": grid,
        }

    def _resized(self, image: Image, size: tuple[int, int]) -> Image:
        from PIL import Image

        return image.resize(size, Image.Resampling.BICUBIC)

    def _patches(self, image: Image) -> np.ndarray:
        """Return patches side by side, row by row, float32 [3, patch, patches * patch]."""
        pixels = (np.asarray(image, dtype=np.float32) / 255 - self._mean) / self._std
        rows, columns = image.height // self._patch, image.width // self._patch
        patches = pixels.reshape(rows, self._patch, columns, self._patch, 3)
        return patches.transpose(4, 1, 0, 2, 3).reshape(3, self._patch, -1)

    def _best_size(self, width: float, height: float, may_grow: bool) -> tuple[int, int]:
        """Return width and height as multiples of the patch size, with an area of about
        `scale_resolution`^2, or less for a smaller image unless `may_grow`.
        """
        if width * height > self._resolution**2 or may_grow:
            ratio = width / height
            height = int(self._resolution / math.sqrt(ratio))
            width = int(height * ratio)
        return _nearest(width, self._patch), _nearest(height, self._patch)

    def _grid(self, width: int, height: int, limit: int) -> tuple[int, ...]:
        """Return the columns and rows of slices whose ratio is closest to the image's; () if the
        image isn't sliced.
        """
        needed = min(math.ceil(width * height / self._resolution**2), limit)
        if needed <= 1:
            return ()
        counts = [n for n in (needed - 1, needed, needed + 1) if 1 < n <= limit]
        grids = [(n, count // n) for count in counts for n in range(1, count + 1) if count % n == 0]
        ratio = math.log(width / height)
        return min(grids, key=lambda grid: abs(ratio - math.log(grid[0] / grid[1])))


def _nearest(length: float, divisor: int) -> int:
    """Return the multiple of `divisor`, at least `divisor`, that is closest to `length`."""
    return max(round(length / divisor) * divisor, divisor)


class MiniCPMVPrompt(CheckpointImagePrompt):
    """The image's number, if `use_image_id`, then the same number of tokens for the whole image and
    each slice.
    """

    def __init__(self, folder: str | Path, settings: Mapping[str, Any]) -> None:
        super().__init__(folder, MiniCPMVImages(settings))
        self._settings = settings
        self.vector_token = str(settings["unk"])
        tokenizer = load_tokenizer(folder)
        (self.vector_token_id,) = tokenizer.encode(self.vector_token, add_special_tokens=False)

    def with_tokens(self, text: str) -> str:
        return text.replace(f"({self.image_token}./</image>)", self.image_token)

    def replacement(self, outputs: Mapping[str, Any]) -> str:
        settings, grid = self._settings, outputs["grid"]
        tokens = self.vector_token * int(settings["image_feature_size"])
        text = f"{settings['im_start']}{tokens}{settings['im_end']}"
        if settings["use_image_id"]:
            text = f"{settings['im_id_start']}{NUMBER}{settings['im_id_end']}{text}"
        if not grid:
            return text
        columns, rows = grid
        row = f"{settings['slice_start']}{tokens}{settings['slice_end']}" * columns
        return text + "\n".join([row] * rows)
