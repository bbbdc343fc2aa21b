"""`python -m tools.abi`: write what Python and the compiler know of kernels/cpu/src/abi.h.

With `--check` the files are compared, and nothing is written.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from pathlib import Path

from cffi import FFI

KERNELS = Path(__file__).resolve().parents[1] / "kernels" / "cpu"
HEADER = KERNELS / "src" / "abi.h"
MODULE = KERNELS / "abi.py"
LAYOUT = KERNELS / "src" / "abi_layout.h"

CTYPES = {"int64_t": "L", "int32_t": "N", "int": "N", "float": "F", "double": "D", "void": "None"}
PROLOGUE = '''\
"""The library's structs and functions: `python -m tools.abi` writes this from abi.h."""
# fmt: off

from __future__ import annotations

import ctypes
from typing import Any

L, N, F, D, P = ctypes.c_int64, ctypes.c_int32, ctypes.c_float, ctypes.c_double, ctypes.c_void_p
'''


class Header:
    """The declarations of a header.

    Attributes:
        structs: names of its structs, in order.
        functions: names of its functions, in order.
    """

    def __init__(self, text: str) -> None:
        text = re.sub(r"^#ifdef __cplusplus\n.*?^#endif\n", "", text, flags=re.M | re.S)
        text = re.sub(r"^#.*\n", "", text, flags=re.M)
        self.structs = re.findall(r"^struct (\w+) \{", text, flags=re.M)
        self.functions = re.findall(r"^\w+\*? (quire_\w+)\(", text, flags=re.M)
        names = dict.fromkeys(re.findall(r"^struct (\w+)", text, flags=re.M))
        typedefs = "".join(f"typedef struct {name} {name};\n" for name in names)
        # cffi only returns types of typedefs.
        text = re.sub(r"^(?=\w+\*? quire_)", "typedef ", text, flags=re.M)
        self._ffi = FFI()
        self._ffi.cdef(typedefs + text)

    def fields(self, struct: str) -> list[tuple[str, str, int]]:
        """Return names, ctypes types, and byte offsets of a struct's fields."""
        fields = self._ffi.typeof(struct).fields
        return [(name, _ctypes_name(field.type), field.offset) for name, field in fields]

    def size(self, struct: str) -> int:
        """Size of a struct in bytes."""
        return self._ffi.sizeof(struct)

    def signature(self, function: str) -> tuple[str, list[str]]:
        """Return ctypes types of a function's result and arguments."""
        pointer = self._ffi.typeof(f"{function} *")
        return _ctypes_name(pointer.result), [_ctypes_name(argument) for argument in pointer.args]


def _ctypes_name(ctype: FFI.CType) -> str:
    if ctype.kind == "pointer":
        return "P"
    return ctype.cname if ctype.kind == "struct" else CTYPES[ctype.cname]


def module(header: Header) -> str:
    """The text of kernels/cpu/abi.py."""
    text = PROLOGUE
    for struct in header.structs:
        # A field isn't broken at its own space.
        fields = ", ".join(f'("{name}",~{ctype})' for name, ctype, _ in header.fields(struct))
        lines = textwrap.wrap(f"{fields},", 92, break_long_words=False)
        body = "".join(f"        {line}\n" for line in lines).replace("~", " ")
        text += f"\n\nclass {struct}(ctypes.Structure):\n    _fields_ = [\n{body}    ]\n"
    text += "\n\n#: Result and arguments of each function.\n"
    text += "FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {\n"
    for function in header.functions:
        result, arguments = header.signature(function)
        text += f'    "{function}": ({result}, [{", ".join(arguments)}]),\n'
    return text + "}\n"


def layout(header: Header) -> str:
    """The text of kernels/cpu/src/abi_layout.h."""
    text = (
        "// Where Python writes each field: `python -m tools.abi` writes this from abi.h.\n"
        "#pragma once\n\n#include <cstddef>\n\n"
        "#define QUIRE_SIZE(T, size) \\\n"
        '  static_assert(sizeof(T) == size, "run python -m tools.abi")\n'
        "#define QUIRE_OFFSET(T, field, offset) \\\n"
        '  static_assert(offsetof(T, field) == offset, "run python -m tools.abi")\n\n'
        "namespace quire {\n"
    )
    for struct in header.structs:
        text += f"\nQUIRE_SIZE({struct}, {header.size(struct)});\n"
        for name, _, offset in header.fields(struct):
            text += f"QUIRE_OFFSET({struct}, {name}, {offset});\n"
    return text + "\n}  // namespace quire\n\n#undef QUIRE_SIZE\n#undef QUIRE_OFFSET\n"


def main() -> int:
    """Return 1 if `--check` finds a file that differs."""
    parser = argparse.ArgumentParser(prog="python -m tools.abi", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare the files; write nothing")
    check = parser.parse_args().check
    header = Header(HEADER.read_text(encoding="utf-8"))
    outdated = False
    for path, text in ((MODULE, module(header)), (LAYOUT, layout(header))):
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            outdated = True
            print(f"{path.name} {'is out of date' if check else 'written'}")
            if not check:
                path.write_text(text, encoding="utf-8")
    return int(check and outdated)


if __name__ == "__main__":
    raise SystemExit(main())
