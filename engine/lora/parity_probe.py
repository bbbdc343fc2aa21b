"""The parity probe: compares a model with an unmerged adapter to one with the adapter merged."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import kernels
from engine.checkpoints.load_format import open_weights
from engine.contract.engine_config import EngineConfig
from engine.lora.adapter import LoRAAdapter, LoRALayer
from engine.lora.merge import (
    EncoderWeights,
    FloatWeights,
    added_bias,
    merged_embedding,
    merged_head,
    merged_spec,
    merged_weight,
)
from engine.lora.packing import pack_adapter
from engine.lora.target_modules import TargetModules
from engine.models.decoder import NativeDecoder
from engine.models.decoder_spec import DecoderSpec
from engine.models.encoder_decoder import EncoderDecoder
from engine.models.encoders.encoder import NativeEncoder
from engine.models.encoders.encoder_spec import EncoderSpec
from engine.models.forward_context import AttentionMetadata, StateStep
from engine.models.lora import AdapterWeights, StepAdapters
from kernels import LinearLayer

if TYPE_CHECKING:
    from engine.transformers_backend.model import TransformersModel


_PROMPTS, LENGTH, BLOCK = 4, 24, 16
#: Maximum difference relative to the largest logit: many times what summation order can cause.
_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """The probe's result.

    Attributes:
        prompts: number of prompts.
        max_difference: largest difference of two logits, relative to the largest logit.
        passed: whether rounding explains that difference.
    """

    prompts: int
    max_difference: float
    passed: bool


def probe_adapter(
    adapter: LoRAAdapter, folder: Path, spec: DecoderSpec | EncoderSpec, config: EngineConfig
) -> ProbeResult:
    """Compare logits of random prompts in float32; for an encoder its hidden states.

    The model is loaded twice, one copy after the other. A classifier's head isn't compared, since
    the adapter replaces it completely.

    Raises `ModelLoadError` for a model that can't be read.
    """
    if isinstance(spec, EncoderSpec):
        apart = _states(folder, spec, config, None, adapter)
        merged = _states(folder, spec, config, adapter, None)
    else:
        apart = _logits(folder, spec, config, None, adapter)
        merged = _logits(folder, spec, config, adapter, None)
    return compare_logits(apart, merged)


def compare_logits(apart: list[Tensor], merged: list[Tensor]) -> ProbeResult:
    """Compare logits with the adapter unmerged and merged."""
    largest = max(float(logits.abs().max()) for logits in merged)
    difference = max(
        # Tokens without a row of the output layer have no logits.
        float((one - other).masked_fill(one.isneginf(), 0).abs().max())
        for one, other in zip(apart, merged, strict=True)
    )
    relative = difference / max(largest, 1e-6)
    return ProbeResult(
        prompts=len(merged), max_difference=relative, passed=bool(relative <= _TOLERANCE)
    )


def _logits(
    folder: Path,
    spec: DecoderSpec,
    config: EngineConfig,
    merged: LoRAAdapter | None,
    apart: LoRAAdapter | None,
) -> list[Tensor]:
    """Return float32 [tokens, vocabulary] of each prompt, with the adapter merged or unmerged."""
    ops = kernels.get("cpu", use_compiled=config.cpu_kernels)
    weights = FloatWeights(open_weights(folder, config, ops.device), spec, merged)
    model_spec = spec if merged is None else merged_spec(spec, merged)
    kind = NativeDecoder if spec.cross is None else EncoderDecoder
    model = kind(model_spec, ops, torch.float32, LENGTH)
    model.load(weights, lambda done, total: None)
    num_blocks = -(-LENGTH // BLOCK)
    model.allocate_kv(2 * num_blocks, BLOCK, torch.float32)
    packed = None if apart is None else pack_adapter(apart, model)
    if isinstance(model, EncoderDecoder):
        # Adapters don't change the encoder, so that any states will do. Large ones would have large
        # scores, whose rounding changes the logits.
        generator = torch.Generator().manual_seed(1)
        states = 0.1 * torch.randn(LENGTH, model_spec.hidden_size, generator=generator)
        with torch.inference_mode():
            model.write_states(states, list(range(num_blocks, 2 * num_blocks)), packed)
    vocab = 0 if apart is None else apart.vocab_size
    return [_run(model, prompt, packed) for prompt in prompts(vocab or model_spec.vocab_size)]


def _states(
    folder: Path,
    spec: EncoderSpec,
    config: EngineConfig,
    merged: LoRAAdapter | None,
    apart: LoRAAdapter | None,
) -> list[Tensor]:
    """Return float32 [tokens, hidden] of each prompt, with the adapter merged or unmerged."""
    ops = kernels.get("cpu", use_compiled=config.cpu_kernels)
    model = NativeEncoder(spec, ops, torch.float32, LENGTH)
    weights = EncoderWeights(open_weights(folder, config, ops.device), spec, merged)
    model.load(weights, lambda done, total: None)
    packed = None if apart is None else pack_adapter(apart, model)
    return [_encode(model, prompt, packed) for prompt in prompts(spec.vocab_size)]


def _encode(model: NativeEncoder, prompt: Tensor, adapter: AdapterWeights | None) -> Tensor:
    return model.forward(prompt, step_of(len(prompt), adapter))


def prompts(vocab: int) -> list[Tensor]:
    """Return random prompts, always the same ones."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(vocab, (LENGTH,), generator=generator) for _ in range(_PROMPTS)]


