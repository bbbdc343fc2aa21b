"""Triton's interpreter without what it does in vain: the same results in a fraction of the time.

For each call of a function within a kernel it looks through all of `triton.language` for what to
patch, though the launch has patched it; it works out for each sum of integers whether it
overflows, though only a debug mode that is off would say so; it lists all types to find one, and
compares names with all there are; it writes a number out as a block beside a block, which numpy
does by itself; for each result it builds its shape, its type and a name for that anew, of which
there are few; it asks for a kernel's signature at each launch, and copies each tensor's whole
storage onto itself behind it, for they may have been on a device; and it sorts by Triton's network,
whose steps are many small operations.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from tests.interpreter_operators import FUNCTIONS, NO_SHAPE, NUMBERS, OPERATORS

_POINTER = np.dtype(np.uint64)
_interpreted_patch = interpreter._patch_lang


@functools.cache
def _patches() -> list[tuple[Any, str, Any]]:
    """(object, attribute, what the interpreter puts there), for `tl` and `tl.core`."""
    anywhere = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    scope = _interpreted_patch(anywhere)
    changes = {(id(obj), name): (obj, name, vars(obj)[name]) for obj, name, _ in scope._changes}
    scope.restore()
    changes[id(tl.dtype), "to_ir"] = tl.dtype, "to_ir", _to_ir
    return [(obj, name, _quick(obj, name, _direct(new))) for obj, name, new in changes.values()]


def _quick(obj: Any, name: str, new: Any) -> Any:
    """What is there for most operands, before what is there for all."""
    quick = (OPERATORS if obj is tl.tensor else FUNCTIONS if obj in (tl, tl.core) else {}).get(name)
    return quick(new) if quick is not None else new


def _direct(new: Any) -> Any:
    """A function of the language that is handed the interpreter's semantics at once."""
    member = (getattr(new, "__kwdefaults__", None) or {}).get("member")
    baseline = getattr(member, "__wrapped__", None)
    if baseline is None:
        return new
    semantic = interpreter.interpreter_semantic

    def call(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
        return baseline(*args, _semantic=semantic, **kwargs)

    return call


def _to_ir(self: tl.dtype, builder: Any) -> tl.dtype:
    """A type is its own here: the interpreter's signs are those of the type."""
    return self


class _Scope:
    """What is patched at the first launch, and stays: to set it anew at each would take a twentieth
    of all, and Python would forget each time where it finds what kernels call."""

    patched = False

    def __init__(self) -> None:
        if not _Scope.patched:
            _Scope.patched = True
            for obj, name, new in _patches():
                setattr(obj, name, new)

    def restore(self) -> None:
        """Nothing: all kernels of this process are interpreted."""


@functools.cache
def _parameters(fn: Any) -> tuple[tuple[str, ...], dict[str, Any], frozenset[str]]:
    """A kernel's parameters, their defaults, and which of them are constants."""
    parameters = inspect.signature(fn).parameters
    defaults = {
        name: parameter.default
        for name, parameter in parameters.items()
        if parameter.default is not parameter.empty
    }
    constants = interpreter.GridExecutor(fn, list(parameters), ()).constexprs
    return tuple(parameters), defaults, frozenset(constants)


#: What is given to a kernel as it is.
_HOST_TYPES = frozenset({int, float, bool, str, type(None)})


def _is_on_host(argument: Any) -> bool:
    return isinstance(argument, torch.Tensor) and argument.is_cpu


_interpreted_launch = interpreter.GridExecutor.__call__


def _launch(self: Any, *args: Any, **kwargs: Any) -> None:
    """`GridExecutor.__call__` where all tensors are in this process's memory."""
    names, defaults, constants = _parameters(self.fn)
    arguments = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
    is_on_host = all(
        type(argument) in _HOST_TYPES or _is_on_host(argument) for argument in arguments.values()
    )
    if (
        self.pre_run_hooks
        or not is_on_host
        or len(args) > len(names)
        or not arguments.keys() >= {*names}
    ):
        _interpreted_launch(self, *args, **kwargs)
        return
    _Scope()
    called = {
        name: arguments[name] if name in constants else interpreter._implicit_cvt(arguments[name])
        for name in names
    }
    grid = self.grid(called) if callable(self.grid) else self.grid
    sizes = (*grid, 1, 1)[:3]
    builder = interpreter.interpreter_builder
    builder.set_grid_dim(*sizes)
    for grid_index in np.ndindex(*sizes):
        builder.set_grid_idx(*grid_index)
        try:
            self.fn(**called)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error


_interpreted_dtype = functools.cache(interpreter._get_np_dtype)


def _np_dtype(dtype: tl.dtype) -> np.dtype[Any]:
    """numpy's type of an element; types are equal by their names, and blocks have many."""
    element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
    return _POINTER if isinstance(element, tl.pointer_type) else _interpreted_dtype(element)


@functools.cache
def _parts(shape: tuple[int, ...]) -> tuple[Any, int, str, Any, Any]:
    """What a block of this shape has of it: shape, elements, name; and a tensor, as constants."""
    baseline_path = tl.block_type.__new__(tl.block_type)
    _interpreted_block(baseline_path, tl.int1, list(shape))
    constants = tl.core.tuple([tl.constexpr(size) for size in shape])
    name = baseline_path.name.removesuffix(f"{tl.int1}>")
    return (
        baseline_path.shape,
        baseline_path.numel,
        name,
        constants,
        tl.constexpr(baseline_path.numel),
    )


_interpreted_block: Callable[..., None] = tl.block_type.__init__
_ONE = tl.constexpr(1)


def _block(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
    """`block_type.__init__`."""
    sizes = tuple([s.value if isinstance(s, tl.constexpr) else s for s in shape])
    self.element_ty = element_ty
    self.shape, self.numel, name, *_ = _parts(sizes)
    self.name = f"{name}{element_ty}>"


def _tensor(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
    """`tensor.__init__`."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    if isinstance(type, tl.block_type):
        _, _, _, self.shape, self.numel = _parts(tuple(type.shape.values))
    else:
        self.shape, self.numel = NO_SHAPE, _ONE


_OFFSETS = ("int32", "int64")
_interpreted_check = TritonSemantic.binary_op_type_checking_impl


def _check(self: Any, lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Two operands of a type: nothing is promoted; and a pointer with an offset.

    A small number beside a tensor takes the tensor's type.
    """
    remaining_path, right = getattr(lhs, "dtype", None), getattr(rhs, "dtype", None)
    if remaining_path is not None and right is not None:
        name = right.name
        if remaining_path.name == name and name in NUMBERS:
            return _of_one_shape(self, lhs, rhs)
        if name in _OFFSETS and isinstance(remaining_path, tl.pointer_type) and args and args[0]:
            return _of_one_shape(self, lhs, rhs)
    elif (
        remaining_path is not None
        and type(rhs) in NUMBERS.get(remaining_path.name, ())
        and abs(rhs) < 2**31
    ):
        return _of_one_shape(self, lhs, _constant(cast(Any, type(rhs)), rhs, remaining_path.name))
    elif right is not None and type(lhs) in NUMBERS.get(right.name, ()) and abs(lhs) < 2**31:
        return _of_one_shape(self, _constant(cast(Any, type(lhs)), lhs, right.name), rhs)
    return _interpreted_check(self, lhs, rhs, *args, **kwargs)


def _of_one_shape(self: Any, lhs: tl.tensor, rhs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """By their types. What they hold, numpy broadcasts in the operation that comes next."""
    if lhs.shape is rhs.shape:  # the same objects where they are equal
        return lhs, rhs
    if lhs.shape is NO_SHAPE:
        return tl.tensor(lhs.handle, rhs.type.with_element_ty(lhs.dtype)), rhs
    if rhs.shape is NO_SHAPE:
        return lhs, tl.tensor(rhs.handle, lhs.type.with_element_ty(rhs.dtype))
    sizes = _joined(tuple(lhs.type.shape.values), tuple(rhs.type.shape.values))
    if sizes is None:  # which says what is wrong
        return self.broadcast_impl_value(lhs, rhs)
    return tuple(tl.tensor(x.handle, tl.block_type(x.dtype, sizes)) for x in (lhs, rhs))


@functools.cache
def _joined(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape of both, None where they are of several lengths or don't go together."""
    if len(one) != len(other):
        return None
    if any(a != b and 1 not in (a, b) for a, b in zip(one, other, strict=True)):
        return None
    return tuple(max(a, b) for a, b in zip(one, other, strict=True))


@functools.lru_cache(1000)
def _constant(kind: type, value: float, dtype: str) -> tl.tensor:
    """Nothing writes into a constant."""
    return interpreter.interpreter_semantic.scalar_constant(value, tl.dtype(dtype))


def _sort(x: tl.tensor, dim: Any = None, descending: Any = False) -> tl.tensor:
    """`tl.sort` of the last dimension."""
    data = np.sort(x.handle.data, axis=-1)
    if descending:
        data = np.ascontiguousarray(data[..., ::-1])
    return tl.tensor(interpreter.TensorHandle(data, x.handle.dtype), x.type)


def quicken() -> None:
    """For this process."""
    if tl.block_type.__init__ is _block:
        return
    tl.block_type.__init__, tl.tensor.__init__ = _block, _tensor
    TritonSemantic.binary_op_type_checking_impl = _check

    tl.block_type.to_ir = tl.pointer_type.to_ir = _to_ir
    tl.sort = _sort
    interpreter._get_np_dtype = _np_dtype
    interpreter._patch_lang = lambda fn: _Scope()
    interpreter.GridExecutor.__call__ = _launch
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
