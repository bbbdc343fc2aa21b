"""Pixtral (arXiv 2410.07073) and Mistral 3: a vision tower with rotary embedding by row and column,
for images of any size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.contract.errors import ModelLoadError
from engine.models.encoders.encoder import LengthBatches
from engine.models.families.common import ACTIVATIONS, Config
from engine.models.layers.linear import FusedLinear, LinearPart
from engine.models.layers.norm import Norm, Transform, chain, make_norm
from engine.models.vision.family import VisionFamily
from engine.models.vision.rotary_layer import RotaryLayer, Rotation
from engine.models.weight_loader import WeightLoader
from kernels.interface import ActivationSpec, NormWeights
from kernels.layers import activation, gated_activation

_EPS = 1e-5


class PixtralTower:
    """A vision tower in which all patches of an image attend to each other."""

    def __init__(self, vision: Config, prefix: str, loader: WeightLoader) -> None:
        self._prefix, self._loader = prefix, loader
        self.hidden_size, self.patch_size = int(vision["hidden_size"]), int(vision["patch_size"])
        self._inner = int(vision["intermediate_size"])
        self._num_heads = int(vision["num_attention_heads"])
        self._activation = ActivationSpec(ACTIVATIONS[str(vision["hidden_act"])])
        shape = (self.hidden_size, int(vision["num_channels"]), self.patch_size, self.patch_size)
        self._patches = loader.pack(
            loader.tensor(f"{prefix}patch_conv.weight", shape).flatten(1), None
        )
        self._first_norm = self._norm("ln_pre")
        self._layers = [self._layer(index) for index in range(int(vision["num_hidden_layers"]))]
        head_dim = self.hidden_size // self._num_heads
        theta = float(vision["rope_parameters"]["rope_theta"])
        steps = torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim
        #: [2, head_dim / 4], for rows and for columns, which have alternate frequencies.
        self._inverse = (1.0 / theta**steps).view(-1, 2).T

    def _norm(self, name: str) -> Norm:
        weight = self._loader.vector(f"{self._prefix}{name}.weight", self.hidden_size)
        return make_norm(self._loader.ops, NormWeights("rms", weight), self.hidden_size, _EPS)

    def _linear(self, rows: int, columns: int, *names: str) -> Transform:
        parts = tuple(LinearPart(self._prefix + name, rows) for name in names)
        return self._loader.linear(FusedLinear(parts=parts, columns=columns))

    def _layer(self, index: int) -> RotaryLayer:
        name, hidden, inner = f"transformer.layers.{index}", self.hidden_size, self._inner
        qkv = [f"{name}.attention.{part}_proj" for part in ("q", "k", "v")]
        gate_up = [f"{name}.feed_forward.{part}_proj" for part in ("gate", "up")]
        return RotaryLayer(
            ops=self._loader.ops,
            round_attention=self._loader.spec.round_attention,
            attention_norm=self._norm(f"{name}.attention_norm"),
            qkv=self._linear(hidden, hidden, *qkv),
            output=self._linear(hidden, hidden, f"{name}.attention.o_proj"),
            mlp_norm=self._norm(f"{name}.ffn_norm"),
            mlp=chain(
                self._linear(inner, hidden, *gate_up),
                gated_activation(self._loader.ops, self._activation),
                self._linear(hidden, inner, f"{name}.feed_forward.down_proj"),
            ),
            num_heads=self._num_heads,
        )

    def hidden_states(self, pixels: Tensor, layers: tuple[int, ...]) -> Tensor:
        """Return the states of each patch after `layers`, [rows, columns, hidden * len(layers)].

        Args:
            pixels: float32 [channels, height, width], multiples of the patch size.
            layers: 0 is the first layer's input; negative indices count from the last layer.
        """
        size, num_states = self.patch_size, len(self._layers) + 1
        patches = pixels.unfold(1, size, size).unfold(2, size, size)
        rows, columns = patches.shape[1:3]
        x = self._patches(patches.permute(1, 2, 0, 3, 4).reshape(rows * columns, -1))
        coordinates = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).to(x.device)
        angles = (coordinates[:, :, None].float() * self._inverse.to(x.device)).flatten(1)
        rotation = Rotation(angles)
        sequences = LengthBatches(torch.tensor([0, len(x)]), x.device)
        states = [self._first_norm(x)]
        for layer in self._layers[: max(index % num_states for index in layers)]:
            states.append(layer(states[-1], rotation, sequences))
        selected = [states[index % num_states] for index in layers]
        return torch.cat(selected, dim=-1).view(rows, columns, -1)


class Pixtral(VisionFamily):
    """Each patch, or with Mistral 3 each square of `spatial_merge_size`^2, becomes a token."""

    _tower: PixtralTower
    _projector: Transform
    _norm: Norm | None = None
    _merger: Transform | None = None

    def load(self, loader: WeightLoader) -> None:
        config, weights = self.config, loader.weights
        vision, text = config["vision_config"], config["text_config"]
        if vision.get("model_type") != "pixtral":
            raise ModelLoadError(
                f"config.json: vision_config.model_type {vision.get('model_type')!r} isn't "
                "supported.",
                param="vision_config",
            )
        model = "model." if "model.vision_tower.patch_conv.weight" in weights else ""
        self._tower = PixtralTower(vision, f"{model}vision_tower.", loader)
        layers = config["vision_feature_layer"]
        self._layers = tuple(layers) if isinstance(layers, list | tuple) else (int(layers),)
        hidden, size = int(text["hidden_size"]), self._tower.hidden_size
        name, bias = f"{model}multi_modal_projector.", bool(config["multimodal_projector_bias"])

        def linear(part: str, rows: int, columns: int, *, bias: bool) -> Transform:
            parts = (LinearPart(name + part, rows),)
            return loader.linear(FusedLinear(parts=parts, columns=columns, bias=bias))

        if (merge := config.get("spatial_merge_size")) is not None:
            self._merge = int(merge)
            norm = NormWeights("rms", loader.vector(f"{name}norm.weight", size))
            self._norm = make_norm(loader.ops, norm, size, float(text["rms_norm_eps"]))
            part, columns = "patch_merger.merging_layer", size * self._merge**2
            self._merger = linear(part, size, columns, bias=False)
        self._projector = chain(
            linear("linear_1", hidden, size * len(self._layers), bias=bias),
            activation(ACTIVATIONS[str(config["projector_hidden_act"])]),
            linear("linear_2", hidden, hidden, bias=bias),
        )

    def encode(self, tensors: dict[str, Tensor]) -> Tensor:
        x = self._tower.hidden_states(tensors["pixel_values"][0], self._layers)
        if self._norm is not None and self._merger is not None:
            x = self._merger(self._joined(self._norm(x.flatten(0, 1)).view_as(x)))
        return self._projector(x.flatten(0, -2))

    def _joined(self, x: Tensor) -> Tensor:
        """Join squares of patches, row by row: [rows, columns, hidden] -> [n, hidden * merge^2]."""
        squares = x.unfold(0, self._merge, self._merge).unfold(1, self._merge, self._merge)
        return squares.flatten(0, 1).flatten(1)
