"""Phi-3-vision and Phi-3.5-vision (arXiv 2404.14219): CLIP over an image and its tiles.


`transformers` has no class for them; `engine.multimodal.phi3_vision` prepares images.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.contract.errors import ModelLoadError
from engine.models.families.common import Config
from engine.models.layers.linear import FusedLinear, LinearPart
from engine.models.layers.norm import Transform, chain
from engine.models.vision.family import VisionFamily, clip_tower
from engine.models.vision.tower import VisionTower, pixel_shuffle
from engine.models.weight_loader import WeightLoader
from engine.multimodal.phi3_vision import vision_config
from kernels.layers import activation

_PREFIX = "model.vision_embed_tokens."


class Phi3Vision(VisionFamily):
    """Four patches per vector. Each row ends with a learned vector, and another separates the tiles
    from the whole image.
    """

    ignored_prefixes = (
        f"{_PREFIX}wte.",  # a copy of the text embedding
        f"{_PREFIX}img_processor.vision_model.post_layernorm.",
    )
    _tower: VisionTower
    _projection: Transform

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        connector = config.get("embd_layer") or {}
        supported = {
            "projection_cls": "mlp",
            "hd_transform_order": "sub_glb",
            "use_hd_transform": True,
            "with_learnable_separator": True,
        }
        for name, value in supported.items():
            if connector.get(name, value) != value:
                raise ModelLoadError(
                    f"config.json: embd_layer.{name} must be {value!r}; got {connector[name]!r}.",
                    param="embd_layer",
                )

    @property
    def text_config(self) -> Config:
        return self.config | {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"]}

    def load(self, loader: WeightLoader) -> None:
        vision = vision_config(self.config)
        spec = clip_tower(vision, f"{_PREFIX}img_processor.vision_model.")
        self._tower = VisionTower(spec, loader)
        hidden, size = int(self.config["hidden_size"]), 4 * spec.hidden_size
        self._row_end = loader.vector(f"{_PREFIX}sub_GN", 1, 1, 1, size).flatten()
        self._between = loader.vector(f"{_PREFIX}glb_GN", 1, 1, size).flatten()

        def linear(name: str, columns: int) -> Transform:
            parts = (LinearPart(f"{_PREFIX}img_projection.{name}", hidden),)
            return loader.linear(FusedLinear(parts=parts, columns=columns, bias=True))

        self._projection = chain(linear("0", size), activation("gelu"), linear("2", hidden))

    def encode(self, tensors: dict[str, Tensor]) -> Tensor:
        x = self._tower.embed(tensors["pixel_values"].flatten(0, 1))
        (states,) = self._tower.hidden_states(x, (-2,))
        merged = pixel_shuffle(states[:, 1:], 2)
        side = self._tower.spec.patches_per_side // 2
        rows, columns = (tensors["image_sizes"][0] // self._tower.spec.image_size).tolist()
        tiles = merged[1:].view(rows, columns, side, side, -1).permute(0, 2, 1, 3, 4)
        parts = (
            self._with_row_ends(tiles.reshape(rows * side, columns * side, -1)),
            self._between[None].to(merged),
            self._with_row_ends(merged[0].view(side, side, -1)),
        )
        return self._projection(torch.cat(parts))

    def _with_row_ends(self, picture: Tensor) -> Tensor:
        """Append a vector to each row: [rows, columns, size] -> [rows * (columns + 1), size]."""
        ends = self._row_end.to(picture).expand(len(picture), 1, -1)
        return torch.cat((picture, ends), dim=1).flatten(0, 1)
