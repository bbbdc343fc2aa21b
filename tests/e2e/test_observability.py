"""Traces, logs and metrics of the running product, through all of its processes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e import promql
from tests.e2e.collector import Span
from tests.e2e.product import ROOT
from tests.e2e.watched import Watched
from tests.engine.speculative.eager import eager_model

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SECRET = "zanzibar-marmalade"


@pytest.fixture(scope="module")
def answered(watched: Watched) -> Any:
    """The answer to a request that came with a trace and a request id of its client's."""
    with openai.OpenAI(base_url=watched.product.base_url, api_key=watched.product.api_key) as sdk:
        return sdk.chat.completions.with_raw_response.create(
            model=watched.product.model,
            messages=[{"role": "user", "content": f"Say {SECRET}."}],
            max_tokens=60,  # on a busy machine a few would come as one, with no time between them
            temperature=0.5,
            extra_body={"ignore_eos": True},
            extra_headers={
                "traceparent": f"00-{TRACE}-{PARENT}-01",
                "X-Request-Id": "of-the-client",
            },
        )


def of_trace(spans: list[Span]) -> dict[str, Span]:
    return {span.name: span for span in spans if span.trace_id == TRACE}


def test_a_trace_goes_from_the_client_through_the_gateway_to_the_engine(
    watched: Watched, answered: Any
) -> None:
    spans_by_name = of_trace(watched.collector.wait(lambda spans: len(of_trace(spans)) == 3))
    chat = f"chat {watched.product.model}"
    http, chat, engine = (
        spans_by_name["POST /v1/chat/completions"],
        spans_by_name[chat],
        spans_by_name["llm_request"],
    )
    assert http.parent_id == PARENT
    assert chat.parent_id == http.span_id
    assert engine.parent_id == chat.span_id
    assert (http.service, engine.service) == ("quire-gateway", "quire-engine")
    assert answered.headers["traceresponse"] == f"00-{TRACE}-{http.span_id}-01"
    assert http.attributes["http.response.status_code"] == 200
    usage = answered.parse().usage
    for span in (chat, engine):
        assert span.attributes["gen_ai.usage.input_tokens"] == usage.prompt_tokens
        assert span.attributes["gen_ai.usage.output_tokens"] == usage.completion_tokens
        assert span.attributes["gen_ai.request.model"] == watched.product.model
        assert span.attributes["gen_ai.request.temperature"] == 0.5
    assert chat.attributes["gen_ai.response.id"] == answered.parse().id
    assert engine.attributes["gen_ai.latency.time_in_queue"] >= 0
    assert engine.attributes["gen_ai.latency.time_to_first_token"] > 0


def test_neither_spans_nor_logs_hold_a_prompt(watched: Watched, answered: Any) -> None:
    watched.collector.wait(lambda spans: len(of_trace(spans)) == 3)
    assert SECRET.encode() not in watched.collector.raw
    assert SECRET not in watched.log.read_text()


def test_each_request_leaves_a_line_of_json_with_the_clients_id(
    watched: Watched, answered: Any
) -> None:
    entries = [json.loads(line) for line in watched.log.read_text().splitlines() if "{" in line[:1]]
    (line,) = [entry for entry in entries if entry.get("client_request_id") == "of-the-client"]
    assert (line["logger"], line["status"]) == ("quire.access", 200)
    assert line["path"] == "/v1/chat/completions"
    assert line["tenant"]
    notes = [entry["message"] for entry in entries if entry["logger"] == "quire.up"]
    assert any(text.startswith("Loading ") for text in notes)


def test_a_refusal_says_why_in_its_span_and_its_line(watched: Watched) -> None:
    trace = "5" * 32
    headers = {"Authorization": f"Bearer {watched.product.api_key}"}
    reply = httpx.post(
        f"{watched.product.base_url}/chat/completions",
        json={"model": "nobody", "messages": [{"role": "user", "content": SECRET}]},
        headers={**headers, "traceparent": f"00-{trace}-{PARENT}-01"},
    )
    assert reply.status_code == 404
    mine = watched.collector.wait(lambda spans: any(span.trace_id == trace for span in spans))
    (span,) = [span for span in mine if span.trace_id == trace]
    assert span.attributes["error.type"] == "model_not_found"
    entries = [json.loads(line) for line in watched.log.read_text().splitlines() if "{" in line[:1]]
    (line,) = [entry for entry in entries if entry.get("trace_id") == trace]
    assert line["error"] == "model_not_found"
    assert line["request_id"] == span.attributes["quire.request_id"]


