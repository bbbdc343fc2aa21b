"""`AudioProcessor`: preprocessing of audio in prompts, and its placeholder tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.contract.errors import InvalidRequest, ModelLoadError
from engine.multimodal.audio import (
    FEATURES,
    HOP,
    SAMPLE_RATE,
    log_mel,
)
from engine.multimodal.inputs import (
    EMBEDS,
    MAX_MEDIA_BYTES,
    MediaTensors,
    encode_tensors,
    media_digest,
)
from engine.multimodal.processor import PreparedMedia
from engine.multimodal.sound_files import decode_sound
from engine.multimodal.sound_processor import read_samples
from engine.text.tokenizer import load_tokenizer
from engine.text.tokenizer_files import read_object

#: Tensor with the number of frames that aren't padding, int64 [1].
NUM_FRAMES = "num_frames"


def num_states_of(num_frames: int) -> int:
    """Return the number of encoder states, as the second convolution has stride 2."""
    return (num_frames + 1) // 2


@dataclass(frozen=True, slots=True)
class AudioLayout:
    """The input format of an audio encoder.

    Attributes:
        num_mels: number of mel bands.
        max_frames: maximum number of frames of an item.
        token_id: the token that stands for each vector.
        pad_frames: given the number of frames, returns that with padding.
        count_tokens: given the number of frames without padding, returns that of tokens.
        reads_padding: whether padding is part of the encoder's input. Without it, padding only
            takes part in the features' scaling.
    """

    num_mels: int
    max_frames: int
    token_id: int
    pad_frames: Callable[[int], int]
    count_tokens: Callable[[int], int]
    reads_padding: bool = True


def _qwen2_audio(config: dict[str, Any], folder: Path) -> AudioLayout:
    """One padded window; a token for two states that aren't padding."""
    audio = config.get("audio_config") or {}
    length = 2 * int(audio.get("max_source_positions", 1500))
    token_id = int(config.get("audio_token_index", config.get("audio_token_id", 151646)))
    return AudioLayout(
        int(audio.get("num_mel_bins", 128)),
        length,
        token_id,
        pad_frames=lambda num_frames: length,
        count_tokens=lambda num_frames: num_states_of(num_frames) // 2,
    )


