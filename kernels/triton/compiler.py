"""Compiling kernels ahead of time, without a GPU: from a recorded launch to a cubin's figures."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TYPES = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}
_LAUNCH_OPTIONS = ("num_warps", "num_stages", "maxnreg")


@dataclass(frozen=True, slots=True)
class Compiled:
    """What became of one kernel.

    Attributes:
        registers: a thread; local: bytes a thread of spilled registers and local arrays;
            shared: bytes a program.
    """

    kernel: str
    registers: int
    local: int
    shared: int
    warps: int


def compile_launch(
    kernel: Any, args: tuple[Any, ...], options: dict[str, Any], arch: int
) -> Compiled:
    """Compile `kernel` as a launch with these arguments would, for compute capability arch / 10."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    launch_options = {name: options[name] for name in _LAUNCH_OPTIONS if name in options}
    values = dict(zip(kernel.arg_names, args))
    values |= {name: value for name, value in options.items() if name not in _LAUNCH_OPTIONS}
    for index, name in enumerate(kernel.arg_names):
        value = values[name]
        constexpr = kernel.params[index].is_constexpr
        if constexpr or value is None or (isinstance(value, int) and value == 1):
            signature[name] = "constexpr"
            constants[(index,)] = value
            continue
        signature[name], aligned = _type_of(value)
        if aligned:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch_options)
    registers, local = _resources(built.asm["cubin"])
    metadata = built.metadata
    return Compiled(kernel.__name__, registers, local, metadata.shared, metadata.num_warps)


def _type_of(value: Any) -> tuple[str, bool]:
    """The type of an argument, and whether it's known to be a multiple of 16."""
    if isinstance(value, Tensor):
        return "*" + TYPES[value.dtype], True
    if isinstance(value, int):
        return ("i32" if -(1 << 31) <= value < 1 << 31 else "i64"), value % 16 == 0
    return "fp32", False


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory a thread, as cuobjdump reads them from the cubin."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", text)
    if found is None:
        raise ValueError(f"cuobjdump says nothing of registers: {text[:200]!r}")
    registers, stack, local = (int(part) for part in found.groups())
    return registers, max(stack, local)
