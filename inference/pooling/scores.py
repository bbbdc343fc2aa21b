"""Scores of pairs of texts: by a cross-encoder, or by the likeness of two embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.http.response import HttpResponseBase

from engine.contract.similarity import Vectors, similarity
from inference.pooling.inputs import item_entries, pair_entries, shortened_texts
from inference.pooling.run import Call
from inference.pooling.schemas import ScoringBody

Pairs = list[tuple[int, int]]
Make = Callable[[list[float]], dict[str, Any]]


async def answer_with_scores(
    call: Call,
    body: ScoringBody,
    first: list[str],
    second: list[str],
    pairs: Pairs,
    make: Make,
) -> HttpResponseBase:
    """Score `pairs` of places in `first` and `second`; answer with `make(scores)`.

    Raises as `Call.answer` and `item_entries` do.
    """
    first = await shortened_texts(call.served, first, body.max_tokens_per_query or 0)
    second = await shortened_texts(call.served, second, body.max_tokens_per_doc or 0)
    if "embed" in call.served.info.tasks:
        return await _by_likeness(call, first, second, pairs, make)
    texts = [(first[a], second[b]) for a, b in pairs]
    params = call.body.params("score")
    entries = await call.entries(pair_entries(call.served, texts, params, call.body.side))
    return await call.answer(entries, lambda results: make([float(row[0]) for row in results]))


async def _by_likeness(
    call: Call, first: list[str], second: list[str], pairs: Pairs, make: Make
) -> HttpResponseBase:
    """Each text is embedded once."""
    params = call.body.params("embed")
    made = item_entries(call.served, [*first, *second], params, side=call.body.side)
    entries = await call.entries(made)
    facts = call.served.info.pooling
    kind = facts.similarity if facts is not None else "cosine"

    def scored(vectors: list[Vectors]) -> dict[str, Any]:
        half = len(first)
        return make([similarity(kind, vectors[a], vectors[half + b]) for a, b in pairs])

    return await call.answer(entries, scored)
