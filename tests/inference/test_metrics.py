"""`/metrics`: vLLM's names, from all processes, bounded."""

from __future__ import annotations

import asyncio
import time
from typing import Any
from unittest.mock import AsyncMock

import pytest
from asgiref.sync import sync_to_async
from django.test import Client
from prometheus_client import REGISTRY, CollectorRegistry, Metric, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    SummaryMetricFamily,
)
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from engine.contract import messages as protocol
from engine.contract.lora import AdapterStatus
from engine.contract.metrics import ENGINE_HISTOGRAMS, REQUEST_TOKENS, Histograms
from engine.contract.replica_state import ProcessStats
from engine.text.tokenizer import Tokenizer
from inference.edge.handler import http_application
from inference.edge.request_log import count_websockets
from inference.metrics import flusher
from inference.metrics.definitions import FAMILIES
from inference.metrics.exposition import exposition, process_metric_families, publish, text_format
from inference.metrics.flusher import LABEL_TTL_S, flush, label_key, metrics_key, prune
from inference.metrics.recorder import Recorder, field_of
from inference.metrics.recorder import recorder as the_recorder
from tenants import actions
from tenants.actors import SYSTEM_ACTOR
from tests.inference.asgi_client import AsgiClient
from tests.inference.conftest import Gateway
from tests.inference.scripted import byte_by_byte


@pytest.fixture
async def insider(gateway: Gateway) -> AsgiClient:
    """A client with an operator's key."""
    make = sync_to_async(actions.create_key)
    key = await make(actor=SYSTEM_ACTOR, tenant=gateway.rows.tenant, scopes=("operator",))
    return AsgiClient(gateway.client.app, key.secret)


async def scraped(insider: AsgiClient) -> str:
    reply = await insider.get("/metrics")
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/plain")
    return reply.body.decode()


def values(text: str, name: str, **labels: str) -> list[float]:
    """Of all samples of this name that have these labels."""
    lines = "".join(line for line in text.splitlines(keepends=True) if line.startswith(name))
    return [
        sample.value
        for family in text_string_to_metric_families(lines)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]


def beat(**changes: Any) -> protocol.Heartbeat:
    model = protocol.ModelInfo(name="m", path="", max_model_len=1, vocab_size=1, dtype="")
    return protocol.Heartbeat(
        replica_id="r1", incarnation="i", state="ready", model=model, at=0, progress_at=0, **changes
    )


async def test_requests_count_under_vllms_names_and_labels(
    gateway: Gateway, insider: AsgiClient
) -> None:
    async with gateway.serving(gateway.fake(replica_id="r7")):
        for _ in range(3):
            await gateway.client.chat(max_tokens=5)
        await gateway.usage()
        text = await scraped(insider)
    labels = {"model_name": "fake", "engine": "r7"}
    assert values(text, "vllm:request_success_total", **labels, finished_reason="length") == [3]
    for name, total in (
        ("time_to_first_token_seconds", None),
        ("e2e_request_latency_seconds", None),
        ("request_time_per_output_token_seconds", None),
        ("request_generation_tokens", 15),
        ("request_max_num_generation_tokens", 15),
        ("request_params_max_tokens", 15),
        ("request_params_n", 3),
        ("request_params_best_of", 3),
    ):
        assert values(text, f"vllm:{name}_count", **labels) == [3], name
        if total is not None:
            assert values(text, f"vllm:{name}_sum", **labels) == [total], name
    assert values(text, "vllm:request_generation_tokens_bucket", le="5.0", **labels) == [3]
    assert values(text, "vllm:request_generation_tokens_bucket", le="2.0", **labels) == [0]
    for name in ("inter_token_latency_seconds", "time_per_output_token_seconds"):
        assert values(text, f"vllm:{name}_count", **labels) == [12]


