"""From a file of video to the frames that a model sees.

How many frames there are is counted from the file's packets, not believed from its header. Only
groups of frames, from a key frame to the next, that hold a sampled one are decoded. Animated GIF
and WebP are videos too.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.contract.errors import InvalidRequest
from engine.multimodal.processor import DAMAGED_FILE_ERRORS, MAX_PIXELS, to_rgb

if TYPE_CHECKING:
    from PIL.Image import Image

#: Frames of one video that are sampled where a request says nothing, as in vLLM, and at most.
DEFAULT_FRAMES, MAX_FRAMES = 32, 768
#: Frames a second of frames that come without a time, as `transformers` assumes, and at most.
DEFAULT_FPS, MAX_FPS = 24, 1000
#: Frames that one file may have: some hours.
MAX_FILE_FRAMES = 1_000_000
#: Demuxers of FFmpeg that read files: none that opens an address or another file.
_FORMATS = "asf,avi,flv,matroska,webm,mov,mp4,m4a,3gp,3g2,mj2,mpeg,mpegts,mpegvideo,ogg"
#: How files begin that Pillow reads frame by frame.
_ANIMATIONS = {b"GIF8": "GIF", b"RIFF": "WEBP"}
#: Duration in seconds of an animation's frame if its file says 0.
_DEFAULT_DURATION = 0.1


@dataclass(frozen=True, slots=True)
class Video:
    """Sampled frames in RGB, all of one size, and when each is shown, in seconds."""

    frames: list[Image]
    times: list[float]


def read_video(
    data: bytes, options: dict[str, Any] | None = None, param: str = "messages"
) -> Video:
    """The frames of a file that `options` sample: "num_frames", evenly spaced, or "fps".

    Raises `InvalidRequest` for what is no video, is damaged or too large, and for other options.
    """
    from av.error import FFmpegError
    from PIL.Image import DecompressionBombError

    sampling = options or {}
    check_sampling(sampling)
    is_webp = data[8:12] == b"WEBP"
    form = _ANIMATIONS.get(data[:4])
    try:
        if form == "GIF" or (form == "WEBP" and is_webp):
            return _read_animation(data, form, sampling, param)
        return _read_container(data, sampling, param)
    except InvalidRequest:
        raise
    except (*DAMAGED_FILE_ERRORS, FFmpegError, DecompressionBombError) as error:
        raise InvalidRequest(f"The video can't be read: {error}.", param=param) from error


def check_sampling(options: dict[str, Any], param: str = "media_io_kwargs") -> None:
    """Raise `InvalidRequest` for options that `read_video` doesn't take."""
    for name, value in options.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if name == "fps" and is_number and 0 < value <= MAX_FPS:
            continue
        if (
            name == "num_frames"
            and isinstance(value, int)
            and is_number
            and (value == -1 or 1 <= value <= MAX_FRAMES)
        ):
            continue
        raise InvalidRequest(
            f"Options of videos are num_frames, from 1 to {MAX_FRAMES} or -1 for all frames, and "
            f"fps, over 0 and at most {MAX_FPS}; got {name[:50]}={str(value)[:50]}.",
            param=param,
        )


def sample_frames(times: np.ndarray, options: dict[str, Any]) -> np.ndarray:
    """Indices of the frames to look at, int64 and increasing.

    `times`: of all frames, in seconds. As vLLM's loader: evenly spaced, the first and the last
    among them.
    """
    total = len(times)
    count = int(options.get("num_frames", DEFAULT_FRAMES))
    limit = MAX_FRAMES if count == -1 else count
    if fps := options.get("fps"):
        limit = min(limit if "num_frames" in options else MAX_FRAMES, MAX_FRAMES)
        limit = min(limit, max(1, int((times[-1] - times[0]) * fps) + 1))
    limit = min(limit, total)
    return np.unique(np.linspace(0, total - 1, limit).astype(np.int64))


def _read_container(data: bytes, options: dict[str, Any], param: str) -> Video:
    frames: list[Image] = []
    times: list[float] = []
    with _open(data) as file:
        stream = _video_stream(file, param)
        base = float(stream.time_base or 0)
        groups = _scan(file, stream, param)
    timestamps = np.unique(np.concatenate([group.timestamps for group in groups]))
    targets = timestamps[sample_frames((timestamps - timestamps[0]) * base, options)]
    with _open(data) as file:
        for pts, image in _decode(file, _video_stream(file, param), groups, targets, param):
            if frames and image.size != frames[0].size:
                image = image.resize(frames[0].size)
            frames.append(image)
            times.append(float(pts - timestamps[0]) * base)
    if not frames:
        raise InvalidRequest("No frame of the video can be decoded.", param=param)
    return Video(frames, times)


