"""LoRA adapters of a bridged model: its linear layers and its embedding, by name.

A hook on each of them adds the outputs of the adapters of the current pass's rows. The rows are
known if a module gets all of a pass's tokens in order. Modules that get others (such as experts)
can't have adapters; they are recognized while the model is explored.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from engine.models.lora import NO_ADAPTERS, StepAdapters
from engine.transformers_backend.linear import PackedModule, Table
from engine.transformers_backend.ranks import SplitLinear
from kernels import KernelSet, LinearLayer
from kernels.lora import LoraSegment


class ConvLayer(LinearLayer):
    """A `Conv1D` of `transformers`, whose weight is [inputs, outputs], as a linear layer."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.in_features, self.out_features = self._module.weight.shape
        self.nbytes = self._module.weight.nbytes

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        y: Tensor = torch.addmm(self._module.bias, x, self._module.weight)
        return y if out is None else out.copy_(y)

    def rows(self, ids: Tensor) -> Tensor:
        weights: Tensor = self._module.weight[:, ids].T.float()
        return weights


@dataclass(slots=True)
class LoraForwardState:
    """The current pass; there is one at a time.

    Attributes:
        shape: (number of sequences, tokens of each).
        adapters: the adapters of its tokens, in order.
        num_logits_rows: the number of rows for the output layer; None for all.
        heads: the adapters of these rows.
        watching: whether modules are observed instead of adapted.
        strange: observed modules that got other rows than the pass's.
        seen: observed modules that got any rows.
    """

    shape: tuple[int, int] = (0, 0)
    adapters: StepAdapters = NO_ADAPTERS
    num_logits_rows: int | None = None
    heads: StepAdapters = NO_ADAPTERS
    watching: bool = True
    strange: set[str] = field(default_factory=set)
    seen: set[str] = field(default_factory=set)

    def begin(self, shape: tuple[int, int], adapters: StepAdapters, rows: Tensor | None) -> None:
        """Begin a pass. `rows` are the tokens whose rows the output layer gets."""
        self.shape, self.adapters = shape, adapters
        self.num_logits_rows = None if rows is None else len(rows)
        self.heads = adapters if rows is None else adapters.for_rows(rows)

    def end(self) -> None:
        """End the pass."""
        self.shape, self.num_logits_rows = (0, 0), None
        self.adapters = self.heads = NO_ADAPTERS

    def observe(self, name: str, shape: tuple[int, ...], *, output: bool) -> None:
        """Observe a module's input of this shape."""
        if not self.shape[1]:
            return
        self.seen.add(name)
        sequences, tokens = self.shape
        if output and self.num_logits_rows is not None:
            tokens = self.num_logits_rows
        # Dimensions of 1 don't change the order of rows.
        output_shape = tuple(size for size in shape if size != 1)
        rows = tuple(size for size in (sequences, tokens) if size != 1)
        if output_shape not in (rows, (sequences * tokens,)):
            self.strange.add(name)


