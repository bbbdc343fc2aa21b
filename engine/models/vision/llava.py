"""LLaVA-1.5 (arXiv 2310.03744) and LLaVA-NeXT: CLIP, and an MLP of two layers as the connector."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.models.families.common import ACTIVATIONS
from engine.models.layers.linear import FusedLinear, LinearPart
from engine.models.layers.norm import Transform, chain
from engine.models.vision.family import VisionFamily, find_prefix, tower_of
from engine.models.vision.tower import VisionTower
from engine.models.weight_loader import WeightLoader
from kernels.layers import activation

TOWER_PREFIXES = (
    "vision_tower.vision_model.",
    "vision_tower.",
    "model.vision_tower.vision_model.",
    "model.vision_tower.",
)


class Llava(VisionFamily):
    """Images of one size; each patch becomes a token."""

    prunable: tuple[str, ...] = ("image",)
    _tower: VisionTower
    _projector: Transform

    def load(self, loader: WeightLoader) -> None:
        config = self.config
        prefix = find_prefix(loader.weights, *TOWER_PREFIXES)
        spec = tower_of(config, prefix)
        self._tower = VisionTower(spec, loader)
        layers = config["vision_feature_layer"]
        self._layers = tuple(layers) if isinstance(layers, list | tuple) else (int(layers),)
        self._drops_class = config["vision_feature_select_strategy"] == "default"
        if spec.class_token and not self._drops_class:
            self.prunable = ()  # a token stands for no square of pixels
        model = "model." if prefix.startswith("model.") else ""
        hidden = int(config["text_config"]["hidden_size"])
        bias = bool(config.get("multimodal_projector_bias", True))

        def linear(name: str, columns: int) -> Transform:
            parts = (LinearPart(f"{model}multi_modal_projector.{name}", hidden),)
            return loader.linear(FusedLinear(parts=parts, columns=columns, bias=bias))

        self._projector = chain(
            linear("linear_1", spec.hidden_size * len(self._layers)),
            activation(ACTIVATIONS[str(config["projector_hidden_act"])]),
            linear("linear_2", hidden),
        )

    def _features(self, pixels: Tensor) -> Tensor:
        """Return vectors [n, patches, hidden] of images [n, channels, height, width]."""
        states = self._tower.hidden_states(self._tower.embed(pixels), self._layers)
        if self._drops_class:
            states = [state[:, 1:] for state in states]
        selected = torch.cat(states, dim=-1)
        return self._projector(selected.flatten(0, 1)).unflatten(0, selected.shape[:2])

    def encode(self, tensors: dict[str, Tensor]) -> Tensor:
        return self._features(tensors["pixel_values"]).flatten(0, 1)


class LlavaNext(Llava):
    """An image of any size: the whole image and its tiles, with a learned vector after each row."""

    prunable = ()

    def load(self, loader: WeightLoader) -> None:
        super().load(loader)
        model = "model." if "model.image_newline" in loader.weights else ""
        hidden = int(self.config["text_config"]["hidden_size"])
        self._newline = loader.vector(f"{model}image_newline", hidden)

    def encode(self, tensors: dict[str, Tensor]) -> Tensor:
        features = self._features(tensors["pixel_values"].flatten(0, 1))
        height, width = tensors["image_sizes"].flatten().tolist()
        base, tiles = features[0], features[1:]
        rows, columns = self._grid(height, width)
        side = self._tower.spec.patches_per_side
        # [rows, columns, side, side, hidden] -> [hidden, height, width] in patches
        picture = tiles.view(rows, columns, side, side, -1).permute(4, 0, 2, 1, 3)
        picture = _unpadded(picture.flatten(1, 2).flatten(2, 3), height, width)
        newline = self._newline[:, None, None].expand(*picture.shape[:-1], 1).to(picture)
        picture = torch.cat((picture, newline), dim=-1)
        return torch.cat((base, picture.flatten(1, 2).T))

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the numbers of tiles in a column and in a row. The resolution in
        `image_grid_pinpoints` is the one that retains most of the image's pixels, among several the
        one with least padding.
        """
        best, best_fit = (0, 0), (-1, 0)
        for rows, columns in self.config["image_grid_pinpoints"]:
            scale = min(columns / width, rows / height)
            area = int(width * scale) * int(height * scale)
            effective = min(area, height * width)
            fit = effective, -(rows * columns - effective)
            if fit > best_fit:
                best, best_fit = (rows, columns), fit
        size = self._tower.spec.image_size
        return best[0] // size, best[1] // size


def _unpadded(picture: Tensor, height: int, width: int) -> Tensor:
    """Return `picture`, [hidden, rows, columns], without patches that contain only padding of an
    image of `height` x `width` pixels.
    """
    rows, columns = picture.shape[1:]
    if width / height > columns / rows:
        padding = (rows - int(round(height * (columns / width), 7))) // 2
        return picture[:, padding : rows - padding]
    padding = (columns - int(round(width * (rows / height), 7))) // 2
    return picture[:, :, padding : columns - padding]
