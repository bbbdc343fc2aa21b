"""Videos: `transformers`' tokens for each family that takes them, and files good and hostile."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image

from engine import LLM, SamplingParams
from engine.contract.errors import InvalidRequest
from engine.multimodal import video_files
from engine.multimodal.processor import MediaProcessor
from engine.multimodal.video_files import Video, read_video, sample_frames
from tests.engine.multimodal.models import IMAGE_TOKEN, picture

NUM_TOKENS = 12
VIDEO_TOKEN = "<|video_pad|>"
WRAPPED = f"<|vision_start|>{VIDEO_TOKEN}<|vision_end|>"
QWEN = ("qwen2_vl", "qwen25_vl", "qwen3_vl")
#: Frames a second.
FPS = 2


def frames_of(count: int, seed: int = 1) -> list[Image.Image]:
    """Frames of a size that no processor changes."""
    return [picture(seed * 100 + number, 42, 28) for number in range(count)]


def qwen_patches(frames: list[Image.Image], images: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """As `transformers`' Qwen2VLVideoProcessor, whose module needs torchvision."""
    frames = frames + frames[-1:] * (len(frames) % 2)
    pixels = torch.tensor(np.stack([np.asarray(frame) for frame in frames])).permute(0, 3, 1, 2)
    mean, std = (
        torch.tensor(values)[:, None, None] for values in (images.image_mean, images.image_std)
    )
    video = (pixels / 255 - mean) / std
    steps, rows, columns = len(frames) // 2, video.shape[2] // 7, video.shape[3] // 7
    patches = video.view(steps, 2, 3, rows // 2, 2, 7, columns // 2, 2, 7)
    patches = patches.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    grid = torch.tensor([[steps, rows, columns]])
    return patches.reshape(steps * rows * columns, -1), grid


@torch.inference_mode()
def expected(
    name: str, model: Any, processor: Any, prompt: str, frames: list[Image.Image]
) -> list[int]:
    """What `transformers` generates of one video, greedily."""
    tokenizer, images = processor.tokenizer, processor.images
    if name in QWEN:
        patches, grid = qwen_patches(frames, images)
        steps, count = int(grid[0, 0]), int(grid[0].prod()) // 4
        text, options = VIDEO_TOKEN * count, {}
        if name == "qwen25_vl":
            options = {"second_per_grid_ts": torch.tensor([2 / FPS])}
        if name == "qwen3_vl":
            frame_indexes = [*range(len(frames)), len(frames) - 1]
            times = [
                (frame_indexes[2 * step] + frame_indexes[2 * step + 1]) / 2 / FPS
                for step in range(steps)
            ]
            pads = f"<|vision_start|>{VIDEO_TOKEN * (count // steps)}<|vision_end|>"
            text = "".join(f"<{time:.1f} seconds>{pads}" for time in times)
            prompt = prompt.replace(WRAPPED, VIDEO_TOKEN)
        inputs = tokenizer(prompt.replace(VIDEO_TOKEN, text), return_tensors="pt")
        types = (inputs["input_ids"] == tokenizer.convert_tokens_to_ids(VIDEO_TOKEN)).int() * 2
        options |= {
            "pixel_values_videos": patches, "video_grid_thw": grid, "mm_token_type_ids": types
        }  # fmt: skip
    else:
        pixels = images(frames, crop_to_patches=False, return_tensors="pt")["pixel_values"]
        text = "\n".join(
            f"Frame{n}: <img>{IMAGE_TOKEN * 4}</img>" for n in range(1, len(frames) + 1)
        )
        inputs = tokenizer(prompt.replace("<video>", text), return_tensors="pt")
        options = {"pixel_values": pixels}
    inputs.pop("token_type_ids", None)
    ids = model.generate(**inputs, **options, max_new_tokens=NUM_TOKENS, do_sample=False)
    return ids[0, inputs["input_ids"].shape[1] :].tolist()


def run(llm: LLM, prompts: list[dict[str, Any]]) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return [list(result.outputs[0].token_ids) for result in llm.generate(prompts, params)]


@pytest.mark.parametrize("name", [*QWEN, "internvl"])
def test_tokens_of_videos_equal_those_of_transformers(
    family: Callable[[str], tuple[Path, Any, Any]], name: str
) -> None:
    folder, model, processor = family(name)
    placeholder = WRAPPED if name in QWEN else "<video>"
    prompt = f"What happens {placeholder} here?"
    videos = [frames_of(5), frames_of(4, seed=2), frames_of(1, seed=3)]
    prompts = [
        {"prompt": prompt, "multi_modal_data": {"video": (video, {"fps": FPS})}} for video in videos
    ]
    expected_tokens = [expected(name, model, processor, prompt, video) for video in videos]
    llm = LLM(str(folder), dtype="float32", num_gpu_blocks_override=256)
    assert run(llm, prompts) == expected_tokens
    assert run(llm, prompts) == expected_tokens  # from the cache
    cut = LLM(str(folder), dtype="float32", num_gpu_blocks_override=256, max_num_batched_tokens=16)
    assert run(cut, prompts) == expected_tokens
    cut.llm_engine.core.check_integrity()


@pytest.mark.parametrize("name", QWEN)
def test_frames_encoded_one_at_a_time_have_the_same_bits(
    family: Callable[[str], tuple[Path, Any, Any]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = family(name)[0]
    times = [index / FPS for index in range(6)]
    video = MediaProcessor(folder).prepare_video(Video(frames_of(6), times))
    llm = LLM(str(folder), dtype="float32", num_gpu_blocks_override=16)
    model: Any = llm.core.executor.worker.loaded.model
    vectors = model.encode("video", video.tensors)
    monkeypatch.setattr("engine.models.vision.qwen2_vl._PATCHES_AT_ONCE", 1)
    assert torch.equal(model.encode("video", video.tensors), vectors)


def test_pictures_and_videos_of_one_prompt_stand_in_its_order(
    family: Callable[[str], tuple[Path, Any, Any]],
) -> None:
    processor = MediaProcessor(family("internvl")[0])
    image = processor.prepare(picture(1, 30, 30))
    video = processor.prepare_video(Video(frames_of(2), [0.0, 0.5]))
    text, media = processor.expand(f"<video> then {IMAGE_TOKEN}", [image, video])
    assert [item.kind for item in media] == ["video", "image"]
    assert text == f"{video.replacement} then {image.replacement}"
    with pytest.raises(InvalidRequest, match="2 placeholders for 1 videos"):
        processor.expand("<video><video>", [video])


def test_frames_that_are_alike_at_another_rate_are_another_video(
    family: Callable[[str], tuple[Path, Any, Any]],
) -> None:
    processor = MediaProcessor(family("qwen25_vl")[0])
    slow, fast = (processor.prepare_video(Video(frames_of(4), times)) for times in (
        [0.0, 1.0, 2.0, 3.0], [0.0, 0.1, 0.2, 0.3]
    ))  # fmt: skip
    assert slow.encoded == fast.encoded
    assert slow.digest != fast.digest


def test_no_position_is_beyond_the_models_length(
    family: Callable[[str], tuple[Path, Any, Any]],
) -> None:
    """Positions of frames that are far apart: 800 for each two."""
    folder, _, _ = family("qwen25_vl")
    options: Any = {"dtype": "float32", "num_gpu_blocks_override": 64}
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=12)

    def asked(fps: float, count: int = 4) -> dict[str, Any]:
        return {
            "prompt": f"What {WRAPPED}?",
            "multi_modal_data": {"video": (frames_of(count), {"fps": fps})},
        }

    llm, larger = (LLM(str(folder), **options, max_model_len=length) for length in (812, 1000))
    for fps, count in ((0.005, 4), (1e-6, 4), (1e-300, 2), (0.01, 6)):
        with pytest.raises(InvalidRequest, match="Positions of the prompt's media") as refused:
            llm.generate(asked(fps, count), params)
        assert refused.value.param == "messages"
    [result], [complete] = (model.generate(asked(0.01), params) for model in (llm, larger))
    tokens = list(complete.outputs[0].token_ids)
    assert len(tokens) == 12
    num_free = len(result.outputs[0].token_ids)
    assert 0 < num_free < 12
    assert result.outputs[0].finish_reason == "length"
    assert list(result.outputs[0].token_ids) == tokens[:num_free]
    llm.llm_engine.core.check_integrity()


def test_models_and_limits_refuse_videos_by_field(
    family: Callable[[str], tuple[Path, Any, Any]],
) -> None:
    one = {"video": frames_of(2)}
    llava = LLM(str(family("llava")[0]), dtype="float32", num_gpu_blocks_override=64)
    with pytest.raises(InvalidRequest, match="takes no videos"):
        llava.generate({"prompt": IMAGE_TOKEN, "multi_modal_data": one})
    llm = LLM(
        str(family("qwen2_vl")[0]), num_gpu_blocks_override=64, limit_mm_per_prompt={"video": 0}
    )
    with pytest.raises(InvalidRequest, match="at most 0 videos"):
        llm.generate({"prompt": WRAPPED, "multi_modal_data": one})
    for invalid in (1, [picture(1, 9, 9), picture(1, 8, 8)], (frames_of(1), {"fps": 0})):
        with pytest.raises(InvalidRequest) as refused:
            llm.generate({"prompt": WRAPPED, "multi_modal_data": {"video": invalid}})
        assert refused.value.param == "multi_modal_data"


def encoded(container: str, codec: str, count: int = 30, **options: Any) -> bytes:
    """A file of frames that get brighter by 8 each."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=10, options=options)
        stream.width, stream.height = 64, 48
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        stream.gop_size = 10
        for number in range(count):
            pixels = np.full((48, 64, 3), number * 8, np.uint8)
            output.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        output.mux(stream.encode(None))
    return file.getvalue()


def brightness(video: Video) -> list[int]:
    return [round(float(np.asarray(frame).mean()) / 8) for frame in video.frames]


@pytest.mark.parametrize(
    ("container", "codec"),
    [("mp4", "mpeg4"), ("matroska", "mpeg4"), ("avi", "mjpeg"), ("mpegts", "mpeg2video")],
)
def test_frames_are_sampled_evenly_whatever_the_container(container: str, codec: str) -> None:
    data = encoded(container, codec)
    video = read_video(data, {"num_frames": 4})
    assert brightness(video) == pytest.approx([0, 9, 19, 29], abs=1)
    assert video.times == pytest.approx([0, 0.9, 1.9, 2.9], abs=0.11)
    assert {frame.size for frame in video.frames} == {(64, 48)}
    assert len(read_video(data).frames) == 30
    assert len(read_video(data, {"fps": 2}).frames) == 6


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Times of the frames that `read_video` decodes."""
    decoded: list[int] = []
    frames = video_files._frames

    def counted(*arguments: Any) -> Any:
        for frame in frames(*arguments):
            decoded.append(frame.pts)
            yield frame

    monkeypatch.setattr(video_files, "_frames", counted)
    return decoded


def test_only_key_frames_before_a_sampled_one_are_decoded(decoded: list[int]) -> None:
    assert brightness(read_video(encoded("mp4", "mpeg4"), {"num_frames": 2})) == [0, 29]
    assert len(decoded) <= 12  # the first, and the ten of the last group


def test_of_36000_frames_few_are_decoded(decoded: list[int]) -> None:
    video = read_video(repeated(encoded("mp4", "mpeg4"), 1200), {"num_frames": 4})
    assert video.times == pytest.approx([0, 1199.9, 2399.9, 3599.9], abs=0.11)
    assert brightness(video) == [round(time * 10) % 30 for time in video.times]
    assert len(decoded) <= 31


def repeated(data: bytes, count: int) -> bytes:
    """A file whose frames come so many times, one after the other."""
    file = io.BytesIO()
    with av.open(io.BytesIO(data)) as source, av.open(file, "w", format="mp4") as output:
        stream = output.add_stream_from_template(source.streams.video[0])
        packets = [packet for packet in source.demux(video=0) if packet.size]
        length = sum(packet.duration for packet in packets)
        for number in range(count):
            for packet in packets:
                copy = av.Packet(bytes(packet))
                copy.pts, copy.dts = (time + number * length for time in (packet.pts, packet.dts))
                copy.duration, copy.time_base = packet.duration, packet.time_base
                copy.is_keyframe, copy.stream = packet.is_keyframe, stream
                output.mux(copy)
    return file.getvalue()


def animation(form: str) -> bytes:
    """Eight frames that get brighter by 20 each, the last four of them shown longer."""
    file = io.BytesIO()
    first, *rest = (Image.new("RGB", (20, 20), (n * 20,) * 3) for n in range(8))
    first.save(file, form, save_all=True, append_images=rest, duration=[100] * 4 + [500] * 4)
    return file.getvalue()


@pytest.mark.parametrize("form", ["GIF", "WEBP"])
def test_animations_are_videos(form: str) -> None:
    video = read_video(animation(form), {"num_frames": 3})
    assert video.times == pytest.approx([0.0, 0.3, 1.9])
    levels = [np.asarray(frame).mean() for frame in video.frames]
    assert levels == pytest.approx([0, 60, 140], abs=6)


def test_headers_that_lie_and_files_that_are_cut_are_read_as_far_as_they_go() -> None:
    data = encoded("avi", "mjpeg")
    offset = data.index(b"avih") + 8 + 16  # dwTotalFrames
    lying = data[:offset] + (10**9).to_bytes(4, "little") + data[offset + 4 :]
    assert brightness(read_video(lying, {"num_frames": 4})) == [0, 9, 19, 29]
    cut = encoded("matroska", "mpeg4")
    assert 0 < len(read_video(cut[: len(cut) * 2 // 3]).frames) < 30
    interlaced = encoded("mpegts", "mpeg2video", flags="+ildct+ilme")
    assert len(read_video(interlaced, {"num_frames": 5}).frames) == 5


@pytest.mark.parametrize("form", ["mp4", "matroska", "mpegts", "GIF", "WEBP"])
def test_damaged_files_are_read_or_refused(form: str) -> None:
    codec = {"mp4": "mpeg4", "matroska": "mpeg4", "mpegts": "mpeg2video"}.get(form)
    good = animation(form) if codec is None else encoded(form, codec)
    rng = np.random.default_rng(0)
    for number in range(80):
        damaged = bytearray(good)
        end = len(good) if number % 2 else min(len(good), 600)  # or only its head is damaged
        for offset in rng.integers(0, end, 1 + number % 40):
            damaged[offset] = int(rng.integers(256))
        with contextlib.suppress(InvalidRequest):
            assert read_video(bytes(damaged), {"num_frames": 4}).frames


def silence(container: str) -> bytes:
    """A file with a tenth of a second of sound, and no video."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream("pcm_s16le", rate=8000)
        samples = np.zeros((1, 800), np.int16)
        frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
        frame.rate = 8000
        output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return file.getvalue()


def test_hostile_files_are_refused_in_a_sentence() -> None:
    good = encoded("mp4", "mpeg4")
    for data in (
        b"",
        b"GIF8",
        b"RIFF....WEBP",
        good[:100],
        silence("wav"),
        b"ffconcat version 1.0\nfile x",
    ):
        with pytest.raises(InvalidRequest):
            read_video(data)


@pytest.mark.parametrize(
    "options",
    [
        {"fps": 0},
        {"fps": float("nan")},
        {"num_frames": 0},
        {"num_frames": 1.5},
        {"num_frames": True},
        {"num_frames": 10_000},
        {"frames": 3},
    ],
)
def test_sampling_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_video(b"", options)
    assert refused.value.param == "media_io_kwargs"


def test_sampled_frames_hold_the_first_and_the_last() -> None:
    times = np.arange(100) / 10
    assert sample_frames(times, {"num_frames": 4}).tolist() == [0, 33, 66, 99]
    assert len(sample_frames(times, {"num_frames": -1})) == 100
    assert len(sample_frames(times, {"fps": 1})) == 10
    assert len(sample_frames(times, {"fps": 1, "num_frames": 5})) == 5
    assert sample_frames(times[:1], {}).tolist() == [0]
