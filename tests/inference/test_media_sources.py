"""Where pictures may come from: files of the operator's folder, hosts that are allowed."""

from __future__ import annotations

import asyncio
import base64
import os
import re
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from common.errors import RateLimited
from common.outbound_http import fetch
from engine.contract.errors import EngineUnavailable, InvalidRequest
from engine.contract.messages import ModelInfo
from engine.multimodal.inputs import Refusal, folder_version
from engine.multimodal.processor import MediaProcessor
from inference.rendering import media_files, media_pool, media_sources
from inference.rendering.media_files import read_source
from inference.rendering.media_pool import MediaOptions, MediaPool
from inference.rendering.media_sources import MediaSource, find_media
from inference.schemas.chat import ChatRequest
from tenants.caller import Caller
from tests.engine.multimodal.models import qwen2_vl
from tests.engine.multimodal.test_videos import encoded
from tests.inference.test_prompt_embeds import saved
from tests.platform.callers import CALLER


@pytest.fixture
def folder(tmp_path: Path, settings: Any) -> Path:
    """A folder that requests may name files of."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    settings.QUIRE = settings.QUIRE.replace(allowed_local_media_path=folder)
    return folder


def read(url: str) -> bytes:
    """The file of an address."""
    return read_source(MediaSource(url, "messages[0].content[0]"))[0]


def test_files_of_the_allowed_folder_are_read(folder: Path) -> None:
    (folder / "a b.png").write_bytes(b"picture")
    assert read(f"file://{folder}/a%20b.png") == b"picture"
    assert read(f"file:{folder}/a%20b.png") == b"picture"
    assert read(f"file://localhost{folder}/a%20b.png") == b"picture"


def test_no_other_file_is_read_and_nobody_learns_whether_it_exists(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "loop").symlink_to(folder / "loop")
    os.mkfifo(folder / "pipe")
    messages = set()
    for url in (
        f"file://{tmp_path}/secret",
        f"file://{tmp_path}/missing",
        f"file://{folder}/../secret",
        f"file://{folder}/%2e%2e/secret",
        f"file://{folder}/link",
        f"file://{folder}/pipe",
        f"file://{folder}",
        f"file://elsewhere{folder}/link",
        f"file://{folder}/a%00b",
        f"file://{folder}/loop",
        f"file://[{folder}/pipe",
    ):
        with pytest.raises(InvalidRequest) as refused:
            read(url)
        assert refused.value.param == "messages[0].content[0]"
        messages.add(refused.value.message)
    assert len(messages) == 1


def test_files_are_refused_unless_the_operator_names_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"picture")
    with pytest.raises(InvalidRequest, match="may not be read"):
        read(f"file://{tmp_path}/a.png")


def test_a_file_over_the_limit_of_bodies_is_refused(folder: Path, settings: Any) -> None:
    settings.QUIRE = settings.QUIRE.replace(max_body_bytes=1000)
    (folder / "large.png").write_bytes(bytes(1001))
    with pytest.raises(InvalidRequest, match="over 1000 bytes"):
        read(f"file://{folder}/large.png")


async def test_sound_that_a_request_names_may_be_as_large_as_an_upload(
    folder: Path, settings: Any
) -> None:
    settings.QUIRE = settings.QUIRE.replace(max_body_bytes=1000, max_file_bytes=2000)
    (folder / "sound").write_bytes(bytes(2000))
    source = MediaSource(f"file://{folder}/sound", "file_url", kind="audio")
    assert await MediaPool().fetch(source, CALLER) == bytes(2000)
    (folder / "sound").write_bytes(bytes(2001))
    with pytest.raises(InvalidRequest, match="over 2000 bytes"):
        await MediaPool().fetch(source, CALLER)


async def test_sound_over_a_limit_is_not_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = MediaPool()

    counted = []

    async def refuse(caller: Caller, *, count: int, num_bytes: int, param: str) -> None:
        assert (caller, count) == (CALLER, 1)
        counted.append(num_bytes)
        raise RateLimited("Too many.", retry_after=1.0, param=param)

    monkeypatch.setattr(media_sources, "admit_media", refuse)
    monkeypatch.setattr(pool, "fetch", None)
    for url in ("https://example.com/speech", "data:;base64," + "A" * 4000):
        source = MediaSource(url, "file_url", kind="audio")
        with pytest.raises(RateLimited) as refused:
            await pool.prepare_sound(source, 80, 100, CALLER)
        assert refused.value.param == "file_url"
    assert counted[0] == 0
    assert counted[1] >= 3000  # known before it is read


async def test_sound_that_cannot_be_decoded_is_refused_by_the_name_of_its_field(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = MediaPool()

    async def answer(*args: Any) -> Refusal:
        return Refusal("It isn't sound.")

    monkeypatch.setattr(pool, "_ask", answer)
    source = MediaSource("data:;base64,AAAA", "file_url", kind="audio")
    for sound, param in ((source, "file_url"), (b"no sound", "file")):
        with pytest.raises(InvalidRequest, match="It isn't sound") as refused:
            await pool.prepare_sound(sound, 80, 100, CALLER)
        assert refused.value.param == param


def test_only_allowed_hosts_are_asked() -> None:
    with pytest.raises(InvalidRequest, match="none of the allowed hosts") as refused:
        fetch(
            "https://b.example/x.png",
            max_bytes=10,
            timeout_s=1.0,
            param="messages[0].content[0]",
            hosts=("a.example",),
        )
    assert refused.value.param == "messages[0].content[0]"


def test_media_are_fetched_within_the_operators_time(
    monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    settings.QUIRE = settings.QUIRE.replace(media_fetch_timeout_s=0.5, media_fetch_threads=3)
    seconds = []

    def fetch_nothing(url: str, *, timeout_s: float, **options: Any) -> bytes:
        seconds.append(timeout_s)
        return b"picture"

    monkeypatch.setattr(media_files, "fetch", fetch_nothing)
    assert read("https://a.example/x.png") == b"picture"
    assert seconds == [0.5]
    assert MediaPool()._fetchers._threads._max_workers == 3


def test_prepared_pictures_follow_a_changed_model_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "preprocessor_config.json").write_text("{}")
    (tmp_path / "dangling.json").symlink_to(tmp_path / "nothing")
    initial_folder_version = folder_version(tmp_path)
    assert folder_version(tmp_path) == initial_folder_version
    replaced = tmp_path / "new"
    replaced.write_text("[]")
    replaced.rename(tmp_path / "preprocessor_config.json")
    assert folder_version(tmp_path) != initial_folder_version


SEEING = ModelInfo(
    name="seeing", path="", max_model_len=1, vocab_size=1, dtype="", sees=True, max_videos=1
)
VIDEO = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}


def message(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


@pytest.mark.parametrize("kind", ["image", "video"])
@pytest.mark.parametrize("has_type", [True, False])
@pytest.mark.parametrize("is_object", [True, False])
def test_pictures_and_videos_are_found_in_any_of_their_forms(
    kind: str, has_type: bool, is_object: bool
) -> None:
    url = "data:;base64,AAAA"
    part = {f"{kind}_url": {"url": url} if is_object else url, "uuid": "another's"}
    if has_type:
        part["type"] = f"{kind}_url"
    chat = ChatRequest.model_validate({"messages": message(part)})
    [source] = find_media(chat.raw_messages, SEEING)
    assert (source.kind, source.url) == (kind, url)


def test_videos_are_found_among_pictures_and_counted_by_themselves() -> None:
    picture = {"image_url": "data:image/png;base64,AAAA"}
    sources = find_media(message(picture, VIDEO, {"type": "text", "text": "?"}), SEEING)
    assert [(source.kind, source.param) for source in sources] == [
        ("image", "messages[0].content[0]"),
        ("video", "messages[0].content[1]"),
    ]
    with pytest.raises(InvalidRequest, match="at most 1 videos"):
        find_media(message(VIDEO, VIDEO), SEEING)
    blind = msgspec.structs.replace(SEEING, max_videos=0)
    with pytest.raises(InvalidRequest, match="takes no videos") as refused:
        find_media(message(picture, VIDEO), blind)
    assert refused.value.param == "messages[0].content[1]"


@pytest.mark.parametrize(
    ("part", "url", "file_id"),
    [
        ({"type": "input_audio", "input_audio": {"data": "AAAA"}}, "data:;base64,AAAA", ""),
        ({"input_audio": {"data": "AAAA", "format": "mp3"}}, "data:;base64,AAAA", ""),
        ({"type": "audio_url", "audio_url": {"url": "https://a.b/c"}}, "https://a.b/c", ""),
        ({"type": "audio", "audio_url": "https://a.b/c"}, "https://a.b/c", ""),
        ({"type": "input_audio", "file_id": "file-1"}, "", "file-1"),
    ],
)
def test_sound_is_found_by_any_of_its_names_and_refused_by_models_without_ears(
    part: dict[str, Any], url: str, file_id: str
) -> None:
    hearing = msgspec.structs.replace(SEEING, sees=False, max_videos=0, max_audios=2)
    chat = ChatRequest.model_validate({"messages": message(part)})
    [source] = find_media(chat.raw_messages, hearing)
    assert (source.kind, source.url, source.file_id) == ("audio", url, file_id)
    with pytest.raises(InvalidRequest, match="at most 2 audios"):
        find_media(message(part, part, part), hearing)
    for messages, model in ((message(part), SEEING), (message(VIDEO), hearing)):
        with pytest.raises(InvalidRequest, match="takes no") as refused:
            find_media(messages, model)
        assert refused.value.param == "messages[0].content[0]"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_audio"},
        {"type": "audio_url", "audio_url": "x", "file_id": "y"},
        {"type": "input_audio", "input_audio": "AAAA"},
        {"type": "audio_embeds"},
        {"type": "audio_embeds", "audio_embeds": "AAAA", "audio_url": "x"},
    ],
)
def test_parts_of_sound_that_are_none_are_refused(part: dict[str, Any]) -> None:
    with pytest.raises((ValueError, InvalidRequest)):
        ChatRequest.model_validate({"messages": message(part)})


def test_sound_comes_as_vectors_where_the_model_takes_them() -> None:
    hearing = msgspec.structs.replace(SEEING, sees=False, max_audios=2, prompt_embeds_size=8)
    vectors = torch.arange(24.0).view(3, 8)
    for tensor in (vectors, vectors.half(), vectors.bfloat16()):
        for part in (
            {"audio_embeds": saved(tensor)},
            {"type": "audio_embeds", "audio_embeds": saved(tensor)},
        ):
            chat = ChatRequest.model_validate({"messages": message(part)})
            [source] = find_media(chat.raw_messages, hearing)
            assert (source.kind, source.embeds_size, source.num_bytes) == ("audio", 8, 96)
            assert source.data == vectors.numpy().tobytes()
    for model, reason in (
        (SEEING, "takes no audio_embeds"),
        (msgspec.structs.replace(hearing, prompt_embeds_size=0), "need --enable-prompt-embeds"),
    ):
        with pytest.raises(InvalidRequest, match=reason) as refused:
            find_media(message({"audio_embeds": saved(vectors)}), model)
        assert refused.value.param == "messages[0].content[0]"
    for text, model, why in (
        (saved(vectors), msgspec.structs.replace(hearing, prompt_embeds_size=0), "need --enable"),
        (saved(vectors[:, :4].contiguous()), hearing, "must be [num_tokens, 8]"),
        ("AAAA", hearing, "audio_embeds must be a tensor"),
    ):
        with pytest.raises(InvalidRequest, match=re.escape(why)) as refused:
            find_media(message({"audio_embeds": text}), model)
        assert refused.value.param == "messages[0].content[0]"


async def test_pictures_come_as_vectors_where_the_model_takes_them(tmp_path: Path) -> None:
    qwen2_vl(tmp_path)
    seeing = msgspec.structs.replace(SEEING, prompt_embeds_size=64)
    vectors, grid = torch.arange(384.0).view(6, 64), torch.tensor([[1, 4, 6]])
    embeds = {"image_embeds": saved(vectors), "image_grid_thw": saved(grid)}
    for part in ({"image_embeds": embeds}, {"type": "image_embeds", "image_embeds": embeds}):
        chat = ChatRequest.model_validate({"messages": message(part)})
        [source] = find_media(chat.raw_messages, seeing)
        prepared = await MediaPool().prepare(source, MediaOptions({}, {}), str(tmp_path), CALLER)
        expected = MediaProcessor(tmp_path).prepare_embeds(vectors.numpy(), (1, 4, 6))
        assert (prepared.kind, prepared.digest, prepared.grid) == (
            "image", expected.digest, expected.grid
        )  # fmt: skip
    for content, model, why in (
        (saved(vectors), SEEING, "image_embeds aren't accepted"),
        (saved(vectors[:, :4].contiguous()), seeing, "must be [num_tokens, 64]"),
        (saved(grid), seeing, "must be float32 or float16 or bfloat16"),
        (embeds | {"image_grid_thw": saved(vectors)}, seeing, "image_grid_thw must be int64"),
        (embeds | {"image_grid_thw": saved(grid.repeat(2, 1))}, seeing, "must be [1, 3]"),
    ):
        with pytest.raises(InvalidRequest, match=re.escape(why)) as refused:
            find_media(message({"image_embeds": content}), model)
        assert refused.value.param == "messages[0].content[0]"
    other = {"type": "text", "text": "?", "image_embeds": saved(vectors)}
    chat = ChatRequest.model_validate({"messages": message(other)})
    assert find_media(chat.raw_messages, seeing) == []
    for broken in ({"type": "image_embeds"}, {"image_embeds": {"image_grid_thw": "A"}}):
        with pytest.raises((ValueError, InvalidRequest)):
            ChatRequest.model_validate({"messages": message(broken)})


def test_options_of_media_are_read_from_both_fields() -> None:
    chat = ChatRequest.model_validate(
        {
            "messages": message(VIDEO),
            "mm_processor_kwargs": {"max_pixels": 9, "fps": 1, "num_frames": 3},
            "media_io_kwargs": {"video": {"num_frames": 2}},
        }
    )
    pruning = msgspec.structs.replace(SEEING, pruning_rates={"video": 0.5})
    options = MediaOptions.from_chat(chat, pruning)
    assert options == MediaOptions({"max_pixels": 9}, {"fps": 1, "num_frames": 2}, {"video": 0.5})
    preset = msgspec.structs.replace(
        SEEING, mm_processor_kwargs={"min_pixels": 4}, media_io_kwargs={"video": {"fps": 3}}
    )
    unset = ChatRequest.model_validate({"messages": message(VIDEO)})
    assert MediaOptions.from_chat(unset, preset) == MediaOptions({"min_pixels": 4}, {"fps": 3})
    options = MediaOptions.from_chat(chat, preset)
    assert options.processor == {"min_pixels": 4, "max_pixels": 9}
    assert options.sampling == {"fps": 1, "num_frames": 2}
    with pytest.raises(InvalidRequest) as refused:
        MediaOptions.from_chat(chat, msgspec.structs.replace(SEEING, sees=False))
    assert refused.value.param == "mm_processor_kwargs"


async def test_a_video_is_prepared_once_for_each_way_to_sample_it(tmp_path: Path) -> None:
    qwen2_vl(tmp_path)
    data = base64.b64encode(encoded("mp4", "mpeg4", count=12)).decode()
    source = MediaSource(f"data:video/mp4;base64,{data}", "messages[0].content[0]", kind="video")
    pool = MediaPool()
    four, again, eight = [
        await pool.prepare(source, MediaOptions({}, {"num_frames": count}), str(tmp_path), CALLER)
        for count in (4, 4, 8)
    ]
    assert four is again
    four_frames = MediaOptions({}, {"num_frames": 4})
    for changes in ({"tenant_id": 9}, {"cache_namespace": "new"}):
        namesake = replace(CALLER, **changes)
        assert await pool.prepare(source, four_frames, str(tmp_path), namesake) is not four
    pool.forget_prepared()
    assert await pool.prepare(source, four_frames, str(tmp_path), CALLER) is not four
    assert (four.kind, four.grid[0], eight.grid[0]) == ("video", 2, 4)
    smaller = MediaOptions({"size": {"shortest_edge": 196, "longest_edge": 196}}, {"num_frames": 4})
    assert (await pool.prepare(source, smaller, str(tmp_path), CALLER)).num_vectors == 2
    pruned = MediaOptions({}, {"num_frames": 4}, {"video": 0.25})
    half = await pool.prepare(source, pruned, str(tmp_path), CALLER)
    assert half.num_vectors == 3 * four.num_vectors // 4
    assert half.retained
    assert half.digest != four.digest
    for options, param in (
        (MediaOptions({}, {"num_frames": 0}), "media_io_kwargs"),
        (MediaOptions({"device": "meta"}, {}), "mm_processor_kwargs"),
        (MediaOptions({"size": "large"}, {}), "messages[0].content[0]"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            await pool.prepare(source, options, str(tmp_path), CALLER)
        assert refused.value.param == param


async def test_a_requests_pictures_wait_a_few_at_a_time_and_none_once_one_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool, counts = MediaPool(), [0]

    def refuse(*arguments: Any) -> tuple[Refusal, float]:
        counts.append(pool._preparers._jobs[CALLER.tenant])
        return Refusal("no picture"), 1.0

    monkeypatch.setattr(pool, "_ask_worker", refuse)
    sources = [
        MediaSource(f"data:;base64,{base64.b64encode(bytes([n])).decode()}", f"content[{n}]")
        for n in range(40)
    ]
    with pytest.raises(InvalidRequest, match="no picture") as refused:
        await pool.prepare_all(sources, MediaOptions({}, {}), "", CALLER)
    assert refused.value.param in {source.param for source in sources[:8]}
    assert max(counts) <= media_pool.REQUEST_CONCURRENCY
    assert len(counts) < len(sources) // 2


_SLOW_TO_START = """
import time
from engine.system.worker_process import open_worker_pipes, read_frame, write_frame
requests, answers = open_worker_pipes()
time.sleep(3)
while (frame := read_frame(requests)) is not None:
    write_frame(answers, frame)
