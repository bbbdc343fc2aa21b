"""Qwen2-VL (arXiv 2409.12191), Qwen2.5-VL (arXiv 2502.13923) and Qwen3-VL (arXiv 2511.21631):
vision towers with rotary embedding by row and column, for images of any size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.contract.errors import ModelLoadError
from engine.models.encoders.encoder import LengthBatches
from engine.models.families.common import ACTIVATIONS, Config
from engine.models.layers.linear import FusedLinear, LinearPart
from engine.models.layers.norm import LayerNorm, Norm, Transform, chain, make_norm
from engine.models.vision.family import VisionFamily
from engine.models.vision.rotary_layer import RotaryLayer, Rotation
from engine.models.vision.tower import ungated_activation
from engine.models.weight_loader import WeightLoader
from kernels.interface import ActivationSpec, NormWeights
from kernels.layers import activation, gated_activation

_EPS = 1e-6
#: Number of patches that go through the layers together where they are of several frames, which
#: don't attend to each other: those of an image of 1,792 x 1,792 pixels.
_PATCHES_AT_ONCE = 16_384


class Qwen2VL(VisionFamily):
    """All patches of an image, or of two frames, attend to each other; `spatial_merge_size`^2
    neighbors become one token.
    """

    takes_videos = True
    prunable: tuple[str, ...] = ("image", "video")

    def load(self, loader: WeightLoader) -> None:
        vision = self.config["vision_config"]
        prefixes = ("visual.", "vlm.visual.", "vlm.model.visual.")
        self._prefix = next(
            (name for name in prefixes if f"{name}patch_embed.proj.weight" in loader.weights),
            "model.visual.",
        )
        self._loader, self._merge = loader, int(vision["spatial_merge_size"])
        self._read_sizes()
        hidden, heads = self._hidden, int(vision["num_heads"])
        self._heads, self._head_dim = heads, hidden // heads
        shape = (
            hidden, int(vision["in_channels"]), int(vision["temporal_patch_size"]),
            int(vision["patch_size"]), int(vision["patch_size"]),
        )  # fmt: skip
        weight = loader.tensor(f"{self._prefix}patch_embed.proj.weight", shape)
        bias = f"{self._prefix}patch_embed.proj.bias"
        has_bias = bias in loader.weights
        self._patches = loader.pack(
            weight.flatten(1), loader.vector(bias, hidden) if has_bias else None
        )
        half = self._head_dim // 2
        self._inverse = 1.0 / 10000.0 ** (torch.arange(0, half, 2, dtype=torch.float) / half)
        self._layers = [self._layer(index) for index in range(int(vision["depth"]))]
        self._load_merger()

    def _load_merger(self) -> None:
        out = int(self.config["text_config"]["hidden_size"])
        joined = self._hidden * self._merge**2
        self._merger_norm = self._norm("merger.ln_q")
        self._merger = chain(
            self._linear("merger.mlp.0", joined, joined),
            activation("gelu"),
            self._linear("merger.mlp.2", out, joined),
        )

    def _read_sizes(self) -> None:
        vision = self.config["vision_config"]
        self._hidden = int(vision["embed_dim"])
        self._inner = int(self._hidden * float(vision["mlp_ratio"]))

    def _linear(self, name: str, rows: int, columns: int) -> Transform:
        part = LinearPart(self._prefix + name, rows)
        return self._loader.linear(FusedLinear(parts=(part,), columns=columns, bias=True))

    def _norm(self, name: str) -> Norm:
        weight, bias = (
            self._loader.vector(f"{self._prefix}{name}.{part}", self._hidden)
            for part in ("weight", "bias")
        )
        return LayerNorm(self._hidden, weight, bias, _EPS)

    def _mlp(self, name: str) -> Transform:
        act = str(self.config["vision_config"]["hidden_act"])
        return chain(
            self._linear(f"{name}.fc1", self._inner, self._hidden),
            ungated_activation(self._loader.ops, ACTIVATIONS.get(act, act)),
            self._linear(f"{name}.fc2", self._hidden, self._inner),
        )

    def _layer(self, index: int) -> RotaryLayer:
        name, hidden = f"blocks.{index}", self._hidden
        return RotaryLayer(
            ops=self._loader.ops,
            round_attention=self._loader.spec.round_attention,
            attention_norm=self._norm(f"{name}.norm1"),
            qkv=self._linear(f"{name}.attn.qkv", 3 * hidden, hidden),
            output=self._linear(f"{name}.attn.proj", hidden, hidden),
            mlp_norm=self._norm(f"{name}.norm2"),
            mlp=self._mlp(f"{name}.mlp"),
            num_heads=self._heads,
        )

    def encode(self, tensors: dict[str, Tensor]) -> Tensor:
        _, rows, columns = tensors["image_grid_thw"][0].tolist()
        size = rows * columns
        num_frames = max(1, _PATCHES_AT_ONCE // size)
        vectors = [
            self._encode_frames(part, torch.tensor([[len(part) // size, rows, columns]]))
            for part in tensors["pixel_values"].split(num_frames * size)
        ]
        return torch.cat(vectors)

    def _encode_frames(self, pixels: Tensor, grid: Tensor) -> Tensor:
        """Encode frames. `grid`: their number, and rows and columns of patches, int64 [1, 3]."""
        x = self._patches(pixels)
        frames = LengthBatches(frame_starts(grid), x.device)
        rotation = Rotation(self._angles(patch_coordinates(grid, self._merge)))
        for layer in self._layers:
            x = layer(x, rotation, frames)
        return self._merger(self._merger_norm(x).view(-1, self._hidden * self._merge**2))

    def _angles(self, coordinates: Tensor) -> Tensor:
        """Return angles [n, head_dim / 2], given each patch's row and column, int64 [n, 2]."""
        angles = (coordinates[:, :, None].float() * self._inverse).flatten(1)
        return angles.to(self._loader.ops.device)


