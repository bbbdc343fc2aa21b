"""Qwen2-Audio (arXiv 2407.10759) and the audio encoder of Qwen2.5-Omni (arXiv 2503.20215).

Both are Whisper's encoder without the padding; pairs of states are averaged and projected to the
decoder's hidden size.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from engine.contract.errors import InvalidRequest
from engine.models.families.common import Config
from engine.models.layers.linear import FusedLinear, LinearPart
from engine.models.layers.norm import Transform
from engine.models.speech.whisper import WhisperEncoder, WhisperEncoderSpec, find_encoder
from engine.models.vision.family import VisionFamily
from engine.models.weight_loader import WeightLoader
from engine.multimodal.audio import FEATURES
from engine.multimodal.audio_prompts import NUM_FRAMES, num_states_of


class Qwen2Audio(VisionFamily):
    """The encoder of Qwen2-Audio, for one window of at most 30 s."""

    kinds: ClassVar[tuple[str, ...]] = ("audio",)

    _encoder: WhisperEncoder
    _projector: Transform

    def load(self, loader: WeightLoader) -> None:
        tower = find_encoder(loader.weights, "audio_tower.", "model.audio_tower.")
        spec = WhisperEncoderSpec.of_config(self.config["audio_config"])
        self._encoder = WhisperEncoder(spec, loader, tower)
        model = tower.removesuffix("audio_tower.")
        hidden = int(self.config["text_config"]["hidden_size"])
        parts = (LinearPart(f"{model}multi_modal_projector.linear", hidden),)
        self._projector = loader.linear(
            FusedLinear(parts=parts, columns=spec.hidden_size, bias=True)
        )

    def encode(self, tensors: dict[str, Tensor]) -> Tensor:
        spec, features = self._encoder.spec, tensors[FEATURES]
        shape, num_frames = (spec.num_mels, 2 * spec.length), int(tensors[NUM_FRAMES][0])
        if features.shape != shape or not 1 <= num_frames <= shape[1]:
            raise InvalidRequest(f"Features of audio must be {list(shape)}.", param="messages")
        states = self._encoder.states(features, num_states_of(num_frames))
        return self._projector(self._encoder.norm(average_pairs(states)))


def average_pairs(states: Tensor) -> Tensor:
    """Average pairs of rows: [n, hidden] -> [n // 2, hidden]. An odd last row is dropped."""
    return states[: len(states) // 2 * 2].unflatten(0, (-1, 2)).mean(dim=1)


class Qwen25Omni(VisionFamily):
    """The audio encoder of Qwen2.5-Omni's thinker, for audio of any length, in chunks that don't
    attend to each other. Speech output, images and videos aren't supported.
    """

    kinds: ClassVar[tuple[str, ...]] = ("audio",)
    ignored_prefixes: ClassVar[tuple[str, ...]] = (
        *("talker.", "thinker.visual.", "token2wav.", "visual.", "model.visual."),
        # The embeddings of the audio's begin and end.
        *("audio_tower.audio_bos_eos_token.", "thinker.audio_tower.audio_bos_eos_token."),
    )

    _encoder: WhisperEncoder
    _projector: Transform

    def __init__(self, config: Config) -> None:
        thinker = config.get("thinker_config") or {}
        super().__init__(config | {name: v for name, v in thinker.items() if v is not None})

    def load(self, loader: WeightLoader) -> None:
        prefixes = ("audio_tower.", "model.audio_tower.", "thinker.audio_tower.")
        tower = find_encoder(loader.weights, *prefixes)
        audio: dict[str, Any] = self.config["audio_config"]
        spec = WhisperEncoderSpec.of_config(audio)
        positions = sinusoids(spec.length, spec.hidden_size).to(loader.ops.device)
        self._encoder = WhisperEncoder(spec, loader, tower, norm="ln_post", positions=positions)
        parts = (LinearPart(f"{tower}proj", int(self.config["text_config"]["hidden_size"])),)
        self._projector = loader.linear(
            FusedLinear(parts=parts, columns=spec.hidden_size, bias=True)
        )
        self._chunk = 2 * int(audio["n_window"])

    def encode(self, tensors: dict[str, Tensor]) -> Tensor:
        spec, features = self._encoder.spec, tensors[FEATURES]
        self._encoder.check_features(features)
        num_chunks = features.shape[1] // self._chunk
        chunks = features[:, : num_chunks * self._chunk].unflatten(1, (-1, self._chunk))
        # As many chunks at once as have the frames of one Whisper window.
        batch = max(1, 2 * spec.length // self._chunk)
        states = [
            self._encoder.batch_states(part, self._chunk // 2).flatten(0, 1)
            for part in chunks.transpose(0, 1).split(batch)
            if len(part)
        ]
        remaining = features[:, num_chunks * self._chunk :]
        if num_frames := remaining.shape[1]:
            states.append(self._encoder.states(remaining, num_states_of(num_frames)))
        return self._projector(self._encoder.norm(average_pairs(torch.cat(states))))


def sinusoids(length: int, channels: int) -> Tensor:
    """Return Whisper's sinusoidal positions, float32 [length, channels]: sines, then cosines."""
    step = math.log(10_000) / (channels // 2 - 1)
    frequencies = torch.exp(-step * torch.arange(channels // 2, dtype=torch.float))
    angles = torch.arange(length)[:, None] * frequencies
    return torch.cat((angles.sin(), angles.cos()), dim=1)
