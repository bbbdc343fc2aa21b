"""Compiles the C++ library at first use and keeps it in a cache.

`python -m kernels.cpu.build` builds it ahead of time for this CPU, with `--all` for every CPU of
this architecture into `SHIPPED`: for an image that has no compiler.
"""

from __future__ import annotations

import argparse
import atexit
import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from kernels.cpu.features import EXTRAS, NEEDS, Variant, candidates
from kernels.errors import CpuKernelsUnavailable, KernelsUnavailable, VariantUnavailable

PREFIX = "build-"
STALE_S = 3600.0
"""A folder that nobody holds and nothing was written to for so long is left over."""
_LOCK_FILE = "held"

logger = logging.getLogger(__name__)


@contextmanager
def workplace(parent: Path) -> Iterator[Path]:
    """A new folder in `parent` until the block ends, held for as long as this process lives.

    What killed builds left beside it goes. Raises OSError where `parent` can't be written.
    """
    remove_stale(parent)
    with tempfile.TemporaryDirectory(dir=parent, prefix=PREFIX) as name:
        folder = Path(name)
        with (folder / _LOCK_FILE).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield folder


def remove_stale(parent: Path) -> None:
    """Remove folders of builds that have ended without doing so. Never raises."""
    for folder in parent.glob(f"{PREFIX}*"):
        try:
            if folder.is_symlink() or not folder.is_dir() or _age(folder) < STALE_S:
                continue
            if not _is_locked(folder):
                logger.info("removing %s, left by a build that was ended", folder)
                shutil.rmtree(folder)
        except OSError as error:  # owned by another user, or another process was faster
            logger.debug("%s stays: %s", folder, error)


def _age(folder: Path) -> float:
    """Seconds since anything in it was written: compilers may outlive who started them."""
    written = [path.stat().st_mtime for path in (folder, *folder.iterdir())]
    return time.time() - max(written)


def _is_locked(folder: Path) -> bool:
    """Whether its build is running. The system releases a process's locks when it ends."""
    path = folder / _LOCK_FILE
    if not path.exists():
        return False
    with path.open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


SOURCES = Path(__file__).parent / "src"
SHIPPED = Path(__file__).parent / "libraries"
"""Libraries that came with the program, read-only."""
# No contraction behind our back: each sum is fused or not as written, alike in every variant of a
# kernel, which is what makes a row's result independent of its batch.
FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-pthread", "-ffp-contract=off", "-fno-math-errno",
    "-fno-trapping-math", "-fno-gnu-unique", "-w",
)  # fmt: skip
COMMON = "vec.h"
"""The header that nearly all sources begin with."""
TIMEOUT = "QUIRE_CPU_BUILD_TIMEOUT"
DEFAULT_TIMEOUT_S = 1800.0
"""For each source: seconds on an idle machine, half an hour of turns on a very busy one."""
SEAL_BYTES = hashlib.sha256().digest_size

SANITIZE = "QUIRE_CPU_SANITIZE"
SANITIZERS = {
    "address": ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
    "thread": ("-fsanitize=thread",),
}
"""Flags of builds that watch themselves; `python -m tests.kernels.sanitize` runs tests on them."""


def cache_dir() -> Path:
    """QUIRE_CACHE_DIR, or ~/.cache/quire."""
    named = os.environ.get("QUIRE_CACHE_DIR")
    try:
        return Path(named) if named else Path.home() / ".cache" / "quire"
    except RuntimeError as error:  # a user without a home, as containers have them
        raise CpuKernelsUnavailable(f"QUIRE_CACHE_DIR is unset: {error}") from error


def best_library(isa: str | None = None) -> tuple[Variant, Path, str]:
    """The first of the `candidates` that can be had, with what `library_for` says of it.

    Raises as `library_for` does for the best of them.
    """
    refused: list[VariantUnavailable] = []
    for variant in candidates(isa):
        try:
            return variant, *library_for(variant)
        except VariantUnavailable as error:
            refused.append(error)
            logger.info("no kernels for %s: %s", "+".join(variant.features) or variant.isa, error)
    raise refused[0]


