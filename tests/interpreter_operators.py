"""Operators of Triton's interpreter where there is nothing to find out: one call of numpy each.

Operands of one type, a pointer and an offset, a number beside a tensor, loads and stores through
pointers of the mask's shape: that is nearly all that kernels do, and Triton asks a dozen questions
about each. Whatever else comes goes to Triton's own function, and so do errors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

Handle = interpreter.TensorHandle
#: Numbers of Python that a type takes as they are, by its name.
NUMBERS: dict[str, tuple[type, ...]] = {"fp32": (int, float), "int32": (int,), "int64": (int,)}
_INTEGERS: dict[str, tuple[type, ...]] = {"int1": (), "int32": (int,), "int64": (int,)}
_OFFSETS = ("int32", "int64")
_SMALL = 2**31
NO_SHAPE = tl.core.tuple([])
#: A shape's sizes by its `id`: `tests.interpreter` has one for each, and keeps it.
_bools: dict[int, tl.block_type] = {}


def tensor(data: np.ndarray[Any, Any], kind: tl.dtype, type_: tl.dtype, like: Any) -> tl.tensor:
    """Of a block's or a number's type, and of the shape that another tensor has.

    Args:
        kind: the type that Triton's interpreter notes beside the data.
    """
    handle = Handle.__new__(Handle)
    handle.data, handle.dtype, handle.attr = data, kind, {}
    tensor = tl.tensor.__new__(tl.tensor)
    tensor.handle, tensor.type, tensor.dtype = handle, type_, type_.scalar
    tensor.shape, tensor.numel = like.shape, like.numel
    return tensor


def _bool(like: Any) -> tl.dtype:
    """The type of a truth for each value of a tensor."""
    if like.shape is NO_SHAPE:
        return tl.int1
    key = id(like.shape)
    if key not in _bools:
        _bools[key] = tl.block_type(tl.int1, [*like.type.shape])
    return _bools[key]


def _wide(one: tl.tensor, other: tl.tensor) -> tl.tensor | None:
    """Which of two has the shape of a result, if one has."""
    if one.shape is other.shape or other.shape is NO_SHAPE:
        return one
    return other if one.shape is NO_SHAPE else None


def _fits(number: Any, numbers: tuple[type, ...]) -> bool:
    kind = type(number)
    return kind in numbers and (kind is float or -_SMALL < number < _SMALL)


def _operator(
    baseline: Any, operation: Any, kinds: dict[str, tuple[type, ...]], truths: bool, swapped: bool
) -> Callable[..., Any]:
    """One of two operands.

    Args:
        plain: Triton's own.
        truths: it compares.
        swapped: the tensor stands on the right.
    """

    def call(self: tl.tensor, other: Any, _semantic: Any = None) -> Any:
        name = self.dtype.name
        if name not in kinds:
            return baseline(self, other)
        if type(other) is tl.constexpr:
            other = other.value
        if type(other) is tl.tensor:
            wide = _wide(self, other)
            if other.dtype.name != name or wide is None:
                return baseline(self, other)
            value = other.handle.data
        elif _fits(other, kinds[name]):
            wide, value = self, other
        else:
            return baseline(self, other)
        mine = self.handle.data
        data = operation(value, mine) if swapped else operation(mine, value)
        return tensor(data, self.handle.dtype, _bool(wide) if truths else wide.type, wide)

    return call


def _add(baseline: Any) -> Callable[..., Any]:
    """Numbers; and a pointer with offsets."""
    numbers = _operator(baseline, np.add, NUMBERS, truths=False, swapped=False)

    def call(self: tl.tensor, other: Any, _semantic: Any = None) -> Any:
        pointer = self.dtype
        if type(pointer) is not tl.pointer_type:
            return numbers(self, other)
        if type(other) is not tl.tensor or other.dtype.name not in _OFFSETS:
            return baseline(self, other)
        wide = _wide(self, other)
        if wide is None:
            return baseline(self, other)
        size = max(1, pointer.element_ty.primitive_bitwidth // 8)
        data = self.handle.data + size * other.handle.data.astype(np.uint64)
        type_ = self.type if wide is self else wide.type.with_element_ty(pointer)
        return tensor(data, self.handle.dtype, type_, wide)

    return call


def _divide(baseline: Any) -> Callable[..., Any]:
    """Whole numbers, towards zero."""

    def divided(one: Any, other: Any) -> Any:
        return (one - np.fmod(one, other)) // other

    return _operator(baseline, divided, _PYTHON_INTEGERS, truths=False, swapped=False)


_PYTHON_INTEGERS: dict[str, tuple[type, ...]] = {"int32": (int,), "int64": (int,)}


def _item(baseline: Any) -> Callable[..., Any]:
    """`block[:, None]` and the like."""

    def call(self: tl.tensor, slices: Any, _semantic: Any = None) -> Any:
        data = self.handle.data
        every = type(slices) is tuple and all(s is None or s == slice(None) for s in slices)
        if not every or self.shape is NO_SHAPE or data.shape != tuple(self.type.shape):
            return baseline(self, slices)
        data = data[slices]
        return tl.tensor(Handle(data, self.dtype), tl.block_type(self.dtype, data.shape))

    return call


def _where(baseline: Any) -> Callable[..., Any]:
    def call(condition: Any, x: Any, y: Any, _semantic: Any = None) -> Any:
        if type(condition) is tl.tensor and condition.dtype.name == "int1":
            result = _chosen(condition, x, y)
            if result is not None:
                return result
        return baseline(condition, x, y)

    return call


def _chosen(condition: tl.tensor, x: Any, y: Any) -> tl.tensor | None:
    """None: that's for Triton to say."""
    tensors = [operand for operand in (x, y) if type(operand) is tl.tensor]
    name = tensors[0].dtype.name if tensors else ""
    if name not in NUMBERS:
        return None
    wide: Any = condition
    values = []
    for one_tensor in (x, y):
        if type(one_tensor) is tl.tensor and one_tensor.dtype.name == name:
            wide = _wide(wide, one_tensor)
            values.append(one_tensor.handle.data)
        elif _fits(one_tensor, NUMBERS[name]):
            values.append(one_tensor)
        else:
            return None
        if wide is None:
            return None
    kind = tensors[0].handle.dtype
    type_ = kind if wide.shape is NO_SHAPE else wide.type.with_element_ty(kind)
    return tensor(np.where(condition.handle.data, *values), kind, type_, wide)


