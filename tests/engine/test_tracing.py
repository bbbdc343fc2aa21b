"""Where spans go, what they tell of requests, and that nothing is loaded for them in vain."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError
from engine.contract.observability import TRACES_VARIABLE as VARIABLE
from engine.contract.observability import check_endpoint, context_of, headers_of
from engine.contract.replica_state import EngineStats
from engine.contract.sampling_params import SamplingParams
from engine.offline.llm import LLM
from engine.scheduler.plan import StepResult
from engine.worker.interface import CompletedStep
from engine.worker.timed_runner import TimedRunner
from tests.e2e.collector import collecting
from tests.engine.test_core import Folder

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_a_bare_address_gets_the_path_of_traces() -> None:
    assert check_endpoint("http://127.0.0.1:4318") == "http://127.0.0.1:4318/v1/traces"
    assert check_endpoint("https://collector/own/path") == "https://collector/own/path"
    assert check_endpoint("grpc://127.0.0.1:4317") == "grpc://127.0.0.1:4317"


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4318", "ftp://x", "http://", "nonsense"])
def test_an_endpoint_that_is_no_address_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        EngineConfig(model="m", otlp_traces_endpoint=endpoint)
    assert refused.value.param == "otlp_traces_endpoint"


def test_the_variable_holds_where_no_flag_says_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "http://from.environment")
    assert EngineConfig(model="m").otlp_traces_endpoint == "http://from.environment"
    config = EngineConfig(model="m", otlp_traces_endpoint="http://own")
    assert config.otlp_traces_endpoint == "http://own"


@pytest.mark.system
def test_nothing_of_opentelemetry_is_loaded_without_an_endpoint() -> None:
    program = "import sys, engine.serving.__main__; assert 'opentelemetry' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_context_goes_through_headers_and_nonsense_is_none() -> None:
    from opentelemetry.trace import get_current_span

    span = get_current_span(context_of({"traceparent": PARENT, "tracestate": "vendor=1"}))
    assert headers_of(span) == {"traceparent": PARENT, "tracestate": "vendor=1"}
    for nonsense in ({}, {"traceparent": "00-zz"}, {"traceparent": "x" * 10_000}):
        assert not get_current_span(context_of(nonsense)).get_span_context().is_valid


def test_offline_requests_have_spans_too(model_folder: Folder) -> None:
    with collecting() as collector:
        llm = LLM(
            str(model_folder("llama")),
            otlp_traces_endpoint=collector.url,
            num_gpu_blocks_override=200,
            max_model_len=128,
        )
        params = SamplingParams(n=2, max_tokens=4, temperature=0)
        llm.generate([{"prompt_token_ids": [1, 2, 3]}], params)
        llm.core.shutdown()
        (span,) = collector.wait(lambda spans: len(spans) == 1)
    assert (span.name, span.parent_id) == ("llm_request", "")
    assert span.attributes["gen_ai.usage.prompt_tokens"] == 3
    assert span.attributes["gen_ai.usage.num_sequences"] == 2
    assert len(span.attributes["gen_ai.response.finish_reasons"]) == 2


def time_spans(folder: Path, modules: str, **settings: Any) -> tuple[dict[str, Any], EngineStats]:
    """Attributes of the span of one request, and the engine's figures after it."""
    with collecting() as collector:
        llm = LLM(
            str(folder),
            otlp_traces_endpoint=collector.url,
            collect_detailed_traces=modules,
            num_gpu_blocks_override=200,
            max_model_len=128,
            **settings,
        )
        params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        llm.generate([{"prompt_token_ids": [1, 2, 3]}], params, use_tqdm=False)
        stats = llm.core.snapshot()
        llm.core.shutdown()
        (span,) = collector.wait(lambda spans: len(spans) == 1)
    return span.attributes, stats


FORWARD, EXECUTE = "gen_ai.latency.time_in_model_forward", "gen_ai.latency.time_in_model_execute"


@pytest.mark.parametrize(
    ("modules", "options", "measured"),
    [
        ("model", {}, {FORWARD}),
        ("worker", {"async_scheduling": True}, {EXECUTE}),
        ("model, worker", {"cpu_kernels": False}, {FORWARD, EXECUTE}),
        ("all", {"async_scheduling": True}, {FORWARD, EXECUTE}),
    ],
)
def test_a_span_says_how_long_a_request_was_in_the_modules(
    modules: str, options: dict[str, Any], measured: set[str], model_folder: Folder
) -> None:
    attributes, stats = time_spans(model_folder("llama"), modules, **options)
    assert {name for name in (FORWARD, EXECUTE) if name in attributes} == measured
    total = attributes["gen_ai.latency.e2e"]
    times = [attributes[name] for name in (FORWARD, EXECUTE) if name in attributes]
    assert all(0 < seconds <= total for seconds in times)
    assert times == sorted(times)  # the forward pass is part of the worker's time
    for name, attribute in (("forward", FORWARD), ("execute", EXECUTE)):
        histogram = stats.histograms[f"model_{name}_time_milliseconds"]
        assert sum(histogram.counts) == (1 if attribute in measured else 0)
        assert histogram.total == pytest.approx(1000 * attributes.get(attribute, 0.0))


def test_steps_that_have_run_last_no_longer_for_being_asked_for_late() -> None:
    class Model:
        forward = staticmethod(lambda seconds: clock.append(clock[-1] + seconds))

        def wrap_forward(self, wrap: Any) -> None:
            self.forward = wrap(self.forward)

        def launch(self, plan: Any, inputs: int) -> CompletedStep:
            clock.append(clock[-1] + 1)
            self.forward(inputs)
            return CompletedStep(StepResult.empty(1))

    clock = [0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "engine.worker.timed_runner.time", SimpleNamespace(perf_counter=lambda: clock[-1])
        )
        runner = TimedRunner(cast(Any, Model()), model=True, worker=True)
        results = [step.finish() for step in [runner.launch(cast(Any, None), n) for n in (2, 5)]]
    assert [result.forward_seconds for result in results] == [2, 5]
    assert [result.execute_seconds for result in results] == [3, 6]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"collect_detailed_traces": "all"}, "needs otlp_traces_endpoint"),
        (
            {"collect_detailed_traces": "model,gpu", "otlp_traces_endpoint": "http://c"},
            "must name model, worker or all; got 'gpu'",
        ),
    ],
)
def test_detailed_traces_name_modules_and_need_an_endpoint(
    options: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        EngineConfig(model="m", **options)
    assert refused.value.param == "collect_detailed_traces"
