"""Loads the library and states its C functions' types.

Every function returns 0 or a status; `check` turns a status into ValueError or MemoryError.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from kernels.cpu.abi import check_structs
from kernels.errors import CpuKernelsUnavailable
from kernels.tensors import check_vector, describe

P, N, L, F = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
CACHE_DTYPES = {**DTYPES, torch.int8: 3}
VECTOR_BITS = {"avx512": 512, "avx512_core": 512, "avx2_vnni": 256, "avx2": 256, "scalar": 128}

SIGNATURES: dict[str, list[Any]] = {
    "quire_nothing": [P, P, L, L, F, N],
    "quire_rms_norm": [P, P, P, L, L, F, N, N, N],
    "quire_add_rms_norm": [P, P, P, P, L, L, F, N, N, N],
    "quire_gate_and_mul": [P, P, L, L, N, N, N],
    "quire_rope_and_cache": [P, N],
    "quire_paged_attention": [P, N],
    "quire_linear": [P, P, P, L, L, N, N],
    "quire_linear_rows": [P, P, P, L, N],
    "quire_linear_heads": [P, L, P, L, L, P, L, L, L, N, N],
    "quire_pack_rows": [P, L, L, P, L, N, N],
    "quire_pack_quantized_rows": [P, L, L, P, L, N, N],
    "quire_pack_integer_rows": [P, L, L, P, P, P, N],
    "quire_pack_float8_rows": [P, L, L, P, P, N],
    "quire_read_memory": [P, L, N],
    "quire_multiply": [L, N],
    "quire_argmax": [P, P, L, L, N],
    "quire_sample": [P, P, L, L, P, P, P, P, P, N],
    "quire_top_logprobs": [P, P, P, P, P, L, L, P, L, N],
    "quire_run_experts": [P, P, P, L, P, L, N],
    "quire_decoder_run": [P, P, P, L, P, P, L, P, P, L, P, L, P, L, P, L, P, N],
    "quire_step_run": [P, P, P, L, L, P, P, P, L, N],
    "quire_add_lora": [P, L, P, L, L, P, L, N],
    "quire_pack_lora_inputs": [P, P, L, L, N],
    "quire_pack_lora_outputs": [P, P, L, L, N, N],
    "quire_fill_lora": [P, P, P, L, P, L, N],
    "quire_causal_conv": [P, N],
    "quire_linear_scan": [P, N],
}  # fmt: skip
"""Functions that return a status."""

MAKERS: dict[str, list[Any]] = {
    "quire_decoder_new": [P, P, L, P],
    "quire_step_new": [P, P],
    "quire_pack_new": [N, L, L, L, P, N, P, P],
}
"""Functions that return a handle; null when memory runs out."""

OTHERS: dict[str, tuple[list[Any], Any]] = {
    "quire_free_packed": ([P], None),
    "quire_decoder_free": ([P], None),
    "quire_step_free": ([P], None),
    "quire_packed_bytes": ([P], L),
    "quire_bind_threads": ([P, N], N),
    "quire_map_pages": ([P, L], None),
    "quire_has_bf16": ([], N),
    "quire_all_numbers": ([P, L, N], N),
    "quire_allocate_lora": ([L], P),
    "quire_free_lora": ([P], None),
}
"""Other functions."""

ERRORS = {
    1: "the dtypes don't go together",
    2: "a position lies outside of cos_sin",
    3: "a slot lies outside of the KV cache",
    4: "block_tables names a block outside of the KV cache",
    5: "query_start_loc, seq_lens and block_tables contradict each other",
    7: "a requested row doesn't exist",
    8: "row slices of a weight must be whole panels of its format",
}
NO_MEMORY = 6


class Library:
    """The loaded library: each C function as an attribute without its `quire_` prefix."""

    def __init__(self, isa: str | None = None) -> None:
        """Raises `CpuKernelsUnavailable` where nothing can be built or loaded.

        `KernelsUnavailable` for an ISA that this CPU can't run; `StructMismatch` for a library that
        Python's structs don't fit.
        """
        from kernels.cpu.build import best_library  # late: `python -m` runs that module anew

        variant, path, origin = best_library(isa)
        try:
            handle = ctypes.CDLL(str(path))
        except OSError as error:
            raise CpuKernelsUnavailable(f"{path} can't be loaded: {error}") from error
        self.isa, self.path = variant.isa, path
        self.vector_bits = VECTOR_BITS[variant.isa]
        self.description = f"{'+'.join(variant.features) or 'no vector flags'}, {origin}, {path}"
        self._bind(handle, "quire_structs", [], ctypes.c_char_p)
        check_structs(self.structs().decode())
        for name, types in SIGNATURES.items():
            self._bind(handle, name, types, ctypes.c_int)
        for name, types in MAKERS.items():
            self._bind(handle, name, types, P)
        for name, (types, result) in OTHERS.items():
            self._bind(handle, name, types, result)
        if handle.quire_vector_bits() != VECTOR_BITS[variant.isa]:
            raise CpuKernelsUnavailable(f"{path} was not compiled for {variant.isa}")

    def _bind(self, handle: ctypes.CDLL, name: str, types: list[Any], result: Any) -> None:
        function = getattr(handle, name)
        function.argtypes, function.restype = types, result
        setattr(self, name.removeprefix("quire_"), function)

    def __getattr__(self, name: str) -> ctypes._NamedFuncPointer:
        raise AttributeError(f"the library has no function quire_{name}")


def check(status: int) -> None:
    """Raise the error of a status that isn't 0."""
    if status == NO_MEMORY:
        raise MemoryError("the CPU kernels' scratch memory could not be allocated")
    raise ValueError(ERRORS[status])


def address(x: Tensor | None) -> int | None:
    """Address of a tensor's first value."""
    return None if x is None else x.data_ptr()


def check_scales(
    cache: Tensor, key_scales: Tensor | None, value_scales: Tensor | None
) -> tuple[int | None, int | None]:
    """Addresses of an int8 cache's scales; None for other caches."""
    if cache.dtype != torch.int8:
        return None, None
    for scales in (key_scales, value_scales):
        if scales is None or scales.shape != cache.shape[:3] or scales.dtype != torch.float32:
            raise ValueError(f"an int8 cache needs float32 scales {list(cache.shape[:3])}")
        if not scales.is_contiguous():
            raise ValueError("the scales of a cache must be contiguous")
    return key_scales.data_ptr(), value_scales.data_ptr()  # type: ignore[union-attr]


def check_norms(q_norm: Tensor | None, k_norm: Tensor | None, size: int) -> int:
    """The code of the norm weights' dtype."""
    weights = [weight for weight in (q_norm, k_norm) if weight is not None]
    for weight in weights:
        if (
            weight.shape != (size,)
            or weight.dtype != weights[0].dtype
            or not weight.is_contiguous()
        ):
            raise ValueError(f"norm weight {describe(weight)} doesn't fit heads of {size}")
    return DTYPES[weights[0].dtype] if weights else 0


def per_head(name: str, x: Tensor | None, heads: int) -> int | None:
    """The address of a float32 value for each query head."""
    if x is None:
        return None
    check_vector(name, x, heads, torch.float32)
    return x.data_ptr()


def check_dense(name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise ValueError unless x has this shape and dtype, without gaps."""
    if x.shape != shape or x.dtype != dtype or not x.is_contiguous():
        required = f"{list(shape)} {str(dtype).removeprefix('torch.')}"
        raise ValueError(f"{name} {list(x.shape)} {x.dtype} must be contiguous {required}")
