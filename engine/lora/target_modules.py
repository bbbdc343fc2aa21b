"""Which parts of a model an adapter can change, by the names of its checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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

#: Wrappers that PEFT and `transformers` put before a module's name, or leave out.
_PREFIXES = ("", "model.", "transformer.", "language_model.", "model.language_model.")


#: Where a checkpoint that has a vision tower, too, may have its text model.
_TEXT_MODELS = ("model.language_model.", "language_model.model.", "model.text_model.", "model.")

#: Of an encoder, by its name within it.
_POOLER = "pooler.dense"
#: Where `transformers` has a mixture, and where checkpoints have it.
_MIXTURES = (("", ""), (".mlp.", ".block_sparse_moe."))


@dataclass(frozen=True, slots=True)
class TargetSlice:
    """One of a checkpoint's weights within a linear layer of the model.

    Attributes:
        layer: the layer's number.
        slot: which linear layer of it, see `layer_linears`.
        part: which of the linear layer's parts; weights are over each other.
        rows, columns: outputs and inputs of the part.
    """

    layer: int
    slot: str
    part: int
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """All experts of a layer, whose weights `transformers` has in one tensor a projection.

    Attributes:
        prefix: of the experts' names, see `layer_linears`.
        moe: how many, and how they lie in memory.
        hidden: inputs of the first projection, and outputs of the second.
    """

    prefix: str
    moe: MoeSpec
    hidden: int

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of both."""
        inner = self.moe.intermediate_size
        return {"up": (self.hidden, 2 * inner), "down": (inner, self.hidden)}

    def rows(self, projection: str) -> list[tuple[str, slice]]:
        """The last words of an expert's modules, and which of the projection's rows are theirs."""
        gate, up, down = self.moe.expert_names
        if projection == "down":
            return [(down, slice(None))]
        if self.moe.layout == "interleaved":
            return [(gate, slice(0, None, 2)), (up, slice(1, None, 2))]
        inner = self.moe.intermediate_size
        return [(gate, slice(0, inner)), (up, slice(inner, None))]


class TargetModules:
    """A model's modules by name, found whichever wrappers stand before theirs.

    Attributes:
        layers: of each its linear layers by their slots, see `layer_linears`.
        embedding, head: the names of the tables; "" of an encoder, whose tables stay as they are.
        vision: the number behind the last layer's, under which `layers` has the linear layers of a
            vision tower and its connector; None: there is none.
        heads: of queries and of keys; 0 of an encoder.
        classifier: shapes of a classifier's head, by the checkpoint's names of its tensors.
        takes_gguf: llama.cpp's names can be told.
    """

    takes_gguf: ClassVar[bool] = True

    def __init__(
        self,
        spec: DecoderSpec | EncoderSpec,
        classifier: Mapping[str, tuple[int, ...]] | None = None,
        vision: Mapping[str, FusedLinear] | None = None,
    ) -> None:
        """`classifier`: the tensors of a classifier's head, by their names. `vision`: the linear
        layers of a vision tower and its connector, by the names of their first parts.
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
        self._targets = dict(_target_slices(self.layers))
        self._dense = dict(_dense(self.classifier))
        pooler = {_POOLER, prefix + _POOLER} if isinstance(spec, EncoderSpec) else set()
        self._unused = pooler - self._dense.keys()
        tables = {self.embedding, self.head} - {""}
        self._names = {*self._targets, *self._stacks, *self._dense, *tables}

    def resolve(self, name: str) -> str | None:
        """The checkpoint's name of a module: of a target, a stack, `embedding` or `head`."""
        for ending in ("", ".layer"):
            for ours, theirs in _MIXTURES:
                for candidate in self._candidates(name):
                    module = candidate.replace(ours, theirs) + ending
                    if module in self._names:
                        return module
        return self._vision_names.get(_bare_vision_name(name))

    def _candidates(self, name: str) -> Iterator[str]:
        """What the checkpoint may call a module."""
        for removed, added in product(self._prefixes, repeat=2):
            yield added + name.removeprefix(removed)
        if self.vision is not None:
            for text_model in _TEXT_MODELS:
                if name.startswith(text_model):
                    inner_name = name.removeprefix(text_model)
                    yield from (other + inner_name for other in _TEXT_MODELS)

    def find_target(self, name: str) -> TargetSlice | None:
        """Where the weight of this name is; None for a table, or nothing of the model's."""
        return self._targets.get(name)

    def dense(self, name: str) -> tuple[int, int] | None:
        """Outputs and inputs of a classifier's linear layer of this name."""
        return self._dense.get(name)

    def is_unused(self, name: str) -> bool:
        """Whether it's the layer that BERT has for training, and that nothing here is pooled by."""
        return name in self._unused

    def stack(self, name: str) -> ExpertStack | None:
        """The experts whose weights are one tensor of this name."""
        return self._stacks.get(name)