def test_work_in_the_background_is_below_a_span_of_the_workers(watched: Watched) -> None:
    asked = "5b8aa5a2d2c872e8321cf37308d69df2"
    headers = {"traceparent": f"00-{asked}-00f067aa0ba902b7-01"}
    with openai.OpenAI(base_url=watched.product.base_url, api_key=watched.product.api_key) as sdk:
        retained_response = sdk.responses.create(
            model=watched.product.model,
            input=SECRET,
            max_output_tokens=3,
            background=True,
            extra_headers=headers,
        )

    def work_spans(spans: list[Span]) -> list[Span]:
        return [
            span
            for span in spans
            if span.attributes.get("quire.response_id") == retained_response.id
        ]

    def all_present(spans: list[Span]) -> bool:
        return bool(work_spans(spans)) and any(span.trace_id == asked for span in spans)

    spans = watched.collector.wait(all_present)
    (work,) = work_spans(spans)
    assert (work.service, work.name) == ("quire-worker", "background POST /v1/responses")
    (post,) = [span for span in spans if span.trace_id == asked]
    assert work.links == ((asked, post.span_id),)
    below = {span.name for span in spans if span.parent_id == work.span_id}
    assert f"chat {watched.product.model}" in below
    assert "warm-up" not in {span.attributes.get("gen_ai.request.id") for span in spans}


