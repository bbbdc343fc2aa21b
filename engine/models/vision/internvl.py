"""InternVL 2.5 and 3 (arXiv 2412.05271, 2504.10479) in checkpoints of `transformers`: tiles of one
size, by default four patches per token.
"""

from __future__ import annotations

from torch import Tensor

from engine.models.families.common import ACTIVATIONS, Config
from engine.models.layers.linear import FusedLinear, LinearPart
from engine.models.layers.norm import LayerNorm, Transform, chain
from engine.models.vision.family import VisionFamily, make_tower_spec
from engine.models.vision.tower import TowerNames, VisionSpec, VisionTower, pixel_shuffle
from engine.models.weight_loader import WeightLoader
from kernels.layers import activation

_NAMES = TowerNames(
    patches="embeddings.patch_embeddings.projection",
    class_token="embeddings.cls_token",
    positions="embeddings.position_embeddings",
    layer="encoder.layer.{}.",
    query="attention.q_proj",
    key="attention.k_proj",
    value="attention.v_proj",
    output="attention.projection_layer",
    attention_norm="layernorm_before",
    mlp_norm="layernorm_after",
    batched=True,
    scales=("lambda_1", "lambda_2"),
)
#: Epsilon of the projector's norm: torch's default.
_EPS = 1e-5


class InternVL(VisionFamily):
    """An image's tiles and the whole image; a video's frames are encoded like tiles."""

    takes_videos = True
    prunable = ("image", "video")
    _tower: VisionTower
    _projector: Transform

    def load(self, loader: WeightLoader) -> None:
        config = self.config
        at_top = "vision_tower.embeddings.cls_token" in loader.weights
        model = "" if at_top else "model."
        spec = self._tower_spec(config["vision_config"], f"{model}vision_tower.")
        self._tower = VisionTower(spec, loader)
        self._layer = int(config["vision_feature_layer"])
        self._drops_class = config["vision_feature_select_strategy"] == "default"
        self._factor = round(1 / float(config["downsample_ratio"]))
        name, hidden = f"{model}multi_modal_projector.", int(config["text_config"]["hidden_size"])
        joined = spec.hidden_size * self._factor**2

        def linear(part: str, columns: int) -> Transform:
            parts = (LinearPart(name + part, hidden),)
            return loader.linear(FusedLinear(parts=parts, columns=columns, bias=True))

        weight, bias = (
            loader.vector(f"{name}layer_norm.{part}", joined) for part in ("weight", "bias")
        )
        self._projector = chain(
            LayerNorm(joined, weight, bias, _EPS),
            linear("linear_1", joined),
            activation(ACTIVATIONS[str(config["projector_hidden_act"])]),
            linear("linear_2", hidden),
        )

    def _tower_spec(self, vision: Config, prefix: str) -> VisionSpec:
        sizes = {name: _side(vision[name]) for name in ("image_size", "patch_size")}
        return make_tower_spec(
            vision | sizes,
            prefix,
            eps=1e-6,
            names=_NAMES,
            class_token=True,
            last_norm="" if vision["use_mean_pooling"] else "layernorm",
            attention_bias=bool(vision["attention_bias"]),
            norm="rms" if vision["norm_type"] == "rms_norm" else "layer",
            qk_norm=bool(vision["use_qk_norm"]),
        )

    def encode(self, tensors: dict[str, Tensor]) -> Tensor:
        x = self._tower.embed(tensors["pixel_values"])
        (states,) = self._tower.hidden_states(x, (self._layer,))
        if self._layer == -1:
            states = self._tower.last_norm(states)
        if self._drops_class:
            states = states[:, 1:]
        return self._projector(pixel_shuffle(states, self._factor).flatten(0, 1))


def _side(size: int | list[int]) -> int:
    """Return a square's side in pixels, which InternVL's configs may have as [height, width]."""
    return int(size if isinstance(size, int) else size[0])