class ColQwen2(Qwen2VL):
    """Qwen2-VL as a retrieval model with a short vector per token (arXiv 2407.01449)."""

    takes_videos = False
    prunable = ("image",)

    def __init__(self, config: Config) -> None:
        kind = config["vlm_config"].get("model_type")
        if kind != "qwen2_vl":
            raise ModelLoadError(
                f"config.json: vlm_config.model_type must be 'qwen2_vl'; got {kind!r}.",
                param="vlm_config",
            )
        super().__init__(config["vlm_config"])


class Qwen25VL(Qwen2VL):
    """Qwen2-VL with RMSNorm, gated MLPs, and attention within windows in most layers."""

    def _read_sizes(self) -> None:
        vision = self.config["vision_config"]
        self._hidden = int(vision["hidden_size"])
        self._inner = int(vision["intermediate_size"])
        self._full_attention_layers = {int(index) for index in vision["fullatt_block_indexes"]}

    def _norm(self, name: str) -> Norm:
        weight = self._loader.vector(f"{self._prefix}{name}.weight", self._hidden)
        return make_norm(self._loader.ops, NormWeights("rms", weight), self._hidden, _EPS)

    def _mlp(self, name: str) -> Transform:
        act = ACTIVATIONS[str(self.config["vision_config"]["hidden_act"])]
        parts = tuple(
            LinearPart(f"{self._prefix}{name}.{part}_proj", self._inner) for part in ("gate", "up")
        )
        up = self._loader.linear(FusedLinear(parts=parts, columns=self._hidden, bias=True))
        gate = gated_activation(self._loader.ops, ActivationSpec(act))
        return chain(up, gate, self._linear(f"{name}.down_proj", self._hidden, self._inner))

    def _encode_frames(self, pixels: Tensor, grid: Tensor) -> Tensor:
        from transformers.vision_utils import get_vision_window_index

        vision, unit = self.config["vision_config"], self._merge**2
        order, window_starts = get_vision_window_index(
            grid,
            spatial_merge_size=self._merge,
            window_size=int(vision["window_size"]),
            patch_size=int(vision["patch_size"]),
        )

        def by_window(values: Tensor) -> Tensor:
            return values.unflatten(0, (-1, unit))[order].flatten(0, 1)

        x = by_window(self._patches(pixels))
        frames = LengthBatches(frame_starts(grid), x.device)
        windows = LengthBatches(window_starts, x.device)
        rotation = Rotation(self._angles(by_window(patch_coordinates(grid, self._merge))))
        for index, layer in enumerate(self._layers):
            x = layer(x, rotation, frames if index in self._full_attention_layers else windows)
        merged = self._merger(self._merger_norm(x).view(-1, self._hidden * unit))
        return merged[order.argsort()]