def test_a_batchs_lines_are_linked_to_the_request_that_made_it(watched: Watched) -> None:
    asked = "6c8aa5a2d2c872e8321cf37308d69df3"
    headers = {"traceparent": f"00-{asked}-00f067aa0ba902b7-01"}
    body = {"model": watched.product.model, "prompt": SECRET, "max_tokens": 2}
    lines = [
        {"custom_id": f"{n}", "method": "POST", "url": "/v1/completions", "body": body}
        for n in range(2)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    with openai.OpenAI(base_url=watched.product.base_url, api_key=watched.product.api_key) as sdk:
        file = sdk.files.create(file=("lines.jsonl", content), purpose="batch")
        batch = sdk.batches.create(
            input_file_id=file.id,
            endpoint="/v1/completions",
            completion_window="24h",
            extra_headers=headers,
        )

    def work_spans(spans: list[Span]) -> list[Span]:
        return [span for span in spans if span.attributes.get("quire.batch_id") == batch.id]

    def all_present(spans: list[Span]) -> bool:
        return len(work_spans(spans)) == 2 and any(span.trace_id == asked for span in spans)

    spans = watched.collector.wait(all_present)
    (post,) = [span for span in spans if span.trace_id == asked]
    assert post.name == "POST /v1/batches"
    assert [span.links for span in work_spans(spans)] == [((asked, post.span_id),)] * 2
    assert len({span.trace_id for span in work_spans(spans)} - {asked}) == 2


#: Series that vLLM's own three boards ask for.
VLLM_BOARDS = (
    "e2e_request_latency_seconds_bucket",
    "e2e_request_latency_seconds_count",
    "e2e_request_latency_seconds_sum",
    "generation_tokens_total",
    "inter_token_latency_seconds_bucket",
    "inter_token_latency_seconds_count",
    "inter_token_latency_seconds_sum",
    "iteration_tokens_total_count",
    "kv_cache_usage_perc",
    "num_requests_running",
    "num_requests_waiting",
    "prompt_tokens_total",
    "request_decode_time_seconds_sum",
    "request_generation_tokens_bucket",
    "request_max_num_generation_tokens_sum",
    "request_prefill_time_seconds_sum",
    "request_prompt_tokens_bucket",
    "request_queue_time_seconds_sum",
    "request_success_total",
    "request_time_per_output_token_seconds_bucket",
    "request_time_per_output_token_seconds_count",
    "request_time_per_output_token_seconds_sum",
    "time_to_first_token_seconds_bucket",
    "time_to_first_token_seconds_count",
    "time_to_first_token_seconds_sum",
)


@pytest.fixture(scope="module")
def live(watched: Watched, answered: Any) -> dict[str, set[str]]:
    """Names of the samples of a scrape after a request, each with its labels' names."""
    # Usage is settled after the answer; processes publish what they say of themselves every 10 s.
    late = ("quire:tenant_generation_tokens_total{", "django_migrations_unapplied_total{")
    deadline = time.monotonic() + 60
    while not all(name in watched.metrics() for name in late) and time.monotonic() < deadline:
        time.sleep(0.1)
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(watched.metrics()):
        suffixes = {
            "counter": ("_total",),
            "histogram": ("_bucket", "_count", "_sum"),
        }.get(family.type, ("",))
        for suffix in suffixes:
            labels.setdefault(family.name + suffix, set())
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


def test_vllms_boards_fill(live: dict[str, set[str]]) -> None:
    for name in VLLM_BOARDS:
        assert {"model_name", "engine"} <= live[f"vllm:{name}"], name
    assert "finished_reason" in live["vllm:request_success_total"]


#: What is counted only once something has gone wrong, or is known after a longer time.
NOT_YET = {
    "vllm:request_failure_total",
    "vllm:admission_rejections_total",
    "quire:tenant_refusals_total",
    "quire:prefix_cold_total",
}
EXPRESSIONS = [
    pytest.param(expression, id=f"{path.stem}-{number}")
    for path in sorted((ROOT / "deploy" / "grafana").glob("*.json"))
    for number, expression in enumerate(promql.board_expressions(promql.board(path)))
] + [
    pytest.param(rule["expr"], id=rule["alert"])
    for rule in promql.alerts(ROOT / "deploy" / "prometheus" / "alerts.yaml")
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_boards_and_alerts_ask_for_what_there_is(
    live: dict[str, set[str]], expression: str
) -> None:
    asked = list(promql.series(expression))
    for name, labels in asked:
        assert name in live, name
        if name not in NOT_YET:
            assert labels <= live[name], (name, labels)
            assert promql.grouped_by(expression) <= live[name], (name, expression)
    assert asked or expression.startswith("up{")


@pytest.mark.slow  # test_chaos counts another method's through the same heartbeats
def test_drafts_of_a_head_are_counted(watched: Watched, tmp_path: Path) -> None:
    """A model is loaded with an EAGLE head, which is right about what it says."""
    folder, head = eager_model(tmp_path)
    drafts = json.dumps({"method": "eagle", "model": str(head), "num_speculative_tokens": 4})
    watched.product.manage(
        *("load_model", str(folder), "--name", "eager", "--max-model-len", "512", "--wait"),
        *("--num-gpu-blocks-override", "64", "--speculative-config", drafts),
        timeout=180,
    )
    accepted = _accepted(watched)
    drafted = _drafts(watched, "draft_tokens")
    watched.product.manage("unload_model", "eager", "--wait")
    assert 0 < accepted <= drafted


def _accepted(watched: Watched) -> float:
    """Drafts of the model that held. What steps and the head take may have been measured at a busy
    start; then it is seen within some hundreds of steps.
    """
    accepted, deadline = 0.0, time.monotonic() + 60
    with openai.OpenAI(base_url=watched.product.base_url, api_key=watched.product.api_key) as sdk:
        while not accepted and time.monotonic() < deadline:  # heartbeats bring it
            answer = sdk.completions.create(
                model="eager", prompt=list(range(4, 34)), max_tokens=400,
                temperature=0, extra_body={"ignore_eos": True},
            )  # fmt: skip
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 400
            accepted = _drafts(watched, "accepted_tokens")
    return accepted


def _drafts(watched: Watched, name: str) -> float:
    """Of the model with the head, so far."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(watched.metrics())
        for sample in family.samples
        if sample.name == f"vllm:spec_decode_num_{name}_total"
        and sample.labels["model_name"] == "eager"
    )
