"""Verification at load that paged attention computes what the model computes by itself.

A few tokens pass through the model's own attention, and then, batched and in chunks, through paged
attention. Anything about the model that the bridge doesn't support (a bias added to scores, tokens
that interact outside of attention, positions that it counts itself) shows as a difference. Then the
model is refused instead of giving wrong answers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.kv_cache.kv_cache_config import single_group_config
from engine.models.forward_context import AttentionMetadata
from engine.transformers_backend.attention import (
    PAGED,
    AttentionCall,
    PagedLayer,
    use_attention,
    window_of,
)
from engine.transformers_backend.model import TransformersModel

#: Arguments of attention modules that change the scores and that the paged kernels don't support.
_UNKNOWN = ("position_bias", "indices", "block_indices", "sinks", "bias", "attn_bias")

#: Mask numbers, so far apart that a mask with something added isn't taken for another one.
_FIRST, _APART = 2, 7


class UnsupportedAttention(Exception):
    """A model can't use paged attention. The message is the reason, without a subject."""


class AttentionProbe:
    """A handler that records each attention call; its results are meaningless.

    Args:
        max_model_len: the context length for which windows are determined.
    """

    def __init__(self, max_model_len: int) -> None:
        self.layers: list[PagedLayer] = []
        self._max_model_len = max_model_len
        self._masks: list[int | str] = []

    def attend(self, call: AttentionCall) -> Tensor:
        """See `AttentionHandler`."""
        query, key, value = call.query, call.key, call.value
        for name in _UNKNOWN:
            if call.options.get(name) is not None:
                raise UnsupportedAttention(
                    f"its attention needs {name!r}, which the paged kernels lack"
                )
        if not key.shape[2] == query.shape[2] == value.shape[2]:
            raise UnsupportedAttention("its attention looks at other tokens than those of the text")
        self.layers.append(
            PagedLayer(
                num_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                head_dim=query.shape[3],
                value_dim=value.shape[3],
                window=self._window(call),
            )
        )
        return (
            value.repeat_interleave(query.shape[1] // value.shape[1], 1)
            .transpose(1, 2)
            .contiguous()
        )

    def mask(self, **arguments: Any) -> Tensor:
        """Return a mask that identifies itself: it is filled with its number.

        No number is 1, the value of a mask that was converted to bool.
        """
        try:
            window: int | str = window_of(arguments["mask_function"], self._max_model_len)
        except ValueError as error:
            window = str(error)
        self._masks.append(window)
        shape = (1, 1, arguments["q_length"], arguments["kv_length"])
        return torch.full(shape, float(_FIRST + _APART * (len(self._masks) - 1)))

    def _window(self, call: AttentionCall) -> int:
        mask = call.mask
        if mask is None:
            causal = call.options.get("is_causal")
            if not (getattr(call.module, "is_causal", True) if causal is None else causal):
                raise UnsupportedAttention("its attention isn't causal")
            return 0
        index, rest = divmod(float(mask.flatten()[0]) - _FIRST, _APART)
        is_registered = not rest and 0 <= index < len(self._masks)
        if not is_registered or not bool((mask == mask.flatten()[0]).all()):
            raise UnsupportedAttention("it makes attention masks of its own")
        window = self._masks[int(index)]
        if isinstance(window, str):
            raise UnsupportedAttention(window)
        return window


_BLOCK = 4
#: Relative to the spread of the logits. Other orders of float32 sums differ by 1e-5.
_TOLERANCE = 2e-3
_LENGTHS = (9, 6, 1)


@torch.inference_mode()
def verify_parity(bridged: TransformersModel) -> None:
    """Raise `UnsupportedAttention` unless both ways give the same logits. The caches are freed."""
    vocab = bridged.spec.vocab_size
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(0, vocab, (length,), generator=generator) for length in _LENGTHS]
    ours = [_reference_logits(bridged, text) for text in texts]
    if not all(bool(torch.isfinite(logits).all()) for logits in ours):
        raise UnsupportedAttention("its logits aren't finite")
    bridged.allocate_kv(16, _BLOCK, torch.float32, single_group_config(len(bridged.layers)))
    try:
        batched = _run_step(bridged, texts, [0] * len(texts), [len(text) for text in texts])
        _compare(ours, batched, "several texts in one batch")
        if bridged.stateful:
            # Some models can continue from a state only token by token.
            bridged.continues = is_close(ours, _chunked_logits(bridged, texts, 4))
        size = 1 if bridged.stateful else 4
        _compare(ours, _chunked_logits(bridged, texts, size), "texts in several steps")
    finally:
        bridged.release_kv()


