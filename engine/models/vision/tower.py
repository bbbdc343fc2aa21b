"""`VisionTower` and `TextTower`: CLIP, SigLIP and similar towers, described by `TowerSpec`.

All patches of an image attend to each other. Activations are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.layers.linear import FusedLinear, LinearPart
from engine.models.layers.norm import LayerNorm, NoNorm, Norm, RMSNorm, Transform, chain
from engine.models.weight_loader import WeightLoader
from kernels import KernelSet

#: A picture's tiles, or a video's frames, that go through the layers together: with CLIP-L's 577
#: patches the activations of the widest layer take 150 MB.
_ITEMS_AT_ONCE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerNames:
    """Names of a tower's weights in a checkpoint, by default CLIP's.

    Attributes:
        layer: the prefix of a layer's names.
        query, key, value, output, attention_norm, mlp_norm: names within a layer.
        batched: whether class token and positions have a leading batch dimension of 1.
        scales: names within a layer of the factors of attention's and MLP's outputs; () without.
    """

    patches: str = "embeddings.patch_embedding"
    class_token: str = "embeddings.class_embedding"
    positions: str = "embeddings.position_embedding.weight"
    layer: str = "encoder.layers.{}."
    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    output: str = "self_attn.out_proj"
    attention_norm: str = "layer_norm1"
    mlp_norm: str = "layer_norm2"
    batched: bool = False
    scales: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerSpec:
    """A transformer with bidirectional attention, or with a mask.

    Attributes:
        prefix: the prefix of its weights' names.
        names: the names of its weights.
        activation: the kernels' name of the MLP's activation, or "quick_gelu".
        first_norm: the name of the norm before the first layer, or "".
        last_norm: the name of the norm after the last layer, or "".
        attention_bias: whether queries, keys and values have biases.
        norm: the kind of the layers' norms, "layer" or "rms".
        qk_norm: whether queries and keys are normed, over all heads together.
    """

    prefix: str
    names: TowerNames = TowerNames()
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    activation: str
    norm_eps: float
    first_norm: str = ""
    last_norm: str = ""
    attention_bias: bool = True
    norm: str = "layer"
    qk_norm: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSpec(TowerSpec):
    """A vision transformer.

    Attributes:
        image_size, patch_size: sides in pixels.
        class_token: whether a learned vector precedes those of the patches.
        patch_bias: whether the patch embedding has a bias.
    """

    image_size: int
    patch_size: int
    num_channels: int = 3
    class_token: bool = False
    patch_bias: bool = True

    @property
    def patches_per_side(self) -> int:
        """Number of patches in a row of an image of `image_size`."""
        return self.image_size // self.patch_size


@dataclass(slots=True)
class VisionLayer:
    """Attention and MLP with a norm before each. For `round_attention` see
    `KernelSet.encoder_attention`.
    """

    ops: KernelSet
    round_attention: bool
    attention_norm: Norm
    qkv: Transform
    output: Transform
    mlp_norm: Norm
    mlp: Transform
    num_heads: int
    query_norm: Norm
    key_norm: Norm

    def __call__(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Return [n, length, hidden] of x [n, length, hidden]. `mask` bool, broadcastable to
        [n, 1, length, length], is True for keys to attend to; None for all.
        """
        batch, length, hidden = x.shape
        qkv = self.qkv(self.attention_norm(x.flatten(0, 1)))
        query, key, value = qkv.chunk(3, dim=-1)
        q, k, v = (
            part.unflatten(-1, (self.num_heads, -1))
            for part in (self.query_norm(query), self.key_norm(key), value)
        )
        if mask is None:
            attended = self.ops.encoder_attention(
                q, k, v, length, round_inputs=self.round_attention
            ).flatten(1)
        else:
            q, k, v = (part.unflatten(0, (batch, length)).transpose(1, 2) for part in (q, k, v))
            attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            attended = attended.transpose(1, 2).reshape(batch * length, hidden)
        x = self.output(attended).view(batch, length, hidden).add_(x)
        flat = self.mlp(self.mlp_norm(x.flatten(0, 1)))
        return flat.view(batch, length, hidden).add_(x)


