"""Media in messages of offline chats, in each of their parts."""

from __future__ import annotations

import base64
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.request import OpenerDirector

import pytest
import torch

from engine import LLM, EngineArgs, SamplingParams
from engine.contract.errors import ConfigError, InvalidRequest
from engine.multimodal.processor import MediaProcessor
from engine.multimodal.video_files import read_video
from engine.offline.chat_media import MediaAccess, extract_media
from tests.engine.multimodal.models import FAMILIES, picture
from tests.engine.multimodal.test_videos import encoded

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def answers(llm: LLM, *parts: dict[str, Any]) -> list[list[int]]:
    """One chat for each part, with the same question."""
    chats: list[Any] = [
        [{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}] for part in parts
    ]
    results = llm.chat(chats, PARAMS, use_tqdm=False)
    return [list(result.outputs[0].token_ids) for result in results]


def test_videos_and_vectors_are_seen_in_all_of_their_parts(tmp_path: Path) -> None:
    FAMILIES["qwen2_vl"](tmp_path)
    llm = LLM(
        str(tmp_path), dtype="float32", num_gpu_blocks_override=256, enable_prompt_embeds=True
    )
    file = encoded("mp4", "mpeg4", count=6)
    url = f"data:video/mp4;base64,{base64.b64encode(file).decode()}"
    frames = read_video(file).frames
    tokens = answers(
        llm,
        {"type": "video_url", "video_url": {"url": url}},
        {"video_url": url},
        {"type": "video", "video": url},
        {"type": "video", "video": (frames, {"fps": 10})},
    )
    assert tokens == [tokens[0]] * 4
    prepared = MediaProcessor(tmp_path).prepare(picture(1, 84, 56))
    core: Any = llm.llm_engine.core
    vectors = core.executor.worker.loaded.model.encode("image", prepared.tensors)
    grid = torch.tensor(prepared.tensors["image_grid_thw"])
    embeds = {"image_embeds": vectors, "image_grid_thw": grid}
    tokens = answers(
        llm,
        {"type": "image_pil", "image_pil": picture(1, 84, 56)},
        {"type": "image_embeds", "image_embeds": embeds},
    )
    assert tokens[0] == tokens[1]


def test_settings_say_how_media_are_prepared_where_a_request_does_not(tmp_path: Path) -> None:
    FAMILIES["qwen2_vl"](tmp_path)
    size = {"shortest_edge": 196, "longest_edge": 196}
    options: Any = {"dtype": "float32", "num_gpu_blocks_override": 64}
    llm = LLM(
        str(tmp_path), **options, mm_processor_kwargs={"size": size},
        media_io_kwargs={"video": {"num_frames": 2}},
    )  # fmt: skip
    same = LLM(str(tmp_path), **options, mm_processor_kwargs={"size": size, "num_frames": 2})
    url = f"data:video/mp4;base64,{base64.b64encode(encoded('mp4', 'mpeg4', count=6)).decode()}"
    chat: list[Any] = [{"role": "user", "content": [{"video_url": url}]}]
    [small] = llm.chat(chat, PARAMS, use_tqdm=False)
    [full] = LLM(str(tmp_path), **options).chat(chat, PARAMS, use_tqdm=False)
    assert len(small.prompt_token_ids or ()) < len(full.prompt_token_ids or ())
    assert same.chat(chat, PARAMS, use_tqdm=False)[0].prompt_token_ids == small.prompt_token_ids
    image = {"image": picture(1, 84, 56)}
    prompt = {"prompt": "<|vision_start|><image><|vision_end|>", "multi_modal_data": image}
    smaller, larger = (
        llm.generate(prompt | more, PARAMS)[0].prompt_token_ids or ()
        for more in ({}, {"mm_processor_kwargs": {"size": size | {"longest_edge": 4704}}})
    )
    assert len(smaller) < len(larger)
    for invalid, reason in (
        ({"sise": 1}, "no option 'sise'"),
        ({"size": "big"}, "can't be prepared"),
    ):
        with pytest.raises(ConfigError, match=reason) as refused:
            LLM(str(tmp_path), **options, mm_processor_kwargs=invalid)
        assert refused.value.param == "mm_processor_kwargs"


def test_thinking_is_text() -> None:
    message = {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}]}
    messages, media = extract_media([message])
    assert messages == [{"role": "assistant", "content": [{"type": "text", "text": "Hm."}]}]
    assert media == {}


