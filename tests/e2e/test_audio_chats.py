"""Sound in chats of a running product."""

from __future__ import annotations

import base64
import io
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from engine import LLM, SamplingParams
from engine.multimodal.audio import SAMPLE_RATE
from tests.e2e.product import running
from tests.e2e.test_speech import wav
from tests.engine.speech.models import sound
from tests.engine.speech.test_qwen2_audio import make_qwen2_audio
from tests.inference.test_prompt_embeds import saved
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("audio_chats")]


def test_chats_with_sound_say_what_the_engine_says_of_it_and_pay_by_the_second(
    tmp_path: Path,
) -> None:
    folder, data = tmp_path / "model", wav(sound(1, 1.5))
    model, processor = make_qwen2_audio(folder)
    llm = LLM(str(folder), dtype="float32", num_gpu_blocks_override=256)
    samples = (sound(1, 1.5).clip(-1, 1) * 32767).astype("<i2") / 32768
    prompt = "<|im_start|>user\n<|AUDIO|>What?<|im_end|>\n<|im_start|>assistant\n"
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    [result] = llm.generate({"prompt": prompt, "multi_modal_data": {"audio": samples}}, params)
    inputs = processor(
        text="<|AUDIO|>", audio=samples, sampling_rate=SAMPLE_RATE, return_tensors="pt"
    )
    heard: list[torch.Tensor] = []
    hook = model.model.multi_modal_projector.register_forward_hook(
        lambda module, states, vectors: heard.append(vectors[0])
    )
    with torch.no_grad():
        model(**inputs)
    hook.remove()
    num_vectors = int((inputs["input_ids"] == model.config.audio_token_id).sum())
    vectors = heard[0][:num_vectors].contiguous()
    flags = (
        *("--model", str(folder), "--served-model-name", "qwen", "--dtype", "float32"),
        *("--enable-prompt-embeds", "--no-worker"),
    )
    with running(tmp_path, *flags) as product:
        prices = ("--input", "0", "--output", "0", "--audio-minute", "0.006")
        product.manage("set_price", "qwen", *prices)
        time.sleep(2.5)  # gateways look prices up anew after two seconds
        client = httpx.Client(
            base_url=product.base_url,
            headers={"Authorization": f"Bearer {product.api_key}"},
            timeout=120,
        )
        upload: Any = {"file": ("a.wav", io.BytesIO(data))}
        stored = client.post("/files", files=upload, data={"purpose": "user_data"}).json()["id"]
        encoded = base64.b64encode(data).decode()
        sources: list[dict[str, Any]] = [
            {"type": "input_audio", "input_audio": {"data": encoded, "format": "wav"}},
            {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{encoded}"}},
            {"audio_url": f"data:audio/wav;base64,{encoded}"},
            {"type": "audio_url", "file_id": stored},
            {"type": "audio_embeds", "audio_embeds": saved(vectors)},
        ]
        body: dict[str, Any] = {
            "model": "qwen",
            "max_tokens": 10,
            "temperature": 0,
            "ignore_eos": True,
        }

        def ask(part: dict[str, Any]) -> httpx.Response:
            parts = [part, {"type": "text", "text": "What?"}]
            messages = [{"role": "user", "content": parts}]
            return client.post("/chat/completions", json={**body, "messages": messages})

        for source in sources:
            answer = ask(source).raise_for_status().json()
            assert answer["choices"][0]["message"]["content"] == result.outputs[0].text, source
            assert answer["usage"]["prompt_tokens_details"]["audio_tokens"] == 37
        for part in (
            {"type": "input_audio", "input_audio": {"data": "AAAA"}},
            {"type": "image_url", "image_url": "data:;base64,AAAA"},
            {"type": "audio_embeds", "audio_embeds": saved(vectors[:, 1:].contiguous())},
        ):
            refused = ask(part)
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "messages[0].content[0]", refused.text

        def ledger() -> list[tuple[int, int]]:
            query = "SELECT audio_ms, cost_nanos FROM metering_usageentry WHERE audio_ms > 0"
            with closing(sqlite3.connect(product.data_dir / "quire.sqlite3")) as database:
                return list(database.execute(query))

        # Vectors have no length in seconds: they are billed as the tokens that they stand for.
        wait_until(lambda: len(ledger()) == len(sources) - 1)
        assert ledger() == [(1500, 150_000)] * (len(sources) - 1)
