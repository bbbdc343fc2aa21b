"""Encoder inputs, and the messages of media workers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec
import numpy as np

from engine.contract.errors import InvalidRequest

#: An encoder's input for an item, by names that the family defines.
MediaTensors = Mapping[str, np.ndarray]

#: Name of the tensor of an item that is given as its encoder's vectors, float32 [n, hidden].
EMBEDS = "embeds"

#: Maximum size of an item's encoded tensors. No family needs more.
MAX_MEDIA_BYTES = 1 << 28
_DTYPES = ("uint8", "float32", "int64")


class _Array(msgspec.Struct, array_like=True, frozen=True):
    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[_Array])


def encode_tensors(tensors: MediaTensors) -> bytes:
    """Encode tensors as bytes, which are equal for equal tensors."""
    return _encoder.encode(
        [
            _Array(name, str(array.dtype), array.shape, np.ascontiguousarray(array).tobytes())
            for name, array in sorted(tensors.items())
        ]
    )


def decode_tensors(data: bytes) -> dict[str, np.ndarray]:
    """Decode the result of `encode_tensors`. Raises `InvalidRequest` for other bytes."""
    if len(data) > MAX_MEDIA_BYTES:
        raise InvalidRequest(f"Media must have at most {MAX_MEDIA_BYTES} bytes.", param="media")
    try:
        arrays = _decoder.decode(data)
        tensors = {}
        for array in arrays:
            if array.dtype not in _DTYPES:
                raise ValueError(f"dtype {array.dtype!r}")
            values = np.frombuffer(array.data, dtype=array.dtype).reshape(array.shape)
            tensors[array.name] = values
    except (msgspec.MsgspecError, ValueError) as error:
        raise InvalidRequest(f"Media can't be read: {error}.", param="media") from error
    return tensors


def media_digest(kind: str, encoded: bytes) -> bytes:
    """Return the sha256 of a kind of media and an item's encoded tensors."""
    return hashlib.sha256(kind.encode() + b"\0" + encoded).digest()


def path_of_file_url(url: str, folder: Path) -> Path:
    """Return the regular file in a folder, or below it, that a `file:` URL names.

    Raises PermissionError; the same outside of the folder whether or not there is a file.
    """
    try:
        parts = urlsplit(url)
        path = Path(unquote(parts.path)).resolve(strict=True)
        is_inside = path.is_relative_to(folder.resolve()) and path.is_file()
    except (OSError, ValueError, RuntimeError):  # RuntimeError: a loop of symbolic links
        is_inside = False
    if not is_inside or parts.netloc not in ("", "localhost"):
        raise PermissionError("it isn't a file in allowed_local_media_path")
    return path


def folder_version(folder: str | Path) -> str:
    """Return a digest that changes when a JSON file in the folder changes, by its status."""
    states = []
    for path in sorted(Path(folder).glob("*.json")):
        if not path.is_file():  # a link into a cache that was cleaned
            continue
        status = path.stat()
        states.append((path.name, status.st_size, status.st_mtime_ns, status.st_ino))
    return hashlib.sha256(repr(states).encode()).hexdigest()


class PrepareRequest(msgspec.Struct, tag="prepare_picture"):
    """A request to prepare an image, video or audio for a model.

    Attributes:
        folder: the folder of the model's files.
        version: see `folder_version`.
        data: the file, or float32 vectors if `embeds_size` isn't 0.
        options: mm_processor_kwargs.
        kind: "image", "video" or "audio".
        sampling: the options of `read_video`.
        embeds_size: size of a vector; 0 for a file.
        grid: that of vectors, see `MediaProcessor.prepare_embeds`.
        pruning_rates: see `MediaProcessor`.
    """

    folder: str
    data: bytes
    version: str = ""
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    kind: str = "image"
    sampling: dict[str, Any] = msgspec.field(default_factory=dict)
    embeds_size: int = 0
    pruning_rates: dict[str, float] = msgspec.field(default_factory=dict)
    grid: tuple[int, ...] = ()


class PreparedPicture(msgspec.Struct, tag="picture"):
    """A prepared item, see `PreparedMedia`. `tensors` are encoded by `encode_tensors`."""

    kind: str
    digest: bytes
    replacement: str
    num_vectors: int
    placeholder_id: int
    token_id: int
    tensors: bytes
    grid: tuple[int, ...] = ()
    time_interval: float = 1.0
    wrapper: tuple[int, ...] = ()
    seconds: float = 0.0
    retained: bytes = b""


class VoiceDetection(msgspec.Struct, frozen=True):
    """Parameters of voice detection, as OpenAI's `server_vad`.

    Attributes:
        threshold: from 0 to 1; higher values require louder speech.
        prefix_padding_ms: audio before and after the speech of a stretch.
        silence_duration_ms: silence that ends a stretch.
    """

    threshold: float = 0.5
    prefix_padding_ms: int = 300
    silence_duration_ms: int = 200


class PrepareSoundRequest(msgspec.Struct, tag="prepare_sound"):
    """A request to prepare an audio file for a model with windows, like Whisper.

    Attributes:
        data: the file.
        num_mels, num_frames: sizes of the encoder's input for a window.
        detection: voice detection; None for the defaults of `split_sound`.
    """

    data: bytes
    num_mels: int
    num_frames: int
    detection: VoiceDetection | None = None


class SoundStretch(msgspec.Struct):
    """A part of an audio file with speech, of one or several windows.

    Attributes:
        powers: float32 [num_frames, num_mels], see `engine.multimodal.audio.log_powers`.
        start, seconds: its start in the file and its length, in seconds.
        lead: seconds of silence at its beginning.
    """

    powers: bytes
    start: float
    seconds: float
    lead: float = 0.0


class PreparedSound(msgspec.Struct, tag="sound"):
    """An audio file's length in seconds, and its stretches with speech."""

    seconds: float
    stretches: list[SoundStretch]


class PrepareDocumentRequest(msgspec.Struct, tag="prepare_document"):
    """A request to read a PDF. For `max_images` see `read_pdf`."""

    data: bytes
    max_images: int


class DocumentPage(msgspec.Struct):
    """A page's text, and its image as a file; b"" if it wasn't rendered."""

    text: str
    image: bytes = b""


class PreparedDocument(msgspec.Struct, tag="document"):
    """The pages of a document; a text document has one page."""

    pages: list[DocumentPage]


#: Fields of a request that determine how its media are prepared.
OPTION_FIELDS = ("mm_processor_kwargs", "media_io_kwargs")


def split_sampling(options: Mapping[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """mm_processor_kwargs without "fps" and "num_frames", which vLLM takes there, and these."""
    rest = dict(options or {})
    sampling: dict[str, Any] = {
        name: rest.pop(name) for name in ("fps", "num_frames") if name in rest
    }
    return rest, sampling


class Refusal(msgspec.Struct, tag="refusal"):
    """The reason why a file can't be prepared.

    Attributes:
        is_model: whether the model has no processor for such files.
        param: the request's invalid field in `OPTION_FIELDS`, or "" if it's the file.
    """

    message: str
    is_model: bool = False
    param: str = ""


#: A media worker's answers.
Answer = PreparedPicture | PreparedSound | PreparedDocument | Refusal
ANSWERS: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
