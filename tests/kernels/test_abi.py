"""Python's structs and functions are those of src/abi.h."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import pytest

from kernels.cpu import abi, build
from tools.abi import HEADER, LAYOUT, MODULE, Header, layout, module


@pytest.fixture(scope="module")
def header() -> Header:
    return Header(HEADER.read_text(encoding="utf-8"))


def test_the_generated_files_are_up_to_date(header: Header) -> None:
    assert MODULE.read_text(encoding="utf-8") == module(header)
    assert LAYOUT.read_text(encoding="utf-8") == layout(header)


def test_python_lays_structs_out_as_the_compiler_is_told(header: Header) -> None:
    assert len(header.structs) > 20
    for name in header.structs:
        struct = getattr(abi, name)
        offsets = {field: getattr(struct, field).offset for field, *_ in struct._fields_}
        assert offsets == {field: offset for field, _, offset in header.fields(name)}
        assert ctypes.sizeof(struct) == header.size(name)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("  int64_t window;", "  int64_t new_one, window;"),
        ("const void *q_norm, *k_norm;", "const void *k_norm, *q_norm;"),
        ("const double *top_p, *min_p;", "const double *bias, *top_p, *min_p;"),
        ("  int64_t num_state_blocks;\n};", "  int64_t num_state_blocks, more;\n};"),
        ("int quire_argmax(int64_t* out", "int quire_argmax(int32_t* out"),
    ],
    ids=["added", "swapped", "added to pointers", "added at the end", "argument of another type"],
)
def test_the_compiler_refuses_a_header_that_python_does_not_know(
    old: str, new: str, tmp_path: Path
) -> None:
    compiler = build.find_compiler()
    assert compiler is not None
    text = HEADER.read_text(encoding="utf-8")
    assert old in text
    for path in build.SOURCES.glob("*.h"):
        (tmp_path / path.name).write_text(path.read_text())
    (tmp_path / "sampling.cpp").write_text((build.SOURCES / "sampling.cpp").read_text())
    command = [compiler, "-std=c++17", "-w", "-fsyntax-only", str(tmp_path / "sampling.cpp")]
    subprocess.run(command, check=True)
    (tmp_path / HEADER.name).write_text(text.replace(old, new, 1))
    refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode
    assert re.search(r"run python -m tools\.abi|conflicting declaration", refused.stderr)