def ungated_activation(ops: KernelSet, name: str) -> Transform:
    """Return the kernels' activation of this name, or CLIP's "quick_gelu", x * sigmoid(1.702 x)."""
    if name != "quick_gelu":
        return ops.activation(name)
    silu = ops.activation("silu")
    return lambda x: silu(x * 1.702).mul_(1 / 1.702)


@dataclass(frozen=True, slots=True)
class ScaleChannels:
    """Multiplication of each channel by a factor, float32 [hidden]."""

    factors: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Return [n, hidden] of x [n, hidden]."""
        return x * self.factors


class Tower:
    """The norms and layers of a `TowerSpec`.

    Attributes:
        last_norm: the norm after the last layer, which `hidden_states` doesn't apply.
    """

    def __init__(self, spec: TowerSpec, loader: WeightLoader) -> None:
        """Read all weights. Raises `ModelLoadError`."""
        self.spec, self._loader = spec, loader
        self._first_norm = self.norm(spec.first_norm)
        self._layers = [self._layer(index) for index in range(spec.num_layers)]
        self.last_norm = self.norm(spec.last_norm)

    def norm(self, name: str, kind: str = "layer") -> Norm:
        """Load the norm of this name, "layer" or "rms" by `kind`; `NoNorm` for no name."""
        if not name:
            return NoNorm()
        size, full_name = self.spec.hidden_size, self.spec.prefix + name
        if kind == "rms":
            weight = self._loader.vector(f"{full_name}.weight", size)
            return RMSNorm(self._loader.ops, weight, self.spec.norm_eps)
        weight, bias = (
            self._loader.vector(f"{full_name}.{part}", size) for part in ("weight", "bias")
        )
        return LayerNorm(size, weight, bias, self.spec.norm_eps)

    def _layer(self, index: int) -> VisionLayer:
        spec, names, loader = self.spec, self.spec.names, self._loader
        hidden, inner, layer = spec.hidden_size, spec.intermediate_size, names.layer.format(index)

        def linear(*parts: str, rows: int, columns: int, bias: bool = True) -> Transform:
            parts_of = tuple(LinearPart(spec.prefix + layer + part, rows) for part in parts)
            return loader.linear(FusedLinear(parts=parts_of, columns=columns, bias=bias))

        scales: list[tuple[Transform, ...]] = [
            (ScaleChannels(loader.vector(spec.prefix + layer + name, hidden)),)
            for name in names.scales
        ] or [(), ()]
        qkv, bias = (names.query, names.key, names.value), spec.attention_bias
        return VisionLayer(
            ops=loader.ops,
            round_attention=loader.spec.round_attention,
            attention_norm=self.norm(layer + names.attention_norm, spec.norm),
            qkv=linear(*qkv, rows=hidden, columns=hidden, bias=bias),
            output=chain(linear(names.output, rows=hidden, columns=hidden), *scales[0]),
            mlp_norm=self.norm(layer + names.mlp_norm, spec.norm),
            mlp=chain(
                linear("mlp.fc1", rows=inner, columns=hidden),
                ungated_activation(loader.ops, spec.activation),
                linear("mlp.fc2", rows=hidden, columns=inner),
                *scales[1],
            ),
            num_heads=spec.num_heads,
            query_norm=self.norm(f"{layer}attention.q_norm" if spec.qk_norm else "", "rms"),
            key_norm=self.norm(f"{layer}attention.k_norm" if spec.qk_norm else "", "rms"),
        )

    def hidden_states(
        self, x: Tensor, layers: tuple[int, ...], mask: Tensor | None = None
    ) -> list[Tensor]:
        """Return the states after `layers`, in that order; 0 is the first layer's input.

        Args:
            x: [n, length, hidden], the embeddings.
            layers: negative indices count from the last; later layers than these aren't run.
            mask: bool, True for patches to attend to, [n, length] or for each query
                [n or 1, 1, length, length]; None for all.
        """
        if len(x) > _ITEMS_AT_ONCE:
            items = x.split(_ITEMS_AT_ONCE)
            masks: Sequence[Tensor | None] = [mask] * len(items)
            if mask is not None and len(mask) == len(x):
                masks = mask.split(_ITEMS_AT_ONCE)
            parts = (
                self.hidden_states(item, layers, of_item)
                for item, of_item in zip(items, masks, strict=True)
            )
            return [torch.cat(states) for states in zip(*parts, strict=True)]
        total = len(self._layers) + 1
        indices = [layer % total for layer in layers]
        keys = mask[:, None, None, :] if mask is not None and mask.dim() == 2 else mask
        x = self._first_norm(x)
        states = {0: x}
        for index, layer in enumerate(self._layers[: max(indices)]):
            x = layer(x, keys)
            if index + 1 in indices:
                states[index + 1] = x
        return [states[layer] for layer in indices]


class VisionTower(Tower):
    """A tower over the patches of images."""

    spec: VisionSpec

    def __init__(self, spec: VisionSpec, loader: WeightLoader) -> None:
        """Read all weights. Raises `ModelLoadError`."""
        super().__init__(spec, loader)
        names, prefix, hidden = spec.names, spec.prefix, spec.hidden_size
        shape: tuple[int, ...]
        shape = (hidden, spec.num_channels, spec.patch_size, spec.patch_size)
        # A convolution whose stride is its width is a matrix product with whole patches.
        weight = loader.tensor(f"{prefix}{names.patches}.weight", shape).flatten(1)
        bias = loader.vector(f"{prefix}{names.patches}.bias", hidden) if spec.patch_bias else None
        self._patches = loader.pack(weight, bias)
        batch = (1,) if names.batched else ()
        self._class: Tensor | None = None
        if spec.class_token:
            shape = (*batch, *batch, hidden)
            self._class = loader.vector(prefix + names.class_token, *shape).flatten()
        num_positions = spec.patches_per_side**2 + spec.class_token
        shape = (*batch, num_positions, hidden)
        self.positions = loader.vector(prefix + names.positions, *shape).flatten(0, -2)

    def embed(self, pixels: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return the embeddings [n, length, hidden].

        Args:
            pixels: float32 [n, channels, height, width], multiples of the patch size.
            positions: float [n or 1, num_patches, hidden], those of the patches; None for the
                tower's own, for images of `image_size`. With positions there is no class token.
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


class TextTower(Tower):
    """A tower over the tokens of texts of the same length.

    Attributes:
        max_length: the number of positions.
    """

    def __init__(
        self,
        spec: TowerSpec,
        loader: WeightLoader,
        vocab_size: int,
        max_length: int,
        *,
        causal: bool,
    ) -> None:
        """Read all weights. `causal` is whether a token attends only to itself and earlier ones.

        Raises `ModelLoadError`.
        """
        super().__init__(spec, loader)
        self._causal, self.max_length = causal, max_length
        name, hidden = f"{spec.prefix}embeddings.", spec.hidden_size
        self._embedding = loader.vector(f"{name}token_embedding.weight", vocab_size, hidden)
        self._positions = loader.vector(f"{name}position_embedding.weight", max_length, hidden)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Return normed states, float [n, length, hidden], of int64 [n, length]."""
        length = token_ids.shape[1]
        mask = None
        if self._causal:
            mask = torch.ones(
                1, 1, length, length, dtype=torch.bool, device=token_ids.device
            ).tril()
        x = self._embedding[token_ids] + self._positions[:length]
        (states,) = self.hidden_states(x, (-1,), mask)
        return self.last_norm(states)


def pixel_shuffle(x: Tensor, factor: int) -> Tensor:
    """Join squares of patches: [n, side^2, hidden] -> [n, side^2 / factor^2, hidden * factor^2]."""
    count, length, hidden = x.shape
    side = int(length**0.5)
    x = x.view(count, side // factor, factor, side // factor, factor, hidden)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(count, length // factor**2, hidden * factor**2)
