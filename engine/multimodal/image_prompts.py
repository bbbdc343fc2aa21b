"""Text that stands for a picture in a prompt, of families whose processors in `transformers` also
want one of videos, which needs torchvision. Their image processors need Pillow and numpy alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


class ImagePrompt(ABC):
    """Of one model.

    Attributes:
        image_token: the placeholder, as text.
        image_token_id: the same as a token.
    """

    def __init__(self, folder: str | Path, images: Any) -> None:
        """`folder`: of the model. `images`: `transformers`' image processor.

        Raises OSError, ValueError or AttributeError where a file lacks what the family needs.
        """
        from transformers import AutoConfig, AutoTokenizer

        options = {"trust_remote_code": False, "local_files_only": True}
        self._config = AutoConfig.from_pretrained(str(folder), **options)
        self._tokenizer = AutoTokenizer.from_pretrained(str(folder), **options)
        self._images = images
        self.image_token_id = int(self._config.image_token_id)
        self.image_token = str(self._tokenizer.convert_ids_to_tokens(self.image_token_id))

    def options(self, requested: dict[str, Any]) -> dict[str, Any]:
        """Options of the image processor for those that a request has."""
        return requested

    @abstractmethod
    def replacement(self, outputs: Mapping[str, Any]) -> str:
        """What stands for the picture of which the image processor made `outputs`."""


class _Qwen(ImagePrompt):
    """One token for each `merge_size` x `merge_size` patches."""

    def replacement(self, outputs: Mapping[str, Any]) -> str:
        count = int(outputs["image_grid_thw"][0].prod()) // self._images.merge_size**2
        return self.image_token * count


class _InternVL(ImagePrompt):
    """As many tokens for each tile as for the picture itself."""

    def options(self, requested: dict[str, Any]) -> dict[str, Any]:
        return {"crop_to_patches": True} | requested

    def replacement(self, outputs: Mapping[str, Any]) -> str:
        count = self._config.image_seq_length * int(outputs["num_patches"][0])
        start, end = self._tokenizer.start_image_token, self._tokenizer.end_image_token
        return f"{start}{self.image_token * count}{end}"


class _Pixtral(ImagePrompt):
    """A row of tokens for each row of patches, between tokens that end a row or the picture."""

    def options(self, requested: dict[str, Any]) -> dict[str, Any]:
        side = self._patch_size()
        return requested | {"patch_size": {"height": side, "width": side}}

    def _patch_size(self) -> int:
        """Pixels of a side of what becomes one token."""
        merge = getattr(self._config, "spatial_merge_size", 1)
        return int(self._config.vision_config.patch_size * merge)

    def replacement(self, outputs: Mapping[str, Any]) -> str:
        rows, columns = (np.asarray(outputs["image_sizes"][0]) // self._patch_size()).tolist()
        text = (self.image_token * columns + "[IMG_BREAK]") * rows
        return text.removesuffix("[IMG_BREAK]") + "[IMG_END]"


class _SmolVLM(ImagePrompt):
    """Tiles between tokens that name their row and column, then the picture itself."""

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


#: By how the class of `transformers`' image processor begins.
_IMAGE_PROMPTS: dict[str, type[ImagePrompt]] = {
    "Qwen2VL": _Qwen,
    "GotOcr2": _InternVL,
    "Pixtral": _Pixtral,
    "SmolVLM": _SmolVLM,
}


def find_image_prompt(images: Any) -> type[ImagePrompt] | None:
    """The class for an image processor; None: `transformers`' own processor of the model does."""
    name = type(images).__name__
    return next((kind for key, kind in _IMAGE_PROMPTS.items() if name.startswith(key)), None)
