"""A library whose structs aren't laid out as Python's is refused when it is loaded."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest

import kernels
from kernels.cpu import abi as structs
from kernels.cpu import build
from kernels.cpu.library import Library
from kernels.errors import KernelsUnavailable, StructMismatch
from tests.kernels.conftest import RUNNABLE, load

#: Changes of the sources: one to a struct, so that each can be looked at by itself.
EDITS = [
    ("decoder.h", "int64_t window;", "int64_t new_one, window;"),
    ("ops.h", "*q_norm, *k_norm;", "*k_norm, *q_norm;"),
    ("gate.h", "float limit, alpha;", "float limit; int alpha;"),
    ("step.h", "double *top_p,", "double *bias, *top_p,"),
    ("step.h", "  int64_t num_rows;", "  int64_t num_rows, more;"),
    (
        "lora.h",
        "  int64_t count;\n};\n\n// Where the",
        "  int64_t count, more;\n};\n\n// Where the",
    ),
    ("structs.cpp", "QUIRE_OPEN(LoraUse);", "QUIRE_OPEN(LoraUse);\n  QUIRE_FIELD(more);"),
    ("structs.cpp", "  list_norm(listing);", '  listing.open("Extra", 8);'),
]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a library that has nothing but structs, all of them of another version."""
    folder = tmp_path_factory.mktemp("structs")
    for path in (*build.SOURCES.glob("*.h"), build.SOURCES / "structs.cpp"):
        shutil.copy(path, folder)
    for file, old, new in EDITS:
        text = (folder / file).read_text()
        assert text.count(old) == 1
        (folder / file).write_text(text.replace(old, new))
    return folder


@pytest.fixture
def another_version(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That library is the one to be found. It's compiled once: headers take most of a second."""
    load(RUNNABLE[-1])
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(sources / "cache"))
    monkeypatch.setenv("QUIRE_CPU_ISA", RUNNABLE[-1])
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setattr(kernels, "_chosen", {})


@pytest.fixture
def of_another_version(another_version: None) -> str:
    """What that library says of its structs."""
    _, path, _ = build.best_library()
    tell = ctypes.CDLL(str(path)).quire_structs
    tell.restype = ctypes.c_char_p
    return tell().decode()


def with_one(struct: str, other: str) -> str:
    """What a sound library says, but of `struct` what `other` says."""

    def is_of(line: str) -> bool:
        return line.split()[0].partition(".")[0] == struct

    sound = load(RUNNABLE[-1]).library.structs().decode()  # type: ignore[attr-defined]
    lines = [line for line in sound.splitlines() if not is_of(line)]
    return "\n".join(lines + [line for line in other.splitlines() if is_of(line)])


@pytest.mark.parametrize(
    ("struct", "field"),
    [
        ("DecoderLayer", "window"),
        ("RopeArgs", "q_norm"),
        ("Activation", "alpha"),
        ("StepChoice", "top_p"),
        ("StepTables", None),
    ],
    ids=["added", "swapped", "of another kind", "added to pointers", "added at the end"],
)
def test_a_struct_that_differs_is_named_with_its_field(
    of_another_version: str, struct: str, field: str | None
) -> None:
    with pytest.raises(StructMismatch) as caught:
        structs.check_structs(with_one(struct, of_another_version))
    assert (caught.value.struct, caught.value.field) == (struct, field)
    assert (f"{struct}.{field} is " if field else f"{struct} is ") in str(caught.value)
    assert "doesn't go with this version of Quire" in str(caught.value)


@pytest.mark.parametrize(
    ("struct", "what"),
    [
        ("LoraUse", r"LoraUse\.more is .* missing in Python"),
        ("Norm", "Norm is missing in the library"),
        ("Extra", "Extra is missing in Python"),
    ],
)
def test_what_only_one_side_has_is_named(of_another_version: str, struct: str, what: str) -> None:
    with pytest.raises(StructMismatch, match=what):
        structs.check_structs(with_one(struct, of_another_version))


def test_no_other_kernels_stand_in_for_a_library_of_another_version(another_version: None) -> None:
    with pytest.raises(StructMismatch, match=r"Activation\.alpha"):
        Library()
    with pytest.raises(KernelsUnavailable, match=r"Activation\.alpha"):
        kernels.get("cpu")


@pytest.mark.parametrize("name", RUNNABLE)
def test_each_struct_is_listed_whole(name: str) -> None:
    listing = load(name).library.structs().decode()  # type: ignore[attr-defined]
    structs.check_structs(listing)
    listed = {line.split()[0].split(".")[0] for line in listing.splitlines()}
    assert listed == {struct.__name__ for struct in structs.STRUCTS}
    declared = {
        struct
        for struct in vars(structs).values()
        if isinstance(struct, type) and issubclass(struct, ctypes.Structure)
    }
    assert declared == set(structs.STRUCTS)
