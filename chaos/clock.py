"""The clock of the instance's processes, which can be shifted while they run."""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
from pathlib import Path

_BYTES = 8
#: Overrides functions of the C library: they add the offset in the first 8 bytes of file `CLOCK`.
_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile long *shift;

__attribute__((constructor)) static void begin(void) {
    int file = open(CLOCK, O_RDONLY | O_CLOEXEC);
    if (file < 0) return;
    void *at = mmap(0, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
    if (at != MAP_FAILED) shift = at;
    close(file);
}

int clock_gettime(clockid_t id, struct timespec *found) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real ? real(id, found) : (int)syscall(SYS_clock_gettime, id, found);
    if (!failed && shift && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE))
        found->tv_sec += *shift;
    return failed;
}

int gettimeofday(struct timeval *found, void *zone) {
    struct timespec now;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &now)) return -1;
    found->tv_sec = now.tv_sec;
    found->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *found) {
    struct timespec now;
    if (clock_gettime(CLOCK_REALTIME, &now)) return (time_t)-1;
    if (found) *found = now.tv_sec;
    return now.tv_sec;
}
"""


class Clock:
    """An offset to the system clock, which all processes of the instance apply immediately.

    Args:
        folder: folder for its files. Without a C compiler `why_not` says why it can't be used.
        enabled: if false, the processes use the system clock.
    """

    def __init__(self, folder: Path, *, enabled: bool = True) -> None:
        self._file, self._library = folder / "clock", folder / "clock.so"
        self._file.write_bytes(bytes(_BYTES))
        self.why_not = _compiled(self._library, self._file) if enabled else "nobody asked for it"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for the instance's processes."""
        if self.why_not:
            return {}
        loaded = ":".join(filter(None, (str(self._library), os.environ.get("LD_PRELOAD", ""))))
        return {"LD_PRELOAD": loaded}

    def shift(self, seconds: int) -> None:
        """Shift the clock forward; a negative value shifts it back."""
        with self._file.open("r+b") as file, mmap.mmap(file.fileno(), _BYTES) as mapped:
            previous = int.from_bytes(mapped[:], "little", signed=True)
            mapped[:] = (previous + seconds).to_bytes(_BYTES, "little", signed=True)


def _compiled(library: Path, clock: Path) -> str:
    """Compile the library that reads this file; return why that failed, or ""."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return "setting the processes' clock takes a C compiler"
    command = [compiler, "-O2", "-shared", "-fPIC", f'-DCLOCK="{clock}"', "-x", "c", "-"]
    command += ["-o", str(library), "-ldl"]
    done = subprocess.run(command, input=_SOURCE, capture_output=True, text=True, check=False)
    return done.stderr.strip()[:500] if done.returncode else ""
