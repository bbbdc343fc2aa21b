"""Hostile pictures and videos, sent to a running product."""

from __future__ import annotations

import base64
import re
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai

from engine.multimodal.worker import MEMORY_BYTES
from tests.e2e.product import Product, product_pids


def read_or_refused(
    product: Product, model: str, part: str, files: Iterable[tuple[str, bytes]]
) -> Counter[tuple[str, int]]:
    """Send each file of (kind, bytes) in a chat, as a part of this type, eight at a time; returns
    how many files of each kind had the status 200, and how many 400 with the part's name.

    Others raise, and so does memory beyond the bounds.
    """
    client = openai.OpenAI(base_url=product.base_url, api_key=product.api_key, max_retries=0)
    (gateway,) = product_pids(product, "manage.py\0up")
    initial_peak_bytes = _peak_bytes(gateway)

    def status(file: tuple[str, bytes]) -> tuple[str, int]:
        kind, data = file
        url = "data:application/octet-stream;base64," + base64.b64encode(data).decode()
        parts: Any = [{"type": "text", "text": "x"}, {"type": part, part: {"url": url}}]
        try:
            client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": parts}], max_tokens=1
            )
        except openai.APIStatusError as refused:
            if (refused.status_code, refused.param) != (400, "messages[0].content[1]"):
                raise AssertionError(kind) from refused
            return kind, 400
        return kind, 200

    with ThreadPoolExecutor(8) as threads:
        statuses = Counter(threads.map(status, files))
    workers = product_pids(product, "engine.multimodal.worker")
    assert workers
    assert max(map(_peak_bytes, workers)) < MEMORY_BYTES
    assert _peak_bytes(gateway) - initial_peak_bytes < 300 << 20
    return statuses


def _peak_bytes(pid: int) -> int:
    """The most memory that a process has had."""
    (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(peak) << 10