@torch.inference_mode()
def _run(model: NativeDecoder, prompt: Tensor, adapter: AdapterWeights | None) -> Tensor:
    context = step_of(len(prompt), adapter)
    if isinstance(model, EncoderDecoder):
        context.other_groups = (_cross_step(context),)
    hidden, adapters = model.forward(prompt, context), context.adapters
    return model.logits(hidden, adapters.lm_head_adapters(None))


def _cross_step(context: AttentionMetadata) -> AttentionMetadata:
    """Return the metadata of tokens that attend to all states in the next blocks, as if each were a
    sequence of its own.
    """
    [blocks], count = context.block_tables, len(context.positions)
    return replace(
        context,
        block_tables=(blocks + len(blocks)).repeat(count, 1),
        seq_lens=torch.full((count,), LENGTH, dtype=torch.int32),
        query_start_loc=torch.arange(count + 1, dtype=torch.int32),
    )


def step_of(count: int, adapter: AdapterWeights | None) -> AttentionMetadata:
    """Return the metadata of a step with one prompt whose tokens all use the adapter."""
    every = torch.arange(count)
    adapters = StepAdapters([] if adapter is None else [(adapter, every)])
    return AttentionMetadata(
        positions=every,
        slot_mapping=every,
        block_tables=torch.arange(-(-count // BLOCK)).int().unsqueeze(0),
        seq_lens=torch.tensor([count]).int(),
        query_start_loc=torch.tensor([0, count]).int(),
        sequence_rows=torch.tensor([0]),
        states=StateStep(torch.tensor([0]), [], torch.empty((0, 2), dtype=torch.int64)),
        adapters=adapters,
    )


def probe_bridged(
    adapter: LoRAAdapter, model: TransformersModel, modules: TargetModules
) -> ProbeResult:
    """Compare logits of random prompts in float32. The model's weights are merged afterwards.

    Raises `InvalidRequest` for changes that can't be merged.
    """
    model.allocate_kv(-(-LENGTH // BLOCK), BLOCK, torch.float32)
    apart = _transformers_logits(model, pack_adapter(adapter, model, None, None, modules))
    _merge(model, adapter, modules)
    return compare_logits(apart, _transformers_logits(model, None))


@torch.inference_mode()
def _transformers_logits(model: TransformersModel, adapter: AdapterWeights | None) -> list[Tensor]:
    """Return float32 [tokens, vocabulary] of each prompt."""
    logits = []
    for prompt in prompts(model.spec.vocab_size):
        logits.append(model.forward(prompt, step_of(len(prompt), adapter)).clone())
        model.keep(set())
    return logits


@torch.no_grad()
def _merge(model: TransformersModel, adapter: LoRAAdapter, modules: TargetModules) -> None:
    """Replace the model's weights by merged ones."""
    for name, delta in adapter.modules.items():
        module, layer = _module(model, name), model.adapted.linears[name.replace(".", "/")]
        _put(model, module, merged_weight(_full_weight(layer), delta), _bias(module, delta))
    head = modules.head
    if head and (adapter.head is not None or "head" in adapter.tables or "head" in adapter.tokens):
        module = _module(model, head)
        weight = merged_head(_full_weight(model.lm_head), adapter)
        _put(model, module, weight, _bias(module, adapter.head))
    if model.adapted.embedding is not None and (
        adapter.embedding is not None or "embedding" in adapter.tables
    ):
        table: Any = model.adapted.embedding[1]
        table._weight, table._layer = merged_embedding(table.weight.float() + 0, adapter), None


def _module(model: TransformersModel, name: str) -> Any:
    return model.model.get_submodule(name)


def _full_weight(layer: LinearLayer) -> Tensor:
    """Return a complete weight, float32 [outputs, inputs]."""
    return layer.rows(torch.arange(layer.out_features)).float()


def _bias(module: Any, delta: LoRALayer | None) -> Tensor | None:
    """Return a module's weight with an adapter merged into it."""
    bias: Tensor | None = None if module.bias is None else module.bias.float()
    if delta is None or (delta.bias is None and delta.b_bias is None):
        return bias
    return added_bias(torch.zeros(module.out_features) if bias is None else bias, delta)


def _put(model: TransformersModel, module: Any, weight: Tensor, bias: Tensor | None) -> None:
    if hasattr(module, "layer"):
        module.layer = model.ops.PackedLinear(weight.contiguous(), bias)
    else:  # a Conv1D, whose weight is transposed
        module.weight.data = weight.T.contiguous()
        if bias is not None:
            module.bias.data = bias
