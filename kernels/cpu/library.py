"""Loads the library, whose structs and functions `abi` declares.

Most functions return 0 or a status; `check` raises its ValueError, MemoryError or `RankError`.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels.attention_args import BlockSparse
from kernels.cpu.abi import FUNCTIONS, Norm, Sparse
from kernels.errors import CpuKernelsUnavailable, RankError
from kernels.layers import NormWeights
from kernels.tensors import check_vector, describe

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
CACHE_DTYPES = {**DTYPES, torch.int8: 3, torch.float8_e4m3fn: 4, torch.float8_e5m2: 5}
NORMS = {"rms": 0, "layer": 1, "none": 2}
VECTOR_BITS = {"avx512": 512, "avx512_core": 512, "avx2_vnni": 256, "avx2": 256, "scalar": 128}

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
INTERRUPTED = 11
RANK_ERRORS = {9: "another rank has failed", 10: "a rank did not arrive in time"}


class Library:
    """The loaded library, with each C function as an attribute without its `quire_` prefix."""

    def __init__(self, isa: str | None = None) -> None:
        """Raises `CpuKernelsUnavailable` if nothing can be built or loaded.

        Raises `KernelsUnavailable` for an ISA that this CPU can't run.
        """
        from kernels.cpu.build import best_library  # late: `python -m` executes that module again

        variant, path, origin = best_library(isa)
        try:
            handle = ctypes.CDLL(str(path))
        except OSError as error:
            raise CpuKernelsUnavailable(f"{path} can't be loaded: {error}") from error
        self.isa, self.path = variant.isa, path
        self.description = f"{'+'.join(variant.features) or 'no vector flags'}, {origin}, {path}"
        for name, (result, arguments) in FUNCTIONS.items():
            function = getattr(handle, name)
            function.argtypes, function.restype = arguments, result
            setattr(self, name.removeprefix("quire_"), function)
        if self.vector_bits() != VECTOR_BITS[variant.isa]:
            raise CpuKernelsUnavailable(f"{path} was not compiled for {variant.isa}")

    def __getattr__(self, name: str) -> ctypes._NamedFuncPointer:
        raise AttributeError(f"the library has no function quire_{name}")


def check(status: int) -> None:
    """Raise the error of a nonzero status: ValueError, MemoryError or `RankError`."""
    if status in RANK_ERRORS:
        raise RankError(RANK_ERRORS[status])
    if status == NO_MEMORY:
        raise MemoryError("the CPU kernels' scratch memory could not be allocated")
    raise ValueError(ERRORS[status])


def address(x: Tensor | None) -> int | None:
    """Return the address of a tensor's first value."""
    return None if x is None else x.data_ptr()


def vector_address(name: str, x: Tensor | None, size: int) -> int | None:
    """Return the address of a float32 vector of `size` values."""
    if x is None:
        return None
    check_dense(name, x, (size,), torch.float32)
    return x.data_ptr()


def describe_norm(name: str, norm: NormWeights, width: int) -> Norm:
    """Return the struct of a norm over `width` values. Raises ValueError for inconsistent ones."""
    if norm.kind not in NORMS or (norm.kind == "rms" and norm.weight is None):
        raise ValueError(f"{name} must be one of {', '.join(NORMS)}, and RMS has a weight")
    weight = vector_address(name, norm.weight, width)
    bias = vector_address(name, norm.bias, width)
    return Norm(weight=weight, bias=bias, kind=NORMS[norm.kind])


def check_scales(
    cache: Tensor, key_scales: Tensor | None, value_scales: Tensor | None
) -> tuple[int | None, int | None]:
    """Return the addresses of a cache's scales: int8 has one per token and head, fp8 one per head
    or none.
    """
    if (key_scales is None) != (value_scales is None):
        raise ValueError("key_scales and value_scales of a cache come in pairs")
    if key_scales is None or value_scales is None:
        if cache.dtype == torch.int8:
            raise ValueError(f"an int8 cache needs float32 scales {list(cache.shape[:3])}")
        return None, None
    if cache.dtype.itemsize > 1:
        raise ValueError(f"a cache of {cache.dtype} has no scales")
    shape = cache.shape[:3] if cache.dtype == torch.int8 else cache.shape[1:2]
    check_dense("key_scales", key_scales, tuple(shape), torch.float32)
    check_dense("value_scales", value_scales, tuple(shape), torch.float32)
    return key_scales.data_ptr(), value_scales.data_ptr()


def check_norms(q_norm: Tensor | None, k_norm: Tensor | None, size: int) -> int:
    """Return the code of the norm weights' dtype."""
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
    """Return the address of a float32 value for each query head."""
    if x is None:
        return None
    check_vector(name, x, heads, torch.float32)
    return x.data_ptr()


def check_dense(name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise ValueError unless x is contiguous with this shape and dtype."""
    if x.shape != shape or x.dtype != dtype or not x.is_contiguous():
        required = f"{list(shape)} {str(dtype).removeprefix('torch.')}"
        raise ValueError(f"{name} {list(x.shape)} {x.dtype} must be contiguous {required}")


def sparse_args(sparse: BlockSparse | None) -> Sparse:
    """Return the struct of a sparse pattern; None attends to all tokens.

    Raises ValueError for sizes out of range.
    """
    if sparse is None:
        return Sparse(0, 0, 0, 0)
    sizes = (sparse.block, sparse.local, sparse.stride)
    if min(sizes) < 1 or sparse.head_step < 0 or max(*sizes, sparse.head_step) >= 1 << 31:
        raise ValueError(f"{sparse} must have sizes from 1 to 2^31")
    return Sparse(sparse.block, sparse.local, sparse.stride, sparse.head_step)
