"""One small engine for all of the folder, and short forms for its requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.contract.messages import EngineRequest, TokenDelta
from engine.contract.sampling_params import SamplingParams
from engine.contract.structured_outputs import StructuredOutputsParams
from engine.core.engine_core import EngineCore
from engine.offline.llm import LLM
from engine.structured_output.backend_llguidance import Vocabulary
from tests.engine.models import make_tokenizer

SETTINGS: dict[str, Any] = {"num_gpu_blocks_override": 1024, "block_size": 4}
PROMPT = [40, 41, 42, 43, 44]


@pytest.fixture(scope="package")
def llm(model_folder: Callable[[str], Path]) -> Iterator[LLM]:
    llm = LLM(str(model_folder("llama")), **SETTINGS)
    yield llm
    llm.core.check_integrity()


@pytest.fixture(scope="package")
def vocabulary() -> Vocabulary:
    return Vocabulary(make_tokenizer().backend_tokenizer.to_str(), 384, (2,))


def params(seed: int = 0, **fields: Any) -> SamplingParams:
    """Structured parameters; names of `StructuredOutputsParams` go there."""
    names = StructuredOutputsParams.__struct_fields__
    structured = {name: fields.pop(name) for name in names if name in fields}
    expected_params = StructuredOutputsParams(**structured) if structured else None
    return SamplingParams(
        **{"temperature": 1.0, "max_tokens": 60, "seed": seed, **fields},
        structured_outputs=expected_params,
    )


def request(sampling: SamplingParams, request_id: str = "r", **fields: Any) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        gateway_id="g",
        prompt_token_ids=PROMPT,
        sampling=sampling,
        **fields,
    )


def finish(core: EngineCore) -> dict[tuple[str, int], list[TokenDelta]]:
    """Run until nothing is left; deltas by request and output."""
    deltas_by_output: dict[tuple[str, int], list[TokenDelta]] = {}
    while core.has_work:
        for delta in core.step():
            deltas_by_output.setdefault((delta.request_id, delta.index), []).append(delta)
    core.check_integrity()
    assert core.structured.num_waiting == 0
    assert not core.structured.states
    return deltas_by_output


def tokens(deltas: list[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]
