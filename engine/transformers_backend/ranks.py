"""How ranks share a bridged model: by the plan for tensor parallelism that `transformers` has.

A plan names a style for linear layers. Where it adds partial sums up ("rowwise"), each rank has
rows of the weight instead, and its inputs are gathered, as in the native decoder: each sum is
computed by one rank, and equals the sum without ranks bitwise. Experts and tables are whole.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.contract.errors import ConfigError
from engine.models.sharding import PARAM, split_evenly
from kernels.interface import LinearLayer, RankGroup

log = logging.getLogger(__name__)

#: Styles whose inputs or outputs are a rank's own: (inputs, outputs).
_SPLIT = {
    "colwise": (False, True),
    "colwise_gather_output": (False, False),
    "colwise_rep": (False, False),
    "rowwise": (True, False),
    "rowwise_split_input": (False, False),
    "rowwise_rep": (False, False),
}
#: Layers whose outputs are keys; if these are split, so are the heads of attention.
_KEYS = ("k_proj", "qkv_proj", "query_key_value")
#: Styles that change nothing of a forward pass without gradients.
_REPLICATED = ("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj")
#: Styles of modules other than linear layers, which stay whole.
_OTHER_MODULES = ("embedding_rowwise", "embedding_colwise", "moe_tp_experts", "all_reduce")


class LocalShard(LinearLayer):
    """A rank's rows of a layer before it has met the other ranks, whose rows it takes to be equal.

    So the shapes are those of the shared layer, and a model can be explored and verified while
    other ranks still read their weights.
    """

    def __init__(
        self, layer: LinearLayer, ranks: RankGroup, outputs: tuple[int, ...], *, local_inputs: bool
    ) -> None:
        """`outputs`: see `RankGroup.shard_linear`. `local_inputs`: inputs are gathered."""
        self._layer, self._ranks, self._outputs = layer, ranks, outputs
        size, columns = ranks.size, layer.in_features
        self._inputs = tuple(columns // size * rank for rank in range(size + 1))
        self._repeats = size if local_inputs else 1
        self._rows = torch.arange(outputs[-1]) % layer.out_features
        self.in_features, self.out_features = columns // self._repeats, outputs[-1]
        self.nbytes, self._joined = layer.nbytes, False

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See `LinearLayer.__call__`."""
        y = self._layer(x.repeat(1, self._repeats))[:, self._rows]
        return y if out is None else out.copy_(y)

    def rows(self, ids: Tensor) -> Tensor:
        """See `LinearLayer.rows`."""
        return self._layer.rows(self._rows[ids])

    def join(self) -> LinearLayer:
        """Return the layer that all ranks share."""
        if not self._joined:
            inputs = self._inputs if self._repeats > 1 else None
            self._ranks.shard_linear(self._layer, self._outputs, inputs)
            self._joined = True
        return self._layer


@dataclass(frozen=True, slots=True)
class SplitLinear:
    """How a rank sees a linear layer whose inputs or outputs are its own.

    Attributes:
        ranks: the group.
        rows, columns: of the whole weight.
        local_rows: those of its outputs; None if it gets all outputs.
        inputs: [size + 1], where each rank's columns of x begin; None if it has the whole x.
    """

    ranks: RankGroup
    rows: int
    columns: int
    local_rows: range | None
    inputs: tuple[int, ...] | None


class RankPlan:
    """A model's plan for the ranks of a group."""

    def __init__(self, model: nn.Module, ranks: RankGroup) -> None:
        """Raises `ConfigError` for a model without a plan, or one that can't be followed."""
        self._ranks, self._model = ranks, model
        plan: dict[str, str] = getattr(model, "tp_plan", None) or {}
        embeddings, output = (
            getattr(model, f"get_{side}_embeddings", lambda: None)() for side in ("input", "output")
        )
        get: Callable[[], nn.Module | None] = getattr(model, "get_decoder", lambda: None)
        decoder = {id(module) for module in (get() or model).modules()} | {id(output)}
        #: Styles of linear layers, by their ids.
        self._styles: dict[int, str] = {}
        for name, module in model.named_modules():
            style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
            if style is None or style in _REPLICATED or id(module) not in decoder:
                continue
            if style in _SPLIT and type(module) is nn.Linear:
                self._styles[id(module)] = style
                local_inputs, local_outputs = _SPLIT[style]
                count = module.out_features if local_outputs else module.in_features
                if (local_inputs or local_outputs) and count % ranks.size:
                    raise self._refusal(f"{count} columns of {name} can't be split evenly")
            elif style not in _OTHER_MODULES and module is not embeddings:
                raise self._refusal(f"transformers' plan has {style!r} for {name}")
        if not self._styles.keys() - {id(output)}:
            raise self._refusal("transformers has no plan that splits its linear layers")
        if any(plan.get(key) == "colwise" for key in plan if key.endswith(_KEYS)):
            self._check_heads()
        if ranks.rank == 0 and "moe_tp_experts" in plan.values():
            log.warning("Each of %d ranks has all experts.", ranks.size)

    def _check_heads(self) -> None:
        """Raise `ConfigError` unless each rank has as many heads, with keys of their own."""
        text = self._model.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]
        for name in ("num_attention_heads", "num_key_value_heads"):
            count = getattr(text, name, None)
            if isinstance(count, int) and count % self._ranks.size:
                raise self._refusal(f"its {name} ({count}) can't be split evenly")

    def share(self, child: nn.Linear) -> slice | None:
        """Return this rank's rows of a linear layer; None: all ranks have all of it."""
        if id(child) not in self._styles:
            return None
        starts = self._outputs(child)
        return slice(starts[self._ranks.rank], starts[self._ranks.rank + 1])

    def describe(self, child: nn.Linear) -> SplitLinear | None:
        """Return how this rank sees a linear layer; None: as one rank does."""
        local_inputs, local_outputs = _SPLIT[self._styles.get(id(child), "colwise_rep")]
        if not (local_inputs or local_outputs):
            return None
        size, outputs = self._ranks.size, self._outputs(child)
        rank, columns = self._ranks.rank, child.in_features
        return SplitLinear(
            self._ranks,
            child.out_features,
            columns,
            range(outputs[rank], outputs[rank + 1]) if local_outputs else None,
            tuple(columns // size * other for other in range(size + 1)) if local_inputs else None,
        )

    def wrap(self, child: nn.Linear, layer: LinearLayer) -> LinearLayer:
        """Return `layer`, which has this rank's rows, for the place of `child`."""
        local_inputs, local_outputs = _SPLIT[self._styles[id(child)]]
        if local_outputs:
            return layer
        return LocalShard(layer, self._ranks, self._outputs(child), local_inputs=local_inputs)

    def _outputs(self, child: nn.Linear) -> tuple[int, ...]:
        """Where each rank's rows begin: whole heads, or as many as the formats pack together."""
        size, rows = self._ranks.size, child.out_features
        if _SPLIT[self._styles[id(child)]][1]:
            return tuple(rows // size * rank for rank in range(size + 1))
        return split_evenly(rows, size)

    def _refusal(self, reason: str) -> ConfigError:
        return ConfigError(
            f"{PARAM}={self._ranks.size} can't be used: {type(self._model).__name__} runs through "
            f"the Transformers bridge, and {reason}. Leave it out, and run more replicas.",
            param=PARAM,
        )
