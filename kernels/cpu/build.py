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
"""Age in seconds at which an unlocked build folder counts as abandoned."""
_LOCK_FILE = "held"

logger = logging.getLogger(__name__)


@contextmanager
def workplace(parent: Path) -> Iterator[Path]:
    """Create a folder in `parent`, deleted at the end of the block and locked while the process
    lives.

    Removes folders of killed builds. Raises OSError if `parent` can't be written.
    """
    remove_stale(parent)
    with tempfile.TemporaryDirectory(dir=parent, prefix=PREFIX) as name:
        folder = Path(name)
        with (folder / _LOCK_FILE).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield folder


def remove_stale(parent: Path) -> None:
    """Remove folders of builds that were killed. Never raises."""
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
    """Return the seconds since the last write: compilers may outlive their parent process."""
    written = [path.stat().st_mtime for path in (folder, *folder.iterdir())]
    return time.time() - max(written)


def _is_locked(folder: Path) -> bool:
    """Return whether its build is running. The system releases a process's locks when it ends."""
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
"""Libraries shipped with the program, read-only."""
# The compiler must not contract sums: each is fused or not as written, equally in every variant of
# a kernel, so that a row's result doesn't depend on its batch.
FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-pthread", "-ffp-contract=off", "-fno-math-errno",
    "-fno-trapping-math", "-fno-gnu-unique", "-w",
)  # fmt: skip
COMMON = "vec.h"
"""The header that nearly all sources include first."""
TIMEOUT = "QUIRE_CPU_BUILD_TIMEOUT"
DEFAULT_TIMEOUT_S = 1800.0
"""Timeout of a compiler run. A source takes seconds on an idle machine, but up to half an hour on a
very busy one.
"""
SEAL_BYTES = hashlib.sha256().digest_size

SANITIZE = "QUIRE_CPU_SANITIZE"
SANITIZERS = {
    "address": ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
    "thread": ("-fsanitize=thread",),
}
"""Flags of sanitizer builds; `python -m tests.kernels.sanitize` runs tests on them."""


def cache_dir() -> Path:
    """Return QUIRE_CACHE_DIR, by default `quire` in the user's cache."""
    named, base = os.environ.get("QUIRE_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(named) if named else Path(base or Path.home() / ".cache") / "quire"
    except RuntimeError as error:  # a user without a home, as in containers
        raise CpuKernelsUnavailable(f"QUIRE_CACHE_DIR is unset: {error}") from error


def best_library(isa: str | None = None) -> tuple[Variant, Path, str]:
    """Return the first available one of the `candidates`, with the results of `library_for`.

    Raises the error of `library_for` for the best candidate if there is none.
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
    """Return the path of the library for `variant`, compiled if necessary, and its origin in words.

    Raises `VariantUnavailable` if there is neither a compiler nor a cached library, or if the
    compiler doesn't know the variant's flags; `CpuKernelsUnavailable` if the compiler fails, or if
    nothing can be written. If only the cache can't be written, the library belongs to this process.
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
    """Build a library that is deleted when this process ends. Raises like `library_for`."""
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
    """Return $CXX if set, else the first of g++, c++ and clang++ on the PATH."""
    named = os.environ.get("CXX")
    paths = (shutil.which(name) for name in ([named] if named else ["g++", "c++", "clang++"]))
    return next(filter(None, paths), None)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def flags_for(variant: Variant) -> list[str]:
    """Return the compiler's flags. Raises `KernelsUnavailable` for an unknown sanitizer."""
    named = os.environ.get(SANITIZE)
    if not named:
        return [*FLAGS, *variant.flags]
    if named not in SANITIZERS:
        supported = ", ".join(SANITIZERS)
        raise KernelsUnavailable(f"{SANITIZE} must be one of {supported}; got {named!r}.", SANITIZE)
    watched = ("-O1", "-g", "-fno-omit-frame-pointer", *SANITIZERS[named])
    return [*FLAGS, *variant.flags, *watched]


def _digest(variant: Variant) -> str:
    """Return the hash of the library's sources and flags, without the compiler."""
    parts = flags_for(variant)
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in (".cpp", ".h"):
            parts += [path.name, path.read_text()]
    return _hash("\0".join(parts))


def _prebuilt(folder: Path, stem: str) -> Path | None:
    """Return a library that any compiler built from exactly these sources, or None."""
    return next((path for path in folder.glob(f"{stem}-*.so") if _usable(path)), None)


def _usable(path: Path) -> bool:
    """Return whether `path` is a complete library that no other user could have written.

    A full disk or a crash leaves truncated files, which could crash the process that loads them.
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
    """Return the hash appended to a library; loaders ignore everything after its sections."""
    return hashlib.sha256(content).digest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _check_flags(compiler: str, variant: Variant) -> None:
    """Raise `VariantUnavailable` if the compiler is older than the variant's instructions."""
    try:
        _run([compiler, *variant.flags, "-fsyntax-only", "-x", "c++", os.devnull])
    except CpuKernelsUnavailable as error:
        raise VariantUnavailable(str(error)) from error


def _compile(compiler: str, variant: Variant, target: Path) -> None:
    """Compile the sources in parallel, link them, and move the library into place atomically."""
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
    """Return flags to use a precompiled header, or none if the compiler doesn't support it.

    The compiler's own header of intrinsics is most of the work of a small source.
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
    """Return the timeout of a compiler run. Raises `KernelsUnavailable` unless it is positive."""
    named = os.environ.get(TIMEOUT)
    try:
        seconds = float(named) if named else DEFAULT_TIMEOUT_S
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < threading.TIMEOUT_MAX:
        raise KernelsUnavailable(f"{TIMEOUT} must be a number of seconds; got {named!r}.", TIMEOUT)
    return seconds


def _num_cpus() -> int:
    """Return the number of CPUs that this process may use, at most those of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _run(command: list[str]) -> str:
    """Return the standard output of `command`; raises `CpuKernelsUnavailable` if it fails."""
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
    """Build every variant that the compiler knows into `SHIPPED`, from scratch.

    Raises `CpuKernelsUnavailable` without a compiler, or if it fails.
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
    """Build the requested libraries, and print their paths."""
    parser = argparse.ArgumentParser(prog="python -m kernels.cpu.build", description=__doc__)
    parser.add_argument("--all", action="store_true", help="for every CPU of this architecture")
    if parser.parse_args().all:
        print(*build_all(), sep="\n")
    else:
        print(*best_library()[1:])


if __name__ == "__main__":
    main()
