"""A library whose structs aren't laid out as Python's is refused when it is loaded."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest

import kernels
from kernels.cpu import build, structs
from kernels.cpu.errors import StructMismatch
from kernels.cpu.library import Library
from kernels.errors import KernelsUnavailable
from tests.kernels.conftest import RUNNABLE, load


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a library is built from that has nothing but the structs; for `edit` to change."""
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("QUIRE_CPU_ISA", RUNNABLE[-1])
    monkeypatch.setattr(kernels, "_chosen", {})
    folder = tmp_path / "src"
    folder.mkdir()
    for path in (*build.SOURCES.glob("*.h"), build.SOURCES / "structs.cpp"):
        shutil.copy(path, folder)
    monkeypatch.setattr(build, "SOURCES", folder)
    return folder


def edit(path: Path, old: str, new: str) -> None:
    """Replace a line that there must be."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("file", "old", "new", "struct", "field"),
    [
        ("decoder.h", "int64_t window;", "int64_t new_one, window;", "DecoderLayer", "window"),
        ("decoder.h", "*q_norm, *k_norm;", "*k_norm, *q_norm;", "DecoderLayer", "q_norm"),
        ("gate.h", "float limit, alpha;", "float limit; int alpha;", "Activation", "alpha"),
        ("step.h", "double *top_p,", "double *bias, *top_p,", "StepChoice", "top_p"),
        ("step.h", "  int64_t num_rows;", "  int64_t num_rows, more;", "StepTables", None),
    ],
    ids=["added", "swapped", "of another kind", "added to pointers", "added at the end"],
)  # fmt: skip
def test_a_struct_that_differs_is_named_with_its_field(
    sources: Path, file: str, old: str, new: str, struct: str, field: str | None
) -> None:
    edit(sources / file, old, new)
    with pytest.raises(StructMismatch) as caught:
        Library()
    assert (caught.value.struct, caught.value.field) == (struct, field)
    assert (f"{struct}.{field} is " if field else f"{struct} is ") in str(caught.value)
    assert "doesn't go with this version of Quire" in str(caught.value)


def test_a_field_that_python_lacks_is_named(sources: Path) -> None:
    edit(sources / "decoder.h", "  int64_t group;", "  int64_t group, span;")
    edit(sources / "structs.cpp", "QUIRE_FIELD(group);", "QUIRE_FIELD(group);QUIRE_FIELD(span);")
    with pytest.raises(StructMismatch, match=r"DecoderLayer\.span is .* missing in Python"):
        Library()


def test_a_struct_that_only_one_side_has_is_named(sources: Path) -> None:
    edit(sources / "structs.cpp", "  list_norm(listing);", '  listing.open("Extra", 8);')
    with pytest.raises(StructMismatch, match="Norm is missing in the library"):
        Library()
    edit(
        sources / "structs.cpp", '  listing.open("Extra', '  list_norm(listing);listing.open("Extra'
    )
    with pytest.raises(StructMismatch, match="Extra is missing in Python"):
        Library()


def test_no_other_kernels_stand_in_for_a_library_of_another_version(sources: Path) -> None:
    edit(sources / "decoder.h", "int64_t window;", "int64_t new_one, window;")
    with pytest.raises(KernelsUnavailable, match=r"DecoderLayer\.window"):
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