def _open(data: bytes) -> Any:
    import av

    limits = {"format_whitelist": _FORMATS, "protocol_whitelist": "pipe"}
    return av.open(io.BytesIO(data), "r", container_options=limits, metadata_errors="ignore")


def _video_stream(file: Any, param: str) -> Any:
    """The first stream of video. Raises `InvalidRequest`."""
    if not file.streams.video:
        raise InvalidRequest("The file holds no video.", param=param)
    stream = file.streams.video[0]
    if stream.codec_context is None:
        raise InvalidRequest("The video's codec isn't known.", param=param)
    _check_pixels(stream.width, stream.height, param)
    stream.thread_count = 1
    return stream


@dataclass(slots=True)
class _FrameGroup:
    """Frames from a key frame to the next, in the file's order.

    Attributes:
        timestamps: when each is, in the stream's time base.
    """

    timestamps: list[int]

    @property
    def needs_previous(self) -> bool:
        """Whether frames are shown before the group's key frame, which need the group before it."""
        return min(self.timestamps) < self.timestamps[0]


def _scan(file: Any, stream: Any, param: str) -> list[_FrameGroup]:
    """The groups of a file, from its packets alone."""
    groups: list[_FrameGroup] = []
    for total, (packet, moment) in enumerate(_packets(file, stream)):
        if packet.is_keyframe or not groups:
            groups.append(_FrameGroup([]))
        groups[-1].timestamps.append(moment)
        if total >= MAX_FILE_FRAMES:
            raise InvalidRequest(f"The video has over {MAX_FILE_FRAMES} frames.", param=param)
    if not groups:
        raise InvalidRequest("The video has no frames.", param=param)
    return groups


def _packets(file: Any, stream: Any) -> Iterator[tuple[Any, int]]:
    """Packets with a frame, and when it is shown."""
    for packet in file.demux(stream):
        moment = packet.pts if packet.pts is not None else packet.dts
        if packet.size and moment is not None:
            yield packet, moment


def _decode(
    file: Any, stream: Any, groups: list[_FrameGroup], targets: np.ndarray, param: str
) -> Iterator[tuple[int, Image]]:
    """The frames shown at `targets`, or next after them; damaged ones are left out."""
    requested = set(targets.tolist())
    needed = {i for i, group in enumerate(groups) if not requested.isdisjoint(group.timestamps)}
    needed |= {i - 1 for i in needed if i and groups[i].needs_previous}
    remaining = deque(targets.tolist())
    for frame in _frames(file, stream, needed):
        if frame.pts is None or not remaining or frame.pts < remaining[0]:
            continue
        while remaining and remaining[0] <= frame.pts:
            remaining.popleft()
        yield frame.pts, _to_image(frame, param)


def _frames(file: Any, stream: Any, needed: set[int]) -> Iterator[Any]:
    """All frames of the needed groups; packets that are damaged are left out."""
    import av

    def decode(packet: Any) -> list[Any]:
        try:
            return list(stream.codec_context.decode(packet))
        except av.error.FFmpegError:
            return []

    group, last = -1, max(needed, default=-1)
    for packet, _ in _packets(file, stream):
        if packet.is_keyframe or group < 0:
            if group in needed and group + 1 not in needed:
                yield from decode(None)  # what the decoder holds back
                stream.codec_context.flush_buffers()
            group += 1
        if group > last:
            return
        if group in needed:
            yield from decode(packet)
    yield from decode(None)


def _to_image(frame: Any, param: str) -> Image:
    _check_pixels(frame.width, frame.height, param)
    image: Image = frame.to_image()
    rotation = int(getattr(frame, "rotation", 0) or 0)
    return image.rotate(rotation, expand=True) if rotation % 360 else image


def _read_animation(data: bytes, form: str, options: dict[str, Any], param: str) -> Video:
    from PIL import Image

    with Image.open(io.BytesIO(data), formats=(form,)) as image:
        _check_pixels(*image.size, param)
        total = int(getattr(image, "n_frames", 1))
        if total > MAX_FILE_FRAMES:
            raise InvalidRequest(f"The video has over {MAX_FILE_FRAMES} frames.", param=param)
        durations = []
        for index in range(total):
            image.seek(index)
            image.load()  # WebP provides the duration only then
            duration = image.info.get("duration")
            durations.append(duration / 1000 if duration else _DEFAULT_DURATION)
        times = np.cumsum([0.0, *durations[:-1]])
        frames = []
        for index in sample_frames(times, options).tolist():
            image.seek(index)
            frames.append(to_rgb(image))
    return Video(frames, times[sample_frames(times, options)].tolist())


def _check_pixels(width: int, height: int, param: str) -> None:
    if not 0 < width * height <= MAX_PIXELS:
        raise InvalidRequest(
            f"A frame has {width} x {height} pixels; from 1 to {MAX_PIXELS} are taken.", param=param
        )
