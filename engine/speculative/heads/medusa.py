"""`Medusa`: heads that each predict a different one of the next tokens from one hidden state.

Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from engine.speculative.heads.base import DraftHeads, HeadCheckpoint, apply_linear
from kernels import LinearLayer


@dataclass(frozen=True, slots=True)
class _Head:
    blocks: list[LinearLayer]
    output: LinearLayer


@dataclass(frozen=True, slots=True)
class _Layout:
    """Tensor names of a checkpoint: the original ones, or vLLM's."""

    count: int
    depth: int
    block: str
    output: str
    bias: bool

    @classmethod
    def of(cls, source: HeadCheckpoint) -> _Layout:
        """Return the names that a checkpoint uses."""
        if "medusa_num_heads" in source.config:
            count = source.integer("medusa_num_heads", 1, 64)
            depth = source.integer("medusa_num_layers", 0, 64, default=1)
            return cls(count, depth, "{head}.{block}.linear", f"{{head}}.{depth}.weight", True)
        count = source.integer("num_heads", 1, 64)
        depth = source.integer("num_hidden_layers", 0, 64, default=1)
        prefix = "medusa_heads." if "medusa_heads.lm_heads.0.weight" in source.weights else ""
        shared = source.flag("original_lm_head", default=False)
        head = "0" if shared else "{head}"
        return cls(
            count,
            depth,
            f"{prefix}blocks.{{head}}.layers.{{block}}",
            f"{prefix}lm_heads.{head}.weight",
            source.flag("medusa_fc_bias", default=False),
        )


class Medusa(DraftHeads):
    """Each head: x + silu(W x + b), repeated, then a separate output layer.

    With a `token_map` the heads cover frequent tokens only.
    """

    def __init__(self, source: HeadCheckpoint) -> None:
        source.same("hidden_size", source.hidden_size)
        source.same("vocab_size", source.vocab_size)
        layout = _Layout.of(source)
        self.max_drafts = layout.count
        self._vocab_size = source.vocab_size
        self._tokens = _token_map(source)
        outputs: dict[str, LinearLayer] = {}
        self._heads: list[_Head] = []
        for head in range(layout.count):
            name = layout.output.format(head=head)
            if name not in outputs:
                outputs[name] = self._output(source, name)
            blocks = [_block(source, layout, head, block) for block in range(layout.depth)]
            self._heads.append(_Head(blocks, outputs[name]))
        if self._tokens is not None:
            self._tokens = self._tokens.to(source.ops.device)
        self._feeds = source.feeds
        self._scale = source.positive("logit_scale", 1.0)
        self.nbytes = source.nbytes

    def _output(self, source: HeadCheckpoint, name: str) -> LinearLayer:
        shape = source.vocab_size, source.hidden_size
        if self._tokens is None:
            return source.linear(name, *shape)
        count = len(self._tokens)
        if name in source.weights and source.weights.stored_shape(name)[:1] == (count,):
            return source.linear(name, count, source.hidden_size)
        return source.pack(source.weights.get(name, shape)[self._tokens])

    def start(self, hidden: Tensor) -> Tensor:
        return hidden

    def logits(self, depth: int, state: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """See the base. A Medusa head doesn't depend on the previous drafts."""
        head, x = self._heads[depth], state
        for block in head.blocks:
            x = x + silu(apply_linear(block, x, self._feeds))
        logits = apply_linear(head.output, x, self._feeds) * self._scale
        if self._tokens is None:
            return logits, state
        spread = logits.new_full((len(logits), self._vocab_size), -torch.inf)
        spread[:, self._tokens] = logits
        return spread, state


def _block(source: HeadCheckpoint, layout: _Layout, head: int, block: int) -> LinearLayer:
    name, size = layout.block.format(head=head, block=block), source.hidden_size
    bias = source.vector(f"{name}.bias", size) if layout.bias else None
    return source.linear(f"{name}.weight", size, size, bias)


def _token_map(source: HeadCheckpoint) -> Tensor | None:
    """Return int64 [truncated_vocab_size], the tokens of the heads' columns; None: all."""
    count = source.integer("truncated_vocab_size", 1, source.vocab_size, source.vocab_size)
    if "token_map" not in source.weights:
        if count < source.vocab_size:
            raise source.error("truncated_vocab_size is set, but there is no 'token_map'")
        return None
    if count == source.vocab_size:
        source.weights.mark_used(["token_map"])
        return None
    tokens = source.integers("token_map", count)
    if int(tokens.min()) < 0 or int(tokens.max()) >= source.vocab_size:
        raise source.error(f"'token_map' names tokens outside [0, {source.vocab_size})")
    return tokens
