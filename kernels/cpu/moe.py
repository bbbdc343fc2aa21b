"""`MixtureOfExperts` of the CPU: tables of addresses that C++ reads."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.abi import Activation, Experts
from kernels.cpu.library import DTYPES, Library, address, check
from kernels.cpu.linear import CpuLinear
from kernels.cpu.lora import CpuLoraTable, LoraSegments
from kernels.cpu.memory import num_threads
from kernels.cpu.ranks import CpuRankGroup
from kernels.interface import ActivationSpec, ExpertLayers, MixtureOfExperts
from kernels.layers import AbsentLinear, LinearLayer, PerHeadLinear
from kernels.lora import ExpertUse
from kernels.moe import bytes_read, check_experts
from kernels.tensors import describe


class CpuHeadLinears(PerHeadLinear):
    """The linear layers of all heads in one call; owns the layers to which its table points.

    Attributes:
        address: address of the table.
    """

    def __init__(self, library: Library, layers: Sequence[LinearLayer]) -> None:
        """Raises ValueError for layers of other kernels or of different shapes."""
        super().__init__(layers)
        handles = [layer.handle for layer in layers if isinstance(layer, CpuLinear)]
        if len(handles) != len(layers):
            raise ValueError("the heads' layers are none of these kernels")
        self._table = (ctypes.c_void_p * len(handles))(*handles)
        self.address, self._run = ctypes.addressof(self._table), library.linear_heads
        self._sizes = layers[0].in_features, layers[0].out_features

    def __call__(self, x: Tensor, out: Tensor) -> None:
        rows, heads, (k, n) = len(x), len(self.layers), self._sizes
        if x.shape != (rows, heads, k) or out.shape != (rows, heads, n) or x.dtype != out.dtype:
            raise ValueError(
                f"x {describe(x)} and out {describe(out)} must be [T, {heads}, {k}] and "
                f"[T, {heads}, {n}] of one dtype"
            )
        if x.dtype not in DTYPES:
            raise ValueError(f"x must be float32, bfloat16 or float16, not {x.dtype}")
        if (x.stride(2) != 1 and k > 1) or (out.stride(2) != 1 and n > 1):
            raise ValueError("a head's values must lie side by side")
        status = self._run(
            self.address, heads, out.data_ptr(), out.stride(0), out.stride(1), x.data_ptr(),
            x.stride(0), x.stride(1), rows, DTYPES[x.dtype], num_threads(),
        )  # fmt: skip
        if status:
            check(status)


KINDS = {
    "silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4, "swiglu_clamped": 5,
}  # fmt: skip
"""`Gate` of gate.h for each of `kernels.layers.ACTIVATIONS`."""


def activation_of(spec: ActivationSpec) -> Activation:
    """Return the C++ struct. Raises ValueError for an unknown name."""
    if spec.name not in KINDS:
        supported = ", ".join(KINDS)
        raise ValueError(f"activation must be one of {supported}; got {spec.name!r}")
    return Activation(KINDS[spec.name], spec.limit, spec.alpha)


def handle_of(name: str, layer: LinearLayer | None, sizes: tuple[int, int]) -> int | None:
    """Return a packed layer's address. Raises ValueError for other kernels or other sizes."""
    if layer is None or isinstance(layer, AbsentLinear):
        return None
    if not isinstance(layer, CpuLinear):
        raise ValueError(f"{name} is no layer of these kernels")
    if (layer.in_features, layer.out_features) != sizes:
        raise ValueError(f"{name} must map {sizes[0]} to {sizes[1]}")
    return layer.handle


def handle_of_ranks(experts: ExpertLayers) -> int | None:
    """Return the address of the group that shares experts. Raises ValueError for other kernels'
    groups.
    """
    ranks = experts.ranks
    if ranks is None:
        return None
    if not isinstance(ranks, CpuRankGroup) or len(experts.owners) != len(experts.gate_up):
        raise ValueError("experts are shared by ranks of these kernels, and each has owners")
    return ranks.handle


def sizes_of(experts: ExpertLayers) -> dict[str, tuple[int, int]]:
    """Return (inputs, outputs) of the linear layers that adapters may change, by slot."""
    return {
        slot: (layer.in_features, layer.out_features) for slot, layer in experts.linears().items()
    }