def _voxtral(config: dict[str, Any], folder: Path) -> AudioLayout:
    """Any number of padded windows, all of whose states are used."""
    audio, text = config.get("audio_config") or {}, config.get("text_config") or {}
    num_states = int(audio.get("max_source_positions", 1500))
    hidden = int(audio.get("hidden_size", audio.get("d_model", 1280)))
    stacked = int(audio.get("intermediate_size", audio.get("encoder_ffn_dim", 5120))) // hidden
    window, tokens = 2 * num_states, num_states // stacked
    num_mels = int(audio.get("num_mel_bins", 128))
    return AudioLayout(
        num_mels,
        _max_windows(text, tokens, num_mels * window) * window,
        int(config.get("audio_token_id", 24)),
        pad_frames=lambda num_frames: -(-num_frames // window) * window,
        count_tokens=lambda num_frames: -(-num_frames // window) * tokens,
    )


def _max_windows(text: dict[str, Any], num_tokens: int, num_features: int) -> int:
    """Return the maximum number of windows by the model's context and by `MAX_MEDIA_BYTES`, given
    the tokens and features of a window.
    """
    in_context = int(text.get("max_position_embeddings", 131072)) // num_tokens
    return max(1, min(in_context, MAX_MEDIA_BYTES // (4 * num_features)))


def _qwen25_omni(config: dict[str, Any], folder: Path) -> AudioLayout:
    """Frames without padding; a token for two states."""
    config = config.get("thinker_config") or config
    audio = config.get("audio_config") or {}
    extractor = read_object(folder / "preprocessor_config.json")
    max_frames = int(extractor.get("chunk_length", 300)) * SAMPLE_RATE // HOP
    return AudioLayout(
        int(audio.get("num_mel_bins", 128)),
        max_frames,
        int(config.get("audio_token_index", config.get("audio_token_id", 151646))),
        # Two more frames contain some of the last samples. The scale depends on them, too.
        pad_frames=lambda num_frames: min(num_frames + 2, max_frames),
        count_tokens=lambda num_frames: num_states_of(num_frames) // 2,
        reads_padding=False,
    )


def _ultravox(config: dict[str, Any], folder: Path) -> AudioLayout:
    """Windows without padding; a token for `stack_factor` states of a window."""
    audio, text = config.get("audio_config") or {}, config.get("text_config") or {}
    if name := config.get("text_model_id"):
        text = read_object(Path(str(name)) / "config.json") | text
    extractor = read_object(folder / "preprocessor_config.json")
    num_mels = int(audio.get("num_mel_bins", extractor.get("feature_size", 0)))
    if not num_mels:
        raise ModelLoadError(
            f"{folder}: neither audio_config.num_mel_bins in config.json nor feature_size in "
            "preprocessor_config.json says how many mel bands the encoder reads."
        )
    stack = int(config.get("stack_factor", 8))
    window = 2 * int(audio.get("max_source_positions", 1500))

    def count_tokens(num_frames: int) -> int:
        num_windows, remaining = divmod(num_frames, window)
        return sum(
            -(-num_states_of(frames) // stack) * count
            for frames, count in ((window, num_windows), (remaining, 1))
        )

    # The placeholder's id may exceed the text model's vocabulary, whose last token is used instead.
    vocab_size = int(text.get("vocab_size", config.get("vocab_size", 128256)))
    return AudioLayout(
        num_mels,
        _max_windows(text, count_tokens(window), num_mels * window) * window,
        vocab_size - 1,
        pad_frames=lambda num_frames: num_frames,
        count_tokens=count_tokens,
    )


#: Layouts by `model_type`.
_LAYOUTS: dict[str, Callable[[dict[str, Any], Path], AudioLayout]] = {
    "qwen2_audio": _qwen2_audio,
    "qwen2_5_omni": _qwen25_omni,
    "qwen2_5_omni_thinker": _qwen25_omni,
    "ultravox": _ultravox,
    "voxtral": _voxtral,
}
_ULTRAVOX_PLACEHOLDER = "<|audio|>"


@dataclass(frozen=True, slots=True)
class AudioProcessor:
    """The audio processor of a model.

    Attributes:
        layout: the encoder's input format.
        placeholder, placeholder_id: the token that stands for an item in an unexpanded prompt.
        token, token_id: the token that stands for each vector.
    """

    layout: AudioLayout
    placeholder: str
    placeholder_id: int
    token: str
    token_id: int

    @classmethod
    def from_folder(cls, folder: str | Path) -> AudioProcessor:
        """Build from a model's folder. Raises `ModelLoadError` for a model without audio input."""
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        make_layout = _LAYOUTS.get(str(config.get("model_type")))
        if make_layout is None:
            raise ModelLoadError(f"{folder} takes no audio.")
        layout = make_layout(config, Path(folder))
        tokenizer, token_id = load_tokenizer(folder), layout.token_id
        token = placeholder = tokenizer.id_to_piece(token_id)
        if config["model_type"] == "ultravox":
            placeholder = _ULTRAVOX_PLACEHOLDER
        placeholder_id = tokenizer.piece_to_id(placeholder)
        if not token or placeholder_id is None:
            missing = placeholder if token else token_id
            raise ModelLoadError(
                f"{folder}: the tokenizer has no token {missing}, which stands for audio."
            )
        return cls(layout, placeholder, placeholder_id, token, token_id)

    def prepare(self, audio: Any) -> PreparedMedia:
        """Prepare (samples, rate), or samples at `SAMPLE_RATE`, for the encoder.

        Raises `InvalidRequest` for invalid audio, and for one that is too long or too short.
        """
        samples = read_samples(audio, self.layout.max_frames * HOP / SAMPLE_RATE)
        return self._prepare([samples], "multi_modal_data")

    def prepare_file(self, data: bytes) -> PreparedMedia:
        """Prepare an audio file for the encoder. A file that is too long isn't decoded to its end.

        Raises the errors of `prepare` and `decode_sound`.
        """
        return self._prepare(decode_sound(data, "messages"), "messages")

    def _prepare(self, chunks: Iterable[np.ndarray], param: str) -> PreparedMedia:
        max_samples = self.layout.max_frames * HOP
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
        layout = self.layout
        num_frames = -(-num_samples // HOP)
        num_tokens = layout.count_tokens(num_frames)
        if not num_tokens:
            raise InvalidRequest("The audio is too short: nothing is left of it.", param=param)
        num_padded = layout.pad_frames(num_frames)
        features = log_mel(np.concatenate(parts), layout.num_mels, num_padded)
        if not layout.reads_padding:
            features = features[:, :num_frames]
        tensors = {
            FEATURES: np.ascontiguousarray(features),
            NUM_FRAMES: np.asarray([num_frames]),
        }
        return self._prepared(tensors, num_tokens, num_samples / SAMPLE_RATE)

    def prepare_embeds(self, vectors: np.ndarray) -> PreparedMedia:
        """Prepare the encoder's vectors of an item, float32 [n, hidden]."""
        return self._prepared({EMBEDS: vectors}, len(vectors), 0.0)

    def _prepared(self, tensors: MediaTensors, num_tokens: int, seconds: float) -> PreparedMedia:
        encoded = encode_tensors(tensors)
        return PreparedMedia(
            kind="audio",
            digest=media_digest("audio", encoded),
            replacement=self.token * num_tokens,
            num_vectors=num_tokens,
            tensors=tensors,
            encoded=encoded,
            placeholder=self.placeholder,
            placeholder_id=self.placeholder_id,
            token_id=self.token_id,
            seconds=seconds,
        )
