"""Whisper (Radford et al. 2022, arXiv 2212.04356): an encoder of log-mel frames, and a decoder with
cross attention to the encoder's states. Activations are float32 on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from engine.contract.errors import InvalidRequest, ModelLoadError
from engine.models.encoder_decoder import EncoderDecoder
from engine.models.families.common import ACTIVATIONS
from engine.models.layers.decoder_layer import CrossLayer
from engine.models.layers.linear import FusedLinear, LinearPart
from engine.models.layers.moe import Weights
from engine.models.layers.norm import LayerNorm, NoNorm, chain
from engine.models.lora import AdapterWeights
from engine.models.vision.tower import VisionLayer, ungated_activation
from engine.models.weight_loader import WeightLoader
from engine.multimodal.audio import FEATURES
from engine.multimodal.inputs import MediaTensors


@dataclass(frozen=True, slots=True, kw_only=True)
class WhisperEncoderSpec:
    """Sizes of an encoder. `length` is the number of states of a window of twice as many frames."""

    num_mels: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    length: int
    activation: str

    @classmethod
    def of_config(cls, config: dict[str, Any]) -> WhisperEncoderSpec:
        """Build from a config.json. Raises `ModelLoadError` for invalid sizes."""

        def read(name: str, alias: str) -> int:
            return int(config[alias if name not in config else name])

        try:
            spec = cls(
                num_mels=int(config.get("num_mel_bins", 80)),
                hidden_size=read("d_model", "hidden_size"),
                intermediate_size=read("encoder_ffn_dim", "intermediate_size"),
                num_layers=read("encoder_layers", "num_hidden_layers"),
                num_heads=read("encoder_attention_heads", "num_attention_heads"),
                length=int(config.get("max_source_positions", 1500)),
                activation=ACTIVATIONS[str(config.get("activation_function", "gelu"))],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ModelLoadError(f"config.json: the encoder can't be read: {error!r}.") from error
        sizes = (spec.num_mels, spec.hidden_size, spec.intermediate_size, spec.num_layers)
        if min(*sizes, spec.num_heads, spec.length) < 1 or spec.hidden_size % spec.num_heads:
            raise ModelLoadError(
                "config.json: sizes of the encoder must be at least 1, and d_model a multiple of "
                "encoder_attention_heads."
            )
        return spec


class WhisperEncoder:
    """Whisper's encoder.

    Attributes:
        spec: its sizes.
        norm: the last norm.
    """

    def __init__(
        self,
        spec: WhisperEncoderSpec,
        loader: WeightLoader,
        prefix: str = "model.encoder.",
        *,
        norm: str = "layer_norm",
        positions: Tensor | None = None,
    ) -> None:
        """Read all weights, whose names begin with `prefix`. Raises `ModelLoadError`.

        Args:
            norm: the name of the last norm.
            positions: float32 [length, hidden]; None if they are among the weights.
        """
        self.spec, self._loader = spec, loader
        hidden = spec.hidden_size
        dtype = loader.ops.activation_dtype(loader.dtype)
        # A convolution is a matrix product with all windows of three frames.
        self._convolutions = [
            loader.pack(
                loader.tensor(f"{prefix}{name}.weight", (hidden, channels, 3)).flatten(1),
                loader.vector(f"{prefix}{name}.bias", hidden),
            )
            for name, channels in (("conv1", spec.num_mels), ("conv2", hidden))
        ]
        if positions is None:
            positions = loader.vector(f"{prefix}embed_positions.weight", spec.length, hidden)
        self._positions = positions.to(dtype)
        self._layers = [
            make_encoder_layer(spec, loader, f"{prefix}layers.{index}.")
            for index in range(spec.num_layers)
        ]
        self.norm = _layer_norm(spec, loader, f"{prefix}{norm}")

    def __call__(self, features: Tensor) -> Tensor:
        """Return normed states [n, hidden] of log-mel values [num_mels, 2 * n]."""
        return self.norm(self.states(features, features.shape[1] // 2))

    def check_features(self, features: Tensor, multiple: int = 1) -> None:
        """Raise `InvalidRequest` unless features are [num_mels, n * multiple] with n at least 1."""
        num_mels = self.spec.num_mels
        is_shaped = features.ndim == 2 and features.shape[0] == num_mels
        if not is_shaped or not features.shape[1] or features.shape[1] % multiple:
            raise InvalidRequest(
                f"Features of audio must be [{num_mels}, n * {multiple}].", param="messages"
            )

    def states(self, features: Tensor, num_states: int) -> Tensor:
        """Return the first states before the last norm, [num_states, hidden]. They don't attend to
        later ones.
        """
        return self.batch_states(features[None], num_states)[0]

    def batch_states(self, features: Tensor, num_states: int) -> Tensor:
        """Return the first states before the last norm, [n, num_states, hidden], of n windows
        [n, num_mels, num_frames], which may be shorter than the encoder's window.
        """
        x = features.to(self._positions).transpose(1, 2)
        silence = _first_repeated(x), x.shape[1]
        for convolution, stride in zip(self._convolutions, (1, 2), strict=True):
            x, silence = _convolve(convolution, x, stride, silence)
        x = (x + self._positions[: x.shape[1]])[:, :num_states]
        for layer in self._layers:
            x = layer(x, None)
        return x


def _first_repeated(x: Tensor) -> int:
    """Return the first of the last frames of x [n, num_frames, channels] that are all the same;
    num_frames on other devices than CPUs, where the host would wait for the answer.
    """
    if x.device.type != "cpu":
        return x.shape[1]
    differing = (x != x[:, -1:]).any(2).any(0).nonzero()
    return int(differing[-1]) + 1 if len(differing) else 0


def _convolve(
    convolution: Callable[[Tensor], Tensor], x: Tensor, stride: int, repeated: tuple[int, int]
) -> tuple[Tensor, tuple[int, int]]:
    """Return a convolution's output of x [n, num_frames, channels], and the range of its frames
    that are all the same, as those of x in the range `repeated` are: they are computed once. Most
    of a window is often silence.
    """
    windows = torch.nn.functional.pad(x, (0, 0, 1, 1)).unfold(1, 3, stride)
    length, (start, end) = windows.shape[1], repeated
    # The window of frame i has the frames from i * stride - 1 to i * stride + 1.
    start = min(length, -(-(start + 1) // stride))
    end = max(start, (end - 2) // stride + 1)
    if num_copies := max(0, end - start - 1):
        windows = torch.cat((windows[:, : start + 1], windows[:, end:]), 1)
    windows = windows.flatten(2)
    x = convolution(windows.flatten(0, 1)).unflatten(0, windows.shape[:2])
    x = torch.nn.functional.gelu(x)
    if num_copies:
        copies = x[:, start : start + 1].expand(-1, num_copies, -1)
        x = torch.cat((x[:, : start + 1], copies, x[:, start + 1 :]), 1)
    return x, (start, end)


def find_encoder(weights: Weights, *prefixes: str) -> str:
    """Return the prefix in `prefixes` that an encoder's weights have in this checkpoint.

    Raises `ModelLoadError` if none does.
    """
    for prefix in prefixes:
        if f"{prefix}conv1.weight" in weights:
            return prefix
    raise ModelLoadError("There is no audio tower in the checkpoint.")


def _layer_norm(spec: WhisperEncoderSpec, loader: WeightLoader, name: str) -> LayerNorm:
    dtype = loader.ops.activation_dtype(loader.dtype)
    weight, bias = (
        loader.vector(f"{name}.{part}", spec.hidden_size).to(dtype) for part in ("weight", "bias")
    )
    return LayerNorm(spec.hidden_size, weight, bias, 1e-5)


def make_encoder_layer(spec: WhisperEncoderSpec, loader: WeightLoader, name: str) -> VisionLayer:
    """Load an encoder layer, whose weights' names begin with `name`. Raises `ModelLoadError`."""
    hidden, inner = spec.hidden_size, spec.intermediate_size

    def linear(*parts: str, rows: int, columns: int) -> Callable[[Tensor], Tensor]:
        described = tuple(
            LinearPart(name + part, rows, has_bias=part != "self_attn.k_proj") for part in parts
        )
        return loader.linear(FusedLinear(parts=described, columns=columns, bias=True))

    return VisionLayer(
        ops=loader.ops,
        round_attention=loader.spec.round_attention,
        attention_norm=_layer_norm(spec, loader, f"{name}self_attn_layer_norm"),
        qkv=linear(
            "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", rows=hidden, columns=hidden
        ),
        query_norm=NoNorm(),
        key_norm=NoNorm(),
        output=linear("self_attn.out_proj", rows=hidden, columns=hidden),
        mlp_norm=_layer_norm(spec, loader, f"{name}final_layer_norm"),
        mlp=chain(
            linear("fc1", rows=inner, columns=hidden),
            ungated_activation(loader.ops, spec.activation),
            linear("fc2", rows=hidden, columns=inner),
        ),
        num_heads=spec.num_heads,
    )


