"""A product of which one replica encodes pictures for the other."""

from __future__ import annotations

import re
import time
from pathlib import Path

import httpx
import pytest

from tests.e2e.product import running
from tests.e2e.test_images import NUM_TOKENS, chat_parts
from tests.engine.multimodal.models import IMAGE_TOKEN, expected, llava, picture

TOKEN = "a token for metrics alone"
HITS = re.compile(r"^vllm:mm_cache_hits_total\{.*\} ([0-9.]+)$", re.M)


@pytest.mark.slow
def test_a_picture_is_encoded_by_its_own_replica(tmp_path: Path) -> None:
    model, processor = llava(tmp_path / "model")
    image, question = picture(1, 60, 40), "What?"
    prompt = f"<|im_start|>user\n{IMAGE_TOKEN}{question}<|im_end|>\n<|im_start|>assistant\n"
    token_ids = expected(model, processor, prompt, [image], NUM_TOKENS)
    body = {
        "model": "sees",
        "messages": [{"role": "user", "content": chat_parts([image, question])}],
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    flags = (
        *("--model", str(tmp_path / "model"), "--served-model-name", "sees", "--no-worker"),
        *("--dtype", "float32", "--replicas", "2", "--encode-replicas", "1"),
        *("--kv-offloading-size", "0.01", "--kv-offloading-backend", "tcp://127.0.0.1:0"),
    )
    with running(tmp_path / "data", *flags, QUIRE_METRICS_TOKEN=TOKEN) as product:
        headers = {"Authorization": f"Bearer {product.api_key}"}
        url, deadline, hits = f"{product.base_url}/chat/completions", time.monotonic() + 120, 0.0
        with httpx.Client(timeout=60) as client:
            answer = client.post(url, headers=headers, json=body).raise_for_status().json()
            # The replica that answers has read the vectors.
            while not hits and time.monotonic() < deadline:
                time.sleep(0.5)
                page = client.get(
                    f"{product.url}/metrics", headers={"Authorization": f"Bearer {TOKEN}"}
                )
                hits = sum(map(float, HITS.findall(page.raise_for_status().text)))
    text = processor.tokenizer.decode(token_ids, skip_special_tokens=True)
    assert answer["choices"][0]["message"]["content"] == text
    assert hits == 1