"""


@pytest.mark.system
def test_a_workers_start_is_not_in_the_time_of_its_first_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(media_pool, "_COMMAND", (sys.executable, "-c", _SLOW_TO_START))
    pool, file = MediaPool(), msgspec.msgpack.encode(Refusal("read"))
    try:
        answer, _ = pool._ask_worker(file, 2 / media_pool.CLOCK_FACTOR, "image")
    finally:
        pool._worker.process.close()
    assert answer == Refusal("read")


async def test_a_tenant_is_charged_for_its_file_and_not_for_a_workers_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The one before may have ended by another tenant's file."""
    charged = []

    class Worker:
        alive = True

        def __init__(self, *_: Any, **__: Any) -> None:
            self.processor_s = 0.0

        def request(self, frame: bytes, *_: float) -> bytes:
            self.processor_s = 2.0 if frame else 30.0
            return frame and msgspec.msgpack.encode(Refusal("no sound"))

    async def charge(caller: Caller, *, seconds: float) -> None:
        charged.append(seconds)

    monkeypatch.setattr(media_pool, "WorkerProcess", Worker)
    monkeypatch.setattr(media_pool, "charge_media", charge)
    with pytest.raises(InvalidRequest, match="no sound"):
        await MediaPool().prepare_sound(b"RIFF", 80, 100, CALLER)
    assert charged == [2]


