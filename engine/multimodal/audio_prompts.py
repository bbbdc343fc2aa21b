"""`AudioProcessor`: sound in prompts of decoders that hear, and the tokens that stand for it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.contract.errors import InvalidRequest, ModelLoadError
from engine.multimodal.audio import FEATURES, HOP, SAMPLE_RATE, log_powers, window_tensors
from engine.multimodal.inputs import encode_tensors, media_digest
from engine.multimodal.processor import PreparedMedia
from engine.multimodal.sound_files import decode_sound
from engine.multimodal.sound_processor import read_samples

#: Frames of a window that hold sound, not padding: int64 [1].
NUM_FRAMES = "num_frames"


def num_states_of(num_frames: int) -> int:
    """States of the encoder that hear so many frames: its second convolution takes every other."""
    return (num_frames + 1) // 2


@dataclass(frozen=True, slots=True)
class AudioProcessor:
    """Of one model of Qwen2-Audio's family: a token for two states of its encoder.

    Attributes:
        num_mels, max_frames: of what the encoder reads at once.
        audio_token, audio_token_id: the placeholder, which also stands for each vector.
    """

    num_mels: int
    max_frames: int
    audio_token: str
    audio_token_id: int

    @classmethod
    def from_folder(cls, folder: str | Path) -> AudioProcessor:
        """Of a model's folder. Raises `ModelLoadError` for a model that doesn't hear."""
        from transformers import AutoTokenizer

        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        if config.get("model_type") != "qwen2_audio":
            raise ModelLoadError(f"{folder} takes no audio.", param="model")
        audio = config.get("audio_config") or {}
        token_id = int(config.get("audio_token_index", config.get("audio_token_id", 151646)))
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=False, local_files_only=True
        )
        token = str(tokenizer.convert_ids_to_tokens(token_id))
        num_states = int(audio.get("max_source_positions", 1500))
        return cls(int(audio.get("num_mel_bins", 128)), 2 * num_states, token, token_id)

    def prepare(self, audio: Any) -> PreparedMedia:
        """What the encoder reads of (samples, rate), or of samples at `SAMPLE_RATE`.

        Raises `InvalidRequest` for what is no sound, too long or too short.
        """
        samples = read_samples(audio, self.max_frames * HOP / SAMPLE_RATE)
        return self._prepare([samples], "multi_modal_data")

    def prepare_file(self, data: bytes) -> PreparedMedia:
        """The same of a file of sound, of which no more is decoded than the model hears."""
        return self._prepare(decode_sound(data, "messages"), "messages")

    def _prepare(self, chunks: Iterable[np.ndarray], param: str) -> PreparedMedia:
        max_samples = self.max_frames * HOP
        parts: list[np.ndarray] = []
        num_samples = 0
        for chunk in chunks:
            parts.append(chunk)
            num_samples += len(chunk)
            if num_samples > max_samples:
                raise InvalidRequest(
                    f"The audio must have at most {max_samples / SAMPLE_RATE:g} s, which the model "
                    "hears at once. Cut it.",
                    param=param,
                )
        num_frames = -(-num_samples // HOP)
        num_tokens = num_states_of(num_frames) // 2
        if not num_tokens:
            raise InvalidRequest("The audio is too short: nothing is left of it.", param=param)
        powers = log_powers(np.concatenate(parts), self.num_mels, self.max_frames)
        tensors = {
            FEATURES: window_tensors(powers, self.max_frames)[FEATURES],
            NUM_FRAMES: np.asarray([num_frames]),
        }
        encoded = encode_tensors(tensors)
        return PreparedMedia(
            kind="audio",
            digest=media_digest("audio", encoded),
            replacement=self.audio_token * num_tokens,
            num_vectors=num_tokens,
            tensors=tensors,
            encoded=encoded,
            placeholder=self.audio_token,
            placeholder_id=self.audio_token_id,
            token_id=self.audio_token_id,
            seconds=num_samples / SAMPLE_RATE,
        )
