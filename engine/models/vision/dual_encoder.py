"""CLIP (arXiv 2103.00020) and SigLIP (arXiv 2303.15343): a text tower and a vision tower, whose
vectors are in the same space.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor

from engine.contract.errors import InvalidRequest, ModelLoadError
from engine.models.decoder_spec import DecoderSpec
from engine.models.encoders.encoder import NativeEncoder
from engine.models.encoders.encoder_spec import EncoderNames, EncoderSpec
from engine.models.families.common import Config
from engine.models.forward_context import AttentionMetadata
from engine.models.layers.linear import FusedLinear, LinearPart
from engine.models.layers.moe import Weights
from engine.models.layers.norm import Norm, Transform, chain
from engine.models.vision.family import activation_name, clip_tower, siglip_tower
from engine.models.vision.registry import complete_config
from engine.models.vision.tower import TextTower, TowerSpec, VisionTower, ungated_activation
from engine.models.weight_loader import WeightLoader
from engine.multimodal.inputs import MediaTensors
from engine.quantization.packing import make_quant_scheme
from kernels import LinearLayer

DUAL_ENCODERS = ("CLIPModel", "SiglipModel")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names(EncoderNames):
    embedding: str = "text_model.embeddings.token_embedding"
    optional_prefix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DualEncoderSpec(EncoderSpec):
    """The spec of both towers. `hidden_size` is the vectors' size, others are the text tower's.

    Attributes:
        text, vision: `text_config` and `vision_config` with their defaults.
        transposed: see `DecoderSpec`.
        round_attention: see `DecoderSpec`; linear layers round their inputs, too.
    """

    text: Config
    vision: Config
    transposed: bool = False
    round_attention: bool = False

    @property
    def is_clip(self) -> bool:
        """Whether this is CLIP, with causal texts and a class token. Otherwise it is SigLIP, with
        padded texts and attention pooling of patches.
        """
        return self.architecture == "CLIPModel"


def dual_encoder_spec(raw: Config) -> DualEncoderSpec:
    """Build the spec from config.json. Raises `ModelLoadError` for an invalid one."""
    config = complete_config(raw)
    text, vision = config["text_config"], config["vision_config"]
    architecture = str(raw["architectures"][0])
    is_clip = architecture == "CLIPModel"
    size = int(config["projection_dim"] if is_clip else text["projection_size"])
    if not is_clip and int(vision["hidden_size"]) != size:
        raise ModelLoadError(
            f"config.json: projection_size must be vision_config.hidden_size; got {size}.",
            param="projection_size",
        )
    return DualEncoderSpec(
        architecture=architecture,
        hidden_size=size,
        num_layers=int(text["num_hidden_layers"]),
        num_heads=int(text["num_attention_heads"]),
        head_dim=int(text["hidden_size"]) // int(text["num_attention_heads"]),
        intermediate_size=int(text["intermediate_size"]),
        vocab_size=int(text["vocab_size"]),
        max_position_embeddings=int(text["max_position_embeddings"]),
        names=_Names(prefix=""),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        text=text,
        vision=vision,
    )


class DualEncoder(NativeEncoder):
    """A model that returns for a token the vector of its text, and for an image's one token that of
    the image.
    """

    spec: DualEncoderSpec

    def load(
        self,
        weights: Weights,
        progress: Callable[[int, int], None],
        embed: Transform | None = None,
    ) -> None:
        spec = self.spec
        loader = WeightLoader(
            cast(DecoderSpec, spec),
            self.ops,
            self.weight_dtype,
            self.max_model_len,
            weights,
            make_quant_scheme(self._quantization, spec.round_attention),
        )
        text = TowerSpec(
            prefix="text_model.",
            hidden_size=int(spec.text["hidden_size"]),
            intermediate_size=spec.intermediate_size,
            num_layers=spec.num_layers,
            num_heads=spec.num_heads,
            activation=activation_name(spec.text),
            norm_eps=float(spec.text["layer_norm_eps"]),
            last_norm="final_layer_norm",
        )
        self._text = TextTower(
            text, loader, spec.vocab_size, spec.max_position_embeddings, causal=spec.is_clip
        )
        progress(1, 2)
        tower = clip_tower if spec.is_clip else siglip_tower
        vision = tower(spec.vision, "vision_model.")
        self._vision = VisionTower(vision, loader)
        self._pool: Transform
        if spec.is_clip:
            self._text_projection = _linear(loader, "text_projection", text, spec, bias=False)
            norm = self._vision.norm("post_layernorm")
            projection = _linear(loader, "visual_projection", vision, spec, bias=False)
            self._pool = chain(lambda states: states[:, 0], norm, projection)
        else:
            self._text_projection = _linear(loader, "text_model.head", text, spec, bias=True)
            self._pool = chain(self._vision.last_norm, AttentionPool(self._vision, loader))
        progress(2, 2)

    def forward(
        self, token_ids: Tensor, context: AttentionMetadata, token_types: Tensor | None = None
    ) -> Tensor:
        vectors = torch.empty(len(token_ids), self.spec.hidden_size)
        positions, pictures = context.encoder_embeds or (torch.empty(0, dtype=torch.long), None)
        if pictures is not None:
            vectors[positions] = pictures
        by_length: dict[int, list[int]] = {}
        of_pictures = set(positions.tolist())
        for start, end in pairwise(context.query_start_loc.tolist()):
            if start not in of_pictures:
                by_length.setdefault(end - start, []).append(start)
        for length, starts in by_length.items():
            rows = torch.tensor(starts)[:, None] + torch.arange(length)
            vectors[rows] = self._text_vectors(token_ids[rows])
        return vectors

    def _text_vectors(self, token_ids: Tensor) -> Tensor:
        """Return vectors [n, length, size] of token ids, int64 [n, length].

        With CLIP they are those of the text up to each token, with SigLIP that of the whole text.
        """
        count, length = token_ids.shape
        if self.spec.is_clip:
            states = self._text(token_ids)
            return self._text_projection(states.flatten(0, 1)).view(count, length, -1)
        padding = self._text.max_length - length
        padded = torch.nn.functional.pad(
            token_ids, (0, padding), value=int(self.spec.text["pad_token_id"])
        )
        vectors = self._text_projection(self._text(padded)[:, -1])
        return vectors[:, None].expand(count, length, -1)

    @torch.inference_mode()
    def encode(self, kind: str, tensors: MediaTensors) -> Tensor:
        """Return the vector of one image, [1, size]. Raises `InvalidRequest` for other kinds."""
        if kind != "image":
            raise InvalidRequest(f"{self.spec.architecture} takes no {kind}.", param="messages")
        pixels = torch.from_numpy(tensors["pixel_values"].copy())
        (states,) = self._vision.hidden_states(self._vision.embed(pixels), (-1,))
        return self._pool(states)

    def lora_linears(self, layer: int) -> Mapping[str, LinearLayer]:
        return {}

    def _slot_names(self) -> list[list[str]]:
        return [[] for _ in range(self.spec.num_layers)]


def _linear(
    loader: WeightLoader, name: str, tower: TowerSpec, spec: EncoderSpec, *, bias: bool
) -> Transform:
    """Load the projection of a tower's states to vectors."""
    part = LinearPart(name, spec.hidden_size)
    return loader.linear(FusedLinear(parts=(part,), columns=tower.hidden_size, bias=bias))


