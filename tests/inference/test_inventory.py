"""docs/inventory.md is what the gateway does with the fields, routes and metrics that it names."""

from __future__ import annotations

from pathlib import Path

import pytest
from django.test import Client

from inference.edge.handler import is_gateway_path
from inference.metrics.definitions import FAMILIES
from inference.schemas.chat import ChatRequest
from inference.schemas.completions import CompletionRequest
from inference.web.views import path_not_found
from tests.inference import test_every_field as every
from tests.inference.asgi_client import AsgiClient
from tests.inference.conftest import Gateway
from tools.docs.inventory_page import (
    EFFECTIVE,
    IGNORED,
    SCHEMAS,
    field_outcome,
    has_route,
    inventory,
    live_metrics,
)
from tools.docs.vllm_inventory import (
    BOTH,
    CHAT,
    COMPLETIONS,
    METRICS,
    ROUTES,
    WITHOUT_EFFECT,
)

PAGE = Path(__file__).resolve().parents[2] / "docs/inventory.md"
FIELDS = f"{BOTH} {CHAT} {COMPLETIONS}".split()
OUTCOMES = {schema: {n: field_outcome(schema, n) for n in of.split()} for schema, of, _ in SCHEMAS}


def test_the_committed_page_is_the_generated_one() -> None:
    assert PAGE.read_text(encoding="utf-8") == inventory()


def test_it_names_every_field_once_and_says_why_one_has_no_effect() -> None:
    assert set(every.MANUAL.split()) - set(FIELDS) == set()
    assert len(FIELDS) == len(set(FIELDS))
    without = {n for of in OUTCOMES.values() for n, outcome in of.items() if outcome != EFFECTIVE}
    assert without == WITHOUT_EFFECT.keys()


def test_each_effective_field_has_a_test_of_its_effect() -> None:
    schema_samples = {ChatRequest: every.CHAT, CompletionRequest: every.COMPLETION}
    for schema, outcomes in OUTCOMES.items():
        tested = every.BOTH.keys() | schema_samples[schema].keys() | every.ELSEWHERE.keys()
        assert {n for n, outcome in outcomes.items() if outcome == EFFECTIVE} <= tested


@pytest.mark.parametrize(
    ("path", "schema"), [("chat", ChatRequest), ("complete", CompletionRequest)]
)
async def test_requests_come_out_as_the_page_says(
    served: Gateway, path: str, schema: type[ChatRequest | CompletionRequest]
) -> None:
    send, outcomes = getattr(served.client, path), OUTCOMES[schema]
    some = ("temperature", "top_k", "min_p", "seed", "stop", "max_tokens", "user", "bad_words")
    ignored = {n for n, outcome in outcomes.items() if outcome == IGNORED}
    assert all(outcomes[name] == EFFECTIVE for name in some)
    values = {name: every.BOTH[name][0] for name in some} | dict.fromkeys(ignored, "x")
    reply = await send(**values)
    assert reply.status == 200
    assert set(filter(None, reply.headers["x-quire-ignored-fields"].split(", "))) == ignored
    for name in outcomes.keys() - ignored:
        if (sentence := outcomes[name]) != EFFECTIVE:
            reply = await send(**{name: {"any": "thing"}})
            assert (reply.status, reply.error["param"]) == (400, name)
            assert reply.error["message"] == sentence
            for neutral in schema.UNSUPPORTED[name]:
                assert (await send(**{name: neutral})).status == 200, name


def test_a_route_is_here_or_has_a_counterpart_or_a_reason() -> None:
    for route in ROUTES:
        is_present = has_route(route.method, route.path)
        assert is_present == (not route.ours and not route.reason), route
        if route.ours:
            assert has_route("GET" if route.method == "GET" else "POST", route.ours), route
    assert not has_route("GET", "/v1/embeddings")
    assert not has_route("POST", "/v1/no/such")


async def test_routes_answer_as_the_page_says(gateway: Gateway) -> None:
    stranger = AsgiClient(gateway.client.app, "no key")
    for route in ROUTES:
        reply = await stranger.request(route.method, route.path)
        if has_route(route.method, route.path):
            assert is_gateway_path({"path": route.path}), route
            assert reply.status not in (404, 405), (route, reply.body)
        elif is_gateway_path({"path": route.path}):
            assert reply.status == 404, route
            assert reply.error["message"] == path_not_found(route.path).message


def test_the_platform_answers_for_paths_outside_of_the_gateway(client: Client) -> None:
    outside = [route for route in ROUTES if not is_gateway_path({"path": route.path})]
    assert {route.path for route in outside} >= {"/docs", "/update_weights"}
    for route in outside:
        reply = client.generic(route.method, route.path)
        assert reply.status_code == 404, route
        assert reply.json()["error"]["message"] == path_not_found(route.path).message


def test_a_metric_is_here_under_its_kind() -> None:
    live = live_metrics()
    named = {name: kind for kind, names in METRICS.items() for name in names.split()}
    assert {name: live[name] for name in named if name in live} == named
    counted = {f"{n}_total" if family.kind == "counter" else n for n, family in FAMILIES.items()}
    assert counted <= live.keys()