class WhisperModel(EncoderDecoder):
    """Whisper's encoder and decoder; the KV cache contains keys and values of encoder states."""

    encoder_spec: WhisperEncoderSpec
    #: Heads by layer, see `CrossAttention`.
    alignment_heads: dict[int, tuple[int, ...]]
    logits_processors: ClassVar = ("engine.sampling.whisper_timestamps:WhisperTimestamps",)

    def load(self, weights: Weights, progress: Callable[[int, int], None]) -> None:
        super().load(weights, progress)
        for index, layer in enumerate(self.layers):
            if isinstance(layer, CrossLayer):
                layer.cross.alignment_heads = self.alignment_heads.get(index, ())
        self._encoder = WhisperEncoder(self.encoder_spec, self.encoder_loader(weights))

    @torch.inference_mode()
    def encode_to_cache(
        self, tensors: MediaTensors, block_ids: list[int], adapter: AdapterWeights | None
    ) -> None:
        """Encode one window, and write the keys and values of its states for each layer to blocks.

        Args:
            tensors: `features`, float32 [num_mels, 2 * n] with n at most the encoder's length.
            block_ids: blocks of the cross-attention group, in order.
            adapter: may change the keys and values.
        """
        features = torch.from_numpy(tensors[FEATURES].copy()).to(self.ops.device)
        states = self._encoder(features)
        self.write_states(states, block_ids, adapter)
