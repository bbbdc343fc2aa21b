"""The modules of a model that adapters can change, by their names in its checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

from torch import Tensor

from engine.lora.adapter import LoRALayer, check_entry, check_rank, parse_key, tensor_error
from engine.lora.adapter_config import AdapterConfig
from engine.models.decoder_spec import DecoderSpec, MoeSpec
from engine.models.encoders.encoder import encoder_linears
from engine.models.encoders.encoder_spec import EncoderSpec
from engine.models.layers.describe import describe
from engine.models.layers.linear import (
    FusedLinear,
    LayerDescription,
    MlpDescription,
    ModelDescription,
    MoeBlock,
    experts_of,
)
from engine.models.lora import CROSS_KV

#: Wrappers that PEFT and `transformers` put before a module's name, or omit.
_PREFIXES = ("", "model.", "transformer.", "language_model.", "model.language_model.")


#: Prefixes of the text model in checkpoints with a vision tower.
_TEXT_MODELS = ("model.language_model.", "language_model.model.", "model.text_model.", "model.")

#: Encoder modules, by their name within the encoder.
_POOLER = "pooler.dense"
#: A mixture's name in `transformers`, and in checkpoints.
_MIXTURES = (("", ""), (".mlp.", ".block_sparse_moe."))


@dataclass(frozen=True, slots=True)
class TargetSlice:
    """A weight of the checkpoint within a linear layer of the model.

    Attributes:
        layer: index of the layer.
        slot: name of the linear layer, see `layer_linears`.
        part: index of the part of that linear layer; parts are concatenated by rows.
        rows, columns: outputs and inputs of the part.
    """

    layer: int
    slot: str
    part: int
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """All experts of a layer, whose weights `transformers` has in one tensor per projection.

    Attributes:
        prefix: prefix of the experts' names, see `layer_linears`.
        moe: their number and memory layout.
        hidden: inputs of the first projection, and outputs of the second.
    """

    prefix: str
    moe: MoeSpec
    hidden: int

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of both projections."""
        inner = self.moe.intermediate_size
        return {"up": (self.hidden, 2 * inner), "down": (inner, self.hidden)}

    def rows(self, projection: str) -> list[tuple[str, slice]]:
        """Last components of the names of an expert's modules, and their rows in the projection."""
        gate, up, down = self.moe.expert_names
        if projection == "down":
            return [(down, slice(None))]
        if self.moe.layout == "interleaved":
            return [(gate, slice(0, None, 2)), (up, slice(1, None, 2))]
        inner = self.moe.intermediate_size
        return [(gate, slice(0, inner)), (up, slice(inner, None))]


class TargetModules:
    """A model's modules by name, with or without wrappers' prefixes.

    Attributes:
        layers: for each layer its linear layers by slot, see `layer_linears`.
        embedding, head: names of the tables; "" for an encoder, whose tables can't be changed.
        vision: index after the last layer's, under which `layers` has the linear layers of a
            vision tower and its connector; None without one.
        heads: number of query and of key heads; 0 for an encoder.
        classifier: shapes of a classifier's head, by the checkpoint's names of its tensors.
        takes_gguf: whether llama.cpp's names can be resolved.
    """

    takes_gguf: ClassVar[bool] = True

    def __init__(
        self,
        spec: DecoderSpec | EncoderSpec,
        classifier: Mapping[str, tuple[int, ...]] | None = None,
        vision: Mapping[str, FusedLinear] | None = None,
    ) -> None:
        """`classifier`: tensors of a classifier's head, by name. `vision`: linear layers of a
        vision tower and its connector, by the name of their first part.
        """
        self.classifier = dict(classifier or {})
        self.vocab_size, self.hidden_size = spec.vocab_size, spec.hidden_size
        self.embedding, self.head, prefix = "", "", ""
        self.heads, self.tied = (0, 0), False
        self._vision_names: dict[str, str] = {}
        self._stacks: dict[str, ExpertStack] = {}
        if isinstance(spec, EncoderSpec):
            self.layers, prefix = encoder_linears(spec), spec.names.prefix
            self.embedding = spec.names.embedding
        else:
            described = describe(spec)
            self.heads, self.tied = (spec.num_heads, spec.num_kv_heads), spec.tie_embeddings
            self.embedding, self.head = spec.names.embedding, spec.names.lm_head
            self.layers = [dict(layer_linears(layer)) for layer in described.layers]
            self._stacks |= _stacks(described)
        self.vision = len(self.layers) if vision else None
        if vision:
            self.layers.append(dict(vision))
            parts = [part.name for linear in vision.values() for part in linear.parts]
            self._vision_names = {_bare_vision_name(name): name for name in parts}
        self._prefixes = (*_PREFIXES, prefix)
        self._targets = {
            part.name: TargetSlice(index, slot, number, part.rows, linear.columns)
            for index, layer in enumerate(self.layers)
            for slot, linear in layer.items()
            for number, part in enumerate(linear.parts)
        }
        self._dense = dict(_dense(self.classifier))
        pooler = {_POOLER, prefix + _POOLER} if isinstance(spec, EncoderSpec) else set()
        self._unused = pooler - self._dense.keys()
        tables = {self.embedding, self.head} - {""}
        self._names = {*self._targets, *self._stacks, *self._dense, *tables}

    def resolve(self, name: str) -> str | None:
        """Return the checkpoint's name of a module: a target, a stack, `embedding` or `head`."""
        for ending in ("", ".layer"):
            for ours, theirs in _MIXTURES:
                for candidate in self._candidates(name):
                    module = candidate.replace(ours, theirs) + ending
                    if module in self._names:
                        return module
        return self._vision_names.get(_bare_vision_name(name))

    def _candidates(self, name: str) -> Iterator[str]:
        """Return names that the checkpoint may have for a module."""
        for removed, added in product(self._prefixes, repeat=2):
            yield added + name.removeprefix(removed)
        if self.vision is not None:
            for text_model in _TEXT_MODELS:
                if name.startswith(text_model):
                    inner_name = name.removeprefix(text_model)
                    yield from (other + inner_name for other in _TEXT_MODELS)

    def find_target(self, name: str) -> TargetSlice | None:
        """Return the target of this name; None for tables and unknown names."""
        return self._targets.get(name)

    def dense(self, name: str) -> tuple[int, int] | None:
        """Return outputs and inputs of a classifier's linear layer of this name; or None."""
        return self._dense.get(name)

    def is_unused(self, name: str) -> bool:
        """Whether it is BERT's pooling layer, which is trained but not used here."""
        return name in self._unused

    def stack(self, name: str) -> ExpertStack | None:
        """Return the experts whose weights are one tensor of this name; or None."""
        return self._stacks.get(name)


