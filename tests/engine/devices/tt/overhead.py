"""`python -m tests.engine.devices.tt.overhead`: what a step of 32 rows costs the host on the device
tt, with a model that computes nothing.
"""

from __future__ import annotations

import logging
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from engine import LLM, SamplingParams
from engine.contract.messages import EngineRequest
from engine.devices import registry
from engine.models.registry import ModelRegistry
from tests.engine.devices.tt import fake_ttnn
from tests.engine.models import make_model
from tests.packages import TENSTORRENT

NUM_ROWS, NUM_TOKENS, NUM_RUNS = 32, 400, 5


class NoOpModel(fake_ttnn.CausalLM):
    """Answers each step with the same tokens."""

    @classmethod
    def initialize_vllm_model(cls, max_batch_size: int, **_: Any) -> NoOpModel:  # type: ignore[override]
        model = cls.__new__(cls)
        model.tokens = torch.full((max_batch_size,), 7)  # type: ignore[attr-defined]
        return model

    def allocate_kv_cache(self, *_: Any) -> list[Any]:  # type: ignore[override]
        return []

    def warmup_model_prefill(self, **_: Any) -> None:  # type: ignore[override]
        return None

    def prefill_forward(self, tokens: Any, **_: Any) -> Any:  # type: ignore[override]
        return self.tokens[: len(tokens)]  # type: ignore[attr-defined]

    def decode_forward(self, **_: Any) -> Any:  # type: ignore[override]
        return self.tokens  # type: ignore[attr-defined]


def median_step_seconds(llm: LLM, run: int) -> float:
    """Of the decodes of one batch, from the plan to the tokens."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    for row in range(NUM_ROWS):
        llm.core.add_request(
            EngineRequest(
                request_id=f"{run}-{row}",
                gateway_id="",
                prompt_token_ids=[row + 3] * 8,
                sampling=params,
            )
        )
    times = []
    while llm.core.has_work:
        started = time.perf_counter()
        llm.core.step()
        times.append(time.perf_counter() - started)
    return statistics.median(times[2:-2])


def main() -> None:
    """Print the median of a step, of the best run."""
    logging.disable(logging.WARNING)
    sys.modules["ttnn"] = fake_ttnn  # type: ignore[assignment]
    sys.path.insert(0, str(TENSTORRENT))
    import quire_tt

    quire_tt.TTDevice.unavailable_reason = classmethod(lambda _: "")
    registry.device_class = lambda _: quire_tt.TTDevice
    ModelRegistry.register_model("TTLlamaForCausalLM", NoOpModel)
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(
            str(make_model("llama", Path(folder))),
            device="cpu",
            max_num_seqs=NUM_ROWS,
            max_model_len=512,
            block_size=64,
            additional_config={"tt": {"sample_on_device_mode": "all"}},
            async_scheduling=False,
        )
        best = min(median_step_seconds(llm, run) for run in range(NUM_RUNS))
        llm.core.shutdown()
    print(f"{best * 1e6:.0f} us a step of {NUM_ROWS} rows")


if __name__ == "__main__":
    main()