async def test_families_are_there_before_anything_has_happened(
    served: Gateway, insider: AsgiClient
) -> None:
    text = await scraped(insider)
    for name, family in FAMILIES.items():
        suffix = "_total" if family.kind == "counter" else ""
        assert f"# TYPE {name}{suffix} {family.kind}" in text, name
    for name in (
        *("num_requests_running", "num_requests_waiting", "num_requests_swapped"),
        *("gpu_cache_usage_perc", "kv_cache_usage_perc", "cpu_cache_usage_perc"),
        *("num_preemptions_total", "prompt_tokens_total", "generation_tokens_total"),
        *("prompt_tokens_cached_total", "prompt_tokens_by_source_total", "cache_config_info"),
        *("prefix_cache_hits_total", "gpu_prefix_cache_hits_total", "engine_sleep_state"),
    ):
        assert values(text, f"vllm:{name}"), name


async def test_requests_of_all_gateways_are_added_up(served: Gateway, insider: AsgiClient) -> None:
    field = field_of("vllm:request_success", ("fake", "r7", "length"), "")
    key = metrics_key(served.prefix)
    await served.redis.hincrbyfloat(key, field, 41)
    text = await scraped(insider)
    assert values(text, "vllm:request_success_total", engine="r7") == [41]


async def test_what_an_unknown_release_counts_is_left_out(
    served: Gateway, insider: AsgiClient
) -> None:
    for field in (field_of("vllm:of_tomorrow", ("x",), ""), field_of("http_requests", ("x",), "")):
        await served.redis.hincrbyfloat(metrics_key(served.prefix), field, 1)
    assert "of_tomorrow" not in await scraped(insider)


async def test_an_aborted_request_counts_as_such(gateway: Gateway, insider: AsgiClient) -> None:
    replica = gateway.fake(token_delay=0.01)
    async with gateway.serving(replica):
        exchange = gateway.client.open(
            "POST", "/v1/completions", {"model": "fake", "prompt": "x", "max_tokens": 400}
        )
        while replica.steps < 3:
            await gateway.refresh()
        await exchange.leave()
        await gateway.usage()
        text = await scraped(insider)
    assert values(text, "vllm:request_failure_total", model_name="fake", reason="abort") == [1]