@pytest.mark.system
@pytest.mark.parametrize("fails", [False, True])
def test_a_worker_that_does_not_start_is_no_fault_of_the_file(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no memory for another process")

    monkeypatch.setattr(media_pool, "_COMMAND", (sys.executable, "-c", "pass"))
    if fails:
        monkeypatch.setattr(media_pool, "WorkerProcess", refuse)
    with pytest.raises(EngineUnavailable, match="didn't start"):
        MediaPool()._ask_worker(b"x", 20, "image")


async def test_a_file_that_is_being_fetched_is_charged_although_its_request_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool, loop = MediaPool(), asyncio.get_running_loop()
    started, go_on, charged = asyncio.Event(), threading.Event(), asyncio.Queue[int]()

    def read(*arguments: Any) -> tuple[bytes, bytes]:
        loop.call_soon_threadsafe(started.set)
        go_on.wait(120)
        return b"file", bytes(32)

    async def charge(caller: Caller, *, num_bytes: int) -> None:
        charged.put_nowait(num_bytes)

    monkeypatch.setattr(media_pool, "read_source", read)
    monkeypatch.setattr(media_pool, "charge_media", charge)
    source = MediaSource("https://example.org/a.png", "content[0]")
    asking = asyncio.ensure_future(pool.prepare(source, MediaOptions({}, {}), "", CALLER))
    await started.wait()
    asking.cancel()  # as a request's others are once one is refused
    with pytest.raises(asyncio.CancelledError):
        await asking
    go_on.set()
    assert await asyncio.wait_for(charged.get(), 120) == len(b"file")


async def test_a_client_that_goes_away_is_charged_the_seconds_of_its_sound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool, loop = MediaPool(), asyncio.get_running_loop()
    started_event, charged, go_on = asyncio.Event(), asyncio.Event(), threading.Event()

    def read(*arguments: Any) -> tuple[Refusal, float]:
        loop.call_soon_threadsafe(started_event.set)
        go_on.wait(120)
        return Refusal("no sound"), 1.5

    async def charge(caller: Caller, *, seconds: float) -> None:
        assert (caller, seconds) == (CALLER, 1.5)
        charged.set()

    monkeypatch.setattr(pool, "_ask_worker", read)
    monkeypatch.setattr(media_pool, "charge_media", charge)
    asking = asyncio.ensure_future(pool.prepare_sound(b"RIFF", 80, 100, CALLER))
    await started_event.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    go_on.set()
    await asyncio.wait_for(charged.wait(), 120)
