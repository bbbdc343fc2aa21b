"""An encoder's input for one picture, as it is sent between processes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from engine.contract.errors import InvalidRequest

#: By names that its family's encoder knows, `pixels` first of all.
MediaTensors = Mapping[str, np.ndarray]

#: Tensor of an item that comes as vectors, which its encoder would give: float32 [n, hidden].
EMBEDS = "embeds"

#: No family prepares more for one picture.
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
    """The tensors as bytes: equal tensors, equal bytes."""
    return _encoder.encode(
        [
            _Array(name, str(array.dtype), array.shape, np.ascontiguousarray(array).tobytes())
            for name, array in sorted(tensors.items())
        ]
    )


def decode_tensors(data: bytes) -> dict[str, np.ndarray]:
    """The tensors that `encode_tensors` was given. Raises `InvalidRequest` for anything else."""
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
    """sha256 of an encoder's input for a picture."""
    return hashlib.sha256(kind.encode() + b"\0" + encoded).digest()


def folder_version(folder: str | Path) -> str:
    """Changes when a file changes that says how a model's pictures are prepared."""
    states = []
    for path in sorted(Path(folder).glob("*.json")):
        if not path.is_file():  # a link into a cache that was cleaned
            continue
        status = path.stat()
        states.append((path.name, status.st_size, status.st_mtime_ns, status.st_ino))
    return hashlib.sha256(repr(states).encode()).hexdigest()


class PrepareRequest(msgspec.Struct, tag="prepare_picture"):
    """A picture or a video for a model.

    Attributes:
        folder: of the model's files.
        version: see `folder_version`.
        data: the file.
        options: mm_processor_kwargs.
        kind: "image", "video" or "audio".
        sampling: see `read_video`.
        embeds_size: of a vector; `data` are float32 vectors in the place of a file. 0: a file.
        grid: of vectors, see `MediaProcessor.prepare_embeds`.
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
    """See `PreparedMedia`. `tensors` as `encode_tensors` wrote them."""

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
    """When a stretch of a file begins and ends, as OpenAI's `server_vad` has it.

    Attributes:
        threshold: 0 to 1; the higher, the louder must speech be.
        prefix_padding_ms: what a stretch has before its speech, and behind it.
        silence_duration_ms: silence that ends a stretch.
    """

    threshold: float = 0.5
    prefix_padding_ms: int = 300
    silence_duration_ms: int = 200


class PrepareSoundRequest(msgspec.Struct, tag="prepare_sound"):
    """A file of sound for a model.

    Attributes:
        data: the file.
        num_mels, num_frames: what the model's encoder reads of a window.
        detection: None: stretches as `split_sound` has them.
    """

    data: bytes
    num_mels: int
    num_frames: int
    detection: VoiceDetection | None = None


class SoundStretch(msgspec.Struct):
    """A stretch of a file of sound in which somebody speaks: a window, or several.

    Attributes:
        powers: float32 [num_frames, num_mels], see `engine.multimodal.audio.log_powers`.
        start, seconds: where it lies in the file, in seconds, and how long it is.
        lead: seconds of silence that it begins with.
    """

    powers: bytes
    start: float
    seconds: float
    lead: float = 0.0


class PreparedSound(msgspec.Struct, tag="sound"):
    """A file of sound: its length in seconds, and its stretches that aren't silent."""

    seconds: float
    stretches: list[SoundStretch]


class PrepareDocumentRequest(msgspec.Struct, tag="prepare_document"):
    """A PDF. `max_images`: see `read_pdf`."""

    data: bytes
    max_images: int


class DocumentPage(msgspec.Struct):
    """A page's text, and its picture as a file; b"" where it wasn't drawn."""

    text: str
    image: bytes = b""


class PreparedDocument(msgspec.Struct, tag="document"):
    """The pages of a document; a text is one page."""

    pages: list[DocumentPage]


#: Fields of a request that determine how its media are prepared.
OPTION_FIELDS = ("mm_processor_kwargs", "media_io_kwargs")


class Refusal(msgspec.Struct, tag="refusal"):
    """Why a picture or sound can't be prepared. `is_model`: no picture can, for this model.
    `param`: the request's field, where it's no part of a message.
    """

    message: str
    is_model: bool = False
    param: str = ""


#: Of a media worker.
Answer = PreparedPicture | PreparedSound | PreparedDocument | Refusal
ANSWERS: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
