"""A stand-in for ttnn and models of tt-metal: `transformers` behind their vLLM interface.

The cache of a model holds token ids by group, block and slot. A step reads back the tokens that the
page table names and has `transformers` compute the logits after them, so a wrong page, slot, length
or group gives other logits. Shapes, padding and order are checked as docs/tenstorrent.md has them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

CHIPS = [0, 1]
#: Calls of ttnn itself, by name, with what they were given.
calls: list[tuple[str, Any]] = []


class MeshShape(NamedTuple):
    rows: int
    columns: int


FabricConfig = Enum("FabricConfig", ["DISABLED", "FABRIC_1D", "FABRIC_1D_RING"])
FabricReliabilityMode = Enum("FabricReliabilityMode", ["STRICT_INIT", "RELAXED_INIT"])
DispatchCoreAxis = Enum("DispatchCoreAxis", ["ROW", "COL"])


@dataclass
class DispatchCoreConfig:
    axis: DispatchCoreAxis


def get_device_ids() -> list[int]:
    return CHIPS


def set_fabric_config(*arguments: Any) -> None:
    calls.append(("set_fabric_config", tuple(argument.name for argument in arguments)))


def open_mesh_device(shape: MeshShape, **sizes: Any) -> MeshShape:
    calls.append(("open_mesh_device", (tuple(shape), sizes)))
    return shape


def close_mesh_device(mesh: MeshShape) -> None:
    calls.append(("close_mesh_device", tuple(mesh)))


def check(condition: bool, sentence: str) -> None:
    """Raise ValueError unless the condition holds."""
    if not condition:
        raise ValueError(sentence)


@dataclass
class DeviceTensor:
    """What is on the device: not to be used before it is read."""

    value: Tensor


@dataclass
class HostTensor:
    """What was read from the device, in ttnn's layout: not to be used before it is processed."""

    value: Tensor


