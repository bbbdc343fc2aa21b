"""Videos in a running product."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine import LLM, SamplingParams
from engine.multimodal.video_files import read_video
from tests.e2e.hostile_files import read_or_refused
from tests.e2e.product import running
from tests.engine.multimodal.hostile_videos import hostile_videos
from tests.engine.multimodal.models import qwen2_vl
from tests.engine.multimodal.test_videos import WRAPPED, encoded

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("videos")]


def test_chats_with_videos_say_what_the_engine_says_of_their_frames(tmp_path: Path) -> None:
    folder, data = tmp_path / "model", encoded("mp4", "mpeg4")
    qwen2_vl(folder)
    llm = LLM(str(folder), dtype="float32", num_gpu_blocks_override=256)
    prompt = f"<|im_start|>user\n{WRAPPED}What?<|im_end|>\n<|im_start|>assistant\n"
    frames = read_video(data, {"num_frames": 4}).frames
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    [result] = llm.generate({"prompt": prompt, "multi_modal_data": {"video": frames}}, params)
    flags = ("--model", str(folder), "--served-model-name", "qwen", "--dtype", "float32")
    with running(tmp_path, "--no-worker", *flags) as product:
        client = httpx.Client(
            base_url=product.base_url,
            headers={"Authorization": f"Bearer {product.api_key}"},
            timeout=120,
        )
        upload: Any = {"file": ("a.mp4", io.BytesIO(data))}
        stored = client.post("/files", files=upload, data={"purpose": "vision"}).json()["id"]
        url = "data:video/mp4;base64," + base64.b64encode(data).decode()
        for source in ({"video_url": {"url": url}}, {"file_id": stored}):
            body = {
                "model": "qwen",
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "video_url", **source},
                            {"type": "text", "text": "What?"},
                        ],
                    }
                ],
                "media_io_kwargs": {"video": {"num_frames": 4}},
                "max_tokens": 10,
                "temperature": 0,
                "ignore_eos": True,
            }
            answer = client.post("/chat/completions", json=body).json()
            assert answer["choices"][0]["message"]["content"] == result.outputs[0].text
            assert answer["usage"]["prompt_tokens_details"]["image_tokens"] > 0
        body["messages"][0]["content"][0] = {"type": "video_url", "video_url": url[:200]}
        refused = client.post("/chat/completions", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (
            400,
            "messages[0].content[0]",
        )


@pytest.mark.timeout(900)
def test_fault_36_hostile_videos_are_read_or_refused_by_part_in_bounded_memory(
    tmp_path: Path,
) -> None:
    qwen2_vl(tmp_path / "model")
    flags = ("--model", str(tmp_path / "model"), "--served-model-name", "qwen")
    with running(tmp_path, "--no-worker", *flags) as product:
        statuses = read_or_refused(product, "qwen", "video_url", hostile_videos(504))
    assert statuses.total() == 504
    assert statuses["undamaged", 200] == statuses["many_frames", 200] == 28
    for kind in ("bomb", "playlist", "audio_only"):
        assert statuses[kind, 400] == 28
