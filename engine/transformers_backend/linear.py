"""Linear layers and embeddings of a bridged model on the engine's kernels.

Activations are float32 on a CPU whatever the weights' dtype is. Linear layers are packed in their
dtype or quantized, embeddings keep their dtype, and everything else (norms, biases, fused experts)
is converted to float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from engine.quantization.packing import DenseSource, LinearPacker, QuantScheme
from engine.transformers_backend.ranks import LocalShard, RankPlan, SplitLinear
from kernels import KernelSet, LinearLayer
from kernels.reference.linear import ReferenceLinear

#: Names of routers, which aren't quantized because the choice of experts is sensitive to rounding.
_ROUTERS = ("gate", "router", "shared_expert_gate")


class Unpacked(Tensor):
    """A packed weight, float32 [out_features, in_features], that is unpacked when it is used.

    Reading its dtype, as some modules do before each use, doesn't unpack it.
    """

    layer: LinearLayer

    @staticmethod
    def __new__(cls, layer: LinearLayer) -> Unpacked:
        """Create a tensor without memory of its own."""
        shape = (layer.out_features, layer.in_features)
        device = getattr(layer, "device", torch.device("cpu"))
        tensor: Unpacked = Tensor._make_wrapper_subclass(
            cls, shape, dtype=torch.float32, device=device
        )
        tensor.layer = layer
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Apply the function to the unpacked weight."""
        args, kwargs = tree_map_only(cls, cls._full_weight, (args, kwargs or {}))
        return function(*args, **kwargs)

    def _full_weight(self) -> Tensor:
        return self.layer.rows(torch.arange(self.layer.out_features, device=self.device))


class PackedModule(nn.Module):
    """An `nn.Linear` whose weight is packed; `split`: with several ranks."""

    def __init__(
        self, layer: LinearLayer, bias: Tensor | None, split: SplitLinear | None = None
    ) -> None:
        super().__init__()
        self.layer, self.bias, self.split = layer, bias, split
        self.in_features, self.out_features = layer.in_features, layer.out_features
        #: The dtype of the layer's inputs.
        self.inputs = torch.float32

    def forward(self, x: Tensor) -> Tensor:
        """Return float32 [..., out_features] for [..., in_features]."""
        if not x.numel():
            return x.new_empty((*x.shape[:-1], self.out_features))
        rows = x.reshape(-1, self.in_features).to(self.inputs).contiguous()
        return self.layer(rows).float().view(*x.shape[:-1], self.out_features)

    @property
    def weight(self) -> Tensor:
        """The weight for modules that read it directly, float32 [out_features, in_features]."""
        return Unpacked(self.layer)


class Table(nn.Module):
    """An `nn.Embedding` that keeps its dtype and returns float32."""

    def __init__(self, weight: Tensor, layer: LinearLayer | None) -> None:
        super().__init__()
        self._weight: Tensor | None = weight if layer is None else None
        self._layer = layer

    def forward(self, ids: Tensor) -> Tensor:
        """Return float32 [..., size]."""
        if self._layer is not None:
            return self._layer.rows(ids.flatten().contiguous()).view(*ids.shape, -1)
        return nn.functional.embedding(ids, self.weight).float()

    @property
    def weight(self) -> Tensor:
        """The weight [rows, size]; float32 if a tied output layer keeps it packed."""
        if self._layer is not None:
            return Unpacked(self._layer)
        if self._weight is None:
            raise RuntimeError("a table has neither rows nor a layer")
        return self._weight