async def test_what_the_engine_refuses_is_told_apart_from_what_fails(
    gateway: Gateway, insider: AsgiClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = gateway.fake()

    async def refuse(entry_id: bytes, request: protocol.EngineRequest) -> None:
        error = protocol.ErrorInfo(message="No.", status=400, code="invalid_grammar")
        delta = protocol.TokenDelta(
            request_id=request.request_id, finish_reason="error", error=error
        )
        await replica._write(request.gateway_id, [delta])
        await replica._done(entry_id)

    monkeypatch.setattr(replica, "_start", refuse)
    async with gateway.serving(replica):
        reply = await gateway.client.post("/v1/completions", {"model": "fake", "prompt": "x"})
        await gateway.usage()
        text = await scraped(insider)
    assert reply.status == 400
    assert values(text, "vllm:request_failure_total", model_name="fake", reason="refused") == [1]


@pytest.fixture
def client(served: Gateway) -> AsgiClient:
    """Of the application that a server runs: the API beside Django's pages."""
    return AsgiClient(http_application(served.client.app), served.client.key)


async def test_the_api_is_counted_by_pattern_and_class_of_status(
    client: AsgiClient, insider: AsgiClient
) -> None:
    await client.chat(max_tokens=5)
    for path in ("/v1/responses/resp_one", "/v1/responses/resp_two"):
        assert (await client.get(path)).status == 404
    await client.post("/v1/no/such/path", {})
    text = await scraped(insider)
    chat = {"handler": "/v1/chat/completions", "method": "POST"}
    assert values(text, "http_requests_total", **chat, status="2xx") == [1]
    assert values(text, "http_request_duration_seconds_count", **chat) == [1]
    assert values(text, "http_response_size_bytes_sum", handler=chat["handler"])[0] > 100
    assert values(text, "http_request_size_bytes_sum", handler=chat["handler"])[0] > 10
    pattern = "/v1/responses/<str:response_id>"
    assert values(text, "http_requests_total", handler=pattern, status="4xx") == [2]
    assert "resp_one" not in text
    assert "such/path" not in text


async def test_a_stream_is_counted_to_its_end(client: AsgiClient, insider: AsgiClient) -> None:
    reply = await client.chat(max_tokens=5, stream=True)
    text = await scraped(insider)
    sent = values(text, "http_response_size_bytes_sum", handler="/v1/chat/completions")
    assert sent == [len(reply.body)]


async def test_every_process_tells_of_itself(served: Gateway, insider: AsgiClient) -> None:
    assert (await sync_to_async(Client().get)("/login/")).status_code == 200
    for name in ("gateway-a", "worker-b"):
        await publish(served.redis, served.prefix, name, process_metric_families())
    text = await scraped(insider)
    for name in ("process_resident_memory_bytes", "process_cpu_seconds_total", "python_info"):
        for process in ("gateway-a", "worker-b"):
            assert values(text, name, process=process)[0] > 0, name
    assert values(text, "process_start_time_seconds")[0] < time.time()
    # Django's own, of pages, by django-prometheus.
    pages = "django_http_requests_total_by_method_total"
    assert values(text, pages, process="gateway-a", method="GET")[0] >= 1


async def test_outputs_that_a_tool_parser_read_are_counted(
    gateway: Gateway, insider: AsgiClient, tokenizer: Tokenizer
) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    tool_text = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    name = "vllm:tool_call_parser_invocations_total"
    for text in (tool_text, "no"):
        async with gateway.serving(gateway.scripted(byte_by_byte(tokenizer, text))):
            await gateway.client.chat(tools=[tool], stream=text == tool_text)
            await gateway.client.chat()
    await flush(gateway.redis, gateway.prefix)
    text = await scraped(insider)
    labels = {"model_name": "fake", "request_type": "chat_completions"}
    assert values(text, name, mode="streaming", outcome="tool_call", **labels) == [1]
    assert values(text, name, mode="non_streaming", outcome="no_tool_call", **labels) == [1]
    assert sum(values(text, name)) == 2


async def test_websockets_are_counted_while_they_are_open() -> None:
    def figures() -> tuple[float, float, float]:
        names = ("connections_active", "connections_total", "connection_duration_seconds_count")
        sample_values = [REGISTRY.get_sample_value(f"vllm:websocket_{name}") or 0 for name in names]
        return sample_values[0], sample_values[1], sample_values[2]

    initial_figures, during = figures(), []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        if scope["accepts"]:
            await send({"type": "websocket.accept"})
        during.append(figures())
        raise ConnectionError

    for accepts in (True, False):
        with pytest.raises(ConnectionError):
            await count_websockets(application)({"accepts": accepts}, AsyncMock(), AsyncMock())
    active, total, count = initial_figures
    assert during == [(active + 1, total + 1, count), (active, total + 1, count + 1)]
    assert figures() == (active, total + 1, count + 1)


@pytest.mark.parametrize("last", ["websocket.close", "websocket.send"])
async def test_what_is_sent_to_a_websocket_that_has_ended_is_dropped(last: str) -> None:
    sent: list[str] = []

    async def send(message: Any) -> None:  # as uvicorn has it
        if last in sent:
            raise RuntimeError("It was sent after the end.")
        sent.append(message["type"])
        if sent[-1] == "websocket.send":
            raise ConnectionError("The client has left.")

    async def application(scope: Any, receive: Any, send: Any) -> None:
        for kind in ("websocket.accept", last, "websocket.send", "websocket.close"):
            await send({"type": kind})

    await count_websockets(application)({}, AsyncMock(), send)
    assert sent == ["websocket.accept", last]


async def test_a_process_that_is_gone_is_shown_no_more(
    served: Gateway, insider: AsgiClient
) -> None:
    await publish(served.redis, served.prefix, "gone", process_metric_families())
    await served.redis.delete(f"{served.prefix}:metrics:process:gone")
    assert 'process="gone"' not in await scraped(insider)


def test_replicas_tell_of_their_histograms_and_processes() -> None:
    seen = Histograms(*ENGINE_HISTOGRAMS)
    for name in ENGINE_HISTOGRAMS:
        seen.observe(name, 1.0)
    stats = protocol.EngineStats(
        histograms=seen.by_name, prefix_cache_hits_total=5, prompt_tokens_total=7
    )
    one = beat(stats=stats, sleep_level=2, process=ProcessStats(resident_bytes=123))
    text = exposition({}, [one]).decode()
    for name in ENGINE_HISTOGRAMS:
        assert values(text, f"vllm:{name}_count", engine="r1", model_name="m") == [1], name
        assert values(text, f"vllm:{name}_bucket", le="+Inf") == [1], name
    assert values(text, "process_resident_memory_bytes", process="r1") == [123]
    source = "vllm:prompt_tokens_by_source_total"
    assert values(text, source, source="local_cache_hit") == [5]
    assert values(text, source, source="local_compute") == [7]
    assert values(text, "vllm:engine_sleep_state", sleep_state="discard_all") == [1]
    assert values(text, "vllm:engine_sleep_state", sleep_state="awake") == [0]


class FixedCollector(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        return self._metrics


def test_the_text_is_that_of_prometheus_own_client() -> None:
    histogram = HistogramMetricFamily("waits_seconds", "How long.\nOr not.", labels=["model"])
    histogram.add_metric(['a"b\\c\nd'], [("0.1", 1.0), ("+Inf", 3.0)], 1e-07)
    counter = CounterMetricFamily("sent", "Sent \\ received.", labels=["to", "from"])
    counter.add_metric(["é", ""], float("inf"))
    unlabeled = Metric("vllm:load", "", "unknown")
    unlabeled.add_sample("vllm:load", {}, 12345678.0)
    summary = SummaryMetricFamily("size", "Sizes.", 2, 3.5)
    info = InfoMetricFamily("cache_config", "Settings.", {"dtype": "auto"})
    families = [histogram, counter, unlabeled, summary, info, *REGISTRY.collect()]
    current = [metric for metric in families if "_created" not in str(metric.samples)]
    assert len(current) > 10
    registry = CollectorRegistry(auto_describe=False)
    registry.register(FixedCollector(current))
    assert text_format(current) == generate_latest(registry)


def test_cache_config_shows_what_a_replica_says_of_its_cache() -> None:
    one = beat()
    one.model.cache_config = {"block_size": "16", "enable_prefix_caching": "True"}
    text = exposition({}, [one]).decode()
    assert values(text, "vllm:cache_config_info", block_size="16", engine="r1") == [1]


def test_adapters_are_told_by_vllms_name_by_tier_and_by_what_their_loads_took() -> None:
    states = [
        AdapterStatus(digest="a" * 64, name="sql", tier="device", num_running=2),
        AdapterStatus(digest="b" * 64, name="law", tier="device", num_running=1, num_waiting=1),
        AdapterStatus(digest="c" * 64, tier="disk", num_waiting=3),
        AdapterStatus(digest="d" * 64, name="idle", tier="host"),
    ]
    stats = protocol.EngineStats(
        adapter_bytes=700,
        adapter_slots=4,
        adapter_loads_total=5,
        adapter_load_seconds_total=0.25,
        adapter_evictions_total=1,
    )
    text = exposition({}, [beat(stats=stats, adapters=states)]).decode()
    names = {"running_lora_adapters": "law,sql", "waiting_lora_adapters": "cccccccccccc,law"}
    names["max_lora"] = "4"
    assert values(text, "vllm:lora_requests_info", engine="r1", model_name="m", **names) == [0]
    for tier, count in (("device", 2), ("host", 1), ("disk", 1)):
        assert values(text, "quire:adapters", engine="r1", tier=tier) == [count]
    for name, value in (
        ("quire:adapter_bytes", 700),
        ("quire:adapter_loads_total", 5),
        ("quire:adapter_load_seconds_total", 0.25),
        ("quire:adapter_evictions_total", 1),
    ):
        assert values(text, name, engine="r1") == [value]


def test_cold_prefixes_are_counted_by_reason() -> None:
    stats = protocol.EngineStats(prefix_cold_total={"evicted": 3})
    text = exposition({}, [beat(stats=stats)]).decode()
    assert values(text, "quire:prefix_cold_total", engine="r1", reason="evicted") == [3]


def test_lookups_of_encoded_media_have_vllms_names() -> None:
    stats = protocol.EngineStats(mm_cache_queries_total=5, mm_cache_hits_total=3)
    text = exposition({}, [beat(stats=stats)]).decode()
    assert values(text, "vllm:mm_cache_queries_total", engine="r1") == [5]
    assert values(text, "vllm:mm_cache_hits_total", engine="r1") == [3]


def test_tiers_are_shown_by_tier_and_reason() -> None:
    stats = protocol.EngineStats(
        num_requests_swapped=2,
        cpu_cache_usage_perc=0.5,
        external_prefix_cache_queries_total=80,
        external_prefix_cache_hits_total=64,
        kv_tier_saved_blocks_total=7,
        kv_tier_failures_total={"authentication": 3},
        kv_tier_bytes={"host": 50, "disk": 60},
        kv_tier_capacity_bytes={"host": 100, "disk": 600},
        kv_tier_hit_tokens_total={"disk": 64},
        kv_tier_evicted_tokens_total={"disk": 32},
        kv_tier_saved_seconds_total={"disk": 1.5},
    )
    text = exposition({}, [beat(stats=stats)]).decode()
    for name, value in (
        ("vllm:num_requests_swapped", 2),
        ("vllm:cpu_cache_usage_perc", 0.5),
        ("vllm:external_prefix_cache_queries_total", 80),
        ("vllm:external_prefix_cache_hits_total", 64),
        ("quire:kv_tier_saved_blocks_total", 7),
    ):
        assert values(text, name, engine="r1") == [value], name
    assert values(text, "quire:kv_tier_failures_total", reason="authentication") == [3]
    assert values(text, "quire:kv_tier_bytes", tier="disk") == [60]
    assert values(text, "quire:kv_tier_capacity_bytes", tier="disk") == [600]
    assert values(text, "quire:kv_tier_hit_tokens_total", tier="disk") == [64]
    assert values(text, "quire:kv_tier_evicted_tokens_total", tier="disk") == [32]
    assert values(text, "quire:kv_tier_saved_seconds_total", tier="disk") == [1.5]
    assert values(text, "vllm:prompt_tokens_by_source_total", source="external_kv_transfer") == [64]


def test_ranks_are_counted_where_there_are_several() -> None:
    single, shared = beat(), beat(stats=protocol.EngineStats(collective_seconds_total=1.5))
    shared.model.num_ranks, shared.replica_id = 2, "r2"
    text = exposition({}, [single, shared]).decode()
    assert values(text, "quire:ranks") == [2]
    assert values(text, "quire:collective_seconds_total", engine="r2") == [1.5]


async def test_tenants_have_series_of_their_own_up_to_a_bound(
    served: Gateway, insider: AsgiClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flusher, "MAX_TENANTS", 2)
    for name in ("ants", "bees", "cats", "dogs", "ants"):
        the_recorder.count("quire:tenant_requests", (name, "fake", "stop"))
        await flush(served.redis, served.prefix)
    text = await scraped(insider)
    requests = "quire:tenant_requests_total"
    assert values(text, requests, tenant="ants") == [2]
    assert values(text, requests, tenant="bees") == [1]
    assert values(text, requests, tenant="other") == [2]
    assert values(text, requests, tenant="cats") == []


async def test_a_tenants_tokens_and_refusals_are_counted(
    served: Gateway, insider: AsgiClient
) -> None:
    make = sync_to_async(actions.create_key)
    key = await make(actor=SYSTEM_ACTOR, tenant=served.rows.tenant, requests_per_minute=1)
    limited = AsgiClient(served.client.app, key.secret)
    assert (await limited.chat(max_tokens=5)).status == 200
    assert (await limited.chat(max_tokens=5)).status == 429
    await served.usage()
    text = await scraped(insider)
    tenant = served.rows.tenant.slug
    for name in ("requests_total", "time_to_first_token_seconds_count"):
        assert values(text, f"quire:tenant_{name}", tenant=tenant) == [1], name
    assert values(text, "quire:tenant_generation_tokens_total", tenant=tenant) == [5]
    refused = "quire:tenant_refusals_total"
    assert values(text, refused, tenant=tenant, code="rate_limit_exceeded") == [1]


async def test_series_of_tenants_and_replicas_that_are_long_silent_are_dropped(
    served: Gateway, insider: AsgiClient
) -> None:
    for name in ("ants", "bees"):
        the_recorder.count("quire:tenant_requests", (name, "fake", "stop"))
        the_recorder.count("vllm:request_success", ("fake", f"of-{name}", "stop"))
    await flush(served.redis, served.prefix)
    long_ago = time.time() - LABEL_TTL_S - 1
    await served.redis.zadd(label_key(served.prefix, "tenant"), {"ants": long_ago})
    await served.redis.zadd(label_key(served.prefix, "engine"), {"of-ants": long_ago})
    await prune(served.redis, served.prefix, metrics_key(served.prefix))
    text = await scraped(insider)
    assert values(text, "quire:tenant_requests_total", tenant="ants") == []
    assert values(text, "quire:tenant_requests_total", tenant="bees") == [1]
    assert values(text, "vllm:request_success_total", engine="of-ants") == []
    assert values(text, "vllm:request_success_total", engine="of-bees") == [1]


def test_increments_are_taken_once_and_can_be_given_back() -> None:
    recorder, ttft = Recorder(), "vllm:time_to_first_token_seconds"
    recorder.observe(ttft, ("m", "r"), 0.3)
    recorder.observe(ttft, ("m", "r"), 10_000.0, 2)
    recorder.count("vllm:request_success", ("m|n", "r", "stop"))
    first = recorder.drain()
    assert recorder.drain() == {}
    recorder.restore(first)
    recorder.count("vllm:request_success", ("m|n", "r", "stop"))
    second = recorder.drain()
    field = field_of("vllm:request_success", ("m|n", "r", "stop"), "")
    assert second.pop(field) == 2
    first.pop(field)
    assert second == first
    assert first[field_of(ttft, ("m", "r"), "22")] == 2
    assert first[field_of(ttft, ("m", "r"), "sum")] == 20000.3


def test_buckets_are_vllms() -> None:
    assert REQUEST_TOKENS[:7] == (1, 2, 5, 10, 20, 50, 100)
    buckets = FAMILIES["vllm:time_to_first_token_seconds"].buckets
    assert (buckets[:3], buckets[-1]) == ((0.001, 0.005, 0.01), 2560.0)


async def test_two_gateways_scrape_the_same_numbers_at_once(
    served: Gateway, insider: AsgiClient
) -> None:
    await served.client.chat(max_tokens=5)
    await served.usage()
    texts = await asyncio.gather(*(scraped(insider) for _ in range(4)))
    assert {tuple(values(text, "vllm:request_prompt_tokens_count")) for text in texts} == {(1.0,)}
