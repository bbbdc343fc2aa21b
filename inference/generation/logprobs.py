"""Log probabilities in the formats of the chat and completions endpoints."""

from __future__ import annotations

import codecs
from collections.abc import Container, Iterable, Sequence
from typing import Any

from engine.contract.messages import TokenLogprobs
from engine.text.tokenizer import Tokenizer
from inference.generation.output import OutputState, TokenEntry, TokenFormatter


def best_outputs(outputs: Sequence[OutputState], n: int) -> list[int]:
    """Return indices of the outputs to return: all in order, or the best by log probability."""
    if len(outputs) <= n:
        return list(range(len(outputs)))
    return sorted(range(len(outputs)), key=lambda index: -outputs[index].sum_logprobs)[:n]


#: Replaces -inf, which JSON lacks, as in vLLM and OpenAI's API.
LOWEST = -9999.0


def to_json_float(value: float) -> float:
    """Clamp a log probability to a value that JSON can represent."""
    return max(value, LOWEST)


def chat_logprobs(
    entries: Sequence[TokenEntry], names: TokenFormatter, top: int, *, asked: bool = False
) -> list[dict[str, Any]]:
    """Return `choices[].logprobs.content`: one object per token with `top` alternatives.

    `asked`: the alternatives are tokens that the client named; the chosen one is among them.
    """
    return [
        {
            **_token(entry.logprobs, 0, names),
            "top_logprobs": [
                _token(entry.logprobs, index, names)
                for index in (_requested_indices if asked else _top_indices)(entry.logprobs, top)
            ],
        }
        for entry in entries
    ]


def text_entries(entries: Sequence[TokenEntry]) -> list[TokenEntry]:
    """Return the entries of tokens in the text; clients concatenate them to obtain the text."""
    return [entry for entry in entries if entry.in_text]


def _top_indices(scores: TokenLogprobs, top: int) -> Iterable[int]:
    return range(1, min(top + 1, len(scores.token_ids)))


def _requested_indices(scores: TokenLogprobs, top: int) -> Iterable[int]:
    chosen = scores.token_ids[0]
    return [k for k, token in enumerate(scores.token_ids) if k == 0 or token != chosen]


def _token(scores: TokenLogprobs, index: int, names: TokenFormatter) -> dict[str, Any]:
    token_id = scores.token_ids[index]
    return {
        "token": names(token_id),
        "logprob": to_json_float(scores.logprobs[index]),
        "bytes": list(names.tokenizer.token_bytes(token_id)),
    }


def completion_logprobs(
    entries: Sequence[TokenEntry], names: TokenFormatter, start: int
) -> dict[str, Any]:
    """Return `choices[].logprobs` of a completion: parallel lists.

    `start`: number of characters of the choice's text before this output (the echo).
    """
    return {
        "text_offset": [start + entry.offset for entry in entries],
        "token_logprobs": [to_json_float(entry.logprobs.logprobs[0]) for entry in entries],
        "tokens": [names(entry.token_id) for entry in entries],
        "top_logprobs": [_top(entry.logprobs, names) for entry in entries],
    }


def echo_logprobs(
    prompt: Sequence[int],
    scores: Sequence[TokenLogprobs | None],
    names: TokenFormatter,
    *,
    shows_special: bool,
) -> dict[str, Any]:
    """Return `choices[].logprobs` of an echoed prompt; its first token has no log probability."""
    hidden = frozenset() if shows_special else names.tokenizer.special_token_ids
    return {
        "text_offset": _offsets(prompt, names.tokenizer, hidden),
        "token_logprobs": [None if s is None else to_json_float(s.logprobs[0]) for s in scores],
        "tokens": [names(token_id) for token_id in prompt],
        "top_logprobs": [None if s is None else _top(s, names) for s in scores],
    }


def _offsets(token_ids: Sequence[int], tokenizer: Tokenizer, hidden: Container[int]) -> list[int]:
    """Return the number of complete characters before each token; hidden tokens have none."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets, length = [], 0
    for token_id in token_ids:
        offsets.append(length)
        if token_id not in hidden:
            length += len(decoder.decode(tokenizer.token_bytes(token_id)))
    return offsets


def _top(scores: TokenLogprobs, names: TokenFormatter) -> dict[str, float]:
    """Return the token and its best alternatives by text; of equal texts the likelier remains."""
    result: dict[str, float] = {}
    for token_id, logprob in zip(scores.token_ids, scores.logprobs, strict=True):
        name = names(token_id)
        result[name] = max(result.get(name, LOWEST), to_json_float(logprob))
    return result


def concat_logprobs(
    first: dict[str, Any] | None, second: dict[str, Any] | None
) -> dict[str, Any] | None:
    """Concatenate the logprobs of two completions."""
    if first is None or second is None:
        return first or second
    return {name: first[name] + second[name] for name in first}


def prompt_logprobs(
    scores: Sequence[TokenLogprobs | None] | None, names: TokenFormatter
) -> list[dict[str, Any] | None] | None:
    """Return vLLM's `prompt_logprobs`: the alternatives of each prompt token by id."""
    if scores is None:
        return None
    return [
        None
        if position is None
        else {
            str(token_id): {
                "logprob": to_json_float(logprob),
                "rank": rank,
                "decoded_token": names.tokenizer.token_text(token_id),
            }
            for token_id, logprob, rank in zip(
                position.token_ids, position.logprobs, position.ranks, strict=True
            )
        }
        for position in scores
    ]