@torch.no_grad()
def pack(
    model: nn.Module, ops: KernelSet, scheme: QuantScheme, plan: RankPlan | None = None
) -> int:
    """Pack linear layers one at a time; return the bytes that a pass over a token reads.

    `plan`: of ranks that share them.
    """
    output, words = (_table(model, f"get_{side}_embeddings") for side in ("output", "input"))
    linears, tables = _owners_by_module(model, nn.Linear), _owners_by_module(model, nn.Embedding)
    layers: dict[int, LinearLayer] = {}
    for child, owners in linears:
        weight, bias = child.weight.detach(), child.bias
        bias = None if bias is None else bias.detach().float()
        kind = scheme.embeddings if child is output else scheme.layers
        kind = None if owners[0][1] in _ROUTERS else kind
        address, rows = weight.data_ptr(), None if plan is None else plan.share(child)
        if rows is not None:
            weight, bias = weight[rows], None if bias is None else bias[rows]
        layer = LinearPacker([DenseSource(weight)]).pack(ops, bias, weight.dtype, kind)
        if plan is not None and rows is not None:
            layer = plan.wrap(child, layer)
        layers[address] = layer
        split = None if plan is None else plan.describe(child)
        _replace(owners, PackedModule(layer, bias, split))
        if all(child.weight is not table.weight for table, _ in tables):
            child.weight = None
    for table, owners in tables:
        weight = table.weight.detach()
        tied = layers.get(weight.data_ptr())
        if tied is None and table is words and scheme.embeddings is not None:
            stack = LinearPacker([DenseSource(weight)])
            tied = stack.pack(ops, None, weight.dtype, scheme.embeddings)
        _replace(owners, Table(weight, tied))
    return sum(layer.nbytes for layer in layers.values()) + _to_float32(model)


def _table(model: nn.Module, getter: str) -> nn.Module | None:
    """Return the model's output layer or input embedding, according to `transformers`."""
    get: Callable[[], nn.Module | None] | None = getattr(model, getter, None)
    return get() if get is not None else None


def _owners_by_module(
    model: nn.Module, kind: type
) -> list[tuple[Any, list[tuple[nn.Module, str]]]]:
    """Return each module of exactly this type with its owners' attributes: layers may share one."""
    by_id: dict[int, tuple[Any, list[tuple[nn.Module, str]]]] = {}
    for parent in model.modules():
        # Not named_children, which omits a module's second name.
        for name, child in parent._modules.items():
            if type(child) is kind:
                by_id.setdefault(id(child), (child, []))[1].append((parent, name))
    return list(by_id.values())


def _replace(owners: list[tuple[nn.Module, str]], module: nn.Module) -> None:
    for parent, name in owners:
        setattr(parent, name, module)


def _to_float32(model: nn.Module) -> int:
    """Convert the remaining layers to float32, and return their bytes."""
    total = 0
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point() and tensor.dtype != torch.float32:
            tensor.data = tensor.data.float()
        total += tensor.nbytes
    return total


def join_ranks(model: nn.Module) -> None:
    """Let the layers of a packed model meet those of the other ranks."""
    for module in model.modules():
        if isinstance(module, PackedModule) and isinstance(module.layer, LocalShard):
            module.layer = module.layer.join()
        elif isinstance(module, Table) and isinstance(module._layer, LocalShard):
            module._layer = module._layer.join()


def move(model: nn.Module, ops: KernelSet) -> None:
    """Move a packed model to the device of other kernels.

    Raises `TypeError` unless it was packed by kernels that keep weights as tensors
    (`ReferenceLinear`). Between layers activations stay float32, as on a CPU; linear layers compute
    in the dtype that suits their weights.
    """
    moved: dict[int, LinearLayer] = {}

    def to_layer(layer: LinearLayer) -> LinearLayer:
        if not isinstance(layer, ReferenceLinear):
            raise TypeError(f"{type(layer).__name__} can't be moved to {ops.device}")
        if id(layer) not in moved:
            moved[id(layer)] = ops.PackedLinear(layer.weight, layer.bias)
        return moved[id(layer)]

    for module in model.modules():
        if isinstance(module, PackedModule):
            module.inputs = ops.activation_dtype(module.layer.weight.dtype)  # type: ignore[attr-defined]
            module.layer = to_layer(module.layer)
        elif isinstance(module, Table) and module._layer is not None:
            module._layer = to_layer(module._layer)
        for name, value in list(vars(module).items()):
            if isinstance(value, Tensor):  # neither a parameter nor a buffer
                setattr(module, name, value.to(ops.device))
    model.to(ops.device)
