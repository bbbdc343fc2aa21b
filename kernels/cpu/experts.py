"""`CompiledExperts` of the CPU: tables of addresses that C++ walks through."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.cpu.library import Library, check
from kernels.cpu.linear import CpuLinear
from kernels.cpu.threads import num_threads
from kernels.interface import ActivationSpec, CompiledExperts, ExpertLayers, LinearLayer

ACTIVATIONS = {
    "silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4, "swiglu_clamped": 5,
}  # fmt: skip
L, N, F, P = ctypes.c_int64, ctypes.c_int32, ctypes.c_float, ctypes.c_void_p


class Activation(ctypes.Structure):
    """`Activation` of ops.h."""

    _fields_ = [("kind", N), ("limit", F), ("alpha", F)]


class _Experts(ctypes.Structure):
    """`Experts` of experts.h."""

    _fields_ = [
        *((name, L) for name in ("hidden", "count", "top_k", "inner", "shared_inner")),
        *((name, P) for name in ("router", "gate_up", "down", "shared_gate_up", "shared_down")),
        ("shared_gate", P),
        *((name, N) for name in ("softmax_first", "renormalize")),
        ("act", Activation),
    ]


def activation_of(spec: ActivationSpec) -> Activation:
    """Raises ValueError for a name that isn't known."""
    if spec.name not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ValueError(f"activation must be one of {known}; got {spec.name!r}")
    return Activation(ACTIVATIONS[spec.name], spec.limit, spec.alpha)


def handle_of(name: str, layer: LinearLayer | None, sizes: tuple[int, int]) -> int | None:
    """A packed layer's address. Raises ValueError unless it's of these kernels and sizes."""
    if layer is None:
        return None
    if not isinstance(layer, CpuLinear):
        raise ValueError(f"{name} is no layer of these kernels")
    if (layer.in_features, layer.out_features) != sizes:
        raise ValueError(f"{name} must map {sizes[0]} to {sizes[1]}")
    return layer.handle


class CpuExperts(CompiledExperts):
    """See `KernelSet.compile_experts`. Keeps the layers that it points to."""

    def __init__(self, library: Library, experts: ExpertLayers) -> None:
        count, router = len(experts.gate_up), experts.router
        if not 1 <= experts.top_k <= count or len(experts.down) != count:
            raise ValueError(
                f"{experts.top_k} of {count} experts, {len(experts.down)} of them down"
            )
        hidden, inner = router.in_features, experts.down[0].in_features
        shared = experts.shared_down.in_features if experts.shared_down else 0
        if (experts.shared_down is None) != (experts.shared_gate_up is None):
            raise ValueError("a shared expert has two layers")

        def table(
            name: str, layers: Sequence[LinearLayer], sizes: tuple[int, int]
        ) -> ctypes.Array[ctypes.c_void_p]:
            return (ctypes.c_void_p * count)(*(handle_of(name, one, sizes) for one in layers))

        ups = table("gate_up", experts.gate_up, (hidden, 2 * inner))
        downs = table("down", experts.down, (inner, hidden))
        self.hidden_size = hidden
        self._table = _Experts(
            hidden, count, experts.top_k, inner, shared,
            handle_of("router", router, (hidden, count)), ctypes.addressof(ups),
            ctypes.addressof(downs),
            handle_of("shared_gate_up", experts.shared_gate_up, (hidden, 2 * shared)),
            handle_of("shared_down", experts.shared_down, (shared, hidden)),
            handle_of("shared_gate", experts.shared_gate, (hidden, 1)),
            experts.softmax_first, experts.renormalize, activation_of(experts.activation),
        )  # fmt: skip
        self.address = ctypes.addressof(self._table)
        self._kept = (experts, ups, downs)
        self._run = library.run_experts
        always = (router, experts.shared_gate_up, experts.shared_down, experts.shared_gate)
        read = sum(layer.nbytes for layer in (*experts.gate_up, *experts.down))
        self.nbytes = read * experts.top_k // count + sum(one.nbytes for one in always if one)

    def __call__(self, x: Tensor) -> Tensor:
        """See `CompiledExperts.__call__`."""
        if x.dim() != 2 or x.shape[1] != self.hidden_size or x.dtype != torch.float32:
            raise ValueError(f"x {list(x.shape)} {x.dtype} must be float32 [T, {self.hidden_size}]")
        x = x.contiguous()
        out = torch.empty_like(x)
        status = self._run(self.address, out.data_ptr(), x.data_ptr(), len(x), num_threads())
        if status:
            check(status)
        return out