def _bare_vision_name(name: str) -> str:
    """What a tower's module is called by all of `transformers`' versions and checkpoints."""
    return name.removeprefix("model.").replace(".vision_model.", ".")


def _dense(classifier: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, tuple[int, int]]]:
    """The linear layers of a classifier's head."""
    for name, shape in classifier.items():
        if name.endswith(".weight") and len(shape) == 2:
            yield name.removesuffix(".weight"), (shape[0], shape[1])


def layer_linears(layer: LayerDescription) -> Iterator[tuple[str, FusedLinear]]:
    """A layer's linear layers by the names that this package gives them."""
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


def _mlp(prefix: str, mlp: MlpDescription) -> Iterator[tuple[str, FusedLinear]]:
    yield f"{prefix}up", mlp.up
    yield f"{prefix}down", mlp.down


def _stacks(description: ModelDescription) -> Iterator[tuple[str, ExpertStack]]:
    """By the names under which PEFT has them: of the module, or of its two weights."""
    for layer in description.layers:
        if not isinstance(layer.mlp, MoeBlock) or layer.mlp.moe.layout == "flat":
            continue
        moe, prefix = layer.mlp.moe, f"{layer.mlp.layer}{layer.mlp.moe.experts}"
        stack = ExpertStack(prefix, moe, layer.mlp.router.columns)
        granite = ("experts", "input_linear", "output_linear")
        for name in granite if moe.layout == "granite" else ("",):
            yield f"{prefix}{name}".removesuffix("."), stack


def _target_slices(
    layers: Sequence[Mapping[str, FusedLinear]],
) -> Iterator[tuple[str, TargetSlice]]:
    for index, layer in enumerate(layers):
        for slot, linear in layer.items():
            for number, part in enumerate(linear.parts):
                yield part.name, TargetSlice(index, slot, number, part.rows, linear.columns)


# Experts whose weights are one tensor a projection, as PEFT adapts them (`target_parameters`).
#
# Each pair of tensors holds all experts of a layer: A [experts * rank, inputs], expert by expert,
# and
# B [outputs, rank * experts], whose columns go through the experts first. Both projections have the
# same module, one behind `base_layer`, so shapes tell which is which. Earlier versions of PEFT
# took a weight's outputs for its inputs: there A is of the outputs, and the two change places.


_WRAPPER = ".base_layer"
#: The names of a projection's weight, by which patterns of ranks and factors are looked up.
_PARAMETERS = {"up": "gate_up_proj", "down": "down_proj"}


def strip_wrapper(module: str) -> str:
    """A module's name without what PEFT puts around one that it adapts twice."""
    while module.endswith(_WRAPPER):
        module = module.removesuffix(_WRAPPER)
    return module


@dataclass(frozen=True, slots=True)
class StackedLoRA:
    """The two tensors that change one projection of all experts.

    Attributes:
        stack: the experts.
        projection: "up" or "down".
        rank: of each expert.
        flipped: A is of the outputs, B of the inputs.
        scale: of what they add.
    """

    stack: ExpertStack
    projection: str
    rank: int
    flipped: bool
    scale: float

    def deltas(self, a: Tensor, b: Tensor) -> Iterator[tuple[str, LoRALayer]]:
        """By the names of the experts' own modules."""
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
    """What tensors of these shapes are, or why they can't be: words to put behind a name."""
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
    """Collects the tensors of one file that are of whole stacks of experts, by their headers."""

    def __init__(self, config: AdapterConfig, modules: TargetModules, max_rank: int | None) -> None:
        self._config, self._modules, self._max_rank = config, modules, max_rank
        self._tensors: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}

    def collect(self, name: str, entry: Any) -> bool:
        """Whether the tensor is of a stack; raises `InvalidRequest` for one that none has."""
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
        """The names of each A and B, and what they are.

        Raises `InvalidRequest` for one without the other, or of other shapes.
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
