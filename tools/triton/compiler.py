"""Compiling kernels ahead of time, without a GPU: from a recorded launch to a cubin's figures."""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from tools.triton.sass import Code, programs_a_processor, read


@dataclass(frozen=True, slots=True)
class Compiled:
    """Figures of one compiled kernel.

    Attributes:
        registers: a thread; local: bytes a thread of spilled registers and local arrays;
            shared: bytes a program.
        programs: that run on one processor side by side.
        waits: of the main loop's copies to shared memory, how many groups may still be under way
            where it waits for one (in the IR, before machine code); -1: it doesn't wait.
    """

    kernel: str
    registers: int
    local: int
    shared: int
    warps: int
    programs: int
    waits: int
    code: Code


@functools.cache
def _binder(kernel: Any, arch: int) -> tuple[Any, Any]:
    backend = make_backend(GPUTarget("cuda", arch, 32))
    return backend, create_function_from_signature(kernel.signature, kernel.params, backend)


def specialisation(
    kernel: Any, args: tuple[Any, ...], options: dict[str, Any], arch: int
) -> tuple[Any, ...]:
    """What a launch with these arguments is compiled for: equal ones share a binary.

    Triton's own: types, constants, integers that are 1 or multiples of 16, addresses that are.
    """
    _, bind = _binder(kernel, arch)
    _, spec, rest = bind(*args, **options)
    constants = {name: value for name, value in options.items() if name in kernel.arg_names}
    return kernel.__name__, str(spec), str(sorted(constants.items())), str(sorted(rest.items()))


def compile_launch(
    kernel: Any, args: tuple[Any, ...], options: dict[str, Any], arch: int, disassemble: bool = True
) -> Compiled:
    """Compile `kernel` as a launch with these arguments would, for compute capability arch / 10.

    Without `disassemble`, which takes longest of all for a binary from Triton's cache, `code` is
    empty.
    """
    backend, bind = _binder(kernel, arch)
    bound, spec, _ = bind(*args, **options)
    parsed, signature, constants, attributes = kernel._pack_args(
        backend, options, bound, spec, None
    )
    source = ASTSource(kernel, signature, constants, attributes)
    target = GPUTarget("cuda", arch, 32)
    built = triton.compile(source, target=target, options=parsed.__dict__)
    registers, local, code = _figures(built.asm["cubin"], disassemble)
    metadata = built.metadata
    return Compiled(
        kernel.__name__, registers, local, metadata.shared, metadata.num_warps,
        programs_a_processor(arch, registers, metadata.shared, metadata.num_warps),
        _waits(built.asm["ttgir"]), code,
    )  # fmt: skip


def _waits(ttgir: str) -> int:
    """Return the minimum number of pending copies that a wait within a loop allows."""
    depth, waits = 0, []
    indents: list[int] = []
    for line in ttgir.splitlines():
        indent = len(line) - len(line.lstrip())
        while indents and indent <= indents[-1] and line.strip().startswith("}"):
            indents.pop()
            depth -= 1
        if "scf.for" in line or "scf.while" in line:
            indents.append(indent)
            depth += 1
        wait = re.search(r"async_wait.*num = (\d+)", line)
        if wait is not None and depth:
            waits.append(int(wait[1]))
    return min(waits, default=-1)


def _figures(cubin: bytes, disassemble: bool) -> tuple[int, int, Code]:
    """Registers and bytes of local memory a thread, and the machine code, as cuobjdump has them."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        options = ("-res-usage", "-sass") if disassemble else ("-res-usage",)
        usage, *text = (
            subprocess.run(
                [str(tool), option, file.name], capture_output=True, text=True, check=True
            ).stdout
            for option in options
        )
    match = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", usage)
    if match is None:
        raise ValueError(f"cuobjdump says nothing of registers: {usage[:200]!r}")
    registers, stack, local = (int(part) for part in match.groups())
    return registers, max(stack, local), read("".join(text))
