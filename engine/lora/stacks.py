"""Experts whose weights are one tensor a projection, as PEFT adapts them (`target_parameters`).

Each pair of tensors holds all experts of a layer: A [experts * rank, inputs], expert by expert, and
B [outputs, rank * experts], whose columns go through the experts first. Both projections have the
same module, one behind `base_layer`, so shapes tell which is which. Earlier versions of PEFT took a
weight's outputs for its inputs: there A is of the outputs, and the two change places.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from engine.lora.adapter import ModuleDelta
from engine.lora.checks import check_entry, check_rank, wrong
from engine.lora.config import AdapterConfig
from engine.lora.keys import parse_key
from engine.lora.modules import Modules, Stack

_WRAPPER = ".base_layer"
#: The names of a projection's weight, by which patterns of ranks and factors are looked up.
_PARAMETERS = {"up": "gate_up_proj", "down": "down_proj"}


def unwrapped(module: str) -> str:
    """A module's name without what PEFT puts around one that it adapts twice."""
    while module.endswith(_WRAPPER):
        module = module.removesuffix(_WRAPPER)
    return module


@dataclass(frozen=True, slots=True)
class StackPair:
    """The two tensors that change one projection of all experts.

    Attributes:
        stack: the experts.
        projection: "up" or "down".
        rank: of each expert.
        flipped: A is of the outputs, B of the inputs.
        scale: of what they add.
    """

    stack: Stack
    projection: str
    rank: int
    flipped: bool
    scale: float

    def deltas(self, a: Tensor, b: Tensor) -> Iterator[tuple[str, ModuleDelta]]:
        """By the names of the experts' own modules."""
        count = self.stack.moe.num_experts
        by_expert = b.reshape(b.shape[0], self.rank, count)
        for expert in range(count):
            own_a = a[expert * self.rank : (expert + 1) * self.rank]
            own_b = by_expert[:, :, expert]
            if self.flipped:
                own_a, own_b = own_b.T, own_a.T
            own_a = own_a.contiguous()
            for word, rows in self.stack.rows(self.projection):
                delta = ModuleDelta(a=own_a, b=own_b[rows].contiguous(), scale=self.scale)
                yield f"{self.stack.at}{expert}.{word}", delta


def pair_of(
    stack: Stack, config: AdapterConfig, module: str, a: tuple[int, ...], b: tuple[int, ...]
) -> StackPair | str:
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
                name = f"{unwrapped(module)}.{_PARAMETERS[projection]}"
                rank = a[0] // stack.moe.num_experts
                if rank != config.rank_of(name):
                    return f"is of rank {rank}, but it must be {config.rank_of(name)}"
                return StackPair(stack, projection, rank, flipped, config.scale_of(name))
    known = ", ".join(f"{one} to {other}" for one, other in stack.projections.values())
    return f"and its partner map {a[1]} to {b[0]}, but the experts map {known}"


class Stacks:
    """Collects the tensors of one file that are of whole stacks of experts, by their headers."""

    def __init__(self, config: AdapterConfig, modules: Modules, max_rank: int | None) -> None:
        self._config, self._modules, self._max_rank = config, modules, max_rank
        self._found: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}

    def take(self, name: str, entry: Any) -> bool:
        """Whether the tensor is of a stack; raises `InvalidRequest` for one that none has."""
        key = parse_key(name)
        module = None if key is None else self._modules.find(unwrapped(key.module))
        if key is None or module is None or self._modules.stack(module) is None:
            return False
        if key.kind not in ("a", "b"):
            raise wrong(name, "isn't supported for a module of this kind")
        check_entry(name, entry)
        self._found.setdefault(key.module, {})[key.kind] = name, tuple(entry.get_shape())
        return True

    def pairs(self) -> list[tuple[str, str, StackPair]]:
        """The names of each A and B, and what they are.

        Raises `InvalidRequest` for one without the other, or of other shapes.
        """
        found, known = [], set()
        for module, kinds in self._found.items():
            name = next(iter(kinds.values()))[0]
            if len(kinds) != 2:
                raise wrong(name, "has no partner: a and b go together")
            (a, a_shape), (b, b_shape) = kinds["a"], kinds["b"]
            stack = self._modules.stack(self._modules.find(unwrapped(module)) or "")
            pair = (
                "is of no experts"
                if stack is None
                else pair_of(stack, self._config, module, a_shape, b_shape)
            )
            if isinstance(pair, str):
                raise wrong(a, pair)
            if (pair.stack.at, pair.projection) in known:
                raise wrong(a, "changes what another tensor changes too")
            check_rank(pair.rank, self._max_rank)
            known.add((pair.stack.at, pair.projection))
            found.append((a, b, pair))
        return found
