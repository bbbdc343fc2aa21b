"""A stand-in for ttnn and one model of tt-metal: `transformers` behind its vLLM interface.

The cache of its model holds token ids by block and slot. A step reads back the tokens that the page
table names and has `transformers` compute the logits after them, so a wrong page, slot or length
gives other logits. Shapes and padding are checked as docs/tenstorrent.md has them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

CHIPS = [0, 1]
opened: list[tuple[int, int]] = []
closed: list[Any] = []


class MeshShape(NamedTuple):
    rows: int
    columns: int


def get_device_ids() -> list[int]:
    return CHIPS


def open_mesh_device(shape: MeshShape) -> MeshShape:
    opened.append(shape)
    return shape


def close_mesh_device(mesh: MeshShape) -> None:
    closed.append(mesh)


def check(condition: bool, sentence: str) -> None:
    """Raise ValueError unless the condition holds."""
    if not condition:
        raise ValueError(sentence)


class LlamaForCausalLM:
    """One model; its cache is checked against `transformers`."""

    model_capabilities = {"supports_prefix_caching": False}
    warmed_up = 0
    #: "prefill" and "decode", by step.
    calls: list[str] = []

    def __init__(self, model: Any, max_batch_size: int) -> None:
        self.model, self.max_batch_size = model, max_batch_size

    @classmethod
    def initialize_vllm_model(
        cls,
        hf_config: Any,
        mesh_device: Any,
        max_batch_size: int,
        tt_data_parallel: int,
        optimizations: str | None,
    ) -> LlamaForCausalLM:
        check(tt_data_parallel == 1, "one model")
        check(isinstance(mesh_device, MeshShape), "an open mesh")
        model = AutoModelForCausalLM.from_pretrained(hf_config._name_or_path, dtype=torch.float32)
        return cls(model.eval(), max_batch_size)

    def allocate_kv_cache(
        self, kv_cache_shape: tuple[int, ...], dtype: torch.dtype, num_layers: int
    ) -> list[Tensor]:
        num_blocks, heads, self.block_size, size = kv_cache_shape
        config = self.model.config
        check(heads == config.num_key_value_heads, "KV heads")
        check(size == config.hidden_size // config.num_attention_heads, "head size")
        check(num_layers == config.num_hidden_layers, "layers")
        self.num_blocks = num_blocks
        return [torch.full((num_blocks, self.block_size), -1)]

    def warmup_model_prefill(
        self, kv_cache: list[Tensor], enable_trace: bool, sampling_params: list[Any]
    ) -> None:
        check(enable_trace and sampling_params[-1] is None, "the list ends with host sampling")
        type(self).warmed_up += 1

    def prefill_forward(
        self,
        tokens: Tensor,
        page_table: Tensor,
        kv_cache: list[Tensor],
        prompt_lens: Tensor,
        sampling_params: Any,
        empty_slots: list[int],
        start_pos: list[int] | None = None,
    ) -> Tensor:
        self.calls.append("prefill")
        longest = int(prompt_lens.max())
        check(tokens.shape == (len(prompt_lens), longest), "tokens [batch, longest prompt]")
        pages = -(-longest // self.block_size)
        check(page_table.shape == (len(tokens), pages), "page_table [batch, most blocks]")
        check(len(empty_slots) == len(tokens) <= self.max_batch_size, "a slot for each prompt")
        starts = [0] * len(tokens) if start_pos is None else start_pos
        logits = []
        for index, length in enumerate(prompt_lens.tolist()):
            check(not tokens[index, length:].any(), "tokens are zero-padded")
            used = -(-length // self.block_size)
            check(not page_table[index, used:].any(), "page tables are zero-padded")
            check(bool((page_table[index, :used] > 0).all()), "block 0 pads")
            for position in range(starts[index], length):
                self._write(kv_cache, page_table[index], position, int(tokens[index, position]))
            logits.append(self._logits(kv_cache, page_table[index], length))
        return torch.stack(logits)[:, None]

    def decode_forward(
        self,
        tokens: Tensor,
        start_pos: Tensor,
        page_table: Tensor,
        kv_cache: list[Tensor],
        enable_trace: bool,
        read_from_device: bool,
        sampling_params: Any,
    ) -> Tensor:
        self.calls.append("decode")
        size = self.max_batch_size
        check(enable_trace and read_from_device, "traced, and read from the device")
        check(tokens.shape == (size, 1), "tokens [max_batch_size, 1]")
        check(start_pos.shape == (size,), "start_pos [max_batch_size]")
        check(page_table.shape == (size, self.num_blocks), "page_table [max_batch, max blocks]")
        logits = []
        for row in range(size):
            position = int(start_pos[row])
            self._write(kv_cache, page_table[row], position, int(tokens[row, 0]))
            used = position // self.block_size + 1
            check(not page_table[row, used:].any(), "page tables are zero-padded")
            if not page_table[row, 0]:
                check(not tokens[row] and not position, "rows are zero-padded")
                logits.append(torch.zeros(self.model.config.vocab_size))
            else:
                logits.append(self._logits(kv_cache, page_table[row], position + 1))
        return torch.stack(logits)[:, None]

    def _write(self, kv_cache: list[Tensor], pages: Tensor, position: int, token: int) -> None:
        kv_cache[0][pages[position // self.block_size], position % self.block_size] = token

    def _logits(self, kv_cache: list[Tensor], pages: Tensor, length: int) -> Tensor:
        tokens = kv_cache[0][pages.long()].flatten()[:length]
        check(bool((tokens >= 0).all()), "a token that was never written")
        with torch.inference_mode():
            logits: Tensor = self.model(tokens[None], use_cache=False).logits[0, -1]
        return logits


class CachingLlama(LlamaForCausalLM):
    model_capabilities = {"supports_prefix_caching": True}


class Unfinished:
    """Lacks most methods."""

    prefill_forward = LlamaForCausalLM.prefill_forward