def library_for(variant: Variant) -> tuple[Path, str]:
    """Path of the library for `variant`, compiled if need be, and a word on where it came from.

    Raises `VariantUnavailable` when there is neither a compiler nor a cached library, or when the
    compiler doesn't know the variant's flags; `CpuKernelsUnavailable` when the compiler fails, or
    when nothing can be written. Where only the cache can't be, the library is this process's own.
    """
    stem = f"kernels-{variant.isa}-{_digest(variant)}"
    if shipped := _prebuilt(SHIPPED, stem):
        return shipped, "shipped"
    compiler = find_compiler()
    if compiler is None:
        if cached := _prebuilt(cache_dir(), stem):
            return cached, "from the cache"
        raise VariantUnavailable("there is no C++ compiler (g++, or what CXX names)")
    started = time.perf_counter()
    try:
        target = cache_dir() / f"{stem}-{_hash(_run([compiler, '--version']))}.so"
        if _usable(target):
            return target, "from the cache"
        with _locked(target.with_suffix(".lock")):
            if not _usable(target):  # another process may have built it meanwhile
                _check_flags(compiler, variant)
                _compile(compiler, variant, target)
    except OSError as error:
        logger.warning("can't keep kernels in %s: %s; each start builds them", cache_dir(), error)
        target = _build_for_now(compiler, variant)
    return target, f"built in {time.perf_counter() - started:.1f} s"


