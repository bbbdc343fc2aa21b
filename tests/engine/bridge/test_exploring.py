"""How windows are read from masks, and what an exploration refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.transformers_backend.attention import AttentionCall, window_of
from engine.transformers_backend.verify import AttentionProbe, UnsupportedAttention


def causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return key <= query


def sliding(window: int) -> Any:
    return lambda b, h, q, k: (k <= q) & (k > q - window)


def chunked(size: int) -> Any:
    return lambda b, h, q, k: (k <= q) & (k // size == q // size)


@pytest.mark.parametrize("length", [1, 2, 3, 64, 1000])
def test_a_causal_mask_is_no_window(length: int) -> None:
    assert window_of(causal, length) == 0


@pytest.mark.parametrize(("window", "length", "count"), [(1, 9, 1), (7, 64, 7), (64, 64, 0)])
def test_a_window_is_found_unless_it_covers_the_context(
    window: int, length: int, count: int
) -> None:
    assert window_of(sliding(window), length) == count


@pytest.mark.parametrize(
    "mask",
    [
        chunked(8),
        lambda b, h, q, k: k >= 0,
        lambda b, h, q, k: k < q,
        lambda b, h, q, k: (k <= q) & ((k > q - 8) | (k < 4)),
    ],
    ids=["chunks", "bidirectional", "strictly before", "window and first tokens"],
)
def test_other_masks_are_refused(mask: Any) -> None:
    with pytest.raises(ValueError, match="neither causal nor a sliding window"):
        window_of(mask, 64)


def test_chunks_of_the_whole_context_are_causal() -> None:
    assert window_of(chunked(64), 64) == 0


def explored(change: Any, **options: Any) -> int:
    """The window that a layer is found to have when it's given the second mask, changed."""
    run = AttentionProbe(64)
    for mask in (causal, sliding(8)):
        input_mask = run.mask(mask_function=mask, q_length=4, kv_length=4)
    heads = torch.zeros(1, 2, 4, 8)
    run.attend(AttentionCall(nn.Module(), heads, heads, heads, change(input_mask), options))
    return run.layers[0].window


def test_a_layer_has_the_window_of_the_mask_that_it_was_given() -> None:
    assert explored(lambda mask: mask) == 8
    assert explored(lambda mask: mask[:, :, :, :3]) == 8


@pytest.mark.parametrize(
    "change",
    [
        lambda mask: mask.bool(),
        lambda mask: mask + 1,
        lambda mask: mask * 0.5,
        lambda mask: torch.zeros_like(mask),
        lambda mask: mask + torch.eye(4),
    ],
    ids=["bool", "other number", "fraction", "its own", "biased"],
)
def test_a_mask_that_isnt_as_it_was_given_is_refused(change: Any) -> None:
    with pytest.raises(UnsupportedAttention, match="masks of its own"):
        explored(change)


@pytest.mark.parametrize("name", ["position_bias", "indices", "sinks"])
def test_options_that_the_kernels_lack_are_named(name: str) -> None:
    with pytest.raises(UnsupportedAttention, match=name):
        explored(lambda mask: mask, **{name: torch.zeros(1)})


def test_attention_to_other_tokens_is_refused() -> None:
    run, query = AttentionProbe(64), torch.zeros(1, 2, 4, 8)
    other = torch.zeros(1, 2, 9, 8)
    with pytest.raises(UnsupportedAttention, match="other tokens"):
        run.attend(AttentionCall(nn.Module(), query, other, other, None, {}))


def test_without_a_mask_attention_must_be_causal() -> None:
    run, heads = AttentionProbe(64), torch.zeros(1, 2, 4, 8)
    with pytest.raises(UnsupportedAttention, match="isn't causal"):
        run.attend(AttentionCall(nn.Module(), heads, heads, heads, None, {"is_causal": False}))
    run.attend(AttentionCall(nn.Module(), heads, heads, heads, None, {}))
    assert run.layers[0].window == 0