class CpuExperts(MixtureOfExperts):
    """All experts in one call; owns the layers to which its struct points."""

    def __init__(self, library: Library, experts: ExpertLayers) -> None:
        check_experts(experts)
        count, router = len(experts.gate_up), experts.router
        hidden, inner = router.in_features, experts.down[0].in_features
        shared = experts.shared_down.in_features if experts.shared_down else 0

        def table(
            name: str, layers: Sequence[LinearLayer], sizes: tuple[int, int]
        ) -> ctypes.Array[ctypes.c_void_p]:
            return (ctypes.c_void_p * count)(*(handle_of(name, layer, sizes) for layer in layers))

        ups = table("gate_up", experts.gate_up, (hidden, 2 * inner))
        downs = table("down", experts.down, (inner, hidden))
        copies = experts.ranks.size if experts.ranks is not None else 0
        self._owners = np.full((count, copies), -1, dtype=np.int32)
        self.loads = np.zeros(count, dtype=np.int64)
        self._set_owners(experts.owners)
        self.hidden_size = hidden
        self._table = Experts(
            hidden=hidden,
            count=count,
            top_k=experts.top_k,
            inner=inner,
            shared_inner=shared,
            groups=experts.groups,
            top_groups=experts.top_groups,
            group_best=experts.group_best,
            router=handle_of("router", router, (hidden, count)),
            gate_up=ctypes.addressof(ups),
            down=ctypes.addressof(downs),
            shared_gate_up=handle_of(
                "shared_gate_up", experts.shared_gate_up, (hidden, 2 * shared)
            ),
            shared_down=handle_of("shared_down", experts.shared_down, (shared, hidden)),
            shared_gate=handle_of("shared_gate", experts.shared_gate, (hidden, 1)),
            choice_bias=address(experts.choice_bias),
            softmax_first=experts.softmax_first,
            sigmoid=experts.sigmoid,
            renormalize=experts.renormalize,
            scale=experts.scale,
            act=activation_of(experts.activation),
            ranks=handle_of_ranks(experts),
            owners=self._owners.ctypes.data,
            copies=copies,
            loads=self.loads.ctypes.data,
            row_ranks=experts.row_ranks,
        )
        self.address = ctypes.addressof(self._table)
        self._ups, self._downs = ups, downs
        self.layers, self._sizes = experts, sizes_of(experts)
        self._run = library.run_experts
        self.nbytes = bytes_read(experts)

    def _set_owners(self, owners: Sequence[Sequence[int]]) -> None:
        self._owners[:] = -1
        for expert, ranks in enumerate(owners):
            self._owners[expert, : len(ranks)] = ranks

    def move(
        self, owners: Sequence[Sequence[int]], loaded: Mapping[int, tuple[LinearLayer, LinearLayer]]
    ) -> None:
        layers, hidden = self.layers, self.hidden_size
        if layers is None or layers.ranks is None:
            raise ValueError("only experts that ranks share are moved")
        inner, rank = layers.down[0].in_features, layers.ranks.rank
        gate_up, down = list(layers.gate_up), list(layers.down)
        for expert, ranks in enumerate(owners):
            if rank not in ranks:
                gate_up[expert] = AbsentLinear(hidden, 2 * inner)
                down[expert] = AbsentLinear(inner, hidden)
            elif expert in loaded:
                gate_up[expert], down[expert] = loaded[expert]
            self._ups[expert] = handle_of("gate_up", gate_up[expert], (hidden, 2 * inner))
            self._downs[expert] = handle_of("down", down[expert], (inner, hidden))
        self._set_owners(owners)
        self.layers = replace(layers, gate_up=gate_up, down=down, owners=owners)
        self.nbytes = bytes_read(self.layers)

    def __call__(self, x: Tensor) -> Tensor:
        return self.forward_with_adapters(x, ())

    def forward_with_adapters(self, x: Tensor, uses: Sequence[ExpertUse]) -> Tensor:
        if x.dim() != 2 or x.shape[1] != self.hidden_size or x.dtype != torch.float32:
            raise ValueError(f"x {list(x.shape)} {x.dtype} must be float32 [T, {self.hidden_size}]")
        x = x.contiguous()
        out = torch.empty_like(x)
        groups = LoraSegments([(CpuLoraTable([lora], [self._sizes]), rows) for lora, rows in uses])
        status = self._run(
            self.address, out.data_ptr(), x.data_ptr(), len(x), groups.table, groups.count,
            num_threads(),
        )  # fmt: skip
        if status:
            check(status)
        return out