def _build_for_now(compiler: str, variant: Variant) -> Path:
    """A library that is deleted when this process ends. Raises as `library_for` does."""
    try:
        folder = tempfile.mkdtemp(prefix="quire-kernels-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        target = Path(folder) / f"{variant.isa}.so"
        _check_flags(compiler, variant)
        _compile(compiler, variant, target)
    except OSError as error:
        raise CpuKernelsUnavailable(f"can't build in {tempfile.gettempdir()}: {error}") from error
    return target


def find_compiler() -> str | None:
    """$CXX if set, else the first of g++, c++ and clang++ on the PATH."""
    named = os.environ.get("CXX")
    paths = (shutil.which(name) for name in ([named] if named else ["g++", "c++", "clang++"]))
    return next(filter(None, paths), None)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def flags_for(variant: Variant) -> list[str]:
    """The compiler's flags. Raises `KernelsUnavailable` for a sanitizer that isn't known."""
    named = os.environ.get(SANITIZE)
    if not named:
        return [*FLAGS, *variant.flags]
    if named not in SANITIZERS:
        supported = ", ".join(SANITIZERS)
        raise KernelsUnavailable(f"{SANITIZE} must be one of {supported}; got {named!r}.", SANITIZE)
    watched = ("-O1", "-g", "-fno-omit-frame-pointer", *SANITIZERS[named])
    return [*FLAGS, *variant.flags, *watched]


def _digest(variant: Variant) -> str:
    """Hash of everything but the compiler that the library is made from."""
    parts = flags_for(variant)
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in (".cpp", ".h"):
            parts += [path.name, path.read_text()]
    return _hash("\0".join(parts))


def _prebuilt(folder: Path, stem: str) -> Path | None:
    """A library that some compiler built from these very sources."""
    return next((path for path in folder.glob(f"{stem}-*.so") if _usable(path)), None)


def _usable(path: Path) -> bool:
    """Whether `path` is a library that nobody else could have put there, and whole.

    A full disk or a lost machine leaves files with parts missing, which loading may die of.
    """
    try:
        status = path.stat()
        if status.st_uid not in (os.getuid(), 0) or status.st_mode & 0o022:
            return False
        content = path.read_bytes()
    except OSError:
        return False
    return content[-SEAL_BYTES:] == _seal(content[:-SEAL_BYTES])


def _seal(content: bytes) -> bytes:
    """The data appended to a library; loaders ignore everything after its sections."""
    return hashlib.sha256(content).digest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _check_flags(compiler: str, variant: Variant) -> None:
    """Raise `VariantUnavailable` when the compiler is older than the variant's instructions."""
    try:
        _run([compiler, *variant.flags, "-fsyntax-only", "-x", "c++", os.devnull])
    except CpuKernelsUnavailable as error:
        raise VariantUnavailable(str(error)) from error


def _compile(compiler: str, variant: Variant, target: Path) -> None:
    """Compile each source on its own, side by side, then link and move into place at once."""
    flags = flags_for(variant)
    logger.info(
        "building the CPU kernels for %s, once: seconds, or minutes on a busy machine", variant.isa
    )
    with workplace(target.parent) as folder:
        begin = _read_ahead(compiler, flags, Path(folder))

        def one(source: Path) -> str:
            target_file = f"{folder}/{source.stem}.o"
            _run([compiler, *flags, *begin, "-c", str(source), "-o", target_file])
            return target_file

        with ThreadPoolExecutor(_num_cpus()) as pool:
            objects = list(pool.map(one, sorted(SOURCES.glob("*.cpp"))))
        linked = f"{folder}/library.so"
        _run([compiler, *flags, "-shared", *objects, "-o", linked])
        with open(linked, "r+b") as file:
            content = file.read()
            file.write(_seal(content))
        os.chmod(linked, 0o755)  # noqa: S103 - what a linker makes
        os.replace(linked, target)


def _read_ahead(compiler: str, flags: list[str], folder: Path) -> list[str]:
    """Flags by which sources begin with what was read once for all: the compiler's own header of
    instructions is most of what a small source takes. None where the compiler can't have it so.
    """
    header = folder / "ahead.h"
    header.write_text(f'#include "{SOURCES / COMMON}"\n')
    begin = ["-include", str(header)]
    try:
        _run([compiler, *flags, "-x", "c++-header", str(header), "-o", f"{header}.gch"])
        _run([compiler, *flags, *begin, "-fsyntax-only", "-x", "c++", os.devnull])
    except CpuKernelsUnavailable as error:
        logger.info("each source reads its headers by itself: %s", error)
        return []
    return begin


def timeout_s() -> float:
    """Timeout of a compiler. Raises `KernelsUnavailable` for a value that isn't positive."""
    named = os.environ.get(TIMEOUT)
    try:
        seconds = float(named) if named else DEFAULT_TIMEOUT_S
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < threading.TIMEOUT_MAX:
        raise KernelsUnavailable(f"{TIMEOUT} must be a number of seconds; got {named!r}.", TIMEOUT)
    return seconds


def _num_cpus() -> int:
    """CPUs that this process may run on: of a machine's many a container may have one."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _run(command: list[str]) -> str:
    """Standard output of `command`; raises `CpuKernelsUnavailable` with its words when it fails."""
    limit = timeout_s()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired as error:
        raise CpuKernelsUnavailable(
            f"{command[0]} wasn't done after {limit:g} s with {Path(command[-1]).stem}; the next "
            f"start tries again, and {TIMEOUT} sets how long it may take"
        ) from error
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
        raise CpuKernelsUnavailable(f"{command[0]} failed ({done.returncode}): {lines[0]}")
    return done.stdout


def build_all() -> list[Path]:
    """Build every variant that the compiler knows into `SHIPPED`, anew.

    Raises `CpuKernelsUnavailable` without a compiler, or when it fails.
    """
    compiler = find_compiler()
    if compiler is None:
        raise CpuKernelsUnavailable("there is no C++ compiler (g++, or what CXX names)")
    variants = [
        Variant(isa, features)
        for isa, needs in NEEDS.items()
        for features in dict.fromkeys((needs + EXTRAS.get(isa, ()), needs))
    ]
    shutil.rmtree(SHIPPED, ignore_errors=True)
    SHIPPED.mkdir()
    paths = []
    for variant in variants:
        try:
            _check_flags(compiler, variant)
        except VariantUnavailable as error:  # of another architecture, or newer than the compiler
            logger.warning("no kernels for %s: %s", "+".join(variant.features), error)
            continue
        name = f"kernels-{variant.isa}-{_digest(variant)}-{_hash(_run([compiler, '--version']))}.so"
        _compile(compiler, variant, SHIPPED / name)
        paths.append(SHIPPED / name)
    return paths


def main() -> None:
    """Build what the command line asks for, and print where it is."""
    parser = argparse.ArgumentParser(prog="python -m kernels.cpu.build", description=__doc__)
    parser.add_argument("--all", action="store_true", help="for every CPU of this architecture")
    if parser.parse_args().all:
        print(*build_all(), sep="\n")
    else:
        print(*best_library()[1:])


if __name__ == "__main__":
    main()
