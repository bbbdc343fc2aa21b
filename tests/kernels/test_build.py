"""How the library is built, found and done without."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

import kernels
from engine.system import cache_folder
from kernels.cpu import CpuKernels, CpuKernelsUnavailable, build, features
from kernels.cpu import build as workplace
from kernels.cpu.library import Library
from kernels.errors import KernelsUnavailable

#: Processes of their own would import torch first.
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and a chooser that has chosen nothing yet."""
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kernels, "_chosen", {})
    return tmp_path


@pytest.fixture
def tiny(cache, monkeypatch):
    """A library of one small source, so that building takes no time."""
    sources = cache / "src"
    sources.mkdir()
    (sources / "one.cpp").write_text('#include "two.h"\nextern "C" int one() { return TWO; }\n')
    (sources / "two.h").write_text("#define TWO 2\n")
    monkeypatch.setattr(build, "SOURCES", sources)
    return sources


def works_without_the_library(caplog):
    caplog.set_level(logging.INFO)
    chosen = kernels.get("cpu")
    assert chosen.name == "reference"
    assert "plain torch" in caplog.text
    x = torch.randn(2, 32)
    torch.testing.assert_close(chosen.silu_and_mul(x).shape, (2, 16))
    return chosen


def test_a_broken_compiler_costs_only_speed(cache, monkeypatch, caplog):
    broken = cache / "broken"
    broken.write_text("#!/bin/sh\necho 'internal compiler error: out of luck' >&2\nexit 4\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    chosen = works_without_the_library(caplog)
    assert "out of luck" in chosen.why
    assert "out of luck" in caplog.text
    assert not list(cache.glob("*.so"))


def test_a_missing_compiler_costs_only_speed(cache, monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no C++ compiler" in works_without_the_library(caplog).why


def test_where_the_cache_cannot_be_written_a_process_builds_for_itself(cache, tiny, monkeypatch):
    (cache / "file").write_text("")
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(cache / "file" / "below"))
    path, how = build.library_for(features.choose("scalar"))
    assert how.startswith("built in")
    assert ctypes.CDLL(str(path)).one() == 2


def test_a_machine_that_cannot_be_written_at_all_costs_only_speed(cache, monkeypatch, caplog):
    (cache / "file").write_text("")
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(cache / "file" / "below"))
    monkeypatch.setattr(tempfile, "tempdir", str(cache / "file"))
    assert "can't build" in works_without_the_library(caplog).why


def test_a_damaged_library_costs_only_speed(cache, monkeypatch, caplog):
    def damaged(variant):
        path = cache / "damaged.so"
        path.write_text("not a library")
        return path, "from the cache"

    monkeypatch.setattr(build, "library_for", damaged)
    assert "can't be loaded" in works_without_the_library(caplog).why


def test_switched_off(cache):
    chosen = kernels.get("cpu", use_compiled=False)
    assert (chosen.name, chosen.why) == ("reference", "compiled kernels are switched off")
    assert kernels.get("cpu", use_compiled=False) is chosen


def test_it_is_built_once(tiny):
    variant = features.choose("scalar")
    path, how = build.library_for(variant)
    assert how.startswith("built in")
    assert build.library_for(variant) == (path, "from the cache")
    assert not list(path.parent.glob("build-*"))


@pytest.fixture
def noting(tiny, monkeypatch):
    """A compiler that notes its command lines, and refuses those that a pattern of a shell fits."""

    def refuse(pattern=""):
        compiler, noted = tiny.parent / "noting", tiny.parent / "noted"
        compiler.write_text(
            f'#!/bin/sh\necho "$*" >>{noted}\ncase "$*" in {pattern or "none"}) exit 1;; esac\n'
            'exec g++ "$@"\n'
        )
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))
        return noted

    (tiny / build.COMMON).write_text("#define TWO 2\n")
    (tiny / "one.cpp").write_text('extern "C" int one() { return TWO; }\n')
    return refuse