def _reference_logits(bridged: TransformersModel, text: Tensor) -> Tensor:
    """Return logits of the model's own attention, float32 [tokens, vocab]."""
    use_attention(bridged.model, "eager")
    try:
        arguments: dict[str, Any] = {"input_ids": text[None], "use_cache": False}
        logits: Tensor = bridged.model(**arguments).logits[0].float()
        return logits
    finally:
        use_attention(bridged.model, PAGED)


def _chunked_logits(bridged: TransformersModel, texts: list[Tensor], size: int) -> list[Tensor]:
    """Return logits when each step takes `size` tokens of every text that has arrived.

    Each text arrives a step after the previous one, so that their positions differ.
    """
    chunks: list[list[Tensor]] = [[] for _ in texts]
    done = [0] * len(texts)
    for step in range(sum(map(len, texts))):
        remaining = [i for i, text in enumerate(texts) if i <= step and done[i] < len(text)]
        if not remaining:
            break
        counts = [min(size, len(texts[i]) - done[i]) for i in remaining]
        logits = _run_step(
            bridged, [texts[i] for i in remaining], [done[i] for i in remaining], counts, remaining
        )
        for index, count, part in zip(remaining, counts, logits, strict=True):
            chunks[index].append(part)
            done[index] += count
    return [torch.cat(parts) for parts in chunks]


def _run_step(
    bridged: TransformersModel,
    texts: list[Tensor],
    starts: list[int],
    counts: list[int],
    rows: list[int] | None = None,
) -> list[Tensor]:
    """Return logits of `count` tokens of each text from `start` on; text r is in row r."""
    owners = rows or list(range(len(texts)))
    # Text r has blocks 4 r to 4 r + 3.
    tables = torch.tensor([[4 * owner + block for block in range(4)] for owner in owners])
    spans = list(zip(starts, counts, strict=True))
    positions = torch.cat([torch.arange(start, start + count) for start, count in spans])
    owner_of = torch.repeat_interleave(torch.arange(len(texts)), torch.tensor(counts))
    slots = tables[owner_of, positions // _BLOCK] * _BLOCK + positions % _BLOCK
    loc = torch.zeros(len(texts) + 1, dtype=torch.int32)
    loc[1:] = torch.tensor(counts).cumsum(0)
    context = AttentionMetadata(
        positions=positions,
        slot_mapping=slots,
        block_tables=tables.to(torch.int32),
        seq_lens=torch.tensor([start + count for start, count in spans], dtype=torch.int32),
        query_start_loc=loc,
        sequence_rows=torch.tensor(owners),
    )
    ids = torch.cat([text[s : s + n] for text, (s, n) in zip(texts, spans, strict=True)])
    return list(bridged.forward(ids, context).split(counts))


def _compare(ours: list[Tensor], served: list[Tensor], what: str) -> None:
    if not is_close(ours, served):
        raise UnsupportedAttention(
            f"{what} get other logits than by its own attention, so tokens meet in other ways than "
            "by attention to what is cached, or positions aren't those that it is given"
        )


def is_close(ours: list[Tensor], served: list[Tensor]) -> bool:
    """Whether logits differ by no more than other orders of float32 sums do."""
    spread = max(float(logits.std()) for logits in ours)
    return all(
        float((mine - theirs).abs().max()) <= _TOLERANCE * max(spread, 1e-6)
        for mine, theirs in zip(served, ours, strict=True)
    )
