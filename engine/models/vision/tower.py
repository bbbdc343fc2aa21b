"""`VisionTower`: CLIP, SigLIP and their relatives, described by `VisionSpec`.

Patches of a picture attend to all others of it. Activations are float32 on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.layers.linear import FusedLinear, LinearPart
from engine.models.layers.norm import LayerNorm, NoNorm, Norm, Transform, chain
from engine.models.weight_loader import WeightLoader
from kernels.layers import activation


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSpec:
    """A vision transformer.

    Attributes:
        prefix: of its weights' names.
        image_size, patch_size: pixels of a side.
        activation: of the MLP, by the kernels' name.
        class_token: a vector before the patches' own, which attends as they do.
        patch_bias: whether the patch embedding has one.
        first_norm: a norm before the first layer, by its name, or "".
        last_norm: a norm after the last layer, by its name, or "".
        attention_bias: whether queries, keys, values and the output have one.
    """

    prefix: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    image_size: int
    patch_size: int
    activation: str
    norm_eps: float
    num_channels: int = 3
    class_token: bool = False
    patch_bias: bool = True
    first_norm: str = ""
    last_norm: str = ""
    attention_bias: bool = True

    @property
    def patches_per_side(self) -> int:
        """Patches in a row of a picture of `image_size`."""
        return self.image_size // self.patch_size


@dataclass(slots=True)
class VisionLayer:
    """Attention and MLP with a norm before each."""

    attention_norm: Norm
    qkv: Transform
    output: Transform
    mlp_norm: Norm
    mlp: Transform
    num_heads: int

    def __call__(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """[n, length, hidden] of the same. `mask`: bool [n, 1, 1, length], keys that count."""
        batch, length, hidden = x.shape
        qkv = self.qkv(self.attention_norm(x).flatten(0, 1))
        q, k, v = qkv.view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        attended = attended.transpose(1, 2).reshape(batch * length, hidden)
        x = x + self.output(attended).view(batch, length, hidden)
        flat = self.mlp(self.mlp_norm(x).flatten(0, 1))
        return x + flat.view(batch, length, hidden)


def plain_activation(name: str) -> Transform:
    """The kernels' activation of this name, or "quick_gelu"."""
    return _quick_gelu if name == "quick_gelu" else activation(name)


def _quick_gelu(x: Tensor) -> Tensor:
    """CLIP's approximation of GELU."""
    return x * torch.sigmoid(1.702 * x)


class VisionTower:
    """Pictures of one size in, hidden states of their patches out."""

    def __init__(self, spec: VisionSpec, loader: WeightLoader) -> None:
        """Reads all weights. Raises `ModelLoadError`."""
        self.spec, self._loader = spec, loader
        names = f"{spec.prefix}embeddings."
        shape = (spec.hidden_size, spec.num_channels, spec.patch_size, spec.patch_size)
        # A convolution whose stride is its width is a product of whole patches.
        weight = loader.tensor(f"{names}patch_embedding.weight", shape).flatten(1)
        bias = (
            loader.vector(f"{names}patch_embedding.bias", spec.hidden_size)
            if spec.patch_bias
            else None
        )
        self._patches = loader.pack(weight, bias)
        self._class = (
            loader.vector(f"{names}class_embedding", spec.hidden_size) if spec.class_token else None
        )
        num_positions = spec.patches_per_side**2 + spec.class_token
        self.positions = loader.vector(
            f"{names}position_embedding.weight", num_positions, spec.hidden_size
        )
        self._first_norm = self._norm(spec.first_norm)
        self._layers = [self._layer(index) for index in range(spec.num_layers)]
        self.last_norm = self._norm(spec.last_norm)

    def _norm(self, name: str) -> Norm:
        if not name:
            return NoNorm()
        size, full_name = self.spec.hidden_size, self.spec.prefix + name
        vectors = [self._loader.vector(f"{full_name}.{part}", size) for part in ("weight", "bias")]
        dtype = self._loader.ops.activation_dtype(self._loader.dtype)
        weight, bias = (vector.to(dtype) for vector in vectors)
        return LayerNorm(size, weight, bias, self.spec.norm_eps)

    def _layer(self, index: int) -> VisionLayer:
        spec, loader = self.spec, self._loader
        hidden, inner = spec.hidden_size, spec.intermediate_size
        name = f"{spec.prefix}encoder.layers.{index}."

        def linear(*parts: str, rows: int, columns: int, bias: bool = True) -> Transform:
            parts_of = tuple(LinearPart(name + part, rows) for part in parts)
            return loader.linear(FusedLinear(parts=parts_of, columns=columns, bias=bias))

        attention = [f"self_attn.{part}_proj" for part in ("q", "k", "v")]
        bias = spec.attention_bias
        return VisionLayer(
            attention_norm=self._norm(f"encoder.layers.{index}.layer_norm1"),
            qkv=linear(*attention, rows=hidden, columns=hidden, bias=bias),
            output=linear("self_attn.out_proj", rows=hidden, columns=hidden, bias=bias),
            mlp_norm=self._norm(f"encoder.layers.{index}.layer_norm2"),
            mlp=chain(
                linear("mlp.fc1", rows=inner, columns=hidden),
                plain_activation(spec.activation),
                linear("mlp.fc2", rows=hidden, columns=inner),
            ),
            num_heads=spec.num_heads,
        )

    def embed(self, pixels: Tensor, positions: Tensor | None = None) -> Tensor:
        """[n, length, hidden] before the first layer.

        Args:
            pixels: float32 [n, channels, height, width], multiples of the patch's size.
            positions: float [n or 1, num_patches, hidden], those of the patches; None: of a picture
                of `image_size`.
        """
        spec, size = self.spec, self.spec.patch_size
        count, channels = pixels.shape[:2]
        patches = pixels.unfold(2, size, size).unfold(3, size, size)
        patches = patches.permute(0, 2, 3, 1, 4, 5).reshape(-1, channels * size * size)
        x = self._patches(patches).view(count, -1, spec.hidden_size)
        if positions is not None:
            return x + positions
        if self._class is not None:
            x = torch.cat((self._class.expand(count, 1, -1).to(x), x), dim=1)
        return x + self.positions

    def hidden_states(
        self, x: Tensor, layers: tuple[int, ...], mask: Tensor | None = None
    ) -> list[Tensor]:
        """The states that the layers `layers` return, in that order; 0 is the input of the first.

        Args:
            x: as `embed` returns them.
            layers: negative ones count from the last; no layer behind all of them is computed.
            mask: bool [n, length], patches that count; None: all.
        """
        total = len(self._layers) + 1
        wanted = [layer % total for layer in layers]
        keys = None if mask is None else mask[:, None, None, :]
        x = self._first_norm(x)
        states = {0: x}
        for index, layer in enumerate(self._layers[: max(wanted)]):
            x = layer(x, keys)
            if index + 1 in wanted:
                states[index + 1] = x
        return [states[layer] for layer in wanted]