def _bare_vision_name(name: str) -> str:
    """Return the names of a tower's module in all versions of `transformers` and checkpoints."""
    return name.removeprefix("model.").replace(".vision_model.", ".")


def _dense(classifier: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, tuple[int, int]]]:
    """Return the linear layers of a classifier's head."""
    for name, shape in classifier.items():
        if name.endswith(".weight") and len(shape) == 2:
            yield name.removesuffix(".weight"), (shape[0], shape[1])


def layer_linears(layer: LayerDescription) -> Iterator[tuple[str, FusedLinear]]:
    """Return a layer's linear layers by slot."""
    yield from layer.attention_linears()
    if isinstance(layer.mlp, MoeBlock):
        yield "router", layer.mlp.router
        if layer.mlp.shared_gate is not None:
            yield "shared_gate", layer.mlp.shared_gate
        if layer.mlp.shared is not None:
            yield from _mlp("shared_", layer.mlp.shared)
        yield from experts_of(layer.mlp)
    elif layer.mlp is not None:
        yield from _mlp("", layer.mlp)
    if layer.residual_mlp is not None:
        yield from _mlp("residual_", layer.residual_mlp)
    if layer.cross is not None:
        yield "cross_q", layer.cross.queries
        yield CROSS_KV, layer.cross.kv
        yield "cross_o", layer.cross.output


def _mlp(prefix: str, mlp: MlpDescription) -> Iterator[tuple[str, FusedLinear]]:
    yield f"{prefix}up", mlp.up
    yield f"{prefix}down", mlp.down


def _stacks(description: ModelDescription) -> Iterator[tuple[str, ExpertStack]]:
    """Return stacks by PEFT's names: those of the module, or of its two weights."""
    for layer in description.layers:
        if not isinstance(layer.mlp, MoeBlock) or layer.mlp.moe.layout == "flat":
            continue
        moe, prefix = layer.mlp.moe, f"{layer.mlp.layer}{layer.mlp.moe.experts}"
        stack = ExpertStack(prefix, moe, layer.mlp.router.columns)
        granite = ("experts", "input_linear", "output_linear")
        for name in granite if moe.layout == "granite" else ("",):
            yield f"{prefix}{name}".removesuffix("."), stack


# Experts whose weights are one tensor per projection, as PEFT adapts them (`target_parameters`).
#
# Each pair of tensors has all experts of a layer: A [experts * rank, inputs], ordered by expert,
# and B [outputs, rank * experts], whose columns run through the experts first. Both projections
# have the same module name, one after `base_layer`, so their shapes identify them. Earlier versions
# of PEFT swapped a weight's outputs and inputs: there A is for the outputs, and B for the inputs.


