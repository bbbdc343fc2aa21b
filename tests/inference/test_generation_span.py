"""The span of a job: what it's called, and what it says was asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine.contract.sampling_params import SamplingParams
from inference.api.pooling.job import PoolingJob
from inference.request.job import Job
from inference.tracing import GenerationSpan


class Tracer:
    """Remembers the spans that begin."""

    def __init__(self) -> None:
        self.started: list[tuple[str, dict[str, Any]]] = []

    def start_span(self, name: str, *, attributes: dict[str, Any]) -> object:
        self.started.append((name, attributes))
        return object()


@pytest.mark.parametrize(
    ("kind", "endpoint", "operation"),
    [
        (Job, "chat.completions", "chat"),
        (Job, "messages", "chat"),
        (Job, "generate", "text_completion"),
        (PoolingJob, "embeddings", "embeddings"),
        (PoolingJob, "pooling", "embeddings"),
        (PoolingJob, "score", "embeddings"),
    ],
)
def test_a_span_tells_the_operation_and_sampling_where_there_is_any(
    kind: type[Job], endpoint: str, operation: str
) -> None:
    tracer, served = Tracer(), SimpleNamespace(name="m")
    asked: Any = {"ctx": None, "model": served, "sampling": SamplingParams(max_tokens=3)}
    GenerationSpan(
        SimpleNamespace(tracer=tracer),  # type: ignore[arg-type]
        kind(request_id="r", endpoint=endpoint, prompts=[[5]], **asked),
    )
    ((name, attributes),) = tracer.started
    assert (name, attributes["gen_ai.operation.name"]) == (f"{operation} m", operation)
    assert ("gen_ai.request.max_tokens" in attributes) is (kind is Job)
    assert ("gen_ai.request.temperature" in attributes) is (kind is Job)