class AttentionPool:
    """SigLIP's pooling: one learned query attends to all patches, followed by an MLP."""

    def __init__(self, tower: VisionTower, loader: WeightLoader) -> None:
        spec = tower.spec
        name, hidden = f"{spec.prefix}head.", spec.hidden_size
        self._num_heads = spec.num_heads
        weight = loader.tensor(f"{name}attention.in_proj_weight", (3 * hidden, hidden)).float()
        bias = loader.vector(f"{name}attention.in_proj_bias", 3 * hidden)
        probe = loader.vector(f"{name}probe", 1, 1, hidden).view(1, hidden)
        query = torch.nn.functional.linear(probe, weight[:hidden], bias[:hidden])
        #: [1, heads, 1, head_dim]
        self._query = query.view(1, self._num_heads, 1, -1)
        self._keys_values = loader.pack(weight[hidden:].contiguous(), bias[hidden:])

        def linear(part: str, rows: int, columns: int) -> Transform:
            parts = (LinearPart(name + part, rows),)
            return loader.linear(FusedLinear(parts=parts, columns=columns, bias=True))

        self._output = linear("attention.out_proj", hidden, hidden)
        self._norm: Norm = tower.norm("head.layernorm")
        self._mlp = chain(
            linear("mlp.fc1", spec.intermediate_size, hidden),
            ungated_activation(loader.ops, spec.activation),
            linear("mlp.fc2", hidden, spec.intermediate_size),
        )

    def __call__(self, states: Tensor) -> Tensor:
        """Return [n, hidden] of states [n, patches, hidden]."""
        count, length, hidden = states.shape
        keys_values = self._keys_values(states.flatten(0, 1))
        keys, values = keys_values.view(count, length, 2, self._num_heads, -1).permute(
            2, 0, 3, 1, 4
        )
        query = self._query.expand(count, -1, -1, -1)
        attended = torch.nn.functional.scaled_dot_product_attention(query, keys, values)
        x = self._output(attended.reshape(count, hidden))
        return x + self._mlp(self._norm(x))