@functools.cache
def _element(pointer: str, element: tl.dtype) -> np.dtype[Any] | None:
    """numpy's type of what is behind a pointer, None for truths, which are bytes there."""
    return None if element.name == "int1" else interpreter._get_np_dtype(element)


def _memory(pointer: Any, mask: Any) -> tuple[Any, Any, Any] | None:
    """numpy's type, addresses and mask of a load or a store; None: that's for Triton to say."""
    if type(pointer) is not tl.tensor or type(pointer.dtype) is not tl.pointer_type:
        return None
    kind = _element(pointer.dtype.name, pointer.dtype.element_ty)
    addresses = pointer.handle.data
    if mask is None:
        tensor = np.ones(addresses.shape, bool)
    elif (
        type(mask) is not tl.tensor
        or mask.dtype.name != "int1"
        or _wide(pointer, mask) is not pointer
    ):
        return None
    else:
        tensor = np.broadcast_to(mask.handle.data, addresses.shape)
    return None if kind is None else (kind, addresses, tensor)


def _load(baseline: Any) -> Callable[..., Any]:
    def call(pointer: Any, mask: Any = None, other: Any = None, **more: Any) -> Any:
        registered_memory = _memory(pointer, mask)
        if registered_memory is None or not _is_zero(other) or more.keys() - {"_semantic"}:
            return baseline(pointer, mask, other, **more)
        kind, addresses, tensor_type = registered_memory
        element = pointer.dtype.element_ty
        data = interpreter._interpreter.load(
            addresses, tensor_type, np.zeros(addresses.shape, kind), kind
        )
        type_ = element
        if pointer.shape is not NO_SHAPE:
            type_ = pointer.type.with_element_ty(element)
        return tensor(data, element, type_, pointer)

    return call


def _is_zero(other: Any) -> bool:
    """Of which a type's bits are all zeros."""
    return other is None or (type(other) in (int, float) and str(other) in ("0", "0.0"))


def _store(baseline: Any) -> Callable[..., Any]:
    def call(pointer: Any, value: Any, mask: Any = None, **more: Any) -> Any:
        registered_memory = _memory(pointer, mask)
        fits = (
            type(value) is tl.tensor
            and registered_memory is not None
            and not more.keys() - {"_semantic"}
        )
        if not fits or value.dtype.name != pointer.dtype.element_ty.name:
            return baseline(pointer, value, mask, **more)
        if _wide(pointer, value) is not pointer:
            return baseline(pointer, value, mask, **more)
        _, addresses, tensor_type = cast(Any, registered_memory)
        data = np.broadcast_to(value.handle.data, addresses.shape)
        interpreter._interpreter.store(addresses, data, tensor_type)
        return None

    return call


def _two(operation: Any, kinds: dict[str, Any], truths: bool = False, swapped: bool = False) -> Any:
    return lambda baseline: _operator(baseline, operation, kinds, truths, swapped)


#: Attribute of `tl.tensor` -> makes its operator out of Triton's.
OPERATORS: dict[str, Callable[[Any], Any]] = {
    "__add__": _add,
    "__radd__": _two(np.add, NUMBERS, swapped=True),
    "__sub__": _two(np.subtract, NUMBERS),
    "__rsub__": _two(np.subtract, NUMBERS, swapped=True),
    "__mul__": _two(np.multiply, NUMBERS),
    "__rmul__": _two(np.multiply, NUMBERS, swapped=True),
    "__floordiv__": _divide,
    "__and__": _two(np.bitwise_and, _INTEGERS),
    "__or__": _two(np.bitwise_or, _INTEGERS),
    "__lt__": _two(np.less, NUMBERS, truths=True),
    "__le__": _two(np.less_equal, NUMBERS, truths=True),
    "__gt__": _two(np.greater, NUMBERS, truths=True),
    "__ge__": _two(np.greater_equal, NUMBERS, truths=True),
    "__eq__": _two(np.equal, NUMBERS, truths=True),
    "__ne__": _two(np.not_equal, NUMBERS, truths=True),
    "__getitem__": _item,
}
#: The same of `tl`'s functions.
FUNCTIONS: dict[str, Callable[[Any], Any]] = {"where": _where, "load": _load, "store": _store}
