"""Idefics3 (arXiv 2408.12637) and SmolVLM: SigLIP, `scale_factor`^2 patches per token."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.models.layers.linear import FusedLinear, LinearPart
from engine.models.layers.norm import Transform
from engine.models.vision.family import VisionFamily, find_prefix, siglip_tower
from engine.models.vision.tower import VisionTower, pixel_shuffle
from engine.models.weight_loader import WeightLoader


class Idefics3(VisionFamily):
    """An image's tiles and the whole image, of one size, padded at the right and the bottom."""

    prunable = ("image",)
    _tower: VisionTower
    _projection: Transform

    def load(self, loader: WeightLoader) -> None:
        config = self.config
        prefix = find_prefix(loader.weights, "model.vision_model.", "vision_model.")
        spec = siglip_tower(config["vision_config"], prefix)
        self._tower = VisionTower(spec, loader)
        self._factor = int(config["scale_factor"])
        model = "model." if prefix.startswith("model.") else ""
        name = f"{model}connector.modality_projection.proj"
        part = LinearPart(name, int(config["text_config"]["hidden_size"]))
        columns = spec.hidden_size * self._factor**2
        self._projection = loader.linear(FusedLinear(parts=(part,), columns=columns))

    def encode(self, tensors: dict[str, Tensor]) -> Tensor:
        pixels = tensors["pixel_values"].flatten(0, 1)
        mask = tensors.get("pixel_attention_mask")
        patches = self._patch_mask(pixels, None if mask is None else mask.flatten(0, 1))
        x = self._tower.embed(pixels, self._positions(patches))
        counted = None if bool(patches.all()) else patches.flatten(1).to(x.device)
        (states,) = self._tower.hidden_states(x, (-1,), counted)
        joined = pixel_shuffle(self._tower.last_norm(states), self._factor)
        return self._projection(joined.flatten(0, 1))

    def _patch_mask(self, pixels: Tensor, mask: Tensor | None) -> Tensor:
        """Return bool [n, rows, columns]: which patches contain pixels that aren't padding."""
        size = self._tower.spec.patch_size
        count, _, height, width = pixels.shape
        if mask is None:
            shape = count, height // size, width // size
            return torch.ones(shape, dtype=torch.bool)
        return mask.unfold(1, size, size).unfold(2, size, size).sum(dim=(-1, -2)) > 0

    def _positions(self, patches: Tensor) -> Tensor:
        """Return position embeddings [n, num_patches, hidden] by the patches' fractional
        coordinates in the unpadded image.
        """
        side = self._tower.spec.patches_per_side
        boundaries = torch.arange(1 / side, 1.0, 1 / side)

        def buckets(filled: Tensor, length: int) -> Tensor:
            steps = torch.arange(length, dtype=torch.float32)
            fraction = (steps[None] * (1.0 / filled)[:, None]).clamp(max=1.0 - 1e-6)
            return torch.bucketize(fraction, boundaries, right=True)

        rows = buckets(patches[:, :, 0].sum(dim=1), patches.shape[1])
        columns = buckets(patches[:, 0, :].sum(dim=1), patches.shape[2])
        index = (rows[:, :, None] * side + columns[:, None, :]).flatten(1)
        return self._tower.positions[torch.where(patches.flatten(1), index, 0)]