_WRAPPER = ".base_layer"
#: Names of a projection's weight, which patterns of ranks and factors are matched with.
_PARAMETERS = {"up": "gate_up_proj", "down": "down_proj"}


def strip_wrapper(module: str) -> str:
    """Return a module's name without what PEFT adds when it adapts a module twice."""
    while module.endswith(_WRAPPER):
        module = module.removesuffix(_WRAPPER)
    return module


@dataclass(frozen=True, slots=True)
class StackedLoRA:
    """The pair of tensors that changes one projection of all experts.

    Attributes:
        stack: the experts.
        projection: "up" or "down".
        rank: rank per expert.
        flipped: whether A is for the outputs, and B for the inputs.
        scale: factor of the change.
    """

    stack: ExpertStack
    projection: str
    rank: int
    flipped: bool
    scale: float

    def deltas(self, a: Tensor, b: Tensor) -> Iterator[tuple[str, LoRALayer]]:
        """Return the changes by the names of the experts' modules."""
        count = self.stack.moe.num_experts
        by_expert = b.reshape(b.shape[0], self.rank, count)
        for expert in range(count):
            expert_a = a[expert * self.rank : (expert + 1) * self.rank]
            expert_b = by_expert[:, :, expert]
            if self.flipped:
                expert_a, expert_b = expert_b.T, expert_a.T
            expert_a = expert_a.contiguous()
            for word, rows in self.stack.rows(self.projection):
                delta = LoRALayer(a=expert_a, b=expert_b[rows].contiguous(), scale=self.scale)
                yield f"{self.stack.prefix}{expert}.{word}", delta


def match_stack(
    stack: ExpertStack, config: AdapterConfig, module: str, a: tuple[int, ...], b: tuple[int, ...]
) -> StackedLoRA | str:
    """Identify tensors of these shapes; or return why they are invalid, to follow a name."""
    if len(a) != 2 or len(b) != 2 or a[0] != b[1] or a[0] % stack.moe.num_experts:
        return (
            f"and its partner have shapes {list(a)} and {list(b)}, but they must be "
            f"[{stack.moe.num_experts} * rank, inputs] and [outputs, rank * "
            f"{stack.moe.num_experts}]"
        )
    for flipped in (False, True):
        for projection, sizes in stack.projections.items():
            if (b[0], a[1]) == (sizes if flipped else sizes[::-1]):
                name = f"{strip_wrapper(module)}.{_PARAMETERS[projection]}"
                rank = a[0] // stack.moe.num_experts
                if rank != config.rank_of(name):
                    return f"is of rank {rank}, but it must be {config.rank_of(name)}"
                return StackedLoRA(stack, projection, rank, flipped, config.scale_of(name))
    mappings = ", ".join(f"{one} to {other}" for one, other in stack.projections.values())
    return f"and its partner map {a[1]} to {b[0]}, but the experts map {mappings}"


class Stacks:
    """Collects the tensors of one file that change stacks of experts, by their headers."""

    def __init__(self, config: AdapterConfig, modules: TargetModules, max_rank: int | None) -> None:
        self._config, self._modules, self._max_rank = config, modules, max_rank
        self._tensors: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}

    def collect(self, name: str, entry: Any) -> bool:
        """Whether the tensor changes a stack; raises `InvalidRequest` for an invalid one."""
        key = parse_key(name)
        module = None if key is None else self._modules.resolve(strip_wrapper(key.module))
        if key is None or module is None or self._modules.stack(module) is None:
            return False
        if key.kind not in ("a", "b"):
            raise tensor_error(name, "isn't supported for a module of this kind")
        check_entry(name, entry)
        self._tensors.setdefault(key.module, {})[key.kind] = name, tuple(entry.get_shape())
        return True

    def pairs(self) -> list[tuple[str, str, StackedLoRA]]:
        """Return the names of each A and B, with their pair.

        Raises `InvalidRequest` for one without the other, or with wrong shapes.
        """
        pairs, changed = [], set()
        for module, kinds in self._tensors.items():
            name = next(iter(kinds.values()))[0]
            if len(kinds) != 2:
                raise tensor_error(name, "has no partner: a and b go together")
            (a, a_shape), (b, b_shape) = kinds["a"], kinds["b"]
            stack = self._modules.stack(self._modules.resolve(strip_wrapper(module)) or "")
            pair = (
                "is of no experts"
                if stack is None
                else match_stack(stack, self._config, module, a_shape, b_shape)
            )
            if isinstance(pair, str):
                raise tensor_error(a, pair)
            if (pair.stack.prefix, pair.projection) in changed:
                raise tensor_error(a, "changes what another tensor changes too")
            check_rank(pair.rank, self._max_rank)
            changed.add((pair.stack.prefix, pair.projection))
            pairs.append((a, b, pair))
        return pairs
