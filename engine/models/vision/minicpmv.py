"""MiniCPM-V 2.6 (arXiv 2408.01800): SigLIP, whose patches of an image and of each of its slices are
resampled by learned queries to `query_num` vectors.


`transformers` has no class for it; `engine.multimodal.minicpmv` prepares images.
"""

from __future__ import annotations

from itertools import groupby

import torch
from torch import Tensor

from engine.contract.errors import ModelLoadError
from engine.models.families.common import Config
from engine.models.layers.linear import FusedLinear, LinearPart
from engine.models.layers.norm import LayerNorm, Transform
from engine.models.vision.family import VisionFamily, siglip_tower
from engine.models.vision.tower import VisionTower
from engine.models.weight_loader import WeightLoader

_EPS = 1e-6
#: The size of the resampler's heads.
_HEAD_DIM = 128


class MiniCPMV(VisionFamily):
    """An image of any shape: the whole image and its slices."""

    _tower: VisionTower

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if (version := str(config.get("version"))) != "2.6":
            raise ModelLoadError(
                f"config.json: version must be 2.6 of MiniCPM-V; got {version}.", param="version"
            )

    @property
    def text_config(self) -> Config:
        return self.config | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}

    def load(self, loader: WeightLoader) -> None:
        vision = {"hidden_act": "gelu_pytorch_tanh"} | self.config["vision_config"]
        if self.config.get("drop_vision_last_layer"):
            vision["num_hidden_layers"] -= 1
        spec = siglip_tower(vision, "vpm.")
        self._tower = VisionTower(spec, loader)
        self._resampler = Resampler(
            loader,
            num_queries=int(self.config["query_num"]),
            size=int(self.config["hidden_size"]),
            columns=spec.hidden_size,
        )

    def encode(self, tensors: dict[str, Tensor]) -> Tensor:
        pixels, patch = tensors["pixel_values"], self._tower.spec.patch_size
        sizes = [tuple(size) for size in tensors["tgt_sizes"].tolist()]
        parts, first = [], 0
        for (rows, columns), group in groupby(sizes):
            count = len(list(group))
            end = first + count * rows * columns * patch
            strips = pixels[:, :, first:end].unflatten(2, (count, -1)).permute(2, 0, 1, 3)
            positions = self._tower.positions[self._position_ids(rows, columns)]
            x = self._tower.embed(strips, positions[None])
            (states,) = self._tower.hidden_states(x, (-1,))
            parts.append(self._resampler(self._tower.last_norm(states), rows, columns))
            first = end
        return torch.cat(parts)

    def _position_ids(self, rows: int, columns: int) -> Tensor:
        """Return rows of the position table, int64 [rows * columns], by fractional coordinates."""
        side = self._tower.spec.patches_per_side
        boundaries = torch.arange(1 / side, 1.0, 1 / side)

        def buckets(length: int) -> Tensor:
            steps = torch.arange(0, 1 - 1e-6, 1 / length)
            return torch.bucketize(steps, boundaries, right=True)

        return (buckets(rows)[:, None] * side + buckets(columns)).flatten()


class Resampler:
    """Learned queries that attend to a slice's patches."""

    def __init__(self, loader: WeightLoader, *, num_queries: int, size: int, columns: int) -> None:
        """Read all weights. `size` is that of the vectors, `columns` that of the patches' states.

        Raises `ModelLoadError`.
        """
        self._size, self._num_heads = size, size // _HEAD_DIM

        def norm(name: str) -> LayerNorm:
            weight, bias = (
                loader.vector(f"resampler.{name}.{part}", size) for part in ("weight", "bias")
            )
            return LayerNorm(size, weight, bias, _EPS)

        def linear(name: str, columns: int, *, bias: bool) -> Transform:
            parts = (LinearPart(f"resampler.{name}", size),)
            return loader.linear(FusedLinear(parts=parts, columns=columns, bias=bias))

        weight = loader.tensor("resampler.attn.in_proj_weight", (3 * size, size)).float()
        bias = loader.vector("resampler.attn.in_proj_bias", 3 * size)
        weights, biases = weight.chunk(3), bias.chunk(3)
        queries = norm("ln_q")(loader.vector("resampler.query", num_queries, size))
        #: [1, heads, queries, head_dim]
        self._queries = self._by_head(
            torch.nn.functional.linear(queries, weights[0], biases[0])[None]
        )
        self._keys = loader.pack(weights[1].contiguous(), biases[1])
        self._values = loader.pack(weights[2].contiguous(), biases[2])
        self._input, self._input_norm = linear("kv_proj", columns, bias=False), norm("ln_kv")
        self._output = linear("attn.out_proj", size, bias=True)
        self._output_norm = norm("ln_post")
        projection = loader.tensor("resampler.proj", (size, size))
        self._projection = loader.pack(projection.T.contiguous(), None)

    def __call__(self, states: Tensor, rows: int, columns: int) -> Tensor:
        """Return vectors [n * queries, size] of states [n, rows * columns, hidden]."""
        count = len(states)
        x = self._input_norm(self._input(states.flatten(0, 1)))
        placed = x.unflatten(0, (count, -1)) + sine_positions(rows, columns, self._size).to(x)
        keys = self._by_head(self._keys(placed.flatten(0, 1)).unflatten(0, (count, -1)))
        values = self._by_head(self._values(x).unflatten(0, (count, -1)))
        queries = self._queries.expand(count, -1, -1, -1)
        attended = torch.nn.functional.scaled_dot_product_attention(queries, keys, values)
        vectors = self._output(attended.transpose(1, 2).reshape(-1, self._size))
        return self._projection(self._output_norm(vectors))

    def _by_head(self, x: Tensor) -> Tensor:
        """Reshape [n, length, size] to [n, heads, length, head_dim]."""
        return x.unflatten(-1, (self._num_heads, -1)).transpose(1, 2)


def sine_positions(rows: int, columns: int, size: int) -> Tensor:
    """Return positions, float32 [rows * columns, size]: sines and cosines of the column, then those
    of the row.
    """
    frequencies = 1.0 / 10000.0 ** (torch.arange(size // 4, dtype=torch.float32) / (size / 4))
    grid = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(1)
    angles = grid[:, :, None].float() * frequencies
    return torch.cat((angles.sin(), angles.cos()), dim=-1).flatten(1)