def test_the_header_that_sources_begin_with_is_read_once(noting):
    noted = noting()
    path, _ = build.library_for(features.choose("scalar"))
    assert ctypes.CDLL(str(path)).one() == 2
    lines = noted.read_text().splitlines()
    assert sum("c++-header" in line for line in lines) == 1
    assert all("-include" in line for line in lines if " -c " in line)


@pytest.mark.parametrize("pattern", ["*c++-header*", "*-include*-fsyntax-only*"])
def test_where_the_compiler_cannot_read_ahead_each_source_reads_by_itself(noting, tiny, pattern):
    (tiny / "one.cpp").write_text(
        f'#include "{build.COMMON}"\nextern "C" int one() {{ return TWO; }}\n'
    )
    noted = noting(pattern)
    path, _ = build.library_for(features.choose("scalar"))
    assert ctypes.CDLL(str(path)).one() == 2
    assert not [
        line for line in noted.read_text().splitlines() if "-include" in line and " -c " in line
    ]


def test_a_changed_source_is_built_anew(tiny):
    variant = features.choose("scalar")
    initial = build.library_for(variant)[0]
    (tiny / "two.h").write_text("#define TWO 3\n")
    assert build.library_for(variant)[0] != initial


def test_a_library_built_before_needs_no_compiler(tiny, monkeypatch):
    variant = features.choose("scalar")
    path, _ = build.library_for(variant)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.library_for(variant) == (path, "from the cache")


@pytest.fixture
def old_compiler(tiny, monkeypatch):
    """A compiler that knows AVX2 and nothing newer, on a CPU that has all."""
    compiler = tiny.parent / "old"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *avx512*|*avxvnni*) echo unknown option >&2; exit 1;; esac\n'
        'exec g++ "$@"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.delenv("QUIRE_CPU_ISA", raising=False)
    flags = frozenset({*features.NEEDS["avx512"], "avx512_bf16", "avx_vnni"})
    monkeypatch.setattr(features, "cpu_flags", lambda: flags)


def test_a_compiler_older_than_the_cpu_builds_what_it_can(old_compiler):
    variant, path, how = build.best_library()
    assert variant.isa == "avx2"
    assert "kernels-avx2-" in path.name
    assert how.startswith("built in")


def test_a_forced_instruction_set_that_the_compiler_does_not_know_is_refused(old_compiler):
    with pytest.raises(CpuKernelsUnavailable, match="unknown option"):
        build.best_library("avx2_vnni")


def test_what_was_shipped_needs_no_compiler_and_no_cache(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "SHIPPED", tmp_path / "shipped")
    paths = build.build_all()
    assert len(paths) == 6
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "empty"))
    for isa in features.NEEDS:
        if set(features.NEEDS[isa]) <= features.cpu_flags():
            path, how = build.best_library(isa)[1:]
            assert (path in paths, how) == (True, "shipped")


