"""A request's own figures, for its answer: vLLM's `metrics`."""

from __future__ import annotations

from engine.contract.protocol import FlightRecord
from inference.engine_client.flight import Flight
from inference.settings import gateway_settings


def answer_metrics(flights: list[Flight]) -> dict[str, dict[str, float]]:
    """`{"metrics": ...}` of a request that has ended; {} unless the operator wants answers to have
    them (`PER_REQUEST_METRICS`).
    """
    return {"metrics": figures(flights)} if gateway_settings().per_request_metrics else {}


def figures(flights: list[Flight]) -> dict[str, float]:
    """Milliseconds by vLLM's names, of all prompts and outputs together. What the engine hasn't
    told (of outputs that a stop string ended here), or what one token can't have, is left out.

    The first token's time begins when the prompt is first computed: `queue_time_ms` is before it.
    """
    records = [record for flight in flights for record in flight.records.values()]
    if not records:
        return {}
    begun = min(record.queue_time for record in records)
    first = min(map(_first, records)) - begun
    last = max(_first(record) + record.decode_time for record in records) - begun
    tokens = [len(output) for flight in flights for output in flight.tokens]
    found = {
        "queue_time_ms": 1000 * begun,
        "time_to_first_token_ms": 1000 * first,
        "generation_time_ms": 1000 * (last - first),
    }
    if (longest := max(tokens)) > 1:
        found["mean_itl_ms"] = 1000 * (last - first) / (longest - 1)
    if last > 0:
        found["tokens_per_second"] = sum(tokens) / last
    return {name: round(value, 3) for name, value in found.items()}


def _first(record: FlightRecord) -> float:
    """Seconds from a request's arrival to an output's first token."""
    return record.queue_time + record.prefill_time