class CausalLM:
    """A model; its cache is checked against `transformers`."""

    model_capabilities: dict[str, Any] = {"supports_prefix_caching": False}
    loader: Any = AutoModelForCausalLM
    #: What ran, over all instances: "prefill" and "decode", each with how it was sampled.
    ran: list[tuple[str, str]] = []
    #: What it was called with, by method, the last time.
    last: dict[str, Any] = {}

    def __init__(self, model: Any, max_batch_size: int, num_groups: int) -> None:
        self.model = model
        self.max_batch_size, self.num_groups = max_batch_size, num_groups
        self.group_size = max_batch_size // num_groups
        self.generator = torch.Generator().manual_seed(0)

    @classmethod
    def initialize_vllm_model(
        cls,
        hf_config: Any,
        mesh_device: Any,
        max_batch_size: int,
        tt_data_parallel: int,
        optimizations: str | None,
    ) -> CausalLM:
        cls.last["initialize_vllm_model"] = dict(locals())
        check(isinstance(mesh_device, MeshShape), "an open mesh")
        check(max_batch_size % tt_data_parallel == 0, "groups of one size")
        model = cls.loader.from_pretrained(hf_config._name_or_path, dtype=torch.float32)
        return cls(model.eval(), max_batch_size, tt_data_parallel)

    def allocate_kv_cache(
        self, kv_cache_shape: tuple[int, ...], dtype: torch.dtype, num_layers: int
    ) -> list[Tensor]:
        self.num_blocks, heads, self.block_size, size = kv_cache_shape
        config = self.model.config.get_text_config()
        default = config.hidden_size // config.num_attention_heads
        check(heads == getattr(config, "num_key_value_heads", config.num_attention_heads), "heads")
        check(size == (getattr(config, "head_dim", None) or default), "head size")
        check(num_layers == config.num_hidden_layers, "layers")
        check(dtype in (torch.float32, torch.bfloat16), "dtype")
        return [torch.full((self.num_blocks, self.block_size), -1) for _ in range(self.num_groups)]

    def warmup_model_prefill(
        self, kv_cache: list[Tensor], enable_trace: bool, sampling_params: list[Any]
    ) -> None:
        check(sampling_params[-1] is None, "the list ends with host sampling")
        self.last["warmup_model_prefill"] = (enable_trace, sampling_params)

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
        rows = self._prefill(tokens, page_table, kv_cache, prompt_lens, empty_slots, start_pos)
        logits = torch.stack(
            [self._logits(kv_cache[group], pages, length) for group, pages, length in rows]
        )
        return self._output("prefill", logits, sampling_params)

    def _prefill(
        self,
        tokens: Tensor,
        page_table: Tensor,
        kv_cache: list[Tensor],
        prompt_lens: Tensor,
        empty_slots: list[int],
        start_pos: list[int] | None,
    ) -> list[tuple[int, Tensor, int]]:
        """Fill the cache; by row its group, pages and length."""
        batch, longest = len(prompt_lens), int(prompt_lens.max())
        check(prompt_lens.shape == (batch,), "prompt_lens [batch]")
        check(tokens.shape == (batch, longest), "tokens [batch, longest prompt]")
        num_pages = -(-longest // self.block_size)
        check(page_table.shape == (batch, num_pages), "page_table [batch, most blocks]")
        check(len(set(empty_slots)) == batch <= self.max_batch_size, "a slot for each prompt")
        check(all(0 <= slot < self.max_batch_size for slot in empty_slots), "slots of the batch")
        if start_pos is not None:
            check(self.model_capabilities["supports_prefix_caching"], "no cached prefix")
        starts = [0] * batch if start_pos is None else start_pos
        rows = []
        for index, length in enumerate(prompt_lens.tolist()):
            check(not tokens[index, length:].any(), "tokens are zero-padded")
            used = -(-length // self.block_size)
            check(not page_table[index, used:].any(), "page tables are zero-padded")
            check(bool((page_table[index, :used] > 0).all()), "block 0 pads")
            group = empty_slots[index] // self.group_size
            for position in range(starts[index], length):
                token = int(tokens[index, position])
                self._write(kv_cache[group], page_table[index], position, token)
            rows.append((group, page_table[index], length))
        return rows

    def decode_forward(
        self,
        tokens: Tensor,
        start_pos: Tensor,
        page_table: Tensor,
        kv_cache: list[Tensor],
        enable_trace: bool,
        read_from_device: bool,
        sampling_params: Any,
    ) -> Any:
        self.last["decode_forward"] = (enable_trace, read_from_device)
        size = self.max_batch_size
        check(tokens.shape == (size, 1), "tokens [max_batch_size, 1]")
        check(start_pos.shape == (size,), "start_pos [max_batch_size]")
        check(page_table.shape == (size, self.num_blocks), "page_table [max_batch, max blocks]")
        is_padding = [not bool(page_table[row, 0]) for row in range(size)]
        for first in range(0, size, self.group_size):
            group = is_padding[first : first + self.group_size]
            check(group == sorted(group), "padding comes after the rows of a group")
        logits = []
        for row in range(size):
            position, cache = int(start_pos[row]), kv_cache[row // self.group_size]
            self._write(cache, page_table[row], position, int(tokens[row, 0]))
            used = position // self.block_size + 1
            check(not page_table[row, used:].any(), "page tables are zero-padded")
            if is_padding[row]:
                check(not tokens[row] and not position, "rows are zero-padded")
                logits.append(torch.zeros(self.model.config.get_text_config().vocab_size))
            else:
                logits.append(self._logits(cache, page_table[row], position + 1))
        output = self._output("decode", torch.stack(logits), sampling_params)
        return output if read_from_device else DeviceTensor(output)

    def _output(self, step: str, logits: Tensor, sampling_params: Any) -> Tensor:
        """[rows, 1, vocabulary], or [rows] tokens where the device samples."""
        self.ran.append((step, "host" if sampling_params is None else "device"))
        if sampling_params is None:
            return logits[:, None]
        lists = [sampling_params.temperature, sampling_params.top_k, sampling_params.top_p]
        check({len(values) for values in lists} == {len(logits)}, "parameters by row")
        return torch.tensor([self._sample(*row) for row in zip(logits, *lists, strict=True)])

    def _sample(self, logits: Tensor, temperature: float, top_k: int, top_p: float) -> int:
        if temperature == 0:
            return int(logits.argmax())
        probabilities, order = (logits / temperature).softmax(-1).sort(descending=True)
        is_likely = probabilities.cumsum(-1) - probabilities < top_p
        is_likely[top_k or len(is_likely) :] = False
        weights = probabilities * is_likely
        return int(order[torch.multinomial(weights, 1, generator=self.generator)])

    def _write(self, cache: Tensor, pages: Tensor, position: int, token: int) -> None:
        cache[pages[position // self.block_size], position % self.block_size] = token

    def _logits(self, cache: Tensor, pages: Tensor, length: int, **media: Any) -> Tensor:
        tokens = cache[pages.long()].flatten()[:length]
        check(bool((tokens >= 0).all()), "a token that was never written")
        with torch.inference_mode():
            logits: Tensor = self.model(tokens[None], use_cache=False, **media).logits[0, -1]
        return logits


class CachingCausalLM(CausalLM):
    model_capabilities = {"supports_prefix_caching": True}


class AsyncCausalLM(CausalLM):
    """A decode returns before the device is done."""

    def read_decode_output(self, tt_out: DeviceTensor, async_read: bool) -> HostTensor:
        check(isinstance(tt_out, DeviceTensor) and not async_read, "a decode's output, once")
        self.last["read_decode_output"] = True
        return HostTensor(tt_out.value)

    def process_decode_output_host(self, tt_out: HostTensor, is_tokens: bool) -> Tensor:
        check(isinstance(tt_out, HostTensor), "what was read")
        check(is_tokens == (tt_out.value.dim() == 1), "tokens or logits")
        self.last["process_decode_output_host"] = is_tokens
        return tt_out.value


class HostSampledCausalLM(CausalLM):
    model_capabilities = {"supports_prefix_caching": False, "supports_sample_on_device": False}


class VisionLM(CausalLM):
    """Its prompts may hold pictures, whose values a decode needs again: the cache has tokens."""

    loader = AutoModelForImageTextToText
    #: Pages of a prompt with pictures -> what `transformers` takes of them.
    pictures: dict[int, dict[str, Tensor]] = {}

    def prefill_forward(  # type: ignore[override]
        self,
        tokens: Tensor,
        page_table: Tensor,
        kv_cache: list[Tensor],
        prompt_lens: Tensor,
        sampling_params: Any,
        empty_slots: list[int],
        pixel_values: list[list[Tensor] | None] | None = None,
    ) -> Tensor:
        rows = self._prefill(tokens, page_table, kv_cache, prompt_lens, empty_slots, None)
        images = [None] * len(rows) if pixel_values is None else pixel_values
        check(len(images) == len(rows), "pictures by row")
        logits = []
        for (group, pages, length), row in zip(rows, images, strict=True):
            self.pictures[int(pages[0])] = {} if row is None else {"pixel_values": torch.cat(row)}
            logits.append(self._logits(kv_cache[group], pages, length))
        return self._output("prefill", torch.stack(logits), sampling_params)

    def _logits(self, cache: Tensor, pages: Tensor, length: int, **media: Any) -> Tensor:
        return super()._logits(cache, pages, length, **self.pictures[int(pages[0])])


def picture_tokens(image: Any) -> list[int]:
    """Tokens that `CrossModel` takes for a picture."""
    return [3 + int(value) % 300 for value in np.asarray(image)[:2, :3].flatten()][
        :MAX_CROSS_TOKENS
    ]


MAX_CROSS_TOKENS = 10


class CrossModel(CausalLM):
    """An encoder-decoder: what it knows of a picture is in the cross pages, as tokens before the
    text, and how many are valid in the masks that its prefill returns.
    """

    @property
    def max_cross_attn_tokens(self) -> int:
        return MAX_CROSS_TOKENS

    @property
    def num_cross_pages(self) -> int:
        return -(-MAX_CROSS_TOKENS // self.block_size)

    @classmethod
    def initialize_vllm_model(  # type: ignore[override]
        cls, hf_config: Any, mesh_device: Any, max_batch_size: int, tt_data_parallel: int,
        optimizations: str | None,
    ) -> CausalLM:  # fmt: skip
        folder = f"{hf_config._name_or_path}/text"
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return cls(model.eval(), max_batch_size, tt_data_parallel)

    def prefill_forward(  # type: ignore[override]
        self, tokens: Tensor, images: list[Any], page_table: Tensor, kv_cache: list[Tensor],
        prompt_lens: Tensor, cross_page_table: Tensor, sampling_params: Any, empty_slots: list[int],
    ) -> Any:  # fmt: skip
        check(cross_page_table.shape == (len(tokens), self.num_cross_pages), "cross pages by row")
        rows = self._prefill(tokens, page_table, kv_cache, prompt_lens, empty_slots, None)
        logits, masks = [], []
        for index, (group, pages, length) in enumerate(rows):
            values = picture_tokens(images[index][0]) if images[index] else []
            for position, token in enumerate(values):
                self._write(kv_cache[group], cross_page_table[index], position, token)
            masks.append(len(values))
            logits.append(
                self._cross_logits(
                    kv_cache[group], pages, length, cross_page_table[index], len(values)
                )
            )
        check(not {*cross_page_table.flatten().tolist()} & {*page_table.flatten().tolist()}, "own")
        return self._output("prefill", torch.stack(logits), sampling_params), masks, masks

    def decode_forward(  # type: ignore[override]
        self, tokens: Tensor, start_pos: Tensor, cross_attention_masks: list[Any],
        full_text_row_masked_out_mask: list[Any], page_table: Tensor, kv_cache: list[Tensor],
        cross_page_table: Tensor, enable_trace: bool, read_from_device: bool, sampling_params: Any,
    ) -> Any:  # fmt: skip
        size = self.max_batch_size
        check(cross_page_table.shape == (size, self.num_cross_pages), "[max_batch, cross blocks]")
        check(cross_attention_masks == full_text_row_masked_out_mask, "both of the same prefill")
        logits = []
        for row in range(size):
            if not page_table[row, 0]:
                check(not cross_page_table[row].any(), "cross page tables are zero-padded")
                check(cross_attention_masks[row] is None, "padding has no masks")
                logits.append(torch.zeros(self.model.config.vocab_size))
                continue
            cache, position = kv_cache[row // self.group_size], int(start_pos[row])
            self._write(cache, page_table[row], position, int(tokens[row, 0]))
            count = cross_attention_masks[row]
            pages = cross_page_table[row]
            logits.append(self._cross_logits(cache, page_table[row], position + 1, pages, count))
        return self._output("decode", torch.stack(logits), sampling_params)

    def _cross_logits(
        self, cache: Tensor, pages: Tensor, length: int, cross_pages: Tensor, count: int
    ) -> Tensor:
        tokens = cache[pages.long()].flatten()[:length]
        tokens = torch.cat([cache[cross_pages.long()].flatten()[:count], tokens])
        check(bool((tokens >= 0).all()), "a token that was never written")
        with torch.inference_mode():
            logits: Tensor = self.model(tokens[None], use_cache=False).logits[0, -1]
        return logits


class LimitedCausalLM(CausalLM):
    """Its `initialize_vllm_model` takes the context's length, as those of tt-metal do."""

    @classmethod
    def initialize_vllm_model(  # type: ignore[override]
        cls,
        hf_config: Any,
        mesh_device: Any,
        max_batch_size: int,
        max_seq_len: int,
        tt_data_parallel: int = 1,
        optimizations: str = "performance",
    ) -> CausalLM:
        model = super().initialize_vllm_model(
            hf_config, mesh_device, max_batch_size, tt_data_parallel, optimizations
        )
        cls.last["max_seq_len"] = max_seq_len
        return model


class Unfinished:
    """Lacks most methods."""

    prefill_forward = CausalLM.prefill_forward


def register() -> None:
    """Register models for the conformance checks: an entry point in quire.general_plugins."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from engine import ModelRegistry
    from engine.devices.conformance.models import FAMILIES

    for family in FAMILIES.values():
        name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family["model_type"]]
        ModelRegistry.register_model(f"TT{name}", CachingCausalLM)
