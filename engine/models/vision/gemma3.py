"""Gemma 3 (arXiv 2503.19786): SigLIP with average pooling; an image's tokens attend to each other
in both directions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.contract.errors import ModelLoadError
from engine.models.families.common import Config
from engine.models.layers.norm import RMSNorm, Transform
from engine.models.vision.family import VisionFamily, find_prefix, siglip_tower
from engine.models.vision.llava import TOWER_PREFIXES
from engine.models.vision.tower import VisionTower
from engine.models.weight_loader import WeightLoader


class Gemma3(VisionFamily):
    """Images of one size, whose square of patches is pooled to a smaller square of tokens."""

    _tower: VisionTower
    _norm: RMSNorm
    _projection: Transform

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        span, vision = config["mm_tokens_per_image"], config["vision_config"]
        self._side = math.isqrt(max(0, span or 0))
        patches = int(vision["image_size"]) // int(vision["patch_size"])
        if not self._side or self._side**2 != span or patches % self._side:
            raise ModelLoadError(
                f"config.json: mm_tokens_per_image must be a square that divides the image's "
                f"{patches} x {patches} patches; got {span}.",
                param="mm_tokens_per_image",
            )
        self.bidirectional_span = int(span)
        window = config["text_config"].get("sliding_window")
        if window and int(window) < self.bidirectional_span:
            raise ModelLoadError(
                f"config.json: sliding_window must be at least mm_tokens_per_image "
                f"({self.bidirectional_span}); got {window}.",
                param="sliding_window",
            )

    def load(self, loader: WeightLoader) -> None:
        prefix = find_prefix(loader.weights, *TOWER_PREFIXES)
        spec = siglip_tower(self.config["vision_config"], prefix)
        self._tower = VisionTower(spec, loader)
        name = ("model." if prefix.startswith("model.") else "") + "multi_modal_projector."
        hidden, size = int(self.config["text_config"]["hidden_size"]), spec.hidden_size
        weight = 1.0 + loader.vector(f"{name}mm_soft_emb_norm.weight", size)
        self._norm = RMSNorm(loader.ops, weight, spec.norm_eps)
        projection = loader.tensor(f"{name}mm_input_projection_weight", (size, hidden))
        self._projection = loader.pack(projection.T.contiguous(), None)

    def encode(self, tensors: dict[str, Tensor]) -> Tensor:
        (states,) = self._tower.hidden_states(self._tower.embed(tensors["pixel_values"]), (-1,))
        side, patches = self._side, self._tower.spec.patches_per_side
        squares = self._tower.last_norm(states).unflatten(1, (patches, patches))
        pooled = torch.nn.functional.avg_pool2d(squares.permute(0, 3, 1, 2), patches // side)
        return self._projection(self._norm(pooled.flatten(2).transpose(1, 2).flatten(0, 1)))