def test_media_are_fetched_within_the_operators_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = []

    def refuse(opener: Any, request: Any, timeout: float) -> Any:
        seconds.append(timeout)
        raise OSError("unreachable")

    monkeypatch.setattr(OpenerDirector, "open", refuse)
    for value in ("", "0.5"):
        monkeypatch.setenv("VLLM_IMAGE_FETCH_TIMEOUT", value)
        message = {"role": "user", "content": [{"image_url": "http://127.0.0.1/a.png"}]}
        with pytest.raises(InvalidRequest, match="unreachable"):
            extract_media([message])
    assert seconds == [5.0, 0.5]


def read(url: str, access: MediaAccess) -> bytes:
    """The file of an address in a chat."""
    _, media = extract_media([{"content": [{"audio_url": url}]}], None, access)
    [data] = media["audio"]
    assert isinstance(data, bytes)
    return data


def test_a_chat_reads_pictures_of_the_allowed_folder(tmp_path: Path) -> None:
    FAMILIES["qwen2_vl"](tmp_path)
    picture(1, 84, 56).save(tmp_path / "a b.png")
    options: Any = {"dtype": "float32", "num_gpu_blocks_override": 64}
    args = EngineArgs(str(tmp_path), allowed_local_media_path=str(tmp_path), **options)
    for llm in (
        LLM(str(tmp_path), allowed_local_media_path=str(tmp_path), **options),
        LLM.from_engine_args(args),
    ):
        tokens = answers(
            llm,
            {"type": "image_pil", "image_pil": picture(1, 84, 56)},
            {"type": "image_url", "image_url": {"url": f"file://{tmp_path}/a%20b.png"}},
        )
        assert tokens[0] == tokens[1]


@pytest.mark.parametrize(
    "path",
    ["/secret", "/open/../secret", "/open/%2e%2e/secret", "/open/link", "/missing", "/open/pipe"],
)
def test_no_file_outside_of_the_allowed_folder_is_read(tmp_path: Path, path: str) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    (folder / "sound").write_bytes(b"sound")
    (tmp_path / "secret").write_bytes(b"secret")
    (folder / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(folder / "pipe")  # opening it would wait for a writer
    access = MediaAccess(str(folder))
    for prefix in (f"file://{folder}", f"file:{folder}", f"file://localhost{folder}"):
        assert read(f"{prefix}/sound", access) == b"sound"
    with pytest.raises(InvalidRequest, match="it isn't a file in allowed_local_media_path"):
        read(f"file://{tmp_path}{path}", access)
    with pytest.raises(InvalidRequest, match="it isn't a file in allowed_local_media_path"):
        read(f"file://elsewhere{folder}/sound", access)
    with pytest.raises(InvalidRequest, match="or set allowed_local_media_path"):
        read(f"file://{folder}/sound", MediaAccess())


@pytest.fixture
def port() -> Iterator[int]:
    """Of a server that sends those who ask for /away to another host's name."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            away = self.path == "/away"
            self.send_response(302 if away else 200)
            if away:
                self.send_header("Location", f"http://localhost:{self.server.server_port}/sound")
            self.end_headers()
            self.wfile.write(b"sound")

        def log_message(self, *arguments: Any) -> None:
            """Log nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def test_hosts_that_are_not_allowed_are_not_asked(port: int) -> None:
    ours, url = MediaAccess(allowed_media_domains=["127.0.0.1"]), f"http://127.0.0.1:{port}"
    both = MediaAccess(allowed_media_domains=["127.0.0.1", "LocalHost"])
    for access in (MediaAccess(), ours, both):
        assert read(f"{url}/sound", access) == b"sound"
    assert read(f"{url}/away", MediaAccess()) == read(f"{url}/away", both) == b"sound"
    for refused in (f"{url}/away", f"http://localhost:{port}/sound"):
        with pytest.raises(
            InvalidRequest, match="be read: its host is none of allowed_media_domains"
        ):
            read(refused, ours)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("allowed_local_media_path", "/no/such/folder"),
        ("allowed_local_media_path", 5),
        ("allowed_media_domains", "example.org"),
        ("allowed_media_domains", [5]),
    ],
)
def test_invalid_access_is_refused_before_a_model_is_loaded(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name} must be") as refused:
        LLM("no-model", **{name: value})
    assert refused.value.param == name