class Qwen3VL(Qwen2VL):
    """Qwen2-VL with position embeddings and DeepStack (arXiv 2406.04334): states of some layers are
    added to the hidden states after the decoder's first layers. They are part of a token's vector,
    which is therefore longer than `hidden_size`.
    """

    def _read_sizes(self) -> None:
        vision = self.config["vision_config"]
        self._hidden = int(vision["hidden_size"])
        self._inner = int(vision["intermediate_size"])

    def _load_merger(self) -> None:
        vision = self.config["vision_config"]
        num_layers = int(self.config["text_config"]["num_hidden_layers"])
        if len(vision["deepstack_visual_indexes"]) >= num_layers:
            raise ModelLoadError(
                "config.json: deepstack_visual_indexes must have fewer entries than the text model "
                f"has layers ({num_layers}).",
                param="deepstack_visual_indexes",
            )
        count = int(vision["num_position_embeddings"])
        self._side = int(count**0.5)
        name = f"{self._prefix}pos_embed.weight"
        self._positions = self._loader.vector(name, count, self._hidden)
        self._final_merger = self._join("merger", self._hidden)
        #: DeepStack's mergers by layer of the tower.
        self._deep_mergers = {
            int(layer): self._join(f"deepstack_merger_list.{index}", self._hidden * self._merge**2)
            for index, layer in enumerate(vision["deepstack_visual_indexes"])
        }

    def _join(self, name: str, norm_size: int) -> Transform:
        """Load a merger, [n, hidden] -> [n / merge^2, text hidden], with a norm of `norm_size`."""
        out, joined = int(self.config["text_config"]["hidden_size"]), self._hidden * self._merge**2
        weight, bias = (
            self._loader.vector(f"{self._prefix}{name}.norm.{part}", norm_size)
            for part in ("weight", "bias")
        )
        return chain(
            lambda x: x.view(-1, norm_size),
            LayerNorm(norm_size, weight, bias, _EPS),
            lambda x: x.view(-1, joined),
            self._linear(f"{name}.linear_fc1", joined, joined),
            activation("gelu"),
            self._linear(f"{name}.linear_fc2", out, joined),
        )

    def _mlp(self, name: str) -> Transform:
        act = ACTIVATIONS[str(self.config["vision_config"]["hidden_act"])]
        return chain(
            self._linear(f"{name}.linear_fc1", self._inner, self._hidden),
            activation(act),
            self._linear(f"{name}.linear_fc2", self._hidden, self._inner),
        )

    def _encode_frames(self, pixels: Tensor, grid: Tensor) -> Tensor:
        from transformers.vision_utils import get_vision_interpolation_indices_and_weights

        indices, weights = get_vision_interpolation_indices_and_weights(
            grid, self._side, align_corners=True, spatial_merge_size=self._merge
        )
        table = self._positions
        positions = (table[indices] * weights[:, :, None].to(table)).sum(1)
        x = self._patches(pixels) + positions
        frames = LengthBatches(frame_starts(grid), x.device)
        rotation = Rotation(self._angles(patch_coordinates(grid, self._merge)))
        deep = []
        for index, layer in enumerate(self._layers):
            x = layer(x, rotation, frames)
            if (merger := self._deep_mergers.get(index)) is not None:
                deep.append(merger(x))
        return torch.cat((self._final_merger(x), *deep), dim=-1)


def frame_starts(grid: Tensor) -> Tensor:
    """Return the first patch of each frame, then the number of patches, int64 [frames + 1]."""
    frames, rows, columns = grid[0].tolist()
    return torch.arange(frames + 1) * rows * columns


def patch_coordinates(grid: Tensor, merge: int) -> Tensor:
    """Return each patch's row and column, int64 [n, 2], in the processor's order, in which patches
    that become one token are consecutive.
    """
    frames, rows, columns = grid[0].tolist()
    cells = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"))
    cells = cells.view(2, rows // merge, merge, columns // merge, merge).permute(1, 3, 2, 4, 0)
    return cells.reshape(-1, 2).repeat(frames, 1)