class LoraModules:
    """The modules of a model that adapters can modify.

    Attributes:
        linears: linear layers by module name, with / instead of dots.
        biased: those with a bias.
        embedding: the token embedding's name; None if it is of an unsupported kind.
        output: slot of the output layer, which has a row per token like the embedding; "" if
        there is none.
        tied: whether the output layer shares the embedding's weight.
        splits: how this rank sees linear layers whose inputs or outputs are its own.
        step: the state of the current pass.
    """

    def __init__(self, model: nn.Module, ops: KernelSet, words: nn.Module | None) -> None:
        """`words` is the token embedding."""
        self._ops = ops
        self.step = LoraForwardState()
        self.linears: dict[str, LinearLayer] = {}
        self.biased: set[str] = set()
        self.splits: dict[str, SplitLinear] = {}
        self.embedding: tuple[str, Table] | None = None
        self.tied = bool(getattr(getattr(model, "config", None), "tie_word_embeddings", False))
        self._hooks: dict[str, Any] = {}
        self.output = ""
        output = getattr(model, "get_output_embeddings", lambda: None)()
        for path, module in model.named_modules():
            name = path.replace(".", "/")
            if isinstance(module, PackedModule | Conv1D):
                self.linears[name] = (
                    module.layer if isinstance(module, PackedModule) else ConvLayer(module)
                )
                if isinstance(module, PackedModule) and module.split is not None:
                    self.splits[name] = module.split
                if module.bias is not None:
                    self.biased.add(name)
                self.output = name if module is output else self.output
                output_hook = _LinearHook(self, name, output=module is output)
                self._hooks[name] = module.register_forward_hook(output_hook)
            elif isinstance(module, Table) and module is words:
                self.embedding = name, module
                hook = _EmbeddingHook(self, name)
                self._hooks[name] = module.register_forward_hook(hook)

    def settle(self) -> None:
        """Exclude modules that got other rows, or none, while the model was explored."""
        step = self.step
        step.watching = False
        for name in (*self.linears, *([self.embedding[0]] if self.embedding else ())):
            if name in step.strange or name not in step.seen:
                self._hooks.pop(name).remove()
                self.linears.pop(name, None)
                if self.embedding is not None and self.embedding[0] == name:
                    self.embedding = None
        table = None if self.embedding is None else self.embedding[1].weight
        head = self.linears.get(self.output)
        if head is None or table is None or head.out_features != len(table):
            self.output = ""

    def sizes(self, name: str) -> tuple[int, int]:
        """Return the rows and columns of a linear layer's whole weight."""
        layer, split = self.linears[name], self.splits.get(name)
        if split is not None:
            return split.rows, split.columns
        return layer.out_features, layer.in_features

    @property
    def num_ranks(self) -> int:
        """Number of ranks that share linear layers."""
        return max((split.ranks.size for split in self.splits.values()), default=1)

    def join_ranks(self, model: nn.Module) -> None:
        """Replace layers by those that all ranks share."""
        for path, module in model.named_modules():
            name = path.replace(".", "/")
            if name in self.linears and isinstance(module, PackedModule):
                self.linears[name] = module.layer

    def clear(self) -> None:
        """Remove all modules, whose layers move to another device."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self.linears.clear()
        self.biased.clear()
        self.splits.clear()
        self.embedding, self.output = None, ""

    def add(self, y: Tensor, x: Tensor, uses: list[LoraSegment]) -> None:
        """Add the adapters' outputs to y [rows, outputs] in place."""
        self._ops.add_lora(y, x, uses)

    def change_logits(self, y: Tensor, x: Tensor, adapters: StepAdapters) -> None:
        """Add the adapters' outputs to the logits y [rows, tokens] of x in place."""
        for adapter, rows in adapters.groups:
            if adapter.head is not None:
                adapter.head.change(self._ops, y, x, rows)

    def change(self, x: Tensor, ids: Tensor, adapters: StepAdapters) -> None:
        """Add the adapters' outputs to embeddings x [tokens, width] in place."""
        for adapter, rows in adapters.groups:
            if adapter.embedding is not None:
                adapter.embedding.change(self._ops, x, ids, rows)


class _LinearHook:
    """Wraps a linear layer to add the adapters' outputs."""

    def __init__(self, modules: LoraModules, name: str, *, output: bool) -> None:
        self._modules, self._name, self._output = modules, name, output

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...], y: Tensor) -> Tensor | None:
        step, x = self._modules.step, inputs[0]
        if step.watching:
            step.observe(self._name, tuple(x.shape[:-1]), output=self._output)
            return None
        chosen = self._output and step.num_logits_rows == x.shape[:-1].numel()
        adapters = step.heads if chosen else step.adapters
        if not adapters:
            return None
        uses = adapters.segments(0, self._name)
        heads = self._name == self._modules.output and any(
            adapter.head is not None for adapter, _ in adapters.groups
        )
        if not (uses or heads):
            return None
        rows = y.reshape(-1, y.shape[-1]).float().contiguous()
        flat_rows = x.reshape(-1, x.shape[-1]).float().contiguous()
        split = self._modules.splits.get(self._name)
        if split is not None and split.inputs is not None:
            flat_rows = split.ranks.gather(flat_rows, split.inputs)
        if uses:
            self._modules.add(rows, flat_rows, uses)
        if heads:
            self._modules.change_logits(rows, flat_rows, adapters)
        return rows.view(y.shape)


class _EmbeddingHook:
    """Wraps the input embedding to add the adapters' outputs."""

    def __init__(self, modules: LoraModules, name: str) -> None:
        self._modules, self._name = modules, name

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...], y: Tensor) -> Tensor | None:
        step, ids = self._modules.step, inputs[0]
        if step.watching:
            step.observe(self._name, tuple(ids.shape), output=False)
            return None
        if not step.adapters:
            return None
        rows = y.reshape(-1, y.shape[-1]).clone()
        self._modules.change(rows, ids.flatten(), step.adapters)
        return rows.view(y.shape)
