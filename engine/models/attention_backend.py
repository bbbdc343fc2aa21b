"""Selects a model's attention backend, which replaces the kernels' default attention."""

from __future__ import annotations

import copy
from functools import partial

import torch

from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError
from engine.models.decoder_spec import DecoderSpec
from kernels import KernelSet
from kernels.attention import AttentionRequirements, NoAttentionBackend, get_backend, select_backend

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_KV_NAMES = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "int8": "int8",
    "fp8": "fp8_e4m3",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
}


def attention_requirements(
    spec: DecoderSpec, ops: KernelSet, dtype: torch.dtype, config: EngineConfig
) -> AttentionRequirements:
    """Return what a model with weights of `dtype` requires of attention on the kernels' device."""
    return AttentionRequirements(
        device=ops.device.type,
        vendor="amd" if torch.version.hip else "nvidia",
        capability=ops.compute_capability,
        dtype=NAMES[ops.activation_dtype(dtype)],
        kv_dtype=_KV_NAMES.get(config.kv_cache_dtype, NAMES[dtype]),
        block_size=config.block_size,
        head_size=spec.head_dim,
        latent=0 if spec.latents is None else spec.latents.kv_lora_rank,
        window=any(spec.sliding_windows),
        soft_cap=spec.attention_soft_cap > 0,
        alibi=bool(spec.alibi_slopes),
        distance_bias=spec.relative_bias is not None,
        sinks=spec.sinks,
        sparse=any(spec.sparse_layers),
        bidirectional=spec.bidirectional_span > 0,
    )


_INVARIANT = {"cuda": "TRITON_ATTN", "cpu": "CPU_ATTN"}


def with_attention_backend(
    ops: KernelSet, spec: DecoderSpec, dtype: torch.dtype, config: EngineConfig
) -> KernelSet:
    """Return `ops` itself, or a copy with the attention of the chosen or requested backend.

    It is always a copy if the kernels need a backend for attention, since CUDA graphs replace the
    copy's attention.

    Raises `ConfigError` with all reasons if the backend doesn't support the model.
    """
    if config.batch_invariant:
        _check_sparse(ops, spec)
        return _invariant(ops, config.attention_backend)
    if config.attention_backend is None and ops.has_own_attention:
        return ops
    if config.attention_backend is None and not spec.attention_layers:
        return copy.copy(ops)
    try:
        backend = select_backend(
            attention_requirements(spec, ops, dtype, config), config.attention_backend
        )
    except NoAttentionBackend as error:
        raise ConfigError(str(error), param="attention_backend") from error
    chosen = copy.copy(ops)
    chosen.attention_backend = backend.name
    chosen.why = f"{ops.why}; attention: {backend.name}"
    # Instance attributes override the class's methods. A compiled decoder has its own attention.
    vars(chosen)["paged_attention"] = backend.load()
    load_latents = backend.load_latents
    latents = partial(KernelSet.mla_attention, chosen) if load_latents is None else load_latents()
    vars(chosen)["mla_attention"] = latents
    vars(chosen)["compile_decoder"] = lambda *_: None
    return chosen


def _check_sparse(ops: KernelSet, spec: DecoderSpec) -> None:
    """Raise `ConfigError` for a block-sparse model if the kernels' attention isn't block-sparse."""
    backend = _INVARIANT.get(ops.device.type)
    if any(spec.sparse_layers) and backend and not get_backend(backend).sparse:
        raise ConfigError(
            f"batch_invariant has attention of its own ({backend}), which isn't block-sparse as "
            f"that of {spec.architecture} is.",
            param="batch_invariant",
        )


def _invariant(ops: KernelSet, requested: str | None) -> KernelSet:
    """Return the kernels' own attention, since others add in an order that depends on the batch."""
    backend = _INVARIANT.get(ops.device.type)
    if requested not in (None, backend):
        raise ConfigError(
            f"batch_invariant has attention of its own ({backend}): {requested} can't be used "
            "with it.",
            param="attention_backend",
        )
    if ops.has_own_attention:
        return ops
    chosen = copy.copy(ops)  # CUDA graphs replace its attention
    chosen.attention_backend = backend or ""
    return chosen
