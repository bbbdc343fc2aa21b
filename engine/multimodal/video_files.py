"""Sampled frames of video files, and of animated GIF and WebP.

Frames are counted from the file's packets, as its header can be wrong. Only those groups of frames
from one key frame to the next are decoded that sampled frames need.
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

#: The default number of sampled frames, as in vLLM, and the maximum.
DEFAULT_FRAMES, MAX_FRAMES = 32, 768
#: Frames per second of frames without times, as in `transformers`, and the maximum.
DEFAULT_FPS, MAX_FPS = 24, 1000
#: Maximum number of frames of a file: several hours.
MAX_FILE_FRAMES = 1_000_000
#: FFmpeg's demuxers of file formats, without any that opens a URL or another file.
_FORMATS = "asf,avi,flv,matroska,webm,mov,mp4,m4a,3gp,3g2,mj2,mpeg,mpegts,mpegvideo,ogg"
#: The first bytes of formats that Pillow reads.
_ANIMATIONS = {b"GIF8": "GIF", b"RIFF": "WEBP"}
#: Duration in seconds of an animation's frame for which the file has 0 or none.
_DEFAULT_DURATION = 0.1


@dataclass(frozen=True, slots=True)
class Video:
    """Sampled frames in RGB, all of the same size, and the time of each in seconds."""

    frames: list[Image]
    times: list[float]


def read_video(
    data: bytes, options: dict[str, Any] | None = None, param: str = "messages"
) -> Video:
    """Return sampled frames of a file, see `sample_frames`.

    Raises `InvalidRequest` for a file that isn't a video, is damaged or too large, and for invalid
    options.
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
    """Raise `InvalidRequest` for invalid options of `read_video`."""
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
    """Return the indices of sampled frames, int64 and increasing.

    As in vLLM's loader, they are evenly spaced from the first to the last frame. `times` are those
    of all frames, in seconds. Option "num_frames" is the maximum, or -1 for `MAX_FRAMES`; "fps" is
    the maximum per second.
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
    """Return the first video stream. Raises `InvalidRequest` if there is none, its codec is
    unknown, or it has too many pixels.
    """
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
    """Frames from one key frame to the next, in the file's order.

    Attributes:
        timestamps: the time of each, in the stream's time base.
    """

    timestamps: list[int]

    @property
    def needs_previous(self) -> bool:
        """Whether any frame is shown before the group's key frame. It needs the previous group."""
        return min(self.timestamps) < self.timestamps[0]


def _scan(file: Any, stream: Any, param: str) -> list[_FrameGroup]:
    """Return the groups of a file, without decoding. Raises `InvalidRequest` for none or too many
    frames.
    """
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
    """Yield packets with a frame, and the frame's time."""
    for packet in file.demux(stream):
        moment = packet.pts if packet.pts is not None else packet.dts
        if packet.size and moment is not None:
            yield packet, moment


def _decode(
    file: Any, stream: Any, groups: list[_FrameGroup], targets: np.ndarray, param: str
) -> Iterator[tuple[int, Image]]:
    """Yield the frames at the times `targets`, or the next ones if they are damaged."""
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
    """Yield all frames of the needed groups, without damaged packets."""
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
                yield from decode(None)  # the decoder's delayed frames
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
            image.load()  # WebP has the duration only after this
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