def test_the_best_library_that_was_built_ahead_is_used(tiny, monkeypatch):
    monkeypatch.delenv("QUIRE_CPU_ISA", raising=False)
    path, _ = build.library_for(features.choose("scalar"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.best_library()[1:] == (path, "from the cache")


def test_candidates_go_from_the_best_to_what_runs_anywhere(monkeypatch):
    monkeypatch.delenv("QUIRE_CPU_ISA", raising=False)
    flags = frozenset({*features.NEEDS["avx512"], "avx512_bf16"})
    monkeypatch.setattr(features, "cpu_flags", lambda: flags)
    candidates = features.candidates()
    assert [variant.isa for variant in candidates] == [
        "avx512", "avx512", "avx512_core", "avx2", "scalar",
    ]  # fmt: skip
    assert "avx512_bf16" in candidates[0].features
    assert "avx512_bf16" not in candidates[1].features
    assert [variant.isa for variant in features.candidates("avx2")] == ["avx2"]


def test_a_library_that_others_can_write_is_not_loaded(tiny):
    variant = features.choose("scalar")
    path, _ = build.library_for(variant)
    path.chmod(0o777)
    assert build.library_for(variant)[1].startswith("built in")
    assert not path.stat().st_mode & 0o022


@pytest.mark.parametrize("num_bytes", [0, 1, 5000, -1])
def test_a_library_with_a_part_missing_is_built_anew(tiny, num_bytes):
    """Loading one may end the process: a full disk or a lost machine leaves such files."""
    path, _ = build.library_for(features.choose("scalar"))
    full_data = path.read_bytes()
    path.write_bytes(full_data[:num_bytes])
    assert build.library_for(features.choose("scalar"))[1].startswith("built in")
    assert path.read_bytes()[-build.SEAL_BYTES :] == build._seal(
        path.read_bytes()[: -build.SEAL_BYTES]
    )


def test_without_a_compiler_a_part_missing_costs_only_speed(tiny, monkeypatch):
    path, _ = build.library_for(features.choose("scalar"))
    path.write_bytes(path.read_bytes()[:5000])
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CpuKernelsUnavailable, match="no C"):
        build.library_for(features.choose("scalar"))


def test_two_processes_at_once_build_once(noting):
    noted = noting()
    running = [
        FORK.Process(target=build.library_for, args=(features.choose("scalar"),)) for _ in range(2)
    ]
    for process in running:
        process.start()
    for process in running:
        process.join()
    assert [process.exitcode for process in running] == [0, 0]
    assert sum(" -shared " in line for line in noted.read_text().splitlines()) == 1
    assert len(list(build.cache_dir().glob("*.so"))) == 1
    assert not list(build.cache_dir().glob("build-*"))


def test_a_user_without_a_home_costs_only_speed(cache, monkeypatch, caplog):
    monkeypatch.delenv("QUIRE_CACHE_DIR")

    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(build.Path, "home", nowhere)
    assert "QUIRE_CACHE_DIR is unset" in works_without_the_library(caplog).why


def test_sanitizers_are_builds_of_their_own(tiny, monkeypatch):
    variant = features.choose("scalar")
    baseline = build.flags_for(variant), build._digest(variant)
    monkeypatch.setenv(build.SANITIZE, "address")
    assert "-fsanitize=address,undefined" in build.flags_for(variant)
    assert build._digest(variant) != baseline[1]
    monkeypatch.setenv(build.SANITIZE, "memory")
    with pytest.raises(KernelsUnavailable, match="QUIRE_CPU_SANITIZE must be one of"):
        build.flags_for(variant)


def test_a_source_error_leaves_nothing_behind(tiny):
    (tiny / "one.cpp").write_text("this is no C++\n")
    with pytest.raises(CpuKernelsUnavailable, match="failed"):
        build.library_for(features.choose("scalar"))
    assert not list(build.cache_dir().glob("*.so"))


def test_the_best_instruction_set_is_chosen(monkeypatch):
    monkeypatch.delenv("QUIRE_CPU_ISA", raising=False)
    for flags, isa in (
        (set(features.NEEDS["avx512"]), "avx512"),
        (set(features.AVX512), "avx512_core"),
        ({*features.AVX2, "avx_vnni"}, "avx2_vnni"),
        (set(features.AVX2), "avx2"),
        ({"sse2"}, "scalar"),
    ):
        monkeypatch.setattr(features, "cpu_flags", lambda flags=flags: frozenset(flags))
        assert features.choose().isa == isa


def test_extras_are_used_where_the_cpu_has_them(monkeypatch):
    flags = {*features.NEEDS["avx512"], "avx512_bf16", "avx512vbmi"}
    monkeypatch.setattr(features, "cpu_flags", lambda: frozenset(flags))
    assert features.choose("avx512").flags[-2:] == ["-mavx512bf16", "-mavx512vbmi"]


def test_an_instruction_set_can_be_forced(monkeypatch):
    monkeypatch.setenv("QUIRE_CPU_ISA", "scalar")
    assert Library().isa == "scalar"
    assert CpuKernels().name == "cpu-scalar"


def test_an_instruction_set_that_cannot_run_is_refused(monkeypatch):
    monkeypatch.setenv("QUIRE_CPU_ISA", "avx1024")
    with pytest.raises(KernelsUnavailable, match="must be one of") as error:
        features.choose()
    assert error.value.param == "QUIRE_CPU_ISA"
    monkeypatch.setenv("QUIRE_CPU_ISA", "")
    assert features.choose().isa in features.NEEDS
    monkeypatch.setattr(features, "cpu_flags", frozenset)
    with pytest.raises(ValueError, match="lacks"):
        features.choose("avx2")


def test_it_can_be_built_ahead_of_time(tmp_path):
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\nwhile [ $# -gt 1 ]; do [ "$1" = -o ] && : >"$2"; shift; done\n')
    compiler.chmod(0o755)
    environment = {**os.environ, "QUIRE_CACHE_DIR": str(tmp_path), "CXX": str(compiler)}
    command = [sys.executable, "-m", "kernels.cpu.build"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    (built,) = tmp_path.glob("kernels-*.so")
    assert done.stdout.startswith(f"{built} built in")
    assert not done.stderr


def make_leftover(folder, *, hours):
    """A folder as a killed build leaves it."""
    folder.mkdir()
    (folder / "one.o").write_text("")
    then = time.time() - hours * 3600
    for path in (folder / "one.o", folder):
        os.utime(path, (then, then))


def test_what_killed_builds_left_goes_with_the_next_one(tiny):
    cache = build.cache_dir()
    make_leftover(cache / "build-old", hours=2)
    make_leftover(cache / "build-new", hours=0.5)
    make_leftover(cache / "build-written-to", hours=2)
    (cache / "build-written-to" / "two.o").write_text("")
    (cache / "build-link").symlink_to(tiny)
    os.utime(cache / "build-link", (1, 1), follow_symlinks=False)
    build.library_for(features.choose("scalar"))
    remaining_names = {path.name for path in cache.glob("build-*")}
    assert remaining_names == {"build-new", "build-written-to", "build-link"}
    assert list(tiny.iterdir())


def test_a_running_builds_folder_stays_however_old_it_is(cache):
    client = FORK.SimpleQueue()

    def hold():
        with workplace.workplace(cache) as folder:
            client.put(folder)
            signal.pause()

    running = FORK.Process(target=hold)
    running.start()
    folder = client.get()

    def acquire_two_hours_later():
        then = time.time() - 7200
        for path in (*folder.iterdir(), folder):
            os.utime(path, (then, then))
        workplace.remove_stale(cache)
        return folder.exists()

    try:
        assert acquire_two_hours_later()
    finally:
        running.kill()
        running.join()
    assert not acquire_two_hours_later()


def test_a_compiler_that_takes_too_long_costs_only_speed_and_says_so(cache, monkeypatch, caplog):
    slow = cache / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setenv("CXX", str(slow))
    monkeypatch.setenv("QUIRE_CPU_BUILD_TIMEOUT", "0.1")
    why = works_without_the_library(caplog).why
    assert "wasn't done after 0.1 s" in why
    assert "QUIRE_CPU_BUILD_TIMEOUT sets how long" in caplog.text


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan", "inf", "1e300"])
def test_a_time_that_is_none_is_refused_by_name(monkeypatch, value):
    monkeypatch.setenv("QUIRE_CPU_BUILD_TIMEOUT", value)
    with pytest.raises(KernelsUnavailable, match="must be a number of seconds") as error:
        build.timeout_s()
    assert error.value.param == "QUIRE_CPU_BUILD_TIMEOUT"


def test_the_log_says_that_kernels_are_being_built(tiny, caplog):
    caplog.set_level(logging.INFO)
    build.library_for(features.choose("scalar"))
    assert "building the CPU kernels for scalar" in caplog.text


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"QUIRE_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/quire"),
        ({"HOME": "/c"}, "/c/.cache/quire"),
    ],
)
def test_libraries_and_converted_files_have_one_cache(monkeypatch, variables, folder):
    for name in ("QUIRE_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert build.cache_dir() == cache_folder.cache_dir() == Path(folder)
