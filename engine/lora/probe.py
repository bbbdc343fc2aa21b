"""The parity probe: an adapter beside its model says what the two say merged."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import kernels
from engine.contract.config import EngineConfig
from engine.lora.adapter import Adapter
from engine.lora.merge import EncoderWeights, FloatWeights, merged_spec
from engine.lora.pack import pack_adapter
from engine.models.adapters import AdapterWeights, StepAdapters
from engine.models.context import AttentionContext
from engine.models.decoder import NativeDecoder
from engine.models.encoders.encoder import NativeEncoder
from engine.models.encoders.spec import EncoderSpec
from engine.models.source import open_weights
from engine.models.spec import DecoderSpec

_PROMPTS, LENGTH, BLOCK = 4, 24, 16
#: Of the largest logit: what sums in another order may differ by, many times over.
_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What came of it.

    Attributes:
        prompts: how many were tried.
        max_difference: the largest between any two logits, in parts of the largest logit.
        passed: whether that is what rounding explains.
    """

    prompts: int
    max_difference: float
    passed: bool


def probe_adapter(
    adapter: Adapter, folder: Path, spec: DecoderSpec | EncoderSpec, config: EngineConfig
) -> Probe:
    """Compare logits of random prompts, in float32; of an encoder its hidden states.

    The model is held twice, one after the other. A classifier's head isn't compared: the adapter
    brings it whole.

    Raises `ModelLoadError` for a model that can't be read.
    """
    if isinstance(spec, EncoderSpec):
        apart = _states(folder, spec, config, None, adapter)
        merged = _states(folder, spec, config, adapter, None)
    else:
        apart = _logits(folder, spec, config, None, adapter)
        merged = _logits(folder, spec, config, adapter, None)
    return compared(apart, merged)


def compared(apart: list[Tensor], merged: list[Tensor]) -> Probe:
    """What came of logits with the adapter apart and merged."""
    largest = max(float(logits.abs().max()) for logits in merged)
    difference = max(
        # Tokens without a row of the output layer have no logits.
        float((one - other).masked_fill(one.isneginf(), 0).abs().max())
        for one, other in zip(apart, merged, strict=True)
    )
    relative = difference / max(largest, 1e-6)
    return Probe(prompts=len(merged), max_difference=relative, passed=bool(relative <= _TOLERANCE))


def _logits(
    folder: Path,
    spec: DecoderSpec,
    config: EngineConfig,
    merged: Adapter | None,
    apart: Adapter | None,
) -> list[Tensor]:
    """Float32 [tokens, vocabulary] of each prompt, with the adapter merged, or apart."""
    ops = kernels.get("cpu", use_compiled=config.cpu_kernels)
    weights = FloatWeights(open_weights(folder, config, ops.device), spec, merged)
    own = spec if merged is None else merged_spec(spec, merged)
    model = NativeDecoder(own, ops, torch.float32, LENGTH)
    model.load(weights, lambda done, total: None)
    model.allocate_kv(-(-LENGTH // BLOCK), BLOCK, torch.float32)
    packed = None if apart is None else pack_adapter(apart, model)
    vocab = 0 if apart is None else apart.vocab_size
    return [_run(model, prompt, packed) for prompt in prompts(vocab or own.vocab_size)]


def _states(
    folder: Path,
    spec: EncoderSpec,
    config: EngineConfig,
    merged: Adapter | None,
    apart: Adapter | None,
) -> list[Tensor]:
    """Float32 [tokens, hidden] of each prompt, with the adapter merged, or apart."""
    ops = kernels.get("cpu", use_compiled=config.cpu_kernels)
    model = NativeEncoder(spec, ops, torch.float32, LENGTH)
    weights = EncoderWeights(open_weights(folder, config, ops.device), spec, merged)
    model.load(weights, lambda done, total: None)
    packed = None if apart is None else pack_adapter(apart, model)
    return [_encode(model, prompt, packed) for prompt in prompts(spec.vocab_size)]


def _encode(model: NativeEncoder, prompt: Tensor, adapter: AdapterWeights | None) -> Tensor:
    return model.forward(prompt, step_of(len(prompt), adapter))


def prompts(vocab: int) -> list[Tensor]:
    """Random ones, always the same."""
    made = torch.Generator().manual_seed(1)
    return [torch.randint(vocab, (LENGTH,), generator=made) for _ in range(_PROMPTS)]


@torch.inference_mode()
def _run(model: NativeDecoder, prompt: Tensor, adapter: AdapterWeights | None) -> Tensor:
    context = step_of(len(prompt), adapter)
    hidden, adapters = model.forward(prompt, context), context.adapters
    return model.logits(hidden, adapters.heads(None))


def step_of(count: int, adapter: AdapterWeights | None) -> AttentionContext:
    """A step of one prompt, all of whose tokens go through the adapter."""
    every = torch.arange(count)
    adapters = StepAdapters([] if adapter is None else [(adapter, every)])
    return AttentionContext(
        positions=every,
        slot_mapping=every,
        block_tables=torch.arange(-(-count // BLOCK)).int().unsqueeze(0),
        seq_lens=torch.tensor([count]).int(),
        query_start_loc=torch.tensor([0, count]).int(),
        sequence_rows=torch.tensor([0]),
        adapters=adapters,
    )
