"""What leaves the device waits in host memory as it was there, as far as that is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine import LLM, LoRARequest, SamplingParams
from engine.contract.lora import AdapterRef
from engine.lora.store import AdapterStore

from .adapters import DEMO_MODEL

REQUESTS = [
    LoRARequest(name, 1, str(Path("demo/adapters") / name)) for name in ("pirate", "butler")
]


@pytest.mark.parametrize(("max_cpu_loras", "reads"), [(4, 2), (1, 4)])
def test_an_adapter_that_comes_back_is_read_again_only_where_nothing_kept_it(
    monkeypatch: pytest.MonkeyPatch, max_cpu_loras: int, reads: int
) -> None:
    read: list[str] = []

    def counted(store: AdapterStore, ref: AdapterRef, *args: Any) -> Any:
        read.append(ref.digest)
        return original(store, ref, *args)

    original = AdapterStore._load_by_template  # tried first of all that reads
    monkeypatch.setattr(AdapterStore, "_load_by_template", counted)
    llm = LLM(DEMO_MODEL, max_loras=1, max_cpu_loras=max_cpu_loras, enable_prefix_caching=False)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    token_ids = [
        llm.generate("Hello!", params, use_tqdm=False, lora_request=request)[0].outputs[0].token_ids
        for request in REQUESTS * 2
    ]
    assert token_ids[:2] == token_ids[2:]
    assert token_ids[0] != token_ids[1]
    assert len(read) == reads
